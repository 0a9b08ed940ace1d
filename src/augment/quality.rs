//! Quality numbers of a set of pictures: how far made pictures are from real ones, by modality, with the distance between
//! two real sets as the yardstick.
//!
//! It measures features, not use: pictures of a low distance need not help a segmenter (see `study` for that). FID is
//! given for Inception features only; those of the segmenter's own encoder carry its name (`KID[tinysam]`).

use crate::data::decode;
use crate::data::image::{MaskMode, mask_pixels, sam_pixels};
use crate::event::{Event, Observer};
use crate::metrics::distance::{self, FID_MIN_IMAGES, Mmd};
use crate::metrics::table::aligned;
use crate::models::inception::{self, Inception};
use crate::models::prsmed::PrsMed;
use crate::models::tiny_vit::STRIDE;
use crate::segment::Assembly;
use crate::tensor::store::{Role, Store, StoreOptions};
use crate::tensor::weights::Archive;
use crate::tensor::{Device, Kind, Tensor, guard, no_grad};
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Fewest pictures of a set for which distances are computed.
const MIN_IMAGES: i64 = 4;

/// Features `[n, d]` of the pictures of each modality.
pub type ByModality = BTreeMap<String, Tensor>;

/// What made the features, which says what they can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// InceptionV3: FID and KID.
    Inception,
    /// Another encoder by name: `KID[name]` and `MMD[name]`.
    Encoder(String),
}

/// A distance between two sets of pictures of one modality.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Row {
    /// Modality.
    pub modality: String,
    /// What the real training pictures are compared with: `synthetic`, `real test`.
    pub other: String,
    /// Real training pictures.
    pub n_real: i64,
    /// Pictures of the other set.
    pub n_other: i64,
    /// `FID`, `KID`, `MMD[tinysam]`, ...
    pub metric: String,
    /// The distance, smaller is nearer; `None` with too few pictures.
    pub value: Option<f64>,
    /// Lower end of its 95 % interval; `None` where there is none (FID).
    pub low: Option<f64>,
    /// Upper end of its 95 % interval.
    pub high: Option<f64>,
    /// What to know before the number is believed.
    pub warning: Option<String>,
}

/// Distances of several sets. Its [`Display`](fmt::Display) is the table.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// In the order of [`Report::add`], by modality.
    pub rows: Vec<Row>,
}

impl Report {
    /// Compares the real training pictures with the set called `name`, for every modality of that set. Call it once for
    /// the made pictures and once for real ones that were not trained on, the yardstick.
    ///
    /// # Errors
    /// [`Error::Shape`] for features of different widths or values that are not finite.
    pub fn add(
        &mut self,
        source: &Source,
        real: &ByModality,
        (name, other): (&str, &ByModality),
        seed: u64,
    ) -> Result<()> {
        for (modality, other) in other {
            let n_other = other.size()[0];
            let real = real.get(modality);
            let n_real = real.map_or(0, |features| features.size()[0]);
            let row = |metric: String, found: Option<[Option<f64>; 3]>, warning: Option<String>| {
                let [value, low, high] = found.unwrap_or_default();
                let (modality, other) = (modality.clone(), name.to_owned());
                Row { modality, other, n_real, n_other, metric, value, low, high, warning }
            };
            let Some(real) = real.filter(|_| n_real.min(n_other) >= MIN_IMAGES) else {
                let warning = Some(format!("fewer than {MIN_IMAGES} pictures"));
                self.rows.extend(source.metrics().map(|metric| row(metric, None, warning.clone())));
                continue;
            };
            let interval = |found: Mmd| Some([Some(found.value), Some(found.low), Some(found.high)]);
            let [first, second] = source.metrics();
            if *source == Source::Inception {
                let fid = distance::fid(real, other)?;
                let biased = || format!("biased upwards: fewer than {FID_MIN_IMAGES} pictures");
                self.rows.push(row(first, Some([Some(fid.value), None, None]), fid.bias_warning.then(biased)));
                self.rows.push(row(second, interval(distance::kid(real, other, seed)?), None));
            } else {
                self.rows.push(row(first, interval(distance::kid(real, other, seed)?), None));
                self.rows.push(row(second, interval(distance::mmd_rbf(real, other, seed)?), None));
            }
        }
        Ok(())
    }
}

