//! Labels of masks: which values of a mask are foreground, and which masks have several labels.
//!
//! A mask has one target. A mask file with several labels (a label map) can be used if the user says which labels are
//! the target; without that it is an error, because every guess would lose labels.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Most labels that can be chosen.
pub const MAX_LABELS: usize = 16;
/// Below this largest value a mask cannot be antialiased: each of its values is a label.
pub(super) const SMALL: usize = 16;
/// A mask with more labels than this is a soft mask, if they rise in steps.
const SOFT: usize = 64;
/// A mask with so many values that fill no area is antialiased or has JPEG noise.
pub(super) const NOISE: usize = 8;

/// Most labels that a message names.
const MAX_NAMED: usize = 5;

/// The labels of a mask that are foreground. Empty: the mask has one label, which is found from its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Labels {
    /// Ascending; unused places are 0, the background.
    values: [u16; MAX_LABELS],
    count: usize,
}

impl Labels {
    /// No chosen labels.
    pub const NONE: Self = Self { values: [0; MAX_LABELS], count: 0 };

    /// The foreground is these labels.
    ///
    /// # Errors
    /// A sentence, for label 0 and for more than [`MAX_LABELS`] labels.
    pub fn new(labels: &[u16]) -> Result<Self, String> {
        let mut sorted = labels.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.first() == Some(&0) {
            return Err("label 0 is the background".into());
        }
        if sorted.len() > MAX_LABELS {
            return Err(format!("{} labels are too many; {MAX_LABELS} can be chosen", sorted.len()));
        }
        let mut this = Self { count: sorted.len(), ..Self::NONE };
        this.values[..sorted.len()].copy_from_slice(&sorted);
        Ok(this)
    }

    /// True if no labels are chosen.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// True if `value` is one of the labels.
    pub fn contains(&self, value: u16) -> bool {
        self.values[..self.count].contains(&value)
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<String> = self.values[..self.count].iter().map(u16::to_string).collect();
        f.write_str(&labels.join(","))
    }
}

impl FromStr for Labels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let label = |part: &str| part.parse().map_err(|_| format!("`{part}` is not a label from 1 to 65535"));
        Self::new(&parts.map(label).collect::<Result<Vec<u16>, String>>()?)
    }
}

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Labels {
    /// From `"1,3"`, `[1, 3]` or `1`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            One(u16),
            Several(Vec<u16>),
            Text(String),
        }
        let expected = "expected labels from 1 to 65535, for example `1,3`";
        let written = Written::deserialize(deserializer).map_err(|_| de::Error::custom(expected))?;
        let labels = match written {
            Written::One(label) => Self::new(&[label]),
            Written::Several(labels) => Self::new(&labels),
            Written::Text(text) => text.parse(),
        };
        labels.map_err(|reason| de::Error::custom(format!("{expected}: {reason}")))
    }
}

/// The labels of a mask, ascending, each with its number of pixels. Background is 0.
///
/// Values on the border of a region are no labels: antialiasing and JPEG compression make them. A label fills an area:
/// a pixel and its eight neighbours have its value somewhere. Values close to 0 or to the largest value are noise if
/// the mask has many values that fill no area. In a mask with values below 16 every value is a label.
///
/// Not found: a label that is nowhere three pixels thick, in a mask with values of 16 and more. A file of at most half of the
/// range with many such labels is refused; see [`MaskRefusal::Probabilities`](super::decode::MaskRefusal::Probabilities).
///
/// `noise` is that of a file whose compression changes values by about so much. Values so close to 0 or to a more frequent
/// label are noise too. In a lossless file they are labels, because somebody has stored them.
pub fn labels_of<T: Copy + Into<u16>>(values: &[T], width: usize, noise: u8) -> Vec<(u16, u64)> {
    let level = |value: T| usize::from(value.into());
    let most = values.iter().map(|&value| level(value)).max().unwrap_or(0);
    let mut counts = vec![0_u64; most + 1];
    for &value in values {
        counts[level(value)] += 1;
    }
    if most == 0 {
        return Vec::new();
    }
    let mut labels: Vec<usize> = (1..=most).filter(|&value| counts[value] > 0).collect();
    if labels.len() > 1 && most >= SMALL {
        let fills = levels_with_area(values, width, most);
        let num_areas = fills.iter().filter(|fills| **fills).count();
        let num_other = counts.iter().filter(|count| **count > 0).count() - num_areas;
        let allowed = if num_other >= NOISE.max(num_areas) { most / 8 } else { usize::from(noise).min(most / 8) };
        labels.retain(|&value| fills[value] && value > allowed);
        if noise == 0 {
            labels.retain(|&value| most - value > allowed);
        } else {
            labels = most_frequent(labels, &counts, allowed);
        }
        if labels.len() > SOFT && !has_jumps(values, width, most) {
            labels.clear();
        }
        if labels.last().is_none_or(|last| most - last > allowed) {
            labels.push(most);
        }
    }
    labels.into_iter().map(|value| (u16::try_from(value).unwrap_or(u16::MAX), counts[value])).collect()
}

