//! Position of a NIfTI volume in the patient: the two affines of a header (sform and qform) and its voxel sizes.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use nifti::NiftiHeader;

use crate::grid::{Affine, Grid, cross, furthest, length, scale};
use prsmed_base::error::{Error, Result};

/// `sform_code` and `qform_code` of scanner coordinates.
const SCANNER: i16 = 1;
/// Largest relative difference of voxel sizes that count as the same.
const SIZE_TOLERANCE: f64 = 0.025;

/// The affine of a NIfTI file that counts if it has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Geometry {
    /// The matrix.
    Sform,
    /// The quaternion with the voxel sizes of `pixdim`.
    Qform,
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sform => "sform",
            Self::Qform => "qform",
        })
    }
}

impl FromStr for Geometry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sform" => Ok(Self::Sform),
            "qform" => Ok(Self::Qform),
            _ => Err("use sform or qform".into()),
        }
    }
}

/// Both affines of a header as they are stored, with their codes, so that every program puts a mask where it puts its
/// volume.
#[derive(Debug, Clone, PartialEq)]
pub struct Forms {
    /// Sign of the third axis of the quaternion, and voxel sizes.
    pixdim: [f32; 4],
    /// NIFTI_UNITS code of lengths.
    unit: u8,
    /// `qform_code` and `sform_code`.
    codes: [i16; 2],
    /// `b`, `c` and `d` of the quaternion, and its offset.
    qform: [f32; 6],
    sform: [[f32; 4]; 3],
}

impl Forms {
    /// Those of a header. Axes that the file does not have, and its mask has, get the voxel sizes of the sform.
    #[expect(clippy::cast_possible_truncation, reason = "NIfTI stores f32")]
    pub(super) fn of_header(header: &NiftiHeader) -> Self {
        let NiftiHeader { mut pixdim, quatern_b, quatern_c, quatern_d, quatern_x, quatern_y, quatern_z, .. } = *header;
        let spacing = sform(header).spacing();
        for axis in usize::from(header.dim[0])..if header.sform_code > 0 { 3 } else { 0 } {
            pixdim[axis + 1] = spacing[axis] as f32;
        }
        Self {
            pixdim: [pixdim[0], pixdim[1], pixdim[2], pixdim[3]],
            // without a unit lengths are read as millimetres
            unit: Some(header.xyzt_units & 7).filter(|unit| matches!(unit, 1 | 3)).unwrap_or(2),
            codes: [header.qform_code, header.sform_code],
            qform: [quatern_b, quatern_c, quatern_d, quatern_x, quatern_y, quatern_z],
            sform: [header.srow_x, header.srow_y, header.srow_z],
        }
    }

    /// Forms that place voxels as `grid` does, in scanner coordinates. A sheared grid has no qform.
    #[expect(clippy::cast_possible_truncation, reason = "NIfTI stores f32")]
    pub fn of_grid(grid: &Grid) -> Self {
        let quaternion = quaternion(&grid.affine);
        let (vector, sign) = quaternion.unwrap_or(([0.0; 3], 1.0));
        let ([dx, dy, dz], [x, y, z]) = (grid.spacing(), grid.affine.origin());
        let place = if quaternion.is_some() { [x, y, z] } else { [0.0; 3] };
        Self {
            pixdim: [sign, dx, dy, dz].map(|value| value as f32),
            unit: 2,
            codes: [if quaternion.is_some() { SCANNER } else { 0 }, SCANNER],
            qform: [vector[0], vector[1], vector[2], place[0], place[1], place[2]].map(|value| value as f32),
            sform: grid.affine.0.map(|row| row.map(|value| value as f32)),
        }
    }

