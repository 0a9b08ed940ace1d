//! The commands of README, guides and concepts, as they are printed there.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{STEPS, copy_into, done, folder, path, phantoms, prsmed, run, train};

/// Called instead of the program: notes the arguments, a line for each call, and gives a path as `hub get` does.
const NOTES: &str = r#"#!/usr/bin/env bash
printf '%s\x1f' "$@" >> "$LISTED"; echo >> "$LISTED"
echo DATA
"#;

/// Called instead of the program: runs the command with small models and few steps. What cannot run here is listed with the
/// reason.
const RUNS: &str = r#"#!/usr/bin/env bash
list() { echo "prsmed $all  # $1" >> "$LISTED"; echo DATA; exit 0; }
all="$*"
case " $all " in
  *" serve "*) list "does not end: tests/serve starts it with the same flags" ;;
  *" hub get "* | *" hub verify "* | *"predict hub:"* | *hub:huyquoctrinh*) list "downloads: tests/hub.rs does it from a server of its own" ;;
  *llm_seg_13*) list "needs published weights: unit tests read a folder of that layout" ;;
  *model.base=/project* | *--check*) list "needs the weights of the real model: tests/cli/first_run.rs has small ones" ;;
  *mine.safetensors*) list "needs a generator in one file: tests/cli/augment has a small one" ;;
  *" calibrate "* | *--measure*) list "measures this machine: tests/plan does" ;;
  *" solve "* | *" preset --gpu 24gb "* | *" preset --gpu all "*) list "takes long: tests/cli/plan.rs runs it" ;;
  *" --image series/ "*) list "needs a DICOM series: tests/cli/volumes.rs makes one" ;;
  *--lora*) list "needs another base model than the small one" ;;
esac
words=()
while [ $# -gt 0 ]; do
  case "$1 ${2:-}" in
    "--preset full" | "--preset gpu-"*) [[ $all == plan* ]] && words+=("$1" "$2") || words+=(--preset tiny); shift 2 ;;
    "--model hub:"* | "--seeds "*) shift 2 ;;
    "--config "*) shift 2 ;;
    "--gpus "*) words+=(--gpus 2); shift 2 ;;
    "--group "*) words+=(--group '^(phantom_[0-9]+)'); shift 2 ;;
    "--labels "*=*) words+=(--labels 1=lesion); shift 2 ;;
    "--labels "*) words+=(--labels 1); shift 2 ;;
    *) words+=("$1"); shift ;;
  esac
done
small=(--set model.image_size=64 --set train.micro_batch=2 --set train.max_steps=2)
case "$all" in
  train*--resume*) words+=(--set train.max_steps=8) ;;
  train*--init*) words+=(--set train.max_steps=2) ;;
  train*) [[ " ${words[*]} " == *" --preset "* ]] || words+=(--preset tiny); words+=("${small[@]}") ;;
  "augment finetune"*) words+=(--preset tiny --set train.max_steps=2) ;;
  "augment generate"*) [[ $all == *--preset* ]] || words+=(--preset tiny); words+=(--limit 3 --set augment.steps=2) ;;
  "augment filter"*) [[ $all == *--folds* ]] || words+=(--folds 2)
    words+=("${small[@]}" --threshold dice_min=0 --threshold outside_max=1 --threshold knn_quantile=1) ;;
  "augment ablation"*) [[ $all == *--steps* ]] || words+=(--steps 2)
    words+=(--seeds 2 --set model.image_size=64 --set train.micro_batch=2) ;;
esac
"$PROGRAM" "${words[@]}" || {
  # no gain, which is what a few steps give, and a plan that does not fit: answers
  [[ $? = 1 && $all =~ ^(augment ablation|plan) ]] || { echo "failed: prsmed ${words[*]}" >&2; exit 3; }
}
"#;

