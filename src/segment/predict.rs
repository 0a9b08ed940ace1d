//! Prediction: an answer and a mask for one image and one question. The mask has the size of the image.
//!
//! The language model processes the prompt once. The mask decoder reads its states, and generation of the answer
//! starts from its key-value cache. The encoders run once for each image: [`encode`] keeps their outputs, and [`ask`]
//! answers any number of questions from them. [`predict()`] does both.

use super::Semantics;
use super::calibration::{Calibration, Confidence};
use super::layout::Layout;
use super::needs;
use super::pass::{self, Images, Outputs, Pass, Segmented};
use super::setup::{self, Build, LoadedModel, RunOverrides};
use super::validation::values;
use crate::data::agreement::Positions;
use crate::data::familiarity::Familiarity;
use crate::data::familiarity::ImageFamiliarity;
use crate::data::image::{sam_pixels, tower_pixels};
use crate::data::position::Zones;
use crate::data::sheet;
use crate::data::text::{self, AnswerStream};
use crate::metrics::segmentation::is_foreground;
use crate::models::decoder::KvCache;
use crate::models::prsmed::PrsMed;
use crate::runtime::Runtime;
use crate::tensor::weights::read_unchanged;
use crate::tensor::{Device, Kind, Tensor, guard, ledger, meta, no_grad};
use crate::{Error, Result};
use image::{DynamicImage, GrayImage};
use std::ops::ControlFlow;
use std::path::Path;

/// Most characters of a question.
pub const MAX_QUESTION: usize = 4_000;

/// Image and question of a prediction.
#[derive(Debug)]
pub struct Request<'a> {
    /// 8-bit grey or RGB.
    pub image: &'a DynamicImage,
    /// The question without the prompt template.
    pub question: &'a str,
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
}

/// Answer, mask and classes of a prediction.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Prediction {
    /// The answer without remains of the template.
    pub answer: String,
    /// Number of generated tokens, including the end token.
    pub new_tokens: usize,
    /// Mask probabilities at the image's size, row-major.
    pub mask: Vec<f32>,
    /// `(width, height)` in pixels.
    pub size: (u32, u32),
    /// Probability of each modality class, in the order of the run's classes.
    pub classes: Vec<f32>,
    /// Of several runs: mean Dice of their masks with the mask. 1 where they agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agreement: Option<f64>,
    /// How the image compares with those of the training.
    #[serde(flatten)]
    pub image: ImageFamiliarity,
    /// The words for locations in the training data.
    #[serde(default)]
    pub zones: Zones,
    /// Locations of the mask and in the answer, since [`Self::settle`].
    #[serde(flatten)]
    pub positions: Positions,
}

impl LoadedModel {
    /// The model of a run folder (`best/`, else `last/`) or of a published PRS-Med folder, in the device's usual
    /// precision: fp32 on the CPU, bf16 on a GPU.
    ///
    /// # Errors
    /// As [`setup::open`], and [`Error::Weights`] for another folder.
    pub fn open(run: &Path, runtime: &Runtime) -> Result<Self> {
        let kind = if runtime.device() == Device::Cpu { Kind::Float } else { Kind::BFloat16 };
        let locate = |spec: &str| runtime.locate(spec);
        let build = Build { cache: runtime.cache(), ..Build::new(runtime.device(), kind, &locate) };
        read_unchanged(
            || needs::checkpoint_of(run),
            |folder| {
                setup::verify(folder)?;
                setup::open(folder, &RunOverrides::default(), build)
            },
        )
    }

    /// Answers a question about an image with a mask and a text, as `prsmed predict` does: the mask of a target that is
    /// reported as not found is empty. [`predict()`] and [`Prediction::settle`] give the probabilities and the
    /// [`Confidence`]. Read files with [`crate::data::decode::image`], which turns them as their EXIF orientation says.
    ///
    /// # Errors
    /// As [`predict()`].
    pub fn predict(&self, image: &DynamicImage, question: &str) -> Result<Prediction> {
        /// Longest answer, tokens.
        const MAX_NEW_TOKENS: usize = 128;
        let mut prediction = predict(self, &Request { image, question, max_new_tokens: MAX_NEW_TOKENS }, |_| ())?;
        prediction.settle(self.description.calibration.as_ref(), false);
        Ok(prediction)
    }
}

