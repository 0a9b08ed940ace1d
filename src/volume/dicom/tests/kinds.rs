//! Images that are no slices of a patient, and sizes that are not those in the patient.

use super::*;

#[test]
fn mosaics_are_refused_alone_and_among_others() {
    let mosaic = |index: i32, kind: &str| {
        let mut object = slice_of("MR", index);
        set(&mut object, tags::IMAGE_TYPE, kind);
        object
    };
    let siemens = "ORIGINAL\\PRIMARY\\M\\ND\\MOSAIC";
    for (kinds, is_refused) in [
        (vec![siemens], true),
        (vec!["DERIVED\\PRIMARY\\DIFFUSION\\FA\\ND\\NORM\\MOSAIC"], true),
        (vec![siemens; 4], true),
        (vec!["ORIGINAL\\PRIMARY\\M\\ND", siemens], true),
        (vec!["ORIGINAL\\PRIMARY\\M\\ND", "ORIGINAL\\PRIMARY\\M\\ND\\NORM"], false),
        (vec!["ORIGINAL\\PRIMARY\\MOSAICS"], false),
    ] {
        let folder = folder(kinds.iter().zip(0..).map(|(kind, index)| mosaic(index, kind)).collect());
        if !is_refused {
            open(folder.path()).unwrap_or_else(|error| panic!("{kinds:?}: {error}"));
            continue;
        }
        let found = refused(folder.path());
        assert!(found.contains("it is a mosaic") && found.contains("dcm2niix"), "{kinds:?}: {found}");
    }
    // four times at one place, which differ in their number
    let folder = folder(
        (0..4)
            .map(|number| {
                let mut object = mosaic(0, siemens);
                set(&mut object, tags::SOP_INSTANCE_UID, &format!("1.2.3.{number}"));
                set(&mut object, tags::ACQUISITION_NUMBER, &number.to_string());
                object
            })
            .collect(),
    );
    assert!(refused(folder.path()).contains("it is a mosaic"));
}

#[test]
fn projections_and_images_of_a_screen_have_a_note() {
    for (kind, part) in [
        ("DERIVED\\SECONDARY\\PROJECTION IMAGE", "projections of a volume (ImageType has PROJECTION IMAGE)"),
        ("DERIVED\\SECONDARY\\MIP", "ImageType has MIP"),
        ("DERIVED\\PRIMARY\\VOLUME\\MAX_IP", "ImageType has MAX_IP"),
        ("DERIVED\\SECONDARY\\SCREEN SAVE", "one of a screen or a report"),
        ("DERIVED\\SECONDARY\\OTHER\\DOSE_INFO", "ImageType has DOSE_INFO"),
        ("ORIGINAL\\PRIMARY\\AXIAL", ""),
        ("DERIVED\\SECONDARY\\MPR", ""),
    ] {
        let mut object = slice(0);
        set(&mut object, tags::IMAGE_TYPE, kind);
        let notes = volume(vec![object]).notes;
        let found = notes.iter().filter(|note| note.contains("ImageType")).count();
        assert_eq!(found, usize::from(!part.is_empty()), "{kind}: {notes:?}");
        assert!(notes.iter().any(|note| note.contains(part)) || part.is_empty(), "{kind}: {notes:?}");
    }
}

#[test]
fn the_size_of_a_pixel_at_the_detector_is_that_in_the_patient_only_with_a_factor() {
    let radiograph = |attributes: &[(Tag, &str)]| {
        let mut object = slice_of("DX", 0);
        for tag in [tags::PIXEL_SPACING, tags::IMAGE_POSITION_PATIENT, tags::IMAGE_ORIENTATION_PATIENT] {
            object.remove_element(tag);
        }
        for (tag, text) in attributes {
            set(&mut object, *tag, text);
        }
        folder(vec![object])
    };
    let (imager, factor) = (tags::IMAGER_PIXEL_SPACING, tags::ESTIMATED_RADIOGRAPHIC_MAGNIFICATION_FACTOR);
    let (usual, film) = (tags::PIXEL_SPACING, tags::NOMINAL_SCANNED_PIXEL_SPACING);
    let calibration = tags::PIXEL_SPACING_CALIBRATION_TYPE;
    for (attributes, spacing, part) in [
        (&[(imager, "0.2\\0.1"), (factor, "1.25")][..], [0.08, 0.16], "(ImagerPixelSpacing); it is divided by"),
        (&[(imager, "0.2\\0.1")], [0.1, 0.2], "by a factor that the file does not say"),
        (&[(imager, "0.2\\0.1"), (factor, "1")], [0.1, 0.2], "Factor (1)"),
        (&[(imager, "0.2\\0.1"), (factor, "1.25"), (usual, "0.16\\0.08")], [0.08, 0.16], ""),
        (&[(imager, "0.2\\0.1"), (usual, "0.2\\0.1")], [0.1, 0.2], "the size of a pixel at the detector"),
        (&[(imager, "0.2\\0.1"), (usual, "0.2\\0.1"), (calibration, "FIDUCIAL")], [0.1, 0.2], ""),
        (&[(film, "0.3\\0.4")], [0.4, 0.3], "NominalScannedPixelSpacing"),
        (&[(usual, "0.3\\0.4")], [0.4, 0.3], ""),
    ] {
        let folder = radiograph(attributes);
        let volume = open(&folder.path().join("0.dcm")).unwrap_or_else(|error| panic!("{attributes:?}: {error}"));
        let [x, y, _] = volume.grid.spacing();
        assert!((x - spacing[0]).abs() < 1e-9 && (y - spacing[1]).abs() < 1e-9, "{attributes:?}: {x}, {y}");
        let notes: Vec<&String> = volume.notes.iter().filter(|note| note.contains("Spacing")).collect();
        assert_eq!(notes.len(), usize::from(!part.is_empty()), "{attributes:?}: {notes:?}");
        assert!(notes.iter().all(|note| note.contains(part)), "{attributes:?}: {notes:?}");
    }
    for wrong in ["0", "-1.2", "1,25"] {
        let folder = radiograph(&[(imager, "0.2\\0.1"), (factor, wrong)]);
        let found = refused(&folder.path().join("0.dcm"));
        assert!(found.contains("EstimatedRadiographicMagnificationFactor is"), "{wrong}: {found}");
    }
}
