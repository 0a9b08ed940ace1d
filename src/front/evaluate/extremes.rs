//! The images of an evaluation that a person should see: the worst, the best, and masks of absent targets.

use crate::Result;
use crate::data::manifest::Row;
use crate::data::sheet;
use image::imageops::{self, FilterType};
use image::{DynamicImage, GrayImage, RgbImage};
use std::collections::HashSet;
use std::path::PathBuf;

/// Number of the worst, and of the best.
const KEPT: usize = 8;
/// Number of masks of absent targets.
const FALSE_MASKS: usize = 4;
/// Longest side of an image of a case in pixels.
const SIDE_PX: u32 = 512;

/// An image with its two masks at one size, at most 512 pixels wide and high.
#[derive(Debug, Clone)]
pub struct Case {
    /// Index of the sample.
    pub sample: usize,
    /// The image.
    pub image: RgbImage,
    /// Predicted mask as it was scored, 0 or 255.
    pub prediction: GrayImage,
    /// True mask, 0 or 255.
    pub truth: GrayImage,
}

impl Case {
    /// Makes an image and its masks of equal size small. Masks are foreground from level 128 on.
    pub fn new(sample: usize, image: &DynamicImage, prediction: &GrayImage, truth: &GrayImage) -> Self {
        let is_large = image.width().max(image.height()) > SIDE_PX;
        let small = if is_large { image.resize(SIDE_PX, SIDE_PX, FilterType::Triangle) } else { image.clone() };
        let (width, height) = (small.width(), small.height());
        let mask = |mask: &GrayImage| {
            let mut mask = imageops::resize(mask, width, height, FilterType::Nearest);
            mask.iter_mut().for_each(|level| *level = if *level >= 128 { 255 } else { 0 });
            mask
        };
        Self { sample, image: small.to_rgb8(), prediction: mask(prediction), truth: mask(truth) }
    }
}

/// The cases of a report.
#[derive(Debug, Clone, Default)]
pub struct Cases {
    /// The lowest Dice first.
    pub worst: Vec<Case>,
    /// The highest Dice first, without the worst.
    pub best: Vec<Case>,
    /// Masks of targets that are absent, the highest presence score first.
    pub false_masks: Vec<Case>,
}

/// The worst and the best samples so far. Questions about the same mask of an image share a tile.
#[derive(Debug, Default)]
pub(super) struct Extremes {
    masks: HashSet<(PathBuf, PathBuf)>,
    worst: Vec<Kept>,
    best: Vec<Kept>,
    false_masks: Vec<Kept>,
}

/// A case with its tile, its score and its number.
#[derive(Debug)]
struct Kept {
    score: f64,
    number: usize,
    shown: Shown,
}

/// A tile of the sheet and the case of the report.
pub(super) type Shown = (sheet::Tile, Case);

impl Extremes {
    /// Offers the mask of a target that is in the image.
    pub(super) fn offer(&mut self, row: &Row, dice: f64, shown: impl Fn() -> Result<Shown>) -> Result<()> {
        if !self.masks.insert((row.image_path.clone(), row.target().mask_path.clone())) {
            return Ok(());
        }
        let number = self.masks.len();
        keep(&mut self.worst, KEPT, (-dice, number), &shown)?;
        keep(&mut self.best, KEPT, (dice, number), &shown)
    }

    /// Offers the mask of a target that is absent.
    pub(super) fn offer_false(&mut self, presence: f64, shown: impl Fn() -> Result<Shown>) -> Result<()> {
        keep(&mut self.false_masks, FALSE_MASKS, (presence, 0), &shown)
    }

    /// The worst, then those of the best that are not among the worst.
    pub(super) fn into_parts(self) -> (Vec<sheet::Tile>, Cases) {
        let worst: HashSet<usize> = self.worst.iter().map(|kept| kept.number).collect();
        let best: Vec<Kept> = self.best.into_iter().filter(|kept| !worst.contains(&kept.number)).collect();
        let tiles = self.worst.iter().chain(&best).map(|kept| kept.shown.0.clone()).collect();
        let cases = |kept: Vec<Kept>| kept.into_iter().map(|kept| kept.shown.1).collect();
        (tiles, Cases { worst: cases(self.worst), best: cases(best), false_masks: cases(self.false_masks) })
    }
}

