//! `prsmed predict` on volumes and DICOM images: opens them, and segments a volume slice by slice.

use super::args::GeometryArgs;
use super::context::{Context, check_parent};
use super::report::Outcome;
use crate::data::decode;
use crate::data::prepared::Intensity;
use crate::data::volume::{self, Axis, Cleanup, Levels, Modality, Segment, Volume, Window, write};
use crate::event::Event;
use crate::segment::LoadedModel;
use crate::segment::predict_volume::{SliceRange, VolumeSettings, predict_volume, slice_image};
use crate::segment::setup::Description;
use crate::{Error, Result, files};
use image::DynamicImage;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Flags for volumes.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Volumes (NIfTI, DICOM)")]
pub(super) struct VolumeArgs {
    /// Write the mask of a volume on its grid: NIfTI (`.nii.gz`, `.nii`) or DICOM SEG (`.dcm`, for a DICOM series). With
    /// `--images` the folder of the results
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
    #[arg(long, value_name = "W", allow_hyphen_values = true)]
    window: Option<Window>,
    /// Axis of the training images by class.
    #[arg(skip)]
    trained_axes: Vec<(String, Axis)>,
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

fn positive(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "use a whole number from 1".into())
}

fn volume_ml(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "use a number of millilitres from 0".into())
}

/// What `--image` names.
pub(super) enum Input {
    /// An image, or a DICOM file with one slice.
    Image(DynamicImage),
    Volume(Box<Volume>),
}

/// The other flags of a prediction.
pub(super) struct Common<'a> {
    pub(super) image: &'a Path,
    pub(super) run: &'a Path,
    pub(super) question: &'a str,
    pub(super) always_paint: bool,
    /// File of the probabilities.
    pub(super) probabilities: Option<&'a Path>,
}

impl VolumeArgs {
    /// These flags; what the user does not choose is as in the training images, if the run knows it.
    ///
    /// # Errors
    /// [`Error::Config`] if the classes of the run have different windows, so that the user must choose.
    pub(super) fn with_training(&self, description: &Description, context: &Context) -> Result<Self> {
        let mut flags = self.clone();
        let axes = description.intensity.iter().map(|(class, intensity)| (class.clone(), intensity.axis));
        flags.trained_axes = axes.collect();
        let of = |(class, intensity): (&String, &Intensity)| format!("`{}` for `{class}`", intensity.window);
        let all = || description.intensity.iter().map(of).collect::<Vec<_>>().join(", ");
        let mut windows = description.intensity.values().map(|intensity| intensity.window);
        if let Some(chosen) = self.window {
            if windows.len() > 0 && !windows.any(|window| window.is_same(chosen)) {
                let text = format!("the window `{chosen}` is not that of the training images: {}", all());
                context.progress.on(&Event::Warning(text));
            }
            return Ok(flags);
        }
        let Some(window) = windows.next() else { return Ok(flags) };
        if windows.any(|other| !other.is_same(window)) {
            let reason = format!("the classes of the run have different windows: {}", all());
            let hint =
                format!("choose the window of the class that the volume belongs to, for example `--window {window}`");
            return Err(Error::config("--window", reason, hint));
        }
        context.progress.on(&Event::Note(format!("intensity window `{window}`, as in the training images")));
        flags.window = Some(window);
        Ok(flags)
    }

    /// The window that the user or the run has chosen.
    pub(super) fn window(&self) -> Window {
        self.window.unwrap_or_default()
    }

    /// Opens an image or a volume, and checks the flags and output files that belong to it.
    pub(super) fn open(&self, path: &Path, context: &Context) -> Result<Input> {
        if !volume::is_volume(path)? {
            if !path.is_file() {
                let reason = format!("there is no file `{}`", path.display());
                let hint = "give a PNG, JPEG or TIFF file, a NIfTI or DICOM file, or a folder or zip of DICOM files";
                return Err(Error::config("--image", reason, hint));
            }
            // what is no image either is not called one
            let image = decode::image(path)?;
            self.check_image()?;
            self.check_flat("`--image` is neither")?;
            return Ok(Input::Image(image));
        }
        let volume = volume::open_with(path, self.geometry.geometry)?;
        for note in &volume.notes {
            context.progress.on(&Event::Note(format!("{}: {note}", path.display())));
        }
        if self.window() == Window::Auto && volume.modality == Modality::Unknown {
            let note = "the file does not say its modality: grey is scaled from the 0.5th to the 99.5th percentile; for CT, \
                        name a window as in `--window soft-tissue`";
            context.progress.on(&Event::Note(format!("{}: {note}", path.display())));
        }
        let [x, y, z] = volume.grid.size;
        let Some(out) = &self.out else {
            let plane = volume.plane(Axis::suggested(&volume.grid));
            if plane.num_slices == 1 {
                self.check_image()?;
                let levels = self.levels(&volume, path, context)?;
                return slice_image(&volume, &plane, 0, &levels).map(Input::Image);
            }
            let reason = format!("`{}` is a volume of {x}x{y}x{z} voxels, and its mask needs a file", path.display());
            return Err(Error::config("--out", reason, "add `--out mask.nii.gz`, or `--out mask.dcm` for DICOM SEG"));
        };
        check_parent("--out", out)?;
        self.record_out.iter().try_for_each(|path| check_parent("--record-out", path))?;
        write::check(out, &volume)?;
        self.check_axis(&volume)?;
        // wrong slices and windows are found before the model is loaded
        let settings = self.settings(&volume, "", false);
        settings.chosen(&volume.plane(settings.axis))?;
        self.levels(&volume, path, context)?;
        Ok(Input::Volume(Box::new(volume)))
    }

