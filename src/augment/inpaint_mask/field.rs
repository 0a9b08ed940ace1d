//! Field of view: the part of an image with content, such as the disc of an endoscope or fundus camera, or the fan of
//! an ultrasound probe.

use image::{GrayImage, RgbImage};

use super::{dilate, distance, map, squared_distances};

/// A pixel is black when no channel is above this level. JPEG and sensor noise stay below it.
const BLACK: u8 = 12;
/// If the largest region is smaller than this fraction of the image, the whole image is valid.
const LEAST_FRAC: f64 = 0.05;

/// Dark gaps up to twice this fraction of the longer side are closed: shadows and fluid in an ultrasound fan, an open
/// edge of a black lung.
const GAP_FRAC: f64 = 0.02;

/// The valid pixels, 0 or 255: the largest 4-connected region that is not black, with narrow gaps closed and holes
/// filled. If that region is smaller than a twentieth of the image, all pixels are valid.
pub fn field_of_view(image: &RgbImage) -> GrayImage {
    let size = image.dimensions();
    let lit: Vec<bool> = image.pixels().map(|pixel| pixel.0.iter().any(|&value| value > BLACK)).collect();
    let gap_px = GAP_FRAC * f64::from(size.0.max(size.1));
    let grown: Vec<bool> = dilate(&map(size, |at| lit[at]), gap_px).iter().map(|&value| value > 0).collect();
    let filled = largest_filled(&grown, size);
    let to_outside = squared_distances(&filled, false);
    map(size, |at| !distance::is_within(to_outside[at], gap_px))
}

/// The largest region of `lit` with its holes filled; all pixels if that region is too small.
fn largest_filled(lit: &[bool], size: (u32, u32)) -> GrayImage {
    let (width, height) = (size.0 as usize, size.1 as usize);
    let mut is_left = lit.to_vec();
    let mut largest = Vec::new();
    for start in 0..lit.len() {
        let region = flood([start], &mut is_left, size);
        if region.len() > largest.len() {
            largest = region;
        }
    }
    if (largest.len() as f64) < LEAST_FRAC * lit.len() as f64 {
        return map(size, |_| true);
    }
    // what of the rest the border of the image does not reach are holes
    let mut is_filled = vec![true; lit.len()];
    for &at in &largest {
        is_filled[at] = false;
    }
    let rows = (0..height).flat_map(|y| [y * width, y * width + width - 1]);
    flood(rows.chain(0..width).chain((height - 1) * width..height * width), &mut is_filled, size);
    for &at in &largest {
        is_filled[at] = true;
    }
    map(size, |at| is_filled[at])
}

/// The pixels of `is_left` that are 4-connected with one of `starts`; it has none of them afterwards.
fn flood(starts: impl IntoIterator<Item = usize>, is_left: &mut [bool], size: (u32, u32)) -> Vec<usize> {
    let (width, height) = (size.0 as usize, size.1 as usize);
    let mut take = |at: usize| std::mem::take(&mut is_left[at]);
    let mut found: Vec<usize> = starts.into_iter().filter(|&at| take(at)).collect();
    let mut next = 0;
    while let Some(&at) = found.get(next) {
        next += 1;
        let (x, y) = (at % width, at / width);
        let neighbours = [
            (x > 0).then(|| at - 1),
            (x + 1 < width).then_some(at + 1),
            (y > 0).then(|| at - width),
            (y + 1 < height).then_some(at + width),
        ];
        found.extend(neighbours.into_iter().flatten().filter(|&neighbour| take(neighbour)));
    }
    found
}

#[cfg(test)]
mod tests {
    use image::Rgb;

    use super::*;

    #[test]
    fn field_of_a_disc_ignores_dark_spots_and_a_letter_outside() {
        let inside = |x: u32, y: u32| x.abs_diff(40).pow(2) + y.abs_diff(30).pow(2) <= 25 * 25;
        let image = RgbImage::from_fn(80, 60, |x, y| {
            let spot = x.abs_diff(45) < 4 && y.abs_diff(33) < 4;
            let letter = x < 3 && y < 5;
            Rgb(if (inside(x, y) && !spot) || letter { [180, 90, 60] } else { [3, 9, 0] })
        });
        let field = field_of_view(&image);
        let wrong = field.enumerate_pixels().filter(|(x, y, value)| (value[0] == 255) != inside(*x, *y)).count();
        assert!(wrong <= 8, "{wrong}: closing rounds single pixels of the edge");
    }

    #[test]
    fn a_narrow_dark_gap_is_part_of_the_field() {
        let bright = |x: u32| !(48..52).contains(&x);
        let image = RgbImage::from_fn(200, 100, |x, y| Rgb([if bright(x) && y < 80 { 90 } else { 0 }; 3]));
        let field = field_of_view(&image);
        // The wedge's open end is rounded.
        let clear = |x: u32, y: u32| bright(x) || !(77..80).contains(&y);
        assert!(field.enumerate_pixels().all(|(x, y, value)| !clear(x, y) || (value[0] == 255) == (y < 80)));
    }

    #[test]
    fn bright_and_black_images_are_valid_everywhere() {
        for value in [0, 200] {
            let field = field_of_view(&RgbImage::from_pixel(9, 7, Rgb([value; 3])));
            assert!(field.iter().all(|&value| value == 255));
        }
    }
}
