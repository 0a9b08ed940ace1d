//! Scores of masks and answers, and comparisons: pure functions of slices, without file access and without libtorch.

pub mod bootstrap;
pub mod border;
pub mod detection;
pub mod distance_transform;
pub mod estimates;
pub mod grid;
pub mod lesions;
pub mod mask_scores;
pub mod order;
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
