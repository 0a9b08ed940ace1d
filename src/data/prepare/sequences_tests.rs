//! Tests of pairs of several sequences.

use std::collections::BTreeMap;
use std::fs;

use super::super::{PrepareReport, prepare_classes, read_pairs};
use super::*;
use crate::fixture::Root;
use crate::manifest::Manifest;
use crate::volume::nifti::geometry::Forms;
use crate::volume::{Affine, Grid, Neighbours, Volume, VolumeSource, Voxels, Window, write};
use prsmed_base::event::Silent;

fn grid(size: [usize; 3], mm: f64) -> Grid {
    Grid { size, affine: Affine::from_columns([[mm, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]], [0.0; 3]) }
}

/// A volume of 4x3x2 voxels with one value, and 255 in its first voxel.
fn volume(root: &Root, name: &str, value: u8) {
    let mut values = vec![value; 24];
    values[0] = 255;
    write::nifti_labels(&root.file(name), &values, &grid([4, 3, 2], 1.0)).unwrap();
}

/// Patients with volumes of the sequences and a label map.
fn volumes(patients: &[(&str, &[&str])]) -> Root {
    let root = Root::new();
    for (patient, sequences) in patients {
        for (sequence, value) in sequences.iter().zip(1..) {
            volume(&root, &format!("{patient}/{sequence}.nii.gz"), value * 10);
        }
        let mask: Vec<u8> = (0..24).map(|voxel| u8::from(voxel % 12 < 2)).collect();
        write::nifti_labels(&root.file(&format!("{patient}/mask.nii.gz")), &mask, &grid([4, 3, 2], 1.0)).unwrap();
    }
    root
}

fn prepared(root: &Root, table: &str, change: impl FnOnce(&mut PrepareOptions)) -> Result<PrepareReport> {
    let path = root.file("pairs.csv");
    fs::write(&path, table).unwrap();
    let mut options = PrepareOptions::new(&path, &path, "mr", root.path().join("out"));
    options.slices.window = Some(Window::Range { low: 0.0, high: 255.0 });
    (options.val_frac, options.test_frac) = (0.0, 0.0);
    change(&mut options);
    let mut reports = prepare_classes(read_pairs(&path)?, &options, &Silent)?;
    Ok(reports.remove(0).1)
}

const TWO: &str = "image.T1,image.FLAIR,mask,patient\n*/T1.nii.gz,*/FLAIR.nii.gz,*/mask.nii.gz,*\n";

#[test]
fn sequences_are_colours_and_a_missing_one_is_said_and_0() {
    let root = volumes(&[("P1", &["T1", "FLAIR"]), ("P2", &["T1"])]);
    let report = prepared(&root, TWO, |_| {}).unwrap();
    assert_eq!((report.volumes, report.images), (Some(2), 4));
    assert!(
        report.notes.contains(&"FLAIR is missing for 1 of 2 images; it is 0 there".to_owned()),
        "{:?}",
        report.notes
    );
    let pixel = |name: &str| {
        let image = image::open(root.path().join("out/mr/train_images").join(name)).unwrap();
        image.as_rgb8().expect("colours").get_pixel(0, 0).0
    };
    assert_eq!(pixel("P1_axial_0000.png"), [10, 20, 0]);
    assert_eq!(pixel("P2_axial_0001.png"), [10, 0, 0]);
    let intensity = Prepared::read(&root.path().join("out/mr")).unwrap().unwrap().intensity;
    assert_eq!(list(&intensity.sequences), "`T1`, `FLAIR`");
    assert_eq!(
        intensity.to_string(),
        "axial slices with `T1` as red, `FLAIR` as green, and the windows T1 `0..255`, FLAIR `0..255`"
    );
    // a training reads the same, and other classes must have the same
    let manifest = Manifest::open(&root.path().join("out"), None).unwrap();
    assert_eq!(crate::prepared::intensities(&manifest).unwrap()["mr"], intensity);
    prepared(&root, "image,mask\nP1/T1.nii.gz,P1/mask.nii.gz\n", |options| options.modality = "ct".into()).unwrap();
    let error = crate::prepared::intensities(&Manifest::open(&root.path().join("out"), None).unwrap()).unwrap_err();
    assert!(error.to_string().contains("`ct` was prepared from images without sequences, `mr` from `T1`"), "{error}");
}

