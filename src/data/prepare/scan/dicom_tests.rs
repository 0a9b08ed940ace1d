//! Tests of scans of DICOM folders with segmentations.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use dicom_core::value::{DataSetSequence, PrimitiveValue};
use dicom_core::{DataElement, VR};
use dicom_dictionary_std::tags;

use super::*;
use crate::fixture::{Root, checkout};
use crate::prepare::table::{Pair, PairTable};
use crate::prepare::{PrepareOptions, prepare_classes};
use crate::volume::{self, SegmentMask};
use prsmed_base::event::Silent;

/// Writes a series of four slices into a folder. The digits are the ends of the UIDs of its series and its study.
fn series(root: &Root, folder: &str, [series, study]: [u8; 2]) {
    let file = fs::File::open(checkout().join("tests/fixtures/volumes/axial.zip")).unwrap();
    let mut archive = zip::ZipArchive::new(file).unwrap();
    for index in 0..archive.len() {
        let mut bytes = Vec::new();
        let mut entry = archive.by_index(index).unwrap();
        entry.read_to_end(&mut bytes).unwrap();
        if !bytes.starts_with(&[0; 128]) && !volume::dicom::is_dicom(&bytes) {
            continue;
        }
        for (old, new) in [(*b"498.1.1", series), (*b"498.7.1", study)] {
            let found: Vec<usize> = (0..bytes.len() - 7).filter(|at| bytes[*at..].starts_with(&old)).collect();
            for at in found {
                bytes[at + 6] = b'0' + new;
            }
        }
        fs::write(root.file(&format!("{folder}/{index}.dcm")), bytes).unwrap();
    }
}

/// As [`series`], with a PatientID.
fn series_of(root: &Root, folder: &str, uids: [u8; 2], patient: &str) {
    series(root, folder, uids);
    for entry in fs::read_dir(root.path().join(folder)).unwrap() {
        let path = entry.unwrap().path();
        let mut object = dicom_object::open_file(&path).unwrap();
        object.put(DataElement::new(tags::PATIENT_ID, VR::LO, PrimitiveValue::from(patient)));
        object.write_to_file(&path).unwrap();
    }
}

/// Writes a mask of a series, and gives it a name.
fn mask(root: &Root, of: &str, ending: &str, name: &str) {
    mask_of(root, of, "lesion", ending, name);
}

fn mask_of(root: &Root, of: &str, target: &str, ending: &str, name: &str) {
    let volume = volume::open(&root.path().join(of)).unwrap();
    let [width, height, depth] = volume.grid.size;
    let inside = |at: usize| (at % width) < width / 2 && (at / width % height) < height / 2;
    let mask: Vec<u8> = (0..width * height * depth).map(|at| u8::from(inside(at))).collect();
    let written = root.path().join(format!("written{ending}"));
    volume::write::segments(&written, &[SegmentMask { name: target, mask: &mask }], &volume).unwrap();
    fs::rename(written, root.file(name)).unwrap();
}

fn below(report: &ScanReport, path: &Path) -> String {
    path.strip_prefix(&report.root).unwrap().display().to_string()
}

#[test]
fn segmentations_find_their_series_by_uid() {
    let root = Root::new();
    series(&root, "A/CT", [2, 2]);
    mask(&root, "A/CT", ".dcm", "A/CT/1-seg.dcm");
    for (folder, number) in [("B/one", 3), ("B/two", 4)] {
        series(&root, folder, [number, 3]);
        mask(&root, folder, ".rtstruct.dcm", &format!("B/plans/RS{number}"));
    }
    series(&root, "C", [5, 5]);
    series(&root, "away", [6, 6]);
    mask(&root, "away", ".dcm", "C/other.dcm");
    fs::remove_dir_all(root.path().join("away")).unwrap();
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    assert_eq!((report.layouts[0].name, report.volumes, &report.ambiguous), ("dicom", 3, &Vec::new()), "{report:?}");
    let found = report.table.rows.iter().map(|pair| {
        let masks: Vec<String> = pair.masks.iter().map(|(_, path)| below(&report, path)).collect();
        (below(&report, &pair.image), masks.join(" + "), pair.patient.as_deref().unwrap_or("-"))
    });
    let expected =
        [("A/CT", "A/CT/1-seg.dcm", "-"), ("B/one", "B/plans/RS3", "B/one"), ("B/two", "B/plans/RS4", "B/one")];
    assert_eq!(
        found.collect::<Vec<_>>(),
        expected.map(|(image, masks, patient)| (image.into(), masks.into(), patient))
    );
    let unmatched: Vec<_> =
        report.unmatched.iter().map(|skip| (below(&report, &skip.path), skip.reason.as_str())).collect();
    let not_there = "the series that it was drawn on is not in the folder";
    let expected = [("C", "no SEG or RTSTRUCT refers to it, and no mask has its name"), ("C/other.dcm", not_there)];
    assert_eq!(unmatched, expected.map(|(path, reason)| (path.to_owned(), reason)));
    let options = PrepareOptions::new(root.path(), root.path(), "ct", root.path().join("data"));
    let prepared = prepare_classes(report.into_table().unwrap(), &options, &Silent).unwrap();
    let [(_, prepared)] = prepared.as_slice() else { panic!("one class") };
    assert_eq!((prepared.volumes, prepared.images, prepared.patients), (Some(3), 12, Some(2)), "{prepared:?}");
}

