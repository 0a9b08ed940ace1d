//! Lesions of a phantom: an ellipse with a smooth irregular outline, placed so that its labels are unambiguous.

use std::f32::consts::TAU;

use image::{GrayImage, Luma};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::canvas::{Oval, unit};
use crate::position::{self, Position, Region};

/// Minimum distance of a lesion's centroid from the borders of its grid cell, as a fraction of the image side.
const CELL_MARGIN_FRAC: f32 = 0.07;
/// Minimum distance of two lesions that are distinguished by side, along that side, as a fraction of the image side.
const SIDE_MARGIN_FRAC: f32 = 0.25;
/// Minimum area ratio of two lesions that are distinguished by size.
pub(super) const AREA_RATIO: f64 = 1.7;
/// Minimum gap between the outlines of two lesions, as a fraction of the image side.
const GAP_FRAC: f32 = 0.04;

/// Shape and location of a lesion.
#[derive(Debug, Clone)]
pub(super) struct Lesion {
    pub(super) oval: Oval,
    /// Amplitudes and phases of the outline's waves, with 2, 3, ... periods per revolution.
    waves: [(f32, f32); 4],
    pub(super) brighter: bool,
}

impl Lesion {
    /// 0 in the centre, 1 on the irregular outline.
    pub(super) fn depth(&self, x: f32, y: f32) -> f32 {
        let angle = (y - self.oval.y).atan2(x - self.oval.x);
        let mut radius = 1.0;
        let mut waves = 2.0;
        for (amplitude, phase) in self.waves {
            radius += amplitude * (waves * angle + phase).cos();
            waves += 1.0;
        }
        self.oval.depth(x, y) / radius
    }

    /// Mean radius.
    pub(super) fn radius(&self) -> f32 {
        (self.oval.rx * self.oval.ry).sqrt()
    }

    /// Distance from the centre beyond which a soft edge of width `soft` is 0.
    pub(super) fn reach(&self, soft: f32) -> f32 {
        self.oval.rx.max(self.oval.ry) * 1.4 + soft
    }

    /// 1 inside, 0 outside, 0.5 on the mask's outline, with a soft edge of width `soft`.
    pub(super) fn cover(&self, x: f32, y: f32, soft: f32) -> f32 {
        let reach = self.reach(soft);
        if (x - self.oval.x).abs() > reach || (y - self.oval.y).abs() > reach {
            return 0.0;
        }
        ((1.0 - self.depth(x, y)) * self.radius() / soft + 0.5).clamp(0.0, 1.0)
    }

    /// The mask, 0 or 255.
    pub(super) fn mask(&self, size: u32) -> GrayImage {
        let reach = self.reach(0.0);
        GrayImage::from_fn(size, size, |column, row| {
            let (x, y) = (unit(column as usize, size as usize), unit(row as usize, size as usize));
            let near = (x - self.oval.x).abs() < reach && (y - self.oval.y).abs() < reach;
            Luma([if near && self.depth(x, y) < 1.0 { 255 } else { 0 }])
        })
    }

    fn outline(&self) -> impl Iterator<Item = (f32, f32)> {
        (0_u8..32).map(|step| {
            let (sin, cos) = (f32::from(step) / 32.0 * TAU).sin_cos();
            let depth = self.depth(self.oval.x + cos, self.oval.y + sin);
            (self.oval.x + cos / depth, self.oval.y + sin / depth)
        })
    }

    fn touches(&self, other: &Self) -> bool {
        let gap = 1.0 + GAP_FRAC / other.oval.rx.min(other.oval.ry);
        self.outline().any(|(x, y)| other.depth(x, y) < gap)
    }
}

/// Property that distinguishes two lesions of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contrast {
    LeftRight,
    UpperLower,
    Brightness,
    Size,
}

impl Contrast {
    /// The words for the first and the second lesion of a pair.
    pub(super) fn words(self) -> [&'static str; 2] {
        match self {
            Self::LeftRight => ["left", "right"],
            Self::UpperLower => ["upper", "lower"],
            Self::Brightness => ["brighter", "darker"],
            Self::Size => ["larger", "smaller"],
        }
    }
}

/// The area where lesions may be placed.
pub(super) struct LesionArea {
    /// Must contain every lesion completely.
    pub(super) inside: Oval,
    pub(super) size_px: u32,
}

/// A lesion with its mask and the position of the mask.
pub(super) struct PlacedLesion {
    pub(super) lesion: Lesion,
    pub(super) mask: GrayImage,
    pub(super) region: Region,
    pub(super) position: Position,
}

const TRIES: usize = 2000;

