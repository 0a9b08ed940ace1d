//! Distances between the contours of two masks, and the surface Dice that they give.
//!
//! Source: Nikolov et al. 2018 ("Deep learning to achieve clinically applicable segmentation of head and neck anatomy
//! for radiotherapy"), computed as `DeepMind`'s package `surface-distance` 0.1 does for masks of two dimensions.
//!
//! The contour is that of marching squares. Its pieces lie around the corners that four pixels share: a corner whose
//! pixels are not all equal is a piece of contour. The length of a piece depends on which of its pixels are set. The
//! distance of a piece is that from its corner to the nearest corner on the other contour. Pixels outside of the image
//! are background, so a mask at the border of the image has a contour there.

use super::distance_transform::{Spacing, squared_distances};
use super::segmentation::same_length;
use crate::error::{Error, Result};

/// A piece of a contour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Distance to the other contour, in the unit of the spacing; infinite if the other mask is empty.
    pub distance: f64,
    /// Length of the piece, in the unit of the spacing.
    pub length: f64,
}

/// The contours of two masks, each with its distances to the other.
#[derive(Debug, Clone, PartialEq)]
pub struct SurfaceDistances {
    /// Contour of the prediction; empty if the prediction is.
    pub prediction: Vec<Piece>,
    /// Contour of the truth; empty if the truth is.
    pub truth: Vec<Piece>,
}

impl SurfaceDistances {
    /// Compares two masks in row-major order with rows of `width` pixels.
    ///
    /// # Errors
    /// [`Error::Shape`] if the masks differ in size or are not whole rows; [`Error::Config`] for a spacing that is not
    /// above 0.
    pub fn of(prediction: &[bool], truth: &[bool], width: usize, spacing: Spacing) -> Result<Self> {
        same_length(prediction.len(), truth.len())?;
        if width == 0 || !truth.len().is_multiple_of(width) {
            return Err(Error::Shape { reason: format!("{} pixels are not rows of {width}", truth.len()) });
        }
        for side in [spacing.row, spacing.column] {
            if !(side.is_finite() && side > 0.0) {
                return Err(Error::config("spacing", format!("{side} is no distance"), "use a number above 0"));
            }
        }
        // distances between contours do not depend on pixels that are background in both masks
        let Some(window) = Window::around(prediction, truth, width) else {
            return Ok(Self { prediction: Vec::new(), truth: Vec::new() });
        };
        let (prediction, truth) = (window.corners(prediction), window.corners(truth));
        let columns = window.width + 1;
        Ok(Self {
            prediction: pieces(&prediction, &truth, columns, spacing),
            truth: pieces(&truth, &prediction, columns, spacing),
        })
    }

    /// Surface Dice (normalised surface distance): the share of both contours, by length, whose distance to the other
    /// contour is at most `tolerance`. 1 if both masks are empty, 0 if one of them is.
    pub fn surface_dice(&self, tolerance: f64) -> f64 {
        let both = || self.prediction.iter().chain(&self.truth);
        let all: f64 = both().map(|piece| piece.length).sum();
        if all == 0.0 {
            return 1.0;
        }
        let near: f64 = both().filter(|piece| piece.distance <= tolerance).map(|piece| piece.length).sum();
        near / all
    }
}

/// Rows and columns of the image that contain the foreground of both masks.
struct Window {
    first_row: usize,
    height: usize,
    first_column: usize,
    width: usize,
    image_width: usize,
}

impl Window {
    fn around(a: &[bool], b: &[bool], image_width: usize) -> Option<Self> {
        let set = || (0..a.len()).filter(|&i| a[i] || b[i]);
        let (first_row, last_row) = (set().next()? / image_width, set().next_back()? / image_width);
        let (first_column, last_column) =
            set().map(|i| i % image_width).fold((usize::MAX, 0), |(low, high), x| (low.min(x), high.max(x)));
        let (height, width) = (last_row + 1 - first_row, last_column + 1 - first_column);
        Some(Self { first_row, height, first_column, width, image_width })
    }

    /// For each corner of the window's pixels, which of its four pixels are set: bits 8 and 4 for the upper left and
    /// right, 2 and 1 for the lower ones.
    fn corners(&self, mask: &[bool]) -> Vec<u8> {
        let columns = self.width + 1;
        let mut codes = vec![0; (self.height + 1) * columns];
        for y in 0..self.height {
            for x in 0..self.width {
                if mask[(self.first_row + y) * self.image_width + self.first_column + x] {
                    let at = y * columns + x;
                    codes[at] |= 1;
                    codes[at + 1] |= 2;
                    codes[at + columns] |= 4;
                    codes[at + columns + 1] |= 8;
                }
            }
        }
        codes
    }
}

fn is_contour(code: u8) -> bool {
    code != 0 && code != 15
}

/// Length of the contour around a corner with the set pixels `code`.
fn length(code: u8, spacing: Spacing) -> f64 {
    let diagonal = 0.5 * spacing.row.hypot(spacing.column);
    match code {
        0 | 15 => 0.0,
        // upper or lower half: a horizontal piece
        0b1100 | 0b0011 => spacing.column,
        // left or right half: a vertical piece
        0b1010 | 0b0101 => spacing.row,
        // two pixels that touch at the corner only
        0b1001 | 0b0110 => 2.0 * diagonal,
        // one pixel, or all but one
        _ => diagonal,
    }
}

/// The pieces of the contour `own` with their distances to the contour `other`.
fn pieces(own: &[u8], other: &[u8], columns: usize, spacing: Spacing) -> Vec<Piece> {
    let other: Vec<bool> = other.iter().map(|&code| is_contour(code)).collect();
    let squared = squared_distances(&other, columns, spacing);
    let contour = own.iter().zip(squared).filter(|(code, _)| is_contour(**code));
    contour.map(|(&code, squared)| Piece { distance: squared.sqrt(), length: length(code, spacing) }).collect()
}

#[cfg(test)]
#[path = "surface_tests.rs"]
mod tests;
