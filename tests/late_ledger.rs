//! The memory ledger may be installed while other threads compute. It has a process of its own, in which nothing
//! else installs the ledger.

use prsmed::tensor::{Device, Kind, Tensor, ledger};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const THREADS: usize = 8;

/// A convolution that oneDNN computes.
fn convolution() -> impl Fn() -> Tensor + Send {
    let numbers = |count: i64| (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin();
    let (image, weights) = (numbers(2 * 16 * 33 * 33).view([2, 16, 33, 33]), numbers(24 * 16 * 9).view([24, 16, 3, 3]));
    move || image.conv2d(&weights, None::<Tensor>, 1, 1, 1, 1)
}

/// oneDNN asks for scratch memory from the allocator of that moment and returns it to the one of a later moment.
#[test]
fn the_ledger_may_be_installed_while_threads_compute() {
    let (rounds, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let wait_for = |count: usize| {
        let start = Instant::now();
        while rounds.load(Ordering::SeqCst) < count {
            assert!(start.elapsed() < Duration::from_mins(1), "the threads stand still");
            thread::sleep(Duration::from_millis(1));
        }
    };
    thread::scope(|scope| {
        let work = || {
            let compute = convolution();
            let expected = compute();
            while !stop.load(Ordering::SeqCst) {
                assert!(compute().allclose(&expected, 1e-5, 1e-6, false));
                rounds.fetch_add(1, Ordering::SeqCst);
            }
        };
        let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        wait_for(100);
        ledger::install();
        wait_for(rounds.load(Ordering::SeqCst) + 100);
        stop.store(true, Ordering::SeqCst);
        for worker in workers {
            worker.join().unwrap();
        }
    });
}
