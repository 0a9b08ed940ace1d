//! Texts that say where a target is, in rows that say that it is not in the image.

use std::path::PathBuf;

use super::findings::Findings;
use crate::agreement::denies;
use crate::manifest::{Manifest, Presence, Row};
use crate::position::Zones;
use prsmed_base::location::stated_location;

const WHAT: &str = "answers that name a location for a target that is not in the image";

/// The location that a text gives a target; `None` for a text that names none, or says that nothing is there.
pub fn named_location(text: &str) -> Option<String> {
    stated_location(text).filter(|_| !denies(text)).map(|stated| stated.label(Zones::Grid))
}

/// Adds the rows without any target whose answers name a location, by their file and line.
pub(super) fn add(manifest: &Manifest, findings: &mut Findings) {
    let is_absent = |row: &&Row| row.targets.iter().all(|target| target.presence == Presence::Absent);
    for row in manifest.rows.iter().filter(is_absent).filter(|row| named_location(&row.answer).is_some()) {
        findings.add(WHAT, &PathBuf::from(format!("{}:{}", row.csv.display(), row.line)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_about_an_absent_target_names_a_location_or_denies_it() {
        let named = named_location("The lesion is in the upper center part of the image.");
        assert_eq!(named.as_deref(), Some("upper center"));
        for text in ["There is no lesion in the upper left part of the image.", "No lesion is visible.", "A nevus.", ""]
        {
            assert_eq!(named_location(text), None, "{text}");
        }
    }
}
