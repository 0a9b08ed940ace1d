//! Decoder of a language model, with LoRA on q, k, v and o: Mistral (Jiang et al. 2023; transformers'
//! `MistralForCausalLM`), and the families that differ from it by a [`Variant`].
//!
//! Legend: b batch, t tokens, s keys, d width, h heads, g key-value heads. Frozen weights have Hugging Face keys
//! (`model.layers.0...`), adapters have PEFT keys (`base_model.model.model.layers.0...`).

use crate::models::limits::{
    MAX_COUNT, MAX_INNER_WIDTH, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, check_multiple, check_ranges,
};
use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::norm::RmsFactor;
use crate::nn::rope::{Angles, Rope, Scaling, Sections};
use crate::nn::{Embedding, Linear, LoraConfig, Mask, RmsNorm, attention};
use crate::tensor::autograd::checkpoint;
use crate::tensor::collective::Peers;
use crate::tensor::functions::{Segments, packed_bias, swiglu};
use crate::tensor::host_weights::{FrozenLayer, HostWeights};
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Kind, Shared, Tensor, dims, meta, module_path, no_grad};
use crate::{Error, Result};

/// Sizes of the decoder, with the field names of the model's `config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// Width d.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Number of layers.
    pub num_hidden_layers: i64,
    /// Number of query heads h.
    pub num_attention_heads: i64,
    /// Number of key-value heads g; divides h.
    pub num_key_value_heads: i64,
    /// Number of tokens in the vocabulary.
    pub vocab_size: i64,
    /// Base of the rotary embedding's angles.
    pub rope_theta: f64,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Standard deviation of random initial weights.
    #[serde(default = "default_range")]
    pub initializer_range: f64,
    /// Differences from Mistral.
    #[serde(default, skip_serializing_if = "Variant::is_mistral")]
    pub variant: Variant,
}

/// Differences of a family from Mistral.
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Variant {
    /// Width of a head, if it is not `hidden_size / num_attention_heads` (Qwen3, Gemma 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<i64>,
    /// q, k and v have biases (Qwen2).
    pub qkv_bias: bool,
    /// Each head of q and k is normalised before its rotation (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Factor of the norms.
    pub norm: RmsFactor,
    /// The outputs of attention and MLP are normalised before they are added (Gemma 3).
    pub branch_norms: bool,
    /// Activation of the MLP's gate.
    pub activation: GateActivation,
    /// Longer wavelengths of the rotary embedding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<Scaling>,
    /// Positions have three axes (Qwen-VL).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_sections: Option<Sections>,
    /// Most layers attend to near tokens only (Gemma 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<Local>,
    /// The embedding of the tokens is the head too (Qwen2.5 3B, Qwen3 up to 4B, Gemma 3).
    pub tied_head: bool,
    /// Embedded tokens are multiplied by `sqrt(hidden_size)`, rounded to their dtype (Gemma 3).
    pub scaled_embedding: bool,
}

/// Layers that attend to near tokens only.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Local {
    /// A token attends to itself and to so many minus one tokens before it.
    pub window: i64,
    /// Each layer of this number, counted from 1, and its multiples attends to all tokens.
    pub period: usize,
    /// Base of the rotary embedding's angles in these layers, which has no scaling.
    pub rope_theta: f64,
}

/// Activation of the gate of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateActivation {
    /// `x sigmoid(x)`.
    #[default]
    Silu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
}

impl Variant {
    fn is_mistral(&self) -> bool {
        *self == Self::default()
    }
}

fn default_range() -> f64 {
    0.02
}

