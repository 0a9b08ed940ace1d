//! The tests that need no model: blank and clipped pictures, the lesion's brightness, seams, copies of train pictures.
//!
//! Brightness is Rec. 601 luma on a scale of 0..=1. Every test is a function from pixels to a number; the limits are
//! [`super::Thresholds`]. Sources: the filter of MAISI (intensity), otherwise our own.

use image::{GrayImage, Rgb, RgbImage};
use rayon::prelude::*;

use super::verdict::{Spread, Thresholds, Verdict};
use crate::augment::hold::{Hold, Side, squared_distances};
use crate::metrics::neighbours::quantile;

/// Brightness of each pixel, row by row.
pub fn luma(picture: &RgbImage) -> Vec<f32> {
    let of = |Rgb([r, g, b]): &Rgb<u8>| (0.299 * f32::from(*r) + 0.587 * f32::from(*g) + 0.114 * f32::from(*b)) / 255.0;
    picture.pixels().map(of).collect()
}

/// Standard deviation of the brightness.
pub fn spread(picture: &RgbImage) -> f64 {
    let values: Vec<f64> = luma(picture).into_iter().map(f64::from).collect();
    Spread::of(&values).deviation
}

/// Part of the pixels that are clipped: a channel at 255, or all at 0.
pub fn clipped(picture: &RgbImage) -> f64 {
    let is_clipped = |pixel: &&Rgb<u8>| pixel.0.contains(&255) || pixel.0 == [0; 3];
    #[expect(clippy::cast_precision_loss, reason = "pixel counts")]
    let part = |count: usize| count as f64 / (picture.as_raw().len() / 3).max(1) as f64;
    part(picture.pixels().filter(is_clipped).count())
}

/// Part of the pixels that are clipped in the result beyond those of its source: dark backgrounds are no fault. Below 0
/// when fewer are.
pub fn clipped_more(result: &RgbImage, source: &RgbImage) -> f64 {
    clipped(result) - clipped(source)
}

/// Median brightness inside a mask (above 0); `None` when it is empty or of another size.
pub fn median_inside(picture: &RgbImage, mask: &GrayImage) -> Option<f64> {
    if picture.dimensions() != mask.dimensions() {
        return None;
    }
    let inside: Vec<f64> =
        luma(picture).into_iter().zip(mask.iter()).filter(|(_, mask)| **mask > 0).map(|(l, _)| f64::from(l)).collect();
    quantile(&inside, 0.5)
}

/// How visible the border between held and generated pixels is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seam {
    /// Mean difference of brightness between the two ends of the ramp: a tint.
    pub jump: f64,
    /// Mean over the border of the largest step between neighbouring pixels across the ramp: a hard edge.
    pub step: f64,
}

/// Border pixels looked at; an even choice of more.
const SEAM_SAMPLES: usize = 4000;
/// How far beyond both ends of the ramp the seam is followed, in pixels.
const SEAM_MARGIN: f64 = 2.0;

/// The seam of a pasted picture along the border of what `hold` holds. The same on a real picture, with the same `hold`,
/// is what edges of that picture measure there. `None` without a border, or for a picture of another size.
pub fn seam(picture: &RgbImage, hold: &Hold) -> Option<Seam> {
    if picture.dimensions() != hold.held.dimensions() {
        return None;
    }
    let (inside, outside) = (squared_distances(&hold.held, false), squared_distances(&hold.held, true));
    // Positive inside; 0 lies between the two pixels of the border.
    #[expect(clippy::cast_possible_truncation, reason = "distances within a picture")]
    let depth: Vec<f32> = inside
        .iter()
        .zip(&outside)
        .map(|(&inside, &outside)| {
            let root = |squared: u32| (f64::from(squared).sqrt() - 0.5).max(0.0) as f32;
            if inside > 0 { root(inside) } else { -root(outside) }
        })
        .collect();
    let border: Vec<usize> = (0..inside.len()).filter(|&at| (1..=2).contains(&inside[at])).collect();
    let depth = Plane { values: depth, size: picture.dimensions() };
    let luma = Plane { values: luma(picture), size: picture.dimensions() };
    let stride = border.len().div_ceil(SEAM_SAMPLES).max(1);
    let (mut jumps, mut steps, mut count) = (0.0, 0.0, 0.0);
    for &at in border.iter().step_by(stride) {
        if let Some(Seam { jump, step }) = seam_at(at, &depth, &luma, hold.ramp_px) {
            jumps += jump;
            steps += step;
            count += 1.0;
        }
    }
    (count > 0.0).then(|| Seam { jump: jumps / count, step: steps / count })
}

