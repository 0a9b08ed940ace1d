//! The files of one image: one, or one for each sequence of the training images.

use crate::data::volume::path::split_selection;
use crate::data::volume::sequences::{self, MISSING};
use crate::data::volume::{Sequence, SequenceFile, is_volume};
use crate::data::{names, volume};
use crate::error::quoted;
use crate::{Error, Result, files};
use std::path::{Path, PathBuf};

/// The files of one image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageFiles {
    /// An image, or a volume as [`volume::open`] takes it.
    One(PathBuf),
    /// A file for each sequence, in the order of the training images. One of them at least is not missing.
    Sequences(Vec<SequenceFile>),
}

impl From<&Path> for ImageFiles {
    fn from(path: &Path) -> Self {
        Self::One(path.to_owned())
    }
}

impl ImageFiles {
    /// The files that texts name: one file, or for a run whose images have `sequences`, `NAME=FILE` for each, `NAME=none` for
    /// one that is missing, or a folder where the others are found by their names.
    ///
    /// # Errors
    /// [`Error::Config`] for a sequence that is not named or does not exist, for one that is named twice, and for a file that
    /// does not say which sequence it is; [`Error::Io`].
    pub fn named(texts: &[PathBuf], sequences: &[Sequence]) -> Result<Self> {
        if sequences.is_empty() {
            let [only] = texts else {
                let reason = format!("{} files are given, and the images of this run have one each", texts.len());
                return Err(wrong(reason, "give one file; `--images` answers about several"));
            };
            return Ok(Self::One(only.clone()));
        }
        let mut found: Vec<Option<SequenceFile>> = vec![None; sequences.len()];
        let mut folder = None;
        for text in texts {
            let Some((number, path)) = assignment(text, sequences)? else {
                let is_folder = split_selection(text).0.is_dir();
                if !is_folder || folder.replace(text).is_some() {
                    let reason = format!("`{}` does not say which sequence it is", text.display());
                    return Err(wrong(reason, &remedy(sequences)));
                }
                continue;
            };
            let name = sequences[number].name.clone();
            if found[number].replace(SequenceFile { name: name.clone(), path }).is_some() {
                return Err(wrong(format!("the sequence `{name}` is named twice"), "name each sequence once"));
            }
        }
        if let Some(folder) = folder {
            for (file, sequence) in found.iter_mut().zip(sequences).filter(|(file, _)| file.is_none()) {
                let path = Some(in_folder(folder, &sequence.name, sequences)?);
                *file = Some(SequenceFile { name: sequence.name.clone(), path });
            }
        }
        let unnamed: Vec<&Sequence> =
            found.iter().zip(sequences).filter(|(file, _)| file.is_none()).map(|(_, sequence)| sequence).collect();
        if !unnamed.is_empty() {
            let reason = format!("the file of {} is not given", sequences::list(unnamed));
            return Err(wrong(reason, &remedy(sequences)));
        }
        Self::of_sequences(found.into_iter().flatten().collect())
    }

    /// The files of all sequences of an image.
    ///
    /// # Errors
    /// [`Error::Config`] if all are missing, one file is given twice, and for flat images beside volumes; [`Error::Io`].
    pub fn of_sequences(files: Vec<SequenceFile>) -> Result<Self> {
        let paths: Vec<&PathBuf> = files.iter().filter_map(|file| file.path.as_ref()).collect();
        let Some(first) = paths.first() else {
            return Err(wrong("all sequences are missing".into(), "give the file of one of them"));
        };
        if let Some(number) = (1..paths.len()).find(|number| paths[..*number].contains(&paths[*number])) {
            let reason = format!("`{}` is the file of two sequences", paths[number].display());
            return Err(wrong(reason, "give each sequence its own file, or `NAME=none`"));
        }
        for path in &paths {
            if is_volume(path)? != is_volume(first)? {
                let reason = format!(
                    "of `{}` and `{}`, one is a flat image, and the other a volume",
                    first.display(),
                    path.display()
                );
                return Err(wrong(reason, "give all sequences of an image as one kind of file"));
            }
        }
        Ok(Self::Sequences(files))
    }

    /// The first file.
    pub fn first(&self) -> &Path {
        match self {
            Self::One(path) => path,
            Self::Sequences(files) => {
                files.iter().find_map(|file| file.path.as_deref()).expect("a file that is not missing")
            }
        }
    }

    /// All files.
    pub fn paths(&self) -> Vec<&Path> {
        match self {
            Self::One(path) => vec![path],
            Self::Sequences(files) => files.iter().filter_map(|file| file.path.as_deref()).collect(),
        }
    }

