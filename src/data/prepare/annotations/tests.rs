//! Tests of annotation files: masks equal those of `pycocotools`, and bad files are refused by what is wrong.

use std::fs;

use image::GrayImage;
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

const SIZE: (u32, u32) = (12, 8);

fn file(name: &str, content: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    (folder, path)
}

/// A COCO file of one image with one object.
fn coco(segmentation: &Value, (width, height): (u32, u32)) -> Value {
    json!({
        "info": {"description": "x"},
        "images": [{"id": 7, "file_name": "a.png", "width": width, "height": height, "license": 1}],
        "annotations": [{
            "id": 17, "image_id": 7, "category_id": 2, "iscrowd": 0, "bbox": [0, 0, 1, 1], "area": 1,
            "segmentation": segmentation
        }],
        "categories": [{"id": 1, "name": "cyst", "supercategory": ""}, {"id": 2, "name": "polyp"}]
    })
}

fn mask_of(name: &str, content: impl AsRef<[u8]>, selection: Option<&str>, size: (u32, u32)) -> Result<DrawnMask> {
    let (_keep, path) = file(name, content);
    AnnotationFile::open(&path)?.mask(selection, size)
}

/// Numbers of the set pixels, row by row.
fn set(drawn: &DrawnMask) -> Vec<usize> {
    assert!(drawn.mask.iter().all(|value| [0, 255].contains(value)));
    (0..).zip(drawn.mask.iter()).filter(|(_, value)| **value > 0).map(|(at, _)| at).collect()
}

/// The pixels of a rectangle in an image of [`SIZE`], from a first to a last column and row.
fn rectangle(columns: [usize; 2], rows: [usize; 2]) -> Vec<usize> {
    (rows[0]..=rows[1]).flat_map(|row| (columns[0]..=columns[1]).map(move |column| 12 * row + column)).collect()
}

#[derive(Deserialize)]
struct Case {
    size: (u32, u32),
    segmentation: Value,
    bits: String,
}

#[test]
fn masks_equal_those_of_pycocotools() {
    #[derive(Deserialize)]
    struct Fixture {
        cases: Vec<Case>,
    }
    let text = include_str!("../../../../tests/fixtures/annotations.json");
    let Fixture { cases } = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 120);
    let (mut num_set, mut num_clear) = (0, 0);
    for (number, Case { size, segmentation, bits }) in cases.iter().enumerate() {
        let byte = |at: usize| u8::from_str_radix(&bits[2 * at..2 * at + 2], 16).unwrap();
        let wanted: Vec<usize> =
            (0..(size.0 * size.1) as usize).filter(|at| byte(at / 8) >> (7 - at % 8) & 1 > 0).collect();
        let drawn = mask_of("a.json", coco(segmentation, *size).to_string(), Some("a.png#polyp"), *size);
        match drawn {
            Ok(drawn) => assert_eq!(set(&drawn), wanted, "case {number}: {segmentation}"),
            // all that is smaller than a pixel or outside is refused
            Err(error) => assert!(wanted.is_empty(), "case {number}: {error}"),
        }
        num_set += wanted.len();
        num_clear += usize::from(wanted.is_empty());
    }
    assert!(num_set > 5000 && num_clear < 30, "{num_set} pixels, {num_clear} empty masks");
}

fn refused(name: &str, content: impl AsRef<[u8]>) -> String {
    let error = mask_of(name, content, name.ends_with("coco.json").then_some("a.png"), SIZE).unwrap_err();
    assert!(error.to_string().contains(name) && !error.hint().is_empty(), "{error}");
    error.to_string()
}

