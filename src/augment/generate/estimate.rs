//! Predicts the time of a generation: of a slow batch from its first denoising steps, of all batches from the first one.

use crate::event::{Event, Observer};
use crate::units::clock;
use std::time::{Duration, Instant};

/// The first steps of a batch are worth a message if the whole batch takes at least this long.
const SLOW: Duration = Duration::from_mins(1);

/// Times the first steps of a batch, and reports the time of all its steps if they are slow.
pub(super) struct Estimate<'a> {
    observer: &'a dyn Observer,
    num_steps: usize,
    /// Whether a report is wanted.
    is_timed: bool,
    started: Instant,
    first_step: Option<Duration>,
}

impl<'a> Estimate<'a> {
    pub(super) fn new(observer: &'a dyn Observer, num_steps: usize, is_timed: bool) -> Self {
        Self { observer, num_steps, is_timed, started: Instant::now(), first_step: None }
    }

    /// Counts a step. The second step is timed, because the first one includes encoding the images. A batch of one
    /// step has only the first.
    pub(super) fn step(&mut self) {
        let elapsed = self.started.elapsed();
        let step = match self.first_step {
            None if self.num_steps > 1 => {
                self.first_step = Some(elapsed);
                return;
            }
            first => elapsed.saturating_sub(first.unwrap_or_default()),
        };
        if std::mem::take(&mut self.is_timed)
            && let Some(text) = slow_batch(step, self.num_steps)
        {
            self.observer.on(&Event::Note(text));
        }
    }
}

fn slow_batch(step: Duration, num_steps: usize) -> Option<String> {
    let all = step.saturating_mul(u32::try_from(num_steps).unwrap_or(u32::MAX));
    let text = || {
        let (all, step) = (clock(all), step.as_secs_f64());
        format!("denoising takes about {all} for each batch: {step:.1} s for each of {num_steps} steps")
    };
    (all >= SLOW).then(text)
}

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

    #[test]
    fn a_slow_batch_is_told_after_its_first_steps() {
        let text = slow_batch(Duration::from_secs(40), 18).unwrap();
        assert_eq!(text, "denoising takes about 12m 00s for each batch: 40.0 s for each of 18 steps");
        assert_eq!(slow_batch(Duration::from_millis(100), 18), None);
    }
}
