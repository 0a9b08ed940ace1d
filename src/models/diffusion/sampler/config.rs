//! `scheduler_config.json`: the noise a model was trained with, and how its authors place the steps.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::Kind;
use crate::{Error, Result};

/// How the noise variances β run from the first training step to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetaSchedule {
    /// β evenly spaced.
    Linear,
    /// √β evenly spaced (Stable Diffusion).
    ScaledLinear,
}

/// What the network's output means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum PredictionType {
    /// The noise ε.
    #[serde(rename = "epsilon")]
    Epsilon,
    /// The velocity √ᾱ·ε - √(1-ᾱ)·x0.
    #[serde(rename = "v_prediction")]
    Velocity,
}

/// Where the steps of a run lie among the training steps (Lin et al. 2024, table 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimestepSpacing {
    /// Multiples of a whole stride from the clean end; the noisiest training steps stay unused.
    Leading,
    /// A stride from the noisy end; starts at the noisiest training step.
    Trailing,
    /// Evenly from the first to the last training step.
    Linspace,
}

/// What a `scheduler_config.json` says, under the names it has there; what is absent has the library's default.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    /// β of the first training step.
    pub beta_start: f64,
    /// β of the last training step.
    pub beta_end: f64,
    /// The way between the two.
    pub beta_schedule: BetaSchedule,
    /// Number of training steps.
    pub num_train_timesteps: usize,
    /// What the network predicts.
    pub prediction_type: PredictionType,
    /// Placement of the steps; absent: `leading` for DDIM, `linspace` for the others, as each class has it.
    pub timestep_spacing: Option<TimestepSpacing>,
    /// Added to the training steps of `leading`.
    pub steps_offset: usize,
    /// Shift and stretch √ᾱ so that the last training step is pure noise; needs [`PredictionType::Velocity`].
    pub rescale_betas_zero_snr: bool,
    /// Noise levels of Karras et al. 2022 (ρ = 7) instead of those of the placed steps; DDIM has no such choice.
    pub use_karras_sigmas: bool,
    /// DDIM's last step goes to ᾱ = 1, otherwise to the ᾱ of the first training step.
    pub set_alpha_to_one: bool,
    /// Everything else; looked at by [`super::Sampler::new`], which refuses what would change a run.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            beta_start: 1e-4,
            beta_end: 0.02,
            beta_schedule: BetaSchedule::Linear,
            num_train_timesteps: 1000,
            prediction_type: PredictionType::Epsilon,
            timestep_spacing: None,
            steps_offset: 0,
            rescale_betas_zero_snr: false,
            use_karras_sigmas: false,
            set_alpha_to_one: true,
            other: BTreeMap::new(),
        }
    }
}

impl SchedulerConfig {
    /// What SDXL base and Stable Diffusion 1.5 ship: scaled-linear β, ε, `leading` with offset 1.
    pub fn stable_diffusion() -> Self {
        Self {
            beta_start: 0.00085,
            beta_end: 0.012,
            beta_schedule: BetaSchedule::ScaledLinear,
            timestep_spacing: Some(TimestepSpacing::Leading),
            steps_offset: 1,
            set_alpha_to_one: false,
            ..Self::default()
        }
    }

    /// Reads `path` (a `scheduler_config.json`). Keys that are `null` or unknown to us are as good as absent.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Weights`] for a file that is no JSON object, for a value that is not supported, and for
    /// schedulers of another kind of model (flow matching, EDM).
    pub fn open(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
        Self::parse(&text).map_err(|reason| {
            Error::weights(path, reason, "use a model of the Stable Diffusion 1.x, 2.x or SDXL family")
        })
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        // Python writes the default of `lambda_min_clipped` in this way, which is no JSON.
        let text = text.replace("-Infinity", "null");
        let value: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let Value::Object(mut object) = value else { return Err("is not a JSON object".into()) };
        if let Some(class) = object.get("_class_name").and_then(Value::as_str)
            && ["Flow", "EDM"].iter().any(|other| class.starts_with(other))
        {
            return Err(format!("`_class_name` `{class}` is not supported"));
        }
        object.retain(|key, value| !value.is_null() && !key.starts_with('_'));
        let this: Self = serde_json::from_value(Value::Object(object)).map_err(|error| error.to_string())?;
        let in_order = 0.0 < this.beta_start && this.beta_start <= this.beta_end && this.beta_end < 1.0;
        if !in_order || this.num_train_timesteps < 2 {
            return Err("needs 0 < `beta_start` <= `beta_end` < 1 and at least two `num_train_timesteps`".into());
        }
        if this.rescale_betas_zero_snr && this.prediction_type == PredictionType::Epsilon {
            return Err("`rescale_betas_zero_snr` needs `prediction_type` `v_prediction`".into());
        }
        Ok(this)
    }

    /// The settings that are none of the fields above must not ask for anything but what we do.
    pub(super) fn refuse_others(&self, kind: Kind) -> Result<()> {
        for (key, only, accepted) in OTHERS {
            let Some(value) = self.other.get(*key) else { continue };
            if !only.is_none_or(|only| only == kind) || value.is_null() {
                continue;
            }
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            if text != *accepted {
                return Err(Error::config(
                    format!("scheduler_config.{key}"),
                    format!("`{text}` is not supported with the sampler {kind}"),
                    if accepted.is_empty() { "choose another model".into() } else { format!("only `{accepted}` is") },
                ));
            }
        }
        Ok(())
    }
}

/// Keys that change a run, whose runs they change (`None`: all), and the one value that is what we do.
const OTHERS: &[(&str, Option<Kind>, &str)] = &[
    ("trained_betas", None, ""),
    ("use_exponential_sigmas", None, "false"),
    ("use_beta_sigmas", None, "false"),
    ("use_flow_sigmas", None, "false"),
    ("final_sigmas_type", None, "zero"),
    ("thresholding", None, "false"),
    ("sigma_min", None, ""),
    ("sigma_max", None, ""),
    ("interpolation_type", Some(Kind::Euler), "linear"),
    ("timestep_type", Some(Kind::Euler), "discrete"),
    ("clip_sample", Some(Kind::Ddim), "false"),
    ("use_lu_lambdas", Some(Kind::DpmPlusPlus2M), "false"),
    ("algorithm_type", Some(Kind::DpmPlusPlus2M), "dpmsolver++"),
    ("solver_order", Some(Kind::DpmPlusPlus2M), "2"),
    ("solver_type", Some(Kind::DpmPlusPlus2M), "midpoint"),
    ("variance_type", Some(Kind::DpmPlusPlus2M), ""),
    ("lambda_min_clipped", Some(Kind::DpmPlusPlus2M), ""),
];
