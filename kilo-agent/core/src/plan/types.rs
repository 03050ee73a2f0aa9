//! The desired state of one host.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use ipnet::IpNet;
use kilo_common::{forwarding::Way, maps};

use crate::{
    flat_map::{FlatMap, FlatSet, Key},
    settings::Tunnel,
    wireguard::WireguardPlan,
};

/// Everything the actuators bring about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// Peers of the WireGuard device.
    pub wireguard: WireguardPlan,
    /// Addresses and routes.
    pub net: NetPlan,
    /// Content of the BPF maps.
    pub tables: Tables,
    /// Interfaces the TC programs sit on, besides the WireGuard device.
    pub uplinks: BTreeSet<u32>,
    /// Of these: packets have no link-layer header there.
    pub layer3: BTreeSet<u32>,
    /// The tunnel devices there are; what comes in by them passes a program, too.
    pub tunnels: BTreeSet<u32>,
    /// Private addresses that several nodes claim.
    pub conflicts: Vec<Conflict>,
}

/// A private address that several nodes claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The address.
    pub address: IpAddr,
    /// Names of the nodes, sorted.
    pub nodes: Vec<String>,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} claim the private address {}", self.nodes.join(", "), self.address)
    }
}

/// Desired addresses and routes of this host; only these are managed,
/// everything else is somebody else's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetPlan {
    /// MTU of the WireGuard device in bytes.
    pub mtu: u32,
    /// Addresses of the WireGuard device.
    pub addresses: BTreeSet<IpNet>,
    /// Routes, all through the WireGuard device.
    pub routes: FlatSet<Route>,
    /// Prefixes that no route of ours leads to and no default route may take: pods of this node
    /// while nothing holds them, and those of nodes that were given up.
    pub unreachable: BTreeSet<IpNet>,
    /// Next hops the kernel keeps resolved, with their interface.
    pub neighbours: BTreeSet<(u32, IpAddr)>,
}

/// Route through the WireGuard device (scope link).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// Destination.
    pub destination: IpNet,
    /// Routing table; wanted ones are in [`MAIN_TABLE`].
    pub table: u32,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// Largest packet in bytes, where it is less than the device's MTU: the
    /// stack tells senders of larger ones.
    pub mtu: Option<u32>,
    /// Nothing may go there another way: an `unreachable` route of a high metric
    /// stands behind this one.
    pub closed: bool,
}

impl Key for Route {
    type Rank = (<IpNet as Key>::Rank, u32, Option<IpAddr>, Option<u32>, bool);
    fn rank(&self) -> Self::Rank {
        (self.destination.rank(), self.table, self.source, self.mtu, self.closed)
    }
}

/// The main routing table.
pub const MAIN_TABLE: u32 = 254;

/// Desired content of the BPF maps, both families; `dataplane` writes what the
/// programs handle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Where prefixes lead, and who may send from them.
    pub prefix: FlatMap<IpNet, maps::PrefixValue>,
    /// Hops by id; an absent id drops.
    pub hop: BTreeMap<u32, Hop>,
    /// What hops 2 (Kilo's leader) and 3 (the acting leader) lead to ([`kilo_common::lead`]).
    /// The second is written only where the kernel's own is not of a later term.
    pub lead: [u64; 2],
    /// Private address -> what that node's signals are checked with.
    pub signal_key: BTreeMap<IpAddr, maps::SignalKey>,
    /// Outer source -> the node that may send from it.
    pub node: BTreeMap<IpAddr, maps::NodeValue>,
    /// Sources: `MASQ_SRC_*`.
    pub masq_src: FlatMap<IpNet, u32>,
    /// Destinations: `MASQ_EXCLUDE` or `MASQ_FORCE`.
    pub masq_dst: FlatMap<IpNet, u32>,
    /// Interfaces the programs sit on, by index.
    pub device: BTreeMap<u32, maps::Device>,
    /// What masqueraded packets get on an interface towards a destination, where that is
    /// not what the interface's entry in `device` says.
    pub masq_addr: BTreeMap<(u32, IpNet), IpAddr>,
    /// What every program needs to know.
    pub config: maps::Config,
}

/// How a hop is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// This node's own stack.
    Local,
    /// WireGuard encrypts.
    Wireguard,
    /// Another node of the own location.
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

impl Way for Hop {
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
