//! Mistral decoder (Jiang et al. 2023; transformers' `MistralForCausalLM`), with LoRA on q, k, v and o.
//!
//! Legend: b batch, t tokens, s keys, d width, h heads, g key-value heads. There is no sliding window: LLaVA-Med v1.5
//! sets it to null. Frozen weights have Hugging Face keys (`model.layers.0...`), adapters have PEFT keys
//! (`base_model.model.model.layers.0...`).

use crate::Result;
use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::rope::Rope;
use crate::nn::{Embedding, Linear, LoraConfig, Mask, RmsNorm, attention};
use crate::tensor::autograd::checkpoint;
use crate::tensor::collective::Peers;
use crate::tensor::functions::{Segments, packed_bias, swiglu};
use crate::tensor::host_weights::{FrozenLayer, HostWeights};
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Kind, Shared, Tensor, dims, meta, module_path, no_grad};

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
}

fn default_range() -> f64 {
    0.02
}

impl Config {
    /// `microsoft/llava-med-v1.5-mistral-7b`.
    pub fn mistral_7b() -> Self {
        Self {
            hidden_size: 4096,
            intermediate_size: 14336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            vocab_size: 32000,
            rope_theta: 1e6,
            rms_norm_eps: 1e-5,
            initializer_range: 0.02,
        }
    }

    /// Width of one head.
    pub fn head_dim(&self) -> i64 {
        self.hidden_size / self.num_attention_heads
    }
}

/// Key-value cache of generation: `[b, g, capacity, head_dim]` for each layer.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    len: i64,
    capacity: i64,
}

impl KvCache {
    /// An empty cache for up to `capacity` tokens.
    pub fn new(config: &Config, capacity: i64) -> Self {
        Self { layers: (0..config.num_hidden_layers).map(|_| None).collect(), len: 0, capacity }
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

/// Maximum number of logits in memory at a time: 16 MiB in fp32, 131 tokens with a vocabulary of 32000.
const HEAD_ELEMENTS: i64 = 1 << 22;

#[derive(Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    num_heads: i64,
    num_kv_heads: i64,
}

impl Attention {
    fn new(vs: &VarPath, lora: Option<(&VarPath, &LoraConfig)>, config: &Config) -> Self {
        let d = config.hidden_size;
        let kv = config.num_key_value_heads * config.head_dim();
        let init = Init::Normal { std: config.initializer_range };
        let linear = |name: &str, in_dim: i64, out_dim: i64| {
            let base = Linear::packed(&vs.sub(name), in_dim, out_dim, init);
            match lora {
                Some((lora_path, lora_config)) => base.with_lora(&lora_path.sub(name), lora_config),
                None => base,
            }
        };
        Self {
            q_proj: linear("q_proj", d, d),
            k_proj: linear("k_proj", d, kv),
            v_proj: linear("v_proj", d, kv),
            o_proj: linear("o_proj", d, d),
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
        }
    }

    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let [q_proj, k_proj, v_proj, o_proj] =
            [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj].map(|linear| linear.copied(copy));
        Self { q_proj, k_proj, v_proj, o_proj, ..*self }
    }

    fn forward(&self, xs: &Tensor, state: &PassState, cache: Option<(usize, &mut KvCache)>) -> Tensor {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q, k, v] = Linear::forward_each(projections, xs, state.train);
        let [q, k] = [q, k].map(|xs| state.rope.rotate(xs));
        if let OwnedMask::Segments(segments) = &state.mask {
            let [_b, _t, width] = dims(&q);
            return self.o_proj.forward(&segments.attend(&q, &k, &v, width / self.num_heads), state.train);
        }
        let q = split_heads(&q, self.num_heads);
        let [k, v] = [k, v].map(|xs| split_heads(&xs, self.num_kv_heads));
        let (k, v) = match cache {
            Some((layer, cache)) => cache.extend(layer, &k, &v),
            None => (k, v),
        };
        self.o_proj.forward(&merge_heads(&attention(&q, &k, &v, &state.mask(), 0.0)), state.train)
    }
}

#[derive(Debug)]
struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn new(vs: &VarPath, config: &Config) -> Self {
        let (d, wide) = (config.hidden_size, config.intermediate_size);
        let init = Init::Normal { std: config.initializer_range };
        let linear = |name: &str, i: i64, o: i64| Linear::packed(&vs.sub(name), i, o, init);
        Self {
            gate_proj: linear("gate_proj", d, wide),
            up_proj: linear("up_proj", d, wide),
            down_proj: linear("down_proj", wide, d),
        }
    }

    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let [gate_proj, up_proj, down_proj] =
            [&self.gate_proj, &self.up_proj, &self.down_proj].map(|linear| linear.copied(copy));
        Self { gate_proj, up_proj, down_proj }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let gated = swiglu(self.gate_proj.forward(xs, false), &self.up_proj.forward(xs, false));
        self.down_proj.forward(&gated, false)
    }
}

#[derive(Debug)]
struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl FrozenLayer for Layer {
    fn copied(&self, copy: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        Self {
            input_layernorm: self.input_layernorm.copied(copy),
            self_attn: self.self_attn.copied(copy),
            post_attention_layernorm: self.post_attention_layernorm.copied(copy),
            mlp: self.mlp.copied(copy),
        }
    }
}