/// The seam along the normal through a border pixel; `None` where the normal leaves the picture or has no direction.
#[expect(clippy::cast_precision_loss, reason = "pixel positions")]
fn seam_at(at: usize, depth: &Plane, luma: &Plane, ramp_px: f64) -> Option<Seam> {
    let columns = depth.size.0 as usize;
    let (x, y) = ((at % columns) as f64, (at / columns) as f64);
    let slope = (depth.at(x + 1.0, y)? - depth.at(x - 1.0, y)?, depth.at(x, y + 1.0)? - depth.at(x, y - 1.0)?);
    let length = slope.0.hypot(slope.1);
    if length < 0.1 {
        return None;
    }
    let normal = (slope.0 / length, slope.1 / length);
    let mut along = -SEAM_MARGIN - 0.5;
    let mut profile = Vec::new();
    while along <= ramp_px + SEAM_MARGIN {
        profile.push(luma.at(x + along * normal.0, y + along * normal.1)?);
        along += 1.0;
    }
    let step = profile.windows(2).map(|pair| (pair[1] - pair[0]).abs()).fold(0.0, f64::max);
    let (first, last) = (profile.first()?, profile.last()?);
    Some(Seam { jump: (last - first).abs(), step })
}

/// Values of a picture, read between pixels.
struct Plane {
    values: Vec<f32>,
    size: (u32, u32),
}

impl Plane {
    /// Bilinear; `None` outside of the picture.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to lie inside the picture")]
    fn at(&self, x: f64, y: f64) -> Option<f64> {
        let last = (f64::from(self.size.0) - 1.0, f64::from(self.size.1) - 1.0);
        if !(0.0..=last.0).contains(&x) || !(0.0..=last.1).contains(&y) {
            return None;
        }
        let value = |x: f64, y: f64| {
            f64::from(self.values[y.min(last.1) as usize * self.size.0 as usize + x.min(last.0) as usize])
        };
        let (left, top, fx, fy) = (x.floor(), y.floor(), x.fract(), y.fract());
        let row = |y: f64| value(left, y) * (1.0 - fx) + value(left + 1.0, y) * fx;
        Some(row(top) * (1.0 - fy) + row(top + 1.0) * fy)
    }
}

/// Side of a thumbnail in cells.
const THUMBNAIL: u32 = 24;

/// Mean brightness of the cells of a coarse grid over a picture.
#[derive(Debug, Clone, PartialEq)]
pub struct Thumbnail {
    cells: Vec<f32>,
}

impl Thumbnail {
    /// Of a whole picture, whatever its size and shape.
    pub fn of(picture: &RgbImage) -> Self {
        Self { cells: cell_means(&luma(picture), picture.dimensions()) }
    }

    /// Normalised cross-correlation, -1..=1, where `weights` ([`repaint_weights`]) count; 0 when one of the two is flat.
    pub fn similarity(&self, other: &Self, weights: &[f32]) -> f64 {
        let mean = |cells: &[f32]| {
            let (sum, weight) = cells
                .iter()
                .zip(weights)
                .fold((0.0, 0.0), |(s, n), (&cell, &w)| (s + f64::from(cell * w), n + f64::from(w)));
            if weight > 0.0 { sum / weight } else { 0.0 }
        };
        let (a_mean, b_mean) = (mean(&self.cells), mean(&other.cells));
        let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
        for ((&a, &b), &weight) in self.cells.iter().zip(&other.cells).zip(weights) {
            let (a, b, weight) = (f64::from(a) - a_mean, f64::from(b) - b_mean, f64::from(weight));
            ab += weight * a * b;
            aa += weight * a * a;
            bb += weight * b * b;
        }
        if aa > 1e-9 && bb > 1e-9 { ab / (aa * bb).sqrt() } else { 0.0 }
    }

    /// The similarity of the most similar of `others`; `None` without any.
    pub fn nearest(&self, others: &[&Self], weights: &[f32]) -> Option<f64> {
        others.iter().map(|other| self.similarity(other, weights)).max_by(f64::total_cmp)
    }
}

/// How much of each cell of a thumbnail is repainted: what is held is the source's and proves nothing.
pub fn repaint_weights(hold: &Hold) -> Vec<f32> {
    let repainted: Vec<f32> = hold.held.iter().map(|&held| if held > 0 { 0.0 } else { 1.0 }).collect();
    cell_means(&repainted, hold.held.dimensions())
}

/// The weights of a picture that is repainted everywhere.
pub fn full_weights() -> Vec<f32> {
    vec![1.0; (THUMBNAIL * THUMBNAIL) as usize]
}

