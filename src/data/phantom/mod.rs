//! Phantoms: synthetic images of six modalities with one or two lesions, or on request without, with masks, questions and
//! answers, as a data root; and synthetic volumes with label maps ([`generate_volumes`]).
//!
//! The images imitate the look of the modalities; physics and patients are not modelled. The layout is PRS-Med's:
//! `MODALITY/{train,val,test}_{images,masks}/` and `annotations/MODALITY.csv`, where `image_path` is the path of the
//! mask. An image with two lesions has the masks `NAME_a.png` and `NAME_b.png`. An image is found by its mask's stem,
//! so the same image exists under both stems (a hard link if the file system allows it), and both are in the same
//! split.
//!
//! An image depends only on the seed and its index; only its split depends on the number of images. The same options
//! give the same bytes. `phantom.json` is written last: it marks a complete data root and contains the options.

mod canvas;
mod colour;
mod ellipsoid;
mod grey;
mod lesion;
mod modality;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, GrayImage, RgbImage};
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::canvas::Canvas;
use self::lesion::{Contrast, LesionArea, PlacedLesion};
use self::modality::{MODALITIES, PhantomModality};
pub use self::volumes::{PhantomVolumeOptions, VolumeReport, generate_volumes};
use crate::position::{Position, Zones};
use crate::templates::{self, Templates, Words};
use prsmed_base::event::{Event, Observer};
use prsmed_base::{Error, Result, files};

/// Options of [`generate`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhantomOptions {
    /// Number of different images, at least 1.
    pub count: usize,
    /// Random seed.
    pub seed: u64,
    /// Side of the square images in pixels, 32..=2048.
    pub image_size_px: u32,
    /// Fraction of the images with two lesions, 0..=1.
    pub two_lesion_frac: f64,
    /// Fraction of the images without a lesion, 0..=1; the fraction with two lesions is that of the others.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub absent_frac: f64,
    /// Number of rows (different questions) per lesion, or per image without a lesion, 1..=4.
    pub rows_per_lesion: usize,
    /// Fraction of the images for validation, 0..=1.
    pub val_frac: f64,
    /// Fraction of the images for testing, 0..=1; at most `1 - val_frac`.
    pub test_frac: f64,
}

impl Default for PhantomOptions {
    fn default() -> Self {
        Self {
            count: 600,
            seed: 0,
            image_size_px: 256,
            two_lesion_frac: 0.5,
            absent_frac: 0.0,
            rows_per_lesion: 1,
            val_frac: 0.1,
            test_frac: 0.1,
        }
    }
}

/// Fields that are 0 are left out, so that phantoms of earlier versions are recognised.
fn is_zero<T: PartialEq + Default>(value: &T) -> bool {
    *value == T::default()
}

/// Results of [`generate`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhantomReport {
    /// Number of different images.
    pub images: usize,
    /// Number of images with two lesions.
    pub two_lesion_images: usize,
    /// Number of images without a lesion.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub images_without_lesion: usize,
    /// Number of rows of all annotation files.
    pub rows: usize,
    /// Number of rows by modality folder and split.
    pub rows_by_modality: BTreeMap<String, BTreeMap<String, usize>>,
}

/// Contents of `phantom.json`.
#[derive(Serialize, Deserialize)]
struct Marker<O, R> {
    options: O,
    report: R,
}

const MARKER: &str = "phantom.json";
/// Fractions are exact in blocks of this many images of a modality, or volumes.
const BLOCK: usize = 10;

/// A row of an annotation file.
struct AnnotationRow {
    mask_path: String,
    question: String,
    answer: String,
    /// `None` without a lesion.
    position: Option<String>,
}

