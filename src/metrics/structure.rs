//! Saliency scores of the reference evaluation: mean absolute error, structure measure, enhanced-alignment measure and
//! weighted F.
//!
//! Sources: Fan et al. 2017 (structure measure), Fan et al. 2018 (enhanced alignment), Margolin et al. 2014 (weighted
//! F), all as in PRS-Med's `eval_functions.py`. The weighted F copies values from the nearest pixel of the truth, so
//! the distance transform breaks ties as SciPy's does. Deviations: an empty quadrant of the structure measure is
//! skipped; an empty truth has no weighted F (NaN there).

use super::distance_transform::Nearest;
use super::grid::{Size, Spacing};
use super::order;

/// numpy's `finfo(float64).eps`.
const EPS: f64 = f64::EPSILON;

/// A map in `0..=1` and its binary truth, in row-major order.
#[derive(Debug, Clone)]
pub struct MaskPair {
    map: Vec<f64>,
    truth: Vec<bool>,
    width: usize,
    height: usize,
}

impl MaskPair {
    /// From an 8-bit map. The caller has checked that `prediction` and `truth` have the same length, a multiple of
    /// `width`.
    pub(super) fn new(prediction: &[u8], truth: &[bool], width: usize) -> Self {
        let map = prediction.iter().map(|&level| f64::from(level) / 255.0).collect();
        Self { map, truth: truth.to_vec(), width, height: truth.len() / width }
    }

    /// Mean of `|map - truth|`.
    pub fn mean_absolute_error(&self) -> f64 {
        mean(self.map.iter().zip(&self.truth).map(|(p, &t)| (p - as_f64(t)).abs()))
    }

    /// Structure measure with alpha 0.5.
    pub fn structure_measure(&self) -> f64 {
        let share = mean(self.truth.iter().map(|&t| as_f64(t)));
        let level = mean(self.map.iter().copied());
        if share == 0.0 {
            return 1.0 - level;
        }
        if self.truth.iter().all(|&t| t) {
            return level;
        }
        let foreground = object_similarity(self.map.iter().zip(&self.truth).filter(|(_, t)| **t).map(|(p, _)| *p));
        let background =
            object_similarity(self.map.iter().zip(&self.truth).filter(|(_, t)| !**t).map(|(p, _)| 1.0 - p));
        let object = share * foreground + (1.0 - share) * background;
        (0.5 * object + 0.5 * self.region_similarity()).max(0.0)
    }

    /// Similarity of the four quadrants around the truth's centroid, weighted by their area.
    fn region_similarity(&self) -> f64 {
        let (row, column) = self.centroid();
        let mut sum = 0.0;
        for rows in [0..row, row..self.height] {
            for columns in [0..column, column..self.width] {
                let block: Vec<(f64, f64)> = rows
                    .clone()
                    .flat_map(|y| columns.clone().map(move |x| y * self.width + x))
                    .map(|i| (self.map[i], as_f64(self.truth[i])))
                    .collect();
                if !block.is_empty() {
                    sum += similarity(&block) * block.len() as f64 / self.map.len() as f64;
                }
            }
        }
        sum
    }

    /// Row and column of the truth's centre of mass, rounded half to even.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "image sides are small and not negative"
    )]
    fn centroid(&self) -> (usize, usize) {
        let hits = || (0..self.truth.len()).filter(|&i| self.truth[i]);
        let row = mean(hits().map(|i| (i / self.width) as f64)).round_ties_even();
        let column = mean(hits().map(|i| (i % self.width) as f64)).round_ties_even();
        (row as usize, column as usize)
    }

    /// Weighted F (beta 1). Errors are smoothed inside the object (Gaussian 7x7, sigma 5) and have less weight near the
    /// object. `None` for an empty truth.
    pub fn weighted_f(&self) -> Option<f64> {
        let size = Size::image(self.height, self.width);
        let nearest = Nearest::of(&self.truth, size, Spacing::PIXELS)?;
        let error: Vec<f64> = self.map.iter().zip(&self.truth).map(|(p, &t)| (p - as_f64(t)).abs()).collect();
        let spread: Vec<f64> = nearest.cell.iter().map(|&cell| error[cell as usize]).collect();
        let smooth = self.smoothed_inside(&spread);
        let (mut inside, mut outside, mut count) = (0.0, 0.0, 0.0);
        for (i, &is_truth) in self.truth.iter().enumerate() {
            if is_truth {
                count += 1.0;
                inside += if smooth[i] < error[i] { smooth[i] } else { error[i] };
            } else {
                outside += error[i] * (2.0 - (0.5_f64.ln() / 5.0 * nearest.squared[i].sqrt()).exp());
            }
        }
        let hits = count - inside;
        let recall = 1.0 - inside / count;
        let precision = hits / (hits + outside + EPS);
        Some(2.0 * recall * precision / (recall + precision + EPS))
    }

    /// 7x7 Gaussian of `values` at the pixels of the object, 0 elsewhere. Border pixels are repeated outside the image.
    fn smoothed_inside(&self, values: &[f64]) -> Vec<f64> {
        let kernel = gaussian();
        let clamped = |i: usize, offset: usize, len: usize| (i + offset).saturating_sub(3).min(len - 1);
        let at = |i: usize| {
            let (y, x) = (i / self.width, i % self.width);
            let mut sum = 0.0;
            for (dy, row) in kernel.iter().enumerate() {
                let start = clamped(y, dy, self.height) * self.width;
                for (dx, weight) in row.iter().enumerate() {
                    sum += weight * values[start + clamped(x, dx, self.width)];
                }
            }
            sum
        };
        (0..values.len()).map(|i| if self.truth[i] { at(i) } else { 0.0 }).collect()
    }
}

