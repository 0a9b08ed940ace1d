use std::path::PathBuf;

use super::*;
use crate::tensor::store::{Init, Role, StoreOptions};
use crate::tensor::weights::write_safetensors;
use crate::tensor::{Device, dims};

const QUERY: &str = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q";
const OUT: &str = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0";
const PROJ: &str = "up_blocks.0.attentions.2.proj_in";
const CONV: &str = "down_blocks.1.resnets.0.conv1";
const RANK: i64 = 2;
const ALPHA: f64 = 1.0;

/// Modules of an invented model: two linear layers, a 1x1 and a 3x3 convolution.
const SHAPES: [(&str, &[i64]); 4] = [(QUERY, &[4, 6]), (OUT, &[4, 4]), (PROJ, &[4, 3, 1, 1]), (CONV, &[5, 3, 3, 3])];

fn counted(shape: &[i64], step: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * step - 1.0).reshape(shape)
}

fn store(kind: Kind) -> Store {
    let store = Store::new(StoreOptions { frozen_kind: kind, ..StoreOptions::cpu() });
    for (module, shape) in SHAPES {
        let mut weight = store.root(Role::Frozen).sub(module).param("weight", shape, Init::Const(0.0));
        weight.copy_(&counted(shape, 0.125));
    }
    store
}

/// `down` and `up` of a weight of this shape. A 1x1 convolution has 2-d matrices, as in some files.
fn halves(shape: &[i64]) -> (Tensor, Tensor) {
    let kernel = if shape.len() == 4 && shape[2] == 3 { &shape[2..] } else { &[] };
    let down = counted(&[&[RANK, shape[1]], kernel].concat(), 0.1);
    let ones = vec![1; kernel.len()];
    (down, counted(&[&[shape[0], RANK], &ones[..]].concat(), 0.2))
}

/// The weights that a merge must give, computed element by element.
fn merged(shape: &[i64], strength: f64) -> Tensor {
    let (down, up) = halves(shape);
    let (down, up) = (down.reshape([RANK, -1]), up.reshape([-1, RANK]));
    let [_, inside] = dims(&down);
    let mut rows = Vec::new();
    for o in 0..shape[0] {
        for i in 0..inside {
            let product: f64 = (0..RANK).map(|r| up.double_value(&[o, r]) * down.double_value(&[r, i])).sum();
            rows.push(counted(shape, 0.125).reshape([-1]).double_value(&[o * inside + i]) + strength * product);
        }
    }
    Tensor::from_slice(&rows).to_kind(Kind::Float).reshape(shape)
}

/// Writes a file of adapters for all modules. `name` gives the key of a part of a module.
fn write(
    name: impl Fn(&str, LoraPart) -> String,
    alpha: bool,
    header: &[(&str, String)],
) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lora.safetensors");
    let mut tensors = Vec::new();
    for (module, shape) in SHAPES {
        let (down, up) = halves(shape);
        tensors.push((name(module, LoraPart::Down), down));
        tensors.push((name(module, LoraPart::Up), up));
        if alpha {
            tensors.push((name(module, LoraPart::Alpha), Tensor::from(ALPHA).to_kind(Kind::Float)));
        }
    }
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let header = header.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    write_safetensors(&path, &named, &header).unwrap();
    (folder, path)
}

fn peft(module: &str, part: LoraPart) -> String {
    let end = if part == LoraPart::Down { "A" } else { "B" };
    format!("unet.{module}.lora_{end}.weight")
}

fn assert_merged(what: &str, path: &Path, total: f64) {
    let adapters = read(path).unwrap();
    assert_eq!(adapters.len(), SHAPES.len(), "{what}");
    let store = store(Kind::Float);
    let strength = 0.5;
    let changed = merge(&store, &adapters, strength).unwrap();
    assert_eq!(changed.len(), SHAPES.len(), "{what}");
    for (module, shape) in SHAPES {
        let (got, want) = (store.get(&format!("{module}.weight")).unwrap(), merged(shape, strength * total));
        assert!((got - want).abs().max().double_value(&[]) < 1e-5, "{what}: {module}");
    }
}

