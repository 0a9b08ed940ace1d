//! `prsmed predict` on volumes and DICOM images: opens them, and segments a volume slice by slice.

use super::args::GeometryArgs;
use super::context::{Context, check_parent};
use super::report::{CommandEnd, CommandResult};
use crate::data::volume::sequences::WindowChoice;
use crate::data::volume::{Axis, Cleanup, SegmentMask, Sequence, Volume, Windows, write};
use crate::front::image_files::ImageFiles;
use crate::front::volume::{SliceRange, VolumeSettings};
use crate::front::{ImageOrVolume, ImageReading, Model};
use crate::segment::setup::Description;
use crate::{Error, Result, files};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Flags for volumes.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Volumes (NIfTI, DICOM)")]
pub(super) struct VolumeArgs {
    /// Write the mask of a volume on its grid: NIfTI (`.nii.gz`, `.nii`), NRRD (`.nrrd`), MetaImage (`.mha`), or for a
    /// DICOM series DICOM SEG (`.dcm`) or the contours of an RTSTRUCT (`.rtstruct.dcm`). With `--images` the folder of
    /// the results
    #[arg(long, value_name = "FILE|DIR")]
    pub(super) out: Option<PathBuf>,
    /// Write what was done as JSON: settings, versions, names of files, results by slice, seconds
    #[arg(long, value_name = "FILE")]
    pub(super) record_out: Option<PathBuf>,
    /// Direction of the slices: axial, coronal or sagittal [default: as the training images, else that
    /// of the thickest slices, else axial]
    #[arg(long, value_name = "AXIS")]
    axis: Option<Axis>,
    /// Slices `A..B`, counted from 0 in display order (from inferior, posterior, left) without B [default: all]
    #[arg(long, value_name = "A..B", default_value_t, hide_default_value = true)]
    slices: SliceRange,
    /// Segment every N-th slice only; the others stay empty unless `--fill-gaps` fills them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive)]
    every: usize,
    /// How values become grey: `auto`, a CT window by name (soft-tissue, lung, brain, bone, abdomen, liver, mediastinum,
    /// stroke, subdural, angiography), WIDTH/LEVEL, LOW..HIGH, `file` (the file's window) or percentiles `p0.5-p99.5`.
    /// `auto`: DICOM CT soft-tissue, radiographs their own window, 8-bit images unchanged, others p0.5-p99.5. NIfTI files
    /// do not say their modality: name a window for CT [default: that of the training images, else auto]
    /// `NAME=W` is for one of several sequences; may be repeated
    #[arg(long = "window", value_name = "W", allow_hyphen_values = true)]
    windows: Vec<WindowChoice>,
    /// Keep the largest connected component of the mask only (26 neighbours)
    #[arg(long)]
    largest_component: bool,
    /// Remove components of the mask below this volume in millilitres
    #[arg(long, value_name = "ML", default_value_t = 0.0, value_parser = volume_ml)]
    min_volume_ml: f64,
    /// Fill up to N empty slices between slices with a mask, pixel by pixel
    #[arg(long, value_name = "N", default_value_t = 0)]
    fill_gaps: usize,
    #[command(flatten)]
    pub(super) geometry: GeometryArgs,
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "use a whole number from 1".into())
}

fn volume_ml(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "use a number of millilitres from 0".into())
}

/// The other flags of a prediction.
pub(super) struct Common<'a> {
    pub(super) image: &'a ImageFiles,
    /// The sequences of the image with their windows.
    pub(super) sequences: &'a [Sequence],
    pub(super) run: &'a Path,
    /// File of the probabilities.
    pub(super) probabilities: Option<&'a Path>,
}

impl VolumeArgs {
    /// How the flags say that files become images; volumes and DICOM images as in the training where the flags choose
    /// nothing.
    pub(super) fn reading(
        &self,
        has_volumes: bool,
        run: Option<&Description>,
        context: &Context,
    ) -> Result<ImageReading> {
        let (geometry, Windows { all: window, by_name: windows }) =
            (self.geometry.geometry, Windows::new(&self.windows)?);
        let chosen = ImageReading { window, windows, axis: self.axis, geometry, ..ImageReading::default() };
        match run.filter(|run| has_volumes || !run.sequences().is_empty()) {
            Some(run) => chosen.with_training(run, context.progress.as_ref()),
            None => Ok(chosen),
        }
    }

    /// Opens an image or a volume, and checks the flags and output files that belong to it. A volume of one slice is an
    /// image without `--out`. With how the files became it.
    pub(super) fn open(
        &self,
        files: &ImageFiles,
        run: Option<&Description>,
        context: &Context,
    ) -> Result<(ImageReading, ImageOrVolume)> {
        let reading = self.reading(files.are_volumes()?, run, context)?;
        let (path, observer) = (files.first(), context.progress.as_ref());
        let volume = match reading.open_files(files, observer)? {
            ImageOrVolume::Image(image) => {
                self.check_image()?;
                self.check_flat("`--image` is neither")?;
                return Ok((reading, ImageOrVolume::Image(image)));
            }
            ImageOrVolume::Volume(volume) => volume,
        };
        let Some(out) = &self.out else {
            let [x, y, z] = volume.grid.size;
            if volume.plane(Axis::suggested(&volume.grid)).num_slices == 1 {
                self.check_image()?;
            }
            let image = reading.only_slice(&volume, path, observer)?.ok_or_else(|| {
                let reason =
                    format!("`{}` is a volume of {x}x{y}x{z} voxels, and its mask needs a file", path.display());
                Error::config("--out", reason, "add `--out mask.nii.gz`, or `--out mask.dcm` for DICOM SEG")
            })?;
            return Ok((reading, ImageOrVolume::Image(image)));
        };
        check_parent("--out", out)?;
        self.record_out.iter().try_for_each(|path| check_parent("--record-out", path))?;
        write::check(out, &volume)?;
        // wrong slices and windows are found before the model is loaded
        let settings = self.settings(&volume, &reading, "")?;
        settings.chosen(&volume.plane(settings.axis))?;
        reading.levels(&volume, path, observer)?;
        Ok((reading, ImageOrVolume::Volume(volume)))
    }

