//! Writes files into a data root without changing those that exist.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::options::PrepareOptions;
use crate::manifest::Split;
use prsmed_base::event::{Event, Observer};
use prsmed_base::{Error, Result, files};

/// Creates all folders before the first file is written, and clears what a crash has left in that of the annotations.
///
/// # Errors
/// [`Error::Io`], also for a folder that is a symbolic link.
pub(super) fn make_folders(splits: &[Split], options: &PrepareOptions) -> Result<()> {
    files::create_folders(&options.out).map_err(Error::io(&options.out, "create"))?;
    let class = options.out.join(&options.modality);
    let of_split = |split: &Split| ["images", "masks"].map(|what| class.join(format!("{split}_{what}")));
    let annotations = options.out.join("annotations");
    let folders = splits.iter().flat_map(of_split).chain([annotations.clone()]).collect::<BTreeSet<PathBuf>>();
    folders
        .iter()
        .try_for_each(|folder| files::create_below(&options.out, folder).map_err(Error::io(folder, "create")))?;
    files::clear_leftovers(&annotations).map_err(Error::io(&annotations, "clear temporary files in"))
}

/// Locks the folders of the class and of the annotations until the files are closed: only one preparation at a time adds
/// to a data root. One of another class is waited for, with a note. A file system without locks is not an error.
///
/// # Errors
/// [`Error::Data`] if another process adds to this class; [`Error::Io`].
pub(super) fn lock(options: &PrepareOptions, observer: &dyn Observer) -> Result<[File; 2]> {
    let open = |name: &str| {
        let path = options.out.join(name);
        File::open(&path).map_err(Error::io(&path, "open"))
    };
    let (class, annotations) = (open(&options.modality)?, open("annotations")?);
    if let Err(TryLockError::WouldBlock) = class.try_lock() {
        let reason = "another process is adding files to this class";
        let hint = "wait until it is done, then run the command again";
        return Err(Error::data(options.out.join(&options.modality), reason, hint));
    }
    if let Err(TryLockError::WouldBlock) = annotations.try_lock() {
        observer.on(&Event::Note("waiting for another process that adds files to this data root".into()));
        while annotations.lock().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {}
    }
    Ok([class, annotations])
}

/// Writes a file that does not exist. A symbolic link of this name is not followed. With `reuse`, a file with these
/// bytes, or the first of them, may exist: an earlier preparation was interrupted.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a file that exists with another content.
pub(super) fn new_file(path: &Path, bytes: &[u8], reuse: bool) -> Result<()> {
    match File::create_new(path).and_then(|mut file| file.write_all(bytes)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && reuse => {
            if path.symlink_metadata().is_ok_and(|found| found.is_file()) {
                let found = fs::read(path).map_err(Error::io(path, "read"))?;
                if found == bytes {
                    return Ok(());
                }
                if bytes.starts_with(&found) {
                    return files::write(path, bytes).map_err(Error::io(path, "write"));
                }
            }
            let reason = "exists with another content, but no row of the annotations names it";
            Err(Error::data(path, reason, "move the file away, then run the command again"))
        }
        written => written.map_err(Error::io(path, "write")),
    }
}
