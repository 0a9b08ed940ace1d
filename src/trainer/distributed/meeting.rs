//! How the processes of a job find each other: the server of the store, and who has not come.

use prsmed_base::{Error, Result};
use prsmed_tensor::collective::{JobStore, StoreAddress};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How the processes of a job find each other: the variables of `torchrun`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// Number of this process among all, from 0.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Number of this process among those of its machine, which chooses its GPU.
    pub local_rank: usize,
    /// The store's server.
    pub address: StoreAddress,
    /// True if this process starts the server.
    pub is_server: bool,
    /// The server's listening socket, if the launcher has opened it; used once.
    pub listener: Option<RawFd>,
    /// Address on which the server listens; `None` is that of the store.
    pub bind: Option<IpAddr>,
    /// Network interface of Gloo; `None` takes that of the host name.
    pub interface: Option<String>,
    /// Longest time in which a collective operation waits for the other ranks.
    pub timeout: Duration,
}

/// What is waited for is said after so long, and again each time.
const PATIENCE: Duration = Duration::from_mins(1);
/// After so long this process no longer waits for the others.
const LIMIT: Duration = Duration::from_mins(10);
/// Time between two looks at who has come.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time between two looks at a request to stop.
const STEP: Duration = Duration::from_millis(100);
/// Most processes that are named.
const NAMED: usize = 8;

/// The store of the job, when all processes have come. `on_wait` gets what is waited for, once a minute.
///
/// # Errors
/// [`Error::Config`] for an address that cannot be used, a rank that two processes have, and processes that do not come;
/// [`Error::Interrupted`] as soon as `interrupt` is true.
pub(super) fn meet(rendezvous: &Rendezvous, interrupt: &AtomicBool, on_wait: &dyn Fn(String)) -> Result<JobStore> {
    meet_within(rendezvous, interrupt, on_wait, (PATIENCE, LIMIT))
}

fn meet_within(
    rendezvous: &Rendezvous,
    interrupt: &AtomicBool,
    on_wait: &dyn Fn(String),
    (patience, limit): (Duration, Duration),
) -> Result<JobStore> {
    let listener = rendezvous.is_server.then(|| listen(rendezvous)).transpose()?;
    let (host, port) = (&rendezvous.address.host, rendezvous.address.port);
    let waiting = format!("process 0 does not answer at `{host}`, port {port}");
    let waits_for = Arc::new(Mutex::new(waiting));
    let (sender, receiver) = channel();
    // on a thread of its own, because a server of somebody else may keep it for ever
    let (own, waits) = (rendezvous.clone(), Arc::clone(&waits_for));
    std::thread::spawn(move || drop(sender.send(arrive(&own, listener, limit, &waits))));
    let begin = Instant::now();
    let mut said = begin;
    loop {
        let waits_for = || waits_for.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match receiver.recv_timeout(STEP) {
            Ok(store) => return store,
            Err(_) if interrupt.load(Ordering::SeqCst) => return Err(Error::Interrupted),
            Err(RecvTimeoutError::Timeout) if begin.elapsed() < limit => {
                if said.elapsed() >= patience {
                    said = Instant::now();
                    on_wait(format!("{}; waiting for {} s", waits_for(), begin.elapsed().as_secs()));
                }
            }
            Err(_) => {
                let reason = format!("{} after {} s", waits_for(), begin.elapsed().as_secs());
                return Err(Error::config("MASTER_ADDR", reason, HINT));
            }
        }
    }
}

const HINT: &str = "start all processes with the same MASTER_ADDR, MASTER_PORT, WORLD_SIZE and PRSMED_JOB_KEY, each with \
                    its own RANK, and let the firewall pass connections to MASTER_ADDR";

/// Connects to the store, and waits until every rank has done so.
fn arrive(
    rendezvous: &Rendezvous,
    listener: Option<TcpListener>,
    limit: Duration,
    waits_for: &Mutex<String>,
) -> Result<JobStore> {
    let Rendezvous { rank, size, address, timeout, .. } = rendezvous;
    let store = JobStore::open(address, listener, limit, *timeout)?;
    if store.add(&here(*rank), 1)? > 1 {
        let reason = format!("two processes of the job have rank {rank}");
        return Err(Error::config("RANK", reason, "give each process its own RANK, from 0 to WORLD_SIZE - 1"));
    }
    store.add("come", 1)?;
    let size = i64::try_from(*size).unwrap_or(i64::MAX);
    let mut looked = None::<Instant>;
    loop {
        let come = store.add("come", 0)?;
        if come >= size {
            return Ok(store);
        }
        if looked.is_none_or(|at| at.elapsed() > Duration::from_secs(1)) {
            looked = Some(Instant::now());
            let mut missing = Vec::new();
            for rank in 0..rendezvous.size {
                if missing.len() <= NAMED && !store.has(&here(rank))? {
                    missing.push(rank);
                }
            }
            let text = format!("{} of {size} processes have not come: rank {}", size - come, named(&missing));
            *waits_for.lock().unwrap_or_else(PoisonError::into_inner) = text;
        }
        std::thread::sleep(INTERVAL);
    }
}