    /// Writes them to a little-endian header. Offsets are those of nifti1.h.
    pub(crate) fn put(&self, header: &mut [u8]) {
        let mut put = |offset: usize, bytes: &[u8]| header[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.pixdim.iter().enumerate().for_each(|(index, value)| put(76 + 4 * index, &value.to_le_bytes()));
        put(123, &[self.unit]);
        self.codes.iter().enumerate().for_each(|(index, code)| put(252 + 2 * index, &code.to_le_bytes()));
        let values = self.qform.iter().chain(self.sform.as_flattened());
        values.enumerate().for_each(|(index, value)| put(256 + 4 * index, &value.to_le_bytes()));
    }
}

/// The affine of a volume in mm, and what was assumed. `chosen` counts where the header has two that differ.
///
/// # Errors
/// [`Error::Data`] for voxel sizes that contradict each other without a choice, and for a singular affine.
pub(super) fn affine(
    path: &Path,
    header: &NiftiHeader,
    size: [usize; 3],
    chosen: Option<Geometry>,
) -> Result<(Affine, Vec<String>)> {
    let mut notes = Vec::new();
    let factor = unit_factor(header, &mut notes);
    let in_mm = |affine: Affine| Affine(affine.0.map(|row| row.map(|value| value * factor)));
    let sform = (header.sform_code > 0).then(|| in_mm(sform(header)));
    let qform = (header.qform_code > 0).then(|| qform(header)).flatten().map(in_mm);
    let used = match (chosen, &sform, &qform) {
        (Some(Geometry::Qform), _, Some(_)) | (_, None, _) => Geometry::Qform,
        _ => Geometry::Sform,
    };
    let difference = sform.as_ref().and_then(|sform| size_difference(header, sform, factor));
    if let Some([of_sform, of_qform]) = difference {
        let source = if qform.is_some() { "qform" } else { "`pixdim`" };
        let difference = format!("{of_sform} mm by its sform, {of_qform} mm by its {source}");
        check_choice(path, &difference, chosen, qform.is_some())?;
        notes.push(format!(
            "its header has two voxel sizes: {difference}; those of the {used} are used (argument `geometry`)"
        ));
    } else if let Some((sform, qform)) = sform.zip(qform) {
        let apart = furthest(&sform, &qform, size);
        if apart > 0.1 * length(sform.spacing()).max(1e-6) {
            let reason = if chosen.is_none() { ", as in nibabel" } else { " (argument `geometry`)" };
            notes.push(format!("sform and qform place voxels up to {apart:.1} mm apart; the {used} is used{reason}"));
        }
    }
    let affine = match (used, sform, qform) {
        (Geometry::Sform, Some(affine), _) | (Geometry::Qform, _, Some(affine)) => affine,
        _ => {
            notes.push(
                "the header has neither sform nor qform: the voxel axes are assumed to be left, anterior and superior \
                 (LAS), as in nibabel; left and right may be swapped"
                    .to_owned(),
            );
            in_mm(base_affine(header, size))
        }
    };
    if affine.inverse().is_none() {
        let reason = "the affine of the header is singular or not finite";
        let hint = "correct it, for example with nibabel: `image.set_sform(affine)`";
        return Err(Error::data(path, reason, hint));
    }
    notes.extend(Grid { size, affine }.size_note());
    Ok((affine, notes))
}

/// Millimetres in the length unit of the header.
fn unit_factor(header: &NiftiHeader, notes: &mut Vec<String>) -> f64 {
    let (unit, factor) = match header.xyzt_units & 7 {
        1 => ("metres", 1000.0),
        3 => ("micrometres", 0.001),
        _ => return 1.0,
    };
    notes.push(format!("lengths of the header are in {unit}; they were converted to millimetres"));
    factor
}

/// The voxel sizes in mm of sform and `pixdim` (which the qform has) in words, if they contradict each other.
fn size_difference(header: &NiftiHeader, sform: &Affine, factor: f64) -> Option<[String; 2]> {
    // a singular sform is an error of its own
    sform.inverse()?;
    let stated = [1, 2, 3].map(|axis| f64::from(header.pixdim[axis]).abs() * factor);
    let spacing = sform.spacing();
    let is_same = |axis: usize, size: f64| (size - stated[axis]).abs() <= SIZE_TOLERANCE * size.max(stated[axis]);
    // of sheared voxels `pixdim` may be the distance of the slices
    let height = |axis: usize| {
        let area = length(cross(sform.step((axis + 1) % 3), sform.step((axis + 2) % 3)));
        sform.determinant().abs() / area
    };
    // 0 and NaN state nothing
    let is_stated = |axis: usize| axis < usize::from(header.dim[0]) && stated[axis] > 0.0 && stated[axis].is_finite();
    let differs = |axis: usize| is_stated(axis) && !is_same(axis, spacing[axis]) && !is_same(axis, height(axis));
    let words = |size: [f64; 3]| size.map(|value| format!("{value:.4}")).join(" x ");
    (0..3).any(differs).then(|| [spacing, stated].map(words))
}

/// Refuses two voxel sizes without a choice, and the choice of an affine that the file does not have.
fn check_choice(path: &Path, difference: &str, chosen: Option<Geometry>, has_qform: bool) -> Result<()> {
    let correct =
        "or correct the header, for example with nibabel: `image.set_sform(affine)`, `image.set_qform(affine)`";
    let reason = format!("its header has two voxel sizes: {difference}");
    let (reason, hint) = match (chosen, has_qform) {
        (Some(Geometry::Sform), _) | (Some(Geometry::Qform), true) => return Ok(()),
        (Some(Geometry::Qform), false) => (
            format!("{reason}; and it has no valid qform to choose"),
            "choose argument `geometry=sform` if its voxel sizes are right".to_owned(),
        ),
        (None, _) => {
            let qform = if has_qform { "or the argument `geometry=qform` " } else { "" };
            (reason, format!("find out which are right, and choose argument `geometry=sform` {qform}with them"))
        }
    };
    Err(Error::data(path, reason, format!("{hint}, {correct}")))
}

fn sform(header: &NiftiHeader) -> Affine {
    Affine([header.srow_x, header.srow_y, header.srow_z].map(|row| row.map(f64::from)))
}

fn zooms(header: &NiftiHeader) -> [f64; 3] {
    [1, 2, 3].map(|axis| match f64::from(header.pixdim[axis]).abs() {
        0.0 => 1.0,
        zoom => zoom,
    })
}

/// The affine of the quaternion; `None` if it is no rotation.
fn qform(header: &NiftiHeader) -> Option<Affine> {
    let [b, c, d] = [header.quatern_b, header.quatern_c, header.quatern_d].map(f64::from);
    let rest = 1.0 - (b * b + c * c + d * d);
    // rounding of f32
    if !rest.is_finite() || rest < -1e-5 {
        return None;
    }
    let a = rest.max(0.0).sqrt();
    let rotation = [
        [a * a + b * b - c * c - d * d, 2.0 * (b * c - a * d), 2.0 * (b * d + a * c)],
        [2.0 * (b * c + a * d), a * a + c * c - b * b - d * d, 2.0 * (c * d - a * b)],
        [2.0 * (b * d - a * c), 2.0 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ];
    let mut zooms = zooms(header);
    if header.pixdim[0] < 0.0 {
        zooms[2] = -zooms[2];
    }
    let step = |axis: usize| scale([rotation[0][axis], rotation[1][axis], rotation[2][axis]], zooms[axis]);
    let origin = [header.quatern_x, header.quatern_y, header.quatern_z].map(f64::from);
    Some(Affine::from_columns([step(0), step(1), step(2)], origin))
}

/// nibabel's affine of a file without one: LAS, with the origin in the centre.
fn base_affine(header: &NiftiHeader, size: [usize; 3]) -> Affine {
    let [x, y, z] = zooms(header);
    let steps = [-x, y, z];
    let centre = [0, 1, 2].map(|axis| -steps[axis] * (size[axis] as f64 - 1.0) / 2.0);
    Affine::from_columns([[steps[0], 0.0, 0.0], [0.0, steps[1], 0.0], [0.0, 0.0, steps[2]]], centre)
}

/// `b`, `c` and `d` of the rotation of an affine, and the sign of its third axis; `None` if its axes are not orthogonal.
fn quaternion(affine: &Affine) -> Option<([f64; 3], f64)> {
    let mut steps = affine.unit_steps()?;
    let sign = if affine.determinant() < 0.0 { -1.0 } else { 1.0 };
    steps[2] = steps[2].map(|value| value * sign);
    // the matrix has the steps as its columns
    let at = |row: usize, column: usize| steps[column][row];
    let diagonal = [at(0, 0), at(1, 1), at(2, 2)];
    let a = (1.0 + diagonal.iter().sum::<f64>()).max(0.0).sqrt() / 2.0;
    let skew = [at(2, 1) - at(1, 2), at(0, 2) - at(2, 0), at(1, 0) - at(0, 1)];
    if a > 0.1 {
        return Some((skew.map(|value| value / (4.0 * a)), sign));
    }
    // half a turn: from the largest entry of the diagonal
    let largest = (0..3).max_by(|x, y| diagonal[*x].total_cmp(&diagonal[*y]))?;
    let (next, last) = ((largest + 1) % 3, (largest + 2) % 3);
    let side = (1.0 + diagonal[largest] - diagonal[next] - diagonal[last]).max(0.0).sqrt() / 2.0;
    let mut vector = [0.0; 3];
    vector[largest] = side;
    vector[next] = (at(next, largest) + at(largest, next)) / (4.0 * side);
    vector[last] = (at(last, largest) + at(largest, last)) / (4.0 * side);
    // the fourth number must not be negative
    let flip = if skew[largest] < 0.0 { -1.0 } else { 1.0 };
    Some((vector.map(|value| value * flip), sign))
}

#[cfg(test)]
#[path = "geometry_tests.rs"]
mod tests;
