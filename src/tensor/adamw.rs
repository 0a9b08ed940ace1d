//! AdamW optimizer steps (Loshchilov & Hutter 2019) on lists of tensors, with fp32 or 8-bit state.
//!
//! The fp32 step is libtorch's fused kernel. The 8-bit state has codes of a dynamic map with one scale per block of 256
//! (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", as in bitsandbytes). A step needs no host
//! synchronisation: `found_inf` is a tensor on the device.
//!
//! Deviations from bitsandbytes: weight decay is applied before the step, as in PyTorch, not after it. A negative
//! moment whose nearest value is 0 becomes 0; the CUDA kernel of bitsandbytes keeps its sign.

use super::native::{self, RawAdamw, RawSlot, RawTensor};
use super::{Device, Kind, META, Tensor, guard, ledger, meta};
use prsmed_base::Result;
use prsmed_base::units::Bytes;

/// Elements that share a scale.
pub const BLOCK: i64 = 256;
/// Parameters with fewer elements keep fp32 moments.
pub const MIN_8BIT_ELEMENTS: usize = 4096;
/// Elements per chunk of offloaded moments that is copied to the GPU. Two chunks are on the GPU at a time.
pub const OFFLOAD_CHUNK: i64 = 1 << 20;

/// Hyperparameters and shared tensors of one optimizer step.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Learning rate.
    pub rate: Rate<'a>,
    /// Decay rates of the first and second moment.
    pub betas: (f64, f64),
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the square root of the second moment.
    pub epsilon: f64,
    /// fp32 scalar on the parameters' device. If it is 1, the step changes nothing.
    pub found_inf: &'a Tensor,
    /// Code maps of the 8-bit moments, if there are any.
    pub maps: Option<&'a Maps>,
    /// Elements per chunk of offloaded moments; 0 if the moments are not offloaded.
    pub chunk: i64,
}

/// Learning rate of a step.
#[derive(Debug, Clone, Copy)]
pub enum Rate<'a> {
    /// A number known to the CPU.
    Number(f64),
    /// A scalar on the parameters' device (fp32 on a GPU), which a replayed CUDA graph reads again.
    OnDevice(&'a Tensor),
}

/// Code maps of 8-bit moments: the value of each code, `[256]` fp32, ascending.
#[derive(Debug)]
pub struct Maps {
    /// Map of first moments.
    pub signed: Tensor,
    /// Map of second moments.
    pub unsigned: Tensor,
}

impl Maps {
    /// Creates both maps on `device`.
    pub fn new(device: Device) -> Self {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let make = |values: &[f32]| match device {
            META => Tensor::empty([256], (Kind::Float, META)),
            device => Tensor::from_slice(values).to_device(device),
        };
        Self { signed: make(&dynamic_map(true)), unsigned: make(&dynamic_map(false)) }
    }
}

