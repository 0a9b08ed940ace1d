//! Linear layers: dense or with a frozen NF4 weight, with an optional LoRA adapter.
//!
//! LoRA: Hu et al. 2021. Keys and scaling as in the `peft` library (`lora_A.weight [r, in]`, `lora_B.weight [out, r]`,
//! scale alpha / r, A = Kaiming-uniform, B = 0).

use super::{LoraConfig, cast};
use crate::tensor::Tensor;
use crate::tensor::autograd::{gelu_linear, linear_cross_entropy};
use crate::tensor::functions::LowRank;
use crate::tensor::store::{Init, Matrix, VarPath};

pub use crate::tensor::nf4::Quantization;

/// `x -> scale * B(A(dropout(x)))`.
#[derive(Debug)]
pub struct Lora {
    lora_a: Tensor,
    lora_b: Tensor,
    scale: f64,
    dropout: f64,
}

impl Lora {
    /// Creates the adapter of an `[out_dim, in_dim]` weight. `vs` is the path of the adapted layer.
    pub fn new(vs: &VarPath, in_dim: i64, out_dim: i64, config: &LoraConfig) -> Self {
        let (rank, fan_in) = (config.rank as f64, in_dim as f64);
        // kaiming_uniform(a = sqrt 5) has bound sqrt(6 / ((1 + 5) fan_in))
        let bound = 1.0 / fan_in.sqrt();
        Self {
            lora_a: vs.param("lora_A.weight", &[config.rank, in_dim], Init::Uniform { bound }),
            lora_b: vs.param("lora_B.weight", &[out_dim, config.rank], Init::Const(0.0)),
            scale: config.alpha / rank,
            dropout: config.dropout,
        }
    }

    /// The same adapter; its parameters are shared.
    fn shared(&self) -> Self {
        let (lora_a, lora_b) = (self.lora_a.shallow_clone(), self.lora_b.shallow_clone());
        Self { lora_a, lora_b, ..*self }
    }

    fn product(&self, train: bool) -> LowRank<'_> {
        let dropout = if train { self.dropout } else { 0.0 };
        LowRank { a: &self.lora_a, b: &self.lora_b, scale: self.scale, dropout }
    }
}

/// Linear layer: `y = x W^T + b (+ adapter)`.
#[derive(Debug)]
pub struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
    lora: Option<Lora>,
}

impl Linear {
    /// Weight `[out_dim, in_dim]` and bias `[out_dim]`, with PyTorch's default initialisation.
    pub fn new(vs: &VarPath, in_dim: i64, out_dim: i64) -> Self {
        Self::with_init(vs, in_dim, out_dim, Init::FanIn, Some(fan_in_bias(in_dim)))
    }

    /// Like [`Linear::new`], without a bias.
    pub fn no_bias(vs: &VarPath, in_dim: i64, out_dim: i64, init: Init) -> Self {
        Self::with_init(vs, in_dim, out_dim, init, None)
    }

    /// The weight is in NF4 if `vs` is quantized ([`VarPath::quantized`]). A bias starts at 0.
    pub fn packed(vs: &VarPath, in_dim: i64, out_dim: i64, init: Init, has_bias: bool) -> Self {
        let weight = vs.matrix("weight", [out_dim, in_dim], init);
        Self { weight, bias: has_bias.then(|| vs.param("bias", &[out_dim], Init::Const(0.0))), lora: None }
    }

    /// A layer without a bias that shares `weight [out_dim, in_dim]`.
    pub fn sharing(weight: &Tensor) -> Self {
        Self { weight: Matrix::Dense(weight.shallow_clone()), bias: None, lora: None }
    }

    /// The given initialisers; no bias if `bias` is `None`.
    pub fn with_init(vs: &VarPath, in_dim: i64, out_dim: i64, weight: Init, bias: Option<Init>) -> Self {
        Self {
            weight: Matrix::Dense(vs.param("weight", &[out_dim, in_dim], weight)),
            bias: bias.map(|init| vs.param("bias", &[out_dim], init)),
            lora: None,
        }
    }

