//! Which files of a repository are wanted.

use std::fmt;
use std::path::Path;

use super::RemoteFile;
use crate::error::{Error, Result};

/// A choice among the files of a repository.
#[derive(Debug, Clone, Copy)]
pub enum Files<'a> {
    /// Every file.
    All,
    /// Names or patterns with `*` (which also matches `/`).
    Matching(&'a [&'a str]),
    /// A model: every `.json` and `tokenizer.model`, and the `.safetensors` files, or where there are none the PyTorch
    /// files (`.bin`, `.pth`, `.pt`).
    Checkpoint,
}

const CONFIGS: [&str; 2] = ["*.json", "tokenizer.model"];
const SAFETENSORS: [&str; 1] = ["*.safetensors"];
const PYTORCH: [&str; 3] = ["*.bin", "*.pth", "*.pt"];

impl Files<'_> {
    /// The wanted ones, in the order given; none when a needed kind is absent.
    pub(super) fn choose(&self, files: &[RemoteFile]) -> Vec<RemoteFile> {
        let matching = |patterns: &[&str]| -> Vec<RemoteFile> {
            files.iter().filter(|file| patterns.iter().any(|p| matches(p, &file.name))).cloned().collect()
        };
        match self {
            Self::All => files.to_vec(),
            Self::Matching(patterns) => {
                let absent = patterns.iter().any(|p| !p.contains('*') && files.iter().all(|file| file.name != *p));
                if absent { Vec::new() } else { matching(patterns) }
            }
            Self::Checkpoint => {
                let weights = Some(matching(&SAFETENSORS)).filter(|found| !found.is_empty());
                let mut weights = weights.unwrap_or_else(|| matching(&PYTORCH));
                if weights.is_empty() {
                    return weights;
                }
                let mut chosen = matching(&CONFIGS);
                chosen.append(&mut weights);
                chosen
            }
        }
    }

    /// Whether a cache that holds `held` can serve this choice, as far as a cache can know.
    pub(super) fn complete_in(&self, held: &[RemoteFile]) -> bool {
        !self.choose(held).is_empty()
    }
}

impl fmt::Display for Files<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => write!(f, "files"),
            Self::Matching(patterns) => write!(f, "`{}`", patterns.join("`, `")),
            Self::Checkpoint => write!(f, "weights (`*.safetensors`, `*.bin`, `*.pth`)"),
        }
    }
}

/// Glob with `*` only.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(head) else { return false };
    rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| matches(tail, &rest[at..]))
}

/// The files below a local folder (or the file itself), sorted by name.
pub(super) fn local(path: &Path) -> Result<Vec<RemoteFile>> {
    let mut found = Vec::new();
    if path.is_dir() {
        collect(path, "", &mut found)?;
    } else {
        let size = std::fs::metadata(path).map_err(Error::io(path, "read"))?.len();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push(RemoteFile { name, size: Some(size) });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn collect(folder: &Path, prefix: &str, found: &mut Vec<RemoteFile>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let entry = entry.map_err(Error::io(folder, "list"))?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        // Through links: the files of a cached snapshot are links into its blobs. A dangling one is no file.
        match std::fs::metadata(entry.path()) {
            Ok(meta) if meta.is_dir() => collect(&entry.path(), &format!("{name}/"), found)?,
            Ok(meta) => found.push(RemoteFile { name, size: Some(meta.len()) }),
            Err(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: Files, held: &[&str]) -> Vec<String> {
        let held: Vec<RemoteFile> = held.iter().map(|n| RemoteFile { name: (*n).into(), size: None }).collect();
        files.choose(&held).into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn patterns_choose_files() {
        let held = ["README.md", "config.json", "a/config.json", "model.safetensors", "pytorch_model.bin", "x.h5"];
        assert_eq!(names(Files::All, &held).len(), 6);
        assert_eq!(names(Files::Matching(&["*.json"]), &held), ["config.json", "a/config.json"]);
        assert_eq!(names(Files::Matching(&["config.json", "*.md"]), &held), ["README.md", "config.json"]);
        assert!(names(Files::Matching(&["config.json", "absent"]), &held).is_empty());
        assert_eq!(names(Files::Checkpoint, &held), ["config.json", "a/config.json", "model.safetensors"]);
        assert_eq!(names(Files::Checkpoint, &["config.json", "pytorch_model.bin"]).len(), 2);
        assert!(names(Files::Checkpoint, &["config.json", "x.h5"]).is_empty());
        assert!(matches("a*b*c", "a-b-b-c") && !matches("a*b*c", "a-c") && matches("*", ""));
    }
}
