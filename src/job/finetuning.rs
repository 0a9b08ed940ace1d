//! The fine-tuning of the generator as a [`Job`](super::Job).

use super::memory::accept;
use super::planned::{Fitted as _, Planned as _};
use super::rows::Rows;
use super::together::{check_data, main_only};
use super::{How, generator, write_report};
use crate::augment::finetune::dry_run::FEATURES_BATCH;
use crate::augment::finetune::samples::Extract;
use crate::augment::finetune::{FinetunedRun, Finetuning};
use crate::augment::pipeline_config::PipelineConfig;
use crate::augment::quality::{self, FeatureImages, FeatureSource};
use crate::config::{FinetuneRun, Resolved};
use crate::data::manifest::Manifest;
use crate::data::marks::Marks;
use crate::data::split;
use crate::front::{Model, OpenOptions};
use crate::hub::{Files, Need};
use crate::models::inception;
use crate::plan::dry_run::Job;
use crate::plan::report::Plan;
use crate::plan::search::{HEADROOM_FRAC, has_headroom};
use crate::runtime::Runtime;
use crate::segment::{resume, weight_files};
use crate::tensor::{Device, Tensor, memory};
use crate::trainer::{FirstLayers, TrainingOutcome};
use crate::units::Bytes;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Part of the training images that validate if there are no `val` rows.
const VAL_FRAC: f64 = 0.1;

/// Settings that the search for a GPU chooses; settings in which a flag gives one of them are not searched.
const SEARCHED: [&str; 11] = [
    "train.micro_batch",
    "train.accumulation",
    "train.checkpointing",
    "train.optimizer",
    "train.step_in_backward",
    "train.offload_optimizer",
    "train.offload_weights",
    "train.clip_norm",
    "train.precision",
    "finetune.image_size",
    "finetune.sample_batch",
];

/// A fine-tuning whose rows are read.
pub struct GeneratorFinetuning<'a> {
    how: &'a How<'a>,
    settings: Resolved<FinetuneRun>,
    manifest: Manifest,
    may_search: bool,
    pipeline_config: Option<PipelineConfig>,
}

/// A finished fine-tuning, whose memory is free again.
pub struct Finetuned {
    /// Steps, time and best score.
    pub outcome: TrainingOutcome,
    /// Settings of one of the processes.
    pub run: FinetuneRun,
    /// Peak of all tensors.
    pub peak: Bytes,
}

impl<'a> GeneratorFinetuning<'a> {
    /// A fine-tuning with these settings on `rows`. With `may_search`, settings that do not fit are replaced by the
    /// fastest that fit the machine, except those that flags gave.
    ///
    /// # Errors
    /// [`Error::Data`] or [`Error::Io`] for rows or images that cannot be read; [`Error::Config`].
    pub fn new(settings: Resolved<FinetuneRun>, rows: &Rows, may_search: bool, how: &'a How<'a>) -> Result<Self> {
        let mut manifest = rows.open(how.runtime)?;
        check_data(how.ranks, &manifest)?;
        keep_for_validation(&mut manifest, &settings.config, how.runtime)?;
        let is_given = SEARCHED.iter().any(|key| settings.is_from_a_flag(key));
        let may_search = may_search && !is_given && !how.resume.resumes();
        Ok(Self { how, settings, manifest, may_search, pipeline_config: None })
    }

    /// The settings that are the run's own.
    fn run(&self) -> FinetuneRun {
        self.settings.config.with_samples_for(&self.how.machine)
    }

    fn sizes(&self) -> &PipelineConfig {
        self.pipeline_config.as_ref().expect("files are found first")
    }

    /// The plan of these settings for one of the processes, if there can be one.
    fn plan_of(&self, run: &FinetuneRun) -> Result<Option<Plan>> {
        let (how, sizes) = (self.how, self.sizes());
        match run.divided_among(how.ranks.size())?.plan_of(sizes, Job::Train, &how.machine) {
            // the CPU's operators are tried one by one to learn what they need
            Err(error @ Error::OutOfMemory { .. }) => {
                how.runtime.warn(format!("no memory plan: {error}"));
                Ok(None)
            }
            plan => plan.map(Some),
        }
    }

