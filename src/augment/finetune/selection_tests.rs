use super::*;
use crate::augment::export::{Export, MaskSource, Record, Text};
use crate::augment::settings::Paste;
use crate::data::decode;
use crate::data::manifest::{Row, Split};
use crate::data::phantom::{self, PhantomOptions};
use crate::event::Event;
use crate::tensor::weights::{Staged, sha256};
use crate::tensor::{Device, rng};
use crate::trainer::checkpoint::{Progress, read_progress};
use crate::trainer::precision::Scaler;
use image::{GrayImage, RgbImage};
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Real training images of the tests.
const REAL: usize = 5;
/// The two candidates, the one with the best validation score first.
const CANDIDATES: [Candidate; 2] = [Candidate { step: 20, score: -0.1 }, Candidate { step: 10, score: -0.2 }];

/// A finished fine-tuning on a few phantoms, whose candidates have pairs already.
struct Finetuned {
    _home: tempfile::TempDir,
    folder: PathBuf,
    run: FinetuneRun,
    manifest: Manifest,
}

/// What the images of the pairs of each candidate show.
#[derive(Clone, Copy, PartialEq)]
enum Pairs {
    Noise,
    Phantoms,
    None,
}

/// Notes phases, and interrupts the work when `stops_at` trainings have begun.
struct Watch {
    trainings: Mutex<usize>,
    stops_at: usize,
    interrupt: Arc<AtomicBool>,
}

impl Observer for Watch {
    fn on(&self, event: &Event) {
        if matches!(event, Event::Started { phase, .. } if phase == "train") {
            let mut trainings = self.trainings.lock().expect("no panic before");
            *trainings += 1;
            if *trainings == self.stops_at {
                self.interrupt.store(true, Ordering::SeqCst);
            }
        }
    }
}

fn checkpoint(target: &Path, step: u64) {
    let progress = Progress {
        step,
        best_score: Some(CANDIDATES[0].score),
        best_values: Vec::new(),
        without_gain: 0,
        scores: Vec::new(),
        score_kind: "loss".into(),
        unvalidated: false,
        scaler: Scaler::new(Precision::Fp32),
        steps_per_epoch: 10,
        total_steps: 0,
        candidates: CANDIDATES.to_vec(),
    };
    let mut folder = Staged::begin(target).expect("a new folder");
    folder.write_bytes("trainer.json", &serde_json::to_vec(&progress).expect("plain values")).expect("written");
    folder.write_bytes("weights", format!("weights of step {step}").as_bytes()).expect("written");
    folder.publish().expect("published");
}

fn record(index: usize, row: &Row, source: &Row) -> Record {
    Record {
        index: index as u64,
        name: format!("pair-{index:03}"),
        class: row.modality.clone(),
        source_image: source.image_path.clone(),
        source_sha256: sha256(&source.image_path).expect("an image"),
        mode: crate::augment::settings::Mode::KeepLesion,
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
        texts: vec![Text::new(&row.question, &row.answer, "left")],
        scores: std::collections::BTreeMap::new(),
        accepted: true,
        reason: String::new(),
    }
}

impl Finetuned {
    fn new(steps: u64, pairs: [Pairs; 2]) -> Self {
        let home = tempfile::tempdir().expect("a temporary folder");
        let (root, folder) = (home.path().join("data"), home.path().join("run"));
        let options = PhantomOptions {
            count: 60,
            image_size_px: 64,
            two_lesion_frac: 0.0,
            val_frac: 0.3,
            test_frac: 0.0,
            ..PhantomOptions::default()
        };
        phantom::generate(&root, &options, &Silent).expect("phantoms");
        let mut manifest = Manifest::open(&root, None).expect("phantoms");
        let images: BTreeSet<PathBuf> = train_rows(&manifest).iter().map(|row| row.image_path.clone()).collect();
        let real: BTreeSet<&PathBuf> = images.iter().take(REAL).collect();
        let others: Vec<Row> =
            train_rows(&manifest).into_iter().filter(|row| !real.contains(&row.image_path)).collect();
        manifest.rows.retain(|row| row.split != Split::Train || real.contains(&row.image_path));
        let mut run = FinetuneRun::default();
        run.finetune.select_by = crate::augment::finetune::SelectBy::Segmenter;
        (run.finetune.image_size, run.finetune.select_steps) = (64, steps);
        (run.finetune.select_seeds, run.finetune.keep_best) = (2, 2);
        files::create_folders(&folder).expect("a folder");
        checkpoint(&folder.join("last"), 30);
        checkpoint(&folder.join("best"), 20);
        for one in CANDIDATES {
            checkpoint(&one.folder(&folder), one.step);
        }
        let this = Self { _home: home, folder, run, manifest };
        for (candidate, pairs) in CANDIDATES.iter().zip(pairs) {
            this.write_pairs(candidate, pairs, &others);
        }
        this
    }

