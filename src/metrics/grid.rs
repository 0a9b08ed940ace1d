//! Size and spacing of images and volumes, and the part of them that masks fill.

use prsmed_base::error::{Error, Result};

/// Size of an image (rows, columns) or of a volume (slices, rows, columns), in row-major order. A volume of one slice
/// is not an image: its surface is closed above and below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Number of slices of a volume; `None` for an image.
    pub slices: Option<usize>,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
}

impl Size {
    /// Size of an image.
    pub fn image(rows: usize, columns: usize) -> Self {
        Self { slices: None, rows, columns }
    }

    /// Size of a volume.
    pub fn volume(slices: usize, rows: usize, columns: usize) -> Self {
        Self { slices: Some(slices), rows, columns }
    }

    /// Number of pixels or voxels.
    pub fn cells(&self) -> usize {
        self.depth() * self.rows * self.columns
    }

    /// Number of slices; 1 for an image.
    pub(super) fn depth(&self) -> usize {
        self.slices.unwrap_or(1)
    }

    /// Index of a cell.
    pub(super) fn index(&self, [slice, row, column]: [usize; 3]) -> usize {
        (slice * self.rows + row) * self.columns + column
    }

    /// Slice, row and column of a cell.
    pub(super) fn position(&self, index: usize) -> [usize; 3] {
        let (line, column) = (index / self.columns, index % self.columns);
        [line / self.rows, line % self.rows, column]
    }

    /// [`Error::Shape`] unless both masks have this size.
    pub(super) fn check(&self, prediction: &[bool], truth: &[bool]) -> Result<()> {
        if prediction.len() == truth.len() && truth.len() == self.cells() {
            return Ok(());
        }
        let Self { rows, columns, .. } = self;
        let (found, other, depth) = (prediction.len(), truth.len(), self.depth());
        Err(Error::Shape { reason: format!("masks of {found} and {other} pixels are not {depth}x{rows}x{columns}") })
    }
}

/// Distance between the centres of neighbouring pixels or voxels, in any unit.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Spacing {
    /// From one slice to the next; images do not use it.
    #[serde(default = "one")]
    pub slice: f64,
    /// From one row to the next.
    pub row: f64,
    /// From one column to the next.
    pub column: f64,
}

fn one() -> f64 {
    1.0
}

impl Spacing {
    /// Distances in pixels.
    pub const PIXELS: Self = Self { slice: 1.0, row: 1.0, column: 1.0 };

    /// Spacing of an image.
    pub fn image(row: f64, column: f64) -> Self {
        Self { slice: 1.0, row, column }
    }

    /// Area of a pixel or volume of a voxel.
    pub fn cell(&self, size: Size) -> f64 {
        self.row * self.column * if size.slices.is_some() { self.slice } else { 1.0 }
    }

    pub(super) fn axes(&self) -> [f64; 3] {
        [self.slice, self.row, self.column]
    }

    /// [`Error::Config`] for a distance that is not above 0.
    pub(super) fn check(&self) -> Result<()> {
        match self.axes().into_iter().find(|side| !(side.is_finite() && *side > 0.0)) {
            Some(side) => Err(Error::config("spacing", format!("{side} is no distance"), "use a number above 0")),
            None => Ok(()),
        }
    }
}

/// The smallest box that contains the foreground of both masks. Distances between masks do not depend on the cells
/// outside of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ForegroundBox {
    first: [usize; 3],
    /// Size of the box.
    pub(super) size: Size,
    whole: Size,
}

impl ForegroundBox {
    /// `None` if both masks are empty.
    pub(super) fn around(a: &[bool], b: &[bool], whole: Size) -> Option<Self> {
        let (mut first, mut last) = ([usize::MAX; 3], [0; 3]);
        for at in (0..a.len()).filter(|&at| a[at] || b[at]) {
            for (axis, place) in whole.position(at).into_iter().enumerate() {
                first[axis] = first[axis].min(place);
                last[axis] = last[axis].max(place);
            }
        }
        (first[0] != usize::MAX).then(|| {
            let side = |axis: usize| last[axis] + 1 - first[axis];
            let size = Size { slices: whole.slices.map(|_| side(0)), rows: side(1), columns: side(2) };
            Self { first, size, whole }
        })
    }

    /// The box of a mask.
    pub(super) fn of(&self, mask: &[bool]) -> Vec<bool> {
        let mut inside = Vec::with_capacity(self.size.cells());
        for slice in 0..self.size.depth() {
            for row in 0..self.size.rows {
                let start = self.whole.index([self.first[0] + slice, self.first[1] + row, self.first[2]]);
                inside.extend_from_slice(&mask[start..start + self.size.columns]);
            }
        }
        inside
    }
}
