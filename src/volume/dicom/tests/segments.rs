//! Overlapping segments, and `data prepare` of DICOM series with label maps.

use std::ops::Range;

use super::*;
use crate::{Affine, Grid, SegmentMask, labels, write};
use prsmed_base::Result;
use prsmed_base::event::Silent;
use prsmed_data::prepare::{PrepareOptions, PrepareReport, prepare};

/// Voxels of a scan of three slices.
const COUNT: usize = 36;

fn mask(range: &Range<usize>) -> Vec<u8> {
    (0..COUNT).map(|index| u8::from(range.contains(&index))).collect()
}

/// Writes a SEG of a scan, with one segment for each range of voxels.
fn write_seg(path: &Path, scan: &Volume, ranges: &[Range<usize>]) {
    let masks: Vec<Vec<u8>> = ranges.iter().map(mask).collect();
    let segments: Vec<SegmentMask> = masks.iter().map(|mask| SegmentMask { name: "part", mask }).collect();
    write::segments(path, &segments, scan).expect("written");
}

#[test]
fn overlapping_segments_keep_all_their_voxels() {
    let scan = volume((0..3).map(slice).collect());
    let Grid { size, affine } = scan.grid.clone();
    let [x, y, z] = [0, 1, 2].map(|axis| affine.step(axis));
    let last = affine.apply([0.0, 0.0, 2.0]);
    let upside_down = Grid { size, affine: Affine::from_columns([x, y, z.map(|mm| -mm)], last) };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("labels.dcm");
    for (ranges, num_overlaps) in [
        // a part, a whole segment, three segments in one place, equal segments, no overlap
        (vec![0..20, 10..36], 10),
        (vec![5..8, 0..36], 3),
        (vec![0..12, 6..18, 8..36], 12),
        (vec![3..9, 3..9], 6),
        (vec![0..4, 14..30], 0),
    ] {
        write_seg(&path, &scan, &ranges);
        let read = || labels::open(&path).expect("a label map");
        let note = format!("segments overlap in {num_overlaps} voxels, which belong to each of them");
        assert_eq!(read().notes.contains(&note), num_overlaps > 0, "{:?}", read().notes);
        let upright = read().on_grid(&path, &scan.grid, false).expect("the grid of the scan");
        let turned = read().on_grid(&path, &upside_down, false).expect("a flipped grid");
        for (number, range) in (1..).zip(&ranges) {
            let wanted = mask(range);
            let label = number.to_string().parse().expect("a label");
            assert_eq!(upright.mask(number), wanted, "segment {number} of {ranges:?}");
            assert_eq!(upright.labels()[&number], range.len());
            assert!((0..COUNT).all(|index| upright.has(index, label) == (wanted[index] == 1)));
            let flipped: Vec<u8> = wanted.chunks(12).rev().flatten().copied().collect();
            assert_eq!(turned.mask(number), flipped, "segment {number} of {ranges:?}");
        }
    }
}

/// Folders `scans` and `labels` with a series and a label map for each patient.
struct Data(tempfile::TempDir);

