//! Preview of pairs while they are made: source, source with label, result, result with label. The frame colour shows the filter's
//! decision; a CSV file of the same name gives the reasons.

use image::{GrayImage, RgbImage};

use super::decision::Decision;
use crate::data::image::foreground;
use crate::data::sheet::{ACCEPTED_COLOR, REJECTED_COLOR, Tile, overlay, save_sheet};
use crate::error::Result;
use std::path::Path;

/// A pair on a preview.
#[derive(Debug, Clone)]
pub struct SheetPair {
    /// Name of the pair.
    pub name: String,
    /// The source image.
    pub source: RgbImage,
    /// The label of the result.
    pub mask: GrayImage,
    /// The generated image.
    pub result: RgbImage,
    /// The filter's decision.
    pub decision: Decision,
}

/// Writes a sheet with a row of four tiles for each pair.
///
/// # Errors
/// [`crate::Error::Shape`] when a mask and its image differ in size; [`crate::Error::Io`].
pub fn save(pairs: &[SheetPair], path: &Path) -> Result<()> {
    let mut tiles = Vec::with_capacity(4 * pairs.len());
    for SheetPair { name, source, mask, result, decision } in pairs {
        let mask = foreground(mask);
        let nothing = GrayImage::new(mask.width(), mask.height());
        let outlined = |image: &RgbImage| overlay(image, &nothing, Some(&mask));
        let frame = Some(if decision.accepted { ACCEPTED_COLOR } else { REJECTED_COLOR });
        let mut add = |shows, image, frame| {
            tiles.push(Tile { image, frame, name: name.clone(), shows, notes: describe(decision) });
        };
        add("source", source.clone(), None);
        add("source with the label (yellow outline)", outlined(source)?, None);
        add("result", result.clone(), frame);
        add("result with the label (yellow outline)", outlined(result)?, frame);
    }
    save_sheet(&tiles, 4, path)
}

/// The decision with its reasons, and all scores.
fn describe(decision: &Decision) -> String {
    let scores: Vec<String> = decision.scores.iter().map(|(name, score)| format!("{name} {score:.3}")).collect();
    let decided = if decision.accepted { "accepted".to_owned() } else { format!("rejected: {}", decision.reason()) };
    format!("{decided}; {}", scores.join(", "))
}

#[cfg(test)]
mod tests {
    use image::{Luma, Rgb};

    use super::*;
    use crate::data::sheet::TRUTH_COLOR;

    #[test]
    fn a_sheet_shows_source_result_outlines_and_the_decision() {
        let (red, green) = (Rgb([180, 20, 20]), Rgb([20, 160, 20]));
        let (source, result) = (RgbImage::from_pixel(320, 240, red), RgbImage::from_pixel(320, 240, green));
        let mask = GrayImage::from_fn(320, 240, |x, y| Luma([u8::from(x.abs_diff(160) < 90 && y.abs_diff(120) < 90)]));
        let mut decision = Decision::new();
        decision.at_least("dice", 0.5, 0.8);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sheet.png");
        let pair = SheetPair { name: "a".to_owned(), source, mask, result, decision: decision.clone() };
        save(&[pair.clone(), pair.clone()], &path).unwrap();
        let page = image::open(&path).unwrap().to_rgb8();
        let count = |color: Rgb<u8>| page.pixels().filter(|pixel| **pixel == color).count();
        assert!(count(red) > 20_000 && count(green) > 20_000, "{} {}", count(red), count(green));
        assert!(count(TRUTH_COLOR) > 4 * 4 * 178, "a 0/1 mask is outlined too");
        assert!(count(REJECTED_COLOR) > 4 * 1000 && count(ACCEPTED_COLOR) == 0);
        assert_eq!(describe(&decision), "rejected: dice 0.5000 is below 0.8000; dice 0.500");
        let wrong = SheetPair { mask: GrayImage::new(4, 4), ..pair };
        assert!(save(&[wrong], &path).is_err());
    }
}
