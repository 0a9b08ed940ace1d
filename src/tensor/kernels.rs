//! Custom CUDA kernels: RMSNorm, rotary embedding, SwiGLU, NF4 dequantization, seeded dropout, adapters (LoRA), the
//! attention bias of packed sequences, and 8-bit AdamW (`native/kernels/*.cu`).
//!
//! The binary contains the sources. NVRTC, which libtorch's wheel brings, compiles them for the GPU at run time. The
//! native layer calls them (`native/kernels.h`). Each kernel has an equivalent of libtorch's operators, which runs
//! otherwise.
//!
//! Tests need no GPU: the kernels also compile as C++ that emulates GPU threads, and NVRTC compiles them without a GPU.

use super::adamw::Maps;
use super::native::{self, RawTensor};
use super::{Device, Kind, Tensor, guard, memory, rng};
use prsmed_base::units::Bytes;
use prsmed_base::{Error, Result};
use std::ffi::CString;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Use of an optimization, such as the custom CUDA kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// On if it is measured to be faster. Kernels are timed the first time that an operation and size occur.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Sets the mode of the process. The default is [`Switch::Off`].
pub fn set_mode(mode: Switch) {
    // SAFETY: sets a number.
    unsafe { native::prsmed_kernels_mode(mode as i32) };
}

/// Caches compiled kernels in `folder`, so that the next process need not compile them. The folder is created for this
/// user only. If it belongs to another user, or others can write it, kernels are compiled and not cached.
pub fn set_folder(folder: &Path) {
    if let Ok(path) = CString::new(folder.as_os_str().as_encoded_bytes()) {
        // SAFETY: a NUL-terminated string, copied by the callee.
        unsafe { native::prsmed_kernels_folder(path.as_ptr()) };
    }
}

/// As the program: kernels in the folder of the environment, so that several processes compile them once. (NVRTC does not
/// run under the fake CUDA runtime.)
#[doc(hidden)]
pub fn set_folder_for_tests() {
    if let Some(cache) = std::env::var_os("PRSMED_CACHE") {
        set_folder(&Path::new(&cache).join("kernels"));
    }
}

/// The reason why kernels cannot run on this machine; `None` if they can.
pub fn unavailable() -> Option<String> {
    // SAFETY: the callee gives a text of its own.
    let reason = unsafe { native::text(native::prsmed_kernels_unavailable()) };
    (!reason.is_empty()).then_some(reason)
}

/// Compares every kernel with libtorch's operators on small tensors of `device`, once per process. A kernel that
/// differs does not run from then on ([`refusals`]). If one fails or they do not compile, none runs, and
/// [`unavailable`] gives the reason. Does nothing on the CPU. Sets [`Switch::Off`].
///
/// # Errors
/// [`Error::Torch`] from libtorch's generators.
pub fn check(device: Device) -> Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if *done || !matches!(device, Device::Cuda(_)) || unavailable().is_some() {
        return Ok(());
    }
    let numbers = rng::RngState::take(device)?;
    rng::seed(0);
    set_mode(Switch::On);
    let found = differences(device);
    set_mode(Switch::Off);
    numbers.restore()?;
    match found {
        Ok(found) => refuse(found),
        Err(error) => {
            memory::clear_failure();
            disable(&format!("they fail on this GPU: {error}"));
        }
    }
    *done = true;
    Ok(())
}

/// Why [`check`] turned single kernels off: a line for each.
pub fn refusals() -> Vec<String> {
    let refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
    refused.iter().map(ToString::to_string).collect()
}

static REFUSED: Mutex<Vec<Difference>> = Mutex::new(Vec::new());

/// Turns off the kernels that differ; an empty list turns all of them on again.
fn refuse(found: Vec<Difference>) {
    let names: Vec<&str> = if found.is_empty() { vec![""] } else { found.iter().map(|found| found.name).collect() };
    for name in names {
        let name = CString::new(name).expect("a name without NUL");
        // SAFETY: a NUL-terminated string, copied by the callee.
        unsafe { native::prsmed_kernels_refuse(name.as_ptr()) };
    }
    *REFUSED.lock().unwrap_or_else(PoisonError::into_inner) = found;
}