impl Prediction {
    /// How sure the model is of the mask. A target that is reported as not found gets an empty mask, unless
    /// `always_paint`. Then compares the location of the mask with that in the answer.
    pub fn settle(&mut self, calibration: Option<&Calibration>, always_paint: bool) -> Confidence {
        let confidence = Confidence::of(&self.mask, calibration);
        if !confidence.is_found && !always_paint {
            self.mask.fill(0.0);
        }
        self.positions = self
            .binary_mask()
            .map_or_else(|_| Positions::default(), |mask| Positions::of(&mask, &self.answer, self.zones));
        confidence
    }

    /// With the mean of this mask and those of other runs.
    #[must_use]
    fn with_others(mut self, others: &[Vec<f32>]) -> Self {
        let own = std::mem::take(&mut self.mask);
        let all: Vec<&[f32]> = std::iter::once(own.as_slice()).chain(others.iter().map(Vec::as_slice)).collect();
        let count = all.len() as f32;
        self.mask = (0..own.len()).map(|pixel| all.iter().map(|mask| mask[pixel]).sum::<f32>() / count).collect();
        self.agreement = Some(all.iter().map(|mask| dice(mask, &self.mask)).sum::<f64>() / f64::from(count));
        self
    }

    /// Number of foreground pixels.
    pub fn num_foreground(&self) -> usize {
        self.mask.iter().filter(|probability| is_foreground(**probability)).count()
    }

    /// The mask as an image of 0 and 255: foreground from a probability of 0.5 on.
    ///
    /// # Errors
    /// [`Error::Shape`] if the mask does not have the size.
    pub fn binary_mask(&self) -> Result<GrayImage> {
        let (width, height) = self.size;
        let levels: Vec<f32> =
            self.mask.iter().map(|probability| f32::from(u8::from(is_foreground(*probability)))).collect();
        sheet::probability_image(&levels, width, height)
    }

    /// Whether the mask has the location that a text names; false for an empty mask.
    pub fn mask_is_at(&self, text: &str) -> bool {
        let compared = self.binary_mask().map(|mask| Positions::of(&mask, text, self.zones).positions_agree);
        compared.is_ok_and(|agree| agree == Some(true))
    }

    /// The most probable class, as an index of the run's classes.
    pub fn best_class(&self) -> Option<usize> {
        most_probable(&self.classes)
    }

    /// How question and image of this prediction compare with those of the training of `loaded`, and the question with the
    /// class of the image.
    pub fn familiarity(&self, loaded: &LoadedModel, question: &str) -> Familiarity {
        let class = class_of(&loaded.description.modalities, &self.classes);
        let known = loaded.known_questions.as_ref();
        loaded
            .familiarity(question)
            .beside(class)
            .with_image(self.image.clone())
            .answered(known.and_then(|known| known.other_target(question, &self.answer, class)))
    }
}

fn most_probable(probabilities: &[f32]) -> Option<usize> {
    probabilities.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(class, _)| class)
}

/// The most probable class of an image, and its probability.
pub fn class_of<'a>(names: &'a [String], probabilities: &[f32]) -> Option<(&'a str, f32)> {
    let class = most_probable(probabilities)?;
    Some((names.get(class)?, probabilities[class]))
}

/// Dice of two masks of probabilities; 1 if both are empty.
fn dice(a: &[f32], b: &[f32]) -> f64 {
    let count = |of: &[f32]| of.iter().filter(|value| is_foreground(**value)).count();
    let both = a.iter().zip(b).filter(|(a, b)| is_foreground(**a) && is_foreground(**b)).count();
    let all = count(a) + count(b);
    if all == 0 { 1.0 } else { 2.0 * both as f64 / all as f64 }
}

/// An image as the encoders of a model read it. It belongs to the model that made it.
#[derive(Debug)]
pub struct EncodedImage {
    /// Vision features `[1, p, w]`, see [`PrsMed::vision_features`].
    features: Tensor,
    /// Image embedding `[1, c, h, w]`, see [`PrsMed::embed_image`].
    embedding: Tensor,
    /// `(width, height)` of the image in pixels.
    size: (u32, u32),
    /// How it compares with the images of the training.
    image: ImageFamiliarity,
    /// The image as further runs read it.
    members: Vec<Self>,
}

impl EncodedImage {
    fn input(&self) -> Images<'_> {
        Images { tower_input: &self.features, segmented: Segmented::Embedding(&self.embedding) }
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        bytes(&self.features) + bytes(&self.embedding) + self.members.iter().map(Self::bytes).sum::<usize>()
    }
}

