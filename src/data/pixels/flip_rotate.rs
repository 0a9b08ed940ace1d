//! Flips and quarter turns of a sample, with its text updated. A sample whose text cannot be updated safely is not
//! changed.
//!
//! A text is rewritten only if its meaning is certain. A phrase consists of `left right upper lower top bottom`, with
//! `center`, `centre`, `central`, `middle`. It must be followed by a location noun and the image (`upper left part of
//! the image`, `left side of this chest X-ray`), by the image (`top of the image`), or by `corner` after two
//! directions (`top left corner`). A position label may consist of the phrase alone.
//!
//! Any other word for a direction stops the rewrite: `left lung`, `right-sided`, `upper lobe`, `left side` without an
//! image, `above`, `superior`, `lateral`, `clockwise`, coordinates. Words alone cannot distinguish left and right of
//! the patient from left and right of the image, so the rule prefers not to rewrite. One of the eight symmetries of a
//! square is drawn for each (seed, epoch, row or image).

use ::image::{DynamicImage, GrayImage};
use rand::Rng;

use crate::manifest::Row;
use crate::random;

/// One of the eight symmetries of a square: an optional left-right mirroring, then quarter turns clockwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Transform {
    mirrored: bool,
    quarter_turns: u8,
}

impl Transform {
    /// No change.
    pub const IDENTITY: Self = Self { mirrored: false, quarter_turns: 0 };
    /// Swaps left and right.
    pub const MIRROR: Self = Self { mirrored: true, quarter_turns: 0 };
    /// Swaps top and bottom.
    pub const FLIP: Self = Self { mirrored: true, quarter_turns: 2 };
    /// A quarter turn clockwise.
    pub const QUARTER: Self = Self { mirrored: false, quarter_turns: 1 };

    /// All eight symmetries, the identity first.
    pub fn all() -> [Self; 8] {
        std::array::from_fn(|index| Self { mirrored: index >= 4, quarter_turns: [0, 1, 2, 3][index % 4] })
    }

    /// Transforms an image.
    pub fn image(self, image: DynamicImage) -> DynamicImage {
        let image = if self.mirrored { image.fliph() } else { image };
        match self.quarter_turns {
            1 => image.rotate90(),
            2 => image.rotate180(),
            3 => image.rotate270(),
            _ => image,
        }
    }

    /// Transforms a mask.
    pub fn mask(self, mask: GrayImage) -> GrayImage {
        if self == Self::IDENTITY { mask } else { self.image(DynamicImage::ImageLuma8(mask)).into_luma8() }
    }

    /// The transformed direction; (-1, -1) is the upper left.
    fn direction(self, (h, v): (i8, i8)) -> (i8, i8) {
        let mut to = if self.mirrored { (-h, v) } else { (h, v) };
        for _ in 0..self.quarter_turns {
            to = (-to.1, to.0);
        }
        to
    }
}

/// Draws a transform for (seed, epoch, key) and rewrites the rows of one image. `None` when the identity was drawn or
/// one of the texts cannot be rewritten safely.
pub fn apply(rows: &[&Row], seed: u64, epoch: u64, key: u64) -> Option<(Vec<Row>, Transform)> {
    let transform = Transform::all()[random::stream("jitter", &[seed, epoch, key]).random_range(0..8)];
    if transform == Transform::IDENTITY {
        return None;
    }
    let transformed: Option<Vec<Row>> = rows.iter().map(|row| transform_row(row, transform)).collect();
    transformed.map(|rows| (rows, transform))
}

/// The row with its texts rewritten; `None` when one of them cannot be rewritten safely.
pub fn transform_row(row: &Row, transform: Transform) -> Option<Row> {
    let all = [Some(&row.question), Some(&row.answer), row.position.as_ref()];
    let plain = all
        .into_iter()
        .flatten()
        .any(|text| words(text).iter().any(|word| matches!(word.lower.as_str(), "top" | "bottom")));
    let style = if plain { ["top", "bottom"] } else { ["upper", "lower"] };
    Some(Row {
        question: transform_text(&row.question, transform, style)?,
        answer: transform_text(&row.answer, transform, style)?,
        position: match &row.position {
            Some(label) => {
                Some(transform_label(label, transform, style).or_else(|| transform_text(label, transform, style))?)
            }
            None => None,
        },
        ..row.clone()
    })
}

