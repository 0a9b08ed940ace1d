//! A model with its tokenizer and description, and how it is built.

use crate::Result;
use crate::data::familiarity::images::KnownImages;
use crate::data::familiarity::questions::KnownQuestions;
use crate::data::identity::SeenImages;
use crate::data::image::PixelConfig;
use crate::data::labels::Labels;
use crate::data::position::Zones;
use crate::data::prepared::Intensity;
use crate::data::split::Fold;
use crate::data::text::{Prompt, TextTokenizer};
use crate::data::volume::{Axis, Neighbours, Sequence, Window};
use crate::hub::{self, Pinned};
use crate::models::prsmed::{self, BuildOptions, MASK_HEAD, PrsMed};
use crate::nn::Quantization;
use crate::segment::Semantics;
use crate::segment::calibration::Calibration;
use crate::segment::config::{ModelConfig, RANDOM};
use crate::tensor::collective::Peers;
use crate::tensor::weights::Archive;
use crate::tensor::{Device, Kind};
use crate::trainer::FirstLayers;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Layout of a checkpoint folder that this version reads and writes.
pub(crate) const FORMAT: u32 = 1;
/// The file of a [`Description`].
pub(crate) const DESCRIPTION: &str = "model.json";
/// The file of an adapter's settings.
pub(crate) const ADAPTER_CONFIG: &str = "lora_adapter/adapter_config.json";

/// True if `folder` was written by the original code.
pub(crate) fn is_published(folder: &Path) -> bool {
    !folder.join(DESCRIPTION).exists() && folder.join(format!("{MASK_HEAD}.pth")).exists()
}

/// Description of a checkpoint folder (`model.json`).
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Description {
    /// Layout of the folder.
    pub format: u32,
    /// Settings it was trained with.
    pub model: ModelConfig,
    /// Sizes of all parts.
    pub sizes: prsmed::Config,
    /// Modality classes, index = label.
    pub modalities: Vec<String>,
    /// Preprocessing.
    pub pixels: PixelConfig,
    /// Prompt. Checkpoints of old versions do not state it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prompt: Prompt,
    /// Temperature and presence threshold, fitted on the validation rows; `None` for checkpoints without a validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// Mean distance of the centres of predicted and true masks at the last validation, as a fraction of the side of the
    /// image, for words that follow masks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_error: Option<f64>,
    /// Axis and intensity window of the images of classes that were prepared from volumes, by class.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub intensity: BTreeMap<String, Intensity>,
    /// The words for locations in the training data. Runs of old versions do not know them and have the grid.
    #[serde(default, skip_serializing_if = "is_default")]
    pub zones: Zones,
    /// The part of the images that it was validated on, in cross-validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<Fold>,
    /// Commits and hashes of the weights from the hub, by part: `base`, `vision_tower`, `image_encoder`. Checkpoints of
    /// old versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, Pinned>,
    /// [`Archive::digest`] of the weights that a checkpoint names and does not contain:
    /// `base`, `vision_tower`. Checkpoints of old versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub digests: BTreeMap<String, String>,
}

fn is_default<T: PartialEq + Default>(value: &T) -> bool {
    *value == T::default()
}

impl Description {
    /// A model that was not trained yet.
    pub(crate) fn new(model: ModelConfig, sizes: prsmed::Config, modalities: Vec<String>, pixels: PixelConfig) -> Self {
        let (calibration, intensity, zones, fold) = (None, BTreeMap::new(), Zones::Grid, None);
        let (sources, digests) = (BTreeMap::new(), BTreeMap::new());
        let prompt = sizes.family.prompt.clone();
        Self {
            format: FORMAT,
            model,
            sizes,
            modalities,
            pixels,
            prompt,
            calibration,
            mask_error: None,
            intensity,
            zones,
            fold,
            sources,
            digests,
        }
    }

