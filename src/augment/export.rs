//! Writes image+mask pairs as a data root.
//!
//! ```text
//! ROOT/CLASS/train_images/NAME.png   ROOT/CLASS/train_masks/NAME.png   ROOT/annotations/CLASS.csv
//! ROOT/rejected/CLASS/NAME.png, NAME_mask.png                          ROOT/manifest.jsonl
//! ```
//!
//! The files of a pair are written first, then its line in the journal `manifest.jsonl`. So a pair with a line is
//! complete, and a pair whose writing was interrupted is made again under the same name. The CSV files are written
//! from the journal alone. Images are PNG files because JPEG would change preserved pixels. Names do not contain
//! `ISIC` or `_Segmentation`, which the original PRS-Med loader treats specially.

mod journal;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::{DynamicImage, GrayImage, ImageFormat, RgbImage};
use rand::Rng;

pub use self::journal::Journal;
pub use self::record::{LoraUse, Record, Text};
pub use crate::data::held_out::JOURNAL;

use super::inpaint_mask::is_grey;
use super::settings::{Mode, word};
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::{Row, Split};
use crate::data::position;
use crate::data::templates::{self, Templates, Words};
use crate::error::{Error, Result};
use crate::files;
use crate::location::{Zones, first_location};
use crate::tensor::weights::write_bytes;

/// The mask that is written with a pair.
#[derive(Debug, Clone, Copy)]
pub enum MaskSource<'a> {
    /// The unchanged mask of the source image. A PNG file is copied byte for byte; other formats become a PNG with
    /// equal pixels.
    Unchanged(&'a Path),
    /// A new mask, written with the values 0 and 255.
    Made(&'a GrayImage),
}

/// A data root of pairs, open for writing.
#[derive(Debug)]
pub struct Export {
    /// The folder of the data root.
    pub root: PathBuf,
    /// The journal of the pairs written so far.
    pub journal: Journal,
}

impl Export {
    /// Fails when `root` is a data root that this program did not generate, so that a user's data set is never
    /// changed.
    ///
    /// # Errors
    /// [`Error::Data`] when `root` contains annotations but no journal.
    pub fn refuse_foreign(root: &Path) -> Result<()> {
        let is_data_set = ["annotations", "annotation"].iter().any(|name| root.join(name).exists());
        if is_data_set && !root.join(JOURNAL).exists() {
            let reason = format!("is a data root without `{JOURNAL}`; nothing was written");
            return Err(Error::data(root, reason, "give a folder of its own for the new pairs"));
        }
        Ok(())
    }

    /// Opens the data root `root`, or creates it.
    ///
    /// # Errors
    /// As [`Self::refuse_foreign`] and [`Journal::open`]; [`Error::Io`].
    pub fn open(root: &Path) -> Result<Self> {
        Self::refuse_foreign(root)?;
        let journal = root.join(JOURNAL);
        let existed = journal.exists();
        files::create_folders(root).map_err(Error::io(root, "create"))?;
        let this = Self { root: root.to_path_buf(), journal: Journal::open(&journal)? };
        // an interrupted revision may have moved files already
        for record in &this.journal.records {
            this.settle(record)?;
        }
        if existed {
            clear_leftovers(root, 3)?;
        }
        Ok(this)
    }

    /// Replaces the journal's records by `records` (the same pairs with new decisions) and moves files accordingly.
    /// After an interruption, [`Self::open`] moves the files back.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] when a file of a pair is missing.
    pub fn revise(&mut self, records: &[Record]) -> Result<()> {
        for record in records {
            if let Some(missing) = self.settle(record)? {
                return Err(Error::data(missing, "is missing", "make the pairs again in another folder"));
            }
        }
        self.journal.replace(records)
    }

    /// Moves the files of a pair to the folder that its decision asks for. Returns the first file that exists in
    /// neither folder.
    fn settle(&self, record: &Record) -> Result<Option<PathBuf>> {
        let (image, mask) = self.paths(record);
        let (old_image, old_mask) = self.paths(&Record { accepted: !record.accepted, ..record.clone() });
        for (path, old) in [(image, old_image), (mask, old_mask)] {
            if path.exists() {
                continue;
            }
            if !old.exists() {
                return Ok(Some(path));
            }
            self.create_folder_of(&old)?;
            self.create_folder_of(&path)?;
            fs::rename(&old, &path).map_err(Error::io(&old, "move"))?;
        }
        Ok(None)
    }

    /// Writes the files of a pair, then its record. Rejected pairs go to `rejected/`, which data loaders do not read.
    ///
    /// # Errors
    /// [`Error::Shape`] when image and mask differ in size, [`Error::Data`] for a source mask that cannot be decoded
    /// or an invalid record (see [`Journal::append`]), [`Error::Io`].
    pub fn write(&mut self, image: &RgbImage, mask: MaskSource, record: Record) -> Result<()> {
        self.journal.check(&record)?;
        let (mask_png, size) = mask_png(mask)?;
        if size != image.dimensions() {
            let ((w, h), (mask_w, mask_h)) = (image.dimensions(), size);
            return Err(Error::Shape { reason: format!("the image is {w}x{h}, its mask {mask_w}x{mask_h}") });
        }
        let (image_path, mask_path) = self.paths(&record);
        self.create_folder_of(&image_path)?;
        self.create_folder_of(&mask_path)?;
        write_bytes(&image_path, &image_png(image)?)?;
        write_bytes(&mask_path, &mask_png)?;
        self.journal.append(record)
    }

    /// Paths of a pair's image and mask.
    pub fn paths(&self, record: &Record) -> (PathBuf, PathBuf) {
        let Record { class, name, .. } = record;
        if record.accepted {
            let class = self.root.join(class);
            let file = format!("{name}.png");
            return (class.join("train_images").join(&file), class.join("train_masks").join(&file));
        }
        let folder = self.root.join("rejected").join(class);
        (folder.join(format!("{name}.png")), folder.join(format!("{name}_mask.png")))
    }

    /// Creates the folder of a file of a pair. It must be below the root, and not behind a symbolic link.
    fn create_folder_of(&self, path: &Path) -> Result<()> {
        let folder = path.parent().unwrap_or(&self.root);
        files::create_below(&self.root, folder).map_err(Error::io(folder, "create"))
    }

    /// Writes `annotations/CLASS.csv` of all classes, atomically, from the accepted pairs of the journal. Returns the
    /// number of rows. The file of a class without accepted pairs is removed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_annotations(&self) -> Result<usize> {
        let folder = self.root.join("annotations");
        files::create_below(&self.root, &folder).map_err(Error::io(&folder, "create"))?;
        let mut classes: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for record in &self.journal.records {
            classes.entry(&record.class).or_default().extend(record.accepted.then_some(record));
        }
        let mut rows = 0;
        for (class, mut records) in classes {
            let path = folder.join(format!("{class}.csv"));
            records.sort_by_key(|record| record.index);
            if records.is_empty() {
                if path.is_file() {
                    fs::remove_file(&path).map_err(Error::io(&path, "remove"))?;
                }
                continue;
            }
            let (bytes, written) = csv(&path, &records)?;
            write_bytes(&path, &bytes)?;
            rows += written;
        }
        Ok(rows)
    }
}

