//! Questions that share a sequence, and padding: losses and gradients are those of single samples.

use super::{TURN, assemble, build, config_of, data, data_with};
use image::{GrayImage, Luma};
use prsmed::data::geometry::{Geometry, MovedMask};
use prsmed::data::text::IMAGE_TOKEN;
use prsmed::models::prsmed::PrsMed;
use prsmed::models::{decoder, image_encoder, mask_head};
use prsmed::segment::Semantics;
use prsmed::segment::layout::{Layout, Sizes};
use prsmed::segment::loss;
use prsmed::segment::step::{self, Inputs, Pass};
use prsmed::segment::task::SegmentTask;
use prsmed::tensor::autograd::clear_grad;
use prsmed::tensor::store::Role;
use prsmed::tensor::{Device, Kind, Tensor, no_grad, rng};
use prsmed::trainer::{BatchSize, Shard, Task};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Questions of each image.
const GROUPS: [usize; 3] = [3, 1, 2];
/// Ids before the answer (the image's included) and of the answer, of each question.
const LENGTHS: [(usize, usize); 6] = [(9, 4), (5, 1), (14, 6), (7, 3), (6, 5), (11, 2)];

fn texts() -> (Vec<Vec<i64>>, Vec<usize>) {
    let text = |number: usize, length: usize| {
        let ids = (0..length).map(|i| 3 + i64::try_from((7 * i + 31 * number) % 200).unwrap());
        let mut ids: Vec<i64> = ids.collect();
        (ids[0], ids[1]) = (1, IMAGE_TOKEN);
        ids
    };
    let texts = LENGTHS.iter().enumerate().map(|(number, (prompt, answer))| text(number, prompt + answer));
    (texts.collect(), LENGTHS.iter().map(|(prompt, _)| *prompt).collect())
}

/// A mask of some place.
fn described(number: usize) -> Geometry {
    let number = u32::try_from(number).unwrap();
    Geometry::of(&GrayImage::from_fn(32, 32, |x, y| Luma([u8::from(x + number > 20 && y < number + 4)])))
}

/// The same questions: with an image for each group, or with one for each question.
fn inputs(model: &PrsMed, is_packed: bool) -> Inputs {
    rng::seed(11);
    let options = (Kind::Float, Device::Cpu);
    let clip = model.config().tower.image_size();
    let (images, questions) = (3, 6);
    let clip_image = Tensor::randn([images, 3, clip, clip], options);
    let sam_image = Tensor::randint(256, [images, 3, 64, 64], (Kind::Uint8, Device::Cpu));
    let mask = Tensor::rand([questions, 1, 64, 64], options).gt(0.7).to_kind(Kind::Uint8) * 255;
    let class_label = Tensor::from_slice(&[0_i64, 0, 0, 2, 1, 1]);
    let (texts, answer_starts) = texts();
    let moved = |(number, (prompt, answer)): (usize, &(usize, usize))| {
        let at = prompt + answer - 1;
        vec![MovedMask { geometry: described(20 + number), at, id: 9 }; number % 3]
    };
    let moved: Vec<Vec<MovedMask>> = LENGTHS.iter().enumerate().map(moved).collect();
    let own: Vec<Geometry> = (0..questions).map(|number| described(number.try_into().unwrap())).collect();
    let layout = |groups: &[usize]| {
        let texts = texts.clone();
        let layout = Layout::new(texts, &answer_starts, groups, Semantics::Corrected, model.spans(groups.len()));
        layout.with_read_masks(model.reads_masks()).with_moved(moved.clone())
    };
    let geometry = |layout: &Layout| layout.geometry(own.iter().map(Geometry::numbers));
    if is_packed {
        let layout = layout(&GROUPS);
        return Inputs {
            geometry: geometry(&layout),
            layout,
            vision: clip_image.into(),
            sam_image,
            mask,
            has_mask: None,
            class_label,
            rows: Vec::new(),
        };
    }
    let owners = Tensor::from_slice(&[0_i64, 0, 0, 1, 2, 2]);
    let [clip_image, sam_image] = [clip_image, sam_image].map(|images| images.index_select(0, &owners));
    let (vision, has_mask, layout) = (clip_image.into(), None, layout(&[1; 6]));
    let geometry = geometry(&layout);
    Inputs { layout, vision, sam_image, mask, has_mask, geometry, class_label, rows: Vec::new() }
}

fn trained(model: &PrsMed) -> Vec<(String, Tensor)> {
    let parts = model.stores().parts();
    let all = parts.iter().flat_map(|(file, store)| store.entries().into_iter().map(move |e| (*file, e)));
    let trained = all.filter(|(_, e)| e.role == Role::Trainable);
    trained.map(|(file, e)| (format!("{file}/{}", e.name), e.tensor)).collect()
}

