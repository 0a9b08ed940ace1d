//! Display slices: 2-D images of a volume in radiological orientation, and the exact way back to the voxels.
//!
//! | axis | left of the image | top of the image | first slice |
//! |---|---|---|---|
//! | axial | patient's right | anterior | most inferior |
//! | coronal | patient's right | superior | most posterior |
//! | sagittal | anterior | superior | most left |
//!
//! An oblique volume is shown along the voxel axes that are closest to the patient's axes; nothing is interpolated.
//! Pixels stay as they are, also if they are not square: [`Plane::spacing`] has their size.

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
        let single = Self::ALL.into_iter().find(|axis| Plane::new(grid, *axis).num_slices == 1);
        let thick = Self::ALL.into_iter().find(|axis| {
            let Plane { spacing: [x, y], slice_spacing, .. } = Plane::new(grid, *axis);
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
pub struct Plane {
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

impl Plane {
    /// The slices of a grid along an axis.
    pub fn new(grid: &Grid, axis: Axis) -> Self {
        let strides = [1, grid.size[0], grid.size[0] * grid.size[1]];
        let spacing = grid.spacing();
        let (mut start, mut steps, mut sizes, mut distances) = (0, [0; 3], [0; 3], [0.0; 3]);
        for (place, (voxel, reversed)) in Self::places(grid, axis).into_iter().enumerate() {
            let stride = strides[voxel].cast_signed();
            sizes[place] = grid.size[voxel];
            distances[place] = spacing[voxel];
            steps[place] = if reversed { -stride } else { stride };
            start += if reversed { strides[voxel] * grid.size[voxel].saturating_sub(1) } else { 0 };
        }
        Self {
            size: [sizes[0], sizes[1]],
            num_slices: sizes[2],
            spacing: [distances[0], distances[1]],
            slice_spacing: distances[2],
            start,
            steps,
        }
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
        let values = self.values(mask, slice)?;
        self.image(|index| Luma([if values[index] == 0 { 0 } else { 255 }]))
    }

    /// Writes a mask that was drawn on a slice (0 is background) to the voxels of a mask of the volume, as 0 and 1.
    ///
    /// # Errors
    /// As [`Self::put`]; [`Error::Shape`] for an image of another size.
    pub fn put_mask(&self, mask: &mut [u8], slice: usize, drawn: &GrayImage) -> Result<()> {
        let [width, height] = self.size;
        if (drawn.width() as usize, drawn.height() as usize) != (width, height) {
            let reason = format!(
                "a mask of {}x{} pixels does not belong to slices of {width}x{height}",
                drawn.width(),
                drawn.height()
            );
            return Err(Error::Shape { reason });
        }
        let values: Vec<u8> = drawn.as_raw().iter().map(|value| u8::from(*value != 0)).collect();
        self.put(mask, slice, &values)
    }

    /// An image of a slice's size from the pixel index.
    fn image<P: image::Pixel<Subpixel = u8>>(
        &self,
        pixel: impl Fn(usize) -> P,
    ) -> Result<image::ImageBuffer<P, Vec<u8>>> {
        let [width, height] = self.size;
        let side = |side: usize| u32::try_from(side).map_err(|_| Error::Shape { reason: "a slice is too wide".into() });
        Ok(image::ImageBuffer::from_fn(side(width)?, side(height)?, |x, y| pixel(y as usize * width + x as usize)))
    }

    fn check(&self, num_voxels: usize, slice: usize) -> Result<()> {
        if num_voxels == self.size[0] * self.size[1] * self.num_slices && slice < self.num_slices {
            return Ok(());
        }
        let [width, height] = self.size;
        let slices = self.num_slices;
        let reason = format!(
            "slice {slice} of {num_voxels} voxels does not exist: there are {slices} slices of {width}x{height}"
        );
        Err(Error::Shape { reason })
    }
}

impl Volume {
    /// The slices of the volume along an axis.
    pub fn plane(&self, axis: Axis) -> Plane {
        Plane::new(&self.grid, axis)
    }

    /// One slice as 8-bit grey. `levels` come from [`super::Window::levels`], once for the whole volume. Padding is black.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist, and for a colour image; see [`Self::colour_slice`].
    pub fn slice(&self, plane: &Plane, slice: usize, levels: &Levels) -> Result<GrayImage> {
        let mut image = match &self.voxels {
            Voxels::I16(voxels) => {
                let values = plane.values(voxels, slice)?;
                plane.image(|index| Luma([levels.apply(f32::from(values[index]))]))?
            }
            Voxels::F32(voxels) => {
                let values = plane.values(voxels, slice)?;
                plane.image(|index| Luma([levels.apply(values[index])]))?
            }
            Voxels::Rgb(_) => return Err(Error::Shape { reason: "a colour image has no grey values".into() }),
        };
        let padding = &self.display.padding;
        if !padding.is_empty() {
            let is_padding = |x: u32, y: u32| padding.contains(plane.index(slice, x as usize, y as usize));
            image.enumerate_pixels_mut().filter(|(x, y, _)| is_padding(*x, *y)).for_each(|(.., pixel)| pixel.0 = [0]);
        }
        Ok(image)
    }

    /// One slice in colour. Grey volumes are windowed, and the grey is repeated.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist.
    pub fn colour_slice(&self, plane: &Plane, slice: usize, levels: &Levels) -> Result<RgbImage> {
        if let Voxels::Rgb(voxels) = &self.voxels {
            let values = plane.values(voxels, slice)?;
            return plane.image(|index| image::Rgb(values[index]));
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
