//! Exact Euclidean distances to a mask, and dilation by them.
//!
//! Source: Felzenszwalb and Huttenlocher, "Distance Transforms of Sampled Functions" (2012): columns first, then the
//! lower envelope of parabolas along each row. All arithmetic is on integers, so the result is exact.

use image::GrayImage;

/// Squared distance in pixels from each pixel to the nearest one that is set (`to_set`) or not set, row by row; 0 on
/// such a pixel, `u32::MAX` everywhere when there is none.
pub fn squared_distances(mask: &GrayImage, to_set: bool) -> Vec<u32> {
    let (width, height) = (mask.width() as usize, mask.height() as usize);
    let is_target = |at: usize| (mask.as_raw()[at] > 0) == to_set;
    if !(0..width * height).any(is_target) {
        return vec![u32::MAX; width * height];
    }
    // Farther than any pixel, and its square stays within i64.
    let far = i64::try_from(width + height).unwrap_or(i64::MAX);
    let columns = column_distances(width, height, far, is_target);
    let mut distances = Vec::with_capacity(width * height);
    let mut envelope = Envelope::default();
    for row in columns.chunks(width) {
        envelope.row(row, &mut distances);
    }
    distances
}

/// Distance along the column to the nearest target, at most `far`.
fn column_distances(width: usize, height: usize, far: i64, is_target: impl Fn(usize) -> bool) -> Vec<i64> {
    let mut columns = vec![far; width * height];
    for y in 0..height {
        for x in 0..width {
            let at = y * width + x;
            let above = if y > 0 { columns[at - width] + 1 } else { far };
            columns[at] = if is_target(at) { 0 } else { above.min(far) };
        }
    }
    for at in (0..width * height.saturating_sub(1)).rev() {
        columns[at] = columns[at].min(columns[at + width] + 1);
    }
    columns
}

/// Parabolas of one row that are the lowest somewhere: their vertices and where each begins.
#[derive(Default)]
struct Envelope {
    vertices: Vec<usize>,
    starts: Vec<i64>,
}

impl Envelope {
    /// Appends the squared distances of a row whose column distances are `row`.
    #[expect(clippy::cast_possible_wrap, reason = "picture sides")]
    fn row(&mut self, row: &[i64], distances: &mut Vec<u32>) {
        let height = |vertex: usize, x: i64| (x - vertex as i64).pow(2) + row[vertex] * row[vertex];
        self.vertices.clear();
        self.starts.clear();
        for vertex in 0..row.len() {
            let mut start = 0;
            while let (Some(&last), Some(&from)) = (self.vertices.last(), self.starts.last()) {
                // The first x at which the new parabola is lower than the last one.
                let (a, b) = (last as i64, vertex as i64);
                let crossing = b * b - a * a + row[vertex] * row[vertex] - row[last] * row[last];
                start = crossing.div_euclid(2 * (b - a)) + 1;
                if start > from {
                    break;
                }
                self.vertices.pop();
                self.starts.pop();
                start = 0;
            }
            if start < row.len() as i64 {
                self.vertices.push(vertex);
                self.starts.push(start.max(0));
            }
        }
        let mut current = 0;
        for x in 0..row.len() as i64 {
            while self.starts.get(current + 1).is_some_and(|&start| start <= x) {
                current += 1;
            }
            distances.push(u32::try_from(height(self.vertices[current], x)).unwrap_or(u32::MAX));
        }
    }
}

/// Whether a squared distance is at most `reach` pixels.
pub(super) fn is_within(squared: u32, reach: f64) -> bool {
    squared != u32::MAX && f64::from(squared) <= reach * reach
}

/// The mask grown by a disc of radius `reach_px`, 0 or 255.
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
        assert_eq!(dilate(&GrayImage::new(5, 4), 100.0), GrayImage::new(5, 4), "nothing grows out of nothing");
    }
}
