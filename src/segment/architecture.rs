//! Architectures of models that can be read, by their `config.json` and by the keys of their weights.
//!
//! A language model has one tokenizer and one prompt template, PRS-Med's (`data::text`), which its adapters learn. The
//! chat template of its tokenizer is not used.

use super::base_config::Fields;
use super::config::{ModelConfig, RANDOM};
use super::needs::LLAVA_MED;
use super::weights::{EMBEDDING, Found};
use crate::hub::Spec;
use crate::models::prsmed::TOWER_PREFIX;
use crate::models::{clip, mistral};
use crate::tensor::weights::{Archive, read_config};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(super) const CONFIG_HINT: &str = "use the `config.json` of the model's own repository";
/// More layers than any published vision tower has.
const MOST_LAYERS: usize = 1000;

/// `architectures` of a `config.json`, and the `model_type` that belongs to it.
type Known = [(&'static str, &'static str)];

/// Language models that can be read.
const LANGUAGE_MODELS: &Known = &[("LlavaMistralForCausalLM", "llava_mistral"), ("MistralForCausalLM", "mistral")];
/// Vision towers that can be read.
const TOWERS: &Known = &[
    ("CLIPModel", "clip"),
    ("CLIPVisionModel", "clip_vision_model"),
    ("CLIPVisionModelWithProjection", "clip_vision_model"),
];
/// The image encoder of the default settings.
const TINY_SAM: &str = "hub:merve/tinysam";

/// Folders with the `config.json` of parts that were read, by spec. Those of parts on the hub have no weights.
pub type Configs = BTreeMap<String, PathBuf>;

/// Reads the `config.json` of parts, of those on the hub with `fetch`, and the keys of an image encoder on this machine.
/// Weights are not downloaded. Adds the folders to `configs`; parts that it has are not read again. Returns warnings: a
/// `config.json` that could not be read, fields and templates that are not used. The configs of [`LLAVA_MED`] and TinySAM
/// are known.
///
/// # Errors
/// [`Error::Config`] for an architecture that is not supported.
pub fn check_parts(
    model: &ModelConfig,
    configs: &mut Configs,
    fetch: &dyn Fn(&str) -> Result<PathBuf>,
) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    for (key, spec, default) in [
        ("model.base", &model.base, LLAVA_MED),
        ("model.vision_tower", &model.vision_tower, ""),
        ("model.image_encoder", &model.image_encoder, TINY_SAM),
    ] {
        let is_default = !default.is_empty() && spec.split('@').next() == Some(default);
        if spec.is_empty() || spec == RANDOM || is_default || configs.contains_key(spec) {
            continue;
        }
        let found = if key == "model.image_encoder" {
            find_encoder(spec, fetch, &mut warnings)?
        } else {
            find_config(key, spec, fetch, &mut warnings)?
        };
        let Some(folder) = found else { continue };
        let checked = match key {
            "model.base" => check_base(&folder),
            "model.vision_tower" => check_tower(&folder),
            _ if folder.join("config.json").is_file() => check_encoder_config(&folder).map(|()| Vec::new()),
            _ => single_file(&folder).and_then(|file| check_encoder(&Archive::open(&file)?)).map(|()| Vec::new()),
        };
        let notes = checked.map_err(|error| {
            let (hint, text) = (error.hint(), error.to_string());
            let reason = if let Error::Weights { reason, .. } = error { reason } else { text };
            Error::config(key, format!("`{spec}`: {reason}"), hint)
        })?;
        warnings.extend(notes.into_iter().map(|note| format!("`{key}`: `{spec}`: {note}")));
        configs.insert(spec.clone(), folder);
    }
    // problems of the weights are errors of their own
    if let Ok(found) = Found::local(model, configs)
        && let Ok(Some((clip, _))) = found.base_sizes()
    {
        found.check_length(&clip, model.max_text_tokens)?;
    }
    Ok(warnings)
}

