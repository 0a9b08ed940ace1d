//! Checks of stored numbers before they are copied: finite, and not too large for a narrower dtype.

use tch::Kind;

/// True for floating-point dtypes.
pub(super) fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16)
}

/// True if all numbers in `bytes` (little-endian, of dtype `kind`) are finite after a conversion to the dtype `target`, and
/// for dtypes that are not floating-point.
pub(super) fn all_finite(bytes: &[u8], kind: Kind, target: Kind) -> bool {
    let limit = limit(target);
    match kind {
        Kind::Double => all::<8>(bytes, |bytes| f64::from_le_bytes(bytes).abs() < limit),
        Kind::Float => all::<4>(bytes, |bytes| f64::from(f32::from_le_bytes(bytes).abs()) < limit),
        Kind::BFloat16 => all::<2>(bytes, |[low, high]| f64::from(f32::from_le_bytes([0, 0, low, high]).abs()) < limit),
        // a half is finite unless all bits of its exponent are set, and every other dtype here has a larger range
        Kind::Half => all::<2>(bytes, |bytes| u16::from_le_bytes(bytes) & 0x7c00 != 0x7c00),
        _ => true,
    }
}

/// The smallest number that is rounded to infinity in a dtype.
fn limit(kind: Kind) -> f64 {
    match kind {
        Kind::Half => 65520.0,
        // half a unit of the last place above the largest number
        Kind::BFloat16 => f64::from(f32::from_bits(0x7f7f_8000)),
        Kind::Float => f64::from(f32::MAX) + 2.0_f64.powi(127 - 24),
        _ => f64::INFINITY,
    }
}

fn all<const SIZE: usize>(bytes: &[u8], is_good: impl Fn([u8; SIZE]) -> bool) -> bool {
    // without an early end the loop is vectorised
    bytes.as_chunks::<SIZE>().0.iter().fold(true, |all, number| all & is_good(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::cast_possible_truncation, reason = "values of a smaller dtype")]
    fn fits(values: &[f64], kind: Kind, target: Kind) -> bool {
        let bytes = |value: &f64| match kind {
            Kind::Double => value.to_le_bytes().to_vec(),
            Kind::Float => (*value as f32).to_le_bytes().to_vec(),
            _ => (*value as f32).to_le_bytes()[2..].to_vec(),
        };
        all_finite(&values.iter().flat_map(bytes).collect::<Vec<u8>>(), kind, target)
    }

    #[test]
    fn numbers_that_are_not_finite_are_found_in_every_dtype() {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            assert!(fits(&[0.0, -1.5, 3e38], kind, kind), "{kind:?}");
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                assert!(!fits(&[0.0, bad, 1.0], kind, kind), "{bad} in {kind:?}");
            }
        }
        let half = |bits: u16| all_finite(&[[0, 0], bits.to_le_bytes()].concat(), Kind::Half, Kind::Float);
        assert!(half(0x7bff) && half(0xfbff), "the largest halves");
        assert!(!half(0x7c00) && !half(0xfc00) && !half(0x7e01));
        assert!(all_finite(&[0xff; 8], Kind::Int8, Kind::Float));
    }

    #[test]
    fn numbers_that_become_infinite_are_found() {
        assert!(fits(&[65504.0, 65519.9], Kind::Double, Kind::Half));
        assert!(!fits(&[65504.0, -65520.0], Kind::Float, Kind::Half));
        assert!(!fits(&[1e5], Kind::BFloat16, Kind::Half));
        assert!(fits(&[3.38e38], Kind::Float, Kind::BFloat16));
        assert!(!fits(&[f64::from(f32::MAX)], Kind::Float, Kind::BFloat16));
        assert!(!fits(&[1e39], Kind::Double, Kind::Float));
        assert!(fits(&[f64::from(f32::MAX)], Kind::Double, Kind::Float));
    }
}
