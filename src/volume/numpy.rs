//! Reading of arrays of NumPy: one in a file (`.npy`), or several with names (`.npz`).
//! Source: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.
//!
//! Arrays with Python objects are refused: to read them is to run a program of the file.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::CrcReader;
use flate2::bufread::DeflateDecoder;
use zip::{CompressionMethod, ZipArchive};

use super::dicom::is_zip;
use super::format::row::{Choice, Format, NO_FORMAT};
use super::grid::Grid;
use super::label_map::LabelMap;
use super::limits::check_size;
use super::modality::Modality;
use super::path::first_names;
use super::source::VolumeSource;
use super::stored::{Content, Number, Part, StoredVolume, StoredVoxels, TRUNCATED, affine_of, check_file};
use super::voxels::{Volume, Voxels};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

pub(crate) const NPY: Format = Format {
    name: "an NPY file (a NumPy array)",
    endings: &["npy"],
    knows: |_, start| start.starts_with(MAGIC),
    volume: Some(|path, choice| one_array(path, choice)?.volume()),
    labels: Some(|path, choice| one_array(path, choice)?.labels()),
    ..NO_FORMAT
};

pub(crate) const NPZ: Format = Format {
    name: "an NPZ file (NumPy arrays)",
    endings: &["npz"],
    knows: |_, start| is_zip(start) && is_array(start),
    volume: Some(|path, choice| named_array(path, choice, "imgs")?.volume()),
    labels: Some(|path, choice| named_array(path, choice, "gts")?.labels()),
    ..NO_FORMAT
};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Most bytes of the header of an array; NumPy writes 118 for the shapes that can be read.
const MAX_HEADER: usize = 1 << 16;
/// Most arrays of a file.
const MAX_ARRAYS: usize = 1000;
const SAVE: &str = "save a plain array, for example `numpy.savez_compressed(path, imgs=image.astype(numpy.float32))`";
const TYPES: [(&str, Number); 11] = [
    ("b1", Number::U8),
    ("u1", Number::U8),
    ("i1", Number::I8),
    ("u2", Number::U16),
    ("i2", Number::I16),
    ("u4", Number::U32),
    ("i4", Number::I32),
    ("u8", Number::U64),
    ("i8", Number::I64),
    ("f4", Number::F32),
    ("f8", Number::F64),
];

/// Whether the name of the first entry of a zip is that of an array.
fn is_array(start: &[u8]) -> bool {
    let length = start.get(26..28).map_or(0, |length| usize::from(u16::from_le_bytes([length[0], length[1]])));
    start.get(30..30 + length).is_some_and(|name| name.ends_with(b".npy"))
}

/// An array of a file, at its first number.
struct Array {
    content: Content,
    number: Number,
    is_big_endian: bool,
    shape: Vec<usize>,
    /// The first axis is contiguous, and not the last one.
    is_fortran: bool,
    /// Voxel size in mm along columns, rows and slices.
    spacing: Option<[f64; 3]>,
}

impl Array {
    fn read(mut content: Content) -> Result<Self> {
        let text = header(&mut content)?;
        let wrong = |reason: String| Error::data(&content.path, reason, SAVE);
        let entry = |key: &str| {
            let (_, rest) = text.split_once(&format!("'{key}'"))?;
            Some(rest.trim_start().strip_prefix(':')?.trim_start())
        };
        let (Some(kind), Some(order), Some(shape)) = (entry("descr"), entry("fortran_order"), entry("shape")) else {
            return Err(wrong("its header has no type, no order or no shape".to_owned()));
        };
        let shape = shape.strip_prefix('(').and_then(|shape| shape.split_once(')')).map_or("", |(shape, _)| shape);
        let sides = shape.split(',').map(str::trim).filter(|side| !side.is_empty());
        let shape: Option<Vec<usize>> = sides.map(|side| side.parse().ok()).collect();
        let shape = shape.ok_or_else(|| wrong("its header has a wrong shape".to_owned()))?;
        let kind = kind.strip_prefix('\'').and_then(|kind| kind.split_once('\'')).map_or("", |(kind, _)| kind);
        let number = TYPES.iter().find(|(name, _)| kind.get(1..) == Some(*name)).map(|(_, number)| *number);
        let number = number.ok_or_else(|| {
            let shown: String = kind.chars().filter(char::is_ascii_graphic).take(20).collect();
            wrong(format!("its array has the type `{shown}`; integers, `float32` and `float64` can be read"))
        })?;
        let (is_big_endian, is_fortran) = (kind.starts_with('>'), order.starts_with("True"));
        Ok(Self { content, number, is_big_endian, shape, is_fortran, spacing: None })
    }

