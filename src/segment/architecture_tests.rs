use super::*;
use crate::nn::LoraConfig;
use crate::segment::setup::planned_sizes;
use crate::tensor::weights::write_safetensors;
use crate::tensor::{Device, Kind, Tensor};
use serde_json::json;

/// A folder with this `config.json`: the sizes of a small language model, and `more`.
fn folder(more: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let llm = mistral::Config { hidden_size: 128, intermediate_size: 256, ..mistral::Config::mistral_7b() };
    let mut config = serde_json::to_value(llm).unwrap();
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
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
        assert!(text.ends_with(supported) && error.hint().contains(LLAVA_MED), "{text}");
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
fn values_that_the_language_model_would_not_compute_with_are_refused() {
    for config in [
        json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
        json!({"hidden_act": "gelu"}),
        json!({"head_dim": 256}),
    ] {
        let text = llm_config(folder(&config).path()).unwrap_err().to_string();
        let key = config.as_object().unwrap().keys().next().unwrap();
        assert!(text.contains(&format!("`{key}` = ")) && text.ends_with(" is not supported"), "{text}");
    }
}

#[test]
fn language_models_with_another_chat_template_are_refused() {
    let mistral = json!({"architectures": ["MistralForCausalLM"], "model_type": "mistral"});
    let inst = "{{ '[INST] ' + message['content'] + ' [/INST]' }}";
    let chat_ml = "{{ '<|im_start|>' + message['role'] }}";
    let (config, jinja) = ("tokenizer_config.json", "chat_template.jinja");
    let of = |model: &Value, files: &[(&str, String)]| {
        let folder = folder(model);
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let model = ModelConfig { base: folder.path().display().to_string(), ..ModelConfig::default() };
        check_parts(&model, &|_| panic!("nothing is fetched"))
    };
    let with = |template: Value| (config, json!({"bos_token": "<s>", "chat_template": template}).to_string());
    for (files, name) in [
        (vec![with(json!(chat_ml))], config),
        (vec![with(json!([{"name": "default", "template": chat_ml}]))], config),
        (vec![(jinja, chat_ml.to_owned())], jinja),
        (vec![with(json!(inst)), (jinja, chat_ml.to_owned())], jinja),
    ] {
        let error = of(&mistral, &files).unwrap_err();
        let text = error.to_string();
        let reason = format!(": the chat template in `{name}` does not contain `[INST]`");
        assert!(text.starts_with("`model.base`: ") && text.contains(&reason), "{text}");
        assert!(error.hint().contains("use a base with `[INST]`"), "{}", error.hint());
    }
    for files in [
        vec![],
        vec![(config, json!({"bos_token": "<s>"}).to_string())],
        vec![with(Value::Null)],
        vec![with(json!(inst))],
        vec![with(json!([{"name": "default", "template": inst}, {"name": "rag", "template": chat_ml}]))],
        vec![with(json!(chat_ml)), (jinja, inst.to_owned())],
    ] {
        assert_eq!(of(&mistral, &files).unwrap(), Vec::<String>::new(), "{files:?}");
    }
    // LLaVA does not use the template of its tokenizer
    let llava = json!({"architectures": ["LlavaMistralForCausalLM"], "model_type": "llava_mistral"});
    assert_eq!(of(&llava, &[with(json!(chat_ml))]).unwrap(), Vec::<String>::new());
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
    for (config, vision, reason) in [
        (json!({"architectures": ["SiglipModel"]}), json!({}), "SiglipModel is not supported; supported: CLIPModel, "),
        (json!({"model_type": "dinov2"}), json!({}), "dinov2 is not supported"),
        (json!({"model_type": "clip"}), json!({"hidden_act": "gelu"}), "`hidden_act` = \"gelu\" is not supported"),
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
        assert_eq!(check_parts(&model, &fetch)?, Vec::<String>::new());
        planned_sizes(&model, LoraConfig::default(), 2)
    };
    let sizes = of("hub:test/small", &json!({"num_hidden_layers": 3})).unwrap();
    assert_eq!((sizes.llm.hidden_size, sizes.llm.num_hidden_layers), (128, 3));
    assert_eq!((sizes.decoder.prompt_dim, &sizes.clip), (128, &clip::Config::vit_l_14_336()));
    let sizes = of("hub:test/224", &json!({"mm_vision_tower": "openai/clip-vit-large-patch14"})).unwrap();
    assert_eq!(sizes.clip.image_size, 224);
    let error = of("hub:test/qwen", &json!({"architectures": ["Qwen2VLForConditionalGeneration"]})).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("`model.base`: `hub:test/qwen`: Qwen2VLForConditionalGeneration is not"), "{text}");
}

