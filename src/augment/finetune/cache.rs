//! Latents of the training images and embeddings of their captions, encoded once and kept as files.
//!
//! A file is named after a hash of everything that its content depends on: weights, image or text, and size. So files
//! of other images or models are never read, and an interrupted preparation continues.

use super::masks;
use crate::augment::autoencoder::Autoencoder;
use crate::augment::check_interrupt;
use crate::augment::inpaint_mask::SquareFrame;
use crate::augment::inputs::read_pair;
use crate::augment::pipeline::{Placement, PromptEmbedding, TextIds, encode_prompts};
use crate::augment::pipeline_config::PipelineConfig;
use crate::event::{Event, Observer};
use crate::tensor::weights::{Archive, write_safetensors};
use crate::tensor::{self, Device, Kind, META, Tensor, guard, memory, no_grad, rng};
use crate::trainer::Ranks;
use crate::{Error, Result, files};
use image::{GrayImage, RgbImage};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Layout of the files.
const FORMAT: &str = "2";

/// An image with its mask, each with the SHA-256 of its file.
#[derive(Debug, Clone, Copy)]
pub struct ImageFiles<'a> {
    /// The image.
    pub image: (&'a Path, &'a str),
    /// Its mask.
    pub mask: (&'a Path, &'a str),
    /// Its position in the input of the networks.
    pub frame: SquareFrame,
}

/// What a network reads besides noise and caption, one tensor for each image or region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    None,
    /// This many regions to fill, each with the latents of the image without it: `[1 + c, h, w]` fp32.
    Regions(usize),
    /// The lesion mask, `[1, H, W]` bytes, 0 or 1.
    Mask,
}

/// Captions and their token ids.
#[derive(Debug)]
pub struct Texts {
    /// The captions.
    pub texts: Vec<String>,
    /// Token ids by text encoder and caption.
    pub ids: TextIds,
}

impl Texts {
    /// The token ids of a caption as text.
    fn ids_of(&self, text: usize) -> String {
        format!("{:?}", self.ids.iter().map(|ids| &ids[text]).collect::<Vec<_>>())
    }
}

/// What encoding needs.
pub struct CacheEncoder<'a> {
    /// Sizes and files of the generator.
    pub pipeline_config: &'a PipelineConfig,
    /// Hash of its weights.
    pub model_sha256: &'a str,
    /// Device, dtype and seed of the networks.
    pub placement: Placement,
    /// What the network reads besides noise and caption.
    pub condition: Condition,
    /// The processes that divide the work; all of them have the same images and texts.
    pub ranks: Ranks<'a>,
    /// Receives progress.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: finished files stay, and the job ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
}

/// Encoded image; all tensors are fp32 on the CPU.
#[derive(Debug)]
pub struct Latents {
    /// Mean of the latents, `[c, h, w]`, scaled as the UNet expects.
    pub mean: Tensor,
    /// Their standard deviation.
    pub std: Tensor,
    /// Part of each cell that the lesion covers, `[1, h, w]`.
    pub lesion: Tensor,
    /// Part of each cell that is inside the image, `[1, h, w]`; the rest is padding.
    pub inside: Tensor,
}

/// The files of a training.
#[derive(Debug)]
pub struct Cache {
    latents: Vec<PathBuf>,
    texts: Vec<PathBuf>,
    /// Conditions of each image, as many for all.
    conditions: Vec<Vec<PathBuf>>,
}

/// An image or region whose file is missing.
struct Missing {
    /// Number of the image.
    image: usize,
    /// Seed of its regions: from the content of image and mask.
    seed: u64,
    /// File of its latents, if that is missing.
    latents: Option<PathBuf>,
    /// Numbers and files of its conditions that are missing.
    conditions: Vec<(usize, PathBuf)>,
}

impl Cache {
    /// Encodes the images and texts whose files are missing in `folder`, this rank its part of them. Returns when all
    /// ranks are done.
    ///
    /// # Errors
    /// [`Error::Data`] for an image that cannot be read, or whose mask has another size; [`Error::Weights`]; [`Error::Interrupted`]; [`Error::Peer`]; typed errors of libtorch.
    pub fn fill(folder: &Path, images: &[ImageFiles], texts: &Texts, encoding: &CacheEncoder) -> Result<Self> {
        encoding.ranks.agree_on(guard::guard(|| Self::fill_part(folder, images, texts, encoding)))
    }

