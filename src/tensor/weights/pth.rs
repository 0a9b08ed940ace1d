//! PyTorch's files (`.pth`, `.pt`, `pytorch_model.bin`), read without executing their pickles. Both formats are
//! supported: the zip archive, and the format before 1.6 (pickles followed by the storages).

use super::pickle::{ParseBudget, Pickle, PickleError, TensorRef, Value};
use super::stored_zip::{self, ZipEntry};
use super::{StoredTensor, StoredTensors, TensorInfo};
use prsmed_base::error::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Limit of a tensor whose strides repeat elements (`Tensor.expand` in PyTorch), relative to the size of the file.
const MAX_EXPANSION: usize = 64;

/// Keys under which a training checkpoint may store its state dict.
const INNER: [&str; 5] = ["state_dict", "model_state_dict", "model", "module", "net"];

const RESAVE: &str = "load it in PyTorch and write it again with `torch.save(model.state_dict(), FILE)`";
const AGAIN: &str = "the file is incomplete or damaged: download or copy it again";

/// First bytes of a file from before PyTorch 1.6: a pickle of its magic number.
const LEGACY: [u8; 15] = [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];

/// True for a zip archive, and for a bare pickle or tar file of old PyTorch versions.
pub(super) fn looks_like(bytes: &[u8]) -> bool {
    is_zip(bytes) || matches!(bytes, [0x80, 1..=5, ..]) || bytes.get(257..262) == Some(b"ustar")
}

fn is_zip(bytes: &[u8]) -> bool {
    bytes.starts_with(b"PK")
}

fn load_error(file: &Path) -> impl Fn(PickleError) -> Error + '_ {
    move |error| match error {
        PickleError::Executes(name) => Error::weights(
            file,
            format!("refuses to execute `{name}`: only tensors are read from a pickle"),
            format!("if you trust the file, {RESAVE}"),
        ),
        PickleError::Malformed(reason) => Error::weights(file, reason, AGAIN),
    }
}

/// The tensors of a file in the order of its state dict.
pub(super) fn entries(file: &Path, bytes: &[u8]) -> Result<StoredTensors> {
    let (pickle, parts, mut budget) = if is_zip(bytes) {
        let (pickle, parts) = open(file, bytes)?;
        let mut budget = ParseBudget::new(pickle.len());
        (Pickle::read(pickle, &mut budget).map_err(load_error(file))?, parts, budget)
    } else if bytes.starts_with(&LEGACY) {
        let mut budget = ParseBudget::new(bytes.len());
        let (pickle, parts) = open_legacy(bytes, &mut budget).map_err(load_error(file))?;
        (pickle, parts, budget)
    } else {
        let reason = "is a bare pickle or a tar archive, not a file of PyTorch 0.4 or later";
        let hint = "load it in PyTorch (`torch.load(FILE, weights_only=True)`) and write it again with `torch.save`";
        return Err(Error::weights(file, reason, hint));
    };
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    for (name, tensor) in state_dict(file, &pickle)? {
        if !seen.insert(name) {
            return Err(Error::weights(file, format!("contains `{name}` twice"), RESAVE));
        }
        let size = size_of::<StoredTensor>() + name.len() + size_of::<i64>() * 2 * tensor.shape.len();
        budget.take(size).map_err(load_error(file))?;
        let entry =
            place(tensor, &parts).map_err(|reason| Error::weights(file, format!("`{name}` {reason}"), AGAIN))?;
        let needed = bytes_of(&entry.info);
        if needed > bytes.len().saturating_mul(MAX_EXPANSION).saturating_add(1 << 20) {
            let reason = format!(
                "`{name}` of shape {:?} repeats a few elements; it needs more than {MAX_EXPANSION} times the memory of \
                 the file",
                entry.info.shape
            );
            return Err(Error::weights(file, reason, RESAVE));
        }
        found.push((name.to_owned(), entry));
    }
    Ok(found)
}

/// Byte range of each `data/KEY` in the file.
type Parts = HashMap<String, Range<usize>>;

