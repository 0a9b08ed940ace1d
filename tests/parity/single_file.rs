//! Checkpoints in Stability's single-file layout, written by diffusers' own converters: every tensor and an image equal
//! those of the folder that was converted. Detection at the published sizes, from headers without data.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::fixture::generator;
use crate::unpacked;
use prsmed::augment::pipeline::{Batch, Generator, Placement, PromptPair, encode_prompts, tokenize};
use prsmed::augment::pipeline_config::{Part, PipelineConfig};
use prsmed::augment::settings::{AugmentConfig, Decode, Mode};
use prsmed::augment::single_file;
use prsmed::event::{Event, Observer, Silent};
use prsmed::models::diffusion::sampler::PredictionType;
use prsmed::models::diffusion::single_file::{Family, Network, SingleFile};
use prsmed::models::diffusion::{text, text::ClipText, unet, unet::Unet, vae, vae::Vae};
use prsmed::tensor::store::{Role, Store, StoreOptions};
use prsmed::tensor::weights::{Archive, write_safetensors};
use prsmed::tensor::{Device, Kind, Tensor, meta};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const FIXTURES: [&str; 3] = ["sd15", "sd21", "sdxl"];
type Tensors = Vec<(String, Tensor)>;

/// The file that the converter wrote.
fn converted(name: &str) -> PathBuf {
    unpacked::single_file(name).join("model.safetensors")
}

fn write(file: &Path, tensors: &Tensors) {
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(file, &named, &BTreeMap::new()).unwrap();
}

/// The values of the fixtures: integers times a power of two, by the sorted name.
fn exact(store: &Store) -> Tensors {
    let mut entries: Vec<(String, Vec<i64>)> =
        store.entries().into_iter().map(|entry| (entry.name, entry.tensor.size())).collect();
    entries.sort();
    let values = |(n, (name, shape)): (usize, &(String, Vec<i64>))| {
        let count: i64 = shape.iter().product();
        let steps = Tensor::arange(count, (Kind::Int64, Device::Cpu)) * 37 + i64::try_from(n).unwrap() * 11;
        let steps = (steps.remainder(255) - 127).to_kind(Kind::Double);
        let values = match (shape.len(), name.ends_with("weight")) {
            (1, true) => steps / 512.0 + 1.0,
            (1, false) => steps / 1024.0,
            _ => {
                let power = (0..31).find(|power| 4_i64.pow(*power) >= count / shape[0]).unwrap();
                steps / (128.0 * 2_f64.powi(i32::try_from(power).unwrap()))
            }
        };
        (name.clone(), values.view(shape.as_slice()).to_kind(Kind::Float))
    };
    entries.iter().enumerate().map(values).collect()
}

fn store() -> Store {
    Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() })
}

fn build(config: &PipelineConfig, part: Part) -> Store {
    let store = store();
    let root = store.root(Role::Frozen);
    match part {
        Part::Vae => drop(Vae::new(&root, &config.vae)),
        Part::Text(number) => drop(ClipText::new(&root, &config.texts[number], number == 1)),
        _ => drop(Unet::new(&root, &config.unet)),
    }
    store
}

fn parts(config: &PipelineConfig) -> Vec<Part> {
    [Part::Unet, Part::Vae].into_iter().chain((0..config.texts.len()).map(Part::Text)).collect()
}

/// The pipeline that was converted, with its weights in fp32.
fn folder(name: &str) -> (tempfile::TempDir, PipelineConfig) {
    let target = tempfile::tempdir().unwrap();
    let root = target.path();
    crate::pipelines::copy(&unpacked::single_file(name), root);
    std::fs::remove_file(root.join("model.safetensors")).unwrap();
    let config = PipelineConfig::open("", root, None, "").unwrap();
    for part in parts(&config) {
        let file = match part {
            Part::Vae => "vae/diffusion_pytorch_model.safetensors",
            Part::Text(0) => "text_encoder/model.safetensors",
            Part::Text(_) => "text_encoder_2/model.safetensors",
            _ => "unet/diffusion_pytorch_model.safetensors",
        };
        write(&root.join(file), &exact(&build(&config, part)));
    }
    (target, config)
}

