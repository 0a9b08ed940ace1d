//! Pairs of images and masks: what a layout finds in the files of a user, and all that a preparation needs of it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::item::{MaskItem, Skipped};
use super::options::PrepareOptions;
use super::structures::Structure;
use crate::annotation::is_image;
use crate::labels::Labels;
use crate::manifest::Split;
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
    pub image: PathBuf,
    /// The path by which it is called: that of the image, or of the folder that gives it its name.
    pub source: PathBuf,
    /// Its mask files. One with a name shows the target of this name; the others are joined.
    pub masks: Vec<(Option<String>, PathBuf)>,
    /// Patient; `None` if it is not known, and of a volume if it is its own patient.
    pub patient: Option<String>,
    /// Split; `None` if it is to be drawn.
    pub split: Option<Split>,
    /// The question about all its targets, with `answer`, instead of the templates.
    pub question: Option<String>,
    /// The answer to `question`.
    pub answer: Option<String>,
}

impl Pair {
    /// An image with one mask, called by its path.
    pub fn new(name: impl Into<String>, image: impl Into<PathBuf>, mask: impl Into<PathBuf>) -> Self {
        let image = image.into();
        Self { name: name.into(), source: image.clone(), image, masks: vec![(None, mask.into())], ..Self::default() }
    }

    /// What the table says about all its items.
    pub(super) fn item(&self) -> MaskItem {
        let text = self.question.clone().zip(self.answer.clone());
        MaskItem { patient: self.patient.clone(), split: self.split, text, ..MaskItem::default() }
    }

    /// True for an image file, false for a volume, whose slices become images.
    pub(super) fn is_image(&self) -> bool {
        is_image(&self.image)
    }

    /// The structures that its masks show, each with the numbers of its mask files: those of unnamed masks, and one for
    /// each name of a mask.
    pub(super) fn structures(&self, of_unnamed: &[Structure]) -> Vec<(Structure, Vec<usize>)> {
        let unnamed: Vec<usize> = (0..self.masks.len()).filter(|index| self.masks[*index].0.is_none()).collect();
        let of_unnamed = of_unnamed.iter().filter(|_| !unnamed.is_empty());
        let mut found: Vec<_> = of_unnamed.map(|structure| (structure.clone(), unnamed.clone())).collect();
        for (index, (name, _)) in self.masks.iter().enumerate() {
            let Some(structure) = name.as_ref().map(|name| Structure::named(name, Labels::NONE)) else { continue };
            match found.iter_mut().find(|(known, _)| *known == structure) {
                Some((_, files)) => files.push(index),
                None => found.push((structure, vec![index])),
            }
        }
        found
    }
}

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
    /// Refuses pairs without a mask, of one name, and with a question or an answer alone.
    ///
    /// # Errors
    /// [`Error::Data`] that names the image.
    pub(super) fn check(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for Pair { name, image, masks, question, answer, .. } in &self.rows {
            let (reason, hint) = if masks.is_empty() {
                ("has no mask in the table of pairs".to_owned(), "name its mask, or leave it out of the table")
            } else if !names.insert(name) {
                (format!("is a second image of the name `{name}`"), "give each pair a name of its own")
            } else if question.is_some() != answer.is_some() {
                ("has a question without an answer, or an answer alone".to_owned(), "give both, or none of them")
            } else {
                continue;
            };
            return Err(Error::data(image, reason, hint));
        }
        Ok(())
    }
}

/// A layout: how images and their masks lie in the folders of a user.
pub(super) struct FileLayout {
    /// Whether the files of the options lie as this layout says.
    pub(super) knows: fn(&PrepareOptions) -> bool,
    /// The pairs.
    pub(super) table: fn(&PrepareOptions) -> Result<PairTable>,
}
