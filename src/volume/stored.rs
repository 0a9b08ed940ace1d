//! Voxels as files store them: numbers of one type, one after the other, compressed or not.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::display::Display;
use super::grid::{Affine, Grid, cross, unit};
use super::gunzip::Gunzip;
use super::label_map::LabelMap;
use super::limits::{MAX_FILE, MAX_VOXELS, check_ratio, check_size};
use super::modality::Modality;
use super::padding;
use super::path::start_of;
use super::source::VolumeSource;
use super::voxel_set::VoxelSet;
use super::voxels::{Volume, Voxels};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Voxels are read in pieces, so that a wrong size in the header takes no memory.
const PIECE: usize = 1 << 20;
/// Largest distance of a label from a whole number: slopes that are not exactly 1 leave one.
const LABEL_TOLERANCE: f64 = 1e-3;
/// What to do about a truncated file.
pub(crate) const TRUNCATED: &str = "copy or download the file again";
/// First bytes of a gzip file.
pub(crate) const GZIP: &[u8; 2] = &[0x1f, 0x8b];

/// The type of stored numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
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

impl Number {
    /// Bytes of a number.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    fn value(self, bytes: &[u8], is_big_endian: bool) -> f64 {
        match self {
            Self::U8 => f64::from(bytes[0]),
            Self::I8 => f64::from(bytes[0].cast_signed()),
            Self::U16 => f64::from(u16::from_le_bytes(little_endian(bytes, is_big_endian))),
            Self::I16 => f64::from(i16::from_le_bytes(little_endian(bytes, is_big_endian))),
            Self::U32 => f64::from(u32::from_le_bytes(little_endian(bytes, is_big_endian))),
            Self::I32 => f64::from(i32::from_le_bytes(little_endian(bytes, is_big_endian))),
            Self::U64 => u64::from_le_bytes(little_endian(bytes, is_big_endian)) as f64,
            Self::I64 => i64::from_le_bytes(little_endian(bytes, is_big_endian)) as f64,
            Self::F32 => f64::from(f32::from_le_bytes(little_endian(bytes, is_big_endian))),
            Self::F64 => f64::from_le_bytes(little_endian(bytes, is_big_endian)),
        }
    }
}

/// The bytes of one number, the least significant one first.
pub(crate) fn little_endian<const N: usize>(bytes: &[u8], is_big_endian: bool) -> [u8; N] {
    let mut array = bytes.first_chunk().copied().unwrap_or([0; N]);
    if is_big_endian {
        array.reverse();
    }
    array
}

/// The content of a file, decompressed.
pub(crate) struct Content {
    /// The file that errors name.
    pub(crate) path: PathBuf,
    pub(crate) bytes: Box<dyn BufRead>,
    pub(crate) is_compressed: bool,
    /// Size of the file, or of all files with the voxels.
    pub(crate) num_bytes: u64,
}

impl Content {
    /// Opens a file; gzip files are decompressed.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let is_compressed = start_of(path)?.starts_with(GZIP);
        let file = files::open(path).map_err(Error::io(path, "read"))?;
        let num_bytes = file.metadata().map_err(Error::io(path, "read"))?.len();
        check_file(path, num_bytes)?;
        let file = BufReader::new(file);
        let bytes: Box<dyn BufRead> =
            if is_compressed { Box::new(BufReader::new(Gunzip::new(file))) } else { Box::new(file) };
        Ok(Self { path: path.to_owned(), bytes, is_compressed, num_bytes })
    }

    /// Passes over bytes; the result is false if there are fewer.
    pub(crate) fn skip(&mut self, count: u64) -> Result<bool> {
        let done = io::copy(&mut (&mut self.bytes).take(count), &mut io::sink());
        Ok(done.map_err(|error| self.unreadable(&error))? == count)
    }

    /// Reads the rest of compressed content, so that its checksum is compared.
    fn finish(&mut self) -> Result<()> {
        if self.is_compressed {
            self.skip((MAX_VOXELS as u64).saturating_mul(8))?;
        }
        Ok(())
    }

    pub(crate) fn unreadable(&self, error: &io::Error) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Error::data(&self.path, "the compressed file is truncated", TRUNCATED);
        }
        Error::data(&self.path, format!("it cannot be read: {error}"), TRUNCATED)
    }
}

