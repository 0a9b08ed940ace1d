//! The memory of a CPU job as the system reports it: what a process holds besides its tensors, and what the host offers.
//!
//! A plan's `device` column on the CPU is `VmHWM` of `/proc/PID/status`: what the counting allocator reserves (imitated block
//! by block, see [`super::host_allocator`]) and the terms below. The fixed base of comparisons is the first of them, resident
//! memory before the first tensor: a process reads its own, because which pages of the libraries are mapped then depends on
//! the page cache, by a few MiB.
//!
//! Constants were measured on 2026-11-21 with libtorch 2.11 (the CUDA build, whose libraries are loaded on a CPU too), glibc
//! 2.36, one and two threads: `VmHWM` less base, reserved and buffers; the table is in `benches/RESULTS.md`. They
//! hold because three things are bounded (`ledger.cpp` and [`memory::bound_kernel_caches`]): malloc gives buffers of 128 KiB
//! and more back at once, arenas are two, and oneDNN keeps 256 kernels (128 when the constants were measured; 256 take 2 MiB more in fp32, 17 in bf16). Before, runs of one setting differed by 25 MiB and
//! bf16 grew by 1 MiB a step.
//!
//! Not modelled: weights that are read from mapped files (their pages are given back behind the reader), pictures in work.

use super::device_terms::Term;
use super::rehearse::Buffers;
use crate::tensor::{self, memory};
use crate::units::Bytes;

const MIB: u64 = 1 << 20;

/// Resident memory of a process with libtorch before its first tensor, where it is not this one.
const LIBRARIES: u64 = 346 * MIB;
/// File pages of the libraries that planning and a first step touch: `RssFile` grows from 168 to 210 MiB.
const CODE: u64 = 42 * MIB;
/// Malloc's heap and anonymous pages of operators, autograd's graph, the tokenizer, kernels, stacks; rounding of small blocks.
const RUNTIME: u64 = 20 * MIB;
/// What the same takes more for each thread from the second on.
const THREAD: u64 = 12 * MIB;
/// What oneDNN's kernels for bf16 and fp16 take more.
const HALF_KERNELS: u64 = 24 * MIB;
/// Threads of a host that is not this one.
const THREADS: u64 = 2;

/// A host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Memory that a new process can have without swapping.
    pub available: Bytes,
    /// How that was found.
    pub note: String,
    /// Resident memory of a process before its first tensor.
    pub libraries: Bytes,
    /// Threads that compute.
    pub threads: u64,
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
        Self {
            available: Bytes(available),
            note: "what the system says is available now".into(),
            libraries: Some(memory::at_start()).filter(|bytes| bytes.0 > 0).unwrap_or(Bytes(LIBRARIES)),
            threads: tensor::num_threads(),
        }
    }

    /// A host that offers `available` bytes.
    pub fn of_size(available: Bytes) -> Self {
        Self { available, note: "as given".into(), libraries: Bytes(LIBRARIES), threads: THREADS }
    }

    /// What a process costs besides what its tensors reserve.
    pub fn terms(&self, buffers: &Buffers) -> Vec<Term> {
        let measured = |what: &str| format!("{what}, measured 2026-11-21 with libtorch 2.11");
        let term = |name, bytes, provenance| Term { name, bytes, reserved: false, provenance };
        let half = if buffers.half_precision { HALF_KERNELS } else { 0 };
        vec![
            term("libraries", self.libraries.0, "resident memory of the process before its first tensor".into()),
            term("code", CODE, measured("pages of the libraries that a first step touches")),
            term("runtime", RUNTIME, measured("heap of libtorch and of this program, on one thread")),
            term("threads", THREAD * self.threads.saturating_sub(1), measured("each thread from the second on")),
            term("bf16 kernels", half, measured("oneDNN's kernels for bf16 and fp16")),
            term("batches ahead", buffers.ahead, "data.prefetch micro-batches of pixels and masks".into()),
            term(
                "picture cache",
                buffers.cache,
                "data.cache_mib, or the pictures of the run where they are fewer".into(),
            ),
            term(
                "vision features",
                buffers.features,
                "data.cache_vision_mib, or the pictures of the run where they are fewer".into(),
            ),
            term("inputs of recordings", buffers.recordings, "of the buckets beyond the planned one".into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(threads: u64, buffers: Buffers) -> u64 {
        let host = Host { threads, ..Host::of_size(Bytes(0)) };
        host.terms(&buffers).iter().map(|term| term.bytes).sum()
    }

    #[test]
    fn every_thread_and_every_buffer_counts_once() {
        let none = Buffers::default();
        assert_eq!(total(1, none), (346 + 42 + 20) * MIB);
        assert_eq!(total(0, none), total(1, none));
        assert_eq!(total(4, none) - total(1, none), 3 * 12 * MIB);
        let all = Buffers { ahead: 5, cache: 7, features: 11, recordings: 13, half_precision: true };
        assert_eq!(total(1, all) - total(1, none), 36 + 24 * MIB);
    }

    #[test]
    fn a_process_knows_its_own_base() {
        tensor::ledger::install();
        let host = Host::detect();
        assert!(host.threads >= 1 && host.libraries.0 > 50 * MIB, "{host:?}");
    }
}
