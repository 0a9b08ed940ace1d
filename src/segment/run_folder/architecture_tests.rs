use super::*;
use crate::models::base::{LLAVA_MED, check_weights, llava_med};
use crate::models::{clip, decoder, tower};
use crate::nn::LoraConfig;
use crate::segment::setup::planned_sizes;
use crate::tensor::weights::write_safetensors;
use crate::tensor::{Device, Kind, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A folder with this `config.json`: the sizes of a small language model, and `more`.
fn folder(more: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let llm = decoder::Config { hidden_size: 128, intermediate_size: 256, ..llava_med::sizes().llm };
    let mut config = serde_json::to_value(llm).unwrap();
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn llm_config(folder: &Path) -> Result<decoder::Config> {
    let (family, fields) = base::open(folder)?;
    (family.read)(&fields)
}

fn clip_of(tower: tower::Config) -> clip::Config {
    let tower::Config::Clip(config) = tower;
    config
}

/// The vision tower in a CLIP repository.
fn tower_config(folder: &Path) -> Result<clip::Config> {
    (llava_med::FAMILY.tower.read)(folder).map(clip_of)
}

/// [`check_parts`] of parts that are not on the hub.
fn checked(model: &ModelConfig) -> Result<Vec<String>> {
    check_parts(model, &mut Configs::new(), &|_| panic!("nothing is fetched"))
}

/// A file of zeros in these shapes.
fn file(folder: &Path, tensors: &[(&str, &[i64])]) -> PathBuf {
    let values: Vec<Tensor> =
        tensors.iter().map(|(_, shape)| Tensor::zeros(*shape, (Kind::Float, Device::Cpu))).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, _)| *name).zip(&values).collect();
    let path = folder.join("model.safetensors");
    write_safetensors(&path, &tensors, &BTreeMap::new()).unwrap();
    path
}

