//! The files of a tree, and what each of them may be. Of most files only the name or the first bytes are read.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::super::annotations::{AnnotationFile, is_annotation};
use super::super::item::{IS_A, NOT_AN_IMAGE, NOT_UTF8, Skipped, UNREADABLE, reason_of};
use super::super::path_pattern::{UNNAMEABLE, is_nameable};
use crate::annotation::is_flat_image;
use crate::annotation_file;
use crate::progress::in_parallel;
use crate::volume::dicom::{MasksHeader, SeriesRow, list_series, masks_header};
use crate::volume::format::{has_voxels_only, is_other_image, of_volume, stem_of};
use prsmed_base::event::{Event, Observer};
use prsmed_base::files::visible_entries;
use prsmed_base::{Error, Result};

/// What a file of a tree may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::prepare) enum FileKind {
    /// An image, or a mask of one.
    Image,
    /// A volume or a label map in one file.
    Volume,
    /// A folder of DICOM files.
    Series,
    /// A DICOM SEG or RTSTRUCT: masks of a series, wherever it lies.
    SeriesMasks,
    /// A file of outlines, of one image or of many.
    Outlines,
}

/// An image, mask, volume or label map of a tree.
#[derive(Debug, Clone)]
pub(in crate::prepare) struct TreeFile {
    pub(in crate::prepare) path: PathBuf,
    /// The path below the root, with `/`.
    pub(in crate::prepare) name: String,
    pub(in crate::prepare) kind: FileKind,
    /// Of [`FileKind::SeriesMasks`].
    pub(in crate::prepare) masks: Option<MasksHeader>,
}

impl TreeFile {
    /// True for masks that say which series they were drawn on, so that no name may decide it.
    pub(in crate::prepare) fn names_series(&self) -> bool {
        self.masks.as_ref().is_some_and(|header| !header.series.is_empty())
    }

    /// Why masks of a series belong to none.
    pub(in crate::prepare) fn no_series(&self) -> &'static str {
        if self.names_series() {
            return "the series that it was drawn on is not in the folder";
        }
        "it does not say which series it was drawn on; a table can name both"
    }

    /// The folders of the name, and the file name without its ending.
    pub(in crate::prepare) fn parts(&self) -> (Vec<&str>, &str) {
        let (folders, name) = self.name.rsplit_once('/').unwrap_or(("", &self.name));
        let stem = if self.kind == FileKind::Series { name } else { stem_of(name) };
        (folders.split('/').filter(|part| !part.is_empty()).collect(), stem)
    }
}

/// The files of a tree.
#[derive(Debug, Default)]
pub(in crate::prepare) struct Tree {
    pub(in crate::prepare) root: PathBuf,
    /// Sorted by name.
    pub(in crate::prepare) files: Vec<TreeFile>,
    /// Files that are neither images nor volumes, and links to folders, each with the reason.
    pub(in crate::prepare) others: Vec<Skipped>,
    outlines: OnceLock<Vec<Outlined>>,
    /// The series of each folder of DICOM files.
    pub(in crate::prepare) series: Vec<ListedSeries>,
}

/// The series of a folder of DICOM files.
#[derive(Debug)]
pub(in crate::prepare) struct ListedSeries {
    /// Index of the folder in the tree.
    pub(in crate::prepare) file: usize,
    /// By the headers of its files.
    pub(in crate::prepare) listed: Result<Vec<SeriesRow>>,
}

impl ListedSeries {
    /// The series; none if they cannot be read.
    pub(in crate::prepare) fn rows(&self) -> &[SeriesRow] {
        self.listed.as_deref().unwrap_or_default()
    }
}

/// A file of outlines that was opened, without the outlines.
#[derive(Debug)]
pub(in crate::prepare) struct Outlined {
    /// Index of the file in the tree.
    pub(in crate::prepare) file: usize,
    /// What wrote it, as [`annotation_file::kind_of`] says it.
    pub(in crate::prepare) kind: &'static str,
    /// Images and labels, or why the file cannot be read.
    pub(in crate::prepare) opened: Result<AnnotationFile>,
}

/// The entries of a folder that are files, before their kinds are known.
struct Folder {
    path: PathBuf,
    files: Vec<PathBuf>,
}

