//! Tests of the preparation of volumes, on NIfTI files made for them.

use std::fs;
use std::path::PathBuf;

use super::super::layouts::are_volumes;
use super::*;
use crate::check;
use crate::fixture::{checkout, shared};
use crate::labels::Labels;
use crate::manifest::{Manifest, Presence, Row};
use crate::prepare::{Negatives, Patients, ScanOptions, prepare, scan};
use crate::prepared::Prepared;
use crate::volume::format::stem_of;
use crate::volume::nifti::geometry::Forms;
use crate::volume::{Affine, Axis, Grid, VolumeSource, Voxels};
use prsmed_base::event::Silent;

const SIZE: [usize; 3] = [8, 6, 5];

/// An empty volume whose voxel axes point to the right, to the front and up.
fn volume(size: [usize; 3]) -> Volume {
    let affine = Affine::from_columns([[0.7, 0.0, 0.0], [0.0, 0.8, 0.0], [0.0, 0.0, 2.5]], [1.0, 2.0, 3.0]);
    let grid = Grid { size, affine };
    let source = VolumeSource::Nifti(Forms::of_grid(&grid));
    Volume::new(Voxels::I16(vec![0; size.iter().product()]), grid, source)
}

struct Folders(tempfile::TempDir);

impl Folders {
    fn new() -> Self {
        let folders = Self(tempfile::tempdir().unwrap());
        for name in ["ct", "labels"] {
            fs::create_dir(folders.path(name)).unwrap();
        }
        folders
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, size: [usize; 3], value: impl Fn([usize; 3]) -> u8) {
        let mut values = Vec::new();
        for z in 0..size[2] {
            for y in 0..size[1] {
                values.extend((0..size[0]).map(|x| value([x, y, z])));
            }
        }
        volume::write::nifti_labels(&self.path(name), &values, &volume(size).grid).unwrap();
    }

    /// A volume whose values differ everywhere, and its label map: 1 on slices 1 to 3, in the posterior left of the
    /// patient; 2 on slice 3, in the anterior right.
    fn pair(&self, image: &str, labels: &str) {
        // volumes of other names show something else
        let tint = image.bytes().fold(0_u8, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte));
        let is_tinted = |[x, y, _]: [usize; 3]| image != "case" && (x, y) == (7, 5);
        let value = |voxel: [usize; 3]| if is_tinted(voxel) { tint } else { grey(voxel) };
        self.write(&format!("ct/{image}.nii.gz"), SIZE, value);
        self.write(&format!("labels/{labels}.nii.gz"), SIZE, |[x, y, z]| match (x, y, z) {
            (0..3, 0..2, 1..=3) => 1,
            (6.., 4.., 3) => 2,
            _ => 0,
        });
    }

    fn options(&self) -> PrepareOptions {
        let mut options = PrepareOptions::new(self.path("ct"), self.path("labels"), "ct", self.path("out"));
        options.named_labels = "1=liver,2=tumour".parse().unwrap();
        options.slices.window = Some(Window::Range { low: 0.0, high: 255.0 });
        options
    }
}

fn grey([x, y, z]: [usize; 3]) -> u8 {
    u8::try_from(x * 30 + y * 4 + z).unwrap()
}

fn row<'a>(manifest: &'a Manifest, stem: &str) -> &'a Row {
    manifest.rows.iter().find(|row| row.target().mask_path.file_stem().unwrap() == stem).unwrap()
}

#[test]
fn slices_with_a_target_become_images_with_their_locations() {
    let f = Folders::new();
    f.pair("case", "case");
    let report = prepare(&f.options(), &Silent).unwrap();
    assert_eq!((report.volumes, report.images, report.rows, report.absent), (Some(1), 3, 8, 0));
    assert_eq!((report.patients, report.notes.len()), (Some(1), 0));
    let manifest = Manifest::open(&f.path("out"), None).unwrap();
    // left in the image is the patient's right, and the front is up
    let liver = row(&manifest, "case_axial_0002_liver");
    assert_eq!(liver.position.as_deref(), Some("lower right"));
    assert_eq!(row(&manifest, "case_axial_0003_tumour").position.as_deref(), Some("upper left"));
    assert_eq!((liver.spacing_mm, liver.patient.as_deref()), (Some([0.7, 0.8]), Some("case")));
    assert!(liver.question.contains("liver"), "{}", liver.question);
    let image = image::open(&liver.image_path).unwrap().to_luma8();
    let mask = image::open(&liver.target().mask_path).unwrap().to_luma8();
    assert_eq!(image.dimensions(), (8, 6));
    for (x, y, pixel) in image.enumerate_pixels() {
        let voxel = [7 - x as usize, 5 - y as usize, 2];
        assert_eq!(pixel.0[0], grey(voxel));
        assert_eq!(mask.get_pixel(x, y).0[0], if voxel[0] < 3 && voxel[1] < 2 { 255 } else { 0 });
    }
    let csv = fs::read_to_string(f.path("out/annotations/ct.csv")).unwrap();
    let header = "image_path,question,answer,position,split,patient,spacing_x_mm,spacing_y_mm,volume,slice\n";
    assert!(csv.starts_with(header), "{csv}");
    assert!(csv.lines().last().unwrap().ends_with(",case,0.7,0.8,case.nii.gz,3"), "{csv}");
    let prepared = Prepared::read(&f.path("out/ct")).unwrap().unwrap();
    assert_eq!((prepared.intensity.axis, prepared.targets["liver"].as_str()), (Axis::Axial, "1"));
    assert_eq!(check::check(&f.path("out"), None, Labels::NONE, &Silent).unwrap().bad, []);
}

