//! Pipeline config of a generator: sizes of its networks, scheduler settings, tokenizers, and the location of its
//! weights.
//!
//! Source: the folder layout of Hugging Face's diffusers (`model_index.json`, one folder per network).

use super::settings::{LAYOUT, RANDOM};
use crate::data::text::clip_bpe::PromptTokenizer;
use crate::hub::of_variant;
use crate::models::diffusion::sampler::{SamplerKind, SchedulerConfig};
use crate::models::diffusion::{controlnet, text, unet, vae};
use crate::tensor::Tensor;
use crate::tensor::store::Store;
use crate::tensor::weights::{Archive, read_json};
use crate::{Error, Result, files};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Sizes and settings of a generator, without weights.
#[derive(Debug, Clone)]
pub struct PipelineConfig {
    /// The denoising network.
    pub unet: unet::Config,
    /// The autoencoder.
    pub vae: vae::Config,
    /// Text encoders: one, or two for SDXL.
    pub texts: Vec<text::Config>,
    /// ControlNet, if there is one.
    pub controlnet: Option<controlnet::Config>,
    /// Noise schedule.
    pub scheduler: SchedulerConfig,
    /// The sampler that the pipeline names.
    pub sampler: SamplerKind,
    /// Whether an absent negative prompt becomes zeros instead of an encoded empty text (SDXL).
    pub zero_without_negative: bool,
    /// Location of weights and tokenizers.
    pub weights: Weights,
}

/// Source of the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// Folders of diffusers' layout.
    Files {
        /// Folder of the pipeline.
        root: PathBuf,
        /// Folder of the ControlNet.
        controlnet: Option<PathBuf>,
        /// Preferred variant of weight files; empty = files without a variant.
        variant: String,
    },
    /// Random weights from the run's seed.
    Random,
}

/// Folders of the text encoders.
const TEXT_FOLDERS: [&str; 2] = ["text_encoder", "text_encoder_2"];
const HINT: &str = "download or copy the pipeline again";
/// Value used as the SHA-256 of random weights.
pub const RANDOM_DIGEST: &str = "random";

/// Sizes that `random:NAME` knows.
const RANDOM_SIZES: [&str; 5] = ["tiny", "tiny-sdxl", "sd15", "sd21", "sdxl"];

impl PipelineConfig {
    /// The generator that `model` names: `random:SIZE`, or the folder `root` that was resolved for it.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown size; [`Error::Weights`] for a folder without a part or with unsupported
    /// sizes; [`Error::Io`].
    pub fn open(model: &str, root: &Path, controlnet: Option<&Path>, variant: &str) -> Result<Self> {
        match model.strip_prefix(RANDOM) {
            Some(size) => Self::random(size, controlnet.is_some()),
            None => Self::read(root, controlnet, variant),
        }
    }

    /// A generator with random weights. Its images are noise; its memory and time are realistic.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown size.
    pub fn random(size: &str, with_controlnet: bool) -> Result<Self> {
        let (unet, vae, texts) = match size {
            "tiny" => (unet::Config::tiny(), tiny_vae(), vec![tiny_text()]),
            "tiny-sdxl" => (tiny_sdxl(), tiny_vae(), vec![tiny_text(), tiny_text()]),
            "sd15" => (unet::Config::sd15(), vae::Config::sd(), vec![text::Config::clip_l()]),
            "sd21" => (unet::Config::sd21(), vae::Config::sd(), vec![text::Config::open_clip_h()]),
            "sdxl" => {
                (unet::Config::sdxl(), vae::Config::sdxl(), vec![text::Config::clip_l(), text::Config::clip_big_g()])
            }
            other => {
                let hint = format!("use one of `{RANDOM}{}`", RANDOM_SIZES.join(&format!("`, `{RANDOM}")));
                return Err(Error::config("augment.model", format!("there is no size `{other}`"), hint));
            }
        };
        Ok(Self {
            controlnet: with_controlnet.then(|| controlnet::Config::of(unet.clone())),
            zero_without_negative: unet.is_sdxl(),
            unet,
            vae,
            texts,
            scheduler: SchedulerConfig::stable_diffusion(),
            sampler: SamplerKind::Euler,
            weights: Weights::Random,
        })
    }

