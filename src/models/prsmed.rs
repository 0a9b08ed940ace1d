//! PRS-Med, assembled from its parts (Trinh et al. 2025, `huyquoctrinh/PRS-Med`). Only this file knows all parts.
//!
//! ```text
//! image -> vision tower -> projector -----+
//! text ids -> embedding ------------------+-> splice -> decoder (+LoRA) -> states -> logits (answer)
//!                                                                            |
//! sam image  -> ImageEncoder -> embedding -----------------------------------+-> MaskHead -> mask logits
//!                              +-> ClassHead -> modality logits
//! masks (in training the true ones) -> geometry + states -> MaskReader -> logits (answer)
//! ```
//!
//! The last line is optional (`model.answer_reads_mask`). It reads the states and changes nothing above it.
//!
//! Each part has a [`Store`] of its own, with the names of its checkpoint file.

use crate::Result;
use crate::data::geometry::Geometry;
use crate::models::base::{Family, Parts};
use crate::models::decoder;
use crate::models::decoder::PackedAttention;
use crate::models::image_encoder::{self, ImageEmbedding, ImageEncoder, TrainedWeights};
use crate::models::mask_head::{self, HeadPrompts, MaskHead, Masks};
use crate::models::mask_reader::{self, MaskReader};
use crate::models::tower::{self, ImageSpan, Tower};
use crate::nn::linear::Linear;
use crate::nn::{LoraConfig, Quantization};
use crate::tensor::collective::Peers;
use crate::tensor::host_weights::HostWeights;
use crate::tensor::store::{Init, Role, Store, StoreOptions, VarPath};
use crate::tensor::{Device, Kind, Shared, Tensor, dims, module_path, no_grad};

/// Sizes of all parts.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Family of the language model. Runs of old versions do not state it.
    #[serde(default, skip_serializing_if = "Family::is_default")]
    pub family: &'static Family,
    /// Vision tower of the language model.
    #[serde(rename = "clip")]
    pub tower: tower::Config,
    /// Language model.
    pub llm: decoder::Config,
    /// LoRA adapters of the language model; none if the rank is 0.
    pub lora: LoraConfig,
    /// Image encoder for segmentation.
    pub encoder: image_encoder::Config,
    /// Mask head.
    pub decoder: mask_head::Config,
    /// Number of modality classes.
    pub num_classes: i64,
    /// What lets the words of an answer follow its masks, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_reader: Option<mask_reader::Config>,
}

impl Config {
    /// The sizes of the base.
    pub fn base(&self) -> Parts {
        Parts { family: self.family, tower: self.tower.clone(), llm: self.llm.clone() }
    }

    /// The reader of masks that fits language model and mask head.
    pub fn fitting_reader(&self) -> mask_reader::Config {
        let masks = i64::try_from(self.decoder.masks()).expect("a few masks");
        let numbers = i64::try_from(Geometry::LEN).expect("a hundred");
        mask_reader::Config::new(self.llm.hidden_size, masks * numbers)
    }
}

/// Device, dtypes and initialisation of a model.
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildOptions {
    /// Device of every tensor.
    pub device: Device,
    /// Dtype of frozen weights.
    pub stored: Kind,
    /// Compute dtype. fp32 master weights are cast to it where they are used.
    pub compute: Kind,
    /// Initialise the weights. `false`: a checkpoint fills every tensor.
    pub initialise: bool,
    /// Also train the language model, vision tower and projector, which are frozen otherwise.
    pub train_base: bool,
    /// Storage format of the frozen matrices of the language model's layers.
    pub quantization: Quantization,
    /// Checkpoint files fill the base, so its quantized matrices need no random values.
    pub loads_base: bool,
    /// Number of first layers of the language model whose frozen weights stay in host memory.
    pub host_layers: usize,
    /// Whether the layers of the vision tower stay in host memory.
    pub host_vision: bool,
    /// Attention of several questions about an image.
    pub packed_attention: PackedAttention,
    /// Number of processes that divide the frozen weights of the language model's layers ([`PrsMed::divide`]); 1 if none.
    pub ranks: usize,
    /// False on a rank that gets the layers from the first one.
    pub reads_layers: bool,
}

/// The tensors of each part, named as in its checkpoint file.
#[derive(Debug)]
pub struct Stores {
    /// Language model, projector and vision tower, with the keys of the LLaVA-Med shards.
    pub base: Store,
    /// LoRA adapters, with PEFT keys.
    pub lora_adapter: Store,
    /// Image encoder; TinyViT has the keys below `image_encoder.`.
    pub image_encoder: Store,
    /// Mask head.
    pub mask_head: Store,
    /// Modality classifier.
    pub cls: Store,
    /// Reader of masks; `None` for a model without it.
    pub mask_reader: Option<Store>,
}

