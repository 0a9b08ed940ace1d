//! The registry of base models: a row for each family in [`FAMILIES`].
//!
//! To add a family, add a file like `llava_med.rs` and its row. `segment` asks the row for names of tensors and files.

pub mod clip;
pub mod family;
pub mod fields;
pub mod llava_med;
#[cfg(test)]
mod toy_decoder;

pub use family::{Family, Keys, Parts, TowerFiles, check_weights};
pub use llava_med::LLAVA_MED;

use crate::Result;
use fields::Fields;
use std::path::Path;

/// All families. Runs of old versions have the first one, and a `config.json` that names no architecture too.
pub const FAMILIES: &[&Family] = &[
    &llava_med::FAMILY,
    #[cfg(test)]
    &toy_decoder::FAMILY,
];

impl Default for &'static Family {
    fn default() -> Self {
        FAMILIES[0]
    }
}

impl<'de> serde::Deserialize<'de> for &'static Family {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let name: String = serde::Deserialize::deserialize(deserializer)?;
        let known = || FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", ");
        let family = FAMILIES.iter().copied().find(|family| family.name == name);
        family.ok_or_else(|| serde::de::Error::custom(format!("no family `{name}`; known: {}", known())))
    }
}

/// Family and fields of the language model in `folder`. The program follows all of these fields or does not know them.
///
/// # Errors
/// [`crate::Error::Weights`] for an architecture that is not supported, and for values that the program does not compute with.
pub fn open(folder: &Path) -> Result<(&'static Family, Fields)> {
    let fields = Fields::read(folder)?;
    let Some(family) = FAMILIES.iter().copied().find(|family| fields.is_of(family.architectures)) else {
        let names = FAMILIES.iter().flat_map(|family| family.architectures).map(|(name, _)| *name);
        let hint = format!("use `{LLAVA_MED}`, or a model that was trained from it");
        return Err(fields.unsupported(names, &hint));
    };
    Ok((family, fields.of_language_model(family.followed)?))
}

/// Sizes of the base `spec` that are known without its `config.json`.
pub fn published(spec: &str) -> Option<Parts> {
    let name = spec.split('@').next().unwrap_or(spec);
    let mut rows = FAMILIES.iter().flat_map(|family| family.published);
    rows.find_map(|(known, sizes)| (*known == name).then(sizes))
}
