//! `prsmed augment finetune`.

use crate::augment::finetune::dry_run::FEATURES_BATCH;
use crate::augment::finetune::network::{CONTROLNET_FOLDER, LORA_FILE, UNET_FOLDER, WEIGHTS_FILE};
use crate::augment::finetune::samples::Extract;
use crate::augment::finetune::{FinetuneConfig, FinetunedRun, Finetuning, Method, Mode, SelectBy, SelectionReport};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::quality::{self, FeatureSource, Images};
use crate::cli::args::{ResumeArgs, RootArgs, sets_of};
use crate::cli::augment::args::{finetune_changes, finetuned_pipeline_config};
use crate::cli::augment::selection;
use crate::cli::context::Context;
use crate::cli::memory::ProfileArgs;
use crate::cli::mlflow::{MlflowArgs, recorded};
use crate::cli::plan::{accept, training_machine};
use crate::cli::predict::open_run;
use crate::cli::preset::HEADROOM_FRAC;
use crate::cli::ranks::{GpuArgs, check_data, main_only};
use crate::cli::report::Outcome;
use crate::cli::run_lock::RunLock;
use crate::config::{FinetuneRun, Resolved, Settings as _, Sources};
use crate::data::manifest::Manifest;
use crate::data::split;
use crate::event::Event;
use crate::hub::{Files, Need};
use crate::mlflow::Connection;
use crate::models::inception;
use crate::plan::search::has_headroom;
use crate::tensor::{self, Device, Tensor, memory};
use crate::trainer::Ranks;
use crate::units::Bytes;
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Part of the training images that validate if there are no `val` rows.
const VAL_FRAC: f64 = 0.1;

/// Fine-tune the generator on the train rows of a data root
///
/// Trains a LoRA (the default) or all weights of the UNet of Stable Diffusion 1.x, 2.x or SDXL, or a ControlNet that reads
/// lesion masks (`--mode mask_to_image`). Images and captions are encoded once into OUT/cache. Memory is planned first; if
/// the settings do not fit the GPU, others are searched. OUT/best has the weights with the best score (the loss on `val`
/// rows, or the distance of samples to real images), OUT/last the newest, in files that `prsmed augment generate` and
/// diffusers read. With `--select-by segmenter`, the best checkpoints make pairs at the end, and the one whose pairs help a
/// small U-Net most becomes OUT/best; OUT/selection has the scores. Ctrl-C saves and stops; `--resume` continues.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment finetune --data-root data --out runs/lora
  prsmed augment finetune --data-root data --out runs/lora --preset lora-sd15 --set finetune.rank=32
  prsmed augment finetune --data-root data --out runs/lora --select-by segmenter
  prsmed augment finetune --data-root data --out runs/lora --gpus 4
  prsmed augment finetune --data-root data --out runs/lora --resume
  prsmed augment finetune --data-root phantoms --out runs/try --preset tiny
  prsmed augment generate --data-root data --out pairs --lora runs/lora/best/pytorch_lora_weights.safetensors")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Run folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Named settings: lora-sdxl, lora-sd15, full-sdxl, full-sd15, inpaint-sd15, controlnet-sd15, or tiny (random weights,
    /// for a quick try) [default: lora-sdxl]
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file whose values override the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, for example `finetune.rank=32`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// A folder in diffusers' layout, a .safetensors file, hub:owner/name[@rev], or random:tiny|sd15|sd21|sdxl
    /// [default: SDXL, from the hub]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// What the generator learns [default: images]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// What is trained, except with `--mode mask_to_image` [default: lora]
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// What chooses OUT/best in the end: the validation score, or what a small U-Net gains on `val` rows from the pairs
    /// of the best checkpoints [default: metric]
    #[arg(long, value_enum)]
    select_by: Option<SelectBy>,
    /// Same as `--set train.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Same as `--set train.precision=P`: fp32, bf16 or fp16
    #[arg(long, value_name = "P")]
    precision: Option<String>,
    #[command(flatten)]
    profile: ProfileArgs,
    #[command(flatten)]
    resume: ResumeArgs,
    #[command(flatten)]
    gpus: GpuArgs,
    /// Do not plan memory before the training
    #[arg(long)]
    no_plan: bool,
    /// Print the resolved settings as TOML and exit
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    mlflow: MlflowArgs,
}

/// Settings that the search for a GPU chooses; with a flag for one of them it does not search.
const SEARCHED: [&str; 11] = [
    "train.micro_batch",
    "train.accumulation",
    "train.checkpointing",
    "train.optimizer",
    "train.step_in_backward",
    "train.offload_optimizer",
    "train.offload_weights",
    "train.clip_norm",
    "train.precision",
    "finetune.image_size",
    "finetune.generation_batch_size",
];

