//! Presets and overrides -> [`RunConfig`] or [`AugmentRun`], with the origin of every value. Nobody below imports this
//! module.
//!
//! A preset states every value. A config file overlays a preset (its own `preset = "NAME"` line, the one asked for, or
//! the default), `--set key=value` overlays both. Misspelt keys are refused with the nearest one that exists.

pub mod planned;
pub mod planned_augment;

use crate::augment::filter::Thresholds;
use crate::augment::settings::AugmentConfig;
use crate::nn::LoraConfig;
use crate::segment::setup::BatchNorm;
use crate::segment::task::DataConfig;
use crate::segment::{ModelConfig, sight};
use crate::trainer::precision::Precision;
use crate::trainer::{Switch, TrainConfig};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Presets that the binary carries: name, text.
pub const PRESETS: [(&str, &str); 11] = [
    ("tiny", include_str!("../../configs/tiny.toml")),
    ("full", include_str!("../../configs/full.toml")),
    ("cpu", include_str!("../../configs/cpu.toml")),
    ("gpu-8gb", include_str!("../../configs/gpu-8gb.toml")),
    ("gpu-12gb", include_str!("../../configs/gpu-12gb.toml")),
    ("gpu-16gb", include_str!("../../configs/gpu-16gb.toml")),
    ("gpu-24gb", include_str!("../../configs/gpu-24gb.toml")),
    ("gpu-40gb", include_str!("../../configs/gpu-40gb.toml")),
    ("gpu-48gb", include_str!("../../configs/gpu-48gb.toml")),
    ("gpu-80gb", include_str!("../../configs/gpu-80gb.toml")),
    ("gpu-141gb", include_str!("../../configs/gpu-141gb.toml")),
];

/// Everything a training run is told.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The model and its semantics.
    pub model: ModelConfig,
    /// Adapters of the language model.
    pub lora: LoraConfig,
    /// The engine.
    pub train: TrainConfig,
    /// The input pipeline.
    pub data: DataConfig,
}

/// Everything that making image+mask pairs is told.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AugmentRun {
    /// The generator.
    pub augment: AugmentConfig,
    /// Which pairs are good enough.
    pub filter: Thresholds,
}

/// Settings that presets, files and flags make together.
pub trait Settings: serde::Serialize + serde::de::DeserializeOwned {
    /// Presets that the binary carries: name, text.
    const PRESETS: &'static [(&'static str, &'static str)];
    /// The command that prints all settings.
    const PRINTS: &'static str;

    /// Refuses values out of range.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    fn check(&self) -> Result<()>;
}

impl Settings for RunConfig {
    const PRESETS: &'static [(&'static str, &'static str)] = &PRESETS;
    const PRINTS: &'static str = "prsmed train --print-config";

    fn check(&self) -> Result<()> {
        check(self)
    }
}

impl Settings for AugmentRun {
    const PRESETS: &'static [(&'static str, &'static str)] = &[
        ("augment", include_str!("../../configs/augment.toml")),
        ("tiny", include_str!("../../configs/augment-tiny.toml")),
    ];
    const PRINTS: &'static str = "prsmed augment generate --print-config";

    fn check(&self) -> Result<()> {
        self.augment.check()?;
        self.filter.check()
    }
}

impl RunConfig {
    /// `key=value` of every setting in which it differs from `other`.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn changes_from(&self, other: &Self) -> Vec<String> {
        let [own, others] = [self, other].map(|config| Table::try_from(config).expect("plain values serialise"));
        let mut keys = BTreeMap::new();
        note_origins(&own, "", "", &mut keys);
        let differing = keys.into_keys().filter(|key| value_at(&own, key) != value_at(&others, key));
        differing.filter_map(|key| Some(format!("{key}={}", value_at(&own, &key)?))).collect()
    }
}

/// A config and where each value came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved<T = RunConfig> {
    /// The values.
    pub config: T,
    /// Dotted key -> `preset tiny`, `FILE`, `--set`.
    pub origins: BTreeMap<String, String>,
}

