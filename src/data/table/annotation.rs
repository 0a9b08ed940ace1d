//! Reads annotation CSV files into rows: checks columns, paths and splits, and finds images by name. No image is
//! decoded.
//!
//! The columns `image_path`, `question`, `answer` and `split` are required. `image_path` is the path of the *mask*,
//! relative to the data root; `\` is allowed. The columns `position`, `present`, `patient`, `spacing_x_mm` and
//! `spacing_y_mm` are optional, and other columns are ignored. Texts are kept verbatim. The encoding is UTF-8 with or
//! without a BOM, or UTF-16 with one. Cells may also be separated by semicolons or tabs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use crate::csv_text::{self, ENCODING_HINT};
use crate::manifest::{BadRow, Presence, Problem, Row, Split, Target};
use crate::names::{self, cleaned};
use crate::volume::format::{image_endings, is_stack};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Whether a file is an image that can be read, by its name.
pub fn is_image(path: &Path) -> bool {
    let is_known = |own: &OsStr| image_endings().any(|known| own.eq_ignore_ascii_case(known));
    !files::is_hidden(path) && path.extension().is_some_and(is_known)
}

/// Whether a file is a flat image, and no TIFF file that is a volume.
pub(crate) fn is_flat_image(path: &Path) -> bool {
    is_image(path) && !is_stack(path)
}

/// Most bytes of a cell.
const MAX_CELL: usize = 16 << 10;
/// Most bytes of a line.
const MAX_LINE: usize = 1 << 20;
/// Most bad rows of a data root. With more, a file is not a table of annotations.
const MAX_BAD: usize = 100_000;
/// Most characters of a column name that a message shows.
const MAX_SHOWN: usize = 200;

/// Required columns.
const REQUIRED: [&str; 4] = ["image_path", "question", "answer", "split"];

const COLUMNS_HINT: &str = "the first line must name the columns `image_path`, `question`, `answer` and `split` \
                            (`position` and others are optional)";

/// The CSV files of a data root, sorted by name.
///
/// # Errors
/// [`Error::Data`] when a folder is missing or contains no CSV file; [`Error::Io`].
pub fn files(root: &Path, annotations: Option<&Path>) -> Result<Vec<PathBuf>> {
    if !root.is_dir() {
        let hint = "check the path; a data root contains one folder for each modality, and `annotations/`";
        return Err(Error::data(root, "the data root is not a folder", hint));
    }
    let folder = match annotations {
        Some(given) if given.is_file() => return Ok(vec![given.to_path_buf()]),
        Some(given) if given.is_dir() => given.to_path_buf(),
        Some(given) => {
            return Err(Error::data(given, "there is no such file or folder of annotations", "check the argument `annotations`"));
        }
        None => ["annotations", "annotation"]
            .map(|name| root.join(name))
            .into_iter()
            .find(|path| path.is_dir())
            .ok_or_else(|| {
                let is_root = |folder: &&Path| folder.join("annotations").is_dir();
                let hint = match std::path::absolute(root).ok().as_deref().and_then(Path::parent).filter(is_root) {
                    Some(parent) => format!("this is the folder of a class: give the data root `{}`", parent.display()),
                    None => "make a data root of images and masks with `prsmed data prepare`, or give the folder of the CSV \
                             files with the argument `annotations=DIR`"
                        .to_owned(),
                };
                Error::data(root, "the data root contains neither `annotations` nor `annotation`", hint)
            })?,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).map_err(Error::io(&folder, "read"))? {
        let path = entry.map_err(Error::io(&folder, "read"))?.path();
        if !files::is_hidden(&path) && path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv")) {
            files.push(path);
        }
    }
    if files.is_empty() {
        // synthetic pairs have a list of all of them, accepted or not
        if root.join("manifest.jsonl").is_file() {
            let hint = "repeat `prsmed augment generate` if it was interrupted; `manifest.jsonl` has the reasons of rejected \
                        pairs, and `prsmed augment filter` with lower limits accepts more";
            return Err(Error::data(root, "there are no accepted pairs", hint));
        }
        return Err(Error::data(folder, "there is no CSV file in this folder", "check the argument `annotations`"));
    }
    files.sort();
    Ok(files)
}

/// Reads the files in order. Returns the good rows and the bad rows.
///
/// # Errors
/// [`Error::Data`] for a missing column; [`Error::Io`] when a file or folder cannot be read.
pub fn read(root: &Path, files: &[PathBuf]) -> Result<(Vec<Row>, Vec<BadRow>)> {
    let mut reader = Reader { root, folders: HashMap::new(), seen: HashMap::new(), rows: Vec::new(), bad: Vec::new() };
    for file in files {
        reader.file(file)?;
    }
    Ok((reader.rows, reader.bad))
}