    /// Sides without those of one element that are no sides of an image, and the number of values of each pixel: three of colours.
    fn sides(&self) -> Result<(Vec<usize>, usize)> {
        let mut sides = self.shape.clone();
        while sides.len() > 3 && sides[0] == 1 {
            sides.remove(0);
        }
        let is_colour = matches!(sides[..], [_, _, 3]) && self.number == Number::U8 && !self.is_fortran;
        let num_values = if is_colour { sides.pop().unwrap_or(1) } else { 1 };
        if matches!(sides[..], [_, _, 1]) {
            sides.pop();
        }
        if !matches!(sides.len(), 2 | 3) {
            let reason = format!("its array has the shape {:?}", self.shape);
            let hint = "save one image (rows, columns), one volume (slices, rows, columns), or RGB of 8 bits (rows, columns, 3)";
            return Err(Error::data(&self.content.path, reason, hint));
        }
        Ok((sides, num_values))
    }

    /// The voxels on their grid.
    fn stored(self) -> Result<StoredVolume> {
        let (sides, _) = self.sides()?;
        let path = self.content.path.clone();
        let mut notes = vec![
            "the file has no directions: the voxel axes are assumed to be left, posterior and superior (LPS), from the last \
             axis of the array to the first; left and right may be swapped"
                .to_owned(),
        ];
        notes.push(match self.spacing {
            Some([x, y, z]) => {
                format!("the array `spacing` is taken for voxels of {x} x {y} x {z} mm (columns, rows, slices)")
            }
            None => "the file has no voxel size: 1 mm is assumed".to_owned(),
        });
        let [x, y, z] = self.spacing.unwrap_or([1.0; 3]);
        // columns, rows, slices
        let mut steps = vec![[-x, 0.0, 0.0], [0.0, -y, 0.0], [0.0, 0.0, z]];
        steps.truncate(sides.len());
        let mut along: Vec<usize> = sides.into_iter().rev().collect();
        if self.is_fortran {
            (steps, along) = (steps.into_iter().rev().collect(), along.into_iter().rev().collect());
        }
        let size = [along[0], along[1], along.get(2).copied().unwrap_or(1)];
        check_size(&path, size)?;
        let affine = affine_of(&path, &steps, [0.0; 3], &mut notes)?;
        let Self { content, number, is_big_endian, .. } = self;
        let stored = StoredVoxels { content, number, is_big_endian, scaling: [1.0, 0.0], size, part: Part::ALL };
        Ok(StoredVolume { stored, affine, modality: Modality::Unknown, source: VolumeSource::Other, notes })
    }

    fn volume(self) -> Result<Volume> {
        let (sides, num_values) = self.sides()?;
        if num_values == 1 {
            return self.stored()?.volume();
        }
        let path = self.content.path.clone();
        let [height, width] = [sides[0], sides[1]];
        let values_of = Self { shape: vec![height, width * num_values], ..self };
        let Volume { voxels: Voxels::I16(values), mut notes, source, grid, .. } = values_of.stored()?.volume()? else {
            return Err(Error::data(&path, "its colours have no 8 bits", SAVE));
        };
        notes.retain(|note| !note.contains("padding"));
        let byte = |value: &i16| u8::try_from(*value).unwrap_or_default();
        let colours = values.chunks_exact(num_values).map(|values| [0, 1, 2].map(|at| byte(&values[at]))).collect();
        let grid = Grid { size: [width, height, 1], ..grid };
        Ok(Volume { notes, ..Volume::new(Voxels::Rgb(colours), grid, source) })
    }

    fn labels(self) -> Result<LabelMap> {
        if self.sides()?.1 > 1 {
            let hint = "save one label for each pixel, as an array of integers";
            return Err(Error::data(&self.content.path, "its array has colours, and no labels", hint));
        }
        self.stored()?.labels()
    }
}

/// The text of the header: a dictionary of Python.
fn header(content: &mut Content) -> Result<String> {
    let damaged = |path: &Path| Error::data(path, "its array has no valid header", TRUNCATED);
    let mut start = [0; 10];
    let read = content.bytes.read_exact(&mut start);
    read.map_err(|_| damaged(&content.path))?;
    let mut length = usize::from(u16::from_le_bytes([start[8], start[9]]));
    if start[6] > 1 {
        let mut more = [0; 2];
        let read = content.bytes.read_exact(&mut more);
        read.map_err(|_| damaged(&content.path))?;
        length |= usize::from(u16::from_le_bytes(more)) << 16;
    }
    if !start.starts_with(MAGIC) || length > MAX_HEADER {
        return Err(damaged(&content.path));
    }
    let mut text = vec![0; length];
    let read = content.bytes.read_exact(&mut text);
    read.map_err(|_| damaged(&content.path))?;
    String::from_utf8(text).map_err(|_| damaged(&content.path))
}

