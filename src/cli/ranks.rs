//! Several processes of one training: variables of `torchrun` and Slurm, and `--gpus N`, which starts the processes.

use super::context::Context;
use super::report::Outcome;
use crate::data::identity::{DataIdentity, content_marks};
use crate::data::manifest::Manifest;
use crate::event::{Event, Observer};
use crate::tensor::collective::StoreAddress;
use crate::tensor::{self, Device};
use crate::trainer::distributed::monitor::{Cause, Monitor};
use crate::trainer::distributed::{Ranks, Rendezvous, World};
use crate::{Error, Result};
use std::collections::HashSet;
use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest time of a collective operation, as in PyTorch. A failed process is noticed much earlier, see [`Monitor`].
const TIMEOUT: Duration = Duration::from_mins(30);
/// Most processes of a job.
const MOST: usize = 4096;
/// Variable with the key of the job. Processes that do not know it cannot take part.
const JOB_KEY: &str = "PRSMED_JOB_KEY";
/// Variable with the listening socket that the launcher has opened for the store.
const STORE_FD: &str = "PRSMED_STORE_FD";
/// Variable with the address on which the store listens, if it is not `MASTER_ADDR`.
const STORE_ADDR: &str = "PRSMED_STORE_ADDR";
/// Time in which the other processes end after one has failed.
const GRACE: Duration = Duration::from_secs(20);

