//! The library's error type. Its variants follow what the user must do; `hint()` says what that is.
//!
//! Messages are lowercase, without a final period, with literals in backticks. `cli` prints message, causes and hint.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Result of functions that can fail for a reason outside the program.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is unknown, of the wrong type or out of range: change the preset or the config file.
    #[error("`{key}`: {reason}")]
    Config {
        /// Dotted key (`train.micro_batch`), or the text or environment variable that is wrong.
        key: String,
        /// What is wrong with its value.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// An argument is missing or has a value that is not possible: change it. The command line shows it as a flag.
    #[error("argument `{name}`: {reason}")]
    Argument {
        /// Its name, with underscores (`data_root`).
        name: String,
        /// What is wrong with its value.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// A file of the data set is missing, unreadable or inconsistent: correct or remove the row.
    #[error("{}: {reason}", location(.path, *.line))]
    Data {
        /// The wrong file (the CSV for a bad row, the image for a corrupt image).
        path: PathBuf,
        /// 1-based line in `path`, if it has lines.
        line: Option<u64>,
        /// What is wrong.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// A checkpoint, adapter, tokenizer or run folder has missing, damaged or unexpected content.
    #[error("{}: {reason}", .path.display())]
    Weights {
        /// File or folder.
        path: PathBuf,
        /// What is wrong: keys, expected and found shapes.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// A hub repository could not be read.
    #[error("`{repo}`: {reason}")]
    Hub {
        /// `hub:owner/name[@revision]`, or `dataset:...`.
        repo: String,
        /// The failure of the hub or the connection.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// The operating system refused a file operation (missing file, no permission, disk full).
    #[error("{}: cannot {action}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// `read`, `write`, `create`, ...
        action: &'static str,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The shapes of tensors do not match.
    #[error("{reason}")]
    Shape {
        /// Expected and found shapes.
        reason: String,
    },
    /// The GPU or the CPU is out of memory.
    #[error("out of memory: {reason}")]
    OutOfMemory {
        /// libtorch's message.
        reason: String,
    },
    /// libtorch failed in another way.
    #[error("libtorch: {reason}")]
    Torch {
        /// First line of libtorch's message.
        reason: String,
    },
    /// Training diverged (NaN or infinity).
    #[error("{reason}")]
    Diverged {
        /// Step and value.
        reason: String,
    },
    /// A panic: an error of the program.
    #[error("internal error, please report it with the command line: {reason}")]
    Internal {
        /// Message and location of the panic.
        reason: String,
    },
    /// A model computed NaN or infinity for an image.
    #[error(
        "{}the {part} of the model are not finite: {found} of {total} are NaN or infinite",
        prefix(.image.as_deref())
    )]
    NotFinite {
        /// The image, if the function knows its file.
        image: Option<PathBuf>,
        /// The output: `mask logits`, `class logits`, ...
        part: &'static str,
        /// Number of values that are not finite.
        found: usize,
        /// Number of values.
        total: usize,
    },
    /// Another process of the job failed.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// Its number.
        rank: usize,
        /// Its error.
        reason: String,
        /// What to do.
        hint: String,
        /// As [`Error::is_disk_full`] of its error.
        disk_full: bool,
    },
    /// The user pressed Ctrl-C. Finished work is saved.
    #[error("interrupted")]
    Interrupted,
}

fn location(path: &Path, line: Option<u64>) -> String {
    line.map_or_else(|| path.display().to_string(), |line| format!("{}:{line}", path.display()))
}

/// Names in backticks for a message, at most 20.
pub fn quoted<T: std::fmt::Display>(names: &[T]) -> String {
    first_quoted(names, 20)
}

/// The first `most` names in backticks for a message, and how many more there are.
pub fn first_quoted<T: std::fmt::Display>(names: &[T], most: usize) -> String {
    let shown: Vec<String> = names.iter().take(most).map(|name| format!("`{name}`")).collect();
    let more = names.len().saturating_sub(most);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}

/// Most bytes of a reason. Names in files from elsewhere may be long.
const MAX_REASON: usize = 32 << 10;

/// A reason of at most [`MAX_REASON`] bytes.
fn limited(reason: impl Into<String>) -> String {
    let mut reason = reason.into();
    if reason.len() > MAX_REASON {
        let end = reason.floor_char_boundary(MAX_REASON);
        reason.truncate(end);
        reason.push_str("...");
    }
    reason
}

fn prefix(image: Option<&Path>) -> String {
    image.map_or_else(String::new, |image| format!("{}: ", image.display()))
}

impl Error {
    /// Fails with [`Error::NotFinite`] if one of `values`, the `part` of a model's output, is NaN or infinite.
    ///
    /// # Errors
    /// [`Error::NotFinite`] without an image; see [`Error::of_image`].
    pub fn check_finite(part: &'static str, values: &[f32]) -> Result<()> {
        let found = values.iter().filter(|value| !value.is_finite()).count();
        if found == 0 { Ok(()) } else { Err(Self::NotFinite { image: None, part, found, total: values.len() }) }
    }

    /// Adds the image to an [`Error::NotFinite`]; other errors stay as they are.
    #[must_use]
    pub fn of_image(self, path: &Path) -> Self {
        match self {
            Self::NotFinite { image: None, part, found, total } => {
                Self::NotFinite { image: Some(path.to_path_buf()), part, found, total }
            }
            other => other,
        }
    }

    /// Creates an [`Error::Config`].
    pub fn config(key: impl Into<String>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Config { key: key.into(), reason: limited(reason), hint: hint.into() }
    }

    /// Creates an [`Error::Argument`].
    pub fn argument(name: impl Into<String>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Argument { name: name.into(), reason: limited(reason), hint: hint.into() }
    }

    /// Creates an [`Error::Data`] about a whole file.
    pub fn data(path: impl Into<PathBuf>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Data { path: path.into(), line: None, reason: limited(reason), hint: hint.into() }
    }

    /// Creates an [`Error::Data`] about one line of a file.
    pub fn data_line(path: impl Into<PathBuf>, line: u64, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Data { path: path.into(), line: Some(line), reason: limited(reason), hint: hint.into() }
    }

    /// Creates an [`Error::Weights`].
    pub fn weights(path: impl Into<PathBuf>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Weights { path: path.into(), reason: limited(reason), hint: hint.into() }
    }

    /// Creates an [`Error::Hub`].
    pub fn hub(repo: impl Into<String>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Hub { repo: repo.into(), reason: limited(reason), hint: hint.into() }
    }

    /// Creates an [`Error::Io`]; use as `map_err(Error::io(path, "read"))`.
    pub fn io(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, action, source }
    }

    /// True if the disk is full, the quota is used up, or the file may not become that large.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
            }
            Self::Peer { disk_full, .. } => *disk_full,
            _ => false,
        }
    }

    /// What to do next, in one sentence; empty if the message needs no hint.
    pub fn hint(&self) -> String {
        let hint = match self {
            Self::Config { hint, .. }
            | Self::Argument { hint, .. }
            | Self::Data { hint, .. }
            | Self::Weights { hint, .. }
            | Self::Hub { hint, .. }
            | Self::Peer { hint, .. } => hint,
            Self::Io { source, path, .. } => match source.kind() {
                ErrorKind::NotFound | ErrorKind::NotADirectory => {
                    return format!("check the path `{}`", path.display());
                }
                ErrorKind::PermissionDenied => "check the file's owner and permissions",
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                    "free some space on that disk and run the same command again; finished work is kept"
                }
                ErrorKind::FileTooLarge => {
                    "files of this size are not allowed there: raise `ulimit -f`, or choose another disk"
                }
                _ => "",
            },
            Self::Shape { .. } => "check that the config belongs to the weights",
            Self::OutOfMemory { .. } => {
                "lower `train.micro_batch`, raise `train.accumulation` by the same factor, or set \
                 `train.checkpointing=full`"
            }
            Self::Torch { .. } | Self::Internal { .. } => "",
            Self::Diverged { .. } => {
                "lower `train.learning_rate`, or use the argument `precision=bf16` instead of fp16"
            }
            Self::NotFinite { .. } => {
                "try the argument `precision=fp32`; if that fails too, these weights cannot be used: take an \
                                       earlier checkpoint, or train again with a lower `train.learning_rate`"
            }
            Self::Interrupted => "run the same command again to continue; trainings need the argument `resume`",
        };
        hint.to_owned()
    }
}
