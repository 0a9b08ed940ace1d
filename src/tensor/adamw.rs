//! AdamW steps (Loshchilov & Hutter 2019) on lists of tensors: libtorch's fused one, and one whose moments are 8-bit codes of
//! a dynamic map with a scale for each block of 256 (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization",
//! as bitsandbytes has it). The host waits for nothing: whether gradients are finite is a tensor.
//!
//! Deviations from bitsandbytes: the weight decays before the step, as in PyTorch and for moments in fp32, not after it;
//! a negative moment that is nearest to 0 becomes 0 (their CUDA kernel keeps its sign).

use super::native::{self, RawAdamw, RawSlot, RawTensor};
use super::{Device, Kind, META, Tensor, guard, ledger, meta};
use crate::Result;

/// Elements that share a scale.
pub const BLOCK: i64 = 256;
/// Smaller tensors keep their moments in fp32.
pub const SMALLEST: usize = 4096;
/// Elements of a parameter whose moments are brought over from host memory at once; there are two such pieces on the card.
pub const PIECE: i64 = 1 << 20;

/// Numbers of one step.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Learning rate.
    pub rate: Rate<'a>,
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// fp32 scalar on the parameters' device: nothing changes where it is 1.
    pub skip: &'a Tensor,
    /// The maps of moments in 8 bits, where there are any.
    pub maps: Option<&'a Maps>,
    /// Elements that are brought over at once; 0 when moments are where the parameters are.
    pub piece: i64,
}

/// A learning rate.
#[derive(Debug, Clone, Copy)]
pub enum Rate<'a> {
    /// Known to the host.
    Number(f64),
    /// A scalar on the parameters' device, fp32 on cards: what a recorded step reads anew.
    OnDevice(&'a Tensor),
}

/// The two values of moments' codes, `[256]` fp32 each, ascending.
#[derive(Debug)]
pub struct Maps {
    /// Of first moments.
    pub signed: Tensor,
    /// Of second ones.
    pub unsigned: Tensor,
}

impl Maps {
    /// On `device`.
    pub fn new(device: Device) -> Self {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let make = |values: &[f32]| match device {
            META => Tensor::empty([256], (Kind::Float, META)),
            device => Tensor::from_slice(values).to_device(device),
        };
        Self { signed: make(&dynamic_map(true)), unsigned: make(&dynamic_map(false)) }
    }
}