    /// Replaces settings that do not fit by the fastest that fit this machine. All processes take those that the first
    /// one found.
    fn search(&mut self, planned: Option<&Plan>) -> Result<Option<Plan>> {
        let (ranks, machine, wanted) = (self.how.ranks, &self.how.machine, self.settings.config.clone());
        let search = || Ok(wanted.fitted(self.sizes(), machine, true)?.map(|(run, _)| run));
        let fitted = ranks.gather_if_all(main_only(ranks, search).map(Option::flatten))?.swap_remove(0);
        let Some(fitted) = fitted else { return Ok(None) };
        for note in changes(&wanted, &fitted) {
            self.how.runtime.note(note);
        }
        if let Some(plan) = planned {
            let origin = format!("chosen for {}", plan.budget.device);
            self.settings.origins.extend(SEARCHED.map(|key| (key.to_owned(), origin.clone())));
        }
        self.settings.config = fitted;
        self.plan_of(&self.settings.config)
    }
}

impl super::Job for GeneratorFinetuning<'_> {
    type Done = Finetuned;

    fn check_resume(&self, checkpoint: &Path) -> Result<()> {
        let settings = (&self.run(), &*FinetuneRun::declarations());
        // the training says what the warnings say
        resume::check_settings_and_rows(checkpoint, settings, &self.manifest).map(drop)
    }

    fn find_files(&mut self, _checkpoint: Option<&Path>) -> Result<()> {
        self.pipeline_config = Some(generator::to_finetune(&self.settings.config, self.how.runtime)?);
        Ok(())
    }

    fn plan(&mut self) -> Result<()> {
        let (how, ranks) = (self.how, self.how.ranks);
        let planned = ranks.agree_on(self.plan_of(&self.settings.config))?;
        let fits = planned.as_ref().is_none_or(|plan| has_headroom(plan, HEADROOM_FRAC));
        let searches = self.may_search && ranks.any(!fits)?;
        let found = if searches { self.search(planned.as_ref())? } else { None };
        if let Some(plan) = found.or(planned) {
            how.runtime.note(format!("memory plan:{}", plan.brief()));
            let run = self.settings.config.divided_among(ranks.size())?;
            let planned = (&run, self.sizes(), Job::Train, &how.machine);
            let otherwise = "`prsmed preset --task finetune` searches for settings that fit";
            accept(plan, planned, ("train", otherwise), &how.memory, how.runtime)?;
        }
        Ok(())
    }

    fn train(mut self) -> Result<Finetuned> {
        self.settings.config = self.run();
        let Self { how, settings, manifest, pipeline_config, .. } = self;
        let (toml, mut run) = (settings.to_toml(), settings.config);
        if let Some(note) = run.train.divide_among(how.ranks.size())? {
            how.runtime.note(note);
        }
        if run.finetune.is_random() {
            let text = format!("`{}` has random weights: the result is only for trying the tool", run.finetune.model);
            how.runtime.note(text);
        }
        let features = features(&run, how.runtime)?;
        let pipeline_config = pipeline_config.expect("files are found first");
        let finetuning = Finetuning {
            run: &run,
            toml: toml.clone(),
            pipeline_config: &pipeline_config,
            manifest: &manifest,
            folder: &how.out,
            resumes: how.resume.resumes(),
            features,
            profile: how.own_profile(),
            ranks: how.ranks,
            runtime: how.runtime,
        };
        let FinetunedRun { outcome, task } = finetuning.run()?;
        let peak = memory::overall_peak(how.runtime.device());
        drop(task);
        write_report(&outcome, &toml, how);
        Ok(Finetuned { outcome, run, peak })
    }
}

fn keep_for_validation(manifest: &mut Manifest, run: &FinetuneRun, runtime: &Runtime) -> Result<()> {
    if run.train.validate_every_epochs == 0 {
        return Ok(());
    }
    let marks = (&mut Marks::cached(runtime.cache()), runtime.observer().as_ref());
    if let Some(cut) = split::ensure_val(manifest, VAL_FRAC, run.train.seed, marks)? {
        let text =
            format!("no `val` rows: {} of {} training images are used for validation", cut.val_images, cut.images);
        runtime.note(text);
    }
    Ok(())
}

