//! Distributions of scores for charts.

/// Counts of values in bins of equal width.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    /// Lower end of the first bin.
    pub(super) low: f64,
    /// Upper end of the last bin.
    pub(super) high: f64,
    /// Number of values of each bin; a value at the upper end is in the last one.
    pub(super) counts: Vec<u64>,
}

impl Histogram {
    /// Values outside of `low..=high` are in the first and the last bin.
    pub(super) fn new(values: &[f64], low: f64, high: f64, bins: usize) -> Self {
        let mut counts = vec![0; bins];
        for value in values {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
            let bin = ((value - low) / (high - low) * bins as f64) as usize;
            counts[bin.min(bins - 1)] += 1;
        }
        Self { low, high, counts }
    }

    /// Ends of a bin.
    pub(super) fn range(&self, bin: usize) -> (f64, f64) {
        let end = |bin: usize| self.low + (self.high - self.low) * bin as f64 / self.counts.len() as f64;
        (end(bin), end(bin + 1))
    }
}

/// Quartiles and ends of a group of values.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Spread {
    pub(super) name: String,
    pub(super) count: usize,
    /// Minimum, first quartile, median, third quartile, maximum.
    pub(super) five: [f64; 5],
}

impl Spread {
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
    fn values_are_counted_once() {
        let histogram = Histogram::new(&[0.0, 0.09, 0.1, 0.55, 1.0, 1.0], 0.0, 1.0, 10);
        assert_eq!(histogram.counts, [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(histogram.range(5), (0.5, 0.6));
        assert_eq!(Histogram::new(&[7.0, -1.0], 0.0, 5.0, 2).counts, [1, 1]);
    }

    #[test]
    fn ends_of_axes_are_round() {
        for (value, expected) in [(0.0, 1.0), (3.4, 4.0), (5.0, 5.0), (76.0, 100.0), (0.013, 0.015), (f64::NAN, 1.0)] {
            assert!((round_up(value) - expected).abs() < 1e-12, "{value}: {}", round_up(value));
        }
        assert_eq!(Spread::new("a", &[]), None);
        assert_eq!(Spread::new("a", &[3.0, 1.0, 2.0]).unwrap().five, [1.0, 1.5, 2.0, 2.5, 3.0]);
    }
}
