//! Writes tensors as `torch.save(state_dict, FILE)` does: a zip archive of a pickle and its storages.

use std::io::{Cursor, Write};
use std::path::Path;

use prsmed::tensor::{Kind, Tensor};
use zip::CompressionMethod;
use zip::write::{SimpleFileOptions, ZipWriter};

/// Writes fp32 tensors to `file`.
pub(crate) fn write(file: &Path, tensors: &[(String, Tensor)]) {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    zip.start_file("archive/data.pkl", stored).unwrap();
    zip.write_all(&pickle(tensors)).unwrap();
    for (key, (_, tensor)) in tensors.iter().enumerate() {
        let values = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap();
        zip.start_file(format!("archive/data/{key}"), stored).unwrap();
        zip.write_all(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    }
    std::fs::write(file, zip.finish().unwrap().into_inner()).unwrap();
}

/// A dictionary of `torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`.
fn pickle(tensors: &[(String, Tensor)]) -> Vec<u8> {
    let mut out = vec![0x80, 2, b'}', b'('];
    for (key, (name, tensor)) in tensors.iter().enumerate() {
        string(&mut out, name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        string(&mut out, "storage");
        out.extend(b"ctorch\nFloatStorage\n");
        string(&mut out, &key.to_string());
        string(&mut out, "cpu");
        integer(&mut out, i64::try_from(tensor.numel()).unwrap());
        out.extend(b"tQ");
        integer(&mut out, 0);
        for sizes in [tensor.size(), tensor.contiguous().stride()] {
            out.push(b'(');
            for size in sizes {
                integer(&mut out, size);
            }
            out.push(b't');
        }
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    out
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    out.extend(text.as_bytes());
}

fn integer(out: &mut Vec<u8>, value: i64) {
    out.push(b'J');
    out.extend(i32::try_from(value).unwrap().to_le_bytes());
}
