use super::*;
use crate::event::{Event, Observer};
use crate::tensor::weights::Staged;
use crate::tensor::{Kind, Tensor, module_path, rng};
use crate::trainer::fixture::plain;
use crate::trainer::run::Session;
use crate::trainer::{BatchSize, Batches, Loss, Parameter, Ranks, Shard, Task, TrainConfig, Validation, run};
use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

const MIB: u64 = 1 << 20;
/// Other tests of this process allocate too, but far less.
const NOISE: u64 = 24 * MIB;

fn block(mib: i64) -> Tensor {
    Tensor::zeros([mib << 20], (Kind::Uint8, Device::Cpu))
}

fn near(bytes: i64, mib: i64) -> bool {
    bytes.abs_diff(mib << 20) < NOISE
}

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn marks_have_deltas_and_peaks() {
    let _lock = ledger::TEST_LOCK.lock();
    ledger::install();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.jsonl");
    drop(block(1500));
    let mut profiler = Profiler::new(Device::Cpu).unwrap().to_file(&path, false).unwrap();
    profiler.at_step(3);
    let baseline = profiler.baseline().unwrap();
    assert!(near(delta(baseline.allocated_peak, baseline.allocated), 0), "earlier peaks do not count: {baseline:?}");
    drop(block(700));
    let high = profiler.mark("high").unwrap();
    let lives = block(200);
    let rise = profiler.mark("rise").unwrap();
    drop(lives);
    let fall = profiler.mark("fall").unwrap();
    let deltas = [&high, &rise, &fall].map(|mark| mark.allocated_delta);
    assert!(near(deltas[0], 0) && near(deltas[1], 200) && near(deltas[2], -200), "{deltas:?}");
    let above = |mark: &Mark| delta(mark.allocated_peak, high.allocated);
    assert!(
        near(above(&high), 700) && near(above(&rise), 200) && near(above(&fall), 200),
        "{high:?} {rise:?} {fall:?}"
    );
    // the allocator keeps freed memory for reuse
    assert!(near(delta(fall.reserved, fall.allocated), 0) || fall.reserved.0 >= fall.allocated.0 + 100 * MIB);
    let kinds: Vec<String> = lines(&path).iter().map(|line| line["kind"].as_str().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["baseline", "mark", "mark", "mark"]);
    let rise_line = &lines(&path)[2];
    assert_eq!((&rise_line["label"], &rise_line["step"]), (&json!("rise"), &json!(3)));
    assert_eq!(rise_line["allocated_delta"], json!(rise.allocated_delta));
}

#[test]
fn a_phase_has_the_highest_peak_of_its_marks_and_the_overall_peak_stays() {
    let _lock = ledger::TEST_LOCK.lock();
    ledger::install();
    let mut profiler = Profiler::new(Device::Cpu).unwrap();
    drop(block(900));
    let overall = ledger::usage().allocated_peak;
    profiler.begin("step").unwrap();
    for (mib, category) in
        [(100, ledger::Category::Inputs), (500, ledger::Category::Ema), (200, ledger::Category::Inputs)]
    {
        let _category = ledger::enter(category);
        drop(block(mib));
        profiler.mark("part").unwrap();
    }
    let (phase, leak) = profiler.end().unwrap().unwrap();
    assert_eq!((phase.name.as_str(), leak), ("step", None));
    assert!(near(delta(phase.allocated_peak, phase.allocated), 500), "{phase:?}");
    let share = |name: &str| phase.categories.iter().find(|(known, _)| *known == name).unwrap().1.0;
    assert!(share("ema") >= 500 * MIB && share("inputs") < NOISE, "{phase:?}");
    assert_eq!(phase.categories.iter().map(|(_, bytes)| bytes.0).sum::<u64>(), phase.allocated_peak.0);
    assert!(ledger::usage().allocated_peak >= overall);
    assert_eq!(profiler.end().unwrap(), None, "none is open");
}

/// One trained number; the loss of a batch may leak `leaked` MiB, or allocate `asked` bytes.
struct Toy {
    weight: Tensor,
    leaked: i64,
    kept: RefCell<Vec<Tensor>>,
    asked: i64,
}

impl Toy {
    fn new(leaked: i64, asked: i64) -> Self {
        let weight = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        Self { weight, leaked, kept: RefCell::default(), asked }
    }
}

