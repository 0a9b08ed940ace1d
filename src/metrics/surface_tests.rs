use super::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A mask from rows of `.` and `#`.
fn mask(rows: &[&str]) -> Vec<bool> {
    rows.iter().flat_map(|row| row.bytes()).map(|byte| byte == b'#').collect()
}

/// A `side` x `side` square whose upper left pixel is at `(y, x)` in an image of 12x12 pixels.
fn square(y: usize, x: usize, side: usize) -> Vec<bool> {
    (0..144).map(|i| (y..y + side).contains(&(i / 12)) && (x..x + side).contains(&(i % 12))).collect()
}

/// The size of a mask with rows of `width` pixels.
fn image(mask: &[bool], width: usize) -> Size {
    Size::image(mask.len() / width, width)
}

fn of(prediction: &[bool], truth: &[bool], width: usize) -> SurfaceDistances {
    SurfaceDistances::of(prediction, truth, image(truth, width), Spacing::PIXELS).unwrap()
}

fn is(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-12
}

#[test]
fn a_pixel_has_four_diagonal_pieces() {
    let pixel = mask(&["...", ".#.", "..."]);
    let found = of(&pixel, &pixel, 3);
    assert_eq!(found.truth.len(), 4);
    assert!(found.truth.iter().all(|piece| piece.distance == 0.0 && is(piece.length, 0.5_f64.sqrt())));
    assert_eq!(found.surface_dice(0.0), 1.0);
}

#[test]
fn a_shifted_square_is_within_its_shift() {
    // both contours have 4 corners of length sqrt(1/2) and 12 straight pieces of length 1
    let (a, b) = (square(3, 3, 4), square(3, 5, 4));
    let found = of(&a, &b, 12);
    let contour = 12.0 + 4.0 * 0.5_f64.sqrt();
    for side in [&found.prediction, &found.truth] {
        assert_eq!(side.len(), 16);
        assert!(is(side.iter().map(|piece| piece.length).sum(), contour));
    }
    assert_eq!(found.surface_dice(2.0), 1.0);
    // Columns 3, 4 of the upper and lower edge of `a` are 2 and 1 from `b`, columns 5 to 7 are on it. The left edge of
    // `a` is 2 from `b`. The right edge is on column 7: its inner three corners are 2 from both vertical edges of `b`
    // (columns 5 and 9), but the upper and lower of them are 1 from the horizontal edges.
    let on = 2.0 * (2.0 + 0.5_f64.sqrt());
    assert!(is(found.surface_dice(0.0), 2.0 * on / (2.0 * contour)), "{}", found.surface_dice(0.0));
    let near = on + 2.0 + 2.0;
    assert!(is(found.surface_dice(1.0), near / contour), "{}", found.surface_dice(1.0));
    assert!(is(found.surface_dice(1.999), near / contour));
}

#[test]
fn empty_masks_score_one_or_zero() {
    let (empty, square) = (vec![false; 144], square(2, 2, 3));
    assert_eq!(of(&empty, &empty, 12).surface_dice(2.0), 1.0);
    let missed = of(&empty, &square, 12);
    assert_eq!((missed.surface_dice(2.0), missed.surface_dice(1e9)), (0.0, 0.0));
    assert!(missed.prediction.is_empty() && missed.truth.iter().all(|piece| piece.distance.is_infinite()));
    assert_eq!(of(&square, &empty, 12).surface_dice(2.0), 0.0);
}

#[test]
fn the_border_of_the_image_is_a_contour() {
    let all = vec![true; 12];
    let found = of(&all, &all, 4);
    assert!(is(found.truth.iter().map(|piece| piece.length).sum(), 2.0 * (3.0 + 2.0) + 4.0 * 0.5_f64.sqrt()));
}

#[test]
fn spacing_scales_distances_and_lengths() {
    let (a, b) = (square(3, 3, 4), square(3, 5, 4));
    let with = |row, column| SurfaceDistances::of(&a, &b, Size::image(12, 12), Spacing::image(row, column)).unwrap();
    assert!(is(with(0.5, 0.5).surface_dice(0.5), with(1.0, 1.0).surface_dice(1.0)));
    // columns 3 mm apart: the left edge is 6 mm from the other square
    let wide = with(1.0, 3.0);
    assert!(wide.truth.iter().any(|piece| is(piece.distance, 6.0)), "{wide:?}");
    for spacing in [Spacing::image(0.0, 1.0), Spacing::image(1.0, f64::NAN)] {
        let error = SurfaceDistances::of(&a, &b, Size::image(12, 12), spacing).unwrap_err().to_string();
        assert!(error.starts_with("`spacing`: "), "{error}");
    }
    assert!(SurfaceDistances::of(&a, &b, Size::image(20, 7), Spacing::PIXELS).is_err());
    assert!(SurfaceDistances::of(&a, &b[1..], Size::image(12, 12), Spacing::PIXELS).is_err());
}

