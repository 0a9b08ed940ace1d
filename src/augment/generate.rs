//! Making pairs: sources and prompts -> batches -> pictures with their labels -> a data root.
//!
//! Every random choice of a pair comes from the run's seed and the pair's index alone, and batches are the same in every
//! run, so that a killed run goes on with what is missing and ends with the same files.

mod pair;

use self::pair::{Prepared, Source, Work, absolute, side_of, stream};
use super::blueprint::Blueprint;
use super::donor::Bank;
use super::export::{self, Export, LoraUse, MaskSource};
use super::filter::pixels::Real;
use super::filter::{Thresholds, Verdict, survey};
use super::hold::CELL;
use super::kept::same_settings;
use super::pipeline::{Batch, Embedding, Generator, Place, PromptPair, encode_prompts, tokenize};
use super::prompt::Prompts;
use super::settings::{AugmentConfig, Mode};
use crate::data::manifest::{Manifest, Split};
use crate::event::{Event, Observer};
use crate::models::diffusion::lora::Adapter;
use crate::tensor::{Device, Tensor, dims, guard, ledger};
use crate::{Error, Result};
use image::{GrayImage, RgbImage};
use rayon::prelude::*;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Settings and weights that a data root of pairs was made with; a run that continues it must have the same.
pub const SETTINGS: &str = "augment.json";
/// The sheet of pairs, accepted and rejected.
pub const SHEET: &str = "contact_sheet.png";
const PREVIEW: &str = "preview.png";
/// Pairs on a preview, and on the sheet.
const PREVIEWED: usize = 6;

/// A job that makes pairs.
pub struct Generation<'a> {
    /// The generator's settings.
    pub config: &'a AugmentConfig,
    /// The filter's limits.
    pub thresholds: &'a Thresholds,
    /// Whether pairs are filtered by their pixels.
    pub filters: bool,
    /// The generator's sizes and files.
    pub blueprint: &'a Blueprint,
    /// Adapters with their strength and what is written down about them.
    pub adapters: &'a [(Vec<Adapter>, f64)],
    /// The same for the records.
    pub loras: &'a [LoraUse],
    /// Sources are its train rows.
    pub manifest: &'a Manifest,
    /// First so many source pictures; 0 = all.
    pub limit: usize,
    /// The data root that is made.
    pub out: &'a Path,
    /// Where networks run.
    pub device: Device,
    /// Hears about everything.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: the pairs made so far stay, the job ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
}

impl std::fmt::Debug for Generation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").field("out", &self.out).finish_non_exhaustive()
    }
}

/// What was made.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Summary {
    /// Source pictures.
    pub sources: usize,
    /// Pairs in the data root, earlier runs included.
    pub pairs: usize,
    /// Of these, accepted ones.
    pub accepted: usize,
    /// Rows of the annotation files.
    pub rows: usize,
    /// Rejected pairs by the first test that failed.
    pub rejected: BTreeMap<String, usize>,
    /// Pairs made by this run.
    pub made_now: usize,
    /// Pictures a second while denoising and decoding.
    pub images_per_s: f64,
    /// Pictures at once at the end: less than asked for after running out of memory.
    pub batch: usize,
}

/// Train pictures of a manifest in the order of their first rows.
fn sources(manifest: &Manifest, limit: usize) -> Result<Vec<Source<'_>>> {
    let mut found: Vec<Source> = Vec::new();
    let mut places: HashMap<(&Path, &Path), usize> = HashMap::new();
    for row in manifest.rows.iter().filter(|row| row.split == Split::Train) {
        let (image, mask) = (row.image_path.as_path(), row.mask_path.as_path());
        let place = *places.entry((image, mask)).or_insert_with(|| {
            found.push(Source { image, sha256: String::new(), mask, companions: Vec::new(), rows: Vec::new() });
            found.len() - 1
        });
        found[place].rows.push(row);
    }
    let sums: Vec<String> = found.par_iter().map(|source| export::sha256(source.image)).collect::<Result<_>>()?;
    let mut of_picture: HashMap<&str, Vec<&Path>> = HashMap::new();
    for (source, sum) in found.iter().zip(&sums) {
        of_picture.entry(sum).or_default().push(source.mask);
    }
    for (source, sum) in found.iter_mut().zip(&sums) {
        source.companions = of_picture[sum.as_str()].iter().copied().filter(|mask| *mask != source.mask).collect();
        source.sha256.clone_from(sum);
    }
    if limit > 0 {
        found.truncate(limit);
    }
    if found.is_empty() {
        let hint = "pairs are made from train rows only: give at least one row the split `train`";
        return Err(Error::data(&manifest.root, "there are no training rows", hint));
    }
    Ok(found)
}

