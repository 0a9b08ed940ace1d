//! Copies of images and spellings of patients in the division of a preparation.

use super::tests::{Folders, folders};
use super::*;
use crate::manifest::Manifest;
use crate::patient;
use image::{DynamicImage, GrayImage, Luma, Rgb, RgbImage};
use prsmed_base::event::Silent;
use std::fmt::Write;
use std::fs;

/// A picture of its own for each number, written with this ending; as colours for another file of the same pixels.
fn picture(f: &Folders, name: &str, number: u8, is_colour: bool) {
    let grey = GrayImage::from_fn(60, 40, |x, y| Luma([u8::try_from(x + y).expect("a byte") ^ number]));
    let image: DynamicImage = if is_colour {
        RgbImage::from_fn(60, 40, |x, y| Rgb([grey.get_pixel(x, y).0[0]; 3])).into()
    } else {
        grey.into()
    };
    image.save(f.images.join(name)).unwrap();
    let stem = stem_without_suffix(name);
    f.mask(&format!("{stem}.png"), 255, &[(2, 2, 9, 9)]);
}

/// The splits of all images of the data root by the number of their picture, which their names begin with.
fn splits_of_pictures(f: &Folders) -> BTreeMap<String, BTreeSet<Split>> {
    let mut splits: BTreeMap<String, BTreeSet<Split>> = BTreeMap::new();
    for row in Manifest::open(&f.out, None).unwrap().rows {
        let name = row.image_path.file_stem().unwrap().to_string_lossy().into_owned();
        splits.entry(name.split('_').next().unwrap().to_owned()).or_default().insert(row.split);
    }
    splits
}

#[test]
fn copies_in_other_files_and_formats_are_in_one_split_also_over_append() {
    for seed in 0..4 {
        for are_patients in [false, true] {
            let f = folders();
            for number in 0..12 {
                picture(&f, &format!("{number:02}_a.png"), number, false);
                picture(
                    &f,
                    &format!("{number:02}_b.{}", ["png", "tif"][usize::from(number % 2)]),
                    number,
                    number % 3 == 0,
                );
            }
            let options = PrepareOptions { seed, val_frac: 0.25, test_frac: 0.25, ..f.options() };
            // a patient of its own for each file
            let patients = if are_patients { Patients::Pattern("^(.+)\\.".into()) } else { Patients::Unknown };
            let options = PrepareOptions { patients, ..options };
            let report = prepare(&options, &Silent).unwrap();
            assert!(report.notes[0].starts_with("12 image files are copies of another one"), "{:?}", report.notes);
            let checked = crate::check::check(&f.out, None, crate::labels::Labels::NONE, &Silent).unwrap();
            assert_eq!(checked.copies, 12, "as `data check` counts them");
            let before = splits_of_pictures(&f);
            assert!(before.len() == 12 && before.values().all(|splits| splits.len() == 1), "{before:?}");
            assert_eq!(before.values().flatten().collect::<BTreeSet<_>>().len(), 3, "all splits");
            (0..12).for_each(|number| picture(&f, &format!("{number:02}_later.png"), number, true));
            let report = prepare(&PrepareOptions { append: true, seed: seed + 1, ..options }, &Silent).unwrap();
            assert_eq!((report.images, report.known), (12, 24));
            assert_eq!(splits_of_pictures(&f), before);
        }
    }
}

#[test]
fn images_of_one_colour_are_no_copies() {
    let f = folders();
    for number in 0..20 {
        f.image(&format!("{number}.png"));
        f.mask(&format!("{number}.png"), 255, &[(2, 2, 9, 9)]);
    }
    let report = prepare(&PrepareOptions { val_frac: 0.5, ..f.options() }, &Silent).unwrap();
    assert_eq!((report.images_by_split["val"], report.notes.len()), (10, 0));
}

#[test]
fn a_patient_in_two_spellings_is_in_one_split() {
    let tables: [(&str, [&str; 4]); 4] = [
        ("case", ["p1", "P1", "p2", "P2"]),
        ("zeros", ["001", "1", "002", "2"]),
        ("data frame", ["1.0", "1", "2.0", "2"]),
        ("blanks", [" 7", "7 ", "8", "08"]),
    ];
    for (what, [a, b, c, d]) in tables {
        let f = folders();
        let mut table = "file,patient\n".to_owned();
        for (number, name) in [a, b, c, d, "x3", "x3", "x4", "x4", "x5", "x5", "x6", "X6"].into_iter().enumerate() {
            picture(&f, &format!("{number:02}.png"), u8::try_from(number).unwrap(), false);
            writeln!(table, "{number:02},{name}").unwrap();
        }
        let path = f.images.with_file_name("patients.csv");
        fs::write(&path, table).unwrap();
        for seed in 0..5 {
            let options = PrepareOptions { patients: Patients::Table(path.clone()), seed, ..f.options() };
            let options = PrepareOptions { val_frac: 0.3, test_frac: 0.3, ..options };
            let report = prepare(&options, &Silent).unwrap();
            assert_eq!((report.images, report.patients), (12, Some(6)), "{what}");
            assert!(
                report.spellings.as_ref().is_some_and(|text| text.contains("`x6`, `X6`")),
                "{:?}",
                report.spellings
            );
            let mut splits: BTreeMap<String, BTreeSet<Split>> = BTreeMap::new();
            for row in Manifest::open(&f.out, None).unwrap().rows {
                splits.entry(patient::key(&row.patient.unwrap()).unwrap()).or_default().insert(row.split);
            }
            assert!(splits.len() == 6 && splits.values().all(|splits| splits.len() == 1), "{what}: {splits:?}");
            fs::remove_dir_all(&f.out).unwrap();
        }
    }
}

