//! Real CT and MR volumes from files to scores: `data prepare`, `data check`, `train`, `predict`, `eval`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prsmed::data::manifest::{Manifest, Presence};
use prsmed::data::volume::{self, labels};
use serde_json::Value;

use crate::support::{done, folder, objects, path, prsmed, shared, train};

/// Grey values of 8 bits over this range of HU.
const RANGE: [f64; 2] = [-1024.0, 3071.0];

fn result(text: &str) -> Value {
    objects(text).into_iter().find(|line| line["kind"] == "result").expect("a result")
}

fn prepare(root: &Path, modality: &str, volumes: &[&str], more: &[&str]) -> Value {
    let file = |name: &str| shared("data/volumes").join(name);
    let mut command = prsmed();
    command.args(["--json", "data", "prepare", "--modality", modality, "--labels", "5=liver,1=spleen", "--every", "4"]);
    command.args(["--image-word", "slice", "--test-frac", "0", "--images"]);
    command.args(volumes.iter().map(|name| file(name))).arg("--masks");
    command.args(volumes.iter().map(|name| file(&format!("{}_labels.nii.gz", name.trim_end_matches(".nii.gz")))));
    objects(&done(command.args(more).arg("--out").arg(root))).pop().unwrap()
}

/// Of a target of a volume: number of pixels, their mean column and row as fractions of the image, their mean grey.
#[derive(Default)]
struct Sums {
    count: f64,
    x: f64,
    y: f64,
    grey: f64,
}

/// Sums over all prepared images, by volume and target.
fn sums(root: &Path) -> BTreeMap<(String, String), Sums> {
    let mut found: BTreeMap<(String, String), Sums> = BTreeMap::new();
    let mut seen = Vec::new();
    for row in Manifest::open(root, None).unwrap().rows {
        if row.target().presence != Presence::Present || seen.contains(&row.target().mask_path) {
            continue;
        }
        let [image, mask] =
            [&row.image_path, &row.target().mask_path].map(|path| image::open(path).unwrap().into_luma8());
        assert_eq!(image.dimensions(), mask.dimensions());
        let stem = row.target().mask_path.file_stem().unwrap().to_str().unwrap();
        let (volume, rest) = stem.split_once("_axial_").unwrap();
        let target = rest.split_once('_').unwrap().1;
        let sums = found.entry((volume.to_owned(), target.to_owned())).or_default();
        for (x, y, pixel) in mask.enumerate_pixels().filter(|(.., pixel)| pixel.0[0] > 0) {
            assert_eq!(pixel.0[0], 255);
            sums.count += 1.0;
            sums.x += (f64::from(x) + 0.5) / f64::from(mask.width());
            sums.y += (f64::from(y) + 0.5) / f64::from(mask.height());
            sums.grey += f64::from(image.get_pixel(x, y).0[0]);
        }
        seen.push(row.target().mask_path.clone());
    }
    found
}

/// Pixels and centroids of every fourth axial slice, computed with nibabel: label maps in RAS order, the last voxel of
/// the first two axes first (patient right on the left, anterior on top). Grey in HU from pydicom and nibabel.
fn check_positions(root: &Path) {
    let found = sums(root);
    let expected = [
        ("ct_dicom", "liver", 90844.0, 0.346_688, 0.544_044, Some(88.802_496_587_556_9)),
        ("ct_dicom", "spleen", 32596.0, 0.689_786, 0.634_161, None),
        ("ct", "liver", 10013.0, 0.333_756, 0.422_076, Some(44.824_727_853_790_05)),
        ("ct", "spleen", 2414.0, 0.816_477, 0.628_557, None),
        ("mr", "liver", 4171.0, 0.216_527, 0.482_567, None),
        ("mr", "spleen", 362.0, 0.770_978, 0.718_991, None),
    ];
    assert_eq!(found.len(), expected.len());
    for (volume, target, count, x, y, hu) in expected {
        let Sums { count: pixels, x: sum_x, y: sum_y, grey } = &found[&(volume.to_owned(), target.to_owned())];
        assert_eq!(*pixels, count, "{volume}, {target}");
        let (mean_x, mean_y) = (sum_x / pixels, sum_y / pixels);
        assert!((mean_x - x).abs() < 1e-5 && (mean_y - y).abs() < 1e-5, "{volume}, {target}: {mean_x}, {mean_y}");
        if let Some(hu) = hu {
            let mean = RANGE[0] + grey / pixels * (RANGE[1] - RANGE[0]) / 255.0;
            // a grey level is 16 HU wide; rounding cancels out over thousands of pixels
            assert!((mean - hu).abs() < 1.5, "{volume}, {target}: {mean} and not {hu} HU");
        }
    }
}

