//! Quantized matrices of a base kept for later loads: `nf4/<name>/` in the cache folder, one folder for each base and
//! scheme, with checksums.
//!
//! It is used when the base's files still have the names, sizes and times of change that they had, and every byte of it is
//! as written; else it is made anew. Nothing here fails a load: what goes wrong is told as a warning.

use crate::tensor::nf4::{Nf4, Quantization};
use crate::tensor::weights::{Archive, Staged, verify_folder};
use crate::tensor::{Tensor, ledger};
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::UNIX_EPOCH;

/// What the kept matrices were made from.
const SOURCE: &str = "source.json";
const TENSORS: &str = "model.safetensors";

/// The kept matrices of one base in one scheme, whether they are there or not.
#[derive(Debug)]
pub(super) struct Cached {
    folder: PathBuf,
    source: Source,
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Source {
    format: u32,
    scheme: Quantization,
    /// Name, bytes and time of change (nanoseconds since 1970) of each file.
    files: Vec<(String, u64, u128)>,
}

impl Cached {
    /// Those of `archive`, opened from `base`; `None` when its files cannot be looked at.
    pub(super) fn of(base: &Path, archive: &Archive, scheme: Quantization, cache: &Path) -> Option<Self> {
        let mut hash = Sha256::new();
        hash.update(base.canonicalize().ok()?.to_string_lossy().as_bytes());
        let mut name = String::from(scheme.name());
        name.push('-');
        for byte in hash.finalize().iter().take(12) {
            write!(name, "{byte:02x}").expect("writing to a string cannot fail");
        }
        let mut files = Vec::new();
        for file in archive.files() {
            let found = std::fs::metadata(file).ok()?;
            let changed = found.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
            files.push((file.file_name()?.to_string_lossy().into_owned(), found.len(), changed));
        }
        Some(Self { folder: cache.join("nf4").join(name), source: Source { format: 1, scheme, files } })
    }

    /// Fills `matrices`; false when there is nothing to fill them from.
    pub(super) fn load(&self, matrices: &[(String, Rc<Nf4>)], warnings: &mut Vec<String>) -> bool {
        if !self.folder.exists() {
            return false;
        }
        match self.read(matrices) {
            Ok(()) => true,
            Err(error) => {
                warnings.push(format!("the kept quantized weights are not used and made again: {error}"));
                false
            }
        }
    }

    fn read(&self, matrices: &[(String, Rc<Nf4>)]) -> Result<()> {
        let path = self.folder.join(SOURCE);
        let text = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
        if serde_json::from_slice::<Source>(&text).ok().as_ref() != Some(&self.source) {
            return Err(Error::weights(&self.folder, "they were made from other files", "nothing needs to be done"));
        }
        verify_folder(&self.folder)?;
        let path = self.folder.join(TENSORS);
        let mut none: [(String, Tensor); 0] = [];
        Archive::open(&path)?.load_with(&mut none, matrices, |_| false)?.into_result(&path).map(drop)
    }

    /// Keeps `matrices`.
    pub(super) fn store(&self, matrices: &[(String, Rc<Nf4>)], warnings: &mut Vec<String>) {
        if let Err(error) = self.write(matrices) {
            warnings.push(format!("the quantized weights are not kept for later loads: {error}"));
        }
    }

    fn write(&self, matrices: &[(String, Rc<Nf4>)]) -> Result<()> {
        let _category = ledger::enter(ledger::Category::Workspace);
        let tensors: Vec<(String, &Tensor)> = matrices
            .iter()
            .flat_map(|(name, matrix)| {
                matrix.pieces().into_iter().map(move |(key, piece)| (format!("{name}{key}"), piece))
            })
            .collect();
        let mut folder = Staged::begin(&self.folder)?;
        folder.write_tensors(TENSORS, &tensors, &BTreeMap::new())?;
        folder.write_bytes(SOURCE, &serde_json::to_vec_pretty(&self.source).expect("plain values serialise"))?;
        folder.publish()
    }
}
