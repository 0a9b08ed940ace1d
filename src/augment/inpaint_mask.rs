//! Inpainting mask: the preserved pixels of an image (the label with a rim of real context, and decoys), colour
//! matching and pasting.
//!
//! ```text
//! label -> InpaintMask::draw -> latent_mask -> (sampler) -> SquareFrame::to_image -> ColourMatch -> paste_exact | paste_vae
//! ```
//!
//! Decoys are preserved regions without a lesion. If only lesions were original pixels, sensor noise alone would
//! predict the label. A rim of random width and decoys weaken that shortcut; they do not remove it.
//!
//! Lengths in model pixels refer to the square input of the generator ([`SquareFrame`]). In a larger original they are
//! proportionally longer, and at least one pixel. This module does not depend on any network.

mod decoy;
mod distance;
mod field;
mod frame;
mod paste;

use image::GrayImage;
use rand::Rng;
use std::ops::RangeInclusive;

pub use self::distance::{dilate, squared_distances};
pub use self::field::field_of_view;
pub use self::frame::SquareFrame;
pub use self::paste::{ColourMatch, is_grey, paste_exact, paste_vae};

use crate::data::image::foreground;
use crate::data::position::PixelBox;
use crate::error::Result;

/// Narrowest and widest rim around the label, in model pixels.
const RIM_PX: [f64; 2] = [8.0, 64.0];
/// The rim is at least this fraction of the label's equivalent diameter, and never wider than the widest.
const RIM_FRAC: f64 = 0.1;
/// Length of the ramp between original and generated pixels, in model pixels; never longer than the rim.
const RAMP_PX: RangeInclusive<f64> = 8.0..=16.0;
/// Maximum number of decoys in one image.
const DECOYS_MAX: usize = 3;
/// Minimum repainted fraction of the image. If less were repainted, the rim shrinks to its minimum and decoys are left
/// out.
const REPAINT_MIN_FRAC: f64 = 0.3;
/// Longest ramp inside a new lesion, in model pixels.
const LESION_RAMP_PX: f64 = 4.0;

/// Widest rim that [`InpaintMask::around`] repaints around a new lesion, in model pixels.
pub const AROUND_MAX_PX: f64 = 16.0;

/// Decides about latent cells on the border, see [`InpaintMask::latent_mask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// For `keep_lesion`: a cell with any preserved pixel is preserved.
    Preserved,
    /// For `edit_lesion` and `insert_lesion`: a cell with any repainted pixel is repainted.
    Repainted,
}

/// Preserved and repainted pixels of one image, at its original size.
#[derive(Debug, Clone, PartialEq)]
pub struct InpaintMask {
    /// Pixels that are preserved bit for bit, 0 or 255.
    pub label: GrayImage,
    /// Preserved pixels: label, rim and decoys, 0 or 255. Ramps lie inside it.
    pub preserved: GrayImage,
    /// Boxes of the decoys (preserved regions without a label).
    pub decoys: Vec<PixelBox>,
    /// Width of the rim in pixels of the image.
    pub rim_px: f64,
    /// Length of the ramp in pixels of the image, at most `rim_px`.
    pub ramp_px: f64,
    /// Rule for latent cells on the border.
    pub side: Side,
    /// The only pixels that [`paste_exact`] changes: the mask of a new lesion. The generator repaints a rim around it too,
    /// so that the lesion fits its surroundings; those pixels stay the original's, because a lesion beyond its label
    /// would make the label wrong. `None`: all pixels that are not preserved change.
    pub target: Option<GrayImage>,
}

