//! Whether a run may continue: its settings and its data are compared with those of the checkpoint.

use crate::data::identity::DataIdentity;
use crate::data::manifest::Manifest;
use crate::files;
use crate::segment::RunConfig;
use crate::setting::table::{leaves, renamed, value_at};
use crate::setting::{Resume, Setting};
use crate::tensor::weights::readable_folder;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use toml::Table;

/// The settings in a checkpoint.
pub const CONFIG_FILE: &str = "config.toml";
/// The identity of the rows in a checkpoint.
pub const DATA_FILE: &str = "data.json";

/// The checkpoint from which a training in `folder` continues.
///
/// # Errors
/// [`Error::Config`] if there is one and the training does not resume.
pub fn checkpoint_in(folder: &Path, resumes: bool) -> Result<Option<PathBuf>> {
    let checkpoint = readable_folder(&folder.join("last")).ok();
    if checkpoint.is_some() && !resumes {
        let hint = "add the argument `resume` to continue it, or choose another argument `out`";
        return Err(Error::argument("out", format!("`{}` already contains a run", folder.display()), hint));
    }
    Ok(checkpoint)
}

/// Compares `config` and the rows of `manifest` with those of the checkpoint in `folder`. Returns a warning for each
/// setting that makes the run differ from an uninterrupted one. Checkpoints of earlier versions do not have all files;
/// what is missing is not compared.
///
/// # Errors
/// [`Error::Config`] for the first setting that may not change; [`Error::Data`] for rows that have changed, and for a
/// damaged file of the checkpoint.
pub fn check(folder: &Path, config: &RunConfig, manifest: &Manifest) -> Result<Vec<String>> {
    check_settings_and_rows(folder, (config, &RunConfig::declarations()), manifest)
}

/// As [`check`], for the settings of any job, with their declarations.
///
/// # Errors
/// As [`check`].
pub fn check_settings_and_rows<T: serde::Serialize + serde::de::DeserializeOwned>(
    folder: &Path,
    (config, declarations): (&T, &[Setting]),
    manifest: &Manifest,
) -> Result<Vec<String>> {
    let warnings = check_settings(folder, (config, declarations))?;
    let saved = folder.join(DATA_FILE);
    if saved.exists() {
        let before = DataIdentity::read(&saved)?;
        if let Some(difference) = DataIdentity::of(manifest)?.difference(&before, manifest) {
            let hint =
                "resume with the data that the run was started on, or start a new run with another argument `out`";
            return Err(Error::data(
                &manifest.root,
                format!("is not the data of the run to resume: {difference}"),
                hint,
            ));
        }
    }
    Ok(warnings)
}

/// As [`check_settings_and_rows`], for a job without rows.
///
/// # Errors
/// As [`check`].
pub fn check_settings<T: serde::Serialize + serde::de::DeserializeOwned>(
    folder: &Path,
    (config, declarations): (&T, &[Setting]),
) -> Result<Vec<String>> {
    let saved = folder.join(CONFIG_FILE);
    if saved.exists() { compare(&read_as::<T>(&saved, declarations)?, config, declarations) } else { Ok(Vec::new()) }
}

/// The settings in a checkpoint's `config.toml`. Settings that are newer than the file have their defaults.
///
/// # Errors
/// [`Error::Data`] for a damaged file; [`Error::Io`].
pub fn read(path: &Path) -> Result<RunConfig> {
    read_as(path, &RunConfig::declarations())
}

fn read_as<T: serde::de::DeserializeOwned>(path: &Path, declarations: &[Setting]) -> Result<T> {
    let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
    let damaged = |error: toml::de::Error| {
        Error::data(
            path,
            error.message(),
            "put the run's own file back, or start a new run with another argument `out`",
        )
    };
    let table = renamed(text.parse::<Table>().map_err(damaged)?, declarations)?;
    table.try_into().map_err(damaged)
}

