//! Predicted time of a whole training, from the predicted time of one optimizer step.

use super::time;
use crate::data::manifest::{Manifest, Split};
use crate::trainer::TrainConfig;
use std::collections::HashMap;
use std::path::Path;

/// Samples of a training and how they are grouped: questions about one image are one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Samples {
    /// Questions.
    pub samples: u64,
    /// Groups; a micro-batch of `train.micro_batch` has that many.
    pub groups: u64,
}

impl Samples {
    /// `samples` questions, `questions` about each image.
    pub fn even(samples: u64, questions: usize) -> Self {
        Self { samples, groups: samples.div_ceil(questions.max(1) as u64) }
    }

    /// Questions about images, of which at most `most` are one group. `counts`: number of questions of each image.
    pub fn of_images(counts: impl IntoIterator<Item = u64>, most: usize) -> Self {
        counts.into_iter().fold(Self { samples: 0, groups: 0 }, |sum, count| {
            let groups = count.div_ceil(most.max(1) as u64);
            Self { samples: sum.samples + count, groups: sum.groups + groups }
        })
    }

    /// The training rows of a manifest.
    pub fn of_rows(manifest: &Manifest, most: usize) -> Self {
        let mut counts: HashMap<&Path, u64> = HashMap::new();
        for row in manifest.rows.iter().filter(|row| row.split == Split::Train) {
            *counts.entry(row.image_path.as_path()).or_default() += 1;
        }
        Self::of_images(counts.into_values(), most)
    }

    /// Questions of a group on average, rounded; at least 1.
    pub fn questions_of_a_group(&self) -> usize {
        let mean = self.samples as f64 / self.groups.max(1) as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
        let rounded = mean.round() as usize;
        rounded.max(1)
    }
}

/// Steps and predicted time of a training, without validation and checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Duration {
    /// What it trains on.
    #[serde(flatten)]
    pub of: Samples,
    /// Optimizer steps of an epoch.
    pub steps_per_epoch: u64,
    /// `train.epochs`.
    pub epochs: u64,
    /// Optimizer steps of the training (`train.epochs`, `train.max_steps`).
    pub steps: u64,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Predicted seconds of an epoch.
    pub epoch_seconds: f64,
    /// Predicted seconds of the training.
    pub seconds: f64,
}

impl Duration {
    /// A training on `of` whose steps take `step_seconds`.
    pub fn new(of: Samples, config: &TrainConfig, step_seconds: f64) -> Self {
        let steps_per_epoch = of.groups.div_ceil((config.micro_batch * config.accumulation).max(1) as u64);
        let all = steps_per_epoch.saturating_mul(config.epochs);
        let steps = if config.max_steps > 0 { all.min(config.max_steps) } else { all };
        let [epoch_seconds, seconds] = [steps_per_epoch, steps].map(|count| count as f64 * step_seconds);
        Self { of, steps_per_epoch, epochs: config.epochs, steps, step_seconds, epoch_seconds, seconds }
    }

    /// The prediction in one line. `source`: where the time of a step comes from.
    pub fn text(&self, source: &str) -> String {
        let shorter = match self.seconds {
            seconds if seconds < 3.0 * DAY => "",
            _ => {
                "; shorter with fewer epochs (the setting `train.epochs=N`), more GPUs (the argument `gpus=N`) or another one (the argument `gpu=all`)"
            }
        };
        format!(
            "training on {} samples: {} steps an epoch, {}; {} steps in {} epochs, {} ({source}; without validation)\
             {shorter}",
            self.of.samples,
            self.steps_per_epoch,
            long(self.epoch_seconds),
            self.steps,
            self.epochs,
            long(self.seconds)
        )
    }
}

const DAY: f64 = 86_400.0;

/// Seconds as text, in minutes, hours or days where they are many.
pub fn long(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => time::text(s),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 2.0 * DAY => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / DAY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_by_groups_and_limited_by_max_steps() {
        let config =
            TrainConfig { micro_batch: 2, accumulation: 4, epochs: 10, max_steps: 0, ..TrainConfig::default() };
        let of = Samples::even(1000, 3);
        assert_eq!(of, Samples { samples: 1000, groups: 334 });
        let whole = Duration::new(of, &config, 0.5);
        assert_eq!((whole.steps_per_epoch, whole.steps, whole.epoch_seconds, whole.seconds), (42, 420, 21.0, 210.0));
        let text = whole.text("measured");
        assert!(
            text.starts_with("training on 1000 samples: 42 steps an epoch, 21.00 s; 420 steps in 10 epochs, 4 min")
        );
        let short = Duration::new(of, &TrainConfig { max_steps: 50, ..config }, 0.5);
        assert_eq!((short.steps_per_epoch, short.steps, short.seconds), (42, 50, 25.0));
    }

    #[test]
    fn questions_about_an_image_are_grouped_up_to_the_most() {
        let of = Samples::of_images([1, 3, 7], 3);
        assert_eq!((of, of.questions_of_a_group()), (Samples { samples: 11, groups: 5 }, 2));
        assert_eq!(Samples::of_images([], 3).questions_of_a_group(), 1);
        assert_eq!([119.0, 600.0, 9000.0, 684_000.0].map(long), ["119.00 s", "10 min", "2.5 h", "7.9 days"]);
    }
}
