//! Label maps: volumes whose values are classes, on the grid of the volume that they describe.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::grid::{Affine, Grid, corners, length, subtract};
use super::source::Uid;
use super::voxel_set::VoxelSet;
use crate::foreground::Labels;
use prsmed_base::error::{Error, Result};

/// Most runs of voxels that lie below those of other labels, of 8 bytes each.
pub(crate) const MAX_RUNS: usize = 1 << 26;
/// Largest distance in voxels at a corner for grids that count as the same.
pub(crate) const TOLERANCE: f64 = 0.1;

/// Labels of all voxels; 0 is the background.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelMap {
    /// The first axis of [`Grid::size`] is contiguous. Where segments of a DICOM SEG or ROIs of an RTSTRUCT overlap,
    /// the label of the last one: see [`LabelMap::has`].
    pub values: Vec<u16>,
    /// The voxels of a label where `values` has another one.
    pub(crate) hidden: BTreeMap<u16, VoxelSet>,
    /// Size and position in the patient.
    pub grid: Grid,
    /// Names of the segments of a DICOM SEG or the ROIs of an RTSTRUCT; empty for NIfTI.
    pub names: LabelNames,
    /// What was assumed, in sentences for the user.
    pub notes: Vec<String>,
    /// True for a DICOM SEG, whose grid has no slices before the first segment and after the last one.
    pub(crate) is_part: bool,
    /// Identifies the coordinate system of a DICOM SEG or RTSTRUCT: positions of two systems cannot be compared.
    pub frame_of_reference: Option<Uid>,
}

impl LabelMap {
    /// Labels without names.
    pub(crate) fn new(values: Vec<u16>, grid: Grid, notes: Vec<String>) -> Self {
        Self {
            values,
            hidden: BTreeMap::new(),
            grid,
            names: LabelNames::default(),
            notes,
            is_part: false,
            frame_of_reference: None,
        }
    }

    /// Labels of which each has its voxels, which may overlap. No label is there twice.
    ///
    /// # Errors
    /// [`Error::Data`] for more than [`MAX_RUNS`] runs of voxels below others.
    pub(crate) fn of_sets(path: &Path, sets: &[(u16, VoxelSet)], grid: Grid, notes: Vec<String>) -> Result<Self> {
        let mut map = Self::new(vec![0; grid.num_voxels()], grid, notes);
        for (label, voxels) in sets {
            voxels.runs().for_each(|run| map.values[run].fill(*label));
        }
        let mut num_runs = 0;
        for (label, voxels) in sets {
            let mut below = VoxelSet::default();
            for voxel in voxels.runs().flatten().filter(|voxel| map.values[*voxel] != *label) {
                below.push(voxel);
                if num_runs + below.num_runs() > MAX_RUNS {
                    let hint = "write one file for each segment";
                    return Err(Error::data(path, "its segments overlap in too many places", hint));
                }
            }
            num_runs += below.num_runs();
            if !below.is_empty() {
                map.hidden.insert(*label, below);
            }
        }
        let mut runs: Vec<Range<usize>> = map.hidden.values().flat_map(VoxelSet::runs).collect();
        runs.sort_unstable_by_key(|run| run.start);
        let (mut end, mut num_overlaps) = (0, 0);
        for run in runs {
            num_overlaps += run.end.saturating_sub(run.start.max(end));
            end = end.max(run.end);
        }
        if num_overlaps > 0 {
            map.notes.push(format!("segments overlap in {num_overlaps} voxels, which belong to each of them"));
        }
        Ok(map)
    }

    /// The labels except 0, with their numbers of voxels.
    pub fn labels(&self) -> BTreeMap<u16, usize> {
        let mut counts = vec![0_usize; 1 << 16];
        for value in &self.values {
            counts[usize::from(*value)] += 1;
        }
        for (label, voxels) in &self.hidden {
            counts[usize::from(*label)] += voxels.len();
        }
        let present = (0..=u16::MAX).zip(counts).skip(1).filter(|(_, count)| *count > 0);
        present.collect()
    }

