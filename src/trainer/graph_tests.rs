use super::recorder::Work;
use super::*;
use crate::event::{Event, Observer};
use crate::tensor::autograd::clear_grad;
use crate::tensor::rng;
use crate::tensor::weights::Staged;
use crate::trainer::fixture::plain;
use crate::trainer::run::{self, Session};
use crate::trainer::{Batches, TrainConfig, Validation, precision::Precision};
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const WIDTH: i64 = 8;
const STEP: i64 = 4;

/// A layer with dropout over rows of texts of different lengths, padded to multiples of [`STEP`] in every mode, so that
/// dropout draws the same numbers. A parameter without a gradient is among the trained ones.
struct Toy {
    weight: Tensor,
    unused: Tensor,
    steps: u64,
    slow: Rc<Cell<Duration>>,
    family: Cell<u64>,
}

impl Toy {
    fn new(steps: u64) -> Self {
        rng::seed(5);
        let weight = Tensor::randn([WIDTH, WIDTH], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let unused = Tensor::ones([WIDTH], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        Self { weight, unused, steps, slow: Rc::default(), family: Cell::new(0) }
    }

    fn inputs(rows: i64, whole: Weight) -> Vec<Tensor> {
        let padded = (rows + STEP - 1) / STEP * STEP;
        let values = Tensor::arange(rows * WIDTH, (Kind::Float, Device::Cpu)).view([rows, WIDTH]).sin();
        let keep = Tensor::ones([rows, 1], (Kind::Float, Device::Cpu));
        let pad = [0, 0, 0, padded - rows];
        vec![values.constant_pad_nd(pad), keep.constant_pad_nd(pad), Tensor::from_slice(&[whole.samples])]
    }

    fn loss_of(&self, inputs: &[Tensor]) -> Loss {
        std::thread::sleep(self.slow.get());
        let outputs = inputs[0].matmul(&self.weight).dropout(0.3, true).tanh();
        let total = (((outputs - 0.5).square() * &inputs[1]).sum(Kind::Float) / &inputs[2]).sum(Kind::Float);
        Loss { parts: vec![("part", total.detach())], total }
    }
}

impl Task for Toy {
    type Batch = i64;

    fn parameters(&self) -> Vec<Parameter> {
        let named = |name: &str, tensor: &Tensor| Parameter { name: name.into(), tensor: tensor.shallow_clone() };
        vec![named("toy/weight", &self.weight), named("toy/unused", &self.unused)]
    }

    fn steps_per_epoch(&self) -> u64 {
        self.steps
    }

    fn batches(&self, _epoch: u64, first: u64) -> Result<Batches<'_, i64>> {
        // lengths of three buckets, one of them rare
        let rows = |step: i64| vec![step % 4 + 1, if step % 11 == 7 { 9 } else { step % 3 + 5 }];
        Ok(Box::new((first..self.steps).map(move |step| Ok(rows(i64::try_from(step).unwrap())))))
    }

    #[expect(clippy::cast_precision_loss, reason = "small")]
    fn weight(&self, rows: &i64) -> Weight {
        Weight { samples: *rows as f64, tokens: 0.0 }
    }

    fn loss(&self, rows: &i64, whole: Weight, _epoch: u64) -> Result<Loss> {
        Ok(self.loss_of(&Self::inputs(*rows, whole)))
    }

    fn recordable(&self, rows: &i64, whole: Weight, _epoch: u64) -> Result<Option<Recordable<'_>>> {
        let inputs = Self::inputs(*rows, whole);
        let fixed: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
        let family = self.family.get();
        let bucket = vec![inputs[0].size()[0], i64::try_from(family).unwrap()];
        let label = format!("{} rows", bucket[0]);
        Ok(Some(Recordable { bucket, label, family, inputs, loss: Box::new(move || Ok(self.loss_of(&fixed))) }))
    }

