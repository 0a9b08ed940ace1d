//! Scores of one question.

use crate::data::manifest::Presence;
use crate::metrics::estimates::{QuestionScores, SCORES};
use crate::metrics::mask_scores::MaskScores;
use crate::metrics::segmentation::ImageScore;

/// One row's scores; a line of `samples.csv`. A score that is not defined is empty: mask scores of a target that is not
/// in the image, distances to an empty mask.
#[derive(Debug, Clone, Default, serde::Serialize)]
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
    /// Whether the two are the same; empty if one of them is missing, and for an absent target.
    pub positions_agree: Option<bool>,
    /// True if the painted mask has the correct location; empty if the row has no location or no target in the image.
    pub mask_position_right: Option<bool>,
    /// Of a row with a location and a mask of at least 0.8 Dice: whether the answer names the location of the painted mask;
    /// false if it names none.
    pub good_mask_agrees: Option<bool>,
    /// What the answer says otherwise than the painted mask shows; empty if they do not differ.
    pub position_warning: Option<String>,
    /// How often the words follow, when the true mask is moved to each location that has room for it, 0..=1.
    pub words_follow: Option<f64>,
    /// Recall, precision and F1 of lesions.
    #[serde(skip)]
    pub(super) lesion_scores: [Option<f64>; 3],
}

/// A mask of this Dice is good enough for its place to be right.
const GOOD_DICE: f64 = 0.8;

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

impl SampleScore {
    /// Adds the scores of the mask.
    pub(super) fn add_mask(&mut self, Scored { painted, raw_dice, mask }: Scored) {
        (self.dice, self.iou, self.soft_dice) = (Some(painted.dice), Some(painted.iou), Some(painted.soft_dice));
        (self.raw_dice, self.surface_dice) = (raw_dice, Some(mask.surface_dice));
        if let Some(border) = mask.border {
            (self.hd95, self.hd, self.assd) = (Some(border.hd95), Some(border.hd), Some(border.assd));
        }
        (self.pixel_sensitivity, self.pixel_precision) = (mask.sensitivity, mask.precision);
        let lesions = mask.lesions;
        (self.lesions, self.lesions_found) = (Some(lesions.truth), Some(lesions.found));
        (self.predicted_lesions, self.predicted_lesions_right) = (Some(lesions.predicted), Some(lesions.right));
        (self.area_difference, self.area_error_frac) = (Some(mask.area_difference), mask.area_error_frac);
        if painted.dice >= GOOD_DICE {
            self.good_mask_agrees = self.position_right.map(|_| self.positions_agree == Some(true));
        }
        self.lesion_scores = [lesions.recall(), lesions.precision(), lesions.f1()];
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
            "good_mask_agrees" => self.good_mask_agrees.map(flag),
            "words_follow" => self.words_follow,
            "bleu" => Some(self.bleu),
            "rouge1" => Some(self.rouge1),
            "meteor_exact_stem" => Some(self.meteor_exact_stem),
            _ => None,
        }
    }

    /// The scores for means and intervals.
    pub(super) fn item(&self) -> QuestionScores {
        QuestionScores {
            row: self.row.clone(),
            class: self.modality.clone(),
            group: self.group().to_owned(),
            is_present: (self.target != Presence::Unknown).then_some(self.target == Presence::Present),
            presence: self.presence,
            values: SCORES.each_ref().map(|score| self.value(score.key)),
        }
    }
}
