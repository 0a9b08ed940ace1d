//! `prsmed augment generate`.

use super::{SettingsArgs, blueprint};
use crate::augment::blueprint::Blueprint;
use crate::augment::export::{Export, LoraUse, sha256};
use crate::augment::filter::judge::{Judged, Judges};
use crate::augment::generate::{Generation, Summary};
use crate::augment::settings::Mode;
use crate::augment::study;
use crate::cli::claim::Claim;
use crate::cli::data::RootArgs;
use crate::cli::report::Outcome;
use crate::cli::{Context, plan};
use crate::config::AugmentRun;
use crate::data::manifest::Manifest;
use crate::event::Event;
use crate::models::diffusion::lora::{self, Adapter};
use crate::plan::report::Plan;
use crate::segment::rehearsal::Judging;
use crate::tensor::{self, memory};
use crate::units::Bytes;
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Make image+mask pairs from the train rows of a data root
///
/// Writes a data root of its own, for `prsmed train --data-root DIR --extra OUT`. With `keep_lesion`, the default, the
/// lesion and a rim around it stay byte for byte and everything else is made new, so that the label is right by
/// construction. `edit_lesion` makes the lesion new inside its own mask, `insert_lesion` adds one with the mask of another
/// picture, `mask_to_image` paints a picture from the mask with a ControlNet, `img2img` varies the picture.
///
/// Every pair is filtered by its pixels (blank, clipped, seams, intensity, near-duplicates); `prsmed augment filter` adds
/// trained judges. Rejected pairs are kept in OUT/rejected with their reason. OUT/manifest.jsonl says how each pair was
/// made; OUT/contact_sheet.png shows some. The same command goes on after a stop and ends with the same files.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed augment generate --data-root data --out pairs --lora polyps.safetensors=0.8
  prsmed augment generate --data-root data --out pairs --model sd15/ --set augment.image_size=512
  prsmed augment generate --data-root phantoms --out pairs --preset tiny --limit 20")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    data: RootArgs,
    /// The new data root
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    settings: SettingsArgs,
    /// How pairs are made [default: keep_lesion]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// New pictures for each source picture [default: 2]
    #[arg(long, value_name = "N")]
    per_image: Option<usize>,
    /// First N source pictures; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Use N real training pictures, spread evenly over each class, as `augment study --limit-real N` does; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit_real: usize,
    /// A folder in diffusers' layout, hub:owner/name[@rev], or random:tiny|sd15|sd21|sdxl [default: SDXL, from the hub]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// LoRA file, with `=STRENGTH` behind it where that is not 1; may be repeated
    #[arg(long = "lora", value_name = "FILE")]
    loras: Vec<String>,
    /// Same as `--set augment.seed=N`
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Also have trained judges filter the pairs when all are made: the folder that `prsmed augment filter` filled
    #[arg(long, value_name = "DIR", conflicts_with = "no_filter")]
    judges: Option<PathBuf>,
    /// Keep every pair
    #[arg(long)]
    no_filter: bool,
    /// Do not plan memory before the run, and start even what would not fit
    #[arg(long)]
    no_plan: bool,
    /// Print the resolved settings as TOML and stop
    #[arg(long)]
    print_config: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let resolved = args.settings.resolve(flags(args))?;
    if args.print_config {
        context.output.line(resolved.to_toml())?;
        context.output.record(&resolved.config)?;
        return Ok(Outcome::Done);
    }
    let run = resolved.config;
    let manifest = study::limited_to(args.data.open()?, args.limit_real);
    Export::refuse_foreign(&args.out)?;
    let _claim = Claim::on("--out", &args.out, context.progress.as_ref())?;
    let (adapters, loras) = read_loras(&args.loras, context)?;
    let blueprint = blueprint(&run, context)?;
    let generation = Generation {
        config: &run.augment,
        thresholds: &run.filter,
        filters: !args.no_filter,
        blueprint: &blueprint,
        adapters: &adapters,
        loras: &loras,
        manifest: &manifest,
        limit: args.limit,
        out: &args.out,
        device: tensor::default_device(),
        observer: context.progress.as_ref(),
        interrupt: &context.interrupt,
    };
    let judges = args.judges.as_deref().map(Judges::open).transpose()?;
    let judging = judges.as_ref().map(|judges| judges.judging(&manifest, generation.device)).transpose()?;
    let texts = generation.texts()?.texts.len();
    let planned = if args.no_plan {
        None
    } else {
        Some(refuse_what_cannot_fit(&run, &blueprint, (texts, judging.as_ref()), context)?)
    };
    let summary = generation.run()?;
    let device = tensor::default_device();
    context.output.line(told(&summary, planned.as_ref(), memory::overall_peak(device), &args.out))?;
    let judged = judges.map(|judges| judge(&judges, &manifest, args, &run, context)).transpose()?;
    context.output.record(&json!({
        "kind": "result",
        "out": args.out,
        "summary": summary,
        "judged": judged,
        "memory": { "planned": planned, "measured": memory::overall_peak(device) },
    }))?;
    Ok(Outcome::Done)
}

