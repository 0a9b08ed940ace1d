//! Leak detection: memory after the same phase that keeps growing.

use crate::units::Bytes;
use std::collections::BTreeMap;

/// Detects leaks from the allocated bytes after each phase.
///
/// The default threshold is four rises in a row of more than 1 MiB each. Without a leak, only prefetched batches and
/// logged losses change between rounds, and they do not grow four times in a row. A leak of one activation or image per
/// step exceeds 1 MiB in one round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeakWatch {
    rises: usize,
    threshold: Bytes,
    levels: BTreeMap<String, Vec<Level>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Level {
    allocated: Bytes,
    categories: Vec<(&'static str, Bytes)>,
}

/// Memory that kept growing after a phase.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Leak {
    /// Name of the phase.
    pub phase: String,
    /// Number of rises in a row.
    pub rises: usize,
    /// Total growth.
    pub growth: Bytes,
    /// Allocated bytes after the last round.
    pub allocated: Bytes,
    /// Category that grew most, if categories are known.
    pub category: Option<&'static str>,
}

impl Default for LeakWatch {
    fn default() -> Self {
        Self::new(4, Bytes(1 << 20))
    }
}

impl LeakWatch {
    /// Reports a leak after `rises` rises in a row (1 or more), each by more than `threshold`.
    pub fn new(rises: usize, threshold: Bytes) -> Self {
        Self { rises: rises.max(1), threshold, levels: BTreeMap::new() }
    }

    /// Adds the allocated bytes after a round of `phase`. After a report, it needs as many rises again for the next.
    pub fn observe(&mut self, phase: &str, allocated: Bytes, categories: &[(&'static str, Bytes)]) -> Option<Leak> {
        let levels = self.levels.entry(phase.to_owned()).or_default();
        let grew = levels.last().is_some_and(|last| allocated.0 > last.allocated.0.saturating_add(self.threshold.0));
        if !grew {
            levels.clear();
        }
        levels.push(Level { allocated, categories: categories.to_vec() });
        if levels.len() <= self.rises {
            return None;
        }
        let (first, rises) = (levels.remove(0), levels.len());
        levels.drain(..levels.len() - 1);
        let grown = |(name, now): &(&'static str, Bytes)| {
            let before = first.categories.iter().find(|(known, _)| known == name).map_or(0, |(_, bytes)| bytes.0);
            (now.0.saturating_sub(before), *name)
        };
        let category = categories.iter().map(grown).max().filter(|(growth, _)| *growth > 0).map(|(_, name)| name);
        let growth = Bytes(allocated.0 - first.allocated.0);
        Some(Leak { phase: phase.to_owned(), rises, growth, allocated, category })
    }
}

impl std::fmt::Display for Leak {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { phase, rises, growth, allocated, category } = self;
        write!(f, "memory after `{phase}` grew {rises} times in a row, by {growth} to {allocated}")?;
        category.map_or(Ok(()), |category| write!(f, ", mostly {category}"))?;
        write!(f, ": possible memory leak")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Rounds (from 0) after which a leak was reported.
    fn reported(levels: &[u64]) -> Vec<usize> {
        let mut watch = LeakWatch::default();
        let observe = |(round, kib): (usize, &u64)| watch.observe("save", Bytes(kib << 10), &[]).map(|_| round);
        levels.iter().enumerate().filter_map(observe).collect()
    }

    #[test]
    fn four_rises_in_a_row_are_a_leak_and_fewer_are_not() {
        let step = 1025; // KiB: one more than the threshold
        let climb: Vec<u64> = (0..10).map(|round| 5000 + round * step).collect();
        assert_eq!(reported(&climb), [4, 8]);
        assert_eq!(reported(&climb[..4]), [0; 0], "three rises");
        let slow: Vec<u64> = (0..10).map(|round| 5000 + round * 1024).collect();
        assert_eq!(reported(&slow), [0; 0], "no more than the threshold each");
        assert_eq!(
            reported(&[0, 2000, 4000, 6000, 6000, 8000, 10_000, 12_000]),
            [0; 0],
            "a round without growth between"
        );
        assert_eq!(reported(&[0, 90_000, 80_000, 90_000, 80_000, 90_000, 80_000]), [0; 0], "up and down");
    }

    #[test]
    fn phases_are_separate_and_the_growing_category_is_named() {
        let mut watch = LeakWatch::new(2, Bytes(MIB));
        let mut last = None;
        for round in 0..3 {
            let categories = [("frozen", Bytes(900 * MIB)), ("inputs", Bytes(round * 9 * MIB))];
            assert_eq!(watch.observe("evaluate", Bytes(7), &categories), None);
            last = watch.observe("save", Bytes((900 + round * 9) * MIB), &categories);
        }
        let leak = last.unwrap();
        assert_eq!((leak.rises, leak.growth, leak.category), (2, Bytes(18 * MIB), Some("inputs")));
        assert_eq!(
            leak.to_string(),
            "memory after `save` grew 2 times in a row, by 18.00 MiB to 918.00 MiB, mostly inputs: possible memory leak"
        );
    }
}
