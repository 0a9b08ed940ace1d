//! Resident memory of a process on the CPU: the memory that does not belong to tensors, and the memory of the host.
//!
//! A plan's `device` column on the CPU is `VmHWM` of `/proc/PID/status`: the memory that the counting allocator
//! reserves (modelled in [`crate::replay::host`]) and the terms below. The first term, resident memory before the
//! first tensor, is the fixed base of comparisons. A process reads its own base, because the page cache decides which
//! pages of the libraries are mapped (a few MiB).
//!
//! Constants were measured on 2026-11-21 with libtorch 2.11 (the CUDA build, whose libraries are loaded on a CPU too),
//! glibc 2.36, one and two threads: `VmHWM` minus base, reserved and buffers. The table is in `benches/RESULTS.md`.
//! They hold because three things are bounded (`ledger.cpp` and [`memory::bound_kernel_caches`]): malloc returns
//! buffers of 128 KiB and more to the system at once, there are two malloc arenas, and oneDNN caches 256 kernels. (It
//! cached 128 when the constants were measured; 256 take 2 MiB more in fp32, 17 in bf16.) Without the bounds, equal
//! runs differed by 25 MiB and bf16 runs grew by 1 MiB per step.
//!
//! Not modelled: weights that are read from mapped files (their pages are released after reading), images that are
//! being decoded.

use super::device_terms::Term;
use super::dry_run::Buffers;
use super::reading::DeviceReading;
use crate::tensor::{self, memory};
use crate::units::Bytes;

const MIB: u64 = 1 << 20;

/// Resident memory of a process with libtorch before its first tensor, for hosts other than this one.
const LIBRARIES: u64 = 346 * MIB;
/// Library pages that planning and a first step load: `RssFile` grows from 168 to 210 MiB.
const CODE: u64 = 42 * MIB;
/// Malloc heap and anonymous pages of operators, the autograd graph, the tokenizer, kernels, stacks; rounding of small
/// blocks.
const RUNTIME: u64 = 20 * MIB;
/// Additional memory for each thread from the second on.
const THREAD: u64 = 12 * MIB;
/// Additional memory of oneDNN's kernels for bf16 and fp16.
const HALF_KERNELS: u64 = 24 * MIB;
/// Number of threads assumed for hosts other than this one.
const THREADS: u64 = 2;

/// The memory and threads of a host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Memory that a new process can use without swapping.
    pub available: Bytes,
    /// Origin of that number.
    pub note: String,
    /// Resident memory of a process before its first tensor.
    pub libraries: Bytes,
    /// Number of compute threads.
    pub num_threads: u64,
    /// What `prsmed calibrate` measured on this CPU, if it did.
    pub reading: Option<Box<DeviceReading>>,
    /// Processes of this host that train together and share its memory.
    pub num_ranks: usize,
    /// Number of this process among them, from 0.
    pub rank: usize,
}

impl Host {
    /// This machine.
    pub fn detect() -> Self {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let available = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let kib = available.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        let available = kib.map_or(u64::MAX >> 1, |kib| kib << 10);
        Self {
            note: "available now".into(),
            libraries: Some(memory::resident_at_start()).filter(|bytes| bytes.0 > 0).unwrap_or(Bytes(LIBRARIES)),
            num_threads: tensor::num_threads(),
            ..Self::of_size(Bytes(available))
        }
    }

    /// A host that offers `available` bytes.
    pub fn of_size(available: Bytes) -> Self {
        let (note, libraries) = ("as given".into(), Bytes(LIBRARIES));
        Self { available, note, libraries, num_threads: THREADS, reading: None, num_ranks: 1, rank: 0 }
    }

    /// Memory of a process in addition to what its tensors reserve.
    pub fn terms(&self, buffers: &Buffers) -> Vec<Term> {
        let measured = |what: &str| format!("{what}, measured 2026-11-21 with libtorch 2.11");
        let term = |name, bytes, provenance| Term { name, bytes, reserved: false, provenance };
        let half = if buffers.half_precision { HALF_KERNELS } else { 0 };
        vec![
            term("libraries", self.libraries.0, "resident memory of the process before its first tensor".into()),
            term("code", CODE, measured("pages of the libraries that a first step touches")),
            term("runtime", RUNTIME, measured("heap of libtorch and of this program, on one thread")),
            term("threads", THREAD * self.num_threads.saturating_sub(1), measured("each thread from the second on")),
            term("bf16 kernels", half, measured("oneDNN's kernels for bf16 and fp16")),
            term("prefetched batches", buffers.prefetched, "data.prefetch micro-batches of pixels and masks".into()),
            term("image cache", buffers.cache, "data.cache_mib, or less if the run has fewer images".into()),
            term(
                "vision feature cache",
                buffers.features,
                "data.cache_vision_mib, or less if the run has fewer images".into(),
            ),
            term("CUDA graph inputs", buffers.graph_inputs, "fixed inputs of graphs beyond the planned one".into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(threads: u64, buffers: Buffers) -> u64 {
        let host = Host { num_threads: threads, ..Host::of_size(Bytes(0)) };
        host.terms(&buffers).iter().map(|term| term.bytes).sum()
    }

    #[test]
    fn every_thread_and_every_buffer_is_counted_once() {
        let none = Buffers::default();
        assert_eq!(total(1, none), (346 + 42 + 20) * MIB);
        assert_eq!(total(0, none), total(1, none));
        assert_eq!(total(4, none) - total(1, none), 3 * 12 * MIB);
        let all = Buffers { prefetched: 5, cache: 7, features: 11, graph_inputs: 13, half_precision: true };
        assert_eq!(total(1, all) - total(1, none), 36 + 24 * MIB);
    }

    #[test]
    fn detection_reads_threads_and_resident_memory_of_this_process() {
        tensor::ledger::install();
        let host = Host::detect();
        assert!(host.num_threads >= 1 && host.libraries.0 > 50 * MIB, "{host:?}");
    }
}
