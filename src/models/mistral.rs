//! Mistral decoder (Jiang et al. 2023; transformers' `MistralForCausalLM`), with LoRA on q, k, v, o.
//!
//! Legend: b batch, t tokens, s keys, d width, h heads, g key-value heads. No sliding window: LLaVA-Med v1.5 sets it to
//! null. Frozen weights use HF keys (`model.layers.0...`), adapters PEFT keys (`base_model.model.model.layers.0...`).

use crate::nn::attention::{merge_heads, split_heads};
use crate::nn::rope::Rope;
use crate::nn::{Embedding, Linear, LoraConfig, Mask, RmsNorm, attention};
use crate::tensor::autograd::checkpoint;
use crate::tensor::functions::{packed_bias, swiglu};
use crate::tensor::store::{Init, Scope};
use crate::tensor::{Device, Kind, Tensor, dims, no_grad, scope};
use std::rc::Rc;

/// Sizes of the decoder, with the names of the hub's `config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// Width d.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Layers.
    pub num_hidden_layers: i64,
    /// Query heads h.
    pub num_attention_heads: i64,
    /// Key-value heads g; divides h.
    pub num_key_value_heads: i64,
    /// Pieces of the vocabulary.
    pub vocab_size: i64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Standard deviation of random weights.
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

/// Keys and values of the tokens seen so far, `[b, g, capacity, head_dim]` for each layer.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    len: i64,
    capacity: i64,
}

impl KvCache {
    /// Room for `capacity` tokens.
    pub fn new(config: &Config, capacity: i64) -> Self {
        Self { layers: (0..config.num_hidden_layers).map(|_| None).collect(), len: 0, capacity }
    }

    /// Tokens held.
    pub fn len(&self) -> i64 {
        self.len
    }

