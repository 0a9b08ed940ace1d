//! `prsmed merge`: LoRA adapters merged into the language model.

use prsmed::event::{Event, Observer, Silent};
use prsmed::front::{Ask, Image, Model, Prediction};
use prsmed::segment::merge::{Settings, Source, merge};
use prsmed::segment::setup::{self, Build, RunOverrides};
use prsmed::tensor::weights::{Archive, write_safetensors};
use prsmed::tensor::{Device, Kind, Tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Once;

use crate::support::{copy, done, objects, path, phantoms, prsmed, refused, trained};

#[expect(clippy::unnecessary_wraps, reason = "as a build asks for it")]
fn locate(spec: &str) -> prsmed::Result<PathBuf> {
    Ok(PathBuf::from(spec))
}

fn build(kind: Kind) -> Build<'static> {
    Build::new(Device::Cpu, kind, &locate)
}

fn image() -> PathBuf {
    std::fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path()
}

fn prediction(folder: &Path) -> Prediction {
    let model = Model::from(setup::open(folder, &RunOverrides::default(), build(Kind::Float)).unwrap());
    model.predict(&Image::File(image()), &Ask { max_new_tokens: 6, ..Ask::new("Where is the lesion?") }).unwrap()
}

/// A checkpoint whose adapters change the output: its second LoRA factors are far from 0.
fn strong(name: &str) -> PathBuf {
    let folder = copy(&trained().0.join("best"), name);
    let file = folder.join("lora_adapter/adapter_model.safetensors");
    let archive = Archive::open(&file).unwrap();
    let tensor = |name: &String| {
        let tensor = archive.read(name).unwrap();
        if !name.contains("lora_B") {
            return (name.clone(), tensor);
        }
        let count = i64::try_from(tensor.numel()).unwrap();
        let waves = (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 1.7).sin() * 0.05;
        (name.clone(), waves.view(tensor.size().as_slice()))
    };
    let tensors: Vec<(String, Tensor)> = archive.names().iter().map(tensor).collect();
    drop(archive);
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&file, &tensors, &BTreeMap::new()).unwrap();
    folder
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_merged_model_predicts_the_same_as_its_run() {
    let run = strong("strong");
    let out = path("strong-merged");
    let settings = Settings { overrides: RunOverrides::default(), kind: None, shard_bytes: 300_000 };
    let merged = merge(&run, &out, &settings, build(Kind::Float), &Silent).unwrap();
    let (before, after) = (prediction(&run), prediction(&out));
    assert_eq!((&before.answer, before.new_tokens), (&after.answer, after.new_tokens));
    assert!(
        furthest(&before.target().probabilities, &after.target().probabilities) <= 1e-5
            && furthest(&before.classes, &after.classes) <= 1e-5
    );
    let without = prediction(&trained().0.join("best"));
    assert!(
        furthest(&before.target().probabilities, &without.target().probabilities) > 1e-4,
        "the adapters change nothing"
    );
    // every adapted weight changed, and the shards have an index
    let [base, folded] = [&run, &out].map(|folder| Archive::open(&folder.join("base")).unwrap());
    let changed = folded.names().iter().filter(|name| folded.read(name).unwrap() != base.read(name).unwrap()).count();
    let description = setup::describe(&out).unwrap();
    let adapters = 4 * usize::try_from(description.sizes.llm.num_hidden_layers).unwrap();
    assert_eq!((changed, merged.adapters, folded.names().len()), (adapters, adapters, base.names().len()));
    assert!(merged.shards > 2 && out.join("base/model.safetensors.index.json").is_file());
    let error = merge(&out, &path("again"), &settings, build(Kind::Float), &Silent).unwrap_err();
    assert!(error.to_string().contains("no adapters"), "{error}");
}

#[test]
fn a_merge_changes_nothing_that_was_there() {
    let (run, _) = trained();
    let home = path("merge-home");
    let others = ["merged.previous", "merged.tmp-notes", ".merged.prsmed-previous", ".merged.prsmed-tmp-a1B2c3"];
    for (number, name) in others.into_iter().enumerate() {
        std::fs::create_dir_all(home.join(name)).unwrap();
        std::fs::write(home.join(name).join("thesis.txt"), format!("thesis {number}")).unwrap();
        // even if it looks like a folder of this program
        std::fs::write(home.join(name).join("checksums.json"), "{\"files\": {}}").unwrap();
    }
    done(prsmed().arg("merge").arg(run).arg(home.join("merged")));
    assert!(home.join("merged/model.json").is_file());
    for (number, name) in others.into_iter().enumerate() {
        let text = std::fs::read_to_string(home.join(name).join("thesis.txt")).unwrap();
        assert_eq!(text, format!("thesis {number}"), "{name}");
    }
    assert_eq!(std::fs::read_dir(&home).unwrap().count(), others.len() + 1, "no other files are left");
}