    /// Window and axis of the training images, where all classes that were prepared from volumes have the same.
    pub fn shown(&self) -> (Option<Window>, Option<Axis>) {
        let mut all = self.intensity.values();
        let Some(first) = all.next() else { return (None, None) };
        let (mut window, mut axis) = (Some(first.window), Some(first.axis));
        for other in all {
            window = window.filter(|window| *window == other.window);
            axis = axis.filter(|axis| *axis == other.axis);
        }
        (window, axis)
    }

    /// Slices that the training images show beside their own.
    pub fn context(&self) -> Neighbours {
        self.intensity.values().next().map_or(Neighbours::None, |intensity| intensity.context)
    }

    /// The sequences that are the colours of the training images; empty for images of one file.
    pub fn sequences(&self) -> &[Sequence] {
        self.intensity.values().next().map_or(&[], |intensity| &intensity.sequences)
    }

    /// A warning for each part that was trained with other weights of the hub than those at the given paths.
    pub(crate) fn source_warnings(&self, parts: &[(&str, Option<&Path>)]) -> Vec<String> {
        let warning = |(part, path): &(&str, Option<&Path>)| {
            let (trained, found) = (self.sources.get(*part)?, hub::pinned((*path)?)?);
            let changed = trained.changed(&found);
            let is_unknown = trained.files.is_empty() || found.files.is_empty();
            if changed.is_empty() && !(is_unknown && trained.commit != found.commit) {
                return None;
            }
            let text = format!(
                "`{part}` is loaded from `hub:{}@{}`, but this checkpoint was trained with `hub:{}@{}`, and its results \
                 may differ (changed files: {}); name that commit to get the same weights",
                found.repo,
                found.commit,
                trained.repo,
                trained.commit,
                if is_unknown { "unknown".to_owned() } else { changed.join(", ") },
            );
            Some(text.chars().filter(|c| !c.is_control()).collect())
        };
        parts.iter().filter_map(warning).collect()
    }

    /// The first part that a checkpoint names whose weights are not those of the training, with its path.
    ///
    /// # Errors
    /// [`Error::Weights`] for weights that cannot be read.
    pub(crate) fn changed_part<'a>(
        &self,
        parts: &[(&'a str, Option<&'a Path>)],
    ) -> Result<Option<(&'a str, &'a Path)>> {
        for (part, path) in parts {
            if let (Some(trained), Some(path)) = (self.digests.get(*part), path)
                && Archive::open(path)?.digest() != *trained
            {
                return Ok(Some((part, path)));
            }
        }
        Ok(None)
    }
}

/// A model with its tokenizer and description.
#[derive(Debug)]
pub struct LoadedModel {
    /// The model.
    pub model: PrsMed,
    /// Its tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// Description for its checkpoints.
    pub description: Description,
    /// The questions of its training; checkpoints of old versions have none.
    pub known_questions: Option<Arc<KnownQuestions>>,
    /// How the images of its training look; checkpoints of old versions do not say it.
    pub known_images: Option<Arc<KnownImages>>,
    /// Images and patients that its weights have seen in trainings.
    pub seen: Arc<SeenImages>,
    /// Keys that did not fit (if that is allowed), and other warnings of the load.
    pub warnings: Vec<String>,
}

impl LoadedModel {
    /// A model of which no training is known.
    pub(crate) fn new(
        model: PrsMed,
        tokenizer: TextTokenizer,
        description: Description,
        warnings: Vec<String>,
    ) -> Self {
        let (tokenizer, seen) = (Arc::new(tokenizer), Arc::default());
        Self { model, tokenizer, description, known_questions: None, known_images: None, seen, warnings }
    }
}

/// Options for building a model.
#[derive(Clone, Copy)]
pub struct Build<'a> {
    /// Device of every tensor.
    pub device: Device,
    /// Dtype of frozen weights and arithmetic.
    pub kind: Kind,
    /// Seed of random weights.
    pub seed: u64,
    /// Local path of a file, a folder or `hub:...`.
    pub locate: &'a dyn Fn(&str) -> Result<PathBuf>,
    /// Continue when keys are missing, unexpected or of other shapes.
    pub allow_partial: bool,
    /// Cache folder for quantized weights.
    pub cache: Option<&'a Path>,
    /// The processes that divide frozen weights if `model.divide_layers` is set; `None` for one process.
    pub peers: Option<&'a Peers>,
}

