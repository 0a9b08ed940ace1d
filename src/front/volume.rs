//! Prediction on a volume, slice by slice with one question: a mask on the grid of the volume.
//!
//! Each slice is an image of its own; the model sees one slice at a time. A slice whose target is reported as not found
//! stays empty. The language model writes no answers; one template describes the mask of the whole volume.

pub mod description;

use super::prediction::class_of;
use super::{Ask, Model};
use crate::data::agreement::Positions;
use crate::data::familiarity::{Familiarity, ImageFamiliarity, add_fields};
use crate::data::volume::{Axis, Cleanup, Levels, SlicePlane, Volume, Window};
use crate::event::{Event, Observer};
use crate::segment::calibration::Confidence;
use crate::units::counted;
use crate::{Error, Result};
use description::{Coverage, TargetDescription};
use image::GrayImage;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Slices of an axis, counted from 0 in display order. As text: `A..B`, `A..` or `..B`; `B` is not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SliceRange {
    /// First slice.
    pub start: usize,
    /// The slice after the last one; `None`: to the end.
    pub end: Option<usize>,
}

impl fmt::Display for SliceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..", self.start)?;
        self.end.map_or(Ok(()), |end| write!(f, "{end}"))
    }
}

impl FromStr for SliceRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a range of slices; use `A..B` as in `10..40`, `10..` or `..40`");
        let (start, end) = text.split_once("..").ok_or_else(wrong)?;
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
        let start = if start.trim().is_empty() { 0 } else { number(start)? };
        let end = if end.trim().is_empty() { None } else { Some(number(end)?) };
        if end.is_some_and(|end| end <= start) {
            return Err(format!("`{text}` has no slices: the second number must be larger than the first"));
        }
        Ok(Self { start, end })
    }
}

impl Serialize for SliceRange {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SliceRange {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Settings of a prediction on a volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeSettings {
    /// The question without the prompt template, for all slices.
    pub question: String,
    /// Direction of the slices.
    pub axis: Axis,
    /// The slices.
    pub slices: SliceRange,
    /// Every N-th slice of them; at least 1.
    pub every: usize,
    /// How values become grey.
    pub window: Window,
    /// 3-D clean-up of the mask.
    pub cleanup: Cleanup,
    /// Paint slices whose target is reported as not found.
    pub always_paint: bool,
}

/// One slice of a [`VolumePrediction`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SlicePrediction {
    /// Its number in display order, from 0.
    pub slice: usize,
    /// Foreground pixels before the clean-up.
    pub num_pixels: usize,
    /// Confidence of the mask.
    #[serde(flatten)]
    pub confidence: Confidence,
}

/// The mask of a volume.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumePrediction {
    /// One value for each voxel of the volume: 0 or 1.
    pub mask: Vec<u8>,
    /// The slices that were segmented.
    pub slices: Vec<SlicePrediction>,
    /// Values of black and white.
    pub levels: Levels,
    /// Volume of the mask in millilitres before the clean-up.
    pub raw_ml: f64,
    /// Volume of the mask in millilitres.
    pub volume_ml: f64,
    /// First and last slice with a mask; `None` for an empty mask.
    pub range: Option<[usize; 2]>,
    /// Where the mask lies and how large it is, in sentences from a template.
    pub description: TargetDescription,
    /// Location of the mask in the slice with its largest area. The description is not compared with it.
    pub positions: Positions,
    /// That slice, along the axis of the settings; `None` for an empty mask.
    pub mask_position_slice: Option<usize>,
    /// How the question and these slices compare with the training.
    pub familiarity: Familiarity,
}

impl VolumePrediction {
    /// Number of slices in which the target was found.
    pub fn num_found(&self) -> usize {
        self.slices.iter().filter(|slice| slice.confidence.is_found).count()
    }

    /// What was found, in one line.
    pub fn summary(&self) -> String {
        let range = self.range.map_or_else(String::new, |[first, last]| format!(" in slices {first} to {last}"));
        let cleaned = if (self.raw_ml - self.volume_ml).abs() > 1e-9 {
            format!(" ({:.2} ml before the clean-up)", self.raw_ml)
        } else {
            String::new()
        };
        let (count, found) = (self.slices.len(), self.num_found());
        let position = self.positions.mask_position.as_ref().zip(self.mask_position_slice);
        let position = position.map_or_else(String::new, |(position, slice)| {
            format!("\nposition of the mask in slice {slice}, where it is largest: {position} of the slice as shown")
        });
        format!(
            "mask: {:.2} ml{range}{cleaned}; found in {found} of {}{position}",
            self.volume_ml,
            counted(count, "slice")
        )
    }

