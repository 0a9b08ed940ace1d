//! Requests that fail: a status, the error and what to do, as JSON.

use crate::Error;
use axum::Json;
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A request that fails.
#[derive(Debug)]
pub(super) struct HttpFailure {
    pub(super) status: StatusCode,
    pub(super) error: String,
    pub(super) hint: String,
    retry_after_s: Option<u64>,
}

/// Result of a request.
pub(super) type HttpResult<T = Response> = Result<T, HttpFailure>;

/// Result of a request whose response is JSON.
pub(super) type JsonResult = HttpResult<Json<Value>>;

impl HttpFailure {
    pub(super) fn new(status: StatusCode, error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { status, error: error.into(), hint: hint.into(), retry_after_s: None }
    }

    /// A request that may succeed after some seconds.
    pub(super) fn busy(error: impl Into<String>, retry_after_s: u64) -> Self {
        let hint = format!("ask again in {retry_after_s} s");
        let retry_after_s = Some(retry_after_s);
        Self { status: StatusCode::TOO_MANY_REQUESTS, error: error.into(), hint, retry_after_s }
    }

    /// A request whose content cannot be followed.
    pub(super) fn unprocessable(error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, error, hint)
    }

    /// A request that what is stored does not allow.
    pub(super) fn conflict(error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, error, hint)
    }

    pub(super) fn not_found(error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, error, hint)
    }

    pub(super) fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error, "see /api/openapi.json")
    }

    /// Values of a request that have other types than they must have, without the names of types of this program.
    pub(super) fn of_values(status: StatusCode, error: &str) -> Self {
        const TYPES: [(&str, &str); 6] = [
            ("usize", "a whole number from 0"),
            ("u64", "a whole number from 0"),
            ("u32", "a whole number from 0"),
            ("i64", "a whole number"),
            ("f64", "a number"),
            ("f32", "a number"),
        ];
        let mut text = TYPES.into_iter().fold(error.to_owned(), |text, (name, words)| {
            text.replace(&format!("expected {name}"), &format!("expected {words}"))
        });
        if let Some((before, after)) = error.split_once("expected struct ") {
            text = format!("{before}expected an object{}", after.trim_start_matches(char::is_alphanumeric));
        }
        Self::new(status, text, "see /api/openapi.json")
    }

    /// The content of an error, also for the stream of an answer.
    pub(super) fn json(&self) -> Value {
        json!({ "error": self.error, "hint": self.hint })
    }
}

/// The parameters of a query, or an error in the server's form.
pub(super) struct Params<T>(pub(super) T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = HttpFailure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> HttpResult<Self> {
        let fields = Query::try_from_uri(&parts.uri).map(|Query(fields)| Self(fields));
        fields.map_err(|rejection| HttpFailure::of_values(StatusCode::BAD_REQUEST, &rejection.body_text()))
    }
}

impl From<Error> for HttpFailure {
    fn from(error: Error) -> Self {
        let (status, hint) = match &error {
            // the hint of the command line is about training
            Error::OutOfMemory { .. } => (
                StatusCode::SERVICE_UNAVAILABLE,
                "close other programs that use this device, or use a smaller image".into(),
            ),
            Error::Interrupted => (StatusCode::SERVICE_UNAVAILABLE, "the server stops; ask again when it runs".into()),
            Error::Config { .. } | Error::Argument { .. } | Error::Data { .. } | Error::Shape { .. } => {
                (StatusCode::UNPROCESSABLE_ENTITY, error.hint())
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, error.hint()),
        };
        Self::new(status, error.to_string(), hint)
    }
}

impl IntoResponse for HttpFailure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_values_are_named_in_words() {
        let fields = Query::<std::collections::HashMap<String, usize>>::try_from_uri(&"/?slice=-1".parse().unwrap());
        let query = fields.unwrap_err().body_text();
        let json = serde_json::from_str::<Vec<f32>>("[\"a\"]").unwrap_err().to_string();
        for (error, expected) in [
            ("invalid type: string \"first\", expected usize", "expected a whole number from 0"),
            (json.as_str(), "expected a number at line 1"),
            ("invalid type: null, expected struct Asked at line 1", "null, expected an object at line 1"),
            (query.as_str(), "slice"),
        ] {
            let text = HttpFailure::of_values(StatusCode::BAD_REQUEST, error).error;
            assert!(text.contains(expected) && !text.contains("usize") && !text.contains("f32"), "{text}");
        }
    }
}
