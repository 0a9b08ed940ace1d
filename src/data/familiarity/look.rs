//! How an image looks: 56 numbers of the image at 64 x 64 pixels, for brightness, colours, directions of edges, sharpness and
//! texture (local binary patterns).

use crate::image::{Fit, sam_pixels};
use ::image::DynamicImage;
use std::f32::consts::PI;
use std::ops::Range;

/// Side of the image in pixels.
const SIDE: usize = SIDE_PX as usize;
const SIDE_PX: u32 = 64;
/// What the numbers of a look describe, and how many there are.
pub(super) const GROUPS: [(&str, usize); 5] =
    [("brightness", 9), ("colours", 5), ("directions of edges", 8), ("sharpness", 4), ("texture", 30)];
/// Difference of the channels below which a pixel is grey.
const GREY: f32 = 0.04;
/// Levels of a look's image, each of half the side: edges at all four, texture at the first three.
const LEVELS: usize = 4;

/// The numbers of [`GROUPS`]; `None` for an image of 0 pixels.
pub(super) fn look(image: &DynamicImage) -> Option<Vec<f32>> {
    let planes = sam_pixels(image, SIDE_PX, Fit::Stretch).ok()?;
    let [red, green, blue] = [0, 1, 2].map(|channel| {
        let plane = &planes[channel * SIDE * SIDE..][..SIDE * SIDE];
        plane.iter().map(|value| f32::from(*value) / 255.0).collect::<Vec<f32>>()
    });
    let grey = (0..SIDE * SIDE).map(|i| (red[i] + green[i] + blue[i]) / 3.0).collect();
    let grey = Plane { side: SIDE, values: grey };
    let mut look = grey.brightness();
    for other in [&red, &blue] {
        let difference: Vec<f32> = other.iter().zip(&green).map(|(other, green)| other - green).collect();
        look.extend([mean(&difference), deviation(&difference)]);
    }
    // grey images have no colour at all, and photographs have some nearly everywhere
    let is_grey = |i: &usize| red[*i].max(green[*i]).max(blue[*i]) - red[*i].min(green[*i]).min(blue[*i]) < GREY;
    look.push((0..SIDE * SIDE).filter(is_grey).count() as f32 / (SIDE * SIDE) as f32);
    look.extend(grey.edge_directions());
    let mut levels = vec![grey];
    for level in 0..LEVELS {
        levels.push(levels[level].half());
        look.push(levels[level].details(&levels[level + 1]));
    }
    for level in &levels[..LEVELS - 1] {
        look.extend(level.texture());
    }
    Some(look)
}

/// A square of grey levels from 0 to 1.
struct Plane {
    side: usize,
    values: Vec<f32>,
}

impl Plane {
    fn at(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.side + column]
    }

    /// Mean of some rows and columns.
    fn mean_of(&self, rows: Range<usize>, columns: Range<usize>) -> f32 {
        let values: Vec<f32> = rows.flat_map(|row| columns.clone().map(move |column| self.at(row, column))).collect();
        mean(&values)
    }

    /// Mean and deviation, shares of black and of white, means of the middle and of the four sides.
    fn brightness(&self) -> Vec<f32> {
        let (all, side) = (0..self.side, self.side / 8);
        let share = |is_in: fn(f32) -> bool| {
            self.values.iter().filter(|value| is_in(**value)).count() as f32 / self.values.len() as f32
        };
        let middle = self.side / 4..self.side * 3 / 4;
        vec![
            mean(&self.values),
            deviation(&self.values),
            share(|value| value < 0.04),
            share(|value| value > 0.96),
            self.mean_of(middle.clone(), middle),
            self.mean_of(0..side, all.clone()),
            self.mean_of(self.side - side..self.side, all.clone()),
            self.mean_of(all.clone(), 0..side),
            self.mean_of(all, self.side - side..self.side),
        ]
    }

    /// Square roots of the shares of eight directions in all differences of neighbours.
    fn edge_directions(&self) -> [f32; 8] {
        let mut directions = [0.0; 8];
        for row in 0..self.side - 1 {
            for column in 0..self.side - 1 {
                let across = self.at(row, column + 1) - self.at(row, column);
                let down = self.at(row + 1, column) - self.at(row, column);
                let eighth = down.atan2(across).rem_euclid(PI) * 8.0 / PI;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 8")]
                let eighth = (eighth as usize).min(7);
                directions[eighth] += across.hypot(down);
            }
        }
        let all = directions.iter().sum::<f32>() + 1e-6;
        directions.map(|share| (share / all).sqrt())
    }

    /// The same at half the side.
    fn half(&self) -> Self {
        let side = self.side / 2;
        let mean = |i: usize| {
            let (row, column) = (i / side * 2, i % side * 2);
            (self.at(row, column) + self.at(row, column + 1) + self.at(row + 1, column) + self.at(row + 1, column + 1))
                / 4.0
        };
        Self { side, values: (0..side * side).map(mean).collect() }
    }

    /// Logarithm of the deviation from the plane of half the side.
    fn details(&self, half: &Self) -> f32 {
        let lost = |i: usize| self.values[i] - half.at(i / self.side / 2, i % self.side / 2);
        (deviation(&(0..self.values.len()).map(lost).collect::<Vec<f32>>()) + 1e-3).ln()
    }

    /// Square roots of the shares of ten uniform local binary patterns (Ojala et al. 2002): how many of the eight neighbours
    /// are brighter, where these are side by side, else the tenth.
    fn texture(&self) -> [f32; 10] {
        /// Difference from which a neighbour is brighter.
        const STEP: f32 = 0.01;
        const NEIGHBOURS: [[usize; 2]; 8] = [[0, 0], [0, 1], [0, 2], [1, 2], [2, 2], [2, 1], [2, 0], [1, 0]];
        let mut patterns = [0.0; 10];
        for row in 1..self.side - 1 {
            for column in 1..self.side - 1 {
                let limit = self.at(row, column) + STEP;
                let is_brighter = NEIGHBOURS.map(|[down, across]| self.at(row + down - 1, column + across - 1) > limit);
                let changes = (0..8).filter(|i| is_brighter[*i] != is_brighter[(i + 1) % 8]).count();
                let count = is_brighter.iter().filter(|is_brighter| **is_brighter).count();
                patterns[if changes <= 2 { count } else { 9 }] += 1.0;
            }
        }
        let all = ((self.side - 2) * (self.side - 2)) as f32;
        patterns.map(|count: f32| (count / all).sqrt())
    }
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

fn deviation(values: &[f32]) -> f32 {
    let mean = mean(values);
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}
