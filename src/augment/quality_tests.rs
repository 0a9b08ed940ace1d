use super::*;
use crate::event::Silent;
use crate::nn::LoraConfig;
use crate::segment::setup::{self, Build, ModelConfig};
use crate::tensor::weights::write_safetensors;
use image::{Luma, Rgb, RgbImage};

static NOT_INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn images(files: &[PathBuf], batch: usize) -> FeatureImages<'_> {
    FeatureImages { files, area: None, batch, observer: &Silent, interrupt: &NOT_INTERRUPTED }
}

/// Five images of different sizes, the last grey.
fn files(folder: &Path) -> Vec<PathBuf> {
    let byte = |value: u32| u8::try_from(value % 256).unwrap();
    let image = |n: u32| {
        let path = folder.join(format!("{n}.png"));
        if n == 4 {
            GrayImage::from_fn(33, 40, |x, y| Luma([byte(x * y)])).save(&path).unwrap();
        } else {
            let pixel = |x: u32, y: u32| Rgb([byte(x * (5 + n)), byte(y * 7), byte(x + y * n)]);
            RgbImage::from_fn(48 + 8 * n, 64, pixel).save(&path).unwrap();
        }
        path
    };
    (0..5).map(image).collect()
}

fn loaded() -> LoadedModel {
    let preset: toml::Table = toml::from_str(include_str!("../../configs/tiny.toml")).unwrap();
    let config: ModelConfig = preset["model"].clone().try_into().unwrap();
    let locate = |_: &str| -> Result<PathBuf> { unreachable!("random weights") };
    let build = Build { seed: 3, ..Build::new(Device::Cpu, Kind::Float, &locate) };
    let lora = LoraConfig { rank: 2, alpha: 2.0, dropout: 0.0 };
    setup::create(&config, lora, &["skin".to_owned()], &["where is the lesion"], build).unwrap()
}

fn distance_of(a: &Tensor, b: &Tensor) -> f64 {
    ((a - b).norm() / b.norm()).double_value(&[])
}

#[test]
fn encoder_features_are_the_mean_of_the_embedding() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path());
    let _lock = crate::tensor::rng::TEST_LOCK.lock();
    let loaded = loaded();
    let all = encoder_features(&loaded, &images(&files, 5)).unwrap();
    assert_eq!(all.size(), [5, 32]);
    let again = encoder_features(&loaded, &images(&files, 2)).unwrap();
    assert!(distance_of(&again, &all) < 1e-5, "features depend on the batch size");

    let whole = |_: usize| Ok(GrayImage::from_pixel(50, 20, Luma([1])));
    let found = encoder_features(&loaded, &FeatureImages { area: Some(&whole), ..images(&files, 2) }).unwrap();
    assert!(distance_of(&found, &all) < 1e-5, "the whole area is the whole image");

    let half = |left: bool| {
        move |_: usize| Ok(GrayImage::from_fn(64, 64, |x, _| Luma([if (x < 32) == left { 9 } else { 0 }])))
    };
    let side = |left: bool| {
        let area = half(left);
        encoder_features(&loaded, &FeatureImages { area: Some(&area), ..images(&files, 3) }).unwrap()
    };
    let (left, right) = (side(true), side(false));
    assert!(distance_of(&left, &right) > 1e-3, "halves differ");
    assert!(distance_of(&((left + right) / 2.0), &all) < 1e-5, "the mean of two halves is the mean of the whole");

    let none = |_: usize| Ok(GrayImage::new(8, 8));
    let error = encoder_features(&loaded, &FeatureImages { area: Some(&none), ..images(&files, 3) }).unwrap_err();
    assert!(error.to_string().ends_with("0.png: the area to compare is empty"), "{error}");
}

#[test]
fn inception_features_of_files_match_a_direct_pass() {
    let _lock = crate::tensor::rng::TEST_LOCK.lock();
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path());
    let store = Store::new(StoreOptions::cpu());
    let model = Inception::with_divisor(&store.root(Role::Frozen), 16);
    let all = inception_features(&model, &images(&files, 2)).unwrap();
    assert_eq!(all.size(), [5, 128]);
    let one = decode::image(&files[1]).unwrap();
    let direct = model.features(&unit_pixels(&one));
    assert!(distance_of(&all.narrow(0, 1, 1), &direct) < 1e-5);
    let stop = AtomicBool::new(true);
    let stopped = inception_features(&model, &FeatureImages { interrupt: &stop, ..images(&files, 2) });
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert!(inception_features(&model, &images(&[], 2)).is_err());
}

