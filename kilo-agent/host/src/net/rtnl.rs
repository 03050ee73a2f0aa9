//! One rtnetlink socket: dumps, lookups and acknowledged writes.

use std::{io, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use rtnetlink::{
    Handle,
    packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::RouteNetlinkMessage,
    sys::AsyncSocket as _,
};
use tokio::task::JoinHandle;

use super::NetError;

/// How often a dump is attempted that is interrupted by a change.
const DUMP_ATTEMPTS: u32 = 10;
/// By how much the pause between two attempts grows with each; the second one comes at once.
const AGAIN: Duration = Duration::from_millis(5);

/// An rtnetlink socket of the network namespace it was opened in.
#[derive(Clone, Debug)]
pub struct Rtnl {
    handle: Handle,
    port: u32,
    _task: Arc<Task>,
}

/// A task that ends with its last user.
#[derive(Debug)]
pub(super) struct Task(pub(super) JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Replies to one request.
#[derive(Default)]
struct Answers {
    messages: Vec<RouteNetlinkMessage>,
    /// The kernel's tables changed during the dump.
    is_interrupted: bool,
    /// The last reply has arrived.
    is_complete: bool,
    /// The kernel's error.
    refused: Option<io::Error>,
}

/// Reads all answers to one request.
async fn read(mut stream: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin) -> Answers {
    let mut all = Answers::default();
    while let Some(answer) = stream.next().await {
        all.is_interrupted |= answer.header.flags & NLM_F_DUMP_INTR != 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(inner) => all.messages.push(inner),
            NetlinkPayload::Done(_) => all.is_complete = true,
            NetlinkPayload::Error(error) => {
                all.is_complete = true;
                all.refused = error.code.map(|code| io::Error::from_raw_os_error(code.get().abs()));
            }
            _ => {}
        }
    }
    all
}

impl Rtnl {
    /// Opens the socket in the calling thread's namespace. Strict checking
    /// lets the kernel filter dumps (routes by protocol) instead of us.
    pub fn new() -> Result<Self, NetError> {
        let (mut connection, handle, _) =
            rtnetlink::new_connection_with_strict_check().map_err(NetError::Socket)?;
        // Without the closing message half a dump looks like a whole one.
        let port = connection.socket_mut().socket_mut().bind_auto().map_err(NetError::Socket)?.port_number();
        connection.set_forward_done(true);
        connection.set_forward_ack(true);
        Ok(Self { handle, port, _task: Arc::new(Task(tokio::spawn(connection))) })
    }

    /// A socket that fails every request: its runtime has ended.
    #[cfg(test)]
    pub(crate) fn closed() -> Self {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        std::thread::spawn(move || runtime().block_on(async { Self::new().unwrap() })).join().unwrap()
    }

    /// Netlink port of this socket, which the kernel's notifications of changes made through it carry.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// As [`Self::dump`] in the calling thread's namespace, for requests with perhaps thousands of replies:
    /// the library keeps the buffers it needed as long as the socket, so this one is closed afterwards.
    pub async fn dump_much(
        &self,
        what: &str,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetError> {
        Self::new()?.dump(what, message).await
    }

    /// All answers to a dump request.
    pub async fn dump(
        &self,
        what: &str,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetError> {
        for attempt in 0..DUMP_ATTEMPTS {
            let (answers, interrupted) =
                self.exchange(what, message.clone(), NLM_F_REQUEST | NLM_F_DUMP).await?;
            if !interrupted {
                return Ok(answers);
            }
            // Many pods that start at once change it all the time.
            tokio::time::sleep(AGAIN * attempt).await;
        }
        // What is missing in an interrupted list would count as gone.
        let what = format!("{what}: the list changed {DUMP_ATTEMPTS} times while it was read");
        Err(NetError::Kernel { what, source: io::Error::from_raw_os_error(nix::libc::EINTR) })
    }

    /// The answers to a single lookup.
    pub async fn get(
        &self,
        what: &str,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, NetError> {
        Ok(self.exchange(what, message, NLM_F_REQUEST | NLM_F_ACK).await?.0)
    }

    /// Makes a change, which the kernel acknowledges. `flags`: `NLM_F_CREATE` and so on.
    pub async fn write(&self, what: &str, message: RouteNetlinkMessage, flags: u16) -> Result<(), NetError> {
        self.exchange(what, message, NLM_F_REQUEST | NLM_F_ACK | flags).await.map(|_| ())
    }

    async fn exchange(
        &self,
        what: &str,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool), NetError> {
        let mut request = NetlinkMessage::from(message);
        request.header.flags = flags;
        let stream = self.handle.clone().request(request).map_err(|_| NetError::Closed)?;
        // On a task of its own: the caller may stop waiting, and the connection would warn about each reply
        // that is no longer read.
        let read = tokio::spawn(read(stream)).await.map_err(|_| NetError::Closed)?;
        let Answers { messages, is_interrupted, is_complete, refused } = read;
        if let Some(source) = refused {
            return Err(NetError::Kernel { what: what.to_owned(), source });
        }
        if is_complete { Ok((messages, is_interrupted)) } else { Err(NetError::Closed) }
    }
}
