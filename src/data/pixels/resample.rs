//! Pillow's `Image.resize` for 8-bit planes, equal bit for bit. (Rows come first here; Pillow 13 starts with the
//! columns for some shapes, which changes some of its results by 1/255.)
//!
//! Source: Pillow `Resample.c`: antialiased convolution in two passes (rows, then columns) with 22-bit fixed-point
//! weights and 8-bit values between the passes. The crate `fast_image_resize` has 16-bit weights. Compared with
//! Pillow, 15 % of the pixels of a bicubic enlargement differed, and 0.9 % by more than 1/255, so it is not used
//! here.

/// A convolution filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Triangle, `Image.Resampling.BILINEAR`.
    Bilinear,
    /// Catmull-Rom (a = -0.5), `Image.Resampling.BICUBIC`.
    Bicubic,
}

impl Filter {
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Self::Bilinear if x < 1.0 => 1.0 - x,
            Self::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

/// Fraction bits of a weight: 32 bits less 8 for the value and 2 for overshoot and sign.
const PRECISION: u32 = 22;

/// The weights of one output position: inputs `first..first + weights.len()`.
struct Tap {
    first: usize,
    weights: Vec<i32>,
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "image sides are exact in f64; Pillow truncates to int at the same places"
)]
fn taps(input: usize, output: usize, filter: Filter) -> Vec<Tap> {
    let scale = input as f64 / output as f64;
    let stretch = scale.max(1.0);
    let support = filter.support() * stretch;
    (0..output)
        .map(|position| {
            let centre = (position as f64 + 0.5) * scale;
            let first = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(input);
            let inverse = 1.0 / stretch;
            let weights: Vec<f64> =
                (first..end).map(|at| filter.weight((at as f64 - centre + 0.5) * inverse)).collect();
            let sum: f64 = weights.iter().sum();
            let sum = if sum == 0.0 { 1.0 } else { sum };
            let fixed = |weight: &f64| {
                let weight = weight / sum * f64::from(1_u32 << PRECISION);
                (if weight < 0.0 { weight - 0.5 } else { weight + 0.5 }) as i32
            };
            Tap { first, weights: weights.iter().map(fixed).collect() }
        })
        .collect()
}

fn saturated(sum: i32) -> u8 {
    u8::try_from((sum >> PRECISION).clamp(0, 255)).expect("clamped to a byte")
}

const HALF: i32 = 1 << (PRECISION - 1);

/// A plane of bytes, alone or inside a larger plane whose other bytes are `fill`. The larger plane is not built.
#[derive(Debug, Clone, Copy)]
pub struct Plane<'a> {
    /// `size.0 * size.1` bytes, row by row.
    pub bytes: &'a [u8],
    /// Width and height.
    pub size: (usize, usize),
    /// Width and height of the larger plane.
    pub outer: (usize, usize),
    /// Column and row of the first byte in the larger plane.
    pub offset: (usize, usize),
    /// The other bytes of the larger plane.
    pub fill: u8,
}

/// Resizes a plane of `width * height` bytes to `to.0 * to.1` (width, height); no side may be 0.
pub fn plane(bytes: &[u8], size: (usize, usize), to: (usize, usize), filter: Filter) -> Vec<u8> {
    padded(Plane { bytes, size, outer: size, offset: (0, 0), fill: 0 }, to, filter)
}

/// Resizes the larger plane of `from` to `to.0 * to.1` (width, height); no side may be 0.
///
/// Memory: the rows of `from.bytes` at the new width. The result equals that of a larger plane in memory.
pub fn padded(from: Plane<'_>, to: (usize, usize), filter: Filter) -> Vec<u8> {
    let Plane { bytes, size: (width, height), outer, offset, .. } = from;
    assert!(width > 0 && height > 0 && to.0 > 0 && to.1 > 0, "a side of 0 pixels");
    assert_eq!(bytes.len(), width * height, "a plane of {width}x{height}");
    let (rows, padding) = resize_rows(from, to.0, filter);
    if outer.1 == to.1 && height == to.1 {
        return rows;
    }
    let row = |at: usize| match at.checked_sub(offset.1) {
        Some(at) if at < height => &rows[at * to.0..(at + 1) * to.0],
        _ => padding.as_slice(),
    };
    if outer.1 == to.1 {
        return (0..to.1).flat_map(row).copied().collect();
    }
    let mut resized = vec![0; to.0 * to.1];
    let mut sums = vec![0_i32; to.0];
    for (out, tap) in resized.chunks_exact_mut(to.0).zip(taps(outer.1, to.1, filter)) {
        sums.fill(HALF);
        for (at, &weight) in (tap.first..).zip(&tap.weights) {
            for (sum, &input) in sums.iter_mut().zip(row(at)) {
                *sum += i32::from(input) * weight;
            }
        }
        for (value, &sum) in out.iter_mut().zip(&sums) {
            *value = saturated(sum);
        }
    }
    resized
}

