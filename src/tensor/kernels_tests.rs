use super::*;
use crate::adamw::{self, Coded, Moments, Rate, Slot, Step};
use crate::functions::packed_bias;
use crate::rng;
use std::ffi::{CStr, CString, c_void};
use std::fs::Permissions;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Runs the kernels of this thread on the CPU, with emulated GPU threads, until it is dropped.
struct Emulated;

/// The launcher of `tests/native/kernels_emulated.cpp`. The library is compiled once for a version of its sources.
static LAUNCHER: LazyLock<usize> = LazyLock::new(|| {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let native = root.join("src/tensor/native");
    // those of the build: `scripts/sanitize` sets some
    let flags = std::env::var("CXXFLAGS").unwrap_or_default();
    let mut hash = DefaultHasher::new();
    flags.hash(&mut hash);
    for folder in [root.join("tests/native"), native.join("kernels"), native.clone()] {
        let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let is_read = |path: &&PathBuf| path.extension().is_some_and(|end| end == "h" || end == "cu" || end == "cpp");
        files.iter().filter(is_read).for_each(|path| std::fs::read(path).unwrap().hash(&mut hash));
    }
    let library = Path::new(env!("OUT_DIR")).join(format!("emulated-{:016x}.so", hash.finish()));
    if !library.exists() {
        let torch = crate::libtorch_folder().join("../include");
        let unfinished = library.with_extension(std::process::id().to_string());
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command.args(["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1", "-I"]);
        command.arg(&native).args(flags.split_whitespace()).arg("-isystem").arg(torch).arg("-o").arg(&unfinished);
        let done = command.arg(root.join("tests/native/kernels_emulated.cpp")).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::fs::rename(unfinished, &library).unwrap();
    }
    let name = CString::new(library.as_os_str().as_bytes()).unwrap();
    // SAFETY: opens a library of this test and calls its only function, which takes nothing and returns a pointer.
    unsafe {
        let opened = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
        assert!(!opened.is_null(), "{}", CStr::from_ptr(libc::dlerror()).to_string_lossy());
        let function = libc::dlsym(opened, c"prsmed_emulated_launcher".as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_void>(function)() as usize
    }
});

impl Emulated {
    fn begin() -> Self {
        // SAFETY: sets a pointer of this thread; the launcher's library stays open.
        unsafe { native::prsmed_kernels_use_launcher(*LAUNCHER as *const c_void) };
        Self
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { native::prsmed_kernels_use_launcher(std::ptr::null()) };
    }
}

fn bits(xs: &Tensor) -> Tensor {
    xs.view_dtype(if xs.kind() == Kind::Float { Kind::Int } else { Kind::Int16 })
}

fn assert_close(custom: &Tensor, libtorch: &Tensor, kind: Kind, what: &str) {
    assert_eq!((custom.size(), custom.kind()), (libtorch.size(), libtorch.kind()), "{what}");
    let (wrong, _) = compare_results(custom, libtorch, kind);
    assert_eq!(wrong, 0, "{what}: {wrong} of {} differ", custom.numel());
    assert!(custom.isfinite().all().int64_value(&[]) == 1, "{what} has elements that are not finite");
}

fn compare(rows: i64, dim: i64, wide: i64, kind: Kind, device: Device) {
    for KernelCase { name, inputs, number } in cases(rows, dim, wide, kind, device) {
        let what = format!("{name} of {rows} x {dim} ({wide}) in {kind:?}");
        let custom = run(name, Implementation::Custom, &inputs, number).unwrap();
        let libtorch = run(name, Implementation::Libtorch, &inputs, number).unwrap();
        assert_eq!(custom.len(), libtorch.len(), "{what}");
        if name == "packed_bias" {
            // compare bits: some elements are infinite
            assert_eq!(bits(&custom[0]), bits(&libtorch[0]), "{what}");
        } else {
            custom.iter().zip(&libtorch).for_each(|(custom, libtorch)| assert_close(custom, libtorch, kind, &what));
        }
        // a result that is zero everywhere means that the kernel computed nothing
        assert!(
            custom[0].numel() < 16 || custom[0].to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]) > 0.0,
            "{what}"
        );
    }
}

/// Odd sizes take single elements, multiples of eight take packs; 300 and 1,028 end within a warp and within a pack.
const SHAPES: [(i64, i64, i64); 8] =
    [(1, 2, 1), (3, 6, 5), (2, 8, 16), (5, 38, 63), (1, 128, 64), (7, 300, 65), (2, 1028, 129), (3, 2048, 5504)];

