//! The questions of a training, and how far a new question is from them.
//!
//! A question is the set of its words and pairs of neighbouring words. A feature that few training questions have counts
//! more (inverse document frequency). The distance to the nearest training question is `1 - cosine * (1 - new)`, where
//! `new` is the share of the weight of the words that are in no training question. The limits come from the validation
//! questions. Nothing here knows what a question means: it only compares words.

use super::{Familiarity, quantile, read};
use prsmed_base::Result;
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::LazyLock;

/// The file in a checkpoint folder.
pub const QUESTIONS_FILE: &str = "questions.json";
/// Most different training questions, and most validation questions; the most frequent ones.
const MOST: usize = 4000;
/// Quantile of the validation questions that a limit lets pass.
const QUANTILE: f64 = 0.99;
/// Added to that quantile of the distances.
const MARGIN: f64 = 0.05;
/// Range of the limit of distances. The lower end lets questions pass that leave words of a training question out.
const DISTANCES: [f64; 2] = [0.45, 0.75];
/// Distance up to which a question counts as a training question in other words.
const SAME: f64 = 0.05;
/// Rows of a class below which nothing is concluded from words that its questions lack.
pub(super) const FEW_ROWS: f64 = 5.0;
/// Share of the questions of a class from which a word names what the class shows, if no other class has it.
const NAMES: f64 = 0.5;
/// Probability below which a word is not missing from the questions of a class by chance.
const BY_CHANCE: f64 = 0.001;
/// Largest limit of the share of new words.
const MOST_NEW: f64 = 0.2;

/// A question like those of the training is within both limits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Limits {
    /// Largest distance to the nearest training question.
    distance: f64,
    /// Largest share of new words.
    new_words: f64,
    /// Number of different validation questions that the limits come from.
    num_validated: usize,
}

/// Content of [`QUESTIONS_FILE`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Saved {
    /// Different training questions with the number of their rows, the most frequent first.
    questions: Vec<(String, u64)>,
    /// `None` without validation questions.
    limits: Option<Limits>,
    /// The classes of the rows of each question; empty in files of older versions.
    #[serde(default)]
    classes: Vec<BTreeSet<String>>,
}

/// The questions of a training.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownQuestions {
    saved: Saved,
    /// The questions that have a feature; sorted, because sums depend on their order.
    postings: BTreeMap<String, Vec<usize>>,
    /// Length of the vector of each question.
    lengths: Vec<f64>,
    /// The words of each question.
    pub(super) words: Vec<Vec<String>>,
}

