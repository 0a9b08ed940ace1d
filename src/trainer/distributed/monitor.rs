//! Watches the other processes of a job. A process that has failed, has ended or no longer responds ends the job.
//!
//! Each process counts up a number in the store every second, from a thread of its own, and reads the numbers of the
//! others. A process that fails writes its cause into the store first.

use super::Rendezvous;
use super::meeting::named;
use prsmed_base::Result;
use prsmed_tensor::collective::JobStore;
use std::fmt::{Display, Formatter};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two looks at the other processes.
const INTERVAL: Duration = Duration::from_secs(1);
/// A process that does not count for so long does not respond.
pub const SILENCE: Duration = Duration::from_secs(20);
/// How long a process waits for the cause of a lost connection, and the first one until the others have read it.
const CAUSE: Duration = Duration::from_secs(3);

/// Key of the cause of the first failure.
const FAILURE: &str = "failure";

/// The watch of one process, until it is dropped.
#[derive(Debug)]
pub struct Monitor {
    store: Arc<JobStore>,
    rank: usize,
    size: usize,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts to watch the job. `on_failure` gets the cause, once, on another thread; it should end the process, because
    /// operations with the other ranks may wait for a long time.
    ///
    /// # Errors
    /// [`prsmed_base::Error::Torch`] without a connection to the store.
    pub fn start(rendezvous: &Rendezvous, on_failure: impl FnOnce(String) + Send + 'static) -> Result<Self> {
        let open = || JobStore::open(&rendezvous.address, None, rendezvous.timeout, rendezvous.timeout).map(Arc::new);
        let (store, watched) = (open()?, open()?);
        let (rank, size) = (rendezvous.rank, rendezvous.size);
        let (stop, stopped) = channel();
        // on a thread of its own: a look has no end while the process with the store is stopped
        let (report, looks) = channel();
        std::thread::spawn(move || {
            let mut watch = Watch::new(rank, size);
            while report.send(watch.look(&watched)).is_ok() {
                std::thread::sleep(INTERVAL);
            }
        });
        let thread = std::thread::spawn(move || {
            let mut looked = Instant::now();
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                for cause in looks.try_iter() {
                    looked = Instant::now();
                    if let Some(cause) = cause {
                        // the store ends with the first process: the others read the cause before
                        if rank > 0 || stopped.recv_timeout(CAUSE) == Err(RecvTimeoutError::Timeout) {
                            on_failure(cause);
                        }
                        return;
                    }
                }
                if looked.elapsed() > SILENCE {
                    let seconds = SILENCE.as_secs();
                    let cause =
                        format!("the process with the job's store, rank 0, has not responded for {seconds} seconds");
                    return on_failure(cause);
                }
            }
        });
        Ok(Self { store, rank, size, stop: Some(stop), thread: Some(thread) })
    }

    /// Publishes the cause of the failure of this process. The first published cause is kept.
    pub fn fail(&self, cause: &str) {
        if let Ok(1) = self.store.add("failures", 1) {
            // without a store no process can read it
            let _ = self.store.set(FAILURE, &format!("rank {}: {cause}", self.rank));
        }
    }

    /// The cause of a connection that broke: the failure of another process, or the processes that no longer count. Waits
    /// a few seconds for it.
    pub fn cause(&self) -> Option<Cause> {
        let before = self.counts();
        if let Ok(cause) = self.store.get(FAILURE, CAUSE) {
            return (!cause.starts_with(&format!("rank {}: ", self.rank))).then_some(Cause::Failure(cause));
        }
        let (Ok(before), Ok(after)) = (before, self.counts()) else {
            // without the store, whose process is the first one
            return (self.rank > 0).then(|| Cause::Lost(vec![0]));
        };
        let stands_still = |rank: &usize| {
            let is_same = *rank != self.rank && before[*rank] == after[*rank];
            is_same && !self.store.has(&ended(*rank)).unwrap_or(true)
        };
        let lost: Vec<usize> = (0..self.size).filter(stands_still).collect();
        (!lost.is_empty()).then_some(Cause::Lost(lost))
    }

    /// The number of each process.
    fn counts(&self) -> Result<Vec<i64>> {
        (0..self.size).map(|rank| self.store.add(&beats(rank), 0)).collect()
    }

    /// After a failure, waits in the first process until the others have read the cause: the store ends with it.
    pub fn outlast_others(&self) {
        if self.rank == 0 {
            std::thread::sleep(CAUSE);
        }
    }
}

/// Why the connection to another process broke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// Another process has failed: its rank and its error.
    Failure(String),
    /// The processes of these ranks no longer count.
    Lost(Vec<usize>),
}