#[test]
fn empty_slices_are_added_up_to_a_limit() {
    let f = Folders::new();
    f.pair("case", "case");
    let of = |modality: &str, negatives, every| {
        let mut options = PrepareOptions { modality: modality.into(), negatives, ..f.options() };
        options.slices.every = every;
        let report = prepare(&options, &Silent).unwrap();
        let manifest = Manifest::open(&f.path("out"), None).unwrap();
        let absent = |target: &str| {
            let rows = manifest
                .rows
                .iter()
                .filter(|row| row.modality == modality && row.target().presence == Presence::Absent);
            rows.filter(|row| row.target().mask_path.to_string_lossy().contains(target)).count() / 2
        };
        ([absent("liver"), absent("tumour")], report.absent, report.absent_left_out)
    };
    assert_eq!(of("usual", Negatives::Usual, 1), ([2, 1], 3, 3));
    assert_eq!(of("many", Negatives::PerPositive(100.0), 1), ([2, 4], 6, 0));
    // slices 0, 2 and 4: the liver is on one of them, the tumour on none
    assert_eq!(of("second", Negatives::Usual, 2), ([1, 0], 1, 4));
}

#[test]
fn volumes_and_label_maps_are_matched_by_name() {
    let f = Folders::new();
    f.pair("a", "a_labels");
    f.pair("b_0000", "b");
    f.pair("alone", "other");
    f.write("labels/broken.nii.gz", [8, 6, 4], |_| 1);
    f.write("ct/broken.nii.gz", SIZE, grey);
    fs::write(f.path("ct/.hidden"), "x").unwrap();
    let report = prepare(&f.options(), &Silent).unwrap();
    let skipped: Vec<String> =
        report.skipped.iter().map(|skip| format!("{}: {}", file_name(&skip.path), skip.reason)).collect();
    assert_eq!((report.volumes, report.patients, report.images), (Some(2), Some(2), 6));
    assert_eq!(skipped.len(), 3, "{skipped:?}");
    assert_eq!(skipped[..2], ["alone.nii.gz: no mask with this stem", "other.nii.gz: no image with this stem"]);
    assert!(skipped[2].contains("broken.nii.gz: cannot be used: its grid is not that of the volume"), "{skipped:?}");
    assert!(skipped[2].contains("argument `resample`"), "{skipped:?}");
    // one of each needs no matching names
    let options = PrepareOptions {
        images: vec![f.path("ct/alone.nii.gz")],
        masks: vec![f.path("labels/other.nii.gz")],
        modality: "one".into(),
        ..f.options()
    };
    assert_eq!(prepare(&options, &Silent).unwrap().images, 3);
    let mut options = PrepareOptions {
        images: vec![f.path("ct/broken.nii.gz")],
        masks: vec![f.path("labels/broken.nii.gz")],
        modality: "resampled".into(),
        named_labels: crate::prepare::NamedLabels::default(),
        ..f.options()
    };
    let refused = prepare(&options, &Silent).unwrap_err();
    assert!(refused.to_string().contains("no usable pair of volume and label map"), "{refused}");
    options.slices.resample = true;
    assert_eq!(prepare(&options, &Silent).unwrap().images, 4);
    // what is lost on the grid of the volume is said, and a target of which nothing is left is no absent one
    for (name, first) in [("half", 4), ("gone", 5)] {
        f.write(&format!("labels/{name}.nii.gz"), [8, 6, 6], |[_, _, z]| u8::from(z >= first));
        options =
            PrepareOptions { masks: vec![f.path(&format!("labels/{name}.nii.gz"))], modality: name.into(), ..options };
        options.negatives = Negatives::Usual;
        match prepare(&options, &Silent) {
            Ok(report) => {
                let notes = report.notes.join("\n");
                assert!(name == "half" && notes.contains("50 % of `lesion` in its label map is lost"), "{notes}");
            }
            Err(refused) => {
                let text = refused.to_string();
                assert!(name == "gone" && text.contains("no usable pair of volume and label map"), "{text}");
            }
        }
    }
}