    fn read(root: &Path, controlnet: Option<&Path>, variant: &str) -> Result<Self> {
        let index_file = root.join("model_index.json");
        if !index_file.exists() {
            let reason = if root.is_file() { "is a file" } else { "contains no `model_index.json`" };
            return Err(Error::weights(root, reason, LAYOUT));
        }
        let index: serde_json::Value = read_json(&index_file, HINT)?;
        let (unet_file, vae_file) = (root.join("unet/config.json"), root.join("vae/config.json"));
        let unet: unet::Config = read_json(&unet_file, HINT)?;
        unet.check().map_err(at(&unet_file))?;
        let vae: vae::Config = read_json(&vae_file, HINT)?;
        vae.check().map_err(at(&vae_file))?;
        let folders = TEXT_FOLDERS[..if unet.is_sdxl() { 2 } else { 1 }].iter().map(|folder| root.join(folder));
        let folders: Vec<PathBuf> = folders.collect();
        let read = |folder: &PathBuf| read_json(&folder.join("config.json"), HINT);
        let texts = folders.iter().map(read).collect::<Result<Vec<text::Config>>>()?;
        texts.iter().zip(&folders).try_for_each(|(text, folder)| text.check().map_err(at(folder)))?;
        let (scheduler, sampler) = read_scheduler(root)?;
        let zero = index.get("force_zeros_for_empty_prompt").and_then(serde_json::Value::as_bool);
        let this = Self {
            zero_without_negative: zero.unwrap_or(false) && unet.is_sdxl(),
            unet,
            vae,
            texts,
            controlnet: read_controlnet(controlnet)?,
            scheduler,
            sampler,
            weights: Weights::Files {
                root: root.to_path_buf(),
                controlnet: controlnet.map(Path::to_path_buf),
                variant: variant.to_owned(),
            },
        };
        this.check(root)?;
        Ok(this)
    }

    fn check(&self, root: &Path) -> Result<()> {
        let context: i64 = self.texts.iter().map(|text| text.hidden_size).sum();
        let expected = self.unet.cross_attention_dim;
        if context != expected {
            let reason = format!("its text encoders have width {context}, its UNet expects {expected}");
            return Err(Error::weights(root, reason, "copy or download the whole pipeline again"));
        }
        if !matches!(self.unet.in_channels, 4 | 9) {
            let reason = format!("its UNet takes {} channels", self.unet.in_channels);
            return Err(Error::weights(root, reason, "use a text-to-image (4) or inpainting (9) pipeline"));
        }
        Ok(())
    }

