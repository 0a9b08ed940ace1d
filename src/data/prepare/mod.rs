//! Prepares a data root in PRS-Med's layout from a folder of images and a folder of masks, or from volumes and their label
//! maps, whose slices become images.
//!
//! Positions are computed from the masks; questions and answers are drawn from templates. Images of a patient are in one
//! split, if [`Patients`] says who the patients are. Several regions of a mask are described by one location: the box of
//! all for quadrants, the centroid of all for the grid. With [`Several::Regions`], exactly two regions are described by
//! two locations. Deviation from PRS-Med's pipeline, which names the first and the last of any number of regions.
//!
//! [`PrepareOptions::append`] adds to a class that exists. The new rows are in a new annotation file, so that the
//! existing ones stay as they are.

mod existing;
mod location;
mod pairs;
mod patients;
mod rows;
mod splits;
mod structures;
mod volumes;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use image::DynamicImage;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use self::existing::Existing;
use self::location::LocationWords;
use self::pairs::UsablePair;
use self::patients::Finder;
pub use self::patients::Patients;
pub use self::structures::NamedLabels;
use self::structures::Structure;
use crate::data::bit_depth::DepthReport;
use crate::data::labels::Labels;
use crate::data::manifest::Split;
use crate::data::position::Zones;
use crate::data::prepared::{Intensity, Prepared};
use crate::data::templates::Templates;
use crate::data::volume::{Axis, Window};
use crate::event::Observer;
use crate::location::first_location;
use crate::{Error, Result};

/// Suffixes that a mask's stem may have in addition to its image's stem, compared without case.
pub const MASK_SUFFIXES: [&str; 7] = ["_mask", "_masks", "_segmentation", "_seg", "_label", "_labels", "_gt"];

/// Description of several separate regions of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Several {
    /// One location for all regions, and their number.
    #[default]
    Together,
    /// Two locations for two regions; otherwise as `Together`.
    Regions,
}

/// Rows about targets that are not in an image: its mask has no foreground.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Negatives {
    /// Such images are skipped.
    #[default]
    Skipped,
    /// All such images of folders; of volumes, at most as many slices as there are with the target.
    Usual,
    /// At most this number for each image with the target, drawn with the seed.
    PerPositive(f64),
}

impl Negatives {
    fn are_wanted(self) -> bool {
        self != Self::Skipped
    }
}

/// Which slices of volumes become images, and how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SliceOptions {
    /// Direction of the slices.
    pub axis: Axis,
    /// Use every `every`-th slice, at least 1.
    pub every: usize,
    /// Intensity window; `None` = that of the class when slices are added to it, otherwise [`Window::Auto`].
    pub window: Option<Window>,
    /// Use label maps on another grid than their volume: each voxel gets the label of the nearest voxel.
    pub resample: bool,
}

impl Default for SliceOptions {
    fn default() -> Self {
        Self { axis: Axis::Axial, every: 1, window: None, resample: false }
    }
}

/// Options of [`prepare`].
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// A folder of images (PNG, JPEG, TIFF; subfolders are not searched), or volumes: NIfTI files, DICOM files, folders
    /// and zips, or folders of them.
    pub images: Vec<PathBuf>,
    /// A folder of masks, or the label maps of volumes. It may be the image folder if the masks have one of
    /// [`MASK_SUFFIXES`].
    pub masks: Vec<PathBuf>,
    /// Name of the modality: class of the images, and name of the folder and annotation file in `out`.
    pub modality: String,
    /// Output data root; may already contain other modalities.
    pub out: PathBuf,
    /// Add to the modality if it exists. Existing files and rows do not change.
    pub append: bool,
    /// Patients of the images.
    pub patients: Patients,
    /// Rows about absent targets.
    pub negatives: Negatives,
    /// Set of locations.
    pub zones: Zones,
    /// Description of several regions.
    pub several: Several,
    /// Name of the target in questions and answers (`lesion`), if no labels are named.
    pub target: String,
    /// Name of the image in questions and answers (`image`, `chest X-ray`).
    pub image_word: String,
    /// Number of rows (different questions) per mask, at least 1 and at most the number of question templates.
    pub rows_per_image: usize,
    /// Fraction of the patients or images for validation, 0..=1.
    pub val_frac: f64,
    /// Fraction of the patients or images for testing, 0..=1; at most `1 - val_frac`.
    pub test_frac: f64,
    /// Seed of splits and templates.
    pub seed: u64,
    /// Template file; `None` = the built-in templates.
    pub templates: Option<PathBuf>,
    /// Labels of masks that are the target; empty for masks of one label.
    pub labels: Labels,
    /// Labels of masks with their own target each; empty for one target.
    pub named_labels: NamedLabels,
    /// Slices of volumes.
    pub slices: SliceOptions,
}

