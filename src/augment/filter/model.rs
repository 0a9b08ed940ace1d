//! Cross-fitted filter models: segmenters, each trained on the real images without one fold.
//!
//! A pair is scored only by the model whose training data did not contain the pair's source. A model that scores its
//! own training images would accept everything.
//!
//! The tests and their sources: Dice of the filter model's mask and the label (PolypInpainter); foreground outside of
//! the label; distance to real features (MedDiff-FT); similarity to a real image (memorisation); a Dice that is too
//! good, once there are enough pairs. Features are the filter model's own image embedding, averaged over the
//! generated area.

use super::{Decision, Thresholds};
use crate::augment::check_interrupt;
use crate::augment::export::{Export, Record};
use crate::augment::inpaint_mask::dilate;
use crate::augment::inputs::image_sums;
use crate::augment::neighbours::{knn_distance, max_cosine};
use crate::augment::quality::{self, FeatureImages};
use crate::augment::saved_settings::same_settings;
use crate::augment::settings::Mode;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::{Manifest, Row, Split};
use crate::event::Event;
use crate::front::{Ask, Image, Model};
use crate::metrics::order::quantile;
use crate::metrics::segmentation::is_foreground;
use crate::runtime::Runtime;
use crate::segment::LoadedModel;
use crate::segment::setup::{self, Build, RunOverrides};
use crate::segment::{RunConfig, Training};
use crate::shell::ShellCommand;
use crate::tensor::weights::{readable_folder, verify_folder, write_bytes};
use crate::tensor::{Device, Kind, Tensor, rng};
use crate::{Error, Result, files};
use image::GrayImage;
use rand::seq::SliceRandom;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File with the fold of each real image, in the folder of the filter models.
const FOLDS: &str = "folds.json";
/// Number of nearest neighbours whose mean distance is used.
const NEIGHBOURS: i64 = 5;
/// Minimum number of real images of a class for a feature distance threshold.
const LEAST: usize = 6;
/// Number of images whose features are computed at once.
const FEATURES: usize = 8;
/// Margin around the label that does not count as outside, as a fraction of the label's equivalent diameter.
const MARGIN_FRAC: f64 = 0.1;
/// Names of the scores of this file; filtering again replaces them.
const SCORES: [&str; 5] = ["dice", "outside", "knn_distance", "cosine", "too_easy"];

/// Trained filter models and their folds.
#[derive(Debug)]
pub struct FilterModels {
    folder: PathBuf,
    /// SHA-256 of a real training image -> the fold it is in, which is the number of the model not trained on it.
    folds: BTreeMap<String, usize>,
    num_models: usize,
}

/// Results of filtering a data root of pairs.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct FilterReport {
    /// Number of pairs.
    pub pairs: usize,
    /// Number of accepted pairs.
    pub accepted: usize,
    /// Rows of the annotation files.
    pub rows: usize,
    /// Pairs whose source is in no fold; their decision does not change.
    pub unknown: usize,
    /// Number of rejected pairs by the first failed test.
    pub rejected: BTreeMap<String, usize>,
    /// Median Dice of the filter models on real images that they were not trained on.
    pub real_dice: Option<f64>,
}

impl FilterReport {
    /// The report as text; `folder` has the pairs, and the command `ablation` tests whether they help.
    pub fn text(&self, folder: &Path, ablation: &ShellCommand) -> String {
        let mut lines = vec![format!("{} of {} pairs accepted, {} rows", self.accepted, self.pairs, self.rows)];
        if !self.rejected.is_empty() {
            let parts: Vec<String> = self.rejected.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
            lines.push(format!("rejected by: {}", parts.join(", ")));
        }
        if self.unknown > 0 {
            lines.push(format!(
                "{} pairs have a source that is in no fold; their decision does not change",
                self.unknown
            ));
        }
        if let Some(dice) = self.real_dice {
            lines.push(format!("median Dice of the filter models on held-out real images: {dice:.3}"));
            if dice < 0.6 {
                lines.push("that is low: train longer (argument `steps`) before you trust their decisions".to_owned());
            }
        }
        let folder = folder.display();
        lines.push(format!("look at {folder}/report.html"));
        lines.push(match self.rows {
            0 => "no pair is left to train on. To accept more, train the filter models longer (argument `steps`), or change the limit \
                  of the test that rejects most with the argument `threshold`; report.html names the limits"
                .to_owned(),
            _ => format!("next: {ablation}"),
        });
        lines.join("\n")
    }
}

