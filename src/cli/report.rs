//! The end of a command: its exit code, and its error on standard error.

use std::io::{self, Write};

use crate::console::printable;
use crate::error::Error;

const RED: u8 = 31;
const YELLOW: u8 = 33;
const CYAN: u8 = 36;

/// How a command ended that ran to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandEnd {
    /// The command succeeded.
    Done,
    /// The command ran and the answer is no: bad rows found, does not fit.
    No,
    /// The processes that the command started ended with this code.
    Ended(u8),
}

/// How a command ended, or why it could not run.
pub type CommandResult = anyhow::Result<CommandEnd>;

/// The exit code after an interrupt.
pub const INTERRUPTED: u8 = 130;

/// The exit code: 0 done, 1 the answer is no, 2 could not run, 130 interrupted.
pub fn exit_code(result: &CommandResult) -> u8 {
    match result {
        Ok(CommandEnd::Done) => 0,
        Ok(CommandEnd::No) => 1,
        Ok(CommandEnd::Ended(code)) => *code,
        Err(error) if is_interrupt(error) => INTERRUPTED,
        Err(_) => 2,
    }
}

/// Writes an error with its causes and a hint about what to do next.
///
/// ```text
/// error: cannot train
/// caused by: runs/a/last: cannot write
/// caused by: No space left on device (os error 28)
/// hint: free some space on that disk and run the same command again; finished work is kept
/// ```
///
/// # Errors
/// Errors of `out`.
pub fn write_error(out: &mut dyn Write, error: &anyhow::Error, color: bool) -> io::Result<()> {
    if is_interrupt(error) {
        writeln!(out, "{}", label("interrupted", YELLOW, color))?;
    } else {
        let mut written = error.to_string();
        writeln!(out, "{} {}", label("error:", RED, color), printable(&written))?;
        for cause in error.chain().skip(1).map(ToString::to_string) {
            // Some errors include the text of their source.
            if !written.contains(&cause) {
                writeln!(out, "{} {}", label("caused by:", RED, color), printable(&cause))?;
                written = cause;
            }
        }
    }
    match find(error).map(Error::hint).filter(|hint| !hint.is_empty()) {
        Some(hint) => writeln!(out, "{} {}", label("hint:", CYAN, color), printable(&hint)),
        None => Ok(()),
    }
}

/// Writes that the user interrupted the command, and how to go on.
///
/// # Errors
/// Errors of `out`.
pub fn write_interrupt(out: &mut dyn Write, go_on: &str, color: bool) -> io::Result<()> {
    writeln!(out, "{}", label("interrupted", YELLOW, color))?;
    writeln!(out, "{} continue with `{}`", label("hint:", CYAN, color), printable(go_on))
}

fn label(name: &str, code: u8, color: bool) -> String {
    if color { format!("\x1b[1;{code}m{name}\x1b[0m") } else { name.to_owned() }
}

/// Ends the process without the destructors of libtorch's tables, which would needlessly touch 100 MB of memory. All
/// output is flushed before.
pub fn leave(code: u8) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Whether the user interrupted the command.
pub fn is_interrupt(error: &anyhow::Error) -> bool {
    matches!(find(error), Some(Error::Interrupted))
}

/// The library error inside `error`, without context.
pub fn find(error: &anyhow::Error) -> Option<&Error> {
    error.chain().find_map(|cause| cause.downcast_ref::<Error>())
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;
    use crate::shell::command_line;

    fn written(error: &anyhow::Error, color: bool) -> String {
        let mut out = Vec::new();
        write_error(&mut out, error, color).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn an_error_is_written_with_its_causes_and_hint() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = Err::<(), _>(Error::io("runs/a/last", "write")(full)).context("cannot train").unwrap_err();
        assert_eq!(
            written(&error, false),
            "error: cannot train\ncaused by: runs/a/last: cannot write\ncaused by: no storage space\n\
             hint: free some space on that disk and run the same command again; finished work is kept\n"
        );
        assert_eq!(exit_code(&Err(error)), 2);
    }

    #[test]
    fn control_characters_of_an_error_are_escaped() {
        let error = anyhow::Error::from(Error::data("a\x1b[2J.csv", "split `\x07` is unknown", "write \x1bc"));
        assert_eq!(
            written(&error, true),
            "\x1b[1;31merror:\x1b[0m a\\u{1b}[2J.csv: split `\\u{7}` is unknown\n\x1b[1;36mhint:\x1b[0m write \\u{1b}c\n"
        );
    }

    #[test]
    fn an_error_without_a_hint_has_no_hint_line() {
        let error = anyhow::anyhow!("odd");
        assert_eq!(written(&error, false), "error: odd\n");
        assert_eq!(written(&error, true), "\x1b[1;31merror:\x1b[0m odd\n");
    }

    #[test]
    fn a_repeated_cause_is_written_once() {
        let error = anyhow::anyhow!("line 3 is bad").context("bad file: line 3 is bad");
        assert_eq!(written(&error, false), "error: bad file: line 3 is bad\n");
    }

    #[test]
    fn an_interrupt_is_not_written_as_an_error() {
        let error = anyhow::Error::from(Error::Interrupted).context("while training");
        let mut out = Vec::new();
        let words = ["prsmed", "train", "--data-root", "my data", "--set", "train.epochs=3", "--out", "it's"];
        write_interrupt(&mut out, &command_line(words), false).unwrap();
        let text = "interrupted\nhint: continue with `prsmed train --data-root 'my data' --set train.epochs=3 --out 'it'\\''s'`\n";
        assert_eq!(String::from_utf8(out).unwrap(), text);
        assert_eq!(
            written(&error, false),
            "interrupted\nhint: run the same command again to continue; trainings need `--resume`\n"
        );
        assert_eq!(exit_code(&Err(error)), 130);
        assert_eq!((exit_code(&Ok(CommandEnd::Done)), exit_code(&Ok(CommandEnd::No))), (0, 1));
    }
}
