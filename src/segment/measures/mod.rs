//! Measures of a model on rows: calibration of its memory, validation, and scores of volumes.

pub mod calibration;
pub(super) mod validation;
pub mod volume_scores;