    fn validate(&self, _observer: &dyn Observer) -> Result<Option<Validation>> {
        Ok(None)
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        Ok(())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}

#[derive(Default)]
struct Heard {
    losses: Mutex<Vec<Vec<(String, f64)>>>,
    notes: Mutex<Vec<String>>,
}

impl Observer for Heard {
    fn on(&self, event: &Event) {
        match event {
            Event::Step(report) => self.losses.lock().unwrap().push(report.losses.clone()),
            Event::Note(text) => self.notes.lock().unwrap().push(text.clone()),
            _ => (),
        }
    }
}

fn config(graph: Switch, precision: Precision) -> TrainConfig {
    TrainConfig { accumulation: 2, weight_decay: 0.1, clip_norm: 1.0, precision, graph, ema_decay: 0.5, ..plain() }
}

fn trained(graph: Switch, precision: Precision) -> (Toy, Heard) {
    let (task, heard) = (Toy::new(24), Heard::default());
    let folder = tempfile::tempdir().unwrap();
    let session = Session {
        config: &config(graph, precision),
        folder: folder.path(),
        resume: false,
        profile: None,
        observer: &heard,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: true,
    };
    run::run(&task, &session).unwrap();
    (task, heard)
}

#[test]
fn recorded_steps_train_as_plain_ones_do() {
    let _turn = rng::TURN.lock();
    for precision in [Precision::Fp32, Precision::Fp16] {
        let (plain, plainly) = trained(Switch::Off, precision);
        let (recorded, heard) = trained(Switch::On, precision);
        assert_eq!(*plainly.losses.lock().unwrap(), *heard.losses.lock().unwrap());
        assert_eq!(plain.weight, recorded.weight);
        assert_eq!(plain.unused, recorded.unused, "no gradient, no decay");
        let notes = heard.notes.lock().unwrap();
        let of_bucket =
            |rows: i64| notes.iter().filter(|note| note.contains(&format!("recorded {rows} rows,"))).count();
        assert_eq!((of_bucket(4), of_bucket(8), of_bucket(12)), (1, 1, 0), "12 rows are rare: {notes:?}");
        assert!(notes.iter().any(|note| note.contains("recorded the optimizer's step")), "{notes:?}");
        assert!(plainly.notes.lock().unwrap().is_empty());
    }
}

/// What a test makes of a recording.
#[derive(Clone)]
struct Fake {
    refuses: bool,
    /// Recordings after which it refuses.
    most: usize,
    made: Rc<Cell<usize>>,
    /// What a replay multiplies the loss and what is added to the gradients by.
    wrong: f64,
    takes: Duration,
    /// How long a pass of the task takes.
    slow: Rc<Cell<Duration>>,
    replays: Rc<Cell<usize>>,
    weight: Rc<Tensor>,
}

impl Fake {
    fn of(task: &Toy) -> Self {
        let (slow, weight) = (Rc::clone(&task.slow), Rc::new(task.weight.shallow_clone()));
        Self {
            refuses: false,
            most: usize::MAX,
            made: Rc::default(),
            wrong: 1.0,
            takes: Duration::ZERO,
            slow,
            replays: Rc::default(),
            weight,
        }
    }
}

impl Recorder for Fake {
    fn record(&mut self, work: &Work) -> Result<Box<dyn Recording>> {
        if self.refuses {
            // as a real recording that fails half way
            work()?;
            return Err(Error::Torch { reason: "it waits for the card".into() });
        }
        if self.made.get() == self.most {
            return Err(Error::Torch { reason: "it has no place".into() });
        }
        self.made.set(self.made.get() + 1);
        Ok(Box::new(self.clone()))
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

impl Recording for Fake {
    fn replay(&mut self, work: &Work) -> Result<Numbers> {
        self.replays.set(self.replays.get() + 1);
        let slow = self.slow.replace(self.takes);
        let numbers = work();
        self.slow.set(slow);
        let mut grad = self.weight.grad();
        if grad.defined() {
            let _ = grad.g_mul_scalar_(self.wrong);
        }
        numbers
    }
}

fn clear(task: &Toy) {
    clear_grad(&task.weight);
    clear_grad(&task.unused);
}

/// Runs steps of one micro-batch of `rows` rows each.
fn steps<'a>(graphs: &mut Graphs<'a>, task: &'a Toy, rows: impl IntoIterator<Item = i64>) {
    let (params, scaler) = (task.parameters(), Scaler::new(Precision::Fp32));
    for rows in rows {
        clear(task);
        graphs.accumulate(task, &[rows], &scaler, 0, &params).unwrap();
    }
}

#[test]
fn what_cannot_be_recorded_runs_as_ever_and_says_why() {
    let _turn = rng::TURN.lock();
    let task = Toy::new(1);
    let fake = Fake { refuses: true, ..Fake::of(&task) };
    let mut graphs = Graphs::with_recorder(Switch::On, Box::new(fake));
    rng::seed(1);
    steps(&mut graphs, &task, [4; 3]);
    assert!(graphs.is_on() && graphs.take_notes().is_empty());
    steps(&mut graphs, &task, [4]);
    assert!(!graphs.is_on());
    let notes = graphs.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("it waits for the card"), "{notes:?}");
    steps(&mut graphs, &task, [4]);
    rng::seed(9);
    steps(&mut graphs, &task, [4]);
    let grad = task.weight.grad().copy();
    rng::seed(9);
    steps(&mut Graphs::off(), &task, [4]);
    assert_eq!(grad, task.weight.grad());
}

/// Gradients and losses of a step of two micro-batches in one bucket.
fn two_passes<'a>(graphs: &mut Graphs<'a>, task: &'a Toy) -> (Tensor, Vec<f64>) {
    clear(task);
    rng::seed(4);
    let (_, losses) = graphs.accumulate(task, &[3, 4], &Scaler::new(Precision::Fp32), 0, &task.parameters()).unwrap();
    (task.weight.grad().copy(), losses.iter().map(|(_, loss)| loss.double_value(&[])).collect())
}

