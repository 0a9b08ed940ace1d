use image::{GrayImage, Luma, Rgb, RgbImage};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

fn noise(width: u32, height: u32, seed: u64) -> RgbImage {
    let mut rng = rng(seed);
    RgbImage::from_fn(width, height, |_, _| Rgb(rng.random()))
}

fn mask(width: u32, height: u32, is_set: impl Fn(u32, u32) -> bool) -> GrayImage {
    GrayImage::from_fn(width, height, |x, y| Luma([if is_set(x, y) { 255 } else { 0 }]))
}

/// Odd sizes, with masks that are tiny, thin, at the border, scattered or everywhere.
fn cases() -> Vec<(&'static str, GrayImage)> {
    vec![
        ("one pixel", mask(131, 97, |x, y| (x, y) == (60, 40))),
        ("a corner pixel", mask(131, 97, |x, y| (x, y) == (130, 96))),
        ("a line", mask(97, 131, |x, y| x == 50 && (10..100).contains(&y))),
        ("a diagonal", mask(200, 123, |x, y| x == y)),
        ("the border", mask(255, 180, |x, _| x < 20)),
        ("the frame", mask(90, 90, |x, y| x == 0 || y == 0 || x == 89 || y == 89)),
        ("a disc", mask(333, 257, |x, y| x.abs_diff(150).pow(2) + y.abs_diff(130).pow(2) < 900)),
        ("two", mask(300, 300, |x, y| (x < 40 && y < 30) || (x > 250 && y > 270))),
        ("all", mask(65, 33, |_, _| true)),
        ("none", mask(65, 33, |_, _| false)),
    ]
}

#[test]
fn label_pixels_are_preserved_bit_for_bit_and_the_ramp_lies_outside() {
    for (name, label) in cases() {
        let (width, height) = label.dimensions();
        let (original, generated) = (noise(width, height, 1), noise(width, height, 2));
        for seed in 0..4 {
            let frame = SquareFrame::new((width, height), 256).unwrap();
            let inpaint_mask = InpaintMask::draw(&label, None, &frame, &mut rng(seed)).unwrap();
            assert_eq!(inpaint_mask.label, label, "{name}");
            assert!(inpaint_mask.ramp_px <= inpaint_mask.rim_px, "{name}");
            let pasted = paste_exact(&original, &generated, &inpaint_mask).unwrap();
            let depths = squared_distances(&inpaint_mask.preserved, false);
            for (at, (x, y, preserved)) in inpaint_mask.preserved.enumerate_pixels().enumerate() {
                let (before, after) = (original.get_pixel(x, y), pasted.get_pixel(x, y));
                if label.get_pixel(x, y)[0] > 0 {
                    assert_eq!(before, after, "{name}: label at {x},{y}");
                    let weight = paste::original_weight(depths[at], inpaint_mask.ramp_px);
                    assert_eq!(weight, 1.0, "{name}: the ramp reaches the label at {x},{y}");
                }
                if depths[at] != u32::MAX && f64::from(depths[at]).sqrt() >= inpaint_mask.ramp_px {
                    assert_eq!(before, after, "{name}: core at {x},{y}");
                }
                if preserved[0] == 0 {
                    assert_eq!(generated.get_pixel(x, y), after, "{name}: repainted at {x},{y}");
                }
            }
        }
    }
}

#[test]
fn the_ramp_is_half_a_cosine_wave() {
    let weights: Vec<f64> = [0, 1, 4, 9, 16, 25].map(|squared| paste::original_weight(squared, 4.0)).to_vec();
    assert_eq!((weights[0], weights[4], weights[5]), (0.0, 1.0, 1.0));
    assert!((weights[2] - 0.5).abs() < 1e-12);
    assert!((weights[1] + weights[3] - 1.0).abs() < 1e-12, "symmetric");
}

