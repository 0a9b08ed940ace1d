//! Classical augmentation: flips, rotations, scale, elastic deformation, brightness, contrast, gamma, noise, blur.
//!
//! Image and mask are transformed together, and the text is updated: by [`flip_rotate`] for flips and quarter turns,
//! by [`crate::relabel`] for the rest. If a text cannot be updated safely, or the mask loses more than a fifth of its
//! area, the sample keeps its geometry and only its intensities change. All random numbers depend on (seed, epoch,
//! row or image). Outside of the image, the image is extended by its border pixels and the mask by 0.

use ::image::{DynamicImage, GrayImage, Luma, RgbImage};
use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::image::foreground;
use crate::manifest::Row;
use crate::relabel::relabel;
use crate::{flip_rotate, random};

/// Augmentation of training samples (`data.augment`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", from = "Written")]
pub enum Augment {
    /// No augmentation.
    #[default]
    None,
    /// Flips and quarter turns, if the text can be updated.
    FlipRotate,
    /// Flips, quarter turns, small rotations, scale, elastic deformation, intensities, noise and blur.
    Classical,
}

/// Serialized form of the setting; earlier versions wrote `turn`, `true` or `false`.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", expecting = "expected `none`, `flip_rotate` or `classical`")]
enum Written {
    None,
    #[serde(alias = "turn")]
    FlipRotate,
    Classical,
    #[serde(untagged)]
    Earlier(bool),
}

impl From<Written> for Augment {
    fn from(written: Written) -> Self {
        match written {
            Written::None | Written::Earlier(false) => Self::None,
            Written::FlipRotate | Written::Earlier(true) => Self::FlipRotate,
            Written::Classical => Self::Classical,
        }
    }
}

/// Fraction of the samples that are rotated, scaled and deformed.
const WARPED_FRAC: f64 = 0.75;
/// Maximum rotation in degrees.
const ROTATION_DEG: f32 = 15.0;
/// Range of the scale; with a smaller scale a mask would lose a fifth of its area.
const SCALE: [f32; 2] = [0.92, 1.12];
/// Maximum elastic displacement, as a fraction of the shorter side.
const ELASTIC_FRAC: f32 = 0.025;
/// Number of cells of the displacement grid along each side.
const ELASTIC_CELLS: usize = 4;
/// Minimum fraction of a mask's area that must remain.
const MIN_AREA_FRAC: f64 = 0.8;
/// Range of the contrast factor.
const CONTRAST: [f32; 2] = [0.8, 1.25];
/// Maximum change of brightness, 0..=255.
const BRIGHTNESS: f32 = 25.0;
/// Range of gamma.
const GAMMA: [f32; 2] = [0.8, 1.25];
/// Maximum standard deviation of the noise, 0..=255.
const NOISE: f32 = 8.0;
/// Maximum standard deviation of the blur, as a fraction of the shorter side.
const BLUR_FRAC: f32 = 0.004;

/// Augments an image with its rows and their masks; random numbers depend on (seed, epoch, key). The geometry changes
/// for all rows or for none.
pub fn apply(
    image: DynamicImage,
    rows: &[&Row],
    masks: Vec<Vec<GrayImage>>,
    [seed, epoch, key]: [u64; 3],
) -> (DynamicImage, Vec<(Row, Vec<GrayImage>)>) {
    let mut random = random::stream("classical", &[seed, epoch, key]);
    let (image, rows) = match flip_rotate::apply(rows, seed, epoch, key) {
        Some((rows, transform)) => {
            let turned = |masks: Vec<GrayImage>| masks.into_iter().map(|mask| transform.mask(mask)).collect();
            let masks = masks.into_iter().map(turned);
            (transform.image(image), rows.into_iter().zip(masks).collect())
        }
        None => (image, rows.iter().map(|row| (*row).clone()).zip(masks).collect::<Vec<_>>()),
    };
    let warp = Warp::draw((image.width(), image.height()), &mut random);
    let is_warped = random.random_bool(WARPED_FRAC);
    let warped = || rows.iter().map(|(row, masks)| warp_row(row, masks, &warp)).collect::<Option<Vec<_>>>();
    let (image, rows) = match is_warped.then(warped).flatten() {
        Some(rows) => (warp.image(&image), rows),
        None => (image, rows),
    };
    (intensity(image, &mut random), rows)
}

