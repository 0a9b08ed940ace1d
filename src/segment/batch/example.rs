//! Sizes of the batches that a dry run makes: those of a plan without data, and the largest that some rows can make.

use crate::data::loader::TextLength;

/// Sizes of the example batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Example {
    /// Ids of a text, including the image token and the answer.
    pub text_tokens: usize,
    /// Ids of the answer, part of `text_tokens`.
    pub answer_tokens: usize,
    /// Modality classes.
    pub num_classes: usize,
    /// Longest generated answer in tokens: room in the key-value cache of a prediction.
    pub new_tokens: usize,
    /// Questions about each image.
    pub questions: usize,
    /// Whether some masks of the data set are not known.
    pub has_unknown_masks: bool,
    /// The largest micro-batches that the data can make, of a training step and of a validation. Without it every text is
    /// the longest one.
    pub largest: Option<[Largest; 2]>,
}

/// Lengths of a micro-batch that no micro-batch of some rows exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Largest {
    /// Ids of the longest sequence, including the image token and the answers.
    pub sequence: usize,
    /// Ids of the longest text before its answer.
    pub prompt: usize,
    /// Ids of the answers together.
    pub answers: usize,
    /// Whether texts before the answer have different lengths.
    pub is_ragged: bool,
}

impl Largest {
    /// Of micro-batches of at most `images` of these groups, the texts about one image, which share a sequence.
    pub fn of(groups: &[Vec<TextLength>], images: usize) -> Self {
        let prompts = || groups.iter().flatten().map(|row| row.tokens - row.answer_tokens);
        let prompt = prompts().max().unwrap_or(0);
        let mut answers: Vec<usize> =
            groups.iter().map(|group| group.iter().map(|row| row.answer_tokens).sum()).collect();
        answers.sort_unstable_by(|a, b| b.cmp(a));
        let sequence = |group: &Vec<TextLength>| {
            let own: usize = group.iter().map(|row| row.tokens - row.prefix_tokens).sum();
            own + group.first().map_or(0, |row| row.prefix_tokens)
        };
        Self {
            sequence: groups.iter().map(sequence).max().unwrap_or(0),
            prompt,
            answers: answers.iter().take(images).sum(),
            is_ragged: groups.iter().flatten().take(images + 1).count() > 1 && prompts().any(|other| other != prompt),
        }
    }
}
