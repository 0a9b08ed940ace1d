//! Plans of a [`RunConfig`]: rehearsals with its longest texts, the search's view of it, and what to change when it is too
//! large.

use super::RunConfig;
use crate::data::classical::Augment;
use crate::data::manifest::{Manifest, Split};
use crate::models::prsmed;
use crate::nn::Quantization;
use crate::plan::rehearse::{self, Buffers, Job, Rehearsed};
use crate::plan::report::{Machine, Plan};
use crate::plan::search::{Choice, Compromise, Effort, Problem, Saving, Use};
use crate::segment::rehearsal::{Example, Rehearsal};
use crate::segment::setup::{self, BatchNorm};
use crate::segment::sight;
use crate::segment::task::{self, CacheVision};
use crate::tensor::META;
use crate::tensor::meta::Target;
use crate::trainer::precision::Precision;
use crate::trainer::{Checkpointing, OptimizerKind, Switch, TrainConfig};
use crate::units::Bytes;
use crate::{Error, Result};
use std::collections::HashSet;

/// Modality classes of a plan without data.
const CLASSES: usize = 6;
/// Ids of the template around question and answer, and a few of the question.
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
            questions: self.data.questions_per_picture,
        }
    }

    /// Sizes of the model as far as settings tell.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn planned_sizes(&self) -> Result<prsmed::Config> {
        setup::planned_sizes(&self.model, self.lora, CLASSES)
    }

    /// Runs `job` with these settings on the meta device; `costs` as in [`rehearse::plan`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn rehearse(&self, job: Job, example: Example, machine: &Machine, costs: bool) -> Result<Rehearsed> {
        let sizes = setup::planned_sizes(&self.model, self.lora, example.num_classes)?;
        self.rehearse_sized(job, &sizes, example, machine, costs)
    }

    /// The same for a model whose sizes are known.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn rehearse_sized(
        &self,
        job: Job,
        sizes: &prsmed::Config,
        example: Example,
        machine: &Machine,
        costs: bool,
    ) -> Result<Rehearsed> {
        if self.train.precision == Precision::Bf16 && !machine.has_bf16() {
            let reason = format!("{} has no bf16", machine.offer().device);
            return Err(Error::config("train.precision", reason, "set `train.precision=fp16`"));
        }
        sight::refuse_trained_tower(&self.data, self.model.train_base)?;
        machine.stand_for();
        let mut rehearsed = rehearse::plan(job, &self.train, machine.target(), costs, || {
            let rehearsal = Rehearsal::new(&self.model, sizes, &self.train, example, META)?;
            Ok(rehearsal.keeping_features(job != Job::Eval && self.data.keeps_features()))
        })?;
        rehearsed.buffers = self.buffers(job, sizes);
        Ok(rehearsed)
    }

    /// What `job` takes besides tensors when its input pipeline is full.
    fn buffers(&self, job: Job, sizes: &prsmed::Config) -> Buffers {
        let pixels = setup::pixels(&self.model, sizes);
        let half_precision = self.train.precision != Precision::Fp32;
        let kept =
            if self.data.keeps_features() && job != Job::Eval { self.data.cache_vision } else { CacheVision::Off };
        // features in memory are shared by those who wait with them
        let read = match kept {
            CacheVision::Disk => sight::feature_shape(&sizes.clip, self.train.precision.kind()).bytes(),
            CacheVision::Off | CacheVision::Ram => 0,
        };
        let sample = pixels.collated_bytes(self.data.questions_per_picture) + read;
        match job {
            Job::Train | Job::Step | Job::Eval => Buffers {
                half_precision,
                recordings: 0,
                ahead: (self.data.prefetch.max(1) * self.train.micro_batch * sample) as u64,
                features: if kept == CacheVision::Ram { (self.data.cache_vision_mib as u64) << 20 } else { 0 },
                // with jitter, training and validation keep pictures of their own
                cache: ((self.data.cache_mib << 20) * if self.data.augment == Augment::Turn { 2 } else { 1 }) as u64,
            },
            Job::Predict | Job::Augment => Buffers { half_precision, ..Buffers::default() },
        }
    }

    /// These settings with no more memory for preprocessed pictures than a run on `manifest` fills.
    #[must_use]
    pub fn with_cache_for(&self, manifest: &Manifest) -> Self {
        const TURNED: usize = 8;
        // building the model says what is wrong with its sizes
        let Ok(sizes) = setup::planned_sizes(&self.model, self.lora, manifest.modalities.len()) else {
            return self.clone();
        };
        let pixels = setup::pixels(&self.model, &sizes);
        let mut rows = task::spread(manifest.rows_of(Split::Train), self.data.max_train_rows);
        if self.data.synthetic_ratio.rows(rows.len(), usize::MAX) > 0 {
            rows.extend(manifest.synthetic_rows());
        }
        let held_out = task::spread(manifest.rows_of(Split::Val), self.data.max_val_rows);
        let pictures = |rows: &[usize]| {
            let rows = rows.iter().map(|row| &manifest.rows[*row]);
            rows.map(|row| (&row.image_path, &row.mask_path)).collect::<HashSet<_>>().len()
        };
        // calibration reads eight; when the last step is done, batches for the next ones are there
        let seen = match usize::try_from(self.train.max_steps) {
            Ok(steps @ 1..) => {
                let batches = steps.saturating_mul(self.train.accumulation).saturating_add(self.data.prefetch.max(1));
                // questions about one picture may have masks of their own
                let rows = self.train.micro_batch.saturating_mul(self.data.questions_per_picture);
                batches.saturating_mul(rows).saturating_add(8)
            }
            _ => usize::MAX,
        };
        let trained = pictures(&rows).min(seen);
        let kept = match self.data.augment {
            Augment::None => {
                let both = pictures(&[rows.as_slice(), &held_out].concat());
                both.min(seen.saturating_add(pictures(&held_out)))
            }
            Augment::Turn => (pictures(&rows) * TURNED).min(seen).max(pictures(&held_out)),
            // only validation keeps pictures, and calibration its few
            Augment::Classical => trained.min(8).saturating_add(pictures(&held_out)),
        };
        let mut config = self.clone();
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        config.data.cache_mib = self.data.cache_mib.min(mib(kept * pixels.kept_bytes()));
        let features = sight::feature_shape(&sizes.clip, self.train.precision.kind()).bytes();
        let turns = if self.data.augment == Augment::Turn { TURNED } else { 1 };
        let shown = (pictures(&rows) * turns).min(seen).saturating_add(pictures(&held_out));
        config.data.cache_vision_mib = self.data.cache_vision_mib.min(mib(shown.saturating_mul(features)));
        config
    }

    /// Samples of an optimizer step, when every picture has as many questions as are packed.
    pub fn samples_of_a_step(&self) -> usize {
        self.train.micro_batch * self.train.accumulation * self.data.questions_per_picture
    }

    /// The plan of `job` with the longest texts.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn plan(&self, job: Job, machine: &Machine) -> Result<Plan> {
        let sizes = self.planned_sizes()?;
        Ok(self.plan_sized(job, &sizes, self.longest_example(), machine)?.1)
    }

    /// What `job` does and its plan, for a model whose sizes are known.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn plan_sized(
        &self,
        job: Job,
        sizes: &prsmed::Config,
        example: Example,
        machine: &Machine,
    ) -> Result<(Rehearsed, Plan)> {
        let rehearsed = self.rehearse_sized(job, sizes, example, machine, true)?;
        let plan = Plan::of(&rehearsed, machine);
        let may_record = machine.target() == Target::Cuda && self.train.records() == Switch::Auto;
        if !may_record || !self.model.semantics.hides_answer() || !matches!(job, Job::Train | Job::Step) {
            return Ok((rehearsed, plan));
        }
        let mut recording = self.clone();
        recording.train.graph = Switch::On;
        let recorded = Plan::of(&recording.rehearse_sized(job, sizes, example, machine, true)?, machine);
        Ok((rehearsed, plan.or(&recorded)))
    }

    /// These settings with those of `choice`.
    #[must_use]
    pub fn with(&self, choice: &Choice) -> Self {
        let mut config = self.clone();
        config.model.image_size = choice.image_size;
        config.train.micro_batch = choice.micro_batch;
        config.train.step_in_backward = choice.saving.step_in_backward && choice.accumulation == 1;
        config.train.accumulation = choice.accumulation;
        config.data.questions_per_picture = choice.questions;
        config.train.checkpointing = choice.saving.checkpointing;
        config.train.checkpoint_encoder = choice.saving.checkpoint_encoder;
        config.train.checkpoint_decoder = choice.saving.checkpoint_decoder;
        config.train.offload_optimizer = choice.saving.offload_optimizer;
        config.train.optimizer = choice.compromise.optimizer;
        config.model.quantization = choice.compromise.quantization;
        if choice.record && config.train.graph == Switch::Off {
            config.train.graph = Switch::Auto;
        }
        if choice.own_kernels && config.train.fused_kernels == Switch::Off {
            config.train.fused_kernels = Switch::Auto;
        }
        config.data.cache_vision = match (choice.keep_features, config.data.cache_vision) {
            (false, _) => CacheVision::Off,
            (true, CacheVision::Off) => CacheVision::Disk,
            (true, place) => place,
        };
        config
    }

    /// Pictures whose vision features `data.cache_vision_mib` holds.
    pub fn pictures_kept(&self) -> usize {
        let bytes = |sizes: prsmed::Config| sight::feature_shape(&sizes.clip, self.train.precision.kind()).bytes();
        self.planned_sizes().map_or(0, |sizes| (self.data.cache_vision_mib << 20) / bytes(sizes).max(1))
    }

    /// Whether vision features are kept, or could be and were of use in later epochs.
    pub fn keeping_features(&self) -> Use {
        let can = !self.model.train_base && self.data.augment != Augment::Classical && self.train.epochs > 1;
        match (can, self.data.keeps_features()) {
            (_, true) => Use::Wanted,
            (true, false) => Use::Possible,
            (false, false) => Use::Never,
        }
    }
}

