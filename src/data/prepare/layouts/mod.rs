//! Layouts: how images and their masks lie in the folders of a user. A tree is read by one of [`all_layouts`]; folders of images
//! and of masks that the user names are matched by their names.

mod annotated;
mod bids_labels;
mod by_name;
mod by_words;
mod dataset_json;
mod dicom;
mod dicom_patients;
mod folder_patients;
mod matching;
mod mecovqa;
mod medsam;
mod named;
mod names;
mod outlines;
mod patterns;
mod prsmed_tables;
#[cfg(test)]
mod toy_layout;
mod voc_sets;
mod volumes;
mod words;

use super::options::PrepareOptions;
use super::table::PairTable;
use prsmed_base::Result;

pub(super) use matching::{Known, Meant, parts};
pub(super) use names::{is_mask_word, without_suffix};
pub(super) use patterns::{Group, GroupImage, GroupMask, Groups, Layout};
pub(super) use volumes::{called, file_name, stem};
#[cfg(test)]
pub(super) use {names::without_number, volumes::are_volumes};

/// The pairs of `--images` and `--masks`: of outlines, or of files that are matched by their names.
///
/// # Errors
/// [`prsmed_base::Error::Data`] for an ambiguous name, for example.
pub(super) fn of_folders(options: &PrepareOptions) -> Result<PairTable> {
    if annotated::knows(options) { annotated::table(options) } else { by_name::by_name(options) }
}

/// All layouts of trees. The one that explains most files counts, and the first of several.
pub(super) fn all_layouts() -> impl Iterator<Item = &'static Layout> {
    named::NAMED.iter().chain(LAYOUTS)
}

/// Layouts with files of their own, after those of [`named`].
const LAYOUTS: &[Layout] = &[
    medsam::MEDSAM,
    dicom::DICOM,
    mecovqa::MECOVQA,
    #[cfg(test)]
    toy_layout::TOY,
    by_words::NAMES,
    outlines::COCO,
    outlines::LABELME,
    outlines::YOLO,
];
