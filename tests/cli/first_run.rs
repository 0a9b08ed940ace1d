//! The first run of a new user: weight files checked before any download, published runs from the hub, `doctor`.
//! The hub is a loopback server whose repositories have the layouts of the real ones, with tiny weights.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use prsmed::tensor::Tensor;
use prsmed::tensor::weights::Archive;
use serde_json::{Value, json};

use crate::loopback::{COMMIT, Server, Stored, large, small};
use crate::pth;
use crate::support::{Ran, copy, done, error_text, folder, objects, path, phantoms, prsmed, run, train, trained};

/// The sizes of TinySAM's image encoder in a small model.
const TINY_VIT: [&str; 9] = [
    "model.sizes.encoder.embed_dims=[64, 128, 160, 320]",
    "model.sizes.encoder.depths=[2, 2, 6, 2]",
    "model.sizes.encoder.num_heads=[2, 4, 5, 10]",
    "model.sizes.encoder.window_sizes=[7, 7, 14, 7]",
    "model.sizes.encoder.out_dim=256",
    "model.sizes.decoder_heads=[8, 16]",
    "model.decoder_positions=false",
    "train.max_steps=1",
    "train.validate_every_epochs=0",
];

fn tensors(file: &Path) -> Vec<(String, Tensor)> {
    let archive = Archive::open(file).unwrap();
    archive.names().iter().map(|name| (name.clone(), archive.read(name).unwrap())).collect()
}

fn renamed(prefixes: &[&str], tensors: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let with = |prefix: &&str| {
        tensors
            .iter()
            .map(move |(name, tensor)| (format!("{prefix}{name}"), tensor.shallow_clone()))
            .collect::<Vec<_>>()
    };
    prefixes.iter().flat_map(with).collect()
}

/// Folders in the layouts of the published repositories: `llava`, `tinysam`, `prs-med`.
fn repositories() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let (root, trained, merged) = (folder("repositories"), path("first-run-trained"), path("first-run-merged"));
        done(&mut train(phantoms(), &trained, &TINY_VIT));
        done(prsmed().arg("merge").arg(&trained).arg(&merged));
        let last = trained.join("last");
        fs::rename(merged.join("base"), root.join("llava")).unwrap();
        fs::create_dir_all(root.join("tinysam")).unwrap();
        let encoder = tensors(&last.join("image_encoder.safetensors"));
        let encoder = renamed(&[""], &encoder);
        let bare: Vec<(String, Tensor)> = encoder
            .into_iter()
            .map(|(name, tensor)| (name.trim_start_matches("image_encoder.").to_owned(), tensor))
            .collect();
        pth::write(&root.join("tinysam/tinysam.pth"), &renamed(&["image_encoder."], &bare));
        fs::write(root.join("tinysam/README.md"), "TinySAM").unwrap();
        // as an early version of the published code saves a run: the tokenizer is beside the adapter
        let published = root.join("prs-med/llm_seg_16");
        copy(&last.join("lora_adapter"), "repositories/prs-med/llm_seg_16/lora_adapter");
        copy(&last.join("tokenizer"), "repositories/prs-med/llm_seg_16/lora_adapter");
        let config = published.join("lora_adapter/adapter_config.json");
        let mut adapter: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
        adapter["base_model_name_or_path"] = json!("lab/llava");
        fs::write(&config, adapter.to_string()).unwrap();
        pth::write(&published.join("image_encoder.pth"), &renamed(&["sam.image_encoder.", "image_encoder."], &bare));
        for part in ["mask_decoder", "cls"] {
            pth::write(&published.join(format!("{part}.pth")), &tensors(&last.join(format!("{part}.safetensors"))));
        }
        fs::write(root.join("prs-med/README.md"), "PRS-Med").unwrap();
        root
    })
}

/// Adds all files below `folder` to a repository.
pub(crate) fn publish(server: &Server, repo: &str, folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() {
            publish(server, repo, &path, &format!("{name}/"));
        } else {
            server.add(repo, &name, Stored::of(fs::read(path).unwrap()));
        }
    }
}

/// A hub with the three repositories of a laboratory.
fn hub() -> Server {
    let server = Server::start(Vec::new());
    for name in ["llava", "tinysam", "prs-med"] {
        publish(&server, &format!("lab/{name}"), &repositories().join(name), "");
    }
    server
}