/// Losses and gradients of everything trained, without dropout.
fn gradients(model: &PrsMed, inputs: &Inputs, checkpoint: usize) -> Vec<(String, Tensor)> {
    let pass = Pass {
        llm: decoder::DecoderPass { train: false, checkpoint },
        encoder: image_encoder::EncoderPass::default(),
        decoder: mask_head::HeadPass::default(),
    };
    let trained = trained(model);
    for (_, tensor) in &trained {
        clear_grad(tensor);
    }
    let prepared = inputs.to_device(inputs.vision.resolve(model), inputs.batch_size());
    let outputs = step::forward(model, &prepared, pass);
    let losses = step::losses(model, &prepared, &outputs);
    let words = losses.words.unwrap();
    (&losses.text + &losses.mask + &losses.class + &words).backward();
    let mut all = vec![
        ("text".to_owned(), losses.text.detach()),
        ("mask".to_owned(), losses.mask.detach()),
        ("class".to_owned(), losses.class.detach()),
        ("words".to_owned(), words.detach()),
    ];
    all.extend(trained.into_iter().map(|(name, tensor)| (name, tensor.grad())).filter(|(_, grad)| grad.defined()));
    all
}

/// Relative L2 distance of losses and of each part's gradients: 1e-5. Single gradients that cancel lose digits: 1e-4,
/// of the part's where they are far smaller (some are 0 but for rounding).
fn assert_same(what: &str, got: &[(String, Tensor)], want: &[(String, Tensor)]) {
    assert!(want.len() > 100 && got.len() == want.len(), "{} and {} tensors", got.len(), want.len());
    let norm = |tensor: &Tensor| tensor.to_kind(Kind::Double).norm().double_value(&[]);
    let mut parts: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for ((name, a), (other, b)) in got.iter().zip(want) {
        assert_eq!((name, a.size()), (other, b.size()));
        let part = parts.entry(name.split('/').next().unwrap()).or_default();
        part.0 += norm(&(a - b)).powi(2);
        part.1 += norm(b).powi(2);
    }
    for ((name, a), (_, b)) in got.iter().zip(want) {
        let whole = parts[name.split('/').next().unwrap()].1.sqrt();
        let error = norm(&(a - b)) / norm(b).max(1e-3 * whole);
        assert!(error <= 1e-4, "{what}: {name} differs by {error:.1e}");
    }
    for (part, (difference, size)) in parts {
        let error = (difference / size).sqrt();
        eprintln!("{what}: {part} {error:.1e}");
        assert!(error <= 1e-5, "{what}: {part} differs by {error:.1e}");
    }
}

/// Losses of text, mask and class as shares of `whole`, without dropout.
fn losses(model: &PrsMed, inputs: &Inputs, whole: BatchSize) -> [f64; 3] {
    let prepared = inputs.to_device(inputs.vision.resolve(model), whole);
    let outputs = step::forward(model, &prepared, Pass::evaluation());
    let losses = step::losses(model, &prepared, &outputs);
    [&losses.text, &losses.mask, &losses.class].map(|loss| loss.double_value(&[]))
}

#[test]
fn questions_without_a_mask_train_the_answer_and_the_class_alone() {
    let _turn = TURN.lock();
    let (_data, manifest) = data();
    let config = config_of(&[]);
    let loaded = assemble(&config, &manifest, build(&config, Device::Cpu, None));
    let model = &loaded.model;
    for is_packed in [true, false] {
        let known = vec![true, false, true, true, false, true];
        let all = Inputs { has_mask: Some(vec![true; 6]), ..inputs(model, is_packed) };
        let some = Inputs { has_mask: Some(known.clone()), ..inputs(model, is_packed) };
        let plain = inputs(model, is_packed);
        let size = plain.batch_size();
        assert_eq!((size.masks, some.batch_size().masks), (6.0, 4.0));
        let (want, got) = (losses(model, &plain, size), losses(model, &all, size));
        let is_close = |a: [f64; 3], b: [f64; 3]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * b.abs());
        assert!(is_close(got, want), "packed {is_packed}: {got:?} {want:?}");
        // the mean over the four known masks, from the outputs
        let whole = some.batch_size();
        let of_some = losses(model, &some, whole);
        let prepared = plain.to_device(plain.vision.resolve(model), size);
        let logits = step::forward(model, &prepared, Pass::evaluation()).mask_logits;
        let rows = Tensor::from_slice(&[0_i64, 2, 3, 5]);
        let [logits, masks] = [&logits, &plain.target(Device::Cpu)].map(|all| all.index_select(0, &rows));
        let mean = loss::structure(&logits, &masks, Semantics::Corrected, None).double_value(&[]) / 4.0;
        assert!(is_close(of_some, [want[0], mean, want[2]]), "packed {is_packed}: {of_some:?}, mean {mean}");
        // what is stored as the mask of an unknown one has no effect
        let changed = Inputs { has_mask: Some(known.clone()), ..inputs(model, is_packed) };
        for row in [1, 4] {
            let _inverted = changed.mask.get(row).bitwise_not_();
        }
        assert_eq!(losses(model, &changed, whole), of_some);
        // parts add up, also one without any mask
        let parts = some.split(1);
        assert_eq!(parts.iter().map(|part| part.batch_size().masks).sum::<f64>(), 4.0);
        let sum = parts
            .iter()
            .map(|part| losses(model, part, whole))
            .fold([0.0; 3], |sum, part| std::array::from_fn(|index| sum[index] + part[index]));
        assert!(is_close(sum, of_some), "packed {is_packed}: {sum:?} {of_some:?}");
    }
}

