//! Requests that fail: a status, the error and what to do, as JSON.

use crate::Error;
use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// A request that fails.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) status: StatusCode,
    pub(super) error: String,
    pub(super) hint: String,
    retry_after_s: Option<u64>,
}

/// Result of a request.
pub(super) type Reply<T = Response> = Result<T, Failure>;

impl Failure {
    pub(super) fn new(status: StatusCode, error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { status, error: error.into(), hint: hint.into(), retry_after_s: None }
    }

    /// A request that may succeed after some seconds.
    pub(super) fn busy(error: impl Into<String>, retry_after_s: u64) -> Self {
        let hint = format!("ask again in {retry_after_s} s");
        let retry_after_s = Some(retry_after_s);
        Self { status: StatusCode::TOO_MANY_REQUESTS, error: error.into(), hint, retry_after_s }
    }

    pub(super) fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error, "see /api/openapi.json")
    }

    /// The content of an error, also for the stream of an answer.
    pub(super) fn json(&self) -> serde_json::Value {
        json!({ "error": self.error, "hint": self.hint })
    }
}

/// The fields of a query, or an error in the server's form.
pub(super) fn query_of<T>(query: Result<Query<T>, QueryRejection>) -> Reply<T> {
    query.map(|Query(query)| query).map_err(|rejection| Failure::bad_request(rejection.body_text()))
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::Config { .. } | Error::Argument { .. } | Error::Data { .. } | Error::Shape { .. } => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            Error::OutOfMemory { .. } | Error::Interrupted => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let hint = match &error {
            // the hint of the command line is about training
            Error::OutOfMemory { .. } => "close other programs that use this device, or use a smaller image".to_owned(),
            Error::Interrupted => "the server stops; ask again when it runs".to_owned(),
            other => other.hint(),
        };
        Self::new(status, error.to_string(), hint)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