impl Data {
    /// The label maps have their label in the lower two slices of three.
    fn new(patients: &[(&str, Vec<InMemDicomObject>)]) -> Self {
        let data = Self(tempfile::tempdir().expect("a folder"));
        let scan = volume((0..3).map(slice).collect());
        fs::create_dir(data.path("labels")).expect("a folder");
        for (name, objects) in patients {
            fs::create_dir_all(data.path("scans").join(name)).expect("a folder");
            for (index, object) in objects.iter().enumerate() {
                let path = data.path("scans").join(name).join(format!("{index}.dcm"));
                fs::write(path, bytes_of(object.clone())).expect("written");
            }
            let labels = data.path("labels").join(format!("{name}.nii.gz"));
            write::nifti_labels(&labels, &mask(&(0..24)), &scan.grid).expect("written");
        }
        data
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn prepare(&self, change: impl Fn(&mut PrepareOptions)) -> Result<PrepareReport> {
        let out = self.path("out");
        let mut options = PrepareOptions::new(self.path("scans"), self.path("labels"), "ct", out.clone());
        options.slices.window = Some("-300..300".parse().expect("a window"));
        change(&mut options);
        let report = prepare(&options, &Silent);
        let _ = fs::remove_dir_all(out);
        report
    }
}

fn scan() -> Vec<InMemDicomObject> {
    (0..3).map(slice).collect()
}

#[test]
fn a_chosen_segment_is_whole_in_the_masks() {
    let data = Data::new(&[("P1", scan())]);
    fs::remove_file(data.path("labels/P1.nii.gz")).expect("removed");
    for (ranges, label, wanted) in [
        (vec![0..12, 6..12], "1", 12),
        (vec![0..12, 6..12], "2", 6),
        (vec![2..11, 0..12, 4..5], "1", 9),
        (vec![2..11, 0..12, 4..5], "2,3", 12),
    ] {
        write_seg(&data.path("labels/P1.dcm"), &volume(scan()), &ranges);
        let mut options = PrepareOptions::new(data.path("scans"), data.path("labels"), "ct", data.path("out"));
        options.slices.window = Some("-300..300".parse().expect("a window"));
        options.labels = label.parse().expect("labels");
        options.val_frac = 0.0;
        options.test_frac = 0.0;
        let report = prepare(&options, &Silent).expect("prepared");
        assert_eq!(report.images, 1);
        let mask = image::open(data.path("out/ct/train_masks/P1_axial_0000.png")).expect("a mask").to_luma8();
        assert_eq!(mask.pixels().filter(|pixel| pixel.0[0] == 255).count(), wanted, "{label} of {ranges:?}");
        fs::remove_dir_all(data.path("out")).expect("removed");
    }
}

#[test]
fn prepare_names_the_file_that_is_damaged() {
    let data = Data::new(&[("P1", scan()), ("P2", scan())]);
    let path = data.path("scans/P1/1.dcm");
    let whole = bytes_of(slice(1));
    let comma = {
        let mut object = slice(1);
        set(&mut object, tags::PIXEL_SPACING, "0,5\\0,5");
        bytes_of(object)
    };
    for (bytes, part) in [
        (&whole[..whole.len() - 5], "truncated"),
        (&whole[..300], "truncated"),
        (&[0; 400], "does not begin like one"),
        (comma.as_slice(), "PixelSpacing is `0,5\\0,5`"),
    ] {
        fs::write(&path, bytes).expect("written");
        let report = data.prepare(|_| {}).expect("the other patient");
        let [skipped] = report.skipped.as_slice() else { panic!("{:?}", report.skipped) };
        assert!(skipped.path == path && skipped.reason.contains(part), "{skipped:?}");
        let only = |options: &mut PrepareOptions| {
            options.images = vec![data.path("scans/P1")];
            options.masks = vec![data.path("labels/P1.nii.gz")];
        };
        let error = data.prepare(only).expect_err("no other patient");
        assert!(error.to_string().contains("1.dcm") && error.to_string().contains(part), "{error}");
    }
}

#[test]
fn one_rule_chooses_the_series_of_all_patients() {
    let other = |number: &str, description: &str, count: i32| -> Vec<InMemDicomObject> {
        let of = |index: i32| {
            let mut object = slice(index);
            let uid = format!("1.2.9.{number}");
            set(&mut object, tags::SERIES_INSTANCE_UID, &uid);
            set(&mut object, tags::SOP_INSTANCE_UID, &format!("{uid}.{index}"));
            set(&mut object, tags::SERIES_NUMBER, number);
            set(&mut object, tags::SERIES_DESCRIPTION, description);
            object
        };
        (0..count).map(of).collect()
    };
    let patient = |[first, second]: [&str; 2]| [other(first, "T1", 2), other(second, "T2 axial", 3)].concat();
    let data = Data::new(&[("P1", patient(["1", "2"])), ("P2", patient(["4", "3"])), ("P3", scan())]);
    let used = |series: &str| {
        let report = data.prepare(|options| options.series = Some(series.to_owned()));
        report.map(|report| report.volumes.expect("volumes"))
    };
    assert_eq!(used("t2").expect("two patients"), 2);
    assert_eq!(used("T2 axial").expect("two patients"), 2);
    assert_eq!(used("largest").expect("all patients"), 3);
    assert_eq!(used("2").expect("one patient"), 1);
    let report = data.prepare(|_| {}).expect("one patient has one series");
    assert_eq!((report.volumes, report.skipped.len()), (Some(1), 2));
    let reason = &report.skipped[0].reason;
    assert!(reason.contains("2 series") && reason.contains("`data prepare --series`"), "{reason}");
}

#[test]
fn slices_of_one_grey_level_are_named() {
    let data = Data::new(&[("P1", scan())]);
    let notes = |window: &str| {
        let window = window.parse().expect("a window");
        data.prepare(|options| options.slices.window = Some(window)).expect("prepared").notes
    };
    for window in ["500..600", "-3000..-2000", "lung"] {
        let found = notes(window);
        let part = format!("P1: 2 of 2 slices are one single grey level with the window `{window}` (slice 0, 1)");
        assert_eq!(found.iter().any(|note| note.contains(&part)), window != "lung", "{found:?}");
    }
    assert!(!notes("-300..300").iter().any(|note| note.contains("grey level")));
}

#[test]
fn each_named_segment_gets_all_of_its_pixels() {
    let data = Data::new(&[("P1", scan())]);
    fs::remove_file(data.path("labels/P1.nii.gz")).expect("removed");
    // the tumour and the vessel lie in the liver, and in each other
    write_seg(&data.path("labels/P1.dcm"), &volume(scan()), &[0..24, 3..8, 6..10]);
    let mut options = PrepareOptions::new(data.path("scans"), data.path("labels"), "ct", data.path("out"));
    options.slices.window = Some("-300..300".parse().expect("a window"));
    options.named_labels = "1=liver,2=tumour,3=vessel".parse().expect("labels");
    options.val_frac = 0.0;
    options.test_frac = 0.0;
    assert_eq!(prepare(&options, &Silent).expect("prepared").images, 2);
    for (name, wanted) in [("0000_liver", 12), ("0001_liver", 12), ("0000_tumour", 5), ("0000_vessel", 4)] {
        let path = data.path(&format!("out/ct/train_masks/P1_axial_{name}.png"));
        let mask = image::open(path).expect("a mask").to_luma8();
        assert_eq!(mask.pixels().filter(|pixel| pixel.0[0] == 255).count(), wanted, "{name}");
    }
}

#[test]
fn label_maps_without_file_meta_are_read() {
    let scan = volume((0..3).map(slice).collect());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("labels.dcm");
    write_seg(&path, &scan, &[3..9, 7..20]);
    let bytes = fs::read(&path).expect("a file");
    let length = u32::from_le_bytes(bytes[140..144].try_into().expect("the length of the file meta"));
    fs::write(&path, &bytes[144 + length as usize..]).expect("written");
    let labels = labels::open(&path).expect("a label map");
    assert!(labels.notes.iter().any(|note| note.contains("the DICOM file meta is missing")), "{:?}", labels.notes);
    let labels = labels.on_grid(&path, &scan.grid, false).expect("the grid of the scan");
    assert_eq!((labels.mask(1), labels.mask(2)), (mask(&(3..9)), mask(&(7..20))));
}

#[test]
fn padding_is_black_in_the_images_of_a_data_set() {
    let padded = |index: i32| {
        let mut object = slice_of("MR", index);
        let pixels: Vec<i32> = (0..12).map(|at| if at % 4 == 0 { -32768 } else { 100 + at }).collect();
        set_pixels(&mut object, &pixels, true);
        set_i16(&mut object, tags::PIXEL_PADDING_VALUE, -32768);
        object
    };
    let data = Data::new(&[("P1", (0..3).map(padded).collect())]);
    let mut options = PrepareOptions::new(data.path("scans"), data.path("labels"), "mr", data.path("out"));
    options.slices.window = Some("p0-p100".parse().expect("a window"));
    options.val_frac = 0.0;
    options.test_frac = 0.0;
    let report = prepare(&options, &Silent).expect("prepared");
    assert!(report.notes.iter().any(|note| note.contains("9 of 36 pixels are padding")), "{:?}", report.notes);
    let image = image::open(data.path("out/mr/train_images/P1_axial_0000.png")).expect("an image").to_luma8();
    let mut greys: Vec<u8> = image.into_raw();
    greys.sort_unstable();
    // the padding, and the smallest of nine values
    assert_eq!(greys[..4], [0; 4]);
    greys.dedup();
    assert_eq!((greys.len(), greys.last()), (9, Some(&255)));
}

#[test]
fn a_ct_without_units_needs_a_window_of_its_stored_values() {
    let without = (0..3).map(|index| slice_of("CT", index)).collect();
    let data = Data::new(&[("P1", without), ("P2", scan())]);
    let with = |window: &str| {
        let window = window.parse().expect("a window");
        data.prepare(|options| options.slices.window = Some(window)).expect("prepared")
    };
    let report = with("lung");
    let [skipped] = report.skipped.as_slice() else { panic!("{:?}", report.skipped) };
    assert!(skipped.path == data.path("scans/P1") && skipped.reason.contains("a window in Hounsfield units"));
    assert!(skipped.reason.contains("RescaleIntercept") && skipped.reason.contains("p0.5-p99.5"), "{skipped:?}");
    let report = with("990..1020");
    assert_eq!(report.volumes, Some(2));
    assert!(report.notes.iter().any(|note| note.starts_with("P1: the CT has no RescaleIntercept")));
}

#[test]
fn prepare_names_the_slice_without_the_rescale_of_the_others() {
    let mut objects = scan();
    objects[2].remove_element(tags::RESCALE_INTERCEPT);
    let data = Data::new(&[("P1", objects), ("P2", scan())]);
    let report = data.prepare(|_| {}).expect("the other patient");
    let [skipped] = report.skipped.as_slice() else { panic!("{:?}", report.skipped) };
    assert_eq!(skipped.path, data.path("scans/P1/2.dcm"));
    assert!(skipped.reason.contains("it has no RescaleIntercept, and 0.dcm has -1024"), "{skipped:?}");
}

#[test]
fn windows_in_hounsfield_units_for_other_values_have_a_note() {
    let data = Data::new(&[("P1", (0..3).map(|index| slice_of("PT", index)).collect())]);
    let notes = |window: &str| {
        let window = window.parse().expect("a window");
        data.prepare(|options| options.slices.window = Some(window)).expect("prepared").notes
    };
    let found = notes("soft-tissue");
    let part = "P1: the window `soft-tissue` is like one in Hounsfield units, and less than 1 % of the values (1000.0 to \
                1011.0)";
    assert!(found.iter().any(|note| note.starts_with(part)), "{found:?}");
    // numbers were chosen for these values
    for window in ["-300..3000", "900..1100"] {
        assert!(!notes(window).iter().any(|note| note.contains("Hounsfield")), "{window}");
    }
}

#[test]
fn objects_that_are_no_segmentations_are_named_with_a_remedy_that_fits() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mask.dcm");
    let write = |class: &str, modality: &str| {
        let mut object = item(&[(tags::SOP_CLASS_UID, class), (tags::SOP_INSTANCE_UID, "1.2.9")]);
        set(&mut object, tags::MODALITY, modality);
        std::fs::write(&path, bytes_of(object)).expect("written");
    };
    for (class, modality, kind) in [
        (uids::RT_DOSE_STORAGE, "RTDOSE", "a DICOM RTDOSE with doses"),
        (uids::RT_PLAN_STORAGE, "RTPLAN", "a DICOM RTPLAN"),
        (uids::BASIC_TEXT_SR_STORAGE, "SR", "a DICOM report (SR)"),
        (uids::RAW_DATA_STORAGE, "MR", "a DICOM file"),
    ] {
        write(class, modality);
        let error = labels::open(&path).expect_err("no mask");
        assert!(error.to_string().ends_with(&format!("it is {kind}, not a segmentation (SEG)")), "{error}");
        assert!(error.hint().contains("NIfTI label map"), "{}", error.hint());
    }
    std::fs::write(&path, bytes_of(slice(0))).expect("written");
    let error = labels::open(&path).expect_err("an image");
    assert!(error.to_string().ends_with("it is a DICOM image, not a segmentation (SEG)"), "{error}");
}
