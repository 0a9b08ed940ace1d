//! Lesions of a volume: ellipsoids with a smooth irregular surface.
//!
//! All coordinates and lengths are fractions of the side of a slice, also those through the slices, so that a distance
//! has the same length in every direction.

use std::f32::consts::{PI, TAU};

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::canvas::Oval;

/// Minimum gap between the surfaces of two lesions.
const GAP: f32 = 0.06;
/// Attempts to place lesions.
const TRIES: usize = 4000;

/// Shape and location of a lesion.
#[derive(Debug, Clone)]
pub(super) struct Ellipsoid {
    /// The slice through the centre.
    pub(super) oval: Oval,
    /// Location of the centre through the slices.
    pub(super) z: f32,
    /// Radius through the slices.
    pub(super) rz: f32,
    /// Amplitudes and phases of waves around the vertical axis, with 2, 3 and 4 periods per revolution.
    around: [(f32, f32); 3],
    /// Amplitudes and phases of waves from pole to pole, with 1.5 and 2.5 periods.
    along: [(f32, f32); 2],
}

/// The space where lesions may be placed.
#[derive(Debug, Clone, Copy)]
pub(super) struct LesionSpace {
    /// Must contain every slice of a lesion.
    pub(super) inside: Oval,
    /// Height of the volume.
    pub(super) height: f32,
    /// Least radius through the slices.
    pub(super) least_rz: f32,
}

impl Ellipsoid {
    /// 0 in the centre, 1 on the irregular surface.
    pub(super) fn depth(&self, x: f32, y: f32, z: f32) -> f32 {
        let (across, up) = (self.oval.depth(x, y), (z - self.z) / self.rz);
        let depth = across.hypot(up);
        if depth == 0.0 {
            return 0.0;
        }
        let angle = (y - self.oval.y).atan2(x - self.oval.x);
        let polar = across.atan2(up);
        let waves = |waves: &[(f32, f32)], first: f32, angle: f32| -> f32 {
            let periods = waves.iter().scan(first, |next, wave| {
                *next += 1.0;
                Some((*next - 1.0, wave))
            });
            periods.map(|(periods, (amplitude, phase))| amplitude * (periods * angle + phase).cos()).sum()
        };
        // waves around the axis vanish at the poles, where all of their directions meet
        let around = waves(&self.around, 2.0, angle) * (across / depth).powi(2);
        depth / (1.0 + around + waves(&self.along, 3.0, polar))
    }

    /// Mean radius.
    pub(super) fn radius(&self) -> f32 {
        (self.oval.rx * self.oval.ry * self.rz).cbrt()
    }

    /// Distance from the centre beyond which a soft edge of width `soft` is 0, within a slice.
    pub(super) fn reach(&self, soft: f32) -> f32 {
        self.oval.rx.max(self.oval.ry) * 1.4 + soft
    }

    /// 1 inside, 0 outside, 0.5 on the surface, with a soft edge of width `soft`.
    pub(super) fn cover(&self, x: f32, y: f32, z: f32, soft: f32) -> f32 {
        let reach = self.reach(soft);
        if (x - self.oval.x).abs() > reach
            || (y - self.oval.y).abs() > reach
            || (z - self.z).abs() > 1.4 * self.rz + soft
        {
            return 0.0;
        }
        ((1.0 - self.depth(x, y, z)) * self.radius() / soft + 0.5).clamp(0.0, 1.0)
    }

    /// Points of the surface.
    fn surface(&self) -> impl Iterator<Item = [f32; 3]> {
        let fraction = |step: u8, steps: u8| f32::from(step) / f32::from(steps);
        (0_u8..=12).flat_map(move |down| {
            let (ring, up) = (PI * fraction(down, 12)).sin_cos();
            (0_u8..24).map(move |around| {
                let (sin, cos) = (TAU * fraction(around, 24)).sin_cos();
                // the depth grows in proportion to the distance from the centre
                let along = [self.oval.rx * ring * cos, self.oval.rx * ring * sin, self.rz * up];
                let depth = self.depth(self.oval.x + along[0], self.oval.y + along[1], self.z + along[2]);
                [self.oval.x + along[0] / depth, self.oval.y + along[1] / depth, self.z + along[2] / depth]
            })
        })
    }

    fn touches(&self, other: &Self) -> bool {
        let gap = 1.0 + GAP / other.oval.rx.min(other.oval.ry).min(other.rz);
        self.surface().any(|[x, y, z]| other.depth(x, y, z) < gap)
    }
}

impl LesionSpace {
    fn draw(&self, radii: (f32, f32), rng: &mut ChaCha8Rng) -> Option<Ellipsoid> {
        let radius = rng.random_range(radii.0..=radii.1);
        let stretch = rng.random_range(1.0_f32..1.4).sqrt();
        let rz = (radius * rng.random_range(0.75..1.25)).max(self.least_rz);
        let (x, y) = (rng.random_range(0.1..0.9), rng.random_range(0.1..0.9));
        let oval = Oval::new(x, y, radius * stretch, radius / stretch).rotated(rng.random_range(0.0..TAU));
        let z = rng.random_range(0.0..self.height);
        let mut wave = |most: f32| (rng.random_range(0.0..most), rng.random_range(0.0..TAU));
        let around = [0.07, 0.06, 0.04].map(&mut wave);
        let along = [0.05, 0.04].map(&mut wave);
        let lesion = Ellipsoid { oval, z, rz, around, along };
        let is_inside = |[x, y, z]: [f32; 3]| self.inside.depth(x, y) < 1.0 && (0.0..self.height).contains(&z);
        let fits = lesion.surface().all(is_inside);
        fits.then_some(lesion)
    }

    /// `count` lesions (1 or 2) that lie apart; `None` after many attempts.
    pub(super) fn place(&self, count: usize, rng: &mut ChaCha8Rng) -> Option<Vec<Ellipsoid>> {
        let radii = if count == 1 { (0.09, 0.18) } else { (0.09, 0.14) };
        let mut placed: Vec<Ellipsoid> = Vec::new();
        for _ in 0..TRIES {
            let touches =
                |lesion: &Ellipsoid| placed.iter().any(|other| other.touches(lesion) || lesion.touches(other));
            placed.extend(self.draw(radii, rng).filter(|lesion| !touches(lesion)));
            if placed.len() == count {
                return Some(placed);
            }
        }
        None
    }
}
