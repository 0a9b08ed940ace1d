//! Relabels a row for a transformed mask: locations, closeness to the centre, area percentages and counts in the text
//! are updated.
//!
//! A value is rewritten only if it is correct for the old mask: the location label must follow from a rule of
//! [`position`], a percentage must be the old mask's percentage, and so on. Phrases are parsed as in
//! [`crate::flip_rotate`]. Other words for a direction stay only if they are still correct (`left lung` in the same
//! half of the image). Otherwise the row cannot be relabelled, and the caller may use a sentence of
//! [`crate::templates`].

use std::ops::Range;

use ::image::GrayImage;

use crate::flip_rotate::{
    CENTRES, DIRECTIONS, LOCATION_NOUNS, Phrase, UNSUPPORTED_WORDS, Word, joined, refers_to_image, words,
};
use crate::image::foreground;
use crate::manifest::Row;
use crate::position::{self, Position, Region, Zones};
use prsmed_base::location::{self, StatedLocation};

/// Why a row cannot be relabelled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelabelError {
    /// One of the masks has no foreground.
    EmptyMask,
    /// The row names no location, or several.
    NoLocation,
    /// No rule gives the row's location for the old mask.
    NoRule(Position),
    /// Both rules give that location for the old mask but different ones for the new mask.
    TwoRules(Position),
    /// These words cannot be rewritten, or would no longer be correct.
    Words(String),
}

impl std::fmt::Display for RelabelError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::EmptyMask => f.write_str("a mask is empty"),
            Self::NoLocation => f.write_str("the texts name no location, or several"),
            Self::NoRule(location) => write!(f, "no location rule gives `{location}` for the old mask"),
            Self::TwoRules(location) => {
                write!(f, "both location rules give `{location}` for the old mask, but they differ for the new one")
            }
            Self::Words(words) => write!(f, "`{words}` cannot be rewritten safely"),
        }
    }
}

type RelabelResult<T> = Result<T, RelabelError>;

/// Rewrites the texts of a row from mask `old` to mask `new` (foreground as in [`foreground`]). Paths do not change.
///
/// A row whose target is absent, or whose mask is not known, does not change if its texts name no location, direction
/// or percentage.
///
/// `zones` decides if both rules explain the row's location. If it is `None`, the words decide (`top`: quadrants,
/// `upper`: grid).
///
/// # Errors
/// The first thing that cannot be rewritten safely.
pub fn relabel(row: &Row, old: &GrayImage, new: &GrayImage, zones: Option<Zones>) -> RelabelResult<Row> {
    if !row.is_present() {
        return without_target(row);
    }
    let (old, new) = (MaskSummary::of(old)?, MaskSummary::of(new)?);
    let from = named_location(row)?;
    let style = Style::of(row);
    let zones = rule(from, style, &old, &new, zones)?;
    let style = style.unwrap_or(if zones == Zones::Grid { Style::Upper } else { Style::Top });
    let change = Change { from, to: new.location(zones), style, old: &old, new: &new };
    let label = |label: &String| match pure_label(label) {
        Some(_) if change.from == change.to => Ok(label.clone()),
        Some(_) => Ok(same_case(label, change.style.label(change.to))),
        None => change.text(label),
    };
    Ok(Row {
        question: change.text(&row.question)?,
        answer: change.text(&row.answer)?,
        position: row.position.as_ref().map(label).transpose()?,
        ..row.clone()
    })
}

/// A row without a mask that shows its target: it does not change if no word of it depends on the geometry.
fn without_target(row: &Row) -> RelabelResult<Row> {
    let all = [Some(&row.question), Some(&row.answer), row.position.as_ref()];
    for text in all.into_iter().flatten() {
        let depends =
            |word: &str| is_location_word(word) || UNSUPPORTED_WORDS.contains(&word) || word.starts_with("percent");
        if text.contains('%') || words(text).iter().any(|word| depends(&word.lower)) {
            return Err(RelabelError::Words(text.clone()));
        }
    }
    Ok(row.clone())
}

