//! Marks by which an image is known again: of the bytes of its file, and of its pixels.
//!
//! The pixels are those that a training sees before it resizes them: upright, 8 bits, without alpha ([`decode::image`]). An
//! image whose channels are equal is grey. The same image as PNG, as TIFF or with other metadata therefore has the same
//! mark. An image of one single colour has no mark of its pixels: slices of air are equal and show nobody.

use crate::decode;
use crate::progress::in_parallel;
use ::image::DynamicImage;
use prsmed_base::event::{Observer, Silent};
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A SHA-256.
pub type Mark = [u8; 32];

/// Images from which on the progress is reported.
const MANY: usize = 500;

/// The marks of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageMarks {
    /// Of all bytes of the file.
    pub file: Mark,
    /// Of the pixels; `None` for an image of one single colour, and for one that cannot be decoded.
    pub pixels: Option<Mark>,
}

impl ImageMarks {
    /// The marks of an image file; `None` if it cannot be read.
    pub fn of(path: &Path) -> Option<Self> {
        let bytes = decode::bytes_of(path).ok()?;
        let pixels = decode::image_of(&bytes, path, u64::MAX).ok();
        Some(Self { file: Sha256::digest(&bytes).into(), pixels: pixels.as_ref().and_then(pixel_mark) })
    }
}

/// The mark of pixels; `None` for an image of one single colour.
pub fn pixel_mark(image: &DynamicImage) -> Option<Mark> {
    let mut hash = Sha256::new();
    hash.update(image.width().to_le_bytes());
    hash.update(image.height().to_le_bytes());
    let grey: Vec<u8>;
    let (channels, values) = match image {
        DynamicImage::ImageLuma8(image) => (1, image.as_raw().as_slice()),
        DynamicImage::ImageRgb8(image) if image.pixels().all(|pixel| pixel.0 == [pixel.0[0]; 3]) => {
            grey = image.pixels().map(|pixel| pixel.0[0]).collect();
            (1, grey.as_slice())
        }
        DynamicImage::ImageRgb8(image) => (3, image.as_raw().as_slice()),
        other => return pixel_mark(&DynamicImage::ImageRgb8(other.to_rgb8())),
    };
    let first = values.get(..channels)?;
    if values.chunks(channels).all(|pixel| pixel == first) {
        return None;
    }
    hash.update(values);
    Some(hash.finalize().into())
}

/// Marks of image files by their paths. Each file is read and decoded once; with a cache, once for all runs.
#[derive(Debug, Clone, Default)]
pub struct Marks {
    known: HashMap<PathBuf, Option<ImageMarks>>,
    /// File of the cache.
    cache: Option<PathBuf>,
}

impl Marks {
    /// No marks yet. With a folder of caches, marks of files that have not changed are read from there.
    pub fn cached(folder: Option<&Path>) -> Self {
        Self { known: HashMap::new(), cache: folder.map(|folder| folder.join("image-marks.v1")) }
    }

    /// Adds those of `paths` that are not known, in parallel on the current rayon pool.
    pub fn add<'a>(&mut self, paths: impl IntoIterator<Item = &'a Path>, observer: &dyn Observer) {
        let new: BTreeSet<&Path> = paths.into_iter().filter(|path| !self.known.contains_key(*path)).collect();
        let stored = self.cache.as_deref().filter(|_| !new.is_empty()).map(Stored::read).unwrap_or_default();
        let observer: &dyn Observer = if new.len() < MANY { &Silent } else { observer };
        let of = |path: &'a Path| {
            let key = self.cache.as_ref().and_then(|_| key_of(path));
            let found = key.and_then(|key| stored.0.get(&key).copied());
            (path, found.or_else(|| ImageMarks::of(path)), key.filter(|_| found.is_none()))
        };
        let all = in_parallel(new.into_iter().collect(), ("compare images", "images"), observer, of);
        if let Some(cache) = &self.cache {
            stored.write_with(cache, all.iter().filter_map(|(_, marks, key)| Some((*key.as_ref()?, (*marks)?))));
        }
        self.known.extend(all.into_iter().map(|(path, marks, _)| (path.to_owned(), marks)));
    }

    /// Adds the marks of a file.
    pub fn insert(&mut self, path: PathBuf, marks: ImageMarks) {
        self.known.insert(path, Some(marks));
    }

    /// The marks of a file; `None` for one that cannot be read or was not added.
    pub fn get(&self, path: &Path) -> Option<ImageMarks> {
        self.known.get(path).copied().flatten()
    }
}

