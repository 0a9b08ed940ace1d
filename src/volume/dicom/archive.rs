//! Files of a series: one file, the files of a folder, or the entries of a zip.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use zip::ZipArchive;

use super::super::limits::{FREE, MAX_FILE, MAX_RATIO};
use super::super::path::start_of;
use super::structure::is_dicom;
use prsmed_base::error::{Error, Result};
use prsmed_base::files;

/// Most files of a folder or zip.
const MAX_FILES: usize = 20_000;
/// Most bytes of the directory of a zip: names of 200 bytes.
const MAX_DIRECTORY: u64 = 256 * MAX_FILES as u64;
/// Deepest folder below the given one.
const MAX_DEPTH: usize = 8;

/// True for the first bytes of a zip file.
pub(crate) fn is_zip(start: &[u8]) -> bool {
    start.starts_with(b"PK\x03\x04")
}

/// Files that may belong to a series.
pub(super) enum Container {
    Files { paths: Vec<PathBuf>, is_group: bool },
    Zip(Box<Zip>),
}

/// A zip file with the entries to read.
pub(super) struct Zip {
    path: PathBuf,
    archive: ZipArchive<File>,
    entries: Vec<usize>,
    /// Bytes that were decompressed, of all reads.
    total: u64,
    limit: u64,
}

impl Container {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let is_group = path.is_dir();
        if !is_group && is_zip(&start_of(path)?) {
            return Ok(Self::Zip(Box::new(Zip::open(path)?)));
        }
        Ok(Self::Files { paths: if is_group { list(path)? } else { vec![path.into()] }, is_group })
    }

    /// True for a folder or zip.
    pub(super) fn is_group(&self) -> bool {
        !matches!(self, Self::Files { is_group: false, .. })
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Files { paths, .. } => paths.len(),
            Self::Zip(zip) => zip.entries.len(),
        }
    }

    /// A file of a folder.
    pub(super) fn file(&self, index: usize) -> Option<&Path> {
        match self {
            Self::Files { paths, .. } => paths.get(index).map(PathBuf::as_path),
            Self::Zip(_) => None,
        }
    }

    /// Name and content of a file. Of a file that is not a DICOM file, only the start is read.
    pub(super) fn read(&mut self, index: usize) -> Result<(PathBuf, Vec<u8>)> {
        let path = match self {
            Self::Files { paths, .. } => paths[index].clone(),
            Self::Zip(zip) => return zip.read(index),
        };
        let start = start_of(&path)?;
        let bytes =
            if is_dicom(&start) { files::read(&path, MAX_FILE).map_err(Error::io(&path, "read"))? } else { start };
        Ok((path, bytes))
    }
}

