//! Predictions on many images, each with one or several questions: masks, answers and a table in one folder.
//!
//! The folder gets `results.jsonl` (a first line about the model, then one line for each question, written as soon as
//! its mask is on disk), `masks/`, `overlays/` if asked for, and at the end `results.csv` with the same content. A
//! repeated call continues after the last complete line.

use super::image_files::ImageFiles;
use super::image_list::{ImageQuestion, search};
use super::{Ask, Encoded, Image, Model, Prediction, Ready};
use crate::data::agreement::Positions;
use crate::data::familiarity::Familiarity;
use crate::data::sheet;
use crate::event::{Event, Observer};
use crate::segment::calibration::Confidence;
use crate::{Error, Result, files};
use image::DynamicImage;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, UNIX_EPOCH};

/// Name of the file with one line for each question.
pub const JOURNAL: &str = "results.jsonl";
/// Name of the table.
pub const TABLE: &str = "results.csv";

/// Opens an image file.
type Reader<'a> = dyn Fn(&ImageFiles) -> Result<DynamicImage> + 'a;

/// What decides a prediction besides image and question: a folder has results of one of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Made {
    /// Version of this program.
    pub version: String,
    /// SHA-256 of what identifies the weights.
    pub model: String,
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
    /// Whether masks of targets that are reported as not found are painted.
    pub always_paint: bool,
    /// Whether overlays are written.
    pub overlays: bool,
    /// How values of DICOM images become grey.
    pub window: String,
    /// The folder that the names of images are relative to.
    #[serde(default)]
    pub images: PathBuf,
    /// The affine of NIfTI files that was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geometry: Option<String>,
}

/// The result of one question: a line of [`JOURNAL`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct QuestionResult {
    /// [`ImageQuestion::name`].
    pub image: String,
    /// The question.
    pub question: String,
    /// Size of the image file in bytes and time of its last change in milliseconds since 1970: a changed file is asked again.
    pub file: (u64, u64),
    /// The answer; empty if there is an error.
    pub answer: String,
    /// The most probable class.
    pub modality: Option<String>,
    /// Confidence of the mask.
    pub confidence: Option<Confidence>,
    /// How the question compares with those of the training.
    #[serde(flatten)]
    pub familiarity: Familiarity,
    /// Locations of the mask and in the answer.
    #[serde(flatten)]
    pub positions: Positions,
    /// Foreground of the mask that was written, in pixels.
    pub area_pixels: u64,
    /// The same as a fraction of the image.
    pub area_frac: f64,
    /// Width and height of image and mask.
    pub size: (u32, u32),
    /// The mask, relative to the folder of the results.
    pub mask: Option<String>,
    /// The overlay, relative to the folder of the results.
    pub overlay: Option<String>,
    /// Why there is no answer.
    pub error: Option<String>,
    /// Time for question and files.
    pub seconds: f64,
}

impl ImageQuestion {
    /// What a result belongs to.
    fn key(&self) -> (String, String) {
        (self.name.clone(), self.question.clone())
    }
}

impl QuestionResult {
    fn key(&self) -> (String, String) {
        (self.image.clone(), self.question.clone())
    }

    fn empty(job: &ImageQuestion) -> Self {
        Self { image: job.name.clone(), question: job.question.clone(), ..Self::default() }
    }

    /// Its columns in [`TABLE`], with their names.
    fn columns(&self) -> [(&'static str, String); 24] {
        let (confidence, familiarity, positions) = (self.confidence.as_ref(), &self.familiarity, &self.positions);
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.4}"));
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let flag = |value: Option<bool>| value.map_or_else(String::new, |value| u8::from(value).to_string());
        let agree = positions.positions_agree.map_or_else(String::new, |agree| agree.to_string());
        [
            ("image", self.image.clone()),
            ("question", self.question.clone()),
            ("answer", self.answer.clone()),
            ("class", text(&self.modality)),
            ("found", flag(confidence.map(|confidence| confidence.is_found))),
            ("presence", number(confidence.map(|confidence| confidence.presence))),
            ("probability", number(confidence.and_then(|confidence| confidence.foreground))),
            ("boundary", number(confidence.and_then(|confidence| confidence.boundary))),
            ("area_pixels", self.area_pixels.to_string()),
            ("area_frac", format!("{:.6}", self.area_frac)),
            ("width", self.size.0.to_string()),
            ("height", self.size.1.to_string()),
            ("mask", text(&self.mask)),
            ("overlay", text(&self.overlay)),
            ("seconds", format!("{:.3}", self.seconds)),
            ("error", text(&self.error)),
            ("question_known", flag(familiarity.question_known)),
            ("nearest_question", text(&familiarity.nearest_question)),
            ("image_known", flag(familiarity.image.image_known)),
            ("mask_position", text(&positions.mask_position)),
            ("answer_position", text(&positions.answer_position)),
            ("positions_agree", agree),
            ("position_warning", text(&positions.position_warning)),
            ("other_target", text(&familiarity.other_target)),
        ]
    }
}

