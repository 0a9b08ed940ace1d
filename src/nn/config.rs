//! Settings of low-rank adapters (`lora.*`).

use crate::setting::settings;
use std::ops::Bound::{Excluded, Unbounded};

settings! {
    /// Low-rank adapters (LoRA) of the language model (`lora.*`).
    #[derive(Copy)]
    pub struct LoraConfig in "lora" {
        /// Rank r. A model without adapters (`prsmed merge`) has rank 0.
        rank: i64 = 16, results(Changes), resume(Fixed), range(1.0..),
            memory("adapters, their gradients and their optimizer state grow with it");
        /// Scale numerator: the output of an adapter is multiplied by alpha / r.
        alpha: f64 = 16.0, results(Changes), resume(Fixed), range((Excluded(0.0), Unbounded));
        /// Dropout on the input of an adapter in training.
        dropout: f64 = 0.05, results(Changes), resume(Fixed), range(0.0..1.0);
    }
}
