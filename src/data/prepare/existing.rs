//! What a data root already contains: its patients with their splits, and the files of the class.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::item::{OTHER_IMAGE, Skipped};
use super::options::PrepareOptions;
use crate::manifest::{Manifest, Split};
use crate::marks::{Mark, Marks};
use crate::patient::Spellings;
use prsmed_base::event::Observer;
use prsmed_base::{Error, Result, files};

/// The rows of the data root before the preparation.
#[derive(Debug, Default)]
pub(super) struct Existing {
    /// Splits of the patients; `None` for a patient in several.
    patients: BTreeMap<String, Option<Split>>,
    /// Spellings of the patients.
    pub(super) spellings: Spellings,
    /// All images with their splits.
    all: BTreeSet<(PathBuf, Split)>,
    /// Images of the class by the stem of their masks.
    images: BTreeMap<String, PathBuf>,
    /// The first annotation file of the class that did not exist before the rows were read.
    free: PathBuf,
}

impl Existing {
    /// Reads the rows of `options.out`.
    ///
    /// # Errors
    /// [`Error::Data`] if the class exists and nothing may be added to it, and for bad rows.
    pub(super) fn read(options: &PrepareOptions) -> Result<Self> {
        let class = options.out.join(&options.modality);
        for path in [&class, &annotation_path(options, 1)] {
            // a symbolic link counts, also one that leads nowhere
            if let (Ok(found), false) = (path.symlink_metadata(), options.append && !path.is_symlink()) {
                let reason = match (found.is_symlink(), annotation_path(options, 1).exists()) {
                    (true, _) => "already exists as a link",
                    (false, true) => "already exists; nothing was written",
                    (false, false) => {
                        "already exists without annotations, as a preparation that was stopped leaves it; nothing was written"
                    }
                };
                let hint = "give another modality name or data root, remove the old one first, or add the new files to it \
                            with the argument `append`, which also continues a preparation that was stopped";
                return Err(Error::data(path, reason, hint));
            }
        }
        refuse_other_case(options)?;
        Self::of_rows(options)
    }

    /// Reads the rows of `options.out`, which may have the class.
    ///
    /// # Errors
    /// [`Error::Data`] for bad rows.
    pub(super) fn of_rows(options: &PrepareOptions) -> Result<Self> {
        let mut existing = Self { free: free_annotation_path(options), ..Self::default() };
        if !has_rows(&options.out.join("annotations"))? {
            return Ok(existing);
        }
        let manifest = Manifest::open(&options.out, None)?;
        existing.spellings = manifest.spellings;
        for row in manifest.rows {
            if let Some(patient) = &row.patient {
                let split = existing.patients.entry(patient.clone()).or_insert(Some(row.split));
                *split = split.filter(|split| *split == row.split);
            }
            existing.all.insert((row.image_path.clone(), row.split));
            if row.modality == options.modality {
                let stem = row.target().mask_path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                existing.images.insert(stem, row.image_path);
            }
        }
        Ok(existing)
    }

