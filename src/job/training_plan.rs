//! Plans of a [`RunConfig`]: dry runs with its longest texts, the search for settings that fit, and changes that save
//! memory.

use super::planned::{Change, Planned};
use crate::Result;
use crate::config::RunConfig;
use crate::data::classical::Augment;
use crate::data::manifest::{Manifest, Split};
use crate::data::split::spread;
use crate::models::prsmed;
use crate::plan::dry_run::{self, Buffers, DryRun, Job, Measured, Phase};
use crate::plan::duration::{Duration, Samples};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{Choice, Compromise, Effort, Problem, Saving, Use};
use crate::runtime::Runtime;
use crate::segment::dry_run::{Example, SegmentDryRun};
use crate::segment::init;
use crate::segment::setup::{self, BatchNorm, ModelConfig};
use crate::segment::task::CacheVision;
use crate::segment::vision_features;
use crate::tensor::meta::Target;
use crate::tensor::{Device, META, kernels};
use crate::trainer::precision::Precision;
use crate::trainer::{FirstLayers, Ranks, Switch, TrainConfig};
use std::collections::HashSet;

/// Modality classes of a plan without data.
const CLASSES: usize = 6;
/// Token ids of the template around question and answer, and of a short question.
const TEMPLATE_TOKENS: usize = 24;
/// Longest answer of a planned prediction: the default of `prsmed predict`.
const NEW_TOKENS: usize = 128;

impl RunConfig {
    /// The longest batch that these settings allow: every text as long as `model.max_text_tokens`.
    pub fn longest_example(&self) -> Example {
        let text_tokens = self.model.max_text_tokens.max(TEMPLATE_TOKENS + 2);
        Example {
            text_tokens,
            answer_tokens: text_tokens - TEMPLATE_TOKENS,
            num_classes: CLASSES,
            new_tokens: NEW_TOKENS,
            questions: self.data.questions_per_image,
            has_unknown_masks: false,
            largest: None,
        }
    }