/// The pickle's bytes and the location of every storage.
fn open<'b>(file: &Path, bytes: &'b [u8]) -> Result<(&'b [u8], Parts)> {
    let entries = stored_zip::entries(bytes).map_err(|reason| {
        let reason = format!("is not a complete zip archive ({} bytes): {reason}", bytes.len());
        Error::weights(file, reason, AGAIN)
    })?;
    let pickles = entries.iter().filter(|entry| entry.name == "data.pkl" || entry.name.ends_with("/data.pkl"));
    let pickle = pickles.min_by_key(|entry| entry.name.len()).ok_or_else(|| {
        Error::weights(file, "is a zip archive without `data.pkl`, so not a PyTorch file", "give a PyTorch file")
    })?;
    let compressed =
        |entry: &ZipEntry| Error::weights(file, format!("stores `{}` compressed or encrypted", entry.name), RESAVE);
    let prefix = pickle.name.trim_end_matches("data.pkl");
    if !pickle.is_stored {
        return Err(compressed(pickle));
    }
    let content = &bytes[pickle.range.clone()];
    if crc32fast::hash(content) != pickle.crc {
        return Err(Error::weights(file, format!("`{}` has a wrong checksum", pickle.name), AGAIN));
    }

    let mut parts = HashMap::new();
    for entry in &entries {
        let Some(name) = entry.name.strip_prefix(prefix) else { continue };
        if name == "byteorder" {
            let order = String::from_utf8_lossy(&bytes[entry.range.clone()]);
            if order.trim() != "little" {
                let order: String = order.trim().chars().take(16).collect();
                return Err(Error::weights(file, format!("has the byte order `{order}`"), RESAVE));
            }
        }
        let Some(key) = name.strip_prefix("data/") else { continue };
        if !entry.is_stored {
            return Err(compressed(entry));
        }
        parts.insert(key.to_owned(), entry.range.clone());
    }
    Ok((content, parts))
}

/// Reads a file from before PyTorch 1.6: its pickle and the location of every storage. The file has pickles of a magic
/// number, a version, the system's sizes, the object and the storages' keys. Then each key has its element count (8
/// bytes) and its elements.
fn open_legacy(bytes: &[u8], budget: &mut ParseBudget) -> std::result::Result<(Pickle, Parts), PickleError> {
    let short = || PickleError::Malformed("its storages end early".into());
    let mut at = LEGACY.len();
    let mut next = || {
        let (pickle, length) = Pickle::read_first(&bytes[at..], budget)?;
        at += length;
        Ok::<_, PickleError>(pickle)
    };
    let (_version, _system, object, keys) = (next()?, next()?, next()?, next()?);
    let keys =
        keys.strings(&keys.top).ok_or_else(|| PickleError::Malformed("its list of storages is not a list".into()))?;
    let kinds: HashMap<&str, usize> =
        object.storages.iter().map(|storage| (&*storage.key, storage.kind.elt_size_in_bytes())).collect();
    let mut parts = HashMap::new();
    for key in keys {
        let size =
            *kinds.get(key).ok_or_else(|| PickleError::Malformed(format!("its object has no storage `{key}`")))?;
        let count = bytes.get(at..at.saturating_add(8)).and_then(|count| count.try_into().ok()).ok_or_else(short)?;
        let length = usize::try_from(u64::from_le_bytes(count)).ok().and_then(|count| count.checked_mul(size));
        let start = at + 8;
        let end = length.and_then(|length| start.checked_add(length)).filter(|&end| end <= bytes.len());
        at = end.ok_or_else(short)?;
        parts.insert(key.to_owned(), start..at);
    }
    Ok((object, parts))
}

/// The named tensors: the dictionary itself, or the state dict inside a training checkpoint.
fn state_dict<'p>(file: &Path, pickle: &'p Pickle) -> Result<Vec<(&'p str, &'p TensorRef)>> {
    let wrong = |reason: String| Err(Error::weights(file, reason, RESAVE));
    let Some(top) = pickle.dict(&pickle.top) else { return wrong("contains no dictionary of tensors".into()) };
    let direct = tensors(top);
    if !direct.is_empty() {
        return Ok(direct);
    }
    let inner: Vec<(&str, &[(Value, Value)])> = top
        .iter()
        .filter_map(|(key, value)| Some((key.text()?, pickle.dict(value)?)))
        .filter(|(_, pairs)| !tensors(pairs).is_empty())
        .collect();
    let named = INNER.iter().find_map(|name| inner.iter().position(|(key, _)| key == name));
    let position = if inner.len() == 1 { Some(0) } else { named };
    if let Some((_, pairs)) = position.and_then(|position| inner.get(position)) {
        return Ok(tensors(pairs));
    }
    let keys = top.iter().filter_map(|(key, _)| key.text()).take(20);
    let keys: Vec<String> = keys.map(|key| key.chars().take(100).collect()).collect();
    wrong(format!("contains no state dict (its keys: `{}`)", keys.join("`, `")))
}

