//! Writes pairs as a data root.
//!
//! ```text
//! ROOT/CLASS/train_images/NAME.png   ROOT/CLASS/train_masks/NAME.png   ROOT/annotations/CLASS.csv
//! ROOT/rejected/CLASS/NAME.png, NAME_mask.png                          ROOT/manifest.jsonl
//! ```
//!
//! A pair's files are written first, then its line in the journal: a pair that has a line is complete, and one that was
//! cut off is made again under the same name. The CSV files are made from the journal alone. Pictures are PNGs: JPEG
//! would change held pixels. Names avoid `ISIC` and `_Segmentation`, which the original loader gives a meaning.

mod journal;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::{DynamicImage, GrayImage, ImageFormat, RgbImage};
use rand::Rng;
use sha2::{Digest, Sha256};

pub use self::journal::Journal;
pub use self::record::{LoraUse, Record, Text};

use super::hold::is_grey;
use super::settings::Mode;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::position;
use crate::data::templates::{self, Templates, Words};
use crate::error::{Error, Result};
use crate::place::{Zones, first_place};
use crate::tensor::weights::write_bytes;

/// The journal's name in a data root.
pub const JOURNAL: &str = "manifest.jsonl";

/// A mask to be written.
#[derive(Debug, Clone, Copy)]
pub enum MaskSource<'a> {
    /// The unchanged mask of the source picture: a PNG is copied byte for byte, another file becomes a PNG of equal pixels.
    Unchanged(&'a Path),
    /// A new mask; written as 0 and 255.
    Made(&'a GrayImage),
}

/// A data root in the making.
#[derive(Debug)]
pub struct Export {
    root: PathBuf,
    journal: Journal,
}

impl Export {
    /// Tells a data root of pairs, or what may become one, from somebody's data set.
    ///
    /// # Errors
    /// [`Error::Data`] when `root` holds annotations but no journal.
    pub fn refuse_foreign(root: &Path) -> Result<()> {
        let is_data_set = ["annotations", "annotation"].iter().any(|name| root.join(name).exists());
        if is_data_set && !root.join(JOURNAL).exists() {
            return Err(Error::data(
                root,
                format!("is a data root without `{JOURNAL}`; nothing was written"),
                "give a folder of its own for the new pairs",
            ));
        }
        Ok(())
    }

    /// Opens or begins the data root `root`.
    ///
    /// # Errors
    /// As [`Self::refuse_foreign`] and [`Journal::open`]; [`Error::Io`].
    pub fn open(root: &Path) -> Result<Self> {
        Self::refuse_foreign(root)?;
        let journal = root.join(JOURNAL);
        let existed = journal.exists();
        fs::create_dir_all(root).map_err(Error::io(root, "create"))?;
        let this = Self { root: root.to_path_buf(), journal: Journal::open(&journal)? };
        // a revision that was stopped has moved files already
        for record in this.journal.records() {
            this.settle(record)?;
        }
        if existed {
            remove_unfinished(root, 3)?;
        }
        Ok(this)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Puts `records` in the place of those in the journal (same pairs, new verdicts) and moves files to where they then
    /// belong. What was stopped on the way is undone by [`Self::open`].
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] when files of a pair are nowhere.
    pub fn revise(&mut self, records: &[Record]) -> Result<()> {
        for record in records {
            if let Some(missing) = self.settle(record)? {
                return Err(Error::data(missing, "is missing", "make the pairs again in another folder"));
            }
        }
        self.journal.replace(records)
    }

    /// Moves a pair's files to where its verdict wants them; a file that is nowhere, if any.
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
            let folder = path.parent().unwrap_or(&self.root);
            fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
            fs::rename(&old, &path).map_err(Error::io(&old, "move"))?;
        }
        Ok(None)
    }

    /// What was written so far.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Writes the files of a pair, then its record; rejected pairs go to `rejected/`, out of the loader's sight.
    ///
    /// # Errors
    /// [`Error::Shape`] when picture and mask differ in size, [`Error::Data`] for a source mask that cannot be decoded or
    /// a record that is not right (see [`Journal::append`]), [`Error::Io`].
    pub fn write(&mut self, picture: &RgbImage, mask: MaskSource, record: Record) -> Result<()> {
        self.journal.check(&record)?;
        let (mask_png, size) = mask_png(mask)?;
        if size != picture.dimensions() {
            let ((w, h), (mask_w, mask_h)) = (picture.dimensions(), size);
            return Err(Error::Shape { reason: format!("the picture is {w}x{h}, its mask {mask_w}x{mask_h}") });
        }
        let (image_path, mask_path) = self.paths(&record);
        for path in [&image_path, &mask_path] {
            let folder = path.parent().unwrap_or(&self.root);
            fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
        }
        write_bytes(&image_path, &picture_png(picture)?)?;
        write_bytes(&mask_path, &mask_png)?;
        self.journal.append(record)
    }

    /// Where a pair's picture and mask lie.
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

    /// Writes `annotations/CLASS.csv` of all classes, atomically, from the accepted pairs of the journal; returns the
    /// number of rows. The file of a class without accepted pairs is removed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_annotations(&self) -> Result<usize> {
        let folder = self.root.join("annotations");
        fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
        let mut classes: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for record in self.journal.records() {
            classes.entry(&record.class).or_default().extend(record.accepted.then_some(record));
        }
        let mut rows = 0;
        for (class, mut records) in classes {
            let path = folder.join(format!("{class}.csv"));
            records.sort_by_key(|record| record.index);
            if records.is_empty() {
                if path.exists() {
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

/// Takes out synthetic rows of `manifest` whose source is now a picture of `val` or `test` (a `val` that was cut from the
/// training rows, for example), as far as the manifests of their data roots say it; returns their number.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a damaged manifest.
pub fn drop_pairs_of_held_out(manifest: &mut Manifest) -> Result<usize> {
    let roots: BTreeSet<PathBuf> = manifest
        .synthetic_rows()
        .into_iter()
        .filter_map(|row| Some(manifest.rows[row].mask_path.ancestors().nth(3)?.join(JOURNAL)))
        .filter(|journal| journal.exists())
        .collect();
    if roots.is_empty() {
        return Ok(0);
    }
    let held_out: BTreeSet<&Path> = manifest
        .rows
        .iter()
        .filter(|row| !row.synthetic && row.split != Split::Train)
        .map(|row| row.image_path.as_path())
        .collect();
    let sums: BTreeSet<String> = held_out.into_iter().map(sha256).collect::<Result<_>>()?;
    let mut leaking: BTreeSet<PathBuf> = BTreeSet::new();
    for path in roots {
        let root = path.parent().unwrap_or(&path).to_path_buf();
        for record in Journal::read(&path)?.iter().filter(|record| sums.contains(&record.source_sha256)) {
            leaking.insert(root.join(&record.class).join("train_masks").join(format!("{}.png", record.name)));
        }
    }
    let before = manifest.rows.len();
    manifest.rows.retain(|row| !row.synthetic || !leaking.contains(&row.mask_path));
    Ok(before - manifest.rows.len())
}

/// Removes files that a stopped run was writing: `NAME.tmp-...`, in `folder` and so many levels of folders below it.
fn remove_unfinished(folder: &Path, levels: usize) -> Result<()> {
    const WRITTEN: [&str; 4] = [".png.tmp-", ".csv.tmp-", ".json.tmp-", ".jsonl.tmp-"];
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let path = entry.map_err(Error::io(folder, "list"))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if levels > 0 {
                remove_unfinished(&path, levels - 1)?;
            }
        } else if WRITTEN.iter().any(|part| name.contains(part)) {
            fs::remove_file(&path).map_err(Error::io(&path, "remove"))?;
        }
    }
    Ok(())
}

/// The bytes of one annotation file and its number of rows.
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

/// A PNG of the picture; grey pictures are stored as grey.
fn picture_png(picture: &RgbImage) -> Result<Vec<u8>> {
    let picture = DynamicImage::ImageRgb8(picture.clone());
    png(&if picture.as_rgb8().is_some_and(is_grey) {
        // Equal channels: the first is the grey level, whatever weights a conversion has.
        let levels = picture.as_bytes().iter().step_by(3).copied().collect();
        GrayImage::from_raw(picture.width(), picture.height(), levels).map_or(picture, DynamicImage::ImageLuma8)
    } else {
        picture
    })
}

fn mask_png(mask: MaskSource) -> Result<(Vec<u8>, (u32, u32))> {
    match mask {
        MaskSource::Made(mask) => Ok((png(&DynamicImage::ImageLuma8(foreground(mask)))?, mask.dimensions())),
        MaskSource::Unchanged(path) => {
            let bytes = fs::read(path).map_err(Error::io(path, "read"))?;
            let pixels = decode::mask(path)?;
            let size = pixels.dimensions();
            let is_png = bytes.starts_with(b"\x89PNG\r\n\x1a\n");
            Ok((if is_png { bytes } else { png(&DynamicImage::ImageLuma8(pixels))? }, size))
        }
    }
}

fn png(picture: &DynamicImage) -> Result<Vec<u8>> {
    let mut bytes = Cursor::new(Vec::new());
    picture
        .write_to(&mut bytes, ImageFormat::Png)
        .map_err(|error| Error::Shape { reason: format!("cannot be written as PNG: {error}") })?;
    Ok(bytes.into_inner())
}

/// The SHA-256 of a file, in hexadecimal digits.
///
/// # Errors
/// [`Error::Io`].
pub fn sha256(path: &Path) -> Result<String> {
    Ok(format!("{:x}", Sha256::digest(fs::read(path).map_err(Error::io(path, "read"))?)))
}

/// Parts of a name that loaders give a meaning, in lower case, and what stands for them.
const MEANINGS: [(&str, &str); 5] =
    [("isic", "derm"), ("_segmentation", ""), ("train_masks", "tm"), ("train_images", "ti"), ("_mask", "")];
/// Longest part of a source's name that is kept.
const NAME_CHARS: usize = 100;

/// The name of pair `index` made from `source`: unique by its index, made of letters, digits, `_` and `-`.
pub fn name(source: &Path, mode: Mode, index: u64) -> String {
    let stem = source.file_stem().unwrap_or_default().to_string_lossy();
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let mut name: String = stem.chars().take(NAME_CHARS).map(legal).collect();
    // Taking one out may put another together.
    while let Some((at, found, with)) =
        MEANINGS.iter().find_map(|(found, with)| Some((name.to_ascii_lowercase().find(found)?, found, with)))
    {
        name.replace_range(at..at + found.len(), with);
    }
    format!("{}_{}_{index:06}", if name.is_empty() { "pair" } else { &name }, mode.name())
}

/// The texts of a pair whose mask is the source's: the row's own, with the mask's grid cell where the row has no position.
///
/// # Errors
/// [`Error::Shape`] when the mask is empty.
pub fn texts_of_row(row: &Row, mask: &GrayImage) -> Result<Text> {
    let stated = row.position.as_deref().map(str::trim).filter(|position| !position.is_empty());
    let position = match stated.map(str::to_owned).or_else(|| Some(first_place(&row.answer)?.to_string())) {
        Some(position) => position,
        None => zone(mask, Zones::Grid)?,
    };
    Ok(Text::new(&row.question, &row.answer, &position))
}

/// The texts of a pair with a mask of its own: a template's question and answer with the mask's place, in the words of
/// the row's (`upper left` or `top left`).
///
/// # Errors
/// [`Error::Shape`] when the mask is empty.
pub fn texts_of_mask(
    row: &Row,
    mask: &GrayImage,
    (target, image): (&str, &str),
    templates: &Templates,
    rng: &mut impl Rng,
) -> Result<Text> {
    let said = format!("{} {}", row.position.as_deref().unwrap_or_default(), row.answer).to_lowercase();
    let zones = if ["top", "bottom"].iter().any(|word| said.split(|c: char| !c.is_alphanumeric()).any(|w| w == *word)) {
        Zones::Quadrants
    } else {
        Zones::Grid
    };
    let zone = zone(mask, zones)?;
    let words = Words { target, image, zone: &zone, count: 1, ..Words::default() };
    let drawn = templates::draw(&templates.one, 1, rng);
    let (question, answer) = drawn.first().copied().unwrap_or_default();
    Ok(Text::new(&words.fill(question), &words.fill(answer), &zone))
}

/// The label of the place of a mask.
fn zone(mask: &GrayImage, zones: Zones) -> Result<String> {
    let region = position::whole(&foreground(mask));
    let region = region.ok_or_else(|| Error::Shape { reason: "an empty mask has no place".to_owned() })?;
    let place = match zones {
        Zones::Grid => position::grid(&region, mask.dimensions()),
        Zones::Quadrants => position::quadrant(&region, mask.dimensions()).position,
    };
    Ok(place.label(zones))
}

#[cfg(test)]
mod tests;
