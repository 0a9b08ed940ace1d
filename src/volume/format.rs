//! File formats: each is a row of [`FORMATS`], which says how its files are known, read and written.
//!
//! The content of a file decides, and its name only where the content says nothing. A format that cannot be read is a row
//! without functions, so that its files are refused with a remedy. A new format is a file of its own and one row.

use std::path::Path;

use super::decode::{self, Codec};
use super::dicom::{self, seg, segments};
use super::labels::LabelMap;
use super::nifti::{self, geometry::Geometry};
use super::path::{number_of, start_of};
use super::voxels::Volume;
use super::write;
use crate::dicom::seg::Segment;
use prsmed_base::error::{Error, Result};

/// What a path or the user chooses of a file with several volumes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice<'a> {
    /// The text behind `#` in the path.
    pub(crate) selected: Option<&'a str>,
    /// The series of folders and archives whose path has no choice.
    pub(crate) series: Option<&'a str>,
    /// The affine that counts where a NIfTI file has two that differ.
    pub(crate) geometry: Option<Geometry>,
}

/// How masks are written on the grid of a volume.
#[derive(Clone, Copy)]
pub(crate) struct Writer {
    /// Endings of the names of written files, the usual one first.
    pub(crate) endings: &'static [&'static str],
    /// Refuses a volume that the format cannot hold.
    pub(crate) check: fn(&Path, &Volume) -> Result<()>,
    /// The bytes of a file with the segments.
    pub(crate) encode: fn(&Path, &[Segment], &Volume) -> Result<Vec<u8>>,
}

/// A file format.
#[derive(Clone, Copy)]
pub struct Format {
    /// What a file of this format is, in messages: `an NRRD file`.
    pub name: &'static str,
    /// Endings of the names of its files without the first dot, the usual one first.
    pub endings: &'static [&'static str],
    /// A name with one of the endings is enough, if the content says nothing.
    is_known_by_name: bool,
    /// Whether the first bytes of a file (132, if there are so many) are those of this format.
    knows: fn(&Path, &[u8]) -> bool,
    /// All files of a folder or archive together are one volume.
    pub is_series: bool,
    /// Whether a file has the voxels of a header in another file.
    has_voxels_only: Option<fn(&Path) -> bool>,
    /// Decodes a flat image.
    pub(crate) image: Option<Codec>,
    /// Reads a volume.
    pub(crate) volume: Option<fn(&Path, &Choice) -> Result<Volume>>,
    /// Reads a label map.
    pub(crate) labels: Option<fn(&Path, &Choice) -> Result<LabelMap>>,
    /// Writes masks.
    pub(crate) write: Option<Writer>,
    /// An example of a conversion of volumes to NIfTI, for a format that cannot be read.
    conversion: Option<&'static str>,
}

