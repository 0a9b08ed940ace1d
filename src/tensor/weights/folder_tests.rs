use super::*;
use crate::{Device, Kind};

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn write(staged: &mut Staged, content: &str) {
    staged.write_bytes("state.txt", content.as_bytes()).unwrap();
    let tensor = Tensor::ones([3], (Kind::Float, Device::Cpu));
    staged.write_tensors("part/x.safetensors", &[("a", &tensor)], &BTreeMap::new()).unwrap();
    staged.write_bytes("other.txt", content.as_bytes()).unwrap();
}

fn publish(target: &Path, content: &str) {
    let mut staged = Staged::begin(target).unwrap();
    write(&mut staged, content);
    staged.publish().unwrap();
}

fn state(target: &Path) -> String {
    fs::read_to_string(readable_folder(target).unwrap().join("state.txt")).unwrap()
}

#[test]
fn publishing_replaces_the_whole_folder_and_leaves_no_other_files() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    assert!(readable_folder(&last).is_err());
    for content in ["one", "two"] {
        publish(&last, content);
        assert_eq!(state(&last), content);
        assert_eq!(names(run.path()), ["last"]);
        verify_folder(&last).unwrap();
    }
    assert_eq!(names(&last), [CHECKSUMS, "other.txt", "part", "state.txt"]);
}

#[test]
fn a_dropped_or_killed_writer_keeps_the_old_content() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    publish(&last, "one");
    let mut staged = Staged::begin(&last).unwrap();
    staged.write_bytes("state.txt", b"two").unwrap();
    drop(staged);
    assert_eq!((state(&last).as_str(), names(run.path())), ("one", vec!["last".to_owned()]));

    // killed while writing: the incomplete folder stays until the next writer starts
    fs::create_dir(run.path().join(".last.prsmed-tmp-d3AdaB")).unwrap();
    assert_eq!(state(&last), "one");
    publish(&last, "two");
    assert_eq!(names(run.path()), ["last"]);
}

#[test]
fn a_crash_between_any_two_steps_leaves_a_readable_folder() {
    let run = tempfile::tempdir().unwrap();
    let (last, previous) = (run.path().join("last"), files::previous(&run.path().join("last")));
    // after step 1 only the previous content has a full name
    publish(&last, "one");
    fs::rename(&last, &previous).unwrap();
    assert_eq!(state(&last), "one");
    publish(&last, "two");
    assert_eq!((state(&last).as_str(), names(run.path())), ("two", vec!["last".to_owned()]));
    // after step 2 both exist, and the new content counts
    fs::rename(&last, &previous).unwrap();
    let mut staged = Staged::create(&last).unwrap();
    write(&mut staged, "three");
    staged.publish().unwrap();
    assert_eq!((state(&last).as_str(), names(run.path()).len()), ("three", 2));
    publish(&last, "four");
    assert_eq!((state(&last).as_str(), names(run.path())), ("four", vec!["last".to_owned()]));
}

#[test]
fn the_previous_folder_of_an_older_version_is_read_but_never_touched() {
    let run = tempfile::tempdir().unwrap();
    let (last, previous) = (run.path().join("last"), run.path().join("last.previous"));
    fs::create_dir(&previous).unwrap();
    assert!(readable_folder(&last).is_err(), "a folder of the user");
    fs::remove_dir(&previous).unwrap();
    publish(&last, "one");
    fs::rename(&last, &previous).unwrap();
    assert_eq!(state(&last), "one");
    publish(&last, "two");
    publish(&last, "three");
    assert_eq!((state(&last).as_str(), state(&previous).as_str()), ("three", "one"));
}

#[test]
fn a_new_folder_is_never_published_over_an_existing_one() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("merged");
    let mut first = Staged::create(&out).unwrap();
    let mut second = Staged::create(&out).unwrap();
    write(&mut first, "first");
    write(&mut second, "second");
    first.publish().unwrap();
    assert!(matches!(second.publish().unwrap_err(), Error::Io { action: "publish", .. }));
    assert_eq!((state(&out).as_str(), names(home.path())), ("first", vec!["merged".to_owned()]));
    verify_folder(&out).unwrap();
}

