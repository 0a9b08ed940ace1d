//! Medical volumes: NIfTI and DICOM uploads, and the mask of a volume as a file.

use super::answer::{Answer, Content};
use super::app::App;
use super::failure::{Failure, Reply, query_of};
use super::picture::Picture;
use super::upload::uploaded;
use crate::data::volume::{self, Segment, Volume, write};
use crate::{Error, Result, files};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde::Deserialize;
use std::path::Path as FilePath;

/// Reads NIfTI (also compressed), DICOM, or a zip of one DICOM series; `None` for other files, such as PNG.
///
/// The file is written to the temporary folder of the system while it is read.
///
/// # Errors
/// As [`volume::open`].
pub(super) fn read(bytes: &[u8]) -> Result<Option<Volume>> {
    // a compressed NIfTI file is known by its name
    let name = if bytes.starts_with(&[0x1f, 0x8b]) { "volume.nii.gz" } else { "volume" };
    let folder = tempfile::tempdir().map_err(Error::io(std::env::temp_dir(), "create a folder in"))?;
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).map_err(Error::io(&path, "write"))?;
    if !volume::is_volume(&path)? {
        return Ok(None);
    }
    volume::open(&path).map(Some).map_err(|error| without_path(error, &path))
}

/// The error without the path of the temporary file.
fn without_path(error: Error, path: &FilePath) -> Error {
    let clean = |text: &str| text.replace(&path.display().to_string(), "the file").replace("the file#", "volume ");
    match error {
        Error::Data { line, reason, hint, .. } => {
            // the command line can choose one of several volumes or series
            let hint = if hint.contains('#') { "send a file with one volume or series".into() } else { clean(&hint) };
            Error::Data { path: uploaded().into(), line, reason: clean(&reason), hint }
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
    let folder = tempfile::tempdir().map_err(Error::io(std::env::temp_dir(), "create a folder in"))?;
    let path = folder.path().join(FilePath::new(name));
    write::segments(&path, &segments, volume)?;
    files::read(&path, u64::MAX).map_err(Error::io(&path, "read"))
}
