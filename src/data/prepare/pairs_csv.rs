//! Tables of pairs as CSV files: `pairs.csv` says which masks an image has, and what else is known of both.
//!
//! Paths are relative to the folder of the table. A `*` in the path of an image stands for a part of a name; in the paths of
//! its masks and in its patient, the same text replaces the first `*`, and so on. Lines about one image are joined. An image of
//! several sequences has a column `image.NAME` for each, in the order of the colours red, green and blue; an empty cell is a
//! sequence that is missing.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::item::{NO_MASK, NO_SEQUENCE, Skipped};
use super::layouts::{called, stem};
use super::options::word_problem;
use super::pairs_outlines;
use super::path_pattern::{self, BETWEEN, filled};
use super::structures::NamedLabels;
use super::table::{Pair, PairKind, PairTable, PairText};
use crate::manifest::Split;
use crate::volume::SequenceFile;
use crate::volume::path::split_selection;
use crate::volume::sequences::{MISSING, names_problem};
use crate::{csv_text, names, patient};
use prsmed_base::{Error, Result, files};

/// Columns with their meaning, for messages. `mask.NAME` may be there for every target.
pub(super) const COLUMNS: [&str; 11] =
    ["name", "image", "mask", "labels", "patient", "split", "class", "target", "question", "answer", "ambiguous"];
/// Begins the name of a column with masks of one target.
const MASK_OF: &str = "mask.";
/// Begins the name of a column with images of one sequence.
const IMAGE_OF: &str = "image.";
const HINT: &str = "columns are `image` or `image.NAME` for each sequence, `mask` or `mask.NAME` for each target, and if needed `name`, `labels`, `patient`, `split`, \
                    `class`, `target`, `question` and `answer`";

/// Reads a table of pairs. Files must exist; nothing is decoded. An image without a mask is in `skipped`.
///
/// # Errors
/// [`Error::Data`] with the line, for an unknown column, a missing file, and lines that contradict each other;
/// [`Error::Io`].
pub fn read_pairs(path: &Path) -> Result<PairTable> {
    let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
    let bytes = csv_text::utf8(path, bytes)?;
    let separator = csv_text::separator(&bytes, &COLUMNS);
    let mut reader = csv::ReaderBuilder::new().delimiter(separator).from_reader(bytes.as_slice());
    let unreadable = |error: csv::Error| csv_text::error(path, &bytes, &error, HINT);
    let header = reader.headers().map_err(unreadable)?.clone();
    let columns = columns(path, &header)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut found = Joined::default();
    let mut lines = csv_text::Lines::new(&bytes);
    for record in reader.records() {
        let record = record.map_err(unreadable)?;
        let number = lines.at(record.position());
        let line = Line { path, folder, number, columns: &columns, record: &record };
        let pairs = line.pairs()?;
        if pairs.is_empty() {
            let reason = format!("{NO_SEQUENCE}: line {number}");
            found.empty.push(Skipped { path: path.to_owned(), reason });
        }
        for pair in pairs {
            if let Some(text) = line.mask().filter(|_| pair.masks.is_empty()) {
                let reason = format!("{NO_MASK}: no file fits `{text}` of line {number}");
                found.unfit.insert(pair.image.clone(), reason);
            }
            found.add(pair, &line)?;
        }
    }
    found.table(path)
}

/// The index of each column by its name in small letters; that of a target keeps its letters.
type Columns = BTreeMap<String, usize>;

fn columns(path: &Path, header: &csv::StringRecord) -> Result<Columns> {
    let mut columns = Columns::new();
    for cell in header {
        let own = names::cleaned(cell);
        let lower = own.to_lowercase();
        if let Some(sequence) = own.get(IMAGE_OF.len()..).map(str::trim).filter(|_| lower.starts_with(IMAGE_OF)) {
            let index = csv_text::column(path, header.as_byte_record(), &own)?;
            columns.extend(index.map(|index| (format!("{IMAGE_OF}{sequence}"), index)));
            continue;
        }
        let target = own.get(MASK_OF.len()..).map(str::trim).filter(|_| lower.starts_with(MASK_OF));
        if let Some((reason, hint)) = target.and_then(word_problem) {
            return Err(Error::data_line(path, 1, format!("column `{own}`: {reason}"), hint));
        }
        if target.is_none() && !COLUMNS.contains(&lower.as_str()) {
            return Err(Error::data_line(path, 1, format!("there is no column `{own}`"), HINT));
        }
        let Some(index) = csv_text::column(path, header.as_byte_record(), &own)? else { continue };
        columns.insert(target.map_or(lower, |target| format!("{MASK_OF}{target}")), index);
    }
    let has_mask = columns.keys().any(|name| name == "mask" || name.starts_with(MASK_OF));
    let sequences = sequences(&columns);
    let has_both = !sequences.is_empty() && columns.contains_key("image");
    let both = || ("a table has a column `image`, or one for each sequence".to_owned(), "remove one of the two kinds");
    let problem = if has_both { Some(both()) } else { names_problem(&sequences).filter(|_| !sequences.is_empty()) };
    if let Some((reason, hint)) = problem {
        return Err(Error::data_line(path, 1, reason, hint));
    }
    let has_image = columns.contains_key("image") || !sequences.is_empty();
    for (name, is_there) in [("image", has_image), ("mask", has_mask)] {
        if !is_there {
            let header = header.iter().collect::<Vec<_>>().join(",");
            let reason = format!("column `{name}` is missing; the header is `{header}`");
            return Err(Error::data_line(path, 1, reason, HINT));
        }
    }
    Ok(columns)
}

