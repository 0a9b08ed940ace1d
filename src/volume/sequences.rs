//! Several sequences or phases of one examination as the colours of an image: the first is red, the second green, the third
//! blue. Each has its own intensity window. A sequence that is missing, and the third of two, is 0.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use image::{DynamicImage, Rgb, RgbImage};
use serde::{Deserialize, Serialize};

use super::decode::{self, ImageFile};
use super::label_map::{TOLERANCE, differences};
use super::voxels::{Volume, Voxels};
use super::window::{Levels, Window};
use super::{Geometry, Grid, grid, open_chosen};
use prsmed_base::error::{Error, Result, quoted};

/// Most sequences of an image: one for each colour.
pub const MAX_SEQUENCES: usize = COLOURS.len();
/// The colours of the sequences.
const COLOURS: [&str; 3] = ["red", "green", "blue"];
/// What stands for the file of a sequence that is missing.
pub const MISSING: &str = "none";
const MAX_NAME: usize = 40;

/// A sequence, and how its values become grey.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    /// Its name, such as `T1` or `arterial`.
    pub name: String,
    /// The intensity window of its volumes. Flat images have none.
    pub window: Window,
}

/// The file of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SequenceFile {
    /// Name of the sequence.
    pub name: String,
    /// As [`super::open`] takes it; `None` if the sequence is missing.
    pub path: Option<PathBuf>,
}

/// The names of sequences with their colours: `` `T1` as red, `FLAIR` as green ``.
pub fn colours(sequences: &[Sequence]) -> String {
    let named = sequences.iter().zip(COLOURS).map(|(sequence, colour)| format!("`{}` as {colour}", sequence.name));
    named.collect::<Vec<_>>().join(", ")
}

/// The names of sequences: `` `T1`, `FLAIR` ``.
pub fn list<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> String {
    quoted(&sequences.into_iter().map(|sequence| sequence.name.as_str()).collect::<Vec<_>>())
}

/// Reason and remedy if these cannot be the names of the sequences of an image, in the order of their colours.
pub fn names_problem<T: AsRef<str>>(names: &[T]) -> Option<(String, &'static str)> {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let is_legal = |name: &str| {
        let is_letter = |c: char| c.is_alphanumeric() || "_-+. ".contains(c);
        !name.is_empty() && name.len() <= MAX_NAME && name.trim() == name && name.chars().all(is_letter)
    };
    if let Some(bad) = names.iter().find(|name| !is_legal(name) || name.eq_ignore_ascii_case(MISSING)) {
        let hint = "use letters, digits, `_`, `-`, `+`, `.` and blanks, as in `T1`, `b1000` or `arterial`";
        return Some((format!("`{bad}` cannot be the name of a sequence"), hint));
    }
    let is_twice = |number: usize| names[..number].iter().any(|other| other.eq_ignore_ascii_case(names[number]));
    if let Some(number) = (0..names.len()).find(|number| is_twice(*number)) {
        return Some((format!("the sequence `{}` is named twice", names[number]), "name each sequence once"));
    }
    match names.len() {
        0 | 1 => {
            let reason = format!("there is only the sequence {}", quoted(&names));
            Some((reason, "name two or three sequences; one sequence is an image without a name"))
        }
        2..=MAX_SEQUENCES => None,
        count => {
            let reason = format!("there are {count} sequences, {}, and an image has three colours", quoted(&names));
            Some((reason, "choose the two or three that show the target best"))
        }
    }
}

/// Sequences in one volume of colours.
#[derive(Debug)]
pub struct Joined {
    /// The volume, with 8 bits for each sequence.
    pub volume: Volume,
    /// Sequences that are not missing, each with the window that [`Window::Auto`] means for it.
    pub windows: Vec<Sequence>,
}

/// Opens the files of sequences, and joins them. Each is read as [`open_chosen`] reads it.
///
/// # Errors
/// As [`open_chosen`] and [`join`].
pub fn open(
    files: &[SequenceFile],
    sequences: &[Sequence],
    series: Option<&str>,
    geometry: Option<Geometry>,
) -> Result<Joined> {
    let mut parts = Vec::new();
    for file in files {
        let part = match &file.path {
            Some(path) => Some((path.as_path(), open_chosen(path, series, geometry)?)),
            None => None,
        };
        parts.push(part);
    }
    join(parts, sequences)
}

