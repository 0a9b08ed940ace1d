//! Scores of one run, or of several beside the first, with their reports.

use super::lock::make_folder;
use super::together::main_only;
use crate::data::identity::{Seen, SeenImages};
use crate::data::labels::Labels;
use crate::data::manifest::{Manifest, Split};
use crate::data::marks::Marks;
use crate::data::split::{self, spread};
use crate::front::evaluate::{self, Evaluation, EvaluationOptions};
use crate::front::{Model, OpenOptions};
use crate::metrics::estimates::{self, QuestionScores};
use crate::metrics::table::TrainedOn;
use crate::report::comparison::{Compared, RunComparison};
use crate::report::evaluation::{self, Facts};
use crate::runtime::Runtime;
use crate::segment::setup::Description;
use crate::segment::weight_files;
use crate::tensor::weights::CHECKSUMS;
use crate::tensor::{self, memory};
use crate::trainer::Ranks;
use crate::{Error, Result, files};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// File that says what the results in a folder are of.
const SOURCE: &str = "source.json";

/// Most images of a data root that are compared with those of a training to say that it knows none of them.
const MOST_COMPARED: usize = 256;

/// What all scored runs have in common.
pub struct RunScoring<'a> {
    /// The data root.
    pub manifest: &'a Manifest,
    /// Numbers of the scored rows.
    pub rows: &'a [usize],
    /// Their split.
    pub split: Split,
    /// Most rows of a split; 0 = all.
    pub limit: usize,
    /// Labels of masks that are foreground, if other than those of the run.
    pub labels: Option<Labels>,
    /// Length of answers, and the tolerance of surfaces.
    pub options: EvaluationOptions,
    /// Folder of the report; by default one in the run folder.
    pub out: Option<PathBuf>,
    /// How the models are opened, and the further runs beside each scored one.
    pub model: OpenOptions,
    /// The processes that divide the questions.
    pub ranks: Ranks<'a>,
    /// Device, hub, observer and interrupt flag.
    pub runtime: &'a Runtime,
    /// Of images of the rows.
    pub marks: Mutex<Marks>,
}

