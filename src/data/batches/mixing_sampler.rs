//! Mixing sampler: combines real and synthetic rows in the effective batches of an epoch.
//!
//! Every effective batch contains real rows, and the ratio of both kinds is as even as whole rows allow. The result
//! depends only on rows, lengths, seed and epoch, so a resumed run gets the same batches as an uninterrupted one.
//! Without synthetic rows an epoch equals [`length_sampler::epoch_batches`].

use rand::seq::SliceRandom;
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::{length_sampler, random};
use prsmed_base::error::{Error, Result};

/// Synthetic rows of an epoch (`data.synthetic_ratio`): `"all"`, or a number for each real row.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", expecting = "expected `all` or a number, 0 or more")]
pub enum Ratio {
    /// Every synthetic row once per epoch.
    #[default]
    All,
    /// So many for each real training row, 0 or more; never more than there are.
    #[serde(untagged)]
    PerReal(#[serde(deserialize_with = "not_negative")] f64),
}

impl Ratio {
    /// Number of synthetic rows per epoch for these numbers of rows.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of a count, limited to the count"
    )]
    pub fn rows(self, real: usize, synthetic: usize) -> usize {
        match self {
            Self::All => synthetic,
            Self::PerReal(ratio) => ((ratio * real as f64).round() as usize).min(synthetic),
        }
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::PerReal(ratio) => ratio.fmt(f),
        }
    }
}

impl std::str::FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text, text.parse::<f64>()) {
            ("all", _) => Ok(Self::All),
            (_, Ok(ratio)) if ratio.is_finite() && ratio >= 0.0 => Ok(Self::PerReal(ratio)),
            _ => Err("expected `all` or a number, 0 or more".into()),
        }
    }
}

fn not_negative<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(de::Error::custom("is below 0 or not finite")) }
}

/// Rows of one kind with their text lengths.
#[derive(Debug, Clone, Default)]
pub struct Lengths {
    /// Indices into the manifest.
    pub rows: Vec<usize>,
    /// Number of token ids of each row.
    pub lengths: Vec<usize>,
}

/// Real/synthetic mixing sampler for all epochs of a training.
#[derive(Debug, Clone)]
pub struct MixingSampler {
    real: Lengths,
    synthetic: Lengths,
    /// Number of synthetic rows per epoch.
    num_synthetic: usize,
    effective_batch: usize,
    seed: u64,
    /// From this step on, batches contain real rows only.
    real_from_step: u64,
}

impl MixingSampler {
    /// Creates a sampler with `ratio` synthetic rows per real row and effective batches of `effective_batch` rows.
    ///
    /// # Errors
    /// [`Error::Config`] when a batch would contain no real row.
    pub fn new(real: Lengths, synthetic: Lengths, ratio: Ratio, effective_batch: usize, seed: u64) -> Result<Self> {
        let size = effective_batch.max(1);
        let num_synthetic = ratio.rows(real.rows.len(), synthetic.rows.len());
        if num_synthetic > 0 && real.rows.len() * size < real.rows.len() + num_synthetic {
            return Err(Error::config(
                "data.synthetic_ratio",
                format!(
                    "with {num_synthetic} synthetic and {} real rows, some steps of {size} would contain no real row",
                    real.rows.len()
                ),
                "lower the ratio, or raise `train.micro_batch` or `train.accumulation`",
            ));
        }
        Ok(Self { real, synthetic, num_synthetic, effective_batch: size, seed, real_from_step: u64::MAX })
    }

    /// Uses only real rows after the fraction `until` (0..=1) of the training, which has `epochs` epochs or
    /// `max_steps` steps if that is less and not 0. The number of steps per epoch does not change, so real rows then
    /// occur more often.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a number of steps")]
    pub fn with_real_end(mut self, until: f64, epochs: u64, max_steps: u64) -> Self {
        let all = epochs * self.steps_per_epoch();
        let total = if max_steps > 0 { all.min(max_steps) } else { all };
        if until < 1.0 && self.num_synthetic > 0 {
            self.real_from_step = (until * total as f64).round() as u64;
        }
        self
    }

    /// Number of synthetic rows per epoch.
    pub fn synthetic_rows(&self) -> usize {
        self.num_synthetic
    }

    /// Number of all synthetic rows, from which each epoch's rows are drawn.
    pub fn all_synthetic_rows(&self) -> usize {
        self.synthetic.rows.len()
    }

