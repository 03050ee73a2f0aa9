//! A connection that is closed the way HTTP wants it (RFC 9112, section 9.6):
//! first the own direction, then what the client still sends is read and
//! thrown away. A socket closed with unread data resets the connection, and the
//! client may lose the answer that tells it what was wrong.

use std::{
    io,
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

/// A TCP connection that lingers when it is shut down.
pub struct Lingering {
    stream: TcpStream,
    /// Since it is shut down: until when, and bytes still allowed.
    farewell: Option<(Pin<Box<Sleep>>, usize)>,
}

impl Lingering {
    /// Of a new connection.
    pub const fn new(stream: TcpStream) -> Self {
        Self { stream, farewell: None }
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
        Pin::new(&mut self.stream).poll_write(context, bytes)
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
