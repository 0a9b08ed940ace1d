//! `prsmed data prepare`: images and masks become a data root.

use super::args::{GeometryArgs, labels_of};
use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::data::labels::Labels;
use crate::data::manifest::Split;
use crate::data::prepare::{
    self, NamedLabels, Negatives, PairTable, Patients, PrepareOptions, PrepareReport, ScanOptions, Several,
    SliceOptions,
};
use crate::data::volume::{Neighbours, Windows};
use crate::shell::ShellCommand;
use crate::units::counted;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Prepare a data root from images and masks, or from DICOM and NIfTI volumes and their label maps
///
/// Finds out which images and masks belong together, divides them into train, val and test, and writes questions and answers
/// about the location of the mask. The files are those of a folder in any layout that `prsmed data scan` knows (DIR), of a table
/// (`--pairs`), or of a folder of images and one of masks with equal names (`--images`, `--masks`; a mask's name may end in
/// `_mask`, `_seg`, `_labels` or `_Segmentation`). If files of DIR are ambiguous, nothing is written: see `prsmed data scan`.
///
/// Volumes are NIfTI files, DICOM files, folders of a DICOM series, zips of one, or a folder of such volumes; `PATH#N`
/// chooses one of several in a file or folder, and `--series` a DICOM series of every folder. Label maps are NIfTI files,
/// DICOM SEG, or RTSTRUCT of a DICOM series. All slices with the target become PNG images, after an intensity window was
/// applied to the full depth of the voxels (`--window`). Each volume is a patient, unless `--group` or `--patients` says otherwise. The window is
/// stored in `DATA/MODALITY/prepared.json`; a training copies it, and `prsmed predict` on a volume uses it.
///
/// Give the patients with `--group` or `--patients` if several images show the same patient: their images are then in
/// one split. Copies of an image (equal pixels, in any format) are in one split too. With `--negatives`, images whose mask is empty become questions whose answer is that there is no target; of
/// volumes, at most as many slices as there are slices with the target.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed data prepare downloads/BUSI --modality ultrasound --target tumor --out data
  prsmed data prepare --pairs scan-BUSI/pairs.csv --modality ultrasound --target tumor --out data
  prsmed data prepare --images scans --masks labels --modality skin --target nevus --out data
  prsmed data prepare --images scans --masks labels --modality skin --out data --group '^(P[0-9]+)_' --negatives
  prsmed data prepare --images ct/ --masks labels/ --labels 1=liver,2=tumour --modality abdomen_CT --out data \\
      --window soft-tissue --every 2 --negatives
  prsmed data prepare --pairs pairs.csv --modality ct --join lesion --instances --out data
  prsmed data prepare --images dicom_folder --masks labels.nii.gz --target spleen --modality abdomen_CT --out data
  prsmed data prepare --images new --masks new_labels --modality skin --target nevus --out data --append")]