/// The names of sequences in the order of their columns.
fn sequences(columns: &Columns) -> Vec<&str> {
    let named = columns.iter().filter_map(|(name, index)| Some((*index, name.strip_prefix(IMAGE_OF)?)));
    named.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// A line of a table.
struct Line<'a> {
    path: &'a Path,
    folder: &'a Path,
    number: u64,
    columns: &'a Columns,
    record: &'a csv::StringRecord,
}

impl Line<'_> {
    fn error(&self, reason: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::data_line(self.path, self.number, reason, hint)
    }

    /// A cell that is not empty.
    fn cell(&self, column: &str) -> Option<&str> {
        let index = *self.columns.get(column)?;
        self.record.get(index).map(str::trim).filter(|cell| !names::cleaned(cell).is_empty())
    }

    /// The first cell of a mask that is not empty.
    fn mask(&self) -> Option<&str> {
        let mut masks = self.columns.keys().filter(|name| *name == "mask" || name.starts_with(MASK_OF));
        masks.find_map(|name| self.cell(name))
    }

    /// The pairs of this line: one, or one for each image that its pattern fits.
    fn pairs(&self) -> Result<Vec<Pair>> {
        if let Some(reason) = self.cell("ambiguous") {
            let hint = "write the right files into the line, or remove it; then empty its cell `ambiguous`";
            return Err(self.error(format!("the line is ambiguous: {reason}"), hint));
        }
        let sequences = sequences(self.columns);
        if !sequences.is_empty() {
            let found = self.files_of(&sequences)?.into_iter();
            // the first file that is not missing is the image
            let image = |files: &[SequenceFile]| files.iter().find_map(|file| file.path.clone()).unwrap_or_default();
            return found.map(|(files, parts)| self.pair(image(&files), files, &parts)).collect();
        }
        let image = self.cell("image").ok_or_else(|| self.error("the column `image` is empty", HINT))?;
        if image.contains(BETWEEN) {
            return Err(self.error(format!("`{image}` names several images"), "keep one image in a line"));
        }
        let mut pairs = Vec::new();
        for (image, parts) in self.files("image", image, &[])? {
            pairs.push(self.pair(image, Vec::new(), &parts)?);
        }
        Ok(pairs)
    }

    /// The files of the sequences of this line, for each text that the `*` of their patterns stand for; none for a line
    /// without any image.
    fn files_of(&self, sequences: &[&str]) -> Result<Vec<(Vec<SequenceFile>, Vec<String>)>> {
        let mut found: BTreeMap<Vec<String>, Vec<SequenceFile>> = BTreeMap::new();
        let none = || sequences.iter().map(|name| SequenceFile { name: (*name).to_owned(), path: None }).collect();
        for (number, name) in sequences.iter().enumerate() {
            let column = format!("{IMAGE_OF}{name}");
            let Some(text) = self.cell(&column).filter(|text| !text.eq_ignore_ascii_case(MISSING)) else { continue };
            for (path, parts) in self.files(&column, text, &[])? {
                let files = found.entry(parts).or_insert_with(none);
                if let Some(other) = files[number].path.replace(path) {
                    let reason =
                        format!("`{text}` names several images of one `{name}`, such as `{}`", other.display());
                    return Err(self.error(reason, "keep one image for each sequence"));
                }
            }
        }
        let num_parts: BTreeSet<usize> = found.keys().map(Vec::len).collect();
        if num_parts.len() > 1 {
            let hint = "write as many `*` for each sequence of a line, or none";
            return Err(self.error("the sequences of the line have patterns with different numbers of `*`", hint));
        }
        Ok(found.into_iter().map(|(parts, files)| (files, parts)).collect())
    }

    /// The files that a cell names, each with the texts that its `*` stand for. `parts` replace the first ones.
    fn files(&self, column: &str, text: &str, parts: &[String]) -> Result<Vec<(PathBuf, Vec<String>)>> {
        let text = &filled(text, parts);
        let is_there = |path: &Path| split_selection(path).0.exists();
        let is_image = column == "image" || column.starts_with(IMAGE_OF);
        let spellings = [text.to_owned(), text.replace('\\', "/"), names::cleaned(text)];
        if let Some(found) = spellings.iter().map(|text| self.folder.join(text)).find(|path| is_there(path)) {
            return Ok(vec![(found, Vec::new())]);
        }
        if text.contains('*') {
            let found = path_pattern::files(self.folder, &text.replace('\\', "/"))?;
            if !found.is_empty() || !is_image {
                return Ok(found);
            }
            return Err(self.error(format!("no file fits the {column} `{text}`"), "correct the pattern"));
        }
        // masks that a pattern expects may be missing
        if !is_image && !parts.is_empty() {
            return Ok(Vec::new());
        }
        let path = self.folder.join(text);
        let similar = names::similar(&path).map(|similar| format!("; {similar}")).unwrap_or_default();
        let hint = format!("correct the path, which is relative to `{}`", self.folder.display());
        Err(self.error(format!("the {column} `{text}` does not exist{similar}"), hint))
    }

    fn pair(&self, image: PathBuf, sequences: Vec<SequenceFile>, parts: &[String]) -> Result<Pair> {
        let target = self.cell("target").map(names::cleaned);
        if let Some((reason, hint)) = target.as_deref().and_then(word_problem) {
            return Err(self.error(reason, hint));
        }
        let mut masks = Vec::new();
        for column in self.columns.keys().filter(|name| *name == "mask" || name.starts_with(MASK_OF)) {
            let of = column.strip_prefix(MASK_OF).map(str::to_owned).or_else(|| target.clone());
            for text in
                self.cell(column).unwrap_or_default().split(BETWEEN).map(str::trim).filter(|text| !text.is_empty())
            {
                masks.extend(self.files(column, text, parts)?.into_iter().map(|(path, _)| (of.clone(), path)));
            }
        }
        let patient = self.cell("patient").map(|cell| filled(&names::cleaned(cell), parts));
        if let Some((patient, reason)) = patient.as_ref().and_then(|name| Some((name, csv_text::spoiled(name)?))) {
            return Err(self.error(format!("patient `{patient}` {reason}"), csv_text::SPOILED_HINT));
        }
        Ok(Pair {
            name: self.name()?,
            source: image.clone(),
            image,
            sequences,
            masks,
            patient: patient.filter(|name| patient::key(name).is_some()),
            split: self.split()?,
            class: self.cell("class").map(names::cleaned),
            labels: self.labels(target.as_deref())?,
            texts: self.texts(target)?,
        })
    }

    fn name(&self) -> Result<String> {
        let name = self.cell("name").map(names::cleaned).unwrap_or_default();
        if name.contains(['/', '\\']) || name.starts_with('.') {
            let hint = "a name begins names of files: use letters, digits, blanks, `_` and `-`";
            return Err(self.error(format!("the name `{name}` is no part of a file name"), hint));
        }
        Ok(name)
    }

    fn split(&self) -> Result<Option<Split>> {
        let Some(cell) = self.cell("split").map(names::cleaned) else { return Ok(None) };
        let found = Split::parse(&cell);
        let unknown =
            || self.error(format!("split `{cell}` is not one of `train`, `val`, `test`"), "use one of these words");
        found.map(Some).ok_or_else(unknown)
    }

    fn labels(&self, target: Option<&str>) -> Result<NamedLabels> {
        let Some(cell) = self.cell("labels") else { return Ok(NamedLabels::default()) };
        let labels: NamedLabels =
            cell.parse().map_err(|reason| self.error(reason, "write for example `1=liver,2+3=tumour`"))?;
        if let Some((reason, hint)) = labels.iter().find_map(|(name, _)| word_problem(name)) {
            return Err(self.error(reason, hint));
        }
        if let Some(target) = target {
            let reason = format!("the line has the target `{target}`, and labels with names of their own");
            return Err(self.error(reason, "keep one of the two"));
        }
        Ok(labels)
    }

    fn texts(&self, target: Option<String>) -> Result<Vec<PairText>> {
        match (self.cell("question"), self.cell("answer")) {
            (None, None) => Ok(Vec::new()),
            (Some(question), Some(answer)) => {
                Ok(vec![PairText { target, question: question.to_owned(), answer: answer.to_owned() }])
            }
            _ => Err(self.error("a question has no answer, or an answer no question", "write both, or none of them")),
        }
    }
}

