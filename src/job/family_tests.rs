use super::rows::Rows;
use super::training::{SegmenterTraining, TrainedSegmenter};
use super::{How, ResumeFrom, run};
use crate::config::Sources;
use crate::data::phantom::{self, PhantomOptions};
use crate::event::Silent;
use crate::front::{Ask, Image, Model};
use crate::models::base;
use crate::nn::LoraConfig;
use crate::runtime::Runtime;
use crate::segment::setup::{self, Build, ModelConfig};
use crate::tensor::weights::{Archive, write_safetensors};
use crate::tensor::{Device, Kind, Tensor, rng};
use image::DynamicImage;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const FAMILY: &str = "toy_decoder";

/// Trains a tiny model of the family to step `steps`.
fn trained(data: &Path, out: &Path, resume: ResumeFrom, steps: u64) -> TrainedSegmenter {
    let runtime = Runtime::new();
    let how = How { resume, ..How::new(out, &runtime).unwrap() };
    let steps = format!("train.max_steps={steps}");
    let sets = [
        &*format!("model.sizes.family={FAMILY}"),
        "model.sizes.llm.variant.qkv_bias=true",
        "model.sizes.llm.variant.qk_norm=true",
        "model.image_size=64",
        "train.micro_batch=2",
        "data.max_val_rows=2",
        &*steps,
    ];
    let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
    let settings = Sources { preset: Some("tiny".into()), sets, ..Sources::default() }.resolve().unwrap();
    run(&how, |how| SegmenterTraining::new(settings, &Rows::of(data), how)).unwrap()
}

/// The base of a run as the family publishes it: its own names of tensors, with the tokenizer.
fn published(checkpoint: &Path, folder: &Path) {
    let archive = Archive::open(&checkpoint.join("base")).unwrap();
    let stored = |name: &String| {
        let name = name.strip_prefix("model.").map(|rest| format!("decoder.{rest}")).unwrap_or(name.clone());
        name.replace("lm_head.", "output.")
    };
    let tensors: Vec<(String, Tensor)> =
        archive.names().iter().map(|name| (stored(name), archive.read(name).unwrap())).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&folder.join("model.safetensors"), &tensors, &BTreeMap::new()).unwrap();
    std::fs::copy(checkpoint.join("base/config.json"), folder.join("config.json")).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(checkpoint.join("tokenizer").join(file), folder.join(file)).unwrap();
    }
}

#[test]
fn a_family_is_trained_planned_continued_and_asked_by_its_row_alone() {
    let _lock = rng::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let [data, out, base] = ["data", "run", "base"].map(|name| folder.path().join(name));
    let phantoms = PhantomOptions { count: 8, image_size_px: 64, ..PhantomOptions::default() };
    phantom::generate(&data, &phantoms, &Silent).unwrap();
    let first = trained(&data, &out, ResumeFrom::New, 1);
    assert!(first.plan.is_some_and(|plan| plan.fits));
    let continued = trained(&data, &out, ResumeFrom::Last, 2).run;
    assert_eq!((first.run.outcome.steps, continued.outcome.steps), (1, 2));

    let checkpoint = out.join("last");
    let description = setup::describe(&checkpoint).unwrap();
    let row = description.sizes.family;
    assert_eq!((row.name, &description.prompt), (FAMILY, &row.prompt));
    let locate = |spec: &str| -> crate::Result<PathBuf> { Ok(PathBuf::from(spec)) };
    let build = Build::new(Device::Cpu, Kind::Float, &locate);
    let opened = setup::open(&checkpoint, &setup::RunOverrides::default(), build).unwrap();
    let ids = crate::data::text::question_prompt(&opened.tokenizer, "Where is it?").unwrap().ids;
    let text = opened.tokenizer.decode(&ids).unwrap();
    assert_eq!((text.as_str(), opened.tokenizer.bos()), ("Look: \nQuestion: Where is it?\nAnswer:\n", None));
    let (image, ask) = (DynamicImage::new_rgb8(40, 30), Ask::new("Where is it?"));
    let [opened, continued] = [Model::from(opened), Model::from(continued)];
    let [ours, theirs] = [&opened, &continued].map(|model| model.predict(&Image::Pixels(&image), &ask).unwrap());
    assert_eq!((ours.target().probabilities.len(), &ours), (40 * 30, &theirs));

    // a new run on the base that this one has trained
    std::fs::create_dir(&base).unwrap();
    published(&checkpoint, &base);
    assert_eq!(base::open(&base).unwrap().0.name, FAMILY);
    let spec = base.display().to_string();
    let config = ModelConfig { base: spec, train_base: false, ..description.model.clone() };
    let (lora, modalities) = (LoraConfig::default(), &description.modalities);
    let created = setup::create(&config, lora, modalities, &[], build).unwrap();
    assert_eq!(created.warnings, [""; 0]);
    assert_eq!(created.description.sizes.llm, description.sizes.llm);
    for entry in created.model.stores().base.entries() {
        let trained = opened.loaded.model.stores().base.get(&entry.name).unwrap();
        assert!(entry.tensor.equal(&trained), "{}", entry.name);
    }
    assert!(created.model.stores().base.get("model.layers.0.self_attn.q_proj.bias").is_some());
}