/// Refuses a file that is larger than a volume may be.
pub(crate) fn check_file(path: &Path, num_bytes: u64) -> Result<()> {
    if num_bytes <= MAX_FILE {
        return Ok(());
    }
    let reason = format!("it is larger than {} GiB", MAX_FILE >> 30);
    Err(Error::data(path, reason, "crop the volume or split it"))
}

/// The numbers of a volume among those of a file: groups of `run` numbers, of which each group number `chosen` of `of` belongs
/// to it. A run of one number is a value of several at each voxel; a run of all voxels is one of several volumes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) run: usize,
    pub(crate) of: usize,
    pub(crate) chosen: usize,
}

impl Part {
    /// All numbers.
    pub(crate) const ALL: Self = Self { run: 1, of: 1, chosen: 0 };
}

/// The voxels of a volume in their file.
pub(crate) struct StoredVoxels {
    /// The file, at the first number.
    pub(crate) content: Content,
    pub(crate) number: Number,
    pub(crate) is_big_endian: bool,
    /// Slope and intercept.
    pub(crate) scaling: [f64; 2],
    pub(crate) size: [usize; 3],
    pub(crate) part: Part,
}

impl StoredVoxels {
    /// The scaled values, which are checked to be finite.
    pub(crate) fn voxels(mut self) -> Result<Voxels> {
        let count = check_size(&self.content.path, self.size)?;
        if self.content.is_compressed {
            check_ratio(&self.content.path, self.content.num_bytes, (count * self.number.size()) as u64)?;
        }
        let [slope, intercept] = self.scaling;
        let fits = matches!(self.number, Number::U8 | Number::I8 | Number::I16);
        #[expect(clippy::cast_possible_truncation, reason = "fits, or is kept as f32")]
        let voxels = if fits && is_identity(self.scaling) {
            Voxels::I16(self.read_values(|value| value as i16)?)
        } else {
            Voxels::F32(self.read_values(|value| (value * slope + intercept) as f32)?)
        };
        self.content.finish()?;
        if let Voxels::F32(values) = &voxels {
            check_finite(&self.content.path, values)?;
        }
        Ok(voxels)
    }

    /// The scaled values as labels, and a note if some were not exactly whole numbers.
    pub(crate) fn labels(mut self) -> Result<(Vec<u16>, Option<String>)> {
        let [slope, intercept] = self.scaling;
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
        let values = self.read_values(label)?;
        self.content.finish()?;
        let path = &self.content.path;
        let scaling = || format!(" after its header's slope {slope} and intercept {intercept}");
        let scaled = if is_identity(self.scaling) { String::new() } else { scaling() };
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
        let (count, all) = (rounded.get(), values.len());
        let note = || {
            format!("{count} of {all} labels were within {LABEL_TOLERANCE} of whole numbers{scaled}; they were rounded")
        };
        Ok((values, (count > 0).then(note)))
    }

    fn read_values<T>(&mut self, value: impl Fn(f64) -> T) -> Result<Vec<T>> {
        let (number, is_big_endian, size) = (self.number, self.is_big_endian, self.number.size());
        let count = check_size(&self.content.path, self.size)?;
        let Part { run, of, chosen } = self.part;
        if !self.content.skip((chosen as u64).saturating_mul((run * size) as u64))? {
            return Err(self.truncated());
        }
        // up to the last number of the part
        let mut left = (count / run - 1) * run * of + run;
        let mut start = 0;
        let mut values = Vec::new();
        let mut buffer = vec![0; PIECE.min(left.saturating_mul(size))];
        while left > 0 {
            let num = (buffer.len() / size).min(left);
            let bytes = &mut buffer[..num * size];
            match self.content.bytes.read_exact(bytes) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(self.truncated()),
                Err(error) => return Err(self.content.unreadable(&error)),
            }
            let numbers = bytes.chunks_exact(size);
            let value = |bytes: &[u8]| value(number.value(bytes, is_big_endian));
            if of == 1 {
                values.extend(numbers.map(value));
            } else {
                let of_part = numbers.zip(start..).filter(|(_, at)| (at / run).is_multiple_of(of));
                values.extend(of_part.map(|(bytes, _)| value(bytes)));
            }
            start += num;
            left -= num;
        }
        Ok(values)
    }

    pub(crate) fn truncated(&self) -> Error {
        let [x, y, z] = self.size;
        let reason = format!("it is truncated: the header promises {x}x{y}x{z} voxels, and the file has fewer");
        Error::data(&self.content.path, reason, TRUNCATED)
    }
}

