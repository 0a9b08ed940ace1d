//! Checkpoint files: reads safetensors (single or sharded) and PyTorch's `.pth`, writes safetensors atomically.
//!
//! Files are memory-mapped and copied tensor by tensor. The copied pages are released at once, so that loading needs
//! little CPU memory beyond the model itself. Another process must not truncate a mapped file during the read, because
//! the system would end this process with SIGBUS. Files written here are replaced by rename, never in place.
//!
//! This module knows no model; the tables of renamed keys are in `models`.

mod finite;
mod folder;
mod pickle;
mod pth;
mod quantized;
mod report;
mod safetensors;
mod stored_zip;
mod stream;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};
use sha2::{Digest as _, Sha256};
use tch::{Device, Kind, Tensor, no_grad};

pub use folder::{
    CHECKSUMS, Staged, copy_folder, read_unchanged, readable_folder, replace_folder, sha256, verify_folder,
    verify_folder_without, write_bytes, write_safetensors,
};
pub use report::{LoadReport, MisShaped};
pub use stream::TensorSpec;

use crate::nf4::Nf4;
use crate::{META, Shared};
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Bytes that are copied before their mapped pages are released.
const CHUNK: usize = 32 << 20;

/// Reads a JSON file that comes with weights.
///
/// # Errors
/// [`Error::Io`]; [`Error::Weights`] with `hint` for another content.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path, hint: &str) -> Result<T> {
    let text = files::read(path, files::MAX_TEXT).map_err(Error::io(path, "read"))?;
    serde_json::from_slice(&text).map_err(|error| Error::weights(path, error.to_string(), hint))
}

/// Reads the JSON of a `config.json` of at most 1 MiB. (Parsed values need about 70 times the memory of their text.)
///
/// # Errors
/// As [`read_json`].
pub fn read_config(path: &Path, hint: &str) -> Result<serde_json::Value> {
    let text = files::read(path, files::MAX_SETTINGS).map_err(Error::io(path, "read"))?;
    serde_json::from_slice(&text).map_err(|error| Error::weights(path, error.to_string(), hint))
}

/// Dtype and shape of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Stored element type.
    pub kind: Kind,
    /// Stored shape.
    pub shape: Vec<i64>,
}

/// Location of a tensor: `span` bytes from `start` of `files[file]`.
#[derive(Debug, Clone)]
struct StoredTensor {
    file: usize,
    info: TensorInfo,
    /// Element strides; `None` for a contiguous tensor.
    strides: Option<Vec<i64>>,
    start: usize,
    span: usize,
}

/// The tensors of one file, in file order.
type StoredTensors = Vec<(String, StoredTensor)>;

#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    bytes: Mmap,
}

/// A checkpoint file or folder, opened for reading.
#[derive(Debug, Default)]
pub struct Archive {
    path: PathBuf,
    files: Vec<Mapped>,
    names: Vec<String>,
    entries: HashMap<String, StoredTensor>,
    metadata: HashMap<String, String>,
}

impl Archive {
    /// Opens a `.safetensors` file, a `.pth`, `.pt` or `.bin` file of PyTorch 0.4 or later, a `*.index.json`, or a
    /// folder. In a folder it opens the first of `model.safetensors`, `model.safetensors.index.json` with its shards,
    /// `adapter_model.safetensors`, `pytorch_model.bin` and `pytorch_model.bin.index.json` that exists.
    ///
    /// It reads and checks headers, but not tensors.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read. [`Error::Weights`] for a truncated file, another format, a pickle that
    /// names anything but tensors, a missing shard, and a shard that lacks keys of the index.
    pub fn open(path: &Path) -> Result<Self> {
        let mut archive = Self { path: path.to_owned(), ..Self::default() };
        let file = if path.is_dir() { safetensors::main_file(path)? } else { path.to_owned() };
        if file.extension().is_some_and(|e| e == "json") {
            safetensors::open_index(&mut archive, &file)?;
        } else {
            archive.add_file(&file)?;
        }
        Ok(archive)
    }

