//! Masks of annotation programs that are no images: outlines and run lengths in files of COCO (JSON), LabelMe (JSON) and
//! YOLO segmentation (text).
//!
//! ```text
//! AnnotationFile::open -> images with objects -> AnnotationFile::mask: the objects of a label as one mask of 0 and 255
//! ```
//!
//! A path names the objects: `001.json` all of a file, `001.json#polyp` those of a label, and of a file of many images
//! `instances.json#001.png` and `instances.json#001.png#polyp`. `#!polyp` instead says that there are none, which is checked.
//!
//! Outlines are filled as `pycocotools` fills them, for all programs. Coordinates are those of the image as it is shown, with its
//! EXIF orientation applied, as LabelMe and Ultralytics read images. A size in the file must be that of the image.

mod coco;
mod labelme;
mod polygon;
mod rle;
mod shape;
#[cfg(test)]
mod tests;
mod yolo;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::de::DeserializeOwned;

pub use self::shape::DrawnMask;
use self::shape::{CROWD, Shape};
use crate::annotation_file::{COCO, LABELME, YOLO, kind_of};
use crate::decode;
use crate::volume::path::split_selection;
use prsmed_base::error::first_quoted;
use prsmed_base::{Error, Result, files};

/// A label is absent: before its name in a path.
const ABSENT: char = '!';
/// Between the parts of a path that select objects.
const SELECTS: char = '#';

/// An object of an image.
#[derive(Debug, Clone)]
struct Object {
    label: Arc<str>,
    /// Where it is in the file: `annotation 17`, `shape 3`, `line 4`.
    name: Box<str>,
    shape: Shape,
    /// A crowd of objects.
    is_crowd: bool,
}

/// An image with its objects.
#[derive(Debug, Clone)]
pub struct AnnotatedImage {
    /// Its file by the name that the annotation file gives, with or without folders, `/` or `\` between them; empty if the
    /// file gives none.
    pub name: String,
    /// Width and height, if the file gives them.
    pub size: Option<(u32, u32)>,
    objects: Vec<Object>,
}

impl AnnotatedImage {
    /// The labels of its objects.
    pub fn labels(&self) -> BTreeSet<&str> {
        self.objects.iter().map(|object| object.label.as_ref()).collect()
    }

    /// The objects of a label, or all of them, as one mask of this width and height.
    ///
    /// # Errors
    /// A reason, for a shape that cannot be drawn, and for objects without any pixel.
    fn mask(&self, label: Option<&str>, size: (u32, u32), path: &Path) -> Result<DrawnMask, String> {
        let mut drawn = DrawnMask::empty(size);
        let objects = self.objects.iter().filter(|object| label.is_none_or(|label| *object.label == *label));
        let (without_area, objects): (Vec<&Object>, Vec<&Object>) =
            objects.partition(|object| matches!(object.shape, Shape::WithoutArea(_)));
        // points and lines beside areas are remarks
        for object in if objects.is_empty() { without_area } else { objects.clone() } {
            let at = |reason: String| format!("{} (`{}`) {reason}", object.name, object.label);
            drawn.draw(&object.shape, path).map_err(at)?;
            if object.is_crowd {
                drawn.notes.insert(CROWD);
            }
        }
        if !objects.is_empty() && drawn.mask.iter().all(|value| *value == 0) {
            return Err("has objects without any pixel: all are smaller than one".to_owned());
        }
        Ok(drawn)
    }
}

/// An annotation file.
#[derive(Debug)]
pub struct AnnotationFile {
    path: PathBuf,
    images: Vec<AnnotatedImage>,
    /// Numbers of the images by their names, for a file of many images.
    by_name: Option<BTreeMap<String, usize>>,
}

/// Whether a file is one that [`AnnotationFile::open`] reads, by its content.
pub fn is_annotation(path: &Path) -> bool {
    let is_text = path
        .extension()
        .and_then(OsStr::to_str)
        .is_some_and(|ending| ["json", "txt"].iter().any(|known| known.eq_ignore_ascii_case(ending)));
    is_text && !is_names_of_classes(path) && kind_of(path).is_some_and(|kind| [COCO, LABELME, YOLO].contains(&kind))
}

