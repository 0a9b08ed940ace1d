//! Regions that an inpainting network learns to fill: the lesion with a rim, the lesion moved and bent, random
//! shapes, which also make it fill regions without a lesion, and everything but the lesion.

use crate::augment::inpaint_mask::{dilate, field_of_view};
use crate::augment::mask_bank::place_mask;
use image::{GrayImage, Luma, RgbImage};
use rand::Rng;

/// Kinds of regions.
const KINDS: usize = 4;
/// Widest rim around a lesion, in model pixels.
const RIM_MAX_PX: f64 = 16.0;
/// Most ellipses of a random shape.
const ELLIPSES_MAX: usize = 3;
/// Half axes of an ellipse as parts of the longer side of the image.
const HALF_AXIS_FRAC: std::ops::Range<f64> = 0.05..0.25;

/// Region `number` of an image, at its size, 0 or 255. `label` is the lesion mask (0 or 255). Numbers take turns: 0 is
/// the lesion with a rim, 1 the lesion at another place, 2 a random shape, 3 everything but the lesion with a rim. An
/// image without a lesion gets random shapes only.
pub(super) fn region(
    number: usize,
    image: &RgbImage,
    label: &GrayImage,
    pixels_per_model_pixel: f64,
    rng: &mut impl Rng,
) -> GrayImage {
    let is_empty = label.iter().all(|&value| value == 0);
    if is_empty || number % KINDS == 2 {
        return random_shape(label.dimensions(), rng);
    }
    if number % KINDS == 1 {
        let field = field_of_view(image);
        // a lesion that fits nowhere else stays where it is
        if let Ok(placed) = place_mask(label, "", &field, rng) {
            return placed.mask;
        }
    }
    let rim = rng.random_range(0.0..=RIM_MAX_PX) * pixels_per_model_pixel;
    let mut region = dilate(label, rim);
    if number % KINDS == 3 {
        region.iter_mut().for_each(|value| *value = 255 - *value);
    }
    region
}

/// One to three turned ellipses.
fn random_shape((width, height): (u32, u32), rng: &mut impl Rng) -> GrayImage {
    let (w, h) = (f64::from(width), f64::from(height));
    let longer = w.max(h);
    let mut shape = GrayImage::new(width, height);
    for _ in 0..rng.random_range(1..=ELLIPSES_MAX) {
        let centre = (rng.random_range(0.0..w), rng.random_range(0.0..h));
        let half = [0, 1].map(|_| rng.random_range(HALF_AXIS_FRAC) * longer);
        let (sin, cos) = rng.random_range(0.0..std::f64::consts::PI).sin_cos();
        for (x, y, pixel) in shape.enumerate_pixels_mut() {
            let (dx, dy) = (f64::from(x) + 0.5 - centre.0, f64::from(y) + 0.5 - centre.1);
            let (along, across) = ((dx * cos + dy * sin) / half[0], (dy * cos - dx * sin) / half[1]);
            if along * along + across * across <= 1.0 {
                *pixel = Luma([255]);
            }
        }
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    fn area(mask: &GrayImage) -> usize {
        mask.iter().filter(|&&value| value > 0).count()
    }

    #[test]
    fn regions_take_turns_and_follow_the_lesion() {
        let image = RgbImage::from_pixel(96, 64, image::Rgb([120; 3]));
        let pixels_per_model_pixel = 1.5;
        let label = GrayImage::from_fn(96, 64, |x, y| {
            Luma([if (20..36).contains(&x) && (20..32).contains(&y) { 255 } else { 0 }])
        });
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        for _ in 0..20 {
            let rimmed = region(4, &image, &label, pixels_per_model_pixel, &mut rng);
            assert!(label.iter().zip(rimmed.iter()).all(|(inside, region)| region >= inside), "covers the lesion");
            let moved = region(1, &image, &label, pixels_per_model_pixel, &mut rng);
            let ratio = area(&moved) as f64 / area(&label) as f64;
            assert!((0.2..4.0).contains(&ratio) && moved != label, "a lesion of similar size elsewhere: {ratio}");
            let rest = region(3, &image, &label, pixels_per_model_pixel, &mut rng);
            assert!(
                label.iter().zip(rest.iter()).all(|(inside, region)| *inside == 0 || *region == 0),
                "spares the lesion"
            );
            assert!(area(&rest) > 96 * 64 / 2);
            let shape = region(2, &image, &label, pixels_per_model_pixel, &mut rng);
            assert!(area(&shape) > 0 && area(&shape) < 96 * 64);
        }
        let empty = GrayImage::new(96, 64);
        assert!(
            area(&region(0, &image, &empty, pixels_per_model_pixel, &mut rng)) > 0,
            "there is always a region to fill"
        );
    }
}