    /// Sizes of the model, from settings alone.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn planned_sizes(&self) -> Result<prsmed::Config> {
        init::planned_sizes(&self.model, &self.configs, self.lora, CLASSES)
    }

    /// Runs `job` with these settings on the meta device; `costs` as in [`dry_run::plan`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn dry_run(&self, job: Job, example: Example, machine: &Machine, costs: bool) -> Result<DryRun> {
        let sizes = init::planned_sizes(&self.model, &self.configs, self.lora, example.num_classes)?;
        self.dry_run_sized(job, &sizes, example, machine, costs)
    }

    /// [`Self::dry_run`] of a model whose sizes are known.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn dry_run_sized(
        &self,
        job: Job,
        sizes: &prsmed::Config,
        example: Example,
        machine: &Machine,
        costs: bool,
    ) -> Result<DryRun> {
        machine.check_precision("train.precision", self.train.precision)?;
        vision_features::refuse_trained_tower(&self.data, self.model.train_base)?;
        machine.set_planned_gpu();
        let mut dry_run = dry_run::plan(job, &self.train, machine.place(), costs, |ranks| {
            let dry_run = SegmentDryRun::new(&self.model, sizes, &self.train, example, (META, ranks))?;
            Ok(dry_run.with_feature_cache(job != Job::Eval && self.data.caches_features()))
        })?;
        dry_run.buffers = self.buffers(job, sizes);
        Ok(dry_run)
    }

    /// Runs `job` by `ranks` with random weights on `device`, and measures its memory.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn measure(&self, job: Job, device: Device, ranks: Ranks) -> Result<Vec<Phase>> {
        let (sizes, example) = (self.planned_sizes()?, self.longest_example());
        kernels::check(device)?;
        self.train.prepare_process();
        let build = |ranks: Ranks| {
            let task = SegmentDryRun::random(&self.model, &sizes, &self.train, example, (device, ranks))?;
            Ok(task.with_feature_cache(job != Job::Eval && self.data.caches_features()))
        };
        let mut meter = Measured::begin(device)?;
        dry_run::dry_run(job, &self.train, ranks, &build, &mut meter)?;
        meter.finish()
    }

    /// Predicted time of a training on `of`, whose memory plan is `plan`; `None` on a CPU without a reading.
    ///
    /// # Errors
    /// Those of [`Planned::plan_of`].
    pub fn duration(&self, of: Samples, plan: &Plan, machine: &Machine) -> Result<Option<Duration>> {
        let questions = of.questions_of_a_group();
        let time = if questions < self.data.questions_per_image {
            // shorter steps than those of the memory plan
            let mut config = self.clone();
            config.data.questions_per_image = questions;
            config.plan_for(Job::Train, machine)?.time
        } else {
            plan.time
        };
        Ok(time.map(|time| Duration::new(of, &self.train, time.seconds)))
    }

    /// Memory of `job` besides tensors, with a full input pipeline.
    fn buffers(&self, job: Job, sizes: &prsmed::Config) -> Buffers {
        let pixels = setup::pixels(&self.model, sizes);
        let half_precision = self.train.precision != Precision::Fp32;
        let kept =
            if self.data.caches_features() && job != Job::Eval { self.data.cache_vision } else { CacheVision::Off };
        // features in memory are shared by all samples that wait for their step
        let read = match kept {
            CacheVision::Disk => vision_features::feature_shape(&sizes.clip, self.train.precision.kind()).bytes(),
            CacheVision::Off | CacheVision::Ram => 0,
        };
        let sample = pixels.collated_bytes(self.data.questions_per_image) + read;
        match job {
            Job::Train | Job::Step | Job::Eval => Buffers {
                half_precision,
                graph_inputs: 0,
                prefetched: (self.data.prefetch.max(1) * self.train.micro_batch * sample) as u64,
                features: if kept == CacheVision::Ram { (self.data.cache_vision_mib as u64) << 20 } else { 0 },
                // with flips and rotations, training and validation have separate caches
                cache: ((self.data.cache_mib << 20) * if self.data.augment == Augment::FlipRotate { 2 } else { 1 })
                    as u64,
            },
            Job::Predict | Job::Augment => Buffers { half_precision, ..Buffers::default() },
        }
    }

    /// These settings with caches no larger than a run on `manifest` fills them.
    #[must_use]
    pub fn with_cache_for(&self, manifest: &Manifest) -> Self {
        const TURNED: usize = 8;
        // building the model reports wrong sizes
        let Ok(sizes) = init::planned_sizes(&self.model, &self.configs, self.lora, manifest.modalities.len()) else {
            return self.clone();
        };
        let pixels = setup::pixels(&self.model, &sizes);
        let mut rows = spread(manifest.rows_of(Split::Train), self.data.max_train_rows);
        if self.data.synthetic_ratio.rows(rows.len(), usize::MAX) > 0 {
            rows.extend(manifest.synthetic_rows());
        }
        let held_out = spread(manifest.rows_of(Split::Val), self.data.max_val_rows);
        let images = |rows: &[usize]| {
            let rows = rows.iter().map(|row| &manifest.rows[*row]);
            rows.map(|row| (&row.image_path, &row.mask_path)).collect::<HashSet<_>>().len()
        };
        // calibration reads eight; batches for the steps after the last one are prepared too
        let seen = match usize::try_from(self.train.max_steps) {
            Ok(steps @ 1..) => {
                let batches = steps.saturating_mul(self.train.accumulation).saturating_add(self.data.prefetch.max(1));
                // each question about an image may have its own mask
                let rows = self.train.micro_batch.saturating_mul(self.data.questions_per_image);
                batches.saturating_mul(rows).saturating_add(8)
            }
            _ => usize::MAX,
        };
        let trained = images(&rows).min(seen);
        let kept = match self.data.augment {
            Augment::None => {
                let both = images(&[rows.as_slice(), &held_out].concat());
                both.min(seen.saturating_add(images(&held_out)))
            }
            Augment::FlipRotate => (images(&rows) * TURNED).min(seen).max(images(&held_out)),
            // only validation and calibration keep images
            Augment::Classical => trained.min(8).saturating_add(images(&held_out)),
        };
        let mut config = self.clone();
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        config.data.cache_mib = self.data.cache_mib.min(mib(kept * pixels.cached_bytes()));
        let features = vision_features::feature_shape(&sizes.clip, self.train.precision.kind()).bytes();
        let turns = if self.data.augment == Augment::FlipRotate { TURNED } else { 1 };
        let shown = (images(&rows) * turns).min(seen).saturating_add(images(&held_out));
        config.data.cache_vision_mib = self.data.cache_vision_mib.min(mib(shown.saturating_mul(features)));
        config
    }

    /// Samples of an optimizer step if every image has `data.questions_per_image` questions.
    pub fn samples_of_a_step(&self) -> usize {
        self.train.micro_batch * self.train.accumulation * self.data.questions_per_image
    }

    /// The memory and time of a training with these settings on the runtime's device.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn plan(&self, runtime: &Runtime) -> Result<Plan> {
        self.plan_for(Job::Train, &Machine::of(runtime.device()))
    }

    /// The plan of `job` with the longest texts.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn plan_for(&self, job: Job, machine: &Machine) -> Result<Plan> {
        let sizes = self.planned_sizes()?;
        Ok(self.plan_sized(job, &sizes, self.longest_example(), machine)?.1)
    }

    /// The dry run of `job` and its plan, for a model whose sizes are known.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn plan_sized(
        &self,
        job: Job,
        sizes: &prsmed::Config,
        example: Example,
        machine: &Machine,
    ) -> Result<(DryRun, Plan)> {
        let dry_run = self.dry_run_sized(job, sizes, example, machine, true)?;
        let plan = Plan::of(&dry_run, machine);
        let may_capture = machine.target() == Target::Cuda && self.train.graph_switch() == Switch::Auto;
        let may_capture = may_capture && self.model.stream_layers.count() == 0 && !self.model.stream_vision;
        if !may_capture || !self.model.semantics.hides_answer() || !matches!(job, Job::Train | Job::Step) {
            return Ok((dry_run, plan));
        }
        let mut capturing = self.clone();
        capturing.train.graph = Switch::On;
        let captured = Plan::of(&capturing.dry_run_sized(job, sizes, example, machine, true)?, machine);
        Ok((dry_run, plan.with_graph_plan(&captured)))
    }

    /// These settings for one of `ranks` processes; see [`crate::trainer::TrainConfig::divide_among`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] if a step has too few images.
    pub fn divided_among(mut self, ranks: usize) -> Result<Self> {
        self.train.divide_among(ranks)?;
        Ok(self)
    }

    /// These settings with those of `choice`.
    #[must_use]
    pub fn with(&self, choice: &Choice) -> Self {
        let mut config = self.clone();
        config.model.image_size = choice.image_size;
        config.train.micro_batch = choice.micro_batch;
        config.train.step_in_backward = choice.saving.step_in_backward && choice.accumulation == 1;
        config.train.accumulation = choice.accumulation;
        config.data.questions_per_image = choice.questions;
        config.train.checkpointing = choice.saving.checkpointing;
        config.train.checkpoint_encoder = choice.saving.checkpoint_encoder;
        config.train.checkpoint_decoder = choice.saving.checkpoint_decoder;
        config.train.offload_optimizer = choice.saving.offload_optimizer;
        config.model.stream_layers = choice.saving.stream_layers;
        config.model.stream_vision = choice.saving.stream_vision;
        config.train.optimizer = choice.compromise.optimizer;
        config.model.quantization = choice.compromise.quantization;
        if choice.use_graphs && config.train.graph == Switch::Off {
            config.train.graph = Switch::Auto;
        }
        if choice.custom_kernels && config.train.fused_kernels == Switch::Off {
            config.train.fused_kernels = Switch::Auto;
        }
        config.data.cache_vision = match (choice.cache_features, config.data.cache_vision) {
            (false, _) => CacheVision::Off,
            (true, CacheVision::Off) => CacheVision::Disk,
            (true, place) => place,
        };
        config
    }

    /// Images whose vision features fit in `data.cache_vision_mib`.
    pub fn images_kept(&self) -> usize {
        let bytes =
            |sizes: prsmed::Config| vision_features::feature_shape(&sizes.clip, self.train.precision.kind()).bytes();
        self.planned_sizes().map_or(0, |sizes| (self.data.cache_vision_mib << 20) / bytes(sizes).max(1))
    }

    /// True if vision features are cached, or if a cache is possible and useful in later epochs.
    pub fn with_feature_cache(&self) -> Use {
        let can = !self.model.train_base && self.data.augment != Augment::Classical && self.train.epochs > 1;
        match (can, self.data.caches_features()) {
            (_, true) => Use::Wanted,
            (true, false) => Use::Possible,
            (false, false) => Use::Never,
        }
    }
}

