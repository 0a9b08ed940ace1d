//! Predicted time in which the GPUs of a machine exchange data. They form a ring (as in NCCL) of `n` GPUs, and each
//! sends over its [`Link`]:
//!
//! | what | sent |
//! |---|---|
//! | gradients of `S` bytes, `train.zero_stage=0` | `2 (n - 1) / n S`, once a step |
//! | stage 1 | `S` to their owners and `S` of new weights back, once a step |
//! | stage 2 | the same, but gradients after each micro-batch |
//! | divided layers of `G` bytes | `(n - 1) / n G` in each forward and backward pass, one layer ahead |
//!
//! Gradients count in full, although most of them are sent during the backward pass. Not modelled: latencies (milliseconds
//! of a step), GPUs that wait for the slowest one, and kernels that slow each other down.
//! `docs/concepts/scaling.md` has the sources. **Nothing here was measured on several GPUs.**

use crate::units::Bytes;

/// Connection of a GPU with the others of its machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Name for the user.
    pub name: &'static str,
    /// Bandwidth of a ring as nccl-tests reports it, in bytes per second and direction.
    pub bytes_per_s: f64,
}

/// Gradients that processes add.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AddedGradients {
    /// Size of all. Updated weights have the same.
    pub bytes: Bytes,
    /// `train.zero_stage`.
    pub zero_stage: u64,
}

impl Link {
    /// Seconds until each of `ranks` GPUs has all of `bytes`, of which each has an equal part.
    pub fn collect_seconds(&self, bytes: Bytes, ranks: usize) -> f64 {
        share(ranks) * self.seconds(bytes)
    }

    /// Seconds that a step of `micro_batches` on each of `ranks` GPUs needs for gradients and updated weights.
    pub fn reduce_seconds(&self, gradients: AddedGradients, micro_batches: usize, ranks: usize) -> f64 {
        let once = self.seconds(gradients.bytes);
        match gradients.zero_stage {
            _ if ranks < 2 => 0.0,
            0 => 2.0 * share(ranks) * once,
            1 => 2.0 * once,
            _ => (micro_batches as f64 + 1.0) * once,
        }
    }

    fn seconds(&self, bytes: Bytes) -> f64 {
        bytes.0 as f64 / self.bytes_per_s
    }
}

/// Share of the bytes that the other GPUs have.
fn share(ranks: usize) -> f64 {
    1.0 - 1.0 / ranks.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_sends_what_its_operations_need() {
        let link = Link { name: "a link", bytes_per_s: 1e9 };
        let of = |zero_stage, ranks| {
            link.reduce_seconds(AddedGradients { bytes: Bytes(2_000_000_000), zero_stage }, 3, ranks)
        };
        assert_eq!([0, 1, 2].map(|stage| of(stage, 1)), [0.0; 3], "one GPU sends nothing");
        assert_eq!([0, 1, 2].map(|stage| of(stage, 4)), [3.0, 4.0, 8.0]);
        assert_eq!([1, 2, 4].map(|ranks| link.collect_seconds(Bytes(4_000_000_000), ranks)), [0.0, 2.0, 3.0]);
    }
}