impl RunScoring<'_> {
    /// Scores a run. Gives the folder of the report and the scores; `None` for a process that writes no files.
    ///
    /// # Errors
    /// [`Error::Weights`] or [`Error::Hub`] for a run that cannot be opened; errors of the data; [`Error::Io`].
    pub fn single(&self, run: &Path) -> Result<Option<(PathBuf, Evaluation)>> {
        let mut runs: Vec<&Path> = if run.is_dir() { Vec::new() } else { vec![run] };
        runs.extend(self.model.ensemble.iter().map(PathBuf::as_path));
        let mut default = report_folder(run, self.split);
        if !self.model.ensemble.is_empty() {
            default.as_mut_os_string().push("-ensemble");
        }
        let place = Place::new(self, default, &runs);
        let out = &place.folder;
        let evaluation = self.score(run, || {
            if self.out.is_none() && run.is_dir() {
                // the user did not name this folder, so it must not lead out of the run folder
                files::create_below(run, out).map_err(Error::io(out, "create"))?;
            }
            place.make(self.runtime)?;
            Ok((out.clone(), name_of(run)))
        })?;
        Ok(evaluation.map(|evaluation| (out.clone(), evaluation)))
    }

    /// Scores several runs and compares them with the first. Gives the folder of the report, the comparison and a record
    /// of each run.
    ///
    /// # Errors
    /// As [`Self::single`].
    pub fn compare(&self, runs: &[PathBuf]) -> Result<Option<(PathBuf, RunComparison, Vec<Value>)>> {
        let mut compared = Vec::new();
        let begin = |name: &str| self.runtime.note(format!("scoring {name}"));
        let default = format!("eval-{}-compared", self.split.name());
        let (out, records) = self.score_each(runs, default, begin, |name, Evaluation { summary, items, .. }| {
            compared.push(Compared { name, summary, items });
        })?;
        if !self.ranks.is_main() {
            return Ok(None);
        }
        let comparison = RunComparison::new(compared)?;
        comparison.write(&out, &self.subtitle(self.rows.len()))?;
        Ok(Some((out, comparison, records)))
    }

    /// Scores several runs, each with a report in a folder of its own. `begin` gets the name of each run, and `end` gets
    /// its scores. Gives the folder of all reports and a record of each run.
    fn score_each(
        &self,
        runs: &[PathBuf],
        default: String,
        begin: impl Fn(&str),
        mut end: impl FnMut(String, Evaluation),
    ) -> Result<(PathBuf, Vec<Value>)> {
        let paths: Vec<&Path> = runs.iter().map(PathBuf::as_path).collect();
        let place = Place::new(self, default.into(), &paths);
        if self.out.is_none() {
            self.runtime.note(format!("the report goes to `{}` in the current folder", place.folder.display()));
        }
        self.ranks.agree(if self.ranks.is_main() { place.make(self.runtime) } else { Ok(()) })?;
        let mut records = Vec::new();
        for (run, name) in runs.iter().zip(unique_names(runs)) {
            begin(&name);
            let folder = place.folder.join(&name);
            let scored = self.score(run, || {
                make_folder("out", &folder)?;
                Ok((folder.clone(), name.clone()))
            })?;
            let Some(evaluation) = scored else { continue };
            records.push(json!({ "name": name, "run": run, "report": folder, "summary": evaluation.summary }));
            end(name, evaluation);
        }
        Ok((place.folder, records))
    }

    /// Loads a run, scores it and writes its files into the folder that `prepare` makes, which gives it and the name of
    /// the run. Only the first process writes files and gets the evaluation.
    fn score(&self, run: &Path, prepare: impl FnOnce() -> Result<(PathBuf, String)>) -> Result<Option<Evaluation>> {
        let mut model = Model::open(run, &self.model, self.runtime)?;
        let folded = self.own_fold(model.description())?;
        let (manifest, rows) = folded.as_ref().map_or((self.manifest, self.rows), |(all, rows)| (all, rows));
        if let Some(labels) = self.labels {
            model.loaded.description.pixels.labels = labels;
        }
        let place = self.ranks.agree_on(main_only(self.ranks, prepare))?;
        let seen = main_only(self.ranks, || {
            self.note_unlike(&model, manifest, rows);
            self.note_unscored(&model.loaded.seen, manifest, rows.len());
            Ok(self.trained_on(&model, manifest, rows))
        });
        let trained_on = self.ranks.agree_on(seen)?;
        let started = Instant::now();
        let reports = (self.runtime.observer().as_ref(), &**self.runtime.interrupt());
        let evaluation = evaluate::evaluate(self.ranks, &model, manifest, rows, self.options, reports)?;
        let (Some(mut evaluation), Some((folder, name))) = (evaluation, place) else { return Ok(None) };
        evaluation.summary.protocol.trained_on = trained_on.unwrap_or_default();
        evaluation.write(&folder)?;
        let subtitle = self.subtitle(rows.len());
        let mut facts = self.facts(run, started.elapsed().as_secs_f64() / rows.len() as f64, rows.len());
        facts.extend(evaluation::model_facts(model.description()));
        evaluation::write(&folder, (&name, &subtitle), &evaluation, &facts)?;
        Ok(Some(evaluation))
    }

    /// Says so if many images look unlike those of the training.
    fn note_unlike(&self, model: &Model, manifest: &Manifest, rows: &[usize]) {
        let Some(images) = &model.loaded.known_images else { return };
        let (unlike, compared) = images.count_unlike(manifest, rows);
        if unlike * 5 > compared {
            self.runtime.note(format!(
                "{unlike} of {compared} images look unlike those of the training, by their brightness, colours, edges or \
                 texture: was the model trained for such images?"
            ));
        }
    }

    /// Whether a training saw the image of each of some rows.
    fn seen(&self, by: &SeenImages, manifest: &Manifest, rows: &[usize]) -> Vec<Seen> {
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let images = rows.iter().map(|row| manifest.rows[*row].image_path.as_path());
        marks.add(images, self.runtime.observer().as_ref());
        by.seen(manifest, rows, &marks)
    }

    /// Says so if most rows of a data root whose images the training did not know are not scored.
    fn note_unscored(&self, trained: &SeenImages, manifest: &Manifest, num_scored: usize) {
        let all = manifest.rows.len();
        if trained.unknown.is_some() || 2 * num_scored >= all || self.limit > 0 {
            return;
        }
        let compared = spread((0..all).collect(), MOST_COMPARED);
        if self.seen(trained, manifest, &compared).iter().all(|seen| *seen == Seen::No) {
            let compared = if compared.len() == all { "the" } else { "256 compared rows of the" };
            self.runtime.note(format!(
                "the run was trained on none of {compared} {all} rows of this data root, and only its {num_scored} `{}` rows \
                 are scored: `prsmed data prepare --test-frac 1 --val-frac 0` makes all of them `test`",
                self.split.name()
            ));
        }
    }

    /// How many of the scored rows are about images and patients that the run, one of its ensemble, or a run that they
    /// started from was trained on. Says so if others are about images that chose its checkpoint.
    fn trained_on(&self, model: &Model, manifest: &Manifest, rows: &[usize]) -> TrainedOn {
        let runs: Vec<&SeenImages> = model.runs().map(|run| run.seen.as_ref()).collect();
        let mut all = vec![Seen::No; rows.len()];
        for run in &runs {
            let seen = self.seen(run, manifest, rows);
            all = all.into_iter().zip(seen).map(|(one, other)| one.max(other)).collect();
        }
        let count = |kind: Seen| all.iter().filter(|seen| **seen == kind).count() as u64;
        if count(Seen::Val) > 0 && self.split != Split::Val {
            self.runtime.note(format!(
                "{} of these questions are about validation images of the run, by which its checkpoint was chosen",
                count(Seen::Val)
            ));
        }
        let has_patients = rows.iter().any(|row| manifest.rows[*row].patient.is_some());
        let patients = count(Seen::Patient);
        // what one run of an ensemble knows is said, also if another knows nothing
        let is_known = patients > 0 || has_patients && runs.iter().all(|run| run.knows_patients());
        TrainedOn {
            images: count(Seen::Train),
            patients: is_known.then_some(patients),
            unknown: runs.iter().find_map(|run| run.unknown.clone()),
        }
    }

    /// Of a run of cross-validation the rows of its own fold: those of the data root are partly in its training.
    fn own_fold(&self, description: &Description) -> Result<Option<(Manifest, Vec<usize>)>> {
        let Some(fold) = description.fold.filter(|_| self.split != Split::Test) else { return Ok(None) };
        if !self.model.ensemble.is_empty() {
            let reason =
                format!("the other runs may have been trained on the `{}` images of this fold", self.split.name());
            let hint = "use the argument `split=test`, or leave the argument `ensemble` out";
            return Err(Error::argument("ensemble", reason, hint));
        }
        let mut manifest = self.manifest.clone();
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        split::validate_on_fold(&mut manifest, fold, (&mut marks, self.runtime.observer().as_ref()))?;
        let rows = spread(manifest.rows_of(self.split), self.limit);
        let (number, last, split) = (fold.number, fold.of - 1, self.split.name());
        self.runtime.note(format!("the run is of fold {number} of 0 to {last}: its {split} rows"));
        Ok(Some((manifest, rows)))
    }

    /// Scores the validation rows of each run of a cross-validation, and all of them together. Gives the folder of the
    /// reports, a table and a record of each run.
    ///
    /// # Errors
    /// [`Error::Config`] for runs that are not different folds of one division; as [`Self::single`].
    pub fn cross_validate(&self, runs: &[PathBuf]) -> Result<Option<(PathBuf, String, Vec<Value>)>> {
        let mut folds = BTreeSet::new();
        for run in runs {
            let fold = weight_files::described(run, self.runtime)?.and_then(|description| description.fold);
            let is_new = fold.is_some_and(|fold| folds.insert((fold.of, fold.number)));
            if !is_new || folds.iter().any(|(of, _)| Some(*of) != fold.map(|fold| fold.of)) {
                let reason = "the runs are not different folds of one cross-validation";
                let hint = "train them with the argument `fold=0/5`, the argument `fold=1/5`, ...";
                return Err(Error::config(run.to_string_lossy(), reason, hint));
            }
        }
        let (mut items, mut length) = (Vec::new(), String::new());
        let (out, records) = self.score_each(
            runs,
            "eval-folds".to_owned(),
            |_| {},
            |name, evaluation| {
                for note in evaluation.summary.protocol.trained_on.notes() {
                    self.runtime.warn(format!("{name}: {note}"));
                }
                length = evaluation.summary.protocol.length;
                items.extend(evaluation.items);
            },
        )?;
        let all: Vec<&QuestionScores> = items.iter().collect();
        let title =
            format!("{} questions of {} of {} folds", items.len(), folds.len(), folds.first().map_or(0, |(of, _)| *of));
        let table = format!("{title}\n{}", estimates::table(&estimates::estimates(&all), &length));
        Ok(self.ranks.is_main().then_some((out, table, records)))
    }

    /// What was scored, in one line.
    fn subtitle(&self, count: usize) -> String {
        format!("split {}, {count} questions of {}", self.split.name(), self.manifest.root.display())
    }

    /// Versions, time and memory of one run's evaluation of `count` questions.
    fn facts(&self, run: &Path, per_question: f64, count: usize) -> Facts {
        let seconds = per_question * count as f64;
        let device = self.runtime.device();
        vec![
            ("run".into(), run.display().to_string()),
            ("data root".into(), self.manifest.root.display().to_string()),
            ("split".into(), self.split.name().into()),
            ("prsmed".into(), env!("CARGO_PKG_VERSION").into()),
            ("libtorch".into(), tensor::libtorch_version()),
            ("device".into(), format!("{device:?}")),
            ("time".into(), format!("{seconds:.1} s, {per_question:.2} s a question")),
            ("peak memory of tensors".into(), memory::overall_peak(device).to_string()),
        ]
    }
}

