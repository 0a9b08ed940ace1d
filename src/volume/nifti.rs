//! Reading of NIfTI-1 files. Source: <https://nifti.nimh.nih.gov/nifti-1>; affines as in nibabel.

pub mod geometry;
mod gunzip;
pub(crate) mod mask;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use nifti::{Endianness, NiftiHeader};

use super::display::Display;
use super::format::refused;
use super::grid::Grid;
use super::label_map::LabelMap;
use super::limits::{MAX_FILE, MAX_VOXELS, check_ratio, check_size};
use super::modality::Modality;
use super::padding;
use super::path::{first_bytes, has_ending};
use super::source::Source;
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
    let read = Bytes::open(path).map(|(bytes, _)| bytes.take(132).read_to_end(&mut start));
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
        let mut start = [0; 4];
        first_bytes(path, &mut start)?;
        if is_header || [348_i32.to_le_bytes(), 348_i32.to_be_bytes()].contains(&start) {
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
    let mut file = NiftiFile::open(path)?;
    file.skip_to(path, selected)?;
    let count = check_size(path, file.size)?;
    let (slope, intercept) = file.scaling(path)?;
    let kind = file.kind;
    if let Bytes::Gzip(_) = file.bytes {
        check_ratio(path, file.num_bytes, (count * kind.size()) as u64)?;
    }
    let mut voxels = if kind.fits_i16() && is_identity(slope, intercept) {
        Voxels::I16(file.read_values(path, count, |bytes, order| kind.i16_of(bytes, order))?)
    } else {
        #[expect(clippy::cast_possible_truncation, reason = "values are kept as f32")]
        let value = |bytes: &[u8], order| (kind.f64_of(bytes, order) * slope + intercept) as f32;
        Voxels::F32(file.read_values(path, count, value)?)
    };
    file.finish(path)?;
    if let Voxels::F32(values) = &mut voxels {
        check_finite(path, values)?;
    }
    let (affine, mut notes) = geometry::affine(path, &file.header, file.size, geometry)?;
    let mut padding = VoxelSet::default();
    notes.extend(padding::add_undeclared(&voxels, &Modality::Unknown, &mut padding));
    let source = Source::Nifti(Forms::of_header(&file.header));
    let display = Display { padding, ..Display::default() };
    Ok(Volume { display, notes, ..Volume::new(voxels, Grid { size: file.size, affine }, source) })
}

