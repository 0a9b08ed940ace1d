//! One row -> token ids and pixels. Every file is decoded once for both image encoders.

use std::sync::Arc;

use ::image::{DynamicImage, GrayImage, imageops};

use crate::decode;
use crate::features::FeatureLookup;
use crate::flip_rotate::Transform;
use crate::geometry::{Geometry, MaskNoise, MovedMask};
use crate::image::{PixelConfig, foreground, mask_pixels, sam_pixels, tower_pixels};
use crate::labels::Labels;
use crate::manifest::{Presence, Row, Target};
use crate::relabel::relabel;
use prsmed_base::error::{Error, Result};

/// Pixels of one image and its masks as bytes; see [`PixelConfig`] for the sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    /// Input of the vision tower `[3, C, C]` before normalisation; empty if the image's vision features are cached.
    pub tower: Vec<u8>,
    /// SAM input `[3, S, S]` before normalisation.
    pub sam: Vec<u8>,
    /// Masks of k targets `[k, S, S]`, 255 = foreground.
    pub mask: Vec<u8>,
    /// The first columns and rows of the SAM input, which show the image.
    pub shown: (u32, u32),
}

impl Pixels {
    /// Decodes, transforms and resizes the image and masks of a row.
    ///
    /// # Errors
    /// As [`decoded`].
    pub fn load(row: &Row, config: &PixelConfig, transform: Transform) -> Result<Self> {
        let (image, masks) = Self::transformed(row, config, transform)?;
        Self::of(&image, &masks, config)
    }

    /// As [`Pixels::load`], without the tower's input, for an image whose vision features are cached.
    ///
    /// # Errors
    /// As [`decoded`].
    pub fn load_for_segmenter(row: &Row, config: &PixelConfig, transform: Transform) -> Result<Self> {
        let (image, masks) = Self::transformed(row, config, transform)?;
        Self::for_segmenter(&image, &masks, config)
    }

    fn transformed(row: &Row, config: &PixelConfig, transform: Transform) -> Result<(DynamicImage, Vec<GrayImage>)> {
        let image = decode::image(&row.image_path)?;
        let masks = masks_of(row, &image, config.labels)?;
        Ok((transform.image(image), masks.into_iter().map(|mask| transform.mask(mask)).collect()))
    }

    /// Resizes an image and its masks for both image encoders.
    ///
    /// # Errors
    /// [`Error::Shape`] for an image of 0 pixels.
    pub fn of(image: &DynamicImage, masks: &[GrayImage], config: &PixelConfig) -> Result<Self> {
        let tower = tower_pixels(image, config.tower_size, config.pad_offset, config.padding)?;
        Ok(Self { tower, ..Self::for_segmenter(image, masks, config)? })
    }

    fn for_segmenter(image: &DynamicImage, masks: &[GrayImage], config: &PixelConfig) -> Result<Self> {
        let masks = masks.iter().map(|mask| mask_pixels(mask, config.sam_size, config.mask, config.fit));
        Ok(Self {
            tower: Vec::new(),
            sam: sam_pixels(image, config.sam_size, config.fit)?,
            mask: masks.collect::<Result<Vec<_>>>()?.concat(),
            shown: config.fit.way_back(config.sam_size, (image.width(), image.height()))[0],
        })
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.tower.len() + self.sam.len() + self.mask.len()
    }
}

/// Decodes the image of a row and the mask of its first target; `labels` are foreground.
///
/// # Errors
/// [`Error::Data`] when a file is missing or corrupt, the two differ in size, or the mask has several labels and none
/// is chosen; [`Error::Io`].
pub fn decoded(row: &Row, labels: Labels) -> Result<(DynamicImage, GrayImage)> {
    let image = decode::image(&row.image_path)?;
    let mask = mask_of(row.target(), &image, labels)?;
    Ok((image, mask))
}

/// Decodes the masks of a row whose image is already decoded, one for each target.
///
/// # Errors
/// As [`decoded`].
pub(crate) fn masks_of(row: &Row, image: &DynamicImage, labels: Labels) -> Result<Vec<GrayImage>> {
    row.targets.iter().map(|target| mask_of(target, image, labels)).collect()
}