impl FilterModels {
    /// Opens the filter models of a folder.
    ///
    /// # Errors
    /// [`Error::Weights`] when the folder contains none.
    fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(FOLDS);
        let hint =
            "train filter models with `prsmed augment filter --data-root DATA --extra PAIRS --filter-models DIR`";
        let text = files::read(&path, files::MAX_TABLE)
            .map_err(|_| Error::weights(folder, "contains no filter models", hint))?;
        let folds: BTreeMap<String, usize> =
            serde_json::from_slice(&text).map_err(|error| Error::weights(&path, error.to_string(), hint))?;
        let num_models = folds.values().max().map_or(0, |last| last + 1);
        Ok(Self { folder: folder.to_path_buf(), folds, num_models })
    }

    /// Trains `num_models` filter models on the `train` rows of `real`; finished ones are not trained again.
    ///
    /// # Errors
    /// [`Error::Config`] when the folder contains filter models of other folds; as [`Training::run`].
    pub fn train(
        real: &Manifest,
        (config, toml): (&RunConfig, &str),
        num_models: usize,
        folder: &Path,
        runtime: &Runtime,
    ) -> Result<Self> {
        let folds = folds(real, num_models, config.train.seed)?;
        if let Ok(before) = Self::open(folder)
            && before.folds != folds
        {
            let reason = format!("`{}` contains filter models of other images or folds", folder.display());
            return Err(Error::argument("filter_models", reason, "choose another folder"));
        }
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        let settings = json!({ "format": 1, "folds": num_models, "recipe": toml });
        same_settings(&folder.join("settings.json"), &settings, "filter_models", "filter models")?;
        write_bytes(&folder.join(FOLDS), &serde_json::to_vec_pretty(&folds).expect("plain values serialise"))?;
        let this = Self { folder: folder.to_path_buf(), folds, num_models };
        let sums = sums(real)?;
        for fold in 0..num_models {
            runtime.note(format!("filter model {} of {num_models}", fold + 1));
            let is_training_row = |row: &&Row| row.split == Split::Train && this.fold_of(row, &sums) != Some(&fold);
            let rows: Vec<Row> = real.rows.iter().filter(is_training_row).cloned().collect();
            let manifest = Arc::new(Manifest { rows, ..real.clone() });
            let mut config = config.clone();
            config.train.validate_every_epochs = 0;
            let run = this.run(fold);
            // a folder from others may contain a link of this name
            files::create_below(folder, &run).map_err(Error::io(&run, "create"))?;
            let training = Training::new(config, manifest, run, runtime)?;
            training.with_toml(toml.to_owned()).resume(true).run()?;
            check_interrupt(runtime.interrupt())?;
        }
        Ok(this)
    }

    fn run(&self, fold: usize) -> PathBuf {
        self.folder.join(format!("fold-{fold}"))
    }

    fn model(&self, fold: usize, runtime: &Runtime) -> Result<Model> {
        let folder = readable_folder(&self.run(fold).join("last"))?;
        verify_folder(&folder)?;
        let (device, cache) = (runtime.device(), runtime.cache());
        let kind = if device == Device::Cpu { Kind::Float } else { Kind::BFloat16 };
        let locate = &|spec: &str| runtime.locate(spec);
        let build = Build { cache, ..Build::new(device, kind, locate) };
        setup::open(&folder, &RunOverrides::default(), build).map(Model::from)
    }

    /// Scores every pair of `export` and rewrites journal, files and annotations. At most `keep` pairs
    /// stay accepted (0 = all): those with a higher Dice than nearly all real images are dropped first.
    ///
    /// # Errors
    /// [`Error::Data`] for an unreadable image; [`Error::Weights`] for a damaged filter model; [`Error::Interrupted`].
    pub fn filter(
        &self,
        real: &Manifest,
        export: &mut Export,
        thresholds: &Thresholds,
        keep: usize,
        runtime: &Runtime,
    ) -> Result<FilterReport> {
        let sums = sums(real)?;
        let mut records: Vec<Record> = export.journal.records.clone();
        let total = records.len() as u64;
        runtime.observer().on(&Event::Started { phase: "filter".into(), total, unit: "images" });
        let mut agreement: HashMap<String, Vec<f64>> = HashMap::new();
        let mut done = 0;
        for fold in 0..self.num_models {
            let own: Vec<usize> =
                (0..records.len()).filter(|&i| self.folds.get(&records[i].source_sha256) == Some(&fold)).collect();
            if own.is_empty() {
                continue;
            }
            let model = self.model(fold, runtime)?;
            for row in once_each(real, |row| self.fold_of(row, &sums) == Some(&fold)) {
                let dice = score(&model, &row.image_path, &decode::mask(&row.target().mask_path)?, &row.question)?.0;
                agreement.entry(row.modality.clone()).or_default().push(dice);
            }
            let nearness = nearness(&model.loaded, (real, &sums), (export, &records, &own), thresholds, runtime)?;
            for &i in &own {
                check_interrupt(runtime.interrupt())?;
                let decision = decide(&model, export, &records[i], thresholds, nearness.get(&i))?;
                revise(&mut records[i], &decision);
                done += 1;
                runtime.observer().on(&Event::Advanced { done });
            }
        }
        runtime.observer().on(&Event::Finished);
        drop_the_easiest(&mut records, &agreement, thresholds, keep);
        export.revise(&records)?;
        let rows = export.write_annotations()?;
        let all: Vec<f64> = agreement.into_values().flatten().collect();
        Ok(FilterReport {
            pairs: records.len(),
            accepted: records.iter().filter(|record| record.accepted).count(),
            rows,
            unknown: records.iter().filter(|record| !self.folds.contains_key(&record.source_sha256)).count(),
            rejected: export.journal.rejected(),
            real_dice: quantile(&all, 0.5),
        })
    }

    /// The fold of the image of a row.
    fn fold_of(&self, row: &Row, sums: &HashMap<&Path, String>) -> Option<&usize> {
        self.folds.get(sums.get(row.image_path.as_path())?)
    }
}

