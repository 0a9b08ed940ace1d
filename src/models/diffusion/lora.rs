//! LoRA adapters of diffusion models (Hu et al. 2021): reads files of diffusers and PEFT and merges them into weights.
//!
//! Sources: the loaders of diffusers 0.42 and peft 0.21. DoRA, LoHa, LoKr and adapter biases are
//! not supported: a file with any of them is an error. Deviation: an adapter for a module that the model lacks is an
//! error; diffusers ignores it.

pub mod kohya;
mod names;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::{Map, Value};

use super::shapes::Shapes;
use crate::nn::peft::{self, PeftConfig};
use crate::tensor::store::Store;
use crate::tensor::weights::Archive;
use crate::tensor::{Kind, Tensor, no_grad};
use crate::{Error, Result};
use names::LoraPart;

/// Key in a safetensors header that contains PEFT's settings, as diffusers writes it from version 0.34 on.
const METADATA: &str = "lora_adapter_metadata";

/// Remedy for files with kohya's names.
const KOHYA: &str = "beside `kohya_lora.safetensors` of a fine-tuning give `pytorch_lora_weights.safetensors`; convert \
                     another file once in diffusers: `pipe.load_lora_weights(FILE); pipe.unet.save_lora_adapter(FOLDER)`";

/// Remedy for adapters that do not fit.
pub const OTHER_MODEL: &str = "use a LoRA that was trained for this model";

/// The network that an adapter changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LoraNetwork {
    /// The denoising UNet.
    Unet,
    /// The first text tower.
    TextEncoder,
    /// SDXL's second text tower.
    TextEncoder2,
}

impl LoraNetwork {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Unet, Self::TextEncoder, Self::TextEncoder2];

    /// Its folder in a model repository.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unet => "unet",
            Self::TextEncoder => "text_encoder",
            Self::TextEncoder2 => "text_encoder_2",
        }
    }
}

/// Low-rank change of one module: `scale · up · down` is added to its weight.
#[derive(Debug)]
pub struct Adapter {
    /// The network of the module.
    pub component: LoraNetwork,
    /// Dotted path of the module in the network, with the names of diffusers, without `.weight`.
    pub module: String,
    /// `[rank, in]`, or `[rank, in, kh, kw]` for a convolution.
    pub down: Tensor,
    /// `[out, rank]`, or `[out, rank, 1, 1]` for a convolution.
    pub up: Tensor,
    /// Alpha divided by the rank, or by its square root (rsLoRA).
    pub scale: f64,
}

/// Reads the adapters of `path`: a `.safetensors` file, or a PEFT folder with `adapter_config.json`.
///
/// Sorted by component and module. The scale comes from `.alpha` tensors, else from the header or
/// `adapter_config.json`, else it is 1. Settings that change the result in a way that is not supported are errors.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read. [`Error::Weights`] for a file with other tensors than adapters, and
/// for an adapter with a missing or mis-shaped half.
pub fn read(path: &Path) -> Result<Vec<Adapter>> {
    let archive = Archive::open(path)?;
    let settings = PeftSettings::of(&archive)?;
    let wrong = |reason: String| Error::weights(path, reason, "use a LoRA file of diffusers or peft");
    if let Some(key) = archive.names().iter().find(|key| names::is_kohya(key)) {
        return Err(Error::weights(path, format!("has names of kohya's scripts (`{key}`)"), KOHYA));
    }
    let mut found: BTreeMap<(LoraNetwork, String), ModuleTensors> = BTreeMap::new();
    let mut unknown = Vec::new();
    for key in archive.names() {
        let Some((component, module, part)) = names::read(key) else {
            unknown.push(format!("`{key}`"));
            continue;
        };
        if found.entry((component, module)).or_default().insert(part, archive.read(key)?).is_some() {
            return Err(wrong(format!("contains the module of `{key}` twice, in two naming schemes")));
        }
    }
    if !unknown.is_empty() || found.is_empty() {
        let some = unknown[..unknown.len().min(3)].join(", ");
        return Err(wrong(match unknown.len() {
            0 => "contains no adapters".into(),
            count => format!("{count} tensors do not belong to LoRA adapters: {some} ..."),
        }));
    }
    let built = found.into_iter().map(|((component, module), tensors)| {
        let place = format!("{}.{module}", component.name());
        adapter(component, module, tensors, &settings).map_err(|reason| wrong(format!("`{place}` {reason}")))
    });
    built.collect()
}

