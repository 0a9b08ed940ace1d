//! Probe for a shortcut: false positives inside decoys.
//!
//! In pairs of `keep_lesion` the lesion consists of the source's own pixels, and the background is generated. A
//! segmenter could learn that camera noise marks a lesion. Decoys are preserved regions without a lesion: a segmenter
//! with that shortcut finds lesions in them. The probe compares its rate of false positives inside decoys with its rate
//! on the background of real test images.
//!
//! The pairs are training images of the synthetic arm, so the rate inside decoys is rather too low there. A rate that
//! is too high nevertheless is a sign of the shortcut; a low one is no proof of its absence.

use super::trained::ArmSegmenter;
use crate::augment::check_interrupt;
use crate::augment::export::Record;
use crate::augment::settings::{Mode, Paste};
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::labels::Labels;
use crate::data::manifest::Row;
use crate::data::split::spread;
use crate::metrics::segmentation::is_foreground;
use crate::runtime::Runtime;
use crate::tensor::weights::write_bytes;
use crate::{Result, files};
use image::RgbImage;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// A rate inside decoys above this multiple of the rate on real background suggests the shortcut.
pub(super) const MOST_TIMES: f64 = 1.5;
/// Number of pairs that are probed.
const MOST_PAIRS: usize = 40;
const FILE: &str = "probe.json";

/// Pixels of the background, and those of them that a segmenter takes for foreground.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FalsePositives {
    /// Predicted foreground.
    pub predicted: u64,
    /// All pixels.
    pub pixels: u64,
}

impl FalsePositives {
    /// Fraction of false positives; 0 without pixels.
    pub fn rate(&self) -> f64 {
        self.predicted as f64 / self.pixels.max(1) as f64
    }
}

impl std::ops::AddAssign for FalsePositives {
    fn add_assign(&mut self, other: Self) {
        self.predicted += other.predicted;
        self.pixels += other.pixels;
    }
}

/// False positives in the background of synthetic images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeCounts {
    /// Inside decoys.
    pub decoys: FalsePositives,
    /// In the generated background outside of decoys.
    pub generated: FalsePositives,
}

impl std::ops::AddAssign for ProbeCounts {
    fn add_assign(&mut self, other: Self) {
        self.decoys += other.decoys;
        self.generated += other.generated;
    }
}

/// Pairs with decoys.
pub(super) struct Probe {
    pairs: Vec<(Row, Record)>,
    /// Names of the pairs.
    identity: String,
    labels: Labels,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    pairs: String,
    counts: ProbeCounts,
}

impl Probe {
    /// The probe of at most 40 of these pairs; `None` if no pair has decoys of original pixels.
    pub(super) fn new(rows: &[Row], records: &[Record], labels: Labels) -> Option<Self> {
        let mut seen = HashSet::new();
        let has_decoys = |record: &Record| {
            record.mode == Mode::KeepLesion && record.paste == Paste::Exact && !record.decoys.is_empty()
        };
        let firsts: Vec<(&Row, &Record)> =
            rows.iter().zip(records).filter(|(_, record)| has_decoys(record) && seen.insert(&record.name)).collect();
        let chosen = spread((0..firsts.len()).collect(), MOST_PAIRS);
        let pairs: Vec<(Row, Record)> = chosen.iter().map(|&i| (firsts[i].0.clone(), firsts[i].1.clone())).collect();
        let names: Vec<&str> = pairs.iter().map(|(_, record)| record.name.as_str()).collect();
        let identity = names.join(" ");
        (!pairs.is_empty()).then_some(Self { pairs, identity, labels })
    }

    /// The counts that are known in the folder of a run.
    pub(super) fn known(&self, folder: &Path) -> Option<ProbeCounts> {
        let text = files::read(&folder.join(FILE), files::MAX_TABLE).ok()?;
        let saved: Saved = serde_json::from_slice(&text).ok()?;
        (saved.pairs == self.identity).then_some(saved.counts)
    }

    /// Counts false positives of a segmenter and writes them to the folder of its run.
    ///
    /// # Errors
    /// [`Error::Data`] for an image that cannot be read; [`Error::Interrupted`].
    pub(super) fn measure(&self, model: &ArmSegmenter, folder: &Path, runtime: &Runtime) -> Result<ProbeCounts> {
        let mut counts = ProbeCounts::default();
        for (row, record) in &self.pairs {
            check_interrupt(runtime.interrupt())?;
            counts += self.of_pair(model, row, record)?;
        }
        let saved = Saved { pairs: self.identity.clone(), counts };
        write_bytes(&folder.join(FILE), &serde_json::to_vec(&saved).expect("plain numbers serialise"))?;
        Ok(counts)
    }

    fn of_pair(&self, model: &ArmSegmenter, row: &Row, record: &Record) -> Result<ProbeCounts> {
        let image = decode::image(&row.image_path)?;
        let source = decode::image(&record.source_image)?;
        let label = foreground(&decode::labelled_mask(&row.target().mask_path, self.labels)?);
        let mask = model.probabilities(&image, &row.question).map_err(|error| error.of_image(&row.image_path))?;
        let is_label: Vec<bool> = label.iter().map(|value| *value > 127).collect();
        Ok(count(&image.to_rgb8(), &source.to_rgb8(), &is_label, &record.decoys, &mask))
    }
}

/// Counts false positives of the probabilities `mask`. A decoy is an irregular shape inside its box; its pixels are
/// those that equal the source's.
fn count(image: &RgbImage, source: &RgbImage, is_label: &[bool], decoys: &[[u32; 4]], mask: &[f32]) -> ProbeCounts {
    let mut counts = ProbeCounts::default();
    if image.dimensions() != source.dimensions() {
        // only an image of the same size has preserved pixels
        return counts;
    }
    let pixels = image.enumerate_pixels().zip(source.pixels()).zip(is_label.iter().zip(mask));
    for (((x, y, pixel), original), (&is_label, &probability)) in pixels {
        let in_box = decoys
            .iter()
            .any(|[left, top, right, bottom]| (*left..=*right).contains(&x) && (*top..=*bottom).contains(&y));
        let found = FalsePositives { predicted: u64::from(is_foreground(probability)), pixels: 1 };
        match (is_label, in_box, pixel == original) {
            (false, true, true) => counts.decoys += found,
            (false, false, false) => counts.generated += found,
            _ => {}
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Rgb;

    #[test]
    fn pixels_of_decoys_equal_those_of_the_source() {
        // one row: label, rim, generated, decoy, generated inside the decoy's box
        let source = RgbImage::from_fn(6, 1, |x, _| Rgb([u8::try_from(x).unwrap(); 3]));
        let mut image = source.clone();
        for x in [2, 4, 5] {
            image.put_pixel(x, 0, Rgb([200; 3]));
        }
        let is_label = [true, false, false, false, false, false];
        let found = count(&image, &source, &is_label, &[[3, 0, 4, 0]], &[0.9, 0.9, 0.1, 0.9, 0.9, 0.9]);
        assert_eq!(found.decoys, FalsePositives { predicted: 1, pixels: 1 });
        assert_eq!(found.generated, FalsePositives { predicted: 1, pixels: 2 });
        let smaller = RgbImage::new(3, 1);
        assert_eq!(count(&image, &smaller, &is_label, &[], &[0.9; 6]), ProbeCounts::default());
        assert_eq!((found.generated.rate(), FalsePositives::default().rate()), (0.5, 0.0));
    }
}
