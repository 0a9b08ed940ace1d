//! Losses of a ControlNet besides the denoising loss: region contrast and the Siamese losses.
//!
//! **Region contrast** (Zhao et al. 2025, "MAISI-v2", arXiv 2508.05772): the networks also predict with an empty mask, from
//! the same noisy latents. With `d` the mean absolute difference of both predictions, a sample's loss is
//! `max(0, margin - d(lesion)) + d(outside)`: apart inside the lesion, equal outside. The gradient is that of
//! `-min(d(lesion), margin) + d(outside)` in the paper. Cells that the lesion covers in part count by that part inside
//! and not at all outside, in place of the paper's dilated mask. An image without a lesion has the second term only.
//!
//! **Siamese losses** (Qiu et al. 2025, "Siamese-Diffusion", arXiv 2505.06068, with the details of its code): in a
//! second branch the ControlNet sees the image itself. The UNet then gets
//! `detached(ControlNet(mask)) + progress * ControlNet(image)`, where `progress` grows from 0 to 1 in the training. The
//! losses are
//! - the denoising loss of the image branch,
//! - the mean square error of the mask branch to the image branch, which gets no gradient from it,
//! - after a third of the training, for timesteps up to 200: the image branch's estimate of the clean latents gets the
//!   same noise again, and the mask branch denoises it. The estimate gets no gradient.
//!
//! One ControlNet serves both branches, so its file is an ordinary one, which reads masks. Deviations from the code: the
//! ControlNet keeps its usual hint encoder, so that diffusers can load it; an unlocked decoder of the UNet also learns from
//! the image branch; all terms have the weights of pixels and timesteps that the denoising loss has.
//!
//! Legend: b batch, c channels, s side of the latents, S side of the image.

use super::loss_weights::Weights;
use super::objective::{NoisyBatch, Objective};
use crate::models::diffusion::controlnet::ControlNet;
use crate::models::diffusion::unet::{Added, Conditioning, Pass, Residuals, Unet};
use crate::tensor::{Kind, Tensor};

/// Largest timestep at which re-noised latents are denoised.
const RENOISED_MAX_TIMESTEP: usize = 200;
/// Progress from which they are.
const RENOISED_FROM: f64 = 1.0 / 3.0;

/// Whether the Siamese losses of a sample include the re-noised latents. `progress`: part of the training that is done.
pub fn is_renoised(timestep: usize, progress: f64) -> bool {
    progress > RENOISED_FROM && timestep <= RENOISED_MAX_TIMESTEP
}

/// A ControlNet and its UNet.
#[derive(Debug, Clone, Copy)]
pub struct Networks<'a> {
    /// The UNet.
    pub unet: &'a Unet,
    /// The ControlNet.
    pub controlnet: &'a ControlNet,
    /// The compute dtype.
    pub kind: Kind,
    /// Settings of the pass.
    pub pass: Pass,
}

/// What the networks read besides the noisy latents, and what the losses need.
#[derive(Debug)]
pub struct Inputs<'a> {
    /// `[b]` fp32.
    pub timesteps: &'a Tensor,
    /// Captions.
    pub conditioning: &'a Conditioning,
    /// Lesion masks, `[b, 1, S, S]`, 0 or 1.
    pub mask: &'a Tensor,
    /// For the Siamese losses: the images, `[b, 3, S, S]` in 0..1.
    pub image: Option<&'a Tensor>,
    /// For the region contrast: weights of the cells inside and outside the lesion, `[b, 2, s, s]` fp32.
    pub regions: Option<&'a Tensor>,
    /// Part of the training that is done, 0..1.
    pub progress: f64,
    /// Numbers of the samples for which [`is_renoised`] is true.
    pub renoised: &'a [i64],
}

/// Sums over the samples, fp64 scalars.
#[derive(Debug)]
pub struct Losses {
    /// Denoising loss with the mask.
    pub denoising: Tensor,
    /// Region contrast, without its weight.
    pub contrast: Option<Tensor>,
    /// Siamese losses, without their weight.
    pub siamese: Option<Tensor>,
}

impl Losses {
    /// The loss to differentiate.
    pub fn total(&self, weights: &Weights) -> Tensor {
        let extra = [(&self.contrast, weights.contrast), (&self.siamese, weights.siamese)];
        let extra = extra.into_iter().filter_map(|(loss, weight)| Some(loss.as_ref()? * weight));
        extra.fold(self.denoising.shallow_clone(), |total, loss| total + loss)
    }
}

