use super::*;
use crate::detection::auroc;
use crate::segmentation::ImageScore;

#[derive(serde::Deserialize)]
struct Fixture {
    tolerances: Vec<f64>,
    cases: Vec<Case>,
    auroc: Vec<Roc>,
}

#[derive(serde::Deserialize)]
struct Case {
    shape: Vec<usize>,
    spacing: Vec<f64>,
    prediction: String,
    truth: String,
    dice: f64,
    hd: Option<f64>,
    hd95: Option<f64>,
    assd: Option<f64>,
    surface_dice: Vec<Option<f64>>,
    lesions: [u64; 4],
}

#[derive(serde::Deserialize)]
struct Roc {
    scores: Vec<f64>,
    labels: Vec<bool>,
    auroc: f64,
}

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("../../tests/fixtures/surface_scores.json")).unwrap()
}

/// The first `count` bits of a text in base 16.
fn bits(text: &str, count: usize) -> Vec<bool> {
    let bit = |at: usize| u8::from_str_radix(&text[at / 8 * 2..at / 8 * 2 + 2], 16).unwrap() >> (7 - at % 8) & 1 == 1;
    (0..count).map(bit).collect()
}

impl Case {
    fn size(&self) -> Size {
        match self.shape[..] {
            [rows, columns] => Size::image(rows, columns),
            [slices, rows, columns] => Size::volume(slices, rows, columns),
            _ => panic!("{:?}", self.shape),
        }
    }

    fn spacing(&self) -> Spacing {
        match self.spacing[..] {
            [row, column] => Spacing::image(row, column),
            [slice, row, column] => Spacing { slice, row, column },
            _ => panic!("{:?}", self.spacing),
        }
    }

    fn masks(&self) -> [Vec<bool>; 2] {
        [&self.prediction, &self.truth].map(|text| bits(text, self.size().cells()))
    }
}

/// Equal within 1e-6 of the larger of 1 and the value: MONAI returns fp32.
fn is(found: Option<f64>, expected: Option<f64>) -> bool {
    match (found, expected) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-6 * b.abs().max(1.0),
        (a, b) => a.is_none() && b.is_none(),
    }
}

#[test]
fn scores_equal_those_of_monai_and_deepmind() {
    let Fixture { tolerances, cases, .. } = fixture();
    assert!(cases.len() >= 240 && cases.iter().filter(|case| case.shape.len() == 3).count() >= 100);
    assert!(cases.iter().filter(|case| case.hd.is_some()).count() >= 200);
    for (number, case) in cases.iter().enumerate() {
        let ([prediction, truth], size, spacing) = (case.masks(), case.size(), case.spacing());
        let of = |tolerance: f64| MaskScores::of(&prediction, &truth, size, spacing, tolerance).unwrap();
        let scores = of(1.0);
        let border = |part: fn(&BorderDistances) -> f64| scores.border.as_ref().map(part);
        let distances = [(border(|b| b.hd), case.hd), (border(|b| b.hd95), case.hd95), (border(|b| b.assd), case.assd)];
        for (found, expected) in distances {
            assert!(is(found, expected), "case {number}: {found:?}, expected {expected:?} in {:?}", case.shape);
        }
        for (&tolerance, expected) in tolerances.iter().zip(&case.surface_dice) {
            // without any surface DeepMind's value is NaN
            let (found, expected) = (of(tolerance).surface_dice, expected.unwrap_or(1.0));
            assert!((found - expected).abs() < 1e-9, "case {number}, {tolerance}: {found}, expected {expected}");
        }
        let LesionCounts { truth: lesions, found, predicted, right } = scores.lesions;
        assert_eq!([lesions, found, predicted, right], case.lesions, "case {number}");
        let probabilities: Vec<f32> = prediction.iter().map(|set| f32::from(u8::from(*set))).collect();
        let dice = ImageScore::of(&probabilities, &truth).unwrap().dice;
        // MONAI: 1 if both masks are empty, as here
        assert!((dice - case.dice).abs() < 1e-6, "case {number}: Dice {dice}, expected {}", case.dice);
    }
}

#[test]
fn the_area_under_the_roc_curve_equals_scikit_learns() {
    for Roc { scores, labels, auroc: expected } in fixture().auroc {
        let items: Vec<(f64, bool, f64)> =
            scores.into_iter().zip(labels).map(|(score, is_positive)| (score, is_positive, 1.0)).collect();
        assert!((auroc(&items).unwrap() - expected).abs() < 1e-12);
    }
}

/// A mask from rows of `.` and `#`.
fn mask(rows: &[&str]) -> Vec<bool> {
    rows.iter().flat_map(|row| row.bytes()).map(|byte| byte == b'#').collect()
}

#[test]
fn lesions_pixels_and_area_of_a_known_pair() {
    // two lesions, which touch at corners only within themselves; the prediction finds the left one and adds one
    let truth = mask(&["#....#", ".#..##", "......", "......"]);
    let prediction = mask(&["......", ".##...", "......", "#....."]);
    let scores = MaskScores::of(&prediction, &truth, Size::image(4, 6), Spacing::image(0.5, 2.0), 0.0).unwrap();
    assert_eq!(scores.lesions, LesionCounts { truth: 2, found: 1, predicted: 2, right: 1 });
    assert_eq!(
        (scores.lesions.recall(), scores.lesions.precision(), scores.lesions.f1()),
        (Some(0.5), Some(0.5), Some(0.5))
    );
    assert_eq!((scores.sensitivity, scores.precision), (Some(0.2), Some(1.0 / 3.0)));
    assert_eq!((scores.area_difference, scores.area_error_frac), (-2.0, Some(0.4)), "pixels of 1 mm2");
}

#[test]
fn scores_of_empty_masks_are_not_defined() {
    let (empty, one) = (mask(&["..", ".."]), mask(&["..", ".#"]));
    let of = |a: &[bool], b: &[bool]| MaskScores::of(a, b, Size::image(2, 2), Spacing::PIXELS, 1.0).unwrap();
    let missed = of(&empty, &one);
    assert_eq!((missed.sensitivity, missed.precision, missed.border), (Some(0.0), None, None));
    assert_eq!(
        (missed.lesions.recall(), missed.lesions.f1(), missed.area_error_frac),
        (Some(0.0), Some(0.0), Some(1.0))
    );
    let invented = of(&one, &empty);
    assert_eq!((invented.sensitivity, invented.precision, invented.surface_dice), (None, Some(0.0), 0.0));
    assert_eq!((invented.lesions.recall(), invented.lesions.f1(), invented.area_error_frac), (None, Some(0.0), None));
    let nothing = of(&empty, &empty);
    assert_eq!((nothing.surface_dice, nothing.lesions.f1(), nothing.border), (1.0, None, None));
    let size = Size::image(3, 2);
    assert!(MaskScores::of(&empty, &one, size, Spacing::PIXELS, 1.0).is_err());
    assert!(BorderDistances::of(&one, &one, Size::image(2, 2), Spacing::image(0.0, 1.0)).is_err());
}
