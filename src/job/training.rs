//! The training of PRS-Med as a [`Job`].

use super::memory::{Memory, accept};
use super::rows::Rows;
use super::together::{check_data, main_only};
use super::{How, write_report};
use crate::config::learning_rate::suggestion;
use crate::config::{Resolved, RunConfig};
use crate::data::identity::SeenImages;
use crate::data::manifest::{Manifest, Split};
use crate::event::{Event, Observer};
use crate::plan::dry_run::Job;
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::runtime::Runtime;
use crate::segment::resume::{self, DATA_FILE};
use crate::segment::task::SegmentTask;
use crate::segment::{Run, Training, needs, weight_files};
use crate::tensor::Device;
use crate::trainer::graph::settling_steps;
use crate::trainer::{self, Session, Switch};
use crate::units::{Bytes, signed};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A training of PRS-Med whose rows are read.
pub struct SegmenterTraining<'a> {
    how: &'a How<'a>,
    /// For one of the processes.
    config: RunConfig,
    toml: String,
    training: Training<'a>,
    rows: Rows,
    has_test: bool,
}

/// A finished training.
pub struct TrainedSegmenter {
    /// Steps, time, scores and the task.
    pub run: Run,
    /// The memory plan with the texts of the data.
    pub plan: Option<Plan>,
    /// True if the data has test rows.
    pub has_test: bool,
    /// An image of the data and a question about it.
    pub example: Option<ExampleQuestion>,
}

/// An image of the data and a question about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExampleQuestion {
    /// The image file.
    pub image: PathBuf,
    /// The question, in one line.
    pub question: String,
}

impl ExampleQuestion {
    /// The first validation row, else the first training row.
    fn of(manifest: &Manifest) -> Option<Self> {
        let rows = [Split::Val, Split::Train].into_iter().flat_map(|split| manifest.rows_of(split));
        let mut rows = rows.map(|row| &manifest.rows[row]);
        let row = rows.find(|row| !row.question.contains(char::is_control))?;
        Some(Self { image: row.image_path.clone(), question: row.question.clone() })
    }
}

impl<'a> SegmenterTraining<'a> {
    /// A training with these settings on `rows`.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that several processes cannot share; [`Error::Data`] or [`Error::Io`] for rows that
    /// cannot be read.
    pub fn new(settings: Resolved, rows: &Rows, how: &'a How<'a>) -> Result<Self> {
        let runtime = how.runtime;
        if let Some(suggestion) = suggestion(&settings, settings.config.samples_of_a_step()) {
            runtime.note(suggestion.text());
        }
        let (toml, mut config) = (settings.to_toml(), settings.config);
        if let Some(note) = config.train.divide_among(how.machine.num_ranks())? {
            runtime.note(note);
        }
        let manifest = rows.open(runtime)?;
        let has_test = !manifest.rows_of(Split::Test).is_empty();
        check_data(how.ranks, &manifest)?;
        let training = Training::new(config.clone(), manifest, &how.out, runtime)?.with_toml(toml.clone());
        let mut training = training.resume(how.resume.resumes()).with_ranks(how.ranks);
        let leaks = main_only(how.ranks, || Ok(training.leaks()));
        how.ranks.agree(leaks.and_then(|leaks| leaks.map_or(Ok(()), |leaks| rows.check_leaks(&leaks, runtime))))?;
        Ok(Self { how, config, toml, training, rows: rows.clone(), has_test })
    }

    /// Refuses a run to start from that has seen images or patients of test rows, unless that is allowed.
    fn check_init(&mut self, folder: &Path) -> Result<()> {
        let How { ranks, runtime, .. } = *self.how;
        let checked = main_only(ranks, || {
            let seen = SeenImages::of_checkpoint(&folder.join(DATA_FILE))?;
            if let Some(reason) = seen.unknown.as_ref().filter(|_| self.has_test) {
                let unknown = "it is unknown whether test images are new to the run of the argument `init`";
                runtime.note(format!("{unknown}: {reason}"));
            }
            self.rows.check_init(&self.training.seen_by(&seen), runtime)
        });
        ranks.agree(checked.map(drop))
    }

    /// The settings with caches that are no larger than the data fills them.
    fn planned_config(&self) -> RunConfig {
        self.config.with_cache_for(self.training.manifest())
    }
}

