//! Lesions: the connected components of a mask, and how many of them are found.
//!
//! Pixels are connected if they touch at a side or a corner (8 neighbours; 26 in a volume). *Overlap rule:* a lesion of
//! the truth is found if the prediction covers at least one of its pixels, and a component of the prediction is right
//! if it contains at least one pixel of the truth. One component may find several lesions.

use super::grid::Size;
use prsmed_base::error::Result;

/// Lesions of one mask, or of many: the sum of two counts adds their lesions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LesionCounts {
    /// Lesions of the truth.
    pub truth: u64,
    /// Lesions of the truth that are found.
    pub found: u64,
    /// Components of the prediction.
    pub predicted: u64,
    /// Components of the prediction that are right.
    pub right: u64,
}

impl LesionCounts {
    /// Counts the lesions of two masks in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`](prsmed_base::Error::Shape) if a mask has another size.
    pub fn of(prediction: &[bool], truth: &[bool], size: Size) -> Result<Self> {
        size.check(prediction, truth)?;
        let (truth_count, found) = touched(truth, prediction, size);
        let (predicted, right) = touched(prediction, truth, size);
        Ok(Self { truth: truth_count, found, predicted, right })
    }

    /// Share of the true lesions that are found; `None` without one.
    pub fn recall(&self) -> Option<f64> {
        share(self.found, self.truth)
    }

    /// Share of the predicted components that are right; `None` without one.
    pub fn precision(&self) -> Option<f64> {
        share(self.right, self.predicted)
    }

    /// Harmonic mean of recall and precision, 0 if one of them is 0 or only one mask has lesions; `None` if both masks
    /// are empty.
    pub fn f1(&self) -> Option<f64> {
        if self.truth + self.predicted == 0 {
            return None;
        }
        let (recall, precision) = (self.recall().unwrap_or(0.0), self.precision().unwrap_or(0.0));
        let sum = recall + precision;
        Some(if sum == 0.0 { 0.0 } else { 2.0 * recall * precision / sum })
    }
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

/// Number of components of `mask`, and of those that contain a pixel of `other`.
fn touched(mask: &[bool], other: &[bool], size: Size) -> (u64, u64) {
    let (mut count, mut touched) = (0, 0);
    for component in components(mask, size) {
        count += 1;
        touched += u64::from(component.iter().any(|&at| other[at]));
    }
    (count, touched)
}

/// The pixels of each component of a mask, in the order of their first pixels.
pub fn components(mask: &[bool], size: Size) -> Vec<Vec<usize>> {
    let sides = [size.depth(), size.rows, size.columns];
    let mut is_left = mask.to_vec();
    let mut found = Vec::new();
    for start in 0..mask.len() {
        if !is_left[start] {
            continue;
        }
        is_left[start] = false;
        let mut component = vec![start];
        let mut next = 0;
        while let Some(&at) = component.get(next) {
            next += 1;
            let place = size.position(at);
            let range = |axis: usize| place[axis].saturating_sub(1)..(place[axis] + 2).min(sides[axis]);
            for slice in range(0) {
                for row in range(1) {
                    for column in range(2) {
                        let neighbour = size.index([slice, row, column]);
                        if std::mem::take(&mut is_left[neighbour]) {
                            component.push(neighbour);
                        }
                    }
                }
            }
        }
        found.push(component);
    }
    found
}