#[test]
fn a_config_that_cannot_be_read_is_a_warning_and_known_ones_are_not_asked_for() {
    let fetch = |spec: &str| Err(Error::hub(spec, "cannot be reached", "check the network"));
    let warnings = |base: &str, image_encoder: &str| {
        let model = ModelConfig { base: base.into(), image_encoder: image_encoder.into(), ..ModelConfig::default() };
        check_parts(&model, &fetch).unwrap()
    };
    let given = warnings("hub:test/absent", RANDOM);
    assert_eq!(given.len(), 1);
    let text = "the `config.json` of `hub:test/absent` could not be read: memory and times are those of LLaVA-Med v1.5";
    assert!(given[0].starts_with(text), "{given:?}");
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
        check_parts(&model, &|_| panic!("nothing is fetched")).map_err(|error| error.to_string())
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
        let text = check_parts(&model, &fetch).unwrap_err().to_string();
        assert!(text.contains(&format!("this is {kind}; only TinyViT")), "{text}");
    }
}

#[test]
fn weights_that_do_not_belong_to_their_config_are_refused_before_memory_is_asked_for() {
    let llm = mistral::Config { hidden_size: 8, vocab_size: 16, num_hidden_layers: 2, ..mistral::Config::mistral_7b() };
    let of = |tensors: &[(&str, &[i64])]| {
        let folder = tempfile::tempdir().unwrap();
        file(folder.path(), tensors);
        check_llm_weights(folder.path(), &llm).map_err(|error| error.to_string())
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
    let checked =
        |spec: &str| check_parts(&ModelConfig { image_encoder: spec.to_owned(), ..ModelConfig::default() }, &fetch);
    for spec in ["hub:facebook/sam-vit-base", "sam_vit_b_01ec64.pth", "/none/medsam_vit_b.pth"] {
        let refused = checked(spec).map(|_| ()).err().map(|error| error.to_string());
        assert!(refused.as_ref().is_some_and(|text| text.contains("another SAM")), "{spec}: {refused:?}");
    }
    assert_eq!(checked("tinysam_42.3.pth").unwrap(), [""; 0]);
    assert!(checked("/none/mine.pth").unwrap()[0].contains("planned as TinyViT"));
}

#[test]
fn a_language_model_that_cannot_be_read_is_judged_by_its_name() {
    let fetch = |_: &str| Err(Error::hub("hub:o/n", "is not in the cache", "fetch it"));
    let checked = |spec: &str| check_parts(&ModelConfig { base: spec.to_owned(), ..ModelConfig::default() }, &fetch);
    for spec in [
        "hub:Qwen/Qwen2-VL-7B-Instruct",
        "hub:google/medgemma-4b-it",
        "hub:lmsys/vicuna-7b-v1.5",
        "hub:liuhaotian/llava-v1.5-7b",
        "hub:meta-llama/Llama-3.2-11B-Vision@main",
    ] {
        let refused = checked(spec).map(|_| ()).err().map(|error| error.to_string());
        assert!(refused.as_ref().is_some_and(|text| text.contains("not supported; supported: Llava")), "{refused:?}");
    }
    for spec in ["hub:lab/our-llava-med", "hub:liuhaotian/llava-v1.6-mistral-7b"] {
        assert!(checked(spec).unwrap()[0].contains("memory and times are those of LLaVA-Med"), "{spec}");
    }
}
