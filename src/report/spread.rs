//! Distributions of scores for charts.

/// Quartiles and ends of a group of values.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScoreSpread {
    pub(super) name: String,
    pub(super) count: usize,
    /// Minimum, first quartile, median, third quartile, maximum.
    pub(super) five: [f64; 5],
}

impl ScoreSpread {
    /// `None` without values.
    pub(super) fn new(name: &str, values: &[f64]) -> Option<Self> {
        let at = |q: f64| crate::metrics::order::quantile(values, q);
        let five = [at(0.0)?, at(0.25)?, at(0.5)?, at(0.75)?, at(1.0)?];
        Some(Self { name: name.to_owned(), count: values.len(), five })
    }
}

/// A round number at or above `value`, a fifth of which is round too.
pub(super) fn round_up(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5]
        .into_iter()
        .map(|step| step * power)
        .find(|round| *round >= value * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_axes_are_round() {
        for (value, expected) in [(0.0, 1.0), (3.4, 4.0), (5.0, 5.0), (76.0, 100.0), (0.013, 0.015), (f64::NAN, 1.0)] {
            assert!((round_up(value) - expected).abs() < 1e-12, "{value}: {}", round_up(value));
        }
        assert_eq!(ScoreSpread::new("a", &[]), None);
        assert_eq!(ScoreSpread::new("a", &[3.0, 1.0, 2.0]).unwrap().five, [1.0, 1.5, 2.0, 2.5, 3.0]);
    }
}