/// Whether a file is one with annotations of many images, by its content.
pub(super) fn is_of_many(path: &Path) -> bool {
    kind_of(path) == Some(COCO)
}

/// Whether a file has names of classes for YOLO files, by its name.
pub fn is_names_of_classes(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| yolo::NAMES.contains(&name))
}

impl AnnotationFile {
    /// Reads an annotation file. What kind it is, its content says; a text file is a YOLO file.
    ///
    /// # Errors
    /// [`Error::Data`] for a file that is damaged, contradicts itself, or has no areas; [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let (images, is_of_many) = match kind_of(path) {
            Some(COCO) => (json::<coco::Coco>(path)?.images(path)?, true),
            Some(LABELME) => (vec![json::<labelme::LabelMe>(path)?.image(path)?], false),
            _ if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("txt")) => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
                (vec![yolo::image(path, &yolo::ClassNames::of_folder(folder)?)?], false)
            }
            kind => {
                let reason =
                    kind.map_or("is no annotation file".to_owned(), |kind| format!("is {kind}, which is not read"));
                return Err(Error::data(path, reason, "files of COCO, LabelMe and YOLO segmentation are read"));
            }
        };
        let mut by_name = BTreeMap::new();
        for (number, image) in images.iter().enumerate().filter(|_| is_of_many) {
            if by_name.insert(image.name.clone(), number).is_some() {
                let reason = format!("has two images with the file name `{}`", image.name);
                return Err(Error::data(path, reason, "keep one of them, with the annotations of both"));
            }
        }
        Ok(Self { path: path.to_owned(), images, by_name: is_of_many.then_some(by_name) })
    }

    /// The images, in the order of the file.
    pub fn images(&self) -> &[AnnotatedImage] {
        &self.images
    }

    /// Whether the file is of many images, which a path must choose from.
    pub fn is_of_many(&self) -> bool {
        self.by_name.is_some()
    }

    /// The file without its outlines: names, sizes and labels of its images.
    pub(super) fn without_outlines(mut self) -> Self {
        for image in &mut self.images {
            let mut labels = BTreeSet::new();
            image.objects.retain(|object| labels.insert(object.label.clone()));
            image.objects.iter_mut().for_each(|object| object.shape = Shape::Box);
        }
        self
    }

    /// The path of the objects of a label, or of all objects of an image.
    pub fn path_of(&self, image: &AnnotatedImage, label: Option<&str>) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        for part in self.by_name.as_ref().map(|_| image.name.as_str()).into_iter().chain(label) {
            path.push(SELECTS.to_string());
            path.push(part);
        }
        path.into()
    }

    /// As [`Self::path_of`], for a label that the image does not have: the mask is empty.
    pub fn path_of_absent(&self, image: &AnnotatedImage, label: &str) -> PathBuf {
        self.path_of(image, Some(&format!("{ABSENT}{label}")))
    }

    /// The image and the label that the text after the path selects.
    fn selected<'a>(&'a self, text: Option<&'a str>) -> Result<(&'a AnnotatedImage, Option<&'a str>)> {
        let Some(by_name) = &self.by_name else { return Ok((&self.images[0], text)) };
        let text = text.unwrap_or_default();
        // names of images and labels may have a `#` themselves
        let whole = std::iter::once((text, None));
        let mut parts = whole.chain(text.rmatch_indices(SELECTS).map(|(at, _)| (&text[..at], Some(&text[at + 1..]))));
        let found = parts.find_map(|(name, label)| Some((&self.images[*by_name.get(name)?], label)));
        found.ok_or_else(|| {
            let names: Vec<&str> = self.images.iter().map(|image| image.name.as_str()).collect();
            let reason = format!("has no image `{text}`, but {}", first_quoted(&names, 3));
            let path = self.path.display();
            Error::data(&self.path, reason, format!("write `{path}#IMAGE`, or `{path}#IMAGE#LABEL`"))
        })
    }

    /// The objects that a text selects (see [`self`]), drawn as one mask for an image of this width and height.
    ///
    /// # Errors
    /// [`Error::Data`] for a text that selects nothing, an image of another size, and shapes that cannot be drawn.
    pub fn mask(&self, selection: Option<&str>, size: (u32, u32)) -> Result<DrawnMask> {
        let (image, label) = self.selected(selection)?;
        let refuse = |reason: String, hint: &str| Err(Error::data(&self.path, reason, hint));
        if let Some(of) = image.size.filter(|of| *of != size) {
            let turned = decode::turned_by_90(of, size);
            let (a, b) = (of, size);
            let reason =
                format!("is for an image of {} x {} pixels, and the image has {} x {}{turned}", a.0, a.1, b.0, b.1);
            return refuse(reason, "give the image that was annotated, at its size, or export the annotations again");
        }
        let labels = image.labels();
        if let Some(absent) = label.and_then(|label| label.strip_prefix(ABSENT)).filter(|_| !has(&labels, label)) {
            if labels.contains(absent) {
                return refuse(format!("has objects with the label `{absent}`"), "remove the `!` before it");
            }
            return Ok(DrawnMask::empty(size));
        }
        if !has(&labels, label) {
            let names: Vec<&str> = labels.into_iter().collect();
            let known = if names.is_empty() { "none".to_owned() } else { first_quoted(&names, 8) };
            let reason = format!("has no object with the label `{}`; its labels: {known}", label.unwrap_or_default());
            return refuse(reason, "correct the label; a label with `!` before it says that there is none");
        }
        let drawn = image.mask(label, size, &self.path);
        drawn.or_else(|reason| refuse(reason, "correct it in the annotation program, or leave the image out"))
    }
}

