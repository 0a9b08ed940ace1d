//! Builds or loads a model, from settings or from a run folder.

pub use crate::segment::config::{BatchNorm, ModelConfig, RANDOM, Sizes};
pub use crate::segment::run_folder::architecture::check_parts;
pub use crate::segment::run_folder::description::{check_host_layers, describe, verify};
pub use crate::segment::run_folder::loaded::{Build, Description, LoadedModel, RunOverrides, pixels};
pub use crate::segment::run_folder::parts::Configs;
pub use crate::segment::run_folder::sizes::{mask_grid, planned_sizes};

use crate::data::familiarity::images::KnownImages;
use crate::data::familiarity::questions::KnownQuestions;
use crate::data::identity::SeenImages;
use crate::data::image::PixelConfig;
use crate::data::text::TextTokenizer;
use crate::models::base::{Parts, check_weights};
use crate::models::prsmed::PrsMed;
use crate::nn::LoraConfig;
use crate::segment::needs;
use crate::segment::resume::DATA_FILE;
use crate::segment::run_folder::description::{check_adapters, check_sizes};
use crate::segment::run_folder::loaded::is_published;
use crate::segment::run_folder::parts::Found;
use crate::segment::run_folder::sizes::{model_sizes, stated_sizes};
use crate::segment::weights;
use crate::tensor::{Device, guard, kernels, rng};
use crate::trainer::FirstLayers;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// Builds a new model from settings. A model with random weights trains its tokenizer on `texts`.
///
/// # Errors
/// [`Error::Config`] for sizes that do not fit; [`Error::Weights`] and [`Error::Hub`] from the files.
pub fn create(
    config: &ModelConfig,
    lora: LoraConfig,
    modalities: &[String],
    texts: &[&str],
    build: Build,
) -> Result<LoadedModel> {
    let found = Found::locate(config, build)?;
    let (tokenizer, sizes, of_tokenizer) = if let Some(folder) = &found.base {
        let sizes = model_sizes(config, lora, modalities.len(), &found, 0)?;
        let (tokenizer, warning) =
            TextTokenizer::open(folder, &sizes.family.prompt)?.fit(sizes.llm.vocab_size, folder)?;
        (tokenizer, sizes, warning)
    } else {
        let Sizes { vocab_size, family, .. } = stated_sizes(config)?;
        let tokenizer = TextTokenizer::train(texts, *vocab_size, &family.prompt)?;
        let sizes = model_sizes(config, lora, modalities.len(), &found, tokenizer.vocab_size())?;
        (tokenizer, sizes, None)
    };
    if let Some(base) = found.base.as_ref().filter(|_| !build.allow_partial) {
        check_weights(base, sizes.family, &sizes.llm)?;
    }
    found.check_length(sizes.tower.max_tokens(), config.max_text_tokens)?;
    check_sizes(config, &sizes)?;
    check_adapters(config, &sizes)?;
    let pixels = pixels(config, &sizes);
    let mut description = Description::new(config.clone(), sizes, modalities.to_vec(), pixels);
    (description.sources, description.digests) = (found.sources(), found.digests()?);
    let of_kernels = check_kernels(build.device)?;
    rng::seed(build.seed);
    let mut model = guard::guard(|| Ok(PrsMed::new(&description.sizes, build.options(config, true))))?;
    let mut warnings = found.load(&model, build)?;
    divide(&mut model, config, build)?;
    warnings.extend(of_kernels);
    warnings.extend(of_tokenizer);
    Ok(LoadedModel::new(model, tokenizer, description, warnings))
}

