//! Errors for runs and weights that are missing, damaged or malicious, and for outputs that cannot be written.

use prsmed::tensor::Tensor;
use prsmed::tensor::weights::{Archive, write_safetensors};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::{
    STEPS, copy, differing, done, error_text, folder, path, phantoms, prsmed, refused, run, train, trained,
};
use crate::warm::limit;

const AGAIN: &str = "hint: use another checkpoint of the run (`last` or `best`), or copy this one again";

fn eval(run: &Path) -> std::process::Command {
    let mut command = prsmed();
    command.arg("eval").arg(run).arg("--data-root").arg(phantoms());
    command
}

fn predict(run: &Path) -> std::process::Command {
    let image = fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path();
    let mut command = prsmed();
    command.arg("predict").arg(run).arg("--image").arg(image).args(["--question", "Where is the lesion?"]);
    command.args(["--max-new-tokens", "2"]);
    command
}

fn resume(run: &Path) -> std::process::Command {
    let mut command = train(phantoms(), run, &["train.max_steps=7"]);
    command.arg("--resume");
    command
}

/// Truncates a file to its first `bytes`.
fn truncate(file: &Path, bytes: usize) {
    let all = fs::read(file).unwrap();
    assert!(bytes < all.len());
    fs::write(file, &all[..bytes]).unwrap();
}