/// The regular files of a folder and its subfolders, sorted by path. Links to folders are not followed.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut total) = (Vec::new(), 0_u64);
    let mut folders = vec![(folder.to_path_buf(), 0)];
    while let Some((current, depth)) = folders.pop() {
        for entry in std::fs::read_dir(&current).map_err(Error::io(&current, "read"))? {
            let entry = entry.map_err(Error::io(&current, "read"))?;
            let (path, kind) = (entry.path(), entry.file_type().map_err(Error::io(&current, "read"))?);
            if kind.is_dir() && depth < MAX_DEPTH {
                folders.push((path, depth + 1));
            } else if path.is_file() {
                total += path.metadata().map_err(Error::io(&path, "read"))?.len();
                found.push(path);
            }
            if found.len() > MAX_FILES || total > MAX_FILE {
                let reason = format!("it has more than {MAX_FILES} files or more than {} GiB", MAX_FILE >> 30);
                return Err(Error::data(folder, reason, "give the folder of one series"));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn damaged(path: &Path) -> Error {
    Error::data(path, "it is not a complete zip file, or uses a compression that cannot be read", HINT)
}

const HINT: &str = "copy the file again, or extract it and give the folder";

impl Zip {
    fn open(path: &Path) -> Result<Self> {
        let file = files::open(path).map_err(Error::io(path, "read"))?;
        let size = file.metadata().map_err(Error::io(path, "read"))?.len();
        let mut archive = ZipArchive::new(file).map_err(|_| damaged(path))?;
        if archive.len() > MAX_FILES {
            let reason = format!("it has more than {MAX_FILES} files");
            return Err(Error::data(path, reason, "make a zip of one series"));
        }
        let num_entries = num_entries(path, archive.central_directory_start(), size)?;
        if num_entries != archive.len() {
            let reason = format!("{num_entries} files have {} names", archive.len());
            return Err(Error::data(path, reason, "make a zip in which every file has its own name"));
        }
        let mut entries = Vec::new();
        for index in 0..archive.len() {
            let entry = archive.by_index_raw(index).map_err(|_| damaged(path))?;
            if entry.encrypted() {
                return Err(Error::data(path, "it is encrypted", "extract it with its password and give the folder"));
            }
            if entry.is_file() {
                entries.push((entry.name().to_owned(), index));
            }
        }
        entries.sort();
        let entries = entries.into_iter().map(|(_, index)| index).collect();
        // every entry is read twice: for its header, and for its pixels
        let limit = 2 * size.saturating_mul(MAX_RATIO).clamp(FREE, MAX_FILE);
        Ok(Self { path: path.into(), archive, entries, total: 0, limit })
    }

    fn read(&mut self, index: usize) -> Result<(PathBuf, Vec<u8>)> {
        let mut entry = self.archive.by_index(self.entries[index]).map_err(|_| damaged(&self.path))?;
        // shown in messages
        let name: String = entry.name().chars().filter(|c| !c.is_control()).take(200).collect();
        let mut bytes = Vec::new();
        let left = self.limit - self.total;
        let read = (&mut entry).take(left.saturating_add(1)).read_to_end(&mut bytes);
        let count = read.map_err(|_| damaged(&self.path))? as u64;
        if count > left {
            let reason = format!(
                "its content is more than {} GiB or more than {MAX_RATIO} times as large as the file",
                MAX_FILE >> 30
            );
            return Err(Error::data(&self.path, reason, "extract it, check it, and give the folder of one series"));
        }
        self.total += count;
        Ok((self.path.join(name), bytes))
    }
}

/// Number of files in the directory of a zip file, from `start` on. The reader keeps one of several files with one name.
fn num_entries(path: &Path, start: u64, size: u64) -> Result<usize> {
    const ENTRY: &[u8] = b"PK\x01\x02";
    const HEADER: usize = 46;
    let mut file = files::open(path).map_err(Error::io(path, "read"))?;
    file.seek(SeekFrom::Start(start)).map_err(Error::io(path, "read"))?;
    let mut directory = Vec::new();
    file.take(size.min(MAX_DIRECTORY)).read_to_end(&mut directory).map_err(Error::io(path, "read"))?;
    let (mut at, mut count) = (0, 0);
    while let Some(header) = directory.get(at..at + HEADER).filter(|header| header.starts_with(ENTRY)) {
        let length = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
        // the name, the extra field and the comment follow
        at += HEADER + length(28) + length(30) + length(32);
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use zip::write::SimpleFileOptions;

    fn zip(path: &Path, entries: &[(&str, &[u8])]) {
        let mut writer = zip::ZipWriter::new(File::create(path).expect("a file"));
        for (name, bytes) in entries {
            writer.start_file(*name, SimpleFileOptions::default()).expect("an entry");
            writer.write_all(bytes).expect("content");
        }
        writer.finish().expect("an archive");
    }

    #[test]
    fn a_bomb_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bomb.zip");
        // 2 x 100 MB of zeros in about 200 kB
        let zeros = vec![0; 100_000_000];
        zip(&path, &[("a.dcm", &zeros), ("b.dcm", &zeros)]);
        let mut container = Container::open(&path).unwrap();
        assert_eq!(container.len(), 2);
        let error = (0..2).find_map(|index| container.read(index).err()).expect("too much").to_string();
        assert!(error.contains("200 times as large"), "{error}");
    }

    /// The writer refuses equal names, so they are patched in.
    #[test]
    fn files_with_equal_names_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.zip");
        for (names, expected) in [
            (["a1", "a2", "a3"], "3 files have 1 names"),
            (["a1", "a1b", "a2"], "3 files have 2 names"),
            (["x/a1", "x/a2", "y/a2"], "3 files have 2 names"),
        ] {
            zip(&path, &names.map(|name| (name, name.as_bytes())));
            assert_eq!(Container::open(&path).unwrap().len(), 3);
            let mut bytes = std::fs::read(&path).unwrap();
            let places: Vec<usize> =
                (0..bytes.len() - 1).filter(|at| matches!(&bytes[*at..*at + 2], b"a2" | b"a3")).collect();
            for at in places {
                bytes[at + 1] = b'1';
            }
            std::fs::write(&path, bytes).unwrap();
            let Err(error) = Container::open(&path) else { panic!("{names:?}") };
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn entries_are_sorted_and_damaged_archives_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.zip");
        zip(&path, &[("b", b"2"), ("a/c", b"1")]);
        let mut container = Container::open(&path).unwrap();
        assert!(container.is_group());
        assert_eq!(container.read(0).unwrap(), (path.join("a/c"), b"1".to_vec()));
        assert_eq!(container.read(1).unwrap(), (path.join("b"), b"2".to_vec()));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 10]).unwrap();
        let Err(error) = Container::open(&path) else { panic!("a truncated zip was opened") };
        assert!(error.to_string().contains("not a complete zip"), "{error}");
    }
}
