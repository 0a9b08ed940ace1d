//! Reading of NIfTI-1 files. Source: <https://nifti.nimh.nih.gov/nifti-1>; affines as in nibabel.

pub mod geometry;
pub(crate) mod mask;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nifti::{Endianness, NiftiHeader, NiftiType};

use super::format::refused;
use super::label_map::LabelMap;
use super::limits::check_size;
use super::modality::Modality;
use super::path::{has_ending, start_of};
use super::source::VolumeSource;
use super::stored::{Content, Number, Part, StoredVolume, StoredVoxels, TRUNCATED, chosen, little_endian};
use super::voxels::Volume;
use geometry::{Forms, Geometry};
use prsmed_base::error::{Error, Result};

const HEADER: usize = 348;
/// `magic` of a header whose voxels are in another file.
const PAIR: &[u8; 4] = b"ni1\0";

/// The first bytes of the content of a gzip file; fewer if it is damaged.
pub(crate) fn decompressed_start(path: &Path) -> Vec<u8> {
    let mut start = Vec::new();
    // a damaged file is an error when it is read
    let read = Content::open(path).map(|content| content.bytes.take(132).read_to_end(&mut start));
    drop(read);
    start
}

/// True for a NIfTI file that is not compressed, by its first four bytes.
pub(crate) fn is_nifti(start: &[u8]) -> bool {
    let header = |size: i32| start.starts_with(&size.to_le_bytes()) || start.starts_with(&size.to_be_bytes());
    header(348) || header(540)
}

/// The header and the voxels of a pair (`.hdr` and `.img`, compressed or not) by the name of one of them; `None` for
/// other names, and for a file that may be complete.
fn pair(path: &Path) -> Result<Option<[PathBuf; 2]>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bare = if has_ending(path, &["gz"]) { &name[..name.len() - 3] } else { name.as_str() };
    let Some((stem, extension)) = bare.rsplit_once('.') else { return Ok(None) };
    let is_header = extension.eq_ignore_ascii_case("hdr");
    if !is_header && !extension.eq_ignore_ascii_case("img") {
        return Ok(None);
    }
    let other = if is_header { ["img", "IMG"] } else { ["hdr", "HDR"] };
    let names = other.iter().flat_map(|other| ["", ".gz"].map(|end| format!("{stem}.{other}{end}")));
    let Some(other) = names.map(|name| path.with_file_name(name)).find(|path| path.is_file()) else {
        let mut start = start_of(path)?;
        start.resize(4, 0);
        if is_header || [348_i32.to_le_bytes(), 348_i32.to_be_bytes()].iter().any(|size| start == size) {
            return Ok(None);
        }
        let reason =
            format!("its name is that of the voxels of a pair of files, and its header `{stem}.hdr` is missing");
        return Err(Error::data(path, reason, "put both files into one folder, or convert them to one `.nii.gz` file"));
    };
    Ok(Some(if is_header { [path.to_owned(), other] } else { [other, path.to_owned()] }))
}

/// True for the voxels of a pair whose header is beside them.
pub fn is_voxels_of_pair(path: &Path) -> bool {
    matches!(pair(path), Ok(Some([_, voxels])) if voxels == path)
}

/// Reads a volume; `selected` is the number of a volume of a 4-D file, and `geometry` counts where two affines differ.
pub(crate) fn open(path: &Path, selected: Option<u32>, geometry: Option<Geometry>) -> Result<Volume> {
    stored(path, selected, geometry)?.volume()
}

/// Reads a label map; the arguments are those of [`open`].
pub(crate) fn open_labels(path: &Path, selected: Option<u32>, geometry: Option<Geometry>) -> Result<LabelMap> {
    stored(path, selected, geometry)?.labels()
}

/// The data type of the voxels.
fn kind_of(path: &Path, header: &NiftiHeader) -> Result<Number> {
    let (found, what, values) = match header.data_type() {
        Ok(NiftiType::Rgb24 | NiftiType::Rgba32) => {
            ("colours (RGB)".to_owned(), "one of its colours", "numpy.asarray(image.dataobj)[\"R\"]")
        }
        Ok(NiftiType::Complex64 | NiftiType::Complex128 | NiftiType::Complex256) => {
            let values = "abs(numpy.asarray(image.dataobj)).astype(numpy.float32)";
            ("complex numbers".to_owned(), "its magnitude", values)
        }
        Ok(NiftiType::Uint8) => return Ok(Number::U8),
        Ok(NiftiType::Int8) => return Ok(Number::I8),
        Ok(NiftiType::Uint16) => return Ok(Number::U16),
        Ok(NiftiType::Int16) => return Ok(Number::I16),
        Ok(NiftiType::Uint32) => return Ok(Number::U32),
        Ok(NiftiType::Int32) => return Ok(Number::I32),
        Ok(NiftiType::Uint64) => return Ok(Number::U64),
        Ok(NiftiType::Int64) => return Ok(Number::I64),
        Ok(NiftiType::Float32) => return Ok(Number::F32),
        Ok(NiftiType::Float64) => return Ok(Number::F64),
        _ => {
            let values = "numpy.asarray(image.dataobj).astype(numpy.float32)";
            (format!("data type {}", header.datatype), "its values", values)
        }
    };
    let reason = format!("its voxels are {found}; integers and floating-point numbers of up to 64 bits can be read");
    let hint = format!(
        "save {what}, for example with nibabel: `nibabel.save(nibabel.Nifti1Image({values}, image.affine), path)`"
    );
    Err(Error::data(path, reason, hint))
}