/// Answers `request`; `on_text` receives the answer piece by piece.
///
/// # Errors
/// As [`check_question`]; [`Error::NotFinite`] if the model computes NaN or infinity for the mask,
/// the modality or the answer; typed errors of libtorch.
pub fn predict(loaded: &LoadedModel, request: &Request, mut on_text: impl FnMut(&str)) -> Result<Prediction> {
    check_question(request.question)?;
    let image = encode(loaded, request.image)?;
    ask(loaded, &image, request.question, request.max_new_tokens, |text| {
        on_text(text);
        ControlFlow::Continue(())
    })
}

/// Runs the encoders on an image.
///
/// # Errors
/// [`Error::Shape`] for an image of 0 pixels; typed errors of libtorch.
pub fn encode(loaded: &LoadedModel, image: &DynamicImage) -> Result<EncodedImage> {
    no_grad(|| {
        guard::guard(|| {
            let images = pixels(loaded, image)?;
            let own = encode_pixels(&loaded.model, &images, (image.width(), image.height()));
            let members = loaded.members.iter().map(|member| encode(member, image)).collect::<Result<_>>()?;
            let image = loaded.known_images.as_ref().map(|known| known.compare(image)).unwrap_or_default();
            Ok(EncodedImage { image, members, ..own })
        })
    })
}

