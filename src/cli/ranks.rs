//! Several processes of one training: variables of `torchrun` and Slurm, and `--gpus N`, which starts the processes.

use super::context::Context;
use super::report::Outcome;
use crate::event::{Event, Observer};
use crate::tensor::{self, Device};
use crate::trainer::distributed::monitor::{Cause, Monitor};
use crate::trainer::distributed::variables::{JOB_KEY, STORE_FD};
use crate::trainer::distributed::{Ranks, Rendezvous, World};
use crate::{Error, Result};
use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time in which the other processes end after one has failed.
const GRACE: Duration = Duration::from_secs(20);

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
    /// Runs `work` in this process: alone, or as one of a job. With `--gpus N` as many processes are started, unless
    /// `is_alone`.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Config`] for a `--gpus` that differs from the processes that were started from outside.
    pub(super) fn run(
        &self,
        is_alone: bool,
        context: &Context,
        work: impl FnOnce(Ranks) -> anyhow::Result<Outcome>,
    ) -> anyhow::Result<Outcome> {
        let gpus = self.gpus.map_or(1, usize::from);
        match &context.rendezvous {
            None if gpus > 1 && !is_alone => return Ok(Outcome::Ended(launch(gpus, context)?)),
            Some(joined) if self.gpus.is_some() && gpus != joined.size => {
                let reason = format!("{} processes were started from outside", joined.size);
                return Err(Error::config("--gpus", reason, "remove it").into());
            }
            _ => {}
        }
        let job = Job::join(context)?;
        let outcome = work(Job::ranks(job.as_ref()));
        match job {
            Some(job) => job.end(outcome),
            None => outcome,
        }
    }
}

/// This process's part in a job of several processes.
pub(super) struct Job {
    world: World,
    monitor: Monitor,
}

impl Job {
    /// Joins the job of this process, if there is one.
    ///
    /// # Errors
    /// [`Error::Config`] if the other processes do not come; [`Error::Interrupted`]; [`Error::Torch`].
    pub(super) fn join(context: &Context) -> Result<Option<Self>> {
        let Some(rendezvous) = &context.rendezvous else { return Ok(None) };
        let progress = Arc::clone(&context.progress);
        let on_wait = |text: String| progress.on(&Event::Warning(text));
        let world = World::join(rendezvous, context.runtime.device(), &context.interrupt, &on_wait)?;
        let monitor = Monitor::start(rendezvous, |cause| end_process(&cause))?;
        Ok(Some(Self { world, monitor }))
    }

