//! The networks that are trained: a UNet with adapters, a whole UNet, or a ControlNet beside a frozen UNet. Writes and
//! reads them in the files of diffusers.

use super::settings::{FinetuneConfig, FinetuneMode, Method};
use crate::augment::pipeline::Placement;
use crate::augment::pipeline_config::{PipelineConfig, PipelinePart};
use crate::models::diffusion::controlnet::{self, ControlNet};
use crate::models::diffusion::lora;
use crate::models::diffusion::unet::{self, Adapters, Unet};
use crate::tensor::store::{Init, Mastered, Role, Store, StoreEntry, StoreOptions};
use crate::tensor::weights::{Archive, Staged};
use crate::tensor::{Kind, META, Tensor, guard, no_grad, rng};
use crate::trainer::Parameter;
use crate::trainer::profile::ModelPart;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// File of a LoRA in a checkpoint; the name that diffusers looks for.
pub const LORA_FILE: &str = "pytorch_lora_weights.safetensors";
/// The same LoRA with the names of kohya's tools.
pub const KOHYA_FILE: &str = "kohya_lora.safetensors";
/// Folders of a whole UNet and of a ControlNet in a checkpoint.
pub const UNET_FOLDER: &str = "unet";
/// See [`UNET_FOLDER`].
pub const CONTROLNET_FOLDER: &str = "controlnet";
/// File with the weights of a network in its folder; the name that diffusers looks for.
pub const WEIGHTS_FILE: &str = "diffusion_pytorch_model.safetensors";
/// Channels that an inpainting UNet reads besides the noisy latents: the mask and the masked latents.
const INPAINT_CHANNELS: i64 = 5;

/// The networks of a training.
#[derive(Debug)]
pub struct Network {
    /// The UNet.
    pub unet: Unet,
    /// The ControlNet with [`FinetuneMode::MaskToImage`].
    pub controlnet: Option<ControlNet>,
    /// Weights of the UNet.
    base: Store,
    /// Weights beside the UNet: adapters or the ControlNet.
    beside: Option<Store>,
    config: FinetuneConfig,
    sizes: unet::Config,
    control_sizes: Option<controlnet::Config>,
}

/// Trained tensors that are written into one file.
#[derive(Default)]
struct Saved {
    /// Path in a checkpoint.
    file: String,
    tensors: Vec<(String, Tensor)>,
    metadata: BTreeMap<String, String>,
    /// Path and content of the network's settings.
    settings: Option<(String, Value)>,
    /// Whether the values are in another file too, which is read.
    is_copy: bool,
}

impl Network {
    /// Builds the networks at `placement` and loads the weights of the generator; those of adapters are new, those of a
    /// ControlNet a copy of the UNet's if there is none to start from.
    ///
    /// # Errors
    /// [`Error::Weights`]; [`Error::Config`] if `finetune.targets` names no layer of the UNet, or for a UNet of 4
    /// channels that cannot learn to inpaint; typed errors of libtorch.
    pub fn new(
        pipeline_config: &PipelineConfig,
        config: &FinetuneConfig,
        placement: Placement,
        masters: Option<Kind>,
    ) -> Result<Self> {
        let sizes = trained_sizes(pipeline_config, config)?;
        // adapters draw their values after all other weights, so that those are the generator's
        let options = StoreOptions { device: placement.device, frozen_kind: placement.kind, initialise: false };
        let adapters = config.has_adapters().then(|| with_masters(Store::new(options), masters));
        let (unet, base) = build_unet(pipeline_config, config, (placement, masters), &sizes, adapters.as_ref())?;
        let mut network =
            Self { unet, controlnet: None, base, beside: adapters, config: config.clone(), sizes, control_sizes: None };
        if let Some(store) = &network.beside {
            refuse_unknown_targets(store, &config.targets())?;
            if placement.device != META {
                guard::guard(|| {
                    no_grad(|| initialise(store));
                    Ok(())
                })?;
            }
        }
        if config.mode == FinetuneMode::MaskToImage {
            network.add_controlnet(pipeline_config, placement, masters)?;
        }
        network.round()?;
        Ok(network)
    }

