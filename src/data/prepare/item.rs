//! Masks of structures before they are written, and files that are left out.

use std::path::PathBuf;

use image::DynamicImage;
use serde::Serialize;

use super::location::LocationWords;

/// A file that is not in the data root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Why it was skipped.
    pub reason: String,
}

/// A mask of one structure in one image, before it is written.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Item {
    /// Name of the image. Several structures of an image have the same.
    pub(super) image: String,
    /// Stem of the image file and the mask file in the data root.
    pub(super) stem: String,
    /// Patient, if patients are known.
    pub(super) patient: Option<String>,
    /// Name of the structure.
    pub(super) target: String,
    /// `None` if the structure is not in the image.
    pub(super) location: Option<LocationWords>,
    /// Size of a pixel in mm, across and down.
    pub(super) spacing_mm: Option<[f64; 2]>,
    /// File name of the volume, and number of the slice.
    pub(super) slice: Option<(String, usize)>,
}

impl Item {
    /// Items of one unit are in one split.
    pub(super) fn unit(&self) -> &str {
        self.patient.as_deref().unwrap_or(&self.image)
    }
}

/// An image as PNG.
pub(super) fn png(image: &DynamicImage) -> Result<Vec<u8>, String> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let encoded = image.write_to(&mut bytes, image::ImageFormat::Png);
    encoded.map_err(|error| format!("cannot be written as PNG: {error}"))?;
    Ok(bytes.into_inner())
}