#[test]
fn kernels_agree_with_libtorch() {
    let (_turn, _emulated) = (rng::TEST_LOCK.lock(), Emulated::begin());
    rng::seed(11);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, dim, wide) in SHAPES {
            compare(rows, dim, wide, kind, Device::Cpu);
        }
    }
}

#[test]
fn differences_of_results_are_counted_and_measured() {
    let _turn = rng::TEST_LOCK.lock();
    let [a, b] =
        [[1.0_f32, -2.0, f32::NEG_INFINITY], [1.0, -2.001, f32::NEG_INFINITY]].map(|xs| Tensor::from_slice(&xs));
    let (wrong, largest) = compare_results(&a, &b, Kind::Float);
    assert!(wrong == 1 && (largest - 1e-3).abs() < 1e-6, "{wrong} {largest}");
    assert_eq!(compare_results(&a, &b, Kind::BFloat16).0, 0);
    let broken = Tensor::from_slice(&[f32::NAN, -2.0, 0.0]);
    assert_eq!(compare_results(&broken, &a, Kind::BFloat16).0, 2);
    // codes of 8 bits may differ by one
    let [codes, next, far] = [[7_u8, 200, 0], [8, 199, 0], [9, 200, 0]].map(|codes| Tensor::from_slice(&codes));
    assert_eq!(compare_results(&codes, &next, Kind::Float).0, 0);
    assert_eq!(compare_results(&codes, &far, Kind::Float), (1, 2.0));
}

#[test]
fn a_kernel_that_differs_is_off_and_the_others_run() {
    let (_turn, _emulated) = (rng::TEST_LOCK.lock(), Emulated::begin());
    rng::seed(13);
    assert_eq!(differences(Device::Cpu).unwrap(), []);
    let runs = || -> Vec<(&str, bool)> {
        let cases = cases(7, 300, 65, Kind::BFloat16, Device::Cpu);
        let runs = |case: &KernelCase| run(case.name, Implementation::Custom, &case.inputs, case.number).is_ok();
        let drops = |case: &KernelCase| case.name.starts_with("low_rank") && case.number > 0.0;
        cases.iter().filter(|case| runs(case)).map(|case| (case.name, drops(case))).collect()
    };
    let all = runs();
    assert_eq!(all.len(), 18);
    for (name, _) in all.clone() {
        refuse(vec![Difference { name, kind: Kind::BFloat16, wrong: 3, count: 455, largest: 0.03125 }]);
        let expected = format!(
            "the custom CUDA kernel `{name}` is off: in BFloat16 it differs from libtorch in 3 of 455 elements, by up to \
             3.12e-2"
        );
        assert_eq!(refusals(), [expected]);
        // adapters with dropout need the masks of that kernel
        let needs = |(other, drops): (&str, bool)| other == name || (name == "dropout" && drops);
        let others: Vec<_> = all.iter().copied().filter(|other| !needs(*other)).collect();
        assert_eq!(runs(), others);
        refuse(Vec::new());
        assert!(refusals().is_empty());
    }
    let before = unavailable();
    disable("they fail");
    assert_eq!(unavailable().as_deref(), Some("they fail"));
    disable("");
    assert_eq!(unavailable(), before);
}

#[test]
fn elementwise_kernels_equal_libtorch_bit_for_bit() {
    let (_turn, _emulated) = (rng::TEST_LOCK.lock(), Emulated::begin());
    rng::seed(12);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for KernelCase { name, inputs, number } in cases(9, 120, 200, kind, Device::Cpu) {
            if ["rotary", "rotary_backward", "dropout", "nf4", "packed_bias"].contains(&name) {
                let custom = run(name, Implementation::Custom, &inputs, number).unwrap();
                assert_eq!(custom, run(name, Implementation::Libtorch, &inputs, number).unwrap(), "{name} in {kind:?}");
            }
        }
    }
}

/// A parameter with its gradient and 8-bit moments.
struct Trained {
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    step: Tensor,
}

impl Trained {
    /// The tensors are views at odd offsets. If there is more than one block, one has no gradient.
    fn new(count: i64) -> Self {
        rng::seed(15);
        let zeros = |count: i64, kind| Tensor::zeros([count + 3], (kind, Device::Cpu)).narrow(0, 3, count);
        let random = || Tensor::randn([count + 1], (Kind::Float, Device::Cpu)).narrow(0, 1, count);
        let coded = || Coded { codes: zeros(count, Kind::Uint8), scales: zeros((count + 255) / 256, Kind::Float) };
        let (param, grad) = (random(), random() * 0.01);
        if count > 256 {
            let _ = grad.narrow(0, 0, 256).zero_();
        }
        let moments = Moments::EightBit([coded(), coded()]);
        Self { param, grad, moments, step: Tensor::zeros([0; 0], (Kind::Float, Device::Cpu)) }
    }

