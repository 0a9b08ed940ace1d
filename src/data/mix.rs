//! Real and synthetic rows in one epoch: which synthetic rows, and in which optimizer step each row stands.
//!
//! Every effective batch holds real rows, and as even a share of both kinds as whole rows allow. Everything follows from
//! rows, lengths, seed and epoch, so a resumed run sees what an uninterrupted one sees. Without synthetic rows an epoch is
//! exactly [`order::epoch_batches`].

use std::fmt;

use rand::seq::SliceRandom;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{order, random};
use crate::error::{Error, Result};

/// Synthetic rows of an epoch (`data.synthetic_ratio`): `"all"`, or a number for each real row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Ratio {
    /// Every synthetic row once an epoch.
    #[default]
    All,
    /// So many for each real training row, 0 or more; never more than there are.
    PerReal(f64),
}

impl Ratio {
    /// Synthetic rows of an epoch for these numbers of rows.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count, cut to what is there"
    )]
    pub fn rows(self, real: usize, synthetic: usize) -> usize {
        match self {
            Self::All => synthetic,
            Self::PerReal(ratio) => ((ratio * real as f64).round() as usize).min(synthetic),
        }
    }
}

impl Serialize for Ratio {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_str("all"),
            Self::PerReal(ratio) => serializer.serialize_f64(*ratio),
        }
    }
}

impl<'de> Deserialize<'de> for Ratio {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(RatioVisitor)
    }
}

struct RatioVisitor;

impl Visitor<'_> for RatioVisitor {
    type Value = Ratio;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`all` or a number, 0 or more")
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Ratio, E> {
        if value.is_finite() && value >= 0.0 {
            return Ok(Ratio::PerReal(value));
        }
        Err(E::invalid_value(de::Unexpected::Float(value), &self))
    }

    #[expect(clippy::cast_precision_loss, reason = "a setting is a small number")]
    fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<Ratio, E> {
        self.visit_f64(value as f64)
    }

    #[expect(clippy::cast_precision_loss, reason = "a setting is a small number")]
    fn visit_u64<E: de::Error>(self, value: u64) -> std::result::Result<Ratio, E> {
        self.visit_f64(value as f64)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> std::result::Result<Ratio, E> {
        match value {
            "all" => Ok(Ratio::All),
            other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
        }
    }
}

/// Rows of one kind with the lengths of their texts.
#[derive(Debug, Clone, Default)]
pub struct Lengths {
    /// Indices into the manifest.
    pub rows: Vec<usize>,
    /// Ids of each of them.
    pub lengths: Vec<usize>,
}

/// The order of all epochs of a training.
#[derive(Debug, Clone)]
pub struct Mix {
    real: Lengths,
    synthetic: Lengths,
    /// Synthetic rows of an epoch.
    share: usize,
    effective_batch: usize,
    seed: u64,
    /// Steps from this one on hold real rows only.
    real_from_step: u64,
}

impl Mix {
    /// `ratio` of `synthetic` to `real` in effective batches of `effective_batch` rows.
    ///
    /// # Errors
    /// [`Error::Config`] when a batch would hold no real row.
    pub fn new(real: Lengths, synthetic: Lengths, ratio: Ratio, effective_batch: usize, seed: u64) -> Result<Self> {
        let size = effective_batch.max(1);
        let share = ratio.rows(real.rows.len(), synthetic.rows.len());
        if share > 0 && real.rows.len() * size < real.rows.len() + share {
            return Err(Error::config(
                "data.synthetic_ratio",
                format!(
                    "{share} synthetic rows beside {} real ones leave steps of {size} without a real row",
                    real.rows.len()
                ),
                "lower the ratio, or raise `train.micro_batch` or `train.accumulation`",
            ));
        }
        Ok(Self { real, synthetic, share, effective_batch: size, seed, real_from_step: u64::MAX })
    }