pub(crate) const CENTRES: [&str; 4] = ["center", "centre", "central", "middle"];
pub(crate) const DIRECTIONS: [&str; 6] = ["left", "right", "upper", "lower", "top", "bottom"];
pub(crate) const LOCATION_NOUNS: [&str; 16] = [
    "part", "side", "region", "corner", "area", "half", "quadrant", "portion", "edge", "zone", "section", "third",
    "border", "margin", "end", "segment",
];
pub(crate) const IMAGES: [&str; 12] = [
    "image", "picture", "scan", "slice", "photograph", "photo", "radiograph", "ray", "frame", "view", "mammogram",
    "ultrasound",
];
/// Words for a direction or location that are not part of the phrases above; a text with one is not rewritten.
pub(crate) const UNSUPPORTED_WORDS: [&str; 46] = [
    "above", "below", "beneath", "under", "underneath", "beside", "down", "downward", "downwards", "upward", "upwards",
    "higher", "horizontal", "horizontally", "vertical", "vertically", "diagonal", "diagonally", "superior", "inferior",
    "anterior", "posterior", "lateral", "medial", "cranial", "caudal", "dorsal", "ventral", "clock", "clockwise",
    "counterclockwise", "anticlockwise", "mid", "north", "south", "east", "west", "coordinate", "coordinates", "row",
    "column", "width", "height", "wide", "tall", "box",
];

/// A run of letters and digits, with its byte range in the text.
pub(crate) struct Word {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) lower: String,
}

pub(crate) fn words(text: &str) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let mut open = false;
    for (at, c) in text.char_indices() {
        let inside = c.is_alphanumeric();
        if inside && !open {
            words.push(Word { start: at, end: at, lower: String::new() });
        }
        if let (true, Some(word)) = (inside, words.last_mut()) {
            word.end = at + c.len_utf8();
            word.lower.extend(c.to_lowercase());
        }
        open = inside;
    }
    words
}

/// A phrase of direction words: `words[first..=last]`.
pub(crate) struct Phrase {
    pub(crate) first: usize,
    pub(crate) last: usize,
    pub(crate) horizontal: i8,
    pub(crate) vertical: i8,
    pub(crate) centre: Option<usize>,
}

impl Phrase {
    /// The longest phrase that starts at `first`; `None` when it contradicts itself (`left right`).
    pub(crate) fn read(text: &str, words: &[Word], first: usize) -> Option<Self> {
        let mut phrase = Self { first, last: first, horizontal: 0, vertical: 0, centre: None };
        for (index, word) in words.iter().enumerate().skip(first) {
            let known = DIRECTIONS.contains(&word.lower.as_str()) || CENTRES.contains(&word.lower.as_str());
            if !known || (index > first && !joined(text, words, index)) {
                break;
            }
            let free = match word.lower.as_str() {
                "left" | "right" => std::mem::replace(&mut phrase.horizontal, side(&word.lower)) == 0,
                "upper" | "lower" | "top" | "bottom" => std::mem::replace(&mut phrase.vertical, side(&word.lower)) == 0,
                _ => phrase.centre.replace(index).is_none(),
            };
            if !free || index - first > 1 {
                return None;
            }
            phrase.last = index;
        }
        Some(phrase)
    }

    pub(crate) fn is_centre(&self) -> bool {
        self.horizontal == 0 && self.vertical == 0
    }

    /// The transformed phrase. With `noun`, a single direction is used like a noun (`top of the image`).
    fn transformed(&self, text: &str, words: &[Word], transform: Transform, style: [&str; 2], noun: bool) -> String {
        let (h, v) = transform.direction((self.horizontal, self.vertical));
        let style = if noun && self.first == self.last { ["top", "bottom"] } else { style };
        let vertical = if v < 0 { style[0] } else { style[1] };
        let horizontal = if h < 0 { "left" } else { "right" };
        let centre = self.centre.map_or("center", |index| words[index].lower.as_str());
        let gap = if self.first < self.last { &text[words[self.first].end..words[self.last].start] } else { " " };
        let transformed = match (h != 0, v != 0) {
            (true, true) => format!("{vertical}{gap}{horizontal}"),
            (true, false) if self.centre.is_some() => format!("{centre}{gap}{horizontal}"),
            (false, true) if self.centre.is_some() => format!("{vertical}{gap}{centre}"),
            (true, false) => horizontal.to_owned(),
            _ => vertical.to_owned(),
        };
        if text[words[self.first].start..].starts_with(char::is_uppercase) {
            return transformed[..1].to_uppercase() + &transformed[1..];
        }
        transformed
    }
}

fn side(word: &str) -> i8 {
    if matches!(word, "left" | "upper" | "top") { -1 } else { 1 }
}

/// Whether only a space or a hyphen separates a word from the word before it.
pub(crate) fn joined(text: &str, words: &[Word], index: usize) -> bool {
    index > 0 && words.get(index).is_some_and(|word| matches!(&text[words[index - 1].end..word.start], " " | "-"))
}

