use super::*;
use crate::models::base::llava_med;
use crate::models::{decoder, tower};
use crate::segment::run_folder::parts::single_file;
use crate::tensor::Device;
use crate::tensor::weights::write_safetensors;

/// Writes a file of zeros in these shapes.
fn archive(folder: &Path, tensors: &[(impl AsRef<str>, impl AsRef<[i64]>)]) -> PathBuf {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let values: Vec<Tensor> = tensors.iter().map(|(_, shape)| zeros(shape.as_ref())).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, _)| name.as_ref()).zip(&values).collect();
    let path = folder.join("x.safetensors");
    write_safetensors(&path, &tensors, &BTreeMap::new()).unwrap();
    path
}

/// Names and shapes of the tensors that have the sizes of a vision tower.
fn tower() -> Vec<(String, Vec<i64>)> {
    let tensors = [
        ("embeddings.patch_embedding.weight", vec![96, 3, 14, 14]),
        ("embeddings.position_embedding.weight", vec![37, 96]),
        ("encoder.layers.0.mlp.fc1.bias", vec![192]),
        ("encoder.layers.0.layer_norm1.weight", vec![96]),
    ];
    tensors.map(|(name, shape)| (format!("{}vision_model.{name}", llava_med::FAMILY.keys.tower), shape)).into()
}

/// A language model with a vision tower, as far as its sizes are concerned. Returns the sizes of the language model.
fn base(folder: &Path) -> decoder::Config {
    let llm = decoder::Config { hidden_size: 128, intermediate_size: 256, ..llava_med::sizes().llm };
    std::fs::write(folder.join("config.json"), serde_json::to_vec(&llm).unwrap()).unwrap();
    std::fs::rename(archive(folder, &tower()), folder.join("model.safetensors")).unwrap();
    llm
}

#[test]
fn tensors_with_too_few_dimensions_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let tower_of =
        |file: &Path| (llava_med::FAMILY.tower.inside)(file, &Fields::default(), &llava_med::FAMILY.keys, false);
    let tower::Config::Clip(sizes) = tower_of(&archive(folder.path(), &tower())).unwrap();
    assert_eq!((sizes.image_size, sizes.patch_size, sizes.num_hidden_layers), (84, 14, 1));
    for wrong in 0..3 {
        for shape in [&[][..], &[7; 3]] {
            let mut tensors = tower();
            tensors[wrong].1 = shape.to_vec();
            let error = tower_of(&archive(folder.path(), &tensors)).unwrap_err();
            assert!(error.to_string().contains(&format!("has the shape {shape:?}, expected")), "{error}");
        }
    }
}

#[test]
fn sizes_of_a_base_are_those_of_its_config_and_its_tower() {
    let folder = tempfile::tempdir().unwrap();
    let expected = base(folder.path());
    let sizes = |base: Option<PathBuf>| {
        Found { base, without_weights: false, tower: None, image_encoder: None }.base_sizes().unwrap()
    };
    let Parts { tower, llm, .. } = sizes(Some(folder.path().to_owned())).unwrap();
    assert_eq!((tower.width(), tower.image_size(), llm), (96, 84, expected));
    assert_eq!(sizes(None), None);
}

