//! Access to the server: host names, origins of other sites, and the token.
//!
//! A page of another site in the same browser must not use the server. It can send requests with its own `Origin`
//! (refused), and it can let its own host name point to this machine (DNS rebinding; its `Host` is refused).

use super::app::App;
use super::failure::{HttpFailure, HttpResult};
use crate::{Error, Result};
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::net::{IpAddr, Ipv6Addr};

/// Fewest characters of a token.
const MIN_TOKEN: usize = 16;

/// Checks that a token is present where one is needed, and that it is usable.
///
/// # Errors
/// [`Error::Config`] with a new token as an example.
pub fn check_token(host: IpAddr, token: Option<&str>) -> Result<()> {
    let example = || format!("give for example `--token {:032x}`", rand::random::<u128>());
    let Some(token) = token else {
        if host.is_loopback() {
            return Ok(());
        }
        let reason = format!("is required with `--host {host}`, because other machines can connect");
        return Err(Error::argument("token", reason, example()));
    };
    if token.len() < MIN_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let reason = format!("must have at least {MIN_TOKEN} letters, digits or signs without spaces");
        return Err(Error::argument("token", reason, example()));
    }
    Ok(())
}

/// Refuses requests with another host name, from another site, or without the token.
pub(super) async fn check(State(app): State<App>, request: Request, next: Next) -> Response {
    match allowed(&app, &request) {
        Ok(()) => next.run(request).await,
        Err(failure) => {
            let needs_token = failure.status == StatusCode::UNAUTHORIZED;
            let mut response = failure.into_response();
            if needs_token {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            response
        }
    }
}

fn allowed(app: &App, request: &Request) -> HttpResult<()> {
    let headers = request.headers();
    let host = check_host(headers, &app.options.hosts)?;
    check_origin(headers, host, &app.options.hosts)?;
    let path = request.uri().path();
    let is_open = !path.starts_with("/api/") && path != "/metrics" || OPEN.contains(&path);
    match &app.options.token {
        Some(token) if !is_open && !has_token(headers, token) => {
            let error =
                if headers.contains_key(header::AUTHORIZATION) { "the token is wrong" } else { "a token is needed" };
            let hint = "send `Authorization: Bearer TOKEN` with the token that the server was started with";
            Err(HttpFailure::new(StatusCode::UNAUTHORIZED, error, hint))
        }
        _ => Ok(()),
    }
}

/// Routes without a token: they tell nothing about the model or its users.
const OPEN: [&str; 2] = ["/api/health", "/api/openapi.json"];

/// The host of a request: an IP address, `localhost`, or one of `names`.
fn check_host<'a>(headers: &'a HeaderMap, names: &[String]) -> HttpResult<&'a str> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let authority: Option<Authority> = host.parse().ok();
    let name = authority.as_ref().map_or("", Authority::host);
    let inner = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let is_address = name.parse::<IpAddr>().is_ok() || inner.is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    let is_named = |known: &str| name.eq_ignore_ascii_case(known);
    if is_address || is_named("localhost") || names.iter().any(|known| is_named(known)) {
        return Ok(host);
    }
    let shown: String = name.chars().filter(char::is_ascii_graphic).take(100).collect();
    let error = format!("the host name `{shown}` is not allowed");
    let hint = "use the IP address of the server, or start it with `--allow-host NAME`";
    Err(HttpFailure::new(StatusCode::FORBIDDEN, error, hint))
}