    /// Only real rows after `until` (0..=1) of `epochs`, or of `max_steps` where that is less and not 0. An epoch keeps
    /// its number of steps: real rows are then seen more often.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a number of steps"
    )]
    pub fn with_real_end(mut self, until: f64, epochs: u64, max_steps: u64) -> Self {
        let all = epochs * self.steps_per_epoch();
        let total = if max_steps > 0 { all.min(max_steps) } else { all };
        if until < 1.0 && self.share > 0 {
            self.real_from_step = (until * total as f64).round() as u64;
        }
        self
    }

    /// Synthetic rows of an epoch.
    pub fn synthetic_rows(&self) -> usize {
        self.share
    }

    /// Synthetic rows that epochs are drawn from.
    pub fn all_synthetic_rows(&self) -> usize {
        self.synthetic.rows.len()
    }

    /// Optimizer steps of every epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        (self.real.rows.len() + self.share).div_ceil(self.effective_batch) as u64
    }

    /// The effective batches of one epoch.
    pub fn batches(&self, epoch: u64) -> Vec<Vec<usize>> {
        let Lengths { rows, lengths } = &self.real;
        if self.share == 0 {
            return order::epoch_batches(rows, lengths, self.seed, epoch, self.effective_batch);
        }
        let steps = self.steps_per_epoch();
        let mixed = self.real_from_step.saturating_sub(epoch * steps).min(steps);
        let mixed = usize::try_from(mixed).unwrap_or(usize::MAX);
        let mut batches = self.mixed(epoch);
        let steps = batches.len();
        batches.truncate(mixed);
        for pass in 0.. {
            if batches.len() == steps {
                break;
            }
            let mut random = random::stream("real end", &[self.seed, epoch, pass]);
            let more = order::arranged(rows, lengths, &mut random, self.effective_batch);
            batches.extend(more.into_iter().take(steps - batches.len()));
        }
        batches
    }

    /// As [`order::epoch_batches`], with the rows of both kinds shuffled and sorted by themselves: the rows of a batch stand
    /// at the same part of both sorted windows, so their lengths are similar.
    fn mixed(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut random = random::stream("mix", &[self.seed, epoch]);
        let mut shuffled = |kind: &Lengths, count: usize| {
            let mut order: Vec<(usize, usize)> = kind.lengths.iter().copied().zip(kind.rows.iter().copied()).collect();
            order.shuffle(&mut random);
            order.truncate(count);
            order
        };
        let mut real = shuffled(&self.real, self.real.rows.len());
        let mut synthetic = shuffled(&self.synthetic, self.share);
        let (total, size) = (real.len() + synthetic.len(), self.effective_batch);
        let steps = total.div_ceil(size);
        let places: Vec<Cut> = (0..=steps).map(|step| self.cut(step, steps, total)).collect();
        let full = total / size;
        let mut batches = Vec::with_capacity(steps);
        for first in (0..full).step_by(order::WINDOW) {
            let window = &places[first..=(first + order::WINDOW).min(full)];
            let (Some(start), Some(end)) = (window.first(), window.last()) else { continue };
            real[start.real..end.real].sort_by_key(|(length, _)| *length);
            synthetic[start.synthetic..end.synthetic].sort_by_key(|(length, _)| *length);
        }
        for pair in places.windows(2) {
            let own = [&real[pair[0].real..pair[1].real], &synthetic[pair[0].synthetic..pair[1].synthetic]];
            let mut batch = own.concat();
            batch.sort_by_key(|(length, _)| *length);
            batches.push(batch.into_iter().map(|(_, row)| row).collect());
        }
        // the smaller batch stays the last
        batches[..full].shuffle(&mut random);
        batches
    }

    /// How many rows of each kind stand before `step`.
    fn cut(&self, step: usize, steps: usize, total: usize) -> Cut {
        let rows = (step * self.effective_batch).min(total);
        let count = self.real.rows.len();
        // rounded, and one real row is left for each step to come
        let real = ((2 * rows * count + total) / (2 * total)).min(count - (steps - step));
        Cut { real, synthetic: rows - real }
    }
}

/// A border between two batches.
struct Cut {
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

    fn mix(real: usize, synthetic: usize, ratio: Ratio, size: usize) -> Mix {
        Mix::new(kind(0, real), kind(real, synthetic), ratio, size, 5).unwrap()
    }

    #[test]
    fn every_step_holds_an_even_share_of_real_rows() {
        for (real, synthetic, size) in
            [(1000, 500, 8), (37, 200, 8), (13, 87, 8), (100, 100, 2), (64, 1, 8), (5, 5, 16), (2, 3, 4), (1, 1, 2)]
        {
            let batches = mix(real, synthetic, Ratio::All, size).batches(3);
            assert_eq!(batches.len(), (real + synthetic).div_ceil(size));
            let mut seen = batches.concat();
            seen.sort_unstable();
            assert_eq!(seen, (0..real + synthetic).collect::<Vec<_>>());
            for (step, batch) in batches.iter().enumerate() {
                let count = batch.iter().filter(|row| **row < real).count();
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                let even = batch.len() as f64 * real as f64 / (real + synthetic) as f64;
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                let off = (count as f64 - even).abs();
                // one row is moved to a short last batch that would have none
                assert!(
                    count > 0 && off < 2.0,
                    "{real}+{synthetic} in {size}: step {step} has {count}, even is {even}"
                );
                assert!(batch.len() == size || step + 1 == batches.len());
            }
        }
    }

