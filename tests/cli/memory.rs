//! Memory profiles of runs, and the report of an out-of-memory error.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::support::{STEPS, copy, done, error_text, is_soak, objects, path, phantoms, refused, run, shared, train};
use crate::warm::limit;

fn kinds(lines: &[Value], kind: &str) -> Vec<Value> {
    lines.iter().filter(|line| line["kind"] == kind).cloned().collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

fn profiled(out: &Path, steps: &str) -> Command {
    let mut command = train(phantoms(), out, &[steps, "train.ema_decay=0.5"]);
    command.args(["--profile-memory", "every=3"]);
    command
}

#[test]
fn a_memory_profile_continues_when_the_run_is_resumed() {
    let out = path("profiled");
    let said = run(&mut profiled(&out, "train.max_steps=4"));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let shown: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with("memory at step ")).collect();
    assert_eq!(shown.len(), 2, "the first and the third: {}", said.stderr);
    assert!(shown[0].starts_with("memory at step 1: tensors ") && shown[0].contains("optimizer "), "{shown:?}");
    assert!(shown[1].starts_with("memory at step 3: tensors ") && shown[1].contains("activations "), "{shown:?}");
    let file = out.join("memory.jsonl");
    let lines = objects(&fs::read_to_string(&file).unwrap());
    let phases = kinds(&lines, "phase");
    let steps: Vec<(&str, u64)> = phases.iter().map(|p| (p["name"].as_str().unwrap(), number(&p["step"]))).collect();
    for expected in [("load", 0), ("first step", 1), ("save", 2), ("step", 3), ("evaluate", 4), ("save", 4)] {
        assert!(steps.contains(&expected), "{expected:?} in {steps:?}");
    }
    for phase in &phases {
        let sum: u64 = phase["categories"].as_array().unwrap().iter().map(|pair| number(&pair[1])).sum();
        assert_eq!(sum, number(&phase["allocated_peak"]), "{phase}");
        assert!(number(&phase["system"]["resident"]) > number(&phase["allocated"]), "{phase}");
    }
    let resumed = objects(&done(profiled(&out, STEPS).args(["--resume", "--json"])));
    let more = objects(&fs::read_to_string(&file).unwrap());
    assert_eq!(more[..lines.len()], lines);
    assert!(kinds(&more[lines.len()..], "phase").iter().any(|phase| phase["name"] == "resume"));
    let result = resumed.last().unwrap();
    assert_eq!(result["memory"]["profile"].as_str(), file.to_str());
    // the overall peak is the highest of all phases since the start: profiling does not reset it
    let highest = kinds(&more[lines.len()..], "phase").iter().map(|phase| number(&phase["allocated_peak"])).max();
    assert!(number(&result["memory"]["measured"]["allocated_peak"]) >= highest.unwrap());
    assert_eq!(kinds(&resumed, "memory").len(), 2, "the first step after resuming, and the sixth");
}

#[test]
fn a_memory_profile_does_not_change_results() {
    let (plain, profiled) = (path("without-profile"), path("with-profile"));
    done(&mut train(phantoms(), &plain, &["train.max_steps=2"]));
    let mut command = train(phantoms(), &profiled, &["train.max_steps=2"]);
    done(command.args(["--profile-memory", "every=1"]));
    assert_eq!(crate::support::differing(&plain.join("last"), &profiled.join("last")), [""; 0]);
    assert!(profiled.join("memory.jsonl").is_file() && !plain.join("memory.jsonl").exists());
}

#[test]
fn invalid_profile_flags_are_refused() {
    let with = |flags: &[&str], message: &str| {
        refused(train(phantoms(), &path("never-profiled"), &[]).args(flags), message);
        assert!(!path("never-profiled").exists());
    };
    for wrong in ["100", "every=0", "steps=5"] {
        let message = format!(
            "error: `--profile-memory`: `{wrong}` is not `every=N` with N 1 or more\n\
             hint: write for example `--profile-memory every=100` for the first and every 100th step"
        );
        with(&["--profile-memory", wrong], &message);
    }
}

