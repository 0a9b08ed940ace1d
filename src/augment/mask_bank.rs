//! Mask bank: masks of other images, transformed and placed into a target image.
//!
//! A source mask is rotated, scaled, mirrored and deformed a little, then placed inside the target's field of view.
//! The [`MaskTransform`] describes all of that; applying it again gives the same mask. No image is changed here.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use image::GrayImage;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::{Row, Split};
use crate::data::position;
use crate::error::{Error, Result};

/// Paths of the training masks of each modality.
#[derive(Debug, Clone, Default)]
pub struct MaskBank {
    masks: BTreeMap<String, Vec<PathBuf>>,
}

impl MaskBank {
    /// Collects the masks of all `train` rows of real images that show their target, each once.
    pub fn new<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Self {
        let mut masks: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for row in rows.into_iter().filter(|row| row.split == Split::Train && !row.synthetic && row.is_present()) {
            masks.entry(row.modality.clone()).or_default().push(row.target().mask_path.clone());
        }
        for paths in masks.values_mut() {
            paths.sort();
            paths.dedup();
        }
        Self { masks }
    }

    /// A random mask of the modality, as 0 and 255. It is not `except`, the target's own mask, unless that is the
    /// only one.
    ///
    /// # Errors
    /// [`Error::Data`] when the modality has no train mask or the file cannot be decoded.
    pub fn draw(&self, modality: &str, except: &Path, rng: &mut impl Rng) -> Result<(PathBuf, GrayImage)> {
        let all = self.masks.get(modality).map_or(&[][..], Vec::as_slice);
        let others: Vec<&PathBuf> = all.iter().filter(|path| path.as_path() != except).collect();
        let drawn = others.choose(rng).copied().or(all.first()).ok_or_else(|| {
            Error::data(except, format!("`{modality}` has no training mask"), "use mode `keep_lesion` for this class")
        })?;
        Ok((drawn.clone(), foreground(&decode::mask(drawn)?)))
    }
}

/// Scales of source masks.
const SCALE: RangeInclusive<f64> = 0.7..=1.3;
/// Rotations in degrees.
const ROTATE_DEG: RangeInclusive<f64> = -180.0..=180.0;
/// Maximum elastic shift, as a fraction of the source mask's equivalent diameter.
const ELASTIC_FRAC: f64 = 0.06;
/// Fraction of the area by which the placed mask may differ from the scaled source mask.
const AREA_TOLERANCE: f64 = 0.3;
/// Maximum number of locations tried.
const TRIES: usize = 50;

/// From a source mask mask to its place in an image: mirrored, bent, scaled and turned about the middle of its box.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaskTransform {
    /// Rotation in degrees, clockwise on the screen.
    pub rotate_deg: f64,
    /// Pixels of the target per pixel of the source mask.
    pub scale: f64,
    /// Whether the mask is mirrored left to right before the rotation.
    pub flip: bool,
    /// Centre of the mask's box in pixels of the target.
    pub centre_px: (f64, f64),
    /// Maximum elastic shift in pixels of the source mask.
    pub elastic_px: f64,
    /// Seed of the elastic shifts.
    pub elastic_seed: u64,
}

/// A source mask placed into a target image.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedMask {
    /// The mask at the target's size, 0 or 255.
    pub mask: GrayImage,
    /// The transform that placed it.
    pub transform: MaskTransform,
    /// Name of the source mask.
    pub source_mask: String,
}

/// Places `source_mask` into `field`, the valid pixels of the target (0 or 255).
///
/// A source mask from an image of another size is scaled as its image would be. Every second location is near the
/// location in the source mask's own image, because organs have typical locations.
///
/// # Errors
/// The reason, for the record, when no attempt succeeded.
pub fn place_mask(
    source_mask: &GrayImage,
    name: &str,
    field: &GrayImage,
    rng: &mut impl Rng,
) -> std::result::Result<PlacedMask, String> {
    let Some(region) = position::whole(source_mask) else { return Err(format!("the source mask `{name}` is empty")) };
    let valid: Vec<usize> = (0..field.as_raw().len()).filter(|&at| field.as_raw()[at] > 0).collect();
    if valid.is_empty() {
        return Err("the image has no field of view".to_owned());
    }
    let longest = |image: &GrayImage| f64::from(image.width().max(image.height()));
    let base = longest(field) / longest(source_mask);
    let area = region.area_px as f64;
    let mut reason = String::new();
    for number in 0..TRIES {
        let scale = base * rng.random_range(SCALE);
        let transform = MaskTransform {
            rotate_deg: rng.random_range(ROTATE_DEG),
            scale,
            flip: rng.random_bool(0.5),
            centre_px: centre(&valid, field, source_mask, &region, number % 2 == 1, rng),
            elastic_px: ELASTIC_FRAC * 2.0 * (area / std::f64::consts::PI).sqrt(),
            elastic_seed: rng.random(),
        };
        let mask = transform.apply(source_mask, field.dimensions());
        match fits(&mask, field, area * scale * scale) {
            Ok(()) => return Ok(PlacedMask { mask, transform, source_mask: name.to_owned() }),
            Err(why) => reason = why,
        }
    }
    Err(format!("no location for the source mask `{name}` in {TRIES} attempts; the last: {reason}"))
}

