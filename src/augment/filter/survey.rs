//! Measures real training images of a class; the pixel tests compare generated images with these statistics.

use super::pixels::{RealStatistics, Seam, Thumbnail, full_weights, median_inside, nearest_similarities, seam};
use super::{Spread, Thresholds};
use crate::Result;
use crate::augment::inpaint_mask::{Frame, InpaintMask, InpaintMaskOptions};
use crate::data::decode;
use crate::data::image::foreground;
use crate::metrics::neighbours::quantile;
use crate::tensor::rng;
use rayon::prelude::*;
use std::path::Path;

/// Minimum number of real images for a duplicate threshold.
const LEAST: usize = 8;

/// Measures the images of one class, given as (image, mask) pairs: median brightness of lesions, seams where pairs
/// would have them, thumbnails. `side` is the side of the generator's square.
///
/// # Errors
/// [`crate::Error::Data`] for a file that cannot be read; [`crate::Error::Shape`] when image and mask differ in size.
pub fn measure(images: &[(&Path, &Path)], side: u32, thresholds: &Thresholds, seed: u64) -> Result<RealStatistics> {
    let one = |(number, (image, mask)): (usize, &(&Path, &Path))| -> Result<(Option<f64>, Option<Seam>, Thumbnail)> {
        let image = decode::image(image)?.to_rgb8();
        let label = foreground(&decode::mask(mask)?);
        let frame = Frame::new(image.dimensions(), side)?;
        let mut rng = rng::stream(seed, "survey", &[number as u64]);
        let inpaint_mask = InpaintMask::draw(&label, None, &frame, &InpaintMaskOptions::default(), &mut rng)?;
        Ok((median_inside(&image, &label), seam(&image, &inpaint_mask), Thumbnail::of(&image)))
    };
    let measured: Vec<_> = images.par_iter().enumerate().map(one).collect::<Result<_>>()?;
    let medians: Vec<f64> = measured.iter().filter_map(|m| m.0).collect();
    let seams: Vec<Seam> = measured.iter().filter_map(|m| m.1).collect();
    let thumbnails: Vec<Thumbnail> = measured.into_iter().map(|m| m.2).collect();
    let similar = nearest_similarities(&thumbnails, &full_weights());
    Ok(RealStatistics {
        median: Spread::of(&medians),
        seam_jump: Spread::of(&seams.iter().map(|seam| seam.jump).collect::<Vec<_>>()),
        seam_step: Spread::of(&seams.iter().map(|seam| seam.step).collect::<Vec<_>>()),
        similarity_max: (thumbnails.len() >= LEAST).then(|| quantile(&similar, thresholds.cosine_quantile)).flatten(),
        thumbnails,
    })
}
