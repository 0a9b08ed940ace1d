//! Identity of the rows and images of a training, by which a resumed run notices changed data, and an evaluation images that
//! the run has seen.

use super::manifest::{Manifest, Row, Target};
use prsmed_base::files;
use prsmed_base::{Error, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Characters of a row's mark.
const MARK: usize = 8;

/// Hashes of all rows in their order: texts, class, split, target, and the paths (below the data root) and sizes of image and
/// mask. The data root may move. Images of the training are also known by their content, wherever they are.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DataIdentity {
    /// Number of rows.
    num_rows: usize,
    /// SHA-256 over all rows.
    sha256: String,
    /// The first digits of each row's own hash, to name the row that has changed.
    marks: String,
    /// `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    images: Option<SeenImages>,
}

/// Marks of the images that a training saw, sorted.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct SeenImages {
    train: BTreeSet<String>,
    val: BTreeSet<String>,
}

/// Whether a training saw an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// It did not.
    No,
    /// It is a validation image, by which the best checkpoint was chosen.
    Val,
    /// It is a training image.
    Train,
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
        Ok(Self { num_rows: hashes.len(), sha256: format!("{:x}", whole.finalize()), marks, images: None })
    }

    /// The same with the images of the rows that are trained, and of those that validate. Images that cannot be read are
    /// left out: the training itself reports them.
    #[must_use]
    pub fn with_images(self, manifest: &Manifest, train: &[usize], val: &[usize]) -> Self {
        let marks = |rows| images_of(manifest, rows).into_par_iter().filter_map(|path| image_mark(path).ok()).collect();
        Self { images: Some(SeenImages { train: marks(train), val: marks(val) }), ..self }
    }

    /// Whether this training saw the image of each of some rows; `None` if an earlier version saved it.
    ///
    /// # Errors
    /// [`Error::Io`] for an image that cannot be read.
    pub fn seen(&self, manifest: &Manifest, rows: &[usize]) -> Result<Option<Vec<Seen>>> {
        let Some(SeenImages { train, val }) = &self.images else { return Ok(None) };
        let marks: HashMap<&Path, String> = images_of(manifest, rows)
            .into_par_iter()
            .map(|path| Ok((path, image_mark(path)?)))
            .collect::<Result<_>>()?;
        let seen = |row: &usize| match &marks[manifest.rows[*row].image_path.as_path()] {
            mark if train.contains(mark) => Seen::Train,
            mark if val.contains(mark) => Seen::Val,
            _ => Seen::No,
        };
        Ok(Some(rows.iter().map(seen).collect()))
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

/// The different images of some rows.
fn images_of<'a>(manifest: &'a Manifest, rows: &[usize]) -> BTreeSet<&'a Path> {
    rows.iter().map(|row| manifest.rows[*row].image_path.as_path()).collect()
}

/// Twelve hexadecimal digits of a hash of a file's size and content; of a large file, of parts spread evenly over it.
fn image_mark(path: &Path) -> Result<String> {
    /// Bytes of a part, and number of parts.
    const PART: u64 = 4096;
    const PARTS: u64 = 16;
    let read = || {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let (length, parts) = if size <= PART * PARTS { (size, 1) } else { (PART, PARTS) };
        let mut hash = Sha256::new();
        hash.update(size.to_le_bytes());
        let mut part = vec![0; usize::try_from(length).unwrap_or_default()];
        for number in 0..parts {
            file.read_exact_at(&mut part, (size - length) * number / (parts - 1).max(1))?;
            hash.update(&part);
        }
        std::io::Result::Ok(hash.finalize())
    };
    let hash = read().map_err(Error::io(path, "read"))?;
    Ok(format!("{hash:x}")[..12].to_owned())
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
    use crate::manifest::Split;
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

    #[test]
    fn images_are_known_by_their_content_in_another_place_and_split() {
        let (root, other) = (Root::new(), Root::new());
        for (root, class, name) in [(&root, "ct", "a"), (&root, "ct", "b"), (&other, "mr", "x"), (&other, "mr", "new")]
        {
            root.pair(class, "train", name);
        }
        let path = |root: &Root, name: &str| root.path().join(name);
        std::fs::copy(path(&root, "ct/train_images/a.png"), path(&other, "mr/train_images/x.png")).expect("copied");
        let row = |image_path: PathBuf, split| Row {
            mask_path: image_path.clone(),
            image_path,
            split,
            ..fixture::row("where", "there", None)
        };
        let manifest = |root: &Root, rows: Vec<Row>| Manifest {
            root: root.path().to_path_buf(),
            rows,
            modalities: vec!["ct".into()],
            num_leaking: 0,
            skipped: Vec::new(),
        };
        let trained = manifest(
            &root,
            vec![
                row(path(&root, "ct/train_images/a.png"), Split::Train),
                row(path(&root, "ct/train_images/b.png"), Split::Val),
            ],
        );
        let identity = DataIdentity::of(&trained).expect("readable");
        assert_eq!(identity.seen(&trained, &[0]).expect("readable"), None);
        let identity = identity.with_images(&trained, &[0], &[1]);
        let saved: DataIdentity = serde_json::from_str(&identity.to_json()).expect("its own JSON");
        assert_eq!(saved, identity);
        let scored = ["mr/train_images/x.png", "mr/train_images/new.png", "mr/train_images/x.png"];
        let scored = manifest(&other, scored.map(|name| row(path(&other, name), Split::Test)).into());
        assert_eq!(saved.seen(&scored, &[0, 1, 2]).expect("readable"), Some(vec![Seen::Train, Seen::No, Seen::Train]));
        assert_eq!(saved.seen(&scored, &[1]).expect("readable"), Some(vec![Seen::No]));
        assert_eq!(saved.seen(&trained, &[0, 1]).expect("readable"), Some(vec![Seen::Train, Seen::Val]));
        // a file of an earlier version
        let mut old: serde_json::Value = serde_json::from_str(&identity.to_json()).expect("JSON");
        old.as_object_mut().expect("an object").remove("images").expect("marks");
        let old: DataIdentity = serde_json::from_value(old).expect("an identity");
        assert_eq!(old.seen(&scored, &[0]).expect("readable"), None);
    }

    #[test]
    fn a_mark_covers_parts_of_the_whole_file() {
        let root = Root::new();
        let mark = |bytes: &[u8]| {
            let path = root.file("a.png");
            std::fs::write(&path, bytes).expect("written");
            image_mark(&path).expect("readable")
        };
        let large = vec![7; 100_000];
        let changed = |at: usize| {
            let mut bytes = large.clone();
            bytes[at] = 8;
            mark(&bytes)
        };
        assert_eq!((mark(&large), mark(&large).len()), (mark(&large), 12));
        for at in [0, 4095, 95_905 / 15, 95_904 / 15 * 7 + 2000, 99_999] {
            assert_ne!(changed(at), mark(&large), "byte {at}");
        }
        let mut small = vec![7; 50_000];
        let before = mark(&small);
        small[30_001] = 8;
        assert_ne!(mark(&small), before, "all of a small file");
        assert_ne!(mark(&[7; 5000]), mark(&[7; 5001]));
        assert_eq!(mark(b"").len(), 12);
        assert_ne!(mark(b"a"), mark(b"b"));
    }
}
