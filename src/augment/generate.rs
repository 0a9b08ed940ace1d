//! Generation of pairs: source images and prompts -> batches -> generated images with labels -> a data root.
//!
//! Every random choice of a pair depends only on the run's seed and the pair's index, and batches are the same in
//! every run. So an interrupted run continues with the missing pairs and ends with the same files.

mod estimate;
mod pair;

pub use self::pair::PromptTexts;

use self::pair::{PairMaker, PreparedPair, SourceImage, absolute, side_of};
use super::export::{Export, LoraUse, MaskSource};
use super::filter::pixels::RealStatistics;
use super::filter::{Decision, Thresholds, survey};
use super::inputs::JobInputs;
use super::mask_bank::MaskBank;
use super::pipeline::{
    GenerationBatch, Generator, Placement, PromptEmbedding, TextIds, encode_prompts, pictures, tokenize,
};
use super::pipeline_config::PipelineConfig;
use super::prompt::DrawnPrompts;
use super::saved_settings::same_settings;
use super::settings::{AugmentConfig, Mode};
use crate::data::manifest::{Manifest, Split};
use crate::data::split::spread_over_classes;
use crate::event::{Event, Observer};
use crate::models::diffusion::lora::Adapter;
use crate::tensor::weights::sha256;
use crate::tensor::{Device, Kind, Tensor, guard, ledger};
use crate::trainer::Ranks;
use crate::{Error, Result, files};
use image::RgbImage;
use rayon::prelude::*;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// File with the settings and weights that a data root of pairs was made with. A run that continues it must use the
/// same.
pub const SETTINGS: &str = "augment.json";

/// A generation job.
pub struct Generation<'a> {
    /// Generator settings.
    pub config: &'a AugmentConfig,
    /// Limits of the filter.
    pub thresholds: &'a Thresholds,
    /// Whether the pixel tests run.
    pub filters: bool,
    /// Sizes and files of the generator.
    pub pipeline_config: &'a PipelineConfig,
    /// LoRA adapters with their strengths.
    pub adapters: &'a [(Vec<Adapter>, f64)],
    /// Descriptions of the adapters for the records.
    pub loras: &'a [LoraUse],
    /// Data root of the sources; only `train` rows are used.
    pub manifest: &'a Manifest,
    /// Number of source images, spread over the classes; 0 = all.
    pub limit: usize,
    /// Output data root.
    pub out: &'a Path,
    /// Device of the networks.
    pub device: Device,
    /// The processes that generate together. The first one writes all files.
    pub ranks: Ranks<'a>,
    /// Receives progress and messages.
    pub observer: &'a dyn Observer,
    /// Set by Ctrl-C: finished pairs stay, and the job ends with [`Error::Interrupted`].
    pub interrupt: &'a AtomicBool,
}

/// Summary of a generation job.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct GenerationSummary {
    /// Source images.
    pub sources: usize,
    /// Pairs in the data root, including earlier runs.
    pub pairs: usize,
    /// Accepted pairs.
    pub accepted: usize,
    /// Rows of the annotation files.
    pub rows: usize,
    /// Rejected pairs by the first failed test.
    pub rejected: BTreeMap<String, usize>,
    /// Pairs made by this run.
    pub made_now: usize,
    /// Generated images per second of denoising and decoding.
    pub images_per_s: f64,
    /// Batch size at the end; smaller than the setting after an out-of-memory error.
    pub batch: usize,
}

