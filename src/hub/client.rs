//! HTTP requests to the hub: redirects, access token, time-outs.
//!
//! The token goes to the scheme, host and port of the hub alone. Redirects are followed here, not by ureq, so that each
//! request decides whether it may carry the token. A file's size and hash come from the hub's own headers
//! (`X-Linked-Size`, `X-Linked-Etag`), so no request is needed to the host of a redirect before the download.
//!
//! ureq reads the proxy variables (`HTTPS_PROXY`, `NO_PROXY` and others).

use std::fmt;
use std::io::{ErrorKind, Read as _};
use std::time::{Duration, Instant};

use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{Method, Response, StatusCode, Uri};
use ureq::{Agent, Body, BodyReader, Timeout};

use super::options::{HubOptions, Timeouts, without_credentials};
use super::spec;

/// Redirects that one request follows.
const MAX_REDIRECTS: usize = 5;
/// Limit of a repository's listing, in bytes.
const MAX_LISTING: usize = 64 << 20;
/// Limit of the time of a listing, in times of [`Timeouts::idle`].
const LISTING_IDLES: u32 = 10;
const CHUNK: usize = 1 << 16;
/// Requests that a server may answer with HTTP 429 before that is an error, and the longest wait between two.
const BUSY_ATTEMPTS: u32 = 4;
const LONGEST_WAIT: Duration = Duration::from_mins(1);

/// Failure of a request.
#[derive(Debug)]
pub(super) enum Fault {
    /// The server answered with this status.
    Status(u16),
    /// No connection, or it broke or became silent. Another attempt may succeed.
    Connection(String),
    /// The answer is not one that a hub gives.
    Protocol(String),
    /// The access token has characters that no header can have. Nothing was sent.
    Token,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "HTTP {status}"),
            Self::Connection(reason) | Self::Protocol(reason) => write!(f, "{reason}"),
            Self::Token => write!(f, "the access token contains a blank, or a character that is not ASCII"),
        }
    }
}

/// Size and ETag of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    /// The name of the file's blob in the cache.
    pub(super) etag: String,
    pub(super) size: u64,
}

/// The body of a file, from some byte on.
pub(super) struct Download {
    pub(super) body: BodyReader<'static>,
    /// The first byte that the body contains. It is 0 if the server ignores ranges.
    pub(super) start: u64,
}

/// Scheme, host and port.
type Origin = (String, String, u16);

/// Client of one hub.
pub(super) struct Client<'a> {
    agent: Agent,
    options: &'a HubOptions,
    hub: Origin,
}

impl<'a> Client<'a> {
    pub(super) fn new(options: &'a HubOptions) -> Result<Self, Fault> {
        let Timeouts { connect, response, idle } = options.timeouts;
        let config = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("prsmed/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_resolve(Some(connect))
            .timeout_connect(Some(connect))
            .timeout_send_request(Some(response))
            .timeout_recv_response(Some(response))
            .timeout_per_read(Some(idle))
            .timeout_per_write(Some(idle));
        let hub = parse(options.endpoint.trim_end_matches('/')).and_then(|uri| origin(&uri))?;
        Ok(Self { agent: config.build().into(), options, hub })
    }

    /// The text at an address: a repository's listing, with limits of its length and its time.
    pub(super) fn text(&self, address: &str) -> Result<String, Fault> {
        let mut body = self.send(&Method::GET, address, 0)?.into_body().into_reader();
        let (start, longest) = (Instant::now(), self.options.timeouts.idle.saturating_mul(LISTING_IDLES));
        let (mut text, mut chunk) = (Vec::new(), vec![0; CHUNK]);
        loop {
            match body.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => text.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.fault(error)),
            }
            if text.len() > MAX_LISTING {
                return Err(Fault::Protocol(format!("the listing has more than {} MiB", MAX_LISTING >> 20)));
            }
            if start.elapsed() > longest {
                let reason = format!("the listing is not complete after {longest:?} (HF_HUB_DOWNLOAD_TIMEOUT)");
                return Err(Fault::Connection(reason));
            }
        }
        String::from_utf8(text).map_err(|_| Fault::Protocol("the listing is not text in UTF-8".into()))
    }

    /// Size and ETag of a file at `commit`. `listed` is its size in the repository's listing.
    pub(super) fn metadata(&self, address: &str, commit: &str, listed: Option<u64>) -> Result<Metadata, Fault> {
        let response = self.send(&Method::HEAD, address, 0)?;
        read_metadata(response.headers(), response.status().is_success(), commit, listed)
    }

    /// Starts the download of a file at the byte `start`.
    pub(super) fn download(&self, address: &str, start: u64) -> Result<Download, Fault> {
        let response = self.send(&Method::GET, address, start)?;
        let start = match response.status() {
            StatusCode::PARTIAL_CONTENT => range_start(response.headers())?,
            _ => 0,
        };
        Ok(Download { body: response.into_body().into_reader(), start })
    }

    /// Sends a request and follows redirects. To HEAD, a redirect to another host than the hub is the answer.
    fn send(&self, method: &Method, address: &str, start: u64) -> Result<Response<Body>, Fault> {
        let mut uri = parse(address)?;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send_patiently(method, &uri, start)?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if !status.is_redirection() {
                return Err(Fault::Status(status.as_u16()));
            }
            let next = redirect(&uri, status, response.headers())?;
            if method == Method::HEAD && origin(&next)? != self.hub {
                return Ok(response);
            }
            uri = next;
        }
        Err(Fault::Protocol(format!("the server redirected more than {MAX_REDIRECTS} times")))
    }

    /// Sends a request again while the server asks to wait (HTTP 429), as long as it says in `Retry-After`.
    fn send_patiently(&self, method: &Method, uri: &Uri, start: u64) -> Result<Response<Body>, Fault> {
        for attempt in 0..BUSY_ATTEMPTS {
            let response = self.send_once(method, uri, start)?;
            if response.status() != StatusCode::TOO_MANY_REQUESTS {
                return Ok(response);
            }
            let asked = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
            std::thread::sleep(Duration::from_secs(asked.unwrap_or(1 << attempt)).min(LONGEST_WAIT));
        }
        self.send_once(method, uri, start)
    }

    fn send_once(&self, method: &Method, uri: &Uri, start: u64) -> Result<Response<Body>, Fault> {
        let mut request = if method == Method::HEAD { self.agent.head(uri) } else { self.agent.get(uri) };
        if let Some(token) = &self.options.token
            && origin(uri)? == self.hub
        {
            if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(Fault::Token);
            }
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header(RANGE, format!("bytes={start}-"));
        }
        request.call().map_err(|error| self.fault(error))
    }

    /// The fault for an error of a request, or while the body of a [`Download`] is read.
    pub(super) fn fault(&self, error: impl Into<ureq::Error>) -> Fault {
        let Timeouts { connect, response, idle } = self.options.timeouts;
        Fault::Connection(match error.into() {
            ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => {
                format!("no connection within {connect:?} (HF_HUB_ETAG_TIMEOUT)")
            }
            ureq::Error::Timeout(Timeout::PerRead | Timeout::PerWrite) => {
                format!("no data for {idle:?} (HF_HUB_DOWNLOAD_TIMEOUT)")
            }
            ureq::Error::Timeout(_) => format!("no answer within {response:?} (HF_HUB_ETAG_TIMEOUT)"),
            other => other.to_string(),
        })
    }
}

