//! Scores of validation batches.

use super::step::{self, Inputs, Pass};
use crate::Result;
use crate::models::prsmed::PrsMed;
use crate::tensor::{Device, Kind, META, Tensor, meta};
use crate::trainer::BatchSize;

/// Adds the losses and counts of a validation batch to `sums`; `image` receives the mask probabilities and the truth of
/// each sample.
pub(super) fn score(
    model: &PrsMed,
    inputs: &Inputs,
    sums: &mut Sums,
    mut image: impl FnMut(Vec<f32>, Vec<bool>, &mut Sums) -> Result<()>,
) -> Result<()> {
    let one = BatchSize { samples: 1.0, tokens: 1.0 };
    let prepared = inputs.to_device(inputs.vision.resolve(model), one);
    let outputs = step::forward(model, &prepared, Pass::evaluation());
    let losses = step::losses(model, &prepared, &outputs);
    sums.text += meta::number(&losses.text);
    sums.mask += meta::number(&losses.mask);
    sums.tokens_right += step::tokens_right(model, &prepared, &outputs);
    sums.tokens += inputs.batch_size().tokens;
    let probability = outputs.mask_logits.sigmoid();
    for i in 0..i64::try_from(inputs.layout.questions()).expect("a few samples") {
        let truth = values(&inputs.mask.get(i)).iter().map(|byte| *byte > 127.5).collect();
        image(values(&probability.get(i)), truth, sums)?;
    }
    Ok(())
}

/// Sums over validation samples.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) images: u64,
    pub(super) dice: f64,
    pub(super) iou: f64,
    tokens: f64,
    tokens_right: f64,
    text: f64,
    mask: f64,
}

impl Sums {
    /// Dice, IoU, token accuracy, text loss, mask loss.
    pub(super) fn means(&self) -> [f64; 5] {
        let images = (self.images as f64).max(1.0);
        let tokens = self.tokens.max(1.0);
        [self.dice / images, self.iou / images, self.tokens_right / tokens, self.text / tokens, self.mask / images]
    }
}

/// A tensor's elements in row-major order; none of a meta tensor.
pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.to_device(Device::Cpu).to_kind(Kind::Float).reshape([-1]);
    if flat.device() == META {
        return Vec::new();
    }
    Vec::<f32>::try_from(&flat).expect("a flat fp32 tensor")
}
