//! Kernels of our own for CUDA cards: RMSNorm, rotary embedding, SwiGLU, NF4 weights, dropout from a seed, the bias of
//! attention among packed texts, AdamW with moments in 8 bits (`native/kernels/*.cu`). The binary carries their sources;
//! NVRTC, which comes with libtorch's wheel, compiles them for the card at hand. Layers reach them in the native layer
//! (`native/kernels.h`); each has a twin of libtorch's operators.
//!
//! Without a card their arithmetic is tested as C++ that emulates a card's threads, and NVRTC compiles them all the same.

use super::adamw::Maps;
use super::native::{self, RawTensor};
use super::{Device, Kind, Tensor, guard, memory, rng};
use crate::units::Bytes;
use crate::{Error, Result};
use std::ffi::CString;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// When kernels of our own run on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Where they are faster, by a comparison the first time that a size is met.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Compute capabilities that the kernels are made for: Turing, Ampere, Ada, Hopper, Blackwell.
pub const CAPABILITIES: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// Sets the mode of the whole process; [`Mode::Off`] until then.
pub fn set_mode(mode: Mode) {
    // SAFETY: sets a number.
    unsafe { native::prsmed_kernels_mode(mode as i32) };
}

/// Keeps compiled kernels in `folder`, so that the next process need not compile them.
pub fn set_folder(folder: &Path) {
    if let Ok(path) = CString::new(folder.as_os_str().as_encoded_bytes()) {
        // SAFETY: a NUL-terminated string, copied by the callee.
        unsafe { native::prsmed_kernels_folder(path.as_ptr()) };
    }
}

/// Why kernels cannot run on this machine; `None` where they can.
pub fn unavailable() -> Option<String> {
    // SAFETY: the callee gives a text of its own.
    let reason = unsafe { native::text(native::prsmed_kernels_unavailable()) };
    (!reason.is_empty()).then_some(reason)
}

/// Compares every kernel with libtorch's operators on small tensors of `device`, once in a process; where one differs, none
/// runs from then on and [`unavailable`] says so, as where they cannot be compiled for the card. Nothing to do on the CPU.
/// Leaves [`Mode::Off`].
///
/// # Errors
/// [`Error::Torch`] from libtorch's generators.
pub fn check(device: Device) -> Result<()> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if *done || !matches!(device, Device::Cuda(_)) || unavailable().is_some() {
        return Ok(());
    }
    let numbers = rng::State::take(device)?;
    rng::seed(0);
    set_mode(Mode::On);
    let found = first_difference(device);
    set_mode(Mode::Off);
    numbers.restore()?;
    match found {
        Ok(None) => (),
        Ok(Some(difference)) => refuse(&format!("on this card {difference}")),
        Err(error) => {
            memory::clear_failure();
            refuse(&format!("on this card they do not run: {error}"));
        }
    }
    *done = true;
    Ok(())
}

/// Rows, width and an MLP's width of tensors to compare with: several blocks of a kernel, packs of eight and what is left.
const CHECKED: [(i64, i64, i64); 2] = [(96, 256, 1384), (7, 300, 65)];

/// The first kernel whose results are other ones than libtorch's.
fn first_difference(device: Device) -> Result<Option<String>> {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, dim, wide) in CHECKED {
            for Case { name, inputs, number } in guard::guard(|| Ok(cases(rows, dim, wide, kind, device)))? {
                let own = run(name, Way::Own, &inputs, number)?;
                let chain = run(name, Way::Chain, &inputs, number)?;
                for (own, chain) in own.iter().zip(&chain) {
                    let wrong = guard::guard(|| Ok(differing(own, chain, kind)))?;
                    if wrong > 0 {
                        return Ok(Some(format!("`{name}` in {kind:?} gives {wrong} other numbers than libtorch")));
                    }
                }
            }
        }
    }
    Ok(None)
}

/// Largest relative difference of numbers that are rounded once more or less.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 2.0_f64.powi(-7),
        Kind::Half => 2.0_f64.powi(-10),
        _ => 1e-5,
    }
}

/// Numbers of two tensors of one shape, results in `kind`, that are not the same: differ by more than rounding, or are finite
/// in one of them alone.
fn differing(own: &Tensor, chain: &Tensor, kind: Kind) -> i64 {
    let (own, chain) = (own.to_kind(Kind::Double), chain.to_kind(Kind::Double));
    // sums of products of both signs: an error as large as that of their terms
    let finite = chain.isfinite();
    let size = chain.nan_to_num(0.0, 0.0, 0.0).abs();
    let bound = (&size + size.mean(Kind::Double)) * tolerance(kind);
    let is_same = own.eq_tensor(&chain).logical_or(&(&own - &chain).abs().le_tensor(&bound).logical_and(&finite));
    is_same.logical_not().sum(Kind::Int64).int64_value(&[])
}

