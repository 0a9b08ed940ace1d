//! Measures how long steps wait for their data, and warns once when it is too long.

use prsmed_base::event::StepReport;
use std::collections::VecDeque;
use std::time::Duration;

/// Number of steps of a measurement.
const STEPS: usize = 50;
/// Fraction of step time spent waiting above which a warning is given.
const SHARE: f64 = 0.2;

/// Data wait of the last steps.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    steps: VecDeque<(Duration, Duration)>,
    warned: bool,
}

impl Waiting {
    /// Adds a step. Returns a warning the first time that the last steps waited too long.
    pub(super) fn add(&mut self, report: &StepReport) -> Option<String> {
        if self.warned {
            return None;
        }
        self.steps.push_back((report.data_wait, report.elapsed));
        if self.steps.len() > STEPS {
            self.steps.pop_front();
        }
        let sum = |of: fn(&(Duration, Duration)) -> Duration| self.steps.iter().map(of).sum::<Duration>().as_secs_f64();
        let share = sum(|step| step.0) / sum(|step| step.1).max(f64::MIN_POSITIVE);
        if self.steps.len() < STEPS || share <= SHARE {
            return None;
        }
        self.warned = true;
        Some(format!(
            "{:.0} % of the last {STEPS} steps' time went into waiting for data: more `data.workers`, a larger \
             `data.cache_mib` (images are decoded once) or `data.cache_vision` may help",
            share * 100.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(wait: u64, elapsed: u64) -> StepReport {
        let [data_wait, elapsed] = [wait, elapsed].map(Duration::from_millis);
        StepReport { elapsed, data_wait, ..StepReport::default() }
    }

    #[test]
    fn a_long_wait_is_reported_once_after_enough_steps() {
        let mut data_wait = Waiting::default();
        assert!((0..STEPS - 1).all(|_| data_wait.add(&report(90, 100)).is_none()));
        let note = data_wait.add(&report(90, 100)).expect("a note");
        assert!(note.starts_with("90 % of the last 50 steps") && note.contains("data.workers"), "{note}");
        assert!((0..200).all(|_| data_wait.add(&report(90, 100)).is_none()), "once");
    }

    #[test]
    fn short_waits_and_single_long_ones_are_not_reported() {
        let mut data_wait = Waiting::default();
        assert!((0..500).all(|step| data_wait.add(&report(if step % 50 == 0 { 300 } else { 10 }, 310)).is_none()));
        assert!((0..10).all(|_| data_wait.add(&report(0, 0)).is_none()));
    }
}
