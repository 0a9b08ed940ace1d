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

use std::collections::BTreeMap;
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

use self::canvas::Plane;
pub use self::lesion::{AREA_RATIO, CELL_MARGIN_FRAC, SIDE_MARGIN_FRAC};
use self::lesion::{Contrast, PlacedLesion};
use self::modality::Modality;
pub use self::volumes::{VolumeOptions, VolumeReport, generate_volumes};
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
    if let Some(report) = existing_report(out, options)? {
        observer.on(&Event::Note(format!("{} already contains these phantoms", out.display())));
        return Ok(report);
    }
    let splits = splits(options);
    make_folders(out, &splits)?;
    let templates = Templates::embedded();
    observer.on(&Event::Started { phase: "generate phantoms".into(), total: options.count as u64, unit: "images" });
    let done = AtomicU64::new(0);
    let rows = (0..options.count)
        .into_par_iter()
        .map(|index| {
            let rows = make(out, index, splits[index], options, &templates)?;
            observer.on(&Event::Advanced { done: done.fetch_add(1, Ordering::Relaxed) + 1 });
            Ok(rows)
        })
        .collect::<Result<Vec<Vec<AnnotationRow>>>>()?;
    let report = write_annotations(out, &splits, &rows, options)?;
    write_marker(out, options, &report)?;
    observer.on(&Event::Finished);
    Ok(report)
}

/// Marks a complete folder.
fn write_marker(out: &Path, options: &impl Serialize, report: &impl Serialize) -> Result<()> {
    let marker = Marker { options, report };
    let text = serde_json::to_string_pretty(&marker).expect("numbers and strings always serialise") + "\n";
    let path = out.join(MARKER);
    std::fs::write(&path, text).map_err(Error::io(&path, "write"))
}

fn out_of_range(key: &str, value: &dyn std::fmt::Display, range: &str) -> Result<()> {
    Err(Error::argument(key, format!("{value} is out of range"), format!("give {range}")))
}

fn check(options: &PhantomOptions) -> Result<()> {
    let frac = |value: f64| (0.0..=1.0).contains(&value);
    match options {
        o if o.count == 0 => out_of_range("count", &o.count, "at least 1"),
        o if !(32..=2048).contains(&o.image_size_px) => {
            out_of_range("image_size", &o.image_size_px, "32 to 2048 pixels")
        }
        o if !frac(o.two_lesion_frac) => out_of_range("two_lesions", &o.two_lesion_frac, "0 to 1"),
        o if !frac(o.absent_frac) => out_of_range("negatives", &o.absent_frac, "0 to 1"),
        o if !(1..=4).contains(&o.rows_per_lesion) => out_of_range("questions", &o.rows_per_lesion, "1 to 4"),
        o if !frac(o.val_frac) => out_of_range("val_frac", &o.val_frac, "0 to 1"),
        o if !frac(o.test_frac) || o.val_frac + o.test_frac > 1.0 => {
            out_of_range("test_frac", &o.test_frac, "0 to 1, together with `val_frac` at most 1")
        }
        _ => Ok(()),
    }
}

/// The report of a folder that was made with these options; `None` for a folder that is empty or does not exist.
fn existing_report<O, R>(out: &Path, options: &O) -> Result<Option<R>>
where
    O: DeserializeOwned + PartialEq,
    R: DeserializeOwned,
{
    let mut entries = match std::fs::read_dir(out) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(out, "read")(error)),
    };
    let marker = files::read_to_string(&out.join(MARKER), files::MAX_TEXT).ok();
    let other = marker.as_deref().and_then(|text| serde_json::from_str::<Marker<Value, Value>>(text).ok());
    let same = marker.as_deref().and_then(|text| serde_json::from_str::<Marker<O, R>>(text).ok());
    match (same, other) {
        (Some(marker), _) if marker.options == *options => Ok(Some(marker.report)),
        (_, Some(_)) => {
            Err(Error::data(out, "contains phantoms made with other options", "give another folder or remove this one"))
        }
        (_, None) if entries.next().is_none() => Ok(None),
        (_, None) => Err(Error::data(
            out,
            "is not empty and contains no complete phantoms",
            "give a new folder, or remove this one if an earlier run was interrupted",
        )),
    }
}