impl Planned for RunConfig {
    /// The longest texts that the settings allow are planned.
    type Facts = ();

    const TASK: &'static str = "train";

    fn plan_of(&self, _facts: &(), job: Job, machine: &Machine) -> Result<Plan> {
        self.plan_for(job, machine)
    }

    fn has_effect(key: &str, job: Job) -> bool {
        job == Job::Train || !key.starts_with("train.") || key == "train.precision"
    }

    fn has_same_batch(&self, now: &Self) -> bool {
        let has_same_parts = self.train.micro_batch == now.train.micro_batch;
        self.samples_of_a_step() == now.samples_of_a_step()
            && (has_same_parts || now.model.batch_norm == BatchNorm::Frozen)
    }

    fn changes(&self, job: Job) -> Vec<Change> {
        let train = &self.train;
        let mut found = Vec::new();
        if job == Job::Train {
            found.extend(step_in_backward(train));
            if self.data.cache_vision == CacheVision::Ram {
                found.push(Change::new("data.cache_vision=disk", "vision features in the cache folder"));
            }
            if train.graph == Switch::On {
                found.push(Change::new("train.graph=off", "no captured steps"));
            }
        }
        if job != Job::Predict && train.micro_batch > 1 {
            let whole = train.micro_batch * train.accumulation;
            let off = if train.step_in_backward { " train.step_in_backward=false" } else { "" };
            let sets = format!("train.micro_batch=1 train.accumulation={whole}{off}");
            found.push(Change::new(sets, "the same effective batch in smaller parts"));
        }
        if self.model.max_text_tokens > 128 {
            found.push(Change::new("model.max_text_tokens=128", "longer texts are cut"));
        }
        let smaller = [768, 512].into_iter().filter(|side| self.model.image_size > *side);
        found.extend(smaller.map(|side| Change::new(format!("model.image_size={side}"), "coarser masks")));
        if self.lora.rank > 4 {
            found.push(Change::new(format!("lora.rank={}", self.lora.rank / 2), "smaller adapters"));
        }
        found
    }
}

