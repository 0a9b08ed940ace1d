//! `prsmed augment filter`.

use super::args::ablation_command;
use crate::augment::ablation;
use crate::augment::export::Export;
use crate::augment::filter::model::FilterModels;
use crate::cli::args::{PlanArgs, RootArgs, SettingsArgs};
use crate::cli::context::Context;
use crate::cli::report::{CommandEnd, CommandResult};
use crate::job::training_settings::refuse_gpu_preset_without_gpu;
use crate::job::{self, generation};
use crate::{Error, Result, files};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Filter synthetic pairs with cross-fitted segmenters
///
/// Trains K filter models (segmenters) on the real `train` rows, each without one fold of the images, or uses those in
/// `--filter-models`. Every pair is scored by the model that was not trained on its source. The model must find the
/// label and nothing outside of it; the features of the image must be close to real images, but not a copy of one.
/// Then manifest, annotations and report.html of the pairs are rewritten, and rejected pairs move to rejected/.
/// Repeat the command to filter with other limits.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings of the segmenter: tiny, full, cpu, gpu-24gb, ... [default: tiny]")))]
#[command(after_help = "Examples:
  prsmed augment filter --data-root data --extra pairs --preset gpu-24gb
  prsmed augment filter --data-root data --extra pairs --filter-models models --keep 300
  prsmed augment filter --data-root data --extra pairs --threshold dice_min=0.7")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of the synthetic pairs
    #[arg(long, alias = "synthetic", value_name = "DIR")]
    extra: PathBuf,
    /// Folder of the filter models [default: filter_models/ in the folder of pairs]
    #[arg(long, alias = "judges", value_name = "DIR")]
    filter_models: Option<PathBuf>,
    /// Number of filter models, and of folds of the real images
    #[arg(long, value_name = "K", default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=10))]
    folds: u8,
    #[command(flatten)]
    settings: SettingsArgs,
    /// Optimizer steps of each filter model [default: those of the settings]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Use N real training images, the same as `augment ablation --real-images N`; 0 = all
    #[arg(long, alias = "limit-real", value_name = "N", default_value_t = 0)]
    real_images: usize,
    /// Accept at most N pairs; pairs that are too easy are dropped first; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep: usize,
    /// Change one limit of the filter, for example `dice_min=0.7`; may be repeated
    #[arg(long = "threshold", value_name = "KEY=VALUE")]
    thresholds: Vec<String>,
    #[command(flatten)]
    plan: PlanArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    let resolved = args.settings.sources("tiny", args.steps.into_iter().flat_map(steps)).resolve()?;
    refuse_gpu_preset_without_gpu(&resolved, &context.runtime)?;
    let toml = resolved.to_toml();
    let mut config = resolved.config;
    let real = ablation::limited_to(args.data.open(context)?, args.real_images);
    let thresholds = generation::thresholds(&args.extra, &args.thresholds)?;
    refuse_without_pairs(&args.extra)?;
    let runtime = &context.runtime;
    let filter = || -> Result<_> {
        let mut export = Export::open(&args.extra)?;
        let folder = args.filter_models.clone().unwrap_or_else(|| args.extra.join("filter_models"));
        if args.filter_models.is_none() {
            // pairs from others may contain a link of this name
            files::create_below(&args.extra, &folder).map_err(Error::io(&folder, "create"))?;
        }
        let mut train = || -> Result<_> {
            super::args::check_segmenter(&mut config, &real, args.plan.is_made(), context)?;
            FilterModels::train(&real, (&config, &toml), usize::from(args.folds), &folder, runtime)
        };
        // the models are not changed after their training
        let models = if is_same(&folder, &args.extra) {
            train()?
        } else {
            job::locked("filter_models", &folder, runtime, train)?
        };
        let report = models.filter(&real, &mut export, &thresholds, args.keep, runtime)?;
        generation::write_report(&export, &thresholds, runtime);
        Ok(report)
    };
    let report = job::locked("extra", &args.extra, runtime, filter)?;
    let ablation = ablation_command(&args.data, &args.extra, args.real_images);
    context.output.line(report.text(&args.extra, &args.settings.add_to(ablation)))?;
    let record = json!({ "kind": "result", "out": args.extra, "filtered": report, "thresholds": thresholds });
    context.output.record(&record)?;
    Ok(CommandEnd::Done)
}

/// Whether two paths lead to the same folder.
fn is_same(a: &Path, b: &Path) -> bool {
    let full = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    full(a) == full(b)
}

/// Settings for exactly `count` steps: an epoch has at least one step.
fn steps(count: u64) -> [(String, String); 2] {
    ["max_steps", "epochs"].map(|key| (format!("train.{key}={count}"), "--steps".to_owned()))
}

fn refuse_without_pairs(folder: &Path) -> Result<()> {
    if !folder.join(crate::augment::export::JOURNAL).exists() {
        let hint = "give the folder that `prsmed augment generate --out` wrote";
        return Err(Error::data(folder, "contains no pairs", hint));
    }
    Ok(())
}
