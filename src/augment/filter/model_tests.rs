use super::*;
use crate::nn::LoraConfig;
use crate::segment::setup::ModelConfig;
use crate::tensor::no_grad;
use image::{Luma, RgbImage};

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
        let assembly = assembly();
        fill(&assembly, part, f64::NAN);
        let error = score(&assembly, &image, &label, "where is the lesion").unwrap_err();
        let start = format!("{}: the {expected} of the model are not finite", image.display());
        assert!(error.to_string().starts_with(&start), "{error}");
    }
    let assembly = assembly();
    assert!(score(&assembly, &image, &label, "where is the lesion").is_ok());
    fill(&assembly, "image_encoder", f64::INFINITY);
    let mask = folder.path().join("mask.png");
    label.save(&mask).unwrap();
    let pairs = [(image.clone(), mask)];
    let runtime = Runtime::new();
    let error = features(&assembly, Mode::EditLesion, &pairs, &runtime).unwrap_err();
    let start = format!("{}: the image features of the model are not finite", image.display());
    assert!(error.to_string().starts_with(&start), "{error}");
}

/// Sets every number of a part to `value`.
fn fill(assembly: &Assembly, part: &str, value: f64) {
    let parts = assembly.model.stores().parts();
    let (_, store) = parts.iter().find(|(name, _)| *name == part).unwrap();
    store.for_each(|entry| {
        if entry.tensor.kind() == Kind::Float {
            drop(no_grad(|| entry.tensor.shallow_clone().fill_(value)));
        }
    });
}

fn assembly() -> Assembly {
    let preset: toml::Table = toml::from_str(include_str!("../../../configs/tiny.toml")).unwrap();
    let config: ModelConfig = preset["model"].clone().try_into().unwrap();
    let locate = |_: &str| -> Result<PathBuf> { unreachable!("random weights") };
    let build =
        Build { device: Device::Cpu, kind: Kind::Float, seed: 3, locate: &locate, allow_partial: false, cache: None };
    let lora = LoraConfig { rank: 2, alpha: 2.0, dropout: 0.0 };
    setup::create(&config, lora, &["skin".to_owned()], &["where is the lesion"], build).unwrap()
}