/// The row and its masks after a warp; `None` when the text, which names places of the first one, cannot be updated or
/// a mask loses too much area.
fn warp_row(row: &Row, masks: &[GrayImage], warp: &Warp) -> Option<(Row, Vec<GrayImage>)> {
    let warped: Vec<GrayImage> = masks.iter().map(|mask| warp.mask(mask)).collect();
    let area = |mask: &GrayImage| foreground(mask).iter().filter(|value| **value > 0).count() as f64;
    let has_area = masks.iter().zip(&warped).all(|(mask, warped)| area(warped) >= MIN_AREA_FRAC * area(mask));
    if !has_area {
        return None;
    }
    Some((relabel(row, masks.first()?, warped.first()?, None).ok()?, warped))
}

/// A rotation about the centre, a scale and a smooth displacement.
#[derive(Debug, Clone)]
struct Warp {
    /// Width and height, pixels.
    size: (f32, f32),
    /// Cosine and sine of the angle, divided by the scale.
    rotation: (f32, f32),
    /// Displacements in pixels at the corners of the grid's cells, 0 on the border.
    grid: Vec<(f32, f32)>,
}

const CORNERS: usize = ELASTIC_CELLS + 1;

fn as_f32(side: u32) -> f32 {
    side as f32
}

impl Warp {
    fn draw(size: (u32, u32), random: &mut impl Rng) -> Self {
        let angle = random.random_range(-ROTATION_DEG..=ROTATION_DEG).to_radians();
        let scale = random.random_range(SCALE[0]..=SCALE[1]);
        let size = (as_f32(size.0), as_f32(size.1));
        let reach = ELASTIC_FRAC * size.0.min(size.1) * random.random::<f32>();
        let inner = 1..ELASTIC_CELLS;
        let grid = (0..CORNERS * CORNERS)
            .map(|corner| {
                let mut by = || random.random_range(-1.0..=1.0_f32) * reach;
                let drawn = (by(), by());
                let is_inside = inner.contains(&(corner % CORNERS)) && inner.contains(&(corner / CORNERS));
                if is_inside { drawn } else { (0.0, 0.0) }
            })
            .collect();
        Self { size, rotation: (angle.cos() / scale, angle.sin() / scale), grid }
    }

    /// The source position of the output pixel at (x, y). The centre of a pixel is half a pixel after its index.
    fn source(&self, x: u32, y: u32) -> (f32, f32) {
        let at = (as_f32(x) + 0.5, as_f32(y) + 0.5);
        let moved = self.displacement(at);
        let middle = (self.size.0 / 2.0, self.size.1 / 2.0);
        let from = (at.0 - middle.0 + moved.0, at.1 - middle.1 + moved.1);
        let (cos, sin) = self.rotation;
        (middle.0 + cos * from.0 + sin * from.1, middle.1 - sin * from.0 + cos * from.1)
    }

    /// Smooth between the corners of the grid.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "cells")]
    fn displacement(&self, at: (f32, f32)) -> (f32, f32) {
        let split = |at: f32, length: f32| {
            let at = at / length * ELASTIC_CELLS as f32;
            let cell = (at as usize).min(ELASTIC_CELLS - 1);
            let t = (at - cell as f32).clamp(0.0, 1.0);
            (cell, t * t * (3.0 - 2.0 * t))
        };
        let ((column, tx), (row, ty)) = (split(at.0, self.size.0), split(at.1, self.size.1));
        let corner = |down: usize, right: usize| self.grid[(row + down) * CORNERS + column + right];
        let mix = |a: (f32, f32), b: (f32, f32), t: f32| (a.0 + (b.0 - a.0) * t, a.1 + (b.1 - a.1) * t);
        mix(mix(corner(0, 0), corner(0, 1), tx), mix(corner(1, 0), corner(1, 1), tx), ty)
    }

