//! `prsmed predict`, and how a run is opened for use.

use super::Context;
use super::report::Outcome;
use crate::data::{decode, picture};
use crate::event::Event;
use crate::segment::predict::{Prediction, Request, predict};
use crate::segment::setup::{self, Build, RunOverrides};
use crate::segment::{Assembly, Semantics, evaluate};
use crate::tensor::weights::{CHECKSUMS, readable_folder, verify_folder};
use crate::tensor::{self, ledger};
use crate::trainer::precision::Precision;
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Which run to use, and how.
#[derive(Debug, clap::Args)]
pub(super) struct RunArgs {
    /// Run folder (its `best/`, else `last/`), one checkpoint folder, or a published PRS-Med folder
    pub(super) run: PathBuf,
    /// Where the language model is, when not where the run says: a folder or `hub:owner/name[@rev]`
    #[arg(long, value_name = "WHERE")]
    base: Option<String>,
    /// A separate CLIP vision tower: a folder or `hub:owner/name[@rev]`
    #[arg(long, value_name = "WHERE")]
    vision_tower: Option<String>,
    /// reference or corrected, when not as the run says
    #[arg(long, value_name = "NAME", value_parser = parse_semantics)]
    semantics: Option<Semantics>,
    /// fp32, bf16 or fp16 [default: fp32 on the CPU, bf16 on a GPU]
    #[arg(long, value_name = "P", value_parser = parse_precision)]
    precision: Option<Precision>,
    /// Use a checkpoint whose keys do not all fit; they are listed
    #[arg(long)]
    allow_partial: bool,
}

fn parse_semantics(text: &str) -> std::result::Result<Semantics, String> {
    match text {
        "reference" => Ok(Semantics::Reference),
        "corrected" => Ok(Semantics::Corrected),
        _ => Err("use reference or corrected".into()),
    }
}

pub(super) fn parse_precision(text: &str) -> std::result::Result<Precision, String> {
    match text {
        "fp32" => Ok(Precision::Fp32),
        "bf16" => Ok(Precision::Bf16),
        "fp16" => Ok(Precision::Fp16),
        _ => Err("use fp32, bf16 or fp16".into()),
    }
}

/// The model of a run folder, as its settings say.
pub(super) fn open_run(run: &Path, context: &Context) -> Result<Assembly> {
    let as_it_is = RunArgs {
        run: run.to_path_buf(),
        base: None,
        vision_tower: None,
        semantics: None,
        precision: None,
        allow_partial: false,
    };
    as_it_is.open(context)
}

impl RunArgs {
    pub(super) fn open(&self, context: &Context) -> Result<Assembly> {
        let folder = checkpoint_of(&self.run)?;
        // Folders written by the original code have no checksums.
        if folder.join(CHECKSUMS).exists() {
            verify_folder(&folder)?;
        }
        let device = tensor::default_device();
        let default = if device == tensor::Device::Cpu { Precision::Fp32 } else { Precision::Bf16 };
        let overrides = RunOverrides {
            base: self.base.clone(),
            vision_tower: self.vision_tower.clone(),
            semantics: self.semantics,
            quantization: None,
        };
        let locate = |spec: &str| context.locate(spec);
        let build = Build {
            device,
            kind: self.precision.unwrap_or(default).kind(),
            seed: 0,
            locate: &locate,
            allow_partial: self.allow_partial,
            cache: context.env.cache.as_deref(),
        };
        let assembly = setup::open(&folder, &overrides, build)?;
        for warning in &assembly.warnings {
            context.progress.on(&Event::Warning(warning.clone()));
        }
        Ok(assembly)
    }
}

/// The checkpoint folder that `run` stands for.
pub(super) fn checkpoint_of(run: &Path) -> Result<PathBuf> {
    if !run.is_dir() {
        return Err(Error::weights(
            run,
            "there is no such run folder",
            "give the folder that `prsmed train --out` wrote",
        ));
    }
    if let Some(inside) = ["best", "last"].into_iter().find_map(|name| readable_folder(&run.join(name)).ok()) {
        return Ok(inside);
    }
    if ["model.json", "mask_decoder.pth"].iter().any(|name| run.join(name).exists()) {
        return Ok(run.to_owned());
    }
    let hint = "give the folder that `prsmed train --out` wrote, or a published PRS-Med folder";
    Err(Error::weights(run, "is no run folder: neither `best/` nor `last/` is inside", hint))
}

