use super::report::ArmComparison;
use super::scores::RowScore;
use super::*;
use crate::augment::export::{JOURNAL, Record, Text};
use crate::augment::settings::{Mode, Paste};
use crate::data::manifest::{Presence, Split, Target};
use crate::data::mixing_sampler::{Lengths, MixingSampler};
use crate::event::Silent;
use crate::metrics::paired::Conclusion;
use crate::tensor::weights::sha256;
use std::path::PathBuf;

const HALF: Ratio = Ratio::PerReal(0.5);

/// A row of `split` about an image of one colour below `root`.
fn row(root: &Path, name: &str, gray: u8, split: Split) -> Row {
    let folder = root.join("skin/train_masks");
    std::fs::create_dir_all(&folder).unwrap();
    let (image_path, mask_path) = (root.join(format!("{name}.png")), folder.join(format!("{name}.png")));
    for path in [&image_path, &mask_path] {
        image::GrayImage::from_pixel(2, 2, image::Luma([gray])).save(path).unwrap();
    }
    let targets = Target::only(mask_path, Presence::Present);
    Row { image_path, targets, split, modality: "skin".into(), ..crate::fixture::row("where", "there", None) }
}

fn manifest(root: &Path, rows: Vec<Row>) -> Manifest {
    Manifest {
        root: root.to_path_buf(),
        rows,
        modalities: vec!["skin".into()],
        num_leaking: 0,
        skipped: Vec::new(),
        spellings: crate::data::patient::Spellings::default(),
    }
}

/// An accepted pair `name` made from the image of `source`, as a row of `root` and a record.
fn pair(root: &Path, index: u64, name: &str, source: &Row) -> (Row, Record) {
    let record = Record {
        index,
        name: name.into(),
        class: "skin".into(),
        source_image: source.image_path.clone(),
        source_sha256: sha256(&source.image_path).unwrap(),
        mode: Mode::KeepLesion,
        paste: Paste::Exact,
        model: "random:tiny".into(),
        model_sha256: String::new(),
        loras: Vec::new(),
        prompt: String::new(),
        negative: String::new(),
        seed: 0,
        steps: 1,
        guidance: 1.0,
        strength: 1.0,
        sampler: String::new(),
        source_mask: None,
        mask_transform: None,
        rim_px: 1.0,
        decoys: Vec::new(),
        texts: vec![Text::new(&source.question, &source.answer, "left")],
        scores: std::collections::BTreeMap::new(),
        accepted: true,
        reason: String::new(),
    };
    let made = row(root, name, 100, Split::Train);
    (Row { question: source.question.clone(), answer: source.answer.clone(), ..made }, record)
}

/// Real images `a` (two questions), `b`, `c` with a test image, and pairs: two of `a`, one of `b`.
struct Data {
    _folder: tempfile::TempDir,
    real: Manifest,
    synthetic: Manifest,
    out: PathBuf,
}

impl Data {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let a = row(root, "a", 1, Split::Train);
        let again = Row { question: "where is the second".into(), ..a.clone() };
        let (b, c) = (row(root, "b", 2, Split::Train), row(root, "c", 3, Split::Train));
        let real = vec![a.clone(), again.clone(), b.clone(), c, row(root, "test", 9, Split::Test)];
        let pairs = root.join("pairs");
        std::fs::create_dir_all(&pairs).unwrap();
        let made = [(0, "pa", &a), (1, "pb", &b), (2, "pc", &again)].map(|(i, name, of)| pair(&pairs, i, name, of));
        let journal: String =
            made.iter().map(|(_, record)| serde_json::to_string(record).unwrap() + "\n").collect::<Vec<_>>().concat();
        std::fs::write(pairs.join(JOURNAL), journal).unwrap();
        let synthetic = manifest(&pairs, made.into_iter().map(|(row, _)| row).collect());
        let out = root.join("out");
        Self { real: manifest(root, real), synthetic, out, _folder: folder }
    }

    /// The ablation of two seeds from 7 on.
    fn ablation<'a>(&'a self, config: &'a RunConfig) -> Ablation<'a> {
        Ablation {
            real: &self.real,
            synthetic: &self.synthetic,
            external: None,
            config,
            toml: "",
            real_images: 0,
            ratios: vec![HALF],
            steps: 3,
            first_seed: 7,
            num_seeds: 2,
            limit_test: 0,
            out: &self.out,
        }
    }

    fn rows(&self, limit: usize) -> ArmRows {
        ArmRows::new(&self.real, &self.synthetic, limit).unwrap()
    }
}

