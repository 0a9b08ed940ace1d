//! One row -> ids and pixels; every file is decoded once for both image branches.

use std::sync::Arc;

use ::image::{DynamicImage, GrayImage};

use super::decode;
use super::features::Seen;
use super::image::{PixelConfig, clip_pixels, mask_pixels, sam_pixels};
use super::jitter::Transform;
use super::manifest::Row;
use crate::error::{Error, Result};

/// The pixels of one image and mask, as bytes; see [`PixelConfig`] for the sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    /// `[3, C, C]`, before CLIP's normalisation; empty where the picture's features are known.
    pub clip: Vec<u8>,
    /// `[3, S, S]`.
    pub sam: Vec<u8>,
    /// `[1, S, S]`, 255 = foreground.
    pub mask: Vec<u8>,
}

impl Pixels {
    /// Decodes, turns and resizes.
    ///
    /// # Errors
    /// As [`decoded`].
    pub fn load(row: &Row, config: &PixelConfig, transform: Transform) -> Result<Self> {
        let (picture, mask) = decoded(row)?;
        Self::of(&transform.picture(picture), &transform.mask(mask), config)
    }

    /// The same without CLIP's picture: for one whose features are known.
    ///
    /// # Errors
    /// As [`decoded`].
    pub fn load_for_segmenter(row: &Row, config: &PixelConfig, transform: Transform) -> Result<Self> {
        let (picture, mask) = decoded(row)?;
        Self::for_segmenter(&transform.picture(picture), &transform.mask(mask), config)
    }

    /// Resizes one picture and its mask for both branches.
    ///
    /// # Errors
    /// [`Error::Shape`] for a picture of 0 pixels.
    pub fn of(picture: &DynamicImage, mask: &GrayImage, config: &PixelConfig) -> Result<Self> {
        let clip = clip_pixels(picture, config.clip_size, config.pad_offset)?;
        Ok(Self { clip, ..Self::for_segmenter(picture, mask, config)? })
    }

    fn for_segmenter(picture: &DynamicImage, mask: &GrayImage, config: &PixelConfig) -> Result<Self> {
        Ok(Self {
            clip: Vec::new(),
            sam: sam_pixels(picture, config.sam_size)?,
            mask: mask_pixels(mask, config.sam_size, config.mask)?,
        })
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.clip.len() + self.sam.len() + self.mask.len()
    }
}

/// The picture and the mask of a row as they are stored.
///
/// # Errors
/// [`Error::Data`] when a file is missing or corrupt or the two differ in size; [`Error::Io`].
pub fn decoded(row: &Row) -> Result<(DynamicImage, GrayImage)> {
    let picture = decode::picture(&row.image_path)?;
    let mask = mask_of(row, &picture)?;
    Ok((picture, mask))
}

/// The mask of a row whose picture is known.
///
/// # Errors
/// As [`decoded`].
pub(super) fn mask_of(row: &Row, picture: &DynamicImage) -> Result<GrayImage> {
    let mask = decode::mask(&row.mask_path)?;
    let sizes = ((picture.width(), picture.height()), (mask.width(), mask.height()));
    if sizes.0 != sizes.1 {
        return Err(Error::data(&row.mask_path, size_mismatch(sizes.0, sizes.1), "export image and mask at one size"));
    }
    Ok(mask)
}

pub(super) fn size_mismatch(image: (u32, u32), mask: (u32, u32)) -> String {
    format!("the mask is {}x{} pixels but its image is {}x{}", mask.0, mask.1, image.0, image.1)
}

/// One row ready to be put into a batch.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Index into the manifest's rows.
    pub row: usize,
    /// Class label.
    pub label: usize,
    /// Token ids, one of them the image's placeholder.
    pub ids: Vec<i64>,
    /// `ids[answer_start..]` is the answer.
    pub answer_start: usize,
    /// The pixels, possibly shared with the cache.
    pub pixels: Arc<Pixels>,
    /// What is known of the picture's vision features; `None` where none are kept.
    pub seen: Option<Seen>,
}

/// An error of a row's files, told with the row.
pub(super) fn at_row(row: &Row, error: &Error) -> Error {
    let hint = match error.hint() {
        hint if hint.is_empty() => "mend or remove the row".to_owned(),
        hint => hint,
    };
    let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
    Error::data_line(&row.csv, row.line, format!("{error}{cause}"), hint)
}
