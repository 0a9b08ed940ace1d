//! Tests of the phantom generator.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::canvas::{Oval, bump, smooth, unit};
use super::lesion::AREA_RATIO;
use super::*;
use crate::check;
use crate::labels::Labels;
use crate::manifest::{Manifest, Presence};
use crate::position::{grid, whole};
use prsmed_base::event::Silent;
use prsmed_base::location::first_location;

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
    for modality in &MODALITIES {
        let mut csv = csv::Reader::from_path(root.join(format!("annotations/{}.csv", modality.folder))).unwrap();
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
    let mut by_modality = BTreeMap::<String, BTreeMap<String, usize>>::new();
    for [path, _, _, _, split] in &rows {
        let modality = path.split('/').next().unwrap().to_owned();
        *by_modality.entry(modality).or_default().entry(split.clone()).or_default() += 1;
    }
    assert_eq!(report.rows_by_modality, by_modality);
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
    assert!(refuse(PhantomOptions { count: 0, ..PhantomOptions::default() }).contains("argument `count`"));
    assert!(refuse(PhantomOptions { image_size_px: 8, ..PhantomOptions::default() }).contains("argument `image_size`"));
    assert!(
        refuse(PhantomOptions { val_frac: 0.6, test_frac: 0.6, ..PhantomOptions::default() }).contains("`test_frac`")
    );
    assert!(
        refuse(PhantomOptions { two_lesion_frac: f64::NAN, ..PhantomOptions::default() })
            .contains("argument `two_lesions`")
    );
    assert!(!folder.path().join("new").exists());
}

#[test]
fn images_of_a_modality_are_numbered_by_their_number_of_lesions() {
    for frac in [0.0, 0.3, 0.5, 1.0] {
        let mut seen = BTreeMap::<(usize, bool), usize>::new();
        for index in 0..120 {
            let (two, number) = plan(index, frac);
            let next = seen.entry((index % MODALITIES.len(), two)).or_default();
            assert_eq!(number, *next, "image {index}, fraction {frac}");
            *next += 1;
        }
    }
}

#[test]
fn a_smooth_step_goes_from_0_to_1_and_a_bump_from_1_to_0() {
    assert_eq!([1.0, 2.0, 3.0, 4.0, 5.0].map(|value| smooth(2.0, 4.0, value)), [0.0, 0.0, 0.5, 1.0, 1.0]);
    assert_eq!([2.0, 3.0, 4.0, 5.0, 9.0].map(|value| bump(5.0, 2.0, value)), [0.0, 0.0, 0.5, 1.0, 0.0]);
}

#[test]
fn lesions_may_lie_everywhere_in_the_body_and_the_head_but_at_the_edge() {
    // the smallest outlines that are drawn
    let outlines = [
        (&MODALITIES[0], Oval::new(0.5, 0.5, 0.475, 0.455).power(2.6)),
        (&MODALITIES[1], Oval::new(0.5, 0.5, 0.465, 0.48).power(2.2)),
    ];
    for (modality, drawn) in outlines {
        let allowed = modality.area;
        for step in 0_u8..32 {
            let (sin, cos) = (f32::from(step) / 32.0 * std::f32::consts::TAU).sin_cos();
            let reach = 1.0 / allowed.depth(0.5 + cos, 0.5 + sin);
            let depth = drawn.depth(0.5 + reach * cos, 0.5 + reach * sin);
            assert!((0.96..0.995).contains(&depth), "{}, direction {step}: {depth}", modality.folder);
        }
    }
}

/// Side of a drawing in pixels.
const SIZE: usize = 96;

/// Column and row of a pixel as fractions of the side; (0, 0) is the upper left.
fn place(pixel: usize) -> (f32, f32) {
    (unit(pixel % SIZE, SIZE), unit(pixel / SIZE, SIZE))
}