/// The values of a dynamic map: seven decades, each with twice as many steps as the one below, 0 and 1; ascending.
fn dynamic_map(signed: bool) -> Vec<f32> {
    const DECADES: i32 = 7;
    let mut values = vec![0.0, 1.0];
    for decade in 0..DECADES {
        let steps = 1_usize << if signed { decade } else { decade + 1 };
        #[expect(clippy::cast_possible_truncation, reason = "the map is one of fp32 numbers")]
        let scale = 10_f64.powi(decade + 1 - DECADES) as f32;
        let edges = linspace(0.1, 1.0, steps + 1);
        for pair in edges.windows(2) {
            let value = scale * ((pair[0] + pair[1]) * 0.5);
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    values
}

/// As libtorch's: from both ends to the middle, with one rounding.
#[expect(clippy::cast_precision_loss, reason = "fewer than 2^24 points")]
fn linspace(start: f32, end: f32, count: usize) -> Vec<f32> {
    let step = (end - start) / (count - 1) as f32;
    let from_start = |i: usize| step.mul_add(i as f32, start);
    let from_end = |i: usize| (-step).mul_add((count - 1 - i) as f32, end);
    let value = |i: usize| if i < count / 2 { from_start(i) } else { from_end(i) };
    (0..count).map(value).collect()
}

/// Numbers as codes of a map, each block with its largest magnitude.
#[derive(Debug)]
pub struct Coded {
    /// u8, in the shape of the numbers.
    pub codes: Tensor,
    /// fp32, one for each block of [`BLOCK`].
    pub scales: Tensor,
}

impl Coded {
    /// `values` (fp32, on the CPU) in codes of `map` (there too).
    ///
    /// # Errors
    /// [`crate::Error::Torch`] from libtorch.
    pub fn encode(values: &Tensor, map: &Tensor) -> Result<Self> {
        let coded = Self::zeros(values, Device::Cpu);
        let [x, map, codes, scales] = [values, map, &coded.codes, &coded.scales].map(native::raw);
        // SAFETY: four live tensors of the CPU with the sizes that the callee expects.
        guard::guard(|| unsafe { native::check(native::prsmed_encode8(x, map, codes, scales)) })?;
        Ok(coded)
    }

    /// The numbers again; all of it on the CPU.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] from libtorch.
    pub fn decode(&self, map: &Tensor) -> Result<Tensor> {
        let values = Tensor::empty(self.codes.size(), (Kind::Float, Device::Cpu));
        let [codes, scales, map, x] = [&self.codes, &self.scales, map, &values].map(native::raw);
        // SAFETY: as above.
        guard::guard(|| unsafe { native::check(native::prsmed_decode8(codes, scales, map, x)) })?;
        Ok(values)
    }

    fn zeros(like: &Tensor, device: Device) -> Self {
        Self {
            codes: zeros(&like.size(), Kind::Uint8, device),
            scales: zeros(&[blocks(like.numel())], Kind::Float, device),
        }
    }
}

/// Blocks of `numel` elements.
pub fn blocks(numel: usize) -> i64 {
    i64::try_from(numel.div_ceil(256)).expect("fewer elements than 2^63")
}

/// First and second moment of a parameter.
#[derive(Debug)]
pub enum Moments {
    /// fp32, in the shape of the parameter.
    Full([Tensor; 2]),
    /// Codes.
    Eight([Coded; 2]),
}

impl Moments {
    /// Zeros for a parameter; on its device, or `on_host`: in host memory, pinned for a card. In 8 bits where `eight` and the
    /// parameter is large enough.
    pub fn zeros(param: &Tensor, eight: bool, on_host: bool) -> Self {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let device = param.device();
        let zeros =
            |kind| if on_host { host_zeros(&param.size(), kind, device) } else { zeros(&param.size(), kind, device) };
        if !in_8_bits(param, eight) {
            return Self::Full([zeros(Kind::Float), zeros(Kind::Float)]);
        }
        let scales = [blocks(param.numel())];
        let coded = || Coded {
            codes: zeros(Kind::Uint8),
            scales: if on_host {
                host_zeros(&scales, Kind::Float, device)
            } else {
                self::zeros(&scales, Kind::Float, device)
            },
        };
        Self::Eight([coded(), coded()])
    }

    /// All tensors with what they are: `first`, `second`, or `first_codes`, `first_scales` and so on.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Full([first, second]) => vec![("first", first), ("second", second)],
            Self::Eight([first, second]) => vec![
                ("first_codes", &first.codes),
                ("first_scales", &first.scales),
                ("second_codes", &second.codes),
                ("second_scales", &second.scales),
            ],
        }
    }

    /// The same where steps want it: see [`Self::zeros`].
    #[must_use]
    pub fn placed(&self, device: Device, on_host: bool) -> Self {
        let place = |tensor: &Tensor| match (on_host, device) {
            (true, Device::Cuda(_)) => tensor.pin_memory(device),
            (true, META) if meta::target() == meta::Target::Cuda => host_zeros(&tensor.size(), tensor.kind(), device),
            (true, _) => tensor.shallow_clone(),
            (false, device) => tensor.to_device(device),
        };
        let coded = |coded: &Coded| Coded { codes: place(&coded.codes), scales: place(&coded.scales) };
        match self {
            Self::Full([first, second]) => Self::Full([place(first), place(second)]),
            Self::Eight([first, second]) => Self::Eight([coded(first), coded(second)]),
        }
    }

    fn raw(&self) -> [RawTensor; 4] {
        let mut all = [std::ptr::null_mut(); 4];
        for (slot, (_, tensor)) in all.iter_mut().zip(self.named()) {
            *slot = native::raw(tensor);
        }
        all
    }
}

/// Whether the moments of `param` are codes, where those of large tensors are.
pub fn in_8_bits(param: &Tensor, eight: bool) -> bool {
    eight && param.numel() >= SMALLEST
}

fn zeros(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::zeros(size, (kind, device))
}

/// Zeros that a step on `device` brings over: pinned for a card. A rehearsed card's stand for themselves with one number,
/// since nobody counts its host; on the CPU it is the same memory.
fn host_zeros(size: &[i64], kind: Kind, device: Device) -> Tensor {
    match device {
        Device::Cuda(_) => zeros(size, kind, Device::Cpu).pin_memory(device),
        META if meta::target() == meta::Target::Cuda => {
            zeros(&vec![1; size.len()], kind, Device::Cpu).expand(size, false)
        }
        device => zeros(size, kind, device),
    }
}