impl PrepareOptions {
    /// Default options for these folders: grid, regions together, two rows, 80/10/10, `lesion` in an `image`.
    pub fn new(
        images: impl Into<PathBuf>,
        masks: impl Into<PathBuf>,
        modality: impl Into<String>,
        out: impl Into<PathBuf>,
    ) -> Self {
        Self {
            images: vec![images.into()],
            masks: vec![masks.into()],
            modality: modality.into(),
            out: out.into(),
            append: false,
            patients: Patients::Unknown,
            negatives: Negatives::Skipped,
            zones: Zones::Grid,
            several: Several::Together,
            target: "lesion".into(),
            image_word: "image".into(),
            rows_per_image: 2,
            val_frac: 0.1,
            test_frac: 0.1,
            seed: 0,
            templates: None,
            labels: Labels::NONE,
            named_labels: NamedLabels::default(),
            slices: SliceOptions::default(),
        }
    }
}

/// A file that is not in the data root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Why it was skipped.
    pub reason: String,
}

/// Results of [`prepare`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PrepareReport {
    /// Number of volumes with a usable label map; `None` if the images are files of their own.
    pub volumes: Option<usize>,
    /// Axis and intensity window of the slices of volumes.
    pub intensity: Option<Intensity>,
    /// What was assumed about volumes.
    pub notes: Vec<String>,
    /// Number of new images in the data root.
    pub images: usize,
    /// Number of rows of the new annotation file.
    pub rows: usize,
    /// Number of new masks whose target is not in the image.
    pub absent: usize,
    /// Number of absent targets that were left out, because there were more than [`Negatives`] allows.
    pub absent_left_out: usize,
    /// Number of patients of the new images; `None` if patients are not known.
    pub patients: Option<usize>,
    /// Files without a patient; each is its own patient.
    pub own_patients: Vec<PathBuf>,
    /// Number of images that the data root contained before.
    pub known: usize,
    /// Number of new images by split.
    pub images_by_split: BTreeMap<String, usize>,
    /// Skipped files, by path.
    pub skipped: Vec<Skipped>,
    /// 16-bit images, and those that use a small part of the range.
    pub depth: DepthReport,
}

/// A mask of one structure in one image, before it is written.
#[derive(Debug, Clone, Default, PartialEq)]
struct Item {
    /// Name of the image. Several structures of an image have the same.
    image: String,
    /// Stem of the image file and the mask file in the data root.
    stem: String,
    /// Patient, if patients are known.
    patient: Option<String>,
    /// Name of the structure.
    target: String,
    /// `None` if the structure is not in the image.
    location: Option<LocationWords>,
    /// Size of a pixel in mm, across and down.
    spacing_mm: Option<[f64; 2]>,
    /// File name of the volume, and number of the slice.
    slice: Option<(String, usize)>,
}

impl Item {
    /// Items of one unit are in one split.
    fn unit(&self) -> &str {
        self.patient.as_deref().unwrap_or(&self.image)
    }
}

