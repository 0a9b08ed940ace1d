//! Identity of the rows of a training, by which a resumed run notices changed data.

use super::manifest::{Manifest, Row, Target};
use prsmed_base::files;
use prsmed_base::{Error, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

/// Characters of a row's mark.
const MARK: usize = 8;

/// Hashes of all rows in their order: texts, class, split, target, and the paths (below the data root) and sizes of image and
/// mask. The data root may move; the content of images is not read.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DataIdentity {
    /// Number of rows.
    num_rows: usize,
    /// SHA-256 over all rows.
    sha256: String,
    /// The first digits of each row's own hash, to name the row that has changed.
    marks: String,
}

impl DataIdentity {
    /// The identity of the rows of `manifest`.
    ///
    /// # Errors
    /// [`Error::Io`] for an image or mask that cannot be read.
    pub fn of(manifest: &Manifest) -> Result<Self> {
        let hashes: Vec<[u8; 32]> =
            manifest.rows.par_iter().map(|row| hash(row, &manifest.root)).collect::<Result<_>>()?;
        let mut whole = Sha256::new();
        let mut marks = String::with_capacity(hashes.len() * MARK);
        for hash in &hashes {
            whole.update(hash);
            for byte in &hash[..MARK / 2] {
                write!(marks, "{byte:02x}").expect("writing to a string");
            }
        }
        Ok(Self { num_rows: hashes.len(), sha256: format!("{:x}", whole.finalize()), marks })
    }

    /// As JSON.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain values serialise")
    }

    /// Reads [`Self::to_json`].
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a damaged file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
        serde_json::from_slice(&text)
            .map_err(|error| Error::data(path, error.to_string(), "use another checkpoint of the run"))
    }

    /// How these rows, those of `manifest`, differ from the rows `before`; `None` if they are the same.
    pub fn difference(&self, before: &Self, manifest: &Manifest) -> Option<String> {
        if self.sha256 == before.sha256 {
            return None;
        }
        let counts = match (before.num_rows, self.num_rows) {
            (was, is) if was == is => String::new(),
            (was, is) => format!("it had {was} rows and now has {is}; "),
        };
        Some(format!("{counts}{}", self.differing_row(before, manifest)))
    }

    /// Number of these rows that are among the rows `others`, with the same split.
    pub fn num_among(&self, others: &Self) -> usize {
        let marks = |identity: &Self| -> Vec<String> {
            let rows = 0..identity.num_rows;
            rows.filter_map(|row| identity.marks.get(row * MARK..(row + 1) * MARK).map(str::to_owned)).collect()
        };
        let known: HashSet<String> = marks(others).into_iter().collect();
        marks(self).into_iter().filter(|mark| known.contains(mark)).count()
    }

    /// As [`Self::difference`], for the rows of rank 0 of a job.
    pub fn difference_from_first(&self, first: &Self, manifest: &Manifest) -> Option<String> {
        let counts = format!("{} rows, and rank 0 has {}; ", self.num_rows, first.num_rows);
        let counts = if self.num_rows == first.num_rows { String::new() } else { counts };
        (self.sha256 != first.sha256).then(|| format!("{counts}{}", self.differing_row(first, manifest)))
    }

    fn differing_row(&self, other: &Self, manifest: &Manifest) -> String {
        let mark = |identity: &Self, row: usize| identity.marks.get(row * MARK..(row + 1) * MARK).map(str::to_owned);
        let changed = (0..self.num_rows).find(|row| mark(self, *row) != mark(other, *row));
        changed.and_then(|row| manifest.rows.get(row)).map_or_else(
            || "rows at its end are missing".to_owned(),
            |row| {
                let what = "question, answer, class, split, or path or size of image or mask";
                format!("the first row that differs is {}:{} ({what})", row.csv.display(), row.line)
            },
        )
    }
}