/// The label map lies on the slices of the series, in full depth: pydicom and nibabel give this mean over the liver.
fn check_series() {
    let series = volume::open(&shared("data/volumes/ct_dicom")).unwrap();
    let map = shared("data/volumes/ct_dicom_labels.nii.gz");
    let liver = labels::open(&map).unwrap().on_grid(&map, &series.grid, false).unwrap().mask(5);
    let (mut sum, mut count) = (0.0, 0.0);
    for (index, _) in liver.iter().enumerate().filter(|(_, inside)| **inside > 0) {
        sum += f64::from(series.voxels.get(index).unwrap());
        count += 1.0;
    }
    assert_eq!(count, 366_708.0);
    assert!((sum / count - 89.304_593_845_784_65).abs() < 1e-6, "{}", sum / count);
}

fn predict(run: &Path, volume: &str, window: &str, out: &Path) -> Value {
    let mut command: Command = prsmed();
    command.args(["--json", "predict", "--question", "Where is the liver in this slice?", "--window", window]);
    command.args(["--axis", "axial", "--every", "5", "--fill-gaps", "4", "--always-paint", "--out"]).arg(out);
    command.arg("--image").arg(shared("data/volumes").join(volume));
    result(&done(command.args(["--max-new-tokens", "1"]).arg(run)))
}

#[test]
#[ignore = "needs the data of PRSMED_SHARED"]
fn shared_data_three_volumes_go_from_files_to_scores() {
    check_series();
    let (root, run, masks) = (path("real-volumes"), path("run-of-real-volumes"), folder("masks-of-real-volumes"));
    let more = ["--window", "-1024..3071", "--val-frac", "0.5", "--negatives"];
    let ct = prepare(&root, "ct", &["ct_dicom", "ct.nii.gz"], &more);
    assert_eq!((&ct["volumes"], &ct["patients"]), (&2.into(), &2.into()), "{ct}");
    let mr = prepare(&root, "mr", &["mr.nii.gz"], &["--val-frac", "0"]);
    assert_eq!(mr["intensity"]["window"], "p0.5-p99.5", "{mr}");
    check_positions(&root);
    let checked = &objects(&done(prsmed().args(["--json", "data", "check"]).arg(&root)))[0];
    assert_eq!((&checked["good"], checked["patient_leaks"].as_array().map(Vec::len)), (&true.into(), Some(0)));

    done(&mut train(&root, &run, &["train.max_steps=4"]));
    for (volume, window, endings) in [
        ("ct_dicom", "-1024..3071", ["nii.gz", "dcm"].as_slice()),
        ("ct.nii.gz", "-1024..3071", &["nii.gz"]),
        ("mr.nii.gz", "p0.5-p99.5", &["nii"]),
    ] {
        for ending in endings {
            let out: PathBuf = masks.join(format!("{}.{ending}", volume.trim_end_matches(".nii.gz")));
            let found = predict(&run, volume, window, &out);
            let source = volume::open(&shared("data/volumes").join(volume)).unwrap();
            let map = labels::open(&out).unwrap().on_grid(&out, &source.grid, false).unwrap();
            let ml = source.grid.volume_ml(&map.mask(1)).unwrap();
            assert!((found["volume_ml"].as_f64().unwrap() - ml).abs() < 1e-6, "{volume}: {ml} ml");
        }
    }

    let out = path("scores-of-real-volumes");
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--split", "val", "--max-new-tokens", "2", "--data-root"]).arg(&root);
    let scores = result(&done(eval.arg("--out").arg(&out).arg(&run)));
    assert!(scores["rows"].as_u64().unwrap_or_default() > 0, "{scores}");
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("HD95") && page.contains("ct"), "no scores in the report");
}