    /// Name of the family: `SD 1.x`, `SD 2.x`, `SDXL`, `small`.
    pub fn family(&self) -> &'static str {
        match (self.unet.is_sdxl(), self.unet.cross_attention_dim) {
            (true, 2048) => "SDXL",
            (false, 768) => "SD 1.x",
            (false, 1024) => "SD 2.x",
            _ => "small",
        }
    }

    /// Whether the UNet takes the mask and the masked image as input.
    pub fn inpaints(&self) -> bool {
        self.unet.in_channels == 9
    }

    /// One tokenizer for each text encoder.
    ///
    /// # Errors
    /// [`Error::Weights`] for missing or damaged files.
    pub fn tokenizers(&self) -> Result<Vec<PromptTokenizer>> {
        let open = |(text, folder): (&text::Config, &str)| match &self.weights {
            Weights::Random => PromptTokenizer::bytes(usize::try_from(text.vocab_size).unwrap_or(0)),
            Weights::Files { root, .. } => PromptTokenizer::open(&root.join(folder)),
        };
        self.texts.iter().zip(["tokenizer", "tokenizer_2"]).map(open).collect()
    }

    /// Whether no weights were read from files.
    pub fn is_random(&self) -> bool {
        self.weights == Weights::Random
    }

    /// SHA-256 over all weight files; it identifies the weights.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn digest(&self) -> Result<String> {
        Ok(self.weight_digests()?.pop().map_or_else(|| RANDOM_DIGEST.into(), |(_, hash)| hash))
    }

    /// Each weight file (its folder and name) with the SHA-256 over it and the files before it; all are read once. Empty for
    /// random weights.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn weight_digests(&self) -> Result<Vec<(String, String)>> {
        if self.is_random() {
            return Ok(Vec::new());
        }
        let mut hash = Sha256::new();
        let mut all = Vec::new();
        for file in self.all_files()? {
            // every byte, because a fine-tuned copy may differ only in the middle
            let mut opened = files::open(&file).map_err(Error::io(&file, "open"))?;
            std::io::copy(&mut opened, &mut hash).map_err(Error::io(&file, "read"))?;
            let parts: Vec<_> = file.iter().rev().take(2).map(|part| part.to_string_lossy()).collect();
            let name = parts.into_iter().rev().collect::<Vec<_>>().join("/");
            all.push((name, format!("{:x}", hash.clone().finalize())));
        }
        Ok(all)
    }

    /// The weight files of all parts.
    fn all_files(&self) -> Result<Vec<PathBuf>> {
        let mut parts = vec![PipelinePart::Unet, PipelinePart::Vae];
        parts.extend((0..self.texts.len()).map(PipelinePart::Text));
        parts.extend(self.controlnet.is_some().then_some(PipelinePart::ControlNet));
        let mut all = Vec::new();
        for file in parts.into_iter().map(|part| self.files(part)).collect::<Result<Vec<_>>>()?.concat() {
            if !all.contains(&file) {
                all.push(file);
            }
        }
        Ok(all)
    }

    /// Weight files of `part`: one file, or all shards.
    fn files(&self, part: PipelinePart) -> Result<Vec<PathBuf>> {
        let Weights::Files { root, controlnet, variant } = &self.weights else { return Ok(Vec::new()) };
        let folder = match part {
            PipelinePart::Unet => root.join("unet"),
            PipelinePart::Vae => root.join("vae"),
            PipelinePart::Text(number) => root.join(TEXT_FOLDERS[number]),
            PipelinePart::ControlNet => match controlnet {
                Some(folder) => folder.clone(),
                None => return Ok(Vec::new()),
            },
        };
        let listed = || -> std::io::Result<Vec<String>> {
            std::fs::read_dir(&folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        };
        let mut names = listed().map_err(Error::io(&folder, "list"))?;
        names.sort();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let files: Vec<PathBuf> = of_variant(&names, variant).into_iter().map(|name| folder.join(name)).collect();
        if files.is_empty() {
            let has_pickles = names.iter().any(|name| [".bin", ".ckpt"].iter().any(|end| name.ends_with(end)));
            let hint = if has_pickles {
                "it contains PyTorch pickles only: save the pipeline again with `safe_serialization=True`"
            } else {
                "download the pipeline again; see `augment.variant` for files such as `*.fp16.safetensors`"
            };
            return Err(Error::weights(folder, "contains no safetensors file of this network", hint));
        }
        Ok(files)
    }

    /// Checks that the weight files of every part exist and have valid headers.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub fn check_files(&self) -> Result<()> {
        self.all_files()?.iter().try_for_each(|file| Archive::open(file).map(drop))
    }

    /// Loads the weights of `part` into `store`. Does nothing for random weights, which are initialised when a store
    /// is built.
    ///
    /// # Errors
    /// [`Error::Weights`] naming missing, unexpected and mis-shaped tensors.
    pub fn fill(&self, part: PipelinePart, store: &Store) -> Result<()> {
        self.fill_into(part, store, &|_, tensor| tensor)
    }

    /// As [`Self::fill`]; `place(name, tensor)` is the part of a tensor of `store` that receives the stored one.
    ///
    /// # Errors
    /// As [`Self::fill`].
    pub fn fill_into(&self, part: PipelinePart, store: &Store, place: &dyn Fn(&str, Tensor) -> Tensor) -> Result<()> {
        let files = self.files(part)?;
        if files.is_empty() {
            return Ok(());
        }
        let mut missing: Vec<String> = store.entries().into_iter().map(|entry| entry.name).collect();
        for file in &files {
            let archive = Archive::open(file)?;
            for stored in archive.names() {
                if text::is_leftover(stored) {
                    continue;
                }
                let name = part.current_name(stored);
                let Some(target) = store.get(&name) else {
                    let hint = "use weights and `config.json` of the same pipeline";
                    return Err(Error::weights(file, format!("`{stored}` belongs to no layer"), hint));
                };
                copy(&archive, stored, &mut place(&name, target))?;
                missing.retain(|other| *other != name);
            }
        }
        let Some(first) = missing.first() else { return Ok(()) };
        let reason = format!("{} tensors are missing, first `{first}`", missing.len());
        Err(Error::weights(&files[0], reason, "download the file again, or check the `config.json` in its folder"))
    }
}

