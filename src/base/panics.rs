//! Panics: keeps the message and the location of the last one, for the error that reports it.
//!
//! The payload of a caught panic has no location; only the panic hook knows it.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Message and location.
static LAST: Mutex<Option<(String, String)>> = Mutex::new(None);

/// Replaces the panic hook: panics are recorded and not printed.
pub fn record() {
    panic::set_hook(Box::new(|info| {
        let location = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some((message(info.payload()), location));
    }));
}

/// The message of a caught panic, with file and line if [`record`] saw it.
pub fn describe(payload: &(dyn Any + Send)) -> String {
    let message = message(payload);
    match &*LAST.lock().unwrap_or_else(PoisonError::into_inner) {
        Some((last, location)) if *last == message && !location.is_empty() => format!("{message} (at {location})"),
        _ => message,
    }
}

/// Reads a file with decoders that may panic. A panic becomes an error that names the file.
///
/// # Errors
/// As `read`; [`Error::Data`] for a panic.
pub fn guard_file<T>(path: &Path, hint: &str, read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|panic| Err(Error::data(path, format!("its decoder failed: {}", describe(&*panic)), hint)))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_decoder_is_an_error_of_its_file() {
        let guard = |read: fn() -> Result<u8>| guard_file(Path::new("a.tif"), "convert it", read);
        assert_eq!(guard(|| Ok(3)).ok(), Some(3));
        for read in
            [(|| panic!("a text")) as fn() -> Result<u8>, || panic!("number {}", 7), || std::panic::panic_any(5)]
        {
            let error = guard(read).expect_err("a panic");
            assert!(error.to_string().starts_with("a.tif: its decoder failed: "), "{error}");
            assert_eq!(error.hint(), "convert it");
        }
        let error = guard(|| Err(Error::data("b.tif", "is damaged", ""))).expect_err("an error");
        assert_eq!(error.to_string(), "b.tif: is damaged");
    }
}
