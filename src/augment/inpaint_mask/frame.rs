//! Frame: maps an image of any size into the generator's square input and back. The image is scaled to fit and never
//! stretched.
//!
//! The rest of the square repeats the image's edge pixels. A black border would add an edge: the autoencoder rings
//! along it, and the model paints frames and vignettes. Mirrored padding could show a lesion at the border twice.

use image::imageops::{self, FilterType};
use image::{GrayImage, RgbImage};

use crate::error::{Error, Result};

/// Side of a latent cell in model pixels, at the published sizes.
const CELL: u32 = 8;

/// Position of an image in a square of `side` pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SquareFrame {
    /// Width and height of the image.
    pub size: (u32, u32),
    /// Side of the square.
    pub side: u32,
    /// Width and height of the image inside the square.
    pub inner: (u32, u32),
    /// Column and row of the image's upper left pixel inside the square.
    pub offset: (u32, u32),
    /// Side of a latent cell in model pixels, a divisor of the side.
    pub cell: u32,
}

impl SquareFrame {
    /// The frame of an image of `size` (width, height) in a square of `side` pixels, a multiple of 8.
    ///
    /// # Errors
    /// [`Error::Shape`] for an image or square without pixels, or an invalid side.
    pub fn new(size: (u32, u32), side: u32) -> Result<Self> {
        if size.0 == 0 || size.1 == 0 || side == 0 || !side.is_multiple_of(CELL) {
            let reason = format!("an image of {}x{} does not fit a square of side {side}", size.0, size.1);
            return Err(Error::Shape { reason });
        }
        let longest = u64::from(size.0.max(size.1));
        let fitted = |length: u32| {
            let scaled = (u64::from(length) * u64::from(side) + longest / 2) / longest;
            u32::try_from(scaled).unwrap_or(side).clamp(1, side)
        };
        let inner = (fitted(size.0), fitted(size.1));
        Ok(Self { size, side, inner, offset: ((side - inner.0) / 2, (side - inner.1) / 2), cell: CELL })
    }

    /// Length of a model pixel in pixels of the image.
    pub fn pixels_per_model_pixel(&self) -> f64 {
        f64::from(self.size.0.max(self.size.1)) / f64::from(self.side)
    }

    /// Latent cells along the side.
    pub fn cells(&self) -> usize {
        (self.side / self.cell) as usize
    }

    pub(super) fn check(&self, what: &str, found: (u32, u32)) -> Result<()> {
        if found == self.size {
            return Ok(());
        }
        let ((width, height), (w, h)) = (self.size, found);
        Err(Error::Shape { reason: format!("the {what} is {w}x{h}, the image {width}x{height}") })
    }

    /// The square that contains the image (Catmull-Rom, antialiased).
    ///
    /// # Errors
    /// [`Error::Shape`] when the image does not have the frame's size.
    pub fn to_model(&self, image: &RgbImage) -> Result<RgbImage> {
        self.check("image to be framed", image.dimensions())?;
        let inner = imageops::resize(image, self.inner.0, self.inner.1, FilterType::CatmullRom);
        let at = |model: u32, offset: u32, length: u32| model.saturating_sub(offset).min(length - 1);
        Ok(RgbImage::from_fn(self.side, self.side, |x, y| {
            *inner.get_pixel(at(x, self.offset.0, self.inner.0), at(y, self.offset.1, self.inner.1))
        }))
    }

    /// The square that contains the mask (nearest neighbour); 0 in the padding.
    ///
    /// A structure thinner than a model pixel may vanish here; [`super::InpaintMask::latent_mask`] does not lose it.
    ///
    /// # Errors
    /// [`Error::Shape`] when the mask does not have the frame's size.
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

    /// Extracts the image from a square and scales it to its original size (Catmull-Rom, antialiased).
    ///
    /// # Errors
    /// [`Error::Shape`] when the square does not have the frame's side.
    pub fn to_image(&self, square: &RgbImage) -> Result<RgbImage> {
        let (width, height) = square.dimensions();
        if (width, height) != (self.side, self.side) {
            return Err(Error::Shape { reason: format!("{width}x{height} is not a square of side {}", self.side) });
        }
        let inner = imageops::crop_imm(square, self.offset.0, self.offset.1, self.inner.0, self.inner.1).to_image();
        Ok(imageops::resize(&inner, self.size.0, self.size.1, FilterType::CatmullRom))
    }

    /// Latent cells that touch a set pixel (`wanted`) or an unset pixel of the image, row by row.
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

    /// The cells along one axis that pixel `at` of the image overlaps.
    fn cell_span(&self, at: u32, offset: u32, inner: u32, length: u32) -> std::ops::Range<usize> {
        let (at, offset, inner, length) = (u64::from(at), u64::from(offset), u64::from(inner), u64::from(length));
        let cell = u64::from(self.cell);
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