/// Masks by the names of the volumes in the table, and the reasons of skipped files.
fn of_folders(f: &Folders, images: &[&str], masks: &[&str], modality: &str) -> (BTreeSet<String>, Vec<String>) {
    let paths = |names: &[&str]| names.iter().map(|name| f.path(name)).collect();
    let options = PrepareOptions {
        images: paths(images),
        masks: paths(masks),
        modality: modality.into(),
        named_labels: crate::prepare::NamedLabels::default(),
        ..f.options()
    };
    let report = match prepare(&options, &Silent) {
        Ok(report) => report,
        Err(error) => return (BTreeSet::new(), vec![error.to_string()]),
    };
    let csv = fs::read_to_string(f.path(&format!("out/annotations/{modality}.csv"))).unwrap();
    let volumes = csv.lines().skip(1).map(|line| {
        let fields: Vec<&str> = line.rsplit(',').collect();
        assert_eq!(fields[4], stem_of(fields[1]), "the volume is the patient");
        fields[1].to_owned()
    });
    (volumes.collect(), report.skipped.into_iter().map(|skip| skip.reason).collect())
}

/// A volume and a label map with one label, in a folder of each patient.
fn patient_folders(f: &Folders, names: [&str; 2], patients: [&str; 2]) {
    for patient in patients {
        for (name, value) in names.iter().zip([grey, |[x, _, _]: [usize; 3]| u8::from(x > 4)]) {
            let name = name.replace('*', patient);
            fs::create_dir_all(f.path(&name).parent().unwrap()).unwrap();
            f.write(&name, SIZE, value);
        }
    }
}

#[test]
fn volumes_in_folders_of_patients_have_the_names_of_their_folders() {
    let f = Folders::new();
    let both = |names: [&str; 2]| BTreeSet::from(names.map(str::to_owned));
    patient_folders(&f, ["scans/*/imaging.nii.gz", "maps/*/imaging.nii.gz"], ["A", "B"]);
    fs::write(f.path("scans/A/notes.txt"), "x").unwrap();
    assert_eq!(of_folders(&f, &["scans"], &["maps"], "folders"), (both(["A", "B"]), Vec::new()));
    // label maps in one folder
    patient_folders(&f, ["total/*/ct.nii", "flat/*_seg.nii"], ["s1", "s2"]);
    assert_eq!(of_folders(&f, &["total"], &["flat"], "flat"), (both(["s1", "s2"]), Vec::new()));
    // one file of each folder, named by a pattern
    patient_folders(&f, ["kits/*/imaging.nii.gz", "kits/*/segmentation.nii.gz"], ["c1", "c2"]);
    let of = |name: &str| ["c1", "c2"].map(|case| format!("kits/{case}/{name}.nii.gz"));
    let (images, masks) = (of("imaging"), of("segmentation"));
    let found = of_folders(&f, &images.each_ref().map(|path| &**path), &masks.each_ref().map(|path| &**path), "kits");
    assert_eq!(found, (both(["c1", "c2"]), Vec::new()));
    patient_folders(&f, ["brats/*/*_t1.nii.gz", "brats/*/*_seg.nii.gz"], ["x", "y"]);
    let (images, masks) =
        (["brats/x/x_t1.nii.gz", "brats/y/y_t1.nii.gz"], ["brats/x/x_seg.nii.gz", "brats/y/y_seg.nii.gz"]);
    assert_eq!(of_folders(&f, &images, &masks, "brats"), (both(["x", "y"]), Vec::new()));
    // patients are found in the names of the folders
    let options = PrepareOptions {
        images: vec![f.path("scans")],
        masks: vec![f.path("maps")],
        modality: "group".into(),
        patients: Patients::Pattern("^([A-Z])$".into()),
        named_labels: crate::prepare::NamedLabels::default(),
        ..f.options()
    };
    assert_eq!(prepare(&options, &Silent).unwrap().patients, Some(2));
}

#[test]
fn folders_of_several_volumes_are_named_with_what_they_hold() {
    let f = Folders::new();
    patient_folders(&f, ["kits/*/imaging.nii.gz", "kits/*/segmentation.nii.gz"], ["c1", "c2"]);
    patient_folders(&f, ["brats/*/*_flair.nii.gz", "brats/*/*_seg.nii.gz"], ["x", "y"]);
    patient_folders(&f, ["brats/*/*_t1.nii.gz", "brats/*/*_t2.nii.gz"], ["x", "y"]);
    patient_folders(&f, ["brats/*/*_a.nii.gz", "maps/*/z.nii.gz"], ["x", "y"]);
    for (images, masks, parts) in [
        (
            "kits",
            "maps",
            ["2 volumes: `imaging.nii.gz`, `segmentation.nii.gz`", "argument `images=", "kits/*/imaging.nii.gz`"],
        ),
        ("maps", "kits", ["2 volumes: ", "argument `masks=", "kits/*/segmentation.nii.gz`"]),
        ("brats", "maps", ["5 volumes: `x_a.nii.gz`", "`x_t1.nii.gz` and 1 more", "brats/*/*_a.nii.gz`"]),
    ] {
        let (found, reasons) = of_folders(&f, &[images], &[masks], "m");
        let text = reasons.join("\n");
        assert!(found.is_empty() && parts.iter().all(|part| text.contains(part)), "{images}: {text}");
    }
}