#[test]
fn inception_weights_are_loaded_and_other_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
    let _model = Inception::new(&store.root(Role::Frozen));
    for entry in store.entries() {
        let _ = entry.tensor.shallow_clone().fill_(0.01);
    }
    let unused = Tensor::zeros([3], (Kind::Float, Device::Cpu));
    let entries = store.entries();
    let mut tensors: Vec<(&str, &Tensor)> = entries.iter().map(|e| (e.name.as_str(), &e.tensor)).collect();
    tensors.push(("fc.bias", &unused));
    tensors.push(("Conv2d_1a_3x3.bn.num_batches_tracked", &unused));
    let path = folder.path().join("inception.safetensors");
    write_safetensors(&path, &tensors, &std::collections::BTreeMap::new()).unwrap();
    let model = open_inception(&path, Device::Cpu).unwrap();
    let features = model.features(&Tensor::full([1, 3, 20, 20], 0.5, (Kind::Float, Device::Cpu)));
    assert_eq!(features.size(), [1, 2048]);

    let path = folder.path().join("other.safetensors");
    write_safetensors(&path, &tensors[1..4], &std::collections::BTreeMap::new()).unwrap();
    let error = open_inception(&path, Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    std::fs::write(folder.path().join(inception::WEIGHTS_FILE), [0x80, 2, 0x8a, 0x0a]).unwrap();
    let error = open_inception(folder.path(), Device::Cpu).unwrap_err();
    assert!(error.to_string().contains(inception::WEIGHTS_FILE) && error.hint().contains("torch.save"), "{error}");
}

fn waves(rows: i64, shift: f64) -> Tensor {
    let i = Tensor::arange(rows * 3, (Kind::Double, Device::Cpu)).view([rows, 3]);
    (&i * &i * 0.37 + shift).sin() + shift
}

#[test]
fn a_report_contains_every_modality() {
    let (real, near, far) = (waves(40, 0.0), waves(25, 0.0), waves(30, 2.0));
    let mut report = QualityReport::default();
    let (inception, encoder) = (FeatureSource::Inception, FeatureSource::Encoder("tinysam".into()));
    report.add(&inception, "skin", [&real, &far], 0).unwrap();
    report.add(&encoder, "skin", [&real, &far], 0).unwrap();
    report.add(&inception, "eye", [&real, &near], 0).unwrap();
    report.add(&encoder, "lung", [&waves(3, 0.1), &far], 0).unwrap();
    assert_eq!(report.rows.len(), 8);
    let row = |modality: &str, metric: &str| {
        let found = report.rows.iter().find(|r| r.modality == modality && r.metric == metric);
        found.unwrap_or_else(|| panic!("{modality} {metric}: {report}"))
    };
    let fid = row("skin", "FID");
    assert!(fid.low.is_none() && fid.warning.as_deref().is_some_and(|w| w.contains("2048")));
    let mut of_many = QualityReport::default();
    of_many.add(&inception, "skin", [&waves(2048, 0.1), &waves(2048, 0.2)], 0).unwrap();
    assert!(of_many.rows[0].metric == "FID" && of_many.rows[0].warning.is_none(), "{of_many}");
    let kid = row("skin", "KID");
    assert!(kid.low < kid.value && kid.value < kid.high && kid.warning.is_none());
    assert!(kid.value > row("eye", "KID").value);
    assert!(row("skin", "MMD[tinysam]").value.is_some());
    let few = row("lung", "KID[tinysam]");
    assert_eq!((few.value, few.n_real, few.n_other), (None, 3, 30));
    let text = report.to_string();
    assert!(text.contains("* biased upwards: fewer than 2048 images") && text.contains("* fewer than 4"), "{text}");
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<QualityReport>(&json).unwrap().to_string(), text);
}
