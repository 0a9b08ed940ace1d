//! Tests of presets, files and flags.

use super::*;

fn sources(sets: &[&str]) -> Sources {
    Sources {
        preset: Some("tiny".into()),
        sets: sets.iter().map(|s| ((*s).to_owned(), "--set".to_owned())).collect(),
        ..Sources::default()
    }
}

#[test]
fn every_preset_resolves_and_round_trips() {
    for (name, _) in PRESETS {
        let resolved = Sources { preset: Some(name.into()), ..Sources::default() }.resolve().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, resolved.to_toml()).unwrap();
        let again = Sources { preset: Some(name.into()), file: Some(file), ..Sources::default() };
        assert_eq!(again.resolve().unwrap().config, resolved.config, "{name}");
        // a continued run states the origins of its first settings
        let continued = Sources { continues: true, ..again };
        assert_eq!(continued.resolve().unwrap().to_toml(), resolved.to_toml(), "{name}");
        let sets = vec![("train.epochs=77".to_owned(), "--set".to_owned())];
        let changed = Sources { sets, ..continued }.resolve().unwrap().to_toml();
        assert!(changed.contains("epochs = 77  # --set"), "{changed}");
    }
}

#[test]
fn sets_win_and_their_origin_is_kept() {
    let resolved = sources(&["train.micro_batch=3", "train.learning_rate=1", "model.base=hub:a/b"]).resolve().unwrap();
    assert_eq!(resolved.config.train.micro_batch, 3);
    assert!((resolved.config.train.learning_rate - 1.0).abs() < 1e-12);
    assert_eq!(resolved.config.model.base, "hub:a/b");
    assert_eq!(resolved.origins["train.micro_batch"], "--set");
    assert!(resolved.to_toml().contains("micro_batch = 3  # --set"));
}

#[test]
fn a_misspelt_key_names_the_nearest() {
    let error = sources(&["train.micro_bacth=3"]).resolve().unwrap_err();
    assert_eq!(error.hint(), "did you mean `train.micro_batch`?");
    // the name without its table
    let error = sources(&["epochs=3"]).resolve().unwrap_err();
    assert_eq!(error.hint(), "did you mean `train.epochs`?");
}

#[test]
fn bad_values_name_their_key() {
    for (set, key) in [("train.micro_batch=0", "train.micro_batch"), ("lora.dropout=1.5", "lora.dropout")] {
        let error = sources(&[set]).resolve().unwrap_err();
        assert!(matches!(&error, Error::Config { key: k, .. } if k == key), "{error}");
    }
    let wrong = |sets: &[&str]| sources(sets).resolve().unwrap_err();
    let error = wrong(&["train.epochs=3", "train.micro_batch=many", "lora.rank=2"]);
    assert_eq!(
        error.to_string(),
        "`train.micro_batch`: invalid type: string \"many\", expected a whole number, 0 or more (--set)"
    );
    assert!(error.hint().starts_with("the preset has `8`; "), "{}", error.hint());
    let error = wrong(&["train.precision=fp64"]).to_string();
    assert!(error.starts_with("`train.precision`: unknown variant `fp64`, expected one of `fp32`"), "{error}");
    assert!(wrong(&["model=3"]).to_string().starts_with("`model`: invalid type"));
}

#[test]
fn questions_share_an_image_only_if_that_changes_no_result() {
    let set = |other: &str| sources(&["data.questions_per_image=3", other]).resolve();
    assert_eq!(set("model.batch_norm=frozen").unwrap().config.data.questions_per_image, 3);
    for (other, remedy) in [
        ("model.semantics=reference", "`model.semantics=corrected`"),
        ("model.batch_norm=batch", "`model.batch_norm=frozen`"),
    ] {
        let error = set(other).unwrap_err();
        assert!(matches!(&error, Error::Config { key, .. } if key == "data.questions_per_image"), "{error}");
        assert!(error.hint().contains(remedy), "{}", error.hint());
    }
}

#[test]
fn step_in_backward_excludes_options_that_need_all_gradients() {
    let fitting = ["train.step_in_backward=true", "train.accumulation=1", "train.clip_norm=0", "train.precision=bf16"];
    assert!(sources(&fitting).resolve().is_ok());
    for (set, remedy) in [
        ("train.accumulation=2", "train.accumulation=1"),
        ("train.clip_norm=1", "train.clip_norm=0"),
        ("train.precision=fp16", "train.precision=bf16"),
    ] {
        let error = sources(&[&fitting[..], &[set]].concat()).resolve().unwrap_err();
        assert!(error.to_string().starts_with("`train.step_in_backward`"), "{error}");
        assert!(error.hint().contains(remedy), "{}", error.hint());
    }
}