    fn add_controlnet(
        &mut self,
        pipeline_config: &PipelineConfig,
        placement: Placement,
        masters: Option<Kind>,
    ) -> Result<()> {
        let loaded = pipeline_config.controlnet.clone();
        let is_read = loaded.is_some() && !pipeline_config.is_random();
        let sizes = match &loaded {
            Some(sizes) => sizes.clone(),
            None => new_controlnet(&self.sizes, pipeline_config.vae.downscale())?,
        };
        let options = StoreOptions { device: placement.device, frozen_kind: placement.kind, initialise: !is_read };
        let store = with_masters(Store::new(options), masters);
        rng::seed(placement.seed);
        let network = guard::guard(|| Ok(no_grad(|| ControlNet::new(&store.root(Role::Trainable), &sizes))))?;
        if placement.device != META {
            if is_read {
                no_grad(|| pipeline_config.fill(PipelinePart::ControlNet, &store))?;
            } else if loaded.is_none() {
                guard::guard(|| {
                    no_grad(|| self.copy_into(&store));
                    Ok(())
                })?;
            }
        }
        (self.controlnet, self.beside, self.control_sizes) = (Some(network), Some(store), Some(sizes));
        Ok(())
    }

    /// Copies the UNet's tensors that `controlnet` has too, as `ControlNetModel.from_unet` of diffusers does.
    fn copy_into(&self, controlnet: &Store) {
        for entry in controlnet.entries() {
            if let Some(own) = self.base.get(&entry.name) {
                let mut tensor = entry.tensor;
                tensor.copy_(&own);
            }
        }
    }

    /// The trained tensors with their masters in host memory; empty if they are fp32 themselves.
    pub fn mastered(&self) -> Vec<Mastered> {
        let prefix = if self.controlnet.is_some() { "controlnet." } else { "" };
        let beside = self.beside.iter().flat_map(Store::mastered);
        let beside = beside.map(|one| Mastered { name: format!("{prefix}{}", one.name), ..one });
        self.base.mastered().into_iter().chain(beside).collect()
    }

    /// Gives the networks the rounded values of masters that were changed.
    fn round(&self) -> Result<()> {
        guard::guard(|| self.mastered().iter().try_for_each(Mastered::round))
    }

    /// The tensors of the UNet that are trained.
    fn trained_unet(&self) -> Vec<StoreEntry> {
        let entries = self.base.entries().into_iter();
        entries.filter(|entry| entry.role == Role::Trainable).collect()
    }

    /// The trained tensors in fp32.
    pub fn parameters(&self) -> Vec<Parameter> {
        let prefix = if self.controlnet.is_some() { "controlnet." } else { "" };
        let beside = self.beside.iter().flat_map(Store::entries);
        let beside = beside.map(|entry| Parameter::new(format!("{prefix}{}", entry.name), entry.tensor));
        let unet = self.trained_unet().into_iter();
        unet.map(|entry| Parameter::new(entry.name, entry.tensor)).chain(beside).collect()
    }

    /// The parts of the model.
    pub fn components(&self) -> Vec<ModelPart> {
        let prefixed = |file: &str, store: &Store| -> Vec<StoreEntry> {
            let entries = store.entries().into_iter();
            entries.map(|entry| StoreEntry { name: format!("{file}/{}", entry.name), ..entry }).collect()
        };
        let mut parts = vec![ModelPart { name: "unet", entries: prefixed("unet", &self.base) }];
        if let Some(store) = &self.beside {
            let (name, file) =
                if self.controlnet.is_some() { ("controlnet", "controlnet") } else { ("lora_adapter", "lora") };
            parts.push(ModelPart { name, entries: prefixed(file, store) });
        }
        parts
    }

    /// Trained weights, and all weights.
    pub fn num_weights(&self) -> (usize, usize) {
        let count = |entries: Vec<StoreEntry>| entries.iter().map(|entry| entry.tensor.numel()).sum::<usize>();
        let beside: usize = self.beside.iter().map(|store| count(store.entries())).sum();
        (count(self.trained_unet()) + beside, count(self.base.entries()) + beside)
    }

