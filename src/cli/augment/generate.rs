//! `prsmed augment generate`.

use crate::augment::generate::GenerationSummary;
use crate::augment::settings::{Mode, word};
use crate::cli::args::{PlanArgs, RootArgs, SettingsArgs, assignments};
use crate::cli::context::Context;
use crate::cli::ranks::GpuArgs;
use crate::cli::report::{CommandEnd, CommandResult};
use crate::config::{AugmentRun, Settings as _};
use crate::job::generation::{Generated, PairGeneration, Pairs};
use crate::job::{self, How};
use crate::shell::ShellCommand;
use crate::tensor::memory::overall_peak;
use crate::trainer::Ranks;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Generate image+mask pairs from the train rows of a data root
///
/// Writes a new data root for `prsmed train --data-root DIR --extra OUT`. With `keep_lesion`, the default, the lesion
/// and a rim around it are preserved byte for byte and everything else is repainted, so the label is correct by
/// construction. `edit_lesion` repaints the lesion inside its own mask. `insert_lesion` adds a lesion with the mask of
/// another image. `mask_to_image` paints an image from the mask with a ControlNet. `img2img` changes the whole image
/// a little.
///
/// Every pair is filtered with pixel tests (blank, clipped, seams, intensity); `prsmed augment filter`
/// adds trained filter models. Rejected pairs are in OUT/rejected. OUT/manifest.jsonl describes how each pair was made
/// and why it was rejected; OUT/report.html shows examples and explains the tests. After an interruption, the same command continues
/// and ends with the same files.
#[derive(Debug, clap::Args)]
#[command(mut_arg("preset", |arg| arg.help("Named settings: augment (SDXL) or tiny (random weights, for a quick try) \
    [default: augment]")))]
#[command(mut_arg("sets", |arg| arg.help("One setting, for example `augment.steps=20`; may be repeated")))]
#[command(after_help = "Examples:
  prsmed augment generate --data-root data --out pairs --lora polyps.safetensors=0.8
  prsmed augment generate --data-root data --out pairs --model sd15/ --set augment.image_size=512
  prsmed augment generate --data-root data --out pairs --gpus 4
  prsmed augment generate --data-root phantoms --out pairs --preset tiny --limit 20")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// Output data root
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    settings: SettingsArgs,
    /// Generation mode [default: keep_lesion]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// New images for each source image [default: 2]
    #[arg(long, value_name = "N")]
    per_image: Option<usize>,
    /// Use N source images, spread over all classes; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Use N real training images, the same as `augment ablation --real-images N`; 0 = all
    #[arg(long, alias = "limit-real", value_name = "N", default_value_t = 0)]
    real_images: usize,
    /// A folder in diffusers' layout, hub:owner/name[@rev], or random:tiny|sd15|sd21|sdxl [default: SDXL, from the hub]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// LoRA file, optionally with `=STRENGTH` (default 1); may be repeated
    #[arg(long = "lora", value_name = "FILE")]
    loras: Vec<String>,
    /// Same as `--set augment.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Accept every pair
    #[arg(long)]
    no_filter: bool,
    #[command(flatten)]
    pub(super) gpus: GpuArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Print the resolved settings as TOML and exit
    #[arg(long)]
    pub(super) print_config: bool,
}

pub(super) fn run(args: &Args, ranks: Ranks, context: &Context) -> CommandResult {
    let flags = [
        ("augment.mode", "--mode", args.mode.map(word)),
        ("augment.per_image", "--per-image", args.per_image.map(|n| n.to_string())),
        ("augment.model", "--model", args.model.clone()),
        ("augment.seed", "--seed", args.seed.map(|n| n.to_string())),
    ];
    let resolved = args.settings.sources(AugmentRun::DEFAULT_PRESET, assignments(flags)).resolve_as::<AugmentRun>()?;
    if args.print_config {
        return context.done(resolved.to_toml(), &resolved.config);
    }
    let (plans, memory) = (args.plan.is_made(), context.memory.clone());
    // the processes share no memory: each is planned as if it were alone
    let how = How { plans, ranks, memory, ..How::new(&args.out, &context.runtime)? };
    let pairs = Pairs {
        run: resolved.config,
        limit_real: args.real_images,
        limit: args.limit,
        loras: args.loras.clone(),
        filters: !args.no_filter,
    };
    let is_random = pairs.run.augment.is_random();
    let rows = args.data.rows(&[])?;
    let Some(made) = job::run(&how, |how| PairGeneration::new(pairs, &rows, how))? else { return Ok(CommandEnd::Done) };
    context.output.line(describe(&made, &args.out, is_random))?;
    context.output.record(&json!({
        "kind": "result",
        "out": args.out,
        "summary": made.summary,
        "memory": { "planned": made.plan, "measured": overall_peak(context.runtime.device()) },
    }))?;
    Ok(CommandEnd::Done)
}

/// The result in words.
fn describe(Generated { summary, plan, peak, .. }: &Generated, out: &Path, is_random: bool) -> String {
    let GenerationSummary { sources, pairs, accepted, rows, rejected, images_per_s, .. } = summary;
    let mut lines = vec![format!("{accepted} of {pairs} pairs from {sources} images accepted, {rows} rows")];
    if !rejected.is_empty() {
        let parts: Vec<String> = rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        lines.push(format!("rejected by: {}", parts.join(", ")));
    }
    let planned = plan.as_ref().map_or_else(String::new, |plan| format!(" (planned {})", plan.allocated_peak));
    if summary.made_now > 0 {
        lines.push(format!("{images_per_s:.2} images/s, peak of tensors {peak}{planned}"));
    }
    let folder = out.display();
    lines.push(if is_random {
        format!("the weights are random: the images are noise, do not train on them; look at {folder}/report.html")
    } else {
        format!("train with `{}`; look at {folder}/report.html", ShellCommand::new("--extra").path(out))
    });
    lines.join("\n")
}
