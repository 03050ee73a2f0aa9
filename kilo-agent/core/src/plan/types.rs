//! The desired state of one host.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::Conflict;
pub use crate::{
    net::{MAIN_TABLE, NetPlan, Route},
    tables::{Hop, Tables},
};
use crate::{observed::HostLinks, wireguard::WireguardPlan};

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
    /// Prefixes that VPN peers or locations offer and this host reaches by a route of its own, which the kernel
    /// keeps to.
    pub left_to_host: BTreeSet<IpNet>,
    /// What nodes claim although one of them, or the mesh, has it.
    pub conflicts: Vec<Conflict>,
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
