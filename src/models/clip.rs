//! CLIP's vision tower (Radford et al. 2021; `openai/clip-vit-large-patch14-336`), up to the layer that LLaVA uses.
//!
//! Legend: b batch, c channels, t tokens, d width, h heads. The projection, the last layer and `post_layernorm` are
//! left out, because LLaVA does not use them. The text towers (`diffusion::text`) have the same layers.

use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::conv::Conv2dConfig;
use crate::nn::{Conv2d, LayerNorm, Linear, Mask, attention, sine_positions};
use crate::tensor::host_weights::{FrozenLayer, HostWeights};
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Device, Kind, Tensor, dims, module_path, no_grad};

/// Sizes of the vision tower, with the field names of the model's `config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// Width of the tokens.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Number of layers in the checkpoint. All but the last are used.
    pub num_hidden_layers: i64,
    /// Number of attention heads.
    pub num_attention_heads: i64,
    /// Side of the square input, pixels.
    pub image_size: i64,
    /// Side of a patch, pixels.
    pub patch_size: i64,
    /// Epsilon of the layer norms.
    #[serde(default = "default_eps")]
    pub layer_norm_eps: f64,
    /// Activation of the MLP.
    #[serde(default, skip_serializing_if = "ClipActivation::is_quick_gelu")]
    pub hidden_act: ClipActivation,
    /// Scale of random class and position embeddings. (Random positions start as fixed sines.)
    #[serde(default = "default_range")]
    pub initializer_range: f64,
}

fn default_range() -> f64 {
    0.02
}

fn default_eps() -> f64 {
    1e-5
}

impl Config {
    /// `openai/clip-vit-large-patch14-336`.
    pub fn vit_l_14_336() -> Self {
        Self {
            hidden_size: 1024,
            intermediate_size: 4096,
            num_hidden_layers: 24,
            num_attention_heads: 16,
            image_size: 336,
            patch_size: 14,
            layer_norm_eps: 1e-5,
            hidden_act: ClipActivation::QuickGelu,
            initializer_range: default_range(),
        }
    }

    fn layer(&self) -> LayerConfig {
        let Self { hidden_size, intermediate_size, num_attention_heads, layer_norm_eps, hidden_act, .. } = *self;
        LayerConfig { hidden_size, intermediate_size, num_attention_heads, layer_norm_eps, hidden_act }
    }

    /// Number of patch tokens per image.
    pub fn num_patches(&self) -> i64 {
        (self.image_size / self.patch_size).pow(2)
    }
}

/// Activation between the two layers of an MLP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClipActivation {
    /// `x sigmoid(1.702 x)`.
    #[default]
    QuickGelu,
    /// GELU by the error function.
    Gelu,
}

impl ClipActivation {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_quick_gelu(&self) -> bool {
        *self == Self::QuickGelu
    }

    fn apply(self, xs: &Tensor) -> Tensor {
        match self {
            Self::QuickGelu => xs * (xs * 1.702).sigmoid(),
            Self::Gelu => xs.gelu("none"),
        }
    }
}

/// Sizes of one layer of the vision tower or a text tower.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerConfig {
    pub(super) hidden_size: i64,
    pub(super) intermediate_size: i64,
    pub(super) num_attention_heads: i64,
    pub(super) layer_norm_eps: f64,
    pub(super) hidden_act: ClipActivation,
}

#[derive(Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    num_heads: i64,
}

impl Attention {
    fn new(vs: &VarPath, config: LayerConfig) -> Self {
        let d = config.hidden_size;
        let linear = |name: &str| Linear::new(&vs.sub(name), d, d);
        Self {
            q_proj: linear("q_proj"),
            k_proj: linear("k_proj"),
            v_proj: linear("v_proj"),
            out_proj: linear("out_proj"),
            num_heads: config.num_attention_heads,
        }
    }

    fn forward(&self, xs: &Tensor, mask: &Mask) -> Tensor {
        let [q, k, v] =
            [&self.q_proj, &self.k_proj, &self.v_proj].map(|p| split_heads(&p.forward(xs, false), self.num_heads));
        self.out_proj.forward(&merge_heads(&attention(&q, &k, &v, mask, 0.0)), false)
    }
}

#[derive(Debug)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
    activation: ClipActivation,
}

impl Mlp {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let xs = self.activation.apply(&self.fc1.forward(xs, false));
        self.fc2.forward(&xs, false)
    }
}

/// A transformer layer with normalisation before attention and MLP.
#[derive(Debug)]
pub(super) struct ClipLayer {
    layer_norm1: LayerNorm,
    self_attn: Attention,
    layer_norm2: LayerNorm,
    mlp: Mlp,
}

impl ClipLayer {
    pub(super) fn new(vs: &VarPath, config: LayerConfig) -> Self {
        let LayerConfig { hidden_size: dim, intermediate_size: mlp_dim, layer_norm_eps: eps, .. } = config;
        let mlp = vs.sub("mlp");
        let (fc1, fc2) = (Linear::new(&mlp.sub("fc1"), dim, mlp_dim), Linear::new(&mlp.sub("fc2"), mlp_dim, dim));
        Self {
            layer_norm1: LayerNorm::new(&vs.sub("layer_norm1"), dim, eps),
            self_attn: Attention::new(&vs.sub("self_attn"), config),
            layer_norm2: LayerNorm::new(&vs.sub("layer_norm2"), dim, eps),
            mlp: Mlp { fc1, fc2, activation: config.hidden_act },
        }
    }

