//! DICOM images: one file, a folder of files, or a zip of them.
//!
//! Source: DICOM PS3.3 (image modules), PS3.5 (encoding); dicom-rs parses and decodes. Transfer syntaxes that can be read
//! are listed in `syntax.rs`. Not read: modality lookup tables, floating-point pixels, segmented palettes, videos.
//! Graphic overlays (groups 60xx) are ignored.

mod archive;
mod assemble;
mod copies;
mod encoding;
mod header;
mod numbers;
mod object;
mod pixels;
pub mod seg;
pub(crate) mod segments;
mod series;
mod structure;
mod syntax;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use dicom_dictionary_std::tags;

pub(crate) use archive::is_zip;
pub use structure::is_dicom;

use super::limits::MAX_FILE;
use super::path::{first_bytes, first_names, has_extension, number_of};
use super::source::Uid;
use super::voxels::Volume;
use archive::Container;
use header::Header;
use object::parse;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use series::Entry;

/// Reads a series, or an image. `selected` chooses a series of a folder or zip, or is the number of a frame of a file.
///
/// # Errors
/// [`Error::Data`] with what is wrong and what to do; [`Error::Io`].
pub(crate) fn open(path: &Path, selected: Option<&str>) -> Result<Volume> {
    let mut container = Container::open(path)?;
    let is_group = container.is_group();
    let mut others = Vec::new();
    let mut entries = Vec::new();
    for index in 0..container.len() {
        let (name, bytes) = container.read(index)?;
        if !is_dicom(&bytes) && is_group {
            check_name(&name)?;
            others.push(short_name(path, &name));
            continue;
        }
        let (object, encoding) = parse(&name, &bytes, true)?;
        match Header::read(&name, &object)? {
            Some(header) => entries.push(Entry { index, short: short_name(path, &name), name, header, encoding }),
            None => others.push(short_name(path, &name)),
        }
    }
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
    let mut encodings: BTreeMap<&str, usize> = BTreeMap::new();
    for note in entries.iter().filter_map(|entry| entry.encoding) {
        *encodings.entry(note).or_default() += 1;
    }
    layout
        .notes
        .extend(encodings.into_iter().map(|(note, count)| format!("{count} of {} files: {note}", entries.len())));
    let instances: BTreeSet<&str> = entries.iter().map(|entry| entry.header.instance.as_str()).collect();
    if instances.len() < entries.len() {
        let note = "several files have the same SOPInstanceUID, a fault of their de-identification: the frames of a DICOM \
                    SEG of this series have positions, but cannot refer to single slices";
        layout.notes.push(note.to_owned());
    }
    assemble::assemble(path, &mut container, &entries, layout)
}

/// The series of a DICOM file; `None` for other files, and for one that cannot be read or names no series.
pub fn series_of(path: &Path) -> Option<Uid> {
    let mut start = [0; 132];
    let count = first_bytes(path, &mut start).ok()?;
    if !is_dicom(&start[..count]) {
        return None;
    }
    let bytes = files::read(path, MAX_FILE).ok()?;
    let (object, _) = parse(path, &bytes, true).ok()?;
    numbers::text(&object, tags::SERIES_INSTANCE_UID).filter(|uid| !uid.is_empty()).map(Uid)
}

/// The name of a file below a folder or zip, or without folders.
fn short_name(path: &Path, name: &Path) -> String {
    let below = name.strip_prefix(path).ok().filter(|below| !below.as_os_str().is_empty());
    below.map_or_else(|| name.file_name().unwrap_or_default(), Path::as_os_str).to_string_lossy().into_owned()
}

/// Refuses a file that is no DICOM file by its content, and one by its name. Hidden files are notes of other programs.
fn check_name(name: &Path) -> Result<()> {
    if files::is_hidden(name) || !(has_extension(name, "dcm") || has_extension(name, "ima")) {
        return Ok(());
    }
    let hint = "copy the file again, or remove it if it is no image";
    Err(Error::data(name, "it is named as a DICOM file, but its content does not begin like one", hint))
}