#[command(override_usage = "prsmed data prepare [OPTIONS] DIR --modality NAME --out DIR
       prsmed data prepare [OPTIONS] --pairs CSV --out DIR
       prsmed data prepare [OPTIONS] --images PATH --masks PATH --modality NAME --out DIR")]
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
pub(super) struct PrepareArgs {
    /// Folder with images and masks, in a layout that `prsmed data scan` knows
    #[arg(value_name = "DIR", conflicts_with_all = ["images", "masks", "pairs"])]
    dir: Option<PathBuf>,
    #[command(flatten)]
    scan: ScanArgs,
    /// CSV file of pairs, as `prsmed data scan` writes it: columns `image` (or `image.NAME` for each of two or three
    /// sequences), `mask` or `mask.NAME`, and if needed `patient`,
    /// `split`, `class`, `labels`, `target`, `question`, `answer`
    #[arg(long, value_name = "CSV", conflicts_with_all = ["images", "masks", "layout", "channel"])]
    pairs: Option<PathBuf>,
    /// Folder of images (PNG, JPEG, TIFF, BMP, GIF, WebP, PGM), or volumes: files, DICOM folders, or a folder of them
    #[arg(long, value_name = "PATH", num_args = 1.., required_unless_present_any = ["dir", "pairs"], requires = "masks",
        conflicts_with_all = ["layout", "channel"])]
    images: Vec<PathBuf>,
    /// Folder of masks (background 0, one label), a COCO file, a folder of LabelMe or YOLO files with outlines, or label maps
    /// of volumes; for several labels see `--labels`
    #[arg(long, value_name = "PATH", num_args = 1.., required_unless_present_any = ["dir", "pairs"], requires = "images")]
    masks: Vec<PathBuf>,
    /// Modality: class and folder name of these images. With `--pairs` and DIR, of those without a class
    #[arg(long, value_name = "NAME", required_unless_present_any = ["pairs", "dir"])]
    modality: Option<String>,
    /// Output data root; may already contain other modalities
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Add new files to a modality that exists. Existing files and rows do not change, and patients keep their split
    #[arg(long)]
    append: bool,
    /// Regular expression of file names whose first group is the patient, for example `^(P[0-9]+)_`
    #[arg(long, value_name = "REGEX", conflicts_with = "patients")]
    group: Option<String>,
    /// CSV file with the columns `file` and `patient`
    #[arg(long, value_name = "CSV")]
    patients: Option<PathBuf>,
    /// Add rows about images without the target, at most RATIO for each image with it [default: all such images; of
    /// volumes 1]
    #[arg(long, value_name = "RATIO", num_args = 0..=1, require_equals = true, default_missing_value = "usual",
        value_parser = negatives)]
    negatives: Option<Negatives>,
    /// Leave out pairs of image and mask that cannot be used, also if they are more than half of all
    #[arg(long)]
    skip_bad_pairs: bool,
    /// Direction of the slices of volumes: axial, coronal or sagittal
    #[arg(long, value_name = "NAME", default_value = "axial")]
    axis: String,
    /// Use every N-th slice of volumes
    #[arg(long, value_name = "N", default_value_t = 1)]
    every: usize,
    /// Intensity window of volumes: `auto`, a name such as `soft-tissue` or `lung`, `WIDTH/LEVEL`, `LOW..HIGH`,
    /// percentiles such as `p0.5-p99.5`, or `file` (of the DICOM header). `NAME=WINDOW` is for one of several sequences; may be
    /// repeated [default: auto]
    #[arg(long = "window", value_name = "WINDOW", allow_hyphen_values = true)]
    windows: Vec<String>,
    /// Use label maps on another grid than their volume, by the nearest voxel
    #[arg(long)]
    resample: bool,
    #[command(flatten)]
    geometry: GeometryArgs,
    /// Name of the target in questions and answers
    #[arg(long, value_name = "WORDS", default_value = "lesion")]
    target: String,
    /// Name of the image in questions and answers
    #[arg(long, value_name = "WORDS", default_value = "image")]
    image_word: String,
    /// Location words: `grid` (3x3) or `quadrants` (as in PRS-Med's data)
    #[arg(long, value_name = "NAME", default_value = "grid")]
    zones: String,
    /// Describe a mask of two separate regions by two locations instead of one
    #[arg(long)]
    regions: bool,
    /// Make one target of this name out of all masks and labels of an image. Without it, each column `mask.NAME` and each name
    /// of `--labels` is a target of its own
    #[arg(long, value_name = "NAME")]
    join: Option<String>,
    /// Also ask for the larger and the smaller one of two separate parts of a target, or for the largest and the smallest one of
    /// more, with the location of this part. Parts of fewer than 9 pixels, or of a hundredth of the target, do not count
    #[arg(long)]
    instances: bool,
    /// Questions per mask
    #[arg(long, value_name = "N", default_value_t = 2)]
    questions: usize,
    /// Fraction of patients (or images) for validation, 0..1
    #[arg(long, value_name = "F", default_value_t = 0.1)]
    val_frac: f64,
    /// Fraction of patients (or images) for testing, 0..1
    #[arg(long, value_name = "F", default_value_t = 0.1)]
    test_frac: f64,
    /// Seed of splits and question templates
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Question templates to use instead of the built-in ones (TOML)
    #[arg(long, value_name = "FILE")]
    templates: Option<PathBuf>,
    /// Show neighbouring slices of volumes in red and blue: those so many slices away (`1`), or at a distance (`5mm`)
    #[arg(long, value_name = "N", default_value = "none", hide_default_value = true)]
    context: Neighbours,
    /// Labels of the target in masks with several labels, for example `1,3`; or one target for each label by name,
    /// for example `1=liver,2+3=tumour`. Other labels become background
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    labels: String,
}

/// Most files that are named for one kind of reason.
const MAX_NAMED: usize = 3;

