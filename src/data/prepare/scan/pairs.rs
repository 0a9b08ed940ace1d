//! Groups of files become pairs, or are ambiguous.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::super::annotations::is_names_of_classes;
use super::super::item::{NO_IMAGE, NO_MASK, Skipped};
use super::super::layouts::{Group, GroupImage, GroupMask, Groups, all_layouts, called, file_name};
use super::super::table::{Pair, PairTable};
use super::report::{Ambiguous, ScanOptions, ScanReport, kind_of, num_patients};
use super::tree::{FileKind, Tree, TreeFile};
use crate::names;
use crate::volume::SequenceFile;
use prsmed_base::Result;
use prsmed_base::error::first_quoted;

/// A pair with the folder of its data set, and whether it is clear.
struct Row {
    pair: Pair,
    base: String,
    ambiguous: Option<(Vec<PathBuf>, String)>,
}

/// The pairs of all layouts of a tree.
#[derive(Default)]
pub(super) struct Found {
    rows: Vec<Row>,
    alone: Vec<Pair>,
    skipped: Vec<Skipped>,
}

impl Found {
    /// The number of pairs.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn add(&mut self, groups: Groups, tree: &Tree, options: &ScanOptions, report: &mut ScanReport) {
        let skipped = |file: usize, reason: String| Skipped { path: tree.files[file].path.clone(), reason };
        self.skipped.extend(groups.others.into_iter().map(|(file, reason)| skipped(file, reason)));
        self.skipped.extend(groups.missing);
        report.notes.extend(groups.notes);
        for group in groups.groups.into_values().filter(|group| group.num_files() > 0) {
            for image in &group.images {
                if let Some(channel) = &image.channel {
                    *report.sequences.entry(channel.clone()).or_default() += 1;
                }
            }
            self.rows.push(row(group, tree, options));
        }
    }

    /// Writes the pairs and what is left over into the report.
    pub(super) fn finish(mut self, tree: &Tree, free: &[bool], report: &mut ScanReport) -> Result<()> {
        self.leftovers(tree, free, report);
        self.rename();
        self.same_splits(report);
        self.rows.sort_by(|a, b| a.pair.image.cmp(&b.pair.image));
        let mut rows = Vec::new();
        for Row { pair, ambiguous, .. } in self.rows {
            match ambiguous {
                Some((files, reason)) => {
                    report.ambiguous.push(Ambiguous { name: pair.name.clone(), files, reason });
                    report.undecided.push(pair);
                }
                None => rows.push(called(pair)),
            }
        }
        let is_image = |pair: &&Pair| pair.is_image();
        report.images = rows.iter().filter(is_image).count();
        report.volumes = rows.len() - report.images;
        report.masks = rows.iter().map(|pair| pair.masks.len()).sum();
        report.patients = num_patients(rows.iter().chain(&report.undecided));
        for pair in &rows {
            let labels = pair.labels.iter().map(|(name, _)| name.to_owned());
            let targets = pair.masks.iter().filter_map(|(target, _)| target.clone());
            let all: BTreeSet<String> = labels.chain(targets).collect();
            for name in all {
                *report.structures.entry(name).or_default() += 1;
            }
            if let Some(split) = pair.split {
                *report.splits.entry(split.name().to_owned()).or_default() += 1;
            }
        }
        report.alone = self.alone;
        report.unmatched.clone_from(&self.skipped);
        let kind = kind_of(&rows);
        report.table = PairTable { rows, skipped: self.skipped, notes: report.notes.clone(), kind };
        report.table.check()
    }

    /// Files that no layout has explained: images without a mask, masks without an image, and others.
    fn leftovers(&mut self, tree: &Tree, free: &[bool], report: &ScanReport) {
        let layout = report.layouts.first().and_then(|row| all_layouts().find(|layout| layout.name == row.name));
        let mut reasons: BTreeMap<usize, String> = BTreeMap::new();
        if let Some(layout) = layout {
            for group in layout.groups(tree, free).groups.into_values() {
                for GroupImage { file, .. } in group.images {
                    reasons.insert(file, no_mask(&tree.files[file]));
                    let image = tree.files[file].path.clone();
                    let pair = Pair { name: group.name.clone(), source: image.clone(), image, ..Pair::default() };
                    self.alone.push(Pair { patient: group.patient.clone(), ..pair });
                }
                reasons.extend(group.masks.iter().map(|mask| (mask.file, NO_IMAGE.to_owned())));
            }
        }
        let left = (0..tree.files.len()).filter(|file| free[*file]);
        let reason = |file: usize| match (reasons.get(&file), layout) {
            _ if tree.files[file].masks.is_some() => tree.files[file].no_series().to_owned(),
            (Some(reason), _) => reason.clone(),
            (None, _) if tree.files[file].kind == FileKind::Outlines => tree.reason(file).unwrap_or_default(),
            (None, Some(layout)) => format!("its name is none of the layout `{}`", layout.name),
            (None, None) => no_mask(&tree.files[file]),
        };
        self.skipped.extend(left.map(|file| Skipped { path: tree.files[file].path.clone(), reason: reason(file) }));
        let is_read = |skip: &&Skipped| {
            skip.path.ends_with("dataset.json")
                || is_names_of_classes(&skip.path)
                || skip.path.components().any(|part| part.as_os_str() == "ImageSets")
        };
        self.skipped.extend(tree.others.iter().filter(|skip| layout.is_none() || !is_read(skip)).cloned());
        self.skipped.sort_by(|a, b| a.path.cmp(&b.path));
    }

    /// Puts folders and splits before names of which there are several.
    fn rename(&mut self) {
        let mut names: Vec<String> = self.rows.iter().map(|row| names::key(&row.pair.name)).collect();
        names.extend(self.alone.iter().map(|pair| names::key(&pair.name)));
        if names.iter().collect::<BTreeSet<_>>().len() < names.len() {
            for Row { pair, base, .. } in &mut self.rows {
                let folders = base.split('/').filter(|part| !part.is_empty()).map(str::to_owned);
                let split = pair.split.map(|split| split.name().to_owned());
                let parts: Vec<String> = folders.chain(split).chain([pair.name.clone()]).collect();
                pair.name = parts.join("_");
            }
            // these names are not used yet
            self.alone.iter_mut().for_each(|pair| pair.name.clear());
            self.number_equal();
        }
    }

    /// Numbers names that are equal with their folders too, as of `a_b/c` and `a/b/c`.
    fn number_equal(&mut self) {
        self.rows.sort_by(|a, b| a.pair.image.cmp(&b.pair.image));
        let mut used: BTreeSet<String> = BTreeSet::new();
        for Row { pair, .. } in &mut self.rows {
            let mut names =
                (1..).map(|number| if number == 1 { pair.name.clone() } else { format!("{}_{number}", pair.name) });
            let free = names.find(|name| used.insert(names::key(name)));
            pair.name = free.unwrap_or_default();
        }
    }

    /// Leaves out the splits of folders if all are one.
    fn same_splits(&mut self, report: &mut ScanReport) {
        let found: BTreeSet<_> = self.rows.iter().filter_map(|row| row.pair.split).collect();
        if let [only] = found.iter().copied().collect::<Vec<_>>().as_slice() {
            self.rows.iter_mut().for_each(|row| row.pair.split = None);
            report.notes.push(format!("all masks are in folders of `{only}`, so that splits are drawn"));
        }
    }
}

