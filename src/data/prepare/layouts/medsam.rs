//! MedSAM: an image or volume and its labels are two arrays of one NPZ file.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::super::scan::tree::{FileKind, Tree};
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_in};
use prsmed_base::files;

pub(super) const MEDSAM: Layout = Layout {
    name: "medsam",
    about: "MedSAM: `MedSAM_train/CT_Abd/CT_Abd_FLARE22_Tr_0001.npz` with the arrays `imgs` and `gts`",
    find: Some(find),
    ..NO_LAYOUT
};

const IMAGE: &str = "imgs.npy";
const LABELS: &str = "gts.npy";

/// Whether an NPZ file has an array of this name. A damaged file has none.
fn has_arrays(path: &Path, names: [&str; 2]) -> bool {
    let Ok(file) = files::open(path) else { return false };
    let archive = zip::ZipArchive::new(BufReader::new(file));
    archive.is_ok_and(|archive| names.iter().all(|name| archive.index_for_name(name).is_some()))
}

fn find(tree: &Tree, free: &[bool]) -> Groups {
    let mut found = Groups::default();
    for (number, file) in tree.files.iter().enumerate().filter(|(number, _)| free[*number]) {
        let is_npz = file.kind == FileKind::Volume && file.name.to_lowercase().ends_with(".npz");
        if !is_npz || !has_arrays(&file.path, [IMAGE, LABELS]) {
            continue;
        }
        let (folders, stem) = file.parts();
        let labels = PathBuf::from(format!("{}#gts", file.path.display()));
        let group = Group {
            base: folders.join("/"),
            name: stem.to_owned(),
            images: vec![GroupImage { file: number, channel: None, part: None }],
            masks: vec![GroupMask { file: number, target: None, is_numbered: false, path: Some(labels) }],
            split: split_in(&folders.join("/")),
            ..Group::default()
        };
        found.groups.insert(file.name.clone(), group);
    }
    found
}