/// One parameter with its state. `step` is a scalar in fp32 that counts the steps done; a step increases it.
#[derive(Debug)]
pub struct Slot<'a> {
    /// The parameter, fp32, changed in place.
    pub param: &'a Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Its moments, changed in place.
    pub moments: &'a Moments,
    /// Step count.
    pub step: &'a Tensor,
}

impl Slot<'_> {
    fn raw(&self) -> RawSlot {
        let [param, grad, step] = [self.param, self.grad, self.step].map(native::raw);
        RawSlot { param, grad, step, state: self.moments.raw() }
    }
}

impl Step<'_> {
    fn raw(&self) -> RawAdamw {
        let (learning_rate, rate) = match self.rate {
            Rate::Number(number) => (number, std::ptr::null_mut()),
            Rate::OnDevice(tensor) => (0.0, native::raw(tensor)),
        };
        let map = |pick: fn(&Maps) -> &Tensor| self.maps.map_or(std::ptr::null_mut(), |maps| native::raw(pick(maps)));
        RawAdamw {
            learning_rate,
            beta1: self.betas.0,
            beta2: self.betas.1,
            weight_decay: self.weight_decay,
            epsilon: self.epsilon,
            rate,
            skip: native::raw(self.skip),
            signed_map: map(|maps| &maps.signed),
            unsigned_map: map(|maps| &maps.unsigned),
            piece: self.piece,
        }
    }
}

/// Does one AdamW step on all `slots`.
///
/// # Errors
/// [`crate::Error::Torch`] when shapes or dtypes differ.
pub fn step(slots: &[Slot], step: Step) -> Result<()> {
    let raw: Vec<RawSlot> = slots.iter().map(Slot::raw).collect();
    let count = i64::try_from(slots.len()).expect("fewer parameters than 2^63");
    let numbers = step.raw();
    // SAFETY: `count` slots of live tensors; maps are there where codes are, which `AdamW` sees to.
    guard::guard(|| unsafe { native::check(native::prsmed_adamw_step(raw.as_ptr(), count, &raw const numbers)) })
}

/// Multiplies `grads` (one or more) in place by `factor`; the norm over all of them, an fp32 scalar on their device.
///
/// # Errors
/// [`crate::Error::Torch`] from libtorch.
pub fn norm(grads: &[Tensor], factor: f64) -> Result<Tensor> {
    let mut raw: Vec<RawTensor> = grads.iter().map(native::raw).collect();
    let count = i64::try_from(raw.len()).expect("fewer parameters than 2^63");
    // SAFETY: `count` live tensors.
    made(|out| unsafe { native::prsmed_gradient_norm(raw.as_mut_ptr(), count, factor, out) })
}

/// What gradients of this `norm` are multiplied by so that it is at most `clip_norm` (0: no limit), and 1 where it is not
/// finite: fp32 `[2]` on the norm's device.
///
/// # Errors
/// [`crate::Error::Torch`] from libtorch.
pub fn verdict(norm: &Tensor, clip_norm: f64) -> Result<Tensor> {
    // SAFETY: a live tensor.
    made(|out| unsafe { native::prsmed_gradient_verdict(native::raw(norm), clip_norm, out) })
}

/// Clips `grads` in place by a [`verdict`].
///
/// # Errors
/// [`crate::Error::Torch`] from libtorch.
pub fn clip(grads: &[Tensor], verdict: &Tensor) -> Result<()> {
    let mut raw: Vec<RawTensor> = grads.iter().map(native::raw).collect();
    let count = i64::try_from(raw.len()).expect("fewer parameters than 2^63");
    // SAFETY: `count` live tensors and one more.
    guard::guard(|| unsafe {
        native::check(native::prsmed_clip_gradients(raw.as_mut_ptr(), count, native::raw(verdict)))
    })
}

fn made(call: impl FnOnce(*mut RawTensor) -> *mut std::ffi::c_char) -> Result<Tensor> {
    let mut out = std::ptr::null_mut();
    // SAFETY: `call` gives what a `prsmed_*` function returned; on success `out` is an owned tensor.
    guard::guard(|| unsafe {
        native::check(call(&raw mut out))?;
        Ok(native::owned(out))
    })
}

#[cfg(test)]
#[path = "adamw_tests.rs"]
mod tests;