    fn step(&self, rate: Rate, found_inf: f32, maps: &Maps, chunk: i64) {
        let found_inf = Tensor::from(found_inf);
        let settings = Step {
            rate,
            betas: (0.9, 0.99),
            weight_decay: 0.1,
            epsilon: 1e-8,
            found_inf: &found_inf,
            maps: Some(maps),
            chunk,
        };
        let slot = Slot { param: &self.param, grad: &self.grad, moments: &self.moments, step: &self.step };
        adamw::step(&[slot], settings).unwrap();
    }

    fn tensors(&self) -> Vec<Tensor> {
        let moments = self.moments.named().into_iter().map(|(_, tensor)| tensor.copy());
        moments.chain([self.param.copy(), self.step.copy()]).collect()
    }
}

/// The sizes end within a block, a warp and a thread block. Moments are whole, or in chunks from CPU memory. The
/// learning rate is a number or a tensor.
#[test]
fn steps_of_8_bit_adamw_equal_the_cpu_bit_for_bit() {
    let _lock = rng::TEST_LOCK.lock();
    let (maps, rate) = (Maps::new(Device::Cpu), Tensor::from(0.003_f32));
    for (count, chunk) in [(1, 0), (5, 0), (256, 0), (257, 0), (4099, 0), (4099, 1024)] {
        let (custom, cpu) = (Trained::new(count), Trained::new(count));
        for (i, rate) in [Rate::Number(0.01), Rate::OnDevice(&rate), Rate::Number(0.02)].into_iter().enumerate() {
            cpu.step(rate, 0.0, &maps, 0);
            let before = custom.tensors();
            {
                let _emulated = Emulated::begin();
                custom.step(rate, 0.0, &maps, chunk);
            }
            assert_eq!(custom.tensors(), cpu.tensors(), "{count} elements, step {i}");
            assert_ne!(custom.tensors(), before);
        }
        let _emulated = Emulated::begin();
        custom.step(Rate::Number(0.01), 1.0, &maps, chunk);
        assert_eq!(custom.tensors(), cpu.tensors(), "{count} elements: a step with found_inf");
    }
}

/// Halves of one projection (a fused gate and up), rotary tables per sequence, and every second row.
#[test]
fn strided_tensors_and_tables_per_sequence_are_supported() {
    let _lock = rng::TEST_LOCK.lock();
    let _emulated = Emulated::begin();
    let options = (Kind::BFloat16, Device::Cpu);
    let both = Tensor::randn([2, 5, 48], options);
    let inputs = [both.narrow(2, 0, 24), both.narrow(2, 24, 24)];
    let [custom, libtorch] = [Implementation::Custom, Implementation::Libtorch]
        .map(|implementation| run("swiglu", implementation, &inputs, 0.0).unwrap());
    assert_close(&custom[0], &libtorch[0], Kind::BFloat16, "swiglu of halves");
    let angles = Tensor::randn([2, 5, 8], (Kind::Float, Device::Cpu));
    let tables = [angles.cos().to_kind(Kind::BFloat16), angles.sin().to_kind(Kind::BFloat16)];
    let inputs = [Tensor::randn([2, 5, 48], options), tables[0].shallow_clone(), tables[1].shallow_clone()];
    let [custom, libtorch] = [Implementation::Custom, Implementation::Libtorch]
        .map(|implementation| run("rotary", implementation, &inputs, 0.0).unwrap());
    assert_eq!(custom, libtorch);
}

/// The kernel and libtorch's operators, called as in the language model.
#[test]
fn packed_bias_is_the_same_with_both_implementations() {
    let blocks = Tensor::from_slice(&[0_i64, 0, 1, 1, 1, 2, 2, 3, 3, 0, 1, 1, 2, 2, 2, 2, 2, 3]).view([2, 9]);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let libtorch = packed_bias(&blocks, kind);
        let _emulated = Emulated::begin();
        let custom = packed_bias(&blocks, kind);
        assert_eq!((custom.size(), custom.stride()), (libtorch.size(), libtorch.stride()));
        assert_eq!(bits(&custom), bits(&libtorch), "{kind:?}");
        // the padding of rows, which attention on a GPU may read
        let [custom, libtorch] = [custom, libtorch].map(|bias| bias.as_strided([2, 9, 16], [144, 16, 1], 0));
        assert_eq!(bits(&custom), bits(&libtorch), "{kind:?}");
    }
}