/// Compares the settings of a run with those it is resumed with, and returns a warning for each change that makes the
/// run differ from an uninterrupted one.
fn compare<T: serde::Serialize>(before: &T, now: &T, declarations: &[Setting]) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let [old, new] = [before, now].map(|config| Table::try_from(config).expect("plain values serialise"));
    let mut keys = leaves(&old);
    keys.extend(leaves(&new).into_iter().filter(|(key, _)| value_at(&old, key).is_none()));
    for setting in declarations {
        let is_part = |key: &str| key == setting.key || key.starts_with(&format!("{}.", setting.key));
        for (key, _) in keys.iter().filter(|(key, _)| is_part(key)) {
            let [was, is] = [&old, &new].map(|table| value_at(table, key).map_or("unset".into(), ToString::to_string));
            match setting.resume {
                _ if was == is => {}
                Resume::Free => {}
                Resume::Warn => warnings.push(format!(
                    "`{key}` was {was} and is now {is}: the results differ from those of an uninterrupted run"
                )),
                Resume::Fixed => {
                    let reason = format!("the run to resume has {was}, and {is} would make it another run");
                    let hint = format!("use the setting `{key}={was}`, or start a new run with another argument `out`");
                    return Err(Error::config(key, reason, hint));
                }
            }
        }
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::manifest::Manifest;
    use toml::Value;

    /// Another value for each setting whose values are words.
    const WORDS: [(&str, &str); 17] = [
        ("model.semantics", "reference"),
        ("model.quantization", "nf4"),
        ("model.stream_layers", "full"),
        ("model.packed_attention", "flash"),
        ("model.batch_norm", "batch"),
        ("model.decoder", "v6"),
        ("data.cache_vision", "ram"),
        ("data.augment", "flip_rotate"),
        ("data.labels", "1,3"),
        ("data.synthetic_ratio", "0.5"),
        ("train.precision", "fp16"),
        ("train.checkpointing", "none"),
        ("train.checkpoint_encoder", "none"),
        ("train.optimizer", "adamw8bit"),
        ("train.graph", "on"),
        ("train.fused_kernels", "on"),
        ("train.offload_optimizer", "true"),
    ];

    /// The default settings with another value of `key`.
    fn changed(key: &str) -> RunConfig {
        let mut table = Table::try_from(RunConfig::default()).unwrap();
        let value = value_at(&table, key).cloned();
        let word = WORDS.iter().find(|(known, _)| *known == key).map(|(_, word)| *word);
        let other = match (word, value) {
            (Some(word), _) => crate::setting::table::parse_value(word),
            (None, Some(Value::Boolean(value))) => Value::Boolean(!value),
            (None, Some(Value::Integer(value))) => Value::Integer(value + 16),
            (None, Some(Value::Float(value))) => Value::Float(value / 2.0 + 0.125),
            (None, Some(Value::String(_))) => Value::String("random".into()),
            (None, _) => panic!("{key} has no value"),
        };
        crate::setting::table::insert(&mut table, key, other);
        table.try_into().unwrap_or_else(|error| panic!("{key}: {error}"))
    }

    #[test]
    fn every_changed_setting_is_refused_or_warned_of_or_declared_harmless() {
        let before = RunConfig::default();
        for setting in RunConfig::declarations().into_iter().filter(|setting| setting.key != "model.sizes") {
            let now = changed(setting.key);
            assert_ne!(now, before, "{}", setting.key);
            let outcome = compare(&before, &now, &RunConfig::declarations());
            match setting.resume {
                Resume::Free => assert_eq!(outcome.unwrap(), [""; 0], "{}", setting.key),
                Resume::Warn => {
                    let warnings = outcome.unwrap();
                    assert_eq!(warnings.len(), 1, "{}", setting.key);
                    assert!(warnings[0].starts_with(&format!("`{}` was ", setting.key)), "{}", warnings[0]);
                }
                Resume::Fixed => {
                    let error = outcome.unwrap_err();
                    assert!(error.to_string().starts_with(&format!("`{}`: the run to resume has ", setting.key)));
                    assert!(error.hint().contains("start a new run"), "{}", error.hint());
                }
            }
        }
    }

    #[test]
    fn settings_that_may_change_without_a_warning_are_these() {
        let free = RunConfig::declarations().into_iter().filter(|setting| setting.resume == Resume::Free);
        let free: Vec<&str> = free.map(|setting| setting.key).collect();
        assert_eq!(
            free,
            [
                "model.stream_layers",
                "model.stream_vision",
                "model.divide_layers",
                "model.packed_attention",
                "train.micro_batch",
                "train.accumulation",
                "train.checkpoint_every_steps",
                "train.validate_every_epochs",
                "train.patience",
                "train.max_skipped_steps",
                "train.deterministic",
                "train.checkpointing",
                "train.checkpoint_encoder",
                "train.checkpoint_decoder",
                "train.offload_optimizer",
                "train.offload_weights",
                "train.step_in_backward",
                "train.graph",
                "train.fused_kernels",
                "train.zero_stage",
                "train.reduce_bucket_mib",
                "data.workers",
                "data.prefetch",
                "data.cache_mib",
                "data.cache_vision",
                "data.cache_vision_mib",
                "data.max_bad_samples",
                "data.max_val_rows",
            ]
        );
    }

    #[test]
    fn changed_rows_are_named_and_a_moved_data_root_is_the_same_data() {
        use crate::fixture::Root;
        let root = |answer: &str| {
            let root = Root::new();
            let rows = format!("ct/train_masks/a.png,Where?,Left.,train\nct/train_masks/b.png,Where?,{answer},train\n");
            root.csv("ct.csv", &format!("image_path,question,answer,split\n{rows}"));
            root.pair("ct", "train", "a");
            root.pair("ct", "train", "b");
            root
        };
        let (first, moved, other) = (root("Right."), root("Right."), root("Left."));
        let open = |root: &Root| Manifest::open(root.path(), None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let identity = DataIdentity::of(&open(&first)).unwrap();
        std::fs::write(folder.path().join(DATA_FILE), identity.to_json()).unwrap();
        let config = RunConfig::default();
        check(folder.path(), &config, &open(&first)).unwrap();
        check(folder.path(), &config, &open(&moved)).unwrap();
        let error = check(folder.path(), &config, &open(&other)).unwrap_err();
        assert!(error.to_string().contains("ct.csv:3"), "{error}");
    }
}
