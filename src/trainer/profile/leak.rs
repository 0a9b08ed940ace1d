//! Finds leaks: a level after the same phase that keeps growing.

use crate::units::Bytes;
use std::collections::BTreeMap;

/// Watches the level after each phase. Pure: it sees numbers only.
///
/// The threshold is 1 MiB a round: what changes between rounds of a sound run are the batches made ahead and losses kept
/// for a line, which go up and down; they do not grow four times in a row, each time by more than a block that the ledger
/// would list. A leak of one activation or picture a step is larger than that in one round.
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

/// A level that kept growing.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Leak {
    /// The phase after which it was read.
    pub phase: String,
    /// Rounds in a row that it grew.
    pub rises: usize,
    /// By how much in all.
    pub growth: Bytes,
    /// Where it is now.
    pub allocated: Bytes,
    /// What grew most, where categories are known.
    pub category: Option<&'static str>,
}

impl Default for LeakWatch {
    fn default() -> Self {
        Self::new(4, Bytes(1 << 20))
    }
}

impl LeakWatch {
    /// Speaks when a level grew `rises` times in a row (1 or more) by more than `threshold` each time.
    pub fn new(rises: usize, threshold: Bytes) -> Self {
        Self { rises: rises.max(1), threshold, levels: BTreeMap::new() }
    }

    /// Takes the level after a round of `phase`. Having spoken, it waits for as many rises again.
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
        write!(f, ": something may be kept that should be dropped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Rounds (from 0) after which the watch spoke.
    fn spoke(levels: &[u64]) -> Vec<usize> {
        let mut watch = LeakWatch::default();
        let observe = |(round, kib): (usize, &u64)| watch.observe("save", Bytes(kib << 10), &[]).map(|_| round);
        levels.iter().enumerate().filter_map(observe).collect()
    }

    #[test]
    fn four_rises_in_a_row_are_a_leak_and_less_is_not() {
        let step = 1025; // KiB: one more than the threshold
        let climb: Vec<u64> = (0..10).map(|round| 5000 + round * step).collect();
        assert_eq!(spoke(&climb), [4, 8]);
        assert_eq!(spoke(&climb[..4]), [0; 0], "three rises");
        let slow: Vec<u64> = (0..10).map(|round| 5000 + round * 1024).collect();
        assert_eq!(spoke(&slow), [0; 0], "no more than the threshold each");
        assert_eq!(spoke(&[0, 2000, 4000, 6000, 6000, 8000, 10_000, 12_000]), [0; 0], "a round without growth between");
        assert_eq!(spoke(&[0, 90_000, 80_000, 90_000, 80_000, 90_000, 80_000]), [0; 0], "up and down");
    }

    #[test]
    fn phases_are_watched_apart_and_the_growing_category_is_named() {
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
            "memory after `save` grew 2 times in a row, by 18.00 MiB to 918.00 MiB, mostly inputs: something may be kept \
             that should be dropped"
        );
    }
}
