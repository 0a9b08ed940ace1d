//! Writes the bytes of a safetensors file, one tensor after another.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::Path;

use tch::{Device, Kind, Tensor, no_grad};

use super::safetensors::dtype_of;
use super::torch;
use crate::META;
use prsmed_base::error::{Error, Result};

/// Bytes per write to the file and to the checksum.
pub(super) const CHUNK: usize = 4 << 20;

/// Name, dtype and shape of a tensor in the header of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Key.
    pub name: String,
    /// Dtype.
    pub kind: Kind,
    /// Shape.
    pub shape: Vec<i64>,
}

impl TensorSpec {
    /// Size of the tensor in bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|&d| u64::try_from(d).unwrap_or(0)).product::<u64>() * crate::kind_bytes(self.kind)
    }
}

/// Writes `tensors` to `out`. Errors name `path`.
pub(super) fn all<N: AsRef<str>>(
    path: &Path,
    out: &mut dyn Write,
    tensors: &[(N, &Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let spec = |(name, tensor): &(N, &Tensor)| TensorSpec {
        name: name.as_ref().to_owned(),
        kind: tensor.kind(),
        shape: tensor.size(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let by_name: HashMap<&str, &Tensor> = tensors.iter().map(|(name, tensor)| (name.as_ref(), *tensor)).collect();
    one_by_one(path, out, &specs, metadata, &mut |name| Ok(by_name[name].shallow_clone()))
}

/// Writes the tensors that `read` returns one at a time. They must match `specs`.
pub(super) fn one_by_one(
    path: &Path,
    out: &mut dyn Write,
    specs: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    read: &mut dyn FnMut(&str) -> Result<Tensor>,
) -> Result<()> {
    let mut seen = HashSet::new();
    if let Some(spec) = specs.iter().find(|spec| !seen.insert(&spec.name)) {
        return Err(Error::weights(path, format!("would contain `{}` twice", spec.name), "rename one of the tensors"));
    }
    // wide dtypes first, so that every tensor starts at a multiple of its element size
    let mut order: Vec<&TensorSpec> = specs.iter().collect();
    order.sort_by_key(|spec| (std::cmp::Reverse(spec.kind.elt_size_in_bytes()), &spec.name));

    out.write_all(&header(path, &order, metadata)?).map_err(Error::io(path, "write"))?;
    for spec in order {
        let tensor = read(&spec.name)?;
        if tensor.kind() != spec.kind || tensor.size() != spec.shape {
            let reason = format!("`{}` is {:?} {:?}, expected {spec:?}", spec.name, tensor.kind(), tensor.size());
            return Err(Error::weights(path, reason, "use the config that belongs to these weights"));
        }
        let flat =
            no_grad(|| tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()).map_err(|error| torch(&error))?;
        let length = flat.numel() * flat.kind().elt_size_in_bytes();
        if length == 0 || flat.device() == META {
            continue;
        }
        // SAFETY: `flat` is contiguous on the CPU, holds `length` bytes and outlives the slice.
        let bytes = unsafe { std::slice::from_raw_parts(flat.data_ptr().cast::<u8>().cast_const(), length) };
        for chunk in bytes.chunks(CHUNK) {
            out.write_all(chunk).map_err(Error::io(path, "write"))?;
        }
    }
    Ok(())
}

/// The JSON header with its length before it, padded with spaces to a multiple of eight bytes.
fn header(path: &Path, order: &[&TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let mut pairs = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    pairs.extend(metadata.clone());
    let mut fields = serde_json::Map::new();
    fields.insert("__metadata__".into(), serde_json::json!(pairs));
    let mut at = 0;
    for spec in order {
        let TensorSpec { name, kind, shape } = *spec;
        let dtype = dtype_of(*kind).ok_or_else(|| {
            Error::weights(path, format!("`{name}` has the dtype {kind:?}, unknown to safetensors"), "convert it first")
        })?;
        let end = at + spec.bytes();
        fields.insert(name.clone(), serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let mut json = serde_json::to_vec(&fields).expect("a map of strings is JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}
