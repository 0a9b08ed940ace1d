//! Settings for the tests of this folder.

use super::precision::Precision;
use super::{Checkpointing, OptimizerKind, Switch, TrainConfig};

/// One epoch in fp32 with a high learning rate that falls to zero, and everything that can be off is off.
pub(super) fn plain() -> TrainConfig {
    TrainConfig {
        micro_batch: 1,
        accumulation: 1,
        epochs: 1,
        max_steps: 0,
        checkpoint_every_steps: 0,
        validate_every_epochs: 0,
        patience: 0,
        learning_rate: 1e-2,
        min_learning_rate: 0.0,
        warmup_frac: 0.0,
        weight_decay: 0.0,
        beta1: 0.9,
        beta2: 0.9,
        epsilon: 1e-6,
        clip_norm: 0.0,
        seed: 0,
        precision: Precision::Fp32,
        checkpointing: Checkpointing::None,
        checkpoint_encoder: Checkpointing::None,
        checkpoint_decoder: false,
        optimizer: OptimizerKind::AdamW,
        offload_optimizer: false,
        step_in_backward: false,
        graph: Switch::Off,
        fused_kernels: Switch::Off,
        ema_decay: 0.0,
    }
}