/// Updates in the backward pass, where a step has one micro-batch.
fn step_in_backward(train: &TrainConfig) -> Option<Change> {
    if train.step_in_backward || train.accumulation > 1 || train.precision == Precision::Fp16 {
        return None;
    }
    let off = if train.graph == Switch::On { " train.graph=off" } else { "" };
    if train.clip_norm > 0.0 {
        let sets = format!("train.step_in_backward=true train.clip_norm=0{off}");
        return Some(Change::new(sets, "each gradient is used at once, and none is clipped"));
    }
    // larger micro-batches can be made smaller, and a step then has several
    let sets = format!("train.step_in_backward=true{off}");
    (train.micro_batch == 1).then(|| Change::new(sets, "each gradient is used at once"))
}

/// The search for the fastest settings of a training that fit a machine.
#[derive(Debug)]
pub struct Searched<'a> {
    /// The settings to start from.
    pub config: &'a RunConfig,
    /// The machine to fit.
    pub machine: &'a Machine,
    /// Layers of its language model.
    llm_layers: usize,
    /// Whether the layers in host memory stay as the settings say.
    keeps_host_layers: bool,
}

impl<'a> Searched<'a> {
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn new(config: &'a RunConfig, machine: &'a Machine) -> Result<Self> {
        let sizes = config.planned_sizes()?;
        let llm_layers = usize::try_from(sizes.llm.num_hidden_layers).unwrap_or(0);
        Ok(Self { config, machine, llm_layers, keeps_host_layers: false })
    }

    /// The same search, in which the layers in host memory stay as the settings say.
    #[must_use]
    pub fn keeping_host_layers(self) -> Self {
        Self { keeps_host_layers: true, ..self }
    }
}

