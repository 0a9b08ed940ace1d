//! Files that clients send: bounded in bytes and time, also if a client stops half-way.

use super::app::App;
use super::failure::{Failure, Reply};
use super::options::{UPLOAD_PAUSE, UPLOAD_TIME};
use crate::Error;
use axum::body::{Body, BodyDataStream, HttpBody};
use axum::http::StatusCode;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::StreamExt;

/// Longest time for the rest of a file that is too large, so that the client can read the answer.
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// Receives a file of at most `Options::max_upload` bytes.
pub(super) async fn receive(app: &App, body: Body) -> Reply<Vec<u8>> {
    let Ok(_permit) = app.transfers.try_acquire() else {
        return Err(Failure::busy("too many files are sent at the same time", 5));
    };
    let limit = app.options.max_upload;
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut stream = body.into_data_stream();
    if announced > limit {
        return Err(too_large(stream, limit).await);
    }
    let end = Instant::now() + UPLOAD_TIME;
    let mut bytes = Vec::with_capacity(announced);
    loop {
        let piece = timeout_at(end, timeout(UPLOAD_PAUSE, stream.next()));
        match piece.await {
            Ok(Ok(Some(Ok(piece)))) if bytes.len() + piece.len() > limit => return Err(too_large(stream, limit).await),
            Ok(Ok(Some(Ok(piece)))) => bytes.extend_from_slice(&piece),
            Ok(Ok(Some(Err(_)))) => return Err(Failure::bad_request("the file is incomplete: the connection ended")),
            Ok(Ok(None)) if bytes.is_empty() => {
                let hint = "send the content of the image file as the body of the request";
                return Err(Failure::new(StatusCode::BAD_REQUEST, "the file is empty", hint));
            }
            Ok(Ok(None)) => return Ok(bytes),
            Ok(Err(_)) => return Err(slow(format!("no data arrived for {} s", UPLOAD_PAUSE.as_secs()))),
            Err(_) => return Err(slow(format!("the file took longer than {} s", UPLOAD_TIME.as_secs()))),
        }
    }
}

fn slow(error: String) -> Failure {
    Failure::new(StatusCode::REQUEST_TIMEOUT, error, "check the connection and send the file again")
}

/// Reads the rest for a while: a client that is cut off while it writes does not read the answer.
async fn too_large(mut stream: BodyDataStream, limit: usize) -> Failure {
    let rest = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = timeout(DISCARD_TIME, rest).await;
    let mib = limit as f64 / f64::from(1 << 20);
    let error = format!("the file is too large: at most {mib:.1} MiB are allowed");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, error, "make it smaller, or start the server with `--max-upload`")
}

/// Name of an uploaded file in errors: the server does not know or keep the user's file name.
pub(super) fn uploaded() -> &'static Path {
    Path::new("the uploaded file")
}

/// The error of an uploaded file; the hints of data sets are about their rows.
pub(super) fn refused(error: Error) -> Failure {
    let is_broken = matches!(&error, Error::Data { hint, .. } if hint.contains("row"));
    let mut failure = Failure::from(error);
    if is_broken {
        failure.hint = "send another file".into();
    }
    failure
}
