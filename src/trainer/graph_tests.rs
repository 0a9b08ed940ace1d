use super::backend::GraphWork;
use super::*;
use crate::fixture::plain;
use crate::step::{StepInfo, Stepper};
use crate::{Batches, Ranks, Session, Shard, TrainConfig, precision::Precision, run};
use prsmed_base::event::{Event, Observer};
use prsmed_tensor::autograd::clear_grad;
use prsmed_tensor::rng;
use prsmed_tensor::weights::Staged;
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

    fn inputs(rows: i64, whole: BatchSize) -> Vec<Tensor> {
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
        let named = |name: &str, tensor: &Tensor| Parameter::new(name, tensor.shallow_clone());
        vec![named("toy/weight", &self.weight), named("toy/unused", &self.unused)]
    }

    fn steps_per_epoch(&self) -> u64 {
        self.steps
    }

    fn batches(&self, _epoch: u64, first: u64, _shard: Shard) -> Result<Batches<'_, i64>> {
        // lengths of three buckets, one of them rare
        let rows = |step: i64| vec![step % 4 + 1, if step % 11 == 7 { 9 } else { step % 3 + 5 }];
        Ok(Box::new((first..self.steps).map(move |step| Ok(rows(i64::try_from(step).unwrap())))))
    }

    fn batch_size(&self, rows: &i64) -> BatchSize {
        BatchSize { samples: *rows as f64, ..BatchSize::default() }
    }

    fn loss(&self, rows: &i64, whole: BatchSize, _epoch: u64) -> Result<Loss> {
        Ok(self.loss_of(&Self::inputs(*rows, whole)))
    }

    fn capturable(&self, rows: &i64, whole: BatchSize, _epoch: u64) -> Result<Option<Capturable<'_>>> {
        let inputs = Self::inputs(*rows, whole);
        let fixed: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
        let family = self.family.get();
        let bucket = vec![inputs[0].size()[0], i64::try_from(family).unwrap()];
        let label = format!("{} rows", bucket[0]);
        Ok(Some(Capturable { bucket, label, family, inputs, loss: Box::new(move || Ok(self.loss_of(&fixed))) }))
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        Ok(())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}

#[derive(Default)]
struct RecordedEvents {
    losses: Mutex<Vec<Vec<(String, f64)>>>,
    notes: Mutex<Vec<String>>,
}

impl Observer for RecordedEvents {
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

fn trained(graph: Switch, precision: Precision) -> (Toy, RecordedEvents) {
    let (task, events) = (Toy::new(24), RecordedEvents::default());
    let folder = tempfile::tempdir().unwrap();
    let session = Session {
        config: &config(graph, precision),
        folder: folder.path(),
        settings: "",
        resume: false,
        profile: None,
        observer: &events,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: true,
        ranks: Ranks::default(),
    };
    run(&task, &session).unwrap();
    (task, events)
}

#[test]
fn captured_steps_train_like_eager_ones() {
    let _lock = rng::TEST_LOCK.lock();
    for precision in [Precision::Fp32, Precision::Fp16] {
        let (eager, eager_events) = trained(Switch::Off, precision);
        let (captured, captured_events) = trained(Switch::On, precision);
        assert_eq!(*eager_events.losses.lock().unwrap(), *captured_events.losses.lock().unwrap());
        assert_eq!(eager.weight, captured.weight);
        assert_eq!(eager.unused, captured.unused, "no gradient, no decay");
        let notes = captured_events.notes.lock().unwrap();
        let of_bucket =
            |rows: i64| notes.iter().filter(|note| note.contains(&format!("captured {rows} rows,"))).count();
        assert_eq!((of_bucket(4), of_bucket(8), of_bucket(12)), (1, 1, 0), "12 rows are rare: {notes:?}");
        assert!(notes.iter().any(|note| note.contains("captured the optimizer's update")), "{notes:?}");
        assert!(eager_events.notes.lock().unwrap().is_empty());
    }
}

/// Fake graph backend with errors that a test configures.
#[derive(Clone)]
struct Fake {
    refuses: bool,
    /// Number of captures after which it fails.
    most: usize,
    made: Rc<Cell<usize>>,
    /// Number of captures after which one drops the gradient, as the capture of an update does.
    drops_after: usize,
    /// Factor of a replay's gradients.
    wrong: f64,
    /// Factor of a replay's losses.
    wrong_losses: f64,
    takes: Duration,
    /// Duration of a pass of the task.
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
            drops_after: usize::MAX,
            wrong: 1.0,
            wrong_losses: 1.0,
            takes: Duration::ZERO,
            slow,
            replays: Rc::default(),
            weight,
        }
    }
}

