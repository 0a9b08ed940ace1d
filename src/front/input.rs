//! How files become the images that a model reads: with the window and the axis of its training, where nothing else is
//! chosen.

use super::image_files::{ImageFiles, remedy};
use super::volume::VolumeSettings;
use crate::data::decode::{self, MaskRefusal, ONE_TARGET};
use crate::data::image::foreground;
use crate::data::labels::Labels;
use crate::data::prepared::Intensity;
use crate::data::volume::format::IMAGES;
use crate::data::volume::sequences;
use crate::data::volume::{
    self, Axis, Geometry, Levels, Modality, Neighbours, Sequence, SequenceFile, SlicePlane, Volume, Window, Windows,
};
use crate::event::{Event, Observer, Silent};
use crate::segment::setup::Description;
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// An image for a model.
#[derive(Debug, Clone)]
pub enum Image<'a> {
    /// Pixels, 8-bit grey or RGB.
    Pixels(&'a DynamicImage),
    /// A flat image, turned as its orientation says, or a DICOM or NIfTI file of one slice, with the window of
    /// the training images.
    File(PathBuf),
}

impl<'a> From<&'a DynamicImage> for Image<'a> {
    fn from(image: &'a DynamicImage) -> Self {
        Self::Pixels(image)
    }
}

impl Image<'_> {
    /// The pixels, as the run of this description reads them.
    ///
    /// # Errors
    /// As [`ImageReading::with_training`] and [`ImageReading::image`].
    pub fn pixels(&self, run: &Description) -> Result<Cow<'_, DynamicImage>> {
        match self {
            Self::Pixels(image) => Ok(Cow::Borrowed(*image)),
            Self::File(path) => {
                let is_volume = volume::is_volume(path)?;
                let reading = if is_volume {
                    ImageReading::default().with_training(run, &Silent)?
                } else {
                    ImageReading::default()
                };
                reading.image(path, &Silent).map(Cow::Owned)
            }
        }
    }
}

/// What a file is.
#[derive(Debug)]
pub enum ImageOrVolume {
    /// An image in a common format.
    Image(DynamicImage),
    /// A NIfTI or DICOM file.
    Volume(Box<Volume>),
}

/// How files become images. `None` is as in the training, else as the file suggests.
#[derive(Debug, Clone, Default)]
pub struct ImageReading {
    /// How values become grey.
    pub window: Option<Window>,
    /// How values of single sequences become grey, by their names.
    pub windows: BTreeMap<String, Window>,
    /// The sequences of the training images with their windows; see [`Self::with_training`].
    pub sequences: Vec<Sequence>,
    /// Direction of the slices.
    pub axis: Option<Axis>,
    /// The affine of a NIfTI file with two that differ.
    pub geometry: Option<Geometry>,
    /// Axis of the training images by class; see [`Self::with_training`].
    pub trained_axes: Vec<(String, Axis)>,
    /// Slices that the training images show beside their own.
    pub context: Neighbours,
}

impl ImageReading {
    /// The same; what is not chosen is as in the training images, if the run knows it.
    ///
    /// # Errors
    /// [`Error::Config`] if the classes of the run have different windows, so that the user must choose.
    pub fn with_training(mut self, run: &Description, observer: &dyn Observer) -> Result<Self> {
        let axes = run.intensity.iter().map(|(class, intensity)| (class.clone(), intensity.axis));
        self.trained_axes = axes.collect();
        self.context = run.context();
        let of = |(class, intensity): (&String, &Intensity)| format!("{} for `{class}`", intensity.windows());
        let all = || run.intensity.iter().map(of).collect::<Vec<_>>().join(", ");
        let chosen = Windows { all: self.window, by_name: self.windows.clone() };
        chosen.check(&run.sequences().iter().map(|sequence| sequence.name.as_str()).collect::<Vec<_>>())?;
        if !run.sequences().is_empty() {
            return self.with_sequences(run, &chosen, (&all(), observer));
        }
        let mut windows = run.intensity.values().map(|intensity| intensity.window);
        if let Some(chosen) = self.window {
            if windows.len() > 0 && !windows.any(|window| window.is_same(chosen)) {
                let text = format!("the window `{chosen}` is not that of the training images: {}", all());
                observer.on(&Event::Warning(text));
            }
            return Ok(self);
        }
        let Some(window) = windows.next() else { return Ok(self) };
        if windows.any(|other| !other.is_same(window)) {
            let reason = format!("the classes of the run have different windows: {}", all());
            let hint = format!(
                "choose the window of the class that the volume belongs to, for example the argument `window={window}`"
            );
            return Err(Error::argument("window", reason, hint));
        }
        observer.on(&Event::Note(format!("intensity window `{window}`, as in the training images")));
        self.window = Some(window);
        Ok(self)
    }

