//! An answered question: about one slice, with the model's text and a mask, or about all slices, with the mask of a volume and
//! a text about it by a template.

use super::failure::{HttpFailure, HttpResult};
use super::picture::{ServedImage, SliceView};
use crate::data::agreement::Positions;
use crate::data::check::findings::mask_warning;
use crate::data::familiarity::Familiarity;
use crate::data::position::Zones;
use crate::data::volume::Axis;
use crate::front::volume::description::TargetDescription;
use crate::front::volume::{SlicePrediction, VolumeSettings};
use crate::segment::calibration::Confidence;
use image::GrayImage;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// An answered question.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Answer {
    /// Set by the store; empty for an answer that is not kept.
    pub(super) id: String,
    pub(super) question: String,
    /// How the question compares with those of the training.
    #[serde(flatten)]
    pub(super) familiarity: Familiarity,
    /// How the volume was shown to the model, if the images of the training were not shown so.
    pub(super) view_differs: Option<String>,
    /// Time of the model.
    pub(super) seconds: f64,
    #[serde(flatten)]
    pub(super) content: AnswerContent,
}

/// What an answer is about.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "scope", rename_all = "lowercase")]
pub(super) enum AnswerContent {
    Slice(SliceAnswer),
    Volume(VolumeAnswer),
}

/// A class and its probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct LikelyClass {
    pub(super) name: String,
    pub(super) probability: f32,
}

/// The answer about one slice.
#[derive(Debug, Clone, Serialize)]
pub(super) struct SliceAnswer {
    #[serde(flatten)]
    pub(super) view: SliceView,
    /// The model's answer.
    pub(super) answer: String,
    /// Whether the mask was sent with the question, and the answer follows it.
    pub(super) mask_given: bool,
    pub(super) new_tokens: usize,
    /// The most likely class.
    pub(super) class: Option<LikelyClass>,
    /// Fraction of the pixels in the mask of the answer, the model's or the one that was sent with the question.
    pub(super) area_frac: f64,
    /// Area of that mask, if the size of a pixel is known.
    pub(super) area_mm2: Option<f64>,
    /// Confidence of the model's mask; none for a mask that was sent with the question.
    pub(super) confidence: Option<Confidence>,
    /// The answer for training, if a user changed it.
    pub(super) corrected_answer: Option<String>,
    /// Locations of the mask and in the answer, each as a user corrected it.
    #[serde(flatten)]
    pub(super) positions: Positions,
    /// What to tell about a mask that was sent or corrected, if it is probably not meant so.
    pub(super) mask_warning: Option<String>,
    /// The words for locations in the training data.
    #[serde(skip)]
    pub(super) zones: Zones,
    /// The mask of the answer before a correction, 0 and 255; empty if the target is not found.
    #[serde(skip)]
    pub(super) mask: Arc<GrayImage>,
    /// The mask as a user corrected it, 0 and 255.
    #[serde(skip)]
    pub(super) corrected: Option<Arc<GrayImage>>,
}

impl SliceAnswer {
    /// The corrected mask, else the model's.
    pub(super) fn current_mask(&self) -> &Arc<GrayImage> {
        self.corrected.as_ref().unwrap_or(&self.mask)
    }

    /// Compares the current mask with the current answer, after a correction of one of them.
    pub(super) fn compare(&mut self) {
        let is_sent = self.mask_given || self.corrected.is_some();
        self.mask_warning = mask_warning(self.current_mask()).filter(|_| is_sent);
        let answer = self.corrected_answer.as_ref().unwrap_or(&self.answer);
        self.positions = Positions::of(self.current_mask(), answer, self.zones);
    }
}

