//! The answer about a volume: where a mask lies in three dimensions and how large it is, in sentences from a template.
//!
//! The language model does not write it. Sides are those of the patient only if the file says how the patient lies; else
//! they are those of the slices as shown, and the text says so.

use crate::Result;
use crate::data::volume::{Affine, Axis, Grid, SlicePlane, Volume, VolumeSource};
use crate::metrics::grid::Size;
use crate::metrics::lesions::components;
use serde::Serialize;
use std::collections::BTreeMap;

/// Notes of [`crate::data::volume::open`] contain one of these if the orientation of a file is assumed: it has none, or a
/// NIfTI file has two that differ and no choice between them.
const ASSUMED: [&str; 2] = ["as in nibabel", "the voxel axes are assumed"];

/// What a volume's sides refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Directions {
    /// The patient's left and right, front and back, foot and head.
    Patient,
    /// The slices as shown: left, right, top and bottom of the image, first and last slice.
    Image,
}

/// What is segmented of a volume, and how much of its mask was there before the clean-up.
#[derive(Debug, Clone, Copy)]
pub struct Coverage {
    /// Direction of the slices.
    pub axis: Axis,
    /// Number of segmented slices.
    pub num_segmented: usize,
    /// False if slices between the segmented ones stay empty, so that parts cannot be counted.
    pub has_no_gaps: bool,
    /// Volume of the mask in millilitres before the clean-up.
    pub raw_ml: f64,
}

/// Sentences about the mask of a volume, and what they say.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetDescription {
    /// The sentences.
    #[serde(rename = "answer")]
    pub text: String,
    /// `template`: no language model wrote them.
    #[serde(rename = "answer_source")]
    pub source: &'static str,
    /// What they say; `None` for an empty mask.
    #[serde(rename = "answer_facts")]
    pub facts: Option<TargetFacts>,
}

/// Location and size of a mask.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetFacts {
    /// What the sides of `thirds` refer to.
    pub directions: Directions,
    /// The third of the volume with the centre of the largest part, by direction. Directions with one voxel are left out.
    pub thirds: BTreeMap<&'static str, &'static str>,
    /// First and last slice with a mask, from 0.
    pub slices: [usize; 2],
    /// The slice with the largest area.
    pub largest_slice: usize,
    /// Volume of the mask in millilitres.
    pub volume_ml: f64,
    /// Number of connected parts (26 neighbours); `None` if empty slices separate them.
    pub num_parts: Option<usize>,
    /// Volume of the largest part in millilitres; of the whole mask if parts are not counted.
    pub largest_part_ml: f64,
}

impl TargetDescription {
    /// Describes a mask: one value for each voxel, 0 or 1. `range` has its first and last slice, and the slice with the
    /// largest area; `None` for an empty mask.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for a mask of another size.
    pub fn of(volume: &Volume, mask: &[u8], range: Option<([usize; 2], usize)>, coverage: &Coverage) -> Result<Self> {
        volume.grid.check(mask.len())?;
        let plane = volume.plane(coverage.axis);
        let found = range.zip(MaskPart::largest(mask, &volume.grid, coverage.has_no_gaps));
        let Some(((slices, largest_slice), (part, num_parts))) = found else {
            return Ok(Self { text: empty(coverage), source: "template", facts: None });
        };
        let voxel_ml = volume.grid.voxel_ml();
        let directions = if is_orientation_known(volume) { Directions::Patient } else { Directions::Image };
        let thirds = match directions {
            Directions::Patient => thirds_of_patient(&volume.grid, part.offset),
            Directions::Image => thirds_of_image(&volume.grid, &plane, part.offset),
        };
        let facts = TargetFacts {
            directions,
            thirds: thirds.iter().map(|(direction, at)| (direction.name, direction.thirds[*at])).collect(),
            slices,
            largest_slice,
            volume_ml: volume.grid.volume_ml(mask)?,
            num_parts,
            largest_part_ml: part.num_voxels as f64 * voxel_ml,
        };
        let text = [size_sentence(&facts), slices_sentence(&facts, &plane, coverage), centre_sentence(&facts, &thirds)];
        let text: Vec<String> = text.into_iter().filter(|text| !text.is_empty()).collect();
        Ok(Self { text: text.join(" "), source: "template", facts: Some(facts) })
    }

    /// The sentences as a command prints them.
    pub fn line(&self) -> String {
        format!("answer (by a {}, from the mask): {}", self.source, self.text)
    }
}

