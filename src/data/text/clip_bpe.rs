//! CLIP's tokenizer: text to the 77 ids that a text tower of Stable Diffusion reads.
//!
//! Lower-cased words, cut into pieces by byte pair encoding; a piece that ends a word has `</w>`. Source: Radford et
//! al. 2021 and `CLIPTokenizer` of transformers 5 (same regular expressions, same pieces). As there, the pad token is
//! special: the second tokenizer of SDXL pads with `!`, so a `!` in a prompt becomes its id 0 (diffusers issue 4153).
//! Deviation: special tokens are matched as they are spelled, before lower-casing.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::{AddedToken, Tokenizer};

use super::{HINT, checked, damaged, parse};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Ids of one text, start, end and padding included: the positions of the text tower.
pub const CONTEXT: usize = 77;

const BOS: &str = "<|startoftext|>";
/// End of a text; CLIP pads with it.
const EOS: &str = "<|endoftext|>";
const WORD_END: &str = "</w>";
const WORDS: &str = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// One text, ready for the text tower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedPrompt {
    /// [`CONTEXT`] ids: start, pieces, end, padding.
    pub ids: Vec<i64>,
    /// Whether the text was truncated.
    pub truncated: bool,
}

/// CLIP's tokenizer with its special tokens.
#[derive(Debug, Clone)]
pub struct PromptTokenizer {
    inner: Tokenizer,
    bos: i64,
    eos: i64,
    pad: i64,
}

impl PromptTokenizer {
    /// Opens `folder/vocab.json` with `folder/merges.txt`, else `folder/tokenizer.json`; the pad token is what
    /// `special_tokens_map.json` or `tokenizer_config.json` names, else the end token.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Weights`] when the files are missing, damaged or not those of a CLIP tokenizer.
    pub fn open(folder: &Path) -> Result<Self> {
        let pad = pad_token(folder)?.unwrap_or_else(|| EOS.into());
        let (vocab_path, merges_path) = (folder.join("vocab.json"), folder.join("merges.txt"));
        let whole = folder.join("tokenizer.json");
        if vocab_path.exists() && merges_path.exists() {
            let vocab = files::read(&vocab_path, files::MAX_VOCABULARY).map_err(Error::io(&vocab_path, "read"))?;
            let vocab: BTreeMap<String, u32> =
                serde_json::from_slice(&vocab).map_err(|error| damaged(&vocab_path, &error))?;
            let merges =
                files::read_to_string(&merges_path, files::MAX_VOCABULARY).map_err(Error::io(&merges_path, "read"))?;
            let merges = merges.lines().filter(|line| !line.starts_with("#version") && !line.is_empty());
            let merges: Vec<&str> = merges.collect();
            let inner = parse(&clip_json(&vocab, &merges))
                .map_err(|reason| Error::weights(&merges_path, reason, "download or copy both files again"))?;
            Self::new(inner, &pad, &vocab_path)
        } else if whole.exists() {
            let bytes = files::read(&whole, files::MAX_VOCABULARY).map_err(Error::io(&whole, "read"))?;
            let inner = checked::read(&bytes).map_err(|reason| Error::weights(&whole, reason, HINT))?;
            Self::new(inner, &pad, &whole)
        } else {
            let hint = "name the `tokenizer` folder of a Stable Diffusion model, or copy its files into it";
            let reason = "contains neither `vocab.json` with `merges.txt` nor `tokenizer.json`";
            Err(Error::weights(folder, reason, hint))
        }
    }

    /// A tokenizer for models with random weights: a piece for each byte inside and at the end of a word, no merges,
    /// and the start and end tokens as the last two ids below `vocab_size`.
    ///
    /// # Errors
    /// [`Error::Config`] when `vocab_size` is below 514.
    pub fn bytes(vocab_size: usize) -> Result<Self> {
        let letters = byte_letters();
        let pieces = letters.iter().map(char::to_string).chain(letters.iter().map(|c| format!("{c}{WORD_END}")));
        let pieces: Vec<String> = pieces.collect();
        if vocab_size < pieces.len() + 2 {
            let reason = format!("{vocab_size} ids are too few for all bytes and two special tokens");
            return Err(Error::config("vocab_size", reason, format!("use {} or more", pieces.len() + 2)));
        }
        let specials = [(BOS.to_owned(), vocab_size - 2), (EOS.to_owned(), vocab_size - 1)];
        let ids = pieces.into_iter().zip(0..).chain(specials);
        let vocab = ids.filter_map(|(piece, id)| Some((piece, u32::try_from(id).ok()?))).collect();
        let inner = parse(&clip_json(&vocab, &[])).expect("every byte has a piece");
        Self::new(inner, EOS, Path::new("vocab.json"))
    }