#[test]
fn a_new_folder_clears_what_a_crash_of_an_earlier_attempt_has_left() {
    let home = tempfile::tempdir().unwrap();
    let (out, left) = (home.path().join("merged"), home.path().join(".merged.prsmed-tmp-a1B2c3"));
    for (more, stays) in [(None, false), (Some("thesis.txt"), true)] {
        // complete, but not published
        publish(&left, "one");
        if let Some(name) = more {
            fs::write(left.join(name), "thesis").unwrap();
        }
        drop(Staged::create(&out).unwrap());
        assert_eq!(left.exists(), stays, "{more:?}");
    }
}

#[test]
fn readers_beside_a_writer_see_one_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    publish(&last, "0");
    let writer = std::thread::spawn({
        let last = last.clone();
        move || (1..=100).for_each(|step| publish(&last, &step.to_string()))
    });
    let mut read = 0;
    while !writer.is_finished() || read == 0 {
        let parts = read_unchanged(
            || readable_folder(&last),
            |folder| {
                verify_folder(folder)?;
                let part = |name: &str| {
                    let path = folder.join(name);
                    fs::read_to_string(&path).map_err(Error::io(path, "read"))
                };
                Ok((part("state.txt")?, part("other.txt")?))
            },
        );
        let (state, other) = parts.unwrap();
        assert_eq!(state, other, "two parts of one checkpoint");
        read += 1;
    }
    writer.join().unwrap();
}

#[test]
fn a_folder_that_does_not_change_is_read_once() {
    let run = tempfile::tempdir().unwrap();
    let times = std::cell::Cell::new(0);
    let found: Result<()> = read_unchanged(
        || Ok(run.path().to_owned()),
        |_| {
            times.set(times.get() + 1);
            Err(Error::Interrupted)
        },
    );
    assert!(matches!(found, Err(Error::Interrupted)) && times.get() == 1);
    let gone = read_unchanged(|| Ok(run.path().join("none")), |_| Ok(()));
    assert!(gone.unwrap_err().to_string().contains("was replaced"));
}

#[test]
fn checksums_name_regular_files_of_their_folder_only() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    publish(&last, "one");
    let sum = r#"{"bytes": 0, "sha256": "x"}"#;
    for name in ["../../../dev/zero", "/dev/zero", "a/../../b", "./a", ".", ""] {
        fs::write(last.join(CHECKSUMS), format!(r#"{{"files": {{"{name}": {sum}}}}}"#)).unwrap();
        let text = verify_folder(&last).unwrap_err().to_string();
        assert!(text.contains("is not a file in its folder"), "{name}: {text}");
    }
    std::os::unix::fs::symlink("/dev/zero", last.join("zero")).unwrap();
    fs::write(last.join(CHECKSUMS), format!(r#"{{"files": {{"zero": {sum}}}}}"#)).unwrap();
    assert!(matches!(verify_folder(&last).unwrap_err(), Error::Io { action: "read", .. }));
}

#[test]
fn verification_names_every_bad_file() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    publish(&last, "one");
    fs::write(last.join("state.txt"), "two").unwrap();
    fs::write(last.join("other.txt"), "longer than it was before").unwrap();
    fs::remove_file(last.join("part/x.safetensors")).unwrap();
    let text = verify_folder(&last).unwrap_err().to_string();
    for part in ["`state.txt` has another content", "`other.txt` has 25 bytes", "`part/x.safetensors` is missing"] {
        assert!(text.contains(part), "{text}");
    }
    fs::remove_file(last.join(CHECKSUMS)).unwrap();
    assert!(verify_folder(&last).unwrap_err().to_string().contains("no complete checkpoint"));
}

#[test]
fn a_full_disk_gives_an_error_with_a_hint() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        return;
    }
    let tensor = Tensor::ones([3], (Kind::Float, Device::Cpu));
    let mut out = File::options().write(true).open(full).unwrap();
    let error = stream(full, &mut out, &[("a", &tensor)], &BTreeMap::new()).unwrap_err();
    assert!(matches!(&error, Error::Io { action: "write", .. }), "{error}");
    assert!(error.hint().contains("free some space"), "{}", error.hint());
}
