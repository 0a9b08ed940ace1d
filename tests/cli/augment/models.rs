//! Generators from files: a pipeline's folder, the same pipeline from a local hub and from its cache, a ControlNet.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};

use prsmed::augment::pipeline_config::PipelineConfig;
use prsmed::models::diffusion::{controlnet, text::TextTower, unet::Unet, vae::Vae};
use prsmed::tensor::store::{Role, Store, StoreOptions};
use prsmed::tensor::weights::write_safetensors;
use prsmed::tensor::{Device, Kind, Tensor};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{assert_rows_are_correct, generate, journal, tree, word};
use crate::support::{copy, done, error_text, folder, path, phantoms, prsmed, run};

const NETWORK: &str = "diffusion_pytorch_model.safetensors";

fn write_json(file: &Path, value: &impl Serialize) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, serde_json::to_vec(value).unwrap()).unwrap();
}

/// Writes deterministic weights for the network that `build` creates: scales near one, other weights by fan-in.
fn write_weights(file: &Path, phase: f64, build: impl FnOnce(&Store)) {
    let store = Store::new(StoreOptions { initialise: false, ..StoreOptions::cpu() });
    build(&store);
    let wave = |name: &str, shape: &[i64]| {
        let count: i64 = shape.iter().product();
        let scale = if shape.len() == 1 { 0.05 } else { 1.5 / ((count / shape[0]) as f64).sqrt() };
        let middle = f64::from(u8::from(shape.len() == 1 && name.ends_with("weight")));
        let wave = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.9 + phase).sin() * scale + middle;
        wave.view(shape).to_kind(Kind::Float)
    };
    let tensors: Vec<_> = store.entries().into_iter().map(|e| (wave(&e.name, &e.tensor.size()), e.name)).collect();
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(tensor, name)| (name.as_str(), tensor)).collect();
    write_safetensors(file, &named, &BTreeMap::new()).unwrap();
}

/// A small Stable Diffusion 1.x pipeline in diffusers' layout, and a ControlNet in another folder.
fn pipeline(name: &str) -> (PathBuf, PathBuf) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pipelines/sd15");
    let root = copy(&fixture, name);
    let vae = PipelineConfig::random("tiny", false).unwrap().vae;
    write_json(&root.join("vae/config.json"), &vae);
    let sizes = PipelineConfig::open("", &root, None, "").unwrap();
    write_weights(&root.join("unet").join(NETWORK), 1.0, |store| {
        drop(Unet::new(&store.root(Role::Frozen), &sizes.unet));
    });
    write_weights(&root.join("vae").join(NETWORK), 2.0, |store| drop(Vae::new(&store.root(Role::Frozen), &vae)));
    write_weights(&root.join("text_encoder/model.safetensors"), 3.0, |store| {
        drop(TextTower::new(&store.root(Role::Frozen), &sizes.texts[0], false));
    });
    let control = folder(&format!("{name}-control"));
    let config = controlnet::Config::of(sizes.unet);
    write_json(&control.join("config.json"), &config);
    write_weights(&control.join(NETWORK), 4.0, |store| {
        drop(controlnet::ControlNet::new(&store.root(Role::Frozen), &config));
    });
    (root, control)
}

/// Serves a folder as the repository `owner/name` of a hub; returns the address.
fn serve(root: &Path) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let root = root.to_path_buf();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let root = root.clone();
            // A closed connection is not a failure of the server.
            std::thread::spawn(move || stream.and_then(|stream| answer(&stream, &root)));
        }
    });
    address
}