/// The values of a dynamic map, ascending: 0, 1, and seven decades, each with twice as many steps as the one below.
fn dynamic_map(signed: bool) -> Vec<f32> {
    const DECADES: i32 = 7;
    let mut values = vec![0.0, 1.0];
    for decade in 0..DECADES {
        let steps = 1_usize << if signed { decade } else { decade + 1 };
        #[expect(clippy::cast_possible_truncation, reason = "the map has fp32 values")]
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

/// Like libtorch's `linspace`: from both ends to the middle, with one rounding.
fn linspace(start: f32, end: f32, count: usize) -> Vec<f32> {
    let step = (end - start) / (count - 1) as f32;
    let from_start = |i: usize| step.mul_add(i as f32, start);
    let from_end = |i: usize| (-step).mul_add((count - 1 - i) as f32, end);
    let value = |i: usize| if i < count / 2 { from_start(i) } else { from_end(i) };
    (0..count).map(value).collect()
}

/// A tensor as 8-bit codes, with one scale (the largest magnitude) per block.
#[derive(Debug)]
pub struct Coded {
    /// u8, in the shape of the tensor.
    pub codes: Tensor,
    /// fp32, one for each block of [`BLOCK`].
    pub scales: Tensor,
}

impl Coded {
    /// Encodes `values` (fp32, CPU) with `map` (CPU).
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] from libtorch.
    pub fn encode(values: &Tensor, map: &Tensor) -> Result<Self> {
        let codes = Tensor::zeros(values.size(), (Kind::Uint8, Device::Cpu));
        let coded = Self { codes, scales: Tensor::zeros([blocks(values.numel())], (Kind::Float, Device::Cpu)) };
        let [x, map, codes, scales] = [values, map, &coded.codes, &coded.scales].map(native::raw);
        // SAFETY: four live tensors of the CPU with the sizes that the callee expects.
        guard::guard(|| unsafe { native::check(native::prsmed_encode8(x, map, codes, scales)) })?;
        Ok(coded)
    }

    /// Decodes to fp32. All tensors are on the CPU.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] from libtorch.
    pub fn decode(&self, map: &Tensor) -> Result<Tensor> {
        let values = Tensor::empty(self.codes.size(), (Kind::Float, Device::Cpu));
        let [codes, scales, map, x] = [&self.codes, &self.scales, map, &values].map(native::raw);
        // SAFETY: as above.
        guard::guard(|| unsafe { native::check(native::prsmed_decode8(codes, scales, map, x)) })?;
        Ok(values)
    }
}

/// Number of blocks of `numel` elements.
pub fn blocks(numel: usize) -> i64 {
    i64::try_from(numel.div_ceil(256)).expect("fewer elements than 2^63")
}

/// First and second moment of a parameter.
#[derive(Debug)]
pub enum Moments {
    /// fp32, in the shape of the parameter.
    Full([Tensor; 2]),
    /// 8-bit codes.
    EightBit([Coded; 2]),
}

impl Moments {
    /// Zero moments for `param`, on its device. `offloaded`: in CPU memory, pinned if the parameter is on a GPU.
    /// `eight_bit`: 8-bit codes, if the parameter is large enough.
    pub fn zeros(param: &Tensor, eight_bit: bool, offloaded: bool) -> Self {
        let _category = ledger::enter(ledger::Category::Optimizer);
        let device = param.device();
        let zeros = |size: &[i64], kind| {
            if offloaded { offloaded_zeros(size, kind, device) } else { Tensor::zeros(size, (kind, device)) }
        };
        let (size, scales) = (param.size(), [blocks(param.numel())]);
        if !in_8_bits(param, eight_bit) {
            return Self::Full([zeros(&size, Kind::Float), zeros(&size, Kind::Float)]);
        }
        let coded = || Coded { codes: zeros(&size, Kind::Uint8), scales: zeros(&scales, Kind::Float) };
        Self::EightBit([coded(), coded()])
    }

    /// All tensors with their names: `first` and `second`, or `first_codes`, `first_scales` and so on.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Full([first, second]) => vec![("first", first), ("second", second)],
            Self::EightBit([first, second]) => vec![
                ("first_codes", &first.codes),
                ("first_scales", &first.scales),
                ("second_codes", &second.codes),
                ("second_scales", &second.scales),
            ],
        }
    }

    /// The same moments on the device where steps need them; see [`Self::zeros`].
    #[must_use]
    pub fn to_device(&self, device: Device, offloaded: bool) -> Self {
        let place = |tensor: &Tensor| match (offloaded, device) {
            (true, Device::Cuda(_)) => tensor.pin_memory(device),
            (true, META) if meta::target() == meta::PlanTarget::Cuda => {
                offloaded_zeros(&tensor.size(), tensor.kind(), device)
            }
            (true, _) => tensor.shallow_clone(),
            (false, device) => tensor.to_device(device),
        };
        let coded = |coded: &Coded| Coded { codes: place(&coded.codes), scales: place(&coded.scales) };
        match self {
            Self::Full([first, second]) => Self::Full([place(first), place(second)]),
            Self::EightBit([first, second]) => Self::EightBit([coded(first), coded(second)]),
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

/// True if the moments of `param` are 8-bit codes under the setting `eight_bit`.
pub fn in_8_bits(param: &Tensor, eight_bit: bool) -> bool {
    eight_bit && param.numel() >= MIN_8BIT_ELEMENTS
}

/// Bytes of the moments of `param`.
pub fn state_bytes(param: &Tensor, eight_bit: bool) -> Bytes {
    let numel = param.numel() as u64;
    if in_8_bits(param, eight_bit) {
        let scales = blocks(param.numel()).unsigned_abs();
        Bytes(2 * (numel + 4 * scales))
    } else {
        Bytes(8 * numel)
    }
}

/// Zeros for offloaded state of `device`: pinned CPU memory for a GPU. A planned GPU gets one number that is expanded,
/// because the plan does not count CPU memory. For the CPU it is ordinary memory.
fn offloaded_zeros(size: &[i64], kind: Kind, device: Device) -> Tensor {
    match device {
        Device::Cuda(_) => Tensor::zeros(size, (kind, Device::Cpu)).pin_memory(device),
        META if meta::target() == meta::PlanTarget::Cuda => {
            Tensor::zeros(vec![1; size.len()], (kind, Device::Cpu)).expand(size, false)
        }
        device => Tensor::zeros(size, (kind, device)),
    }
}

/// One parameter with its optimizer state. `step` is an fp32 scalar that counts steps; a step increases it.
#[derive(Debug)]
pub struct Slot<'a> {
    /// The parameter, fp32, updated in place.
    pub param: &'a Tensor,
    /// Its gradient.
    pub grad: &'a Tensor,
    /// Its moments, updated in place.
    pub moments: &'a Moments,
    /// Number of steps done.
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
            found_inf: native::raw(self.found_inf),
            signed_map: map(|maps| &maps.signed),
            unsigned_map: map(|maps| &maps.unsigned),
            chunk: self.chunk,
        }
    }
}

