//! Architectures of models that can be read, by their `config.json` and by the keys of their weights.
//!
//! A language model has one tokenizer and one prompt template, PRS-Med's (`data::text`). Models that expect another
//! template are refused: Vicuna in LLaVA-1.5 by its architecture, Zephyr by the chat template of its tokenizer.

use super::config::{ModelConfig, RANDOM};
use super::needs::LLAVA_MED;
use crate::hub::Spec;
use crate::models::prsmed::TOWER_PREFIX;
use crate::models::{clip, mistral};
use crate::tensor::weights::{Archive, read_config};
use crate::{Error, Result, files};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

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

/// Folders with the `config.json` of repositories on the hub that this process has read, by spec.
static CONFIGS: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());

/// The folder with the `config.json` of `spec`, if [`check_parts`] has read it.
pub(super) fn config_folder(spec: &str) -> Option<PathBuf> {
    CONFIGS.lock().unwrap_or_else(PoisonError::into_inner).get(spec).cloned()
}

/// Reads the `config.json` of parts, of those on the hub with `fetch`, and the keys of an image encoder on this machine. Weights are
/// not downloaded. Returns a warning for each `config.json` that could not be read. The configs of [`LLAVA_MED`] and
/// TinySAM are known.
///
/// # Errors
/// [`Error::Config`] for an architecture that is not supported.
pub fn check_parts(model: &ModelConfig, fetch: &dyn Fn(&str) -> Result<PathBuf>) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let parts = [
        ("model.base", &model.base, LLAVA_MED, "LLaVA-Med v1.5"),
        ("model.vision_tower", &model.vision_tower, "", "CLIP ViT-L/14-336"),
        ("model.image_encoder", &model.image_encoder, TINY_SAM, "TinyViT"),
    ];
    for (key, spec, default, of) in parts {
        let is_default = !default.is_empty() && spec.split('@').next() == Some(default);
        if spec.is_empty() || spec == RANDOM || is_default || config_folder(spec).is_some() {
            continue;
        }
        let named = |error: Error| {
            let (hint, text) = (error.hint(), error.to_string());
            let reason = if let Error::Weights { reason, .. } = error { reason } else { text };
            Error::config(key, format!("`{spec}`: {reason}"), hint)
        };
        let is_encoder = key == "model.image_encoder";
        let check = |folder: &Path| {
            let checked = match key {
                "model.base" => llm_config(folder).map(drop),
                "model.vision_tower" => tower_config(folder).map(drop),
                _ => check_encoder_config(folder),
            };
            checked.map_err(named)
        };
        let source = match Spec::parse(spec)? {
            Spec::Hub(source) => source,
            Spec::Local(path) => {
                if is_encoder && path.exists() {
                    check_encoder(&Archive::open(&single_file(&path)?)?).map_err(named)?;
                } else if is_encoder {
                    warnings.extend(encoder_by_name(spec)?);
                } else if path.join("config.json").is_file() {
                    check(&path)?;
                }
                continue;
            }
        };
        let folder = match fetch(&if is_encoder { source.with_inside("") } else { source }.to_string()) {
            Ok(folder) => folder,
            // repositories of TinySAM have none, and nothing else can be read
            Err(_) if is_encoder => {
                warnings.extend(encoder_by_name(spec)?);
                continue;
            }
            Err(error) => {
                base_by_name(key, spec)?;
                let text =
                    format!("the `config.json` of `{spec}` could not be read: memory and times are those of {of}");
                warnings.push(format!("{text} ({error})"));
                continue;
            }
        };
        check(&folder)?;
        if !is_encoder {
            CONFIGS.lock().unwrap_or_else(PoisonError::into_inner).insert(spec.clone(), folder);
        }
    }
    Ok(warnings)
}

/// Refuses a `config.json` of none of the architectures in `known`. One that names no architecture is accepted.
fn check_architecture(json: &Value, path: &Path, known: &Known, hint: &str) -> Result<()> {
    let named: Vec<&str> =
        json.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let kind = json.get("model_type").and_then(Value::as_str);
    let (is_known, name) = match (named.first(), kind) {
        (Some(first), _) => (named.iter().any(|name| known.iter().any(|(own, _)| own == name)), *first),
        (None, Some(kind)) => (known.iter().any(|(_, own)| *own == kind), kind),
        (None, None) => return Ok(()),
    };
    if is_known {
        return Ok(());
    }
    let supported: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    Err(Error::weights(path, format!("{name} is not supported; supported: {}", supported.join(", ")), hint))
}

/// Refuses a value of `json` that the program would not compute with. Absent and null values are accepted.
fn check_value(json: &Value, path: &Path, key: &str, is_known: impl Fn(&Value) -> bool) -> Result<()> {
    match json.get(key) {
        Some(value) if !value.is_null() && !is_known(value) => {
            Err(Error::weights(path, format!("`{key}` = {value} is not supported"), "use another model"))
        }
        _ => Ok(()),
    }
}

/// Sizes of the language model in `folder`, from its `config.json`.
pub(super) fn llm_config(folder: &Path) -> Result<mistral::Config> {
    let path = folder.join("config.json");
    let json = read_config(&path, CONFIG_HINT)?;
    let hint = format!("use `{LLAVA_MED}`, or a model that was trained from it");
    check_architecture(&json, &path, LANGUAGE_MODELS, &hint)?;
    let config: mistral::Config =
        serde_json::from_value(json.clone()).map_err(|error| Error::weights(&path, error.to_string(), CONFIG_HINT))?;
    check_value(&json, &path, "rope_scaling", |_| false)?;
    check_value(&json, &path, "hidden_act", |value| value == "silu")?;
    let head_dim = config.hidden_size.checked_div(config.num_attention_heads);
    check_value(&json, &path, "head_dim", |value| value.as_i64() == head_dim)?;
    // LLaVA has its own prompt templates, and does not use that of the tokenizer
    if check_architecture(&json, &path, &LANGUAGE_MODELS[1..], "").is_ok() {
        check_chat_template(folder)?;
    }
    Ok(config)
}