#[test]
fn decoys_are_far_from_the_label_and_leave_enough_to_repaint() {
    let mut drawn = std::collections::BTreeMap::new();
    for (name, label) in cases() {
        let frame = SquareFrame::new(label.dimensions(), 256).unwrap();
        let distances = squared_distances(&label, true);
        for seed in 0..8 {
            let inpaint_mask = InpaintMask::draw(&label, None, &frame, &mut rng(seed)).unwrap();
            *drawn.entry(name).or_insert(0) += inpaint_mask.decoys.len();
            let mut covered = dilate(&label, inpaint_mask.rim_px);
            assert!(
                covered.iter().zip(inpaint_mask.preserved.iter()).all(|(rim, preserved)| rim <= preserved),
                "{name}: the rim is preserved"
            );
            for (at, (x, y, preserved)) in inpaint_mask.preserved.enumerate_pixels().enumerate() {
                let boxed = inpaint_mask
                    .decoys
                    .iter()
                    .any(|b| (b.left..=b.right).contains(&x) && (b.top..=b.bottom).contains(&y));
                if preserved[0] > 0 && covered.get_pixel(x, y)[0] == 0 {
                    assert!(boxed, "{name}: preserved at {x},{y} for no reason");
                    assert!(
                        f64::from(distances[at]).sqrt() > inpaint_mask.rim_px + inpaint_mask.ramp_px,
                        "{name}: too near"
                    );
                    covered.put_pixel(x, y, Luma([255]));
                }
            }
            if !inpaint_mask.decoys.is_empty() {
                assert!(inpaint_mask.repaint_frac() >= REPAINT_MIN_FRAC, "{name}");
            }
        }
    }
    for name in ["one pixel", "a disc", "two", "a line"] {
        assert!(drawn[name] >= 2, "{name}: {drawn:?}");
    }
    assert_eq!((drawn["all"], drawn["none"]), (0, 0));
}

#[test]
fn decoys_stay_in_the_field_of_view() {
    let label = mask(200, 200, |x, y| x.abs_diff(100) < 8 && y.abs_diff(100) < 8);
    let field = mask(200, 200, |x, y| x.abs_diff(100).pow(2) + y.abs_diff(100).pow(2) < 80 * 80);
    let frame = SquareFrame::new((200, 200), 256).unwrap();
    let mut decoys = 0;
    for seed in 0..20 {
        let inpaint_mask = InpaintMask::draw(&label, Some(&field), &frame, &mut rng(seed)).unwrap();
        let rim = dilate(&label, inpaint_mask.rim_px);
        decoys += inpaint_mask.decoys.len();
        for ((preserved, rim), field) in inpaint_mask.preserved.iter().zip(rim.iter()).zip(field.iter()) {
            assert!(*preserved == 0 || *rim > 0 || *field > 0);
        }
    }
    assert!(decoys > 5, "{decoys}");
}

#[test]
fn rim_width_follows_its_limits_and_the_seed() {
    let label = mask(400, 300, |x, y| x.abs_diff(200).pow(2) + y.abs_diff(150).pow(2) <= 60 * 60);
    let frame = SquareFrame::new((400, 300), 800).unwrap();
    let widths: Vec<f64> = (0..40)
        .map(|seed| {
            let draw = || InpaintMask::draw(&label, None, &frame, &mut rng(seed)).unwrap();
            assert_eq!(draw(), draw());
            draw().rim_px
        })
        .collect();
    let (least, most) = widths.iter().fold((f64::MAX, 0.0_f64), |(a, b), &w| (a.min(w), b.max(w)));
    // A tenth of a diameter of 120 pixels; 64 model pixels of half a pixel each.
    assert!((11.9..13.5).contains(&least) && (28.0..=32.0).contains(&most), "{least} {most}");
}

#[test]
fn latent_cells_of_preserved_pixels_and_their_neighbours_are_preserved() {
    // 64 pixels in a square of 64: pixel 20,33 lies in cell 2,4.
    let label = mask(64, 64, |x, y| (x, y) == (20, 33));
    let frame = SquareFrame::new((64, 64), 64).unwrap();
    let inpaint_mask = InpaintMask {
        preserved: label.clone(),
        label,
        decoys: Vec::new(),
        rim_px: 1.0,
        ramp_px: 1.0,
        side: Side::Preserved,
        target: None,
    };
    let cells = inpaint_mask.latent_mask(&frame).unwrap();
    for (at, &cell) in cells.iter().enumerate() {
        let near = (1..=3).contains(&(at % 8)) && (3..=5).contains(&(at / 8));
        assert_eq!(cell, if near { 0.0 } else { 1.0 }, "{at}");
    }
    let all_but_the_pixel = mask(64, 64, |x, y| (x, y) != (20, 33));
    let repainted = InpaintMask { preserved: all_but_the_pixel, side: Side::Repainted, ..inpaint_mask };
    let cells = repainted.latent_mask(&frame).unwrap();
    assert_eq!(cells.iter().sum::<f32>(), 1.0);
    assert_eq!(cells[4 * 8 + 2], 1.0);
}