/// Reads a label map; the arguments are those of [`open`].
pub(crate) fn open_labels(path: &Path, selected: Option<u32>, geometry: Option<Geometry>) -> Result<LabelMap> {
    let mut file = NiftiFile::open(path)?;
    file.skip_to(path, selected)?;
    let count = check_size(path, file.size)?;
    let (slope, intercept) = file.scaling(path)?;
    let kind = file.kind;
    let (fraction, outside, rounded) = (Cell::new(None), Cell::new(false), Cell::new(0_usize));
    let label = |bytes: &[u8], order| {
        let value = kind.f64_of(bytes, order) * slope + intercept;
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
    let values = file.read_values(path, count, label)?;
    file.finish(path)?;
    let scaled = if is_identity(slope, intercept) {
        String::new()
    } else {
        format!(" after its header's slope {slope} and intercept {intercept}")
    };
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

/// Data types of voxels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
}

/// The bytes of one voxel in the order of the file.
fn bytes_of<const N: usize>(bytes: &[u8], order: Endianness) -> [u8; N] {
    let mut array = [0; N];
    let count = bytes.len().min(N);
    array[..count].copy_from_slice(&bytes[..count]);
    if order == Endianness::Big {
        array.reverse();
    }
    array
}

impl Kind {
    fn from_code(path: &Path, code: i16) -> Result<Self> {
        let other = match code {
            2 => return Ok(Self::U8),
            4 => return Ok(Self::I16),
            8 => return Ok(Self::I32),
            16 => return Ok(Self::F32),
            64 => return Ok(Self::F64),
            256 => return Ok(Self::I8),
            512 => return Ok(Self::U16),
            768 => return Ok(Self::U32),
            1024 => return Ok(Self::I64),
            1280 => return Ok(Self::U64),
            128 | 2304 => "colours (RGB)".to_owned(),
            32 | 1792 | 2048 => "complex numbers".to_owned(),
            other => format!("data type {other}"),
        };
        let reason =
            format!("its voxels are {other}; integers and floating-point numbers of up to 64 bits can be read");
        let (what, values) = match code {
            128 | 2304 => ("one of its colours", "numpy.asarray(image.dataobj)[\"R\"]"),
            32 | 1792 | 2048 => ("its magnitude", "abs(numpy.asarray(image.dataobj)).astype(numpy.float32)"),
            _ => ("its values", "numpy.asarray(image.dataobj).astype(numpy.float32)"),
        };
        let hint = format!(
            "save {what}, for example with nibabel: `nibabel.save(nibabel.Nifti1Image({values}, image.affine), path)`"
        );
        Err(Error::data(path, reason, hint))
    }

    fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    fn fits_i16(self) -> bool {
        matches!(self, Self::U8 | Self::I8 | Self::I16)
    }

    fn i16_of(self, bytes: &[u8], order: Endianness) -> i16 {
        match self {
            Self::U8 => i16::from(bytes[0]),
            Self::I8 => i16::from(bytes[0].cast_signed()),
            _ => i16::from_le_bytes(bytes_of(bytes, order)),
        }
    }

    fn f64_of(self, bytes: &[u8], order: Endianness) -> f64 {
        match self {
            Self::U8 | Self::I8 | Self::I16 => f64::from(self.i16_of(bytes, order)),
            Self::U16 => f64::from(u16::from_le_bytes(bytes_of(bytes, order))),
            Self::U32 => f64::from(u32::from_le_bytes(bytes_of(bytes, order))),
            Self::I32 => f64::from(i32::from_le_bytes(bytes_of(bytes, order))),
            Self::U64 => u64::from_le_bytes(bytes_of(bytes, order)) as f64,
            Self::I64 => i64::from_le_bytes(bytes_of(bytes, order)) as f64,
            Self::F32 => f64::from(f32::from_le_bytes(bytes_of(bytes, order))),
            Self::F64 => f64::from_le_bytes(bytes_of(bytes, order)),
        }
    }
}

/// Plain or compressed bytes of a file.
enum Bytes {
    Plain(BufReader<File>),
    Gzip(Box<Gunzip<BufReader<File>>>),
}

impl Bytes {
    /// A file and its size.
    fn open(path: &Path) -> Result<(Self, u64)> {
        let mut start = [0; 2];
        let gzip = first_bytes(path, &mut start)? == 2 && start == *GZIP;
        let file = files::open(path).map_err(Error::io(path, "read"))?;
        let num_bytes = file.metadata().map_err(Error::io(path, "read"))?.len();
        if num_bytes > MAX_FILE {
            let reason = format!("it is larger than {} GiB", MAX_FILE >> 30);
            return Err(Error::data(path, reason, "crop the volume or split it"));
        }
        let file = BufReader::new(file);
        Ok((if gzip { Self::Gzip(Box::new(Gunzip::new(file))) } else { Self::Plain(file) }, num_bytes))
    }
}

impl Read for Bytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(reader) => reader.read(buffer),
            Self::Gzip(reader) => reader.read(buffer),
        }
    }
}

/// An open file after its header.
struct NiftiFile {
    header: NiftiHeader,
    kind: Kind,
    bytes: Bytes,
    /// Size of the file.
    num_bytes: u64,
    /// Number of bytes that were read of the file of the voxels.
    position: u64,
    size: [usize; 3],
    /// Number of 3-D volumes.
    num_volumes: usize,
}