/// Settings and different texts of a job, for a plan of exactly it.
#[derive(Debug)]
pub struct Texts {
    /// All prompts and negatives, each once.
    pub texts: Vec<String>,
    /// Of every pair, by index.
    pub pairs: Vec<PromptPair>,
}

impl Generation<'_> {
    /// The prompts of all pairs.
    ///
    /// # Errors
    /// [`Error::Config`] for a bad prompt file; [`Error::Data`] without train rows.
    pub fn texts(&self) -> Result<Texts> {
        let sources = sources(self.manifest, self.limit)?;
        let file = &self.config.prompts;
        let prompts = if file.is_empty() { Prompts::embedded() } else { Prompts::open(Path::new(file))? };
        let mut texts: Vec<String> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        let mut number = |text: String| {
            *places.entry(text.clone()).or_insert_with(|| {
                texts.push(text);
                texts.len() - 1
            })
        };
        let mut pairs = Vec::new();
        for index in 0..sources.len() * self.config.per_image {
            let source = &sources[index / self.config.per_image];
            let mut rng = stream(self.config, "prompt", index as u64);
            let prompt = prompts.for_row(source.rows[0], self.config.mode, &mut rng);
            pairs.push(PromptPair { positive: number(prompt.positive), negative: number(prompt.negative) });
        }
        Ok(Texts { texts, pairs })
    }

    /// Makes what is missing.
    ///
    /// # Errors
    /// [`Error::Config`] for a data root made with other settings; [`Error::Data`] for a picture that cannot be read;
    /// [`Error::Weights`]; [`Error::OutOfMemory`] when a single picture does not fit; [`Error::Interrupted`].
    pub fn run(&self) -> Result<Summary> {
        let sources = sources(self.manifest, self.limit)?;
        let texts = self.texts()?;
        let model_sha256 = self.blueprint.digest()?;
        let mut export = Export::open(self.out)?;
        self.check_settings(&sources, &texts, &model_sha256)?;
        let all = sources.len() * self.config.per_image;
        let missing = |export: &Export| -> Vec<usize> {
            (0..all).filter(|index| !export.journal().done().contains(&(*index as u64))).collect()
        };
        let mut state = State { batch: self.config.batch, made: 0, sampled: 0, seconds: 0.0, preview: Vec::new() };
        if !missing(&export).is_empty() {
            let real = self.survey(&sources)?;
            let embeddings = self.embeddings(&texts)?;
            self.observer.on(&Event::Note(format!("loading the generator ({})", self.blueprint.family())));
            let generator = Generator::load(self.blueprint, self.config, self.place(), self.adapters)?;
            if generator.cell_px() != i64::from(CELL) {
                let reason = format!("its autoencoder has {} pixels for a latent, not {CELL}", generator.cell_px());
                return Err(Error::config("augment.model", reason, "use Stable Diffusion 1.x, 2.x or SDXL"));
            }
            let work = Work {
                config: self.config,
                thresholds: self.thresholds,
                loras: self.loras,
                sources: &sources,
                texts: &texts,
                real: &real,
                bank: Bank::new(sources.iter().flat_map(|source| source.rows.iter().copied())),
                model_sha256,
            };
            let networks = Networks { generator: &generator, embeddings: &embeddings };
            self.observer.on(&Event::Started { phase: "generate".into(), total: all as u64, unit: "images" });
            self.observer.on(&Event::Advanced { done: export.journal().done().len() as u64 });
            self.batches(&work, &networks, &mut export, &mut state)?;
            self.observer.on(&Event::Finished);
        }
        let rows = export.write_annotations()?;
        self.write_sheet(&export)?;
        // of this run only, where everything else is the same after a stop
        let preview = self.out.join(PREVIEW);
        if preview.exists() {
            std::fs::remove_file(&preview).map_err(Error::io(&preview, "remove"))?;
        }
        #[expect(clippy::cast_precision_loss, reason = "picture counts")]
        let images_per_s = state.sampled as f64 / state.seconds.max(1e-9);
        let mut summary = summary(&export, rows);
        summary.sources = sources.len();
        summary.made_now = state.made;
        summary.images_per_s = images_per_s;
        summary.batch = state.batch;
        Ok(summary)
    }

    fn place(&self) -> Place {
        Place { device: self.device, kind: self.config.kind(), seed: self.config.seed }
    }

    /// Refuses to mix pairs of different settings; writes them down at the first run.
    fn check_settings(&self, sources: &[Source], texts: &Texts, model_sha256: &str) -> Result<()> {
        let preview_free = AugmentConfig { preview_every: 0, ..self.config.clone() };
        let now = json!({
            "format": 1,
            "augment": preview_free,
            "filter": self.thresholds,
            "filters": self.filters,
            "model_sha256": model_sha256,
            "loras": self.loras,
            "data_root": absolute(&self.manifest.root),
            "sources": sources.len(),
            "rows_sha256": rows_sha256(sources, &texts.texts),
        });
        same_settings(&self.out.join(SETTINGS), &now, ("--out", "pairs"))
    }

    /// What real pictures of each class measure.
    fn survey(&self, sources: &[Source]) -> Result<HashMap<String, Real>> {
        if !self.filters {
            return Ok(HashMap::new());
        }
        let mut classes: BTreeMap<&str, Vec<(&Path, &Path)>> = BTreeMap::new();
        for source in sources {
            classes.entry(source.class()).or_default().push((source.image, source.mask));
        }
        let side = side_of(self.config)?;
        let survey = |(class, pictures): (&str, Vec<(&Path, &Path)>)| {
            Ok((class.to_owned(), survey::real(&pictures, side, self.thresholds, self.config.seed)?))
        };
        classes.into_iter().map(survey).collect()
    }

    fn embeddings(&self, texts: &Texts) -> Result<Vec<Embedding>> {
        let (ids, cut) = tokenize(&self.blueprint.tokenizers()?, &texts.texts)?;
        if let Some(first) = cut.first() {
            let text = format!(
                "{} of {} prompts are longer than 77 tokens and were cut; the first: {}",
                cut.len(),
                texts.texts.len(),
                texts.texts[*first]
            );
            self.observer.on(&Event::Warning(text));
        }
        let empty: Vec<bool> = texts.texts.iter().map(String::is_empty).collect();
        encode_prompts(self.blueprint, self.place(), &ids, &empty, self.adapters)
    }

    fn batches(&self, work: &Work, networks: &Networks, export: &mut Export, state: &mut State) -> Result<()> {
        let all = work.texts.pairs.len();
        let mut next = 0;
        while next < all {
            let end = (next + state.batch).min(all);
            let indices: Vec<usize> = (next..end).collect();
            let is_done = |index: &usize| export.journal().done().contains(&(*index as u64));
            if indices.iter().all(is_done) {
                next = end;
                continue;
            }
            if self.interrupt.load(Ordering::SeqCst) {
                export.write_annotations()?;
                return Err(Error::Interrupted);
            }
            match self.batch(work, networks, &indices, export, state) {
                Err(Error::OutOfMemory { reason }) if state.batch > 1 => {
                    state.batch = (state.batch / 2).max(1);
                    let text = format!("out of memory ({reason}): going on with {} pictures at once", state.batch);
                    self.observer.on(&Event::Warning(text));
                }
                Err(error) => {
                    export.write_annotations()?;
                    return Err(error);
                }
                Ok(()) => next = end,
            }
        }
        Ok(())
    }

    /// Makes a batch; pairs of it that are there already are made again but not written again.
    fn batch(
        &self,
        work: &Work,
        networks: &Networks,
        indices: &[usize],
        export: &mut Export,
        state: &mut State,
    ) -> Result<()> {
        let prepared: Vec<Prepared> = indices.par_iter().map(|&index| work.prepare(index)).collect::<Result<_>>()?;
        let batch = guard::guard(|| Ok(self.tensors(work, networks.generator, &prepared)))?;
        let started = Instant::now();
        let pictures = networks.generator.sample(&batch, networks.embeddings, || ())?;
        state.seconds += started.elapsed().as_secs_f64();
        state.sampled += indices.len();
        drop(batch);
        let squares = split(&pictures);
        drop(pictures);
        let finished: Vec<(RgbImage, Verdict)> = prepared
            .par_iter()
            .zip(squares)
            .map(|(prepared, square)| work.finish(prepared, &square))
            .collect::<Result<_>>()?;
        for (prepared, (picture, verdict)) in prepared.iter().zip(finished) {
            if export.journal().done().contains(&(prepared.index as u64)) {
                continue;
            }
            let record = work.record(prepared, &verdict);
            let source = &work.sources[prepared.source];
            let mask = if prepared.label_is_new {
                MaskSource::Made(&prepared.label)
            } else {
                MaskSource::Unchanged(source.mask)
            };
            export.write(&picture, mask, record)?;
            state.made += 1;
            self.observer.on(&Event::Advanced { done: export.journal().done().len() as u64 });
            self.preview(state, prepared, picture, verdict)?;
        }
        Ok(())
    }

    fn tensors(&self, work: &Work, generator: &Generator, prepared: &[Prepared]) -> Batch {
        let _category = ledger::enter(ledger::Category::Inputs);
        let side = self.config.image_size;
        let stacked = |channels: i64, side: i64, each: Vec<Vec<f32>>| {
            let tensors: Vec<Tensor> =
                each.iter().map(|values| Tensor::from_slice(values).view([1, channels, side, side])).collect();
            Tensor::cat(&tensors, 0).to_device(self.device)
        };
        let framed = |p: &Prepared| p.frame.to_model(&p.picture).expect("a frame of its own picture");
        let mode = self.config.mode;
        let pixels = (mode != Mode::MaskToImage)
            .then(|| stacked(3, side, prepared.par_iter().map(|p| planes(&framed(p))).collect()));
        let cells = side / i64::from(CELL);
        let repaint = mode.holds().then(|| {
            let everything = || vec![1.0; usize::try_from(cells * cells).unwrap_or(0)];
            let mask = |p: &Prepared| p.hold.as_ref().and_then(|hold| hold.latent_mask(&p.frame).ok());
            stacked(1, cells, prepared.iter().map(|p| mask(p).unwrap_or_else(everything)).collect())
        });
        let control = self.blueprint.controlnet.as_ref().map(|_| {
            let mask = |p: &Prepared| {
                let mask = p.frame.mask_to_model(&p.label).expect("a frame of its own mask");
                let plane: Vec<f32> = mask.iter().map(|&value| f32::from(u8::from(value > 0))).collect();
                plane.repeat(3)
            };
            stacked(3, side, prepared.iter().map(mask).collect())
        });
        let seeds: Vec<u64> = prepared.iter().map(|p| p.seed).collect();
        Batch {
            pixels,
            repaint,
            holds: mode.holds(),
            control,
            noise: generator.noise(&seeds),
            prompts: prepared.iter().map(|p| work.texts.pairs[p.index]).collect(),
        }
    }

    fn preview(&self, state: &mut State, prepared: &Prepared, picture: RgbImage, verdict: Verdict) -> Result<()> {
        let every = self.config.preview_every;
        if every == 0 {
            return Ok(());
        }
        let name = format!("pair {}", prepared.index);
        state.preview.push((name, prepared.picture.clone(), prepared.label.clone(), picture, verdict));
        if state.preview.len() > PREVIEWED {
            state.preview.remove(0);
        }
        if state.made.is_multiple_of(every) {
            super::filter::sheet::save(&state.preview, "the latest pairs", &self.out.join(PREVIEW))?;
        }
        Ok(())
    }

    /// The sheet of pairs spread over all, read back from the data root.
    fn write_sheet(&self, export: &Export) -> Result<()> {
        super::filter::sheet::of_root(export, &self.out.join(SHEET))
    }
}

