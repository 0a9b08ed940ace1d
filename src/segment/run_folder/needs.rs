//! Weight files that a model config or a run folder needs, and run folders on the hub.

use crate::event::Observer;
use crate::hub::{self, Files, HubOptions, HubSource, Need, Spec};
use crate::models::base::LLAVA_MED;
use crate::segment::config::{ModelConfig, RANDOM};
use crate::segment::run_folder::description::describe;
use crate::segment::run_folder::loaded::{ADAPTER_CONFIG, DESCRIPTION, Description};
use crate::tensor::weights::readable_folder;
use crate::{Error, Result, files};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const HINT: &str = "give a run folder made by `prsmed train`, its `last/` or `best/`, or a published PRS-Med folder";
/// The parts of a run folder; optimizer state and logs of other folders are not downloaded.
const RUN_FILES: [&str; 15] = [
    "lora_adapter/*", "tokenizer/*", "base/*", "image_encoder.*", "mask_decoder.*", "cls.*", "mask_reader.*",
    "model.json*", "base.json*", "config.toml*", "data.json*", "questions.json*", "images.json*", "trainer.*",
    "checksums.json*",
];

/// Files that training a new model with `config` reads.
pub fn of_model(config: &ModelConfig) -> Vec<Need<'static>> {
    let mut needs = of_base(&config.base, &config.vision_tower);
    if config.image_encoder != RANDOM {
        needs.push(Need::new("model.image_encoder", &config.image_encoder, Files::OnlyWeights));
    }
    needs
}

/// Files that a training with `config` reads: a new one, or one that continues from the checkpoint folder `resume`.
///
/// # Errors
/// As [`of_checkpoint`].
pub fn of_training(config: &ModelConfig, resume: Option<&Path>) -> Result<Vec<Need<'static>>> {
    resume.map_or_else(|| Ok(of_model(config)), |folder| of_checkpoint(folder, None, None))
}

fn of_base(base: &str, vision_tower: &str) -> Vec<Need<'static>> {
    let parts = [("model.base", base), ("model.vision_tower", vision_tower)];
    let named = parts.into_iter().filter(|(_, spec)| !spec.is_empty() && *spec != RANDOM);
    named.map(|(key, spec)| Need::new(key, spec, Files::Checkpoint)).collect()
}

/// Files besides the checkpoint itself that opening the checkpoint in `folder` reads. `base` and `vision_tower` replace
/// those that the checkpoint names.
///
/// # Errors
/// [`Error::Weights`] when `folder` is no checkpoint; [`Error::Config`] when nothing names its language model.
pub fn of_checkpoint(folder: &Path, base: Option<&str>, vision_tower: Option<&str>) -> Result<Vec<Need<'static>>> {
    if folder.join("base").is_dir() {
        return Ok(Vec::new());
    }
    let (own_base, own_tower) = if folder.join(DESCRIPTION).exists() {
        let Description { model, .. } = describe(folder)?;
        (model.base, model.vision_tower)
    } else if base.is_none() {
        (base_of_adapter(folder)?, String::new())
    } else {
        Default::default()
    };
    Ok(of_base(base.unwrap_or(&own_base), vision_tower.unwrap_or(&own_tower)))
}

/// The language model that the adapter of a published run names.
///
/// # Errors
/// [`Error::Weights`] for an unreadable `adapter_config.json`; [`Error::Config`] when the name is a folder of another
/// machine that is not LLaVA-Med.
pub fn base_of_adapter(folder: &Path) -> Result<String> {
    let path = folder.join(ADAPTER_CONFIG);
    let wrong = |reason: String| Error::weights(&path, reason, HINT);
    let text = files::read(&path, files::MAX_TEXT).map_err(|error| wrong(error.to_string()))?;
    let config: serde_json::Value = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    let text = |key: &str| config.get(key).and_then(serde_json::Value::as_str).unwrap_or_default();
    base_spec(text("base_model_name_or_path"), text("revision")).ok_or_else(|| {
        let reason = format!(
            "the adapter names the language model `{}`, which is not on this machine",
            text("base_model_name_or_path")
        );
        Error::argument("base", reason, format!("add the argument `base={LLAVA_MED}`, or a folder with its files"))
    })
}

/// A base named as Python's `peft` names it (`owner/name`, or a folder) as a spec. The published runs name a folder of
/// the authors' machine; it is LLaVA-Med if its last part has that name.
fn base_spec(name: &str, revision: &str) -> Option<String> {
    if name.starts_with("hub:") || (!name.is_empty() && Path::new(name).exists()) {
        return Some(name.to_owned());
    }
    let suffix = if revision.is_empty() { String::new() } else { format!("@{revision}") };
    let spec = format!("hub:{name}{suffix}");
    if matches!(Spec::parse(&spec), Ok(Spec::Hub(source)) if source.inside.is_empty()) {
        return Some(spec);
    }
    let last = name.rsplit(['/', '\\']).find(|part| !part.is_empty())?;
    LLAVA_MED.ends_with(&format!("/{last}")).then(|| LLAVA_MED.to_owned())
}