/// Generates the data root `out`, which must be empty or not exist. A data root made with the same options is not
/// changed.
///
/// # Errors
/// [`Error::Config`] for options out of range, [`Error::Data`] when `out` contains something else, [`Error::Io`] when
/// a file cannot be written.
pub fn generate(out: &Path, options: &PhantomOptions, observer: &dyn Observer) -> Result<PhantomReport> {
    check(options)?;
    if let Some(report) = existing_report(out, options, observer)? {
        return Ok(report);
    }
    let splits = splits(options);
    make_folders(out, &splits)?;
    let templates = Templates::embedded();
    let make = |index| make(out, index, splits[index], options, &templates);
    let rows = make_all(options.count, "images", observer, make)?;
    let report = write_annotations(out, &splits, &rows, options)?;
    complete(out, options, report, observer)
}

/// Makes phantoms in parallel.
fn make_all<T: Send>(
    count: usize,
    unit: &'static str,
    observer: &dyn Observer,
    make: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    observer.on(&Event::Started { phase: "generate phantoms".into(), total: count as u64, unit });
    let done = AtomicU64::new(0);
    let make = |index| {
        let made = make(index)?;
        observer.on(&Event::Advanced { done: done.fetch_add(1, Ordering::Relaxed) + 1 });
        Ok(made)
    };
    (0..count).into_par_iter().map(make).collect()
}

/// Marks a complete folder.
fn complete<R: Serialize>(out: &Path, options: &impl Serialize, report: R, observer: &dyn Observer) -> Result<R> {
    let marker = Marker { options, report: &report };
    let text = serde_json::to_string_pretty(&marker).expect("numbers and strings always serialise") + "\n";
    let path = out.join(MARKER);
    std::fs::write(&path, text).map_err(Error::io(&path, "write"))?;
    observer.on(&Event::Finished);
    Ok(report)
}

/// Refuses an argument out of its range.
fn require(is_in: bool, key: &str, value: &dyn std::fmt::Display, range: &str) -> Result<()> {
    let refused = || Error::argument(key, format!("{value} is out of range"), format!("give {range}"));
    if is_in { Ok(()) } else { Err(refused()) }
}

fn is_frac(value: f64) -> bool {
    (0.0..=1.0).contains(&value)
}

fn check(options: &PhantomOptions) -> Result<()> {
    let o = options;
    require(o.count > 0, "count", &o.count, "at least 1")?;
    require((32..=2048).contains(&o.image_size_px), "image_size", &o.image_size_px, "32 to 2048 pixels")?;
    require(is_frac(o.two_lesion_frac), "two_lesions", &o.two_lesion_frac, "0 to 1")?;
    require(is_frac(o.absent_frac), "negatives", &o.absent_frac, "0 to 1")?;
    require((1..=4).contains(&o.rows_per_lesion), "questions", &o.rows_per_lesion, "1 to 4")?;
    require(is_frac(o.val_frac), "val_frac", &o.val_frac, "0 to 1")?;
    let fits = is_frac(o.test_frac) && o.val_frac + o.test_frac <= 1.0;
    require(fits, "test_frac", &o.test_frac, "0 to 1, together with `val_frac` at most 1")
}

/// The report of a folder that was made with these options; `None` for a folder that is empty or does not exist.
fn existing_report<O, R>(out: &Path, options: &O, observer: &dyn Observer) -> Result<Option<R>>
where
    O: DeserializeOwned + PartialEq,
    R: DeserializeOwned,
{
    let mut entries = match std::fs::read_dir(out) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(out, "read")(error)),
    };
    let marker = files::read_to_string(&out.join(MARKER), files::MAX_TEXT).unwrap_or_default();
    if let Ok(marker) = serde_json::from_str::<Marker<O, R>>(&marker)
        && marker.options == *options
    {
        observer.on(&Event::Note(format!("{} already contains these phantoms", out.display())));
        return Ok(Some(marker.report));
    }
    let (reason, hint) = if serde_json::from_str::<Marker<Value, Value>>(&marker).is_ok() {
        ("contains phantoms made with other options", "give another folder or remove this one")
    } else if entries.next().is_none() {
        return Ok(None);
    } else {
        let hint = "give a new folder, or remove this one if an earlier run was interrupted";
        ("is not empty and contains no complete phantoms", hint)
    };
    Err(Error::data(out, reason, hint))
}

