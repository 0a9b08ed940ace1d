//! Prepares a data root in PRS-Med's layout from a folder of images and a folder of masks.
//!
//! Positions are computed from the masks; questions and answers are drawn from templates. Patients are not known: if
//! several images show the same patient, split them by hand. Several regions of a mask are described by one location:
//! the box of all for quadrants, the centroid of all for the grid. With [`Several::Regions`], exactly two regions are
//! described by two locations. Deviation from PRS-Med's pipeline, which names the first and the last of any number of
//! regions.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::GrayImage;
use rand::SeedableRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::data::annotation::EXTENSIONS;
use crate::data::bit_depth::DepthReport;
use crate::data::decode::{self, StoredMask};
use crate::data::labels::{self, Labels};
use crate::data::position::{self, Region, Zones};
use crate::data::templates::{self, Templates, Words};
use crate::event::{Event, Observer};
use crate::location::first_location;
use crate::{Error, Result, files};

/// Suffixes that a mask's stem may have in addition to its image's stem, compared without case.
pub const MASK_SUFFIXES: [&str; 6] = ["_mask", "_masks", "_segmentation", "_seg", "_label", "_gt"];
/// Regions smaller than this part of the foreground are specks of the drawing tool and are not counted.
const SPECK_FRAC: f64 = 0.01;

/// Description of several separate regions of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Several {
    /// One location for all regions, and their number.
    #[default]
    Together,
    /// Two locations for two regions; otherwise as `Together`.
    Regions,
}

/// Options of [`prepare`].
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// Folder of images (PNG, JPEG, TIFF); subfolders are not searched.
    pub images: PathBuf,
    /// Folder of masks. It may be the image folder if the masks have one of [`MASK_SUFFIXES`].
    pub masks: PathBuf,
    /// Name of the modality: class of the images, and name of the folder and annotation file in `out`.
    pub modality: String,
    /// Output data root; may already contain other modalities.
    pub out: PathBuf,
    /// Set of locations.
    pub zones: Zones,
    /// Description of several regions.
    pub several: Several,
    /// Name of the target in questions and answers (`lesion`).
    pub target: String,
    /// Name of the image in questions and answers (`image`, `chest X-ray`).
    pub image_word: String,
    /// Number of rows (different questions) per image, at least 1 and at most the number of question templates.
    pub rows_per_image: usize,
    /// Fraction of the images for validation, 0..=1.
    pub val_frac: f64,
    /// Fraction of the images for testing, 0..=1; at most `1 - val_frac`.
    pub test_frac: f64,
    /// Seed of splits and templates.
    pub seed: u64,
    /// Template file; `None` = the built-in templates.
    pub templates: Option<PathBuf>,
    /// Labels of masks that are the target; empty for masks of one label.
    pub labels: Labels,
}

impl PrepareOptions {
    /// Default options for these folders: grid, regions together, two rows, 80/10/10, `lesion` in an `image`.
    pub fn new(
        images: impl Into<PathBuf>,
        masks: impl Into<PathBuf>,
        modality: impl Into<String>,
        out: impl Into<PathBuf>,
    ) -> Self {
        Self {
            images: images.into(),
            masks: masks.into(),
            modality: modality.into(),
            out: out.into(),
            zones: Zones::Grid,
            several: Several::Together,
            target: "lesion".into(),
            image_word: "image".into(),
            rows_per_image: 2,
            val_frac: 0.1,
            test_frac: 0.1,
            seed: 0,
            templates: None,
            labels: Labels::NONE,
        }
    }
}

/// A file that is not in the data root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Why it was skipped.
    pub reason: String,
}

/// Results of [`prepare`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PrepareReport {
    /// Number of images in the data root.
    pub images: usize,
    /// Number of rows of the annotation file.
    pub rows: usize,
    /// Number of images by split.
    pub images_by_split: BTreeMap<String, usize>,
    /// Skipped files, by path.
    pub skipped: Vec<Skipped>,
    /// 16-bit images, and those that use a small part of the range.
    pub depth: DepthReport,
}

struct FilePair {
    stem: String,
    image: PathBuf,
    mask: PathBuf,
}