    fn new(mut inner: Tokenizer, pad: &str, path: &Path) -> Result<Self> {
        // A file may contain the truncation or padding settings of the program that saved it.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| damaged(path, &*error))?;
        let id = |inner: &Tokenizer, token: &str| {
            inner.token_to_id(token).map(i64::from).ok_or_else(|| {
                let reason = format!("has no piece `{token}`");
                Error::weights(path, reason, "use the tokenizer files of a Stable Diffusion model")
            })
        };
        let (bos, eos, pad_id) = (id(&inner, BOS)?, id(&inner, EOS)?, id(&inner, pad)?);
        inner.add_special_tokens(&[BOS, EOS, pad].map(|token| AddedToken::from(token, true)));
        Ok(Self { inner, bos, eos, pad: pad_id })
    }

    /// The ids of `text`, truncated before the end token if it is too long.
    ///
    /// # Errors
    /// [`Error::Weights`] from a tokenizer whose parts do not fit together.
    pub fn encode(&self, text: &str) -> Result<TokenizedPrompt> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| damaged(Path::new("tokenizer"), &*error))?;
        let pieces = encoding.get_ids();
        let room = CONTEXT - 2;
        let mut ids = vec![self.bos];
        ids.extend(pieces.iter().take(room).map(|&id| i64::from(id)));
        ids.push(self.eos);
        ids.resize(CONTEXT, self.pad);
        Ok(TokenizedPrompt { ids, truncated: pieces.len() > room })
    }
}

/// The pad token from the files in the vocabulary's folder. A token is a string or an object with `content`.
fn pad_token(folder: &Path) -> Result<Option<String>> {
    for name in ["special_tokens_map.json", "tokenizer_config.json"] {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let bytes = files::read(&path, files::MAX_SETTINGS).map_err(Error::io(&path, "read"))?;
        let map: Value = serde_json::from_slice(&bytes).map_err(|error| damaged(&path, &error))?;
        let token = &map["pad_token"];
        if let Some(token) = token.as_str().or_else(|| token["content"].as_str()) {
            return Ok(Some(token.to_owned()));
        }
    }
    Ok(None)
}

/// The letters that represent the bytes, in the order of CLIP's ids: printable bytes first, then the others.
fn byte_letters() -> Vec<char> {
    let printable = (33..=126).chain(161..=172).chain(174..=255);
    let printable: Vec<char> = printable.filter_map(char::from_u32).collect();
    let rest = (0..256 - printable.len()).filter_map(|k| char::from_u32(256 + u32::try_from(k).ok()?));
    printable.iter().copied().chain(rest).collect()
}

