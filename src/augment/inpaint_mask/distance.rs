//! Exact squared distances of a mask in whole pixels, and dilation with them.

use image::GrayImage;

use crate::metrics::distance_transform::Nearest;
use crate::metrics::grid::{Size, Spacing};

/// Squared distance in pixels from each pixel to the nearest one that is set (`to_set`) or not set, row by row; 0 on
/// such a pixel, `u32::MAX` everywhere when there is none.
pub fn squared_distances(mask: &GrayImage, to_set: bool) -> Vec<u32> {
    let size = Size::image(mask.height() as usize, mask.width() as usize);
    let is_target: Vec<bool> = mask.iter().map(|value| (*value > 0) == to_set).collect();
    let Some(nearest) = Nearest::of(&is_target, size, Spacing::PIXELS) else { return vec![u32::MAX; is_target.len()] };
    // whole numbers, exact in f64
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
    nearest.squared.into_iter().map(|squared| squared as u32).collect()
}

/// Whether a squared distance is at most `reach` pixels.
pub(super) fn is_within(squared: u32, reach: f64) -> bool {
    squared != u32::MAX && f64::from(squared) <= reach * reach
}

/// The mask dilated by a disc of radius `reach_px`, 0 or 255.
pub fn dilate(mask: &GrayImage, reach_px: f64) -> GrayImage {
    let distances = squared_distances(mask, true);
    super::map(mask.dimensions(), |at| is_within(distances[at], reach_px))
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn distances_equal_those_of_all_pairs() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for case in 0..60 {
            let (width, height) = (rng.random_range(1..23), rng.random_range(1..23));
            let density = [0.0, 0.01, 0.1, 0.6, 1.0][case % 5];
            let mask = GrayImage::from_fn(width, height, |_, _| image::Luma([u8::from(rng.random_bool(density))]));
            for to_set in [true, false] {
                let found = squared_distances(&mask, to_set);
                for (at, (x, y, _)) in mask.enumerate_pixels().enumerate() {
                    let expected = mask
                        .enumerate_pixels()
                        .filter(|(_, _, value)| (value[0] > 0) == to_set)
                        .map(|(u, v, _)| x.abs_diff(u).pow(2) + y.abs_diff(v).pow(2))
                        .min()
                        .unwrap_or(u32::MAX);
                    assert_eq!(found[at], expected, "{width}x{height} at {x},{y}");
                }
            }
        }
    }

    #[test]
    fn a_dilated_pixel_is_a_disc() {
        let mut mask = GrayImage::new(41, 41);
        mask.put_pixel(20, 20, image::Luma([255]));
        let disc = dilate(&mask, 10.0);
        for (x, y, value) in disc.enumerate_pixels() {
            let inside = x.abs_diff(20).pow(2) + y.abs_diff(20).pow(2) <= 100;
            assert_eq!(value[0] == 255, inside, "{x},{y}");
        }
        assert_eq!(dilate(&GrayImage::new(5, 4), 100.0), GrayImage::new(5, 4), "an empty mask stays empty");
    }
}