impl KnownQuestions {
    /// The questions of training rows, with limits from those of validation rows.
    pub fn new<'a>(trained: impl IntoIterator<Item = &'a str>, validated: impl IntoIterator<Item = &'a str>) -> Self {
        let mut known = Self::of(Saved { questions: most_frequent(trained), limits: None, classes: Vec::new() });
        let validated = most_frequent(validated);
        let new_words = validated.iter().map(|(question, _)| known.share_of_new_words(question)).collect();
        let distance = |(question, _): &(String, u64)| known.compare(question).question_distance;
        let distances = validated.iter().filter_map(distance).collect();
        known.saved.limits =
            quantile(distances, QUANTILE).zip(quantile(new_words, QUANTILE)).map(|(distance, new_words)| Limits {
                distance: (distance + MARGIN).clamp(DISTANCES[0], DISTANCES[1]),
                new_words: new_words.min(MOST_NEW),
                num_validated: validated.len(),
            });
        known
    }

    /// The same, with the class of each training row.
    #[must_use]
    pub fn with_classes<'a>(mut self, rows: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut classes: HashMap<&str, BTreeSet<String>> = HashMap::new();
        for (question, class) in rows {
            classes.entry(question.trim()).or_default().insert(class.to_owned());
        }
        let of = |(question, _): &(String, u64)| classes.remove(question.as_str()).unwrap_or_default();
        self.saved.classes = self.saved.questions.iter().map(of).collect();
        self
    }

    fn of(saved: Saved) -> Self {
        let words = saved.questions.iter().map(|(question, _)| words(question)).collect();
        let mut known = Self { saved, postings: BTreeMap::new(), lengths: Vec::new(), words };
        for (number, question) in known.words.iter().enumerate() {
            for feature in features(question) {
                known.postings.entry(feature).or_default().push(number);
            }
        }
        known.lengths = vec![0.0; known.saved.questions.len()];
        for (feature, numbers) in &known.postings {
            let weight = known.weight(feature).powi(2);
            for number in numbers {
                known.lengths[*number] += weight;
            }
        }
        known.lengths.iter_mut().for_each(|length| *length = length.sqrt());
        known
    }

    /// The questions in a checkpoint folder; `None` for one of an older version or of the original code.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Weights`] for a damaged file; [`prsmed_base::Error::Io`].
    pub fn open(folder: &Path) -> Result<Option<Self>> {
        Ok(read(&folder.join(QUESTIONS_FILE))?.map(Self::of))
    }

    /// The content of the file.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.saved).expect("plain values serialise") + "\n"
    }

    /// The most frequent training questions: first one about each class, as far as there is room.
    pub fn examples(&self, most: usize) -> Vec<&str> {
        let mut covered = BTreeSet::new();
        let is_of_new_class = |&number: &usize| {
            let classes = self.saved.classes.get(number).into_iter().flatten();
            classes.filter(|class| covered.insert(*class)).count() > 0
        };
        let (first, rest): (Vec<usize>, Vec<usize>) = (0..self.saved.questions.len()).partition(is_of_new_class);
        first.into_iter().chain(rest).take(most).map(|number| self.saved.questions[number].0.as_str()).collect()
    }

    /// The classes of the training rows with this question, in the same words; none for another question.
    pub fn classes_of_question(&self, question: &str) -> BTreeSet<&str> {
        let asked = words(question);
        let same = |(known, _): &(&(String, u64), _)| words(&known.0) == asked;
        let rows = self.saved.questions.iter().zip(&self.saved.classes).filter(same);
        rows.flat_map(|(_, classes)| classes.iter().map(String::as_str)).collect()
    }

    /// Compares a question with those of the training.
    pub fn compare(&self, question: &str) -> Familiarity {
        let words = words(question);
        let (mut products, mut length) = (vec![0.0; self.lengths.len()], 0.0);
        for feature in features(&words) {
            let weight = self.weight(&feature).powi(2);
            length += weight;
            for number in self.postings.get(&feature).into_iter().flatten() {
                products[*number] += weight;
            }
        }
        let cosine =
            |number: usize| products[number] / (self.lengths[number] * f64::sqrt(length)).max(f64::MIN_POSITIVE);
        // of equally near ones, the most frequent
        let nearest = (0..products.len()).rev().max_by(|a, b| cosine(*a).total_cmp(&cosine(*b)));
        let new = self.share_of_new_words(question);
        let distance = nearest.map(|number| (1.0 - cosine(number).min(1.0) * (1.0 - new)).clamp(0.0, 1.0));
        let limits = self.saved.limits.zip(distance);
        let is_new = |word: &&String| !self.postings.contains_key(*word) && !is_filler(word);
        Familiarity {
            question_known: limits.map(|(limits, distance)| {
                (distance <= limits.distance && new <= limits.new_words) || self.is_shorter_form(&words)
            }),
            nearest_question: nearest.map(|number| self.saved.questions[number].0.clone()),
            new_words: words.iter().filter(is_new).cloned().collect::<BTreeSet<_>>().into_iter().collect(),
            question_distance: distance,
            asked_of_others: self
                .asked_of_others(&words, nearest.filter(|_| distance.is_some_and(|distance| distance <= SAME))),
            ..Familiarity::default()
        }
    }

    /// Whether a training question has all these words in this order, begins in the same way, and is about the same: "Where is
    /// the lesion?" of "Where is the skin lesion in this image?". What it is about is the last word before a preposition, so
    /// "Where is the liver?" is no shorter form of "Where is the liver tumour in this image?".
    fn is_shorter_form(&self, asked: &[String]) -> bool {
        /// Words that begin both.
        const BEGIN: usize = 2;
        const PREPOSITIONS: [&str; 5] = ["in", "on", "of", "at", "and"];
        let Some((begin, rest)) = asked.split_at_checked(BEGIN) else { return false };
        let shortens = |(question, _): &(String, u64)| {
            let full = words(question);
            let Some(full) = full.strip_prefix(begin) else { return false };
            let phrase = full.iter().take_while(|word| !PREPOSITIONS.contains(&word.as_str()));
            let about = phrase.filter(|word| !is_filler(word)).last();
            let mut left = full.iter();
            about.is_some_and(|about| rest.contains(about)) && rest.iter().all(|word| left.any(|own| own == word))
        };
        self.saved.questions.iter().any(shortens)
    }

    /// For each class of the training whose images are not asked this: the classes that are. `same` is a training question
    /// with the same words.
    ///
    /// A question belongs to other classes if it has a word that is in no question about this class, but in most questions
    /// about each class that has it ("polyp"). If the question has no such word for this class itself, a word also counts
    /// that is so frequent in the other classes that it is not missing here by chance.
    fn asked_of_others(&self, words: &[String], same: Option<usize>) -> BTreeMap<String, BTreeSet<String>> {
        let all = self.rows_of(0..self.saved.questions.len());
        let same = same.and_then(|number| self.saved.classes.get(number));
        let by_word: Vec<BTreeMap<&str, f64>> = words
            .iter()
            .filter_map(|word| self.postings.get(word))
            .map(|numbers| self.rows_of(numbers.iter().copied()))
            .filter(|of_word| of_word.values().sum::<f64>() >= FEW_ROWS)
            .collect();
        let is_name = |of_word: &BTreeMap<&str, f64>| of_word.iter().all(|(class, rows)| *rows >= NAMES * all[class]);
        let mut found = BTreeMap::new();
        for (class, own) in &all {
            let mut others: BTreeSet<String> = same.filter(|same| !same.contains(*class)).cloned().unwrap_or_default();
            let rest: f64 = all.values().sum::<f64>() - own;
            let is_named = by_word.iter().any(|of_word| of_word.contains_key(class) && is_name(of_word));
            for of_word in by_word.iter().filter(|of_word| *own >= FEW_ROWS && !of_word.contains_key(class)) {
                let share = (of_word.values().sum::<f64>() / rest).min(1.0);
                if is_name(of_word) || (!is_named && (1.0 - share).powf(*own) < BY_CHANCE) {
                    others.extend(of_word.keys().map(|&class| class.to_owned()));
                }
            }
            if !others.is_empty() {
                found.insert((*class).to_owned(), others);
            }
        }
        found
    }

    /// The classes that a word of at least [`FEW_ROWS`] rows names, but not all classes: it is in most questions about each
    /// class that has it.
    pub(super) fn classes_of_name(&self, word: &str) -> Option<BTreeSet<&str>> {
        let of_word = self.rows_of(self.postings.get(word)?.iter().copied());
        let all = self.rows_of(0..self.saved.questions.len());
        let is_name = of_word.values().sum::<f64>() >= FEW_ROWS
            && of_word.len() < all.len()
            && of_word.iter().all(|(class, rows)| *rows >= NAMES * all[class]);
        is_name.then(|| of_word.into_keys().collect())
    }

    /// Number of training rows of a class.
    pub(super) fn num_rows(&self, class: &str) -> f64 {
        self.rows_of(0..self.saved.questions.len()).get(class).copied().unwrap_or_default()
    }

    /// The classes of a training question.
    pub(super) fn classes_of(&self, number: usize) -> Vec<String> {
        self.saved.classes.get(number).into_iter().flatten().cloned().collect()
    }

    /// Training rows of each class with one of these questions. A question about several classes counts for each the same.
    fn rows_of(&self, numbers: impl IntoIterator<Item = usize>) -> BTreeMap<&str, f64> {
        let mut rows = BTreeMap::new();
        for number in numbers {
            let Some(classes) = self.saved.classes.get(number) else { continue };
            for class in classes {
                *rows.entry(class.as_str()).or_default() +=
                    self.saved.questions[number].1 as f64 / classes.len() as f64;
            }
        }
        rows
    }

    /// Share of the weight of a question's words that are in no training question.
    fn share_of_new_words(&self, question: &str) -> f64 {
        let (mut all, mut new) = (0.0, 0.0);
        for word in words(question) {
            let weight = self.weight(&word);
            all += weight;
            new += if self.postings.contains_key(&word) || is_filler(&word) { 0.0 } else { weight };
        }
        if all > 0.0 { new / all } else { 1.0 }
    }

    /// Inverse document frequency.
    fn weight(&self, feature: &str) -> f64 {
        let count = self.postings.get(feature).map_or(0, Vec::len);
        ((self.saved.questions.len() + 1) as f64 / (count + 1) as f64).ln() + 1.0
    }
}