/// A valid pixel, or (`at_home`) about the place that the source mask had in its own image.
fn centre(
    valid: &[usize],
    field: &GrayImage,
    source_mask: &GrayImage,
    region: &position::Region,
    near_original: bool,
    rng: &mut impl Rng,
) -> (f64, f64) {
    let (width, height) = (f64::from(field.width()), f64::from(field.height()));
    if near_original {
        let middle = middle(region);
        let mut near = |at: f64, from: u32, to: f64| (at / f64::from(from) + rng.random_range(-0.1..=0.1)) * to;
        return (near(middle.0, source_mask.width(), width), near(middle.1, source_mask.height(), height));
    }
    let at = valid[rng.random_range(0..valid.len())];
    let columns = field.width() as usize;
    ((at % columns) as f64, (at / columns) as f64)
}

/// Whether the mask lies inside the field and is about as large as it should be.
fn fits(mask: &GrayImage, field: &GrayImage, expected_px: f64) -> std::result::Result<(), String> {
    let area = mask.iter().filter(|&&value| value > 0).count();
    if area == 0 {
        return Err("no pixel of it is left".to_owned());
    }
    let outside = mask.iter().zip(field.iter()).filter(|(mask, field)| **mask > 0 && **field == 0).count();
    if outside > 0 {
        return Err(format!("{outside} of {area} pixels lie outside of the field of view"));
    }
    let ratio = area as f64 / expected_px;
    if (ratio - 1.0).abs() > AREA_TOLERANCE {
        return Err(format!("its area is {ratio:.2} of the expected one"));
    }
    Ok(())
}

/// The middle of a region's box.
fn middle(region: &position::Region) -> (f64, f64) {
    let b = region.bounds;
    (f64::from(b.left + b.right) / 2.0, f64::from(b.top + b.bottom) / 2.0)
}

impl MaskTransform {
    /// The transformed source mask in an image of `size` (width, height), 0 or 255.
    pub fn apply(&self, source_mask: &GrayImage, size: (u32, u32)) -> GrayImage {
        let mut mask = GrayImage::new(size.0, size.1);
        let Some(region) = position::whole(source_mask) else { return mask };
        let bounds = region.bounds;
        let spans = (f64::from(bounds.right - bounds.left + 1), f64::from(bounds.bottom - bounds.top + 1));
        let middle = middle(&region);
        let bend = Bend::new(self, spans);
        let (sin, cos) = self.rotate_deg.to_radians().sin_cos();
        let reach = self.scale * (spans.0.hypot(spans.1) / 2.0 + 1.5 * self.elastic_px) + 2.0;
        for y in pixel_range(self.centre_px.1, reach, size.1) {
            for x in pixel_range(self.centre_px.0, reach, size.0) {
                let (dx, dy) = (f64::from(x) - self.centre_px.0, f64::from(y) - self.centre_px.1);
                let (u, v) = ((cos * dx + sin * dy) / self.scale, (cos * dy - sin * dx) / self.scale);
                let (bend_u, bend_v) = bend.at(u, v);
                let (u, v) = (u + bend_u, v + bend_v);
                let u = if self.flip { -u } else { u };
                if coverage(source_mask, middle.0 + u, middle.1 + v) >= 0.5 {
                    mask.put_pixel(x, y, image::Luma([255]));
                }
            }
        }
        mask
    }
}

/// The pixels at most `reach` from `centre` along a side of `length` pixels.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the side")]
pub(super) fn pixel_range(centre: f64, reach: f64, length: u32) -> std::ops::Range<u32> {
    let clamp = |value: f64| value.clamp(0.0, f64::from(length)) as u32;
    clamp((centre - reach).floor())..clamp((centre + reach).ceil() + 1.0)
}

