//! Several series, copies of files, and slices at one position.

use super::*;

/// A slice of another series.
fn of_series(number: Option<i32>, index: i32, description: &str) -> InMemDicomObject {
    let mut object = slice(index);
    let uid = format!("1.2.5.{}", description.len());
    set(&mut object, tags::SERIES_INSTANCE_UID, &uid);
    set(&mut object, tags::SOP_INSTANCE_UID, &format!("{uid}.{index}"));
    set(&mut object, tags::SERIES_DESCRIPTION, description);
    if let Some(number) = number {
        set(&mut object, tags::SERIES_NUMBER, &number.to_string());
    }
    object
}

/// Series of 2, 3 and 4 slices: `T1 axial`, `T2 axial fs`, `scout`.
fn three_series(numbers: [Option<i32>; 3]) -> tempfile::TempDir {
    let all = [("T1 axial", 2), ("T2 axial fs", 3), ("scout", 4)].into_iter().zip(numbers);
    let slices = all.flat_map(|((name, count), number)| (0..count).map(move |index| of_series(number, index, name)));
    folder(slices.collect())
}

#[test]
fn a_series_is_chosen_by_number_uid_description_or_size() {
    for numbers in [[None; 3], [Some(1), Some(2), Some(3)], [Some(7); 3]] {
        let folder = three_series(numbers);
        let count = |selected: &str| {
            let path = PathBuf::from(format!("{}#{selected}", folder.path().display()));
            open(&path).map(|volume| volume.grid.size[2]).map_err(|error| error.to_string())
        };
        assert_eq!(count("T1 axial"), Ok(2));
        assert_eq!(count("t2 AXIAL FS"), Ok(3));
        assert_eq!(count("t2"), Ok(3));
        assert_eq!(count("1.2.5.5"), Ok(4));
        assert_eq!(count("largest"), Ok(4));
        assert_eq!(crate::open_chosen(folder.path(), Some("scout"), None).expect("a series").grid.size[2], 4);
        let found = count("axial").expect_err("two fit");
        assert!(found.contains("2 series that fit the choice"), "{found}");
        let found = count("CT").expect_err("none fits");
        assert!(found.contains("no series of the chosen name, but"), "{found}");
        // the name of the folder is random
        let found = refused(folder.path()).replace(&folder.path().display().to_string(), "");
        assert!(found.contains("3 series") && found.contains("#largest") && found.contains("--series"), "{found}");
        assert!(!found.contains("T1") && !found.contains("1.2.5"), "{found}");
        match numbers[0] {
            Some(1) => assert_eq!([count("1"), count("3")], [Ok(2), Ok(4)]),
            Some(_) => assert!(count("7").expect_err("all fit").contains("3 series that fit")),
            // a number is no part of a description
            None => assert!(count("2").expect_err("no number").contains("no series with the number 2")),
        }
    }
}

#[test]
fn a_series_that_is_not_found_is_answered_with_all_in_their_character_sets() {
    let with = |charset: &str, bytes: &[u8], index: i32| {
        let mut object = of_series(Some(index), index, &"x".repeat(usize::try_from(index).unwrap()));
        set(&mut object, tags::SPECIFIC_CHARACTER_SET, charset);
        let value = dicom_core::PrimitiveValue::from(bytes.to_vec());
        object.put(dicom_object::mem::InMemElement::new(tags::SERIES_DESCRIPTION, dicom_core::VR::LO, value));
        object
    };
    let folder = folder(vec![
        with("ISO_IR 100", b"Sch\xe4del nativ ", 1),
        with("ISO_IR 192", "肝臓 動脈相".as_bytes(), 2),
        with("GB18030", b"\xb8\xce\xd4\xe0", 3),
        with("ISO_IR 144", b"\xbf\xd5\xe7\xd5\xdd\xec", 4),
    ]);
    let path = PathBuf::from(format!("{}#CT", folder.path().display()));
    let error = open(&path).expect_err("no such series");
    let hint = error.hint();
    for line in [
        "\n  number 1, `Schädel nativ`, `1.2.5.1`",
        "\n  number 2, `肝臓 動脈相`, `1.2.5.2`",
        "\n  number 3, `肝脏`, `1.2.5.3`",
        "\n  number 4, `Печень`, `1.2.5.4`",
    ] {
        assert!(hint.contains(line), "{line}: {hint}");
    }
    assert!(!error.to_string().contains("1.2.5"), "{error}");
}

