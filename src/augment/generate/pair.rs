//! The work for one pair that needs no network: inpainting mask and texts before generation, pasting and pixel tests
//! after it.

use crate::augment::export::{self, LoraUse, Record, Text};
use crate::augment::filter::pixels::{self, RealStatistics, TestedPair};
use crate::augment::filter::{Decision, Thresholds};
use crate::augment::inpaint_mask::{
    AROUND_MAX_PX, ColourMatch, InpaintMask, SquareFrame, dilate, field_of_view, paste_exact, paste_vae,
};
use crate::augment::inputs::read_pair;
use crate::augment::mask_bank::{self, MaskBank, PlacedMask};
use crate::augment::pipeline::PromptPair;
use crate::augment::prompt::PromptFile;
use crate::augment::settings::{AugmentConfig, Mode, Paste, word};
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::Row;
use crate::data::relabel;
use crate::data::templates::Templates;
use crate::tensor::rng;
use crate::{Error, Result};
use image::{GrayImage, RgbImage};
use rand::Rng;
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A training image with its mask and all rows about them.
#[derive(Debug)]
pub(super) struct SourceImage<'a> {
    pub(super) image: &'a Path,
    /// SHA-256 of the image file.
    pub(super) sha256: String,
    pub(super) mask: &'a Path,
    /// Other masks of the same image. They are preserved too, because a text may compare the lesion with them.
    pub(super) companions: Vec<&'a Path>,
    pub(super) rows: Vec<&'a Row>,
}

impl SourceImage<'_> {
    pub(super) fn class(&self) -> &str {
        &self.rows[0].modality
    }
}

/// Prompts of a job. A plan needs their number.
#[derive(Debug)]
pub struct PromptTexts {
    /// All different prompts and negative prompts.
    pub texts: Vec<String>,
    /// Prompts of every pair, by index.
    pub pairs: Vec<PromptPair>,
}

/// Inputs of the work for one pair. It runs on many threads.
pub(super) struct PairMaker<'a> {
    pub(super) config: &'a AugmentConfig,
    /// Image pixels per latent cell.
    pub(super) cell: u32,
    pub(super) thresholds: &'a Thresholds,
    pub(super) loras: &'a [LoraUse],
    pub(super) sources: &'a [SourceImage<'a>],
    pub(super) texts: &'a PromptTexts,
    pub(super) real: &'a HashMap<String, RealStatistics>,
    /// Source masks for `insert_lesion`.
    pub(super) mask_bank: MaskBank,
    pub(super) model_sha256: String,
}

