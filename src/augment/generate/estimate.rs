//! Predicts the time of a generation from its first denoising steps.

use crate::event::{Event, Observer};
use crate::units::clock;
use std::time::{Duration, Instant};

/// Times the first steps of a batch and reports the predicted time of all batches.
pub(super) struct Estimate<'a> {
    observer: &'a dyn Observer,
    num_steps: usize,
    /// Number of remaining batches, including the timed one; 0 = no report.
    num_batches: usize,
    started: Instant,
    first_step: Option<Duration>,
}

impl<'a> Estimate<'a> {
    pub(super) fn new(observer: &'a dyn Observer, num_steps: usize, num_batches: usize) -> Self {
        Self { observer, num_steps, num_batches, started: Instant::now(), first_step: None }
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
        if self.num_batches > 0 {
            let text = predicted(step, self.num_steps, self.num_batches);
            self.observer.on(&Event::Note(text));
            self.num_batches = 0;
        }
    }
}

fn predicted(step: Duration, num_steps: usize, num_batches: usize) -> String {
    let all = u32::try_from(num_steps.saturating_mul(num_batches)).unwrap_or(u32::MAX);
    let plural = if num_batches == 1 { "batch" } else { "batches" };
    format!(
        "about {} for {num_batches} {plural}: {:.1} s for each of {num_steps} denoising steps",
        clock(step.saturating_mul(all)),
        step.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_predicted_time_is_proportional_to_the_number_of_steps() {
        let text = predicted(Duration::from_secs(40), 18, 3);
        assert_eq!(text, "about 36m 00s for 3 batches: 40.0 s for each of 18 denoising steps");
    }
}