#[test]
fn a_replay_that_differs_from_its_pass_is_not_used() {
    let _turn = rng::TURN.lock();
    let task = Toy::new(1);
    let mut graphs = Graphs::with_recorder(Switch::On, Box::new(Fake { wrong: 1.1, ..Fake::of(&task) }));
    let expected = two_passes(&mut Graphs::off(), &task);
    for _ in 0..4 {
        assert_eq!(two_passes(&mut graphs, &task), expected);
    }
    assert!(!graphs.is_on());
    let notes = graphs.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("the gradient of `toy/weight` is"), "{notes:?}");
}

#[test]
fn a_comparison_decides_for_the_faster_way() {
    let _turn = rng::TURN.lock();
    for (plain_ms, replay_ms) in [(0, 20), (20, 0)] {
        let task = Toy::new(1);
        task.slow.set(Duration::from_millis(plain_ms));
        let fake = Fake { takes: Duration::from_millis(replay_ms), ..Fake::of(&task) };
        let replays = Rc::clone(&fake.replays);
        let mut graphs = Graphs::with_recorder(Switch::Auto, Box::new(fake));
        steps(&mut graphs, &task, [4; 4]);
        assert_eq!((graphs.recordings(), replays.get()), (1, 1));
        steps(&mut graphs, &task, [4; 2 * COMPARED]);
        assert_eq!(replays.get(), 1 + COMPARED, "they take turns");
        let notes = graphs.take_notes();
        let wins = replay_ms < plain_ms;
        assert_eq!(graphs.is_on(), wins, "{notes:?}");
        assert!(notes.iter().any(|note| note.contains("ms replayed and") && note.contains("nothing to gain") != wins));
        steps(&mut graphs, &task, [4; 3]);
        assert_eq!(replays.get(), 1 + COMPARED + if wins { 3 } else { 0 });
    }
}

#[test]
fn other_gradients_and_another_scale_begin_anew() {
    let _turn = rng::TURN.lock();
    let task = Toy::new(1);
    let fake = Fake { takes: Duration::from_millis(1), ..Fake::of(&task) };
    task.slow.set(Duration::from_millis(20));
    let made = Rc::clone(&fake.made);
    let mut graphs = Graphs::with_recorder(Switch::Auto, Box::new(fake));
    steps(&mut graphs, &task, [4; 6]);
    assert_eq!((graphs.recordings(), made.get()), (1, 1), "two ways are compared");
    // the class head stops to learn in the middle of the comparison
    task.family.set(1);
    steps(&mut graphs, &task, [4; 5]);
    assert_eq!((graphs.recordings(), made.get()), (1, 2));
    steps(&mut graphs, &task, [4; 2 * COMPARED]);
    assert!(graphs.trial.is_none(), "the comparison began anew and ended: {:?}", graphs.take_notes());
    let mut scaler = Scaler::new(Precision::Fp16);
    let scaled = |graphs: &mut Graphs<'_>, scaler: &Scaler| {
        clear(&task);
        graphs.begin_step(scaler, &task.parameters()).unwrap();
        graphs.recordings()
    };
    assert_eq!(scaled(&mut graphs, &scaler), 0, "the scale is a constant of recordings");
    steps_scaled(&mut graphs, &task, &scaler);
    assert_eq!(scaled(&mut graphs, &scaler), 1);
    assert!(!scaler.update(false), "an overflow");
    assert_eq!(scaled(&mut graphs, &scaler), 0);
}

