use super::*;
use crate::fixture::{RUN_AHEAD, plain};
use crate::{BatchSize, Batches, Loss, Parameter, Shard};
use prsmed_tensor::ledger;
use prsmed_tensor::weights::Staged;
use prsmed_tensor::{Device, Kind, Tensor, rng};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Mutex;

/// Two trained numbers. The second one's gradient is NaN in the passes `poisoned`, from 1. More than `room` samples per
/// micro-batch run out of memory.
struct Toy {
    weights: [Tensor; 2],
    poisoned: RangeInclusive<u64>,
    room: usize,
    losses: Cell<u64>,
}

impl Toy {
    fn new(poisoned: u64, room: usize) -> Self {
        Self::poisoned(poisoned..=poisoned, room)
    }

    fn poisoned(poisoned: RangeInclusive<u64>, room: usize) -> Self {
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
        named.map(|(name, w)| Parameter::new(format!("toy/{name}"), w.shallow_clone())).collect()
    }

    fn steps_per_epoch(&self) -> u64 {
        8
    }

    fn batches(&self, _epoch: u64, first: u64, _shard: Shard) -> Result<Batches<'_, Vec<f64>>> {
        Ok(Box::new((first..8).map(|step| Ok(vec![(0..6).map(|i| number(step + i)).collect()]))))
    }

    fn batch_size(&self, batch: &Vec<f64>) -> BatchSize {
        BatchSize { samples: number(batch.len() as u64), tokens: 1.0, ..BatchSize::default() }
    }

    fn loss(&self, batch: &Vec<f64>, whole: BatchSize, _epoch: u64) -> Result<Loss> {
        let bytes = if batch.len() > self.room { 1 << 50 } else { 8 };
        let _activations = Tensor::empty([bytes], (Kind::Uint8, Device::Cpu));
        self.losses.set(self.losses.get() + 1);
        let factor = if self.poisoned.contains(&self.losses.get()) { f64::NAN } else { 1.0 };
        let noise = Tensor::rand([1], (Kind::Float, Device::Cpu)).sum(Kind::Float);
        let mean = batch.iter().sum::<f64>() / whole.samples;
        let total = (&self.weights[0] * mean).square() + (&self.weights[1] * noise).square() * factor;
        Ok(Loss { total, parts: Vec::new() })
    }

    fn samples(&self, batch: &Vec<f64>) -> Vec<usize> {
        batch.iter().map(|number| format!("{number}").parse().unwrap()).collect()
    }

    fn suspects(&self, samples: &[usize], _epoch: u64) -> Result<Vec<String>> {
        Ok(samples.iter().map(|number| format!("sample {number}")).collect())
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
        if let Event::Note(text) | Event::Warning(text) = event {
            self.0.lock().unwrap().push(text.clone());
        }
    }
}

fn train<T: Task>(task: &T, config: &TrainConfig, folder: &Path) -> (Result<TrainingOutcome>, Vec<String>) {
    train_on(task, config, folder, false)
}

fn train_on<T: Task>(
    task: &T,
    config: &TrainConfig,
    folder: &Path,
    resume: bool,
) -> (Result<TrainingOutcome>, Vec<String>) {
    ledger::install();
    let _lock = rng::TEST_LOCK.lock();
    let notes = Notes::default();
    let session = Session {
        config,
        folder,
        settings: "",
        resume,
        profile: None,
        observer: &notes,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: false,
        ranks: Ranks::default(),
    };
    (run(task, &session), notes.0.into_inner().unwrap())
}

#[test]
fn weights_updated_with_nan_are_never_saved() {
    for step_in_backward in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let task = Toy::new(4, 6);
        let config = TrainConfig { max_skipped_steps: 0, ..config(step_in_backward) };
        let (outcome, _) = train(&task, &config, folder.path());
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
        train(
            &fresh,
            &TrainConfig { max_steps: 2, step_in_backward: false, ..config },
            tempfile::tempdir().unwrap().path(),
        )
        .0
        .unwrap();
        let after_two = format!("{:?}", fresh.values());
        assert_eq!(saved == after_two, step_in_backward, "{saved} {after_two}");
    }
}

