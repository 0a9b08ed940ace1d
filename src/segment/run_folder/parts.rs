//! Files of the parts that have weights, found before anything is loaded.

use crate::hub::{self, Pinned};
use crate::models::base::{self, Parts};
use crate::segment::config::{ModelConfig, RANDOM};
use crate::segment::run_folder::loaded::Build;
use crate::tensor::weights::Archive;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What to do about a `config.json` on the hub that cannot be read.
pub(crate) const UNREAD_HINT: &str = "fetch it where the hub can be reached, or give a local folder";

/// Folders with the `config.json` of parts that were read, by spec. Those of parts on the hub have no weights.
pub type Configs = BTreeMap<String, PathBuf>;

/// Local files of the parts that have weights.
#[derive(Debug)]
pub(crate) struct Found {
    /// Folder of the language model.
    pub(crate) base: Option<PathBuf>,
    /// Whether the base is a `config.json` alone, read from the hub.
    pub(crate) without_weights: bool,
    pub(crate) tower: Option<PathBuf>,
    /// File or folder of the image encoder.
    pub(crate) image_encoder: Option<PathBuf>,
}

impl Found {
    /// Finds (and downloads) the files that the settings name.
    ///
    /// # Errors
    /// [`Error::Hub`], or [`Error::Weights`] for a path that does not exist.
    pub(crate) fn locate(config: &ModelConfig, build: Build) -> Result<Self> {
        let find =
            |spec: &str| if spec == RANDOM || spec.is_empty() { Ok(None) } else { (build.locate)(spec).map(Some) };
        Ok(Self {
            base: find(&config.base)?,
            without_weights: false,
            tower: find(&config.vision_tower)?,
            image_encoder: find(&config.image_encoder)?.map(|path| single_file(&path)).transpose()?,
        })
    }

    /// Commits and hashes of the parts that are in a cache of the hub.
    pub(crate) fn sources(&self) -> BTreeMap<String, Pinned> {
        let parts = [("base", &self.base), ("vision_tower", &self.tower), ("image_encoder", &self.image_encoder)];
        let pinned = |(part, path): (&str, &Option<PathBuf>)| Some((part.to_owned(), hub::pinned(path.as_ref()?)?));
        parts.into_iter().filter_map(pinned).collect()
    }

    /// [`Archive::digest`] of the parts that a checkpoint does not contain.
    ///
    /// # Errors
    /// [`Error::Weights`] for weights that cannot be read.
    pub(crate) fn digests(&self) -> Result<BTreeMap<String, String>> {
        digests(&[("base", self.base.as_deref()), ("vision_tower", self.tower.as_deref())])
    }

    /// The parts of the base by their sizes, as their folders state them.
    ///
    /// # Errors
    /// [`Error::Weights`] for a folder without a readable `config.json`, and for architectures that are not supported.
    pub(crate) fn base_sizes(&self) -> Result<Option<Parts>> {
        let Some(base) = &self.base else { return Ok(None) };
        let (family, fields) = base::open(base)?;
        let tower = match &self.tower {
            Some(tower) => (family.tower.read)(tower)?,
            None => (family.tower.inside)(base, &fields, &family.keys, self.without_weights)?,
        };
        fields.check_tower_width(tower.width())?;
        Ok(Some(Parts { family, tower, llm: (family.read)(&fields)? }))
    }

    /// Sizes of the base without weights: those of [`Self::base_sizes`], else the published ones of a base that was not
    /// read.
    ///
    /// # Errors
    /// As [`Self::base_sizes`]; [`Error::Config`] for a part on the hub whose `config.json` was not read.
    pub(crate) fn planned_sizes(&self, config: &ModelConfig) -> Result<Parts> {
        let unread = |key: &str, spec: &str| {
            let reason = format!("the `config.json` of `{spec}` was not read, and its sizes are not known without it");
            Error::config(key, reason, UNREAD_HINT)
        };
        let base = match self.base_sizes()? {
            Some(base) => base,
            None => base::published(&config.base).ok_or_else(|| unread("model.base", &config.base))?,
        };
        let (spec, files) = (&config.vision_tower, base.family.tower);
        let tower = match &self.tower {
            _ if spec.is_empty() => return Ok(base),
            Some(tower) => (files.read)(tower)?,
            None => (files.published)(spec).ok_or_else(|| unread("model.vision_tower", spec))?,
        };
        Ok(Parts { tower, ..base })
    }

    /// Refuses texts that the base does not allow: longer than its limits with an image.
    ///
    /// # Errors
    /// [`Error::Weights`] naming the field of its `config.json`.
    pub(crate) fn check_length(&self, tokens: i64, max_text_tokens: usize) -> Result<()> {
        let Some(base) = &self.base else { return Ok(()) };
        let text = i64::try_from(max_text_tokens).unwrap_or(i64::MAX / 2);
        // the placeholder of the image is an id of the text
        base::open(base)?.1.check_length(tokens + text - 1)
    }

    /// Finds the folders that the settings name, without downloads. Parts on the hub stay `None`, unless `configs` has
    /// them.
    ///
    /// # Errors
    /// [`Error::Weights`] for a path that does not exist.
    pub(crate) fn local(config: &ModelConfig, configs: &Configs) -> Result<Self> {
        let find = |spec: &str| match PathBuf::from(spec) {
            _ if spec == RANDOM || spec.is_empty() => Ok(None),
            _ if spec.starts_with("hub:") => Ok(configs.get(spec).cloned()),
            path if path.exists() => Ok(Some(path)),
            path => Err(Error::weights(path, "there is no such file or folder", "check the path")),
        };
        Ok(Self {
            base: find(&config.base)?,
            without_weights: config.base.starts_with("hub:"),
            tower: find(&config.vision_tower)?,
            image_encoder: None,
        })
    }
}

/// [`Archive::digest`] of each part that has a path.
///
/// # Errors
/// [`Error::Weights`] for weights that cannot be read.
pub(crate) fn digests(parts: &[(&str, Option<&Path>)]) -> Result<BTreeMap<String, String>> {
    let named = parts.iter().filter_map(|(part, path)| Some((*part, (*path)?)));
    named.map(|(part, path)| Ok((part.to_owned(), Archive::open(path)?.digest()))).collect()
}

/// A file, or the only weight file of a folder.
pub(crate) fn single_file(path: &Path) -> Result<PathBuf> {
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
