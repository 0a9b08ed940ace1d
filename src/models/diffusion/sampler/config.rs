//! `scheduler_config.json`: the noise schedule of a model's training, and the default spacing of the timesteps.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::SamplerKind;
use crate::{Error, Result, files};

/// Schedule of the noise variances β from the first training step to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetaSchedule {
    /// β in equal steps.
    Linear,
    /// √β in equal steps (Stable Diffusion).
    ScaledLinear,
}

/// Meaning of the network's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum PredictionType {
    /// The noise ε.
    #[serde(rename = "epsilon")]
    Epsilon,
    /// The velocity √ᾱ·ε - √(1-ᾱ)·x0.
    #[serde(rename = "v_prediction")]
    Velocity,
}

/// Spacing of the timesteps of a run among the training steps (Lin et al. 2024, table 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimestepSpacing {
    /// Multiples of an integer stride from the clean end. The noisiest training steps are not used.
    Leading,
    /// A stride from the noisy end, beginning with the noisiest training step.
    Trailing,
    /// Equal distances from the first to the last training step.
    Linspace,
}

/// Content of a `scheduler_config.json`, with its field names. Missing fields have the defaults of diffusers.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    /// β of the first training step.
    pub beta_start: f64,
    /// β of the last training step.
    pub beta_end: f64,
    /// Schedule of β between the two.
    pub beta_schedule: BetaSchedule,
    /// Number of training steps.
    pub num_train_timesteps: usize,
    /// Meaning of the network's output.
    pub prediction_type: PredictionType,
    /// Spacing of the timesteps. Default: `leading` for DDIM, `linspace` for the others, as in diffusers.
    pub timestep_spacing: Option<TimestepSpacing>,
    /// Offset that is added to the timesteps of `leading`.
    pub steps_offset: usize,
    /// Shift and rescale √ᾱ so that the last training step is pure noise. Needs [`PredictionType::Velocity`].
    pub rescale_betas_zero_snr: bool,
    /// Use the noise levels of Karras et al. 2022 (ρ = 7). Not for DDIM.
    pub use_karras_sigmas: bool,
    /// The last step of DDIM ends at ᾱ = 1, otherwise at the ᾱ of the first training step.
    pub set_alpha_to_one: bool,
    /// All other fields. [`super::Sampler::new`] checks those that would change a run.
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
    /// The config of SDXL base and Stable Diffusion 1.5: scaled-linear β, ε, `leading` with offset 1.
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

    /// Reads `path` (a `scheduler_config.json`). Keys that are `null` or unknown count as missing.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Weights`] for a file that is not a JSON object, for an unsupported value, and for
    /// schedulers of other kinds of models (flow matching, EDM).
    pub fn open(path: &Path) -> Result<Self> {
        let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
        Self::parse(&text).map_err(|reason| {
            Error::weights(path, reason, "use a model of the Stable Diffusion 1.x, 2.x or SDXL family")
        })
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        // Python writes the default of `lambda_min_clipped` like this, which is not JSON
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

    /// Checks that no other field asks for an unsupported option.
    pub(super) fn check_others(&self, kind: SamplerKind) -> Result<()> {
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

/// Fields that change a run, the sampler that they affect (`None`: all), and the one supported value.
const OTHERS: &[(&str, Option<SamplerKind>, &str)] = &[
    ("trained_betas", None, ""),
    ("use_exponential_sigmas", None, "false"),
    ("use_beta_sigmas", None, "false"),
    ("use_flow_sigmas", None, "false"),
    ("final_sigmas_type", None, "zero"),
    ("thresholding", None, "false"),
    ("sigma_min", None, ""),
    ("sigma_max", None, ""),
    ("interpolation_type", Some(SamplerKind::Euler), "linear"),
    ("timestep_type", Some(SamplerKind::Euler), "discrete"),
    ("clip_sample", Some(SamplerKind::Ddim), "false"),
    ("use_lu_lambdas", Some(SamplerKind::DpmPlusPlus2M), "false"),
    ("algorithm_type", Some(SamplerKind::DpmPlusPlus2M), "dpmsolver++"),
    ("solver_order", Some(SamplerKind::DpmPlusPlus2M), "2"),
    ("solver_type", Some(SamplerKind::DpmPlusPlus2M), "midpoint"),
    ("variance_type", Some(SamplerKind::DpmPlusPlus2M), ""),
    ("lambda_min_clipped", Some(SamplerKind::DpmPlusPlus2M), ""),
];
