//! Identity of the rows and images of a training, by which a resumed run notices changed data, and an evaluation images that
//! the run has seen.

use crate::held_out;
use crate::manifest::{Manifest, Presence, Row};
use crate::marks::{Mark, Marks};
use crate::patient;
use prsmed_base::files;
use prsmed_base::{Error, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::path::Path;

/// Characters of a row's mark.
const MARK: usize = 8;
/// Digits of the hash of an image or a patient.
const DIGITS: usize = 16;

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
    pub seen: Option<SeenImages>,
}

/// Marks of the images and patients of a training and of all trainings that it started from.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SeenImages {
    train: SeenMarks,
    val: SeenMarks,
    /// Why not all of them are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// First digits of hashes, sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct SeenMarks {
    /// Of files, also of those that synthetic pairs were made from.
    files: BTreeSet<String>,
    pixels: BTreeSet<String>,
    patients: BTreeSet<String>,
}

impl SeenMarks {
    fn of(manifest: &Manifest, rows: &[usize], marks: &Marks) -> Self {
        let rows = || rows.iter().map(|row| &manifest.rows[*row]);
        let images = || rows().filter_map(|row| marks.get(&row.image_path));
        Self {
            files: images().map(|marks| digits(&marks.file)).collect(),
            pixels: images().filter_map(|marks| marks.pixels).map(|pixels| digits(&pixels)).collect(),
            patients: rows().filter_map(|row| patient_mark(row.patient.as_deref()?)).collect(),
        }
    }

    /// Whether it has the image of a row, by its pixels; a file of one colour, which has no mark of them, says nothing.
    fn has_image(&self, row: &Row, marks: &Marks) -> bool {
        let Some(marks) = marks.get(&row.image_path) else { return false };
        marks
            .pixels
            .is_some_and(|pixels| self.pixels.contains(&digits(&pixels)) || self.files.contains(&digits(&marks.file)))
    }

    fn has_patient(&self, row: &Row) -> bool {
        row.patient.as_deref().and_then(patient_mark).is_some_and(|patient| self.patients.contains(&patient))
    }

    fn extend(&mut self, other: Self) {
        self.files.extend(other.files);
        self.pixels.extend(other.pixels);
        self.patients.extend(other.patients);
    }
}

