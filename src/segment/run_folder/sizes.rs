//! Sizes of a model: of its settings, of its weights, or of the run that it starts from.

use super::description::{check_adapters, check_sizes, describe};
use super::loaded::Description;
use super::needs;
use super::parts::{Configs, Found};
use crate::data::check::targets::MaskGrid;
use crate::models::base::Parts;
use crate::models::image_encoder::{self, known};
use crate::models::mask_head;
use crate::models::prsmed;
use crate::nn::LoraConfig;
use crate::segment::config::{ModelConfig, RANDOM, Sizes};
use crate::tensor::weights::Archive;
use crate::{Error, Result};
use std::path::Path;

/// The sizes that settings state for parts with random weights.
pub(super) fn stated_sizes(config: &ModelConfig) -> Result<&Sizes> {
    config.sizes.as_ref().ok_or_else(|| {
        Error::config(
            "model.sizes",
            "a model with random parts needs their sizes",
            "use the argument `preset=tiny`, or give `model.base` and `model.image_encoder` real weights",
        )
    })
}

/// Model sizes from settings, without reading weights and without downloads: those of the run that `model.init` names, if
/// it is on this machine. Else a base in a folder has the sizes of its `config.json`, a base on the hub those in
/// `configs`, which [`check_parts`](super::architecture::check_parts) reads; those of LLaVA-Med v1.5 are known. An image
/// encoder with weights has the sizes of TinySAM.
///
/// # Errors
/// [`Error::Config`] for random parts without sizes, for a base on the hub that was not read, and for sizes that do not
/// fit; [`Error::Weights`] for a base that does not exist or has no sizes in its `config.json`.
pub fn planned_sizes(
    config: &ModelConfig,
    configs: &Configs,
    lora: LoraConfig,
    num_classes: usize,
) -> Result<prsmed::Config> {
    let of_init = || {
        let is_local = !config.init.is_empty() && !config.init.starts_with("hub:");
        let folder = is_local.then(|| needs::checkpoint_of(Path::new(&config.init)).ok()).flatten()?;
        sizes_of_run(&folder, &describe(&folder).ok()?, config, lora, num_classes).ok()
    };
    if let Some(sizes) = of_init() {
        return Ok(sizes);
    }
    let base = if config.base == RANDOM {
        let sizes = stated_sizes(config)?;
        sizes.base(i64::try_from(sizes.vocab_size).expect("a vocabulary"))
    } else {
        Found::local(config, configs)?.planned_sizes(config)?
    };
    let sizes = assembled_sizes(config, lora, num_classes, (base, planned_encoder(config)?));
    check_sizes(config, &sizes)?;
    check_adapters(config, &sizes)?;
    Ok(sizes)
}

/// The image encoder of settings, without reading weights.
fn planned_encoder(config: &ModelConfig) -> Result<image_encoder::Config> {
    match config.image_encoder.as_str() {
        RANDOM => stated_sizes(config).map(|sizes| sizes.encoder.clone()),
        spec => Ok(known::sizes_by_name(spec)),
    }
}

/// The grid on which the mask head of settings draws: that of the image encoder.
///
/// # Errors
/// [`Error::Config`] for a random encoder without sizes.
pub fn mask_grid(config: &ModelConfig) -> Result<MaskGrid> {
    let encoder = planned_encoder(config)?;
    let side = u32::try_from(config.image_size / encoder.stride()).unwrap_or_default();
    Ok(MaskGrid { side, fit: encoder.fit() })
}

pub(super) fn model_sizes(
    config: &ModelConfig,
    lora: LoraConfig,
    num_classes: usize,
    found: &Found,
    vocab_size: i64,
) -> Result<prsmed::Config> {
    let base = match found.base_sizes()? {
        Some(found) => found,
        None => stated_sizes(config)?.base(vocab_size),
    };
    let encoder = match &found.image_encoder {
        Some(file) => known::sizes_of(&Archive::open(file)?)?,
        None => stated_sizes(config)?.encoder.clone(),
    };
    Ok(assembled_sizes(config, lora, num_classes, (base, encoder)))
}

fn assembled_sizes(
    config: &ModelConfig,
    lora: LoraConfig,
    num_classes: usize,
    (Parts { family, tower, llm }, encoder): (Parts, image_encoder::Config),
) -> prsmed::Config {
    let (own, options) = (config.sizes.as_ref(), config.head_options());
    let decoder = own.and_then(|sizes| sizes.head.clone()).unwrap_or_else(|| {
        let own = own.map(|sizes| (sizes.decoder_hidden_dim, sizes.decoder_heads));
        mask_head::Config::prsmed(llm.hidden_size, encoder.channels(), own, &options)
    });
    let num_classes = i64::try_from(num_classes).expect("a handful of modalities");
    let sizes = prsmed::Config { family, tower, llm, lora, encoder, decoder, num_classes, mask_reader: None };
    let mask_reader = config.reads_masks().then(|| sizes.fitting_reader());
    prsmed::Config { mask_reader, ..sizes }
}

/// Sizes of the run for `num_classes` classes, with the dropouts of the settings.
pub(super) fn sizes_of_run(
    folder: &Path,
    trained: &Description,
    config: &ModelConfig,
    lora: LoraConfig,
    num_classes: usize,
) -> Result<prsmed::Config> {
    let of = &trained.sizes;
    if of.lora.rank == 0 {
        let reason = "is a merged run: its adapters are part of the language model";
        return Err(Error::weights(folder, reason, "start from the run that it was merged from"));
    }
    let different = |key: &str, was: String, is: String| {
        let reason = format!("the run `{}` has {was}, the settings have {is}", folder.display());
        Err(Error::config(key, reason, format!("use the setting `{key}={was}`, or train without `model.init`")))
    };
    if of.lora.rank != lora.rank {
        return different("lora.rank", of.lora.rank.to_string(), lora.rank.to_string());
    }
    if (of.lora.alpha - lora.alpha).abs() > 0.0 {
        return different("lora.alpha", of.lora.alpha.to_string(), lora.alpha.to_string());
    }
    if trained.model.decoder != config.decoder {
        let name = |version| serde_json::to_value(version).map_or_else(|_| String::new(), |name| name.to_string());
        return different("model.decoder", name(trained.model.decoder), name(config.decoder));
    }
    let mut decoder = of.decoder.clone();
    decoder.follow(&config.head_options());
    let num_classes = i64::try_from(num_classes).expect("a handful of modalities");
    let sizes = prsmed::Config { lora, decoder, num_classes, ..of.clone() };
    let mask_reader = config.reads_masks().then(|| of.mask_reader.unwrap_or_else(|| sizes.fitting_reader()));
    Ok(prsmed::Config { mask_reader, ..sizes })
}
