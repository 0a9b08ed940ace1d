//! Pixel tests of generated pairs, without a model: blank and clipped images, the lesion's brightness, visible seams,
//! copies of training images.
//!
//! Brightness is Rec. 601 luma from 0 to 1. Each test computes a number; the limits are [`super::Thresholds`]. The
//! intensity test follows the filter of MAISI; the other tests are this project's own.

use image::{GrayImage, Rgb, RgbImage};
use rayon::prelude::*;

use super::{Decision, Spread, Thresholds};
use crate::augment::inpaint_mask::{InpaintMask, Side, squared_distances};
use crate::metrics::order::quantile;

/// Brightness of each pixel, row by row.
pub fn luma(image: &RgbImage) -> Vec<f32> {
    let of = |Rgb([r, g, b]): &Rgb<u8>| (0.299 * f32::from(*r) + 0.587 * f32::from(*g) + 0.114 * f32::from(*b)) / 255.0;
    image.pixels().map(of).collect()
}

/// Standard deviation of the brightness.
pub fn spread(image: &RgbImage) -> f64 {
    let values: Vec<f64> = luma(image).into_iter().map(f64::from).collect();
    Spread::of(&values).deviation
}

/// Fraction of clipped pixels: a channel at 255, or all channels at 0.
pub fn clipped(image: &RgbImage) -> f64 {
    let is_clipped = |pixel: &&Rgb<u8>| pixel.0.contains(&255) || pixel.0 == [0; 3];
    let part = |count: usize| count as f64 / (image.as_raw().len() / 3).max(1) as f64;
    part(image.pixels().filter(is_clipped).count())
}

/// Fraction of clipped pixels in the result minus that of its source, so that a dark background is no fault. May be
/// negative.
pub fn clipped_more(result: &RgbImage, source: &RgbImage) -> f64 {
    clipped(result) - clipped(source)
}

/// Median brightness inside a mask (values above 0); `None` when the mask is empty or has another size.
pub fn median_inside(image: &RgbImage, mask: &GrayImage) -> Option<f64> {
    if image.dimensions() != mask.dimensions() {
        return None;
    }
    let inside: Vec<f64> =
        luma(image).into_iter().zip(mask.iter()).filter(|(_, mask)| **mask > 0).map(|(l, _)| f64::from(l)).collect();
    quantile(&inside, 0.5)
}

/// Visibility of the border between preserved and generated pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seam {
    /// Mean difference of brightness between the two ends of the ramp; it shows a tint.
    pub jump: f64,
    /// Largest step between neighbouring pixels across the ramp, averaged over the border; it shows a hard edge.
    pub step: f64,
}

/// Maximum number of border pixels that are sampled.
const SEAM_SAMPLES: usize = 4000;
/// Distance beyond both ends of the ramp over which the seam is measured, in pixels.
const SEAM_MARGIN: f64 = 2.0;

/// Measures the seam of a pasted image along the border of the preserved region, or of a new lesion. On a real image with the same
/// inpainting mask it gives the value of natural edges. `None` without a border, or for an image of another size.
pub fn seam(image: &RgbImage, inpaint_mask: &InpaintMask) -> Option<Seam> {
    if image.dimensions() != inpaint_mask.preserved.dimensions() {
        return None;
    }
    let region = inpaint_mask.ramp_region();
    let (inside, outside) = (squared_distances(region, false), squared_distances(region, true));
    // Positive inside; 0 lies between the two pixels of the border.
    #[expect(clippy::cast_possible_truncation, reason = "distances within an image")]
    let depth: Vec<f32> = inside
        .iter()
        .zip(&outside)
        .map(|(&inside, &outside)| {
            let root = |squared: u32| (f64::from(squared).sqrt() - 0.5).max(0.0) as f32;
            if inside > 0 { root(inside) } else { -root(outside) }
        })
        .collect();
    let border: Vec<usize> = (0..inside.len()).filter(|&at| (1..=2).contains(&inside[at])).collect();
    let depth = Plane { values: depth, size: image.dimensions() };
    let luma = Plane { values: luma(image), size: image.dimensions() };
    let stride = border.len().div_ceil(SEAM_SAMPLES).max(1);
    let (mut jumps, mut steps, mut count) = (0.0, 0.0, 0.0);
    for &at in border.iter().step_by(stride) {
        if let Some(Seam { jump, step }) = seam_at(at, &depth, &luma, inpaint_mask.ramp_px) {
            jumps += jump;
            steps += step;
            count += 1.0;
        }
    }
    (count > 0.0).then(|| Seam { jump: jumps / count, step: steps / count })
}

/// The seam along the normal through a border pixel; `None` where the normal leaves the image or has no direction.
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

/// A grid of values with bilinear interpolation.
struct Plane {
    values: Vec<f32>,
    size: (u32, u32),
}

impl Plane {
    /// Interpolated value; `None` outside of the image.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to lie inside the image")]
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

/// Cells along each side of a thumbnail.
const THUMBNAIL: u32 = 24;

/// Mean brightness of the cells of a coarse grid over an image.
#[derive(Debug, Clone, PartialEq)]
pub struct Thumbnail {
    cells: Vec<f32>,
}

impl Thumbnail {
    /// Computes the thumbnail of an image of any size.
    pub fn of(image: &RgbImage) -> Self {
        Self { cells: cell_means(&luma(image), image.dimensions()) }
    }

