//! What the plan needs to know about a host: its links, its uplinks, and where others' routes lead.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// One BPF program attached to one interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attached {
    /// Name of the interface.
    pub interface: String,
    /// Name of the program, as bpftool shows it.
    pub program: String,
    /// `ingress` or `egress`.
    pub direction: String,
    /// `tcx` or `clsact`.
    pub hook: String,
}

/// Addresses that masqueraded packets get on an uplink, by family.
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
    /// Those of the uplinks on which packets have no link-layer header.
    pub layer3: BTreeSet<u32>,
    /// Interfaces of this node's pods: veths into other network namespaces, on the CNI's bridge or with an
    /// address of its own from the pod CIDRs.
    pub pods: BTreeSet<u32>,
    /// Whether TCP connections last although connection tracking sees some of their segments only.
    pub tolerates_gaps_in_tcp: bool,
    /// Names and link types of interfaces that would be uplinks, but whose link-layer header is not known.
    pub unknown_headers: BTreeMap<String, u16>,
    /// Destinations towards which masqueraded packets get another address than the
    /// uplink's usual one, as the kernel would choose.
    pub masq_addrs: BTreeMap<(u32, IpNet), IpAddr>,
    /// MTU of each uplink in bytes.
    pub mtus: BTreeMap<u32, u32>,
    /// Interface of the preferred path to each node address of this location, as a route lookup returns it;
    /// absent: the private interface.
    pub towards: BTreeMap<IpAddr, u32>,
    /// Interfaces of the other next hops where a route to a node has several.
    pub more_towards: BTreeMap<IpAddr, Vec<u32>>,
    /// Networks of the uplinks, with their interfaces.
    pub networks: Vec<(u32, IpNet)>,
    /// The private address is on loopback or a dummy device: every uplink leads to it.
    pub private_is_unbound: bool,
    /// Index of the VXLAN device; `None`: there is none.
    pub vxlan: Option<u32>,
    /// Index of the IPIP device, for packets that get no outer header in place.
    pub ipip: Option<u32>,
    /// Path MTUs towards nodes that routers have reported, in bytes with the outer header.
    pub path_mtus: BTreeMap<IpAddr, u32>,
    /// Addresses of the location's nodes, this one included, in the overlay of another CNI, by name; steered
    /// packets to the leader are sent there.
    pub overlay: BTreeMap<String, Ipv4Addr>,
    /// Index of the device that has this node's overlay address.
    pub overlay_device: Option<u32>,
    /// Prefixes that others' routes lead out of this host by its uplinks, without
    /// default routes.
    pub elsewhere: BTreeMap<IpNet, Elsewhere>,
    /// The kernel takes no IPv6 routes to the WireGuard device: IPv6 is off on this host.
    pub has_no_ipv6: bool,
    /// Pod CIDRs that this node had earlier in this boot: pods that still run, or were started before the
    /// agent, may have addresses from them.
    pub former_pod_cidrs: Vec<IpNet>,
}

impl HostLinks {
    /// Whether an address is in a network of this host whose links have link-layer headers.
    pub fn is_neighbour(&self, address: &IpAddr) -> bool {
        self.networks.iter().any(|(index, net)| net.contains(address) && !self.layer3.contains(index))
    }
}

/// A prefix that somebody else's route leads out by an uplink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// The prefix is on the link itself: the route has no gateway.
    pub on_link: bool,
    /// The kernel prefers it to a route of ours to the same prefix.
    pub wins: bool,
}
