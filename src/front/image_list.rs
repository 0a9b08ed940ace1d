//! Which questions about which images are asked: a folder of images, or a table.

use super::check_question;
use super::image_files::ImageFiles;
use crate::data::annotation::is_image;
use crate::data::volume::format::{DICOM, image_endings, is_other_image};
use crate::data::volume::sequences::MISSING;
use crate::data::volume::{Sequence, SequenceFile, Uid, dicom, is_volume};
use crate::data::{csv_text, names};
use crate::event::{Event, Observer};
use crate::{Error, Result, files};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// One question about one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageQuestion {
    /// The image file; of several sequences the first one that is not missing.
    pub image: PathBuf,
    /// All its files.
    pub files: ImageFiles,
    /// Its name in the results: relative to the folder of the images or of the table.
    pub name: String,
    /// The question without the prompt template.
    pub question: String,
}

/// The jobs of a folder of images (searched with its subfolders) or of a CSV file with the column `image` and, if the
/// rows have their own, the column `question`. Rows without a question and images of a folder get all `questions`. Jobs
/// about one image follow each other. For a run whose images have `sequences`, a table has a column `image.NAME` for each, with
/// `none` for a sequence that is missing. Notes name volumes and images of other formats that are left out, and slices that
/// are answered one by one.
///
/// # Errors
/// [`Error::Config`] for no images, no question or one that is too long; [`Error::Data`] with the line for a file that does not exist;
/// [`Error::Io`].
pub fn jobs(
    path: &Path,
    questions: &[String],
    sequences: &[Sequence],
    observer: &dyn Observer,
) -> Result<Vec<ImageQuestion>> {
    let listed = listed(path, sequences, observer)?;
    let root = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    if questions.is_empty() && listed.iter().any(|(_, question)| question.is_none()) {
        let reason = "the images have no questions";
        let hint = "add the argument `question=\"Where is the lesion?\"`, or a column `question`";
        return Err(Error::argument("question", reason, hint));
    }
    let images: BTreeSet<&Path> = listed.iter().flat_map(|(image, _)| image.paths()).collect();
    if let Some(note) = series_note(&images) {
        observer.on(&Event::Note(note));
    }
    // images in their order, each with all its questions
    let mut place_of: BTreeMap<&ImageFiles, usize> = BTreeMap::new();
    let mut asked: Vec<(&ImageFiles, Vec<&String>)> = Vec::new();
    for (image, own) in &listed {
        let place = *place_of.entry(image).or_insert(asked.len());
        if place == asked.len() {
            asked.push((image, Vec::new()));
        }
        let known = &mut asked[place].1;
        for question in own.as_ref().map_or(questions, std::slice::from_ref) {
            if !known.contains(&question) {
                known.push(question);
            }
        }
    }
    let mut jobs = Vec::new();
    for (files, questions) in asked {
        let image = files.first();
        let name = image.strip_prefix(root).unwrap_or(image).to_string_lossy().into_owned();
        let job = |question: &String| ImageQuestion {
            image: image.to_owned(),
            files: files.clone(),
            name: name.clone(),
            question: question.clone(),
        };
        jobs.extend(questions.into_iter().map(job));
    }
    jobs.iter().try_for_each(|job| check_question(&job.question))?;
    Ok(jobs)
}

/// The images of a folder or a table, with the questions of the table.
fn listed(path: &Path, sequences: &[Sequence], observer: &dyn Observer) -> Result<Vec<ListedImage>> {
    if !path.is_dir() {
        return read_table(path, sequences);
    }
    if !sequences.is_empty() {
        let reason = "a folder does not say which of its files are the sequences of one image";
        return Err(Error::argument("images", reason, columns_hint(sequences)));
    }
    let mut found = Vec::new();
    let dicom = DICOM.endings[0];
    let is_dicom = |file: &Path| file.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(dicom));
    search(path, &mut |file| found.extend((is_image(&file) || is_dicom(&file)).then_some(file)))?;
    found.sort();
    let notes = left_out(path, &found)?;
    if found.is_empty() {
        let endings = image_endings().chain([dicom]).collect::<Vec<_>>().join(", .");
        let endings = format!("`{}` has no file that ends in .{endings}", path.display());
        let reason = [vec![endings], notes].concat().join("; ");
        return Err(Error::argument("images", reason, "name a folder of images, or a CSV file with a column `image`"));
    }
    for note in notes {
        observer.on(&Event::Note(note));
    }
    Ok(found.into_iter().map(|image| (ImageFiles::One(image), None)).collect())
}

/// The folder of images, or the folder of a table of images.
pub fn root_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() { path } else { parent }
}

/// Calls `found` for each file below a folder that is not hidden.
pub(super) fn search(folder: &Path, found: &mut dyn FnMut(PathBuf)) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let path = entry.map_err(Error::io(folder, "list"))?.path();
        if files::is_hidden(&path) {
            continue;
        }
        if path.is_dir() {
            search(&path, found)?;
        } else {
            found(path);
        }
    }
    Ok(())
}

/// Ending of a list of files: their first names.
fn first_names(files: &[&Path]) -> String {
    let names = files.iter().take(3).map(|file| format!("`{}`", file.display())).collect::<Vec<_>>().join(", ");
    if files.len() > 3 { format!("{names} and {} more", files.len() - 3) } else { names }
}

