//! Loading and saving of weights: LLaVA-Med shards, TinySAM checkpoints, run folders of this program and of the
//! original code.
//!
//! Key names of each part, and keys that may stay unused:
//!
//! | part | stored as | keys that may stay unused |
//! |---|---|---|
//! | language model, projector | LLaVA-Med keys | `rotary_emb.inv_freq`, `position_ids` |
//! | vision tower | inside LLaVA-Med, or `vision_model.` of CLIP | the last layer, `post_layernorm`, the text tower |
//! | adapters | PEFT keys | adapters of the frozen CLIP tower, which never got a gradient |
//! | image encoder | TinySAM keys, `image_encoder.` or bare | classifier, SAM's prompt encoder and decoder, `sam.` |

use crate::data::familiarity::images::IMAGES_FILE;
use crate::data::familiarity::questions::QUESTIONS_FILE;
use crate::data::manifest::REFERENCE_CLASSES;
use crate::models::base::{self, Parts, fields::Fields};
use crate::models::image_encoder::known;
use crate::models::mask_head;
use crate::models::prsmed::{self, MASK_HEAD, MASK_READER, PrsMed};
use crate::nn::Quantization;
use crate::segment::config::{BatchNorm, ModelConfig, RANDOM};
use crate::segment::run_folder::adapters::{self, ADAPTER};
use crate::segment::run_folder::description::check_sizes;
use crate::segment::run_folder::loaded::{
    ADAPTER_CONFIG, Build, DESCRIPTION, Description, LoadedModel, RunOverrides, is_published, pixels,
};
use crate::segment::run_folder::parts::{Configs, Found};
use crate::segment::run_folder::quantized::Cached;
use crate::segment::{Semantics, needs};
use crate::tensor::store::Store;
use crate::tensor::weights::{Archive, LoadReport, Staged};
use crate::tensor::{Kind, Tensor, ledger, no_grad};
use crate::{Error, Result};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

fn settle(report: LoadReport, path: &Path, allow_partial: bool, warnings: &mut Vec<String>) -> Result<()> {
    if allow_partial && !report.is_clean() {
        warnings.push(format!("{}: {report}", path.display()));
        return Ok(());
    }
    report.into_result(path).map(drop)
}

/// The tensors of `store` by their keys in a file, without the parts of 4-bit matrices.
fn targets(store: &Store, rename: impl Fn(&str) -> Option<String>) -> Vec<(String, Tensor)> {
    let matrices = store.quantized();
    let pieces: HashSet<String> = matrices
        .iter()
        .flat_map(|(name, matrix)| matrix.pieces().into_iter().map(move |(key, _)| format!("{name}{key}")))
        .collect();
    let dense = store.entries().into_iter().filter(|e| !pieces.contains(&e.name));
    dense.filter_map(|e| Some((rename(&e.name)?, e.tensor))).collect()
}

impl Found {
    /// Loads the weights. With `allow_partial`, keys that do not fit become warnings.
    ///
    /// # Errors
    /// [`Error::Weights`] listing the first keys that do not fit.
    pub(crate) fn load(&self, model: &PrsMed, build: Build) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        let allow_partial = build.allow_partial;
        if let Some(base) = &self.base {
            let report = load_base(base, self.tower.as_deref(), model, build.cache, &mut warnings)?;
            settle(report, base, allow_partial, &mut warnings)?;
        }
        if let Some(file) = &self.image_encoder {
            settle(load_image_encoder(file, model)?, file, allow_partial, &mut warnings)?;
        }
        Ok(warnings)
    }
}

/// Dtype of the base's matrices in its files, or bf16 (as LLaVA-Med's) if they are not on this machine. `None` for a
/// random base.
pub(crate) fn stored_kind(config: &ModelConfig) -> Option<Kind> {
    if config.base == RANDOM {
        return None;
    }
    let base = Found::local(config, &Configs::new()).ok()?.base;
    let family = base.as_ref().and_then(|base| base::open(base).ok()).map(|(family, _)| family).unwrap_or_default();
    let archive = base.and_then(|base| family.keys.open(&base).ok());
    let info =
        archive.as_ref().and_then(|archive| archive.info(&format!("{}0.mlp.down_proj.weight", family.keys.layers)));
    let stored = info.map(|info| info.kind).filter(|kind| matches!(kind, Kind::Half | Kind::Float));
    Some(stored.unwrap_or(Kind::BFloat16))
}

