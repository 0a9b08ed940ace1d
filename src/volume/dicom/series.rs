//! Slices of a series: which files belong together, their order, and their grid in the patient.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::super::grid::{Affine, Grid, cross, dot, length, scale, subtract, swap_lps_ras, unit};
use super::super::limits::check_size;
use super::super::slices::{Axis, stored_orientation};
use super::choice::{self, RULE_FORMS, SeriesRow};
use super::header::{DicomHeader, FrameHeader};
use prsmed_base::error::{Error, Result};
use prsmed_base::units::counted;

/// Largest difference of two direction cosines that count as equal.
const COSINE: f64 = 1e-3;
/// Largest deviation of the distance between slices, as a share of the usual distance.
const UNEVEN: f64 = 0.1;
/// Angle in degrees between the slices and their stack from which the gantry counts as tilted.
const TILT: f64 = 0.5;
/// What all slices of a volume have in common.
const CONTRASTS: [&str; 3] = ["EchoTime", "EchoNumbers", "DiffusionBValue"];

/// A file with an image.
pub(super) struct SeriesFile {
    /// Its number in the container.
    pub index: usize,
    /// For messages.
    pub name: PathBuf,
    /// Its name in the folder or zip.
    pub short: String,
    pub header: DicomHeader,
    /// What was assumed about the encoding of the file.
    pub encoding: Option<&'static str>,
}

/// A slice: the file and the frame.
#[derive(Clone, Copy)]
pub(super) struct Slice<'a> {
    pub entry: &'a SeriesFile,
    pub frame: usize,
}

impl<'a> Slice<'a> {
    /// What is known of the frame.
    pub(super) fn header(&self) -> &'a FrameHeader {
        &self.entry.header.frames[self.frame]
    }

    /// The name of the file, with the frame if it has several.
    pub(super) fn name(&self) -> String {
        self.called(&self.entry.short)
    }

    /// As [`Self::name`], with another name of the file.
    pub(super) fn called(&self, name: &str) -> String {
        let has_frames = self.entry.header.frames.len() > 1;
        if has_frames { format!("frame {} of {name}", self.frame + 1) } else { name.to_owned() }
    }
}

/// The slices in order, and their grid.
pub(super) struct SeriesLayout<'a> {
    pub slices: Vec<Slice<'a>>,
    pub grid: Grid,
    pub notes: Vec<String>,
}

/// The files of each series, ordered by the numbers of the series.
pub(super) fn by_series(entries: Vec<SeriesFile>) -> Vec<Vec<SeriesFile>> {
    let mut series: BTreeMap<String, Vec<SeriesFile>> = BTreeMap::new();
    for entry in entries {
        series.entry(entry.header.series.clone()).or_default().push(entry);
    }
    let mut all: Vec<Vec<SeriesFile>> = series.into_values().collect();
    all.sort_by_key(|entries| entries[0].header.series_number);
    all
}

/// In the reason of an error: a choice of a series that fits several.
pub const SEVERAL_FIT: &str = "series that fit the choice";

/// The files of one series: the only one that is no localizer, or that which `selected` names.
pub(super) fn choose(
    path: &Path,
    entries: Vec<SeriesFile>,
    selected: Option<&str>,
    notes: &mut Vec<String>,
) -> Result<Vec<SeriesFile>> {
    // a localizer can be chosen
    let entries = if selected.is_some() { entries } else { without_localizers(entries, notes) };
    let mut all = by_series(entries);
    let listed = |all: &[Vec<SeriesFile>]| all.iter().map(|entries| describe(entries)).collect::<Vec<_>>().join("; ");
    let shown = path.display();
    let forms = format!("choose a series by its number, description or SeriesInstanceUID, or by rules: {RULE_FORMS}");
    if let Some(selected) = selected {
        let (known, named) = (listed(&all), named(&all));
        let rows: Vec<SeriesRow> = all.iter().map(|entries| row(entries)).collect();
        let numbers = choice::matching(&rows, selected);
        let mut number = 0..;
        all.retain(|_| number.next().is_some_and(|number| numbers.contains(&number)));
        if all.is_empty() {
            // another text could be an identifier
            let of = selected
                .parse::<u32>()
                .map_or("of the chosen name".into(), |number| format!("with the number {number}"));
            // a hint is shown to the user who chose, and is in no file
            return Err(Error::data(path, format!("it has no series {of}, but: {known}"), format!("{forms}:{named}")));
        }
        if all.len() > 1 {
            let reason = format!("it has {} {SEVERAL_FIT}: {}", all.len(), listed(&all));
            let named = self::named(&all);
            return Err(Error::data(path, reason, format!("add a rule, or {forms}:{named}")));
        }
    }
    if all.len() > 1 {
        let hint = format!(
            "{forms}; as in `{shown}#3` or `{shown}#T2 axial` for this one, or `data prepare --series` for all volumes (`#largest` is \
             the series with most slices)"
        );
        return Err(Error::data(path, format!("it has {} series: {}", all.len(), listed(&all)), hint));
    }
    Ok(without_localizers(all.pop().unwrap_or_default(), notes))
}