impl Task for Toy {
    type Batch = ();

    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter { name: "toy/weight".into(), tensor: self.weight.shallow_clone() }]
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
        if self.leaked > 0 {
            self.kept.borrow_mut().push(block(self.leaked));
        }
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
    fn warnings(&self) -> Vec<String> {
        let events = self.0.lock().unwrap();
        events
            .iter()
            .filter_map(|event| if let Event::Warning(text) = event { Some(text.clone()) } else { None })
            .collect()
    }

    fn memory(&self) -> Vec<(String, u64)> {
        let events = self.0.lock().unwrap();
        let of = |event: &Event| if let Event::Memory(r) = event { Some((r.phase.clone(), r.step)) } else { None };
        events.iter().filter_map(of).collect()
    }
}

fn config(epochs: u64) -> TrainConfig {
    TrainConfig { accumulation: 2, epochs, validate_every_epochs: 1, learning_rate: 1e-3, ema_decay: 0.5, ..plain() }
}

fn trained(task: &Toy, epochs: u64, every_steps: Option<u64>) -> (Result<run::Outcome>, RecordedEvents, Vec<Value>) {
    ledger::install();
    let _lock = rng::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let settings = every_steps.map(|every_steps| Settings { every_steps, out: folder.path().join("memory.jsonl") });
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
fn a_leaking_task_causes_a_warning() {
    let _lock = ledger::TEST_LOCK.lock();
    let (_, events, written) = trained(&Toy::new(32, 0), 6, Some(100));
    let warnings = events.warnings();
    assert!(
        warnings.iter().any(|text| text.starts_with("memory after `evaluate` grew 4 times in a row, by ")),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("mostly activations"), "{warnings:?}");
    assert!(written.iter().any(|line| line["kind"] == "leak" && line["growth"].as_u64().unwrap() > 400 * MIB));
    let (_, events, _) = trained(&Toy::new(0, 0), 6, Some(1));
    assert_eq!(events.warnings(), [""; 0], "a task without a leak");
}

#[test]
fn the_first_and_every_nth_step_are_profiled_with_their_parts() {
    let _lock = ledger::TEST_LOCK.lock();
    let (outcome, events, written) = trained(&Toy::new(0, 0), 3, Some(4));
    assert_eq!(outcome.unwrap().steps, 6);
    assert_eq!(events.memory(), [("first step".to_owned(), 1), ("step".to_owned(), 4)]);
    let of = |kind: &str, field: &str| -> Vec<String> {
        let lines = written.iter().filter(|line| line["kind"] == kind);
        lines.map(|line| line[field].as_str().unwrap_or_default().to_owned()).collect()
    };
    // two micro-batches
    let once = ["forward", "backward", "forward", "backward", "optimizer", "ema"];
    assert_eq!(of("mark", "label"), [once, once].concat());
    let phases = ["load", "first step", "evaluate", "save", "save", "step", "evaluate", "save", "evaluate", "save"];
    assert_eq!(of("phase", "name"), phases);
    let components: Vec<&Value> = written.iter().filter(|line| line["kind"] == "components").collect();
    let part = &components[0]["components"][0];
    let fields = ["parameters", "trainable", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "ema_bytes"];
    // two moments and a step count
    assert_eq!(fields.map(|field| part[field].as_u64().unwrap()), [1, 1, 4, 4, 12, 4]);
    assert_eq!(components.len(), 1, "nothing changed later");
}

#[test]
fn nothing_is_profiled_without_settings() {
    let _lock = ledger::TEST_LOCK.lock();
    let (outcome, events, written) = trained(&Toy::new(0, 0), 1, None);
    assert!(outcome.is_ok() && events.memory().is_empty() && written.is_empty());
}

#[test]
fn an_out_of_memory_error_lists_live_memory() {
    let _lock = ledger::TEST_LOCK.lock();
    memory::clear_failure();
    let (outcome, _, _) = trained(&Toy::new(0, 1 << 30), 1, Some(1));
    assert!(matches!(outcome, Err(crate::Error::OutOfMemory { .. })), "{outcome:?}");
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
    let settings = Settings { every_steps: 1, out: out.clone() };
    assert!(settings.check().is_err());
    assert!(!elsewhere.exists(), "the target of the link was created");
    std::fs::write(folder.path().join("kept.jsonl"), "a line\n").unwrap();
    Settings { every_steps: 1, out: folder.path().join("kept.jsonl") }.check().unwrap();
    assert_eq!(std::fs::read_to_string(folder.path().join("kept.jsonl")).unwrap(), "a line\n");
}