    /// The files of a checkpoint.
    fn saved(&self) -> Vec<Saved> {
        let tensors = |entries: Vec<StoreEntry>| entries.into_iter().map(|entry| (entry.name, entry.tensor)).collect();
        let in_folder = |folder: &str, tensors: Vec<(String, Tensor)>, settings: Value| Saved {
            file: format!("{folder}/{WEIGHTS_FILE}"),
            tensors,
            settings: Some((format!("{folder}/config.json"), settings)),
            ..Saved::default()
        };
        let class = |mut sizes: Value, class: &str| {
            sizes["_class_name"] = json!(class);
            sizes
        };
        let mut saved = Vec::new();
        match (&self.beside, &self.control_sizes) {
            (Some(store), Some(sizes)) => {
                let mut sizes = class(json!(sizes), "ControlNetModel");
                // sizes of the UNet's decoder, which a ControlNet does not have
                for key in ["sample_size", "out_channels", "up_block_types"] {
                    sizes.as_object_mut().expect("an object").remove(key);
                }
                saved.push(in_folder(CONTROLNET_FOLDER, tensors(store.entries()), sizes));
            }
            (Some(store), None) => {
                let tensors: Vec<(String, Tensor)> = tensors(store.entries());
                let metadata = BTreeMap::from([
                    ("ss_network_module".to_owned(), "networks.lora".to_owned()),
                    ("ss_network_dim".to_owned(), self.config.rank.to_string()),
                    ("ss_network_alpha".to_owned(), self.config.alpha.to_string()),
                ]);
                saved.push(Saved {
                    file: KOHYA_FILE.to_owned(),
                    tensors: lora::kohya::tensors(&tensors, self.config.alpha, self.sizes.is_sdxl()),
                    metadata,
                    ..Saved::default()
                });
                saved.push(Saved {
                    file: LORA_FILE.to_owned(),
                    tensors: lora::with_scale_one(tensors, self.config.alpha / self.config.rank as f64),
                    is_copy: true,
                    ..Saved::default()
                });
            }
            (None, _) => {}
        }
        if !self.trained_unet().is_empty() {
            let sizes = class(json!(self.sizes), "UNet2DConditionModel");
            saved.push(in_folder(UNET_FOLDER, tensors(self.base.entries()), sizes));
        }
        saved
    }

    /// Writes the trained networks: a LoRA file, a whole UNet or a ControlNet, as diffusers reads them.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &mut Staged) -> Result<()> {
        for Saved { file, tensors, metadata, settings, .. } in self.saved() {
            let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            folder.write_tensors(&file, &tensors, &metadata)?;
            if let Some((file, settings)) = settings {
                folder.write_bytes(&file, &serde_json::to_vec_pretty(&settings).expect("plain values serialise"))?;
            }
        }
        Ok(())
    }

    /// Reads the weights that [`Self::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub fn load(&self, folder: &Path) -> Result<()> {
        for mut saved in self.saved().into_iter().filter(|saved| !saved.is_copy) {
            let mut path = folder.join(&saved.file);
            if saved.file == KOHYA_FILE && !path.exists() {
                // checkpoints of the first version have only this file, with the trained values
                path = folder.join(LORA_FILE);
                saved.tensors = self.beside.iter().flat_map(Store::entries).map(|one| (one.name, one.tensor)).collect();
            }
            let archive = Archive::open(&path)?;
            let report = no_grad(|| archive.load(&mut saved.tensors, |_| false))?;
            report.into_result(&path)?;
        }
        self.round()
    }
}

/// `store` with the fp32 values of trained weights in host memory, if the device has rounded weights of the dtype `masters`.
fn with_masters(store: Store, masters: Option<Kind>) -> Store {
    if let Some(kind) = masters { store.with_masters(kind) } else { store }
}

/// Sizes of a new ControlNet for a UNet whose latents are `downscale` times as narrow as the image.
pub(super) fn new_controlnet(sizes: &unet::Config, downscale: i64) -> Result<controlnet::Config> {
    let mut config = controlnet::Config::of(sizes.clone());
    let channels = &mut config.conditioning_embedding_out_channels;
    // each entry after the first halves the image
    channels.truncate(usize::try_from(downscale.ilog2()).unwrap_or(0) + 1);
    if 1 << (channels.len() - 1) != downscale {
        let reason = format!("its autoencoder has {downscale} pixels a latent; a new ControlNet needs 1, 2, 4 or 8");
        return Err(Error::config("finetune.model", reason, "start from a ControlNet with `finetune.controlnet`"));
    }
    Ok(config)
}

