//! Builds or loads a model, from settings or from a run folder.

pub use super::architecture::check_parts;
pub use super::assembly::{Assembly, Build, Description, RunOverrides, pixels};
pub use super::config::{BatchNorm, ModelConfig, RANDOM, Sizes};
pub use super::description::{check_host_layers, describe, verify};

use super::architecture::{check_encoder, check_llm_weights};
use super::assembly::is_published;
use super::description::{check_adapters, check_sizes};
use super::needs;
use super::weights::{self, Found};
use crate::data::familiarity::images::KnownImages;
use crate::data::familiarity::questions::KnownQuestions;
use crate::data::image::PixelConfig;
use crate::data::text::TextTokenizer;
use crate::models::prsmed::{self, BuildOptions, PrsMed};
use crate::models::{clip, mask_decoder, mistral, tiny_vit};
use crate::nn::LoraConfig;
use crate::tensor::collective::Peers;
use crate::tensor::weights::Archive;
use crate::tensor::{Device, guard, kernels, rng};
use crate::trainer::FirstLayers;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// Builds a new model from settings. A model with random weights trains its tokenizer on `texts`.
///
/// # Errors
/// [`Error::Config`] for sizes that do not fit; [`Error::Weights`] and [`Error::Hub`] from the files.
pub fn create(
    config: &ModelConfig,
    lora: LoraConfig,
    modalities: &[String],
    texts: &[&str],
    build: Build,
) -> Result<Assembly> {
    let found = Found::locate(config, build)?;
    let tokenizer = match &found.base {
        Some(folder) => TextTokenizer::open(folder)?,
        None => TextTokenizer::train(texts, sizes(config)?.vocab_size)?,
    };
    let sizes = model_sizes(config, lora, modalities.len(), &found, tokenizer.vocab_size())?;
    if let Some(base) = found.base.as_ref().filter(|_| !build.allow_partial) {
        check_llm_weights(base, &sizes.llm)?;
    }
    check_sizes(config, &sizes)?;
    check_adapters(config, &sizes)?;
    let pixels = pixels(config, &sizes);
    let description = Description::new(config.clone(), sizes, modalities.to_vec(), pixels, found.sources());
    let of_kernels = check_kernels(build.device)?;
    rng::seed(build.seed);
    let mut model = guard::guard(|| Ok(PrsMed::new(&description.sizes, build_options(config, build, true))))?;
    let mut warnings = found.load(&model, build)?;
    divide(&mut model, config, build)?;
    warnings.extend(of_kernels);
    Ok(Assembly {
        model,
        tokenizer: Arc::new(tokenizer),
        description,
        questions: None,
        images: None,
        warnings,
        members: Vec::new(),
    })
}

