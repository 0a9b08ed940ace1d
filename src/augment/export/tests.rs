use std::collections::BTreeSet;
use std::io::Write;

use image::Luma;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::data::check::check;
use crate::data::labels::Labels;
use crate::data::manifest::Manifest;
use crate::data::phantom::{PhantomOptions, generate};
use crate::event::Silent;
use crate::fixture;
use crate::tensor::weights::sha256;

#[test]
#[expect(clippy::too_many_lines, reason = "one export, looked at from all sides")]
fn an_exported_data_root_opens_and_passes_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let options =
        PhantomOptions { count: 12, image_size_px: 48, val_frac: 0.2, test_frac: 0.0, ..PhantomOptions::default() };
    generate(&from, &options, &Silent).unwrap();
    let source = Manifest::open(&from, None).unwrap();
    let templates = Templates::embedded();
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut export = Export::open(&to).unwrap();
    let rows: Vec<&Row> = source.rows.iter().filter(|row| row.split == Split::Train).collect();
    assert!(rows.len() > 8);
    for (index, row) in (0..).zip(&rows) {
        let image = decode::image(&row.image_path).unwrap().into_rgb8();
        let mask = decode::mask(&row.target().mask_path).unwrap();
        let accepted = index % 4 != 3;
        let moved = index % 2 == 1;
        let mode = if moved { Mode::InsertLesion } else { Mode::KeepLesion };
        let text = if moved {
            texts_of_mask(row, &mask, "lesion", "scan", &templates, &mut rng).unwrap()
        } else {
            texts_of_row(row, &mask).unwrap()
        };
        let record = Record {
            name: name(&row.image_path, mode, index),
            source_image: row.image_path.clone(),
            source_sha256: sha256(&row.image_path).unwrap(),
            mode,
            // The same text twice is one row.
            texts: vec![text.clone(), text],
            ..record(index, &row.modality, accepted)
        };
        let mask_source = if moved { MaskSource::Made(&mask) } else { MaskSource::Unchanged(&row.target().mask_path) };
        let (image_path, mask_path) = export.paths(&record);
        export.write(&image, mask_source, record).unwrap();
        assert_eq!(decode::image(&image_path).unwrap().into_rgb8(), image);
        assert_eq!(foreground(&decode::mask(&mask_path).unwrap()), foreground(&mask));
        if !moved {
            assert_eq!(
                fs::read(&mask_path).unwrap(),
                fs::read(&row.target().mask_path).unwrap(),
                "copied byte for byte"
            );
        }
    }
    let accepted = (0..rows.len()).filter(|index| index % 4 != 3).count();
    assert_eq!(export.write_annotations().unwrap(), accepted);
    assert_eq!(export.write_annotations().unwrap(), accepted, "written again from the journal");

    let made = Manifest::open(&to, None).unwrap();
    assert_eq!(made.rows.len(), accepted);
    assert!(made.rows.iter().all(|row| row.split == Split::Train && row.position.is_some()));
    let report = check(&to, None, Labels::NONE, &Silent).unwrap();
    assert!(report.is_good() && report.leaks.is_empty(), "{:?}", report.bad);
    assert_eq!(report.images, accepted, "rejected images are not counted");
    assert_eq!(Export::open(&to).unwrap().journal.records, export.journal.records);
    // No cell is empty in any column.
    for file in fs::read_dir(to.join("annotations")).unwrap() {
        let mut reader = csv::Reader::from_path(file.unwrap().path()).unwrap();
        assert_eq!(reader.headers().unwrap().len(), 7);
        for row in reader.records() {
            let row = row.unwrap();
            assert!(row.iter().all(|cell| !cell.trim().is_empty()), "{row:?}");
            assert!(!row[0].contains('\\') && row[0].contains("/train_masks/"), "{row:?}");
        }
    }
}