/// The folder with the `config.json` of a language model or a vision tower. Those that cannot be read are judged by
/// their name.
fn find_config(
    key: &str,
    spec: &str,
    fetch: &dyn Fn(&str) -> Result<PathBuf>,
    warnings: &mut Vec<String>,
) -> Result<Option<PathBuf>> {
    let source = match Spec::parse(spec)? {
        Spec::Local(path) => return Ok(Some(path).filter(|path| path.join("config.json").is_file())),
        Spec::Hub(source) => source.to_string(),
    };
    let error = match fetch(&source) {
        Ok(folder) => return Ok(Some(folder)),
        Err(error) => error,
    };
    base_by_name(key, spec)?;
    let of = if key == "model.base" { "LLaVA-Med v1.5" } else { "CLIP ViT-L/14-336" };
    let text = format!("the `config.json` of `{spec}` could not be read: memory and times are those of {of}");
    warnings.push(format!("{text} ({error})"));
    Ok(None)
}

/// The file or folder of an image encoder on this machine, or the folder with its `config.json`. Repositories of TinySAM have
/// none: those without are judged by their name.
fn find_encoder(
    spec: &str,
    fetch: &dyn Fn(&str) -> Result<PathBuf>,
    warnings: &mut Vec<String>,
) -> Result<Option<PathBuf>> {
    let found = match Spec::parse(spec)? {
        Spec::Local(path) => Some(path).filter(|path| path.exists()),
        Spec::Hub(source) => fetch(&source.with_inside("").to_string()).ok(),
    };
    if found.is_none() {
        warnings.extend(encoder_by_name(spec)?);
    }
    Ok(found)
}

/// Refuses fields of none of the architectures in `known`. A `config.json` that names no architecture is accepted.
fn check_architecture(fields: &Fields, known: &Known, hint: &str) -> Result<()> {
    let named = fields.get("architectures").and_then(Value::as_array);
    let named: Vec<&str> = named.into_iter().flatten().filter_map(Value::as_str).collect();
    let (is_known, name) = match (named.first(), fields.text("model_type")) {
        (Some(first), _) => (named.iter().any(|name| known.iter().any(|(own, _)| own == name)), *first),
        (None, Some(kind)) => (known.iter().any(|(_, own)| *own == kind), kind),
        (None, None) => return Ok(()),
    };
    if is_known {
        return Ok(());
    }
    let supported: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    Err(Error::weights(fields.path(), format!("{name} is not supported; supported: {}", supported.join(", ")), hint))
}

/// The fields of the language model in `folder`, all of which the program follows or does not know.
pub(super) fn language_model(folder: &Path) -> Result<Fields> {
    let fields = Fields::read(folder)?;
    let hint = format!("use `{LLAVA_MED}`, or a model that was trained from it");
    check_architecture(&fields, LANGUAGE_MODELS, &hint)?;
    fields.of_language_model()
}

/// Checks the `config.json` of a language model; returns what the program does not use of it.
fn check_base(folder: &Path) -> Result<Vec<String>> {
    let fields = language_model(folder)?;
    fields.llm()?;
    // LLaVA has its own prompt templates too
    let is_llava = check_architecture(&fields, &LANGUAGE_MODELS[1..], "").is_err();
    let template = if is_llava { None } else { chat_template(folder) };
    let note = |name| format!("the chat template in `{name}` is not used: the adapters learn PRS-Med's own prompts");
    Ok(fields.unknown().into_iter().chain(template.map(note)).collect())
}

/// The file with the chat template of a language model that needs other markers than `### User:`.
fn chat_template(folder: &Path) -> Option<&'static str> {
    // transformers prefers this file; a damaged `tokenizer_config.json` is an error of the tokenizer
    let (jinja, tokenizer) = ("chat_template.jinja", "tokenizer_config.json");
    if folder.join(jinja).is_file() {
        return Some(jinja);
    }
    let json = read_config(&folder.join(tokenizer), CONFIG_HINT).ok()?;
    json.get("chat_template").filter(|template| !template.is_null()).map(|_| tokenizer)
}

