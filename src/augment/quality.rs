//! Quality metrics of generated images: distances of feature distributions between real and generated images, by
//! modality.
//!
//! The metrics compare features, not usefulness: images with a low distance need not help a segmenter (see
//! [`super::ablation`]). FID is computed with Inception features only. Metrics with features of the segmenter's
//! encoder carry its name (`KID[tinysam]`).

use crate::augment::check_interrupt;
use crate::augment::distance::{self, FID_MIN_IMAGES, Mmd};
use crate::data::decode;
use crate::data::image::{Fit, MaskMode, mask_pixels, sam_pixels};
use crate::event::{Event, Observer};
use crate::metrics::text_table::aligned;
use crate::models::image_encoder;
use crate::models::inception::{self, Inception};
use crate::segment::LoadedModel;
use crate::tensor::store::{Role, Store, StoreOptions};
use crate::tensor::weights::Archive;
use crate::tensor::{Device, Kind, Tensor, guard, no_grad};
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Minimum number of images of a set.
pub const MIN_IMAGES: i64 = 4;

/// The network that computed the features.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeatureSource {
    /// InceptionV3: FID and KID.
    Inception,
    /// Another encoder by its name: `KID[name]` and `MMD[name]`.
    Encoder(String),
}

/// A distance between two sets of images of one modality.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Distance {
    /// Modality.
    pub modality: String,
    /// Number of real training images.
    pub n_real: i64,
    /// Number of generated images.
    pub n_other: i64,
    /// `FID`, `KID`, `MMD[tinysam]`, ...
    pub metric: String,
    /// The distance (smaller is closer); `None` with too few images.
    pub value: Option<f64>,
    /// Lower end of the 95 % interval; `None` for FID.
    pub low: Option<f64>,
    /// Upper end of the 95 % interval.
    pub high: Option<f64>,
    /// A caveat about the value.
    pub warning: Option<String>,
}

/// Distances of the modalities. [`Display`](fmt::Display) prints the table.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct QualityReport {
    /// In the order of [`QualityReport::add`].
    pub rows: Vec<Distance>,
}

impl QualityReport {
    /// Compares features `[n, d]` of real training images and of generated images of one modality.
    ///
    /// # Errors
    /// [`Error::Shape`] for features of different widths or values that are not finite.
    pub fn add(
        &mut self,
        source: &FeatureSource,
        modality: &str,
        [real, other]: [&Tensor; 2],
        seed: u64,
    ) -> Result<()> {
        let [n_real, n_other] = [real, other].map(|features| features.size()[0]);
        let fewest = n_real.min(n_other);
        let row = |metric: String, [value, low, high]: [Option<f64>; 3], least: i64| {
            let biased = if least == FID_MIN_IMAGES { "biased upwards: " } else { "" };
            let warning = (fewest < least).then(|| format!("{biased}fewer than {least} images"));
            Distance { modality: modality.to_owned(), n_real, n_other, metric, value, low, high, warning }
        };
        if fewest < MIN_IMAGES {
            self.rows.extend(source.metrics().map(|metric| row(metric, [None; 3], MIN_IMAGES)));
            return Ok(());
        }
        let interval = |found: Mmd| [found.value, found.low, found.high].map(Some);
        let kid = interval(distance::kid(real, other, seed)?);
        let [first, second] = source.metrics();
        self.rows.extend(if *source == FeatureSource::Inception {
            let fid = [Some(distance::fid(real, other)?), None, None];
            [row(first, fid, FID_MIN_IMAGES), row(second, kid, MIN_IMAGES)]
        } else {
            let mmd = interval(distance::mmd_rbf(real, other, seed)?);
            [row(first, kid, MIN_IMAGES), row(second, mmd, MIN_IMAGES)]
        });
        Ok(())
    }
}

impl FeatureSource {
    fn metrics(&self) -> [String; 2] {
        match self {
            Self::Inception => ["FID".into(), "KID".into()],
            Self::Encoder(name) => [format!("KID[{name}]"), format!("MMD[{name}]")],
        }
    }
}