#[test]
fn language_models_of_other_architectures_are_refused_with_those_that_are_supported() {
    for (config, name) in [
        (json!({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}), "Qwen2_5_VLFor"),
        (json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}), "Gemma3For"),
        (json!({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}), "LlavaForConditional"),
        (json!({"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava_llama"}), "LlavaLlamaForCausalLM"),
        (json!({"model_type": "qwen2_vl"}), "qwen2_vl"),
    ] {
        let error = llm_config(folder(&config).path()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!(": {name}")), "{text}");
        let supported = " is not supported; supported: LlavaMistralForCausalLM, MistralForCausalLM";
        assert!(text.contains(supported) && error.hint().contains(LLAVA_MED), "{text}");
    }
    for config in [
        json!({"architectures": ["LlavaMistralForCausalLM"], "model_type": "llava_mistral", "rope_scaling": null}),
        json!({"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "head_dim": 4}),
        json!({"model_type": "llava_mistral"}),
        json!({}),
    ] {
        assert_eq!(llm_config(folder(&config).path()).unwrap().hidden_size, 128, "{config}");
    }
}

#[test]
fn vision_towers_other_than_clip_are_refused() {
    let clip = serde_json::to_value(clip::Config::vit_l_14_336()).unwrap();
    let of = |more: Value, vision: Value| {
        let mut own = clip.clone();
        own.as_object_mut().unwrap().extend(vision.as_object().unwrap().clone());
        let mut config = more;
        config["vision_config"] = own;
        tower_config(folder(&config).path()).map_err(|error| error.to_string())
    };
    assert_eq!(of(json!({"model_type": "clip"}), json!({})).unwrap().image_size, 336);
    assert!(of(json!({"architectures": ["CLIPModel"]}), json!({"hidden_act": "quick_gelu"})).is_ok());
    let sizes = of(json!({"model_type": "clip"}), json!({"hidden_act": "gelu", "layer_norm_eps": 1e-6})).unwrap();
    assert_eq!((sizes.hidden_act, sizes.layer_norm_eps), (clip::ClipActivation::Gelu, 1e-6));
    // transformers does not write what equals the defaults of its class
    let short = json!({"model_type": "clip", "vision_config": {"hidden_size": 1024, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14}});
    assert_eq!(tower_config(folder(&short).path()).unwrap().image_size, 224);
    for (config, vision, reason) in [
        (json!({"architectures": ["SiglipModel"]}), json!({}), "SiglipModel is not supported; supported: CLIPModel, "),
        (json!({"model_type": "dinov2"}), json!({}), "dinov2 is not supported"),
        (json!({"model_type": "clip"}), json!({"hidden_act": "relu"}), "`hidden_act` = \"relu\" is not supported"),
        (json!({"model_type": "clip"}), json!({"num_channels": 1}), "`num_channels` = 1 is not supported"),
        (
            json!({"model_type": "clip"}),
            json!({"attention_dropout": 0.1}),
            "`attention_dropout` = 0.1 is not supported",
        ),
        (
            json!({"model_type": "clip", "vision_config_dict": {"image_size": 224}}),
            json!({}),
            "`image_size` = 336 and `vision_config_dict.image_size` = 224 contradict each other",
        ),
    ] {
        let text = of(config, vision).unwrap_err();
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn sizes_of_a_base_on_the_hub_are_those_of_its_config() {
    let of = |spec: &str, config: &Value| {
        let (folder, model) = (folder(config), ModelConfig { base: spec.into(), ..ModelConfig::default() });
        let fetch = |asked: &str| {
            assert_eq!(asked, spec, "only the config of the base is asked for");
            Ok(folder.path().to_owned())
        };
        let mut configs = Configs::new();
        assert_eq!(check_parts(&model, &mut configs, &fetch)?, Vec::<String>::new());
        // configs are an argument: nothing is remembered between two calls
        let unread = planned_sizes(&model, &Configs::new(), LoraConfig::default(), 2).unwrap_err().to_string();
        assert!(unread.contains(&format!("the `config.json` of `{spec}` was not read")), "{unread}");
        planned_sizes(&model, &configs, LoraConfig::default(), 2)
    };
    let sizes = of("hub:test/small", &json!({"num_hidden_layers": 3})).unwrap();
    assert_eq!((sizes.llm.hidden_size, sizes.llm.num_hidden_layers), (128, 3));
    assert_eq!((sizes.decoder.prompt_dim(), clip_of(sizes.tower)), (128, clip::Config::vit_l_14_336()));
    let sizes = of("hub:test/224", &json!({"mm_vision_tower": "openai/clip-vit-large-patch14"})).unwrap();
    assert_eq!(sizes.tower.image_size(), 224);
    let error = of("hub:test/qwen", &json!({"architectures": ["Qwen2VLForConditionalGeneration"]})).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("`model.base`: `hub:test/qwen`: Qwen2VLForConditionalGeneration is not"), "{text}");
}

#[test]
fn a_config_that_cannot_be_read_is_an_error_and_known_ones_are_not_asked_for() {
    let fetch = |spec: &str| Err(Error::hub(spec, "cannot be reached", "check the network"));
    let of = |model: ModelConfig| check_parts(&model, &mut Configs::new(), &fetch);
    let spec = || "hub:test/absent".to_owned();
    for (key, model) in [
        ("model.base", ModelConfig { base: spec(), ..ModelConfig::default() }),
        ("model.vision_tower", ModelConfig { vision_tower: spec(), ..ModelConfig::default() }),
    ] {
        let text = planned_sizes(&model, &Configs::new(), LoraConfig::default(), 2).unwrap_err().to_string();
        assert!(text.starts_with(&format!("`{key}`: the `config.json` of `hub:test/absent` was not read")), "{text}");
        let error = of(model).unwrap_err();
        let text = format!("`{key}`: the `config.json` of `hub:test/absent`, which says what it is, cannot be read (");
        assert!(error.to_string().starts_with(&text) && error.to_string().contains("cannot be reached"), "{error}");
    }
    let tower = ModelConfig { vision_tower: "hub:openai/clip-vit-large-patch14-336".into(), ..ModelConfig::default() };
    assert_eq!(of(tower.clone()).unwrap(), [""; 0]);
    planned_sizes(&tower, &Configs::new(), LoraConfig::default(), 2).unwrap();
    let warnings = |base: &str, image_encoder: &str| {
        of(ModelConfig { base: base.into(), image_encoder: image_encoder.into(), ..ModelConfig::default() }).unwrap()
    };
    for (base, encoder) in [(LLAVA_MED, TINY_SAM), (&*format!("{LLAVA_MED}@main"), RANDOM), (RANDOM, "hub:o/tinysam")] {
        assert_eq!(warnings(base, encoder), Vec::<String>::new(), "{base} {encoder}");
    }
}

#[test]
fn image_encoders_other_than_tiny_vit_are_recognised_by_their_keys() {
    let folder = tempfile::tempdir().unwrap();
    let of = |tensors: &[(&str, &[i64])]| {
        let spec = file(folder.path(), tensors).display().to_string();
        let model = ModelConfig { image_encoder: spec, ..ModelConfig::default() };
        checked(&model).map_err(|error| error.to_string())
    };
    let only = "; only TinyViT (TinySAM, MobileSAM) can be read";
    for (tensors, kind) in [
        (
            &[("image_encoder.pos_embed", &[1, 1, 1, 768][..]), ("image_encoder.blocks.0.attn.qkv.weight", &[1, 1])][..],
            "SAM ViT-B",
        ),
        (&[("pos_embed", &[1, 1, 1, 1024]), ("blocks.0.attn.qkv.weight", &[1, 1])], "SAM ViT-L"),
        (
            &[("vision_encoder.pos_embed", &[1, 1, 1, 1280]), ("vision_encoder.layers.0.attn.qkv.weight", &[1, 1])],
            "SAM ViT-H",
        ),
        (&[("image_encoder.trunk.blocks.0.attn.qkv.weight", &[1, 1])], "SAM 2"),
        (&[("fc.weight", &[1, 1])], "another network, without the key `patch_embed.seq.0.c.weight`"),
    ] {
        let text = of(tensors).unwrap_err();
        assert!(
            text.starts_with("`model.image_encoder`: ") && text.ends_with(&format!("this is {kind}{only}")),
            "{text}"
        );
    }
    for name in ["image_encoder.patch_embed.seq.0.c.weight", "patch_embed.seq.0.c.weight"] {
        assert_eq!(of(&[(name, &[1, 1, 1, 1])]), Ok(Vec::new()), "{name}");
    }
}

#[test]
fn another_sam_on_the_hub_is_recognised_by_its_config() {
    for (config, kind) in [
        (json!({"model_type": "sam"}), "SAM ViT-B"),
        (json!({"model_type": "sam", "vision_config": {"hidden_size": 1280}}), "SAM ViT-H"),
        (json!({"model_type": "sam2"}), "`sam2`"),
    ] {
        let folder = folder(&config);
        let model = ModelConfig { image_encoder: "hub:test/sam/model.safetensors".into(), ..ModelConfig::default() };
        let fetch = |asked: &str| {
            assert_eq!(asked, "hub:test/sam");
            Ok(folder.path().to_owned())
        };
        let text = check_parts(&model, &mut Configs::new(), &fetch).unwrap_err().to_string();
        assert!(text.contains(&format!("this is {kind}; only TinyViT")), "{text}");
    }
}

#[test]
fn weights_that_do_not_belong_to_their_config_are_refused_before_memory_is_asked_for() {
    let llm = decoder::Config { hidden_size: 8, vocab_size: 16, num_hidden_layers: 2, ..llava_med::sizes().llm };
    let of = |tensors: &[(&str, &[i64])]| {
        let folder = tempfile::tempdir().unwrap();
        file(folder.path(), tensors);
        check_weights(folder.path(), Default::default(), &llm).map_err(|error| error.to_string())
    };
    let (embeddings, last) = ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight");
    assert_eq!(of(&[(embeddings, &[16, 8]), (last, &[8])]), Ok(()));
    for (tensors, reason) in [
        (&[("x", &[1][..])][..], "`model.embed_tokens.weight` is missing"),
        (&[(embeddings, &[16, 9]), (last, &[8])], "has the shape [16, 9], `config.json` says [16, 8]"),
        (&[(embeddings, &[16, 8])], "`model.layers.1.input_layernorm.weight` is missing"),
    ] {
        let text = of(tensors).unwrap_err();
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn an_image_encoder_that_cannot_be_read_is_judged_by_its_name() {
    let fetch = |_: &str| Err(Error::hub("hub:o/n", "is not in the cache", "fetch it"));
    let checked = |spec: &str| {
        let model = ModelConfig { image_encoder: spec.to_owned(), ..ModelConfig::default() };
        check_parts(&model, &mut Configs::new(), &fetch)
    };
    for spec in ["hub:facebook/sam-vit-base", "sam_vit_b_01ec64.pth", "/none/medsam_vit_b.pth"] {
        let refused = checked(spec).map(|_| ()).err().map(|error| error.to_string());
        assert!(refused.as_ref().is_some_and(|text| text.contains("another SAM")), "{spec}: {refused:?}");
    }
    assert_eq!(checked("tinysam_42.3.pth").unwrap(), [""; 0]);
    assert!(checked("/none/mine.pth").unwrap()[0].contains("planned as TinyViT"));
}

/// The base that [`folder`] makes with the fields `more`, as a setting.
fn base_with(more: &Value) -> Result<Vec<String>> {
    let folder = folder(more);
    checked(&ModelConfig { base: folder.path().display().to_string(), ..ModelConfig::default() })
}

#[test]
fn fields_that_the_program_would_not_compute_with_are_refused_by_name() {
    for (config, named) in [
        (json!({"hidden_act": "gelu"}), "`hidden_act` = \"gelu\""),
        (json!({"head_dim": 256}), "`head_dim` = 256"),
        (json!({"attention_bias": true}), "`attention_bias` = true"),
        (json!({"mlp_bias": true}), "`mlp_bias` = true"),
        (json!({"attention_dropout": 0.1}), "`attention_dropout` = 0.1"),
        (json!({"layer_types": ["full_attention", "sliding_attention"]}), "`layer_types` = ["),
        (json!({"pruned_heads": {"0": [1]}}), "`pruned_heads` = "),
        (json!({"mm_vision_select_layer": -1}), "`mm_vision_select_layer` = -1"),
        (json!({"vision_feature_layer": [-2, -5]}), "`vision_feature_layer` = [-2,-5]"),
        (json!({"mm_vision_select_feature": "cls_patch"}), "`mm_vision_select_feature` = \"cls_patch\""),
        (json!({"mm_use_im_start_end": true}), "`mm_use_im_start_end` = true"),
        (json!({"image_aspect_ratio": "anyres"}), "`image_aspect_ratio` = \"anyres\""),
        (json!({"image_aspect_ratio": "square"}), "`image_aspect_ratio` = \"square\""),
        (json!({"mm_patch_merge_type": "spatial_unpad"}), "`mm_patch_merge_type` = \"spatial_unpad\""),
        (json!({"mm_projector_type": "mlp3x_gelu"}), "`mm_projector_type` = \"mlp3x_gelu\""),
        (json!({"s2": true}), "`s2` = true"),
        (json!({"text_config": {"hidden_act": "relu"}}), "`hidden_act` = \"relu\""),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "`quantization_config.quant_method` = \"gptq\"",
        ),
        (
            json!({"quantization_config": {"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"}}),
            "`quantization_config.bnb_4bit_quant_type` = \"fp4\"",
        ),
        (json!({"quantization_config": {"load_in_8bit": true}}), "`quantization_config.load_in_8bit` = true"),
    ] {
        let error = base_with(&config).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("`model.base`: ") && text.contains(named), "{text}");
        assert!(text.ends_with(" is not supported") && error.hint().contains("copy of the folder"), "{text}");
    }
    let text = base_with(&json!({"text_config": {"hidden_size": 64}})).unwrap_err().to_string();
    assert!(text.contains("`hidden_size` = 128 and `text_config.hidden_size` = 64 contradict each other"), "{text}");
}

#[test]
fn fields_of_published_bases_are_accepted_without_a_word() {
    for config in [
        // microsoft/llava-med-v1.5-mistral-7b
        json!({"architectures": ["LlavaMistralForCausalLM"], "model_type": "llava_mistral", "hidden_act": "silu",
            "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "feature_outs": "encoder+decoder",
            "freeze_mm_mlp_adapter": false, "image_aspect_ratio": "pad", "img_size": 640, "initializer_range": 0.02,
            "max_position_embeddings": 32768, "mm_hidden_size": 1024, "mm_projector_lr": null,
            "mm_projector_type": "mlp2x_gelu", "mm_use_im_patch_token": false, "mm_use_im_start_end": false,
            "mm_vision_select_feature": "patch", "mm_vision_select_layer": -2,
            "mm_vision_tower": "openai/clip-vit-large-patch14-336", "proj_vis_to_txt_tokens": false,
            "prompt_segtok_w_instruct": false, "segtok_posembed": "sincos", "sliding_window": null,
            "tie_word_embeddings": false, "tokenizer_model_max_length": 2048, "tokenizer_padding_side": "right",
            "torch_dtype": "bfloat16", "transformers_version": "4.36.2", "tune_mm_mlp_adapter": false,
            "tune_vision_tokenizer": "none", "use_cache": true, "use_mm_proj": true, "vision_backbone": "convnextlarge",
            "vision_tokenizer_lr": null}),
        // transformers 5
        json!({"architectures": ["MistralForCausalLM"], "dtype": "bfloat16", "head_dim": 4, "sliding_window": 4096,
            "rope_theta": null, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        json!({"rope_scaling": {"rope_type": "default"}, "num_key_value_heads": null, "layer_types": ["full_attention"]}),
        json!({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false,
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"}}),
    ] {
        assert_eq!(base_with(&config).unwrap(), [""; 0], "{config}");
    }
}

#[test]
fn fields_that_nothing_reads_are_named_once() {
    let config = json!({"logit_scale": 0.5, "mm_use_im_patch_token": true, "zeta": "on", "empty": {}, "off": false});
    let folder = folder(&config);
    let model = ModelConfig { base: folder.path().display().to_string(), ..ModelConfig::default() };
    let mut configs = Configs::new();
    let mut notes = || check_parts(&model, &mut configs, &|_| panic!("nothing is fetched")).unwrap();
    let first = notes();
    let named = "does not know these fields of its `config.json`, and computes without them: `logit_scale` = 0.5, \
                 `mm_use_im_patch_token` = true, `zeta` = \"on\"";
    assert!(first.len() == 1 && first[0].ends_with(named), "{first:?}");
    assert_eq!(notes(), [""; 0]);
}

#[test]
fn the_base_of_rotary_angles_is_read_from_both_generations_of_transformers() {
    let theta = |more: Value| {
        let mut config = json!({"rope_theta": null});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        llm_config(folder(&config).path()).map(|llm| llm.rope_theta).map_err(|error| error.to_string())
    };
    for (config, expected) in [
        (json!({"rope_theta": 5e5}), 5e5),
        (json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}), 1e4),
        (json!({"rope_theta": 10000, "rope_parameters": {"rope_theta": 10000.0}}), 1e4),
        (json!({"rope_theta": 1e6, "rope_scaling": {"type": "default", "factor": 1.0}}), 1e6),
        (json!({"rope_scaling": {"rope_theta": 7.0, "rope_type": "default"}}), 7.0),
        (json!({"text_config": {"rope_theta": 3e4}}), 3e4),
    ] {
        assert_eq!(theta(config.clone()), Ok(expected), "{config}");
    }
    for (config, reason) in [
        (json!({}), "`rope_theta` is missing, at the top and in `rope_parameters`"),
        (
            json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}),
            "`rope_theta` = 10000.0 and `rope_parameters.rope_theta` = 1000000.0 contradict each other",
        ),
        (
            json!({"rope_theta": 1e4, "rope_parameters": {"rope_type": "linear"}}),
            "`rope_parameters.rope_type` = \"linear\"",
        ),
        (json!({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}), "`rope_scaling."),
        (json!({"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}}), "`rope_scaling.factor` = 2.0"),
        (
            json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}),
            "`rope_parameters.partial_rotary_factor` = 0.5",
        ),
        (json!({"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "`partial_rotary_factor` = 0.5"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "`rope_parameters.full_attention` = {"),
        (json!({"rope_theta": -1}), "`rope_theta` = -1"),
    ] {
        let text = theta(config).unwrap_err();
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn a_chat_template_is_not_used_and_this_is_said() {
    let mistral = json!({"architectures": ["MistralForCausalLM"], "model_type": "mistral"});
    let llava = json!({"architectures": ["LlavaMistralForCausalLM"], "model_type": "llava_mistral"});
    let (config, jinja) = ("tokenizer_config.json", "chat_template.jinja");
    let with = |template: Value| (config, json!({"bos_token": "<s>", "chat_template": template}).to_string());
    for (model, files, name) in [
        (&mistral, vec![], None),
        (&mistral, vec![with(Value::Null)], None),
        (&mistral, vec![with(json!("[INST]"))], Some(config)),
        (&mistral, vec![with(json!([{"name": "default", "template": "<|im_start|>"}]))], Some(config)),
        (&mistral, vec![with(json!("[INST]")), (jinja, "<|im_start|>".to_owned())], Some(jinja)),
        (&llava, vec![with(json!("<|im_start|>"))], None),
    ] {
        let folder = folder(model);
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let model = ModelConfig { base: folder.path().display().to_string(), ..ModelConfig::default() };
        let notes = checked(&model).unwrap();
        let expected = name.map(|name| format!("the chat template in `{name}` is not used"));
        assert_eq!(notes.len(), usize::from(expected.is_some()), "{notes:?}");
        assert!(expected.is_none_or(|text| notes[0].contains(&text)), "{notes:?}");
    }
}

/// A base on this machine: `config.json` with `more`, and the shapes of a tower with two layers.
fn base_with_tower(more: &Value) -> tempfile::TempDir {
    let folder = folder(more);
    let name = |key: &str| format!("{}vision_model.{key}", llava_med::FAMILY.keys.tower);
    let tensors: Vec<(String, Vec<i64>)> = [
        ("embeddings.patch_embedding.weight", vec![96, 3, 14, 14]),
        ("embeddings.position_embedding.weight", vec![37, 96]),
        ("encoder.layers.0.mlp.fc1.bias", vec![192]),
        ("encoder.layers.0.layer_norm1.weight", vec![96]),
        ("encoder.layers.1.layer_norm1.weight", vec![96]),
    ]
    .map(|(key, shape)| (name(key), shape))
    .into();
    let tensors: Vec<(&str, &[i64])> = tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
    file(folder.path(), &tensors);
    folder
}

#[test]
fn a_tower_inside_a_base_is_computed_as_its_config_describes_it() {
    let sizes = |more: Value| {
        let folder = base_with_tower(&more);
        let model = ModelConfig { base: folder.path().display().to_string(), ..ModelConfig::default() };
        let sizes = planned_sizes(&model, &Configs::new(), LoraConfig::default(), 2);
        sizes.map(|sizes| clip_of(sizes.tower)).map_err(|error| error.to_string())
    };
    let vision = json!({"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 84, "patch_size": 14, "layer_norm_eps": 1e-6});
    let described = sizes(json!({"vision_config": vision})).unwrap();
    assert_eq!((described.num_attention_heads, described.num_hidden_layers, described.layer_norm_eps), (4, 3, 1e-6));
    let named = sizes(json!({"mm_vision_tower": "openai/clip-vit-large-patch14-336"})).unwrap();
    assert_eq!((named.num_attention_heads, named.num_hidden_layers), (1, 2));
    let with = |key: &str, value: i64| {
        let mut vision = vision.clone();
        vision[key] = value.into();
        json!({"vision_config": vision})
    };
    for (config, reason) in [
        (
            with("num_hidden_layers", 5),
            "`vision_config.num_hidden_layers` = 5 in its `config.json`, and its weights have 2",
        ),
        (with("image_size", 336), "`vision_config.image_size` = 336 in its `config.json`, and its weights have 84"),
        (
            json!({"mm_vision_tower": "google/siglip-so400m-patch14-384"}),
            "is not known, and no `vision_config` describes it",
        ),
        (json!({"mm_vision_tower": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"}), "is not known"),
        (json!({"mm_hidden_size": 1024}), "`mm_hidden_size` = 1024, and the vision tower has the width 96"),
    ] {
        let text = sizes(config).unwrap_err();
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn texts_that_are_longer_than_a_base_allows_are_refused_before_anything_is_loaded() {
    for (limits, named) in [
        (json!({"sliding_window": 100}), Some("`sliding_window` = 100")),
        (json!({"max_position_embeddings": 226}), Some("`max_position_embeddings` = 226")),
        (json!({"tokenizer_model_max_length": 64}), Some("`tokenizer_model_max_length` = 64")),
        (json!({"sliding_window": 227, "max_position_embeddings": 32768}), None),
    ] {
        // 36 tokens of the image, 192 ids of a text of which one is the image
        let checked = {
            let folder = base_with_tower(&limits);
            checked(&ModelConfig { base: folder.path().display().to_string(), ..ModelConfig::default() })
        };
        match named {
            None => assert_eq!(checked.unwrap(), [""; 0]),
            Some(named) => {
                let text = checked.unwrap_err().to_string();
                assert!(text.contains(named) && text.contains("have 227 tokens"), "{text}");
            }
        }
    }
}
