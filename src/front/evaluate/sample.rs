//! Scores of one question.

use crate::data::agreement::Positions;
use crate::data::manifest::{Presence, Row};
use crate::metrics::estimates::{Item, SCORES, Values};
use crate::metrics::mask_scores::MaskScores;
use crate::metrics::segmentation::ImageScore;
use crate::metrics::text::TextScores;
use crate::segment::calibration::Confidence;

/// One row's scores; a line of `samples.csv`. A score that is not defined is empty: mask scores of a target that is not
/// in the image, distances to an empty mask.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SampleScore {
    /// CSV file and line of the row.
    pub row: String,
    /// Modality folder.
    pub modality: String,
    /// Mask file.
    pub mask: String,
    /// Dice at 0.5 of the mask as `predict` paints it: empty if the target is reported as not found.
    pub dice: Option<f64>,
    /// IoU at 0.5 of that mask.
    pub iou: Option<f64>,
    /// Soft Dice of that mask.
    pub soft_dice: Option<f64>,
    /// True if the answer names the correct location; empty if the row has no location.
    pub position_right: Option<bool>,
    /// BLEU of the answer.
    pub bleu: f64,
    /// ROUGE-1 F1 of the answer.
    pub rouge1: f64,
    /// METEOR without synonyms.
    pub meteor_exact_stem: f64,
    /// Predicted modality.
    pub predicted_modality: String,
    /// The question.
    pub question: String,
    /// The row's answer.
    pub answer: String,
    /// The generated answer.
    pub generated: String,
    /// Image file.
    pub image: String,
    /// Patient, if the data name one.
    pub patient: Option<String>,
    /// Whether the target is in the image.
    pub target: Presence,
    /// Presence score, 0..=1.
    pub presence: f64,
    /// False if the presence score is below the threshold of the run, so that the mask is withheld.
    pub is_found: bool,
    /// Whether the mask had foreground and was withheld.
    pub is_withheld: bool,
    /// Whether the painted mask has foreground.
    pub has_mask: bool,
    /// Mean probability of the mask before it is withheld, after temperature scaling.
    pub foreground_confidence: Option<f64>,
    /// Uncertain pixels as a fraction of mask and boundary, 0..=1.
    pub uncertain_boundary: Option<f64>,
    /// Dice of the mask without the presence threshold; empty if the run has no threshold.
    pub raw_dice: Option<f64>,
    /// Surface Dice.
    pub surface_dice: Option<f64>,
    /// 95th percentile of the Hausdorff distance, in the unit of the evaluation (`mm` or `px`).
    pub hd95: Option<f64>,
    /// Hausdorff distance.
    pub hd: Option<f64>,
    /// Average symmetric surface distance.
    pub assd: Option<f64>,
    /// Share of the true pixels that are predicted.
    pub pixel_sensitivity: Option<f64>,
    /// Share of the predicted pixels that are true.
    pub pixel_precision: Option<f64>,
    /// Lesions of the truth.
    pub lesions: Option<u64>,
    /// Lesions of the truth that are found.
    pub lesions_found: Option<u64>,
    /// Components of the prediction.
    pub predicted_lesions: Option<u64>,
    /// Components of the prediction that contain true pixels.
    pub predicted_lesions_right: Option<u64>,
    /// Predicted area less true area, mm² or pixels.
    pub area_difference: Option<f64>,
    /// Absolute area difference as a fraction of the true area.
    pub area_error_frac: Option<f64>,
    /// Whether the predicted class is that of the row; empty for a class that the run does not know.
    pub class_right: Option<bool>,
    /// Location of the painted mask; empty for an empty mask.
    pub mask_position: Option<String>,
    /// The location that the generated answer names; empty if it names none.
    pub answer_position: Option<String>,
    /// Whether the two are the same; empty if one of them is missing.
    pub positions_agree: Option<bool>,
    /// True if the painted mask has the correct location; empty if the row has no location or no target in the image.
    pub mask_position_right: Option<bool>,
    #[serde(skip)]
    lesion_scores: [Option<f64>; 3],
}

/// Scores of a mask against the truth of a target that is in the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scored {
    /// Overlap as painted.
    pub(super) painted: ImageScore,
    /// Dice without the presence threshold.
    pub(super) raw_dice: Option<f64>,
    /// The other scores.
    pub(super) mask: MaskScores,
}

/// The model's answer to one question and its scores.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) generated: String,
    pub(super) text: TextScores,
    pub(super) position_right: Option<bool>,
    pub(super) positions: Positions,
    pub(super) mask_position_right: Option<bool>,
    pub(super) predicted_modality: String,
    pub(super) class_right: Option<bool>,
    pub(super) confidence: Confidence,
    pub(super) is_withheld: bool,
    pub(super) has_mask: bool,
}