#[test]
fn a_step_with_nan_is_skipped_named_and_counted() {
    let run = |poisoned, max_steps| {
        let (task, folder) = (Toy::poisoned(poisoned, 6), tempfile::tempdir().unwrap());
        let (outcome, notes) = train(&task, &TrainConfig { max_steps, ..config(false) }, folder.path());
        (outcome.unwrap(), notes, task.values())
    };
    let (outcome, notes, weights) = run(2..=3, 3);
    assert_eq!((outcome.steps, outcome.skipped_steps), (3, 2));
    let expected = "step 2: the gradient norm is NaN (total NaN); samples: sample 1, sample 2, sample 3, sample 4, \
                    sample 5, sample 6; the step is skipped, the weights stay";
    assert_eq!(notes.first().map(String::as_str), Some(expected), "{notes:?}");
    assert_eq!(notes.len(), 2, "{notes:?}");
    let (_, notes, after_one) = run(0..=0, 1);
    assert!(notes.is_empty(), "{notes:?}");
    assert_eq!(weights, after_one, "two of three steps changed nothing");
    let (outcome, _, weights) = run(2..=3, 4);
    assert_eq!((outcome.steps, outcome.skipped_steps), (4, 2));
    assert!(weights != after_one && weights.iter().all(|weight| weight.is_finite()), "{weights:?}");
}

#[test]
fn a_streak_of_steps_with_nan_ends_the_run_and_names_the_samples() {
    let folder = tempfile::tempdir().unwrap();
    let task = Toy::poisoned(2..=9, 6);
    let (outcome, notes) = train(&task, &config(false), folder.path());
    let error = outcome.unwrap_err();
    let expected = "step 4: the gradient norm is NaN (total NaN); samples: sample 3, sample 4, sample 5, sample 6, \
                    sample 7, sample 8; 3 steps in a row; `last/` holds the weights before them";
    assert_eq!((error.to_string().as_str(), notes.len()), (expected, 2), "{notes:?}");
    assert!(matches!(error, Error::Diverged { .. }));
    let saved = std::fs::read_to_string(folder.path().join("last/weights")).unwrap();
    assert_eq!(saved, format!("{:?}", task.values()));
    assert!(task.values().iter().all(|value| value.is_finite()), "{saved}");
}

#[test]
fn a_run_without_validation_trains_all_epochs() {
    let (task, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let config = TrainConfig { epochs: 2, max_steps: 0, ..config(false) };
    let outcome = train(&task, &config, folder.path()).0.unwrap();
    assert_eq!((outcome.steps, outcome.stopped_early), (16, false));
}

/// A task without any sample in its second step.
struct Gap<'a>(&'a Toy);

