//! Structures that questions ask about, and the labels of masks that show them.

use std::fmt;
use std::str::FromStr;

use crate::labels::Labels;
use crate::volume::LabelNames;

/// The name of labels that are no structure.
const BACKGROUND: &str = "background";

/// The structures of a label map: `1=liver,2=tumour`. Several labels of one structure are joined by `+`: `1+2=kidneys`. Labels
/// named `background` are no structure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedLabels {
    structures: Vec<(String, Labels)>,
    background: Vec<Labels>,
}

impl NamedLabels {
    /// The labels of a file by the names in it; none if they do not tell structures apart.
    pub(super) fn of_file(names: &LabelNames) -> Self {
        let plain = |name: &String| name.replace([',', '='], " ");
        let text: Vec<String> = names.0.iter().map(|(label, name)| format!("{label}={}", plain(name))).collect();
        text.join(",").parse().unwrap_or_default()
    }

    /// Name and labels of each structure, in the order of the text.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Labels)> {
        self.structures.iter().map(|(name, labels)| (name.as_str(), *labels))
    }

    /// True without structures.
    pub fn is_empty(&self) -> bool {
        self.structures.is_empty()
    }

    /// True for a label that has a name, or is background by name.
    pub(super) fn is_known(&self, label: u16) -> bool {
        let named = self.structures.iter().map(|(_, labels)| labels).chain(&self.background);
        label == 0 || named.into_iter().any(|labels| labels.contains(label))
    }
}

impl fmt::Display for NamedLabels {
    /// The text that is read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let background = self.background.iter().map(|labels| (BACKGROUND, *labels));
        let all = self
            .iter()
            .chain(background)
            .map(|(name, labels)| format!("{}={name}", labels.to_string().replace(',', "+")));
        f.write_str(&all.collect::<Vec<_>>().join(","))
    }
}

impl FromStr for NamedLabels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut named: Vec<(String, Labels)> = Vec::new();
        let mut background = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((labels, name)) = part.split_once('=') else {
                return Err(format!("`{part}` has no name; write `LABEL=NAME`"));
            };
            let labels: Labels = labels.replace('+', ",").parse()?;
            let name = name.trim().to_owned();
            if labels.is_empty() || name.is_empty() {
                return Err(format!("`{part}` is not `LABEL=NAME`"));
            }
            if name.eq_ignore_ascii_case(BACKGROUND) {
                background.push(labels);
                continue;
            }
            if named.iter().any(|(known, _)| suffix(known) == suffix(&name)) {
                return Err(format!("the name `{name}` occurs twice; join its labels as `1+2={name}`"));
            }
            named.push((name, labels));
        }
        Ok(Self { structures: named, background })
    }
}

/// A structure that questions ask about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Structure {
    /// Name in questions and answers.
    pub(super) name: String,
    /// Labels of the mask that show it; empty for masks of one label.
    pub(super) labels: Labels,
    /// Ending of its files in the data root: an image with several structures is stored once for each.
    pub(super) suffix: String,
}

impl Structure {
    /// One of several structures.
    pub(super) fn named(name: &str, labels: Labels) -> Self {
        Self { name: name.to_owned(), labels, suffix: suffix(name) }
    }
}

/// The structures of a preparation: the named labels, or else one structure with `labels`.
pub(super) fn structures(named: &NamedLabels, target: &str, labels: Labels) -> Vec<Structure> {
    if named.is_empty() {
        return vec![Structure { name: target.to_owned(), labels, suffix: String::new() }];
    }
    named.iter().map(|(name, labels)| Structure::named(name, labels)).collect()
}

/// `Left Kidney` becomes `_left_kidney`.
pub(super) fn suffix(name: &str) -> String {
    let letter = |c: char| if c.is_alphanumeric() { c.to_lowercase().next().unwrap_or(c) } else { '_' };
    format!("_{}", name.chars().map(letter).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_background_is_named_and_no_structure() {
        let text = "1=liver,2+3=lung,7=background";
        let named: NamedLabels = text.parse().unwrap();
        assert_eq!((named.to_string().as_str(), named.iter().count()), (text, 2));
        assert_eq!([0, 1, 3, 4, 7].map(|label| named.is_known(label)), [true, true, true, false, true]);
    }

    #[test]
    fn names_belong_to_one_label_or_several() {
        let named: NamedLabels = "1=liver, 2+3=Left lung".parse().unwrap();
        let found = structures(&named, "unused", Labels::NONE);
        let view: Vec<_> = found.iter().map(|s| (s.name.as_str(), s.labels.to_string(), s.suffix.as_str())).collect();
        assert_eq!(view, [("liver", "1".into(), "_liver"), ("Left lung", "2,3".into(), "_left_lung")]);
        let one = structures(&NamedLabels::default(), "nevus", "4".parse().unwrap());
        assert_eq!((one[0].name.as_str(), one[0].suffix.as_str(), one[0].labels.contains(4)), ("nevus", "", true));
        for (text, reason) in [
            ("1=liver,2", "`2` has no name"),
            ("=liver", "is not `LABEL=NAME`"),
            ("1=", "is not `LABEL=NAME`"),
            ("2", "`2` has no name"),
            ("0=air", "label 0 is the background"),
            ("1=liver,2=Liver", "occurs twice"),
        ] {
            let error = text.parse::<NamedLabels>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
