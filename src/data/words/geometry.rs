//! Where a mask lies and how large it is, as numbers that a network reads to write about it.

use ::image::{GrayImage, imageops};
use rand::Rng;

use crate::agreement::{self, MaskLocation};
use crate::position::{self, GridColumn, GridRow, PixelBox, Position, Region, Zones};

/// Cells of the coarse map in each direction.
const CELLS: u32 = 6;
/// Shares of the image that have a number of their own: below 1 %, 1 % to 40 %, more.
const PERCENT: usize = 42;
/// Number of [`Geometry`]'s parts: coarse map, centre, box, two of the size, cells of the grid, quadrants, closeness to the
/// middle, one to three regions, cells and quadrants of the regions, percent, nothing, unknown.
const PARTS: [usize; 13] = [(CELLS * CELLS) as usize, 2, 4, 2, 9, 5, 1, 3, 9, 5, PERCENT, 1, 1];

/// A mask in numbers of about -1 to 1. It states the location by both rules of [`position`], as the answers of prepared data
/// do, and the rounded share of the image.
#[derive(Debug, Clone, PartialEq)]
pub struct Geometry {
    numbers: Vec<f32>,
    /// Centre as a fraction of width and height; `None` for an empty mask and one that is not known.
    centre: Option<[f64; 2]>,
}

/// A mask that lies elsewhere or has another size, and how the words of an answer then differ.
#[derive(Debug, Clone, PartialEq)]
pub struct MovedMask {
    /// The mask.
    pub geometry: Geometry,
    /// Index of the first token that differs, among those of the whole text.
    pub at: usize,
    /// The token there.
    pub id: i64,
}

/// Changes of the true masks of a training, so that words do not rely on more than predicted masks give.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskNoise {
    /// Seed of the training.
    pub seed: u64,
    /// Standard deviation of the centre in each direction, as a fraction of the side of the image. The logarithm of the
    /// area has the same.
    pub spread: f64,
}

impl MaskNoise {
    /// Part of the masks that are not shown.
    const HIDDEN: f64 = 0.1;
}

impl Geometry {
    /// Count of the numbers.
    pub const LEN: usize = {
        let (mut sum, mut part) = (0, 0);
        while part < PARTS.len() {
            sum += PARTS[part];
            part += 1;
        }
        sum
    };

    /// Of a mask that is not known.
    pub fn unknown() -> Self {
        let mut numbers = vec![0.0; Self::LEN];
        numbers[Self::LEN - 1] = 1.0;
        Self { numbers, centre: None }
    }

    /// Of a mask whose foreground is above 0.
    pub fn of(mask: &GrayImage) -> Self {
        Self::resized(mask, 1.0)
    }

