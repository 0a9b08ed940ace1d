//! Tests of the hub client against a small hub server on loopback.

#![expect(clippy::unwrap_used, reason = "a test panics where an application would report")]

mod loopback;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use loopback::{COMMIT, Redirect, Server, Stored, large, small};
use prsmed::error::Error;
use prsmed::event::{Event, Observer, Silent};
use prsmed::hub::{Files, HubOptions, RemoteFile, State, Timeouts, find, ls, pinned, resolve, verify};
use prsmed::tensor::weights::{Archive, write_safetensors};
use prsmed::tensor::{Device, Kind, Tensor};

const SPEC: &str = "hub:owner/name";

fn failure(result: prsmed::Result<PathBuf>) -> (String, String) {
    let error = result.unwrap_err();
    (error.to_string(), error.hint())
}

#[derive(Default)]
struct EventLog(Mutex<Vec<Event>>);

impl Observer for EventLog {
    fn on(&self, event: &Event) {
        self.0.lock().unwrap().push(event.clone());
    }
}

#[test]
fn a_data_set_has_a_name_and_a_cache_folder_of_its_own() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    server.add("datasets/owner/name", "annotations/a.csv", small("a,b"));
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    let folder = resolve("dataset:owner/name", &Files::All, &options, &Silent).unwrap();
    assert_eq!(folder, cache.path().join("datasets--owner--name/snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(folder.join("annotations/a.csv")).unwrap(), "a,b");
    assert!(!folder.join("config.json").exists());
    let listed = ls("dataset:owner/name", &options, &Silent).unwrap();
    assert_eq!(listed, [RemoteFile { name: "annotations/a.csv".into(), size: Some(3) }]);
    let verified = verify("dataset:owner/name", &options, &Silent).unwrap();
    assert!(verified.len() == 1 && verified[0].state == State::Good, "{verified:?}");
    let (text, hint) = failure(resolve("dataset:owner/other", &Files::All, &options, &Silent));
    assert!(text.starts_with("`dataset:owner/other`: the repository does not exist"), "{text}");
    let (_, model) = failure(resolve("hub:owner/other", &Files::All, &options, &Silent));
    assert!(model.contains("a data set is written `dataset:owner/name`") && hint == model, "{hint} {model}");
}

#[test]
fn files_are_downloaded_through_redirects_into_pythons_cache_layout() {
    let weights = Stored { redirect: Some(Redirect::Absolute), ..large(3_000_000) };
    let nested = Stored { redirect: Some(Redirect::Relative), ..small("nested") };
    let server =
        Server::start(vec![("config.json", small("{}")), ("model.safetensors", weights.clone()), ("a/b.json", nested)]);
    let cache = tempfile::tempdir().unwrap();
    let log = EventLog::default();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &log).unwrap();

    assert_eq!(folder, cache.path().join("models--owner--name/snapshots").join(COMMIT));
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    assert_eq!(fs::read_to_string(folder.join("a/b.json")).unwrap(), "nested");
    let link = fs::read_link(folder.join("a/b.json")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert_eq!(fs::read_to_string(cache.path().join("models--owner--name/refs/main")).unwrap(), COMMIT);
    assert!(cache.path().join("models--owner--name/blobs").join(&weights.etag).is_file());

    let events = log.0.into_inner().unwrap();
    let total: u64 = 3_000_000 + 2 + 6;
    assert!(matches!(&events[0], Event::Started { phase, total: t, unit: "bytes" }
            if phase == "download owner/name" && *t == total));
    let done: Vec<u64> =
        events.iter().filter_map(|e| if let Event::Advanced { done } = e { Some(*done) } else { None }).collect();
    assert!(done.len() >= 5 && done.is_sorted() && done.last() == Some(&total), "{done:?}");
    assert!(matches!(events.last(), Some(Event::Finished)));

    // the second time nothing is downloaded
    let before = server.downloads().len();
    assert_eq!(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap(), folder);
    assert_eq!(server.downloads().len(), before);
    // nor offline, nor with the commit as revision
    let offline = HubOptions { offline: true, endpoint: "http://127.0.0.1:9".into(), ..HubOptions::new(cache.path()) };
    assert_eq!(resolve(SPEC, &Files::Checkpoint, &offline, &Silent).unwrap(), folder);
    let pinned = format!("{SPEC}@{COMMIT}");
    assert_eq!(resolve(&pinned, &Files::Checkpoint, &offline, &Silent).unwrap(), folder);
    assert_eq!(ls(SPEC, &offline, &Silent).unwrap().len(), 3);
}

#[test]
fn an_interrupted_download_is_resumed() {
    let weights = Stored { cuts: vec![700_000, 0, 800_000], redirect: Some(Redirect::Absolute), ..large(2_000_000) };
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    let cache = tempfile::tempdir().unwrap();
    let log = EventLog::default();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &log).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    let mut ranges: Vec<String> = server.downloads().into_iter().map(|(_, range)| range).collect();
    ranges.dedup();
    assert_eq!(ranges, ["", "bytes=700000-", "bytes=1500000-"]);
    let notes = log.0.into_inner().unwrap();
    let notes = notes.iter().filter(|event| matches!(event, Event::Note(text) if text.contains("resuming"))).count();
    assert_eq!(notes, 3);
}

