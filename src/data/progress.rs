//! Work in parallel that reports its progress.

use prsmed_base::event::{Event, Observer};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// The results of `work` on all `items`, in their order, in parallel on the current rayon pool. The observer gets the name
/// of the phase, the unit of the items, and how many are done.
pub(crate) fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    (phase, unit): (&str, &'static str),
    observer: &dyn Observer,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    observer.on(&Event::Started { phase: phase.into(), total: items.len() as u64, unit });
    let done = Mutex::new(0_u64);
    let work = |item| {
        let result = work(item);
        let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
        *done += 1;
        observer.on(&Event::Advanced { done: *done });
        result
    };
    let results = items.into_par_iter().map(work).collect();
    observer.on(&Event::Finished);
    results
}