/// Number of slices of a series.
pub(super) fn num_frames(entries: &[SeriesFile]) -> usize {
    entries.iter().map(|entry| entry.header.frames.len()).sum()
}

/// The images that are no localizers, if there are any.
fn without_localizers(entries: Vec<SeriesFile>, notes: &mut Vec<String>) -> Vec<SeriesFile> {
    let count = entries.iter().filter(|entry| entry.header.is_localizer()).count();
    if count == 0 || count == entries.len() {
        return entries;
    }
    notes.push(format!("{count} localizer images were left out"));
    entries.into_iter().filter(|entry| !entry.header.is_localizer()).collect()
}

/// A series without identifiers.
fn describe(entries: &[SeriesFile]) -> String {
    let header = &entries[0].header;
    let ([width, height], number) = (header.pixels.size, header.series_text());
    let slices = counted(num_frames(entries), "slice");
    format!("{number} ({}, {slices} of {width}x{height})", header.modality)
}

/// A series in a table.
pub(super) fn row(entries: &[SeriesFile]) -> SeriesRow {
    let header = &entries[0].header;
    let orientation = header.frames[0].orientation.map(|[a, b, c, d, e, f]| {
        let normal = unit(cross([a, b, c], [d, e, f]));
        let largest = (0..3).max_by(|a, b| normal[*a].abs().total_cmp(&normal[*b].abs()));
        // the axes of a patient lead to the left, to the back and up
        [Axis::Sagittal, Axis::Coronal, Axis::Axial][largest.unwrap_or(2)]
    });
    let (date, time) = header.date.clone().unzip();
    SeriesRow {
        number: header.series_number,
        description: header.description.chars().filter(|c| !c.is_control()).take(MOST_CHARS).collect(),
        modality: header.modality.code().to_owned(),
        slices: num_frames(entries),
        orientation,
        date,
        is_localizer: entries.iter().all(|entry| entry.header.is_localizer()),
        uid: header.series.clone(),
        study: header.study.clone(),
        patient: header.patient.clone(),
        time: time.unwrap_or_default(),
    }
}

/// Most series of a list, and characters of a description.
const MOST_LISTED: usize = 20;
const MOST_CHARS: usize = 64;

/// A line for each series: its number, SeriesDescription and SeriesInstanceUID.
fn named(all: &[Vec<SeriesFile>]) -> String {
    let line = |entries: &Vec<SeriesFile>| {
        let DicomHeader { description, series, .. } = &entries[0].header;
        let number = entries[0].header.series_text();
        let quoted = |text: &str, missing: &str| match text.chars().filter(|c| !c.is_control()).take(MOST_CHARS) {
            _ if text.is_empty() => missing.to_owned(),
            shown => format!("`{}`", shown.collect::<String>()),
        };
        format!("\n  {number}, {}, {}", quoted(description, "no description"), quoted(series, "no UID"))
    };
    let more = all.len().saturating_sub(MOST_LISTED);
    let end = if more > 0 { format!("\n  and {more} more") } else { String::new() };
    all.iter().take(MOST_LISTED).map(line).collect::<String>() + &end
}