/// The folder of a report.
struct Place {
    folder: PathBuf,
    /// What the results are of; `None` for a folder that the user has named.
    source: Option<String>,
    /// A folder with results of another source.
    taken: Option<PathBuf>,
}

impl Place {
    /// The folder that the user has named, else `default`, or one with a longer name if that has results of another
    /// data root or of other runs.
    fn new(job: &RunScoring, default: PathBuf, runs: &[&Path]) -> Self {
        if let Some(folder) = job.out.clone() {
            return Self { folder, source: None, taken: None };
        }
        let full = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let root = full(&job.manifest.root);
        let runs: Vec<PathBuf> = runs.iter().map(|run| full(run)).collect();
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        let known: Vec<String> = runs.iter().map(text).collect();
        let source = json!({ "data_root": text(&root), "runs": known }).to_string();
        let folder = own_folder(&default, &source, &root.file_name().unwrap_or_default().to_string_lossy());
        Self { taken: (folder != default).then_some(default), folder, source: Some(source) }
    }

    fn make(&self, runtime: &Runtime) -> Result<()> {
        make_folder("out", &self.folder)?;
        if let Some(taken) = &self.taken {
            let (taken, folder) = (taken.display(), self.folder.display());
            runtime.note(format!("`{taken}` has results of other data or runs; these results go to `{folder}`"));
        }
        let Some(source) = &self.source else { return Ok(()) };
        let path = self.folder.join(SOURCE);
        files::write(&path, source.as_bytes()).map_err(Error::io(&path, "write"))
    }
}