#[test]
fn a_thin_label_of_a_large_image_is_preserved_in_the_latents() {
    let label = mask(1000, 600, |x, _| x == 501);
    let frame = SquareFrame::new((1000, 600), 64).unwrap();
    assert!(frame.mask_to_model(&label).unwrap().iter().all(|&value| value == 0), "the nearest pixel misses it");
    let inpaint_mask = InpaintMask {
        preserved: label.clone(),
        label,
        decoys: vec![],
        rim_px: 1.0,
        ramp_px: 1.0,
        side: Side::Preserved,
        target: None,
    };
    let cells = inpaint_mask.latent_mask(&frame).unwrap();
    // 501 * 0.064 = 32.06: column 4 of 8; rows 13..51 are the image's.
    for row in 1..=6 {
        assert_eq!(cells[row * 8..][..8], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0], "row {row}");
    }
}

#[test]
fn around_repaints_the_lesion_and_a_margin_only() {
    let source_mask = mask(128, 128, |x, y| x.abs_diff(50) < 5 && y.abs_diff(60) < 4);
    let frame = SquareFrame::new((128, 128), 128).unwrap();
    let inpaint_mask = InpaintMask::around(&source_mask, &frame, &mut rng(3)).unwrap();
    let distances = squared_distances(&source_mask, true);
    for (at, &preserved) in inpaint_mask.preserved.iter().enumerate() {
        assert_eq!(preserved == 0, distance::is_within(distances[at], inpaint_mask.rim_px));
    }
    assert!((8.0..=16.0).contains(&inpaint_mask.rim_px));
    let (original, generated) = (noise(128, 128, 1), noise(128, 128, 2));
    let pasted = paste_exact(&original, &generated, &inpaint_mask).unwrap();
    assert_eq!(pasted.get_pixel(50, 60), generated.get_pixel(50, 60));
    assert_eq!(pasted.get_pixel(100, 100), original.get_pixel(100, 100));
    assert_eq!(inpaint_mask.latent_mask(&frame).unwrap()[(60 / 8) * 16 + 50 / 8], 1.0);
}

/// The label of a new lesion is exactly where pixels changed: nothing outside changes, and inside the new pixels fade into
/// the source's at the border only.
#[test]
fn a_new_lesion_changes_no_pixel_outside_its_mask() {
    let near = |x: u32, y: u32, (u, v): (u32, u32), r: u32| x.abs_diff(u).pow(2) + y.abs_diff(v).pow(2) < r * r;
    let masks: [(&str, GrayImage, u32); 8] = [
        ("a disc", mask(131, 97, |x, y| near(x, y, (50, 40), 12)), 128),
        ("a large image", mask(700, 500, |x, y| near(x, y, (300, 250), 90)), 128),
        ("two spots", mask(131, 97, |x, y| near(x, y, (30, 40), 9) || near(x, y, (44, 40), 4)), 128),
        ("a line of one pixel", mask(131, 97, |x, _| x == 60), 256),
        ("one pixel", mask(131, 97, |x, y| (x, y) == (7, 90)), 128),
        ("at the edge", mask(131, 97, |x, y| x < 20 && y > 80), 128),
        ("everything", mask(40, 30, |_, _| true), 64),
        ("nothing", mask(40, 30, |_, _| false), 64),
    ];
    for (what, source_mask, side) in masks {
        let (width, height) = source_mask.dimensions();
        let frame = SquareFrame::new((width, height), side).unwrap();
        let depths = squared_distances(&source_mask, false);
        for seed in 0..4 {
            let inpaint_mask = InpaintMask::around(&source_mask, &frame, &mut rng(seed)).unwrap();
            let (original, generated) = (noise(width, height, 1), noise(width, height, 2));
            let pasted = paste_exact(&original, &generated, &inpaint_mask).unwrap();
            let (mut whole, mut inside) = (0, 0);
            for (at, ((pasted, original), generated)) in
                pasted.pixels().zip(original.pixels()).zip(generated.pixels()).enumerate()
            {
                if source_mask.as_raw()[at] == 0 {
                    assert_eq!(pasted, original, "{what}: pixel {at} is outside");
                } else {
                    inside += 1;
                    if f64::from(depths[at]).sqrt() >= inpaint_mask.ramp_px {
                        assert_eq!(pasted, generated, "{what}: pixel {at} is inside");
                        whole += 1;
                    }
                }
            }
            assert!(2 * whole >= inside, "{what}: only {whole} of {inside} pixels are new");
        }
    }
}