#[test]
fn a_mask_names_one_of_the_series_of_a_folder() {
    let root = Root::new();
    series(&root, "P/one", [2, 2]);
    series(&root, "P/two", [3, 2]);
    mask(&root, "P/two", ".dcm", "P/seg.dcm");
    // one folder of files, and each series once more in a copy of the tree
    for (folder, number) in [("one", 8), ("two", 9)] {
        for name in ["0", "1", "2", "3"] {
            let file = root.path().join(format!("P/{folder}/{name}.dcm"));
            let mut bytes = fs::read(&file).unwrap();
            let tag = bytes.windows(6).position(|bytes| bytes == b"\x20\x00\x11\x00IS").expect("a number");
            bytes[tag + 8] = b'0' + number;
            fs::write(root.file(&format!("all/{folder}-{name}.dcm")), bytes).unwrap();
        }
    }
    fs::remove_dir_all(root.path().join("P/one")).unwrap();
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    let [twice] = report.ambiguous.as_slice() else { panic!("{report:?}") };
    assert!(twice.reason.contains("`P/seg.dcm` fits series in `P/two`, `all`; keep one"), "{}", twice.reason);
    fs::remove_dir_all(root.path().join("P/two")).unwrap();
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    let [pair] = report.table.rows.as_slice() else { panic!("{report:?}") };
    assert_eq!((below(&report, &pair.image).as_str(), pair.name.as_str()), ("all#9", "all_9"));
    assert_eq!(report.series[0].used.iter().collect::<Vec<_>>(), [&1]);
    let of = |rule: &str| {
        let options = ScanOptions { series: Some(rule.into()), ..ScanOptions::default() };
        scan(root.path(), &options, &Silent).unwrap()
    };
    assert_eq!(of("9").table.rows.len(), 1);
    let other = of("8");
    assert!(other.table.rows.is_empty() && other.unmatched[0].reason.contains("does not choose"), "{other:?}");
    // two series of one number
    for entry in fs::read_dir(root.path().join("all")).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        let tag = bytes.windows(6).position(|bytes| bytes == b"\x20\x00\x11\x00IS").expect("a number");
        bytes[tag + 8] = b'9';
        fs::write(path, bytes).unwrap();
    }
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    assert!(report.ambiguous[0].reason.contains("has no number of its own"), "{report:?}");
}

#[test]
fn masks_go_to_no_series_that_they_do_not_name() {
    let root = Root::new();
    for (folder, number) in [("P1/CT", 2), ("P2/CT", 3), ("P3/CT", 4), ("away", 5)] {
        series(&root, folder, [number, number]);
    }
    // the masks of two patients lie in the folders of each other
    mask(&root, "P1/CT", ".dcm", "P2/seg.dcm");
    mask(&root, "P2/CT", ".dcm", "P1/seg.dcm");
    mask(&root, "away", ".dcm", "P3/seg.dcm");
    fs::remove_dir_all(root.path().join("away")).unwrap();
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    let found: Vec<_> = report.table.rows.iter().map(|pair| below(&report, &pair.masks[0].1)).collect();
    assert_eq!(found, ["P2/seg.dcm", "P1/seg.dcm"]);
    assert_eq!(report.unmatched.len(), 2, "{:?}", report.unmatched);
    // alone it goes to none either
    let alone = ScanOptions { layout: Some("names".into()), ..ScanOptions::default() };
    let report = scan(root.path(), &alone, &Silent).unwrap();
    assert!(report.table.rows.is_empty(), "{report:?}");
    // a table may, with a note
    let mut pair = Pair::new("P1", root.path().join("P1/CT"), root.path().join("P1/seg.dcm"));
    pair.patient = Some("P1".into());
    let options = PrepareOptions::new(root.path(), root.path(), "ct", root.path().join("data"));
    let table = PairTable { rows: vec![pair], ..PairTable::default() };
    let prepared = prepare_classes(table, &options, &Silent).unwrap();
    assert!(prepared[0].1.notes.iter().any(|note| note.contains("drawn on another series")), "{prepared:?}");
}