/// The first of `default`, `default-NAME`, `default-NAME-2`, ... that is empty or has results of this source.
fn own_folder(default: &Path, source: &str, name: &str) -> PathBuf {
    let longer = |end: String| {
        let base = default.file_name().unwrap_or_default().to_string_lossy();
        default.with_file_name(format!("{base}-{name}{end}"))
    };
    let is_free = |folder: &PathBuf| {
        let is_empty = || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
        let is_same =
            || files::read(&folder.join(SOURCE), files::MAX_TEXT).is_ok_and(|found| found == source.as_bytes());
        // a link is refused later, with its name
        folder.is_symlink() || !folder.exists() || is_empty() || is_same()
    };
    let others = (2..).map(|number| longer(format!("-{number}")));
    let mut names = [default.to_owned(), longer(String::new())].into_iter().chain(others);
    names.find(is_free).unwrap_or_default()
}

/// The last part of a run's path; `a-best` for a checkpoint folder `a/best`.
fn name_of(run: &Path) -> String {
    let text = run.to_string_lossy();
    let path = text.strip_prefix("hub:").unwrap_or(&text);
    let path = path.split('@').next().unwrap_or_default();
    let mut parts: Vec<&str> =
        path.split('/').filter(|part| !part.is_empty() && *part != "." && *part != "..").collect();
    let last = parts.pop().unwrap_or("run");
    let parent = parts.last().filter(|_| last == "best" || last == "last");
    parent.map_or_else(|| last.to_owned(), |parent| format!("{parent}-{last}"))
}