fn parse(address: &str) -> Result<Uri, Fault> {
    address.parse().map_err(|error| {
        let shown = without_credentials(address);
        Fault::Protocol(format!("`{}` is not an address: {error}", shown.escape_debug()))
    })
}

fn origin(uri: &Uri) -> Result<Origin, Fault> {
    let scheme = uri.scheme_str().unwrap_or_default();
    let default = match scheme {
        "http" => 80,
        "https" => 443,
        _ => {
            let shown = without_credentials(&uri.to_string());
            return Err(Fault::Protocol(format!("`{shown}` is not an `http://` or `https://` address")));
        }
    };
    Ok((scheme.to_owned(), uri.host().unwrap_or_default().to_ascii_lowercase(), uri.port_u16().unwrap_or(default)))
}

fn text_of(headers: &HeaderMap, name: impl ureq::http::header::AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// The address to which an answer redirects.
fn redirect(from: &Uri, status: StatusCode, headers: &HeaderMap) -> Result<Uri, Fault> {
    let location = text_of(headers, LOCATION).filter(|_| matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308));
    let location = location.ok_or_else(|| {
        Fault::Protocol(format!("the server answered HTTP {} without content or redirect", status.as_u16()))
    })?;
    let next = parse(&absolute(from, location))?;
    if origin(from)?.0 == "https" && origin(&next)?.0 == "http" {
        let next = without_credentials(&next.to_string());
        return Err(Fault::Protocol(format!("the server redirected from https to `{next}`, which is not encrypted")));
    }
    Ok(next)
}

/// `location`, relative to `from`, as an absolute address.
fn absolute(from: &Uri, location: &str) -> String {
    let scheme = from.scheme_str().unwrap_or_default();
    let authority = from.authority().map_or("", |authority| authority.as_str());
    let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    match location {
        _ if location.split(['/', '?', '#']).next().is_some_and(|first| first.ends_with(':')) => location.to_owned(),
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ if location.starts_with('?') => format!("{scheme}://{authority}{}{location}", from.path()),
        _ => format!("{scheme}://{authority}{folder}/{location}"),
    }
}