fn modality_of(index: usize) -> &'static PhantomModality {
    &MODALITIES[index % MODALITIES.len()]
}

/// Random generator of a stream: 0 for the splits, 1.. for cells, 2^32.. for images, 2^48.. for images without a lesion.
fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// The split of every image: shuffled within each modality, with exact overall fractions.
fn splits(options: &PhantomOptions) -> Vec<&'static str> {
    let mut rng = generator(options.seed, 0);
    let kinds = MODALITIES.len();
    let mut queues: Vec<Vec<usize>> = (0..kinds).map(|kind| (kind..options.count).step_by(kinds).collect()).collect();
    for queue in &mut queues {
        queue.shuffle(&mut rng);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
    let part = |frac: f64| (options.count as f64 * frac).round() as usize;
    let (test, val) = (part(options.test_frac), part(options.val_frac));
    let mut splits = vec!["train"; options.count];
    let rounds = (0..options.count.div_ceil(kinds)).flat_map(|round| queues.iter().filter_map(move |q| q.get(round)));
    for (rank, &index) in rounds.enumerate() {
        if rank < test {
            splits[index] = "test";
        } else if rank < test + val {
            splits[index] = "val";
        }
    }
    splits
}

/// Whether image `index` has two lesions, and the number of earlier images of its modality with as many lesions.
fn plan(index: usize, frac: f64) -> (bool, usize) {
    let (kind, round) = (index % MODALITIES.len(), index / MODALITIES.len());
    // Each modality starts at another point of the pattern, so that a few images also contain both kinds.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
    let twos_before = |round: usize| ((round as f64 + kind as f64 * 0.618) * frac).floor() as usize;
    let (before, after) = (twos_before(round), twos_before(round + 1));
    let twos = before - twos_before(0);
    if after > before { (true, twos) } else { (false, round - twos) }
}

/// Whether image `index` has no lesion. The fraction is exact in blocks of ten images of a modality.
fn is_absent(seed: u64, index: usize, frac: f64) -> bool {
    let (kind, round) = (index % MODALITIES.len(), index / MODALITIES.len());
    let block = round / BLOCK;
    let order = shuffled_block(generator(seed, (1 << 48) + (block * MODALITIES.len() + kind) as u64));
    order[..part_of_block(block, frac)].contains(&(round % BLOCK))
}

/// How many of a block have a property that this fraction of all has: blocks have exact numbers.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
fn part_of_block(block: usize, frac: f64) -> usize {
    let until = |block: usize| ((block * BLOCK) as f64 * frac + 1e-9).floor() as usize;
    until(block + 1) - until(block)
}

fn shuffled_block(mut rng: ChaCha8Rng) -> [usize; BLOCK] {
    let mut order = std::array::from_fn(|index| index);
    order.shuffle(&mut rng);
    order
}

/// The cell of the first lesion: nine images of a kind cover the nine cells, in shuffled order.
fn cell(seed: u64, index: usize, two: bool, number: usize) -> Position {
    let kind = (index % MODALITIES.len() * 2 + usize::from(two)) as u64;
    let mut cells = Position::ALL;
    cells.shuffle(&mut generator(seed, 1 + kind + 12 * (number / 9) as u64));
    cells[number % 9]
}