/// Settings with effective batches of `size`.
fn config(size: usize) -> RunConfig {
    let mut config = RunConfig::default();
    (config.train.micro_batch, config.train.accumulation) = (size, 1);
    config
}

fn key(arm: Arm) -> RunKey {
    RunKey { limit_real: 0, arm, seed: 7 }
}

#[test]
fn arms_differ_only_in_augmentation_and_extra_rows() {
    let (data, config) = (Data::new(), config(4));
    let (ablation, rows) = (data.ablation(&config), data.rows(0));
    let arms = Arm::all(&[HALF]);
    assert_eq!(arms, [Arm::Real, Arm::Classical, Arm::Duplicates(HALF), Arm::Synthetic(HALF)]);
    let num_extra = |arm: &Arm| rows.manifest(*arm, 12).synthetic_rows().len();
    let counts: Vec<usize> = arms.iter().map(num_extra).collect();
    assert!(counts[..2] == [0, 0] && counts[2] == counts[3] && counts[2] > 0, "{counts:?}");
    let augment = |arm: &Arm| ablation.config_of(key(*arm), &rows).data.augment;
    let augments: Vec<Augment> = arms.iter().map(augment).collect();
    assert_eq!(augments, [Augment::None, Augment::Classical, Augment::None, Augment::None]);
    let same = |arm: &Arm| {
        let mut config = ablation.config_of(key(*arm), &rows);
        (config.data.augment, config.data.synthetic_ratio) = (Augment::None, Ratio::All);
        config
    };
    assert!(arms.iter().all(|arm| same(arm) == same(&Arm::Real)));
    let train = same(&Arm::Real).train;
    assert_eq!((train.max_steps, train.epochs, train.seed), (3, 3, 7));
    assert_eq!((train.validate_every_epochs, train.patience), (0, 0), "every arm is trained to the end");
}

#[test]
fn duplicates_take_the_places_of_synthetic_rows() {
    let (data, ratio) = (Data::new(), Ratio::PerReal(1.0));
    let rows = data.rows(0);
    let [duplicates, synthetic] = [Arm::Duplicates(ratio), Arm::Synthetic(ratio)].map(|arm| rows.manifest(arm, 40));
    let batches = |manifest: &Manifest| {
        let equal = |rows: Vec<usize>| Lengths { lengths: vec![5; rows.len()], rows };
        let (real, extra) = (equal(manifest.rows_of(Split::Train)), equal(manifest.synthetic_rows()));
        MixingSampler::new(real, extra, ratio, 4, 7).unwrap().batches(0)
    };
    assert_eq!(batches(&duplicates), batches(&synthetic));
    let mut replaced = 0;
    for (copy, made) in duplicates.rows.iter().zip(&synthetic.rows) {
        assert_eq!((copy.synthetic, copy.split), (made.synthetic, made.split));
        if !made.synthetic {
            assert_eq!(copy, made);
            continue;
        }
        replaced += 1;
        // the row of the source with the same question: `pc` belongs to the second question about `a`
        let stem = made.target().mask_path.file_stem().unwrap().to_string_lossy().into_owned();
        let source = if stem == "pb" { "b" } else { "a" };
        assert!(copy.image_path.ends_with(format!("{source}.png")), "{copy:?}");
        assert_eq!((&copy.question, copy.question.contains("second")), (&made.question, stem == "pc"));
    }
    assert_eq!(replaced, synthetic.synthetic_rows().len());
}

#[test]
fn rows_are_repeated_until_an_epoch_is_longer_than_the_training() {
    let rows = Data::new().rows(0);
    // three passes over four rows are twelve samples, and one more follows
    assert_eq!(rows.manifest(Arm::Real, 12).rows_of(Split::Train).len(), 16);
    assert_eq!(rows.manifest(Arm::Real, 12).rows_of(Split::Test).len(), 1);
    for (ratio, least) in [(0.25, 4), (2.0, 32), (5.0, 80)] {
        let made = rows.manifest(Arm::Synthetic(Ratio::PerReal(ratio)), 12).synthetic_rows().len();
        assert!(made >= least && made.is_multiple_of(3) && made < least + 3, "{ratio}: {made}");
    }
    assert!((rows.ratio(Ratio::All) - 0.75).abs() < 1e-9, "three synthetic rows, four real ones");
}

