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
        let rows = [GridRow::Upper, GridRow::Center, GridRow::Lower];
        let columns = [GridColumn::Left, GridColumn::Center, GridColumn::Right];
        let (mut all, mut cell) = ([Self { row: rows[0], column: columns[0] }; 9], 0);
        while cell < all.len() {
            all[cell] = Self { row: rows[cell / 3], column: columns[cell % 3] };
            cell += 1;
        }
        all
    };

    /// The label in the vocabulary of `zones`: `upper left` (grid) or `top left` (quadrants). The middle is `center`.
    pub fn label(self, zones: Zones) -> String {
        let rows = match zones {
            Zones::Grid => ["upper", "center", "lower"],
            Zones::Quadrants => ["top", "center", "bottom"],
        };
        match (rows[self.row as usize], ["left", "center", "right"][self.column as usize]) {
            ("center", "center") => "center".to_owned(),
            (row, column) => format!("{row} {column}"),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.label(Zones::Grid))
    }
}

/// A location that a text names. One side alone (`on the left side`) leaves the other direction open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StatedLocation {
    /// Upper, center or lower, if the text says it.
    pub row: Option<GridRow>,
    /// Left, center or right, if the text says it.
    pub column: Option<GridColumn>,
}

impl StatedLocation {
    /// The cell; a direction that the text leaves open is the middle.
    pub fn position(self) -> Position {
        Position { row: self.row.unwrap_or(GridRow::Center), column: self.column.unwrap_or(GridColumn::Center) }
    }

    /// Whether the text leaves one direction open.
    pub fn is_one_sided(self) -> bool {
        self.row.is_none() || self.column.is_none()
    }

    /// Whether a cell has what the text says.
    pub fn fits(self, position: Position) -> bool {
        self.row.is_none_or(|row| row == position.row) && self.column.is_none_or(|column| column == position.column)
    }

    /// As [`Position::label`]; one side alone is one word.
    pub fn label(self, zones: Zones) -> String {
        let label = self.position().label(zones);
        match (self.row, self.column) {
            (None, _) => label.trim_start_matches("center ").to_owned(),
            (_, None) => label.trim_end_matches(" center").to_owned(),
            _ => label,
        }
    }
}

