//! The commands that other commands print as `next:` work as printed, also with blanks and quotes in paths, and repeat the
//! flags that they need.

use crate::support::{copy, done, folder, path, phantoms, prsmed, run, train, trained};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The text of the line `next: ...`.
fn next(text: &str) -> String {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("next: "));
    let line = line.unwrap_or_else(|| panic!("{text}")).to_owned();
    let placeholders = ["DATA", "FILE", "DIR", "RUN", "NAME", "TEXT"];
    assert!(!line.split([' ', '`']).any(|word| placeholders.contains(&word)), "{line}");
    line
}

/// The part of a sentence between the backticks number `at`.
fn quoted(line: &str, at: usize) -> String {
    line.split('`').nth(2 * at + 1).unwrap_or_else(|| panic!("{line}")).to_owned()
}

/// Runs a printed command in a shell in `place`, with flags that keep it short.
fn works_in(place: &Path, command: &str, more: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_prsmed")).parent().unwrap();
    let programs = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{command} {more}")]).env("PATH", programs).env("OMP_NUM_THREADS", "1");
    let output = shell.env("HF_HOME", path("hf")).current_dir(place).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command} {more}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A folder without runs; other tests leave one in that of the suite.
fn place() -> PathBuf {
    let place = path("next without runs");
    fs::create_dir_all(&place).unwrap();
    place
}

fn works(command: &str, more: &str) -> String {
    works_in(&place(), command, more)
}

/// Asserts that a printed training can start.
fn starts(command: &str) {
    assert!(works(command, "--check").contains("can start"), "{command}");
}

/// Changes the tables of a data root.
fn rewrite(root: &Path, change: impl Fn(&str) -> String) {
    for table in fs::read_dir(root.join("annotations")).unwrap() {
        let table = table.unwrap().path();
        fs::write(&table, change(&fs::read_to_string(&table).unwrap())).unwrap();
    }
}

/// A copy of the phantoms with the rows of one split.
fn only(split: &str, name: &str) -> PathBuf {
    let root = copy(phantoms(), name);
    rewrite(&root, |text| {
        let rows = text.lines().enumerate();
        let rows = rows.filter(|(number, row)| *number == 0 || row.ends_with(&format!(",{split}")));
        rows.map(|(_, row)| row.to_owned() + "\n").collect()
    });
    root
}

fn check(root: &Path) -> Command {
    let mut command = prsmed();
    command.args(["data", "check"]).arg(root).current_dir(place());
    command
}

#[test]
fn next_commands_work_as_printed() {
    let place = folder("next of a user");
    let (root, volumes) = (place.join("it's"), place.join("vol umes"));
    let made = done(prsmed().args(["data", "phantom", "--count", "16", "--image-size", "64"]).arg(&root));
    assert!(works_in(&place, &next(&made), "--check").contains("can start"));
    let checked = done(&mut check(&root));
    assert!(works_in(&place, &next(&checked), "--preset tiny --check").contains("can start"));

    let made = done(prsmed().args(["data", "phantom", "--volumes", "3"]).arg(&volumes).current_dir(&place));
    let made = works_in(&place, &next(&made), "--every 8");
    works_in(&place, &next(&made), "");
    assert!(place.join("data/annotations").is_dir());

    let run_folder = copy(&trained().0, "next of a user/a run");
    let merged = done(prsmed().arg("merge").arg(&run_folder).arg(place.join("merged one")));
    assert!(works(&next(&merged), "--help").contains("Usage: prsmed serve"));
}

#[test]
fn the_default_run_folder_is_replaced_if_it_is_taken() {
    let place = folder("next after a run");
    copy(&trained().0, "next after a run/runs/train");
    let made =
        done(prsmed().args(["data", "phantom", "ph", "--count", "16", "--image-size", "64"]).current_dir(&place));
    let checked = done(check(Path::new("ph")).current_dir(&place));
    for text in [made, checked] {
        assert!(next(&text).ends_with(" --out runs/train-2"), "{text}");
        assert!(works_in(&place, &next(&text), "--check").contains("can start"));
    }
}

