//! `prsmed plan`, `preset` and `solve`, and their errors. No GPU is needed, because the GPUs are only named.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{
    done, error_text, folder, is_soak, objects, path, phantoms, prsmed, refused, run, train, trained,
};
use serde_json::Value;

fn preset(gpu: &str) -> Command {
    let mut command = prsmed();
    command.args(["preset", "--gpu", gpu]);
    command
}

fn plan(arguments: &[&str]) -> Command {
    let mut command = prsmed();
    command.arg("plan").args(arguments);
    command
}

fn json(text: &str) -> Value {
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

fn config(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name)).unwrap()
}

#[test]
#[expect(clippy::print_stderr, reason = "a skipped test is visible")]
fn the_preset_for_a_cpu_fits_24_gib() {
    if !is_soak() {
        eprintln!("SKIPPED: a plan for a CPU computes for 40 seconds; scripts/soak has it");
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if !std::arch::is_x86_feature_detected!("avx512bw") {
        eprintln!("SKIPPED: without AVX-512 a plan in bf16 runs slow convolutions for minutes");
        return;
    }
    let plan = json(&done(plan(&["--preset", "cpu", "--gpu", "cpu:24gb"]).arg("--json")));
    let peak = plan["phases"].as_array().unwrap().iter().map(|phase| phase["device_peak"].as_f64().unwrap());
    let peak = peak.fold(0.0, f64::max) / f64::from(1 << 30);
    assert!((18.0..22.0).contains(&peak), "{peak} GiB; configs/cpu.toml says about 20");
}

/// Steps of nearly the same work that other programs were measured at, see docs/guides/memory-and-presets.md: Mistral 7B with
/// LoRA on an A100 80GB, 4 and 8 sequences of 4,096 tokens with checkpointing; a model of 8 billion parameters on an H100.
#[test]
fn times_are_near_published_measurements_of_the_same_language_model() {
    for (gpu, images, checkpointing, measured) in
        [("A100 80GB", 4, "full", 4.93), ("A100 80GB", 8, "full", 9.77), ("H100", 2, "none", 0.657 * 7.24 / 8.03)]
    {
        let mut command = plan(&["--preset", "gpu-80gb", "--gpu", gpu, "--json"]);
        // with the 576 tokens of an image less the placeholder: 4,096
        for set in ["train.accumulation=1", "data.questions_per_image=1", "model.max_text_tokens=3521"] {
            command.args(["--set", set]);
        }
        let sets = [format!("train.micro_batch={images}"), format!("train.checkpointing={checkpointing}")];
        let planned = json(&done(command.args(["--set", &sets[0], "--set", &sets[1]])));
        let seconds = planned["time"]["seconds"].as_f64().unwrap();
        assert!((0.85..1.15).contains(&(seconds / measured)), "{gpu}, {images} images: {seconds} s, not {measured} s");
    }
}

/// Number of compromises of a preset, and its seconds per sample.
fn rank(found: &Value) -> (usize, f64) {
    let choice = &found["choice"];
    let quantization = choice["quantization"].as_str().unwrap();
    let coarser = ["none", "nf4", "nf4-double"].iter().position(|name| *name == quantization).unwrap();
    let samples: f64 =
        ["questions", "micro_batch", "accumulation"].map(|key| choice[key].as_f64().unwrap()).iter().product();
    assert_eq!(choice["image_size"], 1024, "{choice}");
    (
        coarser + usize::from(choice["optimizer"] != "adamw"),
        found["plan"]["time"]["seconds"].as_f64().unwrap() / samples,
    )
}

#[test]
fn all_gpus_are_compared_in_one_table() {
    let given = done(preset("all").args(["--samples", "38000", "--json"]));
    let record = objects(&given).pop().unwrap();
    let gpus = record["gpus"].as_array().unwrap();
    assert!(gpus.len() > 60, "{}", gpus.len());
    let number = |gpu: &Value, key: &str| gpu[key].as_f64().unwrap();
    for pair in gpus.windows(2) {
        assert!(number(&pair[0], "step_seconds") <= number(&pair[1], "step_seconds"), "{pair:?}");
    }
    for gpu in gpus {
        assert!(number(gpu, "device_peak") < number(gpu, "memory"), "{gpu}");
        let seconds = number(&gpu["training"], "seconds");
        assert!((seconds / number(gpu, "step_seconds") - number(&gpu["training"], "steps")).abs() < 1.0, "{gpu}");
    }
    let of = |name: &str| gpus.iter().find(|gpu| gpu["gpu"] == name);
    let t4 = of("T4").unwrap();
    assert_eq!((&t4["precision"], &t4["preset"]), (&"fp16".into(), &"gpu-12gb".into()), "16 GB less ECC");
    assert_eq!(of("RTX 4090").unwrap()["precision"], "bf16");
    assert!(of("V100 16GB").is_none(), "libtorch has no code for it");
    // the preset itself says the same
    let same = done(prsmed().args(["plan", "--preset", "gpu-24gb", "--gpu", "RTX 4090", "--json"]));
    let same = objects(&same).pop().unwrap();
    assert_eq!(same["device_peak"], of("RTX 4090").unwrap()["device_peak"]);
    assert_eq!(same["time"]["seconds"], of("RTX 4090").unwrap()["step_seconds"]);
    let expected = "error: `--preset`: belongs to one GPU: each has its own built-in preset here\n\
                    hint: leave it out, or name one GPU; `--set` changes the settings of all";
    refused(preset("all").args(["--preset", "tiny"]), expected);
    if !is_soak() {
        return;
    }
    let text = done(preset("all").args(["--gpus", "8", "--set", "train.epochs=3", "--samples", "1000"]));
    assert!(text.starts_with("GPU ") && text.lines().any(|line| line.starts_with("A100 80GB")), "{text}");
}

#[test]
fn settings_that_are_tried_in_the_first_steps_are_part_of_a_preset() {
    // kernels of a tiny model are short: the CPU limits a fast GPU
    let given = done(preset("H200").args(["--preset", "tiny"]));
    assert!(given.contains("graph = \"auto\"") && given.contains("fused_kernels = \"auto\""), "{given}");
    let line = given.lines().find(|line| line.contains("with CUDA graphs (train.graph=auto)")).unwrap();
    assert!(line.contains("tried in the first steps"), "{line}");
    // the features of this small tower are little of a step, and less of one with words that follow masks
    let frozen = ["model.train_base=false", "train.clip_norm=0", "model.answer_reads_mask=false"];
    let frozen = frozen.into_iter().flat_map(|set| ["--set", set]);
    let given = done(preset("cpu:8gb").args(["--preset", "tiny"]).args(frozen));
    assert!(given.contains("cache_vision = \"disk\"") && !given.contains("\ngraph = "), "{given}");
    let given = done(preset("H200").args(["--preset", "full", "--effective-batch", "3", "--set", "train.clip_norm=0"]));
    assert!(given.contains("\naccumulation = 1") && !given.contains("micro_batch = "), "{given}");
    assert!(!given.contains("step_in_backward = "), "no memory has to be saved: {given}");
    // settings from flags are kept, and settings that exclude CUDA graphs or `step_in_backward` are respected
    let off = ["--preset", "tiny", "--set", "train.graph=off", "--set", "train.fused_kernels=off"];
    let given = done(preset("H200").args(off));
    assert!(!given.contains("\ngraph = ") && !given.contains("fused_kernels = "), "{given}");
    let given = done(preset("H200").args(["--preset", "tiny", "--set", "model.semantics=reference"]));
    assert!(!given.contains("\ngraph = "), "{given}");
    if !is_soak() {
        return;
    }
    let graphs = ["--set", "train.clip_norm=0", "--set", "train.graph=on", "--effective-batch", "3"];
    let given = done(preset("8gb").args(graphs));
    assert!(given.contains("graph = \"on\"") && !given.contains("step_in_backward = "), "{given}");
    assert!(!given.contains("stream_"), "captured steps cannot copy weights: {given}");
    let resident = done(preset("8gb").args(["--set", "model.stream_layers=none"]));
    assert!(!resident.contains("stream_") && resident.contains("checkpointing = 30"), "{resident}");
}

/// Sizes of GPUs, in GB, with the largest planned memory of small ones in GiB.
const SIZES: [(u32, f64); 14] = [
    (4, 3.7),
    (6, 5.6),
    (8, 7.6),
    (11, 11.0),
    (12, 12.0),
    (16, 16.0),
    (18, 18.0),
    (24, 24.0),
    (32, 32.0),
    (40, 40.0),
    (48, 48.0),
    (80, 80.0),
    (141, 141.0),
    (192, 192.0),
];

#[test]
fn presets_fit_and_a_larger_gpu_never_gets_a_worse_one_and_committed_ones_are_current() {
    let (mut before, mut num_committed) = ((usize::MAX, f64::INFINITY), 0);
    let is_committed = |size: u32| prsmed::config::PRESETS.iter().any(|(name, _)| *name == format!("gpu-{size}gb"));
    // a search takes seconds: scripts/check searches for three sizes (and below for 4 GB), scripts/soak for all
    let sizes = || SIZES.into_iter().filter(|(size, _)| is_soak() || [12, 24, 80].contains(size));
    for (size, most) in sizes() {
        let found = json(&done(preset(&format!("{size}gb")).arg("--json")));
        let gib = |key: &str| found["plan"][key].as_f64().unwrap() / f64::from(1 << 30);
        assert!(found["plan"]["fits"].as_bool().unwrap() && gib("device_peak") <= most, "{size} GB: {found}");
        // the host of a named GPU is not known
        assert!(gib("host_weights") <= f64::from(size) * 1.25, "{size} GB: {found}");
        assert_eq!(gib("host_weights") > 0.0, found["choice"]["stream_layers"] != "none", "{size} GB: {found}");
        assert!(size > 8 || gib("host_weights") > 0.0, "{size} GB: {found}");
        let now = rank(&found);
        assert!(now.0 < before.0 || now.0 == before.0 && now.1 <= before.1, "{size} GB: {now:?} after {before:?}");
        before = now;
        if is_committed(size) {
            num_committed += 1;
            assert_eq!(found["toml"], config(&format!("gpu-{size}gb.toml")), "{size} GB: run scripts/presets");
        }
    }
    assert_eq!(num_committed, sizes().filter(|(size, _)| is_committed(*size)).count());
}

/// Each committed preset names its plan in comments.
#[test]
fn the_plans_of_committed_presets_are_current() {
    let committed = SIZES.map(|(size, _)| format!("gpu-{size}gb"));
    let committed = committed.iter().filter(|name| prsmed::config::PRESETS.iter().any(|(known, _)| known == name));
    let mut looked_at = 0;
    for name in committed {
        let planned = done(&mut plan(&["--preset", name, "--gpu", name.trim_start_matches("gpu-")]));
        let file = config(&format!("{name}.toml"));
        let comments: Vec<&str> = file.lines().map(|line| line.trim_start_matches('#').trim_start()).collect();
        for line in planned.lines() {
            assert!(comments.contains(&line.trim_start()), "{name}: run scripts/presets: {line}");
        }
        looked_at += 1;
    }
    assert!(looked_at >= 9, "{looked_at}");
}

#[test]
fn for_a_gpu_that_is_too_small_the_smallest_settings_are_named() {
    for gpu in if is_soak() { &["2gb", "3gb"][..] } else { &["3gb"] } {
        let ran = run(&mut preset(gpu));
        assert_eq!(ran.code, Some(1), "{gpu}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{gpu}");
        assert!(ran.stderr.contains("no settings fit ") && ran.stderr.contains("in 4 bits"), "{gpu}: {}", ran.stderr);
    }
}

#[test]
fn an_effective_batch_is_exact_or_the_preset_says_what_it_costs() {
    for &samples in if is_soak() { &[10, 32, 33][..] } else { &[32] } {
        let ran = run(preset("24gb").args(["--effective-batch", &samples.to_string()]));
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let file = path(&format!("effective-{samples}.toml"));
        fs::write(&file, &ran.stdout).unwrap();
        let text = done(prsmed().args(["train", "--print-config", "--config"]).arg(&file));
        let read: toml::Table = text.parse().unwrap();
        let number = |section: &str, key: &str| read[section][key].as_integer().unwrap();
        let product =
            number("train", "micro_batch") * number("train", "accumulation") * number("data", "questions_per_image");
        assert_eq!(product, samples);
        let note = format!("do not divide the effective batch of {samples};");
        assert_eq!(ran.stderr.contains(&note), samples % 3 != 0, "{}", ran.stderr);
    }
}

#[test]
fn a_preset_can_be_planned_as_a_file() {
    let file = path("my.toml");
    fs::write(&file, done(preset("24gb").args(["--effective-batch", "6"]))).unwrap();
    let planned = done(plan(&["--gpu", "24gb", "--json", "--config"]).arg(&file));
    let planned = json(&planned);
    let peaks = ["allocated_peak", "reserved_peak", "device_peak"].map(|name| planned[name].as_u64().unwrap());
    assert!(peaks[0] < peaks[1] && peaks[1] < peaks[2], "{peaks:?}");
    assert_eq!(planned["fits"], true);
    let phases: Vec<&str> = planned["phases"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(phases, ["load", "first step", "step", "evaluate", "save", "resume"]);
    for (column, peak) in ["allocated_peak", "reserved_peak", "device_peak"].iter().zip(peaks) {
        let highest = planned["phases"].as_array().unwrap().iter().map(|p| p[*column].as_u64().unwrap()).max();
        assert_eq!(highest, Some(peak), "{column}");
    }
    let text = done(prsmed().args(["train", "--print-config", "--config"]).arg(&file));
    let read: toml::Table = text.parse().unwrap();
    let train = read["train"].as_table().unwrap();
    let number = |key: &str| train[key].as_integer().unwrap();
    let questions = read["data"]["questions_per_image"].as_integer().unwrap();
    assert_eq!(number("micro_batch") * number("accumulation") * questions, 6);
}

#[test]
fn for_a_job_that_does_not_fit_helpful_changes_are_listed() {
    let kept = ["--set", "train.checkpointing=none", "--set", "train.micro_batch=8", "--json"];
    let mut sets: Vec<&str> = ["--preset", "full", "--gpu", "24gb"].into_iter().chain(kept).collect();
    let ran = run(&mut plan(&sets));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let planned = json(&ran.stdout);
    assert_eq!(planned["fits"], false);
    let remedies = planned["remedies"].as_array().unwrap();
    let first = &remedies[0];
    assert!(first["keeps_results"].as_bool().unwrap() && first["fits"].as_bool().unwrap(), "{remedies:?}");
    // the change saves as much as promised
    let change = first["change"].as_str().unwrap();
    sets.extend(change.split(' ').flat_map(|set| ["--set", set]));
    let then = json(&done(&mut plan(&sets)));
    assert_eq!(then["device_peak"], first["device_peak"]);
    let saved = planned["device_peak"].as_u64().unwrap() - then["device_peak"].as_u64().unwrap();
    assert_eq!(first["saves"].as_u64(), Some(saved));
}

#[test]
fn measured_memory_equals_the_plan() {
    let given = done(plan(&["--preset", "tiny", "--measure", "--json"]).env("OMP_NUM_THREADS", "1"));
    let record = json(&given);
    let measured = record["measured"].as_array().unwrap();
    assert_eq!(measured.len(), 6);
    for phase in measured {
        let planned = record["phases"].as_array().unwrap().iter().find(|planned| planned["name"] == phase["name"]);
        let planned = planned.unwrap();
        assert_eq!(planned["allocated_peak"], phase["allocated_peak"], "{}", phase["name"]);
        assert_eq!(phase["plan_errors"]["allocated"], 0.0);
        let [planned, reserved] = [planned, phase].map(|side| side["reserved_peak"].as_f64().unwrap());
        assert_eq!(phase["plan_errors"]["reserved"].as_f64().unwrap(), planned / reserved - 1.0);
    }
    let given = done(plan(&["--preset", "tiny", "--task", "predict", "--measure"]).env("OMP_NUM_THREADS", "1"));
    let (_, phases) = given.split_once("measured with random weights (planned, error of the plan):\n").unwrap();
    assert!(phases.starts_with("  load: allocated ") && phases.lines().count() == 2, "{given}");
    for phase in phases.lines() {
        // each with the plan of the same phase
        let (_, bytes) = phase.split_once(": allocated ").unwrap();
        let (measured, planned) = bytes.split_once(" (").unwrap();
        assert!(planned.starts_with(&format!("{measured}, +0.0 %), reserved ")), "{phase}");
    }
    refused(
        &mut plan(&["--measure", "--gpu", "24gb"]),
        "error: `--measure`: only the device of this machine can be measured\nhint: leave out `--gpu` or `--measure`",
    );
    let generator = ["--task", "augment", "--set", "augment.model=random:tiny", "--set", "augment.image_size=64"];
    let given = done(plan(&[&generator[..], &["--measure", "--json"]].concat()).env("OMP_NUM_THREADS", "1"));
    let measured = json(&given)["measured"].as_array().unwrap().clone();
    let names: Vec<&str> = measured.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["encode prompts", "load", "encode", "denoise", "decode"]);
    assert!(measured.iter().all(|phase| phase["plan_errors"]["allocated"] == 0.0), "{given}");
}

#[test]
fn unknown_gpus_settings_and_file_types_are_refused() {
    refused(
        &mut preset("RTX 4091"),
        "error: `--gpu`: `RTX 4091` is neither a known GPU nor a size such as `24gb`\n\
         hint: did you mean `RTX 4090`, `RTX 3090`, `RTX 4070`? a memory size such as `24gb` always works, also \
         after a name: `NAME 24gb`",
    );
    let file = path("misspelt.toml");
    fs::write(&file, "[train]\nmicro_bach = 2\n").unwrap();
    let ran = run(plan(&["--gpu", "24gb", "--config"]).arg(&file));
    assert_eq!(ran.code, Some(2));
    assert!(error_text(&ran).ends_with("hint: did you mean `train.micro_batch`?"), "{}", ran.stderr);
    let ran = run(&mut plan(&["--gpu", "24gb", "--timeline", "step.png"]));
    assert_eq!(ran.code, Some(2));
    assert!(error_text(&ran).contains("`step.png` does not end in .json"), "{}", ran.stderr);
}

#[test]
fn gpus_and_models_that_cannot_be_used_are_refused_by_every_command_that_plans() {
    let gpus = [
        ("V100", "V100 16GB: compute capability 7.0; "),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX 1080 Ti: compute capability 6.1; "),
        ("MacBook", "MacBook: Apple GPUs are not supported"),
        ("RX 7900 XTX", "RX 7900 XTX: AMD GPUs are not supported"),
    ];
    for (gpu, reason) in gpus {
        for command in [&["plan"][..], &["preset"], &["solve", "--for", "micro-batch"]] {
            let ran = run(prsmed().args(command).args(["--gpu", gpu]));
            assert_eq!(ran.code, Some(2), "{}", ran.stderr);
            assert!(error_text(&ran).starts_with(&format!("error: `--gpu`: {reason}")), "{}", ran.stderr);
        }
    }
    let base = folder("qwen");
    fs::write(base.join("config.json"), r#"{"architectures": ["Qwen2_5_VLForConditionalGeneration"]}"#).unwrap();
    fs::write(base.join("model.safetensors"), "").unwrap();
    let set = format!("model.base={}", base.display());
    let data = phantoms();
    for command in
        [&["plan"][..], &["preset"], &["solve", "--for", "gpu"], &["train", "--out", "unused", "--data-root"]]
    {
        let mut command_line = prsmed();
        command_line.args(command);
        if command[0] == "train" {
            command_line.arg(data).args(["--preset", "tiny"]);
        } else if command[0] != "solve" {
            command_line.args(["--gpu", "24gb"]);
        }
        let ran = run(command_line.args(["--set", &set]).current_dir(folder("beside-qwen")));
        assert_eq!(ran.code, Some(2), "{command:?}: {}", ran.stderr);
        let error = error_text(&ran);
        assert!(error.contains("Qwen2_5_VLForConditionalGeneration is not supported; supported: "), "{error}");
        assert!(!ran.stderr.contains("weight files of this command"), "{}", ran.stderr);
    }
}

#[test]
fn a_plan_for_a_gpu_without_bf16_is_in_fp16_and_says_so() {
    let ran = run(&mut plan(&["--preset", "tiny", "--set", "train.precision=bf16", "--gpu", "T4"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(error_text(&ran).contains("T4 has no bf16"), "{}", ran.stderr);
    let ran = run(&mut plan(&["--preset", "full", "--gpu", "RTX 2080 Ti"]));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stderr.contains("note: RTX 2080 Ti has no bf16: using `train.precision=fp16`"), "{}", ran.stderr);
    let ran = run(&mut plan(&["--preset", "tiny", "--gpu", "RTX 4090 Laptop", "--samples", "10"]));
    assert!(ran.stdout.contains("no published rates of this GPU: times are not predicted"), "{}", ran.stdout);
}

#[test]
fn the_timeline_is_a_chrome_trace() {
    let file = path("plan.json");
    done(plan(&["--preset", "tiny", "--gpu", "24gb", "--timeline"]).arg(&file));
    let trace: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let contains = |kind: &str, name: &str| events.iter().any(|event| event["ph"] == kind && event["name"] == name);
    assert!(contains("C", "activations") && contains("C", "total") && contains("B", "llm"));
    assert!(contains("X", "first step") && contains("X", "evaluate"));
    let count = |kind: &str| events.iter().filter(|event| event["ph"] == kind).count();
    assert_eq!(count("B"), count("E"), "every module that begins ends");
    assert!(count("b") >= count("e") && count("e") > 0);
}

#[test]
fn solve_finds_the_largest_value_that_fits() {
    // the full model takes seconds for each plan
    let (preset, gpu) = if is_soak() { ("full", "24gb") } else { ("tiny", "4gb") };
    let solve = |what: &str, more: &[&str]| {
        let mut command = prsmed();
        command.args(["solve", "--preset", preset, "--gpu", gpu, "--for", what, "--json"]).args(more);
        json(&done(&mut command))["value"].clone()
    };
    for (what, key) in [("micro-batch", "train.micro_batch"), ("tokens", "model.max_text_tokens")] {
        // scripts/check looks at one of four values, scripts/soak at all
        if is_soak() {
            let value = solve(what, &["--no-reserve"]).as_u64().unwrap();
            for (value, code) in [(value, 0), (value + 1, 1)] {
                let set = format!("{key}={value}");
                let ran = run(&mut plan(&["--preset", preset, "--gpu", gpu, "--set", &set]));
                assert_eq!(ran.code, Some(code), "{set}: {}", ran.stdout);
            }
        } else if what != "micro-batch" {
            continue;
        }
        // 3 % stay free, as in presets
        let value = solve(what, &[]).as_u64().unwrap();
        let [below, above] = [value, value + 1].map(|value| {
            let ran =
                run(plan(&["--preset", preset, "--gpu", gpu, "--set"]).args([&format!("{key}={value}"), "--json"]));
            let plan = json(&ran.stdout);
            plan["device_peak"].as_f64().unwrap() / plan["budget"]["bytes"].as_f64().unwrap()
        });
        assert!(below <= 0.97 && above > 0.97, "{what} {value}: {below} {above}");
    }
    let step = ["--set", "train.micro_batch=1", "--set", "train.accumulation=4"];
    let ran = done(prsmed().args(["solve", "--for", "gpus", "--gpu", "12gb", "--preset", "full", "--json"]).args(step));
    let found = json(&ran);
    let count = found["value"].as_u64().unwrap();
    assert!(count > 1, "{ran}");
    let sets =
        found["settings"].as_str().unwrap().trim_start_matches("with ").split(' ').flat_map(|set| ["--set", set]);
    let sets: Vec<&str> = step.into_iter().chain(sets).collect();
    for (gpus, code) in [(count, 0), (count / 2, 1)] {
        let mut command = plan(&["--preset", "full", "--gpu", "12gb", "--gpus", &gpus.to_string()]);
        let ran = run(command.args(&sets));
        assert_eq!(ran.code, Some(code), "{gpus} GPUs: {}", ran.stdout);
    }
    let ran = run(prsmed().args(["solve", "--for", "gpus", "--gpus", "2"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("`--gpus`: is not for `--for gpu` and `--for gpus`"), "{}", ran.stderr);
    let ran = run(prsmed().args(["solve", "--for", "gpu", "--gpu", "8gb"]));
    assert!(ran.code == Some(2) && ran.stderr.contains("`--gpu`: is what `--for gpu` finds"), "{}", ran.stderr);
    let found = json(&done(prsmed().args(["solve", "--for", "gpu", "--json"])));
    assert_eq!(found["gb_with_preset"], 4, "the smallest committed preset");
    let gpu = found["value"].as_str().unwrap();
    done(&mut plan(&["--preset", "full", "--gpu", gpu]));
    let ran = run(prsmed().args(["solve", "--gpu", "8gb", "--for", "micro-batch"]));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stdout.starts_with("train.micro_batch=1 does not fit 8 GB"), "{}", ran.stdout);
    // terabytes of weights
    let large = ["--preset", "tiny", "--set", "model.sizes.llm.intermediate_size=1073741824", "--json"];
    let ran = run(prsmed().args(["solve", "--for", "gpu"]).args(large));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let found = json(&ran.stdout);
    assert_eq!((&found["kind"], &found["key"], &found["value"]), (&"solve".into(), &"gpu".into(), &Value::Null));
    assert!(found["device_peak"].as_u64().unwrap() > 1 << 40, "{found}");
}

#[test]
fn a_plan_says_how_long_a_training_takes() {
    let of = |more: &[&str]| {
        let text = done(plan(&["--preset", "gpu-24gb", "--gpu", "48gb", "--json"]).args(more));
        let record = json(&text);
        (record["training"].clone(), record["time"]["seconds"].as_f64().unwrap())
    };
    let sets = ["--set", "train.micro_batch=2", "--set", "train.accumulation=5", "--set", "train.epochs=4"];
    let (training, step) = of(&[&["--samples", "3001"], &sets[..]].concat());
    // 1001 images of 3 questions or fewer, 10 in a step
    assert_eq!(
        ["samples", "groups", "steps_per_epoch", "steps"].map(|key| training[key].as_u64().unwrap()),
        [3001, 1001, 101, 404]
    );
    assert_eq!(training["step_seconds"].as_f64().unwrap(), step);
    assert!((training["epoch_seconds"].as_f64().unwrap() / (101.0 * step) - 1.0).abs() < 1e-9);
    assert!((training["seconds"].as_f64().unwrap() / (404.0 * step) - 1.0).abs() < 1e-9);
    // the phantoms have one or two questions about an image: steps are shorter than those planned with three
    let (training, step) = of(&[&["--data-root", phantoms().to_str().unwrap()], &sets[..]].concat());
    assert!(training["samples"].as_u64().unwrap() > 0, "{training}");
    assert!(training["step_seconds"].as_f64().unwrap() < 0.9 * step, "{training} {step}");
    let text = done(&mut plan(&["--preset", "tiny", "--gpu", "cpu", "--samples", "10"]));
    assert!(text.contains("training time: not predicted for the CPU"), "{text}");
    let ran = run(&mut plan(&["--preset", "tiny", "--gpu", "cpu", "--samples", "10", "--task", "eval"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stdout);
}

#[test]
fn training_reports_planned_and_measured_memory() {
    let result = json(&trained().1);
    let memory = &result["memory"];
    let [planned, measured] = ["planned", "measured"].map(|side| memory[side]["allocated_peak"].as_f64().unwrap());
    assert!((measured / planned - 1.0).abs() < 0.02, "planned {planned}, measured {measured}");
    // a run that decides about CUDA graphs itself has another peak than its plan
    let is_compared = memory["planned"]["with_graphs"]["fits"] != true;
    let num_notes = |stdout: &str| stdout.matches("\"tensors at their peak: planned ").count();
    assert_eq!(num_notes(&trained().1), usize::from(is_compared));
    let out = path("unplanned");
    let stdout = done(train(phantoms(), &out, &["train.max_steps=1"]).args(["--no-plan", "--json"]));
    assert!(json(&stdout)["memory"]["planned"].is_null());
    assert_eq!(num_notes(&stdout), 0);
}

#[test]
fn training_refuses_settings_that_cannot_fit() {
    // all micro-batches of a step are in host memory: this many need 70 GB
    let ran = run(&mut train(phantoms(), &path("too-large"), &["train.accumulation=20000", "model.image_size=512"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let error = error_text(&ran);
    assert!(error.starts_with("error: `train`: does not fit the CPU: "), "{error}");
    assert!(error.contains("`--no-plan` skips this check"), "{error}");
    assert!(ran.stderr.contains("note: changes that save memory:\n  --set "), "{}", ran.stderr);
    assert!(!path("too-large").join("last").exists());
}

#[test]
fn a_plan_of_a_prediction_names_flags_of_the_command_that_takes_them() {
    let ran = run(plan(&["--preset", "full", "--task", "predict", "--gpu", "4gb"]).env("OMP_NUM_THREADS", "1"));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let text = ran.stdout.split_once("changes that save memory, as flags of `prsmed predict`, `eval` and `serve`:\n");
    let (_, text) = text.unwrap_or_else(|| panic!("{}", ran.stdout));
    let parts = text.split_once("settings of another training that save memory, as flags of `prsmed train`:\n");
    let (own, others) = parts.unwrap_or_else(|| panic!("{}", ran.stdout));
    assert!(own.starts_with("  --stream-layers full: saves ") && own.contains("(fits)"), "{own}");
    assert!(own.lines().count() == 1 && others.lines().all(|line| line.starts_with("  --set ")), "{text}");
    let (flags, _) = own.trim_start().split_once(':').unwrap();
    done(prsmed().args(["predict", "a-run"]).args(flags.split(' ')).arg("--help"));
}

#[test]
fn a_preset_says_how_long_a_training_takes_and_which_batch_its_gpus_divide() {
    let tiny = ["--preset", "tiny", "--set", "model.train_base=false", "--set", "data.questions_per_image=1"];
    let ran =
        run(preset("24gb").args(tiny).args(["--gpus", "2", "--effective-batch", "3", "--samples", "300", "--json"]));
    let found = json(&ran.stdout);
    assert_eq!((&found["training"]["samples"], &found["training"]["steps_per_epoch"]), (&300.into(), &100.into()));
    let even = found["even_batches"].as_array().unwrap();
    assert!(even.iter().all(|even| even["effective_batch"].as_u64().unwrap().is_multiple_of(2)), "{even:?}");
    assert!(even[0]["times_faster"].as_f64().unwrap() >= 1.1, "one of two GPUs waits for the third image: {even:?}");
    assert!(ran.stderr.contains("2 GPUs cannot divide this batch evenly: `--effective-batch "), "{}", ran.stderr);
    assert!(ran.stderr.contains("steps in ") && ran.stderr.contains(" epochs, "), "{}", ran.stderr);
    assert!(ran.stderr.contains("add `--config preset.toml --gpus 2` to `prsmed train`"), "{}", ran.stderr);
    let even = run(preset("24gb").args(tiny).args(["--gpus", "2", "--effective-batch", "4", "--json"]));
    assert_eq!(json(&even.stdout)["even_batches"], serde_json::json!([]), "{}", even.stderr);
}

#[test]
fn a_check_on_a_login_node_names_what_a_training_lacks_and_starts_nothing() {
    let out = path("checked");
    let check = |out: &Path, more: &[&str]| {
        let mut command = prsmed();
        command.args(["train", "--check", "--data-root"]).arg(phantoms()).arg("--out").arg(out).args(more);
        command
    };
    let text = done(&mut check(&out, &["--preset", "tiny", "--gpu", "RTX A5000"]));
    assert!(
        text.contains(
            "the training can start on RTX A5000: settings, rows, and names and shapes of the weights were checked"
        ),
        "{text}"
    );
    let lacking = run(&mut check(&out, &["--preset", "gpu-24gb", "--gpu", "24gb"]));
    assert!(lacking.code == Some(2) && lacking.stderr.contains("prsmed hub get"), "{}", lacking.stderr);
    let both = run(&mut check(&out, &["--preset", "gpu-24gb", "--gpu", "12gb"]));
    assert!(both.stderr.contains("prsmed hub get") && both.stderr.contains("does not fit 12 GB"), "{}", both.stderr);
    let small = ["--preset", "tiny", "--set", "train.micro_batch=512", "--gpu", "4gb"];
    let refused = run(&mut check(&out, &small));
    assert!(refused.code == Some(2) && refused.stderr.contains("does not fit 4 GB"), "{}", refused.stderr);
    // another model is refused before anything is planned
    let other = ["--preset", "gpu-24gb", "--gpu", "24gb", "--set", "model.base=hub:Qwen/Qwen2.5-VL-7B-Instruct"];
    let other = run(&mut check(&out, &other));
    assert!(other.stderr.contains("cannot be read") && !other.stderr.contains("memory plan"), "{}", other.stderr);
    let mut started = train(phantoms(), &out, &[]);
    let started = run(started.args(["--gpu", "RTX A5000"]));
    assert!(started.stderr.contains("`--gpu`: is the GPU that `--check` plans for"), "{}", started.stderr);
    assert!(!out.exists(), "nothing was written");
    // a folder that has a run is refused now, not on the compute node
    let taken = run(&mut check(&trained().0, &["--preset", "tiny"]));
    assert!(taken.code == Some(2) && taken.stderr.contains("already contains a run"), "{}", taken.stderr);
    // but only after everything else was checked
    let both = run(&mut check(&trained().0, &["--preset", "gpu-24gb", "--gpu", "24gb"]));
    assert!(both.code == Some(2) && both.stderr.contains("prsmed hub get"), "{}", both.stderr);
}