    /// What was done and found, as JSON. `files` are names for the record.
    pub fn record(&self, volume: &Volume, settings: &VolumeSettings, files: [(&str, Option<String>); 3]) -> Value {
        let mut record = json!({ "kind": "result", "version": env!("CARGO_PKG_VERSION") });
        for (key, name) in files {
            record[key] = json!(name);
        }
        let found = json!({
            "settings": settings,
            "modality": volume.modality.code(),
            "size": volume.grid.size,
            "spacing_mm": volume.grid.spacing(),
            "orientation": volume.grid.affine.orientation(),
            "levels": self.levels,
            "notes": volume.notes,
            "num_slices": self.slices.len(),
            "num_found": self.num_found(),
            "slices": self.slices,
            "raw_volume_ml": self.raw_ml,
            "volume_ml": self.volume_ml,
            "range": self.range,
            "mask_position_slice": self.mask_position_slice,
        });
        add_fields(&mut record, &found);
        add_fields(&mut record, &self.description);
        self.positions.add_to(&mut record);
        record
    }
}

impl VolumeSettings {
    /// What is described of a mask of `num_segmented` slices.
    fn coverage(&self, num_segmented: usize, raw_ml: f64) -> Coverage {
        let has_no_gaps = self.every.max(1) <= self.cleanup.fill_gaps + 1;
        Coverage { axis: self.axis, num_segmented, has_no_gaps, raw_ml }
    }

    /// A question about all slices along the first axis, without clean-up.
    pub fn new(question: &str) -> Self {
        Self { question: question.to_owned(), every: 1, ..Self::default() }
    }

    /// Numbers of the slices to segment.
    ///
    /// # Errors
    /// [`Error::Config`] for a range without slices of the volume.
    pub fn chosen(&self, plane: &SlicePlane) -> Result<Vec<usize>> {
        let end = self.slices.end.unwrap_or(plane.num_slices).min(plane.num_slices);
        let chosen: Vec<usize> = (self.slices.start..end).step_by(self.every.max(1)).collect();
        if chosen.is_empty() {
            let count = counted(plane.num_slices, &format!("{} slice", self.axis));
            let are = if plane.num_slices == 1 { "is" } else { "are" };
            let reason = format!("`{}` has no slice: there {are} {count}", self.slices);
            let hint = format!("choose from `0..{}`", plane.num_slices);
            return Err(Error::argument("slices", reason, hint));
        }
        Ok(chosen)
    }
}

impl Model {
    /// Segments the slices of a volume. The observer gets the progress by slice. `probabilities` gets a probability for each
    /// voxel, before the presence threshold and the clean-up; NaN in slices that are not segmented.
    ///
    /// # Errors
    /// As [`Model::predict`]; [`Error::Config`] for slices or a window that the volume does not have;
    /// [`Error::Interrupted`].
    pub fn segment(
        &self,
        volume: &Volume,
        settings: &VolumeSettings,
        observer: &dyn Observer,
        interrupt: &AtomicBool,
        mut probabilities: Option<&mut Vec<f32>>,
    ) -> Result<VolumePrediction> {
        let plane = volume.plane(settings.axis);
        let chosen = settings.chosen(&plane)?;
        let (levels, context) = (settings.window.levels(volume)?, self.description().context());
        let ask = Ask { always_paint: settings.always_paint, ..Ask::mask(&settings.question) };
        observer.on(&Event::Started { phase: "predict".into(), total: chosen.len() as u64, unit: "slices" });
        let mut mask = vec![0; volume.grid.num_voxels()];
        if let Some(all) = &mut probabilities {
            **all = vec![f32::NAN; volume.grid.num_voxels()];
        }
        let mut slices = Vec::with_capacity(chosen.len());
        let mut seen = Vec::with_capacity(chosen.len());
        for slice in chosen {
            if interrupt.load(Ordering::SeqCst) {
                return Err(Error::Interrupted);
            }
            let image = volume.image(&plane, slice, &levels, context)?;
            let prediction = self.ask(&self.encode_pixels(&image)?, &ask)?;
            let target = prediction.target();
            if let Some(all) = &mut probabilities {
                plane.put(all, slice, &target.probabilities)?;
            }
            plane.put(&mut mask, slice, &target.pixels().map(u8::from).collect::<Vec<_>>())?;
            let num_pixels = target.num_foreground();
            slices.push(SlicePrediction { slice, num_pixels, confidence: target.confidence });
            seen.push((num_pixels > 0, prediction.classes, prediction.familiarity.image));
            observer.on(&Event::Advanced { done: slices.len() as u64 });
        }
        observer.on(&Event::Finished);
        let raw_ml = volume.grid.volume_ml(&mask)?;
        settings.cleanup.apply(&mut mask, &volume.grid, SlicePlane::through_axis(&volume.grid, settings.axis))?;
        let volume_ml = volume.grid.volume_ml(&mask)?;
        let mask_position_slice = plane.largest_slice(&mask)?;
        let positions = match mask_position_slice {
            Some(slice) => Positions::of(&slice_of(&plane, &mask, slice)?, "", self.description().zones),
            None => Positions::default(),
        };
        let range = range(&plane, &mask)?;
        let coverage = settings.coverage(slices.len(), raw_ml);
        let description = TargetDescription::of(volume, &mask, range.zip(mask_position_slice), &coverage)?;
        Ok(VolumePrediction {
            slices,
            levels,
            raw_ml,
            volume_ml,
            range,
            mask,
            description,
            positions,
            mask_position_slice,
            familiarity: self.familiarity_of(seen, &settings.question),
        })
    }

