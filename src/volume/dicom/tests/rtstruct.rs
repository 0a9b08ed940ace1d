//! RTSTRUCT: contours that are written here, masks that are written and read again, and files that are refused.

use dicom_core::value::PrimitiveValue;

use super::*;
use crate::{LabelMap, SegmentMask, labels, write};
use prsmed_base::Result;
use prsmed_base::event::Silent;
use prsmed_data::prepare::{PrepareOptions, prepare};

/// Pixels of a slice, and of the scan of three slices with pixels of 0.5 mm, 1 mm apart.
const AREA: usize = 12;
const COUNT: usize = 36;

/// ContourData of a rectangle around pixels of a slice: columns and rows from `low` to `high`.
fn rectangle([left, top]: [f64; 2], [right, bottom]: [f64; 2], z: f64) -> String {
    let corners = [[left, top], [right, top], [right, bottom], [left, bottom]];
    corners.map(|[x, y]| format!("{}\\{}\\{z}", x * 0.5, y * 0.5)).join("\\")
}

fn contour(kind: &str, data: &str) -> InMemDicomObject {
    let count = (data.split('\\').count() / 3).to_string();
    item(&[(tags::CONTOUR_GEOMETRIC_TYPE, kind), (tags::NUMBER_OF_CONTOUR_POINTS, &count), (tags::CONTOUR_DATA, data)])
}

fn closed(data: &str) -> InMemDicomObject {
    contour("CLOSED_PLANAR", data)
}

/// An RTSTRUCT of the scan with these ROIs.
fn structure_set(rois: Vec<(&str, Vec<InMemDicomObject>)>) -> InMemDicomObject {
    let mut object = item(&[
        (tags::SOP_CLASS_UID, uids::RT_STRUCTURE_SET_STORAGE),
        (tags::SOP_INSTANCE_UID, "1.2.9"),
        (tags::MODALITY, "RTSTRUCT"),
    ]);
    let mut study = InMemDicomObject::new_empty();
    set_items(&mut study, tags::RT_REFERENCED_SERIES_SEQUENCE, vec![item(&[(tags::SERIES_INSTANCE_UID, "1.2.5")])]);
    let mut frame = item(&[(tags::FRAME_OF_REFERENCE_UID, "1.2.6")]);
    set_items(&mut frame, tags::RT_REFERENCED_STUDY_SEQUENCE, vec![study]);
    set_items(&mut object, tags::REFERENCED_FRAME_OF_REFERENCE_SEQUENCE, vec![frame]);
    let named = |number: &str| {
        let name = format!("part {number}");
        item(&[(tags::ROI_NUMBER, number), (tags::ROI_NAME, &name), (tags::REFERENCED_FRAME_OF_REFERENCE_UID, "1.2.6")])
    };
    set_items(&mut object, tags::STRUCTURE_SET_ROI_SEQUENCE, rois.iter().map(|(number, _)| named(number)).collect());
    let with_contours = |(number, contours): (&str, Vec<InMemDicomObject>)| {
        let mut roi = item(&[(tags::REFERENCED_ROI_NUMBER, number)]);
        set_items(&mut roi, tags::CONTOUR_SEQUENCE, contours);
        roi
    };
    set_items(&mut object, tags::ROI_CONTOUR_SEQUENCE, rois.into_iter().map(with_contours).collect());
    object
}

fn scan() -> Volume {
    volume((0..3).map(slice).collect())
}

fn read_for(bytes: &[u8], volume: &Volume) -> Result<LabelMap> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("contours.dcm");
    fs::write(&path, bytes).expect("written");
    labels::open_for(&path, None, volume)?.on_grid(&path, &volume.grid, false)
}

fn read(object: InMemDicomObject) -> Result<LabelMap> {
    read_for(&bytes_of(object), &scan())
}

/// The mask of a label on a slice as text.
fn drawn(labels: &LabelMap, label: u16, slice: usize) -> Vec<String> {
    let mask = &labels.mask(label)[slice * AREA..(slice + 1) * AREA];
    mask.chunks(4).map(|row| row.iter().map(|value| if *value == 1 { '#' } else { '.' }).collect()).collect()
}

