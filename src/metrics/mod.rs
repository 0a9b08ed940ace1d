//! Scores of masks and answers, distances between image sets, and comparisons: pure functions without file access.
//! [`distance`] and [`neighbours`] take feature tensors, the others take slices.

pub mod bootstrap;
pub mod border;
pub mod detection;
pub mod distance;
pub mod distance_transform;
pub mod estimates;
pub mod grid;
pub mod lesions;
pub mod mask_scores;
pub mod neighbours;
pub mod paired;
pub mod porter;
pub mod presence;
pub mod reliability;
pub mod segmentation;
pub mod structure;
pub mod surface;
pub mod table;
pub mod temperature;
pub mod text;
pub mod text_table;
pub mod threshold_average;
