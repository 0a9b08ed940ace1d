//! Download of images and masks as a zip with the layout of a data root, for `prsmed train --extra`.

use super::answer::{Answer, AnswerContent};
use super::app::App;
use super::failure::{HttpFailure, HttpResult, Params};
use super::images::png_bytes;
use super::picture::ServedImage;
use crate::Error;
use crate::data::check::absent::named_location;
use crate::data::volume::Neighbours;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::IntoResponse;
use image::DynamicImage;
use serde::Deserialize;
use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Query of a download.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PairsQuery {
    /// Only this answer.
    answer: Option<String>,
    /// Class of the image; without it, the class that the model found most likely.
    class: Option<String>,
}

pub(super) async fn download(
    State(app): State<App>,
    Path(image): Path<String>,
    Params(query): Params<PairsQuery>,
) -> HttpResult {
    let (picture, mut answers) = app.shared.store.image(&image)?;
    if let Some(wanted) = &query.answer {
        // the error of an unknown answer, or of one about all slices
        app.shared.store.answer(&image, wanted)?.1.of_slice()?;
        answers.retain(|answer| answer.id == *wanted);
    }
    answers.retain(|answer| matches!(answer.content, AnswerContent::Slice(_)));
    if answers.is_empty() {
        let hint = "ask a question about the image first; of a volume, about one slice";
        return Err(HttpFailure::conflict("the image has no answers", hint));
    }
    if let Some(refusal) = answers.iter().find_map(contradiction) {
        return Err(refusal);
    }
    let classes = app.shared.classes.clone();
    if query.class.as_ref().is_some_and(|class| !classes.contains(class)) {
        let hint = format!("use one of {}", crate::error::quoted(&classes));
        return Err(HttpFailure::unprocessable("the model does not have this class", hint));
    }
    let context = app.shared.intensities.context();
    let bytes = app.work(move || Ok(archive((&picture, context), &answers, query.class.as_deref())?)).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/zip"),
        (header::CONTENT_DISPOSITION, "attachment; filename=\"prsmed-pairs.zip\""),
    ];
    Ok((headers, bytes).into_response())
}

/// Why an answer is no pair: its mask is empty, and its text says where the target is.
fn contradiction(answer: &Answer) -> Option<HttpFailure> {
    let slice = answer.of_slice().ok()?;
    let is_empty = slice.current_mask().iter().all(|value| *value == 0);
    let location = named_location(slice.corrected_answer.as_ref().unwrap_or(&slice.answer)).filter(|_| is_empty)?;
    let error =
        format!("the mask of the answer `{}` is empty, and its text names the location `{location}`", answer.id);
    let hint =
        "correct its text, for example to `There is no lesion in this image.`, or its mask, or remove the answer";
    Some(HttpFailure::conflict(error, hint))
}

/// A zip with an image, a mask and a row of `annotations/corrected.csv` for each answer.
///
/// # Errors
/// [`Error::Data`] if the name of the class cannot be the name of a folder.
fn archive(
    (picture, context): (&ServedImage, Neighbours),
    answers: &[Answer],
    class: Option<&str>,
) -> Result<Vec<u8>, Error> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let mut rows = csv::Writer::from_writer(Vec::new());
    let header = ["image_path", "question", "answer", "split", "present", "spacing_x_mm", "spacing_y_mm"];
    let header = &header[..if picture.spacing_mm.is_some() { 7 } else { 5 }];
    rows.write_record(header).map_err(|error| failed(error.into()))?;
    let of_slices = answers.iter().filter_map(|answer| Some((answer, answer.of_slice().ok()?)));
    for (Answer { id, question, .. }, answer) in of_slices {
        let class = folder_of(class.or(answer.class.as_ref().map(|class| class.name.as_str())))?;
        // as the model and its training read it
        let image = picture.pixels_with(answer.view, context)?;
        let mask = answer.current_mask();
        let path = |kind: &str| format!("{class}/train_{kind}/{id}.png");
        add(&mut zip, &path("images"), &png_bytes(&image)?)?;
        add(&mut zip, &path("masks"), &png_bytes(&DynamicImage::from((**mask).clone()))?)?;
        let is_present = mask.iter().any(|value| *value > 0);
        let text = answer.corrected_answer.as_ref().unwrap_or(&answer.answer);
        let spacing = picture.spacing_mm.map(|spacing| spacing.map(|mm| mm.to_string()));
        let mut row = vec![path("masks"), question.clone(), text.clone(), "train".to_owned()];
        row.push(u8::from(is_present).to_string());
        row.extend(spacing.into_iter().flatten());
        rows.write_record(&row).map_err(|error| failed(error.into()))?;
    }
    let rows = rows.into_inner().map_err(|error| failed(error.into_error()))?;
    add(&mut zip, "annotations/corrected.csv", &rows)?;
    let done = zip.finish().map_err(|error| failed(error.into()))?;
    Ok(done.into_inner())
}

fn add(zip: &mut ZipWriter<Cursor<Vec<u8>>>, name: &str, bytes: &[u8]) -> Result<(), Error> {
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    zip.start_file(name, stored).map_err(|error| failed(error.into()))?;
    zip.write_all(bytes).map_err(failed)
}

fn failed(source: std::io::Error) -> Error {
    Error::Io { path: "prsmed-pairs.zip".into(), action: "write", source }
}

/// The name of a class as a folder. Names of classes come from the folders of a data root, but a run can have any.
fn folder_of(class: Option<&str>) -> Result<&str, Error> {
    let class = class.unwrap_or("unknown");
    let is_name = !class.is_empty() && !class.starts_with('.') && !class.contains(['/', '\\', ':', '\0']);
    if is_name {
        return Ok(class);
    }
    let hint = "train with other class names";
    Err(Error::data("model.json", "the name of the class cannot be the name of a folder", hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_that_leave_their_folder_are_refused() {
        assert_eq!(folder_of(Some("brain_MRI")).unwrap(), "brain_MRI");
        assert_eq!(folder_of(None).unwrap(), "unknown");
        for bad in ["", "..", "../a", "a/b", "a\\b", ".hidden", "c:"] {
            assert!(folder_of(Some(bad)).is_err(), "{bad}");
        }
    }
}