fn open(file: &Path, base: Option<&Path>) -> prsmed::Result<PipelineConfig> {
    single_file::open(file, SingleFile::open(file)?, base, None, "")
}

#[test]
fn every_tensor_equals_that_of_the_converted_folder() {
    for name in FIXTURES {
        let (root, whole) = folder(name);
        let single = open(&converted(name), Some(root.path())).unwrap();
        single.check_files().unwrap();
        // fields that are written as their defaults
        let plain = |config: &unet::Config| unet::Config {
            sample_size: None,
            upcast_attention: Some(config.upcast_attention == Some(true)),
            other: serde_json::Map::new(),
            ..config.clone()
        };
        assert_eq!(plain(&single.unet), plain(&whole.unet), "{name}");
        assert_eq!(single.vae.scaling_factor, whole.vae.scaling_factor, "{name}");
        assert_eq!(single.texts, whole.texts, "{name}");
        assert_eq!((single.sampler, &single.scheduler), (whole.sampler, &whole.scheduler), "{name}");
        for part in parts(&whole) {
            let (one, other) = (build(&single, part), build(&whole, part));
            single.fill(part, &one).unwrap();
            whole.fill(part, &other).unwrap();
            let (one, other) = (one.entries(), other.entries());
            assert_eq!(one.len(), other.len());
            for (one, other) in one.iter().zip(&other) {
                assert!(one.name == other.name && one.tensor.equal(&other.tensor), "{name} {part:?} {}", one.name);
            }
        }
    }
}

fn image(config: &PipelineConfig) -> Tensor {
    let _generator = generator();
    let texts = ["a polyp".to_owned(), String::new()];
    let ids = tokenize(config, &texts, "prompts", &Silent).unwrap();
    let place = Placement { device: Device::Cpu, kind: Kind::Float, seed: 0 };
    let embeddings = encode_prompts(config, place, &ids, &[false, true], &[]).unwrap();
    let settings = AugmentConfig {
        mode: Mode::MaskToImage,
        image_size: 64,
        steps: 3,
        strength: 1.0,
        decode: Decode::Whole,
        ..AugmentConfig::default()
    };
    let generator = Generator::load(config, &settings, place, &[]).unwrap();
    let noise = (Tensor::arange(4 * 8 * 8, (Kind::Float, Device::Cpu)) * 0.31).sin().view([1, 4, 8, 8]);
    let prompts = vec![PromptPair { positive: 0, negative: 1 }];
    let batch = Batch { pixels: None, repaint: None, preserves: false, control: None, noise, prompts };
    generator.render(&batch, &embeddings, || ()).unwrap()
}

#[test]
fn an_image_equals_that_of_the_converted_folder() {
    for name in FIXTURES {
        let (root, whole) = folder(name);
        let single = open(&converted(name), Some(root.path())).unwrap();
        let (one, other) = (image(&single), image(&whole));
        assert!(one.isfinite().all().int64_value(&[]) == 1 && one.std(true).double_value(&[]) > 0.0, "{name}");
        assert!(one.equal(&other), "{name}");
    }
}

#[derive(Default)]
struct Warnings(Mutex<Vec<String>>);

impl Observer for Warnings {
    fn on(&self, event: &Event) {
        if let Event::Warning(text) = event {
            self.0.lock().unwrap().push(text.clone());
        }
    }
}

