//! A folder of images with a COCO file, or with LabelMe or YOLO files, as annotation programs store them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::super::annotations::{AnnotatedImage, AnnotationFile, is_annotation, is_names_of_classes};
use super::super::item::{IS_A, NO_IMAGE, NO_MASK, NOT_AN_IMAGE, NOT_LISTED, Skipped};
use super::super::options::{PrepareOptions, word_problem};
use super::super::structures::suffix;
use super::super::table::{Pair, PairTable};
use super::by_name::refuse_slice_options;
use super::matching::{Known, Meant, Parts, parts};
use super::names::{without_number, without_suffix};
use super::volumes::files_in;
use crate::annotation::is_image;
use crate::annotation_file::{COCO, kind_of};
use crate::volume::format::stem_of;
use prsmed_base::error::first_quoted;
use prsmed_base::{Error, Result};

/// A file of outlines, or a folder of them that has no images of masks.
pub(super) fn knows(options: &PrepareOptions) -> bool {
    let ([images], [masks]) = (options.images.as_slice(), options.masks.as_slice()) else { return false };
    if !images.is_dir() || masks.is_file() {
        return images.is_dir() && is_annotation(masks);
    }
    let (Ok(entries), Ok(of_images)) = (files_in(masks, true), files_in(images, true)) else { return false };
    let is_one_folder = images.canonicalize().ok() == masks.canonicalize().ok();
    let is_mask = |path: &PathBuf| {
        let stem = stem_of(path.file_name().unwrap_or_default().to_str().unwrap_or_default());
        is_image(path) && (!is_one_folder || without_suffix(stem).or_else(|| without_number(stem)).is_some())
    };
    of_images.iter().any(|path| is_image(path))
        && !entries.iter().any(is_mask)
        && entries.iter().any(|path| is_annotation(path))
}

/// The pairs of a folder of images and a file or folder of outlines.
pub(super) fn table(options: &PrepareOptions) -> Result<PairTable> {
    refuse_slice_options(options)?;
    if !options.labels.is_empty() || !options.named_labels.is_empty() {
        let reason = format!("`{}` has outlines, whose labels have names", options.masks[0].display());
        return Err(Error::argument("labels", reason, "leave the argument out"));
    }
    let mut found = Found::of_folder(&options.images[0])?;
    found.read(&options.masks[0])?;
    found.table(options)
}

/// Images, and the annotation files for them.
struct Found {
    folder: PathBuf,
    /// Paths of images, in the folder or below.
    images: Vec<PathBuf>,
    files: Vec<AnnotationFile>,
    /// Files that cannot be read, with the reason.
    unreadable: Vec<(PathBuf, Error)>,
    skipped: Vec<Skipped>,
}

impl Found {
    fn of_folder(folder: &Path) -> Result<Self> {
        let images: Vec<PathBuf> = files_in(folder, true)?.into_iter().filter(|path| is_image(path)).collect();
        if images.is_empty() {
            let reason = concat!("has no ", prsmed_volume::image_formats!(), " files, in the folder or below");
            return Err(Error::data(folder, reason, "give the folder of the images that were annotated"));
        }
        Ok(Self { folder: folder.into(), images, files: Vec::new(), unreadable: Vec::new(), skipped: Vec::new() })
    }

