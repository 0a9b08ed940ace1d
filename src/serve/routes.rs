//! Routes of the server. `docs/reference/openapi.json` describes them.

use super::app::App;
use super::failure::HttpFailure;
use super::metrics::Gauges;
use super::options::{ALIVE_EVERY, MAX_ANSWERS, MAX_EXAMPLES, MAX_TEXT};
use super::{access, answers, guards, images, page, pairs, volumes};
use crate::tensor::{Device, ledger, memory};
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::uri::PathAndQuery;
use axum::http::{StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

/// All routes, below the path of the page.
pub(super) fn router(app: App) -> Router {
    let base = app.options.base_path.clone();
    let routes = routes(app);
    if base.is_empty() {
        return routes;
    }
    // a layer of the routes themselves would run after they are chosen
    Router::new().fallback_service(routes).layer(from_fn_with_state(base, below))
}

/// Removes the path of the page from the address.
async fn below(State(base): State<String>, mut request: Request, next: Next) -> Response {
    let address = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
    let rest = match address.strip_prefix(&base) {
        Some(rest) if rest.starts_with('/') => rest.parse::<Uri>().ok(),
        Some("") => {
            return Redirect::permanent(&format!("{}/", base.rsplit('/').next().unwrap_or_default())).into_response();
        }
        _ => None,
    };
    let Some(rest) = rest else { return unknown().await.into_response() };
    *request.uri_mut() = rest;
    next.run(request).await
}

fn routes(app: App) -> Router {
    volumes::routes(Router::new())
        .route("/", get(async || page::send("index.html")))
        .route("/page/{*file}", get(async |Path(file): Path<String>| page::send(&file)))
        .route("/metrics", get(metrics))
        .route("/api/health", get(async || Json(json!({ "status": "ok" }))))
        .route("/api/openapi.json", get(page::openapi))
        .route("/api/model", get(model))
        .route("/api/sample", get(images::sample))
        .route("/api/images", post(images::upload))
        .route("/api/images/{image}", get(images::show).delete(images::remove))
        .route("/api/images/{image}/pixels", get(images::pixels))
        .route("/api/images/{image}/questions", post(answers::ask))
        .route("/api/images/{image}/pairs.zip", get(pairs::download))
        .route(
            "/api/images/{image}/answers/{answer}",
            get(answers::show).patch(answers::change).delete(answers::remove),
        )
        .route(
            "/api/images/{image}/answers/{answer}/mask",
            get(answers::mask).put(answers::correct).delete(answers::restore),
        )
        .route("/api/images/{image}/answers/{answer}/overlay", get(answers::overlay))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown)
        // every body is read by `upload`, which limits it
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn(guards::caught))
        .layer(from_fn_with_state(app.clone(), access::check))
        .layer(from_fn(guards::read_out))
        .layer(from_fn_with_state(app.clone(), guards::count))
        .layer(from_fn(guards::secure))
        .with_state(app)
}

async fn unknown() -> HttpFailure {
    HttpFailure::not_found("there is no such address", "see /api/openapi.json")
}

async fn wrong_method(request: Request) -> HttpFailure {
    let word = request.method().as_str().chars().filter(char::is_ascii_alphanumeric).take(20);
    let error = format!("the method {} is not possible here", word.collect::<String>());
    HttpFailure::new(StatusCode::METHOD_NOT_ALLOWED, error, "see /api/openapi.json")
}

/// What the page and scripts need to know: classes, threshold, limits.
async fn model(State(app): State<App>) -> Json<Value> {
    let options = &app.options;
    Json(json!({
        "name": options.name,
        "version": env!("CARGO_PKG_VERSION"),
        "classes": app.shared.classes,
        "calibration": app.shared.calibration,
        "questions": app.shared.questions.as_ref().map(|questions| questions.examples(MAX_EXAMPLES)).unwrap_or_default(),
        "reads_masks": app.shared.reads_masks,
        "sequences": app.shared.intensities.sequences().iter().map(|sequence| &sequence.name).collect::<Vec<_>>(),
        "has_sample": options.sample.is_some() && app.shared.intensities.sequences().is_empty(),
        "notice": "research software, not a medical device",
        "limits": {
            "upload_bytes": options.max_upload,
            "image_pixels": options.max_pixels,
            "question_characters": MAX_TEXT,
            "answers_per_image": MAX_ANSWERS,
            "images": options.max_images,
            "minutes_in_memory": options.keep.as_secs_f64() / 60.0,
            "new_tokens": options.max_new_tokens,
            "queue": options.queue,
            "question_seconds": options.time_limit.as_secs(),
            "alive_seconds": ALIVE_EVERY.as_secs(),
        },
    }))
}

async fn metrics(State(app): State<App>) -> Response {
    let (images, image_bytes) = app.shared.store.usage();
    let resident = memory::read(Device::Cpu).map_or(0, |reading| reading.system.resident.0);
    let tensor_bytes = ledger::usage().allocated.0;
    let text = app.shared.metrics.text(&Gauges { images, image_bytes, resident_bytes: resident, tensor_bytes });
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_openapi_file_describes_every_route() {
        let code = include_str!("routes.rs");
        let pattern = regex::Regex::new(r#"\.route\(\s*"([^"]+)",\s*([^;]*?)\n?\s*\)\n"#).unwrap();
        let methods = regex::Regex::new(r"\b(get|post|put|patch|delete)\(").unwrap();
        let mut routes = BTreeSet::new();
        for route in pattern.captures_iter(code.split("#[cfg(test)]").next().unwrap()) {
            for method in methods.captures_iter(&route[2]) {
                routes.insert((route[1].to_owned(), method[1].to_owned()));
            }
        }
        let endings = crate::data::volume::format::usual_endings();
        routes.extend(endings.map(|ending| (format!("/api/images/{{image}}/mask.{ending}"), "get".to_owned())));
        // the page is no part of the interface
        routes.retain(|(path, _)| path != "/" && !path.starts_with("/page/"));
        assert!(routes.len() > 14, "{routes:?}");
        let openapi: Value = serde_json::from_str(page::OPENAPI).unwrap();
        let mut described = BTreeSet::new();
        for (path, operations) in openapi["paths"].as_object().unwrap() {
            for method in operations.as_object().unwrap().keys().filter(|key| *key != "parameters") {
                described.insert((path.clone(), method.clone()));
            }
        }
        assert_eq!(routes, described);
    }
}