/// The documents, each with its fenced blocks that call the program, lines that call others left out.
fn documents() -> Vec<(String, Vec<String>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["docs/guides", "docs/concepts"].iter().flat_map(|folder| entries(&root.join(folder)));
    let mut files: Vec<PathBuf> = folders.filter(|file| file.extension().is_some_and(|end| end == "md")).collect();
    files.insert(0, root.join("README.md"));
    let read = |file: &PathBuf| {
        let text = fs::read_to_string(file).unwrap();
        let blocks =
            text.split("\n```").skip(1).step_by(2).map(|block| block.split_once('\n').map_or("", |(_, code)| code));
        let calls = |code: &&str| joined(code).iter().any(|line| is_call(line));
        let own = blocks
            .filter(calls)
            .map(|code| joined(code).into_iter().filter(|line| is_shell(line)).collect::<Vec<_>>().join("\n"));
        (file.strip_prefix(root).unwrap().display().to_string(), own.collect())
    };
    files.iter().map(read).filter(|(_, blocks): &(String, Vec<String>)| !blocks.is_empty()).collect()
}

/// Everything in a folder, by name.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

/// Lines of a block, with those that end in `\` joined to the next.
fn joined(code: &str) -> Vec<String> {
    code.replace("\\\n", " ").lines().map(|line| line.trim().to_owned()).collect()
}

fn is_call(line: &str) -> bool {
    line.starts_with("prsmed ") || line.contains("$(prsmed ")
}

/// True for what a block needs around its calls: loops, folders, variables.
fn is_shell(line: &str) -> bool {
    is_call(line) || ["for ", "do", "done", "mkdir "].iter().any(|start| line.starts_with(start))
}

/// Runs the blocks of a document in a new folder, with `wrapper` in place of the program.
fn play(document: &str, blocks: &[String], wrapper: &str, world: &Path) -> Result<String, String> {
    let bin = world.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let program = bin.join("prsmed");
    fs::write(&program, wrapper).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&program, mode).unwrap();
    let mut shell = Command::new("bash");
    shell.current_dir(world).stdin(Stdio::null()).env("PROGRAM", env!("CARGO_BIN_EXE_prsmed"));
    shell
        .env("OMP_NUM_THREADS", "2")
        .env("HF_HUB_OFFLINE", "1")
        .env("DATA", "DATA")
        .env("LISTED", world.join("listed"));
    shell.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    let script = format!("set -e -o pipefail; fold=0\n{}", blocks.join("\n"));
    let output = shell.args(["-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{document}:\n{said}"));
    }
    Ok(fs::read_to_string(world.join("listed")).unwrap_or_default())
}

#[test]
fn every_documented_command_is_understood() {
    let mut calls = 0;
    for (document, blocks) in documents() {
        let noted = play(&document, &blocks, NOTES, &folder(&format!("documented/{}", document.replace('/', "-"))))
            .unwrap_or_else(|said| panic!("{said}"));
        for call in noted.lines() {
            calls += 1;
            // help after the flags: unknown ones are refused before it is printed
            let ran = run(prsmed().args(call.split_terminator('\x1f')).arg("--help"));
            assert_eq!(ran.code, Some(0), "{document}: {call}\n{}", ran.stderr);
        }
    }
    assert!(calls > 90, "only {calls} calls were found");
}