impl Task for Gap<'_> {
    type Batch = Vec<f64>;

    fn parameters(&self) -> Vec<Parameter> {
        self.0.parameters()
    }

    fn steps_per_epoch(&self) -> u64 {
        8
    }

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, Vec<f64>>> {
        let steps = self.0.batches(epoch, first, shard)?.zip(first..);
        Ok(Box::new(steps.map(|(step, index)| if index == 1 { Ok(Vec::new()) } else { step })))
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

#[test]
fn a_step_without_samples_counts_and_changes_nothing() {
    let weights_after = |max_steps| {
        let (task, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
        let (outcome, notes) = train(&Gap(&task), &TrainConfig { max_steps, ..config(false) }, folder.path());
        assert_eq!(outcome.unwrap().steps, max_steps);
        (task.values(), task.losses.get(), notes)
    };
    let ((first, ..), (second, passes, notes), (third, ..)) = (weights_after(1), weights_after(2), weights_after(3));
    assert_eq!((first, passes), (second, 1));
    assert_eq!(notes, ["step 2: no sample can be read, the weights stay"]);
    assert!(second != third);
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
            observer: &prsmed_base::event::Silent,
            interrupt: &AtomicBool::new(false),
            has_room_for_graphs: false,
            ranks: Ranks::default(),
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

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, Vec<f64>>> {
        let pairs = |batch: Vec<f64>| self.0.split(&batch, 2).unwrap();
        Ok(Box::new(
            self.0.batches(epoch, first, shard)?.map(move |step| Ok(step?.into_iter().flat_map(pairs).collect())),
        ))
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

/// Trains; `ahead`: each step is launched before the one before is read. Returns the result, the notes, the lines of
/// `metrics.jsonl` without times, and the saved weights as the last line.
fn train_ahead(
    ahead: bool,
    task: &Toy,
    config: &TrainConfig,
) -> (Result<TrainingOutcome>, Vec<String>, Vec<serde_json::Value>) {
    let folder = tempfile::tempdir().unwrap();
    RUN_AHEAD.set(ahead);
    let (outcome, notes) = train(task, config, folder.path());
    RUN_AHEAD.set(false);
    let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let mut lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        let line = line.as_object_mut().unwrap();
        line.retain(|key, _| {
            ["kind", "step", "losses", "learning_rate", "grad_norm", "samples"].contains(&key.as_str())
        });
    }
    let saved = std::fs::read_to_string(folder.path().join("last/weights")).unwrap();
    (outcome, notes, [lines, vec![saved.into()]].concat())
}

#[test]
fn steps_launched_ahead_train_and_report_alike() {
    // step 3 is NaN; checkpoints after steps 2 and 4 wait for all steps before
    let config = TrainConfig { max_steps: 5, ..config(false) };
    let [(waited, notes, lines, passes), ahead] = [false, true].map(|ahead| {
        let task = Toy::poisoned(3..=3, 6);
        let (outcome, notes, lines) = train_ahead(ahead, &task, &config);
        let outcome = outcome.unwrap();
        ((outcome.steps, outcome.samples_now, outcome.skipped_steps), notes, lines, task.losses.get())
    });
    assert_eq!((waited, passes, lines.len()), ((5, 30, 1), 5, 6));
    assert_eq!(lines[..5].iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert!(notes.len() == 1 && notes[0].contains("sample 2, sample 3"), "{notes:?}");
    assert_eq!(((waited, passes), &notes, &lines), ((ahead.0, ahead.3), &ahead.1, &ahead.2));
}

#[test]
fn a_run_that_ends_keeps_the_step_that_was_launched_ahead() {
    let config = TrainConfig { max_skipped_steps: 0, checkpoint_every_steps: 0, max_steps: 6, ..config(false) };
    let task = Toy::poisoned(3..=3, 6);
    let (outcome, _, lines) = train_ahead(true, &task, &config);
    let error = outcome.unwrap_err();
    assert!(error.to_string().starts_with("step 3: the gradient norm is NaN"), "{error}");
    // the fourth step was launched before the third was read
    assert_eq!(task.losses.get(), 4);
    let steps: Vec<u64> = lines.iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [1, 2, 4]);
    assert_eq!(lines.last().unwrap().as_str().unwrap(), format!("{:?}", task.values()));
}

/// A task whose validations have these scores, one after another; `None` = it is interrupted.
struct Judged<'a>(&'a Toy, RefCell<VecDeque<Option<ValidationScore>>>);

impl Task for Judged<'_> {
    type Batch = Vec<f64>;

    fn parameters(&self) -> Vec<Parameter> {
        self.0.parameters()
    }

    fn steps_per_epoch(&self) -> u64 {
        8
    }

    fn batches(&self, epoch: u64, first: u64, shard: Shard) -> Result<Batches<'_, Vec<f64>>> {
        self.0.batches(epoch, first, shard)
    }

    fn batch_size(&self, batch: &Vec<f64>) -> BatchSize {
        self.0.batch_size(batch)
    }

    fn loss(&self, batch: &Vec<f64>, whole: BatchSize, epoch: u64) -> Result<Loss> {
        self.0.loss(batch, whole, epoch)
    }

    fn validate(&self, _observer: &dyn Observer, _ranks: Ranks) -> Result<Option<Validation>> {
        let score = self.1.borrow_mut().pop_front().expect("a validation that is not expected");
        let picture = ValidationPicture { name: "grids".into(), image: image::RgbImage::new(3, 2) };
        let of = |score| Validation { score, values: vec![("value".into(), 1.0)], pictures: vec![picture] };
        score.map(|score| Some(of(score))).ok_or(Error::Interrupted)
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        Ok(())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}

fn judged(toy: &Toy, scores: impl IntoIterator<Item = Option<ValidationScore>>) -> Judged<'_> {
    Judged(toy, RefCell::new(scores.into_iter().collect()))
}

