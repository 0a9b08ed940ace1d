//! `prsmed augment study`.

use super::SegmenterArgs;
use crate::augment::study::{self, Study};
use crate::cli::claim::Claim;
use crate::cli::data::RootArgs;
use crate::cli::report::Outcome;
use crate::cli::train::refuse_what_cannot_fit;
use crate::cli::{Context, plan};
use crate::config::RunConfig;
use crate::data::manifest::Manifest;
use crate::event::Event;
use crate::metrics::paired::Verdict;
use crate::segment::fit::Recipe;
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Prove whether synthetic pairs help: trainings with and without them, compared
///
/// Trains the segmenter on the real pictures alone, on them with classical augmentation, and on them with the pairs of
/// `--extra`, with every seed and for the same number of steps, and scores all of them on the real `test` rows. Prints
/// mean Dice, paired differences with 95 % intervals by class, and a verdict; writes study.json, study.svg and study.txt.
/// Pairs whose source is not among the real training pictures of the study are left out.
///
/// Exit code 0 when the gain over real pictures alone excludes 0, else 1. A stopped study goes on where it was.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment study --data-root data --extra pairs --preset gpu-24gb --limit-real 100
  prsmed augment study --data-root phantoms --extra pairs --out study --steps 200 --seeds 5")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic pairs, made by `prsmed augment generate` from the same data root
    #[arg(long, value_name = "DIR")]
    extra: PathBuf,
    /// Report and runs
    #[arg(long, value_name = "DIR", default_value = "runs/study")]
    out: PathBuf,
    #[command(flatten)]
    settings: SegmenterArgs,
    /// Optimizer steps of every training [default: those of the settings on the real pictures]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Seeds of each arm
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=50))]
    seeds: u8,
    /// First seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Use N real training pictures, spread evenly over each class; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_real: usize,
    /// Score N test rows, spread evenly; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_test: usize,
    /// Synthetic rows for each real one, or `all`
    #[arg(long, value_name = "R", default_value = "0.5")]
    synthetic_ratio: String,
    /// Do not plan the memory of the trainings, and start even what would not fit
    #[arg(long)]
    no_plan: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let ratio = (format!("data.synthetic_ratio={}", args.synthetic_ratio), "--synthetic-ratio".to_owned());
    let resolved = args.settings.resolve([ratio])?;
    let text = resolved.to_toml();
    let config = resolved.config;
    let real = args.data.open()?;
    let synthetic = Manifest::open(&args.extra, None)?;
    let _claim = Claim::on("--out", &args.out, context.progress.as_ref())?;
    if !args.no_plan {
        refuse_what_cannot_fit(&config.with_cache_for(&real), &plan::training_machine(context), context)?;
    }
    let ratio = config.data.synthetic_ratio;
    let steps = steps(args, &config, &real)?;
    let recipe = Recipe { model: config.model, lora: config.lora, train: config.train, data: config.data, text };
    let locate = |spec: &str| context.locate(spec);
    let study = Study {
        real: &real,
        synthetic: &synthetic,
        recipe: &recipe,
        steps,
        seeds: (args.seed, usize::from(args.seeds)),
        limit_real: args.limit_real,
        limit_test: args.limit_test,
        ratio,
        out: &args.out,
    };
    let report = study.run(context.surroundings(&locate))?;
    if report.seeds.len() == 1 {
        let text = "one seed says nothing of other seeds: use `--seeds 3` or more before believing a gain";
        context.progress.on(&Event::Warning(text.into()));
    }
    context.output.line(report.table())?;
    context.output.line(format!("report in {}", args.out.display()))?;
    context.output.record(&json!({ "kind": "result", "out": args.out, "report": report }))?;
    Ok(if report.verdict == Verdict::Gain { Outcome::Done } else { Outcome::No })
}

/// As many steps as the settings take on the real pictures of the study.
fn steps(args: &Args, config: &RunConfig, real: &Manifest) -> Result<u64> {
    if let Some(steps) = args.steps {
        if steps == 0 {
            return Err(Error::config("--steps", "must be 1 or more, got 0", "use for example 500"));
        }
        return Ok(steps);
    }
    let rows = study::training_rows(real, args.limit_real);
    let batch = config.train.micro_batch * config.train.accumulation;
    let whole = rows.div_ceil(batch.max(1)) as u64 * config.train.epochs;
    Ok(if config.train.max_steps > 0 { whole.min(config.train.max_steps) } else { whole }.max(1))
}