/// The first digits of a hash.
fn digits(hash: &Mark) -> String {
    let [a, b, c, d, e, f, g, h, ..] = *hash;
    format!("{:016x}", u64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

/// Hash of a patient's name in any spelling: a run does not say the name.
fn patient_mark(name: &str) -> Option<String> {
    Some(digits(&Sha256::digest(patient::key(name)?).into()))
}

/// Whether a training saw an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// It did not.
    No,
    /// It is a validation image, by which the best checkpoint was chosen.
    Val,
    /// It saw another image of the patient in training.
    Patient,
    /// It is a training image, or one that a synthetic pair of the training was made from.
    Train,
}

impl SeenImages {
    /// Those of the rows that are trained (real and synthetic ones), and of those that validate.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a damaged journal of synthetic pairs.
    pub fn of(manifest: &Manifest, train: &[usize], val: &[usize], marks: &Marks) -> Result<Self> {
        let [mut train_marks, val] = [train, val].map(|rows| SeenMarks::of(manifest, rows, marks));
        let sources = held_out::sources(train.iter().map(|row| &manifest.rows[*row]))?;
        train_marks.files.extend(sources.iter().filter_map(|sum| sum.get(..DIGITS)).map(str::to_owned));
        Ok(Self { train: train_marks, val, unknown: None })
    }

    /// Those in this file of a checkpoint. One of an earlier version or of the original code does not say them.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for a damaged file.
    pub fn of_checkpoint(file: &Path) -> Result<Self> {
        let saved = if file.exists() { DataIdentity::read(file)?.seen } else { None };
        let unknown = || Some("it does not say which images it was trained on".to_owned());
        Ok(saved.unwrap_or_else(|| Self { unknown: unknown(), ..Self::default() }))
    }

    /// Adds those of the checkpoint that the training started from.
    pub fn add_ancestor(&mut self, ancestor: Self) {
        self.train.extend(ancestor.train);
        self.val.extend(ancestor.val);
        let of_ancestor = || "a run that it started from does not say which images it was trained on".to_owned();
        self.unknown = self.unknown.take().or_else(|| ancestor.unknown.map(|_| of_ancestor()));
    }

    /// Whether the trainings saw the image of each of some rows.
    pub fn seen(&self, manifest: &Manifest, rows: &[usize], marks: &Marks) -> Vec<Seen> {
        let seen = |row: &usize| match &manifest.rows[*row] {
            row if self.train.has_image(row, marks) => Seen::Train,
            row if self.train.has_patient(row) => Seen::Patient,
            row if self.val.has_image(row, marks) => Seen::Val,
            _ => Seen::No,
        };
        rows.iter().map(seen).collect()
    }

    /// Whether patients of the training are known.
    pub fn knows_patients(&self) -> bool {
        !self.train.patients.is_empty()
    }
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
        Ok(Self { num_rows: hashes.len(), sha256: format!("{:x}", whole.finalize()), marks, seen: None })
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
    let all = manifest.rows.iter().flat_map(|row| std::iter::once(row.image_path.as_path()).chain(row.mask_paths()));
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
    let mut add_file = |path: &Path, has_file: bool| {
        add(inside(path, root).to_string_lossy().as_bytes());
        if has_file {
            add(&std::fs::metadata(path).map_err(Error::io(path, "read"))?.len().to_le_bytes());
        }
        Ok(())
    };
    add_file(&row.image_path, true)?;
    row.targets.iter().try_for_each(|target| add_file(&target.mask_path, !target.lacks_mask()))?;
    for target in &row.targets {
        if target.presence != Presence::Present {
            add(format!("{:?}", target.presence).as_bytes());
        }
        if !target.name.is_empty() {
            add(target.name.as_bytes());
        }
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
    use crate::manifest::{Split, Target};
    use crate::patient::Spellings;
    use prsmed_base::event::Silent;
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
                targets: Target::only(root.path().join("ct/train_masks/a.png"), Presence::Present),
                ..fixture::row("where", answer, None)
            }
        };
        let manifest = Manifest {
            root: real.path().to_path_buf(),
            rows: vec![row(&real, 2, "there"), row(&extra, 3, answer)],
            modalities: vec!["ct".into()],
            num_leaking: 0,
            skipped: Vec::new(),
            spellings: Spellings::default(),
        };
        (DataIdentity::of(&manifest).expect("readable"), manifest)
    }

    #[test]
    fn data_roots_may_move_and_the_first_changed_row_is_named() {
        let (before, _) = identity("here");
        let (moved, manifest) = identity("here");
        assert_eq!(moved.difference(&before, &manifest), None);
        let (changed, manifest) = identity("elsewhere");
        let text = changed.difference(&before, &manifest).expect("another answer");
        assert!(text.starts_with("the first row that differs is a.csv:3 ("), "{text}");
    }

    /// Rows of images in `root`: path, split and patient.
    fn rows_of(root: &Root, rows: &[(&str, Split, Option<&str>)]) -> (Manifest, Marks) {
        let row = |(path, split, patient): &(&str, Split, Option<&str>)| Row {
            image_path: root.path().join(path),
            targets: Target::only(root.path().join(path), Presence::Present),
            split: *split,
            patient: patient.map(str::to_owned),
            ..fixture::row("where", "there", None)
        };
        let manifest = Manifest {
            root: root.path().to_path_buf(),
            rows: rows.iter().map(row).collect(),
            modalities: vec!["ct".into()],
            num_leaking: 0,
            skipped: Vec::new(),
            spellings: Spellings::default(),
        };
        let mut marks = Marks::default();
        marks.add(manifest.rows.iter().map(|row| row.image_path.as_path()), &Silent);
        (manifest, marks)
    }

    /// A run trained on `a` of patient 1 and validated on `b`, and rows to score: copies of both, and others.
    fn trained_and_scored() -> (SeenImages, (Manifest, Marks), [Root; 2]) {
        let (root, other) = (Root::new(), Root::new());
        for (root, name) in [(&root, "a"), (&root, "b"), (&other, "new"), (&other, "same-patient"), (&other, "source")]
        {
            root.pair("ct", "train", name);
        }
        let path = |root: &Root, name: &str| root.file(&format!("ct/train_images/{name}"));
        std::fs::copy(path(&root, "a.png"), path(&other, "bytes.png")).expect("copied");
        ::image::open(path(&root, "a.png")).expect("an image").save(path(&other, "pixels.tif")).expect("written");
        ::image::open(path(&root, "b.png")).expect("an image").save(path(&other, "val.tif")).expect("written");
        let images =
            [("ct/train_images/a.png", Split::Train, Some("001")), ("ct/train_images/b.png", Split::Val, None)];
        let (manifest, marks) = rows_of(&root, &images);
        let seen = SeenImages::of(&manifest, &[0], &[1], &marks).expect("no pairs");
        let scored = [
            ("ct/train_images/bytes.png", Split::Test, None),
            ("ct/train_images/pixels.tif", Split::Test, Some("p9")),
            ("ct/train_images/val.tif", Split::Test, None),
            ("ct/train_images/new.png", Split::Test, Some("nan")),
            ("ct/train_images/same-patient.png", Split::Test, Some("1.0")),
            ("ct/train_images/source.png", Split::Test, None),
        ];
        let scored = rows_of(&other, &scored);
        (seen, scored, [root, other])
    }

    const EXPECTED: [Seen; 6] = [Seen::Train, Seen::Train, Seen::Val, Seen::No, Seen::Patient, Seen::No];

    #[test]
    fn images_and_patients_of_a_training_are_known_again() {
        let (seen, (scored, marks), _roots) = trained_and_scored();
        assert_eq!(seen.seen(&scored, &[0, 1, 2, 3, 4, 5], &marks), EXPECTED);
        assert_eq!(seen.seen(&scored, &[3, 0], &marks), [Seen::No, Seen::Train]);
        assert!(seen.knows_patients());
        let json = serde_json::to_string(&seen).expect("JSON");
        assert!(!json.contains("001") || !json.contains("\"001\""), "the name of a patient is not written");
        assert_eq!(serde_json::from_str::<SeenImages>(&json).expect("its own JSON"), seen);
    }

    #[test]
    fn what_ancestors_saw_and_what_is_not_known_is_passed_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let (seen, (scored, marks), _roots) = trained_and_scored();
        let all = [0, 1, 2, 3, 4, 5];
        let (identity, _) = identity("here");
        let file = folder.path().join("data.json");
        let write = |seen: Option<SeenImages>| {
            let identity = DataIdentity { seen, ..identity.clone() };
            std::fs::write(&file, identity.to_json()).expect("written");
            SeenImages::of_checkpoint(&file).expect("readable")
        };
        // a chain of three runs: each passes on what it and the ones before have seen
        let mut child = SeenImages::default();
        child.add_ancestor(write(Some(seen)));
        let mut grandchild = SeenImages::default();
        grandchild.add_ancestor(write(Some(child)));
        assert_eq!((grandchild.seen(&scored, &all, &marks), &grandchild.unknown), (EXPECTED.to_vec(), &None));
        // a checkpoint of an earlier version, or none of this program
        let old = write(None);
        assert!(old.unknown.as_ref().is_some_and(|reason| reason.starts_with("it does not say")), "{old:?}");
        assert_eq!(SeenImages::of_checkpoint(&folder.path().join("none")).expect("unknown"), old);
        let mut child = grandchild.clone();
        child.add_ancestor(old);
        let mut grandchild = SeenImages::default();
        grandchild.add_ancestor(write(Some(child)));
        assert!(grandchild.unknown.as_ref().is_some_and(|reason| reason.starts_with("a run that it started from")));
        assert_eq!(grandchild.seen(&scored, &all, &marks), EXPECTED);
    }

    #[test]
    fn the_source_of_a_synthetic_pair_counts_as_trained_on() {
        let (_, (scored, marks), [root, other]) = trained_and_scored();
        let pairs = Root::new();
        pairs.pair("ct", "train", "made");
        let sum = files::sha256(&other.file("ct/train_images/source.png")).expect("a file");
        let line = serde_json::json!({ "name": "made", "class": "ct", "source_sha256": sum, "index": 0 });
        std::fs::write(pairs.file("manifest.jsonl"), format!("{line}\n")).expect("written");
        let (mut manifest, own) = rows_of(&pairs, &[("ct/train_masks/made.png", Split::Train, None)]);
        manifest.rows[0].synthetic = true;
        let seen = SeenImages::of(&manifest, &[0], &[], &own).expect("a journal");
        assert_eq!(seen.seen(&scored, &[5, 3], &marks), [Seen::Train, Seen::No]);
        drop(root);
    }
}