/// The voxels of a file with their position.
pub(crate) struct StoredVolume {
    pub(crate) stored: StoredVoxels,
    pub(crate) affine: Affine,
    pub(crate) modality: Modality,
    pub(crate) source: VolumeSource,
    pub(crate) notes: Vec<String>,
}

impl StoredVolume {
    /// Reads the voxels of an image.
    pub(crate) fn volume(self) -> Result<Volume> {
        let Self { stored, affine, modality, source, mut notes } = self;
        let size = stored.size;
        let voxels = stored.voxels()?;
        let mut padding = VoxelSet::default();
        notes.extend(padding::add_undeclared(&voxels, &modality, &mut padding));
        let display = Display { padding, ..Display::default() };
        Ok(Volume { modality, display, notes, ..Volume::new(voxels, Grid { size, affine }, source) })
    }

    /// Reads the voxels as labels.
    pub(crate) fn labels(self) -> Result<LabelMap> {
        let Self { stored, affine, mut notes, .. } = self;
        let size = stored.size;
        let (values, note) = stored.labels()?;
        notes.extend(note);
        Ok(LabelMap::new(values, Grid { size, affine }, notes))
    }
}

/// The affine of two or three steps in mm along the voxel axes, and the position of the first voxel. A flat image gets a
/// thickness of 1 mm, with a note.
///
/// # Errors
/// [`Error::Data`] for a singular affine.
pub(crate) fn affine_of(path: &Path, steps: &[[f64; 3]], origin: [f64; 3], notes: &mut Vec<String>) -> Result<Affine> {
    let steps = match *steps {
        [a, b, c] => [a, b, c],
        [a, b] => {
            notes.push("it is a flat image: a thickness of 1 mm is assumed".to_owned());
            [a, b, unit(cross(a, b))]
        }
        _ => return Err(Error::data(path, "it is neither a flat image nor a volume", "save two or three axes")),
    };
    let affine = Affine::from_columns(steps, origin);
    check_affine(path, &affine)?;
    Ok(affine)
}

/// Refuses an affine that places no voxels.
pub(crate) fn check_affine(path: &Path, affine: &Affine) -> Result<()> {
    if affine.inverse().is_some() && affine.spacing().iter().all(|mm| mm.is_finite()) {
        return Ok(());
    }
    let reason = "the directions of its voxel axes are singular or not finite, or a spacing is 0";
    Err(Error::data(path, reason, "correct the header, or export the file again"))
}

fn is_identity([slope, intercept]: [f64; 2]) -> bool {
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

/// The index of the selected one of several volumes in a file; `several` says what they are.
pub(crate) fn chosen(path: &Path, num: usize, selected: Option<u32>, several: impl Fn() -> String) -> Result<usize> {
    let last = num - 1;
    match selected.map(|number| number as usize) {
        None if last == 0 => Ok(0),
        Some(number) if number <= last => Ok(number),
        None => {
            let shown = path.display();
            Err(Error::data(path, several(), format!("choose one, from `{shown}#0` to `{shown}#{last}`")))
        }
        Some(number) => {
            let reason = format!("it has no volume {number}; its {num} volumes count from 0");
            Err(Error::data(path, reason, format!("choose a number from 0 to {last}")))
        }
    }
}
