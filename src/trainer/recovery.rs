//! Going on after memory ran out: smaller micro-batches, as many more of them, the same effective batch.
//!
//! Everything of the failed attempt is dropped, and the step is repeated from the same samples with the same random numbers, so
//! that its result is that of a run with the smaller micro-batch from the start. One thing remains of the attempt: running
//! statistics of batch normalisation that follow each micro-batch (`model.batch_norm=batch`), whose results depend on the
//! micro-batch anyway.

use super::TrainConfig;
use crate::tensor::{Device, memory};
use crate::{Error, Result};
use std::cell::Cell;

/// How many samples fit at once: as many as configured until memory runs out.
#[derive(Debug)]
pub struct Fitting {
    configured: usize,
    most: Cell<usize>,
}

/// What was done about memory that ran out.
#[derive(Debug)]
pub struct Halved {
    /// What failed, with numbers.
    pub what: String,
    /// Samples that are tried at once from now on.
    pub most: usize,
}

impl Fitting {
    /// Starts with `configured` samples, 1 or more.
    pub fn new(configured: usize) -> Self {
        Self { configured, most: Cell::new(configured) }
    }

    /// Samples at once.
    pub fn most(&self) -> usize {
        self.most.get()
    }

    /// The same, where it is less than configured.
    pub fn reduced(&self) -> Option<usize> {
        Some(self.most()).filter(|most| *most < self.configured)
    }

    /// Halves the number of samples and gives kept memory of `device` back; the caller has dropped what failed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with `reason` when it is one sample already.
    pub fn halve(&self, reason: String, device: Device) -> Result<Halved> {
        let before = self.most();
        if before <= 1 {
            return Err(Error::OutOfMemory { reason });
        }
        let what = what(before, &reason);
        memory::clear_failure();
        memory::release_cache(device)?;
        self.most.set(before.div_ceil(2));
        Ok(Halved { what, most: self.most() })
    }
}

/// What failed with `before` samples at once.
fn what(before: usize, reason: &str) -> String {
    let Some(failure) = memory::failure() else { return format!("out of memory with {before} at once ({reason})") };
    let asked = failure.requested.map_or_else(String::new, |bytes| format!(", {bytes} more were asked for"));
    let place = if failure.scope.is_empty() { String::new() } else { format!(" in `{}`", failure.scope) };
    format!("out of memory with {before} at once{place}: {} were in use{asked}", failure.allocated)
}

/// Settings of a run that starts with what fits.
pub(super) fn remedy(config: &TrainConfig, most: usize) -> String {
    let whole = config.micro_batch * config.accumulation;
    let most = (1..=most).rev().find(|micro| whole.is_multiple_of(*micro)).unwrap_or(1);
    let accumulation = whole / most;
    let off = if config.step_in_backward { " --set train.step_in_backward=false" } else { "" };
    format!("--set train.micro_batch={most} --set train.accumulation={accumulation}{off}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_down_to_one_and_then_says_what_failed() {
        let _turn = crate::tensor::ledger::TURN.lock();
        memory::clear_failure();
        let fitting = Fitting::new(5);
        assert_eq!((fitting.most(), fitting.reduced()), (5, None));
        let halve = || fitting.halve("words".into(), Device::Cpu);
        assert_eq!(halve().unwrap().what, "out of memory with 5 at once (words)");
        assert_eq!([halve().unwrap().most, halve().unwrap().most], [2, 1]);
        assert!(matches!(halve(), Err(Error::OutOfMemory { reason }) if reason == "words"));
        assert_eq!((fitting.most(), fitting.reduced()), (1, Some(1)));
    }
}
