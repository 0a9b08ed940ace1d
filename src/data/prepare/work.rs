//! A preparation: its options, and what they refer to.

use std::collections::{BTreeMap, BTreeSet};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::annotations::AnnotationFiles;
use super::existing::Existing;
use super::found::UsableItem;
use super::label_names::LabelNamesOfFiles;
use super::options::{Negatives, PrepareOptions};
use super::patients::Finder;
use super::structures::Structure;
use super::table::{Pair, Shown};
use crate::templates::Templates;
use crate::volume::Sequence;
use prsmed_base::event::Observer;

/// A preparation.
pub(super) struct Preparation<'a> {
    pub(super) options: &'a PrepareOptions,
    pub(super) templates: Templates,
    /// `None` if patients are not known.
    pub(super) finder: Option<Finder>,
    pub(super) existing: Existing,
    pub(super) structures: Vec<Structure>,
    pub(super) label_names: LabelNamesOfFiles,
    pub(super) annotations: AnnotationFiles,
    /// The sequences of all pairs, with the windows that are asked for; empty for images of one file.
    pub(super) sequences: Vec<Sequence>,
    pub(super) observer: &'a dyn Observer,
    /// The pairs are from a table, not from the files of the options.
    pub(super) is_table: bool,
}

impl Preparation<'_> {
    /// The structures that the masks of a pair show.
    pub(super) fn shown_by(&self, pair: &Pair) -> Vec<Shown> {
        pair.structures(&self.structures, self.options.join.as_deref())
    }

    /// Removes absent targets beyond the limit and returns their number. `usual` is the limit of
    /// [`Negatives::Usual`] for each image with the target.
    pub(super) fn limit_negatives(&self, all: &mut Vec<UsableItem>, usual: Option<f64>) -> usize {
        let ratio = match self.options.negatives {
            Negatives::PerPositive(ratio) => Some(ratio),
            Negatives::Usual => usual,
            Negatives::Skipped => None,
        };
        let Some(ratio) = ratio else { return 0 };
        let mut absent: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut present: BTreeMap<String, usize> = BTreeMap::new();
        for (index, UsableItem { item, .. }) in all.iter().enumerate() {
            if item.location.is_some() {
                *present.entry(item.target.clone()).or_default() += usize::from(item.which.is_none());
            } else {
                absent.entry(item.target.clone()).or_default().push(index);
            }
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.options.seed);
        let mut removed = BTreeSet::new();
        for (target, mut indices) in absent {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be 0 or more")]
            let most = (present.get(&target).copied().unwrap_or(0) as f64 * ratio).round() as usize;
            indices.shuffle(&mut random);
            removed.extend(indices.into_iter().skip(most));
        }
        let mut indices = 0..;
        all.retain(|_| indices.next().is_some_and(|index| !removed.contains(&index)));
        removed.len()
    }
}
