//! What a generator is made of: sizes of its networks, rules of its scheduler, tokenizers, and where its weights lie.
//!
//! Source: the folder layout of Hugging Face's diffusers (`model_index.json`, one folder for each part).

use super::settings::RANDOM;
use crate::data::text::clip_bpe::ClipTokenizer;
use crate::hub::of_variant;
use crate::models::diffusion::sampler::{self, SchedulerConfig};
use crate::models::diffusion::{controlnet, text, unet, vae};
use crate::tensor::store::Store;
use crate::tensor::weights::Archive;
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Sizes and rules of a generator, without weights.
#[derive(Debug, Clone)]
pub struct Blueprint {
    /// The denoising network.
    pub unet: unet::Config,
    /// The autoencoder.
    pub vae: vae::Config,
    /// Text encoders: one, or SDXL's two.
    pub texts: Vec<text::Config>,
    /// Mask to residuals.
    pub controlnet: Option<controlnet::Config>,
    /// Noise levels.
    pub scheduler: SchedulerConfig,
    /// The sampler that the pipeline names.
    pub sampler: sampler::Kind,
    /// SDXL's rule: an absent negative prompt is all zeros, not the encoding of nothing.
    pub zero_without_negative: bool,
    /// Where weights and tokenizers lie.
    pub weights: Weights,
}

/// Where weights come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// Folders of diffusers' layout.
    Files {
        /// The pipeline.
        root: PathBuf,
        /// The ControlNet.
        controlnet: Option<PathBuf>,
        /// Preferred variant of weight files; empty = plain.
        variant: String,
    },
    /// Random numbers from the run's seed.
    Random,
}

/// Sizes that `random:NAME` knows.
const RANDOM_SIZES: [&str; 5] = ["tiny", "tiny-sdxl", "sd15", "sd21", "sdxl"];

impl Blueprint {
    /// The generator that `model` names: `random:SIZE`, or the folder `root` that was found for it.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown size; [`Error::Weights`] for a folder that lacks a part or has sizes that are not
    /// supported; [`Error::Io`].
    pub fn open(model: &str, root: &Path, controlnet: Option<&Path>, variant: &str) -> Result<Self> {
        match model.strip_prefix(RANDOM) {
            Some(size) => Self::random(size, controlnet.is_some()),
            None => Self::read(root, controlnet, variant),
        }
    }

    /// A generator of random weights; its pictures are noise, its memory and time are real.
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
            sampler: sampler::Kind::Euler,
            weights: Weights::Random,
        })
    }

    fn read(root: &Path, controlnet: Option<&Path>, variant: &str) -> Result<Self> {
        let index_file = root.join("model_index.json");
        if !index_file.exists() {
            let hint = "name a folder in diffusers' layout (`model_index.json`, `unet/`, `vae/`, ...); single-file \
                        checkpoints are converted by `StableDiffusionPipeline.from_single_file(..).save_pretrained(..)`";
            return Err(Error::weights(root, "holds no `model_index.json`", hint));
        }
        let index: serde_json::Value = read_json(&index_file)?;
        let unet: unet::Config = read_json(&root.join("unet/config.json"))?;
        unet.check().map_err(|error| at(&root.join("unet/config.json"), &error))?;
        let vae: vae::Config = read_json(&root.join("vae/config.json"))?;
        vae.check().map_err(|error| at(&root.join("vae/config.json"), &error))?;
        let folders: &[&str] = if unet.is_sdxl() { &["text_encoder", "text_encoder_2"] } else { &["text_encoder"] };
        let read = |folder: &&str| read_json(&root.join(folder).join("config.json"));
        let texts = folders.iter().map(read).collect::<Result<Vec<text::Config>>>()?;
        let scheduler_file = root.join("scheduler/scheduler_config.json");
        let scheduler = SchedulerConfig::open(&scheduler_file)?;
        let text = std::fs::read_to_string(&scheduler_file).map_err(Error::io(&scheduler_file, "read"))?;
        let control = controlnet.map(|folder| read_json(&folder.join("config.json"))).transpose()?;
        let zero = index.get("force_zeros_for_empty_prompt").and_then(serde_json::Value::as_bool);
        let this = Self {
            zero_without_negative: zero.unwrap_or(false) && unet.is_sdxl(),
            unet,
            vae,
            texts,
            controlnet: control,
            scheduler,
            sampler: sampler_of(&text),
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
        if context != self.unet.cross_attention_dim {
            let reason =
                format!("its text encoders are {context} wide, its UNet expects {}", self.unet.cross_attention_dim);
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

    /// Whether the UNet sees the mask and the masked picture.
    pub fn inpaints(&self) -> bool {
        self.unet.in_channels == 9
    }

    /// One tokenizer for each text encoder.
    ///
    /// # Errors
    /// [`Error::Weights`] for missing or damaged files.
    pub fn tokenizers(&self) -> Result<Vec<ClipTokenizer>> {
        match &self.weights {
            Weights::Random => self
                .texts
                .iter()
                .map(|text| ClipTokenizer::bytes(usize::try_from(text.vocab_size).unwrap_or(0)))
                .collect(),
            Weights::Files { root, .. } => {
                let folders = ["tokenizer", "tokenizer_2"];
                self.texts.iter().zip(folders).map(|(_, folder)| ClipTokenizer::open(&root.join(folder))).collect()
            }
        }
    }

    /// What identifies the weights: the SHA-256 of all weight files, one after another.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn digest(&self) -> Result<String> {
        let Weights::Files { .. } = &self.weights else { return Ok("random".into()) };
        let mut hash = Sha256::new();
        for part in self.parts() {
            for file in self.files(part)? {
                digest_file(&file, &mut hash)?;
            }
        }
        Ok(format!("{:x}", hash.finalize()))
    }

    fn parts(&self) -> Vec<Part> {
        let mut parts = vec![Part::Unet, Part::Vae];
        parts.extend((0..self.texts.len()).map(Part::Text));
        parts.extend(self.controlnet.is_some().then_some(Part::ControlNet));
        parts
    }

    fn folder(&self, part: Part) -> Option<PathBuf> {
        let Weights::Files { root, controlnet, .. } = &self.weights else { return None };
        match part {
            Part::Unet => Some(root.join("unet")),
            Part::Vae => Some(root.join("vae")),
            Part::Text(0) => Some(root.join("text_encoder")),
            Part::Text(_) => Some(root.join("text_encoder_2")),
            Part::ControlNet => controlnet.clone(),
        }
    }

    /// The files to open for `part`: one, or the shards.
    fn files(&self, part: Part) -> Result<Vec<PathBuf>> {
        let (Some(folder), Weights::Files { variant, .. }) = (self.folder(part), &self.weights) else {
            return Ok(Vec::new());
        };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(Error::io(&folder, "list"))? {
            names.push(entry.map_err(Error::io(&folder, "list"))?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let files: Vec<PathBuf> = of_variant(&names, variant).into_iter().map(|name| folder.join(name)).collect();
        if files.is_empty() {
            let pickles = names.iter().any(|name| [".bin", ".ckpt"].iter().any(|end| name.ends_with(end)));
            let hint = if pickles {
                "it has PyTorch pickles only: save the pipeline again with `safe_serialization=True`"
            } else {
                "download the pipeline again; see `augment.variant` for files such as `*.fp16.safetensors`"
            };
            return Err(Error::weights(folder, "holds no safetensors of this network", hint));
        }
        Ok(files)
    }

    /// Checks, from their headers alone, that the weights of every part are there and fit.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub fn check_files(&self) -> Result<()> {
        for part in self.parts() {
            for file in self.files(part)? {
                Archive::open(&file)?;
            }
        }
        Ok(())
    }

    /// Fills `store`, the tensors of `part`. Does nothing for random weights, whose stores initialise themselves.
    ///
    /// # Errors
    /// [`Error::Weights`] naming missing, unexpected and mis-shaped tensors.
    pub fn fill(&self, part: Part, store: &Store) -> Result<()> {
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
                let Some(mut target) = store.get(&name) else {
                    let hint = "use weights and `config.json` of the same pipeline";
                    return Err(Error::weights(file, format!("`{stored}` belongs to no layer"), hint));
                };
                copy(&archive, stored, &mut target)?;
                missing.retain(|other| *other != name);
            }
        }
        match missing.first() {
            None => Ok(()),
            Some(first) => {
                let reason = format!("{} tensors are missing, first `{first}`", missing.len());
                Err(Error::weights(&files[0], reason, "download the file again, or check `config.json` beside it"))
            }
        }
    }
}

