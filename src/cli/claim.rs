//! One process at a time writes into a run folder or a folder of pairs.
//!
//! The claim is the system's lock on a file in the folder. The system takes it back when the process ends, however it
//! ends, so that nothing has to be cleared up after a crash; the file stays, empty when nobody writes.

use super::make_folder;
use crate::event::{Event, Observer};
use crate::{Error, Result};
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Write as _};
use std::path::Path;

/// The locked file; its text is the number of the process that writes into the folder.
const NAME: &str = ".prsmed.lock";

/// The right to write into a folder, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    file: File,
}

impl Claim {
    /// Makes the folder that `flag` names, as [`make_folder`], and claims it. Where the file system has no locks, there is
    /// a warning and no protection.
    ///
    /// # Errors
    /// [`Error::Config`] when another process writes into the folder; [`Error::Io`].
    pub(super) fn on(flag: &str, folder: &Path, observer: &dyn Observer) -> Result<Self> {
        make_folder(flag, folder)?;
        let path = folder.join(NAME);
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let file = options.open(&path).map_err(Error::io(&path, "open"))?;
        match file.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => return Err(is_taken(flag, folder)),
            Err(TryLockError::Error(error)) if is_without_locks(&error) => {
                let text = format!(
                    "no other prsmed must write into `{}`, and this file system cannot prevent it: {error}",
                    folder.display()
                );
                observer.on(&Event::Warning(text));
            }
            Err(TryLockError::Error(error)) => return Err(Error::io(&path, "lock")(error)),
        }
        let mut this = Self { file };
        this.sign().map_err(Error::io(&path, "write"))?;
        Ok(this)
    }

    fn sign(&mut self) -> std::io::Result<()> {
        self.file.set_len(0)?;
        write!(self.file, "{}", std::process::id())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // still locked: nobody reads the number of a process that is done
        let _ = self.file.set_len(0);
    }
}

fn is_taken(flag: &str, folder: &Path) -> Error {
    let number = std::fs::read_to_string(folder.join(NAME)).ok().and_then(|text| text.parse::<u32>().ok());
    let process = number.map_or_else(String::new, |number| format!(" (process {number})"));
    let reason = format!("another prsmed{process} is writing into `{}`", folder.display());
    Error::config(flag, reason, "wait until it is done, stop it, or choose another folder")
}

/// Whether locks are not to be had there: in no system call of the kind, or on a network share without a server of locks.
fn is_without_locks(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Silent;

    #[test]
    fn a_folder_is_claimed_once_at_a_time() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("run");
        let claim = Claim::on("--out", &folder, &Silent).unwrap();
        let refused = Claim::on("--out", &folder, &Silent).unwrap_err().to_string();
        let own = std::process::id();
        assert_eq!(refused, format!("`--out`: another prsmed (process {own}) is writing into `{}`", folder.display()));
        drop(claim);
        assert_eq!(std::fs::read(folder.join(NAME)).unwrap(), b"");
        std::fs::write(folder.join(NAME), "what a crash left").unwrap();
        drop(Claim::on("--out", &folder, &Silent).unwrap());
    }

    #[test]
    fn file_systems_without_locks_are_told_from_failures() {
        let is = |number: i32| is_without_locks(&std::io::Error::from_raw_os_error(number));
        assert!(is(libc::ENOLCK) && is(libc::EOPNOTSUPP) && is(libc::ENOSYS));
        assert!(!is(libc::EIO) && !is(libc::EACCES));
    }
}