/// The training rows that show their target and are wanted, one of each mask.
fn once_each(real: &Manifest, is_wanted: impl Fn(&Row) -> bool) -> Vec<&Row> {
    let mut seen = BTreeSet::new();
    let rows = real.rows.iter().filter(|row| row.split == Split::Train && row.is_present() && is_wanted(row));
    rows.filter(|row| seen.insert(&row.target().mask_path)).collect()
}

/// SHA-256 of every training image.
fn sums(real: &Manifest) -> Result<HashMap<&Path, String>> {
    image_sums(real.rows.iter().filter(|row| row.split == Split::Train))
}

/// Assigns every training image to a fold, with the images of each class spread evenly. Copies of an image are in the
/// same fold.
fn folds(real: &Manifest, num_models: usize, seed: u64) -> Result<BTreeMap<String, usize>> {
    let sums = sums(real)?;
    let mut classes: BTreeMap<&str, BTreeSet<&String>> = BTreeMap::new();
    for row in real.rows.iter().filter(|row| row.split == Split::Train) {
        classes.entry(&row.modality).or_default().insert(&sums[row.image_path.as_path()]);
    }
    let largest = classes.values().map(BTreeSet::len).max().unwrap_or(0);
    if num_models < 2 || largest < num_models {
        let reason = format!("{num_models} folds are too many: no class has more than {largest} training images");
        let hint = if largest < 2 { "add training images" } else { "add for example the argument `folds=2`" };
        return Err(Error::argument("folds", reason, hint));
    }
    let mut folds = BTreeMap::new();
    for (class, (_, images)) in classes.into_iter().enumerate() {
        let mut images: Vec<&String> = images.into_iter().collect();
        images.shuffle(&mut rng::stream(seed, "folds", &[class as u64]));
        for (i, sum) in images.into_iter().enumerate() {
            folds.entry(sum.clone()).or_insert(i % num_models);
        }
    }
    Ok(folds)
}