    /// Says so if the file gives a name to another label than the chosen ones, and to none of them. Programs number the
    /// segments of each patient anew, so that equal numbers of two files can be different structures.
    pub fn contradiction(&self, name: &str, chosen: Labels) -> Option<String> {
        let plain = |name: &str| name.trim().to_lowercase().replace(['_', '-'], " ");
        let has_name = |own: &str| plain(own) == plain(name);
        let (of, others): (Vec<_>, Vec<_>) = self.names.0.iter().partition(|(label, _)| chosen.contains(**label));
        let (other, _) = others.into_iter().find(|(_, own)| has_name(own))?;
        let (label, own) = of.first().filter(|_| !of.iter().any(|(_, own)| has_name(own)))?;
        Some(format!(
            "its label {label} is named `{own}` and its label {other} is named `{name}`, but label {label} is to be `{name}`; \
             correct the labels, for each file if its numbers differ from those of others"
        ))
    }

    /// The voxels with one label: 1, others 0.
    pub fn mask(&self, label: u16) -> Vec<u8> {
        let mut mask: Vec<u8> = self.values.iter().map(|value| u8::from(*value == label)).collect();
        self.hidden.get(&label).into_iter().flat_map(VoxelSet::runs).for_each(|run| mask[run].fill(1));
        mask
    }

    /// True if a voxel has one of the labels, or, for no labels, any label.
    pub fn has(&self, index: usize, labels: Labels) -> bool {
        let value = self.values[index];
        if labels.is_empty() {
            return value > 0;
        }
        let is_below = || self.hidden.iter().any(|(label, voxels)| labels.contains(*label) && voxels.contains(index));
        labels.contains(value) || is_below()
    }

    /// The label map on the grid of a volume. Flipped and permuted axes are reordered exactly, and the slices that a DICOM
    /// SEG lacks are empty. `resample` allows any grid: each voxel gets the label of the nearest voxel, and 0 outside of
    /// the label map.
    ///
    /// # Errors
    /// [`Error::Data`] that names `path` and says what differs, for another grid without `resample`.
    pub fn on_grid(self, path: &Path, grid: &Grid, resample: bool) -> Result<Self> {
        let Some(inverse) = self.grid.affine.inverse() else {
            return Err(Error::data(path, "its affine is singular", "correct the header"));
        };
        let map = inverse.after(&grid.affine);
        if let Some((first, steps)) = exact_steps(&map, grid.size, self.grid.size) {
            let offset = |voxel: [usize; 3]| (0..3).map(|axis| steps[axis] * voxel[axis].cast_signed()).sum();
            let (values, hidden) = gathered(&self, grid.size, |voxel| Some(first.wrapping_add_signed(offset(voxel))));
            return Ok(Self { values, hidden, grid: grid.clone(), ..self });
        }
        let is_part = self.is_part && is_inside(&self.grid, grid);
        if resample || is_part {
            let (values, hidden) = nearest(&self, &map, grid.size);
            let mut notes = self.notes;
            if !is_part {
                let differences = differences(&self.grid, grid);
                notes.push(format!("the label map has another grid ({differences}); each voxel has its nearest label"));
            }
            return Ok(Self { values, hidden, grid: grid.clone(), notes, ..self });
        }
        let reason = format!("its grid is not that of the volume: {}", differences(&self.grid, grid));
        let hint =
            "use the label map of this volume, or allow resampling to the nearest voxel with the argument `resample`";
        Err(Error::data(path, reason, hint))
    }
}

