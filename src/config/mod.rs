//! Configuration: resolves presets, files and flags to a [`RunConfig`] or [`AugmentRun`], with the origin of every
//! value. No module below imports this one.
//!
//! Settings start from the defaults of their declarations ([`Setting`]). A preset states what differs from the
//! defaults. A config file overlays the preset (its own `preset = "NAME"` line, the one asked for, or the default one),
//! and `--set key=value` overlays both. An unknown key is an error that names the nearest setting.

mod check;
pub mod learning_rate;
pub mod reference;
mod synonyms;

#[cfg(test)]
mod tests;

use crate::augment::filter::Thresholds;
pub use crate::augment::finetune::FinetuneRun;
use crate::augment::settings::AugmentConfig;
use crate::plan::machine::Machine;
use crate::runtime::Runtime;
pub use crate::segment::RunConfig;
use crate::setting::table::{self, leaves, nested, parse_value, renamed, replace, value_at, widen};
use crate::setting::{Searched, Setting};
use crate::{Error, Result, files};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
pub use synonyms::setting_named;
use toml::{Table, Value};

/// Presets in the binary: name, text.
pub const PRESETS: [(&str, &str); 13] = [
    ("tiny", include_str!("../../configs/tiny.toml")),
    ("full", include_str!("../../configs/full.toml")),
    ("cpu", include_str!("../../configs/cpu.toml")),
    ("gpu-4gb", include_str!("../../configs/gpu-4gb.toml")),
    ("gpu-6gb", include_str!("../../configs/gpu-6gb.toml")),
    ("gpu-8gb", include_str!("../../configs/gpu-8gb.toml")),
    ("gpu-12gb", include_str!("../../configs/gpu-12gb.toml")),
    ("gpu-16gb", include_str!("../../configs/gpu-16gb.toml")),
    ("gpu-24gb", include_str!("../../configs/gpu-24gb.toml")),
    ("gpu-40gb", include_str!("../../configs/gpu-40gb.toml")),
    ("gpu-48gb", include_str!("../../configs/gpu-48gb.toml")),
    ("gpu-80gb", include_str!("../../configs/gpu-80gb.toml")),
    ("gpu-141gb", include_str!("../../configs/gpu-141gb.toml")),
];

/// Settings of generating image+mask pairs.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AugmentRun {
    /// The generator.
    pub augment: AugmentConfig,
    /// The filter.
    pub filter: Thresholds,
}

/// A config: all settings of a job. Its default has the declared defaults.
pub trait Settings: Default + Clone + serde::Serialize + serde::de::DeserializeOwned {
    /// Presets in the binary: name, text.
    const PRESETS: &'static [(&'static str, &'static str)] = &[];
    /// The preset that has the defaults; none if it is empty.
    const DEFAULT_PRESET: &'static str = "";
    /// The setting of the precision.
    const PRECISION: &'static str = "train.precision";
    /// The command that prints all settings.
    const PRINTS: &'static str = "prsmed train --print-config";

    /// Declarations of all settings.
    fn settings() -> Vec<Setting>;