/// Dice of the filter model's mask and the label, and the fraction of the image that the model segments outside of
/// the label.
fn score(model: &Model, path: &Path, label: &GrayImage, question: &str) -> Result<(f64, f64)> {
    let image = decode::image(path)?;
    let label = foreground(label);
    // one token is enough: the mask depends on the question only
    let ask = Ask { max_new_tokens: 1, ..Ask::new(question) };
    let prediction = model.predict(&Image::Pixels(&image), &ask).map_err(|error| error.of_image(path))?;
    Ok(agreement(&prediction.target().probabilities, &label))
}

/// Dice of mask probabilities and a label of the same size, and the fraction of the image that is foreground outside of
/// the dilated label.
fn agreement(mask: &[f32], label: &GrayImage) -> (f64, f64) {
    let area = |mask: &GrayImage| mask.iter().filter(|&&value| value > 0).count();
    let [pixels, in_label] = [label.as_raw().len() as f64, area(label) as f64];
    let near = dilate(label, (MARGIN_FRAC * 2.0 * (in_label / std::f64::consts::PI).sqrt()).max(2.0));
    let (mut both, mut predicted, mut outside) = (0.0, 0.0, 0.0);
    for ((p, &own), &near) in mask.iter().zip(label.iter()).zip(near.iter()) {
        if is_foreground(*p) {
            predicted += 1.0;
            both += f64::from(u8::from(own > 0));
            outside += f64::from(u8::from(near == 0));
        }
    }
    (2.0 * both / (predicted + in_label).max(1.0), outside / pixels.max(1.0))
}

/// Scores one pair with the filter model and tests the scores against the limits.
fn decide(
    model: &Model,
    export: &Export,
    record: &Record,
    thresholds: &Thresholds,
    nearness: Option<&Nearness>,
) -> Result<Decision> {
    let (image, mask) = export.paths(record);
    let question = record.texts.first().map(|text| text.question.as_str()).unwrap_or_default();
    let (dice, outside) = score(model, &image, &decode::mask(&mask)?, question)?;
    let mut decision = Decision::default();
    decision.at_least("dice", dice, thresholds.dice_min);
    decision.at_most("outside", outside, thresholds.outside_max);
    for &(name, value, most) in nearness.into_iter().flatten() {
        decision.at_most_if_known(name, value, most);
    }
    Ok(decision)
}

/// Replaces the scores and reasons of an earlier call; those of the pixel tests are kept.
fn revise(record: &mut Record, decision: &Decision) {
    let is_model_score = |text: &str| SCORES.contains(&text.split(' ').next().unwrap_or_default());
    let mut reasons: Vec<String> =
        record.reason.split("; ").filter(|r| !r.is_empty() && !is_model_score(r)).map(str::to_owned).collect();
    reasons.extend(decision.reasons.iter().cloned());
    record.scores.retain(|name, _| !is_model_score(name));
    record.scores.extend(decision.scores.clone());
    record.accepted = reasons.is_empty();
    record.reason = reasons.join("; ");
}

/// When more than `keep` pairs are accepted, rejects pairs whose Dice is above a quantile of the real images of their
/// class, the easiest first. The segmenter learns nothing from them.
fn drop_the_easiest(
    records: &mut [Record],
    agreement: &HashMap<String, Vec<f64>>,
    thresholds: &Thresholds,
    keep: usize,
) {
    let mut accepted = records.iter().filter(|record| record.accepted).count();
    if keep == 0 || accepted <= keep {
        return;
    }
    let mut easy: Vec<(usize, f64, f64)> = Vec::new();
    for (i, record) in records.iter().enumerate().filter(|(_, record)| record.accepted) {
        let most = agreement.get(&record.class).and_then(|dice| quantile(dice, thresholds.easy_quantile));
        if let (Some(most), Some(&dice)) = (most, record.scores.get("dice"))
            && dice > most
        {
            easy.push((i, dice, most));
        }
    }
    easy.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (i, dice, most) in easy {
        if accepted <= keep {
            break;
        }
        records[i].accepted = false;
        records[i].reason = format!("too_easy {dice:.4} is above {most:.4}, and there are more pairs than asked for");
        accepted -= 1;
    }
}