#[test]
fn contours_are_filled_on_the_slices_of_their_series() {
    let outer = |z| closed(&rectangle([-0.5, -0.5], [3.5, 2.5], z));
    let inner = |z| closed(&rectangle([0.5, 0.5], [2.5, 1.5], z));
    let labels = read(structure_set(vec![
        ("7", vec![outer(0.0), inner(0.0), closed(&rectangle([0.6, 0.6], [2.4, 2.4], 2.0))]),
        ("2", vec![inner(0.0), inner(1.0)]),
    ]));
    let labels = labels.expect("labels");
    assert_eq!(drawn(&labels, 7, 0), ["####", "#..#", "####"]);
    assert_eq!(drawn(&labels, 7, 1), ["....", "....", "...."]);
    assert_eq!(drawn(&labels, 7, 2), ["....", ".##.", ".##."]);
    assert_eq!(drawn(&labels, 2, 1), ["....", ".##.", "...."]);
    assert_eq!(labels.names.to_string(), "2=part 2,7=part 7");
    let gap = "1 slices between the first and the last contour of an ROI have none, and are empty there";
    assert_eq!(labels.notes, [gap]);
    // one contour with a line to its hole
    let keyhole = [rectangle([-0.5, -0.5], [3.5, 2.5], 0.0), "-0.25\\-0.25\\0".into()].join("\\");
    let keyhole = [keyhole, rectangle([0.5, 0.5], [2.5, 1.5], 0.0), "0.25\\0.25\\0".into()].join("\\");
    for contours in [
        vec![closed(&keyhole)],
        vec![contour("CLOSEDPLANAR_XOR", &rectangle([-0.5, -0.5], [3.5, 2.5], 0.0)), inner(0.0)],
    ] {
        assert_eq!(drawn(&read(structure_set(vec![("1", contours)])).expect("labels"), 1, 0), ["####", "#..#", "####"]);
    }
}

#[test]
fn what_is_left_out_or_assumed_has_a_note() {
    let square = |z| rectangle([0.5, 0.5], [2.5, 1.5], z);
    let notes = |contours| {
        let labels = read(structure_set(vec![("3", contours)])).expect("labels");
        assert_eq!(drawn(&labels, 3, 1), ["....", ".##.", "...."], "{:?}", labels.notes);
        labels.notes.join("; ")
    };
    assert_eq!(notes(vec![closed(&square(1.0))]), "");
    let point = contour("POINT", "0\\0\\0");
    let line = contour("OPEN_PLANAR", &square(1.0));
    assert!(notes(vec![point.clone(), closed(&square(1.0)), line]).contains("2 points and open contours"));
    let short = closed("0\\0\\1\\1\\1\\1");
    assert!(
        notes(vec![short, closed("0\\0\\1"), closed(&square(1.0))]).contains("2 contours with fewer than 3 points")
    );
    assert!(notes(vec![closed(&square(1.3))]).contains("up to 0.30 mm beside slices"));
    let wide = closed(&rectangle([-3.0, 0.5], [2.5, 1.5], 2.0));
    assert!(notes(vec![closed(&square(1.0)), wide]).contains("1 contours reach up to 1.20 mm beyond the image"));
    let mut empty = structure_set(vec![("1", vec![closed(&rectangle([0.6, 0.6], [0.9, 0.9], 1.0))]), ("2", vec![])]);
    assert!(read(empty.clone()).expect("labels").notes.join("").ends_with("the contours of these ROIs: 1"));
    // a number that is no label
    empty = structure_set(vec![("0", vec![closed(&square(1.0))]), ("70000", vec![closed(&square(2.0))])]);
    let labels = read(empty).expect("labels");
    assert_eq!(labels.labels().into_iter().collect::<Vec<_>>(), [(1, 2), (2, 2)]);
    assert!(labels.notes[0].contains("their labels are 1, 2, ... in the order of the file"), "{:?}", labels.notes);
}

/// Message and hint of a contour of the second slice, after a change of the file.
fn refused_contour(contour: InMemDicomObject, change: impl Fn(&mut InMemDicomObject)) -> String {
    let first = closed(&rectangle([0.5, 0.5], [2.5, 1.5], 1.0));
    let mut object = structure_set(vec![("3", vec![first, contour])]);
    change(&mut object);
    let error = read(object).expect_err("refused");
    format!("{error}\n{}", error.hint())
}