/// The pairs of all lines, one for each image.
#[derive(Default)]
struct Joined {
    rows: Vec<Pair>,
    /// Number of a row by its image.
    by_image: BTreeMap<PathBuf, usize>,
    /// Lines without an image of any sequence.
    empty: Vec<Skipped>,
    /// Why an image has no mask, if its line looks for one.
    unfit: BTreeMap<PathBuf, String>,
}

impl Joined {
    fn add(&mut self, pair: Pair, line: &Line) -> Result<()> {
        let number = match self.by_image.entry(pair.image.clone()) {
            Entry::Vacant(new) => {
                new.insert(self.rows.len());
                self.rows.push(pair);
                return Ok(());
            }
            Entry::Occupied(known) => *known.get(),
        };
        let own = &mut self.rows[number];
        if own.sequences != pair.sequences {
            let reason = format!("`{}` has other sequences in an earlier line", own.image.display());
            return Err(line.error(reason, "write the same in all lines of an image"));
        }
        let differs = |what: &str, a: &str, b: &str| {
            let reason = format!("`{}` has the {what} `{a}` in an earlier line, and `{b}` here", own.image.display());
            Err(line.error(reason, "write the same in all lines of an image"))
        };
        let labels = |labels: &NamedLabels| (!labels.is_empty()).then(|| labels.to_string());
        let split = |split: Option<Split>| split.map(|split| split.name().to_owned());
        let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        for (what, a, b) in [
            ("name", name(&own.name), name(&pair.name)),
            ("patient", own.patient.clone(), pair.patient.clone()),
            ("split", split(own.split), split(pair.split)),
            ("class", own.class.clone(), pair.class.clone()),
            ("labels", labels(&own.labels), labels(&pair.labels)),
        ] {
            if let (Some(a), Some(b)) = (&a, &b)
                && a != b
            {
                return differs(what, a, b);
            }
        }
        for mask in pair.masks {
            if !own.masks.contains(&mask) {
                own.masks.push(mask);
            }
        }
        own.name = if own.name.is_empty() { pair.name } else { std::mem::take(&mut own.name) };
        own.patient = own.patient.take().or(pair.patient);
        own.split = own.split.or(pair.split);
        own.class = own.class.take().or(pair.class);
        own.labels = if own.labels.is_empty() { pair.labels } else { std::mem::take(&mut own.labels) };
        own.texts.extend(pair.texts);
        Ok(())
    }