    /// The warped image: bilinear, extended by the border pixels.
    fn image(&self, image: &DynamicImage) -> DynamicImage {
        if let Some(grey) = image.as_luma8() {
            let (width, height) = grey.dimensions();
            let bytes = self.sampled::<1>(grey.as_raw(), (width, height));
            return DynamicImage::ImageLuma8(GrayImage::from_raw(width, height, bytes).expect("the same size"));
        }
        let colour = image.to_rgb8();
        let (width, height) = colour.dimensions();
        let bytes = self.sampled::<3>(colour.as_raw(), (width, height));
        DynamicImage::ImageRgb8(RgbImage::from_raw(width, height, bytes).expect("the same size"))
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the image and to a byte")]
    fn sampled<const CHANNELS: usize>(&self, bytes: &[u8], (width, height): (u32, u32)) -> Vec<u8> {
        let last = (as_f32(width.saturating_sub(1)), as_f32(height.saturating_sub(1)));
        let mut out = Vec::with_capacity(bytes.len());
        for y in 0..height {
            for x in 0..width {
                let (u, v) = self.source(x, y);
                let (u, v) = ((u - 0.5).clamp(0.0, last.0), (v - 0.5).clamp(0.0, last.1));
                let (left, top) = (u as u32, v as u32);
                let (right, low) = ((left + 1).min(width - 1), (top + 1).min(height - 1));
                let (tx, ty) = (u.fract(), v.fract());
                for channel in 0..CHANNELS {
                    let value = |x: u32, y: u32| {
                        f32::from(bytes[(y as usize * width as usize + x as usize) * CHANNELS + channel])
                    };
                    let upper = value(left, top) * (1.0 - tx) + value(right, top) * tx;
                    let lower = value(left, low) * (1.0 - tx) + value(right, low) * tx;
                    out.push((upper * (1.0 - ty) + lower * ty).round() as u8);
                }
            }
        }
        out
    }

    /// The warped mask: nearest neighbour, 0 outside.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative here")]
    fn mask(&self, mask: &GrayImage) -> GrayImage {
        GrayImage::from_fn(mask.width(), mask.height(), |x, y| {
            let (u, v) = self.source(x, y);
            let is_inside = u >= 0.0 && v >= 0.0;
            is_inside.then(|| mask.get_pixel_checked(u as u32, v as u32)).flatten().copied().unwrap_or(Luma([0]))
        })
    }
}

/// Applies blur, brightness, contrast, gamma and noise; a grey image stays grey.
fn intensity(image: DynamicImage, random: &mut impl Rng) -> DynamicImage {
    let blur = BLUR_FRAC * as_f32(image.width().min(image.height())) * random.random_range(0.25..=1.0_f32);
    let image = if random.random_bool(0.25) { image.blur(blur.max(0.1)) } else { image };
    let contrast = random.random_range(CONTRAST[0]..=CONTRAST[1]);
    let brightness = random.random_range(-BRIGHTNESS..=BRIGHTNESS);
    let gamma = random.random_range(GAMMA[0]..=GAMMA[1]);
    let noise = if random.random_bool(0.4) { NOISE * random.random::<f32>() } else { 0.0 };
    let toned: [f32; 256] = std::array::from_fn(|level| {
        let level = f32::from(u8::try_from(level).expect("256 levels"));
        let lit = (127.5 + (level - 127.5) * contrast + brightness).clamp(0.0, 255.0);
        255.0 * (lit / 255.0).powf(gamma)
    });
    match image {
        DynamicImage::ImageLuma8(mut grey) => {
            tone(&mut grey, 1, &toned, noise, random);
            DynamicImage::ImageLuma8(grey)
        }
        other => {
            let mut colour = other.into_rgb8();
            tone(&mut colour, 3, &toned, noise, random);
            DynamicImage::ImageRgb8(colour)
        }
    }
}

/// Applies the lookup table and adds noise, one value for all channels of a pixel.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
fn tone(bytes: &mut [u8], channels: usize, toned: &[f32; 256], noise: f32, random: &mut impl Rng) {
    for pixel in bytes.chunks_exact_mut(channels) {
        let grain = if noise > 0.0 { noise * normal(random) } else { 0.0 };
        for value in pixel {
            *value = (toned[usize::from(*value)] + grain).round() as u8;
        }
    }
}

/// An approximately standard normal number: the sum of four bytes has mean 510 and variance 4 (256^2 - 1) / 12.
fn normal(random: &mut impl Rng) -> f32 {
    let sum: u16 = random.random::<u32>().to_le_bytes().into_iter().map(u16::from).sum();
    (f32::from(sum) - 510.0) / 147.8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, shared};
    use crate::labels::Labels;
    use crate::manifest::Manifest;
    use crate::position::{self, Zones};
    use crate::sample::decoded;

