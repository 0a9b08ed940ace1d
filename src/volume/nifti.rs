//! Reading of NIfTI-1 files. Source: <https://nifti.nimh.nih.gov/nifti-1>; affines as in nibabel.

pub mod geometry;
mod gunzip;
pub(crate) mod mask;

use std::cell::Cell;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use nifti::{Endianness, NiftiHeader, NiftiType};

use super::display::Display;
use super::format::refused;
use super::grid::Grid;
use super::label_map::LabelMap;
use super::limits::{MAX_FILE, MAX_VOXELS, check_ratio, check_size};
use super::modality::Modality;
use super::padding;
use super::path::{has_ending, start_of};
use super::source::VolumeSource;
use super::voxel_set::VoxelSet;
use super::voxels::{Volume, Voxels};
use geometry::{Forms, Geometry};
use gunzip::Gunzip;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

const HEADER: usize = 348;
/// `magic` of a header whose voxels are in another file.
const PAIR: &[u8; 4] = b"ni1\0";
/// Voxels are read in pieces, so that a wrong size in the header takes no memory.
const PIECE: usize = 1 << 20;
/// Largest distance of a label from a whole number: slopes that are not exactly 1 leave one.
const LABEL_TOLERANCE: f64 = 1e-3;
const TRUNCATED: &str = "copy or download the file again";

/// First bytes of a gzip file.
pub(crate) const GZIP: &[u8; 2] = &[0x1f, 0x8b];

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
    let (mut file, [slope, intercept]) = NiftiFile::open(path, selected)?;
    let kind = file.kind;
    if file.content.is_gzip {
        check_ratio(path, file.content.num_bytes, (file.count * kind.size_of()) as u64)?;
    }
    let fits = matches!(kind, NiftiType::Uint8 | NiftiType::Int8 | NiftiType::Int16);
    #[expect(clippy::cast_possible_truncation, reason = "fits, or is kept as f32")]
    let mut voxels = if fits && is_identity(slope, intercept) {
        Voxels::I16(file.read_values(path, |value| value as i16)?)
    } else {
        Voxels::F32(file.read_values(path, |value| (value * slope + intercept) as f32)?)
    };
    file.finish(path)?;
    if let Voxels::F32(values) = &mut voxels {
        check_finite(path, values)?;
    }
    let (affine, mut notes) = geometry::affine(path, &file.header, file.size, geometry)?;
    let mut padding = VoxelSet::default();
    notes.extend(padding::add_undeclared(&voxels, &Modality::Unknown, &mut padding));
    let source = VolumeSource::Nifti(Forms::of_header(&file.header));
    let display = Display { padding, ..Display::default() };
    Ok(Volume { display, notes, ..Volume::new(voxels, Grid { size: file.size, affine }, source) })
}

/// Reads a label map; the arguments are those of [`open`].
pub(crate) fn open_labels(path: &Path, selected: Option<u32>, geometry: Option<Geometry>) -> Result<LabelMap> {
    let (mut file, [slope, intercept]) = NiftiFile::open(path, selected)?;
    let (fraction, outside, rounded) = (Cell::new(None), Cell::new(false), Cell::new(0_usize));
    let label = |stored: f64| {
        let value = stored * slope + intercept;
        let label = value.round();
        let apart = (value - label).abs();
        if apart > LABEL_TOLERANCE || !value.is_finite() {
            fraction.set(Some(value));
        } else if !(0.0..=f64::from(u16::MAX)).contains(&label) {
            outside.set(true);
        }
        rounded.update(|count| count + usize::from(apart > 0.0));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "others are an error below")]
        let label = label as u16;
        label
    };
    let values = file.read_values(path, label)?;
    file.finish(path)?;
    let scaling = || format!(" after its header's slope {slope} and intercept {intercept}");
    let scaled = if is_identity(slope, intercept) { String::new() } else { scaling() };
    if let Some(value) = fraction.get() {
        let value = (value * 1e6).round() / 1e6;
        let reason =
            format!("it is not a label map: it has values that are not whole numbers, such as {value}{scaled}");
        return Err(Error::data(path, reason, "threshold probabilities first, and save labels as integers"));
    }
    if outside.get() {
        let reason = format!("it is not a label map: it has labels below 0 or above 65535{scaled}");
        return Err(Error::data(path, reason, "renumber its labels; 0 is the background"));
    }
    let (affine, mut notes) = geometry::affine(path, &file.header, file.size, geometry)?;
    if rounded.get() > 0 {
        let (count, all) = (rounded.get(), values.len());
        notes.push(format!(
            "{count} of {all} labels were within {LABEL_TOLERANCE} of whole numbers{scaled}; they were rounded"
        ));
    }
    Ok(LabelMap::new(values, Grid { size: file.size, affine }, notes))
}