/// An image with a usable mask.
struct UsablePair {
    stem: String,
    image: PathBuf,
    mask_png: Vec<u8>,
    location: LocationWords,
    /// Smallest and largest value of a 16-bit image.
    range: Option<[u16; 2]>,
}

/// The words for a mask's location.
#[derive(Debug, PartialEq, Eq)]
struct LocationWords {
    zone: String,
    second_zone: Option<String>,
    /// Number of regions that are described together.
    count: usize,
    /// For quadrants: close to the centre; `None` when it is not mentioned.
    near: Option<bool>,
}

/// Writes `out/MODALITY/{train,val,test}_{images,masks}/` and, last, `out/annotations/MODALITY.csv`.
///
/// Images are copied byte for byte; masks become 8-bit PNG files with values 0 and 255 and the image's stem. Existing
/// files are never overwritten. Pairs that cannot be used are listed in the report with the reason.
///
/// # Errors
/// [`Error::Config`] for options out of range or an invalid template file, [`Error::Data`] when the modality exists
/// in `out`, a stem is ambiguous or no pair is usable, [`Error::Io`] when a folder cannot be read or written.
pub fn prepare(options: &PrepareOptions, observer: &dyn Observer) -> Result<PrepareReport> {
    let templates = match &options.templates {
        Some(path) => Templates::open(path)?,
        None => Templates::embedded(),
    };
    check(options, &templates)?;
    let (pairs, mut skipped) = pairs(&options.images, &options.masks)?;
    observer.on(&Event::Started { phase: "read masks".into(), total: pairs.len() as u64, unit: "images" });
    let done = AtomicU64::new(0);
    let read_pair: Vec<std::result::Result<UsablePair, Skipped>> = pairs
        .into_par_iter()
        .map(|pair| {
            let sample = read_pair(pair, options);
            observer.on(&Event::Advanced { done: done.fetch_add(1, Ordering::Relaxed) + 1 });
            sample
        })
        .collect();
    observer.on(&Event::Finished);
    let mut samples = Vec::new();
    for result in read_pair {
        match result {
            Ok(sample) => samples.push(sample),
            Err(skip) => skipped.push(skip),
        }
    }
    skipped.sort_by(|a, b| a.path.cmp(&b.path));
    if samples.is_empty() {
        let first =
            skipped.first().map_or_else(String::new, |s| format!("; first: {}: {}", s.path.display(), s.reason));
        return Err(Error::data(
            &options.images,
            format!("no usable pair of image and mask with `{}`{first}", options.masks.display()),
            format!("a mask must have its image's stem, optionally with one of {}", MASK_SUFFIXES.join(", ")),
        ));
    }
    let splits = splits(samples.len(), options);
    write_files(&samples, &splits, options, observer)?;
    let rows = annotate(&samples, &splits, options, &templates)?;
    let mut report = PrepareReport { images: samples.len(), rows, skipped, ..PrepareReport::default() };
    for sample in &samples {
        report.depth.add(&sample.image, sample.range);
    }
    for split in splits {
        *report.images_by_split.entry(split.to_owned()).or_default() += 1;
    }
    Ok(report)
}

fn check(options: &PrepareOptions, templates: &Templates) -> Result<()> {
    let name = &options.modality;
    let legal = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.starts_with('.') || name == "annotations" || !name.chars().all(legal) {
        return Err(Error::config(
            "modality",
            format!("`{name}` is not a folder name"),
            "use letters, digits, `_`, `-` and `.`, as in `lung_CT`; not `annotations`",
        ));
    }
    let frac = |value: f64| (0.0..=1.0).contains(&value);
    if !frac(options.val_frac) || !frac(options.test_frac) || options.val_frac + options.test_frac > 1.0 {
        return Err(Error::config(
            "val_frac, test_frac",
            format!("{} and {} are out of range", options.val_frac, options.test_frac),
            "give two numbers from 0 to 1 with a sum of at most 1",
        ));
    }
    if !(1..=templates.one.len()).contains(&options.rows_per_image) {
        return Err(Error::config(
            "rows_per_image",
            format!("{} is out of range", options.rows_per_image),
            format!("give 1 to {}, the number of questions among the templates", templates.one.len()),
        ));
    }
    for (key, word) in [("target", &options.target), ("image_word", &options.image_word)] {
        if word.trim().is_empty() || word.contains(['{', '}', '\n']) || first_location(word).is_some() {
            return Err(Error::config(
                key,
                format!("`{word}` cannot be used in a sentence about a position"),
                "give a short noun phrase without a location, for example `lung tumor`",
            ));
        }
    }
    for path in [options.out.join(name), annotation_path(options)] {
        // a symbolic link counts, also one that leads nowhere
        if path.symlink_metadata().is_ok() {
            return Err(Error::data(
                path,
                "already exists; nothing was written",
                "give another modality name or data root, or remove the old one first",
            ));
        }
    }
    Ok(())
}