/// Arranges the slices of a series. `selected` is a frame (from 1) of a file whose frames are not slices of a volume.
pub(super) fn arrange<'a>(path: &Path, entries: &'a [SeriesFile], selected: Option<u32>) -> Result<SeriesLayout<'a>> {
    check_mosaic(entries)?;
    check_equal(path, entries)?;
    let slices = |entry: &'a SeriesFile| (0..entry.header.frames.len()).map(move |frame| Slice { entry, frame });
    let all: Vec<Slice> = entries.iter().flat_map(slices).collect();
    let pixels = &entries[0].header.pixels;
    let is_placed = pixels.photometric.is_grey() && all.iter().all(|slice| placed(slice.header()).is_some());
    if is_placed && selected.is_none() {
        return stack(path, entries, all);
    }
    let slice = match (all.as_slice(), selected) {
        ([slice], None) => *slice,
        (_, Some(number)) if !is_placed && number >= 1 && all.len() >= number as usize => all[number as usize - 1],
        _ => return Err(not_a_volume(path, entries, is_placed, &all)),
    };
    let frame = slice.header();
    let mut notes = Vec::new();
    if frame.spacing.is_none() {
        notes.push("the file does not say the size of its pixels; 1 mm is assumed".to_owned());
    }
    note_kind(entries, frame, &mut notes);
    let ([width, height], [x, y]) = (pixels.size, frame.spacing.unwrap_or([1.0, 1.0]));
    let grid = Grid { size: [width, height, 1], affine: stored_orientation([x, y, 1.0]) };
    Ok(SeriesLayout { slices: vec![slice], grid, notes })
}

fn not_a_volume(path: &Path, entries: &[SeriesFile], is_placed: bool, all: &[Slice]) -> Error {
    if is_placed {
        return Error::data(path, "its frames are slices of one volume", "give the path without `#` and number");
    }
    let found = all.iter().find_map(|slice| Some((slice, lacking(slice.header())?)));
    let lacks = found.map_or_else(String::new, |(slice, lacking)| {
        let name = if entries.len() > 1 { slice.name() } else { slice.called("it") };
        format!(": {name} has no {lacking}")
    });
    let (count, shown) = (all.len(), path.display());
    let (kind, hint) = if entries.len() > 1 {
        let is_grey = entries[0].header.pixels.photometric.is_grey();
        (if is_grey { "images" } else { "colour images" }, "give one of the files".to_owned())
    } else {
        ("frames", format!("choose a frame, from `{shown}#1` to `{shown}#{count}`"))
    };
    Error::data(path, format!("its {count} {kind} are not slices of a volume{lacks}"), hint)
}

/// What a slice would need to have a place in the patient.
fn lacking(frame: &FrameHeader) -> Option<&'static str> {
    let needed = [
        (frame.position.is_none(), "ImagePositionPatient"),
        (frame.orientation.is_none(), "ImageOrientationPatient"),
        (frame.spacing.is_none(), "PixelSpacing"),
    ];
    needed.into_iter().find(|(is_missing, _)| *is_missing).map(|(_, name)| name)
}

/// Adds notes about the kind of images, and the size of the pixels of a frame.
fn note_kind(entries: &[SeriesFile], frame: &FrameHeader, notes: &mut Vec<String>) {
    notes.extend(entries[0].header.kind_note());
    notes.extend(frame.spacing_note.clone());
    if entries.iter().any(|entry| entry.header.has_overlay) {
        notes.push("graphic overlays of the files are ignored".to_owned());
    }
}

/// Fails for an image of tiles.
fn check_mosaic(entries: &[SeriesFile]) -> Result<()> {
    let Some(entry) = entries.iter().find(|entry| entry.header.is_mosaic()) else { return Ok(()) };
    let reason =
        "it is a mosaic (ImageType has MOSAIC): its image shows all slices of a volume as tiles, and is no slice";
    let hint = "convert the folder of the series with dcm2niix, which separates the tiles (`dcm2niix -z y -o OUT FOLDER`), and \
                give one volume of the result";
    Err(Error::data(&entry.name, reason, hint))
}

/// Fails if images have another size or kind than the first one.
fn check_equal(path: &Path, entries: &[SeriesFile]) -> Result<()> {
    let kind = |entry: &SeriesFile| (entry.header.pixels.size, entry.header.pixels.photometric);
    let mut kinds: Vec<(([usize; 2], _), usize)> = Vec::new();
    for entry in entries {
        match kinds.iter_mut().find(|found| found.0 == kind(entry)) {
            Some(found) => found.1 += 1,
            None => kinds.push((kind(entry), 1)),
        }
    }
    if kinds.len() < 2 {
        return Ok(());
    }
    let parts = kinds.iter().map(|(([width, height], kind), count)| format!("{count} of {width}x{height} ({kind:?})"));
    let reason = format!("its images have different sizes or kinds: {}", parts.collect::<Vec<_>>().join(", "));
    Err(Error::data(path, reason, "remove localizers and other images that do not belong to the volume"))
}