/// Column indices of one file.
struct Columns {
    image_path: usize,
    question: usize,
    answer: usize,
    split: usize,
    position: Option<usize>,
    present: Option<usize>,
    patient: Option<usize>,
    spacing_mm: [Option<usize>; 2],
    names: Vec<String>,
    separator: char,
}

impl Columns {
    fn find(file: &Path, header: &csv::ByteRecord, separator: u8) -> Result<Self> {
        let names: Vec<String> = header.iter().map(|name| cleaned(&String::from_utf8_lossy(name))).collect();
        let find = |column: &str| csv_text::column(file, header, column);
        let need = |column: &str| {
            find(column)?.ok_or_else(|| {
                let found: String = names.join(",").chars().take(MAX_SHOWN).collect();
                let hint = if found.contains('\0') {
                    ENCODING_HINT.to_owned()
                } else if names.len() == 1 {
                    format!("separate the cells by commas; {COLUMNS_HINT}")
                } else {
                    COLUMNS_HINT.to_owned()
                };
                Error::data_line(file, 1, format!("column `{column}` is missing; the header is `{found}`"), hint)
            })
        };
        Ok(Self {
            image_path: need(REQUIRED[0])?,
            question: need(REQUIRED[1])?,
            answer: need(REQUIRED[2])?,
            split: need(REQUIRED[3])?,
            position: find("position")?,
            present: find("present")?,
            patient: find("patient")?,
            spacing_mm: [find("spacing_x_mm")?, find("spacing_y_mm")?],
            names,
            separator: separator.into(),
        })
    }
}

type RowProblem = (Problem, String);

/// File names of a folder.
#[derive(Default)]
struct Names {
    by_stem: HashMap<String, Vec<String>>,
    /// By the key of the stem, once a file was not found.
    by_key: Option<HashMap<String, String>>,
}

impl Names {
    /// Says so if the folder has a file whose stem differs from `stem` in case, Unicode form or blanks only.
    fn similar(&mut self, stem: &str) -> String {
        let all = self.by_stem.iter().filter_map(|(stem, names)| Some((names::key(stem), names.first()?.clone())));
        let by_key = self.by_key.get_or_insert_with(|| all.collect());
        by_key.get(&names::key(stem)).map_or_else(String::new, |found| {
            let other = Path::new(found).file_stem().unwrap_or_default().to_string_lossy();
            format!("; `{found}` differs from it in {}", names::difference(stem, &other))
        })
    }
}

struct Reader<'a> {
    root: &'a Path,
    /// File names by stem, of every image folder read so far.
    folders: HashMap<PathBuf, Names>,
    /// First occurrence of each mask, question and answer: file name and line.
    seen: HashMap<(PathBuf, String, String), (PathBuf, u64)>,
    rows: Vec<Row>,
    bad: Vec<BadRow>,
}

