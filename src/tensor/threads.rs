//! Number of CPU threads of libtorch's kernels: as many as this process may use, and fewer while other programs need
//! the cores.
//!
//! libtorch's threads wait for each other in a loop that keeps its core busy. Where there are more such threads than
//! cores, each waits for one that does not run: two trainings on two cores stop each other almost entirely. With one
//! thread each, both continue at about the speed of one core.
//!
//! Results depend on the number of threads in their last bits. Only the program adapts it, and only if the user has not
//! set a number (`OMP_NUM_THREADS`); a library's caller must ask for it with [`adapt_to_load`].

use super::{Device, is_deterministic, num_threads, set_num_threads};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time between two looks at the load.
const INTERVAL: Duration = Duration::from_millis(500);
/// Time between two notes.
const BETWEEN_NOTES: Duration = Duration::from_mins(1);
/// Load of other programs that costs no thread, in cores.
const TOLERATED: f64 = 0.25;

static IS_ADAPTIVE: AtomicBool = AtomicBool::new(false);

/// Limits the threads to the cores that the process may use (affinity, quota of its control group), and makes
/// [`Adaptive`] follow the load of the machine. Call it at the start of a process whose user has set no number.
pub fn adapt_to_load() {
    let most = std::thread::available_parallelism().map_or(1, |count| i32::try_from(count.get()).unwrap_or(i32::MAX));
    if i64::try_from(num_threads()).unwrap_or(i64::MAX) > i64::from(most) {
        set_num_threads(most);
    }
    IS_ADAPTIVE.store(true, Ordering::Relaxed);
}

/// Adapts the number of threads during a long job on the CPU. Use it on the thread that computes.
#[derive(Debug)]
pub struct Adaptive {
    /// Threads without load from others; 1 if nothing is adapted.
    most: u64,
    last: Option<(Instant, Times)>,
    noted: Option<Instant>,
}

impl Adaptive {
    /// For a job on `device`. Adapts nothing unless that is the CPU, [`adapt_to_load`] was called, there are several
    /// threads, and the order of sums is free.
    pub fn begin(device: Device) -> Self {
        let is_adaptive = device == Device::Cpu && IS_ADAPTIVE.load(Ordering::Relaxed) && !is_deterministic();
        let most = if is_adaptive { num_threads() } else { 1 };
        Self { most, last: None, noted: None }
    }

    /// Call it between steps. Twice a second it compares the load of the cores with that of this process, and changes
    /// the number of threads. Returns a note for the user, at most once a minute.
    pub fn adapt(&mut self) -> Option<String> {
        if self.most <= 1 || self.last.as_ref().is_some_and(|(at, _)| at.elapsed() < INTERVAL) {
            return None;
        }
        let now = (Instant::now(), Times::read()?);
        let (before, times) = self.last.replace(now)?;
        let others = self.last.as_ref()?.1.others_since(&times, before.elapsed())?;
        let threads = threads_beside(others, self.most);
        if threads == num_threads() {
            return None;
        }
        set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
        if self.noted.is_some_and(|at| at.elapsed() < BETWEEN_NOTES) {
            return None;
        }
        self.noted = Some(Instant::now());
        let reason = format!("other programs use {others:.1} of the CPU's cores");
        Some(format!("{reason}: {threads} of {} threads until they need less", self.most))
    }
}

impl Drop for Adaptive {
    /// Returns to all threads.
    fn drop(&mut self) {
        if self.most > 1 {
            set_num_threads(i32::try_from(self.most).unwrap_or(i32::MAX));
        }
    }
}

/// Threads for a process beside programs that keep `others` cores busy.
fn threads_beside(others: f64, most: u64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
    let taken = (others - TOLERATED).ceil().max(0.0) as u64;
    most.saturating_sub(taken).max(1)
}

/// CPU times since the start of the machine, in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Times {
    /// Of all processes, on the cores that this one may use.
    busy: u64,
    /// Of all processes and of waiting, on these cores.
    all: u64,
    /// Number of these cores.
    cores: u64,
    /// Of this process.
    own: u64,
}

