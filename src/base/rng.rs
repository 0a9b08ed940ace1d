//! Random streams that do not depend on libtorch.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

/// An independent stream for `(seed, purpose, indices)`: the same on every machine and for every thread count.
pub fn stream(seed: u64, purpose: &str, indices: &[u64]) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(purpose.as_bytes());
    for index in indices {
        hash.update(index.to_le_bytes());
    }
    ChaCha8Rng::from_seed(hash.finalize().into())
}
