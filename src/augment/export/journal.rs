//! Append-only journal of pairs: one JSON object per line. A crash loses at most the line that is being written.
//!
//! A line is complete when it ends with a newline and contains no zero bytes, which a power loss may leave in place of
//! text. Each line is written with one call, flushed and synced before the next pair starts. When a journal is opened,
//! an incomplete last line is cut off. Only one process may write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::record::Record;
use crate::error::{Error, Result};
use crate::files;
use crate::tensor::weights::write_bytes;

/// The journal of a data root.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// All records, in file order.
    pub records: Vec<Record>,
    /// Indices of the pairs that have a record, accepted or rejected.
    pub done: BTreeSet<u64>,
}

impl Journal {
    /// Opens a journal or creates it. An incomplete last line is cut off.
    ///
    /// # Errors
    /// [`Error::Data`] for a complete line that is not a valid record, has a name that is not a file name, or repeats an
    /// index; [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let existed = path.exists();
        let mut file = files::open_to_change(path).map_err(Error::io(path, "open"))?;
        let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
        let complete = complete_len(&bytes);
        if complete < bytes.len() {
            file.set_len(complete as u64).map_err(Error::io(path, "truncate"))?;
            file.sync_all().map_err(Error::io(path, "write"))?;
        }
        file.seek(SeekFrom::Start(complete as u64)).map_err(Error::io(path, "read"))?;
        if !existed && let Some(folder) = path.parent() {
            // The directory entry must survive a crash too.
            let opened = File::open(folder).map_err(Error::io(folder, "open"))?;
            files::sync(&opened).map_err(Error::io(folder, "write"))?;
        }
        let (records, done) = parse(path, &bytes[..complete])?;
        Ok(Self { path: path.to_path_buf(), file, records, done })
    }

    /// Reads the records of an existing journal without changing it. Another process may be writing it.
    ///
    /// # Errors
    /// As [`Self::open`]; [`Error::Data`] when the file does not exist.
    pub fn read(path: &Path) -> Result<Vec<Record>> {
        if !path.exists() {
            let hint = "give a folder that `prsmed augment generate --out` wrote";
            return Err(Error::data(path, "is missing: the folder contains no pairs", hint));
        }
        let bytes = files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?;
        Ok(parse(path, &bytes[..complete_len(&bytes)])?.0)
    }

    /// Number of rejected pairs by the first failed test.
    pub fn rejected(&self) -> BTreeMap<String, usize> {
        let mut rejected = BTreeMap::new();
        for record in self.records.iter().filter(|record| !record.accepted) {
            let first = record.reason.split(' ').next().unwrap_or_default();
            *rejected.entry(first.to_owned()).or_default() += 1;
        }
        rejected
    }

    /// Checks that a record may be appended.
    ///
    /// # Errors
    /// [`Error::Data`] when its index is already recorded, an accepted record has no text or an empty cell, a
    /// rejected record has no reason, or a name is not a valid file name.
    pub fn check(&self, record: &Record) -> Result<()> {
        let bad = |reason: String| Err(Error::data(&self.path, format!("pair {}: {reason}", record.index), ""));
        if self.done.contains(&record.index) {
            return bad("it is already recorded".to_owned());
        }
        if let Err(reason) = check_names(record) {
            return bad(reason);
        }
        if record.accepted && (record.texts.is_empty() || record.texts.iter().any(super::Text::has_empty_cell)) {
            return bad("it has no text, or a text with an empty cell".to_owned());
        }
        if record.accepted != record.reason.is_empty() {
            return bad("a rejected pair needs a reason, and an accepted pair must not have one".to_owned());
        }
        Ok(())
    }

    /// Replaces all lines by `records`, atomically.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn replace(&mut self, records: &[Record]) -> Result<()> {
        let lines: Vec<Vec<u8>> = records.iter().map(|record| self.line(record)).collect::<Result<_>>()?;
        write_bytes(&self.path, &lines.concat())?;
        *self = Self::open(&self.path)?;
        Ok(())
    }

    fn line(&self, record: &Record) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(record).map_err(|error| Error::io(&self.path, "write")(error.into()))?;
        Ok([json.as_slice(), b"\n"].concat())
    }

    /// Appends a record and waits until it is on disk.
    ///
    /// # Errors
    /// As [`Journal::check`]; [`Error::Io`].
    pub fn append(&mut self, record: Record) -> Result<()> {
        self.check(&record)?;
        let line = self.line(&record)?;
        let written = self.file.write_all(&line).and_then(|()| self.file.flush()).and_then(|()| self.file.sync_data());
        written.map_err(Error::io(&self.path, "write"))?;
        self.done.insert(record.index);
        self.records.push(record);
        Ok(())
    }
}

/// Checks that name and class of a record are names of files, so that no path of the pair leaves the data root.
fn check_names(record: &Record) -> Result<(), String> {
    for name in [&record.name, &record.class] {
        let is_odd = |c: char| c.is_control() || matches!(c, '/' | '\\');
        if name.is_empty() || name.starts_with('.') || name.contains(is_odd) {
            return Err(format!("`{}` is not a file name", name.escape_debug()));
        }
    }
    if ["rejected", "annotations", "annotation"].contains(&record.class.to_lowercase().as_str()) {
        return Err(format!("a class cannot be named `{}`", record.class));
    }
    Ok(())
}

/// Number of bytes of the complete lines.
fn complete_len(bytes: &[u8]) -> usize {
    let mut length = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    while let Some(lines) = length.checked_sub(1) {
        let start = bytes[..lines].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        if !bytes[start..lines].contains(&0) {
            break;
        }
        length = start;
    }
    length
}

/// Parses the complete lines into records and the set of their indices.
fn parse(path: &Path, bytes: &[u8]) -> Result<(Vec<Record>, BTreeSet<u64>)> {
    let (mut records, mut done) = (Vec::new(), BTreeSet::new());
    for (line, text) in (1..).zip(bytes.split(|&byte| byte == b'\n')).filter(|(_, text)| !text.is_empty()) {
        let bad = |reason: String| {
            Error::data_line(path, line, reason, "restore the file, or start a new data root in another folder")
        };
        let record: Record =
            serde_json::from_slice(text).map_err(|error| bad(format!("is not a valid record: {error}")))?;
        check_names(&record).map_err(|reason| bad(format!("pair {}: {reason}", record.index)))?;
        if !done.insert(record.index) {
            return Err(bad(format!("pair {} is already recorded", record.index)));
        }
        records.push(record);
    }
    Ok((records, done))
}
