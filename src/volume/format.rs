//! File formats: each is a row of [`FORMATS`], which says how its files are known, read and written.
//!
//! The content of a file decides, and its name only where the content says nothing. A format that cannot be read is a row
//! without functions, so that its files are refused with a remedy. A new format is a file of its own and one row.

pub(crate) mod row;

use std::path::Path;

use super::decode::bmp::BMP;
use super::decode::gif::GIF;
use super::decode::pnm::{PNM, is_pnm};
use super::decode::webp::WEBP;
use super::decode::{codec, tiff};
use super::dicom::{self, segments};
use super::meta_image::META_IMAGE;
use super::nifti::{self, mask};
use super::nrrd::NRRD;
use super::numpy::{NPY, NPZ};
use super::path::{has_ending, number_of, start_of, stem_length};
use super::stored::GZIP;
use super::tiff_volume::TIFF_VOLUME;
use prsmed_base::error::{Error, Result};

pub use row::Format;
pub(crate) use row::{Choice, NO_FORMAT, Writer, flat, refused, unreadable};

/// The flat images that can be read (as text in the program; PGM stands for PPM too).
#[macro_export]
macro_rules! image_formats {
    () => {
        "PNG, JPEG, TIFF, BMP, GIF, WebP or PGM"
    };
}

/// The flat images that can be read, for messages.
pub const IMAGES: &str = image_formats!();

const NIFTI: Format = Format {
    name: "a NIfTI file",
    // not `hdr`, which other programs use too
    endings: &["nii.gz", "nii", "img", "img.gz", "hdr.gz"],
    knows: |_, start| nifti::is_nifti(start),
    has_voxels_only: Some(nifti::is_voxels_of_pair),
    volume: Some(|path, choice| nifti::open(path, number_of(path, choice.selected)?, choice.geometry)),
    labels: Some(|path, choice| nifti::open_labels(path, number_of(path, choice.selected)?, choice.geometry)),
    write: Some(Writer { endings: &["nii.gz", "nii"], is_on_page: true, check: mask::check, encode: mask::encode }),
    ..NO_FORMAT
};

/// DICOM images, segmentations and other objects.
pub const DICOM: Format = Format {
    name: "a DICOM file",
    endings: &["dcm", "ima", dicom::RTSTRUCT_ENDING],
    is_known_by_name: false,
    knows: |_, start| dicom::is_dicom(start),
    is_series: true,
    volume: Some(|path, choice| dicom::open(path, choice.selected)),
    labels: Some(|path, choice| segments::read(path, choice.volume)),
    write: Some(Writer {
        endings: &["dcm", dicom::RTSTRUCT_ENDING],
        is_on_page: true,
        check: dicom::check_written,
        encode: dicom::encoded,
    }),
    ..NO_FORMAT
};

const OTHER_IMAGE: Format = Format {
    name: "an image in a format that is not read",
    endings: &["jp2", "heic", "avif"],
    // two letters are not enough for a BMP
    knows: |_, start| image::guess_format(start).is_ok_and(|format| format != image::ImageFormat::Bmp),
    ..NO_FORMAT
};

const MRI_CONVERT: &str =
    "`mri_convert FILE FILE.nii.gz`, or in Python `nibabel.save(nibabel.load(\"FILE\"), \"FILE.nii.gz\")`";
const MNC2NII: &str = "`mnc2nii FILE FILE.nii` for MINC";

/// All formats. Of two that know the content of a file, the first one counts. Images are in the order of preference among
/// files of one name.
pub const FORMATS: &[Format] = &[
    NIFTI,
    DICOM,
    NPZ,
    NPY,
    Format {
        name: "a zip file",
        is_known_by_name: false,
        knows: |_, start| dicom::is_zip(start),
        is_series: true,
        volume: Some(|path, choice| dicom::open(path, choice.selected.or(choice.series))),
        ..NO_FORMAT
    },
    NRRD,
    META_IMAGE,
    unreadable("a MINC file", &["mnc"], is_minc, "`mnc2nii FILE FILE.nii`"),
    unreadable("an HDF5 file, as MINC 2 is", &[], |_, start| is_hdf5(start), MNC2NII),
    unreadable("a netCDF file, as MINC 1 is", &[], |_, start| is_netcdf(start), MNC2NII),
    unreadable("an MGH file of FreeSurfer (`.mgh`, `.mgz`)", &["mgh", "mgz"], |_, start| is_mgh(start), MRI_CONVERT),
    unreadable("an AFNI file", &["brik"], |_, _| false, "`3dAFNItoNIFTI FILE`"),
    TIFF_VOLUME,
    flat("a PNG image", &["png"], |_, start| start.starts_with(b"\x89PNG\r\n\x1a\n"), codec::PNG),
    flat("a JPEG image", &["jpg", "jpeg"], |_, start| start.starts_with(b"\xff\xd8\xff"), codec::JPEG),
    flat("a TIFF image", &["tif", "tiff"], |_, start| tiff::is_tiff(start), codec::TIFF),
    flat("a BMP image", &["bmp"], |_, start| is_bmp(start), BMP),
    flat("a GIF image", &["gif"], |_, start| start.starts_with(b"GIF8"), GIF),
    flat("a WebP image", &["webp"], |_, start| start.starts_with(b"RIFF") && start.get(8..12) == Some(b"WEBP"), WEBP),
    flat("a PGM or PPM image", &["pgm", "ppm"], |_, start| is_pnm(start), PNM),
    OTHER_IMAGE,
    #[cfg(test)]
    super::toy_format::TOY,
];

