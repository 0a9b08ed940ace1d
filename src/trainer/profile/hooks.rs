//! Profiler hooks of the training engine. Without profile settings they do nothing.

use super::{ProfileSettings, ProfiledPhase, Profiler};
use prsmed_base::Result;
use prsmed_base::event::{Event, MemoryReport, Observer};
use prsmed_tensor::Device;
use prsmed_tensor::module_path::{self, FollowGuard};

#[derive(Default)]
pub(crate) struct Hooks<'a>(Option<Running<'a>>);

struct Running<'a> {
    profiler: Profiler,
    every_steps: u64,
    observer: &'a dyn Observer,
    is_first: bool,
    followed: FollowGuard,
}

impl<'a> Hooks<'a> {
    /// Starts after the task was built or, if `step` is given, resumed after that many optimizer steps.
    pub(crate) fn start(
        settings: Option<&ProfileSettings>,
        observer: &'a dyn Observer,
        device: Device,
        step: Option<u64>,
    ) -> Result<Self> {
        let Some(settings) = settings else { return Ok(Self(None)) };
        let mut profiler = Profiler::new(device, &settings.out, step.is_some())?;
        profiler.before(if step.is_some() { "resume" } else { "load" }, step.unwrap_or(0))?;
        Ok(Self(Some(Running {
            profiler,
            every_steps: settings.every_steps.max(1),
            observer,
            is_first: true,
            followed: module_path::follow_backward()?,
        })))
    }

    /// Begins a step, after `done` steps.
    pub(crate) fn begin_step(&mut self, done: u64) -> Result<()> {
        let Some(running) = &mut self.0 else { return Ok(()) };
        running.followed.forget();
        running.profiler.open = None;
        let is_due = std::mem::take(&mut running.is_first) || (done + 1).is_multiple_of(running.every_steps);
        if is_due { running.profiler.begin(if done == 0 { "first step" } else { "step" }) } else { Ok(()) }
    }

    /// Begins another phase.
    pub(crate) fn begin(&mut self, name: &str) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |running| running.profiler.begin(name))
    }

    /// Ends the phase, after `step` steps.
    pub(crate) fn end(&mut self, step: u64) -> Result<Option<ProfiledPhase>> {
        self.0.as_mut().map_or(Ok(None), |running| running.profiler.end(step))
    }

    /// Ends the step.
    pub(crate) fn end_step(&mut self, step: u64) -> Result<()> {
        if let (Some(phase), Some(running)) = (self.end(step)?, &self.0) {
            running.observer.on(&Event::Memory(report(&phase)));
        }
        Ok(())
    }
}

fn report(phase: &ProfiledPhase) -> MemoryReport {
    MemoryReport {
        phase: phase.name.clone(),
        step: phase.step,
        allocated: phase.allocated.0,
        allocated_peak: phase.allocated_peak.0,
        reserved: phase.reserved.0,
        reserved_peak: phase.reserved_peak.0,
        resident: phase.system.resident.0,
        device_used: phase.system.device_used.map(|bytes| bytes.0),
        categories_at_peak: phase.categories.iter().map(|(name, bytes)| (*name, bytes.0)).collect(),
    }
}
