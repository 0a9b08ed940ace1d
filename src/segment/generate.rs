//! One question to one model: the mask of its prompt, and the answer token by token.
//!
//! The language model processes the prompt once. The mask decoder reads its states, and generation of the answer starts
//! from its key-value cache: the masks are known before the first word, and words can follow them. The encoders run once for each image: `encode` keeps their outputs.

use super::layout::Layout;
use super::measures::validation::values;
use super::pass::{self, Images, Outputs, Pass, Segmented};
use super::run_folder::loaded::LoadedModel;
use super::semantics::Semantics;
use crate::data::geometry::Geometry;
use crate::data::image::{Fit, sam_pixels, tower_pixels};
use crate::data::sample::MOVED_MASKS;
use crate::data::text::{self, AnswerStream};
use crate::models::decoder::KvCache;
use crate::models::image_encoder::{self, ImageEmbedding};
use crate::models::prsmed::PrsMed;
use crate::tensor::{Kind, Tensor, dims, guard, ledger, meta, no_grad};
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use std::ops::ControlFlow;

/// An image as the encoders of a model read it. It belongs to the model that made it.
#[derive(Debug)]
pub struct Encoding {
    /// Vision features `[1, p, w]`, see [`PrsMed::vision_features`].
    features: Tensor,
    /// Image embedding, see [`PrsMed::embed_image`].
    embedding: ImageEmbedding,
}

impl Encoding {
    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        let tensors = std::iter::once(&self.features).chain(self.embedding.maps());
        tensors.map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }
}

/// A question that a model has read: the masks are there, and an answer can be written, also several times about other
/// masks.
#[derive(Debug)]
pub struct Asked<'a> {
    loaded: &'a LoadedModel,
    prompt: ReadPrompt,
    /// Probabilities of the mask of each target at the size of the image, row by row.
    pub masks: Vec<Vec<f32>>,
    /// Probability of each modality class.
    pub classes: Vec<f32>,
}

/// An answer in words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Written {
    /// The answer without remains of the template.
    pub answer: String,
    /// Number of generated tokens, including the end token.
    pub new_tokens: usize,
}

impl LoadedModel {
    /// Runs the encoders on an image.
    ///
    /// # Errors
    /// [`Error::Shape`] for an image of 0 pixels; typed errors of libtorch.
    pub fn encode(&self, image: &DynamicImage) -> Result<Encoding> {
        no_grad(|| guard::guard(|| Ok(encode(&self.model, &self.pixels(image)?))))
    }

    /// Reads a question about an image of `(width, height)` pixels, for answers of at most `max_new_tokens` tokens.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the model computes NaN or infinity for the mask or the modality; typed errors of libtorch.
    pub fn ask(&self, image: &Encoding, size: (u32, u32), question: &str, max_new_tokens: usize) -> Result<Asked<'_>> {
        let ids = text::question_prompt(&self.tokenizer, question)?.ids;
        let asked = no_grad(|| guard::guard(|| ask(&self.model, image, ids, size, max_new_tokens)))?;
        let (masks, classes, prompt) = asked;
        debug_assert_eq!(classes.len(), self.description.modalities.len());
        Ok(Asked { loaded: self, prompt, masks, classes })
    }
}

impl Asked<'_> {
    /// Writes an answer; `on_text` receives it piece by piece and can stop it. `masks` are those that the words follow if
    /// the model reads masks, one for each target; none hides them.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the model computes NaN or infinity for the answer; [`Error::Interrupted`] if `on_text`
    /// stopped it; typed errors of libtorch.
    pub fn write(&mut self, masks: &[GrayImage], on_text: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<Written> {
        let LoadedModel { model, tokenizer, .. } = self.loaded;
        let geometry: Vec<Geometry> =
            if model.reads_masks() { masks.iter().map(Geometry::of).collect() } else { Vec::new() };
        let mut stream = AnswerStream::default();
        let mut ids = Vec::new();
        let mut on_token = |id| {
            ids.push(id);
            if id == tokenizer.eos() {
                return Ok(false);
            }
            match on_text(&stream.push(tokenizer, id)?) {
                ControlFlow::Continue(()) => Ok(true),
                ControlFlow::Break(()) => Err(Error::Interrupted),
            }
        };
        no_grad(|| guard::guard(|| write(model, &mut self.prompt, &geometry, &mut on_token)))?;
        Ok(Written { answer: tokenizer.prompt().clean(&tokenizer.decode(&ids)?), new_tokens: ids.len() })
    }
}