/// Position, row and column direction of a slice, if they and the spacing are known.
pub(super) fn placed(frame: &FrameHeader) -> Option<([f64; 3], [f64; 3], [f64; 3])> {
    let [a, b, c, d, e, f] = frame.orientation?;
    frame.spacing?;
    Some((frame.position?, [a, b, c], [d, e, f]))
}

/// Sorts slices along their normal and computes the affine.
fn stack<'a>(path: &Path, entries: &[SeriesFile], slices: Vec<Slice<'a>>) -> Result<SeriesLayout<'a>> {
    let mut stacked: Vec<(Slice, [f64; 3])> = Vec::with_capacity(slices.len());
    let first = slices[0].header();
    let Some((_, row, column)) = placed(first) else { return Err(mixed(path)) };
    for slice in slices {
        let (frame, name) = (slice.header(), &slice.entry.name);
        let Some((position, other_row, other_column)) = placed(frame) else { return Err(mixed(path)) };
        if length(subtract(row, other_row)) >= COSINE || length(subtract(column, other_column)) >= COSINE {
            return Err(mixed(name));
        }
        let differs = |(a, b): ([f64; 2], [f64; 2])| (0..2).any(|axis| (a[axis] / b[axis] - 1.0).abs() > 0.01);
        if frame.spacing.zip(first.spacing).is_some_and(differs) {
            let hint = "remove the images that do not belong to the volume";
            return Err(Error::data(name, "its pixels have another size than those of the other slices", hint));
        }
        stacked.push((slice, position));
    }
    let normal = unit(cross(row, column));
    stacked.sort_by(|a, b| dot(a.1, normal).total_cmp(&dot(b.1, normal)));
    check_positions(path, &stacked, normal)?;
    check_contrast(path, &stacked)?;
    let (slices, positions): (Vec<Slice>, Vec<[f64; 3]>) = stacked.into_iter().unzip();
    let mut notes = Vec::new();
    let step = match positions.as_slice() {
        [_] => scale(normal, thickness(first, &mut notes)),
        _ => step(path, &positions, normal, &mut notes)?,
    };
    note_kind(entries, first, &mut notes);
    let [x, y] = first.spacing.unwrap_or([1.0, 1.0]);
    let steps = [scale(row, x), scale(column, y), step].map(swap_lps_ras);
    let [width, height] = entries[0].header.pixels.size;
    let size = [width, height, slices.len()];
    check_size(path, size)?;
    let affine = Affine::from_columns(steps, swap_lps_ras(positions[0]));
    if affine.inverse().is_none() {
        return Err(Error::data(path, "its slices have no volume", "export the series again from the archive"));
    }
    Ok(SeriesLayout { slices, grid: Grid { size, affine }, notes })
}

fn mixed(path: &Path) -> Error {
    let hint = "remove localizers and other images that do not belong to the volume";
    Error::data(path, "it has another orientation than the first slice of the series", hint)
}

/// The thickness of a single slice in mm.
fn thickness(frame: &FrameHeader, notes: &mut Vec<String>) -> f64 {
    let why = match &frame.thickness {
        Ok(Some(mm)) => return *mm,
        Ok(None) => "the file does not say the thickness of its slice",
        Err(fault) => fault,
    };
    notes.push(format!("{why}; 1 mm is assumed"));
    1.0
}

