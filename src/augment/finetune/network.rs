//! The UNet that is trained: frozen with adapters, or with all weights trained. Writes and reads them in the files of
//! diffusers.

use super::settings::{FinetuneConfig, Method};
use crate::augment::pipeline::Placement;
use crate::augment::pipeline_config::{Part, PipelineConfig};
use crate::models::diffusion::lora;
use crate::models::diffusion::unet::{self, Adapters, Unet};
use crate::tensor::store::{Entry, Init, Role, Store, StoreOptions};
use crate::tensor::weights::{Archive, Staged};
use crate::tensor::{META, Tensor, guard, no_grad};
use crate::trainer::Parameter;
use crate::trainer::profile::Component;
use crate::{Error, Result};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// File of a LoRA in a checkpoint; the name that diffusers looks for.
pub const LORA_FILE: &str = "pytorch_lora_weights.safetensors";
/// File of a whole UNet in a checkpoint; the name that diffusers looks for.
pub const UNET_FILE: &str = "unet/diffusion_pytorch_model.safetensors";
const UNET_CONFIG: &str = "unet/config.json";

/// A UNet in training.
#[derive(Debug)]
pub struct Network {
    /// The network.
    pub unet: Unet,
    /// Its own weights; trained with [`Method::Full`].
    base: Store,
    adapters: Option<Store>,
    config: FinetuneConfig,
    sizes: unet::Config,
}

impl Network {
    /// Builds the network at `placement` and loads the weights of the generator; those of adapters are new.
    ///
    /// # Errors
    /// [`Error::Weights`]; [`Error::Config`] if `finetune.targets` names no layer of it; typed errors of libtorch.
    pub fn new(pipeline_config: &PipelineConfig, config: &FinetuneConfig, placement: Placement) -> Result<Self> {
        let role = match config.method {
            Method::Lora => Role::Frozen,
            Method::Full => Role::Trainable,
        };
        // adapters draw their values after all other weights, so that those are the generator's
        let options = StoreOptions { device: placement.device, frozen_kind: placement.kind, initialise: false };
        let store = (config.method == Method::Lora).then(|| Store::new(options));
        let adapters = store.as_ref().map(|store| Adapters {
            root: store.root(Role::Trainable).sub(lora::Component::Unet.name()),
            config: config.lora(),
            targets: config.targets(),
        });
        let sizes = pipeline_config.unet.clone();
        let (unet, base) = placement.network(pipeline_config, Part::Unet, (placement.kind, role), |scope| {
            Unet::with_adapters(scope, &sizes, adapters.as_ref())
        })?;
        if let Some(store) = &store {
            refuse_unknown_targets(store, &config.targets())?;
            if placement.device != META {
                guard::guard(|| {
                    no_grad(|| initialise(store));
                    Ok(())
                })?;
            }
        }
        Ok(Self { unet, base, adapters: store, config: config.clone(), sizes })
    }

    /// The store of the trained weights.
    fn trained(&self) -> &Store {
        self.adapters.as_ref().unwrap_or(&self.base)
    }

    /// The trained tensors.
    pub fn parameters(&self) -> Vec<Parameter> {
        let entries = self.trained().entries().into_iter();
        entries.map(|entry| Parameter { name: entry.name, tensor: entry.tensor }).collect()
    }

    /// The parts of the model.
    pub fn components(&self) -> Vec<Component> {
        let prefixed = |file: &str, store: &Store| -> Vec<Entry> {
            let entries = store.entries().into_iter();
            entries.map(|entry| Entry { name: format!("{file}/{}", entry.name), ..entry }).collect()
        };
        let mut parts = vec![Component { name: "unet", entries: prefixed("unet", &self.base) }];
        if let Some(store) = &self.adapters {
            parts.push(Component { name: "lora_adapter", entries: prefixed("lora", store) });
        }
        parts
    }

    /// Trained weights, and all weights.
    pub fn num_weights(&self) -> (usize, usize) {
        let count = |store: &Store| store.entries().iter().map(|entry| entry.tensor.numel()).sum::<usize>();
        let base = count(&self.base);
        self.adapters.as_ref().map_or((base, base), |store| (count(store), base + count(store)))
    }

    /// Writes the trained weights: a LoRA file or a whole UNet, as diffusers reads them.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &mut Staged) -> Result<()> {
        let entries = self.trained().entries();
        let tensors: Vec<(&str, &Tensor)> = entries.iter().map(|entry| (entry.name.as_str(), &entry.tensor)).collect();
        if self.adapters.is_some() {
            return folder.write_tensors(LORA_FILE, &tensors, &self.metadata());
        }
        folder.write_tensors(UNET_FILE, &tensors, &BTreeMap::new())?;
        let mut sizes = serde_json::to_value(&self.sizes).expect("plain values serialise");
        sizes["_class_name"] = json!("UNet2DConditionModel");
        folder.write_bytes(UNET_CONFIG, &serde_json::to_vec_pretty(&sizes).expect("plain values serialise"))
    }

    /// The settings of the adapters as diffusers writes them to the header.
    fn metadata(&self) -> BTreeMap<String, String> {
        let unet = lora::Component::Unet.name();
        let settings = json!({
            format!("{unet}.r"): self.config.rank,
            format!("{unet}.lora_alpha"): self.config.alpha,
            format!("{unet}.target_modules"): self.config.targets(),
            format!("{unet}.lora_dropout"): 0.0,
            format!("{unet}.bias"): "none",
            format!("{unet}.peft_type"): "LORA",
        });
        BTreeMap::from([(lora::METADATA.to_owned(), settings.to_string())])
    }

    /// Reads the weights that [`Self::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub fn load(&self, folder: &Path) -> Result<()> {
        let name = if self.adapters.is_some() { LORA_FILE } else { UNET_FILE };
        let path = folder.join(name);
        let archive = Archive::open(&path)?;
        let mut targets: Vec<(String, Tensor)> =
            self.trained().entries().into_iter().map(|entry| (entry.name, entry.tensor)).collect();
        let report = no_grad(|| archive.load(&mut targets, |_| false))?;
        report.into_result(&path).map(drop)
    }
}

/// Initial values of adapters, as in `peft`: the first factor uniform, the second 0.
fn initialise(store: &Store) {
    for entry in store.entries() {
        let mut tensor = entry.tensor;
        if entry.name.ends_with("lora_A.weight") {
            let bound = 1.0 / (tensor.size()[1] as f64).sqrt();
            Init::Uniform { bound }.fill(&mut tensor);
        } else {
            Init::Const(0.0).fill(&mut tensor);
        }
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