#[test]
fn tokenizers_without_a_pipeline_pad_as_the_family_does() {
    let (root, whole) = folder("sdxl");
    let only = tempfile::tempdir().unwrap();
    for name in ["vocab.json", "merges.txt"] {
        std::fs::copy(root.path().join("tokenizer").join(name), only.path().join(name)).unwrap();
    }
    let single = open(&converted("sdxl"), Some(only.path())).unwrap();
    let ids = |config: &PipelineConfig| tokenize(config, &["a polyp".to_owned()], "prompts", &Silent).unwrap();
    assert_eq!(ids(&single), ids(&whole));
    let warnings = Warnings::default();
    let texts = ["a polyp".to_owned(), "polyp ".repeat(80)];
    tokenize(&whole, &texts, "prompts", &warnings).unwrap();
    let warnings = warnings.0.into_inner().unwrap();
    assert!(warnings.len() == 1 && warnings[0].starts_with("1 of 2 prompts are longer than 77"), "{warnings:?}");
    // their tokens are bytes
    let random = PipelineConfig::random("tiny", false).unwrap();
    let unread = Warnings::default();
    tokenize(&random, &texts, "prompts", &unread).unwrap();
    assert_eq!(unread.0.into_inner().unwrap(), [""; 0]);
    assert!(image(&single).equal(&image(&whole)), "the schedule of the family is that of the pipeline");
}

/// Keys and shapes of a published model, as its converter writes them.
fn published(name: &str) -> Vec<(String, Vec<i64>)> {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/single_file").join(format!("{name}.keys")),
    )
    .unwrap();
    let line = |line: &str| {
        let mut words = line.split(' ');
        let key = words.next().unwrap().to_owned();
        (key, words.map(|size| size.parse().unwrap()).collect())
    };
    text.lines().map(line).collect()
}

/// A file of fp16 tensors without data: nothing but its header takes space on the disk.
fn sparse(file: &Path, tensors: &[(String, Vec<i64>)]) {
    let mut end = 0_u64;
    let mut header = serde_json::Map::new();
    for (key, shape) in tensors {
        let bytes = 2 * u64::try_from(shape.iter().product::<i64>()).unwrap();
        let entry = serde_json::json!({ "dtype": "F16", "shape": shape, "data_offsets": [end, end + bytes] });
        assert!(header.insert(key.clone(), entry).is_none(), "{key}");
        end += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut out = std::fs::File::create(file).unwrap();
    out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    out.write_all(&header).unwrap();
    out.set_len(8 + header.len() as u64 + end).unwrap();
}

#[test]
fn published_sizes_are_told_from_the_header() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("x.safetensors");
    let extra = |keys: &[(&str, &[i64])]| -> Vec<(String, Vec<i64>)> {
        keys.iter().map(|(key, shape)| ((*key).to_owned(), shape.to_vec())).collect()
    };
    let buffers: &[(&str, &[i64])] =
        &[("alphas_cumprod", &[1000]), ("model_ema.decay", &[]), ("sqrt_recipm1_alphas_cumprod", &[1000])];
    for (name, family, unet, vae, texts, more) in [
        ("sd15", Family::Sd1, unet::Config::sd15(), vae::Config::sd(), vec![text::Config::clip_l()], extra(buffers)),
        (
            "sd21",
            Family::Sd2,
            unet::Config::sd21(),
            vae::Config::sd(),
            vec![text::Config::open_clip_h()],
            // Stability's files have the last layer and the projection, which are not used
            extra(&[
                ("cond_stage_model.model.logit_scale", &[]),
                ("cond_stage_model.model.text_projection", &[1024, 1024]),
                ("cond_stage_model.model.transformer.resblocks.23.ln_1.weight", &[1024]),
            ]),
        ),
        (
            "sdxl",
            Family::Sdxl,
            unet::Config::sdxl(),
            vae::Config::sdxl(),
            vec![text::Config::clip_l(), text::Config::clip_big_g()],
            extra(&[("conditioner.embedders.1.model.logit_scale", &[]), ("denoiser.sigmas", &[1000])]),
        ),
    ] {
        let mut tensors = published(name);
        tensors.extend(more);
        // Stability's own name; the converter keeps that of transformers
        for (key, _) in &mut tensors {
            *key = key.replace("embedders.1.model.text_projection.weight", "embedders.1.model.text_projection");
        }
        sparse(&file, &tensors);
        let read = SingleFile::open(&file).unwrap();
        assert_eq!((read.family, &read.unet, &read.vae), (family, &unet, &Some(vae)), "{name}");
        assert_eq!(read.texts, texts.iter().cloned().map(Some).collect::<Vec<_>>(), "{name}");
        let velocity = family == Family::Sd2;
        assert_eq!(read.scheduler().prediction_type == PredictionType::Velocity, velocity, "{name}");
        assert_eq!(read.prediction_is_assumed(), velocity, "{name}");
        assert_eq!(single_file::open(&file, read, None, None, "").unwrap().family(), family.name());

        // the inpainting model of the family
        for (key, shape) in &mut tensors {
            if key == "model.diffusion_model.input_blocks.0.0.weight" {
                shape[1] = 9;
            }
        }
        sparse(&file, &tensors);
        assert!(open(&file, None).unwrap().inpaints(), "{name}");
    }
}