/// Settings of the engine that apply to the segmenter alone.
const SEGMENTER_ONLY: [&str; 3] = ["train.checkpoint_encoder", "train.checkpoint_decoder", "train.graph"];

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    args.gpus.run(args.print_config, context, |ranks| finetune(args, ranks, context))
}

fn finetune(args: &Args, ranks: Ranks, context: &Context) -> anyhow::Result<Outcome> {
    let mut resolved = resolve(args, context)?;
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let profile = args.profile.settings(&args.out)?.filter(|_| ranks.is_main());
    let mlflow = if ranks.is_main() { args.mlflow.connect(context)? } else { None };
    // a folder without images is refused before anything is downloaded
    drop(resolved.config.finetune.open_prior_images()?);
    let lock = || RunLock::on("--out", &args.out, context.progress.as_ref());
    // an existing run is refused before the data is read; unusable data leaves no folder behind
    let early = (ranks.is_main() && args.out.is_dir()).then(lock).transpose()?;
    if ranks.is_main() {
        args.resume.check(&args.out)?;
    }
    let mut manifest = args.data.open(context)?;
    check_data(ranks, &manifest)?;
    keep_for_validation(&mut manifest, &resolved.config, context)?;
    let choice = main_only(ranks, || selection::prepare(&resolved.config, &manifest, &args.out, context))?.flatten();
    let _lock = ranks.agree_on(main_only(ranks, || {
        let lock = early.map_or_else(lock, Ok)?;
        args.resume.adopt(&args.out)?;
        Ok(lock)
    }))?;
    let pipeline_config = finetuned_pipeline_config(&resolved.config, context)?;
    if !args.no_plan {
        let searches =
            args.config.is_none() && !args.resume.resumes() && !SEARCHED.iter().any(|key| resolved.is_from_a_flag(key));
        plan_memory(&mut resolved, &pipeline_config, searches, ranks, context)?;
    }
    resolved.config = resolved.config.with_samples_for(&training_machine(context)?);
    let (toml, mut run) = (resolved.to_toml(), resolved.config);
    let choice = choice.map(|choice| choice.with_settings(&run));
    if let Some(note) = run.train.divide_among(ranks.size())? {
        context.progress.on(&Event::Note(note));
    }
    if let Some(choice) = choice.as_ref().filter(|_| !args.no_plan) {
        selection::plan_pairs(choice, &pipeline_config, context)?;
    }
    if let Some(profile) = &profile {
        profile.check()?;
    }
    if run.finetune.is_random() {
        let text = format!("`{}` has random weights: the result is only for trying the tool", run.finetune.model);
        context.progress.on(&Event::Note(text));
    }
    let finetuning = Finetuning {
        run: &run,
        toml,
        pipeline_config: &pipeline_config,
        manifest: &manifest,
        folder: &args.out,
        resumes: args.resume.resumes(),
        features: features(&run, context)?,
        profile: profile.as_ref(),
        ranks,
        runtime: &context.runtime,
    };
    let FinetunedRun { outcome, task } = train(finetuning, mlflow, context)?;
    if !ranks.is_main() {
        return Ok(Outcome::Done);
    }
    let peak = memory::overall_peak(tensor::default_device());
    // the choice has all memory to itself
    drop(task);
    let chosen = choice.map(|choice| selection::run(&choice, &pipeline_config)).transpose()?;
    print_result((&outcome, peak, chosen.as_ref()), &run.finetune, args, context)
}

/// Trains, and records it if there is a connection to an MLflow server.
fn train(finetuning: Finetuning, mlflow: Option<Connection>, context: &Context) -> Result<FinetunedRun> {
    // settings that do not fit the run are refused before the server creates a record
    finetuning.checkpoint()?;
    recorded(mlflow, (finetuning.folder, finetuning.resumes), finetuning.run, context, |progress| {
        let runtime = context.runtime.clone().with_observer(progress);
        Finetuning { runtime: &runtime, ..finetuning }.run()
    })
}