/// Whether bright pixels mostly have equal neighbours or dark ones, as objects on a background have. Soft masks rise in
/// small steps.
fn has_jumps<T: Copy + Into<u16>>(values: &[T], width: usize, most: usize) -> bool {
    let (mut num_steps, mut num_jumps) = (0_usize, 0_usize);
    for row in values.chunks_exact(width.max(1)) {
        for pair in row.windows(2) {
            let pair: [usize; 2] = [pair[0], pair[1]].map(|value| usize::from(value.into()));
            let (low, high) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            if low != high && 2 * high > most {
                num_steps += 1;
                num_jumps += usize::from(2 * low < high);
            }
        }
    }
    2 * num_jumps > num_steps
}

/// The labels without those that differ by at most `allowed` from a more frequent one.
fn most_frequent(mut labels: Vec<usize>, counts: &[u64], allowed: usize) -> Vec<usize> {
    labels.sort_by_key(|&label| std::cmp::Reverse(counts[label]));
    let mut kept: Vec<usize> = Vec::new();
    for label in labels {
        if kept.iter().all(|other| other.abs_diff(label) > allowed) {
            kept.push(label);
        }
    }
    kept.sort_unstable();
    kept
}

/// For each level whether a pixel and all of its neighbours have it.
fn levels_with_area<T: Copy + Into<u16>>(values: &[T], width: usize, most: usize) -> Vec<bool> {
    let mut fills = vec![false; most + 1];
    let rows: Vec<&[T]> = values.chunks_exact(width.max(1)).collect();
    for (y, row) in rows.iter().enumerate() {
        let near = &rows[y.saturating_sub(1)..(y + 2).min(rows.len())];
        for (x, &value) in row.iter().enumerate() {
            let value: u16 = value.into();
            if !fills[usize::from(value)] {
                let columns = x.saturating_sub(1)..(x + 2).min(width);
                fills[usize::from(value)] =
                    near.iter().all(|row| row[columns.clone()].iter().all(|&other| other.into() == value));
            }
        }
    }
    fills
}

/// `5 (120 pixels), 20 (33 pixels)`.
pub fn describe(labels: &[(u16, u64)]) -> String {
    counted(labels.iter().map(|(label, count)| (label.to_string(), *count)))
}

/// Names with their numbers of pixels, at most five.
pub(super) fn counted(names: impl ExactSizeIterator<Item = (String, u64)>) -> String {
    let more = names.len().saturating_sub(MAX_NAMED);
    let texts: Vec<String> = names.take(MAX_NAMED).map(|(name, count)| format!("{name} ({count} pixels)")).collect();
    let texts = texts.join(", ");
    if more > 0 { format!("{texts} and {more} more") } else { texts }
}

#[cfg(test)]
mod tests {
    use ::image::{GrayImage, Luma, imageops};

    use super::*;

    fn found(mask: &GrayImage) -> Vec<u16> {
        labels_of(mask.as_raw(), mask.width() as usize, 0).into_iter().map(|(label, _)| label).collect()
    }

