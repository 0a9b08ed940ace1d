//! Numbers that `eval` and `predict` write, recomputed from the files, and models and data for which there is none.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use image::GrayImage;
use image::imageops::{FilterType, resize};
use serde::Deserialize;
use serde_json::Value;

use crate::support::{copy, done, objects, overflow, path, phantoms, prsmed, refused, trained};

/// A line of `samples.csv`.
#[derive(Deserialize)]
struct Sample {
    modality: String,
    mask: PathBuf,
    dice: f64,
    iou: f64,
    bleu: f64,
    rouge1: f64,
    meteor_exact_stem: f64,
    question: String,
    answer: String,
    generated: String,
}

impl Sample {
    fn image(&self) -> PathBuf {
        let image = PathBuf::from(self.mask.to_str().unwrap().replace("train_masks", "train_images"));
        let files = ["png", "jpg"].map(|extension| image.with_extension(extension));
        files.into_iter().find(|file| file.is_file()).unwrap()
    }
}

/// Files of a folder below every class folder of a data root.
pub(crate) fn class_files(root: &Path, name: &str) -> Vec<PathBuf> {
    let folders = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path().join(name));
    let files = folders.filter(|folder| folder.is_dir()).flat_map(|folder| fs::read_dir(folder).unwrap());
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The phantoms at 96 x 64 pixels.
fn oblong(name: &str) -> PathBuf {
    let root = copy(phantoms(), name);
    for folder in ["train_images", "train_masks"] {
        for file in class_files(&root, folder) {
            let image = image::open(&file).unwrap();
            if folder == "train_masks" {
                resize(&image.into_luma8(), 96, 64, FilterType::Nearest).save(&file).unwrap();
            } else {
                image.resize_exact(96, 64, FilterType::Nearest).save(&file).unwrap();
            }
        }
    }
    root
}

fn evaluate(root: &Path, report: &Path, limit: &str) -> Vec<Sample> {
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--limit", limit, "--max-new-tokens", "6", "--split", "train", "--data-root"]);
    done(eval.arg(root).arg(&trained().0).arg("--out").arg(report));
    csv::Reader::from_path(report.join("samples.csv")).unwrap().deserialize().map(Result::unwrap).collect()
}

/// Replaces answers by `answer(generated, number of the sample)`.
fn rewrite_answers(root: &Path, samples: &[Sample], answer: impl Fn(&str, usize) -> String) {
    let mut changed = 0;
    for entry in fs::read_dir(root.join("annotations")).unwrap() {
        let file = entry.unwrap().path();
        let mut reader = csv::Reader::from_path(&file).unwrap();
        let header = reader.headers().unwrap().clone();
        let column = |name: &str| header.iter().position(|found| found == name).unwrap();
        let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        let mut writer = csv::Writer::from_path(&file).unwrap();
        writer.write_record(&header).unwrap();
        for record in records {
            let of_row = |sample: &&(usize, &Sample)| {
                sample.1.mask.ends_with(&record[0]) && sample.1.question == record[column("question")]
            };
            let found = samples.iter().enumerate().collect::<Vec<_>>();
            let found = found.iter().find(of_row);
            let cells = record.iter().enumerate().map(|(i, cell)| match found {
                Some((number, sample)) if i == column("answer") => answer(&sample.generated, *number),
                _ => cell.to_owned(),
            });
            changed += usize::from(found.is_some());
            writer.write_record(cells).unwrap();
        }
        writer.flush().unwrap();
    }
    assert_eq!(changed, samples.len());
}

/// The predicted mask of a sample, from `predict`.
fn predicted_mask(sample: &Sample) -> GrayImage {
    let out = path("scored-mask.png");
    let mut predict = prsmed();
    predict.args(["--json", "predict", "--max-new-tokens", "1", "--question", &sample.question, "--image"]);
    predict.arg(sample.image()).arg(&trained().0).arg("--mask-out").arg(&out);
    let result = objects(&done(&mut predict)).pop().unwrap();
    let mask = image::open(out).unwrap().into_luma8();
    let foreground = mask.pixels().filter(|pixel| pixel.0[0] == 255).count() as f64 / (96.0 * 64.0);
    assert_eq!(
        (result["width"].as_u64(), result["height"].as_u64(), mask.dimensions()),
        (Some(96), Some(64), (96, 64))
    );
    assert!((result["foreground_frac"].as_f64().unwrap() - foreground).abs() < 1e-3, "{result}: {foreground}");
    mask
}