    /// Reads a file, or all files of a folder, in parallel.
    fn read(&mut self, masks: &Path) -> Result<()> {
        if masks.is_file() {
            self.files.push(AnnotationFile::open(masks)?);
            return Ok(());
        }
        let all = files_in(masks, true)?.into_iter().filter(|path| !is_image(path) && !is_names_of_classes(path));
        let is_text = |path: &PathBuf| path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("txt"));
        let (files, others): (Vec<PathBuf>, Vec<PathBuf>) = all.partition(|path| is_annotation(path) || is_text(path));
        let of_many: Vec<String> =
            files.iter().filter(|path| kind_of(path) == Some(COCO)).map(|path| path.display().to_string()).collect();
        if !of_many.is_empty() && files.len() > 1 {
            let reason =
                format!("has {} annotation files, of which {} have many images each", files.len(), of_many.len());
            let hint = format!("name one of them: {}", first_quoted(&of_many, 4));
            return Err(Error::data(masks, reason, hint));
        }
        let opened: Vec<_> = files.into_par_iter().map(|path| (AnnotationFile::open(&path), path)).collect();
        for (file, path) in opened {
            match file {
                Ok(file) => self.files.push(file),
                Err(error) => self.unreadable.push((path, error)),
            }
        }
        let reason = |path: &Path| kind_of(path).map_or(NOT_AN_IMAGE.into(), |kind| format!("{IS_A} {kind}"));
        self.skipped.extend(others.into_iter().map(|path| Skipped { reason: reason(&path), path }));
        Ok(())
    }

    fn table(mut self, options: &PrepareOptions) -> Result<PairTable> {
        let masks = &options.masks[0];
        let is_of_many = self.files.iter().any(AnnotationFile::is_of_many);
        let relative =
            |path: &Path, root: &Path| path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned();
        let known: Vec<Parts> =
            self.images.iter().map(|path| parts(&relative(path, &self.folder), is_of_many)).collect();
        let known = Known::new(&known);
        // numbers of images with the annotated image, or the file that cannot be read
        let mut pairs: BTreeMap<usize, Source> = BTreeMap::new();
        let mut skipped = Vec::new();
        let annotated =
            self.files.iter().flat_map(|file| file.images().iter().map(move |image| Source::Image(file, image)));
        for source in annotated.chain(self.unreadable.iter().map(|(path, _)| Source::Unreadable(path))) {
            let path = source.path();
            let name = match source {
                Source::Image(file, image) if file.is_of_many() => image.name.clone(),
                _ => relative(&path, masks),
            };
            let number = match known.meant(&parts(&name, is_of_many)) {
                Meant::File(number) => number,
                Meant::Several(numbers) => return Err(self.several(&path, &numbers)),
                Meant::None(of_name) => {
                    let of_name = of_name.first().map(|number| self.images[*number].display());
                    let more = of_name.map(|path| format!("; `{path}` has its name in another folder"));
                    let reason = if is_of_many { "no image of this name" } else { NO_IMAGE };
                    skipped.push(Skipped { path, reason: format!("{reason}{}", more.unwrap_or_default()) });
                    continue;
                }
            };
            if let Source::Image(_, image) = source {
                self.check_name(&path, image, number, &known)?;
            }
            if let Some(other) = pairs.insert(number, source) {
                let reason =
                    format!("`{}` is for the same image, `{}`", other.path().display(), self.images[number].display());
                return Err(Error::data(&path, reason, "keep one of the two"));
            }
        }
        if pairs.is_empty() {
            return Err(self.nothing(masks, &skipped));
        }
        let annotated = pairs.values().filter_map(Source::image);
        let labels = labels(annotated, masks)?;
        let rows = self.rows(&pairs, &labels, options);
        let alone = (0..self.images.len()).filter(|number| !pairs.contains_key(number));
        let reason = if is_of_many { NOT_LISTED } else { NO_MASK };
        skipped.extend(alone.map(|number| Skipped { path: self.images[number].clone(), reason: reason.into() }));
        let notes = note(&labels, options).into_iter().collect();
        drop(pairs);
        self.skipped.append(&mut skipped);
        Ok(PairTable { rows, skipped: self.skipped, notes, ..PairTable::default() })
    }

    fn rows(&self, pairs: &BTreeMap<usize, Source>, labels: &Labels, options: &PrepareOptions) -> Vec<Pair> {
        let names = self.names(pairs.keys());
        let rows = pairs.iter().zip(names).map(|((number, source), name)| {
            let (file, image) = match source {
                Source::Image(file, image) => (file, image),
                Source::Unreadable(path) => return Pair::new(name, &self.images[*number], path),
            };
            let masks = masks_of(file, image, labels, options.negatives.are_wanted());
            let image = self.images[*number].clone();
            Pair { name, source: image.clone(), image, masks, ..Pair::default() }
        });
        rows.collect()
    }

    /// Names of images: their stems, or with their folders if these are not different.
    fn names<'b>(&self, numbers: impl Iterator<Item = &'b usize>) -> Vec<String> {
        let parts = |path: &Path| -> Vec<String> {
            let path = path.strip_prefix(&self.folder).unwrap_or(path).with_extension("");
            path.iter().map(|part| part.to_string_lossy().into_owned()).collect()
        };
        let all: Vec<Vec<String>> = numbers.map(|number| parts(&self.images[*number])).collect();
        let stems: Vec<String> = all.iter().filter_map(|parts| parts.last().cloned()).collect();
        let different: BTreeSet<String> = stems.iter().map(|stem| stem.to_lowercase()).collect();
        if different.len() == all.len() { stems } else { all.iter().map(|parts| parts.join("_")).collect() }
    }

    /// Refuses a LabelMe file whose name is that of one image, while it says that it is of another one.
    fn check_name(&self, path: &Path, image: &AnnotatedImage, number: usize, known: &Known) -> Result<()> {
        let named =
            if image.name.is_empty() { Meant::None(Vec::new()) } else { known.meant(&parts(&image.name, false)) };
        match named {
            Meant::File(other) if other != number && path.is_file() => {
                let [own, other] = [number, other].map(|number| self.images[number].display());
                let reason = format!("has the name of `{own}`, but says that it is of `{other}`");
                Err(Error::data(path, reason, "correct its name or its field `imagePath`"))
            }
            _ => Ok(()),
        }
    }

    fn several(&self, path: &Path, numbers: &[usize]) -> Error {
        let names: Vec<_> = numbers.iter().map(|number| self.images[*number].display()).collect();
        let reason = format!("may be for each of {}", first_quoted(&names, 4));
        Error::data(path, reason, "give the folder of its images, or keep images of different names")
    }

    /// No image is annotated.
    fn nothing(&self, masks: &Path, skipped: &[Skipped]) -> Error {
        let first = skipped.first().map(|skip| format!("; first: {}: {}", skip.path.display(), skip.reason));
        let reason =
            format!("has no annotations of the images in `{}`{}", self.folder.display(), first.unwrap_or_default());
        Error::data(masks, reason, "give the folder of the images that were annotated, with their names as they were")
    }
}

