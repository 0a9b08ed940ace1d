//! The commands that other commands print as `next:` work as printed, also with blanks and quotes in paths.

use crate::support::{copy, done, folder, path, phantoms, prsmed, run, trained};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The command of the line `next: ...`, with files for its placeholders.
fn next(stdout: &str, image: &Path) -> String {
    let line = stdout.lines().find_map(|line| line.strip_prefix("next: ")).unwrap_or_else(|| panic!("{stdout}"));
    let data = phantoms().display();
    line.replace(" FILE", &format!(" '{}'", image.display())).replace(" DATA", &format!(" '{data}'"))
}

/// Runs a printed command in a shell, with flags that keep it short.
fn works(command: &str, more: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_prsmed")).parent().unwrap();
    let programs = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{command} {more}")]).env("PATH", programs).env("OMP_NUM_THREADS", "1");
    let output = shell.current_dir(path("")).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command} {more}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn next_commands_work_as_printed() {
    let place = folder("next of a user");
    let (root, volumes, prepared) = (place.join("it's"), place.join("vol umes"), place.join("pre pared"));
    let image = phantoms().join("brain_MRI/test_images");
    let image = fs::read_dir(image).unwrap().next().unwrap().unwrap().path();
    let next = |stdout: &str| next(stdout, &image);

    let made = done(prsmed().args(["data", "phantom", "--count", "16", "--image-size", "64"]).arg(&root));
    assert!(works(&next(&made), "--check --out never-trained").contains("can start"));
    let checked = done(prsmed().args(["data", "check"]).arg(&root));
    assert!(works(&next(&checked), "--preset tiny --check --out never-trained").contains("can start"));

    let made = done(prsmed().args(["data", "phantom", "--volumes", "3"]).arg(&volumes));
    let prepare = next(&made).replace(&format!("'{}'", phantoms().display()), &format!("'{}'", prepared.display()));
    let made = works(&prepare, "--every 8");
    works(&next(&made), "");

    let run_folder = copy(&trained().0, "next of a user/a run");
    let evaluated =
        run(prsmed().arg("eval").arg(&run_folder).arg("--data-root").arg(phantoms()).args(["--limit", "1"]));
    assert!(works(&next(&evaluated.stdout), "--help").contains("Usage: prsmed serve"));
    let merged = done(prsmed().arg("merge").arg(&run_folder).arg(place.join("merged one")));
    assert!(works(&next(&merged), "--help").contains("Usage: prsmed serve"));

    // a root without images to score, such as corrections of the page, belongs to another one
    let extra = copy(&root, "next of a user/extra");
    for table in fs::read_dir(extra.join("annotations")).unwrap() {
        let table = table.unwrap().path();
        let text = fs::read_to_string(&table).unwrap();
        let rows = text.lines().enumerate().filter(|(number, row)| *number == 0 || row.contains("train"));
        let rows: Vec<&str> = rows.map(|(_, row)| row).collect();
        fs::write(&table, rows.join("\n") + "\n").unwrap();
    }
    let checked = done(prsmed().args(["data", "check"]).arg(&extra));
    let command = next(&checked);
    assert!(command.contains(" --extra '"), "{command}");
    assert!(works(&command, "--preset tiny --check --allow-leak --out never-trained").contains("can start"));
}
