//! Measures real training images of a class; the pixel tests compare generated images with these statistics.

use super::ValueSpread;
use super::pixels::{RealStatistics, Seam, median_inside, seam};
use crate::Result;
use crate::augment::inpaint_mask::{InpaintMask, SquareFrame};
use crate::augment::settings::Mode;
use crate::data::decode;
use crate::data::image::foreground;
use crate::tensor::rng;
use rayon::prelude::*;
use std::path::Path;

/// Measures the images of one class, given as (image, mask) pairs: median brightness of lesions, seams where pairs
/// would have them (for a `mode` that makes new lesions: at the borders of the real lesions). `side` is the side
/// of the generator's square.
///
/// # Errors
/// [`crate::Error::Data`] for a file that cannot be read; [`crate::Error::Shape`] when image and mask differ in size.
pub fn measure(images: &[(&Path, &Path)], (side, mode): (u32, Mode), seed: u64) -> Result<RealStatistics> {
    let one = |(number, (image, mask)): (usize, &(&Path, &Path))| -> Result<(Option<f64>, Option<Seam>)> {
        let image = decode::image(image)?.to_rgb8();
        let label = foreground(&decode::mask(mask)?);
        let frame = SquareFrame::new(image.dimensions(), side)?;
        let mut rng = rng::stream(seed, "survey", &[number as u64]);
        let inpaint_mask = match mode {
            Mode::EditLesion | Mode::InsertLesion => InpaintMask::around(&label, &frame, &mut rng)?,
            _ => InpaintMask::draw(&label, None, &frame, &mut rng)?,
        };
        Ok((median_inside(&image, &label), seam(&image, &inpaint_mask)))
    };
    let measured: Vec<_> = images.par_iter().enumerate().map(one).collect::<Result<_>>()?;
    let medians: Vec<f64> = measured.iter().filter_map(|m| m.0).collect();
    let seams: Vec<Seam> = measured.iter().filter_map(|m| m.1).collect();
    Ok(RealStatistics {
        median: ValueSpread::of(&medians),
        seam_jump: ValueSpread::of(&seams.iter().map(|seam| seam.jump).collect::<Vec<_>>()),
        seam_step: ValueSpread::of(&seams.iter().map(|seam| seam.step).collect::<Vec<_>>()),
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use image::{GrayImage, Luma, Rgb, RgbImage};

    use super::*;

    #[test]
    fn brightness_and_seams_of_real_images_are_measured() {
        let folder = tempfile::tempdir().unwrap();
        let mask = folder.path().join("mask.png");
        let label = |x: u32, y: u32| Luma([u8::from(x.abs_diff(80) < 12 && y.abs_diff(60) < 9) * 255]);
        GrayImage::from_fn(160, 120, label).save(&mask).unwrap();
        let image = |number: u32| {
            let path = folder.path().join(format!("{number}.png"));
            let grey = |x: u32, y: u32| u8::try_from((x * (number + 1) + y * 7) % 256).unwrap();
            RgbImage::from_fn(160, 120, |x, y| Rgb([grey(x, y); 3])).save(&path).unwrap();
            path
        };
        let images: Vec<PathBuf> = (0..8).map(image).collect();
        let pairs: Vec<(&Path, &Path)> = images.iter().map(|image| (image.as_path(), mask.as_path())).collect();
        let all = measure(&pairs, (256, Mode::KeepLesion), 1).unwrap();
        assert_eq!([all.median, all.seam_jump, all.seam_step].map(|of| of.count), [8; 3]);
        assert!(all.seam_jump.mean > 0.0 && all.seam_step.mean > 0.0, "{all:?}");
    }
}