/// Fails for slices at the same position.
fn check_positions(path: &Path, stacked: &[(Slice, [f64; 3])], normal: [f64; 3]) -> Result<()> {
    let are_equal = |pair: &&[(Slice, [f64; 3])]| dot(subtract(pair[1].1, pair[0].1), normal) < 1e-3;
    let pairs: Vec<[Slice; 2]> = stacked.windows(2).filter(are_equal).map(|pair| [pair[0].0, pair[1].0]).collect();
    let Some(example) = pairs.first() else { return Ok(()) };
    let [a, b] = example.map(|slice| slice.name());
    let reason =
        format!("{} of its {} slices have the position of another slice, as {a} and {b}", pairs.len(), stacked.len());
    let mut names: Vec<&str> = Vec::new();
    for [a, b] in pairs.into_iter().map(|pair| pair.map(|slice| &slice.entry.header.distinct)) {
        let differing = a.iter().filter(|value| !b.contains(value)).chain(b.iter().filter(|value| !a.contains(value)));
        names.extend(differing.map(|(name, _)| *name));
    }
    names.sort_unstable();
    names.dedup();
    let hint = if names.is_empty() {
        "remove the file of each pair that does not belong to the volume; several volumes (phases or times) are separated by \
         dcm2niix"
            .to_owned()
    } else {
        format!(
            "it has several volumes, which differ in {}: give a folder with the files of one volume, or convert it with \
             dcm2niix and choose one",
            names.join(", ")
        )
    };
    Err(Error::data(path, reason, hint))
}

/// Fails for slices of several contrasts, which lie between each other.
fn check_contrast(path: &Path, stacked: &[(Slice, [f64; 3])]) -> Result<()> {
    for name in CONTRASTS {
        let value =
            |slice: &Slice| slice.entry.header.distinct.iter().find(|(of, _)| *of == name).map(|(_, value)| *value);
        let mut values: Vec<f64> = stacked.iter().filter_map(|(slice, _)| value(slice)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup_by(|a, b| (*a - *b).abs() <= 0.01 * b.abs());
        if let [first, .., last] = values[..] {
            let reason = format!(
                "its slices are of {} contrasts: their {name} is from {first} to {last}, and no two lie at the same position",
                values.len()
            );
            let hint = "give a folder with the files of one contrast, or convert it with dcm2niix and choose one";
            return Err(Error::data(path, reason, hint));
        }
    }
    Ok(())
}

/// The step from slice to slice in mm (LPS).
fn step(path: &Path, positions: &[[f64; 3]], normal: [f64; 3], notes: &mut Vec<String>) -> Result<[f64; 3]> {
    let distances: Vec<f64> = positions.windows(2).map(|pair| dot(subtract(pair[1], pair[0]), normal)).collect();
    let mut sorted = distances.clone();
    sorted.sort_by(f64::total_cmp);
    // the lower one of two
    let usual = sorted[(sorted.len() - 1) / 2];
    if let Some(gap) = distances.iter().position(|distance| (distance - usual).abs() > UNEVEN * usual) {
        let distance = distances[gap];
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count for a message")]
        let missing: usize = distances.iter().map(|distance| (distance / usual).round().max(1.0) as usize - 1).sum();
        let (before, after) = (gap + 1, gap + 2);
        let reason = if missing > 0 {
            let are_missing = if missing == 1 { "1 slice is" } else { &format!("{missing} slices are") };
            format!(
                "about {are_missing} missing: slices {before} and {after} of {} are {distance:.2} mm apart, and \
                 others {usual:.2} mm",
                positions.len()
            )
        } else {
            format!(
                "its slices are unevenly spaced: {before} and {after} are {distance:.2} mm apart, others {usual:.2} mm"
            )
        };
        return Err(Error::data(path, reason, "export the whole series again, or resample it to even slices"));
    }
    let last = positions.len() - 1;
    let step = scale(subtract(positions[last], positions[0]), 1.0 / last as f64);
    let sideways = positions.iter().enumerate().map(|(index, position)| {
        let off = subtract(*position, [0, 1, 2].map(|axis| positions[0][axis] + step[axis] * index as f64));
        length(subtract(off, scale(normal, dot(off, normal))))
    });
    let sideways = sideways.fold(0.0, f64::max);
    if sideways > 1.0 {
        let reason = format!("its slices are shifted against each other by up to {sideways:.1} mm");
        return Err(Error::data(path, reason, "export the series again, or resample it to a regular grid"));
    }
    let tilt = (dot(step, normal) / length(step)).clamp(-1.0, 1.0).acos().to_degrees();
    if tilt > TILT {
        notes.push(format!(
            "the slices are tilted by {tilt:.1} degrees against their stack (gantry tilt); they are kept as they are"
        ));
    }
    Ok(step)
}
