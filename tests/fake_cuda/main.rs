//! Tests GPU plans against libtorch's CUDA build on a fake CUDA runtime (`runtime.cpp`), without a GPU.
//!
//! The fake runtime tracks memory and streams but computes nothing. Operators, the backward pass, CUDA graph capture
//! and the caching allocator are libtorch's own. The tests cannot check cuDNN (it is off; libtorch's own convolutions
//! take slightly more memory), the memory of a driver's context, values, or time. They need the CUDA libraries of
//! libtorch's wheel.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stderr, reason = "shows the measured bytes with --nocapture")]

#[path = "../../benches/step/main.rs"]
#[expect(dead_code, reason = "its `main` is not called")]
mod step;

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

/// Folder with the compiled fake runtime, and the custom CUDA kernels compiled for the GPUs of this file. (NVRTC does
/// not run under the fake runtime.)
static FAKE_CUDA: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
    let kernels = folder.join("kernels");
    std::fs::create_dir_all(&kernels).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let torch = std::fs::canonicalize(root.join(".libtorch")).unwrap();
    let packages = torch.parent().unwrap().join("nvidia");
    let (cuda, nccl) = (packages.join("cu13/include"), packages.join("nccl/include"));
    assert!(
        torch.join("lib/libtorch_cuda.so").exists() && cuda.exists() && nccl.exists(),
        "this libtorch has no CUDA: run scripts/setup"
    );
    let source = |name: &str| root.join("tests/fake_cuda").join(name);
    let compile = |out: &str, more: &[&Path]| {
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=1", "-DNDEBUG", "-o"]);
        command.arg(folder.join(out)).arg("-I").arg(root.join("src/tensor/native/cuda/headers")).arg("-isystem");
        let done = command
            .arg(&cuda)
            .arg("-isystem")
            .arg(&nccl)
            .arg("-I")
            .arg(torch.join("include"))
            .args(more)
            .output()
            .unwrap();
        assert!(done.status.success(), "{out}: {}", String::from_utf8_lossy(&done.stderr));
    };
    compile("libcuda.so.1", &[&source("runtime.cpp"), &source("nccl.cpp")]);
    let library = PathBuf::from(format!("-L{}", torch.join("lib").display()));
    let libraries = [Path::new("-ltorch_cpu"), Path::new("-lc10")];
    compile("libwithoutcudnn.so", &[&source("without_cudnn.cpp"), &library, libraries[0], libraries[1]]);
    prsmed::tensor::kernels::set_folder(&kernels);
    for capability in [80, 89, 90] {
        prsmed::tensor::kernels::compile(capability).unwrap();
    }
    folder
});

/// The `prsmed` command on a fake GPU with `mib` MiB of memory.
fn prsmed(mib: u64, capability: u32) -> Command {
    on_fake_gpu(env!("CARGO_BIN_EXE_prsmed").into(), mib, capability)
}

/// A program on a fake GPU with `mib` MiB of memory.
fn on_fake_gpu(program: PathBuf, mib: u64, capability: u32) -> Command {
    let folder = FAKE_CUDA.as_path();
    let preload = [folder.join("libcuda.so.1"), folder.join("libwithoutcudnn.so")];
    let preload: Vec<&str> = preload.iter().map(|path| path.to_str().unwrap()).collect();
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", preload.join(" ")).env("LD_LIBRARY_PATH", folder).env("PRSMED_CACHE", folder);
    command.env("FAKE_CUDA_MIB", mib.to_string()).env("FAKE_CUDA_CAPABILITY", capability.to_string());
    command
}

/// True in `scripts/soak`, which plans more jobs than `scripts/check`.
fn is_soak() -> bool {
    std::env::var_os("PRSMED_SOAK").is_some()
}

