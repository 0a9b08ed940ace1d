//! Whether the words of an answer and a mask name the same location, and the same size and number of regions.
//!
//! A mask has the location that `prsmed data prepare` writes about it: the cell of the 3x3 grid with the centroid, or, for
//! data in quadrants, PRS-Med's rule. A text that names one side only (`on the left side`) agrees with every mask of that
//! side. A text that names several locations agrees with a mask of two regions that lie there.

use ::image::GrayImage;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::familiarity::add_fields;
use crate::manifest::Manifest;
use crate::numbers::{self, MaskNumbers};
use crate::position::{self, GridColumn, GridRow, Position, Region, Zones};
use prsmed_base::location::{StatedLocation, stated_location, stated_locations};

/// Regions smaller than this part of the foreground are specks of the drawing tool and are not counted.
pub(crate) const SPECK_FRAC: f64 = 0.01;

/// The parts of a mask, without specks.
pub(crate) fn regions(mask: &GrayImage, whole: &Region) -> Vec<Region> {
    let mut regions = position::components(mask);
    regions.retain(|region| region.area_px as f64 >= SPECK_FRAC * whole.area_px as f64);
    regions
}

/// Location of a mask by both rules.
#[derive(Debug, Clone)]
pub struct MaskLocation<'a> {
    mask: &'a GrayImage,
    pub(crate) whole: Region,
}

impl<'a> MaskLocation<'a> {
    /// The location of a mask whose foreground is above 0; `None` if it is empty.
    pub fn of(mask: &'a GrayImage) -> Option<Self> {
        Some(Self { mask, whole: position::whole(mask)? })
    }

    /// The cell.
    pub fn position(&self, zones: Zones) -> Position {
        match zones {
            Zones::Grid => position::grid(&self.whole, self.mask.dimensions()),
            Zones::Quadrants => position::quadrant(&self.whole, self.mask.dimensions()).position,
        }
    }

    /// The cell of each region, the larger one first.
    fn of_regions(&self, zones: Zones) -> Vec<Position> {
        let size = self.mask.dimensions();
        let of = |region: &Region| match zones {
            Zones::Grid => position::grid(region, size),
            Zones::Quadrants => position::component_zone(region, size).position,
        };
        let mut regions = regions(self.mask, &self.whole);
        regions.sort_by_key(|region| std::cmp::Reverse(region.area_px));
        regions.iter().map(of).collect()
    }

    /// The locations of the regions, if none of them is that of the whole mask.
    fn around(&self, zones: Zones) -> Vec<String> {
        let (whole, regions) = (self.position(zones), self.of_regions(zones));
        let is_between = regions.len() > 1 && !regions.contains(&whole);
        regions.iter().filter(|_| is_between).map(|region| region.label(zones)).collect()
    }

    /// Whether one location of a text is that of the mask. One side alone is also right for the half of the centroid.
    pub(crate) fn fits(&self, stated: StatedLocation, zones: Zones) -> bool {
        stated.fits(self.position(zones))
            || stated.is_one_sided()
                && stated.fits(position::component_zone(&self.whole, self.mask.dimensions()).position)
    }

    /// Whether these locations of a text, of which the first counts, are those of the mask.
    pub(crate) fn fits_any(&self, first: StatedLocation, all: &[StatedLocation], zones: Zones) -> bool {
        let in_regions = || {
            let regions = self.of_regions(zones);
            regions.len() == 2 && all.iter().all(|stated| regions.iter().any(|region| stated.fits(*region)))
        };
        self.fits(first, zones) || (all.len() > 1 && in_regions())
    }
}

/// The vocabulary of a text: that of its words, if quadrants can be meant, else `otherwise`.
pub(crate) fn zones_of(text: &str, stated: StatedLocation, otherwise: Zones) -> Zones {
    let cell = stated.position();
    let is_edge = (cell.row == GridRow::Center) != (cell.column == GridColumn::Center) && !stated.is_one_sided();
    // quadrants have no `top center`
    if is_edge { Zones::Grid } else { Zones::named_in(text).unwrap_or(otherwise) }
}

/// The vocabulary of the locations in a data root.
pub fn zones_of_rows(manifest: &Manifest) -> Zones {
    let mut rows = [0_usize; 2];
    for row in &manifest.rows {
        let text = row.position.as_deref().unwrap_or(&row.answer);
        if let (Some(stated), Some(_)) = (stated_location(text), Zones::named_in(text)) {
            rows[usize::from(zones_of(text, stated, Zones::Grid) == Zones::Quadrants)] += 1;
        }
    }
    if rows[1] > rows[0] { Zones::Quadrants } else { Zones::Grid }
}