impl Stores {
    /// File name and store of every part.
    pub fn parts(&self) -> Vec<(&'static str, &Store)> {
        let reader = self.mask_reader.as_ref().map(|store| (MASK_READER, store));
        let always = [
            ("base", &self.base),
            ("lora_adapter", &self.lora_adapter),
            ("image_encoder", &self.image_encoder),
            (MASK_HEAD, &self.mask_head),
            ("cls", &self.cls),
        ];
        always.into_iter().chain(reader).collect()
    }
}

/// Name of the file and module of the reader of masks.
pub const MASK_READER: &str = "mask_reader";

/// Name of the mask head's file and module.
pub const MASK_HEAD: &str = "mask_decoder";

/// Runs `f` in the module `name`.
fn in_module<T>(name: &'static str, f: impl FnOnce() -> T) -> T {
    let _module = module_path::enter(name);
    f()
}

/// The PRS-Med model.
#[derive(Debug)]
pub struct PrsMed {
    tower: Tower,
    llm: decoder::Decoder,
    encoder: ImageEncoder,
    head: Shared<MaskHead>,
    class_head: Linear,
    reader: Option<MaskReader>,
    /// Channel means and standard deviations of the segmentation images, `[1, 3, 1, 1]` fp32.
    pixel_statistics: [Tensor; 2],
    stores: Stores,
    config: Config,
    options: BuildOptions,
}

impl PrsMed {
    /// Builds all parts.
    pub fn new(config: &Config, options: BuildOptions) -> Self {
        let BuildOptions { device, stored: frozen_kind, initialise, .. } = options;
        let store = || Store::new(StoreOptions { device, frozen_kind, initialise });
        let stores = Stores {
            base: store(),
            lora_adapter: store(),
            image_encoder: store(),
            mask_head: store(),
            cls: store(),
            mask_reader: config.mask_reader.map(|_| store()),
        };
        let base = stores.base.root(if options.train_base { Role::Trainable } else { Role::Frozen });
        let trained = |store: &Store| store.root(Role::Trainable);
        let lora: VarPath = trained(&stores.lora_adapter);
        let head = trained(&stores.cls).sub(2);
        let keys = &config.family.keys;
        let [tower, projector] = [keys.tower, keys.projector].map(|prefix| base.sub(prefix.trim_end_matches('.')));
        let width = config.llm.hidden_size;
        let tower = Tower::new([&tower, &projector], &config.tower, width, options.host_vision);
        let layers = base.quantized(options.quantization, !options.loads_base);
        let layers = if options.reads_layers { layers } else { layers.without_values() };
        let adapters = (config.lora.rank > 0).then_some((&lora, &config.lora));
        let llm = in_module("llm", || {
            decoder::Decoder::new(&layers, adapters, &config.llm, options.host_layers, options.ranks)
        })
        .with_packed_attention(options.packed_attention);
        let encoder_role = if config.encoder.trained() == TrainedWeights::All { Role::Trainable } else { Role::Frozen };
        let encoder =
            in_module("image_encoder", || ImageEncoder::new(&stores.image_encoder.root(encoder_role), &config.encoder));
        let mask_head = in_module(MASK_HEAD, || MaskHead::new(&trained(&stores.mask_head), &config.decoder));
        let class_head = in_module("class_head", || {
            let bias = Some(Init::Const(config.decoder.initial_bias()));
            Linear::with_init(&head, config.encoder.channels(), config.num_classes, Init::XavierUniform, bias)
        });
        // the last, so that it changes no random number of the other parts
        let reader = config.mask_reader.zip(stores.mask_reader.as_ref());
        let reader = reader.map(|(sizes, store)| in_module(MASK_READER, || MaskReader::new(&trained(store), &sizes)));
        let pixel_statistics = image_encoder::statistics(&config.encoder, options.device);
        Self {
            tower,
            llm,
            encoder,
            head: Shared::new(mask_head),
            class_head,
            reader,
            pixel_statistics,
            stores,
            config: config.clone(),
            options,
        }
    }

    /// Sizes of all parts.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Device, dtypes and initialisation.
    pub fn options(&self) -> BuildOptions {
        self.options
    }

    /// All tensors by checkpoint file.
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Divides the frozen weights of the language model's layers among `peers`, with the values of the first one. The
    /// first `options.host_layers` parts stay in host memory. With `keeps_base` the first rank keeps the whole base in
    /// host memory too, to save it.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if another rank does not answer.
    pub fn divide(&mut self, peers: &Peers, keeps_base: bool) -> Result<()> {
        self.llm.divide(peers, self.options.host_layers, keeps_base)?;
        let matrices = self.stores.base.quantized();
        let mut offsets: Vec<f64> = matrices.iter().map(|(_, matrix)| matrix.offset()).collect();
        peers.first(&mut offsets)?;
        matrices.iter().zip(offsets).for_each(|((_, matrix), offset)| matrix.set_offset(offset));
        Ok(())
    }

