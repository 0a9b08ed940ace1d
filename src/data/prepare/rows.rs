//! Writes the annotation file: questions and answers of all items.

use std::path::Path;

use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::item::Item;
use super::location::LocationWords;
use super::options::PrepareOptions;
use crate::manifest::Split;
use crate::templates::{self, Templates, Words};
use prsmed_base::{Error, Result, files};

/// Optional columns, which a file has if an item needs them.
#[derive(Clone, Copy)]
enum Column {
    Present,
    Patient,
    Spacing,
    Slice,
}

impl Column {
    /// The columns that the items need.
    fn of(items: &[Item]) -> Vec<Self> {
        let needs = |column: &Self| match column {
            Self::Present => items.iter().any(|item| item.location.is_none()),
            Self::Patient => items.iter().any(|item| item.patient.is_some()),
            Self::Spacing => items.iter().any(|item| item.spacing_mm.is_some()),
            Self::Slice => items.iter().any(|item| item.slice.is_some()),
        };
        [Self::Present, Self::Patient, Self::Spacing, Self::Slice].into_iter().filter(needs).collect()
    }

    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Present => &["present"],
            Self::Patient => &["patient"],
            Self::Spacing => &["spacing_x_mm", "spacing_y_mm"],
            Self::Slice => &["volume", "slice"],
        }
    }

    /// The cells of an item; empty if it has no such value.
    fn cells(self, item: &Item) -> Vec<String> {
        match self {
            Self::Present => vec![if item.location.is_some() { "1" } else { "0" }.to_owned()],
            Self::Patient => vec![item.patient.clone().unwrap_or_default()],
            Self::Spacing => {
                let cell = |side: usize| item.spacing_mm.map_or_else(String::new, |mm| mm[side].to_string());
                vec![cell(0), cell(1)]
            }
            Self::Slice => {
                let (volume, slice) = item.slice.clone().map_or_else(Default::default, |(v, s)| (v, s.to_string()));
                vec![volume, slice]
            }
        }
    }
}

/// Writes the rows of all items to the new file `path` and returns their number.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn write(
    path: &Path,
    items: &[Item],
    splits: &[Split],
    options: &PrepareOptions,
    templates: &Templates,
) -> Result<usize> {
    let failed = |error: csv::Error| Error::io(path, "write")(error.into());
    let columns = Column::of(items);
    let mut csv = csv::Writer::from_writer(Vec::new());
    let optional = columns.iter().flat_map(|column| column.names());
    csv.write_record(["image_path", "question", "answer", "position", "split"].iter().chain(optional))
        .map_err(failed)?;
    let mut rows = 0;
    for (number, (item, split)) in items.iter().zip(splits).enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(1 + number as u64);
        let mask_path = format!("{}/{split}_masks/{}.png", options.modality, item.stem);
        let position = item.location.as_ref().map(LocationWords::label).unwrap_or_default();
        let optional: Vec<String> = columns.iter().flat_map(|column| column.cells(item)).collect();
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
    item: &Item,
    options: &PrepareOptions,
    templates: &Templates,
    rng: &mut ChaCha8Rng,
) -> Vec<(String, String)> {
    if let Some(text) = &item.text {
        return vec![text.clone()];
    }
    let drawn = templates::draw(&templates.one, options.rows_per_image, rng);
    let words = Words { target: &item.target, image: &options.image_word, ..Words::default() };
    let Some(LocationWords { zone, second_zone, count, near }) = &item.location else {
        let mut absent = || templates.absent.answers.choose(rng).map_or("", String::as_str);
        return drawn.into_iter().map(|(question, _)| (words.fill(question), words.fill(absent()))).collect();
    };
    let words = Words { zone, second_zone: second_zone.as_deref().unwrap_or_default(), count: *count, ..words };
    let mut pairs = Vec::new();
    for (question, answer) in drawn {
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
        pairs.push((words.fill(question), answer));
    }
    pairs
}
