//! `prsmed augment generate`.

use super::args::{SettingsArgs, pipeline_config};
use crate::augment::ablation;
use crate::augment::export::{Export, LoraUse};
use crate::augment::filter::model::{FilterModels, FilterReport};
use crate::augment::generate::{Generation, GenerationSummary};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::settings::Mode;
use crate::cli::args::RootArgs;
use crate::cli::context::Context;
use crate::cli::plan;
use crate::cli::ranks::{GpuArgs, check_data, main_only};
use crate::cli::report::Outcome;
use crate::cli::run_lock::RunLock;
use crate::config::AugmentRun;
use crate::data::manifest::Manifest;
use crate::event::Event;
use crate::hub::{Files, Need};
use crate::models::diffusion::lora::{self, Adapter};
use crate::plan::report::Plan;
use crate::segment::dry_run::FilterDryRun;
use crate::tensor::weights::sha256;
use crate::tensor::{self, memory};
use crate::trainer::Ranks;
use crate::units::{Bytes, clock};
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Generate image+mask pairs from the train rows of a data root
///
/// Writes a new data root for `prsmed train --data-root DIR --extra OUT`. With `keep_lesion`, the default, the lesion
/// and a rim around it are preserved byte for byte and everything else is repainted, so the label is correct by
/// construction. `edit_lesion` repaints the lesion inside its own mask. `insert_lesion` adds a lesion with the mask of
/// another image. `mask_to_image` paints an image from the mask with a ControlNet. `img2img` changes the whole image
/// a little.
///
/// Every pair is filtered with pixel tests (blank, clipped, seams, intensity, near-duplicates); `prsmed augment filter`
/// adds trained filter models. Rejected pairs are in OUT/rejected. OUT/manifest.jsonl describes how each pair was made
/// and why it was rejected; OUT/contact_sheet.png shows examples. After an interruption, the same command continues
/// and ends with the same files.
#[derive(Debug, clap::Args)]
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
    /// Use the first N source images; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Use N real training images, the same as `augment ablation --real-images N`; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_real: usize,
    /// A folder in diffusers' layout, a .safetensors file, hub:owner/name[@rev], or random:tiny|sd15|sd21|sdxl
    /// [default: SDXL, from the hub]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// LoRA file, optionally with `=STRENGTH` (default 1); may be repeated
    #[arg(long = "lora", value_name = "FILE")]
    loras: Vec<String>,
    /// Same as `--set augment.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Filter the finished pairs with the filter models in this folder, trained by `prsmed augment filter`
    #[arg(long, alias = "judges", value_name = "DIR", conflicts_with = "no_filter")]
    filter_models: Option<PathBuf>,
    /// Accept every pair
    #[arg(long)]
    no_filter: bool,
    #[command(flatten)]
    gpus: GpuArgs,
    /// Skip the memory plan and start even if the job may not fit
    #[arg(long)]
    no_plan: bool,
    /// Print the resolved settings as TOML and exit
    #[arg(long)]
    print_config: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    args.gpus.run(args.print_config, context, |ranks| generate(args, ranks, context))
}

fn generate(args: &Args, ranks: Ranks, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = args.settings.resolve(flags(args))?;
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let run = resolved.config;
    let manifest = ablation::limited_to(args.data.open(context)?, args.limit_real);
    check_data(ranks, &manifest)?;
    let _claim = ranks.agree_on(main_only(ranks, || {
        Export::refuse_foreign(&args.out)?;
        RunLock::on("--out", &args.out, context.progress.as_ref())
    }))?;
    let filter_models = args.filter_models.as_deref().map(FilterModels::open).transpose()?;
    let mut needs = run.augment.needs();
    needs.extend(filter_models.as_ref().map(FilterModels::needs).transpose()?.unwrap_or_default());
    for spec in &args.loras {
        needs.push(Need::new("--lora", lora_of(spec)?.0, Files::Checkpoint));
    }
    context.check_files(needs)?;
    note_random_weights(&run, context);
    let (adapters, loras) = read_loras(&args.loras, context)?;
    let pipeline_config = pipeline_config(&run, context)?;
    let generation = Generation {
        config: &run.augment,
        thresholds: &run.filter,
        filters: !args.no_filter,
        pipeline_config: &pipeline_config,
        adapters: &adapters,
        loras: &loras,
        manifest: &manifest,
        limit: args.limit,
        out: &args.out,
        device: tensor::default_device(),
        ranks,
        observer: context.progress.as_ref(),
        interrupt: &context.interrupt,
    };
    let filter_dry_run =
        filter_models.as_ref().map(|filter_models| filter_models.dry_run(&manifest, generation.device)).transpose()?;
    let texts = generation.texts()?;
    let num_batches = texts.pairs.len().div_ceil(run.augment.batch);
    let texts = texts.texts.len();
    let planned = if args.no_plan {
        None
    } else {
        Some(check_memory(&run, &pipeline_config, (texts, filter_dry_run.as_ref()), context)?)
    };
    if let Some(time) = planned.as_ref().and_then(|plan| plan.time) {
        let all = Duration::try_from_secs_f64(time.seconds).unwrap_or_default();
        let all = clock(all.saturating_mul(u32::try_from(num_batches).unwrap_or(u32::MAX)));
        context.progress.on(&Event::Note(format!("predicted time: {all} for {num_batches} batches")));
    }
    let Some(summary) = generation.run()? else { return Ok(Outcome::Done) };
    let device = tensor::default_device();
    let line = describe_summary(
        &summary,
        planned.as_ref(),
        memory::overall_peak(device),
        (&args.out, run.augment.is_random()),
    );
    context.output.line(line)?;
    let filtered = filter_models
        .map(|filter_models| run_filter_models(&filter_models, &manifest, args, &run, context))
        .transpose()?;
    context.output.record(&json!({
        "kind": "result",
        "out": args.out,
        "summary": summary,
        "filtered": filtered,
        "memory": { "planned": planned, "measured": memory::overall_peak(device) },
    }))?;
    Ok(Outcome::Done)
}