    fn fill_part(folder: &Path, images: &[ImageFiles], texts: &Texts, encoding: &CacheEncoder) -> Result<Self> {
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        let sums: Vec<String> = images.iter().map(|files| format!("{} {}", files.image.1, files.mask.1)).collect();
        let shape_of = |image: usize| format!("{0}x{0}", images[image].frame.side);
        let image_path = |image: usize| encoding.path(folder, "image", &[&shape_of(image), &sums[image]]);
        let latents: Vec<PathBuf> = (0..images.len()).map(image_path).collect();
        // the ids stand for the tokenizers
        let text_path = |text: usize| encoding.path(folder, "text", &[&texts.texts[text], &texts.ids_of(text)]);
        let texts_at: Vec<PathBuf> = (0..texts.texts.len()).map(text_path).collect();
        let seed = encoding.placement.seed.to_string();
        let condition_path = |image: usize, number: usize| {
            let (shape, sums) = (shape_of(image), &sums[image]);
            match encoding.condition {
                Condition::Regions(_) => encoding.path(folder, "region", &[&shape, sums, &number.to_string(), &seed]),
                _ => encoding.path(folder, "mask", &[&shape, sums]),
            }
        };
        let each = encoding.condition.count();
        let conditions: Vec<Vec<PathBuf>> =
            (0..images.len()).map(|image| (0..each).map(|number| condition_path(image, number)).collect()).collect();
        // by the number of the image, because another rank may have written files already
        let own = |count: usize| (encoding.ranks.rank()..count).step_by(encoding.ranks.size());
        let missing: Vec<Missing> = own(images.len())
            .map(|image| Missing {
                image,
                seed: u64::from_str_radix(&sums[image][..16], 16).unwrap_or_default(),
                latents: Some(latents[image].clone()).filter(|path| !is_whole(path)),
                conditions: conditions[image].iter().cloned().enumerate().filter(|(_, path)| !is_whole(path)).collect(),
            })
            .filter(|missing| missing.latents.is_some() || !missing.conditions.is_empty())
            .collect();
        let missing_texts: Vec<usize> = own(texts_at.len()).filter(|&i| !is_whole(&texts_at[i])).collect();
        encoding.encode_texts(&missing_texts, texts, &texts_at)?;
        return_memory(encoding.placement.device)?;
        encoding.encode_images(&missing, images)?;
        return_memory(encoding.placement.device)?;
        Ok(Self { latents, texts: texts_at, conditions })
    }

    /// Number of conditions of each image.
    pub fn num_conditions(&self) -> usize {
        self.conditions.first().map_or(0, Vec::len)
    }

