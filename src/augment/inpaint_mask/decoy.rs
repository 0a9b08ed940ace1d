//! Decoys: preserved regions without a lesion, in locations and shapes that a lesion could have.

use std::f64::consts::TAU;
use std::ops::Range;

use image::GrayImage;
use rand::Rng;

use super::{DECOYS_MAX, REPAINT_MIN_FRAC, count, distance};
use crate::augment::mask_bank::pixel_range;
use crate::data::position::{self, PixelBox, Region};

/// Maximum number of locations tried for each decoy.
const TRIES: usize = 20;
/// Minimum fraction of a decoy inside the allowed area. The rest is cut off; with less, another location is tried.
const INSIDE_FRAC: f64 = 0.7;
/// Size of decoys relative to the label with its rim.
const SCALE: Range<f64> = 0.6..1.2;

/// The area where decoys may be placed.
pub(super) struct AllowedArea<'a> {
    /// Squared distances to the label.
    pub(super) to_label: &'a [u32],
    /// Valid pixels of the image; `None` = all.
    pub(super) field: Option<&'a GrayImage>,
    /// Minimum distance from the label: beyond the rim, with repainted pixels in between.
    pub(super) clear_px: f64,
}

impl AllowedArea<'_> {
    fn is_free(&self, at: usize) -> bool {
        !distance::is_within(self.to_label[at], self.clear_px) && self.field.is_none_or(|field| field.as_raw()[at] > 0)
    }
}

/// Adds up to [`DECOYS_MAX`] decoys, each about the size of `core` (label and rim), to `preserved` and returns their
/// boxes.
pub(super) fn add(
    preserved: &mut GrayImage,
    core: &GrayImage,
    allowed: &AllowedArea,
    rng: &mut impl Rng,
) -> Vec<PixelBox> {
    let Some(region) = position::whole(core) else { return Vec::new() };
    let (core_px, all_px) = (count(core), f64::from(core.width()) * f64::from(core.height()));
    let max_preserved_px = (1.0 - REPAINT_MIN_FRAC) * all_px;
    let mut preserved_px = count(preserved);
    let mut boxes = Vec::new();
    let wanted = rng.random_range(0..=DECOYS_MAX);
    for _ in 0..wanted {
        for _ in 0..TRIES {
            let shape = if rng.random_bool(0.5) {
                Shape::rotated(&region, core_px, rng)
            } else {
                Shape::blob((core_px / std::f64::consts::PI).sqrt(), rng)
            };
            let middle =
                (rng.random_range(0.0..f64::from(core.width())), rng.random_range(0.0..f64::from(core.height())));
            let mut pixels = shape.pixels(middle, core);
            pixels.retain(|&at| allowed.is_free(at));
            let free = pixels.len() as f64;
            // Decoys must not touch, or two would become one.
            let apart = pixels.iter().all(|&at| preserved.as_raw()[at] == 0);
            if free == 0.0 || free < INSIDE_FRAC * shape.area_px || !apart || preserved_px + free > max_preserved_px {
                continue;
            }
            let mut decoy = GrayImage::new(core.width(), core.height());
            for &at in &pixels {
                decoy.as_mut()[at] = 255;
                preserved.as_mut()[at] = 255;
            }
            preserved_px += free;
            boxes.extend(position::whole(&decoy).map(|region| region.bounds));
            break;
        }
    }
    boxes
}

/// Shape of a region around the origin.
struct Shape {
    form: Form,
    /// Maximum distance of a pixel from the origin.
    reach: f64,
    /// Approximate number of pixels when the shape is completely inside the image.
    area_px: f64,
}

enum Form {
    /// The core itself, rotated about its centroid, mirrored and scaled.
    Rotated { centroid: (f64, f64), scale: f64, cos: f64, sin: f64, mirrored: bool },
    /// A closed curve of radius `radius * (1 + sum of waves)`; waves are (amplitude, phase) with 2, 3, ... periods
    /// per revolution.
    Blob { radius: f64, waves: [(f64, f64); 4] },
}

impl Shape {
    fn rotated(core: &Region, core_px: f64, rng: &mut impl Rng) -> Self {
        let (sin, cos) = rng.random_range(0.0..TAU).sin_cos();
        let scale = rng.random_range(SCALE);
        let (centroid, b) = (core.centroid_px, core.bounds);
        let far = |low: u32, high: u32, middle: f64| (middle - f64::from(low)).max(f64::from(high) - middle) + 1.0;
        let reach = far(b.left, b.right, centroid.0).hypot(far(b.top, b.bottom, centroid.1)) * scale;
        let form = Form::Rotated { centroid, scale, cos, sin, mirrored: rng.random_bool(0.5) };
        Self { form, reach, area_px: core_px * scale * scale }
    }

    fn blob(core_radius: f64, rng: &mut impl Rng) -> Self {
        let radius = core_radius * rng.random_range(SCALE);
        let waves = std::array::from_fn(|_| (rng.random_range(0.0..0.12), rng.random_range(0.0..TAU)));
        let form = Form::Blob { radius, waves };
        Self { form, reach: radius * 1.5 + 1.0, area_px: std::f64::consts::PI * radius * radius }
    }

    /// Indices of the image's pixels inside the shape around `middle`.
    fn pixels(&self, middle: (f64, f64), core: &GrayImage) -> Vec<usize> {
        let mut pixels = Vec::new();
        for y in pixel_range(middle.1, self.reach, core.height()) {
            for x in pixel_range(middle.0, self.reach, core.width()) {
                if self.contains(f64::from(x) - middle.0, f64::from(y) - middle.1, core) {
                    pixels.push(y as usize * core.width() as usize + x as usize);
                }
            }
        }
        pixels
    }

    /// Whether a point relative to the origin belongs to the shape.
    #[expect(clippy::cast_possible_truncation, reason = "pixel positions")]
    fn contains(&self, x: f64, y: f64, core: &GrayImage) -> bool {
        match &self.form {
            Form::Rotated { centroid, scale, cos, sin, mirrored } => {
                let (u, v) = ((cos * x + sin * y) / scale, (cos * y - sin * x) / scale);
                let u = if *mirrored { -u } else { u };
                let (u, v) = ((centroid.0 + u).round() as i64, (centroid.1 + v).round() as i64);
                let pixel = u32::try_from(u).ok().zip(u32::try_from(v).ok());
                pixel.and_then(|(u, v)| core.get_pixel_checked(u, v)).is_some_and(|value| value[0] > 0)
            }
            Form::Blob { radius, waves } => {
                let angle = y.atan2(x);
                let wave = |(number, (amplitude, phase)): (usize, &(f64, f64))| {
                    amplitude * ((number + 2) as f64 * angle + phase).cos()
                };
                x.hypot(y) <= radius * (1.0 + waves.iter().enumerate().map(wave).sum::<f64>())
            }
        }
    }
}
