//! Distances between the contours of two masks, or the surfaces of two volumes, and the surface Dice that they give.
//!
//! Source: Nikolov et al. 2018 ("Deep learning to achieve clinically applicable segmentation of head and neck anatomy
//! for radiotherapy"), computed as `DeepMind`'s package `surface-distance` 0.1 does.
//!
//! The contour is that of marching squares, the surface that of marching cubes. Its pieces lie around the corners that
//! four pixels (eight voxels) share: a corner whose pixels are not all equal is a piece. Its length (area) depends on
//! which of its pixels are set. The distance of a piece is that from its corner to the nearest corner on the other
//! contour. Pixels outside of the image are background, so a mask at the border of the image has a contour there.
//!
//! Distances between the outermost pixels themselves, as MONAI and medpy define the Hausdorff distance, are in
//! [`border`](crate::border).

use super::distance_transform::squared_distances;
use super::grid::{ForegroundBox, Size, Spacing};
use prsmed_base::error::Result;

/// A piece of a contour or surface.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Distance to the other contour, in the unit of the spacing; infinite if the other mask is empty.
    pub distance: f64,
    /// Length of the piece in the unit of the spacing; of a surface its area in the squared unit.
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
    /// Compares two masks in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`](prsmed_base::Error::Shape) if a mask has another size; [`Error::Config`](prsmed_base::Error::Config) for a
    /// spacing that is not above 0.
    pub fn of(prediction: &[bool], truth: &[bool], size: Size, spacing: Spacing) -> Result<Self> {
        size.check(prediction, truth)?;
        spacing.check()?;
        let Some(window) = ForegroundBox::around(prediction, truth, size) else {
            return Ok(Self { prediction: Vec::new(), truth: Vec::new() });
        };
        let of_window = |mask: &[bool]| corners(&window.of(mask), window.size);
        let (prediction, truth) = (of_window(prediction), of_window(truth));
        let lengths = lengths(window.size, spacing);
        let size = corner_size(window.size);
        Ok(Self {
            prediction: pieces(&prediction, &truth, size, spacing, &lengths),
            truth: pieces(&truth, &prediction, size, spacing, &lengths),
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

/// Size of the grid of corners.
fn corner_size(size: Size) -> Size {
    Size { slices: size.slices.map(|slices| slices + 1), rows: size.rows + 1, columns: size.columns + 1 }
}

/// For each corner, which of its pixels are set: bits 8 and 4 for the upper left and right, 2 and 1 for the lower ones;
/// in a volume these bits are those of the next slice, and 16 times them those of the slice before.
fn corners(mask: &[bool], size: Size) -> Vec<u8> {
    let grid = corner_size(size);
    let mut codes = vec![0; grid.cells()];
    let depth_steps = if size.slices.is_some() { 2 } else { 1 };
    for at in (0..mask.len()).filter(|&at| mask[at]) {
        let [slice, row, column] = size.position(at);
        for (bit, step) in (0..4 * depth_steps).map(|step| (1 << step, [step / 4, step / 2 % 2, step % 2])) {
            codes[grid.index([slice + step[0], row + step[1], column + step[2]])] |= bit;
        }
    }
    codes
}

/// Length (area) of the pieces around a corner, for each code of [`corners`]. It is 0 for a corner off the contour.
fn lengths(size: Size, spacing: Spacing) -> Vec<f64> {
    match size.slices {
        None => (0..16).map(|code| contour_length(code, spacing)).collect(),
        Some(_) => (0..=255).map(|code| surface_area(code, spacing)).collect(),
    }
}

/// Length of the contour around a corner with the set pixels `code`.
fn contour_length(code: u8, spacing: Spacing) -> f64 {
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

/// Normals of the facets of marching cubes, without their signs, in eighths along slice, row and column. Their length
/// is the facet's area.
const NORMALS: [[f64; 3]; 9] = [
    [4.0, 0.0, 0.0],
    [0.0, 4.0, 0.0],
    [0.0, 0.0, 4.0],
    [0.0, 2.0, 2.0],
    [2.0, 0.0, 2.0],
    [2.0, 2.0, 0.0],
    [1.0, 1.0, 1.0],
    [2.0, 2.0, 2.0],
    [3.0, 3.0, 3.0],
];

/// The different sets of facets around a corner: digits are indices into [`NORMALS`].
const FACETS: [&str; 27] = [
    "", "6", "55", "44", "66", "067", "00", "33", "167", "267", "666", "6677", "336", "446", "3468", "556", "3568",
    "0667", "11", "4568", "1667", "5555", "22", "2667", "4444", "3333", "6666",
];

/// Set of facets of each code from 0 to 127, `a` for the first and `A` for the last of [`FACETS`]. A code and its
/// complement have the same areas. From the table of `surface-distance`.
const CODES: &[u8; 128] = b"abbcbdefbedfcffgbheiejklemnopqrfbehienmoekjlprqfciisptuiputivppc\
beephjmqeknrilofdjntjwxjnxyntjndekmumxzmkAxkukmefloiqjmhrknepeeb";

/// Area of the surface around a corner with the set voxels `code`.
fn surface_area(code: u8, spacing: Spacing) -> f64 {
    let letter = CODES[usize::from(code.min(255 - code))];
    let facets = if letter == b'A' { 26 } else { usize::from(letter - b'a') };
    let [slice, row, column] = spacing.axes();
    let area = |normal: [f64; 3]| {
        let [x, y, z] = [normal[0] * row * column, normal[1] * slice * column, normal[2] * slice * row];
        (x * x + y * y + z * z).sqrt() / 8.0
    };
    FACETS[facets].bytes().map(|digit| area(NORMALS[usize::from(digit - b'0')])).sum()
}

/// The pieces of the contour `own` with their distances to the contour `other`.
fn pieces(own: &[u8], other: &[u8], size: Size, spacing: Spacing, lengths: &[f64]) -> Vec<Piece> {
    let all = lengths.len() - 1;
    let is_contour = |code: u8| code != 0 && usize::from(code) != all;
    let other: Vec<bool> = other.iter().map(|&code| is_contour(code)).collect();
    let squared = squared_distances(&other, size, spacing);
    let contour = own.iter().zip(squared).filter(|(code, _)| is_contour(**code));
    contour.map(|(&code, squared)| Piece { distance: squared.sqrt(), length: lengths[usize::from(code)] }).collect()
}

#[cfg(test)]
#[path = "surface_tests.rs"]
mod tests;
