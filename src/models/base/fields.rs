//! Fields of the `config.json` of a language model and of a vision tower: those that the program follows, those whose
//! other values it refuses, and those that it does not know.
//!
//! Fields are those of transformers 4 (`rope_theta` at the top, `torch_dtype`) and 5 (`rope_parameters`, `dtype`), and of
//! LLaVA (`mm_*`). They stand at the top, or in `text_config` and `vision_config`.

use crate::models::decoder;
use crate::tensor::weights::read_config;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Fields that limit the number of tokens of a text with its image.
const LIMITS: [&str; 4] =
    ["max_position_embeddings", "max_sequence_length", "sliding_window", "tokenizer_model_max_length"];

/// What to do about a `config.json` that cannot be used.
pub const CONFIG_HINT: &str = "use the `config.json` of the model's own repository";

/// `architectures` of a `config.json`, and the `model_type` that belongs to it.
pub type ArchitectureNames = [(&'static str, &'static str)];

/// A field whose other values change the arithmetic: its name, and the values that the program computes with.
pub type FollowedField = (&'static str, fn(&Value) -> bool);

/// Fields without influence on the arithmetic of a frozen model whose prompts and training are the program's own.
const HARMLESS: [&str; 5] = [
    // files and versions
    "_name_or_path architectures auto_map dtype model_type torch_dtype transformers_version name_or_path _commit_hash \
     task_specific_params id2label label2id problem_type finetuning_task return_dict torchscript is_decoder \
     tie_encoder_decoder use_bfloat16",
    // tokens: the tokenizer has them
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id prefix tokenizer_class \
     tokenizer_padding_side",
    // generation: answers are the most likely tokens
    "do_sample early_stopping max_length min_length num_beams num_beam_groups diversity_penalty temperature top_k \
     top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size \
     bad_words_ids num_return_sequences output_scores begin_suppress_tokens suppress_tokens return_dict_in_generate \
     forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty \
     chunk_size_feed_forward output_attentions output_hidden_states use_cache pretraining_tp attn_implementation \
     _attn_implementation _attn_implementation_autoset",
    // initial weights
    "initializer_range initializer_factor logit_scale_init_value projection_dim",
    // training of LLaVA and LLaVA-Med, and leftovers that their code does not read
    "feature_outs freeze_mm_mlp_adapter freeze_mm_vision_resampler image_crop_resolution image_grid_pinpoints \
     image_split_resolution img_size mm_projector_lr mm_tunable_parts mm_vision_tower_lr proj_vis_to_txt_tokens \
     prompt_segtok_w_instruct segtok_posembed tune_mm_mlp_adapter tune_mm_vision_resampler tune_vision_tokenizer \
     unfreeze_mm_vision_tower vision_backbone vision_tokenizer_lr",
];

/// Other fields that the program reads.
const READ: &str = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size \
                    rope_theta rope_parameters rope_scaling rms_norm_eps head_dim tie_word_embeddings layer_norm_eps \
                    image_size patch_size mm_vision_tower mm_hidden_size quantization_config text_config vision_config \
                    text_config_dict vision_config_dict";

fn is_harmless(key: &str) -> bool {
    HARMLESS.iter().flat_map(|names| names.split(' ')).any(|name| name == key)
}

/// Null, false, zero or empty.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        Value::Bool(true) => false,
    }
}

pub(super) fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

/// The fields of a `config.json`, without null values.
#[derive(Debug, Default)]
pub struct Fields {
    pub(super) path: PathBuf,
    pub(super) fields: Map<String, Value>,
}

impl Fields {
    /// The fields of a language model, whose `text_config` means the same as the top.
    ///
    /// # Errors
    /// [`Error::Weights`] for values that the program does not compute with.
    pub(super) fn of_language_model(self, followed: &[FollowedField]) -> Result<Self> {
        let this = self.of_text()?;
        this.check(followed)?;
        this.check_quantization()?;
        Ok(this)
    }

    /// True if `known` has the architecture. A `config.json` that names none is of every architecture.
    pub fn is_of(&self, known: &ArchitectureNames) -> bool {
        match (self.architectures().first(), self.text("model_type")) {
            (Some(_), _) => self.architectures().iter().any(|name| known.iter().any(|(own, _)| own == name)),
            (None, Some(kind)) => known.iter().any(|(_, own)| *own == kind),
            (None, None) => true,
        }
    }