impl Layer {
    fn forward(&self, xs: &Tensor, state: &PassState, cache: Option<(usize, &mut KvCache)>) -> Tensor {
        // the output of a projection is not needed again, so sums and rotations are computed in place
        let attended = {
            let _module = module_path::enter("self_attn");
            let mut attended = self.self_attn.forward(&self.input_layernorm.forward(xs), state, cache);
            attended += xs;
            attended
        };
        let _module = module_path::enter("mlp");
        let mut xs = self.mlp.forward(&self.post_attention_layernorm.forward(&attended));
        xs += attended;
        xs
    }
}

/// Values that all layers of a pass share.
#[derive(Debug)]
struct PassState {
    rope: Rope,
    mask: OwnedMask,
    train: bool,
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

impl PassState {
    fn mask(&self) -> Mask<'_> {
        match &self.mask {
            OwnedMask::None | OwnedMask::Segments(_) => Mask::None,
            OwnedMask::Causal => Mask::Causal,
            OwnedMask::Keep(keep) => Mask::Keep(keep),
            OwnedMask::Bias(bias) => Mask::Bias(bias),
        }
    }
}

/// Attention mask and position ids of a forward pass.
#[derive(Debug, Clone, Copy)]
pub enum AttentionPattern<'a> {
    /// The position of a token is its index; it attends to itself and all earlier tokens. Padding on the right needs no
    /// mask, because no real token attends to it.
    Causal,
    /// Causal, and no token attends to padding: `[b, t]` bool, true = a real token.
    Padded(&'a Tensor),
    /// Several texts with a common prefix, packed into one sequence.
    Packed {
        /// Position of each token, `[b, t]` i64.
        positions: &'a Tensor,
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
}

/// Settings of a training or evaluation pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pass {
    /// Use dropout.
    pub train: bool,
    /// Number of first layers with activation checkpointing: they save only their inputs and are recomputed.
    pub checkpoint: usize,
}

/// The decoder with its token embedding and language model head.
#[derive(Debug)]
pub struct Mistral {
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

impl Mistral {
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
            Shared::new(Layer {
                input_layernorm: RmsNorm::new(&vs.sub("input_layernorm"), d, config.rms_norm_eps),
                self_attn: Attention::new(&vs.sub("self_attn"), adapter.as_ref().map(|(s, c)| (s, *c)), config),
                post_attention_layernorm: RmsNorm::new(&vs.sub("post_attention_layernorm"), d, config.rms_norm_eps),
                mlp: Mlp::new(&vs.sub("mlp"), config),
            })
        };
        let init = Init::Normal { std: config.initializer_range };
        let embed_tokens = Embedding::new(&model.sub("embed_tokens"), config.vocab_size, d, config.initializer_range);
        let layers: Vec<Shared<Layer>> = (0..config.num_hidden_layers).map(layer).collect();
        let moved = layers.iter().take(on_host).map(|layer| &**layer);
        let host = HostWeights::of(moved, vs.device(), vs.initialises(), ranks);
        Self {
            embed_tokens,
            layers,
            host: Shared::new(host),
            norm: RmsNorm::new(&model.sub("norm"), d, config.rms_norm_eps),
            lm_head: Linear::no_bias(&vs.sub("lm_head"), d, config.vocab_size, init),
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
        self.embed_tokens.forward(ids)
    }

    /// Hidden states after the final norm. The position of a token is its index.
    ///
    /// # Shapes
    /// `embeds [b, t, d]`; `keep [b, t]` bool, true = a real token (`None`: padding on the right may be unmasked,
    /// because no real token attends to it); to `[b, t, d]`.
    pub fn forward(&self, embeds: &Tensor, keep: Option<&Tensor>, pass: Pass) -> Tensor {
        self.forward_with(embeds, keep.map_or(AttentionPattern::Causal, AttentionPattern::Padded), pass)
    }

    /// Hidden states after the final norm.
    ///
    /// # Shapes
    /// `embeds [b, t, d]` to the same.
    pub fn forward_with(&self, embeds: &Tensor, pattern: AttentionPattern, pass: Pass) -> Tensor {
        let [_b, t, _d] = dims(embeds);
        let _module = module_path::enter("llm");
        let (head_dim, theta, kind) = (self.config.head_dim(), self.config.rope_theta, embeds.kind());
        let rope = match pattern {
            AttentionPattern::Packed { positions, .. } => Rope::at(head_dim, theta, positions, kind),
            AttentionPattern::Causal | AttentionPattern::Padded(_) => self.rope(0, t, embeds),
        };
        let state = Shared::new(PassState {
            rope,
            mask: pattern.mask(embeds, &self.config, self.packed_attention),
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

    fn rope(&self, start: i64, t: i64, embeds: &Tensor) -> Rope {
        let place = (embeds.kind(), embeds.device());
        Rope::new(self.config.head_dim(), self.config.rope_theta, start, t, place)
    }

    /// Hidden states of the next tokens, which are added to `cache`. No gradient.
    ///
    /// # Shapes
    /// `embeds [b, t, d]` to `[b, t, d]`; if the cache is not empty, `t` must be 1.
    pub fn forward_cached(&self, embeds: &Tensor, cache: &mut KvCache) -> Tensor {
        let [_b, t, _d] = dims(embeds);
        let _module = module_path::enter("llm");
        assert!(t == 1 || cache.is_empty(), "a prompt needs an empty cache; later tokens are added one at a time");
        no_grad(|| {
            let rope = self.rope(cache.len(), t, embeds);
            let state = PassState { rope, mask: if t > 1 { OwnedMask::Causal } else { OwnedMask::None }, train: false };
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
