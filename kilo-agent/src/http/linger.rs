//! A connection that is closed the way HTTP wants it (RFC 9112, section 9.6):
//! first the own direction, then what the client still sends is read and
//! thrown away. A socket closed with unread data resets the connection, and the
//! client may lose the answer that tells it what was wrong.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

/// How long a client may go on.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many bytes it may send meanwhile.
const MOST: usize = 32 << 20;

/// A client that takes nothing for this long is hung up on.
const TAKES_WITHIN: Duration = Duration::from_secs(10);

/// A TCP connection that lingers when it is shut down, and ends when the client does not read.
pub struct Lingering {
    stream: TcpStream,
    /// Since the client takes nothing more: until when.
    stuck: Option<Pin<Box<Sleep>>>,
    /// Since it is shut down: until when, and bytes still allowed.
    farewell: Option<(Pin<Box<Sleep>>, usize)>,
}

impl Lingering {
    /// Of a new connection.
    pub const fn new(stream: TcpStream) -> Self {
        Self { stream, stuck: None, farewell: None }
    }

    /// What a write came to; an error when the client has taken nothing for too long.
    fn in_time<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stuck = None;
            return written;
        }
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(sleep(TAKES_WITHIN)));
        ready!(stuck.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Lingering {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.in_time(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.farewell.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
        }
        let (until, left) = this.farewell.get_or_insert_with(|| (Box::pin(sleep(PATIENCE)), MOST));
        let mut bytes = [0; 16 << 10];
        while *left > 0 && until.as_mut().poll(context).is_pending() {
            let mut buffer = ReadBuf::new(&mut bytes);
            match ready!(Pin::new(&mut this.stream).poll_read(context, &mut buffer)) {
                Ok(()) if buffer.filled().is_empty() => break,
                Ok(()) => *left = left.saturating_sub(buffer.filled().len()),
                // The client is gone.
                Err(_) => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}
