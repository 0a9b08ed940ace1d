//! Training of PRS-Med: [`Training`], [`PreparedTraining`] and the finished [`Run`].

use super::config::{BatchNorm, ModelConfig, RANDOM};
use super::setup::{self, Build, LoadedModel, RunOverrides};
use super::task::SegmentTask;
use super::{RunConfig, init, resume, vision_features};
use crate::data::identity::{Seen, SeenImages};
use crate::data::leaks::Leaks;
use crate::data::manifest::{Manifest, Row, Split};
use crate::data::marks::Marks;
use crate::data::{bit_depth, split};
use crate::event::Observer;
use crate::nn::Quantization;
use crate::runtime::Runtime;
use crate::tensor::weights::verify_folder;
use crate::tensor::{Device, META, guard, ledger, meta};
use crate::trainer::{self, Ranks, Session, TrainingOutcome};
use crate::{Error, Result, files};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A training run that has not started: settings, rows and run folder.
///
/// ```no_run
/// use prsmed::prelude::*;
/// use prsmed::segment::Training;
///
/// let runtime = Runtime::new();
/// let manifest = Manifest::open("data".as_ref(), None)?;
/// let run = Training::new(RunConfig::preset("tiny")?, manifest, "runs/a", &runtime)?.run()?;
/// println!("{} steps", run.outcome.steps);
/// # Ok::<(), prsmed::Error>(())
/// ```
pub struct Training<'r> {
    config: RunConfig,
    toml: String,
    manifest: Arc<Manifest>,
    /// Of images of the rows.
    marks: Marks,
    folder: PathBuf,
    runtime: &'r Runtime,
    resumes: bool,
    ranks: Ranks<'r>,
}

impl<'r> Training<'r> {
    /// A training on the rows of `manifest` in the run folder `folder`. If the run validates and there are no `val`
    /// rows, it takes a part of the training images for validation (`data.val_frac`).
    ///
    /// # Errors
    /// [`Error::Data`] or [`Error::Io`] for images that cannot be divided.
    pub fn new(
        config: RunConfig,
        manifest: impl Into<Arc<Manifest>>,
        folder: impl Into<PathBuf>,
        runtime: &'r Runtime,
    ) -> Result<Self> {
        let mut manifest = manifest.into();
        let (mut marks, observer) = (Marks::cached(runtime.cache()), runtime.observer().as_ref());
        if let Some(fold) = config.data.own_fold() {
            let cut = split::validate_on_fold(Arc::make_mut(&mut manifest), fold, (&mut marks, observer))?;
            let (number, of) = (fold.number, fold.of);
            runtime.note(format!(
                "fold {number} of 0 to {}: {} of {} images are validated",
                of - 1,
                cut.val_images,
                cut.images
            ));
        }
        if config.train.validate_every_epochs > 0
            && config.data.val_frac > 0.0
            && let Some(cut) = split::ensure_val(
                Arc::make_mut(&mut manifest),
                config.data.val_frac,
                config.train.seed,
                (&mut marks, observer),
            )?
        {
            runtime.note(format!(
                "no `val` rows: {} of {} training images ({} rows) are used for validation",
                cut.val_images, cut.images, cut.val_rows
            ));
        }
        if manifest.num_leaking > 0 {
            let count = manifest.num_leaking;
            runtime.note(format!("{count} synthetic rows are left out: their sources are validation or test images"));
        }
        report_data(&manifest, runtime);
        let toml = config.to_toml();
        let ranks = Ranks::default();
        Ok(Self { config, toml, manifest, marks, folder: folder.into(), runtime, resumes: false, ranks })
    }

    /// Trains together with other processes.
    #[must_use]
    pub fn with_ranks(mut self, ranks: Ranks<'r>) -> Self {
        self.ranks = ranks;
        self
    }

    /// Sets the text of the run's `config.toml`, for example the settings with their origins.
    #[must_use]
    pub fn with_toml(mut self, toml: String) -> Self {
        self.toml = toml;
        self
    }

    /// Continues from `last/` in the run folder if it exists. Without this, an existing `last/` is an error.
    #[must_use]
    pub fn resume(mut self, resumes: bool) -> Self {
        self.resumes = resumes;
        self
    }

    /// The rows.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Images and patients that are in several splits. Every image is decoded for that, unless it is in the cache of an
    /// earlier call.
    pub fn leaks(&mut self) -> Leaks {
        let rows = &self.manifest.rows;
        self.marks.add(rows.iter().map(|row| row.image_path.as_path()), self.runtime.observer().as_ref());
        Leaks::find(&self.manifest, &self.marks)
    }

    /// The `test` rows about images or patients that other weights have seen, with how.
    pub fn seen_by(&mut self, other: &SeenImages) -> Vec<(&Row, Seen)> {
        let rows = self.manifest.rows_of(Split::Test);
        let images = rows.iter().map(|row| self.manifest.rows[*row].image_path.as_path());
        self.marks.add(images, self.runtime.observer().as_ref());
        let seen = other.seen(&self.manifest, &rows, &self.marks);
        let all = rows.iter().map(|row| &self.manifest.rows[*row]).zip(seen);
        all.filter(|(_, seen)| matches!(seen, Seen::Train | Seen::Patient)).collect()
    }

