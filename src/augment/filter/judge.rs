//! Cross-fitted judges: segmenters of which each has seen all real pictures but one fold's. A pair is judged only by the
//! one that never saw its source: a judge that scores what it was trained on accepts everything.
//!
//! Rules and their sources: Dice of the judge's mask and the label (PolypInpainter); foreground outside of the label;
//! distance to real features (MedDiff-FT); similarity to a real picture (memorisation); agreement that is too good, once
//! there are enough pairs. Features are the judge's own image embedding, averaged over the area that was made new.

use super::{Thresholds, Verdict, sheet};
use crate::augment::export::{Export, Record, sha256};
use crate::augment::hold::dilate;
use crate::augment::kept::same_settings;
use crate::augment::quality::{self, Pictures};
use crate::augment::settings::Mode;
use crate::data::decode;
use crate::data::image::foreground;
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::text::{self, TextTokenizer};
use crate::event::Event;
use crate::metrics::neighbours::{knn_distance, knn_distance_within, max_cosine, max_cosine_within, quantile};
use crate::segment::Assembly;
use crate::segment::fit::{self, Recipe, Surroundings};
use crate::segment::predict::{Request, predict};
use crate::segment::rehearsal::Judging;
use crate::segment::setup::{self, Build, Description, RunOverrides};
use crate::tensor::weights::{readable_folder, verify_folder, write_bytes};
use crate::tensor::{Device, Kind, Tensor, rng};
use crate::{Error, Result};
use image::GrayImage;
use rand::seq::SliceRandom;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Which real pictures each judge has not seen, in the folder of the judges.
const FOLDS: &str = "folds.json";
/// Neighbours whose mean distance counts.
const NEIGHBOURS: i64 = 5;
/// Fewer real pictures of a class than this have no distances worth a limit.
const LEAST: usize = 6;
/// Pictures whose features are computed at once.
const FEATURES: usize = 8;
/// Part of the label's equivalent diameter around it that may be segmented too without counting as outside.
const MARGIN_FRAC: f64 = 0.1;
/// Names of the scores of this file; a second run replaces them.
const SCORES: [&str; 5] = ["dice", "outside", "knn_distance", "cosine", "too_easy"];

/// Trained judges and their folds.
#[derive(Debug)]
pub struct Judges {
    folder: PathBuf,
    /// SHA-256 of a real training picture -> the judge that has not seen it.
    folds: BTreeMap<String, usize>,
    count: usize,
}

/// What the judges said of a data root of pairs.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Judged {
    /// Pairs.
    pub pairs: usize,
    /// Of these, accepted ones.
    pub accepted: usize,
    /// Rows of the annotation files.
    pub rows: usize,
    /// Pairs whose source no judge was made for; they are left as they were.
    pub unknown: usize,
    /// Rejected pairs by the first test that failed.
    pub rejected: BTreeMap<String, usize>,
    /// Median Dice of the judges on real pictures that they have not seen.
    pub real_dice: Option<f64>,
}