/// The tensors of one module in a file.
type ModuleTensors = BTreeMap<LoraPart, Tensor>;

fn adapter(
    component: LoraNetwork,
    module: String,
    mut tensors: ModuleTensors,
    settings: &PeftSettings,
) -> Result<Adapter, String> {
    let (Some(down), Some(up)) = (tensors.remove(&LoraPart::Down), tensors.remove(&LoraPart::Up)) else {
        return Err("lacks one of its two matrices".into());
    };
    let (a, b) = (down.size(), up.size());
    let fits = a.len() >= 2 && b.len() >= 2 && a[0] == b[1] && a[0] > 0 && b[2..].iter().all(|&side| side == 1);
    if !fits {
        return Err(format!("has matrices of shapes {a:?} and {b:?}, which cannot be multiplied"));
    }
    let rank = a[0];
    let scale = match tensors.remove(&LoraPart::Alpha) {
        Some(alpha) if alpha.numel() == 1 => {
            let alpha = alpha.to_kind(Kind::Double).reshape([1]).double_value(&[0]);
            peft::checked_alpha(alpha).map_err(|reason| format!("has an alpha that {reason}"))? / rank as f64
        }
        Some(alpha) => return Err(format!("has an alpha of shape {:?}, which is not a number", alpha.size())),
        None => settings.scale(component, &module, rank)?,
    };
    Ok(Adapter { component, module, down, up, scale })
}

/// PEFT's settings of a file, by component, or for all components (`None`).
#[derive(Default)]
struct PeftSettings(HashMap<Option<LoraNetwork>, PeftConfig>);

impl PeftSettings {
    fn of(archive: &Archive) -> Result<Self> {
        let mut this = Self::default();
        let path = archive.path();
        let folder = if path.is_dir() { path.to_owned() } else { path.with_file_name("") };
        let config = folder.join("adapter_config.json");
        let peft = path.is_dir() || path.file_stem().is_some_and(|stem| stem == "adapter_model");
        if peft && config.exists() {
            this.0.insert(None, PeftConfig::open(&config)?);
        }
        let Some(text) = archive.metadata().get(METADATA) else { return Ok(this) };
        let all: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
            Error::weights(path, format!("the settings of its adapters: {error}"), "download or copy it again")
        })?;
        let mut by_component: HashMap<Option<LoraNetwork>, Map<String, Value>> = HashMap::new();
        for (key, value) in all {
            // `text_encoder.r`; a key without a component applies to all
            let named = key.split_once('.').and_then(|(name, rest)| {
                Some((LoraNetwork::ALL.into_iter().find(|component| component.name() == name)?, rest))
            });
            let (component, key) = named.map_or((None, key.as_str()), |(component, rest)| (Some(component), rest));
            by_component.entry(component).or_default().insert(key.to_owned(), value);
        }
        for (component, settings) in by_component {
            let settings = PeftConfig::parse(&settings).map_err(|reason| Error::weights(path, reason, peft::HINT))?;
            this.0.insert(component, settings);
        }
        Ok(this)
    }

    fn scale(&self, component: LoraNetwork, module: &str, rank: i64) -> Result<f64, String> {
        let settings = self.0.get(&Some(component)).or_else(|| self.0.get(&None));
        let Some(settings) = settings else { return Ok(1.0) };
        if !settings.selects(module)? {
            return Err("has an adapter, and the settings of the adapters leave it out".into());
        }
        let stated = settings.rank(module)?;
        if stated != rank && settings.states_ranks() {
            return Err(format!("has an adapter of rank {rank}, and the settings of the adapters say {stated}"));
        }
        settings.scale(module, rank)
    }
}

