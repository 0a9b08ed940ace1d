//! Writes to standard output (no other code does): text, or with `--json` one object per line.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::error::{Error, Result};

/// `text` with its control characters escaped, except newlines and tabs: texts from files must not control the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_shown = |c: char| !c.is_control() || c == '\n' || c == '\t';
    if text.chars().all(is_shown) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().map(|c| if is_shown(c) { c.to_string() } else { c.escape_debug().to_string() });
    Cow::Owned(escaped.collect())
}

/// Output of a command's data. Commands call both the text and the record methods; the mode selects one of them.
pub struct Output {
    /// `None` after the reader closed the pipe.
    sink: Mutex<Option<Box<dyn Write + Send>>>,
    is_json: bool,
}

impl Output {
    /// Standard output.
    pub fn stdout(is_json: bool) -> Self {
        Self::to(Box::new(std::io::stdout()), is_json)
    }

    /// No output: for a process whose output is that of another one.
    pub fn none() -> Self {
        Self { sink: Mutex::new(None), is_json: false }
    }

    /// Any writer.
    pub fn to(sink: Box<dyn Write + Send>, is_json: bool) -> Self {
        Self { sink: Mutex::new(Some(sink)), is_json }
    }

    /// Whether the mode is `--json`.
    pub fn is_json(&self) -> bool {
        self.is_json
    }

    /// Writes one or more lines of text; nothing with `--json`.
    ///
    /// # Errors
    /// [`Error::Io`], but not if the reader closed the pipe: then the command continues without output.
    pub fn line(&self, text: impl Display) -> Result<()> {
        let text = text.to_string();
        if self.is_json { Ok(()) } else { self.write(&format!("{}\n", printable(text.trim_end_matches('\n')))) }
    }

    /// Writes a part of a line and flushes it; nothing with `--json`.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn piece(&self, text: &str) -> Result<()> {
        if self.is_json { Ok(()) } else { self.write(&printable(text)) }
    }

    /// Writes one object as one line; nothing without `--json`.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn record(&self, value: &impl Serialize) -> Result<()> {
        if !self.is_json {
            return Ok(());
        }
        let text = serde_json::to_string(value).map_err(|error| Error::io("standard output", "write")(error.into()))?;
        self.write(&(text + "\n"))
    }

    fn write(&self, text: &str) -> Result<()> {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(writer) = sink.as_mut() else { return Ok(()) };
        match writer.write_all(text.as_bytes()).and_then(|()| writer.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                *sink = None;
                Ok(())
            }
            result => result.map_err(Error::io("standard output", "write")),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;

    /// A writer that keeps its text.
    #[derive(Clone, Default)]
    pub(in crate::console) struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Shared {
        pub(in crate::console) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Shared {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(data);
            Ok(data.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn text_or_json_is_written_depending_on_the_mode() {
        for (is_json, expected) in [(false, "Dice 0.9\na b"), (true, "{\"dice\":0.9}\n")] {
            let shared = Shared::default();
            let output = Output::to(Box::new(shared.clone()), is_json);
            output.line("Dice 0.9\n").unwrap();
            output.piece("a ").unwrap();
            output.piece("b").unwrap();
            output.record(&serde_json::json!({ "dice": 0.9 })).unwrap();
            assert_eq!(shared.text(), expected);
        }
    }

    #[test]
    fn control_characters_are_escaped_on_their_way_to_the_terminal() {
        let shared = Shared::default();
        let output = Output::to(Box::new(shared.clone()), false);
        output.line("one\n\x1b]0;owned\x07\ttwo\r\u{9b}1m").unwrap();
        output.piece("\x1b[2J").unwrap();
        assert_eq!(shared.text(), "one\n\\u{1b}]0;owned\\u{7}\ttwo\\r\\u{9b}1m\n\\u{1b}[2J");
        assert_eq!(printable("Ärzte 医"), "Ärzte 医");
    }

    #[test]
    fn a_closed_pipe_is_not_an_error_but_a_full_disk_is() {
        struct Failing(ErrorKind);
        impl Write for Failing {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(self.0.into())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let closed = Output::to(Box::new(Failing(ErrorKind::BrokenPipe)), false);
        closed.line("one").unwrap();
        closed.line("two").unwrap();
        let full = Output::to(Box::new(Failing(ErrorKind::StorageFull)), false);
        assert_eq!(full.line("one").unwrap_err().to_string(), "standard output: cannot write");
    }
}
