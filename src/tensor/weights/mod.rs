//! Named tensors on disk: reads safetensors (single, sharded) and PyTorch's `.pth`, writes safetensors atomically.
//!
//! Files are mapped and copied tensor by tensor; the copied pages are handed back to the system at once, so loading a
//! model needs little host memory beyond the model itself. A mapped file must not be truncated by someone else while it
//! is read (the system would end the process with SIGBUS); files written here are replaced by rename, never in place.
//!
//! It does not rename keys and knows no model: see the tables beside the models.

mod atomic;
mod pickle;
mod pth;
mod quantized;
mod report;
mod safetensors;
mod stream;

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};
use tch::{Device, Kind, Tensor, no_grad};

pub use atomic::{CHECKSUMS, Staged, readable_folder, recover_folder, verify_folder, write_bytes, write_safetensors};
pub use report::{LoadReport, MisShaped};
pub use stream::Spec;

use crate::error::{Error, Result};
use crate::tensor::nf4::Nf4;
use std::rc::Rc;

/// Bytes copied between two returns of mapped pages to the system.
const CHUNK: usize = 32 << 20;

/// What is stored under one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Stored element type.
    pub kind: Kind,
    /// Stored shape.
    pub shape: Vec<i64>,
}

/// Where one tensor lies: `span` bytes from `start` of `files[file]`.
#[derive(Debug, Clone)]
struct Entry {
    file: usize,
    info: TensorInfo,
    /// Element strides; `None` when the elements lie in order.
    strides: Option<Vec<i64>>,
    start: usize,
    span: usize,
}

/// The tensors of one file, in file order.
type Entries = Vec<(String, Entry)>;

#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    bytes: Mmap,
}

/// A file or folder of named tensors, opened for reading.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    files: Vec<Mapped>,
    names: Vec<String>,
    entries: HashMap<String, Entry>,
    metadata: HashMap<String, String>,
}

impl Archive {
    /// Opens a `.safetensors` file, a `.pth`/`.pt`/`.bin` file of PyTorch 0.4 or later, a `*.index.json`, or a folder
    /// that holds `model.safetensors`, `model.safetensors.index.json` with its shards, `adapter_model.safetensors`,
    /// `pytorch_model.bin` or `pytorch_model.bin.index.json` (the first of these that exists).
    ///
    /// Headers are read and checked, tensors are not.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read; [`Error::Weights`] for a file that is truncated, not of these
    /// formats or whose pickle names anything but tensors, and for shards that are missing or lack promised keys.
    pub fn open(path: &Path) -> Result<Self> {
        let mut archive = Self {
            path: path.to_owned(),
            files: Vec::new(),
            names: Vec::new(),
            entries: HashMap::new(),
            metadata: HashMap::new(),
        };
        let file = if path.is_dir() { safetensors::main_file(path)? } else { path.to_owned() };
        if file.extension().is_some_and(|e| e == "json") {
            safetensors::open_index(&mut archive, &file)?;
        } else {
            archive.add_file(&file)?;
        }
        Ok(archive)
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All names, in the order in which the tensors lie on disk.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The string pairs of the safetensors headers; empty for `.pth`.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Whether `name` is stored.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Type and shape of `name`, without reading it.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.entries.get(name).map(|entry| &entry.info)
    }

