//! Segments of a segmentation of 3D Slicer (`.seg.nrrd`): names of labels, and layers of segments that overlap.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::super::grid::Grid;
use super::super::label_map::{LabelMap, LabelNames};
use super::super::voxel_set::VoxelSet;
use super::fields::Header;
use prsmed_base::error::{Error, Result};

/// A segment.
pub(super) struct Segment {
    name: String,
    /// The volume of the array with its voxels, from 0.
    layer: usize,
    /// The value of its voxels in the layer.
    value: u16,
}

/// The segments of a header, in the order of their numbers.
pub(super) fn of(header: &Header) -> Vec<Segment> {
    let numbers = header.keys().filter_map(|key| key.strip_prefix("Segment")?.split_once('_')?.0.parse::<usize>().ok());
    let mut numbers: Vec<usize> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    let segment = |number: &usize| {
        let text = |key: &str| header.key(&format!("Segment{number}_{key}"));
        let name = text("Name").or(text("ID")).unwrap_or_default();
        // shown in messages
        let name = name.chars().filter(|letter| !letter.is_control()).take(64).collect();
        // earlier versions of 3D Slicer have one segment in each layer
        let whole = |key: &str| text(key).and_then(|value| value.trim().parse::<u16>().ok());
        let layer = whole("Layer").map_or(*number, usize::from);
        Segment { name, layer, value: whole("LabelValue").unwrap_or(1) }
    };
    numbers.iter().map(segment).collect()
}

/// The names of the labels of one layer.
pub(super) fn names(segments: &[Segment], layer: usize) -> LabelNames {
    let of_layer = segments.iter().filter(|segment| segment.layer == layer && !segment.name.is_empty());
    LabelNames(of_layer.map(|segment| (segment.value, segment.name.clone())).collect())
}

/// The label map of all layers. Groups of `run` values in `all` are of the same layer, and the layers take turns. Segments have
/// their own values if these differ, else their numbers from 1.
pub(super) fn joined(
    path: &Path,
    all: LabelMap,
    size: [usize; 3],
    [run, num_layers]: [usize; 2],
    segments: &[Segment],
) -> Result<LabelMap> {
    let all_values: BTreeSet<u16> = segments.iter().map(|segment| segment.value).collect();
    let are_values_distinct = all_values.len() == segments.len();
    let mut labels = BTreeMap::new();
    let mut names = BTreeMap::new();
    for (segment, number) in segments.iter().zip(1..=u16::MAX) {
        let label = if are_values_distinct { segment.value } else { number };
        if labels.insert((segment.layer, segment.value), label).is_some() {
            let reason = format!("two of its segments have the value {} in layer {}", segment.value, segment.layer);
            return Err(Error::data(path, reason, "save the segmentation again with 3D Slicer"));
        }
        names.insert(label, segment.name.clone());
    }
    let mut values = vec![0; size.iter().product()];
    let mut hidden: BTreeMap<u16, VoxelSet> = BTreeMap::new();
    for layer in 0..num_layers {
        for (voxel, joined) in values.iter_mut().enumerate() {
            let value = all.values[(voxel / run * num_layers + layer) * run + voxel % run];
            if value == 0 {
                continue;
            }
            let label = *labels.get(&(layer, value)).ok_or_else(|| {
                let reason = format!("layer {layer} has the value {value}, which is of no segment");
                let hint = format!("choose one layer, as in `{}#{layer}`", path.display());
                Error::data(path, reason, hint)
            })?;
            match *joined {
                0 => *joined = label,
                other if other == label => {}
                _ => hidden.entry(label).or_default().push(voxel),
            }
        }
    }
    let mut notes = all.notes;
    if !are_values_distinct {
        notes.push(
            "segments of different layers have the same value: the labels are the numbers of the segments".into(),
        );
    }
    let grid = Grid { size, affine: all.grid.affine };
    Ok(LabelMap { hidden, names: LabelNames(names), ..LabelMap::new(values, grid, notes) })
}