    /// Whether no token is held.
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

/// Most logits of the head that live at once: 16 MiB in fp32, 131 tokens of a vocabulary of 32000.
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
    fn new(scope: &Scope, lora: Option<(&Scope, &LoraConfig)>, config: &Config) -> Self {
        let d = config.hidden_size;
        let kv = config.num_key_value_heads * config.head_dim();
        let init = Init::Normal { std: config.initializer_range };
        let linear = |name: &str, in_dim: i64, out_dim: i64| {
            let base = Linear::packed(&scope.sub(name), in_dim, out_dim, init);
            match lora {
                Some((lora_scope, lora_config)) => base.with_lora(&lora_scope.sub(name), lora_config),
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

    fn forward(&self, xs: &Tensor, run: &Run, cache: Option<(usize, &mut KvCache)>) -> Tensor {
        let q = split_heads(&run.rope.rotate(self.q_proj.forward(xs, run.train)), self.num_heads);
        let k = split_heads(&run.rope.rotate(self.k_proj.forward(xs, run.train)), self.num_kv_heads);
        let v = split_heads(&self.v_proj.forward(xs, run.train), self.num_kv_heads);
        let (k, v) = match cache {
            Some((layer, cache)) => cache.extend(layer, &k, &v),
            None => (k, v),
        };
        self.o_proj.forward(&merge_heads(&attention(&q, &k, &v, &run.mask(), 0.0)), run.train)
    }
}

#[derive(Debug)]
struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn new(scope: &Scope, config: &Config) -> Self {
        let (d, wide) = (config.hidden_size, config.intermediate_size);
        let init = Init::Normal { std: config.initializer_range };
        let linear = |name: &str, i: i64, o: i64| Linear::packed(&scope.sub(name), i, o, init);
        Self {
            gate_proj: linear("gate_proj", d, wide),
            up_proj: linear("up_proj", d, wide),
            down_proj: linear("down_proj", wide, d),
        }
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

impl Layer {
    fn forward(&self, xs: &Tensor, run: &Run, cache: Option<(usize, &mut KvCache)>) -> Tensor {
        // nothing needs the output of a projection itself: sums and rotations are made in its memory
        let attended = {
            let _scope = scope::enter("self_attn");
            let mut attended = self.self_attn.forward(&self.input_layernorm.forward(xs), run, cache);
            attended += xs;
            attended
        };
        let _scope = scope::enter("mlp");
        let mut xs = self.mlp.forward(&self.post_attention_layernorm.forward(&attended));
        xs += attended;
        xs
    }
}

/// What all layers of one pass share.
#[derive(Debug)]
struct Run {
    rope: Rope,
    mask: OwnMask,
    train: bool,
}

/// As [`Mask`].
#[derive(Debug)]
enum OwnMask {
    None,
    Causal,
    Keep(Tensor),
    Bias(Tensor),
}

impl Run {
    fn mask(&self) -> Mask<'_> {
        match &self.mask {
            OwnMask::None => Mask::None,
            OwnMask::Causal => Mask::Causal,
            OwnMask::Keep(keep) => Mask::Keep(keep),
            OwnMask::Bias(bias) => Mask::Bias(bias),
        }
    }
}

/// What the tokens of a pass see, and where they stand.
#[derive(Debug, Clone, Copy)]
pub enum Sight<'a> {
    /// A token stands at its index and sees itself and all before it. Right-padding needs no mask then: no real token
    /// sees it.
    Causal,
    /// The same, and nothing sees padding: `[b, t]` bool, true = a real token.
    Padded(&'a Tensor),
    /// Several texts with a common prefix in one sequence.
    Packed {
        /// Where each token stands, `[b, t]` i64.
        positions: &'a Tensor,
        /// A token sees, of those before it, the ones of block 0 (the prefix) and of its own block; `[b, t]` i64.
        blocks: &'a Tensor,
    },
}

impl Sight<'_> {
    /// The mask of attention among `t` tokens for queries of `kind`.
    ///
    /// A packed sequence has one bias for one attention call, as the CPU's fused kernel and CUDA's memory-efficient one
    /// take it. (Flash attention on CUDA takes none; without one, questions would need keys of their own, a copy of the
    /// prefix's for each. Attention is about 3% of the language model's arithmetic at these lengths.)
    fn mask(self, t: i64, kind: Kind, device: Device) -> OwnMask {
        match self {
            Self::Causal => OwnMask::Causal,
            Self::Padded(keep) => {
                let causal = Tensor::ones([t, t], (Kind::Bool, device)).tril(0);
                OwnMask::Keep(keep.unsqueeze(1).unsqueeze(1).logical_and(&causal))
            }
            Self::Packed { blocks, .. } => OwnMask::Bias(packed_bias(blocks, kind)),
        }
    }
}

/// How a training or evaluation pass runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pass {
    /// Dropout on.
    pub train: bool,
    /// Keep only the inputs of this many first layers and run them again in the backward pass.
    pub checkpoint: usize,
}

/// The decoder with its embedding and head.
#[derive(Debug)]
pub struct Mistral {
    embed_tokens: Embedding,
    layers: Vec<Rc<Layer>>,
    norm: RmsNorm,
    lm_head: Linear,
    config: Config,
}

impl Mistral {
    /// `scope` ends where `model` and `lm_head` begin; where it is quantized, the matrices of the layers are. Adapters are made at the root of `lora.0`.
    pub fn new(scope: &Scope, lora: Option<(&Scope, &LoraConfig)>, config: &Config) -> Self {
        let model = scope.sub("model");
        let d = config.hidden_size;
        let adapters = lora.map(|(s, c)| (s.sub("base_model").sub("model").sub("model").sub("layers"), c));
        let layer = |i: i64| {
            let _scope = scope::enter_at("layers", usize::try_from(i).expect("a layer"));
            let scope = model.sub("layers").sub(i);
            let adapter = adapters.as_ref().map(|(s, c)| (s.sub(i).sub("self_attn"), *c));
            Rc::new(Layer {
                input_layernorm: RmsNorm::new(&scope.sub("input_layernorm"), d, config.rms_norm_eps),
                self_attn: Attention::new(&scope.sub("self_attn"), adapter.as_ref().map(|(s, c)| (s, *c)), config),
                post_attention_layernorm: RmsNorm::new(&scope.sub("post_attention_layernorm"), d, config.rms_norm_eps),
                mlp: Mlp::new(&scope.sub("mlp"), config),
            })
        };
        let init = Init::Normal { std: config.initializer_range };
        Self {
            embed_tokens: Embedding::new(&model.sub("embed_tokens"), config.vocab_size, d, config.initializer_range),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            norm: RmsNorm::new(&model.sub("norm"), d, config.rms_norm_eps),
            lm_head: Linear::no_bias(&scope.sub("lm_head"), d, config.vocab_size, init),
            config: config.clone(),
        }
    }

    /// Sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// # Shapes
    /// `ids [b, t]` (i64) to `[b, t, d]`.
    pub fn embed(&self, ids: &Tensor) -> Tensor {
        self.embed_tokens.forward(ids)
    }

