//! Panics: keeps the message and the location of the last one, for the error that reports it.
//!
//! The payload of a caught panic has no location; only the panic hook knows it.

use std::any::Any;
use std::panic;
use std::sync::{Mutex, PoisonError};

struct Recorded {
    message: String,
    location: String,
}

static LAST: Mutex<Option<Recorded>> = Mutex::new(None);

/// Replaces the panic hook: panics are recorded and not printed.
pub fn record() {
    panic::set_hook(Box::new(|info| {
        let location = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        let recorded = Recorded { message: message(info.payload()), location };
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(recorded);
    }));
}

/// The message of a caught panic, with file and line if [`record`] saw it.
pub fn describe(payload: &(dyn Any + Send)) -> String {
    let message = message(payload);
    match &*LAST.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(last) if last.message == message && !last.location.is_empty() => {
            format!("{message} (at {})", last.location)
        }
        _ => message,
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}
