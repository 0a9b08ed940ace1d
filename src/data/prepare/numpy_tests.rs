//! Prepared slices of several sequences and of neighbouring slices, compared pixel by pixel with numpy and nibabel.
//! `scripts/setup --checks` installs the packages in `.tools/medical`.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{PrepareOptions, SliceOptions, prepare_classes, read_pairs};
use crate::fixture::checkout;
use prsmed_base::event::Silent;

/// What a command of `scripts/medical_check.py` prints.
fn python(arguments: &[&Path]) -> String {
    let mut command = Command::new(checkout().join(".venv/bin/python"));
    command.env("PYTHONPATH", checkout().join(".tools/medical")).arg(checkout().join("scripts/medical_check.py"));
    let output = command.args(arguments).output().expect("scripts/setup --checks");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

/// Prepares the volumes of a table, and compares their slices with numpy's: the number that are equal.
fn num_equal(folder: &Path, table: &str, [axis, context, sequences]: [&str; 3]) -> u64 {
    let (path, out) = (folder.join("pairs.csv"), tempfile::tempdir().unwrap());
    fs::write(&path, table).unwrap();
    let root = out.path().join("data");
    let slices =
        SliceOptions { axis: axis.parse().unwrap(), context: context.parse().unwrap(), ..SliceOptions::default() };
    let options = PrepareOptions { slices, ..PrepareOptions::new(&path, &path, "mr", &root) };
    prepare_classes(read_pairs(&path).unwrap(), &options, &Silent).unwrap();
    let arguments = [Path::new("slices"), folder, &root, Path::new(axis), Path::new(context), Path::new(sequences)];
    let report: serde_json::Value = serde_json::from_str(&python(&arguments)).unwrap();
    assert_eq!(report["differing"], serde_json::json!([]), "{axis}, {context}, {sequences}");
    report["equal"].as_u64().unwrap()
}

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_makes_the_same_slices() {
    let folder = tempfile::tempdir().unwrap();
    python(&[Path::new("sequences"), folder.path()]);
    // two patients with 9 axial and 6 coronal slices, which are 2.5 and 2 mm apart
    for (axis, count) in [("axial", 18), ("coronal", 12)] {
        let one = "image,mask,patient\n*/T1.nii.gz,*/mask.nii.gz,*\n";
        for context in ["1", "5mm"] {
            assert_eq!(num_equal(folder.path(), one, [axis, context, "none"]), count, "{axis}, {context}");
        }
        let three = "image.T1,image.FLAIR,image.T2,mask,patient\n\
                     */T1.nii.gz,*/FLAIR.nii.gz,*/T2.nii.gz,*/mask.nii.gz,*\n";
        assert_eq!(num_equal(folder.path(), three, [axis, "none", "T1,FLAIR,T2"]), count, "{axis}");
        let two = "image.FLAIR,image.T1,mask,patient\n*/FLAIR.nii.gz,*/T1.nii.gz,*/mask.nii.gz,*\n";
        assert_eq!(num_equal(folder.path(), two, [axis, "none", "FLAIR,T1"]), count, "{axis}");
    }
}