/// Each thumbnail's similarity to the most similar other one, for the quantile of [`Thresholds::cosine_quantile`]. A
/// result is compared with its nearest too; a quantile over all pairs would call ever more results copies the more
/// pictures there are.
pub fn nearest_similarities(thumbnails: &[Thumbnail], weights: &[f32]) -> Vec<f64> {
    let nearest = |(at, one): (usize, &Thumbnail)| {
        let others = thumbnails.iter().enumerate().filter(|(other, _)| *other != at);
        others.map(|(_, other)| one.similarity(other, weights)).max_by(f64::total_cmp)
    };
    thumbnails.par_iter().enumerate().filter_map(nearest).collect()
}

/// Means over the cells of a grid; a cell smaller than a pixel has that pixel's value.
#[expect(clippy::cast_precision_loss, reason = "pixel counts of a cell")]
fn cell_means(values: &[f32], (width, height): (u32, u32)) -> Vec<f32> {
    let span = |cell: u32, length: u32| {
        let first = cell * length / THUMBNAIL;
        first..((cell + 1) * length / THUMBNAIL).max(first + 1).min(length)
    };
    let mut means = Vec::with_capacity((THUMBNAIL * THUMBNAIL) as usize);
    for row in 0..THUMBNAIL {
        for column in 0..THUMBNAIL {
            let (columns, rows) = (span(column, width), span(row, height));
            let count = columns.len() * rows.len();
            let sum: f32 = rows
                .map(|y| columns.clone().map(|x| values[y as usize * width as usize + x as usize]).sum::<f32>())
                .sum();
            means.push(sum / count.max(1) as f32);
        }
    }
    means
}

/// What real train pictures of a class measure; the yardstick of [`judge`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Real {
    /// Median brightness inside real lesions.
    pub median: Spread,
    /// [`Seam::jump`] on real pictures.
    pub seam_jump: Spread,
    /// [`Seam::step`] on real pictures.
    pub seam_step: Spread,
    /// Thumbnails of the train pictures.
    pub thumbnails: Vec<Thumbnail>,
    /// Similarity that a result must not exceed: a quantile of [`nearest_similarities`]; `None` judges none.
    pub similarity_max: Option<f64>,
}

/// A pair to be judged by its pixels.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The picture it was made from.
    pub source: &'a RgbImage,
    /// The result.
    pub result: &'a RgbImage,
    /// The label of the result.
    pub mask: &'a GrayImage,
    /// What was held; `None` when all was repainted.
    pub hold: Option<&'a Hold>,
}

/// Least part of the picture around a kept lesion that must be new: with less the pair is its source again.
const REPAINTED_MIN: f64 = 0.01;

/// All tests of this file, added to `verdict`. Seams are judged only upwards: a border may be smoother than real edges.
pub fn judge(candidate: &Candidate, real: &Real, thresholds: &Thresholds, verdict: &mut Verdict) {
    let Candidate { source, result, mask, hold } = *candidate;
    verdict.at_least("spread", spread(result), thresholds.spread_min);
    verdict.at_most("clipped_more", clipped_more(result, source), thresholds.clipped_max);
    match median_inside(result, mask) {
        Some(median) => verdict.within("median", median, &real.median, thresholds.sigma),
        None => verdict.refuse("the mask is empty or of another size"),
    }
    if let Some(hold) = hold.filter(|hold| hold.side == Side::Held) {
        verdict.at_least("repainted", hold.repaint_frac(), REPAINTED_MIN);
    }
    if let Some(Seam { jump, step }) = hold.and_then(|hold| seam(result, hold)) {
        for (name, value, spread) in [("seam_jump", jump, real.seam_jump), ("seam_step", step, real.seam_step)] {
            if spread.count < 3 {
                verdict.note(name, value);
            } else {
                verdict.at_most(name, value, spread.mean + thresholds.sigma * spread.deviation);
            }
        }
    }
    let weights = hold.map_or_else(full_weights, repaint_weights);
    let (own, result) = (Thumbnail::of(source), Thumbnail::of(result));
    // a part of the noise schedule leaves the source's layout: that is no copy of another picture
    verdict.note("source_similarity", result.similarity(&own, &weights));
    let others: Vec<&Thumbnail> = real.thumbnails.iter().filter(|other| **other != own).collect();
    if let Some(similarity) = result.nearest(&others, &weights) {
        match real.similarity_max {
            Some(most) => verdict.at_most("pixel_similarity", similarity, most),
            None => verdict.note("pixel_similarity", similarity),
        }
    }
}

#[cfg(test)]
#[path = "pixels_tests.rs"]
mod tests;
