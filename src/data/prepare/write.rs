//! Writes files into a data root without changing those that exist.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::options::PrepareOptions;
use crate::data::manifest::Split;
use crate::{Error, Result, files};

/// Creates all folders before the first file is written.
///
/// # Errors
/// [`Error::Io`], also for a folder that is a symbolic link.
pub(super) fn make_folders(splits: &[Split], options: &PrepareOptions) -> Result<()> {
    files::create_folders(&options.out).map_err(Error::io(&options.out, "create"))?;
    let class = options.out.join(&options.modality);
    let of_split = |split: &Split| ["images", "masks"].map(|what| class.join(format!("{split}_{what}")));
    let mut folders: Vec<PathBuf> = splits.iter().flat_map(of_split).collect();
    folders.push(options.out.join("annotations"));
    folders.sort();
    folders.dedup();
    folders.iter().try_for_each(|folder| files::create_below(&options.out, folder).map_err(Error::io(folder, "create")))
}

/// Writes a file that does not exist. A symbolic link of this name is not followed. With `reuse`, a file with these
/// bytes may exist: an earlier preparation was interrupted.
///
/// # Errors
/// [`Error::Io`]; [`Error::Data`] for a file that exists with another content.
pub(super) fn new_file(path: &Path, bytes: &[u8], reuse: bool) -> Result<()> {
    match File::create_new(path).and_then(|mut file| file.write_all(bytes)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && reuse => {
            let is_plain = path.symlink_metadata().is_ok_and(|found| found.is_file());
            if is_plain && fs::read(path).map_err(Error::io(path, "read"))? == bytes {
                return Ok(());
            }
            Err(Error::data(
                path,
                "exists with another content, but no row of the annotations names it",
                "move the file away, then run the command again",
            ))
        }
        written => written.map_err(Error::io(path, "write")),
    }
}
