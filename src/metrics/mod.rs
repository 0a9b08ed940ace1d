//! Scores of masks and answers, distances and comparisons: pure functions, no files. [`distance`] and [`neighbours`] take
//! feature tensors, the others slices.

pub mod distance;
pub mod neighbours;
pub mod paired;
pub mod porter;
pub mod segmentation;
pub mod structure;
pub mod table;
pub mod text;
pub mod threshold_average;