/// Properties of a mask that texts refer to.
struct MaskSummary {
    foreground: GrayImage,
    whole: Region,
    size_px: (u32, u32),
}

impl MaskSummary {
    fn of(mask: &GrayImage) -> RelabelResult<Self> {
        let foreground = foreground(mask);
        let whole = position::whole(&foreground).ok_or(RelabelError::EmptyMask)?;
        Ok(Self { foreground, whole, size_px: mask.dimensions() })
    }

    fn location(&self, zones: Zones) -> Position {
        match zones {
            Zones::Grid => position::grid(&self.whole, self.size_px),
            Zones::Quadrants => position::quadrant(&self.whole, self.size_px).position,
        }
    }

    /// Part of the image that is foreground.
    fn area_frac(&self) -> f64 {
        self.whole.area_px as f64 / (f64::from(self.size_px.0) * f64::from(self.size_px.1))
    }

    /// -1 for the left or upper half, 1 for the other half.
    fn half(&self, horizontal: bool) -> i8 {
        let (x, y) = self.whole.centroid_px;
        let (at, length) = if horizontal { (x, self.size_px.0) } else { (y, self.size_px.1) };
        if at + 0.5 < f64::from(length) / 2.0 { -1 } else { 1 }
    }

    /// Number of components: all of them, or those with at least a hundredth of the foreground.
    fn count(&self, with_specks: bool) -> usize {
        let parts = position::components(&self.foreground);
        parts.iter().filter(|part| with_specks || part.area_px * 100 >= self.whole.area_px).count()
    }
}

/// Vocabulary for the vertical direction: `upper`/`lower` or `top`/`bottom`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Upper,
    Top,
}

impl Style {
    /// The first vertical word in label, answer or question decides.
    fn of(row: &Row) -> Option<Self> {
        [row.position.as_ref(), Some(&row.answer), Some(&row.question)].into_iter().flatten().find_map(|text| {
            let words = words(text);
            (0..words.len()).find_map(|index| match words[index].lower.as_str() {
                _ if is_anatomy(&words, index) => None,
                "upper" | "lower" => Some(Self::Upper),
                "top" | "bottom" => Some(Self::Top),
                _ => None,
            })
        })
    }

    fn zones(self) -> Zones {
        if self == Self::Upper { Zones::Grid } else { Zones::Quadrants }
    }

    fn label(self, location: Position) -> String {
        location.label(self.zones())
    }
}

/// The rule that the row's location follows.
fn rule(
    from: Position,
    style: Option<Style>,
    old: &MaskSummary,
    new: &MaskSummary,
    zones: Option<Zones>,
) -> RelabelResult<Zones> {
    let fits = |zones: Zones| old.location(zones) == from;
    match (zones, fits(Zones::Grid), fits(Zones::Quadrants)) {
        (Some(zones), ..) if fits(zones) => Ok(zones),
        (Some(_), ..) | (None, false, false) => Err(RelabelError::NoRule(from)),
        (None, true, false) => Ok(Zones::Grid),
        (None, false, true) => Ok(Zones::Quadrants),
        (None, true, true) => match style {
            Some(style) => Ok(style.zones()),
            None if new.location(Zones::Grid) == new.location(Zones::Quadrants) => Ok(Zones::Grid),
            None => Err(RelabelError::TwoRules(from)),
        },
    }
}

/// The location of a phrase; `None` for one side alone (`left`).
fn location_of(phrase: &Phrase) -> Option<Position> {
    let stated = location_of_phrase(phrase);
    (!stated.is_one_sided()).then(|| stated.position())
}

/// The location of a phrase; one side alone leaves the other direction open.
pub(crate) fn location_of_phrase(phrase: &Phrase) -> StatedLocation {
    let center = phrase.centre.is_some() || phrase.is_centre();
    StatedLocation {
        row: match phrase.vertical {
            -1 => Some(location::GridRow::Upper),
            1 => Some(location::GridRow::Lower),
            _ => center.then_some(location::GridRow::Center),
        },
        column: match phrase.horizontal {
            -1 => Some(location::GridColumn::Left),
            1 => Some(location::GridColumn::Right),
            _ => center.then_some(location::GridColumn::Center),
        },
    }
}