#[test]
fn the_next_run_continues_a_killed_download() {
    let weights = large(500_000);
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    for (held, ranges) in [(200_000, vec!["bytes=200000-"]), (500_000, vec![])] {
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("models--owner--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(&weights.etag).with_extension("incomplete"), &weights.content[..held]).unwrap();
        server.with(|state| state.log.clear());
        let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
        let asked: Vec<String> = server.downloads().into_iter().map(|(_, range)| range).collect();
        assert_eq!(asked, ranges, "{held} bytes were already downloaded");
    }
}

#[test]
fn a_wrong_part_or_a_server_without_ranges_restarts_the_download() {
    for ignores_ranges in [false, true] {
        let weights = Stored { ignores_ranges, ..large(500_000) };
        let server = Server::start(vec![("model.safetensors", weights.clone())]);
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("models--owner--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(&weights.etag).with_extension("incomplete"), vec![7; 1000]).unwrap();
        let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    }
}

#[test]
fn content_with_a_wrong_hash_is_an_error() {
    let weights = Stored { etag: "0".repeat(64), ..large(1000) };
    let server = Server::start(vec![("model.safetensors", weights)]);
    let cache = tempfile::tempdir().unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("`model.safetensors` is not the file that the hub lists"), "{text}");
    assert!(text.contains("its SHA-256 is") && text.contains(&"0".repeat(64)), "{text}");
    assert!(!cache.path().join("models--owner--name/refs/main").exists());
}

#[test]
fn a_small_file_with_a_wrong_git_hash_is_an_error() {
    let config = Stored { content: br#"{"hidden_size":1}"#.to_vec(), ..small(r#"{"hidden_size":2}"#) };
    let server = Server::start(vec![("config.json", config)]);
    let cache = tempfile::tempdir().unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("`config.json` is not the file that the hub lists") && text.contains("Git hash"), "{text}");
    let blobs = fs::read_dir(cache.path().join("models--owner--name/blobs")).unwrap().count();
    assert_eq!(blobs, 0, "nothing of it stays in the cache");
}

#[test]
fn the_token_is_sent_to_the_hub_and_to_no_other_port() {
    let weights = large(300_000);
    let network = Server::start(vec![("model.safetensors", weights.clone())]);
    let redirect = Some(Redirect::Other(network.address.clone()));
    let cut = Stored { cuts: vec![100_000], ..weights.clone() };
    network.add("owner/name", "model.safetensors", cut);
    let hub = Server::start(vec![
        ("config.json", small("{}")),
        ("model.safetensors", Stored { redirect, ..weights.clone() }),
    ]);
    hub.with(|state| state.token = Some("secret".into()));
    let cache = tempfile::tempdir().unwrap();
    let options = HubOptions { token: Some("secret".into()), ..hub.options(cache.path()) };
    let folder = resolve(SPEC, &Files::All, &options, &Silent).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    assert!(hub.with(|state| state.log.iter().all(|request| request.headers.contains_key("authorization"))));
    let asked = network.with(|state| state.log.clone());
    assert_eq!(asked.len(), 2, "a download and its continuation: {asked:?}");
    assert!(asked.iter().all(|request| !request.headers.contains_key("authorization")), "{asked:?}");
    assert!(!format!("{asked:?}").contains("secret"), "{asked:?}");
}

fn impatient(options: HubOptions) -> HubOptions {
    let short = Duration::from_millis(200);
    HubOptions { timeouts: Timeouts { connect: short, response: short, idle: short }, ..options }
}

#[test]
fn a_server_that_accepts_and_stays_silent_is_an_error() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    server.with(|state| state.silent = true);
    let cache = tempfile::tempdir().unwrap();
    let (text, hint) = failure(resolve(SPEC, &Files::All, &impatient(server.options(cache.path())), &Silent));
    assert!(text.contains("cannot be reached: no ") && text.contains("200ms (HF_HUB_"), "{text}");
    assert!(hint.contains("network"), "{hint}");
}