impl Config {
    /// Width of one head.
    pub fn head_dim(&self) -> i64 {
        self.variant.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Width of all query heads.
    pub fn query_width(&self) -> i64 {
        self.variant.head_dim.map_or(self.hidden_size, |width| width.saturating_mul(self.num_attention_heads))
    }

    /// Checks that the sizes are possible and fit together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the setting.
    pub fn check(&self) -> Result<()> {
        check_ranges(&[
            ("model.sizes.llm.hidden_size", self.hidden_size, MAX_WIDTH),
            ("model.sizes.llm.intermediate_size", self.intermediate_size, MAX_INNER_WIDTH),
            ("model.sizes.llm.num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("model.sizes.llm.num_attention_heads", self.num_attention_heads, MAX_COUNT),
            ("model.sizes.llm.num_key_value_heads", self.num_key_value_heads, MAX_COUNT),
            ("model.sizes.llm.vocab_size", self.vocab_size, MAX_VOCABULARY),
        ])?;
        check_multiple("model.sizes.llm", "width and heads", self.query_width(), self.num_attention_heads)?;
        let (heads, groups) = (self.num_attention_heads, self.num_key_value_heads);
        check_multiple("model.sizes.llm", "query and key-value heads", heads, groups)?;
        self.check_variant().map_err(|(field, reason)| {
            Error::config(format!("model.sizes.llm.variant.{field}"), reason, "use the value of the model")
        })
    }

    /// Differences from Mistral that contradict each other or the sizes: the field of [`Variant`], and the reason.
    fn check_variant(&self) -> std::result::Result<(), (&'static str, String)> {
        let Variant { head_dim, rope_sections, local, .. } = &self.variant;
        if let Some(width) = head_dim.filter(|width| !(2..=MAX_HEAD_DIM).contains(width) || width % 2 != 0) {
            return Err(("head_dim", format!("must be even and from 2 to {MAX_HEAD_DIM}, got {width}")));
        }
        if let Some(Sections { sizes, interleaved }) = rope_sections {
            let [first, second, third] = *sizes;
            let is_possible = [first, second, third].iter().all(|size| (0..=MAX_HEAD_DIM).contains(size))
                && first + second + third == self.head_dim() / 2
                && (!interleaved || 3 * second.max(third) <= self.head_dim() / 2);
            if !is_possible {
                let half = self.head_dim() / 2;
                return Err(("rope_sections", format!("{sizes:?} do not divide the {half} frequencies of a head")));
            }
        }
        match local {
            Some(Local { window, period, .. }) if *window < 1 || *period < 1 => {
                Err(("local", format!("the window {window} and the period {period} must be at least 1")))
            }
            _ => Ok(()),
        }
    }

    /// Angles of the layers that attend to all tokens, or of the local ones.
    fn angles(&self, local: Option<Local>) -> Angles {
        let (head_dim, sections) = (self.head_dim(), self.variant.rope_sections);
        match local {
            None => Angles { head_dim, theta: self.rope_theta, scaling: self.variant.rope_scaling, sections },
            Some(local) => Angles { head_dim, theta: local.rope_theta, scaling: None, sections },
        }
    }

    fn is_local(&self, layer: usize) -> bool {
        self.variant.local.is_some_and(|local| !(layer + 1).is_multiple_of(local.period))
    }

    fn norm(&self, vs: &VarPath, name: &str, dim: i64) -> RmsNorm {
        RmsNorm::new(&vs.sub(name), dim, self.rms_norm_eps, self.variant.norm)
    }
}

/// Key-value cache of generation: `[b, g, capacity, head_dim]` for each layer.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    len: i64,
    capacity: i64,
    /// Position of the next token beyond `len`: an image may have fewer positions than tokens.
    shift: i64,
}

impl KvCache {
    /// An empty cache for up to `capacity` tokens.
    pub fn new(config: &Config, capacity: i64) -> Self {
        Self { layers: (0..config.num_hidden_layers).map(|_| None).collect(), len: 0, capacity, shift: 0 }
    }

    /// Sets the position of the tokens after a prompt: their index plus `shift`.
    #[must_use]
    pub fn with_shift(self, shift: i64) -> Self {
        Self { shift, ..self }
    }

