//! Checks the parts that the settings name before weights are downloaded: by their `config.json`, and by the keys of an
//! image encoder on this machine. What a language model may be is in its family's row (`models::base`).

use super::config::{ModelConfig, RANDOM};
use super::parts::{Configs, Found, UNREAD_HINT, single_file};
use crate::hub::Spec;
use crate::models::base::fields::CONFIG_HINT;
use crate::models::base::{self, Family, TowerFiles};
use crate::tensor::weights::{Archive, read_config};
use crate::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The image encoder of the default settings.
const TINY_SAM: &str = "hub:merve/tinysam";

/// Reads the `config.json` of parts, of those on the hub with `fetch`, and the keys of an image encoder on this machine.
/// Weights are not downloaded. Adds the folders to `configs`; parts that it has are not read again. Returns warnings: fields
/// and templates that are not used. Published parts whose sizes are known are not read.
///
/// # Errors
/// [`Error::Config`] for an architecture that is not supported, and for a `config.json` that cannot be read.
pub fn check_parts(
    model: &ModelConfig,
    configs: &mut Configs,
    fetch: &dyn Fn(&str) -> Result<PathBuf>,
) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    for (key, spec) in [
        ("model.base", &model.base),
        ("model.vision_tower", &model.vision_tower),
        ("model.image_encoder", &model.image_encoder),
    ] {
        let tower = family(model, configs).tower;
        let is_known = match key {
            "model.base" => base::published(spec).is_some(),
            "model.vision_tower" => (tower.published)(spec).is_some(),
            _ => spec.split('@').next() == Some(TINY_SAM),
        };
        if spec.is_empty() || spec == RANDOM || is_known || configs.contains_key(spec) {
            continue;
        }
        let found = if key == "model.image_encoder" {
            find_encoder(spec, fetch, &mut warnings)?
        } else {
            find_config(key, spec, fetch)?
        };
        let Some(folder) = found else { continue };
        let checked = match key {
            "model.base" => check_base(&folder),
            "model.vision_tower" => check_tower(&folder, tower),
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
        && let Ok(Some(parts)) = found.base_sizes()
    {
        found.check_length(parts.tower.max_tokens(), model.max_text_tokens)?;
    }
    Ok(warnings)
}

/// The folder with the `config.json` of a language model or a vision tower.
fn find_config(key: &str, spec: &str, fetch: &dyn Fn(&str) -> Result<PathBuf>) -> Result<Option<PathBuf>> {
    let source = match Spec::parse(spec)? {
        Spec::Local(path) => return Ok(Some(path).filter(|path| path.join("config.json").is_file())),
        Spec::Hub(source) => source.to_string(),
    };
    let unread = |error| {
        let reason = format!("the `config.json` of `{spec}`, which says what it is, cannot be read ({error})");
        Error::config(key, reason, UNREAD_HINT)
    };
    fetch(&source).map(Some).map_err(unread)
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

/// Checks the `config.json` of a language model; returns what the program does not use of it.
fn check_base(folder: &Path) -> Result<Vec<String>> {
    let (family, fields) = base::open(folder)?;
    (family.read)(&fields)?;
    let template = if fields.is_of(&family.architectures[1..]) { chat_template(folder) } else { None };
    let note = |name| format!("the chat template in `{name}` is not used: the adapters learn PRS-Med's own prompts");
    Ok(fields.unknown_beside(family.followed).into_iter().chain(template.map(note)).collect())
}

/// The file with the chat template of a language model's tokenizer.
fn chat_template(folder: &Path) -> Option<&'static str> {
    // transformers prefers this file; a damaged `tokenizer_config.json` is an error of the tokenizer
    let (jinja, tokenizer) = ("chat_template.jinja", "tokenizer_config.json");
    if folder.join(jinja).is_file() {
        return Some(jinja);
    }
    let json = read_config(&folder.join(tokenizer), CONFIG_HINT).ok()?;
    json.get("chat_template").filter(|template| !template.is_null()).map(|_| tokenizer)
}

/// Checks the `config.json` of a vision tower; returns what the program does not know of it.
fn check_tower(folder: &Path, files: &TowerFiles) -> Result<Vec<String>> {
    (files.read)(folder)?;
    Ok((files.unknown)(folder)?.into_iter().collect())
}

/// Family of the base, as far as it was read.
fn family(model: &ModelConfig, configs: &Configs) -> &'static Family {
    let folder = configs.get(&model.base).map_or(Path::new(&model.base), PathBuf::as_path);
    base::open(folder).map(|(family, _)| family).unwrap_or_default()
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

#[cfg(test)]
#[path = "architecture_tests.rs"]
mod tests;