#[test]
fn contours_that_are_not_on_the_slices_are_refused_with_the_distance() {
    let square = |z| rectangle([0.5, 0.5], [2.5, 1.5], z);
    for (data, part) in [
        (square(2.8), "contour 2 of ROI 3 is outside of the series, 0.80 mm from its nearest slice"),
        (square(-40.0), "is outside of the series, 40.00 mm from its nearest slice; slices are 1.00 mm apart"),
        (square(0.5), "is half-way between slices, 0.50 mm from the nearest one"),
        (square(1.25), "is 0.25 mm above or below another one of the same ROI"),
        (rectangle([9.0, 0.0], [12.0, 2.0], 1.0), "is 2.75 mm outside of the image of its slice"),
        (rectangle([0.0, -9.0], [2.0, -8.0], 1.0), "is 3.75 mm outside of the image of its slice"),
        (
            "0\\0\\0\\1\\0\\1\\1\\1\\2".into(),
            "is not parallel to the slices of the series: its points are up to 2.00 mm",
        ),
        ("0\\0\\1\\1\\0\\1\\1e9\\1\\1".into(), "has a point far outside of the series"),
        ("0\\0\\1\\1\\0\\1\\1e308\\1e308\\1e308".into(), "has a point far outside of the series"),
    ] {
        let text = refused_contour(closed(&data), |_| {});
        assert!(text.contains(part) && text.contains("give the series that the contours were drawn on"), "{text}");
    }
}

#[test]
fn damaged_contours_are_refused_by_name() {
    let square = rectangle([0.5, 0.5], [2.5, 1.5], 1.0);
    let changed = |change: &dyn Fn(&mut InMemDicomObject)| {
        let mut contour = closed(&square);
        change(&mut contour);
        contour
    };
    for (contour, part) in [
        (closed(&square.replace("0.25", "NaN")), "ContourData of contour 2 of ROI 3 must consist of numbers"),
        (closed(&square.replace("0.25", "inf")), "must consist of numbers"),
        (closed(&square.replace("0.25", "Smith")), "must consist of numbers"),
        (closed("0\\0\\1\\1\\0\\1\\1\\1"), "has 8 numbers, and should have 2 points"),
        (changed(&|c| set(c, tags::NUMBER_OF_CONTOUR_POINTS, "5")), "has 12 numbers, and should have 5 points"),
        (changed(&|c| set(c, tags::NUMBER_OF_CONTOUR_POINTS, "-4")), "should have -4 points"),
        (contour("CURVED", &square), "has no known ContourGeometricType"),
        (changed(&|c| set(c, Tag(0x3006, 0x0045), "0\\0\\5")), "is shifted by ContourOffsetVector"),
    ] {
        let text = refused_contour(contour, |_| {});
        assert!(text.contains(part) && !text.contains("Smith") && !text.contains("CURVED"), "{text}");
    }
    let other = || closed(&square);
    let roi = |number: &str, frame: &str| {
        item(&[(tags::ROI_NUMBER, number), (tags::REFERENCED_FRAME_OF_REFERENCE_UID, frame)])
    };
    let with_rois = |rois: Vec<InMemDicomObject>| {
        refused_contour(other(), |object| set_items(object, tags::STRUCTURE_SET_ROI_SEQUENCE, rois.clone()))
    };
    assert!(with_rois(vec![roi("3", "1.2.6"), roi("3", "1.2.6")]).contains("two ROIs have the number 3"));
    assert!(with_rois(vec![roi("x", "1.2.6")]).contains("an ROI has no valid ROINumber"));
    assert!(with_rois(vec![roi("4", "1.2.6")]).contains("it has contours of ROI 3, which StructureSetROISequence"));
    let text = with_rois(vec![roi("3", "1.2.7"), roi("5", "1.2.7")]);
    assert!(text.contains("it has another frame of reference than the series") && text.contains("of this series"));
    let nothing = read(structure_set(vec![("1", vec![contour("POINT", "0\\0\\0")])])).expect_err("refused");
    assert!(nothing.to_string().ends_with("it has no closed planar contours"), "{nothing}");
}