#[test]
fn what_the_unet_predicts_is_told_by_the_file() {
    meta::install().unwrap();
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("x.safetensors");
    let tensors = tensors("sd21");
    let with = |more: Option<(&str, Tensor)>, metadata: &[(&str, &str)]| {
        let mut named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        named.extend(more.iter().map(|(name, tensor)| (*name, tensor)));
        let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        write_safetensors(&file, &named, &metadata).unwrap();
        let read = SingleFile::open(&file).unwrap();
        (read.scheduler().prediction_type, read.prediction_is_assumed())
    };
    assert_eq!(with(None, &[]), (PredictionType::Velocity, true));
    assert_eq!(with(Some(("global_step", Tensor::from(875_000_i64))), &[]), (PredictionType::Epsilon, false));
    assert_eq!(with(Some(("global_step", Tensor::from(110_000_i64))), &[]), (PredictionType::Velocity, true));
    assert_eq!(with(None, &[("modelspec.prediction_type", "epsilon")]), (PredictionType::Epsilon, false));
    assert_eq!(with(None, &[("modelspec.prediction_type", "v")]), (PredictionType::Velocity, false));
    assert!(!with(Some(("v_pred", Tensor::zeros([0], (Kind::Float, Device::Cpu)))), &[]).1);
}

/// The tensors of a fixture's file.
fn tensors(name: &str) -> Tensors {
    let archive = Archive::open(&converted(name)).unwrap();
    archive.names().iter().map(|key| (key.clone(), archive.read(key).unwrap())).collect()
}