/// Why an image belongs to no pair.
fn no_mask(file: &TreeFile) -> String {
    match file.kind {
        FileKind::Series => "no SEG or RTSTRUCT refers to it, and no mask has its name".to_owned(),
        _ => NO_MASK.to_owned(),
    }
}

fn row(group: Group, tree: &Tree, options: &ScanOptions) -> Row {
    let path = |image: &GroupImage| {
        let file = &tree.files[image.file].path;
        image.part.map_or_else(|| file.clone(), |part| PathBuf::from(format!("{}#{part}", file.display())))
    };
    let wanted = options.sequences();
    let (image, sequences, several) = if wanted.len() > 1 {
        let (sequences, several) = sequences(&group, &wanted);
        (sequences.iter().flatten().next().copied().unwrap_or(&group.images[0]), sequences, several)
    } else {
        let (image, several) = chosen(&group, options);
        (image, Vec::new(), several)
    };
    let of_mask = |mask: &GroupMask| mask.path.clone().unwrap_or_else(|| tree.files[mask.file].path.clone());
    let ambiguous = several
        .map(|reason| (group.images.iter().map(path).collect::<Vec<_>>(), reason))
        .or_else(|| Some((group.masks.iter().map(of_mask).collect(), group.doubt.clone()?)))
        .or_else(|| several_masks(&group, of_mask));
    let named = wanted.iter().zip(sequences);
    let sequences =
        named.map(|(name, image)| SequenceFile { name: (*name).to_owned(), path: image.map(path) }).collect();
    let image = path(image);
    let masks = group.masks.iter().map(|mask| (mask.target.clone(), of_mask(mask)));
    let pair = Pair {
        // the folder that is scanned may be the image
        name: if group.name.is_empty() { file_name(&tree.root) } else { group.name },
        source: image.clone(),
        image,
        sequences,
        masks: masks.collect(),
        patient: group.patient,
        split: group.split,
        labels: group.labels,
        class: group.class,
        texts: group.texts,
    };
    let ambiguous = ambiguous.map(|(files, reason)| {
        let reason = if reason.is_empty() { several_images(&files, &group.images) } else { reason };
        (files, reason)
    });
    Row { pair, base: group.base, ambiguous }
}

