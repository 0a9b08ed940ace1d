//! CLIP's text towers (Radford et al. 2021; Cherti et al. 2023), as in transformers' `CLIPTextModel` and
//! `CLIPTextModelWithProjection`.
//!
//! Legend: b batch, t tokens (77), d width. The tokenizer is in `data`.

use super::fields::{multiple, positive};
use crate::error::Result;
use crate::models::clip::{ClipActivation, ClipLayer, LayerConfig};
use crate::nn::{Embedding, LayerNorm, Linear, Mask};
use crate::tensor::store::{Init, VarPath};
use crate::tensor::{Kind, Tensor, dims, module_path};

/// Sizes of a text tower, with the names and defaults of transformers' `text_encoder/config.json`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    /// Number of tokens in the vocabulary.
    pub vocab_size: i64,
    /// Width of the tokens.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Number of layers.
    pub num_hidden_layers: i64,
    /// Number of attention heads.
    pub num_attention_heads: i64,
    /// Longest text in tokens.
    pub max_position_embeddings: i64,
    /// Activation of the MLP.
    pub hidden_act: ClipActivation,
    /// Epsilon of the layer norms.
    pub layer_norm_eps: f64,
    /// End token: the pooled text is the output at the first such token. 2, as in old files, means the largest id.
    pub eos_token_id: i64,
    /// Width of the pooled text embedding.
    pub projection_dim: i64,
}

/// End token in old configs. These models pool at the largest id, which is the real end token.
const LEGACY_EOS: i64 = 2;

/// Standard deviation of random embeddings.
const INIT_STD: f64 = 0.02;

impl Default for Config {
    fn default() -> Self {
        Self {
            vocab_size: 49_408,
            hidden_size: 512,
            intermediate_size: 2048,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            max_position_embeddings: 77,
            hidden_act: ClipActivation::QuickGelu,
            layer_norm_eps: 1e-5,
            eos_token_id: 49_407,
            projection_dim: 512,
        }
    }
}

impl Config {
    /// CLIP ViT-L/14: Stable Diffusion 1, and the first encoder of SDXL.
    pub fn clip_l() -> Self {
        Self::sized(768, 12, 12, ClipActivation::QuickGelu)
    }

    /// OpenCLIP ViT-H/14 without its last layer: Stable Diffusion 2.
    pub fn open_clip_h() -> Self {
        Self::sized(1024, 23, 16, ClipActivation::Gelu)
    }

    /// OpenCLIP ViT-bigG/14: the second encoder of SDXL.
    pub fn clip_big_g() -> Self {
        Self::sized(1280, 32, 20, ClipActivation::Gelu)
    }

    /// Four layers of width 32 with the full vocabulary, for tests.
    pub fn tiny() -> Self {
        Self { intermediate_size: 64, projection_dim: 16, ..Self::sized(32, 4, 4, ClipActivation::QuickGelu) }
    }

    fn sized(hidden_size: i64, num_hidden_layers: i64, num_attention_heads: i64, hidden_act: ClipActivation) -> Self {
        Self {
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_hidden_layers,
            num_attention_heads,
            hidden_act,
            eos_token_id: LEGACY_EOS,
            projection_dim: hidden_size,
            ..Self::default()
        }
    }

    /// # Errors
    /// [`crate::Error::Config`] with the field (`text_encoder.…`) whose size is wrong.
    pub fn check(&self) -> Result<()> {
        for (key, value) in [
            ("text_encoder.vocab_size", self.vocab_size),
            ("text_encoder.intermediate_size", self.intermediate_size),
            ("text_encoder.num_hidden_layers", self.num_hidden_layers),
            ("text_encoder.max_position_embeddings", self.max_position_embeddings),
            ("text_encoder.projection_dim", self.projection_dim),
        ] {
            positive(key, value)?;
        }
        multiple("text_encoder.hidden_size", self.hidden_size, self.num_attention_heads)
    }

    fn layer(&self) -> LayerConfig {
        let Self { hidden_size, intermediate_size, num_attention_heads, layer_norm_eps, hidden_act, .. } = *self;
        LayerConfig { hidden_size, intermediate_size, num_attention_heads, layer_norm_eps, hidden_act }
    }
}

/// Output of a text tower.
#[derive(Debug)]
pub struct TextOutput {
    /// `[b, t, d]`: the last layer, after the final norm.
    pub last: Tensor,
    /// `[b, t, d]`: the second to last layer, without a norm.
    pub penultimate: Tensor,
    /// `[b, projection_dim]`: the projected end token of `last`; `None` without a projection.
    pub pooled: Option<Tensor>,
}

/// CLIP text tower.
#[derive(Debug)]
pub struct TextTower {
    token_embedding: Embedding,
    position_embedding: Tensor,
    layers: Vec<ClipLayer>,
    final_layer_norm: LayerNorm,
    text_projection: Option<Linear>,
    eos_token_id: i64,
}

