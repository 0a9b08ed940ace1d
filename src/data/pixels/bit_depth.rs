//! Finds 16-bit images that use a small part of the range of values. They become almost black or without contrast when
//! they are scaled to 8 bits.

use std::collections::BTreeSet;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use ::image::{ImageDecoder, ImageFormat, ImageReader};
use rayon::prelude::*;
use serde::Serialize;

use crate::decode;
use prsmed_base::files;

/// An image whose values span less than this is reported: a quarter of the range of 16 bits.
const MIN_SPAN: u16 = 1 << 14;
/// Most images that [`survey`] decodes.
const MAX_DECODED: usize = 64;

/// A 16-bit image that uses a small part of the range.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NarrowImage {
    /// The file.
    pub path: PathBuf,
    /// Smallest value.
    pub min: u16,
    /// Largest value.
    pub max: u16,
}

impl NarrowImage {
    /// `None` if the range is wide enough, or for an image of 8 bits.
    pub fn of(path: &Path, range: Option<[u16; 2]>) -> Option<Self> {
        let [min, max] = range?;
        (max - min < MIN_SPAN).then(|| Self { path: path.to_owned(), min, max })
    }
}

/// 16-bit images of a data set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DepthReport {
    /// Number of 16-bit images whose values were read.
    pub num_decoded: usize,
    /// Those that use a small part of the range, by path.
    pub narrow: Vec<NarrowImage>,
}

impl DepthReport {
    /// Adds an image that was decoded.
    pub fn add(&mut self, path: &Path, range: Option<[u16; 2]>) {
        self.num_decoded += usize::from(range.is_some());
        self.narrow.extend(NarrowImage::of(path, range));
    }

    /// A warning with the number of narrow images, the first of them and a remedy; `None` if there are none.
    pub fn warning(&self) -> Option<String> {
        let first = self.narrow.first()?;
        Some(format!(
            "{} of {} 16-bit images that were read use less than a quarter of the range of values, so they are almost \
             black or without contrast (the first: {}, values {} to {}). Images are not changed: scale their values \
             to 0 to 65535, or apply the intensity window and save 8 bits",
            self.narrow.len(),
            self.num_decoded,
            first.path.display(),
            first.min,
            first.max
        ))
    }
}

/// Reads the headers of `images`, and the values of at most 64 of those with 16 bits. Unreadable files are skipped.
pub fn survey<'a>(images: impl IntoIterator<Item = &'a Path>) -> DepthReport {
    let images: Vec<&Path> = images.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
    let deep: Vec<&Path> = images.into_par_iter().filter(|path| has_16_bits(path)).collect();
    let step = deep.len().div_ceil(MAX_DECODED).max(1);
    let chosen: Vec<&Path> = deep.into_iter().step_by(step).collect();
    let ranges: Vec<_> =
        chosen.par_iter().map(|path| decode::image_file(path).map_or(None, |file| file.range)).collect();
    let mut report = DepthReport::default();
    for (path, range) in chosen.into_iter().zip(ranges) {
        report.add(path, range);
    }
    report
}

/// Whether the header of a PNG or TIFF file says 16 bits.
fn has_16_bits(path: &Path) -> bool {
    let read = || -> Option<bool> {
        let mut file = files::open(path).ok()?;
        let mut start = [0; 25];
        file.read_exact(&mut start).ok()?;
        if start.starts_with(b"\x89PNG") {
            return Some(start[24] == 16);
        }
        if !decode::is_tiff(&start) {
            return Some(false);
        }
        file.rewind().ok()?;
        let decoder = ImageReader::with_format(BufReader::new(file), ImageFormat::Tiff).into_decoder().ok()?;
        let color = decoder.color_type();
        Some(color.bytes_per_pixel() == 2 * color.channel_count())
    };
    read().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use ::image::{ImageBuffer, Luma};

    use super::*;
    use crate::fixture::Root;

    #[test]
    fn images_of_12_bits_in_16_are_named() {
        let root = Root::new();
        let deep = |name: &str, low: u16, high: u16| {
            ImageBuffer::<Luma<u16>, _>::from_fn(8, 8, |x, _| Luma([if x < 4 { low } else { high }]))
                .save(root.file(name))
                .expect("written");
        };
        deep("full.png", 0, 65_535);
        deep("twelve.png", 0, 4095);
        deep("offset.tif", 31_744, 35_840);
        root.image("eight.png", 8, 8);
        root.image("eight.jpg", 8, 8);
        std::fs::write(root.file("text.png"), "nothing").expect("written");
        let names = ["full.png", "twelve.png", "offset.tif", "eight.png", "eight.jpg", "text.png", "missing.png"];
        let paths = names.map(|name| root.path().join(name));
        let report = survey(paths.iter().map(PathBuf::as_path));
        let narrow: Vec<_> = report.narrow.iter().map(|image| (image.path.clone(), image.min, image.max)).collect();
        assert_eq!(narrow, [(root.file("offset.tif"), 31_744, 35_840), (root.file("twelve.png"), 0, 4095)]);
        assert_eq!(report.num_decoded, 3);
        let warning = report.warning().expect("two images");
        assert!(warning.starts_with("2 of 3 16-bit images") && warning.contains("offset.tif, values 31744 to 35840"));
        assert_eq!(survey([root.file("full.png").as_path()]).warning(), None);
    }
}
