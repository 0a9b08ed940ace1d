//! Prepares a data root in PRS-Med's layout from a folder of images and a folder of masks or a file of outlines, or from
//! volumes and their label maps, whose slices become images.
//!
//! Positions are computed from the masks; questions and answers are drawn from templates. Images of a patient are in one
//! split, if [`Patients`] says who the patients are. Several regions of a mask are described by one location: the box of
//! all for quadrants, the centroid of all for the grid. With [`Several::Regions`], exactly two regions are described by
//! two locations. Deviation from PRS-Med's pipeline, which names the first and the last of any number of regions.
//!
//! [`PrepareOptions::append`] adds to a class that exists. The new rows are in a new annotation file, so that the
//! existing ones stay as they are. A preparation that was stopped at any point continues with `append`, and two of one
//! class never write at once.

pub mod annotations;
mod existing;
mod found;
mod grouping;
mod hints;
mod images;
mod instances;
mod item;
mod label_names;
mod layouts;
mod location;
mod options;
mod pairs_csv;
mod pairs_outlines;
mod path_pattern;
mod patients;
mod rows;
mod scan;
mod sequences;
mod splits;
mod structures;
mod table;
mod volumes;
mod work;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use self::annotations::AnnotationFiles;
use self::existing::Existing;
use self::found::FoundItems;
use self::item::{IS_A, MaskItem, NO_MASK, NOT_LISTED, OTHER_IMAGE, UNREADABLE};
pub use self::item::{Skipped, by_kind};
use self::label_names::LabelNamesOfFiles;
pub use self::options::{MASK_SUFFIXES, Negatives, PrepareOptions, Several, SliceOptions};
pub use self::pairs_csv::read_pairs;
use self::patients::Finder;
pub use self::patients::Patients;
pub use self::scan::{
    FolderSeries, LayoutRow, ScanOptions, ScanReport, layouts, scan, scan_files, series_head, series_rows, write_scan,
};
use self::splits::KnownSplits;
pub use self::structures::NamedLabels;
pub use self::table::{Pair, PairKind, PairTable, PairText};
use self::work::Preparation;
use crate::annotation::is_image;
use crate::bit_depth::DepthReport;
use crate::findings::Findings;
use crate::labels::Labels;
use crate::manifest::Split;
use crate::marks::{Mark, Marks};
use crate::prepared::{Intensity, Prepared};
use crate::templates::Templates;
use crate::volume::format::stem_of;
use crate::volume::{Axis, Neighbours, Window};
use prsmed_base::event::Observer;
use prsmed_base::{Error, Result};

/// The name of a mask file without its extension (`.nii.gz` is one) and without one of [`MASK_SUFFIXES`].
pub fn stem_without_suffix(name: &str) -> &str {
    let stem = stem_of(name);
    layouts::without_suffix(stem).unwrap_or(stem)
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
    /// Patients with several spellings, each of which is one patient.
    pub spellings: Option<String>,
    /// Files without a patient; each is its own patient.
    pub own_patients: Vec<PathBuf>,
    /// Says so if one patient has all images, so that splits stay empty.
    pub one_patient: Option<String>,
    /// Number of images that the data root contained before.
    pub known: usize,
    /// Number of new images by split.
    pub images_by_split: BTreeMap<String, usize>,
    /// Skipped files, by path.
    pub skipped: Vec<Skipped>,
    /// 16-bit images, and those that use a small part of the range.
    pub depth: DepthReport,
    /// Choices that were made to read the files, and masks and images that are probably not meant so.
    pub findings: Findings,
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
    Preparation::new(options, observer)?.run(layouts::of_folders(options)?)
}

/// As [`prepare`], for the pairs of a table instead of those in `options.images` and `options.masks`, which only messages
/// name.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_pairs(table: PairTable, options: &PrepareOptions, observer: &dyn Observer) -> Result<PrepareReport> {
    Preparation { is_table: true, ..Preparation::new(options, observer)? }.run(table)
}