const NO_FORMAT: Format = Format {
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

const NIFTI: Format = Format {
    name: "a NIfTI file",
    // not `hdr`, which other programs use too
    endings: &["nii.gz", "nii", "img", "img.gz", "hdr.gz"],
    knows: |_, start| nifti::is_nifti(start),
    has_voxels_only: Some(nifti::is_voxels_of_pair),
    volume: Some(|path, choice| nifti::open(path, number_of(path, choice.selected)?, choice.geometry)),
    labels: Some(|path, choice| nifti::open_labels(path, number_of(path, choice.selected)?, choice.geometry)),
    write: Some(Writer { endings: &["nii.gz", "nii"], check: write::check_nifti, encode: write::encode_nifti }),
    ..NO_FORMAT
};

/// DICOM images, segmentations and other objects.
pub const DICOM: Format = Format {
    name: "a DICOM file",
    endings: &["dcm", "ima"],
    is_known_by_name: false,
    knows: |_, start| dicom::is_dicom(start),
    is_series: true,
    volume: Some(|path, choice| dicom::open(path, choice.selected)),
    labels: Some(|path, _| segments::read(path)),
    write: Some(Writer {
        endings: &["dcm"],
        check: |path, volume| seg::check(path, volume).map(drop),
        encode: seg::encoded,
    }),
    ..NO_FORMAT
};

const ZIP_OF_DICOM: Format = Format {
    name: "a zip file",
    endings: &["zip"],
    is_known_by_name: false,
    knows: |_, start| dicom::is_zip(start),
    is_series: true,
    volume: Some(|path, choice| dicom::open(path, choice.selected.or(choice.series))),
    ..NO_FORMAT
};

const SIMPLE_ITK: &str =
    "3D Slicer, or in Python `SimpleITK.WriteImage(SimpleITK.ReadImage(\"FILE\"), \"FILE.nii.gz\")`";
const MNC2NII: &str = "`mnc2nii FILE FILE.nii` for MINC";

const NRRD: Format = Format {
    name: "an NRRD file",
    endings: &["nrrd", "nhdr"],
    knows: |_, start| start.starts_with(b"NRRD0"),
    has_voxels_only: Some(|path| has_header(path, "nhdr")),
    conversion: Some(SIMPLE_ITK),
    ..NO_FORMAT
};

const META_IMAGE: Format = Format {
    name: "a MetaImage file (`.mha`, `.mhd`)",
    endings: &["mha", "mhd"],
    knows: |_, start| ["ObjectType", "NDims"].into_iter().any(|key| is_text(start, key)),
    has_voxels_only: Some(|path| has_header(path, "mhd")),
    conversion: Some(SIMPLE_ITK),
    ..NO_FORMAT
};

const MGH: Format = Format {
    name: "an MGH file of FreeSurfer (`.mgh`, `.mgz`)",
    endings: &["mgh", "mgz"],
    knows: |_, start| is_mgh(start),
    conversion: Some(
        "`mri_convert FILE FILE.nii.gz`, or in Python `nibabel.save(nibabel.load(\"FILE\"), \"FILE.nii.gz\")`",
    ),
    ..NO_FORMAT
};

const MINC: Format = Format {
    name: "a MINC file",
    endings: &["mnc"],
    knows: |path, start| ((HDF5.knows)(path, start) || (NETCDF.knows)(path, start)) && has_ending(path, &["mnc"]),
    conversion: Some("`mnc2nii FILE FILE.nii`"),
    ..NO_FORMAT
};

const HDF5: Format = Format {
    name: "an HDF5 file, as MINC 2 is",
    knows: |_, start| start.starts_with(b"\x89HDF\r\n\x1a\n"),
    conversion: Some(MNC2NII),
    ..NO_FORMAT
};

const NETCDF: Format = Format {
    name: "a netCDF file, as MINC 1 is",
    knows: |_, start| start.starts_with(b"CDF\x01") || start.starts_with(b"CDF\x02"),
    conversion: Some(MNC2NII),
    ..NO_FORMAT
};

const AFNI: Format =
    Format { name: "an AFNI file", endings: &["brik"], conversion: Some("`3dAFNItoNIFTI FILE`"), ..NO_FORMAT };

const PNG: Format = Format {
    name: "a PNG image",
    endings: &["png"],
    knows: |_, start| start.starts_with(b"\x89PNG\r\n\x1a\n"),
    image: Some(decode::PNG),
    ..NO_FORMAT
};

const JPEG: Format = Format {
    name: "a JPEG image",
    endings: &["jpg", "jpeg"],
    knows: |_, start| start.starts_with(b"\xff\xd8\xff"),
    image: Some(decode::JPEG),
    ..NO_FORMAT
};

const TIFF: Format = Format {
    name: "a TIFF image",
    endings: &["tif", "tiff"],
    knows: |_, start| decode::is_tiff(start),
    image: Some(decode::TIFF),
    ..NO_FORMAT
};

const OTHER_IMAGE: Format = Format {
    name: "an image in a format that is not read",
    endings: &["bmp", "gif", "webp", "jp2", "heic", "avif", "pgm", "ppm"],
    knows: |_, start| image::guess_format(start).is_ok(),
    ..NO_FORMAT
};

/// All formats. Of two that know the content of a file, the first one counts. Images are in the order of preference among
/// files of one name.
pub const FORMATS: &[Format] =
    &[NIFTI, DICOM, ZIP_OF_DICOM, NRRD, META_IMAGE, MINC, HDF5, NETCDF, MGH, AFNI, PNG, JPEG, TIFF, OTHER_IMAGE];

/// The format of a file by its first bytes, else by its name; `None` if neither is known.
pub(crate) fn find(path: &Path, start: &[u8]) -> Option<&'static Format> {
    let by_name = || FORMATS.iter().find(|format| format.is_known_by_name && has_ending(path, format.endings));
    // of compressed files, only NIfTI files are read
    let compressed = || start.starts_with(&[0x1f, 0x8b]).then_some(&NIFTI);
    FORMATS.iter().find(|format| (format.knows)(path, start)).or_else(by_name).or_else(compressed)
}

