//! Similarity of a generated answer and the reference answer: BLEU, ROUGE-1 and METEOR of one pair, and BLEU of a
//! corpus.
//!
//! Sources: Hugging Face `evaluate`'s `bleu` (order 4, no smoothing, tokenizer 13a), `rouge_score` 0.1.2 with its
//! stemmer, `nltk.translate.meteor_score`.
//!
//! There are two averages of BLEU. The mean of [`bleu()`] over answers counts each answer equally, and an answer without
//! a common 4-gram counts 0. Corpus BLEU ([`BleuCounts`]) adds up the n-gram counts of all answers first; this is the
//! number that `sacrebleu` and `evaluate` report.
//!
//! Deviations: METEOR matches exact words and stems but no WordNet synonyms, hence its name. It splits sentences at a
//! period before a capital letter instead of with nltk's trained model. `rouge_score` knows no letters but those of
//! ASCII; here words of all scripts count. In scripts without spaces every character is a word.

use std::collections::HashMap;
use std::sync::LazyLock;

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::porter::stem;

/// Largest n-gram of [`bleu`].
const BLEU_ORDER: usize = 4;

/// Three scores of one answer, or their means over answers, each in `0..=1`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TextScores {
    /// [`bleu`].
    pub bleu: f64,
    /// [`rouge1_f1`].
    pub rouge1: f64,
    /// [`meteor_exact_stem`].
    pub meteor_exact_stem: f64,
}

impl TextScores {
    /// Adds the scores of another answer to the sums.
    pub(super) fn add(&mut self, other: &Self) {
        self.bleu += other.bleu;
        self.rouge1 += other.rouge1;
        self.meteor_exact_stem += other.meteor_exact_stem;
    }

    /// The means of `count` answers from their sums.
    pub(super) fn divided(&self, count: f64) -> Self {
        let Self { bleu, rouge1, meteor_exact_stem } = self;
        Self { bleu: bleu / count, rouge1: rouge1 / count, meteor_exact_stem: meteor_exact_stem / count }
    }

    /// Scores one answer.
    pub fn of(answer: &str, reference: &str) -> Self {
        Self {
            bleu: bleu(answer, reference),
            rouge1: rouge1_f1(answer, reference),
            meteor_exact_stem: meteor_exact_stem(answer, reference),
        }
    }
}

/// BLEU of one sentence with orders 1 to 4, without smoothing. An answer without a common 4-gram scores 0; so does
/// every answer or reference with fewer than four tokens.
pub fn bleu(answer: &str, reference: &str) -> f64 {
    BleuCounts::of(answer, reference).bleu()
}

/// N-gram counts of answers, summed over a corpus.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BleuCounts {
    /// N-grams that answer and reference share, for orders 1 to 4.
    matches: [usize; BLEU_ORDER],
    /// N-grams of the answers, for orders 1 to 4.
    ngrams: [usize; BLEU_ORDER],
    answer_tokens: usize,
    reference_tokens: usize,
}

impl BleuCounts {
    /// Counts of one answer.
    pub fn of(answer: &str, reference: &str) -> Self {
        let (answer, reference) = (tokens_13a(answer), tokens_13a(reference));
        let orders = [1, 2, 3, 4];
        Self {
            matches: orders.map(|order| overlap(answer.windows(order), reference.windows(order))),
            ngrams: orders.map(|order| (answer.len() + 1).saturating_sub(order)),
            answer_tokens: answer.len(),
            reference_tokens: reference.len(),
        }
    }

    /// BLEU with orders 1 to 4, without smoothing; 0 if answers and references share no 4-gram.
    pub fn bleu(&self) -> f64 {
        if self.matches.contains(&0) {
            return 0.0;
        }
        let parts = self.matches.iter().zip(self.ngrams);
        let log_sum: f64 = parts.map(|(&matches, ngrams)| (as_f64(matches) / as_f64(ngrams)).ln() / 4.0).sum();
        let ratio = as_f64(self.answer_tokens) / as_f64(self.reference_tokens);
        let brevity = if ratio > 1.0 { 1.0 } else { (1.0 - 1.0 / ratio).exp() };
        log_sum.exp() * brevity
    }
}

impl std::ops::AddAssign for BleuCounts {
    fn add_assign(&mut self, other: Self) {
        for order in 0..BLEU_ORDER {
            self.matches[order] += other.matches[order];
            self.ngrams[order] += other.ngrams[order];
        }
        self.answer_tokens += other.answer_tokens;
        self.reference_tokens += other.reference_tokens;
    }
}

