//! `prsmed eval`: scores trained models on a data root.

use super::args::{RootArgs, labels_of};
use super::context::Context;
use super::predict::ModelArgs;
use super::ranks::GpuArgs;
use super::report::{CommandEnd, CommandResult};
use crate::Error;
use crate::data::manifest::{Manifest, Split};
use crate::data::marks::Marks;
use crate::data::split::spread;
use crate::front::evaluate::EvaluationOptions;
use crate::job::evaluation::RunScoring;
use crate::job::together::check_data;
use crate::segment::weight_files;
use crate::shell::ShellCommand;
use crate::trainer::Ranks;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Score trained models on a data root: masks, positions, answers
///
/// Computes Dice and IoU at threshold 0.5 (per image, by modality, pooled), distances of borders (HD95, ASSD, surface
/// Dice), lesions found, the averages over thresholds as published, calibration, and scores of the positions and texts
/// in the generated answers, with 95 % intervals over patients. A mask whose presence score is below the run's
/// threshold is scored as empty, as `prsmed predict` paints it. Absent targets (column `present` 0) count for the share
/// of false masks, rows without a known mask for their answers only.
///
/// Prints a table and writes `report.html`, `summary.json`, `samples.csv`, `patients.csv`, `overlays.png` (worst and
/// best samples) and `overlays.csv`, which describes them. Several runs are scored one after the other and compared
/// with the first one, question by question. The folds of a cross-validation (`train --fold`) are each scored on their own
/// validation images (`--split val`), and all of them together.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed eval runs/a --data-root data --split test
  prsmed eval runs/a --data-root data --gpus 4
  prsmed eval runs/a runs/b --data-root data --out compared
  prsmed eval runs/fold0 runs/fold1 --data-root data --split val
  prsmed eval runs/fold0 runs/fold1 --data-root data --ensemble")]
pub(super) struct Args {
    /// Run folders (their `best/`, else `last/`), checkpoint folders, published PRS-Med folders, or
    /// `hub:owner/name[/FOLDER]`. With several, the first is the baseline
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    data: RootArgs,
    /// Split to score: train, val or test
    #[arg(long, default_value = "test")]
    split: String,
    /// Labels of masks that are foreground, as `--labels` of `prsmed train` [default: those of the run]
    #[arg(long, value_name = "LIST")]
    labels: Option<String>,
    /// Tolerance of the surface Dice in mm; in pixels if the data have no pixel spacing
    #[arg(long, value_name = "MM", default_value_t = 2.0)]
    tolerance_mm: f64,
    /// Score all runs as one: their masks are averaged, and answers are those of the first run
    #[arg(long)]
    ensemble: bool,
    /// Score only N rows, spread evenly over the split; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Maximum length of an answer in tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Folder for the report [default: `eval-SPLIT` in the run folder, for its `last` and `best` `eval-SPLIT-last` and
    /// `-best` there; for a run on the hub `NAME-eval-SPLIT`; for several runs `eval-SPLIT-compared` in the current folder, for folds `eval-folds`; if it has results of another data root, `-DATA` is
    /// added]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Also move the true mask of each row to each location, and measure how often the words follow it: up to nine more
    /// answers for each row. For runs of `model.answer_reads_mask`
    #[arg(long)]
    move_masks: bool,
    #[command(flatten)]
    pub(super) gpus: GpuArgs,
}

pub(super) fn run(args: &Args, ranks: Ranks, context: &Context) -> CommandResult {
    let split = Split::parse(&args.split).ok_or_else(|| {
        Error::config("--split", format!("there is no split `{}`", args.split), "use train, val or test")
    })?;
    if !(args.tolerance_mm.is_finite() && args.tolerance_mm >= 0.0) {
        let reason = format!("{} is no distance", args.tolerance_mm);
        return Err(Error::config("--tolerance-mm", reason, "use 0 or more, for example 2").into());
    }
    let manifest = args.data.open(context)?;
    check_data(ranks, &manifest)?;
    let rows = spread(manifest.rows_of(split), args.limit);
    let are_folds = split == Split::Val && are_folds(&args.runs, context)?;
    if rows.is_empty() && !are_folds {
        return Err(no_rows(&manifest, split).into());
    }
    let scoring = RunScoring {
        manifest: &manifest,
        rows: &rows,
        split,
        limit: args.limit,
        labels: args.labels.as_deref().map(|text| labels_of("--labels", text)).transpose()?,
        options: EvaluationOptions {
            max_new_tokens: args.max_new_tokens,
            tolerance: args.tolerance_mm,
            moves_masks: args.move_masks,
        },
        out: args.out.clone(),
        model: args.model.options(if args.ensemble { &args.runs[1..] } else { &[] }),
        ranks,
        runtime: &context.runtime,
        marks: Mutex::new(Marks::cached(context.runtime.cache())),
    };
    match &args.runs[..] {
        [run] => single(&scoring, run, &args.model, context)?,
        [first, ..] if args.ensemble => single(&scoring, first, &args.model, context)?,
        runs if are_folds => cross_validate(&scoring, runs, context)?,
        runs => compare(&scoring, runs, context)?,
    }
    Ok(CommandEnd::Done)
}

/// Prints the scores of a run.
fn single(scoring: &RunScoring, run: &Path, model: &ModelArgs, context: &Context) -> anyhow::Result<()> {
    let Some((out, evaluation)) = scoring.single(run)? else { return Ok(()) };
    context.output.line(&evaluation.summary)?;
    let serve = model.add_to(ShellCommand::new("prsmed serve").path(run).flag("--ensemble", &scoring.model.ensemble));
    context.output.line(format!("report in {}\nnext: {serve}", out.display()))?;
    context.output.record(&json!({
        "kind": "result",
        "split": scoring.split.name(),
        "rows": scoring.rows.len(),
        "report": out,
        "summary": evaluation.summary,
    }))?;
    Ok(())
}

/// True if all runs are of a cross-validation.
fn are_folds(runs: &[PathBuf], context: &Context) -> anyhow::Result<bool> {
    for run in runs {
        if weight_files::described(run, &context.runtime)?.is_none_or(|description| description.fold.is_none()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Prints the scores of all folds together.
fn cross_validate(scoring: &RunScoring, runs: &[PathBuf], context: &Context) -> anyhow::Result<()> {
    let Some((out, table, runs)) = scoring.cross_validate(runs)? else { return Ok(()) };
    context.output.line(&table)?;
    context.output.line(format!("reports in {}", out.display()))?;
    context.output.record(&json!({ "kind": "result", "split": "val", "report": out, "runs": runs, "table": table }))?;
    Ok(())
}

/// Prints the scores of several runs beside those of the first.
fn compare(scoring: &RunScoring, runs: &[PathBuf], context: &Context) -> anyhow::Result<()> {
    let Some((out, comparison, runs)) = scoring.compare(runs)? else { return Ok(()) };
    context.output.line(&comparison)?;
    context.output.line(format!("report in {}", out.display()))?;
    context.output.record(&json!({
        "kind": "result",
        "split": scoring.split.name(),
        "rows": scoring.rows.len(),
        "report": out,
        "runs": runs,
        "differences": comparison.differences,
    }))?;
    Ok(())
}

fn no_rows(manifest: &Manifest, split: Split) -> Error {
    let counts = [Split::Train, Split::Val, Split::Test]
        .map(|split| format!("{} {}", manifest.rows_of(split).len(), split.name()));
    let reason = format!("there are no `{}` rows (found {})", split.name(), counts.join(", "));
    Error::data(&manifest.root, reason, "choose another `--split`")
}