    /// Forgets all tokens from index `len` on.
    pub fn truncate(&mut self, len: i64) {
        self.len = self.len.min(len);
    }

    /// Number of tokens in the cache.
    pub fn len(&self) -> i64 {
        self.len
    }

    /// True if the cache has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn extend(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> (Tensor, Tensor) {
        let [b, g, t, d] = dims(k);
        let (len, capacity) = (self.len, self.capacity);
        let (keys, values) = self.layers[layer].get_or_insert_with(|| {
            let empty = || Tensor::empty([b, g, capacity, d], (k.kind(), k.device()));
            (empty(), empty())
        });
        keys.narrow(2, len, t).copy_(k);
        values.narrow(2, len, t).copy_(v);
        (keys.narrow(2, 0, len + t), values.narrow(2, 0, len + t))
    }
}

/// Largest width of a head.
const MAX_HEAD_DIM: i64 = 1 << 12;

/// Maximum number of logits in memory at a time: 16 MiB in fp32, 131 tokens with a vocabulary of 32000.
const HEAD_ELEMENTS: i64 = 1 << 22;

#[derive(Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// Norms of the heads of q and k.
    head_norms: Option<[RmsNorm; 2]>,
    num_heads: i64,
    num_kv_heads: i64,
    head_dim: i64,
}

impl Attention {
    fn new(vs: &VarPath, lora: Option<(&VarPath, &LoraConfig)>, config: &Config) -> Self {
        let (d, q, head_dim) = (config.hidden_size, config.query_width(), config.head_dim());
        let kv = config.num_key_value_heads * head_dim;
        let init = Init::Normal { std: config.initializer_range };
        let linear = |name: &str, in_dim: i64, out_dim: i64| {
            let has_bias = config.variant.qkv_bias && name != "o_proj";
            let base = Linear::packed(&vs.sub(name), in_dim, out_dim, init, has_bias);
            match lora {
                Some((lora_path, lora_config)) => base.with_lora(&lora_path.sub(name), lora_config),
                None => base,
            }
        };
        Self {
            q_proj: linear("q_proj", d, q),
            k_proj: linear("k_proj", d, kv),
            v_proj: linear("v_proj", d, kv),
            o_proj: linear("o_proj", q, d),
            head_norms: config
                .variant
                .qk_norm
                .then(|| ["q_norm", "k_norm"].map(|name| config.norm(vs, name, head_dim))),
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim,
        }
    }

    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let [q_proj, k_proj, v_proj, o_proj] =
            [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj].map(|linear| linear.copied(copy));
        let head_norms = self.head_norms.as_ref().map(|norms| norms.each_ref().map(|norm| norm.copied(copy)));
        Self { q_proj, k_proj, v_proj, o_proj, head_norms, ..*self }
    }

    /// `xs [b, t, h head_dim]` with each head normalised.
    fn normalised(&self, norm: &RmsNorm, xs: &Tensor) -> Tensor {
        let [b, t, width] = dims(xs);
        norm.forward(&xs.view([b, t, width / self.head_dim, self.head_dim])).view([b, t, width])
    }

    fn forward(
        &self,
        xs: &Tensor,
        (inputs, train): (&AttentionInputs, bool),
        cache: Option<(usize, &mut KvCache)>,
    ) -> Tensor {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q, k, v] = Linear::forward_each(projections, xs, train);
        let [q, k] = match &self.head_norms {
            None => [q, k],
            Some([of_q, of_k]) => [self.normalised(of_q, &q), self.normalised(of_k, &k)],
        };
        let [q, k] = [q, k].map(|xs| inputs.rope.rotate(xs));
        if let OwnedMask::Segments(segments) = &inputs.mask {
            return self.o_proj.forward(&segments.attend(&q, &k, &v, self.head_dim), train);
        }
        let q = split_heads(&q, self.num_heads);
        let [k, v] = [k, v].map(|xs| split_heads(&xs, self.num_kv_heads));
        let (k, v) = match cache {
            Some((layer, cache)) => cache.extend(layer, &k, &v),
            None => (k, v),
        };
        self.o_proj.forward(&merge_heads(&attention(&q, &k, &v, &inputs.mask(), 0.0)), train)
    }
}