fn steps_scaled<'a>(graphs: &mut Graphs<'a>, task: &'a Toy, scaler: &Scaler) {
    clear(task);
    graphs.accumulate(task, &[4], scaler, 0, &task.parameters()).unwrap();
}

#[test]
fn an_optimizer_that_cannot_be_recorded_steps_as_ever() {
    let _turn = rng::TURN.lock();
    let [plain, refused] = [usize::MAX, 1].map(|most| {
        let task = Toy::new(1);
        let fake = Fake { most, ..Fake::of(&task) };
        let config = config(Switch::On, Precision::Fp32);
        let mut optimizer = AdamW::new(task.parameters(), &config);
        let mut graphs = Graphs::with_recorder(Switch::On, Box::new(fake));
        for step in 0..12 {
            clear(&task);
            rng::seed(step);
            graphs.accumulate(&task, &[4], &Scaler::new(Precision::Fp32), 0, &task.parameters()).unwrap();
            graphs.step(&mut optimizer, 1e-2, 1.0).unwrap();
            assert!(!optimizer.is_torn());
        }
        (task.weight.copy(), graphs.take_notes().join("; "))
    });
    assert_eq!(plain.0, refused.0);
    assert!(plain.1.contains("recorded the optimizer's step"), "{}", plain.1);
    assert!(refused.1.contains("runs as ever: libtorch: it has no place"), "{}", refused.1);
}

#[test]
fn recordings_are_few_and_those_of_frequent_buckets() {
    let _turn = rng::TURN.lock();
    let task = Toy::new(1);
    let mut graphs = Graphs::new(Switch::On, Device::Cpu, false);
    let most = i64::try_from(MOST_RECORDINGS).unwrap();
    for bucket in 1..=most + 2 {
        steps(&mut graphs, &task, [bucket * STEP; 6]);
    }
    assert_eq!(graphs.recordings(), MOST_RECORDINGS);
    let of_ninth = |graphs: &Graphs| matches!(graphs.buckets[&vec![(most + 1) * STEP, 0]], State::Recorded { .. });
    assert!(!of_ninth(&graphs));
    steps(&mut graphs, &task, [(most + 1) * STEP; 8]);
    assert!(of_ninth(&graphs), "it came far more often than another one");
    assert_eq!(graphs.recordings(), MOST_RECORDINGS);
}

#[test]
fn nothing_is_recorded_where_nothing_can_be_gained() {
    assert!(!Graphs::new(Switch::Off, Device::Cpu, true).is_on());
    assert!(!Graphs::new(Switch::Auto, Device::Cpu, true).is_on(), "the CPU gains nothing");
    assert!(!Graphs::new(Switch::Auto, Device::Cuda(0), false).is_on(), "no room");
    assert!(Graphs::new(Switch::On, Device::Cpu, false).is_on());
}

#[test]
fn inputs_of_another_shape_are_refused() {
    let weight = Weight { samples: 1.0, tokens: 0.0 };
    let task = Toy::new(1);
    let of = |rows| task.recordable(&rows, weight, 0).unwrap().unwrap();
    of(3).take(&of(4)).unwrap();
    assert!(matches!(of(3).take(&of(5)), Err(Error::Shape { .. })));
}

#[test]
fn a_recording_holds_the_bytes_of_its_inputs() {
    let _turns = (rng::TURN.lock(), ledger::TURN.lock());
    ledger::install();
    let task = Toy::new(1);
    let mut graphs = Graphs::new(Switch::On, Device::Cpu, false);
    steps(&mut graphs, &task, [64; 3]);
    clear(&task);
    let before = ledger::usage().allocated;
    steps(&mut graphs, &task, [64]);
    clear(&task);
    let held = ledger::usage().allocated.0 - before.0;
    assert_eq!(Bytes(held), graphs.input_bytes());
    assert_eq!(graphs.input_bytes(), Bytes(64 * WIDTH as u64 * 4 + 64 * 4 + 8));
}