#[test]
fn the_out_of_memory_report_of_a_large_model_names_the_request() {
    // one weight of 2^40 x 128 numbers in fp32
    let sets = ["model.sizes.llm.intermediate_size=1099511627776"];
    let ran = run(train(phantoms(), &path("too-large"), &sets).args(["--json", "--no-plan"]));
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("out of memory: "), "{}", ran.stderr);
    assert!(ran.stderr.contains("\nrequested: 524288.00 GiB (trainable, llm"), "{}", ran.stderr);
    let line = objects(&ran.stdout).pop().unwrap();
    assert_eq!((&line["kind"], number(&line["failure"]["requested"])), (&"out_of_memory".into(), 1 << 49));
}

/// Private memory of a small run after its first step, as the kernel counts it for `RLIMIT_DATA`.
fn private_bytes_of_a_small_run() -> u64 {
    let out = path("small-run");
    let mut command = train(phantoms(), &out, &["train.epochs=1000", "train.validate_every_epochs=0"]);
    let mut child = command.arg("--no-plan").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while !out.join("last/trainer.json").exists() && started.elapsed() < Duration::from_mins(2) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmData:")?.split_whitespace().next());
    kib.unwrap().parse::<u64>().unwrap() << 10
}

/// Measured once, because several tests need it.
static SMALL_RUN: LazyLock<u64> = LazyLock::new(private_bytes_of_a_small_run);

