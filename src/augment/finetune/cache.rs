//! Latents of the training images and embeddings of their captions, encoded once and kept as files.
//!
//! A file is named after a hash of everything that its content depends on: weights, image or text, and size. So files
//! of other images or models are never read, and an interrupted preparation continues.

use crate::augment::inpaint_mask::Frame;
use crate::augment::pipeline::{Embedding, Placement, encode_prompts, tokenize};
use crate::augment::pipeline_config::{Part, PipelineConfig};
use crate::data::decode;
use crate::data::image::foreground;
use crate::event::{Event, Observer};
use crate::hub::free_bytes;
use crate::models::diffusion::vae::Vae;
use crate::tensor::store::Role;
use crate::tensor::weights::{Archive, sha256, write_safetensors};
use crate::tensor::{Device, Kind, Tensor, guard, no_grad};
use crate::units::Bytes;
use crate::{Error, Result, files};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Layout of the files.
const FORMAT: &str = "1";

/// An image with its mask.
#[derive(Debug, Clone, Copy)]
pub struct ImageFiles<'a> {
    /// The image.
    pub image: &'a Path,
    /// Its mask.
    pub mask: &'a Path,
}

/// What encoding needs.
pub struct Encoding<'a> {
    /// Sizes and files of the generator.
    pub pipeline_config: &'a PipelineConfig,
    /// Hash of its weights.
    pub model_sha256: &'a str,
    /// Device, dtype and seed of the networks.
    pub placement: Placement,
    /// Side of the images in pixels.
    pub image_size: i64,
    /// Receives progress.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: finished files stay, and the job ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
}

/// Encoded image; all tensors are fp32 on the CPU.
#[derive(Debug)]
pub struct Latents {
    /// Mean of the latents, `[c, s, s]`, scaled as the UNet expects.
    pub mean: Tensor,
    /// Their standard deviation.
    pub std: Tensor,
    /// Part of each cell that the lesion covers, `[1, s, s]`.
    pub lesion: Tensor,
    /// Part of each cell that is inside the image, `[1, s, s]`; the rest is padding.
    pub inside: Tensor,
}

/// The files of a training.
#[derive(Debug)]
pub struct Cache {
    latents: Vec<PathBuf>,
    texts: Vec<PathBuf>,
}

impl Cache {
    /// Encodes the images and texts whose files are missing in `folder`.
    ///
    /// # Errors
    /// [`Error::Data`] for an image that cannot be read, or whose mask has another size; [`Error::Config`] for a disk
    /// with too little room; [`Error::Weights`]; [`Error::Interrupted`]; typed errors of libtorch.
    pub fn fill(folder: &Path, images: &[ImageFiles], texts: &[String], encoding: &Encoding) -> Result<Self> {
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        let sums: Vec<String> = images
            .par_iter()
            .map(|files| Ok(format!("{} {}", sha256(files.image)?, sha256(files.mask)?)))
            .collect::<Result<_>>()?;
        let side = encoding.image_size.to_string();
        let image_path = |sums: &String| encoding.path(folder, "image", &[&side, sums]);
        let latents: Vec<PathBuf> = sums.iter().map(image_path).collect();
        let text_path = |text: &String| encoding.path(folder, "text", &[text]);
        let texts_at: Vec<PathBuf> = texts.iter().map(text_path).collect();
        let missing: Vec<usize> = (0..images.len()).filter(|&i| !is_whole(&latents[i])).collect();
        let missing_texts: Vec<usize> = (0..texts.len()).filter(|&i| !is_whole(&texts_at[i])).collect();
        encoding.check_room(folder, missing.len(), missing_texts.len())?;
        encoding.encode_texts(&missing_texts, texts, &texts_at)?;
        encoding.encode_images(&missing, images, &latents)?;
        Ok(Self { latents, texts: texts_at })
    }

    /// The latents of image `index`.
    ///
    /// # Errors
    /// [`Error::Weights`] for a file that is missing or damaged.
    pub fn latents(&self, index: usize) -> Result<Latents> {
        let archive = Archive::open(&self.latents[index])?;
        let read = |name: &str| archive.read(name);
        Ok(Latents { mean: read("mean")?, std: read("std")?, lesion: read("lesion")?, inside: read("inside")? })
    }

    /// The embedding of text `index`, fp32 on the CPU.
    ///
    /// # Errors
    /// As [`Self::latents`].
    pub fn embedding(&self, index: usize) -> Result<Embedding> {
        let archive = Archive::open(&self.texts[index])?;
        let pooled = archive.contains("pooled").then(|| archive.read("pooled")).transpose()?;
        Ok(Embedding { context: archive.read("context")?, pooled })
    }
}

/// True for a file that can be read. A file that was cut by a crash is written again.
fn is_whole(path: &Path) -> bool {
    path.is_file() && Archive::open(path).is_ok()
}

