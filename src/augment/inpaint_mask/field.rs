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
    let regions = regions(lit, size);
    let mut areas = vec![0_usize; regions.iter().max().map_or(0, |&most| most as usize + 1)];
    for (&region, _) in regions.iter().zip(lit).filter(|(_, lit)| **lit) {
        areas[region as usize] += 1;
    }
    // the first one if several have the same area
    let largest =
        areas.iter().enumerate().rev().max_by_key(|(_, area)| **area).map_or((0, 0), |(at, area)| (at, *area));
    if (largest.1 as f64) < LEAST_FRAC * lit.len() as f64 {
        return map(size, |_| true);
    }
    let outside: Vec<bool> = regions.iter().map(|&region| region as usize != largest.0).collect();
    let open = reached_from_border(&outside, size);
    map(size, |at| !open[at])
}

/// The number of each pixel's 4-connected region of equal values.
fn regions(values: &[bool], size: (u32, u32)) -> Vec<u32> {
    let mut regions = vec![u32::MAX; values.len()];
    let mut next = 0;
    for start in 0..values.len() {
        if regions[start] == u32::MAX {
            regions[start] = next;
            flood(vec![start], size, |at| {
                let joins = regions[at] == u32::MAX && values[at] == values[start];
                if joins {
                    regions[at] = next;
                }
                joins
            });
            next += 1;
        }
    }
    regions
}

/// The pixels of the region `inside` that are connected to the image border within it.
fn reached_from_border(inside: &[bool], size: (u32, u32)) -> Vec<bool> {
    let (width, height) = (size.0 as usize, size.1 as usize);
    let is_border = |at: usize| {
        let (x, y) = (at % width, at / width);
        x == 0 || y == 0 || x + 1 == width || y + 1 == height
    };
    let starts: Vec<usize> = (0..inside.len()).filter(|&at| inside[at] && is_border(at)).collect();
    let mut reached = vec![false; inside.len()];
    for &start in &starts {
        reached[start] = true;
    }
    flood(starts, size, |at| inside[at] && !std::mem::replace(&mut reached[at], true));
    reached
}

/// Flood fill from the pixels on the stack. `joins` decides whether a pixel belongs to the region; it must return
/// true only once per pixel.
fn flood(mut stack: Vec<usize>, size: (u32, u32), mut joins: impl FnMut(usize) -> bool) {
    let (width, height) = (size.0 as usize, size.1 as usize);
    while let Some(at) = stack.pop() {
        let (x, y) = (at % width, at / width);
        let neighbours = [
            (x > 0).then(|| at - 1),
            (x + 1 < width).then_some(at + 1),
            (y > 0).then(|| at - width),
            (y + 1 < height).then_some(at + width),
        ];
        for neighbour in neighbours.into_iter().flatten() {
            if joins(neighbour) {
                stack.push(neighbour);
            }
        }
    }
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