impl Searched<'_> {
    /// Number of layers whose frozen weights the host has memory for.
    fn layers_on_the_host(&self, compromise: Compromise) -> Result<usize> {
        let Some(limit) = self.machine.host_limit().filter(|_| !self.config.model.train_base) else { return Ok(0) };
        let mut config = self.config.clone();
        config.model.quantization = compromise.quantization;
        let needed = |layers: usize, stream_vision: bool| -> Result<u64> {
            let mut config = config.clone();
            config.model.stream_layers = FirstLayers::Count(layers);
            config.model.stream_vision = stream_vision;
            let job = config.dry_run(Job::Step, config.longest_example(), self.machine, false)?;
            Ok(job.steps.host_weights.bytes.0)
        };
        let (layer, vision) = (needed(1, false)?, needed(0, true)?);
        Ok(usize::try_from(limit.0.saturating_sub(vision) / layer.max(1)).unwrap_or(usize::MAX))
    }
}

impl Problem for Searched<'_> {
    fn plan(&self, choice: &Choice, effort: Effort) -> Result<Plan> {
        let config = self.config.with(choice).divided_among(self.machine.num_ranks())?;
        let costs = match effort {
            Effort::Whole => return config.plan_for(Job::Train, self.machine),
            Effort::Memory => false,
            Effort::Time => true,
        };
        let dry_run = config.dry_run(Job::Step, config.longest_example(), self.machine, costs)?;
        Ok(Plan::of(&dry_run, self.machine))
    }

    fn ladders(&self, compromise: Compromise) -> Result<Vec<Vec<Saving>>> {
        let train = &self.config.train;
        let changes_results = train.clip_norm > 0.0 || train.precision == Precision::Fp16;
        // CUDA graphs keep gradients
        let is_out = changes_results || train.graph == Switch::On || self.machine.num_ranks() > 1;
        let stepping = match (train.step_in_backward, is_out) {
            (true, _) => Use::Wanted,
            (false, true) => Use::Never,
            (false, false) => Use::Possible,
        };
        let resident = Saving::ladder(self.llm_layers, 0, stepping);
        if self.keeps_host_layers {
            let ModelConfig { stream_layers, stream_vision, .. } = self.config.model;
            return Ok(vec![resident.into_iter().map(|one| Saving { stream_layers, stream_vision, ..one }).collect()]);
        }
        // captured steps cannot copy weights
        let most = if train.graph == Switch::On { 0 } else { self.layers_on_the_host(compromise)? };
        let on_the_host = (most > 0).then(|| Saving::ladder(self.llm_layers, most, stepping));
        Ok([Some(resident), on_the_host].into_iter().flatten().collect())
    }

    fn compromises(&self) -> Vec<Compromise> {
        let (model, train) = (&self.config.model, &self.config.train);
        let wanted = Compromise { quantization: model.quantization, optimizer: train.optimizer };
        Compromise::ladder(wanted, !model.train_base)
    }

    fn parallel(&self) -> bool {
        // one thread at a time measures what the CPU's operators need
        self.machine.target() == Target::Cuda
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings as _;

    /// The planner's search changes nothing in its first part, by the declarations.
    #[test]
    fn savings_of_the_search_keep_results_and_compromises_change_them() {
        let config = RunConfig::default().with_sets("train.clip_norm=0 train.accumulation=1").unwrap();
        let wanted = Compromise { quantization: config.model.quantization, optimizer: config.train.optimizer };
        let savings = Saving::ladder(2, 2, Use::Possible);
        let choice = |saving: Saving, compromise: Compromise| Choice {
            image_size: config.model.image_size,
            questions: config.data.questions_per_image,
            micro_batch: 1,
            accumulation: 1,
            cache_features: false,
            use_graphs: false,
            custom_kernels: false,
            saving,
            compromise,
        };
        let first = config.with(&choice(savings[0], wanted));
        for saving in &savings {
            let with = config.with(&choice(*saving, wanted));
            assert!(first.keeps_results(&with), "{:?}", with.changes_from(&first));
        }
        for compromise in &Compromise::ladder(wanted, true)[1..] {
            assert!(!first.keeps_results(&config.with(&choice(savings[0], *compromise))));
        }
    }
}