#[test]
fn unsupported_tensors_use_libtorch() {
    let _lock = rng::TEST_LOCK.lock();
    let inputs = [Tensor::randn([4, 8], (Kind::Float, Device::Cpu)), Tensor::ones([8], (Kind::Float, Device::Cpu))];
    assert!(run("rms_norm", Implementation::Custom, &inputs, 1e-5).is_err(), "not on the CPU");
    let _emulated = Emulated::begin();
    assert!(run("rms_norm", Implementation::Custom, &inputs, 1e-5).is_ok());
    let doubles = inputs.map(|tensor| tensor.to_kind(Kind::Double));
    assert!(run("rms_norm", Implementation::Custom, &doubles, 1e-5).is_err(), "not in fp64");
    let turned =
        [Tensor::randn([8, 4], (Kind::Float, Device::Cpu)).tr(), Tensor::ones([8], (Kind::Float, Device::Cpu))];
    assert!(run("rms_norm", Implementation::Custom, &turned, 1e-5).is_err(), "not transposed");
    assert!(run("nothing", Implementation::Custom, &turned, 0.0).is_err());
}

/// Compute capabilities that the kernels support: Turing, Ampere, Ada, Hopper, Blackwell.
const CAPABILITIES: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// Tests that compile take turns: the folder of compiled kernels is one for the process.
static FOLDER: Mutex<()> = Mutex::new(());

#[test]
fn nvrtc_compiles_every_kernel_for_every_gpu() {
    let _turn = FOLDER.lock();
    // each takes seconds: scripts/soak compiles for all
    let is_long = std::env::var_os("PRSMED_SOAK").is_some();
    let all = CAPABILITIES.into_iter().filter(|capability| is_long || [75, 90, 120].contains(capability));
    for capability in all {
        let compiled = compile(capability).unwrap();
        assert!(compiled.is_native && compiled.code > Bytes(10_000), "{capability}: {compiled:?}");
    }
    // an unknown GPU gets PTX of the next lower one; GPUs that are too old give an error
    assert!(!compile(125).unwrap().is_native);
    assert!(compile(50).is_err());
}

/// Instructions that read four numbers at once need addresses that are multiples of 16 bytes.
#[test]
fn shared_arrays_that_are_read_in_packs_are_aligned() {
    let _turn = FOLDER.lock();
    let folder = tempfile::tempdir().unwrap();
    set_folder(folder.path());
    // an unknown GPU gets PTX, which is text
    assert!(!compile(125).unwrap().is_native);
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let text = String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned();
    let arrays: Vec<&str> = text.lines().filter(|line| line.contains(".shared") && line.contains("low_rank")).collect();
    assert!(arrays.len() >= 6, "{arrays:?}");
    assert!(arrays.iter().all(|line| line.contains(".align 16")), "{arrays:?}");
}

#[test]
fn compiled_kernels_are_cached_for_this_user_only() {
    let _turn = FOLDER.lock();
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("new/kernels");
    set_folder(&folder);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let set_mode = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let files = || -> Vec<_> { std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect() };
    let first = compile(80).unwrap();
    let found = files();
    let [file] = &found[..] else { panic!("{found:?}") };
    assert!(file.to_string_lossy().contains("sm_80"), "{file:?}");
    assert_eq!((mode(&folder), mode(file)), (0o700, 0o600));
    // the file is used as it is
    std::fs::write(file, "x").unwrap();
    assert_eq!(compile(80).unwrap().code, Bytes(1));
    // another user could have written it
    set_mode(file, 0o622);
    assert_eq!(compile(80).unwrap(), first);
    assert_eq!(mode(file), 0o600, "it was replaced");
    // a link may point to a file of another user
    std::fs::remove_file(file).unwrap();
    let other = parent.path().join("other");
    std::fs::write(&other, "x").unwrap();
    std::os::unix::fs::symlink(&other, file).unwrap();
    assert_eq!(compile(80).unwrap(), first);
    assert_eq!(std::fs::read(other).unwrap(), b"x");
    // nothing is read or cached where others can write
    std::fs::write(file, "x").unwrap();
    set_mode(&folder, 0o702);
    assert_eq!(compile(80).unwrap(), first);
    assert_eq!(std::fs::read(file).unwrap(), b"x");
    set_folder(Path::new(""));
}