fn is_identity(slope: f64, intercept: f64) -> bool {
    slope == 1.0 && intercept == 0.0
}

fn check_finite(path: &Path, values: &[f32]) -> Result<()> {
    let bad = values.iter().filter(|value| !value.is_finite()).count();
    if bad == 0 {
        return Ok(());
    }
    let reason = format!("{bad} of {} voxels are NaN or infinite", values.len());
    let hint =
        "replace them, for example `numpy.nan_to_num(data, nan=data_minimum)` in Python, and save the file again";
    Err(Error::data(path, reason, hint))
}

/// The bytes of one voxel in the order of the file.
fn bytes_of<const N: usize>(bytes: &[u8], order: Endianness) -> [u8; N] {
    let mut array = bytes.first_chunk().copied().unwrap_or([0; N]);
    if order == Endianness::Big {
        array.reverse();
    }
    array
}

/// The data type of the voxels.
fn kind_of(path: &Path, header: &NiftiHeader) -> Result<NiftiType> {
    let (found, what, values) = match header.data_type() {
        Ok(NiftiType::Rgb24 | NiftiType::Rgba32) => {
            ("colours (RGB)".to_owned(), "one of its colours", "numpy.asarray(image.dataobj)[\"R\"]")
        }
        Ok(NiftiType::Complex64 | NiftiType::Complex128 | NiftiType::Complex256) => {
            let values = "abs(numpy.asarray(image.dataobj)).astype(numpy.float32)";
            ("complex numbers".to_owned(), "its magnitude", values)
        }
        Ok(kind) if kind.size_of() <= 8 => return Ok(kind),
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

/// The number of a voxel.
fn number(kind: NiftiType, bytes: &[u8], order: Endianness) -> f64 {
    match kind {
        NiftiType::Uint8 => f64::from(bytes[0]),
        NiftiType::Int8 => f64::from(bytes[0].cast_signed()),
        NiftiType::Uint16 => f64::from(u16::from_le_bytes(bytes_of(bytes, order))),
        NiftiType::Int16 => f64::from(i16::from_le_bytes(bytes_of(bytes, order))),
        NiftiType::Uint32 => f64::from(u32::from_le_bytes(bytes_of(bytes, order))),
        NiftiType::Int32 => f64::from(i32::from_le_bytes(bytes_of(bytes, order))),
        NiftiType::Uint64 => u64::from_le_bytes(bytes_of(bytes, order)) as f64,
        NiftiType::Int64 => i64::from_le_bytes(bytes_of(bytes, order)) as f64,
        NiftiType::Float32 => f64::from(f32::from_le_bytes(bytes_of(bytes, order))),
        // `kind_of` refuses the others
        _ => f64::from_le_bytes(bytes_of(bytes, order)),
    }
}

/// The content of a file, decompressed.
struct Content {
    bytes: Box<dyn Read>,
    is_gzip: bool,
    /// Size of the file.
    num_bytes: u64,
}

impl Content {
    fn open(path: &Path) -> Result<Self> {
        let is_gzip = start_of(path)?.starts_with(GZIP);
        let file = files::open(path).map_err(Error::io(path, "read"))?;
        let num_bytes = file.metadata().map_err(Error::io(path, "read"))?.len();
        if num_bytes > MAX_FILE {
            let reason = format!("it is larger than {} GiB", MAX_FILE >> 30);
            return Err(Error::data(path, reason, "crop the volume or split it"));
        }
        let file = BufReader::new(file);
        Ok(Self { bytes: if is_gzip { Box::new(Gunzip::new(file)) } else { Box::new(file) }, is_gzip, num_bytes })
    }
}

/// An open file, at the first voxel.
struct NiftiFile {
    header: NiftiHeader,
    kind: NiftiType,
    content: Content,
    size: [usize; 3],
    /// Number of voxels.
    count: usize,
}

impl NiftiFile {
    /// A file at the volume with the selected number, with its slope and intercept.
    fn open(path: &Path, selected: Option<u32>) -> Result<(Self, [f64; 2])> {
        let pair = pair(path)?;
        let [of_header, of_voxels] = pair.as_ref().map_or([path; 2], |pair| pair.each_ref().map(PathBuf::as_path));
        let mut content = Content::open(of_header)?;
        let header = read_header(of_header, &mut content.bytes, pair.is_some())?;
        let is_apart = &header.magic == PAIR;
        if is_apart {
            content = Content::open(of_voxels)?;
        }
        let kind = kind_of(path, &header)?;
        let (size, num_volumes) = dimensions(path, &header)?;
        let index = chosen(path, size, num_volumes, selected)?;
        let count = check_size(path, size)?;
        let mut file = Self { header, kind, content, size, count };
        file.skip_to(path, is_apart, index)?;
        let scaling = file.scaling(path)?;
        Ok((file, scaling))
    }

    /// Skips header extensions and the volumes before one.
    fn skip_to(&mut self, path: &Path, is_apart: bool, index: usize) -> Result<()> {
        // a pair has its voxels in a file of their own
        let (first, read) = if is_apart { (0.0, 0) } else { (352.0, HEADER as u64) };
        let offset = self.header.vox_offset;
        let start = if (first..1e9).contains(&offset) { offset } else { first };
        let volume = self.count * self.kind.size_of();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        let skipped = start as u64 - read + (index as u64).saturating_mul(volume as u64);
        let done = io::copy(&mut (&mut self.content.bytes).take(skipped), &mut io::sink());
        if done.map_err(|error| unreadable(path, &error))? < skipped {
            return Err(self.truncated(path));
        }
        Ok(())
    }

    /// Slope and intercept. A slope of 0 or NaN means that values are not scaled, as in nibabel.
    fn scaling(&self, path: &Path) -> Result<[f64; 2]> {
        let (slope, intercept) = (f64::from(self.header.scl_slope), f64::from(self.header.scl_inter));
        if slope == 0.0 || !slope.is_finite() {
            return Ok([1.0, 0.0]);
        }
        if !intercept.is_finite() {
            let reason = "the header has a slope, and an intercept (`scl_inter`) that is NaN or infinite";
            return Err(Error::data(path, reason, "correct the header, or save the file again with nibabel"));
        }
        Ok([slope, intercept])
    }

    fn read_values<T>(&mut self, path: &Path, value: impl Fn(f64) -> T) -> Result<Vec<T>> {
        let (kind, order, count) = (self.kind, self.header.endianness, self.count);
        let size = kind.size_of();
        let mut values = Vec::new();
        let mut buffer = vec![0; PIECE.min(count * size)];
        while values.len() < count {
            let bytes = buffer.len().min((count - values.len()) * size);
            match self.content.bytes.read_exact(&mut buffer[..bytes]) {
                Ok(()) => {
                    let voxels = buffer[..bytes].chunks_exact(size);
                    values.extend(voxels.map(|voxel| value(number(kind, voxel, order))));
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(self.truncated(path)),
                Err(error) => return Err(unreadable(path, &error)),
            }
        }
        Ok(values)
    }

    fn truncated(&self, path: &Path) -> Error {
        let [x, y, z] = self.size;
        let reason = format!("it is truncated: the header promises {x}x{y}x{z} voxels, and the file has fewer");
        Error::data(path, reason, TRUNCATED)
    }

    /// Reads the rest of a compressed file, so that its checksum is compared.
    fn finish(&mut self, path: &Path) -> Result<()> {
        if self.content.is_gzip {
            let rest = (MAX_VOXELS as u64).saturating_mul(8);
            let read = io::copy(&mut (&mut self.content.bytes).take(rest), &mut io::sink());
            read.map_err(|error| unreadable(path, &error))?;
        }
        Ok(())
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Error::data(path, "the compressed file is truncated", TRUNCATED);
    }
    Error::data(path, format!("it cannot be read: {error}"), TRUNCATED)
}

/// The header of a file, or of a pair of files.
fn read_header(path: &Path, bytes: &mut dyn Read, is_pair: bool) -> Result<NiftiHeader> {
    let mut buffer = [0; HEADER];
    bytes.read_exact(&mut buffer).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::data(path, "it is truncated: the header is incomplete", TRUNCATED),
        _ => unreadable(path, &error),
    })?;
    let size = [Endianness::Little, Endianness::Big].map(|order| i32::from_le_bytes(bytes_of(&buffer, order)));
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

/// The index of the selected one of several volumes.
fn chosen(path: &Path, size: [usize; 3], num_volumes: usize, selected: Option<u32>) -> Result<usize> {
    let last = num_volumes - 1;
    match selected.map(|number| number as usize) {
        None if last == 0 => Ok(0),
        Some(number) if number <= last => Ok(number),
        None => {
            let ([x, y, z], shown) = (size, path.display());
            let reason = format!("it is a series of {num_volumes} volumes of {x}x{y}x{z} voxels (4-D)");
            Err(Error::data(path, reason, format!("choose one, from `{shown}#0` to `{shown}#{last}`")))
        }
        Some(number) => {
            let reason = format!("it has no volume {number}; its {num_volumes} volumes count from 0");
            Err(Error::data(path, reason, format!("choose a number from 0 to {last}")))
        }
    }
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
