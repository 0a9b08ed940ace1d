//! All scores of one predicted mask against its truth that clinicians ask for: overlap of pixels, distances of
//! borders, lesions and area. Dice and IoU are in [`segmentation`](crate::segmentation).

use super::border::BorderDistances;
use super::grid::{Size, Spacing};
use super::lesions::LesionCounts;
use super::surface::SurfaceDistances;
use prsmed_base::error::Result;

/// Scores of one mask. A score that is not defined is `None` and does not enter a mean.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MaskScores {
    /// Share of the true pixels that are predicted, 0..=1; `None` for an empty truth.
    pub sensitivity: Option<f64>,
    /// Share of the predicted pixels that are true, 0..=1; `None` for an empty prediction.
    pub precision: Option<f64>,
    /// Surface Dice at the tolerance, 0..=1; 1 if both masks are empty, 0 if one is.
    pub surface_dice: f64,
    /// Distances between the borders; `None` if a mask is empty.
    pub border: Option<BorderDistances>,
    /// Lesions of both masks.
    pub lesions: LesionCounts,
    /// Area (volume) of the prediction less that of the truth, in the squared (cubic) unit of the spacing.
    pub area_difference: f64,
    /// Absolute area difference as a fraction of the true area; `None` for an empty truth.
    pub area_error_frac: Option<f64>,
}

impl MaskScores {
    /// Scores a mask in row-major order. `tolerance` is in the unit of the spacing.
    ///
    /// # Errors
    /// [`Error::Shape`](prsmed_base::Error::Shape) if a mask has another size; [`Error::Config`](prsmed_base::Error::Config) for a
    /// spacing that is not above 0.
    pub fn of(prediction: &[bool], truth: &[bool], size: Size, spacing: Spacing, tolerance: f64) -> Result<Self> {
        let surface = SurfaceDistances::of(prediction, truth, size, spacing)?;
        let count = |mask: &[bool]| mask.iter().filter(|set| **set).count() as f64;
        let both =
            prediction.iter().zip(truth).filter(|(predicted, is_truth)| **predicted && **is_truth).count() as f64;
        let (predicted, true_count) = (count(prediction), count(truth));
        let part = |value: f64, all: f64| (all > 0.0).then(|| value / all);
        let difference = predicted - true_count;
        Ok(Self {
            sensitivity: part(both, true_count),
            precision: part(both, predicted),
            surface_dice: surface.surface_dice(tolerance),
            border: BorderDistances::of(prediction, truth, size, spacing)?,
            lesions: LesionCounts::of(prediction, truth, size)?,
            area_difference: difference * spacing.cell(size),
            area_error_frac: part(difference.abs(), true_count),
        })
    }
}

#[cfg(test)]
#[path = "mask_scores_tests.rs"]
mod tests;
