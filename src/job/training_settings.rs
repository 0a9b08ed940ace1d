//! Settings of a training that depend on the machine or on another run.

use super::How;
use super::found::{CACHE, GRAPH, KERNELS, nothing_fits};
use super::together::main_only;
use super::training_plan::TrainingSearch;
use crate::config::{FlagSet, Resolved, RunConfig, Settings as _, Sources};
use crate::hub::Spec;
use crate::plan::detect;
use crate::plan::machine::Machine;
use crate::plan::search::{Extra, FoundPlans, HEADROOM_FRAC, Space, search, smallest};
use crate::runtime::Runtime;
use crate::segment::setup::Build;
use crate::segment::{init, needs, weight_files};
use crate::tensor::meta::PlanTarget;
use crate::tensor::{Device, Kind};
use crate::{Error, Result};
use std::path::Path;

/// Said if a search takes long.
pub const SEARCHING: &str = "searching settings that fit: up to a minute for the full model";

/// The search of `prsmed preset` and `prsmed train`, with so many samples in a step. Settings given by flags are not tried.
///
/// # Errors
/// [`Error::Config`] for too many processes; those of [`Planned::plan_of`](super::planned::Planned::plan_of).
pub fn search_for(resolved: &Resolved, machine: &Machine, samples: usize, may_shrink: bool) -> Result<FoundPlans> {
    let config = &resolved.config;
    let (wanted, packed) = (config.model.image_size, config.data.questions_per_image);
    let smaller = [768, 512].into_iter().filter(|side| may_shrink && *side < wanted);
    let on_a_gpu = machine.target() == PlanTarget::Cuda;
    let ranks = machine.num_ranks();
    if samples < ranks {
        let reason = format!("a step has {samples} samples, too few for {ranks} GPUs");
        return Err(Error::argument("gpus", reason, "use fewer GPUs, or give a larger argument `effective_batch`"));
    }
    // numbers of questions that divide the effective batch, so that a step has exactly as many samples; each GPU needs an
    // image
    let divides = |questions: usize| samples.is_multiple_of(questions) && samples / questions >= ranks;
    let questions = (1..=packed).rev().filter(|questions| divides(*questions)).collect();
    let keeps_host_layers =
        ["model.stream_layers", "model.stream_vision"].iter().any(|key| resolved.is_from_a_flag(key));
    let searched = TrainingSearch { config, machine, effective_batch: samples, questions, keeps_host_layers };
    let space = Space {
        base: base(resolved, on_a_gpu),
        sizes: std::iter::once(wanted).chain(smaller).map(|side| format!("model.image_size={side}")).collect(),
        compromises: searched.compromises(),
        extras: extras(resolved, on_a_gpu && ranks == 1),
        headroom_frac: HEADROOM_FRAC,
    };
    let mut found = search(&searched, &space)?;
    if found.fitting.is_empty() {
        found.smallest = smallest(&searched, &space)?;
    }
    Ok(found)
}

/// Assignments of every candidate.
fn base(resolved: &Resolved, on_a_gpu: bool) -> String {
    let config = &resolved.config;
    let cache = if config.data.caches_features() { config.value_of(CACHE) } else { "off".to_owned() };
    let kernels = if on_a_gpu && !resolved.is_from_a_flag(KERNELS) { auto(config, KERNELS) } else { String::new() };
    format!("{CACHE}={cache} {kernels}")
}

/// What is tried on the result.
fn extras(resolved: &Resolved, may_capture: bool) -> Vec<Extra> {
    let config = &resolved.config;
    let can_cache = !config.data.caches_features() && config.can_cache_features() && !resolved.is_from_a_flag(CACHE);
    let cache = Extra { what: "data.cache_vision=disk", sets: format!("{CACHE}=disk"), captures: false };
    let captures = may_capture && config.model.semantics.hides_answer() && !resolved.is_from_a_flag(GRAPH);
    let graph = Extra { what: "train.graph=auto", sets: auto(config, GRAPH), captures: true };
    [can_cache.then_some(cache), captures.then_some(graph)].into_iter().flatten().collect()
}