#[test]
fn a_download_that_stalls_is_resumed() {
    let weights = Stored { cuts: vec![100_000], stalls: true, ..large(300_000) };
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    let (cache, log) = (tempfile::tempdir().unwrap(), EventLog::default());
    let folder = resolve(SPEC, &Files::All, &impatient(server.options(cache.path())), &log).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    let events = log.0.into_inner().unwrap();
    let stalled = |event: &Event| matches!(event, Event::Note(text) if text.contains("no data for 200ms"));
    assert!(events.iter().any(stalled), "{events:?}");
}

#[test]
fn a_redirect_loop_ends_after_five_redirects() {
    let weights = Stored { redirect: Some(Redirect::Itself), ..large(10) };
    let server = Server::start(vec![("model.safetensors", weights)]);
    let cache = tempfile::tempdir().unwrap();
    let (text, hint) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("`model.safetensors`: the server redirected more than 5 times"), "{text}");
    assert!(hint.contains("HF_ENDPOINT"), "{hint}");
    let asked = server.with(|state| state.log.iter().filter(|request| !request.path.starts_with("/api")).count());
    assert_eq!(asked, 6);
}

#[test]
fn an_answer_without_content_or_redirect_is_an_error() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    let cache = tempfile::tempdir().unwrap();
    // 302 without Location, and answers to questions that were not asked
    for status in [302, 300, 304] {
        server.with(|state| state.file("config.json").status = Some(status));
        let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
        assert!(text.contains(&format!("`config.json`: the server answered HTTP {status} without")), "{text}");
    }
}

/// A cache with `config.json` and `model.safetensors`; the server and the blob of the weights.
fn filled(cache: &Path) -> (Server, PathBuf) {
    let weights = large(5000);
    let blob = cache.join("models--owner--name/blobs").join(&weights.etag);
    let server = Server::start(vec![("config.json", small("{}")), ("model.safetensors", weights)]);
    resolve(SPEC, &Files::All, &server.options(cache), &Silent).unwrap();
    (server, blob)
}

#[test]
fn a_blob_of_zeros_with_the_right_size_is_downloaded_again() {
    let cache = tempfile::tempdir().unwrap();
    let (server, blob) = filled(cache.path());
    fs::write(&blob, vec![0; 5000]).unwrap();
    fs::remove_dir_all(cache.path().join("models--owner--name/snapshots")).unwrap();
    let log = EventLog::default();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &log).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), large(5000).content);
    let events = log.0.into_inner().unwrap();
    let warned = |event: &Event| matches!(event, Event::Warning(text) if text.contains("is damaged (its SHA-256"));
    assert!(events.iter().any(warned), "{events:?}");
}

#[test]
fn a_cached_file_with_another_size_is_downloaded_again() {
    let cache = tempfile::tempdir().unwrap();
    let (server, blob) = filled(cache.path());
    fs::write(&blob, vec![0; 4999]).unwrap();
    let found = find(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    assert_eq!((found.num_missing, found.download_bytes), (1, 5000));
    let folder = found.fetch(&server.options(cache.path()), &Silent).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), large(5000).content);
}

#[test]
fn downloads_are_not_written_through_planted_links() {
    let server = Server::start(vec![("model.safetensors", large(5000))]);
    let options = |cache: &Path| server.options(cache);
    for planted in ["blobs", "snapshots", "refs", ".locks"] {
        let (cache, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let repository = cache.path().join("models--owner--name");
        fs::create_dir(&repository).unwrap();
        let link = if planted == ".locks" { cache.path().join(planted) } else { repository.join(planted) };
        symlink(outside.path(), &link).unwrap();
        let (text, hint) = failure(resolve(SPEC, &Files::All, &options(cache.path()), &Silent));
        assert!(text.contains(&format!("{planted}` is a link or a file")), "{text}");
        assert!(hint.contains("HF_HUB_CACHE"), "{hint}");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{planted}");
    }
    let (cache, outside) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let blobs = cache.path().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).unwrap();
    symlink(outside.path(), blobs.join(&large(5000).etag).with_extension("incomplete")).unwrap();
    resolve(SPEC, &Files::All, &options(cache.path()), &Silent).unwrap();
    assert_eq!(fs::read(outside.path()).unwrap().len(), 0);
    // the cache folder itself may be a link: the user chose it
    let link = outside.path().with_extension("cache");
    symlink(cache.path(), &link).unwrap();
    resolve(SPEC, &Files::All, &options(&link), &Silent).unwrap();
    fs::remove_file(link).unwrap();
}

