//! What a process costs on a device besides the tensors of its plan, as named rows with their provenance.
//!
//! Nothing here was measured by this project. Rows whose memory comes from libtorch's caching allocator
//! ([`Term::reserved`]) are part of its `reserved` figure: replay them as allocations (the cuBLAS workspace before
//! Hopper, 8.125 MiB, opens a segment of 20 MiB) or add them to `reserved`; the other rows lie outside it.

use serde::Serialize;

use crate::plan::cards::{Budget, MIB, Needs, standing_for};

/// One row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Term {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Whether the caching allocator holds it, so that it counts in `reserved`.
    pub reserved: bool,
    /// Where the number comes from.
    pub provenance: String,
}

/// What the rows depend on besides the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Threads that multiply matrices; each has its own cuBLAS handle. Forward and autograd's backward are two.
    pub blas_threads: u64,
    /// CUDA streams that they multiply on.
    pub streams: u64,
    /// Processes that train together, one for each GPU.
    pub gpus: u64,
    /// Largest convolution workspace that cuDNN is allowed or was counted to take, bytes; 0 without convolutions.
    pub cudnn_workspace: u64,
    /// High-water mark of the private pools of CUDA graphs, bytes; 0 without graphs.
    pub graph_pool: u64,
    /// Whether a desktop draws on the card.
    pub display: bool,
    /// What other processes hold on the card, bytes.
    pub other_processes: u64,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            blas_threads: 2,
            streams: 1,
            gpus: 1,
            cudnn_workspace: CUDNN_ALLOWANCE_MIB * MIB,
            graph_pool: 0,
            display: false,
            other_processes: 0,
        }
    }
}

/// Context of cards without a reading of their own: the one of the L4.
const OTHER_CONTEXT_MIB: u64 = 694;
/// Left for what cuDNN takes beside a convolution; no source and no measurement says how much that is for these networks.
const CUDNN_ALLOWANCE_MIB: u64 = 128;
/// Code and state of cuBLAS, cuDNN and libtorch's kernels in a process with one GPU.
const LIBRARIES_MIB: u64 = 436;
/// cuBLASLt's workspace where it is not shared with cuBLAS.
const CUBLASLT_BYTES: u64 = MIB;
/// A desktop without programs: nvidia-smi tables of public logs show 201 to 666 MiB.
const DISPLAY_MIB: u64 = 666;

/// Bytes of libtorch's default cuBLAS workspace (one for each handle and stream) for a compute capability.
///
/// `:4096:2:16:8` before Hopper, 32 MiB from there on: `getChosenWorkspaceSize` in aten's `CublasHandlePool.cpp`.
pub fn cublas_workspace(capability: (u32, u32)) -> u64 {
    if capability.0 >= 9 { 32 * MIB } else { (4096 * 2 + 16 * 8) * 1024 }
}

/// The rows of a device, in the order in which they appear during a run.
pub fn device_terms(budget: &Budget, facts: &Facts) -> Vec<Term> {
    let row = |name, bytes, reserved, provenance: &str| Term { name, bytes, reserved, provenance: provenance.into() };
    let (context, context_source) = context(budget);
    let handles = facts.blas_threads * facts.streams;
    let nccl_mib = match facts.gpus {
        0 | 1 => 0,
        2 => 544,
        _ => 688,
    };
    vec![
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
            handles * cublas_workspace(budget.capability),
            true,
            "8.125 MiB before Hopper, else 32 MiB, for each handle and stream, from the caching allocator: read in \
             aten's CublasHandlePool.cpp; for Blackwell some versions of early 2026 still take 8.125 MiB. One handle \
             for each thread (forward, backward): not measured here",
        ),
        row(
            "cuBLASLt workspaces",
            handles * CUBLASLT_BYTES,
            true,
            "1 MiB for each handle and stream: read in aten's CublasHandlePool.cpp; 0 where it shares cuBLAS's \
             workspace, whether libtorch 2.11 does is not measured here",
        ),
        row(
            "cuDNN workspace",
            facts.cudnn_workspace,
            true,
            "an allowance, not measured: cuDNN takes what the chosen convolution asks for; with benchmarking on up to \
             the largest free block, capped by CUDNN_CONV_WSCAP_DBG (MiB)",
        ),
        row(
            "NCCL buffers",
            nccl_mib * MIB,
            false,
            "0 with one GPU; else 544 MB for two and 688 MB for more A100s with NVLink, nccl issue 964, taken as MiB; \
             not measured here",
        ),
        row(
            "CUDA graph pool",
            facts.graph_pool,
            true,
            "activations and workspaces of a step in a pool of their own, through the model of the caching allocator \
             (`replay::graph_pool`); 0 without graphs; not measured here",
        ),
        row(
            "display and other processes",
            facts.other_processes + if facts.display { DISPLAY_MIB * MIB } else { 0 },
            false,
            "what other processes hold, as given; 666 MiB for a desktop, the largest of four idle ones in public \
             nvidia-smi logs; not measured here",
        ),
    ]
}