    /// Refuses settings that cannot be used together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    fn check_together(&self) -> Result<()> {
        Ok(())
    }

    /// This config with what `other` has beside its settings.
    #[must_use]
    fn beside(self, _other: &Self) -> Self {
        self
    }

    /// Refuses values out of range, and settings that cannot be used together.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key.
    fn check(&self) -> Result<()> {
        let (values, defaults) = (table_of(self), table_of(&Self::default()));
        for setting in Self::settings() {
            if let (Some(value), Some(default)) = (value_at(&values, setting.key), value_at(&defaults, setting.key))
                && let Some(number) = table::number(value)
            {
                setting.check(number, default)?;
            }
        }
        for (key, value) in leaves(&values) {
            if let Value::String(text) = value
                && text.contains(char::is_control)
            {
                let reason = format!("`{}` contains a control character", text.escape_debug());
                return Err(Error::config(key, reason, "remove the line break or other control character"));
            }
        }
        self.check_together()
    }

    /// These settings with `key=value` assignments, separated by spaces.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown key or a bad value.
    fn with_sets(&self, sets: &str) -> Result<Self> {
        let mut table = table_of(self);
        for (key, value) in sets.split(' ').filter_map(|set| set.split_once('=')) {
            overlay(&mut table, nested(key, parse_value(value)), "", "", &mut BTreeMap::new())?;
        }
        let config: Self = typed(&table).map_err(|reason| Error::config(sets, reason, ""))?;
        config.check()?;
        Ok(config.beside(self))
    }

    /// `key=value` of every setting in which it differs from `other`.
    fn changes_from(&self, other: &Self) -> Vec<String> {
        let (own, others) = (table_of(self), table_of(other));
        let differing = leaves(&own).into_iter().filter(|(key, value)| value_at(&others, key) != Some(*value));
        differing.map(|(key, value)| format!("{key}={value}")).collect()
    }

    /// The settings that a search may change, in the order in which it tries them, of those for which `is_meant` is true.
    fn searched_settings(&self, is_meant: impl Fn(&Setting) -> bool) -> Vec<(&'static str, Searched)> {
        let all = Self::settings().into_iter().filter(is_meant);
        let mut found: Vec<_> = all.filter_map(|setting| Some((setting.key, setting.searched?))).collect();
        found.sort_by_key(|(_, searched)| searched.order);
        found
    }

    /// The value of the setting `key` as text.
    ///
    /// # Panics
    /// For a key that does not exist.
    fn value_of(&self, key: &str) -> String {
        match value_at(&table_of(self), key).expect("a declared setting") {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        }
    }

    /// The settings that differ from the declared defaults, as TOML for `--config`.
    ///
    /// # Panics
    /// Never: plain values serialise.
    fn to_preset(&self) -> String {
        let (own, defaults) = (table_of(self), table_of(&Self::default()));
        let base = (!Self::DEFAULT_PRESET.is_empty()).then(|| ("preset".to_owned(), Self::DEFAULT_PRESET.into()));
        let mut stated = Table::from_iter(base);
        for (key, value) in leaves(&own) {
            if value_at(&defaults, &key) != Some(value) {
                table::insert(&mut stated, &key, value.clone());
            }
        }
        toml::to_string(&stated).expect("plain values serialise")
    }
}

impl Settings for RunConfig {
    const PRESETS: &'static [(&'static str, &'static str)] = &PRESETS;
    const DEFAULT_PRESET: &'static str = "full";

    fn settings() -> Vec<Setting> {
        Self::declarations()
    }

    fn check_together(&self) -> Result<()> {
        check::check(self)
    }

    fn beside(self, other: &Self) -> Self {
        Self { configs: other.configs.clone(), ..self }
    }
}

impl Settings for AugmentRun {
    const PRESETS: &'static [(&'static str, &'static str)] = &[
        ("augment", include_str!("../../configs/augment.toml")),
        ("tiny", include_str!("../../configs/augment-tiny.toml")),
    ];
    const DEFAULT_PRESET: &'static str = "augment";
    const PRECISION: &'static str = "augment.precision";
    const PRINTS: &'static str = "prsmed augment generate --print-config";

    fn settings() -> Vec<Setting> {
        [AugmentConfig::settings(), Thresholds::settings()].concat()
    }

    fn check_together(&self) -> Result<()> {
        self.augment.check()
    }
}

impl Settings for FinetuneRun {
    const PRESETS: &'static [(&'static str, &'static str)] = &[
        ("lora-sdxl", include_str!("../../configs/finetune-lora-sdxl.toml")),
        ("lora-sd15", include_str!("../../configs/finetune-lora-sd15.toml")),
        ("full-sdxl", include_str!("../../configs/finetune-full-sdxl.toml")),
        ("full-sd15", include_str!("../../configs/finetune-full-sd15.toml")),
        ("inpaint-sd15", include_str!("../../configs/finetune-inpaint-sd15.toml")),
        ("controlnet-sd15", include_str!("../../configs/finetune-controlnet-sd15.toml")),
        ("tiny", include_str!("../../configs/finetune-tiny.toml")),
    ];
    const DEFAULT_PRESET: &'static str = "lora-sdxl";
    const PRINTS: &'static str = "prsmed augment finetune --print-config";

    fn settings() -> Vec<Setting> {
        Self::declarations()
    }

    fn check_together(&self) -> Result<()> {
        self.check()
    }
}

