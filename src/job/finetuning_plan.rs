//! Plans of a [`FinetuneRun`]: dry runs of encoding and training, the settings that fit a GPU, and changes that save
//! memory.

use super::planned::{Fitted, Planned, SavingChange, SettingsSearch};
use crate::Result;
use crate::augment::finetune::FinetuneMode;
use crate::augment::finetune::dry_run::{self as finetuning, FinetuneDryRun};
use crate::augment::finetune::settings::SamplePrecision;
use crate::augment::pipeline_config::PipelineConfig;
use crate::config::{FinetuneRun, Settings as _};
use crate::plan::dry_run::{self, Buffers, DryRun, Job, Meter, PhaseMeter, RealPhase};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::plan::search::{BatchChoice, Effort, Ladder, Saving, SearchProblem, Space};
use crate::tensor::{Device, META, kernels};
use crate::trainer::Ranks;
use crate::trainer::precision::Precision;

/// Savings that change no result but rounding.
const FREE: [&str; 2] = ["train.checkpointing=none", "train.checkpointing=full"];
/// Savings that are tried only if nothing fits without them, each alone.
const COSTLY: [&str; 5] = [
    "train.optimizer=adamw8bit",
    "train.optimizer=adamw8bit train.clip_norm=0 train.step_in_backward=true",
    "train.offload_optimizer=true",
    "train.offload_optimizer=true train.clip_norm=0 train.step_in_backward=true",
    "train.offload_weights=true",
];
/// Savings of several processes, tried before the [`COSTLY`] ones.
const DIVIDED: [&str; 2] = ["train.zero_stage=2", "train.zero_stage=2 train.offload_optimizer=true"];
/// Samples are made one by one, which costs the training nothing.
const ONE_BY_ONE: &str = "finetune.sample_batch=1";
/// Smaller images, tried if nothing fits with all savings.
const SMALLER: [i64; 3] = [1024, 768, 512];

impl FinetuneRun {
    /// The generator's sizes without its files: those of a `random:` model, else of the family that its name suggests.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an unknown `random:` size.
    pub fn planned_pipeline_config(&self) -> Result<PipelineConfig> {
        let mut sizes = super::generation_plan::family_config(&self.finetune.model, false)?;
        if self.finetune.mode == FinetuneMode::Inpaint && self.finetune.has_adapters() {
            sizes.unet.in_channels = 9;
        }
        Ok(sizes)
    }

    /// These settings with the dtype of samples that `auto` means on `machine`.
    #[must_use]
    pub fn with_samples_for(&self, machine: &Machine) -> Self {
        let mut run = self.clone();
        let is_gpu = matches!(machine, Machine::Cuda(..));
        let is_other = run.train.precision != Precision::Bf16 && is_gpu && machine.has_bf16();
        if run.finetune.sample_precision == SamplePrecision::Auto && is_other {
            run.finetune.sample_precision = SamplePrecision::Bf16;
        }
        run
    }

    /// Runs `job` with these settings on the meta device; `costs` as in [`dry_run::plan`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a precision that the machine does not have.
    pub fn dry_run(&self, sizes: &PipelineConfig, job: Job, machine: &Machine, costs: bool) -> Result<DryRun> {
        let run = &self.with_samples_for(machine);
        let sampled = run.finetune.sample_precision.beside(run.train.precision);
        machine.check_precision("train.precision", run.train.precision)?;
        machine.check_precision("finetune.sample_precision", sampled)?;
        machine.set_planned_gpu();
        let encode = |begin: &mut dyn FnMut(&'static str) -> Result<()>| match job {
            Job::Train => finetuning::encode(sizes, run, META, begin),
            _ => Ok(()),
        };
        let build = |_: Ranks| FinetuneDryRun::new(sizes, run, META);
        let mut dry_run = dry_run::plan_after(job, &run.train, machine.place(), costs, encode, build)?;
        let half_precision = run.train.precision != Precision::Fp32 || sampled != Precision::Fp32;
        dry_run.buffers = Buffers { half_precision, ..Buffers::default() };
        Ok(dry_run)
    }

    /// Runs a training of these settings by `ranks` with random weights on `device`, and measures its memory.
    ///
    /// # Errors
    /// Typed errors of libtorch.
    pub fn measure(&self, sizes: &PipelineConfig, device: Device, ranks: Ranks) -> Result<Vec<RealPhase>> {
        kernels::check(device)?;
        self.train.prepare_process();
        let mut meter = PhaseMeter::begin(device)?;
        finetuning::encode(sizes, self, device, &mut |phase| meter.begin(phase))?;
        let build = |_: Ranks| FinetuneDryRun::new(sizes, self, device);
        dry_run::dry_run(Job::Train, &self.train, ranks, &build, &mut meter)?;
        meter.finish()
    }