/// Changes the last byte of a file.
fn garble(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_missing_run_folder_is_refused() {
    let message = "error: ~/no-run: this run folder does not exist\n\
                   hint: give the folder that `prsmed train --out` wrote, or `hub:owner/name`";
    refused(&mut eval(&path("no-run")), message);
    refused(&mut predict(&path("no-run")), message);
    refused(
        &mut eval(phantoms()),
        "error: ~/phantoms: is not a run folder: it has neither `best/` nor `last/`\n\
         hint: give the folder that `prsmed train --out` wrote, or a published PRS-Med folder",
    );
}

#[test]
fn an_existing_run_is_not_overwritten() {
    refused(
        &mut train(phantoms(), &trained().0, &[STEPS]),
        "error: `--out`: `~/trained` already contains a run\n\
         hint: add `--resume` to continue it, or choose another `--out`",
    );
}

#[test]
fn a_truncated_checkpoint_is_refused() {
    let run = copy(&trained().0, "truncated");
    truncate(&run.join("last/mask_decoder.safetensors"), 1000);
    truncate(&run.join("best/lora_adapter/adapter_model.safetensors"), 1000);
    let ran = crate::support::run(&mut resume(&run));
    let error = error_text(&ran);
    assert_eq!(ran.code, Some(2));
    assert!(error.contains("~/truncated/last: `mask_decoder.safetensors` has 1000 bytes, expected "), "{error}");
    assert!(
        error.ends_with("hint: put a copy of the run's `best/` in its place and resume from there, or copy it again")
    );
    let ran = crate::support::run(&mut eval(&run));
    let error = error_text(&ran);
    assert!(error.contains("best: `lora_adapter/adapter_model.safetensors` has 1000 bytes, expected "), "{error}");
    assert!(error.ends_with(AGAIN) && ran.code == Some(2), "{error}");
}

#[test]
fn a_checkpoint_with_changed_bytes_is_refused() {
    let run = copy(&trained().0, "garbled");
    garble(&run.join("last/trainer.safetensors"));
    garble(&run.join("best/cls.safetensors"));
    refused(
        resume(&run).arg("--quiet"),
        "error: ~/garbled/last: `trainer.safetensors` has another content (SHA-256)\n\
         hint: put a copy of the run's `best/` in its place and resume from there, or copy it again",
    );
    let message = format!("error: ~/garbled/best: `cls.safetensors` has another content (SHA-256)\n{AGAIN}");
    refused(&mut eval(&run), &message);
    refused(&mut predict(&run), &message);
    // The advice of the hint works.
    fs::remove_dir_all(run.join("last")).unwrap();
    copy(&trained().0.join("best"), "garbled/last");
    done(&mut resume(&run));
}

#[test]
fn a_checkpoint_without_checksums_or_with_names_outside_of_it_is_refused() {
    let run = copy(&trained().0.join("best"), "no-checksums");
    fs::remove_file(run.join("checksums.json")).unwrap();
    let message = format!("error: ~/no-checksums: has no `checksums.json`, so it is no complete checkpoint\n{AGAIN}");
    refused(&mut predict(&run), &message);
    refused(prsmed().arg("merge").arg(&run).arg(path("no-checksums-merged")), &message);
    let text = r#"{"files": {"../../../dev/zero": {"bytes": 0, "sha256": "x"}}}"#;
    fs::write(run.join("checksums.json"), text).unwrap();
    refused(
        &mut predict(&run),
        "error: ~/no-checksums/checksums.json: names `../../../dev/zero`, which is not a file in its folder\n\
         hint: do not use this checkpoint: checksums must name files of their own folder",
    );
}

/// Writes the checksum of a changed file.
fn update_checksum(run: &Path, name: &str) {
    let path = run.join("checksums.json");
    let mut checksums: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let sum = prsmed::tensor::weights::sha256(&run.join(name)).unwrap();
    let bytes = fs::metadata(run.join(name)).unwrap().len();
    checksums["files"][name] = serde_json::json!({ "bytes": bytes, "sha256": sum });
    fs::write(&path, checksums.to_string()).unwrap();
}

#[test]
fn a_checkpoint_without_a_tensor_is_refused() {
    let run = copy(&trained().0.join("best"), "incomplete");
    for name in ["base/model.safetensors", "mask_decoder.safetensors"] {
        let file = run.join(name);
        let whole = fs::read(&file).unwrap();
        let archive = Archive::open(&file).unwrap();
        let read = |name: &String| (name.clone(), archive.read(name).unwrap().copy());
        let tensors: Vec<_> = archive.names().iter().map(read).collect();
        drop(archive);
        let (missing, rest) = tensors.split_first().unwrap();
        let rest: Vec<_> = rest.iter().map(|(name, tensor)| (name, tensor)).collect();
        write_safetensors(&file, &rest, &BTreeMap::new()).unwrap();
        update_checksum(&run, name);
        let ran = crate::support::run(&mut predict(&run));
        let error = error_text(&ran);
        assert_eq!(ran.code, Some(2), "{error}");
        assert!(error.contains("incomplete/") && error.contains(&missing.0), "{error}");
        fs::write(&file, whole).unwrap();
        update_checksum(&run, name);
    }
    done(&mut predict(&run));
}

#[test]
fn a_checkpoint_of_absurd_sizes_is_refused() {
    let run = copy(&trained().0.join("best"), "absurd");
    let description = fs::read_to_string(run.join("model.json")).unwrap();
    for (before, after, expected) in [
        ("\"sam_size\": 64", "\"sam_size\": 4294967295", "`pixels.sam_size` and `model.image_size` must be equal"),
        ("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 1099511627776", "must be from 1 to 1024"),
        ("\"patch_size\": 14", "\"patch_size\": 0", "must be from 1 to"),
        ("\"format\": 1", "\"format\": 99", "has the format 99"),
    ] {
        assert!(description.contains(before), "{before}");
        fs::write(run.join("model.json"), description.replace(before, after)).unwrap();
        update_checksum(&run, "model.json");
        let ran = crate::support::run(&mut predict(&run));
        let error = error_text(&ran);
        assert_eq!(ran.code, Some(2), "{error}");
        assert!(error.starts_with("error: ~/absurd/model.json: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn links_in_a_run_folder_are_not_written_through() {
    let run = copy(&trained().0, "planted");
    let precious = path("precious.txt");
    for name in [".prsmed.lock", "metrics.jsonl.partial", "config.toml"] {
        fs::write(&precious, "thesis").unwrap();
        let _ = fs::remove_file(run.join(name));
        std::os::unix::fs::symlink(&precious, run.join(name)).unwrap();
        let _ = crate::support::run(&mut resume(&run));
        assert_eq!(fs::read_to_string(&precious).unwrap(), "thesis", "{name}");
        fs::remove_file(run.join(name)).unwrap();
    }
    let elsewhere = folder("planted-elsewhere");
    fs::create_dir_all(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, run.join("eval-test")).unwrap();
    let ran = crate::support::run(eval(&run).args(["--limit", "1", "--max-new-tokens", "1"]));
    assert!(ran.code == Some(2) && ran.stderr.contains("is a symbolic link"), "{}", ran.stderr);
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
}

/// A folder in LLaVA's layout: the language model with its tower, a config, a tokenizer.
fn base(name: &str) -> PathBuf {
    let last = trained().0.join("last");
    let base = copy(&last.join("base"), name);
    for entry in fs::read_dir(last.join("tokenizer")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), base.join(entry.file_name())).unwrap();
    }
    base
}

fn train_on(base: &Path, out: &str) -> std::process::Command {
    let base = format!("model.base={}", base.display());
    train(phantoms(), &path(out), &[&base, "model.train_base=false", "train.max_steps=1"])
}

#[test]
fn a_truncated_shard_of_a_base_is_refused() {
    let base = base("base");
    done(&mut train_on(&base, "on-a-base"));
    let shard = base.join("model.safetensors");
    let bytes = fs::metadata(&shard).unwrap().len();
    truncate(&shard, 100_000);
    let ran = run(&mut train_on(&base, "on-a-broken-base"));
    let error = error_text(&ran);
    let expected = format!("error: ~/base/model.safetensors: is truncated: expected {bytes} bytes");
    assert!(error.contains(&expected) && error.contains("found 100000 ("), "{error}");
    assert!(error.ends_with("hint: the file is incomplete: delete it and download or copy it again"), "{error}");
    assert_eq!(ran.code, Some(2));
}

#[test]
fn a_missing_or_invalid_base_is_refused() {
    refused(
        &mut train_on(&path("no-base"), "no-base-run"),
        "error: `model.base`: `~/no-base`: there is no such file or folder\n\
         hint: check the path; a repository of the hub is written `hub:owner/name`",
    );
    let ran = run(&mut train_on(phantoms(), "odd-base-run"));
    let error = error_text(&ran);
    assert_eq!(ran.code, Some(2), "{error}");
    assert!(error.starts_with("error: `model.base`: `~/phantoms`: "), "{error}");
    assert!(error.contains("no weights (`*.safetensors`, `*.bin`, `*.pth`)") && error.contains(" and "), "{error}");
    assert!(error.ends_with("more)\nhint: check the path"), "{error}");
}

/// Writes weights again: those for which `keep` gives a tensor.
fn rewrite(file: &Path, to: &Path, keep: impl Fn(&str, Tensor) -> Option<Tensor>) {
    let archive = Archive::open(file).unwrap();
    let tensors: Vec<(String, Tensor)> = archive
        .names()
        .iter()
        .filter_map(|name| Some((name.clone(), keep(name, archive.read(name).unwrap())?)))
        .collect();
    drop(archive);
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(to, &tensors, &BTreeMap::new()).unwrap();
}

#[test]
fn a_check_opens_the_weights_of_a_base() {
    let check = |base: &Path| {
        let ran = run(train_on(base, "on-a-checked-base").arg("--check"));
        assert!(!path("on-a-checked-base").exists());
        ran
    };
    let refused = |base: &Path, words: &[&str]| {
        let ran = check(base);
        assert!(ran.code == Some(2) && words.iter().all(|word| ran.stderr.contains(word)), "{words:?}: {}", ran.stderr);
        assert!(!ran.stdout.contains("can start"), "{}", ran.stdout);
    };
    let base = base("checked-base");
    let fine = check(&base);
    let text = "the training can start on the CPU: settings, rows, and names and shapes of the weights were checked; memory was planned";
    assert!(fine.code == Some(0) && fine.stdout.contains(text), "{} {}", fine.stdout, fine.stderr);
    let file = base.join("model.safetensors");
    let whole = path("checked-base-weights");
    fs::rename(&file, &whole).unwrap();
    refused(&base, &["checked-base"]);
    let last = "model.layers.0.mlp.down_proj.weight";
    rewrite(&whole, &file, |name, tensor| (name != last).then_some(tensor));
    refused(&base, &["1 missing", last]);
    rewrite(&whole, &file, |name, tensor| {
        Some(if name == last { tensor.transpose(0, 1).contiguous() } else { tensor })
    });
    refused(&base, &["1 of another shape", last]);
    fs::write(&file, "").unwrap();
    refused(&base, &["model.safetensors"]);
    // two files with an index
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for (number, shard) in shards.iter().enumerate() {
        rewrite(&whole, &base.join(shard), |name, tensor| {
            (name.starts_with("model.") == (number == 0)).then_some(tensor)
        });
    }
    let names = Archive::open(&whole).unwrap().names().to_vec();
    let map: BTreeMap<&String, &str> =
        names.iter().map(|name| (name, shards[usize::from(!name.starts_with("model."))])).collect();
    fs::write(base.join("model.safetensors.index.json"), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    fs::remove_file(&file).unwrap();
    assert_eq!(check(&base).code, Some(0));
    let second = fs::read(base.join(shards[1])).unwrap();
    for content in [&second[..0], &second[..99]] {
        fs::write(base.join(shards[1]), content).unwrap();
        refused(&base, &[shards[1]]);
    }
    fs::remove_file(base.join(shards[1])).unwrap();
    refused(&base, &["1 of 2 shards are missing", shards[1]]);
    fs::write(base.join(shards[1]), second).unwrap();
    // the file that transformers would read too
    fs::copy(&whole, &file).unwrap();
    let both = check(&base);
    assert!(both.code == Some(0) && both.stderr.contains("model.safetensors` is read, and `"), "{}", both.stderr);
}

#[test]
fn a_base_with_other_weights_is_noticed() {
    let base = base("changed-base");
    let out = path("on-a-changed-base");
    done(&mut train_on(&base, "on-a-changed-base"));
    let resume = |more: &[&str]| {
        let set = format!("model.base={}", base.display());
        let mut command = train(phantoms(), &out, &[&set, "model.train_base=false", "train.max_steps=2"]);
        run(command.arg("--resume").args(more))
    };
    let file = base.join("model.safetensors");
    let whole = path("changed-base-weights");
    fs::copy(&file, &whole).unwrap();
    let before = done(&mut predict(&out));
    // one tensor, and only its last values
    for (name, change) in [("model.norm.weight", 0.5), ("model.layers.0.self_attn.o_proj.weight", 2.0)] {
        rewrite(&whole, &file, |key, tensor| {
            let flat = tensor.view([-1]);
            let last = flat.size()[0] - 4;
            let tail = flat.narrow(0, last, 4) * change;
            let changed =
                || Tensor::cat(&[flat.narrow(0, 0, last), tail.shallow_clone()], 0).view(tensor.size().as_slice());
            Some(if key == name { changed() } else { tensor.copy() })
        });
        for more in [&["--check"][..], &[]] {
            let ran = resume(more);
            let text = "has other weights than those that the run began with";
            assert!(ran.code == Some(2) && ran.stderr.contains(text), "{name}: {}", ran.stderr);
        }
        let ran = run(&mut predict(&out));
        let text = "has other weights than those that this checkpoint was trained with";
        assert!(ran.code == Some(0) && ran.stderr.contains(text), "{name}: {}", ran.stderr);
    }
    // a new run that starts from it warns, and then has the weights that it began with
    let set = format!("model.base={}", base.display());
    let child = path("from-a-changed-base");
    let mut init = train(phantoms(), &child, &[&set, "model.train_base=false", "train.max_steps=1"]);
    let ran = run(init.arg("--init").arg(&out));
    assert!(ran.code == Some(0) && ran.stderr.contains("than those that the run of `--init`"), "{}", ran.stderr);
    let ran = run(&mut predict(&child));
    assert!(ran.code == Some(0) && !ran.stderr.contains("other weights"), "{}", ran.stderr);
    // the weights of the training, written anew
    rewrite(&whole, &file, |_, tensor| Some(tensor));
    let ran = run(&mut predict(&out));
    assert!(ran.code == Some(0) && !ran.stderr.contains("other weights"), "{}", ran.stderr);
    assert_eq!(ran.stdout, before);
    assert_eq!(resume(&[]).code, Some(0));
}

#[test]
fn tokens_without_a_row_in_the_embeddings_are_plain_text() {
    let base = base("base-with-tokens");
    let plain = path("on-a-plain-base");
    done(&mut train_on(&base, "on-a-plain-base"));
    let file = base.join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let rows = json["model"]["vocab"].as_object().unwrap().len();
    for (number, content) in ["lesion", "<pad>"].into_iter().enumerate() {
        json["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({
            "id": rows + number, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": number == 1
        }));
    }
    fs::write(&file, json.to_string()).unwrap();
    let ran = run(&mut train_on(&base, "on-a-base-with-tokens"));
    let warning = "2 added tokens of the tokenizer (`lesion`, `<pad>`) have no row in the embeddings";
    assert!(ran.code == Some(0) && ran.stderr.contains(warning), "{}", ran.stderr);
    let run_folder = path("on-a-base-with-tokens");
    assert_eq!(differing(&run_folder.join("last"), &plain.join("last")), [""; 0], "words are cut as before");
    // a piece of the vocabulary
    json["model"]["vocab"]["zzz"] = rows.into();
    fs::write(&file, json.to_string()).unwrap();
    let ran = run(train_on(&base, "on-another-tokenizer").arg("--check"));
    let error = error_text(&ran);
    assert!(
        ran.code == Some(2) && error.contains(&format!("its tokenizer has {} ids, its embeddings", rows + 1)),
        "{error}"
    );
}

#[test]
fn code_in_a_pickle_is_not_executed() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pth/malicious.pth");
    let encoder = format!("model.image_encoder={}", file.display());
    let ran = run(&mut train(phantoms(), &path("malicious"), &[&encoder, "train.max_steps=1"]));
    let expected = format!(
        "error: `model.image_encoder`: `{}`: refuses to execute `posix.system`: only tensors are read from a pickle\n\
         hint: if you trust the file, load it in PyTorch and write it again with \
         `torch.save(model.state_dict(), FILE)`",
        file.display()
    );
    assert_eq!((error_text(&ran), ran.code), (expected, Some(2)));
}