fn answer(mut stream: &TcpStream, root: &Path) -> std::io::Result<()> {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let target = request.split(' ').nth(1).unwrap_or_default();
    let (mut status, mut body, mut tag) = ("200 OK".to_owned(), Vec::new(), String::new());
    if target.starts_with("/api/models/owner/name/revision/") {
        let files: Vec<_> = tree(root).into_keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        body = serde_json::to_vec(&serde_json::json!({ "id": "owner/name", "sha": COMMIT, "siblings": files }))?;
    } else if let Some(name) = target.strip_prefix("/owner/name/resolve/").and_then(|rest| rest.split_once('/')) {
        body = fs::read(root.join(name.1))?;
        tag = format!("{:x}", Sha256::digest(&body));
        let range =
            headers.iter().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        if let Some((from, to)) = range.as_deref().and_then(|range| range.split_once('-')) {
            let from: usize = from.parse().unwrap_or(0);
            let to = to.parse().map_or(body.len(), |to: usize| (to + 1).min(body.len()));
            status = format!("206 Partial Content\r\nContent-Range: bytes {from}-{}/{}", to - 1, body.len());
            body = body[from..to].to_vec();
        }
    } else {
        status = String::from("404 Not Found");
    }
    let tag = format!("ETag: \"{tag}\"\r\nX-Repo-Commit: {COMMIT}\r\nAccept-Ranges: bytes");
    write!(stream, "HTTP/1.1 {status}\r\n{tag}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len())?;
    if !request.starts_with("HEAD") {
        stream.write_all(&body)?;
    }
    stream.flush()
}

/// Files of a root of pairs that do not name the model.
fn files_of(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let names_it = ["augment.json", "manifest.jsonl", "report.html"];
    tree(root).into_iter().filter(|(name, _)| !names_it.contains(&name.as_str())).collect()
}

#[test]
fn folder_hub_and_cache_give_the_same_pairs() {
    let (model, _) = pipeline("model");
    let from_folder = path("pairs-of-a-folder");
    done(generate(phantoms(), &from_folder, &["--limit", "3", "--model"]).arg(&model));
    let classes: BTreeSet<String> =
        journal(&from_folder).iter().map(|record| word(record, "class").to_owned()).collect();
    assert_eq!(classes.len(), 3, "the images are spread over the classes: {classes:?}");
    assert_rows_are_correct(&from_folder);
    let pairs = files_of(&from_folder);
    assert!(pairs.len() > 10);
    let sum = journal(&from_folder)[0]["model_sha256"].as_str().unwrap().to_owned();
    assert_eq!(sum.len(), 64);
    let address = serve(&model);
    let from_hub = path("pairs-of-a-hub");
    let hub = ["--limit", "3", "--model", "hub:owner/name"];
    done(generate(phantoms(), &from_hub, &hub).env("HF_ENDPOINT", address).env("HF_HOME", path("hub-of-models")));
    assert_eq!(files_of(&from_hub), pairs);
    assert_eq!(journal(&from_hub)[0]["model_sha256"], sum);
    let from_cache = path("pairs-of-a-cache");
    done(generate(phantoms(), &from_cache, &hub).env("HF_HUB_OFFLINE", "1").env("HF_HOME", path("hub-of-models")));
    assert_eq!(files_of(&from_cache), pairs);
    // A run with other weights of the same name does not continue these pairs.
    write_weights(&model.join("vae").join(NETWORK), 9.0, |store| {
        drop(Vae::new(&store.root(Role::Frozen), &PipelineConfig::random("tiny", false).unwrap().vae));
    });
    let ran = run(generate(phantoms(), &from_folder, &["--limit", "3", "--model"]).arg(&model));
    assert!(ran.code == Some(2) && error_text(&ran).contains("(model_sha256 was "), "{}", ran.stderr);
    fs::remove_file(model.join("unet").join(NETWORK)).unwrap();
    let ran = run(generate(phantoms(), &path("never-of-a-folder"), &["--model"]).arg(&model));
    assert!(
        ran.code == Some(2) && error_text(&ran).contains("~/model/unet: contains no safetensors"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_model_in_one_file_is_refused_with_the_line_that_converts_it() {
    let file = folder("model-in-one-file").join("model.safetensors");
    fs::write(&file, "weights").unwrap();
    let hub = Path::new("hub:owner/name/model.safetensors");
    for (section, model) in [("augment", file.as_path()), ("finetune", &file), ("augment", hub)] {
        let set = format!("{section}.model={}", model.display());
        let ran = run(prsmed().args(["plan", "--task", section, "--gpu", "24gb", "--set", &set]));
        let said = error_text(&ran);
        assert!(ran.code == Some(2) && said.contains(&format!("`{section}.model`")), "{}", ran.stderr);
        assert!(said.contains("from_single_file(FILE).save_pretrained(FOLDER)"), "{}", ran.stderr);
    }
    let removed = ["plan", "--task", "augment", "--gpu", "24gb", "--set", "augment.base_pipeline=hub:owner/name"];
    let ran = run(prsmed().args(removed));
    let said = error_text(&ran);
    assert!(
        ran.code == Some(2) && said.contains("`augment.base_pipeline`: this setting was removed"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_lora_of_another_model_is_refused_before_the_work() {
    let folder = folder("other-lora");
    let stem = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q";
    let wide = folder.join("wide.safetensors");
    let zeros = |shape: [i64; 2]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let write = |file: &Path, stem: &str, width: i64| {
        let (down, up) = (zeros([4, width]), zeros([width, 4]));
        let names = [format!("{stem}.lora_A.weight"), format!("{stem}.lora_B.weight")];
        write_safetensors(file, &[(&names[0], &down), (&names[1], &up)], &BTreeMap::new()).unwrap();
    };
    write(&wide, stem, 320);
    let text = folder.join("text.safetensors");
    write(&text, "text_encoder_2.text_model.encoder.layers.0.mlp.fc1", 32);
    for (file, parts) in [
        (
            &wide,
            ["~/other-lora/wide.safetensors: the adapter of `down_blocks.0.", "[4, 320] and [320, 4], its weight is"],
        ),
        (&text, ["~/other-lora/text.safetensors: changes `text_model.encoder.", "of a second text encoder"]),
    ] {
        let out = path("never-with-a-lora");
        let ran = run(generate(phantoms(), &out, &["--lora"]).arg(file));
        let said = error_text(&ran);
        assert!(ran.code == Some(2) && parts.iter().all(|part| said.contains(part)), "{}", ran.stderr);
        assert!(said.contains("hint: use a LoRA that was trained for this model"), "{said}");
        assert!(!ran.stderr.contains("loading the generator"), "{}", ran.stderr);
    }
}

#[test]
fn a_controlnet_paints_from_masks() {
    let (model, control) = pipeline("model-with-control");
    let set = |control: &Path| format!("augment.controlnet={}", control.display());
    let made = |name: &str, more: &[&str]| {
        let mut command =
            generate(phantoms(), &path(name), &["--limit", "2", "--mode", "mask_to_image", "--no-filter"]);
        command.args(["--set", &set(&control), "--model"]).arg(&model).args(more);
        done(&mut command);
        assert_rows_are_correct(&path(name));
        files_of(&path(name))
    };
    let strong = made("pairs-controlled", &[]);
    assert_ne!(made("pairs-without-control", &["--set", "augment.control_scale=0"]), strong);
    let missing = set(&path("no-control"));
    let flags = ["--mode", "mask_to_image", "--set", &missing, "--model"];
    let ran = run(generate(phantoms(), &path("never-controlled"), &flags).arg(&model));
    assert!(ran.code == Some(2) && error_text(&ran).contains("`~/no-control`: there is no such"), "{}", ran.stderr);
}
