//! `prsmed data`: check, make or import data roots.

use super::Context;
use super::report::Outcome;
use crate::data::check::{self, Count, Leak, Report};
use crate::data::manifest::{Manifest, OpenOptions, Split};
use crate::data::phantom::{self, PhantomOptions};
use crate::data::position::Zones;
use crate::data::prepare::{self, PrepareOptions, Several};
use crate::event::Event;
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Check or make data roots
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    Check(CheckArgs),
    Prepare(PrepareArgs),
    Phantom(PhantomArgs),
}

pub(super) fn run(command: &Command, context: &Context) -> anyhow::Result<Outcome> {
    match command {
        Command::Check(args) => check_root(args, context),
        Command::Prepare(args) => prepare_root(args, context),
        Command::Phantom(args) => make_phantoms(args, context),
    }
}

/// Where the rows of a training or an evaluation are.
#[derive(Debug, clap::Args)]
pub(super) struct RootArgs {
    /// Folder with one folder for each modality, and `annotations/` (needed)
    #[arg(long, value_name = "DIR")]
    data_root: Option<PathBuf>,
    /// Folder with the CSV files, or one CSV file, when they are not in the data root
    #[arg(long, value_name = "DIR")]
    annotations: Option<PathBuf>,
    /// Leave out rows that cannot be used instead of refusing the data set
    #[arg(long)]
    skip_bad_rows: bool,
}

impl RootArgs {
    pub(super) fn open(&self) -> Result<Manifest> {
        let root = self.data_root.as_deref().ok_or_else(|| {
            let hint = "add `--data-root DIR`; to try the tool, make one with `prsmed data phantom phantoms`";
            Error::config("--data-root", "is needed", hint)
        })?;
        Manifest::open_with(root, self.annotations.as_deref(), OpenOptions { skip_bad: self.skip_bad_rows })
    }

    /// The rows of [`RootArgs::open`] with those of extra roots as synthetic rows.
    pub(super) fn open_with_extra(&self, extra: &[PathBuf]) -> Result<Manifest> {
        let mut manifest = self.open()?;
        let mut known: Vec<PathBuf> = self.data_root.iter().filter_map(|root| root.canonicalize().ok()).collect();
        for root in extra {
            let place = root.canonicalize().unwrap_or_else(|_| root.clone());
            if known.contains(&place) {
                let reason = format!("`{}` is given twice", root.display());
                return Err(Error::config("--extra", reason, "name every data root once"));
            }
            known.push(place);
            let rows = Manifest::open_with(root, None, OpenOptions { skip_bad: self.skip_bad_rows })?;
            manifest = manifest.with_extra(rows)?;
        }
        Ok(manifest)
    }
}

/// Look for rows that cannot be used, count the others
///
/// Reads every row and decodes every image and mask, changes nothing, and lists each row that cannot be used with its
/// file, line and reason: missing or corrupt image or mask, size mismatch, empty mask, empty text, unknown split,
/// duplicate. Then counts the usable rows. Ends with exit code 1 when a row is bad.
///
/// A picture that occurs in several splits is a warning: scores on it are not scores on unseen data.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed data check data
  prsmed data check data --annotations csv
  prsmed data check data --json | jq '.bad[].reason'")]
pub(super) struct CheckArgs {
    /// Folder with one folder for each modality, and `annotations/`
    #[arg(value_name = "DIR")]
    root: PathBuf,
    /// Folder with the CSV files, or one CSV file [default: `annotations` in DIR]
    #[arg(long, value_name = "DIR")]
    annotations: Option<PathBuf>,
}

fn check_root(args: &CheckArgs, context: &Context) -> anyhow::Result<Outcome> {
    let report = check::check(&args.root, args.annotations.as_deref(), context.progress.as_ref())?;
    for bad in &report.bad {
        context.output.line(format!("{}:{}: {}", bad.csv.display(), bad.line, bad.reason))?;
    }
    for leak in &report.leaks {
        context.progress.on(&Event::Warning(leak_text(leak)));
    }
    context.output.line(count_table(&report))?;
    let mut record = json!({ "kind": "result", "good": report.is_good() });
    if let (Some(record), serde_json::Value::Object(fields)) = (record.as_object_mut(), serde_json::to_value(&report)?)
    {
        record.extend(fields);
    }
    context.output.record(&record)?;
    Ok(if report.is_good() { Outcome::Done } else { Outcome::No })
}

fn leak_text(leak: &Leak) -> String {
    let splits: Vec<&str> = leak.splits.iter().map(|split| split.name()).collect();
    let images: Vec<String> = leak.images.iter().map(|path| path.display().to_string()).collect();
    format!("one picture in {}: {}", splits.join(" and "), images.join(", "))
}