const TOWER_HINT: &str = "use the repository of a CLIP vision tower";

/// Checks the `config.json` of a vision tower; returns what the program does not know of it.
fn check_tower(folder: &Path) -> Result<Vec<String>> {
    tower_config(folder)?;
    Ok(Fields::read(folder)?.unknown_of_tower()?.into_iter().collect())
}

/// Config of the vision tower in a CLIP repository, whose `config.json` may describe the text tower too.
pub(super) fn tower_config(folder: &Path) -> Result<clip::Config> {
    let fields = Fields::read(folder)?;
    check_architecture(&fields, TOWERS, TOWER_HINT)?;
    fields.tower(TOWER_HINT)
}

/// Sizes of the vision tower in the folder of a language model with these fields. With `without_weights`, those of the
/// tower that the fields describe or name.
pub(super) fn tower_of(base: &Path, fields: &Fields, without_weights: bool) -> Result<clip::Config> {
    let described = fields.tower_section().map(|section| section.tower(CONFIG_HINT)).transpose()?;
    if described.is_none() {
        check_tower_name(fields)?;
    }
    if without_weights {
        return Ok(described.unwrap_or_else(|| named_tower(fields)));
    }
    tower_sizes(&Archive::open(base)?, described)
}

/// Names of towers whose heads and activation are those of the published CLIP.
fn is_published_tower(name: &str) -> bool {
    let last = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_lowercase();
    ["clip-vit-base-patch", "clip-vit-large-patch"].iter().any(|known| last.starts_with(known))
        || name.to_lowercase().contains("sharegpt4v")
}

/// Refuses a tower inside a language model whose name says that it is another one than CLIP's: its shapes do not say
/// how it is computed.
fn check_tower_name(fields: &Fields) -> Result<()> {
    match fields.text("mm_vision_tower") {
        Some(name) if !is_published_tower(name) => {
            let reason = format!("`mm_vision_tower` = \"{name}\" is not known, and no `vision_config` describes it");
            let hint = "give the repository of this tower as `model.vision_tower` (`--vision-tower`)";
            Err(Error::weights(fields.path(), reason, hint))
        }
        _ => Ok(()),
    }
}

/// The vision tower that the fields of a language model name; else that of LLaVA-Med.
fn named_tower(fields: &Fields) -> clip::Config {
    let large = clip::Config::vit_l_14_336();
    let name = fields.text("mm_vision_tower").unwrap_or_default().to_lowercase();
    if let Some((_, patch_size)) = name.split_once("clip-vit-base-patch") {
        let (hidden_size, layers, heads) = (768, 12, 12);
        return clip::Config {
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            image_size: 224,
            patch_size: if patch_size.starts_with("16") { 16 } else { 32 },
            ..large
        };
    }
    let image_size = if name.ends_with("clip-vit-large-patch14") { 224 } else { large.image_size };
    clip::Config { image_size, ..large }
}

/// The shape of a tensor with `N` dimensions.
pub(super) fn shape_of<const N: usize>(archive: &Archive, name: &str, hint: &str) -> Result<[i64; N]> {
    let Some(info) = archive.info(name) else {
        return Err(Error::weights(archive.path(), format!("`{name}` is missing"), hint));
    };
    info.shape.as_slice().try_into().map_err(|_| {
        let reason = format!("`{name}` has the shape {:?}, expected {N} dimensions", info.shape);
        Error::weights(archive.path(), reason, hint)
    })
}

