//! Identifiers of patients: files with planted names, ids, dates and UIDs go through every command, and nothing of them
//! is in the output, in the replies of servers, or in a written file.
//!
//! File names are not identifiers here: they are the user's, and the commands name files by them.

mod plant;
mod scan;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{folder, path, prsmed, tree};
use scan::{check_segmentation, findings};

const QUESTION: &str = "Where is the liver in this image?";

/// Runs commands and keeps everything that they say. Their files are below one folder, temporary files too.
struct Watch {
    out: PathBuf,
    texts: Vec<(String, Vec<u8>)>,
}

impl Watch {
    fn new(out: PathBuf) -> Self {
        fs::create_dir_all(out.join("tmp")).unwrap();
        Self { out, texts: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.out.join(name)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = prsmed();
        command.env("TMPDIR", self.out.join("tmp")).env("RUST_LOG", "trace").env("RUST_BACKTRACE", "full");
        command.args(words.split_whitespace());
        command
    }

    /// Runs a command that must end with this exit code; returns standard output.
    fn run(&mut self, command: &mut Command, code: i32) -> String {
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{command:?}: {errors}");
        let name = format!("{command:?}");
        self.texts.push((format!("standard error of {name}"), output.stderr));
        self.texts.push((format!("standard output of {name}"), output.stdout.clone()));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command with words and then paths as its last arguments.
    fn done(&mut self, words: &str, paths: &[&Path]) -> String {
        let mut command = self.command(words);
        self.run(command.args(paths), 0)
    }

    /// Fails if something planted was said or written. DICOM SEG files may have references.
    fn check(&self) {
        let mut found = Vec::new();
        for (place, text) in &self.texts {
            found.extend(findings(place, text));
        }
        let (mut num_files, mut num_segmentations) = (0, 0);
        for (name, bytes) in tree(&self.out) {
            num_files += 1;
            if bytes.get(128..132) == Some(b"DICM") {
                num_segmentations += 1;
                // the study, the frame of reference, the series, and the instances
                assert!(check_segmentation(&name, &bytes) > 4, "{name}");
            } else {
                found.extend(findings(&name, &bytes));
            }
        }
        assert_eq!(found, Vec::<String>::new());
        assert!(num_files > 60 && num_segmentations > 1, "{num_files} files, {num_segmentations} of them DICOM SEG");
    }
}

#[test]
fn planted_identifiers_are_found_nowhere_after_every_command() {
    let inputs = folder("privacy-inputs");
    let [volumes, labels] = plant::study(&inputs);
    let broken = plant::broken(&inputs.join("broken"));
    // every input has planted values that the search finds
    for (name, bytes) in tree(&inputs) {
        assert!(findings(&name, &bytes).len() >= 3, "{name}: {:?}", findings(&name, &bytes));
    }
    let mut watch = Watch::new(path("privacy"));
    prepare_and_train(&mut watch, &volumes, &labels);
    predict(&mut watch, &volumes);
    evaluate(&mut watch);
    serve(&mut watch, &volumes, &broken);
    augment(&mut watch);
    refuse(&mut watch, &broken, &labels);
    watch.check();
}

fn prepare_and_train(watch: &mut Watch, volumes: &Path, labels: &Path) {
    let (root, run) = (watch.path("root"), watch.path("run"));
    let prepare = "data prepare --modality ct --labels 1=liver --window 350/50 --negatives --val-frac 0.25 --test-frac 0.25 \
                   --image-word image --images";
    let flag = Path::new("--masks");
    watch.done(prepare, &[volumes, flag, labels, Path::new("--out"), &root]);
    let other = watch.path("root-json");
    watch.done(&format!("--json {prepare}"), &[volumes, flag, labels, Path::new("--out"), &other]);
    for words in ["data check", "--json data check"] {
        watch.done(words, &[&root]);
    }
    let small = "--set model.image_size=64 --set train.micro_batch=2 --set train.max_steps=2";
    watch.done(&format!("train --preset tiny {small} --data-root"), &[&root, Path::new("--out"), &run]);
    let again = watch.path("run-json");
    watch.done(&format!("--json train --preset tiny {small} --data-root"), &[&root, Path::new("--out"), &again]);
    watch.done(&format!("--json plan --preset tiny {small} --data-root"), &[&root]);
    watch.done("--json doctor", &[]);
    watch.done("merge", &[&run, &watch.path("merged")]);
}

fn predict(watch: &mut Watch, volumes: &Path) {
    let run = watch.path("run");
    for (mode, name) in [("", "text"), ("--json", "json")] {
        let command = |watch: &Watch| {
            let mut command = watch.command(&format!("{mode} predict --max-new-tokens 2 --always-paint --question"));
            command.arg(QUESTION).arg(&run);
            command
        };
        let all = [("P1", "nii.gz"), ("P2.zip", "dcm"), ("P3.dcm", "dcm"), ("P4.nii", "nii")];
        let some = if mode.is_empty() { &all[..] } else { &all[1..2] };
        for (volume, ending) in some {
            let file = |what: &str| watch.path(&format!("{name}-{}-{what}", &volume[..2]));
            let mut command = command(watch);
            command.arg("--image").arg(volumes.join(volume)).args(["--window", "lung", "--fill-gaps", "1", "--out"]);
            command.arg(file(&format!("mask.{ending}"))).arg("--record-out").arg(file("record.json"));
            watch.run(&mut command, 0);
        }
        let slice = fs::read_dir(volumes.join("P1")).unwrap().next().unwrap().unwrap().path();
        let mut image = command(watch);
        image.arg("--image").arg(slice).arg("--mask-out").arg(watch.path(&format!("{name}-image-mask.png")));
        image.arg("--overlay-out").arg(watch.path(&format!("{name}-image-overlay.png")));
        watch.run(&mut image, 0);
        // files without an extension are not found in a folder; a table may name them
        let table = volumes.with_file_name("jobs.csv");
        let rows = ["slice0", "slice1", "slice9"].map(|name| format!("volumes/P1/{name}\n"));
        fs::write(&table, format!("image\n{}", rows.concat())).unwrap();
        let mut many = command(watch);
        many.args(["--overlays", "--images"]).arg(&table).arg("--out").arg(watch.path(&format!("{name}-many")));
        fs::write(volumes.join("P1/slice9"), plant::planted_file("cine.dcm", |_| ())).unwrap();
        watch.run(&mut many, 1);
        fs::remove_file(volumes.join("P1/slice9")).unwrap();
    }
}

fn evaluate(watch: &mut Watch) {
    let (root, run, other) = (watch.path("root"), watch.path("run"), watch.path("run-json"));
    let words = "eval --max-new-tokens 2 --limit 4 --split val --data-root";
    watch.done(words, &[&root, &run]);
    assert!(run.join("eval-val/report.html").is_file());
    let out = watch.path("compared");
    let json = format!("--json {words}");
    watch.done(&json, &[&root, &run, &other, Path::new("--out"), &out]);
}

fn augment(watch: &mut Watch) {
    let (root, pairs) = (watch.path("root"), watch.path("pairs"));
    let words =
        "augment generate --preset tiny --set augment.image_size=64 --set augment.steps=2 --limit 2 --data-root";
    watch.done(words, &[&root, Path::new("--out"), &pairs]);
    let words =
        "--json augment finetune --preset tiny --set finetune.image_size=64 --set train.max_steps=1 --data-root";
    watch.done(words, &[&root, Path::new("--out"), &watch.path("finetuned")]);
}

/// Files that cannot be read: alone, among others, and as label maps.
fn refuse(watch: &mut Watch, broken: &[PathBuf], labels: &Path) {
    let run = watch.path("run");
    for file in broken {
        let mut command = watch.command("predict --question");
        command.arg(QUESTION).arg(&run).arg("--image").arg(file).arg("--out").arg(watch.path("never.nii.gz"));
        watch.run(&mut command, 2);
    }
    let masks = folder("privacy-labels");
    let map = fs::read(labels.join("P1.nii")).unwrap();
    for file in broken {
        let stem = file.file_stem().unwrap().to_str().unwrap();
        fs::write(masks.join(format!("{stem}.nii")), &map).unwrap();
    }
    let volumes = broken[0].parent().unwrap();
    for mode in ["", "--json"] {
        let mut command = watch.command(&format!("{mode} data prepare --modality ct --labels 1=liver --images"));
        command.arg(volumes).arg("--masks").arg(&masks).arg("--out").arg(watch.path("never"));
        watch.run(&mut command, 2);
    }
    // some of them as label maps of a good volume
    for file in broken.iter().step_by(4) {
        let mut command = watch.command("data prepare --modality ct --labels 1=liver --images");
        command.arg(labels.with_file_name("volumes/P1")).arg("--masks").arg(file);
        watch.run(command.arg("--out").arg(watch.path("never")), 2);
    }
    assert!(!watch.path("never").exists());
}

/// A server that ends when the value is dropped.
struct Server {
    child: Child,
    url: String,
    agent: ureq::Agent,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts `prsmed serve`, whose output goes to files.
    fn start(watch: &Watch, name: &str, mode: &str) -> Self {
        let mut command = watch.command(&format!("{mode} serve --port 0 --log-requests"));
        let errors = fs::File::create(watch.path(&format!("{name}-stderr"))).unwrap();
        let mut child =
            command.arg(watch.path("run")).stdout(Stdio::piped()).stderr(errors).spawn().expect("the server starts");
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let (mut said, mut url) = (String::new(), None);
        while url.is_none() {
            let start = said.len();
            assert!(output.read_line(&mut said).unwrap() > 0, "the server ended: {said}");
            let address = said[start..].split("http://").nth(1);
            url = address.map(|rest| format!("http://{}", rest.split(['/', '"', ' ', '\n']).next().unwrap()));
        }
        let rest = watch.path(&format!("{name}-stdout"));
        std::thread::spawn(move || {
            let mut file = fs::File::create(rest).unwrap();
            std::io::Write::write_all(&mut file, said.as_bytes()).and_then(|()| std::io::copy(&mut output, &mut file))
        });
        let config = ureq::Agent::config_builder().http_status_as_error(false).proxy(None);
        let agent = config.timeout_global(Some(Duration::from_mins(1))).build().new_agent();
        Self { child, url: url.unwrap(), agent }
    }

    /// Sends a request; the reply is watched, headers and body.
    fn send(&self, watch: &mut Watch, method: &str, route: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let request = ureq::http::Request::builder().method(method).uri(format!("{}{route}", self.url));
        let request = request.header("Content-Type", "application/json").body(body.to_vec()).unwrap();
        let mut response = self.agent.run(request).unwrap();
        let status = response.status().as_u16();
        watch.texts.push((format!("headers of {route}"), format!("{:?}", response.headers()).into_bytes()));
        let bytes = response.body_mut().read_to_vec().unwrap();
        if route.ends_with("mask.dcm") && status == 200 {
            assert!(check_segmentation(route, &bytes) > 4);
        } else {
            watch.texts.push((format!("reply of {route}"), bytes.clone()));
        }
        (status, bytes)
    }
}

fn serve(watch: &mut Watch, volumes: &Path, broken: &[PathBuf]) {
    let series = fs::read(volumes.join("P2.zip")).unwrap();
    for (name, mode) in [("serve", ""), ("serve-json", "--json")] {
        let server = Server::start(watch, name, mode);
        for file in [&series, &fs::read(volumes.join("P3.dcm")).unwrap(), &fs::read(volumes.join("P4.nii")).unwrap()] {
            let (status, image) = server.send(watch, "POST", "/api/images", file);
            assert_eq!(status, 201);
            let image: Value = serde_json::from_slice(&image).unwrap();
            let route = format!("/api/images/{}", image["id"].as_str().unwrap());
            let question = json!({ "question": QUESTION, "slice": 1, "max_new_tokens": 2 }).to_string();
            server.send(watch, "POST", &format!("{route}/questions"), question.as_bytes());
            for more in ["", "/pixels?slice=0", "/mask.nii.gz", "/mask.dcm", "/pairs.zip", "/pixels?slice=99"] {
                server.send(watch, "GET", &format!("{route}{more}"), &[]);
            }
        }
        for file in broken {
            let (status, _) = server.send(watch, "POST", "/api/images", &fs::read(file).unwrap());
            assert_eq!(status, 422, "{}", file.display());
        }
        for route in ["/metrics", "/api/health", "/api/model", "/api/images/none"] {
            server.send(watch, "GET", route, &[]);
        }
        let log = fs::read_to_string(watch.path(&format!("{name}-stderr"))).unwrap();
        let said = fs::read_to_string(watch.path(&format!("{name}-stdout"))).unwrap_or_default();
        assert!(log.contains("/api/images") || said.contains("/api/images"), "no log of requests: {log}{said}");
    }
}