fn one_array(path: &Path, choice: &Choice) -> Result<Array> {
    if choice.selected.is_some() {
        let hint = format!("write the path without `#`: `{}`", path.display());
        return Err(Error::data(path, "it has one array, of which nothing is chosen", hint));
    }
    Array::read(Content::open(path)?)
}

/// The chosen array of a file, or the only one, or the one with the usual name.
fn named_array(path: &Path, choice: &Choice, usual: &str) -> Result<Array> {
    let file = files::open(path).map_err(Error::io(path, "read"))?;
    check_file(path, file.metadata().map_err(Error::io(path, "read"))?.len())?;
    let damaged = |_| Error::data(path, "its directory is damaged", TRUNCATED);
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(damaged)?;
    if archive.len() > MAX_ARRAYS {
        let reason = format!("it has more than {MAX_ARRAYS} files");
        return Err(Error::data(path, reason, "save the arrays that are needed in a file of their own"));
    }
    let names: Vec<String> =
        archive.file_names().filter_map(|name| Some(name.strip_suffix(".npy")?.to_owned())).collect();
    let images: Vec<&String> = names.iter().filter(|name| *name != "spacing").collect();
    let name = match (choice.selected, images.as_slice()) {
        (Some(name), _) => names.iter().find(|known| *known == name),
        (None, [only]) => Some(*only),
        (None, _) => names.iter().find(|name| *name == usual),
    };
    let name = name.ok_or_else(|| {
        let mut quoted: Vec<String> = names.iter().map(|name| format!("`{}`", name.escape_debug())).collect();
        quoted.sort();
        let reason = match choice.selected {
            Some(selected) => format!("it has no array `{selected}`, but {}", first_names(&quoted)),
            None => format!("it has {} arrays: {}", quoted.len(), first_names(&quoted)),
        };
        Error::data(path, reason, format!("choose one by its name, as in `{}#{usual}`", path.display()))
    })?;
    let spacing =
        names.iter().any(|name| name == "spacing").then(|| spacing(path, entry(path, &mut archive, "spacing")?));
    let spacing = spacing.transpose()?;
    Ok(Array { spacing, ..Array::read(entry(path, &mut archive, name)?)? })
}

/// Three voxel sizes of an array.
fn spacing(path: &Path, content: Content) -> Result<[f64; 3]> {
    let mut array = Array::read(content)?;
    let shape = std::mem::take(&mut array.shape);
    let is_of_three = shape == [3];
    let array = Array { shape: vec![1, 3], ..array };
    let voxels = if is_of_three { array.stored()?.stored.voxels()? } else { Voxels::I16(Vec::new()) };
    // 0.7 is 0.7 also as a number of 32 bits
    let sizes = [0, 1, 2].map(|axis| voxels.get(axis).map_or(0.0, |mm| mm.to_string().parse::<f64>().unwrap_or(0.0)));
    if sizes.iter().all(|size| *size > 0.0) {
        return Ok(sizes);
    }
    let reason = "its array `spacing` is not three positive numbers in mm, for columns, rows and slices";
    Err(Error::data(path, reason, "save it again without the array, or with the right numbers"))
}

/// The content of a file of the archive.
fn entry(path: &Path, archive: &mut ZipArchive<BufReader<File>>, name: &str) -> Result<Content> {
    let wrong = |reason: &str| Error::data(path, format!("its array `{}` {reason}", name.escape_debug()), SAVE);
    let index = archive.index_for_name(&format!("{name}.npy")).ok_or_else(|| wrong("is missing"))?;
    let found = archive.by_index_raw(index).map_err(|_| wrong("is damaged"))?;
    let (method, start, length) = (found.compression(), found.data_start(), found.compressed_size());
    let (checksum, is_encrypted) = (found.crc32(), found.encrypted());
    drop(found);
    if is_encrypted {
        return Err(wrong("is encrypted"));
    }
    let mut file = files::open(path).map_err(Error::io(path, "read"))?;
    file.seek(SeekFrom::Start(start)).map_err(Error::io(path, "read"))?;
    let stored = BufReader::new(file.take(length));
    let bytes: Box<dyn Read> = match method {
        CompressionMethod::Stored => Box::new(stored),
        CompressionMethod::Deflated => Box::new(DeflateDecoder::new(stored)),
        _ => return Err(wrong("is compressed in a way that NumPy does not write")),
    };
    let bytes = BufReader::new(Checked { bytes: CrcReader::new(bytes), checksum });
    Ok(Content { path: path.to_owned(), bytes: Box::new(bytes), is_compressed: true, num_bytes: length })
}

/// Content whose checksum is compared at its end.
struct Checked<R> {
    bytes: CrcReader<R>,
    checksum: u32,
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(buffer)?;
        if read == 0 && !buffer.is_empty() && self.bytes.crc().sum() != self.checksum {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its checksum is wrong"));
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests;
