//! Layouts of trees: most of them are regular expressions on the paths of images and masks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rayon::prelude::*;
use regex::Regex;

use super::super::scan::tree::Tree;
use super::super::structures::NamedLabels;
use super::super::table::PairText;
use crate::manifest::Split;
use crate::names;
use prsmed_base::{Error, Result};

/// How the images and masks of a data set lie in its folders.
///
/// The expressions are for the path of a file below the root, with `/`. A file is what its first expression says. Their groups:
///
/// | group | meaning |
/// |---|---|
/// | `base`, `split`, `id`, `id2` | equal for an image and its masks; `id` and `id2` are the name of the image |
/// | `patient`, `split` | of the image |
/// | `channel` | of an image: a sequence, phase or channel of several of one `id` |
/// | `target` | of a mask: what it shows; `_` becomes a blank |
/// | `number` | of a mask: one of several of a target, which are joined |
/// | `class` | of an image: its modality |
pub(in crate::prepare) struct Layout {
    /// Name for `--layout`.
    pub(in crate::prepare) name: &'static str,
    /// The files, for people.
    pub(in crate::prepare) about: &'static str,
    /// Expressions of masks.
    pub(super) masks: &'static [&'static str],
    /// Expressions of files that belong to the data set and to no pair, each with the reason.
    pub(super) others: &'static [(&'static str, &'static str)],
    /// Expressions of images.
    pub(super) images: &'static [&'static str],
    /// Finds the groups in another way than by the expressions.
    pub(super) find: Option<fn(&Tree, &[bool]) -> Groups>,
    /// Reads what files of the data set say about its images.
    pub(in crate::prepare) describe: Option<fn(&Tree, &mut Groups) -> Result<()>>,
}

/// A layout without files, for the fields that a row leaves out.
pub(super) const NO_LAYOUT: Layout =
    Layout { name: "", about: "", masks: &[], others: &[], images: &[], find: None, describe: None };

/// An image of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::prepare) struct GroupImage {
    /// Index of the file in the tree.
    pub(in crate::prepare) file: usize,
    /// Sequence, phase or channel.
    pub(in crate::prepare) channel: Option<String>,
    /// Part of the file behind `#`.
    pub(in crate::prepare) part: Option<usize>,
}

/// A mask of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::prepare) struct GroupMask {
    /// Index of the file in the tree.
    pub(in crate::prepare) file: usize,
    pub(in crate::prepare) target: Option<String>,
    /// One of several masks of a target, which are joined.
    pub(in crate::prepare) is_numbered: bool,
    /// Path of a part of the file; `None` for the whole file.
    pub(in crate::prepare) path: Option<PathBuf>,
}

/// Files that belong together.
#[derive(Debug, Clone, Default)]
pub(in crate::prepare) struct Group {
    /// Folder of the data set in the tree.
    pub(in crate::prepare) base: String,
    /// Name of the image.
    pub(in crate::prepare) name: String,
    pub(in crate::prepare) images: Vec<GroupImage>,
    pub(in crate::prepare) masks: Vec<GroupMask>,
    pub(in crate::prepare) patient: Option<String>,
    pub(in crate::prepare) split: Option<Split>,
    pub(in crate::prepare) labels: NamedLabels,
    pub(in crate::prepare) class: Option<String>,
    pub(in crate::prepare) texts: Vec<PairText>,
    /// Says what is not clear about the group, and what decides it.
    pub(in crate::prepare) doubt: Option<String>,
}

impl Group {
    /// The number of files of a group with an image and a mask.
    pub(in crate::prepare) fn num_files(&self) -> usize {
        if self.images.is_empty() || self.masks.is_empty() {
            return 0;
        }
        let mut masks: Vec<usize> = self.masks.iter().map(|mask| mask.file).collect();
        masks.sort_unstable();
        masks.dedup();
        self.images.len() + masks.len()
    }

    /// Gives the images a split. With two different ones, it is not clear which one counts.
    pub(super) fn set_split(&mut self, split: Option<Split>) {
        match (self.split, split) {
            (Some(own), Some(other)) if own != other => {
                let reason = format!("its files say both `{own}` and `{other}`; write its split into the table");
                self.doubt.get_or_insert(reason);
            }
            (own, other) => self.split = own.or(other),
        }
    }
}

/// What a layout finds in a tree.
#[derive(Debug, Default)]
pub(in crate::prepare) struct Groups {
    /// By what is equal for an image and its masks.
    pub(in crate::prepare) groups: BTreeMap<String, Group>,
    /// Files that belong to the data set and to no pair, each with the reason.
    pub(in crate::prepare) others: Vec<(usize, String)>,
    /// Files that the data set names and that are missing.
    pub(in crate::prepare) missing: Vec<super::super::item::Skipped>,
    /// What was assumed, in sentences for the user.
    pub(in crate::prepare) notes: Vec<String>,
    /// Why the data set cannot be used as it is.
    pub(in crate::prepare) refused: Option<Error>,
}

