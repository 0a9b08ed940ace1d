//! Tests of tables of pairs as CSV files.

use std::fs;

use super::*;
use crate::fixture::Root;
use crate::manifest::Manifest;
use crate::prepare::{PrepareOptions, prepare_classes};
use prsmed_base::event::Silent;

/// A folder with images, masks and a table.
fn folder(files: &[&str]) -> Root {
    let root = Root::new();
    for file in files {
        if file.contains("mask") {
            root.mask(file, 12, 8, |x, y| if x < 5 && y < 3 { 255 } else { 0 });
        } else {
            root.image(file, 12, 8);
        }
    }
    root
}

fn read(root: &Root, text: &str) -> Result<PairTable> {
    let path = root.file("pairs.csv");
    fs::write(&path, text).expect("written");
    read_pairs(&path)
}

#[test]
fn a_table_says_all_of_its_pairs() {
    let root = folder(&["a/x.png", "b/x.png", "b/y.png", "mask/ax.png", "mask/bx1.png", "mask/bx2.png", "mask/by.png"]);
    let table = read(
        &root,
        "\u{feff}Image;mask;mask.Liver;patient;split;class;question;answer\r\n\
         a/x.png;mask/ax.png;;P1;train;us;;\r\n\
         a/x.png;;;;;;Where?;There.\r\n\
         b\\x.png;mask/bx1.png | mask/bx2.png;mask/by.png;P2;Test;ct;;\r\n\
         b/y.png;;;P2;;;;\r\n",
    )
    .expect("a table");
    let names: Vec<&str> = table.rows.iter().map(|pair| pair.name.as_str()).collect();
    assert_eq!(names, ["a_x", "b_x"]);
    let [first, second] = [&table.rows[0], &table.rows[1]];
    assert_eq!(
        (first.patient.as_deref(), first.split, first.class.as_deref()),
        (Some("P1"), Some(Split::Train), Some("us"))
    );
    assert_eq!(first.texts, [PairText { target: None, question: "Where?".into(), answer: "There.".into() }]);
    let masks = |pair: &Pair| -> Vec<(Option<String>, String)> {
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        pair.masks.iter().map(|(target, path)| (target.clone(), name(path))).collect()
    };
    let unnamed = |name: &str| (None, name.to_owned());
    let liver = (Some("Liver".to_owned()), "by.png".to_owned());
    assert_eq!(masks(second), [unnamed("bx1.png"), unnamed("bx2.png"), liver]);
    assert_eq!(table.skipped, [Skipped { path: root.path().join("b/y.png"), reason: NO_MASK.into() }]);
}

#[test]
fn patterns_stand_for_folders_and_names() {
    let root = folder(&["P 1/scan.png", "P2/scan.png", "P3/scan.png", "P 1/mask.png", "P2/mask.png", "P2/mask_2.png"]);
    let table = read(&root, "image,mask,patient\n*/scan.png,*/mask*.png,*\n").expect("a table");
    let found: Vec<_> =
        table.rows.iter().map(|pair| (pair.name.as_str(), pair.patient.as_deref(), pair.masks.len())).collect();
    assert_eq!(found, [("P 1", Some("P 1"), 1), ("P2", Some("P2"), 2)]);
    assert_eq!(table.skipped.len(), 1, "P3 has no mask");
}

#[test]
fn a_written_table_is_read_as_it_was() {
    let root = folder(&["in/a.png", "in/b.png", "in/a_mask.png", "in/b_mask.png", "in/b_mask_2.png"]);
    let path = |name: &str| root.path().join("in").join(name).canonicalize().expect("there");
    let text = |target: Option<&str>| PairText {
        target: target.map(str::to_owned),
        question: "Q, \"q\"?".into(),
        answer: "A".into(),
    };
    let rows = [
        Pair {
            patient: Some("P,1".into()),
            split: Some(Split::Val),
            class: Some("us".into()),
            labels: "1=left kidney,2+3=cyst,9=background".parse().expect("labels"),
            texts: vec![text(None), text(Some("cyst"))],
            ..Pair::new("first", path("a.png"), path("a_mask.png"))
        },
        Pair {
            masks: vec![(Some("cyst".into()), path("b_mask.png")), (Some("cyst".into()), path("b_mask_2.png"))],
            ..Pair::new("b", path("b.png"), "")
        },
    ];
    let file = root.file("out/pairs.csv");
    write_pairs(&file, rows.iter().map(|row| (row, None))).expect("written");
    let text = fs::read_to_string(&file).expect("text");
    assert!(
        text.starts_with("name,image,mask,mask.cyst,labels,patient,split,class,target,question,answer\n"),
        "{text}"
    );
    assert!(text.contains("b,../in/b.png,,../in/b_mask.png|../in/b_mask_2.png,"), "{text}");
    let mut read = read_pairs(&file).expect("read").rows;
    for pair in &mut read {
        for path in pair.masks.iter_mut().map(|(_, path)| path).chain([&mut pair.image]) {
            *path = path.canonicalize().expect("there");
        }
        pair.source.clone_from(&pair.image);
    }
    assert_eq!(read, rows);
    write_pairs(&file, rows.iter().map(|row| (row, Some("2 images fit".into())))).expect("written");
    let error = read_pairs(&file).expect_err("ambiguous").to_string();
    assert!(error.contains(":2: the line is ambiguous: 2 images fit"), "{error}");
}