    /// The archive with `name(key)` as the name of each stored key; `None` keeps the key.
    #[must_use]
    pub fn renamed(mut self, name: impl Fn(&str) -> Option<String>) -> Self {
        let own = |key: String| name(&key).unwrap_or(key);
        self.names = self.names.into_iter().map(own).collect();
        self.entries = self.entries.into_iter().map(|(key, entry)| (own(key), entry)).collect();
        self
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All names, in the order of the tensors in the files.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Metadata of the safetensors headers; empty for `.pth`.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// True if there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// A hash of names, dtypes, shapes, and of the first, middle and last 4 KiB of each tensor: other weights have another
    /// one, without reading all of them. The order and the division into files do not count.
    pub fn digest(&self) -> String {
        const BLOCK: usize = 4096;
        let mut names: Vec<&String> = self.names.iter().collect();
        names.sort_unstable();
        let mut hash = Sha256::new();
        for name in names {
            let entry = &self.entries[name];
            hash.update(format!("{name} {:?} {:?}\n", entry.info.kind, entry.info.shape));
            let bytes = &self.files[entry.file].bytes[entry.start..entry.start + entry.span];
            let last = bytes.len().saturating_sub(BLOCK);
            for from in [0, last / 2, last] {
                hash.update(&bytes[from..bytes.len().min(from + BLOCK)]);
            }
        }
        format!("{:x}", hash.finalize())
    }

    /// The index of shards that lies beside the `model.safetensors` of an opened folder, and is not used.
    pub fn unused_index(&self) -> Option<PathBuf> {
        let own = self.files.first().and_then(|file| file.path.file_name());
        let [single, index] = safetensors::SINGLE_OR_INDEX;
        let index = self.path.join(index);
        Some(index).filter(|index| self.path.is_dir() && own.is_some_and(|own| own == single) && index.exists())
    }

    /// Dtype and shape of `name`, without reading it.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.entries.get(name).map(|entry| &entry.info)
    }