impl Judges {
    /// Those of a folder.
    ///
    /// # Errors
    /// [`Error::Weights`] when the folder holds none.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(FOLDS);
        let hint = "train judges with `prsmed augment filter --data-root DATA --synthetic PAIRS --judges DIR`";
        let text = std::fs::read(&path).map_err(|_| Error::weights(folder, "holds no judges", hint))?;
        let folds: BTreeMap<String, usize> =
            serde_json::from_slice(&text).map_err(|error| Error::weights(&path, error.to_string(), hint))?;
        let count = folds.values().max().map_or(0, |last| last + 1);
        Ok(Self { folder: folder.to_path_buf(), folds, count })
    }

    /// Trains what is not trained yet: `count` judges on the train rows of `real`.
    ///
    /// # Errors
    /// [`Error::Config`] when there are judges of other folds; as [`fit::fit`].
    pub fn train(real: &Manifest, recipe: &Recipe, count: usize, folder: &Path, around: Surroundings) -> Result<Self> {
        let folds = folds(real, count, recipe.train.seed)?;
        if let Ok(before) = Self::open(folder)
            && before.folds != folds
        {
            let reason = format!("`{}` holds judges of other pictures or folds", folder.display());
            return Err(Error::config("--judges", reason, "choose another folder"));
        }
        std::fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
        let settings = json!({ "format": 1, "folds": count, "recipe": recipe.text });
        same_settings(&folder.join("settings.json"), &settings, ("--judges", "judges"))?;
        write_bytes(&folder.join(FOLDS), &serde_json::to_vec_pretty(&folds).expect("plain values serialise"))?;
        let this = Self { folder: folder.to_path_buf(), folds, count };
        let sums = sums(real)?;
        for judge in 0..count {
            around.observer.on(&Event::Note(format!("judge {} of {count}", judge + 1)));
            let is_seen = |row: &&Row| {
                row.split == Split::Train
                    && sums.get(&row.image_path).and_then(|sum| this.folds.get(sum)) != Some(&judge)
            };
            let rows: Vec<Row> = real.rows.iter().filter(is_seen).cloned().collect();
            let manifest = Arc::new(Manifest { rows, ..real.clone() });
            let mut recipe = recipe.clone();
            recipe.train.validate_every_epochs = 0;
            fit::fit(&recipe, &manifest, &this.run(judge), around)?;
            if around.interrupt.load(Ordering::SeqCst) {
                return Err(Error::Interrupted);
            }
        }
        Ok(this)
    }

    /// What judging pairs made from `real` takes.
    ///
    /// # Errors
    /// [`Error::Weights`] for damaged judges; [`Error::Data`] for a picture whose size cannot be read.
    pub fn judging(&self, real: &Manifest, device: Device) -> Result<Judging> {
        let folder = readable_folder(&self.run(0).join("last"))?;
        let description = setup::describe(&folder)?;
        let tokenizer = TextTokenizer::open(&folder.join("tokenizer"))?;
        let mut seen = BTreeSet::new();
        let mut classes: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut question_tokens, mut picture) = (0, (1, 1));
        for row in real.rows.iter().filter(|row| row.split == Split::Train) {
            if !seen.insert((&row.image_path, &row.mask_path)) {
                continue;
            }
            *classes.entry(&row.modality).or_default() += 1;
            question_tokens = question_tokens.max(text::question_prompt(&tokenizer, &row.question)?.ids.len());
            let size = image::image_dimensions(&row.image_path)
                .map_err(|error| Error::data(&row.image_path, error.to_string(), "mend or remove the row"))?;
            if u64::from(size.0) * u64::from(size.1) > u64::from(picture.0) * u64::from(picture.1) {
                picture = size;
            }
        }
        let reference = classes.into_values().filter(|&pictures| pictures >= LEAST).max().unwrap_or(0);
        let batch = reference.min(FEATURES);
        let Description { model, sizes, .. } = description;
        Ok(Judging { model, sizes, kind: kind_on(device), question_tokens, picture, batch, reference })
    }

    fn run(&self, judge: usize) -> PathBuf {
        self.folder.join(format!("fold-{judge}"))
    }

    fn assembly(&self, judge: usize, around: Surroundings) -> Result<Assembly> {
        let folder = readable_folder(&self.run(judge).join("last"))?;
        verify_folder(&folder)?;
        let kind = kind_on(around.device);
        let Surroundings { device, locate, cache, .. } = around;
        let build = Build { device, kind, seed: 0, locate, allow_partial: false, cache };
        setup::open(&folder, &RunOverrides::default(), build)
    }

    /// Judges every pair of `export` again and rewrites journal, files, annotations and sheet. At most `keep` pairs stay
    /// accepted (0 = all): those on which the judges agree better than on nearly all real pictures go first.
    ///
    /// # Errors
    /// [`Error::Data`] for a picture that cannot be read; [`Error::Weights`] for a damaged judge; [`Error::Interrupted`].
    pub fn judge(
        &self,
        real: &Manifest,
        export: &mut Export,
        thresholds: &Thresholds,
        keep: usize,
        around: Surroundings,
    ) -> Result<Judged> {
        let sums = sums(real)?;
        let mut records: Vec<Record> = export.journal().records().to_vec();
        let total = records.len() as u64;
        around.observer.on(&Event::Started { phase: "filter".into(), total, unit: "images" });
        let mut agreement: HashMap<String, Vec<f64>> = HashMap::new();
        let mut done = 0;
        for judge in 0..self.count {
            let own: Vec<usize> =
                (0..records.len()).filter(|&i| self.folds.get(&records[i].source_sha256) == Some(&judge)).collect();
            if own.is_empty() {
                continue;
            }
            let assembly = self.assembly(judge, around)?;
            let held_out = self.held_out(real, &sums, judge);
            for row in &held_out {
                let dice = score(&assembly, &row.image_path, &decode::mask(&row.mask_path)?, &row.question)?.0;
                agreement.entry(row.modality.clone()).or_default().push(dice);
            }
            let features = nearness(&assembly, (real, &sums), export, (&records, &own), thresholds, around)?;
            for &i in &own {
                if around.interrupt.load(Ordering::SeqCst) {
                    return Err(Error::Interrupted);
                }
                let verdict = one(&assembly, export, &records[i], thresholds, features.get(&i))?;
                revise(&mut records[i], &verdict);
                done += 1;
                around.observer.on(&Event::Advanced { done });
            }
        }
        around.observer.on(&Event::Finished);
        drop_the_easiest(&mut records, &agreement, thresholds, keep);
        export.revise(&records)?;
        let rows = export.write_annotations()?;
        sheet::of_root(export, &export.root().join(crate::augment::generate::SHEET))?;
        let all: Vec<f64> = agreement.into_values().flatten().collect();
        Ok(self.summary(export, rows, quantile(&all, 0.5)))
    }

    fn summary(&self, export: &Export, rows: usize, real_dice: Option<f64>) -> Judged {
        let records = export.journal().records();
        let mut rejected: BTreeMap<String, usize> = BTreeMap::new();
        for record in records.iter().filter(|record| !record.accepted) {
            *rejected.entry(record.reason.split(' ').next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        Judged {
            pairs: records.len(),
            accepted: records.iter().filter(|record| record.accepted).count(),
            rows,
            unknown: records.iter().filter(|record| !self.folds.contains_key(&record.source_sha256)).count(),
            rejected,
            real_dice,
        }
    }

    /// One row of each real picture that `judge` has not seen.
    fn held_out<'a>(&self, real: &'a Manifest, sums: &HashMap<PathBuf, String>, judge: usize) -> Vec<&'a Row> {
        let mut seen = BTreeSet::new();
        let is_wanted = |row: &&Row| {
            row.split == Split::Train
                && sums.get(&row.image_path).and_then(|sum| self.folds.get(sum)) == Some(&judge)
                && seen.insert(row.mask_path.clone())
        };
        real.rows.iter().filter(is_wanted).collect()
    }
}