/// The training images of a manifest whose masks show a target, in the order of their first rows; `limit` of them,
/// spread over the classes, unless it is 0.
fn sources(manifest: &Manifest, limit: usize) -> Result<Vec<SourceImage<'_>>> {
    let mut found: Vec<SourceImage> = Vec::new();
    let mut index_of: HashMap<(&Path, &Path), usize> = HashMap::new();
    for row in manifest.rows.iter().filter(|row| row.split == Split::Train && row.is_present()) {
        let (image, mask) = (row.image_path.as_path(), row.target().mask_path.as_path());
        let index = *index_of.entry((image, mask)).or_insert_with(|| {
            found.push(SourceImage { image, sha256: String::new(), mask, companions: Vec::new(), rows: Vec::new() });
            found.len() - 1
        });
        found[index].rows.push(row);
    }
    let sums: Vec<String> = found.par_iter().map(|source| sha256(source.image)).collect::<Result<_>>()?;
    let mut of_image: HashMap<&str, Vec<&Path>> = HashMap::new();
    for (source, sum) in found.iter().zip(&sums) {
        of_image.entry(sum).or_default().push(source.mask);
    }
    for (source, sum) in found.iter_mut().zip(&sums) {
        source.companions = of_image[sum.as_str()].iter().copied().filter(|mask| *mask != source.mask).collect();
        source.sha256.clone_from(sum);
    }
    let found = spread_over_classes(found, limit, |source| source.rows[0].modality.clone());
    if found.is_empty() {
        let hint = "pairs are made from train rows only: give at least one row the split `train`";
        return Err(Error::data(&manifest.root, "there are no training rows with a mask", hint));
    }
    Ok(found)
}

