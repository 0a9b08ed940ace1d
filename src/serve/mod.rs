//! Server of a trained model: a page and the same over HTTP, for one machine or a trusted network.
//!
//! ```text
//! requests (2 threads) -> queue -> worker (the calling thread): encode image, ask -> answer in the store
//!      |                                        |
//!      +-- store: images, masks (memory only)   +-- server-sent events to the client
//! ```
//!
//! The worker answers one question at a time with the function of `prsmed predict`. Images are kept in memory only,
//! bounded in number, bytes and time. The routes are described in `docs/reference/openapi.json`.

mod access;
mod answer;
mod answers;
mod app;
mod asked;
mod connections;
mod failure;
mod form;
mod guards;
mod images;
mod intensities;
mod mask_file;
mod metrics;
mod model;
mod options;
mod page;
mod pairs;
mod picture;
mod routes;
mod sequences;
mod store;
mod upload;
mod volume_question;
mod volumes;
mod worker;

pub use access::check_token;
pub use options::ServeOptions;

use crate::event::Observer;
use crate::front;
use crate::{Error, Result};
use app::App;
use intensities::Intensities;
use metrics::Metrics;
use model::ServedModel;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use store::ImageStore;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use worker::ServerState;

/// Time for the responses that are on their way when the server stops.
const FAREWELL: Duration = Duration::from_secs(3);

/// Serves `model` on `listener` until `interrupt` is set. Runs the model on the calling thread.
///
/// # Errors
/// [`Error::Io`] if threads or the listener cannot be used.
pub fn serve(
    model: &front::Model,
    options: ServeOptions,
    listener: TcpListener,
    observer: Arc<dyn Observer>,
    interrupt: &AtomicBool,
) -> Result<()> {
    let (description, questions) = (model.description(), model.known_questions().cloned());
    let shared = Arc::new(ServerState {
        store: ImageStore::new(options.max_images, options.keep),
        metrics: Metrics::default(),
        classes: description.modalities.clone(),
        calibration: description.calibration,
        questions: questions.clone(),
        reads_masks: model.reads_masks(),
        intensities: Intensities::new(description.intensity.clone(), questions),
        time_limit: options.time_limit,
    });
    // a queue of 0 would take a question only while the worker waits for one
    let (jobs, received) = sync_channel(options.queue.max(1));
    let app = App::new(Arc::clone(&shared), jobs, options, observer);
    let runtime = runtime()?;
    let listener = {
        let _inside = runtime.enter();
        let refused = |source| Error::Io { path: "the listening socket".into(), action: "open", source };
        listener.set_nonblocking(true).map_err(refused)?;
        tokio::net::TcpListener::from_std(listener).map_err(refused)?
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let router = routes::router(app);
    let stops = async { drop(stopped.await) };
    let server = runtime.spawn(connections::Connections::new(listener).serve(router, stops));
    worker::work(&received, &mut ServedModel::new(model), &shared, interrupt);
    drop((stop, received));
    let _ = runtime.block_on(async { tokio::time::timeout(FAREWELL, server).await });
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// Two threads for requests, and a few that decode and encode images.
fn runtime() -> Result<Runtime> {
    let failed = |source| Error::Io { path: "threads of the server".into(), action: "create", source };
    Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(options::MAX_DECODERS)
        .thread_name("prsmed-serve")
        .enable_all()
        .build()
        .map_err(failed)
}

/// Binds the address of the server.
///
/// # Errors
/// [`Error::Config`] if the address is taken, not allowed or not of this machine.
pub fn bind(host: std::net::IpAddr, port: u16) -> Result<TcpListener> {
    TcpListener::bind((host, port)).map_err(|error| {
        let (key, hint) = match error.kind() {
            std::io::ErrorKind::AddrInUse => ("port", "choose another port, or the argument `port=0` for any free one"),
            std::io::ErrorKind::PermissionDenied => ("port", "choose a port from 1024 on"),
            _ => ("host", "use an address of this machine; 127.0.0.1 is for this machine only"),
        };
        Error::argument(key, format!("cannot listen on {host}, port {port}: {error}"), hint)
    })
}
