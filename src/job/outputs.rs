//! An output never replaces an input: all inputs and outputs of a command are compared before it writes anything.
//!
//! Two paths are the same file if they lead to it through links, hard links or other spellings.

use crate::tensor::weights::CHECKSUMS;
use crate::{Error, Result, files};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Files and folders of a run folder that a training writes.
const RUN: [&str; 6] = ["last", "best", "cache", "config.toml", "metrics.jsonl", "report.html"];

/// What a command reads.
#[derive(Debug, Clone)]
pub struct InputPath {
    /// The argument that names it, for errors.
    pub name: String,
    /// A file or folder.
    pub path: PathBuf,
    /// Which of its files are inputs.
    pub read: Read,
}

/// Which files of a folder are inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// All of them.
    Files,
    /// Annotations, images and masks of a data root; other folders may be in it.
    DataRoot,
    /// The weights of a run, whose folder may also have outputs; all files of another folder with weights.
    Weights,
}

/// What a command writes.
#[derive(Debug, Clone)]
pub struct OutputPath {
    /// The argument that names it, for errors.
    pub name: String,
    /// A file or folder, which may exist.
    pub path: PathBuf,
    /// What becomes of it.
    pub written: Written,
}

/// What becomes of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// One file.
    File,
    /// A folder for outputs alone.
    Folder,
    /// Only these files and folders of a folder.
    Parts(Vec<String>),
    /// A run folder.
    Run,
    /// A folder that must not exist.
    New,
}

/// Checks that no output replaces an input or another output, and that no folder of weights becomes an output folder.
///
/// # Errors
/// [`Error::Config`] with both names.
pub fn check(inputs: &[InputPath], outputs: &[OutputPath]) -> Result<()> {
    let outputs: Vec<(&OutputPath, Place)> = outputs
        .iter()
        .map(|output| (output, Place::of(&output.path)))
        // devices and pipes keep nothing
        .filter(|(output, _)| fs::metadata(&output.path).map_or(true, |found| found.is_file() || found.is_dir()))
        .collect();
    for input in inputs.iter().filter(|input| input.path.exists()) {
        let (place, protected) = (Place::of(&input.path), input.protected());
        let linked = linked(&protected);
        for (output, target) in &outputs {
            check_pair((input, &place, &protected), (output, target))?;
            check_linked(input, &linked, (output, target))?;
        }
    }
    for (at, (output, target)) in outputs.iter().enumerate() {
        outputs[..at].iter().try_for_each(|(other, place)| check_outputs((other, place), (output, target)))?;
        check_weights(output)?;
        check_checkpoint(output, target)?;
    }
    Ok(())
}

/// Checks that none of the `files` that `name` lists is in the folder of an output.
///
/// # Errors
/// [`Error::Config`] with both names.
pub fn check_listed<'a>(name: &str, files: impl Iterator<Item = &'a Path>, output: &OutputPath) -> Result<()> {
    let folder = Place::of(&output.path);
    let mut clear: Option<PathBuf> = None;
    for file in files {
        let place = Place::of(file);
        let parent = place.path.parent().map(Path::to_owned);
        if parent.is_some() && clear == parent {
            continue;
        }
        if place.is_in(&folder) {
            let relation = format!("contains `{}`, an image of `{name}`", file.display());
            return Err(folder_error(output, &relation));
        }
        clear = parent;
    }
    Ok(())
}

impl OutputPath {
    /// What is written of a folder, if not all of it.
    fn parts(&self) -> Option<Vec<PathBuf>> {
        let parts = match &self.written {
            Written::Parts(parts) => parts.clone(),
            Written::Run => RUN.map(str::to_owned).to_vec(),
            // nothing is in a folder that does not exist
            Written::File | Written::Folder | Written::New => return None,
        };
        Some(parts.iter().map(|part| self.path.join(part)).collect())
    }

    /// The error of an output that stands in `relation` to another file.
    fn refused(&self, relation: &str, hint: &str) -> Error {
        Error::config(&self.name, format!("`{}` {relation}", self.path.display()), hint)
    }
}

impl InputPath {
    /// The files and folders that must not change.
    fn protected(&self) -> Vec<Place> {
        let folders = |folder: &Path| -> Vec<PathBuf> {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()).collect()
        };
        let of = |paths: Vec<PathBuf>| paths.iter().map(|path| Place::of(path)).collect();
        let is_run = |folder: &Path| folder.join("last").is_dir() || folder.join("best").is_dir();
        match self.read {
            Read::DataRoot if self.path.is_dir() => {
                let is_layout = |path: &PathBuf| {
                    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    name.ends_with("_images") || name.ends_with("_masks")
                };
                let mut found = folders(&self.path);
                found.retain(|folder| folders(folder).iter().any(is_layout) || folder.ends_with("annotations"));
                of(found)
            }
            Read::Weights if is_run(&self.path) => of(RUN.map(|name| self.path.join(name)).to_vec()),
            _ => {
                let mut found = vec![self.path.clone()];
                // the two files of one NIfTI volume
                let text = self.path.to_string_lossy();
                for (from, to) in [(".hdr", ".img"), (".img", ".hdr")] {
                    let name = text.strip_suffix(".gz").unwrap_or(&text);
                    let other = name.strip_suffix(from).map(|stem| format!("{stem}{to}"));
                    found.extend(other.iter().flat_map(|name| [name.into(), format!("{name}.gz").into()]));
                }
                found.retain(|path| path.exists());
                of(found)
            }
        }
    }
}

