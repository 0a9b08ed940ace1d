//! From volumes to a data root, a run, and a prediction that shows a volume as the training images were.

use std::fs;
use std::path::Path;

use prsmed::data::volume::{self, SegmentMask, write};
use serde_json::Value;

use crate::support::{copy, done, folder, objects, path, prsmed, refused, train, update_checksum};

fn result(text: &str) -> Value {
    objects(text).into_iter().find(|line| line["kind"] == "result").expect("a result")
}

#[test]
#[expect(clippy::too_many_lines, reason = "one run, asked in several ways")]
fn a_prediction_on_a_volume_has_the_window_of_the_training_images() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes/axial.zip");
    let series = volume::open(&source).unwrap();
    let [width, height, depth] = series.grid.size;
    let inside = |index: usize| {
        let (x, y, z) = (index % width, index / width % height, index / width / height);
        x < width / 2 && y < height / 2 && z > 0
    };
    let count = width * height * depth;
    let labels: Vec<u8> = (0..count).map(|index| if inside(index) { 3 } else { 0 }).collect();
    let grey: Vec<u8> = (0..count).map(|index| u8::try_from(index * 7 % 250).unwrap()).collect();
    let (images, masks) = (folder("volumes-to-prepare"), folder("label-maps-to-prepare"));
    fs::copy(&source, images.join("P1.zip")).unwrap();
    write::nifti_labels(&images.join("P2.nii.gz"), &grey, &series.grid).unwrap();
    for name in ["P1_labels.nii.gz", "P2_labels.nii.gz"] {
        write::nifti_labels(&masks.join(name), &labels, &series.grid).unwrap();
    }
    let root = path("prepared-volumes");
    let prepare = |modality: &str, more: &[&str]| {
        let mut command = prsmed();
        command.args(["data", "prepare", "--modality", modality, "--labels", "3=liver", "--negatives", "--images"]);
        command.arg(&images).arg("--masks").arg(&masks).arg("--out").arg(&root).args(more);
        command
    };
    refused(
        &mut prepare("ct", &[]),
        "error: `--window`: the volumes need different intensity windows: `p0.5-p99.5` for P2.nii.gz, `soft-tissue` for \
         P1.zip\nhint: choose one for all of them, for example `--window soft-tissue`, or prepare them as different \
         modalities",
    );
    let text = done(prepare("ct", &["--window", "350/50", "--val-frac", "0.5"]).arg("--json"));
    let report = &objects(&text).pop().unwrap();
    assert_eq!((&report["volumes"], &report["patients"], &report["absent"]), (&2.into(), &2.into(), &2.into()));
    assert_eq!(report["intensity"]["window"], "350/50");
    let checked = &objects(&done(prsmed().args(["--json", "data", "check"]).arg(&root)))[0];
    assert_eq!((&checked["good"], &checked["fingerprint"][0]["absent"]), (&true.into(), &4.into()));

    // a folder of DICOM SEG files instead of NIfTI; segment 1 is the liver
    let segmentations = folder("segmentations-to-prepare");
    let mask: Vec<u8> = labels.iter().map(|label| u8::from(*label > 0)).collect();
    write::segments(&segmentations.join("P1.dcm"), &[SegmentMask { name: "liver", mask: &mask }], &series).unwrap();
    let other = path("prepared-from-segmentations");
    let mut command = prsmed();
    command.args(["data", "prepare", "--modality", "ct", "--labels", "1=liver", "--window", "350/50", "--images"]);
    command.arg(images.join("P1.zip")).arg("--masks").arg(&segmentations).arg("--out").arg(&other);
    done(&mut command);
    for entry in fs::read_dir(other.join("ct/train_masks")).unwrap() {
        let name = entry.unwrap().file_name();
        let of = |root: &Path, split: &str| fs::read(root.join("ct").join(split).join(&name)).ok();
        let same = of(&root, "train_masks").or_else(|| of(&root, "val_masks"));
        assert_eq!(of(&other, "train_masks"), same, "{}", name.display());
    }

    let run = path("run-of-volumes");
    done(&mut train(&root, &run, &["train.max_steps=1"]));
    let model = fs::read_to_string(run.join("last/model.json")).unwrap();
    let model: Value = serde_json::from_str(&model).unwrap();
    let expected: Value = serde_json::from_str(r#"{ "ct": { "axis": "axial", "window": "350/50" } }"#).unwrap();
    assert_eq!(model["intensity"], expected);
    let predict = |more: &[&str]| {
        let mut command = prsmed();
        command.arg("predict").arg(&run).arg("--image").arg(images.join("P1.zip"));
        command.args(["--question", "Where is the liver in this image?", "--slices", "0..1", "--json"]).args(more);
        let out = path("mask-of-a-prepared-volume.nii.gz");
        result(&done(command.arg("--out").arg(out)))["settings"]["window"].clone()
    };
    assert_eq!(predict(&[]), "350/50");
    assert_eq!(predict(&["--window", "lung"]), "lung");

    no_ensemble_with_another_window(&run, &root, &images.join("P1.zip"));

    // a second class with another window: the user must choose
    done(prepare("other", &["--window", "lung", "--val-frac", "0.5"]).arg("--quiet"));
    let both = path("run-of-two-windows");
    done(&mut train(&root, &both, &["train.max_steps=1"]));
    let mut command = prsmed();
    command.arg("predict").arg(&both).arg("--image").arg(images.join("P1.zip")).args(["--question", "Where?"]);
    refused(
        command.arg("--out").arg(path("never.nii.gz")),
        "error: `--window`: the classes of the run have different windows: `350/50` for `ct`, `lung` for `other`\n\
         hint: choose the window of the class that the volume belongs to, for example `--window 350/50`",
    );
}

/// Checks that every command refuses `run` beside a run that has seen the same images with another window.
fn no_ensemble_with_another_window(run: &Path, root: &Path, volume: &Path) {
    let another = copy(run, "run-of-another-window");
    for folder in ["best", "last"].map(|name| another.join(name)).iter().filter(|folder| folder.is_dir()) {
        let text = fs::read_to_string(folder.join("model.json")).unwrap().replace("350/50", "lung");
        fs::write(folder.join("model.json"), text).unwrap();
        update_checksum(folder, "model.json");
    }
    let slices = root.join("ct/train_images");
    let slice = fs::read_dir(&slices).unwrap().next().unwrap().unwrap().path();
    let (never, asked) = (path("never"), ["--question", "Where?"]);
    let start = |name: &str| {
        let mut command = prsmed();
        command.arg(name).arg(run);
        command
    };
    let mut commands = [start("predict"), start("predict"), start("predict"), start("serve"), start("eval")];
    commands[0].arg("--image").arg(&slice).args(asked);
    commands[1].arg("--image").arg(volume).args(asked).arg("--out").arg(path("never.nii.gz"));
    commands[2].arg("--images").arg(&slices).args(asked).arg("--out").arg(&never);
    commands[3].args(["--port", "0"]);
    commands[4].arg(&another).args(["--ensemble", "--split", "train", "--data-root"]).arg(root);
    for command in &mut commands[..4] {
        command.arg("--ensemble").arg(&another);
    }
    for command in &mut commands {
        refused(
            command,
            "error: `--ensemble`: the runs were trained on other images of `ct`: `~/run-of-volumes` axial slices with the \
             window `350/50`, `~/run-of-another-window` axial slices with the window `lung`\n\
             hint: use runs that were trained on the same images, or ask them one by one",
        );
    }
}
