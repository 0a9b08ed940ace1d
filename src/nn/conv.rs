//! 2-d convolutions, with and without batch normalisation.

use super::cast;
use crate::tensor::autograd::gelu_conv2d;
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Kind, Tensor, dims, no_grad};

/// Geometry of a square convolution.
#[derive(Debug, Clone, Copy)]
pub struct Conv2dConfig {
    /// Input channels.
    pub in_dim: i64,
    /// Output channels.
    pub out_dim: i64,
    /// Side of the square kernel.
    pub kernel: i64,
    /// Stride.
    pub stride: i64,
    /// Padding on each side, in rows and columns of zeros.
    pub padding: i64,
    /// Channel groups; `in_dim` for a depthwise convolution.
    pub groups: i64,
}

impl Conv2dConfig {
    /// Stride 1, no padding, one group.
    pub fn new(in_dim: i64, out_dim: i64, kernel: i64) -> Self {
        Self { in_dim, out_dim, kernel, stride: 1, padding: 0, groups: 1 }
    }

    fn shape(&self) -> [i64; 4] {
        [self.out_dim, self.in_dim / self.groups, self.kernel, self.kernel]
    }
}

/// 2-d convolution.
#[derive(Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
}

impl Conv2d {
    /// PyTorch's default initialisation, with a bias.
    pub fn new(vs: &VarPath, config: Conv2dConfig) -> Self {
        let bias = super::linear::fan_in_bias(config.in_dim / config.groups * config.kernel * config.kernel);
        Self::with_init(vs, config, Init::FanIn, Some(bias))
    }

    /// PyTorch's default initialisation, without a bias.
    pub fn no_bias(vs: &VarPath, config: Conv2dConfig) -> Self {
        Self::with_init(vs, config, Init::FanIn, None)
    }

    /// The given initialisers; no bias if `bias` is `None`.
    pub fn with_init(vs: &VarPath, config: Conv2dConfig, weight: Init, bias: Option<Init>) -> Self {
        Self {
            weight: vs.param("weight", &config.shape(), weight),
            bias: bias.map(|init| vs.param("bias", &[config.out_dim], init)),
            config,
        }
    }

    /// # Shapes
    /// `xs [b, in, h, w]` to `[b, out, h', w']`.
    pub fn forward(&self, xs: &Tensor) -> Tensor {
        let [_b, _c, _h, _w] = dims(xs);
        let Conv2dConfig { stride, padding, groups, .. } = self.config;
        let kind = xs.kind();
        let bias = self.bias.as_ref().map(|b| cast(b, kind));
        xs.conv2d(&cast(&self.weight, kind), bias.as_ref(), [stride; 2], [padding; 2], [1, 1], groups)
    }
}

/// Source of batch normalisation's mean and variance.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum BatchStatistics {
    /// Running statistics, which stay unchanged.
    #[default]
    Running,
    /// Statistics of the batch. They also update the running statistics.
    Batch {
        /// Weight of the batch in that update, 0..1 (PyTorch's `momentum`, default 0.1).
        momentum: f64,
    },
}

impl BatchStatistics {
    /// Those of the batch, which change the running ones a little.
    pub const TRAIN: Self = Self::Batch { momentum: 0.1 };
    /// Those of the batch, which replace the running ones.
    pub const MEASURE: Self = Self::Batch { momentum: 1.0 };
}

const EPSILON: f64 = 1e-5;

/// Convolution without bias, followed by batch normalisation (TinyViT's `Conv2d_BN` with children `c` and `bn`).
#[derive(Debug)]
pub struct Conv2dBn {
    conv: Conv2d,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
}

impl Conv2dBn {
    /// `bn_weight` is the initial scale (0 at the end of residual branches).
    pub fn new(vs: &VarPath, config: Conv2dConfig, bn_weight: f64) -> Self {
        let bn = vs.sub("bn");
        let dim = [config.out_dim];
        Self {
            conv: Conv2d::no_bias(&vs.sub("c"), config),
            weight: bn.param("weight", &dim, Init::Const(bn_weight)),
            bias: bn.param("bias", &dim, Init::Const(0.0)),
            running_mean: bn.buffer("running_mean", &dim, 0.0, Kind::Float),
            running_var: bn.buffer("running_var", &dim, 1.0, Kind::Float),
            num_batches_tracked: bn.buffer("num_batches_tracked", &[], 0.0, Kind::Int64),
        }
    }

    /// # Shapes
    /// `xs [b, in, h, w]` to `[b, out, h', w']`.
    pub fn forward(&self, xs: &Tensor, statistics: BatchStatistics) -> Tensor {
        match statistics {
            BatchStatistics::Running => {
                let (weight, bias) = self.folded(xs.kind());
                let Conv2dConfig { stride, padding, groups, .. } = self.conv.config;
                xs.conv2d(&weight, Some(&bias), [stride; 2], [padding; 2], [1, 1], groups)
            }
            BatchStatistics::Batch { momentum } => self.normalised(&self.conv.forward(xs), momentum),
        }
    }

    /// `forward(gelu(xs))`. With running statistics it saves only `xs` for the backward pass.
    ///
    /// # Shapes
    /// Like [`Conv2dBn::forward`].
    pub fn forward_gelu(&self, xs: &Tensor, statistics: BatchStatistics) -> Tensor {
        match statistics {
            BatchStatistics::Running => {
                let (weight, bias) = self.folded(xs.kind());
                let Conv2dConfig { stride, padding, groups, .. } = self.conv.config;
                gelu_conv2d(xs, &weight, &bias, stride, padding, groups)
            }
            BatchStatistics::Batch { .. } => self.forward(&xs.gelu("none"), statistics),
        }
    }

    /// Weight and bias of the convolution combined with the normalisation by running statistics. It saves one tensor
    /// less for the backward pass. Gradients reach the norm's scale and bias through these small tensors.
    fn folded(&self, kind: Kind) -> (Tensor, Tensor) {
        let scale = &self.weight * (&self.running_var + EPSILON).rsqrt();
        let bias = &self.bias - &self.running_mean * &scale;
        let weight = cast(&self.conv.weight, Kind::Float) * scale.view([-1, 1, 1, 1]);
        (cast(&weight, kind), cast(&bias, kind))
    }

    fn normalised(&self, ys: &Tensor, momentum: f64) -> Tensor {
        no_grad(|| {
            let _ = self.num_batches_tracked.shallow_clone().g_add_scalar_(1);
        });
        let (weight, bias) = (Some(&self.weight), Some(&self.bias));
        ys.batch_norm(weight, bias, Some(&self.running_mean), Some(&self.running_var), true, momentum, EPSILON, true)
    }
}
