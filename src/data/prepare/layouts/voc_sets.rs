//! The lists of images of each split that a Pascal VOC data set has: `ImageSets/Segmentation/train.txt`.

use super::super::item::Skipped;
use super::super::scan::tree::Tree;
use super::patterns::{Groups, split_of};
use crate::names;
use prsmed_base::{Error, Result, files};

/// Gives the images their splits. An image in two lists is not clear.
pub(super) fn describe(tree: &Tree, found: &mut Groups) -> Result<()> {
    for list in &tree.others {
        let path = &list.path;
        let Some(name) = path.strip_prefix(&tree.root).ok().and_then(|name| name.to_str()) else { continue };
        let Some((base, list)) = name.split_once("ImageSets/Segmentation/") else { continue };
        let Some(split) = list.strip_suffix(".txt").filter(|list| ["train", "val", "test"].contains(list)) else {
            continue;
        };
        let text = files::read_to_string(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
        for id in text.split_whitespace() {
            let Some(group) = found.groups.get_mut(&format!("{}//{}", names::key(base), names::key(id))) else {
                found.missing.push(Skipped { path: path.clone(), reason: format!("`{id}` is listed, and missing") });
                continue;
            };
            group.set_split(split_of(split));
        }
    }
    Ok(())
}