    /// As [`Self::with_training`], for images of several sequences. `all` are the windows of the run.
    fn with_sequences(
        mut self,
        run: &Description,
        chosen: &Windows,
        (all, observer): (&str, &dyn Observer),
    ) -> Result<Self> {
        let mut classes = run.intensity.values();
        let first = classes.next();
        let is_open = run.sequences().iter().any(|sequence| chosen.of(&sequence.name).is_none());
        if is_open && !classes.all(|other| first.is_some_and(|first| first.has_windows_of(other))) {
            let reason = format!("the classes of the run have different windows: {all}");
            let hint = "choose one for each sequence, for example the argument `window=p0.5-p99.5`";
            return Err(Error::argument("window", reason, hint));
        }
        let of = |own: &Sequence| Sequence { window: chosen.of(&own.name).unwrap_or(own.window), ..own.clone() };
        self.sequences = run.sequences().iter().map(of).collect();
        let is_other = |(own, trained): (&Sequence, &Sequence)| !own.window.is_same(trained.window);
        let windows = self.windows_text();
        observer.on(&if self.sequences.iter().zip(run.sequences()).any(is_other) {
            Event::Warning(format!("the windows {windows} are not those of the training images: {all}"))
        } else {
            Event::Note(format!("intensity windows {windows}, as in the training images"))
        });
        self.window = None;
        Ok(self)
    }

    /// The window that the user or the run has chosen.
    pub fn window(&self) -> Window {
        self.window.unwrap_or_default()
    }