impl Times {
    /// The times now; `None` where the system does not report them.
    fn read() -> Option<Self> {
        let read = |path: &str| std::fs::read_to_string(Path::new(path)).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?, &read("/proc/self/status")?)
    }

    fn parse(stat: &str, own: &str, status: &str) -> Option<Self> {
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        let allowed = ranges(allowed)?;
        let (mut busy, mut all, mut cores) = (0, 0, 0);
        for line in stat.lines() {
            let mut words = line.split_ascii_whitespace();
            let Some(core) = words.next().and_then(|word| word.strip_prefix("cpu")?.parse::<u64>().ok()) else {
                continue;
            };
            if !allowed.iter().any(|(first, last)| (*first..=*last).contains(&core)) {
                continue;
            }
            // user nice system idle iowait irq softirq steal; the others are parts of these
            let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
            let waiting: u64 = ticks.iter().skip(3).take(2).sum();
            let sum: u64 = ticks.iter().sum();
            (busy, all, cores) = (busy + sum - waiting, all + sum, cores + 1);
        }
        // the name of the program, in brackets, may contain spaces
        let own: Vec<&str> = own.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let own = own.get(11)?.parse::<u64>().ok()? + own.get(12)?.parse::<u64>().ok()?;
        (cores > 0).then_some(Self { busy, all, cores, own })
    }

    /// Cores that other processes kept busy in the `elapsed` time since `before`.
    fn others_since(&self, before: &Self, elapsed: Duration) -> Option<f64> {
        let passed = |now: u64, before: u64| now.checked_sub(before).map(|ticks| ticks as f64);
        let (busy, all, own) =
            (passed(self.busy, before.busy)?, passed(self.all, before.all)?, passed(self.own, before.own)?);
        if self.cores != before.cores || all <= 0.0 || elapsed < INTERVAL / 2 {
            return None;
        }
        // ticks of a core in this time
        let one = all / self.cores as f64;
        Some(((busy - own) / one).max(0.0))
    }
}

/// Ranges of a list such as `0-1,4`.
fn ranges(text: &str) -> Option<Vec<(u64, u64)>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
    };
    text.trim().split(',').map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tprsmed\nThreads:\t3\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n";

    fn times(busy: [u64; 3], idle: u64, own: u64) -> Times {
        let cores = busy.iter().enumerate();
        let lines: Vec<String> = cores.map(|(core, busy)| format!("cpu{core} {busy} 0 0 {idle} 0 0 0 0 7 0")).collect();
        let own = format!("12 (a (b) c) R 1 2 3 4 5 6 7 8 9 10 {own} 5 0 0");
        Times::parse(&format!("cpu 9 9 9 9\n{}\nintr 5\n", lines.join("\n")), &own, STATUS).unwrap()
    }

    #[test]
    fn only_allowed_cores_and_own_time_are_counted() {
        assert_eq!(times([10, 20, 4000], 100, 7), Times { busy: 30, all: 230, cores: 2, own: 12 });
        assert_eq!(ranges("0-3,8, 10-11"), Some(vec![(0, 3), (8, 8), (10, 11)]));
        assert_eq!(ranges("all"), None);
        assert_eq!(Times::parse("cpu 1 2 3", "1 (a) R", STATUS), None);
    }

    #[test]
    fn the_load_of_others_is_what_this_process_did_not_use() {
        let (before, second) = (times([0, 0, 0], 0, 0), Duration::from_secs(1));
        let others = |now: Times| now.others_since(&before, second).unwrap();
        assert_eq!(others(times([100, 100, 100], 0, 200)), 0.0, "all of it is ours");
        assert_eq!(others(times([100, 100, 0], 0, 100)), 1.0, "another program like this one");
        assert_eq!(others(times([50, 50, 0], 50, 50)), 0.5);
        assert_eq!(others(times([100, 100, 0], 0, 250)), 0.0, "rounding of ticks");
        assert_eq!(before.others_since(&before, second), None, "no time has passed");
    }

    #[test]
    fn cores_that_others_use_are_left_to_them_but_one_thread_stays() {
        let threads = [0.0, 0.2, 0.3, 1.0, 1.3, 9.0].map(|others| threads_beside(others, 4));
        assert_eq!(threads, [4, 4, 3, 3, 2, 1]);
    }

    #[test]
    fn this_system_reports_its_times() {
        let times = Times::read().unwrap();
        assert!(times.cores >= 1 && times.busy > 0 && times.own <= times.busy, "{times:?}");
    }

    #[test]
    fn nothing_is_adapted_unless_it_was_asked_for() {
        let mut adaptive = Adaptive::begin(Device::Cpu);
        assert_eq!((adaptive.most, adaptive.adapt()), (1, None));
        assert!(adaptive.last.is_none());
    }
}