#[derive(Debug)]
struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: GateActivation,
}

impl Mlp {
    fn new(vs: &VarPath, config: &Config) -> Self {
        let (d, wide) = (config.hidden_size, config.intermediate_size);
        let init = Init::Normal { std: config.initializer_range };
        let linear = |name: &str, i: i64, o: i64| Linear::packed(&vs.sub(name), i, o, init, false);
        Self {
            gate_proj: linear("gate_proj", d, wide),
            up_proj: linear("up_proj", d, wide),
            down_proj: linear("down_proj", wide, d),
            activation: config.variant.activation,
        }
    }

    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let [gate_proj, up_proj, down_proj] =
            [&self.gate_proj, &self.up_proj, &self.down_proj].map(|linear| linear.copied(copy));
        Self { gate_proj, up_proj, down_proj, ..*self }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let gate = self.gate_proj.forward(xs, false);
        // the other factor is freed before the last projection
        let gated = match self.activation {
            GateActivation::Silu => swiglu(gate, &self.up_proj.forward(xs, false)),
            GateActivation::GeluTanh => gate.gelu("tanh") * self.up_proj.forward(xs, false),
        };
        self.down_proj.forward(&gated, false)
    }
}

#[derive(Debug)]
struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    /// Norm of the MLP's input.
    mlp_norm: RmsNorm,
    mlp: Mlp,
    /// Norms of the outputs of attention and MLP.
    branch_norms: Option<[RmsNorm; 2]>,
    is_local: bool,
}

impl FrozenLayer for Layer {
    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self {
            input_layernorm: self.input_layernorm.copied(copy),
            self_attn: self.self_attn.copied(copy),
            mlp_norm: self.mlp_norm.copied(copy),
            mlp: self.mlp.copied(copy),
            branch_norms: self.branch_norms.as_ref().map(|norms| norms.each_ref().map(|norm| norm.copied(copy))),
            is_local: self.is_local,
        }
    }
}

impl Layer {
    fn new(vs: &VarPath, lora: Option<(&VarPath, &LoraConfig)>, config: &Config, number: usize) -> Self {
        let d = config.hidden_size;
        // Gemma's name of Mistral's norm before the MLP, and Gemma's two norms of branches
        let (of_mlp, of_branches) = if config.variant.branch_norms {
            ("pre_feedforward_layernorm", Some(["post_attention_layernorm", "post_feedforward_layernorm"]))
        } else {
            ("post_attention_layernorm", None)
        };
        Self {
            input_layernorm: config.norm(vs, "input_layernorm", d),
            self_attn: Attention::new(&vs.sub("self_attn"), lora, config),
            mlp_norm: config.norm(vs, of_mlp, d),
            mlp: Mlp::new(&vs.sub("mlp"), config),
            branch_norms: of_branches.map(|names| names.map(|name| config.norm(vs, name, d))),
            is_local: config.is_local(number),
        }
    }

    fn forward(&self, xs: &Tensor, state: &PassState, cache: Option<(usize, &mut KvCache)>) -> Tensor {
        let inputs = state.local.as_ref().filter(|_| self.is_local).unwrap_or(&state.global);
        let normalised = |branch: usize, ys: Tensor| match &self.branch_norms {
            None => ys,
            Some(norms) => norms[branch].forward(&ys),
        };
        // the output of a projection is not needed again, so sums and rotations are computed in place
        let attended = {
            let _module = module_path::enter("self_attn");
            let attended = self.self_attn.forward(&self.input_layernorm.forward(xs), (inputs, state.train), cache);
            let mut attended = normalised(0, attended);
            attended += xs;
            attended
        };
        let _module = module_path::enter("mlp");
        let mut xs = normalised(1, self.mlp.forward(&self.mlp_norm.forward(&attended)));
        xs += attended;
        xs
    }
}