/// No kernel runs from now on, for `reason`; an empty one ends that.
fn refuse(reason: &str) {
    if let Ok(reason) = CString::new(reason) {
        // SAFETY: a NUL-terminated string, copied by the callee.
        unsafe { native::prsmed_kernels_refuse(reason.as_ptr()) };
    }
}

/// What NVRTC made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compiled {
    /// Size of the code.
    pub code: Bytes,
    /// The card's own code, and not PTX that its driver compiles again.
    pub is_native: bool,
}

/// Compiles all kernels for a compute capability (80 for 8.0). Needs NVRTC and no card.
///
/// # Errors
/// [`Error::Torch`] without NVRTC, or with the compiler's words.
pub fn compile(capability: u32) -> Result<Compiled> {
    let capability = i32::try_from(capability).map_err(|_| unknown("compute capability"))?;
    let (mut bytes, mut is_native) = (0, false);
    // SAFETY: the callee writes two values.
    unsafe { native::check(native::prsmed_kernels_compile(capability, &raw mut bytes, &raw mut is_native))? };
    Ok(Compiled { code: Bytes(bytes), is_native })
}

/// One of two ways to compute something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Our kernel.
    Own,
    /// libtorch's operators.
    Chain,
}

/// Runs an operation by name; what its tensors and number are, `operations` in `native/kernels_operations.cpp` says.
///
/// # Errors
/// [`Error::Torch`] for unknown names, and for tensors that the kernel does not take.
pub fn run(name: &str, way: Way, inputs: &[Tensor], number: f64) -> Result<Vec<Tensor>> {
    let name = CString::new(name).map_err(|_| unknown("kernel"))?;
    let mut pointers: Vec<RawTensor> = inputs.iter().map(native::raw).collect();
    let (mut out, mut count) = ([std::ptr::null_mut(); 5], 0);
    guard::guard(|| {
        // SAFETY: live tensors; the callee writes at most five tensors and how many.
        unsafe {
            native::check(native::prsmed_kernels_run(
                name.as_ptr(),
                way == Way::Own,
                pointers.as_mut_ptr(),
                i64::try_from(inputs.len()).map_err(|_| unknown("kernel"))?,
                number,
                out.as_mut_ptr(),
                &raw mut count,
            ))?;
        }
        let count = usize::try_from(count).map_err(|_| unknown("kernel"))?;
        // SAFETY: that many pointers were set to tensors of ours.
        Ok(out.iter().take(count).map(|pointer| unsafe { native::owned(*pointer) }).collect())
    })
}

/// Microseconds of one call.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Timing {
    /// The operation, its dtype and its size.
    pub name: String,
    /// Of our kernel.
    pub own_us: f64,
    /// Of libtorch's operators.
    pub chain_us: f64,
}

/// What [`Mode::Auto`] measured so far: it keeps the faster one.
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

/// Times every kernel against libtorch's operators at sizes of a 7B model with 1,024 tokens, in bf16. [`Mode::On`] must be set.
///
/// # Errors
/// [`Error::Torch`] without a card.
pub fn measure(device: Device) -> Result<Vec<Timing>> {
    let cases = guard::guard(|| Ok(cases(1024, 4096, 14336, Kind::BFloat16, device)))?;
    cases
        .into_iter()
        // its twin is a loop on the host
        .filter(|case| case.name != "dropout")
        .map(|Case { name, inputs, number }| {
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

/// An operation with tensors to run it on.
#[derive(Debug)]
struct Case {
    name: &'static str,
    inputs: Vec<Tensor>,
    number: f64,
}

/// Every operation on random tensors: `rows` tokens of width `dim` (even), an MLP of width `wide`.
fn cases(rows: i64, dim: i64, wide: i64, kind: Kind, device: Device) -> Vec<Case> {
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
    let case = |name, inputs, number| Case { name, inputs, number };
    vec![
        case("rms_norm", copies(&[&x, &weight]), 1e-5),
        case("rms_norm_backward", copies(&[&dy, &x, &weight, &rstd]), 0.0),
        case("rms_norm_weight_grad", copies(&[&dy, &x, &weight, &rstd]), 0.0),
        case("rotary", copies(&[&heads, &cos, &sin]), 0.0),
        case("rotary_backward", copies(&[&heads, &cos, &sin]), 0.0),
        case("dropout", copies(&[&x]), 0.3),
        case("swiglu", copies(&[&gate, &up]), 0.0),
        case("swiglu_backward", copies(&[&dgated, &gate, &up]), 0.0),
        case("nf4", copies(&[&codes, &like, &fp32(&[blocks]).abs()]), 0.0),
        case("nf4", copies(&[&codes, &like, &bytes(blocks), &nested, &fp32(&[256])]), 0.05),
        case("packed_bias", copies(&[&blocks_of_tokens, &bias]), 0.0),
        // fp32, whatever `kind`
        case("adamw8", trained(rows * dim, device), 0.01),
    ]
}

/// A parameter with its gradient, moments in 8 bits, their maps and the step: what `adamw8` takes.
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
