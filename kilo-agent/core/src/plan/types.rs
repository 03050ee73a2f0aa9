//! The desired state of one host.

use std::{collections::BTreeSet, fmt, net::IpAddr};

pub use crate::{
    net::{MAIN_TABLE, NetPlan, Route},
    tables::{Hop, Tables},
};
use crate::{
    observed::HostLinks,
    wireguard::{WireguardPlan, key::PublicKey},
};

/// Everything the actuators apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// Peers of the WireGuard device.
    pub wireguard: WireguardPlan,
    /// Addresses and routes.
    pub net: NetPlan,
    /// Content of the BPF maps.
    pub tables: Tables,
    /// Interfaces that have the TC programs, besides the WireGuard device.
    pub uplinks: BTreeSet<u32>,
    /// Those of `uplinks` on which packets have no link-layer header.
    pub layer3: BTreeSet<u32>,
    /// Interfaces of pods whose packets may bypass the stack (`--host-routing`).
    pub pods: BTreeSet<u32>,
    /// The tunnel devices (VXLAN, IPIP); packets that come in by them pass a program, too.
    pub tunnels: BTreeSet<u32>,
    /// Private addresses that several nodes claim.
    pub conflicts: Vec<Conflict>,
    /// WireGuard keys that several nodes claim.
    pub key_conflicts: Vec<KeyConflict>,
}

impl HostPlan {
    /// Addresses of nodes and peers that this host reaches without a router: each takes an entry of the
    /// kernel's neighbour table. Nodes of this location are reached at their private addresses, whatever the
    /// encapsulation, and WireGuard peers at their endpoints.
    pub fn neighbours<'a>(&'a self, links: &'a HostLinks) -> impl Iterator<Item = IpAddr> + 'a {
        let endpoints = self.wireguard.peers.values().filter_map(|peer| Some(peer.endpoint?.ip()));
        let endpoints: BTreeSet<_> = endpoints.filter(|ip| !self.tables.node.contains_key(ip)).collect();
        self.tables.node.keys().copied().chain(endpoints).filter(|ip| links.is_neighbour(ip))
    }
}

/// A private address that several nodes claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The private address.
    pub address: IpAddr,
    /// Names of the nodes, sorted.
    pub nodes: Vec<String>,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} claim the private address {}", self.nodes.join(", "), self.address)
    }
}

/// What an operator does about several nodes with one WireGuard key.
pub const KEY_REMEDY: &str = "remove /var/lib/kilo/key on all but one of them and delete the pods of their agents, or \
     delete the Node objects that are stale";

/// A WireGuard key that several nodes claim: others have one of them as a peer, so the rest are out of the mesh.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyConflict {
    /// The public key.
    pub key: PublicKey,
    /// Names of the nodes, sorted.
    pub nodes: Vec<String>,
}

impl fmt::Display for KeyConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} claim the WireGuard key {}: {KEY_REMEDY}", self.nodes.join(", "), self.key)
    }
}