impl Tree {
    /// Reads a tree with all cores. Hidden files are left out, and links to folders are not followed.
    ///
    /// # Errors
    /// [`Error::Data`] if `root` is no folder, or has no files; [`Error::Io`].
    pub(super) fn read(root: &Path, observer: &dyn Observer) -> Result<Self> {
        if !root.is_dir() {
            return Err(Error::data(root, "is not a folder", "give the folder of the data"));
        }
        observer.on(&Event::Started { phase: "scan folders".into(), total: 0, unit: "files" });
        let count = AtomicU64::new(0);
        let (mut folders, mut links) = (Vec::new(), Vec::new());
        let mut next = vec![root.to_owned()];
        while !next.is_empty() {
            let read: Result<Vec<_>> = next.par_iter().map(|folder| entries(folder, &count, observer)).collect();
            next.clear();
            for (folder, inner, linked) in read? {
                folders.push(folder);
                next.extend(inner);
                links.extend(linked);
            }
        }
        let kinds = folders.par_iter().map(|folder| kinds(root, folder));
        let mut tree = Self { root: root.to_owned(), ..Self::default() };
        for (files, others) in kinds.collect::<Vec<_>>() {
            tree.files.extend(files);
            tree.others.extend(others);
        }
        observer.on(&Event::Finished);
        if tree.files.is_empty() && tree.others.is_empty() {
            return Err(Error::data(root, "has no files", "give the folder of the data"));
        }
        tree.others.extend(
            links.into_iter().map(|path| Skipped { path, reason: "a link to a folder, which is not followed".into() }),
        );
        tree.files.sort_by(|a, b| a.name.cmp(&b.name));
        tree.others.sort_by(|a, b| a.path.cmp(&b.path));
        tree.series = listed(&tree.files, observer);
        Ok(tree)
    }

    /// The files of outlines. They are opened once.
    pub(in crate::prepare) fn outlines(&self) -> &[Outlined] {
        self.outlines.get_or_init(|| {
            let all = self.files.par_iter().enumerate().filter(|(_, file)| file.kind == FileKind::Outlines);
            let open = |(number, file): (usize, &TreeFile)| Outlined {
                file: number,
                kind: annotation_file::kind_of(&file.path).unwrap_or(annotation_file::YOLO),
                opened: AnnotationFile::open(&file.path).map(AnnotationFile::without_outlines),
            };
            all.map(open).collect()
        })
    }

    /// Why a file of outlines belongs to no pair.
    pub(in crate::prepare) fn reason(&self, file: usize) -> Option<String> {
        let all = self.outlines();
        let outlined = &all[all.binary_search_by_key(&file, |outlined| outlined.file).ok()?];
        Some(match &outlined.opened {
            Ok(_) => format!("{IS_A} {}", outlined.kind),
            Err(error) => format!("{UNREADABLE}: {}", reason_of(error)),
        })
    }

    /// Why a file of outlines cannot be read: it is opened again.
    pub(in crate::prepare) fn error(&self, outlined: &Outlined) -> Option<Error> {
        AnnotationFile::open(&self.files[outlined.file].path).err()
    }

    /// The file of this name below the root.
    pub(in crate::prepare) fn find(&self, name: &str) -> Option<usize> {
        self.files.binary_search_by(|file| file.name.as_str().cmp(name)).ok()
    }
}

/// The series of all folders of DICOM files.
fn listed(files: &[TreeFile], observer: &dyn Observer) -> Vec<ListedSeries> {
    let folders: Vec<usize> = (0..files.len()).filter(|file| files[*file].kind == FileKind::Series).collect();
    if folders.is_empty() {
        return Vec::new();
    }
    let list = |file: usize| ListedSeries { file, listed: list_series(&files[file].path) };
    in_parallel(folders, ("list series", "folders"), observer, list)
}