    #[test]
    fn too_many_synthetic_rows_are_refused() {
        let refused = |real, synthetic, ratio, size| {
            Mix::new(kind(0, real), kind(real, synthetic), ratio, size, 5).unwrap_err().to_string()
        };
        assert!(refused(10, 1, Ratio::All, 1).contains("leave steps of 1 without a real row"));
        assert!(refused(10, 71, Ratio::All, 8).starts_with("`data.synthetic_ratio`: 71 synthetic rows beside 10"));
        assert_eq!(mix(10, 71, Ratio::PerReal(0.0), 1).batches(0).len(), 10);
    }

    #[test]
    fn an_epoch_draws_another_subset_and_the_same_one_again() {
        let mix = mix(40, 100, Ratio::PerReal(0.5), 8);
        let drawn = |epoch| -> Vec<usize> {
            let mut rows: Vec<usize> = mix.batches(epoch).concat().into_iter().filter(|row| *row >= 40).collect();
            rows.sort_unstable();
            rows
        };
        assert_eq!((drawn(0).len(), mix.steps_per_epoch()), (20, 8));
        assert_eq!(mix.batches(1), mix.batches(1));
        assert_ne!(drawn(0), drawn(1));
        let all: std::collections::HashSet<usize> = (0..40).flat_map(drawn).collect();
        assert_eq!(all.len(), 100, "every synthetic row has its turn");
    }

    #[test]
    fn without_synthetic_rows_an_epoch_is_the_plain_one() {
        let Lengths { rows, lengths } = kind(0, 100);
        let plain = order::epoch_batches(&rows, &lengths, 5, 2, 8);
        assert_eq!(mix(100, 0, Ratio::All, 8).with_real_end(0.5, 4, 0).batches(2), plain);
        assert_eq!(mix(100, 50, Ratio::PerReal(0.0), 8).batches(2), plain);
    }

    #[test]
    fn the_end_of_training_holds_real_rows_only() {
        let mix = mix(30, 10, Ratio::All, 8).with_real_end(0.5, 3, 0);
        // 3 epochs of 5 steps: 7.5 are rounded to 8
        let synthetic = |batch: &Vec<usize>| batch.iter().any(|row| *row >= 30);
        let steps: Vec<Vec<usize>> = (0..3).flat_map(|epoch| mix.batches(epoch)).collect();
        assert_eq!(steps.len(), 15);
        assert!(steps[..8].iter().all(synthetic) && !steps[8..].iter().any(synthetic));
        let last: std::collections::HashSet<usize> = steps[10..].concat().into_iter().collect();
        assert_eq!(last.len(), 30, "a whole pass over the real rows fits an epoch");
        let by_steps = self::mix(30, 10, Ratio::All, 8).with_real_end(0.5, 3, 4);
        assert_eq!(by_steps.batches(0).iter().filter(|batch| synthetic(batch)).count(), 2);
    }

    #[test]
    fn the_batches_of_a_mix_hold_similar_lengths() {
        let mix = mix(1000, 1000, Ratio::All, 8);
        let length = |row: &usize| 20 + (row * 7919) % 61;
        let padding = |batches: &[Vec<usize>]| -> usize {
            let of = |b: &Vec<usize>| {
                b.iter().map(length).max().unwrap_or(0) * b.len() - b.iter().map(length).sum::<usize>()
            };
            batches.iter().map(of).sum()
        };
        let (mixed, plain) =
            (padding(&mix.batches(0)), padding(&order::plain_batches(&(0..2000).collect::<Vec<_>>(), 8)));
        assert!(mixed * 5 < plain, "{mixed} padded ids against {plain}");
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
        for bad in ["ratio = -1.0", "ratio = \"some\"", "ratio = true", "ratio = nan"] {
            let error = read(bad).err().unwrap().to_string();
            assert!(error.contains("expected `all` or a number, 0 or more"), "{error}");
        }
    }
}