/// Dtype of a judge's frozen weights and arithmetic.
fn kind_on(device: Device) -> Kind {
    if device == Device::Cpu { Kind::Float } else { Kind::BFloat16 }
}

/// SHA-256 of every training picture.
fn sums(real: &Manifest) -> Result<HashMap<PathBuf, String>> {
    let pictures: BTreeSet<&PathBuf> =
        real.rows.iter().filter(|row| row.split == Split::Train).map(|row| &row.image_path).collect();
    pictures.into_iter().map(|path| Ok((path.clone(), sha256(path)?))).collect()
}

/// Each training picture's fold, every class spread evenly. Copies of a picture are in one fold.
fn folds(real: &Manifest, count: usize, seed: u64) -> Result<BTreeMap<String, usize>> {
    let sums = sums(real)?;
    let mut classes: BTreeMap<&str, BTreeSet<&String>> = BTreeMap::new();
    for row in real.rows.iter().filter(|row| row.split == Split::Train) {
        classes.entry(&row.modality).or_default().insert(&sums[&row.image_path]);
    }
    if count < 2 || classes.values().all(|pictures| pictures.len() < count) {
        let reason = format!("{count} folds cannot be made of these training pictures");
        return Err(Error::config("--folds", reason, "use 2 to 5 folds, and at least that many pictures"));
    }
    let mut folds = BTreeMap::new();
    for (class, (_, pictures)) in classes.into_iter().enumerate() {
        let mut pictures: Vec<&String> = pictures.into_iter().collect();
        pictures.shuffle(&mut rng::stream(seed, "folds", &[class as u64]));
        for (i, sum) in pictures.into_iter().enumerate() {
            folds.entry(sum.clone()).or_insert(i % count);
        }
    }
    Ok(folds)
}