impl Groups {
    /// The number of files that make pairs.
    pub(in crate::prepare) fn num_files(&self) -> usize {
        self.groups.values().map(Group::num_files).sum()
    }

    /// The number of files that the layout explains: those of pairs, and if there are any, those that it leaves out with a
    /// reason.
    pub(in crate::prepare) fn num_explained(&self) -> usize {
        match self.num_files() {
            0 => 0,
            count => count + self.others.len(),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Mask,
    Other(&'static str),
    Image,
}

impl Layout {
    /// The groups among the files that are `free`.
    pub(in crate::prepare) fn groups(&self, tree: &Tree, free: &[bool]) -> Groups {
        if let Some(find) = self.find {
            return find(tree, free);
        }
        let masks = self.masks.iter().map(|text| (Role::Mask, *text));
        let others = self.others.iter().map(|(text, reason)| (Role::Other(reason), *text));
        let rules: Vec<(Role, Regex)> = masks
            .chain(others)
            .chain(self.images.iter().map(|text| (Role::Image, *text)))
            .map(|(role, text)| (role, Regex::new(text).expect("a valid expression")))
            .collect();
        let of = |index: usize| -> Option<(usize, Role, Group, String)> {
            let name = tree.files[index].name.as_str();
            let (role, captures) = rules.iter().find_map(|(role, regex)| Some((*role, regex.captures(name)?)))?;
            let text = |group: &str| captures.name(group).map(|found| found.as_str().to_owned());
            let id: Vec<String> = ["id", "id2"].into_iter().filter_map(text).collect();
            let (base, split) = (text("base").unwrap_or_default(), text("split"));
            let key = [base.as_str(), split.as_deref().unwrap_or_default(), &id.join("/")].map(names::key).join("/");
            let (target, channel) = (text("target").map(|word| words(&word)), text("channel"));
            let mut group = Group { base, name: id.join("_"), ..Group::default() };
            match role {
                Role::Mask => {
                    let is_numbered = text("number").is_some();
                    group.masks = vec![GroupMask { file: index, target, is_numbered, path: None }];
                }
                Role::Other(_) => {}
                Role::Image => {
                    group.images = vec![GroupImage { file: index, channel, part: None }];
                    group.patient = text("patient");
                    group.split = split.as_deref().and_then(split_of);
                    group.class = text("class");
                }
            }
            Some((index, role, group, key))
        };
        let mut found = Groups::default();
        let indices: Vec<usize> =
            (0..tree.files.len()).filter(|index| free[*index] && !tree.files[*index].names_series()).collect();
        for (index, role, group, key) in indices.into_par_iter().filter_map(of).collect::<Vec<_>>() {
            if let Role::Other(reason) = role {
                found.others.push((index, reason.to_owned()));
                continue;
            }
            let known = found.groups.entry(key).or_default();
            // the image has the spelling of the name
            if known.name.is_empty() || role == Role::Image {
                (known.name, known.base) = (group.name, group.base);
            }
            known.images.extend(group.images);
            known.masks.extend(group.masks);
            known.patient = known.patient.take().or(group.patient);
            known.class = known.class.take().or(group.class);
            known.split = known.split.or(group.split);
        }
        found
    }
}

/// The split that a word in the names of folders says.
pub(super) fn split_of(word: &str) -> Option<Split> {
    let word = word.to_lowercase();
    let begins = |starts: &[&str]| starts.iter().any(|start| word.starts_with(start));
    match word.as_str() {
        "tr" => Some(Split::Train),
        "ts" => Some(Split::Test),
        _ if begins(&["train"]) => Some(Split::Train),
        _ if begins(&["val", "dev"]) => Some(Split::Val),
        _ if begins(&["test"]) => Some(Split::Test),
        _ => None,
    }
}

/// The split that a word of a path is, with or without a number: `annotations/instances_train2017.json`.
pub(super) fn split_in(path: &str) -> Option<Split> {
    let words = path.split(|c: char| !c.is_ascii_alphabetic()).map(str::to_lowercase);
    words.rev().find_map(|word| match word.as_str() {
        "train" | "training" => Some(Split::Train),
        "val" | "valid" | "validation" => Some(Split::Val),
        "test" | "testing" => Some(Split::Test),
        _ => None,
    })
}

/// The name of a target in a file name: `kidney_left` is the `left kidney`, `optic+disc` the `optic disc`.
pub(super) fn words(name: &str) -> String {
    let name = name.replace(['_', '+'], " ");
    let sided =
        ["left", "right"].iter().find_map(|side| Some(format!("{side} {}", name.strip_suffix(side)?.trim_end())));
    sided.unwrap_or(name).trim().to_owned()
}
