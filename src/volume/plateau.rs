//! Probabilities and thin labels in place of masks: files without a level that is the target's.

use super::foreground::{NOISE, SMALL};

/// With more levels than this in the upper half, an 8-bit file is no mask of at most half of the range.
const MANY: usize = 64;
/// Fewer pixels of one level are chance.
const FEW: usize = 4;

/// Whether no level of a file is that of a target: many levels are above half of the largest one, and none is frequent.
///
/// In a mask with soft borders most of the pixels above half have the level of the target, in enlarged masks and after JPEG
/// compression at least two fifths. In probabilities, which rise to a peak, the levels are about equally frequent, and so
/// they are in a label map.
pub(super) fn has_none<T: Copy + Into<u16>>(values: &[T]) -> bool {
    let most: usize = values.iter().map(|&value| value.into()).max().map_or(0, usize::from);
    if most < SMALL {
        return false;
    }
    let mut counts = vec![0_usize; most + 1];
    for &value in values {
        counts[usize::from(value.into())] += 1;
    }
    let upper = &counts[most / 2 + 1..];
    let num_levels = upper.iter().filter(|count| **count > 0).count();
    let num_pixels: usize = upper.iter().sum();
    let largest = upper.iter().copied().max().unwrap_or(0);
    // the share of a level where all are equally frequent, three times; a peak has few pixels at its top
    let least = if num_levels > MANY { 0.5 } else { f64::max(1.0 / 16.0, 6.0 / most as f64) };
    num_levels >= NOISE && (largest < FEW || (largest as f64) < least * num_pixels as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_and_thin_layers_have_no_level_of_a_target_and_soft_boxes_have_one() {
        for most in [20_u16, 60, 100, 255, 1310, 30_000, 65_535] {
            let at = |x: u32, y: u32| (f64::from(x) - 50.0).hypot(f64::from(y) - 40.0);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=65535")]
            let level = |part: f64| (part * f64::from(most)).round() as u16;
            let image = |of: &dyn Fn(u32, u32) -> u16| -> Vec<u16> {
                (0..80).flat_map(|y| (0..100).map(move |x| (x, y))).map(|(x, y)| of(x, y)).collect()
            };
            let peak = image(&|x, y| level((-at(x, y).powi(2) / 300.0).exp()));
            assert!(has_none(&peak), "a peak of {most}");
            // 2 pixels each
            let layers =
                image(&|_, y| if y < 2 * u32::from(most.min(40)) { u16::try_from(y / 2 + 1).unwrap() } else { 0 });
            assert!(has_none(&layers), "{} layers", most.min(40));
            for softness in [1.0, 2.0, 4.0] {
                let soft = image(&|x, y| level(((20.0 - at(x, y)) / softness + 0.5).clamp(0.0, 1.0)));
                assert!(!has_none(&soft), "a disc of {most} with a border of {softness} pixels");
            }
            assert!(!has_none(&image(&|x, y| level(f64::from(u8::from(x == y))))), "a line of {most}");
        }
        assert!(!has_none::<u8>(&[]) && !has_none(&[0_u8; 9]));
    }
}