fn annotation_path(options: &PrepareOptions) -> PathBuf {
    options.out.join("annotations").join(format!("{}.csv", options.modality))
}

/// The stem without its mask suffix; `None` if it has none.
fn without_suffix(stem: &str) -> Option<&str> {
    MASK_SUFFIXES.iter().find_map(|suffix| {
        let (head, tail) = stem.split_at_checked(stem.len().checked_sub(suffix.len())?)?;
        (!head.is_empty() && tail.eq_ignore_ascii_case(suffix)).then_some(head)
    })
}

/// Image files of a folder with their stems, sorted by name.
fn list_images(folder: &Path, skipped: &mut Vec<Skipped>) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        if path.is_dir() {
            continue;
        }
        let extension = path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
        match path.file_stem().and_then(OsStr::to_str) {
            Some(stem) if extension.is_some_and(|e| EXTENSIONS.contains(&e.as_str())) => {
                found.push((stem.to_owned(), path));
            }
            _ => skipped.push(Skipped { path, reason: "not a PNG, JPEG or TIFF file".into() }),
        }
    }
    found.sort();
    Ok(found)
}

/// One file per stem; two files are an error that names both.
fn unique_by_stem(files: impl IntoIterator<Item = (String, PathBuf)>, what: &str) -> Result<BTreeMap<String, PathBuf>> {
    let mut unique_by_stem = BTreeMap::new();
    for (stem, path) in files {
        if let Some(other) = unique_by_stem.insert(stem.clone(), path.clone()) {
            return Err(Error::data(
                path,
                format!("`{}` is a second {what} for the stem `{stem}`", other.display()),
                format!("keep one {what} for each image; merge several masks into one"),
            ));
        }
    }
    Ok(unique_by_stem)
}

fn pairs(image_folder: &Path, mask_folder: &Path) -> Result<(Vec<FilePair>, Vec<Skipped>)> {
    let mut skipped = Vec::new();
    let mut images = list_images(image_folder, &mut skipped)?;
    let mut masks;
    if image_folder.canonicalize().ok() == mask_folder.canonicalize().ok() {
        (masks, images) = images.into_iter().partition(|(stem, _)| without_suffix(stem).is_some());
    } else {
        masks = list_images(mask_folder, &mut skipped)?;
    }
    let images = unique_by_stem(images, "image")?;
    for (stem, _) in &mut masks {
        // An image's own name may end in a mask suffix; then the full stem matches.
        if let Some(head) = without_suffix(stem).filter(|_| !images.contains_key(stem.as_str())) {
            *stem = head.to_owned();
        }
    }
    let mut masks = unique_by_stem(masks, "mask")?;
    let mut pairs = Vec::new();
    for (stem, image) in images {
        match masks.remove(&stem) {
            Some(mask) => pairs.push(FilePair { stem, image, mask }),
            None => skipped.push(Skipped { path: image, reason: "no mask with this stem".into() }),
        }
    }
    skipped.extend(masks.into_values().map(|path| Skipped { path, reason: "no image with this stem".into() }));
    Ok((pairs, skipped))
}

