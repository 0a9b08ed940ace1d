//! Pairs of images and masks: what a layout finds in the files of a user, and all that a preparation needs of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::item::{MaskItem, Skipped};
use super::structures::{NamedLabels, Structure, structures};
use crate::annotation::is_flat_image;
use crate::labels::Labels;
use crate::manifest::Split;
use crate::volume::SequenceFile;
use prsmed_base::{Error, Result};

/// How a label map is found.
pub(super) const SAME_NAMES: &str =
    "a label map must have the name of its volume, or both must have folders of one name";

/// An image or a volume with its masks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pair {
    /// Begins the names of its files in the data root.
    pub name: String,
    /// The image or volume, as [`crate::volume::open`] takes it.
    ///
    /// Of several sequences the first one that is not missing.
    pub image: PathBuf,
    /// The files of several sequences, in the order of their colours; empty for an image of one file.
    pub sequences: Vec<SequenceFile>,
    /// The path by which it is called: that of the image, or of the folder that gives it its name.
    pub source: PathBuf,
    /// Its mask files. One with a name shows the target of this name; the others are joined.
    pub masks: Vec<(Option<String>, PathBuf)>,
    /// Patient; `None` if it is not known, and of a volume if it is its own patient.
    pub patient: Option<String>,
    /// Split; `None` if it is to be drawn.
    pub split: Option<Split>,
    /// Modality; `None` for that of the options.
    pub class: Option<String>,
    /// The labels of the masks without a name; empty for the labels of the options.
    pub labels: NamedLabels,
    /// Questions with answers, instead of the templates.
    pub texts: Vec<PairText>,
}

/// A question about an image, with its answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PairText {
    /// The target that it is about; `None` for all targets of the image.
    pub target: Option<String>,
    /// The question.
    pub question: String,
    /// The answer.
    pub answer: String,
}

impl Pair {
    /// An image with one mask, called by its path.
    pub fn new(name: impl Into<String>, image: impl Into<PathBuf>, mask: impl Into<PathBuf>) -> Self {
        let image = image.into();
        Self { name: name.into(), source: image.clone(), image, masks: vec![(None, mask.into())], ..Self::default() }
    }

    /// What the table says about its items of a target.
    pub(super) fn item(&self, target: &str) -> MaskItem {
        let texts = self.texts.iter().filter(|text| text.target.as_ref().is_none_or(|of| of == target));
        let texts = texts.map(|text| (text.question.clone(), text.answer.clone())).collect();
        MaskItem { patient: self.patient.clone(), split: self.split, texts, ..MaskItem::default() }
    }

    /// Says so if a mask without a name has a label that the pair does not name. Without labels of its own, any may be.
    pub(super) fn unknown_label(&self, mask: usize, found: impl Iterator<Item = (u16, u64)>) -> Option<String> {
        if self.labels.is_empty() || self.masks[mask].0.is_some() {
            return None;
        }
        let unknown: Vec<String> = found
            .filter(|(label, _)| !self.labels.is_known(*label))
            .map(|(label, count)| format!("{label} ({count})"))
            .collect();
        let text = |first: &String| {
            let label = first.split(' ').next().unwrap_or_default();
            format!(
                "it has labels that are not among `{}`: {}; add `{label}=NAME` or `{label}=background` to the labels of the table",
                self.labels,
                unknown.join(", ")
            )
        };
        unknown.first().map(text)
    }

    /// True for an image file, false for a volume, whose slices become images.
    pub(super) fn is_image(&self) -> bool {
        is_flat_image(&self.image)
    }

    /// The structures that its masks show: those of unnamed masks, and one for each name of a mask; or with `join` one of this
    /// name, which all of them show.
    pub(super) fn structures(&self, of_unnamed: &[Structure], join: Option<&str>) -> Vec<Shown> {
        let all = self.by_name(of_unnamed);
        let Some(name) = join else { return all };
        let files = all.into_iter().flat_map(|(_, files)| files).collect();
        vec![(Structure { name: name.to_owned(), suffix: String::new(), ..Structure::default() }, files)]
    }