/// Masks of one target that no number tells apart.
fn several_masks(group: &Group, path: impl Fn(&GroupMask) -> PathBuf) -> Option<(Vec<PathBuf>, String)> {
    let mut masks: BTreeMap<&Option<String>, Vec<&GroupMask>> = BTreeMap::new();
    for mask in group.masks.iter().filter(|mask| !mask.is_numbered) {
        masks.entry(&mask.target).or_default().push(mask);
    }
    let (target, masks) = masks.into_iter().find(|(_, masks)| masks.len() > 1)?;
    let files: Vec<PathBuf> = masks.into_iter().map(path).collect();
    let of = target.as_ref().map(|target| format!(" as `{target}`")).unwrap_or_default();
    let reason = format!(
        "{} masks fit the image{of}: {}; keep one, or give each a column `mask.NAME`",
        files.len(),
        quoted(&files)
    );
    Some((files, reason))
}

/// The image of a group, and a reason if several fit; the text is empty if it is to name the files.
fn chosen<'a>(group: &'a Group, options: &ScanOptions) -> (&'a GroupImage, Option<String>) {
    let first = &group.images[0];
    if group.images.len() == 1 {
        return (first, None);
    }
    let Some(wanted) = &options.channel else { return (first, Some(String::new())) };
    let mut fit = group.images.iter().filter(|image| has_channel(image, wanted));
    match (fit.next(), fit.next()) {
        (Some(image), None) => (image, None),
        (None, _) => (first, Some(format!("it has no channel `{wanted}`, but {}", channels(&group.images)))),
        (Some(_), Some(_)) => (first, Some(format!("it has several images of the channel `{wanted}`"))),
    }
}

/// The images of a group that are the wanted sequences, and a reason if they are not clear.
fn sequences<'a>(group: &'a Group, wanted: &[&str]) -> (Vec<Option<&'a GroupImage>>, Option<String>) {
    let mut reason = None;
    let mut of = |name: &&str| {
        let mut fit = group.images.iter().filter(|image| has_channel(image, name));
        let first = fit.next();
        if fit.next().is_some() {
            reason = Some(format!("it has several images of the channel `{name}`"));
        }
        first
    };
    let found: Vec<_> = wanted.iter().map(&mut of).collect();
    if found.iter().all(Option::is_none) {
        let has = match channels(&group.images) {
            has if has.is_empty() => "its layout names no channels".to_owned(),
            has => format!("it has {has}"),
        };
        reason = Some(format!("it has none of the channels {}: {has}", prsmed_base::error::quoted(wanted)));
    }
    (found, reason)
}

/// Whether an image is a channel by its name or its number.
fn has_channel(image: &GroupImage, wanted: &str) -> bool {
    let key = |name: &str| {
        let name = names::key(name);
        name.parse::<u32>().map_or(name, |number| number.to_string())
    };
    let number = image.part.map(|part| part.to_string());
    image.channel.iter().chain(&number).any(|name| key(name) == key(wanted))
}

fn channels(images: &[GroupImage]) -> String {
    let names: BTreeSet<&str> = images.iter().filter_map(|image| image.channel.as_deref()).collect();
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn several_images(files: &[PathBuf], images: &[GroupImage]) -> String {
    let names = channels(images);
    let (what, remedy) = if names.is_empty() {
        (quoted(files), "keep one, or rename them so that each has the name of its mask".to_owned())
    } else {
        let first = images[0].channel.as_deref().unwrap_or_default();
        (names, format!("one of them can be used: choose it with the argument `channel={first}`"))
    };
    format!("{} images fit its masks: {what}; {remedy}", files.len())
}

fn quoted(files: &[PathBuf]) -> String {
    let names: Vec<String> = files.iter().map(|path| file_name(path)).collect();
    first_quoted(&names, 4)
}
