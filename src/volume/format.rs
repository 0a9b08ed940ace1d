//! Formats of volumes that cannot be read, by the first bytes of a file or by its name.

use std::path::Path;

use super::path::has_extension;
use prsmed_base::error::Error;

/// A format of volumes that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherFormat {
    /// What the file is.
    name: &'static str,
    /// An example of a conversion to NIfTI.
    conversion: &'static str,
    /// Only the name of the file says it.
    is_by_name: bool,
}

const SIMPLE_ITK: &str =
    "3D Slicer, or in Python `SimpleITK.WriteImage(SimpleITK.ReadImage(\"FILE\"), \"FILE.nii.gz\")`";

const fn format(name: &'static str, conversion: &'static str) -> OtherFormat {
    OtherFormat { name, conversion, is_by_name: false }
}

const NRRD: OtherFormat = format("an NRRD file", SIMPLE_ITK);
const META_IMAGE: OtherFormat = format("a MetaImage file (`.mha`, `.mhd`)", SIMPLE_ITK);
const MGH: OtherFormat = format(
    "an MGH file of FreeSurfer (`.mgh`, `.mgz`)",
    "`mri_convert FILE FILE.nii.gz`, or in Python `nibabel.save(nibabel.load(\"FILE\"), \"FILE.nii.gz\")`",
);
const MINC: OtherFormat = format("a MINC file", "`mnc2nii FILE FILE.nii`");
const HDF5: OtherFormat = format("an HDF5 file, as MINC 2 is", "`mnc2nii FILE FILE.nii` for MINC");
const NETCDF: OtherFormat = format("a netCDF file, as MINC 1 is", "`mnc2nii FILE FILE.nii` for MINC");
const AFNI: OtherFormat = format("an AFNI file", "`3dAFNItoNIFTI FILE`");
pub(crate) const ANALYZE: OtherFormat = format(
    "an Analyze 7.5 file, or a NIfTI file with a damaged header",
    "nibabel: `nibabel.save(nibabel.load(\"FILE\"), \"FILE.nii.gz\")`; check left and right, which Analyze does not \
     store",
);

/// The format of a file that cannot be read; `None` for all others. `start` are its first bytes, decompressed or not.
pub(crate) fn other_format(path: &Path, start: &[u8]) -> Option<OtherFormat> {
    let is_text = |key: &str| {
        let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
        std::str::from_utf8(line).is_ok_and(|line| line.split('=').next().is_some_and(|word| word.trim() == key))
    };
    if start.starts_with(b"NRRD0") {
        return Some(NRRD);
    }
    if ["ObjectType", "NDims"].into_iter().any(is_text) {
        return Some(META_IMAGE);
    }
    let has = |extensions: &[&str]| extensions.iter().any(|extension| has_extension(path, extension));
    let is_minc = has(&["mnc"]);
    if start.starts_with(b"\x89HDF\r\n\x1a\n") {
        return Some(if is_minc { MINC } else { HDF5 });
    }
    if start.starts_with(b"CDF\x01") || start.starts_with(b"CDF\x02") {
        return Some(if is_minc { MINC } else { NETCDF });
    }
    if is_mgh(start) {
        return Some(MGH);
    }
    if image::guess_format(start).is_ok() {
        return None;
    }
    let by_name: [(&[&str], OtherFormat); 5] = [
        (&["nrrd", "nhdr"], NRRD),
        (&["mha", "mhd"], META_IMAGE),
        (&["mgh", "mgz"], MGH),
        (&["mnc"], MINC),
        (&["brik"], AFNI),
    ];
    let (_, format) = by_name.into_iter().find(|(extensions, _)| has(extensions))?;
    Some(OtherFormat { is_by_name: true, ..format })
}

/// Version 1, four sides and a type of voxels, all in 32 bits.
fn is_mgh(start: &[u8]) -> bool {
    let (numbers, _) = start.as_chunks::<4>();
    let Some([version, sides @ .., kind]) = numbers.first_chunk::<6>().map(|all| all.map(i32::from_be_bytes)) else {
        return false;
    };
    version == 1 && sides.iter().all(|side| (1..=0xffff).contains(side)) && (0..=10).contains(&kind)
}

impl OtherFormat {
    /// The error of a file in this format.
    pub(crate) fn error(self, path: &Path) -> Error {
        let hint = format!("convert it to NIfTI (`.nii.gz`), for example with {}", self.conversion);
        let by_name = if self.is_by_name { "by its name " } else { "" };
        Error::data(path, format!("{by_name}it is {}, which cannot be read", self.name), hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_formats_are_known_by_their_content_or_their_name() {
        for (name, start, expected) in [
            ("a", &b"NRRD0004\n# x\n"[..], Some(NRRD)),
            ("a.png", b"NRRD0001\n", Some(NRRD)),
            ("a.NHDR", b"", Some(NRRD)),
            ("a", b"ObjectType = Image\nNDims = 3\n", Some(META_IMAGE)),
            ("a", b"NDims=3\n", Some(META_IMAGE)),
            ("a.mhd", b"Comment = x\n", Some(META_IMAGE)),
            ("a.mnc", b"\x89HDF\r\n\x1a\n\0", Some(MINC)),
            ("a.h5", b"\x89HDF\r\n\x1a\n\0", Some(HDF5)),
            ("a.mnc", b"CDF\x01\0\0", Some(MINC)),
            ("a", b"CDF\x02\0\0", Some(NETCDF)),
            ("a.mgz", b"\x1f\x8b\x08", Some(MGH)),
            ("a", b"\0\0\0\x01\0\0\0\x04\0\0\0\x05\0\0\0\x06\0\0\0\x01\0\0\0\x03", Some(MGH)),
            // a video
            ("a", b"\0\0\0\x01\x67\x42\0\x0a\0\0\0\x06\0\0\0\x01\0\0\0\x03", None),
            ("a.nrrd", b"\x89PNG\r\n\x1a\n", None),
            ("a+orig.BRIK", b"", Some(AFNI)),
            ("a.png", b"\x89PNG\r\n\x1a\n", None),
            ("a.nii", b"\x5c\x01\0\0", None),
            ("a.nii.gz", b"\x1f\x8b\x08", None),
            ("a.txt", b"NDimsions = 3\n", None),
        ] {
            let found = other_format(Path::new(name), start).map(|format| format.name);
            assert_eq!(found, expected.map(|format| format.name), "{name}");
        }
        let by_name = other_format(Path::new("a.nrrd"), b"").expect("a format").error(Path::new("a.nrrd"));
        assert!(by_name.to_string().contains("by its name it is an NRRD file"), "{by_name}");
        let error = NRRD.error(Path::new("a.nrrd"));
        assert!(error.to_string().contains("NRRD") && error.hint().contains("convert it to NIfTI"), "{error}");
    }
}