/// Size and ETag by the headers of an answer. `direct` is false for a redirect, whose length is not that of the file.
fn read_metadata(headers: &HeaderMap, direct: bool, commit: &str, listed: Option<u64>) -> Result<Metadata, Fault> {
    if let Some(other) = text_of(headers, "x-repo-commit").filter(|other| *other != commit) {
        let other = other.escape_debug();
        return Err(Fault::Protocol(format!("the server has the commit `{other}` instead of `{commit}`")));
    }
    let etag = text_of(headers, "x-linked-etag").or_else(|| text_of(headers, ETAG));
    let etag = etag.ok_or_else(|| Fault::Protocol("the server gives no ETag".into()))?;
    let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
    if !spec::is_plain(&etag) {
        return Err(Fault::Protocol(format!("has the ETag `{}`, which cannot name a file", etag.escape_debug())));
    }
    let length = text_of(headers, CONTENT_LENGTH).filter(|_| direct);
    let size = text_of(headers, "x-linked-size").or(length).and_then(|text| text.parse().ok()).or(listed);
    let size = size.ok_or_else(|| Fault::Protocol("the server gives no size".into()))?;
    Ok(Metadata { etag, size })
}

/// The first byte of a partial answer: `bytes 5-9/10`.
fn range_start(headers: &HeaderMap) -> Result<u64, Fault> {
    let range = text_of(headers, CONTENT_RANGE).and_then(|range| range.strip_prefix("bytes ")?.split_once('-'));
    range
        .and_then(|(start, _)| start.parse().ok())
        .ok_or_else(|| Fault::Protocol("the server sent a part of the file without its range".into()))
}

/// The address of a file: each byte that has a meaning in addresses is encoded.
pub(super) fn encode(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    name.bytes().fold(String::new(), |text, byte| {
        if plain(byte) { text + char::from(byte).encode_utf8(&mut [0; 4]) } else { format!("{text}%{byte:02X}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (ureq::http::HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn origins_differ_by_scheme_host_and_port() {
        let hub = origin(&uri("https://hub.co/a")).unwrap();
        for same in ["https://hub.co", "https://HUB.co/b?c", "https://hub.co:443/", "https://user@hub.co/"] {
            assert_eq!(origin(&uri(same)).unwrap(), hub, "{same}");
        }
        for other in [
            "http://hub.co/",
            "https://hub.co:444/",
            "https://hub.co.evil/",
            "https://hub.co@evil/",
            "https://cdn.hub.co/",
        ] {
            assert_ne!(origin(&uri(other)).unwrap(), hub, "{other}");
        }
        assert!(origin(&uri("ftp://hub.co/")).is_err() && origin(&uri("/a")).is_err());
    }

    #[test]
    fn redirects_are_resolved_and_never_leave_https() {
        let next =
            |from: &str, location: &str| redirect(&uri(from), StatusCode::FOUND, &headers(&[("location", location)]));
        let from = "https://hub.co/o/n/resolve/main/a.bin?x=1";
        for (location, target) in [
            ("/api/a.bin", "https://hub.co/api/a.bin"),
            ("b.bin", "https://hub.co/o/n/resolve/main/b.bin"),
            ("?y=2", "https://hub.co/o/n/resolve/main/a.bin?y=2"),
            ("//cdn.co/a", "https://cdn.co/a"),
            ("https://cdn.co:8443/a?sign=1", "https://cdn.co:8443/a?sign=1"),
        ] {
            assert_eq!(next(from, location).unwrap(), uri(target), "{location}");
        }
        for wrong in ["http://hub.co/a", "file:///etc/passwd", "https://", "ht tp://x"] {
            assert!(matches!(next(from, wrong), Err(Fault::Protocol(_))), "{wrong}");
        }
        assert_eq!(next("http://hub.co/a", "https://hub.co/a").unwrap(), uri("https://hub.co/a"));
        for status in [StatusCode::NOT_MODIFIED, StatusCode::MULTIPLE_CHOICES, StatusCode::USE_PROXY] {
            assert!(redirect(&uri(from), status, &headers(&[("location", "/b")])).is_err(), "{status}");
        }
        assert!(redirect(&uri(from), StatusCode::FOUND, &HeaderMap::new()).is_err());
    }

    #[test]
    fn size_and_etag_come_from_the_hub() {
        let read = |pairs: &[(&'static str, &str)], direct| read_metadata(&headers(pairs), direct, "c", Some(9));
        let metadata = |etag: &str, size| Metadata { etag: etag.into(), size };
        let linked =
            [("x-linked-etag", "\"big\""), ("x-linked-size", "7"), ("etag", "\"other\""), ("content-length", "3")];
        assert_eq!(read(&linked, false).unwrap(), metadata("big", 7));
        let plain = [("etag", "W/\"small\""), ("content-length", "3"), ("x-repo-commit", "c")];
        assert_eq!(read(&plain, true).unwrap(), metadata("small", 3));
        // the length of a redirect is not that of the file
        assert_eq!(read(&plain, false).unwrap(), metadata("small", 9));
        for wrong in [&[("content-length", "3")][..], &[("etag", "../x")], &[("etag", "x"), ("x-repo-commit", "d")]] {
            assert!(matches!(read(wrong, true), Err(Fault::Protocol(_))), "{wrong:?}");
        }
    }

    #[test]
    fn file_names_are_encoded() {
        assert_eq!(encode("a/b-1.5_x~.json"), "a/b-1.5_x~.json");
        assert_eq!(encode("a b?#%é"), "a%20b%3F%23%25%C3%A9");
    }
}
