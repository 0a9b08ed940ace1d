//! Commands in copies of a process that has already loaded libtorch.
//!
//! Loading it takes 0.2 s, most of the time of a command that is refused, and this suite runs some 900 commands. So one
//! process loads it and waits. For each command it makes a copy of itself with `fork`, which calls the program's own
//! [`prsmed::cli::run`] with the arguments, variables, folder and outputs of the command, and ends with its code. The
//! waiting process has one thread and never computes, so a copy is as a new process.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::support::{Ran, path};

const SOCKET: &str = "PRSMED_TESTS_SOCKET";
/// Variable of a command that needs a process of its own.
const OWN: &str = "PRSMED_TESTS_OWN_PROCESS";

/// Sets a limit of the system for a command.
pub(crate) fn limit(command: &mut Command, resource: libc::__rlimit_resource_t, bytes: u64) {
    use std::os::unix::process::CommandExt;
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    let set = move || {
        // SAFETY: `limit` is a plain structure that lives here; the call allocates nothing.
        match unsafe { libc::setrlimit(resource, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec only the system call above is made.
    unsafe { command.env(OWN, "1").pre_exec(set) };
}

/// One command; `variables` without a value are removed.
#[derive(Serialize, Deserialize)]
struct Job {
    arguments: Vec<String>,
    variables: BTreeMap<String, Option<String>>,
    folder: PathBuf,
    stdout: PathBuf,
    stderr: PathBuf,
}

/// The command as a job, if it runs the program in one process; `None` for others.
fn job(command: &Command) -> Option<Job> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let text = |word: &OsStr| word.to_str().map(str::to_owned);
    let arguments: Option<Vec<String>> =
        [command.get_program()].into_iter().chain(command.get_args()).map(text).collect();
    let variable = |(name, value): (&OsStr, Option<&OsStr>)| {
        let value = match value {
            Some(value) => Some(text(value)?),
            None => None,
        };
        Some((text(name)?, value))
    };
    let variables: Option<BTreeMap<_, _>> = command.get_envs().map(variable).collect();
    let (arguments, variables) = (arguments?, variables?);
    // libtorch reads some variables, and the other processes of a job run this file
    let loads = |name: &str| {
        ["OMP_", "MKL_", "KMP_", "ATEN_", "ONEDNN_", "DNNL_", "TORCH_", "LD_", "CUDA_"]
            .map(|start| name.starts_with(start))
            .contains(&true)
    };
    let is_other = arguments[0] != env!("CARGO_BIN_EXE_prsmed")
        || arguments.iter().any(|word| word.starts_with("--gpus"))
        || variables
            .iter()
            .any(|(name, value)| loads(name) && (name != "OMP_NUM_THREADS" || value.as_deref() != Some("1")))
        || [OWN, "WORLD_SIZE"].iter().any(|name| variables.contains_key(*name));
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let output = |name: &str| path(&format!("output-{number}.{name}"));
    let folder = command.get_current_dir()?.to_owned();
    (!is_other).then(|| Job { arguments, variables, folder, stdout: output("out"), stderr: output("err") })
}

/// Runs a command to its end; `None` if it needs a process of its own.
pub(crate) fn run(command: &Command) -> Option<Ran> {
    let job = job(command)?;
    let mut stream = UnixStream::connect(socket()).unwrap();
    stream.write_all(serde_json::to_string(&job).unwrap().as_bytes()).unwrap();
    stream.write_all(b"\n").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    let status: i32 = answer.trim().parse().unwrap_or_else(|_| panic!("no end of {:?}", job.arguments));
    let read = |file: &PathBuf| {
        let text = String::from_utf8(std::fs::read(file).unwrap()).unwrap();
        std::fs::remove_file(file).unwrap();
        text
    };
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    Some(Ran { code, stdout: read(&job.stdout), stderr: read(&job.stderr) })
}

/// The socket of the waiting process, which ends with this one.
fn socket() -> &'static PathBuf {
    // the process ends when its standard input does
    static SERVED: OnceLock<(PathBuf, Child)> = OnceLock::new();
    let (socket, _) = SERVED.get_or_init(|| {
        // the name of a socket has at most 108 bytes
        let socket = std::env::temp_dir().join(format!("prsmed-tests-{}", std::process::id()));
        let _ = std::fs::remove_file(&socket);
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["warm::waiting_process", "--exact", "--ignored", "--nocapture"]).env(SOCKET, &socket);
        process.env("OMP_NUM_THREADS", "1").env("RUST_MIN_STACK", (8 << 20).to_string());
        let process = process.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(start.elapsed() < Duration::from_mins(1), "the waiting process does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        (socket, process)
    });
    socket
}

#[test]
#[ignore = "the other tests start it"]
fn waiting_process() {
    let socket = std::env::var_os(SOCKET).expect("the other tests start it");
    let listener = UnixListener::bind(&socket).unwrap();
    let event = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    loop {
        let mut events = [event(listener.as_raw_fd()), event(0)];
        // SAFETY: waits for a connection, or for the end of the pipe of the process that runs the tests.
        unsafe { libc::poll(events.as_mut_ptr(), 2, -1) };
        if events[1].revents != 0 {
            let _ = std::fs::remove_file(&socket);
            return;
        }
        let (stream, _) = listener.accept().unwrap();
        // SAFETY: the other thread of this process, libtest's, waits for this one and holds no lock.
        if unsafe { libc::fork() } == 0 {
            answer(stream);
        }
        // SAFETY: forgets children that ended.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    }
}

/// In a copy: reads the job, runs it in another copy, and writes how that ended.
fn answer(stream: UnixStream) -> ! {
    let mut line = String::new();
    if BufReader::new(&stream).read_line(&mut line).is_ok() && !line.is_empty() {
        let job: Job = serde_json::from_str(&line).unwrap();
        // SAFETY: this copy has one thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(stream);
            begin(job);
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        let _ = writeln!(&stream, "{status}");
    }
    // SAFETY: ends without the destructors of the process that was copied.
    unsafe { libc::_exit(0) }
}

/// In the copy of a copy: becomes the command.
fn begin(job: Job) -> ! {
    let [stdout, stderr] = [job.stdout, job.stderr].map(|file| File::create(file).unwrap());
    for (descriptor, file) in [File::open("/dev/null").unwrap(), stdout, stderr].into_iter().enumerate() {
        let descriptor = descriptor.try_into().unwrap();
        // SAFETY: both are open.
        assert!(unsafe { libc::dup2(file.as_raw_fd(), descriptor) } == descriptor);
    }
    std::env::set_current_dir(job.folder).unwrap();
    let own = [SOCKET, "RUST_MIN_STACK"].map(|name| (name.to_owned(), None));
    for (name, value) in own.into_iter().chain(job.variables) {
        // SAFETY: this process has one thread.
        unsafe {
            match value {
                Some(value) => std::env::set_var(name, value),
                None => std::env::remove_var(name),
            }
        }
    }
    let code = prsmed::cli::run(job.arguments.into_iter().map(Into::into));
    prsmed::cli::leave(code)
}
