//! Files -> samples -> batches.
pub mod text;