    fn by_name(&self, of_unnamed: &[Structure]) -> Vec<Shown> {
        let unnamed: Vec<usize> = (0..self.masks.len()).filter(|index| self.masks[*index].0.is_none()).collect();
        let own = structures(&self.labels, "", Labels::NONE);
        let of_unnamed = if self.labels.is_empty() { of_unnamed } else { &own };
        let of_unnamed = of_unnamed.iter().filter(|_| !unnamed.is_empty());
        let of = |structure: &Structure| {
            let files = unnamed.iter().map(|file| (*file, structure.labels)).collect();
            (structure.clone(), files)
        };
        let mut found: Vec<Shown> = of_unnamed.map(of).collect();
        for (index, (name, _)) in self.masks.iter().enumerate() {
            let Some(structure) = name.as_ref().map(|name| Structure::named(name, Labels::NONE)) else { continue };
            match found.iter_mut().find(|(known, _)| *known == structure) {
                Some((_, files)) => files.push((index, Labels::NONE)),
                None => found.push((structure, vec![(index, Labels::NONE)])),
            }
        }
        found
    }
}

/// A structure, and the numbers of the mask files that show it, each with the labels that do so; no labels: the only label of the
/// file, or all of them if targets are joined.
pub(super) type Shown = (Structure, Vec<(usize, Labels)>);

/// What the pairs of a layout are, for messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PairKind {
    /// Images and masks.
    #[default]
    Images,
    /// Volumes and label maps.
    Volumes,
}

impl PairKind {
    /// What a pair is, and how its two files are matched.
    pub(super) fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Images => ("image and mask", "a mask must have its image's stem"),
            Self::Volumes => ("volume and label map", SAME_NAMES),
        }
    }
}

/// What a layout finds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PairTable {
    /// Images and volumes with their masks; no two have one name.
    pub rows: Vec<Pair>,
    /// Files that belong to no pair, each with the reason.
    pub skipped: Vec<Skipped>,
    /// What was assumed, in sentences for the user.
    pub notes: Vec<String>,
    /// For messages.
    pub kind: PairKind,
}

impl PairTable {
    /// The pairs of each class; those without one are of `usual`. What is left over belongs to the first class.
    ///
    /// # Errors
    /// [`Error::Config`] if a pair has no class, and `usual` is empty.
    pub(super) fn by_class(self, usual: &str) -> Result<Vec<(String, Self)>> {
        if let Some(pair) = self.rows.iter().find(|pair| pair.class.is_none()).filter(|_| usual.is_empty()) {
            let reason = format!("`{}` has no class in the table of pairs", pair.image.display());
            return Err(Error::argument("modality", reason, "give the argument, or fill the column `class`"));
        }
        let mut classes: BTreeMap<String, Self> = BTreeMap::new();
        let Self { rows, skipped, notes, kind } = self;
        for pair in rows {
            let class = pair.class.clone().unwrap_or_else(|| usual.to_owned());
            classes.entry(class).or_insert_with(|| Self { kind, ..Self::default() }).rows.push(pair);
        }
        let first = if classes.is_empty() {
            classes.entry(usual.to_owned()).or_default()
        } else {
            classes.first_entry().expect("a class").into_mut()
        };
        (first.skipped, first.notes) = (skipped, notes);
        Ok(classes.into_iter().collect())
    }

    /// Refuses pairs without a mask, and of one name.
    ///
    /// # Errors
    /// [`Error::Data`] that names the image.
    pub(super) fn check(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for Pair { name, image, masks, .. } in &self.rows {
            let (reason, hint) = if masks.is_empty() {
                ("has no mask in the table of pairs".to_owned(), "name its mask, or leave it out of the table")
            } else if !names.insert(name) {
                (format!("is a second image of the name `{name}`"), "give each pair a name of its own")
            } else {
                continue;
            };
            return Err(Error::data(image, reason, hint));
        }
        Ok(())
    }
}