fn has(labels: &BTreeSet<&str>, label: Option<&str>) -> bool {
    label.is_none_or(|label| labels.contains(label))
}

/// Reads a JSON file as a stream, with or without a byte order mark.
///
/// # Errors
/// [`Error::Data`], whose reason has line and column; [`Error::Io`].
fn json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let file = files::open(path).map_err(Error::io(path, "read"))?;
    let size = file.metadata().map_err(Error::io(path, "read"))?.len();
    if size > files::MAX_TABLE {
        let reason = format!("has {size} bytes; {} are the limit", files::MAX_TABLE);
        return Err(Error::data(path, reason, "divide it into files of fewer images"));
    }
    let mut reader = BufReader::new(file);
    let start = reader.fill_buf().map_err(Error::io(path, "read"))?;
    let mark = if start.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    reader.consume(mark);
    let hint = "export it again from the annotation program; JSON has no NaN and no comments";
    serde_json::from_reader(reader).map_err(|error| Error::data(path, error.to_string(), hint))
}

/// Annotation files that were opened. Those of many images stay open, so that each is read once.
#[derive(Default)]
pub struct AnnotationFiles(Mutex<BTreeMap<PathBuf, Arc<AnnotationFile>>>);

impl AnnotationFiles {
    /// The mask that a path names, for an image of this width and height; `None` for a path of another file.
    ///
    /// # Errors
    /// Those of [`AnnotationFile::open`] and [`AnnotationFile::mask`].
    pub fn mask(&self, path: &Path, size: (u32, u32)) -> Result<Option<DrawnMask>> {
        let (file, selection) = split_selection(path);
        let is_text = file.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("txt"));
        // a text file without any object is one too
        if !(is_annotation(&file) || is_text && file.is_file()) {
            return Ok(None);
        }
        self.open(&file)?.mask(selection.as_deref(), size).map(Some)
    }

    /// A file, which stays open if it is of many images.
    ///
    /// # Errors
    /// Those of [`AnnotationFile::open`].
    pub(super) fn open(&self, path: &Path) -> Result<Arc<AnnotationFile>> {
        if !is_of_many(path) {
            return AnnotationFile::open(path).map(Arc::new);
        }
        // locked, so that other threads wait instead of reading it too
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(path) {
            return Ok(file.clone());
        }
        let file = Arc::new(AnnotationFile::open(path)?);
        open.insert(path.to_owned(), file.clone());
        Ok(file)
    }
}
