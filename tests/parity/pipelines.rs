//! Parity of whole generators with diffusers' pipelines: prompt to pixels with fixed latents, from folders that
//! diffusers wrote.
//!
//! Weights come from formulas. The test writes them as safetensors into the folder and loads them like the product.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::fixture::generator;
use prsmed::augment::finetune::network::Network;
use prsmed::augment::finetune::{FinetuneConfig, FinetuneMode, Method};
use prsmed::augment::pipeline::{GenerationBatch, Generator, Placement, PromptPair, encode_prompts, tokenize};
use prsmed::augment::pipeline_config::{PipelineConfig, PipelinePart};
use prsmed::augment::settings::{AugmentConfig, Decode, Mode, SamplerChoice};
use prsmed::config::{AugmentRun, Sources};
use prsmed::event::Silent;
use prsmed::models::diffusion::{controlnet::ControlNet, text::TextTower, unet::Unet, vae::Vae};
use prsmed::tensor::store::{Role, Store, StoreOptions};
use prsmed::tensor::weights::{Archive, write_safetensors};
use prsmed::tensor::{Device, Kind, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tolerance for images in 0..=1; the networks run in fp32 on both sides.
const TOLERANCE: f64 = 1e-4;
const SIDE: i64 = 64;

/// The formula of the diffusion fixtures: 1-d weights near one, other 1-d values small, the rest sines scaled by
/// fan-in.
pub(crate) fn closed_form(store: &Store) -> Vec<(String, Tensor)> {
    let mut entries: Vec<(String, Vec<i64>)> =
        store.entries().into_iter().map(|entry| (entry.name, entry.tensor.size())).collect();
    entries.sort();
    let values = |n: usize, name: &str, shape: &[i64]| {
        let count: i64 = shape.iter().product();
        let (n, fan) = (n as f64, (count / shape[0]) as f64);
        let i = Tensor::arange(count, (Kind::Double, Device::Cpu));
        let values = match (shape.len(), name.ends_with("weight")) {
            (1, true) => (i * 0.7 + 0.3 * n).sin() * 0.1 + 1.0,
            (1, false) => (i * 0.5 + 0.2 * n).sin() * 0.05,
            _ => (i * 0.9 + 0.1 * n).sin() * (1.5 / fan.sqrt()),
        };
        values.view(shape).to_kind(Kind::Float)
    };
    entries.iter().enumerate().map(|(n, (name, shape))| (name.clone(), values(n, name, shape))).collect()
}

fn write_part(folder: &Path, file: &str, build: impl FnOnce(&Store)) {
    let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
    build(&store);
    write(&folder.join(file), &closed_form(&store));
}

fn write(file: &Path, tensors: &[(String, Tensor)]) {
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(file, &named, &BTreeMap::new()).unwrap();
}

/// A copy of the fixture's folder, with weights.
fn folder(name: &str) -> (tempfile::TempDir, Value, Archive) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pipelines").join(name);
    let settings: Value = serde_json::from_slice(&std::fs::read(source.join("settings.json")).unwrap()).unwrap();
    let target = tempfile::tempdir().unwrap();
    copy(&source, target.path());
    if let Some(like) = settings["like"].as_str() {
        copy(&source.with_file_name(like).join("tokenizer"), &target.path().join("tokenizer"));
    }
    let root = target.path();
    let pipeline_config = PipelineConfig::open("", root, control_folder(root).as_deref(), "").unwrap();
    let network = "diffusion_pytorch_model.safetensors";
    write_part(&root.join("unet"), network, |store| drop(Unet::new(&store.root(Role::Frozen), &pipeline_config.unet)));
    write_part(&root.join("vae"), network, |store| drop(Vae::new(&store.root(Role::Frozen), &pipeline_config.vae)));
    for (i, config) in pipeline_config.texts.iter().enumerate() {
        let name = ["text_encoder", "text_encoder_2"][i];
        write_part(&root.join(name), "model.safetensors", |store| {
            drop(TextTower::new(&store.root(Role::Frozen), config, i == 1));
        });
    }
    if let Some(config) = &pipeline_config.controlnet {
        write_part(&root.join("controlnet"), network, |store| {
            drop(ControlNet::new(&store.root(Role::Frozen), config));
        });
    }
    let expected = Archive::open(&source.join("expected.safetensors")).unwrap();
    (target, settings, expected)
}

fn control_folder(root: &Path) -> Option<PathBuf> {
    Some(root.join("controlnet")).filter(|folder| folder.exists())
}

pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            let _bytes = std::fs::copy(&path, &target).unwrap();
        }
    }
}

fn sine(shape: [i64; 4], w: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, (Kind::Double, Device::Cpu)) * w).sin().view(shape).to_kind(Kind::Float)
}

