//! Files -> samples -> batches.

pub mod picture;