#[test]
fn pairs_of_other_images_are_left_out() {
    let data = Data::new();
    let all = data.rows(0);
    assert_eq!((all.num_images, all.num_pairs, all.synthetic.len()), (3, 3, 3));
    // the first image is `a`
    let one = data.rows(1);
    assert_eq!((one.num_images, one.num_pairs), (1, 2));
    assert!(one.records.iter().all(|record| record.source_image.ends_with("a.png")));
}

#[test]
fn every_arm_is_trained_with_the_same_seeds() {
    let (data, config) = (Data::new(), RunConfig::default());
    let ablation = Ablation { real_images: 2, ..data.ablation(&config) };
    let runs = ablation.runs();
    assert_eq!(runs.len(), 4 * 2);
    for arm in Arm::all(&[HALF]) {
        let own = runs.iter().filter(|run| run.arm == arm);
        assert_eq!(own.map(|run| run.seed).collect::<Vec<_>>(), [7, 8], "{arm}");
    }
    let names: std::collections::HashSet<String> = runs.iter().map(ToString::to_string).collect();
    assert_eq!(names.len(), runs.len());
    assert!(names.contains("prsmed-2-synthetic-0.5-8"), "{names:?}");
    assert_eq!(key(Arm::Real).to_string(), "prsmed-all-real-7");
}

#[test]
fn settings_that_cannot_work_are_refused_before_the_first_training() {
    let data = Data::new();
    let refused = |batch: usize, ratio: f64| {
        let config = config(batch);
        let ratios = vec![Ratio::PerReal(ratio)];
        let ablation = Ablation { ratios, ..data.ablation(&config) };
        ablation.check(&data.rows(0)).unwrap_err().to_string()
    };
    let error = refused(2, 2.0);
    assert!(error.contains("argument `ratios`: with 2 synthetic rows per real row, some steps of 2 would"), "{error}");
    assert!(refused(2, 0.0).starts_with("argument `ratios`: 0 adds no synthetic rows"));
    let config = config(3);
    let ablation = Ablation { ratios: vec![Ratio::PerReal(2.0), Ratio::All], ..data.ablation(&config) };
    ablation.check(&data.rows(0)).unwrap();
}

#[test]
fn images_of_the_training_are_not_scored() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let of = |name: &str, gray, split| row(root, name, gray, split);
    let real = manifest(
        root,
        vec![
            of("train", 1, Split::Train),
            of("copy-of-train", 1, Split::Test),
            of("unseen", 2, Split::Test),
            of("val", 3, Split::Val),
        ],
    );
    let how = (crate::data::labels::Labels::NONE, 0);
    assert_eq!(TestSet::new(&real, None, how, &Silent).unwrap().rows.len(), 1);
    let external = |rows| manifest(root, rows);
    let both = external(vec![of("copy", 1, Split::Train), of("x", 5, Split::Train), of("y", 6, Split::Val)]);
    let count = |external: &Manifest| {
        let set = TestSet::new(&real, Some(external), how, &Silent);
        set.map(|set| set.rows.len())
    };
    assert_eq!(count(&both).unwrap(), 2, "all rows without a test split");
    let test = external(vec![of("x", 5, Split::Train), of("z", 6, Split::Test)]);
    assert_eq!(count(&test).unwrap(), 1);
    let error = count(&external(vec![of("copy", 1, Split::Test)])).unwrap_err().to_string();
    assert!(error.contains("all images are training images of the ablation"), "{error}");
}

/// Scores of all runs of `ablation`: `base` for the real arm, plus a gain for each other arm.
fn simulated(ablation: &Ablation, num_rows: usize, gain: impl Fn(Arm) -> f64) -> HashMap<String, RunScores> {
    let scores = |key: &RunKey| {
        // seeds and images differ far more than arms
        let dice = |row: usize| 0.1 + 0.2 * row as f64 + 0.1 * (key.seed - 7) as f64 + gain(key.arm);
        let score = |row| RowScore { dice: dice(row), false_positives: 1, background: 100 };
        let decoys = probe::FalsePositives { predicted: 4, pixels: 100 };
        let probe = probe::ProbeCounts { decoys, generated: decoys };
        RunScores { sets: vec![(0..num_rows).map(score).collect()], probe: Some(probe) }
    };
    ablation.runs().iter().map(|key| (key.to_string(), scores(key))).collect()
}

