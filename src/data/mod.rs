//! Data: files -> samples -> batches.
//!
//! ```text
//! manifest (CSV rows) -> split -> samplers (row lists) -> loader: decode -> augmentation -> sample -> batch
//!      \-> check (every bad row)                                  flip_rotate, classical, relabel (texts)
//! ```
//!
//! This level handles files, pixels and text and does not depend on any model. [`loader::TextEncoder`] converts text
//! to token ids.

pub mod annotation;
pub mod batch;
pub mod bit_depth;
pub mod check;
pub mod classical;
pub mod csv_text;
pub mod decode;
pub mod features;
pub mod findings;
pub mod fingerprint;
pub mod flip_rotate;
pub mod held_out;
pub mod identity;
pub mod image;
pub mod labels;
pub mod length_sampler;
pub mod loader;
pub mod manifest;
pub mod mixing_sampler;
pub mod phantom;
pub mod position;
pub mod prepare;
pub mod prepared;
pub mod questions;
pub mod relabel;
pub mod resample;
pub mod sample;
pub mod sheet;
pub mod split;
pub mod templates;
pub mod text;
pub mod unreadable;
pub mod volume;

mod colours;
mod mask_file;
mod photograph;
mod random;
mod transparency;

#[cfg(test)]
extern crate self as prsmed_data;
#[cfg(test)]
mod fixture;