#[test]
fn contours_of_another_series_are_refused() {
    let contours = || structure_set(vec![("1", vec![closed(&rectangle([0.5, 0.5], [2.5, 1.5], 1.0))])]);
    let with = |tag: Tag, uid: &str| {
        volume(
            (0..3)
                .map(slice)
                .map(|mut object| {
                    set(&mut object, tag, uid);
                    object
                })
                .collect(),
        )
    };
    let bytes = bytes_of(contours());
    let text = |scan: &Volume| {
        let error = read_for(&bytes, scan).expect_err("refused");
        assert!(error.hint().contains("the series that the contours were drawn on"), "{}", error.hint());
        error.to_string()
    };
    assert!(text(&with(tags::FRAME_OF_REFERENCE_UID, "1.2.66")).contains("another frame of reference than the series"));
    assert!(text(&with(tags::SERIES_INSTANCE_UID, "1.2.55")).contains("drawn on another series than this one"));
    let mut unplaced = scan();
    unplaced.frame_of_reference = None;
    assert!(text(&unplaced).contains("its volume has no frame of reference"));
    // without a series
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.dcm");
    for (class, modality) in [(uids::RT_STRUCTURE_SET_STORAGE, "OT"), ("", "RTSTRUCT")] {
        let mut object = contours();
        set(&mut object, tags::SOP_CLASS_UID, class);
        set(&mut object, tags::MODALITY, modality);
        fs::write(&path, bytes_of(object)).expect("written");
        let error = labels::open(&path).expect_err("no series");
        assert!(error.to_string().ends_with("can only be filled on the voxels of their series"), "{error}");
        assert!(
            error.hint().contains("`data prepare`") && error.hint().contains("dcmrtstruct2nii"),
            "{}",
            error.hint()
        );
    }
    // some of the ROIs, which say so themselves or leave it to the file
    let mut object = contours();
    let roi = |number: &str| item(&[(tags::ROI_NUMBER, number)]);
    let mut foreign = roi("2");
    set(&mut foreign, tags::REFERENCED_FRAME_OF_REFERENCE_UID, "1.2.7");
    set_items(&mut object, tags::STRUCTURE_SET_ROI_SEQUENCE, vec![roi("1"), foreign]);
    let labels = read(object).expect("one ROI");
    assert_eq!(labels.notes, ["ROIs of another frame of reference were left out: 2"]);
    assert_eq!(labels.labels().into_iter().collect::<Vec<_>>(), [(1, 2)]);
}

#[test]
fn truncated_and_oversized_files_are_refused() {
    let scan = scan();
    let bytes = bytes_of(structure_set(vec![("1", vec![closed(&rectangle([0.5, 0.5], [2.5, 1.5], 1.0))])]));
    assert!(read_for(&bytes, &scan).is_ok());
    for end in (1..bytes.len()).step_by(3) {
        let error = read_for(&bytes[..end], &scan).expect_err("cut");
        assert!(!error.to_string().contains("panic"), "{end}: {error}");
    }
    // more numbers than are read
    let mut many = bytes;
    many.resize(many.len() + (1 << 25), b'\\');
    let error = read_for(&many, &scan).expect_err("too many numbers");
    assert!(error.to_string().contains("it has more than 33554432 numbers"), "{error}");
}

#[test]
fn masks_that_are_written_are_read_as_they_were() {
    for name in ["axial.zip", "oblique.zip", "sagittal.zip", "tilt.zip", "enhanced.dcm"] {
        let volume = open(&fixture(name)).expect("a volume");
        let count = volume.grid.num_voxels();
        let masks = [7, 3, 2].map(|step| -> Vec<u8> { (0..count).map(|at| u8::from(at * at % 13 > step)).collect() });
        let [first, second, third] = &masks;
        let empty = vec![0; count];
        let segments = [("liver", first), ("Läsion \\ 2", second), ("", third), ("none", &empty)]
            .map(|(name, mask)| SegmentMask { name, mask });
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mask.rtstruct.dcm");
        write::segments(&path, &segments, &volume).expect("written");
        let labels = labels::open_for(&path, None, &volume).expect("labels");
        assert_eq!(labels.names.to_string(), "1=liver,2=Läsion / 2,3=target,4=none", "{name}");
        for (label, mask) in (1..).zip(&masks) {
            assert_eq!(&labels.mask(label), mask, "{name}");
        }
        let bytes = fs::read(&path).expect("a file");
        assert!(!bytes.windows(6).any(|text| text == b"SECRET"), "{name}: an identifier was copied");
    }
    let nifti = open(&fixture("ras_i16.nii.gz")).expect("a volume");
    let mask = vec![1; nifti.grid.num_voxels()];
    let error = write::segments(Path::new("a.rtstruct.dcm"), &[SegmentMask { name: "a", mask: &mask }], &nifti);
    let error = error.expect_err("no series");
    assert!(error.to_string().contains("a DICOM RTSTRUCT refers to DICOM images, and the volume is a NIfTI file"));
}

