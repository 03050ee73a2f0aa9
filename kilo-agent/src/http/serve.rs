//! Accepts connections: HTTP/1.1, in cleartext or over TLS, limited in number and duration.

use std::{convert::Infallible, future::poll_fn, io, net::SocketAddr, time::Duration};

use http_body_util::combinators::UnsyncBoxBody;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::connection_limit::ConnectionLimit;

/// Timeout for a request's headers, or for the TLS handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// After this time a connection accepts no further requests.
const LONGEST: Duration = Duration::from_secs(60);
/// Time for pending requests after that, or at a stop.
const FAREWELL: Duration = Duration::from_secs(10);
/// Timeout for a client to accept more bytes of a response.
const TAKES_WITHIN: Duration = Duration::from_secs(10);
/// After the last response a client may go on sending for this long ...
const LINGER: Duration = Duration::from_secs(2);
/// ... and this many bytes.
const LINGER_BYTES: u64 = 32 << 20;
/// Maximum size of request line and headers together, in bytes.
const LARGEST_HEAD: usize = 16 << 10;

/// Response to a request; its body is complete, or a stream such as `/events`.
pub type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Request extension: cancelled when the connection is about to be closed, so that an endless response ends.
#[derive(Clone, Debug, Default)]
pub struct Closing(pub CancellationToken);

/// Binds the address; `[::]` means all addresses of both families.
///
/// # Errors
/// When the address is in use or does not belong to this host.
pub async fn bind(listen: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(listen).await {
        // Without IPv6 the host has IPv4 only.
        Err(error)
            if listen.ip().is_unspecified() && error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) =>
        {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, listen.port())).await
        }
        other => other,
    }
}

/// Serves requests until `stop`; pending ones are then completed.
pub async fn serve<H, F>(listener: TcpListener, tls: Option<TlsAcceptor>, handle: H, stop: CancellationToken)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Unpin + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let mut limit = ConnectionLimit::default();
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let accepted = accepted.and_then(|(stream, client)| Ok((stream.local_addr()?, stream, client)));
        let Ok((own, stream, client)) = accepted else {
            // Out of file descriptors, for example: must not spin.
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let slot = limit.take(client, own);
        let (tls, handle, stop) = (tls.clone(), handle.clone(), stop.clone());
        connections.spawn(async move {
            tokio::select! {
                () = slot.lost.cancelled() => tracing::debug!(%client, "HTTP connection closed to make room for other clients"),
                () = welcome(stream, tls, handle, stop) => {}
            }
        });
    }
    drop(listener);
    connections.close();
    let _ = timeout(FAREWELL, connections.wait()).await;
}

async fn welcome<H, F>(stream: TcpStream, tls: Option<TlsAcceptor>, handle: H, stop: CancellationToken)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Unpin + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_write_timeout_pinned(Some(TAKES_WITHIN));
    match tls {
        None => converse(stream, handle, stop).await,
        Some(tls) => match timeout(PATIENCE, tls.accept(stream)).await {
            Ok(Ok(stream)) => converse(stream, handle, stop).await,
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!("TLS handshake timed out"),
        },
    }
}

async fn converse<S, H, F>(stream: S, handle: H, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Clone + Send + Unpin + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let closing = Closing::default();
    let closes = closing.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(closing.clone());
        let answer = handle(request);
        Box::pin(async move { Ok::<_, Infallible>(answer.await) })
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(LARGEST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let ended = tokio::select! {
        ended = poll_fn(|context| connection.poll_without_shutdown(context)) => Ok(ended),
        () = async {
            tokio::select! {
                () = stop.cancelled() => {}
                () = sleep(LONGEST) => {}
            }
        } => {
            closes.0.cancel();
            Pin::new(&mut connection).graceful_shutdown();
            timeout(FAREWELL, poll_fn(|context| connection.poll_without_shutdown(context))).await
        }
    };
    if ended.is_ok() {
        hang_up(connection.into_parts().io.into_inner()).await;
    }
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "HTTP connection failed"),
        Err(_) => tracing::debug!("HTTP connection closed: client reads too slowly"),
    }
}

/// Closes a connection as in RFC 9112, section 9.6: first the sending direction, then the client's remaining
/// data is read and discarded. Closing a socket with unread data would reset the connection, and the client
/// might lose the response that explains the error.
async fn hang_up(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let rest = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(LINGER_BYTES), &mut tokio::io::sink()).await
    };
    let _ = timeout(LINGER, rest).await;
}
