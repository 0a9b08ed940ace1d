//! What every request passes: security headers, counts and times, and panics that become errors.

use super::app::App;
use super::failure::HttpFailure;
use crate::event::Event;
use crate::{Error, panics};
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Headers of every response: the page loads nothing from elsewhere and cannot be framed, and nothing is stored.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// Adds [`HEADERS`].
pub(super) async fn secure(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Methods that are counted by their names.
const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// Counts a request by method, route and status. Reports it if the server logs requests.
pub(super) async fn count(State(app): State<App>, request: Request, next: Next) -> Response {
    let begin = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    // a client can send any word as the method
    let method = KNOWN.into_iter().find(|known| request.method().as_str() == *known).unwrap_or("other");
    let response = next.run(request).await;
    let status = response.status().as_u16();
    app.shared.metrics.add_request(method, &route, status, begin.elapsed());
    if app.options.logs_requests {
        let text = format!("{method} {route}: {status}, {} ms", begin.elapsed().as_millis());
        app.observer.on(&Event::Note(text));
    }
    response
}

/// Most bytes of a refused request that are read before it is answered, and for how long.
const REST: (u64, Duration) = (16 << 20, Duration::from_secs(5));

/// Reads the rest of a request that is refused before its end. A client that still sends would find the connection closed
/// and not read why.
pub(super) async fn read_out(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let waits = waits_to_send(&parts.headers);
    let body = SharedBody { body: Arc::new(Mutex::new(body)), is_begun: Arc::new(AtomicBool::new(false)) };
    let rest = body.clone();
    let response = next.run(Request::from_parts(parts, Body::new(body))).await;
    // to read a body says `100 Continue`
    let is_sent = !waits || rest.is_begun.load(Ordering::Relaxed);
    if response.status().is_client_error() && is_sent {
        let (most, duration) = REST;
        let _ = tokio::time::timeout(duration, async {
            let mut read = 0;
            while let Some(Ok(frame)) = poll_fn(|cx| rest.poll(cx)).await {
                read += frame.data_ref().map_or(0, |bytes| bytes.len() as u64);
                if read > most {
                    break;
                }
            }
        })
        .await;
    }
    response
}

/// True if the client sends the body of its request only after the server has said `100 Continue`.
pub(super) fn waits_to_send(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// A body that can still be read when its request is gone.
#[derive(Clone)]
struct SharedBody {
    body: Arc<Mutex<Body>>,
    is_begun: Arc<AtomicBool>,
}

type Polled = Poll<Option<Result<Frame<Bytes>, axum::Error>>>;

impl SharedBody {
    fn poll(&self, cx: &mut std::task::Context<'_>) -> Polled {
        self.is_begun.store(true, Ordering::Relaxed);
        Pin::new(&mut *self.body.lock().unwrap_or_else(PoisonError::into_inner)).poll_frame(cx)
    }
}

impl HttpBody for SharedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Polled {
        self.poll(cx)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.lock().unwrap_or_else(PoisonError::into_inner).size_hint()
    }
}

/// Turns a panic in a request into an error; the server continues.
pub(super) async fn caught(request: Request, next: Next) -> Response {
    let mut work = Box::pin(next.run(request));
    let run = |cx: &mut std::task::Context<'_>| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(panics::describe(&*panic))),
    };
    match poll_fn(run).await {
        Ok(response) => response,
        Err(reason) => HttpFailure::from(Error::Internal { reason }).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::routing::get;
    use std::io::{Read, Write};

    #[test]
    fn a_panic_in_a_request_is_an_answer_with_an_error() {
        async fn fails() -> &'static str {
            panic!("number {} is impossible", 8)
        }
        panics::record();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let router: Router = Router::new().route("/", get(fails)).layer(axum::middleware::from_fn(caught));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async { axum::serve(listener, router).await });
        for _twice in 0..2 {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert!(text.starts_with("HTTP/1.1 500"), "{text}");
            assert!(text.contains("internal error") && text.contains("number 8 is impossible"), "{text}");
        }
    }

    #[test]
    fn a_client_that_still_sends_can_read_why_it_is_refused() {
        async fn refuses() -> (axum::http::StatusCode, &'static str) {
            (axum::http::StatusCode::PAYLOAD_TOO_LARGE, "too much")
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let router: Router = Router::new().route("/", get(refuses)).layer(axum::middleware::from_fn(read_out));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async { axum::serve(listener, router).await });
        let body = vec![b'x'; 8 << 20];
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let head =
            format!("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 413") && text.ends_with("too much"), "{text}");
    }
}