/// Adds an item to the `most` items with the highest scores. Among equal scores the first stays.
fn keep(list: &mut Vec<Kept>, most: usize, of: (f64, usize), shown: &impl Fn() -> Result<Shown>) -> Result<()> {
    let (score, number) = of;
    if list.len() == most && list.last().is_some_and(|last| score <= last.score) {
        return Ok(());
    }
    list.push(Kept { score, number, shown: shown()? });
    list.sort_by(|a, b| b.score.total_cmp(&a.score));
    list.truncate(most);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::manifest::{Presence, Split, Target};

    fn row(image: &str, mask: &str) -> Row {
        Row {
            csv: PathBuf::new(),
            line: 2,
            modality: "skin".into(),
            targets: Target::only(mask.into(), Presence::Present),
            image_path: image.into(),
            question: String::new(),
            answer: String::new(),
            position: None,
            split: Split::Test,
            patient: None,
            spacing_mm: None,
            synthetic: false,
        }
    }

    fn shown(name: &str, side: u32) -> Shown {
        let tile = sheet::Tile { image: RgbImage::new(1, 1), name: name.to_owned(), shows: "", notes: String::new() };
        let mask = GrayImage::from_fn(side, side / 2, |x, _| image::Luma([if x * 2 < side { 200 } else { 100 }]));
        (tile, Case::new(name.len(), &DynamicImage::new_rgb8(side, side / 2), &mask, &mask))
    }

    #[test]
    fn a_sheet_shows_every_image_and_mask_once() {
        let mut kept = Extremes::default();
        for (image, mask, dice, name) in [
            ("a", "left", 0.9, "a left"),
            ("a", "left", 0.1, "again"),
            ("a", "right", 0.2, "a right"),
            ("b", "b", 0.5, "b"),
        ] {
            kept.offer(&row(image, mask), dice, || Ok(shown(name, 8))).expect("a tile");
        }
        let (tiles, cases) = kept.into_parts();
        let names: Vec<String> = tiles.into_iter().map(|tile| tile.name).collect();
        assert_eq!(names, ["a right", "b", "a left"]);
        assert_eq!((cases.worst.len(), cases.best.len(), cases.false_masks.len()), (3, 0, 0));
    }

    #[test]
    fn the_extremes_of_many_are_kept() {
        let mut kept = Extremes::default();
        for i in 0..40 {
            let dice = f64::from(i * 7 % 40) / 40.0;
            kept.offer(&row(&i.to_string(), "m"), dice, || Ok(shown(&format!("{dice}"), 8))).expect("a tile");
            kept.offer_false(dice, || Ok(shown(&format!("{dice}"), 8))).expect("a tile");
        }
        let dice = |kept: &[Kept]| kept.iter().map(|kept| kept.score).collect::<Vec<_>>();
        assert_eq!(dice(&kept.best), (0..8).map(|i| f64::from(39 - i) / 40.0).collect::<Vec<_>>());
        assert_eq!(dice(&kept.worst), (0..8).map(|i| -f64::from(i) / 40.0).collect::<Vec<_>>());
        assert_eq!(kept.false_masks.len(), FALSE_MASKS);
        let (tiles, cases) = kept.into_parts();
        assert_eq!((tiles.len(), cases.worst.len(), cases.best.len()), (16, 8, 8));
    }

    #[test]
    fn a_case_is_small_and_its_masks_have_two_levels() {
        let case = shown("x", 2000).1;
        assert_eq!((case.image.dimensions(), case.prediction.dimensions()), ((512, 256), (512, 256)));
        let set = case.truth.pixels().filter(|pixel| pixel.0 == [255]).count();
        assert!(set == 512 * 256 / 2 && case.truth.iter().all(|level| [0, 255].contains(level)), "{set}");
    }
}
