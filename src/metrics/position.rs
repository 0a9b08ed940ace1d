//! Whether an answer names the right place of the 3x3 grid. It reads words, it does not judge prose: the first place
//! that a text names counts, one of two words (`upper left`) before one of one word (`left`); `right lung` is no place.
//!
//! Both vocabularies are understood: `upper|center|lower` with `left|center|right`, and PRS-Med's `top`/`bottom`, with
//! `middle`, `central` and `centre` for `center`, and one word alone (`left`, `top`) for the middle of that side.

use serde::{Deserialize, Serialize};

/// A third of one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Third {
    /// Upper or left.
    First,
    /// The middle third.
    Middle,
    /// Lower or right.
    Last,
}

/// A place on the 3x3 grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Upper, center or lower.
    pub vertical: Third,
    /// Left, center or right.
    pub horizontal: Third,
}

#[derive(Clone, Copy)]
enum Word {
    Vertical(Third),
    Horizontal(Third),
    Center,
}

fn word(text: &str) -> Option<Word> {
    Some(match text {
        "upper" | "top" | "superior" => Word::Vertical(Third::First),
        "lower" | "bottom" | "inferior" => Word::Vertical(Third::Last),
        "left" => Word::Horizontal(Third::First),
        "right" => Word::Horizontal(Third::Last),
        "center" | "centre" | "central" | "middle" | "mid" => Word::Center,
        _ => return None,
    })
}

/// The place that `text` names: the first that is said of the image (`upper left part`, `center of`, a place before a
/// comma), two neighbouring words before a single one; else the first two neighbouring words whatever follows them.
/// `None` when there is no place word.
pub fn first_place(text: &str) -> Option<Place> {
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
const OF_THE_IMAGE: [&str; 24] = [
    "part", "side", "corner", "region", "half", "third", "edge", "area", "portion", "zone", "section", "quadrant",
    "position", "location", "of", "in", "and", "at", "with", "it", "its", "the", "is", "covering",
];

fn both(first: Word, second: Word) -> Option<Place> {
    Some(match (first, second) {
        (Word::Vertical(vertical), Word::Horizontal(horizontal))
        | (Word::Horizontal(horizontal), Word::Vertical(vertical)) => Place { vertical, horizontal },
        (Word::Vertical(_) | Word::Horizontal(_), Word::Center) => alone(first),
        (Word::Center, Word::Vertical(_) | Word::Horizontal(_)) => alone(second),
        _ => return None,
    })
}

fn alone(word: Word) -> Place {
    match word {
        Word::Vertical(vertical) => Place { vertical, horizontal: Third::Middle },
        Word::Horizontal(horizontal) => Place { vertical: Third::Middle, horizontal },
        Word::Center => Place { vertical: Third::Middle, horizontal: Third::Middle },
    }
}

/// Whether an answer names the place of a label (`upper left`); `None` when the label names no place, so that it cannot
/// be judged. An answer without a place is wrong.
pub fn is_right(answer: &str, label: &str) -> Option<bool> {
    first_place(label).map(|expected| first_place(answer) == Some(expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::unnecessary_wraps, reason = "compared with an `Option`")]
    fn place(vertical: Third, horizontal: Third) -> Option<Place> {
        Some(Place { vertical, horizontal })
    }

    #[test]
    fn both_vocabularies() {
        use Third::{First, Last, Middle};
        assert_eq!(first_place("upper left"), place(First, First));
        assert_eq!(first_place("Top-Left corner"), place(First, First));
        assert_eq!(first_place("the lower center part"), place(Last, Middle));
        assert_eq!(first_place("center right"), place(Middle, Last));
        assert_eq!(first_place("in the center of the image"), place(Middle, Middle));
        assert_eq!(first_place("at the bottom"), place(Last, Middle));
        assert_eq!(first_place("middle left"), place(Middle, First));
        assert_eq!(first_place("the right lung, upper left"), place(First, First));
        assert_eq!(first_place("the left lower lobe, in the center right part"), place(Middle, Last));
        assert_eq!(first_place("it is the upper left lesion"), place(First, First));
        assert_eq!(first_place("the right lung lies in the center"), place(Middle, Middle));
        assert_eq!(first_place("there is a nevus"), None);
    }

    #[test]
    fn the_first_place_counts() {
        let answer = "the polyp appears in the center left part of the image. It consists of 4 separate areas, and this \
                      is the position of their overall center.";
        assert_eq!(is_right(answer, "center left"), Some(true));
        assert_eq!(is_right(answer, "center"), Some(false));
        assert_eq!(is_right("no idea", "upper left"), Some(false));
        assert_eq!(is_right("upper left", "liver"), None);
    }

    #[test]
    fn every_real_answer_is_right() {
        let beside = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
        let shared = std::env::var_os("PRSMED_SHARED").map_or(beside, Into::into);
        let Ok(folder) = std::fs::read_dir(shared.join("data/real/annotations")) else {
            use std::io::Write;
            writeln!(std::io::stderr(), "skipped: no `data/real` under {}", shared.display()).unwrap();
            return;
        };
        let mut rows = 0;
        for entry in folder {
            for row in csv::Reader::from_path(entry.unwrap().path()).unwrap().records() {
                let row = row.unwrap();
                assert_eq!(is_right(&row[2], &row[3]), Some(true), "{row:?}");
                rows += 1;
            }
        }
        assert!(rows > 50, "{rows}");
    }
}
