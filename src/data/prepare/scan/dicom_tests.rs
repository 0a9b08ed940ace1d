//! Tests of scans of DICOM folders with segmentations.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use super::*;
use crate::fixture::{Root, checkout};
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

/// Writes a mask of a series, and gives it a name.
fn mask(root: &Root, of: &str, ending: &str, name: &str) {
    let volume = volume::open(&root.path().join(of)).unwrap();
    let [width, height, depth] = volume.grid.size;
    let inside = |at: usize| (at % width) < width / 2 && (at / width % height) < height / 2;
    let mask: Vec<u8> = (0..width * height * depth).map(|at| u8::from(inside(at))).collect();
    let written = root.path().join(format!("written{ending}"));
    volume::write::segments(&written, &[SegmentMask { name: "lesion", mask: &mask }], &volume).unwrap();
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
    let not_there = "the series that it was drawn on is not in the folder; a table can name both";
    let expected = [("C", "no SEG and no RTSTRUCT refers to it"), ("C/other.dcm", not_there)];
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
    assert!(twice.reason.contains("`P/seg.dcm` fits series in `P/two` and `all`; keep one"), "{}", twice.reason);
    fs::remove_dir_all(root.path().join("P/two")).unwrap();
    let report = scan(root.path(), &ScanOptions::default(), &Silent).unwrap();
    let [pair] = report.table.rows.as_slice() else { panic!("{report:?}") };
    assert_eq!((below(&report, &pair.image).as_str(), pair.name.as_str()), ("all#9", "all_9"));
    assert_eq!(report.series[0].used.iter().collect::<Vec<_>>(), [&1]);
}
