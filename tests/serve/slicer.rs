//! The module for 3D Slicer, driven by Python against a server. `scripts/setup --checks` installs nibabel.

use std::path::Path;
use std::process::Command;

use crate::support::{Server, volume_file};

const TOKEN: &str = "correct-horse-battery";

#[test]
#[ignore = "needs scripts/setup --checks"]
fn python_reads_what_the_slicer_module_gets() {
    let server = Server::start(&["--token", TOKEN]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(root.join(".venv/bin/python"));
    command.env("PYTHONPATH", root.join(".tools/medical")).env("PYTHONDONTWRITEBYTECODE", "1");
    command.arg(root.join("tests/serve/slicer_module.py")).arg(format!("http://{}/", server.address)).arg(TOKEN);
    command.arg(volume_file("slicer.nii.gz", 8)).arg(volume_file("slicer-long.nii.gz", 5000));
    let output = command.output().expect("scripts/setup --checks");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && output.stdout == b"ok\n", "{error}");
}
