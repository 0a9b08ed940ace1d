//! `prsmed augment filter`.

use super::SegmenterArgs;
use crate::augment::export::Export;
use crate::augment::filter::Thresholds;
use crate::augment::filter::judge::{Judged, Judges};
use crate::augment::generate::SETTINGS;
use crate::augment::study;
use crate::cli::claim::Claim;
use crate::cli::data::RootArgs;
use crate::cli::report::Outcome;
use crate::cli::train::refuse_what_cannot_fit;
use crate::cli::{Context, plan};
use crate::segment::fit::Recipe;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Judge synthetic pairs with cross-fitted segmenters
///
/// Trains K segmenters on the real train rows, each without one fold of the pictures (or takes those in `--judges` from
/// before), and has every pair judged by the one that never saw its source: does it segment the label, does it segment
/// something outside, are the picture's features near real ones, are they too near to one. Then manifest, annotations and
/// contact sheet of the pairs are rewritten; rejected pairs move to rejected/. Running it again judges again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment filter --data-root data --synthetic pairs --preset gpu-24gb
  prsmed augment filter --data-root data --synthetic pairs --judges judges --keep 300
  prsmed augment filter --data-root data --synthetic pairs --threshold dice_min=0.7")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Data root of synthetic pairs
    #[arg(long, value_name = "DIR")]
    synthetic: PathBuf,
    /// Folder of the judges [default: judges/ in the folder of pairs]
    #[arg(long, value_name = "DIR")]
    judges: Option<PathBuf>,
    /// Judges, and parts that the real pictures are divided into
    #[arg(long, value_name = "K", default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=10))]
    folds: u8,
    #[command(flatten)]
    settings: SegmenterArgs,
    /// Optimizer steps of each judge [default: those of the settings]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Use N real training pictures, spread evenly over each class, as `augment study --limit-real N` does; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_real: usize,
    /// Keep at most N pairs: the ones that are too easy go first; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep: usize,
    /// One limit, for example `dice_min=0.7`, over those that the pairs were made with; may be repeated
    #[arg(long = "threshold", value_name = "KEY=VALUE")]
    thresholds: Vec<String>,
    /// Do not plan the memory of the trainings, and start even what would not fit
    #[arg(long)]
    no_plan: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = args.settings.resolve(args.steps.into_iter().flat_map(steps))?;
    let text = resolved.to_toml();
    let config = resolved.config;
    let real = study::limited_to(args.data.open()?, args.limit_real);
    let thresholds = thresholds(&args.synthetic, &args.thresholds)?;
    refuse_without_pairs(&args.synthetic)?;
    let _claim = Claim::on("--synthetic", &args.synthetic, context.progress.as_ref())?;
    let mut export = Export::open(&args.synthetic)?;
    let folder = args.judges.clone().unwrap_or_else(|| args.synthetic.join("judges"));
    let claim_on_judges = (!is_same(&folder, &args.synthetic))
        .then(|| Claim::on("--judges", &folder, context.progress.as_ref()))
        .transpose()?;
    if !args.no_plan {
        refuse_what_cannot_fit(&config.with_cache_for(&real), &plan::training_machine(context), context)?;
    }
    let locate = |spec: &str| context.locate(spec);
    let around = context.surroundings(&locate);
    let recipe = Recipe { model: config.model, lora: config.lora, train: config.train, data: config.data, text };
    let judges = Judges::train(&real, &recipe, usize::from(args.folds), &folder, around)?;
    // others may use them from here on
    drop(claim_on_judges);
    let judged = judges.judge(&real, &mut export, &thresholds, args.keep, around)?;
    context.output.line(told(&judged, &args.synthetic))?;
    context
        .output
        .record(&json!({ "kind": "result", "out": args.synthetic, "judged": judged, "thresholds": thresholds }))?;
    Ok(Outcome::Done)
}

/// Whether two paths lead to one folder.
fn is_same(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

/// Settings of exactly so many steps: an epoch has one or more.
fn steps(count: u64) -> [(String, String); 2] {
    ["max_steps", "epochs"].map(|key| (format!("train.{key}={count}"), "--steps".to_owned()))
}

fn refuse_without_pairs(folder: &Path) -> Result<()> {
    if !folder.join(crate::augment::export::JOURNAL).exists() {
        let hint = "give the folder that `prsmed augment generate --out` wrote";
        return Err(Error::data(folder, "holds no pairs", hint));
    }
    Ok(())
}

/// The limits that the pairs were made with, and those of flags over them.
fn thresholds(folder: &Path, sets: &[String]) -> Result<Thresholds> {
    let made_with = std::fs::read(folder.join(SETTINGS)).ok();
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
                format!("write for example `dice_min=0.7`; there are {}", known.join(", ")),
            )
        };
        let (key, value) = set.split_once('=').ok_or_else(|| wrong(format!("`{set}` is not `key=value`")))?;
        let number: f64 = value.parse().map_err(|_| wrong(format!("`{value}` is no number")))?;
        if !values.contains_key(key) {
            return Err(wrong(format!("there is no limit `{key}`")));
        }
        values.insert(key.to_owned(), json!(number));
    }
    let found: Thresholds = serde_json::from_value(Value::Object(values))
        .map_err(|error| Error::config("--threshold", error.to_string(), "give numbers"))?;
    found.check()?;
    Ok(found)
}

/// What the judges said, for people.
pub(super) fn told(judged: &Judged, folder: &Path) -> String {
    let mut lines = vec![format!("{} of {} pairs accepted, {} rows", judged.accepted, judged.pairs, judged.rows)];
    if !judged.rejected.is_empty() {
        let parts: Vec<String> = judged.rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        lines.push(format!("rejected by: {}", parts.join(", ")));
    }
    if judged.unknown > 0 {
        lines.push(format!("{} pairs have a source that no judge was made for, and stay as they were", judged.unknown));
    }
    if let Some(dice) = judged.real_dice {
        lines.push(format!("the judges' own median Dice on real pictures they have not seen: {dice:.3}"));
        if dice < 0.6 {
            lines.push("that is low: train longer (`--steps`) before believing what they reject".to_owned());
        }
    }
    lines.push(format!("look at {}/contact_sheet.png", folder.display()));
    lines.join("\n")
}