impl Generation<'_> {
    /// Draws the prompts of all pairs.
    ///
    /// # Errors
    /// [`Error::Config`] for a bad prompt file; [`Error::Data`] without train rows.
    pub fn texts(&self) -> Result<PromptTexts> {
        let sources = sources(self.manifest, self.limit)?;
        let random = (self.config.seed, "prompt");
        let mut texts = DrawnPrompts::new(&self.config.prompts, self.config.mode, random)?;
        let row = |index: usize| sources[index / self.config.per_image].rows[0];
        let all = 0..sources.len() * self.config.per_image;
        let pairs = all.map(|index| texts.draw(row(index), index as u64)).collect();
        Ok(PromptTexts { texts: texts.texts, pairs })
    }

    /// Generates the missing pairs. Processes take batches in turn; the pairs do not depend on their number. The first one
    /// gets the summary.
    ///
    /// # Errors
    /// [`Error::Config`] for a data root made with other settings; [`Error::Data`] for an image that cannot be read;
    /// [`Error::Weights`]; [`Error::OutOfMemory`] when a single image does not fit; [`Error::Interrupted`];
    /// [`Error::Peer`] if another process failed.
    pub fn run(&self) -> Result<Option<GenerationSummary>> {
        super::adapters::check(self.pipeline_config, self.adapters, self.loras)?;
        let sources = sources(self.manifest, self.limit)?;
        let texts = self.texts()?;
        let model_sha256 = self.pipeline_config.digest()?;
        let ids = tokenize(self.pipeline_config, &texts.texts, "prompts", self.observer)?;
        let open = || {
            let export = Export::open(self.out)?;
            self.check_settings(&sources, (&texts, &ids), &model_sha256)?;
            Ok(export)
        };
        let mut export = self.ranks.agree_on(self.ranks.is_main().then(open).transpose())?;
        let all = sources.len() * self.config.per_image;
        let is_missing = |export: &Export| (0..all as u64).any(|index| !export.journal.done.contains(&index));
        let mut state = GenerationState { num_pairs: all, batch: self.config.batch, made: 0, sampled: 0, seconds: 0.0 };
        if self.ranks.any(export.as_ref().is_some_and(is_missing))? {
            self.make(&sources, (&texts, &ids), model_sha256, export.as_mut(), &mut state)?;
        }
        let Some(export) = export else { return Ok(None) };
        Ok(Some(GenerationSummary {
            rows: export.write_annotations()?,
            sources: sources.len(),
            pairs: export.journal.records.len(),
            accepted: export.journal.records.iter().filter(|record| record.accepted).count(),
            rejected: export.journal.rejected(),
            made_now: state.made,
            images_per_s: state.sampled as f64 / state.seconds.max(1e-9),
            batch: state.batch,
        }))
    }

    /// Loads the generator and makes the missing pairs.
    fn make(
        &self,
        sources: &[SourceImage],
        (texts, ids): (&PromptTexts, &TextIds),
        model_sha256: String,
        mut export: Option<&mut Export>,
        state: &mut GenerationState,
    ) -> Result<()> {
        let real = if self.ranks.is_main() { self.survey(sources)? } else { HashMap::new() };
        let empty: Vec<bool> = texts.texts.iter().map(String::is_empty).collect();
        let embeddings = encode_prompts(self.pipeline_config, self.placement(), ids, &empty, self.adapters)?;
        self.observer.on(&Event::Note(format!("loading the generator ({})", self.pipeline_config.family())));
        let generator = Generator::load(self.pipeline_config, self.config, self.placement(), self.adapters)?;
        let side = side_of(self.config)?;
        let Some(cell) = u32::try_from(generator.cell_px()).ok().filter(|cell| side.is_multiple_of(*cell)) else {
            let reason = format!("{side} is no multiple of the {} pixels per latent", generator.cell_px());
            return Err(Error::config("augment.image_size", reason, "use a multiple of it, for example 512"));
        };
        let work = PairMaker {
            config: self.config,
            cell,
            thresholds: self.thresholds,
            loras: self.loras,
            sources,
            texts,
            real: &real,
            mask_bank: MaskBank::new(sources.iter().flat_map(|source| source.rows.iter().copied())),
            model_sha256,
        };
        self.observer.on(&Event::Started { phase: "generate".into(), total: state.num_pairs as u64, unit: "images" });
        let ended = self.rounds(&work, (&generator, &embeddings), export.as_deref_mut(), state);
        if let (Err(_), Some(export)) = (&ended, &export) {
            export.write_annotations()?;
        }
        ended?;
        self.observer.on(&Event::Finished);
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement { device: self.device, kind: self.config.kind(), seed: self.config.seed }
    }

    /// Writes the settings at the first run. Later runs fail when their settings differ.
    fn check_settings(
        &self,
        sources: &[SourceImage],
        (texts, ids): (&PromptTexts, &TextIds),
        model_sha256: &str,
    ) -> Result<()> {
        // earlier versions repainted a rim around new lesions too
        let format = if matches!(self.config.mode, Mode::EditLesion | Mode::InsertLesion) { 2 } else { 1 };
        let mut now = json!({
            "format": format,
            "augment": self.config,
            "filter": self.thresholds,
            "filters": self.filters,
            "model_sha256": model_sha256,
            "loras": self.loras,
            "data_root": absolute(&self.manifest.root),
            "sources": sources.len(),
            "rows_sha256": rows_sha256(sources, &texts.texts),
        });
        // earlier versions had this setting
        now["augment"]["preview_every"] = 0.into();
        let path = self.out.join(SETTINGS);
        let saved = files::read(&path, files::MAX_TEXT).ok();
        let saved = saved.and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
        if saved.is_none_or(|saved| saved.get("inputs").is_some()) {
            now["inputs"] = self.inputs(sources, ids)?;
        }
        same_settings(&path, &now, "out", "pairs")
    }

    /// What the pairs depend on besides settings, rows, images and weights.
    fn inputs(&self, sources: &[SourceImage], ids: &TextIds) -> Result<serde_json::Value> {
        let mut inputs = JobInputs::of_generator(self.pipeline_config, &[]);
        inputs.add("the tokenizer", format!("{ids:?}"));
        let masks = sources
            .par_iter()
            .flat_map_iter(|source| std::iter::once(source.mask).chain(source.companions.iter().copied()));
        let masks: Vec<String> = masks.map(sha256).collect::<Result<_>>()?;
        inputs.add("the masks", masks.concat());
        Ok(inputs.to_json())
    }

    /// Statistics of the real images, by class.
    fn survey(&self, sources: &[SourceImage]) -> Result<HashMap<String, RealStatistics>> {
        if !self.filters {
            return Ok(HashMap::new());
        }
        let mut classes: BTreeMap<&str, Vec<(&Path, &Path)>> = BTreeMap::new();
        for source in sources {
            classes.entry(source.class()).or_default().push((source.image, source.mask));
        }
        let side = side_of(self.config)?;
        let survey = |(class, images): (&str, Vec<(&Path, &Path)>)| {
            Ok((class.to_owned(), survey::measure(&images, (side, self.config.mode), self.config.seed)?))
        };
        classes.into_iter().map(survey).collect()
    }

    /// Generates the batches, one for each process at a time. The first process, which has the `export`, says which.
    fn rounds(
        &self,
        work: &PairMaker,
        networks: (&Generator, &[PromptEmbedding]),
        mut export: Option<&mut Export>,
        state: &mut GenerationState,
    ) -> Result<()> {
        let (ranks, mut next) = (self.ranks, 0);
        if let Some(export) = &export {
            self.observer.on(&Event::Advanced { done: export.journal.done.len() as u64 });
        }
        let mut written = Ok(());
        loop {
            let round = written.and_then(|()| match &export {
                _ if self.interrupt.load(Ordering::SeqCst) => Err(Error::Interrupted),
                Some(export) => Ok(self.next_round(export, state, next)),
                None => Ok(Round::new()),
            });
            let round = ranks.gather_if_all(round)?.swap_remove(0);
            let Some(&last) = round.last().and_then(|batch| batch.last()) else { return Ok(()) };
            let started = Instant::now();
            let own = round.get(ranks.rank());
            let own = own.map(|indices| self.render(work, networks, indices)).transpose();
            let is_too_large = matches!(&own, Err(Error::OutOfMemory { .. })) && round[0].len() > 1;
            if ranks.any(is_too_large)? {
                state.batch = (round[0].len() / 2).max(1);
                let reason = own.err().map_or_else(|| "on another process".to_owned(), |error| error.to_string());
                let text = format!("out of memory ({reason}): continuing with {} images at once", state.batch);
                self.observer.on(&Event::Warning(text));
                written = Ok(());
                continue;
            }
            let (mut prepared, mut images) = ranks.agree_on(own)?.unzip();
            state.seconds += started.elapsed().as_secs_f64();
            let is_first = state.sampled == 0;
            next = last + 1;
            written = Ok(());
            for (from, indices) in round.iter().enumerate() {
                let side = self.config.image_size;
                let shape = [i64::try_from(indices.len()).expect("a batch"), side, side, 3];
                let is_own = from == ranks.rank();
                let own = if is_own { images.take() } else { None };
                let images = ranks.collect(own, (&shape, Kind::Uint8), from)?;
                if let (Some(images), Some(export), Ok(())) = (images, export.as_deref_mut(), &written) {
                    let known = if is_own { prepared.take() } else { None };
                    written = known
                        .map_or_else(|| work.prepare_all(indices), Ok)
                        .and_then(|prepared| self.keep(work, &prepared, &images, export, state));
                }
            }
            if let Some(export) = export.as_deref().filter(|_| is_first) {
                let pairs = state.num_pairs - export.journal.done.len();
                let num_batches = pairs.div_ceil(state.batch * ranks.size());
                if let Some(text) = estimate::remaining(started.elapsed(), num_batches) {
                    self.observer.on(&Event::Note(text));
                }
            }
        }
    }

    /// The next batches with a missing pair from pair `next` on, at most one for each process; none at the end.
    fn next_round(&self, export: &Export, state: &GenerationState, mut next: usize) -> Round {
        let mut round = Round::new();
        while next < state.num_pairs && round.len() < self.ranks.size() {
            let end = (next + state.batch).min(state.num_pairs);
            if (next..end).any(|index| !export.journal.done.contains(&(index as u64))) {
                round.push((next..end).collect());
            }
            next = end;
        }
        round
    }

    /// A batch and its images, `[b, S, S, 3]` bytes. Pairs of it that exist already are generated again but not written
    /// again.
    fn render(
        &self,
        work: &PairMaker,
        (generator, embeddings): (&Generator, &[PromptEmbedding]),
        indices: &[usize],
    ) -> Result<(Vec<PreparedPair>, Tensor)> {
        let prepared = work.prepare_all(indices)?;
        let batch = guard::guard(|| Ok(self.tensors(work, generator, &prepared)))?;
        let images = generator.sample(&batch, embeddings)?;
        Ok((prepared, images))
    }

    /// Filters and writes the images of a batch.
    fn keep(
        &self,
        work: &PairMaker,
        prepared: &[PreparedPair],
        images: &Tensor,
        export: &mut Export,
        state: &mut GenerationState,
    ) -> Result<()> {
        state.sampled += prepared.len();
        let finished: Vec<(RgbImage, Decision)> = prepared
            .par_iter()
            .zip(pictures(images))
            .map(|(prepared, square)| work.finish(prepared, &square))
            .collect::<Result<_>>()?;
        for (prepared, (image, decision)) in prepared.iter().zip(finished) {
            if export.journal.done.contains(&(prepared.index as u64)) {
                continue;
            }
            let record = work.record(prepared, &decision);
            let source = &work.sources[prepared.source];
            let made = MaskSource::Made(&prepared.label);
            let mask = if prepared.label_is_new { made } else { MaskSource::Unchanged(source.mask) };
            export.write(&image, mask, record)?;
            state.made += 1;
            self.observer.on(&Event::Advanced { done: export.journal.done.len() as u64 });
        }
        Ok(())
    }

    fn tensors(&self, work: &PairMaker, generator: &Generator, prepared: &[PreparedPair]) -> GenerationBatch {
        let _category = ledger::enter(ledger::Category::Inputs);
        let side = self.config.image_size;
        let stacked = |channels: i64, side: i64, each: Vec<Vec<f32>>| {
            let tensors: Vec<Tensor> =
                each.iter().map(|values| Tensor::from_slice(values).view([1, channels, side, side])).collect();
            Tensor::cat(&tensors, 0).to_device(self.device)
        };
        let framed = |p: &PreparedPair| p.frame.to_model(&p.image).expect("a frame of its own image");
        let mode = self.config.mode;
        let pixels = (mode != Mode::MaskToImage)
            .then(|| stacked(3, side, prepared.par_iter().map(|p| planes(&framed(p))).collect()));
        let cells = side / generator.cell_px();
        let repaint = mode.holds().then(|| {
            let everything = || vec![1.0; usize::try_from(cells * cells).unwrap_or(0)];
            let mask = |p: &PreparedPair| p.inpaint_mask.as_ref().and_then(|mask| mask.latent_mask(&p.frame).ok());
            stacked(1, cells, prepared.iter().map(|p| mask(p).unwrap_or_else(everything)).collect())
        });
        let control = self.pipeline_config.controlnet.as_ref().map(|_| {
            let mask = |p: &PreparedPair| {
                let mask = p.frame.mask_to_model(&p.label).expect("a frame of its own mask");
                let plane: Vec<f32> = mask.iter().map(|&value| f32::from(u8::from(value > 0))).collect();
                plane.repeat(3)
            };
            stacked(3, side, prepared.iter().map(mask).collect())
        });
        let seeds: Vec<u64> = prepared.iter().map(|p| p.seed).collect();
        GenerationBatch {
            pixels,
            repaint,
            preserves: mode.holds(),
            control,
            noise: generator.noise(&seeds),
            prompts: prepared.iter().map(|p| work.texts.pairs[p.index]).collect(),
        }
    }
}

/// Pairs of the batches of a round, by process.
type Round = Vec<Vec<usize>>;

struct GenerationState {
    num_pairs: usize,
    batch: usize,
    made: usize,
    /// Images generated by the networks.
    sampled: usize,
    seconds: f64,
}

/// Hash of everything that pair numbers depend on: images, masks and texts of all sources in order, and the prompts.
fn rows_sha256(sources: &[SourceImage], prompts: &[String]) -> String {
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

/// RGB planes `[3, h, w]` in -1..=1.
fn planes(image: &RgbImage) -> Vec<f32> {
    let channel = |c: usize| image.as_raw().iter().skip(c).step_by(3).map(|&v| f32::from(v) / 127.5 - 1.0);
    (0..3).flat_map(channel).collect()
}