#[test]
fn positions_are_taken_from_the_row_or_computed_from_the_mask() {
    let mask = GrayImage::from_fn(90, 90, |x, y| Luma([u8::from(x > 70 && y < 20) * 255]));
    let row = |answer: &str, position: Option<&str>| fixture::row("Where?", answer, position);
    let at = |row: &Row| texts_of_row(row, &mask).unwrap().position;
    assert_eq!(at(&row("x", Some("center"))), "center");
    assert_eq!(at(&row("It is in the lower left part of the image.", Some(" "))), "lower left");
    assert_eq!(at(&row("x", None)), "upper right");
    assert!(texts_of_row(&row("x", None), &GrayImage::new(4, 4)).is_err());
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    for (answer, place) in [("in the bottom left", "top right"), ("in the lower left", "upper right")] {
        let row = row(answer, None);
        let text = texts_of_mask(&row, &mask, "cyst", "scan", &Templates::embedded(), &mut rng).unwrap();
        assert_eq!(text.position, place);
        assert!(text.answer.contains(place) && text.answer.contains("cyst"), "{}", text.answer);
    }
}

#[test]
fn names_avoid_words_that_loaders_treat_specially() {
    let mut names = BTreeSet::new();
    for (index, source) in [
        "ISIC_0001_Segmentation.png",
        "a/IsIc_7.jpg",
        "is_segmentationic_1.png",
        "train_masks.png",
        "x y.é.png",
        "isic",
        ".png",
        "_SEGMENTATION.png",
    ]
    .iter()
    .enumerate()
    {
        let name = name(Path::new(source), Mode::InsertLesion, index as u64);
        let lower = name.to_lowercase();
        for word in ["isic", "_segmentation", "train_masks"] {
            assert!(!lower.contains(word), "{source}: {name}");
        }
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c)), "{name}");
        assert!(name.ends_with(&format!("_insert_lesion_{index:06}")), "{name}");
        names.insert(name);
    }
    assert_eq!(names.len(), 8);
    assert!(name(Path::new(&"a".repeat(250)), Mode::Img2img, 3).len() < 130);
}

#[test]
fn an_incomplete_last_line_is_cut_off_and_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL);
    let mut journal = Journal::open(&path).unwrap();
    for index in [4, 0] {
        journal.append(record(index, "ct", index == 0)).unwrap();
    }
    drop(journal);
    let complete = fs::read(&path).unwrap();
    let third = {
        let mut line = serde_json::to_vec(&record(9, "ct", true)).unwrap();
        line.push(b'\n');
        line
    };
    for cut in [1, 10, third.len() - 2, third.len() - 1] {
        fs::write(&path, [&complete[..], &third[..cut]].concat()).unwrap();
        let mut journal = Journal::open(&path).unwrap();
        assert_eq!(journal.done, BTreeSet::from([0, 4]), "{cut} bytes of a line");
        assert_eq!(fs::read(&path).unwrap(), complete);
        journal.append(record(9, "ct", true)).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [&complete[..], &third[..]].concat());
    }
    // a power loss may leave zeros in place of the start of the last line
    let zeros = [&complete[..], &[0; 20], &third[20..]].concat();
    fs::write(&path, zeros).unwrap();
    assert_eq!(Journal::open(&path).unwrap().done, BTreeSet::from([0, 4]));
    assert_eq!(fs::read(&path).unwrap(), complete);
    Journal::open(&path).unwrap().append(record(9, "ct", true)).unwrap();
    let journal = Journal::open(&path).unwrap();
    let read: Vec<Record> = [4, 0, 9].map(|index| record(index, "ct", index != 4)).to_vec();
    assert_eq!(journal.records, read);
}

#[test]
fn invalid_lines_and_records_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL);
    let mut journal = Journal::open(&path).unwrap();
    journal.append(record(0, "ct", true)).unwrap();
    let mut refused = |record: Record| journal.append(record).unwrap_err().to_string();
    assert!(refused(record(0, "ct", true)).contains("is already recorded"));
    assert!(refused(record(1, "../ct", true)).contains("is not a file name"));
    assert!(refused(record(1, "rejected", true)).contains("cannot be named"));
    assert!(refused(Record { reason: String::new(), ..record(1, "ct", false) }).contains("needs a reason"));
    assert!(refused(Record { texts: vec![Text::new("q", " ", "p")], ..record(1, "ct", true) }).contains("empty cell"));
    assert!(refused(Record { texts: vec![], ..record(1, "ct", true) }).contains("no text"));
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"{\"index\": 1}\n").unwrap();
    let error = Journal::open(&path).unwrap_err().to_string();
    assert!(error.contains("manifest.jsonl:2: is not a valid record"), "{error}");
}

