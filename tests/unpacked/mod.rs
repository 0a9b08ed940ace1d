//! Fixtures whose weights are stored compressed.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

/// A folder with the files of the pipeline `name` of `tests/fixtures/single_file`, its weights unpacked. Tests share it
/// and must not change it.
pub(crate) fn single_file(name: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/single_file").join(name);
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("single_file").join(name);
    copy(&from, &target);
    target
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("the fixture is there") {
        let path = entry.expect("an entry").path();
        let mut target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy(&path, &target);
            continue;
        }
        let mut bytes = std::fs::read(&path).expect("a file");
        if path.extension().is_some_and(|extension| extension == "gz") {
            let packed = std::mem::take(&mut bytes);
            let _ = GzDecoder::new(packed.as_slice()).read_to_end(&mut bytes).expect("a whole file");
            target.set_extension("");
        }
        // another test may read the file now
        if std::fs::read(&target).ok().as_ref() != Some(&bytes) {
            let unfinished = tempfile::NamedTempFile::new_in(to).expect("a new file");
            std::fs::write(unfinished.path(), &bytes).expect("written");
            let _ = unfinished.persist(&target).expect("renamed");
        }
    }
}