/// Whether a phrase certainly refers to the image: `Some(noun)`, see [`Phrase::transformed`], or `None` if that is
/// not certain.
pub(crate) fn refers_to_image(text: &str, words: &[Word], phrase: &Phrase) -> Option<bool> {
    // `a lower left` could become `a upper left`.
    if phrase.first > 0 && matches!(words[phrase.first - 1].lower.as_str(), "a" | "an") {
        return None;
    }
    let is = |index: usize, names: &[&str]| {
        joined(text, words, index) && words.get(index).is_some_and(|word| names.contains(&word.lower.as_str()))
    };
    let has_location_noun = is(phrase.last + 1, &LOCATION_NOUNS);
    let of = phrase.last + 1 + usize::from(has_location_noun);
    if !is(of, &["of"]) {
        let corner = is(phrase.last + 1, &["corner"]) && phrase.horizontal != 0 && phrase.vertical != 0;
        return corner.then_some(false);
    }
    if !is(of + 1, &["the", "this", "that"]) {
        return None;
    }
    // `of this chest X-ray`: up to three words that describe the image and do not start another location.
    for index in of + 2..of + 6 {
        if is(index, &IMAGES) {
            let after = index + 1;
            let continues =
                words.get(after).is_some_and(|_| text[words[index].end..].starts_with(['\'', '\u{2019}', '-']))
                    || is(after, &CENTRES)
                    || is(after, &DIRECTIONS)
                    || is(after, &LOCATION_NOUNS);
            return (!continues || is(after, &IMAGES)).then_some(!has_location_noun);
        }
        if !joined(text, words, index) || is(index, &["in", "on", "of", "at", "from", "to", "and", "or", "within"]) {
            return None;
        }
    }
    None
}

fn transform_text(text: &str, transform: Transform, style: [&str; 2]) -> Option<String> {
    if text.contains('[') {
        return None;
    }
    let words = words(text);
    let mut transformed = String::with_capacity(text.len());
    let (mut copied, mut index) = (0, 0);
    while let Some(word) = words.get(index) {
        let name = word.lower.as_str();
        if DIRECTIONS.contains(&name) || CENTRES.contains(&name) {
            let phrase = Phrase::read(text, &words, index)?;
            if !phrase.is_centre() {
                let noun = refers_to_image(text, &words, &phrase)?;
                transformed.push_str(&text[copied..word.start]);
                transformed.push_str(&phrase.transformed(text, &words, transform, style, noun));
                copied = words[phrase.last].end;
            }
            index = phrase.last + 1;
            continue;
        }
        // `leftmost`, `topmost`, ... (`right-sided` is two words and fails above)
        if UNSUPPORTED_WORDS.contains(&name) || DIRECTIONS.iter().any(|direction| name.starts_with(direction)) {
            return None;
        }
        index += 1;
    }
    transformed.push_str(&text[copied..]);
    Some(transformed)
}

/// Transforms a label that consists of a phrase only (`upper left`, `center`).
fn transform_label(label: &str, transform: Transform, style: [&str; 2]) -> Option<String> {
    let label = label.trim();
    let words = words(label);
    let phrase = Phrase::read(label, &words, 0).filter(|phrase| {
        phrase.last + 1 == words.len() && words[0].start == 0 && words[phrase.last].end == label.len()
    })?;
    // A word that is not a phrase has no direction either; only a centre word is accepted.
    if phrase.is_centre() {
        return phrase.centre.map(|_| label.to_owned());
    }
    Some(phrase.transformed(label, &words, transform, style, false))
}

#[cfg(test)]
mod tests {
    use ::image::Luma;

    use super::*;
    use crate::fixture::row;

    fn transformed(text: &str, transform: Transform) -> Option<String> {
        transform_row(&row("where?", text, None), transform).map(|row| row.answer)
    }