/// Values that all layers of a pass share.
#[derive(Debug)]
struct PassState {
    /// Of layers that attend to all tokens.
    global: AttentionInputs,
    /// Of local layers.
    local: Option<AttentionInputs>,
    train: bool,
}

/// Attention mask of a pass, and the rotations of the tokens' positions.
#[derive(Debug)]
struct AttentionInputs {
    rope: Rope,
    mask: OwnedMask,
}

/// An owned [`Mask`], or segments in place of a mask.
#[derive(Debug)]
enum OwnedMask {
    None,
    Causal,
    Keep(Tensor),
    Bias(Tensor),
    Segments(Segments),
}

impl AttentionInputs {
    fn mask(&self) -> Mask<'_> {
        match &self.mask {
            OwnedMask::None | OwnedMask::Segments(_) => Mask::None,
            OwnedMask::Causal => Mask::Causal,
            OwnedMask::Keep(keep) => Mask::Keep(keep),
            OwnedMask::Bias(bias) => Mask::Bias(bias),
        }
    }
}

/// Attention mask of a forward pass.
#[derive(Debug, Clone, Copy)]
pub enum AttentionPattern<'a> {
    /// A token attends to itself and all earlier tokens. Padding on the right needs no mask, because no real token attends
    /// to it.
    Causal,
    /// Causal, and no token attends to padding: `[b, t]` bool, true = a real token.
    Padded(&'a Tensor),
    /// Several texts with a common prefix, packed into one sequence.
    Packed {
        /// Block of each token, `[b, t]` i64. A token attends to earlier tokens of block 0 (the prefix) and its own
        /// block.
        blocks: &'a Tensor,
        /// The same without a mask.
        segments: &'a Segments,
    },
}

/// Attention of several questions that share the tokens of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PackedAttention {
    /// [`Self::Flash`] on GPUs that support it, else [`Self::Mask`].
    #[default]
    Auto,
    /// One call of the flash kernel for all questions, without a mask. On the CPU one question after another.
    Flash,
    /// One call with a mask that hides the other questions.
    Mask,
}

impl AttentionPattern<'_> {
    /// The attention mask for `embeds [b, t, d]`.
    ///
    /// A packed sequence needs a bias for one attention call: the CPU's fused kernel and CUDA's memory-efficient kernel
    /// support it. CUDA's flash kernel supports no bias, but sequences of several lengths, and it computes no scores of
    /// hidden pairs.
    fn mask(self, embeds: &Tensor, config: &Config, packed: PackedAttention) -> OwnedMask {
        let [_b, t, _d] = dims(embeds);
        match self {
            Self::Causal => OwnedMask::Causal,
            Self::Padded(keep) => {
                let causal = Tensor::ones([t, t], (Kind::Bool, embeds.device())).tril(0);
                OwnedMask::Keep(keep.unsqueeze(1).unsqueeze(1).logical_and(&causal))
            }
            Self::Packed { blocks, segments, .. } => {
                let (heads, groups) = (config.num_attention_heads, config.num_key_value_heads);
                let flash = match packed {
                    PackedAttention::Auto => Segments::supported(embeds, heads, groups),
                    PackedAttention::Flash => !meta::runs_as_cuda(embeds) || Segments::supported(embeds, heads, groups),
                    PackedAttention::Mask => false,
                };
                if flash {
                    OwnedMask::Segments(segments.shallow_clone())
                } else {
                    OwnedMask::Bias(packed_bias(blocks, embeds.kind()))
                }
            }
        }
    }

    /// The attention mask of local layers for `embeds [b, t, d]` whose tokens have these positions, their indices if
    /// `None`.
    fn local_mask(self, embeds: &Tensor, positions: Option<&Tensor>, window: i64) -> OwnedMask {
        let [_b, t, _d] = dims(embeds);
        let index = || Tensor::arange(t, (Kind::Int64, embeds.device())).unsqueeze(0);
        // of three axes, the first one counts tokens of texts
        let positions = match positions {
            Some(positions) if positions.dim() == 3 => positions.get(0),
            Some(positions) => positions.shallow_clone(),
            None => index(),
        };
        let far = (positions.unsqueeze(2) - positions.unsqueeze(1)).ge(window).unsqueeze(1);
        match self {
            Self::Packed { blocks, .. } => {
                let mut bias = packed_bias(blocks, embeds.kind());
                OwnedMask::Bias(bias.masked_fill_(&far, f64::NEG_INFINITY))
            }
            Self::Causal | Self::Padded(_) => {
                let near = far.logical_not().tril(0);
                let real = if let Self::Padded(keep) = self { Some(keep.unsqueeze(1).unsqueeze(1)) } else { None };
                OwnedMask::Keep(real.map_or_else(|| near.shallow_clone(), |real| near.logical_and(&real)))
            }
        }
    }
}