/// Compares an input with an output.
fn check_pair(
    (input, place, protected): (&InputPath, &Place, &[Place]),
    (output, target): (&OutputPath, &Place),
) -> Result<()> {
    let shown = format!("`{}` of `{}`", input.path.display(), input.name);
    if output.written == Written::File {
        if target.is(place) || protected.iter().any(|file| target.is(file)) {
            let relation = format!("is {shown}, which would be replaced");
            return Err(output.refused(&relation, "choose another name for the output"));
        }
        let is_inside = protected.iter().any(|folder| target.is_in(folder));
        // a mask may lie beside the slices
        if is_inside && target.id.is_none() && input.read != Read::Files {
            return Err(output.refused(&format!("would be among the files of {shown}"), "write it into another folder"));
        }
        if target.id.is_some() && (is_inside || protected.iter().any(|folder| folder.has_link_to(target))) {
            let relation = format!("is a file of {shown}, which would be replaced");
            return Err(output.refused(&relation, "choose another name for the output"));
        }
        return Ok(());
    }
    if target.is(place) {
        return Err(folder_error(output, &format!("is {shown}")));
    }
    if protected.iter().any(|folder| target.is_in(folder)) {
        return Err(folder_error(output, &format!("is inside {shown}")));
    }
    let Some(parts) = output.parts() else {
        return if place.is_in(target) { Err(folder_error(output, &format!("contains {shown}"))) } else { Ok(()) };
    };
    for part in parts {
        let written = Place::of(&part);
        if protected.iter().any(|kept| kept.is_in(&written) || written.is_in(kept)) {
            let relation = format!("has {shown} where `{}` would be written", part.display());
            return Err(folder_error(output, &relation));
        }
    }
    Ok(())
}

/// Compares what links of an input lead to with an output.
fn check_linked(input: &InputPath, linked: &[(PathBuf, Place)], (output, target): (&OutputPath, &Place)) -> Result<()> {
    let written = match output.parts() {
        Some(parts) => parts.iter().map(|part| Place::of(part)).collect(),
        None => vec![target.clone()],
    };
    let meets = |to: &Place| {
        written.iter().any(|at| at.is(to) || at.path.starts_with(&to.path) || to.path.starts_with(&at.path))
    };
    let Some((link, _)) = linked.iter().find(|(_, to)| meets(to)) else { return Ok(()) };
    let relation = format!("would replace what `{}` of `{}` links to", link.display(), input.name);
    Err(output.refused(&relation, "choose another place for the output"))
}

/// Where the symbolic links below these folders lead, with the links.
fn linked(folders: &[Place]) -> Vec<(PathBuf, Place)> {
    let mut left: Vec<PathBuf> = folders.iter().map(|place| place.path.clone()).collect();
    let (mut seen, mut found): (HashSet<PathBuf>, _) = (left.iter().cloned().collect(), Vec::new());
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_symlink() {
                let place = Place::of(&entry.path());
                if place.path.is_dir() && seen.insert(place.path.clone()) {
                    left.push(place.path.clone());
                }
                found.push((entry.path(), place));
            } else if kind.is_dir() && seen.insert(entry.path()) {
                left.push(entry.path());
            }
        }
    }
    found
}

/// Compares two outputs.
fn check_outputs((other, place): (&OutputPath, &Place), (output, target): (&OutputPath, &Place)) -> Result<()> {
    let hint = "give each output a name of its own";
    let both_files = [output, other].iter().all(|output| output.written == Written::File);
    if target.is(place) {
        return Err(output.refused(&format!("is the output of `{}` too", other.name), hint));
    }
    let lower = |place: &Place| place.path.to_string_lossy().to_lowercase();
    if both_files && lower(target) == lower(place) {
        let (path, name) = (other.path.display(), &other.name);
        let differ = "differ in upper and lower case only, and are one file on some disks";
        return Err(output.refused(&format!("and `{path}` of `{name}` {differ}"), hint));
    }
    for ((folder, _), (file, at)) in [((other, place), (output, target)), ((output, target), (other, place))] {
        let Written::Run = folder.written else { continue };
        if RUN.iter().any(|name| at.is_in(&Place::of(&folder.path.join(name)))) {
            return Err(file.refused(&format!("is a file that `{}` writes", folder.name), hint));
        }
    }
    Ok(())
}

