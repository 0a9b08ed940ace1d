//! `prsmed data`: check, prepare or generate data roots, and compare masks of volumes.

use super::args::{LeakArgs, SettingsArgs, labels_of};
use super::compare::{CompareArgs, compare_masks};
use super::context::Context;
use super::next;
use super::prepare::{PrepareArgs, prepare_root};
use super::report::{CommandEnd, CommandResult};
use super::scan::{ScanCommandArgs, scan_folder};
use crate::Result;
use crate::config::Resolved;
use crate::data::annotation;
use crate::data::check::{self, CheckReport, ModalityCounts};
use crate::data::familiarity::add_fields;
use crate::data::held_out::JOURNAL;
use crate::data::phantom::{self, PhantomOptions, PhantomVolumeOptions};
use crate::report::{check_page, data_check};
use crate::segment::setup;
use crate::shell::ShellCommand;
use crate::units::counted;
use serde_json::json;
use std::path::PathBuf;

/// Check, prepare or generate data roots; compare masks of volumes
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    Check(CheckArgs),
    Scan(ScanCommandArgs),
    Prepare(Box<PrepareArgs>),
    Compare(CompareArgs),
    Phantom(PhantomArgs),
}

pub(super) fn run(command: &Command, context: &Context) -> CommandResult {
    match command {
        Command::Check(args) => check_root(args, context),
        Command::Scan(args) => scan_folder(args, context),
        Command::Prepare(args) => prepare_root(args, context),
        Command::Compare(args) => compare_masks(args, context),
        Command::Phantom(args) => make_phantoms(args, context),
    }
}

/// Check a data root: list bad rows, count the good ones
///
/// Reads every row and decodes every image and mask without changing anything. Lists each bad row with its file, line
/// and reason: missing or corrupt image or mask, size mismatch, empty mask, mask with several labels, empty text, stray
/// quote, unknown split, duplicate. The exit code is 1 when there is a bad row, or an image or patient of `train` rows
/// that is also in `test` rows (a *leak*): equal files, equal pixels in different files, or the same patient.
///
/// Then prints the fingerprint of the good rows, and counts them by split. The fingerprint has for each class the number
/// of images and patients, image sizes, sides of a pixel in mm, grey levels (first and 99th percentile), the percentage
/// of the image that is foreground, labels of the masks, and the number of rows whose target is absent or whose mask is
/// unknown. `15..40..90` are the smallest, middle and largest value.
///
/// Warnings name images or patients that `val` rows share with other rows, patients with several spellings, classes
/// without images of a split, 16-bit images that use a small part of the range of values, files with an EXIF orientation or
/// transparency that was applied, masks that cover the whole image or are inverted, and images of one grey level. They also
/// name texts that differ from their mask, each with its file and line: another location (`upper left part of the image`, the
/// column `position`), area (`about 14% of the image`) or number of regions, and answers about another target than their
/// question. Further warnings name a patient with most rows, targets of fewer than two cells of the grid on which the mask head
/// draws (`--preset`; 64 x 64 cells with the full one), targets that touch the border of their image, and questions that name
/// the location of their answer, or the class.
///
/// A table has for each class its part of the rows, its patients in each split, and the numbers of such targets. Advice says
/// what the numbers of patients allow: splits, intervals of scores, and the steps of a learning curve. No warning and no advice
/// changes the exit code.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Settings of the training, which decide the grid of the mask head: tiny, full, cpu, gpu-24gb, ... [default: full]")))]
#[command(after_help = "Examples:
  prsmed data check data
  prsmed data check data --html check.html
  prsmed data check data --annotations csv
  prsmed data check data --labels 1,3
  prsmed data check data --extra corrected
  prsmed data check data --json | jq '.bad[].reason'")]