#[test]
fn a_patient_of_another_class_in_another_spelling_keeps_the_split() {
    let f = folders();
    let table = |width: usize| -> Patients {
        let path = f.images.with_file_name(format!("{width}.csv"));
        let rows: Vec<String> = (0..12).map(|number| format!("{number:02},{:0width$}", number + 1)).collect();
        fs::write(&path, format!("file,patient\n{}\n", rows.join("\n"))).unwrap();
        Patients::Table(path)
    };
    (0..12).for_each(|number| picture(&f, &format!("{number:02}.png"), number, false));
    let options = PrepareOptions { val_frac: 0.2, test_frac: 0.2, patients: table(3), ..f.options() };
    prepare(&options, &Silent).unwrap();
    (0..12).for_each(|number| picture(&f, &format!("{number:02}.png"), 100 + number, false));
    let other = PrepareOptions { modality: "mr".into(), patients: table(1), seed: 5, ..options };
    let report = prepare(&other, &Silent).unwrap();
    assert!(report.spellings.is_some_and(|text| text.starts_with("12 patients have several spellings")));
    assert!(splits_of_pictures(&f).values().all(|splits| splits.len() == 1));
}

#[test]
fn a_word_for_a_missing_patient_joins_nothing() {
    let f = folders();
    let mut table = "file,patient\n".to_owned();
    for (number, name) in ["nan", "NaN", "", "none", "unknown", "N/A", "-", "?", "p1", "p1"].into_iter().enumerate() {
        picture(&f, &format!("f{number}.png"), u8::try_from(number).unwrap(), false);
        writeln!(table, "f{number},{name}").unwrap();
    }
    let path = f.images.with_file_name("patients.csv");
    fs::write(&path, table).unwrap();
    let report = prepare(&PrepareOptions { patients: Patients::Table(path), ..f.options() }, &Silent).unwrap();
    assert_eq!((report.patients, report.own_patients.len(), report.spellings), (Some(9), 8, None));
}

#[test]
fn a_pattern_that_makes_one_patient_of_all_is_warned_about() {
    let f = folders();
    for (number, name) in
        ["PAT_01_a", "PAT_01_b", "PAT_02_a", "PAT_02_b", "PAT_03_a", "PAT_04_a"].into_iter().enumerate()
    {
        picture(&f, &format!("{name}.png"), u8::try_from(number).unwrap(), false);
    }
    let table = f.images.with_file_name("patients.csv");
    let rows: Vec<String> = [1, 2].iter().flat_map(|n| ["a", "b"].map(|end| format!("PAT_0{n}_{end},p"))).collect();
    fs::write(&table, format!("file,patient\n{}\nPAT_03_a,p\nPAT_04_a,p\n", rows.join("\n"))).unwrap();
    let pattern = |text: &str| Patients::Pattern(text.to_owned());
    for (patients, fracs, parts) in [
        (
            pattern("^(.+?)_"),
            [0.1, 0.1],
            &[
                "one patient, `PAT`",
                "no images for `val` and `test`",
                "for example the argument `group='^([^_]+_[^_]+)_'`",
            ][..],
        ),
        (pattern("^(PAT)"), [0.0, 0.2], &["argument `group='^(PAT)'` puts all 6 images", "no images for `test`;"]),
        (Patients::Table(table), [0.2, 0.2], &["argument `patients=", "correct the column `patient`"]),
        (pattern("^(.+?)_"), [0.0, 0.0], &[]),
        (pattern("^([^_]+_[^_]+)_"), [0.25, 0.25], &[]),
        (Patients::Unknown, [0.25, 0.25], &[]),
    ] {
        let options = PrepareOptions { patients, val_frac: fracs[0], test_frac: fracs[1], ..f.options() };
        let report = prepare(&options, &Silent).unwrap();
        let text = report.one_patient.unwrap_or_default();
        assert_eq!(text.is_empty(), parts.is_empty(), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        fs::remove_dir_all(&f.out).unwrap();
    }
}
