//! `prsmed eval`: scores a trained model on a data root.

use super::args::{RootArgs, labels_of};
use super::context::{Context, make_folder};
use super::predict::RunArgs;
use super::report::Outcome;
use crate::data::manifest::{Manifest, Split};
use crate::segment::evaluate;
use crate::segment::task::spread;
use crate::{Error, files};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Score a trained model on a data root: masks, positions, answers
///
/// Computes Dice and IoU at threshold 0.5 (per image, by modality, pooled), the averages over thresholds as published,
/// and scores of the positions and texts in the generated answers. Prints a table and writes `summary.json`,
/// `samples.csv`, `overlays.png` (worst and best samples) and `overlays.csv`, which describes them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed eval runs/a --data-root data --split test")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    data: RootArgs,
    /// Split to score: train, val or test
    #[arg(long, default_value = "test")]
    split: String,
    /// Labels of masks that are foreground, as `--labels` of `prsmed train` [default: those of the run]
    #[arg(long, value_name = "LIST")]
    labels: Option<String>,
    /// Score only N rows, spread evenly over the split; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Maximum length of an answer in tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Folder for the report [default: `eval-SPLIT` in the run folder; for a run on the hub `NAME-eval-SPLIT`]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let split = Split::parse(&args.split).ok_or_else(|| {
        Error::config("--split", format!("there is no split `{}`", args.split), "use train, val or test")
    })?;
    let manifest = args.data.open(context)?;
    let rows = spread(manifest.rows_of(split), args.limit);
    if rows.is_empty() {
        return Err(no_rows(&manifest, split).into());
    }
    let labels = args.labels.as_deref().map(labels_of).transpose()?;
    let mut assembly = args.run.open(context)?;
    if let Some(labels) = labels {
        assembly.description.pixels.labels = labels;
    }
    let out = args.out.clone().unwrap_or_else(|| report_folder(&args.run.run, split));
    if args.out.is_none() && args.run.run.is_dir() {
        // the user did not name this folder, so it must not lead out of the run folder
        files::create_below(&args.run.run, &out).map_err(Error::io(&out, "create"))?;
    }
    make_folder("--out", &out)?;
    let manifest = manifest.with_modalities(assembly.description.modalities.clone())?;
    let evaluation = evaluate::evaluate(
        &assembly,
        &manifest,
        &rows,
        args.max_new_tokens,
        context.progress.as_ref(),
        &context.interrupt,
    )?;
    evaluation.write(&out)?;
    context.output.line(&evaluation.summary)?;
    context.output.line(format!("report in {}", out.display()))?;
    context.output.record(&json!({
        "kind": "result",
        "split": split.name(),
        "rows": rows.len(),
        "report": out,
        "summary": evaluation.summary,
    }))?;
    Ok(Outcome::Done)
}

/// `eval-SPLIT` in a local run folder; for a run on the hub a folder named after it.
fn report_folder(run: &Path, split: Split) -> PathBuf {
    let name = run.to_string_lossy();
    match name.strip_prefix("hub:").map(|rest| rest.split('@').next().unwrap_or_default()) {
        Some(repo) => format!("{}-eval-{}", repo.rsplit('/').next().unwrap_or_default(), split.name()).into(),
        None => run.join(format!("eval-{}", split.name())),
    }
}

fn no_rows(manifest: &Manifest, split: Split) -> Error {
    let counts: Vec<String> = [Split::Train, Split::Val, Split::Test]
        .into_iter()
        .map(|split| format!("{} {}", manifest.rows_of(split).len(), split.name()))
        .collect();
    let reason = format!("there are no `{}` rows (found {})", split.name(), counts.join(", "));
    Error::data(&manifest.root, reason, "choose another `--split`")
}