#[test]
fn bad_tables_are_refused_with_file_line_and_remedy() {
    let root = folder(&["a.png", "b.png", "Mask_a.png"]);
    for (text, reason) in [
        ("image,masks\na.png,mask_a.png\n", ":1: there is no column `masks`"),
        ("image\na.png\n", ":1: column `mask` is missing"),
        ("mask,split\nmask_a.png,train\n", ":1: column `image` is missing"),
        ("image,mask,mask\na.png,x,y\n", ":1: there are two columns `mask`"),
        ("image,mask.upper left\na.png,x\n", ":1: column `mask.upper left`: `upper left` cannot be used in a sentence"),
        ("image,mask\n", "the table has no lines"),
        ("image,mask\na.png\n", ":2: 1 cell, but the header has 2"),
        ("image,mask\n,Mask_a.png\n", ":2: the column `image` is empty"),
        ("image,mask\nc.png,Mask_a.png\n", ":2: the image `c.png` does not exist"),
        (
            "image,mask\n\na.png,mask_a.png\n",
            ":3: the mask `mask_a.png` does not exist; `Mask_a.png` differs from it in",
        ),
        ("image,mask\n*.jpg,Mask_*.png\n", ":2: no file fits the image `*.jpg`"),
        ("image,mask\na.png|b.png,Mask_a.png\n", ":2: `a.png|b.png` names several images"),
        ("image,mask,split\na.png,Mask_a.png,training\n", ":2: split `training` is not one of"),
        ("image,mask,question\na.png,Mask_a.png,Where?\n", ":2: a question has no answer"),
        ("image,mask,name\na.png,Mask_a.png,x/y\n", ":2: the name `x/y` is no part of a file name"),
        ("image,mask,labels\na.png,Mask_a.png,1-2\n", ":2: `1-2` has no name"),
        ("image,mask,labels,target\na.png,Mask_a.png,1=cyst,cyst\n", ":2: the line has the target `cyst`, and labels"),
        ("image,mask,patient\na.png,Mask_a.png,1.23457E+11\n", ":2: patient `1.23457E+11` is a number"),
        ("image,mask,patient\na.png,Mask_a.png,P1\na.png,,P2\n", ":3: `"),
        ("image,mask,name\na.png,Mask_a.png,x\nb.png,Mask_a.png,x\n", "is a second image of the name `x`"),
        ("image,mask\nl\u{e9}sion.png,x\n", "`l\u{e9}sion.png` does not exist"),
    ] {
        let error = read(&root, text).expect_err(text);
        assert!(error.to_string().contains(reason) && !error.hint().is_empty(), "{text}: {error}");
        assert!(error.to_string().contains("pairs.csv") || reason.starts_with("is a second"), "{error}");
    }
    let path = root.file("latin.csv");
    fs::write(&path, b"image,mask\nl\xe9sion.png,x\n").expect("written");
    assert!(read_pairs(&path).expect_err("Latin-1").to_string().contains("latin.csv:2: the line is not UTF-8"));
}