#[test]
fn coco_files_that_contradict_themselves_are_refused() {
    let square = json!([[2, 2, 6, 2, 6, 5, 2, 5]]);
    let changed = |pointer: &str, value: Value| {
        let mut file = coco(&square, SIZE);
        *file.pointer_mut(pointer).unwrap() = value;
        refused("coco.json", file.to_string())
    };
    let one = coco(&square, SIZE);
    let [image, annotation, category] = ["images", "annotations", "categories"].map(|key| one[key][0].clone());
    let renamed = json!({"id": 7, "file_name": "b.png"});
    let same_name = json!({"id": 8, "file_name": "a.png"});
    let other = json!({"id": 1, "name": "other"});
    for (pointer, value, reason) in [
        ("/images/0/width", json!(8), "is for an image of 8 x 8 pixels, and the image has 12 x 8"),
        ("/images", json!([]), "names no images"),
        ("/images", json!([image, renamed]), "has two images with the id 7"),
        ("/images", json!([image, same_name]), "has two images with the file name `a.png`"),
        ("/images/0/width", json!("wide"), "invalid type"),
        ("/images/0/id", json!(1.5), "an id is neither a whole number nor text"),
        ("/annotations/0/image_id", json!(9), "annotation 17 is of the image 9, which is not in the file"),
        ("/annotations/0/category_id", json!(3), "annotation 17 is of the category 3, which is not in the file"),
        ("/annotations/0/segmentation", json!([]), "has boxes only"),
        ("/annotations/0/segmentation", json!(null), "has boxes only"),
        ("/annotations/0/segmentation", json!([[1, 2, 3]]), "an outline has 3 numbers"),
        ("/annotations/0/segmentation", json!([[1, 2, 3, 4]]), "annotation 17 (`polyp`) has an outline of 2 points"),
        ("/annotations/0/segmentation", json!([1, 2, 3, 4, 5, 6]), "invalid type"),
        ("/annotations/0/segmentation", json!([[1, 2, 3, 4, 5, null]]), "invalid type: null"),
        ("/annotations/0/segmentation", json!([[40, 2, 46, 2, 46, 5]]), "(`polyp`) is outside of its image of 12 x 8"),
        (
            "/annotations/0/segmentation",
            json!([[1e9, 2, 3, 4, 5, 6]]),
            "the point (1000000000.0, 2.0), which is in no image",
        ),
        (
            "/annotations/0/segmentation",
            json!([[2.1, 2.1, 2.3, 2.1, 2.3, 2.3]]),
            "without any pixel: all are smaller than one",
        ),
        ("/annotations/0/segmentation", json!({"size": [8, 12]}), "missing field `counts`"),
        ("/annotations/0/segmentation", json!({"counts": [3, -1]}), "neither whole numbers from 0 on nor text"),
        (
            "/annotations/0/segmentation",
            json!({"size": [8, 12], "counts": [90, 5]}),
            "95 pixels instead of 12 x 8 = 96",
        ),
        ("/annotations/0/segmentation", json!({"size": [12, 8], "counts": [96]}), "turned by 90 degrees"),
        (
            "/annotations",
            json!([annotation, {"id": 18, "image_id": 7, "category_id": 2}]),
            "annotation 18 (`polyp`) is a box",
        ),
        ("/annotations/0/iscrowd", json!("no"), "`iscrowd` is neither 0 nor 1"),
        ("/categories", json!([category, other]), "has two categories with the id 1: `cyst` and `other`"),
    ] {
        let text = changed(pointer, value);
        assert!(text.contains(reason), "{pointer}: {text}");
    }
}

