//! Device memory of a process that does not belong to tensors (CUDA context, libraries, workspaces), as named rows with
//! their sources.
//!
//! Without a reading ([`super::reading`]) nothing here was measured by this project. Rows with [`Term::reserved`] come from libtorch's caching allocator and
//! count in its `reserved` figure: replay them as allocations (the cuBLAS workspace before Hopper, 8.125 MiB, opens a
//! segment of 20 MiB) or add them to `reserved`. The other rows lie outside the allocator.

use super::gpus::{GpuBudget, MIB, gpus_of_size};
use super::reading::DeviceReading;
use serde::Serialize;

/// A named amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Term {
    /// Name, as plans print it.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Whether it comes from the caching allocator and counts in `reserved`.
    pub reserved: bool,
    /// Source of the number.
    pub provenance: String,
}

/// Device usage of a process, on which the rows depend in addition to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Threads that multiply matrices; each has its own cuBLAS handle. Forward and autograd's backward are two.
    pub num_blas_threads: u64,
    /// True if cuBLAS has the workspaces that fix the order of its sums.
    pub deterministic: bool,
    /// Largest convolution workspace of cuDNN, allowed or measured, bytes; 0 without convolutions.
    pub cudnn_workspace: u64,
    /// High-water mark of the private pools of CUDA graphs, bytes; 0 without graphs.
    pub graph_pool: u64,
    /// Memory that other processes use on the GPU, bytes.
    pub other_processes: u64,
    /// Processes that train together, each with a GPU like this one.
    pub num_ranks: usize,
    /// Number of this process among them, from 0.
    pub rank: usize,
}

impl Default for DeviceUsage {
    fn default() -> Self {
        Self {
            num_blas_threads: 2,
            deterministic: false,
            cudnn_workspace: CUDNN_ALLOWANCE_MIB * MIB,
            graph_pool: 0,
            other_processes: 0,
            num_ranks: 1,
            rank: 0,
        }
    }
}

/// CUDA context of GPUs without a published measurement: that of the L4.
const OTHER_CONTEXT_MIB: u64 = 694;
/// Allowance for cuDNN's convolution workspaces; no source and no measurement gives it for these networks.
const CUDNN_ALLOWANCE_MIB: u64 = 128;
/// Code and state of cuBLAS, cuDNN and libtorch's kernels in a process with one GPU.
const LIBRARIES_MIB: u64 = 436;
/// cuBLASLt's workspace where it is not shared with cuBLAS.
const CUBLASLT_BYTES: u64 = MIB;

/// Bytes of libtorch's default cuBLAS workspace (one for each handle and stream) for a compute capability.
///
/// `:4096:2:16:8` before Hopper, 32 MiB for Hopper and later: `getChosenWorkspaceSize` in aten's
/// `CublasHandlePool.cpp`.
pub fn cublas_workspace(capability: (u32, u32)) -> u64 {
    if capability.0 >= 9 { 32 * MIB } else { (4096 * 2 + 16 * 8) * 1024 }
}

/// Bytes of the cuBLAS workspace `:4096:8`, with which the order of sums is fixed.
const DETERMINISTIC_CUBLAS: u64 = 32 * MIB;

