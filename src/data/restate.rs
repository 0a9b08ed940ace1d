//! The text of a row when its mask changes: place words, closeness to the middle, shares of the image and counts follow.
//!
//! Nothing is rewritten that the old mask does not prove: the label must be what a rule of [`position`] gives for the old
//! mask, a percentage must be the old mask's, and so on. Phrases are read as [`super::jitter`] reads them. What names a
//! direction otherwise is kept only while it stays true (`left lung` on the same half of the image), else the row is
//! refused, and the caller takes a sentence of [`super::templates`].

use std::ops::Range;

use ::image::GrayImage;

use super::image::foreground;
use super::jitter::{CENTRES, DIRECTIONS, PLACES, Phrase, REFUSED, Word, certain, joined, words};
use super::manifest::Row;
use super::position::{self, Position, Region, Zones};
use crate::place;

/// Why a row cannot be told of another mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// One of the masks has no foreground.
    EmptyMask,
    /// The row names no place, or several.
    NoPlace,
    /// No rule gives the place that the row names for the old mask.
    NoRule(Position),
    /// Both rules give that place for the old mask, and different ones for the new.
    TwoRules(Position),
    /// These words cannot be rewritten, or would no longer be true.
    Words(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::EmptyMask => f.write_str("a mask is empty"),
            Self::NoPlace => f.write_str("the texts name no place, or several"),
            Self::NoRule(place) => write!(f, "neither rule of places gives `{place}` for the old mask"),
            Self::TwoRules(place) => write!(f, "both rules of places give `{place}` for the old mask only"),
            Self::Words(words) => write!(f, "`{words}` cannot be rewritten with certainty"),
        }
    }
}

type Outcome<T> = Result<T, Refusal>;

/// The row with its texts told of `new` instead of `old` (foreground as in [`foreground`]); paths stay as they are.
///
/// `zones` decides when both rules explain the row's place; without it the words do (`top`: quadrants, `upper`: grid).
///
/// # Errors
/// The first thing that cannot be rewritten with certainty.
pub fn restate(row: &Row, old: &GrayImage, new: &GrayImage, zones: Option<Zones>) -> Outcome<Row> {
    let (old, new) = (Scene::of(old)?, Scene::of(new)?);
    let from = named_place(row)?;
    let style = Style::of(row);
    let zones = rule(from, style, &old, &new, zones)?;
    let style = style.unwrap_or(if zones == Zones::Grid { Style::Upper } else { Style::Top });
    let change = Change { from, to: new.place(zones), style, old: &old, new: &new };
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

/// What a mask says of its picture.
struct Scene {
    foreground: GrayImage,
    whole: Region,
    size_px: (u32, u32),
}

impl Scene {
    fn of(mask: &GrayImage) -> Outcome<Self> {
        let foreground = foreground(mask);
        let whole = position::whole(&foreground).ok_or(Refusal::EmptyMask)?;
        Ok(Self { foreground, whole, size_px: mask.dimensions() })
    }

    fn place(&self, zones: Zones) -> Position {
        match zones {
            Zones::Grid => position::grid(&self.whole, self.size_px),
            Zones::Quadrants => position::quadrant(&self.whole, self.size_px).position,
        }
    }

    /// Part of the picture that is foreground.
    #[expect(clippy::cast_precision_loss, reason = "pixel counts stay far below 2^53")]
    fn area_frac(&self) -> f64 {
        self.whole.area_px as f64 / (f64::from(self.size_px.0) * f64::from(self.size_px.1))
    }

    /// -1 left or upper half, 1 the other.
    fn half(&self, horizontal: bool) -> i8 {
        let (x, y) = self.whole.centroid_px;
        let (at, length) = if horizontal { (x, self.size_px.0) } else { (y, self.size_px.1) };
        if at + 0.5 < f64::from(length) / 2.0 { -1 } else { 1 }
    }

    /// Number of components: all of them, or those of at least a hundredth of the foreground.
    fn count(&self, with_specks: bool) -> usize {
        let parts = position::components(&self.foreground);
        parts.iter().filter(|part| with_specks || part.area_px * 100 >= self.whole.area_px).count()
    }
}

/// Words for the vertical direction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Upper,
    Top,
}

