//! Settings for the tests of this folder.

use super::precision::Precision;
use super::{FirstLayers, TrainConfig};

/// One epoch in fp32 with a high learning rate that falls to zero; everything that can be off is off.
pub(super) fn plain() -> TrainConfig {
    TrainConfig {
        accumulation: 1,
        epochs: 1,
        checkpoint_every_steps: 0,
        validate_every_epochs: 0,
        learning_rate: 1e-2,
        min_learning_rate: 0.0,
        warmup_frac: 0.0,
        weight_decay: 0.0,
        beta2: 0.9,
        clip_norm: 0.0,
        precision: Precision::Fp32,
        checkpointing: FirstLayers::None,
        checkpoint_encoder: FirstLayers::None,
        ..TrainConfig::default()
    }
}

thread_local! {
    /// Makes the engine launch steps before it reads those before, as on a GPU.
    pub static RUN_AHEAD: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}