/// F1 of ROUGE-1 with stemming; symmetric in its arguments.
pub fn rouge1_f1(answer: &str, reference: &str) -> f64 {
    let (answer, reference) = (rouge_tokens(answer), rouge_tokens(reference));
    let matches = as_f64(overlap(answer.iter(), reference.iter()));
    let precision = matches / as_f64(answer.len().max(1));
    let recall = matches / as_f64(reference.len().max(1));
    if precision + recall > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}

/// METEOR (alpha 0.9, beta 3, gamma 0.5) with exact matches, then stem matches; case-insensitive.
pub fn meteor_exact_stem(answer: &str, reference: &str) -> f64 {
    let lower = |text: &str| words(text).into_iter().map(|word| word.to_lowercase()).collect::<Vec<_>>();
    let (answer, reference) = (lower(answer), lower(reference));
    let mut pairs = Vec::new();
    let (mut left, mut right): (Vec<usize>, Vec<usize>) = ((0..answer.len()).collect(), (0..reference.len()).collect());
    match_words(&answer, &reference, &mut left, &mut right, &mut pairs);
    let stems = |words: &[String]| words.iter().map(|word| stem(word)).collect::<Vec<_>>();
    match_words(&stems(&answer), &stems(&reference), &mut left, &mut right, &mut pairs);
    if pairs.is_empty() {
        return 0.0;
    }
    pairs.sort_unstable();
    let breaks = pairs.windows(2).filter(|w| w[1].0 != w[0].0 + 1 || w[1].1 != w[0].1 + 1).count();
    let matches = as_f64(pairs.len());
    let precision = matches / as_f64(answer.len());
    let recall = matches / as_f64(reference.len());
    let mean = precision * recall / (0.9 * precision + 0.1 * recall);
    let fragmentation = as_f64(breaks + 1) / matches;
    (1.0 - 0.5 * fragmentation.powi(3)) * mean
}

/// Matches equal words: the last word of the answer with the last free one of the reference. It removes them from the
/// free positions `left` and `right`.
fn match_words(
    answer: &[String],
    reference: &[String],
    left: &mut Vec<usize>,
    right: &mut Vec<usize>,
    pairs: &mut Vec<(usize, usize)>,
) {
    for position in (0..left.len()).rev() {
        let i = left[position];
        if let Some(other) = right.iter().rposition(|&j| reference[j] == answer[i]) {
            pairs.push((i, right.remove(other)));
            left.remove(position);
        }
    }
}

/// Number of items that two sequences share, counted with multiplicity.
fn overlap<T: std::hash::Hash + Eq>(a: impl Iterator<Item = T>, b: impl Iterator<Item = T>) -> usize {
    let mut free: HashMap<T, usize> = HashMap::new();
    for item in b {
        *free.entry(item).or_default() += 1;
    }
    a.filter(|item| free.get_mut(item).is_some_and(|n| n.checked_sub(1).map(|less| *n = less).is_some())).count()
}

fn as_f64(count: usize) -> f64 {
    count as f64
}

/// Tokens of mteval-v13a, as in `sacrebleu` and `evaluate`.
fn tokens_13a(text: &str) -> Vec<String> {
    let mut text = text.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    for (entity, character) in [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")] {
        text = text.replace(entity, character);
    }
    let mut spaced = String::with_capacity(text.len() * 2);
    for c in format!(" {text} ").chars() {
        // the classes {-~ [-` space-& (-+ :-@ and /: all ASCII punctuation except ' , - .
        if matches!(c, '{'..='~' | '['..='`' | ' '..='&' | '('..='+' | ':'..='@' | '/') {
            spaced.extend([' ', c, ' ']);
        } else {
            spaced.push(c);
        }
    }
    let spaced = space_pairs(&spaced, |a, b| !a.is_ascii_digit() && ['.', ','].contains(&b), |a, b| [a, ' ', b, ' ']);
    let spaced = space_pairs(&spaced, |a, b| ['.', ','].contains(&a) && !b.is_ascii_digit(), |a, b| [' ', a, ' ', b]);
    let spaced = space_pairs(&spaced, |a, b| a.is_ascii_digit() && b == '-', |a, b| [a, ' ', b, ' ']);
    spaced.split(is_python_space).filter(|token| !token.is_empty()).map(str::to_owned).collect()
}

/// Rewrites each pair of neighbours that matches, from left to right, without overlaps.
fn space_pairs(text: &str, fits: impl Fn(char, char) -> bool, spaced: impl Fn(char, char) -> [char; 4]) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut rest = text.chars().peekable();
    while let Some(a) = rest.next() {
        match rest.peek() {
            Some(&b) if fits(a, b) => {
                out.extend(spaced(a, b));
                rest.next();
            }
            _ => out.push(a),
        }
    }
    out
}

