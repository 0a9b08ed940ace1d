//! Exact Euclidean distance transform of a mask on a grid with any spacing.
//!
//! Source: Felzenszwalb and Huttenlocher, "Distance Transforms of Sampled Functions" (2012): columns first, then the
//! lower envelope of parabolas along each row.

/// Distance between the centres of neighbouring pixels, in any unit.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Spacing {
    /// From one row to the next.
    pub row: f64,
    /// From one column to the next.
    pub column: f64,
}

impl Spacing {
    /// Distances in pixels.
    pub const PIXELS: Self = Self { row: 1.0, column: 1.0 };
}

/// Squared distance from each cell to the nearest cell that is set, in row-major order; infinite everywhere if no cell
/// is set. `is_set` has a multiple of `width` cells.
pub fn squared_distances(is_set: &[bool], width: usize, spacing: Spacing) -> Vec<f64> {
    let width = width.max(1);
    let mut squared = along_columns(is_set, width, spacing.row);
    let mut parabolas = Parabolas::default();
    for row in squared.chunks_mut(width) {
        parabolas.lower_envelope(row, spacing.column);
    }
    squared
}

/// Squared distance from each cell to the nearest set cell of its column.
fn along_columns(is_set: &[bool], width: usize, spacing: f64) -> Vec<f64> {
    let height = is_set.len() / width;
    let mut squared = vec![f64::INFINITY; is_set.len()];
    for x in 0..width {
        let mut sweep = |rows: &mut dyn Iterator<Item = usize>| {
            let mut steps: Option<usize> = None;
            for y in rows {
                let at = y * width + x;
                steps = if is_set[at] { Some(0) } else { steps.map(|steps| steps + 1) };
                if let Some(steps) = steps {
                    squared[at] = squared[at].min((steps as f64 * spacing).powi(2));
                }
            }
        };
        sweep(&mut (0..height));
        sweep(&mut (0..height).rev());
    }
    squared
}

/// Lower envelope of the parabolas of one row.
#[derive(Default)]
struct Parabolas {
    /// Column and height of each parabola of the envelope, from left to right.
    lowest: Vec<(usize, f64)>,
    /// Column from which each of them is the lowest.
    from: Vec<f64>,
}

impl Parabolas {
    /// Replaces the heights `row` by the lowest parabola at each column.
    fn lower_envelope(&mut self, row: &mut [f64], spacing: f64) {
        let unit = spacing * spacing;
        self.lowest.clear();
        self.from.clear();
        for (column, &height) in row.iter().enumerate().filter(|(_, height)| height.is_finite()) {
            let mut start = f64::NEG_INFINITY;
            while let (Some(&(last, last_height)), Some(&last_start)) = (self.lowest.last(), self.from.last()) {
                let (a, b) = (last as f64, column as f64);
                start = ((height - last_height) / unit + b * b - a * a) / (2.0 * (b - a));
                if start > last_start {
                    break;
                }
                self.lowest.pop();
                self.from.pop();
                start = f64::NEG_INFINITY;
            }
            self.lowest.push((column, height));
            self.from.push(start);
        }
        let mut current = 0;
        if self.lowest.is_empty() {
            return;
        }
        for (column, value) in row.iter_mut().enumerate() {
            while self.from.get(current + 1).is_some_and(|&from| from < column as f64) {
                current += 1;
            }
            let (centre, height) = self.lowest[current];
            *value = height + unit * (column.abs_diff(centre) as f64).powi(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn distances_equal_those_of_all_pairs() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for case in 0..80 {
            let (width, height) = (rng.random_range(1..19), rng.random_range(1..19));
            let spacing =
                if case % 2 == 0 { Spacing::PIXELS } else { Spacing { row: 0.7, column: rng.random_range(0.2..3.0) } };
            let density = [0.0, 0.02, 0.1, 0.6, 1.0][case % 5];
            let mask: Vec<bool> = (0..width * height).map(|_| rng.random_bool(density)).collect();
            let found = squared_distances(&mask, width, spacing);
            for (at, found) in found.into_iter().enumerate() {
                let to = |other: usize| {
                    let down = (at / width).abs_diff(other / width) as f64 * spacing.row;
                    let right = (at % width).abs_diff(other % width) as f64 * spacing.column;
                    down * down + right * right
                };
                let expected = (0..mask.len()).filter(|&i| mask[i]).map(to).fold(f64::INFINITY, f64::min);
                let is_equal = found == expected || (found - expected).abs() < 1e-9;
                assert!(is_equal, "{width}x{height} at {at}: {found}, expected {expected}");
            }
        }
    }
}
