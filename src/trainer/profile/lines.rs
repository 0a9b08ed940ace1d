//! JSON lines file of the memory profile.

use crate::{Error, Result, files};
use serde_json::Value;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(super) struct Lines {
    file: File,
    path: PathBuf,
}

impl Lines {
    /// Opens the file. With `append` it continues after the last complete line, since a crash may leave a partial line.
    pub(super) fn open(path: &Path, append: bool) -> Result<Self> {
        let mut file = files::open_to_change(path).map_err(Error::io(path, "write"))?;
        let keep =
            if append { whole(&files::read(path, files::MAX_TABLE).map_err(Error::io(path, "read"))?) } else { 0 };
        let start = file.set_len(keep).and_then(|()| file.seek(SeekFrom::End(0)));
        start.map_err(Error::io(path, "write"))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Writes one line, without a buffer in this process.
    pub(super) fn write(&mut self, value: &Value) -> Result<()> {
        self.file.write_all(format!("{value}\n").as_bytes()).map_err(Error::io(&self.path, "write"))
    }

    /// Writes one line: the fields of `head`, then those of `body`.
    pub(super) fn write_both(&mut self, head: &Value, body: &impl serde::Serialize) -> Result<()> {
        let mut line = head.clone();
        let body = serde_json::to_value(body).map_err(|error| Error::io(&self.path, "write")(error.into()))?;
        if let (Some(line), Value::Object(body)) = (line.as_object_mut(), body) {
            line.extend(body);
        }
        self.write(&line)
    }
}

/// Number of bytes up to and including the last newline.
fn whole(bytes: &[u8]) -> u64 {
    bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at as u64 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    #[test]
    fn a_link_is_refused_and_its_target_is_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let (path, precious) = (folder.path().join("memory.jsonl"), folder.path().join("thesis.txt"));
        fs::write(&precious, "thesis").unwrap();
        std::os::unix::fs::symlink(&precious, &path).unwrap();
        for append in [false, true] {
            assert!(Lines::open(&path, append).is_err());
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "thesis");
    }

    #[test]
    fn appends_after_the_last_complete_line_or_replaces_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory.jsonl");
        Lines::open(&path, false).unwrap().write_both(&json!({ "kind": "a" }), &json!({ "b": 1 })).unwrap();
        fs::write(&path, fs::read_to_string(&path).unwrap() + "{\"partial\": ").unwrap();
        Lines::open(&path, true).unwrap().write(&json!({ "kind": "c" })).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"kind\":\"a\",\"b\":1}\n{\"kind\":\"c\"}\n");
        Lines::open(&path, false).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
    }

    #[test]
    fn a_file_without_an_end_is_an_error_with_the_path() {
        // Linux opens this file, and cannot seek to its end
        let error = Lines::open(Path::new("/proc/self/comm"), false).unwrap_err();
        assert_eq!(error.to_string(), "/proc/self/comm: cannot write");
    }

    #[test]
    fn a_missing_folder_is_an_error_with_the_path() {
        let error = Lines::open(Path::new("/nowhere/memory.jsonl"), false).unwrap_err();
        assert_eq!(error.to_string(), "/nowhere/memory.jsonl: cannot write");
    }
}
