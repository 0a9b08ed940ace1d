//! Writes the annotation file: questions and answers of all items.

use std::path::Path;

use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::item::MaskItem;
use super::location::LocationWords;
use super::options::PrepareOptions;
use crate::manifest::Split;
use crate::templates::{self, Templates, Words};
use prsmed_base::{Error, Result, files};

/// An optional column with the cell of an item that has one.
type Column = (&'static str, fn(&MaskItem) -> Option<String>);

/// A file has those columns that an item needs.
const COLUMNS: [Column; 6] = [
    (PRESENT, |item| Some(u8::from(item.location.is_some()).to_string())),
    ("patient", |item| item.patient.clone()),
    ("spacing_x_mm", |item| Some(item.spacing_mm?[0].to_string())),
    ("spacing_y_mm", |item| Some(item.spacing_mm?[1].to_string())),
    ("volume", |item| Some(item.slice.as_ref()?.0.clone())),
    ("slice", |item| Some(item.slice.as_ref()?.1.to_string())),
];
/// The column that only absent targets need.
const PRESENT: &str = "present";

/// Writes the rows of all items to the new file `path` and returns their number.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write(
    path: &Path,
    items: &[MaskItem],
    splits: &[Split],
    options: &PrepareOptions,
    templates: &Templates,
) -> Result<usize> {
    let failed = |error: csv::Error| Error::io(path, "write")(error.into());
    let needs = |(name, cell): &Column| {
        items.iter().any(|item| if *name == PRESENT { item.location.is_none() } else { cell(item).is_some() })
    };
    let columns: Vec<Column> = COLUMNS.into_iter().filter(needs).collect();
    let mut csv = csv::Writer::from_writer(Vec::new());
    let optional = columns.iter().map(|(name, _)| name);
    csv.write_record(["image_path", "question", "answer", "position", "split"].iter().chain(optional))
        .map_err(failed)?;
    let mut rows = 0;
    for (number, (item, split)) in items.iter().zip(splits).enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(1 + number as u64);
        let mask_path = format!("{}/{split}_masks/{}.png", options.modality, item.stem);
        let position = item.location.as_ref().map(LocationWords::label).unwrap_or_default();
        let optional: Vec<String> = columns.iter().map(|(_, cell)| cell(item).unwrap_or_default()).collect();
        for (question, answer) in questions(item, options, templates, &mut rng) {
            let first = [&mask_path, &question, &answer, &position, split.name()];
            let optional = optional.iter().map(String::as_str);
            csv.write_record(first.into_iter().chain(optional)).map_err(failed)?;
            rows += 1;
        }
    }
    let bytes = csv.into_inner().map_err(|error| Error::io(path, "write")(error.into_error()))?;
    files::write(path, &bytes).map_err(Error::io(path, "write"))?;
    Ok(rows)
}

/// Questions about an item, with their answers.
fn questions(
    item: &MaskItem,
    options: &PrepareOptions,
    templates: &Templates,
    rng: &mut ChaCha8Rng,
) -> Vec<(String, String)> {
    if !item.texts.is_empty() {
        return item.texts.clone();
    }
    let questions = if item.which.is_some() { &templates.pair } else { &templates.one };
    let drawn = templates::draw(questions, options.rows_per_image, rng);
    let which = item.which.unwrap_or_default();
    let words = Words { target: &item.target, image: &options.image_word, which, ..Words::default() };
    let Some(LocationWords { zone, second_zone, count, near }) = &item.location else {
        let mut absent = || templates.absent.answers.choose(rng).map_or("", String::as_str);
        return drawn.into_iter().map(|(question, _)| (words.fill(question), words.fill(absent()))).collect();
    };
    let words = Words { zone, second_zone: second_zone.as_deref().unwrap_or_default(), count: *count, ..words };
    let filled = |(question, answer): (&str, &str)| {
        let answer = match second_zone {
            Some(_) => templates.regions.answers.choose(rng).map_or(answer, String::as_str),
            None => answer,
        };
        let mut answer = words.fill(answer);
        if *count > 1 {
            answer = answer + " " + &words.fill(&templates.extra.areas);
        }
        if let Some(near) = near {
            answer = answer + " " + &words.fill(if *near { &templates.extra.near } else { &templates.extra.far });
        }
        (words.fill(question), answer)
    };
    drawn.into_iter().map(filled).collect()
}
