//! Settings of the training engine (`train.*`).

use super::precision::Precision;
use prsmed_base::setting::settings;
use prsmed_base::{Error, Result};
pub use prsmed_tensor::kernels::Switch;
use prsmed_tensor::{self, kernels};
use std::fmt;

settings! {
    /// Settings of the training engine (`train.*`).
    pub struct TrainConfig in "train" {
        /// Images in one forward and backward pass, each with up to `data.questions_per_image` questions. The effective
        /// batch is `micro_batch * accumulation`; only that product affects training, up to rounding.
        micro_batch: usize = 1, results(Changes), resume(Free), range(1.0..), memory("activations grow with it");
        /// Micro-batches per optimizer step.
        accumulation: usize = 3, results(Changes), resume(Free), range(1.0..);
        /// Passes over the training rows.
        epochs: u64 = 20, results(Changes), resume(Warn), range(1.0..);
        /// Stop after this many optimizer steps; 0 = no limit. The learning rate ends its schedule there.
        max_steps: u64 = 0, results(Changes), resume(Warn);
        /// Save `last/` every so many optimizer steps; 0 = after each epoch only.
        checkpoint_every_steps: u64 = 500, results(Same), resume(Free);
        /// Validate every so many epochs; 0 = never. The best validated weights are saved in `best/`.
        validate_every_epochs: u64 = 1, results(Same), resume(Free);
        /// Stop early after this many validations without improvement; 0 = never. Scores of generated samples are
        /// noisy. For them, a linear trend is fitted to this many scores (at least 8), and training stops once the upper
        /// 95 % bound of the trend is below the smallest detectable difference of two scores.
        patience: u64 = 0, results(Changes), resume(Free);
        /// Peak learning rate.
        learning_rate: f64 = 1e-4, results(Changes), resume(Warn), range(0.0..);
        /// Learning rate at the end of the cosine schedule.
        min_learning_rate: f64 = 1e-6, results(Changes), resume(Warn), range(0.0..);
        /// Part of all steps in which the learning rate warms up.
        warmup_frac: f64 = 0.03, results(Changes), resume(Warn), range(0.0..1.0);
        /// Decoupled weight decay of AdamW.
        weight_decay: f64 = 1e-5, results(Changes), resume(Warn), range(0.0..);
        /// Decay rate of AdamW's first moment.
        beta1: f64 = 0.9, results(Changes), resume(Warn), range(0.0..1.0);
        /// Decay rate of AdamW's second moment.
        beta2: f64 = 0.999, results(Changes), resume(Warn), range(0.0..1.0);
        /// Epsilon of AdamW.
        epsilon: f64 = 1e-6, results(Changes), resume(Warn);
        /// Largest norm of all gradients together; larger gradients are scaled down. 0 = no clipping.
        clip_norm: f64 = 1.0, results(Changes), resume(Warn), range(0.0..);
        /// Steps in a row that are skipped because their loss or gradients are NaN or infinite; one more ends the run. 0 =
        /// the first one ends it. fp16 overflows that only lower the loss scale do not count.
        max_skipped_steps: u64 = 2, results(Same), resume(Free);
        /// Seed of all random numbers.
        seed: u64 = 0, results(Changes), resume(Fixed);
        /// Dtype of frozen weights and of arithmetic. Trained weights are fp32. Loss scaling is used with fp16.
        precision: Precision = Precision::Bf16, results(Changes), resume(Warn),
            memory("frozen weights and activations are twice as large in fp32"),
            saves_at("bf16", "frozen weights and arithmetic in bf16");
        /// Lets a GPU round the inputs of fp32 convolutions and matrix products to TF32, which is faster and has the 10-bit
        /// mantissas of fp16. Arithmetic in bf16 and fp16 stays as it is.
        tf32: bool = false, results(Changes), resume(Warn);
        /// Adds numbers in a fixed order on a GPU, so that the same run gives the same bits, also after a resume. Slower:
        /// questions that share a sequence are separated by a mask, and `auto` of `train.graph` and
        /// `train.fused_kernels`, which times both ways, means `off`. On a CPU the number of threads fixes the order, and it
        /// then does not follow the load of the machine.
        deterministic: bool = false, results(Rounding), resume(Free),
            memory("gradients of attention are kept in several parts before they are added");
        /// Activation checkpointing of the language model: `none` keeps all activations, `full` recomputes every layer
        /// in the backward pass, a number recomputes that many first layers.
        checkpointing: FirstLayers = FirstLayers::Full, results(Same), resume(Free),
            memory("recomputed layers keep only their inputs; a step takes longer"),
            saves_at("full", "recomputes the language model's layers"),
            searched(3, &[("none", ""), ("full", "checkpointing of {}")]);
        /// Activation checkpointing of the image encoder: as `train.checkpointing`, the blocks with the largest maps
        /// first.
        checkpoint_encoder: FirstLayers = FirstLayers::Full, results(Same), resume(Free),
            memory("recomputed blocks keep only their inputs; a step takes longer"),
            saves_at("full", "recomputes the image encoder's blocks"),
            searched(2, &[("none", ""), ("full", "checkpointing of encoder")]);
        /// Activation checkpointing of the whole mask decoder.
        checkpoint_decoder: bool = false, results(Rounding), resume(Free),
            memory("a recomputed decoder keeps only its inputs; a step takes longer"),
            saves_at("true", "recomputes the mask decoder"),
            searched(6, &[("false", ""), ("true", "checkpointing of decoder")]);
        /// `adamw` keeps its state in fp32. `adamw8bit` keeps the state of large tensors in 8 bits.
        optimizer: OptimizerKind = OptimizerKind::AdamW, results(Changes), resume(Warn),
            memory("optimizer state: 8 bytes per trained weight in fp32, about 2 in 8 bits"),
            saves_at("adamw8bit", "8-bit optimizer state"),
            searched(9, &[("adamw", ""), ("adamw8bit", "8-bit optimizer state")]);
        /// Keep the optimizer state in host memory and copy it to the GPU piece by piece in each step. No effect on the
        /// CPU.
        offload_optimizer: bool = false, results(Same), resume(Free),
            memory("optimizer state moves from the GPU to the host"),
            saves_at("true", "copies the optimizer state to the GPU in each step"),
            searched(7, &[("false", ""), ("true", "optimizer state offloaded to the CPU")]);
        /// Keep the fp32 trained weights, their gradients and the optimizer state in host memory, and update them there
        /// with the CPU. The GPU has the trained weights in `train.precision` and no whole set of gradients. For
        /// `augment finetune`; needs bf16 or fp16.
        offload_weights: bool = false, results(Rounding), resume(Free),
            memory("2 bytes per trained weight on the GPU instead of up to 16; a step waits for copies and for the CPU");
        /// Update each parameter as soon as its gradient is complete, and free the gradient. Needs
        /// `train.accumulation=1`, `train.clip_norm=0` and another precision than fp16. A gradient that is not finite
        /// ends the run, because some weights were already updated in that step; `last/` keeps the checkpoint before
        /// it.
        step_in_backward: bool = false, results(Same), resume(Free), memory("gradients do not exist all at once"),
            searched(1, &[("false", ""), ("true", "updates in the backward pass")]);
        /// Capture a step as a CUDA graph and replay it: `on`, `off`, or `auto` (use it if the first steps are faster
        /// with it). GPUs only.
        graph: Switch = Switch::Off, results(Rounding), resume(Free), memory("captured steps keep memory of their own");
        /// Use custom CUDA kernels instead of chains of libtorch's: `on`, `off`, or `auto` (where they are measured to
        /// be faster). GPUs only.
        fused_kernels: Switch = Switch::Off, results(Rounding), resume(Free);
        /// What several processes divide among them (stage of ZeRO): 0 nothing, 1 the optimizer state, 2 also the
        /// gradients. No effect on one process.
        zero_stage: u64 = 0, results(Rounding), resume(Free), range(0.0..=2.0),
            memory("optimizer state, and with 2 gradients, are divided by the number of processes");
        /// Size in MiB of the groups of gradients that several processes sum at once, during the backward pass.
        reduce_bucket_mib: u64 = 25, results(Rounding), resume(Free), range(1.0..);
        /// Decay of the exponential moving average (EMA) of the weights, used for validation and `best/`; 0 = no
        /// average.
        ema_decay: f64 = 0.0, results(Changes), resume(Warn), range(0.0..1.0),
            memory("one more fp32 copy of the trained weights"),
            saves_at("0", "no moving average for validation and `best/`");
    }
}

