//! Tests of preparations from COCO, LabelMe and YOLO files, in folders as these programs make them.

use std::fs;

use image::{GrayImage, Luma};
use serde_json::{Value, json};

use super::tests::{Folders, folders};
use super::*;
use prsmed_base::event::Silent;

fn run(f: &Folders, change: impl FnOnce(&mut PrepareOptions)) -> Result<PrepareReport> {
    let mut options = PrepareOptions { val_frac: 0.0, test_frac: 0.0, ..f.options() };
    change(&mut options);
    prepare(&options, &Silent)
}

/// An image of 60 x 40 pixels, different for each name.
fn image(f: &Folders, name: &str) {
    let path = f.images.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let seed = name.bytes().fold(7, |seed: u32, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    let value = |x: u32, y: u32| (x * 7919 + y * 104_729).wrapping_mul(seed | 1) >> 24;
    GrayImage::from_fn(60, 40, |x, y| Luma([value(x, y).to_le_bytes()[0]])).save(path).unwrap();
}

fn write(f: &Folders, name: &str, text: &str) {
    let path = f.masks.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Corners of a rectangle.
fn square([left, top, right, bottom]: [u32; 4]) -> Value {
    json!([left, top, right, top, right, bottom, left, bottom])
}

/// A COCO file with the categories `polyp` and `large_cyst`: image, category and corners of each object.
fn coco(images: &[&str], objects: &[(usize, usize, [u32; 4])]) -> String {
    let images: Vec<Value> = images
        .iter()
        .zip(0..)
        .map(|(name, id)| json!({"id": id, "file_name": name, "width": 60, "height": 40}))
        .collect();
    let object = |(id, (image, category, corners)): (usize, &(usize, usize, [u32; 4]))| json!({"id": id, "image_id": image, "category_id": category, "segmentation": [square(*corners)], "iscrowd": 0});
    let annotations: Vec<Value> = objects.iter().enumerate().map(object).collect();
    let categories = json!([{"id": 0, "name": "polyp"}, {"id": 1, "name": "large_cyst"}, {"id": 2, "name": "unused"}]);
    json!({"images": images, "annotations": annotations, "categories": categories}).to_string()
}

fn labelme(name: &str, objects: &[(&str, [u32; 4])]) -> String {
    let shape = |(label, [a, b, c, d]): &(&str, [u32; 4])| json!({"label": label, "points": [[a, b], [c, d]], "shape_type": "rectangle", "flags": {}});
    let shapes: Vec<Value> = objects.iter().map(shape).collect();
    json!({"version": "5.4.1", "shapes": shapes, "imagePath": name, "imageHeight": 40, "imageWidth": 60}).to_string()
}

/// Names of the masks with their numbers of foreground pixels.
fn masks(f: &Folders) -> Vec<(String, usize)> {
    let entries = prsmed_base::files::visible_entries(&f.out.join("lung_CT/train_masks")).unwrap();
    let count =
        |path: &PathBuf| image::open(path).unwrap().into_luma8().iter().map(|value| usize::from(*value) / 255).sum();
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    entries.iter().map(|path| (name(path), count(path))).collect()
}

fn named(found: &[(String, usize)]) -> Vec<(&str, usize)> {
    found.iter().map(|(name, count)| (name.as_str(), *count)).collect()
}

/// Names and reasons of skipped files.
fn skipped(report: &PrepareReport) -> Vec<String> {
    let name = |skip: &Skipped| skip.path.file_name().unwrap().to_string_lossy().into_owned();
    report.skipped.iter().map(|skip| format!("{}: {}", name(skip), skip.reason)).collect()
}

#[test]
fn a_coco_file_gives_one_mask_for_each_label_of_an_image() {
    for in_folder in [false, true] {
        let f = folders();
        for name in ["P1/a.png", "P2/a.png", "P2/b.png", "c.png", "empty.png", "other.png"] {
            image(&f, name);
        }
        let text = coco(
            &[r"scans\P1\a.png", "P2/a.png", "b.png", "c.png", "empty.png", "lost.png"],
            &[
                (0, 0, [1, 1, 4, 4]),
                (0, 0, [10, 10, 12, 14]),
                (1, 1, [0, 0, 60, 2]),
                (2, 0, [1, 1, 2, 3]),
                (3, 1, [0, 0, 5, 5]),
            ],
        );
        write(&f, "instances.json", &text);
        let report = run(&f, |options| {
            if !in_folder {
                options.masks[0].push("instances.json");
            }
        });
        let report = report.unwrap();
        assert_eq!(
            named(&masks(&f)),
            [("P1_a_polyp", 17), ("P2_a_large_cyst", 120), ("P2_b_polyp", 2), ("c_large_cyst", 25)]
        );
        assert_eq!(
            skipped(&report),
            [
                "other.png: the annotation file does not have this image",
                "instances.json#empty.png: the mask is empty",
                "instances.json#lost.png: no image of this name"
            ]
        );
        let rows = fs::read_to_string(f.out.join("annotations/lung_CT.csv")).unwrap();
        assert!(rows.contains("large cyst") && rows.contains("polyp") && !rows.contains("lesion"), "{rows}");
    }
    let f = folders();
    for name in ["a.png", "b.png"] {
        image(&f, name);
    }
    write(&f, "x.json", &coco(&["a.png", "b.png"], &[(0, 0, [1, 1, 4, 4]), (1, 1, [0, 0, 5, 5])]));
    let report = run(&f, |options| options.negatives = Negatives::Usual).unwrap();
    assert_eq!((report.images, report.absent), (2, 2));
    assert_eq!(named(&masks(&f)), [("a_large_cyst", 0), ("a_polyp", 9), ("b_large_cyst", 25), ("b_polyp", 0)]);
}

#[test]
fn labelme_files_lie_in_their_own_folder_or_beside_the_images() {
    for is_beside in [false, true] {
        let mut f = folders();
        if is_beside {
            f.masks = f.images.clone();
        }
        for name in ["a.png", "b.png", "renamed.png", "none.png"] {
            image(&f, name);
        }
        write(&f, "a.json", &labelme("..\\images\\a.png", &[("tumour", [1, 1, 4, 4]), ("tumour", [8, 8, 10, 10])]));
        write(&f, "b.json", &labelme("b.png", &[("tumour", [50, 30, 70, 50])]));
        write(&f, "renamed.json", &labelme("IMG_0001.png", &[("tumour", [1, 1, 2, 2])]));
        write(&f, "notes.txt", "some notes");
        let report = run(&f, |_| {}).unwrap();
        assert_eq!(named(&masks(&f)), [("a", 13), ("b", 100), ("renamed", 1)]);
        assert_eq!(skipped(&report), ["none.png: no mask with this stem", "notes.txt: no image with this stem"]);
        let text = &report.notes[0];
        assert!(text.contains("the label `tumour`, and questions call them `lesion`"), "{text}");
        assert!(report.findings.texts()[0].starts_with("masks of outlines that reach beyond the image"));
    }
}

#[test]
fn yolo_files_lie_in_folders_of_splits() {
    let f = folders();
    for name in ["train/a.png", "val/a.png", "train/background.png"] {
        image(&f, name);
    }
    let line = "0.1 0.1 0.2 0.1 0.2 0.2 0.1 0.2";
    write(&f, "labels/train/a.txt", &format!("0 {line}\n1 0.5 0.5 1 0.5 1 1 0.5 1\n"));
    write(&f, "labels/val/a.txt", &format!("0 {line}\n"));
    write(&f, "labels/train/background.txt", "");
    write(&f, "data.yaml", "path: .\ntrain: images/train\nnames:\n  0: polyp\n  1: cyst\n");
    let report = run(&f, |_| {}).unwrap();
    assert_eq!(named(&masks(&f)), [("train_a_cyst", 600), ("train_a_polyp", 24), ("val_a_polyp", 24)]);
    assert_eq!(skipped(&report), ["background.txt: the mask is empty"]);
    fs::remove_file(f.masks.join("data.yaml")).unwrap();
    let error = run(&f, |options| options.modality = "other".into()).unwrap_err();
    assert!(error.to_string().contains("has 2 labels, of which `0` is a number without a name"), "{error}");
    assert!(error.hint().contains("classes.txt"));
}

#[test]
fn what_is_ambiguous_or_unreadable_is_said_with_the_file() {
    let refused = |f: &Folders, change: &dyn Fn(&mut PrepareOptions)| {
        let error = run(f, change).unwrap_err();
        assert!(!f.out.exists(), "nothing is written");
        format!("{error}; {}", error.hint())
    };
    let f = folders();
    for name in ["P1/a.png", "P2/a.png", "b.png"] {
        image(&f, name);
    }
    let check = |files: &[(&str, String)], reason: &str| {
        for (name, text) in files {
            write(&f, name, text);
        }
        let text = refused(&f, &|_| {});
        assert!(text.contains(reason), "{text}");
        for (name, _) in files {
            fs::remove_file(f.masks.join(name)).unwrap();
        }
    };
    let of_a = coco(&["a.png"], &[(0, 0, [1, 1, 4, 4])]);
    let of_b = coco(&["b.png"], &[(0, 0, [1, 1, 4, 4])]);
    check(&[("x.json", of_a.clone())], "x.json#a.png: may be for each of `");
    check(&[("x.json", of_a.clone()), ("y.json", of_b.clone())], "name one of them: `");
    check(&[("x.json", coco(&["P1/a.png", "old/P1/a.png"], &[]))], "x.json#P1/a.png` is for the same image");
    check(&[("x.json", coco(&["P3/a.png"], &[]))], "has its name in another folder");
    check(&[("x.json", coco(&["c.png"], &[]))], "has no annotations of the images in");
    check(&[("b.json", labelme("P1/a.png", &[("x", [1, 1, 4, 4])]))], "has the name of `");
    let boxes = ["P1/a.txt", "P2/a.txt", "b.txt"].map(|name| (name, "0 0.5 0.5 0.1 0.1".to_owned()));
    check(&boxes, "cannot be read: line 1: it is a box, which is no mask (export outlines");
    let labels = |a: &str, b: &str| labelme("b.png", &[(a, [1, 1, 4, 4]), (b, [6, 6, 8, 8])]);
    check(
        &[("b.json", labels("polyp", "lower left cyst"))],
        "`lower left cyst` cannot be used in a sentence about a position",
    );
    check(&[("b.json", labels("Polyp 1", "polyp-1"))], "the labels `Polyp 1` and `polyp-1`");
    let wide = labelme("b.png", &[("x", [1, 1, 4, 4])])
        .replace("\"imageWidth\":60", "\"imageWidth\":40")
        .replace("\"imageHeight\":40", "\"imageHeight\":60");
    check(
        &[("b.json", wide.clone())],
        "is for an image of 40 x 60 pixels, and the image has 60 x 40; one of them is turned by 90 degrees",
    );
    write(&f, "b.json", &labelme("b.png", &[("x", [1, 1, 4, 4])]));
    let text = refused(&f, &|options| options.labels = "1".parse().unwrap());
    assert!(text.contains("argument `labels`") && text.contains("has outlines, whose labels have names"), "{text}");
    let text = refused(&f, &|options| options.slices.every = 2);
    assert!(text.contains("is a folder of images, not of volumes"), "{text}");
    // a folder with images of masks is one of masks
    f.mask("b.png", 255, &[(1, 1, 4, 4)]);
    let report = run(&f, |_| {}).unwrap();
    assert_eq!(skipped(&report), ["b.json: is not an image but a LabelMe file with shapes"]);
}
