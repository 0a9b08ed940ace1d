//! Questions and answers of PRS-Med: tables whose column `image_path` names masks.
//!
//! Source: <https://github.com/huyquoctrinh/PRS-Med>, `data_utils/dataset.py`. Older tables have the question in the column
//! `description` and the answer in `position`.

use super::super::item::Skipped;
use super::super::scan::tree::Tree;
use super::super::table::PairText;
use super::matching::{Known, Meant, Parts, parts};
use super::patterns::Groups;
use crate::csv_text;
use crate::manifest::Split;
use prsmed_base::{Error, Result, files};

const HINT: &str = "write the columns `image_path` (the mask), `question` and `answer`";
const COLUMNS: [&str; 6] = ["image_path", "question", "description", "answer", "position", "split"];

/// Gives the groups the questions of the tables in the folders `annotations` and `annotation`.
///
/// # Errors
/// [`Error::Data`] with the line, for a table without these columns or with a broken line; [`Error::Io`].
pub(super) fn describe(tree: &Tree, found: &mut Groups) -> Result<()> {
    let masks: Vec<(String, Parts)> = found
        .groups
        .iter()
        .flat_map(|(key, group)| group.masks.iter().map(move |mask| (key, mask.file)))
        .map(|(key, file)| (key.clone(), parts(&tree.files[file].name, true)))
        .collect();
    let names: Vec<Parts> = masks.iter().map(|(_, parts)| parts.clone()).collect();
    let known = Known::new(&names);
    for path in tree.others.iter().map(|skip| &skip.path) {
        let folder = path.parent().and_then(|folder| folder.file_name()).unwrap_or_default();
        if path.extension().is_none_or(|ending| ending != "csv")
            || !["annotations", "annotation"].iter().any(|name| folder == *name)
        {
            continue;
        }
        let bytes = csv_text::utf8(path, files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?)?;
        let separator = csv_text::separator(&bytes, &COLUMNS);
        let mut reader = csv::ReaderBuilder::new().delimiter(separator).from_reader(bytes.as_slice());
        let unreadable = |error: csv::Error| csv_text::error(path, &bytes, &error, HINT);
        let header = reader.headers().map_err(unreadable)?.clone();
        let column =
            |names: [&str; 2]| names.iter().find_map(|name| header.iter().position(|cell| cell.trim() == *name));
        let (Some(mask), Some(question), Some(answer)) =
            (column(["image_path"; 2]), column(["question", "description"]), column(["answer", "position"]))
        else {
            return Err(Error::data_line(path, 1, "has no columns `image_path`, `question` and `answer`", HINT));
        };
        let split = column(["split"; 2]);
        for record in reader.records() {
            let record = record.map_err(unreadable)?;
            let cell = |index: usize| record.get(index).unwrap_or_default().trim();
            let name = cell(mask);
            let group = match known.meant(&parts(name, true)) {
                Meant::File(number) => found.groups.get_mut(&masks[number].0),
                _ => None,
            };
            let Some(group) = group else {
                found.missing.push(Skipped {
                    path: path.clone(),
                    reason: format!("`{name}` is named, and missing or not unique"),
                });
                continue;
            };
            group.set_split(split.and_then(|split| Split::parse(cell(split))));
            if !cell(question).is_empty() && !cell(answer).is_empty() {
                let (question, answer) = (cell(question).to_owned(), cell(answer).to_owned());
                group.texts.push(PairText { target: None, question, answer });
            }
        }
    }
    Ok(())
}