fn tensors(pairs: &[(Value, Value)]) -> Vec<(&str, &TensorRef)> {
    pairs
        .iter()
        .filter_map(|(key, value)| match (key, value) {
            (Value::Str(key), Value::Tensor(tensor)) => Some((&**key, &**tensor)),
            _ => None,
        })
        .collect()
}

/// Checks the view against its storage. The error text follows the name of the tensor.
fn place(tensor: &TensorRef, parts: &Parts) -> std::result::Result<StoredTensor, String> {
    let TensorRef { storage, offset, shape, strides } = tensor;
    let part = parts.get(&*storage.key).ok_or_else(|| format!("is in `data/{}`, which is missing", storage.key))?;
    let size = storage.kind.elt_size_in_bytes();
    let bounds = || {
        if shape.len() != strides.len() || shape.iter().chain(strides).chain([offset]).any(|&n| n < 0) {
            return None;
        }
        let numel = shape.iter().try_fold(1_i64, |n, &d| n.checked_mul(d))?;
        let last = shape.iter().zip(strides).try_fold(0_i64, |sum, (&d, &s)| sum.checked_add((d - 1).checked_mul(s)?));
        let elements = if numel == 0 { 0 } else { last?.checked_add(1)? };
        let end = usize::try_from(offset.checked_add(elements)?).ok()?;
        let in_storage = end <= usize::try_from(storage.num_elements).ok()?;
        let in_part = end.checked_mul(size)? <= part.len();
        (in_storage && in_part).then_some((usize::try_from(elements).ok()?, usize::try_from(*offset).ok()?))
    };
    let (elements, offset) = bounds().ok_or_else(|| {
        format!(
            "of shape {shape:?} and strides {strides:?} extends past its storage of {} elements ({} bytes)",
            storage.num_elements,
            part.len()
        )
    })?;
    let info = TensorInfo { kind: storage.kind, shape: shape.clone() };
    let strides = if in_order(shape, strides) { None } else { Some(strides.clone()) };
    Ok(StoredTensor { file: 0, info, strides, start: part.start + offset * size, span: elements * size })
}

/// Bytes of a tensor with memory of its own.
fn bytes_of(info: &TensorInfo) -> usize {
    let size = |dim: &i64| usize::try_from(*dim).unwrap_or(usize::MAX);
    info.shape.iter().map(size).fold(info.kind.elt_size_in_bytes(), usize::saturating_mul)
}

fn in_order(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1_i64;
    shape.iter().zip(strides).rev().all(|(&d, &s)| {
        let fits = d == 1 || s == expected;
        expected = expected.saturating_mul(d);
        fits
    })
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::super::pickle::Storage;
    use super::*;

    #[test]
    fn strides_of_dimensions_of_size_one_are_ignored() {
        assert!(in_order(&[2, 1, 3], &[3, 99, 1]));
        assert!(in_order(&[], &[]));
        assert!(!in_order(&[2, 3], &[1, 2]));
        assert!(!in_order(&[2, 3], &[0, 1]));
    }

    #[test]
    fn views_past_their_storage_are_an_error() {
        let parts = HashMap::from([("0".to_owned(), 100..196)]);
        let place_of = |elements, offset, shape: &[i64], strides: &[i64]| {
            let storage = Storage { kind: Kind::Float, key: "0".into(), num_elements: elements };
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            place(&TensorRef { storage: storage.into(), offset, shape, strides }, &parts)
        };
        let entry = place_of(24, 2, &[2, 3], &[6, 1]).unwrap();
        assert_eq!((entry.start, entry.span), (108, 36));
        assert!(place_of(24, 0, &[4, 6], &[6, 1]).is_ok());
        for (elements, offset, shape, strides) in [
            (23, 0, [4, 6], [6, 1]),
            (30, 1, [4, 6], [6, 1]),
            (24, -1, [4, 6], [6, 1]),
            (24, 0, [4, -6], [6, 1]),
            (24, 0, [4, 6], [-6, 1]),
            (24, 0, [i64::MAX, 2], [i64::MAX, 1]),
            (i64::MAX, i64::MAX, [2, 2], [1, 1]),
        ] {
            let reason = place_of(elements, offset, &shape, &strides).unwrap_err();
            assert!(reason.contains("extends past its storage"), "{reason}");
        }
        assert!(place_of(24, 0, &[4, 6], &[6]).is_err());
    }
}