impl Reader<'_> {
    fn file(&mut self, file: &Path) -> Result<()> {
        let bytes = files::read(file, files::MAX_TABLE).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::FileTooLarge => {
                Error::data(file, error.to_string(), "give a CSV file of at most 4 GiB, or several files")
            }
            _ => Error::io(file, "read")(error),
        })?;
        let bytes = csv_text::utf8(file, bytes)?;
        let bytes = bytes.as_slice();
        if let Some((line, length)) = (1..)
            .zip(bytes.split(|&byte| byte == b'\n'))
            .map(|(line, text)| (line, text.len()))
            .find(|&(_, length)| length > MAX_LINE)
        {
            let reason = format!("the line has {length} bytes; {MAX_LINE} are the limit");
            return Err(Error::data_line(file, line, reason, "write one line for each question"));
        }
        let separator = csv_text::separator(bytes, &REQUIRED);
        let mut reader = csv::ReaderBuilder::new().flexible(true).delimiter(separator).from_reader(bytes);
        let unreadable = |error: csv::Error| Error::data(file, error.to_string(), "write the file as UTF-8 CSV");
        let columns = Columns::find(file, reader.byte_headers().map_err(unreadable)?, separator)?;
        let mut record = csv::ByteRecord::new();
        let mut lines = csv_text::Lines::new(bytes);
        while reader.read_byte_record(&mut record).map_err(unreadable)? {
            let start = record.position().map_or(0, csv::Position::byte);
            let line = lines.at(record.position());
            let rest = usize::try_from(start).ok().and_then(|start| bytes.get(start..)).unwrap_or_default();
            let is_last = reader.position().byte() >= bytes.len() as u64;
            let found = match cells(&record, is_last && ends_in_quotes(rest, separator), &columns.names) {
                Ok(()) => self.row(file, line, &columns, &record)?,
                Err(problem) => Err(problem),
            };
            match found {
                Ok(row) => self.rows.push(row),
                Err((problem, reason)) => self.bad.push(BadRow { csv: file.to_path_buf(), line, problem, reason }),
            }
            if self.bad.len() > MAX_BAD {
                let first = self.bad.first().map_or("", |bad| &bad.reason);
                let reason = format!("there are more than {MAX_BAD} bad rows; the first reason: {first}");
                return Err(Error::data_line(file, line, reason, COLUMNS_HINT));
            }
        }
        Ok(())
    }

    fn row(
        &mut self,
        file: &Path,
        line: u64,
        columns: &Columns,
        record: &csv::ByteRecord,
    ) -> Result<Result<Row, RowProblem>> {
        let texts = match texts(columns, record) {
            Ok(texts) => texts,
            Err(problem) => return Ok(Err(problem)),
        };
        let (mask, modality) = match mask_of(&texts.mask) {
            Ok(found) => found,
            Err(problem) => return Ok(Err(problem)),
        };
        let mask_path = self.root.join(&mask);
        if !mask_path.is_file() && (texts.target == Presence::Present || mask_path.exists()) {
            return Ok(Err(self.not_a_file(&mask_path, &mask)?));
        }
        let image_path = match self.image_of(&mask)? {
            Ok(path) if !path.is_file() => return Ok(Err(image_not_a_file(self.root, &path))),
            Ok(path) => path,
            Err(problem) => return Ok(Err(problem)),
        };
        match self.seen.entry((mask, texts.question.clone(), texts.answer.clone())) {
            Entry::Occupied(first) => {
                let (csv, first_line) = first.get();
                let name = csv.file_name().unwrap_or_default().to_string_lossy().into_owned();
                return Ok(Err((Problem::Duplicate, format!("repeats the row in line {first_line} of `{name}`"))));
            }
            Entry::Vacant(vacant) => {
                vacant.insert((file.to_path_buf(), line));
            }
        }
        Ok(Ok(Row {
            csv: file.to_path_buf(),
            line,
            modality,
            targets: Target::only(mask_path, texts.target),
            image_path,
            question: texts.question,
            answer: texts.answer,
            position: texts.position,
            patient: texts.patient,
            spacing_mm: texts.spacing_mm,
            split: texts.split,
            synthetic: false,
        }))
    }

    /// The image of a mask. In the path, `*_masks` becomes `*_images` and `_Segmentation` is removed from the file
    /// name; any readable extension is accepted.
    fn image_of(&mut self, mask: &Path) -> Result<Result<PathBuf, RowProblem>> {
        let folder: PathBuf = mask.parent().into_iter().flat_map(Path::components).map(image_folder).collect();
        let root = self.root;
        let all = self.names(&folder)?;
        let names = &all.by_stem;
        let stem = mask.file_stem().unwrap_or_default().to_string_lossy();
        let short = stem.replace("_Segmentation", "");
        let own = mask.extension().unwrap_or_default();
        let found = names.get(&short).or_else(|| names.get(stem.as_ref())).and_then(|names| {
            names.iter().min_by_key(|name| {
                let extension = Path::new(name.as_str()).extension().unwrap_or_default();
                let rank = image_endings().position(|known| extension.eq_ignore_ascii_case(known));
                (!extension.eq_ignore_ascii_case(own), rank, name.as_str())
            })
        });
        let Some(name) = found else {
            let similar = all.similar(&short);
            let endings = image_endings().collect::<Vec<_>>().join(", ");
            let reason = format!("no image `{short}` ({endings}) in `{}`{similar}", folder.display());
            return Ok(Err((Problem::MissingImage, reason)));
        };
        Ok(Ok(root.join(&folder).join(name)))
    }

    /// The images of a folder of the data root.
    fn names(&mut self, folder: &Path) -> Result<&mut Names> {
        Ok(match self.folders.entry(folder.to_owned()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let by_stem = images(&self.root.join(folder))?;
                vacant.insert(Names { by_stem, by_key: None })
            }
        })
    }

    /// Problem of a mask that is no regular file.
    fn not_a_file(&mut self, path: &Path, mask: &Path) -> Result<RowProblem> {
        let shown = mask.display();
        if path.exists() {
            let reason = format!("mask `{shown}` is not a regular file (a folder, pipe or device)");
            return Ok((Problem::NotAFile, reason));
        }
        let stem = mask.file_stem().unwrap_or_default().to_string_lossy();
        let similar = self.names(mask.parent().unwrap_or(Path::new("")))?.similar(&stem);
        Ok((Problem::MissingMask, format!("mask `{shown}` is missing{similar}")))
    }
}

