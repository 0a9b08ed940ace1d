//! Recovery from running out of memory: smaller micro-batches, more of them, the same effective batch.
//!
//! The failed attempt is dropped, and the step is repeated with the same samples and random numbers. Its result equals
//! that of a run with the smaller micro-batch from the start. One exception: running statistics of batch normalisation
//! (`model.batch_norm=batch`) keep what the failed attempt added; their results depend on the micro-batch anyway.

use super::TrainConfig;
use prsmed_base::{Error, Result};
use prsmed_tensor::{Device, memory};
use std::cell::Cell;

/// Number of samples per micro-batch: the configured number until memory runs out.
#[derive(Debug)]
pub struct Fitting {
    configured: usize,
    most: Cell<usize>,
}

/// A halved micro-batch.
#[derive(Debug)]
pub struct Halved {
    /// Description of the failure, with numbers.
    pub what: String,
    /// New number of samples per micro-batch.
    pub most: usize,
}

impl Fitting {
    /// Starts with `configured` samples, 1 or more.
    pub fn new(configured: usize) -> Self {
        Self { configured, most: Cell::new(configured) }
    }

    /// Samples per micro-batch.
    pub fn most(&self) -> usize {
        self.most.get()
    }

    /// Samples per micro-batch if they are fewer than configured.
    pub fn reduced(&self) -> Option<usize> {
        Some(self.most()).filter(|most| *most < self.configured)
    }

    /// Halves the number of samples and releases cached memory of `device`; the caller has dropped the failed attempt.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with `reason` if the number is already one.
    pub fn halve(&self, reason: String, device: Device) -> Result<Halved> {
        let before = self.most();
        if before <= 1 {
            return Err(Error::OutOfMemory { reason });
        }
        let what = describe(before, &reason);
        memory::clear_failure();
        memory::release_cache(device)?;
        self.most.set(before.div_ceil(2));
        Ok(Halved { what, most: self.most() })
    }
}

/// Description of the failure with `before` samples per micro-batch.
fn describe(before: usize, reason: &str) -> String {
    let Some(failure) = memory::failure() else { return format!("out of memory with {before} at once ({reason})") };
    let asked = failure.requested.map_or_else(String::new, |bytes| format!(", {bytes} more were requested"));
    let module = if failure.module.is_empty() { String::new() } else { format!(" in `{}`", failure.module) };
    format!("out of memory with {before} at once{module}: {} were in use{asked}", failure.allocated)
}

/// Settings of a run whose micro-batch fits from the start.
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
    fn the_number_of_samples_is_halved_down_to_one() {
        let _lock = prsmed_tensor::ledger::TEST_LOCK.lock();
        memory::clear_failure();
        let fitting = Fitting::new(5);
        assert_eq!((fitting.most(), fitting.reduced()), (5, None));
        let halve = || fitting.halve("words".into(), Device::Cpu);
        assert_eq!(halve().unwrap().what, "out of memory with 5 at once (words)");
        assert_eq!([halve().unwrap().most, halve().unwrap().most], [2, 1]);
        assert!(matches!(halve(), Err(Error::OutOfMemory { reason }) if reason == "words"));
        assert_eq!((fitting.most(), fitting.reduced()), (1, Some(1)));
    }

    #[test]
    fn the_module_and_the_request_of_a_failure_are_named() {
        use prsmed_tensor::{Kind, Tensor, guard, ledger, module_path};
        let _lock = ledger::TEST_LOCK.lock();
        ledger::install();
        for (module, named) in [(Some("llm.layers"), " in `llm.layers`"), (None, "")] {
            memory::clear_failure();
            let _module = module.map(module_path::enter);
            let failed = guard::guard(|| Ok(Tensor::empty([1_i64 << 50], (Kind::Uint8, Device::Cpu))));
            assert!(failed.is_err());
            let text = describe(3, "words");
            assert!(text.starts_with(&format!("out of memory with 3 at once{named}: ")), "{text}");
            assert!(text.ends_with("1048576.00 GiB more were requested"), "{text}");
        }
        memory::clear_failure();
    }
}
