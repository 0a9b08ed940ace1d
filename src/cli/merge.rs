//! `prsmed merge`.

use super::Context;
use super::predict::{checkpoint_of, parse_precision};
use super::report::Outcome;
use crate::segment::merge::{Settings, merge};
use crate::segment::setup::{Build, RunOverrides};
use crate::tensor::weights::{CHECKSUMS, verify_folder};
use crate::tensor::{Device, Kind};
use crate::trainer::precision::Precision;
use crate::units::Bytes;
use serde_json::json;
use std::path::PathBuf;

/// Most bytes of a file of weights, as transformers has it.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Fold a run's adapters into its language model
///
/// Writes a folder that `prsmed predict` and `prsmed eval` use as they use the run, faster and without the original
/// base; it cannot be trained on. Its `base/` is a Mistral for Python's transformers. Sums are made in fp32, one tensor
/// at a time: memory holds the largest tensor, not the model.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed merge runs/a merged
  prsmed merge runs/a merged-bf16 --dtype bf16
  prsmed predict merged-bf16 --image scan.png --question \"Where is the lesion?\"")]
pub(super) struct Args {
    /// Run folder (its `best/`, else `last/`), one checkpoint folder, or a published PRS-Med folder
    run: PathBuf,
    /// Folder to write; must not exist
    out: PathBuf,
    /// fp32, bf16 or fp16 [default: as the base is stored]
    #[arg(long, value_name = "P", value_parser = parse_precision)]
    dtype: Option<Precision>,
    /// Where the language model is, when not where the run says: a folder or `hub:owner/name[@rev]`
    #[arg(long, value_name = "WHERE")]
    base: Option<String>,
    /// A separate CLIP vision tower: a folder or `hub:owner/name[@rev]`
    #[arg(long, value_name = "WHERE")]
    vision_tower: Option<String>,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    let folder = checkpoint_of(&args.run)?;
    if folder.join(CHECKSUMS).exists() {
        verify_folder(&folder)?;
    }
    let settings = Settings {
        overrides: RunOverrides {
            base: args.base.clone(),
            vision_tower: args.vision_tower.clone(),
            ..RunOverrides::default()
        },
        kind: args.dtype.map(Precision::kind),
        shard_bytes: SHARD_BYTES,
    };
    let locate = |spec: &str| context.locate(spec);
    let build =
        Build { device: Device::Cpu, kind: Kind::Float, seed: 0, locate: &locate, allow_partial: false, cache: None };
    let merged = merge(&folder, &args.out, &settings, build, context.progress.as_ref())?;
    let plural = if merged.shards == 1 { "" } else { "s" };
    let (bytes, out) = (Bytes(merged.bytes), args.out.display());
    context
        .output
        .line(format!("{} adapters merged into {bytes} in {} file{plural}: {out}", merged.adapters, merged.shards))?;
    context.output.record(&json!({
        "kind": "result",
        "out": args.out,
        "adapters": merged.adapters,
        "files": merged.shards,
        "bytes": merged.bytes,
        "dtype": args.dtype,
    }))?;
    Ok(Outcome::Done)
}
