//! The `prsmed` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(prsmed::cli::run(std::env::args_os()))
}