    /// Pairs as if the candidate had made them from `rows`.
    fn write_pairs(&self, candidate: &Candidate, pairs: Pairs, rows: &[Row]) {
        let runtime = Runtime::new().on(Device::Cpu);
        let out = self.selection(&runtime).pairs_folder().expect("a folder").join(candidate.name());
        let mut made = Made { pairs: rows.len(), accepted: rows.len(), problem: None };
        if pairs == Pairs::None {
            made = Made { accepted: 0, problem: Some("the pixel tests rejected all pairs".into()), ..made };
        } else {
            let sources = train_rows(&self.manifest);
            let mut export = Export::open(&out).expect("a data root");
            for (index, row) in rows.iter().enumerate() {
                let (image, mask) = pixels(row, pairs, index as u64);
                let record = record(index, row, &sources[index % sources.len()]);
                export.write(&image, MaskSource::Made(&mask), record).expect("written");
            }
            export.write_annotations().expect("written");
        }
        let marker = serde_json::to_vec(&made).expect("plain values");
        write_bytes(&out.with_extension("json"), &marker).expect("written");
    }

    fn selection<'a>(&'a self, runtime: &'a Runtime) -> Selection<'a> {
        Selection::new(&self.run, &self.manifest, &self.folder, runtime).expect("usable")
    }

    /// Chooses; returns the number of trainings too.
    fn choose(&self, stops_at: usize) -> (Result<SelectionReport>, usize) {
        let interrupt = Arc::new(AtomicBool::new(false));
        let watch = Arc::new(Watch { trainings: Mutex::new(0), stops_at, interrupt: Arc::clone(&interrupt) });
        let observer: Arc<dyn Observer> = Arc::<Watch>::clone(&watch);
        let runtime = Runtime::new().on(Device::Cpu).with_observer(observer).with_interrupt(interrupt);
        let generator = PipelineConfig::random("tiny", false).expect("a known size");
        let report = self.selection(&runtime).run(&generator);
        let trainings = *watch.trainings.lock().expect("no panic before");
        (report, trainings)
    }

    fn best(&self) -> (String, Progress) {
        let best = self.folder.join("best");
        let weights = std::fs::read_to_string(best.join("weights")).expect("weights");
        (weights, read_progress(&best).expect("the progress"))
    }
}

fn train_rows(manifest: &Manifest) -> Vec<Row> {
    manifest.rows.iter().filter(|row| row.split == Split::Train).cloned().collect()
}

fn pixels(row: &Row, pairs: Pairs, seed: u64) -> (RgbImage, GrayImage) {
    let mut image = decode::image(&row.image_path).expect("an image").to_rgb8();
    if pairs == Pairs::Noise {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        image.iter_mut().for_each(|value| *value = rng.random());
    }
    (image, decode::mask(&row.mask_path).expect("a mask"))
}

/// The candidate with the best validation score makes noise, the other one makes useful images.
#[test]
fn a_generator_of_noise_is_not_chosen_when_another_one_is_good() {
    let _lock = rng::TEST_LOCK.lock();
    let run = Finetuned::new(60, [Pairs::Noise, Pairs::Phantoms]);
    let (report, trainings) = run.choose(0);
    let report = report.unwrap();
    assert_eq!(trainings, 6, "two seeds of real images alone and of two candidates");
    assert_eq!((report.chosen_step, report.best_step_by_metric), (10, 20));
    assert_eq!(report.metric, "loss");
    let gains: Vec<f64> = report.candidates.iter().filter_map(CandidateReport::gain).collect();
    assert!(gains[1] > gains[0] + 0.02, "{gains:?}");
    let (weights, progress) = run.best();
    assert_eq!((weights.as_str(), progress.step), ("weights of step 10", 10));
    assert_eq!((progress.best_score, progress.score_kind.as_str()), (Some(gains[1]), "segmenter"));
    let text = std::fs::read_to_string(run.folder.join("selection/selection.txt")).unwrap();
    assert_eq!(text, report.table());
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(run.folder.join("selection/selection.json")).unwrap()).unwrap();
    assert_eq!(json["chosen_step"], 10);
    assert_eq!(json["candidates"][0]["step"], 20);
    assert!(json["candidates"][1]["against_real"][0]["bootstrap"]["low"].is_number());
    // nothing is repeated
    let (again, trainings) = run.choose(0);
    assert_eq!((again.unwrap(), trainings), (report, 0));
    assert_eq!(run.best().1, progress);
}

