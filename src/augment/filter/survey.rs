//! What real training pictures of a class measure, the yardstick of the pixel tests.

use super::pixels::{Real, Seam, Thumbnail, full_weights, median_inside, nearest_similarities, seam};
use super::{Spread, Thresholds};
use crate::Result;
use crate::augment::hold::{Frame, Hold, HoldOptions};
use crate::data::decode;
use crate::data::image::foreground;
use crate::metrics::neighbours::quantile;
use crate::tensor::rng;
use rayon::prelude::*;
use std::path::Path;

/// Fewer real pictures than this are no ground to call a picture a duplicate.
const LEAST: usize = 8;

/// Medians inside lesions, seams where pairs would have theirs, and thumbnails of `pictures` (image, mask) of one class;
/// `side` is that of the generator's square.
///
/// # Errors
/// [`crate::Error::Data`] for a file that cannot be read; [`crate::Error::Shape`] when image and mask differ in size.
pub fn real(pictures: &[(&Path, &Path)], side: u32, thresholds: &Thresholds, seed: u64) -> Result<Real> {
    let one = |(number, (image, mask)): (usize, &(&Path, &Path))| -> Result<(Option<f64>, Option<Seam>, Thumbnail)> {
        let picture = decode::picture(image)?.to_rgb8();
        let label = foreground(&decode::mask(mask)?);
        let frame = Frame::new(picture.dimensions(), side)?;
        let mut rng = rng::stream(seed, "survey", &[number as u64]);
        let hold = Hold::draw(&label, None, &frame, &HoldOptions::default(), &mut rng)?;
        Ok((median_inside(&picture, &label), seam(&picture, &hold), Thumbnail::of(&picture)))
    };
    let measured: Vec<_> = pictures.par_iter().enumerate().map(one).collect::<Result<_>>()?;
    let medians: Vec<f64> = measured.iter().filter_map(|m| m.0).collect();
    let seams: Vec<Seam> = measured.iter().filter_map(|m| m.1).collect();
    let thumbnails: Vec<Thumbnail> = measured.into_iter().map(|m| m.2).collect();
    let similar = nearest_similarities(&thumbnails, &full_weights());
    Ok(Real {
        median: Spread::of(&medians),
        seam_jump: Spread::of(&seams.iter().map(|seam| seam.jump).collect::<Vec<_>>()),
        seam_step: Spread::of(&seams.iter().map(|seam| seam.step).collect::<Vec<_>>()),
        similarity_max: (thumbnails.len() >= LEAST).then(|| quantile(&similar, thresholds.cosine_quantile)).flatten(),
        thumbnails,
    })
}
