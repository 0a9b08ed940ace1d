//! What surrounds a command: locale, time zone, home folder, names that are not UTF-8, a closed standard output, and
//! other processes that prepare the same data root or kill this one.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{copy, done, folder, objects, path, phantoms, prsmed, train, trained, tree};

fn image() -> PathBuf {
    fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path()
}

fn predict(mask: &Path) -> Command {
    let mut command = prsmed();
    command.arg("predict").arg(&trained().0).args(["--question", "Where is the lesion?", "--always-paint", "--image"]);
    command.arg(image()).args(["--max-new-tokens", "2", "--mask-out"]).arg(mask);
    command
}

/// A name with a byte that is not UTF-8.
fn odd(start: &str, end: &str) -> OsString {
    let mut name = OsString::from(start);
    name.push(OsStr::from_bytes(b"\xff"));
    name.push(end);
    name
}

#[test]
fn locale_time_zone_and_home_change_no_answer() {
    let settings: [&[(&str, &str)]; 5] = [
        &[("LC_ALL", "C"), ("TZ", "UTC")],
        &[("LC_ALL", "tr_TR.UTF-8"), ("LANG", "tr_TR.UTF-8"), ("TZ", "Pacific/Kiritimati")],
        &[("LC_ALL", "de_DE@euro"), ("LC_NUMERIC", "de_DE.UTF-8"), ("TZ", "../../etc/passwd")],
        &[("LC_ALL", "no such locale"), ("TZ", ":/dev/full"), ("HOME", "/dev/null/none")],
        &[("HOME", ""), ("XDG_CACHE_HOME", "")],
    ];
    let mut seen = BTreeMap::new();
    for (number, variables) in settings.iter().enumerate() {
        let mask = path(&format!("mask-of-locale-{number}.png"));
        // a process of its own: the C library reads these variables once
        let output = predict(&mask).envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{variables:?}: {}", String::from_utf8_lossy(&output.stderr));
        seen.entry((output.stdout, fs::read(mask).unwrap())).or_insert(variables);
    }
    assert_eq!(seen.len(), 1, "{:?}", seen.values());
    let mask = path("mask-without-home.png");
    let mut command = predict(&mask);
    command.env_remove("HOME").env_remove("XDG_CACHE_HOME").env_remove("HF_HOME").env_remove("PRSMED_CACHE");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(seen.contains_key(&(output.stdout, fs::read(mask).unwrap())));
}

#[test]
fn without_a_home_the_cache_of_the_hub_is_in_the_working_folder() {
    let mut command = prsmed();
    command.env_remove("HOME").env_remove("USERPROFILE").env_remove("XDG_CACHE_HOME").env_remove("HF_HOME");
    let output = command.args(["hub", "get", "hub:owner/name"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("is not in the cache `./.cache/huggingface/hub`"), "{error}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn words_that_are_not_utf8_are_refused_before_the_work() {
    let root = path("odd").with_file_name(odd("odd-data", ""));
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).unwrap();
    let out = path("odd").with_file_name(odd("odd-run", ""));
    let mut training = prsmed();
    training.args(["train", "--preset", "tiny", "--set", "train.max_steps=1", "--data-root"]).arg(phantoms());
    training.arg("--out").arg(&out);
    let mut check = prsmed();
    check.args(["--json", "data", "check"]).arg(&root);
    let mut eval = prsmed();
    eval.arg("eval").arg(&trained().0).arg("--data-root").arg(&root);
    for (command, name) in [(&mut training, "odd-run"), (&mut check, "odd-data"), (&mut eval, "odd-data")] {
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.starts_with("error: ") && error.contains(&format!("{name}\u{fffd}`: is not UTF-8")), "{error}");
        assert!(error.contains("\nhint: rename the file or folder") && output.stdout.is_empty(), "{error}");
    }
    assert!(!out.exists());
}

#[test]
fn files_whose_names_are_not_utf8_are_left_out_or_named() {
    let class = copy(&phantoms().join("brain_MRI"), "odd-names");
    for folder in ["train_images", "train_masks"] {
        let first = fs::read_dir(class.join(folder)).unwrap().next().unwrap().unwrap().path();
        fs::copy(&first, class.join(folder).join(odd("a", ".png"))).unwrap();
    }
    let mut prepare = prsmed();
    prepare.args(["--json", "data", "prepare", "--modality", "brain_MRI", "--images"]).arg(class.join("train_images"));
    prepare.args(["--val-frac", "0", "--test-frac", "0", "--masks"]).arg(class.join("train_masks"));
    let report = objects(&done(prepare.arg("--out").arg(path("odd-names-data")))).pop().unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.len() == 2 && skipped.iter().all(|file| file["reason"] == "its name is not UTF-8"), "{report}");
    assert!(skipped[0]["path"].as_str().unwrap().ends_with("/a\u{fffd}.png"), "{report}");

    let images = folder("odd-images");
    fs::copy(image(), images.join(odd("a", ".png"))).unwrap();
    let mut many = prsmed();
    many.args(["--json", "predict", "--question", "Where is the lesion?", "--max-new-tokens", "2", "--images"]);
    many.arg(&images).arg("--out").arg(path("odd-images-answers")).arg(&trained().0);
    let lines = objects(&done(&mut many));
    assert!(lines.iter().any(|line| line["image"] == "a\u{fffd}.png"), "{lines:?}");
}

