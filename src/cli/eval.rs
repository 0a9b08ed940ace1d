//! `prsmed eval`.

use super::data::RootArgs;
use super::predict::RunArgs;
use super::report::Outcome;
use super::{Context, make_folder};
use crate::Error;
use crate::data::manifest::{Manifest, Split};
use crate::segment::evaluate;
use crate::segment::task::spread;
use serde_json::json;
use std::path::PathBuf;

/// Score a run on a data root: masks, positions, answers
///
/// Dice and IoU at 0.5 (per image, by modality, pooled), the published threshold averages, positions and
/// texts of the generated answers. Prints a table; writes `summary.json`, `samples.csv` and
/// `overlays.png`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed eval runs/a --data-root data --split test")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    data: RootArgs,
    /// Rows to score: train, val or test
    #[arg(long, default_value = "test")]
    split: String,
    /// Score only N rows, spread evenly over the split; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Longest answer in tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Where to write the report [default: `eval-SPLIT` in the run folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let split = Split::parse(&args.split).ok_or_else(|| {
        Error::config("--split", format!("there is no split `{}`", args.split), "use train, val or test")
    })?;
    let manifest = args.data.open()?;
    let rows = spread(manifest.rows_of(split), args.limit);
    if rows.is_empty() {
        return Err(no_rows(&manifest, split).into());
    }
    let assembly = args.run.open(context)?;
    let out = args.out.clone().unwrap_or_else(|| args.run.run.join(format!("eval-{}", split.name())));
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

fn no_rows(manifest: &Manifest, split: Split) -> Error {
    let counts: Vec<String> = [Split::Train, Split::Val, Split::Test]
        .into_iter()
        .map(|split| format!("{} {}", manifest.rows_of(split).len(), split.name()))
        .collect();
    let reason = format!("there are no `{}` rows (it has {})", split.name(), counts.join(", "));
    Error::data(&manifest.root, reason, "choose another `--split`")
}
