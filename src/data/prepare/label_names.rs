//! Names that files give to the labels of one structure: equal numbers of two files can be different structures.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::structures::Structure;
use crate::labels::Labels;
use crate::volume::LabelMap;

/// The names in files, by structure, each with the first volume whose file has it.
#[derive(Debug, Default)]
pub(super) struct LabelNamesOfFiles(Mutex<BTreeMap<String, BTreeMap<String, String>>>);

impl LabelNamesOfFiles {
    /// Remembers how the label map of a volume names the labels of a structure; no labels: those that it has.
    pub(super) fn add(&self, structure: &str, chosen: Labels, map: &LabelMap, volume: &str) {
        if map.names.0.is_empty() {
            return;
        }
        let present = map.labels().into_keys();
        let labels = present.filter(|label| chosen.is_empty() || chosen.contains(*label));
        let names: Vec<&str> = labels.filter_map(|label| map.names.0.get(&label)).map(String::as_str).collect();
        if names.is_empty() {
            return;
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(structure.to_owned()).or_default().entry(names.join(" + "));
        // volumes are read in any order
        let first = known.or_insert_with(|| volume.to_owned());
        if volume < first.as_str() {
            volume.clone_into(first);
        }
    }

    /// Says which structures have several names.
    pub(super) fn notes(&self) -> Vec<String> {
        /// Most names of a note.
        const MAX_NAMED: usize = 5;
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let several = all.iter().filter(|(_, names)| {
            let endings = names.keys().map(|name| Structure::named(name, Labels::NONE).suffix);
            endings.collect::<std::collections::BTreeSet<_>>().len() > 1
        });
        let note = |(structure, names): (&String, &BTreeMap<String, String>)| {
            let named = names.iter().take(MAX_NAMED).map(|(name, volume)| format!("`{name}` in {volume}"));
            let more = names.len().saturating_sub(MAX_NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!(
                "what is called `{structure}` has different names in the label maps: {}{more}; if these are different structures, \
                 give each file labels of its own in the column `labels` of a table",
                named.collect::<Vec<_>>().join(", ")
            )
        };
        several.map(note).collect()
    }
}
