use super::*;
use crate::fixture::plain;
use crate::run::Session;
use crate::{BatchSize, Batches, Loss, Parameter, Ranks, Shard, Task, TrainConfig, Validation, run};
use prsmed_base::event::{Event, Observer};
use prsmed_tensor::weights::Staged;
use prsmed_tensor::{Kind, Tensor, module_path, rng};
use serde_json::Value;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

const MIB: u64 = 1 << 20;
/// Other tests of this process allocate too, but far less.
const NOISE: u64 = 24 * MIB;

fn block(mib: i64) -> Tensor {
    Tensor::zeros([mib << 20], (Kind::Uint8, Device::Cpu))
}

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_file_is_continued_after_its_last_complete_line_or_replaced() {
    let _lock = ledger::TEST_LOCK.lock();
    ledger::install();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.jsonl");
    let phases = |append: bool| {
        let mut profiler = Profiler::new(Device::Cpu, &path, append).unwrap();
        profiler.begin("step").unwrap();
        profiler.end(1).unwrap();
        lines(&path).len()
    };
    assert_eq!(phases(false), 1);
    std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "{\"partial\": ").unwrap();
    assert_eq!((phases(true), phases(false)), (2, 1));
    let (link, precious) = (folder.path().join("link"), folder.path().join("thesis.txt"));
    std::fs::write(&precious, "thesis").unwrap();
    std::os::unix::fs::symlink(&precious, &link).unwrap();
    assert!([false, true].iter().all(|&append| Profiler::new(Device::Cpu, &link, append).is_err()));
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "thesis");
}

#[test]
fn a_phase_has_the_highest_peak_of_its_parts_and_the_overall_peak_stays() {
    let _lock = ledger::TEST_LOCK.lock();
    ledger::install();
    let folder = tempfile::tempdir().unwrap();
    let mut profiler = Profiler::new(Device::Cpu, &folder.path().join("memory.jsonl"), false).unwrap();
    drop(block(900));
    let overall = ledger::usage().allocated_peak;
    profiler.begin("step").unwrap();
    for (mib, category) in
        [(100, ledger::Category::Inputs), (500, ledger::Category::Ema), (200, ledger::Category::Inputs)]
    {
        let _category = ledger::enter(category);
        drop(block(mib));
    }
    let phase = profiler.end(1).unwrap().unwrap();
    assert_eq!(phase.name, "step");
    assert!((phase.allocated_peak.0 - phase.allocated.0).abs_diff(500 * MIB) < NOISE, "{phase:?}");
    let share = |name: &str| phase.categories.iter().find(|(known, _)| *known == name).unwrap().1.0;
    assert!(share("ema") >= 500 * MIB && share("inputs") < NOISE, "{phase:?}");
    assert_eq!(phase.categories.iter().map(|(_, bytes)| bytes.0).sum::<u64>(), phase.allocated_peak.0);
    assert!(ledger::usage().allocated_peak >= overall);
    assert_eq!(profiler.end(1).unwrap(), None, "none is open");
}

/// One trained number; the loss of a batch may allocate `asked` bytes.
struct Toy {
    weight: Tensor,
    asked: i64,
}

impl Toy {
    fn new(asked: i64) -> Self {
        let weight = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        Self { weight, asked }
    }
}

impl Task for Toy {
    type Batch = ();

    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::new("toy/weight", self.weight.shallow_clone())]
    }

    fn steps_per_epoch(&self) -> u64 {
        2
    }

    fn batches(&self, _epoch: u64, _first: u64, _shard: Shard) -> Result<Batches<'_, ()>> {
        Ok(Box::new((0..2).map(|_| Ok(vec![(), ()]))))
    }

    fn batch_size(&self, (): &()) -> BatchSize {
        BatchSize { samples: 1.0, tokens: 1.0, ..BatchSize::default() }
    }

    fn loss(&self, (): &(), _whole: BatchSize, _epoch: u64) -> Result<Loss> {
        let _module = module_path::enter("toy");
        let _large = (self.asked > 0).then(|| (block(60), block(self.asked)));
        Ok(Loss { total: self.weight.square().sum(Kind::Float), parts: Vec::new() })
    }

    fn validate(&self, _observer: &dyn Observer, _ranks: Ranks) -> Result<Option<Validation>> {
        Ok(Some(Validation { score: 0.5.into(), values: Vec::new(), pictures: Vec::new() }))
    }

    fn save(&self, _folder: &mut Staged) -> Result<()> {
        Ok(())
    }

    fn load(&self, _folder: &Path) -> Result<()> {
        Ok(())
    }
}