#[test]
fn long_contours_are_read_with_any_value_representation() {
    // more than 64 KiB, which an explicit one cannot state: programs write UN instead
    let data = vec![rectangle([0.5, 0.5], [2.5, 1.5], 1.0); 2000].join("\\");
    let mut long = closed(&data);
    long.put(DataElement::new(tags::CONTOUR_DATA, VR::UN, PrimitiveValue::from(data.as_bytes())));
    let labels = read(structure_set(vec![("1", vec![closed(&rectangle([0.5, 0.5], [2.5, 1.5], 0.0)), long])]));
    assert_eq!(labels.expect("labels").labels().into_iter().collect::<Vec<_>>(), [(1, 2)]);
}

#[test]
fn an_rtstruct_is_a_label_map_for_data_prepare() {
    let home = tempfile::tempdir().expect("a folder");
    let at = |name: &str| home.path().join(name);
    fs::create_dir_all(at("scans/p1")).expect("a folder");
    fs::create_dir_all(at("labels")).expect("a folder");
    for index in 0..3 {
        fs::write(at(&format!("scans/p1/{index}.dcm")), bytes_of(slice(index))).expect("written");
    }
    let mask: Vec<u8> = (0..COUNT).map(|at| u8::from(at < 5)).collect();
    write::segments(&at("labels/p1.rtstruct.dcm"), &[SegmentMask { name: "liver", mask: &mask }], &scan())
        .expect("written");
    let mut options = PrepareOptions::new(at("scans"), at("labels"), "ct", at("out"));
    options.slices.window = Some("-300..300".parse().expect("a window"));
    (options.val_frac, options.test_frac) = (0.0, 0.0);
    assert_eq!(prepare(&options, &Silent).expect("prepared").images, 1);
    let mask = image::open(at("out/ct/train_masks/p1_axial_0000.png")).expect("a mask").to_luma8();
    assert_eq!(mask.pixels().filter(|pixel| pixel.0[0] == 255).count(), 5);
}

#[test]
fn contours_on_the_images_of_another_series_are_left_out() {
    let square = || closed(&rectangle([0.0, 0.0], [2.0, 2.0], 1.0));
    let mut elsewhere = square();
    set_items(
        &mut elsewhere,
        tags::CONTOUR_IMAGE_SEQUENCE,
        vec![item(&[(tags::REFERENCED_SOP_INSTANCE_UID, "1.2.99")])],
    );
    let mut object = structure_set(vec![("1", vec![square()]), ("2", vec![elsewhere])]);
    let both = read(object.clone()).unwrap();
    assert_eq!(drawn(&both, 1, 1), drawn(&both, 2, 1), "one series is named, and positions count");
    // a file that was drawn on two series
    let series = |uid: &str| item(&[(tags::SERIES_INSTANCE_UID, uid)]);
    let mut study = InMemDicomObject::new_empty();
    set_items(&mut study, tags::RT_REFERENCED_SERIES_SEQUENCE, vec![series("1.2.5"), series("1.2.55")]);
    let mut frame = item(&[(tags::FRAME_OF_REFERENCE_UID, "1.2.6")]);
    set_items(&mut frame, tags::RT_REFERENCED_STUDY_SEQUENCE, vec![study]);
    set_items(&mut object, tags::REFERENCED_FRAME_OF_REFERENCE_SEQUENCE, vec![frame]);
    let labels = read(object).unwrap();
    assert!(labels.labels().contains_key(&1) && !labels.labels().contains_key(&2), "{labels:?}");
    assert!(labels.notes.iter().any(|note| note.ends_with("drawn on another series were left out: 2")), "{labels:?}");
}
