//! Profiler hooks of the training engine. Without profile settings they do nothing.

use super::components::{self, ComponentUse, Held};
use super::{Phase, Profiler, Settings};
use crate::Result;
use crate::event::{Event, MemoryReport, Observer};
use crate::tensor::module_path::{self, Followed};
use crate::tensor::{Device, Tensor};
use crate::trainer::{Parameter, Task};

#[derive(Default)]
pub(in crate::trainer) struct Hooks<'a>(Option<Running<'a>>);

struct Running<'a> {
    profiler: Profiler,
    every_steps: u64,
    observer: &'a dyn Observer,
    is_first: bool,
    /// True if marks belong to a phase that is profiled.
    is_open: bool,
    gradients: Held,
    written: Vec<ComponentUse>,
    followed: Followed,
}

impl<'a> Hooks<'a> {
    /// Starts after the task was built or, if `step` is given, resumed after that many optimizer steps.
    pub(in crate::trainer) fn start(
        settings: Option<&Settings>,
        observer: &'a dyn Observer,
        device: Device,
        step: Option<u64>,
    ) -> Result<Self> {
        let Some(settings) = settings else { return Ok(Self(None)) };
        let mut profiler = Profiler::new(device)?.to_file(&settings.out, step.is_some())?;
        profiler.at_step(step.unwrap_or(0));
        profiler.before(if step.is_some() { "resume" } else { "load" })?;
        profiler.baseline()?;
        Ok(Self(Some(Running {
            profiler,
            every_steps: settings.every_steps.max(1),
            observer,
            is_first: true,
            is_open: false,
            gradients: Held::default(),
            written: Vec::new(),
            followed: module_path::follow_backward()?,
        })))
    }

    /// Begins a step, after `done` steps.
    pub(in crate::trainer) fn begin_step(&mut self, done: u64) -> Result<()> {
        let Some(running) = &mut self.0 else { return Ok(()) };
        running.followed.forget();
        running.profiler.at_step(done);
        running.is_open = running.is_first || (done + 1).is_multiple_of(running.every_steps);
        running.is_first = false;
        if running.is_open { running.profiler.begin(if done == 0 { "first step" } else { "step" }) } else { Ok(()) }
    }

    /// Begins another phase.
    pub(in crate::trainer) fn begin(&mut self, name: &'static str, step: u64) -> Result<()> {
        let Some(running) = &mut self.0 else { return Ok(()) };
        running.profiler.at_step(step);
        running.is_open = true;
        running.profiler.begin(name)
    }

    /// Marks the end of a part of the phase.
    pub(in crate::trainer) fn mark(&mut self, label: &'static str) -> Result<()> {
        match &mut self.0 {
            Some(running) if running.is_open => running.profiler.mark(label).map(drop),
            _ => Ok(()),
        }
    }

    /// Measures the gradients, after the backward passes.
    pub(in crate::trainer) fn gradients(&mut self, parameters: &[Parameter]) {
        if let Some(running) = self.0.as_mut().filter(|running| running.is_open) {
            running.gradients = Held::gradients(parameters);
        }
    }

    /// Ends the phase, after `step` steps.
    pub(in crate::trainer) fn end(&mut self, step: u64) -> Result<Option<Phase>> {
        let Some(running) = self.0.as_mut().filter(|running| running.is_open) else { return Ok(None) };
        running.is_open = false;
        running.profiler.at_step(step);
        let Some((phase, leak)) = running.profiler.end()? else { return Ok(None) };
        if let Some(leak) = leak {
            running.observer.on(&Event::Warning(leak.to_string()));
        }
        Ok(Some(phase))
    }

    /// Ends the step; `state` returns the tensors of optimizer and moving average.
    pub(in crate::trainer) fn end_step<T: Task>(
        &mut self,
        step: u64,
        task: &T,
        state: impl FnOnce() -> [Vec<(String, Tensor)>; 2],
    ) -> Result<()> {
        let Some(phase) = self.end(step)? else { return Ok(()) };
        let Some(running) = &mut self.0 else { return Ok(()) };
        let [optimizer, ema] = state().map(|tensors| Held::state(&tensors));
        let now = components::measure(&task.components(), &running.gradients, &optimizer, &ema);
        if now != running.written {
            running.profiler.components(&now)?;
            running.written = now;
        }
        running.observer.on(&Event::Memory(report(&phase)));
        Ok(())
    }
}

fn report(phase: &Phase) -> MemoryReport {
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