/// Dice of the judge's mask and the label, and the part of the picture that it segments outside.
fn score(assembly: &Assembly, picture: &Path, label: &GrayImage, question: &str) -> Result<(f64, f64)> {
    let picture = decode::picture(picture)?;
    let label = foreground(label);
    // one token: the mask comes from the question's states
    let prediction = predict(assembly, &Request { picture: &picture, question, max_new_tokens: 1 }, |_| ())?;
    let area = |mask: &GrayImage| mask.iter().filter(|&&value| value > 0).count();
    #[expect(clippy::cast_precision_loss, reason = "pixel counts")]
    let [pixels, in_label] = [label.as_raw().len() as f64, area(&label) as f64];
    let near = dilate(&label, (MARGIN_FRAC * 2.0 * (in_label / std::f64::consts::PI).sqrt()).max(2.0));
    let (mut both, mut predicted, mut outside) = (0.0, 0.0, 0.0);
    for ((p, &own), &near) in prediction.mask.iter().zip(label.iter()).zip(near.iter()) {
        if *p >= 0.5 {
            predicted += 1.0;
            both += f64::from(u8::from(own > 0));
            outside += f64::from(u8::from(near == 0));
        }
    }
    Ok((2.0 * both / (predicted + in_label).max(1.0), outside / pixels.max(1.0)))
}

fn one(
    assembly: &Assembly,
    export: &Export,
    record: &Record,
    thresholds: &Thresholds,
    nearness: Option<&Nearness>,
) -> Result<Verdict> {
    let (image, mask) = export.paths(record);
    let question = record.texts.first().map(|text| text.question.as_str()).unwrap_or_default();
    let (dice, outside) = score(assembly, &image, &decode::mask(&mask)?, question)?;
    let mut verdict = Verdict::new();
    verdict.at_least("dice", dice, thresholds.dice_min);
    verdict.at_most("outside", outside, thresholds.outside_max);
    if let Some(nearness) = nearness {
        for (name, value, most) in [
            ("knn_distance", nearness.distance, nearness.distance_max),
            ("cosine", nearness.cosine, nearness.cosine_max),
        ] {
            match most {
                Some(most) => verdict.at_most(name, value, most),
                None => verdict.note(name, value),
            }
        }
    }
    Ok(verdict)
}

/// The pixel tests' verdict with this one's instead of an earlier one of this file.
fn revise(record: &mut Record, verdict: &Verdict) {
    let is_ours = |text: &str| SCORES.contains(&text.split(' ').next().unwrap_or_default());
    let mut reasons: Vec<String> =
        record.reason.split("; ").filter(|r| !r.is_empty() && !is_ours(r)).map(str::to_owned).collect();
    reasons.extend(verdict.reasons.iter().cloned());
    record.scores.retain(|name, _| !is_ours(name));
    record.scores.extend(verdict.scores.clone());
    record.accepted = reasons.is_empty();
    record.reason = reasons.join("; ");
}

/// Where more than `keep` pairs are accepted, those above a quantile of the real agreement of their class go, the
/// easiest first: they teach nothing.
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
        records[i].reason = format!("too_easy {dice:.4} is above {most:.4}, and there are enough pairs");
        accepted -= 1;
    }
}

