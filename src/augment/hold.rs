//! Which pixels of a picture stay: the label with a rim of real context, decoys, colour match, pasting back.
//!
//! ```text
//! label -> Hold::draw -> latent_mask -> (sampler) -> Frame::to_picture -> ColourMatch -> paste_exact | paste_vae
//! ```
//!
//! Why decoys: where only lesions are camera pixels, "has sensor noise" predicts the label. A random rim and held
//! regions without a lesion make that shortcut insufficient, though not absent.
//!
//! Lengths called model pixels are those of the square picture that the model sees ([`Frame`]); in a larger original
//! they are as many times longer, and at least one pixel. Nothing here knows a network.

mod decoy;
mod distance;
mod field;
mod frame;
mod paste;

use image::GrayImage;
use rand::Rng;
use serde::{Deserialize, Serialize};

pub use self::distance::{dilate, squared_distances};
pub use self::field::field_of_view;
pub use self::frame::{CELL, Frame};
pub use self::paste::{ColourMatch, is_grey, paste_exact, paste_vae};

use crate::data::image::foreground;
use crate::data::position::PixelBox;
use crate::error::{Error, Result};

/// Rims, ramps and decoys of held labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HoldOptions {
    /// Narrowest rim around the label, in model pixels.
    pub rim_min_px: f64,
    /// Widest rim around the label, in model pixels.
    pub rim_max_px: f64,
    /// The rim is at least this part of the label's equivalent diameter (and never wider than `rim_max_px`).
    pub rim_frac: f64,
    /// Shortest ramp between original and generated pixels, in model pixels; never longer than the rim.
    pub ramp_min_px: f64,
    /// Longest ramp, in model pixels.
    pub ramp_max_px: f64,
    /// Most decoys in one picture; the number is drawn from 0 to this.
    pub decoys_max: usize,
    /// Part of the picture that stays free for the model, 0..1: the rim shrinks to its least and decoys are left out
    /// before less is repainted.
    pub repaint_min_frac: f64,
}

impl Default for HoldOptions {
    fn default() -> Self {
        Self {
            rim_min_px: 8.0,
            rim_max_px: 64.0,
            rim_frac: 0.1,
            ramp_min_px: 8.0,
            ramp_max_px: 16.0,
            decoys_max: 3,
            repaint_min_frac: 0.3,
        }
    }
}

impl HoldOptions {
    /// Whether the values can be used together.
    ///
    /// # Errors
    /// [`Error::Config`] that names the value at fault.
    pub fn check(&self) -> Result<()> {
        let ordered = |low: f64, high: f64| low > 0.0 && low <= high && high.is_finite();
        let frac = |value: f64| (0.0..1.0).contains(&value);
        for (key, good) in [
            ("rim_min_px, rim_max_px", ordered(self.rim_min_px, self.rim_max_px)),
            ("ramp_min_px, ramp_max_px", ordered(self.ramp_min_px, self.ramp_max_px)),
            ("rim_frac", frac(self.rim_frac)),
            ("repaint_min_frac", frac(self.repaint_min_frac)),
        ] {
            if !good {
                let hint = "lengths are positive with the least first, parts are from 0 to 1";
                return Err(Error::config(format!("augment.hold.{key}"), "out of range", hint));
            }
        }
        Ok(())
    }
}

/// Widest rim that [`Hold::around`] repaints around a new lesion, in model pixels.
pub const AROUND_MAX_PX: f64 = 16.0;

/// Which side of the border the sampler must get in full, see [`Hold::latent_mask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Held pixels matter most (`keep_lesion`): a latent cell with any held pixel is held.
    Held,
    /// Repainted pixels matter most (`edit_lesion`, `insert_lesion`): a cell with any repainted pixel is repainted.
    Repainted,
}

/// What of one picture stays, at the picture's own size.
#[derive(Debug, Clone, PartialEq)]
pub struct Hold {
    /// Pixels that must stay bit for bit, 0 or 255.
    pub label: GrayImage,
    /// Held pixels: label, rim and decoys, 0 or 255. Ramps lie inside it.
    pub held: GrayImage,
    /// The boxes of the decoys: held regions without a label.
    pub decoys: Vec<PixelBox>,
    /// Width of the rim in pixels of the picture.
    pub rim_px: f64,
    /// Length of the ramp in pixels of the picture, at most `rim_px`.
    pub ramp_px: f64,
    /// Whose border is exact in the latents.
    pub side: Side,
}

