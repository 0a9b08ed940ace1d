//! A family for tests: a decoder with biases and normalised heads, other names in its files, and another prompt.

use super::family::{Family, Keys};
use super::fields::{Fields, is_one};
use super::{clip, llava_med};
use crate::Result;
use crate::data::text::Prompt;
use crate::models::decoder::{Config, Variant};
use serde_json::{Value, json};
use std::borrow::Cow;

/// The row of the registry.
pub(super) static FAMILY: Family = Family {
    name: "toy_decoder",
    architectures: &[("ToyForCausalLM", "toy")],
    followed: &[("toy_version", is_one)],
    read,
    write,
    keys: Keys {
        layouts: &[&[("decoder.", "model."), ("output.", "lm_head.")]],
        adapted: r".*\.self_attn\.(q|k|v|o)_proj",
        ..llava_med::FAMILY.keys
    },
    tower: &clip::FILES,
    prompt: Prompt {
        begin: None,
        before_image: Cow::Borrowed("Look:"),
        question: Cow::Borrowed("\nQuestion: {question}\nAnswer:\n"),
        end: Cow::Borrowed("</s>"),
        turn: Cow::Borrowed(""),
        speakers: Cow::Borrowed(&[]),
    },
    published: &[],
};

fn read(fields: &Fields) -> Result<Config> {
    let variant = Variant { qkv_bias: true, qk_norm: true, ..Variant::default() };
    Ok(Config { variant, ..fields.llm()? })
}

fn write(llm: &Config) -> Value {
    let mut json = serde_json::to_value(llm).expect("plain numbers serialise");
    json["architectures"] = json!(["ToyForCausalLM"]);
    json["toy_version"] = 1.into();
    json
}