    /// Normalised cross-correlation, -1..=1, with a weight for each cell ([`repaint_weights`]); 0 when one of the two
    /// is constant.
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

    /// Similarity to the most similar of `others`; `None` when there are none.
    pub fn nearest(&self, others: &[&Self], weights: &[f32]) -> Option<f64> {
        others.iter().map(|other| self.similarity(other, weights)).max_by(f64::total_cmp)
    }
}

/// Fraction of each thumbnail cell that is repainted. Preserved pixels are the source's own, so they do not show a
/// copy.
pub fn repaint_weights(inpaint_mask: &InpaintMask) -> Vec<f32> {
    let is_new = inpaint_mask.ramp_region().iter().map(|value| (*value > 0) == inpaint_mask.target.is_some());
    let repainted: Vec<f32> = is_new.map(|is_new| if is_new { 1.0 } else { 0.0 }).collect();
    cell_means(&repainted, inpaint_mask.preserved.dimensions())
}

/// Weights of an image that is repainted everywhere.
pub fn full_weights() -> Vec<f32> {
    vec![1.0; (THUMBNAIL * THUMBNAIL) as usize]
}

/// Similarity of each thumbnail to its nearest neighbour, for the quantile of [`Thresholds::cosine_quantile`].
/// Generated images are compared with their nearest neighbour too. A quantile over all pairs of images would call
/// more results copies the more images there are.
pub fn nearest_similarities(thumbnails: &[Thumbnail], weights: &[f32]) -> Vec<f64> {
    let nearest = |(at, one): (usize, &Thumbnail)| {
        let others = thumbnails.iter().enumerate().filter(|(other, _)| *other != at);
        others.map(|(_, other)| one.similarity(other, weights)).max_by(f64::total_cmp)
    };
    thumbnails.par_iter().enumerate().filter_map(nearest).collect()
}

/// Means over the cells of a grid; a cell smaller than a pixel has the value of that pixel.
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

/// Statistics of the real training images of a class, with which [`test_pixels`] compares.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RealStatistics {
    /// Median brightness inside real lesions.
    pub median: Spread,
    /// [`Seam::jump`] on real images.
    pub seam_jump: Spread,
    /// [`Seam::step`] on real images.
    pub seam_step: Spread,
    /// Thumbnails of the training images.
    pub thumbnails: Vec<Thumbnail>,
    /// Maximum similarity of a result to a training image: a quantile of [`nearest_similarities`]. `None` disables
    /// the test.
    pub similarity_max: Option<f64>,
}

/// A generated pair for the pixel tests.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The source image.
    pub source: &'a RgbImage,
    /// The generated image.
    pub result: &'a RgbImage,
    /// The label of the generated image.
    pub mask: &'a GrayImage,
    /// The inpainting mask; `None` when everything was repainted.
    pub inpaint_mask: Option<&'a InpaintMask>,
}

/// Minimum repainted fraction of the image in mode `keep_lesion`. With less, the pair is its source again.
pub const REPAINTED_MIN: f64 = 0.01;

/// Runs all tests of this file and adds their results to `decision`. Seams have an upper limit only, because a border
/// may be smoother than real edges.
pub fn test_pixels(candidate: &Candidate, real: &RealStatistics, thresholds: &Thresholds, decision: &mut Decision) {
    let Candidate { source, result, mask, inpaint_mask } = *candidate;
    decision.at_least("spread", spread(result), thresholds.spread_min);
    decision.at_most("clipped_more", clipped_more(result, source), thresholds.clipped_max);
    match median_inside(result, mask) {
        Some(median) => decision.within("median", median, &real.median, thresholds.sigma),
        None => decision.reject("the mask is empty or has another size"),
    }
    if let Some(inpaint_mask) = inpaint_mask.filter(|inpaint_mask| inpaint_mask.side == Side::Preserved) {
        decision.at_least("repainted", inpaint_mask.repaint_frac(), REPAINTED_MIN);
    }
    if let Some(Seam { jump, step }) = inpaint_mask.and_then(|inpaint_mask| seam(result, inpaint_mask)) {
        for (name, value, spread) in [("seam_jump", jump, real.seam_jump), ("seam_step", step, real.seam_step)] {
            if spread.count < 3 {
                decision.add_score(name, value);
            } else {
                decision.at_most(name, value, spread.mean + thresholds.sigma * spread.deviation);
            }
        }
    }
    let weights = inpaint_mask.map_or_else(full_weights, repaint_weights);
    let (own, result) = (Thumbnail::of(source), Thumbnail::of(result));
    // similarity to the own source is only logged: a shortened noise schedule preserves the source's layout
    decision.add_score("source_similarity", result.similarity(&own, &weights));
    let others: Vec<&Thumbnail> = real.thumbnails.iter().filter(|other| **other != own).collect();
    if let Some(similarity) = result.nearest(&others, &weights) {
        match real.similarity_max {
            Some(most) => decision.at_most("pixel_similarity", similarity, most),
            None => decision.add_score("pixel_similarity", similarity),
        }
    }
}

#[cfg(test)]
#[path = "pixels_tests.rs"]
mod tests;
