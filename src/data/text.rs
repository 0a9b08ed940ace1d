//! Tokenizer of a language model, and the ids of its [`Prompt`].
//!
//! A training text of PRS-Med is `<image>\n### User: {question} \n### Assistant: \n{answer}`. It is split at `<image>`,
//! and each part is tokenized separately, with `<s>` and a leading `▁`. Then [`IMAGE_TOKEN`] is inserted between the
//! parts, and only the first `<s>` is kept. The newline before the answer is a byte piece that merges with nothing, so the
//! ids up to the answer do not depend on the answer; this is checked, because generation starts from them.
//!
//! Source: `llava/mm_utils.py::tokenizer_image_token` and PRS-Med's data loader. Deviations: a literal `<image>` inside
//! a question stays text (the original would splice a second image); the end-of-sequence id can be appended.

mod checked;
pub mod clip_bpe;
mod prompt;
mod sentencepiece;
mod train;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use prsmed_base::files::write_bytes;

pub use prompt::Prompt;

/// Id that marks the position of the image in a sequence; no token has it.
pub const IMAGE_TOKEN: i64 = -200;

const HINT: &str = "use the tokenizer files of the checkpoint";
const TOKENIZER_HINT: &str = "use the tokenizer that belongs to the language model";

const UNK: &str = "<unk>";
const BOS: &str = "<s>";
const EOS: &str = "</s>";

/// A tokenizer with the prompt of its model.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    inner: Tokenizer,
    /// `tokenizer_config.json` as read, or the default for Python.
    config: Value,
    prompt: Prompt,
    bos: Option<i64>,
    eos: i64,
    vocab_size: i64,
}

impl TextTokenizer {
    /// Opens `folder/tokenizer.json`, or converts `folder/tokenizer.model` (SentencePiece BPE) like `transformers`.
    ///
    /// # Errors
    /// [`Error::Weights`] when neither file exists or can be read, or when the tokenizer does not fit `prompt`.
    pub fn open(folder: &Path, prompt: &Prompt) -> Result<Self> {
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
            Err(error) if error.kind() == ErrorKind::NotFound => default_config(prompt),
            Err(error) => return Err(Error::io(&config_path, "read")(error)),
        };
        Self::new(inner, config, prompt, &path)
    }

    /// Trains a small tokenizer of Llama's kind (BPE with byte fallback): `<unk>` 0, `<s>` 1, `</s>` 2, 256 byte pieces, characters, merges.
    ///
    /// The result depends only on the texts, not on their order. Merges stay inside words (with the space before
    /// them); newlines, digits and punctuation marks are never merged. Fewer than `vocab_size` pieces come out when
    /// every word is a piece before that.
    ///
    /// # Errors
    /// [`Error::Config`] when `vocab_size` leaves no room for characters.
    pub fn train(texts: &[&str], vocab_size: usize, prompt: &Prompt) -> Result<Self> {
        let json = train::train(texts, vocab_size)?;
        let inner = parse(&json).expect("a trained vocabulary contains every piece of its merges");
        Self::new(inner, default_config(prompt), prompt, Path::new("tokenizer.json"))
    }

    fn new(mut inner: Tokenizer, config: Value, prompt: &Prompt, path: &Path) -> Result<Self> {
        // A file may contain the truncation or padding settings of the program that saved it.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| damaged(path, &*error))?;
        let special = |token: &str| {
            inner.token_to_id(token).map(i64::from).ok_or_else(|| {
                Error::weights(path, format!("has no piece `{token}`, which the prompt needs"), TOKENIZER_HINT)
            })
        };
        let (bos, eos) = (prompt.begin.as_deref().map(special).transpose()?, special(&prompt.end)?);
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| i64::from(id) + 1);
        let this = Self { inner, config, prompt: prompt.clone(), bos, eos, vocab_size };
        let probe = this.encode("a")?;
        if bos.is_some() && probe.first() != bos.as_ref() || probe.last() == Some(&eos) {
            let begin = prompt.begin.as_deref().unwrap_or_default();
            let reason = format!("does not put `{begin}` (and nothing else) around a text, as the prompt needs it");
            return Err(Error::weights(path, reason, TOKENIZER_HINT));
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
        let fitted = Self::new(inner, self.config, &self.prompt, folder)?;
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
        let Prompt { begin, end, .. } = &self.prompt;
        let unknown = self.inner.token_to_id(UNK).map(|_| UNK);
        let pad = unknown.unwrap_or(&**end);
        let map = json!({ "bos_token": begin, "eos_token": end, "pad_token": pad, "unk_token": unknown });
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

    /// The prompt of the model.
    pub fn prompt(&self) -> &Prompt {
        &self.prompt
    }

    /// The id of the token before every text.
    pub fn bos(&self) -> Option<i64> {
        self.bos
    }

    /// The id of the token that ends an answer.
    pub fn eos(&self) -> i64 {
        self.eos
    }

    /// The ids of one text: the token that begins texts, if there is one, and its pieces.
    ///
    /// # Errors
    /// [`Error::Weights`] when the tokenizer has no piece for something and no `<unk>`.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        let encoding = self
            .inner
            .encode_fast(text, self.bos.is_some())
            .map_err(|error| damaged(Path::new("tokenizer"), &*error))?;
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

    /// The token that begins texts, the text before the image, the image and the pieces of `text`.
    fn after_image(&self, text: &str) -> Result<Vec<i64>> {
        let pieces = |text: &str| Ok(self.encode(text)?.into_iter().skip(self.bos.iter().len()));
        let mut ids: Vec<i64> = self.bos.into_iter().collect();
        if !self.prompt.before_image.is_empty() {
            ids.extend(pieces(&self.prompt.before_image)?);
        }
        ids.push(IMAGE_TOKEN);
        ids.extend(pieces(text)?);
        Ok(ids)
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
    /// Prompt with the question and [`IMAGE_TOKEN`], answer.
    pub ids: Vec<i64>,
    /// `ids[answer_start..]` is the answer (with the token that ends it if requested).
    pub answer_start: usize,
}

/// The ids of question and answer for training.
///
/// # Errors
/// [`Error::Weights`] when the tokenizer merges the end of the prompt with the answer.
pub fn training_prompt(tok: &TextTokenizer, question: &str, answer: &str, with_eos: bool) -> Result<PromptIds> {
    let PromptIds { ids: prompt, answer_start } = question_prompt(tok, question)?;
    let mut ids = tok.after_image(&(tok.prompt.render(question) + answer))?;
    if !ids.starts_with(&prompt) {
        return Err(Error::weights(
            "tokenizer",
            "merges the end of the prompt with an answer, so a prompt would depend on its answer",
            TOKENIZER_HINT,
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
    let ids = tok.after_image(&tok.prompt.render(question))?;
    Ok(PromptIds { answer_start: ids.len(), ids })
}

fn damaged(path: &Path, error: &(dyn std::error::Error + 'static)) -> Error {
    Error::weights(path, error.to_string(), HINT)
}

fn parse(json: &Value) -> Result<Tokenizer, String> {
    serde_json::to_vec(json).map_err(|error| error.to_string()).and_then(|bytes| checked::read(&bytes))
}

/// `tokenizer_config.json` for Python's `transformers`.
fn default_config(prompt: &Prompt) -> Value {
    json!({
        "bos_token": prompt.begin,
        "clean_up_tokenization_spaces": false,
        "eos_token": prompt.end,
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
