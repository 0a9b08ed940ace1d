//! Reading of MetaImage files, with the voxels behind the header (`.mha`) or in other files (`.mhd`).
//! Source: <https://itk.org/Wiki/ITK/MetaIO/Documentation>; positions as in SimpleITK.

mod write;

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use super::detached::{Encoding, Layout, Skip, attached, detached, header_lines, names_of_pattern};
use super::format::row::{Choice, Format, NO_FORMAT, Writer, has_header};
use super::grid::{Affine, Grid, scale, swap_lps_ras};
use super::limits::check_size;
use super::modality::Modality;
use super::path::number_of;
use super::source::VolumeSource;
use super::stored::{Content, Number, Part, StoredVolume, StoredVoxels, affine_of, check_affine, chosen};
use prsmed_base::error::{Error, Result};

pub(crate) const META_IMAGE: Format = Format {
    name: "a MetaImage file (`.mha`, `.mhd`)",
    endings: &["mha", "mhd"],
    knows: |_, start| is_meta_image(start),
    has_voxels_only: Some(|path| has_header(path, "mhd")),
    volume: Some(|path, choice| open(path, choice)?.volume()),
    labels: Some(|path, choice| open(path, choice)?.labels()),
    write: Some(Writer {
        endings: &["mha"],
        is_on_page: false,
        check: |path, volume| check_affine(path, &volume.grid.affine),
        encode: write::encode,
    }),
    ..NO_FORMAT
};

/// Element types. `MET_LONG` has 32 bits on every machine.
const TYPES: [(&str, Number); 12] = [
    ("MET_CHAR", Number::I8),
    ("MET_UCHAR", Number::U8),
    ("MET_SHORT", Number::I16),
    ("MET_USHORT", Number::U16),
    ("MET_INT", Number::I32),
    ("MET_UINT", Number::U32),
    ("MET_LONG", Number::I32),
    ("MET_ULONG", Number::U32),
    ("MET_LONG_LONG", Number::I64),
    ("MET_ULONG_LONG", Number::U64),
    ("MET_FLOAT", Number::F32),
    ("MET_DOUBLE", Number::F64),
];
/// Units of lengths, in mm.
const UNITS: [(&str, f64); 5] = [("mm", 1.0), ("?", 1.0), ("", 1.0), ("um", 0.001), ("cm", 10.0)];
const EXPORT: &str = "export the file again, for example with `SimpleITK.WriteImage`";
const DATA_FILE: &str = "ElementDataFile";

/// A text that begins with one of two keys and `=`.
fn is_meta_image(start: &[u8]) -> bool {
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let key = std::str::from_utf8(line).ok().and_then(|line| line.split('=').next());
    key.is_some_and(|key| ["ObjectType", "NDims"].contains(&key.trim()))
}

/// The lines `KEY = VALUE` of a header.
struct Header<'a> {
    path: &'a Path,
    fields: BTreeMap<String, String>,
}

impl<'a> Header<'a> {
    fn new(path: &'a Path, lines: &[String]) -> Self {
        let field =
            |line: &String| line.split_once('=').map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()));
        Self { path, fields: lines.iter().filter_map(field).collect() }
    }

    fn wrong(&self, reason: impl Into<String>) -> Error {
        Error::data(self.path, reason.into(), EXPORT)
    }

    /// The value of the first of several names of a field that the header has.
    fn get(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.fields.get(*name)).map(String::as_str)
    }

    fn required(&self, name: &str) -> Result<&str> {
        self.get(&[name]).ok_or_else(|| self.wrong(format!("its header has no field `{name}`")))
    }

    fn is_true(&self, names: &[&str]) -> bool {
        self.get(names).is_some_and(|value| value.starts_with(['T', 't', '1']))
    }

    /// The numbers of a field, of which there must be `num`; `None` without the field.
    fn numbers<T: FromStr>(&self, names: &[&str], num: usize) -> Result<Option<Vec<T>>> {
        let Some(text) = self.get(names) else { return Ok(None) };
        let numbers: Option<Vec<T>> = text.split_whitespace().map(|word| word.parse().ok()).collect();
        let numbers = numbers.filter(|numbers| numbers.len() == num);
        let wrong = || self.wrong(format!("its header does not have {num} numbers in `{}`: `{text}`", names[0]));
        numbers.map(Some).ok_or_else(wrong)
    }

    fn number<T: FromStr>(&self, name: &str, usual: T) -> Result<T> {
        Ok(self.numbers(&[name], 1)?.and_then(|mut numbers| numbers.pop()).unwrap_or(usual))
    }
}