impl Networks<'_> {
    /// The losses of a batch that have a weight.
    ///
    /// # Panics
    /// If `inputs` lacks what a loss needs.
    pub fn losses(&self, objective: &Objective, weights: &Weights, batch: &NoisyBatch, inputs: &Inputs) -> Losses {
        let noisy = Objective::noisy(batch);
        let target = objective.target(batch);
        let mut hints = vec![hint(inputs.mask, self.kind)];
        if weights.contrast > 0.0 {
            hints.push(hints[0].zeros_like());
        }
        let shows_image = weights.siamese > 0.0;
        if shows_image {
            hints.push(inputs.image.expect("images for the Siamese losses").to_kind(self.kind));
        }
        let image_weight = shows_image.then_some(inputs.progress);
        let mut predictions = self.predict(&noisy, (inputs.timesteps, inputs.conditioning), &hints, image_weight);
        let with_image = shows_image.then(|| predictions.pop().expect("one prediction for each hint"));
        let contrast = (weights.contrast > 0.0).then(|| {
            let regions = inputs.regions.expect("regions for the region contrast");
            batch.sum(&region_contrast(&predictions[0], &predictions[1], regions, weights.margin))
        });
        let with_mask = predictions.swap_remove(0);
        let siamese = with_image.map(|with_image| {
            let teacher = with_image.detach();
            let consistency = batch.sum(&batch.square_errors(with_mask.shallow_clone(), &teacher));
            let denoising = batch.sum(&batch.square_errors(with_image, &target));
            let sum = denoising + consistency;
            match self.renoised_loss(objective, batch, (&noisy, &teacher), inputs) {
                Some(loss) => sum + loss,
                None => sum,
            }
        });
        Losses { denoising: batch.sum(&batch.square_errors(with_mask, &target)), contrast, siamese }
    }

    /// Loss of the mask branch on the clean latents of `teacher`, the image branch's prediction for `noisy`, with the
    /// noise of the batch.
    fn renoised_loss(
        &self,
        objective: &Objective,
        batch: &NoisyBatch,
        (noisy, teacher): (&Tensor, &Tensor),
        inputs: &Inputs,
    ) -> Option<Tensor> {
        if inputs.renoised.is_empty() {
            return None;
        }
        let chosen = |tensor: &Tensor| {
            let rows: Vec<Tensor> = inputs.renoised.iter().map(|&row| tensor.narrow(0, row, 1)).collect();
            Tensor::cat(&rows, 0)
        };
        let clean = chosen(&objective.denoised(batch, noisy, teacher));
        let (noise, factors, pixels) = (chosen(batch.noise), chosen(batch.factors), batch.pixels.map(chosen));
        let again = NoisyBatch { clean: &clean, noise: &noise, factors: &factors, pixels: pixels.as_ref() };
        let conditioning = mapped(inputs.conditioning, &chosen);
        let timesteps = chosen(inputs.timesteps);
        let hints = [hint(&chosen(inputs.mask), self.kind)];
        let prediction =
            self.predict(&Objective::noisy(&again), (&timesteps, &conditioning), &hints, None).swap_remove(0);
        Some(again.sum(&again.square_errors(prediction, &objective.target(&again))))
    }

    /// The prediction with each of `hints`, in one pass. With `image_weight`, the last hint is the image: its residuals
    /// have that weight and are added to those of the first hint, without a gradient of the latter.
    ///
    /// # Shapes
    /// `noisy [b, c, s, s]` fp32, each hint `[b, 3, S, S]` in the compute dtype, to `[b, c, s, s]` fp32 each.
    fn predict(
        &self,
        noisy: &Tensor,
        (timesteps, conditioning): (&Tensor, &Conditioning),
        hints: &[Tensor],
        image_weight: Option<f64>,
    ) -> Vec<Tensor> {
        let copies = i64::try_from(hints.len()).expect("a few hints");
        let repeated = |tensor: &Tensor| {
            let mut counts = vec![1; tensor.dim()];
            counts[0] = copies;
            tensor.repeat(counts)
        };
        let noisy = repeated(&noisy.to_kind(self.kind));
        let (timesteps, conditioning) = (repeated(timesteps), mapped(conditioning, &repeated));
        let hints = Tensor::cat(hints, 0);
        let Self { unet, controlnet, pass, .. } = self;
        let mut residuals = controlnet.forward_with(&noisy, &timesteps, &conditioning, (&hints, 1.0), *pass);
        if let Some(weight) = image_weight {
            let joined = |residual: &Tensor| {
                let mut parts = residual.chunk(copies, 0);
                let image = parts.pop().expect("at least one part");
                parts.push(parts[0].detach() + image * weight);
                Tensor::cat(&parts, 0)
            };
            residuals = Residuals { down: residuals.down.iter().map(joined).collect(), mid: joined(&residuals.mid) };
        }
        let output = unet.forward_with(&noisy, &timesteps, &conditioning, Some(&residuals), *pass);
        output.to_kind(Kind::Float).chunk(copies, 0)
    }
}