fn entries(folder: &Path, count: &AtomicU64, observer: &dyn Observer) -> Result<(Folder, Vec<PathBuf>, Vec<PathBuf>)> {
    let (mut files, mut folders, mut links) = (Vec::new(), Vec::new(), Vec::new());
    for path in visible_entries(folder)? {
        // most entries need one look
        let Ok(kind) = path.symlink_metadata().map(|found| found.file_type()) else { continue };
        match (kind.is_dir(), kind.is_symlink() && path.is_dir()) {
            (true, _) => folders.push(path),
            (_, true) => links.push(path),
            _ => files.push(path),
        }
    }
    let done = count.fetch_add(files.len() as u64, Ordering::Relaxed) + files.len() as u64;
    observer.on(&Event::Advanced { done });
    Ok((Folder { path: folder.to_owned(), files }, folders, links))
}

/// Images and volumes of a folder, and its other files. A folder with DICOM files is one volume, unless its name says that they
/// are masks.
fn kinds(root: &Path, folder: &Folder) -> (Vec<TreeFile>, Vec<Skipped>) {
    let (mut files, mut others) = (Vec::new(), Vec::new());
    let mut has_images = false;
    let named = |path: &Path, kind, masks| {
        let inside = path.strip_prefix(root).unwrap_or(path).components();
        let parts: Option<Vec<&str>> = inside.map(|part| part.as_os_str().to_str()).collect();
        let skipped = |reason: String| Skipped { path: path.to_owned(), reason };
        let name = parts.ok_or_else(|| skipped(NOT_UTF8.into()))?.join("/");
        // a table has a folder before it
        if !is_nameable(&format!("/{name}")) {
            return Err(skipped(format!("{UNNAMEABLE}; rename it")));
        }
        Ok(TreeFile { path: path.to_owned(), name, kind, masks })
    };
    let mut add = |found| match found {
        Ok(file) => files.push(file),
        Err(skipped) => others.push(skipped),
    };
    for path in &folder.files {
        let kind = match kind_of(path) {
            Ok(Some(Found::Dicom)) => match (masks_header(path), is_of_masks(&folder.path)) {
                (Some(header), _) => {
                    add(named(path, FileKind::SeriesMasks, Some(header)));
                    continue;
                }
                (None, true) => FileKind::Volume,
                (None, false) => {
                    has_images = true;
                    continue;
                }
            },
            Ok(Some(Found::File(kind))) => kind,
            Ok(None) => continue,
            Err(reason) => {
                add(Err(Skipped { path: path.clone(), reason }));
                continue;
            }
        };
        add(named(path, kind, None));
    }
    if has_images {
        let path = if folder.path == root { folder.path.join(".") } else { folder.path.clone() };
        add(named(&path, FileKind::Series, None));
    }
    (files, others)
}

fn is_of_masks(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| super::super::layouts::is_mask_word(&name.to_string_lossy()))
}

enum Found {
    /// One of the files of a series.
    Dicom,
    File(FileKind),
}

/// What a file is; `None` for the voxels of another file.
///
/// # Errors
/// Why it is neither image nor volume.
fn kind_of(path: &Path) -> Result<Option<Found>, String> {
    /// Endings of texts, which are not opened as volumes.
    const TEXTS: [&str; 12] = ["txt", "csv", "tsv", "json", "geojson", "xml", "md", "pdf", "html", "py", "xlsx", "log"];
    if path.file_name().is_some_and(|name| name.eq_ignore_ascii_case("DICOMDIR")) {
        return Err("a directory of DICOM files".into());
    }
    if is_flat_image(path) || is_other_image(path) {
        return Ok(Some(Found::File(FileKind::Image)));
    }
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if !TEXTS.contains(&ending.as_str()) {
        match of_volume(path) {
            Ok(_) if has_voxels_only(path) => return Ok(None),
            Ok(Some(format)) if format.is_series && ending != "zip" => return Ok(Some(Found::Dicom)),
            Ok(Some(_)) => return Ok(Some(Found::File(FileKind::Volume))),
            Ok(None) => {}
            Err(error) => return Err(format!("cannot be read: {error}")),
        }
    }
    let is_empty = || path.metadata().is_ok_and(|found| found.len() == 0);
    // a YOLO file of an image without objects is empty
    if is_annotation(path) || (ending == "txt" && is_empty()) {
        return Ok(Some(Found::File(FileKind::Outlines)));
    }
    if is_empty() {
        return Err("the file is empty".into());
    }
    Err(annotation_file::kind_of(path).map_or(NOT_AN_IMAGE.into(), |kind| format!("{IS_A} {kind}")))
}
