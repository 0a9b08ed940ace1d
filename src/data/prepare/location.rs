//! Binary masks, and the words for their location.

use image::GrayImage;

use super::options::Several;
use crate::agreement;
use crate::position::{self, Region, Zones};

/// The words for a mask's location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LocationWords {
    pub(super) zone: String,
    pub(super) second_zone: Option<String>,
    /// Number of regions that are described together.
    pub(super) count: usize,
    /// For quadrants: close to the centre; `None` when it is not mentioned.
    pub(super) near: Option<bool>,
}

impl LocationWords {
    /// The position label of the row.
    pub(super) fn label(&self) -> String {
        match &self.second_zone {
            Some(second) => format!("{} and {second}", self.zone),
            None => self.zone.clone(),
        }
    }
}

/// The location of a binary mask; `None` if it is empty.
pub(super) fn describe(mask: &GrayImage, zones: Zones, several: Several) -> Option<LocationWords> {
    let size = mask.dimensions();
    let whole = position::whole(mask)?;
    let regions = agreement::regions(mask, &whole);
    let count = regions.len().max(1);
    if let (Several::Regions, [first, last]) = (several, regions.as_slice()) {
        let label = |region: &Region| match zones {
            Zones::Grid => position::grid(region, size).label(zones),
            Zones::Quadrants => position::component_zone(region, size).label(),
        };
        let (zone, second_zone) = (label(first), label(last));
        if zone != second_zone {
            return Some(LocationWords { zone, second_zone: Some(second_zone), count: 1, near: None });
        }
    }
    let (zone, near) = match zones {
        Zones::Grid => (position::grid(&whole, size).label(zones), None),
        Zones::Quadrants => {
            let quadrant = position::quadrant(&whole, size);
            let zone = quadrant.position.label(zones);
            let near = (zone != "center").then_some(quadrant.near);
            (zone, near)
        }
    };
    Some(LocationWords { zone, second_zone: None, count, near })
}