/// The command with standard output, and with `errors` standard error too, closed.
fn closed(command: &Command, errors: bool) -> Command {
    let mut shell = Command::new("sh");
    let redirect = if errors { ">&- 2>&- <&-" } else { ">&-" };
    shell.arg("-c").arg(format!("exec \"$0\" \"$@\" {redirect}")).arg(command.get_program()).args(command.get_args());
    shell.current_dir(command.get_current_dir().unwrap());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

#[test]
fn a_closed_standard_output_stops_nothing() {
    let expected = path("mask-open.png");
    done(&mut predict(&expected));
    let expected = fs::read(expected).unwrap();
    for errors in [false, true] {
        let mask = path(&format!("mask-closed-{errors}.png"));
        assert_eq!(closed(&predict(&mask), errors).status().unwrap().code(), Some(0));
        assert_eq!(fs::read(mask).unwrap(), expected);
    }
    let out = path("run-closed");
    let mut training = train(phantoms(), &out, &["train.max_steps=2"]);
    training.arg("--json");
    assert_eq!(closed(&training, true).status().unwrap().code(), Some(0));
    let log = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    assert_eq!(objects(&log).iter().filter(|line| line["kind"] == "step").count(), 2, "{log}");
    // what was said is in no file that took the place of the output
    for (name, bytes) in tree(&out) {
        assert!(!bytes.windows(13).any(|part| part == b"\"kind\":\"saved"), "{name}");
    }
}

#[test]
fn a_reader_that_goes_away_stops_nothing() {
    let mask = path("mask-unread.png");
    let mut child = predict(&mask).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(mask.is_file());
    let mut help = prsmed().arg("--help").stdout(Stdio::piped()).spawn().unwrap();
    drop(help.stdout.take());
    assert_eq!(help.wait().unwrap().code(), Some(0));
}

/// A data root with a class, and folders of images and masks with those of the class and more.
fn addition(name: &str) -> (PathBuf, PathBuf) {
    let source = path(&format!("{name}-source"));
    done(prsmed().args(["data", "phantom", "--count", "120", "--image-size", "128", "--seed", "5"]).arg(&source));
    let class = source.join("brain_MRI");
    let few = folder(&format!("{name}-few"));
    for what in ["train_images", "train_masks"] {
        fs::create_dir_all(few.join(what)).unwrap();
        let mut files: Vec<PathBuf> =
            fs::read_dir(class.join(what)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in &files[..4] {
            fs::copy(file, few.join(what).join(file.file_name().unwrap())).unwrap();
        }
    }
    let root = path(&format!("{name}-root"));
    done(&mut prepare(&few, &root));
    (root, class)
}

fn prepare(class: &Path, root: &Path) -> Command {
    let mut command = prsmed();
    command.args(["data", "prepare", "--modality", "brain_MRI", "--val-frac", "0", "--test-frac", "0", "--images"]);
    command.arg(class.join("train_images")).arg("--masks").arg(class.join("train_masks")).arg("--out").arg(root);
    command
}

/// Starts an addition in a process of its own.
fn append(class: &Path, root: &Path) -> Child {
    let mut command = prepare(class, root);
    command.arg("--append").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn an_addition_that_is_killed_at_any_point_continues() {
    let (root, class) = addition("killed");
    let alone = copy(&root, "killed-alone");
    done(prepare(&class, &alone).arg("--append"));
    let expected = tree(&alone);
    assert!(expected.len() > tree(&root).len() + 16);
    for point in 0..10 {
        let killed = copy(&root, &format!("killed-{point}"));
        let images = killed.join("brain_MRI/train_images");
        let count = || fs::read_dir(&images).unwrap().count();
        let (before, mut child) = (count(), append(&class, &killed));
        // it ends by itself if it is faster than this loop
        while count() < before + point && child.try_wait().unwrap().is_none() {}
        let _ = child.kill();
        child.wait().unwrap();
        done(prsmed().args(["data", "check"]).arg(&killed));
        done(prepare(&class, &killed).arg("--append"));
        assert_eq!(tree(&killed).keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "point {point}");
        assert!(tree(&killed) == expected, "point {point}");
    }
}

#[test]
fn two_additions_at_once_add_each_file_once() {
    let (root, class) = addition("twice");
    let alone = copy(&root, "twice-alone");
    done(prepare(&class, &alone).arg("--append"));
    for attempt in 0..4 {
        let both = copy(&root, &format!("twice-{attempt}"));
        let children = [append(&class, &both), append(&class, &both)];
        let outputs = children.map(|child| child.wait_with_output().unwrap());
        for output in &outputs {
            let error = String::from_utf8_lossy(&output.stderr);
            match output.status.code() {
                Some(0) => {}
                Some(2) => assert!(error.contains("error: ") && error.contains("another process "), "{error}"),
                code => panic!("{code:?}: {error}"),
            }
        }
        assert!(outputs.iter().any(|output| output.status.success()));
        assert!(tree(&both) == tree(&alone), "attempt {attempt}");
    }
}
