//! Patterns for `--group`, found from the names of files.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

/// Most parts of a name that stand for the patient.
const MAX_PARTS: usize = 4;

/// A pattern that divides names into patients: by the first parts of the names, up to one with a number. `None` unless they
/// make several groups, and at least one of several files.
pub(super) fn pattern(names: &[String]) -> Option<String> {
    ['_', '-'].iter().flat_map(|separator| (1..=MAX_PARTS).map(|count| first_parts(*separator, count))).find_map(
        |parts| {
            let pattern = format!("^({parts}){}", parts.chars().nth(2)?);
            let groups = groups(&pattern, names)?;
            let is_numbered = |group: &String| group.chars().any(|c| c.is_ascii_digit());
            let is_grouped = groups.len() > 1 && groups.len() < number_of_stems(names);
            (is_grouped && groups.keys().all(is_numbered)).then_some(pattern)
        },
    )
}

/// The pattern as an example for a message; empty if there is none.
pub(super) fn example(names: &[String]) -> String {
    pattern(names).map(|pattern| format!(", for example the argument `group='{pattern}'`")).unwrap_or_default()
}

/// `[^_]+_[^_]+` for two parts.
fn first_parts(separator: char, count: usize) -> String {
    vec![format!("[^{separator}]+"); count].join(&separator.to_string())
}

/// The number of names in each group; `None` if the pattern does not match all names.
fn groups(pattern: &str, names: &[String]) -> Option<BTreeMap<String, usize>> {
    let regex = Regex::new(pattern).ok()?;
    let mut groups = BTreeMap::new();
    for name in names {
        *groups.entry(regex.captures(name)?.get(1)?.as_str().to_owned()).or_default() += 1;
    }
    Some(groups)
}

/// The number of names without their endings.
fn number_of_stems(names: &[String]) -> usize {
    let stems = names.iter().map(|name| name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem));
    stems.collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_pattern_makes_as_many_groups_as_there_are_patients_in_the_names() {
        for (files, expected, num_groups) in [
            (&["PAT_01_a.png", "PAT_01_b.png", "PAT_02_a.png", "PAT_06_b.png"][..], "^([^_]+_[^_]+)_", 3),
            (&["P1_a.png", "P1_b.png", "P2_a.png"], "^([^_]+)_", 2),
            (&["us_PAT_1_a.png", "us_PAT_1_b.png", "us_PAT_2_a.png"], "^([^_]+_[^_]+_[^_]+)_", 2),
            (&["case-01-left.jpg", "case-01-right.jpg", "case-02-left.jpg"], "^([^-]+-[^-]+)-", 2),
            (&["pat7_2024-01.png", "pat7_2024-02.png", "pat8_2024-01.png"], "^([^_]+)_", 2),
        ] {
            let files = names(files);
            let found = pattern(&files).expect("a pattern");
            assert_eq!((found.as_str(), groups(&found, &files).expect("all match").len()), (expected, num_groups));
        }
    }

    #[test]
    fn names_that_say_nothing_of_patients_have_no_pattern() {
        for files in [
            &["PAT_01_a.png", "PAT_01_b.png"][..],
            &["ISIC_0001.jpg", "ISIC_0002.jpg"],
            &["left_01.png", "left_02.png", "right_01.png"],
            &["0001.png", "0002.png"],
            &["P1_a.png", "P1_b.png", "P2.png"],
            &[],
        ] {
            assert_eq!(pattern(&names(files)), None, "{files:?}");
        }
    }
}
