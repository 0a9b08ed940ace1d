//! Contact sheets of pairs for people: source, the label in it, result and verdict.

use image::{GrayImage, RgbImage};

use super::verdict::Verdict;
use crate::augment::export::Export;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::picture::{self, Tile, overlay, sheet};
use crate::error::Result;
use crate::segment::task::spread;
use std::path::Path;

/// One line of a contact sheet.
#[derive(Debug, Clone, Copy)]
pub struct Item<'a> {
    /// The pair's name.
    pub name: &'a str,
    /// The picture it was made from.
    pub source: &'a RgbImage,
    /// The label of the result.
    pub mask: &'a GrayImage,
    /// The result.
    pub result: &'a RgbImage,
    /// What the filter says.
    pub verdict: &'a Verdict,
}

/// Scores in a caption.
const CAPTION_SCORES: usize = 4;

/// A page with a row of four tiles for each pair: the source, the label in it, the result, the label in that.
/// The outline is yellow; a caption says whether the pair was accepted, and why not.
///
/// # Errors
/// [`crate::Error::Shape`] when a mask is not of the size of its pictures.
pub fn contact_sheet(items: &[Item], title: &str) -> Result<RgbImage> {
    let mut tiles = Vec::with_capacity(4 * items.len());
    for item in items {
        let mask = foreground(item.mask);
        let nothing = GrayImage::new(mask.width(), mask.height());
        let outlined = |picture: &RgbImage| overlay(picture, &nothing, Some(&mask));
        tiles.push(Tile { image: item.source.clone(), caption: format!("{}\nsource", item.name) });
        tiles.push(Tile { image: outlined(item.source)?, caption: "label in the source".to_owned() });
        tiles.push(Tile { image: item.result.clone(), caption: verdict_words(item.verdict) });
        tiles.push(Tile { image: outlined(item.result)?, caption: "label in the result".to_owned() });
    }
    Ok(sheet(&tiles, 4, title))
}

/// A pair as a preview shows it: name, source, label, result, verdict.
pub type Shown = (String, RgbImage, GrayImage, RgbImage, Verdict);

/// Writes a sheet of `pairs`.
///
/// # Errors
/// [`crate::Error::Shape`] as [`contact_sheet`]; [`crate::Error::Io`].
pub fn save(pairs: &[Shown], title: &str, path: &Path) -> Result<()> {
    let items: Vec<Item> = pairs
        .iter()
        .map(|(name, source, mask, result, verdict)| Item { name, source, mask, result, verdict })
        .collect();
    picture::save(&contact_sheet(&items, title)?.into(), path)
}

/// Pairs on the sheet of a data root.
const SHOWN: usize = 16;

/// Writes a sheet of pairs spread over a data root, accepted and rejected.
///
/// # Errors
/// [`crate::Error::Data`] for a picture that cannot be read; as [`save`].
pub fn of_root(export: &Export, path: &Path) -> Result<()> {
    let records = export.journal().records();
    let mut shown = Vec::new();
    for i in spread((0..records.len()).collect(), SHOWN) {
        let record = &records[i];
        let (image, mask) = export.paths(record);
        let source = decode::picture(&record.source_image)?.to_rgb8();
        let result = decode::picture(&image)?.to_rgb8();
        let reasons = record.reason.split("; ").filter(|reason| !reason.is_empty()).map(str::to_owned).collect();
        let verdict = Verdict { scores: record.scores.clone(), accepted: record.accepted, reasons };
        shown.push((record.name.clone(), source, foreground(&decode::mask(&mask)?), result, verdict));
    }
    if shown.is_empty() {
        return Ok(());
    }
    let accepted = records.iter().filter(|record| record.accepted).count();
    save(&shown, &format!("{} of {} pairs, {accepted} accepted in all", shown.len(), records.len()), path)
}

/// The verdict as a caption: the reasons when rejected, else the first scores.
fn verdict_words(verdict: &Verdict) -> String {
    if !verdict.accepted {
        return format!("rejected\n{}", verdict.reason());
    }
    let scores: Vec<String> =
        verdict.scores.iter().take(CAPTION_SCORES).map(|(name, score)| format!("{name} {score:.3}")).collect();
    format!("accepted\n{}", scores.join(", "))
}

#[cfg(test)]
mod tests {
    use image::{Luma, Rgb};

    use super::*;
    use crate::data::picture::TRUTH_COLOR;

    #[test]
    fn a_sheet_shows_source_result_and_two_outlines() {
        let (red, green) = (Rgb([180, 20, 20]), Rgb([20, 160, 20]));
        let (source, result) = (RgbImage::from_pixel(320, 240, red), RgbImage::from_pixel(320, 240, green));
        let mask = GrayImage::from_fn(320, 240, |x, y| Luma([u8::from(x.abs_diff(160) < 90 && y.abs_diff(120) < 90)]));
        let mut verdict = Verdict::new();
        verdict.at_least("dice", 0.5, 0.8);
        let item = Item { name: "a", source: &source, mask: &mask, result: &result, verdict: &verdict };
        let page = contact_sheet(&[item, item], "pairs").unwrap();
        let count = |color: Rgb<u8>| page.pixels().filter(|pixel| **pixel == color).count();
        assert!(count(red) > 20_000 && count(green) > 20_000, "{} {}", count(red), count(green));
        assert!(count(TRUTH_COLOR) > 4 * 4 * 178, "a 0/1 mask is outlined too");
        assert_eq!(verdict_words(&verdict), "rejected\ndice 0.5000 is below 0.8000");
        assert_eq!(verdict_words(&Verdict::new()), "accepted\n");
        let wrong = Item { mask: &GrayImage::new(4, 4), ..item };
        assert!(contact_sheet(&[wrong], "pairs").is_err());
        assert!(contact_sheet(&[], "none").unwrap().height() > 0);
    }
}