/// Problem of an image that is listed in its folder but is no regular file.
fn image_not_a_file(root: &Path, path: &Path) -> RowProblem {
    let image = path.strip_prefix(root).unwrap_or(path).display();
    if path.exists() {
        (Problem::NotAFile, format!("image `{image}` is not a regular file (a folder, pipe or device)"))
    } else {
        (Problem::MissingImage, format!("image `{image}` is a broken link"))
    }
}

/// Whether a record has cells that a stray double quote has made. `is_open`: its last quote is not closed.
fn cells(record: &csv::ByteRecord, is_open: bool, names: &[String]) -> Result<(), RowProblem> {
    const CLOSE: &str = "close the double quote, or write a double quote inside a text as `\"\"`";
    let column = |index: usize| names.get(index).map_or_else(|| "?".to_owned(), |name| shortened(name));
    if is_open {
        let column = column(record.len().saturating_sub(1));
        let reason = format!("column `{column}` begins with a double quote that is never closed; {CLOSE}");
        return Err((Problem::UnclosedQuote, reason));
    }
    for (index, cell) in record.iter().enumerate() {
        let num_rows = cell.split(|&byte| byte == b'\n').skip(1).filter(|line| looks_like_row(line)).count();
        if num_rows > 0 {
            let reason = format!("column `{}` contains the next {num_rows} rows of the file; {CLOSE}", column(index));
            return Err((Problem::SwallowedRows, reason));
        }
        if cell.len() > MAX_CELL {
            let (column, length) = (column(index), cell.len());
            let reason = format!(
                "column `{column}` has {length} bytes; {MAX_CELL} are the limit. If it is not one text, {CLOSE}"
            );
            return Err((Problem::CellTooLong, reason));
        }
    }
    Ok(())
}

fn shortened(name: &str) -> String {
    name.chars().take(MAX_SHOWN).collect()
}

/// True if a line contains a path of a mask.
fn looks_like_row(line: &[u8]) -> bool {
    line.windows(6).any(|part| part == b"masks/" || part == b"masks\\")
}

/// True if the last cell of a record is quoted and the quote is not closed. The rules are those of the `csv` crate.
fn ends_in_quotes(record: &[u8], separator: u8) -> bool {
    #[derive(Clone, Copy, PartialEq)]
    enum Place {
        Start,
        Plain,
        Quoted,
        /// After a double quote in quotes: it ends the quotes, or it is doubled.
        Quote,
    }
    let end = record.iter().fold(Place::Start, |place, &byte| match (place, byte) {
        (Place::Quoted, b'"') => Place::Quote,
        (Place::Start | Place::Quote, b'"') | (Place::Quoted, _) => Place::Quoted,
        (_, b'\r' | b'\n') => Place::Start,
        (_, byte) if byte == separator => Place::Start,
        _ => Place::Plain,
    });
    end == Place::Quoted
}

struct Texts {
    mask: String,
    question: String,
    answer: String,
    position: Option<String>,
    target: Presence,
    patient: Option<String>,
    spacing_mm: Option<[f64; 2]>,
    split: Split,
}