    fn table(mut self, path: &Path) -> Result<PairTable> {
        if self.rows.is_empty() {
            return Err(Error::data(path, "the table has no lines", HINT));
        }
        pairs_outlines::complete(&mut self.rows, path)?;
        let derived = names_of(&self.rows);
        let named = self
            .rows
            .into_iter()
            .zip(derived)
            .map(|(pair, name)| called(Pair { name: if pair.name.is_empty() { name } else { pair.name }, ..pair }));
        let (rows, alone): (Vec<Pair>, Vec<Pair>) = named.partition(|pair| !pair.masks.is_empty());
        let alone = alone.into_iter().map(|pair| {
            let reason = self.unfit.remove(&pair.image).unwrap_or_else(|| NO_MASK.into());
            Skipped { path: pair.image, reason }
        });
        let skipped = alone.chain(self.empty).collect();
        let kind = if rows.iter().any(Pair::is_image) { PairKind::Images } else { PairKind::Volumes };
        let table = PairTable { rows, skipped, kind, ..PairTable::default() };
        table.check()?;
        Ok(table)
    }
}

/// Names for images: their folders and stems, without what all have in common.
fn names_of(rows: &[Pair]) -> Vec<String> {
    let parts = |pair: &Pair| -> Vec<String> {
        let folders = pair.image.parent().into_iter().flat_map(Path::components);
        let folders = folders.map(|part| part.as_os_str().to_string_lossy().into_owned());
        // a file that has the name of its sequence alone is called by its folder
        let own = stem(&pair.image);
        let is_sequence = pair.sequences.iter().any(|file| file.name.eq_ignore_ascii_case(&own));
        let folders: Vec<String> = folders.collect();
        let own = (!is_sequence || folders.is_empty()).then_some(own);
        folders.into_iter().chain(own).collect()
    };
    let mut all: Vec<Vec<String>> = rows.iter().map(parts).collect();
    let are_equal = |all: &[Vec<String>], of: fn(&Vec<String>) -> Option<&String>| {
        all.iter().all(|parts| parts.len() > 1 && of(parts) == of(&all[0]))
    };
    while are_equal(&all, |parts| parts.first()) {
        for parts in &mut all {
            parts.remove(0);
        }
    }
    if all.len() > 1 && are_equal(&all, |parts| parts.last()) {
        for parts in &mut all {
            parts.pop();
        }
    }
    all.into_iter().map(|parts| parts.join("_")).collect()
}