    /// These settings for one of `ranks` processes; see [`crate::trainer::TrainConfig::divide_among`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] if a step has too few images.
    pub fn divided_among(&self, ranks: usize) -> Result<Self> {
        let mut run = self.clone();
        run.train.divide_among(ranks)?;
        Ok(run)
    }

    /// Images of an optimizer step.
    pub fn effective_batch(&self) -> usize {
        self.train.micro_batch * self.train.accumulation
    }
}

/// The search for the fastest settings of a fine-tuning that fit a machine. The effective batch stays the same.
impl SearchProblem for SettingsSearch<'_, FinetuneRun> {
    fn plan(&self, sets: &str, effort: Effort) -> Result<Plan> {
        let run = self.settings.with_sets(sets)?.divided_among(self.machine.num_ranks())?;
        let dry_run = run.dry_run(self.facts, Job::Train, self.machine, effort != Effort::Memory)?;
        Ok(Plan::of(&dry_run, self.machine))
    }

    fn ladders(&self, compromise: &str) -> Result<Vec<Ladder>> {
        let (whole, ranks) = (self.settings.effective_batch(), self.machine.num_ranks());
        // each process needs a micro-batch, and a step of several cannot update in the backward pass
        let least = if compromise.contains("step_in_backward") { whole } else { 1 };
        let divides = |count: &usize| whole.is_multiple_of(*count) && whole / count >= ranks;
        let batch = |micro_batch: usize| {
            let sets = format!("train.micro_batch={micro_batch} train.accumulation={}", whole / micro_batch);
            BatchChoice { sets, micro_batch, samples: whole }
        };
        let batches: Vec<BatchChoice> = (least..=whole).filter(divides).map(batch).collect();
        let savings = if compromise.contains(FREE[1]) { &[""][..] } else { &FREE };
        let saving = |sets: &&str| Saving { sets: (*sets).to_owned(), ..Saving::default() };
        let is_possible =
            |first: &BatchChoice| self.settings.with_sets(&format!("{compromise} {}", first.sets)).is_ok();
        let ladder = Ladder { savings: savings.iter().map(saving).collect(), batches: vec![batches.clone()] };
        Ok(batches.first().is_some_and(is_possible).then_some(ladder).into_iter().collect())
    }

    fn has_all_phases(&self) -> bool {
        true
    }

    fn compared(&self, unhindered: usize, possible: usize) -> Vec<usize> {
        let counts = std::iter::once(unhindered).chain((possible > unhindered).then_some(possible));
        counts.filter_map(|count| count.checked_sub(1)).collect()
    }
}

impl Planned for FinetuneRun {
    /// Sizes of the generator.
    type Facts = PipelineConfig;

    const TASK: &'static str = "finetune";

    fn plan_of(&self, sizes: &PipelineConfig, job: Job, machine: &Machine) -> Result<Plan> {
        Ok(Plan::of(&self.dry_run(sizes, job, machine, true)?, machine))
    }

    fn has_same_batch(&self, now: &Self) -> bool {
        self.effective_batch() == now.effective_batch()
    }

    fn changes(&self, _job: Job) -> Vec<SavingChange> {
        let offloaded = "train.offload_weights=true train.offload_optimizer=false train.step_in_backward=false";
        let mut found = vec![SavingChange::exact(offloaded, "the CPU updates the weights, in host memory")];
        if self.train.micro_batch > 1 {
            let sets = format!("train.micro_batch=1 train.accumulation={}", self.effective_batch());
            found.push(SavingChange::new(sets, "the same effective batch in smaller parts"));
        }
        if self.effective_batch() == 1 && !self.train.step_in_backward && self.train.precision != Precision::Fp16 {
            let sets = "train.step_in_backward=true train.clip_norm=0";
            found.push(SavingChange::new(sets, "each gradient is used at once, and none is clipped"));
        }
        let smaller = SMALLER.into_iter().filter(|side| self.finetune.image_size > *side);
        found.extend(smaller.map(|side| SavingChange::new(format!("finetune.image_size={side}"), "coarser images")));
        found
    }
}

