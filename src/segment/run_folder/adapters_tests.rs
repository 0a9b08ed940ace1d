use super::*;
use crate::nn::Linear;
use crate::tensor::store::{Init, Role, StoreOptions};
use crate::tensor::weights::write_safetensors;
use crate::tensor::{Device, Kind, Tensor, rng};
use std::collections::BTreeMap;

const IN: i64 = 6;
const OUT: i64 = 4;
const LAYERS: [&str; 3] = ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.self_attn.q_proj"];

fn counted(shape: [i64; 2], step: f64) -> Tensor {
    (Tensor::arange(shape[0] * shape[1], (Kind::Float, Device::Cpu)) * step - 1.0).reshape(shape)
}

/// `lora_A` and `lora_B` of a module.
fn factors(module: usize, rank: i64) -> [Tensor; 2] {
    [counted([rank, IN], 0.1 * (module + 1) as f64), counted([OUT, rank], 0.3)]
}

/// A folder of the original code with adapters of these ranks.
fn folder(settings: &str, ranks: [Option<i64>; 3]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("lora_adapter")).expect("created");
    std::fs::write(folder.path().join("mask_decoder.pth"), "").expect("written");
    std::fs::write(folder.path().join(ADAPTER_CONFIG), settings).expect("written");
    let mut tensors = Vec::new();
    for (index, (layer, rank)) in LAYERS.iter().zip(ranks).enumerate() {
        for (part, tensor) in ["A", "B"].iter().zip(rank.map(|rank| factors(index, rank)).into_iter().flatten()) {
            tensors.push((format!("{PREFIX}model.{layer}.lora_{part}.weight"), tensor));
        }
    }
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&folder.path().join(ADAPTER), &named, &BTreeMap::new()).expect("written");
    folder
}

/// What each module adds to an identity matrix of inputs, after the adapters of a folder are loaded.
fn outputs(folder: &Path) -> Result<Vec<Tensor>> {
    // `lora_A` gets random values before the load
    let _lock = rng::TEST_LOCK.lock();
    let lora = published_sizes(folder)?;
    let [weights, adapters] = [(); 2].map(|()| Store::new(StoreOptions::cpu()));
    let layers = LAYERS.map(|layer| {
        let path = weights.root(Role::Frozen).sub(layer);
        let root = adapters.root(Role::Trainable).sub("base_model").sub("model").sub("model").sub(layer);
        Linear::no_bias(&path, IN, OUT, Init::Const(0.0)).with_lora(&root, &lora)
    });
    let report = load(folder, &adapters, lora, &<&Family>::default().keys)?.expect("adapters");
    report.into_result(folder)?;
    let identity = Tensor::eye(IN, (Kind::Float, Device::Cpu));
    Ok(no_grad(|| layers.iter().map(|layer| layer.forward(&identity, false)).collect()))
}

/// Checks the scale of each module; `None` for one without an adapter.
fn check(settings: &str, modules: [Option<(i64, f64)>; 3]) {
    let folder = folder(settings, modules.map(|module| module.map(|(rank, _)| rank)));
    let found = outputs(folder.path()).unwrap_or_else(|error| panic!("{settings}: {error}"));
    let lora = published_sizes(folder.path()).expect("sizes");
    let scales = Scales::open(folder.path(), lora).expect("scales");
    for (index, (found, module)) in found.iter().zip(modules).enumerate() {
        let expected = module.map_or_else(
            || Tensor::zeros([IN, OUT], (Kind::Float, Device::Cpu)),
            |(rank, scale)| {
                let [a, b] = factors(index, rank);
                (b.matmul(&a) * scale).transpose(0, 1)
            },
        );
        let largest = expected.abs().max().double_value(&[]).max(1.0);
        let apart = (found - expected).abs().max().double_value(&[]) / largest;
        assert!(apart < 1e-6, "{settings}: {} is {apart} apart", LAYERS[index]);
        if let Some((_, scale)) = module {
            let merged = scales.of(&format!("model.{}", LAYERS[index])).expect("a scale");
            assert!((merged - scale).abs() < 1e-12, "{settings}: a merge has {merged}");
        }
    }
}

#[test]
fn every_module_has_the_scale_that_peft_gives_it() {
    let uniform = |scale| [Some((4, scale)); 3];
    check(r#"{"r": 4, "lora_alpha": 6}"#, uniform(1.5));
    check(r#"{"r": 4, "lora_alpha": 6, "use_rslora": true}"#, uniform(3.0));
    let json = r#"{"r": 4, "lora_alpha": 8, "alpha_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 4}}"#;
    check(json, [Some((4, 1.0)), Some((4, 2.0)), Some((4, 0.5))]);
    let json = r#"{"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 1, "layers\\.1\\..*": 8}}"#;
    check(json, [Some((4, 2.0)), Some((1, 8.0)), Some((8, 1.0))]);
    let json = r#"{"r": 2, "lora_alpha": 2, "use_rslora": true, "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 6}}"#;
    let root = 2_f64.sqrt();
    check(json, [Some((2, root)), Some((4, 3.0)), Some((2, root))]);
}

#[test]
fn modules_that_peft_leaves_out_have_no_adapter() {
    let one = Some((4, 1.0));
    check(r#"{"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}"#, [one, None, one]);
    let json = r#"{"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}"#;
    check(json, [one, one, None]);
    let json = r#"{"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "exclude_modules": ["v_proj"]}"#;
    check(json, [one, None, one]);
}

#[test]
fn adapters_that_contradict_their_settings_are_errors() {
    for (settings, ranks, expected) in [
        (r#"{"r": 4, "target_modules": ["q_proj"]}"#, [Some(4); 3], "`model.layers.0.self_attn.v_proj`"),
        (r#"{"r": 4, "target_modules": ["q_proj", "v_proj"]}"#, [Some(4), None, Some(4)], "v_proj.lora_A"),
        (r#"{"r": 8, "rank_pattern": {"v_proj": 2}}"#, [Some(8); 3], "v_proj.lora_A"),
        (r#"{"r": 4, "use_dora": true}"#, [Some(4); 3], "`use_dora`"),
        (r#"{"r": 4, "bias": "all"}"#, [Some(4); 3], "`bias`"),
        (r#"{"r": 4, "modules_to_save": ["lm_head"]}"#, [Some(4); 3], "`modules_to_save`"),
        (r#"{"r": 4, "init_lora_weights": "pissa"}"#, [Some(4); 3], "`init_lora_weights`"),
    ] {
        let folder = folder(settings, ranks);
        let error = outputs(folder.path()).expect_err(settings);
        assert!(error.to_string().contains(expected), "{settings}: {error}");
    }
}