/// Where values come from, weakest first.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// Preset name.
    pub preset: Option<String>,
    /// Used when neither the caller nor the file names a preset.
    pub default_preset: String,
    /// TOML file over the preset.
    pub file: Option<PathBuf>,
    /// `key=value` pairs over both, with the flag they came from.
    pub sets: Vec<(String, String)>,
}

impl Sources {
    /// [`Self::resolve_as`] for training.
    ///
    /// # Errors
    /// As there.
    pub fn resolve(&self) -> Result<Resolved> {
        self.resolve_as()
    }

    /// Merges all sources and checks the result.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key; [`Error::Io`] for the file.
    pub fn resolve_as<T: Settings>(&self) -> Result<Resolved<T>> {
        let mut file_table = match &self.file {
            Some(path) => read_file(path)?,
            None => Table::new(),
        };
        let named = file_table.remove("preset").map(|v| v.as_str().map(str::to_owned).unwrap_or_default());
        let name = self.preset.clone().or(named).unwrap_or_else(|| self.default_preset.clone());
        let preset = preset::<T>(&name)?;
        let mut table = preset.clone();
        let mut origins = BTreeMap::new();
        note_origins(&table, "", &format!("preset {name}"), &mut origins);
        if let Some(path) = &self.file {
            overlay(&mut table, file_table, "", &path.display().to_string(), &mut origins)?;
        }
        for (assignment, flag) in &self.sets {
            let (key, value) = assignment.split_once('=').ok_or_else(|| {
                Error::config(
                    flag,
                    format!("`{assignment}` is not `key=value`"),
                    "write for example `--set train.epochs=5`",
                )
            })?;
            let patch = nested(key.trim(), parse_value(value.trim()));
            overlay(&mut table, patch, "", flag, &mut origins)?;
        }
        let config: T = typed(&table).map_err(|reason| bad_value::<T>(&reason, &table, &preset, &origins))?;
        refuse_unread(&config, &origins)?;
        config.check()?;
        Ok(Resolved { config, origins })
    }
}

impl<T> Resolved<T> {
    /// Whether a flag gave `key` its value.
    pub fn is_from_a_flag(&self, key: &str) -> bool {
        self.origins.get(key).is_some_and(|origin| origin.starts_with("--"))
    }
}

impl<T: Settings> Resolved<T> {
    /// The config as TOML with each value's origin as a comment, ready for `--config`.
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn to_toml(&self) -> String {
        let text = toml::to_string(&self.config).expect("plain values serialise");
        let mut out = String::from("# Resolved by prsmed; usable with `--config`.\n");
        let mut section = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                name.clone_into(&mut section);
            }
            let origin = line.split_once(" = ").and_then(|(key, _)| self.origins.get(&format!("{section}.{key}")));
            match origin {
                Some(origin) => writeln!(out, "{line}  # {origin}"),
                None => writeln!(out, "{line}"),
            }
            .expect("writing to a string");
        }
        out
    }
}

fn preset<T: Settings>(name: &str) -> Result<Table> {
    let names: Vec<&str> = T::PRESETS.iter().map(|(name, _)| *name).collect();
    let (_, text) = T::PRESETS.iter().find(|(known, _)| *known == name).ok_or_else(|| {
        Error::config("--preset", format!("there is no preset `{name}`"), format!("use one of {}", names.join(", ")))
    })?;
    Ok(text.parse::<Table>().expect("the embedded presets are parsed by a test"))
}

fn read_file(path: &Path) -> Result<Table> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
    text.parse::<Table>().map_err(|e| {
        let line = e.span().map_or(1, |span| text[..span.start].lines().count().max(1) as u64);
        Error::data_line(path, line, e.message().to_owned(), "mend the TOML; `configs/tiny.toml` shows the form")
    })
}

/// A value as TOML, else a bare string.
fn parse_value(text: &str) -> Value {
    format!("v = {text}")
        .parse::<Table>()
        .ok()
        .and_then(|mut table| table.remove("v"))
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

fn nested(key: &str, value: Value) -> Table {
    match key.split_once('.') {
        Some((head, rest)) => Table::from_iter([(head.to_owned(), Value::Table(nested(rest, value)))]),
        None => Table::from_iter([(key.to_owned(), value)]),
    }
}

fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
}

