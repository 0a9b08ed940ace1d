//! Cache of a base's quantized matrices: `nf4/<name>/` in the cache folder, one folder for each base and scheme, with
//! checksums.
//!
//! An entry is valid if the base's files have the same names, sizes and modification times as before, and if its
//! checksums match. Otherwise the matrices are quantized again. Problems with the cache become warnings.

use crate::tensor::nf4::{Nf4, Quantization};
use crate::tensor::weights::{Archive, Staged, verify_folder};
use crate::tensor::{Shared, Tensor, ledger};
use crate::{Error, Result, files};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// File that describes the source of the cached matrices.
const SOURCE: &str = "source.json";
const TENSORS: &str = "model.safetensors";

/// Cache entry of one base and scheme; it may not exist yet.
#[derive(Debug)]
pub(crate) struct Cached {
    folder: PathBuf,
    source: Source,
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Source {
    format: u32,
    scheme: Quantization,
    /// Name, bytes and modification time (nanoseconds since 1970) of each file.
    files: Vec<(String, u64, u128)>,
}

impl Cached {
    /// The entry of `archive`, opened from `base`; `None` if the metadata of its files cannot be read.
    pub(crate) fn of(base: &Path, archive: &Archive, scheme: Quantization, cache: &Path) -> Option<Self> {
        let mut hash = Sha256::new();
        hash.update(base.canonicalize().ok()?.to_string_lossy().as_bytes());
        let sum = format!("{:x}", hash.finalize());
        let name = format!("{}-{}", scheme.name(), &sum[..24]);
        let mut files = Vec::new();
        for file in archive.files() {
            let found = std::fs::metadata(file).ok()?;
            let changed = found.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
            files.push((file.file_name()?.to_string_lossy().into_owned(), found.len(), changed));
        }
        Some(Self { folder: cache.join("nf4").join(name), source: Source { format: 1, scheme, files } })
    }

    /// Loads `matrices`; returns false if there is no valid entry.
    pub(crate) fn load(&self, matrices: &[(String, Shared<Nf4>)], warnings: &mut Vec<String>) -> bool {
        if !self.folder.exists() {
            return false;
        }
        match self.read(matrices) {
            Ok(()) => true,
            Err(error) => {
                warnings.push(format!("the cached quantized weights cannot be used, quantizing again: {error}"));
                false
            }
        }
    }

    fn read(&self, matrices: &[(String, Shared<Nf4>)]) -> Result<()> {
        let path = self.folder.join(SOURCE);
        let text = files::read(&path, files::MAX_TEXT).map_err(Error::io(&path, "read"))?;
        if serde_json::from_slice::<Source>(&text).ok().as_ref() != Some(&self.source) {
            return Err(Error::weights(
                &self.folder,
                "the cached weights were quantized from other files",
                "nothing needs to be done",
            ));
        }
        verify_folder(&self.folder)?;
        let path = self.folder.join(TENSORS);
        let mut none: [(String, Tensor); 0] = [];
        Archive::open(&path)?.load_with(&mut none, matrices, |_| false)?.into_result(&path).map(drop)
    }

    /// Stores `matrices`.
    pub(crate) fn store(&self, matrices: &[(String, Shared<Nf4>)], warnings: &mut Vec<String>) {
        if let Err(error) = self.write(matrices) {
            warnings.push(format!("the quantized weights cannot be cached: {error}"));
        }
    }

    fn write(&self, matrices: &[(String, Shared<Nf4>)]) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::weights::write_safetensors;
    use crate::tensor::{Device, Kind};

    #[test]
    fn matrices_are_loaded_once_they_are_stored() {
        let [base, cache] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let values = Tensor::arange(256_i64, (Kind::Float, Device::Cpu)).view([4, 64]).sin();
        let file = base.path().join("model.safetensors");
        write_safetensors(&file, &[("weight", &values)], &BTreeMap::new()).unwrap();
        let archive = Archive::open(base.path()).unwrap();
        let cached = Cached::of(base.path(), &archive, Quantization::Nf4, cache.path()).unwrap();
        let matrix = || vec![("weight".to_owned(), Shared::new(Nf4::empty([4, 64], false, Device::Cpu)))];
        let (stored, loaded, mut warnings) = (matrix(), matrix(), Vec::new());
        assert!(!cached.load(&loaded, &mut warnings), "nothing is stored");
        stored[0].1.quantize(&values);
        cached.store(&stored, &mut warnings);
        assert!(cached.load(&loaded, &mut warnings));
        for ((_, stored), (key, loaded)) in stored[0].1.pieces().into_iter().zip(loaded[0].1.pieces()) {
            assert_eq!(stored, loaded, "{key}");
        }
        assert_eq!(warnings, [""; 0]);
    }
}