/// Settings of a training or evaluation pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecoderPass {
    /// Use dropout.
    pub train: bool,
    /// Number of first layers with activation checkpointing: they save only their inputs and are recomputed.
    pub checkpoint: usize,
}

/// The decoder with its token embedding and language model head.
#[derive(Debug)]
pub struct Decoder {
    embed_tokens: Embedding,
    /// Those that [`Self::host`] contains have their tensors there.
    layers: Vec<Shared<Layer>>,
    /// Frozen weights of the first layers, which are copied to the device for each use.
    host: Shared<HostWeights>,
    norm: RmsNorm,
    lm_head: Linear,
    config: Config,
    packed_attention: PackedAttention,
}

impl Decoder {
    /// `vs` is the path that contains `model` and `lm_head`; if it is quantized, the matrices of the layers are in NF4.
    /// `lora` has the root path of the adapters and their settings. The frozen weights of the first `on_host` layers
    /// stay in host memory; with more than one rank those of all layers do, until [`Self::divide`].
    pub fn new(
        vs: &VarPath,
        lora: Option<(&VarPath, &LoraConfig)>,
        config: &Config,
        on_host: usize,
        ranks: usize,
    ) -> Self {
        let on_host = if ranks > 1 { usize::MAX } else { on_host };
        let model = vs.sub("model");
        let d = config.hidden_size;
        let adapters = lora.map(|(s, c)| (s.sub("base_model").sub("model").sub("model").sub("layers"), c));
        let layer = |i: i64| {
            let number = usize::try_from(i).expect("a layer");
            let _module = module_path::enter_at("layers", number);
            let vs = model.sub("layers").sub(i);
            let vs = if number < on_host { vs.on_host() } else { vs };
            let adapter = adapters.as_ref().map(|(s, c)| (s.sub(i).sub("self_attn"), *c));
            Shared::new(Layer::new(&vs, adapter.as_ref().map(|(s, c)| (s, *c)), config, number))
        };
        let init = Init::Normal { std: config.initializer_range };
        let embed_tokens = Embedding::new(&model.sub("embed_tokens"), config.vocab_size, d, config.initializer_range);
        let layers: Vec<Shared<Layer>> = (0..config.num_hidden_layers).map(layer).collect();
        let moved = layers.iter().take(on_host).map(|layer| &**layer);
        let host = HostWeights::of(moved, vs.device(), vs.initialises(), ranks);
        let norm = config.norm(&model, "norm", d);
        let lm_head = if config.variant.tied_head {
            Linear::sharing(embed_tokens.weight())
        } else {
            Linear::no_bias(&vs.sub("lm_head"), d, config.vocab_size, init)
        };
        Self {
            embed_tokens,
            layers,
            host: Shared::new(host),
            norm,
            lm_head,
            config: config.clone(),
            packed_attention: PackedAttention::Auto,
        }
    }