/// The mask of a target that is not [`Presence::Present`] is empty, also where its file is missing.
fn mask_of(target: &Target, image: &DynamicImage, labels: Labels) -> Result<GrayImage> {
    if target.lacks_mask() {
        return Ok(GrayImage::new(image.width(), image.height()));
    }
    let mask = decode::labelled_mask(&target.mask_path, labels)?;
    if target.presence == Presence::Absent && foreground(&mask).iter().any(|value| *value > 0) {
        let reason = "the mask has foreground, but a row says that its target is absent";
        return Err(Error::data(
            &target.mask_path,
            reason,
            "list such rows with `prsmed data check`, then repair them",
        ));
    }
    let sizes = ((image.width(), image.height()), (mask.width(), mask.height()));
    if sizes.0 != sizes.1 {
        return Err(Error::data(
            &target.mask_path,
            size_mismatch(sizes.0, sizes.1),
            "export image and mask at one size",
        ));
    }
    Ok(mask)
}

pub(crate) fn size_mismatch(image: (u32, u32), mask: (u32, u32)) -> String {
    let turned = decode::turned_by_90(mask, image);
    format!("the mask is {}x{} pixels but its image is {}x{}{turned}", mask.0, mask.1, image.0, image.1)
}

/// Tokenizes a row's question and answer.
pub trait TextEncoder: Send + Sync {
    /// The ids, and the index of the answer's first id.
    ///
    /// # Errors
    /// Errors of the tokenizer; the loader adds the row.
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)>;
}

impl<F: Fn(&Row) -> Result<(Vec<i64>, usize)> + Send + Sync> TextEncoder for F {
    fn encode(&self, row: &Row) -> Result<(Vec<i64>, usize)> {
        self(row)
    }
}

/// One row, ready for a batch.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Index into the manifest's rows.
    pub row: usize,
    /// Class label.
    pub label: usize,
    /// Token ids, including the image placeholder.
    pub ids: Vec<i64>,
    /// `ids[answer_start..]` is the answer.
    pub answer_start: usize,
    /// For each target, whether its mask is known; an answer alone has none.
    pub has_mask: Vec<bool>,
    /// The pixels, which the cache may share.
    pub pixels: Arc<Pixels>,
    /// Its masks in numbers, one for each target; none unless the loader makes them.
    pub geometry: Vec<Geometry>,
    /// Its mask at other places; at most [`MOVED_MASKS`].
    pub moved: Vec<MovedMask>,
    /// The row with its texts as they were encoded.
    pub text: Row,
    /// Vision features of the image, or the key under which they will be cached; `None` without a vision feature
    /// cache.
    pub seen: Option<FeatureLookup>,
}

impl Sample {
    /// The sample with its masks in numbers; a mask that is not known is not shown. `encode` tokenizes other answers.
    #[must_use]
    pub(crate) fn with_geometry(mut self, side: u32, noise: MaskNoise, epoch: u64, encode: &dyn TextEncoder) -> Self {
        let key = |target: usize| [epoch, self.row as u64, target as u64];
        let masks: Vec<Option<GrayImage>> = (0..self.has_mask.len()).map(|target| self.target(target, side)).collect();
        let numbers = masks.iter().enumerate().map(|(target, mask)| {
            mask.as_ref().map_or_else(Geometry::unknown, |mask| Geometry::noisy(mask, noise, &key(target)))
        });
        self.geometry = numbers.collect();
        if let [Some(mask)] = masks.as_slice() {
            let moved = |number: u64| self.moved_mask(mask, number, noise.seed, epoch, encode);
            self.moved = (0..MOVED_MASKS as u64).filter_map(moved).collect();
        }
        self
    }

