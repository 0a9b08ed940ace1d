//! An uploaded image or volume, as slices. An image file has one slice and no intensity window.

use crate::data::volume::format::usual_endings;
use crate::data::volume::{Axis, Levels, Neighbours, Sequence, SlicePlane, Volume, Voxels, Window, write};
use crate::front::input::axis_of;
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use serde::Serialize;
use std::borrow::Cow;
use std::path::Path;

/// The part of a picture that is shown, and that a question is about.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(super) struct SliceView {
    /// Index of the slice, from 0.
    pub(super) slice: usize,
    /// `None`: the window of the file.
    pub(super) window: Option<Window>,
}

/// The slices of a volume along one axis.
#[derive(Debug, Serialize)]
pub(super) struct Direction {
    axis: Axis,
    width: usize,
    height: usize,
    slices: usize,
    /// Size of a pixel in mm, across and down.
    spacing_mm: [f64; 2],
    /// How columns, rows and slices lie in the slices of the image.
    along: [Along; 3],
}

/// A place in the slices of the image.
#[derive(Debug, Serialize)]
struct Along {
    /// 0: its columns, 1: its rows, 2: its slices.
    place: usize,
    backwards: bool,
}

/// An uploaded image or volume.
#[derive(Debug)]
pub(super) struct ServedImage {
    pixels: Pixels,
    /// What the colours are, of an image of several sequences.
    sequences: Vec<Sequence>,
    /// What was assumed about an image, as the notes of a volume say it.
    notes: Vec<String>,
    /// Size of a pixel in mm, across and down.
    pub(super) spacing_mm: Option<[f64; 2]>,
}

#[derive(Debug)]
enum Pixels {
    Image(DynamicImage),
    Volume(Box<Slices>),
}

/// A volume, cut along one axis, with its default window.
#[derive(Debug)]
struct Slices {
    volume: Volume,
    axis: Axis,
    plane: SlicePlane,
    window: Window,
    levels: Levels,
}

impl Slices {
    /// Percentiles need all voxels, so the levels of the default window are kept.
    fn levels(&self, window: Option<Window>) -> Result<Cow<'_, Levels>> {
        match window.filter(|other| *other != self.window) {
            Some(other) => Ok(Cow::Owned(other.levels(&self.volume)?)),
            None => Ok(Cow::Borrowed(&self.levels)),
        }
    }
}

impl ServedImage {
    /// An image of one slice. `spacing_mm` is the size of a pixel, across and down.
    pub(super) fn new(pixels: DynamicImage, spacing_mm: Option<[f64; 2]>) -> Self {
        Self { pixels: Pixels::Image(pixels), sequences: Vec::new(), notes: Vec::new(), spacing_mm }
    }

    /// A volume. `shown` are the window and the axis of the training images, if the run knows them.
    ///
    /// # Errors
    /// [`Error::Config`] for a window that the volume does not have.
    pub(super) fn of_volume(mut volume: Volume, shown: (Option<Window>, Option<Axis>)) -> Result<Self> {
        let (window, axis) = shown;
        let axis = axis_of(&volume, axis);
        let plane = volume.plane(axis);
        let window = window.unwrap_or_default().chosen_for(&volume);
        let levels = window.levels(&volume)?;
        let mismatch = window.mismatch(&volume, &levels);
        volume.notes.extend(mismatch);
        let spacing_mm = Some(plane.spacing);
        let notes = volume.notes.clone();
        let pixels = Pixels::Volume(Box::new(Slices { volume, axis, plane, window, levels }));
        Ok(Self { pixels, sequences: Vec::new(), notes, spacing_mm })
    }

    /// The same as an image of several sequences, with more notes.
    pub(super) fn with_sequences(mut self, sequences: Vec<Sequence>, notes: Vec<String>) -> Self {
        self.sequences = sequences;
        self.notes.extend(notes);
        self
    }