/// The rows of `from.bytes` in the larger plane, at the width `to`, and a row of padding at that width.
fn resize_rows(from: Plane<'_>, to: usize, filter: Filter) -> (Vec<u8>, Vec<u8>) {
    let Plane { bytes, size: (width, height), outer, offset, fill } = from;
    let mut rows = vec![fill; to * height];
    let lines = bytes.chunks_exact(width).zip(rows.chunks_exact_mut(to));
    if outer.0 == to {
        lines.for_each(|(line, out)| out[offset.0..offset.0 + width].copy_from_slice(line));
        return (rows, vec![fill; to]);
    }
    let all = taps(outer.0, to, filter);
    let sum_of = |weights: &[i32]| weights.iter().sum::<i32>() * i32::from(fill);
    // for each output its inputs from `bytes`, and the sum of its inputs from the padding
    let inner: Vec<(&[i32], usize, i32)> = all
        .iter()
        .map(|tap| {
            let start = offset.0.clamp(tap.first, tap.first + tap.weights.len());
            let end = (offset.0 + width).clamp(start, tap.first + tap.weights.len());
            let weights = &tap.weights[start - tap.first..end - tap.first];
            (weights, start.saturating_sub(offset.0).min(width), HALF + sum_of(&tap.weights) - sum_of(weights))
        })
        .collect();
    for (line, out) in lines {
        for (value, &(weights, first, padding)) in out.iter_mut().zip(&inner) {
            let inputs = &line[first..first + weights.len()];
            let sum: i32 = inputs.iter().zip(weights).map(|(&input, &weight)| i32::from(input) * weight).sum();
            *value = saturated(sum + padding);
        }
    }
    (rows, all.iter().map(|tap| saturated(HALF + sum_of(&tap.weights))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_equal_recorded_results_of_pillow() {
        // Image.fromarray(numpy.uint8([[0, 10, 250, 30, 90]])).resize((3, 1) / (8, 1), ...)
        let row = [0, 10, 250, 30, 90];
        let resize = |to, filter| plane(&row, (5, 1), (to, 1), filter);
        assert_eq!(resize(3, Filter::Bilinear), KNOWN.0);
        assert_eq!(resize(8, Filter::Bicubic), KNOWN.1);
        let column = plane(&row, (1, 5), (1, 8), Filter::Bicubic);
        assert_eq!(column, KNOWN.1, "columns as rows");
    }

    const KNOWN: ([u8; 3], [u8; 8]) = ([4, 148, 64], [0, 0, 20, 201, 206, 37, 55, 94]);

    #[test]
    fn the_same_size_is_a_copy_and_constant_images_stay_constant() {
        let bytes: Vec<u8> = (0..12).collect();
        assert_eq!(plane(&bytes, (4, 3), (4, 3), Filter::Bicubic), bytes);
        for to in [(1, 1), (3, 17), (40, 2)] {
            assert!(plane(&[77; 35], (7, 5), to, Filter::Bicubic).iter().all(|&value| value == 77), "{to:?}");
        }
    }

    #[test]
    fn a_padded_plane_equals_the_larger_plane_in_memory() {
        for (width, height, to) in
            [(7_usize, 3_usize, 5), (3, 7, 5), (40, 9, 13), (9, 41, 13), (8, 5, 8), (5, 8, 8), (50, 1, 4)]
        {
            let bytes: Vec<u8> = (0..width * height).map(|at| u8::try_from(at * 37 % 251).expect("a byte")).collect();
            let side = width.max(height);
            for shift in [side.abs_diff(width.min(height)) / 2, side - width.min(height)] {
                let offset = if width > height { (0, shift) } else { (shift, 0) };
                let mut square = vec![122; side * side];
                for (row, line) in bytes.chunks_exact(width).enumerate() {
                    let start = (offset.1 + row) * side + offset.0;
                    square[start..start + width].copy_from_slice(line);
                }
                let from = Plane { bytes: &bytes, size: (width, height), outer: (side, side), offset, fill: 122 };
                for filter in [Filter::Bilinear, Filter::Bicubic] {
                    let expected = plane(&square, (side, side), (to, to), filter);
                    assert_eq!(padded(from, (to, to), filter), expected, "{width}x{height} to {to}, {offset:?}");
                }
            }
        }
    }
}