/// Whether the embedding of the language model in `base` is its head too. A file of weights alone does not say it.
pub(crate) fn is_tied(base: &Path) -> Result<bool> {
    if !base.join("config.json").is_file() {
        return Ok(false);
    }
    Ok(Fields::read(base)?.of_text()?.is_tied())
}

fn load_base(
    base: &Path,
    tower: Option<&Path>,
    model: &PrsMed,
    cache: Option<&Path>,
    warnings: &mut Vec<String>,
) -> Result<LoadReport> {
    let keys = &model.config().family.keys;
    let archive = keys.open(base)?;
    if let (Some(index), Some(file)) = (archive.unused_index(), archive.files().next()) {
        let [read, unused] = [file, &index].map(|path| path.display().to_string());
        warnings
            .push(format!("`{read}` is read, and `{unused}` with its files is not: remove the one that is not meant"));
    }
    let store = &model.stores().base;
    // the first rank reads the layers that the ranks divide
    let is_elsewhere = |name: &str| !model.options().reads_layers && name.starts_with(keys.layers);
    let matrices: Vec<_> = store.quantized().into_iter().filter(|(name, _)| !is_elsewhere(name)).collect();
    let dense = matrices.iter().any(|(name, _)| !archive.is_quantized(name));
    let cached = cache.filter(|_| dense).and_then(|folder| Cached::of(base, &archive, matrices[0].1.scheme(), folder));
    let is_cached = cached.as_ref().is_some_and(|cached| cached.load(&matrices, warnings));
    let wanted = if is_cached { &[] } else { matrices.as_slice() };
    let names: HashSet<&str> = matrices.iter().map(|(name, _)| name.as_str()).collect();
    let inside = |name: &str| name.starts_with(keys.tower);
    let separate = tower.is_some();
    let is_tied = is_tied(base)?;
    let is_own = |name: &str| !(separate && inside(name) || is_elsewhere(name) || is_tied && name == keys.head);
    let mut own = targets(store, |name| is_own(name).then(|| name.to_owned()));
    let leftover = |name: &str| {
        keys.is_unused(name)
            || is_tied && name == keys.head
            || is_elsewhere(name)
            || names.contains(name)
            || inside(name) && (separate || is_unused_tower(name, &own_layers(store)))
    };
    let mut report = archive.load_with(&mut own, wanted, leftover)?;
    if is_tied {
        let entries = store.entries();
        let tensor = |name: &str| entries.iter().find(|entry| entry.name == name).map(|entry| &entry.tensor);
        if let (Some(head), Some(embedding)) = (tensor(keys.head), tensor(keys.embedding)) {
            no_grad(|| head.shallow_clone().copy_(embedding));
        }
    }
    if let Some(cached) = cached.filter(|_| !is_cached && report.missing.is_empty() && report.mis_shaped.is_empty()) {
        cached.store(&matrices, warnings);
    }
    if let Some(tower) = tower {
        let archive = Archive::open(tower)?;
        let mut own = targets(store, |name| name.strip_prefix(keys.tower).map(str::to_owned));
        let layers = own_layers(store);
        report.merge(archive.load(&mut own, |name| {
            !name.starts_with("vision_model.") || keys.is_unused(name) || is_unused_tower(name, &layers)
        })?);
    }
    Ok(report)
}

/// Key prefix of the first tower layer that the model does not have.
fn own_layers(store: &Store) -> String {
    let count = store.entries().iter().filter(|e| e.name.ends_with(".layer_norm1.weight")).count();
    format!("vision_model.encoder.layers.{count}.")
}

fn is_unused_tower(name: &str, first_unused_layer: &str) -> bool {
    name.contains("vision_model.post_layernorm.") || name.contains(first_unused_layer)
}