/// Refuses a language model whose chat template does not have the markers of the prompts that the program writes. A
/// folder without a chat template is accepted.
fn check_chat_template(folder: &Path) -> Result<()> {
    // transformers prefers this file; a damaged `tokenizer_config.json` is an error of the tokenizer
    let jinja = || {
        let name = "chat_template.jinja";
        Some((name, files::read_to_string(&folder.join(name), files::MAX_SETTINGS).ok()?))
    };
    let of_tokenizer = || {
        let name = "tokenizer_config.json";
        let json = read_config(&folder.join(name), CONFIG_HINT).ok()?;
        // a template, or a list of named ones
        let template = json.get("chat_template").filter(|template| !template.is_null())?;
        Some((name, template.to_string()))
    };
    let Some((name, text)) = jinja().or_else(of_tokenizer) else { return Ok(()) };
    if text.contains("[INST]") {
        return Ok(());
    }
    let reason = format!(
        "the chat template in `{name}` does not contain `[INST]`: the model was trained with other prompts than \
         `[INST] ... [/INST]`, which prsmed writes"
    );
    Err(Error::weights(folder, reason, format!("use a base with `[INST]` in its chat template, or `{LLAVA_MED}`")))
}

/// Config of the vision tower in a CLIP repository, whose `config.json` may describe the text tower too.
pub(super) fn tower_config(folder: &Path) -> Result<clip::Config> {
    let path = folder.join("config.json");
    let hint = "use the repository of a CLIP vision tower";
    let mut json = read_config(&path, CONFIG_HINT)?;
    check_architecture(&json, &path, TOWERS, hint)?;
    if let Some(vision) = json.get_mut("vision_config") {
        json = vision.take();
    }
    check_value(&json, &path, "hidden_act", |value| value == "quick_gelu")?;
    serde_json::from_value(json).map_err(|error| Error::weights(path, error.to_string(), hint))
}

/// Sizes of the vision tower in the folder of a language model. If only its `config.json` was read from the hub, the
/// sizes of the tower that this names.
pub(super) fn tower_of(base: &Path) -> Result<clip::Config> {
    let archive = Archive::open(base);
    let is_config_of_hub = || {
        let configs = CONFIGS.lock().unwrap_or_else(PoisonError::into_inner);
        configs.values().any(|folder| folder == base)
    };
    if archive.is_err() && is_config_of_hub() {
        let json = read_config(&base.join("config.json"), CONFIG_HINT)?;
        return Ok(named_tower(&json));
    }
    tower_sizes(&archive?)
}

/// The vision tower that the `config.json` of a language model describes or names; else that of LLaVA-Med.
fn named_tower(json: &Value) -> clip::Config {
    let described = json.get("vision_config").and_then(|vision| serde_json::from_value(vision.clone()).ok());
    described.unwrap_or_else(|| {
        let published = clip::Config::vit_l_14_336();
        let name = json.get("mm_vision_tower").and_then(Value::as_str).unwrap_or_default();
        let image_size = if name.ends_with("clip-vit-large-patch14") { 224 } else { published.image_size };
        clip::Config { image_size, ..published }
    })
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

/// Sizes of the vision tower inside LLaVA's shards, from tensor shapes: LLaVA's `config.json` does not describe it.
/// Heads are 64 wide in every CLIP.
fn tower_sizes(archive: &Archive) -> Result<clip::Config> {
    let name = |key: &str| format!("{TOWER_PREFIX}vision_model.{key}");
    let hint = "give the CLIP repository as `model.vision_tower` (`--vision-tower`)";
    let [hidden_size, _, patch_size, _] = shape_of(archive, &name("embeddings.patch_embedding.weight"), hint)?;
    let [positions, _] = shape_of(archive, &name("embeddings.position_embedding.weight"), hint)?;
    let has_layer = |i: &usize| archive.contains(&name(&format!("encoder.layers.{i}.layer_norm1.weight")));
    let layers = (0..MOST_LAYERS).take_while(has_layer).count();
    // a 4-bit matrix has another shape, its bias does not
    let [intermediate_size] = shape_of(archive, &name("encoder.layers.0.mlp.fc1.bias"), hint)?;
    let patches = (positions - 1).max(0);
    let side = patches.isqrt() + i64::from(patches.isqrt().pow(2) < patches);
    Ok(clip::Config {
        hidden_size,
        intermediate_size,
        num_hidden_layers: i64::try_from(layers).expect("a few layers"),
        num_attention_heads: (hidden_size / 64).max(1),
        image_size: side.saturating_mul(patch_size),
        patch_size,
        layer_norm_eps: 1e-5,
        initializer_range: 0.02,
    })
}

/// Refuses weights that are not those of a language model of these sizes, before memory for them is asked for.
pub(super) fn check_llm_weights(folder: &Path, llm: &mistral::Config) -> Result<()> {
    let archive = Archive::open(folder)?;
    let hint = "download the model again; its weights and its `config.json` must belong together";
    let embeddings = "model.embed_tokens.weight";
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
