//! Trainings, evaluations and generations in several processes: the results of one process, the planned memory, failures,
//! `--gpus`, `torchrun`.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{copy, differing, done, is_soak, objects, path, phantoms, prsmed, run, train, tree};

/// A schedule whose losses do not amplify rounding: at high learning rates Adam's division by tiny second moments makes
/// any change of the order of sums visible after some steps, also on one process.
const CALM: [&str; 7] = [
    "train.micro_batch=1",
    "train.accumulation=4",
    "train.precision=fp32",
    "train.learning_rate=1e-5",
    "train.min_learning_rate=1e-6",
    "train.epochs=100",
    "train.validate_every_epochs=0",
];

fn calm(out: &Path, steps: usize, more: &[&str]) -> Command {
    calm_on(phantoms(), out, steps, more)
}

fn calm_on(data: &Path, out: &Path, steps: usize, more: &[&str]) -> Command {
    let steps = format!("train.max_steps={steps}");
    let sets: Vec<&str> = CALM.into_iter().chain([steps.as_str()]).chain(more.iter().copied()).collect();
    let mut command = train(data, out, &sets);
    command.args(["--no-plan", "--quiet"]);
    command
}

/// Losses of each step.
fn losses(run: &Path) -> Vec<BTreeMap<String, f64>> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let steps = objects(&text).into_iter().filter(|line| line["kind"] == "step");
    steps.map(|line| serde_json::from_value(line["losses"].clone()).unwrap()).collect()
}

