//! Watches how long steps wait for their data, and says once when it is too long.

use crate::event::StepReport;
use std::collections::VecDeque;
use std::time::Duration;

/// Steps that are looked at together.
const STEPS: usize = 50;
/// Largest part of their time that may go into waiting without a word.
const SHARE: f64 = 0.2;

/// Waiting times of the last steps.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    steps: VecDeque<(Duration, Duration)>,
    told: bool,
}

impl Waiting {
    /// Takes a step's times; returns what to tell when the last steps waited too long for the first time.
    pub(super) fn add(&mut self, report: &StepReport) -> Option<String> {
        if self.told {
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
        self.told = true;
        Some(format!(
            "{:.0} % of the last {STEPS} steps' time went into waiting for data: more `data.workers`, a larger \
             `data.cache_mib` (pictures are decoded once) or `data.cache_vision` may help",
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
    fn a_long_wait_is_told_once_and_only_after_enough_steps() {
        let mut waiting = Waiting::default();
        // the first steps, where nothing is cached yet, do not count for ever
        assert!((0..STEPS - 1).all(|_| waiting.add(&report(90, 100)).is_none()));
        let told = waiting.add(&report(90, 100)).expect("a note");
        assert!(told.starts_with("90 % of the last 50 steps") && told.contains("data.workers"), "{told}");
        assert!((0..200).all(|_| waiting.add(&report(90, 100)).is_none()), "once");
    }

    #[test]
    fn short_waits_and_single_long_ones_are_not_told() {
        let mut waiting = Waiting::default();
        assert!((0..500).all(|step| waiting.add(&report(if step % 50 == 0 { 300 } else { 10 }, 310)).is_none()));
        assert!((0..10).all(|_| waiting.add(&report(0, 0)).is_none()));
    }
}
