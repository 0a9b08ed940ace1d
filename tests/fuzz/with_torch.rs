//! Targets that need libtorch: weights, checkpoints and settings of trainings.

use std::fs;
use std::io::{Cursor, Write};
use std::sync::OnceLock;

use prsmed::augment::export::{Export, Journal};
use prsmed::config::{AugmentRun, RunConfig, Sources};
use prsmed::models::prsmed::{BuildOptions, PrsMed};
use prsmed::segment::setup::{self, RANDOM};
use prsmed::tensor::weights::{Archive, verify_folder};
use prsmed::tensor::{Device, Kind, META, Tensor, guard, kind_bytes, ledger, meta};

use crate::targets::{MAX_MEMORY, file, folder, limited, parts};

/// The pickle of a PyTorch archive. It may take 64 times its own size.
pub fn pickle(bytes: &[u8]) {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, content) in [("a/data.pkl", bytes), ("a/data/0", [0; 64].as_slice())] {
        zip.start_file(name, stored).expect("started");
        zip.write_all(content).expect("written");
    }
    let folder = folder();
    let path = file(&folder, "model.pth", zip.finish().expect("finished").get_ref());
    let opened = limited(64 * bytes.len() + (4 << 20), || Archive::open(&path));
    if let Ok(archive) = opened {
        read(&archive, bytes.len());
    }
}

/// A PyTorch file: a zip archive, or the format before PyTorch 1.6.
pub fn pth(bytes: &[u8]) {
    let folder = folder();
    let path = file(&folder, "model.pth", bytes);
    let opened = limited(64 * bytes.len() + (4 << 20), || Archive::open(&path));
    if let Ok(archive) = opened {
        read(&archive, bytes.len());
    }
}

/// A `.safetensors` file. If the input has a NUL byte after a `{`: a shard index before the byte and the shard
/// `a.safetensors` after it.
pub fn safetensors(bytes: &[u8]) {
    let folder = folder();
    let mut files = parts(bytes, 0, 2);
    if let (true, Some(index), Some(shard)) = (bytes.starts_with(b"{"), files.next(), files.next()) {
        file(&folder, "model.safetensors.index.json", index);
        file(&folder, "a.safetensors", shard);
    } else {
        file(&folder, "model.safetensors", bytes);
    }
    let opened = limited(MAX_MEMORY, || Archive::open(folder.path()));
    if let Ok(archive) = opened {
        read(&archive, bytes.len());
    }
}

/// Reads every tensor of an archive of `size` bytes, and loads those that claim to be quantized. A tensor may take 64
/// times the size of the archive.
fn read(archive: &Archive, size: usize) {
    let max = 64 * size as u64 + (4 << 20);
    let mut targets = Vec::new();
    for name in archive.names() {
        let info = archive.info(name).expect("a name of the archive");
        let sizes = info.shape.iter().map(|&size| u64::try_from(size).expect("a size"));
        assert!(sizes.fold(kind_bytes(info.kind), u64::saturating_mul) <= max, "{info:?}");
        let shape = info.shape.clone();
        if archive.is_quantized(name) {
            targets.push((name.clone(), Tensor::zeros([2, 64], (Kind::Float, Device::Cpu))));
        }
        if let Ok(tensor) = archive.read(name) {
            assert_eq!(tensor.size(), shape);
            targets.push((name.clone(), tensor));
        }
    }
    let quantized: Vec<String> = archive.names().iter().filter_map(|name| quantized_weight(name)).collect();
    targets.extend(quantized.into_iter().map(|name| (name, Tensor::zeros([2, 64], (Kind::Float, Device::Cpu)))));
    if let Ok(report) = archive.load(&mut targets, |_| false) {
        let _ = report.into_result(archive.path());
    }
}

/// The weight to which the state of a 4-bit matrix belongs.
fn quantized_weight(name: &str) -> Option<String> {
    name.strip_suffix(".quant_state.bitsandbytes__nf4").map(str::to_owned)
}

