//! From settings or a run folder to a model ready to train or use.

use super::Semantics;
use super::weights::{self, Found};
use crate::data::image::PixelConfig;
use crate::data::text::TextTokenizer;
use crate::models::prsmed::{self, BuildOptions, PrsMed};
use crate::models::{clip, mask_decoder, mistral, tiny_vit};
use crate::nn::{LoraConfig, Quantization};
use crate::tensor::{Device, Kind, guard, kernels, rng};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What `base` and `image_encoder` say for random weights.
pub const RANDOM: &str = "random";

/// Settings of the model (`model.*`).
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// `reference` or `corrected`.
    pub semantics: Semantics,
    /// Side of the segmenter's square input, pixels; a multiple of 16. Memory of the encoder and the mask grows with its
    /// square.
    pub image_size: i64,
    /// Language model with tower and projector: `hub:owner/name[@rev]`, a folder, or `random`.
    pub base: String,
    /// A separate CLIP repository or folder; empty = the tower inside `base`.
    pub vision_tower: String,
    /// TinySAM weights: a file, a folder, `hub:...`, or `random`.
    pub image_encoder: String,
    /// How the frozen layers of the language model are stored: `none` (in the dtype of `train.precision`), `nf4` (4 bits and
    /// a scale for each 64 weights), `nf4-double` (the scales in 8 bits too). Embeddings, norms, head, projector and tower
    /// stay as they are.
    #[serde(default)]
    pub quantization: Quantization,
    /// Train the language model, tower and projector too. Sensible only when they start from random weights.
    pub train_base: bool,
    /// Where batch normalisation takes its statistics from while training.
    pub batch_norm: BatchNorm,
    /// Published decoder: `v5` or `v6`.
    pub decoder: mask_decoder::Version,
    /// Dropout of the decoder, 0..1.
    pub decoder_dropout: f64,
    /// Add fixed positions to the decoder's image cells; the published decoder has none. Helps to tell the left lesion
    /// from the right one when training from random weights.
    #[serde(default)]
    pub decoder_positions: bool,
    /// Factor of the text loss.
    pub text_loss_weight: f64,
    /// Factor of the class loss.
    pub class_loss_weight: f64,
    /// Epochs during which the class loss counts.
    pub class_loss_epochs: u64,
    /// Longest text in ids, image id counted once; longer ones are cut.
    pub max_text_tokens: usize,
    /// Sizes of parts that start from random weights; parts with weights bring their own.
    pub sizes: Option<Sizes>,
}

/// Where batch normalisation takes its statistics from while training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BatchNorm {
    /// The running statistics stay as loaded (measured once on the first samples when the encoder starts from random
    /// weights). A gradient then does not depend on how samples are grouped into micro-batches.
    Frozen,
    /// Those of each micro-batch, as published.
    Batch,
}

/// Sizes of a model that starts from random weights.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// Vision tower.
    pub clip: clip::Config,
    /// Language model; `vocab_size` is replaced by the tokenizer's.
    pub llm: mistral::Config,
    /// Image encoder.
    pub encoder: tiny_vit::Config,
    /// Width of the decoder's prompt MLP.
    pub decoder_hidden_dim: i64,
    /// Heads of the decoder's cross- and self-attention.
    pub decoder_heads: [i64; 2],
    /// Pieces of a tokenizer trained on the data's texts.
    pub vocab_size: usize,
}

/// What a checkpoint folder says about itself (`model.json`).
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Description {
    /// Layout of the folder.
    pub format: u32,
    /// Settings it was trained with.
    pub model: ModelConfig,
    /// Sizes of all parts.
    pub sizes: prsmed::Config,
    /// Modality classes, index = label.
    pub modalities: Vec<String>,
    /// Preprocessing.
    pub pixels: PixelConfig,
}

/// A model with what is needed to feed and describe it.
#[derive(Debug)]
pub struct Assembly {
    /// The model.
    pub model: PrsMed,
    /// Its tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// What a checkpoint of it will say.
    pub description: Description,
    /// Keys that did not fit, when that was allowed.
    pub warnings: Vec<String>,
}

