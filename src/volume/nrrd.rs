//! Reading of NRRD files, also with the voxels in other files (`.nhdr`), and of segmentations of 3D Slicer.
//! Source: <https://teem.sourceforge.net/nrrd/format.html>; positions as in SimpleITK.

mod fields;
mod segments;
mod write;

use std::path::Path;

use super::detached::{Encoding, Layout, Skip, attached, detached, header_lines};
use super::format::row::{Choice, Format, NO_FORMAT, Writer, has_header};
use super::grid::Grid;
use super::label_map::LabelMap;
use super::limits::check_size;
use super::modality::Modality;
use super::path::number_of;
use super::source::VolumeSource;
use super::stored::{Content, Number, Part, StoredVolume, StoredVoxels, affine_of, check_affine, chosen};
use fields::{EXPORT, Header};
use prsmed_base::error::{Error, Result};

pub(crate) const NRRD: Format = Format {
    name: "an NRRD file",
    // a dot, so that the name of `a.seg.nrrd` is `a`
    endings: &["nrrd", "seg.nrrd", "nhdr"],
    knows: |_, start| start.starts_with(b"NRRD0"),
    has_voxels_only: Some(|path| has_header(path, "nhdr")),
    volume: Some(|path, choice| NrrdFile::open(path)?.part(choice)?.volume()),
    labels: Some(labels),
    write: Some(Writer {
        endings: &["nrrd"],
        is_on_page: false,
        check: |path, volume| check_affine(path, &volume.grid.affine),
        encode: write::encode,
    }),
    ..NO_FORMAT
};

/// Spaces with their signs along right, anterior and superior.
const SPACES: [(&[&str], [f64; 3]); 3] = [
    (&["right-anterior-superior", "ras"], [1.0, 1.0, 1.0]),
    (&["left-anterior-superior", "las"], [-1.0, 1.0, 1.0]),
    (&["left-posterior-superior", "lps"], [-1.0, -1.0, 1.0]),
];
/// In SimpleITK, coordinates without a space are LPS.
const LPS: [f64; 3] = SPACES[2].1;
/// Kinds of axes along which voxels lie in space.
const SPATIAL: [&str; 4] = ["domain", "space", "???", "none"];
/// Units of lengths, in mm.
const UNITS: [(&[&str], f64); 4] = [
    (&["", "mm", "millimeter", "millimeters"], 1.0),
    (&["cm"], 10.0),
    (&["m"], 1000.0),
    (&["um", "µm", "μm", "micron", "microns"], 0.001),
];
const TYPES: [(&[&str], Number); 10] = [
    (&["signed char", "int8", "int8_t"], Number::I8),
    (&["uchar", "unsigned char", "uint8", "uint8_t"], Number::U8),
    (&["short", "short int", "signed short", "signed short int", "int16", "int16_t"], Number::I16),
    (&["ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"], Number::U16),
    (&["int", "signed int", "int32", "int32_t"], Number::I32),
    (&["uint", "unsigned int", "uint32", "uint32_t"], Number::U32),
    (
        &["longlong", "long long", "long long int", "signed long long", "signed long long int", "int64", "int64_t"],
        Number::I64,
    ),
    (&["ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"], Number::U64),
    (&["float"], Number::F32),
    (&["double"], Number::F64),
];

fn find<T: Copy>(table: &[(&[&str], T)], name: &str) -> Option<T> {
    table.iter().find(|(names, _)| names.contains(&name)).map(|(_, value)| *value)
}

/// Which axes of the array lie in space.
struct Axes {
    sizes: Vec<usize>,
    spatial: Vec<usize>,
    /// The axis with several volumes, or several values at each voxel, and its kind.
    other: Option<(usize, String)>,
}