#[test]
fn wrong_files_are_refused_with_the_key_and_the_remedy() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("x.safetensors");
    let error = || {
        let error = SingleFile::open(&file).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("x.safetensors: ") && !error.hint().is_empty(), "{said}");
        format!("{said} | {}", error.hint())
    };
    let refuses = |tensors: &Tensors, parts: &[&str]| {
        write(&file, tensors);
        let said = error();
        assert!(parts.iter().all(|part| said.contains(part)), "{parts:?} are not in: {said}");
    };
    let one = |key: &str| vec![(key.to_owned(), Tensor::zeros([2, 2], (Kind::Float, Device::Cpu)))];
    refuses(&one("lora_unet_conv_in.lora_down.weight"), &["is a LoRA file (it has `lora_unet_conv_in", "`--lora`"]);
    refuses(&one("model.diffusion_model.joint_blocks.0.x"), &["is a Stable Diffusion 3 model", "SDXL base"]);
    refuses(&one("conditioner.embedders.0.model.ln_final.weight"), &["is an SDXL refiner"]);
    refuses(&one("control_model.time_embed.0.weight"), &["is a ControlNet"]);
    refuses(&one("down_blocks.0.resnets.0.conv1.weight"), &["one network in diffusers' layout", "`model_index.json`"]);
    refuses(
        &one("first_stage_model.encoder.conv_in.weight"),
        &["has no UNet", "`first_stage_model.encoder.conv_in.weight`"],
    );
    refuses(&one("bert.embeddings"), &["none of the keys of a checkpoint", "`bert.embeddings`"]);

    let change = |change: &dyn Fn(&mut Tensors), parts: &[&str]| {
        let mut tensors = tensors("sd15");
        change(&mut tensors);
        refuses(&tensors, parts);
    };
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Half, Device::Cpu));
    let odd = "model.diffusion_model.input_blocks.1.0.odd.weight";
    change(&|tensors| tensors.push((odd.into(), zeros(&[1]))), &[&format!("`{odd}` belongs to no layer")]);
    change(
        &|tensors| tensors.push(("embedding_manager.x".into(), zeros(&[1]))),
        &["`embedding_manager.x` belongs to no"],
    );
    let key = "model.diffusion_model.output_blocks.2.0.in_layers.2.weight";
    let other = |tensors: &mut Tensors| {
        let found = tensors.iter_mut().find(|(name, _)| name == key).unwrap();
        found.1 = zeros(&[64, 7, 3, 3]);
    };
    change(&other, &[&format!("`{key}` gives"), "[64, 7, 3, 3], expected [64, 96, 3, 3]"]);
    let lost = "first_stage_model.decoder.up.1.block.1.conv2.bias";
    change(
        &|tensors| tensors.retain(|(name, _)| name != lost),
        &["lacks 1 tensors of its autoencoder, first `decoder.up_blocks.2.resnets.1.conv2.bias`"],
    );
    change(
        &|tensors| tensors.retain(|(name, _)| !name.ends_with("input_blocks.0.0.weight")),
        &["lacks the tensor `model.diffusion_model.input_blocks.0.0.weight`"],
    );

    let whole = std::fs::read(converted("sd15")).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 10]).unwrap();
    assert!(error().contains("is truncated"));
}

#[test]
fn a_file_without_autoencoder_or_text_encoder_is_completed_or_refused() {
    let (root, whole) = folder("sdxl");
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("x.safetensors");
    let mut own = tensors("sdxl");
    own.retain(|(key, _)| !key.starts_with("first_stage_model.") && !key.starts_with("conditioner.embedders.1."));
    write(&file, &own);
    let contents = SingleFile::open(&file).unwrap();
    assert_eq!(contents.lacking(), [Network::Vae, Network::Text(1)]);
    assert_eq!(single_file::folders(&contents), ["", "scheduler", "tokenizer", "tokenizer_2", "vae", "text_encoder_2"]);
    let error = single_file::refuse_lacking(&file, &contents, "augment.base_pipeline").unwrap_err();
    assert!(error.to_string().contains("has no autoencoder (`first_stage_model.…`)"), "{error}");
    assert!(error.hint().contains("set `augment.base_pipeline`") && error.hint().contains("stable-diffusion-xl-base"));

    let single = open(&file, Some(root.path())).unwrap();
    single.check_files().unwrap();
    for part in parts(&whole) {
        let (one, other) = (build(&single, part), build(&whole, part));
        single.fill(part, &one).unwrap();
        whole.fill(part, &other).unwrap();
        assert!(one.entries().iter().zip(&other.entries()).all(|(one, other)| one.tensor.equal(&other.tensor)));
    }
    // a base of another family, and one without the network
    let (other, _) = folder("sd15");
    let error = open(&file, Some(other.path())).unwrap_err();
    assert!(error.to_string().contains("has no `text_encoder_2`"), "{error}");
    std::fs::remove_dir_all(root.path().join("vae")).unwrap();
    let error = open(&file, Some(root.path())).unwrap_err();
    assert!(error.to_string().contains("has no `vae`, and the model's file has no autoencoder"), "{error}");
    assert!(error.hint().contains("base_pipeline"), "{}", error.hint());
}