/// Whitespace of Python's `str.split()`, which includes the four ASCII separators.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Words of letters, marks and digits, and single characters of scripts that are written without spaces.
static ROUGE_TOKEN: LazyLock<Regex> = LazyLock::new(|| {
    let unspaced = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}";
    Regex::new(&format!(r"[{unspaced}--\p{{M}}]\p{{M}}*|[\w--_--[{unspaced}]]+")).expect("a regular expression")
});

fn rouge_tokens(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let tokens = ROUGE_TOKEN.find_iter(&lower).map(|found| found.as_str());
    tokens.map(|token| if token.len() > 3 && token.is_ascii() { stem(token) } else { token.to_owned() }).collect()
}

/// Words like those of nltk's `word_tokenize` for plain English: punctuation and clitics (`n't`, `'s`) are separate
/// tokens, hyphens and decimals stay, and a period is separate only at the end of a sentence.
fn words(text: &str) -> Vec<String> {
    let pieces: Vec<&str> = text.split_whitespace().collect();
    let mut out = Vec::new();
    for (i, piece) in pieces.iter().enumerate() {
        let ends_sentence = pieces.get(i + 1).is_none_or(|next| next.chars().next().is_some_and(char::is_uppercase));
        split_piece(piece, ends_sentence, &mut out);
    }
    out
}

fn split_piece(piece: &str, ends_sentence: bool, out: &mut Vec<String>) {
    let core = piece.trim_start_matches(is_detached);
    out.extend(piece[..piece.len() - core.len()].chars().map(String::from));
    let mut core = core;
    let mut tail: Vec<String> = Vec::new();
    while let Some(last) = core.chars().next_back() {
        let ellipsis = core.len() - core.trim_end_matches('.').len();
        if ellipsis > 1 {
            tail.push(".".repeat(ellipsis));
            core = &core[..core.len() - ellipsis];
        } else if is_detached(last) || last == '\'' || last == '.' && ends_sentence && !is_abbreviation(core) {
            tail.push(last.to_string());
            core = &core[..core.len() - last.len_utf8()];
        } else {
            break;
        }
    }
    split_inside(core, out);
    out.extend(tail.into_iter().rev());
}

/// True for characters that are always separate tokens at the border of a word.
fn is_detached(c: char) -> bool {
    matches!(c, ',' | ':' | ';' | '?' | '!' | '%' | '(' | ')' | '[' | ']' | '{' | '}' | '"' | '#' | '$' | '&' | '@')
        || matches!(c, '*' | '<' | '>' | '`' | '“' | '”' | '‘' | '’' | '«' | '»' | '\u{2012}'..='\u{2015}')
}

fn is_abbreviation(word: &str) -> bool {
    let stem = word.trim_end_matches('.').to_lowercase();
    matches!(stem.as_str(), "dr" | "mr" | "mrs" | "ms" | "prof" | "vs" | "e.g" | "i.e" | "fig")
}

/// Splits off punctuation and clitics inside a word.
fn split_inside(core: &str, out: &mut Vec<String>) {
    let mut word = String::new();
    let mut rest = core.chars().peekable();
    let mut previous = None;
    while let Some(c) = rest.next() {
        // `1,5` and `10:30` stay together
        let number = matches!(c, ',' | ':') && rest.peek().is_some_and(char::is_ascii_digit);
        if is_detached(c) && !number {
            push_clitic(&std::mem::take(&mut word), out);
            out.push(c.to_string());
        } else if c == '-' && previous == Some('-') {
            word.pop();
            push_clitic(&std::mem::take(&mut word), out);
            out.push("--".into());
        } else {
            word.push(c);
        }
        previous = Some(c);
    }
    push_clitic(&word, out);
}