impl Fitted for FinetuneRun {
    fn fitted(&self, sizes: &PipelineConfig, machine: &Machine, may_shrink: bool) -> Result<Option<(Self, Plan)>> {
        let size = self.finetune.image_size;
        let smaller = SMALLER.into_iter().filter(|&side| may_shrink && side < size);
        let is_together = machine.num_ranks() > 1;
        let is_for_one = |saving: &str| saving.contains("step_in_backward") || saving.contains("offload_weights");
        let divided = DIVIDED.into_iter().filter(|_| is_together);
        let costly = divided.chain(COSTLY.into_iter().filter(|saving| !(is_together && is_for_one(saving))));
        let costly = costly.map(|saving| format!("{ONE_BY_ONE} {} {saving}", FREE[1]));
        let one_by_one = (self.finetune.samples > 0).then(|| ONE_BY_ONE.to_owned());
        let space = Space {
            sizes: std::iter::once(size).chain(smaller).map(|side| format!("finetune.image_size={side}")).collect(),
            compromises: std::iter::once(String::new()).chain(one_by_one).chain(costly).collect(),
            ..Space::default()
        };
        SettingsSearch { settings: self, facts: sizes, machine }.best_of(space)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;
    use crate::plan::device_terms::DeviceUsage;
    use crate::plan::gpus;

    fn machine(gpu: &str) -> Machine {
        Machine::Cuda(gpus::find(gpu).expect("a known GPU"), DeviceUsage::default())
    }

    fn settings(preset: &str, sets: &[&str]) -> FinetuneRun {
        let sets = sets.iter().map(|set| ((*set).to_owned(), "--set".to_owned())).collect();
        let sources = Sources { preset: Some(preset.to_owned()), sets, ..Sources::default() };
        sources.resolve_as::<FinetuneRun>().expect("settings").config
    }

    #[test]
    fn samples_take_no_more_memory_than_a_training_step() {
        let _lock = crate::tensor::rng::TEST_LOCK.lock();
        let machine = machine("80gb");
        let mut larger = Vec::new();
        // the network of `tiny` is smaller than Inception, which compares the samples
        for (preset, _) in FinetuneRun::PRESETS.iter().filter(|(name, _)| *name != "tiny") {
            for precision in ["train.precision=bf16", "train.precision=fp32"] {
                let run = settings(preset, &[precision, "finetune.samples=24"]);
                let sizes = run.planned_pipeline_config().expect("sizes");
                let dry_run = run.dry_run(&sizes, Job::Train, &machine, false).expect("a plan");
                let plan = Plan::of(&dry_run, &machine);
                let peak = |name: &str| {
                    let phase = plan.phases.iter().find(|phase| phase.memory.name == name).expect("a phase");
                    phase.memory.allocated_peak
                };
                let (step, samples) = (peak("step"), peak("evaluate"));
                if samples > step {
                    larger.push(format!("{preset} with {precision}: {samples} after a step of {step}"));
                }
            }
        }
        assert!(larger.is_empty(), "{}", larger.join("\n"));
    }

    #[test]
    fn samples_are_made_in_bf16_where_the_gpu_has_it() {
        let chosen = |gpu: &str, sets: &[&str]| {
            settings("lora-sd15", sets).with_samples_for(&machine(gpu)).finetune.sample_precision
        };
        assert_eq!(chosen("A100 40GB", &["train.precision=fp32"]), SamplePrecision::Bf16);
        assert_eq!(chosen("A100 40GB", &["train.precision=fp16"]), SamplePrecision::Bf16);
        assert_eq!(chosen("A100 40GB", &["train.precision=bf16"]), SamplePrecision::Auto, "as the training");
        assert_eq!(chosen("T4", &["train.precision=fp32"]), SamplePrecision::Auto, "a T4 has no bf16");
        let fixed = ["train.precision=fp32", "finetune.sample_precision=fp32"];
        assert_eq!(chosen("A100 40GB", &fixed), SamplePrecision::Fp32);
        assert_eq!(SamplePrecision::Auto.beside(Precision::Fp16), Precision::Fp16);
    }

    #[test]
    fn a_gpu_without_bf16_refuses_samples_in_it() {
        let _lock = crate::tensor::rng::TEST_LOCK.lock();
        let run = settings("tiny", &["train.precision=fp32", "finetune.sample_precision=bf16"]);
        let sizes = run.planned_pipeline_config().expect("sizes");
        let error = run.dry_run(&sizes, Job::Train, &machine("T4"), false).map(drop).expect_err("no bf16");
        assert!(error.to_string().contains("finetune.sample_precision"), "{error}");
    }
}