impl LoadedModel {
    /// Inputs of the two encoders, `[1, 3, s, s]` u8.
    fn pixels(&self, image: &DynamicImage) -> Result<[Tensor; 2]> {
        let _category = ledger::enter(ledger::Category::Inputs);
        let config = self.description.pixels;
        let tower = tower_pixels(image, config.tower_size, config.pad_offset, config.padding)?;
        let sam = sam_pixels(image, config.sam_size, config.fit)?;
        let device = self.model.options().device;
        let square = |side: u32| [1, 3, i64::from(side), i64::from(side)];
        Ok([
            Tensor::from_slice(&tower).view(square(config.tower_size)).to_device(device),
            Tensor::from_slice(&sam).view(square(config.sam_size)).to_device(device),
        ])
    }
}

/// Runs the encoders on an image, given as [`PrsMed::image_tokens`] and [`PrsMed::embed_image`] take it.
pub(super) fn encode(model: &PrsMed, [tower, sam]: &[Tensor; 2]) -> Encoding {
    let features = model.vision_features(tower);
    let embedding = model.embed_image(sam, image_encoder::EncoderPass::default());
    Encoding { features, embedding }
}

/// A prompt that the language model has read: what answers continue from.
#[derive(Debug)]
pub(super) struct ReadPrompt {
    layout: Layout,
    /// Of the last token, `[1, 1, d]`.
    state: Tensor,
    cache: KvCache,
    /// Tokens of the prompt.
    length: i64,
    max_new_tokens: usize,
}

/// Masks, of `(width, height)` pixels, and classes of one prompt, and what its answers continue from.
pub(super) fn ask(
    model: &PrsMed,
    image: &Encoding,
    ids: Vec<i64>,
    size: (u32, u32),
    max_new_tokens: usize,
) -> Result<(Vec<Vec<f32>>, Vec<f32>, ReadPrompt)> {
    let prompt = [ids.len()];
    let layout = Layout::new(vec![ids], &prompt, &[1], Semantics::Corrected, model.spans(1));
    let layout = layout.with_targets(vec![model.num_masks()], model.num_masks()).with_read_masks(model.reads_masks());
    let length = i64::try_from(layout.sizes().sequence).expect("a prompt");
    let on_device = {
        let _category = ledger::enter(ledger::Category::Inputs);
        layout.to_device(model.options().device)
    };
    let capacity = length + i64::try_from(max_new_tokens).unwrap_or(i64::MAX / 2);
    let mut cache = KvCache::new(model.llm().config(), capacity).with_shift(layout.position_shift());
    let images = Images { tower_input: &image.features, segmented: Segmented::Embedding(&image.embedding) };
    let Outputs { states, mask_logits, class_logits, .. } =
        pass::forward(model, &on_device, images, Pass::evaluation(), Some(&mut cache));
    let masks = masks_at(&mask_logits, size, model.config().encoder.fit())?;
    let classes = probabilities(&class_logits)?;
    let state = states.narrow(1, length - 1, 1);
    Ok((masks, classes, ReadPrompt { layout, state, cache, length, max_new_tokens }))
}