/// Names of runs; a name that repeats gets a number.
fn unique_names(runs: &[PathBuf]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for run in runs {
        let name = name_of(run);
        let free = (2..).map(|number| format!("{name}-{number}"));
        let name = [name.clone()].into_iter().chain(free).find(|name| !names.contains(name)).unwrap_or_default();
        names.push(name);
    }
    names
}

/// `eval-SPLIT` in a local run folder; for its checkpoints `last` and `best` beside them, because a save replaces these as a
/// whole; for a run on the hub a folder named after it.
fn report_folder(run: &Path, split: Split) -> PathBuf {
    let name = run.to_string_lossy();
    if let Some(repo) = name.strip_prefix("hub:").and_then(|rest| rest.split('@').next()) {
        return format!("{}-eval-{}", repo.rsplit('/').next().unwrap_or_default(), split.name()).into();
    }
    let name = format!("eval-{}", split.name());
    let run_of = run.parent().filter(|_| run.join(CHECKSUMS).is_file());
    match (run_of, run.file_name().and_then(OsStr::to_str)) {
        (Some(folder), Some(checkpoint @ ("last" | "best"))) => folder.join(format!("{name}-{checkpoint}")),
        _ => run.join(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_a_checkpoint_are_beside_it() {
        let run = tempfile::tempdir().unwrap();
        let folder = |name: &str| report_folder(&run.path().join(name), Split::Val);
        std::fs::create_dir(run.path().join("last")).unwrap();
        assert_eq!(folder("last"), run.path().join("last/eval-val"), "no checkpoint");
        std::fs::write(run.path().join("last").join(CHECKSUMS), "{}").unwrap();
        assert_eq!(folder("last"), run.path().join("eval-val-last"));
        std::fs::rename(run.path().join("last"), run.path().join("merged")).unwrap();
        assert_eq!(folder("merged"), run.path().join("merged/eval-val"));
        assert_eq!(report_folder("hub:a/b@c".as_ref(), Split::Test), PathBuf::from("b-eval-test"));
    }

    #[test]
    fn results_of_another_data_root_have_a_folder_of_their_own() {
        let run = tempfile::tempdir().unwrap();
        let default = run.path().join("eval-test");
        let folder = |source: &str| {
            let folder = own_folder(&default, source, "data");
            let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(folder.join(SOURCE), source));
            written.unwrap();
            folder.file_name().unwrap().to_string_lossy().into_owned()
        };
        for (source, name) in [
            ("a/data", "eval-test"),
            ("b/data", "eval-test-data"),
            ("a/data", "eval-test"),
            ("c/data", "eval-test-data-2"),
            ("b/data", "eval-test-data"),
        ] {
            assert_eq!(folder(source), name, "{source}");
        }
        // results without a source are somebody's, and an empty folder is nobody's
        let other = run.path().join("eval-val");
        std::fs::create_dir(&other).unwrap();
        assert_eq!(own_folder(&other, "a", "x"), other);
        std::fs::write(other.join("summary.json"), "{}").unwrap();
        assert_eq!(own_folder(&other, "a", "x"), run.path().join("eval-val-x"));
    }

    #[test]
    fn runs_of_one_name_get_different_folders() {
        let runs = ["runs/a", "other/a/", "runs/b/best", "hub:owner/PRS-Med@v1", "runs/a-2"].map(PathBuf::from);
        assert_eq!(unique_names(&runs), ["a", "a-2", "b-best", "PRS-Med", "a-2-2"]);
    }
}