/// The location of a label that consists of a phrase only.
fn pure_label(label: &str) -> Option<Position> {
    let words = words(label);
    let first = words.first().filter(|word| word.start == 0 && is_location_word(&word.lower))?;
    let phrase = Phrase::read(label, &words, 0)?;
    let whole = phrase.last + 1 == words.len() && words[phrase.last].end == label.len() && first.end <= label.len();
    location_of(&phrase).filter(|_| whole)
}

fn is_location_word(word: &str) -> bool {
    DIRECTIONS.contains(&word) || CENTRES.contains(&word)
}

/// The single location that label and answer name.
fn named_location(row: &Row) -> RelabelResult<Position> {
    if let Some(location) = row.position.as_deref().and_then(pure_label) {
        return Ok(location);
    }
    let mut locations = Vec::new();
    for text in row.position.iter().chain([&row.answer]) {
        let words = words(text);
        let mut index = 0;
        while index < words.len() {
            if !is_location_word(&words[index].lower) {
                index += 1;
                continue;
            }
            let Some(phrase) = Phrase::read(text, &words, index) else { return Err(RelabelError::NoLocation) };
            index = phrase.last + 1;
            let is_about_image =
                refers_to_image(text, &words, &phrase).is_some() && closeness(&words, &phrase).is_none();
            locations.extend(location_of(&phrase).filter(|_| is_about_image));
        }
    }
    match locations.split_first() {
        Some((first, others)) if others.iter().all(|location| location == first) => Ok(*first),
        _ => Err(RelabelError::NoLocation),
    }
}

/// Organs with a left and a right or an upper and a lower one. These sides refer to the patient.
const ANATOMY: [&str; 26] = [
    "lung", "lungs", "lobe", "lobes", "kidney", "kidneys", "breast", "ventricle", "atrium", "hemisphere", "hip",
    "knee", "femur", "eye", "ovary", "adrenal", "tonsil", "hand", "foot", "arm", "leg", "shoulder", "hilum",
    "hemithorax", "diaphragm", "carotid",
];

/// Whether the direction word at `index` belongs to an organ: `left lung`, `left lower lobe`.
fn is_anatomy(words: &[Word], index: usize) -> bool {
    let after = words.iter().skip(index + 1).find(|word| !is_location_word(&word.lower));
    after.is_some_and(|word| ANATOMY.contains(&word.lower.as_str()))
}

/// Index of the first word of `close to the` or `near the` (true), or `far from the` (false), before a phrase.
pub(crate) fn closeness(words: &[Word], phrase: &Phrase) -> Option<(usize, bool)> {
    let before = |back: usize| phrase.first.checked_sub(back).map_or("", |index| words[index].lower.as_str());
    match (before(3), before(2), before(1)) {
        ("close", "to", "the") => Some((phrase.first - 3, true)),
        ("far", "from", "the") => Some((phrase.first - 3, false)),
        (_, "near", "the") => Some((phrase.first - 2, true)),
        _ => None,
    }
    .filter(|_| phrase.is_centre())
}

/// A change from one location to another.
struct Change<'a> {
    from: Position,
    to: Position,
    style: Style,
    old: &'a MaskSummary,
    new: &'a MaskSummary,
}

/// Words for a size, which may be wrong for another area.
const SIZES: [&str; 10] =
    ["small", "smaller", "smallest", "tiny", "large", "larger", "largest", "big", "bigger", "huge"];
/// Words for a length, which does not follow from a mask.
const UNITS: [&str; 8] = ["mm", "cm", "px", "pixel", "pixels", "millimeters", "centimeters", "diameter"];

type Edit = (Range<usize>, String);