/// Decodes an answer greedily until `on_token` returns false for a token or all tokens are generated. Its words follow
/// the masks of `geometry` if the model reads masks.
pub(super) fn write(
    model: &PrsMed,
    prompt: &mut ReadPrompt,
    geometry: &[Geometry],
    on_token: &mut dyn FnMut(i64) -> Result<bool>,
) -> Result<()> {
    let ReadPrompt { layout, cache, length, max_new_tokens, .. } = prompt;
    let mut state = prompt.state.shallow_clone();
    let geometry = {
        let _category = ledger::enter(ledger::Category::Inputs);
        let geometry = layout.geometry(geometry.iter().map(Geometry::numbers));
        let own = |numbers: Vec<f32>| Tensor::from_slice(&numbers[..numbers.len() / (1 + MOVED_MASKS)]).view([1, -1]);
        geometry.map(|numbers| own(numbers).to_device(state.device()))
    };
    cache.truncate(*length);
    for made in 1..=*max_new_tokens {
        let next = {
            let read = geometry.as_ref().map(|geometry| model.read_masks(&state.flatten(0, 1), geometry));
            most_likely(&model.llm().logits(read.as_ref().unwrap_or(&state)))?
        };
        if !on_token(next)? || made == *max_new_tokens {
            break;
        }
        let token = Tensor::from_slice(&[next]).view([1, 1]).to_device(state.device());
        let embeds = model.llm().embed(&token).to_kind(state.kind());
        state = model.llm().forward_cached(&embeds, None, cache);
    }
    Ok(())
}

/// Mask probabilities at `(width, height)`, row by row, of logits at the model's own size, `[m, 1, s, s]`.
fn masks_at(logits: &Tensor, (width, height): (u32, u32), fit: Fit) -> Result<Vec<Vec<f32>>> {
    Error::check_finite("mask logits", &values(logits))?;
    let [_m, _one, side, _side] = dims(logits);
    let [cells, (columns, rows)] = fit.way_back(u32::try_from(side).expect("a side"), (width, height));
    let cut = |xs: &Tensor, (width, height): (u32, u32)| xs.narrow(2, 0, height.into()).narrow(3, 0, width.into());
    let masks = cut(logits, cells).upsample_bilinear2d([rows.into(), columns.into()], false, None, None);
    let masks = values(&cut(&masks, (width, height)).sigmoid());
    let pixels = (width as usize * height as usize).max(1);
    Ok(masks.chunks(pixels).map(<[f32]>::to_vec).collect())
}

/// Class probabilities of logits.
fn probabilities(logits: &Tensor) -> Result<Vec<f32>> {
    Error::check_finite("class logits", &values(logits))?;
    Ok(values(&logits.softmax(-1, Kind::Float)))
}

