//! Routes of questions and answers: ask, show, mask, overlay, corrections.

use super::app::{App, enqueue};
use super::asked::{self, Asked};
use super::failure::{HttpFailure, HttpResult, JsonResult, Params};
use super::images::png;
use super::mask_file;
use super::model::Question;
use super::options::{ALIVE_EVERY, MAX_TEXT};
use super::picture::{ServedImage, SliceView};
use super::upload::{self, uploaded};
use super::volume_question::without;
use super::worker::{QuestionProgress, QuestionScope, Queued};
use crate::data::sheet;
use crate::data::volume::Axis;
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::{DynamicImage, GrayImage};
use serde::Deserialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc::unbounded_channel;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// Query of the mask of an answer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AnswerMaskQuery {
    /// The slice, for an answer about all slices.
    slice: Option<usize>,
    /// The axis of the slice, if it is not that of the image.
    axis: Option<Axis>,
}

/// Query of the overlay of an answer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SliceQuery {
    /// The slice, for an answer about all slices.
    slice: Option<usize>,
}

/// A change of an answer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AnswerChange {
    /// The answer for training; `null` is the model's.
    corrected_answer: Option<String>,
}

/// Ids of an image and of an answer about it, in the address of a request.
type Ids = Path<(String, String)>;

fn too_long(what: &str) -> HttpFailure {
    let error = format!("the {what} is too long: at most {MAX_TEXT} characters are allowed");
    HttpFailure::new(StatusCode::PAYLOAD_TOO_LARGE, error, "ask a shorter question")
}

/// Streams the answer as server-sent events: `queued`, `started`, `mask`, `token` (for all slices `progress`), then
/// `result` or `error`.
pub(super) async fn ask(State(app): State<App>, Path(image): Path<String>, request: Request) -> HttpResult {
    let (asked, mask_file) = asked::receive(&app, request).await?;
    if asked.question.trim().is_empty() {
        return Err(HttpFailure::unprocessable("the question is empty", "ask for example: Where is the lesion?"));
    }
    if asked.question.chars().count() > MAX_TEXT {
        return Err(too_long("question"));
    }
    let picture = app.shared.store.picture(&image)?;
    if asked.volume.is_some() {
        without("mask", mask_file.is_some())?;
        without("keep", !asked.keep)?;
    }
    let mask = match mask_file {
        Some(file) => Some(asked::mask_of(&app, file, picture.size()).await?),
        None => None,
    };
    let keeps_answer = asked.keep;
    let (task, mask_bytes) = task_of(asked, mask, &picture, &app)?;
    if keeps_answer {
        app.shared.store.check_room(&image, mask_bytes)?;
    }
    let (progress, receiver) = unbounded_channel();
    let ahead = app.shared.metrics.waiting.load(Ordering::Relaxed) + app.shared.metrics.running.load(Ordering::Relaxed);
    enqueue(&app, Queued { image, picture, task, keeps_answer, progress })?;
    let queued = tokio_stream::once(event("queued", &json!({ "ahead": ahead })));
    let events = queued.chain(UnboundedReceiverStream::new(receiver).map(event_of)).map(Ok::<_, Infallible>);
    let events = Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE_EVERY));
    // nginx keeps an answer back otherwise
    Ok(([("x-accel-buffering", "no")], events).into_response())
}

/// The work for a question, and the bytes of its mask.
fn task_of(
    asked: Asked,
    mask: Option<Arc<GrayImage>>,
    picture: &ServedImage,
    app: &App,
) -> HttpResult<(QuestionScope, usize)> {
    let Asked { question, slice, window, max_new_tokens, volume, .. } = asked;
    let (most_tokens, intensities) = (app.options.max_new_tokens, &app.shared.intensities);
    let mut view = SliceView { slice: slice.unwrap_or(0), window };
    picture.check(view)?;
    view.window = intensities.window(picture, &question, window)?;
    if let Some(mut options) = volume {
        without("slice", slice.is_some())?;
        without("max_new_tokens", max_new_tokens.is_some())?;
        // an image has no axis, and is refused
        let (volume, _) = picture.volume()?;
        options.axis = intensities.axis(picture, &question, options.axis)?;
        let settings = options.settings(picture, question, view.window)?;
        return Ok((QuestionScope::Volume(settings), volume.grid.num_voxels()));
    }
    let max_new_tokens = max_new_tokens.map_or(most_tokens, |tokens| tokens.clamp(1, most_tokens));
    let (width, height) = picture.size();
    let question = Question { view, text: question, max_new_tokens, mask };
    Ok((QuestionScope::Slice(question), width as usize * height as usize))
}