/// Memory of a device outside of tensors, in the order in which a run allocates it.
pub fn device_terms(budget: &GpuBudget, usage: &DeviceUsage) -> Vec<Term> {
    let row = |name, bytes, reserved, provenance: &str| Term { name, bytes, reserved, provenance: provenance.into() };
    let (context, context_source) = context(budget);
    let handles = usage.num_blas_threads;
    let mut terms = vec![
        row("CUDA context", context, false, &context_source),
        row(
            "libraries",
            LIBRARIES_MIB * MIB,
            false,
            "code of cuBLAS, cuDNN and kernels: the 436 MiB that AgileRL arena 1.29.0 charges to a trainer with one \
             GPU; not measured here",
        ),
        row(
            "cuBLAS workspaces",
            handles * if usage.deterministic { DETERMINISTIC_CUBLAS } else { cublas_workspace(budget.capability) },
            true,
            "8.125 MiB before Hopper, else and with `train.deterministic` 32 MiB, for each handle and stream, from the \
             caching allocator: source code of aten's CublasHandlePool.cpp; for Blackwell some versions of early 2026 \
             still take 8.125 MiB. \
             One handle for each thread (forward, backward): not measured here",
        ),
        row(
            "cuBLASLt workspaces",
            handles * CUBLASLT_BYTES,
            true,
            "1 MiB for each handle and stream: source code of aten's CublasHandlePool.cpp; 0 where it shares cuBLAS's \
             workspace; whether libtorch 2.11 does was not measured here",
        ),
        row(
            "cuDNN workspace",
            usage.cudnn_workspace,
            true,
            "an allowance, not measured: cuDNN takes what the chosen convolution asks for; with benchmarking on up to \
             the largest free block, capped by CUDNN_CONV_WSCAP_DBG (MiB)",
        ),
        row(
            "CUDA graph pool",
            usage.graph_pool,
            true,
            "activations and workspaces of a step in their own memory pool, from the model of the caching allocator \
             (`replay::graph_pool`); 0 without CUDA graphs; not measured here",
        ),
        row(
            "NCCL",
            nccl(usage.num_ranks),
            false,
            "buffers of the communicator: 544 MiB for two GPUs and 688 MiB for more, as reported for A100s with NVLink \
             (600 MiB on A100 SXM and 91 MiB on L4 in another report); not measured here",
        ),
        row("display and other processes", usage.other_processes, false, "memory of other processes, as given"),
    ];
    if let Some(reading) = &budget.reading {
        replace_by_measured(&mut terms, reading, usage);
    }
    terms
}

/// Buffers of a communicator of `ranks` GPUs, bytes.
fn nccl(ranks: usize) -> u64 {
    match ranks {
        0 | 1 => 0,
        2 => 544 * MIB,
        _ => 688 * MIB,
    }
}

/// Replaces the bytes of `terms` that `reading` has measured.
fn replace_by_measured(terms: &mut [Term], reading: &DeviceReading, usage: &DeviceUsage) {
    let (outside, products) = (reading.outside(), reading.product_workspaces());
    for term in terms {
        let bytes = match term.name {
            "CUDA context" => outside.map(|(context, _)| context),
            "libraries" => outside.map(|(_, libraries)| libraries),
            "cuBLAS workspaces" => products,
            // the measured bytes contain them
            "cuBLASLt workspaces" => products.map(|_| 0),
            // a calibration tries a few convolutions only, so it may raise the allowance and not lower it
            "cuDNN workspace" if usage.cudnn_workspace > 0 => {
                reading.convolution_workspace().filter(|bytes| *bytes > term.bytes)
            }
            _ => None,
        };
        if let Some(bytes) = bytes {
            term.bytes = bytes;
            term.provenance = reading.source();
        }
    }
}