/// The format of a file by its first bytes, else by its name, and whether only the name says it.
fn find(path: &Path, start: &[u8]) -> Option<(&'static Format, bool)> {
    let knows = |start: &[u8]| FORMATS.iter().find(|format| (format.knows)(path, start));
    // of compressed files, only NIfTI files are read
    let compressed = start.starts_with(GZIP).then(|| nifti::decompressed_start(path));
    let inside = compressed.as_deref().and_then(knows).filter(|format| format.is_volume() && !format.is_series);
    let by_name = || FORMATS.iter().find(|format| format.is_known_by_name && format.has_ending(path));
    let by_content = knows(start).or(inside).map(|format| (format, false));
    by_content.or_else(|| by_name().map(|format| (format, true))).or(compressed.and(Some((&NIFTI, false))))
}

/// What the format of a file has, as a function that reads it.
///
/// # Errors
/// [`Error::Data`] for a format without it: the remedy of a volume that cannot be read, or else what `unknown` says;
/// [`Error::Io`].
pub(crate) fn reader<T>(path: &Path, of: fn(&Format) -> Option<T>, unknown: impl Fn() -> Error) -> Result<T> {
    let Some((format, is_by_name)) = find(path, &start_of(path)?) else { return Err(unknown()) };
    of(format).ok_or_else(|| format.refusal(path, is_by_name).unwrap_or_else(unknown))
}

/// The format of a file with a volume, also of one that cannot be read; `None` for a file that is no volume.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read.
pub fn of_volume(path: &Path) -> Result<Option<&'static Format>> {
    let found = find(path, &start_of(path)?);
    Ok(found.map(|(format, _)| format).filter(|format| format.is_volume()))
}

/// The format in which masks are written to files of this name.
pub(crate) fn writer(path: &Path) -> Option<Writer> {
    FORMATS.iter().filter_map(|format| format.write).find(|writer| has_ending(path, writer.endings))
}

/// True for a name of a file to which masks can be written.
pub fn is_written(path: &Path) -> bool {
    writer(path).is_some()
}

/// The usual ending of each format in which the page offers masks of volumes.
pub fn usual_endings() -> impl Iterator<Item = &'static str> {
    let writers = FORMATS.iter().filter_map(|format| format.write).filter(|writer| writer.is_on_page);
    writers.filter_map(|writer| writer.endings.first().copied())
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

/// True for a TIFF file that is a volume: of several pages, or of measurements.
pub fn is_stack(path: &Path) -> bool {
    has_ending(path, &["tif", "tiff"]) && of_volume(path).is_ok_and(|found| found.is_some())
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
    let of = |ending: &&str| stem_length(name.as_bytes(), ending).map(|length| &name[..length]);
    let mut of_two_parts = FORMATS.iter().flat_map(|format| format.endings).filter(|ending| ending.contains('.'));
    let stem = of_two_parts.find_map(of).or_else(|| name.rsplit_once('.').map(|(stem, _)| stem));
    stem.filter(|stem| !stem.is_empty()).unwrap_or(name)
}

/// `BM`, the size, four zeros.
fn is_bmp(start: &[u8]) -> bool {
    start.starts_with(b"BM") && start.get(6..10) == Some(&[0; 4])
}

fn is_hdf5(start: &[u8]) -> bool {
    start.starts_with(b"\x89HDF\r\n\x1a\n")
}

fn is_netcdf(start: &[u8]) -> bool {
    start.starts_with(b"CDF\x01") || start.starts_with(b"CDF\x02")
}

