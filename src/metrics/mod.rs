//! Scores of masks and answers: pure functions on slices, no tensors, no files.

pub mod segmentation;
pub mod structure;
pub mod threshold_average;