#[test]
#[ignore = "needs CUDA"]
fn kernels_agree_with_libtorch_on_a_gpu() {
    let _lock = rng::TEST_LOCK.lock();
    set_folder_for_tests();
    assert_eq!(unavailable(), None);
    check(Device::Cuda(0)).unwrap();
    assert_eq!(unavailable(), None);
    set_mode(Switch::On);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, dim, wide) in SHAPES.into_iter().chain([(1024, 4096, 14336)]) {
            compare(rows, dim, wide, kind, Device::Cuda(0));
        }
    }
    set_mode(Switch::Off);
}

/// Times every kernel against libtorch's operators in bf16, at sizes of a 7B model with 1,024 tokens.
fn measure(device: Device) -> Result<Vec<Timing>> {
    let cases = guard::guard(|| Ok(cases(1024, 4096, 14336, Kind::BFloat16, device)))?;
    cases
        .into_iter()
        // its equivalent is a loop on the CPU
        .filter(|case| case.name != "dropout")
        .map(|KernelCase { name, inputs, number }| {
            let c_name = CString::new(name).map_err(|_| unknown("kernel"))?;
            let mut pointers: Vec<RawTensor> = inputs.iter().map(native::raw).collect();
            let (count, mut seconds) = (i64::try_from(inputs.len()).map_err(|_| unknown("kernel"))?, [0.0; 2]);
            // SAFETY: live tensors; the callee writes two numbers.
            unsafe {
                native::check(native::prsmed_kernels_time(
                    c_name.as_ptr(),
                    pointers.as_mut_ptr(),
                    count,
                    number,
                    seconds.as_mut_ptr(),
                ))?;
            }
            let name = format!("{name} {:?}", inputs[0].size());
            Ok(Timing { name, own_us: seconds[0] * 1e6, chain_us: seconds[1] * 1e6 })
        })
        .collect()
}

#[test]
#[ignore = "needs CUDA"]
fn kernels_are_timed() {
    let _lock = rng::TEST_LOCK.lock();
    set_folder_for_tests();
    set_mode(Switch::On);
    let timings = measure(Device::Cuda(0)).unwrap();
    set_mode(Switch::Off);
    for timing in &timings {
        let mut record = serde_json::to_value(timing).unwrap();
        record["kind"] = "kernel".into();
        #[expect(clippy::print_stdout, reason = "the timings are the purpose of this test")]
        {
            println!("{record}");
        }
    }
    assert!(timings.iter().all(|t| t.own_us > 0.0 && t.chain_us > 0.0));
}

/// A gradient that nothing else can read is rotated in place; one that another tensor gets too stays as it is.
#[test]
fn gradients_are_rotated_without_a_copy_unless_others_read_them() {
    use crate::functions::rotate;
    use crate::{META, meta, trace};
    const SHAPE: [i64; 3] = [2, 5, 24];
    let _lock = rng::TEST_LOCK.lock();
    let pass = |device: Device, rotates: bool, shares: bool| {
        let leaf = || Tensor::ones(SHAPE, (Kind::Float, device)).set_requires_grad(true);
        let (xs, other, factor) = (leaf(), leaf(), Tensor::full(SHAPE, 3.0, (Kind::Float, device)));
        let table = |value: f64| Tensor::full([5, 4], value, (Kind::Float, device));
        let mut ys = &xs * 1;
        if rotates {
            ys = rotate(ys, &table(0.6), &table(0.8));
        }
        if shares {
            ys += &other;
        }
        (ys * factor).sum(Kind::Float).backward();
        (xs.grad(), other.grad())
    };
    meta::install().unwrap();
    let whole_tensors = |rotates: bool| {
        let trace = trace::begin(meta::PlanTarget::Cuda, false).unwrap();
        drop(pass(META, rotates, false));
        let is_whole = |change| matches!(change, trace::BlockChange::Allocate(bytes) if bytes >= 2 * 5 * 24 * 4);
        trace.finish().events.iter().filter(|event| is_whole(event.change)).count()
    };
    assert!(whole_tensors(false) > 3);
    assert_eq!(whole_tensors(true), whole_tensors(false));
    let (own, _) = pass(Device::Cpu, true, false);
    let (shared, other) = pass(Device::Cpu, true, true);
    assert!(own.equal(&shared) && other.equal(&Tensor::full(SHAPE, 3.0, (Kind::Float, Device::Cpu))));
}
