//! Tokenizer: the Llama-style tokenizer of LLaVA-Med, and the prompt template of PRS-Med.
//!
//! A training text is `<image>\n### User: {question} \n### Assistant: \n{answer}`. It is split at `<image>`, and each
//! part is tokenized separately, with `<s>` and a leading `▁`. Then [`IMAGE_TOKEN`] is inserted between the parts, and
//! only the first `<s>` is kept. The newline before the answer is a byte piece that merges with nothing, so the ids up
//! to the answer do not depend on the answer; this is checked, because generation starts from them.
//!
//! Source: `llava/mm_utils.py::tokenizer_image_token` and PRS-Med's data loader. Deviations: a literal `<image>` inside
//! a question stays text (the original would splice a second image); the end-of-sequence id can be appended.

mod checked;
pub mod clip_bpe;
mod sentencepiece;
mod train;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use prsmed_base::files::write_bytes;

/// Id that marks the position of the image in a sequence; no token has it.
pub const IMAGE_TOKEN: i64 = -200;

const HINT: &str = "use the tokenizer files of the checkpoint";

const UNK: &str = "<unk>";
const BOS: &str = "<s>";
const EOS: &str = "</s>";

/// A Llama-style tokenizer: BPE with byte fallback, `<s>` before every text.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    inner: Tokenizer,
    /// `tokenizer_config.json` as read, or the default for Python.
    config: Value,
    bos: i64,
    eos: i64,
    vocab_size: i64,
}