/// Writes `out/MODALITY/{train,val,test}_{images,masks}/` and, last, `out/annotations/MODALITY.csv` (with `append`, the
/// next free `MODALITY.N.csv`). For volumes also `out/MODALITY/prepared.json`.
///
/// Images are copied byte for byte; slices of volumes become 8-bit PNG files. Masks become 8-bit PNG files with values 0
/// and 255 and the image's stem. Existing files are never overwritten. Pairs that cannot be used are listed in the report
/// with the reason.
///
/// # Errors
/// [`Error::Config`] for options out of range or an invalid template file, [`Error::Data`] when the modality exists
/// in `out`, a stem is ambiguous or no pair is usable, [`Error::Io`] when a folder cannot be read or written.
pub fn prepare(options: &PrepareOptions, observer: &dyn Observer) -> Result<PrepareReport> {
    let templates = match &options.templates {
        Some(path) => Templates::open(path)?,
        None => Templates::embedded(),
    };
    check(options, &templates)?;
    let work = Work {
        options,
        templates,
        finder: Finder::open(&options.patients)?,
        existing: Existing::read(options)?,
        structures: structures::structures(&options.named_labels, &options.target, options.labels),
        observer,
    };
    if volumes::are_volumes(&options.images)? { work.volumes() } else { work.images() }
}

/// A preparation.
struct Work<'a> {
    options: &'a PrepareOptions,
    templates: Templates,
    /// `None` if patients are not known.
    finder: Option<Finder>,
    existing: Existing,
    structures: Vec<Structure>,
    observer: &'a dyn Observer,
}