    /// True if several processes divide the frozen layers.
    pub fn is_divided(&self) -> bool {
        self.llm.host_weights().is_divided()
    }

    /// Takes part in a pass of other ranks if the ranks divide layers.
    ///
    /// # Panics
    /// With libtorch's message, like its operators.
    pub fn join_pass(&self, trains: bool) {
        let _module = module_path::enter("llm");
        self.llm.host_weights().join_pass(trains);
    }

    /// Frozen weights in host memory, or divided among ranks.
    pub fn host_weights(&self) -> [&HostWeights; 2] {
        [self.tower.host_weights(), self.llm.host_weights()]
    }

    /// The language model.
    pub fn llm(&self) -> &decoder::Decoder {
        &self.llm
    }

    /// The tokens of so many images of a batch for the language model.
    pub fn spans(&self, images: usize) -> Vec<ImageSpan> {
        self.config.tower.spans(images)
    }

    /// Number of masks for each question: its most targets.
    pub fn num_masks(&self) -> usize {
        self.config.decoder.masks()
    }

    /// Whether the words of answers follow the masks.
    pub fn reads_masks(&self) -> bool {
        self.reader.is_some()
    }

    /// States of answers with what the masks of their questions add; the states themselves without
    /// [`Self::reads_masks`]. There is no gradient for the states.
    ///
    /// # Shapes
    /// `states [n, d]` after the final norm, `geometry [n, g]` fp32, to `[n, d]`.
    pub fn read_masks(&self, states: &Tensor, geometry: &Tensor) -> Tensor {
        let read = |reader: &MaskReader| in_module(MASK_READER, || reader.read(states, geometry));
        self.reader.as_ref().map_or_else(|| states.shallow_clone(), read)
    }

    /// Image tokens for the language model. No gradient if the base is frozen.
    ///
    /// # Shapes
    /// `input`: images `[b, 3, s, s]`, u8 or normalised floats, or their vision features [`Self::vision_features`],
    /// `[b, p, w]`; to `[b, p, d]`.
    pub fn image_tokens(&self, input: &Tensor) -> Tensor {
        let features = (input.dim() == 4).then(|| self.vision_features(input));
        self.frozen_or_trained("projector", || self.tower.tokens(features.as_ref().unwrap_or(input)))
    }

    /// Vision features: the vision tower's output, before the projector. No gradient if the base is frozen.
    ///
    /// # Shapes
    /// `images [b, 3, s, s]`, u8 or normalised floats, to `[b, p, w]` in the compute dtype.
    pub fn vision_features(&self, images: &Tensor) -> Tensor {
        self.frozen_or_trained("vision_tower", || {
            self.tower.features(&images.to_device(self.options.device), self.options.compute)
        })
    }

    /// Runs a part of the base, without gradients if it is frozen.
    fn frozen_or_trained(&self, part: &'static str, run: impl FnOnce() -> Tensor) -> Tensor {
        let run = || in_module(part, run);
        if self.options.train_base { run() } else { no_grad(run) }
    }

    /// Image embedding for segmentation.
    ///
    /// # Shapes
    /// `sam_image [b, 3, s, s]` u8; the map is `[b, c, s / stride, s / stride]`.
    pub fn embed_image(&self, sam_image: &Tensor, pass: image_encoder::EncoderPass) -> ImageEmbedding {
        let [_b, _c, _h, _w] = dims(sam_image);
        let _module = module_path::enter("image_encoder");
        let pixels = image_encoder::normalised(sam_image, &self.pixel_statistics);
        let embed = || self.encoder.embed(&self.input(&pixels), pass);
        if self.config.encoder.trained() == TrainedWeights::Frozen { no_grad(embed) } else { embed() }
    }

    /// Masks of prompts, each with an image of the embedding.
    pub fn masks(&self, embedding: &ImageEmbedding, prompts: HeadPrompts, pass: mask_head::HeadPass) -> Masks {
        let _module = module_path::enter(MASK_HEAD);
        mask_head::masks(&self.head, embedding, prompts, pass)
    }

    /// Modality logits.
    ///
    /// # Shapes
    /// `embedding` of b images to `[b, classes]` fp32.
    pub fn class_logits(&self, embedding: &ImageEmbedding) -> Tensor {
        let _module = module_path::enter("class_head");
        let pooled = embedding.map.mean_dim([2, 3].as_slice(), false, embedding.map.kind());
        self.class_head.forward(&pooled, false).to_kind(Kind::Float)
    }

    fn input(&self, xs: &Tensor) -> Tensor {
        xs.to_device(self.options.device).to_kind(self.options.compute)
    }
}