impl GraphBackend for Fake {
    fn capture(&mut self, work: &GraphWork) -> Result<Box<dyn CapturedGraph>> {
        if self.refuses {
            // a real capture fails half-way
            work()?;
            return Err(Error::Torch { reason: "it waits for the GPU".into() });
        }
        if self.made.get() == self.drops_after {
            clear_grad(&self.weight);
        }
        if self.made.get() == self.most {
            let too_large = guard::guard(|| Ok(Tensor::zeros([1 << 50], (Kind::Uint8, Device::Cpu))));
            assert!(too_large.is_err());
            return Err(Error::Torch { reason: "it has no room".into() });
        }
        self.made.set(self.made.get() + 1);
        Ok(Box::new(self.clone()))
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

impl CapturedGraph for Fake {
    fn replay(&mut self, work: &GraphWork) -> Result<Numbers> {
        self.replays.set(self.replays.get() + 1);
        let slow = self.slow.replace(self.takes);
        let numbers = work();
        self.slow.set(slow);
        let mut grad = self.weight.grad();
        if grad.defined() {
            let _ = grad.g_mul_scalar_(self.wrong);
        }
        Ok(numbers?.into_iter().map(|(name, number)| (name, number * self.wrong_losses)).collect())
    }
}

fn clear(task: &Toy) {
    clear_grad(&task.weight);
    clear_grad(&task.unused);
}

/// A stepper of `task` with the given graphs.
fn stepper<'a>(task: &'a Toy, graphs: Graphs<'a>) -> Stepper<'a, Toy> {
    let mut stepper = Stepper::new(task, &config(Switch::Off, Precision::Fp32), false);
    stepper.graphs = graphs;
    stepper
}

/// Runs passes of one micro-batch of `rows` rows each, without the optimizer.
fn passes(stepper: &mut Stepper<'_, Toy>, rows: impl IntoIterator<Item = i64>) {
    for rows in rows {
        stepper.optimizer.clear();
        stepper.accumulate(&[rows], 0, &mut |_, _| Ok(())).unwrap();
    }
}

#[test]
fn failed_captures_run_eagerly_with_a_note() {
    let _lock = rng::TEST_LOCK.lock();
    let task = Toy::new(1);
    let fake = Fake { refuses: true, ..Fake::of(&task) };
    let mut captured = stepper(&task, Graphs::with_backend(Switch::On, Box::new(fake)));
    rng::seed(1);
    passes(&mut captured, [4; 3]);
    assert!(captured.graphs.is_on() && captured.graphs.take_notes().is_empty());
    passes(&mut captured, [4]);
    assert!(!captured.graphs.is_on());
    let notes = captured.graphs.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("it waits for the GPU"), "{notes:?}");
    passes(&mut captured, [4]);
    rng::seed(9);
    passes(&mut captured, [4]);
    let grad = task.weight.grad().copy();
    rng::seed(9);
    passes(&mut stepper(&task, Graphs::off()), [4]);
    assert_eq!(grad, task.weight.grad());
}

/// Gradients and losses of a step of two micro-batches in one bucket.
fn two_passes(stepper: &mut Stepper<'_, Toy>, task: &Toy) -> (Tensor, Vec<f64>) {
    stepper.optimizer.clear();
    rng::seed(4);
    let (_, losses) = stepper.accumulate(&[3, 4], 0, &mut |_, _| Ok(())).unwrap();
    (task.weight.grad().copy(), losses.iter().map(|(_, loss)| loss.double_value(&[])).collect())
}

#[test]
fn a_replay_that_differs_from_its_pass_is_not_used() {
    let _lock = rng::TEST_LOCK.lock();
    for (wrong, wrong_losses, reason) in
        [(1.1, 1.0, "the gradient of `toy/weight` differs"), (1.0, 1.1, "its loss `part` is ")]
    {
        let task = Toy::new(1);
        let fake = Fake { wrong, wrong_losses, ..Fake::of(&task) };
        let mut captured = stepper(&task, Graphs::with_backend(Switch::On, Box::new(fake)));
        let expected = two_passes(&mut stepper(&task, Graphs::off()), &task);
        for _ in 0..4 {
            assert_eq!(two_passes(&mut captured, &task), expected);
        }
        assert!(!captured.graphs.is_on());
        let notes = captured.graphs.take_notes();
        assert!(notes.len() == 1 && notes[0].contains(reason), "{notes:?}");
    }
}

#[test]
fn auto_mode_chooses_the_faster_way() {
    let _lock = rng::TEST_LOCK.lock();
    for (eager_ms, replay_ms) in [(0, 20), (20, 0)] {
        let task = Toy::new(1);
        task.slow.set(Duration::from_millis(eager_ms));
        let fake = Fake { takes: Duration::from_millis(replay_ms), ..Fake::of(&task) };
        let replays = Rc::clone(&fake.replays);
        let mut compared = stepper(&task, Graphs::with_backend(Switch::Auto, Box::new(fake)));
        passes(&mut compared, [4; 4]);
        assert_eq!((compared.graphs.num_graphs(), replays.get()), (1, 1));
        passes(&mut compared, [4; 2 * COMPARED]);
        assert_eq!(replays.get(), 1 + COMPARED, "eager and replayed passes alternate");
        let notes = compared.graphs.take_notes();
        let wins = replay_ms < eager_ms;
        assert_eq!(compared.graphs.is_on(), wins, "{notes:?}");
        assert!(notes.iter().any(|note| note.contains("ms replayed and") && note.contains("not faster") != wins));
        passes(&mut compared, [4; 3]);
        assert_eq!(replays.get(), 1 + COMPARED + if wins { 3 } else { 0 });
    }
}

#[test]
fn other_gradients_and_another_loss_scale_drop_the_graphs() {
    let _lock = rng::TEST_LOCK.lock();
    let task = Toy::new(1);
    let fake = Fake { takes: Duration::from_millis(1), ..Fake::of(&task) };
    task.slow.set(Duration::from_millis(20));
    let made = Rc::clone(&fake.made);
    let mut stepper = stepper(&task, Graphs::with_backend(Switch::Auto, Box::new(fake)));
    passes(&mut stepper, [4; 6]);
    assert_eq!((stepper.graphs.num_graphs(), made.get()), (1, 1), "two ways are compared");
    // the class head stops learning in the middle of the comparison
    task.family.set(1);
    passes(&mut stepper, [4; 5]);
    assert_eq!((stepper.graphs.num_graphs(), made.get()), (1, 2));
    passes(&mut stepper, [4; 2 * COMPARED]);
    assert!(stepper.graphs.trial.is_none(), "a second comparison ended: {:?}", stepper.graphs.take_notes());
    let scaled = |stepper: &mut Stepper<'_, Toy>| {
        stepper.optimizer.clear();
        stepper.graphs.begin_step(&stepper.scaler, stepper.optimizer.params()).unwrap();
        stepper.graphs.num_graphs()
    };
    stepper.scaler = Scaler::new(Precision::Fp16);
    assert_eq!(scaled(&mut stepper), 0, "the scale is a constant of a graph");
    passes(&mut stepper, [4]);
    assert_eq!(scaled(&mut stepper), 1);
    assert!(!stepper.scaler.update(false), "an overflow");
    assert_eq!(scaled(&mut stepper), 0);
}

