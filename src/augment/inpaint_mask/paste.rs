//! Colour matching, and pasting of preserved pixels over generated ones.

use image::{GrayImage, Rgb, RgbImage};

use super::{InpaintMask, squared_distances};
use crate::error::{Error, Result};

/// Minimum number of pixels for a fit.
const LEAST_PIXELS: usize = 16;
/// Range of the gain: the autoencoder's tint is mild, so a larger gain would fit noise.
const GAIN: (f64, f64) = (0.75, 1.333);
/// Maximum shift of a channel's mean in grey levels.
const SHIFT: f64 = 32.0;

/// A gain and an offset for each channel, from generated to original levels (0..=255).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ColourMatch {
    /// Factor of each channel.
    pub gain: [f64; 3],
    /// Levels added to each channel.
    pub offset: [f64; 3],
}

impl ColourMatch {
    /// No change.
    pub const IDENTITY: Self = Self { gain: [1.0; 3], offset: [0.0; 3] };

    /// Least-squares fit on the preserved pixels outside the label, which show the same content in both images.
    /// Clamped; the identity when there are too few pixels.
    ///
    /// # Errors
    /// [`Error::Shape`] when the images and `inpaint_mask` differ in size.
    pub fn fit(original: &RgbImage, generated: &RgbImage, inpaint_mask: &InpaintMask) -> Result<Self> {
        same_size(original, generated, &inpaint_mask.preserved)?;
        let is_rim = |preserved: u8, label: u8| preserved > 0 && label == 0;
        let masks = inpaint_mask.preserved.iter().zip(inpaint_mask.label.iter());
        let pairs: Vec<([u8; 3], [u8; 3])> = original
            .pixels()
            .zip(generated.pixels())
            .zip(masks)
            .filter(|(_, (preserved, label))| is_rim(**preserved, **label))
            .map(|((original, generated), _)| (generated.0, original.0))
            .collect();
        let mut fitted = Self::IDENTITY;
        if pairs.len() >= LEAST_PIXELS {
            for channel in 0..3 {
                let levels = pairs.iter().map(|(from, to)| (f64::from(from[channel]), f64::from(to[channel])));
                (fitted.gain[channel], fitted.offset[channel]) = line(levels);
            }
        }
        Ok(fitted)
    }

    /// The image with adjusted levels, rounded and clamped.
    pub fn apply(&self, image: &RgbImage) -> RgbImage {
        let tables: [Vec<u8>; 3] = std::array::from_fn(|channel| {
            (0..=255_u8).map(|level| byte(f64::from(level).mul_add(self.gain[channel], self.offset[channel]))).collect()
        });
        let mut out = image.clone();
        for pixel in out.pixels_mut() {
            for (value, table) in pixel.0.iter_mut().zip(&tables) {
                *value = table[usize::from(*value)];
            }
        }
        out
    }
}

/// Gain and offset of the clamped least-squares line through (from, to).
fn line(levels: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    let (mut n, mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (from, to) in levels {
        n += 1.0;
        x += from;
        y += to;
        xx += from * from;
        xy += from * to;
    }
    let (x, y) = (x / n, y / n);
    let (variance, covariance) = (xx / n - x * x, xy / n - x * y);
    // The gain of a constant rim is unknown.
    let gain = if variance < 1.0 { 1.0 } else { (covariance / variance).clamp(GAIN.0, GAIN.1) };
    // The line goes through the means; the shift is clamped.
    (gain, (y - x).clamp(-SHIFT, SHIFT) + (1.0 - gain) * x)
}

/// Whether the three channels are equal in every pixel.
pub fn is_grey(image: &RgbImage) -> bool {
    image.pixels().all(|Rgb([r, g, b])| r == g && g == b)
}

/// The original where it is preserved and the generated image elsewhere, with a cosine ramp inside the preserved
/// region. With a [`target`](InpaintMask::target): the generated image inside the target, with a ramp inside of it, and the
/// original everywhere else.
///
/// A pixel of the label equals the original bit for bit, and so does every preserved pixel deeper than the ramp. The
/// ramp starts at the border of the preserved region; the image's edge is not such a border. The result of a grey
/// original is grey.
///
/// # Errors
/// [`Error::Shape`] when the images and `inpaint_mask` differ in size.
pub fn paste_exact(original: &RgbImage, generated: &RgbImage, inpaint_mask: &InpaintMask) -> Result<RgbImage> {
    same_size(original, generated, &inpaint_mask.preserved)?;
    let mut out = paste_vae(original, generated);
    // 0 on repainted pixels, at least 1 on preserved ones.
    let depths = squared_distances(inpaint_mask.ramp_region(), false);
    let masks = depths.iter().zip(inpaint_mask.label.iter());
    for ((pixel, original), (&depth, &label)) in out.pixels_mut().zip(original.pixels()).zip(masks) {
        let inside = original_weight(depth, inpaint_mask.ramp_px);
        let weight = match &inpaint_mask.target {
            _ if label > 0 => 1.0,
            Some(_) => 1.0 - inside,
            None => inside,
        };
        if weight >= 1.0 {
            *pixel = *original;
        } else if weight > 0.0 {
            for (value, &source_value) in pixel.0.iter_mut().zip(&original.0) {
                *value = byte(weight.mul_add(f64::from(source_value) - f64::from(*value), f64::from(*value)));
            }
        }
    }
    Ok(out)
}

/// The generated image everywhere. The latents preserved the label's geometry but not its exact pixels. Grey for a
/// grey original. Not suitable for very thin structures, which the autoencoder blurs.
pub fn paste_vae(original: &RgbImage, generated: &RgbImage) -> RgbImage {
    let mut out = generated.clone();
    if is_grey(original) {
        for Rgb(pixel) in out.pixels_mut() {
            let sum: u16 = pixel.iter().map(|&value| u16::from(value)).sum();
            *pixel = [u8::try_from((sum + 1) / 3).unwrap_or(u8::MAX); 3];
        }
    }
    out
}

/// Weight of the preserved original (of the generated image with a target) at a squared depth inside its region: 0 outside, half a cosine wave, 1 from
/// `ramp_px` on.
pub(super) fn original_weight(squared_depth: u32, ramp_px: f64) -> f64 {
    if squared_depth == u32::MAX {
        return 1.0; // nothing is repainted
    }
    let depth = f64::from(squared_depth).sqrt();
    if depth >= ramp_px { 1.0 } else { 0.5 - 0.5 * (std::f64::consts::PI * depth / ramp_px).cos() }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
fn byte(level: f64) -> u8 {
    level.round() as u8
}

fn same_size(original: &RgbImage, generated: &RgbImage, preserved: &GrayImage) -> Result<()> {
    let sizes = [original.dimensions(), generated.dimensions(), preserved.dimensions()];
    if sizes[0] == sizes[1] && sizes[1] == sizes[2] {
        return Ok(());
    }
    let [(a, b), (c, d), (e, f)] = sizes;
    Err(Error::Shape {
        reason: format!("the original is {a}x{b}, the generated image {c}x{d}, the preserved mask {e}x{f}"),
    })
}