/// Loads the model of a checkpoint folder of this program or of the original code.
///
/// # Errors
/// [`Error::Weights`] if the folder is neither, or incomplete.
pub fn open(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<LoadedModel> {
    let description = described(folder, overrides, build)?;
    check_host_layers(&description.model)?;
    let of_kernels = check_kernels(build.device)?;
    let options = build.options(&description.model, false);
    let mut model = guard::guard(|| Ok(PrsMed::new(&description.sizes, options)))?;
    let mut warnings = weights::load_run(folder, &description, &model, build)?;
    divide(&mut model, &description.model, build)?;
    warnings.extend(of_kernels);
    let (base, tower) = weights::base_of(folder, &description, build)?;
    let parts = [("base", Some(base.as_path())), ("vision_tower", tower.as_deref())];
    let of_hub = description.source_warnings(&parts);
    if !base.starts_with(folder)
        && of_hub.is_empty()
        && let Some((part, path)) = description.changed_part(&parts)?
    {
        let text = "has other weights than those that this checkpoint was trained with, and its results may differ";
        warnings.push(format!("`{part}`: `{}` {text}", path.display()));
    }
    warnings.extend(of_hub);
    let (tokenizer, of_tokenizer) = tokenizer_of(folder, &base, &description)?;
    warnings.extend(of_tokenizer);
    let known_questions = KnownQuestions::open(folder)?.map(Arc::new);
    let known_images = KnownImages::open(folder)?.map(Arc::new);
    let seen = Arc::new(SeenImages::of_checkpoint(&folder.join(DATA_FILE))?);
    let loaded = LoadedModel::new(model, tokenizer, description, warnings);
    Ok(LoadedModel { known_questions, known_images, seen, ..loaded })
}

/// Refuses to continue the training of a checkpoint on other weights of the base or tower that it names.
pub(crate) fn refuse_other_weights(folder: &Path, build: Build) -> Result<()> {
    let description = describe(folder)?;
    let (base, tower) = weights::base_of(folder, &description, build)?;
    if base.starts_with(folder) {
        return Ok(());
    }
    let parts = [("base", Some(base.as_path())), ("vision_tower", tower.as_deref())];
    if let Some((part, path)) = description.changed_part(&parts)? {
        let reason = format!("`{}` has other weights than those that the run began with", path.display());
        let hint = "put the weights of the first part of the run back, or start a new run with another argument `out`";
        return Err(Error::config(format!("model.{part}"), reason, hint));
    }
    Ok(())
}

/// The tokenizer of a checkpoint folder or its base, for the embeddings of these sizes, and a warning.
pub(crate) fn tokenizer_of(
    folder: &Path,
    base: &Path,
    description: &Description,
) -> Result<(TextTokenizer, Option<String>)> {
    let folder = needs::tokenizer_folder(folder, base);
    TextTokenizer::open(&folder, &description.prompt)?.fit(description.sizes.llm.vocab_size, &folder)
}

/// The description of a checkpoint folder (of this program, or published), with `overrides`.
///
/// # Errors
/// [`Error::Weights`] if the folder is neither.
pub(crate) fn described(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Description> {
    refuse_without_effect(folder, overrides)?;
    let mut description =
        if is_published(folder) { weights::describe_published(folder, overrides, build)? } else { describe(folder)? };
    let own = [&description.model.base, &description.model.vision_tower].map(Clone::clone);
    if let Some(base) = &overrides.base {
        description.model.base.clone_from(base);
    }
    if let Some(tower) = &overrides.vision_tower {
        description.model.vision_tower.clone_from(tower);
    }
    // the parts that the run names are no others
    if [&description.model.base, &description.model.vision_tower] != own.each_ref() {
        check_replacement(&description, overrides, build)?;
    }
    if let Some(quantization) = overrides.quantization {
        description.model.quantization = quantization;
    }
    description.model = resident_on_cpu(description.model, build.device);
    if let Some(layers) = overrides.stream_layers {
        description.model.stream_layers = layers;
    }
    if let Some(divides) = overrides.divide_layers {
        description.model.divide_layers = divides;
    }
    if let Some(streams) = overrides.stream_vision {
        description.model.stream_vision = streams;
    }
    if let Some(semantics) = overrides.semantics {
        description.model.semantics = semantics;
        description.sizes.decoder.follow(&description.model.head_options());
        let labels = description.pixels.labels;
        description.pixels = PixelConfig { labels, ..pixels(&description.model, &description.sizes) };
    }
    Ok(description)
}

/// Refuses another base and another tower for a folder that has its own.
fn refuse_without_effect(folder: &Path, overrides: &RunOverrides) -> Result<()> {
    let own = folder.join("base");
    let given = [("base", &overrides.base), ("vision_tower", &overrides.vision_tower)];
    match given.into_iter().find_map(|(name, spec)| Some((name, spec.as_ref()?))).filter(|_| own.is_dir()) {
        Some((name, spec)) => {
            let reason = format!("`{spec}` would not be used: the run has its own language model and vision tower");
            let hint = format!("leave it out, or give a run that was trained on a base; `{}` is loaded", own.display());
            Err(Error::config(name, reason, hint))
        }
        None => Ok(()),
    }
}

/// Refuses a base or a tower that is not computed as those that the run was trained on.
fn check_replacement(description: &Description, overrides: &RunOverrides, build: Build) -> Result<()> {
    let name = match (&overrides.base, &overrides.vision_tower) {
        (None, None) => return Ok(()),
        (Some(_), _) => "base",
        _ => "vision_tower",
    };
    let model = ModelConfig { image_encoder: RANDOM.into(), ..description.model.clone() };
    let Some(given) = Found::locate(&model, build)?.base_sizes()? else { return Ok(()) };
    let own = description.sizes.base();
    if given.family != own.family {
        let reason = format!("it is of the family {:?}, and the run was trained with {:?}", given.family, own.family);
        return Err(Error::config(name, reason, "give the base that the run was trained on"));
    }
    let fields = |parts: &Parts| {
        let json = |value: serde_json::Result<serde_json::Value>| value.expect("plain numbers serialise");
        let (tower, llm) = (serde_json::to_value(&parts.tower), serde_json::to_value(&parts.llm));
        [("vision tower", json(tower)), ("language model", json(llm))]
    };
    for ((part, given), (_, own)) in fields(&given).into_iter().zip(fields(&own)) {
        let own = own.as_object().into_iter().flatten();
        let differing =
            own.filter(|(key, _)| *key != "initializer_range").find(|(key, own)| given.get(key) != Some(own));
        if let Some((key, own)) = differing {
            let given = &given[key];
            let reason = format!("`{key}` of the {part} is {given}, and the run was trained with {own}");
            return Err(Error::config(name, reason, "give the base that the run was trained on"));
        }
    }
    Ok(())
}

/// The settings of a stored run for `device`: on the CPU, copies of weights would save nothing.
pub fn resident_on_cpu(model: ModelConfig, device: Device) -> ModelConfig {
    match device {
        Device::Cpu => {
            ModelConfig { stream_layers: FirstLayers::None, stream_vision: false, divide_layers: false, ..model }
        }
        _ => model,
    }
}

/// Checks the custom CUDA kernels before the first 4-bit weights need them; returns warnings.
pub(crate) fn check_kernels(device: Device) -> Result<Vec<String>> {
    if !matches!(device, Device::Cuda(_)) {
        return Ok(Vec::new());
    }
    kernels::check(device)?;
    // dropout, 4-bit weights and 8-bit optimizer state use them in every mode
    let all = kernels::unavailable().map(|reason| format!("custom CUDA kernels are off: {reason}"));
    let off = all.into_iter().chain(kernels::refusals());
    Ok(off.map(|reason| format!("{reason}. Plans underestimate memory without it")).collect())
}

/// Divides the loaded layers, if the settings ask for it.
pub(crate) fn divide(model: &mut PrsMed, config: &ModelConfig, build: Build) -> Result<()> {
    let Some(peers) = build.peers_of(config) else { return Ok(()) };
    // a base that checkpoints contain
    guard::guard(|| model.divide(peers, config.base == RANDOM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{clip, tower};
    use crate::segment::Semantics;
    use crate::tensor::weights::write_safetensors;
    use crate::tensor::{Kind, Tensor};
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    /// A base with the sizes of the fixture's run, zeros as the tensors that give a tower its sizes, and other `fields`.
    fn base(description: &Description, fields: &Value) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut config = weights::base_config(description);
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let tower::Config::Clip(tower) = &description.sizes.tower;
        let clip::Config { hidden_size, intermediate_size, num_hidden_layers, patch_size, .. } = *tower;
        let name = |key: &str| format!("{}vision_model.{key}", description.sizes.family.keys.tower);
        let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let mut tensors = vec![
            (name("embeddings.patch_embedding.weight"), zeros(&[hidden_size, 3, patch_size, patch_size])),
            (name("embeddings.position_embedding.weight"), zeros(&[tower.num_patches() + 1, hidden_size])),
            (name("encoder.layers.0.mlp.fc1.bias"), zeros(&[intermediate_size])),
        ];
        let norms = (0..num_hidden_layers).map(|i| name(&format!("encoder.layers.{i}.layer_norm1.weight")));
        tensors.extend(norms.map(|name| (name, zeros(&[hidden_size]))));
        let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        write_safetensors(&folder.path().join("model.safetensors"), &tensors, &BTreeMap::new()).unwrap();
        folder
    }

    #[test]
    fn another_base_of_a_run_is_followed_or_refused() {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
        let build = Build::new(Device::Cpu, Kind::Float, &locate);
        let of = |folder: &Path, overrides: &RunOverrides| {
            let described = described(folder, overrides, build).map_err(|error| error.to_string())?;
            Ok::<_, String>([described.model.base, described.model.vision_tower])
        };
        assert_eq!(of(&fixture, &RunOverrides::default()), Ok([RANDOM, ""].map(str::to_owned)));
        let run = describe(&fixture).unwrap();
        let with = |fields: Value| {
            let folder = base(&run, &fields);
            let spec = folder.path().display().to_string();
            let overrides = RunOverrides { base: Some(spec.clone()), ..RunOverrides::default() };
            of(&fixture, &overrides).map(|[base, _]| assert_eq!(base, spec))
        };
        assert_eq!(with(json!({})), Ok(()));
        let theta = with(json!({"rope_theta": 5.0})).unwrap_err();
        assert_eq!(theta, "`base`: `rope_theta` of the language model is 5.0, and the run was trained with 10000.0");
        let act = with(json!({"vision_config": {"hidden_act": "relu"}})).unwrap_err();
        assert!(act.contains("`hidden_act` = \"relu\" is not supported"), "{act}");
        let layer = with(json!({"mm_vision_select_layer": -1})).unwrap_err();
        assert!(layer.contains("`mm_vision_select_layer` = -1 is not supported"), "{layer}");
    }

    #[test]
    fn another_semantics_of_a_run_changes_its_pixels() {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
        let pixels = |semantics| {
            let overrides = RunOverrides { semantics: Some(semantics), ..RunOverrides::default() };
            described(&fixture, &overrides, Build::new(Device::Cpu, Kind::Float, &locate)).unwrap().pixels
        };
        let [reference, corrected] = [Semantics::Reference, Semantics::Corrected].map(pixels);
        assert_ne!(reference.mask, corrected.mask);
    }

    #[test]
    fn another_base_or_tower_of_a_run_with_its_own_is_refused() {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(fixture.join("model.json"), folder.path().join("model.json")).unwrap();
        std::fs::create_dir(folder.path().join("base")).unwrap();
        let locate = |spec: &str| -> Result<PathBuf> { panic!("{spec} is not looked for") };
        let build = Build::new(Device::Cpu, Kind::Float, &locate);
        let spec = || Some("/does/not/exist".to_owned());
        for (name, overrides) in [
            ("base", RunOverrides { base: spec(), ..RunOverrides::default() }),
            ("vision_tower", RunOverrides { vision_tower: spec(), ..RunOverrides::default() }),
        ] {
            let text = described(folder.path(), &overrides, build).unwrap_err().to_string();
            assert!(
                text.starts_with(&format!("`{name}`: `/does/not/exist` would not be used: the run has its own")),
                "{text}"
            );
        }
        described(folder.path(), &RunOverrides::default(), build).unwrap();
    }
}
