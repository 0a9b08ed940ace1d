//! Pixel tests of generated pairs, without a model: blank and clipped images, the lesion's brightness, visible seams.
//!
//! Brightness is Rec. 601 luma from 0 to 1. Each test computes a number; the limits are [`super::Thresholds`]. The
//! intensity test follows the filter of MAISI; the other tests are this project's own.

use super::{Decision, Thresholds, ValueSpread};
use crate::augment::inpaint_mask::{InpaintMask, Side, squared_distances};
use crate::metrics::order::quantile;
use image::{GrayImage, Rgb, RgbImage};

/// Brightness of each pixel, row by row.
pub fn luma(image: &RgbImage) -> Vec<f32> {
    let of = |Rgb([r, g, b]): &Rgb<u8>| (0.299 * f32::from(*r) + 0.587 * f32::from(*g) + 0.114 * f32::from(*b)) / 255.0;
    image.pixels().map(of).collect()
}

/// Standard deviation of the brightness.
pub fn spread(image: &RgbImage) -> f64 {
    let values: Vec<f64> = luma(image).into_iter().map(f64::from).collect();
    ValueSpread::of(&values).deviation
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

/// Statistics of the real training images of a class, with which [`test_pixels`] compares.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RealStatistics {
    /// Median brightness inside real lesions.
    pub median: ValueSpread,
    /// [`Seam::jump`] on real images.
    pub seam_jump: ValueSpread,
    /// [`Seam::step`] on real images.
    pub seam_step: ValueSpread,
}

/// A generated pair for the pixel tests.
#[derive(Debug, Clone, Copy)]
pub struct TestedPair<'a> {
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
pub fn test_pixels(candidate: &TestedPair, real: &RealStatistics, thresholds: &Thresholds, decision: &mut Decision) {
    let TestedPair { source, result, mask, inpaint_mask } = *candidate;
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
        for (name, value, real) in [("seam_jump", jump, real.seam_jump), ("seam_step", step, real.seam_step)] {
            let most = (real.count >= 3).then_some(real.mean + thresholds.sigma * real.deviation);
            decision.at_most_if_known(name, value, most);
        }
    }
}

#[cfg(test)]
#[path = "pixels_tests.rs"]
mod tests;
