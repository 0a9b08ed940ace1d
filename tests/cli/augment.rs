//! `prsmed augment generate`: properties of the pairs, reproducibility, and interrupted runs.

mod filtered;
mod finetuned;
mod models;
mod plans;
mod refusals;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use image::{GrayImage, RgbImage};
use prsmed::data::decode;
use prsmed::data::manifest::{Manifest, Split};
use serde_json::Value;

use crate::runs::signal;
use crate::support::{done, folder, objects, path, phantoms, prsmed, refused, run, shared, tree};

/// Generated images per source in these tests.
const PER_IMAGE: usize = 2;

/// A command that generates small pairs with random weights.
fn generate(root: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = prsmed();
    command.args(["augment", "generate", "--preset", "tiny", "--data-root"]).arg(root).arg("--out").arg(out);
    command.args(["--set", "augment.image_size=64", "--set", "augment.steps=3"]).args(more);
    command
}

/// Pairs of all phantoms; shared between tests, which must not change them.
fn made() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let root = path("pairs");
        done(&mut generate(phantoms(), &root, &[]));
        root
    })
}

#[test]
fn random_weights_are_called_random_and_the_time_is_predicted() {
    let out = path("pairs-of-noise");
    let ran = run(&mut generate(phantoms(), &out, &["--limit", "4", "--set", "augment.steps=5"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    for words in ["`random:tiny` has random weights: the images will be noise", " that remain"] {
        assert!(ran.stderr.contains(words), "{words}: {}", ran.stderr);
    }
    assert!(ran.stdout.contains("do not train on them") && !ran.stdout.contains("--extra"), "{}", ran.stdout);
}

fn assert_same_tree(a: &Path, b: &Path) {
    let (a, b) = (tree(a), tree(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let differing: Vec<_> = a.iter().filter(|(name, bytes)| b[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(differing.is_empty(), "{differing:?}");
}

fn journal(root: &Path) -> Vec<Value> {
    objects(&fs::read_to_string(root.join("manifest.jsonl")).unwrap())
}

fn word<'a>(record: &'a Value, key: &str) -> &'a str {
    record[key].as_str().unwrap()
}

/// Image and mask of a pair, in the data root or in the folder of rejected pairs.
fn files(root: &Path, record: &Value) -> (PathBuf, PathBuf) {
    let (class, name) = (word(record, "class"), word(record, "name"));
    if record["accepted"] == true {
        let class = root.join(class);
        return (class.join(format!("train_images/{name}.png")), class.join(format!("train_masks/{name}.png")));
    }
    let folder = root.join("rejected").join(class);
    (folder.join(format!("{name}.png")), folder.join(format!("{name}_mask.png")))
}

fn read_image(path: &Path) -> RgbImage {
    decode::image(path).unwrap().to_rgb8()
}

/// Masks of each train image of a data root.
fn masks_of(root: &Path, annotations: Option<&Path>) -> BTreeMap<PathBuf, Vec<PathBuf>> {
    let mut found: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for row in Manifest::open(root, annotations).unwrap().rows {
        if row.split == Split::Train {
            let mask = row.target().mask_path.clone();
            let masks = found.entry(row.image_path).or_default();
            if !masks.contains(&mask) {
                masks.push(mask);
            }
        }
    }
    found
}

/// The grid cell of a mask's centre of mass in words, computed without the library.
fn cell(mask: &GrayImage) -> String {
    let most = mask.pixels().map(|p| p.0[0]).max().unwrap();
    let (mut n, mut sum_x, mut sum_y) = (0.0, 0.0, 0.0);
    for (x, y, pixel) in mask.enumerate_pixels() {
        if u16::from(pixel.0[0]) * 2 > u16::from(most) {
            n += 1.0;
            sum_x += f64::from(x) + 0.5;
            sum_y += f64::from(y) + 0.5;
        }
    }
    let third = |sum: f64, side: u32, names: [&'static str; 3]| {
        let part = sum / n / f64::from(side);
        names[if part < 1.0 / 3.0 { 0 } else { 1 + usize::from(part >= 2.0 / 3.0) }]
    };
    let row = third(sum_y, mask.height(), ["upper", "center", "lower"]);
    let column = third(sum_x, mask.width(), ["left", "center", "right"]);
    if (row, column) == ("center", "center") { "center".into() } else { format!("{row} {column}") }
}

/// The single location that a sentence names.
fn named_location(text: &str) -> String {
    let cells = ["upper left", "upper center", "upper right", "center left", "center right"];
    let more = ["lower left", "lower center", "lower right"];
    let named: Vec<&str> = cells.into_iter().chain(more).filter(|cell| text.contains(cell)).collect();
    match named.as_slice() {
        [] if text.contains("center") => "center".into(),
        [one] => (*one).to_owned(),
        _ => panic!("{named:?} in `{text}`"),
    }
}

/// The rows of a root's annotations: mask file, position, answer.
fn rows(root: &Path) -> Vec<[String; 3]> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let mut reader = csv::Reader::from_path(entry.unwrap().path()).unwrap();
        let header = reader.headers().unwrap().clone();
        let at = |name: &str| header.iter().position(|column| column == name).unwrap();
        let columns = [at("image_path"), at("position"), at("answer")];
        for row in reader.records() {
            let row = row.unwrap();
            found.push(columns.map(|column| row[column].to_owned()));
        }
    }
    assert!(!found.is_empty());
    found
}

/// Positions and answers match the masks, and no file name is treated specially by the original loader.
fn assert_rows_are_correct(root: &Path) {
    for [mask, position, answer] in rows(root) {
        let found = cell(&decode::mask(&root.join(&mask)).unwrap());
        assert_eq!((position.as_str(), named_location(&answer)), (found.as_str(), found.clone()), "{mask}: {answer}");
        assert!(!mask.contains("ISIC") && !mask.contains("_Segmentation"), "{mask}");
    }
    done(prsmed().args(["data", "check"]).arg(root));
}

/// The pixels and the file of the label equal the source's, and the surroundings differ. Returns the number of pairs
/// whose image has several masks.
fn assert_lesions_are_preserved(masks: &BTreeMap<PathBuf, Vec<PathBuf>>, root: &Path) -> usize {
    let (mut changed, mut several) = (0, 0);
    for record in journal(root) {
        let from = PathBuf::from(word(&record, "source_image"));
        let (image, mask) = files(root, &record);
        let bytes = fs::read(&mask).unwrap();
        assert!(masks[&from].iter().any(|own| fs::read(own).unwrap() == bytes), "{}", mask.display());
        // Texts may compare the lesion with other lesions of the image, which are preserved too.
        let source = fs::read(&from).unwrap();
        let copies = masks.iter().filter(|(image, _)| fs::read(image).unwrap() == source);
        let labels: Vec<GrayImage> = copies.flat_map(|(_, own)| own).map(|own| decode::mask(own).unwrap()).collect();
        several += usize::from(labels.len() > 1);
        let is_label = |at: usize| labels.iter().any(|label| label.as_raw()[at] > 0);
        let (old, new) = (read_image(&from), read_image(&image));
        assert_eq!(old.dimensions(), new.dimensions());
        let mut others = 0;
        for (at, (old, new)) in old.pixels().zip(new.pixels()).enumerate() {
            assert!(old == new || !is_label(at), "{}", image.display());
            others += usize::from(old != new);
        }
        changed += usize::from(others * 10 > new.pixels().len());
    }
    assert!(changed * 2 > journal(root).len(), "{changed} images changed");
    several
}

#[test]
fn lesions_of_the_sources_are_preserved() {
    let masks = masks_of(phantoms(), None);
    assert!(assert_lesions_are_preserved(&masks, made()) > 0, "no phantom has two lesions");
    assert_rows_are_correct(made());
    let sources: usize = masks.values().map(Vec::len).sum();
    assert_eq!(journal(made()).len(), sources * PER_IMAGE);
    let page = fs::read_to_string(made().join("report.html")).unwrap();
    assert!(page.contains("random weights: its images are noise") && page.contains("Generated image of pair "));
}

/// The rows of the first train mask of each class, as annotations of their own.
fn one_of_each_class(annotations: &Path) -> PathBuf {
    let few = folder("few-of-real");
    for entry in fs::read_dir(annotations).unwrap() {
        let file = entry.unwrap().path();
        let mut reader = csv::Reader::from_path(&file).unwrap();
        let mut writer = csv::Writer::from_path(few.join(file.file_name().unwrap())).unwrap();
        writer.write_record(reader.headers().unwrap()).unwrap();
        let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        let first = rows.iter().find(|row| row.iter().any(|cell| cell == "train")).unwrap();
        for row in rows.iter().filter(|row| row[0] == first[0]) {
            writer.write_record(row).unwrap();
        }
    }
    few
}

#[test]
#[ignore = "needs shared data"]
fn shared_data_lesions_of_real_images_are_preserved() {
    let real = shared("data/real");
    let few = one_of_each_class(&real.join("annotations"));
    let masks = masks_of(&real, Some(&few));
    assert!(masks.keys().any(|file| file.to_string_lossy().contains("ISIC_")), "{masks:?}");
    let root = path("pairs-of-real");
    done(generate(&real, &root, &["--per-image", "1"]).arg("--annotations").arg(&few));
    assert_eq!(journal(&root).len(), masks.values().map(Vec::len).sum::<usize>());
    assert_lesions_are_preserved(&masks, &root);
    assert_rows_are_correct(&root);
}

/// Pixels of `mask` that are not in `own`.
fn added(own: &GrayImage, mask: &GrayImage) -> Vec<(f64, f64)> {
    let is_new = |(x, y): &(u32, u32)| mask.get_pixel(*x, *y).0[0] > 0 && own.get_pixel(*x, *y).0[0] == 0;
    let all = (0..mask.height()).flat_map(|y| (0..mask.width()).map(move |x| (x, y)));
    all.filter(is_new).map(|(x, y)| (f64::from(x), f64::from(y))).collect()
}

/// Number of pixels beyond the widest rim and its ramp, 16 model pixels each. They must equal the source's.
fn unchanged_far_from(new: &[(f64, f64)], old: &RgbImage, made: &RgbImage) -> usize {
    assert!(!new.is_empty() && old != made);
    let mut far = 0;
    for (x, y, pixel) in old.enumerate_pixels() {
        let (x64, y64) = (f64::from(x), f64::from(y));
        if new.iter().all(|(nx, ny)| (nx - x64).hypot(ny - y64) > 33.0) {
            assert_eq!(pixel, made.get_pixel(x, y), "{x}, {y}");
            far += 1;
        }
    }
    far
}

#[test]
fn inserted_lesions_change_masks_and_texts() {
    let root = path("pairs-inserted");
    done(&mut generate(phantoms(), &root, &["--mode", "insert_lesion", "--no-filter"]));
    assert_rows_are_correct(&root);
    let masks = masks_of(phantoms(), None);
    let (mut moved, mut far) = (0, 0);
    for record in journal(&root).iter().filter(|record| record["accepted"] == true) {
        let from = PathBuf::from(word(record, "source_image"));
        let (image, mask) = files(&root, record);
        let mask = decode::mask(&mask).unwrap();
        let contains = |own: &PathBuf| {
            let own = decode::mask(own).unwrap();
            own.pixels().zip(mask.pixels()).all(|(own, new)| own.0[0] == 0 || new.0[0] == 255)
        };
        let own = masks[&from].iter().find(|own| contains(own)).unwrap();
        let own = decode::mask(own).unwrap();
        assert!(own != mask && word(record, "source_mask").starts_with("phantom_"), "{record}");
        moved += usize::from(cell(&own) != cell(&mask));
        far += unchanged_far_from(&added(&own, &mask), &read_image(&from), &read_image(&image));
    }
    assert!(far > 1000, "{far} pixels are far from new lesions");
    assert!(moved > 0, "no text had to change");
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let again = path("pairs-again");
    done(&mut generate(phantoms(), &again, &[]));
    assert_same_tree(&again, made());
    let other = path("pairs-of-another-seed");
    done(&mut generate(phantoms(), &other, &["--seed", "1"]));
    for (a, b) in journal(&other).iter().zip(journal(made())) {
        let images = [files(&other, a).0, files(made(), &b).0].map(|file| fs::read(file).unwrap());
        assert!(a["name"] == b["name"] && images[0] != images[1], "{a}");
    }
}

/// Number of lines of a journal that may not exist yet.
fn lines(root: &Path) -> usize {
    fs::read_to_string(root.join("manifest.jsonl")).map_or(0, |text| text.lines().count())
}

/// Starts a generation and waits until some pairs exist.
fn start_until_some(out: &Path) -> Child {
    let mut command = generate(phantoms(), out, &[]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while lines(out) < 3 {
        assert!(started.elapsed() < Duration::from_mins(1), "no pair was made");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

/// No other process may generate or filter pairs in a folder that a process is writing to.
fn assert_is_locked(out: &Path, process: u32) {
    let message = |flag: &str| {
        format!(
            "error: `{flag}`: another prsmed (process {process}) is writing into `~/{}`\n\
             hint: wait until it is done, stop it, or choose another folder",
            out.file_name().unwrap().display()
        )
    };
    refused(&mut generate(phantoms(), out, &[]), &message("--out"));
    let mut filter = prsmed();
    filter.args(["augment", "filter", "--quiet", "--data-root"]).arg(phantoms()).arg("--extra").arg(out);
    refused(&mut filter, &message("--extra"));
}

#[test]
fn a_killed_generation_continues_to_the_same_bytes() {
    let out = path("pairs-killed");
    let mut child = start_until_some(&out);
    child.kill().unwrap();
    child.wait().unwrap();
    let all = journal(made()).len();
    let before = lines(&out);
    assert!(before < all, "it was killed too late");
    // A temporary file that the kill may have left.
    fs::write(out.join("abdomen_CT/train_images/.cut_off.png.prsmed-tmp-a1B2c3"), "half an image").unwrap();
    let ran = run(generate(phantoms(), &out, &[]).arg("--json"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let result = objects(&ran.stdout).pop().unwrap();
    let made_now = result["summary"]["made_now"].as_u64().unwrap();
    assert!(made_now > 0 && made_now <= u64::try_from(all - before + 1).unwrap(), "{result}");
    assert_same_tree(&out, made());
}

#[test]
fn ctrl_c_leaves_usable_pairs() {
    let out = path("pairs-interrupted");
    let child = start_until_some(&out);
    // the process is paused
    signal(&child, libc::SIGSTOP);
    assert_is_locked(&out, child.id());
    signal(&child, libc::SIGINT);
    signal(&child, libc::SIGCONT);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted\nhint: continue with `"), "{said}");
    assert!(lines(&out) < journal(made()).len(), "it was stopped too late");
    assert_rows_are_correct(&out);
    done(&mut generate(phantoms(), &out, &[]));
    assert_same_tree(&out, made());
}

#[test]
fn planned_memory_equals_measured_memory() {
    let settings: [&[&str]; 2] = [
        &["--set", "augment.batch=4"],
        &[
            "--mode",
            "mask_to_image",
            "--set",
            "augment.batch=2",
            "--set",
            "augment.precision=bf16",
            "--set",
            "augment.decode=whole",
        ],
    ];
    for (number, sets) in settings.into_iter().enumerate() {
        let out = path(&format!("pairs-measured-{number}"));
        let result = done(generate(phantoms(), &out, sets).args(["--limit", "6", "--json"]));
        let memory = objects(&result).pop().unwrap()["memory"].clone();
        assert!(memory["measured"].as_u64().unwrap() > 1_000_000, "{memory}");
        assert_eq!(memory["planned"]["allocated_peak"], memory["measured"], "{sets:?}");
    }
}