#[test]
fn each_sequence_has_its_window() {
    let root = volumes(&[("P1", &["T1", "FLAIR"])]);
    let window = Window::Range { low: 0.0, high: 100.0 };
    prepared(&root, TWO, |options| options.windows = BTreeMap::from([("FLAIR".into(), window)])).unwrap();
    let image = image::open(root.path().join("out/mr/train_images/P1_axial_0000.png")).unwrap();
    assert_eq!(image.as_rgb8().unwrap().get_pixel(0, 0).0, [10, 51, 0]);
    let intensity = Prepared::read(&root.path().join("out/mr")).unwrap().unwrap().intensity;
    assert_eq!(intensity.windows(), "T1 `0..255`, FLAIR `0..100`");
    let other = |options: &mut PrepareOptions| {
        options.modality = "other".into();
        options.windows.insert("T2".into(), window);
    };
    let error = prepared(&root, TWO, other).unwrap_err();
    assert!(error.to_string().contains("there is no sequence `T2`") && error.hint().contains("`FLAIR`"), "{error}");
}

#[test]
fn a_class_keeps_its_sequences() {
    let root = volumes(&[("P1", &["T1", "FLAIR"]), ("P2", &["T1", "FLAIR"])]);
    let append = |options: &mut PrepareOptions| options.append = true;
    let line = |header: &str, names: [&str; 2], patient: &str| {
        let files = names.map(|name| format!("{patient}/{name}.nii.gz"));
        format!("{header},mask\n{},{},{patient}/mask.nii.gz\n", files[0], files[1])
    };
    prepared(&root, &line("image.T1,image.FLAIR", ["T1", "FLAIR"], "P1"), |_| {}).unwrap();
    for (table, expected) in [
        (line("image.FLAIR,image.T1", ["FLAIR", "T1"], "P2"), "was prepared from `T1`, `FLAIR`"),
        ("image,mask\nP2/T1.nii.gz,P2/mask.nii.gz\n".to_owned(), "was prepared from `T1`, `FLAIR`"),
    ] {
        let error = prepared(&root, &table, append).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.hint().contains("`image.T1`, `image.FLAIR` in this order"), "{}", error.hint());
    }
    let again = prepared(&root, &line("image.T1,image.FLAIR", ["T1", "FLAIR"], "P1"), append).unwrap();
    assert_eq!((again.known, again.images), (2, 0));
    assert_eq!(prepared(&root, &line("image.T1,image.FLAIR", ["T1", "FLAIR"], "P2"), append).unwrap().images, 2);
    // and a class without sequences gets none
    let plain = |options: &mut PrepareOptions| options.modality = "plain".into();
    prepared(&root, "image,mask\nP1/T1.nii.gz,P1/mask.nii.gz\n", plain).unwrap();
    let error = prepared(&root, &line("image.T1,image.FLAIR", ["T1", "FLAIR"], "P2"), |options| {
        (options.modality, options.append) = ("plain".into(), true);
    });
    assert!(error.unwrap_err().to_string().contains("was prepared without sequences"));
}

#[test]
fn flat_images_are_joined_and_found_again() {
    let root = Root::new();
    for (name, value) in [("t1", 30), ("t2", 60)] {
        root.mask(&format!("{name}.png"), 6, 4, |x, _| value + u8::try_from(x).unwrap());
    }
    root.mask("mask.png", 6, 4, |x, _| if x < 2 { 255 } else { 0 });
    let table = "name,image.T1,image.T2,image.b1000,mask\na,t1.png,t2.png,,mask.png\n";
    let report = prepared(&root, table, |_| {}).unwrap();
    assert_eq!((report.volumes, report.images, report.intensity), (None, 1, None));
    assert!(
        report.notes.contains(&"b1000 is missing for 1 of 1 images; it is 0 there".to_owned()),
        "{:?}",
        report.notes
    );
    let image = image::open(root.path().join("out/mr/train_images/a.png")).unwrap();
    assert_eq!(image.as_rgb8().unwrap().get_pixel(2, 1).0, [32, 62, 0]);
    let intensity = Prepared::read(&root.path().join("out/mr")).unwrap().unwrap().intensity;
    assert_eq!(list(&intensity.sequences), "`T1`, `T2`, `b1000`");
    let again = prepared(&root, table, |options| options.append = true).unwrap();
    assert_eq!((again.known, again.images), (1, 0));
}

