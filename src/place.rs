//! Places in an image, as words: the cells of a 3x3 grid, and which of them a free text names.
//!
//! It reads words, it does not judge prose. Two vocabularies are understood and made: a 3x3 grid (`upper left`, `upper
//! center`, ..., `center`) and PRS-Med's quadrants (`top left`, ..., `center`); `top left` and `upper left` are the same
//! place, and so are `middle`, `central` and `center`. Sides are those of the image, not of the patient.

use std::fmt;

/// A vertical third.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Row {
    /// The upper third, or the upper half in quadrants.
    Upper,
    /// The middle third.
    Center,
    /// The lower third, or the lower half in quadrants.
    Lower,
}

/// A horizontal third.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Column {
    /// The left third of the image, or its left half in quadrants.
    Left,
    /// The middle third.
    Center,
    /// The right third of the image, or its right half in quadrants.
    Right,
}

/// A cell of the 3x3 grid; quadrants use its corners and its middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// Upper, center or lower.
    pub row: Row,
    /// Left, center or right.
    pub column: Column,
}

impl Position {
    /// The nine cells in reading order.
    pub const ALL: [Self; 9] = {
        const fn at(row: Row, column: Column) -> Position {
            Position { row, column }
        }
        [
            at(Row::Upper, Column::Left),
            at(Row::Upper, Column::Center),
            at(Row::Upper, Column::Right),
            at(Row::Center, Column::Left),
            at(Row::Center, Column::Center),
            at(Row::Center, Column::Right),
            at(Row::Lower, Column::Left),
            at(Row::Lower, Column::Center),
            at(Row::Lower, Column::Right),
        ]
    };

    /// The label in the words of `zones`: `upper left` (grid) or `top left` (quadrants); the middle is `center`.
    pub fn label(self, zones: Zones) -> String {
        let row = match (self.row, zones) {
            (Row::Upper, Zones::Grid) => "upper",
            (Row::Lower, Zones::Grid) => "lower",
            (Row::Upper, Zones::Quadrants) => "top",
            (Row::Lower, Zones::Quadrants) => "bottom",
            (Row::Center, _) => "center",
        };
        let column = match self.column {
            Column::Left => "left",
            Column::Center => "center",
            Column::Right => "right",
        };
        if self.row == Row::Center && self.column == Column::Center {
            return "center".to_owned();
        }
        format!("{row} {column}")
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.label(Zones::Grid))
    }
}

/// How an image is divided into named places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Zones {
    /// Four quadrants and the centre, as PRS-Med's pipeline divides.
    Quadrants,
    /// A 3x3 grid.
    #[default]
    Grid,
}

#[derive(Clone, Copy)]
enum Word {
    Row(Row),
    Column(Column),
    Center,
}

fn word(text: &str) -> Option<Word> {
    Some(match text {
        "upper" | "top" | "superior" => Word::Row(Row::Upper),
        "lower" | "bottom" | "inferior" => Word::Row(Row::Lower),
        "left" => Word::Column(Column::Left),
        "right" => Word::Column(Column::Right),
        "center" | "centre" | "central" | "middle" | "mid" => Word::Center,
        _ => return None,
    })
}

/// The place that `text` names: the first that is said of the image (`upper left part`, `center of`, a place before a
/// comma), two neighbouring words before a single one; else the first two neighbouring words whatever follows them.
/// A single word is the middle of its side (`left` is `center left`). `None` when there is no place word, or only one
/// that speaks of anatomy (`right lung`).
pub fn first_place(text: &str) -> Option<Position> {
    let lower = text.to_lowercase().replace('-', " ");
    let pieces: Vec<&str> = lower.split_whitespace().collect();
    let words: Vec<Option<Word>> =
        pieces.iter().map(|piece| word(piece.trim_matches(|c: char| !c.is_alphanumeric()))).collect();
    let of_the_image = |last: usize| {
        pieces[last].ends_with(|c: char| !c.is_alphanumeric())
            || pieces.get(last + 1).is_none_or(|next| OF_THE_IMAGE.contains(&next.trim_end_matches(['.', ',', ';'])))
    };
    let pairs = || words.windows(2).enumerate().filter_map(|(i, pair)| Some((i + 1, both(pair[0]?, pair[1]?)?)));
    let mut lone = words.iter().enumerate().filter_map(|(i, word)| Some((i, alone((*word)?))));
    pairs()
        .find(|(last, _)| of_the_image(*last))
        .or_else(|| lone.find(|(last, _)| of_the_image(*last)))
        .or_else(|| pairs().next())
        .map(|(_, place)| place)
}

/// Words after a place word that show it to be about the image; `left lung`, `upper lobe`, `middle ear` are anatomy.
const OF_THE_IMAGE: [&str; 25] = [
    "part", "side", "corner", "region", "half", "third", "edge", "area", "portion", "zone", "section", "quadrant",
    "position", "location", "center", "of", "in", "and", "at", "with", "it", "its", "the", "is", "covering",
];

fn both(first: Word, second: Word) -> Option<Position> {
    Some(match (first, second) {
        (Word::Row(row), Word::Column(column)) | (Word::Column(column), Word::Row(row)) => Position { row, column },
        (Word::Row(_) | Word::Column(_), Word::Center) => alone(first),
        (Word::Center, Word::Row(_) | Word::Column(_)) => alone(second),
        _ => return None,
    })
}

fn alone(word: Word) -> Position {
    match word {
        Word::Row(row) => Position { row, column: Column::Center },
        Word::Column(column) => Position { row: Row::Center, column },
        Word::Center => Position { row: Row::Center, column: Column::Center },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str) -> Option<String> {
        first_place(text).map(|place| place.to_string())
    }

    #[test]
    fn labels_are_found_again_in_both_vocabularies() {
        for position in Position::ALL {
            for zones in [Zones::Grid, Zones::Quadrants] {
                assert_eq!(first_place(&position.label(zones)), Some(position));
                assert_eq!(first_place(&format!("It is in the {} part.", position.label(zones))), Some(position));
            }
        }
    }

    #[test]
    fn the_place_is_told_from_anatomy_and_from_sides() {
        for (text, place) in [
            ("upper left", "upper left"),
            ("Top-Left corner", "upper left"),
            ("top left center", "upper left"),
            ("the lower center part", "lower center"),
            ("center right", "center right"),
            ("in the center of the image", "center"),
            ("at the bottom", "lower center"),
            ("middle left", "center left"),
            ("the lesion is on the left", "center left"),
            ("the right lung, upper left", "upper left"),
            ("the left lower lobe, in the center right part", "center right"),
            ("the left upper lobe, in the center right part", "center right"),
            ("it is the upper left lesion", "upper left"),
            ("the right lung lies in the center", "center"),
            ("The left lesion is in the center of the image.", "center"),
            ("In the center? No, in the lower center.", "lower center"),
            ("The right lesion lies in the Top-Middle part", "upper center"),
            ("the patient's left lung, shown in the center right part", "center right"),
            ("one in the upper left and one in the bottom right", "upper left"),
            ("in the center left part. It has 4 areas; this is the position of their overall center.", "center left"),
        ] {
            assert_eq!(find(text).as_deref(), Some(place), "{text}");
        }
        for text in ["there is a nevus", "centered nowhere", "the left lung", "liver"] {
            assert_eq!(find(text), None, "{text}");
        }
    }
}
