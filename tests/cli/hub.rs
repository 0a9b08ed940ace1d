//! `prsmed hub` without a server: local folders and errors. `tests/hub.rs` tests downloads.

use std::fs;

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use crate::support::{done, folder, objects, prsmed, refused, run};

/// The Git hash of the text `hello`.
const HELLO: &str = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A cache with one small file, and its blob.
fn cached(name: &str) -> (PathBuf, PathBuf) {
    let cache = folder(name);
    let repository = cache.join("hub/models--owner--name");
    let (snapshot, blob) = (repository.join("snapshots").join(COMMIT), repository.join("blobs").join(HELLO));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("blobs")).unwrap();
    fs::write(&blob, "hello").unwrap();
    symlink(format!("../../blobs/{HELLO}"), snapshot.join("config.json")).unwrap();
    (cache, blob)
}

#[test]
fn verify_names_damaged_files_and_the_commands_that_replace_them() {
    let (cache, blob) = cached("verified");
    let mut verify = prsmed();
    verify.args(["hub", "verify", "hub:owner/name"]).env("HF_HOME", &cache);
    assert_eq!(done(&mut verify), "1 good, 0 damaged, 0 without a hash\n");
    fs::write(&blob, "jello").unwrap();
    let ran = run(&mut verify);
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let (start, commands) = ran.stdout.split_once("to replace the damaged files:\n").unwrap();
    assert!(start.starts_with("damaged  config.json: its Git hash is "), "{start}");
    assert!(start.ends_with("0 good, 1 damaged, 0 without a hash\n"), "{start}");
    let get = format!("prsmed hub get hub:owner/name@{COMMIT} --include 'config.json'");
    assert_eq!(commands, format!("  rm -f '{}'\n  {get}\n", blob.display()));
    let ran = run(verify.arg("--json"));
    let result = objects(&ran.stdout).pop().unwrap();
    assert_eq!((ran.code, &result["damaged"], &result["commands"][1]), (Some(1), &1.into(), &get.into()));
    let file = &result["files"][0];
    assert_eq!(
        (&file["name"], &file["state"], &file["commit"]),
        (&"config.json".into(), &"damaged".into(), &COMMIT.into())
    );
    refused(
        prsmed().args(["hub", "verify", "hub:owner/other"]).env("HF_HOME", &cache),
        "error: `hub:owner/other`: the cache has no files of it\n\
         hint: download them with `prsmed hub get hub:owner/other`",
    );
}

#[test]
fn a_local_folder_is_listed_and_resolves_to_itself() {
    let folder = folder("repository");
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::write(folder.join("model.safetensors"), vec![0; 1536]).unwrap();
    insta::assert_snapshot!(done(prsmed().args(["hub", "ls"]).arg(&folder)), @r"
         2 B  config.json
    1.50 KiB  model.safetensors
    1.50 KiB  in 2 files
    ");
    let found = objects(&done(prsmed().args(["--json", "hub", "ls"]).arg(&folder)));
    assert_eq!((&found[0]["total_bytes"], &found[0]["files"][0]["bytes"]), (&1538.into(), &2.into()));
    assert_eq!(done(prsmed().args(["hub", "get"]).arg(&folder)), format!("{}\n", folder.display()));
}

#[test]
fn invalid_repository_names_are_refused() {
    refused(
        prsmed().args(["hub", "ls", "hub:name"]),
        "error: `hub:name`: does not name a hub repository\n\
         hint: write `hub:owner/name`, `hub:owner/name/FILE`, or one of them with `@revision` at the end",
    );
    refused(
        prsmed().args(["hub", "get", "owner/name"]),
        "error: owner/name: there is no such file or folder\n\
         hint: check the path; a repository of the hub is written `hub:owner/name`",
    );
}

#[test]
fn a_missing_connection_or_cache_is_reported() {
    refused(
        prsmed().args(["hub", "get", "hub:owner/name"]).env("HF_HUB_OFFLINE", "1"),
        "error: `hub:owner/name`: is not in the cache `~/hf/hub`\n\
         hint: run `prsmed hub get hub:owner/name` with a connection and without HF_HUB_OFFLINE; from another machine, copy its cache",
    );
    // Nothing listens on the discard port.
    refused(
        prsmed().args(["hub", "ls", "hub:owner/name"]).env("HF_ENDPOINT", "http://127.0.0.1:9"),
        "error: `hub:owner/name`: `http://127.0.0.1:9` cannot be reached: io: Connection refused (os error 111)\n\
         hint: check the network, the proxy and HF_ENDPOINT, or give a local folder",
    );
}
