//! Prior preservation (Ruiz et al. 2023, "DreamBooth"): images that the generator should not forget accompany the
//! training images, each with its own noise and timestep. As in diffusers' `train_dreambooth.py`, their loss has one
//! weight at all timesteps and is added to the loss of the training images.

use crate::data::annotation::is_image;
use crate::tensor::weights::{Staged, sha256};
use crate::{Error, Result, files};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// File of a checkpoint with the hash of the images.
const FILE: &str = "prior_images.sha256";

/// The prior images of a training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriorImages {
    /// The files, sorted by name.
    pub files: Vec<PathBuf>,
    /// Hash of their content.
    sha256: String,
}

impl PriorImages {
    /// The images in `folder`, without its subfolders.
    ///
    /// # Errors
    /// [`Error::Config`] without any image; [`Error::Io`].
    pub fn open(folder: &Path) -> Result<Self> {
        let none = |reason: &str| {
            let hint = "put images into it, without masks. `prsmed augment generate --mode img2img --set \
                        augment.strength=1.0 --no-filter` with the untrained generator makes some: they are in the \
                        folders `train_images` of its output";
            Error::config("finetune.prior_images", format!("`{}` {reason}", folder.display()), hint)
        };
        if !folder.is_dir() {
            return Err(none("is not a folder"));
        }
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
            let path = entry.map_err(Error::io(folder, "list"))?.path();
            if path.is_file() && is_image(&path) {
                found.push(path);
            }
        }
        if found.is_empty() {
            return Err(none("has no images"));
        }
        found.sort();
        let sums: Vec<String> = found.par_iter().map(|path| sha256(path)).collect::<Result<_>>()?;
        let sha256 = format!("{:x}", Sha256::digest(sums.concat()));
        Ok(Self { files: found, sha256 })
    }

    /// Writes the hash of the images into a checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, folder: &mut Staged) -> Result<()> {
        folder.write_bytes(FILE, self.sha256.as_bytes())
    }

    /// Compares these images with those of the checkpoint in `folder`.
    ///
    /// # Errors
    /// [`Error::Config`] if they differ; [`Error::Io`].
    pub fn check(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        let before = files::read_to_string(&path, files::MAX_TEXT).map_err(Error::io(&path, "read"))?;
        if before == self.sha256 {
            return Ok(());
        }
        let hint = "resume with the images that the run was started with, or start a new run with another `--out`";
        Err(Error::config("finetune.prior_images", "has other images than the run to resume", hint))
    }
}