    /// The window as text, or those of the sequences.
    pub fn windows_text(&self) -> String {
        if self.sequences.is_empty() {
            return self.window().to_string();
        }
        self.sequences.iter().map(Sequence::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Opens the files of an image. Notes say what was assumed, and which sequences are missing.
    ///
    /// # Errors
    /// As [`Self::open`]; [`Error::Config`] for one file where the training images have several sequences; as
    /// [`sequences::join`] and [`sequences::join_images`].
    pub fn open_files(&self, files: &ImageFiles, observer: &dyn Observer) -> Result<ImageOrVolume> {
        let files = match files {
            ImageFiles::One(path) if self.sequences.is_empty() => return self.open(path, observer),
            ImageFiles::One(path) => {
                let reason = format!("`{}` does not say which sequence it is", path.display());
                return Err(Error::argument("image", reason, remedy(&self.sequences)));
            }
            ImageFiles::Sequences(files) => files,
        };
        let missing: Vec<&str> =
            files.iter().filter(|file| file.path.is_none()).map(|file| file.name.as_str()).collect();
        if !missing.is_empty() {
            let are = if missing.len() == 1 { "is" } else { "are" };
            let text = format!("{} {are} missing: its colour is 0, and the mask may be worse", missing.join(" and "));
            observer.on(&Event::Warning(text));
        }
        let path = files.iter().find_map(|file: &SequenceFile| file.path.as_deref()).unwrap_or(Path::new(""));
        if !volume::is_volume(path)? {
            return Ok(ImageOrVolume::Image(sequences::image_file(files)?.pixels));
        }
        let volume = sequences::open(files, &self.sequences, None, self.geometry)?.volume;
        volume.notes.iter().for_each(|text| observer.on(&Event::Note(text.clone())));
        Ok(ImageOrVolume::Volume(Box::new(volume)))
    }

    /// Opens a file, or a folder or zip of one DICOM series. Notes say what was assumed.
    ///
    /// # Errors
    /// [`Error::Config`] for a file that does not exist; [`Error::Data`] for one that cannot be read; [`Error::Io`].
    pub fn open(&self, path: &Path, observer: &dyn Observer) -> Result<ImageOrVolume> {
        if !volume::is_volume(path)? {
            if !path.is_file() {
                let reason = format!("there is no file `{}`", path.display());
                let hint = format!("give a {IMAGES} file, a NIfTI or DICOM file, or a folder or zip of DICOM files");
                return Err(Error::argument("image", reason, hint));
            }
            return decode::image(path).map(ImageOrVolume::Image);
        }
        let volume = volume::open_chosen(path, None, self.geometry)?;
        let note = |text: &str| observer.on(&Event::Note(format!("{}: {text}", path.display())));
        volume.notes.iter().for_each(|text| note(text));
        if self.window() == Window::Auto && volume.modality == Modality::Unknown {
            note(
                "the file does not say its modality: grey is scaled from the 0.5th to the 99.5th percentile; for CT, name a \
                 window as in the argument `window=soft-tissue`",
            );
        }
        Ok(ImageOrVolume::Volume(Box::new(volume)))
    }

    /// The image in a file: the only slice of a volume.
    ///
    /// # Errors
    /// [`Error::Data`] for a file that cannot be read, has several slices or does not have the window; [`Error::Io`].
    pub fn image(&self, path: &Path, observer: &dyn Observer) -> Result<DynamicImage> {
        self.image_of(&ImageFiles::from(path), observer)
    }

    /// As [`Self::image`], for the files of an image.
    ///
    /// # Errors
    /// As [`Self::image`] and [`Self::open_files`].
    pub fn image_of(&self, files: &ImageFiles, observer: &dyn Observer) -> Result<DynamicImage> {
        let path = files.first();
        let image = match self.open_files(files, observer) {
            Ok(ImageOrVolume::Image(image)) => Ok(image),
            Ok(ImageOrVolume::Volume(volume)) => self.only_slice(&volume, path, observer).and_then(|image| {
                let hint = "segment it as a volume";
                image.ok_or_else(|| Error::data(path, "is a volume with several slices", hint))
            }),
            Err(error) => Err(error),
        };
        image.map_err(|error| match error {
            Error::Config { reason, hint, .. } | Error::Argument { reason, hint, .. } => {
                Error::data(path, reason, hint)
            }
            error => error,
        })
    }

    /// The mask in a file for the image in another one, 255 = foreground. Of a volume with one slice it may be a label map on
    /// the grid of that volume. Notes say what was assumed.
    ///
    /// # Errors
    /// [`Error::Data`] for a file that cannot be read, several labels of which none is chosen, and another grid; [`Error::Io`].
    pub fn mask(&self, path: &Path, image: &Path, labels: Labels, observer: &dyn Observer) -> Result<GrayImage> {
        if path.is_dir() {
            return Err(Error::data(path, "it is a folder, and a mask is one file", "give the file of the mask"));
        }
        if !volume::is_volume(path)? {
            let target = decode::stored_mask(path)?.target(labels);
            let refused = |refusal: MaskRefusal| Error::data(path, refusal.to_string(), ONE_TARGET);
            return Ok(foreground(&target.map_err(refused)?));
        }
        if !volume::is_volume(image)? {
            let reason = format!("it is a label map, and the image `{}` has no grid in space", image.display());
            return Err(Error::data(path, reason, "save the mask as PNG, with the width and height of the image"));
        }
        let grid = volume::open_chosen(image, None, self.geometry)?.grid;
        let map = volume::labels::open_with(path, self.geometry)?;
        map.notes.iter().for_each(|text| observer.on(&Event::Note(format!("{}: {text}", path.display()))));
        let found: Vec<String> = map.labels().into_keys().map(|label| label.to_string()).collect();
        if found.len() > 1 && labels.is_empty() {
            let reason = format!("the mask has the labels {}", found.join(", "));
            return Err(Error::data(path, reason, "save a mask with one label"));
        }
        let map = map.on_grid(path, &grid, false).map_err(|error| match error {
            // a mask is not resampled here
            Error::Data { path, reason, .. } => Error::data(path, reason, "save the mask on the grid of the image"),
            error => error,
        })?;
        let voxels: Vec<u8> = (0..map.values.len()).map(|voxel| u8::from(map.has(voxel, labels))).collect();
        SlicePlane::new(&grid, Axis::suggested(&grid)).mask(&voxels, 0)
    }

    /// The only slice of a volume; `None` of several.
    ///
    /// # Errors
    /// As [`Self::levels`].
    pub fn only_slice(&self, volume: &Volume, path: &Path, observer: &dyn Observer) -> Result<Option<DynamicImage>> {
        let plane = volume.plane(Axis::suggested(&volume.grid));
        if plane.num_slices != 1 {
            return Ok(None);
        }
        if !self.context.is_none() {
            let text = "the training images show neighbouring slices in red and blue; this image has none: all three colours \
                        show its slice";
            observer.on(&Event::Warning(format!("{}: {text}", path.display())));
        }
        volume.image(&plane, 0, &self.levels(volume, path, observer)?, self.context).map(Some)
    }

    /// The grey levels of the window. A note says if they do not fit the values.
    ///
    /// # Errors
    /// [`Error::Config`] for a window that the volume does not have.
    pub fn levels(&self, volume: &Volume, path: &Path, observer: &dyn Observer) -> Result<Levels> {
        let levels = self.window().levels(volume)?;
        if let Some(note) = self.window().mismatch(volume, &levels) {
            observer.on(&Event::Note(format!("{}: {note}", path.display())));
        }
        Ok(levels)
    }

    /// Settings for all slices of a volume along the axis of the training.
    ///
    /// # Errors
    /// [`Error::Config`] if the classes of the run have different axes, so that the user must choose.
    pub fn settings(&self, volume: &Volume, question: &str) -> Result<VolumeSettings> {
        self.check_axis(volume)?;
        let trained = self.trained_axes.first().map(|(_, axis)| *axis);
        let axis = self.axis.unwrap_or_else(|| axis_of(volume, trained));
        Ok(VolumeSettings { axis, window: self.window(), ..VolumeSettings::new(question) })
    }

    fn check_axis(&self, volume: &Volume) -> Result<()> {
        let is_single = volume.plane(Axis::suggested(&volume.grid)).num_slices == 1;
        let [(_, first), others @ ..] = self.trained_axes.as_slice() else { return Ok(()) };
        if self.axis.is_some() || is_single || others.iter().all(|(_, axis)| axis == first) {
            return Ok(());
        }
        let all: Vec<String> =
            self.trained_axes.iter().map(|(class, axis)| format!("`{axis}` for `{class}`")).collect();
        let reason = format!("the classes of the run have slices of different directions: {}", all.join(", "));
        Err(Error::argument("axis", reason, "choose the direction of the class that the volume belongs to"))
    }
}

/// The axis of the training images, if there is one, else that which the volume suggests. A single slice has one axis only.
pub fn axis_of(volume: &Volume, trained: Option<Axis>) -> Axis {
    let suggested = Axis::suggested(&volume.grid);
    trained.filter(|_| volume.plane(suggested).num_slices > 1).unwrap_or(suggested)
}

#[cfg(test)]
#[path = "input_tests.rs"]
mod tests;
