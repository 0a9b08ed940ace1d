//! `prsmed predict`: segments an image or a volume and answers a question, and the flags by which commands open a
//! trained model.

use super::context::{Context, check_parent};
use super::predict_many::{ManyArgs, has_dicom};
use super::predict_volume::{Common, VolumeArgs};
use super::report::{CommandEnd, CommandResult};
use crate::data::annotation::is_image;
use crate::data::sheet;
use crate::data::volume::{Axis, Volume, write};
use crate::event::Event;
use crate::front::image_files::ImageFiles;
use crate::front::image_list::root_of;
use crate::front::many::{Made, identity_of};
use crate::front::{
    ANSWER_TOKENS, Ask, Image, ImageOrVolume, ImageReading, Model, OpenOptions, Prediction, Ready, check_question,
};
use crate::job::outputs::{self, OutputPath, Written};
use crate::segment::calibration::Confidence;
use crate::segment::setup::{Description, RunOverrides};
use crate::segment::{Semantics, weight_files};
use crate::shell::ShellCommand;
use crate::tensor::ledger;
use crate::trainer::FirstLayers;
use crate::trainer::precision::Precision;
use crate::units::percent;
use crate::{Error, Result, files};
use image::{DynamicImage, GenericImageView as _, GrayImage};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The trained model to use, and overrides of its settings.
#[derive(Debug, clap::Args)]
pub(super) struct RunArgs {
    /// Run folder (its `best/`, else `last/`), one checkpoint folder, a published PRS-Med folder, or
    /// `hub:owner/name[/FOLDER]`
    pub(super) run: PathBuf,
    /// Another run beside it, for example of another fold; may be repeated. Masks are then the mean of all runs, answers those
    /// of the first one
    #[arg(long = "ensemble", value_name = "RUN")]
    pub(super) others: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) model: ModelArgs,
}

/// Overrides of a trained model's settings.
#[derive(Debug, Default, clap::Args)]
pub(super) struct ModelArgs {
    /// Language model: a folder or `hub:owner/name[@rev]` [default: as stored in the run]
    #[arg(long, value_name = "WHERE")]
    base: Option<String>,
    /// Separate CLIP vision tower: a folder or `hub:owner/name[@rev]` [default: as stored in the run]
    #[arg(long, value_name = "WHERE")]
    vision_tower: Option<String>,
    /// reference or corrected [default: as stored in the run]
    #[arg(long, value_name = "NAME", value_parser = parse_semantics)]
    semantics: Option<Semantics>,
    /// fp32, bf16 or fp16 [default: fp32 on the CPU, bf16 on a GPU]
    #[arg(long, value_name = "P", value_parser = parse_precision)]
    precision: Option<Precision>,
    /// First layers of the language model whose weights stay in host memory: `none`, `full` or their number, for GPUs
    /// with little memory. `full` includes the vision tower [default: as in the training; none on the CPU]
    #[arg(long, value_name = "N")]
    stream_layers: Option<FirstLayers>,
    /// Load a checkpoint even if some keys do not match the model; the keys are listed
    #[arg(long)]
    allow_partial: bool,
}

fn parse_semantics(text: &str) -> Result<Semantics, String> {
    serde_json::from_value(text.into()).map_err(|_| "use reference or corrected".into())
}

pub(super) fn parse_precision(text: &str) -> Result<Precision, String> {
    serde_json::from_value(text.into()).map_err(|_| "use fp32, bf16 or fp16".into())
}

impl RunArgs {
    /// SHA-256 of what identifies the weights and these flags.
    pub(super) fn identity(&self, context: &Context) -> Result<String> {
        let (base, tower) = (self.model.base.as_deref(), self.model.vision_tower.as_deref());
        let mut flags = format!("{:?}", self.model);
        let identity = |run: &Path, flags: &str| {
            weight_files::read_run(run, base, tower, &context.runtime, &|folder| identity_of(folder, flags))
        };
        for other in &self.others {
            flags += &identity(other, "")?;
        }
        identity(&self.run, &flags)
    }

