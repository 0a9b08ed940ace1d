//! Files -> samples -> batches.
//!
//! ```text
//! manifest (CSV rows) -> split -> order (row lists) -> loader: decode -> jitter or classical -> image -> sample -> batch
//!      \-> check (every bad row)     mix (real and synthetic rows)                     \-> restate (the text of a moved mask)
//! ```
//!
//! This level knows files, pixels and text; it knows no model. Text becomes ids through [`loader::TextEncoder`].

pub mod annotation;
pub mod batch;
pub mod check;
pub mod classical;
pub mod decode;
pub mod features;
pub mod image;
pub mod jitter;
pub mod loader;
pub mod manifest;
pub mod mix;
pub mod order;
pub mod phantom;
pub mod picture;
pub mod plot;
pub mod position;
pub mod prepare;
pub mod resample;
pub mod restate;
pub mod sample;
pub mod split;
pub mod templates;
pub mod text;

mod random;

#[cfg(test)]
pub(crate) mod fixture;
