//! Rows that training skips because their image or mask became unreadable after the start.

use prsmed_base::error::{Error, Result};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The unreadable rows of a run. More rows than the limit are an error.
#[derive(Debug)]
pub struct Unreadable {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rows: BTreeSet<usize>,
    messages: Vec<String>,
}

impl Unreadable {
    /// No rows yet; at most `limit` may be added.
    pub fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// Adds `row`, whose files cannot be read because of `error`. A row counts once.
    ///
    /// # Errors
    /// `error` itself, with a hint that names the setting, if `row` is one too many.
    pub fn add(&self, row: usize, error: Error) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.rows.contains(&row) {
            return Ok(());
        }
        if state.rows.len() >= self.limit {
            return Err(too_many(error, state.rows.len()));
        }
        let count = state.rows.len() + 1;
        state.messages.push(format!("{error}; the sample is skipped ({count} of at most {})", self.limit));
        state.rows.insert(row);
        Ok(())
    }

    /// Messages about new rows, each once.
    pub fn take_messages(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).messages)
    }

    /// Number of unreadable rows.
    pub fn count(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).rows.len()
    }
}

fn too_many(error: Error, before: usize) -> Error {
    match error {
        Error::Data { path, line, reason, hint } if before > 0 => {
            let reason =
                format!("{reason}; {before} samples were skipped before, `data.max_bad_samples` allows no more");
            Error::Data { path, line, reason, hint }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_counts_once_and_one_too_many_is_an_error() {
        let unreadable = Unreadable::new(2);
        let error = |line| Error::data_line("ct.csv", line, "2.png is missing", "restore the file");
        for (row, line) in [(7, 9), (3, 5), (7, 9)] {
            unreadable.add(row, error(line)).expect("two rows");
        }
        let expected = [
            "ct.csv:9: 2.png is missing; the sample is skipped (1 of at most 2)",
            "ct.csv:5: 2.png is missing; the sample is skipped (2 of at most 2)",
        ];
        assert_eq!((unreadable.take_messages(), unreadable.count()), (expected.map(str::to_owned).to_vec(), 2));
        assert!(unreadable.take_messages().is_empty(), "each message once");
        let last = unreadable.add(1, error(2)).expect_err("three rows");
        let text = "ct.csv:2: 2.png is missing; 2 samples were skipped before, `data.max_bad_samples` allows no more";
        assert_eq!((last.to_string().as_str(), last.hint().as_str()), (text, "restore the file"));
        let first = Unreadable::new(0).add(1, error(2)).expect_err("none may be skipped");
        assert_eq!(first.to_string(), "ct.csv:2: 2.png is missing");
    }
}
