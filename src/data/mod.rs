//! Files -> samples -> batches.

pub mod phantom;
pub mod position;
pub mod prepare;
pub mod templates;
