//! Settings of the filter (`filter.*`).

use crate::setting::settings;
use std::ops::Bound::{Excluded, Unbounded};

settings! {
    /// Limits of all tests of the filter (`filter.*`). Defaults come from published filters where one is named.
    pub struct Thresholds in "filter" {
        /// Least standard deviation of the image's brightness (0..=1). Images below it are blank.
        spread_min: f64 = 0.02, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Most clipped pixels beyond those of the source, as a part of the image.
        clipped_max: f64 = 0.01, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Least Dice of the filter model's mask and the label (PolypInpainter).
        dice_min: f64 = 0.8, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Most foreground of the filter model outside of the dilated label, as a part of the image.
        outside_max: f64 = 0.01, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Quantile of the filter model's agreement on real pairs. Pairs above it are too easy, once the quota is full.
        easy_quantile: f64 = 0.95, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Quantile of neighbour distances between real images that the distance to real features must not exceed
        /// (MedDiff-FT).
        knn_quantile: f64 = 0.99, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Quantile of similarities between real images that the largest similarity to a training image must not
        /// exceed.
        cosine_quantile: f64 = 0.999, results(Changes), resume(Fixed), range(0.0..=1.0);
        /// Standard deviations of the real statistic within which intensity and seams must lie (MAISI).
        sigma: f64 = 3.0, results(Changes), resume(Fixed), range((Excluded(0.0), Unbounded));
    }
}