/// Answers a question about an image. `on_text` receives the answer piece by piece and can stop the generation.
///
/// # Errors
/// As [`predict()`]; [`Error::Interrupted`] if `on_text` stopped it.
pub fn ask(
    loaded: &LoadedModel,
    image: &EncodedImage,
    question: &str,
    max_new_tokens: usize,
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Prediction> {
    check_question(question)?;
    let prediction = no_grad(|| guard::guard(|| run(loaded, image, question, max_new_tokens, &mut on_text)))?;
    if loaded.members.is_empty() {
        return Ok(prediction);
    }
    let mask_of = |(member, image): (&LoadedModel, &EncodedImage)| {
        let prediction =
            no_grad(|| guard::guard(|| run(member, image, question, 1, &mut |_| ControlFlow::Continue(()))));
        prediction.map(|prediction| prediction.mask)
    };
    let others = loaded.members.iter().zip(&image.members).map(mask_of).collect::<Result<Vec<_>>>()?;
    Ok(prediction.with_others(&others))
}

/// Checks a question before the model is loaded.
///
/// # Errors
/// [`Error::Config`] for an empty question, and for one of more than [`MAX_QUESTION`] characters: the memory of
/// attention grows with the square of its length.
pub fn check_question(question: &str) -> Result<()> {
    if question.trim().is_empty() {
        return Err(Error::config("--question", "the question is empty", "ask for example: Where is the lesion?"));
    }
    let count = question.chars().count();
    if count > MAX_QUESTION {
        let reason = format!("the question has {count} characters; at most {MAX_QUESTION} are allowed");
        return Err(Error::config("--question", reason, "ask a shorter question"));
    }
    Ok(())
}

fn run(
    loaded: &LoadedModel,
    image: &EncodedImage,
    question: &str,
    max_new_tokens: usize,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Prediction> {
    let LoadedModel { model, tokenizer, description, .. } = loaded;
    let prompt = text::question_prompt(tokenizer, question)?;
    let mut stream = AnswerStream::default();
    let mut ids = Vec::new();
    let Parts { mask, classes } = answer_encoded(model, image, prompt.ids, max_new_tokens, &mut |id| {
        ids.push(id);
        if id == tokenizer.eos() {
            return Ok(false);
        }
        match on_text(&stream.push(tokenizer, id)?) {
            ControlFlow::Continue(()) => Ok(true),
            ControlFlow::Break(()) => Err(Error::Interrupted),
        }
    })?;
    debug_assert_eq!(classes.len(), description.modalities.len());
    let answer = tokenizer.prompt().clean(&tokenizer.decode(&ids)?);
    let (size, image) = (image.size, image.image.clone());
    let zones = description.zones;
    Ok(Prediction { answer, new_tokens: ids.len(), mask, size, classes, image, zones, ..Prediction::default() })
}

/// Mask and class probabilities of one prompt.
pub(super) struct Parts {
    mask: Vec<f32>,
    classes: Vec<f32>,
}

/// Encodes an image, computes mask and classes of one prompt, then decodes greedily until `on_token` returns false for
/// a token or `max_new_tokens` are generated.
///
/// `images` are [`tower, sam`] as [`PrsMed::image_tokens`] and [`PrsMed::embed_image`] take them; `size` is
/// `(width, height)` of the mask.
pub(super) fn answer(
    model: &PrsMed,
    images: &[Tensor; 2],
    ids: Vec<i64>,
    size: (u32, u32),
    max_new_tokens: usize,
    on_token: &mut dyn FnMut(i64) -> Result<bool>,
) -> Result<Parts> {
    answer_encoded(model, &encode_pixels(model, images, size), ids, max_new_tokens, on_token)
}

/// `size` is `(width, height)` of the image.
fn encode_pixels(model: &PrsMed, [tower, sam]: &[Tensor; 2], size: (u32, u32)) -> EncodedImage {
    let features = model.vision_features(tower);
    let embedding = model.embed_image(sam, PrsMed::evaluation_pass());
    EncodedImage { features, embedding, size, image: ImageFamiliarity::default(), members: Vec::new() }
}

fn answer_encoded(
    model: &PrsMed,
    image: &EncodedImage,
    ids: Vec<i64>,
    max_new_tokens: usize,
    on_token: &mut dyn FnMut(i64) -> Result<bool>,
) -> Result<Parts> {
    let prompt = [ids.len()];
    let layout = Layout::new(vec![ids], &prompt, &[1], Semantics::Corrected, model.spans(1));
    let length = i64::try_from(layout.sizes().sequence).expect("a prompt");
    let shift = layout.position_shift();
    let layout = {
        let _category = ledger::enter(ledger::Category::Inputs);
        layout.to_device(model.options().device)
    };
    let capacity = length + i64::try_from(max_new_tokens).unwrap_or(i64::MAX / 2);
    let mut cache = KvCache::new(model.llm().config(), capacity).with_shift(shift);
    let Outputs { states, mask_logits, class_logits, .. } =
        pass::forward(model, &layout, image.input(), Pass::evaluation(), Some(&mut cache));
    let mask = mask_at(&mask_logits, image.size)?;
    let classes = probabilities(&class_logits)?;
    drop((mask_logits, class_logits));

    let mut state = states.narrow(1, length - 1, 1);
    for made in 1..=max_new_tokens {
        let next = most_likely(&model.llm().logits(&state))?;
        if !on_token(next)? || made == max_new_tokens {
            break;
        }
        let token = Tensor::from_slice(&[next]).view([1, 1]).to_device(state.device());
        let embeds = model.llm().embed(&token).to_kind(state.kind());
        state = model.llm().forward_cached(&embeds, None, &mut cache);
    }
    Ok(Parts { mask, classes })
}

/// Mask probabilities at `(width, height)`, row by row, of logits at the model's own size.
fn mask_at(logits: &Tensor, (width, height): (u32, u32)) -> Result<Vec<f32>> {
    Error::check_finite("mask logits", &values(logits))?;
    let own_size = [i64::from(height), i64::from(width)];
    Ok(values(&logits.upsample_bilinear2d(own_size, false, None, None).sigmoid()))
}

/// Class probabilities of logits.
fn probabilities(logits: &Tensor) -> Result<Vec<f32>> {
    Error::check_finite("class logits", &values(logits))?;
    Ok(values(&logits.softmax(-1, Kind::Float)))
}

/// Index of the largest of `logits [1, 1, vocabulary]`.
fn most_likely(logits: &Tensor) -> Result<i64> {
    let best = logits.argmax(-1, false);
    let index = meta::index(&best);
    // libtorch takes NaN for the largest value
    Error::check_finite("answer logits", &values(&logits.narrow(-1, index, 1)))?;
    Ok(index)
}

fn pixels(loaded: &LoadedModel, image: &DynamicImage) -> Result<[Tensor; 2]> {
    let _category = ledger::enter(ledger::Category::Inputs);
    let config = loaded.description.pixels;
    let tower = tower_pixels(image, config.tower_size, config.pad_offset, config.padding)?;
    let sam = sam_pixels(image, config.sam_size)?;
    let device: Device = loaded.model.options().device;
    let square = |side: u32| [1, 3, i64::from(side), i64::from(side)];
    Ok([
        Tensor::from_slice(&tower).view(square(config.tower_size)).to_device(device),
        Tensor::from_slice(&sam).view(square(config.sam_size)).to_device(device),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::text::IMAGE_TOKEN;
    use crate::models::decoder::PackedAttention;
    use crate::models::prsmed::BuildOptions;
    use crate::models::{llava, mask_decoder};
    use crate::nn::Quantization;
    use crate::tensor::rng;

    #[test]
    fn the_mask_of_several_runs_is_their_mean() {
        let own = Prediction {
            answer: "yes".into(),
            new_tokens: 1,
            mask: vec![0.9, 0.9, 0.0, 0.0],
            size: (2, 2),
            ..Prediction::default()
        };
        let both = own.with_others(&[vec![0.9, 0.3, 0.2, 0.0]]);
        assert_eq!(both.mask, [0.9, 0.6, 0.1, 0.0]);
        // the first mask is the mean's; of the second 2 of 1 + 2 pixels are common
        assert_eq!((both.agreement, both.answer.as_str()), (Some(f64::midpoint(1.0, 2.0 / 3.0)), "yes"));
        assert_eq!(dice(&[0.1], &[0.2]), 1.0);
    }

    #[test]
    fn a_probability_of_one_half_is_foreground_in_scores_and_masks() {
        let below = f32::from_bits(0.5_f32.to_bits() - 1);
        for (probabilities, num_foreground) in
            [([0.5, 0.5, 0.2, 0.9], 3), ([below, 0.0, 0.1, 0.2], 0), ([0.5, below, below, 0.0], 1)]
        {
            let score = crate::metrics::segmentation::ImageScore::of(&probabilities, &[true; 4]).unwrap();
            assert_eq!(score.counts.predicted, num_foreground);
            let mut prediction = Prediction { mask: probabilities.into(), size: (2, 2), ..Prediction::default() };
            let drawn: u64 = prediction.binary_mask().unwrap().iter().map(|value| u64::from(*value == 255)).sum();
            assert_eq!((drawn, prediction.num_foreground() as u64), (num_foreground, num_foreground));
            let confidence = prediction.settle(None, false);
            assert_eq!((confidence.is_found, confidence.foreground.is_some()), (true, num_foreground > 0));
        }
        // one function decides what a target that is not found gets
        let calibration =
            Calibration { temperature: 1.0, presence_threshold: Some(0.99), num_present: 1, num_absent: 1 };
        for (paint, left) in [(false, 0), (true, 4)] {
            let answer = "in the upper left part of the image".to_owned();
            let mut prediction = Prediction { answer, mask: vec![0.5; 4], size: (2, 2), ..Prediction::default() };
            assert!(!prediction.settle(Some(&calibration), paint).is_found);
            assert_eq!(prediction.num_foreground(), left);
            // the location is that of the mask that is left
            let Positions { mask_position, positions_agree, .. } = prediction.positions;
            let expected = if paint { (Some("center"), Some(false)) } else { (None, None) };
            assert_eq!((mask_position.as_deref(), positions_agree), expected);
        }
    }

    #[test]
    fn an_answer_ends_at_the_limit_or_when_the_caller_says_so() {
        let _lock = rng::TEST_LOCK.lock();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/old_names/run");
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
            let parts = no_grad(|| answer(&model, &images, text, (8, 4), most, &mut on_token)).unwrap();
            assert_eq!((parts.mask.len(), parts.classes.len()), (8 * 4, 6));
            ids
        };
        let whole = generated(4, usize::MAX);
        assert_eq!(whole.len(), 4);
        assert_eq!(generated(4, 2), whole[..2]);
        assert_eq!(generated(1, usize::MAX), whole[..1]);
    }

    /// A tiny model with random weights.
    fn tiny() -> LoadedModel {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/old_names/run");
        let description = setup::describe(&fixture).expect("a checkpoint's description");
        let locate = |spec: &str| -> Result<std::path::PathBuf> { Ok(spec.into()) };
        let build = Build { seed: 3, ..Build::new(Device::Cpu, Kind::Float, &locate) };
        let texts = ["Where is the lesion? The lesion is at the upper left of the image."];
        setup::create(&description.model, description.sizes.lora, &description.modalities, &texts, build)
            .expect("a tiny model")
    }

    #[test]
    fn questions_about_an_encoded_image_get_the_answers_of_predict() {
        let _lock = rng::TEST_LOCK.lock();
        let loaded = tiny();
        let image = DynamicImage::from(image::RgbImage::from_fn(40, 30, |x, y| {
            image::Rgb([x, y, x * y].map(|value| u8::try_from(value * 7 % 256).expect("a byte")))
        }));
        let encoded = encode(&loaded, &image).unwrap();
        assert!(encoded.bytes() > 1000, "{}", encoded.bytes());
        for question in ["Where is the lesion?", "Is there a lesion?", "Where is the lesion?"] {
            let mut pieces = [String::new(), String::new()];
            let [whole, asked] = &mut pieces;
            let request = Request { image: &image, question, max_new_tokens: 5 };
            let predicted = predict(&loaded, &request, |text| whole.push_str(text)).unwrap();
            let after = ask(&loaded, &encoded, question, 5, |text| {
                asked.push_str(text);
                ControlFlow::Continue(())
            });
            assert_eq!(after.unwrap(), predicted);
            assert_eq!(pieces[0], pieces[1]);
            assert_eq!((predicted.new_tokens, predicted.mask.len()), (5, 40 * 30));

            // the model's parts by hand, from the pixels
            let ids = text::question_prompt(&loaded.tokenizer, question).unwrap().ids;
            let model = &loaded.model;
            let (mask, classes) = no_grad(|| {
                let [tower, sam] = pixels(&loaded, &image).unwrap();
                let prompt = [ids.len()];
                let layout = Layout::new(vec![ids], &prompt, &[1], Semantics::Corrected, model.spans(1));
                let layout = layout.to_device(Device::Cpu);
                let embeds = llava::splice(&model.llm().embed(&layout.ids), &model.image_tokens(&tower), &layout.index);
                let states = model.llm().forward_cached(&embeds, None, &mut KvCache::new(model.llm().config(), 1000));
                let embedding = model.embed_image(&sam, PrsMed::evaluation_pass());
                let logits = model.mask_logits(&embedding, &states, None, mask_decoder::Pass::default());
                (mask_at(&logits, (40, 30)).unwrap(), probabilities(&model.class_logits(&embedding)).unwrap())
            });
            assert_eq!((predicted.mask, predicted.classes), (mask, classes));
        }
    }

    #[test]
    fn a_caller_can_stop_an_answer() {
        let _lock = rng::TEST_LOCK.lock();
        let loaded = tiny();
        let encoded = encode(&loaded, &DynamicImage::new_luma8(8, 8)).unwrap();
        let mut pieces = 0;
        let stopped = ask(&loaded, &encoded, "Where?", 50, |_| {
            pieces += 1;
            if pieces < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        assert_eq!(pieces, 2);
        let empty = ask(&loaded, &encoded, " ", 5, |_| ControlFlow::Continue(())).unwrap_err();
        assert_eq!(empty.to_string(), "`--question`: the question is empty");
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
            let mask = mask_at(&logits, (width, height)).unwrap();
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
    fn a_mask_has_the_pixels_with_a_probability_of_at_least_one_half() {
        let mask = vec![0.0, 0.497, 0.5, 0.503, 1.0];
        let prediction = Prediction { mask, size: (5, 1), classes: vec![0.2, 0.5, 0.3], ..Prediction::default() };
        assert_eq!(prediction.binary_mask().unwrap().as_raw(), &[0, 0, 255, 255, 255]);
        assert_eq!(prediction.best_class(), Some(1));
    }

    #[test]
    fn logits_that_are_not_finite_are_refused_by_name() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let logits = Tensor::from_slice(&[0.5, bad, 1.5, -2.0_f32]);
            let mask = mask_at(&logits.view([1, 1, 2, 2]), (8, 8)).unwrap_err();
            let class = probabilities(&logits.view([1, 4])).unwrap_err();
            for (error, part) in [(mask, "mask"), (class, "class")] {
                let error = error.of_image(Path::new("a/b.png"));
                let expected =
                    format!("a/b.png: the {part} logits of the model are not finite: 1 of 4 are NaN or infinite");
                assert_eq!(error.to_string(), expected);
                assert!(error.hint().starts_with("try `--precision fp32`"));
            }
        }
        let error = most_likely(&Tensor::from_slice(&[0.5, f32::NAN, 1.5]).view([1, 1, 3])).unwrap_err();
        assert!(error.to_string().starts_with("the answer logits"), "{error}");
        assert_eq!(most_likely(&Tensor::from_slice(&[0.5_f32, 2.5, 1.5]).view([1, 1, 3])).unwrap(), 1);
    }
}
