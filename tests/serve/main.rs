//! `prsmed serve` as a process on loopback: every route, every limit, bad clients, load.

mod all_slices;
mod limits;
mod load;
mod masks;
mod proxy;
mod python_guide;
mod routes;
mod sequences;
mod sizes;
mod slicer;
mod support;
mod volumes;
mod windows;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Keeps the load away from tests that measure a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