#[derive(Default)]
struct RecordedEvents(Mutex<Vec<Event>>);

impl Observer for RecordedEvents {
    fn on(&self, event: &Event) {
        self.0.lock().unwrap().push(event.clone());
    }
}

impl RecordedEvents {
    fn memory(&self) -> Vec<(String, u64)> {
        let events = self.0.lock().unwrap();
        let of = |event: &Event| if let Event::Memory(r) = event { Some((r.phase.clone(), r.step)) } else { None };
        events.iter().filter_map(of).collect()
    }
}

fn config(epochs: u64) -> TrainConfig {
    TrainConfig { accumulation: 2, epochs, validate_every_epochs: 1, learning_rate: 1e-3, ema_decay: 0.5, ..plain() }
}

fn trained(
    task: &Toy,
    epochs: u64,
    every_steps: Option<u64>,
) -> (Result<run::TrainingOutcome>, RecordedEvents, Vec<Value>) {
    ledger::install();
    let _lock = rng::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let settings =
        every_steps.map(|every_steps| ProfileSettings { every_steps, out: folder.path().join("memory.jsonl") });
    let (config, events) = (config(epochs), RecordedEvents::default());
    let session = Session {
        config: &config,
        folder: folder.path(),
        settings: "",
        resume: false,
        profile: settings.as_ref(),
        observer: &events,
        interrupt: &AtomicBool::new(false),
        has_room_for_graphs: false,
        ranks: Ranks::default(),
    };
    let outcome = run(task, &session);
    let written = settings.map_or_else(Vec::new, |settings| lines(&settings.out));
    (outcome, events, written)
}

#[test]
fn the_first_and_every_nth_step_are_profiled() {
    let _lock = ledger::TEST_LOCK.lock();
    let (outcome, events, written) = trained(&Toy::new(0), 3, Some(4));
    assert_eq!(outcome.unwrap().steps, 6);
    assert_eq!(events.memory(), [("first step".to_owned(), 1), ("step".to_owned(), 4)]);
    let of = |kind: &str, field: &str| -> Vec<String> {
        let lines = written.iter().filter(|line| line["kind"] == kind);
        lines.map(|line| line[field].as_str().unwrap_or_default().to_owned()).collect()
    };
    let phases = ["load", "first step", "evaluate", "save", "save", "step", "evaluate", "save", "evaluate", "save"];
    assert_eq!(of("phase", "name"), phases);
}

#[test]
fn nothing_is_profiled_without_settings() {
    let _lock = ledger::TEST_LOCK.lock();
    let (outcome, events, written) = trained(&Toy::new(0), 1, None);
    assert!(outcome.is_ok() && events.memory().is_empty() && written.is_empty());
}

#[test]
fn an_out_of_memory_error_lists_live_memory() {
    let _lock = ledger::TEST_LOCK.lock();
    memory::clear_failure();
    let (outcome, _, _) = trained(&Toy::new(1 << 30), 1, Some(1));
    assert!(matches!(outcome, Err(prsmed_base::Error::OutOfMemory { .. })), "{outcome:?}");
    let failure = memory::failure().unwrap();
    assert_eq!((failure.requested, failure.module.as_str()), (Some(Bytes(1 << 50)), "toy"));
    assert!(failure.largest.iter().any(|block| block.bytes.0 == 60 * MIB && block.module == "toy"), "{failure:?}");
    memory::clear_failure();
}

#[test]
fn the_check_of_the_file_follows_no_link() {
    let folder = tempfile::tempdir().unwrap();
    let (out, elsewhere) = (folder.path().join("memory.jsonl"), folder.path().join("elsewhere"));
    std::os::unix::fs::symlink(&elsewhere, &out).unwrap();
    let settings = ProfileSettings { every_steps: 1, out: out.clone() };
    assert!(settings.check().is_err());
    assert!(!elsewhere.exists(), "the target of the link was created");
    std::fs::write(folder.path().join("kept.jsonl"), "a line\n").unwrap();
    ProfileSettings { every_steps: 1, out: folder.path().join("kept.jsonl") }.check().unwrap();
    assert_eq!(std::fs::read_to_string(folder.path().join("kept.jsonl")).unwrap(), "a line\n");
}
