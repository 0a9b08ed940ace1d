//! Checks changes of settings on resume against their declarations.

use super::{RunConfig, Settings as _, leaves, read_file, renamed, table_of, typed, value_at};
use crate::setting::Resume;
use crate::{Error, Result};
use std::path::Path;

/// The settings in a checkpoint's `config.toml`. Settings that are newer than the file have their defaults.
///
/// # Errors
/// [`Error::Data`] for a damaged file; [`Error::Io`].
pub fn read(path: &Path) -> Result<RunConfig> {
    let table = renamed(read_file(path)?, &RunConfig::settings());
    typed(&table).map_err(|reason| Error::data(path, reason, "put the run's own file back, or start a new run"))
}

/// Compares the settings of a run with those it is resumed with, and returns a warning for each change that makes the
/// run differ from an uninterrupted one.
///
/// # Errors
/// [`Error::Config`] for the first setting that may not change.
pub fn check(before: &RunConfig, now: &RunConfig) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    let (old, new) = (table_of(before), table_of(now));
    let mut keys = leaves(&old);
    keys.extend(leaves(&new).into_iter().filter(|(key, _)| value_at(&old, key).is_none()));
    for setting in RunConfig::settings() {
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
                    let hint = format!("use `--set {key}={was}`, or start a new run with another `--out`");
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

    #[test]
    fn a_resumed_run_keeps_what_is_declared_as_fixed() {
        let before = RunConfig::default();
        let resumed = |sets: &str| check(&before, &before.with_sets(sets).unwrap());
        assert_eq!(resumed("train.micro_batch=3 train.accumulation=1 train.checkpointing=none").unwrap(), [""; 0]);
        let warnings = resumed("train.epochs=30 data.workers=3").unwrap();
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].starts_with("`train.epochs` was 20 and is now 30: "), "{}", warnings[0]);
        for set in ["train.seed=1", "model.semantics=reference data.questions_per_image=1", "lora.rank=8"] {
            let error = resumed(set).unwrap_err();
            assert!(set.contains(&error.to_string()[1..8]), "{error}");
            assert!(error.hint().contains("start a new run"), "{}", error.hint());
        }
    }
}