/// Bilinear coverage of the foreground at a point between pixels, 0..=1.
#[expect(clippy::cast_possible_truncation, reason = "pixel positions")]
fn coverage(mask: &GrayImage, x: f64, y: f64) -> f64 {
    let (left, top) = (x.floor(), y.floor());
    let (fx, fy) = (x - left, y - top);
    let at = |dx: i64, dy: i64| {
        let pixel = u32::try_from(left as i64 + dx).ok().zip(u32::try_from(top as i64 + dy).ok());
        f64::from(u8::from(pixel.and_then(|(x, y)| mask.get_pixel_checked(x, y)).is_some_and(|value| value[0] > 0)))
    };
    let row = |dy: i64| at(0, dy) * (1.0 - fx) + at(1, dy) * fx;
    row(0) * (1.0 - fy) + row(1) * fy
}

/// Smooth elastic deformation: random shifts on a grid, interpolated with smoothstep.
struct Bend {
    /// Grid of shifts (x, y), rows of [`Bend::NODES`].
    nodes: Vec<(f64, f64)>,
    spans: (f64, f64),
}

impl Bend {
    const NODES: usize = 5;

    fn new(transform: &MaskTransform, spans: (f64, f64)) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(transform.elastic_seed);
        let mut shift = || rng.random_range(-1.0..=1.0) * transform.elastic_px;
        Self { nodes: (0..Self::NODES * Self::NODES).map(|_| (shift(), shift())).collect(), spans }
    }

    /// The shift at a point relative to the middle of the source mask's box.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small grid")]
    fn at(&self, u: f64, v: f64) -> (f64, f64) {
        let last = (Self::NODES - 1) as f64;
        let cell = |value: f64, span: f64| {
            let along = ((value / span + 0.5) * last).clamp(0.0, last);
            let index = along.floor().min(last - 1.0);
            let part = along - index;
            (index as usize, part * part * (3.0 - 2.0 * part))
        };
        let ((x, fx), (y, fy)) = (cell(u, self.spans.0), cell(v, self.spans.1));
        let mix = |a: (f64, f64), b: (f64, f64), f: f64| (a.0 + (b.0 - a.0) * f, a.1 + (b.1 - a.1) * f);
        let row = |y: usize| mix(self.nodes[y * Self::NODES + x], self.nodes[y * Self::NODES + x + 1], fx);
        mix(row(y), row(y + 1), fy)
    }
}

#[cfg(test)]
mod tests {
    use image::Luma;

    use super::*;
    use crate::data::manifest::{Presence, Target};
    use crate::fixture;

    fn disc(width: u32, height: u32, middle: (u32, u32), radius: u32) -> GrayImage {
        GrayImage::from_fn(width, height, |x, y| {
            let inside = x.abs_diff(middle.0).pow(2) + y.abs_diff(middle.1).pow(2) <= radius * radius;
            Luma([if inside { 255 } else { 0 }])
        })
    }

    fn still(centre_px: (f64, f64)) -> MaskTransform {
        MaskTransform { rotate_deg: 0.0, scale: 1.0, flip: false, centre_px, elastic_px: 0.0, elastic_seed: 0 }
    }

    #[test]
    fn transforms_move_rotate_mirror_and_scale() {
        // A bar of 9x3 with a knob at its upper left.
        let source_mask = GrayImage::from_fn(40, 30, |x, y| {
            let set = ((10..19).contains(&x) && (11..14).contains(&y)) || (x, y) == (10, 10);
            Luma([if set { 255 } else { 0 }])
        });
        let moved = still((14.0 + 5.0, 11.5 + 7.0)).apply(&source_mask, (40, 30));
        let expected = GrayImage::from_fn(40, 30, |x, y| match (x.checked_sub(5), y.checked_sub(7)) {
            (Some(x), Some(y)) => *source_mask.get_pixel(x, y),
            _ => Luma([0]),
        });
        assert_eq!(moved, expected);
        let flipped = MaskTransform { flip: true, ..still((14.0, 11.5)) }.apply(&source_mask, (40, 30));
        assert_eq!((flipped.get_pixel(18, 10)[0], flipped.get_pixel(10, 10)[0]), (255, 0));
        let turned = MaskTransform { rotate_deg: 90.0, ..still((20.5, 15.0)) }.apply(&source_mask, (40, 30));
        let bounds = position::whole(&turned).unwrap().bounds;
        assert_eq!((bounds.right - bounds.left, bounds.bottom - bounds.top), (3, 8));
        assert_eq!(turned.get_pixel(bounds.right, bounds.top)[0], 255, "the knob is at the upper right");
        let doubled = MaskTransform { scale: 2.0, ..still((20.25, 15.25)) }.apply(&source_mask, (40, 30));
        let area = position::whole(&doubled).unwrap().area_px;
        assert!((106..=118).contains(&area), "{area} pixels of four times 28");
    }

