//! The `prsmed` binary: parses the command line, runs the command and exits with its code.

fn main() {
    let code = prsmed::cli::run(std::env::args_os());
    prsmed::cli::leave(code)
}