/// The answer about all slices of a volume. Its fields have the names of the record of `prsmed predict`.
#[derive(Debug, Clone, Serialize)]
pub(super) struct VolumeAnswer {
    pub(super) settings: VolumeSettings,
    /// Number of slices that were segmented.
    pub(super) num_slices: usize,
    /// Number of them in which the target was found.
    pub(super) num_found: usize,
    pub(super) slices: Vec<SlicePrediction>,
    /// Volume in millilitres before the clean-up.
    pub(super) raw_volume_ml: f64,
    /// Volume in millilitres.
    pub(super) volume_ml: f64,
    /// First and last slice with a mask, along the axis of the settings.
    pub(super) range: Option<[usize; 2]>,
    /// The slice with the largest mask, along the axis of the image.
    pub(super) largest_slice: Option<usize>,
    /// Where the mask lies and how large it is, in sentences from a template.
    #[serde(flatten)]
    pub(super) description: TargetDescription,
    /// Location of the mask in the slice with its largest area. The description is not compared with it.
    #[serde(flatten)]
    pub(super) positions: Positions,
    /// That slice, along the axis of the settings.
    pub(super) mask_position_slice: Option<usize>,
    /// One value for each voxel, 0 or 1.
    #[serde(skip)]
    pub(super) mask: Arc<Vec<u8>>,
}

impl Answer {
    /// The answer as clients see it.
    pub(super) fn json(&self) -> Value {
        let mut value = json!(self);
        if self.id.is_empty() {
            value["id"] = Value::Null;
        }
        value["corrected"] = json!(matches!(&self.content, AnswerContent::Slice(answer) if answer.corrected.is_some()));
        value
    }

    /// The answer about one slice.
    pub(super) fn of_slice(&self) -> HttpResult<&SliceAnswer> {
        if let AnswerContent::Slice(answer) = &self.content { Ok(answer) } else { Err(about_all_slices()) }
    }

    /// The answer about one slice, to change it.
    pub(super) fn of_slice_mut(&mut self) -> HttpResult<&mut SliceAnswer> {
        if let AnswerContent::Slice(answer) = &mut self.content { Ok(answer) } else { Err(about_all_slices()) }
    }

    /// A slice of the answer as it is shown, and its mask. An answer about all slices needs the number of the slice, and has
    /// masks along other axes than that of the image too.
    pub(super) fn slice(
        &self,
        picture: &ServedImage,
        slice: Option<usize>,
        axis: Option<Axis>,
    ) -> HttpResult<(SliceView, Arc<GrayImage>)> {
        match (&self.content, slice) {
            (AnswerContent::Slice(answer), _) if axis.is_some() => {
                let error = format!("the answer is about slice {} of the image only", answer.view.slice);
                Err(HttpFailure::unprocessable(error, "leave `axis` out"))
            }
            (AnswerContent::Slice(answer), Some(slice)) if slice != answer.view.slice => {
                let error = format!("the answer is about slice {}", answer.view.slice);
                Err(HttpFailure::unprocessable(error, "leave `slice` out"))
            }
            (AnswerContent::Slice(answer), _) => Ok((answer.view, Arc::clone(answer.current_mask()))),
            (AnswerContent::Volume(answer), Some(slice)) => {
                let view = SliceView { slice, window: picture.window().map(|_| answer.settings.window) };
                Ok((view, Arc::new(picture.slice_of_mask(&answer.mask, axis, slice)?)))
            }
            (AnswerContent::Volume(_), None) => {
                let hint = "add `?slice=N`, or download the mask of the volume as `mask.nii.gz`";
                let error = "the answer is about all slices, and the request names no slice";
                Err(HttpFailure::unprocessable(error, hint))
            }
        }
    }

    /// Bytes of the masks in memory.
    pub(super) fn bytes(&self) -> usize {
        match &self.content {
            AnswerContent::Slice(answer) => answer.mask.len() + answer.corrected.as_ref().map_or(0, |mask| mask.len()),
            AnswerContent::Volume(answer) => answer.mask.len(),
        }
    }
}

fn about_all_slices() -> HttpFailure {
    let error = "the answer is about all slices; only an answer about one slice can be corrected or be a pair";
    HttpFailure::conflict(error, "ask the question about one slice")
}