    fn architectures(&self) -> Vec<&str> {
        let named = self.get("architectures").and_then(Value::as_array);
        named.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// The error for an architecture that is not among `supported`.
    pub(super) fn unsupported<'a>(&self, supported: impl Iterator<Item = &'a str>, hint: &str) -> Error {
        let name = self.architectures().first().copied().or(self.text("model_type")).unwrap_or_default();
        let supported: Vec<&str> = supported.collect();
        Error::weights(&self.path, format!("{name} is not supported; supported: {}", supported.join(", ")), hint)
    }

    /// The fields with those of `text_config` at the top.
    ///
    /// # Errors
    /// [`Error::Weights`] for fields that contradict each other.
    pub fn of_text(mut self) -> Result<Self> {
        self.add_section("text_config")?;
        Ok(self)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the `config.json` in `folder`.
    ///
    /// # Errors
    /// [`Error::Weights`] for another content; [`Error::Io`].
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        match read_config(&path, CONFIG_HINT)? {
            Value::Object(mut fields) => {
                fields.retain(|_, value| !value.is_null());
                Ok(Self { path, fields })
            }
            _ => Err(Error::weights(path, "is not a JSON object", CONFIG_HINT)),
        }
    }

    /// Moves the fields of a section to the top.
    pub(super) fn add_section(&mut self, name: &str) -> Result<()> {
        let Some(Value::Object(section)) = self.fields.remove(name) else { return Ok(()) };
        for (key, value) in section.into_iter().filter(|(_, value)| !value.is_null()) {
            match self.fields.get(&key).filter(|top| !is_equal(top, &value)) {
                Some(top) if !is_harmless(&key) => {
                    let (top, section) = ((key.clone(), top.clone()), (format!("{name}.{key}"), value));
                    return Err(self.contradiction(&top, &section));
                }
                _ => self.fields.insert(key, value),
            };
        }
        Ok(())
    }

