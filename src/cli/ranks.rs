//! This process in a job of several: variables of `torchrun` and Slurm, or `--gpus N`, which starts the processes.

use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::event::{Event, Observer};
use crate::tensor::{self, Device};
use crate::trainer::distributed::monitor::{Cause, Monitor};
use crate::trainer::distributed::{Ranks, Rendezvous, World, launch};
use crate::{Error, Result};
use std::sync::Arc;

/// The number of GPUs of a job.
#[derive(Debug, clap::Args)]
pub(super) struct GpuArgs {
    /// Use so many GPUs of this machine: starts as many processes, as `torchrun --nproc_per_node=N` does
    ///
    /// In a training they divide the micro-batches of each step, so `train.micro_batch` x `train.accumulation` stays the
    /// effective batch; in an evaluation they divide the questions, in a generation the batches of pairs. Without a GPU, N processes share the cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus: Option<u16>,
}

impl GpuArgs {
    /// The number of GPUs.
    pub(super) fn count(&self) -> usize {
        self.gpus.map_or(1, usize::from)
    }

    /// Runs `work` in this process: alone, or as one of a job. With `--gpus N` as many processes are started, unless
    /// `is_alone`.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Config`] for a `--gpus` that differs from the processes that were started from outside.
    pub(super) fn run(
        &self,
        is_alone: bool,
        context: &Context,
        work: impl FnOnce(Ranks) -> CommandResult,
    ) -> CommandResult {
        let gpus = self.count();
        match &context.rendezvous {
            None if gpus > 1 && !is_alone => return Ok(CommandEnd::Ended(start(gpus, context)?)),
            Some(joined) if self.gpus.is_some() && gpus != joined.size => {
                let reason = format!("{} processes were started from outside", joined.size);
                return Err(Error::config("--gpus", reason, "remove it").into());
            }
            _ => {}
        }
        JoinedJob::work(context, work)
    }
}

/// This process's part in a job of several processes.
pub(super) struct JoinedJob {
    world: World,
    monitor: Monitor,
}

impl JoinedJob {
    /// Runs `work` in the job of this process, or alone if there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if the other processes do not come; [`Error::Interrupted`]; [`Error::Torch`]; those of `work`.
    pub(super) fn work<T>(context: &Context, work: impl FnOnce(Ranks) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let Some(rendezvous) = &context.rendezvous else { return work(Ranks::default()) };
        let progress = Arc::clone(&context.progress);
        let on_wait = |text: String| progress.on(&Event::Warning(text));
        let world = World::join(rendezvous, context.runtime.device(), context.runtime.interrupt(), &on_wait)?;
        let monitor = Monitor::start(rendezvous, |cause| end_process(&cause))?;
        let job = Self { world, monitor };
        let outcome = work(Ranks::of(&job.world));
        job.end(outcome)
    }

    /// Reports a failure to the other processes. If another process failed first, returns its cause.
    fn end<T>(self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        let error = match outcome {
            Ok(outcome) => {
                self.world.close()?;
                return Ok(outcome);
            }
            Err(error) => error,
        };
        let of = |cause: Cause| anyhow::Error::msg(cause.to_string());
        let (error, is_known) = match super::report::find(&error) {
            Some(Error::Interrupted | Error::Peer { .. }) => return Err(error),
            // a lost connection is the consequence of a failure elsewhere
            Some(Error::Torch { reason }) => match self.monitor.cause() {
                Some(cause @ Cause::Failure(_)) => (of(cause), true),
                Some(cause @ Cause::Lost(_)) if is_of_a_connection(reason) => (of(cause), false),
                _ => (error, false),
            },
            _ => (error, false),
        };
        if !is_known {
            self.monitor.fail(&format!("{error:#}"));
        }
        self.monitor.outlast_others();
        Err(error)
    }
}

/// True for an error of Gloo, NCCL or the store.
fn is_of_a_connection(reason: &str) -> bool {
    let reason = reason.to_lowercase();
    ["gloo", "nccl", "connect", "socket"].iter().any(|word| reason.contains(word))
}

/// Ends this process because another one failed: its own work may wait for the other one for a long time.
fn end_process(cause: &str) {
    say(Cause::Failure(cause.to_owned()).to_string());
    super::report::leave(2)
}

/// Writes an error, also with `--quiet`.
fn say(text: String) {
    // without standard error there is nobody to tell
    let _ = super::report::write_error(&mut std::io::stderr(), &anyhow::Error::msg(text), false);
}

/// The GPU of a process, by its number on its machine.
///
/// # Errors
/// [`Error::Config`] if the machine has fewer GPUs.
pub(super) fn choose_gpu(rendezvous: &Rendezvous) -> Result<()> {
    let count = tensor::num_gpus();
    if count == 0 {
        return Ok(());
    }
    // Slurm may show each process its own GPU only
    let index = if count == 1 { 0 } else { rendezvous.local_rank };
    if index >= count {
        let reason = format!("process {index} of this machine needs a GPU of its own, and there are {count}");
        return Err(Error::config("--gpus", reason, "start fewer processes, one for each GPU"));
    }
    tensor::set_default_gpu(index)
}

/// Starts `count` processes like this one, and waits for them. Returns their exit code.
pub(super) fn start(count: usize, context: &Context) -> Result<u8> {
    let shares_cores = !context.env.sets_threads && context.runtime.device() == Device::Cpu;
    let launch::Ended { code, cause } = launch::launch(count, shares_cores, context.runtime.interrupt())?;
    // the last line, below what the other processes said of their lost connections
    cause.into_iter().for_each(say);
    Ok(code)
}

/// Shows warnings only, with the number of the process: for all but the first one.
pub(super) struct OtherRank {
    pub(super) rank: usize,
    pub(super) inner: Box<dyn Observer>,
}

impl Observer for OtherRank {
    fn on(&self, event: &Event) {
        if let Event::Warning(text) = event {
            self.inner.on(&Event::Warning(format!("rank {}: {text}", self.rank)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_connections_are_known() {
        let gloo =
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:7594";
        for reason in [gloo, "NCCL error in: remote process exited", "recvValue failed on SocketImpl(fd=9)"] {
            assert!(is_of_a_connection(reason), "{reason}");
        }
        assert!(!is_of_a_connection("CUDA error: an illegal memory access was encountered"));
    }
}