/// The first of these ranks in words.
pub(super) fn named(ranks: &[usize]) -> String {
    let named: Vec<String> = ranks.iter().take(NAMED).map(ToString::to_string).collect();
    named.join(", ") + if ranks.len() > NAMED { " and others" } else { "" }
}

fn here(rank: usize) -> String {
    format!("here/{rank}")
}

/// The listening socket of the store's server: that of the launcher, or one at the address of the job only.
fn listen(rendezvous: &Rendezvous) -> Result<TcpListener> {
    let (host, port) = (rendezvous.address.host.as_str(), rendezvous.address.port);
    if let Some(descriptor) = rendezvous.listener {
        // SAFETY: the launcher gave this process the descriptor, and it is used once.
        let listener = unsafe { TcpListener::from_raw_fd(descriptor) };
        return match listener.local_addr() {
            Ok(address) if address.port() == port => Ok(listener),
            _ => {
                std::mem::forget(listener);
                let reason = format!("descriptor {descriptor} is not a socket at port {port}");
                Err(Error::config("PRSMED_STORE_FD", reason, "unset it; only the argument `gpus` sets it"))
            }
        };
    }
    let addresses = match rendezvous.bind {
        Some(address) => vec![SocketAddr::new(address, port)],
        None => addresses_of(host, port)?,
    };
    TcpListener::bind(&addresses[..]).map_err(|error| {
        let shown: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
        let shown = shown.join(", ");
        match error.kind() {
            ErrorKind::AddrInUse => {
                let hint = "choose another MASTER_PORT for all processes, or end the program that has this one";
                Error::config("MASTER_PORT", format!("port {port} of {shown} is taken"), hint)
            }
            ErrorKind::AddrNotAvailable => {
                let reason = format!("`{host}` ({shown}) is not an address of this machine, which has process 0");
                let hint = "set it to an address of this machine. If connections to it are passed on to this machine, set \
                            PRSMED_STORE_ADDR to the address to listen on";
                Error::config("MASTER_ADDR", reason, hint)
            }
            _ => Error::config("MASTER_ADDR", format!("cannot listen on {shown}, port {port}: {error}"), HINT),
        }
    })
}