impl<'a> Build<'a> {
    /// A complete model on `device` in one process, with seed 0 and without a cache.
    pub fn new(device: Device, kind: Kind, locate: &'a dyn Fn(&str) -> Result<PathBuf>) -> Self {
        Self { device, kind, seed: 0, locate, allow_partial: false, cache: None, peers: None }
    }

    /// The processes that divide the frozen layers.
    pub(crate) fn peers_of(&self, config: &ModelConfig) -> Option<&'a Peers> {
        self.peers.filter(|_| config.divide_layers)
    }

    /// Options of a model with these settings.
    pub(crate) fn options(&self, config: &ModelConfig, initialise: bool) -> BuildOptions {
        BuildOptions {
            device: self.device,
            stored: self.kind,
            compute: self.kind,
            initialise,
            train_base: config.train_base,
            quantization: config.quantization,
            loads_base: config.base != RANDOM,
            host_layers: config.stream_layers.count(),
            host_vision: config.stream_vision,
            packed_attention: config.packed_attention,
            ranks: self.peers_of(config).map_or(1, |peers| peers.size),
            reads_layers: self.peers_of(config).is_none_or(|peers| peers.rank == 0),
        }
    }
}

impl std::fmt::Debug for Build<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Build").field("device", &self.device).field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// Changes to the settings of a loaded run.
#[derive(Debug, Clone, Default)]
pub struct RunOverrides {
    /// Another path of the language model.
    pub base: Option<String>,
    /// A separate vision tower.
    pub vision_tower: Option<String>,
    /// Another semantics.
    pub semantics: Option<Semantics>,
    /// Another quantization of the frozen layers.
    pub quantization: Option<Quantization>,
    /// Other layers in host memory.
    pub stream_layers: Option<FirstLayers>,
    /// Whether several processes divide the frozen layers.
    pub divide_layers: Option<bool>,
    /// Whether the vision tower is in host memory.
    pub stream_vision: Option<bool>,
}

/// The preprocessing a model needs, for masks of one label.
pub fn pixels(config: &ModelConfig, sizes: &prsmed::Config) -> PixelConfig {
    PixelConfig {
        tower_size: u32::try_from(sizes.tower.image_size()).expect("checked sizes"),
        padding: sizes.tower.padding(),
        fit: sizes.encoder.fit(),
        sam_size: u32::try_from(config.image_size).expect("checked sizes"),
        mask: config.semantics.mask_mode(),
        pad_offset: config.semantics.pad_offset(),
        labels: Labels::NONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::run_folder::description::describe;

    #[test]
    fn weights_without_hashes_are_compared_by_their_commits() {
        let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
        let mut description = describe(&fixture).unwrap();
        let trained = Pinned { repo: "owner/name".into(), commit: "a1".into(), files: BTreeMap::new() };
        description.sources.insert("base".into(), trained);
        let cache = tempfile::tempdir().unwrap();
        let warnings = |commit: &str| {
            let snapshot = cache.path().join("models--owner--name/snapshots").join(commit);
            std::fs::create_dir_all(&snapshot).unwrap();
            // the hash of a file is the name of the blob that it links to, and this is no link
            std::fs::write(snapshot.join("model.safetensors"), "").unwrap();
            description.source_warnings(&[("base", Some(snapshot.as_path())), ("vision_tower", None)])
        };
        assert_eq!(warnings("a1"), [""; 0]);
        let other = warnings("b2");
        assert!(other.len() == 1 && other[0].contains("(changed files: unknown)"), "{other:?}");
        assert!(other[0].contains("hub:owner/name@b2") && other[0].contains("hub:owner/name@a1"), "{other:?}");
    }
}
