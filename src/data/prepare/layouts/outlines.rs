//! Layouts of annotation programs, which write files of outlines instead of masks: COCO, LabelMe and YOLO.

use super::super::annotations::{AnnotatedImage, AnnotationFile};
use super::super::scan::tree::{FileKind, Tree};
use super::annotated::{Labels, labels};
use super::folder_patients::patients;
use super::matching::{Known, Meant, Parts, nearest, parts};
use super::patterns::{Group, GroupImage, GroupMask, Groups, Layout, NO_LAYOUT, split_in, split_of};
use super::words::is_word;
use crate::annotation_file;

pub(super) const COCO: Layout = Layout {
    name: "coco",
    about: "`train/_annotations.coco.json`, `train/a.jpg`; `annotations/instances_train2017.json`, `train2017/1.jpg`",
    find: Some(|tree, free| groups(annotation_file::COCO, tree, free)),
    ..NO_LAYOUT
};

pub(super) const LABELME: Layout = Layout {
    name: "labelme",
    about: "`P1/a.jpg`, `P1/a.json`; also `images/a.jpg`, `labels/a.json`",
    find: Some(|tree, free| groups(annotation_file::LABELME, tree, free)),
    ..NO_LAYOUT
};

pub(super) const YOLO: Layout = Layout {
    name: "yolo",
    about: "`data.yaml`, `images/train/a.jpg`, `labels/train/a.txt`; also `train/images/a.jpg`, `train/labels/a.txt`",
    find: Some(|tree, free| groups(annotation_file::YOLO, tree, free)),
    ..NO_LAYOUT
};

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

/// The images of a tree with the files of one program.
fn groups(kind: &'static str, tree: &Tree, free: &[bool]) -> Groups {
    let (mut found, is_of_many) = (Groups::default(), kind == annotation_file::COCO);
    let mut sources: Vec<Source> = Vec::new();
    for outlined in tree.outlines().iter().filter(|outlined| outlined.kind == kind && free[outlined.file]) {
        match &outlined.opened {
            Ok(file) => sources.extend(file.images().iter().map(|image| (outlined.file, Some((file, image))))),
            Err(_) if !is_of_many => sources.push((outlined.file, None)),
            Err(_) => found.refused = found.refused.take().or_else(|| outlined.error()),
        }
    }
    let Some((first, _)) = sources.first() else { return found };
    let annotated = sources.iter().filter_map(|(_, source)| Some(source.as_ref()?.1));
    let labels = labels(annotated, tree.files[*first].path.parent().unwrap_or(&tree.root));
    let (labels, refused) = labels.map_or_else(|error| (Labels::new(), Some(error)), |labels| (labels, None));
    found.refused = refused;
    let is_image = |file: &usize| free[*file] && tree.files[*file].kind == FileKind::Image;
    let images: Vec<usize> = (0..tree.files.len()).filter(is_image).collect();
    for image in &images {
        let (folders, stem) = tree.files[*image].parts();
        let images = vec![GroupImage { file: *image, channel: None, part: None }];
        let split = folders.iter().find_map(|folder| split_of(folder));
        let outer: Vec<&str> = folders.into_iter().filter(|folder| split_of(folder).is_none()).collect();
        let group = Group { base: outer.join("/"), name: stem.to_owned(), images, split, ..Group::default() };
        found.groups.insert(key(*image), group);
    }
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
                found.missing.push(super::super::item::Skipped { path, reason: "its image is not here".into() });
                continue;
            }
        };
        let Some(group) = found.groups.get_mut(&key(images[image])) else { continue };
        if !group.masks.is_empty() {
            group.doubt = Some("several annotation files have the image: keep one of their masks".to_owned());
        }
        group.doubt = group.doubt.take().or(doubt);
        group.set_split(split_in(&own.name).filter(|_| is_of_many));
        group.masks.extend(masks(file, source, &labels, with_absent));
    }
    patients(&mut found, tree);
    found
}

/// The masks of an image: one for each label, if there are several.
fn masks(
    file: usize,
    source: Option<(&AnnotationFile, &AnnotatedImage)>,
    labels: &Labels,
    with_absent: bool,
) -> Vec<GroupMask> {
    let mask = |target: Option<&String>, path| GroupMask { file, target: target.cloned(), is_numbered: false, path };
    let Some((opened, image)) = source else { return vec![mask(None, None)] };
    let own = image.labels();
    let named = labels.iter().filter(|_| labels.len() > 1).filter_map(|(label, name)| {
        let is_there = own.contains(label.as_str());
        let path = if is_there { opened.path_of(image, Some(label)) } else { opened.path_of_absent(image, label) };
        (is_there || with_absent).then(|| mask(Some(name), Some(path)))
    });
    let masks: Vec<GroupMask> = named.collect();
    if masks.is_empty() { vec![mask(None, Some(opened.path_of(image, None)))] } else { masks }
}
