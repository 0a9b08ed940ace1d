//! Stable Diffusion (Rombach et al. 2022) and SDXL (Podell et al. 2023) in the layout of the diffusers library:
//! networks, samplers and LoRA files. The pipeline that combines them is `augment::pipeline`.

pub mod block;
pub mod controlnet;
mod fields;
pub mod lora;
pub mod sampler;
pub mod shapes;
pub mod text;
pub mod unet;
pub mod vae;

#[cfg(test)]
mod tests {
    use super::controlnet::{self, ControlNet};
    use super::text::{self, TextTower};
    use super::unet::{self, Conditioning, Unet};
    use super::vae::{self, Vae};
    use crate::tensor::store::{Role, Store, StoreOptions};
    use crate::tensor::{Device, Kind, Tensor, no_grad, rng};

    fn wave(shape: &[i64], kind: Kind) -> Tensor {
        let count: i64 = shape.iter().product();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.31).sin().reshape(shape).to_kind(kind)
    }

    /// All networks at tiny sizes in `kind`: their weights, and their outputs for fixed inputs.
    fn trial(kind: Kind, weights: Option<&[Vec<Tensor>]>) -> (Vec<Vec<Tensor>>, Vec<Tensor>) {
        let stores: Vec<_> =
            (0..4).map(|_| Store::new(StoreOptions { frozen_kind: kind, ..StoreOptions::cpu() })).collect();
        let root = |i: usize| stores[i].root(Role::Frozen);
        let net = Unet::new(&root(0), &unet::Config { in_channels: 9, ..unet::Config::tiny() });
        let control = ControlNet::new(&root(1), &controlnet::Config::tiny());
        let vae = Vae::new(&root(2), &vae::Config::tiny());
        let text = TextTower::new(&root(3), &text::Config::tiny(), true);
        let tensors: Vec<Vec<_>> = stores.iter().map(|s| s.entries().into_iter().map(|e| e.tensor).collect()).collect();
        no_grad(|| {
            for (own, given) in tensors.iter().flatten().zip(weights.unwrap_or_default().iter().flatten()) {
                own.shallow_clone().copy_(given);
            }
            let ids = Tensor::from_slice(&[49_406_i64, 6833, 335, 49_407]).unsqueeze(0).expand([2, 4], false);
            let texts = text.forward(&ids);
            let (sample, image) = (wave(&[2, 9, 8, 8], kind), wave(&[2, 3, 16, 16], kind));
            let times = Tensor::from_slice(&[500.0_f32, 20.0]);
            let conditioning = Conditioning { context: texts.last, added: None };
            let latents = sample.narrow(1, 0, 4);
            let residuals = control.forward(&latents, &times, &conditioning, (&image, 1.0), unet::Pass::default());
            let zero = residuals.down.iter().chain([&residuals.mid]).all(|r| r.abs().max().double_value(&[]) == 0.0);
            assert!(zero, "an untrained ControlNet must not change the output");
            let out = net.forward(&sample, &times, &conditioning, Some(&residuals), unet::Pass::default());
            let pooled = texts.pooled.unwrap();
            (tensors, vec![out, vae.encode(&image).mean, vae.decode(&latents), texts.penultimate, pooled])
        })
    }

    #[test]
    fn random_networks_run_in_fp32_and_bf16() {
        let _lock = rng::TEST_LOCK.lock();
        let (weights, single) = trial(Kind::Float, None);
        let (_, half) = trial(Kind::BFloat16, Some(&weights));
        for (i, (single, half)) in single.iter().zip(&half).enumerate() {
            assert_eq!((single.kind(), half.kind()), (Kind::Float, Kind::BFloat16));
            let size = single.norm().double_value(&[]);
            let error = (half.to_kind(Kind::Float) - single).norm().double_value(&[]) / size;
            assert!(error > 1e-5 && error < 5e-2, "output {i} in bf16 differs by {error}");
        }
    }
}
