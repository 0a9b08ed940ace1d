//! A micro-batch whose pass can be captured.

use crate::Loss;
use prsmed_base::units::Bytes;
use prsmed_base::{Error, Result};
use prsmed_tensor::{Tensor, kind_bytes, no_grad};

/// Key of a graph: sizes that the kernels of a pass depend on, and everything else that is constant in a graph.
pub type Bucket = Vec<i64>;

/// A micro-batch whose pass can be captured.
pub struct Capturable<'a> {
    /// Passes of one bucket start the same kernels on tensors of the same shapes.
    pub bucket: Bucket,
    /// Description of the bucket: `2 sequences of 192 tokens`.
    pub label: String,
    /// Passes of one family give gradients to the same parameters.
    pub family: u64,
    /// Every tensor that `loss` reads besides weights and constants, on the device, in an order that depends
    /// only on the bucket.
    pub inputs: Vec<Tensor>,
    /// The loss of `inputs`: reads them whenever it is called, and nothing else that changes.
    pub loss: Box<dyn Fn() -> Result<Loss> + 'a>,
}

impl std::fmt::Debug for Capturable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capturable").field("bucket", &self.bucket).field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Capturable<'_> {
    /// Bytes of the inputs, which a graph holds in addition to its pool.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.inputs.iter().map(|input| input.numel() as u64 * kind_bytes(input.kind())).sum())
    }

    /// Copies the inputs of `other` over these.
    pub(super) fn copy_from(&self, other: &Capturable) -> Result<()> {
        let sizes = |batch: &Capturable| batch.inputs.iter().map(|t| (t.size(), t.kind())).collect::<Vec<_>>();
        if sizes(self) != sizes(other) {
            let reason = format!("micro-batches of bucket {:?} have inputs of different shapes", self.bucket);
            return Err(Error::Shape { reason });
        }
        no_grad(|| self.inputs.iter().zip(&other.inputs).for_each(|(to, from)| to.shallow_clone().copy_(from)));
        Ok(())
    }
}