#[test]
fn an_interrupted_validation_is_repeated_when_the_run_is_resumed() {
    let (toy, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let config = TrainConfig { epochs: 2, max_steps: 0, validate_every_epochs: 1, ..config(false) };
    let error = train(&judged(&toy, [None]), &config, folder.path()).0.unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");
    let last = || -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(folder.path().join("last/trainer.json")).unwrap()).unwrap()
    };
    assert_eq!((last()["step"].as_u64(), last()["unvalidated"].as_bool()), (Some(8), Some(true)));
    let task = judged(&toy, [Some(0.7.into()), Some(0.5.into())]);
    let outcome = train_on(&task, &config, folder.path(), true).0.unwrap();
    assert!(task.1.borrow().is_empty(), "both epochs are validated");
    assert_eq!((outcome.steps, outcome.steps_now, outcome.best_score), (16, 8, Some(0.7)));
    assert_eq!(last()["unvalidated"].as_bool(), Some(false));
    for step in ["000008", "000016"] {
        assert!(folder.path().join(format!("grids/step-{step}.png")).exists());
    }
}

#[test]
fn scores_of_another_kind_are_not_compared() {
    let (toy, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let config = |epochs| TrainConfig { epochs, max_steps: 0, validate_every_epochs: 1, ..config(false) };
    let score = |value, kind| Some(ValidationScore { kind, ..f64::into(value) });
    train(&judged(&toy, [score(10.0, "loss")]), &config(1), folder.path()).0.unwrap();
    let task = judged(&toy, [score(-0.3, "KID"), score(-0.4, "KID")]);
    let (outcome, notes) = train_on(&task, &config(3), folder.path(), true);
    assert_eq!(outcome.unwrap().best_score, Some(-0.3));
    assert_eq!(notes.iter().filter(|note| note.contains("measure something else")).count(), 1, "{notes:?}");
}

#[test]
fn a_noisy_score_ends_the_training_when_it_no_longer_grows() {
    let (toy, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let config = TrainConfig { epochs: 30, max_steps: 0, validate_every_epochs: 1, patience: 2, ..config(false) };
    let noise = [0.3, -0.2, 0.1, -0.3, 0.2, -0.1, 0.3, -0.2];
    let score = |value: f64| Some(ValidationScore { value, is_noisy: true, kind: "KID" });
    // it grows for twelve epochs; low values in between do not end the training
    let scores = (0..30).map(|i| score(2.0 * f64::from(i.min(12)) + noise[usize::try_from(i % 8).unwrap()]));
    let outcome = train(&judged(&toy, scores), &config, folder.path()).0.unwrap();
    let epochs = outcome.steps / 8;
    assert!(outcome.stopped_early && (14..=22).contains(&epochs), "{epochs} epochs");
}

#[test]
fn a_run_that_stopped_early_says_why_and_a_resume_trains_nothing() {
    let score = |value| Some(ValidationScore { value, is_noisy: false, kind: "Dice" });
    let with = |patience| TrainConfig { epochs: 6, max_steps: 0, validate_every_epochs: 1, patience, ..config(false) };
    let (toy, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let (outcome, notes) = train(&judged(&toy, [score(0.5), score(0.4), score(0.3)]), &with(2), folder.path());
    assert!(outcome.is_ok_and(|outcome| outcome.stopped_early && outcome.steps == 24));
    let why = "after step 24: the last 2 validations were not better than 0.5000 (`train.patience=2`)";
    assert!(notes.contains(&format!("stopped early, {why}")), "{notes:?}");
    let before = toy.values();
    for _ in 0..2 {
        let (outcome, notes) = train_on(&judged(&toy, []), &with(2), folder.path(), true);
        assert!(outcome.is_ok_and(|outcome| outcome.stopped_early && outcome.steps == 24 && outcome.steps_now == 0));
        let expected =
            format!("nothing to train: it stopped early, {why}; a larger `train.patience`, or 0, continues it");
        assert!(notes.contains(&expected), "{notes:?}");
    }
    assert_eq!(toy.values(), before);
    // more patience continues, and the counter of validations stays
    let (outcome, notes) = train_on(&judged(&toy, [score(0.4)]), &with(3), folder.path(), true);
    assert!(outcome.is_ok_and(|outcome| outcome.stopped_early && outcome.steps == 32), "{notes:?}");
    let (outcome, _) = train_on(&judged(&toy, [score(0.6), score(0.7)]), &with(0), folder.path(), true);
    assert!(outcome.is_ok_and(|outcome| !outcome.stopped_early && outcome.steps == 48));
}

#[test]
fn the_limit_that_ends_a_run_is_said_at_its_start() {
    let limit = |epochs, max_steps| length::which_limit(&TrainConfig { epochs, max_steps, ..config(false) }, 5);
    assert_eq!(limit(7, 0), None);
    let text = limit(7, 200).unwrap();
    assert!(text.starts_with("`train.epochs=7` ends the training after 35 steps (5 an epoch), before"), "{text}");
    assert_eq!(limit(7, 12).unwrap(), "`train.max_steps=12` ends the training in epoch 3 of 7 (`train.epochs`)");
}

#[test]
fn a_longer_training_says_how_its_learning_rate_jumps() {
    let (toy, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let with = |max_steps| TrainConfig { max_steps, min_learning_rate: 1e-3, ..config(false) };
    let jumps = |notes: &[String]| notes.iter().filter(|note| note.contains("jumps from")).cloned().collect::<Vec<_>>();
    let (outcome, notes) = train(&toy, &with(4), folder.path());
    assert_eq!((outcome.unwrap().steps, jumps(&notes)), (4, Vec::new()));
    // the same length
    let (outcome, notes) = train_on(&toy, &with(4), folder.path(), true);
    assert_eq!((outcome.unwrap().steps, jumps(&notes)), (4, Vec::new()));
    let done = "nothing to train: all 4 steps are done; a larger `train.max_steps` makes the training longer";
    assert!(notes.iter().any(|note| note == done), "{notes:?}");
    let (outcome, notes) = train_on(&toy, &with(6), folder.path(), true);
    assert_eq!(outcome.unwrap().steps, 6);
    let [was, is] = [4, 6].map(|total| schedule::learning_rate(&with(6), 4, total));
    let [text] = <[String; 1]>::try_from(jumps(&notes)).unwrap();
    assert!(text.starts_with("the training had 4 steps and now has 6: "), "{text}");
    assert!(was < is && text.ends_with(&format!("{was:.2e} to {is:.2e} at step 4")), "{text}");
}

#[test]
fn a_training_cannot_end_before_the_steps_that_are_done() {
    let (toy, folder) = (Toy::new(0, 6), tempfile::tempdir().unwrap());
    let with = |epochs, max_steps| TrainConfig { epochs, max_steps, ..config(false) };
    assert_eq!(train(&toy, &with(2, 12), folder.path()).0.unwrap().steps, 12);
    for (config, key, end) in [(with(2, 5), "train.max_steps", 5), (with(1, 0), "train.epochs", 8)] {
        let error = train_on(&toy, &config, folder.path(), true).0.unwrap_err();
        let expected = format!("`{key}`: the run to resume has done 12 steps, and the settings end it after {end}");
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert!(error.hint().contains("a larger number"), "{}", error.hint());
    }
}