    #[test]
    fn phrases_about_the_image_are_transformed() {
        let cases = [
            ("in the upper left part of the image.", Transform::MIRROR, "in the upper right part of the image."),
            ("in the upper left part of the image.", Transform::FLIP, "in the lower left part of the image."),
            ("in the upper left part of the image.", Transform::QUARTER, "in the upper right part of the image."),
            (
                "in the center left part of the image: there",
                Transform::QUARTER,
                "in the upper center part of the image: there",
            ),
            ("in the upper center part of the image", Transform::QUARTER, "in the center right part of the image"),
            ("Upper left part of this chest X-ray.", Transform::QUARTER, "Upper right part of this chest X-ray."),
            ("Top of the image", Transform::QUARTER, "Right of the image"),
            ("the right of the image", Transform::QUARTER, "the bottom of the image"),
            ("near the top left corner.", Transform::FLIP, "near the bottom left corner."),
            ("the left-lower quadrant of the scan", Transform::MIRROR, "the lower-right quadrant of the scan"),
            ("in the center of the image", Transform::QUARTER, "in the center of the image"),
            ("a nevus, 2 cm", Transform::FLIP, "a nevus, 2 cm"),
        ];
        for (text, transform, expected) in cases {
            assert_eq!(transformed(text, transform).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn uncertain_texts_are_not_rewritten() {
        for text in [
            "the left lung",
            "right-sided effusion",
            "the upper lobe",
            "on the left side.",
            "left side of the chest in this image",
            "right middle lobe of the lung",
            "left of the image center",
            "upper outer quadrant of the breast",
            "the leftmost lesion",
            "above the diaphragm",
            "at 3 o'clock",
            "in a lower left part of the image",
            "the box [1, 2, 3, 4]",
            "left or right?",
            "the upper part of the left lung in the image",
            "top left, bottom right",
            "a lateral view",
            "upper right quadrant of the abdomen",
            "left part of the image's frame",
            "left part; of the image",
            "left right part of the image",
        ] {
            for transform in Transform::all().into_iter().skip(1) {
                assert_eq!(transformed(text, transform), None, "{text}");
            }
        }
    }

    #[test]
    fn a_row_with_one_uncertain_text_is_not_rewritten() {
        let sure = "in the upper left part of the image";
        assert!(transform_row(&row("Where is the left lung?", sure, Some("upper left")), Transform::MIRROR).is_none());
        assert!(transform_row(&row("Where?", sure, Some("left lung")), Transform::MIRROR).is_none());
        let good = transform_row(&row("Where?", sure, Some("upper left")), Transform::MIRROR).expect("certain");
        assert_eq!(good.position.as_deref(), Some("upper right"));
    }

    #[test]
    fn labels_are_transformed_within_their_vocabulary() {
        let label =
            |label: &str, transform| transform_row(&row("q", "a", Some(label)), transform).and_then(|row| row.position);
        assert_eq!(label("center", Transform::QUARTER).as_deref(), Some("center"));
        assert_eq!(label("center right", Transform::QUARTER).as_deref(), Some("lower center"));
        assert_eq!(label("bottom right", Transform::QUARTER).as_deref(), Some("bottom left"));
        assert_eq!(label("lower left", Transform::FLIP).as_deref(), Some("upper left"));
        assert_eq!(label("position of lung_CT", Transform::FLIP).as_deref(), Some("position of lung_CT"));
        assert_eq!(label("upper left lobe", Transform::FLIP), None);
    }

    #[test]
    fn four_quarter_turns_and_two_mirrors_are_the_identity() {
        let text = "in the center left part of the image";
        let once = |text: &str, transform| transformed(text, transform).expect("certain");
        let mut four = text.to_owned();
        for _ in 0..4 {
            four = once(&four, Transform::QUARTER);
        }
        assert_eq!(four, text);
        assert_eq!(once(&once(text, Transform::MIRROR), Transform::MIRROR), text);
    }

    #[test]
    fn words_and_pixels_are_transformed_alike() {
        // For a dot in each outer cell of a 3x3 image, transform the pixels and the name of the cell.
        let name = |x: u32, y: u32| -> String {
            match (["left", "center", "right"][x as usize], ["upper", "center", "lower"][y as usize]) {
                ("center", vertical) => format!("{vertical} center"),
                (horizontal, "center") => format!("center {horizontal}"),
                (horizontal, vertical) => format!("{vertical} {horizontal}"),
            }
        };
        for transform in Transform::all() {
            for (x, y) in (0..9).map(|cell| (cell % 3, cell / 3)).filter(|&cell| cell != (1, 1)) {
                let mask = GrayImage::from_fn(3, 3, |u, v| Luma([u8::from((u, v) == (x, y))]));
                let mask = transform.mask(mask);
                let (u, v, _) = mask.enumerate_pixels().find(|(_, _, value)| value.0[0] == 1).expect("the dot");
                let style = ["upper", "lower"];
                assert_eq!(transform_label(&name(x, y), transform, style), Some(name(u, v)), "{transform:?}");
            }
        }
    }

    #[test]
    fn the_transform_depends_on_seed_epoch_and_row_and_reaches_all_eight() {
        let row = row("Where?", "in the upper left part of the image", None);
        let draw = |seed, epoch, index| apply(&[&row], seed, epoch, index).map(|(_, transform)| transform);
        assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
        let seen: std::collections::HashSet<_> = (0..200).map(|index| draw(1, 0, index)).collect();
        assert_eq!(seen.len(), 8, "seven transforms and the identity");
        assert!((0..50).any(|index| draw(1, 0, index) != draw(1, 1, index)));
        assert!((0..50).any(|index| draw(1, 0, index) != draw(2, 0, index)));
    }
}