/// A direction of the patient or of the slices as shown.
struct DirectionWords {
    /// Its name in JSON.
    name: &'static str,
    /// Names of its thirds in JSON.
    thirds: [&'static str; 3],
    /// Its thirds in a sentence.
    words: [&'static str; 3],
}

/// Directions R, A and S.
const PATIENT: [DirectionWords; 3] = [
    DirectionWords {
        name: "left_right",
        thirds: ["left", "middle", "right"],
        words: [
            "the left third (left of the patient)",
            "the middle third from left to right",
            "the right third (right of the patient)",
        ],
    },
    DirectionWords {
        name: "front_back",
        thirds: ["posterior", "middle", "anterior"],
        words: ["the posterior third", "the middle third from front to back", "the anterior third"],
    },
    DirectionWords {
        name: "foot_head",
        thirds: ["lower", "middle", "upper"],
        words: [
            "the lower third (towards the feet)",
            "the middle third from foot to head",
            "the upper third (towards the head)",
        ],
    },
];

/// Columns, rows and slices as shown.
const IMAGE: [DirectionWords; 3] = [
    DirectionWords {
        name: "columns",
        thirds: ["left", "middle", "right"],
        words: ["the left third of the image", "the middle third from left to right", "the right third of the image"],
    },
    DirectionWords {
        name: "rows",
        thirds: ["upper", "middle", "lower"],
        words: ["the upper third of the image", "the middle third from top to bottom", "the lower third of the image"],
    },
    DirectionWords {
        name: "slices",
        thirds: ["first", "middle", "last"],
        words: ["the first third of the slices", "the middle third of the slices", "the last third of the slices"],
    },
];

/// Directions, each with the number of a third.
type Thirds = Vec<(&'static DirectionWords, usize)>;

/// The third with a place that is so far from the middle, as a fraction of the whole length.
fn third(fraction: f64) -> usize {
    if fraction < -1.0 / 6.0 {
        0
    } else if fraction <= 1.0 / 6.0 {
        1
    } else {
        2
    }
}

/// Thirds along R, A and S of the box around the volume, of a place at `offset` voxels from its centre. The sides are those
/// of the patient also if the volume is oblique.
fn thirds_of_patient(grid: &Grid, offset: [f64; 3]) -> Thirds {
    let axes = grid.affine.closest_axes();
    let along = |patient: usize| {
        let row = grid.affine.0[patient];
        let length: f64 = (0..3).map(|voxel| (row[voxel] * grid.size[voxel] as f64).abs()).sum();
        (0..3).map(|voxel| row[voxel] * offset[voxel]).sum::<f64>() / length
    };
    let known = (0..3).filter(|patient| grid.size[axes[*patient].voxel] > 1);
    known.map(|patient| (&PATIENT[patient], third(along(patient)))).collect()
}

/// Thirds of columns, rows and slices as shown, of a place at `offset` voxels from the centre of the volume.
fn thirds_of_image(grid: &Grid, plane: &SlicePlane, offset: [f64; 3]) -> Thirds {
    let [width, height] = plane.size;
    let voxel = |slice: usize, x: usize, y: usize| position(plane.index(slice, x, y), grid.size);
    let first = voxel(0, 0, 0);
    let last = [voxel(0, width - 1, 0), voxel(0, 0, height - 1), voxel(plane.num_slices - 1, 0, 0)];
    let along = |last: &[usize; 3]| {
        let axis = (0..3).find(|axis| last[*axis] != first[*axis])?;
        let fraction = offset[axis] / grid.size[axis] as f64;
        Some(third(if last[axis] > first[axis] { fraction } else { -fraction }))
    };
    IMAGE.iter().zip(&last).filter_map(|(direction, last)| Some((direction, along(last)?))).collect()
}

/// Voxel indices of a linear index.
fn position(index: usize, size: [usize; 3]) -> [usize; 3] {
    [index % size[0], index / size[0] % size[1], index / size[0] / size[1]]
}

/// False if the affine is assumed: of a NIfTI file by a rule of nibabel, of a DICOM image without a position.
fn is_orientation_known(volume: &Volume) -> bool {
    match &volume.source {
        VolumeSource::Nifti(_) | VolumeSource::Other => {
            !volume.notes.iter().any(|note| ASSUMED.iter().any(|words| note.contains(words)))
        }
        VolumeSource::Dicom(_) => {
            let ([x, y, _], is_single) = (volume.grid.spacing(), volume.grid.size[2] == 1);
            // such an image gets its pixels as they are stored, from the origin
            let assumed = Affine::from_columns([[-x, 0.0, 0.0], [0.0, -y, 0.0], [0.0, 0.0, 1.0]], [0.0; 3]);
            !(is_single && volume.grid.affine == assumed)
        }
    }
}

/// Voxels of a mask.
struct MaskPart {
    num_voxels: usize,
    /// From the centre of the volume to their mean, in voxels.
    offset: [f64; 3],
}

impl MaskPart {
    /// The largest connected part of a mask (the first of equal ones), and the number of parts; the whole mask if parts are
    /// not counted. `None` for an empty mask.
    fn largest(mask: &[u8], grid: &Grid, counts_parts: bool) -> Option<(Self, Option<usize>)> {
        let [low, high] = bounds(mask, grid.size)?;
        let size = [0, 1, 2].map(|axis| high[axis] - low[axis] + 1);
        let mut cropped = Vec::with_capacity(size.iter().product());
        for z in low[2]..=high[2] {
            for y in low[1]..=high[1] {
                let row = (z * grid.size[1] + y) * grid.size[0];
                cropped.extend(mask[row + low[0]..=row + high[0]].iter().map(|value| *value != 0));
            }
        }
        let parts = if counts_parts {
            components(&cropped, Size::volume(size[2], size[1], size[0]))
        } else {
            vec![(0..cropped.len()).filter(|index| cropped[*index]).collect()]
        };
        let largest = parts.iter().reduce(|best, next| if next.len() > best.len() { next } else { best })?;
        let mut sums = [0_usize; 3];
        for index in largest {
            let place = position(*index, size);
            (0..3).for_each(|axis| sums[axis] += place[axis]);
        }
        let num_voxels = largest.len();
        let offset = [0, 1, 2].map(|axis| {
            let mean = low[axis] as f64 + sums[axis] as f64 / num_voxels as f64;
            mean - (grid.size[axis] as f64 - 1.0) / 2.0
        });
        Some((Self { num_voxels, offset }, counts_parts.then_some(parts.len())))
    }
}

/// Smallest and largest voxel indices of a mask; `None` for an empty mask.
fn bounds(mask: &[u8], size: [usize; 3]) -> Option<[[usize; 3]; 2]> {
    let mut bounds: Option<[[usize; 3]; 2]> = None;
    for index in (0..mask.len()).filter(|index| mask[*index] != 0) {
        let place = position(index, size);
        let [low, high] = bounds.get_or_insert([place; 2]);
        for axis in 0..3 {
            low[axis] = low[axis].min(place[axis]);
            high[axis] = high[axis].max(place[axis]);
        }
    }
    bounds
}

/// The sentence about an empty mask.
fn empty(coverage: &Coverage) -> String {
    if coverage.raw_ml > 0.0 {
        return format!("The mask is empty: the clean-up removed all of it ({}).", ml(coverage.raw_ml));
    }
    match coverage.num_segmented {
        1 => "The mask is empty: no target was found in the slice that was segmented.".to_owned(),
        count => format!("The mask is empty: no target was found in the {count} slices that were segmented."),
    }
}

/// A volume in millilitres.
fn ml(volume: f64) -> String {
    if volume < 0.005 { "less than 0.01 ml".to_owned() } else { format!("{volume:.2} ml") }
}

fn size_sentence(facts: &TargetFacts) -> String {
    let parts = match facts.num_parts {
        Some(count) if count > 1 => {
            format!(" It has {count} separate parts; the largest has {}.", ml(facts.largest_part_ml))
        }
        _ => String::new(),
    };
    format!("The target has a volume of {}.{parts}", ml(facts.volume_ml))
}

fn slices_sentence(facts: &TargetFacts, plane: &SlicePlane, coverage: &Coverage) -> String {
    // the name of an axis is a direction of the patient
    let axis = if facts.directions == Directions::Patient { coverage.axis.name() } else { "" };
    let kind = |word: &str| if axis.is_empty() { word.to_owned() } else { format!("{axis} {word}") };
    let ([first, last], count) = (facts.slices, plane.num_slices);
    let all = format!("(of slices 0 to {})", count - 1);
    let found = match (count, first == last) {
        (1, _) => format!("It lies in the only {}.", kind("slice")),
        (_, true) => format!("It lies in {} {first} {all}.", kind("slice")),
        (_, false) => {
            let largest = facts.largest_slice;
            format!(
                "It lies in {} {first} to {last} {all} and has its largest area in slice {largest}.",
                kind("slices")
            )
        }
    };
    if coverage.num_segmented == count {
        return found;
    }
    let between = if coverage.has_no_gaps { "" } else { ", and the slices between them count as empty" };
    format!("{found} Only {} of {count} slices were segmented{between}.", coverage.num_segmented)
}

fn centre_sentence(facts: &TargetFacts, thirds: &Thirds) -> String {
    let words: Vec<&str> = thirds.iter().map(|(direction, at)| direction.words[*at]).collect();
    let list = match words.as_slice() {
        [] => return String::new(),
        [only] => (*only).to_owned(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    };
    let centre =
        if facts.num_parts.is_some_and(|count| count > 1) { "the centre of the largest part" } else { "its centre" };
    match facts.directions {
        Directions::Patient => format!("Within the volume, {centre} lies in {list}."),
        Directions::Image => format!(
            "As the slices are shown, {centre} lies in {list}. Left and right are those of the image: the file does not say \
             for certain how the patient lies."
        ),
    }
}

#[cfg(test)]
#[path = "description_tests.rs"]
mod tests;
