//! Parity of LoRA files from diffusers and peft: every module is found, and the merged weights equal
//! those of diffusers.

use crate::fixture::{archive, relative_error};
use prsmed::models::diffusion::lora::{self, Adapter, LoraNetwork};
use prsmed::tensor::store::{Init, Role, Store, StoreOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity/lora_files")
}

/// The weights of one network before the merge.
fn store(component: LoraNetwork) -> Store {
    let base = archive(&folder().join("base.safetensors"));
    let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
    for name in base.names() {
        let Some(own) = name.strip_prefix(&format!("{}.", component.name())) else { continue };
        let value = base.read(name).expect("a tensor");
        let mut place = store.root(Role::Frozen).param(own, &value.size(), Init::Const(0.0));
        place.copy_(&value);
    }
    store
}

/// Merges the adapters of `path` into both networks and compares with diffusers. Returns their numbers.
fn check(path: &Path, strength: f64) -> (usize, usize) {
    let adapters = lora::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let merged = archive(&folder().join("merged.safetensors"));
    let counts = [LoraNetwork::Unet, LoraNetwork::TextEncoder].map(|component| {
        let own: Vec<&Adapter> = adapters.iter().filter(|adapter| adapter.component == component).collect();
        let store = store(component);
        let changed = lora::merge(&store, own.iter().copied(), strength).expect("every module exists");
        for name in &changed {
            let want = merged.read(&format!("{}.{name}", component.name())).expect("a changed weight");
            let error = relative_error(&store.get(name).expect("a weight"), &want);
            assert!(error < 1e-6, "{}: {name}: relative error {error:.1e}", path.display());
        }
        changed.len()
    });
    assert_eq!(adapters.len(), counts[0] + counts[1], "{}", path.display());
    (counts[0], counts[1])
}

#[test]
fn files_of_all_writers_give_the_weights_of_diffusers() {
    let text = std::fs::read_to_string(folder().join("meta.json")).expect("meta.json");
    let meta: Value = serde_json::from_str(&text).expect("json");
    let strength = meta["strength"].as_f64().expect("a number");
    let count = |name: &str| usize::try_from(meta[name].as_u64().expect("a count")).expect("small");
    let (all, unet) = (count("modules"), count("unet_modules"));
    assert!(unet > 80 && all > unet, "{all} modules, {unet} of the UNet");
    for file in ["diffusers", "old"] {
        let found = check(&folder().join(file).with_extension("safetensors"), strength);
        assert_eq!(found, (unet, all - unet), "{file}");
    }
    assert_eq!(check(&folder().join("peft"), strength), (unet, 0));
}
