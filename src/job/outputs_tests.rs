use super::*;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// A scan, a series, a data root, a run with its base, and spellings of them.
fn files() -> TempDir {
    let home = tempfile::tempdir().unwrap();
    for name in [
        "scan.png",
        "series/1.dcm",
        "data/annotations/a.csv",
        "data/ct/train_images/a.png",
        "data/notes/text.txt",
        "run/config.toml",
        "run/best/model.safetensors",
        "base/config.json",
        "base/model.safetensors",
        "pair.hdr",
        "pair.img",
        "other/best/model.safetensors",
        "table.csv",
        "made.toml",
    ] {
        let path = home.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    symlink("scan.png", home.path().join("link.png")).unwrap();
    symlink("series", home.path().join("to_series")).unwrap();
    fs::hard_link(home.path().join("scan.png"), home.path().join("hard.png")).unwrap();
    fs::hard_link(home.path().join("series/1.dcm"), home.path().join("copy.dcm")).unwrap();
    home
}

fn input(home: &TempDir, path: &str, read: Read) -> InputPath {
    InputPath { name: "--image".into(), path: home.path().join(path), read }
}

fn output(home: &TempDir, path: &str, written: Written) -> OutputPath {
    OutputPath { name: "--out".into(), path: home.path().join(path), written }
}

#[test]
fn a_file_that_is_an_input_is_refused_in_every_spelling() {
    let home = files();
    for (read, written) in [
        ("scan.png", "scan.png"),
        ("scan.png", "series/../scan.png"),
        ("scan.png", "./scan.png"),
        ("scan.png", "link.png"),
        ("link.png", "scan.png"),
        ("scan.png", "hard.png"),
        ("series", "series/1.dcm"),
        ("series", "to_series/1.dcm"),
        ("to_series", "series/1.dcm"),
        ("series", "copy.dcm"),
        ("series", "series"),
        ("pair.hdr", "pair.img"),
        ("pair.img", "pair.hdr"),
        ("table.csv", "nothing/../table.csv"),
    ] {
        let found = check(&[input(&home, read, Read::Files)], &[output(&home, written, Written::File)]);
        let text = found.expect_err(&format!("{read} {written}")).to_string();
        let both = [format!("{read}` of `--image`"), format!("{written}` is")];
        assert!(text.starts_with("`--out`: ") && both.iter().all(|name| text.contains(name)), "{text}");
    }
    for (read, written) in [
        ("scan.png", "scan_mask.png"),
        ("scan.png", "SCAN2.png"),
        ("series", "series/mask.nii.gz"),
        ("scan.png", "new/a"),
    ] {
        check(&[input(&home, read, Read::Files)], &[output(&home, written, Written::File)]).unwrap();
    }
}

#[test]
fn weights_and_data_roots_keep_their_files_and_may_have_other_outputs() {
    let home = files();
    for (read, path, written, is_allowed) in [
        (Read::Weights, "run", "run/best/model.safetensors", false),
        (Read::Weights, "run", "run/config.toml", false),
        (Read::Weights, "run", "run/mask.png", true),
        (Read::Weights, "run", "run/best/new.png", false),
        (Read::Weights, "base", "base/new.png", false),
        (Read::DataRoot, "data", "data/annotations/new.jsonl", false),
        (Read::DataRoot, "data", "data/ct/train_images/new.png", false),
        (Read::DataRoot, "data", "data/new.png", true),
        (Read::Weights, "base", "base/config.json", false),
        (Read::DataRoot, "data", "data/ct/train_images/a.png", false),
        (Read::DataRoot, "data", "data/annotations/a.csv", false),
        (Read::DataRoot, "data", "data/notes/text.txt", true),
    ] {
        let found = check(&[input(&home, path, read)], &[output(&home, written, Written::File)]);
        assert_eq!(found.is_ok(), is_allowed, "{written}");
    }
    for (read, path, written, is_allowed) in [
        (Read::Weights, "run", "run", false),
        (Read::Weights, "run", "run/best/eval", false),
        (Read::Weights, "run", "run/eval-test", true),
        (Read::Weights, "run", ".", false),
        (Read::DataRoot, "data", "data", false),
        (Read::DataRoot, "data", "data/ct", false),
        (Read::DataRoot, "data", "data/annotations/new", false),
        (Read::DataRoot, "data", "data/pairs", true),
        (Read::Files, "series", "to_series", false),
        (Read::Files, "series", "series/results", false),
        (Read::Files, "series", "series-results", true),
        // not an input, but a folder of weights
        (Read::Files, "series", "other", false),
        (Read::Files, "series", "base", false),
    ] {
        let found = check(&[input(&home, path, read)], &[output(&home, written, Written::Folder)]);
        assert_eq!(found.is_ok(), is_allowed, "{written}");
    }
}

#[test]
fn a_folder_of_which_parts_are_written_may_have_inputs_elsewhere() {
    let home = files();
    let parts = || Written::Parts(vec!["ct".into(), "annotations".into()]);
    for (read, is_allowed) in
        [("data/notes", true), ("data/ct/train_images", false), ("data/annotations/a.csv", false), ("data", false)]
    {
        let found = check(&[input(&home, read, Read::Files)], &[output(&home, "data", parts())]);
        assert_eq!(found.is_ok(), is_allowed, "{read}");
    }
    // the folder that is written is a link to the input
    symlink("../series", home.path().join("data/mr")).unwrap();
    let linked = output(&home, "data", Written::Parts(vec!["mr".into()]));
    assert!(check(&[input(&home, "series", Read::Files)], &[linked]).is_err());
    for (config, is_allowed) in [("run/my.toml", true), ("run/config.toml", false)] {
        fs::write(home.path().join("run/my.toml"), "").unwrap();
        let found = check(&[input(&home, config, Read::Files)], &[output(&home, "run", Written::Run)]);
        assert_eq!(found.is_ok(), is_allowed, "{config}");
    }
    assert!(check(&[], &[output(&home, "base", Written::Run)]).unwrap_err().to_string().contains("weights of a model"));
}

#[test]
fn two_outputs_have_two_names() {
    let home = files();
    let pair = |a: (&str, Written), b: (&str, Written)| {
        check(&[], &[output(&home, a.0, a.1), OutputPath { name: "--second".into(), ..output(&home, b.0, b.1) }])
    };
    for (a, b) in [("m.png", "m.png"), ("m.png", "series/../m.png"), ("to_series/m", "series/m"), ("m.png", "M.PNG")] {
        let text = pair((a, Written::File), (b, Written::File)).unwrap_err().to_string();
        assert!(text.contains("`--second`") && text.contains("`--out`"), "{text}");
    }
    pair(("m.png", Written::File), ("o.png", Written::File)).unwrap();
    pair(("/dev/null", Written::File), ("/dev/null", Written::File)).unwrap();
    for (file, is_allowed) in [("new/memory.jsonl", true), ("new/metrics.jsonl", false), ("new/last/a.json", false)] {
        assert_eq!(pair(("new", Written::Run), (file, Written::File)).is_ok(), is_allowed, "{file}");
    }
}

#[test]
fn images_of_a_table_are_not_in_the_output_folder() {
    let home = files();
    let listed = |out: &str| {
        let images = ["scan.png", "series/1.dcm"].map(|name| home.path().join(name));
        check_listed("--images", images.iter().map(PathBuf::as_path), &output(&home, out, Written::Folder))
    };
    assert!(listed("to_series").unwrap_err().to_string().contains("series/1.dcm`, an image of `--images`"));
    assert!(listed(".").is_err());
    listed("results").unwrap();
    listed("data").unwrap();
}

#[test]
fn paths_of_settings_are_found() {
    let home = files();
    let settings = home.path().join("made.toml");
    let base = home.path().join("base").display().to_string();
    fs::write(&settings, format!("[model]\nbase = \"{base}\"\nnone = \"random\"\nall = [\"{base}=0.5\"]\n")).unwrap();
    assert_eq!(paths_in(&settings), [PathBuf::from(&base), PathBuf::from(&base)]);
    assert_eq!(existing(&format!("{base}#2")), Some(base.into()));
    assert_eq!(existing("hub:owner/name"), None);
}

#[test]
fn what_links_below_an_input_lead_to_is_not_replaced() {
    let home = files();
    let link = |to: &str, at: &str| {
        fs::create_dir_all(home.path().join(at).parent().unwrap()).unwrap();
        symlink(home.path().join(to), home.path().join(at)).unwrap();
    };
    for (file, at) in [
        ("store/1.dcm", "series/2.dcm"),
        ("store/ev/samples.csv", "data/annotations/b.csv"),
        ("store/n/metrics.jsonl", "data/annotations/c.csv"),
        ("store/images/a.png", "data/ct/val_images"),
        ("store/config.toml", "run/best/questions.json"),
    ] {
        let path = home.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, file).unwrap();
        link(if at.ends_with("images") { "store/images" } else { file }, at);
    }
    // a link to a link
    link("series/2.dcm", "series/deep/3.dcm");
    for (read, path, out, written, is_allowed) in [
        (Read::Files, "series", "store/1.dcm", Written::File, false),
        (Read::Files, "series", "store/2.dcm", Written::File, true),
        (Read::Files, "series", "store", Written::Folder, false),
        (Read::DataRoot, "data", "store/ev", Written::Folder, false),
        (Read::DataRoot, "data", "store/ev/samples.csv", Written::File, false),
        (Read::DataRoot, "data", "store/n", Written::Run, false),
        (Read::DataRoot, "data", "store/ev", Written::Run, true),
        (Read::DataRoot, "data", "store/images/a.png", Written::File, false),
        (Read::DataRoot, "data", "store/images/new.png", Written::File, false),
        (Read::DataRoot, "data", "store/images", Written::Folder, false),
        (Read::DataRoot, "data", "store", Written::Parts(vec!["images".into()]), false),
        (Read::DataRoot, "data", "store", Written::Parts(vec!["annotations".into()]), true),
        (Read::Weights, "run", "store/config.toml", Written::File, false),
        (Read::Weights, "run", "store/elsewhere", Written::Folder, true),
    ] {
        let found = check(&[input(&home, path, read)], &[output(&home, out, written.clone())]);
        assert_eq!(found.is_ok(), is_allowed, "{path} {out} {written:?}: {found:?}");
    }
}

#[test]
fn nothing_is_written_into_a_checkpoint() {
    let home = files();
    fs::write(home.path().join("run/best/checksums.json"), "{}").unwrap();
    for (out, written, is_allowed) in [
        ("run/best/model.json", Written::File, false),
        ("run/best/pairs", Written::Folder, false),
        ("run/mask.png", Written::File, true),
    ] {
        assert_eq!(check(&[], &[output(&home, out, written)]).is_ok(), is_allowed, "{out}");
    }
}
