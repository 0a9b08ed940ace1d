//! Files of outlines in tables of pairs: which image and which label of a file a cell means.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::annotations::{AnnotatedImage, AnnotationFile, AnnotationFiles, is_annotation, is_of_many};
use super::layouts::{Known, Meant, parts};
use super::table::Pair;
use crate::names;
use prsmed_base::error::first_quoted;
use prsmed_base::{Error, Result};

/// What the cells of a target have in common: whether a file has its label, and the labels that the files have.
#[derive(Default)]
struct Seen {
    is_known: bool,
    labels: BTreeSet<String>,
}

/// Completes the paths of annotation files that are given without `#`. Of a file of many images, the image is that of the
/// line. The mask of a target is drawn from the objects whose label has its name.
///
/// # Errors
/// [`Error::Data`] for a file that does not have the image of its line, and for a target that is no label in any file.
pub(super) fn complete(rows: &mut [Pair], table: &Path) -> Result<()> {
    let files = AnnotationFiles::default();
    let mut seen: BTreeMap<String, Seen> = BTreeMap::new();
    for Pair { image, masks, .. } in rows {
        for (target, path) in masks.iter_mut().filter(|(_, path)| is_annotation(path)) {
            let file = match files.open(path) {
                Ok(file) => file,
                // of the file of one image, the preparation says it with the image
                Err(_) if !is_of_many(path) => continue,
                Err(error) => return Err(error),
            };
            let annotated = image_of(&file, image, path)?;
            let Some(target) = target else {
                *path = file.path_of(annotated, None);
                continue;
            };
            let key = |label: &str| names::key(label.replace('_', " ").trim());
            let labels = annotated.labels();
            let label = labels.iter().find(|label| key(label) == key(target));
            let seen = seen.entry(target.clone()).or_default();
            seen.is_known |= label.is_some();
            seen.labels.extend(labels.iter().map(|label| (*label).to_owned()));
            *path = label
                .map_or_else(|| file.path_of_absent(annotated, target), |label| file.path_of(annotated, Some(label)));
        }
    }
    let Some((target, Seen { labels, .. })) = seen.iter().find(|(_, seen)| !seen.is_known) else { return Ok(()) };
    let labels: Vec<&String> = labels.iter().collect();
    let known = if labels.is_empty() { "no objects".to_owned() } else { format!("only {}", first_quoted(&labels, 8)) };
    let reason = format!("no annotation file has the label `{target}`: they have {known}");
    Err(Error::data(table, reason, "name the target as the label, or write `FILE#LABEL` into the cells of masks"))
}

/// The image of a file that a line is about.
fn image_of<'a>(file: &'a AnnotationFile, image: &Path, path: &PathBuf) -> Result<&'a AnnotatedImage> {
    let all = file.images();
    if !file.is_of_many() {
        return Ok(&all[0]);
    }
    let known: Vec<_> = all.iter().map(|image| parts(&image.name, true)).collect();
    match Known::new(&known).meant(&parts(&image.to_string_lossy(), true)) {
        Meant::File(number) => Ok(&all[number]),
        Meant::None(_) => {
            let hint = "write the name that the file gives to the image behind it, as in `FILE.json#IMAGE`";
            Err(Error::data(path, format!("has no annotations of the image `{}`", image.display()), hint))
        }
        Meant::Several(numbers) => {
            let names: Vec<&str> = numbers.iter().map(|number| all[*number].name.as_str()).collect();
            let reason = format!("has several images that `{}` may be: {}", image.display(), first_quoted(&names, 4));
            Err(Error::data(path, reason, "write one of the names behind the file, as in `FILE.json#IMAGE`"))
        }
    }
}