/// The measurements and the plan of a job on a fake GPU with `gib` GiB.
fn measured(gib: u64, capability: u32, arguments: &[&str]) -> Value {
    let mut command = prsmed(gib << 10, capability);
    let output = command.args(["plan", "--measure", "--json", "--quiet"]).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let report = format!("{arguments:?}: {:?}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_str(text.lines().last().unwrap_or_else(|| panic!("{report}"))).unwrap();
    assert!(record["measured"].is_array(), "{report}");
    record
}

/// A collective operation of a rank (`nccl.cpp`): its name, its bytes, the kernels that were launched before it, and whether
/// the compute stream had to wait since the last copy.
type Collective = (String, u64, u64, bool);

/// The measurements, plans and collective operations of `size` ranks, each on a fake GPU with `gib` GiB.
fn measured_together(gib: u64, size: usize, arguments: &[&str]) -> Vec<(Value, Vec<Collective>)> {
    let home = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let log = |rank: usize| home.path().join(rank.to_string());
    let start = |rank: usize| {
        let mut command = prsmed(gib << 10, 89);
        command.args(["plan", "--measure", "--json", "--quiet", "--gpus", &size.to_string()]).args(arguments);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string()).env("FAKE_NCCL_LOG", log(rank));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("GLOO_SOCKET_IFNAME", "lo");
        command.env("OMP_NUM_THREADS", "1").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..size).map(start).collect();
    let ended: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    let read = |(rank, output): (usize, &Output)| {
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "rank {rank}, {arguments:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        let report = format!("rank {rank}, {arguments:?}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
        let record: Value = serde_json::from_str(text.lines().last().unwrap_or_else(|| panic!("{report}"))).unwrap();
        assert!(record["measured"].is_array(), "{report}");
        let lines = std::fs::read_to_string(log(rank)).unwrap();
        let collective = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            (words[0].to_owned(), words[1].parse().unwrap(), words[2].parse().unwrap(), words[3] == "1")
        };
        (record, lines.lines().map(collective).collect())
    };
    ended.iter().enumerate().map(read).collect()
}

/// Trains the tiny preset on sixty images. Returns the output of the command.
fn trained(mib: u64, sets: &[&str]) -> String {
    trained_and_counted(mib, sets).0
}

/// As [`trained`], with what the training asked of the GPU.
fn trained_and_counted(mib: u64, sets: &[&str]) -> (String, Counters) {
    let home = tempfile::tempdir().unwrap();
    let (data, out) = (home.path().join("data"), home.path().join("run"));
    let made = Command::new(env!("CARGO_BIN_EXE_prsmed"))
        .args(["data", "phantom", "--count", "60", "--quiet"])
        .arg(&data)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut command = prsmed(mib, 89);
    command.env("FAKE_CUDA_COUNTERS", home.path().join("counters"));
    command.args(["train", "--preset", "tiny", "--no-plan", "--set", "train.validate_every_epochs=0"]);
    command.args(sets.iter().flat_map(|set| ["--set", set])).arg("--data-root").arg(data).arg("--out").arg(&out);
    let output = command.output().unwrap();
    let output_text = [output.stderr, output.stdout].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
    assert!(output.status.success() && out.join("last").exists(), "{output_text}");
    (output_text, Counters::read(&home.path().join("counters")))
}

/// What a process asked of the fake GPU (`runtime.cpp`).
#[derive(Debug)]
struct Counters(BTreeMap<String, u64>);

impl Counters {
    /// Entries of a name of 24 bytes and a number.
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (entries, []) = bytes.as_chunks::<32>() else { panic!("{} bytes", bytes.len()) };
        let entry = |entry: &[u8; 32]| {
            let name = entry[..24].split(|byte| *byte == 0).next().unwrap();
            (String::from_utf8(name.to_vec()).unwrap(), u64::from_ne_bytes(*entry[24..].as_array().unwrap()))
        };
        Self(entries.iter().map(entry).filter(|(name, _)| !name.is_empty()).collect())
    }

    /// Counts of one step, from those of two runs that differ by `steps` steps.
    fn of_a_step(more: &Self, fewer: &Self, steps: u64) -> BTreeMap<String, f64> {
        let each = |(name, count): (&String, &u64)| (name.clone(), (count - fewer.0[name]) as f64 / steps as f64);
        more.0.iter().map(each).collect()
    }
}