/// Writes a table of pairs, with paths relative to its folder. The second part of a row says why it is ambiguous.
///
/// # Errors
/// [`Error::Data`] for a path that cannot be in a table; [`Error::Io`].
pub(super) fn write_pairs<'a>(path: &Path, rows: impl Iterator<Item = (&'a Pair, Option<String>)>) -> Result<()> {
    let rows: Vec<_> = rows.collect();
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut lines = Vec::new();
    for (pair, ambiguous) in &rows {
        lines.extend(cells(pair, ambiguous.as_deref(), folder)?);
    }
    let sequences = rows.iter().map(|(pair, _)| &pair.sequences).find(|files| !files.is_empty());
    if sequences.is_some() {
        // images of unknown sequences, which have no mask
        lines.retain(|line| !line.contains_key("image"));
    }
    let sequence = |name: &str| sequences?.iter().position(|file| name.strip_prefix(IMAGE_OF) == Some(&file.name));
    let order = |name: &str| {
        let kind = sequence(name).map_or(name, |_| "image");
        let is_it = |known: &str| known == kind || (known == "mask" && kind.starts_with(MASK_OF));
        (COLUMNS.iter().position(|known| is_it(known)), sequence(name))
    };
    let mut columns: Vec<&String> = lines.iter().flat_map(BTreeMap::keys).collect();
    columns.sort_by_key(|name| (order(name), *name));
    columns.dedup();
    // a table without lines is one to fill in
    let usual = ["image", "mask", "patient"].map(str::to_owned);
    if columns.is_empty() {
        columns.extend(&usual);
    }
    let failed = |error: csv::Error| Error::io(path, "write")(error.into());
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(&columns).map_err(failed)?;
    for line in &lines {
        csv.write_record(columns.iter().map(|name| line.get(*name).map_or("", String::as_str))).map_err(failed)?;
    }
    let bytes = csv.into_inner().map_err(|error| Error::io(path, "write")(error.into_error()))?;
    files::write_bytes(path, &bytes)
}

type Cells = BTreeMap<String, String>;

/// The lines of a pair: one, and one for each further text.
fn cells(pair: &Pair, ambiguous: Option<&str>, folder: &Path) -> Result<Vec<Cells>> {
    let mut images = Cells::new();
    if pair.sequences.is_empty() {
        images.insert("image".into(), path_pattern::relative(&pair.image, folder)?);
    }
    for SequenceFile { name, path } in &pair.sequences {
        let path = path.as_ref().map(|path| path_pattern::relative(path, folder)).transpose()?;
        images.insert(format!("{IMAGE_OF}{name}"), path.unwrap_or_default());
    }
    let mut cells = images.clone();
    cells.insert("name".into(), pair.name.clone());
    for (target, path) in &pair.masks {
        let column = target.as_ref().map_or("mask".to_owned(), |target| format!("{MASK_OF}{target}"));
        let cell = cells.entry(column).or_default();
        let between = if cell.is_empty() { String::new() } else { BETWEEN.to_string() };
        *cell = format!("{cell}{between}{}", path_pattern::relative(path, folder)?);
    }
    cells.entry("mask".into()).or_default();
    let labels = Some(pair.labels.to_string()).filter(|text| !text.is_empty());
    for (column, value) in [
        ("labels", labels),
        ("patient", pair.patient.clone()),
        ("split", pair.split.map(|split| split.name().to_owned())),
        ("class", pair.class.clone()),
        ("ambiguous", ambiguous.map(str::to_owned)),
    ] {
        cells.extend(value.map(|value| (column.to_owned(), value)));
    }
    let mut lines = vec![cells];
    for PairText { target, question, answer } in &pair.texts {
        let text = [("question", question), ("answer", answer)];
        let mut line = images.clone();
        line.extend(text.map(|(column, value)| (column.to_owned(), value.clone())));
        line.extend(target.clone().map(|target| ("target".to_owned(), target)));
        lines.push(line);
    }
    Ok(lines)
}

#[cfg(test)]
#[path = "pairs_csv_tests.rs"]
mod tests;