impl TextTokenizer {
    /// Opens `folder/tokenizer.json`, or converts `folder/tokenizer.model` (SentencePiece BPE) like `transformers`.
    ///
    /// # Errors
    /// [`Error::Weights`] when neither file exists or can be read, or when `<s>` and `</s>` are not used as in Llama.
    pub fn open(folder: &Path) -> Result<Self> {
        let (fast, slow) = (folder.join("tokenizer.json"), folder.join("tokenizer.model"));
        let (path, inner) = if fast.exists() {
            let bytes = files::read(&fast, files::MAX_VOCABULARY).map_err(Error::io(&fast, "read"))?;
            let inner = checked::read(&bytes).map_err(|reason| Error::weights(&fast, reason, HINT))?;
            (fast, inner)
        } else if slow.exists() {
            let bytes = files::read(&slow, files::MAX_VOCABULARY).map_err(Error::io(&slow, "read"))?;
            let inner = sentencepiece::convert(&bytes)
                .and_then(|json| parse(&json))
                .map_err(|reason| Error::weights(&slow, reason, "download or copy it again"))?;
            (slow, inner)
        } else {
            return Err(Error::weights(
                folder,
                "contains neither `tokenizer.json` nor `tokenizer.model`",
                "give the folder of the tokenizer, or copy one of the two files into it",
            ));
        };
        let config_path = folder.join("tokenizer_config.json");
        let config = match files::read(&config_path, files::MAX_SETTINGS) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| damaged(&config_path, &error))?,
            Err(error) if error.kind() == ErrorKind::NotFound => default_config(),
            Err(error) => return Err(Error::io(&config_path, "read")(error)),
        };
        Self::new(inner, config, &path)
    }

    /// Trains a small tokenizer of the same kind: `<unk>` 0, `<s>` 1, `</s>` 2, 256 byte pieces, characters, merges.
    ///
    /// The result depends only on the texts, not on their order. Merges stay inside words (with the space before
    /// them); newlines, digits and punctuation marks are never merged. Fewer than `vocab_size` pieces come out when
    /// every word is a piece before that.
    ///
    /// # Errors
    /// [`Error::Config`] when `vocab_size` leaves no room for characters.
    pub fn train(texts: &[&str], vocab_size: usize) -> Result<Self> {
        let json = train::train(texts, vocab_size)?;
        let inner = parse(&json).expect("a trained vocabulary contains every piece of its merges");
        Self::new(inner, default_config(), Path::new("tokenizer.json"))
    }

    fn new(mut inner: Tokenizer, config: Value, path: &Path) -> Result<Self> {
        // A file may contain the truncation or padding settings of the program that saved it.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| damaged(path, &*error))?;
        let special = |token: &str| {
            inner.token_to_id(token).map(i64::from).ok_or_else(|| {
                Error::weights(path, format!("has no piece `{token}`"), "use the tokenizer of a Llama or Mistral model")
            })
        };
        let (bos, eos) = (special(BOS)?, special(EOS)?);
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| i64::from(id) + 1);
        let this = Self { inner, config, bos, eos, vocab_size };
        let probe = this.encode("a")?;
        if probe.first() != Some(&bos) || probe.last() == Some(&eos) {
            return Err(Error::weights(
                path,
                format!("does not put `{BOS}` (and nothing else) around a text, as Llama's tokenizer does"),
                "use the tokenizer of a Llama or Mistral model",
            ));
        }
        Ok(this)
    }

    /// The same for embeddings of `rows` rows: added tokens without a row become plain text. Returns a warning that names
    /// them.
    ///
    /// # Errors
    /// [`Error::Weights`] about `folder` for other pieces without a row.
    pub fn fit(self, rows: i64, folder: &Path) -> Result<(Self, Option<String>)> {
        if self.vocab_size <= rows {
            return Ok((self, None));
        }
        let text = self.inner.to_string(false).map_err(|error| damaged(folder, &*error))?;
        let mut json: Value = serde_json::from_str(&text).map_err(|error| damaged(folder, &error))?;
        let mut without = Vec::new();
        if let Some(added) = json["added_tokens"].as_array_mut() {
            let has_row = |token: &Value| token["id"].as_i64().is_some_and(|id| id < rows);
            without = added.extract_if(.., |token| !has_row(token)).collect();
        }
        let inner = parse(&json).map_err(|reason| Error::weights(folder, reason, HINT))?;
        let fitted = Self::new(inner, self.config, folder)?;
        if fitted.vocab_size > rows {
            let reason = format!("its tokenizer has {} ids, its embeddings have {rows} rows", fitted.vocab_size);
            return Err(Error::weights(
                folder,
                reason,
                "tokenizer and weights must belong together: download both again",
            ));
        }
        let names: Vec<&str> = without.iter().filter_map(|token| token["content"].as_str()).collect();
        let shown = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let more = if names.len() > 3 { ", .." } else { "" };
        let warning = format!(
            "{}: {} added tokens of the tokenizer ({shown}{more}) have no row in the embeddings, which have {rows}: they are read \
             as plain text",
            folder.display(),
            names.len()
        );
        Ok((fitted, Some(warning)))
    }

    /// Writes `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` for Python's `transformers`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &Path) -> Result<()> {
        for (name, content) in self.files()? {
            write_bytes(&folder.join(name), content.as_bytes())?;
        }
        Ok(())
    }

    /// File names and contents that [`TextTokenizer::save`] writes.
    ///
    /// # Errors
    /// [`Error::Weights`] when the tokenizer cannot be written as JSON.
    pub fn files(&self) -> Result<[(&'static str, String); 3]> {
        let path = PathBuf::from("tokenizer.json");
        let json = self.inner.to_string(true).map_err(|error| damaged(&path, &*error))?;
        let map = json!({ "bos_token": BOS, "eos_token": EOS, "pad_token": UNK, "unk_token": UNK });
        Ok([
            ("tokenizer.json", json),
            ("tokenizer_config.json", format!("{:#}", self.config)),
            ("special_tokens_map.json", format!("{map:#}")),
        ])
    }

    /// Number of ids; every id is below it.
    pub fn vocab_size(&self) -> i64 {
        self.vocab_size
    }

    /// The id of `<s>`.
    pub fn bos(&self) -> i64 {
        self.bos
    }

    /// The id of `</s>`.
    pub fn eos(&self) -> i64 {
        self.eos
    }

    /// The ids of one text: `<s>` and its pieces, the first with a leading `▁`.
    ///
    /// # Errors
    /// [`Error::Weights`] when the tokenizer has no piece for something and no `<unk>`.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        let encoding = self.inner.encode_fast(text, true).map_err(|error| damaged(Path::new("tokenizer"), &*error))?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// Decodes ids. Special tokens, image tokens and ids outside the vocabulary are left out.
    ///
    /// # Errors
    /// [`Error::Weights`] from a decoder that does not fit its vocabulary.
    pub fn decode(&self, ids: &[i64]) -> Result<String> {
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        self.inner.decode(&ids, true).map_err(|error| damaged(Path::new("tokenizer"), &*error))
    }

    /// `<s>`, the image and the pieces of `text`.
    fn after_image(&self, text: &str) -> Result<Vec<i64>> {
        let pieces = self.encode(text)?;
        Ok([self.bos, IMAGE_TOKEN].into_iter().chain(pieces.into_iter().skip(1)).collect())
    }
}