#[test]
fn verify_finds_damaged_files_of_all_revisions_without_requests() {
    let cache = tempfile::tempdir().unwrap();
    let (server, blob) = filled(cache.path());
    let options = server.options(cache.path());
    let newer = "f".repeat(40);
    server.add("owner/name", "config.json", small("[]"));
    server.with(|state| state.commit.clone_from(&newer));
    let folder = resolve(SPEC, &Files::All, &options, &Silent).unwrap();
    server.with(|state| state.log.clear());
    let states = |spec: &str| -> Vec<(String, String, State)> {
        let files = verify(spec, &options, &Silent).unwrap();
        files.into_iter().map(|file| (file.commit, file.name, file.state)).collect()
    };
    let good = |commit: &str, name: &str| (commit.to_owned(), name.to_owned(), State::Good);
    let all = [good(COMMIT, "config.json"), good(COMMIT, "model.safetensors"), good(&newer, "config.json")];
    assert_eq!(states(SPEC), all);
    assert_eq!(states(&format!("{SPEC}/config.json@main")), all[2..]);

    fs::write(&blob, vec![0; 5000]).unwrap();
    fs::remove_file(folder.join("config.json").canonicalize().unwrap()).unwrap();
    fs::write(folder.join("notes.txt"), "not from the hub").unwrap();
    symlink("/etc/hostname", folder.join("planted.json")).unwrap();
    let found = verify(&format!("{SPEC}@main"), &options, &Silent).unwrap();
    let reason = |name: &str| match &found.iter().find(|file| file.name == name).unwrap().state {
        State::Damaged(reason) => reason.clone(),
        state => format!("{state:?}"),
    };
    assert!(reason("model.safetensors").starts_with("its SHA-256 is "), "{found:?}");
    assert_eq!((reason("config.json"), reason("notes.txt")), ("it is missing".into(), "Unknown".into()));
    assert!(reason("planted.json").contains("`/etc/hostname`, outside of the cache"), "{found:?}");
    let weights = found.iter().find(|file| file.name == "model.safetensors").unwrap();
    assert_eq!(weights.path, blob.canonicalize().unwrap());
    assert!(server.with(|state| state.log.is_empty()));

    let error = verify("hub:owner/other", &options, &Silent).unwrap_err();
    assert!(error.hint().contains("prsmed hub get hub:owner/other"), "{error}");
    assert!(verify("a/folder", &options, &Silent).is_err());
}

#[test]
fn cached_weights_are_known_by_commit_and_hashes() {
    let cache = tempfile::tempdir().unwrap();
    let (server, _) = filled(cache.path());
    let options = server.options(cache.path());
    let before = resolve(SPEC, &Files::Checkpoint, &options, &Silent).unwrap();
    server.add("owner/name", "model.safetensors", large(5001));
    server.with(|state| state.commit = "f".repeat(40));
    let after = resolve(SPEC, &Files::Checkpoint, &options, &Silent).unwrap();
    let [old, new] = [before, after].map(|folder| pinned(&folder).unwrap());
    assert_eq!((old.repo.as_str(), old.commit.as_str()), ("owner/name", COMMIT));
    assert_eq!(new.commit, "f".repeat(40));
    assert_eq!(old.files["config.json"], small("{}").etag);
    assert_eq!(old.files["model.safetensors"], large(5000).etag);
    assert_eq!(old.changed(&new), ["model.safetensors"]);
    assert!(old.changed(&old).is_empty());
    assert_eq!(pinned(cache.path()), None);
}

#[test]
fn a_connection_that_fails_repeatedly_is_an_error_and_can_be_continued() {
    let weights = Stored { cuts: vec![1000, 0, 0, 0, 0, 0], ..large(5000) };
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    let cache = tempfile::tempdir().unwrap();
    let error = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap_err();
    assert!(matches!(error, Error::Hub { .. }) && error.to_string().contains("failed repeatedly"), "{error}");
    assert!(error.hint().contains("continues where it stopped"), "{}", error.hint());
    server.with(|state| state.file("model.safetensors").cuts.clear());
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights.content);
    assert_eq!(server.downloads().last().unwrap().1, "bytes=1000-");
}

