//! Weights of image encoders, recognised by their keys, their `config.json` or their name.

use super::Config;
use crate::models::tiny_vit;
use crate::tensor::weights::{Archive, read_config};
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// The weights of the default settings.
pub const TINY_SAM: &str = "hub:merve/tinysam";

const HINT: &str = "use `hub:merve/tinysam`, or a file of TinySAM or MobileSAM";
const READABLE: &str = "only TinyViT (TinySAM, MobileSAM) can be read";

/// Published weights of an image encoder.
struct Known {
    name: &'static str,
    /// Parts of the names of its files and repositories, in small letters with hyphens.
    words: &'static [&'static str],
    /// `model_type` of its `config.json`.
    model_type: Option<&'static str>,
    /// Ends of keys: one of them is in its files, and in no file of the rows below.
    keys: &'static [&'static str],
    /// Its width, which tells it from rows with the same keys.
    width: Option<i64>,
    /// Its sizes; `None` if it cannot be read.
    sizes: Option<fn() -> Config>,
}

const TINY_VIT: Known = Known {
    name: "TinyViT",
    words: &["tinysam", "tiny-sam", "tinyvit", "tiny-vit", "mobile"],
    model_type: None,
    keys: &["patch_embed.seq.0.c.weight"],
    width: None,
    sizes: Some(|| Config::TinyVit(tiny_vit::Config::vit_t())),
};

/// SAM's encoder of a width.
const fn sam(name: &'static str, width: Option<i64>) -> Known {
    Known {
        name,
        words: &["sam-vit", "medsam", "sam-med", "sam-hq"],
        model_type: Some("sam"),
        keys: &["blocks.0.attn.qkv.weight", "vision_encoder.layers.0.attn.qkv.weight"],
        width,
        sizes: None,
    }
}

const KNOWN: [Known; 6] = [
    TINY_VIT,
    Known {
        name: "SAM 2",
        words: &["sam2", "sam-2"],
        model_type: None,
        keys: &["trunk.blocks.0.attn.qkv.weight", "backbone.blocks.0.attn.qkv.weight"],
        width: None,
        sizes: None,
    },
    sam("SAM ViT-B", Some(768)),
    sam("SAM ViT-L", Some(1024)),
    sam("SAM ViT-H", Some(1280)),
    sam("SAM with a ViT", None),
];

impl Known {
    fn has_width(&self, width: Option<i64>) -> bool {
        self.width.is_none() || self.width == width
    }

    /// Its sizes, or the error about the file or folder `path`.
    fn read(&self, path: &Path) -> Result<Config> {
        self.sizes.map(|sizes| sizes()).ok_or_else(|| unreadable(path, self.name))
    }
}

fn unreadable(path: &Path, kind: &str) -> Error {
    Error::weights(path, format!("this is {kind}; {READABLE}"), HINT)
}

/// Sizes of the encoder whose keys `archive` has.
///
/// # Errors
/// [`Error::Weights`] for an encoder that cannot be read.
pub fn sizes_of(archive: &Archive) -> Result<Config> {
    let names = archive.names();
    let has = |end: &&str| names.iter().any(|name| name.ends_with(end));
    let positions = names.iter().find(|name| name.ends_with("pos_embed")).and_then(|name| archive.info(name));
    let width = positions.and_then(|info| info.shape.last().copied());
    if let Some(known) = KNOWN.iter().find(|known| known.keys.iter().any(has) && known.has_width(width)) {
        return known.read(archive.path());
    }
    let kind = format!("another network, without the key `{}`", TINY_VIT.keys[0]);
    Err(unreadable(archive.path(), &kind))
}

/// Refuses the `config.json` of an encoder that cannot be read.
///
/// # Errors
/// [`Error::Weights`].
pub fn check_config(folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    let json = read_config(&path, HINT)?;
    let Some(kind) = json.get("model_type").and_then(Value::as_str) else { return Ok(()) };
    // the width that transformers does not write is ViT-B's
    let width = json.pointer("/vision_config/hidden_size").map_or(Some(768), Value::as_i64);
    match KNOWN.iter().find(|known| known.model_type == Some(kind) && known.has_width(width)) {
        Some(known) => known.read(&path).map(drop),
        None if kind.starts_with("sam") => Err(unreadable(&path, &format!("`{kind}`"))),
        None => Ok(()),
    }
}

/// The encoder of files that are not on this machine, by their name.
fn by_name(spec: &str) -> Option<&'static Known> {
    let name = spec.rsplit(['/', '\\']).next().unwrap_or(spec).to_lowercase().replace(['_', '.'], "-");
    KNOWN.iter().find(|known| known.words.iter().any(|word| name.contains(word)))
}

/// Refuses the name of an encoder that cannot be read; returns a warning about a name that says nothing.
///
/// # Errors
/// [`Error::Config`].
pub fn check_name(spec: &str) -> Result<Option<String>> {
    match by_name(spec) {
        Some(Known { sizes: Some(_), .. }) => Ok(None),
        Some(_) => {
            let reason = format!("`{spec}` is by its name another SAM; {READABLE}");
            Err(Error::config("model.image_encoder", reason, HINT))
        }
        None => {
            let text = "cannot be read here: it is planned as TinyViT, which it must be";
            Ok(Some(format!("`model.image_encoder`: `{spec}` {text}")))
        }
    }
}

/// Sizes of the encoder that has this name; those of TinySAM if it says nothing.
pub fn sizes_by_name(spec: &str) -> Config {
    by_name(spec).and_then(|known| known.sizes).map_or_else(published, |sizes| sizes())
}

/// Sizes of the published PRS-Med: those of TinySAM.
pub fn published() -> Config {
    Config::TinyVit(tiny_vit::Config::vit_t())
}