/// The context of the card, or the largest one of the cards that a bare size stands for.
fn context(budget: &Budget) -> (u64, String) {
    let cards = budget.card.map_or_else(|| standing_for(budget.marketing_bytes, Needs::default()), |card| vec![card]);
    let known = cards.iter().filter_map(|card| Some((card.context_mib?, card))).max_by_key(|(mib, _)| *mib);
    match known {
        Some((mib, card)) => {
            let source = card.context_source.as_deref().unwrap_or_default();
            (mib * MIB, format!("{} ({source}); not measured here", card.name))
        }
        None => (OTHER_CONTEXT_MIB * MIB, "the L4's, no reading for this card; not measured here".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::cards::find;

    fn bytes(card: &str, name: &str, facts: &Facts) -> u64 {
        let terms = device_terms(&find(card).unwrap(), facts);
        terms.iter().find(|term| term.name == name).unwrap().bytes
    }

    #[test]
    fn workspaces_follow_the_architecture() {
        let facts = Facts::default();
        assert_eq!(cublas_workspace((8, 9)), 8_519_680);
        assert_eq!(bytes("RTX 4090", "cuBLAS workspaces", &facts), 2 * 8_519_680);
        assert_eq!(bytes("H100", "cuBLAS workspaces", &facts), 64 * MIB);
        assert_eq!(bytes("RTX 5090", "cuBLAS workspaces", &facts), 64 * MIB);
        assert_eq!(bytes("24gb", "cuBLAS workspaces", &facts), 2 * 8_519_680);
        assert_eq!(bytes("80gb", "cuBLAS workspaces", &facts), 64 * MIB, "the worst of A100 and H100");
        assert_eq!(bytes("A100", "cuBLASLt workspaces", &Facts { streams: 2, ..facts }), 4 * MIB);
    }

    #[test]
    fn contexts_are_the_card_s_or_the_worst_of_its_size() {
        let facts = Facts::default();
        assert_eq!(bytes("L4", "CUDA context", &facts), 694 * MIB);
        assert_eq!(bytes("80gb", "CUDA context", &facts), 1268 * MIB);
        assert_eq!(bytes("8gb", "CUDA context", &facts), 694 * MIB);
        let terms = device_terms(&find("8gb").unwrap(), &facts);
        assert!(terms[0].provenance.contains("no reading"), "{}", terms[0].provenance);
    }

    #[test]
    fn what_does_not_exist_costs_nothing() {
        for name in ["NCCL buffers", "CUDA graph pool", "display and other processes"] {
            assert_eq!(bytes("24gb", name, &Facts::default()), 0, "{name}");
        }
        let facts = Facts { gpus: 2, display: true, other_processes: MIB, graph_pool: 7, ..Facts::default() };
        assert_eq!(bytes("24gb", "NCCL buffers", &facts), 544 * MIB);
        assert_eq!(bytes("24gb", "display and other processes", &facts), 667 * MIB);
        assert_eq!(bytes("24gb", "CUDA graph pool", &facts), 7);
    }
}
