//! Parity of a fine-tuning step with diffusers and peft: loss with min-SNR weights, and gradients, of a LoRA, of the
//! UNet's own weights, of an inpainting UNet and of a ControlNet. Ours in fp32, theirs in fp64: losses within 1e-5,
//! gradients within 1e-4 or twice the difference of PyTorch's own fp32.

use crate::diffusion::{Style, fill, wave};
use crate::fixture::{Fixture, archive, generator, relative_error};
use prsmed::augment::finetune::FinetuneConfig;
use prsmed::augment::finetune::objective::{NoisyBatch, Objective};
use prsmed::models::diffusion::controlnet::{self, ControlNet};
use prsmed::models::diffusion::sampler::{PredictionType, SchedulerConfig};
use prsmed::models::diffusion::unet::{self, Adapters, Conditioning, Pass, Unet};
use prsmed::nn::LoraConfig;
use prsmed::tensor::autograd::clear_grad;
use prsmed::tensor::store::{Role, Store, StoreEntry, StoreOptions};
use prsmed::tensor::{Kind, Tensor};
use serde_json::Value;
use std::path::Path;

/// What a step trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trained {
    Full,
    Lora,
    Inpaint,
    Control,
}

struct Step {
    net: Unet,
    base: Store,
    control: Option<ControlNet>,
    /// Weights beside the UNet.
    beside: Option<Store>,
    trained: Trained,
}

fn step(meta: &Value, trained: Trained) -> Step {
    let known = &Fixture::open("diffusion").meta["config"];
    let mut sizes: unet::Config = serde_json::from_value(known["sd15"].clone()).expect("a UNet's config");
    if trained == Trained::Inpaint {
        sizes.in_channels = 9;
    }
    let options = StoreOptions { initialise: false, ..StoreOptions::cpu() };
    let (base, store) = (Store::new(options), Store::new(options));
    let number = |key: &str| meta["lora"][key].as_f64().expect("a number");
    let targets =
        meta["targets"].as_array().expect("a list").iter().map(|name| name.as_str().expect("a name").to_owned());
    #[expect(clippy::cast_possible_truncation, reason = "a small rank")]
    let config = LoraConfig { rank: number("r") as i64, alpha: number("lora_alpha"), dropout: 0.0 };
    let adapters = Adapters { root: store.root(Role::Trainable).sub("unet"), config, targets: targets.collect() };
    let role = if matches!(trained, Trained::Full | Trained::Inpaint) { Role::Trainable } else { Role::Frozen };
    let net = Unet::with_adapters(&base.root(role), &sizes, (trained == Trained::Lora).then_some(&adapters));
    let control = (trained == Trained::Control).then(|| {
        let sizes: controlnet::Config =
            serde_json::from_value(known["controlnet"].clone()).expect("a ControlNet's config");
        ControlNet::new(&store.root(Role::Trainable), &sizes)
    });
    fill(&base, Style::Rough);
    fill(&store, Style::Rough);
    Step { net, base, control, beside: (role == Role::Frozen).then_some(store), trained }
}

