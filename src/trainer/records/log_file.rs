//! A file to which records are appended. While the disk is full, records wait in memory.

use prsmed_base::error::{Error, Result};
use prsmed_base::files;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

/// Limit of the records that wait for room on the disk, in bytes: about 100 000 steps.
const MAX_WAITING: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct LogFile {
    file: File,
    path: PathBuf,
    /// Bytes of complete records in the file.
    length: u64,
    waiting: Vec<u8>,
}

impl LogFile {
    /// Appends to the end of `file`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn new(file: File, path: PathBuf) -> Result<Self> {
        let length = file.metadata().map_err(Error::io(&path, "read"))?.len();
        Ok(Self { file, path, length, waiting: Vec::new() })
    }

    /// Appends a record; returns `false` if the disk is full and the record waits.
    ///
    /// # Errors
    /// [`Error::Io`]; also for a full disk when too many records wait.
    pub(crate) fn append(&mut self, record: &[u8]) -> Result<bool> {
        self.waiting.extend_from_slice(record);
        match self.flush() {
            Err(error) if error.is_disk_full() && self.waiting.len() <= MAX_WAITING => Ok(false),
            outcome => outcome.map(|()| true),
        }
    }

    /// Writes the waiting records.
    ///
    /// # Errors
    /// [`Error::Io`]. The file then ends with a complete record.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        // one write: after a crash at most the last record is partial
        let end = SeekFrom::Start(self.length);
        let written = self.file.seek(end).and_then(|_| self.file.write_all(&self.waiting));
        if written.is_err() {
            // a partial record remains if this fails too; a resumed run removes it
            let _ = self.file.set_len(self.length);
        }
        written.map_err(Error::io(&self.path, "write"))?;
        self.length += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }

    /// Waits until all records are on disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.flush()?;
        files::sync(&self.file).map_err(Error::io(&self.path, "write"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_wait_while_the_disk_is_full_and_are_written_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let open = || File::options().create(true).append(false).write(true).truncate(false).open(&path).unwrap();
        let mut log = LogFile::new(open(), path.clone()).unwrap();
        assert!(log.append(b"one\n").unwrap());
        let file = std::mem::replace(&mut log.file, File::options().write(true).open("/dev/full").unwrap());
        assert!(!log.append(b"two\n").unwrap());
        assert!(!log.append(b"three\n").unwrap());
        assert!(log.sync().unwrap_err().is_disk_full());
        log.file = file;
        // what a failed write has left of a record
        std::fs::write(&path, "one\ntw").unwrap();
        assert!(log.append(b"four\n").unwrap());
        log.sync().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\nfour\n");
    }
}