/// A base spec as Python's libraries name it: the plain repository id and its revision. Paths stay.
pub(crate) fn peft_base(spec: &str) -> (String, Option<String>) {
    match Spec::parse(spec) {
        Ok(Spec::Hub(source)) if source.inside.is_empty() => (source.repo, source.revision),
        _ => (spec.to_owned(), None),
    }
}

/// The run that a RUN argument names: a local folder, or the need for a folder of a hub repository.
///
/// # Errors
/// [`Error::Hub`] if the repository contains no run or several; [`Error::Weights`] for a path that does not exist.
pub fn of_run(run: &str, options: &HubOptions, observer: &dyn Observer) -> Result<Need<'static>> {
    let Spec::Hub(source) = Spec::parse(run)? else { return Ok(Need::new("RUN", run, Files::All)) };
    let listed = hub::ls(run, options, observer)?;
    let names: Vec<&str> = listed.iter().map(|file| file.name.as_str()).collect();
    let folder = run_folder(&names, &source)?;
    Ok(Need::new("RUN", source.with_inside(&folder).to_string(), Files::Matching(&RUN_FILES)))
}

/// The folder among `names` that contains a run. `best/` has priority over `last/` of the same run.
fn run_folder(names: &[&str], source: &HubSource) -> Result<String> {
    let known: BTreeSet<&str> = names.iter().copied().collect();
    let join = |folder: &str, name: &str| {
        if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
    };
    let holds = |folder: &str, name: &str| known.contains(join(folder, name).as_str());
    let is_run =
        |folder: &str| holds(folder, DESCRIPTION) || holds(folder, "mask_decoder.pth") && holds(folder, ADAPTER_CONFIG);
    let folders: BTreeSet<&str> =
        names.iter().map(|name| name.rsplit_once('/').map_or("", |(folder, _)| folder)).collect();
    let runs: Vec<&str> = folders.into_iter().filter(|folder| is_run(folder)).collect();
    let has_best = |folder: &str| {
        let parent = folder.strip_suffix("last").filter(|parent| parent.is_empty() || parent.ends_with('/'));
        parent.is_some_and(|parent| runs.contains(&format!("{parent}best").as_str()))
    };
    let chosen: Vec<&str> = runs.iter().copied().filter(|folder| !has_best(folder)).collect();
    match chosen.as_slice() {
        [run] => Ok((*run).to_owned()),
        [] => {
            let reason =
                format!("contains no run (a folder with `{DESCRIPTION}`, or `mask_decoder.pth` and `lora_adapter/`)");
            Err(Error::hub(format!("hub:{}", source.repo), reason, "check the name, and `prsmed hub ls` for its files"))
        }
        [first, ..] => {
            let reason = format!("contains several runs: `{}`", chosen.join("`, `"));
            let hint = format!("name one of them, for example `{}`", source.with_inside(first));
            Err(Error::hub(format!("hub:{}", source.repo), reason, hint))
        }
    }
}

/// Downloads the small file that names the language model of a run on the hub; returns its folder.
///
/// # Errors
/// As [`hub::resolve`].
pub fn described_folder(run: &Need, options: &HubOptions, observer: &dyn Observer) -> Result<PathBuf> {
    let small = ["model.json*", "base/config.json*", "lora_adapter/adapter_config.json*"];
    hub::resolve(&run.spec, &Files::Matching(&small), options, observer)
}

/// The checkpoint folder of a local run: its `best/`, else its `last/`, else the folder itself. A training may replace
/// the folder meanwhile.
///
/// # Errors
/// [`Error::Weights`] if there is none.
pub fn checkpoint_of(run: &Path) -> Result<PathBuf> {
    /// More often than a training can replace the folder between two tests.
    const ATTEMPTS: usize = 100;
    for _ in 0..ATTEMPTS {
        let Ok(folder) = readable_folder(run) else {
            let hint = "give the folder that `prsmed train --out` wrote, or `hub:owner/name`";
            return Err(Error::weights(run, "this run folder does not exist", hint));
        };
        if let Some(inside) = ["best", "last"].into_iter().find_map(|name| readable_folder(&folder.join(name)).ok()) {
            return Ok(inside);
        }
        if [DESCRIPTION, "mask_decoder.pth"].iter().any(|name| folder.join(name).exists()) {
            return Ok(folder);
        }
        if folder.is_dir() {
            break;
        }
    }
    let hint = "give the folder that `prsmed train --out` wrote, or a published PRS-Med folder";
    Err(Error::weights(run, "is not a run folder: it has neither `best/` nor `last/`", hint))
}