impl Step {
    /// The mean loss of two samples.
    fn loss(&self, meta: &Value, prediction: PredictionType, checkpoint: usize) -> Tensor {
        let scheduler = SchedulerConfig { prediction_type: prediction, ..SchedulerConfig::stable_diffusion() };
        let config =
            FinetuneConfig { min_snr_gamma: meta["gamma"].as_f64().expect("a number"), ..FinetuneConfig::default() };
        let objective = Objective::new(&scheduler, &config);
        let timesteps = meta["timesteps"].as_array().expect("a list");
        let timesteps: Vec<u64> = timesteps.iter().map(|t| t.as_u64().expect("a timestep")).collect();
        let factors = timesteps.iter().flat_map(|&t| objective.factors(usize::try_from(t).expect("a timestep")));
        let factors = Tensor::from_slice(&factors.collect::<Vec<f32>>()).view([2, 3]);
        let times: Vec<f32> = timesteps.iter().map(|&t| f32::from(u16::try_from(t).expect("a timestep"))).collect();
        let single = |shape: &[i64], frequency: f64| wave(shape, frequency).to_kind(Kind::Float);
        let (clean, noise) = (single(&[2, 4, 16, 16], 0.31), single(&[2, 4, 16, 16], 0.53));
        let conditioning = Conditioning { context: single(&[2, 77, 32], 0.17), added: None };
        let pixels = Tensor::ones([2, 1, 16, 16], (Kind::Float, clean.device()));
        let batch = NoisyBatch { clean: &clean, noise: &noise, factors: &factors, pixels: &pixels };
        let (times, pass) = (Tensor::from_slice(&times), Pass { checkpoint });
        let sum = objective.loss(&batch, |noisy| {
            let residuals = self.control.as_ref().map(|control| {
                let image = single(&[2, 3, 32, 32], 0.23);
                control.forward(noisy, &times, &conditioning, (&image, 1.0), pass)
            });
            let region = (self.trained == Trained::Inpaint).then(|| single(&[2, 5, 16, 16], 0.43));
            let noisy = region.map_or_else(|| noisy.shallow_clone(), |region| Tensor::cat(&[noisy, &region], 1));
            self.net.forward(&noisy, &times, &conditioning, residuals.as_ref(), pass)
        });
        sum / 2.0
    }
}

#[test]
fn losses_and_gradients_of_a_step_agree() {
    let _generator = generator();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity/finetune");
    let meta: Value = serde_json::from_slice(&std::fs::read(folder.join("meta.json")).unwrap()).unwrap();
    let expected = archive(&folder.join("expected.safetensors"));
    let share = meta["share"].as_i64().unwrap();
    let mut compared = 0;
    for (name, prediction) in [("epsilon", PredictionType::Epsilon), ("v_prediction", PredictionType::Velocity)] {
        let methods = [
            ("full", Trained::Full),
            ("lora", Trained::Lora),
            ("inpaint", Trained::Inpaint),
            ("control", Trained::Control),
        ];
        for (method, what) in methods {
            let step = step(&meta, what);
            // blocks with and without activation checkpointing
            for checkpoint in [0, 3, usize::MAX] {
                let trained = step.beside.as_ref().unwrap_or(&step.base);
                trained.for_each(|entry| clear_grad(&entry.tensor));
                let loss = step.loss(&meta, prediction, checkpoint);
                let want = expected.read(&format!("{name}.{method}.loss")).unwrap();
                let error = relative_error(&loss.detach().to_kind(Kind::Float), &want);
                assert!(error < 1e-5, "{name} {method}: the loss differs by {error:.1e}");
                loss.backward();
                let prefix = format!("{name}.{method}.grad.");
                for key in expected.names().iter().filter(|key| key.starts_with(&prefix)) {
                    let of = &key[prefix.len()..];
                    let grad = trained.get(of).unwrap_or_else(|| panic!("no weight {of}")).grad();
                    assert!(grad.defined(), "{key}: there is no gradient");
                    let error =
                        relative_error(&grad.reshape([-1]).slice(0, None, None, share), &expected.read(key).unwrap());
                    // a few sums nearly cancel: PyTorch in fp32 differs from fp64 there too
                    let allowed = meta["fp32_errors"][key].as_f64().map_or(1e-4, |fp32| (2.0 * fp32).max(1e-4));
                    assert!(error < allowed, "{key}, {checkpoint} blocks recomputed: differs by {error:.1e}");
                    compared += 1;
                }
                if what == Trained::Control {
                    let is_frozen = |entry: StoreEntry| !entry.tensor.grad().defined();
                    assert!(step.base.entries().into_iter().all(is_frozen), "a weight of the UNet has a gradient");
                }
                if what == Trained::Lora {
                    let frozen = step.base.entries().into_iter().all(|entry| !entry.tensor.grad().defined());
                    assert!(frozen, "a frozen weight has a gradient");
                    let adapters = trained.entries().len();
                    let known = expected.names().iter().filter(|key| key.starts_with(&prefix)).count();
                    assert_eq!(adapters, known, "all adapters are compared");
                }
            }
        }
    }
    assert!(compared > 300, "{compared}");
}