    /// Reads `name` to the CPU, in its stored type.
    ///
    /// # Errors
    /// [`Error::Weights`] when there is no such name; [`Error::OutOfMemory`].
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let info = &self.entry(name)?.info;
        let mut tensor = Tensor::f_empty(&info.shape, (info.kind, Device::Cpu)).map_err(|error| torch(&error))?;
        self.copy_into(name, &mut tensor)?;
        Ok(tensor)
    }

    /// Copies `name` into `target`, converting to the type and device of `target`.
    ///
    /// Outside of autograd: `target` may be a leaf that requires gradients.
    ///
    /// # Errors
    /// [`Error::Weights`] when there is no such name or the shapes differ.
    pub fn copy_into(&self, name: &str, target: &mut Tensor) -> Result<()> {
        let entry = self.entry(name)?;
        if target.size() != entry.info.shape {
            return Err(Error::weights(
                &self.files[entry.file].path,
                format!("`{name}` has shape {:?}, expected {:?}", entry.info.shape, target.size()),
                "use the config that belongs to these weights",
            ));
        }
        no_grad(|| self.copy_entry(entry, target)).map_err(|error| torch(&error))
    }

    /// Copies into every target what is stored under its name.
    ///
    /// `ignore` tells which stored names may stay unused (known leftovers of a format). Tensors of the wrong shape are
    /// left as they were and reported.
    ///
    /// # Errors
    /// [`Error::Torch`] or [`Error::OutOfMemory`] from a copy; mismatches are in the report, see
    /// [`LoadReport::into_result`].
    pub fn load<N: AsRef<str>>(
        &self,
        targets: &mut [(N, Tensor)],
        ignore: impl FnMut(&str) -> bool,
    ) -> Result<LoadReport> {
        self.load_with(targets, &[], ignore)
    }

    /// As [`Archive::load`] with matrices in 4 bits, by the names of their dense forms: dense ones are quantized as they
    /// are read, one after the other. Where a target is dense and the file is in 4 bits, it is made dense. A matrix that
    /// is missing or of another shape is reported and zero.
    ///
    /// # Errors
    /// As [`Archive::load`], and [`Error::Weights`] for a 4-bit matrix that is not bitsandbytes' NF4.
    pub fn load_with<N: AsRef<str>>(
        &self,
        targets: &mut [(N, Tensor)],
        matrices: &[(String, Rc<Nf4>)],
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
                self.fill_dense(name, &state, target)?;
                report.loaded.push(name.to_owned());
                continue;
            }
            match self.info(name) {
                None => report.missing.push(name.to_owned()),
                Some(info) if info.shape != target.size() => report.mis_shaped.push(MisShaped {
                    name: name.to_owned(),
                    expected: target.size(),
                    got: info.shape.clone(),
                }),
                Some(_) => {
                    self.copy_into(name, target)?;
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

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| {
            Error::weights(
                &self.path,
                format!("there is no tensor `{name}`"),
                "use the checkpoint the config belongs to",
            )
        })
    }

    /// Maps `file`, finds out its format and adds its tensors. Returns the names added.
    fn add_file(&mut self, file: &Path) -> Result<Vec<String>> {
        let handle = File::open(file).map_err(Error::io(file, "open"))?;
        // SAFETY: the mapping is read-only and private; the module docs say what happens if another process truncates it.
        let bytes = unsafe { Mmap::map(&handle) }.map_err(Error::io(file, "map"))?;
        let named_safetensors = file.extension().is_some_and(|e| e == "safetensors");
        let (entries, metadata) = if bytes.starts_with(b"version https://git-lfs") {
            return Err(Error::weights(
                file,
                "is a Git LFS pointer, not the weights",
                "run `git lfs pull` in its repository or download the file itself",
            ));
        } else if !named_safetensors && pth::looks_like(&bytes) {
            (pth::entries(file, &bytes)?, HashMap::new())
        } else if file.extension().is_some_and(|e| e == "pth" || e == "pt" || e == "bin") {
            return Err(Error::weights(
                file,
                format!("is not a PyTorch file ({} bytes)", bytes.len()),
                "the file is empty, incomplete or something else: download or copy it again",
            ));
        } else {
            safetensors::entries(file, &bytes)?
        };
        let index = self.files.len();
        self.files.push(Mapped { path: file.to_owned(), bytes });
        let mut added = Vec::with_capacity(entries.len());
        for (name, mut entry) in entries {
            entry.file = index;
            if let Some(other) = self.entries.insert(name.clone(), entry) {
                return Err(Error::weights(
                    file,
                    format!("`{name}` is already in `{}`", self.files[other.file].path.display()),
                    "remove one of the two files or write the checkpoint again",
                ));
            }
            added.push(name);
        }
        self.names.extend(added.iter().cloned());
        self.metadata.extend(metadata);
        Ok(added)
    }

    fn copy_entry(&self, entry: &Entry, target: &mut Tensor) -> Result<(), tch::TchError> {
        let mapped = &self.files[entry.file].bytes;
        let size = entry.info.kind.elt_size_in_bytes();
        let total = entry.span / size;
        if total == 0 {
            return Ok(());
        }
        if let Some(strides) = &entry.strides {
            let flat = flat_view(&mapped[entry.start..entry.start + entry.span], entry.info.kind)?;
            target.f_copy_(&flat.f_as_strided(&entry.info.shape, strides, 0)?)?;
            release(mapped, entry.start, entry.span);
            return Ok(());
        }
        if !target.is_contiguous() {
            let flat = flat_view(&mapped[entry.start..entry.start + entry.span], entry.info.kind)?;
            target.f_copy_(&flat.f_view(entry.info.shape.as_slice())?)?;
            release(mapped, entry.start, entry.span);
            return Ok(());
        }
        let rows = target.f_view([-1])?;
        for from in (0..total).step_by(CHUNK / size) {
            let count = (CHUNK / size).min(total - from);
            let start = entry.start + from * size;
            let flat = flat_view(&mapped[start..start + count * size], entry.info.kind)?;
            #[expect(clippy::cast_possible_wrap, reason = "an element count of a mapped file is far below 2^63")]
            rows.f_narrow(0, from as i64, count as i64)?.f_copy_(&flat)?;
            release(mapped, start, count * size);
        }
        Ok(())
    }
}

/// A one-dimensional tensor over `bytes`: a view when they are aligned for `kind`, a copy otherwise.
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

/// Gives the whole pages of a range back: their content is on disk and comes again if it is touched.
fn release(mapped: &Mmap, start: usize, len: usize) {
    // SAFETY: DONTNEED on a read-only file mapping discards no data, later reads fault the pages in again. A failure
    // costs memory, not correctness.
    let _ = unsafe { mapped.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
}

/// libtorch's error as ours.
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
