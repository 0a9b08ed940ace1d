//! The series of a folder or zip, from the headers of its files.

use std::io::Read as _;
use std::path::Path;

use dicom_dictionary_std::{tags, uids};

use super::super::label_map::LabelNames;
use super::super::limits::MAX_FILE;
use super::super::source::Uid;
use super::archive::Container;
use super::choice::{self, SeriesRow};
use super::header::DicomHeader;
use super::numbers::{self, items, series_uids};
use super::object::{HeaderObject, read_until};
use super::rtstruct::{self, RTSTRUCT};
use super::seg::SEG;
use super::segments;
use super::series::{self, SeriesFile};
use super::structure::is_dicom;
use prsmed_base::error::Result;
use prsmed_base::files;
use prsmed_base::panics::guard_file;

/// The series of a folder or zip of DICOM files, ordered by their numbers. Files that are no images are left out, and pixels are
/// not read.
///
/// # Errors
/// [`Error::Data`](prsmed_base::Error::Data) for a damaged header; [`Error::Io`](prsmed_base::Error::Io).
pub fn list(path: &Path) -> Result<Vec<SeriesRow>> {
    guard_file(path, "copy the files again, or export the series again from the archive", || {
        let mut container = Container::open(path)?;
        let mut entries = Vec::new();
        for index in 0..container.len() {
            entries.extend(entry(&mut container, index)?);
        }
        Ok(series::by_series(entries).iter().map(|entries| series::row(entries)).collect())
    })
}

fn entry(container: &mut Container, index: usize) -> Result<Option<SeriesFile>> {
    let of_start = container.file(index).and_then(|path| Some((path.to_owned(), HeaderObject::start_of(path)?)));
    let (name, object) = if let Some(found) = of_start {
        found
    } else {
        let (name, bytes) = container.read(index)?;
        if !is_dicom(&bytes) {
            return Ok(None);
        }
        let object = HeaderObject::parse(&name, &bytes)?.object;
        (name, object)
    };
    let header = DicomHeader::read(&name, &object)?;
    Ok(header.map(|header| SeriesFile { index, short: String::new(), name, header, encoding: None }))
}

/// What the header of a DICOM SEG or RTSTRUCT says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MasksHeader {
    /// The series that it was drawn on; empty if it names none.
    pub series: Vec<Uid>,
    /// The names of its labels, as far as they have names.
    pub names: LabelNames,
}

/// The header of a DICOM SEG or RTSTRUCT; `None` for other files, and for one that cannot be read.
pub fn masks_header(path: &Path) -> Option<MasksHeader> {
    /// Bytes of a file of which the first have the class of the object.
    const START: u64 = 4096;
    let mut start = Vec::new();
    files::open(path).and_then(|file| file.take(START).read_to_end(&mut start)).ok()?;
    let classes = [RTSTRUCT.class, SEG.class, uids::LABEL_MAP_SEGMENTATION_STORAGE];
    let has = |class: &&str| start.windows(class.len()).any(|part| part == class.as_bytes());
    if !is_dicom(&start) || !classes.iter().any(has) {
        return None;
    }
    // contours and positions of frames are behind it
    let object = read_until(tags::ROI_CONTOUR_SEQUENCE, path).or_else(|| {
        let bytes = files::read(path, MAX_FILE).ok()?;
        rtstruct::check_count(path, &bytes).ok()?;
        Some(HeaderObject::parse(path, &bytes).ok()?.object)
    })?;
    let class = numbers::text(&object, tags::SOP_CLASS_UID)?;
    let (uids, names) = if class == RTSTRUCT.class {
        (rtstruct::series(&object), rtstruct::names(&object))
    } else if classes.contains(&class.as_str()) {
        (series_uids(items(&object, tags::REFERENCED_SERIES_SEQUENCE)), segments::names(&object))
    } else {
        return None;
    };
    Some(MasksHeader { series: uids.into_iter().map(Uid).collect(), names: LabelNames(names) })
}

/// The numbers of the series of a folder that a preparation uses: those that `rule` names, or all but localizers.
pub fn usable(all: &[SeriesRow], rule: Option<&str>) -> Vec<usize> {
    choice::usable(all, rule)
}
