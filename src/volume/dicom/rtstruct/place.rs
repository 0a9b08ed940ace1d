//! Places of contours on the slices of a series.

use std::path::Path;

use dicom_core::Tag;
use dicom_dictionary_std::tags;
use dicom_object::InMemDicomObject;
use dicom_object::mem::InMemElement;

use super::super::super::grid::{Affine, Grid, swap_lps_ras};
use super::super::numbers::{integer, text, wrong};
use super::fill::Polygon;
use prsmed_base::error::{Error, Result};

/// Largest distance from a slice, as a share of the distance of slices. Contours half-way between two slices would be
/// put on either of them by rounding.
const MAX_OFFSET: f64 = 0.45;
/// Larger distances, between the points of a contour or the contours of a slice, are no rounding.
const FLAT: f64 = 0.1;
/// Points that are further outside of the image, in voxels, are no positions.
const FAR: f64 = 1e6;
/// ContourOffsetVector, which the standard has retired.
const OFFSET: Tag = Tag(0x3006, 0x0045);
const ON_SLICES: &str = "give the series that the contours were drawn on, with all of its slices";

/// A contour on a slice.
pub(super) struct Placed {
    pub slice: usize,
    /// Its place along the stack, in slices.
    pub height: f64,
    pub polygon: Polygon,
}

/// The slices of a series, and what was found about the contours on them.
pub(super) struct Slices<'a> {
    path: &'a Path,
    /// Position (RAS+) -> voxel.
    voxels: Affine,
    pub size: [usize; 3],
    spacing: [f64; 3],
    pub num_closed: usize,
    /// Slices without a contour between the first and the last one of an ROI.
    pub num_gaps: usize,
    num_open: usize,
    num_short: usize,
    num_cut: usize,
    /// Largest distances from slices, and from the image, in mm.
    beside: f64,
    beyond: f64,
}

impl<'a> Slices<'a> {
    pub(super) fn new(path: &'a Path, grid: &Grid) -> Result<Self> {
        let singular = || Error::data(path, "the affine of its volume is singular", ON_SLICES);
        Ok(Self {
            path,
            voxels: grid.affine.inverse().ok_or_else(singular)?,
            size: grid.size,
            spacing: grid.spacing(),
            num_closed: 0,
            num_gaps: 0,
            num_open: 0,
            num_short: 0,
            num_cut: 0,
            beside: 0.0,
            beyond: 0.0,
        })
    }

    /// The place of a contour; `None` for one without an area, which is left out. `name` is that of the contour, for
    /// messages.
    pub(super) fn place(&mut self, contour: &InMemDicomObject, name: &str) -> Result<Option<Placed>> {
        match text(contour, tags::CONTOUR_GEOMETRIC_TYPE).as_deref() {
            Some("CLOSED_PLANAR" | "CLOSEDPLANAR_XOR") => {}
            Some("POINT" | "OPEN_PLANAR" | "OPEN_NONPLANAR") => {
                self.num_open += 1;
                return Ok(None);
            }
            _ => return Err(wrong(self.path, format!("{name} has no known ContourGeometricType"))),
        }
        let points = self.points(contour, name)?;
        self.num_closed += 1;
        if points.len() < 3 {
            self.num_short += 1;
            return Ok(None);
        }
        let (slice, height) = self.slice_of(&points, name)?;
        self.check_inside(&points, name)?;
        Ok(Some(Placed { slice, height, polygon: points.into_iter().map(|[x, y, _]| [x, y]).collect() }))
    }

    /// The points of a contour in voxels.
    fn points(&self, contour: &InMemDicomObject, name: &str) -> Result<Vec<[f64; 3]>> {
        let offset = contour.get(OFFSET).map(InMemElement::to_multi_float64);
        if offset.is_some_and(|offset| offset.is_ok_and(|offset| offset.iter().any(|mm| *mm != 0.0))) {
            let hint = "export the contours without ContourOffsetVector, which the standard has retired";
            return Err(Error::data(self.path, format!("{name} is shifted by ContourOffsetVector"), hint));
        }
        let numbers = contour.get(tags::CONTOUR_DATA).map(|element| element.to_multi_float64().ok());
        let numbers = match numbers {
            None => Vec::new(),
            Some(numbers) => numbers
                .filter(|numbers| numbers.iter().all(|number| number.is_finite()))
                .ok_or_else(|| wrong(self.path, format!("ContourData of {name} must consist of numbers")))?,
        };
        let (points, rest) = numbers.as_chunks::<3>();
        let stated = integer(contour, tags::NUMBER_OF_CONTOUR_POINTS);
        if !rest.is_empty() || stated.is_some_and(|stated| usize::try_from(stated) != Ok(points.len())) {
            let stated = stated.map_or_else(|| "3 for each point".to_owned(), |stated| format!("{stated} points"));
            let reason = format!("ContourData of {name} has {} numbers, and should have {stated}", numbers.len());
            return Err(wrong(self.path, reason));
        }
        let voxels: Vec<[f64; 3]> = points.iter().map(|point| self.voxels.apply(swap_lps_ras(*point))).collect();
        if voxels.iter().flatten().all(|at| at.abs() <= FAR) {
            return Ok(voxels);
        }
        Err(Error::data(self.path, format!("{name} has a point far outside of the series"), ON_SLICES))
    }

