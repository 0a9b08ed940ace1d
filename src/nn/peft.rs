//! Settings of LoRA adapters in the format of Python's `peft`: `adapter_config.json`, and headers of diffusers.
//!
//! Source: peft 0.21 (`LoraConfig`, `get_pattern_key`, `check_target_module_exists`). A setting that changes the result
//! is applied, or it is an error that names it.

use std::path::Path;

use fancy_regex::Regex;
use serde_json::{Map, Value};

use crate::tensor::weights::read_config;
use crate::{Error, Result};

/// Remedy for settings that cannot be applied.
pub const HINT: &str = "merge the adapter into the model with peft, or train it again without this setting";
/// peft's default of `r` and of `lora_alpha`.
const DEFAULT: f64 = 8.0;
/// Settings that do not change what a trained adapter computes, or that are read elsewhere. `eva_config` chooses first
/// values and ranks, which are in the file and in `rank_pattern`; `qalora_group_size` needs `use_qalora`.
const WITHOUT_EFFECT: &str = "task_type base_model_name_or_path revision inference_mode auto_mapping peft_version \
                              megatron_core runtime_config eva_config qalora_group_size";
/// Values of `init_lora_weights` that leave the weights of the model as they are. PiSSA, OLoRA, CorDA and LoftQ change
/// them.
const INITIALISATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Settings of an adapter. Modules have their dotted paths in the model.
#[derive(Debug, Default)]
pub struct PeftConfig {
    rank: Option<i64>,
    alpha: f64,
    dropout: f64,
    rslora: bool,
    /// Own ranks and alphas of modules. The first pattern that matches counts.
    ranks: Vec<(Regex, f64)>,
    alphas: Vec<(Regex, f64)>,
    targets: Option<Modules>,
    excluded: Option<Modules>,
    layers: Option<Layers>,
}

/// A set of modules.
#[derive(Debug)]
enum Modules {
    /// `all-linear`.
    All,
    /// Modules whose whole path matches.
    Pattern(Regex),
    /// Modules with these paths, or with paths that end with them.
    Names(Vec<String>),
}

/// Numbers of layers, and patterns that find the number in a path.
#[derive(Debug)]
struct Layers {
    numbers: Vec<i64>,
    patterns: Vec<Regex>,
}

impl PeftConfig {
    /// Reads `adapter_config.json`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Weights`] for a setting that cannot be applied.
    pub fn open(path: &Path) -> Result<Self> {
        let settings = read_config(path, "download or copy it again")?;
        let settings = settings.as_object().ok_or_else(|| Error::weights(path, "it is no JSON object", HINT))?;
        Self::parse(settings).map_err(|reason| Error::weights(path, reason, HINT))
    }

