//! Long tests, run by scripts/soak.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Stdio;

use prsmed::prelude::*;
use prsmed::segment::Training;
use serde_json::Value;

use crate::support::{copy_into, done, folder, path, phantoms, prsmed, train};

/// Steps of the training. Its learning rate is constant, so that no step equals another one.
const STEPS: u64 = 300;
const SETS: [&str; 6] = [
    "train.max_steps=300",
    "train.epochs=1000",
    "train.validate_every_epochs=0",
    "train.warmup_frac=0",
    "train.min_learning_rate=1e-3",
    "train.learning_rate=1e-3",
];
const PREDICTIONS: usize = 1000;

/// Copies every published checkpoint.
struct Copies<'a>(&'a Path);

impl Observer for Copies<'_> {
    fn on(&self, event: &Event) {
        if let Event::Saved { path, best: false } = event {
            let state: Value = serde_json::from_slice(&fs::read(path.join("trainer.json")).unwrap()).unwrap();
            copy_into(path, &self.0.join(state["step"].to_string()));
        }
    }
}

/// Answer and mask of a checkpoint, or the error.
fn predict(run: &Path, mask: &Path) -> Result<(String, Vec<u8>), String> {
    let image = fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut command = prsmed();
    command.arg("predict").arg(run).arg("--image").arg(image).args(["--question", "Where is the lesion?", "--quiet"]);
    let output = command.args(["--max-new-tokens", "2", "--mask-out"]).arg(mask).output().unwrap();
    if output.status.code() != Some(0) {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok((String::from_utf8(output.stdout).unwrap(), fs::read(mask).unwrap()))
}

#[test]
#[ignore = "takes minutes: scripts/soak"]
fn soak_1000_predictions_beside_a_training_each_equal_one_published_step() {
    let (steps, run) = (folder("soak-steps"), path("soak-run"));
    let mask = steps.join("mask.png");
    let sets = ["model.image_size=64", "train.micro_batch=2", "train.checkpoint_every_steps=1"];
    let sets: Vec<&str> = sets.into_iter().chain(SETS).collect();
    let config = RunConfig::preset_with("tiny", &sets).unwrap();
    let runtime = Runtime::new();
    let manifest = Manifest::open(phantoms(), None).unwrap();
    let prepared = Training::new(config, manifest, path("soak-reference"), &runtime).unwrap().prepare().unwrap();
    prepared.run(&Copies(&steps)).unwrap();
    let mut known = BTreeMap::new();
    for step in 1..=STEPS {
        known.entry(predict(&steps.join(step.to_string()), &mask).unwrap()).or_insert(step);
    }
    assert!(known.len() > 100, "only {} different predictions", known.len());

    let (mut seen, mut done_so_far) = (BTreeSet::new(), 0);
    while done_so_far < PREDICTIONS {
        let _ = fs::remove_dir_all(&run);
        let mut training = train(phantoms(), &run, &SETS).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while !run.join("last").exists() {
            assert!(training.try_wait().unwrap().is_none(), "the training ended without a checkpoint");
        }
        while training.try_wait().unwrap().is_none() && done_so_far < PREDICTIONS {
            let found = predict(&run.join("last"), &mask).unwrap_or_else(|error| panic!("{done_so_far}: {error}"));
            seen.insert(*known.get(&found).unwrap_or_else(|| panic!("{done_so_far}: equals no step")));
            done_so_far += 1;
        }
        let _ = training.kill();
        training.wait().unwrap();
    }
    assert!(seen.len() > 50, "the predictions saw these steps only: {seen:?}");
    // the reference is the same training
    done(&mut train(phantoms(), &path("soak-last"), &SETS));
    let weights = |run: &Path| fs::read(run.join("mask_decoder.safetensors")).unwrap();
    assert!(weights(&path("soak-last").join("last")) == weights(&steps.join(STEPS.to_string())));
}
