//! Settings of the server.

use crate::data::volume::{Axis, Window};
use crate::front::MAX_QUESTION;
use std::time::Duration;

/// Settings of the server.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Name of the model for the page.
    pub name: String,
    /// Every request under `/api` and `/metrics` must send it as a bearer token, if there is one.
    pub token: Option<String>,
    /// Names under which the server may be reached, besides IP addresses and `localhost`. Pages of these names may use
    /// it, also if a proxy replaces the name.
    pub hosts: Vec<String>,
    /// Path of the page behind a proxy, such as `/prsmed`; empty for `/`.
    pub base_path: String,
    /// Most questions that wait for the model, at least 1.
    pub queue: usize,
    /// Most images in memory; the least recently used one is removed for a new one.
    pub max_images: usize,
    /// Time after its last use when an image is removed.
    pub keep: Duration,
    /// Most bytes of an uploaded file.
    pub max_upload: usize,
    /// Most pixels of an image, and of a slice of a volume along any axis.
    pub max_pixels: u64,
    /// How volumes are shown and asked about: window and axis of the training images.
    pub shown: (Option<Window>, Option<Axis>),
    /// Longest answer in tokens.
    pub max_new_tokens: usize,
    /// Longest time of one question.
    pub time_limit: Duration,
    /// An image or volume file that the page offers to try.
    pub sample: Option<Vec<u8>>,
    /// Report method, route and status of every request.
    pub logs_requests: bool,
}

/// Most characters of a question or an answer.
pub(super) const MAX_TEXT: usize = MAX_QUESTION;
/// Most questions about one image.
pub(super) const MAX_ANSWERS: usize = 32;
/// Most training questions that the page offers.
pub(super) const MAX_EXAMPLES: usize = 4;
/// Most bytes of all decoded images and masks.
pub(super) const MAX_STORED: usize = 2 << 30;
/// Most voxels of one volume. While it is read, a voxel takes up to 8 bytes.
pub(super) const MAX_VOLUME: usize = MAX_STORED / 8;
/// Most bytes of encoded images that wait for another question.
pub(super) const MAX_ENCODED: usize = 256 << 20;
/// Most bytes of a request that is no file.
pub(super) const MAX_JSON: usize = 128 << 10;
/// Most connections at a time.
pub(super) const MAX_CONNECTIONS: usize = 256;
/// Most files that are received at a time.
pub(super) const MAX_TRANSFERS: usize = 16;
/// Most images that are decoded or encoded at a time.
pub(super) const MAX_DECODERS: usize = 4;
/// Longest time for the head of a request, and for a body that is no file.
pub(super) const HEAD_TIME: Duration = Duration::from_secs(20);
/// Most bytes of all files that are received or decoded at the same time, unless one file may be larger.
pub(super) const MAX_RECEIVED: usize = 1 << 30;
/// Longest time of an upload.
pub(super) const UPLOAD_TIME: Duration = Duration::from_mins(2);
/// Longest time without a byte of an upload.
pub(super) const UPLOAD_PAUSE: Duration = Duration::from_secs(15);
/// Longest time of a connection without a byte in either direction.
pub(super) const IDLE_TIME: Duration = Duration::from_mins(1);
/// Time between two signs of life while a client waits for an answer.
pub(super) const ALIVE_EVERY: Duration = Duration::from_secs(5);
