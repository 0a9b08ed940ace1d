//! Files that occur twice in a series.

use dicom_core::DataElement;
use std::collections::BTreeMap;

use dicom_dictionary_std::tags;

use super::super::grid::{length, subtract};
use super::archive::Container;
use super::object::parse;
use super::series::SeriesFile;
use prsmed_base::error::{Error, Result};

/// Leaves out copies: files with the SOPInstanceUID, the positions and the pixels of another file. Several files with one
/// SOPInstanceUID at different positions are kept; some programs that remove identifiers give one UID to all files.
///
/// # Errors
/// [`Error::Data`] for a file with the SOPInstanceUID and positions of another one, but other pixels.
pub(super) fn left_out(
    container: &mut Container,
    entries: Vec<SeriesFile>,
    notes: &mut Vec<String>,
) -> Result<Vec<SeriesFile>> {
    let mut kept: Vec<SeriesFile> = Vec::with_capacity(entries.len());
    let mut by_uid: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut copies = Vec::new();
    for entry in entries {
        let known = by_uid.entry(entry.header.instance.clone()).or_default();
        let twin = known.iter().map(|index| &kept[*index]).find(|other| have_equal_positions(other, &entry));
        let twin = twin.filter(|_| !entry.header.instance.is_empty());
        let Some(twin) = twin else {
            known.push(kept.len());
            kept.push(entry);
            continue;
        };
        if !are_equal(container, twin, &entry)? {
            let reason = format!(
                "it has the SOPInstanceUID and the position of {}, but its pixels or their description differ",
                twin.short
            );
            return Err(Error::data(&entry.name, reason, "remove the wrong one of the two files"));
        }
        copies.push(format!("{} of {}", entry.short, twin.short));
    }
    if !copies.is_empty() {
        let (count, more) = (copies.len(), if copies.len() > 3 { ", .." } else { "" });
        notes.push(format!("{count} copies of files were left out: {}{more}", copies[..count.min(3)].join(", ")));
    }
    Ok(kept)
}

fn have_equal_positions(a: &SeriesFile, b: &SeriesFile) -> bool {
    let (a, b) = (&a.header.frames, &b.header.frames);
    let is_equal = |a: Option<[f64; 3]>, b: Option<[f64; 3]>| {
        a.is_some() == b.is_some() && a.zip(b).is_none_or(|(a, b)| length(subtract(a, b)) < 1e-3)
    };
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_equal(a.position, b.position))
}

fn are_equal(container: &mut Container, a: &SeriesFile, b: &SeriesFile) -> Result<bool> {
    let (_, of_a) = container.read(a.index)?;
    let (_, of_b) = container.read(b.index)?;
    if of_a == of_b {
        return Ok(true);
    }
    let described = |entry: &SeriesFile| {
        let frames = entry.header.frames.iter().map(|frame| (frame.orientation, frame.spacing, frame.rescale));
        (entry.header.pixels.clone(), entry.header.padding, frames.collect::<Vec<_>>())
    };
    if described(a) != described(b) {
        return Ok(false);
    }
    let (of_a, of_b) = (parse(&a.name, &of_a)?.0, parse(&b.name, &of_b)?.0);
    let (a, b) = (of_a.get(tags::PIXEL_DATA), of_b.get(tags::PIXEL_DATA));
    Ok(a.is_some() && a.map(DataElement::value) == b.map(DataElement::value))
}
