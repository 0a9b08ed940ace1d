//! Paths of volumes: the choice of one of several, and the first bytes of a file.

use std::io::Read;
use std::path::{Path, PathBuf};

use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Splits `PATH#SELECTION`, unless a file with that whole name exists. A selection that is not a number is split from a path
/// that exists only.
pub fn split_selection(path: &Path) -> (PathBuf, Option<String>) {
    let split = || {
        let text = path.to_str().filter(|_| !path.exists())?;
        let parts = || text.rmatch_indices('#').map(|(at, _)| (Path::new(&text[..at]), &text[at + 1..]));
        let (head, selected) =
            parts().find(|(head, selected)| head.exists() && !selected.is_empty()).or_else(|| {
                parts().next().filter(|(head, selected)| head.file_name().is_some() && selected.parse::<u32>().is_ok())
            })?;
        Some((head.to_path_buf(), Some(selected.to_owned())))
    };
    split().unwrap_or_else(|| (path.to_path_buf(), None))
}

/// The number that a selection is.
///
/// # Errors
/// [`Error::Data`] for a selection that is not a number.
pub(crate) fn number_of(path: &Path, selected: Option<&str>) -> Result<Option<u32>> {
    let Some(text) = selected else { return Ok(None) };
    let hint = format!("write a number, as in `{}#1`", path.display());
    text.parse().map(Some).map_err(|_| Error::data(path, "one of its parts is chosen by its number", hint))
}

/// A selection for names of files: its letters and digits. UIDs may lead to a patient, so they become a hash.
pub fn selection_name(selected: &str) -> String {
    let is_uid = selected.contains('.') && selected.chars().all(|c| c.is_ascii_digit() || c == '.');
    if is_uid {
        // FNV-1a
        let hash =
            selected.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        return format!("{hash:08x}");
    }
    selected.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect()
}

/// The first of several names, for messages: `a, b, c and 2 more`.
pub(crate) fn first_names(names: &[String]) -> String {
    const MOST: usize = 3;
    let more = if names.len() > MOST { format!(" and {} more", names.len() - MOST) } else { String::new() };
    format!("{}{more}", names[..names.len().min(MOST)].join(", "))
}

/// True for a name that ends with a dot and one of the endings, in small or capital letters.
pub(crate) fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    endings.iter().any(|ending| stem_length(name, ending).is_some())
}

/// Number of bytes before the dot of an ending; `None` for a name that has another one or nothing before it.
pub(crate) fn stem_length(name: &[u8], ending: &str) -> Option<usize> {
    let at = name.len().checked_sub(ending.len() + 1).filter(|at| *at > 0)?;
    (name[at] == b'.' && name[at + 1..].eq_ignore_ascii_case(ending.as_bytes())).then_some(at)
}

/// The first bytes of a regular file, by which [`super::format::FORMATS`] are known.
pub(crate) fn start_of(path: &Path) -> Result<Vec<u8>> {
    let mut start = Vec::new();
    let read = files::open(path).and_then(|file| file.take(132).read_to_end(&mut start));
    read.map(|_| start).map_err(Error::io(path, "read"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_is_split_unless_the_file_exists() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.nii.gz");
        assert_eq!(split_selection(&folder.path().join("a.nii.gz#3")), (file.clone(), Some("3".into())));
        assert_eq!(split_selection(&file), (file, None));
        let odd = folder.path().join("odd#1");
        std::fs::write(&odd, "").unwrap();
        assert_eq!(split_selection(&odd), (odd.clone(), None));
        assert_eq!(split_selection(Path::new("a#b")), (PathBuf::from("a#b"), None));
        for selected in ["T2 axial", "1.2.840.5", "T1/T2", "largest", "a#3"] {
            let path = folder.path().join(format!("odd#1#{selected}"));
            assert_eq!(split_selection(&path), (odd.clone(), Some(selected.into())));
        }
        assert_eq!(split_selection(&folder.path().join("none#a")).1, None);
    }

    #[test]
    fn selections_are_numbers_or_parts_of_names() {
        assert_eq!(number_of(Path::new("a"), Some("12")).unwrap(), Some(12));
        assert_eq!(number_of(Path::new("a"), None).unwrap(), None);
        let error = number_of(Path::new("a"), Some("T2")).unwrap_err();
        assert!(error.hint().contains("`a#1`"), "{error}");
        assert_eq!([selection_name("3"), selection_name("T2 ax/e1")], ["3", "T2_ax_e1"]);
        assert_eq!(selection_name("1.2.840.5").len(), 8);
        assert_ne!(selection_name("1.2.840.5"), selection_name("1.2.840.6"));
    }
}