    /// Condition `number` of image `index`, in host memory; see [`Condition`].
    ///
    /// # Errors
    /// As [`Self::latents`].
    pub fn condition(&self, index: usize, number: usize) -> Result<Tensor> {
        Archive::open(&self.conditions[index][number])?.read("condition")
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
    pub fn embedding(&self, index: usize) -> Result<PromptEmbedding> {
        let archive = Archive::open(&self.texts[index])?;
        let pooled = archive.contains("pooled").then(|| archive.read("pooled")).transpose()?;
        Ok(PromptEmbedding { context: archive.read("context")?, pooled })
    }
}

/// Key in the header of a file: hash of its tensors.
const CONTENT: &str = "content_sha256";

/// Writes a file of the cache.
fn write(path: &Path, tensors: &[(&str, &Tensor)]) -> Result<()> {
    let header = BTreeMap::from([(CONTENT.to_owned(), content_sha256(tensors))]);
    write_safetensors(path, tensors, &header)
}

/// True for a file that has what was written. Another one, for example cut by a crash or damaged, is written again.
fn is_whole(path: &Path) -> bool {
    let Some(archive) = path.is_file().then(|| Archive::open(path).ok()).flatten() else { return false };
    let Some(wanted) = archive.metadata().get(CONTENT) else { return false };
    let read: Result<Vec<Tensor>> = archive.names().iter().map(|name| archive.read(name)).collect();
    let Ok(read) = read else { return false };
    let tensors: Vec<(&str, &Tensor)> = archive.names().iter().map(String::as_str).zip(&read).collect();
    content_sha256(&tensors) == *wanted
}

/// Hash of the names, shapes and values of tensors in host memory, fp32 or bytes.
fn content_sha256(tensors: &[(&str, &Tensor)]) -> String {
    let mut sorted = tensors.to_vec();
    sorted.sort_by_key(|(name, _)| *name);
    let mut hash = Sha256::new();
    for (name, tensor) in sorted {
        hash.update(format!("{name} {:?} {:?} ", tensor.kind(), tensor.size()));
        let flat = tensor.reshape([-1]);
        if tensor.kind() == Kind::Uint8 {
            hash.update(Vec::<u8>::try_from(&flat).expect("bytes in host memory"));
        } else {
            let values = Vec::<f32>::try_from(&flat).expect("fp32 in host memory");
            hash.update(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
        }
    }
    format!("{:x}", hash.finalize())
}

impl CacheEncoder<'_> {
    fn path(&self, folder: &Path, what: &str, parts: &[&str]) -> PathBuf {
        let mut hash = Sha256::new();
        // weights that are not loaded depend on the seed
        let Self { pipeline_config, .. } = self;
        let sizes = json!([pipeline_config.vae, pipeline_config.texts, pipeline_config.zero_without_negative]);
        let weights = format!("{} {} {:?} {sizes}", self.model_sha256, self.placement.seed, self.placement.kind);
        for part in [FORMAT, what, &weights].iter().chain(parts) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        folder.join(format!("{what}-{}.safetensors", &format!("{:x}", hash.finalize())[..32]))
    }

    /// Height and width of the latents.
    fn cells(&self, frame: &SquareFrame) -> [i64; 2] {
        [i64::from(frame.side) / self.pipeline_config.vae.downscale(); 2]
    }

    fn encode_texts(&self, missing: &[usize], texts: &Texts, paths: &[PathBuf]) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        self.observer.on(&Event::Note(format!("encoding {} captions", missing.len())));
        let ids = texts.ids.iter().map(|ids| missing.iter().map(|&text| ids[text].clone()).collect());
        let ids: TextIds = ids.collect();
        let empty: Vec<bool> = missing.iter().map(|&text| texts.texts[text].is_empty()).collect();
        let embeddings = encode_prompts(self.pipeline_config, self.placement, &ids, &empty, &[])?;
        for (embedding, &index) in embeddings.iter().zip(missing) {
            let wide = |tensor: &Tensor| tensor.to_kind(Kind::Float);
            let (context, pooled) = (wide(&embedding.context), embedding.pooled.as_ref().map(wide));
            let mut tensors = vec![("context", &context)];
            tensors.extend(pooled.as_ref().map(|pooled| ("pooled", pooled)));
            write(&paths[index], &tensors)?;
        }
        Ok(())
    }