    /// Divides the frozen weights of all layers among `peers`; see [`HostWeights::divided`].
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if another rank does not answer.
    pub fn divide(&mut self, peers: &Peers, on_host: usize, keeps_whole: bool) -> Result<()> {
        self.host = Shared::new(self.host.divided(peers, on_host, keeps_whole)?);
        Ok(())
    }

    /// Sets the attention of packed questions.
    #[must_use]
    pub fn with_packed_attention(self, packed_attention: PackedAttention) -> Self {
        Self { packed_attention, ..self }
    }

    /// Frozen weights in host memory, or divided among ranks.
    pub fn host_weights(&self) -> &HostWeights {
        &self.host
    }

    /// Sizes of the decoder.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// # Shapes
    /// `ids [b, t]` (i64) to `[b, t, d]`.
    pub fn embed(&self, ids: &Tensor) -> Tensor {
        let embeds = self.embed_tokens.forward(ids);
        if !self.config.variant.scaled_embedding {
            return embeds;
        }
        let factor = (self.config.hidden_size as f64).sqrt();
        &embeds * Tensor::full([1], factor, (embeds.kind(), embeds.device()))
    }

    /// Hidden states after the final norm. The position of a token is its index.
    ///
    /// # Shapes
    /// `embeds [b, t, d]`; `keep [b, t]` bool, true = a real token (`None`: padding on the right may be unmasked,
    /// because no real token attends to it); to `[b, t, d]`.
    pub fn forward(&self, embeds: &Tensor, keep: Option<&Tensor>, pass: DecoderPass) -> Tensor {
        self.forward_with(embeds, keep.map_or(AttentionPattern::Causal, AttentionPattern::Padded), None, pass)
    }

    /// Hidden states after the final norm.
    ///
    /// # Shapes
    /// `embeds [b, t, d]`, `positions [b, t]` i64, or `[3, b, t]` with the axes time, height and width (`None`: the position
    /// of a token is its index); to `[b, t, d]`.
    pub fn forward_with(
        &self,
        embeds: &Tensor,
        pattern: AttentionPattern,
        positions: Option<&Tensor>,
        pass: DecoderPass,
    ) -> Tensor {
        let _module = module_path::enter("llm");
        let state = Shared::new(PassState {
            global: AttentionInputs {
                rope: self.rope(None, positions, 0, embeds),
                mask: pattern.mask(embeds, &self.config, self.packed_attention),
            },
            local: self.config.variant.local.map(|local| AttentionInputs {
                rope: self.rope(Some(local), positions, 0, embeds),
                mask: pattern.local_mask(embeds, positions, local.window),
            }),
            train: pass.train,
        });
        let mut xs = embeds.shallow_clone();
        for (i, layer) in self.layers.iter().enumerate() {
            let _module = module_path::enter_at("layers", i);
            // the backward pass copies the weights of a layer in host memory again
            xs = if i < pass.checkpoint || (pass.train && i < self.host.len()) {
                let (layer, state, host) = (layer.clone(), state.clone(), self.host.clone());
                checkpoint(&[&xs], move |inputs| host.with(i, &*layer, |layer| layer.forward(&inputs[0], &state, None)))
            } else {
                self.host.with(i, &**layer, |layer| layer.forward(&xs, &state, None))
            };
        }
        self.norm.forward(&xs)
    }

    /// Rotations of `embeds [b, t, d]` at `positions`, or at the positions from `start` on.
    fn rope(&self, local: Option<Local>, positions: Option<&Tensor>, start: i64, embeds: &Tensor) -> Rope {
        let ([_b, t, _d], angles) = (dims(embeds), self.config.angles(local));
        match positions {
            Some(positions) => Rope::at(&angles, positions, embeds.kind()),
            None => Rope::new(&angles, start, t, (embeds.kind(), embeds.device())),
        }
    }