/// Decodes an answer while it is generated and returns the new complete characters.
#[derive(Debug, Clone, Default)]
pub struct AnswerStream {
    ids: Vec<i64>,
    shown: usize,
}

impl AnswerStream {
    /// Adds an id; returns the new text, empty while a character is still incomplete.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn push(&mut self, tokenizer: &TextTokenizer, id: i64) -> Result<String> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids)?;
        if text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        let new = text.get(self.shown..).unwrap_or_default().to_owned();
        self.shown = text.len();
        Ok(new)
    }
}

/// A sequence around one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptIds {
    /// `<s>`, [`IMAGE_TOKEN`], template and question, answer.
    pub ids: Vec<i64>,
    /// `ids[answer_start..]` is the answer (with `</s>` if requested).
    pub answer_start: usize,
}

/// The ids of question and answer as PRS-Med trains on them.
///
/// # Errors
/// [`Error::Weights`] when the tokenizer merges pieces across the newline before the answer.
pub fn training_prompt(tok: &TextTokenizer, question: &str, answer: &str, with_eos: bool) -> Result<PromptIds> {
    let PromptIds { ids: prompt, answer_start } = question_prompt(tok, question)?;
    let mut ids = tok.after_image(&(template(question) + answer))?;
    if !ids.starts_with(&prompt) {
        return Err(Error::weights(
            "tokenizer",
            "merges the newline before an answer with what follows, so a prompt would depend on its answer",
            "use the tokenizer of LLaVA-Med or another one with byte fallback for newlines",
        ));
    }
    if with_eos {
        ids.push(tok.eos);
    }
    Ok(PromptIds { ids, answer_start })
}

/// The ids up to the answer: a prefix of [`training_prompt`]'s for every answer.
///
/// # Errors
/// As [`TextTokenizer::encode`].
pub fn question_prompt(tok: &TextTokenizer, question: &str) -> Result<PromptIds> {
    let ids = tok.after_image(&template(question))?;
    Ok(PromptIds { answer_start: ids.len(), ids })
}

fn template(question: &str) -> String {
    format!("\n### User: {question} \n### Assistant: \n")
}

/// The answer in a generated text: without template headers and later turns, with single spaces.
pub fn clean_answer(text: &str) -> String {
    let mut rest = text.trim();
    while let Some(header) = rest.strip_prefix("###") {
        let header = header.trim_start();
        let Some(after) = ["Assistant:", "User:"].iter().find_map(|name| header.strip_prefix(name)) else { break };
        rest = after.trim_start();
    }
    let answer = rest.split("###").next().unwrap_or_default();
    answer.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn damaged(path: &Path, error: &(dyn std::error::Error + 'static)) -> Error {
    Error::weights(path, error.to_string(), HINT)
}

fn parse(json: &Value) -> Result<Tokenizer, String> {
    serde_json::to_vec(json).map_err(|error| error.to_string()).and_then(|bytes| checked::read(&bytes))
}

/// `tokenizer_config.json` for Python's `transformers`.
fn default_config() -> Value {
    json!({
        "bos_token": BOS,
        "clean_up_tokenization_spaces": false,
        "eos_token": EOS,
        "model_max_length": 2048,
        "pad_token": UNK,
        "padding_side": "right",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNK,
    })
}

/// `tokenizer.json` of a Llama tokenizer with these pieces (in id order) and merges (best first). `added` are the ids
/// of control (special) and user-defined pieces.
fn llama_json(pieces: &[&str], merges: &[(&str, &str)], added: &[(usize, bool)]) -> Value {
    let vocab: serde_json::Map<String, Value> =
        pieces.iter().enumerate().map(|(id, piece)| ((*piece).to_owned(), json!(id))).collect();
    let added: Vec<Value> = added
        .iter()
        .map(|&(id, special)| {
            json!({ "id": id, "content": pieces[id], "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special })
        })
        .collect();
    let bos = vocab.get(BOS).cloned().unwrap_or(json!(1));
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": BOS, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [
                { "SpecialToken": { "id": BOS, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                { "SpecialToken": { "id": BOS, "type_id": 1 } }, { "Sequence": { "id": "B", "type_id": 1 } },
            ],
            "special_tokens": { BOS: { "id": BOS, "ids": [bos], "tokens": [BOS] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": UNK, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

#[cfg(test)]
mod tests;
