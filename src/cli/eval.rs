//! `prsmed eval`: scores trained models on a data root.

use super::args::{RootArgs, labels_of};
use super::context::Context;
use super::predict::ModelArgs;
use super::ranks::GpuArgs;
use super::report::Outcome;
use crate::data::labels::Labels;
use crate::data::manifest::{Manifest, Split};
use crate::event::Event;
use crate::job::lock::make_folder;
use crate::job::together::{check_data, main_only};
use crate::report::comparison::{Compared, Comparison};
use crate::report::evaluation::{self, Facts};
use crate::segment::evaluate::{self, Evaluation, Options};
use crate::segment::task::spread;
use crate::tensor::{self, memory};
use crate::trainer::Ranks;
use crate::{Error, Result, files};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// File that says what the results in a folder are of.
const SOURCE: &str = "source.json";

/// Score trained models on a data root: masks, positions, answers
///
/// Computes Dice and IoU at threshold 0.5 (per image, by modality, pooled), distances of borders (HD95, ASSD, surface
/// Dice), lesions found, the averages over thresholds as published, calibration, and scores of the positions and texts
/// in the generated answers, with 95 % intervals over patients. A mask whose presence score is below the run's
/// threshold is scored as empty, as `prsmed predict` paints it. Absent targets (column `present` 0) count for the share
/// of false masks, rows without a known mask for their answers only.
///
/// Prints a table and writes `report.html`, `summary.json`, `samples.csv`, `patients.csv`, `overlays.png` (worst and
/// best samples) and `overlays.csv`, which describes them. Several runs are scored one after the other and compared
/// with the first one, question by question.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed eval runs/a --data-root data --split test
  prsmed eval runs/a --data-root data --gpus 4
  prsmed eval runs/a runs/b --data-root data --out compared")]
pub(super) struct Args {
    /// Run folders (their `best/`, else `last/`), checkpoint folders, published PRS-Med folders, or
    /// `hub:owner/name[/FOLDER]`. With several, the first is the baseline
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    data: RootArgs,
    /// Split to score: train, val or test
    #[arg(long, default_value = "test")]
    split: String,
    /// Labels of masks that are foreground, as `--labels` of `prsmed train` [default: those of the run]
    #[arg(long, value_name = "LIST")]
    labels: Option<String>,
    /// Tolerance of the surface Dice in mm; in pixels if the data have no pixel spacing
    #[arg(long, value_name = "MM", default_value_t = 2.0)]
    tolerance_mm: f64,
    /// Score only N rows, spread evenly over the split; 0 = all
    #[arg(long, value_name = "N", default_value_t = 0)]
    limit: usize,
    /// Maximum length of an answer in tokens
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// Folder for the report [default: `eval-SPLIT` in the run folder; for a run on the hub `NAME-eval-SPLIT`; for
    /// several runs `eval-SPLIT-compared` in the current folder; if it has results of another data root, `-DATA` is
    /// added]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    gpus: GpuArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<Outcome> {
    args.gpus.run(false, context, |ranks| score(args, ranks, context))
}

fn score(args: &Args, ranks: Ranks, context: &Context) -> anyhow::Result<Outcome> {
    let split = Split::parse(&args.split).ok_or_else(|| {
        Error::config("--split", format!("there is no split `{}`", args.split), "use train, val or test")
    })?;
    if !(args.tolerance_mm.is_finite() && args.tolerance_mm >= 0.0) {
        let reason = format!("{} is no distance", args.tolerance_mm);
        return Err(Error::config("--tolerance-mm", reason, "use 0 or more, for example 2").into());
    }
    let manifest = args.data.open(context)?;
    check_data(ranks, &manifest)?;
    let rows = spread(manifest.rows_of(split), args.limit);
    if rows.is_empty() {
        return Err(no_rows(&manifest, split).into());
    }
    let labels = args.labels.as_deref().map(labels_of).transpose()?;
    let job = Job { args, context, ranks, manifest: &manifest, rows: &rows, split, labels };
    match &args.runs[..] {
        [run] => job.single(run)?,
        runs => job.compare(runs)?,
    }
    Ok(Outcome::Done)
}

/// What all runs have in common.
struct Job<'a> {
    args: &'a Args,
    context: &'a Context,
    ranks: Ranks<'a>,
    manifest: &'a Manifest,
    rows: &'a [usize],
    split: Split,
    labels: Option<Labels>,
}

