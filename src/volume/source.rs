//! Where a volume comes from, and the UIDs that a DICOM SEG or RTSTRUCT of it must refer to.

use std::fmt;

use super::nifti::geometry::Forms;

/// A DICOM UID, or the PatientID. It may lead to a patient, so it is never printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid(pub(crate) String);

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Uid(..)")
    }
}

/// Where a volume comes from.
#[derive(Debug, Clone)]
pub enum VolumeSource {
    /// A NIfTI file, with its affines as they are stored.
    Nifti(Forms),
    /// A file of another format, whose position is that of the grid.
    Other,
    /// DICOM files.
    Dicom(Box<References>),
}

/// What a DICOM SEG or RTSTRUCT must refer to. Never printed or serialised.
#[derive(Clone)]
pub struct References {
    pub(crate) study: String,
    pub(crate) series: String,
    /// One for each slice of the volume, in order.
    pub(crate) instances: Vec<Instance>,
}

/// The DICOM instance and frame of a slice.
#[derive(Clone)]
pub(crate) struct Instance {
    pub(crate) uid: String,
    pub(crate) class: String,
    /// From 1; `None` for a file with one frame.
    pub(crate) frame: Option<u32>,
}

impl fmt::Debug for References {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "References({} slices)", self.instances.len())
    }
}