fn texts(columns: &Columns, record: &csv::ByteRecord) -> Result<Texts, RowProblem> {
    if record.len() != columns.names.len() {
        let separator = match columns.separator {
            ',' => "a comma",
            ';' => "a semicolon",
            _ => "a tab",
        };
        let (found, expected) = (record.len() as u64, columns.names.len() as u64);
        let (reason, remedy) =
            (csv_text::cells_reason(found, expected), csv_text::cells_remedy(found, expected, separator));
        return Err((Problem::ColumnCount, format!("{reason}; {remedy}")));
    }
    let cell = |index: usize, column: &str| -> Result<String, RowProblem> {
        let text = std::str::from_utf8(&record[index])
            .map_err(|_| (Problem::NotUtf8, format!("column `{column}` is not UTF-8; {ENCODING_HINT}")))?;
        if text.trim().is_empty() {
            return Err((Problem::EmptyCell, format!("column `{column}` is empty")));
        }
        Ok(text.to_owned())
    };
    let mask = cell(columns.image_path, "image_path")?;
    let question = cell(columns.question, "question")?;
    let answer = cell(columns.answer, "answer")?;
    let optional = |index: Option<usize>, column: &str| match index {
        Some(index) if record[index].trim_ascii().is_empty() => Ok(None),
        Some(index) => cell(index, column).map(|text| Some(cleaned(&text)).filter(|text| !text.is_empty())),
        None => Ok(None),
    };
    let present = optional(columns.present, "present")?.unwrap_or_default();
    let target = Presence::parse(&present).ok_or_else(|| {
        let reason = format!("present `{present}` is not one of `1`, `0`, `unknown`");
        (Problem::BadPresent, reason)
    })?;
    let patient = optional(columns.patient, "patient")?;
    if let Some((patient, reason)) = patient.as_deref().and_then(|patient| Some((patient, csv_text::spoiled(patient)?)))
    {
        let reason = format!("patient `{patient}` {reason}: {}", csv_text::SPOILED_HINT);
        return Err((Problem::BadPatient, reason));
    }
    let [across, down] = columns.spacing_mm;
    let spacing_mm = spacing(optional(across, "spacing_x_mm")?, optional(down, "spacing_y_mm")?)?;
    // nothing has a location that is absent or unknown
    let position = match target {
        Presence::Present => columns.position.map(|index| cell(index, "position")).transpose()?,
        Presence::Absent | Presence::Unknown => optional(columns.position, "position")?,
    };
    let word = cleaned(&cell(columns.split, "split")?);
    let split = Split::parse(&word).ok_or_else(|| {
        (Problem::UnknownSplit, format!("split `{}` is not one of `train`, `val`, `test`", word.trim()))
    })?;
    let position = position.map(|text| text.trim().to_owned());
    let mask = mask.trim().replace('\\', "/");
    Ok(Texts { mask, question, answer, position, target, patient, spacing_mm, split })
}

/// The size of a pixel in mm from its two cells.
fn spacing(across: Option<String>, down: Option<String>) -> Result<Option<[f64; 2]>, RowProblem> {
    let bad = |reason: String| (Problem::BadSpacing, reason);
    let number = |cell: String| match cell.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err(bad(format!("spacing `{cell}` is not a positive number of mm"))),
    };
    match (across, down) {
        (None, None) => Ok(None),
        (Some(across), Some(down)) => Ok(Some([number(across)?, number(down)?])),
        _ => Err(bad("only one of `spacing_x_mm` and `spacing_y_mm` is given".to_owned())),
    }
}

/// The mask's path relative to the data root, and its class folder.
fn mask_of(text: &str) -> Result<(PathBuf, String), RowProblem> {
    let bad = |what: &str| Err((Problem::BadPath, format!("mask path `{text}` {what}")));
    let mut parts = Vec::new();
    for part in Path::new(text).components() {
        match part {
            Component::Normal(name) => parts.push(name),
            Component::CurDir => {}
            _ => return bad("leaves the data root"),
        }
    }
    let Some((_, folders)) = parts.split_last() else { return bad("has no class folder") };
    let Some(class) = folders.first().filter(|name| !is_mask_folder(&name.to_string_lossy())) else {
        return bad("has no class folder");
    };
    if !folders.iter().any(|name| is_mask_folder(&name.to_string_lossy())) {
        return bad("has no `*_masks` folder");
    }
    Ok((parts.iter().collect(), class.to_string_lossy().into_owned()))
}

fn is_mask_folder(name: &str) -> bool {
    name == "masks" || name.ends_with("_masks")
}

fn image_folder(part: Component<'_>) -> PathBuf {
    let name = part.as_os_str().to_string_lossy();
    if is_mask_folder(&name) {
        PathBuf::from(format!("{}images", &name[..name.len() - "masks".len()]))
    } else {
        PathBuf::from(part.as_os_str())
    }
}

/// The images of a folder by stem; empty if the folder does not exist.
fn images(folder: &Path) -> Result<HashMap<String, Vec<String>>> {
    let mut names: HashMap<String, Vec<String>> = HashMap::new();
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(names),
        Err(error) => return Err(Error::io(folder, "read")(error)),
    };
    for entry in entries {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        if let (true, Some(stem), Some(name)) = (is_image(&path), path.file_stem(), path.file_name()) {
            let name = name.to_string_lossy().into_owned();
            names.entry(stem.to_string_lossy().into_owned()).or_default().push(name);
        }
    }
    Ok(names)
}
