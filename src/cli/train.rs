//! `prsmed train`.

use super::data::RootArgs;
use super::memory::ProfileArgs;
use super::report::Outcome;
use super::{Context, make_folder};
use crate::config::{Resolved, RunConfig, Sources};
use crate::data::manifest::Manifest;
use crate::data::split;
use crate::event::Event;
use crate::segment::Assembly;
use crate::segment::setup::{self, Build, RunOverrides};
use crate::segment::task::SegmentTask;
use crate::tensor::weights::{readable_folder, verify_folder, write_bytes};
use crate::tensor::{self, Device, ledger};
use crate::trainer::run::Session;
use crate::{Error, Result, trainer};
use anyhow::Context as _;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Train on a data root
///
/// Leaves a run folder with `last/` and `best/`, each complete in itself. Ctrl-C saves and stops; `--resume` goes on.
///
/// Without `--preset` and `--config` the preset `full` is used where there is a CUDA card, else `tiny`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed train --data-root data --preset tiny --out runs/a
  prsmed train --data-root data --out runs/a --resume
  prsmed train --data-root data --out runs/a --profile-memory every=100
  prsmed train --data-root data --preset full --set model.image_encoder=tinysam_42.3.pth")]
pub(super) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Named settings: tiny, full
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file over the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, for example `train.micro_batch=4`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Run folder [default: runs/train]
    #[arg(long, value_name = "DIR", default_value = "runs/train", hide_default_value = true)]
    out: PathBuf,
    /// Continue from `last/` in the run folder
    #[arg(long)]
    resume: bool,
    /// Same as `--set train.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Same as `--set train.precision=P`: fp32, bf16 or fp16
    #[arg(long, value_name = "P")]
    precision: Option<String>,
    /// Print the resolved settings as TOML and stop
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    profile: ProfileArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = resolve(args)?;
    let profile = args.profile.settings(&args.out)?;
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let resume_from = checkpoint_to_resume(args, context)?;
    let manifest = read_data(args, &resolved.config, context)?;
    make_folder("--out", &args.out)?;
    if let Some(profile) = &profile {
        profile.check()?;
    }
    let toml = resolved.to_toml();
    let config = resolved.config;
    let assembly = build(&config, &manifest, resume_from.as_deref(), context).context("cannot set up the model")?;
    for warning in &assembly.warnings {
        context.progress.on(&Event::Warning(warning.clone()));
    }
    let task =
        SegmentTask::new(assembly, &Arc::new(manifest), config.train.clone(), config.data.clone(), toml.clone())?;
    if resume_from.is_none() {
        task.calibrate()?;
    }
    write_bytes(&args.out.join("config.toml"), toml.as_bytes())?;
    let session = Session {
        config: &config.train,
        folder: &args.out,
        resume: resume_from.is_some(),
        profile: profile.as_ref(),
        observer: context.progress.as_ref(),
        interrupt: &context.interrupt,
    };
    let outcome = trainer::run(&task, &session)?;
    let usage = ledger::usage();
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    context.output.line(format!(
        "trained {} steps at {images_per_s:.2} images/s, peak of tensors {}; best score {}; {}",
        outcome.steps,
        usage.allocated_peak,
        outcome.best_score.map_or_else(|| "not measured".to_owned(), |score| format!("{score:.4}")),
        args.out.display()
    ))?;
    context.output.record(&json!({
        "kind": "result",
        "run": args.out,
        "steps": outcome.steps,
        "steps_now": outcome.steps_now,
        "best_score": outcome.best_score,
        "stopped_early": outcome.stopped_early,
        "images_per_s": images_per_s,
        "train_seconds": outcome.train_seconds,
        "memory": { "measured": usage, "profile": profile.map(|profile| profile.out) },
    }))?;
    Ok(Outcome::Done)
}

fn resolve(args: &Args) -> Result<Resolved> {
    let saved = args.out.join("config.toml");
    // a resumed run keeps its settings unless told otherwise
    let file = match &args.config {
        None if args.resume && args.preset.is_none() && saved.exists() => Some(saved),
        other => other.clone(),
    };
    let mut sets: Vec<(String, String)> = args.sets.iter().map(|s| (s.clone(), "--set".to_owned())).collect();
    let flags = [("seed", args.seed.map(|s| s.to_string())), ("precision", args.precision.clone())];
    for (name, value) in flags {
        if let Some(value) = value {
            sets.push((format!("train.{name}={value}"), format!("--{name}")));
        }
    }
    let default_preset = if tensor::default_device() == Device::Cpu { "tiny" } else { "full" };
    Sources { preset: args.preset.clone(), default_preset: default_preset.into(), file, sets }.resolve()
}

/// The checkpoint to resume from. A run that is there already is continued on request only.
fn checkpoint_to_resume(args: &Args, context: &Context) -> Result<Option<PathBuf>> {
    let out = &args.out;
    let last = out.join("last");
    let checkpoint = readable_folder(&last).ok();
    if args.resume {
        if checkpoint.is_none() {
            let note = format!("{} holds no checkpoint yet: starting from the beginning", out.display());
            context.progress.on(&Event::Note(note));
        }
        return Ok(checkpoint);
    }
    if checkpoint.is_some() {
        let hint = "add `--resume` to continue it, or choose another `--out`";
        return Err(Error::config("--out", format!("`{}` already holds a run", out.display()), hint));
    }
    Ok(None)
}

/// Only `last/` is resumed from.
fn suggest_best(error: Error) -> Error {
    match error {
        Error::Weights { path, reason, .. } => {
            let hint = "put a copy of the run's `best/` in its place and resume from there, or copy it again";
            Error::weights(path, reason, hint)
        }
        other => other,
    }
}

fn read_data(args: &Args, config: &RunConfig, context: &Context) -> Result<Manifest> {
    let mut manifest = args.data.open()?;
    if config.train.validate_every_epochs > 0
        && config.data.val_frac > 0.0
        && let Some(cut) = split::ensure_val(&mut manifest, config.data.val_frac, config.train.seed)?
    {
        context.progress.on(&Event::Note(format!(
            "no `val` rows: {} of {} training pictures ({} rows) are kept for validation",
            cut.val_pictures, cut.pictures, cut.val_rows
        )));
    }
    Ok(manifest)
}

fn build(config: &RunConfig, manifest: &Manifest, checkpoint: Option<&Path>, context: &Context) -> Result<Assembly> {
    let locate = |spec: &str| context.locate(spec);
    let build = Build {
        device: tensor::default_device(),
        kind: config.train.precision.kind(),
        seed: config.train.seed,
        locate: &locate,
        allow_partial: false,
    };
    if let Some(folder) = checkpoint {
        verify_folder(folder).map_err(suggest_best)?;
        let assembly = setup::open(folder, &RunOverrides::default(), build)?;
        if assembly.description.modalities != manifest.modalities {
            let reason = format!(
                "its classes are {:?}, the data has {:?}",
                assembly.description.modalities, manifest.modalities
            );
            return Err(Error::weights(folder, reason, "resume with the data the run was started on"));
        }
        return Ok(assembly);
    }
    let texts: Vec<&str> = manifest.rows.iter().flat_map(|row| [row.question.as_str(), row.answer.as_str()]).collect();
    setup::create(&config.model, config.lora, &manifest.modalities, &texts, build)
}