/// Loads the model of a checkpoint folder of this program or of the original code.
///
/// # Errors
/// [`Error::Weights`] if the folder is neither, or incomplete.
pub fn open(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Assembly> {
    let description = described(folder, overrides, build)?;
    check_host_layers(&description.model)?;
    let of_kernels = check_kernels(build.device)?;
    let options = build_options(&description.model, build, false);
    let mut model = guard::guard(|| Ok(PrsMed::new(&description.sizes, options)))?;
    let mut warnings = weights::load_run(folder, &description, &model, build)?;
    divide(&mut model, &description.model, build)?;
    warnings.extend(of_kernels);
    let (base, tower) = weights::base_of(folder, &description, build)?;
    warnings.extend(description.source_warnings(&[("base", Some(&base)), ("vision_tower", tower.as_deref())]));
    let tokenizer = TextTokenizer::open(&needs::tokenizer_folder(folder, &base))?;
    let questions = KnownQuestions::open(folder)?.map(Arc::new);
    let images = KnownImages::open(folder)?.map(Arc::new);
    Ok(Assembly {
        model,
        tokenizer: Arc::new(tokenizer),
        description,
        questions,
        images,
        warnings,
        members: Vec::new(),
    })
}

/// The description of a checkpoint folder (of this program, or published), with `overrides`.
///
/// # Errors
/// [`Error::Weights`] if the folder is neither.
pub(super) fn described(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Description> {
    let mut description =
        if is_published(folder) { weights::describe_published(folder, overrides, build)? } else { describe(folder)? };
    if let Some(base) = &overrides.base {
        description.model.base.clone_from(base);
    }
    if let Some(tower) = &overrides.vision_tower {
        description.model.vision_tower.clone_from(tower);
    }
    if let Some(quantization) = overrides.quantization {
        description.model.quantization = quantization;
    }
    description.model = resident_on_cpu(description.model, build.device);
    if let Some(layers) = overrides.stream_layers {
        description.model.stream_layers = layers;
    }
    if let Some(divides) = overrides.divide_layers {
        description.model.divide_layers = divides;
    }
    if let Some(streams) = overrides.stream_vision {
        description.model.stream_vision = streams;
    }
    if let Some(semantics) = overrides.semantics {
        description.model.semantics = semantics;
        description.sizes.decoder.attention_dropout = semantics.drops_attention();
        let labels = description.pixels.labels;
        description.pixels = PixelConfig { labels, ..pixels(&description.model, &description.sizes) };
    }
    Ok(description)
}

/// The settings of a stored run for `device`: on the CPU, copies of weights would save nothing.
pub fn resident_on_cpu(model: ModelConfig, device: Device) -> ModelConfig {
    match device {
        Device::Cpu => {
            ModelConfig { stream_layers: FirstLayers::None, stream_vision: false, divide_layers: false, ..model }
        }
        _ => model,
    }
}

/// Checks the custom CUDA kernels before the first 4-bit weights need them; returns warnings.
pub(super) fn check_kernels(device: Device) -> Result<Vec<String>> {
    kernels::check(device)?;
    if device == Device::Cpu {
        return Ok(Vec::new());
    }
    // dropout, 4-bit weights and 8-bit optimizer state use them in every mode
    let all = kernels::unavailable().map(|reason| format!("custom CUDA kernels are off: {reason}"));
    let off = all.into_iter().chain(kernels::refusals());
    Ok(off.map(|reason| format!("{reason}. Plans underestimate memory without it")).collect())
}

pub(super) fn build_options(config: &ModelConfig, build: Build, initialise: bool) -> BuildOptions {
    BuildOptions {
        device: build.device,
        stored: build.kind,
        compute: build.kind,
        initialise,
        train_base: config.train_base,
        quantization: config.quantization,
        loads_base: config.base != RANDOM,
        host_layers: config.stream_layers.count(),
        host_vision: config.stream_vision,
        packed_attention: config.packed_attention,
        ranks: divided_among(config, build).map_or(1, Peers::size),
        reads_layers: divided_among(config, build).is_none_or(|peers| peers.rank() == 0),
    }
}

/// The processes that divide the frozen layers.
fn divided_among<'a>(config: &ModelConfig, build: Build<'a>) -> Option<&'a Peers> {
    build.peers.filter(|_| config.divide_layers)
}

/// Divides the loaded layers, if the settings ask for it.
pub(super) fn divide(model: &mut PrsMed, config: &ModelConfig, build: Build) -> Result<()> {
    let Some(peers) = divided_among(config, build) else { return Ok(()) };
    // a base that checkpoints contain
    guard::guard(|| model.divide(peers, config.base == RANDOM))
}

fn sizes(config: &ModelConfig) -> Result<&Sizes> {
    config.sizes.as_ref().ok_or_else(|| {
        Error::config(
            "model.sizes",
            "a model with random parts needs their sizes",
            "use `--preset tiny`, or give `model.base` and `model.image_encoder` real weights",
        )
    })
}

