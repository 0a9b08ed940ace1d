use super::*;

/// An image of one colour below `root`, in a row of `split`.
fn row(root: &Path, name: &str, gray: u8, split: Split) -> Row {
    let image_path = root.join(format!("{name}.png"));
    image::GrayImage::from_pixel(2, 2, image::Luma([gray])).save(&image_path).unwrap();
    Row { image_path, split, modality: "skin".into(), ..crate::data::fixture::row("where", "there", None) }
}

fn manifest(root: &Path, rows: Vec<Row>) -> Manifest {
    Manifest { root: root.to_path_buf(), rows, modalities: vec!["skin".into()], num_leaking: 0, skipped: Vec::new() }
}

/// The ablation of two seeds from 7 on.
fn ablation<'a>(real: &'a Manifest, synthetic: &'a Manifest, config: &'a RunConfig) -> Ablation<'a> {
    Ablation {
        real,
        synthetic,
        config,
        toml: "",
        steps: 3,
        first_seed: 7,
        num_seeds: 2,
        limit_real: 0,
        limit_test: 0,
        ratio: Ratio::All,
        out: Path::new("unused"),
    }
}

#[test]
fn arms_differ_only_in_augmentation_and_synthetic_rows() {
    let folder = tempfile::tempdir().unwrap();
    let real = manifest(folder.path(), vec![row(folder.path(), "real", 1, Split::Train)]);
    let made = Row { synthetic: true, ..row(folder.path(), "made", 2, Split::Train) };
    let synthetic = manifest(folder.path(), vec![made]);
    let config = RunConfig::default();
    let ablation = ablation(&real, &synthetic, &config);
    let both = real.clone().with_extra(synthetic.clone()).unwrap();
    let data = ArmData { real: Arc::new(real.clone()), both: Arc::new(both) };
    let num_synthetic = |arm| data.of(arm).rows.iter().filter(|row| row.synthetic).count();
    assert_eq!(Arm::ALL.map(num_synthetic), [0, 0, 1]);
    assert_eq!(
        Arm::ALL.map(|arm| ablation.config_of(arm, 7).data.augment),
        [Augment::None, Augment::Classical, Augment::None]
    );
    let same = |arm| {
        let mut config = ablation.config_of(arm, 7);
        config.data.augment = Augment::None;
        config
    };
    assert_eq!(same(Arm::Classical), same(Arm::Real));
    assert_eq!(same(Arm::Synthetic), same(Arm::Real));
    let train = same(Arm::Real).train;
    assert_eq!((train.max_steps, train.epochs), (3, 3));
    assert_eq!((train.validate_every_epochs, train.patience), (0, 0), "every arm is trained to the end");
}

#[test]
fn training_rows_are_repeated_until_an_epoch_is_longer_than_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, split| row(folder.path(), name, 1, split);
    let real = manifest(folder.path(), vec![of("a", Split::Train), of("test", Split::Test), of("b", Split::Train)]);
    let mut config = RunConfig::default();
    (config.train.micro_batch, config.train.accumulation) = (2, 1);
    let rows = ablation(&real, &real, &config).repeated(&real).rows;
    // three steps of two rows are three passes over two rows, and one more follows
    assert_eq!(rows.iter().filter(|row| row.split == Split::Train).count(), 8);
    assert_eq!(rows.iter().filter(|row| row.split == Split::Test).count(), 1);
}

#[test]
fn every_arm_is_trained_with_the_same_seeds() {
    let empty = manifest(Path::new(""), Vec::new());
    let config = RunConfig::default();
    let ablation = ablation(&empty, &empty, &config);
    for arm in Arm::ALL {
        let of_arm = ablation.runs().into_iter().filter(|run| run.1 == arm);
        let seeds: Vec<u64> = of_arm.map(|(seed, arm)| ablation.config_of(arm, seed).train.seed).collect();
        assert_eq!(seeds, [7, 8], "{arm:?}");
    }
    assert_eq!(ablation.seeds(), [7, 8]);
}

#[test]
fn test_images_that_are_also_training_images_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let rows = vec![
        row(folder.path(), "train", 1, Split::Train),
        row(folder.path(), "copy-of-train", 1, Split::Test),
        row(folder.path(), "unseen", 2, Split::Test),
        row(folder.path(), "val", 3, Split::Val),
    ];
    let real = manifest(folder.path(), rows);
    let config = RunConfig::default();
    assert_eq!(ablation(&real, &real, &config).unseen_test_rows(&Silent).unwrap(), [2]);
}

