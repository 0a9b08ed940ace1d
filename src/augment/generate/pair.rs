//! One pair without networks: what is held, what is asked, and, of a generated square, the picture and its verdict.

use super::Texts;
use crate::augment::donor::{self, Bank, DonorOptions, Placed};
use crate::augment::export::{self, LoraUse, Record, Text};
use crate::augment::filter::pixels::{self, Candidate, Real};
use crate::augment::filter::{Thresholds, Verdict};
use crate::augment::hold::{
    AROUND_MAX_PX, ColourMatch, Frame, Hold, HoldOptions, dilate, field_of_view, paste_exact, paste_vae,
};
use crate::augment::prompt::Prompts;
use crate::augment::settings::{AugmentConfig, Mode, Paste};
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::Row;
use crate::data::restate;
use crate::data::templates::Templates;
use crate::tensor::rng;
use crate::{Error, Result};
use image::{GrayImage, RgbImage};
use rand::Rng;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A train picture with its mask and all rows about them.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) image: &'a Path,
    /// SHA-256 of its file.
    pub(super) sha256: String,
    pub(super) mask: &'a Path,
    /// Other masks of the same picture: what a text compares the lesion with must stay too.
    pub(super) companions: Vec<&'a Path>,
    pub(super) rows: Vec<&'a Row>,
}

impl Source<'_> {
    pub(super) fn class(&self) -> &str {
        &self.rows[0].modality
    }
}

/// The part of the job that needs no network, and runs on many threads.
pub(super) struct Work<'a> {
    pub(super) config: &'a AugmentConfig,
    pub(super) thresholds: &'a Thresholds,
    pub(super) loras: &'a [LoraUse],
    pub(super) sources: &'a [Source<'a>],
    pub(super) texts: &'a Texts,
    pub(super) real: &'a HashMap<String, Real>,
    /// Masks to insert.
    pub(super) bank: Bank,
    pub(super) model_sha256: String,
}

impl Work<'_> {
    /// Everything of a pair that needs no network.
    pub(super) fn prepare(&self, index: usize) -> Result<Prepared> {
        let number = index / self.config.per_image;
        let source = &self.sources[number];
        let mut rng = stream(self.config, "augment", index as u64);
        let seed = rng.random();
        let picture = decode::picture(source.image)?.to_rgb8();
        let own = foreground(&decode::mask(source.mask)?);
        if own.dimensions() != picture.dimensions() {
            let reason = format!("the mask is {:?}, its image {:?}", own.dimensions(), picture.dimensions());
            return Err(Error::data(source.mask, reason, "export image and mask at one size"));
        }
        let frame = Frame::new(picture.dimensions(), side_of(self.config)?)?;
        let options = HoldOptions::default();
        let mut this = Prepared {
            index,
            source: number,
            seed,
            frame,
            picture,
            label: own,
            label_is_new: false,
            hold: None,
            donor: None,
            texts: Vec::new(),
            failure: None,
        };
        match self.config.mode {
            Mode::KeepLesion => {
                let field = field_of_view(&this.picture);
                let kept = with_companions(&this.label, &source.companions)?;
                this.hold = Some(Hold::draw(&kept, Some(&field), &this.frame, &options, &mut rng)?);
            }
            Mode::EditLesion => this.hold = Some(Hold::around(&this.label, &this.frame, &mut rng)?),
            Mode::InsertLesion => self.insert(source, &mut this, &mut rng)?,
            Mode::MaskToImage | Mode::Img2img => {}
        }
        this.texts = texts_of(source, &this, &mut rng)?;
        Ok(this)
    }

    /// Adds a donor's mask to the picture's own.
    fn insert(&self, source: &Source, this: &mut Prepared, rng: &mut rand_chacha::ChaCha8Rng) -> Result<()> {
        let (path, mask) = self.bank.draw(source.class(), source.mask, rng)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut field = field_of_view(&this.picture);
        // nothing of the old ones is repainted
        let kept = with_companions(&this.label, &source.companions)?;
        let taken = dilate(&kept, (AROUND_MAX_PX * this.frame.pixels_per_model_pixel()).max(1.0));
        for (valid, taken) in field.iter_mut().zip(taken.iter()) {
            if *taken > 0 {
                *valid = 0;
            }
        }
        match donor::place(&foreground(&mask), &name, &field, &DonorOptions::default(), rng) {
            Ok(placed) => {
                this.hold = Some(Hold::around(&placed.mask, &this.frame, rng)?);
                for (own, new) in this.label.iter_mut().zip(placed.mask.iter()) {
                    *own = (*own).max(*new);
                }
                this.label_is_new = true;
                this.donor = Some(placed);
            }
            Err(reason) => this.failure = Some(reason),
        }
        Ok(())
    }

    /// The picture at its own size with what was held, and what the filter says.
    pub(super) fn finish(&self, prepared: &Prepared, square: &RgbImage) -> Result<(RgbImage, Verdict)> {
        let Prepared { picture: original, hold, .. } = prepared;
        let generated = prepared.frame.to_picture(square)?;
        let picture = match (hold, self.config.paste) {
            (Some(hold), paste) => {
                let generated = ColourMatch::fit(original, &generated, hold)?.apply(&generated);
                if paste == Paste::Exact {
                    paste_exact(original, &generated, hold)?
                } else {
                    paste_vae(original, &generated)
                }
            }
            (None, _) => paste_vae(original, &generated),
        };
        let mut verdict = Verdict::new();
        if let Some(reason) = &prepared.failure {
            verdict.refuse(reason.clone());
        }
        if let Some(real) = self.real.get(self.sources[prepared.source].class()) {
            let candidate =
                Candidate { source: original, result: &picture, mask: &prepared.label, hold: hold.as_ref() };
            pixels::judge(&candidate, real, self.thresholds, &mut verdict);
        }
        Ok((picture, verdict))
    }

    pub(super) fn record(&self, prepared: &Prepared, verdict: &Verdict) -> Record {
        let config = self.config;
        let source = &self.sources[prepared.source];
        let pair = self.texts.pairs[prepared.index];
        let hold = prepared.hold.as_ref();
        let boxes = hold.map(|hold| hold.decoys.iter().map(|b| [b.left, b.top, b.right, b.bottom]).collect());
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
            sampler: serde_json::to_value(config.sampler)
                .ok()
                .and_then(|name| name.as_str().map(str::to_owned))
                .unwrap_or_default(),
            donor: prepared.donor.as_ref().map(|placed| placed.donor.clone()),
            mask_transform: prepared.donor.as_ref().map(|placed| placed.transform),
            rim_px: hold.map_or(0.0, |hold| hold.rim_px),
            decoys: boxes.unwrap_or_default(),
            texts: prepared.texts.clone(),
            scores: verdict.scores.clone(),
            accepted: verdict.accepted,
            reason: verdict.reason(),
        }
    }
}

