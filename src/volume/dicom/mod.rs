//! DICOM images: one file, a folder of files, or a zip of them.
//!
//! Source: DICOM PS3.3 (image modules), PS3.5 (encoding); dicom-rs parses and decodes. Transfer syntaxes that can be read
//! are listed in `syntax.rs`. Not read: modality lookup tables, floating-point pixels, segmented palettes, videos.
//! Graphic overlays (groups 60xx) are ignored.

mod archive;
mod assemble;
mod choice;
mod copies;
mod derived;
mod element;
mod encoding;
mod header;
mod listing;
mod numbers;
mod object;
mod pixels;
mod rtstruct;
pub mod seg;
pub(crate) mod segments;
mod series;
mod structure;
mod syntax;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use dicom_dictionary_std::tags;

pub(crate) use archive::is_zip;
pub use choice::{RULE_FORMS, SERIES_HEAD, SeriesRow};
pub use listing::{MasksHeader, list as list_series, masks_header, usable as usable_series};
pub use series::SEVERAL_FIT;
pub use structure::is_dicom;

use super::format::DICOM;
use super::limits::MAX_FILE;
use super::path::{first_names, has_ending, number_of, start_of};
use super::source::Uid;
use super::voxels::Volume;
use archive::Container;
use header::DicomHeader;
use object::{HeaderObject, cut_in_header};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use series::SeriesFile;

/// Reads a series, or an image. `selected` chooses a series of a folder or zip, or is the number of a frame of a file.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do; [`Error::Io`].
pub(crate) fn open(path: &Path, selected: Option<&str>) -> Result<Volume> {
    let mut container = Container::open(path)?;
    let is_group = container.is_group();
    let mut others = Vec::new();
    let mut entries = Vec::new();
    // what may be one of the images, if their names or their class tell so
    let (mut unlike, mut without_image) = (Vec::new(), Vec::new());
    for index in 0..container.len() {
        let (name, bytes) = container.read(index)?;
        if !is_dicom(&bytes) && is_group {
            check_name(&name)?;
            others.push(short_name(path, &name));
            unlike.push(name);
            continue;
        }
        let file = HeaderObject::parse(&name, &bytes)?;
        file.check_whole(&name)?;
        if let Some(header) = DicomHeader::read(&name, &file.object)? {
            let short = short_name(path, &name);
            entries.push(SeriesFile { index, short, name, header, encoding: file.encoding });
        } else {
            others.push(short_name(path, &name));
            without_image.extend(file.class_without_image().map(|class| (class, name)));
        }
    }
    refuse_cut(&entries, &unlike, &without_image)?;
    if entries.is_empty() {
        let mut reason =
            if is_group { "it has no DICOM images" } else { "it is a DICOM file without an image" }.to_owned();
        if let Some(first) = others.first().filter(|_| is_group) {
            reason = format!("{reason} among its files ({}, the first is `{first}`)", others.len());
        }
        let hint = "give an image, a folder or zip with the images of one series, or a NIfTI file itself";
        return Err(Error::data(path, reason, hint));
    }
    let mut notes = Vec::new();
    if is_group {
        entries = series::choose(path, entries, selected, &mut notes)?;
        entries = copies::left_out(&mut container, entries, &mut notes)?;
    }
    let frame = if is_group { None } else { number_of(path, selected)? };
    let mut layout = series::arrange(path, &entries, frame)?;
    layout.notes.splice(0..0, notes);
    if !others.is_empty() {
        let (count, names) = (others.len(), first_names(&others));
        layout.notes.push(format!("{count} files that are not images of this kind were skipped: {names}"));
    }
    layout.notes.extend(notes_of_files(&entries));
    assemble::assemble(path, &mut container, &entries, layout)
}

