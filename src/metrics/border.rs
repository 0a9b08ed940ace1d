//! Hausdorff and average symmetric surface distances between the border pixels of two masks.
//!
//! A border pixel is a foreground pixel with a background pixel above, below, left or right of it (in a volume also in
//! the neighbouring slices); pixels outside of the image are background. Distances are between the centres of border
//! pixels, each with the same weight. These are the definitions of MONAI (`compute_hausdorff_distance`,
//! `compute_average_surface_distance(symmetric=True)`) and medpy. `DeepMind`'s distances, which weight the pieces of a
//! marching-squares contour by their length, differ from them by a fraction of a pixel; its surface Dice is in
//! [`surface`](crate::surface).

use super::distance_transform::squared_distances;
use super::grid::{ForegroundBox, Size, Spacing};
use super::order::quantile;
use prsmed_base::error::Result;

/// Distances between the borders of two masks that are not empty, in the unit of the spacing.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BorderDistances {
    /// Hausdorff distance: the largest distance of a border pixel of one mask to the nearest border pixel of the other.
    pub hd: f64,
    /// The 95th percentile of these distances in each direction (linear between two values), the larger of the two.
    pub hd95: f64,
    /// Average symmetric surface distance: the mean over the border pixels of both masks.
    pub assd: f64,
}

impl BorderDistances {
    /// Compares two masks in row-major order; `None` if one or both are empty, because there is no distance then.
    ///
    /// # Errors
    /// [`Error::Shape`](prsmed_base::Error::Shape) if a mask has another size; [`Error::Config`](prsmed_base::Error::Config) for a
    /// spacing that is not above 0.
    pub fn of(prediction: &[bool], truth: &[bool], size: Size, spacing: Spacing) -> Result<Option<Self>> {
        size.check(prediction, truth)?;
        spacing.check()?;
        if !(prediction.contains(&true) && truth.contains(&true)) {
            return Ok(None);
        }
        let window = ForegroundBox::around(prediction, truth, size).expect("masks that are not empty");
        let [a, b] = [prediction, truth].map(|mask| border(&window.of(mask), window.size));
        let distances = |from: &[bool], to: &[bool]| -> Vec<f64> {
            let squared = squared_distances(to, window.size, spacing);
            from.iter().zip(squared).filter(|(is_border, _)| **is_border).map(|(_, squared)| squared.sqrt()).collect()
        };
        let (there, back) = (distances(&a, &b), distances(&b, &a));
        let highest = |q: f64| {
            let end = |values: &[f64]| quantile(values, q).expect("distances are numbers");
            end(&there).max(end(&back))
        };
        let sum: f64 = there.iter().chain(&back).sum();
        let count = there.len() + back.len();
        Ok(Some(Self { hd: highest(1.0), hd95: highest(0.95), assd: sum / count as f64 }))
    }
}

/// The border pixels of a mask.
fn border(mask: &[bool], size: Size) -> Vec<bool> {
    let sides = [size.depth(), size.rows, size.columns];
    let axes = if size.slices.is_some() { 0..3 } else { 1..3 };
    let is_inside = |at: usize| {
        let place = size.position(at);
        axes.clone().all(|axis| {
            let at = |place_on_axis: usize| {
                let mut other = place;
                other[axis] = place_on_axis;
                mask[size.index(other)]
            };
            place[axis] > 0 && place[axis] + 1 < sides[axis] && at(place[axis] - 1) && at(place[axis] + 1)
        })
    };
    (0..mask.len()).map(|at| mask[at] && !is_inside(at)).collect()
}
