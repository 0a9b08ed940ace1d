//! Settings that the content of an output folder was made with. A job that continues in the folder must use the same
//! settings.

use crate::tensor::weights::write_bytes;
use crate::{Error, Result, files};
use serde_json::Value;
use std::path::Path;

/// Writes `now` to `path` at the first call. Later calls fail when `now` differs from the file. `argument` is
/// that which names the folder, `what` is its content.
///
/// # Errors
/// [`Error::Argument`] naming the first setting that differs; [`Error::Data`] for a damaged file; [`Error::Io`].
pub(in crate::augment) fn same_settings(path: &Path, now: &Value, argument: &str, what: &str) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return write_bytes(path, &serde_json::to_vec_pretty(now).expect("plain values serialise"));
    }
    let text = files::read(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
    let before: Value = serde_json::from_slice(&text)
        .map_err(|error| Error::data(path, error.to_string(), format!("choose another argument `{argument}`")))?;
    if before == *now {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(path).display();
    let reason = format!("`{folder}` contains {what} made with other settings ({})", difference(&before, now));
    Err(Error::argument(
        argument,
        reason,
        format!("choose another argument `{argument}`, or use the settings of the first run"),
    ))
}

/// The first setting that differs.
fn difference(before: &Value, now: &Value) -> String {
    let (Some(a), Some(b)) = (before.as_object(), now.as_object()) else {
        return format!("{before} before, {now} now");
    };
    for (key, value) in b {
        match a.get(key) {
            Some(other) if other == value => {}
            Some(other) if value.is_object() => return format!("{key}.{}", difference(other, value)),
            other => return format!("{key} was {}, is {value}", other.unwrap_or(&Value::Null)),
        }
    }
    "the file format".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn later_jobs_must_use_the_settings_of_the_first_job() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("settings.json");
        let check = |steps: u64| same_settings(&path, &json!({ "a": 1, "train": { "steps": steps } }), "out", "runs");
        check(2).unwrap();
        check(2).unwrap();
        let error = check(3).unwrap_err().to_string();
        assert!(error.contains("runs made with other settings (train.steps was 2, is 3)"), "{error}");
        check(2).expect("an error does not change the file");
    }
}
