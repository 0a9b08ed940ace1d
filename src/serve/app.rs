//! State of the server, shared by all requests.

use super::failure::{HttpFailure, HttpResult};
use super::metrics::QuestionEnd;
use super::options::{MAX_DECODERS, MAX_JSON, MAX_RECEIVED, MAX_TRANSFERS, ServeOptions};
use super::worker::{Queued, ServerState};
use crate::Error;
use crate::event::Observer;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// State of the server, shared by all requests.
#[derive(Clone)]
pub(super) struct App(Arc<Inner>);

pub(super) struct Inner {
    pub(super) shared: Arc<ServerState>,
    pub(super) jobs: SyncSender<Queued>,
    pub(super) options: ServeOptions,
    pub(super) observer: Arc<dyn Observer>,
    /// Files that may be received now.
    pub(super) transfers: Semaphore,
    /// MiB of files that may be received now.
    pub(super) room: Arc<Semaphore>,
    /// Volumes that may be decoded now: one can take some GiB.
    pub(super) volumes: Semaphore,
    /// Images that may be decoded or encoded now.
    pub(super) decoders: Semaphore,
}

impl App {
    pub(super) fn new(
        shared: Arc<ServerState>,
        jobs: SyncSender<Queued>,
        options: ServeOptions,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let [transfers, decoders, volumes] = [MAX_TRANSFERS, MAX_DECODERS, 1].map(Semaphore::new);
        // a form has more than its file
        let mib = (options.max_upload.saturating_add(MAX_JSON).max(MAX_RECEIVED) >> 20) + 1;
        let room = Arc::new(Semaphore::new(mib.min(Semaphore::MAX_PERMITS)));
        Self(Arc::new(Inner { shared, jobs, options, observer, transfers, room, volumes, decoders }))
    }

    /// Runs work of many milliseconds, such as decoding, on a thread of its own.
    ///
    /// # Errors
    /// Those of `work`; a panic of it.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> HttpResult<T> + Send + 'static,
    ) -> HttpResult<T> {
        // the semaphore is never closed
        let _permit = self.decoders.acquire().await.ok();
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Error::Interrupted.into()),
        }
    }
}

impl Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// Puts a question into the queue.
pub(super) fn enqueue(app: &App, job: Queued) -> HttpResult<()> {
    let metrics = &app.shared.metrics;
    metrics.waiting.fetch_add(1, Ordering::Relaxed);
    app.jobs.try_send(job).map_err(|error| {
        metrics.waiting.fetch_sub(1, Ordering::Relaxed);
        match error {
            TrySendError::Full(_) => {
                metrics.add_question(QuestionEnd::Refused, Duration::ZERO);
                let error = format!("the queue is full: {} questions wait", app.options.queue);
                HttpFailure::busy(error, metrics.retry_after_s())
            }
            TrySendError::Disconnected(_) => Error::Interrupted.into(),
        }
    })
}
