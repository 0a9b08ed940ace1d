//! Images, masks, volumes and tables of medical data: files -> samples -> batches.
//!
//! PNG, JPEG and TIFF images as Pillow decodes them, DICOM and NIfTI volumes with their positions and units ([`volume`]),
//! tables of questions and answers ([`manifest`]), splits that keep a patient in one part ([`split`]), and checks that name
//! the line and the remedy ([`mod@check`]). Nothing is guessed in silence: what is unclear is refused or noted.
//!
//! ```no_run
//! use prsmed_data::manifest::{Manifest, Split};
//!
//! let manifest = Manifest::open("data".as_ref(), None)?;
//! println!("{} training rows", manifest.rows_of(Split::Train).len());
//! # Ok::<(), prsmed_base::Error>(())
//! ```
//!
//! ```text
//! manifest (CSV rows) -> split -> samplers (row lists) -> loader: decode -> augmentation -> sample -> batch
//!      \-> check (every bad row)                                  flip_rotate, classical, relabel (texts)
//! ```
//!
//! This level handles files, pixels and text and does not depend on any model or on libtorch. [`loader::TextEncoder`] converts text
//! to token ids.

pub use prsmed_volume::{self as volume, decode, foreground as labels};

pub mod agreement;
pub mod annotation;
pub mod annotation_file;
pub mod batch;
pub mod bit_depth;
pub mod check;
pub mod classical;
pub mod csv_text;
pub mod familiarity;
pub mod features;
pub mod findings;
pub mod fingerprint;
pub mod flip_rotate;
pub mod grammar;
pub mod held_out;
pub mod identity;
pub mod image;
pub mod leaks;
pub mod length_sampler;
pub mod loader;
pub mod manifest;
pub mod marks;
pub mod mixing_sampler;
pub mod names;
pub mod patient;
pub mod phantom;
pub mod position;
pub mod prepare;
pub mod prepared;
pub mod relabel;
pub mod resample;
pub mod sample;
pub mod sheet;
pub mod split;
pub mod templates;
pub mod text;
pub mod unreadable;
pub mod word_check;

mod random;

#[cfg(test)]
extern crate self as prsmed_data;
#[cfg(test)]
mod fixture;
