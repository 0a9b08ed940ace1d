//! Which image a path in an annotation file means, although its folders were moved or renamed.

use std::collections::BTreeMap;
use std::path::Path;

use super::patterns::split_of;
use crate::manifest::Split;
use crate::names;

/// Folders and name of a file as they are compared, the name first: of `P1\Scan.png` they are `scan.png` and `p1`.
pub(in crate::prepare) type Parts = Vec<String>;

/// The parts of a path; without the ending of the name if files of two kinds are matched.
pub(in crate::prepare) fn parts(path: &str, with_ending: bool) -> Parts {
    let path = path.replace('\\', "/");
    let mut parts: Vec<&str> = path.split('/').filter(|part| !["", "."].contains(part)).collect();
    if let Some(name) = parts.last_mut().filter(|_| !with_ending) {
        *name = Path::new(*name).file_stem().and_then(|stem| stem.to_str()).unwrap_or(name);
    }
    parts.into_iter().rev().map(names::key).collect()
}

/// What a path means among files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::prepare) enum Meant {
    /// The file with this number.
    File(usize),
    /// Each of these files may be meant.
    Several(Vec<usize>),
    /// None: at most, files of this name are in other folders.
    None(Vec<usize>),
}

/// Files by their names.
pub(in crate::prepare) struct Known<'a> {
    files: &'a [Parts],
    by_name: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Known<'a> {
    pub(in crate::prepare) fn new(files: &'a [Parts]) -> Self {
        let mut by_name: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (number, name) in files.iter().enumerate().filter_map(|(number, parts)| Some((number, parts.first()?))) {
            by_name.entry(name).or_default().push(number);
        }
        Self { files, by_name }
    }

    /// The file that a path means: one of the two paths must end with the other one, and of several the longest end counts.
    pub(in crate::prepare) fn meant(&self, path: &Parts) -> Meant {
        let of_name = path.first().and_then(|name| self.by_name.get(name.as_str())).cloned().unwrap_or_default();
        let common = |file: &usize| path.iter().zip(&self.files[*file]).take_while(|(a, b)| a == b).count();
        let is_end = |file: &usize| common(file) == path.len().min(self.files[*file].len());
        let ends: Vec<usize> = of_name.iter().copied().filter(is_end).collect();
        let most = ends.iter().map(common).max();
        let best: Vec<usize> = ends.into_iter().filter(|file| Some(common(file)) == most).collect();
        match best.as_slice() {
            [] => Meant::None(of_name),
            [one] => Meant::File(*one),
            _ => Meant::Several(best),
        }
    }
}

/// Those of several files that lie nearest to another one: below the first of its folders, from the inner to the outer, that has
/// any of them. Of several, those in folders of a split.
pub(super) fn nearest<'a>(
    of: &str,
    files: &[usize],
    name: impl Fn(&usize) -> &'a str,
    split: Option<Split>,
) -> Vec<usize> {
    let folders = of.rmatch_indices('/').map(|(at, _)| &of[..=at]).chain([""]);
    let below = |folder: &str| files.iter().copied().filter(|file| name(file).starts_with(folder)).collect::<Vec<_>>();
    let near = folders.map(below).find(|files| !files.is_empty()).unwrap_or_default();
    let is_of = |file: &usize| split.is_some() && name(file).split('/').any(|folder| split_of(folder) == split);
    let of_split: Vec<usize> = near.iter().copied().filter(is_of).collect();
    if of_split.is_empty() { near } else { of_split }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_mean_files_by_their_common_end() {
        let files = ["P1/a.png", "P2/a.png", "P2/b.png", "P3/Bild 1.png"].map(|path| parts(path, true));
        let known = Known::new(&files);
        for (path, meant) in [
            ("P1/a.png", Meant::File(0)),
            (r"C:\data\scans\P2\A.PNG", Meant::File(1)),
            ("./b.png", Meant::File(2)),
            ("b.png", Meant::File(2)),
            ("bild\u{a0}1.png", Meant::File(3)),
            ("a.png", Meant::Several(vec![0, 1])),
            ("P3/a.png", Meant::None(vec![0, 1])),
            ("P2/c.png", Meant::None(vec![])),
            ("", Meant::None(vec![])),
        ] {
            assert_eq!(known.meant(&parts(path, true)), meant, "{path}");
        }
        let flat = ["a.png", "scan.v2.png"].map(|path| parts(path, false));
        let known = Known::new(&flat);
        assert_eq!(known.meant(&parts("labels/train/a.txt", false)), Meant::File(0));
        assert_eq!(known.meant(&parts("scan.v2.json", false)), Meant::File(1));
    }
}