/// What a file is known by as long as nobody writes to it.
type Key = [u8; 16];

/// Device, number, size and times of a file. Every change sets its change time, which no program can set back.
fn key_of(path: &Path) -> Option<Key> {
    let found = std::fs::metadata(path).ok()?;
    let mut hash = Sha256::new();
    hash.update(found.dev().to_le_bytes());
    hash.update(found.ino().to_le_bytes());
    hash.update(found.size().to_le_bytes());
    for time in [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()] {
        hash.update(time.to_le_bytes());
    }
    let hash: Mark = hash.finalize().into();
    Key::try_from(&hash[..16]).ok()
}

/// The cache: records of one length, to which each process adds its own. It is only an aid, so that a cache that cannot be
/// read or written is left out.
#[derive(Default)]
struct Stored(HashMap<Key, ImageMarks>);

impl Stored {
    /// Key, mark of the file, whether the image has a mark of its pixels, and that mark.
    const RECORD: usize = 16 + 32 + 1 + 32;
    /// A larger file begins anew.
    const MOST: u64 = 128 << 20;

    fn read(path: &Path) -> Self {
        let Ok(bytes) = prsmed_base::files::read(path, Self::MOST) else { return Self::default() };
        if !bytes.len().is_multiple_of(Self::RECORD) {
            return Self::default();
        }
        let record = |record: &[u8]| {
            let (key, rest) = record.split_first_chunk::<16>()?;
            let (file, rest) = rest.split_first_chunk::<32>()?;
            let ([has_pixels], pixels) = rest.split_first_chunk::<1>()?;
            let pixels = if *has_pixels == 1 { Some(Mark::try_from(pixels).ok()?) } else { None };
            Some((*key, ImageMarks { file: *file, pixels }))
        };
        Self(bytes.chunks_exact(Self::RECORD).filter_map(record).collect())
    }

    /// Writes the records and new ones, sorted by their keys, so that a crash leaves the old file or the new one.
    fn write_with(mut self, path: &Path, new: impl Iterator<Item = (Key, ImageMarks)>) {
        let before = self.0.len();
        self.0.extend(new);
        let is_small = |records: usize| records as u64 * Self::RECORD as u64 <= Self::MOST;
        if self.0.len() == before || !is_small(self.0.len()) {
            return;
        }
        let mut records: Vec<Vec<u8>> = self.0.into_iter().map(record).collect();
        records.sort_unstable();
        let folder = path.parent().unwrap_or(Path::new("."));
        // only an aid
        let _ = prsmed_base::files::create_folders(folder)
            .and_then(|()| prsmed_base::files::write(path, &records.concat()));
    }
}

