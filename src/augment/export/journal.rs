//! One JSON object per line and pair, appended so that a crash costs no more than the line being written.
//!
//! A line counts when its line end is there. Each is written with one call, flushed and synced before the next pair is
//! begun; what a crash left of a last line is cut off when the journal is opened again. One process may write.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::record::Record;
use crate::error::{Error, Result};
use crate::tensor::weights::write_bytes;

/// The journal of a data root.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    records: Vec<Record>,
    done: BTreeSet<u64>,
}

impl Journal {
    /// Opens or begins a journal; a last line without its end is cut off.
    ///
    /// # Errors
    /// [`Error::Data`] for a complete line that is no record or repeats an index, [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let existed = path.exists();
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        let mut file = options.open(path).map_err(Error::io(path, "open"))?;
        let bytes = fs::read(path).map_err(Error::io(path, "read"))?;
        let complete = complete_len(&bytes);
        if complete < bytes.len() {
            file.set_len(complete as u64).map_err(Error::io(path, "truncate"))?;
            file.sync_all().map_err(Error::io(path, "write"))?;
        }
        file.seek(SeekFrom::Start(complete as u64)).map_err(Error::io(path, "read"))?;
        if !existed && let Some(folder) = path.parent() {
            // The name itself must survive a crash.
            let opened = File::open(folder).map_err(Error::io(folder, "open"))?;
            opened.sync_all().map_err(Error::io(folder, "write"))?;
        }
        let (records, done) = parse(path, &bytes[..complete])?;
        Ok(Self { path: path.to_path_buf(), file, records, done })
    }

    /// The records of a journal that is there, which another process may be writing: nothing is changed.
    ///
    /// # Errors
    /// As [`Self::open`]; [`Error::Data`] when there is none.
    pub fn read(path: &Path) -> Result<Vec<Record>> {
        if !path.exists() {
            let hint = "give a folder that `prsmed augment generate --out` wrote";
            return Err(Error::data(path, "is not there: the folder holds no pairs", hint));
        }
        let bytes = fs::read(path).map_err(Error::io(path, "read"))?;
        Ok(parse(path, &bytes[..complete_len(&bytes)])?.0)
    }

    /// All records, in the order of the lines.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The indices of the pairs that have a line, accepted or not.
    pub fn done(&self) -> &BTreeSet<u64> {
        &self.done
    }

    /// Whether a record may be appended.
    ///
    /// # Errors
    /// [`Error::Data`] when its index has a line, its texts are none or have an empty cell while it is accepted, it is
    /// rejected without a reason, or a name is not fit for a file.
    pub fn check(&self, record: &Record) -> Result<()> {
        let bad = |reason: String| Err(Error::data(&self.path, format!("pair {}: {reason}", record.index), ""));
        if self.done.contains(&record.index) {
            return bad("it has a line already".to_owned());
        }
        for name in [&record.name, &record.class] {
            if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
                return bad(format!("`{name}` is no name of a file"));
            }
        }
        if ["rejected", "annotations", "annotation"].contains(&record.class.as_str()) {
            return bad(format!("a class cannot be named `{}`", record.class));
        }
        if record.accepted && (record.texts.is_empty() || record.texts.iter().any(super::Text::has_empty_cell)) {
            return bad("it has no text, or one with an empty cell".to_owned());
        }
        if record.accepted != record.reason.is_empty() {
            return bad("a reason belongs to rejected pairs, and to each of them".to_owned());
        }
        Ok(())
    }

    /// Puts `records` in the place of all lines, atomically.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn replace(&mut self, records: &[Record]) -> Result<()> {
        let mut bytes = Vec::new();
        for record in records {
            serde_json::to_writer(&mut bytes, record).map_err(|error| Error::io(&self.path, "write")(error.into()))?;
            bytes.push(b'\n');
        }
        write_bytes(&self.path, &bytes)?;
        *self = Self::open(&self.path)?;
        Ok(())
    }

    /// Appends a record and waits until it is on disk.
    ///
    /// # Errors
    /// As [`Journal::check`]; [`Error::Io`].
    pub fn append(&mut self, record: Record) -> Result<()> {
        self.check(&record)?;
        let failed = |error: std::io::Error| Error::io(&self.path, "write")(error);
        let mut line = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).and_then(|()| self.file.flush()).map_err(failed)?;
        self.file.sync_data().map_err(Error::io(&self.path, "write"))?;
        self.done.insert(record.index);
        self.records.push(record);
        Ok(())
    }
}

/// Length of the lines that have their ends.
fn complete_len(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1)
}

/// The records of complete lines and their indices.
fn parse(path: &Path, bytes: &[u8]) -> Result<(Vec<Record>, BTreeSet<u64>)> {
    let (mut records, mut done) = (Vec::new(), BTreeSet::new());
    for (line, text) in (1..).zip(bytes.split(|&byte| byte == b'\n')).filter(|(_, text)| !text.is_empty()) {
        let bad = |reason: String| {
            Error::data_line(path, line, reason, "restore the file, or begin a new data root in another folder")
        };
        let record: Record = serde_json::from_slice(text).map_err(|error| bad(format!("is no record: {error}")))?;
        if !done.insert(record.index) {
            return Err(bad(format!("the pair {} has a line already", record.index)));
        }
        records.push(record);
    }
    Ok((records, done))
}