    /// Of a mask of a training, changed by `noise`. `key` names it: epoch, row and target.
    pub fn noisy(mask: &GrayImage, noise: MaskNoise, key: &[u64]) -> Self {
        let mut random = prsmed_base::rng::stream(noise.seed, "mask noise", key);
        if random.random_bool(MaskNoise::HIDDEN) {
            return Self::unknown();
        }
        let Some(whole) = position::whole(mask) else { return Self::of(mask) };
        // sum of uniform numbers: nearly normal, and never far away
        let mut normal = || noise.spread * ((0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0);
        let [right, down, growth] = [normal(), normal(), normal()];
        Self::resized(&moved(mask, &whole.bounds, [right, down]), growth.exp())
    }

    /// The numbers, of which [`Self::LEN`] describe a mask.
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// Mean distance of the centres in the two directions, as a fraction of the side; `None` if one mask is empty or not
    /// known.
    pub fn distance(&self, other: &Self) -> Option<f64> {
        let ([x, y], [other_x, other_y]) = (self.centre?, other.centre?);
        Some(f64::midpoint((x - other_x).abs(), (y - other_y).abs()))
    }

    /// A mask that lies at a random place of the image, in the same row if `keeps_row`; `None` for an empty mask.
    pub(crate) fn moved(mask: &GrayImage, keeps_row: bool, seed: u64, key: &[u64]) -> Option<GrayImage> {
        let mut random = prsmed_base::rng::stream(seed, "moved mask", key);
        let bounds = position::whole(mask)?.bounds;
        let mut shift = |side: u32, [first, last]: [u32; 2]| {
            let room = [i64::from(first), i64::from(side - 1 - last)];
            random.random_range(-room[0]..=room[1]) as f64 / f64::from(side)
        };
        let right = shift(mask.width(), [bounds.left, bounds.right]);
        let down = if keeps_row { 0.0 } else { shift(mask.height(), [bounds.top, bounds.bottom]) };
        Some(moved(mask, &bounds, [right, down]))
    }

    /// A mask of another size at its place, so far as the image has room for it; `None` for an empty mask.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a side")]
    pub(crate) fn scaled(mask: &GrayImage, seed: u64, key: &[u64]) -> Option<GrayImage> {
        let mut random = prsmed_base::rng::stream(seed, "scaled mask", key);
        let bounds = position::whole(mask)?.bounds;
        // an eighth to eight times the area
        let scale = 8_f64.powf(random.random_range(-0.5..=0.5));
        let side = |[first, last]: [u32; 2], most: u32| {
            let side = (f64::from(last - first + 1) * scale).round().clamp(1.0, f64::from(most)) as u32;
            let middle = first.midpoint(last);
            (side, middle.saturating_sub(side / 2).min(most - side))
        };
        let (columns, left) = side([bounds.left, bounds.right], mask.width());
        let (rows, top) = side([bounds.top, bounds.bottom], mask.height());
        let (width, height) = (bounds.right - bounds.left + 1, bounds.bottom - bounds.top + 1);
        let inside = imageops::crop_imm(mask, bounds.left, bounds.top, width, height).to_image();
        let inside = imageops::resize(&inside, columns, rows, imageops::FilterType::Nearest);
        let mut scaled = GrayImage::new(mask.width(), mask.height());
        imageops::replace(&mut scaled, &inside, i64::from(left), i64::from(top));
        Some(scaled)
    }

    /// Of a mask with so many times its area.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shares of an image")]
    fn resized(mask: &GrayImage, growth: f64) -> Self {
        let size = mask.dimensions();
        let (width, height) = (f64::from(size.0), f64::from(size.1));
        let Some(whole) = position::whole(mask) else {
            let mut numbers = vec![0.0; Self::LEN];
            numbers[Self::LEN - 2] = 1.0;
            return Self { numbers, centre: None };
        };
        let regions = agreement::regions(mask, &whole);
        let area = (growth * whole.area_px as f64 / (width * height)).min(1.0);
        let centre = [(whole.centroid_px.0 + 0.5) / width, (whole.centroid_px.1 + 0.5) / height];
        let quadrant = position::quadrant(&whole, size);
        let mut numbers = coarse(mask, &whole);
        let mut from_middle = |fraction: f64| numbers.push((2.0 * fraction - 1.0) as f32);
        centre.into_iter().for_each(&mut from_middle);
        let bounds = whole.bounds;
        for (side, length) in
            [(bounds.left, width), (bounds.top, height), (bounds.right + 1, width), (bounds.bottom + 1, height)]
        {
            from_middle(f64::from(side) / length);
        }
        numbers.extend([(1.0 + area.max(1e-4).log10() / 4.0) as f32, area.sqrt() as f32]);
        let mut marks = |count: usize, set: &[usize]| {
            numbers.extend((0..count).map(|index| f32::from(u8::from(set.contains(&index)))));
        };
        marks(9, &[cell(position::grid(&whole, size))]);
        marks(5, &[corner(quadrant.position)]);
        marks(1, if quadrant.near { &[0] } else { &[] });
        marks(3, &[regions.len().clamp(1, 3) - 1]);
        marks(9, &regions.iter().map(|region| cell(position::grid(region, size))).collect::<Vec<_>>());
        let corners = regions.iter().map(|region| corner(position::component_zone(region, size).position));
        marks(5, &corners.collect::<Vec<_>>());
        let percent = 100.0 * area;
        marks(PERCENT, &[if percent < 1.0 { 0 } else { (percent.round() as usize).min(PERCENT - 1) }]);
        marks(2, &[]);
        Self { numbers, centre: Some(centre) }
    }
}

/// A mask whose foreground is moved to a location, so far as the image has room for it; `None` for an empty mask, and for
/// one that is too large to lie there.
pub fn moved_to(mask: &GrayImage, position: Position, zones: Zones) -> Option<GrayImage> {
    let whole = position::whole(mask)?;
    let (width, height) = mask.dimensions();
    let at = |third: usize| (third as f64 + 0.5) / 3.0;
    let right = at(position.column as usize) - (whole.centroid_px.0 + 0.5) / f64::from(width);
    let down = at(position.row as usize) - (whole.centroid_px.1 + 0.5) / f64::from(height);
    let moved = moved(mask, &whole.bounds, [right, down]);
    (MaskLocation::of(&moved)?.position(zones) == position).then_some(moved)
}

/// A mask whose foreground, which has these bounds, is moved by fractions of the sides and stays whole.
fn moved(mask: &GrayImage, bounds: &PixelBox, [right, down]: [f64; 2]) -> GrayImage {
    let (width, height) = mask.dimensions();
    let right = shift(right, width, [bounds.left, bounds.right]);
    let down = shift(down, height, [bounds.top, bounds.bottom]);
    let (columns, rows) = (bounds.right - bounds.left + 1, bounds.bottom - bounds.top + 1);
    let inside = imageops::crop_imm(mask, bounds.left, bounds.top, columns, rows).to_image();
    let mut moved = GrayImage::new(width, height);
    imageops::replace(&mut moved, &inside, i64::from(bounds.left) + right, i64::from(bounds.top) + down);
    moved
}

/// `fraction` of a side in pixels, so that a box with these ends stays inside.
#[expect(clippy::cast_possible_truncation, reason = "at most a side")]
fn shift(fraction: f64, side: u32, [first, last]: [u32; 2]) -> i64 {
    let wanted = (fraction * f64::from(side)).round() as i64;
    wanted.clamp(-i64::from(first), i64::from(side - 1 - last))
}

/// Share of the foreground in each cell of the coarse map.
fn coarse(mask: &GrayImage, whole: &Region) -> Vec<f32> {
    let (width, height) = mask.dimensions();
    let mut counts = [0_u32; PARTS[0]];
    let bounds = whole.bounds;
    for y in bounds.top..=bounds.bottom {
        let row = u64::from(y) * u64::from(CELLS) / u64::from(height);
        for x in bounds.left..=bounds.right {
            if mask.get_pixel(x, y).0[0] > 0 {
                let column = u64::from(x) * u64::from(CELLS) / u64::from(width);
                counts[usize::try_from(row * u64::from(CELLS) + column).expect("a cell")] += 1;
            }
        }
    }
    counts.iter().map(|count| *count as f32 / whole.area_px as f32).collect()
}

/// Index of a cell of the grid.
fn cell(position: Position) -> usize {
    3 * position.row as usize + position.column as usize
}

/// Index of a quadrant; 4 is the middle.
fn corner(position: Position) -> usize {
    match (position.row, position.column) {
        (GridRow::Center, _) | (_, GridColumn::Center) => 4,
        (row, column) => 2 * usize::from(row == GridRow::Lower) + usize::from(column == GridColumn::Right),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::image::Luma;

    fn mask(left: u32, top: u32, side: u32) -> GrayImage {
        let inside = |x: u32, y: u32| (left..left + side).contains(&x) && (top..top + side).contains(&y);
        GrayImage::from_fn(60, 60, |x, y| Luma([if inside(x, y) { 255 } else { 0 }]))
    }

    /// Indices of the numbers that are 1 among `count` from `first` on.
    fn set(geometry: &Geometry, first: usize, count: usize) -> Vec<usize> {
        (0..count).filter(|index| geometry.numbers[first + index] >= 1.0).collect()
    }

    #[test]
    fn a_mask_is_told_by_its_place_and_size() {
        let geometry = Geometry::of(&mask(45, 5, 12));
        assert_eq!(geometry.numbers().len(), Geometry::LEN);
        let sum: f32 = geometry.numbers[..36].iter().sum();
        assert!((sum - 1.0).abs() < 1e-6 && geometry.numbers[4] > 0.0 && geometry.numbers[30] == 0.0);
        let near = |index: usize, value: f32| (geometry.numbers[index] - value).abs() < 1e-6;
        assert!(near(36, 0.7) && near(37, -1.0 + 22.0 / 60.0), "{:?}", &geometry.numbers[36..44]);
        assert!(near(38, 0.5) && near(39, -1.0 + 10.0 / 60.0) && near(40, 0.9) && near(43, 0.2));
        // upper right, in one region of 4 % of the image
        assert_eq!([set(&geometry, 44, 9), set(&geometry, 53, 5), set(&geometry, 59, 3)], [[2], [1], [0]]);
        assert_eq!([set(&geometry, 62, 9), set(&geometry, 71, 5), set(&geometry, 76, 42)], [[2], [1], [4]]);
        let two = GrayImage::from_fn(60, 60, |x, y| {
            Luma([u8::from(x.abs_diff(y) < 60 && (x < 6 && y < 6 || x > 53 && y > 53))])
        });
        let two = Geometry::of(&two);
        assert_eq!((set(&two, 44, 9), set(&two, 59, 3), set(&two, 62, 9)), (vec![4], vec![1], vec![0, 8]));
    }

    #[test]
    fn a_scaled_mask_stays_at_its_place_and_inside() {
        let areas: Vec<u64> = (0..40)
            .map(|key| {
                let scaled = Geometry::scaled(&mask(45, 5, 12), 7, &[key]).unwrap();
                let whole = position::whole(&scaled).unwrap();
                assert!(whole.bounds.left >= 26 && whole.bounds.top <= 10, "{:?}", whole.bounds);
                whole.area_px
            })
            .collect();
        let (least, most) = (*areas.iter().min().unwrap(), *areas.iter().max().unwrap());
        assert!((16..40).contains(&least) && (600..1200).contains(&most), "{least} {most}");
        // never larger than the image
        let large = (0..40).map(|key| Geometry::scaled(&mask(0, 0, 55), 7, &[key]).unwrap());
        assert!(large.into_iter().all(|scaled| position::whole(&scaled).is_some()));
        assert_eq!(Geometry::scaled(&GrayImage::new(5, 5), 7, &[0]), None);
    }

    #[test]
    fn a_mask_moves_to_each_location_that_has_room_for_it() {
        let small = mask(45, 5, 12);
        for position in Position::ALL {
            let moved = moved_to(&small, position, Zones::Grid).unwrap();
            assert_eq!(MaskLocation::of(&moved).unwrap().position(Zones::Grid), position);
            assert_eq!(position::whole(&moved).unwrap().area_px, 144);
        }
        let fitting =
            |mask: &GrayImage, zones| Position::ALL.into_iter().filter_map(|at| moved_to(mask, at, zones)).count();
        assert_eq!([fitting(&small, Zones::Quadrants), fitting(&mask(0, 0, 55), Zones::Grid)], [5, 1]);
        assert_eq!(fitting(&GrayImage::new(5, 5), Zones::Grid), 0);
    }

    #[test]
    fn an_empty_mask_and_an_unknown_one_differ() {
        let (empty, unknown) = (Geometry::of(&GrayImage::new(5, 4)), Geometry::unknown());
        for (geometry, index) in [(&empty, Geometry::LEN - 2), (&unknown, Geometry::LEN - 1)] {
            let all: Vec<usize> = set(geometry, 0, Geometry::LEN);
            assert_eq!((all, geometry.numbers.iter().sum::<f32>()), (vec![index], 1.0));
        }
        assert_eq!(empty.distance(&unknown), None);
    }

    #[test]
    fn noise_moves_a_mask_by_its_spread_and_keeps_it_inside() {
        let original = Geometry::of(&mask(24, 24, 12));
        let noise = MaskNoise { seed: 3, spread: 0.05 };
        let noisy: Vec<Geometry> = (0..2000).map(|row| Geometry::noisy(&mask(24, 24, 12), noise, &[0, row])).collect();
        let hidden = noisy.iter().filter(|geometry| **geometry == Geometry::unknown()).count();
        assert!((150..250).contains(&hidden), "{hidden}");
        let distances: Vec<f64> = noisy.iter().filter_map(|geometry| geometry.distance(&original)).collect();
        let mean = distances.iter().sum::<f64>() / distances.len() as f64;
        // mean of a normal distribution's absolute value: 0.8 of its standard deviation
        assert!((0.035..0.045).contains(&mean), "{mean}");
        let wide = MaskNoise { seed: 3, spread: 1.0 };
        for row in 0..200 {
            let geometry = Geometry::noisy(&mask(0, 48, 12), wide, &[1, row]);
            let sum: f32 = geometry.numbers[..36].iter().sum();
            assert!(geometry == Geometry::unknown() || (sum - 1.0).abs() < 1e-5, "a part of the mask is lost: {sum}");
        }
        let none = MaskNoise { seed: 3, spread: 0.0 };
        let kept =
            (0..20).map(|row| Geometry::noisy(&mask(24, 24, 12), none, &[row])).find(|one| *one != Geometry::unknown());
        assert_eq!(kept, Some(original));
    }
}
