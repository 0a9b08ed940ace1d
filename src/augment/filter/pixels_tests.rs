use image::Luma;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::augment::inpaint_mask::{SquareFrame, paste_exact};

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// A smooth image with some noise, different for each seed.
fn tissue(seed: u64, shift: u8) -> RgbImage {
    let mut rng = rng(seed);
    let (a, b) = (rng.random_range(0.02..0.06), rng.random_range(0.02..0.06));
    RgbImage::from_fn(160, 120, |x, y| {
        let wave = 30.0 * ((f64::from(x) * a).sin() + (f64::from(y) * b).cos());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 255")]
        let level = (110.0 + wave + rng.random_range(-4.0..4.0)) as u8;
        Rgb([level + shift; 3])
    })
}

fn label() -> GrayImage {
    GrayImage::from_fn(160, 120, |x, y| Luma([u8::from(x.abs_diff(80) < 12 && y.abs_diff(60) < 9) * 255]))
}

fn inpaint_mask(seed: u64) -> InpaintMask {
    let frame = SquareFrame::new((160, 120), 256).unwrap();
    let mut drawn = (0..).map(|n| InpaintMask::draw(&label(), None, &frame, &mut rng(100 * seed + n)).unwrap());
    drawn.find(|mask| (10.0..=25.0).contains(&mask.rim_px)).unwrap()
}

fn real() -> RealStatistics {
    let images: Vec<RgbImage> = (0..12).map(|seed| tissue(seed, 0)).collect();
    let seams: Vec<Seam> = images.iter().zip(0..).map(|(p, seed)| seam(p, &inpaint_mask(seed)).unwrap()).collect();
    let of = |get: fn(&Seam) -> f64| ValueSpread::of(&seams.iter().map(get).collect::<Vec<_>>());
    let medians: Vec<f64> = images.iter().map(|image| median_inside(image, &label()).unwrap()).collect();
    RealStatistics {
        median: ValueSpread::of(&medians),
        seam_jump: of(|seam| seam.jump),
        seam_step: of(|seam| seam.step),
    }
}

#[test]
fn blank_and_clipped_images_are_measured() {
    let flat = RgbImage::from_pixel(10, 10, Rgb([90; 3]));
    assert_eq!(spread(&flat), 0.0);
    let halves = RgbImage::from_fn(10, 10, |x, _| Rgb([if x < 5 { 0 } else { 255 }; 3]));
    assert!((spread(&halves) - 0.5).abs() < 0.01);
    assert_eq!(clipped(&halves), 1.0);
    assert_eq!(clipped(&flat), 0.0);
    assert_eq!(clipped(&RgbImage::from_pixel(4, 4, Rgb([255, 3, 3]))), 1.0, "one channel is enough");
    assert_eq!(clipped(&RgbImage::from_pixel(4, 4, Rgb([0, 3, 3]))), 0.0, "red tissue without blue is not clipped");
    let dark = RgbImage::from_fn(10, 10, |x, _| Rgb([if x < 5 { 0 } else { 90 }; 3]));
    assert_eq!((clipped_more(&dark, &dark), clipped_more(&halves, &dark)), (0.0, 0.5));
}

#[test]
fn median_uses_masked_pixels_only() {
    let image = RgbImage::from_fn(20, 20, |x, _| Rgb([if x < 10 { 51 } else { 204 }; 3]));
    let mask = GrayImage::from_fn(20, 20, |x, y| Luma([u8::from(x >= 9 && y < 5)]));
    assert!((median_inside(&image, &mask).unwrap() - 0.8).abs() < 1e-6);
    assert_eq!(median_inside(&image, &GrayImage::new(20, 20)), None);
    assert_eq!(median_inside(&image, &GrayImage::new(5, 20)), None);
}