/// Enhanced-alignment measure of a binary map from its pixel counts. All pixels with the same map and truth values have
/// the same alignment.
pub(super) fn enhanced_alignment(both: f64, predicted: f64, truth: f64, pixels: f64) -> f64 {
    let total = if truth == 0.0 {
        pixels - predicted
    } else if truth >= pixels {
        predicted
    } else {
        let (mean_map, mean_truth) = (predicted / pixels, truth / pixels);
        let cell = |count: f64, map: f64, truth: f64| {
            let (a, b) = (map - mean_map, truth - mean_truth);
            let alignment = 2.0 * (a * b) / (b * b + a * a + EPS);
            count * (alignment + 1.0) * (alignment + 1.0) / 4.0
        };
        cell(both, 1.0, 1.0)
            + cell(predicted - both, 1.0, 0.0)
            + cell(truth - both, 0.0, 1.0)
            + cell(pixels - predicted - truth + both, 0.0, 0.0)
    };
    total / (pixels - 1.0 + EPS)
}

fn as_f64(truth: bool) -> f64 {
    f64::from(u8::from(truth))
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    order::mean(values).unwrap_or(0.0)
}

fn object_similarity(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let level = mean(values.clone());
    let deviation = mean(values.map(|v| (v - level) * (v - level))).sqrt();
    2.0 * level / (level * level + 1.0 + deviation + EPS)
}

/// The structural similarity of a block of (map, truth) pairs.
fn similarity(block: &[(f64, f64)]) -> f64 {
    let (x, y) = (mean(block.iter().map(|v| v.0)), mean(block.iter().map(|v| v.1)));
    let divisor = block.len() as f64 - 1.0 + EPS;
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (p, t) in block {
        xx += (p - x) * (p - x) / divisor;
        yy += (t - y) * (t - y) / divisor;
        xy += (p - x) * (t - y) / divisor;
    }
    let alpha = 4.0 * x * y * xy;
    let beta = (x * x + y * y) * (xx + yy);
    if alpha != 0.0 {
        alpha / (beta + EPS)
    } else if beta == 0.0 {
        1.0
    } else {
        0.0
    }
}

fn gaussian() -> [[f64; 7]; 7] {
    let offset = [-3.0_f64, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0];
    let mut kernel = offset.map(|y| offset.map(|x| (-((x * x + y * y) / 50.0)).exp()));
    let sum: f64 = kernel.iter().flatten().sum();
    kernel.iter_mut().flatten().for_each(|weight| *weight /= sum);
    kernel
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_perfect_map_scores_one() {
        let truth: Vec<bool> = (0..400).map(|i| (5..12).contains(&(i / 20)) && (3..9).contains(&(i % 20))).collect();
        let levels: Vec<u8> = truth.iter().map(|&t| if t { 255 } else { 0 }).collect();
        let pair = MaskPair::new(&levels, &truth, 20);
        assert!((pair.structure_measure() - 1.0).abs() < 1e-9, "{}", pair.structure_measure());
        assert!((pair.weighted_f().unwrap() - 1.0).abs() < 1e-9);
        assert!(pair.mean_absolute_error().abs() < 1e-12);
    }

    #[test]
    fn an_object_in_a_corner_gives_finite_scores() {
        let mut truth = vec![false; 64];
        truth[0] = true;
        let pair = MaskPair::new(&[9; 64], &truth, 8);
        assert!(pair.structure_measure().is_finite());
    }
}
