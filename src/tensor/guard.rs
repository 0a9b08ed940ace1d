//! Converts panics of libtorch's operators to typed errors. No other module does so.
//!
//! Model code uses tch's panicking operators, so that it reads like the paper. tch panics in Rust after the C++ call
//! has returned, so unwinding is sound. libtorch reports failures as text: this module recognises out-of-memory and
//! shape errors by that text.

use prsmed_base::{Error, Result};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// Payload of a panic that carries a typed error.
pub(super) struct Raised(pub(super) Error);

thread_local! {
    static GUARDED: Cell<u32> = const { Cell::new(0) };
}

/// Runs `work`. A panic becomes [`Error::OutOfMemory`], [`Error::Shape`] or [`Error::Torch`].
///
/// # Errors
/// The error of `work`, or the converted panic.
pub fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    mute_guarded_panics();
    GUARDED.with(|depth| depth.set(depth.get() + 1));
    let outcome = catch_unwind(AssertUnwindSafe(work));
    GUARDED.with(|depth| depth.set(depth.get() - 1));
    outcome.unwrap_or_else(|panic| Err(error_of(panic)))
}

/// Converts the payload of a panic to an error.
fn error_of(panic: Box<dyn Any + Send>) -> Error {
    match panic.downcast::<Raised>() {
        Ok(raised) => raised.0,
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_else(|| "a panic without a message".to_owned());
            classify(&text)
        }
    }
}

/// Converts libtorch's message to a typed error.
pub(super) fn classify(text: &str) -> Error {
    let text = text.strip_prefix("called `Result::unwrap()` on an `Err` value: ").unwrap_or(text);
    let text = text.strip_prefix("Torch(\"").and_then(|t| t.strip_suffix("\")")).unwrap_or(text);
    // the error of a checkpointed segment was already classified
    let text = text.strip_prefix("out of memory: ").unwrap_or(text);
    let first = text.split("\\n").next().unwrap_or(text).lines().next().unwrap_or(text).trim();
    let reason = first.split("Exception raised from").next().unwrap_or(first).trim().to_owned();
    let lower = reason.to_lowercase();
    if is_out_of_memory(&lower) {
        Error::OutOfMemory { reason }
    } else if ["shape", "size mismatch", "sizes of tensors", "must match the size", "dimension", "cannot be multiplied"]
        .iter()
        .any(|s| lower.contains(s))
    {
        Error::Shape { reason }
    } else {
        Error::Torch { reason }
    }
}

/// True if libtorch's message, in lowercase, says that memory ran out.
fn is_out_of_memory(lower: &str) -> bool {
    ["out of memory", "can't allocate memory", "not enough memory", "bad_alloc"].iter().any(|s| lower.contains(s))
}

/// Saves the state of a GPU that is out of memory. A panic is the earliest point in Rust: nothing is freed yet. The
/// ledger saves the CPU's failures in C++.
fn note_gpu_failure(payload: &(dyn Any + Send)) {
    let text = payload.downcast_ref::<String>().map(|text| text.to_lowercase());
    let raised = payload.downcast_ref::<Raised>().map(|raised| raised.0.to_string());
    if text.or(raised).is_some_and(|text| is_out_of_memory(&text) && text.contains("cuda")) {
        super::memory::note_gpu_failure();
    }
}

fn mute_guarded_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if GUARDED.with(Cell::get) == 0 {
                default(info);
            } else {
                note_gpu_failure(info.payload());
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Kind, Tensor};

    #[test]
    fn a_shape_mismatch_gives_a_shape_error() {
        let xs = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let error = guard(|| Ok(xs.matmul(&xs))).unwrap_err();
        assert!(matches!(&error, Error::Shape { reason } if reason.contains("2x3")), "{error:?}");
    }

    #[test]
    fn a_failed_allocation_gives_an_out_of_memory_error() {
        let _lock = crate::ledger::TEST_LOCK.lock();
        let error = guard(|| Ok(Tensor::zeros([1 << 40, 1 << 10], (Kind::Float, Device::Cpu)))).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
        assert!(error.hint().contains("micro_batch"));
    }
}
