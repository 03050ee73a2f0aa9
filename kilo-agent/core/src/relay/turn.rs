//! What a pair works with in its turn: what it sees, and what it wants done.

use std::{collections::BTreeMap, net::SocketAddr, time::Instant};

use kilo_common::relay::{Kind, Message, is_port};

use super::{NodeId, Output, Seen, numbers::Numbers};

/// What a pair needs in its turn.
pub(super) struct Turn<'a> {
    pub(super) ends: (NodeId, NodeId),
    pub(super) seen: &'a Seen,
    pub(super) relays: &'a BTreeMap<NodeId, SocketAddr>,
    pub(super) numbers: &'a mut Numbers,
    pub(super) outputs: &'a mut Vec<Output>,
    pub(super) now: Instant,
}

impl Turn<'_> {
    /// The relay to one of whose ports the device sends, where that
    /// relay is, and the port.
    pub(super) fn relay_of_endpoint(&self) -> Option<(NodeId, SocketAddr, SocketAddr)> {
        let endpoint = self.seen.endpoint.filter(|at| is_port(at.port()))?;
        // The other end may be behind the relay's NAT, and have
        // one of these ports there.
        if self.seen.published == Some(endpoint) || self.seen.candidates.contains(&endpoint) {
            return None;
        }
        let (relay, address) = self.relays.iter().find(|(_, address)| address.ip() == endpoint.ip())?;
        Some((*relay, *address, endpoint))
    }

    pub(super) fn send(&mut self, node: NodeId, to: SocketAddr, message: Message) {
        self.outputs.push(Output::Send { node, to, message });
    }
}

pub(super) const fn message_to(
    kind: Kind,
    (own, other): (NodeId, NodeId),
    nonce: u64,
    sequence: u64,
) -> Message {
    Message { kind, flags: 0, nonce, sequence, sender: own, other, token: 0, port: 0 }
}