    pub(super) fn open(&self, context: &Context) -> Result<Model> {
        Model::open(&self.run, &self.model.options(&self.others), &context.runtime)
    }
}

impl ModelArgs {
    /// The flags that change settings of a trained model as `change` does, which is written as for `--set`; `None` if only a
    /// training can change them.
    pub(super) fn flags_of(change: &str) -> Option<String> {
        match change.split_once('=')? {
            // `full` includes the vision tower
            ("model.stream_layers", "full model.stream_vision=true") => Some("--stream-layers full".to_owned()),
            ("train.precision", precision) => Some(format!("--precision {precision}")),
            _ => None,
        }
    }

    /// Adds these flags to another command on the same model.
    pub(super) fn add_to(&self, command: ShellCommand) -> ShellCommand {
        let semantics = self.semantics.map(|semantics| format!("{semantics:?}").to_lowercase());
        let precision = self.precision.map(|precision| format!("{precision:?}").to_lowercase());
        let command = command.flag("--base", &self.base).flag("--vision-tower", &self.vision_tower);
        let command = command.flag("--semantics", semantics).flag("--precision", precision);
        let command = command.flag("--stream-layers", self.stream_layers.map(|layers| layers.to_string()));
        command.switch("--allow-partial", self.allow_partial)
    }

    /// What the flags choose, with further runs.
    pub(super) fn options(&self, ensemble: &[PathBuf]) -> OpenOptions {
        let overrides = RunOverrides {
            base: self.base.clone(),
            vision_tower: self.vision_tower.clone(),
            semantics: self.semantics,
            stream_layers: self.stream_layers,
            stream_vision: self.stream_layers.map(|layers| layers == FirstLayers::Full),
            ..RunOverrides::default()
        };
        let (precision, allow_partial) = (self.precision, self.allow_partial);
        OpenOptions { overrides, precision, allow_partial, ensemble: ensemble.to_vec() }
    }
}

/// Answer a question about an image and segment the region it asks for
///
/// Prints the answer while it is generated. The mask has the same size as the image. A volume (NIfTI, DICOM) is segmented
/// slice by slice, and a template answers from its mask, which is written with `--out` on the grid of the volume.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed predict runs/a --image scan.png --question \"Where is the lesion?\" --mask-out mask.png
  prsmed predict hub:huyquoctrinh/PRS-Med --image scan.png --question \"Where is the lesion?\"
  prsmed predict runs/a --images scans/ --question \"Where is the lesion?\" --out results
  prsmed predict runs/a --images questions.csv --out results --overlays
  prsmed predict runs/a --image ct.nii.gz --question \"Where is the liver?\" --out liver.nii.gz --largest-component
  prsmed predict runs/a --image series/ --question \"Where is the tumour?\" --window liver --out tumour.dcm
  prsmed predict runs/b --image T1=t1.nii.gz --image FLAIR=none --question \"Where is the lesion?\" --out lesion.nii.gz")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// Image file: PNG, JPEG, TIFF, BMP, GIF, WebP, PGM or DICOM; or a volume: NIfTI, NRRD, MetaImage, NPZ, a TIFF stack, a DICOM file, or a
    /// folder or zip of one DICOM series. `PATH#N` chooses volume N of a 4-D file, series number N, or frame N; a
    /// series is also chosen by its UID, its description (`PATH#T2 axial`), or as the `largest`
    ///
    /// A run of several sequences has a `--image NAME=FILE` for each, with `none` as FILE for one that is missing; or a folder in
    /// which one file, or the description of one DICOM series, has the name of each.
    #[arg(long, value_name = "[NAME=]FILE", required_unless_present = "images")]
    image: Vec<PathBuf>,
    /// Question about the image; for many images it may be repeated
    #[arg(long = "question", value_name = "TEXT", required_unless_present = "images")]
    questions: Vec<String>,
    #[command(flatten)]
    many: ManyArgs,
    /// A mask of the image, for example a corrected one, for the words to follow: PNG, or for a volume of one slice a label
    /// map on its grid. For runs of `model.answer_reads_mask`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["images", "probabilities", "always_paint"])]
    mask_in: Option<PathBuf>,
    /// Write the mask as an 8-bit PNG with the values 0 and 255
    #[arg(long, value_name = "FILE", conflicts_with = "images")]
    mask_out: Option<PathBuf>,
    /// Write the image with the mask drawn over it
    #[arg(long, value_name = "FILE", conflicts_with = "images")]
    overlay_out: Option<PathBuf>,
    /// Write the probability of each pixel, before the presence threshold: a 16-bit PNG (65535 is 1), or for a volume a
    /// float32 NIfTI file on its grid (NaN in slices that are not segmented)
    #[arg(long, value_name = "FILE", conflicts_with = "images")]
    probabilities: Option<PathBuf>,
    /// Paint the mask even if the target is reported as not found
    #[arg(long)]
    always_paint: bool,
    /// Maximum length of the answer in tokens [default: 128]
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    #[command(flatten)]
    volume: VolumeArgs,
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    if args.image.is_empty() {
        return many(args, context);
    }
    let [question] = args.questions.as_slice() else {
        let hint = "use `--images` for several questions about one or many images";
        return Err(Error::config("--question", "one image has one question", hint).into());
    };
    check_question(question)?;
    if args.many.no_overwrite {
        let outputs =
            [&args.mask_out, &args.overlay_out, &args.probabilities, &args.volume.out, &args.volume.record_out];
        outputs.into_iter().flatten().try_for_each(|path| check_new(path))?;
    }
    let run = weight_files::described(&args.run.run, &context.runtime)?;
    let files = args.files(run.as_ref())?;
    let (reading, opened) = args.volume.open(&files, run.as_ref(), context)?;
    let asked = Asked { question, run, files, reading };
    match opened {
        ImageOrVolume::Image(image) => args.ask(&asked, &image, context),
        ImageOrVolume::Volume(volume) => args.segment(&asked, &volume, context),
    }
}

