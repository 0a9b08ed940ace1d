//! Location of a region in an image, in words: the cells of a 3x3 grid, and a parser that finds the cell in free text.
//!
//! Two vocabularies are read and written: a 3x3 grid (`upper left`, `upper center`, ..., `center`) and PRS-Med's
//! quadrants (`top left`, ..., `center`). `top left` and `upper left` are the same location; so are `middle`, `central`
//! and `center`. Left and right are those of the image, not of the patient.

use std::fmt;

/// A vertical third.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GridRow {
    /// The upper third, or the upper half in quadrants.
    Upper,
    /// The middle third.
    Center,
    /// The lower third, or the lower half in quadrants.
    Lower,
}

/// A horizontal third.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GridColumn {
    /// The left third of the image, or its left half in quadrants.
    Left,
    /// The middle third.
    Center,
    /// The right third of the image, or its right half in quadrants.
    Right,
}

/// A cell of the 3x3 grid. Quadrants use its corners and its centre.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// Upper, center or lower.
    pub row: GridRow,
    /// Left, center or right.
    pub column: GridColumn,
}

impl Position {
    /// The nine cells in reading order.
    pub const ALL: [Self; 9] = {
        const fn at(row: GridRow, column: GridColumn) -> Position {
            Position { row, column }
        }
        [
            at(GridRow::Upper, GridColumn::Left),
            at(GridRow::Upper, GridColumn::Center),
            at(GridRow::Upper, GridColumn::Right),
            at(GridRow::Center, GridColumn::Left),
            at(GridRow::Center, GridColumn::Center),
            at(GridRow::Center, GridColumn::Right),
            at(GridRow::Lower, GridColumn::Left),
            at(GridRow::Lower, GridColumn::Center),
            at(GridRow::Lower, GridColumn::Right),
        ]
    };

    /// The label in the vocabulary of `zones`: `upper left` (grid) or `top left` (quadrants). The middle is `center`.
    pub fn label(self, zones: Zones) -> String {
        let row = match (self.row, zones) {
            (GridRow::Upper, Zones::Grid) => "upper",
            (GridRow::Lower, Zones::Grid) => "lower",
            (GridRow::Upper, Zones::Quadrants) => "top",
            (GridRow::Lower, Zones::Quadrants) => "bottom",
            (GridRow::Center, _) => "center",
        };
        let column = match self.column {
            GridColumn::Left => "left",
            GridColumn::Center => "center",
            GridColumn::Right => "right",
        };
        if self.row == GridRow::Center && self.column == GridColumn::Center {
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

/// Division of an image into named locations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Zones {
    /// Four quadrants and the centre, as in PRS-Med's published pipeline.
    Quadrants,
    /// A 3x3 grid.
    #[default]
    Grid,
}

#[derive(Clone, Copy)]
enum LocationWord {
    GridRow(GridRow),
    GridColumn(GridColumn),
    Center,
}

fn word(text: &str) -> Option<LocationWord> {
    Some(match text {
        "upper" | "top" | "superior" => LocationWord::GridRow(GridRow::Upper),
        "lower" | "bottom" | "inferior" => LocationWord::GridRow(GridRow::Lower),
        "left" => LocationWord::GridColumn(GridColumn::Left),
        "right" => LocationWord::GridColumn(GridColumn::Right),
        "center" | "centre" | "central" | "middle" | "mid" => LocationWord::Center,
        _ => return None,
    })
}

/// The location that `text` names, or `None`. The first location that clearly belongs to the image wins (`upper left
/// part`, `center of`, a location before a comma). Two neighbouring words win over a single word. Otherwise the first
/// two neighbouring words count, regardless of the following words. A single word is the middle of its side (`left` is
/// `center left`). A single word of anatomy (`right lung`) gives `None`.
pub fn first_location(text: &str) -> Option<Position> {
    let lower = text.to_lowercase().replace('-', " ");
    let pieces: Vec<&str> = lower.split_whitespace().collect();
    let words: Vec<Option<LocationWord>> =
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
        .map(|(_, position)| position)
}

/// Words that may follow a location of the image. In `left lung`, `upper lobe` and `middle ear` the word is anatomy.
const OF_THE_IMAGE: [&str; 25] = [
    "part", "side", "corner", "region", "half", "third", "edge", "area", "portion", "zone", "section", "quadrant",
    "position", "location", "center", "of", "in", "and", "at", "with", "it", "its", "the", "is", "covering",
];

fn both(first: LocationWord, second: LocationWord) -> Option<Position> {
    Some(match (first, second) {
        (LocationWord::GridRow(row), LocationWord::GridColumn(column))
        | (LocationWord::GridColumn(column), LocationWord::GridRow(row)) => Position { row, column },
        (LocationWord::GridRow(_) | LocationWord::GridColumn(_), LocationWord::Center) => alone(first),
        (LocationWord::Center, LocationWord::GridRow(_) | LocationWord::GridColumn(_)) => alone(second),
        _ => return None,
    })
}

fn alone(word: LocationWord) -> Position {
    match word {
        LocationWord::GridRow(row) => Position { row, column: GridColumn::Center },
        LocationWord::GridColumn(column) => Position { row: GridRow::Center, column },
        LocationWord::Center => Position { row: GridRow::Center, column: GridColumn::Center },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str) -> Option<String> {
        first_location(text).map(|position| position.to_string())
    }

    #[test]
    fn labels_are_found_in_both_vocabularies() {
        for position in Position::ALL {
            for zones in [Zones::Grid, Zones::Quadrants] {
                assert_eq!(first_location(&position.label(zones)), Some(position));
                assert_eq!(first_location(&format!("It is in the {} part.", position.label(zones))), Some(position));
            }
        }
    }

    #[test]
    fn a_location_in_the_image_is_distinguished_from_anatomy() {
        for (text, expected) in [
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
            assert_eq!(find(text).as_deref(), Some(expected), "{text}");
        }
        for text in ["there is a nevus", "centered nowhere", "the left lung", "liver"] {
            assert_eq!(find(text), None, "{text}");
        }
    }
}