/// The largest relative difference of two runs' losses.
fn worst(a: &Path, b: &Path) -> f64 {
    let (a, b) = (losses(a), losses(b));
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(&b).flat_map(|(a, b)| {
        assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
        a.iter().map(|(name, value)| ((value - b[name]) / value).abs())
    });
    pairs.fold(0.0, f64::max)
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// The processes of a job, which are killed at the end of the test.
struct Job(Vec<Child>);

impl Job {
    /// Starts `command` as each of `size` ranks.
    fn start(size: usize, command: impl Fn() -> Command) -> Self {
        let port = free_port().to_string();
        let rank = |rank: usize| {
            let mut command = command();
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", size.to_string()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            command.env("GLOO_SOCKET_IFNAME", "lo").stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        Self((0..size).map(rank).collect())
    }

    fn signal(&self, rank: usize, signal: i32) {
        let id = i32::try_from(self.0[rank].id()).unwrap();
        // SAFETY: sends a signal to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    }

    /// True if all ranks end within `limit`.
    fn ends_within(&mut self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.0.iter_mut().all(|child| child.try_wait().unwrap().is_some()) {
            if start.elapsed() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }

    /// Exit code, standard output and standard error of each rank.
    fn ends(mut self) -> Vec<(Option<i32>, String, String)> {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let ended = std::mem::take(&mut self.0).into_iter().map(|child| child.wait_with_output().unwrap());
        ended.map(|output| (output.status.code(), text(output.stdout), text(output.stderr))).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until a run has a checkpoint.
fn wait_for_checkpoint(run: &Path) {
    let start = Instant::now();
    while !run.join("last/trainer.json").exists() {
        assert!(start.elapsed() < Duration::from_mins(1), "no checkpoint in {}", run.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn losses_do_not_depend_on_the_number_of_processes_or_on_what_they_divide() {
    let steps = if is_soak() { 50 } else { 6 };
    // no checkpoint at each step
    let calm = |out: &Path, sets: &[&str]| calm(out, steps, &[sets, &["train.checkpoint_every_steps=0"]].concat());
    let one = path("ranks-one");
    done(&mut calm(&one, &[]));
    let first = losses(&one)[0]["total"];
    assert!(losses(&one)[steps - 1]["total"] < if is_soak() { 0.97 } else { 1.0 } * first, "it learns");
    let cases: [(&str, &str); 8] = [
        ("2", "train.zero_stage=0"),
        ("4", "train.zero_stage=0 train.reduce_bucket_mib=1"),
        ("2", "train.zero_stage=1"),
        ("3", "train.zero_stage=2 train.reduce_bucket_mib=1"),
        ("4", "train.zero_stage=2"),
        ("2", "train.zero_stage=2 train.offload_optimizer=true"),
        ("4", "model.train_base=false model.divide_layers=true"),
        // one process has two passes, the others have one
        ("3", "model.train_base=false model.divide_layers=true model.quantization=nf4-double train.zero_stage=2"),
    ];
    let (frozen, quantized) = (path("ranks-frozen"), path("ranks-quantized"));
    done(&mut calm(&frozen, &["model.train_base=false"]));
    done(&mut calm(&quantized, &["model.train_base=false", "model.quantization=nf4-double"]));
    for (number, (gpus, sets)) in cases.into_iter().enumerate() {
        let several = path(&format!("ranks-several-{number}"));
        done(calm(&several, &sets.split(' ').collect::<Vec<_>>()).args(["--gpus", gpus]));
        let same = match sets {
            _ if sets.contains("nf4") => &quantized,
            _ if sets.contains("train_base=false") => &frozen,
            _ => &one,
        };
        let worst = worst(same, &several);
        assert!(worst < 1e-6, "{gpus} processes, {sets}: {worst}");
    }
}

/// One process has two passes, the others have one. Each has several sums on their way before the last layers are
/// collected.
#[test]
fn unequal_passes_with_divided_layers_and_gradients_wait_for_nothing_in_a_circle() {
    let mut sets =
        vec!["model.train_base=false", "model.divide_layers=true", "train.micro_batch=2", "train.accumulation=4"];
    sets.extend([
        "train.zero_stage=2",
        "train.reduce_bucket_mib=1",
        "lora.rank=4096",
        "train.checkpoint_every_steps=0",
    ]);
    let (out, one) = (path("ranks-circle"), path("ranks-circle-one"));
    done(&mut calm(&one, 2, &[&sets[..4], &["lora.rank=4096", "model.divide_layers=false"]].concat()));
    let mut job = Job::start(3, || calm(&out, 2, &sets));
    assert!(job.ends_within(Duration::from_mins(1)), "the processes wait for each other");
    assert!(job.ends().iter().all(|(code, ..)| *code == Some(0)));
    assert!(worst(&one, &out) < 1e-6);
}

#[test]
fn eight_bit_state_average_and_checkpointing_are_those_of_one_process() {
    let sets = ["train.optimizer=adamw8bit", "train.ema_decay=0.9", "train.checkpointing=full", "lora.dropout=0.1"];
    let (one, three) = (path("ranks-more-one"), path("ranks-more-three"));
    done(&mut calm(&one, 6, &sets));
    done(calm(&three, 6, &[&sets[..], &["train.zero_stage=2"]].concat()).args(["--gpus", "3"]));
    assert!(worst(&one, &three) < 1e-6);
    let names = |run: &Path| {
        let archive = prsmed::tensor::weights::Archive::open(&run.join("last/trainer.safetensors")).unwrap();
        archive.names().to_vec()
    };
    assert_eq!(names(&one), names(&three), "a checkpoint has the state of all processes");
}

/// `augment finetune` of the tiny generator.
fn finetune(out: &Path, gpus: &str, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["augment", "finetune", "--preset", "tiny", "--no-plan", "--quiet", "--gpus", gpus, "--data-root"]);
    command.arg(phantoms()).arg("--out").arg(out);
    let sets = ["finetune.image_size=64", "train.micro_batch=1", "train.accumulation=4", "train.learning_rate=1e-5"];
    command.args(sets.iter().chain(more).flat_map(|set| ["--set", set]));
    command
}

/// Losses of the validations.
fn validated(run: &Path) -> Vec<f64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = objects(&text).into_iter().filter(|line| line["kind"] == "validation");
    lines.map(|line| line["values"]["loss_denoising"].as_f64().unwrap()).collect()
}

#[test]
fn a_fine_tuning_does_not_depend_on_the_number_of_processes() {
    let one = path("ranks-finetune-one");
    done(&mut finetune(&one, "1", &["train.max_steps=50"]));
    assert!(!validated(&one).is_empty());
    for (gpus, sets) in [("2", "train.zero_stage=0"), ("4", "train.zero_stage=2")] {
        let several = path(&format!("ranks-finetune-{gpus}"));
        done(&mut finetune(&several, gpus, &["train.max_steps=50", sets]));
        let worst = worst(&one, &several);
        assert!(worst < 1e-6, "{gpus} processes, {sets}: {worst}");
        let pairs = validated(&one).into_iter().zip(validated(&several));
        let apart = pairs.map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-6, "validation of {gpus} processes: {apart}");
    }
}

#[test]
fn an_evaluation_does_not_depend_on_the_number_of_processes() {
    let (run, one, three) = (path("ranks-evaluated"), path("ranks-eval-one"), path("ranks-eval-three"));
    done(&mut calm(&run, 2, &[]));
    let eval = |out: &Path, gpus: &str| {
        let mut command = prsmed();
        command.args(["eval", "--quiet", "--limit", "8", "--gpus", gpus, "--data-root"]).arg(phantoms());
        command.arg(&run).arg("--out").arg(out);
        done(&mut command)
    };
    let text = [eval(&one, "1"), eval(&three, "3")].map(|text| text.replace("ranks-eval-three", "ranks-eval-one"));
    assert_eq!(text[0], text[1]);
    let files = |out: &Path| {
        let mut files = tree(out);
        // it has the time
        assert!(files.remove("report.html").is_some() && files.contains_key("samples.csv"));
        files
    };
    assert!(files(&one) == files(&three));
}

#[test]
fn pairs_do_not_depend_on_the_number_of_processes() {
    let (one, three) = (path("ranks-pairs-one"), path("ranks-pairs-three"));
    let generate = |out: &Path, gpus: &str| {
        let mut command = prsmed();
        command.args(["augment", "generate", "--preset", "tiny", "--limit", "9", "--quiet", "--gpus", gpus]);
        command.args(["--set", "augment.batch=2", "--no-filter", "--data-root"]).arg(phantoms()).arg("--out").arg(out);
        command
    };
    done(&mut generate(&one, "1"));
    done(&mut generate(&three, "3"));
    assert!(tree(&one) == tree(&three));
    // nothing is missing, and one that is comes again
    done(&mut generate(&three, "3"));
    let journal = three.join("manifest.jsonl");
    let lines = fs::read_to_string(&journal).unwrap();
    let most: Vec<&str> = lines.lines().take(5).collect();
    fs::write(&journal, most.join("\n") + "\n").unwrap();
    done(&mut generate(&three, "2"));
    assert!(tree(&one) == tree(&three));
}

#[test]
fn processes_of_a_fine_tuning_that_cannot_start_end() {
    let ran = run(finetune(&path("ranks-finetune-nowhere"), "2", &[]).args(["--annotations", "nowhere"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("nowhere"), "{}", ran.stderr);
    // a process of a job does not start further ones
    let mut command = finetune(&path("ranks-finetune-nested"), "2", &[]);
    let ran =
        run(command.env("RANK", "0").env("WORLD_SIZE", "1").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "1"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("this process belongs to a job already"), "{}", ran.stderr);
}

#[test]
fn a_run_continues_with_another_number_of_processes_at_the_same_samples() {
    let (one, several) = (path("ranks-whole"), path("ranks-parts"));
    // as `max_steps` is part of the schedule of the learning rate, runs are stopped by the end of an epoch
    done(&mut calm(&one, 0, &["train.epochs=3"]));
    let ended = losses(&one).len();
    let steps = |epochs: usize| ended * epochs / 3;
    for (gpus, until) in [("4", 1), ("1", 2), ("2", 3)] {
        let job = Job::start(gpus.parse().unwrap(), || {
            let mut command = calm(&several, 0, &["train.epochs=3"]);
            command.arg("--resume");
            command
        });
        if until < 3 {
            wait_for_steps(&several, steps(until));
            (0..gpus.parse().unwrap()).for_each(|rank| job.signal(rank, libc::SIGTERM));
        }
        for (code, _, stderr) in job.ends() {
            // the last step may have come before the signal
            assert!(code == Some(130) || code == Some(0), "{code:?}: {stderr}");
        }
    }
    assert!(worst(&one, &several) < 1e-6, "no sample was left out or repeated");
}

fn wait_for_steps(run: &Path, steps: usize) {
    let start = Instant::now();
    let count = || fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
    while count() < steps {
        assert!(start.elapsed() < Duration::from_mins(1), "no {steps} steps in {}", run.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn every_process_needs_the_planned_memory() {
    let segmenter = "train --preset tiny --set model.image_size=64";
    let generator = "finetune --preset tiny --set finetune.image_size=64";
    let frozen = "model.train_base=false model.divide_layers=true";
    let cases = [
        (segmenter, 2, "train.zero_stage=0 train.accumulation=4".to_owned()),
        (segmenter, 3, "train.zero_stage=1 train.accumulation=3".to_owned()),
        (segmenter, 2, "train.zero_stage=2 train.accumulation=3".to_owned()),
        (segmenter, 2, format!("{frozen} train.accumulation=3")),
        (segmenter, 3, format!("{frozen} model.quantization=nf4 train.zero_stage=2 train.accumulation=4")),
        (generator, 2, "train.zero_stage=0 train.accumulation=4".to_owned()),
        (generator, 3, "train.zero_stage=2 train.accumulation=4".to_owned()),
    ];
    for (task, size, sets) in cases {
        let gpus = size.to_string();
        let sets = ["train.micro_batch=1", "train.ema_decay=0.9"].into_iter().chain(sets.split(' '));
        let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
        let job = Job::start(size, || {
            let mut command = prsmed();
            command.args(["plan", "--gpu", "cpu", "--measure", "--json", "--gpus", &gpus, "--task"]);
            command.args(task.split(' ')).args(&sets);
            command
        });
        for (rank, (code, stdout, stderr)) in job.ends().into_iter().enumerate() {
            assert_eq!(code, Some(0), "{stderr}");
            let plan = objects(&stdout).into_iter().find(|line| line["kind"] == "plan").unwrap();
            let phases = plan["measured"].as_array().unwrap();
            assert!(phases.len() > 4);
            for (measured, planned) in phases.iter().zip(plan["phases"].as_array().unwrap()) {
                let of = |phase: &Value| (phase["name"].clone(), phase["allocated_peak"].clone());
                assert_eq!(of(measured), of(planned), "rank {rank} of {size}, {task} {sets:?}");
                assert!(measured["name"] != "step" || measured["allocated_peak"].as_u64().unwrap() > 1 << 20);
            }
        }
    }
}

#[test]
fn a_killed_process_ends_the_job_and_the_run_continues() {
    let out = path("ranks-killed");
    let job = Job::start(3, || calm(&out, 100_000, &[]));
    wait_for_checkpoint(&out);
    job.signal(1, libc::SIGKILL);
    let start = Instant::now();
    let ended = job.ends();
    assert!(start.elapsed() < Duration::from_mins(1), "{:?}", start.elapsed());
    assert_eq!((ended[0].0, ended[1].0, ended[2].0), (Some(2), None, Some(2)), "{ended:?}");
    for (rank, (_, _, stderr)) in ended.iter().enumerate() {
        assert!(!stderr.contains("frame #"), "addresses of libtorch's code: {stderr}");
        let last = stderr.trim_end().lines().last().unwrap_or_default();
        let cause = "the connection to process 1 broke: its process has probably been killed (memory, batch system)";
        assert!(rank == 1 || last.ends_with(cause) && !stderr.contains("pair.cc"), "rank {rank}: {stderr}");
    }
    let steps = losses(&out).len();
    // the checkpoint is whole
    let more =
        calm(&out, 100_000, &[]).arg("--resume").args(["--set", &format!("train.max_steps={}", steps + 2)]).output();
    let more = more.unwrap();
    assert_eq!(more.status.code(), Some(0), "{}", String::from_utf8_lossy(&more.stderr));
}

#[test]
fn a_killed_first_process_is_named() {
    let out = path("ranks-first-killed");
    let job = Job::start(2, || calm(&out, 100_000, &[]));
    wait_for_checkpoint(&out);
    job.signal(0, libc::SIGKILL);
    let ended = job.ends();
    let stderr = &ended[1].2;
    assert_eq!(ended[1].0, Some(2), "{stderr}");
    let last = stderr.trim_end().lines().last().unwrap_or_default();
    assert!(last.contains("the connection to process 0 broke: its process has failed (see its messages)"), "{stderr}");
    assert!(!stderr.contains("pair.cc"), "{stderr}");
}

#[test]
fn an_interrupt_ends_a_process_that_waits_for_the_others() {
    let mut command = calm(&path("ranks-waiting"), 2, &[]);
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", free_port().to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let job = Job(vec![command.spawn().unwrap()]);
    let start = Instant::now();
    while listens(job.0[0].id()).is_empty() {
        assert!(start.elapsed() < Duration::from_mins(1), "the process does not wait");
        std::thread::sleep(Duration::from_millis(20));
    }
    job.signal(0, libc::SIGTERM);
    let start = Instant::now();
    let ended = job.ends();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(ended[0].0, Some(130), "{}", ended[0].2);
}

#[test]
fn a_process_that_stops_responding_ends_the_job() {
    let out = path("ranks-hung");
    let job = Job::start(2, || calm(&out, 100_000, &[]));
    wait_for_checkpoint(&out);
    job.signal(1, libc::SIGSTOP);
    let start = Instant::now();
    let mut job = job;
    let first = job.0.remove(0).wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_mins(1), "{:?}", start.elapsed());
    let stderr = String::from_utf8(first.stderr).unwrap();
    assert_eq!(first.status.code(), Some(2), "{stderr}");
}

#[test]
fn a_stopped_first_process_ends_the_others() {
    let out = path("ranks-first-hung");
    let mut job = Job::start(2, || calm(&out, 100_000, &[]));
    wait_for_checkpoint(&out);
    job.signal(0, libc::SIGSTOP);
    let start = Instant::now();
    let other = job.0.remove(1).wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let stderr = String::from_utf8(other.stderr).unwrap();
    assert_eq!(other.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("rank 0, has not responded for 20 seconds") || stderr.contains("rank 0: its"), "{stderr}");
}

/// The first children of a process.
fn children(id: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

/// The addresses at which a process listens, as `/proc/net/tcp` writes them.
fn listens(id: u32) -> Vec<String> {
    let links =
        fs::read_dir(format!("/proc/{id}/fd")).unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let sockets: Vec<String> = links
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.trim_end_matches(']').to_owned()))
        .collect();
    let tables = ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/{id}/net/{name}")).unwrap_or_default());
    let rows =
        tables.iter().flat_map(|table| table.lines().skip(1)).map(|row| row.split_whitespace().collect::<Vec<_>>());
    let own = rows.filter(|row| row[3] == "0A" && sockets.contains(&row[9].to_owned()));
    own.map(|row| row[1].split(':').next().unwrap().to_owned()).collect()
}

#[test]
fn a_job_of_one_machine_listens_on_the_loopback_address_and_names_what_killed_it() {
    let out = path("ranks-gpus-killed");
    let mut command = calm(&out, 100_000, &[]);
    command.args(["--gpus", "2"]).stdout(Stdio::null()).stderr(Stdio::piped());
    let launcher = command.spawn().unwrap();
    wait_for_checkpoint(&out);
    let processes = children(launcher.id());
    assert_eq!(processes.len(), 2);
    let addresses: Vec<String> = processes.iter().flat_map(|id| listens(*id)).collect();
    assert!(!addresses.is_empty());
    // 127.0.0.1, also as an IPv6 address
    let is_loopback = |address: &String| address == "0100007F" || address.ends_with("FFFF00000100007F");
    assert!(addresses.iter().all(is_loopback), "{addresses:?}");
    // SAFETY: sends a signal to a process of this test.
    unsafe { libc::kill(i32::try_from(processes[1]).unwrap(), libc::SIGKILL) };
    let ended = launcher.wait_with_output().unwrap();
    let stderr = String::from_utf8(ended.stderr).unwrap();
    let last = stderr.trim_end().lines().last().unwrap_or_default();
    assert!(last.contains("a signal ended the process of rank 1: SIGKILL"), "{stderr}");
    assert!(!stderr.contains("frame #"), "{stderr}");
}

/// Changes a byte of a training image of `data`.
fn change_a_pixel(data: &Path) {
    let file = fs::read_dir(data.join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
}

#[test]
fn processes_with_other_rows_or_pixels_are_refused() {
    let train_on = |name: &str, change: &dyn Fn(&Path)| {
        let (data, out) = (copy(phantoms(), name), path(&format!("{name}-run")));
        change(&data);
        let number = std::sync::atomic::AtomicUsize::new(0);
        let job = Job::start(2, || {
            let rank = number.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            calm_on(if rank == 1 { &data } else { phantoms() }, &out, 4, &[])
        });
        let ended = job.ends();
        assert!(ended.iter().all(|(code, ..)| *code == Some(2)), "{ended:?}");
        assert!(!out.join("last").exists());
        ended[0].2.clone()
    };
    let other_answer = train_on("ranks-other-answers", &|data| {
        let file = fs::read_dir(data.join("annotations")).unwrap().next().unwrap().unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains("lesion"));
        fs::write(&file, text.replacen("lesion", "spot", 1)).unwrap();
    });
    assert!(other_answer.contains("rank 1") && other_answer.contains("other data than rank 0"), "{other_answer}");
    assert!(
        other_answer.contains("the first row that differs is ") && other_answer.contains(".csv:"),
        "{other_answer}"
    );
    let other_pixel = train_on("ranks-other-pixels", &change_a_pixel);
    assert!(other_pixel.contains("the content of ") && other_pixel.contains("brain_MRI/train_images"), "{other_pixel}");
    assert!(!other_pixel.contains("a sample was compared"), "{other_pixel}");
}

#[test]
fn a_generation_from_other_pixels_is_refused() {
    let (data, out) = (copy(phantoms(), "ranks-generate-pixels"), path("ranks-generate-pixels-out"));
    change_a_pixel(&data);
    let number = std::sync::atomic::AtomicUsize::new(0);
    let job = Job::start(2, || {
        let rank = number.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mut command = prsmed();
        command
            .args(["augment", "generate", "--preset", "tiny", "--limit", "2", "--quiet", "--no-filter", "--data-root"]);
        command.arg(if rank == 1 { &data } else { phantoms() }).arg("--out").arg(&out);
        command
    });
    let ended = job.ends();
    assert!(ended.iter().all(|(code, ..)| *code == Some(2)), "{ended:?}");
    let stderr = &ended[0].2;
    assert!(stderr.contains("rank 1 has other data than rank 0: the content of "), "{stderr}");
}

#[test]
fn the_cause_of_a_failure_is_on_the_standard_error_of_the_first_process() {
    // the second process has other settings
    let out = path("ranks-other");
    let number = std::sync::atomic::AtomicUsize::new(0);
    let job = Job::start(2, || {
        let rank = number.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mut command = calm(&out, 4, &[if rank == 1 { "data.max_bad_samples=7" } else { "data.max_bad_samples=8" }]);
        command.args(["--seed", "3"]);
        command
    });
    let ended = job.ends();
    for (code, _, stderr) in &ended {
        assert_eq!(*code, Some(2), "{stderr}");
        assert!(stderr.contains("rank 1 has settings, data or a checkpoint other than those of rank 0"), "{stderr}");
    }
    // the second process cannot read its data
    let number = std::sync::atomic::AtomicUsize::new(0);
    let job = Job::start(2, || {
        let rank = number.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mut command = calm(&path("ranks-data"), 4, &[]);
        if rank == 1 {
            command.args(["--annotations", "nowhere"]);
        }
        command
    });
    let ended = job.ends();
    assert!(ended.iter().all(|(code, ..)| *code == Some(2)), "{ended:?}");
    assert!(ended[0].2.contains("rank 1: ") && ended[0].2.contains("nowhere"), "{}", ended[0].2);
}

/// The other processes wait in a pass that cannot be completed.
#[test]
fn out_of_memory_with_divided_layers_ends_the_job() {
    let out = path("ranks-divided-memory");
    let number = std::sync::atomic::AtomicUsize::new(0);
    let start = Instant::now();
    let job = Job::start(2, || {
        let rank = number.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let batch = ["train.micro_batch=16", "train.accumulation=2"];
        let sets = ["model.train_base=false", "model.divide_layers=true"];
        let mut command = calm(&out, 8, &[sets, batch].concat());
        if rank == 0 {
            // enough to load the model
            command.args(["--memory-limit", "38mb"]);
        }
        command
    });
    let ended = job.ends();
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    assert!(ended.iter().all(|(code, ..)| *code != Some(0) && code.is_some()), "{ended:?}");
    let stderr = &ended[0].2;
    assert!(stderr.contains("out of memory") && !stderr.contains("set up"), "{stderr}");
}

#[test]
fn an_interrupt_of_any_process_makes_one_checkpoint() {
    let out = path("ranks-interrupted");
    let job = Job::start(2, || calm(&out, 100_000, &["train.checkpoint_every_steps=0"]));
    wait_for_steps(&out, 3);
    job.signal(1, libc::SIGTERM);
    for (rank, (code, _, stderr)) in job.ends().into_iter().enumerate() {
        assert_eq!(code, Some(130), "{stderr}");
        assert_eq!(stderr.contains("interrupted\nhint: run the same command again"), rank == 0, "{stderr}");
    }
    let progress: Value = serde_json::from_slice(&fs::read(out.join("last/trainer.json")).unwrap()).unwrap();
    assert_eq!(progress["step"], losses(&out).len());
}

#[test]
fn settings_that_several_processes_cannot_use_are_refused() {
    let refused = |gpus: &str, sets: &[&str]| {
        let ran = run(calm(&path("ranks-refused"), 2, sets).args(["--gpus", gpus]));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    let few = refused("5", &[]);
    assert!(few.contains("error: `train.accumulation`: a step has 4 images, too few for 5 processes"), "{few}");
    assert!(few.contains("hint: use at most 4 processes"), "{few}");
    let stepping = ["train.step_in_backward=true", "train.clip_norm=0", "train.accumulation=1", "train.micro_batch=4"];
    let ran = run(train(phantoms(), &path("ranks-refused"), &stepping).args(["--gpus", "2", "--quiet", "--no-plan"]));
    assert!(ran.stderr.contains("`train.step_in_backward`: "), "{}", ran.stderr);
    let norm = refused("2", &["model.batch_norm=batch"]);
    assert!(norm.contains("error: `model.batch_norm`: running statistics of several processes would differ"), "{norm}");
}

#[test]
fn variables_of_a_job_that_are_wrong_are_named() {
    let mut command = calm(&path("ranks-variables"), 2, &[]);
    let ran = run(command.env("RANK", "0"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.starts_with("error: `WORLD_SIZE`: the variable is not set\nhint: "), "{}", ran.stderr);
}

/// `torchrun` of the wheel, which starts `size` processes and starts them again if one fails.
fn torchrun(size: usize, command: &Command) -> Command {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/torchrun");
    let mut torchrun = Command::new(program);
    torchrun.current_dir(path("")).stdin(Stdio::null()).env("OMP_NUM_THREADS", "1").env("HF_HOME", path("hf"));
    torchrun.args(["--no-python", "--max-restarts", "1", "--nproc-per-node"]).arg(size.to_string());
    torchrun.args(["--master-addr", "127.0.0.1", "--master-port"]).arg(free_port().to_string());
    torchrun.arg(command.get_program()).args(command.get_args()).stdout(Stdio::piped()).stderr(Stdio::piped());
    torchrun
}

#[test]
#[ignore = "needs Python with torch (scripts/setup)"]
fn python_reads_torchrun_starts_a_killed_job_again_and_it_ends_with_the_same_bytes() {
    let (whole, killed): (PathBuf, PathBuf) = (path("ranks-torchrun"), path("ranks-torchrun-killed"));
    let command = |out: &Path| {
        let mut command = calm(out, 24, &["train.zero_stage=2"]);
        command.arg("--resume");
        command
    };
    done(command(&whole).args(["--gpus", "2"]));
    let job = torchrun(2, &command(&killed)).spawn().unwrap();
    wait_for_steps(&killed, 8);
    let found = Command::new("pgrep").args(["-f", killed.to_str().unwrap()]).output().unwrap();
    let ids: Vec<i32> = String::from_utf8(found.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    let ranks: Vec<i32> = ids.into_iter().filter(|id| i64::from(*id) != i64::from(job.id())).collect();
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    // SAFETY: sends a signal to a process of this test.
    assert_eq!(unsafe { libc::kill(ranks[1], libc::SIGKILL) }, 0);
    let output = job.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(differing(&whole.join("last"), &killed.join("last")), [] as [String; 0]);
    assert_eq!(losses(&killed).len(), 24);
}