/// Does one AdamW step on all `slots`.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] if shapes or dtypes differ.
pub fn step(slots: &[Slot], step: Step) -> Result<()> {
    let raw: Vec<RawSlot> = slots.iter().map(Slot::raw).collect();
    let count = i64::try_from(slots.len()).expect("fewer parameters than 2^63");
    let numbers = step.raw();
    // SAFETY: `count` slots of live tensors; maps are there where codes are, which `AdamW` sees to.
    guard::guard(|| unsafe { native::check(native::prsmed_adamw_step(raw.as_ptr(), count, &raw const numbers)) })
}

/// Multiplies `grads` (at least one) in place by `factor`. Returns the norm over all of them, an fp32 scalar on their
/// device.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] from libtorch.
pub fn norm(grads: &[Tensor], factor: f64) -> Result<Tensor> {
    let mut raw: Vec<RawTensor> = grads.iter().map(native::raw).collect();
    let count = i64::try_from(raw.len()).expect("fewer parameters than 2^63");
    // SAFETY: `count` live tensors.
    made(|out| unsafe { native::prsmed_gradient_norm(raw.as_mut_ptr(), count, factor, out) })
}

/// Clip scale and `found_inf` for gradients of this `norm`: fp32 `[2]` on the norm's device. The scale limits the norm
/// to `clip_norm` (0: no limit). `found_inf` is 1 if the norm is not finite.
///
/// # Errors
/// [`prsmed_base::Error::Torch`] from libtorch.
pub fn clip_scale(norm: &Tensor, clip_norm: f64) -> Result<Tensor> {
    // SAFETY: a live tensor.
    made(|out| unsafe { native::prsmed_clip_scale(native::raw(norm), clip_norm, out) })
}

/// Clips `grads` in place by the result of [`clip_scale`].
///
/// # Errors
/// [`prsmed_base::Error::Torch`] from libtorch.
pub fn scale_gradients(grads: &[Tensor], scale: &Tensor) -> Result<()> {
    let mut raw: Vec<RawTensor> = grads.iter().map(native::raw).collect();
    let count = i64::try_from(raw.len()).expect("fewer parameters than 2^63");
    // SAFETY: `count` live tensors and one more.
    guard::guard(|| unsafe {
        native::check(native::prsmed_clip_gradients(raw.as_mut_ptr(), count, native::raw(scale)))
    })
}

fn made(call: impl FnOnce(*mut RawTensor) -> *mut std::ffi::c_char) -> Result<Tensor> {
    // SAFETY: `call` gives what a `prsmed_*` function returned; on success it has written an owned tensor.
    guard::guard(|| unsafe { native::made(call) })
}

#[cfg(test)]
#[path = "adamw_tests.rs"]
mod tests;