#[test]
fn a_label_map_with_several_labels_needs_a_choice() {
    let f = Folders::new();
    f.pair("case", "case");
    let mut options = PrepareOptions { named_labels: crate::prepare::NamedLabels::default(), ..f.options() };
    let refused = prepare(&options, &Silent).unwrap_err().to_string();
    assert!(
        refused.contains("several labels: 1 (18 voxels), 2 (4 voxels); choose with the argument `labels=2`"),
        "{refused}"
    );
    options.labels = "2".parse().unwrap();
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.images, report.rows), (1, 2));
    let manifest = Manifest::open(&f.path("out"), None).unwrap();
    assert_eq!(row(&manifest, "case_axial_0003").position.as_deref(), Some("upper left"));
}

#[test]
fn added_slices_have_the_window_and_the_split_of_the_class() {
    let f = Folders::new();
    for number in 0..4 {
        f.pair(&format!("P{number}_a"), &format!("P{number}_a"));
    }
    let options = PrepareOptions { patients: Patients::Pattern("^(P[0-9]+)_".into()), ..f.options() };
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.patients, report.images), (Some(4), 12));
    assert_eq!(report.images_by_split, BTreeMap::from([("test".into(), 3), ("train".into(), 6), ("val".into(), 3)]));
    for number in 0..5 {
        f.pair(&format!("P{number}_b"), &format!("P{number}_b"));
    }
    let mut append = PrepareOptions { append: true, ..options };
    append.slices.window = Window::named("lung");
    let refused = prepare(&append, &Silent).unwrap_err().to_string();
    assert!(refused.contains("the class was prepared with the window `0..255`"), "{refused}");
    append.slices.window = None;
    let report = prepare(&append, &Silent).unwrap();
    assert_eq!((report.images, report.known), (15, 12));
    let checked = check::check(&f.path("out"), None, Labels::NONE, &Silent).unwrap();
    assert_eq!((checked.bad, checked.patient_leaks), (vec![], vec![]));
    assert_eq!(checked.fingerprint[0].patients, Some(5));
}

#[test]
fn flags_of_volumes_are_refused_for_images_and_bad_values_are_named() {
    let f = Folders::new();
    fs::write(f.path("ct/a.png"), "x").unwrap();
    let refused = prepare(&f.options(), &Silent).unwrap_err().to_string();
    assert!(refused.contains("is a folder of images, not of volumes"), "{refused}");
    let mut options = f.options();
    options.slices.every = 0;
    assert!(prepare(&options, &Silent).unwrap_err().to_string().contains("argument `every`"));
}

/// Mean grey of the images of a class under the masks whose names end with `suffix`.
fn mean_grey(manifest: &Manifest, suffix: &str) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for row in &manifest.rows {
        if row.target().presence != Presence::Present
            || !row.target().mask_path.to_string_lossy().ends_with(&format!("{suffix}.png"))
        {
            continue;
        }
        let [image, mask] =
            [&row.image_path, &row.target().mask_path].map(|path| image::open(path).unwrap().to_luma8());
        for (grey, _) in image.iter().zip(mask.iter()).filter(|(_, inside)| **inside > 0) {
            sum += f64::from(*grey);
            count += 1.0;
        }
    }
    sum / count
}

