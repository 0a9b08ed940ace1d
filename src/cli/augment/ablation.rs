//! `prsmed augment ablation`.

use super::args::SegmenterArgs;
use crate::augment::ablation::{self, Ablation};
use crate::cli::args::RootArgs;
use crate::cli::context::Context;
use crate::cli::plan;
use crate::cli::report::Outcome;
use crate::cli::run_lock::RunLock;
use crate::cli::train::{check_memory, refuse_gpu_preset_without_gpu};
use crate::config::RunConfig;
use crate::data::manifest::Manifest;
use crate::event::Event;
use crate::metrics::paired::Conclusion;
use crate::segment::needs;
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Test whether synthetic pairs help: compare trainings with and without them
///
/// Trains the segmenter on real images alone, on real images with classical augmentation, and on real images with the
/// pairs of `--extra`. Every arm is trained with every seed and for the same number of steps, and is scored on the real
/// `test` rows. Prints mean Dice, paired differences with 95 % intervals by class, and a conclusion; writes
/// ablation.json and ablation.txt. Pairs whose source is not among the real training images are left out.
///
/// The exit code is 0 when the interval of the gain over real images alone excludes 0, else 1. After an interruption,
/// the same command continues where it stopped.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment ablation --data-root data --extra pairs --preset gpu-24gb --limit-real 100
  prsmed augment ablation --data-root phantoms --extra pairs --out ablation --steps 200 --seeds 5")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of pairs that `prsmed augment generate` made from the same data root
    #[arg(long, value_name = "DIR")]
    extra: PathBuf,
    /// Folder of the report and the runs
    #[arg(long, value_name = "DIR", default_value = "runs/ablation")]
    out: PathBuf,
    #[command(flatten)]
    settings: SegmenterArgs,
    /// Optimizer steps of every training [default: as many as the settings take on the real images]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Number of seeds of each arm
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=50))]
    seeds: u8,
    /// First seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Train on N real images, spread evenly over each class; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_real: usize,
    /// Score N test rows, spread evenly; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_test: usize,
    /// Synthetic rows per real row, or `all`
    #[arg(long, value_name = "R", default_value = "0.5")]
    synthetic_ratio: String,
    /// Skip the memory plan and start even if the trainings may not fit
    #[arg(long)]
    no_plan: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let ratio = (format!("data.synthetic_ratio={}", args.synthetic_ratio), "--synthetic-ratio".to_owned());
    let resolved = args.settings.resolve([ratio])?;
    refuse_gpu_preset_without_gpu(&resolved, context)?;
    let toml = resolved.to_toml();
    let config = resolved.config;
    let real = args.data.open(context)?;
    let synthetic = Manifest::open(&args.extra, None)?;
    let _claim = RunLock::on("--out", &args.out, context.progress.as_ref())?;
    context.check_files(needs::of_model(&config.model))?;
    if !args.no_plan {
        check_memory(&config.with_cache_for(&real), &plan::training_machine(context), context)?;
    }
    let ratio = config.data.synthetic_ratio;
    let steps = steps(args, &config, &real)?;
    let ablation = Ablation {
        real: &real,
        synthetic: &synthetic,
        config: &config,
        toml: &toml,
        steps,
        first_seed: args.seed,
        num_seeds: usize::from(args.seeds),
        limit_real: args.limit_real,
        limit_test: args.limit_test,
        ratio,
        out: &args.out,
    };
    let report = ablation.run(&context.runtime)?;
    if report.seeds.len() == 1 {
        let text = "one seed cannot show the variation between seeds: use `--seeds 3` or more before you trust a gain";
        context.progress.on(&Event::Warning(text.into()));
    }
    context.output.line(report.table())?;
    context.output.line(format!("report in {}", args.out.display()))?;
    context.output.record(&json!({ "kind": "result", "out": args.out, "report": report }))?;
    Ok(if report.verdict == Conclusion::Gain { Outcome::Done } else { Outcome::No })
}

/// Number of steps that the settings take on the real images of the ablation.
fn steps(args: &Args, config: &RunConfig, real: &Manifest) -> Result<u64> {
    if let Some(steps) = args.steps {
        if steps == 0 {
            return Err(Error::config("--steps", "must be 1 or more, got 0", "use for example 500"));
        }
        return Ok(steps);
    }
    let rows = ablation::training_rows(real, args.limit_real);
    let batch = config.train.micro_batch * config.train.accumulation;
    let whole = rows.div_ceil(batch.max(1)) as u64 * config.train.epochs;
    Ok(if config.train.max_steps > 0 { whole.min(config.train.max_steps) } else { whole }.max(1))
}