    /// The shape of a tensor with `N` dimensions; `hint` is the remedy if it is missing or has others.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub fn shape<const N: usize>(&self, name: &str, hint: &str) -> Result<[i64; N]> {
        let Some(info) = self.info(name) else {
            return Err(Error::weights(self.path(), format!("`{name}` is missing"), hint));
        };
        info.shape.as_slice().try_into().map_err(|_| {
            let reason = format!("`{name}` has the shape {:?}, expected {N} dimensions", info.shape);
            Error::weights(self.path(), reason, hint)
        })
    }

    /// Reads `name` to the CPU, in its stored dtype. The values are not checked.
    ///
    /// # Errors
    /// [`Error::Weights`] if there is no such tensor; [`Error::OutOfMemory`].
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let TensorInfo { kind, shape } = &entry.info;
        let mut tensor = Tensor::f_empty(shape, (*kind, Device::Cpu)).map_err(|error| torch(&error))?;
        no_grad(|| self.copy_entry(entry, &mut tensor)).map_err(|error| torch(&error))?;
        Ok(tensor)
    }

    /// Copies `name` into `target`, converted to the dtype and device of `target`.
    ///
    /// Autograd does not record the copy, so `target` may be a leaf that requires gradients.
    ///
    /// # Errors
    /// [`Error::Weights`] if there is no such tensor, if the shapes differ, for integers where the target is
    /// floating-point, and for values that are not finite in the dtype of the target.
    pub fn copy_into(&self, name: &str, target: &mut Tensor) -> Result<()> {
        let entry = self.entry(name)?;
        let Mapped { path, .. } = &self.files[entry.file];
        if target.size() != entry.info.shape {
            let reason = format!("`{name}` has shape {:?}, expected {:?}", entry.info.shape, target.size());
            return Err(Error::weights(path, reason, "use the config that belongs to these weights"));
        }
        let (kind, wanted) = (entry.info.kind, target.kind());
        if finite::is_floating(wanted) && !finite::is_floating(kind) {
            let reason = format!("`{name}` has the dtype {kind:?}, expected floating-point numbers");
            return Err(Error::weights(path, reason, "use the original weights in bf16, fp16 or fp32"));
        }
        if no_grad(|| self.copy_entry(entry, target)).map_err(|error| torch(&error))? {
            return Ok(());
        }
        let reason = format!("`{name}` has values that are not finite in the dtype {wanted:?}");
        let hint = if kind == wanted {
            "the file is damaged, or its training diverged: use another checkpoint"
        } else {
            "the file is damaged, or its values are too large for this dtype: use bf16 or fp32"
        };
        Err(Error::weights(path, reason, hint))
    }

    /// Copies the tensor of the same name into each target.
    ///
    /// `ignore` selects stored names that may stay unused, such as known leftovers of a format. The report lists
    /// tensors of another shape; their targets are unchanged. Of targets on [`META`] names and shapes are compared alone.
    ///
    /// # Errors
    /// [`Error::Torch`] or [`Error::OutOfMemory`] from a copy. Mismatches are in the report; see
    /// [`LoadReport::into_result`].
    pub fn load<N: AsRef<str>>(
        &self,
        targets: &mut [(N, Tensor)],
        ignore: impl FnMut(&str) -> bool,
    ) -> Result<LoadReport> {
        self.load_with(targets, &[], ignore)
    }

    /// Like [`Archive::load`], with NF4 matrices by the names of their weights. A dense weight is quantized while it is
    /// read, one matrix at a time. If a target is dense and the file has NF4, the weight is dequantized. A matrix that
    /// is missing or has another shape is reported and set to zero.
    ///
    /// # Errors
    /// Like [`Archive::load`], and [`Error::Weights`] for a 4-bit matrix that is not bitsandbytes' NF4.
    pub fn load_with<N: AsRef<str>>(
        &self,
        targets: &mut [(N, Tensor)],
        matrices: &[(String, Shared<Nf4>)],
        mut ignore: impl FnMut(&str) -> bool,
    ) -> Result<LoadReport> {
        let mut report = LoadReport::default();
        let mut wanted = std::collections::HashSet::new();
        for (name, matrix) in matrices {
            wanted.insert(name.clone());
            self.fill_quantized(name, matrix, &mut report)?;
        }
        for (name, target) in targets {
            let name = name.as_ref();
            wanted.insert(name.to_owned());
            if let Some(state) = self.quantized_state(name)?
                && state.shape == target.size()
            {
                if target.device() != META {
                    self.fill_dense(name, &state, target)?;
                }
                report.loaded.push(name.to_owned());
                continue;
            }
            match self.info(name) {
                None => report.missing.push(name.to_owned()),
                Some(info) if info.shape != target.size() => {
                    let (expected, got) = (target.size(), info.shape.clone());
                    report.mis_shaped.push(MisShaped { name: name.to_owned(), expected, got });
                }
                Some(_) => {
                    if target.device() != META {
                        self.copy_into(name, target)?;
                    }
                    report.loaded.push(name.to_owned());
                }
            }
        }
        let belongs = |name: &str| quantized::weight_of(name).is_some_and(|weight| wanted.contains(weight));
        for name in self.names.iter().filter(|name| !wanted.contains(*name) && !belongs(name)) {
            if ignore(name) { report.ignored.push(name.clone()) } else { report.unexpected.push(name.clone()) }
        }
        Ok(report)
    }

    fn entry(&self, name: &str) -> Result<&StoredTensor> {
        self.entries.get(name).ok_or_else(|| {
            let reason = format!("there is no tensor `{name}`");
            Error::weights(&self.path, reason, "use the checkpoint that belongs to the config")
        })
    }

    /// Maps `file`, detects its format and adds its tensors. Returns the names that it added.
    fn add_file(&mut self, file: &Path) -> Result<Vec<String>> {
        let handle = files::open(file).map_err(Error::io(file, "open"))?;
        // SAFETY: the mapping is read-only and private; the module docs say what happens if another process truncates
        // it.
        let bytes = unsafe { Mmap::map(&handle) }.map_err(Error::io(file, "map"))?;
        let named_safetensors = file.extension().is_some_and(|e| e == "safetensors");
        let (entries, metadata) = if bytes.starts_with(b"version https://git-lfs") {
            let hint = "run `git lfs pull` in its repository or download the file itself";
            return Err(Error::weights(file, "is a Git LFS pointer, not the weights", hint));
        } else if !named_safetensors && pth::looks_like(&bytes) {
            (pth::entries(file, &bytes)?, HashMap::new())
        } else if file.extension().is_some_and(|e| e == "pth" || e == "pt" || e == "bin") {
            let hint = "the file is empty, incomplete or in another format: download or copy it again";
            return Err(Error::weights(file, format!("is not a PyTorch file ({} bytes)", bytes.len()), hint));
        } else {
            safetensors::entries(file, &bytes)?
        };
        let index = self.files.len();
        self.files.push(Mapped { path: file.to_owned(), bytes });
        let mut added = Vec::with_capacity(entries.len());
        for (name, mut entry) in entries {
            entry.file = index;
            if let Some(other) = self.entries.insert(name.clone(), entry) {
                let reason = format!("`{name}` is already in `{}`", self.files[other.file].path.display());
                return Err(Error::weights(file, reason, "remove one of the two files or write the checkpoint again"));
            }
            added.push(name);
        }
        self.names.extend(added.iter().cloned());
        self.metadata.extend(metadata);
        Ok(added)
    }

    /// Copies a tensor; true if all values are finite in the dtype of `target`.
    fn copy_entry(&self, entry: &StoredTensor, target: &mut Tensor) -> Result<bool, tch::TchError> {
        let mapped = &self.files[entry.file].bytes;
        let kind = entry.info.kind;
        let size = kind.elt_size_in_bytes();
        let total = entry.span / size;
        if total == 0 {
            return Ok(true);
        }
        let whole = &mapped[entry.start..entry.start + entry.span];
        if let Some(strides) = &entry.strides {
            target.f_copy_(&flat_view(whole, kind)?.f_as_strided(&entry.info.shape, strides, 0)?)?;
            release(mapped, entry.start, entry.span);
            // the storage may have values that do not belong to the tensor
            return Ok(!finite::is_floating(target.kind()) || target.f_isfinite()?.f_all()?.f_int64_value(&[])? == 1);
        }
        if !target.is_contiguous() {
            target.f_copy_(&flat_view(whole, kind)?.f_view(entry.info.shape.as_slice())?)?;
            let is_finite = finite::all_finite(whole, kind, target.kind());
            release(mapped, entry.start, entry.span);
            return Ok(is_finite);
        }
        let rows = target.f_view([-1])?;
        let mut is_finite = true;
        for from in (0..total).step_by(CHUNK / size) {
            let count = (CHUNK / size).min(total - from);
            let start = entry.start + from * size;
            let bytes = &mapped[start..start + count * size];
            #[expect(clippy::cast_possible_wrap, reason = "an element count of a mapped file is far below 2^63")]
            rows.f_narrow(0, from as i64, count as i64)?.f_copy_(&flat_view(bytes, kind)?)?;
            is_finite &= finite::all_finite(bytes, kind, target.kind());
            release(mapped, start, count * size);
        }
        Ok(is_finite)
    }
}

