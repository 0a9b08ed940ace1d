//! Image generation: planned bytes equal measured bytes on the CPU, in every phase, for random settings.

use super::*;
use prsmed::augment::dry_run::{GenerationDryRun as Generation, PHASES};
use prsmed::augment::pipeline_config::PipelineConfig;
use prsmed::augment::settings::AugmentConfig;
use prsmed::config::AugmentRun;
use prsmed::job::planned::{Fitted as _, Planned as _};
use prsmed::plan::dry_run::{Meter, PlannedSteps};
use prsmed::plan::machine::Machine;
use prsmed::plan::report::Plan;

fn settings(sets: &[String]) -> AugmentConfig {
    let pairs = sets.iter().map(|set| (set.clone(), "--set".to_owned())).collect();
    let sources = Sources { preset: Some("tiny".into()), sets: pairs, ..Sources::default() };
    sources.resolve_as::<AugmentRun>().unwrap().config.augment
}

fn draw_settings(rng: &mut ChaCha8Rng) -> (Vec<String>, &'static str, usize) {
    let mut one = |key: &str, values: &[&str]| format!("augment.{key}={}", values.choose(rng).unwrap());
    let mut sets = vec![
        one("mode", &["keep_lesion", "insert_lesion", "mask_to_image", "img2img"]),
        one("image_size", &["64", "128", "192"]),
        one("batch", &["1", "2", "3"]),
        one("precision", &["fp32", "bf16", "fp16"]),
        one("decode", &["whole", "sliced", "tiled", "auto"]),
        one("guidance", &["1", "5"]),
        one("steps", &["3", "4", "5"]),
        one("strength", &["0.4", "1"]),
        one("sampler", &["euler", "ddim", "dpm++2m", "dpm++2m-karras"]),
        "augment.tile_px=64".to_owned(),
    ];
    with_small_steps_in_fp16(&mut sets, "augment.image_size=");
    let family = ["tiny", "tiny-sdxl", "tiny-inpaint"].choose(rng).unwrap();
    (sets, family, rng.random_range(1..4))
}

/// Small networks of each model family with its own memory use.
fn pipeline_config(family: &str, config: &AugmentConfig) -> PipelineConfig {
    let control = config.mode == prsmed::augment::settings::Mode::MaskToImage;
    let mut pipeline_config = PipelineConfig::random("tiny", control).unwrap();
    match family {
        "tiny-sdxl" => pipeline_config = PipelineConfig::random("tiny-sdxl", control).unwrap(),
        "tiny-inpaint" => pipeline_config.unet.in_channels = 9,
        _ => {}
    }
    pipeline_config
}

fn phases_of(config: &AugmentConfig, pipeline_config: &PipelineConfig, prompts: usize, device: Device) -> Vec<Peak> {
    let generation = Generation { config, pipeline_config, prompts, device };
    if device == META {
        let steps = PlannedSteps { whole: config.steps, shown: config.steps };
        let planned =
            dry_run::plan_walk(Job::Augment, steps, PlanTarget::Cpu, false, |begin| generation.walk(begin)).unwrap();
        let phases = replay::phases(&planned.trace, replay::ReplayTarget::Cpu).into_iter();
        return phases.map(|p| (p.name, p.allocated_peak, p.categories)).collect();
    }
    let mut meter = PhaseMeter::begin(device).unwrap();
    generation.walk(&mut |phase| meter.begin(phase)).unwrap();
    meter.finish().unwrap().into_iter().map(|p| (p.name, p.allocated_peak, p.categories)).collect()
}

#[test]
fn planned_memory_of_generation_equals_measured_memory() {
    let _alone = ready();
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut different = Vec::new();
    for _ in 0..share(40) {
        let (sets, family, prompts) = draw_settings(&mut rng);
        let config = settings(&sets);
        let pipeline_config = pipeline_config(family, &config);
        let planned = phases_of(&config, &pipeline_config, prompts, META);
        let measured = phases_of(&config, &pipeline_config, prompts, Device::Cpu);
        assert_eq!(planned.iter().map(|phase| phase.0).collect::<Vec<_>>(), PHASES);
        assert!(measured.iter().all(|phase| phase.1.0 > 100_000), "{measured:?}");
        for (plan, truth) in planned.iter().zip(&measured) {
            if plan != truth {
                different.push(format!("{sets:?} {family} {prompts}\n  planned {plan:?}\n  measured {truth:?}"));
            }
        }
    }
    assert!(different.is_empty(), "{} phases differ:\n{}", different.len(), different.join("\n"));
}

/// Plans of the published model sizes, without weights: memory grows with the batch, and SDXL fits an 8 GB GPU.
#[test]
fn published_model_sizes_can_be_planned() {
    let _alone = ready();
    let run = |sets: &[&str]| {
        let pairs = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
        let sources = Sources { preset: Some("augment".into()), sets: pairs, ..Sources::default() };
        sources.resolve_as::<AugmentRun>().unwrap().config
    };
    let machine = |name: &str| Machine::named(name).unwrap();
    let plan = |run: &AugmentRun, gpu: &str| -> Plan {
        run.plan_of(&run.planned_pipeline_config().unwrap(), Job::Augment, &machine(gpu)).unwrap()
    };
    let peak = |sets: &[&str]| plan(&run(sets), "24gb").device_peak;
    let [one, four] = ["augment.batch=1", "augment.batch=4"].map(|batch| peak(&[batch, "augment.model=random:sdxl"]));
    assert!(one < four, "{one} {four}");
    assert!(one.0 > 5 << 30 && four.0 < 24 << 30, "{one} {four}");
    let sd15 = peak(&["augment.model=random:sd15", "augment.image_size=512"]);
    assert!(sd15 < one, "{sd15}");
    let small = run(&["augment.model=random:sdxl"]);
    let fitted = small.fitted(&small.planned_pipeline_config().unwrap(), &machine("8gb"), true).unwrap();
    let (fitted, plan) = fitted.expect("SDXL fits 8 GB");
    assert!(plan.fits && fitted.augment.batch >= 1, "{plan:?}");
}