fn load_image_encoder(file: &Path, model: &PrsMed) -> Result<LoadReport> {
    let (store, sizes) = (&model.stores().image_encoder, &model.config().encoder);
    let archive = Archive::open(file)?;
    let prefixed = archive.names().iter().any(|name| name.starts_with("image_encoder."));
    let prefix = if prefixed { "image_encoder." } else { "" };
    let mut own = targets(store, |name| Some(format!("{prefix}{name}")));
    archive.load(&mut own, |name| {
        let bare = name.strip_prefix("image_encoder.").unwrap_or(name);
        sizes.is_unused(bare)
            || prefixed && ["sam.", "prompt_encoder.", "mask_decoder."].iter().any(|p| name.starts_with(p))
    })
}

/// The file of a part in a run folder: `.safetensors`, or `.pth` of the original code.
pub(crate) fn part_file(folder: &Path, part: &str) -> PathBuf {
    let own = folder.join(format!("{part}.safetensors"));
    if own.exists() { own } else { folder.join(format!("{part}.pth")) }
}

/// Sizes and settings of a folder written by the original code, from its shapes.
///
/// # Errors
/// [`Error::Config`] if no base can be found; [`Error::Weights`] for unreadable parts.
pub fn describe_published(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Description> {
    let base = overrides.base.clone().map_or_else(|| needs::base_of_adapter(folder), Ok)?;
    let semantics = overrides.semantics.unwrap_or(Semantics::Reference);
    let lora = adapters::published_sizes(folder)?;
    let weights = Archive::open(&part_file(folder, MASK_HEAD))?;
    let (decoder, options) = mask_head::Config::of_weights(&weights, semantics.drops_attention())?;
    let model = ModelConfig {
        semantics,
        image_size: 1024,
        base,
        vision_tower: overrides.vision_tower.clone().unwrap_or_default(),
        image_encoder: RANDOM.into(),
        batch_norm: BatchNorm::Batch,
        decoder: options.version,
        decoder_dropout: options.dropout,
        max_text_tokens: 512,
        ..ModelConfig::default()
    };
    let Parts { family, tower, llm } = Found::locate(&model, build)?.base_sizes()?.expect("a base was given");
    let num_classes = i64::try_from(REFERENCE_CLASSES.len()).expect("six");
    check_class_head(&part_file(folder, "cls"), num_classes)?;
    let sizes = prsmed::Config {
        family,
        tower,
        llm,
        lora,
        encoder: known::published(),
        decoder,
        num_classes,
        mask_reader: None,
    };
    check_sizes(&model, &sizes).map_err(|error| {
        let hint = "give the base that the run was trained on with the argument `base`, or download the folder again";
        Error::weights(folder, error.to_string(), hint)
    })?;
    let modalities = REFERENCE_CLASSES.iter().map(|m| (*m).to_owned()).collect();
    let pixels = pixels(&model, &sizes);
    Ok(Description::new(model, sizes, modalities, pixels))
}

/// Refuses a class head that does not have one class for each name. Old published folders have no class head.
fn check_class_head(file: &Path, num_classes: i64) -> Result<()> {
    if !file.exists() {
        return Ok(());
    }
    let hint = "use a `cls.pth` of PRS-Med";
    let [stored] = Archive::open(file)?.shape("2.bias", hint)?;
    if stored == num_classes {
        return Ok(());
    }
    let reason = format!("has {stored} classes, and the names of {num_classes} are known");
    Err(Error::weights(file, reason, hint))
}

/// Loads `model` from a checkpoint folder and the base that it names.
///
/// # Errors
/// [`Error::Weights`] listing the first keys that do not fit.
pub fn load_run(folder: &Path, description: &Description, model: &PrsMed, build: Build) -> Result<Vec<String>> {
    let mut warnings = load_run_without_classes(folder, description, model, build)?;
    load_class_head(folder, model, build.allow_partial, &mut warnings)?;
    load_mask_reader(folder, model, build.allow_partial, &mut warnings)?;
    Ok(warnings)
}

/// As [`load_run`], without the class head.
///
/// # Errors
/// As [`load_run`].
pub(crate) fn load_run_without_classes(
    folder: &Path,
    description: &Description,
    model: &PrsMed,
    build: Build,
) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let (base, tower) = base_of(folder, description, build)?;
    let report = load_base(&base, tower.as_deref(), model, build.cache, &mut warnings)?;
    settle(report, &base, build.allow_partial, &mut warnings)?;
    load_segmenter(folder, model, build.allow_partial, &mut warnings)?;
    Ok(warnings)
}