/// How a model is built.
#[derive(Clone, Copy)]
pub struct Build<'a> {
    /// Device of every tensor.
    pub device: Device,
    /// Dtype of frozen weights and arithmetic.
    pub kind: Kind,
    /// Seed of random weights.
    pub seed: u64,
    /// Turns `hub:...` into a local folder.
    pub locate: &'a dyn Fn(&str) -> Result<PathBuf>,
    /// Go on when keys are missing, unexpected or mis-shaped.
    pub allow_partial: bool,
    /// Folder for what later loads can use again (quantized weights); `None` keeps nothing.
    pub cache: Option<&'a Path>,
}

impl std::fmt::Debug for Build<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Build").field("device", &self.device).field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// A new model from settings.
///
/// `texts` are the training texts, for a tokenizer of random-weight models.
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
    check(config, &sizes)?;
    let description = Description {
        format: 1,
        model: config.clone(),
        pixels: pixels(config, &sizes),
        modalities: modalities.to_vec(),
        sizes,
    };
    let off = kernels_of(build.device)?;
    rng::seed(build.seed);
    let model = guard::guard(|| Ok(PrsMed::new(&description.sizes, build_options(config, build, true))))?;
    let mut warnings = found.load(&model, build)?;
    warnings.extend(off);
    Ok(Assembly { model, tokenizer: Arc::new(tokenizer), description, warnings })
}

/// What a run folder's reader may override.
#[derive(Debug, Clone, Default)]
pub struct RunOverrides {
    /// Another place of the language model.
    pub base: Option<String>,
    /// A separate CLIP tower.
    pub vision_tower: Option<String>,
    /// Another semantics.
    pub semantics: Option<Semantics>,
    /// Another way to store the frozen layers.
    pub quantization: Option<Quantization>,
}