/// The results in a folder.
#[derive(Debug)]
pub struct ResultsFolder {
    folder: PathBuf,
    made: Made,
    /// By image and question; the last line of the journal counts.
    answered: HashMap<(String, String), QuestionResult>,
    journal: File,
    names: HashSet<String>,
}

/// Numbers of questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tally {
    /// Answered now.
    pub answered: usize,
    /// Answered by an earlier call.
    pub kept: usize,
    /// Not answered because of their image.
    pub failed: usize,
    /// Answered, now or earlier, and unlike the questions of the training.
    pub unfamiliar: usize,
    /// Answered, now or earlier, with an image unlike those of the training.
    pub unlike_images: usize,
    /// Answered, now or earlier, with words and a mask that differ.
    pub differing: usize,
    /// Answered, now or earlier, about another target than that of the question.
    pub other_targets: usize,
}

impl ResultsFolder {
    /// Opens the folder and reads what an earlier call has answered. Results of another model or of other settings are
    /// begun anew, with a note.
    ///
    /// # Errors
    /// [`Error::Config`] if `keeps_files` is set and the folder has other results, and for a folder with files of new
    /// results' names that are no results; [`Error::Io`].
    pub fn open(folder: &Path, made: Made, keeps_files: bool, observer: &dyn Observer) -> Result<Self> {
        let path = folder.join(JOURNAL);
        let text = match files::read(&path, files::MAX_TABLE) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::io(&path, "read")(error)),
        };
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let table = folder.join(TABLE);
        let is_empty = |folder: &Path| std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none());
        let others = ["masks", "overlays"].map(|name| folder.join(name));
        let other = others.iter().find(|folder| !is_empty(folder)).or(table.exists().then_some(&table));
        if let (true, Some(other)) = (text.is_empty(), other) {
            let reason =
                format!("`{}` exists, and `{JOURNAL}`, which would name its origin, does not", other.display());
            return Err(Error::argument("out", reason, "choose another folder"));
        }
        // what a journal of any version begins with
        if !text.is_empty() && !text.starts_with("{\"version\":") {
            let reason = format!("`{}` is no list of results that this program wrote", path.display());
            return Err(Error::argument("out", reason, "choose another folder"));
        }
        let before: Option<Made> = lines.next().and_then(|line| serde_json::from_str(line).ok());
        let is_same = before.as_ref() == Some(&made);
        if keeps_files && !is_same && !text.is_empty() {
            let reason =
                format!("`{}` has results of another model, of other images or of other settings", folder.display());
            let hint = "choose another argument `out`, or leave out the argument `no_overwrite`";
            return Err(Error::argument("no_overwrite", reason, hint));
        }
        if !text.is_empty() && !is_same {
            let note = "the folder has results of another model, of other images or of other settings: all images are asked \
                        again";
            observer.on(&Event::Note(format!("{}: {note}", folder.display())));
        }
        let known: Vec<QuestionResult> =
            if is_same { lines.map_while(|line| serde_json::from_str(line).ok()).collect() } else { Vec::new() };
        // replaced as a whole, without a partial last line
        let mut kept = line_of(&made)?;
        for answered in &known {
            kept += &line_of(answered)?;
        }
        files::write(&path, kept.as_bytes()).map_err(Error::io(&path, "write"))?;
        let journal = OpenOptions::new().append(true).open(&path).map_err(Error::io(&path, "open"))?;
        let names = known.iter().filter_map(|answered| answered.mask.clone()).collect();
        let answered = known.into_iter().map(|answered| (answered.key(), answered)).collect();
        Ok(Self { folder: folder.to_owned(), made, answered, journal, names })
    }

    /// Answers the jobs that are not answered yet. `read` opens an image; an image that cannot be read or answered gets
    /// a line with the error, and prediction continues with the next image. `on_answer` gets each new line.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; [`Error::Io`] for files that cannot be written; errors of libtorch other than of one
    /// image. [`TABLE`] is written also then.
    pub fn answer(
        &mut self,
        model: &Model,
        jobs: &[ImageQuestion],
        read: &Reader,
        (observer, interrupt): (&dyn Observer, &AtomicBool),
        on_answer: &mut dyn FnMut(&QuestionResult) -> Result<()>,
    ) -> Result<Tally> {
        let mut tally = Tally::default();
        observer.on(&Event::Started { phase: "predict".into(), total: jobs.len() as u64, unit: "questions" });
        let mut each = || -> Result<()> {
            let mut encoded: Option<(PathBuf, DynamicImage, Encoded)> = None;
            for (done, job) in jobs.iter().enumerate() {
                if interrupt.load(Ordering::SeqCst) {
                    return Err(Error::Interrupted);
                }
                let file = stamp_of(&job.files)?;
                if self.has(job, file) {
                    tally.kept += 1;
                    observer.on(&Event::Advanced { done: done as u64 + 1 });
                    continue;
                }
                let start = Instant::now();
                let is_open = encoded.as_ref().is_some_and(|(path, ..)| *path == job.image);
                if !is_open {
                    encoded = None;
                }
                let made = self.one(model, job, &mut encoded, (read, interrupt));
                let mut answered = match made {
                    Ok(answered) => answered,
                    // the other images go on
                    Err(error @ (Error::Data { .. } | Error::NotFinite { .. })) => {
                        observer.on(&Event::Warning(error.to_string()));
                        QuestionResult { error: Some(error.to_string()), ..QuestionResult::empty(job) }
                    }
                    Err(error) => return Err(error),
                };
                tally.failed += usize::from(answered.error.is_some());
                tally.answered += usize::from(answered.error.is_none());
                (answered.file, answered.seconds) = (file, start.elapsed().as_secs_f64());
                self.append(answered.clone())?;
                on_answer(&answered)?;
                observer.on(&Event::Advanced { done: done as u64 + 1 });
            }
            Ok(())
        };
        let ended = each();
        observer.on(&Event::Finished);
        self.write_table(jobs)?;
        for answered in jobs.iter().filter_map(|job| self.answered.get(&job.key())) {
            let familiarity = &answered.familiarity;
            tally.unfamiliar += usize::from(familiarity.question_known == Some(false));
            tally.unlike_images += usize::from(familiarity.image.image_known == Some(false));
            tally.differing += usize::from(answered.positions.position_warning.is_some());
            tally.other_targets += usize::from(familiarity.other_target.is_some());
        }
        ended.map(|()| tally)
    }

    fn has(&self, job: &ImageQuestion, file: (u64, u64)) -> bool {
        self.answered.get(&job.key()).is_some_and(|answered| {
            answered.file == file
                && answered.error.is_none()
                && answered.mask.as_ref().is_some_and(|mask| self.folder.join(mask).is_file())
        })
    }

    fn one(
        &mut self,
        model: &Model,
        job: &ImageQuestion,
        encoded: &mut Option<(PathBuf, DynamicImage, Encoded)>,
        (read, interrupt): (&Reader, &AtomicBool),
    ) -> Result<QuestionResult> {
        if encoded.is_none() {
            let image = read(&job.files)?;
            let features = model.encode(&Image::Pixels(&image)).map_err(|error| error.of_image(&job.image))?;
            *encoded = Some((job.image.clone(), image, features));
        }
        let (_, image, features) = encoded.as_ref().expect("just encoded");
        let mut stop = |_: Ready| {
            if interrupt.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let Made { max_new_tokens, always_paint, .. } = self.made;
        let ask = Ask { max_new_tokens, always_paint, ..Ask::new(&job.question) };
        let prediction = model.ask_with(features, &ask, &mut stop).map_err(|error| error.of_image(&job.image))?;
        let (mask, overlay) = self.write(job, image, &prediction)?;
        let target = prediction.target();
        Ok(QuestionResult {
            modality: prediction.class.as_ref().map(|(name, _)| name.clone()),
            confidence: Some(target.confidence),
            area_pixels: target.num_foreground() as u64,
            area_frac: target.area_frac(),
            answer: prediction.answer,
            familiarity: prediction.familiarity,
            positions: prediction.positions,
            size: prediction.size,
            mask: Some(mask),
            overlay,
            ..QuestionResult::empty(job)
        })
    }

    /// Writes mask and overlay; returns their names.
    fn write(
        &mut self,
        job: &ImageQuestion,
        image: &DynamicImage,
        prediction: &Prediction,
    ) -> Result<(String, Option<String>)> {
        let stem = Path::new(&job.name).with_extension("");
        // a name that leaves the folder of the results loses its folders
        let is_inside = stem.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let stem = if is_inside { stem } else { stem.file_name().map(PathBuf::from).unwrap_or_default() };
        let numbered = |number: usize| match number {
            1 => format!("masks/{}.png", stem.display()),
            number => format!("masks/{}-{number}.png", stem.display()),
        };
        // one more number than there are names
        let mut numbers = (1..=self.names.len() + 1).map(numbered);
        let name = numbers.find(|name| !self.names.contains(name)).expect("a free number");
        let save = |name: &str, image: DynamicImage| -> Result<()> {
            let path = self.folder.join(name);
            let parent = path.parent().unwrap_or(&self.folder);
            files::create_below(&self.folder, parent).map_err(Error::io(parent, "create"))?;
            files::write_output(&path, &sheet::encode(&image, &path)?).map_err(Error::io(&path, "write"))
        };
        save(&name, prediction.binary_mask()?.into())?;
        let drawn = self.made.overlays.then(|| name.replacen("masks/", "overlays/", 1));
        if let Some(drawn) = &drawn {
            save(drawn, prediction.overlay(image, None)?.into())?;
        }
        self.names.insert(name.clone());
        Ok((name, drawn))
    }

    fn append(&mut self, answered: QuestionResult) -> Result<()> {
        let path = self.folder.join(JOURNAL);
        self.journal.write_all(line_of(&answered)?.as_bytes()).map_err(Error::io(path, "write"))?;
        self.answered.insert(answered.key(), answered);
        Ok(())
    }

    /// The results of `jobs` as a table, in their order.
    fn write_table(&self, jobs: &[ImageQuestion]) -> Result<()> {
        let path = self.folder.join(TABLE);
        let mut table = csv::Writer::from_writer(Vec::new());
        let failed = |error: csv::Error| Error::io(&path, "write")(error.into());
        table.write_record(QuestionResult::default().columns().map(|(name, _)| name)).map_err(failed)?;
        for answered in jobs.iter().filter_map(|job| self.answered.get(&job.key())) {
            table.write_record(answered.columns().map(|(_, value)| value)).map_err(failed)?;
        }
        let bytes = table.into_inner().map_err(|error| Error::io(&path, "write")(error.into_error()))?;
        files::write_output(&path, &bytes).map_err(Error::io(&path, "write"))
    }
}