#[test]
fn classes_become_modalities_and_labels_targets() {
    let root = folder(&["us/a.png", "us/b.png", "ct/c.png", "us/mask_a.png", "us/mask_b.png"]);
    root.mask("ct/labels.png", 12, 8, |x, y| if y > 3 { 0 } else { u8::from(x < 4) + 3 * u8::from(x > 8) });
    let header = "image,mask,class,target,labels,patient\n";
    let lines = "us/a.png,us/mask_a.png,us,cyst,,P1\nus/b.png,us/mask_b.png,us,nodule,,P2\n";
    let out = root.path().join("out");
    let options = |modality: &str| PrepareOptions::new(root.path(), root.path(), modality, &out);
    let prepare = |text: &str, modality: &str| {
        prepare_classes(read(&root, &format!("{header}{lines}{text}"))?, &options(modality), &Silent)
    };
    let error = prepare("ct/c.png,ct/labels.png,,,1=liver,P1\n", "").expect_err("no class").to_string();
    assert!(error.contains("`modality`") && error.contains("ct/c.png` has no class"), "{error}");
    let error = prepare("ct/c.png,ct/labels.png,up/per,,1=liver,P1\n", "").expect_err("a bad class").to_string();
    assert!(error.contains("`up/per` is not a folder name") && !out.exists(), "{error}");
    // the label 3 has no name
    let error = prepare("ct/c.png,ct/labels.png,,,1=liver,P1\n", "ct").expect_err("an unknown label").to_string();
    assert!(error.contains("labels that are not among `1=liver`: 3 (12); add `3=NAME`"), "{error}");
    let reports = prepare("ct/c.png,ct/labels.png,,,\"1=liver,3=background\",P1\n", "ct").expect("prepared");
    let counts: Vec<_> = reports.iter().map(|(class, report)| (class.as_str(), report.images)).collect();
    assert_eq!(counts, [("ct", 1), ("us", 2)]);
    let manifest = Manifest::open(&out, None).expect("rows");
    let stems: Vec<_> = manifest
        .rows
        .iter()
        .map(|row| row.target().mask_path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    for stem in ["c_liver", "a_cyst", "b_nodule"] {
        assert_eq!(stems.iter().filter(|found| found.ends_with(stem)).count(), 2, "{stem} in {stems:?}");
    }
    let split = |stem: &str| {
        manifest.rows.iter().find(|row| row.target().mask_path.to_string_lossy().contains(stem)).unwrap().split
    };
    assert_eq!(split("c_liver"), split("a_cyst"), "one patient, one split");
}

/// A LabelMe file with a square for each label.
fn labelme(root: &Root, name: &str, labels: &[&str]) {
    let shapes: Vec<_> = labels
        .iter()
        .map(|label| serde_json::json!({"label": label, "points": [[1, 1], [4, 1], [4, 4], [1, 4]], "shape_type": "polygon"}))
        .collect();
    fs::write(root.file(name), serde_json::json!({"shapes": shapes}).to_string()).expect("written");
}

#[test]
fn cells_name_files_of_outlines_and_columns_their_labels() {
    let root = folder(&["a.png", "b.png"]);
    labelme(&root, "a.json", &["left_cyst", "polyp"]);
    labelme(&root, "b.json", &["polyp"]);
    let coco = r#"{"images": [{"id": 1, "file_name": "x/a.png"}, {"id": 2, "file_name": "b.png"}], "categories": [{"id": 1,
                   "name": "polyp"}], "annotations": [{"image_id": 2, "category_id": 1, "segmentation": [[1, 1, 4, 1, 4, 4]]}]}"#;
    fs::write(root.file("all.json"), coco).expect("written");
    let masks = |text: &str| -> Vec<String> {
        let name = |(target, path): &(Option<String>, PathBuf)| {
            let path = path.strip_prefix(root.path()).expect("below").display().to_string();
            target.as_ref().map_or(path.clone(), |target| format!("{target}={path}"))
        };
        let table = read(&root, text).expect("a table");
        table.rows.iter().flat_map(|pair| pair.masks.iter().map(name)).collect()
    };
    assert_eq!(
        masks("image,mask.Left cyst,mask.polyp\na.png,a.json,a.json\nb.png,b.json,b.json\n"),
        ["Left cyst=a.json#left_cyst", "polyp=a.json#polyp", "Left cyst=b.json#!Left cyst", "polyp=b.json#polyp"]
    );
    assert_eq!(masks("image,mask\na.png,a.json\nb.png,b.json#polyp\n"), ["a.json", "b.json#polyp"]);
    assert_eq!(masks("image,mask\na.png,all.json#x/a.png\nb.png,all.json\n"), ["all.json#x/a.png", "all.json#b.png"]);
    assert_eq!(masks("image,mask.polyp\nb.png,all.json\n"), ["polyp=all.json#b.png#polyp"]);
    for (text, reason) in [
        (
            "image,mask.lesion\na.png,a.json\n",
            "no annotation file has the label `lesion`: they have only `left_cyst`, `polyp`",
        ),
        ("image,mask\nc.png,all.json\n", "all.json: has no annotations of the image"),
    ] {
        root.image("c.png", 12, 8);
        let error = read(&root, text).expect_err(text);
        assert!(error.to_string().contains(reason) && !error.hint().is_empty(), "{error}");
    }
}

#[test]
fn an_image_without_the_mask_of_its_pattern_says_what_its_line_looks_for() {
    let root = folder(&["P1/scan.png", "P2/scan.png", "P1/mask.png"]);
    let table = read(&root, "image,mask,patient\n*/scan.png,*/mask.png,*\n").expect("a table");
    assert_eq!(table.rows.len(), 1);
    let reason = format!("{NO_MASK}: no file fits `*/mask.png` of line 2");
    assert_eq!(table.skipped, [Skipped { path: root.path().join("P2/scan.png"), reason }]);
}