struct Networks<'a> {
    generator: &'a Generator,
    embeddings: &'a [Embedding],
}

struct State {
    batch: usize,
    made: usize,
    /// Pictures that networks made, and how long that took.
    sampled: usize,
    seconds: f64,
    preview: Vec<(String, RgbImage, GrayImage, RgbImage, Verdict)>,
}

/// What pairs are numbered by: pictures, masks and texts of all sources in their order, and the prompts.
fn rows_sha256(sources: &[Source], prompts: &[String]) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: &[u8]| {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    for source in sources {
        add(source.sha256.as_bytes());
        for mask in std::iter::once(&source.mask).chain(&source.companions) {
            add(mask.file_name().unwrap_or_default().as_encoded_bytes());
        }
        for row in &source.rows {
            for text in [&row.modality, &row.question, &row.answer, row.position.as_ref().unwrap_or(&String::new())] {
                add(text.as_bytes());
            }
        }
    }
    for prompt in prompts {
        add(prompt.as_bytes());
    }
    format!("{:x}", hash.finalize())
}

/// `[3, h, w]` in -1..=1.
fn planes(picture: &RgbImage) -> Vec<f32> {
    let channel = |c: usize| picture.as_raw().iter().skip(c).step_by(3).map(|&v| f32::from(v) / 127.5 - 1.0);
    (0..3).flat_map(channel).collect()
}

/// `[b, S, S, 3]` bytes as pictures.
fn split(pictures: &Tensor) -> Vec<RgbImage> {
    let [b, h, w, _] = dims(pictures);
    let side = |value: i64| u32::try_from(value).expect("a side");
    (0..b)
        .map(|i| {
            let bytes = Vec::<u8>::try_from(pictures.get(i).reshape([-1])).expect("bytes");
            RgbImage::from_raw(side(w), side(h), bytes).expect("a whole picture")
        })
        .collect()
}

fn summary(export: &Export, rows: usize) -> Summary {
    let records = export.journal().records();
    let mut rejected: BTreeMap<String, usize> = BTreeMap::new();
    for record in records.iter().filter(|record| !record.accepted) {
        let first = record.reason.split(' ').next().unwrap_or_default().to_owned();
        *rejected.entry(first).or_default() += 1;
    }
    let accepted = records.iter().filter(|record| record.accepted).count();
    Summary { pairs: records.len(), accepted, rows, rejected, ..Summary::default() }
}
