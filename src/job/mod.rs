//! Jobs: what a command does, without its arguments and its output.
//!
//! [`run`] is the one order in which a training comes about: lock of the run folder, resume check, rows, checkpoint,
//! files, memory plan, model, training, record. A [`Job`] says what is its own in each of these:
//! [`training::SegmenterTraining`], [`finetuning::GeneratorFinetuning`], [`generation::PairGeneration`], and
//! [`task::TaskTraining`] for a task of your own. A program that calls [`run`] gets all that `prsmed train` gets.
//!
//! ```no_run
//! use prsmed::config::Sources;
//! use prsmed::job::{self, How, rows::Rows, training::SegmenterTraining};
//! use prsmed::prelude::*;
//!
//! let runtime = Runtime::new();
//! let how = How::new("runs/a", &runtime)?;
//! let settings = Sources { preset: Some("tiny".into()), ..Sources::default() }.resolve()?;
//! let trained = job::run(&how, |how| SegmenterTraining::new(settings, &Rows::of("data"), how))?;
//! println!("{} steps", trained.run.outcome.steps);
//! # Ok::<(), prsmed::Error>(())
//! ```

pub mod advice;
pub mod evaluation;
pub mod finetuning;
mod finetuning_plan;
pub mod found;
pub mod generation;
mod generation_plan;
pub mod generator;
pub mod lock;
pub mod machine;
pub mod memory;
pub mod outputs;
pub mod planned;
pub mod resume;
pub mod rows;
pub mod solve;
pub mod task;
pub mod together;
pub mod training;
pub mod training_plan;
pub mod training_settings;

#[cfg(test)]
mod encoder_and_head_tests;

#[cfg(test)]
mod family_tests;

use crate::Result;
use crate::plan::machine::Machine;
use crate::report::{self, training as training_report};
use crate::runtime::Runtime;
use crate::tensor::weights::readable_folder;
use crate::tensor::{self, memory as tensor_memory};
use crate::trainer::{Ranks, TrainingOutcome, profile};
use crate::units::Bytes;
use lock::RunLock;
use memory::Memory;
use resume::ResumeFrom;
use std::path::{Path, PathBuf};
use together::main_only;

/// How a job runs, whatever it does.
pub struct How<'a> {
    /// The run folder.
    pub out: PathBuf,
    /// Starts a new run, or continues one from a checkpoint.
    pub resume: ResumeFrom,
    /// Plans memory first, and refuses what cannot fit. Without a plan no CUDA graphs are captured by themselves.
    pub plans: bool,
    /// Most that tensors may take; plans ignore it.
    pub memory_limit: Option<Bytes>,
    /// Writes a memory profile; only the main process does.
    pub profile: Option<profile::ProfileSettings>,
    /// The processes that train together.
    pub ranks: Ranks<'a>,
    /// The machine that is planned for.
    pub machine: Machine,
    /// Receives what a report of an out-of-memory error needs.
    pub memory: Memory,
    /// Device, cache, hub, observer and interrupt flag.
    pub runtime: &'a Runtime,
}

impl<'a> How<'a> {
    /// A new run of this process alone, planned for the machine of `runtime`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a GPU that this program cannot use.
    pub fn new(out: impl Into<PathBuf>, runtime: &'a Runtime) -> Result<Self> {
        Ok(Self {
            out: out.into(),
            resume: ResumeFrom::New,
            plans: true,
            memory_limit: None,
            profile: None,
            ranks: Ranks::default(),
            machine: machine::here(runtime)?,
            memory: Memory::default(),
            runtime,
        })
    }

    /// The same as one of several processes.
    #[must_use]
    pub fn with_ranks(self, ranks: Ranks<'a>) -> Self {
        Self { machine: self.machine.with_ranks(ranks.rank(), ranks.size()), ranks, ..self }
    }

    /// The checkpoint to continue from; `None` for a new run, and for one that has none yet.
    fn checkpoint(&self) -> Option<PathBuf> {
        readable_folder(&self.out.join("last")).ok().filter(|_| self.resume.resumes())
    }

    /// The profile that this process writes.
    fn own_profile(&self) -> Option<&profile::ProfileSettings> {
        self.profile.as_ref().filter(|_| self.ranks.is_main())
    }
}

/// What is a training's own, or that of another long job.
pub trait Job: Sized {
    /// Its result.
    type Done;

    /// Refuses a folder that belongs to something else, before a file is written there.
    ///
    /// # Errors
    /// [`crate::Error::Data`].
    fn refuse_foreign(_how: &How) -> Result<()> {
        Ok(())
    }

    /// Refuses a folder that this job cannot begin or continue in: by default one that has another run.
    ///
    /// # Errors
    /// [`crate::Error::Config`]; [`crate::Error::Data`].
    fn check_folder(how: &How) -> Result<()> {
        how.resume.check(&how.out)
    }

    /// Refuses settings and rows that do not fit the checkpoint to continue from. Nothing is loaded or changed.
    ///
    /// # Errors
    /// [`crate::Error::Config`]; [`crate::Error::Data`] for rows that have changed.
    fn check_resume(&self, _checkpoint: &Path) -> Result<()> {
        Ok(())
    }