#[test]
fn settings_of_augmentation_and_of_synthetic_rows() {
    use crate::data::classical::Augment;
    use crate::data::mixing_sampler::Ratio;
    let data = |sets: &[&str]| sources(sets).resolve().map(|resolved| (resolved.config.data, resolved.origins));
    let (given, origins) = data(&["data.augment=flip_rotate", "data.synthetic_ratio=1"]).unwrap();
    assert_eq!((given.augment, given.synthetic_ratio), (Augment::FlipRotate, Ratio::PerReal(1.0)));
    assert_eq!(origins["data.synthetic_ratio"], "--set");
    let (given, _) = data(&["data.augment=classical", "data.synthetic_ratio=all"]).unwrap();
    assert_eq!((given.augment, given.synthetic_ratio), (Augment::Classical, Ratio::All));
    let refused = |set: &str| data(&[set]).unwrap_err().to_string();
    let error = refused("data.augment=some");
    assert!(error.starts_with("`data.augment`: expected `none`, `flip_rotate` or `classical`"), "{error}");
    let error = refused("data.synthetic_ratio=-1");
    assert!(error.starts_with("`data.synthetic_ratio`: expected `all` or a number, 0 or more"), "{error}");
    assert_eq!(refused("data.synthetic_until=1.5"), "`data.synthetic_until`: must be from 0 to 1, got 1.5");
}

#[test]
fn sizes_may_come_from_a_file_over_a_preset_without() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sizes.toml");
    let table = |sizes: &Value| {
        let random = [("base", "random"), ("image_encoder", "random")].map(|(k, v)| (k.to_owned(), v.into()));
        let model = random.into_iter().chain([("sizes".to_owned(), sizes.clone())]).collect::<Table>();
        Table::from_iter([("model".to_owned(), Value::Table(model))])
    };
    let resolve = |sizes: &Value| {
        std::fs::write(&file, table(sizes).to_string()).unwrap();
        Sources { preset: Some("full".into()), file: Some(file.clone()), ..Sources::default() }.resolve()
    };
    let mut sizes = preset::<RunConfig>("tiny").unwrap()["model"]["sizes"].clone();
    let found = resolve(&sizes).unwrap();
    assert_eq!(found.config.model.sizes, sources(&[]).resolve().unwrap().config.model.sizes);
    assert_eq!(found.origins["model.sizes.clip.hidden_size"], file.display().to_string());
    sizes["clip"].as_table_mut().unwrap().insert("hiden_size".into(), 3.into());
    assert!(resolve(&sizes).unwrap_err().to_string().contains("model.sizes.clip.hiden_size"));
}

#[test]
fn unknown_keys_of_sizes_are_refused() {
    for set in ["model.sizes.clip.hiden_size=3", "model.sizes.vocab=9"] {
        let error = sources(&[set]).resolve().unwrap_err();
        assert!(error.to_string().contains(set.split_once('=').unwrap().0), "{error}");
    }
    assert_eq!(sources(&["model.sizes.llm.initializer_range=0.1"]).resolve().unwrap().config.model.image_size, 256);
}

/// A run folder, a preset and a manifest that were written before settings and fields were renamed.
#[test]
fn files_with_old_names_are_read() {
    use crate::augment::export::Journal;
    use crate::data::classical::Augment;
    use crate::segment::resume;
    let folder = crate::fixture::checkout().join("tests/fixtures/old_names");
    let resolve = |name: &str| {
        let sources = Sources { default_preset: "full".into(), file: Some(folder.join(name)), ..Sources::default() };
        sources.resolve().unwrap().config
    };
    let run = resolve("run/config.toml");
    assert_eq!((run.data.questions_per_image, run.data.augment), (2, Augment::FlipRotate));
    assert_eq!(resume::read(&folder.join("run/config.toml")).unwrap(), run);
    assert_eq!(crate::segment::setup::describe(&folder.join("run")).unwrap().model, run.model);
    let preset = resolve("preset.toml");
    assert_eq!((preset.data.questions_per_image, preset.data.augment), (3, Augment::FlipRotate));
    assert_eq!(preset.model.quantization, crate::nn::Quantization::Nf4);
    let pairs = Journal::read(&folder.join("manifest.jsonl")).unwrap();
    assert_eq!(pairs[0].source_mask.as_deref(), Some("phantom_00000"));
    let old = sources(&["data.questions_per_picture=2", "data.augment=turn"]).resolve().unwrap();
    assert_eq!(old.origins["data.questions_per_image"], "--set");
    let sets = [("finetune.num_samples_for_metrics=24", "--set"), ("finetune.guidance_scale=2", "--set")];
    let sets = sets.map(|(set, flag)| (set.to_owned(), flag.to_owned())).to_vec();
    let sources = Sources { default_preset: "lora-sdxl".into(), sets, ..Sources::default() };
    let run = sources.resolve_as::<crate::config::FinetuneRun>().unwrap().config;
    assert_eq!((run.finetune.samples, run.finetune.sample_guidance), (24, 2.0));
}