#[test]
fn an_optimizer_that_cannot_be_captured_stays_eager() {
    let _lock = (ledger::TEST_LOCK.lock(), rng::TEST_LOCK.lock());
    ledger::install();
    memory::clear_failure();
    let [eager, captured, refused] = [0, usize::MAX, 1].map(|most| {
        let task = Toy::new(1);
        let switch = if most == 0 { Switch::Off } else { Switch::On };
        let fake = Fake { most, drops_after: 1, ..Fake::of(&task) };
        let mut stepper = stepper(&task, Graphs::with_backend(switch, Box::new(fake)));
        for number in 1..=12 {
            rng::seed(number);
            let info = StepInfo { number, epoch: 0, learning_rate: 1e-2 };
            stepper.step(&[4], info, &mut |_, _| Ok(())).unwrap();
            assert!(!stepper.optimizer.partially_updated);
        }
        (task.weight.copy(), stepper.graphs.take_notes().join("; "))
    });
    assert_eq!(eager.0, captured.0);
    assert_eq!(eager.0, refused.0);
    assert!(captured.1.contains("captured the optimizer's update"), "{}", captured.1);
    assert!(refused.1.contains("stays eager: libtorch: it has no room"), "{}", refused.1);
    assert!(memory::failure().is_none(), "a failed capture is not an error of the run");
}

