use super::*;
use crate::tensor::{Device, Kind, Tensor};
use crate::trainer::fixture::plain;
use crate::trainer::{BatchSize, Batches, Loss, Parameter};
use std::cell::Cell;
use std::sync::Mutex;

/// Two trained numbers. The second one's gradient is NaN in the step `poisoned`. More than `room` samples per
/// micro-batch run out of memory.
struct Toy {
    weights: [Tensor; 2],
    poisoned: u64,
    room: usize,
    losses: Cell<u64>,
}

impl Toy {
    fn new(poisoned: u64, room: usize) -> Self {
        let weights = [1.0, 2.0].map(|w: f64| Tensor::from(w).to_kind(Kind::Float).set_requires_grad(true));
        Self { weights, poisoned, room, losses: Cell::new(0) }
    }

    fn values(&self) -> [f64; 2] {
        self.weights.each_ref().map(|weight| weight.double_value(&[]))
    }
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap())
}

impl Task for Toy {
    type Batch = Vec<f64>;

    fn parameters(&self) -> Vec<Parameter> {
        let named = ["a", "b"].iter().zip(&self.weights);
        named.map(|(name, w)| Parameter { name: format!("toy/{name}"), tensor: w.shallow_clone() }).collect()
    }

    fn steps_per_epoch(&self) -> u64 {
        8
    }

    fn batches(&self, _epoch: u64, first: u64) -> Result<Batches<'_, Vec<f64>>> {
        Ok(Box::new((first..8).map(|step| Ok(vec![(0..6).map(|i| number(step + i)).collect()]))))
    }

    fn batch_size(&self, batch: &Vec<f64>) -> BatchSize {
        BatchSize { samples: number(batch.len() as u64), tokens: 1.0 }
    }

    fn loss(&self, batch: &Vec<f64>, whole: BatchSize, _epoch: u64) -> Result<Loss> {
        let bytes = if batch.len() > self.room { 1 << 50 } else { 8 };
        let _activations = Tensor::empty([bytes], (Kind::Uint8, Device::Cpu));
        self.losses.set(self.losses.get() + 1);
        let factor = if self.losses.get() == self.poisoned { f64::NAN } else { 1.0 };
        let noise = Tensor::rand([1], (Kind::Float, Device::Cpu)).sum(Kind::Float);
        let mean = batch.iter().sum::<f64>() / whole.samples;
        let total = (&self.weights[0] * mean).square() + (&self.weights[1] * noise).square() * factor;
        Ok(Loss { total, parts: Vec::new() })
    }

    fn split(&self, batch: &Vec<f64>, most: usize) -> Option<Vec<Vec<f64>>> {
        Some(batch.chunks(most).map(<[f64]>::to_vec).collect())
    }

    fn save(&self, folder: &mut Staged) -> Result<()> {
        folder.write_bytes("weights", format!("{:?}", self.values()).as_bytes())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}

fn config(step_in_backward: bool) -> TrainConfig {
    TrainConfig {
        micro_batch: 6,
        max_steps: 4,
        checkpoint_every_steps: 2,
        min_learning_rate: 1e-2,
        step_in_backward,
        ..plain()
    }
}

#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Observer for Notes {
    fn on(&self, event: &Event) {
        if let Event::Note(text) = event {
            self.0.lock().unwrap().push(text.clone());
        }
    }
}

fn train(task: &Toy, config: &TrainConfig, folder: &Path) -> (Result<Outcome>, Vec<String>) {
    ledger::install();
    let _lock = rng::TEST_LOCK.lock();
    let notes = Notes::default();
    let session = Session {
        config,
        folder,
        settings: "",
        resume: false,
        profile: None,
        observer: &notes,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: false,
    };
    (run(task, &session), notes.0.into_inner().unwrap())
}

#[test]
fn weights_updated_with_nan_are_never_saved() {
    for step_in_backward in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let task = Toy::new(4, 6);
        let (outcome, _) = train(&task, &config(step_in_backward), folder.path());
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Diverged { .. }), "{error}");
        let saved = std::fs::read_to_string(folder.path().join("last/weights")).unwrap();
        if step_in_backward {
            assert!(error.to_string().ends_with("`last/` holds the state after step 2"), "{error}");
            assert!(saved != format!("{:?}", task.values()), "the first weight was updated");
        } else {
            assert!(error.to_string().ends_with("`last/` holds the state before this step"), "{error}");
            assert_eq!(saved, format!("{:?}", task.values()));
        }
        assert!(task.values().iter().all(|value| value.is_finite()));
        let fresh = Toy::new(3, 6);
        train(&fresh, &TrainConfig { max_steps: 2, ..config(false) }, tempfile::tempdir().unwrap().path()).0.unwrap();
        let after_two = format!("{:?}", fresh.values());
        assert_eq!(saved == after_two, step_in_backward, "{saved} {after_two}");
    }
}

#[test]
fn memory_that_runs_out_halves_the_micro_batch_for_good() {
    let _lock = ledger::TEST_LOCK.lock();
    for step_in_backward in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (halved, small) = (Toy::new(0, 2), Toy::new(0, 6));
        let (outcome, notes) = train(&halved, &config(step_in_backward), folder.path());
        let outcome = outcome.unwrap();
        // 6, 3, 2: then three losses a step
        assert_eq!((outcome.reduced_micro_batch, halved.losses.get()), (Some(2), 4 * 3));
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[1].starts_with("step 1: out of memory with 3 at once"), "{notes:?}");
        assert_eq!(notes[1].contains("step_in_backward=false"), step_in_backward, "{notes:?}");
        assert!(notes[1].contains("train.micro_batch=2 --set train.accumulation=3"), "{notes:?}");
        let config = TrainConfig { micro_batch: 2, accumulation: 3, ..config(false) };
        let pieces = Pieces(&small);
        let session = Session {
            config: &config,
            folder: folder.path(),
            settings: "",
            resume: false,
            profile: None,
            observer: &crate::event::Silent,
            interrupt: &AtomicBool::new(false),
            has_room_for_graphs: false,
        };
        let _alone = rng::TEST_LOCK.lock();
        run(&pieces, &session).unwrap();
        assert_eq!(halved.values(), small.values());
    }
}

#[test]
fn one_sample_that_does_not_fit_is_an_error() {
    let _lock = ledger::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let (outcome, notes) = train(&Toy::new(0, 0), &config(false), folder.path());
    let error = outcome.unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert!(error.hint().contains("train.micro_batch"));
    assert_eq!(notes.len(), 3, "6 to 3 to 2 to 1: {notes:?}");
    assert!(memory::failure().is_some(), "a report can list live memory");
    memory::clear_failure();
}

/// [`Toy`] with two samples per micro-batch from the start.
struct Pieces<'a>(&'a Toy);

impl Task for Pieces<'_> {
    type Batch = Vec<f64>;

    fn parameters(&self) -> Vec<Parameter> {
        self.0.parameters()
    }

    fn steps_per_epoch(&self) -> u64 {
        8
    }

    fn batches(&self, epoch: u64, first: u64) -> Result<Batches<'_, Vec<f64>>> {
        let pairs = |batch: Vec<f64>| self.0.split(&batch, 2).unwrap();
        Ok(Box::new(self.0.batches(epoch, first)?.map(move |step| Ok(step?.into_iter().flat_map(pairs).collect()))))
    }

    fn batch_size(&self, batch: &Vec<f64>) -> BatchSize {
        self.0.batch_size(batch)
    }

    fn loss(&self, batch: &Vec<f64>, whole: BatchSize, epoch: u64) -> Result<Loss> {
        self.0.loss(batch, whole, epoch)
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        Ok(())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}
