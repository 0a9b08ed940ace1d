//! Run lock: only one process at a time writes into a run folder or a folder of pairs.
//!
//! The lock is the operating system's lock on a file in the folder. The system releases it when the process ends, also
//! after a crash. The file remains and is empty while no process writes.

use crate::event::{Event, Observer};
use crate::{Error, Result, files};
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Write as _};
use std::path::Path;

/// Name of the locked file. It contains the id of the process that writes into the folder.
const NAME: &str = ".prsmed.lock";

/// Lock on a folder, until it is dropped.
#[derive(Debug)]
pub(super) struct RunLock {
    file: File,
}

impl RunLock {
    /// Creates the folder that `argument` names, as [`make_folder`] does, and locks it. On a file system without locks it
    /// only warns. Clears temporary files that a crash has left in the folder.
    ///
    /// # Errors
    /// [`Error::Argument`] if another process writes into the folder; [`Error::Io`].
    pub(super) fn on(argument: &str, folder: &Path, observer: &dyn Observer) -> Result<Self> {
        make_folder(argument, folder)?;
        let path = folder.join(NAME);
        let file = files::open_to_change(&path).map_err(Error::io(&path, "open"))?;
        check(file.try_lock(), argument, folder, observer)?;
        let mut this = Self { file };
        this.sign().map_err(Error::io(&path, "write"))?;
        files::clear_leftovers(folder).map_err(Error::io(folder, "clear temporary files in"))?;
        Ok(this)
    }

    fn sign(&mut self) -> std::io::Result<()> {
        self.file.set_len(0)?;
        write!(self.file, "{}", std::process::id())
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // still locked, so no other process reads the id of a process that has ended
        let _ = self.file.set_len(0);
    }
}

/// Creates an output folder and checks that it is writable, before the expensive work. `argument` names it in errors.
///
/// # Errors
/// [`Error::Argument`] if it is a file; [`Error::Io`].
pub fn make_folder(argument: &str, folder: &Path) -> Result<()> {
    if folder.exists() && !folder.is_dir() {
        let reason = format!("`{}` is a file", folder.display());
        return Err(Error::argument(argument, reason, "choose another folder"));
    }
    files::create_folders(folder).map_err(Error::io(folder, "create"))?;
    tempfile::tempfile_in(folder).map(drop).map_err(Error::io(folder, "write"))
}

/// Checks the attempt to lock `folder`. On a file system without locks it only warns.
fn check(locked: Result<(), TryLockError>, argument: &str, folder: &Path, observer: &dyn Observer) -> Result<()> {
    match locked {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(is_taken(argument, folder)),
        Err(TryLockError::Error(error)) if is_without_locks(&error) => {
            let text = format!(
                "no other prsmed must write into `{}`, and this file system cannot prevent it: {error}",
                folder.display()
            );
            observer.on(&Event::Warning(text));
            Ok(())
        }
        Err(TryLockError::Error(error)) => Err(Error::io(folder.join(NAME), "lock")(error)),
    }
}

fn is_taken(argument: &str, folder: &Path) -> Error {
    let number = files::read_to_string(&folder.join(NAME), 64).ok().and_then(|text| text.parse::<u32>().ok());
    let process = number.map_or_else(String::new, |number| format!(" (process {number})"));
    let reason = format!("another prsmed{process} is writing into `{}`", folder.display());
    Error::argument(argument, reason, "wait until it is done, stop it, or choose another folder")
}

/// True if the file system has no locks: the system call is not supported, or a network share has no lock server.
fn is_without_locks(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Silent;
    use std::sync::Mutex;

    #[test]
    fn a_folder_has_one_lock_at_a_time() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("run");
        let run_lock = RunLock::on("out", &folder, &Silent).unwrap();
        let refused = RunLock::on("out", &folder, &Silent).unwrap_err().to_string();
        let own = std::process::id();
        assert_eq!(
            refused,
            format!("argument `out`: another prsmed (process {own}) is writing into `{}`", folder.display())
        );
        drop(run_lock);
        assert_eq!(std::fs::read(folder.join(NAME)).unwrap(), b"");
        std::fs::write(folder.join(NAME), "left by a crash").unwrap();
        drop(RunLock::on("out", &folder, &Silent).unwrap());
    }

    #[test]
    fn a_lock_file_that_is_a_link_is_refused_and_its_target_is_unchanged() {
        let home = tempfile::tempdir().unwrap();
        let (folder, precious) = (home.path().join("run"), home.path().join("thesis.txt"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&precious, "thesis").unwrap();
        std::os::unix::fs::symlink(&precious, folder.join(NAME)).unwrap();
        let error = RunLock::on("out", &folder, &Silent).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains("is a symbolic link"), "{error}: {cause}");
        assert_eq!(std::fs::read(&precious).unwrap(), b"thesis");
    }

    #[test]
    fn a_new_writer_clears_what_a_crash_has_left() {
        let home = tempfile::tempdir().unwrap();
        let left = home.path().join(".config.toml.prsmed-tmp-a1B2c3");
        std::fs::write(&left, "half").unwrap();
        drop(RunLock::on("out", home.path(), &Silent).unwrap());
        assert!(!left.exists());
    }

    #[derive(Default)]
    struct Warnings(Mutex<Vec<String>>);

    impl Observer for Warnings {
        fn on(&self, event: &Event) {
            if let Event::Warning(text) = event {
                self.0.lock().unwrap().push(text.clone());
            }
        }
    }

    #[test]
    fn a_file_system_without_locks_gives_a_warning_and_a_failed_lock_an_error() {
        let warnings = Warnings::default();
        let locked = |number: i32| {
            let error = std::io::Error::from_raw_os_error(number);
            check(Err(TryLockError::Error(error)), "out", Path::new("run"), &warnings)
        };
        assert_eq!(locked(libc::EIO).unwrap_err().to_string(), "run/.prsmed.lock: cannot lock");
        assert_eq!(warnings.0.lock().unwrap().len(), 0);
        locked(libc::ENOLCK).unwrap();
        let text = warnings.0.lock().unwrap().concat();
        let start = "no other prsmed must write into `run`, and this file system cannot prevent it: ";
        assert!(text.starts_with(start), "{text}");
    }

    #[test]
    fn missing_locks_are_distinguished_from_failures() {
        let is = |number: i32| is_without_locks(&std::io::Error::from_raw_os_error(number));
        assert!(is(libc::ENOLCK) && is(libc::EOPNOTSUPP) && is(libc::ENOSYS));
        assert!(!is(libc::EIO) && !is(libc::EACCES));
    }
}
