//! Routes of images: upload, show, pixels of a view, remove.

use super::answer::Answer;
use super::app::App;
use super::failure::{HttpFailure, HttpResult, JsonResult, Params};
use super::picture::{ServedImage, SliceView};
use super::upload::{self, refused, uploaded};
use super::{sequences, volumes};
use crate::Error;
use crate::data::volume::{Axis, Window};
use crate::data::{decode, sheet};
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::IntoResponse;
use image::DynamicImage;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path as FilePath;

/// Header with width and level of a view, such as `400/40`.
const WINDOW: HeaderName = HeaderName::from_static("prsmed-window");

/// Query of an upload.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UploadQuery {
    /// Size of a pixel in mm, across.
    spacing_x_mm: Option<f64>,
    /// Size of a pixel in mm, down.
    spacing_y_mm: Option<f64>,
}

impl UploadQuery {
    fn spacing_mm(&self) -> HttpResult<Option<[f64; 2]>> {
        let is_size = |mm: f64| mm.is_finite() && mm > 0.0 && mm < 1e6;
        match (self.spacing_x_mm, self.spacing_y_mm) {
            (None, None) => Ok(None),
            (Some(x), Some(y)) if is_size(x) && is_size(y) => Ok(Some([x, y])),
            _ => {
                let hint = "give `spacing_x_mm` and `spacing_y_mm`, both above 0, or neither";
                Err(HttpFailure::unprocessable("the size of a pixel is not complete", hint))
            }
        }
    }
}

/// Query of the pixels of an image.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ViewQuery {
    #[serde(default)]
    slice: usize,
    /// Of the slice, if it is not that of the image.
    axis: Option<Axis>,
    window: Option<Window>,
}

pub(super) async fn upload(State(app): State<App>, Params(query): Params<UploadQuery>, request: Request) -> HttpResult {
    let spacing_mm = query.spacing_mm()?;
    let sequences = app.shared.intensities.sequences().to_vec();
    let picture = if sequences.is_empty() {
        one_file(&app, request, spacing_mm).await?
    } else {
        sequences::upload(&app, request, sequences, spacing_mm).await?
    };
    let id = app.shared.store.add(picture);
    let (picture, answers) = app.shared.store.image(&id)?;
    // relative, so that it holds behind a proxy with another path
    let location = format!("images/{id}");
    let image = json_of(&app, &id, &picture, &answers);
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(image)).into_response())
}

/// Receives and reads an image or a volume.
async fn one_file(app: &App, request: Request, spacing_mm: Option<[f64; 2]>) -> HttpResult<ServedImage> {
    let bytes = upload::receive(app, request).await?;
    let (max_pixels, shown) = (app.options.max_pixels, app.options.shown);
    if decode::is_image(&bytes) {
        let read = move || {
            let pixels = decode::image_of(&bytes, uploaded(), max_pixels).map_err(refused)?;
            Ok(ServedImage::new(pixels, spacing_mm))
        };
        app.work(read).await
    } else {
        // the semaphore is never closed
        let _one = app.volumes.acquire().await.ok();
        app.work(move || Ok(ServedImage::of_volume(volumes::read(bytes, max_pixels)?, shown)?)).await
    }
}

/// The file that the page offers to try.
pub(super) async fn sample(State(app): State<App>) -> HttpResult {
    let Some(bytes) = app.options.sample.clone() else {
        return Err(HttpFailure::not_found("there is no sample image", "start the server with `--sample FILE`"));
    };
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response())
}

pub(super) async fn show(State(app): State<App>, Path(image): Path<String>) -> JsonResult {
    let (picture, answers) = app.shared.store.image(&image)?;
    Ok(Json(json_of(&app, &image, &picture, &answers)))
}

fn json_of(app: &App, id: &str, picture: &ServedImage, answers: &[Answer]) -> Value {
    let (width, height) = picture.size();
    json!({
        "id": id,
        "width": width,
        "height": height,
        "slices": picture.slices(),
        "axis": picture.axis(),
        "directions": picture.directions(),
        "window": picture.window(),
        "window_choices": app.shared.intensities.choices(picture),
        "exports": picture.exports(),
        "notes": picture.notes(),
        "spacing_mm": picture.spacing_mm,
        "sequences": picture.sequences(),
        "answers": answers.iter().map(Answer::json).collect::<Vec<_>>(),
    })
}

pub(super) async fn remove(State(app): State<App>, Path(image): Path<String>) -> HttpResult<StatusCode> {
    app.shared.store.remove(&image)?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn pixels(
    State(app): State<App>,
    Path(image): Path<String>,
    Params(ViewQuery { slice, axis, window }): Params<ViewQuery>,
) -> HttpResult {
    let view = SliceView { slice, window };
    let picture = app.shared.store.picture(&image)?;
    let shown = move || {
        let mut response = match axis {
            Some(axis) => png(&picture.pixels_along(axis, view)?)?,
            None => png(&*picture.pixels(view)?)?,
        };
        if let Some([width, level]) = picture.width_and_level(view)? {
            let value = HeaderValue::from_str(&format!("{width}/{level}")).expect("two numbers");
            response.headers_mut().insert(WINDOW, value);
        }
        Ok(response)
    };
    app.work(shown).await
}

/// The response with an image as PNG.
pub(super) fn png(image: &DynamicImage) -> HttpResult {
    Ok(([(header::CONTENT_TYPE, "image/png")], png_bytes(image)?).into_response())
}

/// An image as a PNG file.
pub(super) fn png_bytes(image: &DynamicImage) -> Result<Vec<u8>, Error> {
    sheet::encode(image, FilePath::new("image.png"))
}