impl PairMaker<'_> {
    /// The pairs `indices`, each as [`Self::prepare`].
    pub(super) fn prepare_all(&self, indices: &[usize]) -> Result<Vec<PreparedPair>> {
        indices.par_iter().map(|&index| self.prepare(index)).collect()
    }

    /// Draws everything of a pair that needs no network.
    pub(super) fn prepare(&self, index: usize) -> Result<PreparedPair> {
        let number = index / self.config.per_image;
        let source = &self.sources[number];
        let mut rng = rng::stream(self.config.seed, "augment", &[index as u64]);
        let seed = rng.random();
        let (image, label) = read_pair(source.image, source.mask)?;
        let frame = SquareFrame { cell: self.cell, ..SquareFrame::new(image.dimensions(), side_of(self.config)?)? };
        let mut pair = PreparedPair {
            index,
            source: number,
            seed,
            frame,
            image,
            label,
            label_is_new: false,
            inpaint_mask: None,
            source_mask: None,
            texts: Vec::new(),
            failure: None,
        };
        match self.config.mode {
            Mode::KeepLesion => {
                let field = field_of_view(&pair.image);
                let preserved = with_companions(&pair.label, &source.companions)?;
                pair.inpaint_mask = Some(InpaintMask::draw(&preserved, Some(&field), &pair.frame, &mut rng)?);
            }
            Mode::EditLesion => pair.inpaint_mask = Some(InpaintMask::around(&pair.label, &pair.frame, &mut rng)?),
            Mode::InsertLesion => self.insert(source, &mut pair, &mut rng)?,
            Mode::MaskToImage | Mode::Img2img => {}
        }
        pair.texts = texts_of(source, &pair, &mut rng)?;
        Ok(pair)
    }

    /// Adds a lesion with the mask of another image.
    fn insert(&self, source: &SourceImage, pair: &mut PreparedPair, rng: &mut rand_chacha::ChaCha8Rng) -> Result<()> {
        let (path, mask) = self.mask_bank.draw(source.class(), source.mask, rng)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut field = field_of_view(&pair.image);
        // existing lesions must not be repainted
        let preserved = with_companions(&pair.label, &source.companions)?;
        let taken = dilate(&preserved, (AROUND_MAX_PX * pair.frame.pixels_per_model_pixel()).max(1.0));
        for (valid, taken) in field.iter_mut().zip(taken.iter()) {
            if *taken > 0 {
                *valid = 0;
            }
        }
        match mask_bank::place_mask(&foreground(&mask), &name, &field, rng) {
            Ok(placed) => {
                pair.inpaint_mask = Some(InpaintMask::around(&placed.mask, &pair.frame, rng)?);
                for (own, new) in pair.label.iter_mut().zip(placed.mask.iter()) {
                    *own = (*own).max(*new);
                }
                pair.label_is_new = true;
                pair.source_mask = Some(placed);
            }
            Err(reason) => pair.failure = Some(reason),
        }
        Ok(())
    }

    /// The generated image at its original size with the preserved pixels pasted back, and the decision of the pixel
    /// tests.
    pub(super) fn finish(&self, prepared: &PreparedPair, square: &RgbImage) -> Result<(RgbImage, Decision)> {
        let PreparedPair { image: original, inpaint_mask, .. } = prepared;
        let generated = prepared.frame.to_image(square)?;
        let image = match (inpaint_mask, self.config.paste) {
            (Some(inpaint_mask), paste) => {
                let generated = ColourMatch::fit(original, &generated, inpaint_mask)?.apply(&generated);
                if paste == Paste::Exact {
                    paste_exact(original, &generated, inpaint_mask)?
                } else {
                    paste_vae(original, &generated)
                }
            }
            (None, _) => paste_vae(original, &generated),
        };
        let mut decision = Decision::default();
        if let Some(reason) = &prepared.failure {
            decision.reject(reason.clone());
        }
        if let Some(real) = self.real.get(self.sources[prepared.source].class()) {
            let candidate = TestedPair {
                source: original,
                result: &image,
                mask: &prepared.label,
                inpaint_mask: inpaint_mask.as_ref(),
            };
            pixels::test_pixels(&candidate, real, self.thresholds, &mut decision);
        }
        Ok((image, decision))
    }

    pub(super) fn record(&self, prepared: &PreparedPair, decision: &Decision) -> Record {
        let config = self.config;
        let source = &self.sources[prepared.source];
        let pair = self.texts.pairs[prepared.index];
        let inpaint_mask = prepared.inpaint_mask.as_ref();
        let boxes = inpaint_mask
            .map(|inpaint_mask| inpaint_mask.decoys.iter().map(|b| [b.left, b.top, b.right, b.bottom]).collect());
        Record {
            index: prepared.index as u64,
            name: export::name(source.image, config.mode, prepared.index as u64),
            class: source.class().to_owned(),
            source_image: absolute(source.image),
            source_sha256: source.sha256.clone(),
            mode: config.mode,
            paste: config.paste,
            model: config.model.clone(),
            model_sha256: self.model_sha256.clone(),
            loras: self.loras.to_vec(),
            prompt: self.texts.texts[pair.positive].clone(),
            negative: self.texts.texts[pair.negative].clone(),
            seed: prepared.seed,
            steps: u32::try_from(config.steps).unwrap_or(u32::MAX),
            guidance: config.guidance,
            strength: config.strength,
            sampler: word(config.sampler),
            source_mask: prepared.source_mask.as_ref().map(|placed| placed.source_mask.clone()),
            mask_transform: prepared.source_mask.as_ref().map(|placed| placed.transform),
            rim_px: inpaint_mask.filter(|mask| mask.target.is_none()).map_or(0.0, |mask| mask.rim_px),
            decoys: boxes.unwrap_or_default(),
            texts: prepared.texts.clone(),
            scores: decision.scores.clone(),
            accepted: decision.reasons.is_empty(),
            reason: decision.reason(),
        }
    }
}

/// Texts of a pair: those of the source, rewritten when the mask is new.
fn texts_of(source: &SourceImage, pair: &PreparedPair, rng: &mut rand_chacha::ChaCha8Rng) -> Result<Vec<Text>> {
    if !pair.label_is_new {
        return source.rows.iter().map(|row| export::texts_of_row(row, &pair.label)).collect();
    }
    let before = foreground(&decode::mask(source.mask)?);
    let templates = Templates::embedded();
    let prompts = PromptFile::embedded();
    let mut texts = Vec::new();
    for row in &source.rows {
        texts.push(if let Ok(row) = relabel::relabel(row, &before, &pair.label, None) {
            export::texts_of_row(&row, &pair.label)?
        } else {
            let words = prompts.words(row);
            export::texts_of_mask(row, &pair.label, &words.target, &words.image, &templates, rng)?
        });
    }
    Ok(texts)
}

/// Absolute path: pairs may be filtered from another working directory.
pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

pub(super) fn side_of(config: &AugmentConfig) -> Result<u32> {
    u32::try_from(config.image_size).map_err(|_| {
        Error::config("augment.image_size", format!("{} is not a valid side", config.image_size), "use 512 or 1024")
    })
}

/// A pair before generation.
pub(super) struct PreparedPair {
    pub(super) index: usize,
    pub(super) source: usize,
    pub(super) seed: u64,
    pub(super) frame: SquareFrame,
    pub(super) image: RgbImage,
    /// Label of the pair, 0 or 255.
    pub(super) label: GrayImage,
    pub(super) label_is_new: bool,
    pub(super) inpaint_mask: Option<InpaintMask>,
    pub(super) source_mask: Option<PlacedMask>,
    pub(super) texts: Vec<Text>,
    /// Why the pair must be rejected.
    pub(super) failure: Option<String>,
}

/// The label together with other masks of the same image; masks of another size are ignored.
fn with_companions(label: &GrayImage, companions: &[&Path]) -> Result<GrayImage> {
    let mut preserved = label.clone();
    for path in companions {
        let other = foreground(&decode::mask(path)?);
        if other.dimensions() == preserved.dimensions() {
            for (preserved, other) in preserved.iter_mut().zip(other.iter()) {
                *preserved = (*preserved).max(*other);
            }
        }
    }
    Ok(preserved)
}
