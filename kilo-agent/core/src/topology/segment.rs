//! One location of the mesh: from the annotations of its Nodes (`objects/annotations.rs`) to what
//! becomes a WireGuard peer in `plan/wireguard.rs`.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::{LeaderReason, Node};
use crate::wireguard::Endpoint;
use crate::{flat_map::sort_by_prefix, wireguard::key::PublicKey};

/// A node of a location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The node, as its object describes it.
    pub node: Arc<Node>,
    /// Its own WireGuard address, where each node has one
    /// ([`Granularity::Cross`](crate::settings::Granularity::Cross)).
    pub wireguard_ip: Option<IpAddr>,
}

impl Member {
    /// Name of its Node object.
    pub fn name(&self) -> &str {
        &self.node.name
    }

    /// Its private address without prefix length; `None`: it has not published one.
    pub fn private_ip(&self) -> Option<IpAddr> {
        self.node.internal_ip.map(|net| net.addr())
    }
}

/// One location: its nodes, and the prefixes for which its leader is the WireGuard peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// `location:<name>`, or `node:<name>` for a node on its own.
    pub location: String,
    /// With [`Granularity::Cross`](crate::settings::Granularity::Cross): the location
    /// the node is in, whose nodes reach it directly.
    pub lan: Option<String>,
    /// Nodes, sorted by name.
    pub members: Vec<Member>,
    /// Index of the leader in `members`.
    pub leader: usize,
    /// The rule by which it leads.
    pub leader_reason: LeaderReason,
    /// The leader's endpoint.
    pub endpoint: Endpoint,
    /// The leader's public key.
    pub key: PublicKey,
    /// The leader's keepalive in seconds; not zero = it is behind NAT.
    pub persistent_keepalive: u32,
    /// The leader's WireGuard address; `None` when the subnet is used up.
    pub wireguard_ip: Option<IpAddr>,
    /// Pod CIDRs, private addresses, the WireGuard address.
    pub allowed_ips: Vec<IpNet>,
    /// `allowed_ips` with the members they belong to, sorted by prefix.
    pub(crate) reach: Vec<LocationPrefix>,
    /// Prefixes reachable through the location, checked against all others.
    pub allowed_location_ips: Vec<IpNet>,
    /// `allowed_location_ips` before they were checked.
    pub(super) offered: Vec<IpNet>,
    /// Where its nodes see others, by node and key.
    pub(super) discovered: Vec<(PublicKey, SocketAddr)>,
}

/// One of the prefixes of a location, without host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocationPrefix {
    pub prefix: IpNet,
    /// It is the private address of one of its nodes.
    pub private: bool,
    /// Index of the member it belongs to; `None`: it belongs to the location as a whole.
    pub member: Option<u32>,
}

/// The leader of a location, and what the location takes from it.
pub(super) struct LeaderInfo<'a> {
    index: usize,
    reason: LeaderReason,
    endpoint: &'a Endpoint,
    key: PublicKey,
    persistent_keepalive: u32,
}

impl<'a> LeaderInfo<'a> {
    /// The leader of these nodes (sorted by name, complete); `None` without nodes.
    pub fn new(nodes: &[&'a Arc<Node>]) -> Option<Self> {
        let (index, reason) = super::leader::choose(nodes.iter().map(|node| &***node));
        let leader = nodes.get(index)?;
        Some(Self {
            index,
            reason,
            endpoint: leader.endpoint.as_ref()?,
            key: leader.key?,
            persistent_keepalive: leader.persistent_keepalive,
        })
    }
}

impl Segment {
    /// The location of these nodes (sorted by name, complete).
    pub(super) fn new(
        location: String,
        lan: Option<String>,
        wireguard_ip: Option<IpAddr>,
        nodes: &[&Arc<Node>],
        leader: &LeaderInfo<'_>,
    ) -> Self {
        // Mostly a pod CIDR and a private address each.
        let mut allowed_ips = Vec::with_capacity(nodes.len() * 2 + 1);
        let mut offered: Vec<IpNet> = Vec::new();
        let mut discovered = Vec::new();
        for node in nodes {
            allowed_ips.extend(node.pod_cidrs.iter().map(IpNet::trunc));
            allowed_ips.extend(node.internal_ip.map(|net| IpNet::from(net.addr())));
            offered.extend(&node.allowed_location_ips);
            discovered.extend(node.discovered_endpoints.iter().map(|(key, addr)| (*key, *addr)));
        }
        allowed_ips.extend(wireguard_ip.map(IpNet::from));
        let reach = reach(nodes, wireguard_ip);
        // The order has no meaning; Kilo sorts them as text.
        offered.sort_by_cached_key(ToString::to_string);
        offered.dedup();
        Self {
            location,
            lan,
            leader: leader.index,
            leader_reason: leader.reason,
            members: nodes.iter().map(|node| Member { node: Arc::clone(node), wireguard_ip: None }).collect(),
            endpoint: leader.endpoint.clone(),
            key: leader.key,
            persistent_keepalive: leader.persistent_keepalive,
            wireguard_ip,
            allowed_ips,
            reach,
            allowed_location_ips: offered.clone(),
            offered,
            discovered,
        }
    }

    /// The node that leads.
    pub fn leading(&self) -> Option<&Member> {
        self.members.get(self.leader)
    }

    /// Everything WireGuard may carry to and from this location.
    pub fn all_allowed_ips(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.allowed_ips.iter().chain(&self.allowed_location_ips).copied()
    }
}

fn reach(nodes: &[&Arc<Node>], wireguard_ip: Option<IpAddr>) -> Vec<LocationPrefix> {
    let of = |prefix: IpNet, private, member| LocationPrefix { prefix, private, member };
    let nodes = || nodes.iter().zip(0u32..).map(|(node, member)| (node, Some(member)));
    let pods = nodes()
        .flat_map(|(node, member)| node.pod_cidrs.iter().map(move |cidr| of(cidr.trunc(), false, member)));
    let addresses =
        nodes().filter_map(|(node, member)| node.internal_ip.map(|net| of(net.addr().into(), true, member)));
    let wireguard_ip = wireguard_ip.map(|ip| of(ip.into(), false, None));
    let mut reach: Vec<LocationPrefix> = pods.chain(addresses).chain(wireguard_ip).collect();
    sort_by_prefix(&mut reach, |reach| reach.prefix);
    reach
}
