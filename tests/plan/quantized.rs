//! Memory of quantized weights: their own bytes, and one dense matrix while they are loaded.

use super::*;
use prsmed::Error;
use prsmed::tensor::nf4::Nf4;
use prsmed::tensor::weights::{Archive, write_safetensors};
use prsmed::tensor::{Kind, Shared, Tensor};
use std::collections::BTreeMap;

const SHAPES: [[i64; 2]; 4] = [[256, 256], [1024, 512], [512, 1024], [64, 256]];

fn bytes_of(matrix: &Nf4) -> u64 {
    matrix.pieces().iter().map(|(_, t)| t.numel() as u64 * prsmed::tensor::kind_bytes(t.kind())).sum()
}

/// Writes shards that each hold the matrices, and their index; returns the names of the tensors.
fn shards(folder: &std::path::Path) -> Vec<String> {
    let mut map = serde_json::Map::new();
    for shard in 0..3 {
        let file = format!("model-{shard}.safetensors");
        let tensors: Vec<(String, Tensor)> = SHAPES
            .iter()
            .enumerate()
            .map(|(i, shape)| (format!("{shard}.{i}.weight"), Tensor::randn(shape, (Kind::BFloat16, Device::Cpu))))
            .collect();
        let borrowed: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        write_safetensors(&folder.join(&file), &borrowed, &BTreeMap::new()).unwrap();
        map.extend(tensors.iter().map(|(name, _)| (name.clone(), file.clone().into())));
    }
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    map.keys().cloned().collect()
}

#[test]
fn only_one_dense_matrix_is_in_memory_while_shards_are_quantized() {
    let _alone = ready();
    let folder = tempfile::tempdir().unwrap();
    let names = shards(folder.path());
    for is_double in [false, true] {
        let archive = Archive::open(folder.path()).unwrap();
        ledger::reset_peak();
        let before = ledger::usage().allocated.0;
        let matrices: Vec<(String, Shared<Nf4>)> = names
            .iter()
            .map(|name| {
                let shape = &archive.info(name).unwrap().shape;
                (name.clone(), Shared::new(Nf4::empty([shape[0], shape[1]], is_double, Device::Cpu)))
            })
            .collect();
        let mut none: [(String, Tensor); 0] = [];
        let report = archive.load_with(&mut none, &matrices, |_| false).unwrap();
        assert!(report.is_clean(), "{report}");
        let usage = ledger::usage();
        let result: u64 = matrices.iter().map(|(_, matrix)| bytes_of(matrix)).sum();
        assert_eq!(usage.allocated.0 - before, result);
        let largest = 1024 * 512 * 2;
        // for the largest matrix: its scales in fp32 and their sum, before they are quantized
        let scales = if is_double { 1024 * 512 / 64 * 4 + 4 } else { 0 };
        assert_eq!(usage.allocated_peak.0 - before, result + largest + scales, "double {is_double}");
    }
}

#[test]
fn weights_take_4_and_an_eighth_bits() {
    for (is_double, bits) in [(false, 4.5), (true, 4.127)] {
        let matrix = Nf4::empty([1024, 4096], is_double, Device::Cpu);
        // code tables and metadata of 256 bytes, negligible at full size
        let small = 16 * 4 + 256 + if is_double { 256 * 4 } else { 0 };
        let per_weight = (bytes_of(&matrix) - small) as f64 * 8.0 / (1024.0 * 4096.0);
        assert!((per_weight - bits).abs() < 1e-3, "{per_weight}");
    }
}

/// The autograd graph holds neither the dense matrix nor the input of the product.
#[test]
fn a_product_with_a_quantized_matrix_keeps_only_its_result() {
    let _alone = ready();
    let (rows, columns, tokens) = (256_i64, 128_i64, 40_i64);
    let leaf = Tensor::randn([tokens, columns], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let matrix = Nf4::empty([rows, columns], true, Device::Cpu);
    matrix.quantize(&Tensor::randn([rows, columns], (Kind::Float, Device::Cpu)));
    let before = ledger::usage().allocated.0;
    let ys = matrix.linear(&leaf.neg(), None);
    assert_eq!(ledger::usage().allocated.0 - before, (tokens * rows * 4).cast_unsigned());
    ys.sum(Kind::Float).backward();
    assert!(leaf.grad().defined());
}

/// Frozen bytes of the whole model shrink by the savings of its layers.
#[test]
fn quantization_saves_memory_in_all_layers() {
    let _alone = ready();
    let example = Example {
        text_tokens: 24,
        answer_tokens: 8,
        num_classes: 6,
        new_tokens: 4,
        questions: 1,
        has_unknown_masks: false,
        largest: None,
    };
    let frozen = |scheme: &str| {
        let sets =
            format!("model.train_base=false model.image_size=64 train.precision=bf16 model.quantization={scheme}");
        let phases = phases(&config_of("tiny", &sets), example, 0, META);
        let step = phases.into_iter().find(|(name, ..)| *name == "step").unwrap();
        step.2.into_iter().find(|(name, _)| *name == "frozen").unwrap().1.0
    };
    let (layers, matrices) = (3, 3 * 7);
    let weights = layers * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128);
    assert_eq!(
        frozen("none") - frozen("nf4"),
        weights * 2 - weights / 2 - weights / 64 * 4 - matrices * (16 * 4 + 256)
    );
}

#[test]
fn quantizing_trained_weights_is_refused() {
    let config = config_of("tiny", "model.train_base=true model.quantization=nf4");
    let error = setup::planned_sizes(&config.model, &config.configs, config.lora, 6).unwrap_err();
    assert!(matches!(&error, Error::Config { .. }) && error.to_string().contains("model.quantization"), "{error}");
    assert!(error.hint().contains("model.train_base=false"), "{}", error.hint());
}