/// Folder of a checkpoint's language model (its own `base/`, else the one that it names), and of a separate tower.
///
/// # Errors
/// [`Error::Weights`] and [`Error::Hub`] if it cannot be found.
pub(crate) fn base_of(folder: &Path, description: &Description, build: Build) -> Result<(PathBuf, Option<PathBuf>)> {
    let own_base = folder.join("base");
    if own_base.is_dir() {
        return Ok((own_base, None));
    }
    let config = ModelConfig { image_encoder: RANDOM.into(), ..description.model.clone() };
    let found = Found::locate(&config, build)?;
    let base = found.base.ok_or_else(|| {
        let hint = "copy the whole checkpoint folder, or give the argument `base`";
        Error::weights(folder, "its base had random weights and `base/` is missing", hint)
    })?;
    Ok((base, found.tower))
}

/// Loads adapters, encoder, decoder and class head (which old published folders lack).
///
/// # Errors
/// [`Error::Weights`] listing the first keys that do not fit.
pub fn load_parts(folder: &Path, model: &PrsMed, allow_partial: bool, warnings: &mut Vec<String>) -> Result<()> {
    load_segmenter(folder, model, allow_partial, warnings)?;
    load_class_head(folder, model, allow_partial, warnings)?;
    load_mask_reader(folder, model, allow_partial, warnings)
}

/// Loads adapters (if the model has any), encoder and decoder.
fn load_segmenter(folder: &Path, model: &PrsMed, allow_partial: bool, warnings: &mut Vec<String>) -> Result<()> {
    let stores = model.stores();
    let prsmed::Config { lora, family, .. } = model.config();
    if let Some(report) = adapters::load(folder, &stores.lora_adapter, *lora, &family.keys)? {
        settle(report, &folder.join(ADAPTER), allow_partial, warnings)?;
    }
    let encoder = part_file(folder, "image_encoder");
    settle(load_image_encoder(&encoder, model)?, &encoder, allow_partial, warnings)?;
    load_part(&part_file(folder, MASK_HEAD), &stores.mask_head, allow_partial, warnings)
}

fn load_class_head(folder: &Path, model: &PrsMed, allow_partial: bool, warnings: &mut Vec<String>) -> Result<()> {
    let file = part_file(folder, "cls");
    if !file.exists() && is_published(folder) {
        warnings.push(format!("{}: no class head; its output is not meaningful", folder.display()));
        return Ok(());
    }
    load_part(&file, &model.stores().cls, allow_partial, warnings)
}

/// Loads the reader of masks of a model that has one.
///
/// # Errors
/// [`Error::Weights`] listing the first keys that do not fit.
pub(crate) fn load_mask_reader(
    folder: &Path,
    model: &PrsMed,
    allow_partial: bool,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let Some(store) = &model.stores().mask_reader else { return Ok(()) };
    load_part(&part_file(folder, MASK_READER), store, allow_partial, warnings)
}

fn load_part(file: &Path, store: &Store, allow_partial: bool, warnings: &mut Vec<String>) -> Result<()> {
    let report = Archive::open(file)?.load(&mut targets(store, |n| Some(n.to_owned())), |_| false)?;
    settle(report, file, allow_partial, warnings)
}

/// Loads the rows of a checkpoint's class head that `rows` names, one for each class of the model; `None` keeps the
/// row. Old published folders have no class head: then all rows stay.
///
/// # Errors
/// [`Error::Weights`] for a class head of another shape.
pub(crate) fn load_classes(folder: &Path, model: &PrsMed, rows: &[Option<usize>]) -> Result<()> {
    let file = part_file(folder, "cls");
    if !file.exists() && is_published(folder) {
        return Ok(());
    }
    let archive = Archive::open(&file)?;
    for entry in model.stores().cls.entries() {
        let stored = archive.read(&entry.name)?;
        for (class, row) in rows.iter().enumerate() {
            let Some(row) = row else { continue };
            let [class, row] = [class, *row].map(|index| i64::try_from(index).expect("a few classes"));
            if row >= stored.size()[0] || stored.size()[1..] != entry.tensor.size()[1..] {
                let reason = format!("`{}` has the shape {:?}", entry.name, stored.size());
                return Err(Error::weights(&file, reason, "use a complete run folder"));
            }
            no_grad(|| entry.tensor.get(class).copy_(&stored.get(row)));
        }
    }
    Ok(())
}