/// Centroid of a mask, as fractions of width and height.
fn centre(mask: &GrayImage) -> [f64; 2] {
    let inside: Vec<(u32, u32)> =
        mask.enumerate_pixels().filter(|(.., p)| p.0[0] > 0).map(|(x, y, _)| (x, y)).collect();
    let mean = |of: fn(&(u32, u32)) -> u32| inside.iter().map(|p| f64::from(of(p))).sum::<f64>() / inside.len() as f64;
    [mean(|p| p.0) / f64::from(mask.width()), mean(|p| p.1) / f64::from(mask.height())]
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_a_dicom_series_and_its_label_map_lie_on_each_other() {
    let f = Folders::new();
    let options = PrepareOptions {
        images: vec![shared("data/volumes/ct_dicom")],
        masks: vec![shared("data/volumes/ct_dicom_labels.nii.gz")],
        named_labels: "5=liver,1=spleen,32+33=vertebra".parse().unwrap(),
        ..f.options()
    };
    let mut options = PrepareOptions { negatives: Negatives::Usual, ..options };
    options.slices.window = None;
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!(report.intensity.unwrap().window, Window::named("soft-tissue").unwrap(), "the default for CT");
    let manifest = Manifest::open(&f.path("out"), None).unwrap();
    // soft-tissue: -160 HU is black, 240 HU is white; the liver has about 100 HU, and bone has more
    let (liver, bone) = (mean_grey(&manifest, "_liver"), mean_grey(&manifest, "_vertebra"));
    assert!((140.0..200.0).contains(&liver) && bone > liver + 20.0, "liver {liver}, bone {bone}");
    // the liver is on the left of the image, the spleen on the right, the spine in the lower half
    for row in manifest.rows.iter().filter(|row| row.is_present()) {
        let [x, y] = centre(&image::open(&row.target().mask_path).unwrap().to_luma8());
        let name = row.target().mask_path.to_string_lossy();
        let fits = match name.trim_end_matches(".png").rsplit('_').next().unwrap() {
            "liver" => x < 0.5,
            "spleen" => x > 0.6,
            "vertebra" => (0.4..0.6).contains(&x) && y > 0.5,
            other => panic!("{other}"),
        };
        assert!(fits, "{name}: {x} {y}");
    }
    assert_eq!(check::check(&f.path("out"), None, Labels::NONE, &Silent).unwrap().bad, []);
}

#[test]
fn folders_and_files_of_patients_may_be_mixed() {
    let f = Folders::new();
    patient_folders(&f, ["scans/*/ct.nii.gz", "maps/*_seg.nii.gz"], ["A", "B"]);
    patient_folders(&f, ["scans/*.nii.gz", "maps/*/labels.nii"], ["C", "D"]);
    for hidden in ["scans/A/.DS_Store", "scans/._C.nii.gz", "maps/._A_seg.nii.gz", "maps/C/._labels.nii"] {
        fs::write(f.path(hidden), "x").unwrap();
    }
    fs::write(f.path("scans/B/report.pdf"), "x").unwrap();
    let both = BTreeSet::from(["A", "B", "C.nii.gz", "D.nii.gz"].map(str::to_owned));
    assert_eq!(of_folders(&f, &["scans"], &["maps"], "mixed"), (both, Vec::new()));
}

#[test]
fn folders_without_a_usable_volume_are_named() {
    let f = Folders::new();
    patient_folders(&f, ["scans/*/ct.nii.gz", "maps/*.nii.gz"], ["A", "B"]);
    patient_folders(&f, ["scans/*/ct.nii", "maps/*.nii.gz"], ["C"; 2]);
    for (volume, other, text) in
        [("scans/A/ct.nii.gz", "scans/A/ct.txt", "x"), ("scans/C/ct.nii", "scans/C/ct.mnc", "CDF\u{1}")]
    {
        fs::remove_file(f.path(volume)).unwrap();
        fs::write(f.path(other), text).unwrap();
    }
    let (found, reasons) = of_folders(&f, &["scans"], &["maps"], "named");
    assert_eq!((found, reasons.len()), (BTreeSet::from(["B".to_owned()]), 2));
    let text = reasons.join("\n");
    assert!(text.contains("it has no DICOM images among its files (1, the first is `ct.txt`)"), "{text}");
    assert!(text.contains("it is a MINC file, which cannot be read (convert it to NIfTI"), "{text}");
}

#[test]
fn files_of_one_name_have_the_names_of_the_folders_that_differ() {
    let f = Folders::new();
    let of = |pattern: &str, patients: &[&str]| -> Vec<String> {
        patients.iter().map(|patient| pattern.replace('*', patient)).collect()
    };
    let found = |patterns: [&str; 2], patients: &[&str], modality: &str| {
        let [images, masks] = patterns.map(|pattern| of(pattern, patients));
        let [images, masks] = [&images, &masks].map(|all| all.iter().map(String::as_str).collect::<Vec<_>>());
        of_folders(&f, &images, &masks, modality)
    };
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let total = ["total/*/ct.nii.gz", "total/*/segmentations/liver.nii.gz"];
    patient_folders(&f, total, ["s0", "s1"]);
    assert_eq!(found(total, &["s0", "s1"], "total"), (names(&["s0", "s1"]), Vec::new()));
    let deep = ["deep/*/ct/image.nii.gz", "maps/*/seg/label.nii.gz"];
    patient_folders(&f, deep, ["P0", "P1"]);
    assert_eq!(found(deep, &["P0", "P1"], "deep"), (names(&["P0", "P1"]), Vec::new()));
    let flat = ["total/*/ct.nii.gz", "flat/*_seg.nii.gz"];
    patient_folders(&f, flat, ["s0", "s1"]);
    assert_eq!(found(flat, &["s0", "s1"], "flat"), (names(&["s0", "s1"]), Vec::new()));
    // no folder alone differs everywhere
    let visits = ["visits/*/ct.nii.gz", "visits/*/seg/liver.nii.gz"];
    let all = ["P1/a", "P1/b", "P2/a"];
    patient_folders(&f, visits, ["P1/a", "P1/b"]);
    patient_folders(&f, visits, ["P2/a"; 2]);
    assert_eq!(found(visits, &all, "visits"), (names(&["P1_a", "P1_b", "P2_a"]), Vec::new()));
    let paths = |pattern: &str| -> Vec<PathBuf> { of(pattern, &all).iter().map(|name| f.path(name)).collect() };
    let mut options = PrepareOptions {
        images: paths(visits[0]),
        masks: paths(visits[1]),
        modality: "noted".into(),
        named_labels: crate::prepare::NamedLabels::default(),
        ..f.options()
    };
    let notes = prepare(&options, &Silent).unwrap().notes;
    assert!(
        notes[0].contains("several folders, as `P1_a`, and each is a patient of its own; the argument `group`"),
        "{notes:?}"
    );
    options =
        PrepareOptions { patients: Patients::Pattern("^(P[0-9]+)_".into()), modality: "grouped".into(), ..options };
    let report = prepare(&options, &Silent).unwrap();
    let is_named = report.notes.iter().any(|note| note.contains("several folders"));
    assert_eq!((report.patients, is_named), (Some(2), false));
    let notes = prepare(&PrepareOptions { append: true, ..options.clone() }, &Silent).unwrap().notes;
    assert!(notes[0].contains("the names of their folders, as `P1_a`: what is added must have the names"), "{notes:?}");
    // folders that make fewer pairs are other numbers
    let numbers = [("1/2", "1"), ("2/3", "2"), ("3/4", "3")];
    for (visit, patient) in numbers {
        patient_folders(&f, [&format!("crossed/{visit}/ct.nii.gz"), &format!("numbers/{patient}.nii.gz")], [""; 2]);
    }
    let images = numbers.map(|(visit, _)| format!("crossed/{visit}/ct.nii.gz"));
    let images = images.iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(of_folders(&f, &images, &["numbers"], "crossed"), (names(&["1", "2", "3"]), Vec::new()));
    // a preview is no volume
    fs::write(f.path("numbers/preview.gif"), "GIF89a").unwrap();
    assert!(are_volumes(&[f.path("numbers")]).unwrap());
    // several label maps of a patient
    options.masks = ["liver", "spleen"].iter().flat_map(|name| paths(&format!("visits/*/seg/{name}.nii.gz"))).collect();
    let error = prepare(&PrepareOptions { modality: "two".into(), ..options.clone() }, &Silent).unwrap_err();
    assert!(error.to_string().contains("is a second label map for the stem `"), "{error}");
    assert!(error.hint().starts_with("name one file of each patient; a label map must have"), "{}", error.hint());
    // a pattern that the shell did not replace
    options.images = vec![f.path("visits/*/*/ct.nii.gz")];
    let error = prepare(&PrepareOptions { modality: "quoted".into(), ..options }, &Silent).unwrap_err();
    assert!(error.to_string().starts_with("argument `images`: there is no file `"), "{error}");
    assert!(error.hint().contains("write it without quotes"), "{}", error.hint());
}

#[test]
fn volumes_in_subfolders_of_patients_are_found_or_named() {
    let f = Folders::new();
    let both = |names: [&str; 2]| BTreeSet::from(names.map(str::to_owned));
    patient_folders(&f, ["bids/*/anat/*_T1w.nii.gz", "masks/*/anat/*_mask.nii.gz"], ["sub-01", "sub-02"]);
    fs::write(f.path("bids/sub-01/anat/sub-01_T1w.json"), "{}").unwrap();
    assert_eq!(of_folders(&f, &["bids"], &["masks"], "bids"), (both(["sub-01", "sub-02"]), Vec::new()));
    patient_folders(&f, ["bids/*/func/*_bold.nii.gz", "masks/*/anat/*_mask.nii.gz"], ["sub-01", "sub-02"]);
    let (found, reasons) = of_folders(&f, &["bids"], &["masks"], "two");
    let text = reasons.join("\n");
    assert!(found.is_empty());
    assert!(text.contains("2 volumes: `anat/sub-01_T1w.nii.gz`, `func/sub-01_bold.nii.gz`"), "{text}");
    assert!(text.contains("bids/*/anat/*_T1w.nii.gz`"), "{text}");
}

#[test]
fn a_folder_of_one_dicom_seg_is_a_label_map() {
    let f = Folders::new();
    let zip = checkout().join("tests/fixtures/volumes/axial.zip");
    fs::copy(&zip, f.path("ct/P1.zip")).unwrap();
    let scan = volume::open(&zip).unwrap();
    let mask: Vec<u8> = (0..scan.grid.size.iter().product()).map(|index| u8::from(index % 7 < 3)).collect();
    let segments = [volume::SegmentMask { name: "lesion", mask: &mask }];
    fs::create_dir(f.path("labels/P1")).unwrap();
    volume::write::segments(&f.path("labels/P1/a.dcm"), &segments, &scan).unwrap();
    let options =
        |modality: &str| PrepareOptions { modality: modality.into(), labels: Labels::NONE, ..plain_options(&f) };
    let report = prepare(&options("one"), &Silent).unwrap();
    assert_eq!((report.images, report.skipped), (scan.grid.size[2], Vec::new()));
    assert!(!report.notes.join(" ").contains("frame of reference"));
    let mut bytes = fs::read(f.path("labels/P1/a.dcm")).unwrap();
    let tag = bytes.windows(6).position(|bytes| bytes == b"\x20\x00\x52\x00UI").expect("the frame of reference");
    bytes[tag + 10] ^= 1;
    fs::write(f.path("labels/P1/a.dcm"), bytes).unwrap();
    let report = prepare(&options("foreign"), &Silent).unwrap();
    assert!(report.notes.join(" ").contains("its label map has another frame of reference"), "{:?}", report.notes);
    fs::copy(f.path("labels/P1/a.dcm"), f.path("labels/P1/b.dcm")).unwrap();
    let refused = prepare(&options("two"), &Silent).unwrap_err().to_string();
    assert!(refused.contains("labels/P1: it has 2 volumes: `a.dcm`, `b.dcm` (name one of each"), "{refused}");
    assert!(refused.contains("for example the argument `masks="), "{refused}");
}

/// Options without names of labels.
fn plain_options(f: &Folders) -> PrepareOptions {
    PrepareOptions { named_labels: crate::prepare::NamedLabels::default(), ..f.options() }
}

#[test]
fn voxels_of_a_header_in_another_format_are_no_volume_of_their_own() {
    let f = Folders::new();
    for (header, voxels, text) in [
        ("P1.mhd", "P1.raw", "ObjectType = Image\n"),
        ("P2.nhdr", "P2.raw.gz", "NRRD0004\n"),
        ("P3.mhd", "P3.zraw", "NDims = 3\n"),
    ] {
        for folder in ["ct", "labels"] {
            fs::write(f.path(folder).join(header), text).unwrap();
            fs::write(f.path(folder).join(voxels), [0; 64]).unwrap();
        }
    }
    let error = prepare(&plain_options(&f), &Silent).unwrap_err();
    assert!(error.to_string().contains("P1.mhd: cannot be used: its header has NDims = 0"), "{error}");
    assert!(error.to_string().contains("(export the file again"), "{error}");
    assert_eq!(error.hint(), "correct the files that are named");
    f.pair("P4", "P4");
    // a file of this ending without a header
    fs::write(f.path("ct/P5.raw"), "x").unwrap();
    let report = prepare(&PrepareOptions { labels: "1".parse().unwrap(), ..plain_options(&f) }, &Silent).unwrap();
    let mut skipped: Vec<String> = report.skipped.iter().map(|skip| file_name(&skip.path)).collect();
    skipped.sort();
    assert_eq!(
        (report.volumes, skipped),
        (Some(1), ["P1.mhd", "P2.nhdr", "P3.mhd", "P5.raw"].map(str::to_owned).to_vec())
    );
}

#[test]
fn inverted_label_maps_are_named() {
    let f = Folders::new();
    let texts = |modality: &str| {
        let options = PrepareOptions { modality: modality.into(), ..plain_options(&f) };
        prepare(&options, &Silent).unwrap().findings.texts()
    };
    f.write("ct/a.nii.gz", SIZE, grey);
    f.write("labels/a.nii.gz", SIZE, |[x, y, _]| u8::from((3..5).contains(&x) && (2..4).contains(&y)));
    assert_eq!(texts("usual"), Vec::<String>::new());
    f.write("labels/a.nii.gz", SIZE, |[x, y, _]| u8::from(!(3..5).contains(&x) || !(2..4).contains(&y)));
    let found = texts("inverted");
    let start = "masks with most of the border of the image as foreground: 5 (a_axial_0000, a_axial_0001, a_axial_0002 and 2 more)";
    assert!(found.len() == 1 && found[0].starts_with(start) && found[0].contains("may be inverted"), "{found:?}");
}

#[test]
fn neighbouring_slices_are_colours_and_a_class_keeps_them() {
    let f = Folders::new();
    f.pair("case", "case");
    let mut options = f.options();
    options.slices.context = Neighbours::Slices(1);
    prepare(&options, &Silent).unwrap();
    let file = f.path("out/ct/train_images/case_axial_0003_liver.png");
    let image = image::open(file).unwrap();
    let pixels = image.as_rgb8().expect("colours").pixels();
    assert!(pixels.into_iter().all(|image::Rgb([before, own, behind])| before + 1 == *own && own + 1 == *behind));
    let of_class = |class: &str| Prepared::read(&f.path("out").join(class)).unwrap().unwrap().intensity.context;
    assert_eq!(of_class("ct"), Neighbours::Slices(1));

    f.pair("other", "other");
    let other = PrepareOptions { append: true, ..f.options() };
    let error = prepare(&other, &Silent).unwrap_err();
    assert!(error.to_string().contains("context") && error.hint().contains("context=1"), "{error}");
    // a model cannot tell classes with and without neighbours apart
    prepare(&PrepareOptions { modality: "mr".into(), ..f.options() }, &Silent).unwrap();
    let error = crate::prepared::intensities(&Manifest::open(&f.path("out"), None).unwrap()).unwrap_err();
    assert!(error.to_string().contains("`ct`") && error.to_string().contains("`mr`"), "{error}");
}

#[test]
fn instances_of_a_volume_are_its_components_and_named_where_a_slice_shows_their_order() {
    const LARGE: [usize; 3] = [24, 20, 5];
    let f = Folders::new();
    f.write("ct/case.nii.gz", LARGE, |[x, y, z]| u8::try_from(x * 5 + y * 4 + z).unwrap());
    // A: two parts on slice 1 that meet on slice 2, one instance of 91 voxels. B: slices 1 to 3, 48 voxels, which on slice 3 is
    // larger than A (9 pixels). Both have label 1.
    f.write("labels/case.nii.gz", LARGE, |[x, y, z]| {
        let is_a = match z {
            1 => [1, 2, 4, 5].contains(&(x / 2)) && y < 4,
            2 => (2..12).contains(&x) && y < 5,
            3 => (2..5).contains(&x) && y < 3,
            _ => false,
        };
        let is_b = (1..4).contains(&z) && (18..22).contains(&x) && (14..18).contains(&y);
        u8::from(is_a || is_b)
    });
    let mut options = PrepareOptions { instances: true, target: "tumour".into(), ..f.options() };
    options.named_labels = crate::prepare::NamedLabels::default();
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.volumes, report.images), (Some(1), 3));
    let manifest = Manifest::open(&f.path("out"), None).unwrap();
    let stem = |row: &Row| row.target().mask_path.file_stem().unwrap().to_string_lossy().into_owned();
    let stems: BTreeSet<String> = manifest.rows.iter().map(stem).collect();
    let named = ["0001", "0001_larger", "0001_smaller", "0002", "0002_larger", "0002_smaller", "0003"];
    assert_eq!(stems, named.map(|name| format!("case_axial_{name}")).into());
    let area = |stem: &str| {
        let mask = image::open(&row(&manifest, stem).target().mask_path).unwrap().to_luma8();
        mask.iter().filter(|value| **value > 0).count()
    };
    assert_eq!([area("case_axial_0001_larger"), area("case_axial_0001_smaller")], [32, 16]);
    let larger = row(&manifest, "case_axial_0001_larger");
    assert!(larger.question.contains("larger tumour"), "{}", larger.question);
    let checked = check::check(&f.path("out"), None, Labels::NONE, &Silent).unwrap();
    assert_eq!((checked.bad, checked.words.wrong), (vec![], vec![]));
}