fn modality_of(index: usize) -> Modality {
    Modality::ALL[index % Modality::ALL.len()]
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
    let kinds = Modality::ALL.len();
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
    let (kind, round) = (index % Modality::ALL.len(), index / Modality::ALL.len());
    // Each modality starts at another point of the pattern, so that a few images also contain both kinds.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
    let twos_before = |round: usize| ((round as f64 + kind as f64 * 0.618) * frac).floor() as usize;
    let (before, after) = (twos_before(round), twos_before(round + 1));
    let twos = before - twos_before(0);
    if after > before { (true, twos) } else { (false, round - twos) }
}

/// Whether image `index` has no lesion. The fraction is exact in blocks of ten images of a modality.
fn is_absent(seed: u64, index: usize, frac: f64) -> bool {
    const BLOCK: usize = 10;
    let (kind, round) = (index % Modality::ALL.len(), index / Modality::ALL.len());
    let block = round / BLOCK;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
    let before = |block: usize| ((block * BLOCK) as f64 * frac + 1e-9).floor() as usize;
    let mut order: [usize; BLOCK] = std::array::from_fn(|index| index);
    order.shuffle(&mut generator(seed, (1 << 48) + (block * Modality::ALL.len() + kind) as u64));
    order.iter().take(before(block + 1) - before(block)).any(|absent| *absent == round % BLOCK)
}

/// Whether image `index` has two lesions.
fn has_two(index: usize, options: &PhantomOptions) -> bool {
    plan(index, options.two_lesion_frac).0 && !is_absent(options.seed, index, options.absent_frac)
}

/// The cell of the first lesion: nine images of a kind cover the nine cells, in shuffled order.
fn cell(seed: u64, index: usize, two: bool, number: usize) -> Position {
    let kind = (index % Modality::ALL.len() * 2 + usize::from(two)) as u64;
    let mut cells = Position::ALL;
    cells.shuffle(&mut generator(seed, 1 + kind + 12 * (number / 9) as u64));
    cells[number % 9]
}

fn place_lesions(
    modality: Modality,
    options: &PhantomOptions,
    index: usize,
    rng: &mut ChaCha8Rng,
) -> Option<(Vec<PlacedLesion>, Option<Contrast>)> {
    let (two, number) = plan(index, options.two_lesion_frac);
    let cell = cell(options.seed, index, two, number);
    let allowed_area = modality.allowed_area(options.image_size_px);
    let usual_is_bright = modality.usual_is_bright();
    if !two {
        let mut placed = allowed_area.one(cell, rng)?;
        placed.lesion.brighter = usual_is_bright;
        return Some((vec![placed], None));
    }
    // Mostly sides; brightness only if lesions of both brightnesses are visible.
    let sides = [Contrast::LeftRight, Contrast::UpperLower, Contrast::LeftRight, Contrast::UpperLower];
    let contrast = match rng.random_range(0..10) {
        0 if modality.has_two_looks() => Contrast::Brightness,
        1 => Contrast::Size,
        _ => *sides.choose(rng).expect("not empty"),
    };
    let [mut first, mut second] = allowed_area.two(cell, contrast, rng)?;
    let brightness = contrast == Contrast::Brightness;
    first.lesion.brighter = brightness || usual_is_bright;
    second.lesion.brighter = !brightness && usual_is_bright;
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
    let modality = modality_of(index);
    if is_absent(options.seed, index, options.absent_frac) {
        return make_without_lesion(out, index, split, options, templates);
    }
    let Some((placed, contrast)) = place_lesions(modality, options, index, &mut rng) else {
        return Err(Error::config(
            "image_size_px",
            format!("no room for the lesions of image {index}"),
            "use larger images or another seed",
        ));
    };
    let lesions: Vec<_> = placed.iter().map(|placed| &placed.lesion).collect();
    let planes = modality.draw(&lesions, options.image_size_px as usize, &mut rng);
    let folder = |what: &str| format!("{}/{split}_{what}", modality.folder());
    let mut rows = Vec::new();
    let mut first_image: Option<PathBuf> = None;
    for (number, placed) in placed.iter().enumerate() {
        let suffix = if contrast.is_some() { ["_a", "_b"][number] } else { "" };
        let stem = format!("phantom_{index:05}{suffix}");
        let image_path = out.join(folder("images")).join(format!("{stem}.{}", modality.extension()));
        match &first_image {
            None => write_image(&image_path, &planes, options.image_size_px)?,
            Some(first) => link(first, &image_path)?,
        }
        first_image.get_or_insert(image_path);
        let mask_path = format!("{}/{stem}.png", folder("masks"));
        save(&out.join(&mask_path), &DynamicImage::ImageLuma8(placed.mask.clone()))?;
        let zone = placed.position.label(Zones::Grid);
        let words = Words {
            target: "lesion",
            image: "image",
            zone: &zone,
            which: contrast.map_or("", |contrast| contrast.words()[number]),
            ..Words::default()
        };
        let section = if contrast.is_some() { &templates.pair } else { &templates.one };
        for (question, answer) in templates::draw(section, options.rows_per_lesion, &mut rng) {
            rows.push(AnnotationRow {
                mask_path: mask_path.clone(),
                question: words.fill(question),
                answer: words.fill(answer),
                position: Some(zone.clone()),
            });
        }
    }
    Ok(rows)
}