    /// Three boxes of these values, on 0.
    fn boxes(values: [u8; 3]) -> GrayImage {
        GrayImage::from_fn(64, 40, |x, y| {
            let inside = (8..32).contains(&y) && x % 20 >= 4 && x < 60;
            Luma([if inside { values[x as usize / 20] } else { 0 }])
        })
    }

    fn disc(side: u32, radius: f32, softness: f32) -> GrayImage {
        let middle = side as f32 / 2.0;
        GrayImage::from_fn(side, side, |x, y| {
            let distance = ((x as f32 - middle).powi(2) + (y as f32 - middle).powi(2)).sqrt();
            let level = ((radius - distance) / softness + 0.5).clamp(0.0, 1.0);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=255")]
            Luma([(level * 255.0) as u8])
        })
    }

    #[test]
    fn every_label_of_a_label_map_is_found() {
        assert_eq!(found(&boxes([5, 20, 20])), [5, 20]);
        assert_eq!(found(&boxes([100, 255, 255])), [100, 255]);
        assert_eq!(found(&boxes([5, 12, 255])), [5, 12, 255]);
        assert_eq!(found(&boxes([1, 2, 3])), [1, 2, 3]);
        let resized = imageops::resize(&boxes([5, 20, 20]), 200, 130, imageops::FilterType::Triangle);
        assert_eq!(found(&resized), [5, 20], "with borders of antialiasing");
        let line = GrayImage::from_fn(9, 9, |x, y| Luma([if x == 4 { 1 } else { u8::from(y > 6) * 2 }]));
        assert_eq!(found(&line), [1, 2], "a line of one pixel");
        let deep = [0_u16, 0, 300, 300, 300, 1000, 1000, 1000];
        assert_eq!(labels_of(&deep, 8, 0), [(300, 3), (1000, 3)], "16 bits");
    }

    #[test]
    fn masks_of_one_label_have_one_label() {
        for value in [1, 3, 200, 255] {
            assert_eq!(found(&boxes([value; 3])), [u16::from(value)]);
        }
        assert_eq!(found(&GrayImage::new(4, 4)), Vec::<u16>::new());
        assert_eq!(found(&GrayImage::from_pixel(4, 4, Luma([255]))), [255]);
        for softness in [1.0, 2.0, 8.0, 30.0] {
            assert_eq!(found(&disc(256, 60.0, softness)), [255], "a border of {softness} pixels");
        }
        let small = disc(64, 15.0, 1.0);
        for filter in [imageops::FilterType::Triangle, imageops::FilterType::CatmullRom] {
            assert_eq!(found(&imageops::resize(&small, 512, 512, filter)), [255]);
        }
        assert_eq!(found(&imageops::blur(&disc(256, 60.0, 1.0), 6.0)).len(), 1);
    }

    #[test]
    fn noise_of_jpeg_compression_is_no_label() {
        for quality in [10, 30, 50, 75, 95] {
            for mask in [disc(256, 60.0, 1.0), boxes([255; 3])] {
                let mut bytes = Vec::new();
                let encoder = ::image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, quality);
                mask.write_with_encoder(encoder).expect("encoded");
                let decoded = ::image::load_from_memory(&bytes).expect("decoded").into_luma8();
                assert_eq!(found(&decoded).len(), 1, "quality {quality}: {:?}", found(&decoded));
            }
        }
    }

    #[test]
    fn labels_are_read_from_settings_in_any_notation() {
        for written in ["\"3, 1\"", "[1, 3, 3]", "\"1,3\""] {
            let labels: Labels = serde_json::from_str(written).expect(written);
            assert_eq!(labels.to_string(), "1,3");
            assert!(labels.contains(3) && !labels.contains(2) && !labels.contains(0));
        }
        assert_eq!(serde_json::from_str::<Labels>("7").expect("a number").to_string(), "7");
        assert!(serde_json::from_str::<Labels>("\"\"").expect("none").is_empty());
        assert!(!Labels::default().contains(0));
        for bad in ["0", "\"1,x\"", "\"70000\"", "[0]", "1.5"] {
            assert!(serde_json::from_str::<Labels>(bad).is_err(), "{bad}");
        }
        assert!(Labels::new(&(1..=17).collect::<Vec<_>>()).is_err());
    }
}