#[test]
fn only_corrections_and_pairs_belong_to_another_data_root() {
    let real = only("train", "next real");
    let checked = next(&done(&mut check(&real)));
    assert_eq!(checked, format!("prsmed train --data-root '{}'", real.display()));
    starts(&checked);

    let corrected = copy(&real, "next corrected");
    let annotations = corrected.join("annotations");
    let table = fs::read_dir(&annotations).unwrap().next().unwrap().unwrap().path();
    let rows = fs::read_to_string(&table).unwrap();
    fs::remove_dir_all(&annotations).unwrap();
    fs::create_dir(&annotations).unwrap();
    fs::write(annotations.join("corrected.csv"), rows).unwrap();
    let own = next(&done(check(&corrected).arg("--annotations").arg(&annotations)));
    assert!(own.starts_with("prsmed train --data-root '"), "`--extra` has no `--annotations`: {own}");
    let pairs = copy(&real, "next pairs");
    fs::write(pairs.join("manifest.jsonl"), "").unwrap();
    for root in [corrected, pairs] {
        let line = next(&done(&mut check(&root)));
        assert!(line.starts_with("train with it: add `--extra '"), "{line}");
        let command = format!("prsmed train --data-root {}", phantoms().display());
        starts(&format!("{command} {} --allow-leak", quoted(&line, 0)));
    }

    let line = next(&done(&mut check(&only("test", "next test"))));
    assert!(line.ends_with(" to `prsmed eval`"), "{line}");
    works(&format!("prsmed eval {} {}", trained().0.display(), quoted(&line, 0)), "--limit 1 --out 'next scored'");
}

#[test]
fn a_check_repeats_its_flags_for_the_training() {
    let root = copy(phantoms(), "next flags");
    let annotations = path("next annotations");
    fs::rename(root.join("annotations"), &annotations).unwrap();
    let line = next(&done(check(&root).arg("--annotations").arg(&annotations).args(["--labels", "255"])));
    assert!(line.contains(" --annotations '") && line.ends_with(" --labels 255"), "{line}");
    starts(&line);
    // a row that a training refuses names the same table
    let bad = copy(&annotations, "next bad annotations");
    let table = fs::read_dir(&bad).unwrap().next().unwrap().unwrap().path();
    fs::write(&table, fs::read_to_string(&table).unwrap() + "a/train_masks/no.png,Where?,There.,left,train\n").unwrap();
    let refused = run(train(&root, &path("never"), &[]).arg("--annotations").arg(&bad));
    let check = refused.stderr.split('`').find(|part| part.starts_with("prsmed data check")).unwrap();
    assert!(works(check, "|| test $? = 1").contains("no.png"), "{}", refused.stderr);

    let (root, extra) = (phantoms(), copy(phantoms(), "next leaking"));
    rewrite(&extra, |text| text.replace(",val\n", ",train\n").replace(",test\n", ",train\n"));
    let line = next(&done(self::check(root).arg("--extra").arg(&extra).arg("--allow-leak")));
    assert!(line.ends_with("next leaking' --allow-leak"), "{line}");
    starts(&line);
}

#[test]
fn a_training_repeats_its_flags_for_the_scores() {
    let root = copy(phantoms(), "next trained");
    let annotations = path("next trained annotations");
    fs::rename(root.join("annotations"), &annotations).unwrap();
    let table = fs::read_dir(&annotations).unwrap().next().unwrap().unwrap().path();
    fs::write(&table, fs::read_to_string(&table).unwrap() + "a/test_masks/no.png,Where?,There.,left,test\n").unwrap();
    let mut command = train(&root, &path("next trained run"), &["train.max_steps=1"]);
    let line = next(&done(command.arg("--annotations").arg(&annotations).arg("--skip-bad-rows")));
    assert!(line.ends_with("annotations' --skip-bad-rows --split test"), "{line}");
    works(&line, "--limit 1");

    // data without test rows
    let out = path("next trained without test");
    let line = next(&done(&mut train(&only("train", "next without test"), &out, &["train.max_steps=1"])));
    assert!(line.starts_with("prsmed predict '"), "{line}");
    works(&line, "--max-new-tokens 2");
}