impl Encoding<'_> {
    fn path(&self, folder: &Path, what: &str, parts: &[&str]) -> PathBuf {
        let mut hash = Sha256::new();
        // weights that are not loaded depend on the seed
        let weights = format!("{} {} {:?}", self.model_sha256, self.placement.seed, self.placement.kind);
        for part in [FORMAT, what, &weights].iter().chain(parts) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        folder.join(format!("{what}-{}.safetensors", &format!("{:x}", hash.finalize())[..32]))
    }

    fn cells(&self) -> i64 {
        self.image_size / self.pipeline_config.vae.downscale()
    }

    fn check_room(&self, folder: &Path, images: usize, texts: usize) -> Result<()> {
        let image = 4 * self.cells().pow(2) * (2 * self.pipeline_config.vae.latent_channels + 2);
        let text = 4 * 77 * self.pipeline_config.unet.cross_attention_dim + 8192;
        let bytes = |count: usize, each: i64| count as u64 * u64::try_from(each).unwrap_or(0);
        let needed = bytes(images, image) + bytes(texts, text);
        match free_bytes(folder) {
            Some(free) if free < needed => {
                let (needed, free) = (Bytes(needed), Bytes(free));
                let reason = format!("latents and embeddings need {needed}, {} has {free} left", folder.display());
                Err(Error::config("--out", reason, "free some space, or choose another `--out`"))
            }
            _ => Ok(()),
        }
    }

    fn check_interrupt(&self) -> Result<()> {
        if self.interrupt.load(Ordering::SeqCst) { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn encode_texts(&self, missing: &[usize], texts: &[String], paths: &[PathBuf]) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        self.observer.on(&Event::Note(format!("encoding {} captions", missing.len())));
        let texts: Vec<String> = missing.iter().map(|&i| texts[i].clone()).collect();
        let (ids, cut) = tokenize(&self.pipeline_config.tokenizers()?, &texts)?;
        if let Some(&first) = cut.first() {
            let count = cut.len();
            let text = format!("{count} captions are longer than 77 tokens and were cut; the first: {}", texts[first]);
            self.observer.on(&Event::Warning(text));
        }
        let empty: Vec<bool> = texts.iter().map(String::is_empty).collect();
        let embeddings = encode_prompts(self.pipeline_config, self.placement, &ids, &empty, &[])?;
        for (embedding, &index) in embeddings.iter().zip(missing) {
            let wide = |tensor: &Tensor| tensor.to_kind(Kind::Float);
            let (context, pooled) = (wide(&embedding.context), embedding.pooled.as_ref().map(wide));
            let mut tensors = vec![("context", &context)];
            tensors.extend(pooled.as_ref().map(|pooled| ("pooled", pooled)));
            write_safetensors(&paths[index], &tensors, &BTreeMap::new())?;
        }
        Ok(())
    }

    fn encode_images(&self, missing: &[usize], images: &[ImageFiles], paths: &[PathBuf]) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        // fp32, as diffusers' training scripts: SDXL's autoencoder overflows in fp16
        let (vae, _store) =
            self.placement.network(self.pipeline_config, Part::Vae, (Kind::Float, Role::Frozen), |scope| {
                Vae::new(scope, &self.pipeline_config.vae)
            })?;
        let total = missing.len() as u64;
        self.observer.on(&Event::Started { phase: "encode images".into(), total, unit: "images" });
        for (done, &index) in missing.iter().enumerate() {
            self.check_interrupt()?;
            let latents = self.encode(&vae, images[index])?;
            let Latents { mean, std, lesion, inside } = &latents;
            let tensors = [("mean", mean), ("std", std), ("lesion", lesion), ("inside", inside)];
            write_safetensors(&paths[index], &tensors, &BTreeMap::new())?;
            self.observer.on(&Event::Advanced { done: done as u64 + 1 });
        }
        self.observer.on(&Event::Finished);
        Ok(())
    }

    fn encode(&self, vae: &Vae, files: ImageFiles) -> Result<Latents> {
        let image = decode::image(files.image)?.to_rgb8();
        let mask = foreground(&decode::mask(files.mask)?);
        if mask.dimensions() != image.dimensions() {
            let reason = format!("the mask is {:?}, its image {:?}", mask.dimensions(), image.dimensions());
            return Err(Error::data(files.mask, reason, "export image and mask at one size"));
        }
        let side = u32::try_from(self.image_size)
            .map_err(|_| Error::config("finetune.image_size", "is not a valid side", "use 512 or 1024"))?;
        let frame = Frame::new(image.dimensions(), side)?;
        let square = frame.to_model(&image)?;
        let lesion = frame.mask_to_model(&mask)?;
        let inside =
            frame.mask_to_model(&image::GrayImage::from_pixel(mask.width(), mask.height(), image::Luma([1])))?;
        let (size, cells) = (self.image_size, self.cells());
        guard::guard(|| {
            no_grad(|| {
                let bytes = Tensor::from_slice(square.as_raw()).view([size, size, 3]);
                let pixels = bytes.permute([2, 0, 1]).to_kind(Kind::Float) / 127.5 - 1.0;
                let pixels = pixels.unsqueeze(0).to_device(self.placement.device);
                let distribution = vae.encode(&pixels);
                let scale = self.pipeline_config.vae.scaling_factor;
                let host = |tensor: Tensor| (tensor * scale).squeeze_dim(0).to_device(Device::Cpu).contiguous();
                let covered = |mask: &image::GrayImage| {
                    let covered: Vec<f32> = mask.iter().map(|&value| f32::from(u8::from(value > 0))).collect();
                    Tensor::from_slice(&covered).view([1, size, size]).adaptive_avg_pool2d([cells, cells])
                };
                Ok(Latents {
                    mean: host(distribution.mean),
                    std: host((distribution.logvar * 0.5).exp()),
                    lesion: covered(&lesion),
                    inside: covered(&inside),
                })
            })
        })
    }
}
