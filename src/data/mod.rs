//! Files -> samples -> batches.

pub mod picture;
pub mod text;
