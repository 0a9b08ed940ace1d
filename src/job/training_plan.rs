//! Plans of a [`RunConfig`]: dry runs with its longest texts, the search for settings that fit, and changes that save
//! memory.

use super::planned::{Planned, SavingChange};
use crate::Result;
use crate::config::{RunConfig, Settings as _};
use crate::data::classical::Augment;
use crate::data::manifest::{Manifest, Split};
use crate::data::split::spread;
use crate::models::prsmed::Config;
use crate::plan::dry_run::{self, Buffers, DryRun, Job, PhaseMeter, RealPhase};
use crate::plan::duration::{Duration, Samples};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{self, BatchChoice, Effort, Extra, Ladder, PlannedSettings, Saving, SearchProblem, value_of};
use crate::runtime::Runtime;
use crate::segment::dry_run::{Example, SegmentDryRun};
use crate::segment::setup::{self, BatchNorm};
use crate::segment::task::CacheVision;
use crate::segment::vision_features;
use crate::setting::{self, ResultsEffect};
use crate::tensor::meta::PlanTarget;
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
    pub fn planned_sizes(&self) -> Result<Config> {
        setup::planned_sizes(&self.model, &self.configs, self.lora, CLASSES)
    }

    /// Runs `job` with these settings on the meta device; `costs` as in [`dry_run::plan`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn dry_run(&self, job: Job, example: Example, machine: &Machine, costs: bool) -> Result<DryRun> {
        let sizes = setup::planned_sizes(&self.model, &self.configs, self.lora, example.num_classes)?;
        self.dry_run_sized(job, &sizes, example, machine, costs)
    }

    /// [`Self::dry_run`] of a model whose sizes are known.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn dry_run_sized(
        &self,
        job: Job,
        sizes: &Config,
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
    pub fn measure(&self, job: Job, device: Device, ranks: Ranks) -> Result<Vec<RealPhase>> {
        let (sizes, example) = (self.planned_sizes()?, self.longest_example());
        kernels::check(device)?;
        self.train.prepare_process();
        let build = |ranks: Ranks| {
            let task = SegmentDryRun::random(&self.model, &sizes, &self.train, example, (device, ranks))?;
            Ok(task.with_feature_cache(job != Job::Eval && self.data.caches_features()))
        };
        let mut meter = PhaseMeter::begin(device)?;
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
    fn buffers(&self, job: Job, sizes: &Config) -> Buffers {
        let pixels = setup::pixels(&self.model, sizes);
        let half_precision = self.train.precision != Precision::Fp32;
        let kept = Some(self.data.cache_vision).filter(|_| self.data.caches_features() && job != Job::Eval);
        // features in memory are shared by all samples that wait for their step
        let read = if kept == Some(CacheVision::Disk) { self.feature_bytes(sizes) } else { 0 };
        let sample = pixels.image_bytes(self.data.questions_per_image) + read;
        match job {
            Job::Train | Job::Step | Job::Eval => Buffers {
                half_precision,
                graph_inputs: 0,
                prefetched: (self.data.prefetch.max(1) * self.train.micro_batch * sample) as u64,
                features: if kept == Some(CacheVision::Ram) { (self.data.cache_vision_mib as u64) << 20 } else { 0 },
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
        let Ok(sizes) = setup::planned_sizes(&self.model, &self.configs, self.lora, manifest.modalities.len()) else {
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
            rows.map(|row| (&row.image_path, &row.target().mask_path)).collect::<HashSet<_>>().len()
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
        config.data.cache_mib = self.data.cache_mib.min(mib(kept * pixels.image_bytes(1)));
        let features = self.feature_bytes(&sizes);
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
    pub fn plan_sized(&self, job: Job, sizes: &Config, example: Example, machine: &Machine) -> Result<(DryRun, Plan)> {
        let dry_run = self.dry_run_sized(job, sizes, example, machine, true)?;
        let plan = Plan::of(&dry_run, machine);
        let may_capture = machine.target() == PlanTarget::Cuda && self.train.graph_switch() == Switch::Auto;
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

    /// Images whose vision features fit in `data.cache_vision_mib`.
    pub fn images_kept(&self) -> usize {
        let bytes = |sizes: &Config| self.feature_bytes(sizes).max(1);
        self.planned_sizes().map_or(0, |sizes| (self.data.cache_vision_mib << 20) / bytes(&sizes))
    }

    /// Bytes of the vision features of an image.
    fn feature_bytes(&self, sizes: &Config) -> usize {
        vision_features::feature_shape(&sizes.tower, self.train.precision.kind()).bytes()
    }

    /// True if a vision feature cache is possible, and useful in later epochs.
    pub fn can_cache_features(&self) -> bool {
        !self.model.train_base && self.data.augment != Augment::Classical && self.train.epochs > 1
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

    fn changes(&self, job: Job) -> Vec<SavingChange> {
        let (train, trains) = (&self.train, job == Job::Train);
        let off = if train.step_in_backward { " train.step_in_backward=false" } else { "" };
        let parts = format!("train.micro_batch=1 train.accumulation={}{off}", train.micro_batch * train.accumulation);
        let changes = [
            step_in_backward(train).filter(|_| trains),
            (trains && self.data.cache_vision == CacheVision::Ram)
                .then(|| SavingChange::new("data.cache_vision=disk", "vision features in the cache folder")),
            (trains && train.graph == Switch::On).then(|| SavingChange::new("train.graph=off", "no captured steps")),
            (job != Job::Predict && train.micro_batch > 1)
                .then(|| SavingChange::new(parts, "the same effective batch in smaller parts")),
            (self.model.max_text_tokens > 128)
                .then(|| SavingChange::new("model.max_text_tokens=128", "longer texts are cut")),
        ];
        let smaller = [768, 512].into_iter().filter(|side| self.model.image_size > *side);
        let smaller = smaller.map(|side| SavingChange::new(format!("model.image_size={side}"), "coarser masks"));
        let adapters = SavingChange::new(format!("lora.rank={}", self.lora.rank / 2), "smaller adapters");
        let adapters = Some(adapters).filter(|_| self.lora.rank > 4);
        changes.into_iter().flatten().chain(smaller).chain(adapters).collect()
    }
}

/// Updates in the backward pass, where a step has one micro-batch.
fn step_in_backward(train: &TrainConfig) -> Option<SavingChange> {
    if train.step_in_backward || train.accumulation > 1 || train.precision == Precision::Fp16 {
        return None;
    }
    let off = if train.graph == Switch::On { " train.graph=off" } else { "" };
    if train.clip_norm > 0.0 {
        let sets = format!("train.step_in_backward=true train.clip_norm=0{off}");
        return Some(SavingChange::new(sets, "each gradient is used at once, and none is clipped"));
    }
    // larger micro-batches can be made smaller, and a step then has several
    let sets = format!("train.step_in_backward=true{off}");
    (train.micro_batch == 1).then(|| SavingChange::new(sets, "each gradient is used at once"))
}

/// The search for the fastest settings of a training that fit a machine.
#[derive(Debug)]
pub(super) struct TrainingSearch<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) machine: &'a Machine,
    /// Samples of an optimizer step. With several questions per image, the number of images is rounded up.
    pub(super) effective_batch: usize,
    /// Allowed numbers of questions per image, the largest first.
    pub(super) questions: Vec<usize>,
    /// Whether the layers in host memory stay as the settings say.
    pub(super) keeps_host_layers: bool,
}

/// The setting whose layers are recomputed one after another; with them go those of [`HOST_LAYERS`].
const CHECKPOINTING: &str = "train.checkpointing";
/// The layers in host memory.
const HOST_LAYERS: &str = "model.stream_layers";

impl TrainingSearch<'_> {
    /// What may be tried if nothing fits: the settings that change results, each from its present value on.
    pub(super) fn compromises(&self) -> Vec<String> {
        let changing = self.config.searched_settings(|setting| setting.results == ResultsEffect::Changes);
        let values = |(key, searched): &(&'static str, setting::Searched)| {
            let now = self.config.value_of(key);
            let all = searched.values.iter().map(|(value, _)| (*value).to_owned());
            let mut values: Vec<String> = all.skip_while(|value| *value != now).collect();
            // trained weights are never quantized
            if *key == "model.quantization" && self.config.model.train_base {
                values.truncate(1);
            }
            (*key, values)
        };
        search::steps(&changing.iter().map(values).collect::<Vec<_>>())
    }

    /// The savings, the cheapest first. At most `most` layers may be in host memory: 0, or as many as possible before
    /// other layers are recomputed.
    fn savings(&self, layers: usize, most: usize) -> Vec<Saving> {
        let model = &self.config.model;
        let first = |count: usize| match count {
            0 => FirstLayers::None,
            count if count == layers => FirstLayers::Full,
            count => FirstLayers::Count(count),
        };
        let host = |count: usize| if self.keeps_host_layers { model.stream_layers } else { first(count.min(most)) };
        let recomputed = |count: usize| format!("{} {HOST_LAYERS}={}", first(count), host(count));
        let values = |(key, searched): (&'static str, setting::Searched)| match key {
            "train.step_in_backward" => (key, self.stepping()),
            CHECKPOINTING => (key, (0..=layers).map(recomputed).collect()),
            "model.stream_vision" if self.keeps_host_layers => (key, vec![model.stream_vision.to_string()]),
            "model.stream_vision" if most == 0 => (key, vec!["false".to_owned()]),
            _ => (key, searched.values.iter().map(|(value, _)| (*value).to_owned()).collect()),
        };
        let same = self.config.searched_settings(|setting| setting.results != ResultsEffect::Changes);
        let settings = same.into_iter().filter(|(key, _)| *key != HOST_LAYERS).map(values);
        let is_not = |sets: &str, key: &str| value_of(sets, key) != Some("none");
        let saving = |sets: String| Saving {
            recomputes: is_not(&sets, CHECKPOINTING),
            copies_weights: is_not(&sets, HOST_LAYERS),
            sets,
        };
        search::steps(&settings.collect::<Vec<_>>()).into_iter().map(saving).collect()
    }

    /// Values of `train.step_in_backward` that are tried.
    fn stepping(&self) -> Vec<String> {
        let train = &self.config.train;
        let changes_results = train.clip_norm > 0.0 || train.precision == Precision::Fp16;
        // CUDA graphs keep gradients
        let is_out = changes_results || train.graph == Switch::On || self.machine.num_ranks() > 1;
        let values: &[&str] = match (train.step_in_backward, is_out) {
            (true, _) => &["true"],
            (false, true) => &["false"],
            (false, false) => &["false", "true"],
        };
        values.iter().map(|value| (*value).to_owned()).collect()
    }

    /// The batches with so many questions about each image.
    fn batches(&self, questions: usize) -> Vec<BatchChoice> {
        let images = self.effective_batch.div_ceil(questions);
        let batch = |micro_batch: usize| {
            let accumulation = images / micro_batch;
            // several micro-batches need gradient accumulation
            let added = if accumulation > 1 { " train.step_in_backward=false" } else { "" };
            let sets = format!(
                "data.questions_per_image={questions} train.micro_batch={micro_batch} \
                 train.accumulation={accumulation}{added}"
            );
            BatchChoice { sets, micro_batch, samples: questions * images }
        };
        (1..=images).filter(|micro_batch| images.is_multiple_of(*micro_batch)).map(batch).collect()
    }

    /// Number of layers whose frozen weights the host has memory for.
    fn layers_on_the_host(&self, compromise: &str) -> Result<usize> {
        let Some(limit) = self.machine.host_limit().filter(|_| !self.config.model.train_base) else { return Ok(0) };
        let needed = |layers: usize, stream_vision: bool| -> Result<u64> {
            let mut config = self.config.with_sets(compromise)?;
            config.model.stream_layers = FirstLayers::Count(layers);
            config.model.stream_vision = stream_vision;
            let job = config.dry_run(Job::Step, config.longest_example(), self.machine, false)?;
            Ok(job.steps.host_weights.bytes.0)
        };
        let (layer, vision) = (needed(1, false)?, needed(0, true)?);
        Ok(usize::try_from(limit.0.saturating_sub(vision) / layer.max(1)).unwrap_or(usize::MAX))
    }
}

impl SearchProblem for TrainingSearch<'_> {
    fn plan(&self, sets: &str, effort: Effort) -> Result<Plan> {
        let config = self.config.with_sets(sets)?.divided_among(self.machine.num_ranks())?;
        let costs = match effort {
            Effort::Whole => return config.plan_for(Job::Train, self.machine),
            Effort::Memory => false,
            Effort::Time => true,
        };
        let dry_run = config.dry_run(Job::Step, config.longest_example(), self.machine, costs)?;
        Ok(Plan::of(&dry_run, self.machine))
    }

    fn ladders(&self, compromise: &str) -> Result<Vec<Ladder>> {
        let layers = usize::try_from(self.config.planned_sizes()?.llm.num_hidden_layers).unwrap_or(0);
        let batches: Vec<_> = self.questions.iter().map(|questions| self.batches(*questions)).collect();
        // captured steps cannot copy weights
        let is_resident = self.keeps_host_layers || self.config.train.graph == Switch::On;
        let most = if is_resident { 0 } else { self.layers_on_the_host(compromise)? };
        let on_the_host = (most > 0).then_some(most);
        let ladder = |most| Ladder { savings: self.savings(layers, most), batches: batches.clone() };
        Ok(std::iter::once(0).chain(on_the_host).map(ladder).collect())
    }

    fn parallel(&self) -> bool {
        // one thread at a time measures what the CPU's operators need
        self.machine.target() == PlanTarget::Cuda
    }

    fn num_kept(&self) -> usize {
        2
    }

    fn may_try(&self, extra: &Extra, candidate: &PlannedSettings) -> bool {
        let steps_at_once = value_of(&candidate.sets, "train.step_in_backward") == Some("true");
        let can_capture = !steps_at_once && !candidate.saving.copies_weights;
        !extra.captures || can_capture && candidate.plan.compared_time.is_some_and(|time| time.host_bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The planner's search changes nothing in its first part, by the declarations.
    #[test]
    fn savings_of_the_search_keep_results_and_compromises_change_them() {
        let config = RunConfig::default().with_sets("train.clip_norm=0 train.accumulation=1").unwrap();
        let machine = Machine::named("24gb").unwrap();
        let searched = searched(&config, &machine);
        let compromises = searched.compromises();
        let with = |saving: &Saving, compromise: &str| {
            config.with_sets(&format!("{compromise} {} train.micro_batch=1", saving.sets)).unwrap()
        };
        let savings = searched.savings(2, 2);
        let first = with(&savings[0], &compromises[0]);
        for saving in &savings {
            let with = with(saving, &compromises[0]);
            assert!(first.keeps_results(&with), "{:?}", with.changes_from(&first));
        }
        assert_eq!(compromises.len(), 4);
        for compromise in &compromises[1..] {
            assert!(!first.keeps_results(&with(&savings[0], compromise)));
        }
    }

    fn searched<'a>(config: &'a RunConfig, machine: &'a Machine) -> TrainingSearch<'a> {
        TrainingSearch { config, machine, effective_batch: 4, questions: vec![1], keeps_host_layers: false }
    }

    #[test]
    fn savings_grow_from_nothing_to_everything() {
        let machine = Machine::named("24gb").unwrap();
        let config = RunConfig::default();
        let column = |config: &RunConfig, (layers, most): (usize, usize), key: &str| -> Vec<String> {
            let savings = searched(config, &machine).savings(layers, most);
            savings.iter().map(|saving| value_of(&saving.sets, key).unwrap().to_owned()).collect()
        };
        let clipped = |key: &str| column(&config, (2, 0), key);
        assert_eq!(clipped("train.checkpointing"), ["none", "none", "1", "full", "full", "full"]);
        assert_eq!(clipped("train.checkpoint_encoder"), ["none", "full", "full", "full", "full", "full"]);
        assert_eq!(clipped("train.checkpoint_decoder"), ["false", "false", "false", "false", "true", "true"]);
        assert_eq!(clipped("train.offload_optimizer"), ["false", "false", "false", "false", "false", "true"]);
        assert_eq!(clipped("train.step_in_backward"), ["false"; 6]);
        let free = config.with_sets("train.clip_norm=0").unwrap();
        let stepped = column(&free, (2, 0), "train.step_in_backward");
        assert_eq!(stepped, ["false", "true", "true", "true", "true", "true", "true"]);
        let wanted = free.with_sets("train.accumulation=1 train.step_in_backward=true").unwrap();
        assert_eq!(column(&wanted, (2, 0), "train.step_in_backward"), ["true"; 6]);
        let host = |most: usize| column(&config, (3, most), "model.stream_layers");
        assert_eq!(host(2), ["none", "none", "1", "2", "2", "2", "2", "2"], "recomputed, and in host memory");
        assert_eq!(host(9), ["none", "none", "1", "2", "full", "full", "full", "full"]);
        let vision = column(&config, (3, 2), "model.stream_vision");
        assert_eq!(vision, ["false", "false", "false", "false", "false", "true", "true", "true"]);
    }

    #[test]
    fn compromises_begin_with_the_given_settings() {
        let machine = Machine::named("24gb").unwrap();
        let all = |sets: &str| searched(&RunConfig::default().with_sets(sets).unwrap(), &machine).compromises();
        let double = "model.quantization=nf4-double train.optimizer";
        let expected =
            ["model.quantization=none train.optimizer=adamw", "model.quantization=nf4 train.optimizer=adamw"];
        let larger = [format!("{double}=adamw"), format!("{double}=adamw8bit")];
        assert_eq!(all(""), [&expected.map(str::to_owned)[..], &larger].concat());
        assert_eq!(all(&larger[1]), larger[1..]);
        let trained = all("model.train_base=true model.base=random model.image_encoder=random");
        assert_eq!(trained, [expected[0], "model.quantization=none train.optimizer=adamw8bit"]);
    }
}