impl Work<'_> {
    fn images(&self) -> Result<PrepareReport> {
        for (key, paths) in [("--images", &self.options.images), ("--masks", &self.options.masks)] {
            if paths.len() != 1 {
                let reason = format!("{} paths were given", paths.len());
                return Err(Error::config(key, reason, "give one folder of images and one folder of masks"));
            }
        }
        if self.options.slices != SliceOptions::default() {
            let reason = format!("`{}` is a folder of images, not of volumes", self.options.images[0].display());
            return Err(Error::config("--axis, --every, --window, --resample", reason, "leave these flags out"));
        }
        let mut found = pairs::read(self)?;
        let mut report = PrepareReport { known: found.known, ..PrepareReport::default() };
        report.absent_left_out = self.limit_negatives(&mut found.pairs, |pair| &pair.item, None);
        report.skipped = found.skipped;
        if self.is_nothing_new(found.pairs.is_empty(), &report)? {
            return Ok(report);
        }
        if let Some(finder) = &self.finder {
            let paths: Vec<&Path> = found.pairs.iter().map(|pair| pair.image.as_path()).collect();
            let (patients, own) = finder.patients(&paths)?;
            found.pairs.iter_mut().zip(patients).for_each(|(pair, patient)| pair.item.patient = Some(patient));
            report.own_patients = own.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        }
        report.depth = pairs::depths(&found.pairs);
        let items: Vec<Item> = found.pairs.iter().map(|UsablePair { item, .. }| item.clone()).collect();
        self.write(&items, report, |splits| pairs::copy(&found.pairs, splits, self.options, self.observer))
    }

    fn volumes(&self) -> Result<PrepareReport> {
        let class = self.options.out.join(&self.options.modality);
        let mut found = volumes::read(self, window(self.options, &class)?)?;
        let intensity = Intensity { axis: self.options.slices.axis, window: found.window };
        let mut report = PrepareReport {
            volumes: Some(found.volumes.len()),
            intensity: Some(intensity),
            known: found.known,
            ..PrepareReport::default()
        };
        report.absent_left_out = self.limit_negatives(&mut found.slices, |slice| &slice.item, Some(1.0));
        report.skipped.append(&mut found.skipped);
        report.notes.append(&mut found.notes);
        if self.is_nothing_new(found.slices.is_empty(), &report)? {
            return Ok(report);
        }
        if let Some(finder) = &self.finder {
            let paths: Vec<&Path> = found.volumes.iter().map(|volume| volume.pair.image.as_path()).collect();
            let (patients, own) = finder.patients(&paths)?;
            found.slices.iter_mut().for_each(|slice| slice.item.patient = Some(patients[slice.volume].clone()));
            report.own_patients = own;
        }
        let items: Vec<Item> = found.slices.iter().map(|slice| slice.item.clone()).collect();
        let targets = self.structures.iter().map(|structure| (structure.name.clone(), structure.labels.to_string()));
        let prepared = Prepared::new(intensity, targets.collect());
        self.write(&items, report, |splits| {
            volumes::write(&found, splits, self)?;
            prepared.merged_with(&class)?.write(&class)
        })
    }

    /// Divides the items into splits, lets `write_files` write their files, and writes the annotation file last.
    fn write(
        &self,
        items: &[Item],
        mut report: PrepareReport,
        write_files: impl FnOnce(&[Split]) -> Result<()>,
    ) -> Result<PrepareReport> {
        let splits = planned_splits(items, self.options, &self.existing)?;
        write::make_folders(&splits, self.options)?;
        write_files(&splits)?;
        let path = existing::free_annotation_path(self.options);
        report.rows = rows::write(&path, items, &splits, self.options, &self.templates)?;
        count(&mut report, items, &splits);
        Ok(report)
    }

    /// True if everything that is usable is in the data root.
    ///
    /// # Errors
    /// [`Error::Data`] if nothing is usable at all.
    fn is_nothing_new(&self, is_empty: bool, report: &PrepareReport) -> Result<bool> {
        if !is_empty || report.known > 0 {
            return Ok(is_empty);
        }
        let (images, masks) = (&self.options.images[0], &self.options.masks[0]);
        let (pair, needs) = match report.volumes {
            Some(_) => ("volume and label map", "a label map must have its volume's name"),
            None => ("image and mask", "a mask must have its image's stem"),
        };
        let first = report.skipped.first();
        let first = first.map_or_else(String::new, |s| format!("; first: {}: {}", s.path.display(), s.reason));
        Err(Error::data(
            images,
            format!("no usable pair of {pair} with `{}`{first}", masks.display()),
            format!("{needs}, optionally with one of {}", MASK_SUFFIXES.join(", ")),
        ))
    }

    /// Removes absent targets beyond the limit and returns their number. `usual` is the limit of
    /// [`Negatives::Usual`] for each image with the target.
    fn limit_negatives<T>(&self, all: &mut Vec<T>, item: impl Fn(&T) -> &Item, usual: Option<f64>) -> usize {
        let ratio = match self.options.negatives {
            Negatives::PerPositive(ratio) => Some(ratio),
            Negatives::Usual => usual,
            Negatives::Skipped => None,
        };
        let Some(ratio) = ratio else { return 0 };
        let mut absent: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut present: BTreeMap<String, usize> = BTreeMap::new();
        for (index, item) in all.iter().map(item).enumerate() {
            if item.location.is_some() {
                *present.entry(item.target.clone()).or_default() += 1;
            } else {
                absent.entry(item.target.clone()).or_default().push(index);
            }
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.options.seed);
        let mut removed = BTreeSet::new();
        for (target, mut indices) in absent {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be 0 or more")]
            let most = (present.get(&target).copied().unwrap_or(0) as f64 * ratio).round() as usize;
            indices.shuffle(&mut random);
            removed.extend(indices.into_iter().skip(most));
        }
        let mut index = 0;
        all.retain(|_| {
            index += 1;
            !removed.contains(&(index - 1))
        });
        removed.len()
    }
}

/// The intensity window of new slices. Slices that are added to a class have its window.
fn window(options: &PrepareOptions, class: &Path) -> Result<Window> {
    let Some(Prepared { intensity, .. }) = Prepared::read(class)? else {
        return Ok(options.slices.window.unwrap_or_default());
    };
    if options.slices.window.is_some_and(|window| window != intensity.window) {
        let reason = format!("the class was prepared with the window `{}`", intensity.window);
        return Err(Error::config("--window", reason, "leave the flag out, or give another modality name"));
    }
    if options.slices.axis != intensity.axis {
        let reason = format!("the class was prepared with {} slices", intensity.axis);
        return Err(Error::config(
            "--axis",
            reason,
            format!("use `--axis {}`, or another modality name", intensity.axis),
        ));
    }
    Ok(intensity.window)
}