/// The format of a file with a volume, also of one that cannot be read; `None` for a file that is no volume.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read.
pub fn of_volume(path: &Path) -> Result<Option<&'static Format>> {
    let found = find(path, &start_of(path)?);
    Ok(found.filter(|format| format.volume.is_some() || format.conversion.is_some()))
}

/// The format in which masks are written to files of this name.
pub(crate) fn writer(path: &Path) -> Option<Writer> {
    FORMATS.iter().filter_map(|format| format.write).find(|writer| has_ending(path, writer.endings))
}

/// True for a name of a file to which masks can be written.
pub fn is_written(path: &Path) -> bool {
    writer(path).is_some()
}

/// The usual ending of each format in which masks of volumes are written.
pub fn usual_endings() -> impl Iterator<Item = &'static str> {
    FORMATS.iter().filter_map(|format| Some(*format.write?.endings.first()?))
}

/// The endings of names of masks of volumes, for messages: `` `.nii.gz`, `.nii` or `.dcm` ``.
pub fn written_endings() -> String {
    let writers = FORMATS.iter().filter_map(|format| format.write);
    let endings: Vec<String> = writers.flat_map(|writer| writer.endings).map(|ending| format!("`.{ending}`")).collect();
    let (last, others) = endings.split_last().map_or(("", &[][..]), |(last, others)| (last.as_str(), others));
    format!("{} or {last}", others.join(", "))
}

/// The endings of flat images that can be read, in the order of preference among files of one name.
pub fn image_endings() -> impl Iterator<Item = &'static str> {
    FORMATS.iter().filter(|format| format.image.is_some()).flat_map(|format| format.endings).copied()
}

/// True for a name of an image in a format that is not read.
pub fn is_other_image(path: &Path) -> bool {
    has_ending(path, OTHER_IMAGE.endings)
}

/// True for a file with the voxels of a header that is beside it.
pub fn has_voxels_only(path: &Path) -> bool {
    FORMATS.iter().filter_map(|format| format.has_voxels_only).any(|has_voxels_only| has_voxels_only(path))
}

/// A file name without its ending; `nii.gz` and the like are one ending.
pub fn stem_of(name: &str) -> &str {
    let of = |ending: &&str| {
        let (stem, tail) = name.split_at_checked(name.len().checked_sub(ending.len() + 1)?)?;
        (!stem.is_empty() && tail.starts_with('.') && tail[1..].eq_ignore_ascii_case(ending)).then_some(stem)
    };
    let mut of_two_parts = FORMATS.iter().flat_map(|format| format.endings).filter(|ending| ending.contains('.'));
    let stem = of_two_parts.find_map(of).or_else(|| name.rsplit_once('.').map(|(stem, _)| stem));
    stem.filter(|stem| !stem.is_empty()).unwrap_or(name)
}

