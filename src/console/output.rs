//! Writes to standard output (no other code does): text, or with `--json` one object per line.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::{LazyLock, Mutex, PoisonError};

use regex::{Captures, Regex};
use serde::Serialize;

use crate::error::{Error, Result};

/// Arguments and settings as the library names them: the argument `fold=0/5`, the settings `train.epochs=2 data.workers=1`.
static NAMED: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r"(?:the )?(argument|setting)(s?) `([a-z_]+(?:[=,][^`]*)?|[A-Za-z_.]+=[^`]*)`";
    Regex::new(pattern).expect("a pattern")
});

/// A text of the library in the words of the command line: the argument `fold=0/5` becomes `--fold 0/5`, the setting
/// `train.epochs=2` becomes `--set train.epochs=2`.
fn with_flags(text: &str) -> Cow<'_, str> {
    NAMED.replace_all(text, |found: &Captures| {
        let is_setting = &found[1] == "setting";
        let flag = |part: &str| match part.split_once('=') {
            _ if is_setting => format!("--set {part}"),
            Some((name, value)) => format!("--{} {value}", name.replace('_', "-")),
            None => part.split(", ").map(|name| format!("--{}", name.replace('_', "-"))).collect::<Vec<_>>().join(", "),
        };
        let mut parts = vec![String::new()];
        for word in found[3].split(' ') {
            match parts.last_mut() {
                Some(last) if last.is_empty() => word.clone_into(last),
                Some(last) if found[2].is_empty() || !word.contains('=') => last.extend([" ", word]),
                _ => parts.push(word.to_owned()),
            }
        }
        format!("`{}`", parts.iter().map(|part| flag(part)).collect::<Vec<_>>().join(" "))
    })
}

/// `text` for the terminal: with flags, and with its control characters escaped, except newlines and tabs, because texts
/// from files must not control the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let text = with_flags(text);
    let is_shown = |c: char| !c.is_control() || c == '\n' || c == '\t';
    if text.chars().all(is_shown) {
        return text;
    }
    let escaped = text.chars().map(|c| if is_shown(c) { c.to_string() } else { c.escape_debug().to_string() });
    Cow::Owned(escaped.collect())
}

/// Output of a command's data. Commands call both the text and the record methods; the mode selects one of them.
pub struct DataOutput {
    /// `None` after the reader closed the pipe.
    sink: Mutex<Option<Box<dyn Write + Send>>>,
    is_json: bool,
}

impl DataOutput {
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
        self.write(&format!("{}\n", with_flags(&text)))
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
            let output = DataOutput::to(Box::new(shared.clone()), is_json);
            output.line("Dice 0.9\n").unwrap();
            output.piece("a ").unwrap();
            output.piece("b").unwrap();
            output.record(&serde_json::json!({ "dice": 0.9 })).unwrap();
            assert_eq!(shared.text(), expected);
        }
    }

    #[test]
    fn arguments_and_settings_of_the_library_become_flags() {
        for (text, expected) in [
            ("argument `data_root`: is empty", "`--data-root`: is empty"),
            ("leave the argument `ensemble` out", "leave `--ensemble` out"),
            ("choose with the argument `labels=1=liver,2=tumour`", "choose with `--labels 1=liver,2=tumour`"),
            ("the argument `question=\"Where is it?\"`", "`--question \"Where is it?\"`"),
            ("argument `axis, every`: leave these arguments out", "`--axis, --every`: leave these arguments out"),
            ("the arguments `gpu=\"RTX 4090\" gpus=2`", "`--gpu \"RTX 4090\" --gpus 2`"),
            ("add the setting `train.graph=off`", "add `--set train.graph=off`"),
            ("the settings `a.b=1 c.d=2`", "`--set a.b=1 --set c.d=2`"),
            ("argument `RUN`, the setting `train.graph`, `out`", "argument `RUN`, the setting `train.graph`, `out`"),
        ] {
            assert_eq!(printable(text), expected);
        }
    }

    #[test]
    fn control_characters_are_escaped_on_their_way_to_the_terminal() {
        let shared = Shared::default();
        let output = DataOutput::to(Box::new(shared.clone()), false);
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
        let closed = DataOutput::to(Box::new(Failing(ErrorKind::BrokenPipe)), false);
        closed.line("one").unwrap();
        closed.line("two").unwrap();
        let full = DataOutput::to(Box::new(Failing(ErrorKind::StorageFull)), false);
        assert_eq!(full.line("one").unwrap_err().to_string(), "standard output: cannot write");
    }
}