/// Filters the pairs after the generator is freed, so that the memory of both is never needed at once.
fn run_filter_models(
    filter_models: &FilterModels,
    real: &Manifest,
    args: &Args,
    run: &AugmentRun,
    context: &Context,
) -> Result<FilterReport> {
    let filtered = filter_models.filter(real, &mut Export::open(&args.out)?, &run.filter, 0, &context.runtime)?;
    context.output.line(super::filter::describe_report(&filtered, &args.out))?;
    Ok(filtered)
}

fn flags(args: &Args) -> Vec<(String, String)> {
    let mut flags = Vec::new();
    let mut flag = |name: &str, key: &str, value: Option<String>| {
        if let Some(value) = value {
            flags.push((format!("augment.{key}={value}"), format!("--{name}")));
        }
    };
    flag("mode", "mode", args.mode.map(|mode| mode.name().to_owned()));
    flag("per-image", "per_image", args.per_image.map(|n| n.to_string()));
    flag("model", "model", args.model.clone());
    flag("seed", "seed", args.seed.map(|n| n.to_string()));
    flags
}

type Adapters = Vec<(Vec<Adapter>, f64)>;

fn read_loras(specs: &[String], context: &Context) -> Result<(Adapters, Vec<LoraUse>)> {
    let mut adapters = Vec::new();
    let mut uses = Vec::new();
    for spec in specs {
        let (path, strength) = lora_of(spec)?;
        let file = context.locate(path)?;
        let sum = if file.is_file() { sha256(&file)? } else { String::new() };
        adapters.push((lora::read(&file)?, strength));
        uses.push(LoraUse { name: path.to_owned(), sha256: sum, scale: strength });
    }
    Ok((adapters, uses))
}

/// The file and the strength of a `--lora FILE[=STRENGTH]`.
fn lora_of(spec: &str) -> Result<(&str, f64)> {
    let Some((path, number)) = spec.rsplit_once('=') else { return Ok((spec, 1.0)) };
    let wrong = || {
        let reason = format!("`{number}` is not a number");
        Error::config("--lora", reason, "write for example `file.safetensors=0.8`")
    };
    Ok((path, number.parse().map_err(|_| wrong())?))
}

/// The plan of exactly this job; stops when it cannot fit.
fn check_memory(
    run: &AugmentRun,
    pipeline_config: &PipelineConfig,
    needs: (usize, Option<&FilterDryRun>),
    context: &Context,
) -> Result<Plan> {
    let machine = plan::training_machine(context)?;
    let plan = Plan::of(&run.dry_run(pipeline_config, needs, &machine, true)?, &machine);
    context.progress.on(&Event::Note(format!("memory plan for a batch of {}\n{}", run.augment.batch, plan.table())));
    if plan.fits {
        return Ok(plan);
    }
    let remedies = run.remedies(pipeline_config, &machine, &plan);
    context.progress.on(&Event::Note(plan::remedy_lines(&remedies)));
    let helps = remedies.iter().find(|remedy| remedy.fits).map_or_else(
        || "`prsmed preset --task augment` searches for settings that fit".to_owned(),
        |remedy| format!("`{}` fits", remedy.flags()),
    );
    Err(Error::config("augment", plan.summary(), format!("{helps}; `--no-plan` skips this check")))
}

/// Says that random weights make noise, and how to try the tool faster.
fn note_random_weights(run: &AugmentRun, context: &Context) {
    let config = &run.augment;
    if !config.is_random() {
        return;
    }
    let (side, steps) = (config.image_size, config.num_steps());
    let slow = if side > 256 {
        format!("; {side} pixels and {steps} steps are slow, `--preset tiny` has 128 pixels and 2 steps")
    } else {
        String::new()
    };
    let text =
        format!("`{}` has random weights: the images will be noise, only for trying the tool{slow}", config.model);
    context.progress.on(&Event::Note(text));
}

fn describe_summary(
    summary: &GenerationSummary,
    planned: Option<&Plan>,
    measured: Bytes,
    (out, is_random): (&Path, bool),
) -> String {
    let GenerationSummary { sources, pairs, accepted, rows, rejected, images_per_s, .. } = summary;
    let mut lines = vec![format!("{accepted} of {pairs} pairs from {sources} images accepted, {rows} rows")];
    if !rejected.is_empty() {
        let parts: Vec<String> = rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        lines.push(format!("rejected by: {}", parts.join(", ")));
    }
    let planned = planned.map_or_else(String::new, |plan| format!(" (planned {})", plan.allocated_peak));
    if summary.made_now > 0 {
        lines.push(format!("{images_per_s:.2} images/s, peak of tensors {measured}{planned}"));
    }
    lines.push(if is_random {
        format!(
            "the weights are random: the images are noise, do not train on them; look at {}/contact_sheet.png",
            out.display()
        )
    } else {
        format!("train with `--extra {0}`; look at {0}/contact_sheet.png", out.display())
    });
    lines.join("\n")
}