/// The rows of a pair: the source's own, or told of the new mask.
fn texts_of(source: &Source, this: &Prepared, rng: &mut rand_chacha::ChaCha8Rng) -> Result<Vec<Text>> {
    if !this.label_is_new {
        return source.rows.iter().map(|row| export::texts_of_row(row, &this.label)).collect();
    }
    let before = foreground(&decode::mask(source.mask)?);
    let templates = Templates::embedded();
    let prompts = Prompts::embedded();
    let mut texts = Vec::new();
    for row in &source.rows {
        texts.push(if let Ok(row) = restate::restate(row, &before, &this.label, None) {
            export::texts_of_row(&row, &this.label)?
        } else {
            let words = prompts.words(row);
            export::texts_of_mask(row, &this.label, (&words.target, &words.image), &templates, rng)?
        });
    }
    Ok(texts)
}

/// The path from the root of the file system: pairs are judged from other folders too.
pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

pub(super) fn stream(config: &AugmentConfig, purpose: &str, index: u64) -> rand_chacha::ChaCha8Rng {
    rng::stream(config.seed, purpose, &[index])
}

pub(super) fn side_of(config: &AugmentConfig) -> Result<u32> {
    u32::try_from(config.image_size).map_err(|_| {
        Error::config("augment.image_size", format!("{} is no side", config.image_size), "use 512 or 1024")
    })
}

/// A pair before the networks see it.
pub(super) struct Prepared {
    pub(super) index: usize,
    pub(super) source: usize,
    pub(super) seed: u64,
    pub(super) frame: Frame,
    pub(super) picture: RgbImage,
    /// The pair's own, 0 or 255.
    pub(super) label: GrayImage,
    pub(super) label_is_new: bool,
    pub(super) hold: Option<Hold>,
    pub(super) donor: Option<Placed>,
    pub(super) texts: Vec<Text>,
    /// Why it cannot become a pair.
    pub(super) failure: Option<String>,
}

/// The label with other masks of the same picture; those of another size are left out.
fn with_companions(label: &GrayImage, companions: &[&Path]) -> Result<GrayImage> {
    let mut kept = label.clone();
    for path in companions {
        let other = foreground(&decode::mask(path)?);
        if other.dimensions() == kept.dimensions() {
            for (kept, other) in kept.iter_mut().zip(other.iter()) {
                *kept = (*kept).max(*other);
            }
        }
    }
    Ok(kept)
}