#[test]
fn named_masks_and_labels_of_a_volume_are_joined_to_one_target() {
    let f = Folders::new();
    f.pair("case", "case");
    let options = PrepareOptions { join: Some("finding".into()), ..f.options() };
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.images, report.rows), (3, 6));
    let manifest = Manifest::open(&f.path("out"), None).unwrap();
    let of_third = row(&manifest, "case_axial_0003");
    let mask = image::open(&of_third.target().mask_path).unwrap().to_luma8();
    assert_eq!(mask.iter().filter(|value| **value > 0).count(), 3 * 2 + 2 * 2, "liver and tumour");
    assert_eq!(Prepared::read(&f.path("out/ct")).unwrap().unwrap().targets["finding"], "1,2");
    // without names, all labels
    let mut options = PrepareOptions { out: f.path("other"), ..options };
    options.named_labels = crate::prepare::NamedLabels::default();
    assert_eq!(prepare(&options, &Silent).unwrap().rows, 6);
    assert_eq!(Prepared::read(&f.path("other/ct")).unwrap().unwrap().targets["finding"], "");
}

#[test]
fn tiff_stacks_are_volumes() {
    let f = Folders::new();
    let stack = |path: PathBuf, value: fn(u32, u32) -> u8| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut encoder = tiff::encoder::TiffEncoder::new(fs::File::create(path).unwrap()).unwrap();
        for page in 0..4 {
            let pixels: Vec<u8> = (0..120).map(|at| value(page, at)).collect();
            encoder.write_image::<tiff::encoder::colortype::Gray8>(12, 10, &pixels).unwrap();
        }
    };
    let (grey, mask) =
        (|page, at| u8::try_from(at + 7 * page).unwrap(), |page, at| u8::from((1..3).contains(&page) && at < 30));
    for patient in ["P1", "P2"] {
        stack(f.path(&format!("ct/{patient}.tif")), grey);
        stack(f.path(&format!("labels/{patient}.tif")), mask);
        stack(f.path(&format!("tree/{patient}/scan.tif")), grey);
        stack(f.path(&format!("tree/{patient}/scan_mask.tif")), mask);
    }
    let options = PrepareOptions { named_labels: crate::prepare::structures::NamedLabels::default(), ..f.options() };
    let report = prepare(&options, &Silent).unwrap();
    assert_eq!((report.volumes, report.images), (Some(2), 4), "{report:?}");
    let found = scan(&f.path("tree"), &ScanOptions::default(), &Silent).unwrap();
    assert_eq!((found.volumes, found.images, found.masks), (2, 0, 2), "{found:?}");
}