/// As [`prepare_pairs`], with a modality for each class of the table; pairs without a class have that of the options. Names of
/// modalities come with their reports, in order.
///
/// # Errors
/// As [`prepare`]. What can be known of all classes is checked before the first file is written. If a later class fails,
/// [`PrepareOptions::append`] continues.
pub fn prepare_classes(
    table: PairTable,
    options: &PrepareOptions,
    observer: &dyn Observer,
) -> Result<Vec<(String, PrepareReport)>> {
    let mut classes = Vec::new();
    for (class, table) in table.by_class(&options.modality)? {
        let options = PrepareOptions { modality: class, ..options.clone() };
        options::check_class(&options.modality)?;
        table.check()?;
        Existing::read(&options)?;
        classes.push((table, options));
    }
    let prepared = |(table, options): (PairTable, PrepareOptions)| {
        let report = prepare_pairs(table, &options, observer)?;
        Ok((options.modality, report))
    };
    classes.into_iter().map(prepared).collect()
}

/// Says which of the wanted targets no item shows. Of the `known` images that the data root has already, some may show
/// them.
fn nowhere(wanted: &BTreeSet<String>, items: &[MaskItem], known: usize) -> Option<String> {
    if items.iter().all(|item| item.location.is_none()) {
        return Some("no image shows its target: a model cannot learn its masks from these images".to_owned());
    }
    if known > 0 {
        return None;
    }
    let shown: BTreeSet<&str> =
        items.iter().filter(|item| item.location.is_some()).map(|item| item.target.as_str()).collect();
    let absent: Vec<String> =
        wanted.iter().filter(|name| !shown.contains(name.as_str())).map(|name| format!("`{name}`")).collect();
    (!absent.is_empty()).then(|| format!("no image shows {}: there are no masks of it to learn", absent.join(", ")))
}

impl<'a> Preparation<'a> {
    fn new(options: &'a PrepareOptions, observer: &'a dyn Observer) -> Result<Self> {
        let templates = options.templates.as_deref().map_or_else(|| Ok(Templates::embedded()), Templates::open)?;
        options::check(options, &templates)?;
        Ok(Self {
            options,
            templates,
            finder: Finder::open(&options.patients)?,
            existing: Existing::read(options)?,
            label_names: LabelNamesOfFiles::default(),
            structures: structures::structures(&options.named_labels, &options.target, options.labels),
            annotations: AnnotationFiles::default(),
            sequences: Vec::new(),
            observer,
            is_table: false,
        })
    }
}

