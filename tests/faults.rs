//! A part of `scripts/fault-test`: a crash, a power loss or a failed system call at some of the calls with which
//! commands change files. The script alone tests all calls.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::path::Path;
use std::process::{Command, Output};

fn fault_test(name: &str, arguments: &[&str]) -> Output {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&out);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/fault-test");
    let mut command = Command::new("python3");
    command.arg(script).args(arguments).env("PRSMED", env!("CARGO_BIN_EXE_prsmed")).env("OUT", out);
    command.output().expect("python3 runs")
}

#[test]
fn runs_continue_after_a_crash_a_power_loss_and_a_failed_call() {
    let output = fault_test("faults", &["--scenario", "train", "--every", "250"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn missing_syncs_are_found() {
    let output = fault_test("faults-without-sync", &["--scenario", "hub", "--every", "24", "--no-sync"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && text.contains("FAILED power loss, names kept"), "{text}");
}