impl Change<'_> {
    fn text(&self, text: &str) -> RelabelResult<String> {
        if text.contains('[') {
            return Err(RelabelError::Words("[".into()));
        }
        let words = words(text);
        let mut edits: Vec<Edit> = Vec::new();
        let mut index = 0;
        while let Some(word) = words.get(index) {
            let name = word.lower.as_str();
            if is_location_word(name) {
                let phrase = Phrase::read(text, &words, index)
                    .ok_or_else(|| RelabelError::Words(text[word.start..].to_owned()))?;
                edits.extend(self.phrase(text, &words, &phrase)?);
                index = phrase.last + 1;
                continue;
            }
            if name.bytes().all(|byte| byte.is_ascii_digit()) {
                edits.extend(self.number(text, &words, index)?);
            }
            let directed =
                UNSUPPORTED_WORDS.contains(&name) || DIRECTIONS.iter().any(|direction| name.starts_with(direction));
            let resized = (self.new.area_frac() / self.old.area_frac() - 1.0).abs() > 0.25;
            if directed
                || UNITS.contains(&name)
                || (resized && SIZES.contains(&name))
                || (name == "midline" && self.from != self.to)
            {
                return Err(RelabelError::Words(word.lower.clone()));
            }
            index += 1;
        }
        let mut result = text.to_owned();
        for (range, replacement) in edits.into_iter().rev() {
            result.replace_range(range, &replacement);
        }
        Ok(result)
    }

    /// The edit for a phrase of location words.
    fn phrase(&self, text: &str, words: &[Word], phrase: &Phrase) -> RelabelResult<Option<Edit>> {
        let error = || RelabelError::Words(text[words[phrase.first].start..words[phrase.last].end].to_owned());
        let of_the_image = refers_to_image(text, words, phrase);
        if let (Some((first, near)), Some(_)) = (closeness(words, phrase), of_the_image) {
            return self.closeness(text, words, first..phrase.first, near);
        }
        if of_the_image.is_none() && is_anatomy(words, phrase.last) {
            let same =
                |direction: i8, horizontal| direction == 0 || self.old.half(horizontal) == self.new.half(horizontal);
            let upright = phrase.vertical != 0 || phrase.centre.is_some();
            let is_true = same(phrase.horizontal, true) && (!upright || self.from.row == self.to.row);
            return if is_true { Ok(None) } else { Err(error()) };
        }
        match (location_of(phrase), of_the_image) {
            (Some(location), Some(_)) if location == self.from => {
                Ok((self.from != self.to).then(|| self.replaced(text, words, phrase)))
            }
            // `right lung ... on the left side of the image`
            (None, Some(_)) => {
                let is_true = |scene: &MaskSummary| {
                    (phrase.horizontal == 0 || scene.half(true) == phrase.horizontal)
                        && (phrase.vertical == 0 || scene.half(false) == phrase.vertical)
                };
                if is_true(self.old) && is_true(self.new) { Ok(None) } else { Err(error()) }
            }
            (Some(_), None) if phrase.is_centre() => {
                let of_all = phrase.first > 0 && matches!(words[phrase.first - 1].lower.as_str(), "overall" | "common");
                if of_all || self.from == self.to { Ok(None) } else { Err(error()) }
            }
            _ => Err(error()),
        }
    }

    /// The new location in the form of the old phrase: `center` <-> `upper left part`.
    fn replaced(&self, text: &str, words: &[Word], phrase: &Phrase) -> Edit {
        let noun = Some(phrase.last + 1)
            .filter(|next| joined(text, words, *next) && LOCATION_NOUNS.contains(&words[*next].lower.as_str()));
        let start = words[phrase.first].start;
        let end = words[noun.unwrap_or(phrase.last)].end;
        let label = self.style.label(self.to);
        let is_middle = |location: Position| {
            location.row == location::GridRow::Center && location.column == location::GridColumn::Center
        };
        let is_corner = self.to.row != location::GridRow::Center && self.to.column != location::GridColumn::Center;
        let label = match noun.map(|noun| words[noun].lower.as_str()) {
            _ if is_middle(self.to) => label,
            Some(noun @ ("part" | "region" | "area" | "portion" | "zone" | "section")) => format!("{label} {noun}"),
            Some(noun @ ("corner" | "quadrant")) if is_corner => format!("{label} {noun}"),
            None if !is_middle(self.from) && is_corner => label,
            _ => format!("{label} part"),
        };
        (start..end, same_case(&text[start..], label))
    }

    /// Rewrites `close to the` <-> `far from the`. The sentence is removed when the new mask is in the centre itself.
    fn closeness(
        &self,
        text: &str,
        words: &[Word],
        phrase_range: Range<usize>,
        near: bool,
    ) -> RelabelResult<Option<Edit>> {
        let (start, end) = (words[phrase_range.start].start, words[phrase_range.end - 1].end);
        let error = || RelabelError::Words(text[start..end].to_owned());
        let of = |scene: &MaskSummary| position::quadrant(&scene.whole, scene.size_px);
        if of(self.old).near != near {
            return Err(error());
        }
        let new = of(self.new);
        if new.position.row == location::GridRow::Center {
            let stop = text[end..].find('.').map_or(text.len(), |at| end + at + 1);
            let begin = text[..start].rfind(". ").map(|at| at + 1).ok_or_else(error)?;
            let tail = text[end..stop].trim_end_matches('.');
            let is_plain = tail.chars().all(|c| c.is_alphabetic() || " -".contains(c))
                && ![" and ", " but "].iter().any(|more| tail.contains(more));
            return match text[begin..start].trim() {
                "It is" if is_plain => Ok(Some((begin..stop, String::new()))),
                _ => Err(error()),
            };
        }
        let words = if new.near { "close to the" } else { "far from the" };
        Ok((new.near != near).then(|| (start..end, words.to_owned())))
    }

    /// Rewrites percentages (`about 14% of the image`, `less than 1%`) and counts (`2 separate areas`).
    fn number(&self, text: &str, words: &[Word], index: usize) -> RelabelResult<Option<Edit>> {
        let word = &words[index];
        let error = || RelabelError::Words(text[word.start..].chars().take(24).collect());
        let value: u32 = word.lower.parse().map_err(|_| error())?;
        let before = |back: usize| index.checked_sub(back).map_or("", |index| words[index].lower.as_str());
        if let Some(rest) = text[word.end..].strip_prefix('%') {
            let (old, new) = (self.old.area_frac() * 100.0, self.new.area_frac() * 100.0);
            let (start, is_true) = match (before(2), before(1)) {
                ("less", "than") => (words[index - 2].start, old < f64::from(value)),
                (_, "about") => (words[index - 1].start, (old - f64::from(value)).abs() <= 0.5 + 1e-9),
                _ => return Err(error()),
            };
            if !is_true || !rest.trim_start().starts_with("of the ") || (before(1) == "than" && value != 1) {
                return Err(error());
            }
            if before(1) == "about" && new >= 1.0 && (new - f64::from(value)).abs() <= 0.5 {
                return Ok(None);
            }
            let share = if new < 1.0 { "less than 1%".to_owned() } else { format!("about {new:.0}%") };
            return Ok(Some((start..word.end + 1, same_case(&text[start..], share))));
        }
        let after = |ahead: usize| words.get(index + ahead).map_or("", |word| word.lower.as_str());
        if after(1) == "separate" || after(1) == "areas" {
            let counts = |with_specks| (self.old.count(with_specks), self.new.count(with_specks));
            let fits = [true, false].map(counts).into_iter().find(|(old, _)| *old == value as usize);
            return match fits {
                Some((_, new)) if new >= 2 => Ok(Some((word.start..word.end, new.to_string()))),
                _ => Err(error()),
            };
        }
        Ok(None)
    }
}

/// `text` with an upper-case first letter where `model` has one.
fn same_case(model: &str, text: String) -> String {
    if model.starts_with(char::is_uppercase) { text[..1].to_uppercase() + &text[1..] } else { text }
}

#[cfg(test)]
#[path = "relabel_tests.rs"]
mod tests;