    /// States after the final norm, every token at its index.
    ///
    /// # Shapes
    /// `embeds [b, t, d]`; `keep [b, t]` bool, true = a real token (`None`: right-padding may be left unmasked, since
    /// causal attention hides it from every real token); result `[b, t, d]`.
    pub fn forward(&self, embeds: &Tensor, keep: Option<&Tensor>, pass: Pass) -> Tensor {
        self.forward_seen(embeds, keep.map_or(Sight::Causal, Sight::Padded), pass)
    }

    /// States after the final norm.
    ///
    /// # Shapes
    /// `embeds [b, t, d]` to the same.
    pub fn forward_seen(&self, embeds: &Tensor, sight: Sight, pass: Pass) -> Tensor {
        let [_b, t, _d] = dims(embeds);
        let _scope = scope::enter("llm");
        let device = embeds.device();
        let (head_dim, theta, kind) = (self.config.head_dim(), self.config.rope_theta, embeds.kind());
        let rope = match sight {
            Sight::Packed { positions, .. } => Rope::at(head_dim, theta, positions, kind),
            Sight::Causal | Sight::Padded(_) => self.rope(0, t, embeds),
        };
        let run = Rc::new(Run { rope, mask: sight.mask(t, kind, device), train: pass.train });
        let mut xs = embeds.shallow_clone();
        for (i, layer) in self.layers.iter().enumerate() {
            let _scope = scope::enter_at("layers", i);
            xs = if i < pass.checkpoint {
                let (layer, run) = (Rc::clone(layer), Rc::clone(&run));
                checkpoint(&[&xs], move |inputs| layer.forward(&inputs[0], &run, None))
            } else {
                layer.forward(&xs, &run, None)
            };
        }
        self.norm.forward(&xs)
    }

    fn rope(&self, start: i64, t: i64, embeds: &Tensor) -> Rope {
        let place = (embeds.kind(), embeds.device());
        Rope::new(self.config.head_dim(), self.config.rope_theta, start, t, place)
    }

    /// States of the next tokens, growing `cache`; no gradient.
    ///
    /// # Shapes
    /// `embeds [b, t, d]` to `[b, t, d]`; with a cache that is not empty, `t` must be 1.
    pub fn forward_cached(&self, embeds: &Tensor, cache: &mut KvCache) -> Tensor {
        let [_b, t, _d] = dims(embeds);
        let _scope = scope::enter("llm");
        assert!(t == 1 || cache.is_empty(), "a prompt goes into an empty cache, later tokens one by one");
        no_grad(|| {
            let rope = self.rope(cache.len(), t, embeds);
            let run = Run { rope, mask: if t > 1 { OwnMask::Causal } else { OwnMask::None }, train: false };
            let mut xs = embeds.shallow_clone();
            for (i, layer) in self.layers.iter().enumerate() {
                let _scope = scope::enter_at("layers", i);
                xs = layer.forward(&xs, &run, Some((i, cache)));
            }
            cache.len += t;
            self.norm.forward(&xs)
        })
    }

    /// Cross-entropy of the tokens that `states` predict, summed, in fp32. Logits live a chunk at a time.
    ///
    /// # Shapes
    /// `states [n, d]` after the final norm, `labels [n]` i64, negative = ignored; a scalar.
    pub fn cross_entropy(&self, states: &Tensor, labels: &Tensor) -> Tensor {
        let _llm = scope::enter("llm");
        let _head = scope::enter("lm_head");
        self.lm_head.cross_entropy(states, labels, self.head_chunk())
    }

    /// How many of `states` predict their label best, f64 scalar. Logits live a chunk at a time.
    ///
    /// # Shapes
    /// As [`Self::cross_entropy`].
    pub fn count_right(&self, states: &Tensor, labels: &Tensor) -> Tensor {
        let mut right = Tensor::zeros([], (Kind::Double, states.device()));
        let chunk = self.head_chunk();
        for (states, labels) in states.split(chunk, 0).iter().zip(labels.split(chunk, 0)) {
            right += self.logits(states).argmax(-1, false).eq_tensor(&labels).sum(Kind::Double);
        }
        right
    }

    /// States whose logits may live at once.
    fn head_chunk(&self) -> i64 {
        (HEAD_ELEMENTS / self.config.vocab_size).max(1)
    }

    /// # Shapes
    /// `states [..., d]` after the final norm to `[..., vocab]`.
    pub fn logits(&self, states: &Tensor) -> Tensor {
        let _llm = scope::enter("llm");
        let _head = scope::enter("lm_head");
        self.lm_head.forward(states, false)
    }
}