/// The journal of generated pairs (`manifest.jsonl`).
pub fn journal(bytes: &[u8]) {
    let outer = folder();
    let root = outer.path().join("pairs");
    fs::create_dir(&root).expect("created");
    let path = file(&outer, "pairs/manifest.jsonl", bytes);
    limited(256 * bytes.len() + (4 << 20), || {
        let records = Journal::read(&path);
        let opened = Export::open(&root);
        assert_eq!(records.is_ok(), opened.is_ok(), "{records:?}, {opened:?}");
        if let Ok(export) = opened {
            assert_eq!(export.journal.records.len(), records.map_or(0, |records| records.len()));
            let _ = export.write_annotations();
        }
    });
    let names: Vec<_> =
        fs::read_dir(outer.path()).expect("listed").map(|entry| entry.expect("listed").path()).collect();
    assert_eq!(names, [root], "a journal must not write outside of its folder");
}

/// The description of a checkpoint (`model.json`), up to a model on the meta device.
pub fn model_json(bytes: &[u8]) {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        ledger::install();
        meta::install().expect("installed");
    });
    let folder = folder();
    file(&folder, "model.json", bytes);
    limited(MAX_MEMORY, || {
        let Ok(description) = setup::describe(folder.path()) else { return };
        let model = &description.model;
        let options = BuildOptions {
            device: META,
            stored: Kind::BFloat16,
            compute: Kind::BFloat16,
            initialise: false,
            train_base: model.train_base,
            quantization: model.quantization,
            loads_base: model.base != RANDOM,
            host_layers: model.stream_layers.count(),
            host_vision: model.stream_vision,
            packed_attention: model.packed_attention,
            ranks: 1,
            reads_layers: true,
        };
        if let Err(error) = guard::guard(|| Ok(PrsMed::new(&description.sizes, options))) {
            let text = error.to_string();
            let is_bug = ["attempt to", "out of bounds", "out of range", "unwrap()", "assertion"];
            assert!(!is_bug.iter().any(|part| text.contains(part)), "{text}");
        }
    });
}

/// The checksums of a checkpoint folder (`checksums.json`).
pub fn checksums(bytes: &[u8]) {
    let outer = folder();
    fs::create_dir_all(outer.path().join("run/sub")).expect("created");
    file(&outer, "run/a", b"hello\n");
    file(&outer, "run/sub/b", b"");
    // a file outside of the folder that no checksum may read
    file(&outer, "outside", b"hello\n");
    file(&outer, "run/checksums.json", bytes);
    limited(256 * bytes.len() + (4 << 20), || {
        if verify_folder(&outer.path().join("run")).is_ok() {
            assert!(
                !bytes.windows(10).any(|part| part == b"\"../outsid"),
                "a checksum of a file outside of the folder"
            );
        }
    });
}

/// Settings of a training or of generated pairs (TOML).
pub fn config(bytes: &[u8]) {
    let folder = folder();
    let path = file(&folder, "config.toml", bytes);
    limited(MAX_MEMORY, || {
        let sources = Sources { default_preset: "full".into(), file: Some(path), ..Sources::default() };
        if let Ok(resolved) = sources.resolve_as::<RunConfig>() {
            let again = file(&folder, "again.toml", resolved.to_toml().as_bytes());
            let again = Sources { file: Some(again), ..sources.clone() }.resolve_as::<RunConfig>();
            assert_eq!(again.expect("settings that were written").config, resolved.config);
            let model = &resolved.config.model;
            if model.base == RANDOM && model.image_encoder == RANDOM {
                let _ = setup::planned_sizes(model, &resolved.config.configs, resolved.config.lora, 6);
            }
        }
        if let Ok(resolved) = sources.resolve_as::<AugmentRun>() {
            let _ = resolved.to_toml();
        }
    });
}