/// Surface Dice from the definition: every pair of corners, without cropping or a distance transform.
fn by_all_pairs(a: &[bool], b: &[bool], width: usize, spacing: Spacing, tolerance: f64) -> f64 {
    let height = a.len() / width;
    let contour = |mask: &[bool]| {
        let at = |y: usize, x: usize| {
            let is_inside = (1..=height).contains(&y) && (1..=width).contains(&x);
            is_inside && mask[(y - 1) * width + x - 1]
        };
        let mut found = Vec::new();
        for y in 0..=height {
            for x in 0..=width {
                let four = [at(y, x), at(y, x + 1), at(y + 1, x), at(y + 1, x + 1)];
                let diagonal = 0.5 * spacing.row.hypot(spacing.column);
                let length = match four.iter().filter(|set| **set).count() {
                    1 | 3 => diagonal,
                    2 if four[0] == four[1] => spacing.column,
                    2 if four[0] == four[2] => spacing.row,
                    2 => 2.0 * diagonal,
                    _ => continue,
                };
                found.push((y as f64 * spacing.row, x as f64 * spacing.column, length));
            }
        }
        found
    };
    let (a, b) = (contour(a), contour(b));
    let near = |own: &[(f64, f64, f64)], other: &[(f64, f64, f64)]| {
        let is_near = |p: &&(f64, f64, f64)| other.iter().any(|q| (p.0 - q.0).hypot(p.1 - q.1) <= tolerance + 1e-9);
        own.iter().filter(is_near).map(|p| p.2).sum::<f64>()
    };
    let all: f64 = a.iter().chain(&b).map(|p| p.2).sum();
    if all == 0.0 { 1.0 } else { (near(&a, &b) + near(&b, &a)) / all }
}

#[test]
fn random_masks_agree_with_all_pairs() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for case in 0..200 {
        let (width, height) = (rng.random_range(1..14), rng.random_range(1..14));
        let density = [0.02, 0.2, 0.5, 0.95][case % 4];
        let mut draw = || -> Vec<bool> { (0..width * height).map(|_| rng.random_bool(density)).collect() };
        let (a, b) = (draw(), draw());
        let spacing = if case % 3 == 0 { Spacing::image(0.8, 1.7) } else { Spacing::PIXELS };
        let found = SurfaceDistances::of(&a, &b, Size::image(height, width), spacing).unwrap();
        for tolerance in [0.0, 1.0, 1.5, 2.0, 4.2] {
            // the definition allows for rounding, so a little more is allowed here too
            let (found, expected) =
                (found.surface_dice(tolerance + 1e-9), by_all_pairs(&a, &b, width, spacing, tolerance));
            assert!(is(found, expected), "case {case}, {tolerance}: {found}, expected {expected}");
        }
    }
}

#[derive(serde::Deserialize)]
struct Fixture {
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    prediction: Vec<String>,
    truth: Vec<String>,
    spacing: Spacing,
    /// Surface Dice by tolerance.
    surface_dice: Vec<(f64, f64)>,
    /// Lengths of the contours of prediction and truth.
    lengths: [f64; 2],
}

#[test]
fn surface_dice_equals_deepminds() {
    let fixture: Fixture = serde_json::from_str(include_str!("../../tests/fixtures/surface_dice.json")).unwrap();
    assert!(fixture.cases.len() >= 12);
    for (number, case) in fixture.cases.iter().enumerate() {
        let rows = |mask: &[String]| super::tests::mask(&mask.iter().map(String::as_str).collect::<Vec<_>>());
        let width = case.truth[0].len();
        let (prediction, truth) = (rows(&case.prediction), rows(&case.truth));
        let found = SurfaceDistances::of(&prediction, &truth, image(&truth, width), case.spacing).unwrap();
        let sum = |pieces: &[Piece]| pieces.iter().map(|piece| piece.length).sum::<f64>();
        assert!(is(sum(&found.prediction), case.lengths[0]) && is(sum(&found.truth), case.lengths[1]), "case {number}");
        for &(tolerance, expected) in &case.surface_dice {
            let value = found.surface_dice(tolerance);
            assert!((value - expected).abs() < 1e-9, "case {number}, {tolerance}: {value}, expected {expected}");
        }
    }
}