fn note_origins(table: &Table, prefix: &str, origin: &str, origins: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let path = join(prefix, key);
        match value {
            Value::Table(inner) => note_origins(inner, &path, origin, origins),
            _ => {
                origins.insert(path, origin.to_owned());
            }
        }
    }
}

/// Puts `patch` over `table`; keys that the preset does not state are misspelt, except the optional `model.sizes`.
fn overlay(
    table: &mut Table,
    patch: Table,
    prefix: &str,
    origin: &str,
    origins: &mut BTreeMap<String, String>,
) -> Result<()> {
    for (key, value) in patch {
        let path = join(prefix, &key);
        if path.starts_with("model.sizes") && !table.contains_key(&key) {
            match &value {
                Value::Table(inner) => note_origins(inner, &path, origin, origins),
                _ => drop(origins.insert(path, origin.to_owned())),
            }
            table.insert(key, value);
            continue;
        }
        match (table.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(patch)) => overlay(inner, patch, &path, origin, origins)?,
            (Some(slot), value) => {
                *slot = widen(slot, value);
                origins.insert(path, origin.to_owned());
            }
            (None, _) => return Err(unknown_key(&path, origin, origins)),
        }
    }
    Ok(())
}

/// `1` is a fine value for a real number.
fn widen(slot: &Value, value: Value) -> Value {
    match (slot, &value) {
        #[expect(clippy::cast_precision_loss, reason = "settings are small numbers")]
        (Value::Float(_), Value::Integer(n)) => Value::Float(*n as f64),
        _ => value,
    }
}

/// The table as settings, or what serde says about the first value that is wrong.
fn typed<T: Settings>(table: &Table) -> Result<T, String> {
    Value::Table(table.clone()).try_into().map_err(|error: toml::de::Error| {
        let numbers = [("usize", "a whole number, 0 or more"), ("u64", "a whole number, 0 or more")];
        let numbers =
            numbers.into_iter().chain([("i64", "a whole number"), ("f64", "a number"), ("struct", "a table")]);
        let text = error.message().to_owned();
        numbers
            .fold(text, |text, (kind, words)| text.replace(&format!("expected {kind}"), &format!("expected {words}")))
    })
}

/// Serde does not say which value is wrong: it is the one that, put back as the preset has it, changes what it says.
fn bad_value<T: Settings>(reason: &str, table: &Table, preset: &Table, origins: &BTreeMap<String, String>) -> Error {
    let is_at_fault = |key: &str| {
        let mut mended = table.clone();
        replace(&mut mended, key, value_at(preset, key).cloned());
        typed::<T>(&mended).err().is_none_or(|now| now != reason)
    };
    let culprit = origins.iter().find(|(key, origin)| !origin.starts_with("preset ") && is_at_fault(key));
    let Some((key, origin)) = culprit else {
        return Error::config("config", reason, format!("compare with `{}`", T::PRINTS));
    };
    let show = format!("`{}` shows all settings", T::PRINTS);
    let hint = match value_at(preset, key) {
        Some(value) if !value.is_table() => format!("the preset has `{value}`; {show}"),
        _ => show,
    };
    Error::config(key, format!("{reason} ({origin})"), hint)
}

fn value_at<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        Some((head, rest)) => value_at(table.get(head)?.as_table()?, rest),
        None => table.get(key),
    }
}

fn replace(table: &mut Table, key: &str, value: Option<Value>) {
    match (key.split_once('.'), value) {
        (Some((head, rest)), value) => {
            if let Some(inner) = table.get_mut(head).and_then(Value::as_table_mut) {
                replace(inner, rest, value);
            }
        }
        (None, Some(value)) => drop(table.insert(key.to_owned(), value)),
        (None, None) => drop(table.remove(key)),
    }
}

/// Sizes are read as leniently as a model's `config.json`, which holds more than is needed; a setting is not.
fn refuse_unread(config: &impl Settings, origins: &BTreeMap<String, String>) -> Result<()> {
    let read = Table::try_from(config).expect("plain values serialise");
    let mut known = BTreeMap::new();
    note_origins(&read, "", "", &mut known);
    match origins.iter().find(|(key, _)| !known.contains_key(*key)) {
        Some((key, origin)) => Err(unknown_key(key, origin, &known)),
        None => Ok(()),
    }
}

