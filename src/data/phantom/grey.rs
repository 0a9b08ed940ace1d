//! Grey phantoms: CT, MRI, X-ray and ultrasound.

use rand_chacha::ChaCha8Rng;

use super::canvas::{Canvas, Oval, RandomDraw, bump, grain, mix, noise, smooth};
use super::lesion::Lesion;

/// Width of a lesion's blurred edge.
pub(super) const EDGE: f32 = 0.018;

/// How much the tissue's texture changes the level of a lesion.
pub(super) const LESION_TEXTURE: f32 = 0.05;

/// Draws textured lesions over `plane`, with level `bright` or `dark`.
fn lay_lesions(plane: &mut Canvas, lesions: &[&Lesion], bright: f32, dark: f32, texture: &Canvas) {
    for lesion in lesions {
        let level = if lesion.brighter { bright } else { dark };
        let at = (lesion.oval.x, lesion.oval.y);
        plane.paint_near(at, lesion.reach(EDGE), |x, y, i, old| {
            mix(old, level + LESION_TEXTURE * texture.values[i], lesion.cover(x, y, EDGE))
        });
    }
}

/// An axial abdominal slice in a soft-tissue window: body wall, liver, spleen, kidneys, spine, ribs, bowel.
pub(super) fn abdomen_ct(lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
    let (mut plane, tissue) = abdomen(size, rng);
    lay_lesions(&mut plane, lesions, ABDOMEN_LESION, 0.06, &tissue);
    add_ct_noise(&mut plane, rng);
    vec![plane]
}

/// Level of a bright lesion of the abdomen.
pub(super) const ABDOMEN_LESION: f32 = 0.84;

/// The area of an abdomen where lesions may be placed.
pub(super) const IN_ABDOMEN: Oval = Oval::new(0.5, 0.5, 0.47, 0.45).power(2.6);

/// The anatomy of an abdominal slice without noise, and the texture of its tissue.
pub(super) fn abdomen(size: usize, rng: &mut impl RandomDraw) -> (Canvas, Canvas) {
    let mut plane = Canvas::filled(size, 0.02);
    let body = Oval::new(0.5, 0.5, rng.vary(0.475, 0.495), rng.vary(0.455, 0.48)).power(2.6);
    plane.lay(&body, 0.40, 0.01);
    plane.lay(&body.scaled(0.985), 0.20, 0.01);
    plane.lay(&body.scaled(rng.vary(0.90, 0.95)), 0.44, 0.012);
    plane.lay(&body.scaled(0.84), 0.24, 0.03);
    for rib in 0_u8..12 {
        let angle = f32::from(rib) / 12.0 * std::f32::consts::TAU + rng.vary(-0.15, 0.15);
        let (x, y) = (0.5 + body.rx * 0.89 * angle.cos(), 0.5 + body.ry * 0.89 * angle.sin());
        if angle.sin() > -0.75 {
            plane.lay(&Oval::new(x, y, 0.024, 0.010).rotated(angle + 1.57), 0.95, 0.008);
        }
    }
    for _ in 0..9 {
        let loop_ = Oval::new(rng.vary(0.25, 0.75), rng.vary(0.28, 0.72), rng.vary(0.03, 0.06), rng.vary(0.025, 0.045));
        plane.lay(&loop_, rng.vary(0.40, 0.50), 0.015);
        if rng.vary(0.0, 1.0) > 0.6 {
            plane.lay(&loop_.scaled(0.5), 0.05, 0.01);
        }
    }
    plane.lay(&Oval::new(0.33, 0.40, 0.20, 0.23).rotated(0.4).perturbed(0.08, rng), 0.54, 0.015);
    plane.lay(&Oval::new(0.73, 0.42, 0.09, 0.14).rotated(-0.4).perturbed(0.08, rng), 0.57, 0.012);
    for x in [0.31, 0.69] {
        let kidney = Oval::new(x, 0.66, 0.07, 0.09).rotated((x - 0.5) * 2.0).perturbed(0.08, rng);
        plane.lay(&kidney, 0.62, 0.012);
        plane.lay(&kidney.scaled(0.4), 0.45, 0.02);
    }
    plane.lay(&Oval::new(0.53, 0.58, 0.03, 0.03).perturbed(0.15, rng), 0.64, 0.01);
    let spine = Oval::new(0.5, 0.72, 0.072, 0.058).perturbed(0.06, rng);
    plane.lay(&spine, 0.97, 0.008);
    plane.lay(&spine.scaled(0.8), 0.70, 0.01);
    plane.lay(&Oval::new(0.5, 0.80, 0.022, 0.018), 0.42, 0.01);
    plane.lay(&Oval::new(0.5, 0.85, 0.012, 0.035), 0.95, 0.008);
    let tissue = noise(size, (14.0, 14.0), 3, rng);
    plane.paint(|_, _, i, old| if old > 0.1 { old + 0.03 * tissue.values[i] } else { old });
    (plane, tissue)
}