/// The content of images and masks: for files of at most `most` bytes in all, evenly chosen, their paths and the first bits
/// of their SHA-256. Manifests of the same identity choose the same files.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read.
pub fn content_marks<'a>(manifest: &'a Manifest, most: u64) -> Result<Vec<(&'a Path, u64)>> {
    let all = manifest.rows.iter().flat_map(|row| [row.image_path.as_path(), row.mask_path.as_path()]);
    let mut known = HashSet::new();
    let files: Vec<&Path> = all.filter(|path| known.insert(*path) && path.exists()).collect();
    let size = |path: &&Path| std::fs::metadata(path).map(|found| found.len()).map_err(Error::io(*path, "read"));
    let total: u64 = files.par_iter().map(size).sum::<Result<u64>>()?;
    let every = usize::try_from(total.div_ceil(most.max(1)).max(1)).unwrap_or(usize::MAX);
    let mark = |path: &&'a Path| {
        let bytes = files::read(path, u64::MAX).map_err(Error::io(*path, "read"))?;
        let hash: [u8; 32] = Sha256::digest(&bytes).into();
        let [a, b, c, d, e, f, g, h, ..] = hash;
        Ok((*path, u64::from_le_bytes([a, b, c, d, e, f, g, h])))
    };
    files.par_iter().step_by(every).map(mark).collect()
}

fn hash(row: &Row, root: &Path) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let may_be_missing = row.target != Target::Present && !row.mask_path.exists();
    for path in [&row.image_path, &row.mask_path] {
        add(inside(path, root).to_string_lossy().as_bytes());
        if !(may_be_missing && path == &row.mask_path) {
            add(&std::fs::metadata(path).map_err(Error::io(path, "read"))?.len().to_le_bytes());
        }
    }
    if row.target != Target::Present {
        add(format!("{:?}", row.target).as_bytes());
    }
    for text in [&row.modality, &row.question, &row.answer] {
        add(text.as_bytes());
    }
    add(format!("{:?} {} {:?}", row.split, row.synthetic, row.position).as_bytes());
    Ok(hash.finalize().into())
}

/// The part of `path` below the data root; of a file in another root, its class folder, split folder and name.
fn inside(path: &Path, root: &Path) -> std::path::PathBuf {
    if let Ok(inside) = path.strip_prefix(root) {
        return inside.to_owned();
    }
    let parts: Vec<_> = path.components().collect();
    parts[parts.len().saturating_sub(3)..].iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Root};
    use std::path::PathBuf;

    #[test]
    fn a_file_outside_of_the_data_root_is_named_by_class_split_and_name() {
        let file = Path::new("/pairs/of/a/run/ct/train_images/a.png");
        let expected = PathBuf::from("ct/train_images/a.png");
        assert_eq!(inside(file, Path::new("/pairs/of/a/run")), expected);
        assert_eq!(inside(file, Path::new("/data")), expected);
        assert_eq!(inside(Path::new("a.png"), Path::new("/data")), PathBuf::from("a.png"));
    }

    /// The identity of two rows, each in a new data root.
    fn identity(answer: &str) -> (DataIdentity, Manifest) {
        let (real, extra) = (Root::new(), Root::new());
        let row = |root: &Root, line: u64, answer: &str| {
            root.pair("ct", "train", "a");
            Row {
                line,
                image_path: root.path().join("ct/train_images/a.png"),
                mask_path: root.path().join("ct/train_masks/a.png"),
                ..fixture::row("where", answer, None)
            }
        };
        let manifest = Manifest {
            root: real.path().to_path_buf(),
            rows: vec![row(&real, 2, "there"), row(&extra, 3, answer)],
            modalities: vec!["ct".into()],
            num_leaking: 0,
            skipped: Vec::new(),
        };
        (DataIdentity::of(&manifest).expect("readable"), manifest)
    }

    #[test]
    fn data_roots_may_move_and_the_first_changed_row_is_named() {
        let (before, _) = identity("here");
        let (moved, manifest) = identity("here");
        assert_eq!(moved.difference(&before, &manifest), None);
        let (changed, manifest) = identity("elsewhere");
        assert_eq!((moved.num_among(&before), changed.num_among(&before)), (2, 1));
        let text = changed.difference(&before, &manifest).expect("another answer");
        assert!(text.starts_with("the first row that differs is a.csv:3 ("), "{text}");
    }
}
