//! Neighbouring slices as the colours of an image, so that a model of colour images sees a little of the third dimension.

use std::fmt;
use std::str::FromStr;

use image::{DynamicImage, Rgb, RgbImage};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::slices::SlicePlane;
use super::voxels::Volume;
use super::window::Levels;
use prsmed_base::error::{Error, Result};

/// Which neighbours of a slice an image of it shows: red is the one before, blue the one behind. As text: `none`, a number
/// of slices (`1`), or a distance (`5mm`).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Neighbours {
    /// The slice alone, in grey.
    #[default]
    None,
    /// Those so many slices away, at least 1.
    Slices(usize),
    /// Those closest to this distance in mm, at least the next ones.
    Distance(f64),
}

impl Neighbours {
    /// True without neighbours.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Number of slices to each neighbour.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at least 1; clipped to the slices later"
    )]
    fn steps(self, plane: &SlicePlane) -> Option<usize> {
        match self {
            Self::None => None,
            Self::Slices(count) => Some(count),
            Self::Distance(mm) => Some((mm / plane.slice_spacing).round().max(1.0) as usize),
        }
    }
}

impl fmt::Display for Neighbours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Slices(count) => write!(f, "{count}"),
            Self::Distance(mm) => write!(f, "{mm}mm"),
        }
    }
}

impl FromStr for Neighbours {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let wrong = || format!("`{text}` is no number of slices (`1`) and no distance (`5mm`), both larger than 0");
        if text == "none" {
            return Ok(Self::None);
        }
        let found = match text.strip_suffix("mm") {
            Some(mm) => mm.trim().parse().ok().filter(|mm| *mm > 0.0 && f64::is_finite(*mm)).map(Self::Distance),
            None => text.parse().ok().filter(|count| *count > 0).map(Self::Slices),
        };
        found.ok_or_else(wrong)
    }
}

impl Serialize for Neighbours {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Neighbours {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Volume {
    /// One slice as an 8-bit image: colour for a colour image, else grey, or with neighbours their colours. Before the first
    /// slice and behind the last one, the slice at this end is repeated.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slice that does not exist; [`Error::Argument`] for neighbours of a colour image.
    pub fn image(
        &self,
        plane: &SlicePlane,
        slice: usize,
        levels: &Levels,
        neighbours: Neighbours,
    ) -> Result<DynamicImage> {
        let steps = neighbours.steps(plane);
        if self.is_colour() {
            if steps.is_some() {
                let hint = "leave the argument out; grey volumes alone can have it";
                return Err(Error::argument("context", "a colour image has no channels for neighbouring slices", hint));
            }
            return self.colour_slice(plane, slice, levels).map(DynamicImage::ImageRgb8);
        }
        let own = self.slice(plane, slice, levels)?;
        let Some(steps) = steps else { return Ok(DynamicImage::ImageLuma8(own)) };
        let last = plane.num_slices - 1;
        let before = self.slice(plane, slice.saturating_sub(steps), levels)?;
        let behind = self.slice(plane, slice.saturating_add(steps).min(last), levels)?;
        let pixel = |x, y| Rgb([&before, &own, &behind].map(|grey| grey.get_pixel(x, y).0[0]));
        Ok(DynamicImage::ImageRgb8(RgbImage::from_fn(own.width(), own.height(), pixel)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::{Affine, Grid};
    use super::super::nifti::geometry::Forms;
    use super::super::slices::Axis;
    use super::super::source::VolumeSource;
    use super::super::voxels::Voxels;
    use super::*;

    /// Four slices of 1 x 1 x 2.5 mm with the values 10, 20, 30 and 40.
    fn volume() -> Volume {
        let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.5]], [0.0; 3]);
        let grid = Grid { size: [1, 1, 4], affine };
        let mut voxels = Voxels::with_capacity(4);
        for value in [10.0, 20.0, 30.0, 40.0] {
            voxels.push(value);
        }
        let source = VolumeSource::Nifti(Forms::of_grid(&grid));
        Volume::new(voxels, grid, source)
    }

    #[test]
    fn neighbours_are_colours_and_the_ends_are_repeated() {
        let volume = volume();
        let (plane, levels) = (volume.plane(Axis::Axial), Levels::new(0.0, 255.0));
        let colours = |slice, neighbours: &str| {
            volume.image(&plane, slice, &levels, neighbours.parse().unwrap()).unwrap().into_rgb8().into_raw()
        };
        assert_eq!(colours(1, "none"), [20, 20, 20]);
        assert_eq!(colours(1, "1"), [10, 20, 30]);
        assert_eq!([colours(0, "1"), colours(3, "1")], [[10, 10, 20], [30, 40, 40]]);
        assert_eq!(colours(1, "2"), [10, 20, 40]);
        // 1 mm is less than a slice, 3 mm are one, 4 mm are two
        assert_eq!(["1mm", "3mm", "4mm"].map(|text| colours(2, text)), [[20, 30, 40], [20, 30, 40], [10, 30, 40]]);
        assert!(volume.image(&plane, 1, &levels, Neighbours::None).unwrap().as_luma8().is_some());
        assert!(volume.image(&plane, 4, &levels, Neighbours::Slices(1)).is_err());
    }

    #[test]
    fn texts_are_read_and_written() {
        for text in ["none", "1", "3", "2.5mm"] {
            assert_eq!(text.parse::<Neighbours>().unwrap().to_string(), text);
        }
        for text in ["", "0", "-1", "1.5", "0mm", "nanmm", "infmm", "mm", "1cm"] {
            assert!(text.parse::<Neighbours>().unwrap_err().contains("5mm"), "{text}");
        }
    }
}