/// Usable rows by modality and split, their sums, and what was found.
fn count_table(report: &Report) -> String {
    let width = report.counts.iter().map(|count| count.modality.chars().count()).max().unwrap_or(0).max(8);
    let row = |name: &str, [a, b, c, d]: [String; 4]| format!("{name:<width$}{a:>8}{b:>8}{c:>8}{d:>8}\n");
    let numbers = |count: &Count| {
        let Count { train, val, test, .. } = *count;
        [train, val, test, train + val + test].map(|number| number.to_string())
    };
    let [train, val, test] = Split::ALL.map(|split| split.name().to_owned());
    let mut text = row("modality", [train, val, test, "all".into()]);
    let mut sum = Count { modality: "all".into(), ..Count::default() };
    for count in &report.counts {
        text += &row(&count.modality, numbers(count));
        sum.train += count.train;
        sum.val += count.val;
        sum.test += count.test;
    }
    text += &row(&sum.modality, numbers(&sum));
    let bad = if report.is_good() { "no bad row".into() } else { format!("{} bad", report.bad.len()) };
    format!("{text}{} rows of {} images, {bad}", report.rows, report.images)
}

/// Make a data root of synthetic pictures with lesions, questions and answers
///
/// CT-, MRI-, X-ray-, ultrasound-, endoscopy- and skin-like pictures with one or two lesions. The same
/// seed gives the same bytes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed data phantom phantoms --count 600 --seed 1")]
pub(super) struct PhantomArgs {
    /// Folder to make
    out: PathBuf,
    /// Different pictures
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().count)]
    count: usize,
    /// Seed of everything
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Side of the pictures in pixels
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().image_size_px)]
    image_size: u32,
    /// Part of the pictures with two lesions, 0..1
    #[arg(long, value_name = "F", default_value_t = PhantomOptions::default().two_lesion_frac)]
    two_lesions: f64,
    /// Questions for each lesion, 1 to 4
    #[arg(long, value_name = "N", default_value_t = PhantomOptions::default().rows_per_lesion)]
    questions: usize,
}

fn make_phantoms(args: &PhantomArgs, context: &Context) -> anyhow::Result<Outcome> {
    let options = PhantomOptions {
        count: args.count,
        seed: args.seed,
        image_size_px: args.image_size,
        two_lesion_frac: args.two_lesions,
        rows_per_lesion: args.questions,
        ..PhantomOptions::default()
    };
    let report = phantom::generate(&args.out, &options, context.progress.as_ref())?;
    context.output.line(format!(
        "{} pictures ({} with two lesions), {} questions in {}",
        report.images,
        report.two_lesion_images,
        report.rows,
        args.out.display()
    ))?;
    context.output.record(&report)?;
    Ok(Outcome::Done)
}

/// Make a data root from plain folders of images and masks
///
/// Pairs them by name (a mask may end in `_mask`, `_seg` or `_Segmentation`), cuts the splits, and writes questions and
/// answers about the place of what the mask shows.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  prsmed data prepare --images scans --masks labels --modality skin --target nevus --out data")]
pub(super) struct PrepareArgs {
    /// Folder of images: PNG, JPEG or TIFF
    #[arg(long, value_name = "DIR")]
    images: PathBuf,
    /// Folder of masks, foreground above 0
    #[arg(long, value_name = "DIR")]
    masks: PathBuf,
    /// Folder name and class of these images
    #[arg(long, value_name = "NAME")]
    modality: String,
    /// Data root; may hold other modalities
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// What the mask shows, as questions call it
    #[arg(long, value_name = "WORDS", default_value = "lesion")]
    target: String,
    /// What the image is, as questions call it
    #[arg(long, value_name = "WORDS", default_value = "image")]
    image_word: String,
    /// Places: `grid` (3x3) or `quadrants` (as PRS-Med's data)
    #[arg(long, value_name = "NAME", default_value = "grid")]
    zones: String,
    /// Describe several regions by the two largest instead of all together
    #[arg(long)]
    regions: bool,
    /// Questions for each image
    #[arg(long, value_name = "N", default_value_t = 2)]
    questions: usize,
    /// Part of the images for validation, 0..1
    #[arg(long, value_name = "F", default_value_t = 0.1)]
    val_frac: f64,
    /// Part of the images for the test, 0..1
    #[arg(long, value_name = "F", default_value_t = 0.1)]
    test_frac: f64,
    /// Seed of splits and sentences
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Sentences to use instead of the built-in ones (TOML)
    #[arg(long, value_name = "FILE")]
    templates: Option<PathBuf>,
}

fn prepare_root(args: &PrepareArgs, context: &Context) -> anyhow::Result<Outcome> {
    let zones = match args.zones.as_str() {
        "grid" => Zones::Grid,
        "quadrants" => Zones::Quadrants,
        other => {
            let reason = format!("there are no zones `{other}`");
            return Err(Error::config("--zones", reason, "use grid or quadrants").into());
        }
    };
    let options = PrepareOptions {
        zones,
        several: if args.regions { Several::Regions } else { Several::Together },
        target: args.target.clone(),
        image_word: args.image_word.clone(),
        rows_per_image: args.questions,
        val_frac: args.val_frac,
        test_frac: args.test_frac,
        seed: args.seed,
        templates: args.templates.clone(),
        ..PrepareOptions::new(&args.images, &args.masks, &args.modality, &args.out)
    };
    let report = prepare::prepare(&options, context.progress.as_ref())?;
    for skipped in &report.skipped {
        context.progress.on(&Event::Warning(format!("{}: left out, {}", skipped.path.display(), skipped.reason)));
    }
    context.output.line(format!(
        "{} images, {} questions in {}; {} files left out",
        report.images,
        report.rows,
        args.out.display(),
        report.skipped.len()
    ))?;
    context.output.record(&report)?;
    Ok(Outcome::Done)
}