/// The weights that `adapters` change, by name. `shapes` are those of their component.
///
/// # Errors
/// The nearest module if the model has no such module, or the shapes if they differ.
pub fn targets<'a>(
    shapes: &Shapes,
    adapters: impl IntoIterator<Item = &'a Adapter>,
) -> Result<Vec<(String, &'a Adapter)>, String> {
    let mut found = Vec::new();
    for adapter in adapters {
        let name = weight_name(shapes, adapter)?;
        let size = &shapes[&name];
        let (out, rank) = (adapter.up.size()[0], adapter.down.size()[0]);
        let inside: i64 = size.iter().skip(1).product();
        let kernel = adapter.down.size()[2..].iter().any(|&side| side != 1);
        let fits = size.len() >= 2
            && size[0] == out
            && adapter.down.size()[1] == size[1]
            && inside * rank == adapter.down.size().iter().product::<i64>()
            && (!kernel || adapter.down.size()[2..] == size[2..]);
        if !fits {
            let shapes = format!("{:?} and {:?}", adapter.down.size(), adapter.up.size());
            return Err(format!("the adapter of `{}` has matrices {shapes}, its weight is {size:?}", adapter.module));
        }
        found.push((name, adapter));
    }
    Ok(found)
}

/// The tensors of adapters (`….lora_A.weight`, `….lora_B.weight`) for a file without settings: the second matrix is
/// multiplied by `scale`.
///
/// Without settings, every version of diffusers uses alpha = rank. With settings in the header, 0.30 to 0.33 ignore them,
/// and 0.34 to 0.39 refuse headers that lack any key of their own; with an alpha for each module, they read kohya's names
/// only.
pub fn with_scale_one(tensors: Vec<(String, Tensor)>, scale: f64) -> Vec<(String, Tensor)> {
    let scaled = |(name, tensor): (String, Tensor)| {
        let is_second = name.ends_with(".lora_B.weight") && scale.to_bits() != 1_f64.to_bits();
        (name, if is_second { no_grad(|| tensor * scale) } else { tensor })
    };
    tensors.into_iter().map(scaled).collect()
}

/// Adds `strength · scale · up · down` of every adapter to the weights of `store`, in fp32, and stores the sum in the
/// dtype of the weight. If an adapter does not fit, nothing is changed. The adapters must belong to the store's
/// component. Returns the names of the changed weights, in the order of the adapters.
///
/// # Errors
/// [`Error::Config`] with the reason of [`targets`].
pub fn merge<'a>(store: &Store, adapters: impl IntoIterator<Item = &'a Adapter>, strength: f64) -> Result<Vec<String>> {
    let weights: HashMap<String, Tensor> =
        store.entries().into_iter().map(|entry| (entry.name, entry.tensor)).collect();
    let shapes = weights.iter().map(|(name, tensor)| (name.clone(), tensor.size())).collect();
    let planned = targets(&shapes, adapters).map_err(|reason| Error::config("lora", reason, OTHER_MODEL))?;
    no_grad(|| {
        for (name, adapter) in &planned {
            let weight = &weights[name];
            let matrix =
                |half: &Tensor| half.to_device(weight.device()).to_kind(Kind::Float).reshape([half.size()[0], -1]);
            let change = matrix(&adapter.up).matmul(&matrix(&adapter.down)).reshape(weight.size());
            let sum = weight.to_kind(Kind::Float) + change * (strength * adapter.scale);
            weight.shallow_clone().copy_(&sum);
        }
    });
    Ok(planned.into_iter().map(|(name, _)| name).collect())
}

/// Name of the weight that an adapter changes. Text towers are stored with or without `text_model.`.
fn weight_name(weights: &Shapes, adapter: &Adapter) -> Result<String, String> {
    let module = &adapter.module;
    let mut names = vec![format!("{module}.weight")];
    if adapter.component != LoraNetwork::Unet {
        names.push(format!("text_model.{module}.weight"));
        names.extend(module.strip_prefix("text_model.").map(|bare| format!("{bare}.weight")));
    }
    if let Some(name) = names.iter().find(|name| weights.contains_key(*name)) {
        return Ok(name.clone());
    }
    let near = |name: &str| strsim::jaro_winkler(name, &names[0]);
    let nearest = weights.keys().filter_map(|name| name.strip_suffix(".weight"));
    let nearest = nearest.max_by(|a, b| near(a).total_cmp(&near(b)).then_with(|| b.cmp(a))).unwrap_or("nothing");
    Err(format!("the {} has no module `{module}`; the nearest is `{nearest}`", adapter.component.name()))
}
