//! The family of LLaVA-Med v1.5: Mistral with CLIP's vision tower, as LLaVA stores it.

use super::clip::FILES;
use super::family::{Family, Keys, Parts};
use super::fields::{Fields, FollowedField, is_off, is_one};
use crate::data::text::Prompt;
use crate::models::{clip, decoder, tower};
use serde_json::{Value, json};

/// The language model that PRS-Med was trained on.
pub const LLAVA_MED: &str = "hub:microsoft/llava-med-v1.5-mistral-7b";

/// The family of [`LLAVA_MED`].
pub static FAMILY: Family = Family {
    name: "llava_mistral",
    architectures: &[("LlavaMistralForCausalLM", "llava_mistral"), ("MistralForCausalLM", "mistral")],
    followed: FOLLOWED,
    read: Fields::llm,
    write,
    keys: Keys {
        layers: "model.layers.",
        embedding: "model.embed_tokens.weight",
        head: "lm_head.weight",
        projector: "model.mm_projector.",
        tower: "model.vision_tower.vision_tower.",
        unused: &["inv_freq", "position_ids"],
        layouts: &[],
        adapted: r"(model\.)*layers\.\d+\.self_attn\.(q|k|v|o)_proj",
        unused_adapters: "vision_tower",
    },
    tower: &FILES,
    prompt: Prompt::PUBLISHED,
    published: &[(LLAVA_MED, sizes)],
};

const FOLLOWED: &[FollowedField] = &[
    ("hidden_act", |value| value == "silu"),
    ("attention_bias", is_off),
    ("mlp_bias", is_off),
    ("attention_dropout", is_off),
    ("layer_types", |value| value.as_array().is_some_and(|all| all.iter().all(|one| one == "full_attention"))),
    ("partial_rotary_factor", is_one),
    ("pruned_heads", is_off),
    ("is_encoder_decoder", is_off),
    ("add_cross_attention", is_off),
    ("mm_vision_select_layer", |value| value == -2),
    ("vision_feature_layer", |value| value == -2),
    ("mm_vision_select_feature", |value| value == "patch"),
    ("vision_feature_select_strategy", |value| value == "default"),
    ("mm_use_im_start_end", is_off),
    ("image_aspect_ratio", |value| value == "pad"),
    ("mm_projector_type", |value| value == "mlp2x_gelu"),
    ("projector_hidden_act", |value| value == "gelu"),
    ("multimodal_projector_bias", |value| value == true),
    ("mm_patch_merge_type", |value| value == "flat"),
    ("mm_resampler_type", is_off),
    ("mm_vision_resampler_type", is_off),
    ("use_mm_proj", |value| value == true),
    ("s2", is_off),
];

/// Sizes of [`LLAVA_MED`].
pub fn sizes() -> Parts {
    let llm = decoder::Config {
        hidden_size: 4096,
        intermediate_size: 14336,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        vocab_size: 32000,
        rope_theta: 1e6,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        variant: decoder::Variant::default(),
    };
    Parts { family: &FAMILY, tower: tower::Config::Clip(clip::Config::vit_l_14_336()), llm }
}

/// Transformers reads it as a Mistral without the other parts.
fn write(llm: &decoder::Config) -> Value {
    let mut json = serde_json::to_value(llm).expect("plain numbers serialise");
    json["model_type"] = "mistral".into();
    json["architectures"] = json!(["MistralForCausalLM"]);
    json["head_dim"] = llm.head_dim().into();
    json["sliding_window"] = Value::Null;
    json["hidden_act"] = "silu".into();
    json["tie_word_embeddings"] = false.into();
    json
}
