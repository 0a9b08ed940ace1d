//! `prsmed serve`: a page and an HTTP interface for a trained model.

use super::context::Context;
use super::predict::RunArgs;
use super::report::{CommandEnd, CommandResult};
use crate::data::{decode, volume};
use crate::serve::{self, ServeOptions};
use crate::{Error, Result, files};
use serde_json::json;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Serve a trained model: a page to ask about images, and the same over HTTP
///
/// The page shows masks over the image, streams answers, and lets you correct masks and download the corrected pairs for
/// a training. Images stay in memory and are removed after a while. Without other flags only this machine can connect.
/// Ctrl-C ends the server. Research software, not a medical device.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed serve runs/a
  prsmed serve runs/a --port 9000
  prsmed serve runs/a --host 0.0.0.0 --token \"$(openssl rand -hex 16)\"
The routes for programs are in http://127.0.0.1:8080/api/openapi.json.")]
pub(super) struct Args {
    #[command(flatten)]
    run: RunArgs,
    /// Port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// Address to listen on; 0.0.0.0 is every network of this machine
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Token that clients must send, at least 16 characters; required unless only this machine can connect [default:
    /// the environment variable `PRSMED_TOKEN`]
    #[arg(long, value_name = "TEXT")]
    token: Option<String>,
    /// Host name under which clients reach the server, besides IP addresses and localhost (repeatable)
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Path of the page behind a reverse proxy that keeps it, for example /prsmed
    #[arg(long, value_name = "PATH", default_value = "/", value_parser = base_path)]
    base_path: String,
    /// Most questions that wait for the model; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1000))]
    queue: u16,
    /// Most images in memory; a new one replaces the least recently used one
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    max_images: u16,
    /// Minutes after its last use when an image is removed from memory
    #[arg(long, value_name = "MINUTES", default_value_t = 60.0, value_parser = positive)]
    keep: f64,
    /// Most MiB of an uploaded file; DICOM series are sent as a zip
    #[arg(long, value_name = "MIB", default_value_t = 512.0, value_parser = positive)]
    max_upload: f64,
    /// Most megapixels of an image, and of a slice of a volume along any axis
    #[arg(long, value_name = "MP", default_value_t = 64.0, value_parser = positive)]
    max_pixels: f64,
    /// Maximum length of an answer in tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..))]
    max_new_tokens: u16,
    /// Longest time of one question in seconds
    #[arg(long, value_name = "S", default_value_t = 300.0, value_parser = positive)]
    time_limit: f64,
    /// Image or volume that the page offers to try; everybody who can open the page sees it
    #[arg(long, value_name = "FILE")]
    sample: Option<PathBuf>,
    /// Report method, route, status and time of every request, without addresses, names or texts
    #[arg(long)]
    log_requests: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "use a number".to_owned())?;
    if number > 0.0 && number <= 1e6 { Ok(number) } else { Err("use a number above 0, at most 1000000".into()) }
}

/// The path without the last slash; empty for `/`.
fn base_path(text: &str) -> Result<String, String> {
    let path = text.trim_end_matches('/');
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    };
    let is_path = path.strip_prefix('/').is_some_and(|names| names.split('/').all(is_name));
    if path.is_empty() || is_path { Ok(path.to_owned()) } else { Err("use a path such as /prsmed".into()) }
}

/// The content of an image or volume that can be read.
fn sample(path: &Path) -> Result<Vec<u8>> {
    let bytes = files::read(path, files::MAX_IMAGE).map_err(Error::io(path, "read"))?;
    if decode::is_image(&bytes) {
        decode::image(path)?;
    } else {
        volume::open(path)?;
    }
    Ok(bytes)
}

pub(super) fn run(args: &Args, context: &Context) -> CommandResult {
    let mut options = args.options(context.env.token.as_ref())?;
    // before the model is loaded
    let listener = serve::bind(args.host, args.port)?;
    let model = args.run.open(context)?;
    options.shown = model.description().shown();
    let address = listener.local_addr().map_err(Error::io("the listening socket", "read"))?;
    let needs_token = options.token.is_some();
    let url = format!("http://{address}{}/", args.base_path);
    context.output.line(&url)?;
    context.output.record(&json!({ "kind": "serving", "url": url, "token": needs_token }))?;
    context.runtime.note("serving until Ctrl-C; research software, not a medical device");
    serve::serve(&model, options, listener, Arc::clone(&context.progress), context.runtime.interrupt())?;
    Ok(CommandEnd::Done)
}

impl Args {
    fn options(&self, token: Option<&String>) -> Result<ServeOptions> {
        let token = self.token.as_ref().or(token).cloned();
        serve::check_token(self.host, token.as_deref())?;
        let name =
            self.run.run.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be positive and small")]
        let [max_upload, max_pixels] =
            [self.max_upload * f64::from(1 << 20), self.max_pixels * 1e6].map(|value| value.ceil() as u64);
        Ok(ServeOptions {
            name,
            token,
            hosts: self.allow_host.clone(),
            base_path: self.base_path.clone(),
            queue: self.queue.into(),
            max_images: self.max_images.into(),
            keep: Duration::from_secs_f64(60.0 * self.keep),
            max_upload: usize::try_from(max_upload).unwrap_or(usize::MAX),
            max_pixels,
            shown: (None, None),
            max_new_tokens: self.max_new_tokens.into(),
            time_limit: Duration::from_secs_f64(self.time_limit),
            sample: self.sample.as_deref().map(sample).transpose()?,
            logs_requests: self.log_requests,
        })
    }
}