    /// The processes of `job`.
    pub(super) fn ranks(job: Option<&Self>) -> Ranks<'_> {
        Ranks::of_some(job.map(|job| &job.world))
    }

    /// The outcome of this process. A failure is told to the others; one that another process caused has its cause.
    pub(super) fn end<T>(self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        let error = match outcome {
            Ok(outcome) => {
                self.world.close()?;
                return Ok(outcome);
            }
            Err(error) => error,
        };
        match super::report::find(&error) {
            Some(Error::Interrupted | Error::Peer { .. }) => Err(error),
            // a lost connection is the consequence of a failure elsewhere
            Some(Error::Torch { reason }) => {
                let error = match self.monitor.cause() {
                    Some(cause @ Cause::Failure(_)) => anyhow::Error::msg(cause.to_string()),
                    Some(cause @ Cause::Lost(_)) if is_of_a_connection(reason) => {
                        self.told(anyhow::Error::msg(cause.to_string()))
                    }
                    _ => self.told(error),
                };
                self.monitor.outlast_others();
                Err(error)
            }
            _ => {
                let error = self.told(error);
                self.monitor.outlast_others();
                Err(error)
            }
        }
    }

    fn told(&self, error: anyhow::Error) -> anyhow::Error {
        self.monitor.fail(&format!("{error:#}"));
        error
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

/// Starts `count` processes with the arguments of this one, and waits for them. Returns the exit code of the first one
/// that failed, else 0.
///
/// # Errors
/// [`Error::Io`] if a process cannot be started; [`Error::Config`] in a process of a job.
pub(super) fn launch(count: usize, context: &Context) -> Result<u8> {
    if std::env::var_os("RANK").is_some() {
        // a process that a job started would start the same processes again, without an end
        let hint = "unset `RANK`, or start all processes with `torchrun`";
        return Err(Error::config("--gpus", "this process belongs to a job already, by the variable `RANK`", hint));
    }
    let program = std::env::current_exe().map_err(Error::io("prsmed", "find"))?;
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(Error::io("127.0.0.1", "listen on"))?;
    let port = listener.local_addr().map_err(Error::io("127.0.0.1", "listen on"))?.port();
    let key = format!("{:032x}", rand::random::<u128>());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut children = Vec::new();
    for rank in 0..count {
        let mut command = Command::new(&program);
        command.args(&args).env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command
            .env("WORLD_SIZE", count.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env(JOB_KEY, &key);
        if !context.env.sets_threads && context.runtime.device() == Device::Cpu {
            command.env("OMP_NUM_THREADS", (cores / count).max(1).to_string());
        }
        if std::env::var_os("GLOO_SOCKET_IFNAME").is_none() {
            command.env("GLOO_SOCKET_IFNAME", "lo");
        }
        let socket = (rank == 0).then(|| listener.as_raw_fd());
        match socket {
            Some(socket) => command.env(STORE_FD, socket.to_string()),
            None => command.env_remove(STORE_FD).stdout(Stdio::null()),
        };
        // SAFETY: both system calls are allowed between fork and exec. They ask for a signal at the end of this process,
        // and keep the socket open.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                if socket.is_some_and(|socket| libc::fcntl(socket, libc::F_SETFD, 0) < 0) {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        children.push(command.stdin(Stdio::null()).spawn().map_err(Error::io(&program, "start"))?);
    }
    drop(listener);
    wait_for(children, context).map_err(Error::io(&program, "wait for"))
}

/// Waits for all `children`; passes a request to stop on to them, and ends them after one has failed.
fn wait_for(children: Vec<Child>, context: &Context) -> std::io::Result<u8> {
    let (mut code, mut failed_at, mut passed_on) = (0, None, false);
    let (mut cause, mut has_killed) = (None, false);
    let mut children: Vec<(usize, Child)> = children.into_iter().enumerate().collect();
    while !children.is_empty() {
        std::thread::sleep(Duration::from_millis(50));
        if context.interrupt.load(Ordering::SeqCst) && !passed_on {
            passed_on = true;
            signal(&children, libc::SIGUSR1);
        }
        let mut open = Vec::new();
        for (rank, mut child) in children {
            let Some(status) = child.try_wait()? else {
                open.push((rank, child));
                continue;
            };
            let ended = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(2);
            let is_first = failed_at.is_none();
            if ended != 0 && is_first {
                failed_at = Some(Instant::now());
            }
            // the others notice the end of a killed process at once, and may end before it is seen here
            let signal = status.signal().filter(|_| !has_killed && cause.is_none());
            if ended != 0 && (is_first || signal.is_some()) {
                code = u8::try_from(ended).unwrap_or(2);
            }
            cause = cause.or(signal.map(|signal| killed(rank, signal)));
        }
        children = open;
        if failed_at.is_some_and(|at: Instant| at.elapsed() > GRACE) {
            has_killed = true;
            signal(&children, libc::SIGKILL);
        }
    }
    // the last line, below what the other processes said of their lost connections
    if let Some(cause) = cause {
        say(cause);
    }
    Ok(code)
}

/// What is known of a process that a signal has ended.
fn killed(rank: usize, signal: i32) -> String {
    let why = match signal {
        libc::SIGKILL => "SIGKILL. The system sends it when memory is short (see `dmesg`), and so do batch systems",
        libc::SIGTERM => "SIGTERM. Batch systems send it at the end of the time",
        libc::SIGSEGV => "SIGSEGV, a defect; please report it",
        libc::SIGABRT => "SIGABRT, a defect; please report it",
        libc::SIGBUS => "SIGBUS. A file that was read became shorter, or its disk failed",
        _ => return format!("the job ended because signal {signal} ended the process of rank {rank}"),
    };
    format!("the job ended because a signal ended the process of rank {rank}: {why}")
}

fn signal(children: &[(usize, Child)], signal: i32) {
    for (_, child) in children {
        if let Ok(id) = i32::try_from(child.id()) {
            // SAFETY: sends a signal to a child that was not waited for.
            unsafe { libc::kill(id, signal) };
        }
    }
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
    use crate::data::manifest::Manifest;
    use crate::fixture::{self, Root};
    use crate::job::together::{COMPARED, check_data_up_to, main_only};

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
            let row = crate::data::manifest::Row { mask_path, image_path, ..fixture::row("where", "here", None) };
            let manifest = Manifest {
                root: root.path().to_path_buf(),
                rows: vec![row],
                modalities: vec!["ct".into()],
                num_leaking: 0,
                skipped: Vec::new(),
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
