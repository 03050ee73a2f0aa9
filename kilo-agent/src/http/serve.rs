//! Accepting connections: HTTP/1.1, plain or over TLS, bounded in number and time.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::linger::Lingering;

/// Connections at a time; more wait in the kernel's queue.
const CONNECTIONS: usize = 256;
/// A client that sends no request (or no TLS hello) for this long is hung up on.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests under way at a stop get this long.
const FAREWELL: Duration = Duration::from_secs(10);
/// Request line and headers together, in bytes.
const LARGEST_HEAD: usize = 16 << 10;

/// Answer to a request.
pub type Answer = Response<Full<Bytes>>;

/// Binds the address. On all addresses of both families where it is `[::]`.
///
/// # Errors
/// When the address is in use or not of this host.
pub async fn bind(listen: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(listen).await {
        // A host without IPv6 has the other family only.
        Err(error)
            if listen.ip().is_unspecified() && error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) =>
        {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, listen.port())).await
        }
        other => other,
    }
}

/// Answers requests until `stop`; then those under way are finished.
pub async fn serve<H, F>(listener: TcpListener, tls: Option<TlsAcceptor>, handle: H, stop: CancellationToken)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, stream) = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (Ok(place), Ok((stream, _))) = (place, stream) else {
            // Out of file descriptors, for example: not a reason to spin.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (tls, handle, watcher) = (tls.clone(), handle.clone(), graceful.watcher());
        tokio::spawn(async move {
            welcome(Lingering::new(stream), tls, handle, watcher).await;
            drop(place);
        });
    }
    drop(listener);
    let _ = timeout(FAREWELL, graceful.shutdown()).await;
}

async fn welcome<H, F>(stream: Lingering, tls: Option<TlsAcceptor>, handle: H, watcher: Watcher)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    match tls {
        None => converse(stream, handle, watcher).await,
        Some(tls) => match timeout(PATIENCE, tls.accept(stream)).await {
            Ok(Ok(stream)) => converse(stream, handle, watcher).await,
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake"),
            Err(_) => tracing::debug!("TLS handshake takes too long"),
        },
    }
}

async fn converse<S, H, F>(stream: S, handle: H, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let service = service_fn(move |request| {
        let answer = handle(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(LARGEST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "http connection");
    }
}
