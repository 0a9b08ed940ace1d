//! Report of a load: which keys of a checkpoint were loaded, missing or unexpected.

use std::fmt;
use std::path::Path;

use prsmed_base::error::{Error, Result};

/// Most keys of each kind in a message.
const MAX_LINES: usize = 100;

/// A tensor whose stored shape differs from the model's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MisShaped {
    /// Key of the tensor.
    pub name: String,
    /// The model's shape.
    pub expected: Vec<i64>,
    /// The stored shape.
    pub got: Vec<i64>,
}

/// Keys of a checkpoint, by the result of loading them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Copied into the model.
    pub loaded: Vec<String>,
    /// In the model, but not in the checkpoint.
    pub missing: Vec<String>,
    /// In the checkpoint, but not in the model, and not ignorable.
    pub unexpected: Vec<String>,
    /// In both, with different shapes.
    pub mis_shaped: Vec<MisShaped>,
    /// In the checkpoint, but not in the model, and ignorable.
    pub ignored: Vec<String>,
}

impl LoadReport {
    /// True if every tensor of the model was loaded and no key was unexpected.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mis_shaped.is_empty()
    }

    /// Adds the keys of another part of the same checkpoint.
    pub fn merge(&mut self, other: Self) {
        self.loaded.extend(other.loaded);
        self.missing.extend(other.missing);
        self.unexpected.extend(other.unexpected);
        self.mis_shaped.extend(other.mis_shaped);
        self.ignored.extend(other.ignored);
    }

    /// Returns the report itself if it is clean.
    ///
    /// # Errors
    /// [`Error::Weights`] about `path` with the first keys, if a tensor is missing, unexpected or has another shape.
    pub fn into_result(self, path: &Path) -> Result<Self> {
        if self.is_clean() {
            return Ok(self);
        }
        Err(Error::weights(path, self.to_string(), "use the config that belongs to this checkpoint"))
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} loaded, {} missing, {} unexpected, {} of another shape, {} ignored",
            self.loaded.len(),
            self.missing.len(),
            self.unexpected.len(),
            self.mis_shaped.len(),
            self.ignored.len()
        )?;
        let shape = |one: &MisShaped| format!("{} is {:?}, expected {:?}", one.name, one.got, one.expected);
        lines(f, "missing", &self.missing, String::clone)?;
        lines(f, "unexpected", &self.unexpected, String::clone)?;
        lines(f, "shape", &self.mis_shaped, shape)?;
        lines(f, "ignored", &self.ignored, String::clone)
    }
}

/// A line for each of the first keys.
fn lines<T>(f: &mut fmt::Formatter<'_>, what: &str, keys: &[T], text: impl Fn(&T) -> String) -> fmt::Result {
    for key in keys.iter().take(MAX_LINES) {
        write!(f, "\n  {what}: {}", text(key))?;
    }
    match keys.len().saturating_sub(MAX_LINES) {
        0 => Ok(()),
        more => write!(f, "\n  {what}: {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_with_mismatches_is_an_error_that_lists_every_key() {
        let report = LoadReport {
            loaded: vec!["a".into()],
            missing: vec!["b".into()],
            unexpected: vec!["c".into()],
            mis_shaped: vec![MisShaped { name: "d".into(), expected: vec![2, 3], got: vec![3, 2] }],
            ignored: vec!["e".into()],
        };
        assert_eq!(
            report.to_string(),
            "1 loaded, 1 missing, 1 unexpected, 1 of another shape, 1 ignored\n  missing: b\n  unexpected: c\n  \
             shape: d is [3, 2], expected [2, 3]\n  ignored: e"
        );
        let error = report.into_result(Path::new("run/x.pth")).unwrap_err();
        assert!(error.to_string().starts_with("run/x.pth: 1 loaded, 1 missing"), "{error}");
    }

    #[test]
    fn the_message_of_a_hostile_file_is_short() {
        let of = |length: usize| {
            let missing = (0..1000).map(|number| format!("{number}{}", "x".repeat(length))).collect();
            LoadReport { missing, ..LoadReport::default() }.into_result(Path::new("x")).unwrap_err().to_string()
        };
        assert!(of(3).ends_with("\n  missing: 99xxx\n  missing: 900 more"));
        assert!(of(10_000).len() < 40_000);
    }

    #[test]
    fn ignored_keys_are_not_an_error() {
        let mut report = LoadReport { loaded: vec!["a".into()], ignored: vec!["e".into()], ..LoadReport::default() };
        report.merge(LoadReport { loaded: vec!["f".into()], ..LoadReport::default() });
        assert_eq!(report.into_result(Path::new("x")).unwrap().loaded, ["a", "f"]);
    }
}