    /// The slice of a contour, and its place along the stack.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to the number of slices")]
    fn slice_of(&mut self, points: &[[f64; 3]], name: &str) -> Result<(usize, f64)> {
        let [low, high] = extremes(points, 2);
        let distance = self.spacing[2];
        let refused = |reason: String| Err(Error::data(self.path, reason, ON_SLICES));
        if high - low > FLAT {
            let mm = (high - low) * distance;
            return refused(format!(
                "{name} is not parallel to the slices of the series: its points are up to {mm:.2} mm apart across them"
            ));
        }
        let height = f64::midpoint(low, high);
        let last = self.size[2] as f64 - 1.0;
        let outside = (-height).max(height - last);
        if outside > 0.5 {
            return refused(format!(
                "{name} is outside of the series, {:.2} mm from its nearest slice; slices are {distance:.2} mm apart",
                outside * distance
            ));
        }
        let slice = height.round().clamp(0.0, last);
        let off = (height - slice).abs();
        if off > MAX_OFFSET {
            return refused(format!(
                "{name} is half-way between slices, {:.2} mm from the nearest one; slices are {distance:.2} mm apart",
                off * distance
            ));
        }
        self.beside = self.beside.max(if off > FLAT { off * distance } else { 0.0 });
        Ok((slice as usize, height))
    }

    /// Refuses two contours of an ROI on one slice that lie in different planes.
    pub(super) fn check_plane(&self, heights: [f64; 2], name: &str) -> Result<()> {
        let apart = (heights[0] - heights[1]).abs();
        if apart <= FLAT {
            return Ok(());
        }
        let reason = format!(
            "{name} is {:.2} mm above or below another one of the same ROI, and slices are {:.2} mm apart: they were drawn \
             on other slices than those of this series",
            apart * self.spacing[2],
            self.spacing[2]
        );
        Err(Error::data(self.path, reason, ON_SLICES))
    }

    /// Refuses a contour beside the image. One that is partly outside is cut.
    fn check_inside(&mut self, points: &[[f64; 3]], name: &str) -> Result<()> {
        let (mut gap, mut reach) = (0.0_f64, 0.0_f64);
        for axis in [0, 1] {
            let [low, high] = extremes(points, axis);
            let end = self.size[axis] as f64 - 0.5;
            gap = gap.max((low - end).max(-0.5 - high) * self.spacing[axis]);
            reach = reach.max((-0.5 - low - FLAT).max(high - end - FLAT) * self.spacing[axis]);
        }
        if gap > 0.0 {
            return Err(Error::data(
                self.path,
                format!("{name} is {gap:.2} mm outside of the image of its slice"),
                ON_SLICES,
            ));
        }
        self.num_cut += usize::from(reach > 0.0);
        self.beyond = self.beyond.max(reach);
        Ok(())
    }

    /// What was left out or assumed.
    pub(super) fn notes(&self) -> Vec<String> {
        let Self { num_open, num_short, num_gaps, num_cut, beside, beyond, .. } = self;
        let all = [
            (*num_open > 0, format!("{num_open} points and open contours of the RTSTRUCT were left out")),
            (*num_short > 0, format!("{num_short} contours with fewer than 3 points have no area and were left out")),
            (
                *num_gaps > 0,
                format!(
                    "{num_gaps} slices between the first and the last contour of an ROI have none, and are empty there"
                ),
            ),
            (*beside > 0.0, format!("contours lie up to {beside:.2} mm beside slices; each is on the nearest slice")),
            (
                *num_cut > 0,
                format!("{num_cut} contours reach up to {beyond:.2} mm beyond the image, and were cut there"),
            ),
        ];
        all.into_iter().filter_map(|(holds, note)| holds.then_some(note)).collect()
    }
}

/// The smallest and the largest coordinate along an axis.
fn extremes(points: &[[f64; 3]], axis: usize) -> [f64; 2] {
    points
        .iter()
        .fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], point| [low.min(point[axis]), high.max(point[axis])])
}
