//! Drawing: square images in floating point, smooth shapes and noise. Coordinates run from 0 to 1 over the image.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Source of the random numbers of a drawing.
pub(super) trait RandomDraw {
    /// A number from `from` to `to`.
    fn vary(&mut self, from: f32, to: f32) -> f32;

    /// A number from `-most` to `most`, without `most`.
    fn signed(&mut self, most: f32) -> f32;
}

impl RandomDraw for ChaCha8Rng {
    fn vary(&mut self, from: f32, to: f32) -> f32 {
        self.random_range(from..=to)
    }

    fn signed(&mut self, most: f32) -> f32 {
        self.random_range(-most..most)
    }
}

/// Numbers between those of two generators: the drawing changes smoothly with `at`, from 0 (first) to 1 (second).
pub(super) struct Between {
    pub(super) first: ChaCha8Rng,
    pub(super) second: ChaCha8Rng,
    pub(super) at: f32,
}

impl RandomDraw for Between {
    fn vary(&mut self, from: f32, to: f32) -> f32 {
        mix(self.first.vary(from, to), self.second.vary(from, to), self.at)
    }

    fn signed(&mut self, most: f32) -> f32 {
        mix(self.first.signed(most), self.second.signed(most), self.at)
    }
}

/// One channel, row by row: 0 is black and 1 is white.
#[derive(Debug, Clone)]
pub(super) struct Canvas {
    pub(super) size: usize,
    pub(super) values: Vec<f32>,
}

pub(super) fn unit(index: usize, size: usize) -> f32 {
    (index as f32 + 0.5) / size as f32
}

impl Canvas {
    pub(super) fn filled(size: usize, value: f32) -> Self {
        Self { size, values: vec![value; size * size] }
    }

    /// Replaces every value by `paint(x, y, index, value)`.
    pub(super) fn paint(&mut self, paint: impl Fn(f32, f32, usize, f32) -> f32) {
        self.paint_near((0.5, 0.5), 1.0, paint);
    }

    /// As [`Canvas::paint`], within `reach` of a point only.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the image")]
    pub(super) fn paint_near(&mut self, at: (f32, f32), reach: f32, paint: impl Fn(f32, f32, usize, f32) -> f32) {
        let size = self.size;
        let pixel = |at: f32| (at * size as f32).clamp(0.0, size as f32) as usize;
        let columns = pixel(at.0 - reach)..pixel(at.0 + reach + 1.0 / size as f32);
        for row in pixel(at.1 - reach)..pixel(at.1 + reach + 1.0 / size as f32) {
            let y = unit(row, size);
            for column in columns.clone() {
                let index = row * size + column;
                self.values[index] = paint(unit(column, size), y, index, self.values[index]);
            }
        }
    }

    /// Blends `value` into the image where `shape` covers it, with a soft edge of width `soft`.
    pub(super) fn lay(&mut self, shape: &Oval, value: f32, soft: f32) {
        let reach = shape.rx.max(shape.ry) * shape.spread() + soft;
        self.paint_near((shape.x, shape.y), reach, |x, y, _, old| mix(old, value, shape.cover(x, y, soft)));
    }
}

/// Linear interpolation: 0 gives `a`, 1 gives `b`.
pub(super) fn mix(a: f32, b: f32, amount: f32) -> f32 {
    a + (b - a) * amount
}

/// A smooth step from 0 at `from` to 1 at `to`.
pub(super) fn smooth(from: f32, to: f32, value: f32) -> f32 {
    let t = ((value - from) / (to - from)).clamp(0.0, 1.0);
    t * t * (3.0 - 2.0 * t)
}

/// A bump: 1 at `centre`, 0 beyond `width` on both sides.
pub(super) fn bump(centre: f32, width: f32, value: f32) -> f32 {
    1.0 - smooth(0.0, width, (value - centre).abs())
}

/// An ellipse; with a power above 2 a rounded rectangle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Oval {
    pub(super) x: f32,
    pub(super) y: f32,
    pub(super) rx: f32,
    pub(super) ry: f32,
    pub(super) angle: f32,
    pub(super) power: f32,
}

impl Oval {
    pub(super) const fn new(x: f32, y: f32, rx: f32, ry: f32) -> Self {
        Self { x, y, rx, ry, angle: 0.0, power: 2.0 }
    }

