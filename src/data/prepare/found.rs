//! What can be used of a table of pairs, before it is written.

use std::path::PathBuf;

use super::item::{MaskItem, Skipped};
use super::table::Pair;
use crate::findings::Findings;
use crate::volume::{Levels, SequenceFile};

/// An image or a volume with usable masks.
pub(super) struct UsableSource {
    /// By which it is called; of an image its file.
    pub(super) path: PathBuf,
    /// The files of an image of several sequences.
    pub(super) sequences: Vec<SequenceFile>,
    /// Smallest and largest value of a 16-bit image.
    pub(super) range: Option<[u16; 2]>,
    /// `None` for an image.
    pub(super) volume: Option<UsableVolume>,
}

/// A volume with usable label maps.
pub(super) struct UsableVolume {
    pub(super) pair: Pair,
    /// `None` for a colour image.
    pub(super) levels: Option<Levels>,
}

/// Where the mask of an item comes from.
pub(super) enum ItemMask {
    /// The bytes of its PNG file.
    Png(Vec<u8>),
    /// A slice of a part of the volume's pair.
    Part(VolumePart),
}

/// A structure of a volume, or one of its instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct VolumePart {
    /// Number of the structure.
    pub(super) structure: usize,
    /// Number of the instance; `None` for the whole structure.
    pub(super) instance: Option<usize>,
}

/// An item with its files.
pub(super) struct UsableItem {
    pub(super) item: MaskItem,
    /// Index in [`FoundItems::sources`].
    pub(super) source: usize,
    pub(super) mask: ItemMask,
}

/// A usable pair: its image, its items, and what was found in it.
pub(super) type UsablePair = (UsableSource, Vec<(MaskItem, ItemMask)>, Findings);

/// What the pairs contain.
#[derive(Default)]
pub(super) struct FoundItems {
    pub(super) sources: Vec<UsableSource>,
    pub(super) items: Vec<UsableItem>,
    pub(super) skipped: Vec<Skipped>,
    /// Number of images and slices that the data root already contains.
    pub(super) known: usize,
    /// Number of pairs of image and mask that the data root does not contain.
    pub(super) num_read: usize,
    /// Those that cannot be used, other than for an empty mask.
    pub(super) bad: Vec<Skipped>,
    /// What was assumed, in sentences for the user.
    pub(super) notes: Vec<String>,
    pub(super) findings: Findings,
}

impl FoundItems {
    pub(super) fn add(&mut self, (source, items, findings): UsablePair) {
        let number = self.sources.len();
        self.items.extend(items.into_iter().map(|(item, mask)| UsableItem { item, source: number, mask }));
        self.sources.push(source);
        self.findings.merge(findings);
    }
}