#[test]
fn a_file_without_newer_settings_has_their_defaults() {
    use crate::segment::resume;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    std::fs::write(&file, "[train]\nepochs = 3\n").unwrap();
    let mut expected = RunConfig::default();
    expected.train.epochs = 3;
    assert_eq!(resume::read(&file).unwrap(), expected);
    let full = Sources { preset: Some("full".into()), ..Sources::default() }.resolve().unwrap().config;
    assert_eq!(full, RunConfig::default());
}

#[test]
fn presets_state_what_differs_from_the_defaults() {
    let config = sources(&[]).resolve().unwrap().config;
    let text = config.to_preset();
    assert!(text.starts_with("preset = \"full\"\n") && text.contains("micro_batch = 8"), "{text}");
    assert!(!text.contains("weight_decay"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("preset.toml");
    std::fs::write(&file, text).unwrap();
    let again = Sources { default_preset: "tiny".into(), file: Some(file), ..Sources::default() }.resolve().unwrap();
    assert_eq!(again.config, config);
}

#[test]
fn every_declared_saving_is_a_value_of_its_setting() {
    for setting in RunConfig::settings() {
        let Some((value, _)) = setting.saving else { continue };
        let set = format!("{}={value}", setting.key);
        RunConfig::default().with_sets(&set).unwrap();
    }
    for setting in AugmentRun::settings() {
        let Some((value, _)) = setting.saving else { continue };
        AugmentRun::default().with_sets(&format!("{}={value}", setting.key)).unwrap();
    }
}

#[test]
fn limits_of_the_filter_are_read_and_checked() {
    let read: Thresholds = toml::from_str("dice_min = 0.7").unwrap();
    assert_eq!(read, Thresholds { dice_min: 0.7, ..Thresholds::default() });
    assert!(toml::from_str::<Thresholds>("dice = 0.7").is_err());
    let refused = |set: &str| AugmentRun::default().with_sets(set).unwrap_err().to_string();
    assert_eq!(refused("filter.knn_quantile=1.5"), "`filter.knn_quantile`: must be from 0 to 1, got 1.5");
    assert_eq!(refused("filter.sigma=nan"), "`filter.sigma`: must be above 0, got NaN");
}

#[test]
fn a_gpu_without_bf16_gets_fp16_unless_bf16_is_asked_for() {
    use crate::trainer::precision::Precision;
    let of = |gpu: &str, preset: &str, set: Option<&str>| {
        let sets = set.into_iter().map(|set| (set.to_owned(), "--set".to_owned())).collect();
        let sources = Sources { preset: Some(preset.into()), sets, ..Sources::default() };
        sources.resolve().unwrap().fit_precision(&Machine::named(gpu).unwrap()).unwrap()
    };
    for gpu in ["T4", "RTX 2080 Ti", "Quadro RTX 8000"] {
        for preset in ["full", "gpu-16gb"] {
            let resolved = of(gpu, preset, None);
            assert_eq!(resolved.config.train.precision, Precision::Fp16, "{gpu} {preset}");
            let note = resolved.precision_note();
            assert_eq!(note, Some(format!("{gpu} has no bf16: using `train.precision=fp16`")));
        }
        let asked = of(gpu, "full", Some("train.precision=bf16"));
        let refused = Machine::named(gpu).unwrap().check_precision("train.precision", asked.config.train.precision);
        assert!(refused.unwrap_err().to_string().ends_with("has no bf16"), "{gpu}");
    }
    for (gpu, preset) in [("RTX 3060", "full"), ("24gb", "gpu-24gb"), ("T4", "tiny"), ("cpu:24gb", "full")] {
        let resolved = of(gpu, preset, None);
        assert_ne!(resolved.config.train.precision, Precision::Fp16, "{gpu}");
        assert_eq!(resolved.precision_note(), None);
    }
}

#[test]
fn a_preset_of_another_task_is_named_with_its_command() {
    fn hint<T: Settings>(name: &str) -> String {
        let sources = Sources { preset: Some(name.into()), ..Sources::default() };
        sources.resolve_as::<T>().map(|_| ()).unwrap_err().hint()
    }
    let hints = [
        (hint::<RunConfig>("full-sdxl"), "it belongs to `prsmed augment finetune`; use one of tiny, "),
        (hint::<RunConfig>("augment"), "it belongs to `prsmed augment generate`; use one of tiny, "),
        (hint::<FinetuneRun>("gpu-24gb"), "it belongs to `prsmed train`; use one of "),
        (hint::<RunConfig>("nonsense"), "use one of tiny, "),
    ];
    for (hint, start) in hints {
        assert!(hint.starts_with(start), "{hint}");
    }
}