impl Display for Cause {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failure(cause) => write!(f, "another process failed: {cause}"),
            Self::Lost(ranks) => {
                let what = match ranks[..] {
                    // the store ends with the first process, and its failure with it
                    [0] => "its process has failed (see its messages) or has been killed",
                    [_] => "its process has probably been killed",
                    _ => "their processes have probably been killed",
                };
                write!(f, "the connection to process {} broke: {what} (memory, batch system)", named(ranks))
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // the others must not take the silence for a failure
        let _ = self.store.set(&ended(self.rank), "yes");
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn beats(rank: usize) -> String {
    format!("beats/{rank}")
}

fn ended(rank: usize) -> String {
    format!("ended/{rank}")
}

/// What is known of the other processes.
struct Watch {
    rank: usize,
    /// The last number of each process, and when it was new.
    seen: Vec<(i64, Instant)>,
    /// When the store last answered.
    answered: Instant,
}

impl Watch {
    fn new(rank: usize, size: usize) -> Self {
        Self { rank, seen: vec![(0, Instant::now()); size], answered: Instant::now() }
    }

    /// Counts up, and returns the cause if the job has failed.
    fn look(&mut self, store: &JobStore) -> Option<String> {
        match self.look_at(store) {
            Ok(cause) => {
                self.answered = Instant::now();
                cause
            }
            Err(error) => {
                let lost = self.answered.elapsed() > 3 * INTERVAL;
                lost.then(|| format!("the process that started the job's store has ended ({error})"))
            }
        }
    }

    fn look_at(&mut self, store: &JobStore) -> Result<Option<String>> {
        store.add(&beats(self.rank), 1)?;
        if store.has(FAILURE)? {
            return store.get(FAILURE, INTERVAL).map(Some);
        }
        let now = Instant::now();
        for rank in (0..self.seen.len()).filter(|rank| *rank != self.rank) {
            let count = store.add(&beats(rank), 0)?;
            let (before, since) = &mut self.seen[rank];
            if count != *before {
                (*before, *since) = (count, now);
            } else if since.elapsed() > SILENCE {
                if store.has(&ended(rank))? {
                    *since = now;
                    continue;
                }
                let seconds = SILENCE.as_secs();
                return Ok(Some(format!("rank {rank}: its process has not responded for {seconds} seconds")));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prsmed_tensor::collective::StoreAddress;
    use std::sync::mpsc::Receiver;

    fn job(size: usize) -> (JobStore, Vec<Rendezvous>) {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = StoreAddress { host: "127.0.0.1".into(), port, prefix: "job".into() };
        let timeout = Duration::from_secs(20);
        let server = JobStore::open(&address, Some(listener), timeout, timeout).unwrap();
        let rendezvous = |rank| Rendezvous {
            rank,
            size,
            local_rank: rank,
            address: address.clone(),
            is_server: rank == 0,
            listener: None,
            bind: None,
            interface: None,
            timeout,
        };
        (server, (0..size).map(rendezvous).collect())
    }

    fn watched(rendezvous: &Rendezvous) -> (Monitor, Receiver<String>) {
        let (cause, causes) = channel();
        (Monitor::start(rendezvous, move |text| cause.send(text).unwrap()).unwrap(), causes)
    }

    #[test]
    fn the_cause_of_a_failure_reaches_all_others() {
        let (_server, all) = job(3);
        let monitors: Vec<_> = all.iter().map(watched).collect();
        monitors[1].0.fail("no memory");
        monitors[2].0.fail("connection lost");
        for (monitor, causes) in &monitors[..1] {
            assert_eq!(causes.recv_timeout(Duration::from_secs(10)).unwrap(), "rank 1: no memory");
            assert_eq!(monitor.cause().unwrap().to_string(), "another process failed: rank 1: no memory");
        }
        assert_eq!(monitors[1].0.cause(), None, "its own cause is no news");
    }

    #[test]
    fn a_connection_broke_because_a_process_no_longer_counts() {
        let (server, all) = job(4);
        let monitors: Vec<_> = [0, 2].map(|rank| watched(&all[rank])).into();
        // process 1 was killed, process 3 has ended
        server.add(&beats(1), 7).unwrap();
        drop(watched(&all[3]));
        let cause = monitors[0].0.cause().unwrap();
        assert_eq!(cause, Cause::Lost(vec![1]));
        let text = "the connection to process 1 broke: its process has probably been killed (memory, batch system)";
        assert_eq!(cause.to_string(), text);
        monitors[0].0.fail(text);
        let expected = format!("another process failed: rank 0: {text}");
        assert_eq!(monitors[1].0.cause().unwrap().to_string(), expected);
        let many = Cause::Lost((1..20).collect()).to_string();
        let expected = "the connection to process 1, 2, 3, 4, 5, 6, 7, 8 and others broke: their processes have ";
        assert!(many.starts_with(expected), "{many}");
    }

    #[test]
    fn a_connection_broke_with_the_process_of_the_store() {
        let (server, all) = job(2);
        let (monitor, _causes) = watched(&all[1]);
        drop(server);
        let expected = "the connection to process 0 broke: its process has failed (see its messages) or has been killed \
                        (memory, batch system)";
        assert_eq!(monitor.cause().unwrap().to_string(), expected);
    }

    #[test]
    fn silence_is_a_failure_unless_the_process_has_ended() {
        let (server, all) = job(3);
        let mut watch = Watch::new(0, 3);
        assert_eq!(watch.look(&server), None);
        let long_ago = Instant::now().checked_sub(SILENCE + INTERVAL).unwrap();
        watch.seen[1].1 = long_ago;
        assert_eq!(watch.look(&server).as_deref(), Some("rank 1: its process has not responded for 20 seconds"));
        drop(watched(&all[1]));
        assert_eq!(watch.look(&server), None);
        watch.seen[2].1 = long_ago;
        server.add(&beats(2), 1).unwrap();
        assert_eq!(watch.look(&server), None, "it counts");
    }

    #[test]
    fn a_store_that_has_ended_is_a_failure() {
        let (server, all) = job(2);
        let store = JobStore::open(&all[1].address, None, all[1].timeout, all[1].timeout).unwrap();
        let mut watch = Watch::new(1, 2);
        assert_eq!(watch.look(&store), None);
        drop(server);
        watch.answered = Instant::now().checked_sub(4 * INTERVAL).unwrap();
        let cause = watch.look(&store).unwrap();
        assert!(cause.starts_with("the process that started the job's store has ended ("), "{cause}");
    }
}
