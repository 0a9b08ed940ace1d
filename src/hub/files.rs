//! Selection of files in a repository.

use std::fmt;
use std::path::{Path, PathBuf};

use super::RemoteFile;
use prsmed_base::error::{Error, Result, first_quoted};

/// A selection of files in a repository.
#[derive(Debug, Clone, Copy)]
pub enum Files<'a> {
    /// Every file.
    All,
    /// File names, or patterns with `*` (which also matches `/`).
    Matching(&'a [&'a str]),
    /// A model: every `.json` and `tokenizer.model`, and the `.safetensors` files, or else the PyTorch files (`.bin`,
    /// `.pth`, `.pt`).
    Checkpoint,
    /// The only `.safetensors`, `.pth` or `.pt` file.
    OnlyWeights,
    /// A pipeline in diffusers' layout, or one network of it: configs, tokenizer files, and the safetensors files of
    /// each network, in this variant (`fp16`) if there is one.
    Diffusers(&'a str),
}

/// Networks of a pipeline that are used. The safety checker is not.
const NETWORKS: [&str; 5] = ["unet", "vae", "text_encoder", "text_encoder_2", "controlnet"];
/// Other folders with files that are used.
const TEXTS: [&str; 4] = ["scheduler", "tokenizer", "tokenizer_2", ""];

/// The weight files of `variant` among the names in one folder, else those without variant.
pub fn of_variant<'a>(names: &[&'a str], variant: &str) -> Vec<&'a str> {
    // `model.safetensors`, `model-00001-of-00002.safetensors`, `model.fp16-00001-of-00002.safetensors`
    let variant_of = |name: &str| -> Option<String> {
        let stem = name.strip_suffix(".safetensors")?;
        let stem = stem.split_once("-0").map_or(stem, |(stem, _)| stem);
        let rest = stem.strip_prefix("diffusion_pytorch_model").or_else(|| stem.strip_prefix("model"))?;
        Some(rest.trim_start_matches('.').to_owned())
    };
    let of = |wanted: &str| -> Vec<&'a str> {
        names.iter().copied().filter(|name| variant_of(name).is_some_and(|variant| variant == wanted)).collect()
    };
    let own = if variant.is_empty() { Vec::new() } else { of(variant) };
    if own.is_empty() { of("") } else { own }
}

fn diffusers(files: &[RemoteFile], variant: &str) -> Vec<RemoteFile> {
    let is_pipeline = files.iter().any(|file| file.name == "model_index.json");
    let folders = NETWORKS.into_iter().chain((!is_pipeline).then_some(""));
    let mut chosen: Vec<RemoteFile> =
        folders.flat_map(|folder| of_folder(files, folder, variant, &["*.json"])).collect();
    if !chosen.iter().any(|file| file.name.ends_with(".safetensors")) {
        return Vec::new();
    }
    for folder in TEXTS.iter().filter(|folder| is_pipeline || !folder.is_empty()) {
        let texts = of_folder(files, folder, variant, &["*.json", "*.txt"]).into_iter();
        chosen.extend(texts.filter(|file| !file.name.ends_with(".safetensors")));
    }
    chosen
}

/// The weights of a network in `folder`, and the files that match one of `patterns`.
fn of_folder<'a>(files: &'a [RemoteFile], folder: &str, variant: &str, patterns: &[&str]) -> Vec<RemoteFile> {
    let in_folder = |file: &'a RemoteFile| {
        let (parent, name) = file.name.rsplit_once('/').unwrap_or(("", &file.name));
        (parent == folder).then_some((file, name))
    };
    let inside: Vec<(&RemoteFile, &str)> = files.iter().filter_map(in_folder).collect();
    let names: Vec<&str> = inside.iter().map(|(_, name)| *name).collect();
    let weights = of_variant(&names, variant);
    let wanted = |name: &str| weights.contains(&name) || patterns.iter().any(|pattern| matches(pattern, name));
    inside.iter().filter(|(_, name)| wanted(name)).map(|(file, _)| (*file).clone()).collect()
}

/// Most file names that an error lists.
const NAMED: usize = 12;

/// Reason why no files were selected.
#[derive(Debug)]
pub(super) struct PickRefusal {
    pub(super) reason: String,
    /// One of several matching files.
    pub(super) candidate: Option<String>,
}

impl PickRefusal {
    /// Names one of the files, whose whole name `full` gives, or else says what to check.
    pub(super) fn hint(&self, check: &str, full: impl Fn(&str) -> String) -> String {
        let named = self.candidate.as_ref().map(|name| format!("name one of them, for example `{}`", full(name)));
        named.unwrap_or_else(|| check.to_owned())
    }

    pub(super) fn lacking(wanted: &str, files: &[RemoteFile]) -> Self {
        Self { reason: format!("contains no {wanted} (its files: {})", quoted(files)), candidate: None }
    }
}