fn place_lesions(
    modality: &PhantomModality,
    options: &PhantomOptions,
    index: usize,
    rng: &mut ChaCha8Rng,
) -> Option<(Vec<PlacedLesion>, Option<Contrast>)> {
    let (two, number) = plan(index, options.two_lesion_frac);
    let cell = cell(options.seed, index, two, number);
    let allowed_area = LesionArea { inside: modality.area, size_px: options.image_size_px };
    if !two {
        let mut placed = allowed_area.one(cell, rng)?;
        placed.lesion.brighter = modality.bright;
        return Some((vec![placed], None));
    }
    // Mostly sides; brightness only if lesions of both brightnesses are visible.
    let sides = [Contrast::LeftRight, Contrast::UpperLower, Contrast::LeftRight, Contrast::UpperLower];
    let contrast = match rng.random_range(0..10) {
        0 if modality.two_looks => Contrast::Brightness,
        1 => Contrast::Size,
        _ => *sides.choose(rng).expect("not empty"),
    };
    let [mut first, mut second] = allowed_area.two(cell, contrast, rng)?;
    let brightness = contrast == Contrast::Brightness;
    first.lesion.brighter = brightness || modality.bright;
    second.lesion.brighter = !brightness && modality.bright;
    Some((vec![first, second], Some(contrast)))
}

fn make(
    out: &Path,
    index: usize,
    split: &str,
    options: &PhantomOptions,
    templates: &Templates,
) -> Result<Vec<AnnotationRow>> {
    let mut rng = generator(options.seed, (1 << 32) + index as u64);
    let (modality, side) = (modality_of(index), options.image_size_px);
    let is_absent = is_absent(options.seed, index, options.absent_frac);
    let placed = if is_absent { Some((Vec::new(), None)) } else { place_lesions(modality, options, index, &mut rng) };
    let (placed, contrast) = placed.ok_or_else(|| {
        let reason = format!("no room for the lesions of image {index}");
        Error::config("image_size_px", reason, "use larger images or another seed")
    })?;
    let lesions: Vec<_> = placed.iter().map(|placed| &placed.lesion).collect();
    let planes = (modality.draw)(&lesions, side as usize, &mut rng);
    // photographs are JPEG files, as in real collections; the others are 8-bit grey PNG files
    let extension = if planes.len() == 1 { "png" } else { "jpg" };
    let mut masks: Vec<_> = placed.into_iter().map(|placed| (placed.mask, Some(placed.position))).collect();
    if is_absent {
        masks.push((GrayImage::new(side, side), None));
    }
    let folder = |what: &str| format!("{}/{split}_{what}", modality.folder);
    let (mut rows, mut first_image) = (Vec::new(), None::<PathBuf>);
    for (number, (mask, position)) in masks.into_iter().enumerate() {
        let suffix = if contrast.is_some() { ["_a", "_b"][number] } else { "" };
        let stem = format!("phantom_{index:05}{suffix}");
        let image_path = out.join(folder("images")).join(format!("{stem}.{extension}"));
        match &first_image {
            None => write_image(&image_path, &planes, side)?,
            Some(first) => link(first, &image_path)?,
        }
        first_image.get_or_insert(image_path);
        let mask_path = format!("{}/{stem}.png", folder("masks"));
        save(&out.join(&mask_path), &DynamicImage::ImageLuma8(mask))?;
        let zone = position.map(|position| position.label(Zones::Grid));
        let words = Words {
            target: "lesion",
            image: "image",
            zone: zone.as_deref().unwrap_or_default(),
            which: contrast.map_or("", |contrast| contrast.words()[number]),
            ..Words::default()
        };
        let section = if contrast.is_some() { &templates.pair } else { &templates.one };
        for (question, answer) in templates::draw(section, options.rows_per_lesion, &mut rng) {
            // the questions about one lesion, and answers that there is none
            let mut absent = || templates.absent.answers.choose(&mut rng).map_or("", String::as_str);
            let answer = if is_absent { absent() } else { answer };
            let (question, answer) = (words.fill(question), words.fill(answer));
            rows.push(AnnotationRow { mask_path: mask_path.clone(), question, answer, position: zone.clone() });
        }
    }
    Ok(rows)
}

