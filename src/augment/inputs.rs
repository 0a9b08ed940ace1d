//! Inputs of a fine-tuning or a generation by their content, so that a job that continues notices what has changed.

use super::pipeline_config::PipelineConfig;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::Row;
use crate::tensor::weights::{Staged, sha256};
use crate::{Error, Result, files};
use image::{GrayImage, RgbImage};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// File of a checkpoint with its inputs.
const FILE: &str = "inputs.json";

/// SHA-256 of the image of each of `rows`.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn image_sums<'a>(rows: impl Iterator<Item = &'a Row>) -> Result<HashMap<&'a Path, String>> {
    let images: BTreeSet<&Path> = rows.map(|row| row.image_path.as_path()).collect();
    images.into_iter().map(|path| Ok((path, sha256(path)?))).collect()
}

/// An image with its mask, 0 or 255.
///
/// # Errors
/// [`Error::Data`] for a file that cannot be read, or a mask of another size.
pub(super) fn read_pair(image: &Path, mask: &Path) -> Result<(RgbImage, GrayImage)> {
    let (pixels, label) = (decode::image(image)?.to_rgb8(), foreground(&decode::mask(mask)?));
    if label.dimensions() != pixels.dimensions() {
        let reason = format!("the mask is {:?}, its image {:?}", label.dimensions(), pixels.dimensions());
        return Err(Error::data(mask, reason, "export image and mask at one size"));
    }
    Ok((pixels, label))
}

/// Names of inputs and hashes of their content, in a fixed order.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct JobInputs(Vec<(String, String)>);

impl JobInputs {
    /// The networks of a generator: files of weights, sizes, noise schedule. `weights` is
    /// [`PipelineConfig::weight_digests`].
    pub fn of_generator(config: &PipelineConfig, weights: &[(String, String)]) -> Self {
        let mut this =
            Self(weights.iter().map(|(name, hash)| (format!("the weights `{name}`"), hash.clone())).collect());
        let sizes = json!([config.unet, config.vae, config.texts, config.controlnet, config.zero_without_negative]);
        this.add("the sizes in the `config.json` of the model", sizes.to_string());
        this.add("the noise schedule of the model", json!(config.scheduler).to_string());
        this
    }

    /// Adds an input with this content.
    pub fn add(&mut self, name: impl Into<String>, content: impl AsRef<[u8]>) {
        self.add_hash(name, format!("{:x}", Sha256::digest(content)));
    }

    /// Adds an input whose content has this hash.
    pub fn add_hash(&mut self, name: impl Into<String>, hash: impl Into<String>) {
        self.0.push((name.into(), hash.into()));
    }

    /// The first of these inputs that `before` has with another content, or does not have, or that only `before` has.
    pub fn difference(&self, before: &Self) -> Option<String> {
        let changed = self.0.iter().find(|input| !before.0.contains(input));
        let missing = || before.0.iter().find(|(name, _)| self.0.iter().all(|(own, _)| own != name));
        changed.or_else(missing).map(|(name, _)| name.clone())
    }

    /// As an object of names and hashes.
    pub fn to_json(&self) -> serde_json::Value {
        self.0.iter().map(|(name, hash)| (name.clone(), json!(hash))).collect()
    }

    /// Writes the inputs into a checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`].
    ///
    /// # Panics
    /// Never: plain values serialise.
    pub fn save(&self, folder: &mut Staged) -> Result<()> {
        folder.write_bytes(FILE, &serde_json::to_vec_pretty(self).expect("plain values serialise"))
    }

    /// Compares these inputs with those of the checkpoint in `folder`. Checkpoints of earlier versions do not name theirs.
    ///
    /// # Errors
    /// [`Error::Data`] naming the first input that differs, and for a damaged file; [`Error::Io`].
    pub fn check(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(());
        }
        let text = files::read(&path, files::MAX_TABLE).map_err(Error::io(&path, "read"))?;
        let hint = "put the file of the first part of the run back, or start a new run with another argument `out`";
        let before: Self =
            serde_json::from_slice(&text).map_err(|error| Error::data(&path, error.to_string(), hint))?;
        match self.difference(&before) {
            Some(name) => {
                Err(Error::data(folder, format!("the run began with other inputs: {name} has changed"), hint))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_generator_is_compared_and_named() {
        let config = PipelineConfig::random("tiny", true).unwrap();
        let weights = [("unet/a", "1"), ("vae/b", "2"), ("text_encoder/c", "3")];
        let weights = weights.map(|(name, hash)| (name.to_owned(), hash.to_owned()));
        let before = JobInputs::of_generator(&config, &weights);
        assert_eq!(before.difference(&before), None);
        let changed = |change: &dyn Fn(&mut PipelineConfig)| {
            let mut config = config.clone();
            change(&mut config);
            JobInputs::of_generator(&config, &weights).difference(&before).expect("a difference")
        };
        for number in 0..weights.len() {
            let mut other = weights.clone();
            other[number].1 = "9".to_owned();
            let name = JobInputs::of_generator(&config, &other).difference(&before).unwrap();
            assert_eq!(name, format!("the weights `{}`", weights[number].0));
        }
        assert!(changed(&|config| config.vae.scaling_factor *= 2.0).contains("sizes"));
        assert!(changed(&|config| config.texts[0].num_attention_heads *= 2).contains("sizes"));
        assert!(changed(&|config| config.zero_without_negative = true).contains("sizes"));
        assert!(changed(&|config| config.controlnet = None).contains("sizes"));
        assert!(changed(&|config| config.scheduler.beta_end = 0.02).contains("noise schedule"));
        assert!(changed(&|config| config.scheduler.rescale_betas_zero_snr = true).contains("noise schedule"));
    }

    #[test]
    fn images_that_come_go_and_change_are_named() {
        let inputs = |all: &[(&str, &str)]| {
            let mut inputs = JobInputs::default();
            for (name, content) in all {
                inputs.add(*name, content);
            }
            inputs
        };
        let before = inputs(&[("a.png", "1"), ("b.png", "2")]);
        let differing = |all: &[(&str, &str)]| inputs(all).difference(&before);
        assert_eq!(differing(&[("a.png", "1"), ("b.png", "2")]), None);
        assert_eq!(differing(&[("a.png", "1"), ("b.png", "3")]).as_deref(), Some("b.png"));
        assert_eq!(differing(&[("a.png", "1")]).as_deref(), Some("b.png"));
        assert_eq!(differing(&[("a.png", "1"), ("b.png", "2"), ("c.png", "2")]).as_deref(), Some("c.png"));
        let folder = tempfile::tempdir().unwrap();
        before.check(folder.path()).expect("an earlier version");
        let mut staged = Staged::create(&folder.path().join("last")).unwrap();
        before.save(&mut staged).unwrap();
        staged.publish().unwrap();
        before.check(&folder.path().join("last")).unwrap();
        let error = inputs(&[("a.png", "1"), ("b.png", "4")]).check(&folder.path().join("last")).unwrap_err();
        assert!(error.to_string().contains("b.png has changed"), "{error}");
        assert!(error.hint().contains("argument `out`"), "{}", error.hint());
    }
}
