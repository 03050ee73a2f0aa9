//! Which pair of locations needs a relay, which one, and when the pair is connected directly again; and
//! what a relay gives to which pair. Pure: time, randomness and addresses are arguments.
//! docs/design/relay.md says why.

mod client;
mod fresh;
mod inputs;
mod lease;
mod leases;
mod numbers;
mod pair;
mod relay_addresses;
mod round;
mod server;
mod sources;
#[cfg(test)]
mod tests;
mod trial;
mod turn;

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use kilo_common::relay::Message;

use crate::{signal_id::NodeId, tunnel_path::TunnelPath};

pub use client::Client;
pub use inputs::{EndpointOverride, RelayInputs};
pub use relay_addresses::RelayAddresses;
pub use server::{Heard, Server};

/// After this long without an answer a pair prepares to use a relay: it asks for one.
pub const PREPARE: Duration = Duration::from_secs(8);
/// After this long it uses one: WireGuard has made three attempts, the last of which has had 3 s.
pub const SILENT: Duration = Duration::from_secs(13);
/// As [`SILENT`], for an established session. WireGuard answers data within 10 s, if only by a
/// keepalive (`KEEPALIVE_TIMEOUT` of `drivers/net/wireguard/messages.h`), and shakes hands anew after
/// 15 s without an answer.
pub const SILENT_SESSION: Duration = Duration::from_secs(16);
/// As [`SILENT_SESSION`], where the other end answers no tries, so that an endpoint that is left too early is
/// not found again: the time until WireGuard shakes hands anew, and three attempts.
pub const SILENT_FOR_GOOD: Duration = Duration::from_secs(28);
/// After this long an end is tried at every address where it might be; in an established session that waits
/// until a relay is asked for, because for 10 s the end may only have had nothing to answer.
pub const TRY: Duration = Duration::from_secs(3);
/// After this long of tries without an answer they become rare: nothing may answer there for days.
pub const TRY_SELDOM: Duration = Duration::from_secs(120);
/// For how long a moved endpoint is moved there again: longer than packets on the old path are in flight.
const INSISTS: Duration = Duration::from_secs(2);
/// How often a relayed pair is tried directly.
pub const DIRECT_EVERY: Duration = Duration::from_secs(60);
/// The longest time between two such tries, where direct paths do not last.
pub const DIRECT_SELDOM: Duration = Duration::from_secs(3600);
/// A direct path must last this long to count as one that lasts.
pub const LASTS: Duration = Duration::from_secs(600);
/// WireGuard no longer sends with a session of this age; a handshake is due before.
pub const FRESH: Duration = Duration::from_secs(180);

/// A replayed message is ignored once a message from the same sender that is this much newer has arrived;
/// paths reorder less than that. Sequence numbers are microseconds of the sender's clock.
pub const REORDERED: Duration = Duration::from_secs(2);
/// How long a relay keeps its pairs when it stops being a gateway, or its mesh is not known.
pub const RESTS: Duration = Duration::from_secs(30);

/// How two locations are connected: a [`TunnelPath`], with the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    /// At an endpoint that one of the two publishes.
    Direct,
    /// Through the NATs of both, at an endpoint that nobody has published.
    Punched,
    /// Through a relay.
    Relayed(NodeId),
}

impl Path {
    /// The path, without the relay.
    pub const fn kind(self) -> TunnelPath {
        match self {
            Self::Direct => TunnelPath::Direct,
            Self::Punched => TunnelPath::Punched,
            Self::Relayed(_) => TunnelPath::Relayed,
        }
    }
}

/// A gateway of another location, as this host's device and the mesh show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Its id.
    pub id: NodeId,
    /// It stands by, and so does this node: only keepalives go through the tunnel, which
    /// are not worth a relay.
    pub is_idle: bool,
    /// Time since the last handshake; `None`: there was none.
    pub handshake_age: Option<Duration>,
    /// Bytes sent to it so far, handshake attempts included.
    pub sent: u64,
    /// Bytes received from it so far.
    pub received: u64,
    /// The endpoint to which the device sends.
    pub endpoint: Option<SocketAddr>,
    /// The endpoint that it publishes.
    pub published: Option<SocketAddr>,
    /// Further addresses that it publishes.
    pub also_published: Vec<SocketAddr>,
    /// Further addresses where it might be reached directly, as others see it.
    pub candidates: Vec<SocketAddr>,
    /// It offers to relay.
    pub relays: bool,
    /// Its agent uses no relays, and does not relay for others.
    pub refuses: bool,
}

/// This node, as far as its pairs depend on it.
#[derive(Clone, Copy, Debug)]
pub struct OwnEnd {
    /// It may use relays.
    pub uses_relays: bool,
    /// Other nodes see it at another endpoint than it publishes.
    pub is_behind_nat: bool,
}

impl Seen {
    /// Whether a tunnel with it works, as far as WireGuard knows.
    pub fn is_fresh(&self) -> bool {
        self.handshake_age.is_some_and(|age| age < FRESH)
    }
}

/// What the agent has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a message from WireGuard's port, with the key shared with this node.
    Send {
        /// Node whose pair key authenticates the message.
        node: NodeId,
        /// Address and port to send to.
        to: SocketAddr,
        /// The message to send.
        message: Message,
    },
    /// Let WireGuard keep sending packets for this node there, if a late packet has moved the endpoint.
    Keep {
        /// The peer.
        node: NodeId,
        /// Its endpoint, as it was moved.
        to: SocketAddr,
    },
    /// Let WireGuard send packets for this node there.
    Move {
        /// The peer.
        node: NodeId,
        /// Its endpoint from now on.
        to: SocketAddr,
    },
}

/// Order of relays for a pair: the smallest is used. Both ends compute the same.
fn rank(one: NodeId, other: NodeId, relay: NodeId) -> u64 {
    // The finalizer of splitmix64: ids are hashes already, and only need to be mixed.
    let mut mixed = (one ^ other).wrapping_add(relay.rotate_left(17)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// An address as map values hold it: IPv4 as `::ffff:a.b.c.d`.
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}