/// Sizes of the vision tower inside a language model, from tensor shapes, and what `described` says beside them. LLaVA's
/// `config.json` does not describe its tower, a CLIP of OpenAI, whose heads are 64 wide.
fn tower_sizes(archive: &Archive, described: Option<clip::Config>) -> Result<clip::Config> {
    let name = |key: &str| format!("{TOWER_PREFIX}vision_model.{key}");
    let hint = "give the CLIP repository as `model.vision_tower` (`--vision-tower`)";
    let [hidden_size, _, patch_size, _] = shape_of(archive, &name("embeddings.patch_embedding.weight"), hint)?;
    let [positions, _] = shape_of(archive, &name("embeddings.position_embedding.weight"), hint)?;
    let has_layer = |i: &usize| archive.contains(&name(&format!("encoder.layers.{i}.layer_norm1.weight")));
    let layers = i64::try_from((0..MOST_LAYERS).take_while(has_layer).count()).expect("a few layers");
    // a 4-bit matrix has another shape, its bias does not
    let [intermediate_size] = shape_of(archive, &name("encoder.layers.0.mlp.fc1.bias"), hint)?;
    let patches = (positions - 1).max(0);
    let side = patches.isqrt() + i64::from(patches.isqrt().pow(2) < patches);
    let image_size = side.saturating_mul(patch_size);
    let Some(described) = described else {
        return Ok(clip::Config {
            hidden_size,
            intermediate_size,
            num_hidden_layers: layers,
            num_attention_heads: (hidden_size / 64).max(1),
            image_size,
            patch_size,
            ..clip::Config::vit_l_14_336()
        });
    };
    let pairs = [
        ("hidden_size", described.hidden_size, hidden_size),
        ("intermediate_size", described.intermediate_size, intermediate_size),
        ("image_size", described.image_size, image_size),
        ("patch_size", described.patch_size, patch_size),
        // the last layer is not used, and a run does not store it
        (
            "num_hidden_layers",
            described.num_hidden_layers,
            layers + i64::from(layers + 1 == described.num_hidden_layers),
        ),
    ];
    match pairs.into_iter().find(|(_, stated, stored)| stated != stored) {
        None => Ok(described),
        Some((key, stated, stored)) => {
            let reason =
                format!("`vision_config.{key}` = {stated} in its `config.json`, and its weights have {stored}");
            Err(Error::weights(
                archive.path(),
                reason,
                "weights and `config.json` must belong together: download both again",
            ))
        }
    }
}

/// Refuses weights that are not those of a language model of these sizes, before memory for them is asked for.
pub(super) fn check_llm_weights(folder: &Path, llm: &mistral::Config) -> Result<()> {
    let archive = Archive::open(folder)?;
    let hint = "download the model again; its weights and its `config.json` must belong together";
    let embeddings = EMBEDDING;
    let shape: [i64; 2] = shape_of(&archive, embeddings, hint)?;
    if shape != [llm.vocab_size, llm.hidden_size] {
        let expected = [llm.vocab_size, llm.hidden_size];
        let reason = format!("`{embeddings}` has the shape {shape:?}, `config.json` says {expected:?}");
        return Err(Error::weights(folder, reason, hint));
    }
    let last = format!("model.layers.{}.input_layernorm.weight", llm.num_hidden_layers - 1);
    shape_of::<1>(&archive, &last, hint).map(drop)
}

const ENCODER_HINT: &str = "use `hub:merve/tinysam`, or a file of TinySAM or MobileSAM";

fn other_encoder(path: &Path, kind: &str) -> Error {
    Error::weights(path, format!("this is {kind}; only TinyViT (TinySAM, MobileSAM) can be read"), ENCODER_HINT)
}

/// Refuses an image encoder that cannot be read if its name is that of another one; else a warning, unless the name is that
/// of a supported one.
fn encoder_by_name(spec: &str) -> Result<Option<String>> {
    let name = spec.rsplit(['/', '\\']).next().unwrap_or(spec).to_lowercase().replace(['_', '.'], "-");
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    if has(&["tinysam", "tiny-sam", "tinyvit", "tiny-vit", "mobile"]) {
        return Ok(None);
    }
    if has(&["sam-vit", "medsam", "sam2", "sam-2", "sam-med", "sam-hq"]) {
        let reason = format!("`{spec}` is by its name another SAM; only TinyViT (TinySAM, MobileSAM) can be read");
        return Err(Error::config("model.image_encoder", reason, ENCODER_HINT));
    }
    let text = "cannot be read here: it is planned as TinyViT, which it must be";
    Ok(Some(format!("`model.image_encoder`: `{spec}` {text}")))
}

