//! `prsmed merge`: merges LoRA adapters into the language model.

use super::context::Context;
use super::predict::parse_precision;
use super::report::{CommandEnd, CommandResult};
use crate::segment::merge::{Settings, Source};
use crate::segment::setup::{self, Build, RunOverrides};
use crate::segment::weight_files;
use crate::shell::path_word;
use crate::tensor::{Device, Kind};
use crate::trainer::precision::Precision;
use crate::units::{Bytes, counted};
use serde_json::json;
use std::path::PathBuf;

/// Maximum bytes of a weight file, the default of transformers.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Merge the LoRA adapters of a run into its language model
///
/// Writes a folder that `prsmed predict` and `prsmed eval` accept like a run folder. It is faster and does not need the
/// original base, but it cannot be trained further. Its `base/` is a Mistral model for Python's transformers. Weights
/// are added in fp32, one tensor at a time, so memory holds only the largest tensor.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed merge runs/a merged
  prsmed merge runs/a merged-bf16 --dtype bf16
  prsmed predict merged-bf16 --image scan.png --question \"Where is the lesion?\"")]
pub(super) struct Args {
    /// Run folder (its `best/`, else `last/`), one checkpoint folder, a published PRS-Med folder, or
    /// `hub:owner/name[/FOLDER]`
    run: PathBuf,
    /// Folder to write; it must not exist
    out: PathBuf,
    /// fp32, bf16 or fp16 [default: as the base is stored]
    #[arg(long, value_name = "P", value_parser = parse_precision)]
    dtype: Option<Precision>,
    /// Language model: a folder or `hub:owner/name[@rev]` [default: as stored in the run]
    #[arg(long, value_name = "WHERE")]
    base: Option<String>,
    /// Separate CLIP vision tower: a folder or `hub:owner/name[@rev]` [default: as stored in the run]
    #[arg(long, value_name = "WHERE")]
    vision_tower: Option<String>,
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    let (base, vision_tower) = (args.base.clone(), args.vision_tower.clone());
    let overrides = RunOverrides { base, vision_tower, ..RunOverrides::default() };
    let settings = Settings { overrides, kind: args.dtype.map(Precision::kind), shard_bytes: SHARD_BYTES };
    let locate = |spec: &str| context.runtime.locate(spec);
    let build = Build::new(Device::Cpu, Kind::Float, &locate);
    let (base, tower) = (args.base.as_deref(), args.vision_tower.as_deref());
    let source = weight_files::read_run(&args.run, base, tower, &context.runtime, &|folder| {
        setup::verify(folder)?;
        Source::open(folder, &settings.overrides, build)
    })?;
    let merged = source.write(&args.out, &settings, context.progress.as_ref())?;
    let (bytes, out) = (Bytes(merged.bytes), args.out.display());
    context.output.line(format!(
        "{} adapters merged into {bytes} in {}: {out}\nnext: prsmed serve {}",
        merged.adapters,
        counted(merged.shards, "file"),
        path_word(&args.out)
    ))?;
    context.output.record(&json!({
        "kind": "result",
        "out": args.out,
        "adapters": merged.adapters,
        "files": merged.shards,
        "bytes": merged.bytes,
        "dtype": args.dtype,
    }))?;
    Ok(CommandEnd::Done)
}