fn config(settings: &Value, mode: Mode) -> AugmentConfig {
    let run: AugmentRun =
        Sources { default_preset: "augment".into(), ..Sources::default() }.resolve_as().unwrap().config;
    let sampler: SamplerChoice = serde_json::from_value(settings["sampler"].clone()).unwrap();
    AugmentConfig {
        mode,
        image_size: SIDE,
        steps: usize::try_from(settings["steps"].as_u64().unwrap()).unwrap(),
        guidance: settings["guidance"].as_f64().unwrap(),
        strength: settings["strength"].as_f64().unwrap_or(1.0),
        control_scale: settings["control_scale"].as_f64().unwrap_or(1.0),
        sampler,
        decode: Decode::Whole,
        precision: prsmed::trainer::precision::Precision::Fp32,
        ..run.augment
    }
}

fn compare(name: &str, mode: Mode, batch: impl FnOnce(&Archive, Tensor) -> GenerationBatch, without_negative: bool) {
    let _generator = generator();
    let (folder, settings, expected) = folder(name);
    let pipeline_config =
        PipelineConfig::open("", folder.path(), control_folder(folder.path()).as_deref(), "").unwrap();
    let prompts: Value = serde_json::from_slice(
        &std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pipelines/prompts.json")).unwrap(),
    )
    .unwrap();
    let text = |key: &str| prompts[key].as_str().unwrap().to_owned();
    let negative = if without_negative { String::new() } else { text("negative") };
    let texts = [text("prompt"), negative.clone()];
    let ids = tokenize(&pipeline_config, &texts, "prompts", &Silent).unwrap();
    let place = Placement { device: Device::Cpu, kind: Kind::Float, seed: 0 };
    let embeddings = encode_prompts(&pipeline_config, place, &ids, &[false, negative.is_empty()], &[]).unwrap();
    let generator = Generator::load(&pipeline_config, &config(&settings, mode), place, &[]).unwrap();
    let batch = batch(&expected, sine([1, 4, SIDE / 2, SIDE / 2], 0.31));
    let pixels = generator.render(&batch, &embeddings).unwrap();
    let pixels = (pixels * 0.5 + 0.5).clamp(0.0, 1.0);
    let key = if without_negative { "without_negative" } else { "image" };
    let wanted = expected.read(key).unwrap();
    let error = (pixels - wanted).abs().max().double_value(&[]);
    assert!(error < TOLERANCE, "{name}: {error}");
}

fn plain(noise: Tensor) -> GenerationBatch {
    let prompts = vec![PromptPair { positive: 0, negative: 1 }];
    GenerationBatch { pixels: None, repaint: None, preserves: false, control: None, noise, prompts }
}

fn image(expected: &Archive) -> Tensor {
    expected.read("picture").unwrap() * 2.0 - 1.0
}

/// The mask at the size of the latents, resized like diffusers.
fn cells(expected: &Archive) -> Tensor {
    let side = [SIDE / 2, SIDE / 2];
    expected.read("mask").unwrap().upsample_nearest2d(side, None, None)
}

#[test]
fn sd15_text_to_image_agrees() {
    compare("sd15", Mode::MaskToImage, |_, noise| plain(noise), false);
}

#[test]
fn sd21_with_v_prediction_agrees() {
    compare("sd21", Mode::MaskToImage, |_, noise| plain(noise), false);
}

#[test]
fn sdxl_agrees() {
    compare("sdxl", Mode::MaskToImage, |_, noise| plain(noise), false);
}

#[test]
fn sdxl_without_a_negative_prompt_agrees() {
    compare("sdxl", Mode::MaskToImage, |_, noise| plain(noise), true);
}

#[test]
fn image_to_image_agrees() {
    let batch = |expected: &Archive, noise| GenerationBatch { pixels: Some(image(expected)), ..plain(noise) };
    compare("img2img", Mode::Img2img, batch, false);
}

#[test]
fn inpainting_with_preserved_latents_agrees() {
    let batch = |expected: &Archive, noise| GenerationBatch {
        pixels: Some(image(expected)),
        repaint: Some(cells(expected)),
        preserves: true,
        ..plain(noise)
    };
    compare("hold", Mode::KeepLesion, batch, false);
}

#[test]
fn controlnet_agrees() {
    let batch = |expected: &Archive, noise| GenerationBatch {
        control: Some(expected.read("control").unwrap()),
        ..plain(noise)
    };
    compare("controlnet", Mode::MaskToImage, batch, false);
}

#[test]
fn a_nine_channel_inpainting_network_agrees() {
    let batch = |expected: &Archive, noise| GenerationBatch {
        pixels: Some(image(expected)),
        repaint: Some(cells(expected)),
        ..plain(noise)
    };
    compare("inpaint", Mode::KeepLesion, batch, false);
}

