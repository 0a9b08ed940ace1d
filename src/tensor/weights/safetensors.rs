//! Headers of `.safetensors` files, shard indexes (`*.index.json`), and the weight file of a checkpoint folder.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Component, Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, SafeTensors};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use tch::Kind;

use super::{Archive, StoredTensor, StoredTensors, TensorInfo};
use prsmed_base::error::{Error, Result, quoted};
use prsmed_base::files;
use prsmed_base::units::Bytes;

const AGAIN: &str = "the file is incomplete: delete it and download or copy it again";

/// Limit of the header of a file, in bytes. That of 100,000 tensors has about 10 MB.
const MAX_HEADER: u64 = 32 << 20;
/// Limit of a shard index, in bytes.
const MAX_INDEX: u64 = 32 << 20;
/// Most shards of a model. The largest models have some hundreds.
const MAX_SHARDS: usize = 10_000;

/// Weights in one file, and the index of those in several. `transformers` reads the first too, if a folder has both.
pub(super) const SINGLE_OR_INDEX: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];
/// File names of the weights in a checkpoint folder, in order of preference.
const MAIN_FILES: [&str; 5] = [
    SINGLE_OR_INDEX[0],
    SINGLE_OR_INDEX[1],
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// The file to open in a checkpoint folder.
pub(super) fn main_file(folder: &Path) -> Result<PathBuf> {
    MAIN_FILES.iter().map(|name| folder.join(name)).find(|file| file.exists()).ok_or_else(|| {
        let reason = format!("holds none of `{}`", MAIN_FILES.join("`, `"));
        Error::weights(folder, reason, "give a checkpoint folder or the weight file itself")
    })
}

/// The tensors of one file in file order, and its string metadata.
pub(super) fn entries(file: &Path, bytes: &[u8]) -> Result<(StoredTensors, HashMap<String, String>)> {
    let (data_start, header) = header(file, bytes)?;
    let mut found = Vec::new();
    for name in header.offset_keys() {
        let info = header.info(&name).expect("the name was listed by the same header");
        let kind = kind_of(info.dtype).ok_or_else(|| {
            let reason = format!("`{name}` has the dtype {:?}, which is not supported", info.dtype);
            Error::weights(file, reason, "convert the checkpoint to bf16, fp16 or fp32")
        })?;
        let shape =
            info.shape.iter().map(|&d| i64::try_from(d)).collect::<Result<_, _>>().map_err(|_| {
                Error::weights(file, format!("`{name}` has the impossible shape {:?}", info.shape), AGAIN)
            })?;
        let (from, to) = info.data_offsets;
        let info = TensorInfo { kind, shape };
        found.push((name, StoredTensor { file: 0, info, strides: None, start: data_start + from, span: to - from }));
    }
    Ok((found, header.metadata().clone().unwrap_or_default()))
}

/// A JSON object in which no key is repeated.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Self;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = HashSet::new();
        while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
            if let Some(key) = seen.replace(key) {
                return Err(serde::de::Error::custom(format!("the key `{key}` is there twice")));
            }
        }
        Ok(self)
    }
}

fn header(file: &Path, bytes: &[u8]) -> Result<(usize, Metadata)> {
    let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    if length > MAX_HEADER && length <= bytes.len() as u64 {
        let reason = format!("has a header of {length} bytes; {MAX_HEADER} are the limit");
        return Err(Error::weights(file, reason, "write the weights to several files"));
    }
    let error = match SafeTensors::read_metadata(bytes) {
        Ok((length, header)) => {
            // the crate keeps the last of several tensors with one name
            serde_json::from_slice::<UniqueKeys>(&bytes[8..8 + length])
                .map_err(|error| Error::weights(file, format!("has a wrong header: {error}"), AGAIN))?;
            return Ok((8 + length, header));
        }
        Err(error) => error,
    };
    let found = bytes.len() as u64;
    if let Some(expected) = expected_size(bytes)
        && expected != found
    {
        let (what, hint) = if found < expected {
            ("is truncated", AGAIN)
        } else {
            let again = "its header and its bytes do not belong together: delete it and download or copy it again";
            ("has bytes after its last tensor", again)
        };
        let reason =
            format!("{what}: expected {expected} bytes ({}), found {found} ({})", Bytes(expected), Bytes(found));
        return Err(Error::weights(file, reason, hint));
    }
    let reason = format!("is not a readable safetensors file ({found} bytes): {error}");
    Err(Error::weights(file, reason, "check that it is a `.safetensors` file and download or copy it again"))
}