impl Hold {
    /// Holds `label` (any mask, see [`foreground`]) with a rim of random width and random decoys inside `field`, a map
    /// of the valid pixels (see [`field_of_view`]; all of the picture when `None`).
    ///
    /// The rim's width is log-uniform between the larger of `rim_min_px` and `rim_frac` diameters, and `rim_max_px`. Of an
    /// empty label nothing is held, and there are no decoys.
    ///
    /// # Errors
    /// [`Error::Shape`] when `label`, `field` and `frame` are not of one size.
    pub fn draw(
        label: &GrayImage,
        field: Option<&GrayImage>,
        frame: &Frame,
        options: &HoldOptions,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        frame.check("label", label.dimensions())?;
        if let Some(field) = field {
            frame.check("field of view", field.dimensions())?;
        }
        let label = foreground(label);
        let to_label = squared_distances(&label, true);
        let within = |reach: f64| map(label.dimensions(), |at| distance::is_within(to_label[at], reach));

        let unit = frame.pixels_per_model_pixel();
        let diameter = 2.0 * (count(&label) / std::f64::consts::PI).sqrt();
        let most = (options.rim_max_px * unit).max(1.0);
        let least = (options.rim_min_px * unit).max(options.rim_frac * diameter).clamp(1.0, most);
        let mut rim_px = (rng.random_range(0.0..=1.0) * (most / least).ln()).exp() * least;
        let ramp = rng.random_range(options.ramp_min_px..=options.ramp_max_px) * unit;
        let mut held = within(rim_px);
        if repaint_frac(&held) < options.repaint_min_frac {
            rim_px = least;
            held = within(rim_px);
        }
        let ramp_px = ramp.clamp(1.0, rim_px);
        let room = decoy::Room { to_label: &to_label, field, clear_px: rim_px + 2.0 * ramp_px, options };
        let decoys = decoy::add(&mut held, &within(rim_px), &room, rng);
        Ok(Self { label, held, decoys, rim_px, ramp_px, side: Side::Held })
    }

    /// Holds all but the surroundings of a new lesion: `donor` dilated by 8-16 model pixels is repainted, the ramp lies
    /// outside of that. No pixel is a label that must stay.
    ///
    /// # Errors
    /// [`Error::Shape`] when `donor` and `frame` are not of one size.
    pub fn around(donor: &GrayImage, frame: &Frame, rng: &mut impl Rng) -> Result<Self> {
        frame.check("donor mask", donor.dimensions())?;
        let unit = frame.pixels_per_model_pixel();
        let rim_px = (rng.random_range(8.0..=AROUND_MAX_PX) * unit).max(1.0);
        let repaint = dilate(&foreground(donor), rim_px);
        let mut held = repaint;
        held.iter_mut().for_each(|value| *value = 255 - *value);
        let (width, height) = held.dimensions();
        let label = GrayImage::new(width, height);
        Ok(Self { label, held, decoys: Vec::new(), rim_px, ramp_px: rim_px, side: Side::Repainted })
    }

    /// The mask of the latent cells: 1 = repaint, 0 = held; `[S/8, S/8]` row by row for a frame of side S.
    ///
    /// With [`Side::Held`] a cell is held when it touches a held pixel, and so are its eight neighbours, because the
    /// autoencoder's receptive field crosses cells. With [`Side::Repainted`] a cell is repainted when it touches a
    /// repainted pixel. Cells in the padding are free: they are cut away, and held padding would press its edge inwards.
    ///
    /// # Errors
    /// [`Error::Shape`] when the frame is one of another size.
    pub fn latent_mask(&self, frame: &Frame) -> Result<Vec<f32>> {
        frame.check("held mask", self.held.dimensions())?;
        match self.side {
            Side::Held => {
                let touched = frame.touched_cells(&self.held, true);
                Ok(frame::widen(&touched, frame.cells()).into_iter().map(|held| if held { 0.0 } else { 1.0 }).collect())
            }
            Side::Repainted => {
                let repainted = frame.touched_cells(&self.held, false);
                Ok(repainted.into_iter().map(|repaint| if repaint { 1.0 } else { 0.0 }).collect())
            }
        }
    }

    /// Part of the picture that is repainted, 0..=1.
    pub fn repaint_frac(&self) -> f64 {
        repaint_frac(&self.held)
    }
}

/// Number of set pixels.
#[expect(clippy::cast_precision_loss, reason = "pixel counts stay far below 2^53")]
fn count(mask: &GrayImage) -> f64 {
    mask.iter().filter(|&&value| value > 0).count() as f64
}

fn repaint_frac(held: &GrayImage) -> f64 {
    let all = f64::from(held.width()) * f64::from(held.height());
    1.0 - count(held) / all.max(1.0)
}

/// A mask of this size (width, height) from a rule on the pixel's index.
fn map((width, height): (u32, u32), is_set: impl Fn(usize) -> bool) -> GrayImage {
    let mut mask = GrayImage::new(width, height);
    for (at, value) in mask.iter_mut().enumerate() {
        *value = if is_set(at) { 255 } else { 0 };
    }
    mask
}

#[cfg(test)]
mod tests;
