//! Desired content of the BPF maps.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use kilo_common::{forwarding::HopFields, maps};

use crate::{flat_map::FlatMap, settings::Tunnel};

/// Desired content of the BPF maps, for both families; `dataplane` writes what the programs handle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Where prefixes lead, and who may send from them.
    pub prefix: FlatMap<IpNet, maps::PrefixValue>,
    /// Hops by id; an absent id drops.
    pub hop: BTreeMap<u32, Hop>,
    /// Where hops 2 (Kilo's leader) and 3 (the acting leader) lead ([`kilo_common::lead`]). The second is
    /// written only where the kernel's own word is not of a later term.
    pub lead: [u64; 2],
    /// The second word as the location's annotations have it, with its term: for a host that keeps
    /// carrying packets with maps of another layout, in which its kernel's own word is lost. `None`:
    /// nobody leads in a term.
    pub lead_of_term: Option<u64>,
    /// Private address -> key that verifies that node's signals.
    pub signal_key: BTreeMap<IpAddr, maps::SignalKey>,
    /// Outer source -> the node that may send from it.
    pub node: BTreeMap<IpAddr, maps::NodeValue>,
    /// Sources -> `MASQ_SRC_*`.
    pub masq_src: FlatMap<IpNet, u32>,
    /// Destinations -> `MASQ_EXCLUDE` or `MASQ_FORCE`.
    pub masq_dst: FlatMap<IpNet, u32>,
    /// Interfaces that have the programs, by index.
    pub device: BTreeMap<u32, maps::Device>,
    /// The address that masqueraded packets get on an interface towards a destination, where it differs from
    /// the interface's entry in `device`.
    pub masq_addr: BTreeMap<(u32, IpNet), IpAddr>,
    /// The configuration that every program reads.
    pub config: maps::Config,
}

/// How a hop is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// This node's own stack.
    Local,
    /// Encrypted by WireGuard.
    Wireguard,
    /// Another node of this location.
    Node {
        /// The outer header.
        tunnel: Tunnel,
        /// Interface towards the node.
        ifindex: u32,
        /// Largest inner packet in bytes; 0 = not known.
        mtu: u32,
        /// This node's private address.
        local: IpAddr,
        /// The other node's private address.
        remote: IpAddr,
    },
}

impl HopFields for Hop {
    fn kind(&self) -> u32 {
        match self {
            Self::Local => maps::HOP_KIND_LOCAL,
            Self::Wireguard => maps::HOP_KIND_WIREGUARD,
            Self::Node { .. } => maps::HOP_KIND_NODE,
        }
    }

    fn mtu(&self) -> u32 {
        match self {
            Self::Node { mtu, .. } => *mtu,
            Self::Local | Self::Wireguard => 0,
        }
    }
}