#[test]
fn every_naming_scheme_gives_the_same_weights() {
    let scale = ALPHA / 2.0;
    let end = |part| match part {
        LoraPart::Down => "down.weight",
        LoraPart::Up => "up.weight",
        LoraPart::Alpha => unreachable!("only written if asked for"),
    };
    let old = |module: &str, part| format!("unet.{module}.lora.{}", end(part));
    let (_folder, path) = write(old, false, &[]);
    assert_merged("older diffusers", &path, 1.0);
    let (_folder, path) = write(peft, false, &[]);
    assert_merged("peft without settings", &path, 1.0);
    let wrapped = |module: &str, part| peft(module, part).replacen("unet.", "base_model.model.", 1);
    let (_folder, path) = write(wrapped, false, &[]);
    assert_merged("peft's own wrapper", &path, 1.0);
    let header = format!(r#"{{"unet.r": 2, "unet.lora_alpha": {ALPHA}, "unet.use_rslora": false}}"#);
    let (_folder, path) = write(peft, false, &[(METADATA, header)]);
    assert_merged("peft with settings", &path, scale);
    let dotted = |module: &str, part| match part {
        LoraPart::Alpha => format!("unet.{module}.alpha"),
        part => format!("unet.{module}.lora_{}", end(part)),
    };
    let (_folder, path) = write(dotted, true, &[]);
    assert_merged("an alpha of each module", &path, scale);
}

#[test]
fn a_peft_folder_has_its_settings_in_adapter_config_json() {
    let (folder, path) = write(|module, part| peft(module, part).replacen("unet.", "base_model.model.", 1), false, &[]);
    let file = folder.path().join("adapter_model.safetensors");
    std::fs::rename(path, &file).unwrap();
    let config = r#"{"r": 2, "lora_alpha": 6, "use_rslora": false, "alpha_pattern": {"attn1.to_q": 4}}"#;
    std::fs::write(folder.path().join("adapter_config.json"), config).unwrap();
    for place in [folder.path(), &file] {
        for adapter in read(place).unwrap() {
            let want = if adapter.module == QUERY { 2.0 } else { 3.0 };
            assert_eq!(adapter.scale, want, "{}", adapter.module);
        }
    }
    let config = r#"{"r": 2, "lora_alpha": 6, "use_rslora": true}"#;
    std::fs::write(folder.path().join("adapter_config.json"), config).unwrap();
    assert!(read(&file).unwrap().iter().all(|adapter| (adapter.scale - 6.0 / 2_f64.sqrt()).abs() < 1e-12));
    for (config, name) in [
        (r#"{"use_dora": true}"#, "DoRA"),
        (r#"{"r": 4, "lora_alpha": 6}"#, "rank 2, and the settings of the adapters say 4"),
        (r#"{"r": 2, "rank_pattern": {"to_q": 3}}"#, "the settings of the adapters say 3"),
        (r#"{"r": 2, "target_modules": ["to_q", "conv1", "proj_in"]}"#, "leave it out"),
        (r#"{"r": 2, "bias": "lora_only"}"#, "`bias`"),
        (r#"{"r": 2, "init_lora_weights": "olora"}"#, "`init_lora_weights`"),
        (r#"{"r": 2, "modules_to_save": ["conv_in"]}"#, "`modules_to_save`"),
    ] {
        std::fs::write(folder.path().join("adapter_config.json"), config).unwrap();
        let error = read(&file).expect_err(config).to_string();
        assert!(error.contains(name), "{config}: {error}");
    }
}

#[test]
fn an_alpha_of_zero_or_without_a_finite_value_is_refused() {
    for alpha in [0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lora.safetensors");
        let (down, up) = halves(SHAPES[0].1);
        let alpha_tensor = Tensor::from(alpha).to_kind(Kind::Float);
        let key = |end: &str| format!("unet.{}.{end}", SHAPES[0].0);
        let named = [(key("lora_down.weight"), &down), (key("lora_up.weight"), &up), (key("alpha"), &alpha_tensor)];
        write_safetensors(&path, &named, &std::collections::BTreeMap::new()).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("`unet.{}` has an alpha that is {alpha}", SHAPES[0].0)), "{error}");
    }
    for (settings, named) in [
        (r#"{"unet.r": 2, "unet.lora_alpha": 0}"#, "`lora_alpha` is 0"),
        (r#"{"unet.r": 2, "unet.lora_alpha": -0.0}"#, "`lora_alpha` is -0"),
        (r#"{"unet.r": 2, "unet.lora_alpha": 3, "unet.alpha_pattern": {"to_q": 0.0}}"#, "`alpha_pattern` has a number"),
    ] {
        let (_folder, path) = write(peft, false, &[(METADATA, settings.to_owned())]);
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

/// The file of a fine-tuning, and that of earlier versions, change the weights alike.
#[test]
fn new_and_old_exports_have_the_same_scale() {
    for (alpha, rank) in [(ALPHA, 2.0), (0.3, 2.0), (-5.0, 2.0), (2.0, 2.0)] {
        let scale = alpha / rank;
        let trained: Vec<(String, Tensor)> = SHAPES
            .iter()
            .filter(|(_, shape)| shape.len() == 2)
            .flat_map(|(module, shape)| {
                let (down, up) = halves(shape);
                [(peft(module, LoraPart::Down), down), (peft(module, LoraPart::Up), up)]
            })
            .collect();
        assert!(!trained.is_empty());
        let before = trained.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect::<Vec<_>>();
        let old = format!(r#"{{"unet.r": 2, "unet.lora_alpha": {alpha}, "unet.peft_type": "LORA"}}"#);
        let share =
            |all: &[(String, Tensor)]| all.iter().map(|(n, t)| (n.clone(), t.shallow_clone())).collect::<Vec<_>>();
        let files = [(with_scale_one(share(&trained), scale), None), (share(&trained), Some(old))];
        let folder = tempfile::tempdir().unwrap();
        let mut changes: Vec<Vec<Tensor>> = Vec::new();
        for (tensors, header) in files {
            let path = folder.path().join("lora.safetensors");
            let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            let header = header.map(|text| (METADATA.to_owned(), text)).into_iter().collect();
            write_safetensors(&path, &named, &header).unwrap();
            let change = |adapter: &Adapter| adapter.up.matmul(&adapter.down) * adapter.scale;
            changes.push(read(&path).unwrap().iter().map(change).collect());
        }
        for (one, others) in changes[0].iter().enumerate() {
            for file in &changes[1..] {
                let difference = (others - &file[one]).abs().max().double_value(&[]);
                assert!(difference <= 1e-6 * others.abs().max().double_value(&[]), "{alpha}: {difference}");
            }
        }
        assert!(trained.iter().zip(&before).all(|((_, now), (_, was))| now.equal(was)), "training goes on with these");
    }
}

#[test]
fn settings_in_a_header_are_applied_or_refused() {
    for (settings, scale) in [
        (r#"{"unet.r": 2, "unet.lora_alpha": 3, "unet.use_rslora": true}"#, Some(3.0 / 2_f64.sqrt())),
        (r#"{"unet.r": 2, "unet.lora_alpha": 3, "unet.alpha_pattern": {".*": 8}}"#, Some(4.0)),
        (r#"{"unet.r": 1, "unet.lora_alpha": 3, "unet.rank_pattern": {".*": 2}}"#, Some(1.5)),
        (r#"{"unet.r": 2, "unet.lora_bias": true}"#, None),
        (r#"{"unet.r": 2, "unet.layer_replication": [[0, 1]]}"#, None),
        (r#"{"r": 2, "peft_type": "LOKR"}"#, None),
    ] {
        let (_folder, path) = write(peft, false, &[(METADATA, settings.to_owned())]);
        match (read(&path), scale) {
            (Ok(adapters), Some(scale)) => {
                assert!(adapters.iter().all(|adapter| (adapter.scale - scale).abs() < 1e-12), "{settings}");
            }
            (Err(error), None) => assert!(error.to_string().contains("not supported"), "{error}"),
            (found, _) => panic!("{settings}: {found:?}"),
        }
    }
}

#[test]
fn merged_weights_are_summed_in_fp32_and_stored_in_their_dtype() {
    let (_folder, path) = write(peft, false, &[]);
    let store = store(Kind::BFloat16);
    merge(&store, &read(&path).unwrap(), 0.5).unwrap();
    for (module, shape) in SHAPES {
        let got = store.get(&format!("{module}.weight")).unwrap();
        assert_eq!(got.kind(), Kind::BFloat16);
        let base = counted(shape, 0.125).to_kind(Kind::BFloat16).to_kind(Kind::Float);
        let want = (merged(shape, 0.5) - counted(shape, 0.125) + base).to_kind(Kind::BFloat16);
        let step = want.to_kind(Kind::Float).abs().max().double_value(&[]) / 256.0;
        assert!((got - want).to_kind(Kind::Float).abs().max().double_value(&[]) <= step, "{module}");
    }
}

#[test]
fn text_towers_are_found_with_and_without_text_model() {
    let module = "text_model.encoder.layers.0.self_attn.q_proj";
    for stored in [module, module.trim_start_matches("text_model.")] {
        let store = Store::new(StoreOptions::cpu());
        let _weight = store.root(Role::Frozen).sub(stored).param("weight", &[3, 3], Init::Const(0.0));
        let (down, up) = halves(&[3, 3]);
        let adapter = Adapter { component: LoraNetwork::TextEncoder2, module: module.into(), down, up, scale: 1.0 };
        let changed = merge(&store, [&adapter], 1.0).unwrap();
        assert_eq!(changed, [format!("{stored}.weight")]);
    }
}

#[test]
fn an_unknown_module_is_an_error_and_nothing_is_changed() {
    let (_folder, path) = write(peft, false, &[]);
    let mut adapters = read(&path).unwrap();
    let last = adapters.last_mut().unwrap();
    last.module = last.module.replace("proj_in", "proj_im");
    let store = store(Kind::Float);
    let error = merge(&store, &adapters, 1.0).unwrap_err().to_string();
    assert!(error.contains("proj_im") && error.contains(&format!("`{PROJ}`")), "{error}");
    for (module, shape) in SHAPES {
        assert_eq!(store.get(&format!("{module}.weight")).unwrap(), counted(shape, 0.125), "{module}");
    }
    adapters.last_mut().unwrap().module = CONV.into();
    let error = merge(&store, &adapters, 1.0).unwrap_err().to_string();
    assert!(error.contains("[5, 3, 3, 3]"), "{error}");
}

#[test]
fn files_with_other_tensors_than_lora_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.safetensors");
    let (two, wide) = (counted(&[2, 4], 0.1), counted(&[4, 3], 0.1));
    let key = |end: &str| format!("unet.conv_in.{end}");
    for (tensors, word) in [
        (vec![(key("hada_w1_a"), &two)], "hada_w1_a"),
        (vec![(key("lora_down.weight"), &two)], "lacks one"),
        (vec![(key("lora_down.weight"), &two), (key("lora_up.weight"), &wide)], "cannot be multiplied"),
        (vec![(key("dora_scale"), &two), (key("lora_down.weight"), &two)], "dora_scale"),
        (vec![("unet.conv_in.lora_A.weight".into(), &two), (key("lora_down.weight"), &two)], "twice"),
        (vec![("lora_unet_conv_in.lora_down.weight".into(), &two)], "names of kohya's scripts (`lora_unet_conv_in"),
    ] {
        write_safetensors(&path, &tensors, &BTreeMap::new()).unwrap();
        let error = read(&path).unwrap_err();
        assert!(matches!(error, Error::Weights { .. }) && error.to_string().contains(word), "{error}");
    }
}