fn record((key, ImageMarks { file, pixels }): (Key, ImageMarks)) -> Vec<u8> {
    [key.as_slice(), &file, &[u8::from(pixels.is_some())], &pixels.unwrap_or_default()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Root;
    use ::image::{GrayImage, ImageBuffer, Luma, LumaA, Rgb, RgbImage, Rgba};
    use prsmed_base::event::Silent;

    /// A grey ramp as many files.
    fn ramp(root: &Root) -> GrayImage {
        let grey = GrayImage::from_fn(9, 7, |x, y| Luma([u8::try_from(x * 20 + y).expect("a byte")]));
        let rgb = RgbImage::from_fn(9, 7, |x, y| Rgb([grey.get_pixel(x, y).0[0]; 3]));
        grey.save(root.file("grey.png")).expect("written");
        grey.save(root.file("grey.tif")).expect("written");
        rgb.save(root.file("rgb.png")).expect("written");
        let alpha = ImageBuffer::from_fn(9, 7, |x, y| LumaA([grey.get_pixel(x, y).0[0], u8::try_from(x).expect("9")]));
        alpha.save(root.file("alpha.png")).expect("written");
        ImageBuffer::from_fn(9, 7, |x, y| Luma([u16::from(grey.get_pixel(x, y).0[0]) * 257]))
            .save(root.file("deep.png"))
            .expect("written");
        grey
    }

    #[test]
    fn the_same_pixels_in_another_file_have_the_same_mark() {
        let root = Root::new();
        let grey = ramp(&root);
        let mark = |name: &str| ImageMarks::of(&root.file(name)).expect("readable");
        let first = mark("grey.png");
        for other in ["grey.tif", "rgb.png", "alpha.png", "deep.png"] {
            assert_eq!(mark(other).pixels, first.pixels, "{other}");
            assert_ne!(mark(other).file, first.file, "{other}");
        }
        assert_eq!(pixel_mark(&grey.clone().into()), first.pixels);
        let mut other = grey.clone();
        other.put_pixel(8, 6, Luma([255]));
        assert_ne!(pixel_mark(&other.into()), first.pixels);
        // the same bytes in another shape, or in colour, are other images
        let turned = GrayImage::from_raw(7, 9, grey.into_raw()).expect("63 pixels");
        assert_ne!(pixel_mark(&turned.into()), first.pixels);
    }

    #[test]
    fn images_of_one_colour_and_damaged_files_have_no_mark_of_pixels() {
        let root = Root::new();
        for (name, image) in [
            ("black.png", DynamicImage::from(GrayImage::new(5, 4))),
            ("red.png", RgbImage::from_pixel(5, 4, Rgb([200, 0, 0])).into()),
            ("clear.png", ImageBuffer::from_fn(5, 4, |x, _| Rgba([9, 9, 9, u8::try_from(x).expect("5")])).into()),
        ] {
            image.save(root.file(name)).expect("written");
            assert_eq!(ImageMarks::of(&root.file(name)).expect("readable").pixels, None, "{name}");
        }
        std::fs::write(root.file("damaged.png"), b"\x89PNG\r\n\x1a\nnothing").expect("written");
        assert_eq!(ImageMarks::of(&root.file("damaged.png")).expect("readable").pixels, None);
        assert_eq!(ImageMarks::of(&root.file("missing.png")), None);
        let one = GrayImage::from_fn(5, 4, |x, y| Luma([u8::from((x, y) == (4, 3))]));
        assert!(pixel_mark(&one.into()).is_some());
    }

    #[test]
    fn a_cache_knows_files_that_have_not_changed() {
        let root = Root::new();
        ramp(&root);
        let cache = root.file("cache/x").with_file_name("");
        let file = cache.join("image-marks.v1");
        let paths = ["grey.png", "rgb.png", "missing.png"].map(|name| root.file(name));
        let all = || {
            let mut marks = Marks::cached(Some(&cache));
            marks.add(paths.iter().map(PathBuf::as_path), &Silent);
            paths.each_ref().map(|path| marks.get(path))
        };
        let first = all();
        assert_eq!(std::fs::metadata(&file).expect("written").len(), 2 * Stored::RECORD as u64);
        // what the cache says is used
        let mut bytes = std::fs::read(&file).expect("read");
        bytes[16..48].fill(7);
        bytes[Stored::RECORD + 16..Stored::RECORD + 48].fill(7);
        std::fs::write(&file, &bytes).expect("written");
        assert_eq!(all()[0].map(|marks| marks.file), Some([7; 32]));
        // a file that has changed is read again, also with its old time and size
        let old = std::fs::metadata(&paths[0]).expect("a file").modified().expect("a time");
        let content = std::fs::read(&paths[0]).expect("read");
        std::fs::write(&paths[0], content).expect("written");
        std::fs::File::options().write(true).open(&paths[0]).expect("open").set_modified(old).expect("set");
        assert_eq!(all()[0], first[0]);
        // a damaged cache is left out and begins anew
        std::fs::write(&file, &bytes[..100]).expect("written");
        assert_eq!((all(), all()), (first, first));
        assert_eq!(std::fs::metadata(&file).expect("written").len(), 2 * Stored::RECORD as u64);
    }

    #[test]
    fn each_file_is_read_once() {
        let root = Root::new();
        ramp(&root);
        let mut marks = Marks::default();
        let [a, b, missing] = ["grey.png", "rgb.png", "missing.png"].map(|name| root.file(name));
        marks.add([a.as_path(), missing.as_path(), a.as_path()], &Silent);
        std::fs::remove_file(&a).expect("removed");
        marks.add([a.as_path(), b.as_path()], &Silent);
        assert_eq!(marks.get(&a).expect("known").pixels, marks.get(&b).expect("new").pixels);
        assert_eq!(marks.get(&missing), None);
    }
}