    /// True for volumes, and DICOM images.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read.
    pub fn are_volumes(&self) -> Result<bool> {
        volume::is_volume(self.first())
    }

    /// Names of the files without their folders, which may name a patient: `T1=a.nii.gz, T2=none`.
    pub fn names(&self) -> Option<String> {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let of = |SequenceFile { name: sequence, path }: &SequenceFile| {
            let name = path.as_deref().and_then(name).unwrap_or_else(|| MISSING.to_owned());
            format!("{sequence}={name}")
        };
        match self {
            Self::One(path) => name(path),
            Self::Sequences(files) => Some(files.iter().map(of).collect::<Vec<_>>().join(", ")),
        }
    }
}

fn wrong(reason: String, hint: &str) -> Error {
    Error::argument("image", reason, hint)
}

/// How the files of sequences are named.
pub(super) fn remedy(sequences: &[Sequence]) -> String {
    let all: Vec<String> =
        sequences.iter().map(|sequence| format!("the argument `image={}=FILE`", sequence.name)).collect();
    format!(
        "the images of this run have the sequences {}: give {}, with `none` as FILE for one that is missing",
        sequences::list(sequences),
        all.join(" and ")
    )
}

/// The number of the sequence of `NAME=FILE`, and the file unless it is missing; `None` for a path without a name.
fn assignment(text: &Path, sequences: &[Sequence]) -> Result<Option<(usize, Option<PathBuf>)>> {
    let split = text.to_str().filter(|_| !text.exists()).and_then(|text| text.split_once('='));
    let Some((name, file)) = split else { return Ok(None) };
    let is_it = |sequence: &Sequence| sequence.name.eq_ignore_ascii_case(name.trim());
    let Some(number) = sequences.iter().position(is_it) else {
        return Err(wrong(format!("there is no sequence `{name}`"), &remedy(sequences)));
    };
    if file.eq_ignore_ascii_case(MISSING) {
        return Ok(Some((number, None)));
    }
    let path = PathBuf::from(file);
    if !split_selection(&path).0.exists() {
        let similar = names::similar(&path).map_or_else(String::new, |similar| format!("; {similar}"));
        return Err(wrong(format!("there is no file `{file}` for `{name}`{similar}"), "correct the path"));
    }
    Ok(Some((number, Some(path))))
}

/// The file of a sequence in a folder: the one whose name has that of the sequence, or else the DICOM series whose
/// description has it.
fn in_folder(folder: &Path, name: &str, sequences: &[Sequence]) -> Result<PathBuf> {
    let entries = files::visible_entries(folder)?;
    let stem = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let has = |path: &Path, name: &str| stem(path).contains(&name.to_lowercase());
    let has_word = |path: &Path, name: &str| {
        let (stem, name) = (stem(path), name.to_lowercase());
        let is_inside = |letter: Option<char>| letter.is_some_and(char::is_alphanumeric);
        stem.match_indices(&name).any(|(at, found)| {
            !is_inside(stem[..at].chars().next_back()) && !is_inside(stem[at + found.len()..].chars().next())
        })
    };
    // `T1` is not meant by the name of `T1ce`
    let is_other = |path: &Path| {
        let longer = sequences.iter().filter(|other| other.name.len() > name.len());
        longer.into_iter().any(|other| has(path, &other.name)) && !has_word(path, name)
    };
    let fit = |is_it: &dyn Fn(&Path, &str) -> bool| -> Vec<PathBuf> {
        entries.iter().filter(|path| is_it(path, name) && !is_other(path)).cloned().collect()
    };
    let words = fit(&has_word);
    let found = if words.is_empty() { fit(&has) } else { words };
    match found.as_slice() {
        [only] => Ok(only.clone()),
        [] if is_volume(folder)? && has_series(&entries)? => Ok(PathBuf::from(format!("{}#{name}", folder.display()))),
        [] => {
            let reason = format!("`{}` has no file with `{name}` in its name", folder.display());
            let hint = format!("give the argument `image={name}=FILE`, or `image={name}=none` if it is missing");
            Err(wrong(reason, &hint))
        }
        several => {
            let shown: Vec<String> = several.iter().map(|path| stem(path)).collect();
            let reason =
                format!("several files of `{}` have `{name}` in their names: {}", folder.display(), quoted(&shown));
            Err(wrong(reason, &format!("choose one with the argument `image={name}=FILE`")))
        }
    }
}

