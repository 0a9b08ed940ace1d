//! Medical volumes: NIfTI and DICOM uploads, and the mask of a volume as a file.

use super::answer::{Answer, AnswerContent};
use super::app::App;
use super::failure::{HttpFailure, HttpResult, Params};
use super::options::MAX_VOLUME;
use super::picture::ServedImage;
use super::upload::{Upload, uploaded};
use crate::data::decode;
use crate::data::volume::format::{IMAGES, usual_endings};
use crate::data::volume::limits::TOO_MANY;
use crate::data::volume::{self, SegmentMask, Volume, write};
use crate::{Error, Result};
use axum::Router;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Deserialize;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path as FilePath, PathBuf};

/// Reads NIfTI (also compressed), DICOM, or a zip of one DICOM series. Its slices along every axis have at most
/// `max_pixels`, because a question can choose the axis.
///
/// # Errors
/// [`Error::Data`] for another file, and for too large slices; as [`volume::open`].
pub(super) fn read(bytes: Upload, max_pixels: u64) -> Result<Volume> {
    let file = checked(&bytes)?;
    drop(bytes);
    opened(&file, max_pixels)
}

/// As [`read`], for one of several files.
///
/// # Errors
/// As [`read`].
pub(super) fn read_bytes(bytes: &[u8], max_pixels: u64) -> Result<Volume> {
    opened(&checked(bytes)?, max_pixels)
}

/// A file in memory that is a volume.
fn checked(bytes: &[u8]) -> Result<InMemory> {
    let file = InMemory::new(bytes)?;
    if !volume::is_volume(&file.path)? {
        let expected = format!("a {IMAGES} image, nor a NIfTI or DICOM file");
        let hint = "convert an image to PNG, and a volume to NIfTI";
        return Err(decode::unknown_format(uploaded(), bytes, &expected, hint));
    }
    Ok(file)
}

fn opened(file: &InMemory, max_pixels: u64) -> Result<Volume> {
    // The product of the pixels of the slices along the three axes is the square of the number of voxels. A file whose
    // header has more voxels than this is refused before they are decoded.
    let most = usize::try_from(max_pixels.saturating_pow(3).isqrt()).unwrap_or(MAX_VOLUME);
    let volume = volume::open_within(&file.path, most.min(MAX_VOLUME)).map_err(|error| match error {
        Error::Data { reason, .. } if most < MAX_VOLUME && reason.contains(TOO_MANY) => {
            too_large(reason.split(' ').next().unwrap_or_default(), max_pixels)
        }
        error => without_path(error, &file.path),
    })?;
    let [x, y, z] = volume.grid.size;
    if [x * y, x * z, y * z].iter().any(|pixels| *pixels as u64 > max_pixels) {
        return Err(too_large(&format!("{x}x{y}x{z}"), max_pixels));
    }
    Ok(volume)
}

fn too_large(size: &str, max_pixels: u64) -> Error {
    let reason = format!("has {size} voxels, and at most {max_pixels} pixels are allowed in a slice along any axis");
    let hint = "crop the volume or resample it to larger voxels, or start the server with a larger `--max-pixels`";
    Error::data(uploaded(), reason, hint)
}

/// A file that exists in memory only, and no longer than this value or the process: its folder cannot keep a patient's
/// image.
struct InMemory {
    _file: File,
    path: PathBuf,
}

impl InMemory {
    fn new(bytes: &[u8]) -> Result<Self> {
        let failed = |source| Error::Io { path: "a file in memory".into(), action: "write", source };
        let file = memfd_create("upload", MemfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let mut file = File::from(file);
        file.write_all(bytes).map_err(failed)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Self { _file: file, path })
    }
}

/// The error without the path of the file in memory.
fn without_path(error: Error, path: &FilePath) -> Error {
    let clean = |text: &str| text.replace(&path.display().to_string(), "the file").replace("the file#", "volume ");
    match error {
        Error::Data { path: file, line, reason, hint } => {
            // a file in an uploaded zip
            let inside = file.strip_prefix(path).ok().filter(|inside| !inside.as_os_str().is_empty());
            let name = inside.map_or_else(|| uploaded().into(), |inside| FilePath::new(uploaded()).join(inside));
            // the command line can choose one of several volumes, series or affines
            let hint = if hint.contains('#') {
                "send a file with one volume or series".into()
            } else if hint.contains("argument `geometry") {
                "find out which are right, and correct the header, for example with nibabel".into()
            } else {
                clean(&hint)
            };
            Error::Data { path: name, line, reason: clean(&reason), hint }
        }
        Error::Io { action, source, .. } => Error::Io { path: uploaded().into(), action, source },
        other => other,
    }
}

/// Query of the mask of a volume.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MaskQuery {
    /// The answers to this question only.
    question: Option<String>,
}

/// Adds the masks of a volume in each format that is written.
pub(super) fn routes(router: Router<App>) -> Router<App> {
    usual_endings().fold(router, |router, ending| {
        let send = move |State(app): State<App>,
                         Path(image): Path<String>,
                         Params(query): Params<MaskQuery>| async move {
            file(&app, &image, query, format!("mask.{ending}")).await
        };
        router.route(&format!("/api/images/{{image}}/mask.{ending}"), get(send))
    })
}

/// The masks of the answers on the grid of the volume: one segment for each question, in the order of the questions.
async fn file(app: &App, image: &str, query: MaskQuery, name: String) -> HttpResult {
    let (picture, mut answers) = app.shared.store.image(image)?;
    answers.retain(|answer| query.question.as_ref().is_none_or(|question| *question == answer.question));
    if answers.is_empty() {
        return Err(HttpFailure::conflict("the volume has no such answers", "ask a question about the volume first"));
    }
    let disposition = format!("attachment; filename=\"{name}\"");
    let bytes = app.work(move || Ok(written(&name, &picture, &answers)?)).await?;
    let headers =
        [(header::CONTENT_TYPE, "application/octet-stream".to_owned()), (header::CONTENT_DISPOSITION, disposition)];
    Ok((headers, bytes).into_response())
}

/// The bytes of the file.
fn written(name: &str, picture: &ServedImage, answers: &[Answer]) -> Result<Vec<u8>> {
    let mut questions: Vec<&str> = Vec::new();
    for answer in answers {
        if !questions.contains(&answer.question.as_str()) {
            questions.push(&answer.question);
        }
    }
    let (volume, _) = picture.volume()?;
    let mut masks = Vec::new();
    for question in &questions {
        let (mut whole, mut drawn) = (Vec::new(), Vec::new());
        for answer in answers.iter().filter(|answer| answer.question == *question) {
            match &answer.content {
                AnswerContent::Slice(answer) => drawn.push((answer.view.slice, answer.current_mask().as_ref())),
                AnswerContent::Volume(answer) => whole.push(answer.mask.as_slice()),
            }
        }
        masks.push(picture.mask_of_volume(&whole, &drawn)?);
    }
    let segments: Vec<SegmentMask> =
        questions.iter().zip(&masks).map(|(name, mask)| SegmentMask { name, mask }).collect();
    write::encoded(FilePath::new(name), &segments, volume)
}
