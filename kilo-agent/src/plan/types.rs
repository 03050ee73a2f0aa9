//! The desired state of one host.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use ipnet::IpNet;
use kilo_common::maps;

use crate::{
    sorted::{Key, SortedMap, SortedSet},
    topology::Tunnel,
    wireguard::key::{PublicKey, SecretKey},
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

/// Desired WireGuard peers. The private key stays with the actuator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireguardPlan {
    /// UDP port, host byte order.
    pub listen_port: u16,
    /// Peers by key.
    pub peers: BTreeMap<PublicKey, WireguardPeer>,
}

/// One desired WireGuard peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireguardPeer {
    /// Prefixes routed to it, without host bits; a prefix is claimed by one peer only.
    pub allowed_ips: SortedSet<IpNet>,
    /// Resolved endpoint; `None` leaves what the device has.
    pub endpoint: Option<SocketAddr>,
    /// True when the peer may roam (it has a keepalive): an endpoint the
    /// device learnt by itself is not overwritten.
    pub roams: bool,
    /// Seconds; 0 = off.
    pub persistent_keepalive: u16,
    /// Optional symmetric key.
    pub preshared_key: Option<SecretKey>,
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
    pub routes: SortedSet<Route>,
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
    pub prefix: SortedMap<IpNet, maps::PrefixValue>,
    /// Hops by id; an absent id drops.
    pub hop: BTreeMap<u32, Hop>,
    /// Outer source -> the node that may send from it.
    pub node: BTreeMap<IpAddr, maps::NodeValue>,
    /// Sources: `MASQ_SRC_*`.
    pub masq_src: SortedMap<IpNet, u32>,
    /// Destinations: `MASQ_EXCLUDE` or `MASQ_FORCE`.
    pub masq_dst: SortedMap<IpNet, u32>,
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

/// What masqueraded packets get on an uplink, by family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uplink {
    /// Its first global IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// The global IPv6 address that the kernel would use towards the Internet.
    pub v6: Option<Ipv6Addr>,
}

/// What the plan needs to know about this host's links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostLinks {
    /// Index of the WireGuard device.
    pub kilo: u32,
    /// Interface that carries the private address.
    pub private: Option<u32>,
    /// Interfaces that lead out of the host (never loopback, the WireGuard
    /// device, the CNI bridge or pods' interfaces), with the addresses
    /// masqueraded packets get. The private interface is one of them.
    pub uplinks: BTreeMap<u32, Uplink>,
    /// Of these: packets have no link-layer header there.
    pub layer3: BTreeSet<u32>,
    /// Interfaces that would be uplinks, but whose link-layer header is not known, with their
    /// link type.
    pub unknown_headers: BTreeMap<String, u16>,
    /// Destinations towards which masqueraded packets get another address than the
    /// uplink's usual one, as the kernel would choose.
    pub masq_addrs: BTreeMap<(u32, IpNet), IpAddr>,
    /// MTU of each uplink in bytes.
    pub mtus: BTreeMap<u32, u32>,
    /// Interface and preferred path to each node address of the own location:
    /// what a route lookup answers; absent = the private interface.
    pub towards: BTreeMap<IpAddr, u32>,
    /// Interfaces of the other next hops where a route to a node has several.
    pub more_towards: BTreeMap<IpAddr, Vec<u32>>,
    /// Networks of the uplinks, with their interfaces.
    pub networks: Vec<(u32, IpNet)>,
    /// The private address is on loopback or a dummy device: every uplink leads to it.
    pub private_is_unbound: bool,
    /// The VXLAN device.
    pub vxlan: Option<u32>,
    /// The IPIP device for packets that get no outer header in place.
    pub ipip: Option<u32>,
    /// What routers said they carry towards nodes, in bytes with the outer header.
    pub path_mtus: BTreeMap<IpAddr, u32>,
    /// Addresses of the location's nodes (this one's too) in the overlay of
    /// another CNI, by name; steered packets to the leader are sent there.
    pub overlay: BTreeMap<String, Ipv4Addr>,
    /// The device that has this node's overlay address.
    pub overlay_device: Option<u32>,
    /// Prefixes that others' routes lead out of this host by its uplinks, without
    /// default routes.
    pub elsewhere: BTreeMap<IpNet, Elsewhere>,
}

/// A prefix this host reaches by an uplink, as somebody else's route says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// The link itself: there is no gateway.
    pub on_link: bool,
    /// The kernel prefers it to a route of ours to the same prefix.
    pub wins: bool,
}