#[test]
fn runs_are_compared_seed_by_seed_and_duplicates_can_explain_a_gain() {
    let data = Data::new();
    let root = data.real.root.clone();
    let mut rows = data.real.rows.clone();
    rows.extend((0..3_u8).map(|i| row(&root, &format!("test-{i}"), 20 + i, Split::Test)));
    let data = Data { real: manifest(&root, rows), ..data };
    let config = RunConfig::default();
    let quarter = Ratio::PerReal(0.25);
    let ablation = Ablation { ratios: vec![HALF, quarter], ..data.ablation(&config) };
    let sets = ablation.sets(&Runtime::new()).unwrap();
    let all = data.rows(0);
    let report = |duplicates: f64| {
        let gain = |arm: Arm| match arm {
            Arm::Real => 0.0,
            Arm::Classical => 0.01,
            Arm::Duplicates(_) => duplicates,
            Arm::Synthetic(_) => 0.03,
        };
        let runs = simulated(&ablation, 4, gain);
        let results = AblationRuns { ablation: &ablation, rows: &all, sets: &sets, runs: &runs };
        results.report().unwrap()
    };
    let gained = report(0.0);
    assert_eq!(gained.comparisons.len(), 1 + 2 * 4);
    let primary: Vec<&ArmComparison> = gained.comparisons.iter().filter(|c| c.is_primary).collect();
    assert_eq!(primary.len(), 2);
    assert!(primary.iter().all(|c| c.arm == Arm::Synthetic(HALF)));
    assert_eq!((primary[0].baseline, primary[1].baseline), (Arm::Real, Arm::Duplicates(HALF)));
    for (arm, baseline, expected) in [
        (Arm::Classical, Arm::Real, 0.01),
        (Arm::Synthetic(quarter), Arm::Real, 0.03),
        (Arm::Synthetic(quarter), Arm::Classical, 0.02),
    ] {
        let found = gained.comparisons.iter().find(|c| c.arm == arm && c.baseline == baseline).unwrap();
        let overall = found.overall().unwrap();
        let is_gain = |value: f64| (value - expected).abs() < 1e-9;
        assert!(is_gain(overall.difference) && is_gain(overall.bootstrap.low), "{arm}: {overall:?}");
    }
    assert_eq!(gained.verdict, Conclusion::Gain);
    assert!(gained.sentence().starts_with("synthetic pairs help. +0.0300 Dice over real images alone"));
    let explained = report(0.03);
    assert_eq!(explained.verdict, Conclusion::NoGain);
    assert!(explained.sentence().contains("duplicated real rows may explain the gain"), "{}", explained.sentence());
    // 4 % inside decoys, 1 % on real background
    let probes = &gained.probes;
    let of = |arm: Arm| probes.iter().find(|probe| probe.arm == arm).unwrap();
    assert!(of(Arm::Synthetic(HALF)).is_suspicious && !of(Arm::Real).is_suspicious, "{probes:?}");
    assert_eq!(of(Arm::Real).real.pixels, 2 * 4 * 100);
    assert!(gained.table().contains("4.000 % of the pixels inside decoys"), "{}", gained.table());
    std::fs::create_dir_all(&data.out).unwrap();
    ablation.write(&gained).unwrap();
    let written = |name: &str| std::fs::read_to_string(data.out.join(name)).unwrap();
    assert_eq!(written("ablation.txt"), gained.table());
    let json: serde_json::Value = serde_json::from_str(&written("ablation.json")).unwrap();
    assert_eq!((&json["seeds"], &json["sets"][0]["rows"]), (&json!([7, 8]), &json!(4)));
    assert_eq!(json["runs"][3]["arm"], "synthetic-0.5");
}

#[test]
fn one_seed_shows_no_gain() {
    let (data, config) = (Data::new(), RunConfig::default());
    let ablation = Ablation { num_seeds: 1, ..data.ablation(&config) };
    let sets = ablation.sets(&Runtime::new()).unwrap();
    let rows = data.rows(0);
    let runs = simulated(&ablation, 1, |arm| if matches!(arm, Arm::Synthetic(_)) { 0.2 } else { 0.0 });
    let results = AblationRuns { ablation: &ablation, rows: &rows, sets: &sets, runs: &runs };
    let report = results.report().unwrap();
    assert_eq!(report.verdict, Conclusion::NoGain);
    assert!(report.sentence().starts_with("no gain was shown: one seed does not show"), "{}", report.sentence());
}