impl NiftiFile {
    fn open(path: &Path) -> Result<Self> {
        let pair = pair(path)?;
        let [of_header, of_voxels] = pair.as_ref().map_or([path; 2], |pair| pair.each_ref().map(PathBuf::as_path));
        let (mut bytes, mut num_bytes) = Bytes::open(of_header)?;
        let header = read_header(of_header, &mut bytes, pair.is_some())?;
        let mut position = HEADER as u64;
        if &header.magic == PAIR {
            (bytes, num_bytes) = Bytes::open(of_voxels)?;
            position = 0;
        }
        let kind = Kind::from_code(path, header.datatype)?;
        let (size, num_volumes) = dimensions(path, &header)?;
        Ok(Self { header, kind, bytes, num_bytes, position, size, num_volumes })
    }

    /// Skips header extensions and the volumes before the selected one.
    fn skip_to(&mut self, path: &Path, selected: Option<u32>) -> Result<()> {
        let last = self.num_volumes - 1;
        let index = match selected.map(|number| number as usize) {
            None if last == 0 => 0,
            Some(number) if number <= last => number,
            None => {
                let [x, y, z] = self.size;
                let count = self.num_volumes;
                let reason = format!("it is a series of {count} volumes of {x}x{y}x{z} voxels (4-D)");
                let hint = format!("choose one, from `{}#0` to `{}#{last}`", path.display(), path.display());
                return Err(Error::data(path, reason, hint));
            }
            Some(number) => {
                let reason = format!("it has no volume {number}; its {} volumes count from 0", self.num_volumes);
                return Err(Error::data(path, reason, format!("choose a number from 0 to {last}")));
            }
        };
        let offset = self.header.vox_offset;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        let start = match self.position {
            // a pair has its voxels in a file of their own
            0 if (0.0..1e9).contains(&offset) => offset as u64,
            0 => 0,
            _ if (352.0..1e9).contains(&offset) => offset as u64,
            _ => 352,
        };
        let volume = check_size(path, self.size)? * self.kind.size();
        let skipped = start - self.position + (index as u64).saturating_mul(volume as u64);
        let done = io::copy(&mut (&mut self.bytes).take(skipped), &mut io::sink());
        if done.map_err(|error| unreadable(path, &error))? < skipped {
            return Err(self.truncated(path));
        }
        Ok(())
    }

    /// Slope and intercept. A slope of 0 or NaN means that values are not scaled, as in nibabel.
    fn scaling(&self, path: &Path) -> Result<(f64, f64)> {
        let (slope, intercept) = (f64::from(self.header.scl_slope), f64::from(self.header.scl_inter));
        if slope == 0.0 || !slope.is_finite() {
            return Ok((1.0, 0.0));
        }
        if !intercept.is_finite() {
            let reason = "the header has a slope, and an intercept (`scl_inter`) that is NaN or infinite";
            return Err(Error::data(path, reason, "correct the header, or save the file again with nibabel"));
        }
        Ok((slope, intercept))
    }

    fn read_values<T>(&mut self, path: &Path, count: usize, value: impl Fn(&[u8], Endianness) -> T) -> Result<Vec<T>> {
        let (size, order) = (self.kind.size(), self.header.endianness);
        let mut values = Vec::new();
        let mut buffer = vec![0; PIECE.min(count * size)];
        while values.len() < count {
            let bytes = buffer.len().min((count - values.len()) * size);
            match self.bytes.read_exact(&mut buffer[..bytes]) {
                Ok(()) => values.extend(buffer[..bytes].chunks_exact(size).map(|voxel| value(voxel, order))),
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
        if let Bytes::Gzip(_) = self.bytes {
            let rest = (MAX_VOXELS as u64).saturating_mul(8);
            io::copy(&mut (&mut self.bytes).take(rest), &mut io::sink()).map_err(|error| unreadable(path, &error))?;
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
fn read_header(path: &Path, bytes: &mut Bytes, is_pair: bool) -> Result<NiftiHeader> {
    let mut buffer = [0; HEADER];
    bytes.read_exact(&mut buffer).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::data(path, "it is truncated: the header is incomplete", TRUNCATED),
        _ => unreadable(path, &error),
    })?;
    let size = [
        i32::from_le_bytes(bytes_of(&buffer, Endianness::Little)),
        i32::from_be_bytes(bytes_of(&buffer, Endianness::Little)),
    ];
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