fn negatives(text: &str) -> Result<Negatives, String> {
    if text == "usual" {
        return Ok(Negatives::Usual);
    }
    text.parse().map(Negatives::PerPositive).map_err(|_| "give a number above 0, for example 1".to_owned())
}

/// Which files of a folder are used.
#[derive(Debug, clap::Args)]
pub(super) struct ScanArgs {
    /// Layout of DIR, for example `busi` or `nnunet` [default: the one that explains most files]
    #[arg(long, value_name = "NAME")]
    layout: Option<String>,
    /// Sequence, phase or channel to use where DIR has several for a mask, for example `flair`; or two or three as the colours
    /// of an image, for example `t1ce,t2,flair`
    #[arg(long, value_name = "NAMES")]
    channel: Option<String>,
    /// Series to use of each folder or zip with several DICOM series: its number, SeriesInstanceUID, description (or a part
    /// of it), or rules such as `description~portal`, `orientation=axial,newest` or `most-slices`
    ///
    /// Rules are `description~PART`, `description=TEXT`, `modality=MR`, `orientation=axial` (`coronal`, `sagittal`),
    /// `slices>=N`, `slices<=N`, `newest` (by the date of the series), and `most-slices` (or `largest`). Several are separated by
    /// commas and apply in their order. A choice that fits several series of a folder stops with their list.
    #[arg(long, value_name = "RULE")]
    series: Option<String>,
}

impl ScanArgs {
    pub(super) fn options(&self) -> ScanOptions {
        let Self { layout, channel, series } = self;
        ScanOptions { layout: layout.clone(), channel: channel.clone(), series: series.clone() }
    }
}

pub(super) fn prepare_root(args: &PrepareArgs, context: &Context) -> CommandResult {
    let options = options(args)?;
    let reports = match table(args, context)? {
        Some(table) => prepare::prepare_classes(table, &options, context.progress.as_ref())?,
        None => vec![(options.modality.clone(), prepare::prepare(&options, context.progress.as_ref())?)],
    };
    for (class, report) in &reports {
        print_report(class, reports.len() > 1, report, args, context)?;
    }
    if reports.iter().any(|(_, report)| report.images > 0) {
        context.output.line(format!("next: {}", ShellCommand::new("prsmed data check").path(&args.out)))?;
    }
    match reports.as_slice() {
        [(_, report)] => context.output.record(report)?,
        several => {
            let classes: BTreeMap<&String, &PrepareReport> =
                several.iter().map(|(class, report)| (class, report)).collect();
            context.output.record(&serde_json::json!({ "classes": classes }))?;
        }
    }
    Ok(CommandEnd::Done)
}

/// The pairs of a folder or a table; `None` for folders of images and of masks.
fn table(args: &PrepareArgs, context: &Context) -> Result<Option<PairTable>> {
    if let Some(pairs) = &args.pairs {
        return prepare::read_pairs(pairs).map(Some);
    }
    let Some(dir) = &args.dir else { return Ok(None) };
    let scanned = prepare::scan(dir, &args.scan.options(), context.progress.as_ref())?;
    for layout in &scanned.layouts {
        let images = counted(layout.images, "image");
        context.runtime.note(format!("{} has the layout `{}` ({images})", dir.display(), layout.name));
    }
    scanned.into_table().map(Some)
}

/// Prints warnings, notes and numbers of a modality, which is named if there are several.
fn print_report(
    class: &str,
    is_named: bool,
    report: &PrepareReport,
    args: &PrepareArgs,
    context: &Context,
) -> Result<()> {
    for text in warnings(report, args) {
        context.runtime.warn(text);
    }
    if report.absent_left_out > 0 {
        let text = format!("{} masks without target are left out; see `--negatives`", report.absent_left_out);
        context.runtime.note(text);
    }
    report.notes.iter().for_each(|text| context.runtime.note(text.clone()));
    if let Some(intensity) = report.intensity.as_ref().filter(|_| report.images > 0) {
        context.runtime.note(intensity.to_string());
    }
    let patients = report.patients.map_or_else(String::new, |count| format!(" of {}", counted(count, "patient")));
    let absent = if report.absent > 0 { format!(", {} masks without target", report.absent) } else { String::new() };
    let known = if report.known > 0 { format!(", {} images were there before", report.known) } else { String::new() };
    let class = if is_named { format!("{class}: ") } else { String::new() };
    context.output.line(format!(
        "{class}{} images{patients}, {} questions in {}; {} files skipped{absent}{known}",
        report.images,
        report.rows,
        args.out.display(),
        report.skipped.len()
    ))
}