impl Preparation<'_> {
    /// Prepares the images and volumes of a table.
    fn run(mut self, table: PairTable) -> Result<PrepareReport> {
        table.check()?;
        sequences::check(&table.rows)?;
        self.sequences = sequences::settled(&table, self.options, self.existing.has_images())?;
        let missing = sequences::missing(&table.rows);
        let PairTable { rows, mut skipped, notes, kind } = table;
        let wanted: BTreeSet<String> =
            rows.iter().flat_map(|pair| self.shown_by(pair)).map(|(structure, _)| structure.name).collect();
        let (images, volumes): (Vec<Pair>, Vec<Pair>) = rows.into_iter().partition(Pair::is_image);
        let class = self.options.out.join(&self.options.modality);
        let notes = notes.into_iter().chain(missing).collect();
        let mut found = FoundItems { notes, ..FoundItems::default() };
        if !images.is_empty() {
            images::read(&self, images, &mut found)?;
        }
        let mut intensity = None;
        if !volumes.is_empty() {
            let (window, sequences) = volumes::read(&self, volumes, window(self.options, &class)?, &mut found)?;
            let SliceOptions { axis, context, .. } = self.options.slices;
            intensity = Some(Intensity { axis, window, context, sequences });
            found.notes.extend(self.label_names.notes());
        }
        skipped.append(&mut found.skipped);
        if kind == PairKind::Images {
            skipped.sort_by(|a, b| a.path.cmp(&b.path));
        }
        let are_volumes = kind == PairKind::Volumes || intensity.is_some();
        let mut report = PrepareReport {
            volumes: are_volumes.then(|| found.sources.iter().filter(|source| source.volume.is_some()).count()),
            intensity: intensity.clone(),
            known: found.known,
            absent_left_out: self.limit_negatives(&mut found.items, are_volumes.then_some(1.0)),
            skipped,
            notes: std::mem::take(&mut found.notes),
            findings: std::mem::take(&mut found.findings),
            ..PrepareReport::default()
        };
        if self.is_nothing_new(found.items.is_empty(), kind, &report)? {
            return Ok(report);
        }
        self.refuse_bad_pairs(&found, &report)?;
        report.own_patients = self.find_patients(&mut found)?;
        report.depth = images::depths(&found);
        let items: Vec<MaskItem> = found.items.iter().map(|usable| usable.item.clone()).collect();
        report.notes.extend(nowhere(&wanted, &items, found.known));
        self.write(items, report, |splits| {
            if found.sources.iter().any(|source| source.volume.is_none()) {
                images::write(&found, splits, &self)?;
            }
            if intensity.is_some() {
                volumes::write(&found, splits, &self)?;
            }
            let Some(intensity) = intensity.or_else(|| self.of_flat_images()) else { return Ok(()) };
            Prepared::new(intensity, self.targets(&found)).merged_with(&class)?.write(&class)
        })
    }

    /// How flat images of several sequences become one; `None` for those of one file.
    fn of_flat_images(&self) -> Option<Intensity> {
        let (axis, sequences) = (Axis::default(), self.sequences.clone());
        let (window, context) = (Window::Auto, Neighbours::None);
        (!sequences.is_empty()).then_some(Intensity { axis, window, context, sequences })
    }

    /// Gives the items the patients that the options know. Returns the files without one.
    fn find_patients(&self, found: &mut FoundItems) -> Result<Vec<PathBuf>> {
        let Some(finder) = &self.finder else { return Ok(Vec::new()) };
        let used: BTreeSet<usize> = found.items.iter().map(|usable| usable.source).collect();
        let sources = found.sources.iter().enumerate();
        let sources = sources.filter(|(number, source)| source.volume.is_some() || used.contains(number));
        let (numbers, paths): (Vec<usize>, Vec<&Path>) =
            sources.map(|(number, source)| (number, source.path.as_path())).unzip();
        let (patients, mut own) = finder.patients(&paths)?;
        let patients: BTreeMap<usize, String> = numbers.into_iter().zip(patients).collect();
        for usable in &mut found.items {
            usable.item.patient = patients.get(&usable.source).cloned();
        }
        own.sort();
        Ok(own)
    }

    /// The labels of the targets of volumes by their names.
    fn targets(&self, found: &FoundItems) -> BTreeMap<String, String> {
        let volumes = found.sources.iter().filter_map(|source| source.volume.as_ref());
        let structures = volumes.flat_map(|volume| self.shown_by(&volume.pair));
        let labels = |files: Vec<(usize, Labels)>| {
            let mut all: Vec<String> = files.into_iter().map(|(_, labels)| labels.to_string()).collect();
            all.dedup();
            // no labels: all of the file
            if all.iter().any(String::is_empty) { String::new() } else { all.join(",") }
        };
        structures.map(|(structure, files)| (structure.name, labels(files))).collect()
    }

    /// Refuses image pairs of which most cannot be used, and masks without any background, of which nothing can be learned.
    fn refuse_bad_pairs(&self, found: &FoundItems, report: &PrepareReport) -> Result<()> {
        let is_alone =
            |skip: &&Skipped| (skip.reason.starts_with(NO_MASK) || skip.reason == NOT_LISTED) && is_image(&skip.path);
        let alone: Vec<Skipped> = report.skipped.iter().filter(is_alone).cloned().collect();
        let (num_read, num_bad, num_alone) = (found.num_read, found.bad.len(), alone.len());
        let is_mostly_alone = 2 * (num_bad + num_alone) > num_read + found.known + num_alone;
        if (2 * num_bad > num_read || is_mostly_alone) && !self.options.skip_bad_pairs && report.volumes.is_none() {
            return Err(self.too_many_bad(found, &alone, &report.skipped));
        }
        if report.volumes.is_none() && report.findings.is_all_foreground() {
            let hint = "their export failed: foreground must be white (255) and background black (0)";
            let reason = "every mask is foreground only; nothing was written";
            return Err(Error::data(&self.options.masks[0], reason, hint));
        }
        Ok(())
    }

    /// Divides the items into splits, lets `write_files` write their files, and writes the annotation file last.
    fn write(
        &self,
        mut items: Vec<MaskItem>,
        mut report: PrepareReport,
        write_files: impl FnOnce(&[Split]) -> Result<()>,
    ) -> Result<PrepareReport> {
        let mut spellings = self.existing.spellings.clone();
        for item in &mut items {
            item.patient = item.patient.take().and_then(|name| spellings.settle(&name));
        }
        report.spellings = spellings.warning();
        report.notes.extend(note_of_copies(&items));
        let mut marks = Marks::default();
        let splits = self.planned_splits(&items, &self.existing, &mut marks)?;
        write::make_folders(&splits, self.options)?;
        let _locks = write::lock(self.options, self.observer)?;
        let path = self.existing.free_annotation_path()?;
        // another preparation may have added patients to another class meanwhile
        let splits = self.planned_splits(&items, &Existing::of_rows(self.options)?, &mut marks)?;
        write::make_folders(&splits, self.options)?;
        write_files(&splits)?;
        report.rows = rows::write(path, &items, &splits, self.options, &self.templates)?;
        count(&mut report, &items, &splits);
        report.one_patient = self.one_patient(&items, &report);
        Ok(report)
    }

    /// Warns that `--group` or `--patients` puts all images into one patient, whose images are in one split.
    fn one_patient(&self, items: &[MaskItem], report: &PrepareReport) -> Option<String> {
        let PrepareOptions { val_frac, test_frac, append, patients, .. } = self.options;
        let empty: Vec<String> =
            [(Split::Train, 1.0 - val_frac - test_frac), (Split::Val, *val_frac), (Split::Test, *test_frac)]
                .into_iter()
                .filter(|(split, frac)| *frac > 1e-9 && !report.images_by_split.contains_key(split.name()))
                .map(|(split, _)| format!("`{split}`"))
                .collect();
        if *append || report.patients != Some(1) || report.images < 2 || empty.is_empty() {
            return None;
        }
        let patient = items.first()?.patient.as_ref()?;
        let (flag, remedy) = match patients {
            Patients::Unknown => return None,
            Patients::Table(path) => {
                (format!("argument `patients={}`", path.display()), "correct the column `patient`".to_owned())
            }
            Patients::Pattern(pattern) => {
                let names: BTreeSet<String> = items.iter().map(|item| item.source().to_owned()).collect();
                let other = grouping::example(&names.into_iter().collect::<Vec<_>>());
                let remedy = format!("write a pattern whose first group is one patient only{other}");
                (format!("argument `group='{pattern}'`"), remedy)
            }
        };
        Some(format!(
            "{flag} puts all {} images into one patient, `{patient}`, and images of a patient are in one split: there are no \
             images for {}; if there are several patients, {remedy}, and prepare again",
            report.images,
            empty.join(" and ")
        ))
    }

    /// The splits of the items; patients and images of the data root keep theirs.
    fn planned_splits(&self, items: &[MaskItem], existing: &Existing, marks: &mut Marks) -> Result<Vec<Split>> {
        let patients = items.iter().filter_map(|item| item.patient.as_deref());
        let patients = existing.splits(patients, &self.options.out)?;
        let known = KnownSplits { patients, pixels: existing.pixels(marks, self.observer) };
        splits::splits(items, self.options, &known)
    }

    /// True if everything that is usable is in the data root.
    ///
    /// # Errors
    /// [`Error::Data`] if nothing is usable at all.
    fn is_nothing_new(&self, is_empty: bool, kind: PairKind, report: &PrepareReport) -> Result<bool> {
        if !is_empty || report.known > 0 {
            return Ok(is_empty);
        }
        let (images, masks) = (&self.options.images[0], &self.options.masks[0]);
        let (pair, mask) = kind.words();
        let needs = format!("{mask}, optionally with one of {}", MASK_SUFFIXES.join(", "));
        let begins = |start: &str| report.skipped.iter().find(|skip| skip.reason.starts_with(start));
        let first = begins(IS_A).or_else(|| begins(UNREADABLE)).or(report.skipped.first());
        let first = first.map_or_else(String::new, |s| format!("; first: {}: {}", s.path.display(), s.reason));
        if self.is_table {
            let remedy = hints::remedy(&report.skipped).unwrap_or("correct the table of pairs, or the files");
            return Err(Error::data(images, format!("no usable pair of {pair}{first}"), remedy));
        }
        let folders = [images, masks].into_iter().find_map(|folder| hints::folders_in(folder));
        let is_other = report.skipped.iter().any(|skip| skip.reason.starts_with(OTHER_IMAGE));
        let is_one_folder = images == masks && kind == PairKind::Images && !is_other;
        let remedy = if is_one_folder {
            Some("images and masks are the same folder: give the folder of the masks with the argument `masks`")
        } else {
            hints::remedy(&report.skipped)
        };
        let reason = match folders {
            Some(_) => "has no images".to_owned(),
            None => format!("no usable pair of {pair} with `{}`{first}", masks.display()),
        };
        Err(Error::data(images, reason, folders.or_else(|| remedy.map(str::to_owned)).unwrap_or(needs)))
    }

    fn too_many_bad(&self, found: &FoundItems, alone: &[Skipped], skipped: &[Skipped]) -> Error {
        let bad = if found.bad.is_empty() { alone } else { &found.bad };
        let num_images = found.num_read + alone.len();
        let others = skipped.iter().filter(|skip| skip.reason.starts_with(IS_A));
        let unusable: Vec<Skipped> = found.bad.iter().chain(alone).chain(others).cloned().collect();
        let named = bad.iter().take(hints::MAX_NAMED).map(|bad| format!("{}: {}", bad.path.display(), bad.reason));
        let named = named.collect::<Vec<_>>().join("; ");
        let (count, what) = match alone.len() {
            0 => (bad.len(), "pairs of image and mask cannot be used".to_owned()),
            num => (found.bad.len() + num, format!("images cannot be used ({num} have no mask of their name)")),
        };
        let reason = format!("{count} of {num_images} {what}; nothing was written; {named}");
        let remedy = hints::remedy(&unusable).unwrap_or("correct the files or their names");
        let hint = format!("{remedy}; the argument `skip_bad_pairs` leaves such pairs out");
        Error::data(&self.options.images[0], reason, hint)
    }
}