/// What computes the features of samples and real images, if samples are measured.
fn features(run: &FinetuneRun, runtime: &Runtime) -> Result<Option<(FeatureSource, Extract)>> {
    if run.finetune.samples == 0 {
        return Ok(None);
    }
    let (observer, interrupt) = (Arc::clone(runtime.observer()), Arc::clone(runtime.interrupt()));
    let batch = usize::try_from(FEATURES_BATCH).expect("a small batch");
    let images = move |files: &[PathBuf], compute: &dyn Fn(&FeatureImages) -> Result<Tensor>| {
        compute(&FeatureImages { files, area: None, batch, observer: observer.as_ref(), interrupt: &interrupt })
    };
    let (spec, device) = (run.finetune.features.as_str(), runtime.device());
    if Path::new(spec).join("config.toml").exists() {
        let model = Model::open(spec, &OpenOptions::default(), runtime)?;
        let extract: Extract =
            Rc::new(move |files| images(files, &|images| quality::encoder_features(&model.loaded, images)));
        return Ok(Some((FeatureSource::Encoder("segmenter".into()), extract)));
    }
    if !spec.starts_with("hub:") && !Path::new(spec).exists() {
        let hint = "give weights of InceptionV3, `hub:owner/name`, or the run folder of a segmenter";
        return Err(Error::weights(spec, "there is no such file or folder", hint));
    }
    let need = Need::new("finetune.features", spec, Files::Matching(&[inception::WEIGHTS_FILE]));
    weight_files::check(vec![need], runtime)?;
    let path = runtime.locate(spec)?;
    // a file that cannot be read is refused before the training
    drop(quality::open_inception(&path, Device::Cpu)?);
    let extract: Extract = Rc::new(move |files| {
        let network = quality::open_inception(&path, device)?;
        images(files, &|images| quality::inception_features(&network, images))
    });
    Ok(Some((FeatureSource::Inception, extract)))
}

/// What a search changed, in words.
pub fn changes(before: &FinetuneRun, now: &FinetuneRun) -> Vec<String> {
    let mut notes = Vec::new();
    let (was, is) = (&before.train, &now.train);
    if (was.micro_batch, was.accumulation) != (is.micro_batch, is.accumulation) {
        let (micro_batch, accumulation, whole) = (is.micro_batch, is.accumulation, now.effective_batch());
        notes.push(format!("effective batch: {micro_batch} x {accumulation} = {whole} images"));
    }
    if was.checkpointing != is.checkpointing {
        notes.push(match is.checkpointing {
            FirstLayers::None => "`train.checkpointing=none`: memory suffices without recomputing blocks".to_owned(),
            _ => "`train.checkpointing`: blocks of the UNet are computed again in the backward pass".to_owned(),
        });
    }
    let is_one_by_one = now.finetune.samples > 0 && before.finetune.sample_batch != now.finetune.sample_batch;
    let compromises = [
        (was.optimizer != is.optimizer, "`train.optimizer=adamw8bit`: nothing else fits"),
        (
            !was.step_in_backward && is.step_in_backward,
            "`train.step_in_backward=true`: each weight is updated as soon as its gradient is complete, and gradients \
             are not clipped; nothing else fits",
        ),
        (
            !was.offload_optimizer && is.offload_optimizer,
            "`train.offload_optimizer=true`: optimizer state in host memory; nothing else fits",
        ),
        (
            !was.offload_weights && is.offload_weights,
            "`train.offload_weights=true`: fp32 weights and optimizer state in host memory, updated by the CPU; nothing \
             else fits",
        ),
        (is_one_by_one, "`finetune.sample_batch=1`: samples are made one by one"),
    ];
    notes.extend(compromises.into_iter().filter(|(is_made, _)| *is_made).map(|(_, note)| note.to_owned()));
    let (was, is) = (before.finetune.image_size, now.finetune.image_size);
    if was != is {
        notes.push(format!("nothing fits with images of {was} pixels: using {is}, which is unusable for a model made for much larger ones"));
    }
    notes
}