impl Source {
    fn metrics(&self) -> [String; 2] {
        match self {
            Self::Inception => ["FID".into(), "KID".into()],
            Self::Encoder(name) => [format!("KID[{name}]"), format!("MMD[{name}]")],
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["modality", "against", "metric", "real", "other", "value", "95 % interval"];
        // as many digits as tell small distances apart
        let number = |value: f64| if value.abs() < 10.0 { format!("{value:.5}") } else { format!("{value:.2}") };
        let cells: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| {
                let interval = row.low.zip(row.high).map(|(low, high)| format!("{} .. {}", number(low), number(high)));
                let value = row.value.map_or_else(|| "-".into(), number);
                vec![
                    row.modality.clone(),
                    row.other.clone(),
                    row.metric.clone(),
                    row.n_real.to_string(),
                    row.n_other.to_string(),
                    format!("{value}{}", if row.warning.is_some() { "*" } else { " " }),
                    interval.unwrap_or_else(|| "-".into()),
                ]
            })
            .collect();
        f.write_str(&aligned(&header, &cells, None))?;
        let mut warnings: Vec<&str> = self.rows.iter().filter_map(|row| row.warning.as_deref()).collect();
        warnings.sort_unstable();
        warnings.dedup();
        warnings.iter().try_for_each(|warning| writeln!(f, "* {warning}"))
    }
}

/// Pictures whose features are wanted.
#[derive(Clone, Copy)]
pub struct Pictures<'a> {
    /// PNG, JPEG or TIFF files.
    pub files: &'a [PathBuf],
    /// The area of picture `i` that counts (nonzero pixels, any size); `None` for whole pictures. Used by
    /// [`encoder_features`] only.
    pub area: Option<&'a dyn Fn(usize) -> Result<GrayImage>>,
    /// Pictures in one pass of the network.
    pub batch: usize,
    /// Hears the progress.
    pub observer: &'a dyn Observer,
    /// Ends the work early when set.
    pub interrupt: &'a AtomicBool,
}

impl fmt::Debug for Pictures<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pictures").field("files", &self.files.len()).field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl Pictures<'_> {
    /// What `work` gives for each batch (the numbers and the decoded pictures), one below the other, fp32 on the CPU.
    fn batches(&self, work: impl Fn(&[usize], &[DynamicImage]) -> Result<Tensor>) -> Result<Tensor> {
        if self.files.is_empty() {
            return Err(Error::config("pictures", "there are none", "give at least one picture"));
        }
        let total = self.files.len() as u64;
        self.observer.on(&Event::Started { phase: "features".into(), total, unit: "images" });
        let numbers: Vec<usize> = (0..self.files.len()).collect();
        let mut parts = Vec::new();
        let mut done = 0;
        for batch in numbers.chunks(self.batch.max(1)) {
            if self.interrupt.load(Ordering::SeqCst) {
                return Err(Error::Interrupted);
            }
            let pictures: Vec<DynamicImage> =
                batch.iter().map(|&i| decode::picture(&self.files[i])).collect::<Result<_>>()?;
            let features = no_grad(|| guard::guard(|| work(batch, &pictures)))?;
            parts.push(features.to_device(Device::Cpu).to_kind(Kind::Float));
            done += batch.len() as u64;
            self.observer.on(&Event::Advanced { done });
        }
        self.observer.on(&Event::Finished);
        guard::guard(|| Ok(Tensor::cat(&parts, 0)))
    }
}