/// The model of a checkpoint folder: ours, or one published by the original code.
///
/// # Errors
/// [`Error::Weights`] when the folder is neither, or incomplete.
pub fn open(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Assembly> {
    let description = described(folder, overrides, build)?;
    let off = kernels_of(build.device)?;
    let model = guard::guard(|| Ok(PrsMed::new(&description.sizes, build_options(&description.model, build, false))))?;
    let mut warnings = weights::load_run(folder, &description, &model, build)?;
    warnings.extend(off);
    let tokenizer = TextTokenizer::open(&folder.join("tokenizer"))?;
    Ok(Assembly { model, tokenizer: Arc::new(tokenizer), description, warnings })
}

/// What a checkpoint folder, ours or a published one, says about itself, with `overrides`.
///
/// # Errors
/// [`Error::Weights`] when the folder is neither.
pub(super) fn described(folder: &Path, overrides: &RunOverrides, build: Build) -> Result<Description> {
    let mut description = if weights::is_published(folder) {
        weights::describe_published(folder, overrides, build)?
    } else {
        describe(folder)?
    };
    if let Some(base) = &overrides.base {
        description.model.base.clone_from(base);
    }
    if let Some(tower) = &overrides.vision_tower {
        description.model.vision_tower.clone_from(tower);
    }
    if let Some(quantization) = overrides.quantization {
        description.model.quantization = quantization;
    }
    if let Some(semantics) = overrides.semantics {
        description.model.semantics = semantics;
        description.sizes.decoder.attention_dropout = semantics.drops_attention();
        description.pixels = pixels(&description.model, &description.sizes);
    }
    Ok(description)
}

/// Reads `model.json`.
///
/// # Errors
/// [`Error::Weights`] when it is missing or not ours.
pub fn describe(folder: &Path) -> Result<Description> {
    let path = folder.join(weights::DESCRIPTION);
    let hint = "give a run folder made by `prsmed train`, its `last/` or `best/`, or a published PRS-Med folder";
    let text =
        std::fs::read(&path).map_err(|e| Error::weights(folder, format!("not a checkpoint folder ({e})"), hint))?;
    serde_json::from_slice(&text).map_err(|e| Error::weights(&path, e.to_string(), hint))
}

/// Before the first weights in 4 bits are read by a kernel of ours: what there is to say of that.
fn kernels_of(device: Device) -> Result<Option<String>> {
    kernels::check(device)?;
    // dropout, weights in 4 bits and moments in 8 bits have one in every mode
    let reason = if device == Device::Cpu { None } else { kernels::unavailable() };
    Ok(reason.map(|reason| format!("kernels of our own are off, and plans count less than is used then: {reason}")))
}

fn build_options(config: &ModelConfig, build: Build, initialise: bool) -> BuildOptions {
    BuildOptions {
        device: build.device,
        stored: build.kind,
        compute: build.kind,
        initialise,
        train_base: config.train_base,
        quantization: config.quantization,
        loads_base: config.base != RANDOM,
    }
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

/// The sizes that settings ask for, without reading weights or asking a network: a base in a folder has the sizes that it
/// states, one on the hub the published ones of LLaVA-Med v1.5, an image encoder with weights those of TinySAM.
///
/// # Errors
/// [`Error::Config`] for random parts without sizes, and for sizes that do not fit; [`Error::Weights`] for a base that is
/// not there or does not state its sizes.
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
    check(config, &sizes)?;
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
        Some(_) => tiny_vit::Config::vit_t(),
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

/// The preprocessing a model needs.
pub fn pixels(config: &ModelConfig, sizes: &prsmed::Config) -> PixelConfig {
    PixelConfig {
        clip_size: u32::try_from(sizes.clip.image_size).expect("checked sizes"),
        sam_size: u32::try_from(config.image_size).expect("checked sizes"),
        mask: config.semantics.mask_mode(),
        pad_offset: config.semantics.pad_offset(),
    }
}

fn check(config: &ModelConfig, sizes: &prsmed::Config) -> Result<()> {
    let divides = |key: &str, what: &str, whole: i64, part: i64| {
        if part > 0 && whole > 0 && whole % part == 0 {
            return Ok(());
        }
        Err(Error::config(
            key,
            format!("{what}: {whole} is not a positive multiple of {part}"),
            "change one of the two",
        ))
    };
    if config.decoder_positions {
        divides("model.sizes.encoder.out_dim", "channels and the four parts of positions", sizes.decoder.image_dim, 4)?;
    }
    divides("model.image_size", "pixels and the encoder's stride", config.image_size, tiny_vit::STRIDE)?;
    divides("model.sizes.clip", "image and patch", sizes.clip.image_size, sizes.clip.patch_size)?;
    divides("model.sizes.clip", "width and heads", sizes.clip.hidden_size, sizes.clip.num_attention_heads)?;
    divides("model.sizes.llm", "width and heads", sizes.llm.hidden_size, sizes.llm.num_attention_heads)?;
    divides(
        "model.sizes.llm",
        "query and key-value heads",
        sizes.llm.num_attention_heads,
        sizes.llm.num_key_value_heads,
    )?;
    divides("model.sizes.decoder_heads", "channels and heads", sizes.decoder.image_dim, sizes.decoder.cross_heads)?;
    divides("model.sizes.decoder_heads", "channels and heads", sizes.decoder.image_dim, sizes.decoder.self_heads)?;
    for i in 1..4 {
        let (dim, heads) = (sizes.encoder.embed_dims[i], sizes.encoder.num_heads[i]);
        divides("model.sizes.encoder", "channels and heads", dim, heads)?;
    }
    if sizes.lora.rank < 1 {
        return Err(Error::config(
            "lora.rank",
            format!("{} is not a rank", sizes.lora.rank),
            "use 1 or more, usually 16",
        ));
    }
    if config.train_base && config.base != RANDOM {
        let hint = "set `model.train_base=false`: LoRA adapts the base";
        return Err(Error::config("model.train_base", "the base has pretrained weights", hint));
    }
    if config.train_base && config.quantization != Quantization::None {
        let reason = format!("`{}` weights are frozen, `model.train_base` trains them", config.quantization.name());
        let hint = "set `model.train_base=false`, or `model.quantization=none`";
        return Err(Error::config("model.quantization", reason, hint));
    }
    Ok(())
}