/// True if every voxel of `part` is a voxel of `whole`.
fn is_inside(part: &Grid, whole: &Grid) -> bool {
    let Some(map) = whole.affine.inverse().map(|inverse| inverse.after(&part.affine)) else { return false };
    let are_steps_whole = (0..3).filter(|axis| part.size[*axis] > 1).all(|axis| {
        let step = map.step(axis);
        let largest = step.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        (largest - 1.0).abs() < 0.01 && (length(step) - 1.0).abs() < 0.01
    });
    are_steps_whole
        && corners(part.size).all(|corner| {
            let place = map.apply(corner);
            (0..3).all(|axis| {
                let nearest = place[axis].round();
                (place[axis] - nearest).abs() <= TOLERANCE && (0.0..whole.size[axis] as f64).contains(&nearest)
            })
        })
}

/// First linear index in the label map, and steps of it along the axes of the target, if `map` (target voxel -> label voxel) only flips and permutes axes and both grids have the same extent.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded and inside the label map")]
fn exact_steps(map: &Affine, target: [usize; 3], size: [usize; 3]) -> Option<(usize, [isize; 3])> {
    let mut axes = [0; 3];
    let mut signs = [0_isize; 3];
    for axis in 0..3 {
        let step = map.step(axis);
        let along = (0..3).max_by(|a, b| step[*a].abs().total_cmp(&step[*b].abs()))?;
        axes[axis] = along;
        signs[axis] = if step[along] < 0.0 { -1 } else { 1 };
        if target[axis] != size[along] {
            return None;
        }
    }
    if axes.iter().sum::<usize>() != 3 || axes.iter().product::<usize>() != 0 || axes[0] == axes[1] {
        return None;
    }
    // the exact position of each corner
    let exact = |corner: [f64; 3]| {
        let mut place = [0.0; 3];
        for axis in 0..3 {
            let last = target[axis] as f64 - 1.0;
            place[axes[axis]] = if signs[axis] < 0 { last - corner[axis] } else { corner[axis] };
        }
        place
    };
    let is_same = corners(target).all(|corner| {
        let difference = subtract(map.apply(corner), exact(corner));
        difference.iter().all(|value| value.abs() <= TOLERANCE)
    });
    let strides = [1, size[0], size[0] * size[1]];
    let start = exact([0.0; 3]);
    let first = (0..3).map(|axis| start[axis].round() as usize * strides[axis]).sum();
    is_same.then(|| (first, [0, 1, 2].map(|axis| signs[axis] * strides[axes[axis]].cast_signed())))
}

type Gathered = (Vec<u16>, BTreeMap<u16, VoxelSet>);

/// The labels of each voxel of a grid of another `size`, by the index of a voxel of the label map.
fn gathered(labels: &LabelMap, size: [usize; 3], source: impl Fn([usize; 3]) -> Option<usize>) -> Gathered {
    let mut values = Vec::with_capacity(size.iter().product());
    let mut hidden: BTreeMap<u16, VoxelSet> = BTreeMap::new();
    for z in 0..size[2] {
        for y in 0..size[1] {
            for from in (0..size[0]).map(|x| source([x, y, z])) {
                for (label, voxels) in &labels.hidden {
                    if from.is_some_and(|from| voxels.contains(from)) {
                        hidden.entry(*label).or_default().push(values.len());
                    }
                }
                values.push(from.map_or(0, |from| labels.values[from]));
            }
        }
    }
    (values, hidden)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "inside the label map")]
fn nearest(labels: &LabelMap, map: &Affine, target: [usize; 3]) -> Gathered {
    let size = labels.grid.size;
    gathered(labels, target, |voxel| {
        let place = map.apply(voxel.map(|index| index as f64)).map(f64::round);
        let is_inside = (0..3).all(|axis| (0.0..size[axis] as f64).contains(&place[axis]));
        let [x, y, z] = place.map(|value| value as usize);
        is_inside.then(|| (z * size[1] + y) * size[0] + x)
    })
}