/// The CUDA context of the GPU; for a bare size, the largest one among GPUs of that size.
fn context(budget: &GpuBudget) -> (u64, String) {
    let gpus = budget.gpu.map_or_else(|| gpus_of_size(budget.marketing_bytes), |gpu| vec![gpu]);
    let known = gpus.iter().filter_map(|gpu| Some((gpu.context_mib?, gpu))).max_by_key(|(mib, _)| *mib);
    match known {
        Some((mib, gpu)) => {
            let source = gpu.context_source.as_deref().unwrap_or_default();
            (mib * MIB, format!("{} ({source}); not measured here", gpu.name))
        }
        None => (OTHER_CONTEXT_MIB * MIB, "that of the L4, none is published for this GPU; not measured here".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gpus::find;
    use crate::plan::reading;

    fn bytes(gpu: &str, name: &str, usage: &DeviceUsage) -> u64 {
        let terms = device_terms(&find(gpu).unwrap(), usage);
        terms.iter().find(|term| term.name == name).unwrap().bytes
    }

    #[test]
    fn workspaces_depend_on_the_architecture() {
        let usage = DeviceUsage::default();
        assert_eq!(cublas_workspace((8, 9)), 8_519_680);
        assert_eq!(bytes("RTX 4090", "cuBLAS workspaces", &usage), 2 * 8_519_680);
        assert_eq!(bytes("H100", "cuBLAS workspaces", &usage), 64 * MIB);
        assert_eq!(bytes("RTX 5090", "cuBLAS workspaces", &usage), 64 * MIB);
        assert_eq!(bytes("24gb", "cuBLAS workspaces", &usage), 2 * 8_519_680);
        assert_eq!(bytes("80gb", "cuBLAS workspaces", &usage), 64 * MIB, "the largest of A100 and H100");
        assert_eq!(bytes("A100", "cuBLASLt workspaces", &usage), 2 * MIB);
        let fixed = DeviceUsage { deterministic: true, ..usage };
        assert_eq!(bytes("RTX 4090", "cuBLAS workspaces", &fixed), 64 * MIB);
    }

    #[test]
    fn the_context_is_that_of_the_gpu_or_the_largest_of_its_size() {
        let usage = DeviceUsage::default();
        assert_eq!(bytes("L4", "CUDA context", &usage), 694 * MIB);
        assert_eq!(bytes("80gb", "CUDA context", &usage), 1268 * MIB);
        assert_eq!(bytes("8gb", "CUDA context", &usage), 694 * MIB);
        let terms = device_terms(&find("8gb").unwrap(), &usage);
        assert!(terms[0].provenance.contains("none is published"), "{}", terms[0].provenance);
    }

    #[test]
    fn unused_features_take_no_memory() {
        for name in ["CUDA graph pool", "display and other processes"] {
            assert_eq!(bytes("24gb", name, &DeviceUsage::default()), 0, "{name}");
        }
        let usage = DeviceUsage { other_processes: MIB, graph_pool: 7, ..DeviceUsage::default() };
        assert_eq!(bytes("24gb", "display and other processes", &usage), MIB);
        assert_eq!(bytes("24gb", "CUDA graph pool", &usage), 7);
    }

    #[test]
    fn measured_bytes_replace_assumptions_and_name_their_source() {
        let (reading, usage) = (reading::tests::gpu(), DeviceUsage::default());
        let assumed = device_terms(&find("H100").unwrap(), &usage);
        let mut terms = assumed.clone();
        replace_by_measured(&mut terms, &reading, &usage);
        let mib = |name: &str| terms.iter().find(|term| term.name == name).unwrap().bytes / MIB;
        assert_eq!(mib("CUDA context"), 500);
        assert_eq!(mib("libraries"), 900 - 500);
        assert_eq!(mib("cuBLAS workspaces"), 65);
        assert_eq!(mib("cuBLASLt workspaces"), 0);
        assert_eq!(mib("cuDNN workspace"), 128, "the allowance, which is larger than the 30 MiB measured");
        let source = "measured on NVIDIA H200 on 2026-11-22 (`prsmed calibrate`)";
        assert!(terms[..4].iter().all(|term| term.provenance == source));
        assert_eq!(terms[4..], assumed[4..], "what it did not measure stays");
        let small = DeviceUsage { cudnn_workspace: MIB, ..usage };
        let mut terms = device_terms(&find("H100").unwrap(), &small);
        replace_by_measured(&mut terms, &reading, &small);
        assert_eq!(terms[4].bytes, 30 * MIB, "a larger workspace than the allowance");
        let without = DeviceUsage { cudnn_workspace: 0, ..usage };
        let mut terms = device_terms(&find("H100").unwrap(), &without);
        replace_by_measured(&mut terms, &reading, &without);
        assert_eq!(terms[4].bytes, 0, "a job without convolutions needs no workspace for them");
    }

    #[test]
    fn a_driver_that_reports_no_memory_leaves_the_assumptions() {
        let (mut reading, usage) = (reading::tests::gpu(), DeviceUsage::default());
        reading.memory.iter_mut().for_each(|level| level.used = None);
        let assumed = device_terms(&find("H100").unwrap(), &usage);
        let mut terms = assumed.clone();
        replace_by_measured(&mut terms, &reading, &usage);
        assert_eq!(terms[..2], assumed[..2]);
        assert_eq!(terms[2].bytes, 65 * MIB);
    }
}