impl InpaintMask {
    /// Preserves `label` (any mask, see [`foreground`]) with a rim of random width and random decoys inside `field`.
    /// `field` is a map of the valid pixels (see [`field_of_view`]); `None` means the whole image.
    ///
    /// The rim's width is log-uniform between the larger of the narrowest rim and a tenth of the diameter, and the widest.
    /// With an empty label nothing is preserved, and there are no decoys.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] when `label`, `field` and `frame` differ in size.
    pub fn draw(label: &GrayImage, field: Option<&GrayImage>, frame: &SquareFrame, rng: &mut impl Rng) -> Result<Self> {
        frame.check("label", label.dimensions())?;
        if let Some(field) = field {
            frame.check("field of view", field.dimensions())?;
        }
        let label = foreground(label);
        let to_label = squared_distances(&label, true);
        let within = |reach: f64| map(label.dimensions(), |at| distance::is_within(to_label[at], reach));

        let unit = frame.pixels_per_model_pixel();
        let diameter = 2.0 * (count(&label) / std::f64::consts::PI).sqrt();
        let most = (RIM_PX[1] * unit).max(1.0);
        let least = (RIM_PX[0] * unit).max(RIM_FRAC * diameter).clamp(1.0, most);
        let mut rim_px = (rng.random_range(0.0..=1.0) * (most / least).ln()).exp() * least;
        let ramp = rng.random_range(RAMP_PX) * unit;
        let mut preserved = within(rim_px);
        if repaint_frac(&preserved) < REPAINT_MIN_FRAC {
            rim_px = least;
            preserved = within(rim_px);
        }
        let ramp_px = ramp.clamp(1.0, rim_px);
        let allowed = decoy::AllowedArea { to_label: &to_label, field, clear_px: rim_px + 2.0 * ramp_px };
        let decoys = decoy::add(&mut preserved, &within(rim_px), &allowed, rng);
        Ok(Self { label, preserved, decoys, rim_px, ramp_px, side: Side::Preserved, target: None })
    }

    /// Repaints a lesion. The generator repaints `source_mask` dilated by 8-16 model pixels, and only pixels of `source_mask`
    /// are pasted. The ramp lies inside of it, and is at most a quarter as long as the mask is deep. No pixel belongs to a
    /// preserved label.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] when `source_mask` and `frame` differ in size.
    pub fn around(source_mask: &GrayImage, frame: &SquareFrame, rng: &mut impl Rng) -> Result<Self> {
        frame.check("source mask", source_mask.dimensions())?;
        let unit = frame.pixels_per_model_pixel();
        let rim_px = (rng.random_range(8.0..=AROUND_MAX_PX) * unit).max(1.0);
        let target = foreground(source_mask);
        let repaint = dilate(&target, rim_px);
        let deepest = squared_distances(&target, false).into_iter().max().map_or(0.0, |depth| f64::from(depth).sqrt());
        let ramp_px = (deepest / 4.0).min(LESION_RAMP_PX * unit).max(1.0);
        let mut preserved = repaint;
        preserved.iter_mut().for_each(|value| *value = 255 - *value);
        let (width, height) = preserved.dimensions();
        let label = GrayImage::new(width, height);
        let (decoys, side, target) = (Vec::new(), Side::Repainted, Some(target));
        Ok(Self { label, preserved, decoys, rim_px, ramp_px, side, target })
    }

    /// The region inside which the ramp between original and generated pixels lies, along its border.
    pub fn ramp_region(&self) -> &GrayImage {
        self.target.as_ref().unwrap_or(&self.preserved)
    }

    /// The mask of the latent cells: 1 = repaint, 0 = preserve; `[S/8, S/8]` row by row for a frame of side S.
    ///
    /// With [`Side::Preserved`] a cell is preserved when it or one of its eight neighbours touches a preserved pixel,
    /// because the autoencoder's receptive field crosses cells. With [`Side::Repainted`] a cell is repainted when it
    /// touches a repainted pixel. Cells in the padding are always repainted: they are cut away, and preserved padding
    /// would spread its edge into the image.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] when the frame belongs to another size.
    pub fn latent_mask(&self, frame: &SquareFrame) -> Result<Vec<f32>> {
        frame.check("preserved mask", self.preserved.dimensions())?;
        let is_preserved = self.side == Side::Preserved;
        let mut cells = frame.touched_cells(&self.preserved, is_preserved);
        if is_preserved {
            cells = frame::widen(&cells, frame.cells());
        }
        Ok(cells.into_iter().map(|touched| if touched == is_preserved { 0.0 } else { 1.0 }).collect())
    }

    /// Repainted fraction of the image, 0..=1.
    pub fn repaint_frac(&self) -> f64 {
        repaint_frac(&self.preserved)
    }
}

/// Number of set pixels.
fn count(mask: &GrayImage) -> f64 {
    mask.iter().filter(|&&value| value > 0).count() as f64
}

fn repaint_frac(preserved: &GrayImage) -> f64 {
    let all = f64::from(preserved.width()) * f64::from(preserved.height());
    1.0 - count(preserved) / all.max(1.0)
}

/// A mask of this size (width, height), set where the predicate on the pixel index is true.
fn map((width, height): (u32, u32), is_set: impl Fn(usize) -> bool) -> GrayImage {
    let mut mask = GrayImage::new(width, height);
    for (at, value) in mask.iter_mut().enumerate() {
        *value = if is_set(at) { 255 } else { 0 };
    }
    mask
}

#[cfg(test)]
mod tests;