/// SHA-256 of what identifies the weights of the checkpoint in `folder`: its checksums, or, for a published folder, the
/// names, sizes and times of its files. `flags` are the user's changes of the run's settings.
///
/// # Errors
/// [`Error::Io`].
pub fn identity_of(folder: &Path, flags: &str) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(flags.as_bytes());
    let checksums = folder.join(files::CHECKSUMS);
    if checksums.is_file() {
        hash.update(files::read(&checksums, files::MAX_TEXT).map_err(Error::io(&checksums, "read"))?);
    } else {
        let mut found = Vec::new();
        search(folder, &mut |path| found.push(path))?;
        found.sort();
        for file in found {
            hash.update(format!("{} {:?}", file.display(), stamp(&file)?).as_bytes());
        }
    }
    Ok(format!("{:x}", hash.finalize()))
}

/// Size and time of the last change of a file.
fn stamp(path: &Path) -> Result<(u64, u64)> {
    let meta = path.metadata().map_err(Error::io(path, "read"))?;
    let changed = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    Ok((meta.len(), u64::try_from(changed.as_millis()).unwrap_or(u64::MAX)))
}

/// Sum of the sizes of all files, and the time of the last change of any.
fn stamp_of(files: &ImageFiles) -> Result<(u64, u64)> {
    files.paths().into_iter().try_fold((0, 0), |(size, time), path| {
        let own = stamp(path)?;
        Ok((size + own.0, time.max(own.1)))
    })
}

fn line_of(record: &impl Serialize) -> Result<String> {
    let line = serde_json::to_string(record).map_err(|error| Error::Internal { reason: error.to_string() })?;
    Ok(line + "\n")
}

#[cfg(test)]
#[path = "many_tests.rs"]
mod tests;