impl fmt::Display for QualityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["modality", "metric", "real", "made", "value", "95 % interval"];
        // enough digits to distinguish small distances
        let number = |value: f64| if value.abs() < 10.0 { format!("{value:.5}") } else { format!("{value:.2}") };
        let cells: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| {
                let interval = row.low.zip(row.high).map(|(low, high)| format!("{} .. {}", number(low), number(high)));
                let value = row.value.map_or_else(|| "-".into(), number);
                vec![
                    row.modality.clone(),
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

/// Images whose features are computed.
#[derive(Clone, Copy)]
pub struct FeatureImages<'a> {
    /// Image files.
    pub files: &'a [PathBuf],
    /// The area of image `i` that counts (nonzero pixels, any size); `None` for whole images. Only
    /// [`encoder_features`] uses it.
    pub area: Option<&'a dyn Fn(usize) -> Result<GrayImage>>,
    /// Images per forward pass.
    pub batch: usize,
    /// Receives progress.
    pub observer: &'a dyn Observer,
    /// Stops the work when set.
    pub interrupt: &'a AtomicBool,
}

impl FeatureImages<'_> {
    /// Calls `work` for each batch, with image numbers and decoded images, and concatenates the results; fp32 on the
    /// CPU.
    fn batches(&self, work: impl Fn(&[usize], &[DynamicImage]) -> Result<Tensor>) -> Result<Tensor> {
        if self.files.is_empty() {
            return Err(Error::config("images", "there are no images", "give at least one image"));
        }
        let total = self.files.len() as u64;
        self.observer.on(&Event::Started { phase: "features".into(), total, unit: "images" });
        let numbers: Vec<usize> = (0..self.files.len()).collect();
        let mut parts = Vec::new();
        let mut done = 0;
        for batch in numbers.chunks(self.batch.max(1)) {
            check_interrupt(self.interrupt)?;
            let images: Vec<DynamicImage> =
                batch.iter().map(|&i| decode::image(&self.files[i])).collect::<Result<_>>()?;
            let features = no_grad(|| guard::guard(|| work(batch, &images)))?;
            parts.push(features.to_device(Device::Cpu).to_kind(Kind::Float));
            done += batch.len() as u64;
            self.observer.on(&Event::Advanced { done });
        }
        self.observer.on(&Event::Finished);
        guard::guard(|| Ok(Tensor::cat(&parts, 0)))
    }
}

/// Features of the segmenter's image encoder: the mean of its embedding over the image, or over the given area of
/// each image. Returns `[n, c]` (256 for TinySAM), fp32 on the CPU.
///
/// # Errors
/// [`Error::Data`] for an image that cannot be read or an area without a pixel; [`Error::Interrupted`]; typed errors of
/// libtorch.
pub fn encoder_features(loaded: &LoadedModel, images: &FeatureImages) -> Result<Tensor> {
    let size = loaded.description.pixels.sam_size;
    let side = i64::from(size);
    images.batches(|numbers, decoded| {
        let count = i64::try_from(numbers.len()).expect("a batch");
        let mut bytes = Vec::new();
        for image in decoded {
            bytes.extend(sam_pixels(image, size, loaded.description.pixels.fit)?);
        }
        let pixels = Tensor::from_slice(&bytes).view([count, 3, side, side]);
        let embedding =
            loaded.model.embed_image(&pixels, image_encoder::EncoderPass::default()).map.to_kind(Kind::Float);
        let Some(area) = images.area else {
            return Ok(embedding.mean_dim([2, 3].as_slice(), false, Kind::Float));
        };
        let mut shares = Vec::new();
        for &number in numbers {
            let mut mask = area(number)?;
            mask.iter_mut().for_each(|value| *value = if *value > 0 { 255 } else { 0 });
            if mask.iter().all(|&value| value == 0) {
                let hint = "leave this image out, or compare whole images";
                return Err(Error::data(&images.files[number], "the area to compare is empty", hint));
            }
            shares.push(cell_shares(&mask, size, loaded.description.sizes.encoder.stride())?);
        }
        let shares = Tensor::cat(&shares, 0).to_device(embedding.device());
        let sum = |xs: Tensor| xs.sum_dim_intlist([2, 3].as_slice(), false, Kind::Float);
        Ok(sum(embedding * &shares) / sum(shares))
    })
}

/// Fraction of each cell of the encoder's output that a mask covers, `[1, 1, s / stride, s / stride]`; at least one is
/// above 0.
fn cell_shares(mask: &GrayImage, size: u32, stride: i64) -> Result<Tensor> {
    let side = i64::from(size);
    // binary mode keeps masks of a few pixels
    let target = mask_pixels(mask, size, MaskMode::Binary, Fit::Stretch)?;
    let target = Tensor::from_slice(&target).to_kind(Kind::Float).view([1, 1, side, side]) / 255.0;
    Ok(target.avg_pool2d([stride; 2], [stride; 2], [0, 0], false, true, None))
}

/// Inception features, `[n, 2048]`, fp32 on the CPU.
///
/// # Errors
/// As [`encoder_features`].
pub fn inception_features(inception: &Inception, images: &FeatureImages) -> Result<Tensor> {
    images.batches(|_numbers, decoded| {
        let images: Vec<Tensor> = decoded.iter().map(|image| inception::resized(&unit_pixels(image))).collect();
        Ok(inception.features(&Tensor::cat(&images, 0)))
    })
}

/// `[1, 3, h, w]` in 0..=1.
fn unit_pixels(image: &DynamicImage) -> Tensor {
    let rgb = image.to_rgb8();
    let sides = [1, i64::from(rgb.height()), i64::from(rgb.width()), 3];
    Tensor::from_slice(rgb.as_raw()).view(sides).permute([0, 3, 1, 2]).contiguous().to_kind(Kind::Float) / 255.0
}

/// Loads Inception with pytorch-fid's weights. `path` is the file, a safetensors file with the same keys, or a
/// folder with [`inception::WEIGHTS_FILE`].
///
/// # Errors
/// [`Error::Weights`] for a missing or unsuitable file.
pub fn open_inception(path: &Path, device: Device) -> Result<Inception> {
    let inside = path.join(inception::WEIGHTS_FILE);
    let file = if inside.is_file() { inside } else { path.to_owned() };
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
