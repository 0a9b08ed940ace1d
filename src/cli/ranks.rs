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
    use crate::data::manifest::{Manifest, Presence, Target};
    use crate::fixture::{self, Root};
    use crate::job::together::{COMPARED, check_data_up_to, main_only};
    use std::process::{Command, Stdio};

    /// Runs `work` as each of two ranks: processes that run the test `name` again.
    fn as_two_ranks(name: &str, work: impl Fn(Ranks)) {
        let var = |name: &str| std::env::var(format!("PRSMED_TEST_{name}")).ok();
        if let Some(joined) = Rendezvous::from_vars(var).unwrap() {
            let world = World::join(&joined, Device::Cpu, &false.into(), &|_| {}).unwrap();
            work(Ranks::of(&world));
            // the store must outlive the other process
            Ranks::of(&world).agree(Ok(())).unwrap();
            world.close().unwrap();
            return;
        }
        let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port().to_string();
        let test = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
        let start = |rank: &str| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let vars = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
            for (name, value) in vars.into_iter().chain([("GLOO_SOCKET_IFNAME", "lo")]) {
                command.env(format!("PRSMED_TEST_{name}"), value);
            }
            command.args([&test, "--exact"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        for child in ["0", "1"].map(start) {
            let output = child.wait_with_output().unwrap();
            let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
        }
    }

    #[test]
    fn the_first_process_decides_and_the_others_take_its_choice() {
        as_two_ranks("the_first_process_decides_and_the_others_take_its_choice", |ranks| {
            let choose = |outcome: Result<Vec<String>>| {
                let own = main_only(ranks, || outcome);
                assert!(ranks.is_main() || matches!(own, Ok(None)), "only the first process searches");
                ranks.gather_if_all(own.map(Option::unwrap_or_default)).map(|mut all| all.swap_remove(0))
            };
            let own = format!("train.micro_batch={}", ranks.rank() + 4);
            assert_eq!(choose(Ok(vec![own])).unwrap(), ["train.micro_batch=4"]);
            let error = choose(Err(Error::config("train", "nothing fits", "use a larger GPU"))).unwrap_err();
            let expected =
                if ranks.is_main() { "`train`: nothing fits" } else { "rank 0 failed: `train`: nothing fits" };
            assert_eq!((error.to_string().as_str(), error.hint().as_str()), (expected, "use a larger GPU"));
        });
    }

    #[test]
    fn a_difference_in_a_sample_of_the_data_says_so() {
        as_two_ranks("a_difference_in_a_sample_of_the_data_says_so", |ranks| {
            let root = Root::new();
            root.pair("ct", "train", "a");
            let image_path = root.path().join("ct/train_images/a.png");
            let mask_path = root.path().join("ct/train_masks/a.png");
            if ranks.rank() == 1 {
                let mut bytes = std::fs::read(&image_path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(&image_path, bytes).unwrap();
            }
            let targets = Target::only(mask_path, Presence::Present);
            let row = crate::data::manifest::Row { targets, image_path, ..fixture::row("where", "here", None) };
            let manifest = Manifest {
                root: root.path().to_path_buf(),
                rows: vec![row],
                modalities: vec!["ct".into()],
                num_leaking: 0,
                skipped: Vec::new(),
                spellings: crate::data::patient::Spellings::default(),
            };
            let whole = check_data_up_to(ranks, &manifest, COMPARED).unwrap_err().to_string();
            assert!(whole.contains("rank 1 ") && whole.ends_with("ct/train_images/a.png is another"), "{whole}");
            let sample = check_data_up_to(ranks, &manifest, 1).unwrap_err().to_string();
            let expected = "ct/train_images/a.png is another; a sample was compared, 1 of 2 images and masks";
            assert!(sample.ends_with(expected), "{sample}");
        });
    }

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