impl TextTower {
    /// `vs` is the path that contains `text_model`. The caller has checked `config`.
    pub fn new(vs: &VarPath, config: &Config, with_projection: bool) -> Self {
        let (model, d) = (vs.sub("text_model"), config.hidden_size);
        let embeddings = model.sub("embeddings");
        let layers = model.sub("encoder").sub("layers");
        Self {
            token_embedding: Embedding::new(&embeddings.sub("token_embedding"), config.vocab_size, d, INIT_STD),
            position_embedding: embeddings.sub("position_embedding").param(
                "weight",
                &[config.max_position_embeddings, d],
                Init::Normal { std: INIT_STD },
            ),
            layers: (0..config.num_hidden_layers).map(|i| ClipLayer::new(&layers.sub(i), config.layer())).collect(),
            final_layer_norm: LayerNorm::new(&model.sub("final_layer_norm"), d, config.layer_norm_eps),
            text_projection: with_projection
                .then(|| Linear::no_bias(&vs.sub("text_projection"), d, config.projection_dim, Init::FanIn)),
            eos_token_id: config.eos_token_id,
        }
    }

    /// # Shapes
    /// `ids [b, t]` int64, `t` up to `max_position_embeddings`; outputs in the dtype of the stored weights.
    pub fn forward(&self, ids: &Tensor) -> TextOutput {
        let [_b, t] = dims(ids);
        let tokens = self.token_embedding.forward(ids);
        let mut xs = &tokens + self.position_embedding.narrow(0, 0, t).to_kind(tokens.kind());
        let mut penultimate = xs.shallow_clone();
        for (i, layer) in self.layers.iter().enumerate() {
            let _module = module_path::enter_at("layers", i);
            penultimate = xs;
            xs = layer.forward(&penultimate, &Mask::Causal);
        }
        let last = self.final_layer_norm.forward(&xs);
        let pooled = self.text_projection.as_ref().map(|projection| {
            let [b, t, d] = dims(&last);
            let firsts = Tensor::arange(b, (Kind::Int64, last.device())) * t;
            projection.forward(&last.reshape([b * t, d]).index_select(0, &(self.end(ids) + firsts)), false)
        });
        TextOutput { last, penultimate, pooled }
    }

    /// Index of the end token, `[b]`.
    fn end(&self, ids: &Tensor) -> Tensor {
        if self.eos_token_id == LEGACY_EOS {
            ids.argmax(-1, false)
        } else {
            ids.eq(self.eos_token_id).to_kind(Kind::Int).argmax(-1, false)
        }
    }
}

/// The current name of a stored tensor: transformers 5 omits the prefix in the files of the plain encoder.
pub fn current_name(stored: &str) -> String {
    const PARTS: [&str; 3] = ["embeddings.", "encoder.", "final_layer_norm."];
    if PARTS.iter().any(|part| stored.starts_with(part)) { format!("text_model.{stored}") } else { stored.to_owned() }
}

/// True for a stored tensor that is not used (`position_ids` in old files).
pub fn is_leftover(stored: &str) -> bool {
    stored.ends_with("embeddings.position_ids")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::no_grad;
    use crate::tensor::store::{Role, Store, StoreOptions};

    #[test]
    fn a_published_config_is_read() {
        let text = r#"{"architectures": ["CLIPTextModel"], "attention_dropout": 0.0, "bos_token_id": 0, "dropout": 0.0,
            "eos_token_id": 2, "hidden_act": "quick_gelu", "hidden_size": 768, "initializer_factor": 1.0,
            "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 77, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
            "projection_dim": 768, "torch_dtype": "float32", "vocab_size": 49408}"#;
        assert_eq!(serde_json::from_str::<Config>(text).unwrap(), Config::clip_l());
        assert!(serde_json::from_str::<Config>(r#"{"hidden_act": "relu"}"#).is_err());
        let error = Config { num_attention_heads: 7, ..Config::tiny() }.check().unwrap_err().to_string();
        assert!(error.starts_with("`text_encoder.hidden_size`"), "{error}");
        for config in [Config::clip_l(), Config::open_clip_h(), Config::clip_big_g(), Config::tiny()] {
            config.check().unwrap();
        }
    }

    fn fill(tensor: &Tensor) {
        let places = Tensor::arange(i64::try_from(tensor.numel()).unwrap(), (Kind::Float, tensor.device()));
        tensor.shallow_clone().copy_(&(places * 0.9).sin().reshape(tensor.size()));
    }

    #[test]
    fn the_pooled_text_is_the_output_at_the_end_token() {
        let pooled = |eos_token_id, ids: &[i64]| {
            let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
            let config = Config { vocab_size: 99, eos_token_id, ..Config::tiny() };
            let tower = TextTower::new(&store.root(Role::Frozen), &config, true);
            store.for_each(|e| fill(&e.tensor));
            no_grad(|| tower.forward(&Tensor::from_slice(ids).unsqueeze(0)).pooled.unwrap())
        };
        // tokens after the end have no effect
        assert_eq!(pooled(2, &[1, 5, 98, 98]), pooled(2, &[1, 5, 98, 3]));
        assert_eq!(pooled(7, &[1, 5, 7, 98]), pooled(7, &[1, 5, 7, 7]));
        assert_ne!(pooled(2, &[1, 5, 7, 98]), pooled(7, &[1, 5, 7, 98]));
    }

    #[test]
    fn a_prefix_is_added_only_once() {
        let name = "text_model.encoder.layers.0.mlp.fc1.bias";
        assert_eq!(current_name("encoder.layers.0.mlp.fc1.bias"), name);
        assert_eq!(current_name(name), name);
        assert_eq!(current_name("text_projection.weight"), "text_projection.weight");
        assert!(is_leftover("text_model.embeddings.position_ids") && !is_leftover(name));
    }
}
