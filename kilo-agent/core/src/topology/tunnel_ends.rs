//! Who is at the other end of a WireGuard tunnel.

use std::collections::BTreeMap;

use super::Mesh;
use crate::wireguard::key::PublicKey;

/// The other end: a location through one of its gateways, or a VPN peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TunnelEnd {
    /// A location.
    Location {
        /// Its name, as [`Segment::location`](super::Segment::location).
        location: String,
        /// The gateway that has this key.
        node: String,
    },
    /// A VPN peer.
    Peer {
        /// Name of the Peer object.
        peer: String,
        /// It has no fixed endpoint and connects by itself: its absence is not a fault.
        roams: bool,
    },
}

impl TunnelEnd {
    /// Name shown in status: the location, or `peer:NAME`.
    pub fn name(&self) -> String {
        match self {
            Self::Location { location, .. } => location.clone(),
            Self::Peer { peer, .. } => format!("peer:{peer}"),
        }
    }

    /// Whether somebody should be there at any time.
    pub const fn is_always_there(&self) -> bool {
        !matches!(self, Self::Peer { roams: true, .. })
    }
}

/// The other ends by public key. A key that both a location and a peer have belongs to the location.
pub fn tunnel_ends(mesh: &Mesh) -> BTreeMap<PublicKey, TunnelEnd> {
    let peers = mesh.peers.iter().rev().map(|peer| {
        (peer.public_key, TunnelEnd::Peer { peer: peer.name.clone(), roams: peer.endpoint.is_none() })
    });
    let locations = mesh.segments.iter().enumerate().rev().flat_map(|(at, segment)| {
        let gateways = mesh.gateways_of(at).into_owned().order.into_iter();
        gateways.filter_map(|gateway| {
            let member = segment.members.get(gateway)?;
            let (location, node) = (segment.location.clone(), member.name().to_owned());
            Some((member.node.key?, TunnelEnd::Location { location, node }))
        })
    });
    peers.chain(locations).collect()
}
