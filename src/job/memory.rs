//! The decision about a memory plan, and what is known for the report of a later out-of-memory error.

use super::planned::{Planned, Remedy};
use crate::event::MemoryReport;
use crate::plan::dry_run::Job;
use crate::plan::machine::Machine;
use crate::plan::report::Plan;
use crate::runtime::Runtime;
use crate::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Searches for changes that save memory, the most useful first.
pub type Suggest = Box<dyn FnOnce() -> Vec<Remedy> + Send>;

/// Data for the report of an out-of-memory error: shared by the job and by what handles its errors.
#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    last: Option<MemoryReport>,
    planned: Option<(Plan, Suggest)>,
}

impl Memory {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a profiled step.
    pub fn profiled(&self, report: &MemoryReport) {
        self.known().last = Some(report.clone());
    }

    /// Stores the plan of a run that starts.
    pub fn remember(&self, plan: Plan, suggest: Suggest) {
        self.known().planned = Some((plan, suggest));
    }

    /// True if a plan that fits was made.
    pub fn has_plan(&self) -> bool {
        self.known().planned.is_some()
    }

    /// The last profiled step, and the plan of the run with the search for changes that save memory.
    pub fn take(&self) -> (Option<MemoryReport>, Option<(Plan, Suggest)>) {
        let mut known = self.known();
        (known.last.take(), known.planned.take())
    }
}

/// One line for each change, the most useful first.
pub fn remedy_lines(remedies: &[Remedy]) -> String {
    let mut lines = vec!["changes that save memory:".to_owned()];
    lines.extend(remedies.iter().map(|remedy| format!("  {}", remedy.line())));
    lines.join("\n")
}

/// Keeps the plan of a run that fits, for the report of a later out-of-memory error, and refuses one that does not. It is
/// that of `job` with these settings on a machine. `key` names the settings in the error, and `otherwise` says what to do
/// if no single change fits.
///
/// # Errors
/// [`Error::Config`] for a plan that does not fit.
pub fn accept<T: Planned + Send>(
    plan: Plan,
    (config, facts, job, machine): (&T, &T::Facts, Job, &Machine),
    (key, otherwise): (&str, &str),
    memory: &Memory,
    runtime: &Runtime,
) -> Result<()>
where
    T::Facts: Send,
{
    if plan.fits {
        let (config, facts, machine, kept) = (config.clone(), facts.clone(), machine.clone(), plan.clone());
        memory.remember(plan, Box::new(move || config.remedies(&facts, job, &machine, &kept)));
        return Ok(());
    }
    let remedies = config.remedies(facts, job, machine, &plan);
    runtime.note(remedy_lines(&remedies));
    let fitting = remedies.iter().find(|remedy| remedy.fits);
    let helps = fitting.map_or_else(|| otherwise.to_owned(), |remedy| format!("`{}` fits", remedy.flags()));
    Err(Error::config(key, plan.summary(), format!("{helps}; the argument `no_plan` skips this check")))
}