fn warnings(report: &PrepareReport, args: &PrepareArgs) -> Vec<String> {
    let mut texts = Vec::new();
    for files in prepare::by_kind(&report.skipped) {
        let skipped = files.iter().take(MAX_NAMED);
        texts.extend(skipped.map(|skipped| format!("{}: skipped, {}", skipped.path.display(), skipped.reason)));
        if let Some(more) = files.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
            texts.push(format!("{more} more files are skipped for this kind of reason; `--json` names all"));
        }
    }
    if let Some(first) = report.own_patients.first() {
        texts.push(format!(
            "{} files have no patient, so each is a patient of its own (the first: {})",
            report.own_patients.len(),
            first.display()
        ));
    }
    texts.extend(report.spellings.clone());
    texts.extend(report.one_patient.clone());
    let fractions = [(Split::Val, args.val_frac), (Split::Test, args.test_frac)];
    for (split, _) in fractions.into_iter().filter(|(_, fraction)| *fraction > 0.0 && !args.append && report.images > 0)
    {
        if report.one_patient.is_none() && !report.images_by_split.contains_key(split.name()) {
            texts.push(match report.patients {
                Some(count) => format!("too few patients ({count}) for a `{split}` split, which has no images"),
                None => format!("too few images ({}) for a `{split}` split, which has none", report.images),
            });
        }
    }
    texts.extend(report.depth.warning());
    texts.extend(report.findings.texts());
    texts
}

fn options(args: &PrepareArgs) -> Result<PrepareOptions> {
    let zones = serde_json::from_value(args.zones.as_str().into()).map_err(|_| {
        let reason = format!("`{}` is not a set of zones", args.zones);
        Error::config("--zones", reason, "use grid or quadrants")
    })?;
    let (labels, named_labels) = labels(&args.labels)?;
    let axis = args.axis.parse().map_err(|reason: String| Error::config("--axis", reason, "for example `axial`"))?;
    let window = |text: &String| {
        let hint =
            "give for example `--window soft-tissue`, `--window 400/40`, `--window p0.5-p99.5` or `--window T1=p1-p99`";
        text.parse().map_err(|reason: String| Error::config("--window", reason, hint))
    };
    let windows = Windows::new(&args.windows.iter().map(window).collect::<Result<Vec<_>>>()?)?;
    let patients = match (&args.group, &args.patients) {
        (Some(pattern), _) => Patients::Pattern(pattern.clone()),
        (None, Some(table)) => Patients::Table(table.clone()),
        (None, None) => Patients::Unknown,
    };
    Ok(PrepareOptions {
        append: args.append,
        skip_bad_pairs: args.skip_bad_pairs,
        patients,
        negatives: args.negatives.unwrap_or_default(),
        zones,
        several: if args.regions { Several::Regions } else { Several::Together },
        target: args.target.clone(),
        image_word: args.image_word.clone(),
        rows_per_image: args.questions,
        join: args.join.clone(),
        instances: args.instances,
        val_frac: args.val_frac,
        test_frac: args.test_frac,
        seed: args.seed,
        templates: args.templates.clone(),
        labels,
        named_labels,
        series: args.scan.series.clone(),
        slices: SliceOptions {
            axis,
            every: args.every,
            window: windows.all,
            resample: args.resample,
            geometry: args.geometry.geometry,
            context: args.context,
        },
        windows: windows.by_name,
        images: files(args, &args.images),
        masks: files(args, &args.masks),
        ..PrepareOptions::new("", "", args.modality.as_deref().unwrap_or_default(), &args.out)
    })
}

/// The files of `--images` or `--masks`, or what is given instead of both.
fn files(args: &PrepareArgs, given: &[PathBuf]) -> Vec<PathBuf> {
    args.dir.iter().chain(&args.pairs).chain(given).cloned().collect()
}

/// Labels of one target, or named labels.
fn labels(text: &str) -> Result<(Labels, NamedLabels)> {
    if !text.contains('=') {
        return Ok((labels_of("--labels", text)?, NamedLabels::default()));
    }
    let named = text
        .parse()
        .map_err(|reason: String| Error::config("--labels", reason, "give for example `--labels 1=liver,2=tumour`"));
    Ok((Labels::NONE, named?))
}
