//! Declaration of a setting: range, help, effect on memory and on results, and whether it may change on resume.
//!
//! `settings!` makes a struct, its serde code and its defaults from the declarations. Presets, `--set`, the reference
//! in `docs/`, the check of a resumed run and the planner's suggestions read [`Setting`].

pub mod table;

use crate::{Error, Result};
use std::fmt;
use std::ops::{Bound, RangeBounds};

/// Effect of a setting on the results of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultsEffect {
    /// None: the same numbers.
    Same,
    /// The same arithmetic in another order.
    Rounding,
    /// Other results.
    Changes,
}

/// Rule for changing a setting on resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// Yes.
    Free,
    /// Yes, with a warning: results then differ from those of an uninterrupted run.
    Warn,
    /// No.
    Fixed,
}

/// A setting: everything that is known about it but its type and default, which its struct has.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Dotted key.
    pub key: &'static str,
    /// Meaning.
    pub help: String,
    /// Effect on results.
    pub results: ResultsEffect,
    /// Whether it may change on resume.
    pub resume: Resume,
    /// Effect on memory; empty = none.
    pub memory: &'static str,
    /// Legal numbers.
    pub range: Option<Range>,
    /// Names of earlier versions, without the section.
    pub old_names: Vec<&'static str>,
    /// The value that saves memory, and what it costs.
    pub saving: Option<(&'static str, &'static str)>,
    /// Values that the search for settings tries.
    pub searched: Option<Searched>,
}

/// Values that the search for settings tries, with their descriptions: the fastest value first, the one that needs the
/// least memory last. In a description, `{}` stands for a number of layers.
pub type Values = &'static [(&'static str, &'static str)];

/// Part of a setting in the search for settings that fit a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Searched {
    /// Settings with a lower number are tried first.
    pub order: u8,
    /// The values that are tried.
    pub values: Values,
}

impl Setting {
    /// A setting without effect on memory and without a range. `help` is the text of its doc comment.
    pub fn new(key: &'static str, help: &str, results: ResultsEffect, resume: Resume) -> Self {
        let help = help.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        Self { key, help, results, resume, memory: "", range: None, old_names: vec![], saving: None, searched: None }
    }

    /// Its effect on memory.
    #[must_use]
    pub fn memory(self, memory: &'static str) -> Self {
        Self { memory, ..self }
    }

    /// Legal numbers.
    #[must_use]
    pub fn range(self, range: impl RangeBounds<f64>) -> Self {
        let bounds = (range.start_bound().cloned(), range.end_bound().cloned());
        Self { range: Some(Range { bounds, multiple_of: 1 }), ..self }
    }

    /// Legal numbers are multiples of `unit`.
    #[must_use]
    pub fn multiple_of(mut self, unit: u32) -> Self {
        self.range = self.range.map(|range| Range { multiple_of: unit, ..range });
        self
    }

    /// `value` saves memory at this `cost`.
    #[must_use]
    pub fn saves_at(self, value: &'static str, cost: &'static str) -> Self {
        Self { saving: Some((value, cost)), ..self }
    }

    /// The search for settings tries these values. If the setting changes results, only where nothing fits otherwise.
    #[must_use]
    pub fn searched(self, order: u8, values: Values) -> Self {
        Self { searched: Some(Searched { order, values }), ..self }
    }

    /// Refuses a number out of range.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check(&self, value: f64, default: &dyn fmt::Display) -> Result<()> {
        let Some(range) = self.range.filter(|range| !range.contains(value)) else { return Ok(()) };
        let reason = format!("must be {range}, got {value}");
        Err(Error::config(self.key, reason, format!("the default is {default}")))
    }
}

/// Numbers that a setting may have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    bounds: (Bound<f64>, Bound<f64>),
    multiple_of: u32,
}

impl Range {
    /// Whether `value` is a finite number of the range.
    pub fn contains(&self, value: f64) -> bool {
        let is_multiple = self.multiple_of == 1 || value % f64::from(self.multiple_of) == 0.0;
        value.is_finite() && self.bounds.contains(&value) && is_multiple
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bounds {
            (Bound::Included(least), Bound::Included(most)) => write!(f, "from {least} to {most}"),
            (Bound::Included(least), Bound::Excluded(most)) => write!(f, "from {least} to below {most}"),
            (Bound::Excluded(least), Bound::Included(most)) => write!(f, "above {least}, at most {most}"),
            (Bound::Included(least), _) => write!(f, "{least} or more"),
            (Bound::Excluded(least), _) => write!(f, "above {least}"),
            (Bound::Unbounded, _) => f.write_str("a number"),
        }?;
        if self.multiple_of > 1 { write!(f, ", a multiple of {}", self.multiple_of) } else { Ok(()) }
    }
}

/// Declares a section of settings: a struct with serde code, defaults, and the list of its [`Setting`]s.
///
/// ```text
/// settings! {
///     /// Help of the section.
///     pub struct TrainConfig in "train" {
///         /// Help of the setting.
///         epochs: u64 = 20, results(Changes), resume(Warn), range(1.0..);
///         /// The file may have the name of an earlier version.
///         new_name was "old_name": bool = false, results(Same), resume(Free), memory("grows with it");
///     }
/// }
/// ```
#[macro_export]
macro_rules! settings {
    (
        $(#[$meta:meta])*
        pub struct $name:ident in $section:literal {
            $(
                $(#[doc = $help:literal])+
                $field:ident $(was $($old:literal)|+)?: $type:ty = $default:expr,
                results($results:ident), resume($resume:ident) $(, $mark:ident($($value:expr),+))*;
            )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $(
                $(#[doc = $help])+
                $(#[serde($(alias = $old),+)])?
                pub $field: $type,
            )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl $name {
            /// Declarations of these settings.
            pub fn settings() -> Vec<$crate::setting::Setting> {
                use $crate::setting::{Resume, ResultsEffect, Setting};
                vec![$(
                    Setting {
                        old_names: vec![$($($old),+)?],
                        ..Setting::new(
                            concat!($section, ".", stringify!($field)),
                            concat!($($help, "\n"),+),
                            ResultsEffect::$results,
                            Resume::$resume,
                        )$(.$mark($($value),+))*
                    },
                )+]
            }
        }
    };
}

pub use crate::settings;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_and_written_in_words() {
        let new = || Setting::new("a.b", " Help\n of two lines.\n", ResultsEffect::Same, Resume::Free);
        assert_eq!(new().help, "Help of two lines.");
        let words = |setting: Setting, value: f64| setting.check(value, &1).map_err(|error| error.to_string());
        assert_eq!(words(new(), f64::NAN), Ok(()));
        for (setting, good, bad, text) in [
            (new().range(1.0..), 1.0, 0.0, "1 or more"),
            (new().range(0.0..1.0), 0.0, 1.0, "from 0 to below 1"),
            (new().range(0.0..=1.0), 1.0, f64::NAN, "from 0 to 1"),
            (new().range((Bound::Excluded(0.0), Bound::Included(1.0))), 1.0, 0.0, "above 0, at most 1"),
            (new().range((Bound::Excluded(0.0), Bound::Unbounded)), 0.1, 0.0, "above 0"),
            (new().range(64.0..).multiple_of(64), 128.0, 96.0, "64 or more, a multiple of 64"),
        ] {
            words(setting.clone(), good).unwrap();
            assert_eq!(words(setting, bad), Err(format!("`a.b`: must be {text}, got {bad}")));
        }
    }
}