/// Model sizes from settings, without reading weights and without downloads. A base in a folder has the sizes of its
/// `config.json`, a base on the hub those of LLaVA-Med v1.5, unless [`check_parts`] has read its `config.json`. An image encoder with weights has those of TinySAM.
///
/// # Errors
/// [`Error::Config`] for random parts without sizes, and for sizes that do not fit; [`Error::Weights`] for a base that
/// does not exist or has no sizes in its `config.json`.
pub fn planned_sizes(config: &ModelConfig, lora: LoraConfig, num_classes: usize) -> Result<prsmed::Config> {
    let (clip, llm) = if config.base == RANDOM {
        let sizes = sizes(config)?;
        let vocab_size = i64::try_from(sizes.vocab_size).expect("a vocabulary");
        (sizes.clip.clone(), mistral::Config { vocab_size, ..sizes.llm.clone() })
    } else {
        let published = || (clip::Config::vit_l_14_336(), mistral::Config::mistral_7b());
        Found::local(config)?.base_sizes()?.unwrap_or_else(published)
    };
    let published = config.image_encoder != RANDOM;
    let encoder = if published { tiny_vit::Config::vit_t() } else { sizes(config)?.encoder.clone() };
    let sizes = assembled_sizes(config, lora, num_classes, (clip, llm, encoder));
    check_sizes(config, &sizes)?;
    check_adapters(config, &sizes)?;
    Ok(sizes)
}

fn model_sizes(
    config: &ModelConfig,
    lora: LoraConfig,
    num_classes: usize,
    found: &Found,
    vocab_size: i64,
) -> Result<prsmed::Config> {
    let (clip, llm) = match found.base_sizes()? {
        Some(found) => found,
        None => (sizes(config)?.clip.clone(), mistral::Config { vocab_size, ..sizes(config)?.llm.clone() }),
    };
    let encoder = match &found.image_encoder {
        Some(file) => {
            check_encoder(&Archive::open(file)?)?;
            tiny_vit::Config::vit_t()
        }
        None => sizes(config)?.encoder.clone(),
    };
    Ok(assembled_sizes(config, lora, num_classes, (clip, llm, encoder)))
}

fn assembled_sizes(
    config: &ModelConfig,
    lora: LoraConfig,
    num_classes: usize,
    (clip, llm, encoder): (clip::Config, mistral::Config, tiny_vit::Config),
) -> prsmed::Config {
    let published = mask_decoder::Config::published();
    let (hidden_dim, heads) =
        config.sizes.as_ref().map_or((published.hidden_dim, [published.cross_heads, published.self_heads]), |s| {
            (s.decoder_hidden_dim, s.decoder_heads)
        });
    let decoder = mask_decoder::Config {
        version: config.decoder,
        prompt_dim: llm.hidden_size,
        image_dim: encoder.out_dim,
        hidden_dim,
        cross_heads: heads[0],
        self_heads: heads[1],
        feed_forward_dim: 2 * encoder.out_dim,
        dropout: config.decoder_dropout,
        attention_dropout: config.semantics.drops_attention(),
        positions: config.decoder_positions,
        initial_bias: config.semantics.initial_bias(),
    };
    let num_classes = i64::try_from(num_classes).expect("a handful of modalities");
    prsmed::Config { clip, llm, lora, encoder, decoder, num_classes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Kind;
    use std::path::PathBuf;

    #[test]
    fn overrides_replace_the_base_and_the_vision_tower_of_a_run() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/old_names/run");
        let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
        let build = Build::new(Device::Cpu, Kind::Float, &locate);
        let parts = |overrides: &RunOverrides| {
            let model = described(&folder, overrides, build).unwrap().model;
            [model.base, model.vision_tower]
        };
        assert_eq!(parts(&RunOverrides::default()), [RANDOM, ""]);
        let overrides = RunOverrides {
            base: Some("other/base".into()),
            vision_tower: Some("other/tower".into()),
            ..RunOverrides::default()
        };
        assert_eq!(parts(&overrides), ["other/base", "other/tower"]);
    }
}