impl Job<'_> {
    fn single(&self, run: &Path) -> anyhow::Result<()> {
        let runs = if run.is_dir() { &[] } else { std::slice::from_ref(&run) };
        let place = Place::new(self, report_folder(run, self.split), runs);
        let out = &place.folder;
        let Some(evaluation) = self.score(run, || {
            if self.args.out.is_none() && run.is_dir() {
                // the user did not name this folder, so it must not lead out of the run folder
                files::create_below(run, out).map_err(Error::io(out, "create"))?;
            }
            place.make(self.context)?;
            Ok((out.clone(), name_of(run)))
        })?
        else {
            return Ok(());
        };
        self.context.output.line(&evaluation.summary)?;
        self.context.output.line(format!("report in {}", out.display()))?;
        self.context.output.record(&json!({
            "kind": "result",
            "split": self.split.name(),
            "rows": self.rows.len(),
            "report": out,
            "summary": evaluation.summary,
        }))?;
        Ok(())
    }

    /// Scores several runs and compares them with the first.
    fn compare(&self, runs: &[PathBuf]) -> anyhow::Result<()> {
        let default = PathBuf::from(format!("eval-{}-compared", self.split.name()));
        let paths: Vec<&Path> = runs.iter().map(PathBuf::as_path).collect();
        let place = Place::new(self, default, &paths);
        let out = &place.folder;
        self.ranks.agree(if self.ranks.is_main() { place.make(self.context) } else { Ok(()) })?;
        let mut compared: Vec<Compared> = Vec::new();
        let mut records: Vec<Value> = Vec::new();
        for (run, name) in runs.iter().zip(unique_names(runs)) {
            let folder = out.join(&name);
            self.context.progress.on(&Event::Note(format!("scoring {name}")));
            let Some(evaluation) = self.score(run, || {
                make_folder("--out", &folder)?;
                Ok((folder.clone(), name.clone()))
            })?
            else {
                continue;
            };
            records.push(json!({ "name": name, "run": run, "report": folder, "summary": evaluation.summary }));
            compared.push(Compared { name, summary: evaluation.summary, items: evaluation.items });
        }
        if !self.ranks.is_main() {
            return Ok(());
        }
        let comparison = Comparison::new(compared)?;
        comparison.write(out, &self.subtitle())?;
        self.context.output.line(&comparison)?;
        self.context.output.line(format!("report in {}", out.display()))?;
        self.context.output.record(&json!({
            "kind": "result",
            "split": self.split.name(),
            "rows": self.rows.len(),
            "report": out,
            "runs": records,
            "differences": comparison.differences,
        }))?;
        Ok(())
    }

    /// Loads a run, scores it and writes its files into the folder that `prepare` makes, which gives it and the name of
    /// the run. Only the first process writes files and gets the evaluation.
    fn score(&self, run: &Path, prepare: impl FnOnce() -> Result<(PathBuf, String)>) -> Result<Option<Evaluation>> {
        let mut assembly = self.args.model.open(run, self.context)?;
        if let Some(labels) = self.labels {
            assembly.description.pixels.labels = labels;
        }
        let place = self.ranks.agree_on(main_only(self.ranks, prepare))?;
        let started = Instant::now();
        let options = Options { max_new_tokens: self.args.max_new_tokens, tolerance: self.args.tolerance_mm };
        let reports = (self.context.progress.as_ref(), &*self.context.interrupt);
        let evaluation = evaluate::evaluate(self.ranks, &assembly, self.manifest, self.rows, options, reports)?;
        let (Some(evaluation), Some((folder, name))) = (evaluation, place) else { return Ok(None) };
        evaluation.write(&folder)?;
        let mut facts = self.facts(run, started.elapsed().as_secs_f64());
        facts.extend(evaluation::model_facts(&assembly.description));
        evaluation::write(&folder, (&name, &self.subtitle()), &evaluation, &facts)?;
        Ok(Some(evaluation))
    }

    /// What was scored, in one line.
    fn subtitle(&self) -> String {
        format!("split {}, {} questions of {}", self.split.name(), self.rows.len(), self.manifest.root.display())
    }

    /// Versions, time and memory of one run's evaluation.
    fn facts(&self, run: &Path, seconds: f64) -> Facts {
        let per_question = seconds / self.rows.len() as f64;
        let device = tensor::default_device();
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
    fn new(job: &Job, default: PathBuf, runs: &[&Path]) -> Self {
        if let Some(folder) = job.args.out.clone() {
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

    fn make(&self, context: &Context) -> Result<()> {
        make_folder("--out", &self.folder)?;
        if let Some(taken) = &self.taken {
            let (taken, folder) = (taken.display(), self.folder.display());
            let note = format!("`{taken}` has results of other data or runs; these results go to `{folder}`");
            context.progress.on(&Event::Note(note));
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
    match parts.last() {
        Some(parent) if last == "best" || last == "last" => format!("{parent}-{last}"),
        _ => last.to_owned(),
    }
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

/// `eval-SPLIT` in a local run folder; for a run on the hub a folder named after it.
fn report_folder(run: &Path, split: Split) -> PathBuf {
    let name = run.to_string_lossy();
    match name.strip_prefix("hub:").map(|rest| rest.split('@').next().unwrap_or_default()) {
        Some(repo) => format!("{}-eval-{}", repo.rsplit('/').next().unwrap_or_default(), split.name()).into(),
        None => run.join(format!("eval-{}", split.name())),
    }
}

fn no_rows(manifest: &Manifest, split: Split) -> Error {
    let counts: Vec<String> = [Split::Train, Split::Val, Split::Test]
        .into_iter()
        .map(|split| format!("{} {}", manifest.rows_of(split).len(), split.name()))
        .collect();
    let reason = format!("there are no `{}` rows (found {})", split.name(), counts.join(", "));
    Error::data(&manifest.root, reason, "choose another `--split`")
}

#[cfg(test)]
mod tests {
    use super::*;

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