#[test]
fn localizers_are_left_out() {
    let localizer = |mut object: InMemDicomObject| {
        set(&mut object, tags::IMAGE_TYPE, "ORIGINAL\\PRIMARY\\LOCALIZER");
        set(&mut object, tags::IMAGE_ORIENTATION_PATIENT, "0\\1\\0\\0\\0\\-1");
        object
    };
    let scan = || (0..3).map(|index| of_series(None, index, "scan"));
    // a series of its own, and images of the same series
    let apart = localizer(of_series(None, 9, "scout view"));
    for extra in [
        vec![apart.clone()],
        vec![localizer(of_series(None, 9, "scan"))],
        vec![apart, localizer(of_series(None, 8, "scan"))],
    ] {
        let num = extra.len();
        let folder = folder(scan().chain(extra).collect());
        let volume = open(folder.path()).expect("a volume");
        assert_eq!(volume.grid.size[2], 3);
        assert!(has_note(&volume, &format!("{num} localizer images were left out")), "{:?}", volume.notes);
    }
    let folder = folder(scan().chain([localizer(of_series(None, 9, "scout view"))]).collect());
    assert_eq!(open(&PathBuf::from(format!("{}#scout", folder.path().display()))).expect("chosen").grid.size[2], 1);
    // the only image
    assert!(open(&folder.path().join("3.dcm")).is_ok());
}

#[test]
fn copies_of_a_file_are_read_once() {
    let same = |change: fn(&mut InMemDicomObject)| {
        let mut copy = slice(1);
        change(&mut copy);
        folder(vec![slice(0), slice(1), slice(2), copy])
    };
    // equal bytes, and other bytes outside of the image
    let changes: [fn(&mut InMemDicomObject); 3] = [
        |_| {},
        |object| set(object, tags::INSTITUTION_NAME, "elsewhere"),
        |object| set(object, tags::WINDOW_WIDTH, "99"),
    ];
    for change in changes {
        let volume = open(same(change).path()).expect("a volume");
        assert_eq!(volume.grid.size[2], 3);
        assert!(has_note(&volume, "1 copies of files were left out: 3.dcm of 1.dcm"), "{:?}", volume.notes);
    }
    let changes: [fn(&mut InMemDicomObject); 3] = [
        |object| set_pixels(object, &[7; 12], false),
        |object| set(object, tags::RESCALE_INTERCEPT, "-1000"),
        |object| set_u16(object, tags::PIXEL_PADDING_VALUE, 1000),
    ];
    for change in changes {
        let found = refused(same(change).path());
        assert!(found.contains("3.dcm: it has the SOPInstanceUID and the position of 1.dcm"), "{found}");
    }
    // one UID for all files
    let folder = changed(|_, object| set(object, tags::SOP_INSTANCE_UID, "1.2.3"));
    let volume = open(folder.path()).expect("a volume");
    assert!(volume.grid.size[2] == 3 && has_note(&volume, "same SOPInstanceUID"), "{:?}", volume.notes);
}

#[test]
fn slices_at_one_position_are_explained() {
    let twice = |change: fn(&mut InMemDicomObject)| {
        let again = (0..3).map(|index| {
            let mut object = slice(index);
            set(&mut object, tags::SOP_INSTANCE_UID, &format!("1.2.3.1.{index}"));
            change(&mut object);
            object
        });
        refused(folder((0..3).map(slice).chain(again).collect()).path())
    };
    let found = twice(|_| {});
    assert!(found.contains("3 of its 6 slices have the position of another slice, as 0.dcm and 3.dcm"), "{found}");
    assert!(found.contains("remove the file of each pair") && !found.contains("differ in"), "{found}");
    let found = twice(|object| set(object, tags::ECHO_TIME, "20"));
    assert!(found.contains("several volumes, which differ in EchoTime") && found.contains("dcm2niix"), "{found}");
    let found = twice(|object| set(object, tags::TRIGGER_TIME, "20"));
    assert!(found.contains("differ in TriggerTime"), "{found}");
    let found = twice(|object| set(object, tags::SERIES_NUMBER, "3"));
    assert!(found.contains("differ in SeriesNumber"), "{found}");
}

/// Two patients in `scans`, each with an arterial and a portal series and a localizer, and label maps in `labels`. The portal
/// series of the second patient was made twice.
fn archive() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    fs::create_dir(root.path().join("labels")).expect("created");
    let shape = crate::Grid { size: [4, 3, 3], affine: volume_of(3).grid.affine };
    for patient in ["P1", "P2"] {
        let folder = root.path().join("scans").join(patient);
        fs::create_dir_all(&folder).expect("created");
        let mut all = vec![("arterial", 2, "20200101"), ("portal", 3, "20200102")];
        all.extend((patient == "P2").then_some(("portal again", 3, "20200103")));
        for (number, (description, count, date)) in (1..).zip(all) {
            for index in 0..count {
                let mut object = of_series(Some(number), index, description);
                set(&mut object, tags::SERIES_DATE, date);
                fs::write(folder.join(format!("{number}_{index}.dcm")), bytes_of(object)).expect("written");
            }
        }
        let mut scout = of_series(None, 9, "the scout of all");
        set(&mut scout, tags::IMAGE_TYPE, "ORIGINAL\\PRIMARY\\LOCALIZER");
        fs::write(folder.join("scout.dcm"), bytes_of(scout)).expect("written");
        let labels = root.path().join("labels").join(format!("{patient}.nii.gz"));
        crate::write::nifti_labels(&labels, &[[1; 12], [0; 12], [1; 12]].concat(), &shape).expect("written");
    }
    root
}