#[test]
fn a_sharded_repository_becomes_an_archive() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = vec![("config.json", small("{}")), ("README.md", small("not wanted"))];
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = format!(r#"{{"weight_map":{{"t0":"{}","t1":"{}"}}}}"#, names[0], names[1]);
    for (i, name) in names.into_iter().enumerate() {
        let tensor = Tensor::full([1000], i64::try_from(i).unwrap(), (Kind::Float, Device::Cpu));
        let path = folder.path().join(name);
        write_safetensors(&path, &[(format!("t{i}"), &tensor)], &BTreeMap::new()).unwrap();
        let content = fs::read(path).unwrap();
        files.push((name, Stored { redirect: Some(Redirect::Absolute), cuts: vec![1500], ..Stored::of(content) }));
    }
    files.push(("model.safetensors.index.json", small(&index)));
    let server = Server::start(files);
    let cache = tempfile::tempdir().unwrap();
    let local = resolve(SPEC, &Files::Checkpoint, &server.options(cache.path()), &Silent).unwrap();
    assert!(!local.join("README.md").exists());
    let archive = Archive::open(&local).unwrap();
    assert_eq!(archive.names(), ["t0", "t1"]);
    assert_eq!(archive.read("t1").unwrap().int64_value(&[999]), 1);
}

#[test]
fn http_errors_have_hints() {
    let server = Server::start(vec![("config.json", small("{}")), ("model.safetensors", large(10))]);
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    let all = |spec: &str, options: &HubOptions| failure(resolve(spec, &Files::All, options, &Silent));

    let (text, hint) = all("hub:owner/other", &options);
    assert!(text.contains("`hub:owner/other`: the repository does not exist") && text.contains("404"), "{text}");
    assert!(hint.contains("check the spelling"), "{hint}");
    let (text, _) = all("hub:owner/name@v9", &options);
    assert!(text.contains("`hub:owner/name@v9`") && text.contains("revision `v9`"), "{text}");

    let (text, hint) = failure(resolve(SPEC, &Files::Matching(&["absent.bin"]), &options, &Silent));
    assert!(text.contains("contains no `absent.bin`") && text.contains("`config.json`"), "{text} {hint}");

    server.with(|state| state.file("model.safetensors").status = Some(404));
    let (text, _) = all(SPEC, &options);
    assert!(text.contains("`model.safetensors` does not exist"), "{text}");

    server.with(|state| state.token = Some("right".into()));
    let (text, hint) = all(SPEC, &options);
    assert!(text.contains("private, gated or does not exist (HTTP 401)") && hint.contains("HF_TOKEN"), "{text} {hint}");
    let wrong = HubOptions { token: Some("wrong".into()), ..options.clone() };
    let (text, hint) = all(SPEC, &wrong);
    assert!(text.contains("token was refused") && !text.contains("wrong") && hint.contains("expired"), "{text} {hint}");
    server.with(|state| state.forbidden = true);
    let broken = HubOptions { token: Some("ri ght".into()), ..options.clone() };
    let (text, hint) = all(SPEC, &broken);
    assert!(text.contains("the access token contains a blank") && hint.contains("HF_TOKEN"), "{text} {hint}");
    let right = HubOptions { token: Some("right".into()), ..options.clone() };
    let (text, hint) = all(SPEC, &right);
    assert!(text.contains("HTTP 403") && hint.contains("accept the terms"), "{text} {hint}");

    server.with(|state| {
        state.forbidden = false;
        state.file("model.safetensors").status = None;
    });
    assert!(resolve(SPEC, &Files::All, &right, &Silent).is_ok());
    assert!(
        resolve("hub:../x", &Files::All, &options, &Silent)
            .unwrap_err()
            .to_string()
            .contains("does not name a hub repository")
    );
    assert!(resolve("/no/such/folder", &Files::All, &options, &Silent).unwrap_err().hint().contains("hub:owner/name"));
    assert_eq!(resolve(cache.path().to_str().unwrap(), &Files::All, &options, &Silent).unwrap(), cache.path());
}

#[test]
fn a_busy_hub_is_asked_again_as_late_as_it_says() {
    let server = Server::start(vec![("config.json", small("{}")), ("model.safetensors", large(10))]);
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    // the listing, then a file
    server.with(|state| state.busy = 3);
    assert!(resolve(SPEC, &Files::All, &options, &Silent).is_ok());
    assert_eq!(server.with(|state| state.busy), 0);
    server.with(|state| state.busy = 99);
    let other = tempfile::tempdir().unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(other.path()), &Silent));
    assert!(text.contains("HTTP 429"), "{text}");
    assert_eq!(server.with(|state| state.busy), 94, "five requests");
}

#[test]
fn names_that_leave_the_cache_are_errors_before_any_download() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    let cache = tempfile::tempdir().unwrap();
    for evil in ["../../evil", "/etc/evil", "a/../../../evil"] {
        server.with(|state| state.listed = vec![evil.into()]);
        let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
        assert!(text.contains(&format!("has the file `{evil}`")), "{text}");
    }
    assert!(server.downloads().is_empty());
    server.with(|state| {
        state.listed.clear();
        state.file("config.json").etag = "../../../evil".into();
    });
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("cannot name a file"), "{text}");
    assert!(server.downloads().is_empty());
}

