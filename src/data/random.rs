//! Named random streams, so that the split, the order and the jitter of one seed do not depend on each other.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

/// The generator of `purpose` for these numbers (seed, epoch, row); equal on every machine.
pub(super) fn stream(purpose: &str, numbers: &[u64]) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(purpose.as_bytes());
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    ChaCha8Rng::from_seed(hash.finalize().into())
}