/// The intensity window of new slices. Slices that are added to a class have its window.
fn window(options: &PrepareOptions, class: &Path) -> Result<Window> {
    let Some(Prepared { intensity, .. }) = Prepared::read(class)? else {
        return Ok(options.slices.window.unwrap_or_default());
    };
    let is_other = options.slices.window.is_some_and(|window| window != intensity.window);
    if is_other && intensity.sequences.is_empty() {
        let reason = format!("the class was prepared with the window `{}`", intensity.window);
        return Err(Error::argument("window", reason, "leave the argument out, or give another modality name"));
    }
    if options.slices.axis != intensity.axis {
        let reason = format!("the class was prepared with {} slices", intensity.axis);
        let hint = format!("use the argument `axis={}`, or another modality name", intensity.axis);
        return Err(Error::argument("axis", reason, hint));
    }
    if options.slices.context != intensity.context {
        let reason = format!("the class was prepared with the neighbouring slices `{}`", intensity.context);
        let hint = format!("use the argument `context={}`, or another modality name", intensity.context);
        return Err(Error::argument("context", reason, hint));
    }
    Ok(intensity.window)
}

/// Says how many image files are copies of another one by their pixels, as `data check` counts them. Nothing if they are
/// only the files of one image with several targets.
fn note_of_copies(items: &[MaskItem]) -> Option<String> {
    let copies = |name: fn(&MaskItem) -> &str| {
        let files: BTreeMap<&str, Mark> = items.iter().filter_map(|item| Some((name(item), item.pixels?))).collect();
        files.len() - files.values().collect::<BTreeSet<_>>().len()
    };
    (copies(|item| &item.image) > 0).then(|| {
        let count = copies(|item| &item.stem);
        format!("{count} image files are copies of another one; copies of an image are in one split")
    })
}

/// Adds the numbers of the items to the report.
fn count(report: &mut PrepareReport, items: &[MaskItem], splits: &[Split]) {
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

#[cfg(test)]
mod annotated_tests;
#[cfg(test)]
mod copies_tests;
#[cfg(test)]
mod numpy_tests;
#[cfg(test)]
mod tests;