/// Waits of the CPU for the GPU, questions to the driver, and copies from memory that the GPU cannot read directly.
const HOST_WAITS: [&str; 7] = [
    "device_syncs", "stream_syncs", "event_syncs", "allocations", "memory_queries", "to_gpu_pageable",
    "to_host_pageable",
];

/// Not a test: this process is the program, with the words of the variable.
#[test]
#[ignore = "the program that another test starts"]
fn program() {
    if let Ok(words) = std::env::var("PRSMED_TEST_WORDS") {
        step::start(words.lines().map(str::to_owned));
    }
}

/// A step waits once, for the losses of the step before. More launches or copies than these are a loss of speed.
#[test]
fn a_step_of_the_full_model_waits_once_and_launches_no_more_than_today() {
    let home = tempfile::tempdir().unwrap();
    let counted = |kernels: &str, steps: u64| {
        let path = home.path().join(format!("{kernels}{steps}"));
        let steps = steps.to_string();
        let words = ["step", "--preset", "gpu-24gb", "--no-plan", "--warmup", "8", "--set", kernels, "--steps", &steps];
        let mut command = on_fake_gpu(std::env::current_exe().unwrap(), 48 << 10, 89);
        command.args(["--ignored", "--exact", "program", "--nocapture"]).env("PRSMED_TEST_WORDS", words.join("\n"));
        let output = command.env("FAKE_CUDA_COUNTERS", &path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Counters::read(&path)
    };
    let of_a_step = |kernels: &str| Counters::of_a_step(&counted(kernels, 6), &counted(kernels, 2), 4);
    // flash attention divides its keys among the 142 multiprocessors of the fake GPU, and adds the parts
    let custom = of_a_step("train.fused_kernels=on");
    assert!(custom["launches"] <= 13_156.0 && custom["products"] <= 3_804.0, "{custom:?}");
    let step = of_a_step("train.fused_kernels=off");
    eprintln!("{step:?}");
    assert_eq!(HOST_WAITS.map(|name| step[name]), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{step:?}");
    // one copy of indices for each of three micro-batches, one of losses and norm
    assert_eq!([step["to_gpu_pinned"], step["to_host_pinned"]], [3.0, 1.0], "{step:?}");
    assert!(step["launches"] <= 20_833.0 && step["products"] <= 4_947.0, "{step:?}");
    assert!(step["on_gpu"] <= 258.0 && step["memsets"] <= 147.0, "{step:?}");
}

#[test]
fn a_step_on_real_batches_waits_once() {
    let counted = |steps: &str| trained_and_counted(8192, &[steps]).1;
    let step = Counters::of_a_step(&counted("train.max_steps=6"), &counted("train.max_steps=3"), 3);
    assert_eq!(HOST_WAITS.map(|name| step[name]), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{step:?}");
    // image, image for the vision tower, mask, class, indices
    assert_eq!([step["to_gpu_pinned"], step["to_host_pinned"]], [5.0, 1.0], "{step:?}");
}

/// The copies of layers from host memory do not stop the CPU, and their memory on the GPU is used again.
#[test]
fn a_step_with_weights_in_host_memory_waits_no_more_than_any_other() {
    let frozen = ["model.train_base=false", "model.stream_layers=full"];
    let counted = |steps: &str| trained_and_counted(8192, &[&frozen[..], &[steps]].concat()).1;
    let step = Counters::of_a_step(&counted("train.max_steps=6"), &counted("train.max_steps=3"), 3);
    assert_eq!(HOST_WAITS.map(|name| step[name]), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{step:?}");
    // as without, and each of the layers once in the forward pass and once in the backward pass
    let layers = 3.0;
    assert_eq!([step["to_gpu_pinned"], step["to_host_pinned"]], [5.0 + 2.0 * layers, 1.0], "{step:?}");
}

fn bytes(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

const MIB: f64 = 1_048_576.0;

/// Bytes of the plan's other terms with this name.
fn terms(record: &Value, name: &str) -> f64 {
    let terms = record["terms"].as_array().unwrap().iter();
    terms.filter(|term| term["name"] == name).map(|term| bytes(&term["bytes"])).sum()
}

/// Planned bytes of libraries in the allocator: workspaces and an allowance for cuDNN.
fn of_libraries(record: &Value) -> f64 {
    ["cuBLAS workspaces", "cuBLASLt workspaces", "cuDNN workspace"].map(|name| terms(record, name)).iter().sum()
}

/// Planned and measured bytes of a phase's tensors in words, and whether they agree; see [`differing`].
fn tensors(record: &Value, phase: &Value, what: &str) -> (String, bool) {
    let planned = record["phases"].as_array().unwrap().iter().find(|planned| planned["name"] == phase["name"]);
    let planned = bytes(&planned.unwrap()["allocated_peak"]) - of_libraries(record);
    let above = bytes(&phase["allocated_peak"]) - planned;
    let slack = planned * 0.003 + 4.0 * MIB;
    let workspace = terms(record, "cuBLAS workspaces") / 2.0;
    let is_near = [0.0, workspace, 2.0 * workspace].iter().any(|there| (above - there).abs() <= slack);
    let (planned, above) = (planned / MIB, above / MIB);
    (format!("{what}, {}: tensors {planned:.1} MiB planned, {above:+.2} measured", phase["name"]), is_near)
}

/// Phases whose measurement differs from the plan. Tensors may differ by 0.3 % and 4 MiB, and by cuBLAS's workspace
/// (8.1 or 32 MiB, from the first matrix product of each of two threads on; the plan has both). The temporary tensors of libtorch's own
/// convolutions, which replace cuDNN's, change which free blocks of 1 MiB and more are used without being split. Reserved
/// bytes may differ by 1 % and 4 MiB, and by the planned bytes of libraries. A phase may also reserve less if a later one
/// reserves what was planned for it.
fn differing(record: &Value, what: &str) -> Vec<String> {
    let libraries = of_libraries(record);
    let mut wrong = Vec::new();
    let reserved = |phase: &Value| bytes(&phase["reserved_peak"]);
    let most = record["measured"].as_array().unwrap().iter().map(reserved).fold(0.0, f64::max);
    for phase in record["measured"].as_array().unwrap() {
        let planned = record["phases"].as_array().unwrap().iter().find(|planned| planned["name"] == phase["name"]);
        let planned = planned.unwrap();
        let (line, is_near) = tensors(record, phase, what);
        // the measurement resumes in the same process, the plan in a new one
        let held = reserved(planned) - reserved(phase);
        let slack = reserved(planned) * 0.01 + 4.0 * MIB;
        let room = terms(record, "one more layer from host memory");
        let is_later = held > 0.0 && reserved(planned) <= most;
        let holds = phase["name"] == "resume" || is_later || (-slack - room..slack + libraries).contains(&held);
        let (held_mib, planned_mib) = (-held / MIB, reserved(planned) / MIB);
        let line = format!("{line}; reserved {planned_mib:.1} planned, {held_mib:+.2} measured");
        eprintln!("{line}");
        if !is_near || !holds {
            wrong.push(line);
        }
    }
    wrong
}

/// The full model with 7.24 G weights. Its memory is reserved but never touched.
#[test]
fn presets_use_the_planned_memory() {
    // the other presets have the settings of one of these; each takes up to half a minute
    let gpus = [(4, 89), (24, 89), (80, 90), (40, 80), (12, 89)];
    let gpus = &gpus[..if is_soak() { 5 } else { 2 }];
    let differing = |&(gib, capability): &(u64, u32)| {
        let preset = format!("gpu-{gib}gb");
        differing(&measured(gib, capability, &["--preset", &preset]), &preset)
    };
    let wrong: Vec<String> = gpus.iter().flat_map(differing).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Phases of four ranks whose tensors are not those of their plans. Gradients and layers must travel while other kernels are
/// still to come.
fn of_ranks(preset: &str, common: &str) -> Vec<String> {
    let cases = [
        ("train.zero_stage=0", "all-reduce"),
        ("train.zero_stage=2", "reduce"),
        ("train.zero_stage=2 model.divide_layers=true", "all-gather"),
        ("train.zero_stage=2 model.divide_layers=true model.stream_layers=full", "all-gather"),
    ];
    let mut wrong = Vec::new();
    for (sets, operation) in cases {
        let sets: Vec<&str> = common.split(' ').chain(sets.split(' ')).flat_map(|set| ["--set", set]).collect();
        let arguments = [&["--preset", preset], sets.as_slice()].concat();
        for (rank, (record, collectives)) in measured_together(24, 4, &arguments).into_iter().enumerate() {
            let what = format!("{preset}, rank {rank}, {}", sets.last().unwrap());
            for phase in record["measured"].as_array().unwrap() {
                let (line, is_near) = tensors(&record, phase, &what);
                eprintln!("{line}");
                wrong.extend((!is_near).then_some(line));
            }
            let of_this: Vec<&Collective> = collectives.iter().filter(|(name, ..)| name == operation).collect();
            let count = |what: &str| collectives.iter().filter(|(name, ..)| name == what).count();
            let ends = (count("destroy"), count("abort"));
            assert!(ends == (count("communicator"), 0) && ends.0 > 0, "{what}: {ends:?} communicators");
            // a layer in host memory is collected behind its copy, for which the compute stream does not wait
            let waits = of_this.iter().any(|(.., waits)| *waits);
            assert!(!waits || !sets.contains(&"model.stream_layers=full"), "{what}: {collectives:?}");
            let bytes: u64 = of_this.iter().map(|(_, bytes, ..)| bytes).sum();
            eprintln!("{what}: {} times {operation}, {:.1} MiB", of_this.len(), bytes as f64 / MIB);
            // the GPU gets work between one and the next; the first step learns which gradients come
            let starts: BTreeSet<u64> = of_this.iter().map(|(_, _, launches, _)| *launches).collect();
            let overlaps = starts.len() > 2 && 2 * starts.len() >= of_this.len();
            assert!(!of_this.is_empty() && (overlaps || of_this.len() < 4), "{what}: {collectives:?}");
        }
    }
    wrong
}

#[test]
fn ranks_use_the_planned_memory_and_exchange_during_the_backward_pass() {
    let common = "model.train_base=false train.precision=bf16 train.micro_batch=1 train.accumulation=4 \
                  train.reduce_bucket_mib=1";
    let wrong = of_ranks("tiny", common);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The full model with 4-bit layers.
#[test]
#[ignore = "takes minutes (scripts/soak)"]
fn ranks_of_the_full_model_use_the_planned_memory() {
    let common = "model.stream_layers=none model.quantization=nf4 train.micro_batch=1 train.accumulation=4";
    let wrong = of_ranks("gpu-24gb", common);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Fine-tunings of the generator. Phases with the autoencoder are left out: libtorch's own convolutions, which replace
/// cuDNN's here, need buffers for its large maps. For the same reason only tensors are compared, not what the allocator
/// has reserved for them.
#[test]
fn fine_tunings_use_the_planned_memory() {
    let cases = [
        "finetune.model=random:tiny train.precision=bf16",
        "finetune.model=random:sd15 finetune.method=lora",
        "finetune.model=random:sd15 finetune.mode=mask_to_image train.deterministic=true",
        "finetune.model=random:sd15 finetune.method=full train.optimizer=adamw8bit train.accumulation=1 \
         train.step_in_backward=true train.clip_norm=0",
        "finetune.model=random:sd15 finetune.method=full train.offload_optimizer=true",
        "finetune.model=random:sdxl finetune.rank=64",
        "finetune.model=random:sd15 finetune.method=full train.offload_weights=true train.accumulation=2",
    ];
    // the last takes half a minute
    let cases = &cases[..if is_soak() { 7 } else { 6 }];
    let mut wrong = Vec::new();
    for sets in cases {
        let words: Vec<&str> = sets.split_whitespace().flat_map(|set| ["--set", set]).collect();
        let arguments = [&["--task", "finetune", "--preset", "lora-sd15", "--set", "train.micro_batch=1"], &words[..]];
        let mut record = measured(80, 90, &arguments.concat());
        let phases = record["measured"].as_array_mut().unwrap();
        phases.retain(|phase| !["encode images", "evaluate"].map(Value::from).contains(&phase["name"]));
        let lines = phases.clone().into_iter().filter_map(|phase| {
            let (line, is_near) = tensors(&record, &phase, sets);
            eprintln!("{line}");
            (!is_near).then_some(line)
        });
        wrong.extend(lines);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn settings_use_the_planned_memory() {
    let frozen = "model.train_base=false train.precision=bf16";
    let switches = [
        "train.precision=fp32",
        "train.precision=fp16 train.accumulation=3 train.micro_batch=2 train.ema_decay=0.9",
        "train.checkpointing=full",
        "train.checkpoint_encoder=full train.checkpoint_decoder=true",
        "model.quantization=nf4",
        "model.quantization=nf4-double data.questions_per_image=3 train.micro_batch=2",
        "data.questions_per_image=3 train.micro_batch=2 model.packed_attention=flash",
        "data.questions_per_image=3 train.micro_batch=2 model.packed_attention=mask",
        "train.optimizer=adamw8bit",
        "train.offload_optimizer=true",
        "train.optimizer=adamw8bit train.offload_optimizer=true",
        "train.step_in_backward=true train.clip_norm=0 train.accumulation=1",
        "train.fused_kernels=on",
        "data.cache_vision=ram",
        "model.decoder=v6",
        "train.deterministic=true train.accumulation=2",
        "train.deterministic=true data.questions_per_image=3 train.micro_batch=2 train.graph=auto train.fused_kernels=auto",
        "model.stream_layers=1 train.micro_batch=2",
        "model.stream_layers=full model.quantization=nf4-double train.accumulation=2 model.stream_vision=true",
    ];
    let mut wrong = Vec::new();
    for sets in switches {
        let sets: Vec<&str> = frozen.split(' ').chain(sets.split(' ')).flat_map(|set| ["--set", set]).collect();
        let arguments = [&["--preset", "tiny"], sets.as_slice()].concat();
        wrong.extend(differing(&measured(8, 89, &arguments), &sets[4..].join(" ")));
    }
    for task in ["predict", "eval"] {
        wrong.extend(differing(&measured(8, 89, &["--preset", "tiny", "--task", task]), task));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Forward and backward passes and the optimizer step are captured. Their graphs have a memory pool of their own.
#[test]
fn captured_steps_use_the_planned_memory() {
    for (gib, preset) in [(8, "tiny"), (48, "gpu-24gb")] {
        let record = measured(gib, 89, &["--preset", preset, "--set", "train.graph=on"]);
        let most = |phases: &Value| {
            let of = |phase: &Value| bytes(&phase["reserved_peak"]);
            phases.as_array().unwrap().iter().map(of).fold(0.0, f64::max)
        };
        let (planned, held) = (most(&record["phases"]), most(&record["measured"]));
        eprintln!("{preset}: {:.1} MiB planned, {:.1} reserved", planned / MIB, held / MIB);
        // the plan has more buckets than this job
        assert!(held <= planned * 1.005 && held > planned * 0.6, "{preset}: {held} of {planned}");
        let step = record["measured"].as_array().unwrap().iter().find(|phase| phase["name"] == "step").unwrap();
        let first = record["measured"].as_array().unwrap().iter().find(|phase| phase["name"] == "first step").unwrap();
        assert!(bytes(&step["allocated_peak"]) < 0.9 * bytes(&first["allocated_peak"]), "a replay allocates nothing");
    }
}

/// Graphs have a memory pool of their own, which cannot use the allocator's cached blocks.
#[test]
fn cached_blocks_are_returned_to_the_gpu_before_a_capture() {
    let frees = |graph: &str| trained_and_counted(8192, &["train.max_steps=12", graph]).1.0["frees"];
    let (eager, captured) = (frees("train.graph=off"), frees("train.graph=on"));
    assert!(captured > eager, "{captured} blocks, {eager} without captures");
}

#[test]
fn out_of_memory_halves_the_micro_batch() {
    let output_text = trained(110, &["train.max_steps=6"]);
    assert!(output_text.contains("step 1: out of memory with 8 at once"), "{output_text}");
    assert!(output_text.contains("it is repeated with micro-batches of 4"), "{output_text}");
    assert!(output_text.contains("trained 6 steps"), "{output_text}");
}

/// Graphs need memory of their own, so they are turned off first. Then the micro-batch fits.
#[test]
fn out_of_memory_turns_cuda_graphs_off_first() {
    let output_text = trained(150, &["train.max_steps=20", "train.graph=on"]);
    assert!(output_text.contains("graphs: off: memory ran out"), "{output_text}");
    assert!(output_text.contains("trained 20 steps") && !output_text.contains("micro-batches of 4"), "{output_text}");
}

#[test]
fn steps_are_captured_again_after_the_class_loss_ends() {
    let output_text = trained(8192, &["train.epochs=4", "model.class_loss_epochs=2", "train.graph=on"]);
    let count = |words: &str| output_text.matches(words).count();
    let counts = ["graphs: captured 8 sequences", "graphs: captured the optimizer's update", "graphs: off"].map(count);
    assert_eq!(counts, [2, 2, 0], "{output_text}");
}

#[test]
fn a_reading_of_the_gpu_replaces_the_assumptions_of_plans() {
    let cache = tempfile::tempdir().unwrap();
    // NVRTC cannot compile in a process with the fake driver
    let kernels = cache.path().join("kernels");
    std::fs::create_dir(&kernels).unwrap();
    for compiled in std::fs::read_dir(FAKE_CUDA.join("kernels")).unwrap().map(Result::unwrap) {
        std::fs::copy(compiled.path(), kernels.join(compiled.file_name())).unwrap();
    }
    let run = |arguments: &[&str]| {
        let mut command = prsmed(40 << 10, 80);
        let output =
            command.env("PRSMED_CACHE", cache.path()).args(arguments).args(["--json", "--quiet"]).output().unwrap();
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{report}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let provenance = |plan: &Value| plan["terms"][2]["provenance"].as_str().unwrap().to_owned();
    let before = run(&["plan", "--preset", "tiny"]);
    assert!(provenance(&before).contains("not measured here"));
    let reading = run(&["calibrate"]);
    assert_eq!(reading["kind"], "calibration");
    let levels = reading["memory"].as_array().unwrap();
    assert_eq!(levels.len(), 7);
    // libtorch's real handles, one for each thread that multiplies
    let workspaces = levels[1]["allocated"].as_u64().unwrap();
    assert_eq!(workspaces % 8_519_680, 0, "{workspaces}");
    assert!(workspaces > 0);
    let after = run(&["plan", "--preset", "tiny"]);
    assert!(provenance(&after).starts_with("measured on GPU on 20"), "{}", provenance(&after));
    assert_eq!(after["terms"][2]["bytes"], workspaces);
    assert_ne!(after["time"]["seconds"], before["time"]["seconds"]);
}

/// What `doctor` says in a process on the fake GPU, with another libtorch if `libtorch` names a folder.
fn doctor(libtorch: Option<&Path>) -> Value {
    let mut command = prsmed(8192, 89);
    if let Some(folder) = libtorch {
        let folders = [folder, FAKE_CUDA.as_path()].map(|folder| folder.to_str().unwrap());
        command.env("LD_LIBRARY_PATH", folders.join(":")).env("LD_PRELOAD", FAKE_CUDA.join("libcuda.so.1"));
    }
    let output = command.args(["doctor", "--json"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let report = || format!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "the CPU works: {}", report());
    serde_json::from_str(text.lines().last().unwrap_or_else(|| panic!("{}", report()))).unwrap()
}

/// Every test of this file goes through the CUDA side that the program opens; here are the ways in which it cannot.
#[test]
fn the_cuda_side_is_open_or_the_reason_and_its_remedy_are_named() {
    assert_eq!(doctor(None)["cuda_side"], "open");
    let torch = std::fs::canonicalize(Path::new(env!("CARGO_MANIFEST_DIR")).join(".libtorch")).unwrap();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = home.path().join("torch/lib");
    std::fs::create_dir_all(&folder).unwrap();
    let nvidia = torch.parent().unwrap().join("nvidia");
    std::os::unix::fs::symlink(nvidia, home.path().join("nvidia")).unwrap();
    for name in ["libtorch_cpu.so", "libc10.so", "libgomp.so.1"] {
        std::fs::hard_link(torch.join("lib").join(name), folder.join(name)).unwrap();
    }
    let reason = |said: &Value| said["cuda_side"].as_str().unwrap().to_owned();
    // a torch without CUDA on a machine with a driver
    let without = doctor(Some(&folder));
    assert_eq!(without["libtorch_folder"], folder.to_str().unwrap());
    assert_eq!(without["training_device"], "cpu");
    let expected = format!("torch in {} is built without CUDA; install its CUDA build", folder.display());
    assert!(reason(&without).starts_with(&expected), "{without}");
    assert_eq!(without["no_gpu_reason"], without["cuda_side"]);
    // a library that cannot be opened
    std::fs::write(folder.join("libtorch_cuda.so"), "damaged").unwrap();
    let damaged = reason(&doctor(Some(&folder)));
    assert!(
        damaged.contains("torch's CUDA library does not load (") && damaged.contains("install it again"),
        "{damaged}"
    );
    // one of another torch: the CUDA side lacks functions
    let empty = ["-shared", "-x", "c++", "/dev/null", "-o"];
    let made = Command::new("c++").args(empty).arg(folder.join("libtorch_cuda.so")).status().unwrap();
    assert!(made.success());
    let other = doctor(Some(&folder));
    assert!(reason(&other).contains("does not fit the torch in"), "{other}");
    assert_eq!(other["training_device"], "cpu");
}

/// torch's real CUDA libraries with a driver that has no GPU, and with a system that refuses files in memory.
#[test]
fn torchs_own_cuda_libraries_load_also_where_files_in_memory_are_refused() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let library = |name: &str, code: &str| {
        let (source, out) = (home.path().join("code.c"), home.path().join(name));
        std::fs::write(&source, code).unwrap();
        assert!(Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&out, &source]).status().unwrap().success());
        out
    };
    library("libcuda.so.1", "");
    let refuses = library(
        "refuses.so",
        "#include <errno.h>\nint memfd_create(const char* name, unsigned flags) { errno = EPERM; return -1; }",
    );
    let said = |preload: Option<&Path>, temporary: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_prsmed"));
        command.env("LD_LIBRARY_PATH", home.path()).env("HF_HUB_OFFLINE", "1").env("TMPDIR", temporary);
        command.envs(preload.map(|library| ("LD_PRELOAD", library)));
        let output = command.args(["doctor", "--json"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str::<Value>(text.lines().last().unwrap()).unwrap()
    };
    for preload in [None, Some(refuses.as_path())] {
        let found = said(preload, home.path());
        assert_eq!((&found["cuda_side"], &found["training_device"]), (&"open".into(), &"cpu".into()), "{found}");
    }
    let names = std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!names.into_iter().any(|name| name.starts_with("libprsmed_cuda")), "the temporary file is gone");
    let found = said(Some(&refuses), &home.path().join("missing"));
    let reason = found["cuda_side"].as_str().unwrap();
    assert!(reason.contains("No such file or directory") && reason.contains("in TMPDIR"), "{reason}");
}