/// Dice and IoU by counting pixels.
fn overlap(mask: &GrayImage, truth: &GrayImage) -> (f64, f64) {
    let (mut both, mut either, mut sum) = (0.0, 0.0, 0.0);
    for (a, b) in mask.pixels().zip(truth.pixels()) {
        let (a, b) = (a.0[0] > 127, b.0[0] > 0);
        both += f64::from(u8::from(a && b));
        either += f64::from(u8::from(a || b));
        sum += f64::from(u8::from(a)) + f64::from(u8::from(b));
    }
    (2.0 * both / sum, both / either)
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Matches and n-grams of order 1 to 4, tokens of the answer, tokens of the reference.
type Counts = ([f64; 4], [f64; 4], f64, f64);

fn ngram_counts(answer: &str, reference: &str) -> Counts {
    let (answer, reference) = (words(answer), words(reference));
    let (mut matches, mut all) = ([0.0; 4], [0.0; 4]);
    for order in 1..=4 {
        let mut free: Vec<&[&str]> = reference.windows(order).collect();
        for ngram in answer.windows(order) {
            all[order - 1] += 1.0;
            if let Some(at) = free.iter().position(|other| *other == ngram) {
                free.remove(at);
                matches[order - 1] += 1.0;
            }
        }
    }
    (matches, all, answer.len() as f64, reference.len() as f64)
}

fn bleu((matches, all, answer, reference): Counts) -> f64 {
    let precision: f64 = matches.iter().zip(all).map(|(matches, all)| matches / all).product();
    if matches.contains(&0.0) { 0.0 } else { precision.powf(0.25) * (1.0 - reference / answer).min(0.0).exp() }
}

fn rouge1((matches, _, answer, reference): Counts) -> f64 {
    let (precision, recall) = (matches[0] / answer, matches[0] / reference);
    if matches[0] > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}

/// METEOR of answers that match their reference in one piece.
fn meteor((matches, _, answer, reference): Counts) -> f64 {
    let (precision, recall) = (matches[0] / answer, matches[0] / reference);
    precision * recall / (0.9 * precision + 0.1 * recall) * (1.0 - 0.5 / matches[0].powi(3))
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    values.iter().sum::<f64>() / values.len() as f64
}

fn assert_near(found: &Value, expected: f64, what: &str) {
    assert!((found.as_f64().unwrap() - expected).abs() < 1e-9, "{what}: {found} {expected}");
}

#[test]
fn eval_writes_the_scores_of_the_masks_and_answers() {
    let root = oblong("oblong-scored");
    let report = path("report-scored");
    let before = evaluate(&root, &report, "6");
    assert!(before.iter().all(|sample| !words(&sample.generated).is_empty()), "answers of at least a word");
    rewrite_answers(&root, &before, |generated, number| match number % 3 {
        0 => generated.to_owned(),
        1 => format!("{generated} zebra zebra zebra"),
        _ => format!("zebra {}", words(generated)[words(generated).len() / 2..].join(" ")),
    });
    let samples = evaluate(&root, &report, "6");
    // every tokenizer splits plain words at spaces only
    let is_plain = |sample: &Sample| sample.generated.chars().all(|c| c.is_ascii_alphabetic() || c == ' ');
    let mut counts = Vec::new();
    for (number, (sample, first)) in samples.iter().zip(&before).enumerate() {
        assert_eq!(sample.generated, first.generated, "the answer depends on image and question only");
        let truth = image::open(&sample.mask).unwrap().into_luma8();
        let (dice, iou) = overlap(&predicted_mask(sample), &truth);
        // a probability next to 0.5 may be on the other side in the 8-bit mask
        assert!((sample.dice - dice).abs() < 5e-3 && (sample.iou - iou).abs() < 5e-3, "{}: {dice} {iou}", sample.dice);
        if is_plain(sample) {
            let own = ngram_counts(&sample.generated, &sample.answer);
            assert!((sample.bleu - bleu(own)).abs() < 1e-9, "{number}: BLEU {} {}", sample.bleu, bleu(own));
            assert!((sample.rouge1 - rouge1(own)).abs() < 1e-9, "{number}: ROUGE-1 {} {}", sample.rouge1, rouge1(own));
            let found = sample.meteor_exact_stem;
            assert!((found - meteor(own)).abs() < 1e-9, "{number}: METEOR {found} {}", meteor(own));
            counts.push(own);
        }
    }
    assert!(counts.len() > 3, "answers of plain words");
    let distinct = |pairs: Vec<(f64, f64)>| pairs.iter().any(|(a, b)| (a - b).abs() > 0.05);
    assert!(distinct(samples.iter().map(|sample| (sample.dice, sample.iou)).collect()), "Dice and IoU differ");
    assert!(distinct(samples.iter().map(|sample| (sample.bleu, sample.rouge1)).collect()), "BLEU and ROUGE-1 differ");
    assert!(distinct(samples.iter().map(|sample| (sample.bleu, sample.meteor_exact_stem)).collect()));
    assert_summary(&report, &samples, &counts);
}

/// A score of a sample.
type Score = fn(&Sample) -> f64;

/// `summary.json` holds the means of the samples.
fn assert_summary(report: &Path, samples: &[Sample], counts: &[Counts]) {
    let summary: Value = serde_json::from_slice(&fs::read(report.join("summary.json")).unwrap()).unwrap();
    let all = &summary["all_images"];
    assert_eq!(all["questions"], samples.len());
    let parts: [(&Value, Score); 5] = [
        (&all["segmentation"]["dice"], |sample| sample.dice),
        (&all["segmentation"]["iou"], |sample| sample.iou),
        (&all["text"]["bleu"], |sample| sample.bleu),
        (&all["text"]["rouge1"], |sample| sample.rouge1),
        (&all["text"]["meteor_exact_stem"], |sample| sample.meteor_exact_stem),
    ];
    for (i, (found, of)) in parts.into_iter().enumerate() {
        assert_near(found, mean(samples.iter().map(of)), &format!("part {i}"));
    }
    let corpus = counts.iter().fold(([0.0; 4], [0.0; 4], 0.0, 0.0), |mut sum: Counts, one| {
        for order in 0..4 {
            sum.0[order] += one.0[order];
            sum.1[order] += one.1[order];
        }
        (sum.0, sum.1, sum.2 + one.2, sum.3 + one.3)
    });
    if counts.len() == samples.len() {
        assert_near(&all["corpus_bleu"], bleu(corpus), "corpus BLEU");
    }
    let mut classes: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for sample in samples {
        classes.entry(&sample.modality).or_default().push(sample.dice);
    }
    let of_classes = classes.values().map(|dice| mean(dice.iter().copied()));
    assert_near(&summary["macro_mean"]["segmentation"]["dice"], mean(of_classes), "macro mean");
}

#[test]
fn a_transposed_mask_is_not_scored() {
    let root = oblong("oblong-transposed");
    let file = class_files(&root, "train_masks").pop().unwrap();
    image::open(&file).unwrap().rotate90().save(&file).unwrap();
    let mut eval = prsmed();
    eval.args(["--quiet", "eval", "--max-new-tokens", "1", "--split", "train", "--data-root"]).arg(&root);
    eval.arg(&trained().0).arg("--out").arg(path("report-transposed"));
    let name = file.strip_prefix(&root).unwrap().display().to_string();
    let class = name.split('/').next().unwrap();
    let csv = root.join("annotations").join(format!("{class}.csv"));
    let lines = fs::read_to_string(&csv).unwrap();
    let line = lines.lines().position(|line| line.starts_with(&name)).unwrap() + 1;
    let message = format!(
        "error: ~/oblong-transposed/annotations/{class}.csv:{line}: ~/oblong-transposed/{name}: \
         the mask is 64x96 pixels but its image is 96x64; one of them is turned by 90 degrees\n\
         hint: export image and mask at one size"
    );
    refused(&mut eval, &message);
}

#[test]
fn a_model_that_computes_nan_has_no_result() {
    let hint = "hint: try `--precision fp32`; if that fails too, these weights cannot be used: take an earlier \
                checkpoint, or train again with a lower `train.learning_rate`";
    for (file, part) in [("mask_decoder", "mask"), ("cls", "class")] {
        let run = copy(&trained().0, &format!("overflowing-{file}"));
        overflow(&run.join("best"), &format!("{file}.safetensors"));
        let mut eval = prsmed();
        eval.args(["--quiet", "eval", "--limit", "2", "--max-new-tokens", "1", "--split", "train", "--data-root"]);
        eval.arg(phantoms()).arg(&run);
        let mut predict = prsmed();
        let image = class_files(phantoms(), "train_images").remove(0);
        predict.args(["predict", "--question", "Where is the lesion?", "--max-new-tokens", "1", "--image"]);
        predict.arg(image).arg(&run).arg("--mask-out").arg(path("no-mask.png"));
        for mut command in [eval, predict] {
            let ran = crate::support::run(&mut command);
            let error = crate::support::error_text(&ran);
            assert_eq!(ran.code, Some(2), "{error}");
            assert!(error.starts_with("error: ~/phantoms/") && error.ends_with(hint), "{error}");
            assert!(error.contains(&format!(".png: the {part} logits of the model are not finite: ")), "{error}");
        }
        assert!(!path("no-mask.png").exists());
        assert!(!run.join("eval-train/summary.json").exists());
    }
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Scripts read these names. A new one may be added; a changed one breaks them.
#[test]
#[expect(clippy::too_many_lines, reason = "a list of names")]
fn names_in_json_and_csv_stay() {
    let lines = objects(&trained().1);
    let of_kind = |kind: &str| lines.iter().find(|line| line["kind"] == kind).unwrap();
    assert_eq!(keys(of_kind("step")), STEP_KEYS);
    assert_eq!(keys(lines.last().unwrap()), TRAIN_KEYS);
    let root = phantoms();
    let report = path("report-names");
    let mut eval = prsmed();
    eval.args(["--json", "eval", "--limit", "1", "--max-new-tokens", "1", "--split", "train", "--data-root"]);
    let result = objects(&done(eval.arg(root).arg(&trained().0).arg("--out").arg(&report))).pop().unwrap();
    assert_eq!(keys(&result), ["kind", "report", "rows", "split", "summary"]);
    assert_eq!(keys(&result["summary"]), SUMMARY_KEYS);
    let row = &result["summary"]["all_images"];
    assert_eq!(keys(row), ROW_KEYS);
    assert_eq!(keys(&row["estimates"]["dice"]), ["count", "interval", "mean"]);
    assert_eq!(keys(&result["summary"]["calibration"]["raw"]), ["bins", "ece"]);
    assert_eq!(keys(&row["segmentation"]), ["dice", "iou", "soft_dice"]);
    assert_eq!(keys(&row["text"]), ["bleu", "meteor_exact_stem", "rouge1"]);
    assert_eq!(
        keys(&row["thresholds"]),
        ["Sm", "mae", "maxDic", "maxEm", "maxIoU", "meanDic", "meanEm", "meanIoU", "meanSen", "meanSpe", "wFm"]
    );
    let samples = fs::read_to_string(report.join("samples.csv")).unwrap();
    assert_eq!(
        samples.lines().next().unwrap(),
        "row,modality,mask,dice,iou,soft_dice,position_right,bleu,rouge1,meteor_exact_stem,predicted_modality,question,\
         answer,generated,image,patient,target,presence,is_found,is_withheld,has_mask,foreground_confidence,\
         uncertain_boundary,raw_dice,surface_dice,hd95,hd,assd,pixel_sensitivity,pixel_precision,lesions,lesions_found,\
         predicted_lesions,predicted_lesions_right,area_difference,area_error_frac,class_right,mask_position,answer_position,\
         positions_agree,mask_position_right,good_mask_agrees,position_warning,words_follow"
    );
    let mut predict = prsmed();
    predict.args(["--json", "predict", "--question", "Where?", "--max-new-tokens", "1", "--image"]);
    predict.arg(class_files(root, "train_images").remove(0)).arg(&trained().0);
    let result = objects(&done(&mut predict)).pop().unwrap();
    let expected = [
        "answer",
        "answer_position",
        "confidence",
        "foreground_frac",
        "height",
        "image_differs",
        "image_distance",
        "image_known",
        "kind",
        "mask",
        "mask_given",
        "mask_position",
        "mask_regions",
        "memory",
        "modality",
        "nearest_question",
        "new_tokens",
        "new_words",
        "other_target",
        "other_target_classes",
        "overlay",
        "position_warning",
        "positions_agree",
        "probabilities",
        "question_classes",
        "question_distance",
        "question_known",
        "width",
    ];
    assert_eq!(keys(&result), expected);
    assert_eq!(keys(&result["confidence"]), ["boundary", "foreground", "is_found", "presence"]);
}

/// The last command of `scripts/quickstart` prints the location of the mask and that of the answer, and says if they differ.
#[test]
fn the_last_command_of_quickstart_compares_its_answer_with_its_mask() {
    let script = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/quickstart")).unwrap();
    let command = script.replace("\\\n", " ").lines().rfind(|line| line.starts_with("$prsmed ")).unwrap().to_owned();
    assert!(
        command.starts_with("$prsmed predict ") && !command.contains(['>', '|']),
        "its output is printed: {command}"
    );
    let question = command.split_once("--question \"").unwrap().1.split_once('"').unwrap().0;
    let predict = |json: bool| {
        let mut predict = prsmed();
        predict.args(json.then_some("--json")).args(["predict", "--question", question, "--image"]);
        done(predict.arg(class_files(phantoms(), "test_images").remove(0)).arg(&trained().0))
    };
    let (printed, result) = (predict(false), objects(&predict(true)).pop().unwrap());
    let text = |key: &str, none: &str| result[key].as_str().unwrap_or(none).to_owned();
    let agree = match result["positions_agree"].as_bool() {
        Some(true) => ", they agree",
        Some(false) => ", they differ",
        None => "",
    };
    let regions: Vec<&str> = result["mask_regions"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let between = if regions.is_empty() {
        String::new()
    } else {
        format!(", between its {} regions ({})", regions.len(), regions.join(", "))
    };
    let line = format!(
        "position of the mask: {}{between}; in the answer: {}{agree}",
        text("mask_position", "none, it is empty"),
        text("answer_position", "none")
    );
    assert!(printed.lines().any(|printed| printed == line), "{line}\n{printed}");
    let differ =
        agree == ", they differ" || (result["mask_position"].is_null() && !result["answer_position"].is_null());
    let warning = printed.lines().any(|line| line.starts_with("attention: the answer and the mask differ: "));
    assert!(warning == result["position_warning"].is_string() && (warning || !differ), "{printed}");
}

const SUMMARY_KEYS: [&str; 7] =
    ["all_images", "calibration", "macro_mean", "modalities", "pooled", "presence", "protocol"];
const ROW_KEYS: [&str; 15] = [
    "contradictions",
    "corpus_bleu",
    "estimates",
    "images",
    "mask_position_accuracy",
    "most_common_position",
    "name",
    "patients",
    "position_accuracy",
    "position_agreement",
    "position_base_rate",
    "questions",
    "segmentation",
    "text",
    "thresholds",
];
const STEP_KEYS: [&str; 12] = [
    "allocated_peak", "data_wait_seconds", "epoch", "grad_norm", "images_per_s", "kind", "learning_rate", "losses",
    "samples", "seconds", "step", "total_steps",
];
const TRAIN_KEYS: [&str; 14] = [
    "best_score",
    "best_values",
    "data_wait_seconds",
    "images_per_s",
    "kind",
    "memory",
    "reduced_micro_batch",
    "run",
    "skipped_samples",
    "skipped_steps",
    "steps",
    "steps_now",
    "stopped_early",
    "train_seconds",
];