/// Location of a mask, location in the answer, and whether they agree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Positions {
    /// Location of the mask in words, by the rule of `prsmed data prepare`; `None` for an empty mask.
    #[serde(default)]
    pub mask_position: Option<String>,
    /// The locations of the regions of a mask whose own location is between them, the larger region first; else empty.
    #[serde(default)]
    pub mask_regions: Vec<String>,
    /// The location that the answer names; `None` if it names none.
    #[serde(default)]
    pub answer_position: Option<String>,
    /// Whether the two are the same; `None` if one of them is missing.
    #[serde(default)]
    pub positions_agree: Option<bool>,
    /// What to tell if the answer and the mask differ in location, size or number of regions.
    #[serde(default)]
    pub position_warning: Option<String>,
}

impl Positions {
    /// Compares a mask (foreground above 0) with an answer. `zones` is the vocabulary of the training data; the words
    /// of the answer may show another one.
    pub fn of(mask: &GrayImage, answer: &str, zones: Zones) -> Self {
        let location = MaskLocation::of(mask);
        let stated = stated_location(answer);
        let zones = stated.map_or(zones, |stated| zones_of(answer, stated, zones));
        let mask_position = location.as_ref().map(|location| location.position(zones).label(zones));
        let mask_regions = location.as_ref().map_or_else(Vec::new, |location| location.around(zones));
        let all = stated_locations(answer);
        let answer_position = stated.map(|first| match all.as_slice() {
            [_, _, ..] => all.iter().map(|stated| stated.label(zones)).collect::<Vec<_>>().join(" and "),
            _ => first.label(zones),
        });
        let numbers = location.as_ref().filter(|_| numbers::has_any(answer));
        let numbers = numbers.map(|location| MaskNumbers::of(&location.whole, mask));
        let numbers = numbers.iter().flat_map(|numbers| numbers.wrong(answer).map(|(_, reason)| reason)).collect();
        let positions_agree = location.zip(stated).map(|(location, first)| location.fits_any(first, &all, zones));
        let mut found = Self { mask_position, mask_regions, answer_position, positions_agree, position_warning: None };
        found.position_warning = found.warning(answer, numbers);
        found
    }

    /// `numbers` says which numbers of the answer are not those of the mask.
    fn warning(&self, answer: &str, numbers: Vec<String>) -> Option<String> {
        let location = match (&self.mask_position, &self.answer_position) {
            (Some(mask), Some(answer)) if self.positions_agree == Some(false) => {
                Some(format!("the answer names the location `{answer}`, the mask lies in `{mask}`"))
            }
            (None, Some(answer)) => Some(format!("the answer names the location `{answer}`, the mask is empty")),
            (Some(mask), None) if denies(answer) => {
                Some(format!("the answer says that nothing is there, the mask lies in `{mask}`"))
            }
            _ => None,
        };
        let all: Vec<String> = location.into_iter().chain(numbers).collect();
        (!all.is_empty()).then(|| {
            let all = all.join("; ");
            format!("the answer and the mask differ: {all}; trust neither of them without a look at the image")
        })
    }

    /// Adds these fields to a JSON object.
    pub fn add_to(&self, record: &mut Value) {
        add_fields(record, self);
    }

    /// Both locations in one line.
    pub fn line(&self) -> String {
        let or = |position: &Option<String>, none: &str| position.clone().unwrap_or_else(|| none.to_owned());
        let agree = match self.positions_agree {
            Some(true) => ", they agree",
            Some(false) => ", they differ",
            None => "",
        };
        let between = match self.mask_regions.as_slice() {
            [] => String::new(),
            all => format!(", between its {} regions ({})", all.len(), all.join(", ")),
        };
        format!(
            "position of the mask: {}{between}; in the answer: {}{agree}",
            or(&self.mask_position, "none, it is empty"),
            or(&self.answer_position, "none")
        )
    }
}

