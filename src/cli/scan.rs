//! `prsmed data scan`: which files of a folder are images and masks that belong together.

use super::context::Context;
use super::next;
use super::prepare::ScanArgs;
use super::report::{CommandEnd, CommandResult};
use crate::data::prepare::{self, ScanReport};
use crate::error::Error;
use crate::metrics::text_table::columns;
use crate::shell::ShellCommand;
use std::path::{Path, PathBuf};

/// Find images and masks that belong together in a folder, and write them as a table
///
/// Looks at the names of all files below DIR, recognises the layout of the data set, and prints what it found. Nothing is decoded
/// but a few pairs for the page; files are not changed. Writes `OUT/pairs.csv` to read and correct, which
/// `prsmed data prepare --pairs` takes; `OUT/scan.json` with all unmatched and ambiguous files; and `OUT/scan.html` with a few
/// masks drawn over their images.
///
/// The exit code is 1 if something is ambiguous, for example two masks of one image, or several sequences for one mask
/// (`--channel`). A folder with several DICOM series is ambiguous until `--series` chooses one; the series are listed by number,
/// description, modality, slices, orientation and date, in the text, `scan.json` and `scan.html`. Such lines have a reason in the column `ambiguous`, and stop `prsmed data prepare` until it is empty.
///
/// Layouts: `prsmed`, `busi`, `isic`, `lgg`, `kits`, `lits`, `brats`, `acdc`, `totalsegmentator`, `drive`, `chase`, `voc`,
/// `nnunet`, `decathlon`, `kvasir`, `bids`, `biomedparse`, `medsam`, `dicom` (SEG and RTSTRUCT beside their
/// series), `mecovqa`; `names` for all others, such as a folder for each patient with files of equal names; and `coco`, `labelme`
/// and `yolo` for files of outlines.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed data scan downloads/BUSI
  prsmed data scan BraTS2020 --channel flair --out scan
  prsmed data scan archive --series 'description~portal,newest'
  prsmed data scan hospital --json | jq '.ambiguous[]'")]
pub(super) struct ScanCommandArgs {
    /// Folder with images and masks
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    scan: ScanArgs,
    /// Output folder [default: `scan-NAME` in the current folder, with the name of DIR]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Most files that the text names for each kind.
const MAX_NAMED: usize = 10;
/// Most DICOM series that the text lists.
const MAX_SERIES: usize = 30;

pub(super) fn scan_folder(args: &ScanCommandArgs, context: &Context) -> CommandResult {
    let out = args.out.clone().unwrap_or_else(|| next::free(&format!("scan-{}", name_of(&args.dir)), ""));
    if let Some(known) = prepare::scan_files(&out).into_iter().find(|path| path.exists()) {
        let reason = format!("`{}` exists, and may have corrections", known.display());
        return Err(Error::config("--out", reason, "give another folder, or move the file away").into());
    }
    let report = prepare::scan(&args.dir, &args.scan.options(), context.progress.as_ref())?;
    let [pairs, _, page] = prepare::write_scan(&report, &out)?;
    for (name, value) in report.summary() {
        context.output.line(format!("{name:<12}{value}"))?;
    }
    for text in lines(&report) {
        context.output.line(text)?;
    }
    if report.series.iter().any(|found| found.series.len() > 1) {
        context.output.line(series_table(&report))?;
    }
    report.notes.iter().for_each(|text| context.runtime.note(text.clone()));
    context.output.line(format!("written: {}, {}", pairs.display(), page.display()))?;
    let is_clear = report.ambiguous.is_empty() && !report.layouts.is_empty();
    if is_clear {
        let command = ShellCommand::new("prsmed data prepare").flag("--pairs", [&pairs]).flag("--modality", ["NAME"]);
        context.output.line(format!("next: {}", command.flag("--out", [next::free("data", "")])))?;
    }
    if report.layouts.is_empty() {
        let table = pairs.display();
        context.output.line(format!(
            "no layout fits: write the pairs into {table}, one line each, or one line of patterns with the same text for each `*`, \
             such as `images/*.png,masks/*_mask.png,*`"
        ))?;
    }
    context.output.record(&report)?;
    Ok(if is_clear { CommandEnd::Done } else { CommandEnd::No })
}

fn name_of(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    dir.file_name().map_or_else(|| "data".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The DICOM series of folders, those of folders with several first.
fn series_table(report: &ScanReport) -> String {
    let rows = prepare::series_rows(report);
    let more = rows.len().saturating_sub(MAX_SERIES);
    let more = if more > 0 { format!("and {more} more, see scan.json") } else { String::new() };
    let shown: Vec<Vec<String>> = [prepare::series_head()].into_iter().chain(rows).take(1 + MAX_SERIES).collect();
    columns(&shown) + &more
}

/// The files that need a look, each with the reason.
fn lines(report: &ScanReport) -> Vec<String> {
    let below = |path: &Path| path.strip_prefix(&report.root).unwrap_or(path).display().to_string();
    let ambiguous = report.ambiguous.iter().map(|found| format!("ambiguous: {}: {}", found.name, found.reason));
    let problems = report.problems.iter().map(|skip| format!("problem: {}: {}", below(&skip.path), skip.reason));
    let copies = report.copies.iter().map(|files| {
        let names: Vec<String> = files.iter().map(|path| below(path)).collect();
        format!("copies: {}", names.join(", "))
    });
    let unmatched = report.unmatched.iter().map(|skip| format!("unmatched: {}: {}", below(&skip.path), skip.reason));
    let kinds: [Vec<String>; 4] = [ambiguous.collect(), problems.collect(), copies.collect(), unmatched.collect()];
    let first = |kind: Vec<String>| {
        let more = kind.len().saturating_sub(MAX_NAMED);
        let more = (more > 0).then(|| format!("and {more} more, see scan.json"));
        kind.into_iter().take(MAX_NAMED).chain(more)
    };
    kinds.into_iter().flat_map(first).collect()
}