#[test]
fn missing_and_unexpected_tensors_are_named() {
    let (folder, _, _) = folder("sd15");
    let pipeline_config = PipelineConfig::open("", folder.path(), None, "").unwrap();
    let file = folder.path().join("vae/diffusion_pytorch_model.safetensors");
    let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
    let _vae = Vae::new(&store.root(Role::Frozen), &pipeline_config.vae);
    let mut tensors = closed_form(&store);
    let (lost, _) = tensors.remove(3);
    write(&file, &tensors);
    let error = pipeline_config.fill(PipelinePart::Vae, &store).unwrap_err().to_string();
    assert!(error.contains(&format!("1 tensors are missing, first `{lost}`")), "{error}");
    tensors.push(("decoder.odd".into(), Tensor::zeros([2], (Kind::Float, Device::Cpu))));
    write(&file, &tensors);
    let error = pipeline_config.fill(PipelinePart::Vae, &store).unwrap_err().to_string();
    assert!(error.contains("`decoder.odd` belongs to no layer"), "{error}");
}

/// Old files have other names for attention layers, which are 1x1 convolutions.
#[test]
fn an_old_autoencoder_is_read() {
    let (folder, _, _) = folder("sd15");
    let pipeline_config = PipelineConfig::open("", folder.path(), None, "").unwrap();
    let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
    let _vae = Vae::new(&store.root(Role::Frozen), &pipeline_config.vae);
    let tensors = closed_form(&store);
    let old = |(name, tensor): &(String, Tensor)| {
        let stored = name.replace(".to_q.", ".query.").replace(".to_k.", ".key.");
        let stored = stored.replace(".to_v.", ".value.").replace(".to_out.0.", ".proj_attn.");
        let is_matrix = tensor.dim() == 2;
        (stored, if is_matrix { tensor.unsqueeze(-1).unsqueeze(-1) } else { tensor.shallow_clone() })
    };
    let stored: Vec<(String, Tensor)> = tensors.iter().map(old).collect();
    assert!(stored.iter().any(|(name, tensor)| name.ends_with(".query.weight") && tensor.dim() == 4));
    write(&folder.path().join("vae/diffusion_pytorch_model.safetensors"), &stored);
    pipeline_config.fill(PipelinePart::Vae, &store).unwrap();
    for (name, tensor) in tensors {
        assert_eq!(store.get(&name).unwrap(), tensor, "{name}");
    }
}

/// A text-to-image UNet that is converted to 9 channels first ignores the region, and a new ControlNet has the weights of
/// the UNet's down path.
#[test]
fn new_networks_of_a_fine_tuning_begin_as_the_generator() {
    let _generator = generator();
    let (root, ..) = folder("sd15");
    let pipeline_config = PipelineConfig::open("", root.path(), None, "").unwrap();
    let placement = Placement { device: Device::Cpu, kind: Kind::Float, seed: 3 };
    let network = |mode, method| {
        let config = FinetuneConfig { mode, method, ..FinetuneConfig::default() };
        Network::new(&pipeline_config, &config, placement, None).unwrap()
    };
    let named = |network: &Network| -> BTreeMap<String, Tensor> {
        network.parameters().into_iter().map(|parameter| (parameter.name, parameter.tensor)).collect()
    };
    let plain = named(&network(FinetuneMode::Images, Method::Full));
    let wide = named(&network(FinetuneMode::Inpaint, Method::Full));
    assert!(plain.keys().eq(wide.keys()));
    for (name, tensor) in &wide {
        if name == "conv_in.weight" {
            assert_eq!(tensor.size()[1], 9);
            assert!(tensor.narrow(1, 0, 4).equal(&plain[name]), "the first channels are the generator's");
            assert_eq!(tensor.narrow(1, 4, 5).abs().max().double_value(&[]), 0.0);
        } else {
            assert!(tensor.equal(&plain[name]), "{name}");
        }
    }
    let control = named(&network(FinetuneMode::MaskToImage, Method::Lora));
    let own = control.iter().filter_map(|(name, tensor)| {
        plain.get(name.strip_prefix("controlnet.").expect("only the ControlNet is trained")).map(|unet| (unet, tensor))
    });
    let copied: Vec<bool> = own.map(|(unet, tensor)| unet.equal(tensor)).collect();
    assert!(copied.len() > 50 && copied.iter().all(|is_equal| *is_equal), "{} tensors", copied.len());
    let is_zero = |name: &str| control[name].abs().max().double_value(&[]) == 0.0;
    assert!(
        is_zero("controlnet.controlnet_mid_block.weight")
            && is_zero("controlnet.controlnet_cond_embedding.conv_out.weight")
    );
}