/// A question about an image or a volume.
struct Asked<'a> {
    question: &'a str,
    /// Of the run that answers.
    run: Option<Description>,
    files: ImageFiles,
    /// How the files became an image.
    reading: ImageReading,
}

/// Predictions on many images.
fn many(args: &Args, context: &Context) -> CommandResult {
    args.questions.iter().try_for_each(|question| check_question(question))?;
    let run = weight_files::described(&args.run.run, &context.runtime)?;
    let jobs = args.many.jobs(&args.questions, run.as_ref().map_or(&[], |run| run.sequences()), context)?;
    if let Some(out) = &args.volume.out {
        let out = OutputPath { name: "--out".to_owned(), path: out.clone(), written: Written::Folder };
        outputs::check_listed("--images", jobs.iter().flat_map(|job| job.files.paths()), &out)?;
    }
    let has_dicom = has_dicom(&jobs)?;
    args.volume.check_images(has_dicom)?;
    let reading = args.volume.reading(has_dicom, run.as_ref(), context)?;
    let made = Made {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        model: args.run.identity(context)?,
        max_new_tokens: args.max_new_tokens.unwrap_or(ANSWER_TOKENS),
        always_paint: args.always_paint,
        overlays: args.many.overlays,
        images: root_of(args.many.images()).canonicalize().unwrap_or_default().to_string_lossy().into_owned().into(),
        window: reading.windows_text(),
        geometry: reading.geometry.map(|geometry| geometry.to_string()),
    };
    let out = args.volume.out.as_deref().unwrap_or(Path::new("predictions"));
    args.many.run(&jobs, made, (out, &reading), context, || args.run.open(context))
}

impl Args {
    /// The files that `--image` names.
    fn files(&self, run: Option<&Description>) -> Result<ImageFiles> {
        let files = ImageFiles::named(&self.image, run.map_or(&[], Description::sequences))?;
        if let ImageFiles::One(path) = &files {
            refuse_folder_of_images(path)?;
        }
        Ok(files)
    }

