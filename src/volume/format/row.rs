//! What a file format is: the rows of the table of formats.

use std::path::Path;

use super::super::decode::codec::Codec;
use super::super::dicom::seg::SegmentMask;
use super::super::label_map::LabelMap;
use super::super::nifti::geometry::Geometry;
use super::super::path::has_ending;
use super::super::voxels::Volume;
use prsmed_base::error::{Error, Result};

pub(crate) type Knows = fn(&Path, &[u8]) -> bool;
pub(crate) type Endings = &'static [&'static str];

/// What a path or the user chooses of a file with several volumes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice<'a> {
    /// The text behind `#` in the path.
    pub(crate) selected: Option<&'a str>,
    /// The series of folders and archives whose path has no choice.
    pub(crate) series: Option<&'a str>,
    /// The affine that counts where a NIfTI file has two that differ.
    pub(crate) geometry: Option<Geometry>,
    /// The volume that a label map belongs to, for contours, which have no voxels of their own.
    pub(crate) volume: Option<&'a Volume>,
}

/// How masks are written on the grid of a volume.
#[derive(Clone, Copy)]
pub(crate) struct Writer {
    /// Endings of the names of written files, the usual one first.
    pub(crate) endings: Endings,
    /// The page offers masks in this format.
    pub(crate) is_on_page: bool,
    /// Refuses a volume that the format cannot hold.
    pub(crate) check: fn(&Path, &Volume) -> Result<()>,
    /// The bytes of a file with the segments.
    pub(crate) encode: fn(&Path, &[SegmentMask], &Volume) -> Result<Vec<u8>>,
}

/// A file format.
#[derive(Clone, Copy)]
pub struct Format {
    /// What a file of this format is, in messages: `an NRRD file`.
    pub name: &'static str,
    /// Endings of the names of its files without the first dot, the usual one first.
    pub endings: Endings,
    /// A name with one of the endings is enough, if the content says nothing.
    pub(crate) is_known_by_name: bool,
    /// Whether the first bytes of a file (132, if there are so many) are those of this format.
    pub(crate) knows: Knows,
    /// All files of a folder or archive together are one volume.
    pub is_series: bool,
    /// Whether a file has the voxels of a header in another file.
    pub(crate) has_voxels_only: Option<fn(&Path) -> bool>,
    /// Decodes a flat image.
    pub(crate) image: Option<Codec>,
    /// Reads a volume.
    pub(crate) volume: Option<fn(&Path, &Choice) -> Result<Volume>>,
    /// Reads a label map.
    pub(crate) labels: Option<fn(&Path, &Choice) -> Result<LabelMap>>,
    /// Writes masks.
    pub(crate) write: Option<Writer>,
    /// An example of a conversion of volumes to NIfTI, for a format that cannot be read.
    pub(crate) conversion: Option<&'static str>,
}

/// A format that is never known, for the fields that a row leaves out.
pub(crate) const NO_FORMAT: Format = Format {
    name: "",
    endings: &[],
    is_known_by_name: true,
    knows: |_, _| false,
    is_series: false,
    has_voxels_only: None,
    image: None,
    volume: None,
    labels: None,
    write: None,
    conversion: None,
};

/// A format of volumes that cannot be read.
pub(crate) const fn unreadable(name: &'static str, endings: Endings, knows: Knows, conversion: &'static str) -> Format {
    Format { name, endings, knows, conversion: Some(conversion), ..NO_FORMAT }
}

/// A format of flat images.
pub(crate) const fn flat(name: &'static str, endings: Endings, knows: Knows, image: Codec) -> Format {
    Format { name, endings, knows, image: Some(image), ..NO_FORMAT }
}

/// The error of a volume that cannot be read, with an example of a conversion to NIfTI.
pub(crate) fn refused(path: &Path, reason: &str, conversion: &str) -> Error {
    let hint = format!("convert it to NIfTI (`.nii.gz`), for example with {conversion}");
    Error::data(path, format!("{reason}, which cannot be read"), hint)
}

impl Format {
    /// Whether the first bytes of an image are those of this format.
    pub(crate) fn knows(&self, start: &[u8]) -> bool {
        (self.knows)(Path::new(""), start)
    }

    /// True for a format of volumes that is known by its name, in which annotation programs write masks.
    pub fn is_mask_volume(&self) -> bool {
        self.is_known_by_name && self.is_volume()
    }

    /// True for a name with one of the endings.
    pub fn has_ending(&self, path: &Path) -> bool {
        has_ending(path, self.endings)
    }

    /// True for volumes, also for those that cannot be read.
    pub(crate) fn is_volume(&self) -> bool {
        self.volume.is_some() || self.conversion.is_some()
    }

    /// The error of a file whose volume cannot be read; `None` for other formats.
    pub(crate) fn refusal(&self, path: &Path, is_by_name: bool) -> Option<Error> {
        let by_name = if is_by_name { "by its name " } else { "" };
        Some(refused(path, &format!("{by_name}it is {}", self.name), self.conversion?))
    }
}

/// Whether a file of raw voxels has a header with this ending beside it.
pub(crate) fn has_header(path: &Path, header: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = [".raw", ".raw.gz", ".zraw"].iter().find_map(|ending| name.strip_suffix(ending));
    stem.is_some_and(|stem| path.with_file_name(format!("{stem}.{header}")).is_file())
}
