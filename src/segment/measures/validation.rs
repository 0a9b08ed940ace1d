//! Scores of validation batches.

use crate::Result;
use crate::data::geometry::Geometry;
use crate::data::manifest::Presence;
use crate::metrics::segmentation::{ImageScore, is_foreground};
use crate::models::prsmed::PrsMed;
use crate::segment::step::{self, Inputs, Pass};
use crate::tensor::{Device, Kind, META, Tensor, meta};
use crate::trainer::BatchSize;
use image::GrayImage;
use serde::{Deserialize, Serialize};

/// Adds the losses and counts of a validation batch to `sums`; `image` receives the mask probabilities and the truth of
/// each target.
pub(crate) fn score(
    model: &PrsMed,
    inputs: &Inputs,
    sums: &mut Sums,
    mut image: impl FnMut(Vec<f32>, Vec<bool>, &mut Sums) -> Result<()>,
) -> Result<()> {
    let one = BatchSize { samples: 1.0, tokens: 1.0, masks: 1.0 };
    let prepared = inputs.to_device(inputs.vision.resolve(model), one);
    let outputs = step::forward(model, &prepared, Pass::evaluation());
    let losses = step::losses(model, &prepared, &outputs);
    let size = inputs.batch_size();
    sums.tokens += size.tokens;
    sums.masks += size.masks;
    sums.mask += meta::number(&losses.mask);
    if !model.reads_masks() {
        sums.add_words(&losses.text, step::tokens_right(model, &prepared, &outputs));
    }
    let mut seen = Vec::new();
    let probability = outputs.mask_logits.sigmoid();
    for i in 0..i64::try_from(inputs.layout.targets()).expect("a few samples") {
        let truth: Vec<bool> = values(&inputs.mask.get(i)).iter().map(|byte| *byte > 127.5).collect();
        let prediction = values(&probability.get(i));
        if model.reads_masks() {
            let [predicted, true_one] =
                [prediction.iter().map(|p| is_foreground(*p)).collect(), truth.clone()].map(geometry);
            sums.add_distance(predicted.distance(&true_one));
            seen.push(predicted);
        }
        image(prediction, truth, sums)?;
    }
    // words follow the predicted masks, as those of a prediction do
    let Some(geometry) = inputs.layout.geometry(seen.iter().map(Geometry::numbers)) else { return Ok(()) };
    let prepared = prepared.with_geometry(&geometry);
    let text = step::words_loss(model, &prepared, &outputs).unwrap_or(losses.text);
    sums.add_words(&text, step::tokens_right(model, &prepared, &outputs));
    Ok(())
}

/// A square mask in numbers; those of an unknown one for a mask of the meta device.
fn geometry(mask: Vec<bool>) -> Geometry {
    let side = u32::try_from(mask.len().isqrt()).expect("a side");
    let levels = mask.into_iter().map(|is_set| if is_set { 255 } else { 0 }).collect();
    GrayImage::from_raw(side, side, levels)
        .filter(|_| side > 0)
        .map_or_else(Geometry::unknown, |mask| Geometry::of(&mask))
}

/// Sums over validation samples.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(from = "[u64; 13]", into = "[u64; 13]")]
pub(crate) struct Sums {
    /// Targets of all kinds.
    pub(crate) questions: u64,
    /// Targets that are in the image, and the sums of their scores.
    present: u64,
    dice: f64,
    iou: f64,
    /// Absent targets, and those of them that got a mask.
    absent: u64,
    false_masks: u64,
    tokens: f64,
    tokens_right: f64,
    text: f64,
    /// Targets whose mask is known.
    masks: f64,
    mask: f64,
    /// Masks whose place was compared with the true one, and the sum of their distances.
    compared: u64,
    distance: f64,
}

/// Numbers as bits, because JSON has no NaN.
impl From<Sums> for [u64; 13] {
    fn from(sums: Sums) -> Self {
        let Sums { questions, present, absent, false_masks, compared, dice, iou, tokens, tokens_right, text, .. } =
            sums;
        let [dice, iou, tokens, tokens_right, text, masks, mask, distance] =
            [dice, iou, tokens, tokens_right, text, sums.masks, sums.mask, sums.distance].map(f64::to_bits);
        [
            questions, present, absent, false_masks, compared, dice, iou, tokens, tokens_right, text, masks, mask,
            distance,
        ]
    }
}

impl From<[u64; 13]> for Sums {
    fn from([questions, present, absent, false_masks, compared, bits @ ..]: [u64; 13]) -> Self {
        let [dice, iou, tokens, tokens_right, text, masks, mask, distance] = bits.map(f64::from_bits);
        let counts = Self { questions, present, absent, false_masks, compared, ..Self::default() };
        Self { dice, iou, tokens, tokens_right, text, masks, mask, distance, ..counts }
    }
}

