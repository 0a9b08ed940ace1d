//! What a family of base models declares: the files that it reads and writes, and the names of its tensors.

use super::fields::{ArchitectureNames, Fields, FollowedField};
use crate::data::text::Prompt;
use crate::models::{decoder, tower};
use crate::tensor::weights::Archive;
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// A family of base models (language model, projector and vision tower) as data.
pub struct Family {
    /// Name in settings and run folders.
    pub name: &'static str,
    /// Architectures of the `config.json` files that it reads. The code of the first one has its own prompts: the chat
    /// template of its tokenizer is not used there either.
    pub architectures: &'static ArchitectureNames,
    /// Fields of `config.json` whose other values it refuses.
    pub followed: &'static [FollowedField],
    /// Sizes of the language model in a `config.json`.
    pub read: fn(&Fields) -> Result<decoder::Config>,
    /// The language model's `config.json` for transformers.
    pub write: fn(&decoder::Config) -> Value,
    /// Names of its tensors.
    pub keys: Keys,
    /// Files of its vision tower.
    pub tower: &'static TowerFiles,
    /// Prompt of a new model.
    pub prompt: Prompt,
    /// Bases whose sizes are known without their `config.json`.
    pub published: &'static [Published],
}

/// A base whose sizes are known without its `config.json`: the spec, and the sizes.
pub type Published = (&'static str, fn() -> Parts);

/// Names of a base's tensors in its files, in the run folders of this program, and in adapters of Python's `peft`.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Prefix of the layers of the language model.
    pub layers: &'static str,
    /// Embedding of the tokens.
    pub embedding: &'static str,
    /// Head of the language model.
    pub head: &'static str,
    /// Prefix of the projector.
    pub projector: &'static str,
    /// Prefix of the vision tower. A repository of the tower alone has the same keys without it.
    pub tower: &'static str,
    /// Ends of stored keys that may stay unused.
    pub unused: &'static [&'static str],
    /// Other published layouts: pairs of the prefix of a stored key and the one that replaces it, for keys that
    /// begin with it. A file has the first layout whose first prefix one of its keys has.
    pub layouts: &'static [&'static [(&'static str, &'static str)]],
    /// `target_modules` of adapters.
    pub adapted: &'static str,
    /// Part of the names of adapters that are not loaded: those of the frozen tower never got a gradient.
    pub unused_adapters: &'static str,
}

/// How the sizes of a family's vision tower are found.
pub struct TowerFiles {
    /// Sizes in the `config.json` of a repository of the tower alone.
    pub read: fn(&Path) -> Result<tower::Config>,
    /// A sentence that names the fields of that `config.json` that the program does not know.
    pub unknown: fn(&Path) -> Result<Option<String>>,
    /// Sizes of the tower of such a repository that are known without its `config.json`.
    pub published: fn(&str) -> Option<tower::Config>,
    /// Sizes of the tower in the folder of a base with these fields; true if the folder has no weights.
    pub inside: fn(&Path, &Fields, &Keys, bool) -> Result<tower::Config>,
}

/// The parts of a base, by their sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Parts {
    /// Family of the base.
    pub family: &'static Family,
    /// Vision tower.
    pub tower: tower::Config,
    /// Language model.
    pub llm: decoder::Config,
}

impl Keys {
    /// The module path of the part that a key belongs to: `vision_tower`, `projector` or `llm`.
    pub fn part_of(&self, key: &str) -> &'static str {
        match key {
            _ if key.starts_with(self.tower) => "vision_tower",
            _ if key.starts_with(self.projector) => "projector",
            _ => "llm",
        }
    }

    /// True if a stored key may stay unused.
    pub fn is_unused(&self, key: &str) -> bool {
        self.unused.iter().any(|end| key.ends_with(end))
    }

    /// Opens weights with the names of this program.
    ///
    /// # Errors
    /// As [`Archive::open`].
    pub fn open(&self, path: &Path) -> Result<Archive> {
        let archive = Archive::open(path)?;
        let has = |prefix: &str| archive.names().iter().any(|key| key.starts_with(prefix));
        let layout = self.layouts.iter().find(|layout| layout.first().is_some_and(|(stored, _)| has(stored)));
        let Some(pairs) = layout else { return Ok(archive) };
        let own =
            |key: &str| pairs.iter().find_map(|(stored, own)| Some(format!("{own}{}", key.strip_prefix(stored)?)));
        Ok(archive.renamed(own))
    }
}

impl Family {
    /// True for the family of runs that do not state one.
    pub fn is_default(family: &&'static Self) -> bool {
        *family == <&Self>::default()
    }
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl serde::Serialize for Family {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// Refuses weights that are not those of a language model of these sizes, before memory for them is asked for.
///
/// # Errors
/// [`Error::Weights`] for a missing tensor, and for one of another shape.
pub fn check_weights(folder: &Path, family: &Family, llm: &decoder::Config) -> Result<()> {
    let archive = family.keys.open(folder)?;
    let hint = "download the model again; its weights and its `config.json` must belong together";
    let embeddings = family.keys.embedding;
    let shape: [i64; 2] = archive.shape(embeddings, hint)?;
    if shape != [llm.vocab_size, llm.hidden_size] {
        let expected = [llm.vocab_size, llm.hidden_size];
        let reason = format!("`{embeddings}` has the shape {shape:?}, `config.json` says {expected:?}");
        return Err(Error::weights(folder, reason, hint));
    }
    let last = format!("{}{}.input_layernorm.weight", family.keys.layers, llm.num_hidden_layers - 1);
    archive.shape::<1>(&last, hint).map(drop)
}
