use super::*;
use crate::augment::export::{MaskSource, Text};
use crate::augment::settings::Paste;
use crate::data::manifest::{Presence, Target};
use crate::event::Observer;
use crate::fixture;
use crate::nn::LoraConfig;
use crate::segment::setup::ModelConfig;
use crate::segment::weights;
use crate::tensor::no_grad;
use crate::tensor::weights::{Staged, sha256};
use image::{Luma, RgbImage};
use std::sync::Mutex;

/// A label of the left three columns of ten.
fn label() -> GrayImage {
    GrayImage::from_fn(10, 10, |x, _| Luma([if x < 3 { 255 } else { 0 }]))
}

#[test]
fn agreement_is_the_dice_and_the_foreground_far_from_the_label() {
    let columns = |range: std::ops::Range<usize>| -> Vec<f32> {
        (0..100).map(|i| if range.contains(&(i % 10)) { 0.9 } else { 0.1 }).collect()
    };
    assert_eq!(agreement(&columns(0..3), &label()), (1.0, 0.0));
    // the label is dilated by two pixels: columns 3 and 4 are near it
    assert_eq!(agreement(&columns(0..5), &label()), (2.0 * 30.0 / 80.0, 0.0));
    assert_eq!(agreement(&columns(2..7), &label()), (2.0 * 10.0 / 80.0, 0.2));
    assert_eq!(agreement(&columns(3..10), &label()), (0.0, 0.5));
}

#[test]
fn the_generated_area_is_the_lesion_or_everything_else() {
    let count = |mode| generated_area(label(), mode).pixels().filter(|pixel| pixel.0[0] == 255).count();
    assert_eq!([Mode::EditLesion, Mode::InsertLesion, Mode::KeepLesion].map(count), [30, 30, 70]);
    assert_eq!(generated_area(label(), Mode::EditLesion), label());
    let none = generated_area(GrayImage::new(4, 4), Mode::EditLesion);
    assert!(none.iter().all(|&value| value == 255), "an empty lesion: the whole image");
}

#[test]
fn an_image_for_which_a_filter_model_computes_nan_is_named() {
    let _lock = rng::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image.png");
    RgbImage::from_pixel(48, 32, image::Rgb([90, 80, 70])).save(&image).unwrap();
    let label = GrayImage::from_pixel(48, 32, Luma([255]));
    for (part, expected) in [("mask_decoder", "mask logits"), ("cls", "class logits")] {
        let model = Model::from(loaded());
        fill(&model.loaded, part, f64::NAN);
        let error = score(&model, &image, &label, "where is the lesion").unwrap_err();
        let start = format!("{}: the {expected} of the model are not finite", image.display());
        assert!(error.to_string().starts_with(&start), "{error}");
    }
    let model = Model::from(loaded());
    assert!(score(&model, &image, &label, "where is the lesion").is_ok());
    let loaded = model.loaded;
    fill(&loaded, "image_encoder", f64::INFINITY);
    let mask = folder.path().join("mask.png");
    label.save(&mask).unwrap();
    let pairs = [(image.clone(), mask)];
    let runtime = Runtime::new();
    let error = features(&loaded, Mode::EditLesion, &pairs, &runtime).unwrap_err();
    let start = format!("{}: the image features of the model are not finite", image.display());
    assert!(error.to_string().starts_with(&start), "{error}");
}

/// Sets every number of a part to `value`.
fn fill(loaded: &LoadedModel, part: &str, value: f64) {
    let parts = loaded.model.stores().parts();
    let (_, store) = parts.iter().find(|(name, _)| *name == part).unwrap();
    store.for_each(|entry| {
        if entry.tensor.kind() == Kind::Float {
            drop(no_grad(|| entry.tensor.shallow_clone().fill_(value)));
        }
    });
}

fn loaded() -> LoadedModel {
    let preset: toml::Table = toml::from_str(include_str!("../../../configs/tiny.toml")).unwrap();
    let config: ModelConfig = preset["model"].clone().try_into().unwrap();
    let locate = |_: &str| -> Result<PathBuf> { unreachable!("random weights") };
    let build = Build { seed: 3, ..Build::new(Device::Cpu, Kind::Float, &locate) };
    let lora = LoraConfig { rank: 2, alpha: 2.0, dropout: 0.0 };
    setup::create(&config, lora, &["skin".to_owned()], &["where is the lesion"], build).unwrap()
}