/// A mask as the ControlNet reads it, `[b, 3, S, S]`.
fn hint(mask: &Tensor, kind: Kind) -> Tensor {
    mask.to_kind(kind).expand([-1, 3, -1, -1], true)
}

fn mapped(conditioning: &Conditioning, change: &dyn Fn(&Tensor) -> Tensor) -> Conditioning {
    let added = conditioning.added.as_ref();
    Conditioning {
        context: change(&conditioning.context),
        added: added.map(|added| Added { pooled: change(&added.pooled), time_ids: change(&added.time_ids) }),
    }
}

/// Region contrast of each sample, `[b]`, from predictions with and without its lesion `[b, c, s, s]`.
fn region_contrast(with: &Tensor, without: &Tensor, regions: &Tensor, margin: f64) -> Tensor {
    let difference = (with - without).abs().mean_dim(1_i64, true, Kind::Float);
    let sum = |tensor: &Tensor| tensor.sum_dim_intlist([1_i64, 2, 3].as_slice(), false, Kind::Float);
    let mean = |region: &Tensor| sum(&(&difference * region)) / sum(region).clamp_min(1e-6);
    let (lesion, outside) = (regions.narrow(1, 0, 1), regions.narrow(1, 1, 1));
    let has_lesion = sum(&lesion).gt(0.0).to_kind(Kind::Float);
    (margin - mean(&lesion)).clamp_min(0.0) * has_lesion + mean(&outside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;

    #[test]
    fn predictions_are_pushed_apart_inside_the_lesion_and_kept_equal_outside() {
        let full = |value: f64| Tensor::full([3, 2, 2, 2], value, (Kind::Float, Device::Cpu));
        // the lesion is cell 0, half of cell 1 is lesion, the others are outside; the third sample has no lesion
        let lesion = Tensor::from_slice(&[1.0_f32, 0.5, 0.0, 0.0]).view([1, 1, 2, 2]);
        let outside = Tensor::from_slice(&[0.0_f32, 0.0, 1.0, 1.0]).view([1, 1, 2, 2]);
        let regions = Tensor::cat(&[lesion, outside], 1);
        let none = Tensor::cat(
            &[Tensor::zeros([1, 1, 2, 2], (Kind::Float, Device::Cpu)), full(1.0).narrow(0, 0, 1).narrow(1, 0, 1)],
            1,
        );
        let regions = Tensor::cat(&[regions.shallow_clone(), regions, none], 0);
        let (with, without) = (full(1.0), full(0.5));
        let _ = with.get(1).fill_(4.0);
        let losses = Vec::<f32>::try_from(region_contrast(&with, &without, &regions, 2.0)).unwrap();
        // differences of 0.5, 3.5 (beyond the margin) and 0.5
        let expected = [1.5 + 0.5, 3.5, 0.5];
        for (loss, expected) in losses.iter().zip(expected) {
            assert!((loss - expected).abs() < 1e-6, "{losses:?}");
        }
        // inside, a gradient step increases the difference; outside, it decreases it
        let with = full(1.0).set_requires_grad(true);
        region_contrast(&with, &without, &regions, 2.0).sum(Kind::Double).backward();
        let grad = Vec::<f32>::try_from(with.grad().get(0).get(0).flatten(0, -1)).unwrap();
        assert!(grad[0] < 0.0 && grad[1] < 0.0 && grad[0] < grad[1] && grad[2] > 0.0 && grad[3] > 0.0, "{grad:?}");
        let grad = Vec::<f32>::try_from(with.grad().get(2).get(0).flatten(0, -1)).unwrap();
        assert!(grad.iter().all(|&grad| grad > 0.0), "{grad:?}");
    }

    #[test]
    fn latents_are_renoised_late_and_at_little_noise() {
        let cases = [(0, 0.5, true), (200, 0.34, true), (201, 0.9, false), (100, 0.3, false), (100, 1.0 / 3.0, false)];
        for (timestep, progress, expected) in cases {
            assert_eq!(is_renoised(timestep, progress), expected, "{timestep} {progress}");
        }
    }
}