impl Style {
    /// What the row uses first: label, answer, question.
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

    fn label(self, place: Position) -> String {
        place.label(self.zones())
    }
}

/// The rule that the row's place follows.
fn rule(from: Position, style: Option<Style>, old: &Scene, new: &Scene, zones: Option<Zones>) -> Outcome<Zones> {
    let fits = |zones: Zones| old.place(zones) == from;
    match (zones, fits(Zones::Grid), fits(Zones::Quadrants)) {
        (Some(zones), ..) if fits(zones) => Ok(zones),
        (Some(_), ..) | (None, false, false) => Err(Refusal::NoRule(from)),
        (None, true, false) => Ok(Zones::Grid),
        (None, false, true) => Ok(Zones::Quadrants),
        (None, true, true) => match style {
            Some(style) => Ok(style.zones()),
            None if new.place(Zones::Grid) == new.place(Zones::Quadrants) => Ok(Zones::Grid),
            None => Err(Refusal::TwoRules(from)),
        },
    }
}

/// The place of a phrase, `None` for a side alone (`left`).
fn place_of(phrase: &Phrase) -> Option<Position> {
    let row = match phrase.vertical {
        -1 => place::Row::Upper,
        1 => place::Row::Lower,
        _ => place::Row::Center,
    };
    let column = match phrase.horizontal {
        -1 => place::Column::Left,
        1 => place::Column::Right,
        _ => place::Column::Center,
    };
    let one_side = (phrase.horizontal != 0) != (phrase.vertical != 0) && phrase.centre.is_none();
    (!one_side).then_some(Position { row, column })
}

/// The place of a label that is nothing but a phrase.
fn pure_label(label: &str) -> Option<Position> {
    let words = words(label);
    let first = words.first().filter(|word| word.start == 0 && is_place_word(&word.lower))?;
    let phrase = Phrase::read(label, &words, 0)?;
    let whole = phrase.last + 1 == words.len() && words[phrase.last].end == label.len() && first.end <= label.len();
    place_of(&phrase).filter(|_| whole)
}

fn is_place_word(word: &str) -> bool {
    DIRECTIONS.contains(&word) || CENTRES.contains(&word)
}

/// The one place that label and answer give.
fn named_place(row: &Row) -> Outcome<Position> {
    if let Some(place) = row.position.as_deref().and_then(pure_label) {
        return Ok(place);
    }
    let mut places = Vec::new();
    for text in row.position.iter().chain([&row.answer]) {
        let words = words(text);
        let mut index = 0;
        while index < words.len() {
            if !is_place_word(&words[index].lower) {
                index += 1;
                continue;
            }
            let Some(phrase) = Phrase::read(text, &words, index) else { return Err(Refusal::NoPlace) };
            index = phrase.last + 1;
            let is_certain = certain(text, &words, &phrase).is_some() && closeness(&words, &phrase).is_none();
            places.extend(place_of(&phrase).filter(|_| is_certain));
        }
    }
    match places.split_first() {
        Some((first, others)) if others.iter().all(|place| place == first) => Ok(*first),
        _ => Err(Refusal::NoPlace),
    }
}

/// Organs that have a left and a right or an upper and a lower one: their names go with the patient.
const ANATOMY: [&str; 26] = [
    "lung",
    "lungs",
    "lobe",
    "lobes",
    "kidney",
    "kidneys",
    "breast",
    "ventricle",
    "atrium",
    "hemisphere",
    "hip",
    "knee",
    "femur",
    "eye",
    "ovary",
    "adrenal",
    "tonsil",
    "hand",
    "foot",
    "arm",
    "leg",
    "shoulder",
    "hilum",
    "hemithorax",
    "diaphragm",
    "carotid",
];

/// Whether the direction word at `index` belongs to an organ: `left lung`, `left lower lobe`.
fn is_anatomy(words: &[Word], index: usize) -> bool {
    let after = words.iter().skip(index + 1).find(|word| !is_place_word(&word.lower));
    after.is_some_and(|word| ANATOMY.contains(&word.lower.as_str()))
}