fn is_minc(path: &Path, start: &[u8]) -> bool {
    has_ending(path, &["mnc"]) && (is_hdf5(start) || is_netcdf(start))
}

/// Version 1, four sides and a type of voxels, all in 32 bits.
fn is_mgh(start: &[u8]) -> bool {
    let (numbers, _) = start.as_chunks::<4>();
    let Some([version, sides @ .., kind]) = numbers.first_chunk::<6>().map(|all| all.map(i32::from_be_bytes)) else {
        return false;
    };
    version == 1 && sides.iter().all(|side| (1..=0xffff).contains(side)) && (0..=10).contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_images_that_are_read_are_in_the_text() {
        let images = FORMATS.iter().filter(|format| format.image.is_some());
        let names: Vec<&str> = images.filter_map(|format| format.name.split(' ').nth(1)).collect();
        assert!(names.len() >= 7, "{names:?}");
        for name in names.into_iter().filter(|name| *name != "toy") {
            assert!(IMAGES.contains(name), "{name}: {IMAGES}");
        }
    }

    #[test]
    fn other_formats_are_known_by_their_content_or_their_name() {
        for (name, start, expected) in [
            ("a", &b"NRRD0004\n# x\n"[..], "NRRD file"),
            ("a.png", b"NRRD0001\n", "NRRD file"),
            ("a.NHDR", b"", "NRRD file"),
            ("a", b"ObjectType = Image\nNDims = 3\n", "MetaImage"),
            ("a", b"NDims=3\n", "MetaImage"),
            ("a.mhd", b"Comment = x\n", "MetaImage"),
            ("a.mnc", b"\x89HDF\r\n\x1a\n\0", "a MINC"),
            ("a.h5", b"\x89HDF\r\n\x1a\n\0", "HDF5"),
            ("a.mnc", b"CDF\x01\0\0", "a MINC"),
            ("a", b"CDF\x02\0\0", "netCDF"),
            ("a.mgz", b"\x1f\x8b\x08", "MGH"),
            ("a", b"\0\0\0\x01\0\0\0\x04\0\0\0\x05\0\0\0\x06\0\0\0\x01\0\0\0\x03", "MGH"),
            // a video
            ("a", b"\0\0\0\x01\x67\x42\0\x0a\0\0\0\x06\0\0\0\x01\0\0\0\x03", ""),
            ("a.nrrd", b"\x89PNG\r\n\x1a\n", "PNG"),
            ("a+orig.BRIK", b"", "AFNI"),
            ("a.png", b"\x89PNG\r\n\x1a\n", "PNG"),
            ("a.png", b"GIF89a", "GIF"),
            ("a.png", b"BM\x46\0\0\0\0\0\0\0", "BMP"),
            ("a.txt", b"BMI of the patients", ""),
            ("a.png", b"RIFF\x20\0\0\0WEBPVP8L", "WebP"),
            ("a.png", b"P5\n64 64\n255\n", "PGM"),
            ("a", b"\x93NUMPY\x01\0", "NPY"),
            ("a", b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x08\0\0\0imgs.npy", "NPZ"),
            ("a.npz", b"PK\x03\x04", "a zip"),
            ("a.jp2", b"", "not read"),
            ("a.nrrd", b"\x5c\x01\0\0", "NIfTI"),
            ("a.nii", b"", "NIfTI"),
            ("a.gz", b"\x1f\x8b\x08", "NIfTI"),
            ("a.txt", b"NDimsions = 3\n", ""),
        ] {
            let found = find(Path::new(name), start).map_or("", |(format, _)| format.name);
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{name}: {found}");
        }
        let of = |start: &[u8]| {
            let (format, is_by_name) = find(Path::new("a.mnc"), start)?;
            format.refusal(Path::new("a.mnc"), is_by_name)
        };
        let by_name = of(b"").expect("refused");
        assert!(by_name.to_string().contains("by its name it is a MINC file"), "{by_name}");
        let error = of(b"CDF\x01").expect("refused");
        assert!(error.to_string().contains("MINC") && error.hint().contains("convert it to NIfTI"), "{error}");
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
            ("a.rtstruct.dcm", "a", false),
        ] {
            let path = Path::new(name);
            assert_eq!((stem_of(name), has_ending(path, &["nii.gz", "nii"])), (stem, is_nifti), "{name}");
        }
        assert_eq!(
            image_endings().collect::<Vec<_>>(),
            ["png", "jpg", "jpeg", "tif", "tiff", "bmp", "gif", "webp", "pgm", "ppm"]
        );
    }
}