/// Loads the base of a run that trains it, or that started it from random weights.
///
/// # Errors
/// [`Error::Weights`] listing the first keys that do not fit.
pub fn load_own_base(folder: &Path, model: &PrsMed) -> Result<()> {
    let base = folder.join("base");
    // layers that the ranks divide were read with the model
    if base.is_dir() && !model.is_divided() {
        load_base(&base, None, model, None, &mut Vec::new())?.into_result(&base)?;
    }
    Ok(())
}

/// Writes a checkpoint folder: adapters for Python's `peft`, the other parts as safetensors, tokenizer, `description`.
///
/// # Errors
/// [`Error::Io`].
pub fn save(folder: &mut Staged, loaded: &LoadedModel, description: &Description) -> Result<()> {
    let LoadedModel { model, tokenizer, known_questions, known_images, .. } = loaded;
    if let Some(questions) = known_questions {
        folder.write_bytes(QUESTIONS_FILE, questions.to_json().as_bytes())?;
    }
    if let Some(images) = known_images {
        folder.write_bytes(IMAGES_FILE, images.to_json().as_bytes())?;
    }
    let random_base = description.model.base == RANDOM;
    save_tensors(folder, model, random_base)?;
    let json = |value: &serde_json::Value| serde_json::to_vec_pretty(value).expect("plain values serialise");
    let llm = base_config(description);
    if random_base {
        folder.write_bytes("base/config.json", &json(&llm))?;
    }
    folder.write_bytes("base.json", &json(&llm))?;
    folder.write_bytes(ADAPTER_CONFIG, &json(&adapter_config(description)))?;
    folder.write_bytes(DESCRIPTION, &serde_json::to_vec_pretty(description).expect("plain values serialise"))?;
    for (name, text) in tokenizer.files()? {
        folder.write_bytes(&format!("tokenizer/{name}"), text.as_bytes())?;
    }
    Ok(())
}

/// Writes the tensors of a checkpoint folder; those of the base only if they exist nowhere else.
pub(crate) fn save_tensors(folder: &mut Staged, model: &PrsMed, with_base: bool) -> Result<()> {
    let _category = ledger::enter(ledger::Category::Workspace);
    let stores = model.stores();
    let mut write = |name: &str, store: &Store| {
        let entries = store.entries();
        let tensors: Vec<(&str, &Tensor)> = entries.iter().map(|e| (e.name.as_str(), &e.tensor)).collect();
        folder.write_tensors(name, &tensors, &BTreeMap::new())
    };
    write(ADAPTER, &stores.lora_adapter)?;
    write("image_encoder.safetensors", &stores.image_encoder)?;
    write(&format!("{MASK_HEAD}.safetensors"), &stores.mask_head)?;
    write("cls.safetensors", &stores.cls)?;
    if let Some(reader) = &stores.mask_reader {
        write(&format!("{MASK_READER}.safetensors"), reader)?;
    }
    if with_base {
        write("base/model.safetensors", &stores.base)?;
    }
    Ok(())
}

/// The language model's `config.json` for transformers.
pub(crate) fn base_config(description: &Description) -> serde_json::Value {
    let sizes = &description.sizes;
    let mut json = (sizes.family.write)(&sizes.llm);
    if description.model.quantization != Quantization::None {
        json["quantization_config"] = serde_json::json!({
            "quant_method": "bitsandbytes",
            "load_in_4bit": true,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": description.model.quantization == Quantization::Nf4Double,
            "bnb_4bit_quant_storage": "uint8",
        });
    }
    json["vision_config"] = serde_json::to_value(&sizes.tower).expect("plain numbers serialise");
    json
}

/// `adapter_config.json` for Python's `peft`. Its pattern matches the language model only, not the vision tower.
fn adapter_config(description: &Description) -> serde_json::Value {
    let lora = description.sizes.lora;
    let (base, revision) = needs::peft_base(&description.model.base);
    serde_json::json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": description.sizes.family.keys.adapted,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "modules_to_save": null,
    })
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