#[test]
fn seams_are_measured_across_the_ramp() {
    let inpaint_mask = inpaint_mask(1);
    let flat = RgbImage::from_pixel(160, 120, Rgb([100; 3]));
    let brighter = RgbImage::from_pixel(160, 120, Rgb([151; 3]));
    let none = seam(&flat, &inpaint_mask).unwrap();
    assert_eq!((none.jump, none.step), (0.0, 0.0));
    // A tint of 51 levels behind a ramp: all of the jump, spread over several steps.
    let ramped = seam(&paste_exact(&flat, &brighter, &inpaint_mask).unwrap(), &inpaint_mask).unwrap();
    assert!((ramped.jump - 0.2).abs() < 0.02, "{ramped:?} ramp {}", inpaint_mask.ramp_px);
    assert!(ramped.step < 0.6 * ramped.jump, "{ramped:?} ramp {}", inpaint_mask.ramp_px);
    // Without a ramp the step is the jump.
    let mut hard = brighter.clone();
    for ((pixel, original), preserved) in hard.pixels_mut().zip(flat.pixels()).zip(inpaint_mask.preserved.iter()) {
        if *preserved > 0 {
            *pixel = *original;
        }
    }
    let hard = seam(&hard, &inpaint_mask).unwrap();
    assert!((hard.jump - 0.2).abs() < 0.02 && hard.step > 0.1, "{hard:?}");
    assert!(hard.step > 1.5 * ramped.step, "{hard:?} {ramped:?}");
    let everything = InpaintMask { preserved: GrayImage::from_pixel(160, 120, Luma([255])), ..inpaint_mask.clone() };
    assert_eq!(seam(&flat, &everything), None);
    assert_eq!(seam(&RgbImage::new(3, 3), &inpaint_mask), None);
}

#[test]
fn good_pairs_pass_and_each_failed_test_gives_its_reason() {
    let (source, mask, inpaint_mask, real) = (tissue(100, 0), label(), inpaint_mask(100), real());
    let decision_of = |generated: &RgbImage, real: &RealStatistics| {
        let result = paste_exact(&source, generated, &inpaint_mask).unwrap();
        let candidate = TestedPair { source: &source, result: &result, mask: &mask, inpaint_mask: Some(&inpaint_mask) };
        let mut decision = Decision::default();
        test_pixels(&candidate, real, &Thresholds::default(), &mut decision);
        decision
    };
    // A change of the source's texture with the source's brightness along the rim.
    let mut noisy = source.clone();
    let mut random = rng(9);
    noisy.iter_mut().for_each(|value| *value = value.saturating_add(random.random_range(0..4)));
    let good = decision_of(&noisy, &real);
    assert!(good.reasons.is_empty(), "{}", good.reason());
    assert_eq!(
        good.scores.keys().map(String::as_str).collect::<Vec<_>>(),
        ["clipped_more", "median", "repainted", "seam_jump", "seam_step", "spread"]
    );
    let failed = |decision: Decision, name: &str| {
        assert!(
            !decision.reasons.is_empty() && decision.reasons.iter().any(|r| r.starts_with(name)),
            "{name}: {}",
            decision.reason()
        );
    };
    failed(decision_of(&RgbImage::from_pixel(160, 120, Rgb([255; 3])), &real), "clipped_more");
    let tinted = RgbImage::from_fn(160, 120, |x, y| Rgb(source.get_pixel(x, y).0.map(|v| v.saturating_add(60))));
    failed(decision_of(&tinted, &real), "seam_jump");
    let bright = RealStatistics { median: ValueSpread::of(&[0.9, 0.91, 0.92, 0.93]), ..real.clone() };
    failed(decision_of(&noisy, &bright), "median");
    let mut blank = Decision::default();
    let flat = RgbImage::from_pixel(160, 120, Rgb([100; 3]));
    let candidate = TestedPair { source: &source, result: &flat, mask: &mask, inpaint_mask: None };
    test_pixels(&candidate, &real, &Thresholds::default(), &mut blank);
    failed(blank, "spread");
}

#[test]
fn a_pair_without_repainted_pixels_is_rejected() {
    let image = tissue(3, 0);
    let whole = InpaintMask { preserved: GrayImage::from_pixel(160, 120, Luma([255])), ..inpaint_mask(1) };
    let mask = label();
    let candidate = TestedPair { source: &image, result: &image, mask: &mask, inpaint_mask: Some(&whole) };
    let mut decision = Decision::default();
    test_pixels(&candidate, &real(), &Thresholds::default(), &mut decision);
    assert!(decision.reason().starts_with("repainted 0.0000 is below"), "{}", decision.reason());
}
