//! Words of a data root that differ from the masks of their rows: locations, areas, counts, and targets.
//!
//! A text that only differs in wording is not reported. A location counts if it is certain that it is one of the image
//! (`upper left part of the image`, a cell `upper left`), and not of the patient (`left lung`). Where almost all texts of a
//! class follow the rule of the masks, every other location is reported. Else only one that its mask contradicts: no pixel of
//! the mask is on the named side. Where most sides of a class are mirrored, they are those of the patient, and one sentence
//! says so.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ::image::GrayImage;
use rayon::prelude::*;
use serde::Serialize;
use std::sync::LazyLock;

use crate::agreement::{MaskLocation, zones_of};
use crate::familiarity::questions::KnownQuestions;
use crate::flip_rotate::{CENTRES, DIRECTIONS, Phrase, refers_to_image, words};
use crate::manifest::{Manifest, Row};
pub use crate::numbers::WordKind;
use crate::numbers::{self, MaskNumbers};
use crate::position::{GridColumn, Position, Zones};
use crate::relabel::{closeness, location_of_phrase};
use prsmed_base::location::{StatedLocation, stated_location, stated_locations};

/// A text that differs from the mask of its row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WrongWords {
    /// The CSV file.
    pub csv: PathBuf,
    /// 1-based line of `csv`.
    pub line: u64,
    /// What is wrong.
    pub kind: WordKind,
    /// What the text says, and what the mask shows.
    pub reason: String,
}

/// What the texts of a data root say wrongly.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct WordReport {
    /// The texts, by file and line.
    pub wrong: Vec<WrongWords>,
    /// Classes whose sides in words are mirrored.
    pub mirrored: Vec<String>,
}

/// A location in words and that of its mask.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    /// Index of the row.
    row: usize,
    /// `answer` or the column `position`.
    field: &'static str,
    says: String,
    /// Whether it fits by the rule of the grid, and by that of quadrants.
    fits: [bool; 2],
    /// The location of the mask by both rules.
    mask: [Position; 2],
    /// Whether no pixel of the mask is on the named side.
    is_contradicted: bool,
    /// Whether it names left or right, and whether it fits if these are exchanged.
    mirrored: Option<bool>,
}

/// What the texts of the rows of one mask say: locations, and what is wrong with areas and counts.
#[derive(Debug, Default)]
pub(crate) struct MaskWords {
    claims: Vec<Claim>,
    wrong: Vec<(usize, WordKind, String)>,
}

/// Compares the texts of rows with their mask, 0 and 255.
pub(crate) fn compare(manifest: &Manifest, rows: &[usize], mask: &GrayImage) -> MaskWords {
    let mut found = MaskWords::default();
    let Some(location) = MaskLocation::of(mask) else { return found };
    let numbers = LazyLock::new(|| MaskNumbers::of(&location.whole, mask));
    for &index in rows {
        let row = &manifest.rows[index];
        let cell = row.position.as_deref().and_then(|text| Some(("column `position`", text, in_cell(text)?)));
        let answer =
            Some(("answer", row.answer.as_str(), locations_of_image(&row.answer))).filter(|(.., all)| !all.is_empty());
        for (field, text, all) in cell.into_iter().chain(answer) {
            found.claims.push(claim((index, field, text), &all, &location, mask));
        }
        if numbers::has_any(&row.answer) {
            found.wrong.extend(numbers.wrong(&row.answer).map(|(kind, reason)| (index, kind, reason)));
        }
    }
    found
}

