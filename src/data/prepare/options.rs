//! Options of a preparation.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::patients::Patients;
use super::structures::NamedLabels;
use crate::labels::Labels;
use crate::position::Zones;
use crate::templates::Templates;
use crate::volume::path::split_selection;
use crate::volume::{Axis, Geometry, Neighbours, Window};
use prsmed_base::location::first_location;
use prsmed_base::{Error, Result};

/// Suffixes that a mask's stem may have in addition to its image's stem, compared without case.
pub const MASK_SUFFIXES: [&str; 7] = ["_mask", "_masks", "_segmentation", "_seg", "_label", "_labels", "_gt"];

/// Most letters of the name of a class, which begins names of files.
const MAX_CLASS: usize = 100;

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
    pub(super) fn are_wanted(self) -> bool {
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
    /// The affine that counts where a NIfTI file has two that differ.
    pub geometry: Option<Geometry>,
    /// Slices that an image shows beside its own.
    pub context: Neighbours,
}

impl Default for SliceOptions {
    fn default() -> Self {
        Self { axis: Axis::Axial, every: 1, window: None, resample: false, geometry: None, context: Neighbours::None }
    }
}

/// Options of [`super::prepare`]; see [`PrepareOptions::new`].
#[derive(Debug, Clone, Default)]
pub struct PrepareOptions {
    /// A folder of images (flat ones; subfolders are not searched), or volumes: NIfTI files, DICOM files, folders
    /// and zips, or folders of them.
    pub images: Vec<PathBuf>,
    /// A folder of masks, a COCO file, a folder of LabelMe or YOLO files, or the label maps of volumes. It may be the image folder if the masks have one of
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
    /// Leave out pairs that cannot be used, also if they are more than half of all.
    pub skip_bad_pairs: bool,
    /// Labels of masks that are the target; empty for masks of one label.
    pub labels: Labels,
    /// Labels of masks with their own target each; empty for one target.
    pub named_labels: NamedLabels,
    /// Slices of volumes.
    pub slices: SliceOptions,
    /// Intensity windows of single sequences by their names; [`SliceOptions::window`] is that of the others.
    pub windows: BTreeMap<String, Window>,
    /// Chooses one of several DICOM series of each folder or zip, as after `#` in [`crate::volume::open`].
    pub series: Option<String>,
    /// One target of this name out of all masks and labels of an image; `None` for a target for each name.
    pub join: Option<String>,
    /// Also ask for the larger and the smaller one of the connected components of a target.
    pub instances: bool,
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
            target: "lesion".into(),
            image_word: "image".into(),
            rows_per_image: 2,
            val_frac: 0.1,
            test_frac: 0.1,
            ..Self::default()
        }
    }
}

/// Refuses options out of range, and words and templates that cannot be used.
///
/// # Errors
/// [`Error::Config`].
pub(super) fn check(options: &PrepareOptions, templates: &Templates) -> Result<()> {
    check_class(&options.modality)?;
    for (key, paths) in [("images", &options.images), ("masks", &options.masks)] {
        if paths.is_empty() {
            return Err(Error::argument(key, "no path was given", "give a folder of images or volumes"));
        }
        // the name of a series may have a `*`
        let mut files = paths.iter().map(|path| split_selection(path).0);
        if let Some(pattern) = files.find(|file| file.to_string_lossy().contains('*') && !file.exists()) {
            let remedy =
                "correct the pattern, and write it without quotes: the shell replaces it by the files that fit";
            return Err(Error::argument(key, format!("there is no file `{}`", pattern.display()), remedy));
        }
    }
    if options.slices.every == 0 {
        return Err(Error::argument("every", "0 is out of range", "give 1 for all slices, 2 for every second one"));
    }
    let frac = |value: f64| (0.0..=1.0).contains(&value);
    if !frac(options.val_frac) || !frac(options.test_frac) || options.val_frac + options.test_frac > 1.0 {
        let reason = format!("{} and {} are out of range", options.val_frac, options.test_frac);
        let hint = "give two numbers from 0 to 1 with a sum of at most 1";
        return Err(Error::config("val_frac, test_frac", reason, hint));
    }
    check_words(options, templates)
}

/// Refuses a class whose folder is none, or has another meaning in a data root or on Windows.
pub(super) fn check_class(name: &str) -> Result<()> {
    let hint = "use letters, digits, `_`, `-` and `.`, as in `lung_CT`";
    let refuse = |reason: String| Err(Error::config("modality", reason, hint));
    let legal = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.starts_with(['.', '-']) || name.ends_with('.') || !name.chars().all(legal) {
        return refuse(format!("`{name}` is not a folder name"));
    }
    if name.len() > MAX_CLASS {
        return refuse(format!("the name has {} letters; {MAX_CLASS} are the limit", name.len()));
    }
    let lower = name.to_lowercase();
    let is_part = |word: &str| lower == word || lower.ends_with(&format!("_{word}"));
    if is_part("masks") || is_part("images") || ["annotations", "annotation"].contains(&lower.as_str()) {
        let reason = "is not a folder name for a class: a data root has such folders for its parts";
        return refuse(format!("`{name}` {reason}"));
    }
    let stem = lower.split('.').next().unwrap_or_default();
    let is_digit = |rest: &str| rest.len() == 1 && rest.chars().all(|c| c.is_ascii_digit());
    let is_port = ["com", "lpt"].iter().any(|port| stem.strip_prefix(port).is_some_and(is_digit));
    if is_port || ["con", "prn", "aux", "nul"].contains(&stem) {
        return refuse(format!("`{name}` is not a folder name: Windows reserves it for a device"));
    }
    Ok(())
}

/// Refuses words and templates that cannot be used together.
fn check_words(options: &PrepareOptions, templates: &Templates) -> Result<()> {
    if !(1..=templates.one.len()).contains(&options.rows_per_image) {
        let reason = format!("{} is out of range", options.rows_per_image);
        let hint = format!("give 1 to {}, the number of questions among the templates", templates.one.len());
        return Err(Error::config("rows_per_image", reason, hint));
    }
    if let Negatives::PerPositive(ratio) = options.negatives
        && !(ratio.is_finite() && ratio > 0.0)
    {
        let reason = format!("{ratio} is out of range");
        return Err(Error::argument("negatives", reason, "give a number above 0, for example 1"));
    }
    if options.negatives.are_wanted() && templates.absent.answers.is_empty() {
        let hint = "add a section `[absent]` with `answers = [\"There is no {target} in this {image}.\"]`";
        return Err(Error::argument("templates", "the file has no answers about absent targets", hint));
    }
    let named = options.named_labels.iter().map(|(name, _)| ("labels", name));
    let words = [("target", options.target.as_str()), ("image_word", &options.image_word)];
    let joined = options.join.as_deref().map(|name| ("join", name));
    for (key, word) in words.into_iter().chain(named).chain(joined) {
        if let Some((reason, hint)) = word_problem(word) {
            return Err(Error::config(key, reason, hint));
        }
    }
    Ok(())
}

/// Reason and remedy if a word cannot be the name of a target or an image.
pub(super) fn word_problem(word: &str) -> Option<(String, &'static str)> {
    let is_bad = word.trim().is_empty() || word.contains(['{', '}', '\n']) || first_location(word).is_some();
    is_bad.then(|| {
        let hint = "give a short noun phrase without a location, for example `lung tumor`";
        (format!("`{word}` cannot be used in a sentence about a position"), hint)
    })
}