/// A folder with everything that the documents name.
fn everything() -> PathBuf {
    let world = folder("documented-world");
    let make = |arguments: &[&str]| done(prsmed().current_dir(&world).args(arguments));
    for name in ["DATA", "data2", "phantoms"] {
        copy_into(phantoms(), &world.join(name));
    }
    // enough for five folds
    make(&["data", "phantom", "data", "--count", "48", "--image-size", "64"]);
    copy_into(Path::new(env!("CARGO_MANIFEST_DIR")).join("data/sample").as_path(), &world.join("data/sample"));
    make(&["augment", "generate", "--data-root", "DATA", "--out", "MORE", "--preset", "tiny", "--limit", "3"]);
    for name in ["more", "pairs", "corrected"] {
        copy_into(&world.join("MORE"), &world.join(name));
    }
    done(&mut train(&world.join("data"), &world.join("runs/a"), &[STEPS]));
    for run in ["fold0", "fold1", "fold2", "phantoms"] {
        copy_into(&world.join("runs/a"), &world.join("runs").join(run));
    }
    make(&["data", "phantom", "volumes", "--volumes", "6"]);
    for class in entries(&world.join("DATA")).into_iter().filter(|folder| folder.is_dir()) {
        for (from, to) in [("_images", "scans"), ("_masks", "masks"), ("_masks", "labels")] {
            let named = |folder: &PathBuf| folder.to_string_lossy().ends_with(from);
            entries(&class).into_iter().filter(named).for_each(|folder| copy_into(&folder, &world.join(to)));
        }
    }
    let images = entries(&world.join("scans"));
    for name in ["scan.png", "new.png"] {
        fs::copy(&images[0], world.join(name)).unwrap();
    }
    fs::copy(&entries(&world.join("volumes/scans"))[0], world.join("ct.nii.gz")).unwrap();
    fs::copy(&entries(&world.join("DATA/annotations"))[0], world.join("fold1.csv")).unwrap();
    let (mut patients, mut questions) = ("file,patient\n".to_owned(), "image,question\n".to_owned());
    for (number, image) in images.iter().enumerate() {
        writeln!(patients, "{},{number}", image.file_name().unwrap().display()).unwrap();
        writeln!(questions, "scans/{},Where is the lesion?", image.file_name().unwrap().display()).unwrap();
    }
    fs::write(world.join("patients.csv"), patients).unwrap();
    fs::write(world.join("questions.csv"), questions).unwrap();
    world
}

/// A copy of that folder for one block, without what the block makes.
fn world_for(document: &str, block: &str, number: usize) -> PathBuf {
    let world = path(&format!("documented-blocks/{number}"));
    copy_into(&path("documented-world"), &world);
    if document.ends_with("dicom-to-model.md") {
        for (from, to) in [("scans", "scans"), ("labels", "labels"), ("labels", "masks")] {
            fs::remove_dir_all(world.join(to)).unwrap();
            copy_into(&world.join("volumes").join(from), &world.join(to));
            let (first, patient) = (entries(&world.join(to)).remove(0), world.join(to).join("P001"));
            fs::create_dir(&patient).unwrap();
            fs::rename(first, patient.join("imaging.nii.gz")).unwrap();
        }
    }
    let words: Vec<&str> = block.split_whitespace().collect();
    let made =
        words.windows(2).filter(|pair| ["--out", "phantom", "mkdir", "merge"].contains(&pair[0])).map(|pair| pair[1]);
    let merged = words.windows(3).filter(|three| three[0] == "merge").map(|three| three[2]);
    for name in made.chain(merged).filter(|_| !block.contains("--resume")) {
        for name in ["0", "1", "2"].map(|fold| name.replace("$fold", fold)) {
            if !block.contains(&format!("merge {name}")) {
                let _ = fs::remove_dir_all(world.join(name));
            }
        }
    }
    world
}

#[test]
#[ignore = "takes minutes: scripts/soak"]
fn soak_documented_commands_run() {
    let (mut listed, mut failed) = (Vec::new(), Vec::new());
    everything();
    for (document, blocks) in documents() {
        for block in blocks {
            let world = world_for(&document, &block, listed.len());
            listed.push(play(&document, &[block], RUNS, &world).unwrap_or_else(|said| {
                failed.push(said);
                String::new()
            }));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    let listed: String = listed.concat();
    let calls: usize = documents().iter().map(|(_, blocks)| blocks.join("\n").matches("prsmed ").count()).sum();
    assert!(listed.lines().count() * 3 < calls, "too many commands were not run:\n{listed}");
}