/// A one-dimensional tensor over `bytes`: a view if they are aligned for `kind`, else a copy.
fn flat_view(bytes: &[u8], kind: Kind) -> Result<Tensor, tch::TchError> {
    let size = kind.elt_size_in_bytes();
    #[expect(clippy::cast_possible_wrap, reason = "an element count of a mapped file is far below 2^63")]
    let count = (bytes.len() / size) as i64;
    if bytes.as_ptr().addr().is_multiple_of(size) {
        // SAFETY: the view lives only during the copy out of it, while `bytes` is borrowed, and is never written to.
        unsafe { Tensor::f_from_blob(bytes.as_ptr(), &[count], &[1], kind, Device::Cpu) }
    } else {
        Tensor::f_from_data_size(bytes, &[count], kind)
    }
}

/// Releases the whole pages of a range. The system reads them again from disk if they are used again.
fn release(mapped: &Mmap, start: usize, len: usize) {
    // SAFETY: DONTNEED on a read-only file mapping discards no data, later reads fault the pages in again. A failure
    // costs memory, not correctness.
    let _ = unsafe { mapped.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
}

/// Converts libtorch's error to [`Error`].
fn torch(error: &tch::TchError) -> Error {
    let text = error.to_string();
    let reason = text.lines().next().unwrap_or_default().to_owned();
    if text.contains("out of memory") || text.contains("not enough memory") || text.contains("allocate memory") {
        Error::OutOfMemory { reason }
    } else {
        Error::Torch { reason }
    }
}

#[cfg(test)]
mod tests;