/// Refuses a folder with weights as the folder of other outputs.
fn check_weights(output: &OutputPath) -> Result<()> {
    let has = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).any(|name| {
            let ending = Path::new(&name).extension().unwrap_or_default().to_string_lossy().into_owned();
            ["safetensors", "pth", "ckpt"].contains(&ending.as_str()) || name == "model_index.json"
        })
    };
    let is_run = ["last", "best"].iter().any(|name| has(&output.path.join(name)));
    let has_weights = match output.written {
        Written::File | Written::New => false,
        Written::Run => has(&output.path),
        Written::Folder | Written::Parts(_) => has(&output.path) || is_run,
    };
    if has_weights {
        return Err(folder_error(output, if is_run { "is a run folder" } else { "has weights of a model" }));
    }
    Ok(())
}

/// Refuses outputs in a checkpoint of a run, which the next save replaces as a whole.
fn check_checkpoint(output: &OutputPath, target: &Place) -> Result<()> {
    let is_checkpoint =
        |folder: &&Path| ["last", "best"].iter().any(|name| folder.ends_with(name)) && folder.join(CHECKSUMS).is_file();
    let Some(found) = target.path.ancestors().skip(1).find(is_checkpoint) else { return Ok(()) };
    Err(output.refused(&format!("would be in the checkpoint `{}`", found.display()), "choose a place outside of it"))
}

fn folder_error(output: &OutputPath, relation: &str) -> Error {
    let hint = "choose a folder of its own for the output, which has no inputs and is in none";
    output.refused(&format!("{relation}; nothing was written"), hint)
}

/// Where a path leads, also one that does not exist yet.
#[derive(Debug, Clone)]
struct Place {
    /// Without links as far as it exists.
    path: PathBuf,
    id: Option<(u64, u64)>,
}

impl Place {
    fn of(path: &Path) -> Self {
        let path = resolve(path);
        let id = id(&path);
        Self { path, id }
    }

    /// Whether both are one file or folder.
    fn is(&self, other: &Self) -> bool {
        self.path == other.path || (self.id.is_some() && self.id == other.id)
    }

    /// Whether this is `folder` or in it.
    fn is_in(&self, folder: &Self) -> bool {
        self.path.starts_with(&folder.path)
            || (folder.id.is_some() && self.path.ancestors().any(|above| id(above) == folder.id))
    }

    /// Whether a file below this folder is a hard link to `file`.
    fn has_link_to(&self, file: &Self) -> bool {
        let has_links = fs::metadata(&file.path).is_ok_and(|found| found.is_file() && found.nlink() > 1);
        let mut left = if has_links { vec![self.path.clone()] } else { Vec::new() };
        while let Some(folder) = left.pop() {
            for path in fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())) {
                match path.symlink_metadata() {
                    Ok(found) if found.is_dir() => left.push(path),
                    Ok(found) if Some((found.dev(), found.ino())) == file.id => return true,
                    _ => {}
                }
            }
        }
        false
    }
}

fn id(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// The absolute path without links, `.` and `..`; its end may not exist.
fn resolve(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let parts: Vec<Component> = absolute.components().collect();
    for count in (1..=parts.len()).rev() {
        let existing: PathBuf = parts[..count].iter().collect();
        let Ok(mut found) = existing.canonicalize() else { continue };
        for part in &parts[count..] {
            match part {
                Component::ParentDir => drop(found.pop()),
                Component::Normal(name) => found.push(name),
                _ => {}
            }
        }
        return found;
    }
    absolute
}

/// Whether `path` is `folder` or in it.
pub fn is_in(path: &Path, folder: &Path) -> bool {
    Place::of(path).is_in(&Place::of(folder))
}

/// Paths of existing files and folders among the values of a TOML file, for example the base of a run.
pub fn paths_in(settings: &Path) -> Vec<PathBuf> {
    let text = files::read_to_string(settings, files::MAX_SETTINGS).unwrap_or_default();
    let mut left = vec![toml::Value::Table(text.parse().unwrap_or_default())];
    let mut found = Vec::new();
    while let Some(value) = left.pop() {
        match value {
            toml::Value::String(text) => found.extend(existing(&text)),
            toml::Value::Array(values) => left.extend(values),
            toml::Value::Table(table) => left.extend(table.into_iter().map(|(_, value)| value)),
            _ => {}
        }
    }
    found
}

/// The file or folder of a value: `PATH`, `PATH#N` or `PATH=STRENGTH`.
pub fn existing(value: &str) -> Option<PathBuf> {
    let before = |mark: char| value.rsplit_once(mark).map(|(path, _)| path);
    let candidates = [Some(value), before('#'), value.split_once('#').map(|(path, _)| path), before('=')];
    let found = candidates.into_iter().flatten().filter(|text| !text.is_empty());
    found.map(PathBuf::from).find(|path| path.exists())
}

#[cfg(test)]
#[path = "outputs_tests.rs"]
mod tests;