/// Index of the largest of the logits of one token, `[.., vocabulary]`.
fn most_likely(logits: &Tensor) -> Result<i64> {
    let best = logits.argmax(-1, false);
    let index = meta::index(&best);
    // libtorch takes NaN for the largest value
    Error::check_finite("answer logits", &values(&logits.narrow(-1, index, 1)))?;
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::super::setup::{self, Build};
    use super::*;
    use crate::data::text::IMAGE_TOKEN;
    use crate::models::decoder::PackedAttention;
    use crate::models::llava;
    use crate::models::mask_head::{self, HeadPrompts};
    use crate::models::prsmed::BuildOptions;
    use crate::nn::Quantization;
    use crate::tensor::{Device, rng};
    use std::path::Path;

    #[test]
    fn masks_of_images_in_a_corner_are_cut_there() {
        let logits = Tensor::from_slice(&[9_f32, -9.0, -9.0, -9.0]).view([1, 1, 2, 2]);
        let masks = masks_at(&logits, (4, 2), Fit::Corner([0; 3])).unwrap();
        let found: Vec<bool> = masks[0].iter().map(|value| *value > 0.5).collect();
        assert_eq!(found, [true, true, false, false, true, true, false, false]);
        assert_ne!(masks, masks_at(&logits, (4, 2), Fit::Stretch).unwrap());
    }

    #[test]
    fn an_answer_ends_at_the_limit_or_when_the_caller_says_so() {
        let _lock = rng::TEST_LOCK.lock();
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let sizes = setup::describe(&fixture).unwrap().sizes;
        let options = BuildOptions {
            device: Device::Cpu,
            stored: Kind::Float,
            compute: Kind::Float,
            initialise: true,
            train_base: false,
            quantization: Quantization::None,
            loads_base: false,
            host_layers: 0,
            host_vision: false,
            packed_attention: PackedAttention::Auto,
            ranks: 1,
            reads_layers: true,
        };
        rng::seed(3);
        let model = PrsMed::new(&sizes, options);
        let image = |side: i64| Tensor::zeros([1, 3, side, side], (Kind::Uint8, Device::Cpu));
        let images = [image(sizes.tower.image_size()), image(64)];
        let generated = |most: usize, wanted: usize| {
            let mut ids = Vec::new();
            let mut on_token = |id: i64| -> Result<bool> {
                ids.push(id);
                Ok(ids.len() < wanted)
            };
            let text = vec![1, IMAGE_TOKEN, 5, 6];
            let image = no_grad(|| encode(&model, &images));
            let (masks, classes, mut prompt) = no_grad(|| ask(&model, &image, text, (8, 4), most)).unwrap();
            no_grad(|| write(&model, &mut prompt, &[], &mut on_token)).unwrap();
            assert_eq!((masks.len(), masks[0].len(), classes.len()), (1, 8 * 4, 6));
            ids
        };
        let whole = generated(4, usize::MAX);
        assert_eq!(whole.len(), 4);
        assert_eq!(generated(4, 2), whole[..2]);
        assert_eq!(generated(1, usize::MAX), whole[..1]);
    }

    /// A tiny model with random weights.
    fn tiny() -> LoadedModel {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let description = setup::describe(&fixture).expect("a checkpoint's description");
        let locate = |spec: &str| -> Result<std::path::PathBuf> { Ok(spec.into()) };
        let build = Build { seed: 3, ..Build::new(Device::Cpu, Kind::Float, &locate) };
        let texts = ["Where is the lesion? The lesion is at the upper left of the image."];
        setup::create(&description.model, description.sizes.lora, &description.modalities, &texts, build)
            .expect("a tiny model")
    }

    #[test]
    fn replies_about_an_encoded_image_are_those_of_the_models_parts() {
        let _lock = rng::TEST_LOCK.lock();
        let loaded = tiny();
        let image = DynamicImage::from(image::RgbImage::from_fn(40, 30, |x, y| {
            image::Rgb([x, y, x * y].map(|value| u8::try_from(value * 7 % 256).expect("a byte")))
        }));
        let encoding = loaded.encode(&image).unwrap();
        assert!(encoding.bytes() > 1000, "{}", encoding.bytes());
        for question in ["Where is the lesion?", "Is there a lesion?", "Where is the lesion?"] {
            let mut pieces = String::new();
            let mut on_text = |text: &str| {
                pieces.push_str(text);
                ControlFlow::Continue(())
            };
            let mut asked = loaded.ask(&encoding, (40, 30), question, 5).unwrap();
            let written = asked.write(&[], &mut on_text).unwrap();
            assert_eq!((written.new_tokens, asked.masks[0].len()), (5, 40 * 30));
            assert_eq!(loaded.tokenizer.prompt().clean(&pieces), written.answer);
            let again = asked.write(&[], &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(again, written, "an answer depends on the one before");

            // the model's parts by hand, from the pixels
            let ids = text::question_prompt(&loaded.tokenizer, question).unwrap().ids;
            let model = &loaded.model;
            let (mask, classes) = no_grad(|| {
                let [tower, sam] = loaded.pixels(&image).unwrap();
                let prompt = [ids.len()];
                let layout = Layout::new(vec![ids], &prompt, &[1], Semantics::Corrected, model.spans(1));
                let layout = layout.to_device(Device::Cpu);
                let embeds = llava::splice(&model.llm().embed(&layout.ids), &model.image_tokens(&tower), &layout.index);
                let states = model.llm().forward_cached(&embeds, None, &mut KvCache::new(model.llm().config(), 1000));
                let embedding = model.embed_image(&sam, image_encoder::EncoderPass::default());
                let prompts = HeadPrompts { states: &states, keep: None };
                let logits = model.masks(&embedding, prompts, mask_head::HeadPass::default()).logits;
                (
                    masks_at(&logits, (40, 30), Fit::Stretch).unwrap(),
                    probabilities(&model.class_logits(&embedding)).unwrap(),
                )
            });
            assert_eq!((asked.masks, asked.classes), (mask, classes));
        }
    }

    #[test]
    fn a_caller_can_stop_an_answer() {
        let _lock = rng::TEST_LOCK.lock();
        let loaded = tiny();
        let encoding = loaded.encode(&DynamicImage::new_luma8(8, 8)).unwrap();
        let mut pieces = 0;
        let mut on_text = |_: &str| {
            pieces += 1;
            if pieces < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let stopped = loaded.ask(&encoding, (8, 8), "Where?", 50).unwrap().write(&[], &mut on_text);
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        assert_eq!(pieces, 2);
    }

    /// Linear interpolation between pixel centres in both directions, by its definition.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "indices of a small map")]
    fn interpolated(map: &[f32], side: usize, across: f32, down: f32) -> f32 {
        let parts = |at: f32| {
            let at = (at * side as f32 - 0.5).clamp(0.0, side as f32 - 1.0);
            let low = at.floor();
            (low as usize, (low as usize + 1).min(side - 1), at - low)
        };
        let ((left, right, x), (top, bottom, y)) = (parts(across), parts(down));
        let row = |row: usize| map[row * side + left] * (1.0 - x) + map[row * side + right] * x;
        row(top) * (1.0 - y) + row(bottom) * y
    }

    #[test]
    fn a_mask_has_the_width_and_height_of_its_image() {
        let map: Vec<f32> = (0..16_u8).map(|i| f32::from(i * 7 % 16) - 8.0).collect();
        let logits = Tensor::from_slice(&map).view([1, 1, 4, 4]);
        for (width, height) in [(6_u32, 3_u32), (3, 6), (9, 2), (4, 4)] {
            let mask = masks_at(&logits, (width, height), Fit::Stretch).unwrap().remove(0);
            assert_eq!(mask.len(), (width * height) as usize);
            for (i, found) in mask.iter().enumerate() {
                let (x, y) = (i % width as usize, i / width as usize);
                let [across, down] = [(x, width), (y, height)].map(|(at, all)| (at as f32 + 0.5) / all as f32);
                let expected = 1.0 / (1.0 + (-interpolated(&map, 4, across, down)).exp());
                assert!((found - expected).abs() < 1e-5, "{width}x{height} at {x}, {y}: {found} {expected}");
            }
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_refused_by_name() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let logits = Tensor::from_slice(&[0.5, bad, 1.5, -2.0_f32]);
            let mask = masks_at(&logits.view([1, 1, 2, 2]), (8, 8), Fit::Stretch).unwrap_err();
            let class = probabilities(&logits.view([1, 4])).unwrap_err();
            for (error, part) in [(mask, "mask"), (class, "class")] {
                let error = error.of_image(Path::new("a/b.png"));
                let expected =
                    format!("a/b.png: the {part} logits of the model are not finite: 1 of 4 are NaN or infinite");
                assert_eq!(error.to_string(), expected);
                assert!(error.hint().starts_with("try the argument `precision=fp32`"));
            }
        }
        let error = most_likely(&Tensor::from_slice(&[0.5, f32::NAN, 1.5]).view([1, 1, 3])).unwrap_err();
        assert!(error.to_string().starts_with("the answer logits"), "{error}");
        assert_eq!(most_likely(&Tensor::from_slice(&[0.5_f32, 2.5, 1.5]).view([1, 1, 3])).unwrap(), 1);
    }
}