#[test]
fn damaged_json_is_refused_with_its_place() {
    let one = coco(&json!([[2, 2, 6, 2, 6, 5, 2, 5]]), SIZE).to_string();
    for (text, reason) in [
        (r#"{"images": [], "annotations": []}"#.to_owned(), "missing field `categories`"),
        (one.replace("[2,2,", "[NaN,2,"), "expected value at line 1"),
        (one[..200].to_owned(), "EOF"),
        (one.replace("17", "1e999"), "number out of range"),
    ] {
        let found = refused("coco.json", text);
        assert!(found.contains(reason), "{found}");
    }
}

#[test]
fn objects_of_a_label_are_joined_and_chosen_by_the_path() {
    let mut file_of = coco(&json!([[2, 2, 6, 2, 6, 5, 2, 5]]), SIZE);
    let annotations = file_of["annotations"].as_array_mut().unwrap();
    let size = json!([8, 12]);
    annotations.push(json!({"image_id": 7.0, "category_id": 2, "iscrowd": true, "segmentation": {"size": size, "counts": [80, 8, 8]}}));
    annotations
        .push(json!({"image_id": 7, "category_id": 1, "segmentation": [[-20, 6, 12, 6, 12, 8, -20, 8], [0, 0]]}));
    file_of["images"].as_array_mut().unwrap().push(json!({"id": "x", "file_name": "b#1.png"}));
    for mark in ["", "\u{feff}"] {
        let (_keep, path) = file("coco.json", format!("{mark}{file_of}"));
        let opened = AnnotationFile::open(&path).unwrap();
        let mask = |selection: &str| opened.mask(Some(selection), SIZE);
        let polyps: Vec<usize> = set(&mask("a.png#polyp").unwrap());
        let mut wanted = rectangle([2, 5], [2, 4]);
        wanted.extend(rectangle([10, 10], [0, 7]));
        wanted.sort_unstable();
        assert_eq!((polyps, mask("a.png#polyp").unwrap().notes), (wanted, BTreeSet::from([CROWD])));
        let cyst = mask("a.png#cyst").unwrap();
        assert_eq!((set(&cyst), cyst.notes.len()), (rectangle([0, 11], [6, 7]), 2));
        assert_eq!(set(&mask("a.png").unwrap()).len(), 12 + 8 + 24 - 2);
        assert!(set(&mask("b#1.png").unwrap()).is_empty() && set(&mask("b#1.png#!cyst").unwrap()).is_empty());
        for (selection, reason) in [
            ("b#1.png#cyst", "has no object with the label `cyst`; its labels: none"),
            ("a.png#tumour", "has no object with the label `tumour`; its labels: `cyst`, `polyp`"),
            ("a.png#!cyst", "has objects with the label `cyst`"),
            ("c.png", "has no image `c.png`, but `a.png`, `b#1.png`"),
        ] {
            assert!(mask(selection).unwrap_err().to_string().contains(reason), "{selection}");
        }
        let paths: Vec<PathBuf> = opened.images().iter().map(|image| opened.path_of(image, None)).collect();
        let known = AnnotationFiles::default();
        let found: Vec<usize> = paths.iter().map(|path| set(&known.mask(path, SIZE).unwrap().unwrap()).len()).collect();
        assert_eq!(found, [42, 0]);
    }
}

/// A LabelMe file of one shape.
fn labelme(shape: &Value) -> String {
    let mut shape = shape.clone();
    shape["label"] = json!("polyp");
    let image = json!({"imagePath": "..\\scans\\a.png", "imageData": "AAAA", "imageHeight": 8, "imageWidth": 12});
    let mut file = json!({"version": "5.5.0", "flags": {}, "shapes": [shape]});
    file.as_object_mut().unwrap().extend(image.as_object().unwrap().clone());
    file.to_string()
}

fn png_text(mask: &GrayImage) -> String {
    use base64::Engine as _;
    let mut bytes = std::io::Cursor::new(Vec::new());
    mask.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    base64::engine::general_purpose::STANDARD.encode(bytes.into_inner())
}

#[test]
fn shapes_of_labelme_cover_what_their_type_says() {
    let patch = GrayImage::from_fn(3, 2, |x, y| image::Luma([u8::from((x, y) != (0, 0))]));
    for (shape, wanted) in [
        (json!({"points": [[2, 2], [6, 2], [6, 5], [2, 5]], "shape_type": "polygon"}), rectangle([2, 5], [2, 4])),
        (json!({"points": [[2, 2], [6, 2], [6, 5], [2, 5]]}), rectangle([2, 5], [2, 4])),
        (json!({"points": [[6, 5], [2, 2]], "shape_type": "rectangle", "group_id": null}), rectangle([2, 5], [2, 4])),
        (json!({"points": [[4, 4], [4, 5.1]], "shape_type": "circle"}), rectangle([3, 4], [3, 4])),
        (
            json!({"points": [[9, 5], [11, 6]], "shape_type": "mask", "mask": png_text(&patch)}),
            vec![70, 71, 81, 82, 83],
        ),
    ] {
        let drawn = mask_of("a.json", labelme(&shape), Some("polyp"), SIZE).unwrap();
        assert_eq!(set(&drawn), wanted, "{shape}");
    }
    let large = mask_of("a.json", labelme(&json!({"points": [[6, 4], [9, 4]], "shape_type": "circle"})), None, SIZE);
    assert_eq!(set(&large.unwrap()).len(), 32, "pixels whose centres are at most 3 from a corner");
    for (shape, reason) in [
        (json!({"points": [[2, 2], [6, 2]], "shape_type": "polygon"}), "shape 1 (`polyp`) has an outline of 2 points"),
        (
            json!({"points": [[2, 2]], "shape_type": "circle"}),
            "shape 1 (`polyp`) is a circle with 1 points instead of two",
        ),
        (json!({"points": [[2, 2]], "shape_type": "point"}), "is a `point`, which has no area"),
        (json!({"points": [[2, 2], [4, 4]], "shape_type": "linestrip"}), "is a `linestrip`"),
        (json!({"points": [[2, 2]], "shape_type": "cuboid"}), "has the type `cuboid`"),
        (json!({"points": [[2, 2, 1]], "shape_type": "polygon"}), "trailing characters"),
        (json!({"points": [[0, 0], [3, 3]], "shape_type": "mask"}), "its field `mask` is empty"),
        (json!({"points": [[0, 0], [3, 3]], "shape_type": "mask", "mask": "%"}), "no base64"),
        (json!({"points": [[0, 0], [3, 3]], "shape_type": "mask", "mask": "AAAA"}), "has a mask that"),
        (
            json!({"points": [[0, 0], [3, 3]], "shape_type": "mask", "mask": png_text(&patch)}),
            "has a mask of 3 x 2 pixels, but its points are the corners of 4 x 4",
        ),
        (
            json!({"points": [[1e300, 0], [2, 2]], "shape_type": "circle"}),
            "has the point (1e300, 0.0), which is in no image",
        ),
    ] {
        let text = refused("a.json", labelme(&shape));
        assert!(text.contains(reason), "{shape}: {text}");
    }
    // a remark beside an area
    let point = json!({"points": [[2, 2]], "shape_type": "point", "label": "polyp"});
    let both =
        labelme(&json!({"points": [[2, 2], [6, 5]], "shape_type": "rectangle"})).replace("[{", &format!("[{point},{{"));
    assert_eq!(set(&mask_of("a.json", both, None, SIZE).unwrap()).len(), 12);
    let wide = labelme(&json!({"points": []})).replace("\"imageWidth\":12", "\"imageWidth\":13");
    assert!(refused("a.json", wide).contains("is for an image of 13 x 8 pixels"));
}

#[test]
fn lines_of_yolo_are_outlines_with_names_of_classes_from_beside() {
    let folder = tempfile::tempdir().unwrap();
    let labels = folder.path().join("labels/train");
    fs::create_dir_all(&labels).unwrap();
    let path = labels.join("a.txt");
    let square = "0.25 0.25 0.5 0.25 0.5 0.75 0.25 0.75";
    fs::write(&path, format!("\u{feff}1 {square}\r\n\n0 0 0 1 0 1 1.002 0 1\n")).unwrap();
    let labels_of = || {
        AnnotationFile::open(&path)
            .map(|file| file.images()[0].labels().into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    assert_eq!(labels_of().unwrap(), ["0", "1"]);
    fs::write(folder.path().join("data.yaml"), "names: [polyp, cyst]\n").unwrap();
    assert_eq!(labels_of().unwrap(), ["cyst", "polyp"]);
    let opened = AnnotationFile::open(&path).unwrap();
    assert_eq!(set(&opened.mask(Some("cyst"), SIZE).unwrap()), rectangle([3, 5], [2, 5]));
    assert_eq!(set(&opened.mask(None, SIZE).unwrap()).len(), 96);
    // nearer names count, and two files that differ are refused
    fs::write(labels.join("classes.txt"), "one\ntwo\n").unwrap();
    assert_eq!(labels_of().unwrap(), ["one", "two"]);
    fs::write(labels.join("data.yaml"), "names: {0: one}").unwrap();
    assert!(labels_of().unwrap_err().to_string().contains("has other names of classes than"));
    fs::remove_file(labels.join("classes.txt")).unwrap();
    let error = labels_of().unwrap_err();
    assert!(error.to_string().contains("a.txt:1: the class 1 has no name in"), "{error}");
    fs::remove_file(labels.join("data.yaml")).unwrap();
    for (text, reason) in [("0 0.5 0.5 0.2 0.2", ":1: it is a box"), ("1 0 0 1 0 1 1\nx", ":2: `x` is not the number")]
    {
        fs::write(&path, text).unwrap();
        let error = AnnotationFile::open(&path).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    fs::write(&path, "").unwrap();
    assert!(set(&AnnotationFiles::default().mask(&path, SIZE).unwrap().unwrap()).is_empty());
}

#[test]
fn outlines_of_endless_length_are_refused() {
    let points: Vec<[f64; 2]> = (0..30).map(|at| [f64::from(at % 2) * 9e6, f64::from(at)]).collect();
    let runs = |points: &[[f64; 2]]| polygon::runs(points, SIZE, &mut { polygon::MAX_STEPS });
    assert!(runs(&points).unwrap_err().contains("4000000 pixels are the limit"));
    assert!(runs(&[[f64::NAN, 0.0], [1.0, 0.0], [1.0, 1.0]]).unwrap_err().contains("in no image"));
    // many objects of one mask
    let object = json!([[0, 0, 8e6, 3, 0, 6]]);
    let mut file = coco(&object, SIZE);
    let annotation = file["annotations"][0].clone();
    file["annotations"] = vec![annotation; 9].into();
    assert!(refused("coco.json", file.to_string()).contains("too long"));
}
