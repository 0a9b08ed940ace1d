//! Helpers that run the binary and create data roots and training runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::warm;

/// Result of a command.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The folder of this suite, empty at first.
fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli");
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).unwrap();
        home
    })
}

/// A path inside the suite's folder. Nothing is created.
pub(crate) fn path(name: &str) -> PathBuf {
    home().join(name)
}

/// A new folder inside the suite's folder.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = path(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The binary, run in the suite's folder with a fixed environment.
pub(crate) fn prsmed() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prsmed"));
    command.current_dir(home()).stdin(Stdio::null());
    command.env("OMP_NUM_THREADS", "1").env("COLUMNS", "100").env("RUST_BACKTRACE", "1").env("HF_HOME", path("hf"));
    for name in ["HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"] {
        command.env_remove(name);
    }
    command
}

/// Runs a command to its end and checks that no panic was printed.
pub(crate) fn run(command: &mut Command) -> Ran {
    let ran = warm::run(command).unwrap_or_else(|| {
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    });
    for word in ["panicked", "stack backtrace", "RUST_BACKTRACE", "internal error"] {
        assert!(!ran.stderr.contains(word) && !ran.stdout.contains(word), "{}", ran.stderr);
    }
    ran
}

/// Runs a command that must succeed; returns standard output.
pub(crate) fn done(command: &mut Command) -> String {
    let ran = run(command);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran.stdout
}

/// Runs a command that must fail with exit code 2, without standard output, and with `expected` (the error and
/// everything after it) on standard error. The suite's folder is written `~`.
pub(crate) fn refused(command: &mut Command, expected: &str) {
    let ran = run(command);
    assert_eq!((error_text(&ran).as_str(), ran.code, ran.stdout.as_str()), (expected, Some(2), ""));
}

/// The error and everything after it on standard error, with the suite's folder written `~`.
pub(crate) fn error_text(ran: &Ran) -> String {
    let start = ran.stderr.find("error: ").unwrap_or_else(|| panic!("no error, {:?}: {}", ran.code, ran.stderr));
    ran.stderr[start..].replace(home().to_str().unwrap(), "~").trim_end().to_owned()
}

/// True in `scripts/soak`, which runs some tests on more settings, or longer, than `scripts/check`.
pub(crate) fn is_soak() -> bool {
    std::env::var_os("PRSMED_SOAK").is_some()
}

/// A path of the folder that PRSMED_SHARED names (default: `shared` next to the checkout).
pub(crate) fn shared(name: &str) -> PathBuf {
    let root = std::env::var_os("PRSMED_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    let path = root.join(name);
    assert!(path.exists(), "`{}` does not exist (set PRSMED_SHARED)", path.display());
    path
}

/// A volume or DICOM file that `scripts/fixtures/volumes.py` made.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/volumes").join(name)
}

/// A data root of 16 small phantoms. Tests share it and must not change it.
pub(crate) fn phantoms() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let root = path("phantoms");
        done(prsmed().args(["data", "phantom", "--count", "16", "--image-size", "64", "--seed", "3"]).arg(&root));
        root
    })
}

/// `train` on a data root with settings for steps of a fraction of a second.
pub(crate) fn train(root: &Path, out: &Path, sets: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["train", "--preset", "tiny", "--data-root"]).arg(root).arg("--out").arg(out);
    for set in ["model.image_size=64", "train.micro_batch=2", "train.checkpoint_every_steps=1"].iter().chain(sets) {
        command.args(["--set", set]);
    }
    command
}

/// Number of steps of [`trained`].
pub(crate) const STEPS: &str = "train.max_steps=6";

/// A run of six steps, and its standard output with `--json`. Tests share it and must not change it.
pub(crate) fn trained() -> &'static (PathBuf, String) {
    static RUN: OnceLock<(PathBuf, String)> = OnceLock::new();
    RUN.get_or_init(|| {
        let run = path("trained");
        let stdout = done(train(phantoms(), &run, &[STEPS]).arg("--json"));
        (run, stdout)
    })
}

/// A copy of a folder.
pub(crate) fn copy(from: &Path, name: &str) -> PathBuf {
    let to = path(name);
    copy_into(from, &to);
    to
}

pub(crate) fn copy_into(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_into(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Every file below a folder, by name.
pub(crate) fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![folder.to_owned()];
    while let Some(next) = left.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().display().to_string();
                found.insert(name, fs::read(path).unwrap());
            }
        }
    }
    found
}

/// All files below `folder` that end in `.safetensors`, with their bytes, by name.
pub(crate) fn weights(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let is_weights = |name: &str| Path::new(name).extension().is_some_and(|extension| extension == "safetensors");
    let found: Vec<_> = tree(folder).into_iter().filter(|(name, _)| is_weights(name)).collect();
    assert!(found.len() > 3, "no checkpoint in {}", folder.display());
    found
}

/// Names of the files that differ between two checkpoint folders.
pub(crate) fn differing(a: &Path, b: &Path) -> Vec<String> {
    let (a, b) = (weights(a), weights(b));
    let names = |files: &[(String, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&a), names(&b));
    a.into_iter().zip(b).filter(|(a, b)| a != b).map(|(a, _)| a.0).collect()
}

/// Every line of `text` as a JSON object.
pub(crate) fn objects(text: &str) -> Vec<Value> {
    let objects: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!objects.is_empty() && objects.iter().all(Value::is_object), "{text}");
    objects
}

/// Replaces every number of a weight file by one so large that the model computes NaN or infinity, and updates the
/// checksums of its folder.
pub(crate) fn overflow(folder: &Path, name: &str) {
    use prsmed::tensor::weights::{Archive, write_safetensors};
    let file = folder.join(name);
    let archive = Archive::open(&file).unwrap();
    let read = |name: &String| (name.clone(), archive.read(name).unwrap().copy());
    let tensors: Vec<_> = archive.names().iter().map(read).collect();
    drop(archive);
    for (_, tensor) in tensors.iter().filter(|(_, tensor)| tensor.is_floating_point()) {
        let _ = tensor.shallow_clone().fill_(3e38);
    }
    let borrowed: Vec<_> = tensors.iter().map(|(name, tensor)| (name, tensor)).collect();
    write_safetensors(&file, &borrowed, &std::collections::BTreeMap::new()).unwrap();
    update_checksum(folder, name);
}

/// Replaces the checksum of a file of a checkpoint folder.
pub(crate) fn update_checksum(folder: &Path, name: &str) {
    use prsmed::tensor::weights::sha256;
    let file = folder.join(name);
    let checksums = folder.join("checksums.json");
    let mut sums: Value = serde_json::from_slice(&fs::read(&checksums).unwrap()).unwrap();
    sums["files"][name] =
        serde_json::json!({ "sha256": sha256(&file).unwrap(), "bytes": fs::metadata(&file).unwrap().len() });
    fs::write(checksums, serde_json::to_vec(&sums).unwrap()).unwrap();
}