/// The ControlNet in `folder`.
fn read_controlnet(folder: Option<&Path>) -> Result<Option<controlnet::Config>> {
    let Some(folder) = folder else { return Ok(None) };
    let config: controlnet::Config = read_json(&folder.join("config.json"), HINT)?;
    config.check().map_err(at(folder))?;
    Ok(Some(config))
}

/// Noise schedule and sampler of the pipeline in `root`.
fn read_scheduler(root: &Path) -> Result<(SchedulerConfig, SamplerKind)> {
    let file = root.join("scheduler/scheduler_config.json");
    let scheduler = SchedulerConfig::open(&file)?;
    let text = files::read_to_string(&file, files::MAX_TEXT).map_err(Error::io(&file, "read"))?;
    Ok((scheduler, sampler_of(&text)))
}

/// The supported sampler closest to the scheduler class in `scheduler_config.json`. The file may contain `-Infinity`,
/// which is not JSON, so it is searched as text. PNDM (Stable Diffusion 1.5) becomes a multistep DDIM.
fn sampler_of(text: &str) -> SamplerKind {
    let line = text.lines().find(|line| line.contains("\"_class_name\"")).unwrap_or_default();
    let nearest = [
        ("DDIM", SamplerKind::Ddim),
        ("PNDM", SamplerKind::Ddim),
        ("DDPM", SamplerKind::Ddim),
        ("DPMSolver", SamplerKind::DpmPlusPlus2M),
    ];
    nearest.iter().find(|(name, _)| line.contains(name)).map_or(SamplerKind::Euler, |(_, kind)| *kind)
}

/// An autoencoder of small width with the usual eight pixels per latent cell.
fn tiny_vae() -> vae::Config {
    let tiny = vae::Config::tiny();
    let four = |types: &[String]| types.iter().cycle().take(4).cloned().collect();
    vae::Config {
        block_out_channels: vec![16, 16, 32, 32],
        down_block_types: four(&tiny.down_block_types),
        up_block_types: four(&tiny.up_block_types),
        ..tiny
    }
}

/// A text encoder whose vocabulary is bytes and two special tokens.
fn tiny_text() -> text::Config {
    text::Config { vocab_size: 514, projection_dim: 32, ..text::Config::tiny() }
}

/// A small UNet with SDXL's additional conditioning.
fn tiny_sdxl() -> unet::Config {
    let published = unet::Config::sdxl();
    unet::Config {
        cross_attention_dim: 64,
        use_linear_projection: true,
        addition_embed_type: published.addition_embed_type,
        addition_time_embed_dim: Some(8),
        projection_class_embeddings_input_dim: Some(80),
        ..unet::Config::tiny()
    }
}

/// A network of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PipelinePart {
    /// `unet/`
    Unet,
    /// `vae/`
    Vae,
    /// `text_encoder/` and `text_encoder_2/`
    Text(usize),
    /// A separate folder.
    ControlNet,
}

impl PipelinePart {
    /// Current name of a stored tensor.
    fn current_name(self, stored: &str) -> String {
        match self {
            Self::Vae => vae::current_name(stored),
            Self::Text(_) => text::current_name(stored),
            Self::Unet | Self::ControlNet => stored.to_owned(),
        }
    }
}

/// Copies the tensor `stored`. Weights of a 1x1 convolution and of a linear layer are interchangeable.
fn copy(archive: &Archive, stored: &str, target: &mut Tensor) -> Result<()> {
    let shape = archive.info(stored).map(|info| info.shape.clone()).unwrap_or_default();
    if matches!(shape[..], [_, _, 1, 1]) && shape[..2] == target.size() {
        return archive.copy_into(stored, &mut target.view(shape.as_slice()));
    }
    archive.copy_into(stored, target)
}

/// An error of the sizes in `path`.
fn at(path: &Path) -> impl FnOnce(Error) -> Error {
    move |error| Error::weights(path, error.to_string(), error.hint())
}