    /// Finds all weight files, before anything is planned.
    ///
    /// # Errors
    /// [`crate::Error::Hub`] or [`crate::Error::Weights`] for missing files.
    fn find_files(&mut self, _checkpoint: Option<&Path>) -> Result<()> {
        Ok(())
    }

    /// Compares the names and shapes of all weights with those of the model; only [`check`] needs it, because [`run`] loads them.
    ///
    /// # Errors
    /// [`crate::Error::Weights`] for weights that cannot be loaded.
    fn compare_weights(&self) -> Result<()> {
        Ok(())
    }

    /// Plans memory: shows the plan, searches other settings if it may, and refuses settings that do not fit.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for settings that do not fit.
    fn plan(&mut self) -> Result<()>;

    /// Loads model and data, and runs the job to its end: trains, or generates pairs.
    ///
    /// # Errors
    /// Errors of files and data; as [`crate::trainer::run()`].
    fn train(self) -> Result<Self::Done>;
}

/// Runs a job from the lock of its folder to its record. `make` reads its rows, once the folder is known to be free and
/// to have the run to continue.
///
/// # Errors
/// [`crate::Error::Config`] for a folder in which another process writes or that has another run, and for settings that do not
/// fit; those of the job; [`crate::Error::Interrupted`] after saving.
pub fn run<'a, J: Job>(how: &'a How<'a>, make: impl FnOnce(&'a How<'a>) -> Result<J>) -> Result<J::Done> {
    let (ranks, runtime) = (how.ranks, how.runtime);
    let lock = || RunLock::on("out", &how.out, runtime.observer().as_ref());
    if ranks.is_main() {
        J::refuse_foreign(how)?;
    }
    // an existing run is refused before the data is read; unusable data leaves no folder behind
    let early = (ranks.is_main() && how.out.is_dir()).then(lock).transpose()?;
    if ranks.is_main() {
        J::check_folder(how)?;
    }
    let mut job = make(how)?;
    let _lock = ranks.agree_on(main_only(ranks, || {
        let lock = early.map_or_else(lock, Ok)?;
        how.resume.adopt(&how.out)?;
        Ok(lock)
    }))?;
    let checkpoint = how.checkpoint();
    if let Some(folder) = &checkpoint {
        job.check_resume(folder)?;
    } else if how.resume.resumes() {
        runtime.note(format!("{} contains no checkpoint yet: starting from the beginning", how.out.display()));
    }
    job.find_files(checkpoint.as_deref())?;
    if let Some(profile) = how.own_profile() {
        profile.check()?;
    }
    if let Some(limit) = how.memory_limit {
        // before the first tensor on a GPU
        let total = if let Machine::Cuda(budget, _) = &how.machine { Bytes(budget.total_bytes) } else { limit };
        tensor_memory::set_limit(runtime.device(), limit, total)?;
    }
    if how.plans {
        job.plan()?;
    }
    job.train()
}

/// Does other work that writes into a folder, with the lock of that folder. `argument` names the folder in errors.
///
/// # Errors
/// [`crate::Error::Argument`] for a folder in which another process writes; those of the work.
pub fn locked<T>(argument: &str, folder: &Path, runtime: &Runtime, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _lock = RunLock::on(argument, folder, runtime.observer().as_ref())?;
    work()
}

/// Checks what [`run`] needs and starts nothing: run folder, rows, checkpoint, files and memory plan. Writes nothing.
///
/// # Errors
/// As [`run`], before its training begins.
pub fn check<'a, J: Job>(how: &'a How<'a>, make: impl FnOnce(&'a How<'a>) -> Result<J>) -> Result<()> {
    J::refuse_foreign(how)?;
    let (resumes, folder) = (how.resume.resumes(), J::check_folder(how));
    // a folder that is taken is reported last, after everything else was checked
    let folder = if resumes { Ok(folder?) } else { folder };
    let mut job = make(how)?;
    let checkpoint = how.checkpoint();
    checkpoint.as_deref().map_or(Ok(()), |folder| job.check_resume(folder))?;
    let files = job.find_files(checkpoint.as_deref()).and_then(|()| job.compare_weights());
    let planned = if how.plans { job.plan() } else { Ok(()) };
    // both are told: a plan needs no weights
    if let (Err(_), Err(plan)) = (&files, &planned) {
        how.runtime.warn(plan.to_string());
    }
    files.and(planned).and(folder)
}

/// Writes `report.html` into the run folder. The training is done, so a failure is a warning only.
fn write_report(outcome: &TrainingOutcome, toml: &str, how: &How) {
    if !how.ranks.is_main() {
        return;
    }
    let device = how.runtime.device();
    let facts = vec![
        ("prsmed".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("libtorch".to_owned(), tensor::libtorch_version()),
        ("device".to_owned(), format!("{device:?}")),
        ("time of this session".to_owned(), format!("{:.1} s", outcome.train_seconds)),
        ("peak memory of tensors".to_owned(), tensor_memory::overall_peak(device).to_string()),
    ];
    if let Err(error) = training_report::write(&how.out, toml, &facts) {
        how.runtime.warn(format!("no {}: {error}", report::REPORT_FILE));
    }
}