#[test]
fn packed_and_padded_batches_have_the_gradients_of_single_questions() {
    let _turn = TURN.lock();
    let (_data, manifest) = data();
    let variants = [
        ["model.decoder=v5", "model.packed_attention=mask"],
        ["model.decoder=v5", "model.packed_attention=flash"],
        ["model.decoder=v6", "model.packed_attention=auto"],
    ];
    for sets in variants {
        let config = config_of(&sets);
        let loaded = assemble(&config, &manifest, build(&config, Device::Cpu, None));
        let model = &loaded.model;
        for (name, tensor) in trained(model) {
            if name.contains("lora_B") || name.starts_with("mask_reader/last") {
                // otherwise the other half has no gradient
                let _filled = no_grad(|| tensor.shallow_clone().normal_(0.0, 0.05));
            }
        }
        let (single, packed) = (inputs(model, false), inputs(model, true));
        assert!(packed.layout.is_packed() && packed.layout.sequences() == 3);
        let want = gradients(model, &single, 0);
        assert_same(&format!("{sets:?} packed"), &gradients(model, &packed, 0), &want);
        assert_same(&format!("{sets:?} packed, run twice"), &gradients(model, &packed, 2), &want);
        for inputs in [single, packed] {
            let sizes = inputs.layout.needed().rounded_up(Sizes { sequence: 32, supervised: 16, prompt: 32 });
            assert_ne!(sizes, inputs.layout.needed());
            let inputs = Inputs { layout: inputs.layout.padded_to(sizes), ..inputs };
            assert_same(&format!("{sets:?} padded to {sizes:?}"), &gradients(model, &inputs, 0), &want);
        }
    }
}

#[test]
fn questions_that_share_no_sequence_are_augmented_independently() {
    let _turn = TURN.lock();
    let (_data, manifest) = data_with(2);
    let sets = ["data.questions_per_image=1", "data.augment=classical", "train.micro_batch=1", "train.accumulation=1"];
    let config = config_of(&sets);
    let loaded = assemble(&config, &manifest, build(&config, Device::Cpu, None));
    let manifest = Arc::new(manifest);
    let (train, data) = (config.train.clone(), config.data);
    let task = SegmentTask::new(loaded, &manifest, train, data, String::new(), None).unwrap();
    let mut images: BTreeMap<_, Vec<Tensor>> = BTreeMap::new();
    for inputs in task.batches(0, 0, Shard::WHOLE).unwrap().flat_map(Result::unwrap) {
        let image = &manifest.rows[inputs.rows[0]].image_path;
        images.entry(image).or_default().push(inputs.sam_image);
    }
    let pairs: Vec<&[Tensor]> = images.values().flat_map(|images| images.windows(2)).collect();
    assert!(pairs.len() > 5 && pairs.iter().all(|pair| pair[0] != pair[1]), "{} pairs", pairs.len());
}

/// Words that follow masks learn from them, and nothing else does: masks and the other losses are the same whatever the true
/// masks are, and the gradients of the other parts are those of a model without such words.
#[test]
fn only_the_words_depend_on_the_masks_that_they_follow() {
    let _turn = TURN.lock();
    let (_data, manifest) = data();
    let config = config_of(&[]);
    let loaded = assemble(&config, &manifest, build(&config, Device::Cpu, None));
    let model = &loaded.model;
    for (_, tensor) in trained(model).iter().filter(|(name, _)| name.starts_with("mask_reader/last")) {
        let _filled = no_grad(|| tensor.shallow_clone().normal_(0.0, 0.05));
    }
    let plain = inputs(model, true);
    let hidden = Inputs { geometry: plain.layout.geometry([]), ..inputs(model, true) };
    let outputs = |inputs: &Inputs| {
        let prepared = inputs.to_device(inputs.vision.resolve(model), inputs.batch_size());
        let outputs = step::forward(model, &prepared, Pass::evaluation());
        let words = step::words_loss(model, &prepared, &outputs).unwrap().double_value(&[]);
        (outputs.mask_logits, words)
    };
    let [(masks, words), (other_masks, other_words)] = [outputs(&plain), outputs(&hidden)];
    assert_eq!(masks, other_masks);
    assert!((words - other_words).abs() > 1e-3, "{words} {other_words}");
    let (all, silent) = (gradients(model, &plain, 0), gradients(model, &hidden, 0));
    for ((name, a), (_, b)) in all.iter().zip(&silent) {
        let is_words = name == "words" || name.starts_with("mask_reader/");
        assert_eq!(a == b, !is_words, "{name}");
    }
}