/// An image without a lesion: an empty mask, the questions about one lesion, and answers that there is none.
fn make_without_lesion(
    out: &Path,
    index: usize,
    split: &str,
    options: &PhantomOptions,
    templates: &Templates,
) -> Result<Vec<AnnotationRow>> {
    let mut rng = generator(options.seed, (1 << 32) + index as u64);
    let (modality, side) = (modality_of(index), options.image_size_px);
    let planes = modality.draw(&[], side as usize, &mut rng);
    let folder = |what: &str| format!("{}/{split}_{what}", modality.folder());
    let image_path = out.join(folder("images")).join(format!("phantom_{index:05}.{}", modality.extension()));
    write_image(&image_path, &planes, side)?;
    let mask_path = format!("{}/phantom_{index:05}.png", folder("masks"));
    save(&out.join(&mask_path), &DynamicImage::ImageLuma8(GrayImage::new(side, side)))?;
    let words = Words { target: "lesion", image: "image", ..Words::default() };
    let questions = templates::draw(&templates.one, options.rows_per_lesion, &mut rng);
    let row = |(question, _): (&str, &str)| AnnotationRow {
        mask_path: mask_path.clone(),
        question: words.fill(question),
        answer: words.fill(templates.absent.answers.choose(&mut rng).map_or("", String::as_str)),
        position: None,
    };
    Ok(questions.into_iter().map(row).collect())
}

fn make_folders(out: &Path, splits: &[&str]) -> Result<()> {
    let mut folders = vec![out.join("annotations")];
    for (index, split) in splits.iter().enumerate() {
        for what in ["images", "masks"] {
            folders.push(out.join(modality_of(index).folder()).join(format!("{split}_{what}")));
        }
    }
    folders.sort();
    folders.dedup();
    folders.iter().try_for_each(|folder| std::fs::create_dir_all(folder).map_err(Error::io(folder, "create")))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=255")]
fn byte(value: f32) -> u8 {
    (value.clamp(0.0, 1.0) * 255.0).round() as u8
}

fn write_image(path: &Path, planes: &[Plane], size: u32) -> Result<()> {
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
    let mut report = PhantomReport {
        images: options.count,
        two_lesion_images: (0..options.count).filter(|&index| has_two(index, options)).count(),
        images_without_lesion: (0..options.count)
            .filter(|&index| is_absent(options.seed, index, options.absent_frac))
            .count(),
        ..PhantomReport::default()
    };
    for (kind, modality) in Modality::ALL.into_iter().enumerate().take(options.count) {
        let path = out.join("annotations").join(format!("{}.csv", modality.folder()));
        let failed = |error: csv::Error| Error::io(&path, "write")(error.into());
        let mut csv = csv::WriterBuilder::new().from_path(&path).map_err(failed)?;
        // without negatives, the files are those of earlier versions
        let with_present = options.absent_frac > 0.0;
        let optional = |cell: &'static str| with_present.then_some(cell);
        let header = ["image_path", "question", "answer", "position", "split"].into_iter().chain(optional("present"));
        csv.write_record(header).map_err(failed)?;
        let by_split = report.rows_by_modality.entry(modality.folder().to_owned()).or_default();
        for index in (kind..options.count).step_by(Modality::ALL.len()) {
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