#[test]
fn a_pass_whose_capture_runs_out_of_memory_stays_eager() {
    let _lock = (ledger::TEST_LOCK.lock(), rng::TEST_LOCK.lock());
    ledger::install();
    memory::clear_failure();
    let task = Toy::new(1);
    let fake = Fake { most: 0, ..Fake::of(&task) };
    let mut stepper = stepper(&task, Graphs::with_backend(Switch::On, Box::new(fake)));
    passes(&mut stepper, [4; 4]);
    let notes = stepper.graphs.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("cannot be captured: libtorch: it has no room"), "{notes:?}");
    assert!(memory::failure().is_none(), "a failed capture is not an error of the run");
}

#[test]
fn an_update_is_captured_only_with_its_moments_on_the_device() {
    let _lock = rng::TEST_LOCK.lock();
    for offload_optimizer in [false, true] {
        let task = Toy::new(1);
        let config = TrainConfig { offload_optimizer, ..config(Switch::Off, Precision::Fp32) };
        let mut stepper = Stepper::new(&task, &config, false);
        passes(&mut stepper, [4]);
        assert!(!stepper.optimizer.can_be_captured(), "there are no moments before the first step");
        stepper.step(&[4], StepInfo { number: 1, epoch: 0, learning_rate: 1e-2 }, &mut |_, _| Ok(())).unwrap();
        passes(&mut stepper, [4]);
        assert_eq!(stepper.optimizer.can_be_captured(), !offload_optimizer);
    }
}

#[test]
fn only_frequent_buckets_keep_graphs() {
    let _lock = rng::TEST_LOCK.lock();
    let task = Toy::new(1);
    let mut stepper = stepper(&task, Graphs::new(Switch::On, Device::Cpu, false));
    let most = i64::try_from(MAX_GRAPHS).unwrap();
    let has =
        |graphs: &Graphs, bucket: i64| matches!(graphs.buckets[&vec![bucket * STEP, 0]], BucketState::Captured { .. });
    for bucket in 1..=most + 2 {
        passes(&mut stepper, [bucket * STEP; 6]);
        // a graph was used three times by then, and twice as often is not far more often
        assert_eq!(has(&stepper.graphs, bucket), bucket <= most, "bucket {bucket}");
    }
    assert_eq!(stepper.graphs.num_graphs(), MAX_GRAPHS);
    for _ in 0..8 {
        passes(&mut stepper, [(most + 1) * STEP]);
        assert_eq!(stepper.graphs.num_graphs(), MAX_GRAPHS, "a graph is dropped only to capture another one");
    }
    assert!(has(&stepper.graphs, most + 1), "it came far more often than another one");
    assert_eq!(stepper.graphs.num_graphs(), MAX_GRAPHS);
}

#[test]
fn graphs_are_off_if_they_cannot_be_faster() {
    assert!(!Graphs::new(Switch::Off, Device::Cpu, true).is_on());
    assert!(!Graphs::new(Switch::Auto, Device::Cpu, true).is_on(), "the CPU gains nothing");
    assert!(!Graphs::new(Switch::Auto, Device::Cuda(0), false).is_on(), "no room");
    assert!(Graphs::new(Switch::On, Device::Cpu, false).is_on());
}

#[test]
fn inputs_of_another_shape_are_refused() {
    let _lock = rng::TEST_LOCK.lock();
    let size = BatchSize { samples: 1.0, ..BatchSize::default() };
    let task = Toy::new(1);
    let of = |rows| task.capturable(&rows, size, 0).unwrap().unwrap();
    of(3).copy_from(&of(4)).unwrap();
    assert!(matches!(of(3).copy_from(&of(5)), Err(Error::Shape { .. })));
}

#[test]
fn a_graph_holds_the_bytes_of_its_inputs() {
    let _turns = (ledger::TEST_LOCK.lock(), rng::TEST_LOCK.lock());
    ledger::install();
    let task = Toy::new(1);
    let mut stepper = stepper(&task, Graphs::new(Switch::On, Device::Cpu, false));
    passes(&mut stepper, [64; 3]);
    clear(&task);
    let before = ledger::usage().allocated;
    passes(&mut stepper, [64]);
    clear(&task);
    let held = ledger::usage().allocated.0 - before.0;
    assert_eq!(Bytes(held), stepper.graphs.input_bytes());
    assert_eq!(stepper.graphs.input_bytes(), Bytes(64 * WIDTH as u64 * 4 + 64 * 4 + 8));
}
