//! Paths of volumes: the choice of one of several, and the first bytes of a file.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;

/// Splits `PATH#N`, unless a file with that whole name exists.
pub fn split_selection(path: &Path) -> (PathBuf, Option<u32>) {
    let split = || {
        let (name, number) = path.file_name()?.to_str()?.rsplit_once('#')?;
        let number = number.parse().ok()?;
        (!name.is_empty() && !path.exists()).then(|| (path.with_file_name(name), Some(number)))
    };
    split().unwrap_or_else(|| (path.to_path_buf(), None))
}

/// True for a name that ends with `.nii` or `.nii.gz`.
pub(crate) fn is_nifti_name(path: &Path) -> bool {
    has_extension(path, "nii")
        || (has_extension(path, "gz") && path.file_stem().is_some_and(|stem| has_extension(Path::new(stem), "nii")))
}

/// True for a name that ends with a dot and `extension`, in small or capital letters.
pub(crate) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

/// Reads the first bytes of a regular file; how many there were.
pub(crate) fn first_bytes(path: &Path, buffer: &mut [u8]) -> Result<usize> {
    let mut file = files::open(path).map_err(Error::io(path, "read"))?;
    let mut done = 0;
    while done < buffer.len() {
        match file.read(&mut buffer[done..]).map_err(Error::io(path, "read"))? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_is_split_unless_the_file_exists() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.nii.gz");
        assert_eq!(split_selection(&folder.path().join("a.nii.gz#3")), (file.clone(), Some(3)));
        assert_eq!(split_selection(&file), (file, None));
        let odd = folder.path().join("odd#1");
        std::fs::write(&odd, "").unwrap();
        assert_eq!(split_selection(&odd), (odd.clone(), None));
        assert_eq!(split_selection(Path::new("a#b")), (PathBuf::from("a#b"), None));
    }

    #[test]
    fn nifti_names_have_two_endings() {
        for (name, is_nifti) in
            [("a.nii", true), ("a.b.NII.gz", true), ("a.gz", false), ("nii", false), ("a.dcm", false)]
        {
            assert_eq!(is_nifti_name(Path::new(name)), is_nifti, "{name}");
        }
    }
}