    /// The splits of those `patients` that the data root contains.
    ///
    /// # Errors
    /// [`Error::Data`] for a patient in several splits.
    pub(super) fn splits<'a>(
        &self,
        patients: impl Iterator<Item = &'a str>,
        root: &Path,
    ) -> Result<BTreeMap<String, Split>> {
        let known = patients.filter_map(|patient| Some((patient, self.patients.get(patient)?)));
        let split = |(patient, split): (&str, &Option<Split>)| {
            let split = split.ok_or_else(|| {
                let reason = format!("patient `{patient}` is in several splits of this data root");
                let hint = "move all rows of this patient into one split; `prsmed data check` lists such patients";
                Error::data(root, reason, hint)
            });
            Ok((patient.to_owned(), split?))
        };
        known.map(split).collect()
    }

    /// The images of all classes by their pixels, each with its split. `marks` are added to.
    pub(super) fn pixels(&self, marks: &mut Marks, observer: &dyn Observer) -> BTreeMap<Mark, (&Path, Split)> {
        marks.add(self.all.iter().map(|(path, _)| path.as_path()), observer);
        let of = |(path, split): &'_ (PathBuf, Split)| Some((marks.get(path)?.pixels?, *split));
        let all = self.all.iter().filter_map(|image| of(image).map(|(mark, split)| (mark, (image.0.as_path(), split))));
        all.collect()
    }

    /// Whether the class already has an image under this stem. If `is_same` says that it has another content than `source`,
    /// the new file is skipped.
    ///
    /// # Errors
    /// Those of `is_same`; the inner error says why the new file is skipped.
    pub(super) fn has(
        &self,
        stem: &str,
        source: &Path,
        is_same: impl FnOnce(&Path) -> Result<bool>,
    ) -> Result<Result<bool, Skipped>> {
        let Some(image) = self.images.get(stem) else { return Ok(Ok(false)) };
        if is_same(image)? {
            return Ok(Ok(true));
        }
        let reason = format!("{OTHER_IMAGE}`{}`", image.display());
        Ok(Err(Skipped { path: source.to_owned(), reason }))
    }

    /// The annotation file for new rows.
    ///
    /// # Errors
    /// [`Error::Data`] if it exists: another preparation has added files since the rows were read.
    pub(super) fn free_annotation_path(&self) -> Result<&Path> {
        if self.free.symlink_metadata().is_err() {
            return Ok(&self.free);
        }
        let reason = "another process has added files to this class meanwhile";
        Err(Error::data(&self.free, reason, "run the command again with the argument `append`"))
    }

    /// Whether the class has images.
    pub(super) fn has_images(&self) -> bool {
        !self.images.is_empty()
    }

    /// Whether the class has a mask with this stem.
    pub(super) fn has_stem(&self, stem: &str) -> bool {
        self.images.contains_key(stem)
    }
}

/// Refuses a class whose name differs from that of another one in case only: on some disks both have one folder.
fn refuse_other_case(options: &PrepareOptions) -> Result<()> {
    let names = fs::read_dir(&options.out).into_iter().flatten().flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let own = &options.modality;
    let Some(other) = names.find(|name| name != own && name.eq_ignore_ascii_case(own)) else { return Ok(()) };
    let reason = format!("the data root has the folder `{other}`, and `{own}` differs in upper and lower case only");
    Err(Error::config("modality", reason, format!("use `{other}` with the argument `append`, or another name")))
}

/// Whether a folder of annotations, which is no link, has a CSV file.
fn has_rows(folder: &Path) -> Result<bool> {
    if !folder.symlink_metadata().is_ok_and(|found| found.is_dir()) {
        return Ok(false);
    }
    let is_table = |path: &PathBuf| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    Ok(files::visible_entries(folder)?.iter().any(is_table))
}

/// Whether two files have the same content.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn same_bytes(a: &Path, b: &Path) -> Result<bool> {
    let length = |path: &Path| fs::metadata(path).map(|found| found.len()).map_err(Error::io(path, "read"));
    let bytes = |path: &Path| fs::read(path).map_err(Error::io(path, "read"));
    Ok(length(a)? == length(b)? && bytes(a)? == bytes(b)?)
}

/// Annotation file number `number` (from 1) of the class.
pub(super) fn annotation_path(options: &PrepareOptions, number: usize) -> PathBuf {
    let ending = if number == 1 { "csv".to_owned() } else { format!("{number}.csv") };
    options.out.join("annotations").join(format!("{}.{ending}", options.modality))
}

/// The first annotation file of the class that does not exist.
fn free_annotation_path(options: &PrepareOptions) -> PathBuf {
    let mut all = (1..).map(|number| annotation_path(options, number));
    all.find(|path| path.symlink_metadata().is_err()).expect("the numbers do not end")
}