/// A file at the volume with the selected number.
fn stored(path: &Path, selected: Option<u32>, geometry: Option<Geometry>) -> Result<StoredVolume> {
    let pair = pair(path)?;
    let [of_header, of_voxels] = pair.as_ref().map_or([path; 2], |pair| pair.each_ref().map(PathBuf::as_path));
    let mut content = Content::open(of_header)?;
    let header = read_header(&mut content, pair.is_some())?;
    // some programs write the magic of a single file into the header of a pair
    let is_apart = &header.magic == PAIR || (pair.is_some() && !has_voxels(of_header)?);
    if is_apart {
        content = Content::open(of_voxels)?;
    }
    path.clone_into(&mut content.path);
    let number = kind_of(path, &header)?;
    let (size, num_volumes) = dimensions(path, &header)?;
    let [x, y, z] = size;
    let several = || format!("it is a series of {num_volumes} volumes of {x}x{y}x{z} voxels (4-D)");
    let chosen = chosen(path, num_volumes, selected, several)?;
    let part = Part { run: check_size(path, size)?, of: num_volumes, chosen };
    let (is_big_endian, scaling) = (header.endianness == Endianness::Big, scaling(path, &header)?);
    let mut stored = StoredVoxels { content, number, is_big_endian, scaling, size, part };
    // a pair has its voxels in a file of their own
    let (first, read) = if is_apart { (0.0, 0) } else { (352.0, HEADER as u64) };
    let start = if (first..1e9).contains(&header.vox_offset) { header.vox_offset } else { first };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
    let is_there = stored.content.skip(start as u64 - read)?;
    if !is_there {
        return Err(stored.truncated());
    }
    let (affine, notes) = geometry::affine(path, &header, size, geometry)?;
    let source = VolumeSource::Nifti(Forms::of_header(&header));
    Ok(StoredVolume { stored, affine, modality: Modality::Unknown, source, notes })
}

/// Whether anything is behind the header and its four bytes of extensions.
fn has_voxels(of_header: &Path) -> Result<bool> {
    Content::open(of_header)?.skip(HEADER as u64 + 5)
}

/// Slope and intercept. A slope of 0 or NaN means that values are not scaled, as in nibabel.
fn scaling(path: &Path, header: &NiftiHeader) -> Result<[f64; 2]> {
    let (slope, intercept) = (f64::from(header.scl_slope), f64::from(header.scl_inter));
    if slope == 0.0 || !slope.is_finite() {
        return Ok([1.0, 0.0]);
    }
    if !intercept.is_finite() {
        let reason = "the header has a slope, and an intercept (`scl_inter`) that is NaN or infinite";
        return Err(Error::data(path, reason, "correct the header, or save the file again with nibabel"));
    }
    Ok([slope, intercept])
}

/// The header of a file, or of a pair of files.
fn read_header(content: &mut Content, is_pair: bool) -> Result<NiftiHeader> {
    let mut buffer = [0; HEADER];
    let read = content.bytes.read_exact(&mut buffer);
    let path = content.path.as_path();
    read.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::data(path, "it is truncated: the header is incomplete", TRUNCATED),
        _ => content.unreadable(&error),
    })?;
    let size = [false, true].map(|is_big_endian| i32::from_le_bytes(little_endian(&buffer, is_big_endian)));
    if size.contains(&540) {
        let hint =
            "save it as NIfTI-1, for example with nibabel: `nibabel.save(nibabel.Nifti1Image.from_image(image), path)`";
        return Err(Error::data(path, "it is a NIfTI-2 file; NIfTI-1 can be read", hint));
    }
    if !size.contains(&348) {
        let hint = "use a NIfTI file (`.nii`, `.nii.gz`), or DICOM files";
        return Err(Error::data(path, "it is not a NIfTI file", hint));
    }
    match (&buffer[344..], is_pair) {
        (magic, false) if magic == PAIR => {
            let reason = "it is the header of a pair of files, and the file of the voxels (`.img`) is not beside it";
            let hint = "put both files into one folder, with the same name, or convert them to one `.nii.gz` file";
            return Err(Error::data(path, reason, hint));
        }
        (magic, _) if magic == PAIR || magic == b"n+1\0" => {}
        _ => {
            let conversion = "nibabel: `nibabel.save(nibabel.load(\"FILE\"), \"FILE.nii.gz\")`; check left and right, \
                              which Analyze does not store";
            return Err(refused(path, "it is an Analyze 7.5 file, or a NIfTI file with a damaged header", conversion));
        }
    }
    let read = NiftiHeader::from_reader(buffer.as_slice());
    read.map_err(|_| Error::data(path, "it has no valid NIfTI header", "export the file again as NIfTI-1"))
}

/// Size of a volume and number of volumes.
fn dimensions(path: &Path, header: &NiftiHeader) -> Result<([usize; 3], usize)> {
    let wrong = || {
        let reason = format!("its header has invalid dimensions: {:?}", header.dim);
        Error::data(path, reason, "export the file again as NIfTI-1")
    };
    // negative in the file
    let sides = header.dim().map_err(|_| wrong())?;
    if sides.iter().any(|side| *side > i16::MAX.unsigned_abs()) {
        return Err(wrong());
    }
    let side = |axis: usize| sides.get(axis).map_or(1, |side| usize::from(*side).max(1));
    let num_volumes = (3..7).try_fold(1_usize, |all, axis| all.checked_mul(side(axis))).ok_or_else(wrong)?;
    Ok(([side(0), side(1), side(2)], num_volumes))
}

#[cfg(test)]
#[path = "nifti/tests.rs"]
mod tests;
