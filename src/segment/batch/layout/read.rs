//! Indices and numbers for words that follow masks.

use super::{IGNORED, Layout, to_i64};
use crate::data::geometry::{Geometry, MovedMask};
use crate::data::sample::MOVED_MASKS;

/// What words that follow masks are trained on, with the fields of `DeviceLayout::read`.
pub(super) struct ReadIndices {
    pub(super) states: Vec<i64>,
    pub(super) labels: Vec<i64>,
    pub(super) masks: Vec<i64>,
}

impl Layout {
    /// Numbers of the masks that words follow: for each question those of its own targets, then those of its moved masks.
    /// `None` for words that follow no mask.
    ///
    /// # Shapes
    /// `geometry` of m targets, or of none to hide all masks, to `[q, 1 + moved, g]`.
    pub fn geometry<'a>(&self, geometry: impl IntoIterator<Item = &'a [f32]>) -> Option<Vec<f32>> {
        if !self.reads_masks {
            return None;
        }
        let unknown = Geometry::unknown();
        let (mut rows, mut geometry) = (Vec::<f32>::new(), geometry.into_iter());
        for (question, count) in self.targets.iter().enumerate() {
            for mask in 0..self.masks {
                let own = if mask < *count { geometry.next() } else { None };
                rows.extend(own.unwrap_or(unknown.numbers()));
            }
            for number in 0..MOVED_MASKS {
                let moved = self.moved(question, number).map(|moved| &moved.geometry);
                rows.extend(moved.unwrap_or(&unknown).numbers());
                (1..self.masks).for_each(|_| rows.extend(unknown.numbers()));
            }
        }
        Some(rows)
    }

    fn moved(&self, question: usize, number: usize) -> Option<&MovedMask> {
        self.moved.get(question)?.get(number)
    }

    /// What words that follow masks are trained on: the supervised tokens with their own masks, then the first token of each
    /// moved mask that differs.
    pub(super) fn read(&self) -> ReadIndices {
        let slots = 1 + MOVED_MASKS;
        let (mut states, mut labels) = self.supervised_targets();
        let mut masks: Vec<i64> = self.supervised().map(|(question, _)| to_i64(slots * question.number)).collect();
        masks.resize(self.sizes.supervised, 0);
        for question in &self.questions {
            for number in 0..MOVED_MASKS {
                let moved = self.moved(question.number, number);
                let state = |moved: &MovedMask| self.flat_index(question, self.spliced(question, moved.at) - 1);
                states.push(moved.map_or(0, |moved| to_i64(state(moved))));
                labels.push(moved.map_or(IGNORED, |moved| moved.id));
                masks.push(to_i64(slots * question.number + 1 + number));
            }
        }
        ReadIndices { states, labels, masks }
    }
}