impl Axes {
    fn of(path: &Path, header: &Header) -> Result<Self> {
        let sizes: Vec<usize> = header.numbers(path, "sizes")?;
        let dimension: Vec<usize> = header.numbers(path, "dimension")?;
        let wrong = |reason: String| Error::data(path, reason, EXPORT);
        if dimension != [sizes.len()] {
            return Err(wrong(format!("its header has {} sizes and the dimension {dimension:?}", sizes.len())));
        }
        let kinds: Vec<String> = header.words("kinds");
        let directions = header.vectors(path, "space directions")?;
        let num_listed = [kinds.len(), directions.as_ref().map_or(0, Vec::len)];
        if num_listed.iter().any(|num| *num != 0 && *num != sizes.len()) {
            return Err(wrong(format!(
                "its header does not have one kind or direction for each of {} axes",
                sizes.len()
            )));
        }
        let is_spatial = |axis: &usize| match &directions {
            // a fourth number is the step in time
            Some(directions) => directions[*axis].as_ref().is_some_and(|step| step.iter().take(3).any(|mm| *mm != 0.0)),
            None => kinds.get(*axis).is_none_or(|kind| SPATIAL.contains(&kind.as_str())),
        };
        let (spatial, others): (Vec<usize>, Vec<usize>) = (0..sizes.len()).partition(is_spatial);
        let kind = |axis: usize| kinds.get(axis).cloned().unwrap_or_else(|| "none".to_owned());
        if let Some(axis) =
            others.iter().find(|axis| directions.is_some() && SPATIAL[..2].contains(&kind(**axis).as_str()))
        {
            let reason =
                format!("axis {} of its array has the kind `{}`, and no direction in space", axis + 1, kind(*axis));
            return Err(Error::data(path, reason, "write the step between its slices into `space directions`"));
        }
        match (spatial.len(), others.as_slice()) {
            (2 | 3, []) => Ok(Self { sizes, spatial, other: None }),
            (2 | 3, &[axis]) => Ok(Self { sizes, spatial, other: Some((axis, kind(axis))) }),
            (4, []) => Err(Error::data(
                path,
                "it has four axes, and its header does not say which of them is not one of space",
                "add a line such as `kinds: domain domain domain list`, or save one volume",
            )),
            (num, _) => Err(wrong(format!("{num} of its {} axes lie in space; two or three can be read", sizes.len()))),
        }
    }

    /// Columns, rows and slices.
    fn size(&self) -> [usize; 3] {
        let side = |axis: usize| self.spatial.get(axis).map_or(1, |axis| self.sizes[*axis]);
        [side(0), side(1), side(2)]
    }

    /// The part of one of several volumes, or the first one if there is one.
    fn part(&self, path: &Path, choice: &Choice) -> Result<Part> {
        let Some((axis, kind)) = &self.other else {
            chosen(path, 1, number_of(path, choice.selected)?, String::new)?;
            return Ok(Part::ALL);
        };
        let of = self.sizes[*axis];
        check_size(path, [of, 1, 1])?;
        let [x, y, z] = self.size();
        let several = || {
            format!("axis {} of its array has the kind `{kind}`: {of} values at each of {x}x{y}x{z} voxels", axis + 1)
        };
        let chosen = chosen(path, of, number_of(path, choice.selected)?, several)?;
        Ok(Part { run: self.sizes[..*axis].iter().product(), of, chosen })
    }
}

/// A file whose header was read.
struct NrrdFile<'a> {
    path: &'a Path,
    header: Header,
    axes: Axes,
    content: Content,
    /// Bytes of the header.
    length: u64,
}