#[test]
fn a_file_that_is_listed_many_times_is_downloaded_once() {
    let server = Server::start(Vec::new());
    server.add("datasets/owner/name", "a.csv", small("a,b"));
    server.with(|state| state.listed = vec!["a.csv".into(); 500]);
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    assert_eq!(ls("dataset:owner/name", &options, &Silent).unwrap().len(), 1);
    let folder = resolve("dataset:owner/name", &Files::All, &options, &Silent).unwrap();
    assert_eq!(fs::read_to_string(folder.join("a.csv")).unwrap(), "a,b");
    assert_eq!(server.with(|state| state.log.iter().filter(|request| !request.path.starts_with("/api")).count()), 2);
}

#[test]
fn a_name_that_is_a_file_and_a_folder_is_an_error_before_any_download() {
    let server = Server::start(vec![("a", small("x")), ("a-b", small("x"))]);
    server.with(|state| state.listed = vec!["a/b/c".into()]);
    let cache = tempfile::tempdir().unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent));
    assert!(text.contains("has `a` as a file and as a folder"), "{text}");
    assert!(server.downloads().is_empty());
    server.with(|state| state.listed = vec!["a-b.json".into(), "ab/c".into()]);
    assert_eq!(ls(SPEC, &server.options(cache.path()), &Silent).unwrap().len(), 4);
}

#[test]
fn sizes_without_limit_and_thousands_of_files_are_listed() {
    let server = Server::start(vec![("a.csv", Stored { listed_bytes: Some(u64::MAX), ..small("a") })]);
    server.add("owner/name", "b.csv", Stored { listed_bytes: Some(u64::MAX), ..small("b") });
    server.with(|state| state.listed = (0..50_000).map(|i| format!("d{}/f{i}.csv", i % 100)).collect());
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    assert_eq!(ls(SPEC, &options, &Silent).unwrap().len(), 50_002);
    let found = find(SPEC, &Files::Matching(&["a.csv", "b.csv"]), &options, &Silent).unwrap();
    assert_eq!((found.files.len(), found.bytes(), found.download_bytes), (2, u64::MAX, u64::MAX));
    // the size of the hub's headers counts
    let folder = found.fetch(&options, &Silent).unwrap();
    assert_eq!(fs::read_to_string(folder.join("b.csv")).unwrap(), "b");
}

/// Reads a request up to its empty line.
fn read_head(stream: &TcpStream) {
    let (mut reader, mut line) = (BufReader::new(stream), String::new());
    while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
        line.clear();
    }
}

/// The address of a server that sends these bytes and then for ever `more`, with a pause before each.
fn endless(start: String, more: Vec<u8>, pause: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            read_head(&stream);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            let mut sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(start.as_bytes()));
            // until the client goes away
            while sent.is_ok() {
                std::thread::sleep(pause);
                sent = stream.write_all(&more).and_then(|()| stream.flush());
            }
        }
    });
    address
}

#[test]
fn a_listing_without_end_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let options = |endpoint: String| HubOptions { endpoint, ..HubOptions::new(cache.path()) };
    let failed = |options: HubOptions| failure(resolve("dataset:owner/name", &Files::All, &options, &Silent)).0;
    let start = format!(r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"a"}}"#);
    let entries = r#",{"rfilename":"a"}"#.repeat(10_000).into_bytes();
    let text = failed(options(endless(start.clone(), entries, Duration::ZERO)));
    assert!(text.contains("the listing has more than 64 MiB"), "{text}");
    let text = failed(impatient(options(endless(start, b" ".to_vec(), Duration::from_millis(20)))));
    assert!(text.contains("the listing is not complete after 2s (HF_HUB_DOWNLOAD_TIMEOUT)"), "{text}");
}

#[test]
fn answers_that_are_no_listing_are_errors() {
    let cache = tempfile::tempdir().unwrap();
    for body in [
        "[]",
        "<html>login</html>",
        "{}",
        r#"{"sha":"../../x","siblings":[]}"#,
        r#"{"sha":"c","siblings":[{"rfilename":"a","size":-1}]}"#,
        r#"{"sha":"c","siblings":[{"rfilename":"a","size":1e30}]}"#,
        r#"{"sha":"c","siblings":[{"rfilename":""}]}"#,
        r#"{"sha":"c","siblings":[{"rfilename":"a\u0000b"}]}"#,
        r#"{"sha":"c","siblings":[{"rfilename":"..\\x"}]}"#,
        r#"{"sha":"c"}"#,
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_head(&stream);
            stream.write_all(head.as_bytes()).unwrap();
        });
        let options = HubOptions { endpoint, ..HubOptions::new(cache.path()) };
        let error = resolve("dataset:owner/name", &Files::All, &options, &Silent).unwrap_err();
        assert!(matches!(error, Error::Hub { .. }), "{body}: {error}");
        server.join().unwrap();
    }
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
}

