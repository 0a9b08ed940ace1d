//! Replays the corpora of the fuzz targets and every input that once failed (`tests/fuzz`).
//!
//! `scripts/fuzz` searches for new inputs. An input that fails becomes a file in `tests/fuzz/findings/TARGET`, so that
//! this test protects its fix without a fuzzer.

#[path = "fuzz/targets.rs"]
pub mod targets;
#[path = "fuzz/with_torch.rs"]
pub mod with_torch;

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit of the CPU time that one input may take.
const MAX_TIME: Duration = Duration::from_secs(5);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz")
}

/// The names in a folder, sorted; none if it does not exist.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("listed").file_name().into_string().expect("UTF-8")).collect()
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes to the struct only.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("below one second"))
}

fn replay(name: &str, target: fn(&[u8])) {
    assert!(!names(&root().join("corpus").join(name)).is_empty(), "no corpus of `{name}`");
    for folder in ["corpus", "findings"] {
        let folder = root().join(folder).join(name);
        for file in names(&folder) {
            let path = folder.join(file);
            let bytes = fs::read(&path).expect("read");
            let start = cpu_time();
            let result = catch_unwind(AssertUnwindSafe(|| target(&bytes)));
            let time = cpu_time().checked_sub(start).expect("time passes");
            assert!(result.is_ok(), "`{}` fails; its message is above", path.display());
            assert!(time <= MAX_TIME, "`{}` takes {time:?}; {MAX_TIME:?} are the limit", path.display());
        }
    }
}

macro_rules! replays {
    ($($module:ident::$name:ident)*) => {
        const TARGETS: &[&str] = &[$(stringify!($name)),*];

        $(
            #[test]
            fn $name() {
                replay(stringify!($name), $module::$name);
            }
        )*
    };
}

replays!(
    targets::annotations targets::csv targets::dicom targets::hub targets::image targets::meta_image targets::nifti targets::npz targets::nrrd
    targets::rtstruct targets::tokenizer
    with_torch::checksums with_torch::config with_torch::journal with_torch::model_json with_torch::pickle
    with_torch::pth with_torch::safetensors
);

#[test]
fn every_target_has_a_binary_and_every_input_a_target() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|&name| name.to_owned()).collect();
    let binaries = names(&root().join("fuzz_targets"));
    let binaries: BTreeSet<String> = binaries.iter().map(|name| name.trim_end_matches(".rs").to_owned()).collect();
    assert_eq!(binaries, targets);
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("read");
    for name in &targets {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "`{name}` is not in tests/fuzz/Cargo.toml");
    }
    assert_eq!(names(&root().join("corpus")), targets);
    assert!(names(&root().join("findings")).is_subset(&targets));
}