impl<'a> NrrdFile<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let mut content = Content::open(path)?;
        let (lines, length) = header_lines(&mut content, str::is_empty)?;
        let header = Header::new(path, &lines)?;
        let axes = Axes::of(path, &header)?;
        Ok(Self { path, header, axes, content, length })
    }

    /// The chosen volume.
    fn part(self, choice: &Choice) -> Result<StoredVolume> {
        let (size, part) = (self.axes.size(), self.axes.part(self.path, choice)?);
        self.stored(size, part)
    }

    /// A volume of `size` voxels with a part of the numbers.
    fn stored(self, size: [usize; 3], part: Part) -> Result<StoredVolume> {
        let Self { path, header, axes, content, length } = self;
        check_size(path, size)?;
        let count = axes.sizes.iter().try_fold(1_usize, |all, side| all.checked_mul(*side));
        let count = count.ok_or_else(|| Error::data(path, "its sizes are too large", EXPORT))?;
        let mut notes = Vec::new();
        let (steps, origin) = geometry(path, &header, &axes.spatial, &mut notes)?;
        let affine = affine_of(path, &steps, origin, &mut notes)?;
        notes.extend(Grid { size, affine }.size_note());
        if header.get("old min").or(header.get("old max")).is_some() {
            notes.push("the header has `old min` or `old max`: the stored values are used, as in SimpleITK".to_owned());
        }
        let (layout, is_big_endian) = layout(path, &header, count)?;
        let content = match header.data_files(path)? {
            Some(names) => detached(path, &names, layout)?,
            None => attached(content, length, layout)?,
        };
        let stored = StoredVoxels { content, number: layout.number, is_big_endian, scaling: [1.0, 0.0], size, part };
        Ok(StoredVolume { stored, affine, modality: Modality::Unknown, source: VolumeSource::Other, notes })
    }
}

/// A label map, with the names of a segmentation of 3D Slicer, whose layers are joined.
fn labels(path: &Path, choice: &Choice) -> Result<LabelMap> {
    let file = NrrdFile::open(path)?;
    let segments = segments::of(&file.header);
    let is_part = file.header.key("Segmentation_ReferenceImageExtentOffset").is_some();
    let layers = file
        .axes
        .other
        .as_ref()
        .map(|(axis, _)| (file.axes.sizes[..*axis].iter().product::<usize>(), file.axes.sizes[*axis]));
    let is_joined = choice.selected.is_none() && !segments.is_empty();
    let labels = if let Some((run, num)) = layers.filter(|(_, num)| is_joined && *num > 1) {
        let size = file.axes.size();
        let all = [size[0], size[1], size[2].saturating_mul(num)];
        let stored = file.stored(all, Part::ALL)?;
        segments::joined(path, stored.labels()?, size, [run, num], &segments)?
    } else {
        let layer = number_of(path, choice.selected)?.map_or(0, |layer| layer as usize);
        let names = segments::names(&segments, layer);
        LabelMap { names, ..file.part(choice)?.labels()? }
    };
    Ok(LabelMap { is_part, ..labels })
}

/// How the numbers are stored, and whether they are big-endian.
fn layout(path: &Path, header: &Header, count: usize) -> Result<(Layout, bool)> {
    let kind = header.required(path, "type")?;
    let number = find(&TYPES, &kind).ok_or_else(|| {
        let reason = format!("its voxels have the type `{kind}`; integers, `float` and `double` can be read");
        Error::data(path, reason, "save its values as one of these types")
    })?;
    let name = header.required(path, "encoding")?;
    let encoding = match name.as_str() {
        "raw" => Encoding::Raw,
        "gzip" | "gz" => Encoding::Deflate,
        "text" | "txt" | "ascii" => Encoding::Text,
        _ => {
            let reason = format!("its voxels have the encoding `{name}`; `raw`, `gzip` and `ascii` can be read");
            let hint = "save it with the encoding `gzip`, for example with `SimpleITK.WriteImage(image, path, True)`";
            return Err(Error::data(path, reason, hint));
        }
    };
    let is_big_endian = match header.get("endian").as_deref() {
        Some("big") => true,
        Some("little") => false,
        None if encoding == Encoding::Text || number.size() == 1 => false,
        _ => {
            let reason = "its header does not say whether its numbers are `endian: little` or `endian: big`";
            return Err(Error::data(path, reason, EXPORT));
        }
    };
    let lines = header.number(path, "line skip")?;
    let bytes = header.get("byte skip").unwrap_or_default();
    let skip = match (bytes.as_str(), encoding) {
        ("-1", Encoding::Raw | Encoding::Deflate) => Skip::AllButLast,
        _ => Skip::Before { lines: lines.unwrap_or(0), bytes: header.number(path, "byte skip")?.unwrap_or(0) as u64 },
    };
    if encoding == Encoding::Text {
        return Ok((Layout { encoding, skip, number: Number::F64, count }, false));
    }
    Ok((Layout { encoding, skip, number, count }, is_big_endian))
}

