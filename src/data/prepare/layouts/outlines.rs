//! Layouts of annotation programs, which write files of outlines instead of masks: COCO, LabelMe and YOLO.

use super::super::annotations::{AnnotatedImage, AnnotationFile};
use super::super::item::Skipped;
use super::super::scan::tree::{FileKind, Tree};
use super::annotated::{Labels, labels, masks_of};
use super::folder_patients::patients;
use super::matching::{Known, Meant, Parts, nearest, parts};
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_in, split_of};
use super::words::is_word;
use crate::annotation_file;

const fn program(name: &'static str, about: &'static str, find: fn(&Tree, &[bool]) -> Groups) -> Layout {
    Layout { name, about, find: Some(find), ..NO_LAYOUT }
}

pub(super) const COCO: Layout = program(
    "coco",
    "`train/_annotations.coco.json`, `train/a.jpg`; `annotations/instances_train2017.json`, `train2017/1.jpg`",
    |tree, free| groups(annotation_file::COCO, tree, free),
);

pub(super) const LABELME: Layout =
    program("labelme", "`P1/a.jpg`, `P1/a.json`; also `images/a.jpg`, `labels/a.json`", |tree, free| {
        groups(annotation_file::LABELME, tree, free)
    });

pub(super) const YOLO: Layout = program(
    "yolo",
    "`data.yaml`, `images/train/a.jpg`, `labels/train/a.txt`; also `train/images/a.jpg`, `train/labels/a.txt`",
    |tree, free| groups(annotation_file::YOLO, tree, free),
);

/// Most absent targets of images that a table says.
const MAX_ABSENT: usize = 200_000;

/// An annotated image, and the index of its file; nothing for a file that cannot be read.
type Source<'a> = (usize, Option<(&'a AnnotationFile, &'a AnnotatedImage)>);

/// The key of an image.
fn key(image: usize) -> String {
    format!("{image:09}")
}

/// Folders and name of a file as they are compared. Folders of images and of labels differ in their own names only.
fn compared(name: &str, is_of_many: bool) -> Parts {
    let all = parts(name, is_of_many).into_iter().enumerate();
    all.filter(|(number, part)| *number == 0 || is_of_many || !is_word(part)).map(|(_, part)| part).collect()
}

/// An image without masks.
fn group(file: usize, tree: &Tree) -> Group {
    let (folders, stem) = tree.files[file].parts();
    let split = folders.iter().find_map(|folder| split_of(folder));
    let outer: Vec<&str> = folders.into_iter().filter(|folder| split_of(folder).is_none()).collect();
    let images = vec![GroupImage { file, channel: None, part: None }];
    Group { base: outer.join("/"), name: stem.to_owned(), images, split, ..Group::default() }
}

/// The images of a tree with the files of one program.
fn groups(kind: &'static str, tree: &Tree, free: &[bool]) -> Groups {
    let (mut found, is_of_many) = (Groups::default(), kind == annotation_file::COCO);
    if !tree.outlines().iter().any(|outlined| outlined.kind == kind) {
        return found;
    }
    let mut sources: Vec<Source> = Vec::new();
    for outlined in tree.outlines().iter().filter(|outlined| outlined.kind == kind && free[outlined.file]) {
        match &outlined.opened {
            Ok(file) => sources.extend(file.images().iter().map(|image| (outlined.file, Some((file, image))))),
            Err(_) if !is_of_many => sources.push((outlined.file, None)),
            Err(_) => found.refused = found.refused.take().or_else(|| tree.error(outlined)),
        }
    }
    let is_image = |file: &usize| free[*file] && tree.files[*file].kind == FileKind::Image;
    let images: Vec<usize> = (0..tree.files.len()).filter(is_image).collect();
    found.groups.extend(images.iter().map(|image| (key(*image), group(*image, tree))));
    let Some((first, _)) = sources.first() else { return found };
    let annotated = sources.iter().filter_map(|(_, source)| Some(source.as_ref()?.1));
    let labels = labels(annotated, tree.files[*first].path.parent().unwrap_or(&tree.root));
    let (labels, refused) = labels.map_or_else(|error| (Labels::new(), Some(error)), |labels| (labels, None));
    found.refused = refused;
    let compare: Vec<Parts> = images.iter().map(|image| compared(&tree.files[*image].name, is_of_many)).collect();
    let known = Known::new(&compare);
    let with_absent = labels.len() * sources.len() <= MAX_ABSENT;
    for (file, source) in sources {
        let own = &tree.files[file];
        let name = source.map(|(_, image)| image.name.as_str()).filter(|_| is_of_many).unwrap_or(&own.name);
        let of_image = |number: &usize| tree.files[images[*number]].name.as_str();
        let (image, doubt) = match known.meant(&compared(name, is_of_many)) {
            Meant::File(number) => (number, None),
            Meant::Several(all) => match nearest(&own.name, &all, of_image, split_in(&own.name)).as_slice() {
                [only] => (*only, None),
                all => (all[0], Some(format!("`{name}` of `{}` may be each of {} images", own.name, all.len()))),
            },
            Meant::None(_) => {
                let path = source.map_or_else(|| own.path.clone(), |(file, image)| file.path_of(image, None));
                found.missing.push(Skipped { path, reason: "its image is not here".into() });
                continue;
            }
        };
        let Some(group) = found.groups.get_mut(&key(images[image])) else { continue };
        if !group.masks.is_empty() {
            group.doubt = Some("several annotation files have the image: keep one of their masks".to_owned());
        }
        let said = source.filter(|(_, image)| !is_of_many && !image.name.is_empty());
        if let Some(Meant::File(other)) = said.map(|(_, said)| known.meant(&compared(&said.name, false)))
            && other != image
        {
            group.doubt = Some(format!("`{}` says that it is of `{}`", own.name, of_image(&other)));
        }
        group.doubt = group.doubt.take().or(doubt);
        group.set_split(split_in(&own.name).filter(|_| is_of_many));
        let masks = source.map(|(opened, image)| masks_of(opened, image, &labels, with_absent));
        let masks = masks.unwrap_or_else(|| vec![(None, own.path.clone())]).into_iter();
        let mask = |(target, path)| GroupMask { file, target, is_numbered: false, path: Some(path) };
        group.masks.extend(masks.map(mask));
    }
    patients(&mut found, tree);
    found
}