    /// Refuses a volume whose axis the user must choose.
    fn check_axis(&self, volume: &Volume) -> Result<()> {
        let is_single = volume.plane(Axis::suggested(&volume.grid)).num_slices == 1;
        let [(_, first), others @ ..] = self.trained_axes.as_slice() else { return Ok(()) };
        if self.axis.is_some() || is_single || others.iter().all(|(_, axis)| axis == first) {
            return Ok(());
        }
        let all: Vec<String> =
            self.trained_axes.iter().map(|(class, axis)| format!("`{axis}` for `{class}`")).collect();
        let reason = format!("the classes of the run have slices of different directions: {}", all.join(", "));
        Err(Error::config("--axis", reason, "choose the direction of the class that the volume belongs to"))
    }

    /// The grey levels of the window, which may not fit the values.
    fn levels(&self, volume: &Volume, path: &Path, context: &Context) -> Result<Levels> {
        let levels = self.window().levels(volume)?;
        if let Some(note) = self.window().mismatch(volume, &levels) {
            context.progress.on(&Event::Note(format!("{}: {note}", path.display())));
        }
        Ok(levels)
    }

    /// Refuses flags that an image without a grid and without physical values has no use for.
    fn check_flat(&self, what: &str) -> Result<()> {
        let given = [("--window", self.window.is_some()), ("--geometry", self.geometry.geometry.is_some())];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                Err(Error::config(*flag, format!("it is for NIfTI and DICOM files, and {what}"), "remove it"))
            }
            None => Ok(()),
        }
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

    fn settings(&self, volume: &Volume, question: &str, always_paint: bool) -> VolumeSettings {
        let suggested = Axis::suggested(&volume.grid);
        // a single slice has one axis only
        let trained =
            self.trained_axes.first().map(|(_, axis)| *axis).filter(|_| volume.plane(suggested).num_slices > 1);
        VolumeSettings {
            question: question.to_owned(),
            axis: self.axis.or(trained).unwrap_or(suggested),
            slices: self.slices,
            every: self.every,
            window: self.window(),
            cleanup: Cleanup {
                fill_gaps: self.fill_gaps,
                min_volume_ml: self.min_volume_ml,
                largest_component: self.largest_component,
            },
            always_paint,
        }
    }

    /// Segments a volume and writes its mask and record.
    pub(super) fn run(
        &self,
        volume: &Volume,
        loaded: &LoadedModel,
        context: &Context,
        common: &Common,
    ) -> anyhow::Result<Outcome> {
        let mut settings = self.settings(volume, common.question, common.always_paint);
        let start = Instant::now();
        let mut probabilities = common.probabilities.map(|_| Vec::new());
        let found =
            predict_volume(loaded, volume, &settings, &*context.progress, &context.interrupt, probabilities.as_mut())
                .map_err(|error| error.of_image(common.image))?;
        if let Some((path, values)) = common.probabilities.zip(probabilities) {
            write::nifti_f32(path, &values, volume)?;
        }
        if let Some(out) = &self.out {
            write::segments(out, &[Segment { name: common.question, mask: &found.mask }], volume)?;
        }
        // the record says which window `auto` was
        settings.window = settings.window.chosen_for(volume);
        // without their folders, which may name a patient
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let files =
            [("image", name(common.image)), ("run", name(common.run)), ("mask", self.out.as_deref().and_then(name))];
        let mut record = found.record(volume, &settings, files);
        record["probabilities"] = json!(common.probabilities.and_then(name));
        record["seconds"] = json!(start.elapsed().as_secs_f64());
        let familiarity = found.familiarity(loaded, common.question);
        familiarity.add_to(&mut record);
        if let Some(path) = &self.record_out {
            let text =
                serde_json::to_string_pretty(&record).map_err(|error| Error::Internal { reason: error.to_string() })?;
            files::write_output(path, (text + "\n").as_bytes()).map_err(Error::io(path, "write"))?;
        }
        context.output.line(found.summary())?;
        familiarity.warnings().try_for_each(|warning| context.output.line(format!("attention: {warning}")))?;
        context.output.record(&record)?;
        Ok(Outcome::Done)
    }
}
