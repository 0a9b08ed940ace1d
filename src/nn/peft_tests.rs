use super::*;

const QUERY: &str = "model.layers.3.self_attn.q_proj";
const VALUE: &str = "model.layers.10.self_attn.v_proj";

fn parsed(json: &str) -> Result<PeftConfig, String> {
    PeftConfig::parse(&serde_json::from_str(json).expect("JSON"))
}

fn valid(json: &str) -> PeftConfig {
    parsed(json).unwrap_or_else(|reason| panic!("{json}: {reason}"))
}

#[test]
fn a_scale_is_alpha_by_rank_or_by_its_root() {
    for (json, rank, scale) in [
        (r#"{"r": 16, "lora_alpha": 16}"#, 16, 1.0),
        (r#"{"r": 16, "lora_alpha": 16, "use_rslora": true}"#, 16, 4.0),
        (r#"{"r": 4, "lora_alpha": 3, "use_rslora": true}"#, 4, 1.5),
        (r#"{"r": 4, "lora_alpha": 3, "use_rslora": null}"#, 4, 0.75),
        ("{}", 8, 1.0),
    ] {
        let config = valid(json);
        assert_eq!((config.rank(QUERY), config.scale(QUERY, rank)), (Ok(rank), Ok(scale)), "{json}");
    }
}

#[test]
fn patterns_match_the_end_of_a_path_and_the_first_counts() {
    let json = r#"{"r": 8, "lora_alpha": 8,
        "rank_pattern": {"q_proj": 4, "model.layers.3.self_attn.q_proj": 2, "self_attn": 64},
        "alpha_pattern": {"layers\\.1\\d\\..*v_proj": 32, "roj": 99, "^v_proj": 99, "(?!.*q_proj).*_proj": 16}}"#;
    let config = valid(json);
    assert_eq!((config.rank(QUERY), config.rank(VALUE)), (Ok(4), Ok(8)));
    assert_eq!((config.scale(QUERY, 4), config.scale(VALUE, 8)), (Ok(2.0), Ok(4.0)));
    assert_eq!(config.scale("model.layers.3.self_attn.k_proj", 8), Ok(2.0), "the look-ahead");
    assert_eq!(config.rank("my_q_proj"), Ok(8), "a path ends at a dot");
}

#[test]
fn targets_are_lists_patterns_or_all_linear_layers() {
    for (json, query, value) in [
        (r#"{"target_modules": ["q_proj", "k_proj"]}"#, true, false),
        (r#"{"target_modules": ["roj"]}"#, false, false),
        (r#"{"target_modules": ".*\\.(q|v)_proj"}"#, true, true),
        (r#"{"target_modules": "q_proj"}"#, false, false),
        (r#"{"target_modules": "(?!.*layers\\.3\\.).*_proj"}"#, false, true),
        (r#"{"target_modules": "all-linear"}"#, true, true),
        (r#"{"target_modules": null}"#, true, true),
        (r#"{"target_modules": "all-linear", "exclude_modules": ["v_proj"]}"#, true, false),
        (r#"{"target_modules": "all-linear", "exclude_modules": ".*layers\\.3\\..*"}"#, false, true),
        (r#"{"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [3, 4]}"#, true, false),
        (r#"{"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 10}"#, false, true),
        (r#"{"target_modules": ["q_proj", "v_proj"], "layers_to_transform": []}"#, true, true),
        (
            r#"{"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [3], "layers_pattern": "layers"}"#,
            true,
            false,
        ),
        (
            r#"{"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [3], "layers_pattern": ["h"]}"#,
            false,
            false,
        ),
        (r#"{"target_modules": "all-linear", "layers_to_transform": [3]}"#, true, true),
    ] {
        let config = valid(json);
        assert_eq!([QUERY, VALUE].map(|module| config.selects(module)), [Ok(query), Ok(value)], "{json}");
    }
    // the first number counts, also at the start of a path
    let config = valid(r#"{"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}"#);
    let modules = ["layers.1.blocks.5.q_proj", "a.layers.1.layers.5.q_proj", "a.layers.5.layers.1.q_proj"];
    assert_eq!(modules.map(|module| config.selects(module)), [Ok(true), Ok(true), Ok(false)]);
}

#[test]
fn settings_that_change_the_result_otherwise_are_errors_that_name_them() {
    for (key, value) in [
        ("peft_type", r#""LOHA""#),
        ("bias", r#""lora_only""#),
        ("bias", r#""all""#),
        ("use_dora", "true"),
        ("modules_to_save", r#"["lm_head"]"#),
        ("fan_in_fan_out", "true"),
        ("lora_bias", "true"),
        ("target_parameters", r#"["mlp.experts.gate_up_proj"]"#),
        ("trainable_token_indices", "[1, 2]"),
        ("trainable_token_indices", r#"{"embed_tokens": [1]}"#),
        ("layer_replication", "[[0, 4], [2, 5]]"),
        ("megatron_config", r#"{"tp": 2}"#),
        ("use_qalora", "true"),
        ("alora_invocation_tokens", "[5]"),
        ("loftq_config", r#"{"loftq_bits": 4}"#),
        ("corda_config", r#"{"corda_method": "kpm"}"#),
        ("init_lora_weights", r#""pissa""#),
        ("init_lora_weights", r#""pissa_niter_16""#),
        ("init_lora_weights", r#""olora""#),
        ("init_lora_weights", r#""corda""#),
        ("init_lora_weights", r#""loftq""#),
        ("invented_setting", "3"),
        ("r", "0"),
        ("r", r#""16""#),
        ("lora_alpha", r#""16""#),
        ("use_rslora", "1"),
        ("rank_pattern", r#"{"q_proj": 2.5}"#),
        ("rank_pattern", r#"{"q_proj": 0}"#),
        ("alpha_pattern", r#"{"q_proj": "x"}"#),
        ("alpha_pattern", r#"{"(": 2}"#),
        ("target_modules", "[1]"),
        ("target_modules", r#""(""#),
        ("layers_to_transform", r#"["x"]"#),
    ] {
        let json = format!(r#"{{"r": 8, "lora_alpha": 8, "{key}": {value}}}"#);
        let reason = parsed(&json).expect_err(&json);
        assert!(reason.contains(&format!("`{key}`")), "{json}: {reason}");
    }
}

#[test]
fn settings_without_effect_may_have_any_value() {
    valid(
        r#"{"peft_type": "LORA", "task_type": "SEQ_CLS", "revision": "main", "inference_mode": true, "bias": "none",
            "auto_mapping": {"base_model_class": "X"}, "megatron_core": "megatron.core", "init_lora_weights": "eva",
            "eva_config": {"rho": 2.0}, "qalora_group_size": 32, "peft_version": "0.21.2", "invented_setting": false,
            "other": "", "another": {}, "last": [], "lora_dropout": 0.1, "base_model_name_or_path": "a/b"}"#,
    );
    for value in ["true", "false", "null", r#""gaussian""#, r#""orthogonal""#] {
        valid(&format!(r#"{{"init_lora_weights": {value}}}"#));
    }
    let fixture = crate::fixture::checkout().join("tests/fixtures/parity");
    for name in ["lora", "lora_files/peft"] {
        PeftConfig::open(&fixture.join(name).join("adapter_config.json")).expect("settings that peft wrote");
    }
}
