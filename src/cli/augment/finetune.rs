//! `prsmed augment finetune`.

use crate::augment::finetune::network::{LORA_FILE, UNET_FILE};
use crate::augment::finetune::task::SCORE;
use crate::augment::finetune::{Finetuning, Method};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::RANDOM;
use crate::cli::args::{RootArgs, sets_of};
use crate::cli::context::Context;
use crate::cli::report::Outcome;
use crate::cli::run_lock::RunLock;
use crate::config::{FinetuneRun, Resolved, Settings as _, Sources};
use crate::data::manifest::Manifest;
use crate::data::split;
use crate::event::Event;
use crate::segment::training::checkpoint_in;
use crate::tensor::{self, memory};
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Part of the training images that validate if there are no `val` rows.
const VAL_FRAC: f64 = 0.1;

/// Fine-tune the generator on the train rows of a data root
///
/// Trains a LoRA (the default) or all weights of the UNet of Stable Diffusion 1.x, 2.x or SDXL. Images and captions are
/// encoded once into OUT/cache. OUT/best has the weights with the lowest loss on `val` rows, OUT/last the newest; each
/// has a LoRA file that `prsmed augment generate --lora` and diffusers read. Ctrl-C saves and stops; `--resume`
/// continues.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment finetune --data-root data --out runs/lora
  prsmed augment finetune --data-root data --out runs/lora --preset lora-sd15 --set finetune.rank=32
  prsmed augment finetune --data-root data --out runs/lora --resume
  prsmed augment finetune --data-root phantoms --out runs/try --preset tiny
  prsmed augment generate --data-root data --out pairs --lora runs/lora/best/pytorch_lora_weights.safetensors")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Run folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Named settings: lora-sdxl, lora-sd15, full-sd15, or tiny (random weights, for a quick try) [default: lora-sdxl]
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file whose values override the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, for example `finetune.rank=32`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// A folder in diffusers' layout, hub:owner/name[@rev], or random:tiny|sd15|sd21|sdxl [default: SDXL, from the hub]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// What is trained [default: lora]
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// Same as `--set train.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Same as `--set train.precision=P`: fp32, bf16 or fp16
    #[arg(long, value_name = "P")]
    precision: Option<String>,
    /// Continue from `last/` in the run folder
    #[arg(long)]
    resume: bool,
    /// Print the resolved settings as TOML and exit
    #[arg(long)]
    print_config: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = resolve(args)?;
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let (toml, run) = (resolved.to_toml(), resolved.config);
    let lock = || RunLock::on("--out", &args.out, context.progress.as_ref());
    // an existing run is refused before the data is read; unusable data leaves no folder behind
    let early = args.out.is_dir().then(lock).transpose()?;
    if early.is_some() {
        checkpoint_in(&args.out, args.resume)?;
    }
    let mut manifest = args.data.open(context)?;
    keep_for_validation(&mut manifest, &run, context)?;
    let _lock = early.map_or_else(lock, Ok)?;
    if run.finetune.is_random() {
        let text = format!("`{}` has random weights: the result is only for trying the tool", run.finetune.model);
        context.progress.on(&Event::Note(text));
    }
    context.check_files(run.finetune.needs())?;
    let pipeline_config = pipeline_config(&run, context)?;
    let finetuning = Finetuning {
        run: &run,
        toml,
        pipeline_config: &pipeline_config,
        manifest: &manifest,
        folder: &args.out,
        resumes: args.resume,
        runtime: &context.runtime,
    };
    let finished = finetuning.run()?;
    print_result(&finished.outcome, run.finetune.method, args, context)
}

fn resolve(args: &Args) -> Result<Resolved<FinetuneRun>> {
    let saved = args.out.join("config.toml");
    let file = match &args.config {
        // a resumed run keeps its settings
        None if args.resume && args.preset.is_none() && saved.exists() => Some(saved),
        other => other.clone(),
    };
    let flags = [
        ("finetune.model", "--model", args.model.clone()),
        ("finetune.method", "--method", args.method.map(|method| method.name().to_owned())),
        ("train.seed", "--seed", args.seed.map(|seed| seed.to_string())),
        ("train.precision", "--precision", args.precision.clone()),
    ];
    let flags = flags.into_iter().filter_map(|(key, flag, value)| Some((format!("{key}={}", value?), flag.to_owned())));
    let sets = sets_of(&args.sets, flags);
    let default_preset = FinetuneRun::DEFAULT_PRESET.into();
    Sources { preset: args.preset.clone(), default_preset, file, sets }.resolve_as()
}

fn keep_for_validation(manifest: &mut Manifest, run: &FinetuneRun, context: &Context) -> Result<()> {
    if run.train.validate_every_epochs == 0 {
        return Ok(());
    }
    if let Some(cut) = split::ensure_val(manifest, VAL_FRAC, run.train.seed)? {
        let text =
            format!("no `val` rows: {} of {} training images are used for validation", cut.val_images, cut.images);
        context.progress.on(&Event::Note(text));
    }
    Ok(())
}

fn pipeline_config(run: &FinetuneRun, context: &Context) -> Result<PipelineConfig> {
    let config = &run.finetune;
    let pipeline_config = if let Some(size) = config.model.strip_prefix(RANDOM) {
        PipelineConfig::random(size, false)?
    } else {
        let root = context.locate(&config.model)?;
        let opened = PipelineConfig::open(&config.model, &root, None, &config.variant)?;
        opened.check_files()?;
        opened
    };
    if pipeline_config.inpaints() {
        let hint = "use the text-to-image model of the same family";
        return Err(Error::config("finetune.model", "is an inpainting model, which cannot be fine-tuned yet", hint));
    }
    Ok(pipeline_config)
}

fn print_result(
    outcome: &crate::trainer::Outcome,
    method: Method,
    args: &Args,
    context: &Context,
) -> anyhow::Result<Outcome> {
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    let peak = memory::overall_peak(tensor::default_device());
    let score = outcome.best_score.map_or_else(|| "not measured".to_owned(), |score| format!("{score:.5} ({SCORE})"));
    let best = if outcome.best_score.is_some() { "best" } else { "last" };
    let weights = args.out.join(best).join(match method {
        Method::Lora => LORA_FILE,
        Method::Full => UNET_FILE,
    });
    context.output.line(format!(
        "trained {} steps at {images_per_s:.2} images/s, peak of tensors {peak}; best score {score}\nweights: {}",
        outcome.steps,
        weights.display()
    ))?;
    context.output.record(&json!({
        "kind": "result",
        "run": args.out,
        "weights": weights,
        "steps": outcome.steps,
        "steps_now": outcome.steps_now,
        "best_score": outcome.best_score,
        "stopped_early": outcome.stopped_early,
        "skipped_steps": outcome.skipped_steps,
        "images_per_s": images_per_s,
        "memory": { "measured": peak },
    }))?;
    Ok(Outcome::Done)
}
