//! Series of a folder in a table, and the rules that choose one of them.

use serde::Serialize;

use super::super::slices::Axis;
use super::super::source::Uid;

/// What tells the series of a folder apart. The description and the date are those of the DICOM headers, which may say who the
/// patient is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SeriesRow {
    /// SeriesNumber.
    pub number: Option<i64>,
    /// SeriesDescription; empty without one.
    pub description: String,
    /// Modality.
    pub modality: String,
    /// Number of slices.
    pub slices: usize,
    /// The direction of its slices: the closest one of the three.
    pub orientation: Option<Axis>,
    /// `YYYY-MM-DD` of the series, or else of its acquisition or study.
    pub date: Option<String>,
    /// True if all of its images are overviews for planning, which are used only if they are named.
    pub is_localizer: bool,
    /// SeriesInstanceUID.
    #[serde(skip)]
    pub(super) uid: String,
    /// StudyInstanceUID.
    #[serde(skip)]
    pub(super) study: String,
    /// PatientID, for comparisons; `None` without one. All series of a study are of one patient too.
    #[serde(skip)]
    pub patient: Option<Uid>,
    /// Time of day of `date`, in digits.
    #[serde(skip)]
    pub(super) time: String,
}

impl SeriesRow {
    /// Its SeriesInstanceUID.
    pub fn uid(&self) -> Uid {
        Uid(self.uid.clone())
    }

    /// Its study; `None` if the headers name none.
    pub fn study(&self) -> Option<Uid> {
        (!self.study.is_empty()).then(|| Uid(self.study.clone()))
    }

    /// Number, description, modality, slices, orientation and date as text; `-` for what is not known.
    pub fn cells(&self) -> [String; 6] {
        let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        let kind = if self.is_localizer { " (localizer)" } else { "" };
        [
            or_dash(self.number.map(|number| number.to_string()).unwrap_or_default()),
            or_dash(self.description.clone()),
            format!("{}{kind}", self.modality),
            self.slices.to_string(),
            or_dash(self.orientation.map(|axis| axis.to_string()).unwrap_or_default()),
            or_dash(self.date.clone().unwrap_or_default()),
        ]
    }
}

/// Heads of [`SeriesRow::cells`].
pub const SERIES_HEAD: [&str; 6] = ["number", "description", "modality", "slices", "orientation", "date"];
/// The forms of a rule, for messages and help.
pub const RULE_FORMS: &str = "`description~PART`, `description=TEXT`, `modality=MR`, `orientation=axial`, `slices>=20`, \
                              `slices<=200`, `newest` and `most-slices`, several separated by commas";

/// One condition on a series.
enum Rule {
    DescriptionHas(String),
    DescriptionIs(String),
    Modality(String),
    Orientation(Axis),
    AtLeast(usize),
    AtMost(usize),
    Newest,
    MostSlices,
}

impl Rule {
    /// The rule of a text, which is in small letters; `None` if it is none.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        match text {
            "newest" => return Some(Self::Newest),
            "largest" | "most-slices" => return Some(Self::MostSlices),
            _ => {}
        }
        // the longer signs first
        let (key, sign, value) = ["<=", ">=", "~", "="].into_iter().find_map(|sign| {
            let (key, value) = text.split_once(sign)?;
            Some((key.trim(), sign, value.trim())).filter(|(.., value)| !value.is_empty())
        })?;
        Some(match (key, sign) {
            ("description", "~") => Self::DescriptionHas(value.to_owned()),
            ("description", "=") => Self::DescriptionIs(value.to_owned()),
            ("modality", "=") => Self::Modality(value.to_owned()),
            ("orientation", "=") => Self::Orientation(value.parse().ok()?),
            ("slices", ">=") => Self::AtLeast(value.parse().ok()?),
            ("slices", "<=") => Self::AtMost(value.parse().ok()?),
            _ => return None,
        })
    }

    /// Keeps the series of `all` with these numbers that fit.
    fn keep(&self, all: &[SeriesRow], numbers: &mut Vec<usize>) {
        let best = |key: fn(&SeriesRow) -> Option<(String, usize)>| {
            numbers.iter().filter_map(|number| key(&all[*number])).max()
        };
        let date = |row: &SeriesRow| Some((format!("{} {}", row.date.as_ref()?, row.time), 0));
        let size = |row: &SeriesRow| Some((String::new(), row.slices));
        let (newest, largest) = (best(date), best(size));
        numbers.retain(|number| {
            let row = &all[*number];
            match self {
                Self::DescriptionHas(part) => row.description.to_lowercase().contains(part),
                Self::DescriptionIs(text) => row.description.to_lowercase() == *text,
                Self::Modality(code) => row.modality.to_lowercase() == *code,
                Self::Orientation(axis) => row.orientation == Some(*axis),
                Self::AtLeast(count) => row.slices >= *count,
                Self::AtMost(count) => row.slices <= *count,
                Self::Newest => newest.is_some() && date(row) == newest,
                Self::MostSlices => size(row) == largest,
            }
        });
    }
}