/// The folder of a checkpoint's tokenizer: `tokenizer/`, else `lora_adapter/` as early published runs have it, else the
/// language model's.
pub(crate) fn tokenizer_folder(folder: &Path, base: &Path) -> PathBuf {
    let own = ["tokenizer", "lora_adapter"].map(|name| folder.join(name));
    let holds = |folder: &PathBuf| ["tokenizer.json", "tokenizer.model"].iter().any(|name| folder.join(name).exists());
    own.into_iter().find(holds).unwrap_or_else(|| base.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::RepoKind;

    #[test]
    fn a_checkpoint_is_found_while_a_training_replaces_it() {
        let run = tempfile::tempdir().expect("a folder");
        let last = run.path().join("last");
        assert!(checkpoint_of(&last).expect_err("nothing").to_string().ends_with("does not exist"));
        // between the two renames of a writer
        let previous = files::previous(&last);
        std::fs::create_dir(&previous).expect("created");
        for name in [files::CHECKSUMS, DESCRIPTION] {
            std::fs::write(previous.join(name), "{}").expect("written");
        }
        assert_eq!(checkpoint_of(&last).expect("the previous one"), previous);
        assert_eq!(checkpoint_of(run.path()).expect("the previous one"), previous);
    }

    #[test]
    fn bases_are_understood_as_python_writes_them() {
        let base = |name: &str| base_spec(name, "");
        assert_eq!(base("owner/name").as_deref(), Some("hub:owner/name"));
        assert_eq!(base_spec("owner/name", "v1").as_deref(), Some("hub:owner/name@v1"));
        assert_eq!(base("hub:owner/name@v2").as_deref(), Some("hub:owner/name@v2"));
        assert_eq!(base("src").as_deref(), Some("src"), "a folder that exists");
        // the published adapters name a folder of the authors' machine
        assert_eq!(base("/home/x/weight/llava-med-v1.5-mistral-7b").as_deref(), Some(LLAVA_MED));
        assert_eq!((base("/home/x/other"), base("")), (None, None));
        assert_eq!(peft_base("hub:owner/name@v1"), ("owner/name".into(), Some("v1".into())));
        assert_eq!(peft_base("models/llava"), ("models/llava".into(), None));
    }

    #[test]
    fn the_run_of_a_repository_is_found_in_any_folder() {
        let source = HubSource { kind: RepoKind::Model, repo: "o/n".into(), inside: String::new(), revision: None };
        let run = |names: &[&str]| run_folder(names, &source);
        let published = |folder: &str| [format!("{folder}mask_decoder.pth"), format!("{folder}{ADAPTER_CONFIG}")];
        for folder in ["", "weights/llm_seg_16/"] {
            let files = published(folder);
            let files: Vec<&str> = files.iter().map(String::as_str).chain(["README.md"]).collect();
            assert_eq!(run(&files).expect("a run"), folder.trim_end_matches('/'));
        }
        assert_eq!(run(&["a/last/model.json", "a/best/model.json"]).expect("a run"), "a/best");
        assert_eq!(run(&["last/model.json", "best/model.json"]).expect("a run"), "best");
        assert_eq!(run(&["last/model.json", "last/trainer.json"]).expect("a run"), "last");
        assert!(run(&["README.md"]).is_err() && run(&["a/model.json", "b/model.json"]).is_err());
    }

    #[test]
    fn what_a_run_was_trained_on_is_downloaded_with_it() {
        assert!(RUN_FILES.contains(&"data.json*"), "see `SeenImages::of_checkpoint`");
    }

    #[test]
    fn random_parts_need_no_files() {
        let config = |name: &str| {
            let text = std::fs::read_to_string(format!("configs/{name}.toml")).expect("a preset");
            let table: toml::Table = text.parse().expect("a preset is TOML");
            let model = table.get("model").cloned().unwrap_or_else(|| toml::Table::new().into());
            model.try_into::<ModelConfig>().expect("settings of a model")
        };
        assert!(of_model(&config("tiny")).is_empty());
        let needs = of_model(&config("full"));
        let named: Vec<(&str, &str)> = needs.iter().map(|need| (need.key.as_str(), need.spec.as_str())).collect();
        assert_eq!(named, [("model.base", LLAVA_MED), ("model.image_encoder", "hub:merve/tinysam")]);
    }

    #[test]
    fn files_are_named_by_the_setting_that_needs_them() {
        let config = ModelConfig {
            base: "llava".into(),
            vision_tower: "clip".into(),
            image_encoder: "sam".into(),
            ..ModelConfig::default()
        };
        let needs = of_model(&config);
        let named: Vec<(&str, &str)> = needs.iter().map(|need| (need.key.as_str(), need.spec.as_str())).collect();
        assert_eq!(named, [("model.base", "llava"), ("model.vision_tower", "clip"), ("model.image_encoder", "sam")]);
    }
}