/// What differs between the grid of a label map or a sequence and that of a volume.
pub(crate) fn differences(labels: &Grid, volume: &Grid) -> String {
    let size = |grid: &Grid| {
        let axes = grid.affine.closest_axes().map(|axis| grid.size[axis.voxel]);
        format!("{}x{}x{}", axes[0], axes[1], axes[2])
    };
    let spacing = |grid: &Grid| {
        let spacing = grid.spacing();
        let axes = grid.affine.closest_axes().map(|axis| spacing[axis.voxel]);
        format!("{:.3}x{:.3}x{:.3} mm", axes[0], axes[1], axes[2])
    };
    let centre = |grid: &Grid| grid.affine.apply(grid.size.map(|side| (side as f64 - 1.0) / 2.0));
    let mut parts = Vec::new();
    if size(labels) != size(volume) {
        parts.push(format!("{} voxels along R, A, S instead of {}", size(labels), size(volume)));
    }
    if spacing(labels) != spacing(volume) {
        parts.push(format!("voxels of {} instead of {}", spacing(labels), spacing(volume)));
    }
    let distance = length(subtract(centre(labels), centre(volume)));
    if distance > 0.01 {
        parts.push(format!("centres {distance:.2} mm apart"));
    }
    if parts.is_empty() { "its axes are rotated against those of the volume".to_owned() } else { parts.join(", ") }
}

/// Names of labels. As text: `1=liver,2=tumour`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LabelNames(pub BTreeMap<u16, String>);

impl fmt::Display for LabelNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(|(label, name)| format!("{label}={name}")).collect();
        f.write_str(&parts.join(","))
    }
}

impl FromStr for LabelNames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut names = BTreeMap::new();
        for part in text.split(',') {
            let (label, name) =
                part.split_once('=').ok_or_else(|| format!("`{part}` is not LABEL=NAME, as in `1=liver`"))?;
            let label = label.trim().parse().ok().filter(|label| *label != 0).ok_or_else(|| {
                format!("`{}` is not a label: use a whole number from 1 to 65535 (0 is the background)", label.trim())
            })?;
            let name = name.trim();
            if name.is_empty() {
                return Err(format!("label {label} has no name"));
            }
            if names.insert(label, name.to_owned()).is_some() {
                return Err(format!("label {label} has two names"));
            }
        }
        Ok(Self(names))
    }
}

impl Serialize for LabelNames {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LabelNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(size: [usize; 3], affine: Affine) -> LabelMap {
        let count = size.iter().product::<usize>();
        let values = (0..count).map(|index| u16::try_from(index).unwrap()).collect();
        LabelMap::new(values, Grid { size, affine }, Vec::new())
    }