fn volume_of(count: i32) -> Volume {
    open(folder((0..count).map(slice).collect()).path()).expect("a volume")
}

#[test]
fn a_scan_lists_the_series_of_a_folder_and_a_rule_chooses_one() {
    use prsmed_base::event::Silent;
    use prsmed_data::prepare::{
        PrepareOptions, ScanOptions, prepare, prepare_classes, read_pairs, scan, series_rows, write_scan,
    };
    let root = archive();
    let scanned = |series: Option<&str>| {
        let options = ScanOptions { series: series.map(str::to_owned), ..ScanOptions::default() };
        scan(root.path(), &options, &Silent).expect("a scan")
    };
    let report = scanned(None);
    let rows = series_rows(&report);
    assert_eq!(rows.len(), 7);
    assert_eq!(rows[0], ["scans/P1", "-", "the scout of all", "CT (localizer)", "1", "axial", "-", "no"]);
    assert_eq!(rows[2], ["scans/P1", "2", "portal", "CT", "3", "axial", "2020-01-02", "no"]);
    assert_eq!((report.volumes, report.ambiguous.len()), (0, 2));
    let reason = &report.ambiguous[0].reason;
    let listed =
        "it has 2 series: 1: `arterial` (CT, 2 slices), 2: `portal` (CT, 3 slices); choose one with the argument";
    assert!(reason.starts_with(listed), "{reason}");
    // a rule that fits two series of one patient
    let report = scanned(Some("description~portal"));
    assert_eq!((report.volumes, report.ambiguous.len()), (1, 1));
    assert!(report.ambiguous[0].reason.starts_with("2 of its series fit `description~portal`: 2: `portal`"));
    assert!(scanned(Some("modality=MR")).ambiguous[1].reason.starts_with("none of its 4 series fits `modality=MR`"));
    let report = scanned(Some("description~portal,newest"));
    assert_eq!((report.volumes, report.ambiguous.len()), (2, 0));
    let out = root.path().join("scan");
    let [pairs, json, page] = write_scan(&report, &out).expect("written");
    let [pairs_text, json, page] = [&pairs, &json, &page].map(|path| fs::read_to_string(path).expect("text"));
    assert!(pairs_text.contains("../scans/P2#description~portal,newest"), "{pairs_text}");
    assert!(json.contains("\"portal again\"") && page.contains("<td>portal again</td>") && !json.contains("1.2.5"));
    let prepared = |images: &Path, series: Option<&str>| {
        let data = tempfile::tempdir().expect("a folder");
        let mut options = PrepareOptions::new(images, root.path().join("labels"), "ct", data.path().join("out"));
        options.slices.window = Some("-300..300".parse().expect("a window"));
        options.series = series.map(str::to_owned);
        (data, options)
    };
    // the table has the choice
    let (_data, options) = prepared(&pairs, None);
    let classes = prepare_classes(read_pairs(&pairs).expect("a table"), &options, &Silent).expect("prepared");
    assert_eq!((classes[0].1.volumes, classes[0].1.images), (Some(2), 4));
    // a choice that fits several series stops, and one that fits none leaves out the patient
    let scans = root.path().join("scans");
    let (_data, options) = prepared(&scans, Some("description~portal"));
    let error = prepare(&options, &Silent).expect_err("two series of P2");
    assert!(error.to_string().contains("P2") && error.to_string().contains("2 series that fit the choice"), "{error}");
    let (_data, options) = prepared(&scans, Some("description=portal again"));
    assert_eq!(prepare(&options, &Silent).expect("one patient").volumes, Some(1));
}

#[test]
fn slices_of_two_contrasts_between_each_other_are_refused() {
    let between = |echo: &'static str| {
        let of = move |index: i32, is_second: bool| {
            let mut object = slice(index);
            set(&mut object, tags::ECHO_TIME, if is_second { echo } else { "15" });
            if is_second {
                set(&mut object, tags::SOP_INSTANCE_UID, &format!("1.2.3.1.{index}"));
                set(&mut object, tags::IMAGE_POSITION_PATIENT, &format!("0\\0\\{index}.5"));
            }
            object
        };
        folder((0..3).flat_map(|index| [of(index, false), of(index, true)]).collect())
    };
    let found = refused(between("90").path());
    assert!(found.contains("of 2 contrasts: their EchoTime is from 15 to 90") && found.contains("dcm2niix"), "{found}");
    assert_eq!(open(between("15.01").path()).expect("a volume").grid.size[2], 6);
}
