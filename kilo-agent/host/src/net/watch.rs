//! Notifies when links, addresses, routes or rules of the namespace change.

use std::{
    os::fd::{AsRawFd as _, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use rtnetlink::{MulticastGroup, packet_core::NetlinkPayload, packet_route::RouteNetlinkMessage};
use tokio::{
    sync::{Notify, watch::Sender},
    time::{Instant, sleep_until},
};

use super::{NetError, rtnl::Task};

/// Events are gathered until none came for this long …
const QUIET: Duration = Duration::from_millis(100);
/// … but never longer than this.
const LONGEST: Duration = Duration::from_secs(1);

/// Receive buffer in bytes: in a mesh of thousands of nodes, the agent is also notified of everything it
/// writes itself.
const BUFFER: usize = 8 << 20;

const LINKS: u8 = 1;
const ADDRESSES: u8 = 2;
const ROUTES: u8 = 4;
const RULES: u8 = 8;
const FILTERS: u8 = 16;
const CLOSED: u8 = 32;

/// What has changed since the last call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// Links came, went, or changed their state or MTU.
    pub links: bool,
    /// Addresses came or went.
    pub addresses: bool,
    /// Routes came or went.
    pub routes: bool,
    /// Policy rules came or went.
    pub rules: bool,
    /// Queueing disciplines or filters came or went (TCX links do so unannounced).
    pub filters: bool,
}

/// Subscription to the kernel's notifications, without those of routes, rules and addresses that we write
/// ourselves.
#[derive(Debug)]
pub struct Watcher {
    pending: Arc<Pending>,
    _tasks: [Task; 2],
}

#[derive(Debug)]
struct Pending {
    bits: AtomicU8,
    notify: Notify,
    /// Notified at once when packets may take another path.
    routes_changed: Sender<()>,
}

impl Pending {
    fn add(&self, bits: u8) {
        if bits & (LINKS | ADDRESSES | ROUTES | RULES | CLOSED) != 0 {
            self.routes_changed.send_replace(());
        }
        self.bits.fetch_or(bits, Ordering::AcqRel);
        self.notify.notify_one();
    }
}

impl Watcher {
    /// Subscribes in the calling thread's network namespace. `own`: port of the socket whose writes are
    /// ignored ([`Rtnl::port`](super::Rtnl::port)).
    pub fn new(own: Option<u32>) -> Result<Self, NetError> {
        Self::notifying(own, Sender::default())
    }

    /// As [`Self::new`]; `routes_changed` is notified at once when packets may take another path.
    fn notifying(own: Option<u32>, routes_changed: Sender<()>) -> Result<Self, NetError> {
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Ipv4Rule,
            MulticastGroup::Ipv6Rule,
            MulticastGroup::Tc,
        ];
        let (mut connection, _handle, mut messages) =
            rtnetlink::new_multicast_connection(&groups).map_err(NetError::Socket)?;
        // SAFETY: the connection owns the socket, and lives until after the call.
        let socket = unsafe { BorrowedFd::borrow_raw(connection.socket_mut().as_raw_fd()) };
        // If this fails, more events may be lost; everything is then read again.
        let _ = setsockopt(&socket, RcvBufForce, &BUFFER);
        let pending = Arc::new(Pending { bits: AtomicU8::new(0), notify: Notify::new(), routes_changed });
        let connection = Task(tokio::spawn(connection));
        let sink = Arc::clone(&pending);
        // Drained at once and kept as five bits: a storm of events costs no memory.
        let reader = Task(tokio::spawn(async move {
            while let Some((message, _)) = messages.next().await {
                if Some(message.header.port_number) == own {
                    continue;
                }
                let bits = match message.payload {
                    NetlinkPayload::InnerMessage(inner) => classify(&inner),
                    // Events were lost: look at everything.
                    NetlinkPayload::Overrun(_) => LINKS | ADDRESSES | ROUTES | RULES | FILTERS,
                    _ => 0,
                };
                if bits != 0 {
                    sink.add(bits);
                }
            }
            sink.add(CLOSED);
        }));
        Ok(Self { pending, _tasks: [connection, reader] })
    }

    /// Waits for the next change and gathers what comes with it. An error
    /// means that the subscription ended: open a new one and look at everything.
    pub async fn changed(&mut self) -> Result<Changed, NetError> {
        let mut bits = 0;
        while bits == 0 {
            self.pending.notify.notified().await;
            bits = self.pending.bits.swap(0, Ordering::AcqRel);
        }
        let longest = Instant::now() + LONGEST;
        while bits & CLOSED == 0 {
            let quiet = Instant::now() + QUIET;
            tokio::select! {
                () = self.pending.notify.notified() => bits |= self.pending.bits.swap(0, Ordering::AcqRel),
                () = sleep_until(quiet.min(longest)) => break,
            }
            if Instant::now() >= longest {
                break;
            }
        }
        if bits & CLOSED != 0 {
            return Err(NetError::Closed);
        }
        Ok(Changed {
            links: bits & LINKS != 0,
            addresses: bits & ADDRESSES != 0,
            routes: bits & ROUTES != 0,
            rules: bits & RULES != 0,
            filters: bits & FILTERS != 0,
        })
    }
}

/// Notifies on every change that was not made through the socket `own`, for as long as the runtime lives. A
/// subscription that ends is opened again, and counts as a change. `routes_changed` is notified at once when packets
/// may take another path.
pub fn watch(notify: Arc<Notify>, own: u32, routes_changed: Sender<()>) -> Result<(), NetError> {
    let mut watcher = Watcher::notifying(Some(own), routes_changed.clone())?;
    tokio::spawn(async move {
        loop {
            if watcher.changed().await.is_err() {
                match Watcher::notifying(Some(own), routes_changed.clone()) {
                    Ok(new) => watcher = new,
                    Err(error) => {
                        tracing::error!(%error, "failed to subscribe to netlink events; retrying");
                        tokio::time::sleep(LONGEST).await;
                    }
                }
            }
            notify.notify_one();
        }
    });
    Ok(())
}

fn classify(message: &RouteNetlinkMessage) -> u8 {
    match message {
        RouteNetlinkMessage::NewLink(_) | RouteNetlinkMessage::DelLink(_) => LINKS,
        RouteNetlinkMessage::NewAddress(_) | RouteNetlinkMessage::DelAddress(_) => ADDRESSES,
        RouteNetlinkMessage::NewRoute(_) | RouteNetlinkMessage::DelRoute(_) => ROUTES,
        RouteNetlinkMessage::NewRule(_) | RouteNetlinkMessage::DelRule(_) => RULES,
        RouteNetlinkMessage::NewQueueDiscipline(_)
        | RouteNetlinkMessage::DelQueueDiscipline(_)
        | RouteNetlinkMessage::NewTrafficFilter(_)
        | RouteNetlinkMessage::DelTrafficFilter(_) => FILTERS,
        _ => 0,
    }
}