    /// The value of a field.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key)
    }

    /// The value of a field that is a text.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Value::as_str)
    }

    /// Whether the embedding of the tokens is the head too.
    pub fn is_tied(&self) -> bool {
        self.get("tie_word_embeddings").is_some_and(|value| value == true)
    }

    fn refuse(&self, key: &str, value: &Value) -> Error {
        let hint = "use another model; if the field does not describe how this one was trained, correct it in a copy of \
                    the folder";
        Error::weights(&self.path, format!("`{key}` = {value} is not supported"), hint)
    }

    fn contradiction(&self, one: &(String, Value), other: &(String, Value)) -> Error {
        let reason = format!("`{}` = {} and `{}` = {} contradict each other", one.0, one.1, other.0, other.1);
        Error::weights(&self.path, reason, "keep the one that the model was trained with, in a copy of the folder")
    }

    pub(super) fn check(&self, followed: &[FollowedField]) -> Result<()> {
        let wrong =
            followed.iter().find_map(|(key, is_followed)| Some((key, self.get(key)?)).filter(|(_, v)| !is_followed(v)));
        wrong.map_or(Ok(()), |(key, value)| Err(self.refuse(key, value)))
    }

    /// Stored 4-bit weights are those of `bitsandbytes` in NF4.
    fn check_quantization(&self) -> Result<()> {
        let Some(quantization) = self.get("quantization_config") else { return Ok(()) };
        let is_on = |key: &str| quantization.get(key).is_some_and(|value| !is_off(value));
        let supported =
            [("quant_method", "bitsandbytes"), ("bnb_4bit_quant_type", "nf4"), ("bnb_4bit_quant_storage", "uint8")];
        let is_four_bits = is_on("load_in_4bit") || is_on("_load_in_4bit");
        for (key, own) in supported {
            match quantization.get(key) {
                Some(value) if !value.is_null() && value != own && (is_four_bits || key == "quant_method") => {
                    return Err(self.refuse(&format!("quantization_config.{key}"), value));
                }
                _ => {}
            }
        }
        let eight = ["load_in_8bit", "_load_in_8bit"].into_iter().find(|key| is_on(key));
        eight.map_or(Ok(()), |key| Err(self.refuse(&format!("quantization_config.{key}"), &json!(true))))
    }

    /// The base of the rotary embedding's angles: `rope_theta`, at the top or in `rope_parameters` or `rope_scaling`.
    ///
    /// # Errors
    /// [`Error::Weights`] for another rotary embedding than the plain one, for two bases, and for none.
    fn rope_theta(&self) -> Result<f64> {
        let mut found: Vec<(String, Value)> =
            self.get("rope_theta").map(|theta| ("rope_theta".to_owned(), theta.clone())).into_iter().collect();
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(value) = self.get(name) else { continue };
            let Value::Object(section) = value else { return Err(self.refuse(name, value)) };
            for (key, value) in section.iter().filter(|(_, value)| !value.is_null()) {
                match key.as_str() {
                    "rope_theta" => found.push((format!("{name}.rope_theta"), value.clone())),
                    "rope_type" | "type" if value == "default" => {}
                    // transformers reads these for other types only
                    "original_max_position_embeddings" => {}
                    "factor" | "partial_rotary_factor" | "attention_factor" if is_one(value) => {}
                    _ => return Err(self.refuse(&format!("{name}.{key}"), value)),
                }
            }
        }
        let (first, others) = found.split_first().ok_or_else(|| {
            let reason = "`rope_theta` is missing, at the top and in `rope_parameters`";
            Error::weights(&self.path, reason, CONFIG_HINT)
        })?;
        if let Some(other) = others.iter().find(|other| !is_equal(&other.1, &first.1)) {
            return Err(self.contradiction(first, other));
        }
        first.1.as_f64().filter(|theta| *theta > 0.0).ok_or_else(|| self.refuse(&first.0, &first.1))
    }

    /// Sizes of the language model.
    ///
    /// # Errors
    /// [`Error::Weights`] for missing fields, and for values that the program does not compute with.
    pub fn llm(&self) -> Result<decoder::Config> {
        let mut fields = self.fields.clone();
        fields.insert("rope_theta".into(), self.rope_theta()?.into());
        let heads = fields.get("num_attention_heads").cloned();
        if let (Some(heads), None) = (heads, fields.get("num_key_value_heads")) {
            fields.insert("num_key_value_heads".into(), heads);
        }
        let config: decoder::Config = self.parsed(fields, CONFIG_HINT)?;
        let head_dim = config.hidden_size.checked_div(config.num_attention_heads);
        match self.get("head_dim") {
            Some(value) if value.as_i64() != head_dim => Err(self.refuse("head_dim", value)),
            _ => Ok(config),
        }
    }

    pub(super) fn parsed<T: serde::de::DeserializeOwned>(&self, fields: Map<String, Value>, hint: &str) -> Result<T> {
        serde_json::from_value(fields.into()).map_err(|error| Error::weights(&self.path, error.to_string(), hint))
    }

    /// Refuses texts that are longer than the language model allows. `tokens`: those of an image and the longest text.
    ///
    /// # Errors
    /// [`Error::Weights`] naming the limit.
    pub fn check_length(&self, tokens: i64) -> Result<()> {
        let limit = |key: &&str| self.get(key).and_then(Value::as_i64).filter(|limit| (1..tokens).contains(limit));
        let Some((key, limit)) = LIMITS.iter().find_map(|key| Some((key, limit(key)?))) else { return Ok(()) };
        let reason = format!("`{key}` = {limit}: an image and its longest text have {tokens} tokens");
        Err(Error::weights(&self.path, reason, "set a smaller `model.max_text_tokens`, or use another model"))
    }

    /// Refuses a vision tower of another width than the projector's.
    ///
    /// # Errors
    /// [`Error::Weights`] naming both widths.
    pub fn check_tower_width(&self, width: i64) -> Result<()> {
        let other = self.get("mm_hidden_size").filter(|value| value.as_i64() != Some(width));
        other.map_or(Ok(()), |value| {
            let reason = format!("`mm_hidden_size` = {value}, and the vision tower has the width {width}");
            Err(Error::weights(&self.path, reason, "use the vision tower that the model was trained with"))
        })
    }

    /// A sentence that names the fields that are neither known nor in `followed`, and not null, false, zero or empty.
    pub fn unknown_beside(&self, followed: &[FollowedField]) -> Option<String> {
        let is_known = |key: &str| {
            let is_read = READ.split(' ').chain(LIMITS).any(|known| known == key);
            is_read || is_harmless(key) || followed.iter().any(|(known, _)| *known == key)
        };
        let unknown = self.fields.iter().filter(|(key, value)| !is_known(key) && !is_off(value));
        let unknown: Vec<String> = unknown.map(|(key, value)| format!("`{key}` = {}", short(value))).collect();
        let text = "prsmed does not know these fields of its `config.json`, and computes without them";
        (!unknown.is_empty()).then(|| format!("{text}: {}", unknown.join(", ")))
    }
}

/// A value in a message.
fn short(value: &Value) -> String {
    let text: String = value.to_string().chars().filter(|c| !c.is_control()).collect();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

/// Equality in which 1 is 1.0.
fn is_equal(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|one| other.as_f64() == Some(one))
}