#[test]
fn a_password_in_the_address_of_the_hub_is_not_repeated() {
    let cache = tempfile::tempdir().unwrap();
    for endpoint in ["http://bob:hunter2secret@127.0.0.1:9", "bob:hunter2secret@127.0.0.1", "ftp://b:hunter2secret@h"] {
        let options = HubOptions { endpoint: endpoint.into(), ..HubOptions::new(cache.path()) };
        let (text, hint) = failure(resolve(SPEC, &Files::All, &options, &Silent));
        assert!(!text.contains("hunter2secret") && !hint.contains("hunter2secret"), "{text} {hint}");
        assert!(hint.contains("HF_ENDPOINT"), "{hint}");
    }
}

/// Does `work` as a user to whom nothing here belongs. Permissions do not bind root.
fn as_nobody<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the call changes only as whom this thread opens files.
    let before = unsafe { libc::setfsuid(65534) };
    let result = work();
    // SAFETY: as above.
    unsafe { libc::setfsuid(u32::try_from(before).unwrap()) };
    result
}

#[test]
fn a_cache_that_cannot_be_written_is_used_and_named_if_files_are_missing() {
    let cache = tempfile::tempdir().unwrap();
    let (server, _) = filled(cache.path());
    let options = server.options(cache.path());
    let allow = |mode: u32| {
        for inside in ["", ".locks", ".locks/models--owner--name", "models--owner--name", "models--owner--name/blobs"] {
            fs::set_permissions(cache.path().join(inside), fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    allow(0o555);
    let found = as_nobody(|| resolve(SPEC, &Files::All, &options, &Silent));
    let verified = as_nobody(|| verify(SPEC, &options, &Silent));
    server.add("owner/name", "new.json", small("[]"));
    let missing = as_nobody(|| resolve(SPEC, &Files::All, &options, &Silent));
    allow(0o755);
    assert!(found.unwrap().join("model.safetensors").is_file());
    assert!(verified.unwrap().iter().all(|file| file.state == State::Good));
    let error = missing.unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(error.to_string().contains(cache.path().to_str().unwrap()), "{error}");
    assert!(error.hint().contains("permissions"), "{}", error.hint());
}

#[test]
fn without_a_connection_the_cache_is_used_or_the_error_has_a_hint() {
    let cache = tempfile::tempdir().unwrap();
    let dead = HubOptions { endpoint: "http://127.0.0.1:9".into(), ..HubOptions::new(cache.path()) };
    let offline = HubOptions { offline: true, ..dead.clone() };
    let (text, hint) = failure(resolve(SPEC, &Files::All, &offline, &Silent));
    assert!(text.contains("is not in the cache") && hint.contains("prsmed hub get"), "{text} {hint}");
    let (text, hint) = failure(resolve(SPEC, &Files::All, &dead, &Silent));
    assert!(text.contains("cannot be reached") && hint.contains("network"), "{text} {hint}");

    let server = Server::start(vec![("config.json", small("{}")), ("model.safetensors", large(10))]);
    resolve(SPEC, &Files::Matching(&["config.json"]), &server.options(cache.path()), &Silent).unwrap();
    let (text, _) = failure(resolve(SPEC, &Files::Checkpoint, &offline, &Silent));
    assert!(text.contains("has only a part"), "{text}");
    let log = EventLog::default();
    resolve(SPEC, &Files::Matching(&["config.json"]), &dead, &log).unwrap();
    let events = log.0.into_inner().unwrap();
    assert!(matches!(&events[..], [Event::Warning(text)] if text.contains("cached files are used")), "{events:?}");
}

#[test]
fn ls_lists_names_and_sizes() {
    let server = Server::start(vec![("model.safetensors", large(10)), ("config.json", small("{}"))]);
    let cache = tempfile::tempdir().unwrap();
    let file = |name: &str, size| RemoteFile { name: name.into(), size: Some(size) };
    let expected = [file("config.json", 2), file("model.safetensors", 10)];
    assert_eq!(ls(SPEC, &server.options(cache.path()), &Silent).unwrap(), expected);
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    assert_eq!(ls(folder.to_str().unwrap(), &server.options(cache.path()), &Silent).unwrap(), expected);
}

#[test]
fn the_only_weight_file_of_a_repository_is_found_without_a_download() {
    let server = Server::start(vec![("README.md", small("TinySAM")), ("tinysam.pth", large(10))]);
    let cache = tempfile::tempdir().unwrap();
    let options = server.options(cache.path());
    let found = find(SPEC, &Files::OnlyWeights, &options, &Silent).unwrap();
    assert_eq!((found.num_missing, found.download_bytes, found.files.len()), (1, 10, 1));
    assert!(server.downloads().is_empty() && !found.path.exists());
    let path = found.fetch(&options, &Silent).unwrap();
    assert!(path.ends_with("tinysam.pth") && path.is_file(), "{}", path.display());
    assert_eq!(find(SPEC, &Files::OnlyWeights, &options, &Silent).unwrap().num_missing, 0);
    let offline = HubOptions { offline: true, ..options.clone() };
    assert_eq!(resolve(SPEC, &Files::OnlyWeights, &offline, &Silent).unwrap(), path);

    server.add("owner/name", "weights/mobile_sam.pt", large(20));
    let error = find(SPEC, &Files::OnlyWeights, &options, &Silent).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("`tinysam.pth`, `weights/mobile_sam.pt`"), "{text}");
    assert!(error.hint().contains("hub:owner/name/tinysam.pth"), "{}", error.hint());
    // a file or a folder inside the repository may be named
    for inside in ["weights/mobile_sam.pt", "weights"] {
        let path = resolve(&format!("{SPEC}/{inside}"), &Files::OnlyWeights, &options, &Silent).unwrap();
        assert!(path.ends_with("weights/mobile_sam.pt") && path.is_file(), "{}", path.display());
    }
    let error = find(&format!("{SPEC}/absent.pth"), &Files::OnlyWeights, &options, &Silent).unwrap_err();
    assert!(error.to_string().contains("contains no `absent.pth`"), "{error}");
}

#[test]
fn an_interrupted_download_counts_only_what_is_left() {
    let weights = large(500_000);
    let server = Server::start(vec![("model.safetensors", weights.clone())]);
    let cache = tempfile::tempdir().unwrap();
    let blobs = cache.path().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(&weights.etag).with_extension("incomplete"), &weights.content[..200_000]).unwrap();
    let found = find(SPEC, &Files::Checkpoint, &server.options(cache.path()), &Silent).unwrap();
    assert_eq!((found.download_bytes, found.bytes()), (300_000, 500_000));
}

#[test]
fn python_reads_the_cache_offline() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let skip = |why: &str| {
        let mut stderr = std::io::stderr();
        writeln!(stderr, "skipped: {why}").unwrap();
    };
    if !python.exists() {
        return skip(".venv is absent");
    }
    let weights = Stored { redirect: Some(Redirect::Absolute), ..large(1000) };
    let server = Server::start(vec![("a/config.json", small("{}")), ("model.safetensors", weights)]);
    let cache = tempfile::tempdir().unwrap();
    let folder = resolve(SPEC, &Files::All, &server.options(cache.path()), &Silent).unwrap();
    let code = "import sys\n\
                from huggingface_hub import hf_hub_download, snapshot_download, scan_cache_dir\nc = sys.argv[1]\n\
                print(snapshot_download('owner/name', cache_dir=c, local_files_only=True))\n\
                print(hf_hub_download('owner/name', 'a/config.json', cache_dir=c, local_files_only=True))\n\
                info = scan_cache_dir(c)\nprint(len(info.warnings), info.size_on_disk)";
    let output = std::process::Command::new(python)
        .args(["-c", code])
        .arg(cache.path())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("ModuleNotFoundError") {
        return skip("huggingface_hub is not installed in .venv");
    }
    assert!(output.status.success(), "{error}");
    let folder = folder.display();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{folder}\n{folder}/a/config.json\n0 1002\n"));
}

/// The test server itself: `HEAD` gives the headers of `GET` without body, as Python's client needs.
#[test]
fn the_test_server_answers_head() {
    let server = Server::start(vec![("config.json", small("{}"))]);
    let mut stream = TcpStream::connect(server.address.trim_start_matches("http://")).unwrap();
    write!(stream, "HEAD /owner/name/resolve/main/config.json HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\nETag: ") && text.ends_with("\r\n\r\n"), "{text}");
    assert!(text.contains(&format!("X-Repo-Commit: {COMMIT}")), "{text}");
}
