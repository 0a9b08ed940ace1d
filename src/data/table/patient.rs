//! Patients by their names in tables. Two spellings are one patient, and a word for a missing patient is none.

use super::names;
use prsmed_base::error::quoted;
use std::collections::BTreeMap;

/// Words that programs and people write where the patient is not known.
const MISSING: [&str; 19] = [
    "nan", "nat", "none", "null", "nil", "na", "n/a", "#n/a", "<na>", "unknown", "unk", "undefined", "missing",
    "not available", "not applicable", "anonymous", "anonymized", "anonymised", "no patient",
];

/// What identifies a patient: the name without regard to case, Unicode form and number of blanks, numbers without leading zeros, a whole number without the `.0` of a
/// data frame. `None` for a word that says that the patient is missing, and for a name without a letter or digit.
pub fn key(name: &str) -> Option<String> {
    // upper case first, which joins letters that lower case does not: a German sharp s and two of them
    let name = names::key(name).to_uppercase().to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
    if MISSING.contains(&name.as_str()) || !name.contains(char::is_alphanumeric) {
        return None;
    }
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = name
        .split_once('.')
        .filter(|(whole, rest)| is_number(whole) && !rest.is_empty() && rest.bytes().all(|byte| byte == b'0'));
    let name = whole.map_or(name.as_str(), |(whole, _)| whole);
    let mut key = String::with_capacity(name.len());
    let mut before = None;
    for (at, c) in name.char_indices() {
        // a zero that begins a number, other than after a decimal point, and is not all of it
        let begins = !before.is_some_and(|before: char| before.is_ascii_digit() || before == '.');
        let is_leading = c == '0' && begins && name[at + 1..].starts_with(|next: char| next.is_ascii_digit());
        if is_leading {
            continue;
        }
        key.push(c);
        before = Some(c);
    }
    Some(key)
}

/// The spellings of each patient.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spellings(BTreeMap<String, Vec<String>>);

impl Spellings {
    /// The first spelling of this patient; `None` for a word that says that the patient is missing.
    pub fn settle(&mut self, name: &str) -> Option<String> {
        let name = name.trim();
        let known = self.0.entry(key(name)?).or_default();
        if !known.iter().any(|known| known == name) {
            known.push(name.to_owned());
        }
        known.first().cloned()
    }

    /// One sentence that names patients with several spellings; `None` if there are none.
    pub fn warning(&self) -> Option<String> {
        /// Patients that the sentence names.
        const NAMED: usize = 3;
        let several: Vec<&Vec<String>> = self.0.values().filter(|known| known.len() > 1).collect();
        // combining and invisible letters by their numbers, so that two spellings do not look the same
        let letter = |c: char| if c.is_ascii() { c.to_string() } else { c.escape_debug().to_string() };
        let seen = |name: &String| name.chars().map(letter).collect::<String>();
        let spelled = |known: &&Vec<String>| quoted(&known.iter().map(seen).collect::<Vec<_>>());
        let named: Vec<String> = several.iter().take(NAMED).map(spelled).collect();
        let more = several.len().checked_sub(NAMED).filter(|more| *more > 0);
        let more = more.map_or_else(String::new, |more| format!("; and {more} more"));
        let count = match several.len() {
            0 => return None,
            1 => "1 patient has several spellings, which count as one patient".to_owned(),
            count => format!("{count} patients have several spellings, each of which counts as one patient"),
        };
        Some(format!("{count}: {}{more}; if they are different patients, give them different names", named.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_patient_have_one_key_and_words_for_a_missing_one_have_none() {
        for (names, expected) in [
            (&["1", "01", "001", "1.0", "1.00", " 1 ", "01.0"][..], Some("1")),
            (&["P1", "p1", "P001", "p01 "], Some("p1")),
            (&["Lung-007-A", "lung-7-a"], Some("lung-7-a")),
            (&["0", "00", "0.0"], Some("0")),
            (&["10", "010", "10.0"], Some("10")),
            (&["100"], Some("100")),
            (&["1.5", "01.5"], Some("1.5")),
            (&["1.05"], Some("1.05")),
            (&["p10", "p010"], Some("p10")),
            (&["1.2.840.10008.1", "1.2.840.10008.1 "], Some("1.2.840.10008.1")),
            (&["MÜLLER-03", "müller-3"], Some("müller-3")),
            (&["", " ", "nan", "NaN", "None", "NULL", "unknown", "N/A", "-", "--", "?", "<NA>", "Anonymous"], None),
            (&["nanny"], Some("nanny")),
            (&["p1.0"], Some("p1.0")),
            (&["José 2", "Jose\u{301} 2", "JOSÉ  02"], Some("josé 2")),
            (&["Straße", "STRASSE"], Some("strasse")),
        ] {
            for name in names {
                assert_eq!(key(name).as_deref(), expected, "`{name}`");
            }
        }
    }

    #[test]
    fn several_spellings_are_named_and_settled_to_the_first() {
        let mut spellings = Spellings::default();
        let settled: Vec<_> = ["001", "1", "p2", "nan", "1.0"].map(|name| spellings.settle(name)).into();
        assert_eq!(settled, [Some("001"), Some("001"), Some("p2"), None, Some("001")].map(|n| n.map(str::to_owned)));
        let warning = spellings.warning().expect("one patient");
        assert!(warning.starts_with("1 patient has several spellings") && warning.contains("`1.0`"), "{warning}");
        for number in 2..6 {
            spellings.settle(&format!("{number}"));
            spellings.settle(&format!("0{number}"));
        }
        assert!(spellings.warning().expect("five").contains("; and 2 more"), "{:?}", spellings.warning());
        assert_eq!(Spellings::default().warning(), None);
        let mut alike = Spellings::default();
        for name in ["José's", "Jose\u{301}'s"] {
            alike.settle(name);
        }
        let warning = alike.warning().expect("one patient");
        assert!(warning.contains("`José's`, `Jose\\u{301}'s`"), "{warning}");
    }
}
