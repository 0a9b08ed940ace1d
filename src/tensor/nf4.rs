//! NF4: frozen matrices in 4-bit `NormalFloat` (Dettmers et al. 2023, QLoRA), in the format of `bitsandbytes`.
//!
//! A block of 64 weights in row order shares one scale, its largest magnitude. A weight is the nearest of 16 published
//! values, times the scale. Scales are fp32, or 8-bit codes in blocks of 256 around their mean (double quantization).
//!
//! | tensor | key below `X.weight` | content |
//! |---|---|---|
//! | codes | | u8 `[n / 2, 1]`, the first code in the high half |
//! | scales | `.absmax` | fp32 `[n / 64]`, or their u8 codes |
//! | code values | `.quant_map` | fp32 `[16]`, on the CPU |
//! | scales of the scales | `.nested_absmax` | fp32 `[n / 64 / 256]` |
//! | values of the scale codes | `.nested_quant_map` | fp32 `[256]` |
//! | sizes, offset of the scales | `.quant_state.bitsandbytes__nf4` | JSON as u8, on the CPU |
//!
//! Deviations: the JSON is padded with spaces to a fixed length, so that the file size depends only on the sizes of the
//! model. Scale codes are the nearest ones, as in the package's CUDA and portable kernels (its CPU kernel differs by
//! one code in about 2 of 1000).

use super::native::{self, RawNf4, result};
use super::{Device, Kind, META, Tensor, ledger, no_grad};
use std::sync::atomic::{AtomicU64, Ordering};

/// Storage format of the frozen weights of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantization {
    /// Not quantized.
    #[default]
    None,
    /// 4-bit `NormalFloat`, one fp32 scale per block of 64 weights: 4.5 bits per weight.
    Nf4,
    /// NF4 with double quantization, 8-bit scales in blocks of 256: 4.127 bits per weight.
    Nf4Double,
}

impl Quantization {
    /// The name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Nf4 => "nf4",
            Self::Nf4Double => "nf4-double",
        }
    }
}

/// Weights per block.
pub const BLOCK: i64 = 64;
/// Scales per block of scales.
pub const NESTED_BLOCK: i64 = 256;
/// Length of the JSON tensor, spaces included.
const STATE_BYTES: usize = 256;

/// Key of the JSON tensor below the weight's key.
pub const STATE: &str = ".quant_state.bitsandbytes__nf4";

/// A frozen matrix in NF4.
#[derive(Debug)]
pub struct Nf4 {
    shape: [i64; 2],
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested: Option<Nested>,
    state: Tensor,
    /// Mean of the scales, which is subtracted before they are quantized; the bits of an f64.
    offset: AtomicU64,
}

#[derive(Debug)]
struct Nested {
    absmax: Tensor,
    quant_map: Tensor,
}

/// Content of the JSON tensor.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Nf4State {
    quant_type: String,
    blocksize: i64,
    dtype: String,
    /// `[rows, columns]` of the matrix.
    pub shape: Vec<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_blocksize: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nested_offset: Option<f64>,
}

impl Nf4State {
    /// Parses the JSON tensor.
    ///
    /// # Errors
    /// A description of what is wrong with it.
    pub fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let state: Self = serde_json::from_slice(bytes).map_err(|error| format!("is not valid JSON: {error}"))?;
        let nested = [state.nested_blocksize.is_some(), state.nested_offset.is_some()];
        if state.quant_type != "nf4" || state.blocksize != BLOCK {
            return Err(format!("has format `{}` in blocks of {}", state.quant_type, state.blocksize));
        }
        if state.shape.len() != 2 || state.shape.iter().any(|&dim| !(1..1 << 31).contains(&dim)) {
            return Err(format!("has shape {:?}", state.shape));
        }
        if nested[0] != nested[1] || state.nested_blocksize.is_some_and(|size| size != NESTED_BLOCK) {
            return Err(format!("has blocks of {:?} scales", state.nested_blocksize));
        }
        Ok(state)
    }

    /// Storage format, with or without double quantization.
    pub fn scheme(&self) -> Quantization {
        if self.nested_offset.is_some() { Quantization::Nf4Double } else { Quantization::Nf4 }
    }
}

impl Nf4 {
    /// An uninitialized `shape` matrix on `device`. `is_double`: with 8-bit scales.
    pub fn empty(shape: [i64; 2], is_double: bool, device: Device) -> Self {
        Self::new(shape, is_double, &|shape, kind| Tensor::empty(shape, (kind, device)))
    }

