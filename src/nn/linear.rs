//! Linear layers, dense or with a frozen weight in 4 bits, with an optional low-rank adapter.
//!
//! LoRA: Hu et al. 2021; keys and scaling as the `peft` library has them (`lora_A.weight [r, in]`,
//! `lora_B.weight [out, r]`, scale alpha / r, A = Kaiming-uniform, B = 0).

use super::cast;
use crate::tensor::Tensor;
use crate::tensor::autograd::{gelu_linear, linear_cross_entropy};
use crate::tensor::functions::LowRank;
use crate::tensor::store::{Init, Matrix, Scope};

pub use crate::tensor::nf4::Quantization;

/// Low-rank adapters of the language model.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank r; 1 or more (0 in what `prsmed merge` writes: no adapters). Memory of adapters, gradients and optimizer grows with it.
    pub rank: i64,
    /// Scale numerator: the adapter's output is multiplied by alpha / r.
    pub alpha: f64,
    /// Dropout on the adapter's input while training, 0..1.
    pub dropout: f64,
}

/// `x -> scale * B(A(dropout(x)))`.
#[derive(Debug)]
pub struct Lora {
    lora_a: Tensor,
    lora_b: Tensor,
    scale: f64,
    dropout: f64,
}

impl Lora {
    /// Adapter of a `[out_dim, in_dim]` weight; `scope` ends at the adapted layer's name.
    pub fn new(scope: &Scope, in_dim: i64, out_dim: i64, config: &LoraConfig) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "ranks are small")]
        let (rank, fan_in) = (config.rank as f64, in_dim as f64);
        // kaiming_uniform(a = sqrt 5) has bound sqrt(6 / ((1 + 5) fan_in))
        let bound = 1.0 / fan_in.sqrt();
        Self {
            lora_a: scope.param("lora_A.weight", &[config.rank, in_dim], Init::Uniform { bound }),
            lora_b: scope.param("lora_B.weight", &[out_dim, config.rank], Init::Const(0.0)),
            scale: config.alpha / rank,
            dropout: config.dropout,
        }
    }

    /// Adds the adapter's output of `xs` to `ys`, the adapted layer's own output, in its memory.
    fn add_to(&self, ys: Tensor, xs: &Tensor, train: bool) -> Tensor {
        let dropout = if train { self.dropout } else { 0.0 };
        LowRank { a: &self.lora_a, b: &self.lora_b, scale: self.scale, dropout }.add_to(ys, xs)
    }
}

/// `y = x W^T + b (+ adapter)`.
#[derive(Debug)]
pub struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
    lora: Option<Lora>,
}

impl Linear {
    /// Weight `[out_dim, in_dim]` and bias `[out_dim]`, PyTorch's default initialisation.
    pub fn new(scope: &Scope, in_dim: i64, out_dim: i64) -> Self {
        Self::with_init(scope, in_dim, out_dim, Init::FanIn, Some(fan_in_bias(in_dim)))
    }

    /// As [`Linear::new`] without a bias.
    pub fn no_bias(scope: &Scope, in_dim: i64, out_dim: i64, init: Init) -> Self {
        Self::with_init(scope, in_dim, out_dim, init, None)
    }

    /// As [`Linear::no_bias`]; the weight is in 4 bits where the scope says so ([`Scope::quantized`]).
    pub fn packed(scope: &Scope, in_dim: i64, out_dim: i64, init: Init) -> Self {
        Self { weight: scope.matrix("weight", [out_dim, in_dim], init), bias: None, lora: None }
    }

    /// Chosen initialisers; no bias when `bias` is `None`.
    pub fn with_init(scope: &Scope, in_dim: i64, out_dim: i64, weight: Init, bias: Option<Init>) -> Self {
        Self {
            weight: Matrix::Dense(scope.param("weight", &[out_dim, in_dim], weight)),
            bias: bias.map(|init| scope.param("bias", &[out_dim], init)),
            lora: None,
        }
    }

    /// Adds an adapter whose tensors live at `scope`.
    #[must_use]
    pub fn with_lora(mut self, scope: &Scope, config: &LoraConfig) -> Self {
        let [out_dim, in_dim] = self.weight.shape();
        self.lora = Some(Lora::new(scope, in_dim, out_dim, config));
        self
    }

    /// # Shapes
    /// `xs [..., in]` to `[..., out]`, in the dtype of `xs`.
    pub fn forward(&self, xs: &Tensor, train: bool) -> Tensor {
        let ys = self.product(xs);
        match &self.lora {
            Some(lora) => lora.add_to(ys, xs, train),
            None => ys,
        }
    }

    /// The layer without its adapter.
    fn product(&self, xs: &Tensor) -> Tensor {
        let kind = xs.kind();
        let bias = self.bias.as_ref().map(|b| cast(b, kind));
        match &self.weight {
            Matrix::Dense(weight) => xs.linear(&cast(weight, kind), bias.as_ref()),
            Matrix::Nf4(weight) => weight.linear(xs, bias.as_ref()),
        }
    }

    /// Cross-entropy of `forward(xs)` of a layer without bias and adapter, summed, in fp32; `chunk` rows at a time.
    ///
    /// # Shapes
    /// `xs [n, in]`, `labels [n]` i64 in `0..out`, negative = ignored; a scalar.
    ///
    /// # Panics
    /// When the layer has a bias, an adapter or a weight in 4 bits.
    pub fn cross_entropy(&self, xs: &Tensor, labels: &Tensor, chunk: i64) -> Tensor {
        assert!(self.bias.is_none() && self.lora.is_none(), "a plain head");
        let Matrix::Dense(weight) = &self.weight else { panic!("a dense weight") };
        linear_cross_entropy(xs, weight, labels, chunk)
    }

    /// `forward(gelu(xs))` of a layer with a bias and no adapter; only `xs` is kept for the backward pass.
    ///
    /// # Panics
    /// When the layer has no bias, has an adapter or a weight in 4 bits.
    pub fn forward_gelu(&self, xs: &Tensor) -> Tensor {
        assert!(self.lora.is_none(), "an adapter needs the GELU itself");
        let bias = self.bias.as_ref().expect("a layer with a bias");
        let Matrix::Dense(weight) = &self.weight else { panic!("a dense weight") };
        gelu_linear(xs, &cast(weight, xs.kind()), &cast(bias, xs.kind()))
    }
}

/// PyTorch's default bias: uniform with bound 1/sqrt(fan_in).
pub fn fan_in_bias(fan_in: i64) -> Init {
    #[expect(clippy::cast_precision_loss, reason = "layer widths are small")]
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { bound }
}