    #[test]
    fn placed_masks_lie_in_the_field_with_the_expected_area_and_are_reproducible() {
        let source_mask = disc(100, 80, (30, 40), 9);
        let field = disc(200, 200, (100, 100), 70);
        let (mut areas, mut centres) = (Vec::new(), Vec::new());
        for seed in 0..30 {
            let place_mask = |seed| {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                place_mask(&source_mask, "a", &field, &mut rng).unwrap()
            };
            let placed = place_mask(seed);
            assert_eq!(placed, place_mask(seed));
            assert_eq!(placed.transform.apply(&source_mask, (200, 200)), placed.mask);
            let text = serde_json::to_string(&placed.transform).unwrap();
            let read: MaskTransform = serde_json::from_str(&text).unwrap();
            assert!((read.scale - placed.transform.scale).abs() < 1e-12);
            assert!(placed.mask.iter().zip(field.iter()).all(|(mask, field)| mask <= field));
            assert!(placed.mask.iter().all(|value| [0, 255].contains(value)));
            let region = position::whole(&placed.mask).unwrap();
            let expected = 253.0 * placed.transform.scale.powi(2);
            let ratio = region.area_px as f64 / expected;
            assert!((0.7..=1.3).contains(&ratio), "{ratio}");
            assert!((1.4..=2.6).contains(&placed.transform.scale), "twice as large an image");
            areas.push(region.area_px);
            centres.push(region.bounds.left);
        }
        areas.sort_unstable();
        centres.sort_unstable();
        assert!(areas[29] > 2 * areas[0] && centres[29] > centres[0] + 40, "{areas:?} {centres:?}");
    }

    #[test]
    fn elastic_deformation_changes_the_shape_but_not_the_size() {
        let source_mask = disc(100, 100, (50, 50), 30);
        let bent =
            MaskTransform { elastic_px: 3.6, elastic_seed: 5, ..still((50.0, 50.0)) }.apply(&source_mask, (100, 100));
        let different = bent.iter().zip(source_mask.iter()).filter(|(a, b)| a != b).count();
        assert!((60..800).contains(&different), "{different} of 2821 pixels");
    }

    #[test]
    fn a_failed_placement_gives_the_reason() {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let (wide, field) = (disc(100, 100, (50, 50), 40), disc(100, 100, (50, 50), 10));
        let mut reason =
            |source_mask: &GrayImage, field: &GrayImage| place_mask(source_mask, "a", field, &mut rng).unwrap_err();
        let text = reason(&wide, &field);
        assert!(text.contains("in 50 attempts") && text.contains("outside of the field of view"), "{text}");
        assert!(reason(&GrayImage::new(9, 9), &field).contains("is empty"));
        assert!(reason(&wide, &GrayImage::new(9, 9)).contains("no field of view"));
    }

    #[test]
    fn draw_returns_training_masks_of_the_class_other_than_the_target() {
        let folder = tempfile::tempdir().unwrap();
        let row = |name: &str, modality: &str, split| {
            let mask_path = folder.path().join(name);
            disc(20, 20, (10, 10), 4).save(&mask_path).unwrap();
            let (modality, image_path) = (modality.to_owned(), mask_path.clone());
            let targets = Target::only(mask_path, Presence::Present);
            Row { modality, targets, image_path, split, ..fixture::row("w", "w", None) }
        };
        let rows = [
            row("a.png", "ct", Split::Train),
            row("a.png", "ct", Split::Train),
            row("b.png", "ct", Split::Train),
            row("c.png", "ct", Split::Test),
            row("d.png", "us", Split::Train),
            Row { synthetic: true, ..row("e.png", "ct", Split::Train) },
            Row {
                targets: Target::only(folder.path().join("f.png"), Presence::Absent),
                ..row("f.png", "ct", Split::Train)
            },
        ];
        let mask_bank = MaskBank::new(&rows);
        let counts: Vec<(&str, usize)> =
            mask_bank.masks.iter().map(|(class, masks)| (class.as_str(), masks.len())).collect();
        assert_eq!(counts, [("ct", 2), ("us", 1)]);
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        for _ in 0..10 {
            let (path, mask) = mask_bank.draw("ct", &rows[0].target().mask_path, &mut rng).unwrap();
            assert_eq!(path, rows[2].target().mask_path);
            assert_eq!(mask.iter().max(), Some(&255));
        }
        assert_eq!(
            mask_bank.draw("us", &rows[4].target().mask_path, &mut rng).unwrap().0,
            rows[4].target().mask_path,
            "the only one"
        );
        assert!(mask_bank.draw("xr", &rows[0].target().mask_path, &mut rng).is_err());
    }
}