/// A file at its chosen volume.
fn open(path: &Path, choice: &Choice) -> Result<StoredVolume> {
    let mut content = Content::open(path)?;
    let is_last = |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim() == DATA_FILE);
    let (lines, length) = header_lines(&mut content, is_last)?;
    let header = Header::new(path, &lines);
    let wrong = |reason: String| header.wrong(reason);
    if let Some(kind) = header.get(&["ObjectType"]).filter(|kind| *kind != "Image") {
        return Err(wrong(format!("its object has the type `{kind}`, and not `Image`")));
    }
    let num_axes: usize = header.number("NDims", 0)?;
    if !(2..=4).contains(&num_axes) {
        return Err(wrong(format!("its header has NDims = {num_axes}; 2, 3 and 4 can be read")));
    }
    let sizes: Vec<usize> =
        header.numbers(&["DimSize"], num_axes)?.ok_or_else(|| wrong("its header has no field `DimSize`".into()))?;
    let side = |axis: usize| sizes.get(axis).copied().unwrap_or(1);
    let size = [side(0), side(1), side(2)];
    let part = part(&header, size, side(3), choice)?;
    let count = check_size(path, size)?.checked_mul(part.of);
    let layout = layout(&header, count.ok_or_else(|| wrong("its sizes are too large".into()))?)?;
    let mut notes = Vec::new();
    let affine = geometry(&header, num_axes, &mut notes)?;
    notes.extend(Grid { size, affine }.size_note());
    let data = header.required(DATA_FILE)?;
    let content = if data.eq_ignore_ascii_case("local") {
        attached(content, length, layout)?
    } else if data.split_whitespace().next() == Some("LIST") {
        let (names, _) = header_lines(&mut content, |_| false)?;
        let names: Vec<String> =
            names.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
        detached(path, &names, layout)?
    } else {
        detached(path, &names_of_pattern(path, data)?.unwrap_or_else(|| vec![data.to_owned()]), layout)?
    };
    let is_big_endian =
        layout.encoding != Encoding::Text && header.is_true(&["BinaryDataByteOrderMSB", "ElementByteOrderMSB"]);
    let stored = StoredVoxels { content, number: layout.number, is_big_endian, scaling: [1.0, 0.0], size, part };
    let modality = header.get(&["Modality"]).and_then(|code| code.strip_prefix("MET_MOD_")).map_or("", |code| code);
    let modality = Modality::from_code(if modality == "UNKNOWN" || modality == "OTHER" { "" } else { modality });
    Ok(StoredVolume { stored, affine, modality, source: VolumeSource::Other, notes })
}

/// The part of one of several volumes, or of one of several values at each voxel.
fn part(header: &Header, [x, y, z]: [usize; 3], num_volumes: usize, choice: &Choice) -> Result<Part> {
    let (path, num_values) = (header.path, header.number("ElementNumberOfChannels", 1_usize)?);
    check_size(path, [num_values, num_volumes, 1])?;
    let selected = number_of(path, choice.selected)?;
    match (num_values, num_volumes) {
        (1, num) => {
            let several = || format!("it is a series of {num} volumes of {x}x{y}x{z} voxels (4-D)");
            Ok(Part { run: check_size(path, [x, y, z])?, of: num, chosen: chosen(path, num, selected, several)? })
        }
        (num, 1) => {
            let several = || format!("it has {num} values at each of {x}x{y}x{z} voxels (`ElementNumberOfChannels`)");
            Ok(Part { run: 1, of: num, chosen: chosen(path, num, selected, several)? })
        }
        _ => Err(header.wrong("it has several volumes, with several values at each voxel")),
    }
}