/// Refuses a language model whose `config.json` cannot be read, if its name is that of an architecture that is not supported.
fn base_by_name(key: &str, spec: &str) -> Result<()> {
    const OTHERS: [&str; 12] = [
        "qwen", "gemma", "vicuna", "llava-v1-5", "llava-1-5", "onevision", "llama", "internvl", "phi-", "idefics",
        "pixtral", "deepseek",
    ];
    let name = spec.rsplit('/').next().unwrap_or(spec).to_lowercase().replace(['_', '.'], "-");
    let Some(other) = OTHERS.iter().find(|other| name.contains(**other)) else { return Ok(()) };
    if key != "model.base" || name.contains("mistral") {
        return Ok(());
    }
    let supported: Vec<&str> = LANGUAGE_MODELS.iter().map(|(name, _)| *name).collect();
    let reason = format!(
        "`{spec}` is by its name (`{}`) not supported; supported: {}",
        other.trim_end_matches('-'),
        supported.join(", ")
    );
    let hint = "use LLaVA-Med v1.5; if the name misleads, give a local folder, whose `config.json` decides";
    Err(Error::config(key, reason, hint))
}

/// Name of SAM's encoder of this width.
fn sam_of(width: Option<i64>) -> String {
    match width {
        Some(768) => "SAM ViT-B".to_owned(),
        Some(1024) => "SAM ViT-L".to_owned(),
        Some(1280) => "SAM ViT-H".to_owned(),
        _ => "SAM with a ViT".to_owned(),
    }
}

/// Refuses the `config.json` of another SAM in `folder`.
fn check_encoder_config(folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    let json = read_config(&path, ENCODER_HINT)?;
    match json.get("model_type").and_then(Value::as_str) {
        Some("sam") => {
            // the width that transformers does not write is ViT-B's
            let width = json.pointer("/vision_config/hidden_size").map_or(Some(768), Value::as_i64);
            Err(other_encoder(&path, &sam_of(width)))
        }
        Some(kind) if kind.starts_with("sam") => Err(other_encoder(&path, &format!("`{kind}`"))),
        _ => Ok(()),
    }
}

/// Refuses weights of another image encoder than TinyViT, recognised by their keys.
pub(super) fn check_encoder(archive: &Archive) -> Result<()> {
    let first = "patch_embed.seq.0.c.weight";
    let has = |end: &str| archive.names().iter().any(|name| name.ends_with(end));
    if has(first) {
        return Ok(());
    }
    let width = || {
        let found = archive.names().iter().find(|name| name.ends_with("pos_embed"))?;
        archive.info(found)?.shape.last().copied()
    };
    let kind = if has("trunk.blocks.0.attn.qkv.weight") || has("backbone.blocks.0.attn.qkv.weight") {
        "SAM 2".to_owned()
    } else if has("blocks.0.attn.qkv.weight") || has("vision_encoder.layers.0.attn.qkv.weight") {
        sam_of(width())
    } else {
        format!("another network, without the key `{first}`")
    };
    Err(other_encoder(archive.path(), &kind))
}

/// A file, or the only weight file of a folder.
pub(super) fn single_file(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let entries = std::fs::read_dir(path).map_err(Error::io(path, "read"))?;
    let files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "pth" || e == "pt" || e == "safetensors"))
        .collect();
    match files.as_slice() {
        [file] => Ok(file.clone()),
        _ => Err(Error::weights(
            path,
            format!("contains {} weight files, expected one", files.len()),
            "name the TinySAM file itself, for example `tinysam.pth`",
        )),
    }
}

#[cfg(test)]
#[path = "architecture_tests.rs"]
mod tests;