/// Joins volumes of one grid to one volume of colours. Each volume has the path by which errors call it, and `None` is a
/// sequence that is missing. The grid, the modality and the references are those of the first one.
///
/// # Errors
/// [`Error::Data`] for a volume on another grid, a colour image, and no volume at all; [`Error::Config`] for a window that a
/// volume does not have.
pub fn join(parts: Vec<Option<(&Path, Volume)>>, sequences: &[Sequence]) -> Result<Joined> {
    let Some((first, found)) = parts.iter().flatten().next() else {
        return Err(Error::argument("image", "all sequences are missing", "give the file of one of them"));
    };
    let (first, grid) = (first.to_path_buf(), found.grid.clone());
    let mut joined = Volume { frame_of_reference: found.frame_of_reference.clone(), ..empty(found, &grid) };
    let mut voxels = vec![[0; 3]; grid.num_voxels()];
    let mut windows = Vec::new();
    for ((part, Sequence { name, window }), channel) in parts.into_iter().zip(sequences).zip(0..) {
        let Some((path, volume)) = part else { continue };
        check_grid((path, &volume), (&first, &grid))?;
        let window = window.chosen_for(&volume);
        let levels = window.levels(&volume).map_err(|error| of_sequence(name, error))?;
        let (own, other) = (&volume.frame_of_reference, &joined.frame_of_reference);
        let is_other_frame = own.is_some() && other.is_some() && own != other;
        let frame = "another frame of reference than the first sequence, as one of another examination has: check that both \
                     belong together and are registered";
        let notes = volume.notes.iter().cloned().chain(window.mismatch(&volume, &levels));
        let notes = notes.chain(is_other_frame.then(|| frame.to_owned()));
        joined.notes.extend(notes.map(|note| format!("{name}: {note}")));
        paint(&mut voxels, channel, &volume, &levels);
        windows.push(Sequence { name: name.clone(), window });
    }
    joined.voxels = Voxels::Rgb(voxels);
    Ok(Joined { volume: joined, windows })
}

/// A volume without voxels, with the identity of another one.
fn empty(of: &Volume, grid: &Grid) -> Volume {
    let volume = Volume::new(Voxels::Rgb(Vec::new()), grid.clone(), of.source.clone());
    Volume { modality: of.modality.clone(), is_8_bit: true, ..volume }
}

fn of_sequence(name: &str, error: Error) -> Error {
    match error {
        Error::Config { key, reason, hint } => {
            Error::Config { key, reason: format!("of the sequence `{name}`: {reason}"), hint }
        }
        error => error,
    }
}

/// Refuses a colour image, and a volume on another grid than the first one.
fn check_grid((path, volume): (&Path, &Volume), (first, grid): (&Path, &Grid)) -> Result<()> {
    if volume.is_colour() {
        let reason = "is a colour image, and a sequence has grey values";
        return Err(Error::data(path, reason, "give the file with the values of one sequence"));
    }
    if is_same(&volume.grid, grid) {
        return Ok(());
    }
    let reason = format!("its grid is not that of `{}`: {}", first.display(), differences(&volume.grid, grid));
    let hint = "the sequences of an image must be on one grid, and prsmed resamples none of them: register and resample it to \
                the other file with another program, for example SimpleITK, ANTs or elastix";
    Err(Error::data(path, reason, hint))
}

/// True for grids that differ by rounding only.
fn is_same(a: &Grid, b: &Grid) -> bool {
    let map = b.affine.inverse().map(|inverse| inverse.after(&a.affine));
    let is_close = |map: grid::Affine| {
        grid::corners(a.size).all(|corner| {
            let difference = grid::subtract(map.apply(corner), corner);
            difference.iter().all(|value| value.abs() <= TOLERANCE)
        })
    };
    a.size == b.size && (a.affine == b.affine || map.is_some_and(is_close))
}

/// Writes the grey of a volume into one colour. Padding is black.
fn paint(voxels: &mut [[u8; 3]], channel: usize, volume: &Volume, levels: &Levels) {
    let mut set = |index: usize, value: f32| voxels[index][channel] = levels.apply(value);
    for run in volume.display.padding.others(0..volume.voxels.len()) {
        match &volume.voxels {
            Voxels::I16(values) => run.for_each(|index| set(index, f32::from(values[index]))),
            Voxels::F32(values) => run.for_each(|index| set(index, values[index])),
            Voxels::Rgb(_) => {}
        }
    }
}

/// Reads flat images of sequences, and joins them.
///
/// # Errors
/// As [`decode::image_file`] and [`join_images`].
pub fn image_file(files: &[SequenceFile]) -> Result<ImageFile> {
    let mut parts = Vec::new();
    let (mut range, mut is_turned) = (None, false);
    for file in files {
        let Some(path) = &file.path else {
            parts.push(None);
            continue;
        };
        let image = decode::image_file(path)?;
        let span = |range: [u16; 2]| range[1] - range[0];
        // the one that uses the smallest part of 16 bits
        range = range.into_iter().chain(image.range).min_by_key(|range| span(*range));
        is_turned |= image.is_turned;
        parts.push(Some((path.as_path(), image.pixels)));
    }
    Ok(ImageFile { pixels: join_images(&parts)?.into(), range, is_turned })
}