#[test]
fn a_published_run_is_described_by_its_adapter_its_decoder_and_its_base() {
    let [folder, model] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let llm = base(model.path());
    std::fs::create_dir(folder.path().join("lora_adapter")).unwrap();
    std::fs::write(folder.path().join(ADAPTER_CONFIG), r#"{"r": 8, "lora_alpha": 32}"#).unwrap();
    let decoder = [
        ("prompt_projection.0.weight", vec![96_i64, 128]),
        ("norm1.weight", vec![64]),
        ("encoder_layer.linear1.weight", vec![80, 64]),
        ("image_norm.weight", vec![64]),
    ];
    std::fs::rename(archive(folder.path(), &decoder), folder.path().join("mask_decoder.safetensors")).unwrap();
    let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
    let build = Build::new(Device::Cpu, Kind::Float, &locate);
    let overrides = RunOverrides { base: Some(model.path().display().to_string()), ..RunOverrides::default() };
    let Description { model, sizes, modalities, pixels, .. } =
        describe_published(folder.path(), &overrides, build).unwrap();
    // as the published code sets them
    assert_eq!((model.semantics, model.image_size, model.max_text_tokens), (Semantics::Reference, 1024, 512));
    assert_eq!((model.decoder, model.batch_norm), (mask_head::Version::V5, BatchNorm::Batch));
    assert_eq!((pixels.tower_size, pixels.sam_size, modalities.len()), (84, 1024, 6));
    assert_eq!((sizes.lora.rank, sizes.lora.alpha, sizes.lora.dropout), (8, 32.0, 0.0));
    let decoder = serde_json::to_value(&sizes.decoder).unwrap();
    let of = |key: &str| decoder[key].as_i64().unwrap();
    assert_eq!(["hidden_dim", "prompt_dim", "image_dim", "feed_forward_dim"].map(of), [96, 128, 64, 80]);
    assert_eq!((sizes.llm, sizes.tower.width()), (llm, 96));
}

#[test]
fn a_base_is_written_as_a_mistral_with_its_own_head() {
    let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
    let mut description = crate::segment::setup::describe(&fixture).unwrap();
    let config = base_config(&description);
    assert_eq!(config["model_type"], "mistral");
    assert_eq!(config["architectures"][0], "MistralForCausalLM");
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!((config["hidden_size"].as_i64(), config["head_dim"].as_i64()), (Some(128), Some(32)));
    assert_eq!(config["vision_config"]["patch_size"], 14);
    assert!(config.get("quantization_config").is_none());
    description.model.quantization = Quantization::Nf4Double;
    assert_eq!(base_config(&description)["quantization_config"]["bnb_4bit_use_double_quant"], true);
}

#[test]
fn the_only_weight_file_of_a_folder_is_found() {
    for name in ["tinysam.pth", "tinysam.pt", "tinysam.safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), "").unwrap();
        write(name);
        write("README.md");
        let file = folder.path().join(name);
        assert_eq!(single_file(folder.path()).unwrap(), file);
        assert_eq!(single_file(&file).unwrap(), file);
        write("another.pth");
        let error = single_file(folder.path()).unwrap_err().to_string();
        assert!(error.contains("contains 2 weight files, expected one"), "{error}");
    }
}

#[test]
fn a_class_head_with_another_number_of_classes_than_names_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let check = |shape: &[i64]| check_class_head(&archive(folder.path(), &[("2.bias", shape)]), 6);
    check(&[6]).unwrap();
    assert!(check(&[4]).unwrap_err().to_string().contains("has 4 classes, and the names of 6 are known"));
    assert!(check(&[]).unwrap_err().to_string().contains("expected 1 dimensions"));
}

#[test]
fn a_tied_base_has_its_embedding_as_head_with_and_without_a_head_in_its_file() {
    let fixture = crate::fixture::checkout().join("tests/fixtures/old_names/run");
    let description = crate::segment::setup::describe(&fixture).unwrap();
    let locate = |spec: &str| -> Result<PathBuf> { Ok(PathBuf::from(spec)) };
    let build = Build::new(Device::Cpu, Kind::Float, &locate);
    let keys = &description.sizes.family.keys;
    // every tensor has one value, those of the embedding and of the head differ
    let new = |value: f64| {
        let options = build.options(&description.model, false);
        let model = PrsMed::new(&description.sizes, options);
        for (i, entry) in model.stores().base.entries().into_iter().enumerate() {
            let _ = no_grad(|| entry.tensor.shallow_clone().fill_(value + i as f64));
        }
        model
    };
    let of = |model: &PrsMed, name: &str| {
        model.stores().base.entries().into_iter().find(|entry| entry.name == name).unwrap().tensor
    };
    let stored = new(1.0);
    let write = |is_tied: bool, has_head: bool| {
        let folder = tempfile::tempdir().unwrap();
        let mut config = base_config(&description);
        config["tie_word_embeddings"] = is_tied.into();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let entries = stored.stores().base.entries();
        let kept = entries.iter().filter(|entry| has_head || entry.name != keys.head);
        let tensors: Vec<(&str, &Tensor)> = kept.map(|entry| (entry.name.as_str(), &entry.tensor)).collect();
        write_safetensors(&folder.path().join("model.safetensors"), &tensors, &BTreeMap::new()).unwrap();
        folder
    };
    for (is_tied, has_head, source) in
        [(true, false, keys.embedding), (true, true, keys.embedding), (false, true, keys.head)]
    {
        let (folder, model) = (write(is_tied, has_head), new(0.5));
        load_base(folder.path(), None, &model, None, &mut Vec::new()).unwrap().into_result(folder.path()).unwrap();
        assert!(of(&model, keys.head).equal(&of(&stored, source)), "{is_tied} {has_head}");
        assert!(of(&model, keys.embedding).equal(&of(&stored, keys.embedding)));
    }
    let folder = write(false, false);
    let report = load_base(folder.path(), None, &new(0.5), None, &mut Vec::new()).unwrap();
    assert_eq!(report.missing, [keys.head]);
}

#[test]
fn keys_that_do_not_fit_are_warnings_on_request() {
    let report = || LoadReport { missing: vec!["lm_head.weight".into()], ..LoadReport::default() };
    let mut warnings = Vec::new();
    let error = settle(report(), Path::new("run"), false, &mut warnings).unwrap_err();
    assert!(error.to_string().contains("lm_head.weight") && warnings.is_empty(), "{error}");
    settle(report(), Path::new("run"), true, &mut warnings).unwrap();
    assert!(warnings.len() == 1 && warnings[0].contains("lm_head.weight"), "{warnings:?}");
}
