//! Colour phantoms: endoscopy and dermoscopy.

use std::f32::consts::TAU;

use rand_chacha::ChaCha8Rng;

use super::canvas::{Canvas, Oval, RandomDraw, bump, grain, mix, noise, smooth};
use super::lesion::Lesion;

/// Red, green, blue.
type Colour = [f32; 3];

struct Photo([Canvas; 3]);

impl Photo {
    fn filled(size: usize, colour: Colour) -> Self {
        Self(colour.map(|value| Canvas::filled(size, value)))
    }

    /// Blends a colour into every pixel by `amount(x, y, index)`.
    fn blend(&mut self, colour: Colour, amount: impl Fn(f32, f32, usize) -> f32) {
        let amount = map(self.0[0].size, amount);
        for (plane, value) in self.0.iter_mut().zip(colour) {
            plane.paint(|_, _, i, old| mix(old, value, amount.values[i]));
        }
    }

    /// Multiplies every pixel by `factor(x, y, index)`.
    fn shade(&mut self, factor: impl Fn(f32, f32, usize) -> f32) {
        let factor = map(self.0[0].size, factor);
        for plane in &mut self.0 {
            plane.paint(|_, _, i, old| old * factor.values[i]);
        }
    }

    fn add_grain(mut self, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
        let size = self.0[0].size;
        let light = grain(size, rng);
        for plane in &mut self.0 {
            let own = grain(size, rng);
            plane.paint(|_, _, i, old| old + 0.012 * (light.values[i] + 0.5 * own.values[i]));
        }
        self.0.into()
    }
}

fn map(size: usize, value: impl Fn(f32, f32, usize) -> f32) -> Canvas {
    let mut plane = Canvas::filled(size, 0.0);
    plane.paint(|x, y, i, _| value(x, y, i));
    plane
}

/// A colonoscopy view: wet pink mucosa with haustral folds around a lumen, vessels, highlights, pale polyps.
pub(super) fn polyp_endoscopy(lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
    let tint = rng.vary(-0.04, 0.04);
    let mut photo = Photo::filled(size, [0.70 + tint, 0.30 + tint, 0.24]);
    let (warp, detail) = (noise(size, (3.0, 3.0), 3, rng), noise(size, (24.0, 24.0), 3, rng));
    let lumen = Oval::new(rng.vary(0.35, 0.65), rng.vary(0.35, 0.65), rng.vary(0.06, 0.10), rng.vary(0.06, 0.09));
    let (rings, phase) = (rng.vary(3.0, 5.0), rng.vary(0.0, TAU));
    let distance = map(size, |x, y, i| (x - lumen.x).hypot(y - lumen.y) + 0.10 * warp.values[i]);
    photo.shade(|_, _, i| {
        let wave = (distance.values[i].max(0.02).sqrt() * TAU * rings + phase).sin();
        0.86 + 0.20 * wave * smooth(0.08, 0.3, distance.values[i]) + 0.08 * detail.values[i]
    });
    let vessels = noise(size, (7.0, 7.0), 2, rng);
    photo.blend([0.50, 0.12, 0.11], |_, _, i| 0.55 * bump(0.0, 0.035, vessels.values[i]));
    photo.blend([0.10, 0.03, 0.03], |_, _, i| 0.9 * (1.0 - smooth(0.05, 0.17, distance.values[i])));
    for lesion in lesions {
        photo.shade(|x, y, _| 1.0 - 0.45 * lesion.cover(x - 0.012, y - 0.018, 0.05));
        photo.blend([0.95, 0.70, 0.58], |x, y, _| lesion.cover(x, y, 0.014));
        // A dome lit from the upper left.
        let (oval, radius) = (lesion.oval, lesion.radius());
        photo.shade(|x, y, i| {
            let light = -((x - oval.x) + (y - oval.y)) / radius;
            1.0 + (0.13 * light + 0.10 * detail.values[i]) * lesion.cover(x, y, 0.014)
        });
        let gleam = Oval::new(oval.x - 0.35 * radius, oval.y - 0.4 * radius, 0.2 * radius, 0.12 * radius).rotated(-0.7);
        photo.blend([1.0, 0.98, 0.95], |x, y, _| 0.9 * gleam.cover(x, y, 0.012));
    }
    let gleams = noise(size, (14.0, 18.0), 2, rng);
    photo.blend([1.0, 0.97, 0.94], |_, _, i| 0.85 * smooth(0.58, 0.64, gleams.values[i]));
    let view = Oval::new(0.5, 0.5, 0.51, 0.51).power(3.4);
    photo.shade(|x, y, _| view.cover(x, y, 0.02) * (1.06 - 0.35 * ((x - 0.5).hypot(y - 0.5) / 0.6).powi(2)));
    photo.add_grain(rng)
}

/// A dermoscopic image: skin with pores and hairs, brown moles with a pigment network.
pub(super) fn skin_dermoscopy(lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
    let tone = rng.vary(0.88, 1.04);
    let mut photo = Photo::filled(size, [0.88 * tone, 0.68 * tone, 0.58 * tone]);
    let (cloud, pores) = (noise(size, (4.0, 4.0), 3, rng), noise(size, (45.0, 45.0), 2, rng));
    photo.shade(|_, _, i| 1.0 + 0.06 * cloud.values[i] + 0.05 * pores.values[i]);
    photo.blend([0.80, 0.45, 0.42], |_, _, i| 0.35 * smooth(0.15, 0.5, cloud.values[i]));
    let network = noise(size, (26.0, 26.0), 2, rng);
    for lesion in lesions {
        let colour = if lesion.brighter { [0.64, 0.43, 0.30] } else { [0.33, 0.19, 0.13] };
        photo.blend(colour, |x, y, _| 0.95 * lesion.cover(x, y, 0.03));
        photo.shade(|x, y, i| {
            let inside = lesion.cover(x, y, 0.03);
            let net = bump(0.0, 0.14, network.values[i]);
            1.0 + inside * (0.08 - 0.26 * net + 0.18 * cloud.values[i])
        });
    }
    let hairs = hairs(size, rng);
    photo.blend([0.16, 0.11, 0.09], |_, _, i| hairs.values[i]);
    photo.shade(|x, y, _| 1.04 - 0.30 * smooth(0.45, 0.75, (x - 0.5).hypot(y - 0.5)));
    photo.add_grain(rng)
}

/// Fraction of every pixel that a few curved hairs cover.
fn hairs(size: usize, rng: &mut ChaCha8Rng) -> Canvas {
    let mut cover = Canvas::filled(size, 0.0);
    for _ in 0..9 {
        let (x, y, angle) = (rng.vary(0.0, 1.0), rng.vary(0.0, 1.0), rng.vary(0.0, TAU));
        let (bend, length, width) = (rng.vary(-0.9, 0.9), rng.vary(0.12, 0.4), rng.vary(0.004, 0.0065));
        let (sin, cos) = angle.sin_cos();
        cover.paint_near((x, y), 1.2 * length, |u, v, _, old| {
            let along = (u - x) * cos + (v - y) * sin;
            let across = (v - y) * cos - (u - x) * sin;
            let hair = bump(bend * along * along, width, across) * (1.0 - smooth(length - 0.03, length, along.abs()));
            old.max(0.75 * hair)
        });
    }
    cover
}