    /// Checks settings by their names.
    ///
    /// # Errors
    /// The name and value of the first setting that cannot be applied.
    pub fn parse(settings: &Map<String, Value>) -> Result<Self, String> {
        let mut config = Self { alpha: DEFAULT, ..Self::default() };
        let keeps_weights = |value: &Value| value.as_str().is_some_and(|name| INITIALISATIONS.contains(&name));
        let mut patterns = Vec::new();
        for (key, value) in settings.iter().filter(|(_, value)| !value.is_null()) {
            let wrong = |expected: &str| format!("`{key}` is {value}, expected {expected}");
            let number = || value.as_f64().ok_or_else(|| wrong("a number"));
            let unsupported = || Err(format!("`{key}` is {value}, which is not supported"));
            match key.as_str() {
                "peft_type" if value != "LORA" => return unsupported(),
                "bias" if value != "none" => return unsupported(),
                "init_lora_weights" if !value.is_boolean() && !keeps_weights(value) => return unsupported(),
                "peft_type" | "bias" | "init_lora_weights" => {}
                "r" => {
                    let rank = value.as_i64().filter(|rank| *rank > 0);
                    config.rank = Some(rank.ok_or_else(|| wrong("a positive whole number"))?);
                }
                "lora_alpha" => {
                    config.alpha = checked_alpha(number()?).map_err(|reason| format!("`{key}` {reason}"))?;
                }
                "lora_dropout" => config.dropout = number()?,
                "use_rslora" => config.rslora = value.as_bool().ok_or_else(|| wrong("`true` or `false`"))?,
                "rank_pattern" => config.ranks = numbers(key, value)?,
                "alpha_pattern" => config.alphas = numbers(key, value)?,
                "target_modules" => config.targets = Some(Modules::parse(key, value)?),
                "exclude_modules" => config.excluded = Some(Modules::parse(key, value)?),
                "layers_to_transform" => config.layers = layers(key, value)?,
                "layers_pattern" => patterns = names(key, value)?,
                other if is_off(value) || WITHOUT_EFFECT.split(' ').any(|name| name == other) => {}
                "use_dora" => return Err("`use_dora` is true: DoRA adapters are not supported".into()),
                _ => return unsupported(),
            }
        }
        for (_, alpha) in &config.alphas {
            checked_alpha(*alpha).map_err(|reason| format!("`alpha_pattern` has a number that {reason}"))?;
        }
        if let Some((_, rank)) = config.ranks.iter().find(|(_, rank)| *rank < 1.0 || rank.fract() > 0.0) {
            return Err(format!("`rank_pattern` has the rank {rank}, expected positive whole numbers"));
        }
        if let Some(layers) = &mut config.layers {
            // without a name of the list of layers, any name counts; the first number of a path is that of its layer
            let mut all: Vec<String> = patterns.iter().map(|name| format!(r"^(?:|.*?\.)(?:{name})\.(\d+)\.")).collect();
            if all.is_empty() {
                all.push(r"^.*?\.[^.]*\.(\d+)\.".into());
            }
            let compiled = all.iter().map(|pattern| regex("layers_pattern", pattern));
            layers.patterns = compiled.collect::<Result<_, _>>()?;
        }
        Ok(config)
    }

    /// Rank of a module.
    ///
    /// # Errors
    /// A pattern that takes too long.
    #[expect(clippy::cast_possible_truncation, reason = "whole numbers")]
    pub fn rank(&self, module: &str) -> Result<i64, String> {
        Ok(first(&self.ranks, module)?.map_or_else(|| self.default_rank(), |rank| rank as i64))
    }

    /// Rank of the modules without an own rank.
    #[expect(clippy::cast_possible_truncation, reason = "a whole number")]
    pub fn default_rank(&self) -> i64 {
        self.rank.unwrap_or(DEFAULT as i64)
    }

    /// Alpha of the modules without an own alpha.
    pub fn default_alpha(&self) -> f64 {
        self.alpha
    }

    /// True if the settings name a rank, not only peft's default counts.
    pub fn states_ranks(&self) -> bool {
        self.rank.is_some()
    }