impl LesionArea {
    fn draw(&self, cell: Position, radii: (f32, f32), rng: &mut ChaCha8Rng) -> Option<PlacedLesion> {
        let radius = rng.random_range(radii.0..=radii.1);
        let stretch = rng.random_range(1.0_f32..1.3).sqrt();
        let start = |third: u8| f32::from(third) / 3.0 + CELL_MARGIN_FRAC;
        let length = 1.0 / 3.0 - 2.0 * CELL_MARGIN_FRAC;
        let x = start(cell.column as u8) + rng.random_range(0.0..length);
        let y = start(cell.row as u8) + rng.random_range(0.0..length);
        let oval = Oval::new(x, y, radius * stretch, radius / stretch).rotated(rng.random_range(0.0..TAU));
        let waves = [0.05_f32, 0.045, 0.03, 0.02].map(|most| (rng.random_range(0.0..most), rng.random_range(0.0..TAU)));
        let lesion = Lesion { oval, waves, brighter: true };
        if lesion.outline().any(|(x, y)| self.inside.depth(x, y) > 1.0 || !in_image(x) || !in_image(y)) {
            return None;
        }
        self.measure(lesion).filter(|placed| self.clear_of_borders(&placed.region) && placed.position == cell)
    }

    fn measure(&self, lesion: Lesion) -> Option<PlacedLesion> {
        let mask = lesion.mask(self.size_px);
        let region = position::whole(&mask)?;
        let position = position::grid(&region, (self.size_px, self.size_px));
        Some(PlacedLesion { lesion, mask, region, position })
    }

    fn clear_of_borders(&self, region: &Region) -> bool {
        let (x, y) = region.centroid_px;
        [x, y].into_iter().all(|centre| {
            let at = (centre + 0.5) / f64::from(self.size_px);
            [1.0 / 3.0, 2.0 / 3.0].into_iter().all(|border| (at - border).abs() >= f64::from(CELL_MARGIN_FRAC))
        })
    }

    /// One lesion in `cell`, or in another cell if it does not fit there; `None` after many attempts.
    pub(super) fn one(&self, cell: Position, rng: &mut ChaCha8Rng) -> Option<PlacedLesion> {
        (0..TRIES).find_map(|attempt| {
            let cell = if attempt < TRIES / 2 { cell } else { any_cell(rng) };
            // Only small lesions fit the corners of a round area: every second attempt draws a small one.
            let most = if attempt % 2 == 0 { 0.20 } else { 0.13 };
            self.draw(cell, (0.11, most), rng)
        })
    }

    /// Two lesions that differ in `contrast`; its first word names the first of them. `None` after many attempts.
    pub(super) fn two(&self, cell: Position, contrast: Contrast, rng: &mut ChaCha8Rng) -> Option<[PlacedLesion; 2]> {
        (0..TRIES).find_map(|attempt| {
            let first_cell = if attempt < TRIES / 2 { cell } else { any_cell(rng) };
            let (first_radii, second_radii) = match contrast {
                Contrast::Size if rng.random() => ((0.155, 0.20), (0.11, 0.12)),
                Contrast::Size => ((0.11, 0.12), (0.155, 0.20)),
                _ => ((0.11, 0.155), (0.11, 0.155)),
            };
            let first = self.draw(first_cell, first_radii, rng)?;
            let second = self.draw(any_cell(rng), second_radii, rng)?;
            let touch = first.lesion.touches(&second.lesion) || second.lesion.touches(&first.lesion);
            if first.position == second.position || touch { None } else { self.ordered([first, second], contrast, rng) }
        })
    }

    fn ordered(
        &self,
        [first, second]: [PlacedLesion; 2],
        contrast: Contrast,
        rng: &mut ChaCha8Rng,
    ) -> Option<[PlacedLesion; 2]> {
        let side_margin = f64::from(SIDE_MARGIN_FRAC) * f64::from(self.size_px);
        let (a, b) = (&first.region, &second.region);
        let (gap, margin) = match contrast {
            Contrast::LeftRight => (b.centroid_px.0 - a.centroid_px.0, side_margin),
            Contrast::UpperLower => (b.centroid_px.1 - a.centroid_px.1, side_margin),
            Contrast::Size => ((a.area_px as f64 / b.area_px as f64).ln(), AREA_RATIO.ln()),
            Contrast::Brightness => (if rng.random() { 1.0 } else { -1.0 }, 0.5),
        };
        (gap.abs() >= margin).then_some(if gap > 0.0 { [first, second] } else { [second, first] })
    }
}

fn in_image(at: f32) -> bool {
    (0.01..0.99).contains(&at)
}

fn any_cell(rng: &mut ChaCha8Rng) -> Position {
    *Position::ALL.choose(rng).expect("nine cells")
}
