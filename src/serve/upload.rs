//! What clients send: bounded in bytes and time, also if a client stops half-way. A file is the body of a request, or the
//! one file of a form, as `curl -F` sends it.

use super::app::App;
use super::failure::{HttpFailure, HttpResult};
use super::form::Part;
use super::options::{HEAD_TIME, MAX_JSON, UPLOAD_PAUSE, UPLOAD_TIME};
use super::{form, guards};
use crate::Error;
use crate::data::decode;
use axum::Json;
use axum::body::{Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::{Stream, StreamExt};

/// Longest time for the rest of a file that is too large, so that the client can read the answer.
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// A file in memory. It takes its share of the room for all files until it is dropped.
pub(super) struct Upload {
    bytes: Vec<u8>,
    /// Where the file is in `bytes`: a form has more.
    file: Range<usize>,
    _room: Option<OwnedSemaphorePermit>,
}

impl Deref for Upload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.file.clone()]
    }
}

/// Kind of a body, and the most bytes that it may have.
#[derive(Debug, Clone, Copy)]
enum Content {
    File(usize),
    /// The bytes of its file. The rest may have [`MAX_JSON`] more.
    Form(usize),
    Json,
}

impl Content {
    fn limit(self) -> usize {
        match self {
            Self::File(limit) => limit,
            Self::Form(limit) => limit.saturating_add(MAX_JSON),
            Self::Json => MAX_JSON,
        }
    }

    fn too_large(self) -> HttpFailure {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let (error, hint) = match self {
            Self::File(limit) => (
                format!("the file is too large: at most {:.1} MiB are allowed", mib(limit)),
                "make it smaller, or start the server with `--max-upload`",
            ),
            Self::Form(limit) => (
                format!(
                    "the form is too large: at most {:.1} MiB are allowed for its file, and {} KiB for the rest",
                    mib(limit),
                    MAX_JSON >> 10
                ),
                "make the file smaller, start the server with `--max-upload`, or send less text beside the file",
            ),
            Self::Json => (
                format!("the request is too long: at most {} KiB are allowed", MAX_JSON >> 10),
                "ask a shorter question",
            ),
        };
        HttpFailure::new(StatusCode::PAYLOAD_TOO_LARGE, error, hint)
    }
}

/// Receives a file of at most `ServeOptions::max_upload` bytes.
pub(super) async fn receive(app: &App, request: Request) -> HttpResult<Upload> {
    let content_type = content_type(request.headers());
    let boundary = boundary_of(&request).map_err(of_form)?;
    let mut upload = body_of(app, request, boundary.is_some()).await?;
    if let Some(boundary) = boundary {
        upload.file = form::file(&upload, &boundary).map_err(of_form)?;
        check_parts(app, &upload)?;
    }
    if upload.is_empty() {
        let hint = "send the content of the image file as the body of the request";
        return Err(HttpFailure::new(StatusCode::BAD_REQUEST, "the file is empty", hint));
    }
    if content_type.to_ascii_lowercase().starts_with("application/json") && upload.starts_with(b"{") {
        let error = "the body is JSON, and must be the file itself";
        return Err(HttpFailure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, error, FORM_HINT));
    }
    Ok(upload)
}

/// Receives a form with fields of text, and at most one file of at most `ServeOptions::max_upload` bytes: the fields, and
/// the name of the file's field with the file.
pub(super) async fn receive_form(
    app: &App,
    request: Request,
    boundary: &str,
) -> HttpResult<(Vec<(String, String)>, Option<(String, Upload)>)> {
    let mut upload = body_of(app, request, true).await?;
    let parts = form::parts(&upload, boundary).map_err(of_question)?;
    let (files, texts): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(|part| part.is_file);
    upload.file = match files.as_slice() {
        [] => 0..0,
        [file] => file.content.clone(),
        _ => return Err(of_question("the form has several files".into())),
    };
    check_parts(app, &upload)?;
    let text_of = |part: Part| match std::str::from_utf8(&upload.bytes[part.content]) {
        Ok(text) => Ok((part.name, text.to_owned())),
        Err(_) => Err(not_text(&part.name)),
    };
    let texts = texts.into_iter().map(text_of).collect::<HttpResult<_>>()?;
    Ok((texts, files.into_iter().next().map(|file| (file.name, upload))))
}

/// The files of a form, with its fields of text.
pub(super) struct FormFiles {
    /// Names and contents.
    pub(super) texts: Vec<(String, String)>,
    /// Names, and where the files are in the form.
    pub(super) files: Vec<(String, Range<usize>)>,
    body: Upload,
}

impl FormFiles {
    /// The content of a file by its number.
    pub(super) fn file(&self, number: usize) -> &[u8] {
        &self.body.bytes[self.files[number].1.clone()]
    }
}