#[test]
fn a_full_disk_during_a_save_keeps_the_old_checkpoint() {
    let run = copy(&trained().0, "full-disk");
    let mut command = resume(&run);
    command.args(["--set", "train.max_steps=8"]);
    // as a full disk
    limit(&mut command, libc::RLIMIT_FSIZE, 2 << 20);
    let ran = crate::support::run(&mut command);
    let continues = "training continues, `last/` holds the state after step 6: free some space";
    assert!(ran.stderr.contains("no room on the disk for the checkpoint `last/`"), "{}", ran.stderr);
    assert!(ran.stderr.contains(continues), "{}", ran.stderr);
    let error = error_text(&ran);
    // the last checkpoint of a run must be written
    assert!(error.starts_with("error: ~/full-disk/.last.prsmed-tmp-"), "{error}");
    assert!(
        error.contains(".safetensors: cannot write\ncaused by: File too large (os error 27)\nhint: files of"),
        "{error}"
    );
    assert_eq!(ran.code, Some(2));
    for name in ["best", "last"] {
        assert_eq!(differing(&run.join(name), &trained().0.join(name)), [""; 0], "the old checkpoint is unchanged");
    }
    let names = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name().display().to_string());
    let left: Vec<String> = names.filter(|name| name.contains("tmp-")).collect();
    assert_eq!(left, [""; 0], "no partial checkpoint is left");
    done(&mut resume(&run));
}

