//! HTML reports: one file with everything in it, for people without this program. They render results that others
//! computed and know no model.
//!
//! A page needs no network and no JavaScript: scripts only sort and filter tables. Every text is escaped, and the page's
//! content security policy allows no script but its own.

pub mod check_page;
pub mod comparison;
pub mod data_check;
pub mod evaluation;
pub mod pairs;
mod picture;
mod spread;
mod svg;
pub mod training;

use crate::metrics::estimates::{self, Estimate};
use crate::metrics::paired::Interval;
use crate::units::fixed;
use crate::{Error, Result, files};
use askama::Template;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};
use std::path::Path;

/// Name of a report's file.
pub const REPORT_FILE: &str = "report.html";

const STYLE: &str = include_str!("templates/style.css");
const SCRIPT: &str = include_str!("templates/script.js");

/// What all pages have in common.
#[derive(Debug)]
struct Page {
    title: String,
    subtitle: String,
    style: &'static str,
    script: &'static str,
    /// Hash of the script for the content security policy.
    script_hash: String,
    version: &'static str,
}

impl Page {
    fn new(title: &str, subtitle: &str) -> Self {
        Self {
            title: title.to_owned(),
            subtitle: subtitle.to_owned(),
            style: STYLE,
            script: SCRIPT,
            script_hash: BASE64_STANDARD.encode(Sha256::digest(SCRIPT.as_bytes())),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// Renders a page into `folder`.
fn write(folder: &Path, page: &impl Template) -> Result<()> {
    write_file(&folder.join(REPORT_FILE), page)
}

/// Renders a page into a file.
fn write_file(path: &Path, page: &impl Template) -> Result<()> {
    let text = page.render().map_err(|error| Error::Internal { reason: format!("cannot render a report: {error}") })?;
    files::write(path, text.as_bytes()).map_err(Error::io(path, "write"))
}

/// A number for people: three decimals below 10, one above; `–` without a value.
fn number(value: Option<f64>) -> String {
    let shown = |value: f64| fixed(value, if value.abs() < 10.0 { 3 } else { 1 });
    value.map_or_else(|| "–".to_owned(), shown)
}

/// The title of a score at the start of a line; `length` is `mm` or `px`.
fn heading(key: &str, length: &str) -> String {
    let title = estimates::title(key, length);
    let mut letters = title.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

/// `0.712 to 0.846`, or `–`.
fn range(interval: Option<Interval>) -> String {
    let shown = |Interval { low, high }| format!("{} to {}", number(Some(low)), number(Some(high)));
    interval.map_or_else(|| "–".to_owned(), shown)
}

/// The interval below a mean; empty without one.
fn small_range(estimate: Option<&Estimate>) -> String {
    estimate.and_then(|estimate| estimate.interval).map_or_else(String::new, |interval| range(Some(interval)))
}

/// The mean, if there is one.
fn mean(estimate: Option<&Estimate>) -> Option<f64> {
    estimate.map(|estimate| estimate.mean)
}

/// The value by which a table sorts a cell; empty values come last.
fn sort_key(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}