/// Receives a form with several files of at most `ServeOptions::max_upload` bytes together.
pub(super) async fn receive_files(app: &App, request: Request, boundary: &str) -> HttpResult<FormFiles> {
    let mut body = body_of(app, request, true).await?;
    body.file = 0..0;
    let parts = form::parts(&body.bytes, boundary).map_err(of_form)?;
    let (files, texts): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(|part| part.is_file);
    let length: usize = files.iter().map(|file| file.content.len()).sum();
    let limit = app.options.max_upload;
    if length > limit {
        return Err(Content::File(limit).too_large());
    }
    if body.bytes.len() - length > MAX_JSON {
        return Err(Content::Form(limit).too_large());
    }
    if let Some(empty) = files.iter().find(|file| file.content.is_empty()) {
        let error = format!("the file `{}` is empty", empty.name);
        return Err(HttpFailure::new(StatusCode::BAD_REQUEST, error, "send the content of the image file"));
    }
    let text = |part: Part| (part.name, String::from_utf8_lossy(&body.bytes[part.content]).into_owned());
    let texts = texts.into_iter().map(text).collect();
    let files = files.into_iter().map(|part| (part.name, part.content)).collect();
    Ok(FormFiles { texts, files, body })
}

/// The line that separates the parts of a request that is a form.
pub(super) fn boundary_of(request: &Request) -> Result<Option<String>, String> {
    form::boundary(&content_type(request.headers()))
}

/// The failure of a field of text whose bytes are none.
fn not_text(name: &str) -> HttpFailure {
    let error = format!("the field `{name}` of the form has no file name and is not UTF-8 text");
    let hint =
        format!("send a file with a name: `curl -F {name}=@mask.png`, that is `filename=` in `Content-Disposition`");
    HttpFailure::new(StatusCode::BAD_REQUEST, error, hint)
}

/// Receives the body of a file, or of a form with one.
async fn body_of(app: &App, request: Request, is_form: bool) -> HttpResult<Upload> {
    let Ok(_permit) = app.transfers.try_acquire() else {
        return Err(HttpFailure::busy("too many files are sent at the same time", 5));
    };
    let (limit, end) = (app.options.max_upload, Instant::now() + UPLOAD_TIME);
    let announced = usize::try_from(request.body().size_hint().lower()).unwrap_or(usize::MAX);
    check_encoding(request.headers())?;
    let content = if is_form { Content::Form(limit) } else { Content::File(limit) };
    let waits = guards::waits_to_send(request.headers());
    let stream = request.into_body().into_data_stream();
    if announced > content.limit() {
        // a client that waits for `100 Continue` reads the answer before it sends anything
        return Err(if waits { content.too_large() } else { too_large(stream, content).await });
    }
    collect(stream, (content, end), Some(&app.room)).await
}

/// Checks the sizes of a form's file and of all else in it.
fn check_parts(app: &App, upload: &Upload) -> HttpResult<()> {
    let limit = app.options.max_upload;
    if upload.len() > limit {
        return Err(Content::File(limit).too_large());
    }
    if upload.bytes.len() - upload.len() > MAX_JSON {
        return Err(Content::Form(limit).too_large());
    }
    Ok(())
}

/// Refuses compressed bodies.
fn check_encoding(headers: &HeaderMap) -> HttpResult<()> {
    let encoding = headers.get(header::CONTENT_ENCODING).map(|value| String::from_utf8_lossy(value.as_bytes()));
    if let Some(encoding) = encoding.filter(|encoding| !encoding.eq_ignore_ascii_case("identity")) {
        let error = format!("the body is compressed (`Content-Encoding: {encoding}`)");
        let hint = "send it without compression";
        return Err(HttpFailure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, error, hint));
    }
    Ok(())
}

/// The failure of a form with a question.
pub(super) fn of_question(error: String) -> HttpFailure {
    let hint = "send fields of text and at most one file: `curl -F question=TEXT -F mask=@mask.png URL`";
    HttpFailure::new(StatusCode::BAD_REQUEST, error, hint)
}

/// The failure of a form with a file.
fn of_form(error: String) -> HttpFailure {
    HttpFailure::new(StatusCode::BAD_REQUEST, error, FORM_HINT)
}

const FORM_HINT: &str = "send one file: `curl -F file=@image.png URL`, or `curl --data-binary @image.png URL`";

/// The content of a JSON request.
pub(super) async fn json<T: DeserializeOwned>(request: Request) -> HttpResult<T> {
    if !content_type(request.headers()).to_ascii_lowercase().starts_with("application/json") {
        let hint = "send the header `Content-Type: application/json`";
        return Err(HttpFailure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the request is not application/json", hint));
    }
    let stream = request.into_body().into_data_stream();
    let upload = collect(stream, (Content::Json, Instant::now() + HEAD_TIME), None).await?;
    Json::from_bytes(&upload)
        .map(|Json(content)| content)
        .map_err(|rejection| HttpFailure::of_values(rejection.status(), &rejection.body_text()))
}

fn content_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    value.unwrap_or_default().trim().to_owned()
}