/// A training row of the class `skin` whose image has one grey level.
fn real_row(folder: &Path, name: &str, grey: u8) -> Row {
    let [image_path, mask_path] = ["", "-mask"].map(|end| folder.join(format!("{name}{end}.png")));
    RgbImage::from_pixel(10, 10, image::Rgb([grey; 3])).save(&image_path).unwrap();
    label().save(&mask_path).unwrap();
    let targets = Target::only(mask_path, Presence::Present);
    Row { image_path, targets, modality: "skin".into(), ..fixture::row("where is the lesion", "there", None) }
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

/// An accepted pair made from `source`.
fn record(index: u64, source: &Path) -> Record {
    Record {
        index,
        name: format!("pair_{index}"),
        class: "skin".into(),
        source_image: source.to_path_buf(),
        source_sha256: sha256(source).unwrap(),
        mode: Mode::EditLesion,
        paste: Paste::Exact,
        model: "a generator".into(),
        model_sha256: "00".into(),
        loras: Vec::new(),
        prompt: "a lesion".into(),
        negative: String::new(),
        seed: 1,
        steps: 1,
        guidance: 1.0,
        strength: 1.0,
        sampler: "ddim".into(),
        source_mask: None,
        mask_transform: None,
        rim_px: 0.0,
        decoys: Vec::new(),
        texts: vec![Text::new("where is the lesion", "there", "center left")],
        scores: BTreeMap::new(),
        accepted: true,
        reason: String::new(),
    }
}

#[test]
fn every_training_image_is_in_one_fold_and_folds_have_equal_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows: Vec<Row> = (0..6).map(|i| real_row(folder.path(), &i.to_string(), 40 * i)).collect();
    rows.push(real_row(folder.path(), "copy", 0));
    rows.push(Row { split: Split::Test, ..real_row(folder.path(), "test", 250) });
    let manifest = manifest(folder.path(), rows);
    let found = sums(&manifest).unwrap();
    assert_eq!(found.len(), 7, "the images of training rows");
    assert_eq!(found[manifest.rows[0].image_path.as_path()], found[manifest.rows[6].image_path.as_path()], "a copy");
    let folds = folds(&manifest, 3, 1).unwrap();
    assert_eq!(folds.keys().collect::<BTreeSet<_>>(), found.values().collect::<BTreeSet<_>>());
    for fold in 0..3 {
        assert_eq!(folds.values().filter(|&&of_image| of_image == fold).count(), 2, "fold {fold}");
    }
}

/// The numbers of finished pairs that a job reports.
#[derive(Default)]
struct Progress(Mutex<Vec<u64>>);

impl Observer for Progress {
    fn on(&self, event: &Event) {
        if let Event::Advanced { done } = event {
            self.0.lock().unwrap().push(*done);
        }
    }
}

#[test]
fn every_pair_of_a_known_source_is_scored_once_and_rejections_are_counted_by_test() {
    let _lock = rng::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    std::fs::create_dir_all(models.join("fold-0")).unwrap();
    let mut checkpoint = Staged::begin(&models.join("fold-0/last")).unwrap();
    let loaded = loaded();
    weights::save(&mut checkpoint, &loaded, &loaded.description).unwrap();
    checkpoint.publish().unwrap();

    let (known, other) = (real_row(folder.path(), "known", 90), real_row(folder.path(), "other", 60));
    let mut export = Export::open(&folder.path().join("pairs")).unwrap();
    for (index, source) in (0..).zip([&known, &known, &other]) {
        let record = record(index, &source.image_path);
        export.write(&RgbImage::new(10, 10), MaskSource::Made(&label()), record).unwrap();
    }
    let folds = BTreeMap::from([(sha256(&known.image_path).unwrap(), 0)]);
    let filter_models = FilterModels { folder: models, folds, num_models: 1 };
    let real = manifest(folder.path(), vec![known]);
    let progress = Arc::new(Progress::default());
    let runtime = Runtime::new().with_observer(Arc::clone(&progress) as Arc<dyn Observer>);
    // no Dice is above 1
    let strict = Thresholds { dice_min: 1.1, ..Thresholds::default() };
    let report = filter_models.filter(&real, &mut export, &strict, 0, &runtime).unwrap();
    assert_eq!(*progress.0.lock().unwrap(), [1, 2]);
    assert_eq!((report.pairs, report.accepted, report.rows, report.unknown), (3, 1, 1, 1));
    assert_eq!(report.rejected, BTreeMap::from([("dice".to_owned(), 2)]));
    assert!(report.real_dice.is_some(), "the model was not trained on the known image");
}