#[test]
fn series_of_one_patient_id_are_one_patient() {
    let root = Root::new();
    let all = [
        ("base/Anna", "id-71"),
        ("follow/Anna", "id-71"),
        ("base/Bert", "id-72"),
        ("x/Cleo/1", "id-73"),
        ("x/Cleo/2", "id-73"),
    ];
    for ((folder, id), number) in all.into_iter().zip(2..) {
        series_of(&root, folder, [number, number], id);
        mask(&root, folder, ".dcm", &format!("segs/{number}.dcm"));
    }
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    let patients: Vec<_> = report.table.rows.iter().map(|pair| pair.patient.as_deref().unwrap_or("-")).collect();
    assert_eq!(patients, ["base/Anna", "base/Bert", "base/Anna", "x", "x"]);
    let [table, json, page] = write_scan(&report, &root.path().join("out")).unwrap();
    for path in [table, json, page] {
        assert!(!fs::read_to_string(&path).unwrap().contains("id-7"), "{}", path.display());
    }
    // one series without an id changes nothing for the others
    series_of(&root, "x/Cleo/2", [6, 6], "");
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    let patients: Vec<_> = report.table.rows.iter().map(|pair| pair.patient.as_deref().unwrap_or("-")).collect();
    assert_eq!(patients, ["base/Anna", "base/Bert", "base/Anna", "x/Cleo/1", "-"]);
    // the same without ids
    for ((folder, _), number) in all.into_iter().zip(2..) {
        series_of(&root, folder, [number, number], "");
    }
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    assert!(
        report.notes.iter().any(|note| note.contains("the patients of 5 series are not known")),
        "{:?}",
        report.notes
    );
}

#[test]
fn structures_have_the_names_of_their_files() {
    let root = Root::new();
    for (patient, number, target) in [("P1", 2, "GTV"), ("P2", 3, "Heart")] {
        series(&root, patient, [number, number]);
        mask_of(&root, patient, target, ".rtstruct.dcm", &format!("{patient}/rs.dcm"));
    }
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    assert_eq!(report.structures.keys().collect::<Vec<_>>(), ["GTV", "Heart"]);
    let mut table = report.into_table().unwrap();
    table.rows.iter_mut().for_each(|pair| pair.labels = "1=tumour".parse().unwrap());
    let options = PrepareOptions::new(root.path(), root.path(), "ct", root.path().join("data"));
    let prepared = prepare_classes(table, &options, &Silent).unwrap();
    let expected = "what is called `tumour` has different names in the label maps: `GTV` in P1, `Heart` in P2; if";
    assert!(prepared[0].1.notes.iter().any(|note| note.starts_with(expected)), "{prepared:?}");
}

#[test]
fn two_files_of_one_structure_each_are_two_masks_and_a_damaged_one_is_named() {
    let root = Root::new();
    series(&root, "P1", [2, 2]);
    mask_of(&root, "P1", "GTV", ".dcm", "P1/a.dcm");
    mask_of(&root, "P1", "Heart", ".dcm", "P1/b.dcm");
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    assert_eq!(report.structures.keys().collect::<Vec<_>>(), ["GTV", "Heart"], "{report:?}");
    series(&root, "P2", [3, 3]);
    mask(&root, "P2", ".rtstruct.dcm", "P2/rs.dcm");
    let bytes = fs::read(root.path().join("P2/rs.dcm")).unwrap();
    fs::write(root.path().join("P2/rs.dcm"), &bytes[..bytes.len() / 3]).unwrap();
    // a file that names its series twice
    let mut object = dicom_object::open_file(root.path().join("P1/a.dcm")).unwrap();
    let mut twice = object.element(tags::REFERENCED_SERIES_SEQUENCE).unwrap().items().unwrap().to_vec();
    twice.extend(twice.clone());
    object.put(DataElement::new(tags::REFERENCED_SERIES_SEQUENCE, VR::SQ, DataSetSequence::from(twice)));
    object.write_to_file(root.path().join("P1/a.dcm")).unwrap();
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    assert!(report.ambiguous.is_empty(), "{report:?}");
    let [problem] = report.problems.as_slice() else { panic!("{report:?}") };
    assert!(problem.path.ends_with("P2/rs.dcm"), "{problem:?}");
}