    /// `xs [b, t, d]` to the same.
    pub(super) fn forward(&self, xs: &Tensor, mask: &Mask) -> Tensor {
        let xs = xs + self.self_attn.forward(&self.layer_norm1.forward(xs), mask);
        &xs + self.mlp.forward(&self.layer_norm2.forward(&xs))
    }
}

impl FrozenLayer for ClipLayer {
    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let Attention { q_proj, k_proj, v_proj, out_proj, num_heads } = &self.self_attn;
        let layer_norm1 = self.layer_norm1.copied(copy);
        let [q_proj, k_proj, v_proj, out_proj] = [q_proj, k_proj, v_proj, out_proj].map(|linear| linear.copied(copy));
        let layer_norm2 = self.layer_norm2.copied(copy);
        let [fc1, fc2] = [&self.mlp.fc1, &self.mlp.fc2].map(|linear| linear.copied(copy));
        Self {
            layer_norm1,
            self_attn: Attention { q_proj, k_proj, v_proj, out_proj, num_heads: *num_heads },
            layer_norm2,
            mlp: Mlp { fc1, fc2, activation: self.mlp.activation },
        }
    }
}

/// Channel means of CLIP's images, for values in 0..=1.
pub const PIXEL_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
/// Channel standard deviations of CLIP's images, for values in 0..=1.
pub const PIXEL_STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];

/// Padding colour of CLIP's square: `floor(255 * mean)` of its channels.
pub const PADDING: [u8; 3] = [122, 116, 104];

/// The channel means and standard deviations as tensors, `[1, 3, 1, 1]` fp32.
pub fn pixel_statistics(device: Device) -> [Tensor; 2] {
    [PIXEL_MEAN, PIXEL_STD].map(|values| Tensor::from_slice(&values).view([1, 3, 1, 1]).to_device(device))
}

/// Normalises pixels for the vision tower.
///
/// # Shapes
/// `pixels [b, 3, s, s]` u8 and the statistics on one device; to `[b, 3, s, s]` fp32.
pub fn normalise(pixels: &Tensor, [mean, std]: &[Tensor; 2]) -> Tensor {
    (pixels.to_kind(Kind::Float) / 255.0 - mean) / std
}

/// The vision tower without its last layer.
#[derive(Debug)]
pub struct ClipVision {
    class_embedding: Tensor,
    patch_embedding: Conv2d,
    position_embedding: Tensor,
    pre_layrnorm: LayerNorm,
    layers: Vec<ClipLayer>,
    /// Frozen weights of all layers, or of none.
    host: HostWeights,
}

impl ClipVision {
    /// `vs` is the path that contains `vision_model`. `on_host`: the weights of the layers stay in host memory.
    pub fn new(vs: &VarPath, config: &Config, on_host: bool) -> Self {
        let model = vs.sub("vision_model");
        let embeddings = model.sub("embeddings");
        let d = config.hidden_size;
        let patches = Conv2dConfig { stride: config.patch_size, ..Conv2dConfig::new(3, d, config.patch_size) };
        let normal = Init::Normal { std: config.initializer_range };
        let layers = model.sub("encoder").sub("layers");
        let position_embedding =
            embeddings.sub("position_embedding").param("weight", &[config.num_patches() + 1, d], normal);
        if vs.initialises() && d % 4 == 0 {
            // with random weights, rows and columns need not be learnt cell by cell
            let side = config.image_size / config.patch_size;
            let places = sine_positions(side, side, d, Device::Cpu) * (2.0_f64.sqrt() * config.initializer_range);
            no_grad(|| position_embedding.narrow(0, 1, config.num_patches()).copy_(&places));
        }
        let class_embedding = embeddings.param("class_embedding", &[d], normal);
        let patch_embedding = Conv2d::no_bias(&embeddings.sub("patch_embedding"), patches);
        // the misspelt key of the checkpoint
        let pre_layrnorm = LayerNorm::new(&model.sub("pre_layrnorm"), d, config.layer_norm_eps);
        let layers = if on_host { layers.on_host() } else { layers };
        let layers: Vec<ClipLayer> =
            (0..config.num_hidden_layers - 1).map(|i| ClipLayer::new(&layers.sub(i), config.layer())).collect();
        let in_host_memory = if on_host { layers.as_slice() } else { &[] };
        let host = HostWeights::of(in_host_memory.iter(), vs.device(), vs.initialises(), 1);
        Self { class_embedding, patch_embedding, position_embedding, pre_layrnorm, layers, host }
    }

    /// Frozen weights in host memory.
    pub fn host_weights(&self) -> &HostWeights {
        &self.host
    }

    /// Patch tokens of the second to last layer.
    ///
    /// # Shapes
    /// `images [b, 3, s, s]`, normalised, in the compute dtype, to `[b, (s / patch)^2, d]`.
    pub fn forward(&self, images: &Tensor) -> Tensor {
        let [b, _c, _h, _w] = dims(images);
        let kind = images.kind();
        let patches = self.patch_embedding.forward(images).flatten(2, 3).transpose(1, 2);
        let d = patches.size()[2];
        let class = self.class_embedding.to_kind(kind).expand([b, 1, d], false);
        let xs = Tensor::cat(&[&class, &patches], 1) + self.position_embedding.to_kind(kind);
        let mut xs = self.pre_layrnorm.forward(&xs);
        for (i, layer) in self.layers.iter().enumerate() {
            let _module = module_path::enter_at("layers", i);
            xs = self.host.with(i, layer, |layer| layer.forward(&xs, &Mask::None));
        }
        xs.narrow(1, 1, xs.size()[1] - 1)
    }
}