fn claim(
    (row, field, text): (usize, &'static str, &str),
    certain: &[StatedLocation],
    location: &MaskLocation,
    mask: &GrayImage,
) -> Claim {
    let all = stated_locations(text);
    let by_rule = |zones| certain.iter().any(|stated| location.fits_any(*stated, &all, zones));
    let mirror = |stated: &StatedLocation| StatedLocation { column: stated.column.map(mirrored), ..*stated };
    let is_sided = |stated: &StatedLocation| stated.column.is_some_and(|column| column != GridColumn::Center);
    let named = |zones| certain.iter().map(|stated| stated.label(zones)).collect::<Vec<_>>().join(" and ");
    let zones = certain.first().map_or(Zones::Grid, |first| zones_of(text, *first, Zones::Grid));
    Claim {
        row,
        field,
        says: named(zones),
        fits: [by_rule(Zones::Grid), by_rule(Zones::Quadrants)],
        mask: [location.position(Zones::Grid), location.position(Zones::Quadrants)],
        is_contradicted: certain.iter().all(|stated| is_contradicted(*stated, location, mask)),
        mirrored: certain.iter().any(is_sided).then(|| {
            certain
                .iter()
                .map(mirror)
                .any(|stated| [Zones::Grid, Zones::Quadrants].into_iter().any(|zones| location.fits(stated, zones)))
        }),
    }
}

fn mirrored(column: GridColumn) -> GridColumn {
    match column {
        GridColumn::Left => GridColumn::Right,
        GridColumn::Center => GridColumn::Center,
        GridColumn::Right => GridColumn::Left,
    }
}

/// Whether a mask has no pixel on a named side; for the center, none in the middle half of the image.
fn is_contradicted(stated: StatedLocation, location: &MaskLocation, mask: &GrayImage) -> bool {
    let (width, height) = mask.dimensions();
    let bounds = &location.whole.bounds;
    // -1: first half, 0: middle half, 1: second half
    let outside = |side: i8, low: u32, high: u32, length: u32| match side {
        -1 => 2 * low >= length,
        0 => 4 * (high + 1) <= length || 4 * low >= 3 * length,
        _ => 2 * (high + 1) <= length,
    };
    let column = stated.column.is_some_and(|column| outside(column as i8 - 1, bounds.left, bounds.right, width));
    let row = stated.row.is_some_and(|row| outside(row as i8 - 1, bounds.top, bounds.bottom, height));
    column || row
}

/// The locations of a cell that is a label (`upper left`, `upper left and center`), or that says them of the image.
fn in_cell(text: &str) -> Option<Vec<StatedLocation>> {
    let is_label = words(text).iter().all(|word| {
        let word = word.lower.as_str();
        DIRECTIONS.contains(&word) || CENTRES.contains(&word) || ["and", "part", "in", "the"].contains(&word)
    });
    let all = if is_label { stated_location(text).into_iter().collect() } else { locations_of_image(text) };
    Some(all).filter(|all: &Vec<StatedLocation>| !all.is_empty())
}

/// The locations that a text certainly says of the image, and not of the patient.
pub(crate) fn locations_of_image(text: &str) -> Vec<StatedLocation> {
    let words = words(text);
    let (mut found, mut index) = (Vec::new(), 0);
    while let Some(word) = words.get(index) {
        let is_location = DIRECTIONS.contains(&word.lower.as_str()) || CENTRES.contains(&word.lower.as_str());
        let Some(phrase) = is_location.then(|| Phrase::read(text, &words, index)).flatten() else {
            index += 1;
            continue;
        };
        if refers_to_image(text, &words, &phrase).is_some() && closeness(&words, &phrase).is_none() {
            found.push(location_of_phrase(&phrase));
        }
        index = phrase.last + 1;
    }
    found
}

/// Puts together what the texts of all masks say wrongly.
pub(crate) fn report(manifest: &Manifest, found: Vec<MaskWords>) -> WordReport {
    let mut wrong = Vec::new();
    let mut by_class: BTreeMap<&str, Vec<Claim>> = BTreeMap::new();
    for MaskWords { claims, wrong: numbers } in found {
        wrong.extend(numbers);
        for claim in claims {
            by_class.entry(&manifest.rows[claim.row].modality).or_default().push(claim);
        }
    }
    let mut mirrored = Vec::new();
    for (class, claims) in by_class {
        let (found, is_mirrored) = wrong_locations(&claims);
        wrong.extend(found);
        mirrored.extend(is_mirrored.then(|| class.to_owned()));
    }
    wrong.extend(other_targets(manifest));
    wrong.sort();
    let at = |(row, kind, reason): (usize, WordKind, String)| {
        let Row { csv, line, .. } = &manifest.rows[row];
        WrongWords { csv: csv.clone(), line: *line, kind, reason }
    };
    let mut wrong: Vec<WrongWords> = wrong.into_iter().map(at).collect();
    wrong.sort_by(|a, b| (&a.csv, a.line).cmp(&(&b.csv, b.line)));
    WordReport { wrong, mirrored }
}

/// The wrong locations of a class, and whether its sides are mirrored.
fn wrong_locations(claims: &[Claim]) -> (Vec<(usize, WordKind, String)>, bool) {
    /// Sides from which a class can be mirrored.
    const FEW: usize = 4;
    let misses = |rule: usize| claims.iter().filter(|claim| !claim.fits[rule]).count();
    let rule = usize::from(misses(1) < misses(0));
    let misses = misses(rule);
    // almost all follow the rule
    let is_strict = 10 * misses <= claims.len() || (misses == 1 && claims.len() >= 4);
    let sided = || claims.iter().filter(|claim| claim.mirrored.is_some());
    let as_mirrored = |claim: &Claim| claim.mirrored == Some(true) && !claim.fits[rule];
    let num_mirrored = sided().filter(|claim| as_mirrored(claim)).count();
    let is_mirrored = num_mirrored >= FEW && 2 * num_mirrored > sided().count();
    let is_wrong = |claim: &&Claim| {
        let differs = if is_strict { !claim.fits[rule] } else { claim.is_contradicted };
        differs && !(is_mirrored && as_mirrored(claim))
    };
    let zones = [Zones::Grid, Zones::Quadrants][rule];
    let describe = |claim: &Claim| {
        let mask = claim.mask[rule].label(zones);
        let reason = format!("the {} says `{}`, the mask lies in `{mask}`", claim.field, claim.says);
        (claim.row, WordKind::Location, reason)
    };
    (claims.iter().filter(is_wrong).map(describe).collect(), is_mirrored)
}

/// Answers about another target than their questions.
fn other_targets(manifest: &Manifest) -> Vec<(usize, WordKind, String)> {
    let questions = || manifest.rows.iter().map(|row| row.question.as_str());
    let classes = manifest.rows.iter().map(|row| (row.question.as_str(), row.modality.as_str()));
    let known = KnownQuestions::new(questions(), []).with_classes(classes);
    let of = |(index, row): (usize, &Row)| {
        let other = known.other_target(&row.question, &row.answer, Some((&row.modality, 1.0)))?;
        let reason = format!("the answer is about `{}`, which the question does not ask about", other.name);
        Some((index, WordKind::Target, reason))
    };
    manifest.rows.par_iter().enumerate().filter_map(of).collect()
}

impl WordReport {
    /// One sentence for each kind, with the first texts.
    pub fn texts(&self) -> Vec<String> {
        /// Most texts that a sentence names.
        const MAX_NAMED: usize = 5;
        let kinds = [
            (WordKind::Location, "texts that name another location than their mask"),
            (WordKind::Area, "answers that name another area than that of their mask"),
            (WordKind::Count, "answers that name another number of regions than that of their mask"),
            (WordKind::Target, "answers about another target than that of their question"),
        ];
        let of_kind = |(kind, what): (WordKind, &str)| {
            let all: Vec<&WrongWords> = self.wrong.iter().filter(|wrong| wrong.kind == kind).collect();
            let named = all.iter().take(MAX_NAMED);
            let named: Vec<String> =
                named.map(|wrong| format!("{}:{}: {}", wrong.csv.display(), wrong.line, wrong.reason)).collect();
            let more = match all.len().saturating_sub(MAX_NAMED) {
                0 => String::new(),
                more => format!("; and {more} more (the argument `json` lists them in `words`)"),
            };
            (!all.is_empty()).then(|| format!("{what}: {}: {}{more}", all.len(), named.join("; ")))
        };
        let mirrored = self.mirrored.iter().map(|class| {
            format!(
                "class `{class}`: left and right in most texts are those of the other side of the image: if they are those of \
                 the patient, a model cannot tell them from those of the image"
            )
        });
        kinds.into_iter().filter_map(of_kind).chain(mirrored).collect()
    }
}

#[cfg(test)]
#[path = "word_check_tests.rs"]
mod tests;