impl Sums {
    /// Adds the sums of other samples.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.questions += other.questions;
        self.present += other.present;
        self.dice += other.dice;
        self.iou += other.iou;
        self.absent += other.absent;
        self.false_masks += other.false_masks;
        self.tokens += other.tokens;
        self.tokens_right += other.tokens_right;
        self.text += other.text;
        self.masks += other.masks;
        self.mask += other.mask;
        self.compared += other.compared;
        self.distance += other.distance;
    }

    /// Adds the loss of answers and the number of their right tokens.
    fn add_words(&mut self, loss: &Tensor, tokens_right: f64) {
        self.text += meta::number(loss);
        self.tokens_right += tokens_right;
    }

    /// Adds the distance of a predicted mask from the true one, [`Geometry::distance`].
    fn add_distance(&mut self, distance: Option<f64>) {
        self.compared += u64::from(distance.is_some());
        self.distance += distance.unwrap_or_default();
    }

    /// Mean distance of predicted masks from the true ones; `None` if no mask was compared.
    pub(crate) fn mask_error(&self) -> Option<f64> {
        (self.compared > 0).then(|| self.distance / self.compared as f64)
    }

    /// Adds the mask of one target.
    ///
    /// # Errors
    /// [`crate::Error::Data`] for a probability that is NaN.
    pub(crate) fn add(&mut self, target: Presence, prediction: &[f32], truth: &[bool]) -> Result<()> {
        self.questions += 1;
        match target {
            Presence::Present => {
                let score = ImageScore::of(prediction, truth)?;
                self.present += 1;
                self.dice += score.dice;
                self.iou += score.iou;
            }
            Presence::Absent => {
                self.absent += 1;
                self.false_masks += u64::from(prediction.iter().any(|probability| is_foreground(*probability)));
            }
            Presence::Unknown => {}
        }
        Ok(())
    }

    /// Mean of Dice and token accuracy; the token accuracy alone if no target is in its image.
    pub(crate) fn score(&self) -> f64 {
        let accuracy = self.tokens_right / self.tokens.max(1.0);
        if self.present == 0 { accuracy } else { f64::midpoint(self.dice / self.present as f64, accuracy) }
    }

    /// Named means. Dice and IoU are those of questions whose target is in the image, and `false_masks` is the part of
    /// the questions about absent targets that got a mask. Values without questions are left out.
    pub(crate) fn means(&self) -> Vec<(String, f64)> {
        let (present, tokens) = (self.present as f64, self.tokens.max(1.0));
        let values = [
            ("dice", self.dice / present, self.present > 0),
            ("iou", self.iou / present, self.present > 0),
            ("token_accuracy", self.tokens_right / tokens, true),
            ("loss_text", self.text / tokens, true),
            ("loss_mask", self.mask / self.masks, self.masks > 0.0),
            ("false_masks", self.false_masks as f64 / self.absent as f64, self.absent > 0),
        ];
        values.into_iter().filter(|(.., is_known)| *is_known).map(|(name, mean, _)| (name.to_owned(), mean)).collect()
    }
}

/// A tensor's elements in row-major order; none of a meta tensor.
pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.to_device(Device::Cpu).to_kind(Kind::Float).reshape([-1]);
    if flat.device() == META {
        return Vec::new();
    }
    Vec::<f32>::try_from(&flat).expect("a flat fp32 tensor")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_targets_are_no_part_of_dice_but_count_as_false_masks() {
        let mut sums = Sums { tokens: 4.0, tokens_right: 3.0, text: 2.0, masks: 4.0, mask: 2.0, ..Sums::default() };
        let truth = [true, true, false, false];
        sums.add(Presence::Present, &[0.9, 0.9, 0.1, 0.1], &truth).unwrap();
        let names = |sums: &Sums| sums.means().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&sums), ["dice", "iou", "token_accuracy", "loss_text", "loss_mask"]);
        sums.add(Presence::Present, &[0.9, 0.1, 0.1, 0.9], &truth).unwrap();
        sums.add(Presence::Absent, &[0.1, 0.5, 0.1, 0.1], &[false; 4]).unwrap();
        sums.add(Presence::Absent, &[0.1; 4], &[false; 4]).unwrap();
        sums.add(Presence::Unknown, &[0.9; 4], &[false; 4]).unwrap();
        let means: std::collections::BTreeMap<String, f64> = sums.means().into_iter().collect();
        assert_eq!((means["dice"], means["false_masks"], means["loss_mask"]), (0.75, 0.5, 0.5));
        assert_eq!((sums.questions, sums.score()), (5, 0.75));
        let mut only_absent = Sums { tokens: 4.0, tokens_right: 3.0, ..Sums::default() };
        only_absent.add(Presence::Absent, &[0.1; 4], &[false; 4]).unwrap();
        assert_eq!(
            (only_absent.score(), names(&only_absent)),
            (0.75, ["token_accuracy", "loss_text", "false_masks"].map(str::to_owned).to_vec())
        );
    }
}