/// Adds the noise of a CT image.
pub(super) fn add_ct_noise(plane: &mut Canvas, rng: &mut ChaCha8Rng) {
    let specks = grain(plane.size, rng);
    let streaks = noise(plane.size, (70.0, 70.0), 1, rng);
    plane.paint(|_, _, i, old| old + 0.022 * specks.values[i] + 0.03 * streaks.values[i]);
}

/// An axial brain slice, FLAIR-like: scalp, skull, folded cortex, white matter, dark ventricles, coil shading.
pub(super) fn brain_mri(lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
    let mut plane = Canvas::filled(size, 0.01);
    let head = Oval::new(0.5, 0.5, rng.vary(0.465, 0.48), rng.vary(0.48, 0.495)).power(2.2);
    plane.lay(&head, 0.62, 0.01);
    plane.lay(&head.scaled(0.955), 0.06, 0.012);
    let brain = head.scaled(0.91);
    let folds = noise(size, (13.0, 13.0), 2, rng);
    let warp = noise(size, (5.0, 5.0), 2, rng);
    plane.paint(|x, y, i, old| {
        let depth = brain.depth(x, y) + 0.10 * warp.values[i];
        let grey_matter = mix(0.36, 0.50, smooth(0.66, 0.80, depth));
        // Sulci: thin dark lines where the folding noise changes sign, close to the surface only.
        let sulcus = bump(0.0, 0.11, folds.values[i]) * smooth(0.62, 0.80, depth);
        mix(old, grey_matter * (1.0 - 0.65 * sulcus), brain.cover(x, y, 0.012))
    });
    let tilt = rng.vary(-0.06, 0.06);
    plane.paint(|x, y, _, old| {
        let line = bump(0.5 + tilt * (y - 0.5), 0.008, x) * smooth(0.10, 0.16, brain.depth(0.5, y));
        mix(old, 0.10, 0.8 * line * brain.cover(x, y, 0.01))
    });
    for side in [-1.0_f32, 1.0] {
        let front = Oval::new(0.5 + 0.042 * side, 0.43, 0.020, 0.085).rotated(-0.28 * side).perturbed(0.12, rng);
        plane.lay(&front, 0.07, 0.014);
        let back = Oval::new(0.5 + 0.062 * side, 0.58, 0.020, 0.070).rotated(0.45 * side).perturbed(0.12, rng);
        plane.lay(&back, 0.07, 0.014);
        plane.lay(&Oval::new(0.5 + 0.11 * side, 0.48, 0.035, 0.06).perturbed(0.1, rng), 0.46, 0.03);
    }
    let tissue = noise(size, (18.0, 18.0), 2, rng);
    plane.paint(|_, _, i, old| if old > 0.2 { old + 0.025 * tissue.values[i] } else { old });
    lay_lesions(&mut plane, lesions, 0.88, 0.05, &tissue);
    let bias = noise(size, (1.3, 1.3), 1, rng);
    let (real, imaginary) = (grain(size, rng), grain(size, rng));
    plane.paint(|_, _, i, old| {
        // Magnitude images carry Rician noise.
        let signal = old * (1.0 + 0.18 * bias.values[i]);
        (signal + 0.022 * real.values[i]).hypot(0.022 * imaginary.values[i])
    });
    vec![plane]
}