/// A kernel whose results differ from those of libtorch's operators by more than rounding.
#[derive(Debug, Clone, PartialEq)]
struct Difference {
    name: &'static str,
    kind: Kind,
    /// Elements that differ.
    wrong: i64,
    /// All elements.
    count: i64,
    /// The largest difference of finite elements.
    largest: f64,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, kind, wrong, count, largest } = self;
        write!(
            f,
            "the custom CUDA kernel `{name}` is off: in {kind:?} it differs from libtorch in {wrong} of {count} \
             elements, by up to {largest:.2e}"
        )
    }
}

/// Rows, width and MLP width of the compared tensors. They need several blocks, packs of eight, and remainders.
const CHECKED: [(i64, i64, i64); 2] = [(96, 256, 1384), (7, 300, 65)];

/// The first difference of each kernel that differs.
fn differences(device: Device) -> Result<Vec<Difference>> {
    let mut found: Vec<Difference> = Vec::new();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, dim, wide) in CHECKED {
            for KernelCase { name, inputs, number } in guard::guard(|| Ok(cases(rows, dim, wide, kind, device)))? {
                if found.iter().any(|found| found.name == name) {
                    continue;
                }
                let custom = run(name, Implementation::Custom, &inputs, number)?;
                let libtorch = run(name, Implementation::Libtorch, &inputs, number)?;
                for (custom, libtorch) in custom.iter().zip(&libtorch) {
                    let (wrong, largest) = guard::guard(|| Ok(compare_results(custom, libtorch, kind)))?;
                    if wrong > 0 {
                        let count = i64::try_from(custom.numel()).unwrap_or(i64::MAX);
                        found.push(Difference { name, kind, wrong, count, largest });
                        break;
                    }
                }
            }
        }
    }
    Ok(found)
}

/// Largest relative difference of results that differ by one rounding.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 2.0_f64.powi(-7),
        Kind::Half => 2.0_f64.powi(-10),
        _ => 1e-5,
    }
}

/// Number of elements, results in `kind`, that differ by more than rounding or are finite in only one of the tensors,
/// and the largest difference of finite elements. Codes of 8 bits may differ by one, because a value can be half-way
/// between two of them.
fn compare_results(custom: &Tensor, libtorch: &Tensor, kind: Kind) -> (i64, f64) {
    let are_codes = custom.kind() == Kind::Uint8;
    let (custom, libtorch) = (custom.to_kind(Kind::Double), libtorch.to_kind(Kind::Double));
    // products of both signs are summed: allow an error relative to the size of the terms
    let finite = libtorch.isfinite();
    let size = libtorch.nan_to_num(0.0, 0.0, 0.0).abs();
    let bound = if are_codes { size.ones_like() } else { (&size + size.mean(Kind::Double)) * tolerance(kind) };
    let apart = (&custom - &libtorch).abs();
    let is_same = custom.eq_tensor(&libtorch).logical_or(&apart.le_tensor(&bound).logical_and(&finite));
    let largest = if apart.numel() == 0 { 0.0 } else { apart.nan_to_num(0.0, 0.0, 0.0).max().double_value(&[]) };
    (is_same.logical_not().sum(Kind::Int64).int64_value(&[]), largest)
}

/// Turns all kernels off for `reason`; an empty reason turns them on again.
fn disable(reason: &str) {
    if let Ok(reason) = CString::new(reason) {
        // SAFETY: a NUL-terminated string, copied by the callee.
        unsafe { native::prsmed_kernels_disable(reason.as_ptr()) };
    }
}

/// Result of a compilation by NVRTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compiled {
    /// Size of the code.
    pub code: Bytes,
    /// True for machine code of the GPU; false for PTX, which the driver compiles.
    pub is_native: bool,
}

