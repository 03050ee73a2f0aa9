//! From the mesh, this node and its links to the complete desired state of
//! this host, as plain values. Pure: no I/O, no clock.

mod arrival;
mod conflicts;
mod endpoints;
mod hops;
mod lookup;
mod lost;
mod masquerade;
pub mod model;
mod overlay;
mod remote;
mod routes;
pub mod sized_packet;
mod steering;
pub mod trace;
mod types;
mod wireguard;

pub use conflicts::{Claimed, Conflict, ConflictKind, all as conflicts};
pub use hops::{HopIds, MOST_OTHERS};
pub use overlay::{foreign_pods, overlay_addresses, published as published_overlay};
pub use steering::sender;
pub use types::*;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use kilo_common::{
    direct,
    lead::Term,
    maps::{
        CONFIG_ENCAPSULATED, CONFIG_GATEWAY, CONFIG_LEADER, CONFIG_MASQUERADE, CONFIG_NATIVE, CONFIG_RELAY,
        CONFIG_TCP_BYPASSES, Config, SignalKey,
    },
};

use self::remote::Remote;
use crate::{
    addresses::is_reached_from_anywhere,
    observed::HostLinks,
    relay::RelayInputs,
    settings::{Encapsulate, Settings, Tunnel},
    signal_id,
    topology::{LocalMesh, Member, Mesh, Segment},
    wireguard::key::PublicKey,
};

/// Ports that masquerading chooses from: Linux's default range for outgoing connections.
pub const NAT_PORTS: (u16, u16) = (32_768, 60_999);

/// Everything the plan of one host depends on.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The mesh as seen from this node.
    pub mesh: &'a LocalMesh<'a>,
    /// Flags of this agent.
    pub settings: &'a Settings,
    /// This host's interfaces.
    pub links: &'a HostLinks,
    /// Hop ids, allocated for this mesh by [`HopIds::update`].
    pub hops: &'a HopIds,
    /// Addresses of endpoints that are DNS names.
    pub resolved: &'a BTreeMap<String, IpAddr>,
    /// Endpoints at which this host's own WireGuard device sees its peers.
    pub seen: &'a BTreeMap<PublicKey, SocketAddr>,
    /// Endpoints that relays decide, and whether the programs look for relay messages.
    pub relays: &'a RelayInputs,
    /// Keys that verify signals of other nodes, by the nodes' addresses.
    pub signal_keys: &'a BTreeMap<IpAddr, SignalKey>,
    /// Keepalive of this node in seconds, written for all its peers.
    pub persistent_keepalive: u32,
    /// This agent does the masquerading.
    pub masquerade: bool,
    /// MTU of the WireGuard device in bytes.
    pub mtu: u32,
}

impl Inputs<'_> {
    /// Whether Kilo, and not another CNI, carries packets to pods of this location.
    fn carries_pods(&self) -> bool {
        self.settings.local && !self.links.overlay.contains_key(self.mesh.node())
    }
}

/// This node's place in the mesh.
#[derive(Clone, Debug)]
struct Own<'a> {
    segment: &'a Segment,
    index: usize,
    member: &'a Member,
    /// It is the leader by Kilo's rule.
    leads: bool,
    /// It is the leader or a stand-by: both have all peers and tables.
    is_gateway: bool,
    /// It carries the shared prefixes, as the leader or in its place.
    acts: bool,
    /// The acting leader.
    acting: Option<&'a Member>,
    /// The term in which it acts; [`Term::NONE`]: by Kilo's rule.
    term: Term,
    /// The acting leader stays although Kilo's rule names another by now, in no term so far.
    stays: bool,
    /// All gateways, as indices of members, Kilo's leader first.
    gateways: Vec<usize>,
}

impl<'a> Own<'a> {
    fn at(mesh: &'a Mesh, (index, position): (usize, usize)) -> Self {
        let segment = &mesh.segments[index];
        let gateways = mesh.gateways_of(index);
        let acting = gateways.order.get(gateways.acting).copied();
        Self {
            segment,
            index,
            member: &segment.members[position],
            leads: segment.leader == position,
            is_gateway: gateways.order.contains(&position),
            acts: acting == Some(position),
            // With several active leaders, each node has its own home.
            term: if gateways.homes.is_none() || acting == Some(position) {
                gateways.term
            } else {
                Term::NONE
            },
            stays: gateways.stays(),
            acting: acting.and_then(|acting| segment.members.get(acting)),
            gateways: gateways.into_owned().order,
        }
    }

    /// Whether this host's own packets to the private address of a node of another location may go in cleartext.
    /// They may to addresses that anybody on the Internet may send to, and between any node and those that
    /// run the API server and etcd: while the others know no key of a node, or a wrong one, nothing but the
    /// API server can help it.
    fn host_speaks_freely(&self, to: &Member) -> bool {
        self.member.node.control_plane
            || to.node.control_plane
            || to.private_ip().is_none_or(is_reached_from_anywhere)
    }

    /// Its WireGuard address with the subnet's prefix length, if it acts.
    fn wireguard_address(&self, mesh: &Mesh) -> Option<ipnet::IpNet> {
        let address = self.segment.wireguard_ip.filter(|_| self.acts)?;
        ipnet::IpNet::new(address, mesh.subnet.prefix_len()).ok()
    }

    fn others(&self) -> impl Iterator<Item = &'a Member> + use<'a> {
        let own = self.member.name();
        self.segment.members.iter().filter(move |member| member.name() != own)
    }