impl RunConfig {
    /// The settings of a preset.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown name.
    pub fn preset(name: &str) -> Result<Self> {
        Self::preset_with(name, &[])
    }

    /// The settings of a preset with `key=value` pairs over it.
    ///
    /// ```
    /// use prsmed::prelude::*;
    ///
    /// let config = RunConfig::preset_with("tiny", &["train.micro_batch=2"])?;
    /// assert_eq!(config.train.micro_batch, 2);
    /// # Ok::<(), prsmed::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown name or key, or a value out of range.
    pub fn preset_with(name: &str, sets: &[&str]) -> Result<Self> {
        Ok(Sources::preset(name, sets).resolve()?.config)
    }
}

/// Dotted key -> `default`, `preset tiny`, `FILE`, `--set`.
type Origins = BTreeMap<String, String>;

/// A config with the origin of each value.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved<T = RunConfig> {
    /// The values.
    pub config: T,
    /// Dotted key -> `default`, `preset tiny`, `FILE`, `--set`.
    pub origins: Origins,
    /// The origins that the file of a continued run states for the values that are still its own.
    stated: Origins,
}

/// A `key=value` pair with the flag that it came from.
pub type FlagSet = (String, String);

/// Sources of values, from lowest to highest priority.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// Preset name.
    pub preset: Option<String>,
    /// Used when neither the caller nor the file names a preset.
    pub default_preset: String,
    /// TOML file over the preset.
    pub file: Option<PathBuf>,
    /// The file is the `config.toml` of the run that is continued: [`Resolved::to_toml`] repeats the origins in it.
    pub continues: bool,
    /// `key=value` pairs over both, with the flag they came from.
    pub sets: Vec<FlagSet>,
}

impl Sources {
    /// A preset with `key=value` pairs over it.
    pub fn preset(name: &str, sets: &[&str]) -> Self {
        let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
        Self { preset: Some(name.to_owned()), sets, ..Self::default() }
    }

    /// [`Self::resolve_as`] for training.
    ///
    /// # Errors
    /// Those of [`Self::resolve_as`].
    pub fn resolve(&self) -> Result<Resolved> {
        self.resolve_as()
    }

    /// Merges all sources and checks the result.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key; [`Error::Io`] for the file.
    pub fn resolve_as<T: Settings>(&self) -> Result<Resolved<T>> {
        let settings = T::settings();
        let mut file_table = self.file.as_deref().map(read_file).transpose()?.unwrap_or_default();
        let named = file_table.remove("preset").map(|v| v.as_str().map(str::to_owned).unwrap_or_default());
        let name = self.preset.clone().or(named).unwrap_or_else(|| self.default_preset.clone());
        let mut table = table_of(&T::default());
        let mut origins = leaves(&table).into_iter().map(|(key, _)| (key, "default".to_owned())).collect();
        overlay(&mut table, preset::<T>(&name)?, "", &format!("preset {name}"), &mut origins)?;
        let preset = table.clone();
        if let Some(path) = &self.file {
            overlay(&mut table, renamed(file_table, &settings)?, "", &path.display().to_string(), &mut origins)?;
        }
        for (assignment, flag) in &self.sets {
            let (key, value) = assignment.split_once('=').ok_or_else(|| {
                let hint = "write for example the setting `train.epochs=5`";
                Error::config(flag, format!("`{assignment}` is not `key=value`"), hint)
            })?;
            let patch = nested(key.trim(), parse_value(value.trim()));
            overlay(&mut table, renamed(patch, &settings)?, "", flag, &mut origins)?;
        }
        let config: T = typed(&table).map_err(|reason| bad_value::<T>(&reason, &table, &preset, &origins))?;
        refuse_unread(&config, &origins)?;
        config.check()?;
        let continued = self.file.as_deref().filter(|_| self.continues);
        let mut stated = continued.map(stated_origins).transpose()?.unwrap_or_default();
        let own = self.file.as_ref().map(|path| path.display().to_string());
        stated.retain(|key, _| origins.get(key) == own.as_ref());
        Ok(Resolved { config, origins, stated })
    }
}

