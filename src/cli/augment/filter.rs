//! `prsmed augment filter`.

use super::args::SegmenterArgs;
use crate::augment::ablation;
use crate::augment::export::Export;
use crate::augment::filter::Thresholds;
use crate::augment::filter::model::{FilterModels, FilterReport};
use crate::augment::generate::SETTINGS;
use crate::cli::args::RootArgs;
use crate::cli::context::Context;
use crate::cli::report::Outcome;
use crate::config::{AugmentRun, Settings as _};
use crate::job::lock::RunLock;
use crate::job::training::check_memory;
use crate::job::training_settings::refuse_gpu_preset_without_gpu;
use crate::job::{machine, weight_files};
use crate::segment::needs;
use crate::{Error, Result, files};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Filter synthetic pairs with cross-fitted segmenters
///
/// Trains K filter models (segmenters) on the real `train` rows, each without one fold of the images, or uses those in
/// `--filter-models`. Every pair is scored by the model that was not trained on its source. The model must find the
/// label and nothing outside of it; the features of the image must be close to real images, but not a copy of one.
/// Then manifest, annotations and contact sheet of the pairs are rewritten, and rejected pairs move to rejected/.
/// Repeat the command to filter with other limits.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment filter --data-root data --synthetic pairs --preset gpu-24gb
  prsmed augment filter --data-root data --synthetic pairs --filter-models models --keep 300
  prsmed augment filter --data-root data --synthetic pairs --threshold dice_min=0.7")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic pairs
    #[arg(long, value_name = "DIR")]
    synthetic: PathBuf,
    /// Folder of the filter models [default: filter_models/ in the folder of pairs]
    #[arg(long, alias = "judges", value_name = "DIR")]
    filter_models: Option<PathBuf>,
    /// Number of filter models, and of folds of the real images
    #[arg(long, value_name = "K", default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=10))]
    folds: u8,
    #[command(flatten)]
    settings: SegmenterArgs,
    /// Optimizer steps of each filter model [default: those of the settings]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Use N real training images, the same as `augment ablation --real-images N`; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_real: usize,
    /// Accept at most N pairs; pairs that are too easy are dropped first; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep: usize,
    /// Change one limit of the filter, for example `dice_min=0.7`; may be repeated
    #[arg(long = "threshold", value_name = "KEY=VALUE")]
    thresholds: Vec<String>,
    /// Skip the memory plan and start even if the trainings may not fit
    #[arg(long)]
    no_plan: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = args.settings.resolve(args.steps.into_iter().flat_map(steps))?;
    refuse_gpu_preset_without_gpu(&resolved, &context.runtime)?;
    let toml = resolved.to_toml();
    let config = resolved.config;
    let real = ablation::limited_to(args.data.open(context)?, args.limit_real);
    let thresholds = thresholds(&args.synthetic, &args.thresholds)?;
    refuse_without_pairs(&args.synthetic)?;
    let _claim = RunLock::on("--synthetic", &args.synthetic, context.progress.as_ref())?;
    let mut export = Export::open(&args.synthetic)?;
    let folder = args.filter_models.clone().unwrap_or_else(|| default_folder(&args.synthetic));
    if args.filter_models.is_none() {
        // pairs from others may contain a link of this name
        files::create_below(&args.synthetic, &folder).map_err(Error::io(&folder, "create"))?;
    }
    let models_lock = (!is_same(&folder, &args.synthetic))
        .then(|| RunLock::on("--filter-models", &folder, context.progress.as_ref()))
        .transpose()?;
    weight_files::check_architectures(&config.model, &context.runtime)?;
    weight_files::check(needs::of_model(&config.model), &context.runtime)?;
    if !args.no_plan {
        check_memory(
            &config.with_cache_for(&real),
            &machine::here(&context.runtime)?,
            &context.memory,
            &context.runtime,
        )?;
    }
    let filter_models =
        FilterModels::train(&real, (&config, &toml), usize::from(args.folds), &folder, &context.runtime)?;
    // the models are not changed any more
    drop(models_lock);
    let report = filter_models.filter(&real, &mut export, &thresholds, args.keep, &context.runtime)?;
    context.output.line(describe_report(&report, &args.synthetic))?;
    context
        .output
        .record(&json!({ "kind": "result", "out": args.synthetic, "filtered": report, "thresholds": thresholds }))?;
    Ok(Outcome::Done)
}

/// `filter_models/`, or `judges/` if an earlier version made that folder.
fn default_folder(pairs: &Path) -> PathBuf {
    let old = pairs.join("judges");
    if old.exists() { old } else { pairs.join("filter_models") }
}

/// Whether two paths lead to the same folder.
fn is_same(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
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

/// The limits that the pairs were generated with, changed by the flags.
fn thresholds(folder: &Path, sets: &[String]) -> Result<Thresholds> {
    let made_with = files::read(&folder.join(SETTINGS), files::MAX_TEXT).ok();
    let made_with = made_with.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    let mut values = match made_with.map(|settings| settings["filter"].clone()) {
        Some(Value::Object(values)) => values,
        _ => match json!(Thresholds::default()) {
            Value::Object(values) => values,
            _ => serde_json::Map::new(),
        },
    };
    for set in sets {
        let wrong = |reason: String| {
            let known: Vec<String> = values.keys().map(|key| format!("`{key}`")).collect();
            Error::config(
                "--threshold",
                reason,
                format!("write for example `dice_min=0.7`; the limits are {}", known.join(", ")),
            )
        };
        let (key, value) = set.split_once('=').ok_or_else(|| wrong(format!("`{set}` is not `key=value`")))?;
        let number: f64 = value.parse().map_err(|_| wrong(format!("`{value}` is not a number")))?;
        if !values.contains_key(key) {
            return Err(wrong(format!("there is no limit `{key}`")));
        }
        values.insert(key.to_owned(), json!(number));
    }
    let found: Thresholds = serde_json::from_value(Value::Object(values))
        .map_err(|error| Error::config("--threshold", error.to_string(), "give numbers"))?;
    let run = AugmentRun { filter: found, ..AugmentRun::default() };
    run.check()?;
    Ok(run.filter)
}

/// The report as text.
pub(super) fn describe_report(report: &FilterReport, folder: &Path) -> String {
    let mut lines = vec![format!("{} of {} pairs accepted, {} rows", report.accepted, report.pairs, report.rows)];
    if !report.rejected.is_empty() {
        let parts: Vec<String> = report.rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        lines.push(format!("rejected by: {}", parts.join(", ")));
    }
    if report.unknown > 0 {
        lines
            .push(format!("{} pairs have a source that is in no fold; their decision does not change", report.unknown));
    }
    if let Some(dice) = report.real_dice {
        lines.push(format!("median Dice of the filter models on held-out real images: {dice:.3}"));
        if dice < 0.6 {
            lines.push("that is low: train longer (`--steps`) before you trust their decisions".to_owned());
        }
    }
    let folder = folder.display();
    lines.push(format!("look at {folder}/contact_sheet.png"));
    if report.rows > 0 {
        lines.push(format!("next: prsmed augment ablation --data-root DATA --extra {folder}"));
    }
    lines.join("\n")
}
