//! What a load found, key by key.

use std::fmt;
use std::path::Path;

use crate::error::{Error, Result};

/// A tensor whose stored shape is not the model's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MisShaped {
    /// Its key.
    pub name: String,
    /// The model's shape.
    pub expected: Vec<i64>,
    /// The stored shape.
    pub got: Vec<i64>,
}

/// Which keys of a checkpoint were used and which not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Copied into the model.
    pub loaded: Vec<String>,
    /// Wanted by the model, not stored.
    pub missing: Vec<String>,
    /// Stored, not wanted and not known to be ignorable.
    pub unexpected: Vec<String>,
    /// Wanted and stored with different shapes.
    pub mis_shaped: Vec<MisShaped>,
    /// Stored, unused, known to be ignorable.
    pub ignored: Vec<String>,
}

impl LoadReport {
    /// Whether every wanted tensor was loaded and nothing unknown was left.
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

    /// The report itself when it is clean.
    ///
    /// # Errors
    /// [`Error::Weights`] about `path`, listing every key, when anything is missing, unexpected or mis-shaped.
    pub fn into_result(self, path: &Path) -> Result<Self> {
        if self.is_clean() {
            return Ok(self);
        }
        Err(Error::weights(path, self.to_string(), "use the checkpoint and the config that belong together"))
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
        for name in &self.missing {
            write!(f, "\n  missing: {name}")?;
        }
        for name in &self.unexpected {
            write!(f, "\n  unexpected: {name}")?;
        }
        for MisShaped { name, expected, got } in &self.mis_shaped {
            write!(f, "\n  shape: {name} is {got:?}, expected {expected:?}")?;
        }
        for name in &self.ignored {
            write!(f, "\n  ignored: {name}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_lists_every_key_and_refuses() {
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
    fn ignored_keys_alone_are_no_reason_to_refuse() {
        let mut report = LoadReport { loaded: vec!["a".into()], ignored: vec!["e".into()], ..LoadReport::default() };
        report.merge(LoadReport { loaded: vec!["f".into()], ..LoadReport::default() });
        assert_eq!(report.into_result(Path::new("x")).unwrap().loaded, ["a", "f"]);
    }
}
