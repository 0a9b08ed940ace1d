//! The exact files of the cache that a model was made from.

use std::collections::BTreeMap;
use std::path::Path;

use super::cache::hash_of;
use super::files::{self, Files};

/// Repository, commit and hashes of model files in the cache.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Pinned {
    /// `owner/name`.
    pub repo: String,
    /// The commit.
    pub commit: String,
    /// Hash of each weight, config and tokenizer file by its name: SHA-256, or Git's SHA-1 for small files.
    pub files: BTreeMap<String, String>,
}

impl Pinned {
    /// Names of the files that are in both with different hashes.
    pub fn changed(&self, other: &Self) -> Vec<&str> {
        let differs = |(name, hash): &(&String, &String)| other.files.get(*name).is_some_and(|other| other != *hash);
        self.files.iter().filter(differs).map(|(name, _)| name.as_str()).collect()
    }
}

/// Repository, commit and hashes of the model files at `path`; `None` if it is not in a snapshot of a cache. Reads the
/// links of the snapshot, not the files.
pub fn pinned(path: &Path) -> Option<Pinned> {
    let snapshot = path
        .ancestors()
        .find(|folder| folder.parent().and_then(Path::file_name).is_some_and(|parent| parent == "snapshots"))?;
    let repo = snapshot.parent()?.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    let listed = files::local(path).ok()?;
    let (chosen, _) = Files::Checkpoint.pick(&listed).ok()?;
    let link = |name: &str| if path.is_dir() { path.join(name) } else { path.to_owned() };
    let hashes = chosen.into_iter().filter_map(|file| Some((hash_of(&link(&file.name))?, file.name)));
    Some(Pinned {
        repo: repo.replacen("--", "/", 1),
        commit: snapshot.file_name()?.to_str()?.to_owned(),
        files: hashes.map(|(hash, name)| (name, hash)).collect(),
    })
}