pub(super) struct CheckArgs {
    /// Data root: a folder with one folder for each modality, and `annotations/`
    #[arg(value_name = "DIR")]
    root: PathBuf,
    /// CSV file or folder of CSV files [default: `annotations` in DIR]
    #[arg(long, value_name = "DIR")]
    annotations: Option<PathBuf>,
    /// Data root whose rows will train too, as `--extra` of `prsmed train`; may be repeated
    #[arg(long, value_name = "DIR")]
    extra: Vec<PathBuf>,
    #[command(flatten)]
    leak: LeakArgs,
    /// Labels of masks that are foreground, as `--labels` of `prsmed train`
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    labels: String,
    #[command(flatten)]
    settings: SettingsArgs,
    /// Also write a page with the tables, the advice, and images of targets to look at
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// What a good data root is for: a training of its own, that of the data root that it belongs to, or scores.
fn next_step(args: &CheckArgs, report: &CheckReport) -> Result<String> {
    let sum = |of: fn(&ModalityCounts) -> usize| report.counts.iter().map(of).sum::<usize>();
    let (train, val, test) = (sum(|of| of.train), sum(|of| of.val), sum(|of| of.test));
    let with_rows = |command: &str| {
        let command = ShellCommand::new(command).flag("--data-root", [&args.root]);
        let labels = Some(&args.labels).filter(|labels| !labels.is_empty());
        command.flag("--annotations", &args.annotations).flag("--labels", labels)
    };
    if train == 0 && args.extra.is_empty() {
        let split = if test > 0 { "test" } else { "val" };
        let flags = with_rows(&format!("--split {split}"));
        return Ok(format!("score a trained run on it: add `{flags}` to `prsmed eval`"));
    }
    if val + test == 0 && is_extra(args)? {
        let flag = ShellCommand::new("--extra").path(&args.root);
        return Ok(format!("train with it: add `{flag}` to the `prsmed train` command of the real data root"));
    }
    let command = with_rows("prsmed train").flag("--extra", &args.extra);
    let command = args.settings.add_to(command.switch("--allow-leak", args.leak.allow_leak));
    Ok(command.flag("--out", next::free_instead_of("runs/train")).to_string())
}

/// True for synthetic pairs and for corrections of the page, which train beside the images of another data root.
fn is_extra(args: &CheckArgs) -> Result<bool> {
    let is_corrected = |file: &PathBuf| file.ends_with("corrected.csv");
    // `--extra` has no `--annotations`
    let has_own = args.annotations.is_none();
    Ok(has_own && (args.root.join(JOURNAL).is_file() || annotation::files(&args.root, None)?.iter().all(is_corrected)))
}

fn check_root(args: &CheckArgs, context: &Context) -> CommandResult {
    let labels = labels_of("--labels", &args.labels)?;
    let root = (args.root.as_path(), args.annotations.as_deref());
    let settings: Resolved = args.settings.sources("full", []).resolve()?;
    let grid = setup::mask_grid(&settings.config.model)?;
    let report = check::check_with_extra(root, &args.extra, labels, Some(grid), context.progress.as_ref())?;
    for bad in &report.bad {
        context.output.line(format!("{}:{}: {}", bad.csv.display(), bad.line, bad.reason))?;
    }
    let leaks = &report.leaks_into_test;
    if !args.leak.allow_leak {
        leaks.iter().try_for_each(|leak| context.output.line(format!("leak: {leak}")))?;
    }
    // with `--json` they are in the record
    if !context.output.is_json() {
        for text in leaks.iter().filter(|_| args.leak.allow_leak).cloned().chain(data_check::warnings(&report)) {
            context.runtime.warn(text);
        }
    }
    context.output.line(data_check::fingerprint_table(&report))?;
    context.output.line(String::new())?;
    context.output.line(data_check::balance_table(&report))?;
    report.balance.advice.iter().try_for_each(|advice| context.output.line(format!("advice: {advice}")))?;
    context.output.line(String::new())?;
    context.output.line(data_check::count_table(&report))?;
    if let Some(path) = &args.html {
        check_page::write(path, &report)?;
        context.output.line(format!("written: {}", path.display()))?;
    }
    let has_leak = !args.leak.allow_leak && !leaks.is_empty();
    if has_leak {
        context.output.line(format!(
            "scores of test images that train would be too good: {}; `--allow-leak` continues",
            report.remedy
        ))?;
    }
    let is_good = report.is_good() && !has_leak;
    if is_good {
        context.output.line(format!("next: {}", next_step(args, &report)?))?;
    }
    let mut record = json!({ "kind": "result", "good": is_good });
    add_fields(&mut record, &report);
    context.output.record(&record)?;
    Ok(if is_good { CommandEnd::Done } else { CommandEnd::No })
}

/// Generate phantoms: synthetic images or volumes with lesions
///
/// Writes a data root of images that imitate CT, MRI, X-ray, ultrasound, endoscopy and dermoscopy, with one or two
/// lesions, questions and answers. With `--volumes`, writes CT-like volumes as NIfTI instead: `OUT/scans/P0001.nii.gz`
/// with pixels of 0.6 to 1 mm and slices of 2.5 to 5 mm, and the label map `OUT/labels/P0001.nii.gz` (1 is a lesion),
/// ready for `prsmed data prepare`. The same seed gives the same bytes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed data phantom phantoms --count 600 --seed 1
  prsmed data phantom phantom-volumes --volumes 40
  prsmed data prepare --images phantom-volumes/scans --masks phantom-volumes/labels \\
      --modality phantom_CT --out data --window soft-tissue --negatives")]
pub(super) struct PhantomArgs {
    /// Output folder
    out: PathBuf,
    /// Number of different images
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().count)]
    count: usize,
    /// Generate N volumes instead of images
    #[arg(long, value_name = "N", conflicts_with_all = ["count", "questions"])]
    volumes: Option<usize>,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Side of the images or slices in pixels [default: 256; of volumes 128]
    #[arg(long, value_name = "N")]
    image_size: Option<u32>,
    /// Fraction of images with two lesions, 0..1 [default: 0.5; of volumes 0.25]
    #[arg(long, value_name = "F")]
    two_lesions: Option<f64>,
    /// Fraction of images or volumes without a lesion, 0..1 [default: 0; of volumes 0.2]. Images without a lesion have
    /// the same questions, and answers that there is none
    #[arg(long, value_name = "F")]
    negatives: Option<f64>,
    /// Questions per lesion, 1 to 4
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().rows_per_lesion)]
    questions: usize,
}