/// Removes the temporary files of an interrupted run, in `folder` and up to `levels` levels below it.
fn clear_leftovers(folder: &Path, levels: usize) -> Result<()> {
    files::clear_leftovers(folder).map_err(Error::io(folder, "clear temporary files in"))?;
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let entry = entry.map_err(Error::io(folder, "list"))?;
        // a link is not a folder
        if levels > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            clear_leftovers(&entry.path(), levels - 1)?;
        }
    }
    Ok(())
}

/// Contents of one annotation file and its number of rows.
fn csv(path: &Path, records: &[&Record]) -> Result<(Vec<u8>, usize)> {
    let failed = |error: csv::Error| Error::io(path, "write")(error.into());
    let mut out = csv::Writer::from_writer(Vec::new());
    let header = ["image_path", "image_name", "split", "description", "position", "question", "answer"];
    out.write_record(header).map_err(failed)?;
    let mut rows = 0;
    for record in records {
        let mask_path = format!("{}/train_masks/{}.png", record.class, record.name);
        let image_name = format!("{}.png", record.name);
        let mut seen = BTreeSet::new();
        for text in record.texts.iter().filter(|text| seen.insert((&text.question, &text.answer))) {
            let Text { description, position, question, answer } = text;
            out.write_record([&mask_path, &image_name, Split::Train.name(), description, position, question, answer])
                .map_err(failed)?;
            rows += 1;
        }
    }
    let bytes = out.into_inner().map_err(|error| Error::io(path, "write")(error.into_error()))?;
    Ok((bytes, rows))
}

/// The image as PNG; a grey image is stored with one channel.
fn image_png(image: &RgbImage) -> Result<Vec<u8>> {
    let image = DynamicImage::ImageRgb8(image.clone());
    png(&if image.as_rgb8().is_some_and(is_grey) {
        // All channels are equal, so the first one is the grey level. A weighted conversion could round.
        let levels = image.as_bytes().iter().step_by(3).copied().collect();
        GrayImage::from_raw(image.width(), image.height(), levels).map_or(image, DynamicImage::ImageLuma8)
    } else {
        image
    })
}

fn mask_png(mask: MaskSource) -> Result<(Vec<u8>, (u32, u32))> {
    match mask {
        MaskSource::Made(mask) => Ok((png(&DynamicImage::ImageLuma8(foreground(mask)))?, mask.dimensions())),
        MaskSource::Unchanged(path) => {
            let bytes = files::read(path, files::MAX_IMAGE).map_err(Error::io(path, "read"))?;
            let pixels = decode::mask(path)?;
            let size = pixels.dimensions();
            let is_png = bytes.starts_with(b"\x89PNG\r\n\x1a\n");
            Ok((if is_png { bytes } else { png(&DynamicImage::ImageLuma8(pixels))? }, size))
        }
    }
}