/// Settings whose training is searched for a machine.
#[derive(Debug)]
pub struct Searched<'a> {
    /// Everything that the search leaves alone.
    pub config: &'a RunConfig,
    /// What it must fit.
    pub machine: &'a Machine,
    /// Layers of its language model.
    llm_layers: usize,
}

impl<'a> Searched<'a> {
    /// # Errors
    /// [`crate::Error::Config`] for sizes that do not fit.
    pub fn new(config: &'a RunConfig, machine: &'a Machine) -> Result<Self> {
        let sizes = config.planned_sizes()?;
        let llm_layers = usize::try_from(sizes.llm.num_hidden_layers).unwrap_or(0);
        Ok(Self { config, machine, llm_layers })
    }
}

impl Problem for Searched<'_> {
    fn plan(&self, choice: &Choice, effort: Effort) -> Result<Plan> {
        let config = self.config.with(choice);
        let costs = match effort {
            Effort::Whole => return config.plan(Job::Train, self.machine),
            Effort::Memory => false,
            Effort::Time => true,
        };
        let rehearsed = config.rehearse(Job::Step, config.longest_example(), self.machine, costs)?;
        Ok(Plan::of(&rehearsed, self.machine))
    }

    fn savings(&self) -> Vec<Saving> {
        let train = &self.config.train;
        let changes_results = train.clip_norm > 0.0 || train.precision == Precision::Fp16;
        // recordings keep gradients
        let is_out = changes_results || train.graph == Switch::On;
        let stepping = match (train.step_in_backward, is_out) {
            (true, _) => Use::Wanted,
            (false, true) => Use::Never,
            (false, false) => Use::Possible,
        };
        Saving::ladder(self.llm_layers, stepping)
    }

    fn compromises(&self) -> Vec<Compromise> {
        let (model, train) = (&self.config.model, &self.config.train);
        let wanted = Compromise { quantization: model.quantization, optimizer: train.optimizer };
        Compromise::ladder(wanted, !model.train_base)
    }

    fn parallel(&self) -> bool {
        // the CPU's operators are learnt by one thread at a time
        self.machine.target() == Target::Cuda
    }
}