/// True for a name that ends with a dot and one of the endings, in small or capital letters.
pub(crate) fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    endings.iter().any(|ending| {
        let stem = name.len().checked_sub(ending.len() + 1).filter(|length| *length > 0);
        stem.is_some_and(|at| name[at] == b'.' && name[at + 1..].eq_ignore_ascii_case(ending.as_bytes()))
    })
}

/// Whether a file of raw voxels has a header with this ending beside it.
fn has_header(path: &Path, header: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = [".raw", ".raw.gz", ".zraw"].iter().find_map(|ending| name.strip_suffix(ending));
    stem.is_some_and(|stem| path.with_file_name(format!("{stem}.{header}")).is_file())
}

/// Whether a text begins with a key and `=`.
fn is_text(start: &[u8], key: &str) -> bool {
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(line).is_ok_and(|line| line.split('=').next().is_some_and(|word| word.trim() == key))
}

/// Version 1, four sides and a type of voxels, all in 32 bits.
fn is_mgh(start: &[u8]) -> bool {
    let (numbers, _) = start.as_chunks::<4>();
    let Some([version, sides @ .., kind]) = numbers.first_chunk::<6>().map(|all| all.map(i32::from_be_bytes)) else {
        return false;
    };
    version == 1 && sides.iter().all(|side| (1..=0xffff).contains(side)) && (0..=10).contains(&kind)
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
        self.is_known_by_name && (self.labels.is_some() || self.conversion.is_some())
    }

    /// True for a name with one of the endings.
    pub fn has_ending(&self, path: &Path) -> bool {
        has_ending(path, self.endings)
    }

    /// The error of a file whose volume cannot be read; `None` for other formats. `start` are its first bytes.
    pub(crate) fn refusal(&self, path: &Path, start: &[u8]) -> Option<Error> {
        let by_name = if (self.knows)(path, start) { "" } else { "by its name " };
        Some(refused(path, &format!("{by_name}it is {}", self.name), self.conversion?))
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
            ("a.nrrd", b"\x89PNG\r\n\x1a\n", Some(PNG)),
            ("a+orig.BRIK", b"", Some(AFNI)),
            ("a.png", b"\x89PNG\r\n\x1a\n", Some(PNG)),
            ("a.png", b"GIF89a", Some(OTHER_IMAGE)),
            ("a.nrrd", b"\x5c\x01\0\0", Some(NIFTI)),
            ("a.nii", b"", Some(NIFTI)),
            ("a.gz", b"\x1f\x8b\x08", Some(NIFTI)),
            ("a.txt", b"NDimsions = 3\n", None),
        ] {
            let found = find(Path::new(name), start).map(|format| format.name);
            assert_eq!(found, expected.map(|format| format.name), "{name}");
        }
        let by_name = NRRD.refusal(Path::new("a.nrrd"), b"").expect("refused");
        assert!(by_name.to_string().contains("by its name it is an NRRD file"), "{by_name}");
        let error = NRRD.refusal(Path::new("a.nrrd"), b"NRRD0001").expect("refused");
        assert!(error.to_string().contains("NRRD") && error.hint().contains("convert it to NIfTI"), "{error}");
    }

    #[test]
    fn names_have_endings_of_one_part_or_two() {
        for (name, stem, is_nifti) in [
            ("a.nii", "a", true),
            ("a.b.NII.gz", "a.b", true),
            ("a.gz", "a", false),
            ("nii", "nii", false),
            (".nii.gz", ".nii", false),
            ("a.hdr.gz", "a", false),
            ("a.dcm", "a", false),
        ] {
            let path = Path::new(name);
            assert_eq!((stem_of(name), has_ending(path, &["nii.gz", "nii"])), (stem, is_nifti), "{name}");
        }
        assert_eq!(image_endings().collect::<Vec<_>>(), ["png", "jpg", "jpeg", "tif", "tiff"]);
    }
}