    /// An oblique grid of 4x3x2 voxels, and its axes permuted and flipped in all 48 ways.
    fn variants(target: &Grid) -> Vec<Grid> {
        let mut grids = Vec::new();
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            for flips in 0..8_usize {
                let size = order.map(|axis| target.size[axis]);
                let mut steps = [[0.0; 3]; 3];
                let mut origin = target.affine.origin();
                for axis in 0..3 {
                    let step = target.affine.step(order[axis]);
                    let flipped = flips >> axis & 1 == 1;
                    steps[axis] = if flipped { step.map(|value| -value) } else { step };
                    if flipped {
                        let last = size[axis] as f64 - 1.0;
                        origin = [0, 1, 2].map(|row| origin[row] + last * step[row]);
                    }
                }
                grids.push(Grid { size, affine: Affine::from_columns(steps, origin) });
            }
        }
        grids
    }

    #[test]
    fn flipped_and_permuted_axes_are_reordered_by_their_positions() {
        let steps = [[0.1, -0.9, 0.05], [-1.8, -0.2, 0.1], [0.1, 0.2, 3.0]];
        let target = Grid { size: [4, 3, 2], affine: Affine::from_columns(steps, [10.0, -20.0, 30.0]) };
        for grid in variants(&target) {
            let labels = numbered(grid.size, grid.affine);
            let before = labels.clone();
            let after = labels.on_grid(Path::new("labels.nii"), &target, false).unwrap();
            for (index, value) in after.values.iter().enumerate() {
                let voxel = [index % 4, index / 4 % 3, index / 12].map(|value| value as f64);
                let source = usize::from(*value);
                let from = [source % grid.size[0], source / grid.size[0] % grid.size[1]];
                let from = [from[0], from[1], source / grid.size[0] / grid.size[1]].map(|value| value as f64);
                let apart = length(subtract(target.affine.apply(voxel), grid.affine.apply(from)));
                assert!(apart < 1e-9, "voxel {voxel:?} has the label of a voxel that is {apart} mm away");
            }
            // the nearest voxel is the same one
            let map = before.grid.affine.inverse().unwrap().after(&target.affine);
            assert_eq!(nearest(&before, &map, target.size).0, after.values);
        }
    }

    #[test]
    fn another_grid_is_an_error_that_says_what_differs() {
        let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]], [0.0; 3]);
        let target = Grid { size: [4, 3, 2], affine };
        let message = |labels: LabelMap| {
            labels.on_grid(Path::new("labels.nii"), &target, false).expect_err("another grid").to_string()
        };
        let found = message(numbered([5, 3, 2], affine));
        assert!(found.contains("5x3x2 voxels along R, A, S instead of 4x3x2"), "{found}");
        let mut moved = affine;
        moved.0[2][3] = 1.0;
        assert!(message(numbered([4, 3, 2], moved)).contains("centres 1.00 mm apart"));
        let mut coarse = affine;
        coarse.0[2][2] = 2.5;
        assert!(message(numbered([4, 3, 2], coarse)).contains("voxels of 1.000x1.000x2.500 mm instead of"));
        let nearest = numbered([4, 3, 2], moved).on_grid(Path::new("labels.nii"), &target, true).unwrap();
        // 1 mm is half a voxel: rounded away from zero, and the lower slice is outside
        assert_eq!(nearest.values[0], 0);
        assert_eq!(nearest.values[12], 12);
    }

    #[test]
    fn names_are_read_and_written() {
        let names: LabelNames = "1=liver, 2 = tumour".parse().unwrap();
        assert_eq!(names.to_string(), "1=liver,2=tumour");
        assert_eq!(serde_json::from_str::<LabelNames>("\"1=liver,2=tumour\"").unwrap(), names);
        for (wrong, part) in
            [("liver", "LABEL=NAME"), ("0=a", "1 to 65535"), ("1=", "no name"), ("1=a,1=b", "two names")]
        {
            let error = wrong.parse::<LabelNames>().unwrap_err();
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }

    #[test]
    fn names_that_contradict_those_of_the_file_are_found() {
        let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
        let names = "1=Liver,2=left_kidney,3=Liver,4=Segment_4".parse().unwrap();
        let map = LabelMap { names, ..numbered([4, 1, 1], affine) };
        let found = |name, chosen: &str| map.contradiction(name, chosen.parse().unwrap());
        let reason = found("left kidney", "1").expect("label 2");
        assert!(reason.contains("its label 1 is named `Liver` and its label 2 is named `left kidney`"), "{reason}");
        for (name, chosen) in [("liver", "1"), ("liver", "3"), ("left kidney", "1,2"), ("tumour", "4"), ("liver", "9")]
        {
            assert_eq!(found(name, chosen), None, "{name} {chosen}");
        }
        assert_eq!(map.contradiction("liver", Labels::NONE), None);
    }

    #[test]
    fn labels_are_counted() {
        let affine = Affine::from_columns([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
        let map = LabelMap { values: vec![0, 5, 5, 1], ..numbered([4, 1, 1], affine) };
        assert_eq!(map.labels(), BTreeMap::from([(1, 1), (5, 2)]));
        assert_eq!(map.mask(5), [0, 1, 1, 0]);
    }
}