/// Refuses requests that a page of another site makes. The page of the server has its own host, or one of `names`: a proxy
/// may send another `Host` than the browser.
fn check_origin(headers: &HeaderMap, host: &str, names: &[String]) -> HttpResult<()> {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("null"));
    let is_own = text("origin").is_none_or(|origin| {
        let own = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let name = own.and_then(|own| own.parse::<Authority>().ok());
        own.is_some_and(|own| own.eq_ignore_ascii_case(host))
            || name.is_some_and(|name| names.iter().any(|known| name.host().eq_ignore_ascii_case(known)))
    });
    // a link on another site may open the page; its scripts and images may not use the server
    let is_foreign =
        text("sec-fetch-site").is_some_and(|site| site == "cross-site") && text("sec-fetch-mode") != Some("navigate");
    if is_own && !is_foreign {
        return Ok(());
    }
    let hint = "open the page of this server itself; scripts need no `Origin` header";
    Err(HttpFailure::new(StatusCode::FORBIDDEN, "requests from other sites are not allowed", hint))
}

/// Compares hashes in constant time, so that the time tells nothing about the token.
fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let Some((scheme, given)) = given.split_at_checked(7) else { return false };
    let [given, token] = [given, token.as_bytes()].map(Sha256::digest);
    let difference = given.iter().zip(&token).fold(0, |difference, (a, b)| difference | (a ^ b));
    scheme.eq_ignore_ascii_case(b"bearer ") && std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| ((*name).parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn hosts_are_addresses_localhost_or_named() {
        let names = ["lab.example".to_owned()];
        for host in ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:80", "10.0.0.7", "lab.example:8443"] {
            let host = headers(&[("host", host)]);
            assert!(check_host(&host, &names).is_ok(), "{host:?}");
        }
        for host in
            ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "a b", "user@localhost.x"]
        {
            let host = headers(&[("host", host)]);
            assert_eq!(check_host(&host, &names).unwrap_err().status, StatusCode::FORBIDDEN, "{host:?}");
        }
        assert!(check_host(&HeaderMap::new(), &names).is_err());
    }

    #[test]
    fn other_sites_are_refused() {
        let host = "127.0.0.1:8080";
        let names = ["lab.example".to_owned()];
        let is_allowed = |pairs: &[(&'static str, &'static str)]| check_origin(&headers(pairs), host, &names).is_ok();
        assert!(is_allowed(&[]));
        assert!(is_allowed(&[("origin", "http://127.0.0.1:8080"), ("sec-fetch-site", "same-origin")]));
        assert!(is_allowed(&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]));
        // behind a proxy that replaces the host
        assert!(is_allowed(&[("origin", "https://lab.example"), ("sec-fetch-site", "same-origin")]));
        assert!(is_allowed(&[("origin", "http://LAB.example:8443")]));
        for origin in [
            "http://127.0.0.1:8081",
            "http://evil.example",
            "null",
            "127.0.0.1:8080",
            "https://lab.example.evil.example",
            "https://evil.example/lab.example",
            "lab.example",
        ] {
            assert!(!is_allowed(&[("origin", origin)]), "{origin}");
        }
        assert!(!is_allowed(&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")]));
    }

    #[test]
    fn the_whole_token_must_be_equal() {
        let has = |value: &'static str| has_token(&headers(&[("authorization", value)]), "correct-horse-battery");
        assert!(has("Bearer correct-horse-battery") && has("bearer correct-horse-battery"));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer correct-horse-batter",
            "Basic  correct-horse-battery",
            "Bearer correct-horse-battery ",
        ] {
            assert!(!has(wrong), "{wrong}");
        }
    }

    #[test]
    fn a_token_is_required_beyond_this_machine() {
        let [here, all]: [IpAddr; 2] = ["127.0.0.1".parse().unwrap(), "0.0.0.0".parse().unwrap()];
        check_token(here, None).unwrap();
        check_token("::1".parse().unwrap(), None).unwrap();
        check_token(all, Some("0123456789abcdef")).unwrap();
        let missing = check_token(all, None).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "argument `token`: is required with `--host 0.0.0.0`, because other machines can connect"
        );
        assert!(missing.hint().len() > 50, "{}", missing.hint());
        for bad in ["short", "with a space in it is no good", ""] {
            assert!(check_token(here, Some(bad)).is_err(), "{bad}");
        }
    }
}