/// Joins grey images of one size. Each has the path by which errors call it, and `None` is a sequence that is missing.
///
/// # Errors
/// [`Error::Data`] for images of different sizes, a colour image, and no image at all.
pub fn join_images(parts: &[Option<(&Path, DynamicImage)>]) -> Result<RgbImage> {
    let Some((first, image)) = parts.iter().flatten().next() else {
        return Err(Error::argument("image", "all sequences are missing", "give the file of one of them"));
    };
    let (width, height) = (image.width(), image.height());
    let mut joined = RgbImage::new(width, height);
    for (part, channel) in parts.iter().zip(0..) {
        let Some((path, image)) = part else { continue };
        if (image.width(), image.height()) != (width, height) {
            let (other, own) = (first.display(), (image.width(), image.height()));
            let turned = decode::turned_by_90(own, (width, height));
            let reason = format!("is {} x {} pixels, and `{other}` is {width} x {height}{turned}", own.0, own.1);
            let hint =
                "the sequences of an image must have one size, pixel on pixel: register them with another program";
            return Err(Error::data(*path, reason, hint));
        }
        let rgb = image.to_rgb8();
        if rgb.pixels().any(|Rgb([red, green, blue])| red != green || green != blue) {
            let reason = "is a colour image, and a sequence has grey values";
            return Err(Error::data(*path, reason, "give the file with the values of one sequence"));
        }
        joined.pixels_mut().zip(rgb.pixels()).for_each(|(pixel, grey)| pixel.0[channel] = grey.0[0]);
    }
    Ok(joined)
}

/// An intensity window for all sequences, or `NAME=WINDOW` for one.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowChoice {
    /// The sequence; `None` for all that have none of their own.
    pub name: Option<String>,
    /// Its window.
    pub window: Window,
}

impl FromStr for WindowChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, window)) => Ok(Self { name: Some(name.trim().to_owned()), window: window.parse()? }),
            None => Ok(Self { name: None, window: text.parse()? }),
        }
    }
}

/// Chosen windows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Windows {
    /// For all that have none of their own.
    pub all: Option<Window>,
    /// By the name of a sequence.
    pub by_name: BTreeMap<String, Window>,
}

impl Windows {
    /// The windows of several choices.
    ///
    /// # Errors
    /// [`Error::Config`] for two windows of one sequence.
    pub fn new(choices: &[WindowChoice]) -> Result<Self> {
        let mut windows = Self::default();
        for WindowChoice { name, window } in choices {
            let before = match name {
                Some(name) => windows.by_name.insert(name.clone(), *window),
                None => windows.all.replace(*window),
            };
            if let Some(before) = before {
                let of = name.as_ref().map(|name| format!(" for `{name}`")).unwrap_or_default();
                let reason = format!("there are two windows{of}, `{before}` and `{window}`");
                return Err(Error::argument("window", reason, "give one, or `NAME=WINDOW` for each sequence"));
            }
        }
        Ok(windows)
    }

    /// The chosen window of a sequence.
    pub fn of(&self, name: &str) -> Option<Window> {
        self.by_name.get(name).copied().or(self.all)
    }

    /// Refuses a window of a sequence that is none of `names`.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn check(&self, names: &[&str]) -> Result<()> {
        let Some(unknown) = self.by_name.keys().find(|name| !names.contains(&name.as_str())) else { return Ok(()) };
        if names.is_empty() {
            let reason = format!("it is for the sequence `{unknown}`, and the images have no sequences");
            return Err(Error::argument("window", reason, "give a window without a name"));
        }
        let reason = format!("there is no sequence `{unknown}`");
        Err(Error::argument("window", reason, format!("the sequences are {}", quoted(names))))
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.name, self.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_two_or_three_different_ones() {
        for good in [&["T1", "FLAIR"][..], &["b0", "b1000", "arterial phase"]] {
            assert_eq!(names_problem(good), None, "{good:?}");
        }
        for (bad, expected) in [
            (&[][..], "only"),
            (&["T1"], "only the sequence `T1`"),
            (&["a", "b", "c", "d"], "4 sequences"),
            (&["T1", "t1"], "`t1` is named twice"),
            (&["T1", "None"], "`None` cannot"),
            (&["T1", ""], "`` cannot"),
            (&["T1", "a=b"], "`a=b` cannot"),
            (&["T1", "../x"], "`../x` cannot"),
        ] {
            let (reason, hint) = names_problem(bad).unwrap();
            assert!(reason.contains(expected) && !hint.is_empty(), "{bad:?}: {reason}");
        }
    }

    #[test]
    fn windows_are_for_one_sequence_or_for_all_others() {
        let windows = |texts: &[&str]| {
            let choices: Vec<WindowChoice> = texts.iter().map(|text| text.parse().unwrap()).collect();
            Windows::new(&choices)
        };
        let found = windows(&["p1-p99", "T1=400/40"]).unwrap();
        assert_eq!(found.of("T1").unwrap().to_string(), "400/40");
        assert_eq!(found.of("T2").unwrap().to_string(), "p1-p99");
        assert!(found.check(&["T2", "T1"]).is_ok() && found.check(&["T2"]).is_err() && found.check(&[]).is_err());
        assert!(windows(&["T1=lung", "T1=bone"]).unwrap_err().to_string().contains("two windows for `T1`"));
        assert!(windows(&["lung", "bone"]).unwrap_err().to_string().contains("`lung` and `bone`"));
        assert!("T1=wide".parse::<WindowChoice>().unwrap_err().contains("`wide` is not a window"));
    }
}
