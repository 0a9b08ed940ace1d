//! TCP connections: at most so many at a time, and none that stays silent or sends the head of a request for too long.

use super::options::{HEAD_TIME, IDLE_TIME, MAX_CONNECTIONS};
use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// A listener with limits.
pub(super) struct Connections {
    listener: TcpListener,
    free: Arc<Semaphore>,
    idle: Duration,
    head: Duration,
}

impl Connections {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, free: Arc::new(Semaphore::new(MAX_CONNECTIONS)), idle: IDLE_TIME, head: HEAD_TIME }
    }

    /// Answers requests until `stopped` is there, and then to the end of those that have begun.
    pub(super) async fn serve(mut self, router: Router, stopped: impl Future<Output = ()>) {
        let graceful = GracefulShutdown::new();
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.head);
        let mut stopped = std::pin::pin!(stopped);
        loop {
            let stream = tokio::select! {
                accepted = self.accept() => accepted,
                () = &mut stopped => break,
            };
            let service = TowerToHyperService::new(router.clone());
            let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
            // how a connection ends is the client's affair
            tokio::spawn(async move { drop(connection.await) });
        }
        drop(self);
        graceful.shutdown().await;
    }

    async fn accept(&mut self) -> Connection {
        // the semaphore is never closed, so there is a permit
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        let (stream, _) = Listener::accept(&mut self.listener).await;
        // pieces of an answer are sent at once; without it they only arrive later
        let _ = stream.set_nodelay(true);
        Connection { stream, idle: Box::pin(sleep(self.idle)), limit: self.idle, _permit: permit }
    }
}

/// A connection that fails after a time without a byte in either direction.
pub(super) struct Connection {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    limit: Duration,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Connection {
    /// Restarts the clock after a byte; fails when it has run out.
    fn watch<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.idle.as_mut().reset(Instant::now() + self.limit);
        } else if self.idle.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        poll
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_read(cx, into);
        self.watch(cx, poll)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::io::{Read, Write};
    use std::time::Instant as Clock;

    /// Reads a byte of a connection with a limit of 50 ms.
    async fn read(mut connection: Connection) -> io::Result<u8> {
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        std::future::poll_fn(|cx| Pin::new(&mut connection).poll_read(cx, &mut buffer)).await?;
        Ok(byte[0])
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn a_silent_connection_fails_and_another_can_take_its_place() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let free = Arc::new(Semaphore::new(1));
            let idle = Duration::from_millis(50);
            let mut connections = Connections { listener, free, idle, head: idle };
            let mut silent = std::net::TcpStream::connect(address).unwrap();
            let mut speaks = std::net::TcpStream::connect(address).unwrap();
            speaks.write_all(b"x").unwrap();
            let first = connections.accept().await;
            let second = tokio::spawn(async move { connections.accept().await });
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(!second.is_finished(), "one connection at a time");
            assert_eq!(read(first).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
            assert_eq!(read(second.await.unwrap()).await.unwrap(), b'x');
            assert_eq!(silent.read(&mut [0]).unwrap(), 0, "closed");
        });
    }

    #[test]
    fn a_head_that_is_sent_byte_by_byte_ends_in_time_and_others_are_served() {
        run(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (free, idle) = (Arc::new(Semaphore::new(2)), Duration::from_mins(1));
            let connections = Connections { listener, free, idle, head: Duration::from_millis(300) };
            let router = Router::new().route("/", get(async || "here"));
            tokio::spawn(connections.serve(router, std::future::pending()));
            let work = tokio::task::spawn_blocking(move || {
                let begin = Clock::now();
                let slow = || {
                    let mut stream = std::net::TcpStream::connect(address).unwrap();
                    for byte in b"GET / HTTP/1.1\r\nX: ".iter().chain(std::iter::repeat(&b'x')) {
                        std::thread::sleep(Duration::from_millis(20));
                        if stream.write_all(&[*byte]).is_err() || begin.elapsed() > Duration::from_secs(20) {
                            break;
                        }
                    }
                };
                std::thread::scope(|scope| {
                    (0..2).for_each(|_| drop(scope.spawn(slow)));
                    std::thread::sleep(Duration::from_millis(50));
                    let mut stream = std::net::TcpStream::connect(address).unwrap();
                    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
                    let mut text = String::new();
                    stream.read_to_string(&mut text).unwrap();
                    assert!(text.ends_with("here"), "{text}");
                });
                assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
            });
            work.await.unwrap();
        });
    }
}
