//! Medical volumes: NIfTI and DICOM uploads, and the mask of a volume as a file.

use super::answer::{Answer, Content};
use super::app::App;
use super::failure::{Failure, Reply, query_of};
use super::options::MAX_VOLUME;
use super::picture::Picture;
use super::upload::{Upload, uploaded};
use crate::data::volume::{self, Segment, Volume, write};
use crate::{Error, Result};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Deserialize;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path as FilePath, PathBuf};

/// Reads NIfTI (also compressed), DICOM, or a zip of one DICOM series.
///
/// # Errors
/// [`Error::Data`] for another file; as [`volume::open`].
pub(super) fn read(bytes: Upload) -> Result<Volume> {
    let file = InMemory::new(&bytes)?;
    drop(bytes);
    if !volume::is_volume(&file.path)? {
        let reason = "is not a PNG, JPEG or TIFF image, nor a NIfTI or DICOM file";
        return Err(Error::data(uploaded(), reason, "convert an image to PNG, and a volume to NIfTI"));
    }
    volume::open_within(&file.path, MAX_VOLUME).map_err(|error| without_path(error, &file.path))
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
            } else if hint.contains("--geometry") {
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
pub(super) struct MaskQuery {
    /// The answers to this question only.
    question: Option<String>,
}

pub(super) async fn nifti(
    State(app): State<App>,
    Path(image): Path<String>,
    query: std::result::Result<Query<MaskQuery>, QueryRejection>,
) -> Reply {
    file(&app, &image, query_of(query)?, "mask.nii.gz").await
}

pub(super) async fn seg(
    State(app): State<App>,
    Path(image): Path<String>,
    query: std::result::Result<Query<MaskQuery>, QueryRejection>,
) -> Reply {
    file(&app, &image, query_of(query)?, "mask.dcm").await
}

/// The masks of the answers on the grid of the volume: one segment for each question, in the order of the questions.
async fn file(app: &App, image: &str, query: MaskQuery, name: &'static str) -> Reply {
    let (picture, mut answers) = app.shared.store.image(image)?;
    answers.retain(|answer| query.question.as_ref().is_none_or(|question| *question == answer.question));
    if answers.is_empty() {
        let hint = "ask a question about the volume first";
        return Err(Failure::new(StatusCode::CONFLICT, "the volume has no such answers", hint));
    }
    let bytes = app.work(move || Ok(written(name, &picture, &answers)?)).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{name}\"")),
    ];
    Ok((headers, bytes).into_response())
}

/// The bytes of the file.
fn written(name: &str, picture: &Picture, answers: &[Answer]) -> Result<Vec<u8>> {
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
                Content::Slice(answer) => drawn.push((answer.view.slice, answer.current_mask().as_ref())),
                Content::Volume(answer) => whole.push(answer.mask.as_slice()),
            }
        }
        masks.push(picture.mask_of_volume(&whole, &drawn)?);
    }
    let segments: Vec<Segment> = questions.iter().zip(&masks).map(|(name, mask)| Segment { name, mask }).collect();
    write::encoded(FilePath::new(name), &segments, volume)
}
