//! Checks that every operator that the program runs has a test case.

use super::*;
use prsmed::augment::dry_run::GenerationDryRun as Generation;
use prsmed::augment::pipeline_config::PipelineConfig;
use prsmed::augment::settings::Mode;
use prsmed::config::AugmentRun;
use prsmed::plan::dry_run::PlannedSteps;

/// Settings that together cover all code of the models.
const VARIANTS: [(&str, &[&str]); 16] = [
    ("tiny", &[]),
    (
        "tiny",
        &[
            "train.optimizer=adamw8bit",
            "train.offload_optimizer=true",
            "train.step_in_backward=true",
            "train.accumulation=1",
            "train.clip_norm=0",
        ],
    ),
    ("tiny", &["train.accumulation=2", "train.checkpointing=2", "model.batch_norm=batch", "lora.dropout=0.1"]),
    (
        "tiny",
        &[
            "train.precision=bf16",
            "train.checkpointing=full",
            "train.checkpoint_encoder=full",
            "train.checkpoint_decoder=true",
            "model.decoder=v6",
            "model.train_base=false",
            "model.stream_layers=1",
            "model.stream_vision=true",
        ],
    ),
    (
        "tiny",
        &["train.precision=bf16", "model.semantics=reference", "model.decoder_dropout=0.1", "train.ema_decay=0.9"],
    ),
    (
        "tiny",
        &["train.precision=fp16", "train.accumulation=2", "model.batch_norm=batch", "model.decoder_positions=false"],
    ),
    (
        "tiny",
        &[
            "train.precision=fp16",
            "train.checkpointing=full",
            "train.checkpoint_encoder=full",
            "model.semantics=reference",
            "lora.dropout=0.1",
        ],
    ),
    ("tiny", &["model.semantics=reference", "model.decoder_dropout=0.1", "train.checkpointing=1", "lora.alpha=8.0"]),
    (
        "tiny",
        &[
            "train.precision=bf16",
            "model.train_base=false",
            "model.quantization=nf4-double",
            "train.checkpointing=1",
            "lora.dropout=0.1",
        ],
    ),
    ("tiny", &["data.questions_per_image=3", "train.precision=bf16", "train.checkpointing=full"]),
    ("tiny", &["data.questions_per_image=2", "model.train_base=false", "train.precision=fp32"]),
    ("tiny", &["data.questions_per_image=3", "model.packed_attention=flash", "train.precision=bf16"]),
    ("tiny", &["data.cache_vision=ram", "model.train_base=false", "train.precision=bf16"]),
    ("tiny", &["train.graph=on", "train.optimizer=adamw8bit"]),
    // in fp32, because plans for a CPU multiply 16-bit matrices of this size to know oneDNN's memory
    ("full", &["train.precision=fp32", "train.checkpointing=full", "train.checkpoint_encoder=full"]),
    ("full", &["model.decoder=v6", "train.precision=fp32"]),
];

/// Names of operators that allocate or compute in a job.
fn of_job(config: &RunConfig, job: Job, shorter: usize) -> BTreeSet<String> {
    let example = Example {
        text_tokens: 20,
        answer_tokens: 8,
        num_classes: 6,
        new_tokens: 4,
        questions: config.data.questions_per_image,
        has_unknown_masks: config.data.questions_per_image == 3,
        largest: None,
    };
    let sizes = setup::planned_sizes(&config.model, &config.configs, config.lora, example.num_classes).unwrap();
    let build = |ranks: prsmed::trainer::Ranks| {
        let dry_run = SegmentDryRun::new(&config.model, &sizes, &config.train, example, (META, ranks))?;
        Ok(dry_run.with_shorter_rows(shorter).with_feature_cache(config.data.caches_features()))
    };
    let trace = dry_run::plan(job, &config.train, PlanTarget::Cpu, true, build).unwrap().trace;
    working(&trace, 0, 0)
}

/// Operators of training, evaluation and prediction.
fn of_program() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (preset, sets) in VARIANTS {
        let all = sets.iter().chain(&["model.image_size=128", "train.micro_batch=2"]);
        let pairs = all.map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
        let sources = Sources { preset: Some(preset.into()), sets: pairs, ..Sources::default() };
        let config = sources.resolve().unwrap().config;
        // a full run of the large preset has no operators that the small preset lacks
        let longest = if preset == "full" { Job::Step } else { Job::Train };
        for job in [longest, Job::Eval, Job::Predict] {
            for shorter in if job == Job::Predict { 0..1 } else { 0..3 } {
                names.append(&mut of_job(&config, job, 2 * shorter));
            }
        }
    }
    names
}

/// Operators of image generation, for model families and settings with different code.
fn of_generation() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for family in ["tiny", "tiny-sdxl"] {
        for sets in [
            &["augment.mode=keep_lesion", "augment.sampler=euler", "augment.decode=tiled"][..],
            &["augment.mode=mask_to_image", "augment.sampler=ddim", "augment.decode=whole", "augment.precision=bf16"],
            &["augment.mode=img2img", "augment.sampler=dpm++2m", "augment.decode=sliced", "augment.precision=fp16"],
        ] {
            let all = sets.iter().chain(&["augment.image_size=128", "augment.batch=2"]);
            let pairs = all.map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
            let sources = Sources { preset: Some("tiny".into()), sets: pairs, ..Sources::default() };
            let config = sources.resolve_as::<AugmentRun>().unwrap().config.augment;
            for channels in [4, 9] {
                let mut pipeline_config = PipelineConfig::random(family, config.mode == Mode::MaskToImage).unwrap();
                pipeline_config.unet.in_channels = channels;
                let generation =
                    Generation { config: &config, pipeline_config: &pipeline_config, prompts: 2, device: META };
                let steps = PlannedSteps { whole: config.steps, shown: config.steps };
                let walk =
                    dry_run::plan_walk(Job::Augment, steps, PlanTarget::Cpu, true, |begin| generation.walk(begin));
                names.append(&mut working(&walk.unwrap().trace, 0, 0));
            }
        }
    }
    names
}

#[test]
fn every_operator_of_the_program_has_a_case() {
    let _alone = ready();
    let cases = cases();
    let named: BTreeSet<&str> = cases.iter().map(|case| case.op).collect();
    let seen: BTreeSet<String> = cases.iter().flat_map(|case| planned(case).1).collect();
    let mut product = of_program();
    assert!(product.len() > 80, "{product:?}");
    let mut generation = of_generation();
    assert!(generation.contains("aten::native_group_norm"), "{generation:?}");
    product.append(&mut generation);
    // run only inside the backward pass of another operator, or by the autograd engine
    let inside = |name: &str| name.contains("backward") || name.starts_with("autograd::");
    let missing: Vec<&String> = product
        .iter()
        .filter(|name| if inside(name) { !seen.contains(*name) } else { !named.contains(name.as_str()) })
        .collect();
    assert!(missing.is_empty(), "no case for {missing:#?}");
}
