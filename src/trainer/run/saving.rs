//! Checkpoints of a run: when they are due, on a full disk, and after a step that failed.

use super::Engine;
use crate::Task;
use crate::checkpoint::{self, TrainingProgress};
use crate::records::Records;
use prsmed_base::event::Event;
use prsmed_base::{Error, Result};
use prsmed_tensor::weights::Staged;
use prsmed_tensor::{Tensor, guard, ledger};
use std::path::Path;

impl<T: Task> Engine<'_, T> {
    /// Saves the run when a step fails: the weights are still those of the last good step.
    pub(super) fn rescue(&mut self, error: Error) -> Result<()> {
        if let Err(later) = guard::guard(|| self.settle()) {
            // `error` is the failure that ends the run
            self.session.observer.on(&Event::Warning(format!("another step failed too: {later}")));
        }
        // partially updated weights must not be saved
        let optimizer = &self.stepper.optimizer;
        if !matches!(error, Error::Io { .. }) && self.progress.step > 0 && !optimizer.partially_updated {
            optimizer.clear();
            let saved = if self.fails_on_all(&error) { self.save("last") } else { self.save_alone("last") };
            match saved {
                // the first failure is the cause
                Ok(()) | Err(Error::OutOfMemory { .. }) => (),
                Err(other) => return Err(other),
            }
        }
        Err(error)
    }

    pub(super) fn save_is_due(&self) -> bool {
        let every = self.session.config.checkpoint_every_steps;
        every > 0 && self.progress.step.is_multiple_of(every)
    }

    /// As [`Self::save`]; a full disk is a warning, and training continues. Returns `true` if it was saved.
    pub(super) fn save_if_possible(&mut self, name: &str) -> Result<bool> {
        match self.save(name) {
            Err(error @ Error::Io { .. }) if error.is_disk_full() => {
                let text = format!(
                    "no room on the disk for the checkpoint `{name}/` ({error}); training continues, {}: free some space",
                    self.last_checkpoint()
                );
                self.session.observer.on(&Event::Warning(text));
                Ok(false)
            }
            outcome => outcome.map(|()| true),
        }
    }

    /// Whether all processes end with this error.
    fn fails_on_all(&self, error: &Error) -> bool {
        let is_alone = self.session.ranks.size() == 1;
        let is_shared = match error {
            Error::Diverged { .. } => true,
            Error::OutOfMemory { .. } => !self.task.is_divided(),
            _ => false,
        };
        is_alone || is_shared
    }

    /// Saves without the other processes, which have failed. Without their optimizer state there is no checkpoint.
    fn save_alone(&mut self, name: &str) -> Result<()> {
        if !self.session.ranks.is_main() || self.session.config.zero_stage > 0 {
            return Ok(());
        }
        let path = self.session.folder.join(name);
        let state = self.stepper.state()?;
        guard::guard(|| self.write(&path, &state))?;
        self.session.observer.on(&Event::Saved { path, best: false });
        Ok(())
    }

    pub(super) fn save(&mut self, name: &str) -> Result<()> {
        let (path, ranks) = (self.session.folder.join(name), self.session.ranks);
        self.profile.begin("save")?;
        let state = guard::guard(|| self.stepper.state())?;
        let written = if ranks.is_main() { guard::guard(|| self.write(&path, &state)) } else { Ok(()) };
        ranks.agree(written)?;
        self.profile.end(self.progress.step)?;
        if name == "last" {
            self.saved = Some(self.progress.step);
        }
        self.session.observer.on(&Event::Saved { path, best: name == "best" });
        Ok(())
    }

    fn write(&mut self, path: &Path, state: &[(String, Tensor)]) -> Result<()> {
        let _category = ledger::enter(ledger::Category::Workspace);
        self.records.as_mut().map_or(Ok(()), Records::sync)?;
        let mut folder = Staged::begin(path)?;
        self.task.save(&mut folder)?;
        let progress = TrainingProgress { scaler: self.stepper.scaler.clone(), ..self.progress.clone() };
        checkpoint::save(&mut folder, &progress, state)?;
        folder.publish()
    }
}