/// A change that makes a job smaller.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Remedy {
    /// `--set` assignments.
    pub change: String,
    /// Bytes that the device peak loses.
    pub saves: Bytes,
    /// The device peak then.
    pub device_peak: Bytes,
    /// Whether it fits then.
    pub fits: bool,
    /// What it costs.
    pub cost: String,
    /// Whether results stay the same (up to rounding).
    pub keeps_results: bool,
}

impl Remedy {
    /// The change as flags.
    pub fn flags(&self) -> String {
        format!("--set {}", self.change.replace(' ', " --set "))
    }

    /// Everything in one line.
    pub fn line(&self) -> String {
        let verdict = if self.fits { "fits" } else { "still too large" };
        let (flags, cost) = (self.flags(), &self.cost);
        format!("{flags}: saves {}, then {} ({verdict}); {cost}", self.saves, self.device_peak)
    }
}

/// Changes that save memory, each planned by itself and all of the harmless ones together: those that keep the results
/// first, then by what they save.
pub fn remedies(config: &RunConfig, job: Job, machine: &Machine, plan: &Plan) -> Vec<Remedy> {
    let mut found = Vec::new();
    let mut harmless = (config.clone(), Vec::new());
    for mut change in changes(config, job) {
        // statistics of a batch depend on its size
        change.keeps_results &= config.model.batch_norm == BatchNorm::Frozen || !change.text.contains("micro_batch");
        let mut changed = config.clone();
        (change.apply)(&mut changed);
        if change.keeps_results {
            (change.apply)(&mut harmless.0);
            harmless.1.push(change.text.clone());
        }
        // a change that cannot be planned is no remedy
        found.extend(remedy(&changed, job, machine, plan, change).ok());
    }
    if harmless.1.len() > 1 {
        let (changed, texts) = harmless;
        let mut seen = HashSet::new();
        let sets = texts.iter().flat_map(|text| text.split(' ')).filter(|set| seen.insert(*set));
        let texts: Vec<&str> = sets.collect();
        let change = Change { text: texts.join(" "), cost: "time only", keeps_results: true, apply: Box::new(|_| ()) };
        found.extend(remedy(&changed, job, machine, plan, change).ok());
    }
    found.retain(|remedy| remedy.saves.0 > 0);
    found.sort_by_key(|remedy| (!remedy.keeps_results, std::cmp::Reverse(remedy.saves)));
    found
}

