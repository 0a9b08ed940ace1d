//! The parts of zip 0.6 that tch and torch-sys use, by zip 4.

pub use current::{CompressionMethod, ZipArchive, ZipWriter, result};

/// Options of a new file in an archive.
pub mod write {
    pub use current::write::SimpleFileOptions as FileOptions;
}