    fn encode_images(&self, missing: &[Missing], images: &[ImageFiles]) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        let autoencoder = Autoencoder::load(self.pipeline_config, self.placement, Kind::Float)?;
        // as in diffusers' scripts: the frozen autoencoder's convolutions take a quarter of the time, and its errors are
        // those of fp16 mantissas in latents that get noise
        let _rounding = tensor::enter_tf32(true);
        let total = missing.len() as u64;
        self.observer.on(&Event::Started { phase: "encode images".into(), total, unit: "images" });
        for (done, missing) in missing.iter().enumerate() {
            check_interrupt(self.interrupt)?;
            let framed = Self::framed(images[missing.image])?;
            if let Some(path) = &missing.latents {
                let Latents { mean, std, lesion, inside } = &self.encode(&autoencoder, &framed)?;
                let tensors = [("mean", mean), ("std", std), ("lesion", lesion), ("inside", inside)];
                write(path, &tensors)?;
            }
            for (number, path) in &missing.conditions {
                let condition = self.encode_condition(&autoencoder, &framed, (missing.seed, *number))?;
                write(path, &[("condition", &condition)])?;
            }
            self.observer.on(&Event::Advanced { done: done as u64 + 1 });
        }
        self.observer.on(&Event::Finished);
        Ok(())
    }

    /// Reads an image and its mask.
    fn framed(files: ImageFiles) -> Result<Framed> {
        let (image, mask) = read_pair(files.image.0, files.mask.0)?;
        let frame = files.frame;
        let (input, lesion) = (frame.to_model(&image)?, frame.mask_to_model(&mask)?);
        Ok(Framed { image, mask, frame, input, lesion })
    }

    fn encode(&self, autoencoder: &Autoencoder, framed: &Framed) -> Result<Latents> {
        let Framed { mask, frame, lesion, .. } = framed;
        let whole = GrayImage::from_pixel(mask.width(), mask.height(), image::Luma([1]));
        let (inside, cells) = (frame.mask_to_model(&whole)?, self.cells(frame));
        guard::guard(|| {
            no_grad(|| {
                let (mean, std) = autoencoder.distribution(&framed.bytes(), None);
                let covered = |mask: &GrayImage| plane(mask).adaptive_avg_pool2d(cells);
                Ok(Latents { mean, std, lesion: covered(lesion), inside: covered(&inside) })
            })
        })
    }

    fn encode_condition(
        &self,
        autoencoder: &Autoencoder,
        framed: &Framed,
        (seed, number): (u64, usize),
    ) -> Result<Tensor> {
        let Framed { image, mask, frame, lesion, .. } = framed;
        if self.condition == Condition::Mask {
            return guard::guard(|| Ok(plane(lesion).to_kind(Kind::Uint8)));
        }
        // the same region for the same image, wherever it is in the data
        let mut rng = rng::stream(self.placement.seed, "finetune region", &[seed, number as u64]);
        let scale = frame.pixels_per_model_pixel();
        let region = frame.mask_to_model(&masks::region(number, image, mask, scale, &mut rng))?;
        let whole = frame.mask_to_model(&GrayImage::from_pixel(mask.width(), mask.height(), image::Luma([1])))?;
        let (size, cells) = ([i64::from(frame.side); 2], self.cells(frame));
        guard::guard(|| {
            no_grad(|| {
                let touched = plane(&region).adaptive_max_pool2d(cells).0;
                // padding is always repainted, as in the generation of pairs
                let inside = plane(&whole).adaptive_max_pool2d(cells).0;
                let touched = touched.maximum(&(1.0 - inside));
                let keep = 1.0 - touched.unsqueeze(0).upsample_nearest2d(size, None, None);
                let (mean, _) = autoencoder.distribution(&framed.bytes(), Some(&keep));
                Ok(Tensor::cat(&[touched, mean], 0))
            })
        })
    }
}

/// An image and its mask, and both in the input of the networks.
struct Framed {
    image: RgbImage,
    mask: GrayImage,
    frame: SquareFrame,
    input: RgbImage,
    lesion: GrayImage,
}

impl Framed {
    /// `[H, W, 3]` bytes.
    fn bytes(&self) -> Tensor {
        let side = i64::from(self.frame.side);
        Tensor::from_slice(self.input.as_raw()).view([side, side, 3])
    }
}

/// The pixels of a mask, 0 or 1: `[1, H, W]` fp32.
fn plane(mask: &GrayImage) -> Tensor {
    let plane: Vec<f32> = mask.iter().map(|&value| f32::from(u8::from(value > 0))).collect();
    Tensor::from_slice(&plane).view([1, i64::from(mask.height()), i64::from(mask.width())])
}

impl Condition {
    /// Number of conditions of an image.
    pub fn count(self) -> usize {
        match self {
            Self::None => 0,
            Self::Regions(count) => count,
            Self::Mask => 1,
        }
    }
}

/// Returns the cached blocks of a network that is no longer used, so that the next one finds memory in one piece.
pub(super) fn return_memory(device: Device) -> Result<()> {
    if device == META { Ok(()) } else { memory::release_cache(device).map(drop) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_whose_content_is_not_what_was_written_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image-1.safetensors");
        let values = Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape([2, 3, 4]);
        let bytes = Tensor::arange(6, (Kind::Uint8, Device::Cpu));
        // strides of a transposed tensor are not those of the file
        let turned = values.transpose(0, 2);
        write(&path, &[("mean", &turned), ("mask", &bytes)]).unwrap();
        assert!(is_whole(&path));
        let written = std::fs::read(&path).unwrap();
        for (what, at) in [("the last byte", written.len() - 1), ("a value", written.len() - 40)] {
            let mut damaged = written.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert!(!is_whole(&path), "{what}");
        }
        std::fs::write(&path, &written[..written.len() - 8]).unwrap();
        assert!(!is_whole(&path), "cut");
        // a file of an earlier version, and none at all
        write_safetensors(&path, &[("mean", &values)], &BTreeMap::new()).unwrap();
        assert!(!is_whole(&path) && !is_whole(folder.path()));
    }
}