    /// The tunnel that carries packets to another node of the location.
    fn tunnel(&self, settings: &Settings, to: &Member) -> Tunnel {
        if self.encapsulates(settings, to) { settings.tunnel } else { Tunnel::None }
    }

    /// Whether no node of the location sends to another without an outer header, as far as the flags say,
    /// which all nodes share: by subnet, each node decides by the length of its own prefix. In a location of
    /// one node there is no other.
    fn all_encapsulate(&self, settings: &Settings) -> bool {
        let always = settings.tunnel != Tunnel::None && matches!(settings.encapsulate, Encapsulate::Always);
        always || self.others().next().is_none()
    }

    /// Whether packets to another node of the location get an outer header
    /// (`--encapsulate`).
    fn encapsulates(&self, settings: &Settings, to: &Member) -> bool {
        if settings.tunnel == Tunnel::None {
            return false;
        }
        match settings.encapsulate {
            Encapsulate::Always => true,
            Encapsulate::Never => false,
            Encapsulate::CrossSubnet => match (self.member.node.internal_ip, to.private_ip()) {
                (Some(own), Some(ip)) => !own.contains(&ip),
                _ => true,
            },
        }
    }
}

/// The desired state of this host; `None` while the node is not in the mesh.
pub fn host_plan(inputs: &Inputs<'_>) -> Option<HostPlan> {
    let own = Own::at(inputs.mesh, inputs.mesh.own()?);
    let remote = Remote::new(inputs, &own);
    let lost = lost::prefixes(inputs, &own);
    let mut tables = steering::tables(inputs, &own, &remote, &lost);
    masquerade::fill(inputs, &own, &remote, &lost, &mut tables);
    tables.signal_key.clone_from(inputs.signal_keys);
    let wireguard = wireguard::peers(inputs, &own, &remote);
    let native = tables.hop.values().any(|hop| matches!(hop, Hop::Node { tunnel: Tunnel::None, .. }));
    let private = own.member.private_ip();
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    tables.config = Config {
        kilo_ifindex: inputs.links.kilo,
        flags: flag(own.leads, CONFIG_LEADER)
            | flag(own.is_gateway, CONFIG_GATEWAY)
            | flag(inputs.masquerade, CONFIG_MASQUERADE)
            | flag(native, CONFIG_NATIVE)
            | flag(own.all_encapsulate(inputs.settings), CONFIG_ENCAPSULATED)
            | flag(inputs.relays.listens && !wireguard.peers.is_empty(), CONFIG_RELAY)
            | flag(!inputs.links.pods.is_empty() && inputs.links.tolerates_gaps_in_tcp, CONFIG_TCP_BYPASSES)
            | masquerade::flags(inputs.links, private, &remote),
        nat_port_min: NAT_PORTS.0,
        nat_port_max: NAT_PORTS.1,
        wireguard_port: inputs.settings.port,
        direct_shift: direct_shift(&own.member.node.pod_cidrs),
        kilo_mtu: inputs.mtu,
        vxlan_ifindex: inputs.links.vxlan.unwrap_or(0),
        ipip_ifindex: inputs.links.ipip.unwrap_or(0),
        private_v4: match private {
            Some(IpAddr::V4(ip)) => ip.octets(),
            _ => [0; 4],
        },
        overlay_v4: inputs.links.overlay.get(inputs.mesh.node()).map_or([0; 4], std::net::Ipv4Addr::octets),
        private_v6: match private {
            Some(IpAddr::V6(ip)) => ip.octets(),
            _ => [0; 16],
        },
        control: if inputs.mesh.fails_over(own.index) {
            own.member.node.key.map_or([0; 16], |key| signal_id::control_address(&key).octets())
        } else {
            [0; 16]
        },
        wireguard_v6: match own.segment.wireguard_ip {
            Some(IpAddr::V6(ip)) => ip.octets(),
            _ => [0; 16],
        },
        wireguard_v4: match own.segment.wireguard_ip {
            Some(IpAddr::V4(ip)) => ip.octets(),
            _ => [0; 4],
        },
        ends: 0,
    };
    Some(HostPlan {
        wireguard,
        net: routes::net(inputs, &own, &remote, &tables),
        tables,
        layer3: inputs.links.layer3.clone(),
        pods: inputs.links.pods.clone(),
        tunnels: inputs.links.vxlan.into_iter().chain(inputs.links.ipip).collect(),
        left_to_host: remote.left_to_host(inputs.links),
        conflicts: conflicts::of(&own, inputs.mesh),
        uplinks: {
            let links = inputs.links;
            links.uplinks.keys().chain(&links.private).chain(&links.overlay_device).copied().collect()
        },
    })
}

/// Host bits of this node's first IPv4 pod CIDR, 0 without one: nodes of a cluster mostly
/// have CIDRs of one length.
fn direct_shift(pod_cidrs: &[ipnet::IpNet]) -> u16 {
    let is_v4 = |cidr: &&ipnet::IpNet| cidr.addr().is_ipv4();
    pod_cidrs.iter().find(is_v4).map_or(0, |cidr| direct::shift(cidr.prefix_len()))
}

/// This node's WireGuard address with the subnet's prefix length; `None` unless it acts as leader.
pub fn wireguard_address(mesh: &Mesh, node: &str) -> Option<ipnet::IpNet> {
    Own::at(mesh, mesh.find(node)?).wireguard_address(mesh)
}