/// What annotates an image.
#[derive(Clone, Copy)]
enum Source<'a> {
    Image(&'a AnnotationFile, &'a AnnotatedImage),
    Unreadable(&'a Path),
}

impl<'a> Source<'a> {
    fn image(&self) -> Option<&'a AnnotatedImage> {
        if let Self::Image(_, image) = self { Some(image) } else { None }
    }

    fn path(&self) -> PathBuf {
        match self {
            Self::Image(file, image) => file.path_of(image, None),
            Self::Unreadable(path) => path.to_path_buf(),
        }
    }
}

/// The masks of an image: one for each label, if there are several, and else that of the target of the options.
pub(super) fn masks_of(
    file: &AnnotationFile,
    image: &AnnotatedImage,
    labels: &Labels,
    with_absent: bool,
) -> Vec<(Option<String>, PathBuf)> {
    let own = image.labels();
    let named = labels.iter().filter(|_| labels.len() > 1).filter_map(|(label, name)| {
        let is_there = own.contains(label.as_str());
        let path = if is_there { file.path_of(image, Some(label)) } else { file.path_of_absent(image, label) };
        (is_there || with_absent).then(|| (Some(name.clone()), path))
    });
    let masks: Vec<_> = named.collect();
    if masks.is_empty() { vec![(None, file.path_of(image, None))] } else { masks }
}

/// Labels with their names in questions.
pub(super) type Labels = BTreeMap<String, String>;

/// The labels of all images. Of several, each must be a name.
///
/// # Errors
/// [`Error::Data`] for a label that cannot be a name, and for two with one name.
pub(super) fn labels<'a>(images: impl Iterator<Item = &'a AnnotatedImage>, masks: &Path) -> Result<Labels> {
    let mut labels = Labels::new();
    for label in images.flat_map(AnnotatedImage::labels) {
        labels.entry(label.to_owned()).or_insert_with(|| label.replace('_', " ").trim().to_owned());
    }
    if labels.len() < 2 {
        return Ok(labels);
    }
    let mut files: BTreeMap<String, &str> = BTreeMap::new();
    for (label, name) in &labels {
        let problem = if label.parse::<f64>().is_ok() {
            let reason = format!("has {} labels, of which `{label}` is a number without a name", labels.len());
            Some((reason, "put a file `classes.txt` with one name in each line, or the `data.yaml`, into its folder"))
        } else {
            word_problem(name).map(|(reason, hint)| (format!("has a label that is no name: {reason}"), hint))
        };
        if let Some((reason, hint)) = problem {
            return Err(Error::data(masks, reason, hint));
        }
        if let Some(other) = files.insert(suffix(name), label) {
            let reason =
                format!("has the labels `{other}` and `{label}`, which cannot be told apart in names of files");
            return Err(Error::data(masks, reason, "give them the same name, or very different ones"));
        }
    }
    Ok(labels)
}

/// How the only label is called.
fn note(labels: &Labels, options: &PrepareOptions) -> Option<String> {
    let mut all = labels.iter();
    let (Some((label, name)), None) = (all.next(), all.next()) else { return None };
    let target = &options.target;
    (name != target).then(|| {
        format!(
            "all objects have the label `{label}`, and questions call them `{target}`: that is the argument `target`"
        )
    })
}
