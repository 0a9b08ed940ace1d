//! Token embeddings.

use crate::tensor::Tensor;
use crate::tensor::store::{Init, Scope};

/// A table of vectors.
#[derive(Debug)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// Table `[num, dim]`, normal with standard deviation `std`.
    pub fn new(scope: &Scope, num: i64, dim: i64, std: f64) -> Self {
        Self { weight: scope.param("weight", &[num, dim], Init::Normal { std }) }
    }

    /// # Shapes
    /// `ids [...]` (i64, `0..num`) to `[..., dim]` in the stored dtype.
    pub fn forward(&self, ids: &Tensor) -> Tensor {
        Tensor::embedding(&self.weight, ids, -1, false, false)
    }

    /// Width of the vectors.
    pub fn dim(&self) -> i64 {
        self.weight.size()[1]
    }
}
