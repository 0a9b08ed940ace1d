//! Sizes of CLIP's vision tower: from the `config.json` of a CLIP repository or of a language model, and from the shapes of
//! its tensors.

use super::family::{Keys, TowerFiles};
use super::fields::{ArchitectureNames, CONFIG_HINT, Fields, FollowedField, is_off};
use crate::models::{clip, tower};
use crate::tensor::weights::Archive;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Vision towers that can be read.
const ARCHITECTURES: &ArchitectureNames = &[
    ("CLIPModel", "clip"),
    ("CLIPVisionModel", "clip_vision_model"),
    ("CLIPVisionModelWithProjection", "clip_vision_model"),
];
const FOLLOWED: &[FollowedField] = &[
    ("hidden_act", |value| value == "quick_gelu" || value == "gelu"),
    ("num_channels", |value| value == 3),
    ("attention_dropout", is_off),
    ("dropout", is_off),
];

const HINT: &str = "use the repository of a CLIP vision tower";
/// More layers than any published vision tower has.
const MOST_LAYERS: usize = 1000;
/// The repository whose sizes are known without its `config.json`.
const PUBLISHED: &str = "hub:openai/clip-vit-large-patch14-336";

/// Files of CLIP's vision tower.
pub static FILES: TowerFiles = TowerFiles { read, unknown, published, inside };

/// Config of the vision tower in a CLIP repository, whose `config.json` may describe the text tower too.
fn read(folder: &Path) -> Result<tower::Config> {
    let fields = Fields::read(folder)?;
    if !fields.is_of(ARCHITECTURES) {
        return Err(fields.unsupported(ARCHITECTURES.iter().map(|(name, _)| *name), HINT));
    }
    fields.tower(HINT).map(tower::Config::Clip)
}

/// Sizes of the tower `spec` that are known without its `config.json`.
fn published(spec: &str) -> Option<tower::Config> {
    (spec.split('@').next() == Some(PUBLISHED)).then(|| tower::Config::Clip(clip::Config::vit_l_14_336()))
}

/// A sentence that names the fields of a vision tower that the program does not know.
fn unknown(folder: &Path) -> Result<Option<String>> {
    Ok(Fields::read(folder)?.of_tower()?.unknown_beside(FOLLOWED))
}

/// Sizes of the vision tower in the folder of a language model with these fields. With `without_weights`, those of the
/// tower that the fields describe or name.
fn inside(base: &Path, fields: &Fields, keys: &Keys, without_weights: bool) -> Result<tower::Config> {
    let described = fields.tower_section().map(|section| section.tower(CONFIG_HINT)).transpose()?;
    if described.is_none() {
        check_tower_name(fields)?;
    }
    if without_weights {
        return Ok(tower::Config::Clip(described.unwrap_or_else(|| named_tower(fields))));
    }
    tower_sizes(&keys.open(base)?, keys, described).map(tower::Config::Clip)
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
            let hint = "give the repository of this tower as `model.vision_tower` (argument `vision_tower`)";
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
        return clip::Config {
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            image_size: 224,
            patch_size: if patch_size.starts_with("16") { 16 } else { 32 },
            ..large
        };
    }
    let image_size = if name.ends_with("clip-vit-large-patch14") { 224 } else { large.image_size };
    clip::Config { image_size, ..large }
}

/// Sizes of the vision tower inside a language model, from tensor shapes, and what `described` says beside them. LLaVA's
/// `config.json` does not describe its tower, a CLIP of OpenAI, whose heads are 64 wide.
fn tower_sizes(archive: &Archive, keys: &Keys, described: Option<clip::Config>) -> Result<clip::Config> {
    let name = |key: &str| format!("{}vision_model.{key}", keys.tower);
    let hint = "give the CLIP repository as `model.vision_tower` (argument `vision_tower`)";
    let [hidden_size, _, patch_size, _] = archive.shape(&name("embeddings.patch_embedding.weight"), hint)?;
    let [positions, _] = archive.shape(&name("embeddings.position_embedding.weight"), hint)?;
    let has_layer = |i: &usize| archive.contains(&name(&format!("encoder.layers.{i}.layer_norm1.weight")));
    let layers = i64::try_from((0..MOST_LAYERS).take_while(has_layer).count()).expect("a few layers");
    // a 4-bit matrix has another shape, its bias does not
    let [intermediate_size] = archive.shape(&name("encoder.layers.0.mlp.fc1.bias"), hint)?;
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
    // the last layer is not used, and a run does not store it
    let layers = layers + i64::from(layers + 1 == described.num_hidden_layers);
    let pairs = [
        ("hidden_size", described.hidden_size, hidden_size),
        ("intermediate_size", described.intermediate_size, intermediate_size),
        ("image_size", described.image_size, image_size),
        ("patch_size", described.patch_size, patch_size),
        ("num_hidden_layers", described.num_hidden_layers, layers),
    ];
    let wrong = pairs.into_iter().find(|(_, stated, stored)| stated != stored);
    wrong.map_or(Ok(described), |(key, stated, stored)| {
        let reason = format!("`vision_config.{key}` = {stated} in its `config.json`, and its weights have {stored}");
        let hint = "weights and `config.json` must belong together: download both again";
        Err(Error::weights(archive.path(), reason, hint))
    })
}

impl Fields {
    /// The fields of the vision tower inside a language model, if they are there.
    fn tower_section(&self) -> Option<Self> {
        let sections = ["vision_config", "vision_config_dict"].into_iter();
        let fields: Map<String, Value> =
            sections.filter_map(|name| Some((name.to_owned(), self.get(name)?.clone()))).collect();
        (!fields.is_empty()).then(|| Self { path: self.path.clone(), fields })
    }

    /// The section of the vision tower, or all fields if they are those of a tower.
    fn of_tower(mut self) -> Result<Self> {
        let defaults = json!({
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
        });
        let is_described = self.get("model_type").is_some() || self.get("architectures").is_some();
        let sections: Vec<(&str, Value)> = ["vision_config", "vision_config_dict"]
            .into_iter()
            .filter_map(|name| Some((name, self.fields.remove(name)?)))
            .collect();
        let mut own = Self { path: self.path.clone(), fields: Map::new() };
        for (name, section) in sections {
            own.fields.insert(name.into(), section);
            own.add_section(name)?;
        }
        let mut own = if own.fields.is_empty() { self } else { own };
        // transformers does not write them
        if is_described && let Value::Object(defaults) = defaults {
            for (key, value) in defaults {
                own.fields.entry(key).or_insert(value);
            }
        }
        Ok(own)
    }

    /// Sizes of the vision tower that the fields describe; those of a language model need a `vision_config`.
    fn tower(self, hint: &str) -> Result<clip::Config> {
        let own = self.of_tower()?;
        own.check(FOLLOWED)?;
        own.parsed(own.fields.clone(), hint)
    }
}
