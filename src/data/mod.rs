//! Images, masks, volumes and tables of medical data: files -> samples -> batches.
//!
//! flat images as Pillow decodes them, DICOM and NIfTI volumes with their positions and units ([`volume`]),
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

mod batches;
pub mod check;
pub mod familiarity;
pub mod features;
pub mod phantom;
mod pixels;
pub mod prepare;
pub mod split;
mod table;
pub mod text;
mod words;

mod progress;
mod random;

pub use batches::{batch, length_sampler, loader, mixing_sampler, sample, unreadable};
pub use check::{findings, fingerprint, identity, leaks, marks};
pub use pixels::{bit_depth, classical, flip_rotate, image, resample, sheet};
pub use table::{annotation, annotation_file, csv_text, held_out, manifest, names, patient, prepared};
pub use words::{agreement, geometry, grammar, numbers, position, relabel, templates, word_check};

#[cfg(test)]
extern crate self as prsmed_data;
#[cfg(test)]
mod fixture;