    /// Hidden states of the next tokens, which are added to `cache`. No gradient.
    ///
    /// # Shapes
    /// `embeds [b, t, d]` to `[b, t, d]`; if the cache is not empty, `t` must be 1. `positions` of a prompt as
    /// [`Self::forward_with`] takes them.
    pub fn forward_cached(&self, embeds: &Tensor, positions: Option<&Tensor>, cache: &mut KvCache) -> Tensor {
        let [_b, t, _d] = dims(embeds);
        let _module = module_path::enter("llm");
        assert!(t == 1 || cache.is_empty(), "a prompt needs an empty cache; later tokens are added one at a time");
        no_grad(|| {
            let start = if cache.is_empty() { 0 } else { cache.len + cache.shift };
            let rope = |local| self.rope(local, positions, start, embeds);
            let mask = if t > 1 { OwnedMask::Causal } else { OwnedMask::None };
            let local = self.config.variant.local.map(|local| AttentionInputs {
                rope: rope(Some(local)),
                mask: if t > 1 {
                    AttentionPattern::Causal.local_mask(embeds, positions, local.window)
                } else {
                    // of all keys, the last ones
                    let keys = Tensor::arange(cache.len + 1, (Kind::Int64, embeds.device()));
                    OwnedMask::Keep(keys.gt(cache.len - local.window).view([1, 1, 1, -1]))
                },
            });
            let state = PassState { global: AttentionInputs { rope: rope(None), mask }, local, train: false };
            let mut xs = embeds.shallow_clone();
            for (i, layer) in self.layers.iter().enumerate() {
                let _module = module_path::enter_at("layers", i);
                xs = self.host.with(i, &**layer, |layer| layer.forward(&xs, &state, Some((i, &mut *cache))));
            }
            cache.len += t;
            self.norm.forward(&xs)
        })
    }

    /// Sum of the cross-entropy of the labels, in fp32. It computes a chunk of logits at a time.
    ///
    /// # Shapes
    /// `states [n, d]` after the final norm, `labels [n]` i64, negative = ignored; a scalar.
    pub fn cross_entropy(&self, states: &Tensor, labels: &Tensor) -> Tensor {
        let _llm = module_path::enter("llm");
        let _head = module_path::enter("lm_head");
        self.lm_head.cross_entropy(states, labels, self.head_chunk())
    }

    /// As [`Self::cross_entropy`], without a gradient for the head.
    pub fn cross_entropy_of_frozen_head(&self, states: &Tensor, labels: &Tensor) -> Tensor {
        let _llm = module_path::enter("llm");
        let _head = module_path::enter("lm_head");
        self.lm_head.copied(&mut Tensor::detach).cross_entropy(states, labels, self.head_chunk())
    }

    /// Number of states whose most likely token is their label, an f64 scalar. It computes a chunk of logits at a time.
    ///
    /// # Shapes
    /// Like [`Self::cross_entropy`].
    pub fn count_correct(&self, states: &Tensor, labels: &Tensor) -> Tensor {
        let mut right = Tensor::zeros([], (Kind::Double, states.device()));
        let chunk = self.head_chunk();
        for (states, labels) in states.split(chunk, 0).iter().zip(labels.split(chunk, 0)) {
            right += self.logits(states).argmax(-1, false).eq_tensor(&labels).sum(Kind::Double);
        }
        right
    }

    /// Number of states per chunk of logits.
    fn head_chunk(&self) -> i64 {
        (HEAD_ELEMENTS / self.config.vocab_size).max(1)
    }

    /// # Shapes
    /// `states [..., d]` after the final norm to `[..., vocab]`.
    pub fn logits(&self, states: &Tensor) -> Tensor {
        let _llm = module_path::enter("llm");
        let _head = module_path::enter("lm_head");
        self.lm_head.forward(states, false)
    }
}

#[cfg(test)]
#[path = "decoder_tests.rs"]
mod tests;
