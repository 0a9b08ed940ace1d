//! Display slices: 2-D images of a volume in radiological orientation, and the exact way back to the voxels.
//!
//! | axis | left of the image | top of the image | first slice |
//! |---|---|---|---|
//! | axial | patient's right | anterior | most inferior |
//! | coronal | patient's right | superior | most posterior |
//! | sagittal | anterior | superior | most left |
//!
//! An oblique volume is shown along the voxel axes that are closest to the patient's axes; nothing is interpolated.
//! Pixels stay as they are, also if they are not square: [`SlicePlane::spacing`] has their size.

use std::fmt;
use std::str::FromStr;

use image::{GrayImage, Luma, RgbImage};
use serde::{Deserialize, Serialize};

use super::grid::{Affine, AxisMap, Grid};
use super::voxels::{Volume, Voxels};
use super::window::Levels;
use prsmed_base::error::{Error, Result};

/// Direction of the slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Across the body.
    #[default]
    Axial,
    /// From the front.
    Coronal,
    /// From the side.
    Sagittal,
}

impl Axis {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Axial, Self::Coronal, Self::Sagittal];

    /// `axial`, `coronal` or `sagittal`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Axial => "axial",
            Self::Coronal => "coronal",
            Self::Sagittal => "sagittal",
        }
    }

    /// The direction in which a volume was acquired: across its thickest slices if they are at least half as thick again
    /// as the pixels, or across its only slice. Axial for volumes with cubic voxels.
    pub fn suggested(grid: &Grid) -> Self {
        let single = Self::ALL.into_iter().find(|axis| SlicePlane::new(grid, *axis).num_slices == 1);
        let thick = Self::ALL.into_iter().find(|axis| {
            let SlicePlane { spacing: [x, y], slice_spacing, .. } = SlicePlane::new(grid, *axis);
            slice_spacing >= 1.5 * x.max(y)
        });
        single.or(thick).unwrap_or_default()
    }

    /// Patient axes (R, A, S) of columns, rows and slices, and whether they run backwards.
    fn layout(self) -> [(usize, bool); 3] {
        match self {
            Self::Axial => [(0, true), (1, true), (2, false)],
            Self::Coronal => [(0, true), (2, true), (1, false)],
            Self::Sagittal => [(1, true), (2, true), (0, false)],
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Axis {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let axis = Self::ALL.into_iter().find(|axis| axis.name() == text.trim());
        axis.ok_or_else(|| format!("`{text}` is not an axis; use `axial`, `coronal` or `sagittal`"))
    }
}

/// The slices of a grid along one axis: how columns, rows and slices lie on its voxel axes.
#[derive(Debug, Clone, PartialEq)]
pub struct SlicePlane {
    /// Width and height of a slice in pixels.
    pub size: [usize; 2],
    /// Number of slices.
    pub num_slices: usize,
    /// Distance in mm between the centres of neighbouring pixels: along a row (x), along a column (y).
    pub spacing: [f64; 2],
    /// Distance in mm between neighbouring slices.
    pub slice_spacing: f64,
    /// Linear voxel index of the top left pixel of the first slice.
    start: usize,
    /// Steps of the linear voxel index along a row, along a column, and to the next slice.
    steps: [isize; 3],
}

impl SlicePlane {
    /// The slices of a grid along an axis.
    pub fn new(grid: &Grid, axis: Axis) -> Self {
        let strides = [1, grid.size[0], grid.size[0] * grid.size[1]];
        let (places, distances) = (Self::places(grid, axis), grid.spacing());
        let [width, height, num_slices] = places.map(|(voxel, _)| grid.size[voxel]);
        let [x, y, slice_spacing] = places.map(|(voxel, _)| distances[voxel]);
        let start_of = |(voxel, _): &(usize, bool)| strides[*voxel] * grid.size[*voxel].saturating_sub(1);
        let start = places.iter().filter(|(_, reversed)| *reversed).map(start_of).sum();
        let steps = places.map(|(voxel, reversed)| strides[voxel].cast_signed() * if reversed { -1 } else { 1 });
        Self { size: [width, height], num_slices, spacing: [x, y], slice_spacing, start, steps }
    }

    /// Voxel axes of columns, rows and slices, and whether they run against them.
    fn places(grid: &Grid, axis: Axis) -> [(usize, bool); 3] {
        let closest = grid.affine.closest_axes();
        axis.layout().map(|(patient, backwards)| {
            let AxisMap { voxel, flipped } = closest[patient];
            (voxel, flipped != backwards)
        })
    }

    /// How columns, rows and slices along `to` lie in the slices along `from`: as its columns (0), rows (1) or slices
    /// (2), and whether they run against them.
    pub fn turned(grid: &Grid, from: Axis, to: Axis) -> [(usize, bool); 3] {
        let from = Self::places(grid, from);
        Self::places(grid, to).map(|(voxel, reversed)| {
            let place = from.iter().position(|(other, _)| *other == voxel).unwrap_or(0);
            (place, reversed != from[place].1)
        })
    }

    /// Linear index in the volume of pixel (`x`, `y`) of a slice. All three must be inside.
    pub fn index(&self, slice: usize, x: usize, y: usize) -> usize {
        debug_assert!(slice < self.num_slices && x < self.size[0] && y < self.size[1], "outside the grid");
        let [across, down, through] = self.steps;
        let offset = across * x.cast_signed() + down * y.cast_signed() + through * slice.cast_signed();
        self.start.wrapping_add_signed(offset)
    }

    /// Voxel axis (0, 1 or 2) that runs through the slices of a grid.
    pub fn through_axis(grid: &Grid, axis: Axis) -> usize {
        Self::places(grid, axis)[2].0
    }

    /// Copies the values of one slice, row by row.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist.
    pub fn values<T: Copy>(&self, voxels: &[T], slice: usize) -> Result<Vec<T>> {
        self.check(voxels.len(), slice)?;
        let [width, height] = self.size;
        let mut values = Vec::with_capacity(width * height);
        for y in 0..height {
            values.extend((0..width).map(|x| voxels[self.index(slice, x, y)]));
        }
        Ok(values)
    }

    /// The slice with the largest area of a mask, the first of equal ones; `None` for an empty mask.
    ///
    /// # Errors
    /// [`Error::Shape`] for a mask of another size.
    pub fn largest_slice(&self, mask: &[u8]) -> Result<Option<usize>> {
        let mut largest = None;
        for slice in 0..self.num_slices {
            let count = self.values(mask, slice)?.iter().filter(|value| **value != 0).count();
            if count > largest.map_or(0, |(most, _)| most) {
                largest = Some((count, slice));
            }
        }
        Ok(largest.map(|(_, slice)| slice))
    }

    /// Writes the values of one slice, row by row, to their voxels.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist, and another number of values.
    pub fn put<T: Copy>(&self, voxels: &mut [T], slice: usize, values: &[T]) -> Result<()> {
        self.check(voxels.len(), slice)?;
        let [width, height] = self.size;
        if values.len() != width * height {
            let reason = format!("a slice has {width}x{height} pixels, not {}", values.len());
            return Err(Error::Shape { reason });
        }
        for (row, y) in values.chunks_exact(width.max(1)).zip(0..) {
            for (value, x) in row.iter().zip(0..) {
                voxels[self.index(slice, x, y)] = *value;
            }
        }
        Ok(())
    }

    /// Copies one slice of a mask (0 is background) as an image with 0 and 255.
    ///
    /// # Errors
    /// As [`Self::values`].
    pub fn mask(&self, mask: &[u8], slice: usize) -> Result<GrayImage> {
        self.image(mask.len(), slice, |index| Luma([if mask[index] == 0 { 0 } else { 255 }]))
    }

    /// An image of a slice, from the linear index of a voxel of so many.
    fn image<P: image::Pixel<Subpixel = u8>>(
        &self,
        num_voxels: usize,
        slice: usize,
        pixel: impl Fn(usize) -> P,
    ) -> Result<image::ImageBuffer<P, Vec<u8>>> {
        self.check(num_voxels, slice)?;
        let side = |side: usize| u32::try_from(side).map_err(|_| Error::Shape { reason: "a slice is too wide".into() });
        let [width, height] = self.size;
        let pixel = |x: u32, y: u32| pixel(self.index(slice, x as usize, y as usize));
        Ok(image::ImageBuffer::from_fn(side(width)?, side(height)?, pixel))
    }

    fn check(&self, num_voxels: usize, slice: usize) -> Result<()> {
        if num_voxels == self.size[0] * self.size[1] * self.num_slices && slice < self.num_slices {
            return Ok(());
        }
        let ([width, height], slices) = (self.size, self.num_slices);
        let found = format!("slice {slice} of {num_voxels} voxels does not exist");
        Err(Error::Shape { reason: format!("{found}: there are {slices} slices of {width}x{height}") })
    }
}

impl Volume {
    /// The slices of the volume along an axis.
    pub fn plane(&self, axis: Axis) -> SlicePlane {
        SlicePlane::new(&self.grid, axis)
    }

    /// One slice as 8-bit grey. `levels` come from [`super::Window::levels`], once for the whole volume. Padding is black.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist, and for a colour image; see [`Self::colour_slice`].
    pub fn slice(&self, plane: &SlicePlane, slice: usize, levels: &Levels) -> Result<GrayImage> {
        if self.is_colour() {
            return Err(Error::Shape { reason: "a colour image has no grey values".into() });
        }
        plane.image(self.voxels.len(), slice, |index| {
            let value = self.voxels.get(index).filter(|_| !self.display.padding.contains(index));
            Luma([value.map_or(0, |value| levels.apply(value))])
        })
    }

    /// One slice in colour. Grey volumes are windowed, and the grey is repeated.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist.
    pub fn colour_slice(&self, plane: &SlicePlane, slice: usize, levels: &Levels) -> Result<RgbImage> {
        if let Voxels::Rgb(voxels) = &self.voxels {
            return plane.image(voxels.len(), slice, |index| image::Rgb(voxels[index]));
        }
        let grey = self.slice(plane, slice, levels)?;
        Ok(image::DynamicImage::ImageLuma8(grey).into_rgb8())
    }
}

/// The affine of an image without a known position: shown as it is stored, in the axial plane.
pub(crate) fn stored_orientation(spacing: [f64; 3]) -> Affine {
    let [x, y, z] = spacing;
    Affine::from_columns([[-x, 0.0, 0.0], [0.0, -y, 0.0], [0.0, 0.0, z]], [0.0; 3])
}