fn resolve(args: &Args, context: &Context) -> Result<Resolved<FinetuneRun>> {
    let flags = [
        ("finetune.model", "--model", args.model.clone()),
        ("finetune.mode", "--mode", args.mode.map(|mode| mode.name().to_owned())),
        ("finetune.method", "--method", args.method.map(|method| method.name().to_owned())),
        ("finetune.select_by", "--select-by", args.select_by.map(|choice| choice.name().to_owned())),
        ("train.seed", "--seed", args.seed.map(|seed| seed.to_string())),
        ("train.precision", "--precision", args.precision.clone()),
    ];
    let flags = flags.into_iter().filter_map(|(key, flag, value)| Some((format!("{key}={}", value?), flag.to_owned())));
    let sets = sets_of(&args.sets, flags);
    let default_preset = FinetuneRun::DEFAULT_PRESET.into();
    let given =
        Sources { preset: args.preset.clone(), default_preset, file: args.config.clone(), sets, ..Sources::default() };
    let resolved = args.resume.sources::<FinetuneRun>(&args.out, given, context.progress.as_ref())?.resolve_as()?;
    match SEGMENTER_ONLY.iter().find(|key| resolved.is_from_a_flag(key)) {
        Some(key) => Err(Error::config(*key, "has no effect on a generator", "leave it out")),
        None => Ok(resolved),
    }
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

/// Prints the memory plan, and refuses settings that cannot fit. With `searches`, settings that do not fit are replaced
/// by the fastest that fit this machine. All ranks take the settings that the first one found.
fn plan_memory(
    resolved: &mut Resolved<FinetuneRun>,
    pipeline_config: &PipelineConfig,
    searches: bool,
    ranks: Ranks,
    context: &Context,
) -> Result<()> {
    let machine = training_machine(context)?.with_ranks(ranks.rank(), ranks.size());
    let plan = |run: &FinetuneRun| match run.divided_among(ranks.size())?.plan(pipeline_config, &machine) {
        // the CPU's operators are tried one by one to learn what they need
        Err(error @ Error::OutOfMemory { .. }) => {
            context.progress.on(&Event::Warning(format!("no memory plan: {error}")));
            Ok(None)
        }
        plan => plan.map(Some),
    };
    let planned = ranks.agree_on(plan(&resolved.config))?;
    let fits = planned.as_ref().is_none_or(|plan| has_headroom(plan, HEADROOM_FRAC));
    let mut found = None;
    if searches && ranks.any(!fits)? {
        let wanted = resolved.config.clone();
        let search = || Ok(wanted.fitted(pipeline_config, &machine, HEADROOM_FRAC, true)?.map(|(run, _)| run));
        let fitted = ranks.gather_if_all(main_only(ranks, search).map(Option::flatten))?.swap_remove(0);
        if let Some(fitted) = fitted {
            for note in finetune_changes(&wanted, &fitted) {
                context.progress.on(&Event::Note(note));
            }
            if let Some(plan) = &planned {
                for key in SEARCHED {
                    resolved.origins.insert(key.to_owned(), format!("chosen for {}", plan.budget.device));
                }
            }
            resolved.config = fitted;
            found = plan(&resolved.config)?;
        }
    }
    let Some(plan) = found.or(planned) else { return Ok(()) };
    context.progress.on(&Event::Note(format!("memory plan\n{}", plan.table())));
    let run = resolved.config.divided_among(ranks.size())?;
    let (pipeline_config, known) = (pipeline_config.clone(), plan.clone());
    accept(plan, Box::new(move || run.remedies(&pipeline_config, &machine, &known)), context)
}

/// What computes the features of samples and real images, if samples are measured.
fn features(run: &FinetuneRun, context: &Context) -> Result<Option<(FeatureSource, Extract)>> {
    if run.finetune.num_samples_for_metrics == 0 {
        return Ok(None);
    }
    let (observer, interrupt) = (Arc::clone(&context.progress), Arc::clone(&context.interrupt));
    let batch = usize::try_from(FEATURES_BATCH).expect("a small batch");
    let images = move |files: &[PathBuf], compute: &dyn Fn(&Images) -> Result<Tensor>| {
        compute(&Images { files, area: None, batch, observer: observer.as_ref(), interrupt: &interrupt })
    };
    let spec = run.finetune.features.as_str();
    if Path::new(spec).join("config.toml").exists() {
        let assembly = open_run(Path::new(spec), context)?;
        let extract: Extract =
            Rc::new(move |files| images(files, &|images| quality::encoder_features(&assembly, images)));
        return Ok(Some((FeatureSource::Encoder("segmenter".into()), extract)));
    }
    if !spec.starts_with("hub:") && !Path::new(spec).exists() {
        let hint = "give weights of InceptionV3, `hub:owner/name`, or the run folder of a segmenter";
        return Err(Error::weights(spec, "there is no such file or folder", hint));
    }
    context.check_files(vec![Need::new("finetune.features", spec, Files::Matching(&[inception::WEIGHTS_FILE]))])?;
    let path = context.locate(spec)?;
    // a file that cannot be read is refused before the training
    drop(quality::open_inception(&path, Device::Cpu)?);
    let extract: Extract = Rc::new(move |files| {
        let network = quality::open_inception(&path, tensor::default_device())?;
        images(files, &|images| quality::inception_features(&network, images))
    });
    Ok(Some((FeatureSource::Inception, extract)))
}

/// The best validation in words. Scores are minus the loss or the distance, which says little.
fn best_line(score: Option<f64>, is_of_samples: bool) -> String {
    let what = if is_of_samples { "mean KID of the samples" } else { "mean validation loss" };
    match score {
        Some(score) => format!("best/: {what} {:.5} (lower is better)", -score),
        None => "not validated: the run has no `best/`".to_owned(),
    }
}

/// The command that makes pairs with the weights; `None` where they first have to be put into the model's folder.
fn next_command(config: &FinetuneConfig, weights: &Path, data: &str) -> Option<String> {
    let with = match (config.mode, config.method) {
        (Mode::MaskToImage, _) if config.unlock_decoder => return None,
        (Mode::MaskToImage, _) => {
            let folder = weights.parent().unwrap_or(weights).display();
            format!("--mode mask_to_image --set augment.controlnet={folder}")
        }
        (_, Method::Lora) => format!("--lora {}", weights.display()),
        (_, Method::Full) => return None,
    };
    let (model, side) = (&config.model, config.image_size);
    Some(format!(
        "prsmed augment generate --data-root {data} --out pairs --model {model} {with} --set augment.image_size={side}"
    ))
}

fn print_result(
    (outcome, peak, chosen): (&crate::trainer::Outcome, Bytes, Option<&SelectionReport>),
    config: &FinetuneConfig,
    args: &Args,
    context: &Context,
) -> anyhow::Result<Outcome> {
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    let best = if outcome.best_score.is_some() { "best" } else { "last" };
    let best_folder = args.out.join(best);
    let best = &best_folder;
    let weights = match (config.mode, config.method) {
        (Mode::MaskToImage, _) => best.join(CONTROLNET_FOLDER).join(WEIGHTS_FILE),
        (_, Method::Lora) => best.join(LORA_FILE),
        (_, Method::Full) => best.join(UNET_FOLDER).join(WEIGHTS_FILE),
    };
    let decoder = if config.unlock_decoder {
        format!(
            "\ndecoder: {}, which belongs in the place of the model's `unet`",
            best_folder.join(UNET_FOLDER).display()
        )
    } else {
        String::new()
    };
    context.output.line(format!(
        "trained {} steps at {images_per_s:.2} images/s, peak of tensors {peak}\n{}\nweights: {}{decoder}{}",
        outcome.steps,
        best_line(outcome.best_score, config.num_samples_for_metrics > 0),
        weights.display(),
        next_command(config, &weights, &args.data.shown()).map_or_else(String::new, |next| format!("\nnext: {next}"))
    ))?;
    if let Some(report) = chosen {
        context.output.line(report.table())?;
    }
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
        "selection": chosen,
    }))?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_distances_are_named_and_positive() {
        assert_eq!(best_line(Some(-1.125_77), false), "best/: mean validation loss 1.12577 (lower is better)");
        assert_eq!(best_line(Some(-0.02), true), "best/: mean KID of the samples 0.02000 (lower is better)");
        assert!(best_line(None, true).contains("not validated"));
    }

    #[test]
    fn the_next_command_has_the_flags_of_what_was_trained() {
        let next = |config: &FinetuneConfig| next_command(config, Path::new("runs/a/best/file"), "data");
        let config = FinetuneConfig { model: "sd15".into(), image_size: 512, ..FinetuneConfig::default() };
        let start = "prsmed augment generate --data-root data --out pairs --model sd15";
        let lora = next(&config).expect("a command");
        assert_eq!(lora, format!("{start} --lora runs/a/best/file --set augment.image_size=512"));
        let control = FinetuneConfig { mode: Mode::MaskToImage, ..config.clone() };
        let controlnet = next(&control).expect("a command");
        let expected = "--mode mask_to_image --set augment.controlnet=runs/a/best --set augment.image_size=512";
        assert_eq!(controlnet, format!("{start} {expected}"));
        assert_eq!(next(&FinetuneConfig { unlock_decoder: true, ..control }), None);
        assert_eq!(next(&FinetuneConfig { method: Method::Full, ..config }), None);
    }
}