/// `tokenizer.json` of a CLIP tokenizer with these pieces and merges (`left right`, best first).
fn clip_json(vocab: &BTreeMap<String, u32>, merges: &[&str]) -> Value {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "NFC" },
            { "type": "Replace", "pattern": { "Regex": r"\s+" }, "content": " " },
            { "type": "Lowercase" },
        ]},
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": WORDS }, "behavior": "Removed", "invert": true },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        ]},
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": EOS, "continuing_subword_prefix": "",
            "end_of_word_suffix": WORD_END, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of OpenAI's vocabulary, with its ids, that the test texts use.
    fn cut(name: &str) -> PromptTokenizer {
        PromptTokenizer::open(&fixtures().join(name)).unwrap()
    }

    fn fixtures() -> std::path::PathBuf {
        crate::fixture::checkout().join("tests/fixtures/clip_bpe")
    }

    fn padded(pieces: &[i64], pad: i64) -> Vec<i64> {
        let mut ids = [&[49406], pieces, &[49407]].concat();
        ids.resize(CONTEXT, pad);
        ids
    }

    #[test]
    fn golden_ids() {
        let cases: [(&str, &[i64]); 7] = [
            ("a photo of a cat", &[320, 1125, 539, 320, 2368]),
            ("a colonoscopy image of a polyp", &[320, 8280, 78, 20018, 2867, 539, 320, 6833, 335]),
            (
                "breast ultrasound, malignant tumor; 3.5 cm",
                &[9475, 29717, 267, 41122, 773, 22616, 282, 274, 269, 276, 3741],
            ),
            ("T2-weighted MRI of the brain", &[339, 273, 268, 43179, 24773, 539, 518, 4812]),
            ("it's the patient's lesion!!", &[585, 568, 518, 6262, 568, 534, 1015, 748]),
            ("Lésion cutanée  dermoscopy", &[39641, 1015, 729, 2123, 13489, 839, 9840, 7504]),
            ("", &[]),
        ];
        let tokenizer = cut("tokenizer");
        for (text, pieces) in cases {
            let want = TokenizedPrompt { ids: padded(pieces, 49407), truncated: false };
            assert_eq!(tokenizer.encode(text).unwrap(), want, "{text}");
        }
        let second = cut("tokenizer_2").encode("it's the patient's lesion!!").unwrap();
        assert_eq!(second.ids, padded(&[585, 568, 518, 6262, 568, 534, 1015, 0, 0], 0));
    }

    #[test]
    fn texts_of_the_library() {
        let text = std::fs::read_to_string(fixtures().join("golden.json")).unwrap();
        let golden: Value = serde_json::from_str(&text).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() >= 10, "{} cases", cases.len());
        let [first, second] = ["tokenizer", "tokenizer_2"].map(cut);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            for (name, tokenizer) in [("tokenizer", &first), ("tokenizer_2", &second)] {
                let want: Vec<i64> = serde_json::from_value(case[name].clone()).unwrap();
                assert_eq!(tokenizer.encode(text).unwrap().ids, want, "{name}: {text}");
            }
        }
    }

    #[test]
    fn long_texts_keep_their_end() {
        let tokenizer = cut("tokenizer");
        let long = tokenizer.encode(&"polyp ".repeat(200)).unwrap();
        assert!(long.truncated);
        assert_eq!((long.ids.len(), &long.ids[..3], long.ids[76]), (77, &[49406, 6833, 335][..], 49407));
        // 75 pieces are the most that fit.
        let full = tokenizer.encode(&"a ".repeat(75)).unwrap();
        assert!(!full.truncated && full.ids[75] == 320 && full.ids[76] == 49407);
        assert!(tokenizer.encode(&"a ".repeat(76)).unwrap().truncated);
    }

    #[test]
    fn bytes_without_merges() {
        let tokenizer = PromptTokenizer::bytes(1000).unwrap();
        let ids = tokenizer.encode("Ab! ß").unwrap().ids;
        // `a` is byte 97, the 64th printable letter after `!`; ß is two bytes, 195 and 159.
        let place = |byte: u32| byte_letters().iter().position(|&c| c == char::from_u32(byte).unwrap()).unwrap();
        assert_eq!((place(33), place(97), place(161)), (0, 64, 94));
        let second_of_sz = ids[5] - 256;
        assert_eq!(&ids[..5], &[998, 64, 65 + 256, 256, i64::try_from(place(195)).unwrap()]);
        assert!((188..256).contains(&second_of_sz), "byte 159 has no letter of its own: {second_of_sz}");
        assert!(ids[6..].iter().all(|&id| id == 999));
        assert!(matches!(PromptTokenizer::bytes(513), Err(Error::Config { .. })));
    }

    #[test]
    fn a_saved_tokenizer_json_is_as_good() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = cut("tokenizer");
        tokenizer.inner.save(folder.path().join("tokenizer.json"), false).unwrap();
        let again = PromptTokenizer::open(folder.path()).unwrap();
        let text = "breast ultrasound, malignant tumor; 3.5 cm";
        assert_eq!(again.encode(text).unwrap(), tokenizer.encode(text).unwrap());
    }

    #[test]
    fn missing_and_damaged_files_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        assert!(PromptTokenizer::open(folder.path()).unwrap_err().to_string().contains("merges.txt"));
        std::fs::write(folder.path().join("vocab.json"), r#"{"a": 0, "b": 1}"#).unwrap();
        std::fs::write(folder.path().join("merges.txt"), "#version: 0.2\na b\n").unwrap();
        let error = PromptTokenizer::open(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Weights { .. }), "{error}");
    }
}