    /// What the colours are, of an image of several sequences.
    pub(super) fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Width and height of a slice in pixels.
    pub(super) fn size(&self) -> (u32, u32) {
        match &self.pixels {
            Pixels::Image(image) => (image.width(), image.height()),
            Pixels::Volume(slices) => {
                let [width, height] = slices.plane.size.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
                (width, height)
            }
        }
    }

    /// The slices of a volume; images have none.
    fn cut(&self) -> Option<&Slices> {
        if let Pixels::Volume(slices) = &self.pixels { Some(slices) } else { None }
    }

    /// The slices of a volume that is shown with a window.
    fn windowed(&self) -> Option<&Slices> {
        self.cut().filter(|slices| !slices.volume.is_colour())
    }

    /// Number of slices.
    pub(super) fn slices(&self) -> usize {
        self.cut().map_or(1, |slices| slices.plane.num_slices)
    }

    /// The default window; images have none.
    pub(super) fn window(&self) -> Option<Window> {
        self.windowed().map(|slices| slices.window)
    }

    /// Direction of the slices; images have none.
    pub(super) fn axis(&self) -> Option<Axis> {
        self.cut().map(|slices| slices.axis)
    }

    /// The slices along all three axes; none for images and for volumes of one slice.
    pub(super) fn directions(&self) -> Vec<Direction> {
        let Some(Slices { volume, axis: shown, .. }) = self.cut().filter(|cut| !cut.volume.grid.size.contains(&1))
        else {
            return Vec::new();
        };
        let direction = |axis: Axis| {
            let SlicePlane { size: [width, height], num_slices, spacing, .. } = volume.plane(axis);
            let along = SlicePlane::turned(&volume.grid, *shown, axis);
            let along = along.map(|(place, backwards)| Along { place, backwards });
            Direction { axis, width, height, slices: num_slices, spacing_mm: spacing, along }
        };
        Axis::ALL.map(direction).into()
    }

    /// The names of the files to which masks on the grid of the volume can be written; images have none.
    pub(super) fn exports(&self) -> Vec<String> {
        let Some(slices) = self.cut() else { return Vec::new() };
        let names = usual_endings().map(|ending| format!("mask.{ending}"));
        names.filter(|name| write::check(Path::new(name), &slices.volume).is_ok()).collect()
    }

