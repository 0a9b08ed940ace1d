//! `prsmed predict --images`: many images, each with one or several questions.

use super::context::Context;
use super::report::Outcome;
use crate::data::volume;
use crate::front::image_list::{Job, jobs, root_of};
use crate::front::many::{JOURNAL, Made, Results, TABLE, Tally};
use crate::front::{Model, Reading};
use crate::job;
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Many images")]
pub(super) struct ManyArgs {
    /// Folder of images (PNG, JPEG, TIFF, DICOM images; with its subfolders), or a CSV file with the column `image` and,
    /// for questions of its own, `question`
    ///
    /// Each image is read once for all its questions. `--out` names the folder for masks and answers; the same command
    /// continues where it stopped. An image that cannot be read gets its error in the table, and the exit code is 1.
    #[arg(long, value_name = "DIR|CSV", visible_alias = "jobs", conflicts_with = "image", requires = "out")]
    images: Option<PathBuf>,
    /// Also write each image with its mask drawn over it
    #[arg(long, requires = "images")]
    overlays: bool,
    /// Stop instead of replacing files; results of the same model and settings in `--out` are continued
    #[arg(long)]
    pub(super) no_overwrite: bool,
}

/// What the other flags say.
pub(super) struct Settings<'a> {
    /// The folder of the results.
    pub(super) out: &'a Path,
    pub(super) reading: Reading,
    pub(super) max_new_tokens: usize,
    pub(super) always_paint: bool,
    /// SHA-256 of what identifies weights and flags of the model.
    pub(super) model: String,
}

impl ManyArgs {
    /// The questions about all images, before the model is loaded.
    pub(super) fn jobs(&self, questions: &[String], context: &Context) -> Result<Vec<Job>> {
        if questions.iter().any(|question| question.trim().is_empty()) {
            return Err(Error::config("--question", "the question is empty", "ask for example: Where is the lesion?"));
        }
        jobs(self.images(), questions, context.progress.as_ref())
    }

    fn images(&self) -> &Path {
        self.images.as_deref().unwrap_or(Path::new(""))
    }

    /// Answers the jobs and writes results into the folder `--out`.
    pub(super) fn run(
        &self,
        jobs: &[Job],
        settings: &Settings,
        context: &Context,
        open: impl FnOnce() -> Result<Model>,
    ) -> anyhow::Result<Outcome> {
        let work = || self.answer(jobs, settings, context, open);
        let tally = job::locked("out", settings.out, &context.runtime, work)?;
        report(tally, settings.out, context)
    }

    /// Answers the jobs, and writes each result as soon as it is known.
    fn answer(
        &self,
        jobs: &[Job],
        settings: &Settings,
        context: &Context,
        open: impl FnOnce() -> Result<Model>,
    ) -> Result<Tally> {
        let made = Made {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: settings.model.clone(),
            max_new_tokens: settings.max_new_tokens,
            always_paint: settings.always_paint,
            overlays: self.overlays,
            images: root_of(self.images()).canonicalize().unwrap_or_default().to_string_lossy().into_owned().into(),
            window: settings.reading.window().to_string(),
            geometry: settings.reading.geometry.map(|geometry| geometry.to_string()),
        };
        let mut results = Results::open(settings.out, made, self.no_overwrite, context.progress.as_ref())?;
        let model = open()?;
        let read = |path: &Path| settings.reading.image(path, context.progress.as_ref());
        let mut on_answer = |answered: &_| {
            let mut record = serde_json::to_value(answered).expect("plain values serialise");
            record["kind"] = json!("prediction");
            context.output.record(&record)
        };
        let watch = (context.progress.as_ref(), context.interrupt.as_ref());
        results.answer(&model, jobs, &read, watch, &mut on_answer)
    }
}

/// Prints the numbers of questions.
fn report(tally: Tally, folder: &Path, context: &Context) -> anyhow::Result<Outcome> {
    let Tally { answered, kept, failed, unfamiliar, unlike_images, differing, other_targets } = tally;
    let (journal, table) = (folder.join(JOURNAL), folder.join(TABLE));
    let before = if kept > 0 { format!(", {kept} answered before") } else { String::new() };
    let bad = if failed > 0 { format!(", {failed} failed (column `error`)") } else { String::new() };
    context.output.line(format!("questions answered: {answered}{before}{bad}: {}", table.display()))?;
    for (count, what, column) in [(unfamiliar, "questions", "question_known"), (unlike_images, "images", "image_known")]
    {
        if count > 0 {
            let unlike = format!("answers about {what} unlike those of the training: {count} (column `{column}` is 0)");
            context.output.line(format!("{unlike}; do not rely on these answers and masks"))?;
        }
    }
    for (count, what) in [
        (
            differing,
            "answers whose words and mask differ: {} (column `position_warning`); trust neither of them without a look \
             at the image",
        ),
        (other_targets, "answers about another target than that of the question: {} (column `other_target`)"),
    ] {
        if count > 0 {
            context.output.line(what.replace("{}", &count.to_string()))?;
        }
    }
    context.output.record(&json!({
        "kind": "result", "answered": answered, "kept": kept, "failed": failed, "unfamiliar": unfamiliar,
        "unlike_images": unlike_images, "differing": differing, "other_targets": other_targets,
        "table": table, "journal": journal,
    }))?;
    Ok(if failed == 0 { Outcome::Done } else { Outcome::No })
}

/// True if one of the images is a DICOM file, whose grey values need a window.
pub(super) fn has_dicom(jobs: &[Job]) -> Result<bool> {
    for job in jobs {
        if volume::is_volume(&job.image)? {
            return Ok(true);
        }
    }
    Ok(false)
}
