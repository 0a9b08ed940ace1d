//! Token embedding.

use crate::tensor::Tensor;
use crate::tensor::store::{Init, VarPath};

/// Embedding table.
#[derive(Debug)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// A table `[num, dim]`, initialised by a normal distribution with standard deviation `std`.
    pub fn new(vs: &VarPath, num: i64, dim: i64, std: f64) -> Self {
        Self { weight: vs.param("weight", &[num, dim], Init::Normal { std }) }
    }

    /// The table.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// # Shapes
    /// `ids [...]` (i64, `0..num`) to `[..., dim]` in the stored dtype.
    pub fn forward(&self, ids: &Tensor) -> Tensor {
        Tensor::embedding(&self.weight, ids, -1, false, false)
    }
}
