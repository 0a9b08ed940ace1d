//! Starts the processes of a job on this machine, as `torchrun` does, and waits for them.

use super::variables::{JOB_KEY, STORE_FD};
use prsmed_base::{Error, Result};
use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time in which the other processes end after one has failed.
const GRACE: Duration = Duration::from_secs(20);

/// Processes that have all ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Exit code of the first one that failed, else 0. Of a signal: 128 and its number.
    pub code: u8,
    /// For the user: what is known of a process that a signal has ended.
    pub cause: Option<String>,
}

/// Starts `count` processes with the program and the arguments of this one, and waits for them. With `shares_cores` each
/// gets as many threads as its part of the cores. Once `interrupt` is set, they are asked to stop.
///
/// # Errors
/// [`Error::Io`] if a process cannot be started; [`Error::Config`] in a process of a job.
pub fn launch(count: usize, shares_cores: bool, interrupt: &AtomicBool) -> Result<Ended> {
    if std::env::var_os("RANK").is_some() {
        // a process that a job started would start the same processes again, without an end
        let hint = "unset `RANK`, or start all processes with `torchrun`";
        return Err(Error::argument("gpus", "this process belongs to a job already, by the variable `RANK`", hint));
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
        if shares_cores {
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
    wait_for(children, interrupt).map_err(Error::io(&program, "wait for"))
}

/// Waits for all `children`; passes a request to stop on to them, and ends them after one has failed.
fn wait_for(children: Vec<Child>, interrupt: &AtomicBool) -> std::io::Result<Ended> {
    let (mut code, mut failed_at, mut passed_on) = (0, None, false);
    let (mut cause, mut has_killed) = (None, false);
    let mut children: Vec<(usize, Child)> = children.into_iter().enumerate().collect();
    while !children.is_empty() {
        std::thread::sleep(Duration::from_millis(50));
        if interrupt.load(Ordering::SeqCst) && !passed_on {
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
    Ok(Ended { code, cause })
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
