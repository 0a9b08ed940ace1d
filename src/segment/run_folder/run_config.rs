//! Settings of a training run.

use crate::nn::LoraConfig;
use crate::segment::run_folder::parts::Configs;
use crate::segment::{DataConfig, ModelConfig};
use crate::setting::Setting;
use crate::trainer::TrainConfig;

/// Settings of a training run.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// The model and its semantics.
    pub model: ModelConfig,
    /// Adapters of the language model.
    pub lora: LoraConfig,
    /// The training engine.
    pub train: TrainConfig,
    /// The input pipeline.
    pub data: DataConfig,
    /// Not a setting: configs of parts on the hub, which [`check_parts`](crate::segment::setup::check_parts) reads for plans.
    #[serde(skip)]
    pub configs: Configs,
}

impl RunConfig {
    /// Declarations of all settings.
    pub fn declarations() -> Vec<Setting> {
        [ModelConfig::settings(), LoraConfig::settings(), TrainConfig::settings(), DataConfig::settings()].concat()
    }

    /// The settings as TOML.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("plain values serialise")
    }
}