    /// How far the outline can extend beyond the larger radius: up to the corner of the box when rotated.
    fn spread(&self) -> f32 {
        if self.power > 2.0 { std::f32::consts::SQRT_2 } else { 1.0 }
    }

    pub(super) fn rotated(self, angle: f32) -> Self {
        Self { angle, ..self }
    }

    pub(super) const fn power(self, power: f32) -> Self {
        Self { power, ..self }
    }

    pub(super) fn scaled(self, factor: f32) -> Self {
        Self { rx: self.rx * factor, ry: self.ry * factor, ..self }
    }

    /// Moves and resizes by random amounts up to `amount` of its radii.
    pub(super) fn perturbed(self, amount: f32, rng: &mut impl RandomDraw) -> Self {
        let mut by = || rng.vary(-amount, amount);
        Self {
            x: self.x + self.rx * by(),
            y: self.y + self.ry * by(),
            rx: self.rx * (1.0 + by()),
            ry: self.ry * (1.0 + by()),
            angle: self.angle + by(),
            ..self
        }
    }

    /// 0 in the centre, 1 on the outline.
    pub(super) fn depth(&self, x: f32, y: f32) -> f32 {
        let (sin, cos) = self.angle.sin_cos();
        let (dx, dy) = (x - self.x, y - self.y);
        let u = ((dx * cos + dy * sin) / self.rx).abs();
        let v = ((dy * cos - dx * sin) / self.ry).abs();
        if self.power <= 2.0 { u.hypot(v) } else { (u.powf(self.power) + v.powf(self.power)).powf(1.0 / self.power) }
    }

    /// 1 inside, 0 outside, with a soft edge of width `soft`.
    pub(super) fn cover(&self, x: f32, y: f32, soft: f32) -> f32 {
        let reach = self.rx.max(self.ry) * self.spread() + soft;
        if (x - self.x).abs() > reach || (y - self.y).abs() > reach {
            return 0.0;
        }
        ((1.0 - self.depth(x, y)) * self.rx.min(self.ry) / soft + 0.5).clamp(0.0, 1.0)
    }
}

/// Value noise of several octaves, about -1..1, with `cells` lattice cells over the image in x and y.
pub(super) fn noise(size: usize, cells: (f32, f32), octaves: u32, rng: &mut impl RandomDraw) -> Canvas {
    let mut plane = Canvas::filled(size, 0.0);
    let (mut scale, mut weight) = (1.0, 0.55);
    for _ in 0..octaves {
        add_octave(&mut plane, (cells.0 * scale, cells.1 * scale), weight, rng);
        scale *= 2.0;
        weight *= 0.5;
    }
    plane
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "lattice coordinates are small, positive")]
fn add_octave(plane: &mut Canvas, cells: (f32, f32), weight: f32, rng: &mut impl RandomDraw) {
    let (across, down) = (cells.0.ceil() as usize + 2, cells.1.ceil() as usize + 2);
    let lattice: Vec<f32> = (0..across * down).map(|_| rng.signed(weight)).collect();
    let split = |at: f32| (at.floor() as usize, smooth(0.0, 1.0, at.fract()));
    let size = plane.size;
    let columns: Vec<(usize, f32)> = (0..size).map(|x| split(unit(x, size) * cells.0)).collect();
    for (row, values) in plane.values.chunks_exact_mut(size).enumerate() {
        let (below, ty) = split(unit(row, size) * cells.1);
        let (upper, lower) = (&lattice[below * across..], &lattice[(below + 1) * across..]);
        for (value, &(left, tx)) in values.iter_mut().zip(&columns) {
            *value += mix(mix(upper[left], upper[left + 1], tx), mix(lower[left], lower[left + 1], tx), ty);
        }
    }
}

/// Independent, approximately normal noise with standard deviation 1.
pub(super) fn grain(size: usize, rng: &mut ChaCha8Rng) -> Canvas {
    let mut plane = Canvas::filled(size, 0.0);
    for value in &mut plane.values {
        // The sum of four bytes has mean 510 and variance 4 (256^2 - 1) / 12.
        let sum: u16 = rng.random::<u32>().to_le_bytes().into_iter().map(u16::from).sum();
        *value = (f32::from(sum) - 510.0) / 147.8;
    }
    plane
}