fn unknown_key(path: &str, origin: &str, known: &BTreeMap<String, String>) -> Error {
    let nearest = known.keys().max_by(|a, b| strsim::jaro_winkler(a, path).total_cmp(&strsim::jaro_winkler(b, path)));
    let hint = nearest.map_or_else(String::new, |key| format!("did you mean `{key}`?"));
    Error::config(path, format!("there is no such setting ({origin})"), hint)
}

fn check(config: &RunConfig) -> Result<()> {
    let train = &config.train;
    let positive = [
        ("train.micro_batch", train.micro_batch as u64),
        ("train.accumulation", train.accumulation as u64),
        ("train.epochs", train.epochs),
        ("data.prefetch", config.data.prefetch as u64),
        ("data.questions_per_picture", config.data.questions_per_picture as u64),
        ("model.max_text_tokens", config.model.max_text_tokens as u64),
    ];
    for (key, value) in positive {
        if value == 0 {
            return Err(Error::config(key, "must be 1 or more, got 0", "use 1 or more"));
        }
    }
    check_packing(config)?;
    sight::refuse_trained_tower(&config.data, config.model.train_base)?;
    let fractions = [
        ("train.warmup_frac", train.warmup_frac),
        ("train.beta1", train.beta1),
        ("train.beta2", train.beta2),
        ("train.ema_decay", train.ema_decay),
        ("lora.dropout", config.lora.dropout),
        ("model.decoder_dropout", config.model.decoder_dropout),
        ("data.val_frac", config.data.val_frac),
    ];
    for (key, value) in fractions {
        if !(0.0..1.0).contains(&value) {
            return Err(Error::config(key, format!("must lie in 0..1, got {value}"), "use a number from 0 to below 1"));
        }
    }
    if !(0.0..=1.0).contains(&config.data.synthetic_until) {
        let reason = format!("must lie in 0..=1, got {}", config.data.synthetic_until);
        return Err(Error::config("data.synthetic_until", reason, "use a number from 0 to 1"));
    }
    let reals = [
        ("train.learning_rate", train.learning_rate),
        ("train.min_learning_rate", train.min_learning_rate),
        ("train.weight_decay", train.weight_decay),
        ("train.clip_norm", train.clip_norm),
        ("model.text_loss_weight", config.model.text_loss_weight),
        ("model.class_loss_weight", config.model.class_loss_weight),
    ];
    for (key, value) in reals {
        if !value.is_finite() || value < 0.0 {
            return Err(Error::config(
                key,
                format!("must be 0 or more, got {value}"),
                "use a finite number, 0 or more",
            ));
        }
    }
    check_graph(config)?;
    check_step_in_backward(train)
}

/// A parameter that is stepped as soon as its gradient is there knows no other gradient.
fn check_step_in_backward(train: &TrainConfig) -> Result<()> {
    let conflicts = [
        (train.accumulation > 1, "a gradient of several micro-batches", "train.accumulation=1"),
        (train.clip_norm > 0.0, "clipping by the norm of all gradients", "train.clip_norm=0"),
        (train.precision == Precision::Fp16, "the loss scaling of fp16", "train.precision=bf16"),
    ];
    match conflicts.into_iter().find(|(conflict, ..)| train.step_in_backward && *conflict) {
        Some((_, what, remedy)) => {
            let reason = format!("parameters are stepped before {what} is complete");
            let hint = format!("add `--set {remedy}`, or leave it off");
            Err(Error::config("train.step_in_backward", reason, hint))
        }
        None => Ok(()),
    }
}