/// Compiles all kernels for a compute capability (80 for 8.0). Needs NVRTC but no GPU.
///
/// # Errors
/// [`Error::Torch`] without NVRTC, or with the compiler's message.
pub fn compile(capability: u32) -> Result<Compiled> {
    let capability = i32::try_from(capability).map_err(|_| unknown("compute capability"))?;
    let mut is_native = false;
    // SAFETY: the callee writes two values.
    let bytes =
        unsafe { native::written(0, |out| native::prsmed_kernels_compile(capability, out, &raw mut is_native)) };
    bytes.map(|bytes| Compiled { code: Bytes(bytes), is_native })
}

/// Implementation of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Implementation {
    /// Custom CUDA kernel.
    Custom,
    /// libtorch's operators.
    Libtorch,
}

/// Runs an operation by name. `operations` in `native/kernels_operations.cpp` lists its tensors and its number.
///
/// # Errors
/// [`Error::Torch`] for an unknown name, and for tensors that the kernel does not support.
pub fn run(name: &str, implementation: Implementation, inputs: &[Tensor], number: f64) -> Result<Vec<Tensor>> {
    let name = CString::new(name).map_err(|_| unknown("kernel"))?;
    let mut pointers: Vec<RawTensor> = inputs.iter().map(native::raw).collect();
    let (mut out, mut count) = ([std::ptr::null_mut(); 5], 0);
    guard::guard(|| {
        // SAFETY: live tensors; the callee writes at most five tensors and how many.
        unsafe {
            native::check(native::prsmed_kernels_run(
                name.as_ptr(),
                implementation == Implementation::Custom,
                pointers.as_mut_ptr(),
                i64::try_from(inputs.len()).map_err(|_| unknown("kernel"))?,
                number,
                out.as_mut_ptr(),
                &raw mut count,
            ))?;
        }
        let count = usize::try_from(count).map_err(|_| unknown("kernel"))?;
        // SAFETY: that many pointers were set to tensors that this function owns.
        Ok(out.iter().take(count).map(|pointer| unsafe { native::owned(*pointer) }).collect())
    })
}

/// Microseconds of one call, by both implementations.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Timing {
    /// Operation, dtype and size.
    pub name: String,
    /// Time of the custom CUDA kernel.
    pub own_us: f64,
    /// Time of libtorch's operators.
    pub chain_us: f64,
}

