//! The page: plain HTML, CSS and JavaScript files that are part of the program.

use super::failure::{HttpFailure, HttpResult};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use rust_embed::RustEmbed;

/// Description of the routes.
pub(super) const OPENAPI: &str = include_str!("../../docs/reference/openapi.json");

#[derive(RustEmbed)]
#[folder = "src/serve/page/"]
struct Files;

pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

/// A file of the page.
pub(super) fn send(name: &str) -> HttpResult {
    let kind = match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => return Err(missing()),
    };
    let file = Files::get(name).ok_or_else(missing)?;
    Ok(([(header::CONTENT_TYPE, kind)], file.data).into_response())
}

fn missing() -> HttpFailure {
    HttpFailure::not_found("the page has no such file", "open the address `/`")
}
