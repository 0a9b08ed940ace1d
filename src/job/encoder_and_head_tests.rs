//! Image encoders and mask heads of other families train, plan, resume and predict through the same code.

use crate::config::RunConfig;
use crate::data::manifest::{Manifest, Target};
use crate::data::phantom::{self, PhantomOptions};
use crate::event::Silent;
use crate::front::{Ask, Image, Model, OpenOptions};
use crate::plan::dry_run::Job;
use crate::plan::machine::Machine;
use crate::runtime::Runtime;
use crate::segment::setup;
use crate::segment::training::Training;
use crate::tensor::rng;
use crate::tensor::weights::Archive;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The tiny preset with other `sizes`, for a training to step `steps`.
fn config(sizes: &[(&str, Value)], steps: u64) -> RunConfig {
    let sets = ["model.image_size=64", "train.micro_batch=2", "data.questions_per_image=2", "data.max_val_rows=2"];
    let mut config = RunConfig::preset_with("tiny", &sets).unwrap();
    config.train.max_steps = steps;
    let mut json = serde_json::to_value(&config.model.sizes).unwrap();
    for (key, value) in sizes {
        json[key] = value.clone();
    }
    config.model.sizes = Some(serde_json::from_value(json).unwrap());
    config
}

/// Rows with so many targets each.
fn rows(folder: &Path, targets: usize) -> Manifest {
    let options = PhantomOptions { count: 8, image_size_px: 48, ..PhantomOptions::default() };
    phantom::generate(folder, &options, &Silent).unwrap();
    let mut manifest = Manifest::open(folder, None).unwrap();
    for row in &mut manifest.rows {
        let first = row.target().clone();
        row.targets = (0..targets).map(|number| Target { name: format!("{number}"), ..first.clone() }).collect();
    }
    manifest
}

/// Plans a training, trains one step, continues it for another, and asks the run: all masks of the answer.
fn trained(sizes: &[(&str, Value)], targets: usize) -> (tempfile::TempDir, PathBuf, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().unwrap();
    let manifest = rows(&folder.path().join("data"), targets);
    let plan = config(sizes, 1).plan_for(Job::Train, &Machine::named("cpu:8gb").unwrap()).unwrap();
    assert!(plan.fits && plan.allocated_peak.0 > 1 << 20);
    let (run, runtime) = (folder.path().join("run"), Runtime::new());
    let train = |steps, resumes| {
        let training = Training::new(config(sizes, steps), manifest.clone(), &run, &runtime).unwrap();
        training.resume(resumes).run().unwrap()
    };
    assert_eq!(train(1, false).outcome.steps, 1);
    let continued = train(2, true);
    assert_eq!(continued.outcome.steps, 2);
    let last = run.join("last");
    let opened = Model::open(&last, &OpenOptions::default(), &runtime).unwrap();
    let row = &manifest.rows[0];
    let [ours, theirs] = [opened, Model::from(continued)].map(|model| {
        let image = Image::File(row.image_path.clone());
        let targets = model.predict(&image, &Ask::mask(&row.question)).unwrap().targets;
        targets.into_iter().map(|target| target.probabilities).collect::<Vec<_>>()
    });
    assert_eq!(ours, theirs);
    assert!(ours.len() == targets && ours.iter().all(|mask| mask.len() == 48 * 48));
    (folder, last, ours)
}

#[test]
fn an_image_encoder_of_another_family_is_trained_like_the_others() {
    let _lock = rng::TEST_LOCK.lock();
    let (_folder, last, _) = trained(&[("encoder", json!({"family": "toy_encoder", "width": 32}))], 1);
    let sizes = setup::describe(&last).unwrap().sizes;
    assert_eq!((sizes.encoder.stride(), sizes.encoder.channels()), (8, 32));
    let names = |file: &str| Archive::open(&last.join(file)).unwrap().names().to_vec();
    assert_eq!(names("image_encoder.safetensors").len(), 4);
    let states: Vec<String> = names("trainer.safetensors").into_iter().filter(|name| name.contains("merge.")).collect();
    assert!(!states.is_empty(), "the optimizer has a state of the trained layer");
    assert!(!names("trainer.safetensors").iter().any(|name| name.contains("patches.")), "and none of the frozen one");
}

#[test]
fn a_mask_head_of_another_family_draws_the_masks_of_two_targets() {
    let _lock = rng::TEST_LOCK.lock();
    let head = ("head", json!({"family": "toy_head", "prompt_dim": 128, "image_dim": 32}));
    let encoder = ("encoder", json!({"family": "toy_encoder", "width": 32}));
    for sizes in [vec![head.clone()], vec![head, encoder]] {
        let (_folder, _, masks) = trained(&sizes, 2);
        assert_ne!(masks[0], masks[1]);
    }
}