/// The binary with an empty cache of its own.
pub(crate) fn with_cache(server: &Server, name: &str) -> Command {
    let mut command = prsmed();
    command.env("HF_ENDPOINT", &server.address).env("HF_HOME", path(name)).env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// `train` with the full preset and the laboratory's weights.
fn train_full(server: &Server, cache: &str, out: &Path, sets: &[&str]) -> Command {
    let mut command = with_cache(server, cache);
    command.args(["train", "--no-plan", "--preset", "full", "--data-root"]).arg(phantoms()).arg("--out").arg(out);
    let small = [
        "model.base=hub:lab/llava",
        "model.image_encoder=hub:lab/tinysam",
        "model.image_size=64",
        "train.max_steps=2",
        "train.epochs=1",
        "train.accumulation=1",
        "train.precision=fp32",
        "data.max_val_rows=2",
    ];
    for set in small.iter().chain(sets) {
        command.args(["--set", set]);
    }
    command
}

fn image() -> PathBuf {
    fs::read_dir(phantoms().join("brain_MRI/train_images")).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn a_training_from_an_empty_cache_lists_its_files_downloads_them_and_finishes() {
    let (server, out) = (hub(), path("first-run-full"));
    let ran = run(&mut train_full(&server, "cache-full", &out, &[]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let list = ran.stderr.find("note: weight files of this command").unwrap();
    for line in ["  download  model.base: hub:lab/llava (", "  download  model.image_encoder: hub:lab/tinysam ("] {
        assert!(ran.stderr[list..].contains(line), "{line}: {}", ran.stderr);
    }
    assert!(ran.stderr[list..].contains("\ndownload lab/llava") && ran.stderr.contains("free in `"), "{}", ran.stderr);
    assert!(ran.stdout.contains("mean of validation Dice and answer-token accuracy"), "{}", ran.stdout);
    assert!(out.join("last/checksums.json").is_file());
    let adapter = fs::read(out.join("last/lora_adapter/adapter_config.json")).unwrap();
    let adapter: Value = serde_json::from_slice(&adapter).unwrap();
    assert_eq!(adapter["base_model_name_or_path"], "lab/llava");
    // listings of all repositories come before the first file of weights (sizes and prompt format of the base are needed first)
    let asked = server.with(|state| state.log.iter().map(|request| request.path.clone()).collect::<Vec<_>>());
    let first_file = asked.iter().position(|path| !path.starts_with("/api") && !path.ends_with("config.json")).unwrap();
    let listed = &asked[..first_file];
    for repo in ["lab/llava", "lab/tinysam"] {
        assert!(listed.iter().any(|path| path.contains(repo)), "{asked:?}");
    }
    // a second run has everything, and works without the hub
    let again = path("first-run-again");
    let ran = run(train_full(&server, "cache-full", &again, &[]).env("HF_HUB_OFFLINE", "1"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("  ready     model.base: hub:lab/llava ("), "{}", ran.stderr);
    the_documented_python_snippet_loads(&out);
}

/// Runs the code of the export guide on a run whose base is in the cache that the run filled.
fn the_documented_python_snippet_loads(out: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join(".venv/bin/python");
    let ready = Command::new(&python).args(["-c", "import peft, transformers"]).output();
    if !ready.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(std::io::stderr(), "skipped: {} has no peft (run scripts/setup --checks)", python.display());
        return;
    }
    let guide = fs::read_to_string(root.join("docs/guides/resume-and-export.md")).unwrap();
    let code = guide.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let code = code.replace("runs/a/best", out.join("last").to_str().unwrap());
    let output = Command::new(&python)
        .args(["-c", &code])
        .env("HF_HOME", path("cache-full"))
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("lab/llava"), "{text}");
}

#[test]
fn a_run_warns_when_the_cache_has_another_base_than_it_was_trained_with() {
    let (server, out) = (hub(), path("first-run-pinned"));
    done(&mut train_full(&server, "cache-pinned", &out, &[]));
    let predict = || {
        let mut command = with_cache(&server, "cache-pinned");
        command
            .arg("predict")
            .arg(&out)
            .args(["--max-new-tokens", "2", "--question", "Where?", "--image"])
            .arg(image());
        let ran = run(&mut command);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        ran.stderr
    };
    assert!(!predict().contains("was trained with"));
    // a new commit with other text is the same base
    let newer = "f".repeat(40);
    server.add("lab/llava", "README.md", small("better words"));
    server.with(|state| state.commit.clone_from(&newer));
    assert!(!predict().contains("was trained with"));
    // a new commit with other weights
    let name = "model.safetensors";
    let mut changed = fs::read(repositories().join("llava").join(name)).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    server.add("lab/llava", name, Stored::of(changed));
    let newest = "e".repeat(40);
    server.with(|state| state.commit.clone_from(&newest));
    let text = predict().split_whitespace().collect::<Vec<_>>().join(" ");
    let warning = format!(
        "`base` is loaded from `hub:lab/llava@{newest}`, but this checkpoint was trained with `hub:lab/llava@{COMMIT}`"
    );
    assert!(text.contains(&warning) && text.contains(&format!("changed files: {name}")), "{text}");
}

#[test]
fn a_published_run_answers_from_the_hub_with_the_base_that_its_adapter_names() {
    let server = hub();
    let predict = |server: &Server| {
        let mut command = with_cache(server, "cache-predict");
        command.args(["--json", "predict", "hub:lab/prs-med", "--max-new-tokens", "2", "--image"]).arg(image());
        command.args(["--question", "Where is the lesion?"]);
        command
    };
    let lines = objects(&done(&mut predict(&server)));
    let files = lines.iter().find(|line| line["kind"] == "files").unwrap();
    let specs: Vec<&str> =
        files["files"].as_array().unwrap().iter().map(|file| file["spec"].as_str().unwrap()).collect();
    assert_eq!(specs, ["hub:lab/prs-med/llm_seg_16", "hub:lab/llava"]);
    assert!(
        files["download_bytes"].as_u64().unwrap() > 20_000_000 && files["free_bytes"].as_u64().is_some(),
        "{files}"
    );
    assert!(lines.last().unwrap()["answer"].is_string(), "{lines:?}");
    let asked = server.with(|state| state.log.iter().any(|request| request.path.ends_with("README.md")));
    assert!(!asked, "only the files of the run are downloaded");
    done(predict(&server).env("HF_HUB_OFFLINE", "1"));
}

#[test]
fn a_run_of_this_program_on_the_hub_is_opened_whole() {
    let server = Server::start(Vec::new());
    publish(&server, "lab/own", &trained().0, "");
    let mut predict = with_cache(&server, "cache-own");
    predict.args(["--json", "predict", "hub:lab/own", "--max-new-tokens", "2", "--image"]).arg(image());
    let lines = objects(&done(predict.args(["--question", "Is it malignant?"])));
    let answer = lines.last().unwrap();
    assert_eq!(answer["question_known"], false, "the questions of the training come with the run: {answer}");
}

/// A data root with the class `lung_Xray`, which published runs know, prepared from a copy of images in `images`.
fn prepare_lungs(images: &str, root: &Path) -> Ran {
    let images = copy(&phantoms().join("lung_Xray"), images);
    fs::write(images.join("train_images/notes.txt"), "").unwrap();
    let mut prepare = prsmed();
    prepare.args(["data", "prepare", "--modality", "lung_Xray", "--val-frac", "0", "--test-frac", "0", "--images"]);
    prepare.arg(images.join("train_images")).arg("--masks").arg(images.join("train_masks"));
    let ran = run(prepare.arg("--out").arg(root));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran
}

#[test]
fn a_run_on_the_hub_is_scored_and_merged() {
    let (server, root) = (hub(), path("first-run-data"));
    let notes = path("first-run-images").join("train_images/notes.txt");
    let ran = prepare_lungs("first-run-images", &root);
    let (made, next) = (root.display(), root.display());
    let expected = format!("3 images, 6 questions in {made}; 1 files skipped\nnext: prsmed data check {next}\n");
    assert_eq!(ran.stdout, expected);
    let warning = format!("warning: {}: skipped, not a PNG, JPEG, TIFF, BMP, GIF, WebP or PGM file\n", notes.display());
    assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
    let mut eval = with_cache(&server, "cache-eval");
    eval.args(["eval", "hub:lab/prs-med/llm_seg_16", "--limit", "1", "--max-new-tokens", "2", "--split", "train"]);
    let text = done(eval.arg("--data-root").arg(&root));
    assert!(text.contains("report in llm_seg_16-eval-train") && path("llm_seg_16-eval-train").is_dir(), "{text}");
    done(with_cache(&server, "cache-eval").args(["merge", "hub:lab/prs-med"]).arg(path("merged-from-hub")));
    assert!(path("merged-from-hub/base/config.json").is_file());
}

#[test]
fn a_checkpoint_that_was_uploaded_predicts_as_its_folder_does() {
    let (server, best) = (hub(), trained().0.join("best"));
    publish(&server, "lab/shared", &best, "");
    server.add("lab/shared", "README.md", small("a model card"));
    let mask = |run: &Path, name: &str| {
        let out = path(name);
        let mut predict = with_cache(&server, "cache-shared");
        predict
            .args(["predict", "--question", "Where is the lesion?", "--max-new-tokens", "2", "--image"])
            .arg(image());
        done(predict.arg("--mask-out").arg(&out).arg(run));
        fs::read(out).unwrap()
    };
    assert_eq!(mask(Path::new("hub:lab/shared"), "shared.png"), mask(&best, "own.png"));
}

#[test]
fn a_repository_with_several_runs_asks_for_one() {
    let server = hub();
    for name in ["llm_seg_1", "llm_seg_2"] {
        for file in ["mask_decoder.pth", "lora_adapter/adapter_config.json"] {
            server.add("lab/two", &format!("{name}/{file}"), large(10));
        }
    }
    let mut predict = with_cache(&server, "cache-none");
    let ran = run(predict.args(["predict", "hub:lab/two", "--question", "Where?", "--image"]).arg(image()));
    assert_eq!(
        error_text(&ran),
        "error: `hub:lab/two`: contains several runs: `llm_seg_1`, `llm_seg_2`\n\
         hint: name one of them, for example `hub:lab/two/llm_seg_1`"
    );
}

/// What is missing stops the command before anything is downloaded.
fn stops_before_downloads(sets: &[&str], server: &Server, error: &str, listed: &str) {
    let ran = run(&mut train_full(server, "cache-none", &path("first-run-never"), sets));
    assert_eq!((ran.code, error_text(&ran).as_str()), (Some(2), error), "{}", ran.stderr);
    assert!(ran.stderr.contains(listed), "{listed}: {}", ran.stderr);
    assert!(weights(server).is_empty(), "{:?}", weights(server));
}

/// The downloads without `config.json` and `tokenizer_config.json` of the base, which are read first.
fn weights(server: &Server) -> Vec<(String, String)> {
    server.downloads().into_iter().filter(|(path, _)| !path.ends_with("config.json")).collect()
}

#[test]
fn a_missing_file_stops_a_training_before_any_download() {
    let server = hub();
    stops_before_downloads(
        &["model.image_encoder=absent.pth"],
        &server,
        "error: `model.image_encoder`: `absent.pth`: there is no such file or folder\n\
         hint: check the path; a repository of the hub is written `hub:owner/name`",
        "  download  model.base: hub:lab/llava (",
    );
    stops_before_downloads(
        &["model.image_encoder=hub:lab/absent"],
        &server,
        "error: `hub:lab/absent`: the repository does not exist at revision `main` (HTTP 404) (`model.image_encoder`)\n\
         hint: check the spelling of `hub:owner/name@revision`; a data set is written `dataset:owner/name`",
        "  missing   model.image_encoder: ",
    );
    server.add("lab/two", "a.pth", large(10));
    server.add("lab/two", "b.safetensors", large(20));
    stops_before_downloads(
        &["model.image_encoder=hub:lab/two"],
        &server,
        "error: `hub:lab/two`: contains 2 weight files where one is expected: `a.pth`, `b.safetensors` \
         (`model.image_encoder`)\n\
         hint: name one of them, for example `hub:lab/two/a.pth`",
        "  missing   model.image_encoder: ",
    );
}

#[test]
fn a_download_that_the_disk_has_no_room_for_is_refused() {
    let server = hub();
    let huge = Stored { listed_bytes: Some(1 << 60), ..large(10) };
    server.add("lab/huge", "tinysam.pth", huge);
    let ran =
        run(&mut train_full(&server, "cache-none", &path("first-run-huge"), &["model.image_encoder=hub:lab/huge"]));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let error = error_text(&ran);
    assert!(error.contains("the download needs 1073741824.") && error.contains(" free\nhint: "), "{error}");
    assert!(weights(&server).is_empty());
}

#[test]
fn the_default_preset_names_weights_that_can_be_downloaded() {
    for preset in ["full", "cpu", "gpu-8gb", "gpu-24gb", "gpu-141gb"] {
        let text = done(prsmed().args(["train", "--print-config", "--preset", preset]));
        for line in ["base = \"hub:microsoft/llava-med-v1.5-mistral-7b\"", "image_encoder = \"hub:merve/tinysam\""] {
            assert!(text.contains(line), "{preset}: {text}");
        }
    }
    let found = done(prsmed().args(["preset", "--gpu", "24gb"]));
    assert!(found.contains("\npreset = \"full\"\n"), "{found}");
}

#[test]
fn a_gpu_preset_without_a_gpu_stops_and_points_to_doctor() {
    let mut command = prsmed();
    command.env("CUDA_VISIBLE_DEVICES", "").args(["train", "--preset", "gpu-24gb", "--data-root"]).arg(phantoms());
    let ran = run(&mut command);
    let error = error_text(&ran);
    assert_eq!(ran.code, Some(2), "{error}");
    assert!(error.starts_with("error: `--preset`: `gpu-24gb` needs a GPU, and none is usable: "), "{error}");
    assert!(error.contains("`prsmed doctor`") && error.contains("`--preset cpu`"), "{error}");
}

#[test]
fn doctor_reports_the_machine_and_never_shows_the_token() {
    let server = Server::start(Vec::new());
    let doctor = || {
        let mut command = with_cache(&server, "cache-doctor");
        command.env("HF_TOKEN", "hf_secret").arg("doctor");
        command
    };
    let text = done(&mut doctor());
    assert!(text.starts_with("libtorch  2.11"), "{text}");
    for part in [
        "none is usable: ",
        " of memory available",
        " free\n",
        "token     set\n",
        ": reachable\n",
        "possible on the CPU",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let found = objects(&done(doctor().arg("--json")));
    assert_eq!((&found[0]["token_is_set"], &found[0]["training_device"]), (&json!(true), &json!("cpu")));
    assert!(!text.contains("secret") && !found[0].to_string().contains("secret"));
    let dead = done(doctor().env("HF_ENDPOINT", "http://127.0.0.1:9").env_remove("HF_TOKEN"));
    assert!(dead.contains("not reachable: ") && dead.contains("token     not set"), "{dead}");
}

/// The commands of the guide `docs/guides/reproduce.md`, with a small data set and small weights.
#[test]
fn published_weights_are_scored_on_a_published_data_set() {
    let (server, root) = (hub(), path("reproduce-data"));
    prepare_lungs("reproduce-images", &root);
    publish(&server, "datasets/lab/prs-med", &root, "");
    let cache = "cache-reproduce";
    let data = done(with_cache(&server, cache).args(["hub", "get", "--quiet", "dataset:lab/prs-med"]));
    let data = Path::new(data.trim_end());
    assert!(data.join("annotations").is_dir() && data.ends_with(COMMIT), "{}", data.display());
    done(with_cache(&server, cache).args(["data", "check"]).arg(data));
    for semantics in ["reference", "corrected"] {
        let out = path(&format!("reproduced-{semantics}"));
        let mut eval = with_cache(&server, cache);
        eval.args(["eval", "hub:lab/prs-med", "--semantics", semantics, "--split", "train", "--limit", "1"]);
        done(eval.args(["--max-new-tokens", "2", "--data-root"]).arg(data).arg("--out").arg(&out));
        assert!(out.join("summary.json").is_file());
    }
    // a training on the data set, from the published weights
    let out = path("trained-on-the-hub");
    let mut train = with_cache(&server, cache);
    train.args(["train", "--no-plan", "--preset", "full", "--init", "hub:lab/prs-med", "--data-root"]).arg(data);
    for set in ["train.max_steps=1", "train.accumulation=1", "train.precision=fp32", "model.image_size=64"] {
        train.args(["--set", set]);
    }
    done(train.arg("--out").arg(&out));
    assert!(out.join("last/model.json").is_file());
}