/// The different questions with their numbers, the most frequent first.
fn most_frequent<'a>(questions: impl IntoIterator<Item = &'a str>) -> Vec<(String, u64)> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for question in questions {
        *counts.entry(question.trim()).or_default() += 1;
    }
    let mut counts: Vec<(String, u64)> = counts.into_iter().map(|(text, count)| (text.to_owned(), count)).collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.truncate(MOST);
    counts
}

/// Words in lower case, without punctuation.
pub(super) fn words(question: &str) -> Vec<String> {
    static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w+").expect("a valid pattern"));
    WORD.find_iter(&question.to_lowercase()).map(|word| word.as_str().to_owned()).collect()
}

/// Whether a word has no meaning of its own in a question: it is never new.
pub(super) fn is_filler(word: &str) -> bool {
    const FILLERS: [&str; 18] = [
        "a", "an", "and", "any", "are", "at", "can", "could", "do", "i", "in", "is", "of", "on", "please", "the",
        "there", "you",
    ];
    FILLERS.contains(&word)
}

/// Words, and pairs of neighbours.
fn features(words: &[String]) -> BTreeSet<String> {
    words.iter().cloned().chain(words.windows(2).map(|pair| pair.join(" "))).collect()
}

#[cfg(test)]
#[path = "questions_tests.rs"]
mod tests;