/// Sizes of the UNet in training: those of the generator, or of its conversion to inpainting.
pub(super) fn trained_sizes(pipeline_config: &PipelineConfig, config: &FinetuneConfig) -> Result<unet::Config> {
    let mut sizes = pipeline_config.unet.clone();
    let inpaints = pipeline_config.inpaints();
    match config.mode {
        FinetuneMode::Inpaint if !inpaints && config.has_adapters() => {
            let reason = "trains a LoRA of a UNet with 4 input channels, which cannot read masks";
            let hint = "use the inpainting model of the family, or `finetune.method=full`, which converts this one";
            return Err(Error::config("finetune.mode", reason, hint));
        }
        FinetuneMode::Inpaint if !inpaints => sizes.in_channels += INPAINT_CHANNELS,
        FinetuneMode::Images | FinetuneMode::MaskToImage if inpaints => {
            let hint = "set `finetune.mode=inpaint`, or use the text-to-image model of the family";
            return Err(Error::config("finetune.model", "is an inpainting model", hint));
        }
        _ => {}
    }
    Ok(sizes)
}

fn build_unet(
    pipeline_config: &PipelineConfig,
    config: &FinetuneConfig,
    (placement, masters): (Placement, Option<Kind>),
    sizes: &unet::Config,
    adapters: Option<&Store>,
) -> Result<(Unet, Store)> {
    let role = match (config.method, config.mode) {
        (_, FinetuneMode::MaskToImage) | (Method::Lora, _) => Role::Frozen,
        (Method::Full, _) => Role::Trainable,
    };
    let adapters = adapters.map(|store| Adapters {
        root: store.root(Role::Trainable).sub(lora::LoraNetwork::Unet.name()),
        config: config.lora(),
        targets: config.targets(),
    });
    let build = |scope: &_| Unet::with_adapters(scope, sizes, adapters.as_ref());
    let (before, now) = (pipeline_config.unet.in_channels, sizes.in_channels);
    // new input channels start at zero: the converted network first ignores them
    let fill = |store: &Store| {
        if let Some(weight) = store.get("conv_in.weight").filter(|_| before != now) {
            let _ = weight.narrow(1, before, now - before).zero_();
        }
        pipeline_config.fill_into(PipelinePart::Unet, store, &|name, tensor| {
            if name == "conv_in.weight" { tensor.narrow(1, 0, before) } else { tensor }
        })
    };
    let store = with_masters(placement.store(pipeline_config, placement.kind), masters);
    placement.network_filled(store, role, build, fill)
}

/// Initial values of adapters, as in `peft`: the first factor uniform, the second 0.
fn initialise(store: &Store) {
    for entry in store.entries() {
        let mut tensor = entry.tensor;
        let is_first = entry.name.ends_with("lora_A.weight");
        let bound = 1.0 / (tensor.size()[1] as f64).sqrt();
        if is_first { Init::Uniform { bound } } else { Init::Const(0.0) }.fill(&mut tensor);
    }
}

/// Refuses targets that no layer has.
fn refuse_unknown_targets(adapters: &Store, targets: &[String]) -> Result<()> {
    let names: Vec<String> = adapters.entries().into_iter().map(|entry| entry.name).collect();
    let is_unknown = |target: &&String| !names.iter().any(|name| name.ends_with(&format!(".{target}.lora_A.weight")));
    let Some(target) = targets.iter().find(is_unknown) else { return Ok(()) };
    let reason = format!("no linear layer of the UNet's transformers is called `{target}`");
    let hint = "use some of to_q, to_k, to_v, to_out.0, ff.net.0.proj, ff.net.2, and for SD 2.x and SDXL proj_in and \
                proj_out";
    Err(Error::config("finetune.targets", reason, hint))
}