fn read_pair(pair: FilePair, options: &PrepareOptions) -> std::result::Result<UsablePair, Skipped> {
    let FilePair { stem, image, mask: mask_path } = pair;
    let skip = |path: &Path, reason: String| Skipped { path: path.to_owned(), reason };
    let unreadable = |path: &Path, error: &Error| {
        let reason = match error {
            Error::Data { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        skip(path, format!("cannot be read: {reason}"))
    };
    // the image is decoded completely, so that a truncated file is found now and not during a training
    let (decoded, range) = decode::image_with_range(&image).map_err(|error| unreadable(&image, &error))?;
    let mask = decode::stored_mask(&mask_path).map_err(|error| unreadable(&mask_path, &error))?;
    let (found, expected) = (mask.dimensions(), (decoded.width(), decoded.height()));
    if found != expected {
        let reason = format!("is {} x {} pixels, its image {} x {}", found.0, found.1, expected.0, expected.1);
        return Err(skip(&mask_path, reason));
    }
    let several = mask.labels();
    if options.labels.is_empty() && several.len() > 1 {
        let found = labels::describe(&several);
        return Err(skip(&mask_path, format!("the mask has several labels: {found}; choose with `--labels`")));
    }
    let mask = if options.labels.is_empty() { binary(&mask) } else { mask.select(options.labels) };
    let Some(location) = describe(&mask, options.zones, options.several) else {
        return Err(skip(&mask_path, "the mask is empty".into()));
    };
    let mut bytes = std::io::Cursor::new(Vec::new());
    let encoded = mask.write_to(&mut bytes, image::ImageFormat::Png);
    encoded.map_err(|error| skip(&mask_path, format!("cannot be written as PNG: {error}")))?;
    Ok(UsablePair { stem, image, mask_png: bytes.into_inner(), location, range })
}

/// A mask of one label as 0 and 255. The threshold is half of the range, or 0 if no value is above half (0/1 masks,
/// 16-bit labels).
fn binary(mask: &StoredMask) -> GrayImage {
    let half = match mask {
        StoredMask::Grey8(_) => 127,
        StoredMask::Grey16(_) => 32_767,
    };
    let values: Vec<u16> = match mask {
        StoredMask::Grey8(grey) => grey.iter().copied().map(u16::from).collect(),
        StoredMask::Grey16(deep) => deep.as_raw().clone(),
    };
    let threshold = if values.iter().any(|&value| value > half) { half } else { 0 };
    let pixels = values.into_iter().map(|value| if value > threshold { 255 } else { 0 }).collect();
    let (width, height) = mask.dimensions();
    GrayImage::from_raw(width, height, pixels).expect("one value for each pixel")
}

fn describe(mask: &GrayImage, zones: Zones, several: Several) -> Option<LocationWords> {
    let size = mask.dimensions();
    let whole = position::whole(mask)?;
    let speck = |region: &Region| (region.area_px as f64) < SPECK_FRAC * whole.area_px as f64;
    let mut regions = position::components(mask);
    regions.retain(|region| !speck(region));
    let count = regions.len().max(1);
    if let (Several::Regions, [first, last]) = (several, regions.as_slice()) {
        let label = |region: &Region| match zones {
            Zones::Grid => position::grid(region, size).label(zones),
            Zones::Quadrants => position::component_zone(region, size).label(),
        };
        let (zone, second_zone) = (label(first), label(last));
        if zone != second_zone {
            return Some(LocationWords { zone, second_zone: Some(second_zone), count: 1, near: None });
        }
    }
    Some(match zones {
        Zones::Grid => {
            let zone = position::grid(&whole, size).label(zones);
            LocationWords { zone, second_zone: None, count, near: None }
        }
        Zones::Quadrants => {
            let quadrant = position::quadrant(&whole, size);
            let zone = quadrant.position.label(zones);
            let near = (zone != "center").then_some(quadrant.near);
            LocationWords { zone, second_zone: None, count, near }
        }
    })
}

/// The split of every sample: exact fractions in shuffled order.
fn splits(count: usize, options: &PrepareOptions) -> Vec<&'static str> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
    let part = |frac: f64| (count as f64 * frac).round() as usize;
    let (test, val) = (part(options.test_frac), part(options.val_frac));
    let mut splits: Vec<_> = (0..count)
        .map(|rank| match rank {
            _ if rank < test => "test",
            _ if rank < test + val => "val",
            _ => "train",
        })
        .collect();
    splits.shuffle(&mut ChaCha8Rng::seed_from_u64(options.seed));
    splits
}

fn write_files(
    samples: &[UsablePair],
    splits: &[&str],
    options: &PrepareOptions,
    observer: &dyn Observer,
) -> Result<()> {
    let root = options.out.join(&options.modality);
    make_folders(&root, splits, options)?;
    observer.on(&Event::Started { phase: "copy images".into(), total: samples.len() as u64, unit: "images" });
    for (number, (sample, split)) in samples.iter().zip(splits).enumerate() {
        let name = sample.image.file_name().expect("listed files have names");
        let image = root.join(format!("{split}_images")).join(name);
        let mut original = files::open(&sample.image).map_err(Error::io(&sample.image, "read"))?;
        write_new(&image, &mut original)?;
        let mask = root.join(format!("{split}_masks")).join(format!("{}.png", sample.stem));
        write_new(&mask, &mut sample.mask_png.as_slice())?;
        observer.on(&Event::Advanced { done: number as u64 + 1 });
    }
    observer.on(&Event::Finished);
    Ok(())
}

/// Creates all folders before the first file is written.
fn make_folders(root: &Path, splits: &[&str], options: &PrepareOptions) -> Result<()> {
    files::create_folders(&options.out).map_err(Error::io(&options.out, "create"))?;
    let of_split = |split: &&str| ["images", "masks"].map(|what| root.join(format!("{split}_{what}")));
    let mut folders: Vec<PathBuf> = splits.iter().flat_map(of_split).collect();
    folders.push(options.out.join("annotations"));
    folders.sort();
    folders.dedup();
    folders.iter().try_for_each(|folder| files::create_below(&options.out, folder).map_err(Error::io(folder, "create")))
}

/// Writes a file that does not exist. A symbolic link of this name is not followed.
fn write_new(path: &Path, content: &mut impl Read) -> Result<()> {
    let written = File::create_new(path).and_then(|mut file| io::copy(content, &mut file));
    written.map(drop).map_err(Error::io(path, "write"))
}

fn annotate(samples: &[UsablePair], splits: &[&str], options: &PrepareOptions, templates: &Templates) -> Result<usize> {
    let path = annotation_path(options);
    let failed = |error: csv::Error| Error::io(&path, "write")(error.into());
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(["image_path", "question", "answer", "position", "split"]).map_err(failed)?;
    let mut rows = 0;
    for (number, (sample, split)) in samples.iter().zip(splits).enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(1 + number as u64);
        let LocationWords { zone, second_zone, count, near } = &sample.location;
        let words = Words {
            target: &options.target,
            image: &options.image_word,
            zone,
            second_zone: second_zone.as_deref().unwrap_or_default(),
            which: "",
            count: *count,
        };
        let location = second_zone.as_ref().map_or_else(|| zone.clone(), |second| format!("{zone} and {second}"));
        let mask_path = format!("{}/{split}_masks/{}.png", options.modality, sample.stem);
        for (question, answer) in templates::draw(&templates.one, options.rows_per_image, &mut rng) {
            let answer = match second_zone {
                Some(_) => templates.regions.answers.choose(&mut rng).map_or(answer, String::as_str),
                None => answer,
            };
            let mut answer = words.fill(answer);
            if *count > 1 {
                answer = answer + " " + &words.fill(&templates.extra.areas);
            }
            if let Some(near) = near {
                answer = answer + " " + &words.fill(if *near { &templates.extra.near } else { &templates.extra.far });
            }
            csv.write_record([&mask_path, &words.fill(question), &answer, &location, *split]).map_err(failed)?;
            rows += 1;
        }
    }
    let bytes = csv.into_inner().map_err(|error| Error::io(&path, "write")(error.into_error()))?;
    files::write(&path, &bytes).map_err(Error::io(&path, "write"))?;
    Ok(rows)
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