#[test]
fn non_finite_scores_are_read_as_nan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL);
    let scores = [("a".to_owned(), f64::NAN), ("b".to_owned(), f64::INFINITY), ("c".to_owned(), 0.25)].into();
    Journal::open(&path).unwrap().append(Record { scores, ..record(0, "ct", true) }).unwrap();
    let read = Journal::open(&path).unwrap();
    let scores = &read.records[0].scores;
    assert!(scores["a"].is_nan() && scores["b"].is_nan());
    assert_eq!(scores["c"], 0.25);
}

#[test]
fn foreign_roots_and_wrong_sizes_are_rejected_and_jpeg_masks_become_png() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("annotations")).unwrap();
    assert!(Export::open(folder.path()).unwrap_err().to_string().contains("without `manifest.jsonl`"));
    let root = folder.path().join("new");
    let mut export = Export::open(&root).unwrap();
    let image = RgbImage::from_pixel(32, 24, image::Rgb([9, 8, 7]));
    let small = GrayImage::new(8, 8);
    assert!(export.write(&image, MaskSource::Made(&small), record(0, "ct", true)).is_err());
    assert!(export.journal.records.is_empty(), "a pair that was not written has no record");
    let path = folder.path().join("m.jpg");
    GrayImage::from_fn(32, 24, |x, _| Luma([u8::from(x > 15) * 255])).save(&path).unwrap();
    export.write(&image, MaskSource::Unchanged(&path), record(0, "ct", true)).unwrap();
    let (_, written) = export.paths(&record(0, "ct", true));
    assert!(fs::read(&written).unwrap().starts_with(b"\x89PNG"));
    assert_eq!(decode::mask(&written).unwrap(), decode::mask(&path).unwrap());
    // A PNG file with other bytes than this program would write.
    let path = folder.path().join("m.png");
    RgbImage::from_fn(32, 24, |x, _| image::Rgb([u8::from(x > 15) * 255; 3])).save(&path).unwrap();
    export.write(&image, MaskSource::Unchanged(&path), record(2, "ct", true)).unwrap();
    let (_, written) = export.paths(&record(2, "ct", true));
    assert_eq!(fs::read(&written).unwrap(), fs::read(&path).unwrap(), "copied byte for byte");
    // The CSV file of a class without accepted pairs is removed.
    fs::create_dir_all(root.join("annotations")).unwrap();
    fs::write(root.join("annotations/us.csv"), "old").unwrap();
    export.write(&image, MaskSource::Made(&GrayImage::new(32, 24)), record(1, "us", false)).unwrap();
    assert_eq!(export.write_annotations().unwrap(), 2);
    assert!(!root.join("annotations/us.csv").exists());
    assert!(root.join("rejected/us").join(format!("{}_mask.png", record(1, "us", false).name)).exists());
}

#[test]
fn an_interrupted_revision_is_undone() {
    let folder = tempfile::tempdir().unwrap();
    let mask = GrayImage::from_pixel(8, 6, Luma([255]));
    let mut export = Export::open(folder.path()).unwrap();
    for index in 0..2 {
        export.write(&RgbImage::new(8, 6), MaskSource::Made(&mask), record(index, "ct", true)).unwrap();
    }
    let rejected = |index| record(index, "ct", false);
    // killed after the first pair's image was moved
    let (from, to) = (export.paths(&record(0, "ct", true)).0, export.paths(&rejected(0)).0);
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    fs::rename(&from, &to).unwrap();
    drop(export);
    let mut export = Export::open(folder.path()).unwrap();
    assert!(from.exists() && !to.exists(), "files are moved back to where the journal expects them");
    export.revise(&[rejected(0), record(1, "ct", true)]).unwrap();
    assert!(!from.exists() && to.exists());
    fs::remove_file(&to).unwrap();
    let mut export = Export::open(folder.path()).expect("rejected images may be deleted");
    assert!(export.revise(&[record(0, "ct", true), record(1, "ct", true)]).is_err());
}

/// Appends a line to a journal without any checks.
fn append_unchecked(path: &Path, record: &Record) {
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all((serde_json::to_string(record).unwrap() + "\n").as_bytes()).unwrap();
}