/// Features of the segmenter's own image encoder: its embedding's mean over the picture, or over each picture's area.
/// Returns `[n, c]` (256 for TinySAM), fp32 on the CPU.
///
/// # Errors
/// [`Error::Data`] for a picture that cannot be read or an area without a pixel; [`Error::Interrupted`]; typed errors of
/// libtorch.
pub fn encoder_features(assembly: &Assembly, pictures: &Pictures) -> Result<Tensor> {
    let size = assembly.description.pixels.sam_size;
    let side = i64::from(size);
    pictures.batches(|numbers, decoded| {
        let count = i64::try_from(numbers.len()).expect("a batch");
        let mut bytes = Vec::new();
        for picture in decoded {
            bytes.extend(sam_pixels(picture, size)?);
        }
        let images = Tensor::from_slice(&bytes).view([count, 3, side, side]);
        let embedding = assembly.model.embed_image(&images, PrsMed::evaluation_pass()).to_kind(Kind::Float);
        let Some(area) = pictures.area else {
            return Ok(embedding.mean_dim([2, 3].as_slice(), false, Kind::Float));
        };
        let mut shares = Vec::new();
        for &number in numbers {
            let mut mask = area(number)?;
            mask.iter_mut().for_each(|value| *value = if *value > 0 { 255 } else { 0 });
            if mask.iter().all(|&value| value == 0) {
                let hint = "leave this picture out, or compare whole pictures";
                return Err(Error::data(&pictures.files[number], "the area to compare is empty", hint));
            }
            shares.push(cell_shares(&mask, size)?);
        }
        let shares = Tensor::cat(&shares, 0).to_device(embedding.device());
        let sum = |xs: Tensor| xs.sum_dim_intlist([2, 3].as_slice(), false, Kind::Float);
        Ok(sum(embedding * &shares) / sum(shares))
    })
}

/// How much of each cell of the encoder's map a mask covers, `[1, 1, s / 16, s / 16]`; never 0 everywhere.
fn cell_shares(mask: &GrayImage, size: u32) -> Result<Tensor> {
    let side = i64::from(size);
    // binary targets keep a mask of few pixels
    let target = mask_pixels(mask, size, MaskMode::Binary)?;
    let target = Tensor::from_slice(&target).to_kind(Kind::Float).view([1, 1, side, side]) / 255.0;
    Ok(target.avg_pool2d([STRIDE; 2], [STRIDE; 2], [0, 0], false, true, None))
}

/// Inception's features, `[n, 2048]`, fp32 on the CPU.
///
/// # Errors
/// As [`encoder_features`].
pub fn inception_features(inception: &Inception, pictures: &Pictures) -> Result<Tensor> {
    pictures.batches(|_numbers, decoded| {
        let images: Vec<Tensor> = decoded.iter().map(|picture| inception::resized(&unit_pixels(picture))).collect();
        Ok(inception.features(&Tensor::cat(&images, 0)))
    })
}

/// `[1, 3, h, w]` in 0..=1.
fn unit_pixels(picture: &DynamicImage) -> Tensor {
    let rgb = picture.to_rgb8();
    let sides = [1, i64::from(rgb.height()), i64::from(rgb.width()), 3];
    Tensor::from_slice(rgb.as_raw()).view(sides).permute([0, 3, 1, 2]).contiguous().to_kind(Kind::Float) / 255.0
}

/// Inception with pytorch-fid's weights from `place`: the file, a safetensors file with the same keys, or a folder with
/// [`inception::WEIGHTS_FILE`].
///
/// # Errors
/// [`Error::Weights`] for a file that is not there or does not fit.
pub fn open_inception(place: &Path, device: Device) -> Result<Inception> {
    let inside = place.join(inception::WEIGHTS_FILE);
    let file = if inside.is_file() { inside } else { place.to_owned() };
    let archive = Archive::open(&file)?;
    let store = Store::new(StoreOptions { device, frozen_kind: Kind::Float, initialise: false });
    let model = guard::guard(|| Ok(Inception::new(&store.root(Role::Frozen))))?;
    let mut targets: Vec<(String, Tensor)> = store.entries().into_iter().map(|e| (e.name, e.tensor)).collect();
    archive.load(&mut targets, inception::is_unused)?.into_result(&file)?;
    Ok(model)
}

#[cfg(test)]
#[path = "quality_tests.rs"]
mod tests;
