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
    /// All other fields. [`Self::open`] refuses those that no sampler follows, [`super::Sampler::new`] those that its own
    /// sampler does not follow.
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

    /// Reads `path` (a `scheduler_config.json`). Keys that are `null` count as missing.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Weights`] for a file that is not a JSON object, for a field with an unsupported value, for an
    /// unknown field that is not off, and for schedulers of other kinds of models (flow matching, EDM, distilled models).
    pub fn open(path: &Path) -> Result<Self> {
        let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
        Self::parse(&text).map_err(|reason| {
            let hint = "use a model of the Stable Diffusion 1.x, 2.x or SDXL family";
            Error::weights(path, reason, hint)
        })
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        // Python writes the default of `lambda_min_clipped` like this, which is not JSON
        let text = text.replace("-Infinity", "null");
        let value: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let Value::Object(mut object) = value else { return Err("is not a JSON object".into()) };
        if let Some(class) = object.get("_class_name").and_then(Value::as_str)
            && !CLASSES.iter().any(|known| class.starts_with(known))
        {
            return Err(format!("`_class_name` `{class}` is not supported"));
        }
        object.retain(|key, value| !value.is_null() && !key.starts_with('_'));
        for (key, value) in &object {
            let alone = Value::Object([(key.clone(), value.clone())].into_iter().collect());
            serde_json::from_value::<Self>(alone).map_err(|error| format!("`{key}` is {value}: {error}"))?;
        }
        let this: Self = serde_json::from_value(Value::Object(object)).map_err(|error| error.to_string())?;
        let in_order = 0.0 < this.beta_start && this.beta_start <= this.beta_end && this.beta_end < 1.0;
        if !in_order {
            return Err("needs 0 < `beta_start` <= `beta_end` < 1".into());
        }
        if !(2..=MOST_TIMESTEPS).contains(&this.num_train_timesteps) {
            return Err(format!("needs 2 to {MOST_TIMESTEPS} `num_train_timesteps`"));
        }
        if this.rescale_betas_zero_snr && this.prediction_type == PredictionType::Epsilon {
            return Err("`rescale_betas_zero_snr` needs `prediction_type` `v_prediction`".into());
        }
        this.check_others(None)?;
        Ok(this)
    }

    /// Checks that no other field asks for an option that the sampler `kind` does not support, or no sampler.
    pub(super) fn check_others(&self, kind: Option<SamplerKind>) -> Result<(), String> {
        for (key, value) in self.other.iter().filter(|(_, value)| !value.is_null()) {
            if WITHOUT_EFFECT.split(' ').any(|known| known == key) {
                continue;
            }
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let Some((_, only, accepted)) = OTHERS.iter().find(|(known, ..)| known == key) else {
                if is_off(value) {
                    continue;
                }
                return Err(format!("`{key}` is {value}, and this program does not know this field"));
            };
            let counts = only.is_none_or(|only| Some(only) == kind);
            if counts && !accepted.contains(&text.as_str()) {
                let with = only.map(|kind| format!(" with the sampler {kind}")).unwrap_or_default();
                let but = if accepted.is_empty() { String::new() } else { format!(", only {}", accepted.join(" or ")) };
                return Err(format!("`{key}` is {value}, which is not supported{with}{but}"));
            }
        }
        Ok(())
    }
}

/// A value that switches its field off.
fn is_off(value: &Value) -> bool {
    matches!(value, Value::Bool(false)) || value.as_str() == Some("") || value.as_array().is_some_and(Vec::is_empty)
}

/// Most training steps. The usual number is 1000.
const MOST_TIMESTEPS: usize = 100_000;

/// How the names of the schedulers begin that diffusers offers for these models. The nearest sampler is used.
const CLASSES: [&str; 11] =
    ["DDIM", "PNDM", "DDPM", "Euler", "DPMSolver", "UniPC", "LMSDiscrete", "HeunDiscrete", "KDPM2", "DEIS", "SASolver"];

/// Fields that change nothing here: those of the samplers that are not offered, of options that are refused, and of
/// higher orders.
const WITHOUT_EFFECT: &str = "skip_prk_steps clip_sample_range dynamic_thresholding_ratio sample_max_value lower_order_final euler_at_final disable_corrector predict_x0 \
                              solver_p predictor_order corrector_order tau_func noise_sampler_seed flow_shift time_shift_type num_inference_steps";

/// Fields that change a run, the sampler that they affect (`None`: all), and the supported values. As in diffusers, values of
/// the DPM solver that belong to other solvers mean its own.
const OTHERS: &[(&str, Option<SamplerKind>, &[&str])] = &[
    ("trained_betas", None, &[]),
    ("use_exponential_sigmas", None, &["false"]),
    ("use_beta_sigmas", None, &["false"]),
    ("use_flow_sigmas", None, &["false"]),
    ("use_dynamic_shifting", None, &["false"]),
    ("final_sigmas_type", None, &["zero"]),
    ("thresholding", None, &["false"]),
    ("sigma_min", None, &[]),
    ("sigma_max", None, &[]),
    ("snr_shift_scale", None, &["1", "1.0"]),
    ("shift", None, &["1", "1.0"]),
    ("variance_type", None, &["fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"]),
    ("interpolation_type", Some(SamplerKind::Euler), &["linear"]),
    ("timestep_type", Some(SamplerKind::Euler), &["discrete"]),
    ("clip_sample", Some(SamplerKind::Ddim), &["false"]),
    ("use_lu_lambdas", Some(SamplerKind::DpmPlusPlus2M), &["false"]),
    ("algorithm_type", Some(SamplerKind::DpmPlusPlus2M), &["dpmsolver++", "deis"]),
    ("solver_order", Some(SamplerKind::DpmPlusPlus2M), &["2"]),
    ("solver_type", Some(SamplerKind::DpmPlusPlus2M), &["midpoint", "logrho", "bh1", "bh2"]),
    ("lambda_min_clipped", Some(SamplerKind::DpmPlusPlus2M), &[]),
];