#[test]
fn a_journal_whose_names_leave_the_root_is_refused_before_files_are_moved() {
    let home = tempfile::tempdir().unwrap();
    let (root, other) = (home.path().join("root"), home.path().join("other"));
    let mask = GrayImage::from_pixel(8, 6, Luma([255]));
    let mut export = Export::open(&root).unwrap();
    export.write(&RgbImage::new(8, 6), MaskSource::Made(&mask), record(0, "ct", true)).unwrap();
    drop(export);
    let journal = fs::read(root.join(JOURNAL)).unwrap();
    // files that an unchecked journal moves or deletes
    let name = record(1, "x", true).name;
    for folder in ["train_images", "train_masks"] {
        fs::create_dir_all(other.join("vd").join(folder)).unwrap();
        fs::write(other.join("vd").join(folder).join(format!("{name}.png")), "precious").unwrap();
    }
    fs::write(other.join("vd.csv"), "precious").unwrap();
    // a pair in the wrong folder, which opening moves if all lines are good
    let (good, _) = Export { root: root.clone(), journal: Journal::open(&root.join(JOURNAL)).unwrap() }
        .paths(&record(0, "ct", true));
    let moved = root.join("rejected/ct").join(good.file_name().unwrap());
    fs::create_dir_all(moved.parent().unwrap()).unwrap();
    fs::rename(&good, &moved).unwrap();
    for class in [other.join("vd").to_str().unwrap(), "../other/vd", ".hidden", "", "a\nb", "annotations", "Rejected"] {
        fs::write(root.join(JOURNAL), &journal).unwrap();
        append_unchecked(&root.join(JOURNAL), &record(1, class, false));
        let error = Export::open(&root).unwrap_err().to_string();
        assert!(error.contains("manifest.jsonl:2: pair 1: "), "{class}: {error}");
        assert!(Journal::read(&root.join(JOURNAL)).is_err(), "{class}");
        assert!(moved.exists() && !good.exists(), "{class}: nothing is moved");
    }
    fs::write(root.join(JOURNAL), &journal).unwrap();
    append_unchecked(&root.join(JOURNAL), &Record { name: "../../other/x".to_owned(), ..record(1, "ct", false) });
    assert!(Export::open(&root).unwrap_err().to_string().contains("is not a file name"));
    assert!(other.join("vd.csv").exists() && other.join("vd/train_images").join(format!("{name}.png")).exists());
}

#[test]
fn pairs_are_not_moved_or_written_through_links() {
    let home = tempfile::tempdir().unwrap();
    let (root, other) = (home.path().join("root"), home.path().join("other"));
    fs::create_dir(&other).unwrap();
    let mask = GrayImage::from_pixel(8, 6, Luma([255]));
    let mut export = Export::open(&root).unwrap();
    std::os::unix::fs::symlink(&other, root.join("ct")).unwrap();
    assert!(export.write(&RgbImage::new(8, 6), MaskSource::Made(&mask), record(0, "ct", true)).is_err());
    export.write(&RgbImage::new(8, 6), MaskSource::Made(&mask), record(1, "us", true)).unwrap();
    std::os::unix::fs::symlink(&other, root.join("rejected")).unwrap();
    assert!(export.revise(&[record(1, "us", false)]).is_err());
    std::os::unix::fs::symlink(&other, root.join("annotations")).unwrap();
    assert!(export.write_annotations().is_err());
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0);
    drop(export);
    let precious = home.path().join("thesis.txt");
    fs::write(&precious, "half a line").unwrap();
    fs::remove_file(root.join(JOURNAL)).unwrap();
    std::os::unix::fs::symlink(&precious, root.join(JOURNAL)).unwrap();
    assert!(Journal::open(&root.join(JOURNAL)).is_err());
    assert_eq!(fs::read_to_string(&precious).unwrap(), "half a line");
}

#[test]
fn records_with_the_older_field_name_are_read() {
    let record = Record { source_mask: Some("phantom_00001".to_owned()), ..record(0, "ct", true) };
    let line = serde_json::to_string(&record).unwrap();
    assert!(line.contains("\"source_mask\":"));
    let read: Record = serde_json::from_str(&line.replace("\"source_mask\":", "\"donor\":")).unwrap();
    assert_eq!(read, record);
}

#[test]
fn reading_a_journal_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(JOURNAL);
    assert!(Journal::read(&path).is_err() && !path.exists(), "reading creates no file");
    Journal::open(&path).unwrap().append(record(0, "ct", true)).unwrap();
    fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"index\":1").unwrap();
    let before = fs::read(&path).unwrap();
    assert_eq!(Journal::read(&path).unwrap().len(), 1);
    assert_eq!(fs::read(&path).unwrap(), before);
}
