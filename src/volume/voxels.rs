//! Volumes: voxel values with their grid and what is known about them.

use std::collections::BTreeSet;
use std::ops::Range;

use super::display::Display;
use super::grid::Grid;
use super::modality::Modality;
use super::source::{Uid, VolumeSource};
use super::voxel_set::VoxelSet;

/// A volume or a single image.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Values; the first axis of [`Grid::size`] is contiguous.
    pub voxels: Voxels,
    /// Size and position in the patient.
    pub grid: Grid,
    /// What made the image.
    pub modality: Modality,
    /// Windows of the DICOM header: width and level.
    pub windows: Vec<[f32; 2]>,
    /// True for MONOCHROME1: small values are bright. [`super::window::Levels::apply`] inverts them.
    pub inverted: bool,
    /// True for a DICOM image that stores 8 bits without a rescale.
    pub is_8_bit: bool,
    /// What the header says about showing the values.
    pub display: Display,
    /// Identifies the coordinate system of a DICOM series.
    pub frame_of_reference: Option<Uid>,
    /// What was assumed or ignored, in sentences for the user.
    pub notes: Vec<String>,
    /// Where the volume comes from.
    pub source: VolumeSource,
}

impl Volume {
    /// The UID of its DICOM series.
    pub(crate) fn series(&self) -> Option<&str> {
        let VolumeSource::Dicom(references) = &self.source else { return None };
        Some(references.series.as_str()).filter(|uid| !uid.is_empty())
    }

    /// A volume of which nothing but its voxels is known.
    pub fn new(voxels: Voxels, grid: Grid, source: VolumeSource) -> Self {
        Self {
            voxels,
            grid,
            modality: Modality::Unknown,
            windows: Vec::new(),
            inverted: false,
            is_8_bit: false,
            display: Display::default(),
            frame_of_reference: None,
            notes: Vec::new(),
            source,
        }
    }

    /// True for a colour image, which has one slice and no window.
    pub fn is_colour(&self) -> bool {
        matches!(self.voxels, Voxels::Rgb(_))
    }

    /// True if the file says how its values become grey, even if that cannot be used.
    pub fn has_window(&self) -> bool {
        !self.windows.is_empty() || !self.display.curve.is_linear() || self.display.window_fault.is_some()
    }
}

/// Voxel values.
#[derive(Debug, Clone, PartialEq)]
pub enum Voxels {
    /// Integers, for example Hounsfield units.
    I16(Vec<i16>),
    /// Other numbers; never NaN or infinite.
    F32(Vec<f32>),
    /// Colour of 8 bits.
    Rgb(Vec<[u8; 3]>),
}

impl Voxels {
    /// No grey values yet. Memory for `count` of them is reserved in pieces as they are pushed, up to that number.
    pub(crate) fn with_capacity(count: usize) -> Self {
        // a header may promise more voxels than there are
        Self::I16(Vec::with_capacity(count.min(1 << 24)))
    }

    /// Adds a grey value. All are i16 while they are whole numbers that fit, else f32.
    pub(crate) fn push(&mut self, value: f64) {
        let fits = value.fract() == 0.0 && (f64::from(i16::MIN)..=f64::from(i16::MAX)).contains(&value);
        #[expect(clippy::cast_possible_truncation, reason = "checked, and voxels are kept as f32")]
        match self {
            Self::I16(values) if fits => values.push(value as i16),
            Self::I16(values) => {
                let mut values: Vec<f32> = values.iter().copied().map(f32::from).collect();
                values.push(value as f32);
                *self = Self::F32(values);
            }
            Self::F32(values) => values.push(value as f32),
            Self::Rgb(_) => {}
        }
    }

    /// Number of voxels.
    pub fn len(&self) -> usize {
        match self {
            Self::I16(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::Rgb(values) => values.len(),
        }
    }

    /// True without voxels.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of a voxel; `None` outside and for colour.
    pub fn get(&self, index: usize) -> Option<f32> {
        match self {
            Self::I16(values) => values.get(index).map(|value| f32::from(*value)),
            Self::F32(values) => values.get(index).copied(),
            Self::Rgb(_) => None,
        }
    }

    /// The grey values of a range of voxels without padding; none for colour.
    pub(crate) fn values<'a>(&'a self, padding: &'a VoxelSet, range: Range<usize>) -> impl Iterator<Item = f32> + 'a {
        padding.others(range).flatten().filter_map(|index| self.get(index))
    }
}

/// Label maps and drawings have no more distinct values.
pub(crate) const FEW_VALUES: usize = 16;

/// True for more than `most` distinct values.
pub(crate) fn has_more_than(most: usize, mut values: impl Iterator<Item = f32>) -> bool {
    let mut seen = BTreeSet::new();
    values.any(|value| seen.insert(value.to_bits()) && seen.len() > most)
}

/// The smallest and the largest value.
pub(crate) fn extremes(values: impl Iterator<Item = f32>) -> [f32; 2] {
    values.fold([f32::INFINITY, f32::NEG_INFINITY], |[low, high], value| [low.min(value), high.max(value)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_i16_while_they_fit() {
        let built = |values: &[f64]| {
            let mut voxels = Voxels::with_capacity(usize::MAX);
            for value in values {
                voxels.push(*value);
            }
            voxels
        };
        assert_eq!(built(&[-32768.0, 32767.0]), Voxels::I16(vec![-32768, 32767]));
        assert_eq!(built(&[1.0, 0.5, 2.0]), Voxels::F32(vec![1.0, 0.5, 2.0]));
        assert_eq!(built(&[40000.0]), Voxels::F32(vec![40000.0]));
    }
}