#[test]
fn a_framed_image_is_recovered_within_a_pixel() {
    for (width, height, side) in [(333, 257, 512), (257, 333, 512), (900, 311, 256), (64, 64, 64), (31, 200, 128)] {
        let frame = SquareFrame::new((width, height), side).unwrap();
        assert_eq!(frame.inner.0.max(frame.inner.1), side);
        // A smooth spot: its centre must not move, its shape must not change.
        let spot = |scale: f64, dx: f64, dy: f64| {
            move |x: u32, y: u32| {
                let (u, v) = ((f64::from(x) + 0.5 - dx) * scale, (f64::from(y) + 0.5 - dy) * scale);
                let (u, v) = (u / f64::from(width) - 0.37, v / f64::from(height) - 0.61);
                let level = 220.0 * (-40.0 * (u * u + v * v)).exp();
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=220")]
                Rgb([level.round() as u8; 3])
            }
        };
        let image = RgbImage::from_fn(width, height, spot(1.0, 0.0, 0.0));
        let square = frame.to_model(&image).unwrap();
        let (left, top) = (f64::from(frame.offset.0), f64::from(frame.offset.1));
        let expected = RgbImage::from_fn(side, side, spot(frame.pixels_per_model_pixel(), left, top));
        let inside = |x: u32, y: u32| {
            (frame.offset.0..frame.offset.0 + frame.inner.0).contains(&x)
                && (frame.offset.1..frame.offset.1 + frame.inner.1).contains(&y)
        };
        let worst = |a: &RgbImage, b: &RgbImage, counts: &dyn Fn(u32, u32) -> bool| {
            a.enumerate_pixels()
                .filter(|(x, y, _)| counts(*x, *y))
                .map(|(x, y, p)| p[0].abs_diff(b.get_pixel(x, y)[0]))
                .max()
        };
        assert!(worst(&square, &expected, &inside).unwrap() <= 8, "{width}x{height} in {side}");
        let back = frame.to_image(&square).unwrap();
        assert!(worst(&back, &image, &|_, _| true).unwrap() <= 6, "{width}x{height} in {side}");

        let label = mask(width, height, |x, y| x < width / 2 && y < height / 3);
        let framed = frame.mask_to_model(&label).unwrap();
        let region = crate::data::position::whole(&framed).unwrap().bounds;
        let scale = frame.pixels_per_model_pixel();
        assert_eq!((region.left, region.top), frame.offset, "{width}x{height} in {side}");
        let right = f64::from(width / 2) / scale + left - 1.0;
        let bottom = f64::from(height / 3) / scale + top - 1.0;
        assert!((f64::from(region.right) - right).abs() <= 1.0, "{width}x{height} in {side}");
        assert!((f64::from(region.bottom) - bottom).abs() <= 1.0, "{width}x{height} in {side}");
    }
}

#[test]
fn padding_repeats_the_edge() {
    let image = RgbImage::from_fn(40, 20, |_, y| Rgb(if y == 0 { [200, 0, 0] } else { [0, 90, 0] }));
    let frame = SquareFrame::new((40, 20), 40).unwrap();
    let square = frame.to_model(&image).unwrap();
    assert_eq!(frame.offset, (0, 10));
    assert!((0..=10).all(|y| *square.get_pixel(7, y) == Rgb([200, 0, 0])));
    assert!((11..40).all(|y| *square.get_pixel(7, y) == Rgb([0, 90, 0])));
    assert_eq!(frame.to_image(&square).unwrap(), image, "no scaling, no change");
}

