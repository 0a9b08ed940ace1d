//! Checks a `tokenizer.json` before the crate `tokenizers` reads it. That crate panics on damaged files and on some
//! combinations of parts, so only the parts of tokenizers like Llama's and CLIP's are allowed.

use serde::Deserialize;
use tokenizers::Tokenizer;

/// Normalizers that may be used.
const NORMALIZERS: [&str; 9] = ["Sequence", "Prepend", "Replace", "Strip", "Lowercase", "NFC", "NFD", "NFKC", "NFKD"];
/// Pre-tokenizers that may be used.
const PRE_TOKENIZERS: [&str; 5] = ["Sequence", "Metaspace", "Split", "ByteLevel", "Digits"];
/// Post-processors that may be used.
const POST_PROCESSORS: [&str; 3] = ["Sequence", "TemplateProcessing", "ByteLevel"];
/// Decoders that may be used.
const DECODERS: [&str; 7] = ["Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "ByteLevel"];

/// The parts of a tokenizer. Fields that need no check are ignored.
#[derive(Deserialize)]
struct Parts {
    model: Model,
    normalizer: Option<Part>,
    pre_tokenizer: Option<Part>,
    post_processor: Option<Part>,
    decoder: Option<Part>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: String,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
}

/// A part, or a sequence of parts.
#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, alias = "normalizers", alias = "pretokenizers", alias = "processors", alias = "decoders")]
    parts: Vec<Part>,
    /// Template of one text.
    #[serde(default)]
    single: Vec<Piece>,
    #[serde(default)]
    special_tokens: serde_json::Map<String, serde_json::Value>,
    /// Characters that a decoder strips from the end of each token; the crate panics on shorter tokens.
    #[serde(default)]
    stop: u64,
}

/// A piece of a template: a special token, or a text.
#[derive(Deserialize)]
struct Piece {
    #[serde(rename = "SpecialToken")]
    token: Option<Named>,
    #[serde(rename = "Sequence")]
    text: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    id: String,
}

impl Part {
    fn check(&self, what: &str, allowed: &[&str]) -> Result<(), String> {
        if !allowed.contains(&self.kind.as_str()) {
            return Err(format!("has the {what} `{}`; only {} are supported", self.kind, allowed.join(", ")));
        }
        let tokens = self.single.iter().filter_map(|piece| piece.token.as_ref());
        if let Some(unknown) = tokens.map(|token| &token.id).find(|id| !self.special_tokens.contains_key(*id)) {
            return Err(format!("has the token `{unknown}` in its template, but not in `special_tokens`"));
        }
        if let Some(other) = self.single.iter().filter_map(|piece| piece.text.as_ref()).find(|text| text.id != "A") {
            return Err(format!("has the text `{}` in its template of one text, which is `A`", other.id));
        }
        if self.stop > 0 {
            return Err(format!(
                "strips characters from the end of tokens (`stop` of the {what}), which is not supported"
            ));
        }
        self.parts.iter().try_for_each(|part| part.check(what, allowed))
    }
}

/// Reads a `tokenizer.json`; an error is the reason for a message.
pub(super) fn read(bytes: &[u8]) -> Result<Tokenizer, String> {
    // all of it must be valid JSON: `Parts` skips most of the text, and `tokenizers` panics where it is not valid
    let json: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let Parts { model, normalizer, pre_tokenizer, post_processor, decoder } =
        Parts::deserialize(&json).map_err(|error| error.to_string())?;
    drop(json);
    if model.kind != "BPE" {
        return Err(format!("is a model of type `{}`; only `BPE` is supported", model.kind));
    }
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err("drops merges at random (`dropout`)".into());
    }
    if model.continuing_subword_prefix.is_some_and(|prefix| !prefix.is_empty()) {
        return Err("marks the pieces inside words (`continuing_subword_prefix`), which is not supported".into());
    }
    for (part, what, allowed) in [
        (normalizer, "normalizer", NORMALIZERS.as_slice()),
        (pre_tokenizer, "pre-tokenizer", &PRE_TOKENIZERS),
        (post_processor, "post-processor", &POST_PROCESSORS),
        (decoder, "decoder", &DECODERS),
    ] {
        part.map_or(Ok(()), |part| part.check(what, allowed))?;
    }
    Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())
}