#[test]
fn a_full_disk_is_reported_for_each_output() {
    let folder = folder("full-outputs");
    let mask = folder.join("mask.png");
    std::os::unix::fs::symlink("/dev/full", &mask).unwrap();
    let ran = run(predict(&trained().0).arg("--mask-out").arg(&mask));
    assert_eq!(
        (error_text(&ran).as_str(), ran.code),
        (
            "error: ~/full-outputs/mask.png: cannot write\ncaused by: No space left on device (os error 28)\n\
             hint: free some space on that disk and run the same command again; finished work is kept",
            Some(2)
        )
    );
    let full = Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let output = prsmed().args(["hub", "ls"]).arg(phantoms()).stdout(full).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("error: standard output: cannot write\ncaused by: No space left on device"), "{error}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn invalid_outputs_are_refused_before_the_work() {
    let run = &trained().0;
    refused(
        predict(run).args(["--mask-out", "none/mask.png"]),
        "error: `--mask-out`: `none` is not a folder\nhint: create the folder first, or choose another path",
    );
    refused(
        predict(run).args(["--mask-out", "mask.jpg"]),
        "error: `--mask-out`: `mask.jpg` has the wrong file extension\nhint: use a file name that ends in `.png`",
    );
    refused(
        prsmed().arg("predict").arg(run).args(["--question", "Where?", "--image", "none.png"]),
        "error: `--image`: there is no file `none.png`\nhint: give a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM file, a NIfTI or DICOM file, or a \
         folder or zip of DICOM files",
    );
    refused(
        eval(run).args(["--split", "tset"]),
        "error: `--split`: there is no split `tset`\nhint: use train, val or test",
    );
}