impl TrainConfig {
    /// True if steps are captured as CUDA graphs. They need gradients, which `step_in_backward` frees.
    pub fn graph_switch(&self) -> Switch {
        if self.step_in_backward || self.offload_weights { Switch::Off } else { self.untimed(self.graph) }
    }

    /// Sets what holds for a whole process: custom kernels, the rounding of fp32 and the order of sums on a GPU.
    ///
    /// # Panics
    /// As [`prsmed_tensor::allow_tf32`].
    pub fn prepare_process(&self) {
        kernels::set_mode(self.untimed(self.fused_kernels));
        prsmed_tensor::allow_tf32(self.tf32);
        prsmed_tensor::set_deterministic(self.deterministic);
    }

    /// `auto` takes what was faster in a few steps, and that can differ from run to run.
    fn untimed(&self, switch: Switch) -> Switch {
        if self.deterministic && switch == Switch::Auto { Switch::Off } else { switch }
    }

    /// Makes the micro-batches smaller, and more of them, until `ranks` processes have equally many or, if that is not
    /// possible, one each. The effective batch stays. Returns what was changed or should be known.
    ///
    /// # Errors
    /// [`Error::Config`] if the effective batch has fewer images than there are processes.
    pub fn divide_among(&mut self, ranks: usize) -> Result<Option<String>> {
        let whole = self.micro_batch * self.accumulation;
        if ranks <= 1 || self.accumulation.is_multiple_of(ranks) {
            return Ok(None);
        }
        let smaller = |wanted: &dyn Fn(usize) -> bool| {
            (1..=self.micro_batch).rev().find(|micro| whole.is_multiple_of(*micro) && wanted(whole / micro))
        };
        let Some(micro) = smaller(&|count| count.is_multiple_of(ranks)).or_else(|| smaller(&|count| count >= ranks))
        else {
            let reason = format!("a step has {whole} images, too few for {ranks} processes");
            let hint = format!(
                "use at most {whole} processes, or a larger effective batch: the setting `train.accumulation={}`",
                ranks.div_ceil(self.micro_batch).next_multiple_of(ranks)
            );
            return Err(Error::config("train.accumulation", reason, hint));
        };
        (self.micro_batch, self.accumulation) = (micro, whole / micro);
        let count = self.accumulation;
        let uneven = match count % ranks {
            0 => String::new(),
            rest => format!("; {} of them wait in a part of each step, because {count} is no multiple", ranks - rest),
        };
        Ok(Some(format!("{ranks} processes: {count} micro-batches of {micro} in each step{uneven}")))
    }

