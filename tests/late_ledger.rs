//! The memory ledger may be installed while other threads compute. It has a process of its own, in which nothing
//! else installs the ledger, and a model answers before it is.

#![expect(clippy::unwrap_used, reason = "a test panics where an application would report")]

use prsmed::prelude::*;
use prsmed::tensor::{self, Kind, Tensor, ledger};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[path = "../examples/predict.rs"]
#[expect(dead_code, reason = "its `main` is not called")]
mod predict;

const THREADS: usize = 8;

/// A convolution that oneDNN computes.
fn convolution() -> impl Fn() -> Tensor + Send {
    let numbers = |count: i64| (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin();
    let (image, weights) = (numbers(2 * 16 * 33 * 33).view([2, 16, 33, 33]), numbers(24 * 16 * 9).view([24, 16, 3, 3]));
    move || image.conv2d(&weights, None::<Tensor>, 1, 1, 1, 1)
}

/// What a program that uses the library may have set for itself: signals, environment, precision.
fn process() -> (String, Vec<(String, String)>, bool, bool) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let signals: Vec<&str> = status.lines().filter(|line| line.starts_with("Sig")).collect();
    (signals.join(" "), std::env::vars().collect(), tensor::is_ieee_fp32(), tensor::is_deterministic())
}

/// A guest opens a model and asks it without any change to the process.
fn answer_as_guest() {
    let (folder, runtime) = (tempfile::tempdir().unwrap(), Runtime::guest().on(Device::Cpu));
    let (run, image, question) = predict::tiny_run(folder.path(), &runtime).unwrap();
    let before = process();
    let model = Model::open(run, &OpenOptions::default(), &runtime).unwrap();
    let prediction = model.predict(&Image::File(image), &Ask::new(&question)).unwrap();
    assert_eq!(prediction.size, (64, 64));
    assert_eq!(process(), before);
    // no allocation was counted
    assert!(ledger::usage().categories.iter().all(|category| category.own_peak.0 == 0));
}

/// oneDNN asks for scratch memory from the allocator of that moment and returns it to the one of a later moment.
#[test]
fn the_ledger_may_be_installed_while_threads_compute() {
    answer_as_guest();
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
