//! `prsmed augment finetune`.

use crate::augment::finetune::network::{CONTROLNET_FOLDER, LORA_FILE, UNET_FOLDER, WEIGHTS_FILE};
use crate::augment::finetune::{FinetuneConfig, FinetuneMode, Method};
use crate::augment::settings::word;
use crate::cli::args::{PlanArgs, ResumeArgs, RootArgs, SettingsArgs, assignments};
use crate::cli::context::Context;
use crate::cli::memory::ProfileArgs;
use crate::cli::next;
use crate::cli::ranks::GpuArgs;
use crate::cli::report::{CommandEnd, CommandResult};
use crate::cli::train::steps_text;
use crate::config::{FinetuneRun, Resolved, Settings as _};
use crate::job::finetuning::{Finetuned, GeneratorFinetuning};
use crate::job::{self, How};
use crate::shell::ShellCommand;
use crate::trainer::Ranks;
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Fine-tune the generator on the train rows of a data root
///
/// Trains a LoRA (the default) or all weights of the UNet of Stable Diffusion 1.x, 2.x or SDXL, or a ControlNet that reads
/// lesion masks (`--mode mask_to_image`). Images and captions are encoded once into OUT/cache. Memory is planned first; if
/// the settings do not fit the GPU, others are searched. OUT/best has the weights with the best score (the loss on `val`
/// rows, or the distance of samples to real images), OUT/last the newest, in files that `prsmed augment generate` and
/// diffusers read. Ctrl-C saves and stops; `--resume` continues.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings: lora-sdxl, lora-sd15, full-sdxl, full-sd15, inpaint-sd15, \
    controlnet-sd15, or tiny (random weights, for a quick try) [default: lora-sdxl]")))]
#[command(mut_arg("sets", |arg| arg.help("One setting, for example `finetune.rank=32`; may be repeated")))]
#[command(after_help = "Examples:
  prsmed augment finetune --data-root data --out runs/lora
  prsmed augment finetune --data-root data --out runs/lora --preset lora-sd15 --set finetune.rank=32
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
    #[command(flatten)]
    settings: SettingsArgs,
    /// A folder in diffusers' layout, hub:owner/name[@rev], or random:tiny|sd15|sd21|sdxl [default: SDXL, from the hub]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// What the generator learns [default: images]
    #[arg(long, value_enum)]
    mode: Option<FinetuneMode>,
    /// What is trained, except with `--mode mask_to_image` [default: lora]
    #[arg(long, value_enum)]
    method: Option<Method>,
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
    pub(super) gpus: GpuArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Print the resolved settings as TOML and exit
    #[arg(long)]
    pub(super) print_config: bool,
}

/// Settings of the engine that apply to the segmenter alone.
const SEGMENTER_ONLY: [&str; 3] = ["train.checkpoint_encoder", "train.checkpoint_decoder", "train.graph"];

pub(super) fn run(args: &Args, ranks: Ranks, context: &Context) -> CommandResult {
    let mut how = How::new(&args.out, &context.runtime)?.with_ranks(ranks);
    how.resume = args.resume.resume();
    let resolved = resolve(args, &how, context)?;
    if args.print_config {
        return context.done(resolved.to_toml(), &resolved.config);
    }
    how.profile = args.profile.settings(&args.out)?;
    how.plans = args.plan.is_made();
    how.memory = context.memory.clone();
    let (rows, may_search) = (args.data.rows(&[])?, args.settings.config.is_none());
    let finetuned = job::run(&how, |how| GeneratorFinetuning::new(resolved, &rows, may_search, how))?;
    if !ranks.is_main() {
        return Ok(CommandEnd::Done);
    }
    print_result(&finetuned, args, context)
}

fn resolve(args: &Args, how: &How, context: &Context) -> Result<Resolved<FinetuneRun>> {
    let flags = [
        ("finetune.model", "--model", args.model.clone()),
        ("finetune.mode", "--mode", args.mode.map(word)),
        ("finetune.method", "--method", args.method.map(word)),
        ("train.seed", "--seed", args.seed.map(|seed| seed.to_string())),
        ("train.precision", "--precision", args.precision.clone()),
    ];
    let given = args.settings.sources(FinetuneRun::DEFAULT_PRESET, assignments(flags));
    let resolved = how.resume.sources::<FinetuneRun>(&args.out, given, context.progress.as_ref())?.resolve_as()?;
    match SEGMENTER_ONLY.iter().find(|key| resolved.is_from_a_flag(key)) {
        Some(key) => Err(Error::config(*key, "has no effect on a generator", "leave it out")),
        None => Ok(resolved),
    }
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
/// `generate` is that command with the rows and its output folder.
fn next_command(generate: ShellCommand, config: &FinetuneConfig, weights: &Path) -> Option<ShellCommand> {
    let command = generate.flag("--model", [&config.model]);
    let command = match (config.mode, config.method) {
        (FinetuneMode::MaskToImage, _) => {
            let folder = weights.parent().unwrap_or(weights).display();
            command.flag("--mode", ["mask_to_image"]).flag("--set", [format!("augment.controlnet={folder}")])
        }
        (_, Method::Lora) => command.flag("--lora", [weights]),
        (_, Method::Full) => return None,
    };
    Some(command.flag("--set", [format!("augment.image_size={}", config.image_size)]))
}

fn print_result(Finetuned { outcome, run, peak, .. }: &Finetuned, args: &Args, context: &Context) -> CommandResult {
    let config = &run.finetune;
    let images_per_s = outcome.samples_now as f64 / outcome.train_seconds.max(1e-9);
    let best = if outcome.best_score.is_some() { "best" } else { "last" };
    let best = args.out.join(best);
    let weights = match (config.mode, config.method) {
        (FinetuneMode::MaskToImage, _) => best.join(CONTROLNET_FOLDER).join(WEIGHTS_FILE),
        (_, Method::Lora) => best.join(LORA_FILE),
        (_, Method::Full) => best.join(UNET_FOLDER).join(WEIGHTS_FILE),
    };
    let generate = args.data.add_to(ShellCommand::new("prsmed augment generate"));
    let next = next_command(generate.flag("--out", [next::free("pairs", "")]), config, &weights);
    context.output.line(format!(
        "{}, peak of tensors {peak}\n{}\nweights: {}{}",
        steps_text(outcome),
        best_line(outcome.best_score, config.samples > 0),
        weights.display(),
        next.map_or_else(String::new, |next| format!("\nnext: {next}"))
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
    Ok(CommandEnd::Done)
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
        let next = |config: &FinetuneConfig| {
            let generate = ShellCommand::new("prsmed augment generate --data-root data --out pairs");
            next_command(generate, config, Path::new("runs/a/best/file")).map(|command| command.to_string())
        };
        let config = FinetuneConfig { model: "sd15".into(), image_size: 512, ..FinetuneConfig::default() };
        let start = "prsmed augment generate --data-root data --out pairs --model sd15";
        let lora = next(&config).expect("a command");
        assert_eq!(lora, format!("{start} --lora runs/a/best/file --set augment.image_size=512"));
        let controlnet =
            next(&FinetuneConfig { mode: FinetuneMode::MaskToImage, ..config.clone() }).expect("a command");
        let expected = "--mode mask_to_image --set augment.controlnet=runs/a/best --set augment.image_size=512";
        assert_eq!(controlnet, format!("{start} {expected}"));
        assert_eq!(next(&FinetuneConfig { method: Method::Full, ..config }), None);
    }
}