    /// Augments a single row.
    fn apply(row: &Row, image: DynamicImage, mask: GrayImage, numbers: [u64; 3]) -> (Row, DynamicImage, GrayImage) {
        let (image, mut rows) = super::apply(image, &[row], vec![vec![mask]], numbers);
        let (row, mut masks) = rows.pop().unwrap();
        (row, image, masks.remove(0))
    }

    fn row(answer: &str, position: &str) -> Row {
        fixture::row("Where is the lesion?", answer, Some(position))
    }

    /// A disc in a 120x90 mask.
    fn disc(x: u32, y: u32, radius: u32) -> GrayImage {
        GrayImage::from_fn(120, 90, |u, v| {
            let inside = u.abs_diff(x).pow(2) + v.abs_diff(y).pow(2) <= radius.pow(2);
            Luma([if inside { 255 } else { 0 }])
        })
    }

    fn described(mask: &GrayImage) -> Row {
        let label = grid(mask);
        let location = if label == "center" { label.clone() } else { format!("{label} part") };
        row(&format!("The lesion is in the {location} of the image."), &label)
    }

    fn grid(mask: &GrayImage) -> String {
        position::grid(&position::whole(mask).unwrap(), mask.dimensions()).label(Zones::Grid)
    }

    #[test]
    fn text_mask_and_image_are_transformed_together() {
        let mask = disc(35, 33, 12);
        let row = described(&mask);
        let (mut locations, mut warped) = (std::collections::HashSet::new(), 0);
        for epoch in 0..100 {
            let image = DynamicImage::ImageLuma8(mask.clone());
            let (new, image, changed) = apply(&row, image, mask.clone(), [1, epoch, 7]);
            assert_eq!(new, described(&changed), "epoch {epoch}");
            locations.insert(grid(&changed));
            // the disc is the only bright part of the image
            let grey = image.into_luma8();
            let cut = u8::midpoint(*grey.iter().max().unwrap(), *grey.iter().min().unwrap());
            let pairs = || grey.iter().zip(changed.iter()).map(|(value, mask)| (*value > cut, *mask > 0));
            let (both, any) = (pairs().filter(|p| p.0 && p.1).count(), pairs().filter(|p| p.0 || p.1).count());
            assert!(both * 100 >= any * 88, "epoch {epoch}: {both} of {any}");
            let area = changed.iter().filter(|value| **value > 0).count();
            warped += usize::from(area != mask.iter().filter(|value| **value > 0).count());
        }
        assert!(locations.len() > 4 && warped > 40, "{locations:?}, {warped} bent");
    }

    #[test]
    fn the_geometry_stays_if_the_text_cannot_be_updated() {
        let mask = disc(35, 33, 12);
        let row = row("The leftmost lesion is there.", "upper left");
        let image = || {
            DynamicImage::ImageRgb8(RgbImage::from_fn(120, 90, |x, y| {
                ::image::Rgb([x, y, 90].map(|v| u8::try_from(v).unwrap()))
            }))
        };
        let mut changed = 0;
        for epoch in 0..30 {
            let (new, lit, kept) = apply(&row, image(), mask.clone(), [1, epoch, 7]);
            assert_eq!((&new, &kept), (&row, &mask));
            changed += usize::from(lit != image());
        }
        assert!(changed > 20, "intensities change");
    }

    #[test]
    fn a_warp_that_moves_the_mask_out_of_the_image_is_not_applied() {
        // a rotation moves a mask at the corner out of the image
        let (mask, row) = (disc(0, 0, 10), row("x", "upper left"));
        let mut random = random::stream("test", &[1]);
        let (mut kept, mut refused) = (0, 0);
        for _ in 0..100 {
            match warp_row(&row, std::slice::from_ref(&mask), &Warp::draw((120, 90), &mut random)) {
                Some((_, warped)) => {
                    let area = |mask: &GrayImage| mask.iter().filter(|value| **value > 0).count();
                    assert!(area(&warped[0]) * 10 >= area(&mask) * 8);
                    kept += 1;
                }
                None => refused += 1,
            }
        }
        assert!(kept > 0 && refused > 20, "{kept} kept, {refused} refused");
    }

    #[test]
    fn augmentation_depends_on_seed_epoch_and_row_only() {
        let mask = disc(60, 45, 20);
        let row = described(&mask);
        let draw = |numbers| apply(&row, DynamicImage::ImageLuma8(mask.clone()), mask.clone(), numbers);
        assert_eq!(draw([1, 2, 3]), draw([1, 2, 3]));
        for other in [[2, 2, 3], [1, 3, 3], [1, 2, 4]] {
            assert_ne!(draw([1, 2, 3]).1, draw(other).1);
        }
    }