/// How the files were read, if not as their headers say, and whether several have one UID.
fn notes_of_files(entries: &[SeriesFile]) -> Vec<String> {
    let mut encodings: BTreeMap<&str, usize> = BTreeMap::new();
    for note in entries.iter().filter_map(|entry| entry.encoding) {
        *encodings.entry(note).or_default() += 1;
    }
    let encodings = encodings.into_iter().map(|(note, count)| format!("{count} of {} files: {note}", entries.len()));
    let mut notes: Vec<String> = encodings.collect();
    let instances: BTreeSet<&str> = entries.iter().map(|entry| entry.header.instance.as_str()).collect();
    if instances.len() < entries.len() {
        let note = "several files have the same SOPInstanceUID, a fault of their de-identification: the frames of a DICOM \
                    SEG of this series have positions, but cannot refer to single slices";
        notes.push(note.to_owned());
    }
    notes
}

/// The series of a DICOM file; `None` for other files, and for one that cannot be read or names no series.
pub fn series_of(path: &Path) -> Option<Uid> {
    if !is_dicom(&start_of(path).ok()?) {
        return None;
    }
    let bytes = files::read(path, MAX_FILE).ok()?;
    let HeaderObject { object, .. } = HeaderObject::parse(path, &bytes).ok()?;
    numbers::text(&object, tags::SERIES_INSTANCE_UID).filter(|uid| !uid.is_empty()).map(Uid)
}

/// Ending of the names of RTSTRUCT that are written; other DICOM files with masks are SEG.
pub(crate) const RTSTRUCT_ENDING: &str = "rtstruct.dcm";

/// Refuses a volume that is no DICOM series with positions, whose masks cannot be written as SEG or RTSTRUCT.
pub(crate) fn check_written(path: &Path, volume: &Volume) -> Result<()> {
    if has_ending(path, &[RTSTRUCT_ENDING]) {
        return rtstruct::check(path, volume).map(drop);
    }
    seg::SEG.check(path, volume).map(drop)
}

/// The bytes of a SEG, or of an RTSTRUCT for a name with its ending.
pub(crate) fn encoded(path: &Path, segments: &[seg::SegmentMask], volume: &Volume) -> Result<Vec<u8>> {
    let encode = if has_ending(path, &[RTSTRUCT_ENDING]) { rtstruct::encoded } else { seg::encoded };
    encode(path, segments, volume)
}

/// The name of a file below a folder or zip, or without folders.
fn short_name(path: &Path, name: &Path) -> String {
    let below = name.strip_prefix(path).ok().filter(|below| !below.as_os_str().is_empty());
    below.map_or_else(|| name.file_name().unwrap_or_default(), Path::as_os_str).to_string_lossy().into_owned()
}

/// Refuses files that belong to the images but are none: files with their names that do not begin as DICOM files, and files
/// with their class, which is a private one.
fn refuse_cut(entries: &[SeriesFile], unlike: &[PathBuf], without_image: &[(String, PathBuf)]) -> Result<()> {
    let names: BTreeSet<_> = entries.iter().map(|entry| unnumbered(&entry.name)).collect();
    if let Some(name) = unlike.iter().find(|name| !files::is_hidden(name) && names.contains(&unnumbered(name))) {
        let reason = "it is named like the DICOM images beside it, but its content does not begin like one";
        return Err(Error::data(name, reason, "copy the file again, or remove it if it is no image"));
    }
    let is_of = |class: &str| entries.iter().any(|entry| entry.header.class == class);
    without_image.iter().find(|(class, _)| is_of(class)).map_or(Ok(()), |(_, name)| Err(cut_in_header(name)))
}

/// The folder and the name of a file without digits and dots.
fn unnumbered(name: &Path) -> (Option<&Path>, String) {
    let text = name.file_name().unwrap_or_default().to_string_lossy();
    (name.parent(), text.chars().filter(|c| !c.is_ascii_digit() && *c != '.').collect())
}

/// Refuses a file that is no DICOM file by its content, and one by its name. Hidden files are notes of other programs.
fn check_name(name: &Path) -> Result<()> {
    if files::is_hidden(name) || !DICOM.has_ending(name) {
        return Ok(());
    }
    let hint = "copy the file again, or remove it if it is no image";
    Err(Error::data(name, "it is named as a DICOM file, but its content does not begin like one", hint))
}
