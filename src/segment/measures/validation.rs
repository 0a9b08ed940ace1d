//! Scores of validation batches.

use crate::Result;
use crate::data::manifest::Presence;
use crate::metrics::segmentation::{ImageScore, is_foreground};
use crate::models::prsmed::PrsMed;
use crate::segment::step::{self, Inputs, Pass};
use crate::tensor::{Device, Kind, META, Tensor, meta};
use crate::trainer::BatchSize;
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
    sums.text += meta::number(&losses.text);
    sums.mask += meta::number(&losses.mask);
    sums.tokens_right += step::tokens_right(model, &prepared, &outputs);
    let size = inputs.batch_size();
    sums.tokens += size.tokens;
    sums.masks += size.masks;
    let probability = outputs.mask_logits.sigmoid();
    for i in 0..i64::try_from(inputs.layout.targets()).expect("a few samples") {
        let truth = values(&inputs.mask.get(i)).iter().map(|byte| *byte > 127.5).collect();
        image(values(&probability.get(i)), truth, sums)?;
    }
    Ok(())
}

/// Sums over validation samples.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(from = "[u64; 11]", into = "[u64; 11]")]
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
}

/// Numbers as bits, because JSON has no NaN.
impl From<Sums> for [u64; 11] {
    fn from(sums: Sums) -> Self {
        let Sums { questions, present, absent, false_masks, .. } = sums;
        let [dice, iou, tokens, tokens_right, text, masks, mask] =
            [sums.dice, sums.iou, sums.tokens, sums.tokens_right, sums.text, sums.masks, sums.mask].map(f64::to_bits);
        [questions, present, absent, false_masks, dice, iou, tokens, tokens_right, text, masks, mask]
    }
}

impl From<[u64; 11]> for Sums {
    fn from([questions, present, absent, false_masks, bits @ ..]: [u64; 11]) -> Self {
        let [dice, iou, tokens, tokens_right, text, masks, mask] = bits.map(f64::from_bits);
        Self { questions, present, dice, iou, absent, false_masks, tokens, tokens_right, text, masks, mask }
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