/// `auto` for a switch that is off, else its value.
fn auto(config: &RunConfig, key: &str) -> String {
    let value = config.value_of(key);
    format!("{key}={}", if value == "off" { "auto" } else { &value })
}

/// The settings that a training takes from the run whose weights it starts from, a path or `hub:...`, and the setting that
/// names that run.
///
/// # Errors
/// [`Error::Weights`] or [`Error::Hub`] for a run that cannot be read.
pub fn of_init(run: &Path, runtime: &Runtime) -> Result<Vec<String>> {
    let locate = |spec: &str| runtime.locate(spec);
    let build = Build { cache: runtime.cache(), ..Build::new(Device::Cpu, Kind::Float, &locate) };
    let mut settings = weight_files::read_run(run, None, None, runtime, &|folder| init::settings(folder, build))?;
    let path = run.to_string_lossy();
    let named = match Spec::parse(&path)? {
        Spec::Hub(_) => needs::of_run(&path, runtime.hub(), runtime.observer().as_ref())?.spec,
        Spec::Local(_) => std::path::absolute(run).map_err(Error::io(run, "find"))?.display().to_string(),
    };
    settings.push(format!("model.init={named}"));
    Ok(settings)
}

/// Stops a training with a preset made for GPUs on a machine without one: it would load the full model on the CPU.
///
/// # Errors
/// [`Error::Config`] with the reason why there is no GPU.
pub fn refuse_gpu_preset_without_gpu(resolved: &Resolved, runtime: &Runtime) -> Result<()> {
    let preset = resolved.origins.values().find_map(|origin| origin.strip_prefix("preset ")).unwrap_or_default();
    if runtime.device() != Device::Cpu || !preset.starts_with("gpu-") {
        return Ok(());
    }
    let why = detect::why_no_gpu(runtime.visible_gpus());
    let reason = format!("`{preset}` needs a GPU, and none is usable: {why}");
    let hint = "`prsmed doctor` shows what this machine offers; the argument `preset=cpu` trains the same model in host memory, \
                slowly, the argument `preset=tiny` a small one";
    Err(Error::argument("preset", reason, hint))
}

/// The fastest settings of the full model for the GPU of this machine. All processes take those of the first one.
/// `sets` have priority over what the search finds. With `checks_files` it first refuses missing weight files.
///
/// # Errors
/// [`Error::Config`] if nothing fits; those of the settings and files.
pub fn for_this_gpu(sets: Vec<FlagSet>, how: &How, checks_files: bool) -> Result<Resolved> {
    let (ranks, machine) = (how.ranks, &how.machine);
    let resolve = |sets: Vec<FlagSet>| Sources { default_preset: "full".into(), sets, ..Sources::default() }.resolve();
    let mut full = resolve(sets.clone())?;
    if checks_files && !how.resume.resumes() {
        weight_files::check_architectures(&mut full.config, how.runtime)?;
        weight_files::check(needs::of_model(&full.config.model), how.runtime)?;
    }
    let search = || {
        let fitted = full.clone().fit_precision(machine)?;
        let found = search_for(&fitted, machine, full.config.samples_of_a_step(), true)?;
        let Some(best) = found.fitting.first() else {
            let reason = nothing_fits(&found, &machine.offer().device);
            let hint = "use a larger GPU, or skip this check with the argument `preset` and the argument `no_plan`";
            return Err(Error::config("train", reason, hint));
        };
        let config = fitted.config.with_sets(&best.sets)?.divided_among(machine.num_ranks())?;
        let origin = format!("preset for {}", machine.offer().device);
        let chosen = config.changes_from(&fitted.config).into_iter();
        Ok(chosen.map(|assignment| (assignment, origin.clone())).collect::<Vec<_>>())
    };
    let search = || how.runtime.with_patience(SEARCHING, search);
    let chosen = ranks.gather_if_all(main_only(ranks, search).map(Option::unwrap_or_default))?.swap_remove(0);
    // the user's settings have priority; the plan that follows checks if they fit
    let mut found = resolve(chosen.into_iter().chain(sets).collect())?;
    found.config.configs = full.config.configs;
    Ok(found)
}
