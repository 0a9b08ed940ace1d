//! The series of a folder or zip, from the headers of its files.

use std::io::Read as _;
use std::path::Path;

use dicom_dictionary_std::tags;

use super::super::source::Uid;
use super::archive::Container;
use super::choice::{self, SeriesRow};
use super::header::DicomHeader;
use super::numbers::{self, items, series_uids};
use super::object::{HeaderObject, read_until};
use super::rtstruct::{self, RTSTRUCT};
use super::seg::SEG;
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

/// The series that a DICOM SEG or RTSTRUCT says that it was drawn on; empty if it names none. `None` for other files, and for
/// one that cannot be read.
pub fn drawn_on(path: &Path) -> Option<Vec<Uid>> {
    /// Bytes of a file of which the first have the class of the object.
    const START: u64 = 4096;
    let mut start = Vec::new();
    files::open(path).and_then(|file| file.take(START).read_to_end(&mut start)).ok()?;
    let has = |class: &str| start.windows(class.len()).any(|part| part == class.as_bytes());
    if !is_dicom(&start) || !(has(RTSTRUCT.class) || has(SEG.class)) {
        return None;
    }
    // contours and positions of frames are behind it
    let object = read_until(tags::ROI_CONTOUR_SEQUENCE, path)?;
    let uids = match numbers::text(&object, tags::SOP_CLASS_UID)? {
        class if class == RTSTRUCT.class => rtstruct::series(&object),
        class if class == SEG.class => series_uids(items(&object, tags::REFERENCED_SERIES_SEQUENCE)),
        _ => return None,
    };
    Some(uids.into_iter().map(Uid).collect())
}

/// The numbers of the series of a folder that a preparation uses: those that `rule` names, or all but localizers.
pub fn usable(all: &[SeriesRow], rule: Option<&str>) -> Vec<usize> {
    choice::usable(all, rule)
}