/// Answer a question about an image and segment what it asks for
///
/// The answer is printed as it is generated. The mask has the image's own size.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed predict runs/a --image scan.png --question \"Where is the lesion?\" \\
      --mask-out mask.png --overlay-out overlay.png")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// PNG, JPEG or TIFF
    #[arg(long, value_name = "FILE")]
    image: PathBuf,
    /// What to look for
    #[arg(long, value_name = "TEXT")]
    question: String,
    /// Write the mask as 8-bit PNG, 0 and 255
    #[arg(long, value_name = "FILE")]
    mask_out: Option<PathBuf>,
    /// Write the image with the mask drawn over it
    #[arg(long, value_name = "FILE")]
    overlay_out: Option<PathBuf>,
    /// Longest answer in tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    if !args.image.is_file() {
        let reason = format!("there is no file `{}`", args.image.display());
        return Err(Error::config("--image", reason, "give a PNG, JPEG or TIFF file").into());
    }
    let image = decode::picture(&args.image)?;
    // A mask in JPEG would not be 0 and 255.
    args.mask_out.iter().try_for_each(|path| check_writable("--mask-out", path, &["png"]))?;
    args.overlay_out.iter().try_for_each(|path| check_writable("--overlay-out", path, &["png", "jpg", "jpeg"]))?;
    let assembly = args.run.open(context)?;
    let request = Request { picture: &image, question: &args.question, max_new_tokens: args.max_new_tokens };
    let stream = |piece: &str| context.progress.on(&Event::Token(piece.to_owned()));
    let prediction = predict(&assembly, &request, stream)?;
    let (width, height) = prediction.size;
    let mut mask = picture::probability_picture(&prediction.mask, width, height)?;
    mask.iter_mut().for_each(|value| *value = if *value > 127 { 255 } else { 0 });
    if let Some(path) = &args.mask_out {
        picture::save(&mask.into(), path)?;
    }
    if let Some(path) = &args.overlay_out {
        picture::save(&evaluate::overlay(&image, &prediction, None)?.into(), path)?;
    }
    finish(context, &assembly, &prediction, args)
}

fn finish(context: &Context, assembly: &Assembly, prediction: &Prediction, args: &Args) -> anyhow::Result<Outcome> {
    let foreground = prediction.mask.iter().filter(|p| **p > 0.5).count();
    #[expect(clippy::cast_precision_loss, reason = "a share of pixels")]
    let foreground_frac = foreground as f64 / prediction.mask.len().max(1) as f64;
    let best = prediction.classes.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
    let modality = best.and_then(|i| assembly.description.modalities.get(i));
    context.output.line("")?;
    context.output.line(format!("mask: {:.2} % of the image", 100.0 * foreground_frac))?;
    context.output.record(&json!({
        "kind": "result",
        "answer": prediction.answer,
        "new_tokens": prediction.new_tokens,
        "modality": modality,
        "mask": args.mask_out,
        "overlay": args.overlay_out,
        "foreground_frac": foreground_frac,
        "width": prediction.size.0,
        "height": prediction.size.1,
        "memory": { "measured": ledger::usage() },
    }))?;
    Ok(Outcome::Done)
}

/// Refuses an output path before the expensive work.
fn check_writable(flag: &str, path: &Path, extensions: &[&str]) -> Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        let reason = format!("`{}` is not a folder", parent.display());
        return Err(Error::config(flag, reason, "make the folder first, or choose another path"));
    }
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if extensions.contains(&extension.as_str()) {
        return Ok(());
    }
    let hint = format!("use a name that ends in `.{}`", extensions.join("` or `."));
    Err(Error::config(flag, format!("`{}` is no name of a picture to write", path.display()), hint))
}
