//! `tokenizer.model` (a SentencePiece BPE model, a protocol buffer) as a `tokenizer.json`.
//!
//! Source: `sentencepiece_model.proto`; `LlamaConverter` and `generate_merges` in transformers'
//! `convert_slow_tokenizer.py` of release 4.42 (later ones order merges of equal score differently), legacy behaviour
//! (a `▁` before every text). The model's own normalizer is not applied, as there: Llama's is the identity.

use std::collections::HashMap;

use serde_json::Value;

use super::{BOS, EOS, UNK, llama_json};

/// Types of pieces in the file.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// `trainer_spec.model_type` of BPE.
const BPE: u64 = 2;

type Result<T> = std::result::Result<T, String>;

struct Piece {
    text: String,
    score: f32,
    kind: u64,
}

/// The JSON of `tokenizer.json`; an error is the reason for a message.
pub(super) fn convert(bytes: &[u8]) -> Result<Value> {
    let (mut pieces, model_type) = model(bytes)?;
    if model_type != BPE {
        return Err(format!("is a SentencePiece model of type {model_type}; only BPE ({BPE}) is read here"));
    }
    if pieces.len() < 3 || pieces[0].kind != UNKNOWN {
        return Err("does not begin with `<unk>`, `<s>` and `</s>` as Llama's vocabulary does".into());
    }
    for (piece, name) in pieces.iter_mut().zip([UNK, BOS, EOS]) {
        name.clone_into(&mut piece.text);
        piece.score = 0.0;
    }
    let texts: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
    let ids: HashMap<&str, usize> = texts.iter().enumerate().map(|(id, text)| (*text, id)).collect();
    if ids.len() != texts.len() {
        return Err("contains a piece twice".into());
    }
    let merges = merges(&pieces, &ids);
    let added: Vec<(usize, bool)> = pieces
        .iter()
        .enumerate()
        .filter(|(id, piece)| *id < 3 || matches!(piece.kind, CONTROL | USER_DEFINED))
        .map(|(id, piece)| (id, id < 3 || piece.kind == CONTROL))
        .collect();
    Ok(llama_json(&texts, &merges, &added))
}

/// Every way to cut a piece into two pieces, best score first; ties by id of the piece, then ids of the parts.
fn merges<'a>(pieces: &'a [Piece], ids: &HashMap<&str, usize>) -> Vec<(&'a str, &'a str)> {
    let mut found = Vec::new();
    for piece in pieces {
        let mut local = Vec::new();
        for (cut, _) in piece.text.char_indices().skip(1) {
            let (left, right) = piece.text.split_at(cut);
            if let (Some(&l), Some(&r)) = (ids.get(left), ids.get(right)) {
                local.push(((l, r), piece.score, (left, right)));
            }
        }
        local.sort_by_key(|(ids, ..)| *ids);
        found.extend(local);
    }
    // Stable, so equal keys keep the order of the loop above.
    found.sort_by(|(_, a, _), (_, b, _)| b.total_cmp(a));
    found.into_iter().map(|(_, _, merge)| merge).collect()
}

/// `ModelProto`: pieces (1) and the model type in `trainer_spec` (2).
fn model(bytes: &[u8]) -> Result<(Vec<Piece>, u64)> {
    let (mut pieces, mut model_type) = (Vec::new(), 1);
    for field in fields(bytes)? {
        match field {
            (1, Field::Bytes(piece)) => pieces.push(self::piece(piece)?),
            (2, Field::Bytes(spec)) => {
                for field in fields(spec)? {
                    if let (3, Field::Number(kind)) = field {
                        model_type = kind;
                    }
                }
            }
            _ => {}
        }
    }
    if pieces.is_empty() {
        return Err("is not a SentencePiece model: it contains no pieces".into());
    }
    Ok((pieces, model_type))
}

fn piece(bytes: &[u8]) -> Result<Piece> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: 1 };
    for field in fields(bytes)? {
        match field {
            (1, Field::Bytes(text)) => {
                piece.text = String::from_utf8(text.to_vec()).map_err(|_| "contains a piece that is not UTF-8")?;
            }
            #[expect(clippy::cast_possible_truncation, reason = "a 32-bit field has 32 bits")]
            (2, Field::Number(bits)) => piece.score = f32::from_bits(bits as u32),
            (3, Field::Number(kind)) => piece.kind = kind,
            _ => {}
        }
    }
    Ok(piece)
}

/// A field of a protocol buffer message: a number of any width, or bytes.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

fn fields(mut bytes: &[u8]) -> Result<Vec<(u64, Field<'_>)>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)?),
            1 => Field::Number(fixed(take(&mut bytes, 8)?)),
            2 => {
                let length = varint(&mut bytes)?;
                Field::Bytes(take(&mut bytes, length)?)
            }
            5 => Field::Number(fixed(take(&mut bytes, 4)?)),
            _ => return Err("is damaged or not a SentencePiece model".into()),
        };
        found.push((key >> 3, field));
    }
    Ok(found)
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8]> {
    let length = usize::try_from(length).ok().filter(|&length| length <= bytes.len());
    let (head, tail) = bytes.split_at(length.ok_or("is truncated or not a SentencePiece model")?);
    *bytes = tail;
    Ok(head)
}

fn fixed(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn varint(bytes: &mut &[u8]) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("is damaged or not a SentencePiece model".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_else_is_an_error_with_a_reason() {
        for bytes in [&b""[..], b"\x0a", b"\x0a\xff", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"{\"a\": 1}"] {
            assert!(convert(bytes).is_err(), "{bytes:?}");
        }
        // One piece `a`, model type 1 (unigram).
        let reason = convert(b"\x0a\x03\x0a\x01a\x12\x02\x18\x01").unwrap_err();
        assert!(reason.contains("type 1"), "{reason}");
        let reason = convert(b"\x0a\x03\x0a\x01a\x12\x02\x18\x02").unwrap_err();
        assert!(reason.contains("does not begin with `<unk>`"), "{reason}");
    }
}