type Place = (Vec<[f64; 3]>, [f64; 3]);

/// The steps along the axes in space, and the position of the first voxel, in mm along right, anterior and superior.
fn geometry(path: &Path, header: &Header, spatial: &[usize], notes: &mut Vec<String>) -> Result<Place> {
    let signs = signs(path, header)?;
    let directions = header.vectors(path, "space directions")?;
    let factor = unit_factor(path, header, directions.is_some(), notes)?;
    let place =
        |vector: &[f64]| [0, 1, 2].map(|at| vector.get(at).map_or(0.0, |mm| mm * factor * signs.unwrap_or(LPS)[at]));
    let steps = if let Some(directions) = &directions {
        spatial.iter().map(|axis| place(directions[*axis].as_deref().unwrap_or_default())).collect()
    } else {
        let spacings: Vec<f64> = header.numbers(path, "spacings")?;
        if spacings.is_empty() {
            notes.push("the header has no voxel size: 1 mm is assumed".to_owned());
        }
        let along = |(at, axis): (usize, &usize)| {
            let mut vector = [0.0; 3];
            // `nan` for an axis without spacing
            vector[at] = spacings.get(*axis).copied().filter(|mm| !mm.is_nan()).unwrap_or(1.0);
            place(&vector)
        };
        spatial.iter().enumerate().map(along).collect()
    };
    if signs.is_none() || directions.is_none() {
        let axes = if signs.is_none() || signs == Some(LPS) {
            "left, posterior and superior (LPS), as in SimpleITK"
        } else {
            "those of its space"
        };
        notes.push(format!(
            "the header has no {}: the voxel axes are assumed to be {axes}; left and right may be swapped",
            if signs.is_none() { "space" } else { "directions" }
        ));
    }
    let origin = header.vectors(path, "space origin")?.and_then(|mut all| all.pop().flatten());
    if origin.is_none() && signs.is_some() {
        notes.push("the header has no origin: the first voxel is assumed at 0, 0, 0, as in SimpleITK".to_owned());
    }
    Ok((steps, origin.map_or([0.0; 3], |origin| place(&origin))))
}

/// The signs of the space of the header; `None` without a space.
fn signs(path: &Path, header: &Header) -> Result<Option<[f64; 3]>> {
    let Some(space) = header.get("space") else { return Ok(None) };
    let name = space.strip_suffix("-time").or(space.strip_suffix('t').filter(|name| name.len() == 3)).unwrap_or(&space);
    find(&SPACES, name).map(Some).ok_or_else(|| {
        let reason = format!("its coordinates have the space `{space}`, which is not one of the patient");
        let hint = "if its axes are known, write `space: left-posterior-superior` or another space of the patient";
        Error::data(path, reason, hint)
    })
}

/// Millimetres in the length unit of the header.
fn unit_factor(path: &Path, header: &Header, has_directions: bool, notes: &mut Vec<String>) -> Result<f64> {
    let units = header.quoted(if has_directions { "space units" } else { "units" });
    // the last one of four is that of time
    let Some(unit) = units.first() else { return Ok(1.0) };
    let is_mixed = units.iter().take(3).any(|other| other != unit) && has_directions;
    let Some(factor) = find(&UNITS, unit.trim()).filter(|_| !is_mixed) else {
        let reason = format!("its lengths have the units {}, and not one of mm, cm, m and um", units.join(", "));
        return Err(Error::data(path, reason, "convert the lengths of the header to mm"));
    };
    if factor != 1.0 {
        notes.push(format!("lengths of the header are in {unit}; they were converted to millimetres"));
    }
    Ok(factor)
}

#[cfg(test)]
pub(super) mod tests;
