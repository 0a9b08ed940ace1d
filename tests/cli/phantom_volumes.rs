//! Phantom volumes: from `data phantom --volumes` to a data root, and scores of their masks.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::support::{done, error_text, folder, objects, path, prsmed, run};

fn record(text: &str) -> Value {
    objects(text).pop().expect("a record")
}

#[test]
fn phantom_volumes_become_a_data_root_and_their_masks_are_scored() {
    let phantoms = path("phantom-volumes");
    let text =
        done(prsmed().args(["--json", "data", "phantom", "--volumes", "10", "--image-size", "32"]).arg(&phantoms));
    let report = record(&text);
    assert_eq!((&report["volumes"], &report["two_lesion_volumes"]), (&10.into(), &2.into()));
    assert_eq!(report["volumes_without_lesion"], 2);
    let (scans, labels, root) = (phantoms.join("scans"), phantoms.join("labels"), path("phantom-volume-data"));
    let mut prepare = prsmed();
    prepare.args(["--json", "data", "prepare", "--modality", "phantom_CT", "--window", "soft-tissue", "--negatives"]);
    let report = record(&done(prepare.arg("--images").arg(&scans).arg("--masks").arg(&labels).arg("--out").arg(&root)));
    assert_eq!((&report["volumes"], &report["skipped"]), (&10.into(), &Value::Array(Vec::new())));
    assert!(report["absent"].as_u64() > Some(0), "{report}");
    assert!(done(prsmed().args(["data", "check"]).arg(&root)).contains("no bad rows"));

    let compare = || {
        let mut command = prsmed();
        command.args(["--json", "data", "compare"]);
        command
    };
    // a volume without its mask is named; a mask of another volume is another grid
    let masks = folder("phantom-volume-masks");
    for number in 1..10 {
        let name = format!("P{number:04}.nii.gz");
        fs::copy(labels.join(&name), masks.join(&name)).unwrap();
    }
    let found = record(&done(compare().arg(&masks).arg(&labels)));
    assert_eq!((&found["volumes"], &found["num_not_predicted"]), (&9.into(), &1.into()));
    let dice = &found["estimates"]["dice"];
    assert_eq!((&dice["mean"], &found["estimates"]["hd95"]["mean"]), (&1.0.into(), &0.0.into()));
    assert_eq!((&dice["count"], &found["present"]), (&found["present"], &dice["count"]));
    let table = done(prsmed().args(["data", "compare"]).arg(&masks).arg(&labels));
    assert!(table.starts_with("volume") && table.contains("HD95 (mm)"), "{table}");
    let refused = |command: &mut Command, parts: [&str; 2]| {
        let ran = run(command);
        let error = error_text(&ran);
        assert!(ran.code == Some(2) && parts.iter().all(|part| error.contains(part)), "{:?}: {error}", ran.code);
    };
    let (mask, other) = (masks.join("P0001.nii.gz"), labels.join("P0002.nii.gz"));
    refused(compare().arg(mask).arg(other), ["its grid is not that of the volume", "--resample"]);
    refused(compare().arg(&masks).arg(&labels).arg("--tolerance-mm=-1"), ["--tolerance-mm", "use 0 or more"]);
    let mut both = prsmed();
    both.args(["data", "phantom", "--volumes", "2", "--count", "3"]).arg(path("never"));
    refused(&mut both, ["--volumes", "cannot be used with"]);
}