    /// True if modules can have other ranks than [`Self::default_rank`].
    pub fn has_ranks(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// Dropout on the inputs of adapters in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Factor of a module's adapter of this rank: alpha / rank, or alpha / sqrt(rank) (rsLoRA).
    ///
    /// # Errors
    /// As [`Self::rank`].
    pub fn scale(&self, module: &str, rank: i64) -> Result<f64, String> {
        Ok(self.factor(first(&self.alphas, module)?.unwrap_or(self.alpha), rank))
    }

    /// As [`Self::scale`], of the modules without an own alpha.
    pub fn default_scale(&self, rank: i64) -> f64 {
        self.factor(self.alpha, rank)
    }

    fn factor(&self, alpha: f64, rank: i64) -> f64 {
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// True if peft gives this module an adapter; settings without `target_modules` do not say it.
    ///
    /// # Errors
    /// As [`Self::rank`].
    pub fn selects(&self, module: &str) -> Result<bool, String> {
        if let Some(excluded) = &self.excluded
            && excluded.contains(module)?
        {
            return Ok(false);
        }
        let Some(targets) = &self.targets else { return Ok(true) };
        let is_named = matches!(targets, Modules::Names(names) if names.iter().any(|name| name == module));
        if is_named || !matches!(targets, Modules::Names(_)) {
            // peft does not apply `layers_to_transform` to them
            return targets.contains(module);
        }
        Ok(targets.contains(module)? && self.layers.as_ref().map_or(Ok(true), |layers| layers.contains(module))?)
    }
}

impl Modules {
    fn parse(key: &str, value: &Value) -> Result<Self, String> {
        match value {
            Value::String(text) if text.eq_ignore_ascii_case("all-linear") => Ok(Self::All),
            Value::String(text) => regex(key, &format!("^(?:{text})$")).map(Self::Pattern),
            _ => names(key, value).map(Self::Names),
        }
    }

    fn contains(&self, module: &str) -> Result<bool, String> {
        match self {
            Self::All => Ok(true),
            Self::Pattern(pattern) => is_match(pattern, module),
            Self::Names(names) => Ok(names.iter().any(|name| {
                module.strip_suffix(name.as_str()).is_some_and(|before| before.is_empty() || before.ends_with('.'))
            })),
        }
    }
}

impl Layers {
    fn contains(&self, module: &str) -> Result<bool, String> {
        for pattern in &self.patterns {
            let found = pattern.captures(module).map_err(|error| error.to_string())?;
            if let Some(number) = found.and_then(|groups| groups.get(1)?.as_str().parse::<i64>().ok()) {
                return Ok(self.numbers.contains(&number));
            }
        }
        Ok(false)
    }
}

/// The alpha of an adapter, or the reason why it cannot be one.
///
/// # Errors
/// The value of an alpha of 0, with which the adapter does nothing, and of one that is not finite.
pub fn checked_alpha(alpha: f64) -> Result<f64, String> {
    let is_usable = alpha.is_finite() && alpha.abs() > 0.0;
    if is_usable { Ok(alpha) } else { Err(format!("is {alpha}, expected a finite number other than 0")) }
}

/// A value that switches its setting off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Bool(value) => !value,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        _ => false,
    }
}

fn regex(key: &str, pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| format!("`{key}` has a pattern that cannot be read: {error}"))
}

fn is_match(pattern: &Regex, module: &str) -> Result<bool, String> {
    pattern.is_match(module).map_err(|error| format!("a pattern cannot be applied to `{module}`: {error}"))
}

/// Text, or a list of texts.
fn names(key: &str, value: &Value) -> Result<Vec<String>, String> {
    let list = match value {
        Value::Array(values) => values.iter().map(|value| value.as_str().map(str::to_owned)).collect(),
        value => value.as_str().map(|name| vec![name.to_owned()]),
    };
    list.ok_or_else(|| format!("`{key}` is {value}, expected a list of names"))
}

fn layers(key: &str, value: &Value) -> Result<Option<Layers>, String> {
    let numbers: Option<Vec<i64>> = match value {
        Value::Array(values) => values.iter().map(Value::as_i64).collect(),
        value => value.as_i64().map(|number| vec![number]),
    };
    let numbers = numbers.ok_or_else(|| format!("`{key}` is {value}, expected numbers of layers"))?;
    Ok((!numbers.is_empty()).then_some(Layers { numbers, patterns: Vec::new() }))
}

/// Patterns of modules and their numbers, in the order of the file.
fn numbers(key: &str, value: &Value) -> Result<Vec<(Regex, f64)>, String> {
    let all = value.as_object().ok_or_else(|| format!("`{key}` is {value}, expected patterns and numbers"))?;
    let pair = |(pattern, value): (&String, &Value)| {
        let number = value.as_f64().ok_or_else(|| format!("`{key}` has {value} for `{pattern}`, expected a number"))?;
        Ok((regex(key, &format!(r"^(.*\.)?({pattern})$"))?, number))
    };
    all.iter().map(pair).collect()
}

/// The number of the first pattern that matches.
fn first(patterns: &[(Regex, f64)], module: &str) -> Result<Option<f64>, String> {
    for (pattern, number) in patterns {
        if is_match(pattern, module)? {
            return Ok(Some(*number));
        }
    }
    Ok(None)
}

#[cfg(test)]
#[path = "peft_tests.rs"]
mod tests;