    /// What was assumed or ignored when the file was read.
    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        match &self.pixels {
            Pixels::Image(image) => image.as_bytes().len(),
            Pixels::Volume(slices) => {
                let voxels = match &slices.volume.voxels {
                    Voxels::I16(values) => 2 * values.len(),
                    Voxels::F32(values) => 4 * values.len(),
                    Voxels::Rgb(values) => 3 * values.len(),
                };
                voxels + 8 * slices.volume.display.padding.num_runs()
            }
        }
    }

    /// Checks that a view exists.
    ///
    /// # Errors
    /// [`Error::Config`] for a slice that does not exist, or a window of an image that has none.
    pub(super) fn check(&self, view: SliceView) -> Result<()> {
        Self::check_slice(view.slice, self.slices())?;
        if view.window.is_some() && self.window().is_none() {
            let reason = "the image has 8 bits and no intensity window";
            return Err(Error::config("window", reason, "leave `window` out"));
        }
        Ok(())
    }

    fn check_slice(slice: usize, all: usize) -> Result<()> {
        if slice >= all {
            let reason = format!("there is no slice {slice}, the image has {all}");
            return Err(Error::config("slice", reason, "slices count from 0"));
        }
        Ok(())
    }

    /// The pixels of a view as they are shown, 8-bit grey or RGB.
    ///
    /// # Errors
    /// As [`Self::check`]; [`Error::Config`] for a window that the volume does not have.
    pub(super) fn pixels(&self, view: SliceView) -> Result<Cow<'_, DynamicImage>> {
        self.pixels_with(view, Neighbours::None)
    }

    /// The pixels of a view with neighbouring slices, for a model.
    ///
    /// # Errors
    /// As [`Self::pixels`], and for neighbours of a colour volume.
    pub(super) fn pixels_with(&self, view: SliceView, neighbours: Neighbours) -> Result<Cow<'_, DynamicImage>> {
        self.check(view)?;
        match &self.pixels {
            Pixels::Image(image) => Ok(Cow::Borrowed(image)),
            Pixels::Volume(slices) => {
                let levels = slices.levels(view.window)?;
                slices.volume.image(&slices.plane, view.slice, &levels, neighbours).map(Cow::Owned)
            }
        }
    }

    /// The pixels of a slice along another axis than the shown one.
    ///
    /// # Errors
    /// [`Error::Config`] for an image, a slice that does not exist, and as [`Self::pixels`].
    pub(super) fn pixels_along(&self, axis: Axis, view: SliceView) -> Result<DynamicImage> {
        let slices = self.as_volume()?;
        let plane = slices.volume.plane(axis);
        Self::check_slice(view.slice, plane.num_slices)?;
        self.check(SliceView { slice: 0, ..view })?;
        slices.volume.image(&plane, view.slice, &*slices.levels(view.window)?, Neighbours::None)
    }

    /// Width and level of a view's window, in the units of the file; `None` for an image without a window.
    ///
    /// # Errors
    /// As [`Self::pixels`].
    pub(super) fn width_and_level(&self, view: SliceView) -> Result<Option<[f32; 2]>> {
        let levels = self.windowed().map(|slices| slices.levels(view.window)).transpose()?;
        Ok(levels.map(|levels| [levels.high - levels.low, f32::midpoint(levels.high, levels.low)]))
    }

    fn as_volume(&self) -> Result<&Slices> {
        self.cut().ok_or_else(|| {
            let hint = "upload a NIfTI file or a DICOM series; the mask of an image is a PNG";
            Error::config("image", "the image is not a volume", hint)
        })
    }

    /// The volume, and the direction of its shown slices.
    ///
    /// # Errors
    /// [`Error::Config`] for an image.
    pub(super) fn volume(&self) -> Result<(&Volume, Axis)> {
        self.as_volume().map(|slices| (&slices.volume, slices.axis))
    }

    /// One slice of a mask on the grid of the volume, as 0 and 255, along the shown axis or another one.
    ///
    /// # Errors
    /// [`Error::Config`] for an image, and a slice that does not exist; [`Error::Shape`] for a mask of another size.
    pub(super) fn slice_of_mask(&self, mask: &[u8], axis: Option<Axis>, slice: usize) -> Result<GrayImage> {
        let slices = self.as_volume()?;
        let plane = axis.map_or_else(|| slices.plane.clone(), |axis| slices.volume.plane(axis));
        Self::check_slice(slice, plane.num_slices)?;
        plane.mask(mask, slice)
    }

    /// The slice with most voxels of a mask; `None` for an empty mask.
    ///
    /// # Errors
    /// As [`Self::slice_of_mask`].
    pub(super) fn largest_slice(&self, mask: &[u8]) -> Result<Option<usize>> {
        self.as_volume()?.plane.largest_slice(mask)
    }

    /// A mask on the grid of the volume: the union of `masks` and of the `(slice, mask)` pairs that are drawn in.
    ///
    /// # Errors
    /// [`Error::Config`] for an image; [`Error::Shape`] for a mask of another size.
    pub(super) fn mask_of_volume(&self, masks: &[&[u8]], drawn: &[(usize, &GrayImage)]) -> Result<Vec<u8>> {
        let Slices { volume, plane, .. } = self.as_volume()?;
        let mut mask = vec![0; volume.grid.num_voxels()];
        for other in masks {
            volume.grid.check(other.len())?;
            mask.iter_mut().zip(*other).for_each(|(value, other)| *value |= u8::from(*other > 0));
        }
        for (slice, image) in drawn {
            let mut values = plane.values(&mask, *slice)?;
            if values.len() != image.len() {
                return Err(Error::Shape { reason: format!("the mask of slice {slice} has another size") });
            }
            values.iter_mut().zip(image.iter()).for_each(|(value, drawn)| *value |= u8::from(*drawn > 0));
            plane.put(&mut mask, *slice, &values)?;
        }
        Ok(mask)
    }
}
