//! `prsmed data prepare`: images and masks become a data root.

use super::args::{GeometryArgs, labels_of};
use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::data::labels::Labels;
use crate::data::manifest::Split;
use crate::data::prepare::{
    self, NamedLabels, Negatives, Patients, PrepareOptions, PrepareReport, Several, SliceOptions,
};
use crate::shell::ShellCommand;
use crate::units::counted;
use crate::{Error, Result};
use std::path::PathBuf;

/// Prepare a data root from images and masks, or from DICOM and NIfTI volumes and their label maps
///
/// Matches images and masks by name (a mask's name may end in `_mask`, `_seg`, `_labels` or `_Segmentation`), divides them
/// into train, val and test, and writes questions and answers about the location of the mask.
///
/// Volumes are NIfTI files, DICOM files, folders of a DICOM series, zips of one, or a folder of such volumes; `PATH#N`
/// chooses one of several in a file or folder, and `--series` a DICOM series of every folder. Label maps are NIfTI files
/// or DICOM SEG. All slices with the target become PNG images, after an intensity window was applied to the full depth
/// of the voxels (`--window`). Each volume is a patient, unless `--group` or `--patients` says otherwise. The window is
/// stored in `DATA/MODALITY/prepared.json`; a training copies it, and `prsmed predict` on a volume uses it.
///
/// Give the patients with `--group` or `--patients` if several images show the same patient: their images are then in
/// one split. Copies of an image (equal pixels, in any format) are in one split too. With `--negatives`, images whose mask is empty become questions whose answer is that there is no target; of
/// volumes, at most as many slices as there are slices with the target.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed data prepare --images scans --masks labels --modality skin --target nevus --out data
  prsmed data prepare --images scans --masks labels --modality skin --out data --group '^(P[0-9]+)_' --negatives
  prsmed data prepare --images ct/ --masks labels/ --labels 1=liver,2=tumour --modality abdomen_CT --out data \\
      --window soft-tissue --every 2 --negatives
  prsmed data prepare --images dicom_folder --masks labels.nii.gz --target spleen --modality abdomen_CT --out data
  prsmed data prepare --images new --masks new_labels --modality skin --target nevus --out data --append")]
#[command(override_usage = "prsmed data prepare [OPTIONS] --images PATH --masks PATH --modality NAME --out DIR")]
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
pub(super) struct PrepareArgs {
    /// Folder of images (PNG, JPEG or TIFF), or volumes: files, DICOM folders, or a folder of them
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    images: Vec<PathBuf>,
    /// Folder of masks (background 0, one label), a COCO file, a folder of LabelMe or YOLO files with outlines, or label maps
    /// of volumes; for several labels see `--labels`
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    masks: Vec<PathBuf>,
    /// Modality: class and folder name of these images
    #[arg(long, value_name = "NAME")]
    modality: String,
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
    /// percentiles such as `p0.5-p99.5`, or `file` (of the DICOM header) [default: auto]
    #[arg(long, value_name = "WINDOW", allow_hyphen_values = true)]
    window: Option<String>,
    /// Series to use of each folder or zip with several DICOM series: its number, SeriesInstanceUID, description (or a part
    /// of it), or `largest`
    #[arg(long, value_name = "SERIES")]
    series: Option<String>,
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

pub(super) fn prepare_root(args: &PrepareArgs, context: &Context) -> CommandResult {
    let report = prepare::prepare(&options(args)?, context.progress.as_ref())?;
    for text in warnings(&report, args) {
        context.runtime.warn(text);
    }
    if report.absent_left_out > 0 {
        let text = format!("{} masks without target are left out; see `--negatives`", report.absent_left_out);
        context.runtime.note(text);
    }
    report.notes.iter().for_each(|text| context.runtime.note(text.clone()));
    if let Some(intensity) = report.intensity.filter(|_| report.images > 0) {
        context.runtime.note(format!("{} slices with the intensity window `{}`", intensity.axis, intensity.window));
    }
    let patients = report.patients.map_or_else(String::new, |count| format!(" of {}", counted(count, "patient")));
    let absent = if report.absent > 0 { format!(", {} masks without target", report.absent) } else { String::new() };
    let known = if report.known > 0 { format!(", {} images were there before", report.known) } else { String::new() };
    context.output.line(format!(
        "{} images{patients}, {} questions in {}; {} files skipped{absent}{known}",
        report.images,
        report.rows,
        args.out.display(),
        report.skipped.len()
    ))?;
    if report.images > 0 {
        context.output.line(format!("next: {}", ShellCommand::new("prsmed data check").path(&args.out)))?;
    }
    context.output.record(&report)?;
    Ok(CommandEnd::Done)
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
    let window = args.window.as_deref().map(|text| {
        let hint = "give for example `--window soft-tissue`, `--window 400/40` or `--window p0.5-p99.5`";
        text.parse().map_err(|reason: String| Error::config("--window", reason, hint))
    });
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
        val_frac: args.val_frac,
        test_frac: args.test_frac,
        seed: args.seed,
        templates: args.templates.clone(),
        labels,
        named_labels,
        series: args.series.clone(),
        slices: SliceOptions {
            axis,
            every: args.every,
            window: window.transpose()?,
            resample: args.resample,
            geometry: args.geometry.geometry,
        },
        images: args.images.clone(),
        masks: args.masks.clone(),
        ..PrepareOptions::new("", "", &args.modality, &args.out)
    })
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