/// Timings that [`Switch::Auto`] has measured; it uses the faster implementation.
pub fn choices() -> Vec<Timing> {
    // SAFETY: the callee gives a text of its own.
    let text = unsafe { native::text(native::prsmed_kernels_choices()) };
    let timing = |line: &str| {
        let mut fields = line.split('\t');
        let (name, own_us, chain_us) = (fields.next()?, fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(Timing { name: name.to_owned(), own_us, chain_us })
    };
    text.lines().filter_map(timing).collect()
}

/// An operation with its inputs.
#[derive(Debug)]
struct KernelCase {
    name: &'static str,
    inputs: Vec<Tensor>,
    number: f64,
}

/// Every operation with random tensors: `rows` tokens of width `dim` (even), and an MLP of width `wide`.
fn cases(rows: i64, dim: i64, wide: i64, kind: Kind, device: Device) -> Vec<KernelCase> {
    let random = |sizes: &[i64]| Tensor::randn(sizes, (Kind::Float, device)).to_kind(kind);
    let fp32 = |sizes: &[i64]| Tensor::randn(sizes, (Kind::Float, device));
    let bytes = |count: i64| Tensor::randint(256, [count], (Kind::Uint8, device));
    let copies = |tensors: &[&Tensor]| tensors.iter().map(|t| t.shallow_clone()).collect::<Vec<_>>();
    let (x, weight, dy) = (random(&[rows, dim]), random(&[dim]), random(&[rows, dim]));
    let rstd = (x.to_kind(Kind::Float).square().mean_dim([-1].as_slice(), true, Kind::Float) + 1e-5).rsqrt();
    let head = if dim % 128 == 0 { 128 } else { dim };
    let angles = fp32(&[rows, head / 2]);
    let (cos, sin, heads) = (angles.cos().to_kind(kind), angles.sin().to_kind(kind), random(&[2, rows, dim]));
    let (gate, up, dgated) = (random(&[rows, wide]), random(&[rows, wide]), random(&[rows, wide]));
    let (count, blocks) = (rows * wide, (rows * wide + 63) / 64);
    let (codes, like) = (bytes((count + 1) / 2), Tensor::empty([rows, wide], (kind, device)));
    let nested = fp32(&[(blocks + 255) / 256]).abs();
    let tokens = rows.min(512);
    let blocks_of_tokens = Tensor::randint(4, [2, tokens], (Kind::Int64, device));
    let bias = Tensor::empty([2, 1, tokens, tokens + wide % 8], (kind, device));
    // adapters of one rank; one alone, and three that share an input
    let (input, alone, shared) = (random(&[rows, (dim + 63) / 64 * 64]), [20], [8; 3]);
    let matrices =
        |ranks: &[i64]| -> Vec<Tensor> { ranks.iter().map(|rank| fp32(&[*rank, input.size()[1]])).collect() };
    let grads = |ranks: &[i64]| -> Vec<Tensor> { ranks.iter().map(|rank| random(&[rows, *rank])).collect() };
    let forward = |ranks: &[i64]| [copies(&[&input]), matrices(ranks)].into_iter().flatten().collect();
    let backward = |ranks: &[i64]| [copies(&[&input]), grads(ranks), matrices(ranks)].into_iter().flatten().collect();
    let case = |name, inputs, number| KernelCase { name, inputs, number };
    vec![
        case("rms_norm", copies(&[&x, &weight]), 1e-5),
        case("rms_norm_backward", copies(&[&dy, &x, &weight, &rstd]), 0.0),
        case("rms_norm_weight_grad", copies(&[&dy, &x, &weight, &rstd]), 0.0),
        case("rotary", copies(&[&heads, &cos, &sin]), 0.0),
        case("rotary_backward", copies(&[&heads, &cos, &sin]), 0.0),
        case("dropout", copies(&[&x]), 0.3),
        case("low_rank", forward(&alone), 0.3),
        case("low_rank", forward(&shared), 0.3),
        case("low_rank_weight_grad", backward(&alone), 0.3),
        case("low_rank_weight_grad", backward(&shared), 0.0),
        case("low_rank_input_grad", backward(&alone), 0.0),
        case("low_rank_input_grad", backward(&shared), 0.3),
        case("swiglu", copies(&[&gate, &up]), 0.0),
        case("swiglu_backward", copies(&[&dgated, &gate, &up]), 0.0),
        case("nf4", copies(&[&codes, &like, &fp32(&[blocks]).abs()]), 0.0),
        case("nf4", copies(&[&codes, &like, &bytes(blocks), &nested, &fp32(&[256])]), 0.05),
        case("packed_bias", copies(&[&blocks_of_tokens, &bias]), 0.0),
        // always fp32
        case("adamw8", trained(rows * dim, device), 0.01),
    ]
}

/// Inputs of `adamw8`: a parameter, its gradient, 8-bit moments, their maps and the step.
fn trained(count: i64, device: Device) -> Vec<Tensor> {
    let fp32 = |count: i64| Tensor::randn([count], (Kind::Float, device));
    let codes = || Tensor::randint(256, [count], (Kind::Uint8, device));
    let scales = || fp32((count + 255) / 256).abs();
    let Maps { signed, unsigned } = Maps::new(device);
    let step = Tensor::full([0; 0], 3.0, (Kind::Float, device));
    vec![fp32(count), fp32(count), codes(), scales(), codes(), scales(), signed, unsigned, step]
}

fn unknown(what: &str) -> Error {
    Error::Torch { reason: format!("there is no such {what}") }
}

#[cfg(test)]
#[path = "kernels_tests.rs"]
mod tests;