    /// Writes the pictures of a prediction.
    fn write(&self, prediction: &Prediction, image: &DynamicImage) -> Result<()> {
        if let Some(path) = &self.probabilities {
            let (width, height) = prediction.size;
            write_image(&sheet::probability_image_16(&prediction.target().probabilities, width, height)?, path)?;
        }
        if let Some(path) = &self.mask_out {
            write_image(&prediction.binary_mask()?.into(), path)?;
        }
        if let Some(path) = &self.overlay_out {
            write_image(&prediction.overlay(image, None)?.into(), path)?;
        }
        Ok(())
    }

    /// Answers about an image.
    fn ask(&self, asked: &Asked, image: &DynamicImage, context: &Context) -> CommandResult {
        // JPEG compression would change the values 0 and 255 of the mask.
        self.mask_out.iter().try_for_each(|path| check_writable("--mask-out", path, &["png"]))?;
        self.overlay_out.iter().try_for_each(|path| check_writable("--overlay-out", path, &["png", "jpg", "jpeg"]))?;
        self.probabilities.iter().try_for_each(|path| check_writable("--probabilities", path, &["png"]))?;
        let path = asked.files.first();
        let given = self.mask_in.as_deref().map(|mask| given_mask(mask, asked, image.dimensions(), context));
        let given = given.transpose()?;
        let model = self.run.open(context)?;
        let max_new_tokens = self.max_new_tokens.unwrap_or(ANSWER_TOKENS);
        let always_paint = self.always_paint;
        let ask = Ask { max_new_tokens, always_paint, mask: given.as_ref(), ..Ask::new(asked.question) };
        let mut stream = |ready: Ready| {
            if let Ready::Text(piece) = ready {
                context.progress.on(&Event::Token(piece.to_owned()));
            }
            ControlFlow::Continue(())
        };
        let encoded = model.encode(&Image::Pixels(image));
        let answered = encoded.and_then(|image| model.ask_with(&image, &ask, &mut stream));
        let prediction = answered.map_err(|error| error.of_image(path))?;
        self.write(&prediction, image)?;
        finish(context, &model, &prediction, self)
    }

    /// Segments a volume.
    fn segment(&self, asked: &Asked, volume: &Volume, context: &Context) -> CommandResult {
        let is_slice = volume.plane(Axis::suggested(&volume.grid)).num_slices == 1;
        check_volume_flags(self, is_slice)?;
        if self.max_new_tokens.is_some() {
            context.runtime.note("`--max-new-tokens` has no effect: a template answers about a volume");
        }
        self.probabilities.iter().try_for_each(|path| {
            check_parent("--probabilities", path)?;
            write::check_probabilities(path, volume)
        })?;
        let (run, probabilities) = (self.run.run.as_path(), self.probabilities.as_deref());
        let common = Common { image: &asked.files, sequences: &asked.reading.sequences, run, probabilities };
        let mut settings = self.volume.settings(volume, &asked.reading, asked.question)?;
        settings.always_paint = self.always_paint;
        self.volume.run(volume, settings, &self.run.open(context)?, context, &common)
    }
}

/// The mask that the words are to follow, before the model is loaded.
fn given_mask(mask: &Path, asked: &Asked, size: (u32, u32), context: &Context) -> Result<GrayImage> {
    let labels = asked.run.as_ref().map(|run| run.pixels.labels).unwrap_or_default();
    let mask = asked.reading.mask(mask, asked.files.first(), labels, context.progress.as_ref())?;
    asked.run.as_ref().map_or(Ok(()), |run| run.check_mask(&mask, size))?;
    Ok(mask)
}

/// Refuses to replace a file.
fn check_new(path: &Path) -> Result<()> {
    if path.exists() {
        let reason = format!("`{}` exists", path.display());
        return Err(Error::config("--no-overwrite", reason, "choose another name, or leave out `--no-overwrite`"));
    }
    Ok(())
}

fn write_image(image: &DynamicImage, path: &Path) -> Result<()> {
    files::write_output(path, &sheet::encode(image, path)?).map_err(Error::io(path, "write"))
}