#[test]
fn runs_are_compared_seed_by_seed_on_the_same_images() {
    let folder = tempfile::tempdir().unwrap();
    let rows = (0..4_u8).map(|i| row(folder.path(), &format!("test-{i}"), i, Split::Test)).collect();
    let real = manifest(folder.path(), rows);
    let config = RunConfig::default();
    let ablation = Ablation { out: folder.path(), ..ablation(&real, &real, &config) };
    // seeds and images differ far more than arms
    let base = [[0.1, 0.3, 0.5, 0.7], [0.2, 0.4, 0.6, 0.8]];
    let arm = |gain: f64| base.map(|row| row.map(|dice| dice + gain).to_vec()).to_vec();
    let scores = BTreeMap::from([("real", arm(0.0)), ("classical", arm(0.01)), ("synthetic", arm(0.03))]);
    let report = ablation.report(&scores, &[0, 1, 2, 3], ablation.seeds(), 1, 1).unwrap();
    for (comparisons, gain) in
        [(&report.classical, 0.01), (&report.synthetic, 0.03), (&report.synthetic_over_classical, 0.02)]
    {
        let all = comparisons.last().unwrap();
        let interval = [all.bootstrap.low, all.bootstrap.high];
        let is_gain = |value: f64| (value - gain).abs() < 1e-9;
        assert!(is_gain(all.difference) && interval.into_iter().all(is_gain), "{gain}: {all:?}");
        assert_eq!(all.verdict, Conclusion::Gain);
    }
    assert!((report.runs["real"][1] - 0.5).abs() < 1e-9, "{:?}", report.runs);
    ablation.write(&report).unwrap();
    let written = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(written("ablation.txt"), report.table());
    let json: serde_json::Value = serde_json::from_str(&written("ablation.json")).unwrap();
    assert_eq!((&json["seeds"], &json["test_rows"]), (&json!([7, 8]), &json!(4)));
}

#[test]
fn a_new_output_folder_is_created_and_keeps_its_settings() {
    let folder = tempfile::tempdir().unwrap();
    let real = manifest(folder.path(), vec![row(folder.path(), "image", 1, Split::Train)]);
    let config = RunConfig::default();
    let out = folder.path().join("new/ablation");
    let first = Ablation { out: &out, ..ablation(&real, &real, &config) };
    first.check_settings(&real, &real, &[0]).unwrap();
    assert!(out.join("settings.json").is_file());
    let more_seeds = Ablation { num_seeds: 5, out: &out, ..ablation(&real, &real, &config) };
    more_seeds.check_settings(&real, &real, &[0]).expect("seeds can be added");
    let longer = Ablation { steps: 4, out: &out, ..ablation(&real, &real, &config) };
    let error = longer.check_settings(&real, &real, &[0]).unwrap_err().to_string();
    assert!(error.contains("runs made with other settings (steps was 3, is 4)"), "{error}");
}

#[test]
fn a_finished_training_is_read_and_an_interrupted_one_continues_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let real = manifest(folder.path(), vec![row(folder.path(), "image", 1, Split::Train)]);
    let config = RunConfig::default();
    let ablation = Ablation { out: folder.path(), ..ablation(&real, &real, &config) };
    let rows = Arc::new(real.clone());
    let scores = |arm, seed| ablation.scores(arm, seed, &rows, &[0, 0], &Runtime::new());
    let finished = folder.path().join("runs/classical-7");
    std::fs::create_dir_all(&finished).unwrap();
    std::fs::write(finished.join("scores.json"), "[0.25, 0.5]").unwrap();
    assert_eq!(scores(Arm::Classical, 7).unwrap(), [0.25, 0.5]);
    // a damaged checkpoint shows that the training reads it
    let checkpoint = folder.path().join("runs/real-8/last");
    std::fs::create_dir_all(&checkpoint).unwrap();
    std::fs::write(checkpoint.join("config.toml"), "[train").unwrap();
    let error = scores(Arm::Real, 8).unwrap_err().to_string();
    assert!(error.contains("runs/real-8/last/config.toml: "), "{error}");
}

#[test]
fn scores_of_one_image_are_averaged() {
    let images = ["b", "a", "b", "b"].map(str::to_owned);
    assert_eq!(by_image(&images, &[0.0, 0.5, 0.3, 0.6]), [0.3, 0.5]);
}