fn event_of(progress: QuestionProgress) -> Event {
    match progress {
        QuestionProgress::Started => event("started", &json!({})),
        QuestionProgress::Mask { png, position } => {
            event("mask", &json!({ "png": BASE64_STANDARD.encode(png), "mask_position": position }))
        }
        QuestionProgress::Text(text) => event("token", &json!({ "text": text })),
        QuestionProgress::Slices { done, total } => event("progress", &json!({ "done": done, "total": total })),
        QuestionProgress::Done(answer) => event("result", &answer.json()),
        QuestionProgress::Failed(failure) => {
            let mut value = failure.json();
            value["status"] = json!(failure.status.as_u16());
            event("error", &value)
        }
    }
}

/// JSON has no line breaks outside of texts, and escapes them there.
fn event(name: &str, data: &Value) -> Event {
    Event::default().event(name).data(data.to_string())
}

pub(super) async fn show(State(app): State<App>, Path((image, answer)): Ids) -> JsonResult {
    Ok(Json(app.shared.store.answer(&image, &answer)?.1.json()))
}

pub(super) async fn remove(State(app): State<App>, Path((image, answer)): Ids) -> HttpResult<StatusCode> {
    app.shared.store.remove_answer(&image, &answer)?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn change(State(app): State<App>, Path((image, answer)): Ids, request: Request) -> JsonResult {
    let change: AnswerChange = upload::json(request).await?;
    let corrected = change.corrected_answer.map(|text| text.trim().to_owned());
    if corrected.as_ref().is_some_and(|text| text.chars().count() > MAX_TEXT) {
        return Err(too_long("answer"));
    }
    let corrected = corrected.filter(|text| !text.is_empty());
    let changed = app.shared.store.change(&image, &answer, |answer| answer.corrected_answer = corrected)?;
    Ok(Json(changed.json()))
}

/// The corrected mask if there is one, else the model's: 8-bit PNG with 0 and 255.
pub(super) async fn mask(
    State(app): State<App>,
    Path((image, answer)): Ids,
    Params(AnswerMaskQuery { slice, axis }): Params<AnswerMaskQuery>,
) -> HttpResult {
    let (picture, answer) = app.shared.store.answer(&image, &answer)?;
    app.work(move || {
        let (_, mask) = answer.slice(&picture, slice, axis)?;
        png(&DynamicImage::from((*mask).clone()))
    })
    .await
}

/// The image with the current mask drawn over it.
pub(super) async fn overlay(
    State(app): State<App>,
    Path((image, answer)): Ids,
    Params(SliceQuery { slice }): Params<SliceQuery>,
) -> HttpResult {
    let (picture, answer) = app.shared.store.answer(&image, &answer)?;
    app.work(move || {
        let (view, mask) = answer.slice(&picture, slice, None)?;
        png(&sheet::overlay(&picture.pixels(view)?.to_rgb8(), &mask, None)?.into())
    })
    .await
}

/// Replaces the mask by a user's: an image file of the size of the image.
pub(super) async fn correct(State(app): State<App>, Path((image, answer)): Ids, request: Request) -> JsonResult {
    let (picture, found) = app.shared.store.answer(&image, &answer)?;
    found.of_slice()?;
    let size = picture.size();
    let bytes = upload::receive(&app, request).await?;
    let max_pixels = app.options.max_pixels;
    let mask = app.work(move || mask_file::read(&bytes, uploaded(), size, max_pixels)).await?;
    let changed = app.shared.store.change(&image, &answer, |answer| answer.corrected = Some(Arc::new(mask)))?;
    Ok(Json(changed.json()))
}

/// Returns to the model's mask.
pub(super) async fn restore(State(app): State<App>, Path((image, answer)): Ids) -> JsonResult {
    Ok(Json(app.shared.store.change(&image, &answer, |answer| answer.corrected = None)?.json()))
}
