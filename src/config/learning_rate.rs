//! A learning rate for another effective batch than the one that the preset's learning rate was chosen for.

use super::{PRESETS, Resolved, RunConfig};

const KEY: &str = "train.learning_rate";

/// Suggested learning rate for an effective batch.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Suggestion {
    /// Samples of an optimizer step.
    pub samples: usize,
    /// Samples of an optimizer step that the present learning rate was chosen for.
    pub chosen_for: usize,
    /// The present learning rate, which stays unless the user changes it.
    pub learning_rate: f64,
    /// The suggested one, with three digits.
    pub suggested: f64,
}

impl Suggestion {
    /// For the user, with the flag that follows the suggestion.
    pub fn text(&self) -> String {
        let Self { samples, chosen_for, learning_rate, suggested } = self;
        format!(
            "the learning rate {learning_rate:e} was chosen for {chosen_for} samples in a step, and a step has {samples}; for \
             AdamW the square-root rule suggests the setting `{KEY}={suggested:e}` (Malladi et al. 2022, arXiv:2205.10287). \
             It is not changed by itself"
        )
    }
}

/// The learning rate that the square-root rule suggests: for AdamW it grows with the square root of the batch (Malladi
/// et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"). `samples` are those of an optimizer
/// step. `None` if the user or a file chose the learning rate, or if the preset was made for as many samples.
pub fn suggestion(resolved: &Resolved, samples: usize) -> Option<Suggestion> {
    let preset = match resolved.origins.get(KEY)?.as_str() {
        "default" => RunConfig::default(),
        origin => {
            let name = origin.strip_prefix("preset ")?;
            PRESETS.iter().any(|(known, _)| *known == name).then(|| RunConfig::preset(name).ok())??
        }
    };
    let (chosen_for, learning_rate) = (preset.samples_of_a_step(), preset.train.learning_rate);
    let exact = learning_rate * (samples as f64 / chosen_for as f64).sqrt();
    let suggested = format!("{exact:.2e}").parse().unwrap_or(exact);
    (samples != chosen_for).then_some(Suggestion { samples, chosen_for, learning_rate, suggested })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;

    fn suggested(preset: &str, sets: &[&str]) -> Option<Suggestion> {
        let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
        let resolved = Sources { preset: Some(preset.into()), sets, ..Sources::default() }.resolve().unwrap();
        suggestion(&resolved, resolved.config.samples_of_a_step())
    }

    #[test]
    fn four_times_the_batch_suggests_twice_the_learning_rate() {
        let found = suggested("tiny", &["train.accumulation=4"]).unwrap();
        assert_eq!((found.samples, found.chosen_for, found.learning_rate, found.suggested), (32, 8, 1e-3, 2e-3));
        assert!(found.text().contains("setting `train.learning_rate=2e-3`"), "{}", found.text());
        let found = suggested("full", &["data.questions_per_image=1"]).unwrap();
        assert_eq!((found.samples, found.chosen_for, found.suggested), (3, 9, 5.77e-5));
    }

    #[test]
    fn the_batch_of_the_preset_and_a_learning_rate_of_the_user_have_no_suggestion() {
        assert_eq!(suggested("tiny", &["train.micro_batch=2", "train.accumulation=4"]), None);
        assert_eq!(suggested("gpu-24gb", &[]), None);
        assert_eq!(suggested("gpu-16gb", &[]), None);
        assert_eq!(suggested("tiny", &["train.accumulation=4", "train.learning_rate=1e-3"]), None);
    }
}
