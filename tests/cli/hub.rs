//! `prsmed hub` without a server: local folders and errors. `tests/hub.rs` tests downloads.

use std::fs;

use crate::support::{done, folder, objects, prsmed, refused};

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
         hint: unset HF_HUB_OFFLINE, or run `prsmed hub get` on a machine with a connection and copy the cache",
    );
    // Nothing listens on the discard port.
    refused(
        prsmed().args(["hub", "ls", "hub:owner/name"]).env("HF_ENDPOINT", "http://127.0.0.1:9"),
        "error: `hub:owner/name`: `http://127.0.0.1:9` cannot be reached: io: Connection refused (os error 111)\n\
         hint: check the network, the proxy and HF_ENDPOINT, or give a local folder",
    );
}
