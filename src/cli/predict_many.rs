//! `prsmed predict --images`: many images, each with one or several questions.

use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::data::volume::{self, Sequence};
use crate::front::image_files::ImageFiles;
use crate::front::image_list::{ImageQuestion, jobs};
use crate::front::many::{JOURNAL, Made, ResultsFolder, TABLE, Tally};
use crate::front::{ImageReading, Model};
use crate::job;
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Many images")]
pub(super) struct ManyArgs {
    /// Folder of images (flat ones or DICOM; with its subfolders), or a CSV file with the column `image` and,
    /// for questions of its own, `question`; for a run of several sequences the columns `image.NAME`
    ///
    /// Each image is read once for all its questions. `--out` names the folder for masks and answers; the same command
    /// continues where it stopped. An image that cannot be read gets its error in the table, and the exit code is 1.
    #[arg(long, value_name = "DIR|CSV", visible_alias = "jobs", conflicts_with = "image", requires = "out")]
    images: Option<PathBuf>,
    /// Also write each image with its mask drawn over it
    #[arg(long, requires = "images")]
    pub(super) overlays: bool,
    /// Stop instead of replacing files; results of the same model and settings in `--out` are continued
    #[arg(long)]
    pub(super) no_overwrite: bool,
}

impl ManyArgs {
    /// The questions about all images, before the model is loaded.
    pub(super) fn jobs(
        &self,
        questions: &[String],
        sequences: &[Sequence],
        context: &Context,
    ) -> Result<Vec<ImageQuestion>> {
        if questions.iter().any(|question| question.trim().is_empty()) {
            return Err(Error::config("--question", "the question is empty", "ask for example: Where is the lesion?"));
        }
        jobs(self.images(), questions, sequences, context.progress.as_ref())
    }

    /// The folder or the table of the images.
    pub(super) fn images(&self) -> &Path {
        self.images.as_deref().unwrap_or(Path::new(""))
    }

    /// Answers the jobs, and writes each result into the folder `out` as soon as it is known.
    pub(super) fn run(
        &self,
        jobs: &[ImageQuestion],
        made: Made,
        (out, reading): (&Path, &ImageReading),
        context: &Context,
        open: impl FnOnce() -> Result<Model>,
    ) -> CommandResult {
        let observer = context.progress.as_ref();
        let tally = job::locked("out", out, &context.runtime, || {
            let mut results = ResultsFolder::open(out, made, self.no_overwrite, observer)?;
            let model = open()?;
            let mut on_answer = |answered: &_| {
                let mut record = serde_json::to_value(answered).expect("plain values serialise");
                record["kind"] = json!("prediction");
                context.output.record(&record)
            };
            let read = |files: &ImageFiles| reading.image_of(files, observer);
            results.answer(&model, jobs, &read, (observer, context.runtime.interrupt().as_ref()), &mut on_answer)
        })?;
        report(tally, out, context)
    }
}

/// Prints the numbers of questions.
fn report(tally: Tally, folder: &Path, context: &Context) -> CommandResult {
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
    if differing > 0 {
        context.output.line(format!(
            "answers whose words and mask differ: {differing} (column `position_warning`); trust neither of them without a \
             look at the image"
        ))?;
    }
    if other_targets > 0 {
        let about = "answers about another target than that of the question";
        context.output.line(format!("{about}: {other_targets} (column `other_target`)"))?;
    }
    context.output.record(&json!({
        "kind": "result", "answered": answered, "kept": kept, "failed": failed, "unfamiliar": unfamiliar,
        "unlike_images": unlike_images, "differing": differing, "other_targets": other_targets,
        "table": table, "journal": journal,
    }))?;
    Ok(if failed == 0 { CommandEnd::Done } else { CommandEnd::No })
}

/// True if one of the images is a DICOM file, whose grey values need a window.
pub(super) fn has_dicom(jobs: &[ImageQuestion]) -> Result<bool> {
    for job in jobs {
        if volume::is_volume(&job.image)? {
            return Ok(true);
        }
    }
    Ok(false)
}