impl From<Position> for StatedLocation {
    fn from(Position { row, column }: Position) -> Self {
        Self { row: Some(row), column: Some(column) }
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

impl Zones {
    /// The vocabulary of the first vertical word of `text`: `top` and `bottom` are those of quadrants, `upper` and
    /// `lower` those of the grid. `None` without such a word.
    pub fn named_in(text: &str) -> Option<Self> {
        let lower = text.to_lowercase();
        lower.split(|c: char| !c.is_alphanumeric()).find_map(|word| match word {
            "top" | "bottom" => Some(Self::Quadrants),
            "upper" | "lower" => Some(Self::Grid),
            _ => None,
        })
    }
}

/// What a word of a location says; nothing about both directions for the center.
fn word(text: &str) -> Option<StatedLocation> {
    let (row, column) = match text {
        "upper" | "top" | "superior" => (Some(GridRow::Upper), None),
        "lower" | "bottom" | "inferior" => (Some(GridRow::Lower), None),
        "left" => (None, Some(GridColumn::Left)),
        "right" => (None, Some(GridColumn::Right)),
        "center" | "centre" | "central" | "middle" | "mid" => (None, None),
        _ => return None,
    };
    Some(StatedLocation { row, column })
}

/// The cell that `text` names, or `None`: that of [`stated_location`].
pub fn first_location(text: &str) -> Option<Position> {
    stated_location(text).map(StatedLocation::position)
}

/// The location that `text` names, or `None`. The first location that clearly belongs to the image wins (`upper left
/// part`, `center of`, a location before a comma). Two neighbouring words win over a single word. Otherwise the first
/// two neighbouring words count, regardless of the following words. A single word of anatomy (`right lung`) gives
/// `None`.
pub fn stated_location(text: &str) -> Option<StatedLocation> {
    let found = Found::new(text);
    let first = |mut all: Vec<(usize, StatedLocation)>| (!all.is_empty()).then(|| all.swap_remove(0).1);
    first(found.of_the_image(found.pairs.clone()))
        .or_else(|| first(found.of_the_image(found.lone.clone())))
        .or_else(|| first(found.pairs.clone()))
}

/// All locations that clearly belong to the image, in the order of the text: `in the upper left part and in the center of
/// the image` has two. The center of several regions together (`overall center`) and that of a distance (`close to the
/// middle`) are none.
pub fn stated_locations(text: &str) -> Vec<StatedLocation> {
    let found = Found::new(text);
    let is_in_pair = |at: usize| found.pairs.iter().any(|(last, _)| at == *last || at + 1 == *last);
    let is_distance = |at: usize| {
        let before = |back: usize| at.checked_sub(back).map_or("", |index| found.pieces[index].as_str());
        matches!(before(1), "overall" | "common") || matches!(before(2), "to" | "from" | "near")
    };
    let lone = found.lone.iter().filter(|(at, _)| !is_in_pair(*at) && !is_distance(*at)).copied();
    let mut all = found.of_the_image(found.pairs.iter().copied().chain(lone).collect());
    all.sort_by_key(|(last, _)| *last);
    all.into_iter().map(|(_, location)| location).collect()
}

/// The location words of a text.
struct Found {
    /// The words with their punctuation, in lower case.
    pieces: Vec<String>,
    /// Locations of two neighbouring words, each with the index of the second one.
    pairs: Vec<(usize, StatedLocation)>,
    /// Locations of one word, each with its index; also of the words of pairs.
    lone: Vec<(usize, StatedLocation)>,
}

impl Found {
    fn new(text: &str) -> Self {
        let lower = text.to_lowercase().replace('-', " ");
        let pieces: Vec<String> = lower.split_whitespace().map(str::to_owned).collect();
        let words: Vec<Option<StatedLocation>> =
            pieces.iter().map(|piece| word(piece.trim_matches(|c: char| !c.is_alphanumeric()))).collect();
        let pair = |(i, pair): (usize, &[Option<StatedLocation>])| Some((i + 1, both(pair[0]?, pair[1]?)?.into()));
        let pairs = words.windows(2).enumerate().filter_map(pair).collect();
        let lone = words.iter().enumerate().filter_map(|(i, word)| Some((i, alone((*word)?)))).collect();
        Self { pieces, pairs, lone }
    }

    /// Those whose next word shows that they belong to the image.
    fn of_the_image(&self, mut locations: Vec<(usize, StatedLocation)>) -> Vec<(usize, StatedLocation)> {
        locations.retain(|&(last, _)| {
            let next = self.pieces.get(last + 1);
            self.pieces[last].ends_with(|c: char| !c.is_alphanumeric())
                || next.is_none_or(|next| OF_THE_IMAGE.contains(&next.trim_end_matches(['.', ',', ';'])))
        });
        locations
    }
}

/// Words that may follow a location of the image. In `left lung`, `upper lobe` and `middle ear` the word is anatomy.
const OF_THE_IMAGE: [&str; 25] = [
    "part", "side", "corner", "region", "half", "third", "edge", "area", "portion", "zone", "section", "quadrant",
    "position", "location", "center", "of", "in", "and", "at", "with", "it", "its", "the", "is", "covering",
];

/// The cell of two neighbouring words; `None` if both are about one direction, or both are the center.
fn both(first: StatedLocation, second: StatedLocation) -> Option<Position> {
    let both = StatedLocation { row: first.row.xor(second.row), column: first.column.xor(second.column) };
    (both.row.is_some() || both.column.is_some()).then(|| both.position())
}

/// The location of a word without another one.
fn alone(word: StatedLocation) -> StatedLocation {
    if word.row.is_none() && word.column.is_none() { word.position().into() } else { word }
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

    #[test]
    fn one_side_alone_leaves_the_other_direction_open() {
        for (text, label, fits) in [
            ("on the left side of the image", "left", ["upper left", "center left"]),
            ("at the bottom", "lower", ["lower center", "lower right"]),
            ("in the center left part", "center left", ["center left", "center left"]),
            ("in the center", "center", ["center", "center"]),
            ("in the top left", "upper left", ["upper left", "upper left"]),
        ] {
            let stated = stated_location(text).unwrap();
            assert_eq!(stated.label(Zones::Grid), label, "{text}");
            let all = Position::ALL.into_iter().filter(|position| stated.fits(*position)).map(|p| p.to_string());
            let all: Vec<String> = all.collect();
            assert_eq!(all.len(), if stated.is_one_sided() { 3 } else { 1 }, "{text}");
            assert!(fits.iter().all(|fits| all.iter().any(|own| own == fits)), "{text}: {all:?}");
        }
    }

    #[test]
    fn all_locations_of_a_text_are_found_without_distances() {
        for (text, expected) in [
            ("in two places: in the upper left part and in the center of the image.", "upper left, center"),
            ("in the center left part. It has 4 areas; this is the position of their overall center.", "center left"),
            ("in the top left part of the scan. It is close to the middle of the scan.", "upper left"),
            ("in the top left part. It is far from the middle of the image.", "upper left"),
            ("the right lung and the upper lobe", ""),
            ("upper left, lower right", "upper left, lower right"),
        ] {
            let all: Vec<String> = stated_locations(text).iter().map(|stated| stated.label(Zones::Grid)).collect();
            assert_eq!(all.join(", "), expected, "{text}");
        }
    }

    #[test]
    fn the_first_vertical_word_tells_the_vocabulary() {
        assert_eq!(Zones::named_in("the Top-left part"), Some(Zones::Quadrants));
        assert_eq!(Zones::named_in("in the lower center, not at the top"), Some(Zones::Grid));
        assert_eq!(Zones::named_in("in the center; stop"), None);
    }
}