#[test]
fn grey_images_stay_grey() {
    let label = mask(81, 60, |x, y| x.abs_diff(40) < 6 && y.abs_diff(30) < 6);
    let frame = SquareFrame::new((81, 60), 128).unwrap();
    let inpaint_mask = InpaintMask::draw(&label, None, &frame, &mut rng(5)).unwrap();
    let mut original = noise(81, 60, 7);
    original.pixels_mut().for_each(|pixel| pixel.0 = [pixel.0[0]; 3]);
    let generated = noise(81, 60, 8);
    assert!(is_grey(&original) && !is_grey(&generated));
    for pasted in [paste_exact(&original, &generated, &inpaint_mask).unwrap(), paste_vae(&original, &generated)] {
        assert!(is_grey(&pasted));
    }
    assert_eq!(paste_vae(&generated, &original), original);
    let mixed = paste_vae(&original, &RgbImage::from_pixel(81, 60, Rgb([10, 20, 32])));
    assert_eq!(mixed.get_pixel(3, 3), &Rgb([21; 3]));
}

#[test]
fn colours_are_matched_on_the_rim_only() {
    let label = mask(100, 100, |x, y| x.abs_diff(50) < 15 && y.abs_diff(50) < 15);
    let frame = SquareFrame::new((100, 100), 128).unwrap();
    let inpaint_mask = InpaintMask::draw(&label, None, &frame, &mut rng(5)).unwrap();
    let original = RgbImage::from_fn(100, 100, |x, y| {
        let value = u8::try_from(60 + x / 2 + y).unwrap();
        Rgb([value, value / 2, 200 - value / 2])
    });
    let (gain, offset) = ([1.1, 0.9, 1.0], [-7.0, 12.0, 5.0]);
    // The label shows another colour in the generated image: it must not count.
    let mut generated = original.clone();
    for (pixel, label) in generated.pixels_mut().zip(label.iter()) {
        for channel in 0..3 {
            let level = (f64::from(pixel.0[channel]) - offset[channel]) / gain[channel];
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within 0..=255")]
            let tinted = level.round() as u8;
            pixel.0[channel] = if *label > 0 { 255 } else { tinted };
        }
    }
    let fitted = ColourMatch::fit(&original, &generated, &inpaint_mask).unwrap();
    for channel in 0..3 {
        assert!((fitted.gain[channel] - gain[channel]).abs() < 0.02, "{fitted:?}");
        assert!((fitted.offset[channel] - offset[channel]).abs() < 2.0, "{fitted:?}");
    }
    let matched = fitted.apply(&generated);
    for ((a, b), label) in matched.pixels().zip(original.pixels()).zip(label.iter()) {
        assert!(*label > 0 || (0..3).all(|channel| a[channel].abs_diff(b[channel]) <= 2));
    }
    // Without a rim there is no fit; a large difference is clamped.
    let all = InpaintMask { preserved: label.clone(), ..inpaint_mask.clone() };
    assert_eq!(ColourMatch::fit(&original, &generated, &all).unwrap(), ColourMatch::IDENTITY);
    let wild = ColourMatch::fit(&original, &noise(100, 100, 3), &inpaint_mask).unwrap();
    assert!(wild.gain.iter().all(|gain| (0.75..=1.34).contains(gain)), "{wild:?}");
}

#[test]
fn sizes_are_checked() {
    assert!(SquareFrame::new((0, 5), 64).is_err());
    let fine = SquareFrame { cell: 4, ..SquareFrame::new((64, 64), 64).unwrap() };
    assert_eq!(fine.cells(), 16);
    let mut mask = GrayImage::new(64, 64);
    mask.put_pixel(13, 6, image::Luma([255]));
    let touched = fine.touched_cells(&mask, true);
    assert_eq!((0..256).filter(|&cell| touched[cell]).collect::<Vec<_>>(), [16 + 3], "row 1, column 3");
    assert!(SquareFrame::new((5, 5), 63).is_err());
    let frame = SquareFrame::new((5, 6), 64).unwrap();
    let error = InpaintMask::draw(&GrayImage::new(6, 5), None, &frame, &mut rng(0)).unwrap_err();
    assert_eq!(error.to_string(), "the label is 6x5, the image 5x6");
    let inpaint_mask = InpaintMask::draw(&GrayImage::new(5, 6), None, &frame, &mut rng(0)).unwrap();
    assert!(paste_exact(&noise(5, 6, 0), &noise(6, 5, 0), &inpaint_mask).is_err());
}
