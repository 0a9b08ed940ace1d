//! Scores of masks and answers, and comparisons: pure functions of slices, without file access and without libtorch.
//!
//! ```
//! use prsmed_metrics::segmentation::PixelCounts;
//!
//! let truth = [true, true, false, false];
//! let counts = PixelCounts::of(&[0.9, 0.2, 0.1, 0.6], &truth)?;
//! assert_eq!((counts.dice(), counts.iou()), (0.5, 1.0 / 3.0));
//! # Ok::<(), prsmed_base::Error>(())
//! ```
//!
//! Distances between surfaces are in mm ([`surface`]), scores of lesions count connected parts ([`lesions`]), and answers
//! are compared as words ([`text`]). Intervals are bootstrapped ([`bootstrap`]).

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