fn layout(header: &Header, count: usize) -> Result<Layout> {
    let name = header.required("ElementType")?;
    let number = TYPES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number).ok_or_else(|| {
        header.wrong(format!("its voxels have the type `{name}`; `MET_CHAR` to `MET_DOUBLE` can be read"))
    })?;
    let is_text = header.get(&["BinaryData"]).is_some() && !header.is_true(&["BinaryData"]);
    let encoding = match (header.is_true(&["CompressedData"]), is_text) {
        (false, false) => Encoding::Raw,
        (true, _) => Encoding::Deflate,
        (false, true) => Encoding::Text,
    };
    let skip = match (header.number("HeaderSize", 0_i64)?, encoding) {
        (-1, Encoding::Raw) => Skip::AllButLast,
        (bytes, _) => {
            let wrong = || header.wrong(format!("its header has the wrong `HeaderSize` {bytes}"));
            Skip::Stored(u64::try_from(bytes).map_err(|_| wrong())?)
        }
    };
    let number = if encoding == Encoding::Text { Number::F64 } else { number };
    Ok(Layout { encoding, skip, number, count })
}

/// The affine of the header, whose coordinates are those of the patient (LPS).
fn geometry(header: &Header, num_axes: usize, notes: &mut Vec<String>) -> Result<Affine> {
    let spacing = header.numbers::<f64>(&["ElementSpacing", "ElementSize"], num_axes)?;
    let matrix = header.numbers::<f64>(&["TransformMatrix", "Rotation", "Orientation"], num_axes * num_axes)?;
    let origin = header.numbers::<f64>(&["Offset", "Origin", "Position"], num_axes)?;
    let unit = header.get(&["DistanceUnits"]).unwrap_or_default();
    let factor = UNITS.iter().find(|(known, _)| *known == unit).map(|(_, factor)| *factor);
    let factor =
        factor.ok_or_else(|| header.wrong(format!("its lengths have the unit `{unit}`, and not mm, um or cm")))?;
    if factor != 1.0 {
        notes.push(format!("lengths of the header are in {unit}; they were converted to millimetres"));
    }
    if spacing.is_none() {
        notes.push("the header has no voxel size: 1 mm is assumed".to_owned());
    }
    if matrix.is_none() || num_axes == 2 {
        notes.push(
            "the header has no directions: the voxel axes are assumed to be left, posterior and superior (LPS), as in \
             SimpleITK; left and right may be swapped"
                .to_owned(),
        );
    }
    let direction = |axis: usize, row: usize| {
        let usual = if axis == row { 1.0 } else { 0.0 };
        let is_there = axis < num_axes && row < num_axes;
        matrix.as_ref().filter(|_| is_there).map_or(usual, |matrix| matrix[axis * num_axes + row])
    };
    let step = |axis: usize| {
        let mm = spacing.as_ref().map_or(1.0, |spacing| spacing[axis]) * factor;
        scale(swap_lps_ras([0, 1, 2].map(|row| direction(axis, row))), mm)
    };
    let steps: Vec<[f64; 3]> = (0..num_axes.min(3)).map(step).collect();
    let place = |row: usize| origin.as_ref().and_then(|origin| origin.get(row)).map_or(0.0, |mm| mm * factor);
    let affine = affine_of(header.path, &steps, swap_lps_ras([place(0), place(1), place(2)]), notes)?;
    notes.extend(contradiction(header, &affine));
    Ok(affine)
}

/// A note about letters of the directions that are not those of the matrix. They say where the axes come from.
fn contradiction(header: &Header, affine: &Affine) -> Option<String> {
    let stated = header.get(&["AnatomicalOrientation"]).filter(|text| text.len() == 3 && !text.contains('?'))?;
    let opposite = |letter: char| match letter {
        'R' => 'L',
        'L' => 'R',
        'A' => 'P',
        'P' => 'A',
        'I' => 'S',
        _ => 'I',
    };
    let of_matrix: String = affine.orientation().chars().map(opposite).collect();
    (stated != of_matrix).then(|| {
        format!(
            "the header has the orientation `{}`, and a matrix with the orientation `{of_matrix}`, which is used, as in \
             SimpleITK",
            stated.escape_debug()
        )
    })
}

#[cfg(test)]
mod tests;