/// Distance and similarity of a pair to real images: name, value, and the limit that real images give.
type Nearness = [(&'static str, f64, Option<f64>); 2];

/// Nearness of the pairs `own`, by their record's index. Each class is compared with all real training images of the
/// class. The limits come from each real image's own nearest neighbours.
fn nearness(
    loaded: &LoadedModel,
    (real, sums): (&Manifest, &HashMap<&Path, String>),
    (export, records, own): (&Export, &[Record], &[usize]),
    thresholds: &Thresholds,
    runtime: &Runtime,
) -> Result<HashMap<usize, Nearness>> {
    let mut groups: BTreeMap<(&str, Mode), Vec<usize>> = BTreeMap::new();
    for &i in own {
        groups.entry((&records[i].class, records[i].mode)).or_default().push(i);
    }
    let mut found = HashMap::new();
    for ((class, mode), members) in groups {
        let rows = once_each(real, |row| row.modality == class);
        if rows.len() < LEAST {
            continue;
        }
        let pairs = rows.iter().map(|row| (row.image_path.clone(), row.target().mask_path.clone())).collect::<Vec<_>>();
        let reference = features(loaded, mode, &pairs, runtime)?;
        let pairs = members.iter().map(|&i| export.paths(&records[i])).collect::<Vec<_>>();
        let query = features(loaded, mode, &pairs, runtime)?;
        let distances = knn_distance(&query, Some(&reference), NEIGHBOURS)?;
        let distance_max = quantile(&knn_distance(&reference, None, NEIGHBOURS)?, thresholds.knn_quantile);
        let cosine_max = quantile(&max_cosine(&reference, None)?, thresholds.cosine_quantile);
        for ((at, i), distance) in (0..).zip(members).zip(distances) {
            // the pair's own source is left out: it shares the layout and the preserved pixels
            let sum = Some(&records[i].source_sha256);
            let own = rows.iter().position(|row| sums.get(row.image_path.as_path()) == sum);
            let others = (0_i64..).zip(0..rows.len()).filter(|(_, row)| Some(*row) != own).map(|(row, _)| row);
            let others = reference.index_select(0, &Tensor::from_slice(&others.collect::<Vec<_>>()));
            let cosine = max_cosine(&query.narrow(0, at, 1), Some(&others))?[0];
            found.insert(i, [("knn_distance", distance, distance_max), ("cosine", cosine, cosine_max)]);
        }
    }
    Ok(found)
}

/// Features of the area that `mode` generates, `[n, c]`.
fn features(loaded: &LoadedModel, mode: Mode, pairs: &[(PathBuf, PathBuf)], runtime: &Runtime) -> Result<Tensor> {
    let files: Vec<PathBuf> = pairs.iter().map(|pair| pair.0.clone()).collect();
    let area = |i: usize| -> Result<GrayImage> { Ok(generated_area(foreground(&decode::mask(&pairs[i].1)?), mode)) };
    let of_a_part = matches!(mode, Mode::KeepLesion | Mode::EditLesion | Mode::InsertLesion);
    let images = FeatureImages {
        files: &files,
        area: of_a_part.then_some(&area),
        batch: FEATURES,
        observer: &crate::event::Silent,
        interrupt: runtime.interrupt(),
    };
    let features = quality::encoder_features(loaded, &images)?;
    check_features(&features, &files)?;
    Ok(features)
}

/// The area that `mode` generates in an image with this lesion; the whole image if that area is empty.
fn generated_area(mut lesion: GrayImage, mode: Mode) -> GrayImage {
    if mode == Mode::KeepLesion {
        lesion.iter_mut().for_each(|value| *value = 255 - *value);
    }
    if lesion.iter().all(|&value| value == 0) {
        lesion.iter_mut().for_each(|value| *value = 255);
    }
    lesion
}

/// [`Error::NotFinite`] naming the first image whose features `[n, c]` are not finite.
fn check_features(features: &Tensor, files: &[PathBuf]) -> Result<()> {
    for (row, file) in (0..).zip(files) {
        let values = Vec::<f32>::try_from(features.get(row)).expect("a row of fp32");
        Error::check_finite("image features", &values).map_err(|error| error.of_image(file))?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