/// The sampler nearest to the class that a `scheduler_config.json` (which may hold `-Infinity`, no JSON) names: PNDM
/// (Stable Diffusion 1.5's) is a multistep DDIM.
fn sampler_of(text: &str) -> sampler::Kind {
    let line = text.lines().find(|line| line.contains("\"_class_name\"")).unwrap_or_default();
    let is = |names: &[&str]| names.iter().any(|name| line.contains(name));
    if is(&["DDIM", "PNDM", "DDPM"]) {
        sampler::Kind::Ddim
    } else if is(&["DPMSolver"]) {
        sampler::Kind::DpmPlusPlus2M
    } else {
        sampler::Kind::Euler
    }
}

/// The usual eight pixels for a latent, at small widths.
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

/// A text tower that knows bytes and two specials.
fn tiny_text() -> text::Config {
    text::Config { vocab_size: 514, projection_dim: 32, ..text::Config::tiny() }
}

/// Small, with SDXL's second conditioning.
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
pub enum Part {
    /// `unet/`
    Unet,
    /// `vae/`
    Vae,
    /// `text_encoder/` and `text_encoder_2/`
    Text(usize),
    /// A folder of its own.
    ControlNet,
}

impl Part {
    /// The name a stored tensor has now.
    fn current_name(self, stored: &str) -> String {
        match self {
            Self::Vae => vae::current_name(stored),
            Self::Text(_) => text::current_name(stored),
            Self::Unet | Self::ControlNet => stored.to_owned(),
        }
    }
}

/// Copies `stored`; a 1x1 convolution fits a linear layer and the other way round.
fn copy(archive: &Archive, stored: &str, target: &mut crate::tensor::Tensor) -> Result<()> {
    let shape = archive.info(stored).map(|info| info.shape.clone()).unwrap_or_default();
    let wanted = target.size();
    let squeezed: Vec<i64> = if shape.len() == 4 && shape[2..] == [1, 1] { shape[..2].to_vec() } else { shape.clone() };
    if shape != wanted && squeezed == wanted {
        return archive.copy_into(stored, &mut target.view(shape.as_slice()));
    }
    archive.copy_into(stored, target)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).map_err(Error::io(path, "read"))?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::weights(path, error.to_string(), "download or copy the pipeline again"))
}

fn at(path: &Path, error: &Error) -> Error {
    Error::weights(path, error.to_string(), error.hint())
}

/// Every byte: a fine-tuned copy may differ in the middle only.
fn digest_file(path: &Path, hash: &mut Sha256) -> Result<()> {
    let mut file = std::fs::File::open(path).map_err(Error::io(path, "open"))?;
    std::io::copy(&mut file, hash).map_err(Error::io(path, "read"))?;
    Ok(())
}