fn push_clitic(word: &str, out: &mut Vec<String>) {
    let lower = word.to_ascii_lowercase();
    let clitic = ["n't", "'s", "'m", "'d", "'ll", "'re", "'ve"].into_iter().find(|c| lower.ends_with(c));
    let cut = if lower == "cannot" { 3 } else { word.len() - clitic.map_or(0, str::len) };
    let (start, end) = word.split_at(cut);
    out.extend([start, end].into_iter().filter(|part| !part.is_empty()).map(str::to_owned));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Deserialize)]
    struct Fixture {
        pairs: Vec<AnswerPair>,
        stems: BTreeMap<String, String>,
    }

    #[derive(Deserialize)]
    struct AnswerPair {
        answer: String,
        reference: String,
        answer_13a: Vec<String>,
        answer_words: Vec<String>,
        bleu: f64,
        rouge1: f64,
        meteor_exact_stem: f64,
    }

    fn fixture() -> Fixture {
        serde_json::from_str(include_str!("../../tests/fixtures/text_scores.json")).unwrap()
    }

    #[test]
    fn scores_equal_the_python_packages() {
        let pairs = fixture().pairs;
        assert!(pairs.len() > 20 && pairs.iter().filter(|pair| pair.bleu > 0.0).count() > 8);
        for pair in pairs {
            let context = format!("{:?} / {:?}", pair.answer, pair.reference);
            assert_eq!(tokens_13a(&pair.answer), pair.answer_13a, "{context}");
            assert_eq!(words(&pair.answer), pair.answer_words, "{context}");
            let scores = TextScores::of(&pair.answer, &pair.reference);
            assert!((scores.bleu - pair.bleu).abs() < 1e-9, "BLEU {} {}: {context}", scores.bleu, pair.bleu);
            assert!((scores.rouge1 - pair.rouge1).abs() < 1e-12, "ROUGE {} {}: {context}", scores.rouge1, pair.rouge1);
            let (found, expected) = (scores.meteor_exact_stem, pair.meteor_exact_stem);
            assert!((found - expected).abs() < 1e-12, "METEOR {found} {expected}: {context}");
        }
    }

    #[derive(Deserialize)]
    struct Edges {
        texts: Vec<EdgePair>,
        corpora: Vec<Corpus>,
    }

    #[derive(Deserialize)]
    struct EdgePair {
        answer: String,
        reference: String,
        bleu: f64,
        rouge1: f64,
        meteor_exact_stem: f64,
    }

    #[derive(Deserialize)]
    struct Corpus {
        name: String,
        pairs: Vec<(String, String)>,
        bleu: f64,
    }

    fn edges() -> Edges {
        serde_json::from_str(include_str!("../../tests/fixtures/score_edges.json")).unwrap()
    }

    #[test]
    fn empty_and_short_answers_score_as_in_the_python_packages() {
        let texts = edges().texts;
        assert!(texts.len() > 10);
        for pair in texts {
            let found = TextScores::of(&pair.answer, &pair.reference);
            let expected = [pair.bleu, pair.rouge1, pair.meteor_exact_stem];
            for (found, expected) in [found.bleu, found.rouge1, found.meteor_exact_stem].into_iter().zip(expected) {
                assert!(
                    (found - expected).abs() < 1e-9,
                    "{:?} / {:?}: {found} {expected}",
                    pair.answer,
                    pair.reference
                );
            }
        }
    }

    #[test]
    fn corpus_bleu_equals_sacrebleu() {
        let counts = |pairs: &[(String, String)]| {
            let mut sum = BleuCounts::default();
            for (answer, reference) in pairs {
                sum += BleuCounts::of(answer, reference);
            }
            sum
        };
        let corpora = edges().corpora;
        assert!(corpora.len() > 4);
        for Corpus { name, pairs, bleu } in corpora {
            let found = counts(&pairs).bleu();
            assert!((found - bleu).abs() < 1e-9, "{name}: {found} {bleu}");
        }
        assert_eq!(counts(&[]).bleu(), 0.0);
    }

    #[test]
    fn stems_equal_nltk() {
        let stems = fixture().stems;
        assert!(stems.len() > 1000);
        let wrong: Vec<_> = stems.iter().filter(|(word, expected)| stem(word) != **expected).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn words_of_all_scripts_count() {
        for text in [
            "घाउ तस्बिरको बीचमा छ।",
            "Tổn thương nằm ở giữa ảnh, gần bờ phải.",
            "Очаг находится в центре снимка.",
            "الآفة في مركز الصورة",
            "病变位于图像中央。",
            "รอยโรคอยู่ตรงกลางภาพ",
        ] {
            assert!((rouge1_f1(text, text) - 1.0).abs() < 1e-12, "{text}");
        }
        for (answer, reference, expected) in [
            ("größer links", "größer rechts", 0.5),
            ("विक्षत केन्द्र मा", "विक्षत बायाँ मा", 2.0 / 3.0),
            ("病变在左", "病变在右", 0.75),
            ("4 µm", "4 mm", 0.5),
            ("left_upper", "left upper", 1.0),
            ("।。 …", "।。 …", 0.0),
        ] {
            assert!((rouge1_f1(answer, reference) - expected).abs() < 1e-12, "{answer} / {reference}");
        }
    }

    #[test]
    fn short_and_empty_answers_have_scores() {
        assert_eq!(TextScores::of("", "the upper left"), TextScores::default());
        assert_eq!(TextScores::of("", ""), TextScores::default());
        assert!(bleu("upper left", "upper left").abs() < 1e-12, "no 4-gram, no smoothing");
        assert!((rouge1_f1("upper left", "left upper") - 1.0).abs() < 1e-12);
    }
}