/// Recorded passes keep gradients at their places and pad texts.
fn check_graph(config: &RunConfig) -> Result<()> {
    let conflicts = [
        (config.train.step_in_backward, "steps in the backward pass drop gradients", "train.step_in_backward=false"),
        (!config.model.semantics.hides_answer(), "the published decoder reads padding", "model.semantics=corrected"),
    ];
    match conflicts.into_iter().find(|(conflict, ..)| config.train.graph == Switch::On && *conflict) {
        Some((_, what, remedy)) => {
            let reason = format!("passes cannot be recorded: {what}");
            Err(Error::config("train.graph", reason, format!("add `--set {remedy}`, or set it to `auto` or `off`")))
        }
        None => Ok(()),
    }
}

/// Several questions in one sequence need a decoder that reads prompts only and samples that do not depend on each other.
fn check_packing(config: &RunConfig) -> Result<()> {
    let key = "data.questions_per_picture";
    let questions = config.data.questions_per_picture;
    if questions > 1 && !config.model.semantics.hides_answer() {
        let reason = format!("{questions} questions share a sequence, but `reference` shows the decoder all of it");
        return Err(Error::config(key, reason, "set it to 1, or use `model.semantics=corrected`"));
    }
    if questions > 1 && config.model.batch_norm == BatchNorm::Batch {
        let reason = format!("{questions} questions share a picture, which changes the statistics of a batch");
        return Err(Error::config(key, reason, "set it to 1, or use `model.batch_norm=frozen`"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(sets: &[&str]) -> Sources {
        Sources {
            preset: Some("tiny".into()),
            sets: sets.iter().map(|s| ((*s).to_owned(), "--set".to_owned())).collect(),
            ..Sources::default()
        }
    }

    #[test]
    fn every_preset_resolves_and_round_trips() {
        for (name, _) in PRESETS {
            let resolved = Sources { preset: Some(name.into()), ..Sources::default() }.resolve().unwrap();
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("config.toml");
            std::fs::write(&file, resolved.to_toml()).unwrap();
            let again =
                Sources { preset: Some(name.into()), file: Some(file), ..Sources::default() }.resolve().unwrap();
            assert_eq!(again.config, resolved.config, "{name}");
        }
    }

    #[test]
    fn sets_win_and_their_origin_is_kept() {
        let resolved =
            sources(&["train.micro_batch=3", "train.learning_rate=1", "model.base=hub:a/b"]).resolve().unwrap();
        assert_eq!(resolved.config.train.micro_batch, 3);
        assert!((resolved.config.train.learning_rate - 1.0).abs() < 1e-12);
        assert_eq!(resolved.config.model.base, "hub:a/b");
        assert_eq!(resolved.origins["train.micro_batch"], "--set");
        assert!(resolved.to_toml().contains("micro_batch = 3  # --set"));
    }

    #[test]
    fn a_misspelt_key_names_the_nearest() {
        let error = sources(&["train.micro_bacth=3"]).resolve().unwrap_err();
        assert_eq!(error.hint(), "did you mean `train.micro_batch`?");
    }

    #[test]
    fn bad_values_name_their_key() {
        for (set, key) in [("train.micro_batch=0", "train.micro_batch"), ("lora.dropout=1.5", "lora.dropout")] {
            let error = sources(&[set]).resolve().unwrap_err();
            assert!(matches!(&error, Error::Config { key: k, .. } if k == key), "{error}");
        }
        let wrong = |sets: &[&str]| sources(sets).resolve().unwrap_err();
        let error = wrong(&["train.epochs=3", "train.micro_batch=many", "lora.rank=2"]);
        assert_eq!(
            error.to_string(),
            "`train.micro_batch`: invalid type: string \"many\", expected a whole number, 0 or more (--set)"
        );
        assert!(error.hint().starts_with("the preset has `8`; "), "{}", error.hint());
        let error = wrong(&["train.precision=fp64"]).to_string();
        assert!(error.starts_with("`train.precision`: unknown variant `fp64`, expected one of `fp32`"), "{error}");
        assert!(wrong(&["model=3"]).to_string().starts_with("`model`: invalid type"));
    }

    #[test]
    fn questions_share_a_picture_only_where_that_changes_nothing() {
        let set = |other: &str| sources(&["data.questions_per_picture=3", other]).resolve();
        assert_eq!(set("model.batch_norm=frozen").unwrap().config.data.questions_per_picture, 3);
        for (other, remedy) in [
            ("model.semantics=reference", "`model.semantics=corrected`"),
            ("model.batch_norm=batch", "`model.batch_norm=frozen`"),
        ] {
            let error = set(other).unwrap_err();
            assert!(matches!(&error, Error::Config { key, .. } if key == "data.questions_per_picture"), "{error}");
            assert!(error.hint().contains(remedy), "{}", error.hint());
        }
    }

    #[test]
    fn stepping_in_the_backward_pass_excludes_what_needs_all_gradients() {
        let fitting =
            ["train.step_in_backward=true", "train.accumulation=1", "train.clip_norm=0", "train.precision=bf16"];
        assert!(sources(&fitting).resolve().is_ok());
        for (set, remedy) in [
            ("train.accumulation=2", "train.accumulation=1"),
            ("train.clip_norm=1", "train.clip_norm=0"),
            ("train.precision=fp16", "train.precision=bf16"),
        ] {
            let error = sources(&[&fitting[..], &[set]].concat()).resolve().unwrap_err();
            assert!(error.to_string().starts_with("`train.step_in_backward`"), "{error}");
            assert!(error.hint().contains(remedy), "{}", error.hint());
        }
    }

    #[test]
    fn settings_of_augmentation_and_of_synthetic_rows() {
        use crate::data::classical::Augment;
        use crate::data::mix::Ratio;
        let data = |sets: &[&str]| sources(sets).resolve().map(|resolved| (resolved.config.data, resolved.origins));
        let (given, origins) = data(&["data.augment=true", "data.synthetic_ratio=1"]).unwrap();
        assert_eq!((given.augment, given.synthetic_ratio), (Augment::Turn, Ratio::PerReal(1.0)));
        assert_eq!(origins["data.synthetic_ratio"], "--set");
        let (given, _) = data(&["data.augment=classical", "data.synthetic_ratio=all"]).unwrap();
        assert_eq!((given.augment, given.synthetic_ratio), (Augment::Classical, Ratio::All));
        let refused = |set: &str| data(&[set]).unwrap_err().to_string();
        assert!(refused("data.augment=some").starts_with("`data.augment`: invalid value: string \"some\""));
        assert!(refused("data.synthetic_ratio=-1").starts_with("`data.synthetic_ratio`: invalid value"));
        assert_eq!(refused("data.synthetic_until=1.5"), "`data.synthetic_until`: must lie in 0..=1, got 1.5");
    }

    #[test]
    fn sizes_may_come_from_a_file_over_a_preset_without() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sizes.toml");
        let table = |sizes: &Value| {
            let random = [("base", "random"), ("image_encoder", "random")].map(|(k, v)| (k.to_owned(), v.into()));
            let model = random.into_iter().chain([("sizes".to_owned(), sizes.clone())]).collect::<Table>();
            Table::from_iter([("model".to_owned(), Value::Table(model))])
        };
        let resolve = |sizes: &Value| {
            std::fs::write(&file, table(sizes).to_string()).unwrap();
            Sources { preset: Some("full".into()), file: Some(file.clone()), ..Sources::default() }.resolve()
        };
        let mut sizes = preset::<RunConfig>("tiny").unwrap()["model"]["sizes"].clone();
        let found = resolve(&sizes).unwrap();
        assert_eq!(found.config.model.sizes, sources(&[]).resolve().unwrap().config.model.sizes);
        assert_eq!(found.origins["model.sizes.clip.hidden_size"], file.display().to_string());
        sizes["clip"].as_table_mut().unwrap().insert("hiden_size".into(), 3.into());
        assert!(resolve(&sizes).unwrap_err().to_string().contains("model.sizes.clip.hiden_size"));
    }

    #[test]
    fn sizes_are_no_place_for_unknown_keys() {
        for set in ["model.sizes.clip.hiden_size=3", "model.sizes.vocab=9"] {
            let error = sources(&[set]).resolve().unwrap_err();
            assert!(error.to_string().contains(set.split_once('=').unwrap().0), "{error}");
        }
        assert_eq!(sources(&["model.sizes.llm.initializer_range=0.1"]).resolve().unwrap().config.model.image_size, 256);
    }
}