    /// Number of optimizer steps per epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        (self.real.rows.len() + self.num_synthetic).div_ceil(self.effective_batch) as u64
    }

    /// The effective batches of one epoch.
    pub fn batches(&self, epoch: u64) -> Vec<Vec<usize>> {
        let Lengths { rows, lengths } = &self.real;
        if self.num_synthetic == 0 {
            return length_sampler::epoch_batches(rows, lengths, self.seed, epoch, self.effective_batch);
        }
        let steps = self.steps_per_epoch();
        let num_mixed = self.real_from_step.saturating_sub(epoch * steps).min(steps);
        let num_mixed = usize::try_from(num_mixed).unwrap_or(usize::MAX);
        let mut batches = self.mixed_batches(epoch);
        let steps = batches.len();
        batches.truncate(num_mixed);
        for pass in 0.. {
            if batches.len() == steps {
                break;
            }
            let mut random = random::stream("real end", &[self.seed, epoch, pass]);
            let more = length_sampler::shuffled_batches(rows, lengths, &mut random, self.effective_batch);
            batches.extend(more.into_iter().take(steps - batches.len()));
        }
        batches
    }

    /// Like [`length_sampler::epoch_batches`], but both kinds of rows are shuffled and sorted separately. A batch
    /// takes the same part of both sorted windows, so its rows have similar lengths.
    fn mixed_batches(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut random = random::stream("mix", &[self.seed, epoch]);
        let mut shuffled = |kind: &Lengths, count: usize| {
            let mut order: Vec<(usize, usize)> = kind.lengths.iter().copied().zip(kind.rows.iter().copied()).collect();
            order.shuffle(&mut random);
            order.truncate(count);
            order
        };
        let mut real = shuffled(&self.real, self.real.rows.len());
        let mut synthetic = shuffled(&self.synthetic, self.num_synthetic);
        let (total, size) = (real.len() + synthetic.len(), self.effective_batch);
        let steps = total.div_ceil(size);
        let borders: Vec<BatchBorder> = (0..=steps).map(|step| self.cut(step, steps, total)).collect();
        let full = total / size;
        let mut batches = Vec::with_capacity(steps);
        for first in (0..full).step_by(length_sampler::WINDOW) {
            let window = &borders[first..=(first + length_sampler::WINDOW).min(full)];
            let (Some(start), Some(end)) = (window.first(), window.last()) else { continue };
            real[start.real..end.real].sort_by_key(|(length, _)| *length);
            synthetic[start.synthetic..end.synthetic].sort_by_key(|(length, _)| *length);
        }
        for pair in borders.windows(2) {
            let own = [&real[pair[0].real..pair[1].real], &synthetic[pair[0].synthetic..pair[1].synthetic]];
            let mut batch = own.concat();
            batch.sort_by_key(|(length, _)| *length);
            batches.push(batch.into_iter().map(|(_, row)| row).collect());
        }
        // the smaller batch stays last
        batches[..full].shuffle(&mut random);
        batches
    }

    /// Number of rows of each kind before `step`.
    fn cut(&self, step: usize, steps: usize, total: usize) -> BatchBorder {
        let rows = (step * self.effective_batch).min(total);
        let count = self.real.rows.len();
        // rounded; at least one real row remains for each later step
        let real = ((2 * rows * count + total) / (2 * total)).min(count - (steps - step));
        BatchBorder { real, synthetic: rows - real }
    }
}

/// Number of rows of each kind before a batch.
struct BatchBorder {
    real: usize,
    synthetic: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(from: usize, count: usize) -> Lengths {
        let rows: Vec<usize> = (from..from + count).collect();
        let lengths = rows.iter().map(|row| 20 + (row * 7919) % 61).collect();
        Lengths { rows, lengths }
    }

    fn sampler(real: usize, synthetic: usize, ratio: Ratio, size: usize) -> MixingSampler {
        MixingSampler::new(kind(0, real), kind(real, synthetic), ratio, size, 5).unwrap()
    }

    #[test]
    fn every_step_contains_an_even_share_of_real_rows() {
        for (real, synthetic, size) in
            [(1000, 500, 8), (37, 200, 8), (13, 87, 8), (100, 100, 2), (64, 1, 8), (5, 5, 16), (2, 3, 4), (1, 1, 2)]
        {
            let batches = sampler(real, synthetic, Ratio::All, size).batches(3);
            assert_eq!(batches.len(), (real + synthetic).div_ceil(size));
            let mut seen = batches.concat();
            seen.sort_unstable();
            assert_eq!(seen, (0..real + synthetic).collect::<Vec<_>>());
            for (step, batch) in batches.iter().enumerate() {
                let count = batch.iter().filter(|row| **row < real).count();
                let even = batch.len() as f64 * real as f64 / (real + synthetic) as f64;
                let off = (count as f64 - even).abs();
                // one row may move to a short last batch that would have no real row
                assert!(
                    count > 0 && off < 2.0,
                    "{real}+{synthetic} in {size}: step {step} has {count}, even is {even}"
                );
                assert!(batch.len() == size || step + 1 == batches.len());
            }
        }
    }

