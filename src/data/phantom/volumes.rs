//! Phantom volumes: CT-like volumes with lesions and their label maps, for `prsmed data prepare`.
//!
//! The files are `scans/P0001.nii.gz` (Hounsfield units of a soft-tissue window from -160 to 240) and
//! `labels/P0001.nii.gz` (1 is a lesion). The pixel size and the distance of the slices differ from volume to volume.
//! The anatomy changes smoothly from slice to slice; each slice has noise of its own. A voxel belongs to a lesion if
//! its centre does: slices are not averaged over their thickness.
//!
//! A volume depends only on the seed and its index. `phantom.json` is written last: it marks a complete folder and
//! contains the options.

use std::path::Path;

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::canvas::{Between, Canvas, mix, unit};
use super::ellipsoid::{Ellipsoid, LesionSpace};
use super::{
    BLOCK, complete, existing_report, generator, grey, is_frac, make_all, part_of_block, require, shuffled_block,
};
use crate::volume::{Affine, Grid, write};
use prsmed_base::event::Observer;
use prsmed_base::{Error, Result};

/// Black and white of the scans in Hounsfield units: the soft-tissue window.
const WINDOW_HU: (f32, f32) = (-160.0, 240.0);

/// Options of [`generate_volumes`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhantomVolumeOptions {
    /// Number of volumes, at least 1.
    pub volumes: usize,
    /// Random seed.
    pub seed: u64,
    /// Side of the square slices in pixels, 32..=512.
    pub image_size_px: u32,
    /// Fraction of the volumes with lesions that have two, 0..=1.
    pub two_lesion_frac: f64,
    /// Fraction of the volumes without a lesion, 0..=1.
    pub absent_frac: f64,
}

impl Default for PhantomVolumeOptions {
    fn default() -> Self {
        Self { volumes: 40, seed: 0, image_size_px: 128, two_lesion_frac: 0.25, absent_frac: 0.2 }
    }
}

/// Results of [`generate_volumes`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Number of volumes.
    pub volumes: usize,
    /// Number of volumes with two lesions.
    pub two_lesion_volumes: usize,
    /// Number of volumes without a lesion.
    pub volumes_without_lesion: usize,
    /// Number of slices of all volumes.
    pub slices: usize,
}

/// Generates `out/scans` and `out/labels`. `out` must be empty or not exist; volumes made with the same options are not
/// changed.
///
/// # Errors
/// [`Error::Config`] for options out of range, [`Error::Data`] when `out` contains something else, [`Error::Io`] when a
/// file cannot be written.
pub fn generate_volumes(out: &Path, options: &PhantomVolumeOptions, observer: &dyn Observer) -> Result<VolumeReport> {
    check(options)?;
    if let Some(report) = existing_report(out, options, observer)? {
        return Ok(report);
    }
    for folder in ["scans", "labels"].map(|name| out.join(name)) {
        std::fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
    }
    let slices = make_all(options.volumes, "volumes", observer, |index| {
        let phantom = PhantomVolume::new(index, options)?;
        let path = |folder: &str| out.join(folder).join(format!("P{:04}.nii.gz", index + 1));
        write::nifti_i16(&path("scans"), &phantom.values, &phantom.grid)?;
        write::nifti_labels(&path("labels"), &phantom.labels, &phantom.grid)?;
        Ok(phantom.grid.size[2])
    })?;
    let count = |lesions: usize| (0..options.volumes).filter(|&index| num_lesions(index, options) == lesions).count();
    let report = VolumeReport {
        volumes: options.volumes,
        two_lesion_volumes: count(2),
        volumes_without_lesion: count(0),
        slices: slices.iter().sum(),
    };
    complete(out, options, report, observer)
}

fn check(options: &PhantomVolumeOptions) -> Result<()> {
    let o = options;
    require(o.volumes > 0, "volumes", &o.volumes, "at least 1")?;
    require((32..=512).contains(&o.image_size_px), "image_size", &o.image_size_px, "32 to 512 pixels for volumes")?;
    require(is_frac(o.two_lesion_frac), "two_lesions", &o.two_lesion_frac, "0 to 1")?;
    require(is_frac(o.absent_frac), "negatives", &o.absent_frac, "0 to 1")
}