    /// The checkpoint that the training continues from, if any, with a warning for each setting that makes the run
    /// differ from an uninterrupted one. Nothing is loaded or changed.
    ///
    /// # Errors
    /// [`Error::Config`] for a folder that already contains a run, and for a setting that may not change on resume;
    /// [`Error::Data`] for rows that have changed.
    pub fn checkpoint(&self) -> Result<Option<(PathBuf, Vec<String>)>> {
        let Some(folder) = resume::checkpoint_in(&self.folder, self.resumes)? else { return Ok(None) };
        let warnings = resume::check(&folder, &self.config, &self.manifest)?;
        Ok(Some((folder, warnings)))
    }

    /// Compares the names and shapes of all weights with those of the model, without reading their values or asking for memory.
    ///
    /// # Errors
    /// As [`Self::checkpoint`], [`setup::create`] and [`setup::open`].
    pub fn compare_weights(&self) -> Result<()> {
        let checkpoint = self.checkpoint()?.map(|(folder, _)| folder);
        let model = &self.config.model;
        if checkpoint.is_none() && [&model.base, &model.image_encoder].iter().all(|part| *part == RANDOM) {
            return Ok(());
        }
        ledger::install();
        meta::install()?;
        // formats and places of weights do not change their names
        let resident = setup::resident_on_cpu(model.clone(), Device::Cpu);
        let model = ModelConfig { quantization: Quantization::None, ..resident };
        let config = RunConfig { model, ..self.config.clone() };
        let place = (META, Ranks::default());
        let loaded = assemble(&config, &self.manifest, checkpoint.as_deref(), self.runtime, place)?;
        loaded.warnings.iter().for_each(|warning| self.runtime.warn(warning.as_str()));
        Ok(())
    }

    /// Builds or loads the model, opens the vision feature cache and reads the texts of all rows.
    ///
    /// # Errors
    /// As [`Self::checkpoint`], [`setup::create`] and [`setup::open`]; [`Error::Data`] for a row that cannot be used.
    pub fn prepare(self) -> Result<PreparedTraining<'r>> {
        let (checkpoint, warnings) = self.checkpoint()?.unzip();
        let Self { config, toml, manifest, mut marks, folder, runtime, ranks, .. } = self;
        warnings.into_iter().flatten().for_each(|warning| runtime.warn(warning));
        let mut loaded = assemble(&config, &manifest, checkpoint.as_deref(), runtime, (runtime.device(), ranks))?;
        loaded.description.pixels.labels = config.data.labels;
        loaded.description.fold = config.data.own_fold();
        loaded.warnings.iter().for_each(|warning| runtime.warn(warning.as_str()));
        let features =
            vision_features::open_cache(&loaded, &config.data, runtime.cache(), runtime.observer().as_ref())?;
        let (train, data) = (config.train.clone(), config.data.clone());
        let mut task = SegmentTask::new(loaded, &manifest, train, data, toml.clone(), features)?;
        // the first process writes the checkpoints
        if ranks.is_main() {
            let used = manifest.rows.iter().filter(|row| row.split != Split::Test);
            marks.add(used.map(|row| row.image_path.as_path()), runtime.observer().as_ref());
            task.mark_images(&marks)?;
        }
        if let (real, synthetic @ 1..) = task.rows_of_an_epoch() {
            runtime.note(format!("an epoch has {real} real rows and {synthetic} synthetic ones"));
        }
        if task.longest().text_tokens >= config.model.max_text_tokens {
            runtime.warn("some answers are cut: their texts have more ids than `model.max_text_tokens`");
        }
        if checkpoint.is_none() && config.model.init.is_empty() {
            guard::guard(|| task.calibrate())?;
        }
        Ok(PreparedTraining { task, config, toml, folder, runtime, resumes: checkpoint.is_some(), ranks })
    }

    /// Trains to the end.
    ///
    /// # Errors
    /// As [`Self::prepare`] and [`trainer::run()`].
    pub fn run(self) -> Result<Run> {
        let observer = Arc::clone(self.runtime.observer());
        self.prepare()?.run(observer.as_ref())
    }
}

/// A training run whose model is loaded.
pub struct PreparedTraining<'r> {
    /// Model, rows and settings as a task of the engine.
    pub task: SegmentTask,
    config: RunConfig,
    toml: String,
    folder: PathBuf,
    runtime: &'r Runtime,
    resumes: bool,
    ranks: Ranks<'r>,
}