/// How far a pair is from real pictures, and how far real ones are from each other.
#[derive(Debug, Clone, Copy)]
struct Nearness {
    distance: f64,
    distance_max: Option<f64>,
    cosine: f64,
    cosine_max: Option<f64>,
}

/// Nearness of the pairs `own` by the number of their record: class by class, against all real training pictures of the
/// class. Real pictures are compared with their nearest too, so that the limits are of the same kind.
fn nearness(
    assembly: &Assembly,
    (real, sums): (&Manifest, &HashMap<PathBuf, String>),
    export: &Export,
    (records, own): (&[Record], &[usize]),
    thresholds: &Thresholds,
    around: Surroundings,
) -> Result<HashMap<usize, Nearness>> {
    let mut groups: BTreeMap<(&str, Mode), Vec<usize>> = BTreeMap::new();
    for &i in own {
        groups.entry((&records[i].class, records[i].mode)).or_default().push(i);
    }
    let mut found = HashMap::new();
    for ((class, mode), members) in groups {
        let mut seen = BTreeSet::new();
        let rows: Vec<&Row> = real
            .rows
            .iter()
            .filter(|row| row.split == Split::Train && row.modality == class && seen.insert(&row.mask_path))
            .collect();
        if rows.len() < LEAST {
            continue;
        }
        let pairs = rows.iter().map(|row| (row.image_path.clone(), row.mask_path.clone())).collect::<Vec<_>>();
        let reference = features(assembly, mode, &pairs, around)?;
        let pairs = members.iter().map(|&i| export.paths(&records[i])).collect::<Vec<_>>();
        let query = features(assembly, mode, &pairs, around)?;
        let distances = knn_distance(&query, &reference, NEIGHBOURS)?;
        let own_picture =
            |i: &usize| rows.iter().position(|row| sums.get(&row.image_path) == Some(&records[*i].source_sha256));
        let cosines = members
            .iter()
            .enumerate()
            .map(|(at, i)| {
                // its own source shares a layout with it, and what is held
                let at = i64::try_from(at).expect("a few pairs");
                let own = own_picture(i);
                let others: Vec<i64> =
                    (0_i64..).zip(0..rows.len()).filter(|(_, row)| Some(*row) != own).map(|(row, _)| row).collect();
                let others = reference.index_select(0, &Tensor::from_slice(&others));
                Ok(max_cosine(&query.narrow(0, at, 1), &others)?[0])
            })
            .collect::<Result<Vec<f64>>>()?;
        let distance_max = quantile(&knn_distance_within(&reference, NEIGHBOURS)?, thresholds.knn_quantile);
        let cosine_max = quantile(&max_cosine_within(&reference)?, thresholds.cosine_quantile);
        for ((i, distance), cosine) in members.into_iter().zip(distances).zip(cosines) {
            found.insert(i, Nearness { distance, distance_max, cosine, cosine_max });
        }
    }
    Ok(found)
}

/// Features of the area that `mode` makes new, `[n, c]`.
fn features(assembly: &Assembly, mode: Mode, pairs: &[(PathBuf, PathBuf)], around: Surroundings) -> Result<Tensor> {
    let files: Vec<PathBuf> = pairs.iter().map(|pair| pair.0.clone()).collect();
    let area = |i: usize| -> Result<GrayImage> {
        let mut mask = foreground(&decode::mask(&pairs[i].1)?);
        if mode == Mode::KeepLesion {
            mask.iter_mut().for_each(|value| *value = 255 - *value);
        }
        if mask.iter().all(|&value| value == 0) {
            mask.iter_mut().for_each(|value| *value = 255);
        }
        Ok(mask)
    };
    let of_a_part = matches!(mode, Mode::KeepLesion | Mode::EditLesion | Mode::InsertLesion);
    let pictures = Pictures {
        files: &files,
        area: of_a_part.then_some(&area),
        batch: FEATURES,
        observer: &crate::event::Silent,
        interrupt: around.interrupt,
    };
    quality::encoder_features(assembly, &pictures)
}