/// The origins in the comments of a file that [`Resolved::to_toml`] wrote.
fn stated_origins(path: &Path) -> Result<Origins> {
    let text = files::read_to_string(path, files::MAX_SETTINGS).map_err(Error::io(path, "read"))?;
    let values = text.lines().scan(String::new(), |section, line| {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            name.clone_into(section);
        }
        let stated = line.split_once(" = ").and_then(|(key, value)| Some((key, value.rsplit_once("  # ")?.1)));
        Some(stated.map(|(key, origin)| (format!("{section}.{key}"), origin.to_owned())))
    });
    Ok(values.flatten().collect())
}

/// Ending of the origin of a precision that [`Resolved::fit_precision`] changed.
const NO_BF16: &str = " has no bf16";

impl<T: Settings> Resolved<T> {
    /// True if a flag gave `key` its value.
    pub fn is_from_a_flag(&self, key: &str) -> bool {
        self.origins.get(key).is_some_and(|origin| origin.starts_with("--"))
    }

    /// As [`Self::fit_precision`], with a note about another precision.
    ///
    /// # Errors
    /// As there.
    pub fn fit_with_note(self, machine: &Machine, runtime: &Runtime) -> Result<Self> {
        let fitted = self.fit_precision(machine)?;
        fitted.precision_note().into_iter().for_each(|note| runtime.note(note));
        Ok(fitted)
    }

    /// A note if [`Self::fit_precision`] changed the precision.
    pub fn precision_note(&self) -> Option<String> {
        let origin = self.origins.get(T::PRECISION).filter(|origin| origin.ends_with(NO_BF16))?;
        Some(format!("{origin}: using `{}=fp16`", T::PRECISION))
    }

    /// These settings with fp16 instead of bf16 if the machine has no bf16, unless a flag or a file asks for bf16.
    ///
    /// # Errors
    /// [`Error::Config`] if fp16 excludes another setting.
    pub fn fit_precision(mut self, machine: &Machine) -> Result<Self> {
        let key = T::PRECISION;
        let is_asked = self.origins.get(key).is_some_and(|origin| is_set(origin));
        let is_bf16 = value_at(&table_of(&self.config), key).and_then(Value::as_str) == Some("bf16");
        if is_bf16 && !is_asked && !machine.has_bf16() {
            self.config = self.config.with_sets(&format!("{key}=fp16"))?;
            self.origins.insert(key.to_owned(), machine.offer().device + NO_BF16);
        }
        Ok(self)
    }

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
            let key = line.split_once(" = ").map(|(key, _)| format!("{section}.{key}"));
            match key.and_then(|key| self.stated.get(&key).or_else(|| self.origins.get(&key))) {
                Some(origin) => writeln!(out, "{line}  # {}", origin.replace(char::is_control, " ")),
                None => writeln!(out, "{line}"),
            }
            .expect("writing to a string");
        }
        out
    }
}

/// All settings of `config`; those without a value are missing.
fn table_of<T: Settings>(config: &T) -> Table {
    Table::try_from(config).expect("plain values serialise")
}

fn preset<T: Settings>(name: &str) -> Result<Table> {
    if name.is_empty() {
        return Ok(Table::new());
    }
    let names: Vec<&str> = T::PRESETS.iter().map(|(name, _)| *name).collect();
    let (_, text) = T::PRESETS.iter().find(|(known, _)| *known == name).ok_or_else(|| {
        let others = [
            ("train", RunConfig::PRESETS),
            ("augment generate", AugmentRun::PRESETS),
            ("augment finetune", FinetuneRun::PRESETS),
        ];
        let of_other = others.iter().find(|(_, presets)| presets.iter().any(|(known, _)| *known == name));
        let owner = of_other.map_or_else(String::new, |(command, _)| format!("it belongs to `prsmed {command}`; "));
        let hint = format!("{owner}use one of {}", names.join(", "));
        Error::argument("preset", format!("there is no preset `{name}`"), hint)
    })?;
    let mut table = text.parse::<Table>().expect("the embedded presets are parsed by a test");
    table.remove("preset");
    Ok(table)
}