/// Mean over all images near (x, y).
fn mean_near(images: &[Vec<f32>], (x, y): (f32, f32), reach: f32) -> f32 {
    let is_near = |pixel: &usize| {
        let (column, row) = place(*pixel);
        (column - x).abs() < reach && (row - y).abs() < reach
    };
    let near: Vec<usize> = (0..SIZE * SIZE).filter(is_near).collect();
    let sum: f32 = images.iter().map(|values| near.iter().map(|&pixel| values[pixel]).sum::<f32>()).sum();
    sum / (near.len() * images.len()) as f32
}

/// Number of bright pixels in a part of an image.
fn num_bright(values: &[f32], is_part: impl Fn(f32, f32) -> bool) -> usize {
    let is_bright = |pixel: &usize| {
        let (column, row) = place(*pixel);
        values[*pixel] > 0.8 && is_part(column, row)
    };
    (0..SIZE * SIZE).filter(is_bright).count()
}

#[test]
fn a_ct_phantom_shows_organs_and_ribs_in_their_places() {
    let draw = |seed| (MODALITIES[0].draw)(&[], SIZE, &mut generator(seed, 0)).remove(0).values;
    let images: Vec<Vec<f32>> = (0..24).map(draw).collect();
    for (organ, at, level) in
        [("liver", (0.33, 0.40), 0.54), ("spleen", (0.73, 0.42), 0.57), ("spine", (0.50, 0.72), 0.70)]
    {
        let mean = mean_near(&images, at, 0.03);
        assert!((mean - level).abs() < 0.03, "{organ}: {mean}");
    }
    // the lower ends of the kidneys lean towards the spine
    for (kidney, inward) in [(0.31_f32, 0.03_f32), (0.69, -0.03)] {
        let [inner, outer] = [inward, -inward].map(|shift| mean_near(&images, (kidney + shift, 0.736), 0.02));
        assert!(inner > outer + 0.035, "kidney at {kidney}: {inner}, {outer}");
    }
    for values in &images {
        let left = num_bright(values, |x, y| x < 0.16 && (y - 0.5).abs() < 0.2);
        let right = num_bright(values, |x, y| x > 0.84 && (y - 0.5).abs() < 0.2);
        assert!(left > 0 && right > 0, "ribs at both sides: {left}, {right}");
        assert_eq!(num_bright(values, |_, y| y < 0.15), 0, "no ribs at the front");
    }
}

#[test]
fn images_without_a_lesion_have_an_empty_mask_and_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let with = PhantomOptions { absent_frac: 0.25, rows_per_lesion: 2, ..options(48, 3) };
    let report = generate(folder.path(), &with, &Silent).unwrap();
    assert!((6..=18).contains(&report.images_without_lesion), "{report:?}");
    let manifest = Manifest::open(folder.path(), None).unwrap();
    let absent: Vec<_> = manifest.rows.iter().filter(|row| row.target().presence == Presence::Absent).collect();
    assert_eq!(absent.len(), 2 * report.images_without_lesion);
    for row in absent {
        assert!(image::open(&row.target().mask_path).unwrap().to_luma8().iter().all(|value| *value == 0));
        assert!(row.position.is_none() && first_location(&row.answer).is_none(), "{}", row.answer);
        assert!(row.answer.contains("no lesion") || row.answer.contains("No lesion"), "{}", row.answer);
    }
    assert_eq!(check::check(folder.path(), None, Labels::NONE, &Silent).unwrap().bad, []);
    // the other images are those of a data root without negatives
    let all = folder.path().join("all");
    generate(&all, &PhantomOptions { rows_per_lesion: 2, ..options(48, 3) }, &Silent).unwrap();
    for row in manifest.rows.iter().filter(|row| row.target().presence == Presence::Present) {
        let path = row.image_path.strip_prefix(folder.path()).unwrap();
        assert_eq!(fs::read(&row.image_path).unwrap(), fs::read(all.join(path)).unwrap(), "{}", path.display());
    }
    // ten images of a modality have exactly their part
    let of = |kind: usize, frac| (0..100).filter(|i| i % 6 == kind && i / 6 < 10 && is_absent(5, *i, frac)).count();
    assert_eq!([of(0, 0.3), of(5, 0.3), of(2, 0.0), of(2, 1.0)], [3, 3, 0, 10]);
}