/// Whether a text says that a target is absent, in the words of the built-in templates and similar ones.
pub(crate) fn denies(text: &str) -> bool {
    let lower = text.to_lowercase();
    let begins =
        ["no ", "no, ", "there is no ", "there are no "].iter().any(|words| lower.trim_start().starts_with(words));
    begins || [" shows no ", " show no ", " there is no ", " there are no "].iter().any(|words| lower.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::image::Luma;

    /// An empty mask of 90x60 with boxes `(left, top, side)`.
    fn mask(boxes: &[(u32, u32, u32)]) -> GrayImage {
        let inside = |x: u32, y: u32| {
            boxes.iter().any(|&(left, top, side)| (left..left + side).contains(&x) && (top..top + side).contains(&y))
        };
        GrayImage::from_fn(90, 60, |x, y| Luma([if inside(x, y) { 255 } else { 0 }]))
    }

    #[test]
    fn numbers_of_an_answer_are_compared_with_its_mask() {
        // 100 of 5,400 pixels
        let one = &[(70, 45, 10)][..];
        let warning = |boxes, answer| Positions::of(&mask(boxes), answer, Zones::Grid).position_warning;
        assert_eq!(warning(one, "It lies in the lower right part, covering about 2% of the image."), None);
        let size = warning(one, "It lies in the lower right part, covering about 14% of the image.").unwrap();
        assert!(size.contains("says `14% of the image`, the mask covers 1.9%"), "{size}");
        let both = warning(one, "It lies in the upper left part and has 3 separate areas.").unwrap();
        assert!(both.contains("the mask lies in `lower right`; ") && both.contains("the mask has 1; trust"), "{both}");
        assert_eq!(warning(&[], "It covers about 14% of the image."), None, "there is no mask to compare with");
    }

    #[test]
    fn answers_are_compared_with_masks() {
        let lower_right = &[(70, 45, 10)][..];
        let two = &[(5, 5, 10), (70, 45, 10)][..];
        for (boxes, answer, mask_position, answer_position, agree) in [
            (lower_right, "The lesion is in the lower right part of the image.", "lower right", "lower right", "true"),
            (
                lower_right,
                "The lesion is in the lower center part of the image.",
                "lower right",
                "lower center",
                "false",
            ),
            (lower_right, "It is on the right side of the image.", "lower right", "right", "true"),
            (lower_right, "It is at the top of the image.", "bottom right", "top", "false"),
            (
                lower_right,
                "The lesion is in the bottom right part of the image.",
                "bottom right",
                "bottom right",
                "true",
            ),
            // quadrants have no edges, so that these words are those of a grid
            (lower_right, "in the bottom center part of the image", "lower right", "lower center", "false"),
            (lower_right, "The left lung shows an opacity.", "lower right", "-", "null"),
            (
                lower_right,
                "In the left lung, in the lower right part of the image.",
                "lower right",
                "lower right",
                "true",
            ),
            (
                two,
                "in two places: in the upper left part and in the lower right part of the image.",
                "center",
                "upper left and lower right",
                "true",
            ),
            (
                two,
                "in two places: in the upper right part and in the lower right part of the image.",
                "center",
                "upper right and lower right",
                "false",
            ),
            (two, "in the center of the image. It consists of 2 separate areas.", "center", "center", "true"),
            (&[], "The lesion is in the center of the image.", "-", "center", "null"),
            (&[], "There is no lesion in this image.", "-", "-", "null"),
        ] {
            let found = Positions::of(&mask(boxes), answer, Zones::Grid);
            let text = |position: &Option<String>| position.clone().unwrap_or_else(|| "-".into());
            let agrees = found.positions_agree.map_or("null".to_owned(), |agree| agree.to_string());
            let all = (text(&found.mask_position), text(&found.answer_position), agrees);
            assert_eq!(all, (mask_position.into(), answer_position.into(), agree.into()), "{answer}");
            let is_said = found.position_warning.is_some();
            assert_eq!(is_said, agree == "false" || (mask_position == "-" && answer_position != "-"), "{answer}");
        }
    }

    #[test]
    fn a_location_between_the_regions_of_a_mask_is_said_to_be_between() {
        let line = |boxes| Positions::of(&mask(boxes), "The lesion is in the center of the image.", Zones::Grid).line();
        let two = line(&[(5, 5, 10), (70, 45, 12)][..]);
        let expected = "position of the mask: center, between its 2 regions (lower right, upper left); in the answer: center, they agree";
        assert_eq!(two, expected);
        let others = line(&[(5, 5, 5), (40, 25, 12)][..]);
        assert_eq!(others, "position of the mask: center; in the answer: center, they agree", "one region lies there");
    }

    #[test]
    fn the_vocabulary_of_the_training_data_decides_where_the_words_do_not() {
        // the box has the middle of the image, the centroid is in the upper left cell
        let mask = mask(&[(0, 0, 20), (40, 28, 6)]);
        let of = |answer: &str, zones| Positions::of(&mask, answer, zones).positions_agree;
        assert_eq!(of("in the center of the image", Zones::Quadrants), Some(true));
        assert_eq!(of("in the center of the image", Zones::Grid), Some(false));
        assert_eq!(
            of("in the upper left part of the image", Zones::Quadrants),
            Some(true),
            "the words are those of a grid"
        );
    }

    #[test]
    fn an_answer_that_denies_the_target_differs_from_a_mask() {
        let mask = mask(&[(70, 45, 10)]);
        let warning = |answer: &str| Positions::of(&mask, answer, Zones::Grid).position_warning;
        for answer in
            ["There is no lesion in this image.", "No lesion is visible in this image.", "This image shows no polyp."]
        {
            assert!(warning(answer).unwrap().contains("says that nothing is there"), "{answer}");
        }
        for answer in ["", "A nevus.", "The lesion is not large.", "Nothing else, but a lesion."] {
            assert_eq!(warning(answer), None, "{answer}");
        }
    }
}