    /// Refuses settings that cannot be used together. `step_in_backward` updates parameters one at a time, so options
    /// that need all gradients at once exclude it.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    pub fn check(&self) -> Result<()> {
        if self.offload_weights {
            let conflicts = [
                (
                    self.precision == Precision::Fp32,
                    "saves memory with 16-bit weights on the GPU",
                    "train.precision=bf16",
                ),
                (self.offload_optimizer, "includes `train.offload_optimizer`", "train.offload_optimizer=false"),
                (self.step_in_backward, "frees gradients in the backward pass itself", "train.step_in_backward=false"),
            ];
            if let Some((_, reason, remedy)) = conflicts.into_iter().find(|(conflict, ..)| *conflict) {
                let hint = format!("add the setting `{remedy}`, or set it to `false`");
                return Err(Error::config("train.offload_weights", reason, hint));
            }
        }
        let conflicts = [
            (self.accumulation > 1, "accumulation needs the gradients of all micro-batches", "train.accumulation=1"),
            (self.clip_norm > 0.0, "clipping needs the norm of all gradients", "train.clip_norm=0"),
            (
                self.precision == Precision::Fp16,
                "loss scaling of fp16 checks all gradients before the update",
                "train.precision=bf16",
            ),
        ];
        match conflicts.into_iter().find(|(conflict, ..)| self.step_in_backward && *conflict) {
            Some((_, what, remedy)) => {
                let reason = format!("it updates each parameter during the backward pass, but {what}");
                let hint = format!("add the setting `{remedy}`, or set it to `false`");
                Err(Error::config("train.step_in_backward", reason, hint))
            }
            None => Ok(()),
        }
    }
}

/// Optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// State in fp32: 8 bytes per trained weight.
    AdamW,
    /// State of tensors with 4096 elements or more in 8 bits, one scale per 256 (Dettmers et al. 2022).
    AdamW8bit,
}

/// The first layers of a part, to which a setting applies: `none`, `full` (all), or their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case", expecting = "expected `none`, `full` or a number of layers, 0 or more")]
pub enum FirstLayers {
    /// No layer.
    None,
    /// Every layer.
    Full,
    /// This many first layers.
    #[serde(untagged)]
    Count(usize),
}

impl std::str::FromStr for FirstLayers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "full" => Ok(Self::Full),
            number => number.parse().map(Self::Count).map_err(|_| "use `none`, `full` or a number of layers".into()),
        }
    }
}

impl fmt::Display for FirstLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Full => f.write_str("full"),
            Self::Count(layers) => write!(f, "{layers}"),
        }
    }
}

impl FirstLayers {
    /// Number of these layers; more than any part has for all of them.
    pub fn count(self) -> usize {
        match self {
            Self::None => 0,
            Self::Count(layers) => layers,
            Self::Full => usize::MAX,
        }
    }
}