    /// This layer with `copy(tensor)` in place of each tensor of weight and bias, in a fixed order. The adapter is
    /// shared.
    #[must_use]
    pub fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self {
            weight: self.weight.copied(copy),
            bias: self.bias.as_ref().map(&mut *copy),
            lora: self.lora.as_ref().map(Lora::shared),
        }
    }

    /// Adds an adapter with parameters at `vs`.
    #[must_use]
    pub fn with_lora(mut self, vs: &VarPath, config: &LoraConfig) -> Self {
        let [out_dim, in_dim] = self.weight.shape();
        self.lora = Some(Lora::new(vs, in_dim, out_dim, config));
        self
    }

    /// # Shapes
    /// `xs [..., in]` to `[..., out]`, in the dtype of `xs`.
    pub fn forward(&self, xs: &Tensor, train: bool) -> Tensor {
        let ys = self.product(xs);
        match &self.lora {
            Some(lora) => lora.product(train).add_to(ys, xs),
            None => ys,
        }
    }

    /// The outputs of layers with the same input. Adapters, which all or none have, share their passes over it.
    ///
    /// # Shapes
    /// `xs [..., in]` to `[..., out]` each, in the dtype of `xs`.
    ///
    /// # Panics
    /// If only some layers have an adapter.
    pub fn forward_each<const N: usize>(layers: [&Self; N], xs: &Tensor, train: bool) -> [Tensor; N] {
        let ys = layers.map(|layer| layer.product(xs));
        if layers.iter().all(|layer| layer.lora.is_none()) {
            return ys;
        }
        let adapters = layers.map(|layer| layer.lora.as_ref().expect("all layers have an adapter").product(train));
        LowRank::add_each_to(adapters, ys, xs)
    }

    /// The layer without its adapter.
    fn product(&self, xs: &Tensor) -> Tensor {
        let kind = xs.kind();
        let bias = self.bias.as_ref().map(|b| cast(b, kind));
        let product = |bias: Option<&Tensor>| match &self.weight {
            Matrix::Dense(weight) => xs.linear(&cast(weight, kind), bias),
            Matrix::Nf4(weight) => weight.linear(xs, bias),
        };
        match &bias {
            // with a bias, libtorch's operator returns a view, to which an adapter cannot be added in place
            Some(bias) if self.lora.is_some() => {
                let mut ys = product(None);
                ys += bias;
                ys
            }
            bias => product(bias.as_ref()),
        }
    }

    /// Sum of the cross-entropy of `forward(xs)`, in fp32, for a layer without bias and adapter. It computes `chunk`
    /// rows of logits at a time.
    ///
    /// # Shapes
    /// `xs [n, in]`, `labels [n]` i64 in `0..out`, negative = ignored; a scalar.
    ///
    /// # Panics
    /// If the layer has a bias, an adapter or an NF4 weight.
    pub fn cross_entropy(&self, xs: &Tensor, labels: &Tensor, chunk: i64) -> Tensor {
        assert!(self.bias.is_none() && self.lora.is_none(), "cross_entropy needs a layer without bias and adapter");
        let Matrix::Dense(weight) = &self.weight else { panic!("cross_entropy needs a dense weight") };
        linear_cross_entropy(xs, weight, labels, chunk)
    }

    /// `forward(gelu(xs))` for a layer with a bias and without adapter. It saves only `xs` for the backward pass.
    ///
    /// # Panics
    /// If the layer has no bias, an adapter or an NF4 weight.
    pub fn forward_gelu(&self, xs: &Tensor) -> Tensor {
        assert!(self.lora.is_none(), "forward_gelu needs a layer without adapter");
        let bias = self.bias.as_ref().expect("forward_gelu needs a bias");
        let Matrix::Dense(weight) = &self.weight else { panic!("forward_gelu needs a dense weight") };
        gelu_linear(xs, &cast(weight, xs.kind()), &cast(bias, xs.kind()))
    }
}

/// PyTorch's default bias: uniform with bound 1/sqrt(fan_in).
pub fn fan_in_bias(fan_in: i64) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { bound }
}
