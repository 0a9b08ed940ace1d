//! Masks of structures before they are written, and files that are left out.

use std::collections::BTreeMap;
use std::path::PathBuf;

use image::DynamicImage;
use serde::Serialize;

use super::location::LocationWords;
use crate::decode;
use crate::manifest::Split;
use crate::marks::Mark;
use prsmed_base::{Error, files};

pub(super) const NO_MASK: &str = "no mask with this stem";
/// As [`NO_MASK`], for an image that a file of many images does not have.
pub(super) const NOT_LISTED: &str = "the annotation file does not have this image";
/// Before the number of a line.
pub(super) const NO_SEQUENCE: &str = "a line has no image of any sequence";
pub(super) const NO_IMAGE: &str = "no image with this stem";
pub(super) const NOT_AN_IMAGE: &str = concat!("not a ", prsmed_volume::image_formats!(), " file");
/// Before the kind of a file with annotations, which is no image.
pub(super) const IS_A: &str = "is not an image but";
/// Before the image of this name that the data root has.
pub(super) const OTHER_IMAGE: &str = "the data root has another image of this name, ";
pub(super) const NOT_UTF8: &str = "its name is not UTF-8";
/// Before the reason why a file cannot be read.
pub(super) const UNREADABLE: &str = "cannot be read";
pub(super) const EMPTY: &str = "the mask is empty";
/// Between the sizes of a mask and its image.
pub(super) const ITS_IMAGE: &str = " pixels, its image ";

/// A file that is not in the data root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The file.
    #[serde(serialize_with = "files::serialize_path")]
    pub path: PathBuf,
    /// Why it was skipped.
    pub reason: String,
}

impl Skipped {
    /// The reason without names and numbers: files that are skipped for one kind of reason have it in common.
    fn kind(&self) -> String {
        let end = self.reason.find([':', ';', '`', '#']).unwrap_or(self.reason.len());
        self.reason[..end].chars().filter(|c| !c.is_ascii_digit()).collect()
    }
}

/// Why a file cannot be used, with the remedy.
pub(super) fn reason_of(error: &Error) -> String {
    let reason = match error {
        Error::Data { line: Some(line), reason, .. } => format!("line {line}: {reason}"),
        Error::Data { reason, .. } => reason.clone(),
        Error::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    };
    match error.hint() {
        // it says no more than the reason
        hint if hint.is_empty() || hint == decode::REPLACE => reason,
        hint => format!("{reason} ({hint})"),
    }
}

/// Files by the kind of their reason, the most frequent kind first.
pub fn by_kind(skipped: &[Skipped]) -> Vec<Vec<&Skipped>> {
    let mut kinds: BTreeMap<String, Vec<&Skipped>> = BTreeMap::new();
    for file in skipped {
        kinds.entry(file.kind()).or_default().push(file);
    }
    let mut kinds: Vec<Vec<&Skipped>> = kinds.into_values().collect();
    kinds.sort_by_key(|files| std::cmp::Reverse(files.len()));
    kinds
}

/// A mask of one structure in one image, before it is written.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct MaskItem {
    /// Name of the image. Several structures of an image have the same.
    pub(super) image: String,
    /// Stem of the image file and the mask file in the data root.
    pub(super) stem: String,
    /// Patient, if patients are known.
    pub(super) patient: Option<String>,
    /// Split, if the table of pairs gives it.
    pub(super) split: Option<Split>,
    /// Questions and answers that the table of pairs gives.
    pub(super) texts: Vec<(String, String)>,
    /// Name of the structure.
    pub(super) target: String,
    /// Which of its instances the mask shows, for example `larger`; `None` for the whole.
    pub(super) which: Option<&'static str>,
    /// `None` if the structure is not in the image.
    pub(super) location: Option<LocationWords>,
    /// Size of a pixel in mm, across and down.
    pub(super) spacing_mm: Option<[f64; 2]>,
    /// File name of the volume, and number of the slice.
    pub(super) slice: Option<(String, usize)>,
    /// By which the image is known in another file; `None` if it has one single colour.
    pub(super) pixels: Option<Mark>,
}

impl MaskItem {
    /// The name of the volume or image that it is from.
    pub(super) fn source(&self) -> &str {
        self.slice.as_ref().map_or(&self.image, |(volume, _)| volume)
    }

    /// The item of an instance of its structure. Texts of the table are about the whole.
    pub(super) fn instance(&self, which: &'static str, location: Option<LocationWords>) -> Self {
        let stem = format!("{}_{which}", self.stem);
        Self { stem, which: Some(which), location, texts: Vec::new(), ..self.clone() }
    }

    /// The number of its slice; 0 for an image.
    pub(super) fn slice_number(&self) -> usize {
        self.slice.as_ref().map_or(0, |(_, number)| *number)
    }

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