    /// The mask of a target on the part of the square that shows the image, if it is known.
    fn target(&self, target: usize, side: u32) -> Option<GrayImage> {
        let plane = self.pixels.mask.chunks((side as usize * side as usize).max(1)).nth(target)?;
        let mask = GrayImage::from_raw(side, side, plane.iter().map(|value| *value & 128).collect());
        let (columns, rows) = self.pixels.shown;
        let shown = |mask: GrayImage| {
            if (columns, rows) == (side, side) {
                mask
            } else {
                imageops::crop_imm(&mask, 0, 0, columns, rows).to_image()
            }
        };
        mask.filter(|_| self.has_mask[target]).map(shown)
    }

    /// The mask at another place, or of another size, with the first token of the answer that then differs; `None` if the answer stays, or if
    /// it cannot be rewritten safely.
    fn moved_mask(
        &self,
        mask: &GrayImage,
        number: u64,
        seed: u64,
        epoch: u64,
        encode: &dyn TextEncoder,
    ) -> Option<MovedMask> {
        // of two, one stays in its row: the words for the column differ only there. If the answer names a share of the image,
        // it has another size instead in every second epoch
        let (key, is_second) = ([epoch, self.row as u64, number], number % 2 == 1);
        let is_scaled = is_second && epoch % 2 == 1 && self.text.answer.contains('%');
        let moved =
            if is_scaled { Geometry::scaled(mask, seed, &key) } else { Geometry::moved(mask, is_second, seed, &key) };
        let moved = moved?;
        let row = relabel(&self.text, mask, &moved, None).ok().filter(|row| row.question == self.text.question)?;
        let (ids, _) = encode.encode(&row).ok()?;
        let at = ids.iter().zip(&self.ids).position(|(new, old)| new != old)?;
        (at >= self.answer_start).then(|| MovedMask { geometry: Geometry::of(&moved), at, id: ids[at] })
    }
}

/// Moved masks of each sample at most.
pub const MOVED_MASKS: usize = 2;

/// Adds the row's CSV file and line to an error of its files.
pub fn at_row(row: &Row, error: &Error) -> Error {
    let hint = match error.hint() {
        hint if hint.is_empty() => "repair or remove the row".to_owned(),
        hint if [decode::REPLACE, decode::RESTORE].contains(&hint.as_str()) => format!("{hint} or remove its row"),
        hint => hint,
    };
    let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
    Error::data_line(&row.csv, row.line, format!("{error}{cause}"), hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Root, row};
    use crate::image::{Fit, MaskMode, PadOffset};

    #[test]
    fn the_size_of_pixels_is_known_before_they_are_loaded() {
        let config = PixelConfig {
            tower_size: 8,
            padding: [0; 3],
            sam_size: 16,
            fit: Fit::Stretch,
            mask: MaskMode::Soft,
            pad_offset: PadOffset::Centre,
            labels: Labels::NONE,
        };
        let pixels = Pixels::of(&DynamicImage::new_rgb8(9, 7), &[GrayImage::new(9, 7)], &config).unwrap();
        assert_eq!((pixels.bytes(), config.image_bytes(1)), (3 * 64 + 4 * 256, 3 * 64 + 4 * 256));
    }

    #[test]
    fn the_mask_of_an_absent_target_is_empty_also_without_a_file() {
        let root = Root::new();
        root.pair("ct", "train", "a");
        let [image_path, mask_path] =
            ["images", "masks"].map(|what| root.path().join(format!("ct/train_{what}/a.png")));
        let row = |target| Row {
            image_path: image_path.clone(),
            targets: Target::only(mask_path.clone(), target),
            ..row("q", "a", None)
        };
        let mask = |target| decoded(&row(target), Labels::NONE).map(|(_, mask)| mask);
        let error = mask(Presence::Absent).unwrap_err().to_string();
        assert!(error.contains("a row says that its target is absent"), "{error}");
        assert!(mask(Presence::Present).unwrap().iter().any(|value| *value > 0));
        std::fs::remove_file(&mask_path).unwrap();
        for target in [Presence::Absent, Presence::Unknown] {
            let mask = mask(target).unwrap();
            assert_eq!((mask.dimensions(), mask.iter().max()), ((12, 8), Some(&0)));
        }
        assert!(mask(Presence::Present).is_err());
    }
}