#[test]
fn an_interrupted_choice_continues_with_the_same_result() {
    let _lock = rng::TEST_LOCK.lock();
    let [whole, parts] = [(); 2].map(|()| Finetuned::new(6, [Pairs::Phantoms, Pairs::Noise]));
    let expected = whole.choose(0).0.unwrap();
    let before = parts.best();
    let (interrupted, trainings) = parts.choose(3);
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
    assert_eq!((trainings, parts.best()), (3, before), "an unfinished choice changes nothing");
    let (report, trainings) = parts.choose(0);
    // the third training continues, and the three others are missing
    assert_eq!((report.unwrap(), trainings), (expected, 4));
}

#[test]
fn candidates_without_usable_pairs_are_not_scored() {
    let _lock = rng::TEST_LOCK.lock();
    let run = Finetuned::new(2, [Pairs::None, Pairs::Noise]);
    let (report, trainings) = run.choose(0);
    let report = report.unwrap();
    assert_eq!((report.chosen_step, trainings), (10, 4));
    assert!(report.candidates[0].problem.is_some() && report.candidates[0].dice.is_empty());
    let useless = Finetuned::new(2, [Pairs::None; 2]);
    let (report, trainings) = useless.choose(0);
    let report = report.unwrap();
    assert_eq!((report.chosen_step, trainings, report.any_candidate_helps), (20, 0, false));
    let (weights, progress) = useless.best();
    assert_eq!((weights.as_str(), progress.score_kind.as_str()), ("weights of step 20", "loss"));
}

#[test]
fn what_cannot_work_is_refused_before_the_training() {
    let run = Finetuned::new(2, [Pairs::Noise; 2]);
    let runtime = Runtime::new().on(Device::Cpu);
    let refused = |run: &FinetuneRun, manifest: &Manifest, words: &str| {
        let refusal = Selection::new(run, manifest, Path::new("run"), &runtime).err();
        let text = refusal.map(|error| format!("{error} {}", error.hint())).unwrap_or_default();
        assert!(text.contains(words), "{words}: {text}");
    };
    let only = |split: Split| {
        let mut manifest = run.manifest.clone();
        manifest.rows.retain(|row| row.split == split);
        manifest
    };
    refused(&run.run, &only(Split::Train), "there are no `val` rows of images that are not trained");
    refused(&run.run, &only(Split::Val), "there are no training rows with a mask that shows something");
    // copies of training images are not validation images
    let mut copied = only(Split::Train);
    let copies: Vec<Row> = copied.rows.iter().map(|row| Row { split: Split::Val, ..row.clone() }).collect();
    copied.rows.extend(copies);
    refused(&run.run, &copied, "there are no `val` rows of images that are not trained");
    let mut empty = run.manifest.clone();
    let blank = run.folder.join("blank.png");
    GrayImage::new(64, 64).save(&blank).unwrap();
    empty.rows.iter_mut().for_each(|row| row.mask_path.clone_from(&blank));
    refused(&run.run, &empty, "there are no training rows with a mask that shows something");
    let with = |change: fn(&mut FinetuneRun)| {
        let mut changed = run.run.clone();
        change(&mut changed);
        changed
    };
    refused(&with(|run| run.train.validate_every_epochs = 0), &run.manifest, "train.validate_every_epochs=1");
    refused(&with(|run| run.finetune.inference_steps_training = 1), &run.manifest, "is too few for pairs");
    let mask_to_image = |run: &mut FinetuneRun| {
        run.finetune.select_mode = crate::augment::finetune::select_by::PairMode::MaskToImage;
    };
    refused(&with(mask_to_image), &run.manifest, "`mask_to_image` needs a ControlNet");
    let unused = |run: &mut FinetuneRun| {
        run.finetune.mode = Mode::MaskToImage;
        run.finetune.select_mode = crate::augment::finetune::select_by::PairMode::KeepLesion;
    };
    refused(&with(unused), &run.manifest, "do not use the ControlNet that is trained");
}

#[test]
fn without_candidates_there_is_no_choice() {
    let run = Finetuned::new(2, [Pairs::Noise; 2]);
    std::fs::remove_dir_all(run.folder.join(candidates::FOLDER)).unwrap();
    let error = run.choose(0).0.unwrap_err();
    assert!(error.to_string().contains("there are no candidates"), "{error}");
}