    /// As [`Self::empty`], with tensors from `empty`.
    pub(super) fn new(shape: [i64; 2], is_double: bool, empty: &dyn Fn(&[i64], Kind) -> Tensor) -> Self {
        let _category = ledger::enter(ledger::Category::Frozen);
        let blocks = (shape[0] * shape[1] + BLOCK - 1) / BLOCK;
        let codes = empty(&[(shape[0] * shape[1] + 1) / 2, 1], Kind::Uint8);
        let absmax = empty(&[blocks], if is_double { Kind::Uint8 } else { Kind::Float });
        let nested = is_double.then(|| Nested {
            absmax: empty(&[(blocks + NESTED_BLOCK - 1) / NESTED_BLOCK], Kind::Float),
            quant_map: empty(&[256], Kind::Float),
        });
        let quant_map = Tensor::empty([16], (Kind::Float, Device::Cpu));
        let state = Tensor::empty([i64::try_from(STATE_BYTES).expect("a short text")], (Kind::Uint8, Device::Cpu));
        Self { shape, packed: codes, absmax, quant_map, nested, state, offset: AtomicU64::new(0.0_f64.to_bits()) }
    }

    /// This matrix with `copy(tensor)` in place of each tensor on the device, in a fixed order.
    #[must_use]
    pub fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let (packed, absmax) = (copy(&self.packed), copy(&self.absmax));
        let nested = self.nested.as_ref();
        Self {
            shape: self.shape,
            packed,
            absmax,
            nested: nested.map(|nested| Nested { absmax: copy(&nested.absmax), quant_map: copy(&nested.quant_map) }),
            quant_map: self.quant_map.shallow_clone(),
            state: self.state.shallow_clone(),
            offset: AtomicU64::new(self.offset.load(Ordering::Relaxed)),
        }
    }

    /// Offset of the scales, part of the matrix but of none of its tensors.
    pub fn offset(&self) -> f64 {
        f64::from_bits(self.offset.load(Ordering::Relaxed))
    }

    /// Sets the offset of the scales; see [`Self::offset`].
    pub fn set_offset(&self, offset: f64) {
        self.offset.store(offset.to_bits(), Ordering::Relaxed);
    }

    /// Rows and columns.
    pub fn shape(&self) -> [i64; 2] {
        self.shape
    }

    /// Storage format, with or without double quantization.
    pub fn scheme(&self) -> Quantization {
        if self.nested.is_some() { Quantization::Nf4Double } else { Quantization::Nf4 }
    }

    /// The tensors of the matrix, with their keys below the weight's key.
    pub fn pieces(&self) -> Vec<(&'static str, &Tensor)> {
        let mut pieces = vec![("", &self.packed), (".absmax", &self.absmax), (".quant_map", &self.quant_map)];
        if let Some(nested) = &self.nested {
            pieces.extend([(".nested_absmax", &nested.absmax), (".nested_quant_map", &nested.quant_map)]);
        }
        pieces.push((STATE, &self.state));
        pieces
    }

    /// Quantizes a dense matrix into this one. It computes on the CPU, so that all devices have the same codes.
    ///
    /// # Shapes
    /// `dense` has this matrix's shape, in bf16, fp16 or fp32, on any device.
    ///
    /// # Panics
    /// If the shape differs.
    pub fn quantize(&self, dense: &Tensor) {
        assert_eq!(dense.size(), self.shape, "shape mismatch: a matrix to quantize");
        let device = self.packed.device();
        if device == META || (device == Device::Cpu && dense.device() == Device::Cpu) {
            self.quantize_on_device(dense);
            return;
        }
        let host = Self::empty(self.shape, self.nested.is_some(), Device::Cpu);
        host.quantize_on_device(&dense.to_device(Device::Cpu));
        no_grad(|| {
            for ((_, to), (_, from)) in self.pieces().into_iter().zip(host.pieces()) {
                to.shallow_clone().copy_(from);
            }
        });
        self.set_offset(host.offset());
    }

    fn quantize_on_device(&self, dense: &Tensor) {
        let into = self.raw();
        // SAFETY: the tensors live as long as `self`, have the sizes that the callee fills, and are on `dense`'s
        // device.
        let quantize = |out| unsafe { native::prsmed_nf4_quantize(native::raw(dense), &raw const into, out) };
        // SAFETY: as above.
        let offset = unsafe { native::written(0.0, quantize) }.unwrap_or_else(|error| native::raise(error));
        self.set_offset(offset);
        let state = Nf4State {
            quant_type: "nf4".into(),
            blocksize: BLOCK,
            dtype: dtype_name(dense.kind()).into(),
            shape: self.shape.to_vec(),
            nested_blocksize: self.nested.as_ref().map(|_| NESTED_BLOCK),
            nested_dtype: self.nested.as_ref().map(|_| "float32".into()),
            nested_offset: self.nested.as_ref().map(|_| offset),
        };
        assert!(self.write_state(&state) <= STATE_BYTES, "the state of a matrix is too long");
        write(&self.quant_map, &code_values());
    }

    /// Writes the text of `state`, cut or filled with blanks; its own length.
    fn write_state(&self, state: &Nf4State) -> usize {
        let mut text = serde_json::to_vec(state).expect("plain values serialise");
        let length = text.len();
        text.resize(STATE_BYTES, b' ');
        write(&self.state, &text);
        length
    }

    /// Takes the values of a file's JSON tensor, after the other tensors are loaded.
    ///
    /// # Errors
    /// A description of what does not match.
    pub fn load_state(&self, state: &Nf4State) -> std::result::Result<(), String> {
        if state.shape != self.shape || state.scheme() != self.scheme() {
            return Err(format!("is `{}` of {:?}", state.scheme().name(), state.shape));
        }
        let stored = Vec::<f32>::try_from(&self.quant_map).unwrap_or_default();
        if stored.len() != 16 || stored.iter().zip(code_values()).any(|(a, b)| (a - b).abs() > 1e-6) {
            return Err("has code values that differ from NF4's".into());
        }
        self.set_offset(state.nested_offset.unwrap_or(0.0));
        self.write_state(state);
        Ok(())
    }

    /// The dense matrix in `kind` (bf16, fp16 or fp32). On a GPU a custom CUDA kernel computes it, if one is available.
    pub fn dequantize(&self, kind: Kind) -> Tensor {
        self.dequantize_by(kind, false)
    }

    /// As [`Self::dequantize`]. `composed`: with libtorch's operators only, as on GPUs without the kernel.
    pub fn dequantize_by(&self, kind: Kind, composed: bool) -> Tensor {
        let (weight, kind) = (self.raw(), native::scalar_type(kind));
        // SAFETY: the tensors live as long as `self`; one owned tensor is written on success.
        result(|out| unsafe { native::prsmed_nf4_dequantize(&raw const weight, kind, composed, out) })
    }

    /// `xs W^T (+ bias)`. The backward pass dequantizes again, so neither the dense matrix nor `xs` is saved. W gets no
    /// gradient.
    ///
    /// # Shapes
    /// `xs [.., columns]` to `[.., rows]` in the dtype of `xs`; `bias [rows]` in the same.
    ///
    /// # Panics
    /// Like libtorch's operators.
    pub fn linear(&self, xs: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let weight = self.raw();
        let bias = bias.map_or(std::ptr::null_mut(), native::raw);
        // SAFETY: as above; autograd holds its own handles of the tensors.
        result(|out| unsafe { native::prsmed_nf4_linear(native::raw(xs), &raw const weight, bias, out) })
    }

    fn raw(&self) -> RawNf4 {
        let null = std::ptr::null_mut();
        RawNf4 {
            packed: native::raw(&self.packed),
            absmax: native::raw(&self.absmax),
            nested_absmax: self.nested.as_ref().map_or(null, |nested| native::raw(&nested.absmax)),
            nested_map: self.nested.as_ref().map_or(null, |nested| native::raw(&nested.quant_map)),
            offset: self.offset(),
            rows: self.shape[0],
            cols: self.shape[1],
        }
    }

    /// Allocates what quantization of a loaded matrix needs besides the result, for plans of CPU runs.
    pub fn dry_run_quantization(&self, stored: Kind) {
        let device = self.packed.device();
        let dense = {
            let _category = ledger::enter(ledger::Category::Workspace);
            Tensor::empty(self.shape, (stored, device))
        };
        self.quantize(&dense);
    }
}

fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        _ => "float32",
    }
}

/// The value of each code.
fn code_values() -> [f32; 16] {
    let mut values = [0_f32; 16];
    // SAFETY: the callee writes 16 numbers.
    unsafe { native::prsmed_nf4_values(values.as_mut_ptr()) };
    values
}

/// Writes numbers into a CPU tensor of the same number of bytes.
fn write<T: Copy>(tensor: &Tensor, values: &[T]) {
    assert_eq!(tensor.device(), Device::Cpu, "the tensor must be on the CPU");
    assert_eq!(tensor.numel() * tensor.kind().elt_size_in_bytes(), size_of_val(values), "the tensor's size");
    // SAFETY: the tensor is contiguous (made by `empty`), on the CPU and has that many bytes.
    unsafe {
        let to = tensor.data_ptr().cast::<u8>();
        std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values));
    }
}