    /// How a question and slices compare with the training.
    fn familiarity_of(&self, seen: Vec<SeenSlice>, question: &str) -> Familiarity {
        let (classes, image) = seen_in(seen);
        let class = class_of(&self.description().modalities, &classes);
        let class = class.as_ref().map(|(name, probability)| (name.as_str(), *probability));
        self.familiarity(question, None, class, image)
    }
}

/// Whether a slice has a mask, its classes, and how it looks beside the training.
type SeenSlice = (bool, Vec<f32>, ImageFamiliarity);

/// Mean classes and familiarity of slices with a mask, or of all if none has one: slices beyond the target are often unlike
/// those of the training.
fn seen_in(mut slices: Vec<SeenSlice>) -> (Vec<f32>, ImageFamiliarity) {
    let is_painted = slices.iter().any(|(is_painted, ..)| *is_painted);
    slices.retain(|slice| slice.0 == is_painted);
    let classes = mean(slices.iter().map(|(_, classes, _)| classes.as_slice()));
    (classes, ImageFamiliarity::of_slices(slices.into_iter().map(|(.., image)| image).collect()))
}

/// The mean of each number.
fn mean<'a>(lists: impl ExactSizeIterator<Item = &'a [f32]>) -> Vec<f32> {
    let count = lists.len() as f32;
    let mut means = Vec::new();
    for list in lists {
        means.resize(list.len(), 0.0);
        means.iter_mut().zip(list).for_each(|(mean, value)| *mean += value / count);
    }
    means
}

/// A slice of a mask as it is shown, 0 and 1.
fn slice_of(plane: &SlicePlane, mask: &[u8], slice: usize) -> Result<GrayImage> {
    let [width, height] = plane.size.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
    let values = plane.values(mask, slice)?;
    GrayImage::from_raw(width, height, values).ok_or_else(|| Error::Shape { reason: "a slice of another size".into() })
}

/// First and last slice with a mask.
fn range(plane: &SlicePlane, mask: &[u8]) -> Result<Option<[usize; 2]>> {
    let mut range: Option<[usize; 2]> = None;
    for slice in 0..plane.num_slices {
        if plane.values(mask, slice)?.contains(&1) {
            range = range.map_or(Some([slice, slice]), |[first, _]| Some([first, slice]));
        }
    }
    Ok(range)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::volume::{Affine, Grid};

    #[test]
    fn ranges_are_read_and_written() {
        let range = |text: &str| text.parse::<SliceRange>();
        assert_eq!(range("3..7"), Ok(SliceRange { start: 3, end: Some(7) }));
        assert_eq!(range("..7").map(|range| range.to_string()), Ok("0..7".to_owned()));
        assert_eq!(range("3..").map(|range| range.to_string()), Ok("3..".to_owned()));
        assert!(range("7..7").unwrap_err().contains("no slices"));
        assert!(range("7").unwrap_err().contains("10..40"));
        assert!(range("-1..7").is_err());
    }

    #[test]
    fn probabilities_of_slices_are_averaged() {
        let lists: [&[f32]; 2] = [&[0.25, 0.75], &[0.75, 0.25]];
        assert_eq!(mean(lists.into_iter()), [0.5, 0.5]);
        assert_eq!(mean([].into_iter()), [0.0; 0]);
    }

    #[test]
    fn the_range_of_a_mask_is_that_of_its_slices() {
        // inferior first, also for a grid that runs from superior
        let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -1.0]], [0.0; 3]);
        let plane = SlicePlane::new(&Grid { size: [2, 1, 5], affine }, Axis::Axial);
        assert_eq!(range(&plane, &[0; 10]).unwrap(), None);
        assert_eq!(range(&plane, &[0, 0, 0, 1, 0, 0, 0, 0, 1, 0]).unwrap(), Some([0, 3]));
    }

    #[test]
    fn slices_are_chosen_within_the_volume() {
        let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
        let plane = SlicePlane::new(&Grid { size: [4, 5, 10], affine }, Axis::Axial);
        let chosen = |slices: &str, every| {
            let slices = slices.parse().expect("a range");
            let settings = VolumeSettings { slices, every, ..VolumeSettings::new("") };
            settings.chosen(&plane)
        };
        assert_eq!(chosen("0..", 4).unwrap(), [0, 4, 8]);
        assert_eq!(chosen("7..40", 1).unwrap(), [7, 8, 9]);
        let error = chosen("10..", 1).unwrap_err();
        assert!(error.to_string().contains("10 axial slices") && error.hint().contains("0..10"), "{error}");
    }
}