#[test]
fn a_step_that_runs_out_of_memory_is_repeated_with_smaller_micro_batches() {
    // one batch, so that no other batch is prepared at the same time
    let sets = ["model.image_size=1024", "train.micro_batch=8", "data.max_train_rows=8", "train.epochs=1"];
    let mut command = train(phantoms(), &path("smaller"), &sets);
    limit(&mut command, libc::RLIMIT_DATA, *SMALL_RUN + (300 << 20));
    let ran = run(command.args(["--json", "--no-plan"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    for words in ["out of memory with 8 at once in `image_encoder", "it is repeated with micro-batches of 4"] {
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
    let result = objects(&ran.stdout).pop().unwrap();
    assert!(number(&result["reduced_micro_batch"]) < 8, "{result}");
}

/// Peak of the tensors of a training, planned and measured.
fn peaks(data: &Path, name: &str, sets: &[&str], is_old_cpu: bool) -> (u64, u64) {
    let mut command = train(data, &path(name), sets);
    command.args(["--json", "--quiet"]).env("OMP_NUM_THREADS", "1").env("PRSMED_TESTS_OWN_PROCESS", "1");
    if is_old_cpu {
        // kernels of a CPU without AVX-512
        command.env("ATEN_CPU_CAPABILITY", "avx2").env("ONEDNN_MAX_CPU_ISA", "AVX2");
    }
    let result = objects(&done(&mut command)).pop().unwrap();
    let memory = &result["memory"];
    (number(&memory["planned"]["allocated_peak"]), number(&memory["measured"]["allocated_peak"]))
}

/// The phantoms with one question and one answer for all of them, so that all micro-batches have the same size.
fn same_texts() -> PathBuf {
    let data = copy(phantoms(), "same-texts");
    for file in fs::read_dir(data.join("annotations")).unwrap() {
        let file = file.unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        let mut lines = text.lines();
        let mut changed = lines.next().unwrap().to_owned() + "\n";
        for line in lines {
            let (image, split) = (line.split(',').next().unwrap(), line.rsplit(',').next().unwrap());
            writeln!(changed, "{image},Where is it?,Here in the middle of the image.,center,{split}").unwrap();
        }
        fs::write(file, changed).unwrap();
    }
    data
}

/// Random settings of a short training.
fn drawn(rng: &mut ChaCha8Rng) -> [&'static str; 8] {
    let mut one = |values: &[&'static str]| *values.choose(rng).unwrap();
    [
        "train.max_steps=6",
        one(&["train.micro_batch=1", "train.micro_batch=2", "train.micro_batch=3", "train.micro_batch=4"]),
        one(&["train.accumulation=1", "train.accumulation=2"]),
        one(&["train.precision=fp32", "train.precision=bf16"]),
        one(&["train.checkpointing=none", "train.checkpointing=full"]),
        one(&["train.checkpoint_encoder=none", "train.checkpoint_encoder=full"]),
        one(&["train.optimizer=adamw", "train.optimizer=adamw8bit"]),
        one(&["train.ema_decay=0", "train.ema_decay=0.9"]),
    ]
}

/// scripts/check draws eight trainings, scripts/soak 20; every second one runs the kernels of an old CPU.
#[test]
fn no_peak_is_above_its_plan_and_that_of_the_largest_batch_equals_it() {
    let mut rng = ChaCha8Rng::seed_from_u64(29);
    let same = same_texts();
    for draw in 0..if is_soak() { 20 } else { 8 } {
        let (sets, is_old_cpu, has_one_size) = (drawn(&mut rng), draw % 2 == 1, draw / 4 % 2 == 1);
        let data = if has_one_size { &same } else { phantoms() };
        let (planned, measured) = peaks(data, &format!("peak-{draw}"), &sets, is_old_cpu);
        assert!(measured <= planned && (measured == planned || !has_one_size), "{sets:?}: {planned} {measured}");
    }
}

#[test]
#[ignore = "needs shared data"]
fn no_peak_on_images_of_shared_data_is_above_its_plan() {
    let mut rng = ChaCha8Rng::seed_from_u64(30);
    for draw in 0..if is_soak() { 10 } else { 2 } {
        let sets = drawn(&mut rng);
        let (planned, measured) = peaks(&shared("data/real"), &format!("peak-real-{draw}"), &sets, draw % 2 == 1);
        assert!(measured <= planned, "{sets:?}: planned {planned}, measured {measured}");
    }
}

#[test]
fn the_out_of_memory_report_lists_the_live_tensors() {
    // blocks of 32 MiB, so that at the limit enough memory is left for everything that is not a tensor
    let sets = ["model.image_size=2048", "train.micro_batch=1", "data.max_train_rows=1", "train.epochs=1"];
    let mut command = train(phantoms(), &path("out-of-memory"), &sets);
    limit(&mut command, libc::RLIMIT_DATA, *SMALL_RUN + (300 << 20));
    let ran = run(command.args(["--json", "--no-plan", "--profile-memory", "every=1"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let report = error_text(&ran);
    assert!(report.starts_with("error: out of memory: "), "{report}");
    assert!(report.contains("\nhint: lower `train.micro_batch`"), "{report}");
    for part in ["\nrequested: ", "\nin use at that time: tensors ", "\nby category: ", "\nlargest tensors:\n  "] {
        assert!(report.contains(part), "{part:?} in {report}");
    }
    let line = objects(&ran.stdout).pop().unwrap();
    assert_eq!(line["kind"], "out_of_memory", "{line}");
    // stored before the step's tensors were freed
    let failure = &line["failure"];
    let activations = failure["categories"].as_array().unwrap().iter().find(|pair| pair[0] == "activations").unwrap();
    assert!(number(&activations[1]) > 100 << 20, "{failure}");
    let largest = failure["largest"].as_array().unwrap();
    assert!(number(&largest[0]["bytes"]) >= 32 << 20, "{failure}");
    assert_eq!(largest[0]["category"], "activations", "{failure}");
    assert!(largest[0]["scope"].as_str().unwrap().starts_with("image_encoder"), "{failure}");
    assert!(largest.len() <= 10 && report.lines().filter(|line| line.contains("MiB  activations")).count() > 0);
}