/// The addresses of the machine `host`, on which it listens.
fn addresses_of(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let found = (host, port).to_socket_addrs().map_err(|error| {
        let hint = "set it to the name or the address of the machine of process 0";
        Error::config("MASTER_ADDR", format!("the address of `{host}` is not known: {error}"), hint)
    })?;
    let found: Vec<SocketAddr> = found.collect();
    let is_own = host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok();
    if !is_own && found.iter().all(|address| address.ip().is_loopback()) {
        // a machine may know its own name as 127.0.1.1, and the others connect to another address
        return Ok(vec![SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)]);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prsmed_tensor::collective::StoreAddress;
    use std::os::fd::IntoRawFd;

    fn rendezvous(rank: usize, size: usize, port: u16) -> Rendezvous {
        Rendezvous {
            rank,
            size,
            local_rank: rank,
            address: StoreAddress { host: "127.0.0.1".into(), port, prefix: "job".into() },
            is_server: rank == 0,
            listener: None,
            bind: None,
            interface: None,
            timeout: Duration::from_secs(20),
        }
    }

    fn free() -> TcpListener {
        TcpListener::bind(("127.0.0.1", 0)).unwrap()
    }

    fn port_of(listener: &TcpListener) -> u16 {
        listener.local_addr().unwrap().port()
    }

    const SHORT: (Duration, Duration) = (Duration::from_millis(1500), Duration::from_millis(3100));

    fn meet_soon(rendezvous: &Rendezvous, on_wait: &dyn Fn(String)) -> Result<JobStore> {
        meet_within(rendezvous, &AtomicBool::new(false), on_wait, SHORT)
    }

    #[test]
    fn an_interrupt_ends_the_wait_for_the_others() {
        let interrupt = AtomicBool::new(false);
        let port = port_of(&free());
        let begin = Instant::now();
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                interrupt.store(true, Ordering::SeqCst);
            });
            meet(&rendezvous(0, 2, port), &interrupt, &|_| {})
        });
        assert!(matches!(ended, Err(Error::Interrupted)), "{ended:?}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }

    #[test]
    fn jobs_with_other_keys_never_meet() {
        let port = port_of(&free());
        let with_key = |rank: usize, key: &str| {
            let mut own = rendezvous(rank, 2, port);
            own.address.prefix = format!("prsmed/0/{key}");
            own
        };
        let (first, second) = (with_key(0, "one"), with_key(1, "other"));
        let other = std::thread::spawn(move || meet_soon(&second, &|_| {}).unwrap_err());
        let errors = [meet_soon(&first, &|_| {}).unwrap_err(), other.join().unwrap()];
        for (error, missing) in errors.iter().zip(["rank 1", "rank 0"]) {
            let expected = format!("`MASTER_ADDR`: 1 of 2 processes have not come: {missing} after 3 s");
            assert_eq!(error.to_string(), expected);
            assert!(error.hint().contains("the same MASTER_ADDR, MASTER_PORT, WORLD_SIZE and PRSMED_JOB_KEY"));
        }
    }

    #[test]
    fn a_process_that_does_not_come_is_named() {
        let port = port_of(&free());
        let told = Mutex::new(Vec::new());
        let second = std::thread::spawn(move || meet_soon(&rendezvous(2, 4, port), &|_| {}).err());
        let on_wait = |text: String| told.lock().unwrap().push(text);
        let error = meet_soon(&rendezvous(0, 4, port), &on_wait).unwrap_err().to_string();
        assert!(error.contains("2 of 4 processes have not come: rank 1, 3 after 3 s"), "{error}");
        let told = told.into_inner().unwrap();
        assert!(told[0].starts_with("2 of 4 processes have not come: rank 1, 3; waiting for 1 s"), "{told:?}");
        second.join().unwrap().unwrap();
    }

    #[test]
    fn all_meet_at_the_socket_of_the_launcher_and_a_second_rank_is_refused() {
        let listener = free();
        let port = port_of(&listener);
        let first = Rendezvous { listener: Some(listener.into_raw_fd()), ..rendezvous(0, 2, port) };
        let other = std::thread::spawn(move || meet_soon(&rendezvous(1, 2, port), &|_| {}).unwrap());
        let store = meet_soon(&first, &|_| {}).unwrap();
        other.join().unwrap();
        let twice = meet_soon(&rendezvous(1, 2, port), &|_| {}).unwrap_err();
        assert_eq!(twice.to_string(), "`RANK`: two processes of the job have rank 1");
        drop(store);
        let pipe = Rendezvous { listener: Some(0), ..rendezvous(0, 2, port) };
        assert!(meet_soon(&pipe, &|_| {}).unwrap_err().to_string().contains("is not a socket"));
    }

    #[test]
    fn a_stranger_at_the_port_is_no_process_of_the_job() {
        let stranger = free();
        let port = port_of(&stranger);
        let taken = meet_soon(&rendezvous(0, 2, port), &|_| {}).unwrap_err();
        assert_eq!(taken.to_string(), format!("`MASTER_PORT`: port {port} of 127.0.0.1 is taken"));
        let silent = meet_soon(&rendezvous(1, 2, port), &|_| {}).unwrap_err().to_string();
        assert!(
            silent.contains(&format!("process 0 does not answer at `127.0.0.1`, port {port} after 3 s")),
            "{silent}"
        );
    }

    #[test]
    fn the_server_listens_at_the_address_of_the_job_only() {
        let port = port_of(&free());
        let bound = listen(&rendezvous(0, 2, port)).unwrap();
        assert_eq!(bound.local_addr().unwrap().ip().to_string(), "127.0.0.1");
        let elsewhere = |host: &str| {
            let mut elsewhere = rendezvous(0, 2, 1);
            elsewhere.address.host = host.into();
            listen(&elsewhere).unwrap_err().to_string()
        };
        assert!(elsewhere("192.0.2.7").contains("`192.0.2.7` (192.0.2.7) is not an address of this machine"));
        assert!(elsewhere("no-such-host.invalid").contains("the address of `no-such-host.invalid` is not known"));
        assert!(addresses_of("localhost", 1).unwrap().iter().all(|address| address.ip().is_loopback()));
    }
}