/// Notes about the volumes and the images of other formats below `folder`, which are not answered.
fn left_out(folder: &Path, images: &[PathBuf]) -> Result<Vec<String>> {
    let (mut volumes, mut others) = (Vec::new(), Vec::new());
    search(folder, &mut |file| {
        if images.binary_search(&file).is_err() {
            if matches!(is_volume(&file), Ok(true)) {
                volumes.push(file);
            } else if is_other_image(&file) {
                others.push(file);
            }
        }
    })?;
    let note = |what: &str, mut files: Vec<PathBuf>, remedy: &str| {
        files.sort();
        let files: Vec<&Path> = files.iter().map(|file| file.strip_prefix(folder).unwrap_or(file)).collect();
        let names = first_names(&files);
        (!files.is_empty()).then(|| format!("{what} are left out ({}): {names}; {remedy}", files.len()))
    };
    let volumes =
        note("files that may be volumes", volumes, "segment a volume with the arguments `image=FILE out=mask.nii.gz`");
    let others = note("images of formats that cannot be read", others, "convert them to PNG");
    Ok(volumes.into_iter().chain(others).collect())
}

/// A note about DICOM files of one series, which may be the slices of a volume.
fn series_note(images: &BTreeSet<&Path>) -> Option<String> {
    let mut series: BTreeMap<Uid, Vec<&Path>> = BTreeMap::new();
    for &image in images {
        if let Some(uid) = dicom::series_of(image) {
            series.entry(uid).or_default().push(image);
        }
    }
    let mut several: Vec<Vec<&Path>> = series.into_values().filter(|files| files.len() > 1).collect();
    several.sort();
    let files = several.concat();
    let num_series = match several.len() {
        0 => return None,
        1 => "one series".to_owned(),
        number => format!("{number} series"),
    };
    Some(format!(
        "{} DICOM files belong to {num_series} and are answered as images of their own: {}; if they are the slices of a \
         volume, segment it with the arguments `image=FOLDER out=mask.nii.gz`",
        files.len(),
        first_names(&files)
    ))
}

/// The files of an image, with the question of the table.
type ListedImage = (ImageFiles, Option<String>);

/// Which columns a table for a run with sequences has.
fn columns_hint(sequences: &[Sequence]) -> String {
    let columns: Vec<String> = sequences.iter().map(|sequence| format!("`image.{}`", sequence.name)).collect();
    format!(
        "the images of this run have several sequences: give a CSV file with the columns {}, and `none` where one is missing",
        columns.join(", ")
    )
}

/// Images of a table, with their questions.
fn read_table(path: &Path, sequences: &[Sequence]) -> Result<Vec<ListedImage>> {
    let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
    let bytes = csv_text::utf8(path, bytes)?;
    let separator = csv_text::separator(&bytes, &["image", "question"]);
    let mut reader = csv::ReaderBuilder::new().flexible(false).delimiter(separator).from_reader(bytes.as_slice());
    let damaged = |error: csv::Error| csv_text::error(path, &bytes, &error, "write a CSV file with a header line");
    let header = reader.headers().map_err(damaged)?.clone();
    let column = |name: &str| csv_text::column(path, header.as_byte_record(), name);
    let mut images = Vec::new();
    let named = sequences.iter().map(|sequence| format!("image.{}", sequence.name));
    for name in named.chain(sequences.is_empty().then(|| "image".to_owned())) {
        let Some(index) = column(&name)? else {
            let all = header.iter().collect::<Vec<_>>().join(", ");
            let reason = format!("has no column `{name}`; its columns are: {all}");
            let hint = "name the column of image files `image`, that of questions `question`";
            let hint = if sequences.is_empty() { hint.to_owned() } else { columns_hint(sequences) };
            return Err(Error::data(path, reason, hint));
        };
        images.push((name, index));
    }
    let question = column("question")?;
    let root = path.parent().unwrap_or(Path::new(""));
    let mut rows = Vec::new();
    let mut by_first: BTreeMap<PathBuf, ImageFiles> = BTreeMap::new();
    let mut lines = csv_text::Lines::new(&bytes);
    for record in reader.records() {
        let record = record.map_err(damaged)?;
        let line = lines.at(record.position());
        let file_of = |(column, index): &(String, usize)| {
            let cell = record.get(*index).unwrap_or_default().trim();
            if !sequences.is_empty() && cell.eq_ignore_ascii_case(MISSING) {
                return Ok(None);
            }
            let file = root.join(cell);
            if !file.is_file() {
                let similar = names::similar(&file).map_or_else(String::new, |similar| format!("; {similar}"));
                let reason = format!("there is no file `{}`{similar}", file.display());
                let missing = if sequences.is_empty() { "" } else { ", and `none` is a sequence that is missing" };
                let hint = format!("correct the column `{column}`: paths are relative to the CSV file{missing}");
                return Err(Error::data_line(path, line, reason, hint));
            }
            Ok(Some(file))
        };
        let found = images.iter().map(file_of).collect::<Result<Vec<_>>>()?;
        let file = files_of(found, sequences)
            .map_err(|error| Error::data_line(path, line, error.to_string(), error.hint()))?;
        if *by_first.entry(file.first().to_owned()).or_insert_with(|| file.clone()) != file {
            let reason = format!("`{}` has other sequences in an earlier line", file.first().display());
            return Err(Error::data_line(path, line, reason, "write the same in all lines of an image"));
        }
        let own = question.and_then(|column| record.get(column)).map(str::trim).filter(|text| !text.is_empty());
        rows.push((file, own.map(str::to_owned)));
    }
    if rows.is_empty() {
        return Err(Error::data(path, "has no rows", "add one row for each image"));
    }
    Ok(rows)
}

/// The files of a line of a table.
fn files_of(mut found: Vec<Option<PathBuf>>, sequences: &[Sequence]) -> Result<ImageFiles> {
    if sequences.is_empty() {
        return Ok(ImageFiles::One(found.pop().flatten().unwrap_or_default()));
    }
    let named = sequences.iter().zip(found).map(|(sequence, path)| SequenceFile { name: sequence.name.clone(), path });
    ImageFiles::of_sequences(named.collect())
}