    #[test]
    fn the_border_extends_the_image_but_not_the_mask() {
        let mut warp = Warp::draw((40, 40), &mut random::stream("test", &[1]));
        warp.grid.fill((0.0, 0.0));
        // half the size: the corners come from outside
        warp.rotation = (2.0, 0.0);
        let white = GrayImage::from_pixel(40, 40, Luma([200]));
        assert_eq!(warp.image(&DynamicImage::ImageLuma8(white.clone())).into_luma8(), white);
        let mask = warp.mask(&white);
        assert_eq!((mask.get_pixel(5, 5).0[0], mask.get_pixel(20, 20).0[0]), (0, 200));
        assert_eq!(mask.iter().filter(|value| **value > 0).count(), 400);
    }

    #[test]
    #[ignore = "needs shared data"]
    fn shared_data_texts_of_real_rows_match_the_warped_masks() {
        let folder = shared("data/real");
        let manifest = Manifest::open(&folder, None).unwrap();
        let (mut moved, mut warped) = (0, 0);
        for (index, row) in manifest.rows.iter().enumerate().step_by(STEP) {
            let (_, mask) = decoded(row, Labels::NONE).unwrap();
            let (width, height) = mask.dimensions();
            let warp = Warp::draw((width, height), &mut random::stream("test", &[index as u64]));
            if let Some((described, masks)) = warp_row(row, &[mask], &warp) {
                let mask = &masks[0];
                assert_eq!(described.position, Some(grid(mask)));
                assert!(described.answer.contains(&grid(mask)));
                moved += usize::from(described.position != row.position);
                warped += 1;
            }
        }
        assert_eq!((warped, moved), BENT);
    }

    /// This is slow unoptimised.
    const STEP: usize = 12;
    /// Of the tested rows: how many can be warped, and how many of these get another location.
    const BENT: (usize, usize) = (30, 4);

    #[test]
    fn the_setting_accepts_current_and_older_names() {
        #[derive(Serialize, Deserialize)]
        struct Holder {
            augment: Augment,
        }
        let read = |text: &str| toml::from_str::<Holder>(text).map(|holder| holder.augment);
        for (text, augment) in [
            ("augment = \"none\"", Augment::None),
            ("augment = false", Augment::None),
            ("augment = \"flip_rotate\"", Augment::FlipRotate),
            ("augment = \"turn\"", Augment::FlipRotate),
            ("augment = true", Augment::FlipRotate),
            ("augment = \"classical\"", Augment::Classical),
        ] {
            assert_eq!(read(text).unwrap(), augment);
        }
        let error = read("augment = \"more\"").err().unwrap().to_string();
        assert!(error.contains("expected `none`, `flip_rotate` or `classical`"), "{error}");
        assert_eq!(toml::to_string(&Holder { augment: Augment::FlipRotate }).unwrap(), "augment = \"flip_rotate\"\n");
    }

    /// A warp without rotation, whose inner grid corners all move by `by`.
    fn moved(size: (f32, f32), by: (f32, f32)) -> Warp {
        let inner = 1..ELASTIC_CELLS;
        let is_inside = |corner: usize| inner.contains(&(corner % CORNERS)) && inner.contains(&(corner / CORNERS));
        let grid = (0..CORNERS * CORNERS).map(|corner| if is_inside(corner) { by } else { (0.0, 0.0) }).collect();
        Warp { size, rotation: (1.0, 0.0), grid }
    }

    #[test]
    fn an_elastic_warp_moves_the_inside_and_keeps_the_corners() {
        let warp = moved((64.0, 32.0), (3.0, -2.0));
        let near = |found: (f32, f32), expected: (f32, f32)| {
            assert!((found.0 - expected.0).abs() < 0.1 && (found.1 - expected.1).abs() < 0.1, "{found:?} {expected:?}");
        };
        // the middle of the image is inside, or between inner corners
        near(warp.source(32, 16), (32.5 + 3.0, 16.5 - 2.0));
        near(warp.source(0, 0), (0.5, 0.5));
        near(warp.source(63, 31), (63.5, 31.5));
        near(moved((64.0, 32.0), (0.0, 0.0)).source(10, 20), (10.5, 20.5));
    }
}