impl super::Job for SegmenterTraining<'_> {
    type Done = TrainedSegmenter;

    fn check_resume(&self, checkpoint: &Path) -> Result<()> {
        // the training says what the warnings say
        resume::check(checkpoint, &self.config, self.training.manifest()).map(drop)
    }

    fn find_files(&mut self, checkpoint: Option<&Path>) -> Result<()> {
        let runtime = self.how.runtime;
        let weights = match (checkpoint, self.config.model.init.as_str()) {
            (None, init) if !init.is_empty() => Some(needs::checkpoint_of(&runtime.locate(init)?)?),
            (checkpoint, _) => checkpoint.map(Path::to_owned),
        };
        if let Some(folder) = weights.as_deref().filter(|_| checkpoint.is_none()) {
            self.check_init(folder)?;
        }
        if weights.is_none() {
            weight_files::check_architectures(&mut self.config, runtime)?;
        }
        weight_files::check(needs::of_training(&self.config.model, weights.as_deref())?, runtime)
    }

    fn compare_weights(&self) -> Result<()> {
        self.training.compare_weights()
    }

    fn plan(&mut self) -> Result<()> {
        check_memory(&self.planned_config(), &self.how.machine, &self.how.memory, self.how.runtime)
    }

    fn train(self) -> Result<TrainedSegmenter> {
        let planned_config = self.planned_config();
        let Self { how, config, toml, training, has_test, .. } = self;
        let example = ExampleQuestion::of(training.manifest());
        let training = training.prepare()?;
        if training.task.has_feature_cache() {
            let most = Bytes((planned_config.data.cache_vision_mib as u64) << 20);
            how.runtime.note(format!("images of this run fill at most {most} of vision features"));
        }
        let plan = if how.plans { plan_of_data(&planned_config, &training.task, how) } else { None };
        let has_room = plan.as_ref().is_some_and(Plan::has_room_for_graphs);
        let (device, observer) = (how.runtime.device(), how.runtime.observer().as_ref());
        let observer = PlanCheck::new(plan.as_ref(), config.train.graph_switch(), device, observer);
        let session = training.session(&observer)?;
        let session = Session { profile: how.own_profile(), has_room_for_graphs: has_room, ..session };
        let outcome = trainer::run(&training.task, &session)?;
        write_report(&outcome, &toml, how);
        let run = Run { outcome, folder: how.out.clone(), task: training.task };
        Ok(TrainedSegmenter { run, plan, has_test, example })
    }
}

/// Shows the memory plan for the longest texts that the settings allow, and refuses settings that cannot fit.
///
/// # Errors
/// [`Error::Config`] for settings that do not fit.
pub fn check_memory(config: &RunConfig, machine: &Machine, memory: &Memory, runtime: &Runtime) -> Result<()> {
    let plan = match config.plan_for(Job::Train, machine) {
        // building the model reports file errors in more detail
        Err(Error::Weights { .. } | Error::Io { .. }) => return Ok(()),
        // the CPU's operators are tried one by one to learn what they need
        Err(error @ Error::OutOfMemory { .. }) => {
            runtime.warn(format!("no memory plan: {error}"));
            return Ok(());
        }
        plan => plan?,
    };
    runtime.note(format!("memory plan for the longest texts allowed:{}", plan.brief()));
    let otherwise = "`prsmed preset` searches for settings that fit";
    accept(plan, (config, &(), Job::Train, machine), ("train", otherwise), memory, runtime)
}

/// The plan with the data's own longest texts and the model's own sizes.
fn plan_of_data(config: &RunConfig, task: &SegmentTask, how: &How) -> Option<Plan> {
    let sizes = &task.loaded().description.sizes;
    match config.plan_sized(Job::Train, sizes, task.longest(), &how.machine) {
        Ok((_, plan)) => Some(plan),
        Err(error) => {
            how.runtime.warn(format!("no memory plan of this data: {error}"));
            None
        }
    }
}

/// Compares the planned peak with the peak of the first steps.
struct PlanCheck<'a> {
    inner: &'a dyn Observer,
    planned: Option<Bytes>,
    /// The step of this session that is compared.
    settled: u64,
    /// Steps of this session.
    steps: AtomicU64,
}

impl<'a> PlanCheck<'a> {
    fn new(plan: Option<&Plan>, graph: Switch, device: Device, inner: &'a dyn Observer) -> Self {
        // if `train.graph=auto` decides during the run, the plan without graphs is compared
        let planned = plan.filter(|plan| plan.with_graphs.is_none_or(|graphs| !graphs.fits));
        Self {
            inner,
            planned: planned.map(|plan| plan.allocated_peak),
            settled: SETTLED_STEPS.max(settling_steps(graph, device)),
            steps: AtomicU64::new(0),
        }
    }
}

/// Number of steps after which the optimizer's state exists and a further step has run.
const SETTLED_STEPS: u64 = 3;

impl Observer for PlanCheck<'_> {
    fn on(&self, event: &Event) {
        self.inner.on(event);
        let (Event::Step(report), Some(Bytes(planned))) = (event, self.planned) else { return };
        let done = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let is_last = report.step == report.total_steps && done < self.settled;
        if (done == self.settled || is_last) && report.allocated_peak > 0 {
            let percent = (report.allocated_peak as f64 / planned as f64 - 1.0) * 100.0;
            let measured = Bytes(report.allocated_peak);
            let text = format!(
                "tensors at their peak: planned {}, measured {measured} ({} %)",
                Bytes(planned),
                signed(percent, 1)
            );
            self.inner.on(&Event::Note(text));
        }
    }
}