    #[test]
    fn too_many_synthetic_rows_are_rejected() {
        let refused = |real, synthetic, ratio, size| {
            MixingSampler::new(kind(0, real), kind(real, synthetic), ratio, size, 5).unwrap_err().to_string()
        };
        assert!(refused(10, 1, Ratio::All, 1).contains("some steps of 1 would contain no real row"));
        assert!(
            refused(10, 71, Ratio::All, 8).starts_with("`data.synthetic_ratio`: with 71 synthetic and 10 real rows")
        );
        assert_eq!(sampler(10, 71, Ratio::PerReal(0.0), 1).batches(0).len(), 10);
    }

    #[test]
    fn every_epoch_draws_its_own_reproducible_subset() {
        let sampler = sampler(40, 100, Ratio::PerReal(0.5), 8);
        let drawn = |epoch| -> Vec<usize> {
            let mut rows: Vec<usize> = sampler.batches(epoch).concat().into_iter().filter(|row| *row >= 40).collect();
            rows.sort_unstable();
            rows
        };
        assert_eq!((drawn(0).len(), sampler.steps_per_epoch()), (20, 8));
        assert_eq!(sampler.batches(1), sampler.batches(1));
        assert_ne!(drawn(0), drawn(1));
        let all: std::collections::HashSet<usize> = (0..40).flat_map(drawn).collect();
        assert_eq!(all.len(), 100, "every synthetic row occurs in some epoch");
    }

    #[test]
    fn without_synthetic_rows_the_sampler_equals_the_length_sampler() {
        let Lengths { rows, lengths } = kind(0, 100);
        let plain = length_sampler::epoch_batches(&rows, &lengths, 5, 2, 8);
        assert_eq!(sampler(100, 0, Ratio::All, 8).with_real_end(0.5, 4, 0).batches(2), plain);
        assert_eq!(sampler(100, 50, Ratio::PerReal(0.0), 8).batches(2), plain);
    }

    #[test]
    fn the_end_of_training_uses_real_rows_only() {
        let sampler = sampler(30, 10, Ratio::All, 8).with_real_end(0.5, 3, 0);
        // 3 epochs of 5 steps: 7.5 are rounded to 8
        let synthetic = |batch: &Vec<usize>| batch.iter().any(|row| *row >= 30);
        let steps: Vec<Vec<usize>> = (0..3).flat_map(|epoch| sampler.batches(epoch)).collect();
        assert_eq!(steps.len(), 15);
        assert!(steps[..8].iter().all(synthetic) && !steps[8..].iter().any(synthetic));
        let last: std::collections::HashSet<usize> = steps[10..].concat().into_iter().collect();
        assert_eq!(last.len(), 30, "a whole pass over the real rows fits an epoch");
        let by_steps = self::sampler(30, 10, Ratio::All, 8).with_real_end(0.5, 3, 4);
        assert_eq!(by_steps.batches(0).iter().filter(|batch| synthetic(batch)).count(), 2);
    }

    #[test]
    fn rows_of_a_mixed_batch_have_similar_lengths() {
        let sampler = sampler(1000, 1000, Ratio::All, 8);
        let length = |row: &usize| 20 + (row * 7919) % 61;
        let padding = |batches: &[Vec<usize>]| -> usize {
            let of = |b: &Vec<usize>| {
                b.iter().map(length).max().unwrap_or(0) * b.len() - b.iter().map(length).sum::<usize>()
            };
            batches.iter().map(of).sum()
        };
        let (num_mixed, plain) =
            (padding(&sampler.batches(0)), padding(&length_sampler::plain_batches(&(0..2000).collect::<Vec<_>>(), 8)));
        assert!(num_mixed * 5 < plain, "{num_mixed} padded ids against {plain}");
    }

    #[test]
    fn a_ratio_is_all_or_a_number() {
        #[derive(Serialize, Deserialize)]
        struct Holder {
            ratio: Ratio,
        }
        let read = |text: &str| toml::from_str::<Holder>(text).map(|holder| holder.ratio);
        assert_eq!(read("ratio = \"all\"").unwrap(), Ratio::All);
        assert_eq!(read("ratio = 2").unwrap(), Ratio::PerReal(2.0));
        assert_eq!(toml::to_string(&Holder { ratio: Ratio::PerReal(0.5) }).unwrap(), "ratio = 0.5\n");
        for text in ["all", "0.5", "2", "0"] {
            assert_eq!(text.parse::<Ratio>().unwrap().to_string(), text);
        }
        for bad in ["", "some", "-1", "nan", "inf"] {
            assert_eq!(bad.parse::<Ratio>().unwrap_err(), "expected `all` or a number, 0 or more", "{bad}");
        }
        for bad in ["ratio = -1.0", "ratio = \"some\"", "ratio = true", "ratio = nan"] {
            let error = read(bad).err().unwrap().to_string();
            assert!(error.contains("expected `all` or a number, 0 or more"), "{error}");
        }
    }
}