/// File size according to the header. If the file ends inside its header: at least the size of the header. `None` if
/// the header's length is not plausible.
fn expected_size(bytes: &[u8]) -> Option<u64> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    if length > 100_000_000 {
        return None;
    }
    let end = 8 + usize::try_from(length).ok()?;
    let Some(header) = bytes.get(8..end) else { return Some(end as u64) };
    let header: Metadata = serde_json::from_slice(header).ok()?;
    Some((end + header.data_len()) as u64)
}

/// The supported dtypes: in libtorch, in safetensors, and as a storage in PyTorch's pickles.
pub(super) const DTYPES: [(Kind, Dtype, &str); 10] = [
    (Kind::Bool, Dtype::BOOL, "BoolStorage"),
    (Kind::Uint8, Dtype::U8, "ByteStorage"),
    (Kind::Int8, Dtype::I8, "CharStorage"),
    (Kind::Int16, Dtype::I16, "ShortStorage"),
    (Kind::Int, Dtype::I32, "IntStorage"),
    (Kind::Int64, Dtype::I64, "LongStorage"),
    (Kind::Half, Dtype::F16, "HalfStorage"),
    (Kind::BFloat16, Dtype::BF16, "BFloat16Storage"),
    (Kind::Float, Dtype::F32, "FloatStorage"),
    (Kind::Double, Dtype::F64, "DoubleStorage"),
];

fn kind_of(dtype: Dtype) -> Option<Kind> {
    DTYPES.iter().find(|(_, known, _)| *known == dtype).map(|(kind, ..)| *kind)
}

/// The dtype `kind` in a safetensors header.
pub(super) fn dtype_of(kind: Kind) -> Option<Dtype> {
    DTYPES.iter().find(|(known, ..)| *known == kind).map(|(_, dtype, _)| *dtype)
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Adds every shard of an index, and checks that each shard has the tensors that the index lists.
pub(super) fn open_index(archive: &mut Archive, file: &Path) -> Result<()> {
    let text = files::read(file, MAX_INDEX).map_err(Error::io(file, "read"))?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| Error::weights(file, format!("is not a shard index: {error}"), "download or copy it again"))?;
    let folder = file.parent().unwrap_or(Path::new("."));
    let mut shards: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
    for (name, shard) in &index.weight_map {
        let mut parts = Path::new(shard).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            let reason = format!("places `{name}` in `{shard}`, which is not a file in the folder of the index");
            let hint = "do not use this checkpoint: an index must name files of its own folder";
            return Err(Error::weights(file, reason, hint));
        }
        shards.entry(shard).or_default().insert(name);
    }
    if shards.len() > MAX_SHARDS {
        let reason = format!("names {} shards; {MAX_SHARDS} are the limit", shards.len());
        return Err(Error::weights(file, reason, "download or copy it again"));
    }
    let missing: Vec<&str> = shards.keys().copied().filter(|shard| !folder.join(shard).exists()).collect();
    if !missing.is_empty() {
        let reason = format!("{} of {} shards are missing: {}", missing.len(), shards.len(), quoted(&missing));
        return Err(Error::weights(file, reason, "download or copy the missing shards into the same folder"));
    }
    for (shard, promised) in shards {
        let path = folder.join(shard);
        let held: HashSet<String> = archive.add_file(&path)?.into_iter().collect();
        let mut absent: Vec<&str> = promised.into_iter().filter(|name| !held.contains(*name)).collect();
        if !absent.is_empty() {
            absent.sort_unstable();
            let reason = format!("lacks {} tensors that the index lists: {}", absent.len(), quoted(&absent));
            let hint = "index and shard belong to different revisions: download both again";
            return Err(Error::weights(path, reason, hint));
        }
    }
    Ok(())
}