/// A frontal chest X-ray: dark lungs under ribs, heart, diaphragm, clavicles.
pub(super) fn lung_xray(lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
    let cloud = noise(size, (4.0, 4.0), 3, rng);
    let mut plane = Canvas::filled(size, 0.44);
    plane.paint(|x, y, i, old| {
        let outside = smooth(0.42, 0.52, (x - 0.5).abs()) * smooth(0.10, 0.35, y);
        mix(old, 0.22, 0.6 * outside) + 0.04 * cloud.values[i]
    });
    let lungs = [
        Oval::new(0.29, 0.47, 0.165, 0.34).rotated(0.12).power(2.4).perturbed(0.04, rng),
        Oval::new(0.71, 0.47, 0.160, 0.34).rotated(-0.12).power(2.4).perturbed(0.04, rng),
    ];
    for lung in &lungs {
        plane.lay(lung, 0.14, 0.05);
    }
    let vessels = noise(size, (16.0, 22.0), 3, rng);
    plane.paint(|x, y, i, old| {
        let inside = lungs.iter().map(|lung| lung.cover(x, y, 0.05)).fold(0.0, f32::max);
        let hilum = bump(0.5, 0.32, x) * bump(0.48, 0.35, y);
        old + inside * (0.05 * vessels.values[i] + 0.10 * hilum * smooth(0.0, 0.4, vessels.values[i]))
    });
    plane.lay(&Oval::new(0.57, 0.64, 0.14, 0.14).rotated(0.5).perturbed(0.08, rng), 0.50, 0.03);
    plane.lay(&Oval::new(0.5, 0.40, 0.055, 0.42), 0.50, 0.04);
    let dome = rng.vary(0.80, 0.85);
    plane.paint(|x, y, _, old| {
        let side = if x < 0.5 { x - 0.28 } else { x - 0.72 };
        let edge = dome + 0.9 * side * side - if x < 0.5 { 0.02 } else { 0.0 };
        mix(old, 0.54, smooth(edge - 0.02, edge + 0.03, y))
    });
    let (first, gap) = (rng.vary(0.10, 0.14), rng.vary(0.082, 0.095));
    plane.paint(|x, y, _, old| {
        let away = (x - 0.5).abs();
        let mut ribs = 0.0_f32;
        for rib in 0_u8..9 {
            let back = first + gap * f32::from(rib) + 0.75 * (away - 0.20) * (away - 0.20);
            let front = back + 0.10 - 0.5 * (away - 0.05);
            ribs = ribs.max(bump(back, 0.020, y)).max(0.5 * bump(front, 0.016, y) * smooth(0.12, 0.2, away));
        }
        let cage = smooth(0.055, 0.10, away) * (1.0 - smooth(0.42, 0.47, away)) * (1.0 - smooth(0.80, 0.88, y));
        let clavicle = bump(0.13 - 0.25 * (away - 0.2), 0.018, y) * smooth(0.05, 0.08, away);
        let vertebrae = bump(0.5, 0.05, x) * 0.04 * (y * 90.0).sin();
        old + 0.11 * ribs * cage + 0.15 * clavicle + vertebrae
    });
    for lesion in lesions {
        plane.paint(|x, y, i, old| old + (0.40 + 0.05 * cloud.values[i]) * lesion.cover(x, y, EDGE * 1.5));
    }
    let specks = grain(size, rng);
    plane.paint(|_, _, i, old| old.min(0.97) + 0.018 * specks.values[i]);
    vec![plane]
}

/// A linear-probe breast ultrasound: skin, fat, gland, muscle, speckle, shadows, echo-poor lesions.
pub(super) fn breast_ultrasound(lesions: &[&Lesion], size: usize, rng: &mut ChaCha8Rng) -> Vec<Canvas> {
    let waves = noise(size, (3.0, 2.0), 2, rng);
    let tissue = noise(size, (7.0, 16.0), 3, rng);
    let mut plane = Canvas::filled(size, 0.0);
    let (fat, muscle) = (rng.vary(0.16, 0.28), rng.vary(0.72, 0.85));
    plane.paint(|_, y, i, _| {
        let depth = y + 0.06 * waves.values[i];
        let mut level = mix(0.36, 0.54, smooth(fat - 0.03, fat + 0.05, depth));
        level = mix(level, 0.40 + 0.10 * (depth * 130.0).sin(), smooth(muscle - 0.02, muscle + 0.04, depth));
        level = mix(0.75, level, smooth(0.03, 0.05, y));
        level + 0.14 * tissue.values[i] + 0.25 * bump(muscle, 0.012, depth)
    });
    for _ in 0..2 {
        let (x, width) = (rng.vary(0.0, 1.0), rng.vary(0.03, 0.07));
        plane.paint(|u, y, _, old| old * (1.0 - 0.22 * bump(x + 0.05 * (y - 0.5), width, u) * smooth(0.2, 0.5, y)));
    }
    for lesion in lesions {
        let oval = lesion.oval;
        let gain = if lesion.brighter { -0.30 } else { 0.40 };
        plane.paint(|x, y, _, old| {
            // Behind a lesion the beam is stronger (echo-poor) or weaker (echo-rich).
            let behind = bump(oval.x, oval.rx, x) * smooth(oval.y, oval.y + 0.5 * oval.ry, y);
            let fade = 1.0 - smooth(oval.y + oval.ry, oval.y + 3.0 * oval.ry, y);
            old * (1.0 + gain * behind * fade)
        });
    }
    lay_lesions(&mut plane, lesions, 0.88, 0.07, &tissue);
    let (coarse, fine) = (noise(size, (60.0, 95.0), 1, rng), grain(size, rng));
    plane.paint(|x, y, i, old| {
        let speckle = 1.0 + 0.55 * coarse.values[i] + 0.16 * fine.values[i];
        let sides = 1.0 - 0.25 * smooth(0.40, 0.5, (x - 0.5).abs());
        old.max(0.0) * speckle * sides * (1.0 - 0.22 * y) + 0.012
    });
    vec![plane]
}