fn make_phantoms(args: &PhantomArgs, context: &Context) -> CommandResult {
    if let Some(volumes) = args.volumes {
        return make_phantom_volumes(args, volumes, context);
    }
    let usual = PhantomOptions::default();
    let options = PhantomOptions {
        count: args.count,
        seed: args.seed,
        image_size_px: args.image_size.unwrap_or(usual.image_size_px),
        two_lesion_frac: args.two_lesions.unwrap_or(usual.two_lesion_frac),
        absent_frac: args.negatives.unwrap_or(usual.absent_frac),
        rows_per_lesion: args.questions,
        ..usual
    };
    let report = phantom::generate(&args.out, &options, context.progress.as_ref())?;
    let healthy = report.images_without_lesion;
    let absent = if healthy > 0 { format!(", {healthy} without a lesion") } else { String::new() };
    context.output.line(format!(
        "{} images ({} with two lesions{absent}), {} questions in {}",
        report.images,
        report.two_lesion_images,
        report.rows,
        args.out.display()
    ))?;
    let train = ShellCommand::new("prsmed train").flag("--data-root", [&args.out]).flag("--preset", ["tiny"]);
    context.done(format!("next: {}", train.flag("--out", next::free_instead_of("runs/train"))), &report)
}

fn make_phantom_volumes(args: &PhantomArgs, volumes: usize, context: &Context) -> CommandResult {
    let usual = PhantomVolumeOptions::default();
    let options = PhantomVolumeOptions {
        volumes,
        seed: args.seed,
        image_size_px: args.image_size.unwrap_or(usual.image_size_px),
        two_lesion_frac: args.two_lesions.unwrap_or(usual.two_lesion_frac),
        absent_frac: args.negatives.unwrap_or(usual.absent_frac),
    };
    let report = phantom::generate_volumes(&args.out, &options, context.progress.as_ref())?;
    context.output.line(format!(
        "{} volumes ({} with two lesions, {} without a lesion), {} in {}",
        report.volumes,
        report.two_lesion_volumes,
        report.volumes_without_lesion,
        counted(report.slices, "slice"),
        args.out.display()
    ))?;
    let [scans, labels] = ["scans", "labels"].map(|name| args.out.join(name));
    let prepare = ShellCommand::new("prsmed data prepare").flag("--images", [scans]).flag("--masks", [labels]);
    let prepare = prepare.flag("--modality", ["phantom_CT"]).flag("--out", [next::free("data", "")]);
    context.done(format!("next: {} --negatives", prepare.flag("--window", ["soft-tissue"])), &report)
}