/// The splits of the items; patients of the data root keep theirs.
fn planned_splits(items: &[Item], options: &PrepareOptions, existing: &Existing) -> Result<Vec<Split>> {
    let known = existing.splits(items.iter().filter_map(|item| item.patient.as_deref()), &options.out)?;
    Ok(splits::splits(items, options, &known))
}

/// Adds the numbers of the items to the report.
fn count(report: &mut PrepareReport, items: &[Item], splits: &[Split]) {
    let images: BTreeMap<&str, Split> =
        items.iter().map(|item| item.image.as_str()).zip(splits.iter().copied()).collect();
    report.images = images.len();
    for split in images.values() {
        *report.images_by_split.entry(split.name().to_owned()).or_default() += 1;
    }
    report.absent = items.iter().filter(|item| item.location.is_none()).count();
    let patients: BTreeSet<&String> = items.iter().filter_map(|item| item.patient.as_ref()).collect();
    report.patients = (!patients.is_empty()).then_some(patients.len());
}

/// An image as PNG.
fn png(image: &DynamicImage) -> std::result::Result<Vec<u8>, String> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let encoded = image.write_to(&mut bytes, image::ImageFormat::Png);
    encoded.map_err(|error| format!("cannot be written as PNG: {error}"))?;
    Ok(bytes.into_inner())
}

fn check(options: &PrepareOptions, templates: &Templates) -> Result<()> {
    let name = &options.modality;
    let legal = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.starts_with('.') || name == "annotations" || !name.chars().all(legal) {
        return Err(Error::config(
            "modality",
            format!("`{name}` is not a folder name"),
            "use letters, digits, `_`, `-` and `.`, as in `lung_CT`; not `annotations`",
        ));
    }
    for (key, paths) in [("--images", &options.images), ("--masks", &options.masks)] {
        if paths.is_empty() {
            return Err(Error::config(key, "no path was given", "give a folder of images or volumes"));
        }
    }
    if options.slices.every == 0 {
        return Err(Error::config("--every", "0 is out of range", "give 1 for all slices, 2 for every second one"));
    }
    let frac = |value: f64| (0.0..=1.0).contains(&value);
    if !frac(options.val_frac) || !frac(options.test_frac) || options.val_frac + options.test_frac > 1.0 {
        return Err(Error::config(
            "val_frac, test_frac",
            format!("{} and {} are out of range", options.val_frac, options.test_frac),
            "give two numbers from 0 to 1 with a sum of at most 1",
        ));
    }
    check_words(options, templates)
}

/// Refuses words and templates that cannot be used together.
fn check_words(options: &PrepareOptions, templates: &Templates) -> Result<()> {
    if !(1..=templates.one.len()).contains(&options.rows_per_image) {
        return Err(Error::config(
            "rows_per_image",
            format!("{} is out of range", options.rows_per_image),
            format!("give 1 to {}, the number of questions among the templates", templates.one.len()),
        ));
    }
    if let Negatives::PerPositive(ratio) = options.negatives
        && !(ratio.is_finite() && ratio > 0.0)
    {
        let reason = format!("{ratio} is out of range");
        return Err(Error::config("--negatives", reason, "give a number above 0, for example 1"));
    }
    if options.negatives.are_wanted() && templates.absent.answers.is_empty() {
        return Err(Error::config(
            "--templates",
            "the file has no answers about absent targets",
            "add a section `[absent]` with `answers = [\"There is no {target} in this {image}.\"]`",
        ));
    }
    let named = options.named_labels.iter().map(|(name, _)| ("--labels", name));
    let words = [("target", options.target.as_str()), ("image_word", &options.image_word)];
    for (key, word) in words.into_iter().chain(named) {
        if word.trim().is_empty() || word.contains(['{', '}', '\n']) || first_location(word).is_some() {
            return Err(Error::config(
                key,
                format!("`{word}` cannot be used in a sentence about a position"),
                "give a short noun phrase without a location, for example `lung tumor`",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
