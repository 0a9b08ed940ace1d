//! Writes the annotation file: questions and answers of all items.

use std::path::Path;

use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

use super::location::LocationWords;
use super::{Item, PrepareOptions};
use crate::data::manifest::Split;
use crate::data::templates::{self, Templates, Words};
use crate::{Error, Result, files};

/// Optional columns that the items need.
struct Columns {
    present: bool,
    patient: bool,
    spacing: bool,
    slice: bool,
}

impl Columns {
    fn of(items: &[Item]) -> Self {
        Self {
            present: items.iter().any(|item| item.location.is_none()),
            patient: items.iter().any(|item| item.patient.is_some()),
            spacing: items.iter().any(|item| item.spacing_mm.is_some()),
            slice: items.iter().any(|item| item.slice.is_some()),
        }
    }

    fn header(&self) -> Vec<&'static str> {
        let optional = [
            (self.present, &["present"][..]),
            (self.patient, &["patient"]),
            (self.spacing, &["spacing_x_mm", "spacing_y_mm"]),
            (self.slice, &["volume", "slice"]),
        ];
        let optional = optional.into_iter().filter(|(needed, _)| *needed).flat_map(|(_, names)| names);
        ["image_path", "question", "answer", "position", "split"].iter().chain(optional).copied().collect()
    }

    /// The cells of an item in the optional columns.
    fn cells(&self, item: &Item) -> Vec<String> {
        let mut cells = Vec::new();
        if self.present {
            cells.push(if item.location.is_some() { "1" } else { "0" }.to_owned());
        }
        if self.patient {
            cells.push(item.patient.clone().unwrap_or_default());
        }
        if self.spacing {
            cells.extend([0, 1].map(|side| item.spacing_mm.map_or_else(String::new, |mm| mm[side].to_string())));
        }
        if self.slice {
            let (volume, slice) = item.slice.clone().map_or_else(Default::default, |(v, s)| (v, s.to_string()));
            cells.extend([volume, slice]);
        }
        cells
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
    let columns = Columns::of(items);
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(columns.header()).map_err(failed)?;
    let mut rows = 0;
    for (number, (item, split)) in items.iter().zip(splits).enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(1 + number as u64);
        let mask_path = format!("{}/{split}_masks/{}.png", options.modality, item.stem);
        let position = item.location.as_ref().map(LocationWords::label).unwrap_or_default();
        let optional = columns.cells(item);
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