impl SampleScore {
    pub(super) fn new(row: &Row, answered: Answered, scored: Option<&Scored>) -> Self {
        let Answered { generated, text, position_right, predicted_modality, class_right, confidence, .. } = answered;
        let Positions { mask_position, answer_position, positions_agree, .. } = answered.positions;
        let mask = scored.map(|scored| &scored.mask);
        let border = mask.and_then(|mask| mask.border);
        let lesions = mask.map(|mask| mask.lesions);
        Self {
            row: format!("{}:{}", row.csv.display(), row.line),
            modality: row.modality.clone(),
            mask: row.target().mask_path.display().to_string(),
            dice: scored.map(|scored| scored.painted.dice),
            iou: scored.map(|scored| scored.painted.iou),
            soft_dice: scored.map(|scored| scored.painted.soft_dice),
            position_right,
            bleu: text.bleu,
            rouge1: text.rouge1,
            meteor_exact_stem: text.meteor_exact_stem,
            predicted_modality,
            question: row.question.clone(),
            answer: row.answer.clone(),
            generated,
            image: row.image_path.display().to_string(),
            patient: row.patient.clone(),
            target: row.target().presence,
            presence: confidence.presence,
            is_found: confidence.is_found,
            is_withheld: answered.is_withheld,
            has_mask: answered.has_mask,
            foreground_confidence: confidence.foreground,
            uncertain_boundary: confidence.boundary,
            raw_dice: scored.and_then(|scored| scored.raw_dice),
            surface_dice: mask.map(|mask| mask.surface_dice),
            hd95: border.map(|border| border.hd95),
            hd: border.map(|border| border.hd),
            assd: border.map(|border| border.assd),
            pixel_sensitivity: mask.and_then(|mask| mask.sensitivity),
            pixel_precision: mask.and_then(|mask| mask.precision),
            lesions: lesions.map(|lesions| lesions.truth),
            lesions_found: lesions.map(|lesions| lesions.found),
            predicted_lesions: lesions.map(|lesions| lesions.predicted),
            predicted_lesions_right: lesions.map(|lesions| lesions.right),
            area_difference: mask.map(|mask| mask.area_difference),
            area_error_frac: mask.and_then(|mask| mask.area_error_frac),
            class_right,
            mask_position,
            answer_position,
            positions_agree,
            mask_position_right: answered.mask_position_right,
            lesion_scores: lesions.map_or([None; 3], |lesions| [lesions.recall(), lesions.precision(), lesions.f1()]),
        }
    }

    /// Patient, or the image if the data name none.
    pub fn group(&self) -> &str {
        self.patient.as_deref().unwrap_or(&self.image)
    }

    /// The value of a score by its key in [`SCORES`]; `None` where it is not defined.
    pub fn value(&self, key: &str) -> Option<f64> {
        let flag = |value: bool| f64::from(u8::from(value));
        match key {
            "dice" => self.dice,
            "iou" => self.iou,
            "soft_dice" => self.soft_dice,
            "raw_dice" => self.raw_dice,
            "surface_dice" => self.surface_dice,
            "hd95" => self.hd95,
            "hd" => self.hd,
            "assd" => self.assd,
            "pixel_sensitivity" => self.pixel_sensitivity,
            "pixel_precision" => self.pixel_precision,
            "lesion_recall" => self.lesion_scores[0],
            "lesion_precision" => self.lesion_scores[1],
            "lesion_f1" => self.lesion_scores[2],
            "area_error_frac" => self.area_error_frac,
            "area_difference" => self.area_difference,
            "target_sensitivity" => (self.target == Presence::Present).then(|| flag(self.has_mask)),
            "target_specificity" => (self.target == Presence::Absent).then(|| flag(!self.has_mask)),
            "class_right" => self.class_right.map(flag),
            "position_right" => self.position_right.map(flag),
            "mask_position_right" => self.mask_position_right.map(flag),
            "positions_agree" => self.positions_agree.map(flag),
            "bleu" => Some(self.bleu),
            "rouge1" => Some(self.rouge1),
            "meteor_exact_stem" => Some(self.meteor_exact_stem),
            _ => None,
        }
    }

    /// The scores for means and intervals.
    pub(super) fn item(&self) -> Item {
        let mut values: Values = [None; SCORES.len()];
        for (value, score) in values.iter_mut().zip(&SCORES) {
            *value = self.value(score.key);
        }
        Item {
            row: self.row.clone(),
            class: self.modality.clone(),
            group: self.group().to_owned(),
            is_present: match self.target {
                Presence::Present => Some(true),
                Presence::Absent => Some(false),
                Presence::Unknown => None,
            },
            presence: self.presence,
            values,
        }
    }
}