fn quoted(files: &[RemoteFile]) -> String {
    first_quoted(&files.iter().map(|file| &file.name).collect::<Vec<_>>(), NAMED)
}

impl Files<'_> {
    /// The selected files, and the path that represents them: empty for the folder that contains them.
    pub(super) fn pick(&self, files: &[RemoteFile]) -> Result<(Vec<RemoteFile>, String), PickRefusal> {
        let chosen = self.choose(files);
        match (self, chosen.as_slice()) {
            (_, []) => Err(PickRefusal::lacking(&self.to_string(), files)),
            (Self::OnlyWeights, [file]) => Ok((vec![file.clone()], file.name.clone())),
            (Self::OnlyWeights, [first, ..]) => {
                let (count, names) = (chosen.len(), quoted(&chosen));
                let reason = format!("contains {count} weight files where one is expected: {names}");
                Err(PickRefusal { reason, candidate: Some(first.name.clone()) })
            }
            _ => Ok((chosen, String::new())),
        }
    }

    /// The selected files, in the given order; none if a required kind is missing.
    fn choose(&self, files: &[RemoteFile]) -> Vec<RemoteFile> {
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
                let weights = [&["*.safetensors"][..], &["*.bin", "*.pth", "*.pt"]].map(matching);
                let weights = weights.into_iter().find(|found| !found.is_empty());
                weights.map_or_else(Vec::new, |weights| [matching(&["*.json", "tokenizer.model"]), weights].concat())
            }
            Self::OnlyWeights => matching(&["*.safetensors", "*.pth", "*.pt"]),
            Self::Diffusers(variant) => diffusers(files, variant),
        }
    }
}

impl fmt::Display for Files<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => write!(f, "files"),
            Self::Matching(patterns) => write!(f, "`{}`", patterns.join("`, `")),
            Self::Checkpoint => write!(f, "weights (`*.safetensors`, `*.bin`, `*.pth`)"),
            Self::OnlyWeights => write!(f, "weight file (`*.safetensors`, `*.pth`, `*.pt`)"),
            Self::Diffusers(_) => {
                write!(f, "a diffusers pipeline (`unet/*.safetensors`, `vae/`, `text_encoder/`, ...)")
            }
        }
    }
}

/// Matches a pattern that has only `*` as a wildcard.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(head) else { return false };
    rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| matches(tail, &rest[at..]))
}

/// The files below a local folder (or the file itself), sorted by name.
pub(super) fn local(path: &Path) -> Result<Vec<RemoteFile>> {
    let mut found = Vec::new();
    if path.is_dir() {
        // follows links: the files of a cached snapshot are links to its blobs; broken links are skipped
        walk(path, "", Path::is_dir, &mut |name, path| {
            found.extend(std::fs::metadata(path).ok().map(|meta| RemoteFile { name, size: Some(meta.len()) }));
        })?;
    } else {
        let size = std::fs::metadata(path).map_err(Error::io(path, "read"))?.len();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push(RemoteFile { name, size: Some(size) });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Names and paths of all below a folder that is no folder itself.
pub(super) fn walk(
    folder: &Path,
    prefix: &str,
    is_folder: fn(&Path) -> bool,
    found: &mut dyn FnMut(String, PathBuf),
) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let path = entry.map_err(Error::io(folder, "list"))?.path();
        let name = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
        if is_folder(&path) {
            walk(&path, &format!("{name}/"), is_folder, found)?;
        } else {
            found(name, path);
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
        let pipeline = [
            "model_index.json",
            "sd_xl_base_1.0.safetensors",
            "unet/config.json",
            "unet/diffusion_pytorch_model.safetensors",
            "unet/diffusion_pytorch_model.fp16.safetensors",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
            "safety_checker/model.safetensors",
            "tokenizer/merges.txt",
        ];
        let rest =
            ["vae/config.json", "vae/diffusion_pytorch_model.safetensors", "tokenizer/merges.txt", "model_index.json"];
        let chosen = |unet: &str| {
            let unet = format!("unet/diffusion_pytorch_model{unet}.safetensors");
            let head = ["unet/config.json".to_owned(), unet].into_iter();
            head.chain(rest.iter().map(|name| (*name).to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(names(Files::Diffusers("fp16"), &pipeline), chosen(".fp16"));
        assert_eq!(names(Files::Diffusers(""), &pipeline), chosen(""));
        let single = ["config.json", "diffusion_pytorch_model.safetensors", "model.onnx"];
        assert_eq!(names(Files::Diffusers("fp16"), &single), single[..2]);
        assert!(names(Files::Diffusers(""), &["config.json", "README.md"]).is_empty());
        assert!(matches("a*b*c", "a-b-b-c") && !matches("a*b*c", "a-c") && matches("*", ""));
    }
}