/// With the generator gone: its memory and theirs are never needed together.
fn judge(judges: &Judges, real: &Manifest, args: &Args, run: &AugmentRun, context: &Context) -> Result<Judged> {
    let locate = |spec: &str| context.locate(spec);
    let around = context.surroundings(&locate);
    let judged = judges.judge(real, &mut Export::open(&args.out)?, &run.filter, 0, around)?;
    context.output.line(super::filter::told(&judged, &args.out))?;
    Ok(judged)
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
        let (path, strength) = match spec.rsplit_once('=') {
            Some((path, number)) => {
                let strength: f64 = number.parse().map_err(|_| {
                    Error::config(
                        "--lora",
                        format!("`{number}` is no strength"),
                        "write for example `file.safetensors=0.8`",
                    )
                })?;
                (path, strength)
            }
            None => (spec.as_str(), 1.0),
        };
        let file = context.locate(path)?;
        let sum = if file.is_file() { sha256(&file)? } else { String::new() };
        adapters.push((lora::read(&file)?, strength));
        uses.push(LoraUse { name: path.to_owned(), sha256: sum, scale: strength });
    }
    Ok((adapters, uses))
}

/// The plan of exactly this job; stops when it cannot fit.
fn refuse_what_cannot_fit(
    run: &AugmentRun,
    blueprint: &Blueprint,
    needs: (usize, Option<&Judging>),
    context: &Context,
) -> Result<Plan> {
    let machine = plan::training_machine(context);
    let plan = Plan::of(&run.rehearse(blueprint, needs, &machine, true)?, &machine);
    context.progress.on(&Event::Note(format!("memory plan of a batch of {}\n{}", run.augment.batch, plan.table())));
    if plan.fits {
        return Ok(plan);
    }
    let remedies = run.remedies(blueprint, &machine, &plan);
    context.progress.on(&Event::Note(plan::remedy_lines(&remedies)));
    let helps = remedies.iter().find(|remedy| remedy.fits).map_or_else(
        || "`prsmed preset --task augment` searches for settings that fit".to_owned(),
        |remedy| format!("`{}` fits", remedy.flags()),
    );
    Err(Error::config("augment", plan.verdict(), format!("{helps}; `--no-plan` starts all the same")))
}

fn told(summary: &Summary, planned: Option<&Plan>, measured: Bytes, out: &std::path::Path) -> String {
    let Summary { sources, pairs, accepted, rows, rejected, images_per_s, .. } = summary;
    let mut lines = vec![format!("{accepted} of {pairs} pairs from {sources} pictures accepted, {rows} rows")];
    if !rejected.is_empty() {
        let parts: Vec<String> = rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        lines.push(format!("rejected by: {}", parts.join(", ")));
    }
    let planned = planned.map_or_else(String::new, |plan| format!(" (planned {})", plan.allocated_peak));
    if summary.made_now > 0 {
        lines.push(format!("{images_per_s:.2} images/s, peak of tensors {measured}{planned}"));
    }
    lines.push(format!("train with `--extra {0}`; look at {0}/contact_sheet.png", out.display()));
    lines.join("\n")
}