/// Reads a body until `end`. With `room`, each MiB needs a permit. Memory is taken as bytes arrive: a client can announce
/// any number.
async fn collect<S, E>(
    stream: S,
    (content, end): (Content, Instant),
    room: Option<&Arc<Semaphore>>,
) -> HttpResult<Upload>
where
    S: Stream<Item = Result<Bytes, E>>,
    E: std::error::Error + 'static,
{
    let mut stream = pin!(stream);
    let mut held: Option<OwnedSemaphorePermit> = None;
    let mut bytes = Vec::new();
    loop {
        let piece = match timeout_at(end, timeout(UPLOAD_PAUSE, stream.next())).await {
            Ok(Ok(Some(Ok(piece)))) => piece,
            Ok(Ok(Some(Err(error)))) => return Err(broken(&error)),
            Ok(Ok(None)) => return Ok(Upload { file: 0..bytes.len(), bytes, _room: held }),
            Ok(Err(_)) => return Err(slow(format!("no data arrived for {} s", UPLOAD_PAUSE.as_secs()))),
            Err(_) => return Err(slow("the request took too long".into())),
        };
        let length = bytes.len() + piece.len();
        if length > content.limit() {
            return Err(too_large(stream, content).await);
        }
        if let Some(room) = room {
            let missing = (length >> 20) + 1 - held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let permits = Arc::clone(room).try_acquire_many_owned(u32::try_from(missing).unwrap_or(u32::MAX));
            let Ok(permits) = permits else {
                return Err(HttpFailure::busy("other files that are sent now take all memory for files", 10));
            };
            match &mut held {
                Some(held) => held.merge(permits),
                None => held = Some(permits),
            }
        }
        if bytes.try_reserve(piece.len()).is_err() {
            return Err(HttpFailure::busy("there is not enough memory for the file now", 10));
        }
        bytes.extend_from_slice(&piece);
    }
}

/// The failure of a body that cannot be read to its end.
fn broken(error: &(dyn std::error::Error + 'static)) -> HttpFailure {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let cause = causes.filter_map(|error| error.downcast_ref::<io::Error>()).last();
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => HttpFailure::bad_request(format!(
            "the body is not as `Transfer-Encoding: chunked` says: {}",
            cause.expect("found")
        )),
        Some(io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => {
            HttpFailure::bad_request("the body is incomplete: the connection ended")
        }
        _ => HttpFailure::bad_request(format!("the body cannot be read: {error}")),
    }
}

fn slow(error: String) -> HttpFailure {
    HttpFailure::new(StatusCode::REQUEST_TIMEOUT, error, "check the connection and send it again")
}

/// Reads the rest for a while: a client that is cut off while it writes does not read the answer.
async fn too_large<S: Stream<Item = Result<Bytes, E>>, E>(stream: S, content: Content) -> HttpFailure {
    let mut stream = pin!(stream);
    let rest = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = timeout(DISCARD_TIME, rest).await;
    content.too_large()
}

/// Name of an uploaded file in errors: the server does not know or keep the user's file name.
pub(super) fn uploaded() -> &'static Path {
    Path::new("the uploaded file")
}

/// The error of an uploaded file.
pub(super) fn refused(error: Error) -> HttpFailure {
    let is_broken = matches!(&error, Error::Data { hint, .. } if hint == decode::REPLACE);
    let mut failure = HttpFailure::from(error);
    if is_broken {
        failure.hint = "send another file".into();
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
    }

    /// Pieces of so many bytes, one every `pause`.
    fn pieces(sizes: &[usize], pause: Duration) -> impl Stream<Item = Result<Bytes, Infallible>> {
        let pieces: Vec<_> = sizes.iter().map(|&size| Ok(Bytes::from(vec![1; size]))).collect();
        tokio_stream::iter(pieces).then(move |piece| async move {
            tokio::time::sleep(pause).await;
            piece
        })
    }

    #[test]
    fn files_share_the_room_and_give_it_back() {
        run(async {
            let room = Arc::new(Semaphore::new(3));
            let end = Instant::now() + UPLOAD_TIME;
            let read = |sizes: &'static [usize]| {
                collect(pieces(sizes, Duration::ZERO), (Content::File(10 << 20), end), Some(&room))
            };
            let first = read(&[1 << 20, 10]).await.unwrap();
            assert_eq!((first.len(), room.available_permits()), ((1 << 20) + 10, 1));
            let full = read(&[1 << 20]).await.err().unwrap();
            assert_eq!(full.status, StatusCode::TOO_MANY_REQUESTS, "{}", full.error);
            assert_eq!(room.available_permits(), 1, "a refused file takes no room");
            drop(first);
            assert_eq!(read(&[1 << 20, 1 << 20]).await.unwrap().len(), 2 << 20);
            let large = read(&[6 << 20, 6 << 20]).await.err().unwrap();
            assert_eq!(large.status, StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(room.available_permits(), 3);
        });
    }

    #[test]
    fn a_body_that_arrives_byte_by_byte_has_a_deadline() {
        run(async {
            let (begin, limit) = (Instant::now(), Duration::from_millis(300));
            let slow = pieces(&[1; 100], Duration::from_millis(100));
            let failure = collect(slow, (Content::Json, begin + limit), None).await.err().unwrap();
            assert_eq!(failure.status, StatusCode::REQUEST_TIMEOUT);
            assert!(begin.elapsed() >= limit && begin.elapsed() < Duration::from_secs(5));
        });
    }
}
