use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::*;
use crate::{labels, open};

/// A file of an array.
fn npy(kind: &str, shape: &str, numbers: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}), }}\n");
    let length = u16::try_from(header.len()).expect("short").to_le_bytes();
    [MAGIC, &[1, 0], &length, header.as_bytes(), numbers].concat()
}

fn npz(path: &Path, arrays: &[(&str, Vec<u8>)]) {
    let mut writer = ZipWriter::new(File::create(path).expect("a file"));
    for (name, bytes) in arrays {
        writer.start_file(format!("{name}.npy"), SimpleFileOptions::default()).expect("an entry");
        writer.write_all(bytes).expect("content");
    }
    writer.finish().expect("a file");
}

fn message(path: &str) -> String {
    let error = open(Path::new(path)).expect_err(path);
    format!("{error}\n{}", error.hint())
}

#[test]
fn arrays_of_medsam_are_found_by_their_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("CT_1.npz");
    let bytes: Vec<u8> = (0..24).collect();
    let spacing: Vec<u8> = [0.5_f64, 0.7, 3.0].iter().flat_map(|mm| mm.to_le_bytes()).collect();
    let gts: Vec<u8> = bytes.iter().map(|value| value % 3).collect();
    npz(
        &path,
        &[
            ("imgs", npy("|u1", "2, 3, 4", &bytes)),
            ("gts", npy("|u1", "2, 3, 4", &gts)),
            ("spacing", npy("<f8", "3,", &spacing)),
        ],
    );
    let volume = open(&path).expect("a volume");
    assert_eq!((volume.grid.size, volume.voxels.get(23)), ([4, 3, 2], Some(23.0)));
    assert_eq!(volume.grid.spacing(), [0.5, 0.7, 3.0]);
    assert_eq!(volume.grid.affine.orientation(), "LPS");
    assert!(volume.notes.iter().any(|note| note.contains("assumed to be left, posterior and superior")));
    let map = labels::open(&path).expect("labels");
    assert_eq!(map.values, gts.iter().copied().map(u16::from).collect::<Vec<_>>());
    let shown = path.display().to_string();
    assert_eq!(labels::open(Path::new(&format!("{shown}#imgs"))).expect("labels").values[5], 5);
    assert!(message(&format!("{shown}#masks")).contains("no array `masks`, but `gts`, `imgs`, `spacing`"));
    npz(&path, &[("a", npy("|u1", "2, 3", &bytes[..6])), ("b", npy("|u1", "2, 3", &bytes[..6]))]);
    let found = message(&shown);
    assert!(found.contains("2 arrays: `a`, `b`") && found.contains("CT_1.npz#imgs"), "{found}");
}

#[test]
fn arrays_that_cannot_be_used_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |bytes: &[u8]| -> PathBuf {
        let path = folder.path().join("a.npy");
        fs::write(&path, bytes).expect("written");
        path
    };
    let bytes = [7; 24];
    for (array, part) in [
        (npy("|O", "2, 3", &bytes), "the type `|O`"),
        (npy("<f2", "2, 3", &bytes), "the type `<f2`"),
        (npy("<c8", "2, 3", &bytes), "the type `<c8`"),
        (npy("|u1", "24,", &bytes), "the shape [24]"),
        (npy("|u1", "2, 2, 2, 3", &bytes), "the shape [2, 2, 2, 3]"),
        (npy("|u1", "2, -3", &bytes), "a wrong shape"),
        (npy("|u1", "0, 3", &bytes), "is empty"),
        (npy("|u1", "99999, 99999, 99999", &bytes), "more than 1073741824"),
        (npy("|u1", "5, 5", &bytes), "truncated"),
        (npy("|u1", "5, 5", &bytes)[..9].to_vec(), "no valid header"),
        ([MAGIC, &[2, 0, 255, 255, 255, 255]].concat(), "no valid header"),
        ([MAGIC, &[1, 0, 2, 0], b"{}"].concat(), "no type, no order or no shape"),
        (npy("<f4", "2, 3", &f32::NAN.to_le_bytes().repeat(6)), "6 of 6 voxels are NaN"),
    ] {
        let found = message(file(&array).to_str().expect("text"));
        assert!(found.contains("a.npy") && found.contains(part), "{found}");
    }
    let colours = file(&npy("|u1", "2, 4, 3", &(0..24).collect::<Vec<u8>>()));
    let volume = open(&colours).expect("colours");
    let Voxels::Rgb(values) = &volume.voxels else { panic!("colours") };
    assert_eq!((volume.grid.size, values[7]), ([4, 2, 1], [21, 22, 23]));
    assert!(labels::open(&colours).expect_err("colours").to_string().contains("colours, and no labels"));
}

/// A zip of some kilobytes whose arrays have gigabytes.
#[test]
fn bombs_are_refused_before_memory_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bomb.npz");
    npz(&path, &[("imgs", npy("|u1", "700, 1000, 1000", &vec![0; 1 << 20]))]);
    let found = message(path.to_str().expect("text"));
    assert!(found.contains("bomb.npz: its header promises 667 MiB, more than 200 times"), "{found}");
    assert!(found.contains("check where the file comes from"), "{found}");
    // many names
    let many: Vec<String> = (0..1001).map(|index| format!("a{index}")).collect();
    let arrays: Vec<(&str, Vec<u8>)> = many.iter().map(|name| (name.as_str(), npy("|u1", "1, 1", &[1]))).collect();
    npz(&path, &arrays);
    assert!(message(path.to_str().expect("text")).contains("more than 1000 files"));
    // a changed byte
    npz(&path, &[("imgs", npy("|u1", "2, 3", &[1, 2, 3, 4, 5, 6]))]);
    let mut bytes = fs::read(&path).expect("read");
    let at = bytes.windows(4).position(|found| found == b"PK\x01\x02").expect("a directory") + 16;
    bytes[at] ^= 1;
    fs::write(&path, bytes).expect("written");
    let found = message(path.to_str().expect("text"));
    assert!(found.contains("checksum is wrong"), "{found}");
}