/// True if files or folders of a folder can be DICOM series.
fn has_series(entries: &[PathBuf]) -> Result<bool> {
    for path in entries {
        if path.is_dir() || volume::format::of_volume(path)?.is_some_and(|format| format.is_series) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences(names: &[&str]) -> Vec<Sequence> {
        names.iter().map(|name| Sequence { name: (*name).to_owned(), window: volume::Window::Auto }).collect()
    }

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            // without content, the name decides
            let content: &[u8] = if name.ends_with("png") { b"\x89PNG\r\n\x1a\n" } else { b"" };
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        folder
    }

    #[test]
    fn sequences_are_named_by_flag_or_found_in_a_folder() {
        let inside = folder(&["Sub-1_T1.png", "Sub-1_T1ce.png", "sub-1_flair_reg.png", "seg.png"]);
        let at = |name: &str| inside.path().join(name);
        let all = sequences(&["T1", "FLAIR"]);
        let by_flag = |texts: &[String]| {
            let texts: Vec<PathBuf> = texts.iter().map(PathBuf::from).collect();
            ImageFiles::named(&texts, &all).map(|files| files.names().unwrap())
        };
        let text = |name: &str, file: &str| format!("{name}={}", at(file).display());
        // in any order
        let both = by_flag(&[text("flair", "sub-1_flair_reg.png"), text("T1", "Sub-1_T1.png")]);
        assert_eq!(both.unwrap(), "T1=Sub-1_T1.png, FLAIR=sub-1_flair_reg.png");
        assert_eq!(by_flag(&[text("T1", "seg.png"), "FLAIR=none".into()]).unwrap(), "T1=seg.png, FLAIR=none");
        let root = inside.path().display().to_string();
        assert_eq!(by_flag(std::slice::from_ref(&root)).unwrap(), "T1=Sub-1_T1.png, FLAIR=sub-1_flair_reg.png");
        assert_eq!(by_flag(&[root, text("T1", "seg.png")]).unwrap(), "T1=seg.png, FLAIR=sub-1_flair_reg.png");
        let three = ImageFiles::named(&[inside.path().to_owned()], &sequences(&["T1ce", "T1"])).unwrap();
        assert_eq!(three.names().unwrap(), "T1ce=Sub-1_T1ce.png, T1=Sub-1_T1.png");
    }

    #[test]
    fn what_does_not_say_all_sequences_is_refused() {
        let inside = folder(&["a_T1w.png", "b_T1w.png", "x.png", "vol.nii"]);
        let at = |name: &str| inside.path().join(name).display().to_string();
        let all = sequences(&["T1", "T2"]);
        let refused = |texts: &[String]| {
            let texts: Vec<PathBuf> = texts.iter().map(PathBuf::from).collect();
            let error = ImageFiles::named(&texts, &all).unwrap_err();
            (error.to_string(), error.hint())
        };
        for (texts, expected, remedy) in [
            (
                vec![at("x.png")],
                "does not say which sequence it is",
                "`image=T1=FILE` and the argument `image=T2=FILE`",
            ),
            (vec![format!("T1={}", at("x.png"))], "the file of `T2` is not given", "`none` as FILE"),
            (vec![format!("T1={}", at("x.png")), "t1=none".into()], "`T1` is named twice", "once"),
            (vec!["FLAIR=none".into()], "no sequence `FLAIR`", "`T1`, `T2`"),
            (vec!["T1=gone.png".into()], "no file `gone.png` for `T1`", "correct"),
            (vec!["T1=none".into(), "T2=none".into()], "all sequences are missing", "one of them"),
            (vec![format!("T1={}", at("x.png")), format!("T2={}", at("x.png"))], "of two sequences", "NAME=none"),
            (vec![format!("T1={}", at("x.png")), format!("T2={}", at("vol.nii"))], "one is a flat image", "one kind"),
            (vec![inside.path().display().to_string()], "`a_t1w.png`, `b_t1w.png`", "`image=T1=FILE`"),
            (vec![inside.path().display().to_string(), "T1=none".into()], "no file with `T2`", "`image=T2=none`"),
        ] {
            let (reason, hint) = refused(&texts);
            assert!(reason.contains(expected) && hint.contains(remedy), "{texts:?}: {reason}; {hint}");
        }
        let two = [at("x.png"), at("a_T1w.png")].map(PathBuf::from);
        assert!(ImageFiles::named(&two, &[]).unwrap_err().to_string().contains("2 files are given"));
    }
}
