//! The memory of a CPU job as the system reports it: what a process holds besides its tensors, and what the host offers.

use super::device_terms::Term;
use crate::units::Bytes;

/// Resident memory of a process with libtorch before its first tensor: code and tables of its libraries.
const BASE: u64 = 360 << 20;

/// A host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Memory that a new process can have without swapping.
    pub available: Bytes,
    /// How that was found.
    pub note: String,
    /// What a process costs besides its tensors.
    pub terms: Vec<Term>,
}

impl Host {
    /// This machine.
    pub fn detect() -> Self {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |key: &str| {
            let line = info.lines().find(|line| line.starts_with(key))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        let available = kib("MemAvailable:").map_or(u64::MAX >> 1, |kib| kib << 10);
        Self { note: "what the system says is available now".into(), ..Self::of_size(Bytes(available)) }
    }

    /// A host that offers `available` bytes.
    pub fn of_size(available: Bytes) -> Self {
        Self {
            available,
            note: "as given".into(),
            terms: vec![Term {
                name: "libraries",
                bytes: BASE,
                reserved: false,
                provenance: "resident memory of libtorch 2.11's libraries in an idle process".into(),
            }],
        }
    }
}
