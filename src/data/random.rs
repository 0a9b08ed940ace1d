//! Named random streams. The streams of the split, the sampler and the augmentation of one seed are independent.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

/// Random generator for a purpose and numbers such as seed, epoch and row; the same on every machine.
pub(super) fn stream(purpose: &str, numbers: &[u64]) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(purpose.as_bytes());
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    ChaCha8Rng::from_seed(hash.finalize().into())
}
