//! How a picture of any size lies in the model's square: scaled to fit, never stretched, and back.
//!
//! The rest of the square repeats the picture's edge pixels. A black border would be an edge of its own: the
//! autoencoder rings along it, and the model paints frames and vignettes; repeated pixels add no gradient there. (They
//! are not mirrored: a lesion at the border would then appear twice.)

use image::imageops::{self, FilterType};
use image::{GrayImage, RgbImage};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Side of a latent cell in model pixels.
pub const CELL: u32 = 8;

/// The place of a picture in a square of `side` pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Width and height of the picture.
    pub size: (u32, u32),
    /// Side of the square.
    pub side: u32,
    /// Width and height of the picture inside the square.
    pub inner: (u32, u32),
    /// Column and row of the picture's upper left pixel inside the square.
    pub offset: (u32, u32),
}

impl Frame {
    /// The frame of a picture of `size` (width, height) in a square of `side` pixels, a multiple of [`CELL`].
    ///
    /// # Errors
    /// [`Error::Shape`] for a picture or square without pixels, or another side.
    pub fn new(size: (u32, u32), side: u32) -> Result<Self> {
        if size.0 == 0 || size.1 == 0 || side == 0 || !side.is_multiple_of(CELL) {
            return Err(Error::Shape {
                reason: format!("a picture of {}x{} has no place in a square of side {side}", size.0, size.1),
            });
        }
        let longest = u64::from(size.0.max(size.1));
        let fitted = |length: u32| {
            let scaled = (u64::from(length) * u64::from(side) + longest / 2) / longest;
            u32::try_from(scaled).unwrap_or(side).clamp(1, side)
        };
        let inner = (fitted(size.0), fitted(size.1));
        Ok(Self { size, side, inner, offset: ((side - inner.0) / 2, (side - inner.1) / 2) })
    }

    /// Length of a model pixel in pixels of the picture.
    pub fn pixels_per_model_pixel(&self) -> f64 {
        f64::from(self.size.0.max(self.size.1)) / f64::from(self.side)
    }

    /// Latent cells along the side.
    pub fn cells(&self) -> usize {
        (self.side / CELL) as usize
    }

    pub(super) fn check(&self, what: &str, found: (u32, u32)) -> Result<()> {
        if found == self.size {
            return Ok(());
        }
        let ((width, height), (w, h)) = (self.size, found);
        Err(Error::Shape { reason: format!("the {what} is {w}x{h}, the picture {width}x{height}") })
    }

    /// The square with the picture in it (Catmull-Rom, antialiased).
    ///
    /// # Errors
    /// [`Error::Shape`] when the picture has another size than the frame's.
    pub fn to_model(&self, picture: &RgbImage) -> Result<RgbImage> {
        self.check("picture to be framed", picture.dimensions())?;
        let inner = imageops::resize(picture, self.inner.0, self.inner.1, FilterType::CatmullRom);
        let at = |model: u32, offset: u32, length: u32| model.saturating_sub(offset).min(length - 1);
        Ok(RgbImage::from_fn(self.side, self.side, |x, y| {
            *inner.get_pixel(at(x, self.offset.0, self.inner.0), at(y, self.offset.1, self.inner.1))
        }))
    }

    /// The square with the mask in it, values of the nearest pixel; 0 in the padding.
    ///
    /// A structure thinner than a model pixel may vanish here; [`super::Hold::latent_mask`] does not lose it.
    ///
    /// # Errors
    /// [`Error::Shape`] when the mask has another size than the frame's.
    pub fn mask_to_model(&self, mask: &GrayImage) -> Result<GrayImage> {
        self.check("mask to be framed", mask.dimensions())?;
        let nearest = |model: u32, offset: u32, inner: u32, length: u32| {
            let inside = model.checked_sub(offset).filter(|&at| at < inner)?;
            u32::try_from((2 * u64::from(inside) + 1) * u64::from(length) / (2 * u64::from(inner))).ok()
        };
        Ok(GrayImage::from_fn(self.side, self.side, |x, y| {
            let column = nearest(x, self.offset.0, self.inner.0, self.size.0);
            let row = nearest(y, self.offset.1, self.inner.1, self.size.1);
            column.zip(row).map_or(image::Luma([0]), |(x, y)| *mask.get_pixel(x, y))
        }))
    }

    /// The picture out of a square, at the picture's own size (Catmull-Rom, antialiased).
    ///
    /// # Errors
    /// [`Error::Shape`] when the square has another side than the frame's.
    pub fn to_picture(&self, square: &RgbImage) -> Result<RgbImage> {
        let (width, height) = square.dimensions();
        if (width, height) != (self.side, self.side) {
            return Err(Error::Shape { reason: format!("{width}x{height} is no square of side {}", self.side) });
        }
        let inner = imageops::crop_imm(square, self.offset.0, self.offset.1, self.inner.0, self.inner.1).to_image();
        Ok(imageops::resize(&inner, self.size.0, self.size.1, FilterType::CatmullRom))
    }

    /// Which latent cells touch a pixel of the picture that is set (`wanted`) or not set, row by row.
    pub(super) fn touched_cells(&self, mask: &GrayImage, wanted: bool) -> Vec<bool> {
        let cells = self.cells();
        let mut touched = vec![false; cells * cells];
        let columns: Vec<_> =
            (0..self.size.0).map(|x| self.cell_span(x, self.offset.0, self.inner.0, self.size.0)).collect();
        for (y, row) in mask.rows().enumerate() {
            let y = u32::try_from(y).unwrap_or(u32::MAX);
            let rows = self.cell_span(y, self.offset.1, self.inner.1, self.size.1);
            for (columns, value) in columns.iter().zip(row) {
                if (value[0] > 0) == wanted {
                    for row in rows.clone() {
                        touched[row * cells..][columns.clone()].fill(true);
                    }
                }
            }
        }
        touched
    }

    /// The cells along one axis that pixel `at` of the picture reaches into.
    fn cell_span(&self, at: u32, offset: u32, inner: u32, length: u32) -> std::ops::Range<usize> {
        let (at, offset, inner, length) = (u64::from(at), u64::from(offset), u64::from(inner), u64::from(length));
        let cell = u64::from(CELL);
        let first = (offset * length + at * inner) / (length * cell);
        let end = (offset * length + (at + 1) * inner).div_ceil(length * cell);
        let index = |value: u64| usize::try_from(value).unwrap_or(usize::MAX).min(self.cells());
        index(first)..index(end)
    }
}

/// The set cells of a `side * side` grid and their eight neighbours.
pub(super) fn widen(cells: &[bool], side: usize) -> Vec<bool> {
    let near = |at: usize| at.saturating_sub(1)..(at + 2).min(side);
    (0..side * side)
        .map(|at| near(at / side).any(|row| near(at % side).any(|column| cells[row * side + column])))
        .collect()
}