fn remedy(config: &RunConfig, job: Job, machine: &Machine, plan: &Plan, change: Change) -> Result<Remedy> {
    let then = config.plan(job, machine)?;
    let slower = match (plan.time, then.time) {
        (Some(now), Some(then)) if job == Job::Train && now.seconds > 0.0 => {
            let ratio = then.seconds / now.seconds;
            if (ratio - 1.0).abs() < 0.005 { String::new() } else { format!(", a step takes {ratio:.2} of the time") }
        }
        _ => String::new(),
    };
    Ok(Remedy {
        change: change.text,
        saves: Bytes(plan.device_peak.0.saturating_sub(then.device_peak.0)),
        device_peak: then.device_peak,
        fits: then.fits,
        cost: format!("{}{slower}", change.cost),
        keeps_results: change.keeps_results,
    })
}

struct Change {
    text: String,
    cost: &'static str,
    keeps_results: bool,
    apply: Box<dyn Fn(&mut RunConfig)>,
}

/// Adds a change: its text, its cost, whether results stay the same, and the change itself.
type Add<'a> = dyn FnMut(String, &'static str, bool, Box<dyn Fn(&mut RunConfig)>) + 'a;

/// Stepping in the backward pass, where a step has one micro-batch.
fn stepping_change(train: &TrainConfig, add: &mut Add) {
    if train.step_in_backward || train.accumulation > 1 || train.precision == Precision::Fp16 {
        return;
    }
    let apply = |c: &mut RunConfig| {
        (c.train.step_in_backward, c.train.clip_norm) = (true, 0.0);
        if c.train.graph == Switch::On {
            c.train.graph = Switch::Off;
        }
    };
    let off = if train.graph == Switch::On { " train.graph=off" } else { "" };
    if train.clip_norm > 0.0 {
        let text = format!("train.step_in_backward=true train.clip_norm=0{off}");
        add(text, "each gradient is used at once, and none is clipped", false, Box::new(apply));
    } else if train.micro_batch == 1 {
        // larger ones can be made smaller, and a step then has several
        let text = format!("train.step_in_backward=true{off}");
        add(text, "each gradient is used at once", true, Box::new(apply));
    }
}

/// What of a training could be changed without changing its results.
fn exact_changes(train: &TrainConfig, add: &mut Add) {
    if train.checkpointing != Checkpointing::Full {
        let apply = |c: &mut RunConfig| c.train.checkpointing = Checkpointing::Full;
        add("train.checkpointing=full".into(), "the language model's layers run twice", true, Box::new(apply));
    }
    if train.checkpoint_encoder != Checkpointing::Full {
        let apply = |c: &mut RunConfig| c.train.checkpoint_encoder = Checkpointing::Full;
        add("train.checkpoint_encoder=full".into(), "the image encoder's blocks run twice", true, Box::new(apply));
    }
    if !train.checkpoint_decoder {
        let apply = |c: &mut RunConfig| c.train.checkpoint_decoder = true;
        add("train.checkpoint_decoder=true".into(), "the mask decoder runs twice", true, Box::new(apply));
    }
    if !train.offload_optimizer {
        let apply = |c: &mut RunConfig| c.train.offload_optimizer = true;
        add("train.offload_optimizer=true".into(), "moments are brought over for each step", true, Box::new(apply));
    }
}