/// Calls a function at the first progress of a job.
struct Other<F>(F, Once);

impl<F: Fn() + Send + Sync> Observer for Other<F> {
    fn on(&self, event: &Event) {
        if matches!(event, Event::Advanced { .. }) {
            self.1.call_once(&self.0);
        }
    }
}

#[test]
fn two_merges_to_one_folder_do_not_destroy_each_other() {
    let (run, out) = (strong("two-merges"), path("two-merges-merged"));
    let settings = Settings { overrides: RunOverrides::default(), kind: None, shard_bytes: 5_000_000 };
    let open = || Source::open(&run, &RunOverrides::default(), build(Kind::Float)).unwrap();
    let write = || {
        open().write(&out, &settings, &Silent).unwrap();
    };
    let other = Other(write, Once::new());
    let error = open().write(&out, &settings, &other).unwrap_err().to_string();
    assert!(error.contains("`OUT`: ") && error.contains("two-merges-merged` exists"), "{error}");
    prsmed::tensor::weights::verify_folder(&out).unwrap();
    prediction(&out);
}

#[test]
fn adapters_and_dtypes_that_do_not_fit_are_refused() {
    let run = strong("unfit");
    let file = run.join("lora_adapter/adapter_model.safetensors");
    let archive = Archive::open(&file).unwrap();
    let whole: Vec<(String, Tensor)> =
        archive.names().iter().map(|name| (name.clone(), archive.read(name).unwrap())).collect();
    drop(archive);
    let merged_of = |whole: &[(String, Tensor)], change: &dyn Fn(&Tensor) -> Tensor, kind| {
        let tensors: Vec<(&str, Tensor)> = whole.iter().map(|(name, tensor)| (name.as_str(), change(tensor))).collect();
        let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        write_safetensors(&file, &tensors, &BTreeMap::new()).unwrap();
        let settings = Settings { overrides: RunOverrides::default(), kind, shard_bytes: 5_000_000 };
        merge(&run, &path("unfit-merged"), &settings, build(Kind::Float), &Silent).unwrap_err()
    };
    let merged = |change: &dyn Fn(&Tensor) -> Tensor, kind| merged_of(&whole, change, kind).to_string();
    let text = merged(&|tensor| tensor.reshape([-1]), None);
    assert!(text.contains("the adapter of `model.layers.0.self_attn."), "{text}");
    let text = merged(&|tensor| tensor * 1e6, Some(Kind::Half));
    assert!(text.contains("values that are not finite after the merge, in the dtype Half"), "{text}");
    // one factor of an adapter, or all of a kind, are missing
    for lacks in ["layers.0.self_attn.q_proj.lora_B.weight", "layers.0.self_attn.q_proj.lora_A.weight", "lora_B.weight"]
    {
        let rest: Vec<(String, Tensor)> =
            whole.iter().filter(|(name, _)| !name.ends_with(lacks)).map(|(name, t)| (name.clone(), t.copy())).collect();
        assert!(rest.len() < whole.len());
        let error = merged_of(&rest, &Tensor::shallow_clone, None);
        assert!(error.to_string().contains("the file is incomplete: it has no `base_model"), "{error}");
        assert!(error.to_string().contains(lacks) && error.hint().contains("copy it again"), "{error}");
    }
    assert!(!path("unfit-merged").exists());
}

#[test]
fn the_command_merges_and_refuses_invalid_folders() {
    let (run, _) = trained();
    let out = path("merged");
    let lines = objects(&done(prsmed().args(["--json", "merge"]).arg(run).arg(&out).args(["--dtype", "bf16"])));
    let result = lines.last().unwrap();
    assert_eq!((&result["kind"], &result["files"], &result["dtype"]), (&"result".into(), &1.into(), &"bf16".into()));
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("base/config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], &config["torch_dtype"]), (&"mistral".into(), &"bfloat16".into()));
    let archive = Archive::open(&out.join("base")).unwrap();
    let info = archive.info("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!(info.kind, Kind::BFloat16);
    assert!(out.join("base/tokenizer.json").exists() || out.join("base/tokenizer.model").exists());
    let mut predict = prsmed();
    predict.args(["--json", "predict", "--question", "Where is the lesion?", "--max-new-tokens", "2", "--image"]);
    let lines = objects(&done(predict.arg(image()).arg(&out)));
    assert!(lines.last().unwrap()["answer"].is_string());
    refused(prsmed().arg("merge").arg(run).arg(&out), "error: `OUT`: `~/merged` exists\nhint: choose another folder");
    refused(
        prsmed().args(["merge", "nothing", "other"]),
        "error: nothing: this run folder does not exist\n\
         hint: give the folder that `prsmed train --out` wrote, or `hub:owner/name`",
    );
    assert!(!path("other").exists());
}
