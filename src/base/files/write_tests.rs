use super::*;
use std::os::unix::fs::symlink;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn new_folder(target: &Path, content: &str) -> NewFolder {
    let folder = NewFolder::create(target).unwrap();
    for name in [CHECKSUMS, "state.txt"] {
        write(&folder.path().join(name), content.as_bytes()).unwrap();
    }
    folder
}

fn state(folder: &Path) -> String {
    fs::read_to_string(folder.join("state.txt")).unwrap()
}

#[test]
fn a_failed_write_keeps_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    write(&path, b"old").unwrap();
    let mut file = NewFile::create(&path).unwrap();
    file.write_all(b"half").unwrap();
    drop(file);
    assert_eq!((fs::read(&path).unwrap().as_slice(), names(folder.path())), (&b"old"[..], vec!["x.json".to_owned()]));
}

#[test]
fn links_are_replaced_or_refused_but_never_written_through() {
    let folder = tempfile::tempdir().unwrap();
    let [precious, path] = ["precious", "x.json"].map(|name| folder.path().join(name));
    fs::write(&precious, "thesis").unwrap();
    symlink(&precious, &path).unwrap();
    assert!(open_to_change(&path).unwrap_err().to_string().contains("is a symbolic link"));
    write(&path, b"new").unwrap();
    assert_eq!(
        (fs::read_to_string(&precious).unwrap(), fs::read_to_string(&path).unwrap()),
        ("thesis".into(), "new".into())
    );
    assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    // a link to a device is replaced too, unless the user named it
    fs::remove_file(&path).unwrap();
    symlink("/dev/full", &path).unwrap();
    assert_eq!(write_output(&path, b"x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    write(&path, b"new").unwrap();
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
}

#[test]
fn pipes_are_not_opened_for_writing() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert!(open_to_change(&pipe).unwrap_err().to_string().contains("not a regular file"));
    write(&pipe, b"new").unwrap();
    assert_eq!(fs::read(&pipe).unwrap(), b"new", "replaced, not opened");
}

#[test]
fn folders_are_created_with_their_parents() {
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("a/b/c");
    create_folders(&deep).unwrap();
    create_folders(&deep).unwrap();
    assert!(deep.is_dir());
    fs::write(folder.path().join("file"), "").unwrap();
    assert_eq!(create_folders(&folder.path().join("file")).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(create_folders(&folder.path().join("file/run")).unwrap_err().kind(), io::ErrorKind::NotADirectory);
}

#[test]
fn folders_below_a_root_are_never_links() {
    let folder = tempfile::tempdir().unwrap();
    let [root, other] = ["root", "other"].map(|name| folder.path().join(name));
    for folder in [&root, &other] {
        fs::create_dir(folder).unwrap();
    }
    create_below(&root, &root.join("a/b")).unwrap();
    assert!(root.join("a/b").is_dir());
    symlink(&other, root.join("link")).unwrap();
    assert!(create_below(&root, &root.join("link/b")).unwrap_err().to_string().contains("is a symbolic link"));
    assert!(create_below(&root, &root.join("../other/b")).is_err() && create_below(&root, &other).is_err());
    assert_eq!(names(&other), [""; 0]);
}

#[test]
fn a_folder_is_replaced_as_a_whole() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    for content in ["one", "two"] {
        new_folder(&last, content).replace().unwrap();
        assert_eq!((state(&last).as_str(), names(run.path())), (content, vec!["last".to_owned()]));
        assert_eq!(names(&last), [CHECKSUMS, "state.txt"]);
    }
    drop(new_folder(&last, "three"));
    assert_eq!((state(&last).as_str(), names(run.path())), ("two", vec!["last".to_owned()]));
}

#[test]
fn folders_of_others_are_never_renamed_or_deleted() {
    let home = tempfile::tempdir().unwrap();
    let last = home.path().join("last");
    let others = ["last.previous", "last.tmp-notes", ".last.prsmed-tmp-notes", ".last.prsmed-tmp-abcdef"];
    for name in others {
        fs::create_dir(home.path().join(name)).unwrap();
        fs::write(home.path().join(name).join("thesis.txt"), "thesis").unwrap();
    }
    clear_leftovers(home.path()).unwrap();
    new_folder(&last, "one").replace().unwrap();
    new_folder(&last, "two").replace().unwrap();
    clear_leftovers(home.path()).unwrap();
    for name in others {
        assert_eq!(fs::read_to_string(home.path().join(name).join("thesis.txt")).unwrap(), "thesis", "{name}");
    }
    // the same for the names that are written
    for name in ["mine", ".last.prsmed-previous"] {
        fs::create_dir(home.path().join(name)).unwrap();
        fs::write(home.path().join(name).join("thesis.txt"), "thesis").unwrap();
    }
    for target in [&home.path().join("mine"), &last] {
        let error = new_folder(target, "three").replace().unwrap_err();
        assert!(error.to_string().contains("was not written by prsmed"), "{error}");
    }
    symlink(home.path().join("mine"), home.path().join("link")).unwrap();
    assert!(new_folder(&home.path().join("link"), "three").replace().is_err());
    assert_eq!((state(&last).as_str(), names(&home.path().join("mine"))), ("two", vec!["thesis.txt".to_owned()]));
}

#[test]
fn two_writers_of_a_new_folder_do_not_destroy_each_other() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("merged");
    let (first, second) = (new_folder(&out, "first"), new_folder(&out, "second"));
    clear_leftovers(home.path()).unwrap();
    first.publish().unwrap();
    assert_eq!(state(second.path()), "second", "the second writer still has its files");
    assert_eq!(second.publish().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!((state(&out).as_str(), names(home.path())), ("first", vec!["merged".to_owned()]));
}

#[test]
fn leftovers_of_a_crash_are_cleared_and_files_in_use_stay() {
    let run = tempfile::tempdir().unwrap();
    let path = |name: &str| run.path().join(name);
    for (folder, marker) in [("unfinished", UNFINISHED), ("complete", CHECKSUMS)] {
        fs::create_dir(path(&format!(".{folder}.prsmed-tmp-a1B2c3"))).unwrap();
        fs::write(path(&format!(".{folder}.prsmed-tmp-a1B2c3/{marker}")), "").unwrap();
    }
    fs::create_dir(path(".empty.prsmed-tmp-a1B2c3")).unwrap();
    fs::write(path(".config.toml.prsmed-tmp-a1B2c3"), "half").unwrap();
    symlink("/etc/passwd", path(".link.prsmed-tmp-a1B2c3")).unwrap();
    let mine = ["config.toml.tmp-a1B2c3", ".prsmed-tmp-a1B2c3", ".x.prsmed-tmp-a1B2c", ".x.prsmed-tmp-a1B2c.3"];
    for name in mine {
        fs::write(path(name), "mine").unwrap();
    }
    let (mut file, folder) = (NewFile::create(&path("in-use")).unwrap(), new_folder(&path("last"), "one"));
    clear_leftovers(run.path()).unwrap();
    file.write_all(b"whole").unwrap();
    file.publish().unwrap();
    folder.replace().unwrap();
    let mut expected = [&mine[..], &[".link.prsmed-tmp-a1B2c3", "in-use", "last"]].concat();
    expected.sort_unstable();
    assert_eq!(names(run.path()), expected);
}

#[test]
fn previous_content_is_cleared_when_the_new_content_is_complete() {
    let run = tempfile::tempdir().unwrap();
    let last = run.path().join("last");
    new_folder(&last, "one").replace().unwrap();
    fs::rename(&last, previous(&last)).unwrap();
    clear_leftovers(run.path()).unwrap();
    assert_eq!(state(&previous(&last)), "one", "it is the only content");
    new_folder(&last, "two").publish().unwrap();
    clear_leftovers(run.path()).unwrap();
    assert_eq!((state(&last).as_str(), names(run.path())), ("two", vec!["last".to_owned()]));
}

#[test]
fn leftovers_of_one_target_are_cleared_and_folders_of_others_stay() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    let folder = |name: &str, file: &str| {
        fs::create_dir(path(name)).unwrap();
        fs::write(path(name).join(file), "").unwrap();
    };
    folder(".out.prsmed-tmp-aaaaaa", UNFINISHED);
    folder(".out.prsmed-tmp-bbbbbb", CHECKSUMS);
    folder(".out.prsmed-tmp-cccccc", "thesis.txt");
    folder(".other.prsmed-tmp-dddddd", UNFINISHED);
    fs::create_dir(path(".out.prsmed-tmp-eeeeee")).unwrap();
    let in_use = new_folder(&path("out"), "one");
    clear_leftovers_of(&path("out"), |_| false).unwrap();
    let stays = [".other.prsmed-tmp-dddddd", ".out.prsmed-tmp-bbbbbb", ".out.prsmed-tmp-cccccc"];
    in_use.publish().unwrap();
    assert_eq!(names(home.path()), [&stays[..], &["out"]].concat());
    clear_leftovers_of(&path("out"), |folder| folder.ends_with(".out.prsmed-tmp-bbbbbb")).unwrap();
    assert_eq!(names(home.path()), [stays[0], stays[2], "out"]);
}

#[test]
fn file_systems_that_cannot_sync_folders_are_tolerated() {
    for number in [libc::EINVAL, libc::ENOTSUP] {
        tolerate_no_sync(Err(io::Error::from_raw_os_error(number))).unwrap();
    }
    assert!(tolerate_no_sync(Err(io::Error::from_raw_os_error(libc::EIO))).is_err());
}