/// The report of two seeds on four images, where the gain of the synthetic arm differs by image.
fn with_gains(gains: [f64; 4], duplicates: f64) -> AblationReport {
    let data = Data::new();
    let root = data.real.root.clone();
    let mut rows = data.real.rows.clone();
    rows.extend((0..3_u8).map(|i| row(&root, &format!("test-{i}"), 20 + i, Split::Test)));
    let data = Data { real: manifest(&root, rows), ..data };
    let config = RunConfig::default();
    let ablation = Ablation { num_seeds: 2, ..data.ablation(&config) };
    let sets = ablation.sets(&Runtime::new()).expect("sets");
    let rows = data.rows(0);
    let mut runs = simulated(&ablation, 4, |arm| if matches!(arm, Arm::Duplicates(_)) { duplicates } else { 0.0 });
    for (name, run) in &mut runs {
        if name.contains("synthetic") {
            run.sets[0].iter_mut().zip(gains).for_each(|(row, gain)| row.dice += gain);
        }
    }
    let results = AblationRuns { ablation: &ablation, rows: &rows, sets: &sets, runs: &runs };
    results.report().expect("a report")
}

#[test]
fn too_few_images_cannot_tell() {
    let report = with_gains([0.2, -0.2, 0.2, -0.19], 0.0);
    assert_eq!(report.verdict, Conclusion::NoGain);
    let text = report.sentence();
    assert!(text.starts_with("cannot tell: 4 test images and 2 seeds are too few. "), "{text}");
    assert!(report.is_too_imprecise() && !text.contains("no gain"), "{text}");
    assert!(text.split(". ").all(|sentence| sentence.split(' ').count() <= 25), "{text}");
}

#[test]
fn narrow_intervals_around_zero_show_no_gain() {
    let report = with_gains([0.01, -0.01, 0.01, -0.01], 0.0);
    assert!(!report.is_too_imprecise());
    assert!(report.sentence().starts_with("no gain was shown: an interval contains 0. "), "{}", report.sentence());
}

#[test]
fn a_clear_gain_is_told_from_wide_intervals() {
    let report = with_gains([0.1, 0.3, 0.1, 0.3], 0.0);
    assert!(report.sentence().starts_with("synthetic pairs help. "), "{}", report.sentence());
    assert!(!report.is_too_imprecise());
}

#[test]
fn a_new_output_folder_is_created_and_keeps_its_settings() {
    let (data, config) = (Data::new(), RunConfig::default());
    let first = data.ablation(&config);
    first.check_settings().unwrap();
    assert!(data.out.join("settings.json").is_file());
    let more = Ablation { num_seeds: 5, ratios: vec![HALF, Ratio::All], real_images: 2, ..data.ablation(&config) };
    more.check_settings().expect("seeds, ratios and numbers of images can be added");
    let longer = Ablation { steps: 4, ..data.ablation(&config) };
    let error = longer.check_settings().unwrap_err().to_string();
    assert!(error.contains("runs made with other settings (steps was 3, is 4)"), "{error}");
}

#[test]
fn finished_scores_are_read_and_an_interrupted_training_continues_from_its_checkpoint() {
    let (data, config) = (Data::new(), RunConfig::default());
    let ablation = data.ablation(&config);
    std::fs::create_dir_all(&data.out).unwrap();
    let runtime = Runtime::new();
    let (sets, rows) = (ablation.sets(&runtime).unwrap(), data.rows(0));
    let run = |arm: Arm| ablation.scores(key(arm), &rows, &sets, &runtime);
    let finished = data.out.join("runs").join(key(Arm::Classical).to_string());
    std::fs::create_dir_all(&finished).unwrap();
    let score = RowScore { dice: 0.25, false_positives: 0, background: 4 };
    let saved = |identity: &str| json!({ "set_sha256": identity, "rows": [score] }).to_string();
    let file = finished.join("scores-test.json");
    std::fs::write(&file, saved(&sets[0].identity().unwrap())).unwrap();
    assert_eq!(run(Arm::Classical).unwrap().sets, [[score]]);
    // scores of other rows are not used
    std::fs::write(&file, saved("other rows")).unwrap();
    assert_eq!(sets[0].known(&finished).unwrap(), []);
    // a damaged checkpoint shows that the training reads it
    let checkpoint = data.out.join("runs").join(key(Arm::Real).to_string()).join("last");
    std::fs::create_dir_all(&checkpoint).unwrap();
    std::fs::write(checkpoint.join("config.toml"), "[train").unwrap();
    let error = run(Arm::Real).err().unwrap().to_string();
    assert!(error.contains("runs/prsmed-all-real-7/last/config.toml: "), "{error}");
}