    /// Refuses flags that an image without a grid and without physical values has no use for.
    fn check_flat(&self, what: &str) -> Result<()> {
        let given = [("--window", !self.windows.is_empty()), ("--geometry", self.geometry.geometry.is_some())];
        given.iter().find(|(_, is_given)| *is_given).map_or(Ok(()), |(flag, _)| {
            Err(Error::config(*flag, format!("it is for NIfTI and DICOM files, and {what}"), "remove it"))
        })
    }

    /// Refuses flags that an image has no use for.
    fn check_image(&self) -> Result<()> {
        let out = Some("--out").filter(|_| self.out.is_some());
        let hint = "remove it; the mask of an image is written with `--mask-out mask.png`";
        out.or(self.given_for_volumes())
            .map_or(Ok(()), |flag| Err(Error::config(flag, "it is for volumes, and `--image` is an image", hint)))
    }

    /// Refuses flags that `--images` has no use for: its images are no volumes.
    pub(super) fn check_images(&self, has_dicom: bool) -> Result<()> {
        if let Some(flag) = self.given_for_volumes() {
            let hint = "remove it, or segment one volume with `--image FILE --out mask.nii.gz`";
            return Err(Error::config(flag, "it is for a volume, and `--images` answers about images", hint));
        }
        if has_dicom { Ok(()) } else { self.check_flat("`--images` has none") }
    }

    /// The first flag given that is for volumes alone, besides `--out`.
    fn given_for_volumes(&self) -> Option<&'static str> {
        let given = [
            ("--record-out", self.record_out.is_some()),
            ("--axis", self.axis.is_some()),
            ("--slices", self.slices != SliceRange::default()),
            ("--every", self.every != 1),
            ("--largest-component", self.largest_component),
            ("--min-volume-ml", self.min_volume_ml != 0.0),
            ("--fill-gaps", self.fill_gaps != 0),
        ];
        given.into_iter().find_map(|(flag, is_given)| is_given.then_some(flag))
    }

    /// The settings of a prediction on a volume.
    pub(super) fn settings(&self, volume: &Volume, reading: &ImageReading, question: &str) -> Result<VolumeSettings> {
        let (fill_gaps, min_volume_ml, largest_component) =
            (self.fill_gaps, self.min_volume_ml, self.largest_component);
        let cleanup = Cleanup { fill_gaps, min_volume_ml, largest_component };
        let (slices, every) = (self.slices, self.every);
        Ok(VolumeSettings { slices, every, cleanup, ..reading.settings(volume, question)? })
    }

    /// Segments a volume and writes its mask and record.
    pub(super) fn run(
        &self,
        volume: &Volume,
        mut settings: VolumeSettings,
        model: &Model,
        context: &Context,
        common: &Common,
    ) -> CommandResult {
        let start = Instant::now();
        let mut probabilities = common.probabilities.map(|_| Vec::new());
        let found = model
            .segment(volume, &settings, &*context.progress, context.runtime.interrupt(), probabilities.as_mut())
            .map_err(|error| error.of_image(common.image.first()))?;
        if let Some((path, values)) = common.probabilities.zip(probabilities) {
            write::nifti_f32(path, &values, volume)?;
        }
        if let Some(out) = &self.out {
            write::segments(out, &[SegmentMask { name: &settings.question, mask: &found.mask }], volume)?;
        }
        // the record says which window `auto` was
        if common.sequences.is_empty() {
            settings.window = settings.window.chosen_for(volume);
        }
        // without their folders, which may name a patient
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let files =
            [("image", common.image.names()), ("run", name(common.run)), ("mask", self.out.as_deref().and_then(name))];
        let mut record = found.record(volume, &settings, files);
        record["probabilities"] = json!(common.probabilities.and_then(name));
        if !common.sequences.is_empty() {
            record["sequences"] = json!(common.sequences);
        }
        record["seconds"] = json!(start.elapsed().as_secs_f64());
        let familiarity = &found.familiarity;
        familiarity.add_to(&mut record);
        if let Some(path) = &self.record_out {
            let text =
                serde_json::to_string_pretty(&record).map_err(|error| Error::Internal { reason: error.to_string() })?;
            files::write_output(path, (text + "\n").as_bytes()).map_err(Error::io(path, "write"))?;
        }
        context.output.line(found.description.line())?;
        context.output.line(found.summary())?;
        familiarity.warnings().try_for_each(|warning| context.output.line(format!("attention: {warning}")))?;
        context.output.record(&record)?;
        Ok(CommandEnd::Done)
    }
}
