//! The `prsmed` binary.

fn main() {
    let code = prsmed::cli::run(std::env::args_os());
    prsmed::cli::leave(code)
}
