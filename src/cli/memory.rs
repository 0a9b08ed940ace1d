//! Flags of the memory profile, and the report after an out-of-memory error.

use crate::console::{DataOutput, memory_text, shares_text};
use crate::event::{Event, MemoryReport, Observer};
use crate::job::memory::Memory;
use crate::job::planned::Remedy;
use crate::plan::report::Plan;
use crate::tensor::ledger::AllocationFailure;
use crate::tensor::memory;
use crate::trainer::profile::{PROFILE_FILE, ProfileSettings};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

/// Flags of commands that train.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct ProfileArgs {
    /// Profile the memory of the first and of every N-th step
    ///
    /// Writes one JSON object per line: a phase and its peak by category, as in `plan`. Evaluations and saves are always
    /// profiled. All numbers are bytes.
    #[arg(long, value_name = "every=N")]
    profile_memory: Option<String>,
}

impl ProfileArgs {
    /// The requested profile; its file is in the folder `run`.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid value.
    pub(in crate::cli) fn settings(&self, run: &Path) -> Result<Option<ProfileSettings>> {
        let Some(text) = &self.profile_memory else { return Ok(None) };
        let every_steps = text.strip_prefix("every=").and_then(|count| count.parse().ok()).filter(|count| *count > 0);
        let every_steps = every_steps.ok_or_else(|| {
            let hint = "write for example `--profile-memory every=100` for the first and every 100th step";
            Error::config("--profile-memory", format!("`{text}` is not `every=N` with N 1 or more"), hint)
        })?;
        Ok(Some(ProfileSettings { every_steps, out: run.join(PROFILE_FILE) }))
    }
}

/// Forwards events; stores the last profiled step, and writes records to `output`.
pub(super) struct MemoryObserver {
    pub(super) inner: Box<dyn Observer>,
    pub(super) memory: Memory,
    pub(super) output: Arc<DataOutput>,
}

impl Observer for MemoryObserver {
    fn on(&self, event: &Event) {
        match event {
            Event::Memory(report) => self.memory.profiled(report),
            // a reader that has gone is no reason to stop
            Event::Record(record) => return drop(self.output.record(record)),
            _ => {}
        }
        self.inner.on(event);
    }
}

/// Report of an out-of-memory error.
#[derive(Debug, Default)]
struct Report {
    /// Live memory at the time of the error.
    failure: Option<AllocationFailure>,
    /// The last profiled step.
    last: Option<MemoryReport>,
    /// The plan of the run.
    plan: Option<Plan>,
    /// The change that helps most without changing results.
    suggestion: Option<Remedy>,
}

/// Writes the report of an out-of-memory error to `out`, and as `"kind": "out_of_memory"` to `output`. Does nothing for
/// other errors.
///
/// # Errors
/// Errors of `out` and `output`.
pub(super) fn report(error: &Error, memory: &Memory, out: &mut dyn Write, output: &DataOutput) -> anyhow::Result<()> {
    if !matches!(error, Error::OutOfMemory { .. }) {
        return Ok(());
    }
    let (last, planned) = memory.take();
    let mut report = Report { failure: memory::failure(), last, ..Report::default() };
    if let Some((plan, suggest)) = planned {
        report.suggestion = suggest().into_iter().next();
        report.plan = Some(plan);
    }
    report.write(out)?;
    output.record(&report.record(error))?;
    Ok(())
}

impl Report {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        if let Some(failure) = &self.failure {
            write_failure(out, failure)?;
        }
        if let Some(last) = &self.last {
            writeln!(out, "last profile: {}", memory_text(last))?;
        }
        if let Some(plan) = &self.plan {
            writeln!(out, "the plan was:\n{}", plan.table())?;
        }
        if let Some(remedy) = &self.suggestion {
            writeln!(out, "try first: {}", remedy.line())?;
        }
        Ok(())
    }

    fn record(&self, error: &Error) -> Value {
        json!({
            "kind": "out_of_memory",
            "reason": error.to_string(),
            "failure": self.failure,
            "last_profile": self.last,
            "plan": self.plan,
            "suggestion": self.suggestion,
        })
    }
}

fn write_failure(out: &mut dyn Write, failure: &AllocationFailure) -> io::Result<()> {
    let AllocationFailure { requested, category, module, allocated, reserved, categories, largest } = failure;
    let of = |category: &str| if module.is_empty() { category.to_owned() } else { format!("{category}, {module}") };
    if let Some(bytes) = requested {
        writeln!(out, "requested: {bytes} ({})", of(category.unwrap_or("")))?;
    }
    writeln!(out, "in use at that time: tensors {allocated}, reserved {reserved}")?;
    if !categories.is_empty() {
        writeln!(out, "by category: {}", shares_text(categories, categories.len()))?;
    }
    if !largest.is_empty() {
        writeln!(out, "largest tensors:")?;
    }
    for block in largest {
        writeln!(out, "  {:>10}  {:<11}  {}", block.bytes.to_string(), block.category, block.module)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::ledger::LargeBlock;
    use crate::units::Bytes;

    fn args(memory: Option<&str>) -> Result<Option<ProfileSettings>> {
        ProfileArgs { profile_memory: memory.map(str::to_owned) }.settings(Path::new("run"))
    }

    #[test]
    fn only_every_n_is_a_valid_profile() {
        let settings = args(Some("every=7")).unwrap().unwrap();
        assert_eq!(settings, ProfileSettings { every_steps: 7, out: "run/memory.jsonl".into() });
        assert_eq!(args(None).unwrap(), None);
        for wrong in ["7", "every=0", "every=", "every=x", "every=-1", "steps=7", "all"] {
            assert!(matches!(args(Some(wrong)), Err(Error::Config { .. })), "{wrong}");
        }
    }

    #[test]
    fn the_out_of_memory_report_lists_categories_and_largest_tensors() {
        let failure = AllocationFailure {
            requested: Some(Bytes(3 << 30)),
            category: Some("activations"),
            module: "llm.layers.7".into(),
            allocated: Bytes(5 << 30),
            reserved: Bytes(6 << 30),
            categories: vec![("activations", Bytes(1 << 30)), ("frozen", Bytes(4 << 30)), ("ema", Bytes(0))],
            largest: vec![LargeBlock { bytes: Bytes(1 << 30), category: "frozen", module: "llm".into() }],
        };
        let mut out = Vec::new();
        let last = MemoryReport { step: 4, allocated: 1024, ..MemoryReport::default() };
        Report { failure: Some(failure), last: Some(last), ..Report::default() }.write(&mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "requested: 3.00 GiB (activations, llm.layers.7)\n\
             in use at that time: tensors 5.00 GiB, reserved 6.00 GiB\n\
             by category: frozen 4.00 GiB, activations 1.00 GiB\n\
             largest tensors:\n    1.00 GiB  frozen       llm\n\
             last profile: memory at step 4: tensors 1.00 KiB, reserved 0 B, process 0 B; peak 0 B\n"
        );
    }

    #[test]
    fn the_last_profiled_step_is_stored_and_events_are_forwarded() {
        let memory = Memory::default();
        let observer = MemoryObserver {
            inner: Box::new(crate::event::Silent),
            memory: memory.clone(),
            output: Arc::new(DataOutput::none()),
        };
        for step in [1, 5] {
            observer.on(&Event::Memory(MemoryReport { step, ..MemoryReport::default() }));
        }
        observer.on(&Event::Note("x".into()));
        assert_eq!(memory.take().0.unwrap().step, 5);
    }
}
