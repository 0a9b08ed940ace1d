//! What a DICOM header says about showing the values of its image.

use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::voxel_set::VoxelSet;

/// How values become grey, as far as the file states it. For NIfTI only padding that was found by its value.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Display {
    /// Voxels outside of the image: PixelPaddingValue, and values that are far from all others. They are black, and not
    /// part of percentiles.
    pub padding: VoxelSet,
    /// How the window of the file is applied.
    pub curve: Curve,
    /// Why the window of the file cannot be used, if it has one.
    pub window_fault: Option<String>,
    /// Why the values of a CT are not Hounsfield units.
    pub not_hounsfield: Option<String>,
}

/// The way from black to white.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Curve {
    /// A straight line.
    #[default]
    Linear,
    /// A sigmoid with the same width and level (DICOM PS3.3, C.11.2.1.3.1).
    Sigmoid,
    /// A lookup table of the file (VOI LUT).
    Table(Arc<GreyTable>),
}

impl Curve {
    /// True for a straight line.
    pub fn is_linear(&self) -> bool {
        *self == Self::Linear
    }
}

impl Serialize for Curve {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Self::Linear => "linear",
            Self::Sigmoid => "sigmoid",
            Self::Table(_) => "table",
        })
    }
}

/// A lookup table from values to grey.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GreyTable {
    /// The value of the first entry.
    first: i32,
    greys: Vec<u8>,
}

impl GreyTable {
    /// From entries of `bits` bits, 8 to 16; `None` without entries and for other bits.
    pub(crate) fn new(first: i32, entries: &[u16], bits: u32) -> Option<Self> {
        if entries.is_empty() || !(8..=16).contains(&bits) {
            return None;
        }
        let most = (1_u32 << bits) - 1;
        let grey = |entry: &u16| u8::try_from((u32::from(*entry).min(most) * 510 + most) / (2 * most)).unwrap_or(255);
        Some(Self { first, greys: entries.iter().map(grey).collect() })
    }

    /// Values of the first and the last entry.
    pub(crate) fn range(&self) -> [f32; 2] {
        [self.first as f32, self.first as f32 + self.greys.len() as f32 - 1.0]
    }

    /// The grey of a value, rounded to an entry; values outside have the first or the last one.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clipped to the entries")]
    pub(crate) fn grey(&self, value: f32) -> u8 {
        let last = self.greys.len() - 1;
        self.greys[(value.round() - self.first as f32).clamp(0.0, last as f32) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_grey_of_the_nearest_entry() {
        let table = GreyTable::new(-2, &[0, 100, 511, 1023, 2000], 10).expect("a table");
        let greys = [-9.0, -2.0, -1.4, 0.0, 1.0, 2.0, 50.0].map(|value| table.grey(value));
        assert_eq!((greys, table.range()), ([0, 0, 25, 127, 255, 255, 255], [-2.0, 2.0]));
        assert_eq!(GreyTable::new(0, &[], 8), None);
        assert_eq!(GreyTable::new(0, &[1], 7), None);
        let wide = GreyTable::new(0, &[0, 0x8000, 0xffff], 16).expect("a table");
        assert_eq!([0.0, 1.0, 2.0].map(|value| wide.grey(value)), [0, 128, 255]);
    }
}