/// What could be changed.
fn changes(config: &RunConfig, job: Job) -> Vec<Change> {
    let mut found = Vec::new();
    let mut add = |text: String, cost, keeps_results, apply: Box<dyn Fn(&mut RunConfig)>| {
        found.push(Change { text, cost, keeps_results, apply });
    };
    let train = &config.train;
    if job == Job::Train {
        exact_changes(train, &mut add);
        stepping_change(train, &mut add);
        if config.data.cache_vision == CacheVision::Ram {
            let apply = |c: &mut RunConfig| c.data.cache_vision = CacheVision::Disk;
            add("data.cache_vision=disk".into(), "vision features in the cache folder", true, Box::new(apply));
        }
        if train.graph == Switch::On {
            let apply = |c: &mut RunConfig| c.train.graph = Switch::Off;
            add("train.graph=off".into(), "steps are not recorded", true, Box::new(apply));
        }
    }
    if job != Job::Predict && train.micro_batch > 1 {
        let whole = train.micro_batch * train.accumulation;
        let off = if train.step_in_backward { " train.step_in_backward=false" } else { "" };
        let text = format!("train.micro_batch=1 train.accumulation={whole}{off}");
        let apply = move |c: &mut RunConfig| {
            (c.train.micro_batch, c.train.accumulation, c.train.step_in_backward) = (1, whole, false);
        };
        add(text, "the same effective batch in smaller parts", true, Box::new(apply));
    }
    if config.model.quantization == Quantization::None && !config.model.train_base {
        let apply = |c: &mut RunConfig| c.model.quantization = Quantization::Nf4;
        add("model.quantization=nf4".into(), "frozen layers in 4 bits", false, Box::new(apply));
    }
    if job == Job::Train && train.optimizer == OptimizerKind::AdamW {
        let apply = |c: &mut RunConfig| c.train.optimizer = OptimizerKind::AdamW8bit;
        add("train.optimizer=adamw8bit".into(), "the optimizer's moments in 8 bits", false, Box::new(apply));
    }
    if train.precision == Precision::Fp32 {
        let apply = |c: &mut RunConfig| c.train.precision = Precision::Bf16;
        add("train.precision=bf16".into(), "frozen weights and arithmetic in bf16", false, Box::new(apply));
    }
    if job == Job::Train && train.ema_decay > 0.0 {
        let apply = |c: &mut RunConfig| c.train.ema_decay = 0.0;
        add("train.ema_decay=0".into(), "no moving average for validation and best/", false, Box::new(apply));
    }
    if config.model.max_text_tokens > 128 {
        let apply = |c: &mut RunConfig| c.model.max_text_tokens = 128;
        add("model.max_text_tokens=128".into(), "longer texts are cut", false, Box::new(apply));
    }
    for side in [768, 512] {
        if config.model.image_size > side {
            let apply = move |c: &mut RunConfig| c.model.image_size = side;
            add(format!("model.image_size={side}"), "coarser masks", false, Box::new(apply));
        }
    }
    if config.lora.rank > 4 {
        let rank = config.lora.rank / 2;
        let apply = move |c: &mut RunConfig| c.lora.rank = rank;
        add(format!("lora.rank={rank}"), "smaller adapters", false, Box::new(apply));
    }
    found
}

/// Settings as TOML for `prsmed train --config`, with their plan in comments.
///
/// # Panics
/// Never: plain values serialise.
pub fn preset_toml(config: &RunConfig, plan: &Plan) -> String {
    let mut lines =
        vec![format!("# prsmed preset for {} ({}).", plan.budget.device, plan.budget.bytes), "#".to_owned()];
    lines.extend(plan.table().lines().map(|line| format!("# {line}").trim_end().to_owned()));
    if config.model.image_encoder != setup::RANDOM {
        lines.push("#".to_owned());
        lines.push("# `model.image_encoder` is the TinySAM file: put its path here.".to_owned());
    }
    lines.push(String::new());
    lines.push(toml::to_string(config).expect("plain values serialise"));
    lines.join("\n")
}