/// Index of the first word of `close to the`, `near the` (true) or `far from the` (false) before a phrase.
fn closeness(words: &[Word], phrase: &Phrase) -> Option<(usize, bool)> {
    let before = |back: usize| phrase.first.checked_sub(back).map_or("", |index| words[index].lower.as_str());
    match (before(3), before(2), before(1)) {
        ("close", "to", "the") => Some((phrase.first - 3, true)),
        ("far", "from", "the") => Some((phrase.first - 3, false)),
        (_, "near", "the") => Some((phrase.first - 2, true)),
        _ => None,
    }
    .filter(|_| phrase.is_centre())
}

/// From one place to another.
struct Change<'a> {
    from: Position,
    to: Position,
    style: Style,
    old: &'a Scene,
    new: &'a Scene,
}

/// Words for an area that may no longer fit one of another size.
const SIZES: [&str; 10] =
    ["small", "smaller", "smallest", "tiny", "large", "larger", "largest", "big", "bigger", "huge"];
/// Lengths do not follow from a mask.
const UNITS: [&str; 8] = ["mm", "cm", "px", "pixel", "pixels", "millimeters", "centimeters", "diameter"];

type Edit = (Range<usize>, String);

impl Change<'_> {
    fn text(&self, text: &str) -> Outcome<String> {
        if text.contains('[') {
            return Err(Refusal::Words("[".into()));
        }
        let words = words(text);
        let mut edits: Vec<Edit> = Vec::new();
        let mut index = 0;
        while let Some(word) = words.get(index) {
            let name = word.lower.as_str();
            if is_place_word(name) {
                let phrase =
                    Phrase::read(text, &words, index).ok_or_else(|| Refusal::Words(text[word.start..].to_owned()))?;
                edits.extend(self.phrase(text, &words, &phrase)?);
                index = phrase.last + 1;
                continue;
            }
            if name.bytes().all(|byte| byte.is_ascii_digit()) {
                edits.extend(self.number(text, &words, index)?);
            }
            let directed = REFUSED.contains(&name) || DIRECTIONS.iter().any(|direction| name.starts_with(direction));
            let resized = (self.new.area_frac() / self.old.area_frac() - 1.0).abs() > 0.25;
            if directed
                || UNITS.contains(&name)
                || (resized && SIZES.contains(&name))
                || (name == "midline" && self.from != self.to)
            {
                return Err(Refusal::Words(word.lower.clone()));
            }
            index += 1;
        }
        let mut result = text.to_owned();
        for (range, replacement) in edits.into_iter().rev() {
            result.replace_range(range, &replacement);
        }
        Ok(result)
    }

    /// What becomes of a phrase of place words.
    fn phrase(&self, text: &str, words: &[Word], phrase: &Phrase) -> Outcome<Option<Edit>> {
        let refused = || Refusal::Words(text[words[phrase.first].start..words[phrase.last].end].to_owned());
        let of_the_picture = certain(text, words, phrase);
        if let (Some((first, near)), Some(_)) = (closeness(words, phrase), of_the_picture) {
            return self.closeness(text, words, first..phrase.first, near);
        }
        if of_the_picture.is_none() && is_anatomy(words, phrase.last) {
            let same = |turned: i8, horizontal| turned == 0 || self.old.half(horizontal) == self.new.half(horizontal);
            let upright = phrase.vertical != 0 || phrase.centre.is_some();
            let holds = same(phrase.horizontal, true) && (!upright || self.from.row == self.to.row);
            return if holds { Ok(None) } else { Err(refused()) };
        }
        match (place_of(phrase), of_the_picture) {
            (Some(place), Some(_)) if place == self.from => {
                Ok((self.from != self.to).then(|| self.replaced(text, words, phrase)))
            }
            // `right lung ... on the left side of the image`
            (None, Some(_)) => {
                let holds = |scene: &Scene| {
                    (phrase.horizontal == 0 || scene.half(true) == phrase.horizontal)
                        && (phrase.vertical == 0 || scene.half(false) == phrase.vertical)
                };
                if holds(self.old) && holds(self.new) { Ok(None) } else { Err(refused()) }
            }
            (Some(_), None) if phrase.is_centre() => {
                let of_all = phrase.first > 0 && matches!(words[phrase.first - 1].lower.as_str(), "overall" | "common");
                if of_all || self.from == self.to { Ok(None) } else { Err(refused()) }
            }
            _ => Err(refused()),
        }
    }

    /// The new place in the form of the old phrase: `center` <-> `upper left part`.
    fn replaced(&self, text: &str, words: &[Word], phrase: &Phrase) -> Edit {
        let noun = Some(phrase.last + 1)
            .filter(|next| joined(text, words, *next) && PLACES.contains(&words[*next].lower.as_str()));
        let start = words[phrase.first].start;
        let end = words[noun.unwrap_or(phrase.last)].end;
        let label = self.style.label(self.to);
        let is_middle = |place: Position| place.row == place::Row::Center && place.column == place::Column::Center;
        let is_corner = self.to.row != place::Row::Center && self.to.column != place::Column::Center;
        let label = match noun.map(|noun| words[noun].lower.as_str()) {
            _ if is_middle(self.to) => label,
            Some(noun @ ("part" | "region" | "area" | "portion" | "zone" | "section")) => format!("{label} {noun}"),
            Some(noun @ ("corner" | "quadrant")) if is_corner => format!("{label} {noun}"),
            None if !is_middle(self.from) && is_corner => label,
            _ => format!("{label} part"),
        };
        (start..end, same_case(&text[start..], label))
    }

    /// `close to the` <-> `far from the`; the sentence goes when the new mask is itself in the middle.
    fn closeness(&self, text: &str, words: &[Word], said: Range<usize>, near: bool) -> Outcome<Option<Edit>> {
        let (start, end) = (words[said.start].start, words[said.end - 1].end);
        let refused = || Refusal::Words(text[start..end].to_owned());
        let of = |scene: &Scene| position::quadrant(&scene.whole, scene.size_px);
        if of(self.old).near != near {
            return Err(refused());
        }
        let new = of(self.new);
        if new.position.row == place::Row::Center {
            let stop = text[end..].find('.').map_or(text.len(), |at| end + at + 1);
            let begin = text[..start].rfind(". ").map(|at| at + 1).ok_or_else(refused)?;
            let tail = text[end..stop].trim_end_matches('.');
            let is_plain = tail.chars().all(|c| c.is_alphabetic() || " -".contains(c))
                && ![" and ", " but "].iter().any(|more| tail.contains(more));
            return match text[begin..start].trim() {
                "It is" if is_plain => Ok(Some((begin..stop, String::new()))),
                _ => Err(refused()),
            };
        }
        let words = if new.near { "close to the" } else { "far from the" };
        Ok((new.near != near).then(|| (start..end, words.to_owned())))
    }

    /// Shares (`about 14% of the image`, `less than 1%`) and counts (`2 separate areas`).
    fn number(&self, text: &str, words: &[Word], index: usize) -> Outcome<Option<Edit>> {
        let word = &words[index];
        let refused = || Refusal::Words(text[word.start..].chars().take(24).collect());
        let value: u32 = word.lower.parse().map_err(|_| refused())?;
        let before = |back: usize| index.checked_sub(back).map_or("", |index| words[index].lower.as_str());
        if let Some(rest) = text[word.end..].strip_prefix('%') {
            let (old, new) = (self.old.area_frac() * 100.0, self.new.area_frac() * 100.0);
            let (start, holds) = match (before(2), before(1)) {
                ("less", "than") => (words[index - 2].start, old < f64::from(value)),
                (_, "about") => (words[index - 1].start, (old - f64::from(value)).abs() <= 0.5 + 1e-9),
                _ => return Err(refused()),
            };
            if !holds || !rest.trim_start().starts_with("of the ") || (before(1) == "than" && value != 1) {
                return Err(refused());
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
                _ => Err(refused()),
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
#[path = "restate_tests.rs"]
mod tests;
