//! Sizes of targets against the grid on which a mask head draws, and targets that the border of their image cuts off.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ::image::GrayImage;
use serde::Serialize;

use super::fingerprint::PairSummary;
use crate::image::Fit;
use crate::manifest::{Presence, Row};

/// A target of fewer cells is named: one cell is the smallest thing that a mask head can draw, and a target between cells
/// needs two of them.
pub const FEWEST_CELLS: f64 = 2.0;

/// The grid of cells on which the mask head of a model draws, before its masks are enlarged to the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskGrid {
    /// Cells along each side of the square that the model sees.
    pub side: u32,
    /// How an image fills this square.
    pub fit: Fit,
}

impl MaskGrid {
    /// The number of cells that so many pixels of an image of this width and height cover.
    pub fn cells(&self, num_pixels: usize, (width, height): (u32, u32)) -> f64 {
        let [width, height, side] = [width, height, self.side].map(f64::from);
        let square = match self.fit {
            Fit::Stretch => width * height,
            Fit::Corner(_) => width.max(height).powi(2),
        };
        num_pixels as f64 * side * side / square.max(1.0)
    }
}

/// Numbers of targets that are in their images: one for each mask file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TargetCounts {
    /// All of them.
    pub targets: usize,
    /// Those of fewer than [`FEWEST_CELLS`] cells.
    pub small: usize,
    /// Those with a pixel in the first or last row or column of the image.
    pub at_border: usize,
}

/// A target of fewer than [`FEWEST_CELLS`] cells.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SmallTarget {
    /// Its image.
    pub image: PathBuf,
    /// Its mask.
    pub mask: PathBuf,
    /// Number of cells.
    pub cells: f64,
}

/// A target that touches the border of its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CutTarget {
    /// Its image.
    pub image: PathBuf,
    /// Its mask.
    pub mask: PathBuf,
}

/// Targets that are too small for a model, or that their images show in part.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TargetSizes {
    /// Cells along each side of the grid; `None` if no model was named, so that no target is small.
    pub grid_side: Option<u32>,
    /// Numbers by class.
    pub classes: BTreeMap<String, TargetCounts>,
    /// Small targets, the smallest first.
    pub small: Vec<SmallTarget>,
    /// Targets at the border, by path.
    pub at_border: Vec<CutTarget>,
}

/// The sizes of the targets of pairs. Each item has the rows of one image and mask.
pub(super) fn sizes(pairs: &[(Vec<&Row>, PairSummary)], grid: Option<MaskGrid>) -> TargetSizes {
    let mut found = TargetSizes { grid_side: grid.map(|grid| grid.side), ..TargetSizes::default() };
    for (rows, pair) in pairs {
        let Some(row) = rows.first().filter(|row| row.target().presence == Presence::Present) else { continue };
        let counts = found.classes.entry(row.modality.clone()).or_default();
        let (image, mask) = (row.image_path.clone(), row.target().mask_path.clone());
        counts.targets += 1;
        if pair.is_at_border {
            counts.at_border += 1;
            found.at_border.push(CutTarget { image: image.clone(), mask: mask.clone() });
        }
        let cells = grid.map(|grid| grid.cells(pair.num_foreground, pair.size_px));
        if let Some(cells) = cells.filter(|cells| *cells < FEWEST_CELLS) {
            counts.small += 1;
            found.small.push(SmallTarget { image, mask, cells });
        }
    }
    found.small.sort_by(|a, b| a.cells.total_cmp(&b.cells).then_with(|| a.mask.cmp(&b.mask)));
    found.at_border.sort_by(|a, b| a.mask.cmp(&b.mask));
    found
}

/// Whether a mask, foreground above 0, has a pixel in the first or last row or column.
pub(super) fn is_at_border(mask: &GrayImage) -> bool {
    let (width, height) = mask.dimensions();
    let is_edge = |x: u32, y: u32| x == 0 || y == 0 || x + 1 == width || y + 1 == height;
    mask.enumerate_pixels().any(|(x, y, value)| value.0[0] > 0 && is_edge(x, y))
}

impl TargetSizes {
    /// A sentence about small targets, and one about those at the border.
    pub fn texts(&self) -> Vec<String> {
        /// Most targets that a sentence names.
        const MAX_NAMED: usize = 3;
        let all: usize = self.classes.values().map(|counts| counts.targets).sum();
        let named = |count: usize, names: Vec<String>| {
            let more = if count > names.len() { format!(" and {} more", count - names.len()) } else { String::new() };
            format!("{}{more}", names.join(", "))
        };
        let small = self.grid_side.filter(|_| !self.small.is_empty()).map(|side| {
            let first = self.small.iter().take(MAX_NAMED);
            let first = first.map(|small| format!("{} with {:.2}", small.mask.display(), small.cells)).collect();
            format!(
                "targets of fewer than {FEWEST_CELLS} cells of the {side} x {side} cells of the mask head: {} of {all} ({}); a \
                 model can find them, but not their outlines: a larger `model.image_size`, or images that show less around \
                 them, give them more cells",
                self.small.len(),
                named(self.small.len(), first)
            )
        });
        let border = (!self.at_border.is_empty()).then(|| {
            let first = self.at_border.iter().take(MAX_NAMED).map(|cut| cut.mask.display().to_string()).collect();
            format!(
                "targets that touch the border of their image: {} of {all} ({}); the image may show a part of them",
                self.at_border.len(),
                named(self.at_border.len(), first)
            )
        });
        small.into_iter().chain(border).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::image::Luma;

    #[test]
    fn pixels_are_counted_in_cells_of_the_square_that_a_model_sees() {
        let stretched = MaskGrid { side: 64, fit: Fit::Stretch };
        // 1/4096 of the image is one cell, whatever its proportions
        assert!((stretched.cells(4, (256, 64)) - 1.0).abs() < 1e-12);
        let in_corner = MaskGrid { side: 64, fit: Fit::Corner([0; 3]) };
        assert!((in_corner.cells(16, (256, 64)) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_mask_at_the_border_has_a_pixel_on_the_outermost_line() {
        let at = |point: (u32, u32)| is_at_border(&GrayImage::from_fn(6, 5, |x, y| Luma([u8::from((x, y) == point)])));
        assert_eq!([(0, 2), (5, 2), (3, 0), (3, 4)].map(at), [true; 4]);
        assert_eq!([(1, 1), (4, 3), (9, 9)].map(at), [false; 3]);
    }
}
