//! `prsmed augment ablation`.

use crate::augment::ablation::{self, Ablation};
use crate::cli::args::{PlanArgs, RootArgs, SettingsArgs};
use crate::cli::context::Context;
use crate::cli::report::{CommandEnd, CommandResult};
use crate::config::RunConfig;
use crate::data::manifest::Manifest;
use crate::data::mixing_sampler::Ratio;
use crate::job;
use crate::job::training_settings::refuse_gpu_preset_without_gpu;
use crate::metrics::paired::Conclusion;
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Test whether synthetic pairs help: compare trainings with and without them
///
/// Trains the segmenter on real images alone, on real images with classical augmentation, on real images with the
/// pairs of `--extra`, and on real images with duplicated real rows in place of these pairs. Every arm is trained with
/// every seed and for the same number of steps, and is scored on the real `test` rows. Prints mean Dice, paired
/// differences with 95 % intervals by class, and a conclusion; writes ablation.json and ablation.txt.
/// Pairs whose source is not among the real training images are left out.
///
/// One comparison decides: Dice on the test rows, with the first of `--ratios`. All others are reported as secondary. The
/// exit code is 0 when the intervals of the gain over real images alone and over duplicated real rows exclude 0, else 1.
/// After an interruption, the same command continues where it stopped; seeds, ratios and scored rows can be added later.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings of the segmenter: tiny, full, cpu, gpu-24gb, ... [default: tiny]")))]
#[command(after_help = "Examples:
  prsmed augment ablation --data-root data --extra pairs --preset gpu-24gb --real-images 100
  prsmed augment ablation --data-root data --extra pairs --ratios 0.5,1
  prsmed augment ablation --data-root data --extra pairs --real-images 20 --external other
  prsmed augment ablation --data-root phantoms --extra pairs --out ablation --steps 200 --seeds 5")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of pairs that `prsmed augment generate` made from the same data root
    #[arg(long, value_name = "DIR")]
    extra: PathBuf,
    /// Data root from another source that is scored too: its `test` rows, or all rows if there are none
    #[arg(long, value_name = "DIR")]
    external: Option<PathBuf>,
    /// Folder of the report and the runs
    #[arg(long, value_name = "DIR", default_value = "runs/ablation")]
    out: PathBuf,
    #[command(flatten)]
    settings: SettingsArgs,
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
    #[arg(long, value_name = "N", alias = "limit-real", default_value_t = 0)]
    real_images: usize,
    /// Score N rows of each set, spread evenly; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_test: usize,
    /// Synthetic rows per real row, or `all`; the one that decides first
    #[arg(long, value_name = "R", alias = "synthetic-ratio", value_delimiter = ',', default_value = "0.5")]
    ratios: Vec<Ratio>,
    #[command(flatten)]
    plan: PlanArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    let resolved = args.settings.sources("tiny", []).resolve()?;
    refuse_gpu_preset_without_gpu(&resolved, &context.runtime)?;
    let toml = resolved.to_toml();
    let mut config = resolved.config;
    let real = args.data.open(context)?;
    let synthetic = Manifest::open(&args.extra, None)?;
    let external = args.external.as_deref().map(|root| Manifest::open(root, None)).transpose()?;
    let report = job::locked("out", &args.out, &context.runtime, || {
        super::args::check_segmenter(&mut config, &real, args.plan.is_made(), context)?;
        let ablation = Ablation {
            real: &real,
            synthetic: &synthetic,
            external: external.as_ref(),
            config: &config,
            toml: &toml,
            real_images: args.real_images,
            ratios: each_once(&args.ratios)?,
            steps: steps(args, &config, &real)?,
            first_seed: args.seed,
            num_seeds: usize::from(args.seeds),
            limit_test: args.limit_test,
            out: &args.out,
        };
        ablation.run(&context.runtime)
    })?;
    if report.seeds.len() == 1 {
        let text = "one seed cannot show the variation between seeds: use `--seeds 3` or more before you trust a gain";
        context.runtime.warn(text);
    }
    context.output.line(report.table())?;
    context.output.line(format!("report in {}", args.out.display()))?;
    context.output.record(&json!({ "kind": "result", "out": args.out, "report": report }))?;
    Ok(if report.verdict == Conclusion::Gain { CommandEnd::Done } else { CommandEnd::No })
}

/// The values of a list.
///
/// # Errors
/// [`Error::Config`] if a value occurs twice.
fn each_once(values: &[Ratio]) -> Result<Vec<Ratio>> {
    if values.iter().enumerate().any(|(i, value)| values[..i].contains(value)) {
        return Err(Error::config("--ratios", "a value occurs twice", "give each value once"));
    }
    Ok(values.to_vec())
}

/// Number of steps that the settings take on the real images.
fn steps(args: &Args, config: &RunConfig, real: &Manifest) -> Result<u64> {
    if let Some(steps) = args.steps {
        if steps == 0 {
            return Err(Error::config("--steps", "must be 1 or more, got 0", "use for example 500"));
        }
        return Ok(steps);
    }
    let rows = ablation::training_rows(real, args.real_images);
    let batch = config.train.micro_batch * config.train.accumulation;
    let whole = rows.div_ceil(batch.max(1)) as u64 * config.train.epochs;
    Ok(if config.train.max_steps > 0 { whole.min(config.train.max_steps) } else { whole }.max(1))
}
