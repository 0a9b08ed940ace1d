//! Exact Euclidean distance transform of an image or a volume with any spacing: the nearest set cell of every cell.
//!
//! Source: Maurer et al. 2003, as SciPy's `distance_transform_edt(return_indices=True)`: one axis after the other, rows
//! first. With unit spacing all numbers are whole and the arithmetic is exact, so ties are broken as SciPy does in two
//! dimensions.

use super::grid::{Size, Spacing};

/// No set cell found yet.
const NONE: u32 = u32::MAX;

/// The nearest set cell of every cell, in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Nearest {
    /// Squared distance to the nearest set cell, in the squared unit of the spacing.
    pub squared: Vec<f64>,
    /// Index of the nearest set cell.
    pub cell: Vec<u32>,
}

impl Nearest {
    /// `None` if no cell is set. `is_set` has the cells of `size`, fewer than 2^32.
    #[expect(clippy::cast_possible_truncation, reason = "fewer than 2^32 cells")]
    pub fn of(is_set: &[bool], size: Size, spacing: Spacing) -> Option<Self> {
        is_set.iter().any(|&set| set).then_some(())?;
        let cell = is_set.iter().enumerate().map(|(at, &set)| if set { at as u32 } else { NONE }).collect();
        let squared = is_set.iter().map(|&set| if set { 0.0 } else { f64::INFINITY }).collect();
        let mut found = Self { squared, cell };
        let (rows, columns) = (size.rows, size.columns);
        let mut line = Line::default();
        // an axis: number of cells along it, distance of two of them in the array, spacing
        for (count, stride, spacing) in
            [(rows, columns, spacing.row), (columns, 1, spacing.column), (size.depth(), rows * columns, spacing.slice)]
        {
            if count < 2 {
                continue;
            }
            for start in (0..is_set.len()).filter(|start| start / stride % count == 0) {
                line.replace(&mut found, (start, stride, count), spacing);
            }
        }
        Some(found.round_as_scipy(size, spacing))
    }

    /// Computes the squared distances again from the cells, with the roundings of SciPy: slice, row, column.
    fn round_as_scipy(mut self, size: Size, spacing: Spacing) -> Self {
        for (at, (squared, cell)) in self.squared.iter_mut().zip(&self.cell).enumerate() {
            let (from, to) = (size.position(at), size.position(*cell as usize));
            let steps = from.into_iter().zip(to).map(|(from, to)| from.abs_diff(to) as f64);
            *squared = steps.zip(spacing.axes()).map(|(steps, spacing)| (steps * spacing).powi(2)).sum();
        }
        self
    }
}

/// Squared distance of each cell to the nearest set cell; infinite everywhere if no cell is set.
pub fn squared_distances(is_set: &[bool], size: Size, spacing: Spacing) -> Vec<f64> {
    Nearest::of(is_set, size, spacing).map_or_else(|| vec![f64::INFINITY; is_set.len()], |nearest| nearest.squared)
}

/// A candidate of one line: its index along the line, the squared distance of its set cell from the line, and that cell.
type Site = (usize, f64, u32);

/// The candidates of one line that are nearest somewhere on it.
#[derive(Default)]
struct Line {
    kept: Vec<Site>,
}

impl Line {
    /// Replaces the set cell of each cell of one line by the nearest of the line's set cells. `(start, stride, count)`
    /// are the first cell of the line, the steps between cells, and their number.
    fn replace(&mut self, found: &mut Nearest, (start, stride, count): (usize, usize, usize), spacing: f64) {
        self.kept.clear();
        for i in 0..count {
            let at = start + i * stride;
            if found.cell[at] != NONE {
                self.keep((i, found.squared[at], found.cell[at]), spacing);
            }
        }
        if self.kept.is_empty() {
            return;
        }
        let mut current = 0;
        for i in 0..count {
            let squared = |(along, off, _): Site| (along.abs_diff(i) as f64 * spacing).powi(2) + off;
            while self.kept.get(current + 1).is_some_and(|&next| squared(self.kept[current]) > squared(next)) {
                current += 1;
            }
            let at = start + i * stride;
            found.squared[at] = squared(self.kept[current]);
            found.cell[at] = self.kept[current].2;
        }
    }

    /// Adds a candidate. The middle of three is dropped if the bisectors with its neighbours leave it no part of the
    /// line.
    fn keep(&mut self, (w, w_off, cell): Site, spacing: f64) {
        while let [.., (u, u_off, _), (v, v_off, _)] = self.kept[..] {
            let (a, b) = ((v - u) as f64 * spacing, (w - v) as f64 * spacing);
            let c = a + b;
            if c * v_off - b * u_off - a * w_off - a * b * c <= 0.0 {
                break;
            }
            self.kept.pop();
        }
        self.kept.push((w, w_off, cell));
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
        for case in 0..120 {
            let [slices, rows, columns] = [4, 15, 15].map(|most| rng.random_range(1..most));
            let size = if case % 2 == 0 { Size::image(rows, columns) } else { Size::volume(slices, rows, columns) };
            let spacing = if case % 3 == 0 {
                Spacing::PIXELS
            } else {
                Spacing { slice: 2.9, row: 0.7, column: rng.random_range(0.2..3.0) }
            };
            let density = [0.0, 0.02, 0.1, 0.6, 1.0][case % 5];
            let mask: Vec<bool> = (0..size.cells()).map(|_| rng.random_bool(density)).collect();
            let found = squared_distances(&mask, size, spacing);
            let nearest = Nearest::of(&mask, size, spacing);
            assert_eq!(nearest.is_some(), mask.contains(&true));
            for (at, found) in found.into_iter().enumerate() {
                let to = |other: usize| -> f64 {
                    let (a, b) = (size.position(at), size.position(other));
                    (0..3).map(|axis| (a[axis].abs_diff(b[axis]) as f64 * spacing.axes()[axis]).powi(2)).sum()
                };
                let expected = (0..mask.len()).filter(|&i| mask[i]).map(to).fold(f64::INFINITY, f64::min);
                let is_equal = found == expected || (found - expected).abs() < 1e-9;
                assert!(is_equal, "{size:?} at {at}: {found}, expected {expected}");
                if let Some(nearest) = &nearest {
                    let cell = nearest.cell[at] as usize;
                    assert!(mask[cell] && (to(cell) - expected).abs() < 1e-9, "{size:?} at {at}: {cell}");
                }
            }
        }
    }
}
