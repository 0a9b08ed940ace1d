//! LoRA adapters of the language model in a checkpoint folder. Those of the original code have the settings of `peft`,
//! which may give each module its own rank and scale.

use crate::models::base::{Family, Keys};
use crate::nn::LoraConfig;
use crate::nn::peft::PeftConfig;
use crate::segment::run_folder::loaded::{ADAPTER_CONFIG, is_published};
use crate::tensor::no_grad;
use crate::tensor::store::{Store, StoreEntry};
use crate::tensor::weights::{Archive, LoadReport};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// File of the adapters.
pub(crate) const ADAPTER: &str = "lora_adapter/adapter_model.safetensors";
/// What peft puts before a module's path.
pub(crate) const PREFIX: &str = "base_model.model.";

/// Adapters of the original code in a folder.
struct Published {
    file: PathBuf,
    peft: PeftConfig,
}

impl Published {
    /// `None` for a folder of this program, whose adapters have one rank and one scale.
    fn open(folder: &Path) -> Result<Option<Self>> {
        let file = folder.join(ADAPTER_CONFIG);
        if !is_published(folder) {
            return Ok(None);
        }
        let peft = PeftConfig::open(&file)?;
        Ok(Some(Self { file, peft }))
    }

    fn wrong(&self, reason: String) -> Error {
        Error::weights(&self.file, reason, "use the settings that belong to the adapters")
    }

    fn rank(&self, module: &str) -> Result<i64> {
        self.peft.rank(module).map_err(|reason| self.wrong(reason))
    }

    fn scale(&self, module: &str) -> Result<f64> {
        self.peft.scale(module, self.rank(module)?).map_err(|reason| self.wrong(reason))
    }

    /// True if the module has an adapter. Refuses one that peft would not load.
    fn has(&self, module: &str, archive: &Archive, name: &str) -> Result<bool> {
        let selected = self.peft.selects(module).map_err(|reason| self.wrong(reason))?;
        match (archive.contains(name), selected) {
            (true, false) => Err(self.wrong(format!(
                "`{}` has an adapter of `{module}`, which `target_modules`, `exclude_modules` or \
                 `layers_to_transform` leave out",
                archive.path().display()
            ))),
            // a missing one that is selected is reported by the load
            (stored, selected) => Ok(stored || selected),
        }
    }
}

/// Module and part (`A` or `B`) of the name of an adapter's tensor.
fn module_of(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(PREFIX)?.strip_suffix(".weight")?.rsplit_once(".lora_")
}

/// Sizes of the adapters in a folder of the original code: the largest rank, and the alpha that gives the modules
/// without own numbers their scale at this rank.
///
/// # Errors
/// [`Error::Weights`] for a setting of `adapter_config.json` that cannot be applied.
pub(crate) fn published_sizes(folder: &Path) -> Result<LoraConfig> {
    // the original code has one family
    let keys = &<&Family>::default().keys;
    let file = folder.join(ADAPTER_CONFIG);
    let published = Published { peft: PeftConfig::open(&file)?, file };
    let peft = &published.peft;
    let mut rank = peft.default_rank();
    if peft.has_ranks() {
        let archive = Archive::open(&folder.join(ADAPTER))?;
        let modules = archive
            .names()
            .iter()
            .filter(|name| !name.contains(keys.unused_adapters))
            .filter_map(|name| module_of(name));
        let ranks: Vec<i64> = modules.map(|(module, _)| published.rank(module)).collect::<Result<_>>()?;
        rank = ranks.into_iter().max().unwrap_or(rank);
    }
    let (scale, stated) = (peft.default_scale(peft.default_rank()), peft.default_alpha());
    let is_exact = (stated / rank as f64 - scale).abs() <= 0.0;
    let alpha = if is_exact { stated } else { scale * rank as f64 };
    Ok(LoraConfig { rank, alpha, dropout: peft.dropout() })
}

/// Loads the adapters in `folder` into `store`, if the model has any. A module with a smaller rank than the model's gets zeros in the
/// rest; one without an adapter gets zeros. Both stay zero in a training.
///
/// # Errors
/// [`Error::Weights`] for settings that cannot be applied. Keys that do not fit are in the report.
pub(crate) fn load(folder: &Path, store: &Store, lora: LoraConfig, keys: &Keys) -> Result<Option<LoadReport>> {
    let all = store.entries();
    if all.is_empty() {
        return Ok(None);
    }
    let archive = Archive::open(&folder.join(ADAPTER))?;
    let published = Published::open(folder)?;
    let LoraConfig { rank, alpha, .. } = lora;
    let (mut wanted, mut scaled) = (Vec::new(), Vec::new());
    for StoreEntry { name, mut tensor, .. } in all {
        if let (Some(published), Some((module, part))) = (&published, module_of(&name)) {
            let has = published.has(module, &archive, &name)?;
            let own = if has { published.rank(module)?.min(rank) } else { 0 };
            if own < rank {
                no_grad(|| drop(tensor.zero_()));
                tensor = no_grad(|| tensor.narrow(i64::from(part == "B"), 0, own));
            }
            if !has {
                continue;
            }
            let ratio = published.scale(module)? / (alpha / rank as f64);
            if part == "B" && (ratio - 1.0).abs() > 0.0 {
                scaled.push((tensor.shallow_clone(), ratio));
            }
        }
        wanted.push((name, tensor));
    }
    let report = archive.load(&mut wanted, |name| name.contains(keys.unused_adapters))?;
    for (mut tensor, ratio) in scaled {
        no_grad(|| tensor *= ratio);
    }
    Ok(Some(report))
}

/// Scale of a module's adapter in `folder`, where those of `lora` have another one.
pub(crate) struct Scales {
    published: Option<Published>,
    lora: LoraConfig,
}

impl Scales {
    /// # Errors
    /// As [`published_sizes`].
    pub(crate) fn open(folder: &Path, lora: LoraConfig) -> Result<Self> {
        Ok(Self { published: Published::open(folder)?, lora })
    }

    /// # Errors
    /// [`Error::Weights`] for a pattern that takes too long.
    pub(crate) fn of(&self, module: &str) -> Result<f64> {
        match &self.published {
            Some(published) => published.scale(module),
            None => Ok(self.lora.alpha / self.lora.rank as f64),
        }
    }
}

#[cfg(test)]
#[path = "adapters_tests.rs"]
mod tests;
