//! Scores of masks and answers: pure functions on slices, no tensors, no files.

pub mod distance;
pub mod paired;
pub mod porter;
pub mod segmentation;
pub mod structure;
pub mod table;
pub mod text;
pub mod threshold_average;