/// How this process joins a job, from the variables of `torchrun` or Slurm; `None` if it is alone.
///
/// # Errors
/// [`Error::Config`] for a variable that is missing or not a number.
pub(super) fn rendezvous(var: impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>> {
    let number = |name: &str| -> Result<Option<usize>> {
        let wrong = |text: &str| {
            let hint = "start the processes with `torchrun`, `srun` or `--gpus`, which set it";
            Error::config(name, format!("`{text}` is not a number"), hint)
        };
        var(name).map(|text| text.trim().parse().map_err(|_| wrong(&text))).transpose()
    };
    let missing = |name: &str| Error::config(name, "the variable is not set", "set it, as `torchrun` does");
    let found = if let Some(rank) = number("RANK")? {
        let size = number("WORLD_SIZE")?.ok_or_else(|| missing("WORLD_SIZE"))?;
        let host = var("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?;
        let port = number("MASTER_PORT")?.ok_or_else(|| missing("MASTER_PORT"))?;
        (rank, size, number("LOCAL_RANK")?.unwrap_or(rank), host, port)
    } else if var("SLURM_STEP_ID").is_some() {
        // in a job script without `srun` there is no step, and one process only
        let size = number("SLURM_STEP_NUM_TASKS")?.unwrap_or(1);
        let rank = number("SLURM_PROCID")?.unwrap_or(0);
        let host = var("MASTER_ADDR").or_else(|| var("SLURM_LAUNCH_NODE_IPADDR"));
        let host = host.ok_or_else(|| missing("MASTER_ADDR"))?;
        // jobs on the same machine get other ports
        let port = number("MASTER_PORT")?.unwrap_or(20_000 + number("SLURM_JOB_ID")?.unwrap_or(0) % 20_000);
        (rank, size, number("SLURM_LOCALID")?.unwrap_or(0), host, port)
    } else {
        return Ok(None);
    };
    let (rank, size, local_rank, host, port) = found;
    if size <= 1 {
        return Ok(None);
    }
    if rank >= size {
        let hint = "start the processes with `torchrun`, `srun` or `--gpus`";
        return Err(Error::config("RANK", format!("rank {rank} of {size} processes, counted from 0"), hint));
    }
    let port =
        u16::try_from(port).map_err(|_| Error::config("MASTER_PORT", format!("{port} is no port"), "use 29500"))?;
    if size > MOST {
        let reason = format!("{size} processes are too many; {MOST} can work together");
        return Err(Error::config("WORLD_SIZE", reason, "start one process for each GPU"));
    }
    let agent = var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let attempt = number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    // whoever does not know the key finds none of the job's values in the store
    let key = var(JOB_KEY).unwrap_or_default();
    let address = StoreAddress { host, port, prefix: format!("prsmed/{attempt}/{key}") };
    let interface = var("GLOO_SOCKET_IFNAME").filter(|name| !name.is_empty());
    let is_server = rank == 0 && !agent;
    let listener = number(STORE_FD)?.and_then(|descriptor| i32::try_from(descriptor).ok());
    let wrong =
        |text: &str| Error::config(STORE_ADDR, format!("`{text}` is not an IP address"), "use for example 0.0.0.0");
    let bind = var(STORE_ADDR).map(|text| text.trim().parse().map_err(|_| wrong(&text))).transpose()?;
    Ok(Some(Rendezvous { rank, size, local_rank, address, is_server, listener, bind, interface, timeout: TIMEOUT }))
}

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

/// Work of the process that writes files; the others get `None`.
///
/// # Errors
/// Those of `work`.
pub(super) fn main_only<T>(ranks: Ranks, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    ranks.is_main().then(work).transpose()
}

/// Most bytes of images and masks that are compared.
const COMPARED: u64 = 1 << 30;

/// Refuses data that is not the same for all processes: rows, and the content of images and masks.
///
/// # Errors
/// [`Error::Data`] with the first row or file that differs from that of rank 0; [`Error::Io`].
pub(super) fn check_data(ranks: Ranks, manifest: &Manifest) -> Result<()> {
    check_data_up_to(ranks, manifest, COMPARED)
}

fn check_data_up_to(ranks: Ranks, manifest: &Manifest, most: u64) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let differs = |what: String| {
        let reason = format!("rank {} has other data than rank 0: {what}", ranks.rank());
        Error::data(&manifest.root, reason, "give all processes the same data root, or equal copies of it")
    };
    let own = ranks.agree_on(DataIdentity::of(manifest))?;
    let first = ranks.gather_if_all(Ok(own.clone()))?.swap_remove(0);
    let difference = own.difference_from_first(&first, manifest);
    ranks.agree(difference.map_or(Ok(()), |difference| Err(differs(difference))))?;
    let own = ranks.agree_on(content_marks(manifest, most))?;
    let marks: Vec<u64> = own.iter().map(|(_, mark)| *mark).collect();
    let first = ranks.gather_if_all(Ok(marks))?.swap_remove(0);
    let other = own.iter().zip(first).find(|((_, mark), first)| mark != first);
    let changed = |path: &Path| {
        let all = manifest.rows.iter().flat_map(|row| [&row.image_path, &row.mask_path]);
        let count = all.filter(|path| path.exists()).collect::<HashSet<_>>().len();
        let sample = format!("; a sample was compared, {} of {count} images and masks", own.len());
        let sample = if own.len() < count { sample } else { String::new() };
        differs(format!("the content of {} is another{sample}", path.display()))
    };
    ranks.agree(other.map_or(Ok(()), |((path, _), _)| Err(changed(path))))
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
    use crate::fixture::{self, Root};
    use std::collections::HashMap;

    fn read(vars: &[(&str, &str)]) -> Result<Option<Rendezvous>> {
        let vars: HashMap<_, _> = vars.iter().copied().collect();
        rendezvous(|name| vars.get(name).map(|value| (*value).to_owned()))
    }

    const TORCHRUN: [(&str, &str); 5] =
        [("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29501")];

    #[test]
    fn variables_of_torchrun_are_read() {
        let found = read(&TORCHRUN).unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank, found.is_server), (3, 4, 1, false));
        assert_eq!((found.address.host.as_str(), found.address.port), ("node0", 29501));
        let agent = [&TORCHRUN[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")]];
        let mut agent = agent.concat();
        agent[0].1 = "0";
        let first = read(&agent).unwrap().unwrap();
        assert!(!first.is_server, "the agent has the server");
        assert_ne!(first.address.prefix, found.address.prefix, "each attempt has its own keys");
        let with_key = read(&[&TORCHRUN[..], &[(JOB_KEY, "secret")]].concat()).unwrap().unwrap();
        assert_ne!(with_key.address.prefix, found.address.prefix, "each job has its own keys");
    }

    /// Runs `work` as each of two ranks: processes that run the test `name` again.
    fn as_two_ranks(name: &str, work: impl Fn(Ranks)) {
        let var = |name: &str| std::env::var(format!("PRSMED_TEST_{name}")).ok();
        if let Some(joined) = rendezvous(var).unwrap() {
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

    #[test]
    fn variables_of_slurm_are_read_within_a_step_only() {
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "70001"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"),
        ];
        assert_eq!(read(&step).unwrap(), None);
        let found = read(&[&step[..], &[("SLURM_STEP_ID", "0")]].concat()).unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank), (1, 2, 1));
        assert_eq!((found.address.host.as_str(), found.address.port), ("10.0.0.7", 30_001));
    }

    #[test]
    fn one_process_is_no_job_and_wrong_variables_are_named() {
        assert_eq!(read(&[]).unwrap(), None);
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert_eq!(read(&alone).unwrap(), None);
        for (left_out, key) in [(2, "WORLD_SIZE"), (3, "MASTER_ADDR"), (4, "MASTER_PORT")] {
            let mut vars = TORCHRUN.to_vec();
            vars.remove(left_out);
            assert!(read(&vars).unwrap_err().to_string().starts_with(&format!("`{key}`: ")));
        }
        let mut vars = TORCHRUN.to_vec();
        vars[0].1 = "4";
        assert_eq!(read(&vars).unwrap_err().to_string(), "`RANK`: rank 4 of 4 processes, counted from 0");
        vars[0].1 = "first";
        assert_eq!(read(&vars).unwrap_err().to_string(), "`RANK`: `first` is not a number");
        vars[0].1 = "3";
        vars[2].1 = "1000000";
        let error = read(&vars).unwrap_err().to_string();
        assert_eq!(error, "`WORLD_SIZE`: 1000000 processes are too many; 4096 can work together");
    }
}
