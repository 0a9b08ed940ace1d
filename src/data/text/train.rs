//! Trains a small byte-pair encoding: the most frequent pair becomes a new piece, repeatedly.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::Value;

use super::{BOS, EOS, UNK, llama_json};
use prsmed_base::error::{Error, Result};

/// `<unk>`, `<s>`, `</s>` and the byte pieces.
const RESERVED: usize = 3 + 256;

/// The JSON of `tokenizer.json`.
pub(super) fn train(texts: &[&str], vocab_size: usize) -> Result<Value> {
    let words = words(texts);
    let alphabet = alphabet(&words);
    // Characters beyond half of the room are left to the byte pieces, rarest first.
    let room = vocab_size.saturating_sub(RESERVED) / 2;
    if room == 0 {
        let reason = format!("{vocab_size} pieces leave no room after the {RESERVED} special and byte pieces");
        return Err(Error::config("vocab_size", reason, "use at least 300"));
    }
    let alphabet: BTreeSet<char> = alphabet.into_iter().take(room).collect();

    let mut pieces: Vec<String> = [UNK, BOS, EOS].map(str::to_owned).to_vec();
    pieces.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    pieces.extend(alphabet.iter().map(char::to_string));
    let mut ids: HashMap<String, usize> = pieces.iter().cloned().enumerate().map(|(id, piece)| (piece, id)).collect();

    // A character outside the alphabet ends a word: its bytes merge with nothing.
    let mut words: Vec<(Vec<usize>, u64)> = words
        .iter()
        .flat_map(|(word, &count)| {
            word.split(|c| !alphabet.contains(&c))
                .map(|part| (part.chars().map(|c| ids[&c.to_string()]).collect(), count))
                .collect::<Vec<_>>()
        })
        .collect();
    let mut merges = Vec::new();
    while pieces.len() < vocab_size {
        let Some((left, right)) = best_pair(&words, &pieces) else { break };
        let merged = format!("{}{}", pieces[left], pieces[right]);
        let id = *ids.entry(merged.clone()).or_insert_with(|| {
            pieces.push(merged);
            pieces.len() - 1
        });
        merges.push((left, right));
        for (word, _) in &mut words {
            merge(word, (left, right), id);
        }
    }
    let texts: Vec<&str> = pieces.iter().map(String::as_str).collect();
    let merges: Vec<(&str, &str)> = merges.iter().map(|&(l, r)| (texts[l], texts[r])).collect();
    Ok(llama_json(&texts, &merges, &[(0, true), (1, true), (2, true)]))
}

/// Words with their leading `▁` and how often they occur. Newlines belong to no word; digits and punctuation marks are
/// words of their own, so that `lesion.` and `lesion,` share a piece.
fn words(texts: &[&str]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for text in texts {
        let mut word = String::new();
        let mut end = |word: &mut String| {
            if !word.is_empty() {
                *counts.entry(std::mem::take(word)).or_insert(0) += 1;
            }
        };
        for c in std::iter::once(' ').chain(text.chars()) {
            if c.is_alphabetic() {
                word.push(c);
                continue;
            }
            // A space starts a word; a run of spaces stays single pieces.
            end(&mut word);
            if c == ' ' {
                word.push('▁');
            } else if !c.is_control() {
                word.push(c);
                end(&mut word);
            }
        }
        end(&mut word);
    }
    counts
}

/// The characters, most frequent first, ties by code point.
fn alphabet(words: &BTreeMap<String, u64>) -> Vec<char> {
    let mut counts: BTreeMap<char, u64> = BTreeMap::new();
    for (word, count) in words {
        for c in word.chars() {
            *counts.entry(c).or_insert(0) += count;
        }
    }
    let mut alphabet: Vec<char> = counts.keys().copied().collect();
    alphabet.sort_by_key(|c| std::cmp::Reverse(counts[c]));
    alphabet
}

/// The most frequent pair of neighbours, ties by text.
fn best_pair(words: &[(Vec<usize>, u64)], pieces: &[String]) -> Option<(usize, usize)> {
    let mut counts: HashMap<(usize, usize), u64> = HashMap::new();
    for (word, count) in words {
        for pair in word.windows(2) {
            *counts.entry((pair[0], pair[1])).or_insert(0) += count;
        }
    }
    let text = |(left, right): (usize, usize)| (&pieces[left], &pieces[right]);
    counts
        .into_iter()
        .min_by(|(a, left), (b, right)| right.cmp(left).then_with(|| text(*a).cmp(&text(*b))))
        .map(|(pair, _)| pair)
}

fn merge(word: &mut Vec<usize>, (left, right): (usize, usize), id: usize) {
    let mut at = 0;
    while at + 1 < word.len() {
        if word[at] == left && word[at + 1] == right {
            word[at] = id;
            word.remove(at + 1);
        }
        at += 1;
    }
}
