//! A training of your own: settings, and the task that they describe.

use super::memory::accept;
use super::planned::{Planned, SavingChange};
use super::together::main_only;
use super::{How, write_report};
use crate::Result;
use crate::config::{Resolved, Settings};
use crate::files;
use crate::plan::dry_run::{self, Job};
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::segment::resume;
use crate::tensor::weights::verify_folder;
use crate::tensor::{Device, META};
use crate::trainer::{self, DryRunTask, Ranks, Session, TrainConfig, TrainingOutcome};
use crate::{Error, tensor};
use std::path::Path;

/// Settings that describe a task, with a section `train` for the engine.
pub trait TaskSettings: Settings + PartialEq + Send + 'static {
    /// The task.
    type Task: DryRunTask;

    /// The settings of the engine.
    fn train(&self) -> &TrainConfig;

    /// The same, to be changed.
    fn train_mut(&mut self) -> &mut TrainConfig;

    /// The task on `device`. On [`META`] it is planned: then it reads no files.
    ///
    /// # Errors
    /// Errors of files and data; typed errors of libtorch.
    fn build(&self, device: Device, ranks: Ranks) -> Result<Self::Task>;
}

impl<T: TaskSettings> Planned for T {
    type Facts = ();

    const TASK: &'static str = "train";

    fn plan_of(&self, _facts: &(), job: Job, machine: &Machine) -> Result<Plan> {
        let mut config = self.clone();
        config.train_mut().divide_among(machine.num_ranks())?;
        machine.check_precision("train.precision", config.train().precision)?;
        machine.set_planned_gpu();
        let build = |ranks: Ranks| config.build(META, ranks);
        Ok(Plan::of(&dry_run::plan(job, config.train(), machine.place(), true, build)?, machine))
    }

    fn has_same_batch(&self, now: &Self) -> bool {
        let images = |config: &TrainConfig| config.micro_batch * config.accumulation;
        images(self.train()) == images(now.train())
    }

    fn changes(&self, _job: Job) -> Vec<SavingChange> {
        let train = self.train();
        let sets = format!("train.micro_batch=1 train.accumulation={}", train.micro_batch * train.accumulation);
        let smaller = SavingChange::new(sets, "the same effective batch in smaller parts");
        (train.micro_batch > 1).then_some(smaller).into_iter().collect()
    }
}

/// The training of a task as a [`Job`](super::Job).
pub struct TaskTraining<'a, C: TaskSettings> {
    how: &'a How<'a>,
    settings: Resolved<C>,
}

/// A finished training.
pub struct Done<C: TaskSettings> {
    /// Steps, time and best score.
    pub outcome: TrainingOutcome,
    /// The task with the weights after the last step.
    pub task: C::Task,
}

impl<'a, C: TaskSettings> TaskTraining<'a, C> {
    /// A training with these settings. Where they do not fit, the change that saves most without an effect on results
    /// is taken.
    pub fn new(settings: Resolved<C>, how: &'a How<'a>) -> Self {
        Self { how, settings }
    }
}

impl<C: TaskSettings> super::Job for TaskTraining<'_, C> {
    type Done = Done<C>;

    fn check_resume(&self, checkpoint: &Path) -> Result<()> {
        verify_folder(checkpoint)?;
        for warning in resume::check_settings(&self.how.out, (&self.settings.config, &C::settings()))? {
            self.how.runtime.warn(warning);
        }
        Ok(())
    }

    fn plan(&mut self) -> Result<()> {
        let How { machine, memory, runtime, ranks, .. } = self.how;
        let mut plan = ranks.agree_on(self.settings.config.plan_of(&(), Job::Train, machine))?;
        if ranks.any(!plan.fits)? {
            // all processes take the change that the first one found
            let search = || {
                let mut remedies = self.settings.config.remedies(&(), Job::Train, machine, &plan).into_iter();
                Ok(remedies.find(|remedy| remedy.fits && remedy.keeps_results).map(|remedy| remedy.change))
            };
            let found = ranks.gather_if_all(main_only(*ranks, search).map(Option::flatten))?.swap_remove(0);
            if let Some(change) = found {
                runtime.note(format!("these settings do not fit: using `{change}`"));
                self.settings.config = self.settings.config.with_sets(&change)?;
                plan = self.settings.config.plan_of(&(), Job::Train, machine)?;
            }
        }
        runtime.note(format!("memory plan:{}", plan.brief()));
        let planned = (&self.settings.config, &(), Job::Train, machine);
        ranks.agree(accept(plan, planned, ("train", "no single change fits: combine several"), memory, runtime))
    }

    fn train(self) -> Result<Done<C>> {
        let Self { how, settings } = self;
        let (toml, mut config) = (settings.to_toml(), settings.config);
        if let Some(note) = config.train_mut().divide_among(how.ranks.size())? {
            how.runtime.note(note);
        }
        files::create_folders(&how.out).map_err(Error::io(&how.out, "create"))?;
        let task = tensor::guard::guard(|| config.build(how.runtime.device(), how.ranks))?;
        let session = Session {
            config: config.train(),
            folder: &how.out,
            settings: &toml,
            resume: how.out.join("last").is_dir(),
            profile: how.own_profile(),
            observer: how.runtime.observer().as_ref(),
            interrupt: how.runtime.interrupt(),
            has_room_for_graphs: false,
            ranks: how.ranks,
        };
        let outcome = trainer::run(&task, &session)?;
        write_report(&outcome, &toml, how);
        Ok(Done { outcome, task })
    }
}