#[test]
fn what_cannot_be_one_image_is_refused() {
    let root = volumes(&[("P1", &["T1", "FLAIR"])]);
    root.mask("t1.png", 4, 3, |_, _| 9);
    root.mask("small.png", 4, 2, |_, _| 9);
    root.image("colour.png", 4, 3);
    root.mask("mask.png", 4, 3, |x, _| u8::from(x == 0) * 255);
    let values = vec![1; 24];
    write::nifti_labels(&root.file("far.nii.gz"), &values, &grid([4, 3, 2], 1.5)).unwrap();
    let header = "image.T1,image.FLAIR,mask";
    for (table, expected, remedy) in [
        ("image.T1,mask\nP1/T1.nii.gz,P1/mask.nii.gz\n".to_owned(), "only the sequence `T1`", "two or three"),
        ("image.a,image.b,image.c,image.d,mask\nx,x,x,x,x\n".to_owned(), "there are 4 sequences", "choose"),
        ("image.T1,image.t1,mask\nx,x,x\n".to_owned(), "two columns `image.T1`", "rename"),
        ("image.none,image.T1,mask\nx,x,x\n".to_owned(), "`none` cannot be the name", "letters"),
        ("image,image.T1,image.T2,mask\nx,x,x,x\n".to_owned(), "`image`, or one for each", "remove"),
        (format!("{header}\nP1/T1.nii.gz,gone.nii.gz,P1/mask.nii.gz\n"), "`gone.nii.gz` does not exist", "correct"),
        (format!("{header}\nP1/T1.nii.gz,*/FLAIR.nii.gz,P1/mask.nii.gz\n"), "different numbers of `*`", "as many"),
        (format!("{header}\nP1/T1.nii.gz,t1.png,P1/mask.nii.gz\n"), "one is a flat image", "one kind"),
        (format!("{header}\nP1/T1.nii.gz,P1/T1.nii.gz,P1/mask.nii.gz\n"), "the file of two sequences", "its own"),
        (format!("{header}\nP1/T1.nii.gz,far.nii.gz,P1/mask.nii.gz\n"), "voxels of 1.500x1.000x2.000 mm", ""),
        (format!("{header}\nt1.png,small.png,mask.png\n"), "is 4 x 2 pixels, and", ""),
        (format!("{header}\nt1.png,colour.png,mask.png\n"), "is a colour image", ""),
    ] {
        let error = prepared(&root, &table, |_| {}).unwrap_err();
        assert!(error.to_string().contains(expected), "{table}: {error}");
        assert!(error.hint().contains(remedy), "{table}: {}", error.hint());
        assert!(!root.path().join("out").exists(), "{table}");
    }
    let error = prepared(&root, TWO, |options| options.slices.context = Neighbours::Slices(1)).unwrap_err();
    assert!(error.to_string().contains("neighbouring slices") && error.hint().contains("one sequence"), "{error}");
    // a line without any image is left out and named
    let table = format!("{header}\nP1/T1.nii.gz,P1/FLAIR.nii.gz,P1/mask.nii.gz\n,none,P1/mask.nii.gz\n");
    let report = prepared(&root, &table, |_| {}).unwrap();
    assert_eq!(report.images, 2);
    assert!(report.skipped.iter().any(|skip| skip.reason == "a line has no image of any sequence: line 3"));
}

#[test]
fn grids_that_differ_by_rounding_are_one() {
    let rounded = Grid {
        affine: Affine(grid([4, 3, 2], 1.0).affine.0.map(|row| row.map(|value| value + 1e-6))),
        size: [4, 3, 2],
    };
    let source = VolumeSource::Nifti(Forms::of_grid(&rounded));
    let of = |grid: Grid| Volume::new(Voxels::I16(vec![5; 24]), grid, source.clone());
    let sequences =
        ["a", "b"].map(|name| Sequence { name: name.into(), window: Window::Range { low: 0.0, high: 255.0 } });
    let parts = vec![Some((Path::new("a"), of(grid([4, 3, 2], 1.0)))), Some((Path::new("b"), of(rounded)))];
    let joined = crate::volume::sequences::join(parts, &sequences).unwrap().volume;
    assert_eq!(joined.voxels, Voxels::Rgb(vec![[5, 5, 0]; 24]));
}