#[test]
fn scores_repeat_the_flags_of_the_model_for_the_page() {
    let (merged, run_folder) = (path("next merged"), path("next run on a base"));
    done(prsmed().arg("merge").arg(&trained().0).arg(&merged));
    let set = format!("model.base={}", merged.join("base").display());
    done(&mut train(phantoms(), &run_folder, &["train.max_steps=1", "model.train_base=false", &set]));
    let other = copy(&run_folder, "next other run");
    let base = copy(&merged.join("base"), "next base");
    let mut command = prsmed();
    command
        .arg("eval")
        .arg(&run_folder)
        .arg("--data-root")
        .arg(phantoms())
        .args(["--limit", "1", "--out", "next eval"]);
    command.args(["--precision", "fp32", "--stream-layers", "none", "--allow-partial"]).arg("--base").arg(&base);
    let line = next(&done(&mut command));
    let expected = format!("--base '{}' --precision fp32 --stream-layers none --allow-partial", base.display());
    assert_eq!(line, format!("prsmed serve '{}' {expected}", run_folder.display()));
    assert!(works(&line, "--help").contains("Usage: prsmed serve"));

    let mut command = prsmed();
    command.arg("eval").arg(&run_folder).arg(&other).arg("--ensemble").arg("--data-root").arg(phantoms());
    let line = next(&done(command.args(["--limit", "1", "--out", "next ensemble"])));
    assert_eq!(line, format!("prsmed serve '{}' --ensemble '{}'", run_folder.display(), other.display()));
}

#[test]
fn a_preset_says_how_its_settings_are_saved_and_used() {
    let place = folder("next preset");
    let mut command = prsmed();
    command.args(["preset", "--preset", "tiny", "--gpu", "24gb", "--set", "model.train_base=false", "--json"]);
    let line = next(&run(command.current_dir(&place)).stderr);
    let (save, flags) = (quoted(&line, 0), quoted(&line, 1));
    assert!(save.ends_with("model.train_base=false > preset.toml") && flags == "--config preset.toml", "{line}");
    // it knows the file that the shell makes
    let saved = next(&works_in(&place, &save, "2> notes && cat notes"));
    assert!(
        saved.starts_with("add `--config '") && quoted(&saved, 0).ends_with("/next preset/preset.toml'"),
        "{saved}"
    );
    let train = format!("prsmed train --data-root {}", phantoms().display());
    assert!(works_in(&place, &train, &format!("{flags} --check")).contains("can start"));
    let again = next(&run(command.current_dir(&place)).stderr);
    assert!(quoted(&again, 1) == "--config preset-2.toml", "{again}");
}

#[test]
fn a_fine_tuning_repeats_its_flags_for_the_pairs() {
    let root = copy(phantoms(), "next finetuned");
    let (annotations, place) = (path("next finetuned annotations"), folder("next pairs of a user"));
    fs::rename(root.join("annotations"), &annotations).unwrap();
    fs::create_dir(place.join("pairs")).unwrap();
    let mut command = prsmed();
    command.args(["augment", "finetune", "--preset", "tiny", "--out", "a run", "--skip-bad-rows", "--data-root"]);
    command.arg(&root).arg("--annotations").arg(&annotations).current_dir(&place);
    let line = next(&done(command.args(["--set", "finetune.image_size=64", "--set", "train.max_steps=1"])));
    assert!(line.contains("annotations' --skip-bad-rows --out pairs-2 "), "{line}");
    works_in(&place, &line, "--limit 1 --per-image 1 --set augment.steps=2");
}