fn png(image: &DynamicImage) -> Result<Vec<u8>> {
    let mut bytes = Cursor::new(Vec::new());
    image
        .write_to(&mut bytes, ImageFormat::Png)
        .map_err(|error| Error::Shape { reason: format!("cannot be written as PNG: {error}") })?;
    Ok(bytes.into_inner())
}

/// Parts of a file name that data loaders treat specially, in lower case, and their replacements.
const MEANINGS: [(&str, &str); 5] =
    [("isic", "derm"), ("_segmentation", ""), ("train_masks", "tm"), ("train_images", "ti"), ("_mask", "")];
/// Longest part of a source's name that is used.
const NAME_CHARS: usize = 100;

/// The name of pair `index` made from `source`: unique by its index, made of letters, digits, `_` and `-`.
pub fn name(source: &Path, mode: Mode, index: u64) -> String {
    let stem = source.file_stem().unwrap_or_default().to_string_lossy();
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let mut name: String = stem.chars().take(NAME_CHARS).map(legal).collect();
    // A replacement may create a new match.
    while let Some((at, found, with)) =
        MEANINGS.iter().find_map(|(found, with)| Some((name.to_ascii_lowercase().find(found)?, found, with)))
    {
        name.replace_range(at..at + found.len(), with);
    }
    format!("{}_{}_{index:06}", if name.is_empty() { "pair" } else { &name }, word(mode))
}

/// The texts of a pair that uses the source's mask: the texts of the row. A row without a position gets the mask's
/// grid cell.
///
/// # Errors
/// [`Error::Shape`] when the mask is empty.
pub fn texts_of_row(row: &Row, mask: &GrayImage) -> Result<Text> {
    let stated = row.position.as_deref().map(str::trim).filter(|position| !position.is_empty());
    let position = match stated.map(str::to_owned).or_else(|| Some(first_location(&row.answer)?.to_string())) {
        Some(position) => position,
        None => zone(mask, Zones::Grid)?,
    };
    Ok(Text::new(&row.question, &row.answer, &position))
}

/// The texts of a pair with a new mask: question and answer from a template, with the location of the mask. The row
/// decides between the words `upper left` and `top left`.
///
/// # Errors
/// [`Error::Shape`] when the mask is empty.
pub fn texts_of_mask(
    row: &Row,
    mask: &GrayImage,
    target: &str,
    image: &str,
    templates: &Templates,
    rng: &mut impl Rng,
) -> Result<Text> {
    let text = format!("{} {}", row.position.as_deref().unwrap_or_default(), row.answer);
    let zone = zone(mask, Zones::named_in(&text).unwrap_or_default())?;
    let words = Words { target, image, zone: &zone, count: 1, ..Words::default() };
    let drawn = templates::draw(&templates.one, 1, rng);
    let (question, answer) = drawn.first().copied().unwrap_or_default();
    Ok(Text::new(&words.fill(question), &words.fill(answer), &zone))
}

/// The location label of a mask.
fn zone(mask: &GrayImage, zones: Zones) -> Result<String> {
    let region = position::whole(&foreground(mask));
    let region = region.ok_or_else(|| Error::Shape { reason: "an empty mask has no location".to_owned() })?;
    let position = match zones {
        Zones::Grid => position::grid(&region, mask.dimensions()),
        Zones::Quadrants => position::quadrant(&region, mask.dimensions()).position,
    };
    Ok(position.label(zones))
}

/// A record for tests: the pair `index` from an image with a name that loaders treat specially.
#[cfg(test)]
pub(crate) fn record(index: u64, class: &str, accepted: bool) -> Record {
    Record {
        index,
        name: name(Path::new("ISIC_7_Segmentation.png"), Mode::KeepLesion, index),
        class: class.to_owned(),
        source_image: "s.png".into(),
        source_sha256: "00".to_owned(),
        mode: Mode::KeepLesion,
        paste: super::settings::Paste::Exact,
        model: "m".to_owned(),
        model_sha256: "11".to_owned(),
        loras: vec![LoraUse { name: "l".to_owned(), sha256: "22".to_owned(), scale: 0.5 }],
        prompt: "p".to_owned(),
        negative: String::new(),
        seed: u64::MAX,
        steps: 30,
        guidance: 7.5,
        strength: 0.6,
        sampler: "ddim".to_owned(),
        source_mask: None,
        mask_transform: None,
        rim_px: 12.5,
        decoys: vec![[1, 2, 3, 4]],
        texts: vec![Text::new("Where?", "Here, \"there\"\nand everywhere.", "upper left")],
        scores: [("dice".to_owned(), 0.9)].into(),
        accepted,
        reason: if accepted { String::new() } else { "dice 0.1 is below 0.8".to_owned() },
    }
}

#[cfg(test)]
mod tests;