fn read_file(path: &Path) -> Result<Table> {
    let text = files::read_to_string(path, files::MAX_SETTINGS).map_err(Error::io(path, "read"))?;
    text.parse::<Table>().map_err(|e| {
        let line = e.span().map_or(1, |span| text[..span.start].lines().count().max(1) as u64);
        Error::data_line(path, line, e.message().to_owned(), "correct the TOML; `configs/tiny.toml` is an example")
    })
}

/// Overlays `table` with `patch`. Keys that the table does not have are errors, except those of the optional
/// `model.sizes`.
fn overlay(table: &mut Table, patch: Table, prefix: &str, origin: &str, origins: &mut Origins) -> Result<()> {
    for (key, value) in patch {
        let path = table::join(prefix, &key);
        if path.starts_with("model.sizes") && !table.contains_key(&key) {
            let new = Table::from_iter([(key, value)]);
            origins.extend(leaves(&new).into_iter().map(|(key, _)| (table::join(prefix, &key), origin.to_owned())));
            table.extend(new);
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

/// The table as settings, or serde's message about the first wrong value.
fn typed<T: Settings>(table: &Table) -> Result<T, String> {
    Value::Table(table.clone()).try_into().map_err(|error: toml::de::Error| {
        let words = [
            ("expected usize", "expected a whole number, 0 or more"),
            ("expected u64", "expected a whole number, 0 or more"),
            ("expected i64", "expected a whole number"),
            ("expected f64", "expected a number"),
            ("expected struct", "expected a table"),
        ];
        words.into_iter().fold(error.message().to_owned(), |text, (kind, words)| text.replace(kind, words))
    })
}

/// True for the origin of a value that the user has given.
fn is_set(origin: &str) -> bool {
    origin != "default" && !origin.starts_with("preset ")
}

/// The error about a wrong value. Serde does not name its key, so each one that was set is put back to the preset's
/// value: the wrong one is the one that changes serde's message.
fn bad_value<T: Settings>(reason: &str, table: &Table, preset: &Table, origins: &Origins) -> Error {
    let is_wrong = |key: &str| {
        let mut corrected = table.clone();
        replace(&mut corrected, key, value_at(preset, key).cloned());
        typed::<T>(&corrected).err().is_none_or(|now| now != reason)
    };
    let Some((key, origin)) = origins.iter().find(|(key, origin)| is_set(origin) && is_wrong(key)) else {
        return Error::config("config", reason, format!("compare with `{}`", T::PRINTS));
    };
    let show = format!("`{}` shows all settings", T::PRINTS);
    let hint = match value_at(preset, key) {
        Some(value) if !value.is_table() => format!("the preset has `{value}`; {show}"),
        _ => show,
    };
    Error::config(key, format!("{reason} ({origin})"), hint)
}

/// Refuses keys that no setting reads. Sizes are read as leniently as a model's `config.json`, which has more keys than
/// are needed.
fn refuse_unread(config: &impl Settings, origins: &Origins) -> Result<()> {
    let read = table_of(config);
    let known = leaves(&read).into_iter().map(|(key, _)| (key, String::new())).collect();
    match origins.iter().find(|(key, _)| value_at(&read, key).is_none()) {
        Some((key, origin)) => Err(unknown_key(key, origin, &known)),
        None => Ok(()),
    }
}

fn unknown_key(path: &str, origin: &str, known: &Origins) -> Error {
    let similarity = |key: &str| strsim::jaro_winkler(key, path);
    let synonym = synonyms::synonym(path).filter(|own| known.contains_key(*own));
    let nearest = || known.keys().max_by(|a, b| similarity(a).total_cmp(&similarity(b))).map(String::as_str);
    // the right name without its table, or in another one
    let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_owned();
    let same_name = || known.keys().find(|key| last(key) == last(path)).map(String::as_str);
    let hint =
        synonym.or_else(same_name).or_else(nearest).map_or_else(String::new, |key| format!("did you mean `{key}`?"));
    Error::config(path, format!("there is no such setting ({origin})"), hint)
}
