//! Predicts the time of a generation from its first batch.

use crate::units::clock;
use std::time::Duration;

/// The predicted time of the batches that remain after the first one, which took `first` from its images to its files.
pub(super) fn remaining(first: Duration, num_batches: usize) -> Option<String> {
    let all = first.saturating_mul(u32::try_from(num_batches).unwrap_or(u32::MAX));
    let others =
        if num_batches == 1 { "batch that remains".to_owned() } else { format!("{num_batches} batches that remain") };
    let text = || format!("about {} for the {others}: the first one took {:.1} s", clock(all), first.as_secs_f64());
    (num_batches > 0).then(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_all_batches_is_that_of_the_first_one() {
        let after = |millis: u64, count: usize| remaining(Duration::from_millis(millis), count);
        assert_eq!(after(1230, 59).unwrap(), "about 1m 12s for the 59 batches that remain: the first one took 1.2 s");
        assert_eq!(after(40_000, 1).unwrap(), "about 40s for the batch that remains: the first one took 40.0 s");
        assert_eq!(after(40_000, 0), None);
    }
}
