//! Mixed precision: which dtypes a run uses, and the dynamic loss scaler of fp16 (Micikevicius et al. 2018).
//!
//! Trained weights are stored in fp32 in every mode; frozen weights and the arithmetic are in the chosen dtype.

use prsmed_tensor::{Kind, Tensor};

/// Dtype of frozen weights and arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32 bit everywhere.
    Fp32,
    /// bfloat16: range of fp32, 8 significant bits; no loss scaling needed.
    Bf16,
    /// float16: 11 significant bits, small range; the loss is scaled.
    Fp16,
}

impl Precision {
    /// The libtorch dtype.
    pub fn kind(self) -> Kind {
        match self {
            Self::Fp32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
            Self::Fp16 => Kind::Half,
        }
    }
}

/// Scales the loss so that fp16 gradients neither vanish nor overflow; constant 1 in other precisions.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Scaler {
    scale: f64,
    good_steps: u32,
    dynamic: bool,
}

impl Scaler {
    const START: f64 = 65536.0;
    const GROW_AFTER: u32 = 2000;

    /// The scaler of a precision.
    pub fn new(precision: Precision) -> Self {
        let dynamic = precision == Precision::Fp16;
        Self { scale: if dynamic { Self::START } else { 1.0 }, good_steps: 0, dynamic }
    }

    /// The scaler of a precision with the smallest scale, 1. A dry run uses it: an overflow cannot lower this scale,
    /// and a new scale would drop the captured passes.
    pub fn smallest(precision: Precision) -> Self {
        Self { scale: 1.0, ..Self::new(precision) }
    }

    /// The loss to differentiate.
    pub fn scale(&self, loss: &Tensor) -> Tensor {
        if self.dynamic { loss * self.scale } else { loss.shallow_clone() }
    }

    /// Factor that unscales gradients.
    pub fn unscale_factor(&self) -> f64 {
        1.0 / self.scale
    }

    /// Updates the scale after a step; `true` when its gradients may be used.
    ///
    /// A step that is not finite is skipped and the scale halved; fp32 and bf16 never skip.
    pub fn update(&mut self, finite: bool) -> bool {
        if !self.dynamic {
            return true;
        }
        if !finite {
            self.scale = (self.scale / 2.0).max(1.0);
            self.good_steps = 0;
            return false;
        }
        self.good_steps += 1;
        if self.good_steps == Self::GROW_AFTER {
            self.scale *= 2.0;
            self.good_steps = 0;
        }
        true
    }

    /// True if the scale depends on the result of each step.
    pub fn is_dynamic(&self) -> bool {
        self.dynamic
    }

    /// True if the scale has its smallest value.
    pub fn exhausted(&self) -> bool {
        self.scale <= 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overflow_restarts_the_count_of_finite_steps() {
        let mut scaler = Scaler::new(Precision::Fp16);
        let finite_steps = |scaler: &mut Scaler, count: u32| assert!((0..count).all(|_| scaler.update(true)));
        finite_steps(&mut scaler, Scaler::GROW_AFTER - 1);
        assert!(!scaler.update(false));
        let halved = scaler.unscale_factor();
        finite_steps(&mut scaler, Scaler::GROW_AFTER - 1);
        assert_eq!(scaler.unscale_factor(), halved, "it grew too early");
        finite_steps(&mut scaler, 1);
        assert_eq!(scaler.unscale_factor(), halved / 2.0);
    }

    #[test]
    fn an_overflow_halves_the_scale_and_many_finite_steps_double_it() {
        let mut scaler = Scaler::new(Precision::Fp16);
        assert!(!scaler.update(false));
        assert_eq!(scaler.unscale_factor(), 1.0 / 32768.0);
        for _ in 0..Scaler::GROW_AFTER {
            assert!(scaler.update(true));
        }
        assert_eq!(scaler.unscale_factor(), 1.0 / 65536.0);
        assert_eq!(Scaler::new(Precision::Bf16).unscale_factor(), 1.0);
    }
}
