//! Checks the parts that the settings name before weights are downloaded: by their `config.json`, and by the keys of an
//! image encoder on this machine. What a language model may be is in its family's row (`models::base`).

use crate::hub::Spec;
use crate::models::base::fields::CONFIG_HINT;
use crate::models::base::{self, Family, TowerFiles};
use crate::models::image_encoder::known::{self, TINY_SAM};
use crate::segment::config::{ModelConfig, RANDOM};
use crate::segment::run_folder::parts::{Configs, Found, UNREAD_HINT, single_file};
use crate::tensor::weights::{Archive, read_config};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

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
            _ if folder.join("config.json").is_file() => known::check_config(&folder).map(|()| Vec::new()),
            _ => single_file(&folder).and_then(|file| known::sizes_of(&Archive::open(&file)?)).map(|_| Vec::new()),
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
        warnings.extend(known::check_name(spec)?);
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

#[cfg(test)]
#[path = "architecture_tests.rs"]
mod tests;