/// Number of lesions of volume `index`: 0, 1 or 2. Blocks of volumes have exact numbers of each, in shuffled order.
pub(super) fn num_lesions(index: usize, options: &PhantomVolumeOptions) -> usize {
    let block = index / BLOCK;
    let absent = part_of_block(block, options.absent_frac);
    let two = part_of_block(block, (1.0 - options.absent_frac) * options.two_lesion_frac).min(BLOCK - absent);
    match shuffled_block(generator(options.seed, (1 << 51) + block as u64))[index % BLOCK] {
        rank if rank < absent => 0,
        rank if rank < absent + two => 2,
        _ => 1,
    }
}

/// A volume and its label map.
pub(super) struct PhantomVolume {
    pub(super) grid: Grid,
    pub(super) values: Vec<i16>,
    pub(super) labels: Vec<u8>,
    pub(super) lesions: Vec<Ellipsoid>,
}

impl PhantomVolume {
    pub(super) fn new(index: usize, options: &PhantomVolumeOptions) -> Result<Self> {
        let stream = |kind: u64| generator(options.seed, (kind << 52) + ((index as u64) << 16));
        let mut rng = stream(1);
        let grid = draw_grid(options.image_size_px as usize, &mut rng);
        let [size, _, num_slices] = grid.size;
        let spacing = grid.spacing();
        #[expect(clippy::cast_possible_truncation, reason = "drawn in f32")]
        let step = (spacing[2] / (spacing[0] * size as f64)) as f32;
        let space = LesionSpace { inside: grey::IN_ABDOMEN, height: step * num_slices as f32, least_rz: 2.0 * step };
        let lesions = match num_lesions(index, options) {
            0 => Some(Vec::new()),
            count => space.place(count, &mut rng),
        };
        let lesions = lesions.ok_or_else(|| {
            Error::argument("seed", format!("no room for the lesions of volume {index}"), "use another seed")
        })?;
        let mut this = Self { grid, values: Vec::new(), labels: Vec::new(), lesions };
        let (first, second) = (stream(2), stream(3));
        for slice in 0..num_slices {
            let at = slice as f32 / (num_slices - 1) as f32;
            let mut between = Between { first: first.clone(), second: second.clone(), at };
            let (mut plane, texture) = grey::abdomen(size, &mut between);
            this.lay_lesions(&mut plane, &texture, (slice as f32 + 0.5) * step);
            let mut noise = generator(options.seed, (4 << 52) + ((index as u64) << 16) + slice as u64);
            grey::add_ct_noise(&mut plane, &mut noise);
            this.values.extend(plane.values.iter().map(|value| hounsfield(*value)));
        }
        Ok(this)
    }

    /// Draws the lesions into a slice, and adds its labels.
    fn lay_lesions(&mut self, plane: &mut Canvas, texture: &Canvas, z: f32) {
        let size = plane.size;
        let start = self.labels.len();
        self.labels.resize(start + size * size, 0);
        for lesion in &self.lesions {
            let at = (lesion.oval.x, lesion.oval.y);
            plane.paint_near(at, lesion.reach(grey::EDGE), |x, y, i, old| {
                let level = grey::ABDOMEN_LESION + grey::LESION_TEXTURE * texture.values[i];
                mix(old, level, lesion.cover(x, y, z, grey::EDGE))
            });
            for (pixel, label) in self.labels[start..].iter_mut().enumerate() {
                let (x, y) = (unit(pixel % size, size), unit(pixel / size, size));
                if lesion.cover(x, y, z, grey::EDGE) > 0.5 {
                    *label = 1;
                }
            }
        }
    }
}

/// Pixels of 0.6 to 1 mm, slices of 2.5 to 5 mm, 20 to 32 of them. The first voxel is at the right, anterior, inferior.
fn draw_grid(size: usize, rng: &mut impl Rng) -> Grid {
    let (pixel, slice) = (rng.random_range(60_u32..=100), rng.random_range(25_u32..=50));
    let (pixel, slice) = (f64::from(pixel) / 100.0, f64::from(slice) / 10.0);
    let num_slices = rng.random_range(20..=32);
    let half = pixel * (size as f64 - 1.0) / 2.0;
    let steps = [[-pixel, 0.0, 0.0], [0.0, -pixel, 0.0], [0.0, 0.0, slice]];
    Grid { size: [size, size, num_slices], affine: Affine::from_columns(steps, [half, half, 0.0]) }
}

#[expect(clippy::cast_possible_truncation, reason = "a few hundred")]
fn hounsfield(grey: f32) -> i16 {
    mix(WINDOW_HU.0, WINDOW_HU.1, grey).round() as i16
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
mod tests;