impl PreparedTraining<'_> {
    /// Trains to the end; `observer` receives the events of the training.
    ///
    /// # Errors
    /// As [`trainer::run()`].
    pub fn run(self, observer: &dyn Observer) -> Result<Run> {
        let outcome = trainer::run(&self.task, &self.session(observer)?)?;
        Ok(Run { outcome, folder: self.folder, task: self.task })
    }

    /// What the engine needs besides the task, without a memory profile and room for CUDA graphs. Creates the run folder.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that several processes cannot share; [`Error::Io`].
    pub fn session<'a>(&'a self, observer: &'a dyn Observer) -> Result<Session<'a>> {
        let Self { config, folder, ranks, .. } = self;
        if ranks.size() > 1 && config.model.batch_norm == BatchNorm::Batch {
            let reason = "running statistics of several processes would differ";
            return Err(Error::config("model.batch_norm", reason, "add the setting `model.batch_norm=frozen`"));
        }
        files::create_folders(folder).map_err(Error::io(folder, "create"))?;
        Ok(Session {
            config: &config.train,
            folder,
            settings: &self.toml,
            resume: self.resumes,
            profile: None,
            observer,
            interrupt: self.runtime.interrupt(),
            has_room_for_graphs: false,
            ranks: *ranks,
        })
    }
}

/// A finished training run.
pub struct Run {
    /// Steps, time and best score.
    pub outcome: TrainingOutcome,
    /// The run folder with `last/` and `best/`.
    pub folder: PathBuf,
    /// The task with the weights after the last step.
    pub task: SegmentTask,
}

/// Warns of classes that a split has no images of, and of 16-bit images that become almost black.
fn report_data(manifest: &Manifest, runtime: &Runtime) {
    for (split, use_) in [(Split::Val, "validation"), (Split::Test, "test")] {
        let classes = manifest.classes_without(split);
        if !classes.is_empty() {
            runtime.warn(format!("these classes have no {use_} images: `{}`", classes.join("`, `")));
        }
    }
    let depth = bit_depth::survey(manifest.rows.iter().map(|row| row.image_path.as_path()));
    depth.warning().into_iter().chain(manifest.spellings.warning()).for_each(|warning| runtime.warn(warning));
}

/// A new model for the rows of `manifest`, or the model of a checkpoint.
fn assemble(
    config: &RunConfig,
    manifest: &Manifest,
    checkpoint: Option<&Path>,
    runtime: &Runtime,
    (device, ranks): (Device, Ranks),
) -> Result<LoadedModel> {
    let peers = if config.model.divide_layers { ranks.peers(device)? } else { None };
    let build = Build {
        device,
        kind: config.train.precision.kind(),
        seed: config.train.seed,
        locate: &|spec| runtime.locate(spec),
        allow_partial: false,
        cache: runtime.cache(),
        peers: peers.as_ref(),
    };
    let Some(folder) = checkpoint else {
        if !config.model.init.is_empty() {
            let run = runtime.locate(&config.model.init)?;
            let (loaded, note) = init::create(&run, &config.model, config.lora, &manifest.modalities, build)?;
            runtime.note(note);
            return Ok(loaded);
        }
        // synthetic rows are left out, so that runs with and without them start from the same model
        let real = manifest.rows.iter().filter(|row| !row.synthetic);
        let texts: Vec<&str> = real.flat_map(|row| [row.question.as_str(), row.answer.as_str()]).collect();
        return setup::create(&config.model, config.lora, &manifest.modalities, &texts, build);
    };
    verify_folder(folder).map_err(suggest_best)?;
    // frozen layers are loaded again: a resumed run may quantize them in another way
    let overrides = RunOverrides {
        quantization: Some(config.model.quantization),
        stream_layers: Some(config.model.stream_layers),
        divide_layers: Some(config.model.divide_layers),
        stream_vision: Some(config.model.stream_vision),
        ..RunOverrides::default()
    };
    setup::refuse_other_weights(folder, build)?;
    let loaded = setup::open(folder, &overrides, build)?;
    if loaded.description.modalities != manifest.modalities {
        let reason =
            format!("its classes are {:?}, the data has {:?}", loaded.description.modalities, manifest.modalities);
        return Err(Error::weights(folder, reason, "resume with the data the run was started on"));
    }
    Ok(loaded)
}

/// Only `last/` can be resumed.
fn suggest_best(error: Error) -> Error {
    match error {
        Error::Weights { path, reason, .. } => {
            let hint = "put a copy of the run's `best/` in its place and resume from there, or copy it again";
            Error::weights(path, reason, hint)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Root;

    #[test]
    fn images_are_kept_for_validation_if_the_run_validates_and_a_part_is_set() {
        let root = Root::new();
        let names = ["a", "b", "c", "d"];
        let rows = names.map(|name| format!("ct/train_masks/{name}.png,Where?,Left.,train\n")).concat();
        root.csv("ct.csv", &format!("image_path,question,answer,split\n{rows}"));
        for name in &names {
            root.pair("ct", "train", name);
        }
        let runtime = Runtime::new();
        let kept = |validate_every_epochs: u64, val_frac: f64| {
            let mut config = RunConfig::default();
            config.train.validate_every_epochs = validate_every_epochs;
            config.data.val_frac = val_frac;
            let manifest = Manifest::open(root.path(), None).unwrap();
            let training = Training::new(config, manifest, "never", &runtime).unwrap();
            training.manifest().rows_of(Split::Val).len()
        };
        assert_eq!([kept(1, 0.25), kept(0, 0.25), kept(1, 0.0)], [1, 0, 0]);
    }
}