fn finish(context: &Context, model: &Model, prediction: &Prediction, args: &Args) -> CommandResult {
    let (target, familiarity) = (prediction.target(), &prediction.familiarity);
    let foreground_frac = target.area_frac();
    context.output.line("")?;
    if target.is_given {
        context.output.line(format!("mask: {} of the image, as given", percent(foreground_frac)))?;
    } else {
        context.output.line(mask_line(foreground_frac, &target.confidence))?;
    }
    if let Some(agreement) = target.agreement {
        let count = model.runs().count();
        context.output.line(format!("{count} runs: mean Dice of their masks with this one {agreement:.3}"))?;
    }
    context.output.line(prediction.positions.line())?;
    let mask_warning = prediction.mask_warning();
    let of_mask = mask_warning.iter().chain(&prediction.positions.position_warning).cloned();
    let mut warnings = of_mask.chain(familiarity.warnings());
    warnings.try_for_each(|warning| context.output.line(format!("attention: {warning}")))?;
    let mut record = json!({
        "kind": "result",
        "answer": prediction.answer,
        "new_tokens": prediction.new_tokens,
        "modality": prediction.class.as_ref().map(|(name, _)| name),
        "mask": args.mask_out,
        "overlay": args.overlay_out,
        "probabilities": args.probabilities,
        "foreground_frac": foreground_frac,
        "confidence": (!target.is_given).then_some(target.confidence),
        "mask_given": target.is_given,
        "width": prediction.size.0,
        "height": prediction.size.1,
        "memory": { "measured": ledger::usage() },
    });
    if let Some(agreement) = target.agreement {
        record["agreement"] = json!(agreement);
    }
    if let Some(warning) = mask_warning {
        record["mask_warning"] = json!(warning);
    }
    prediction.positions.add_to(&mut record);
    familiarity.add_to(&mut record);
    context.output.record(&record)?;
    Ok(CommandEnd::Done)
}

/// What the mask shows and how sure the model is of it.
fn mask_line(foreground_frac: f64, confidence: &Confidence) -> String {
    let Confidence { presence, is_found, foreground, boundary } = confidence;
    let area = format!("mask: {} of the image", percent(foreground_frac));
    let sure = match (foreground, boundary) {
        (Some(foreground), Some(boundary)) if foreground_frac > 0.0 => {
            format!(", mean probability {foreground:.2}, {:.0} % of mask and boundary uncertain", 100.0 * boundary)
        }
        _ => String::new(),
    };
    let found = if *is_found { "presence" } else { "not found, presence" };
    format!("{area}{sure}; {found} {presence:.2}")
}

/// Refuses a folder of images in common formats, which is no series.
fn refuse_folder_of_images(path: &Path) -> Result<()> {
    let entries = std::fs::read_dir(path).into_iter().flatten();
    let files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    if !files.is_empty() && files.iter().all(|file| is_image(file)) {
        let hint = "ask about all of them with `--images DIR --question TEXT --out RESULTS`, or give one file";
        return Err(Error::config("--image", format!("`{}` is a folder of images", path.display()), hint));
    }
    Ok(())
}

/// Refuses flags that are for images. A volume of one slice is an image without `--out`.
fn check_volume_flags(args: &Args, is_slice: bool) -> Result<()> {
    let flags = [
        ("--mask-in", &args.mask_in, "leave it out: the words about a volume follow its mask"),
        ("--mask-out", &args.mask_out, "use `--out mask.nii.gz`"),
        ("--overlay-out", &args.overlay_out, "use `--out mask.nii.gz`"),
    ];
    flags.into_iter().find(|(_, path, _)| path.is_some()).map_or(Ok(()), |(flag, _, hint)| {
        let (reason, hint) = if is_slice {
            ("it is for images, and with `--out` a volume of one slice is no image", "leave `--out` out, or this flag")
        } else {
            ("it is for images, and `--image` is a volume", hint)
        };
        Err(Error::config(flag, reason, hint))
    })
}

/// Checks an output path before the expensive work.
fn check_writable(flag: &str, path: &Path, extensions: &[&str]) -> Result<()> {
    check_parent(flag, path)?;
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if extensions.contains(&extension.as_str()) {
        return Ok(());
    }
    let hint = format!("use a file name that ends in `.{}`", extensions.join("` or `."));
    Err(Error::config(flag, format!("`{}` has the wrong file extension", path.display()), hint))
}