fn make_folders(out: &Path, splits: &[&str]) -> Result<()> {
    let of_image = |(index, split): (usize, &&str)| {
        ["images", "masks"].map(|what| out.join(modality_of(index).folder).join(format!("{split}_{what}")))
    };
    let folders = splits.iter().enumerate().flat_map(of_image).chain([out.join("annotations")]);
    let folders: BTreeSet<PathBuf> = folders.collect();
    folders.iter().try_for_each(|folder| std::fs::create_dir_all(folder).map_err(Error::io(folder, "create")))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=255")]
fn byte(value: f32) -> u8 {
    (value.clamp(0.0, 1.0) * 255.0).round() as u8
}

fn write_image(path: &Path, planes: &[Canvas], size: u32) -> Result<()> {
    let pixels: Vec<u8> =
        (0..planes[0].values.len()).flat_map(|i| planes.iter().map(move |p| byte(p.values[i]))).collect();
    let image = if planes.len() == 1 {
        GrayImage::from_raw(size, size, pixels).map(DynamicImage::ImageLuma8)
    } else {
        RgbImage::from_raw(size, size, pixels).map(DynamicImage::ImageRgb8)
    };
    save(path, &image.expect("a plane has size x size values"))
}

fn save(path: &Path, image: &DynamicImage) -> Result<()> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    let encoded = if path.extension().is_some_and(|extension| extension == "jpg") {
        image.write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, 92))
    } else {
        image.write_to(&mut bytes, image::ImageFormat::Png)
    };
    encoded.map_err(|error| Error::data(path, format!("cannot encode: {error}"), "report this as a defect"))?;
    std::fs::write(path, bytes.into_inner()).map_err(Error::io(path, "write"))
}

fn link(from: &Path, to: &Path) -> Result<()> {
    if std::fs::hard_link(from, to).is_err() {
        std::fs::copy(from, to).map_err(Error::io(to, "write"))?;
    }
    Ok(())
}

fn write_annotations(
    out: &Path,
    splits: &[&str],
    rows: &[Vec<AnnotationRow>],
    options: &PhantomOptions,
) -> Result<PhantomReport> {
    let is_absent = |index: &usize| is_absent(options.seed, *index, options.absent_frac);
    let has_two = |index: &usize| plan(*index, options.two_lesion_frac).0 && !is_absent(index);
    let mut report = PhantomReport {
        images: options.count,
        two_lesion_images: (0..options.count).filter(has_two).count(),
        images_without_lesion: (0..options.count).filter(is_absent).count(),
        ..PhantomReport::default()
    };
    for (kind, modality) in MODALITIES.iter().enumerate().take(options.count) {
        let path = out.join("annotations").join(format!("{}.csv", modality.folder));
        let failed = |error: csv::Error| Error::io(&path, "write")(error.into());
        let mut csv = csv::WriterBuilder::new().from_path(&path).map_err(failed)?;
        // without negatives, the files are those of earlier versions
        let with_present = options.absent_frac > 0.0;
        let optional = |cell: &'static str| with_present.then_some(cell);
        let header = ["image_path", "question", "answer", "position", "split"].into_iter().chain(optional("present"));
        csv.write_record(header).map_err(failed)?;
        let by_split = report.rows_by_modality.entry(modality.folder.to_owned()).or_default();
        for index in (kind..options.count).step_by(MODALITIES.len()) {
            for row in &rows[index] {
                let position = row.position.as_deref().unwrap_or_default();
                let record = [&row.mask_path, &row.question, &row.answer, position, splits[index]];
                let present = optional(if row.position.is_some() { "1" } else { "0" });
                csv.write_record(record.into_iter().chain(present)).map_err(failed)?;
                *by_split.entry(splits[index].to_owned()).or_default() += 1;
                report.rows += 1;
            }
        }
        csv.flush().map_err(Error::io(&path, "write"))?;
    }
    Ok(report)
}

#[cfg(test)]
mod tests;
