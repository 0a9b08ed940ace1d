//! Tests of the phantom generator.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::*;
use crate::data::position::{grid, whole};
use crate::event::Silent;
use crate::location::first_location;

fn options(count: usize, seed: u64) -> PhantomOptions {
    PhantomOptions { count, seed, image_size_px: 96, ..PhantomOptions::default() }
}

/// Every file below `root` with its bytes.
fn contents(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

fn relative(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    contents(root).into_iter().map(|(path, bytes)| (path.strip_prefix(root).unwrap().to_owned(), bytes)).collect()
}

/// mask path, question, answer, position, split
fn rows(root: &Path) -> Vec<[String; 5]> {
    let mut rows = Vec::new();
    for modality in Modality::ALL {
        let mut csv = csv::Reader::from_path(root.join(format!("annotations/{}.csv", modality.folder()))).unwrap();
        rows.extend(csv.records().map(|row| [0, 1, 2, 3, 4].map(|i| row.as_ref().unwrap()[i].to_owned())));
    }
    rows
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str, seed| {
        let out = folder.path().join(name);
        generate(&out, &options(18, seed), &Silent).unwrap();
        relative(&out)
    };
    let first = make("a", 7);
    assert!(first.len() > 18 * 2);
    assert_eq!(first, make("b", 7));
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert_eq!(first, one_thread.install(|| make("c", 7)));
    assert_ne!(first, make("d", 8));
}

#[test]
fn an_image_does_not_depend_on_the_number_of_images() {
    let folder = tempfile::tempdir().unwrap();
    let images = |count: usize| {
        let out = folder.path().join(count.to_string());
        generate(&out, &options(count, 3), &Silent).unwrap();
        let files = contents(&out).into_iter().filter(|(path, _)| path.extension().is_some_and(|e| e == "png"));
        files.map(|(path, bytes)| (path.file_name().unwrap().to_owned(), bytes)).collect::<BTreeSet<_>>()
    };
    assert!(images(30).is_superset(&images(12)));
}

#[test]
fn every_row_is_correct_and_unambiguous() {
    let folder = tempfile::tempdir().unwrap();
    let options = PhantomOptions { rows_per_lesion: 2, ..options(120, 1) };
    let report = generate(folder.path(), &options, &Silent).unwrap();
    let rows = rows(folder.path());
    assert_eq!(report.rows, rows.len());
    assert_eq!(report.two_lesion_images, 60);
    let mut masks = BTreeMap::new();
    for [path, question, answer, position, split] in &rows {
        let mask = image::open(folder.path().join(path)).unwrap().to_luma8();
        assert!(mask.as_raw().iter().all(|&value| value == 0 || value == 255), "{path}");
        let region = whole(&mask).unwrap();
        assert_eq!(grid(&region, mask.dimensions()).to_string(), *position, "{path}");
        assert!(answer.contains(position.as_str()) && first_location(answer).unwrap().to_string() == *position);
        assert!(path.contains(&format!("/{split}_masks/")));
        let area = region.area_px as f64 / 96.0 / 96.0;
        assert!((0.03..0.15).contains(&area), "{path}: {area}");
        let image = folder.path().join(path.replace("_masks/", "_images/"));
        assert!(image.exists() || image.with_extension("jpg").exists(), "{path}");
        masks.insert(path.clone(), (region, mask, position.clone(), question.clone()));
    }
    let mut words = BTreeMap::<&str, usize>::new();
    for (path, (a, mask_a, position_a, question_a)) in masks.iter().filter(|(path, _)| path.ends_with("_a.png")) {
        let (b, mask_b, position_b, question_b) = &masks[&path.replace("_a.png", "_b.png")];
        assert_ne!(position_a, position_b, "{path}");
        assert!(!mask_a.as_raw().iter().zip(mask_b.as_raw()).any(|(&a, &b)| a > 0 && b > 0), "{path}");
        let (dx, dy) = (b.centroid_px.0 - a.centroid_px.0, b.centroid_px.1 - a.centroid_px.1);
        let pairs = [("left", "right"), ("upper", "lower"), ("brighter", "darker"), ("larger", "smaller")];
        let (word, other) = *pairs.iter().find(|(word, _)| question_a.contains(&format!("{word} lesion"))).unwrap();
        assert!(question_b.contains(&format!("{other} lesion")), "{question_a} {question_b}");
        *words.entry(word).or_default() += 1;
        match word {
            "left" => assert!(dx >= 24.0, "{path}: {dx}"),
            "upper" => assert!(dy >= 24.0, "{path}: {dy}"),
            "larger" => assert!(a.area_px as f64 >= AREA_RATIO * b.area_px as f64, "{path}"),
            _ => {
                let image = folder.path().join(path.replace("_masks/", "_images/"));
                let image = if image.exists() { image } else { image.with_extension("jpg") };
                let image = image::open(image).unwrap().to_luma8();
                let mean = |mask: &GrayImage, area: u64| {
                    let lit = image.as_raw().iter().zip(mask.as_raw()).filter(|(_, mask)| **mask > 0);
                    lit.map(|(&value, _)| f64::from(value)).sum::<f64>() / area as f64
                };
                assert!(mean(mask_a, a.area_px) > mean(mask_b, b.area_px) + 25.0, "{path}");
            }
        }
    }
    assert!(words["left"] + words["upper"] > 40 && words.len() == 4, "{words:?}");
}

#[test]
fn splits_and_cells_are_balanced() {
    let options = PhantomOptions { count: 1200, ..PhantomOptions::default() };
    let splits = splits(&options);
    let count = |name: &str| splits.iter().filter(|split| **split == name).count();
    assert_eq!((count("train"), count("val"), count("test")), (960, 120, 120));
    let folder = tempfile::tempdir().unwrap();
    let options = PhantomOptions { count: 108, two_lesion_frac: 0.0, image_size_px: 48, ..PhantomOptions::default() };
    generate(folder.path(), &options, &Silent).unwrap();
    let mut cells = BTreeMap::<String, usize>::new();
    for [_, _, _, position, _] in rows(folder.path()) {
        *cells.entry(position).or_default() += 1;
    }
    assert!(cells.len() == 9 && cells.values().all(|&n| (9..=15).contains(&n)), "{cells:?}");
}

#[test]
fn a_folder_with_other_content_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let report = generate(folder.path(), &options(6, 0), &Silent).unwrap();
    assert_eq!(generate(folder.path(), &options(6, 0), &Silent).unwrap(), report);
    let other = generate(folder.path(), &options(7, 0), &Silent).unwrap_err();
    assert!(other.to_string().contains("other options"), "{other}");
    let foreign = tempfile::tempdir().unwrap();
    fs::write(foreign.path().join("thesis.txt"), "do not lose").unwrap();
    let refused = generate(foreign.path(), &options(6, 0), &Silent).unwrap_err();
    assert!(refused.to_string().contains("not empty"), "{refused}");
    assert_eq!(fs::read_dir(foreign.path()).unwrap().count(), 1);
}

#[test]
fn options_out_of_range_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let refuse =
        |options: PhantomOptions| generate(&folder.path().join("new"), &options, &Silent).unwrap_err().to_string();
    assert!(refuse(PhantomOptions { count: 0, ..PhantomOptions::default() }).contains("`--count`"));
    assert!(refuse(PhantomOptions { image_size_px: 8, ..PhantomOptions::default() }).contains("`--image-size`"));
    assert!(
        refuse(PhantomOptions { val_frac: 0.6, test_frac: 0.6, ..PhantomOptions::default() }).contains("`test_frac`")
    );
    assert!(
        refuse(PhantomOptions { two_lesion_frac: f64::NAN, ..PhantomOptions::default() }).contains("`--two-lesions`")
    );
    assert!(!folder.path().join("new").exists());
}