/// The numbers of the series that `selected` names: by a number, a SeriesInstanceUID, a description, rules, or a part of a
/// description, the first of these that fits one. Texts are compared without case.
pub(super) fn matching(all: &[SeriesRow], selected: &str) -> Vec<usize> {
    let wanted = selected.trim().to_lowercase();
    let number: Option<i64> = wanted.parse().ok();
    let by = |is_it: &dyn Fn(&SeriesRow) -> bool| -> Option<Vec<usize>> {
        let found: Vec<usize> = (0..all.len()).filter(|number| is_it(&all[*number])).collect();
        (!found.is_empty()).then_some(found)
    };
    by(&|row| number.is_some() && row.number == number)
        .or_else(|| by(&|row| row.uid == wanted))
        .or_else(|| by(&|row| row.description.to_lowercase() == wanted))
        .or_else(|| by_rules(all, &wanted))
        .or_else(|| {
            by(&|row| number.is_none() && !wanted.is_empty() && row.description.to_lowercase().contains(&wanted))
        })
        .unwrap_or_default()
}

/// The series that fit all rules, which apply in their order; `None` if the text is no list of rules, or none fits. Localizers
/// are used only if no other series fits the rules that compare no series.
fn by_rules(all: &[SeriesRow], text: &str) -> Option<Vec<usize>> {
    let rules: Vec<Rule> = text.split(',').map(Rule::parse).collect::<Option<_>>()?;
    let fit = |numbers: Vec<usize>, compares: bool| {
        let rules = rules.iter().filter(|rule| compares || !matches!(rule, Rule::Newest | Rule::MostSlices));
        rules.fold(numbers, |mut numbers, rule| {
            rule.keep(all, &mut numbers);
            numbers
        })
    };
    let mut numbers: Vec<usize> = (0..all.len()).filter(|number| !all[*number].is_localizer).collect();
    if fit(numbers.clone(), false).is_empty() {
        numbers = (0..all.len()).collect();
    }
    Some(fit(numbers, true)).filter(|numbers| !numbers.is_empty())
}

/// The numbers of the series that are used: those that `selected` names, or all but localizers, if there are others.
pub(super) fn usable(all: &[SeriesRow], selected: Option<&str>) -> Vec<usize> {
    let Some(selected) = selected else {
        let all_of = |takes_localizers: bool| -> Vec<usize> {
            (0..all.len()).filter(|number| takes_localizers || !all[*number].is_localizer).collect()
        };
        let scans = all_of(false);
        return if scans.is_empty() { all_of(true) } else { scans };
    };
    matching(all, selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(number: i64, description: &str, slices: usize, date: &str) -> SeriesRow {
        SeriesRow {
            number: Some(number),
            description: description.to_owned(),
            modality: "CT".to_owned(),
            slices,
            orientation: Some(Axis::Axial),
            date: (!date.is_empty()).then(|| date.to_owned()),
            uid: format!("1.2.{number}"),
            ..SeriesRow::default()
        }
    }

    #[test]
    fn rules_choose_by_description_modality_slices_orientation_and_date() {
        let all = [
            row(1, "arterial 1.5 mm", 200, "2020-03-01"),
            row(2, "Portal venous", 80, "2020-03-01"),
            SeriesRow { orientation: Some(Axis::Coronal), ..row(3, "portal venous cor", 120, "2020-03-02") },
            SeriesRow { modality: "MR".to_owned(), ..row(4, "T2", 30, "") },
            SeriesRow { is_localizer: true, ..row(5, "scout", 900, "2021-01-01") },
        ];
        let numbers =
            |text: &str| matching(&all, text).iter().map(|index| all[*index].number.unwrap()).collect::<Vec<_>>();
        for (text, expected) in [
            ("description~portal", &[2, 3][..]),
            ("description~PORTAL, orientation=axial", &[2]),
            ("description=portal venous", &[2]),
            ("modality=mr", &[4]),
            ("newest", &[3]),
            ("most-slices", &[1]),
            ("largest", &[1]),
            ("slices>=100,slices<=150", &[3]),
            // rules apply in their order: the newest of the axial ones, not the axial one of the newest
            ("orientation=axial,newest", &[1, 2]),
            ("newest,orientation=axial", &[]),
            ("modality=us", &[]),
            // as before: number, UID, description, a part of it
            ("2", &[2]),
            ("1.2.4", &[4]),
            ("scout", &[5]),
            ("description~scout", &[5]),
            ("cor", &[3]),
            ("weight=3", &[]),
        ] {
            assert_eq!(numbers(text), expected, "{text}");
        }
        assert_eq!(usable(&all, None), [0, 1, 2, 3]);
        assert_eq!(usable(&all[4..], None), [0]);
    }

    #[test]
    fn a_description_with_the_signs_of_a_rule_is_a_description() {
        let all = [row(1, "b=0, b=800", 9, ""), row(2, "newest", 9, "2020-01-01"), row(3, "x", 9, "2021-01-01")];
        assert_eq!(matching(&all, "b=0, b=800"), [0]);
        assert_eq!(matching(&all, "b=800"), [0]);
        assert_eq!(matching(&all, "newest"), [1]);
    }
}
