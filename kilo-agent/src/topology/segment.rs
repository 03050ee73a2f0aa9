//! One location of the mesh.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use super::{Endpoint, LeaderReason, Node};
use crate::wireguard::key::PublicKey;

/// A node as the other nodes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name of the node.
    pub name: Arc<str>,
    /// Its pod CIDRs.
    pub pod_cidrs: Vec<IpNet>,
    /// Its private address with the prefix length of its network.
    pub internal_ip: Option<IpNet>,
    /// Its own WireGuard address, where each node has one
    /// ([`Granularity::Cross`](super::Granularity::Cross)).
    pub wireguard_ip: Option<IpAddr>,
}

impl Member {
    /// Its private address.
    pub fn private_ip(&self) -> Option<IpAddr> {
        self.internal_ip.map(|net| net.addr())
    }
}

/// One location: its nodes, and what its leader stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// `location:<name>`, or `node:<name>` for a node on its own.
    pub location: String,
    /// With [`Granularity::Cross`](super::Granularity::Cross): the location
    /// the node is in, whose nodes reach it without WireGuard.
    pub group: Option<String>,
    /// Nodes, sorted by name.
    pub members: Vec<Member>,
    /// Index of the leader in `members`.
    pub leader: usize,
    /// Why that one leads.
    pub leader_reason: LeaderReason,
    /// Where the leader is reached.
    pub endpoint: Endpoint,
    /// The leader's public key.
    pub key: PublicKey,
    /// The leader's keepalive in seconds; not zero = it is behind NAT.
    pub persistent_keepalive: u32,
    /// The leader's WireGuard address; `None` when the subnet has no more.
    pub wireguard_ip: Option<IpAddr>,
    /// Pod CIDRs, private addresses, the WireGuard address.
    pub allowed_ips: Vec<IpNet>,
    /// Prefixes reachable through the location, checked against all others.
    pub allowed_location_ips: Vec<IpNet>,
}

/// Who leads a location, and what it takes from that node.
pub(super) struct Outline<'a> {
    leader: usize,
    leader_reason: LeaderReason,
    endpoint: &'a Endpoint,
    key: PublicKey,
    persistent_keepalive: u32,
}

impl<'a> Outline<'a> {
    /// Of these nodes (sorted by name, complete); `None` without any.
    pub fn new(nodes: &[(&Arc<str>, &'a Node)]) -> Option<Self> {
        let (leader, leader_reason) = super::leader::choose(nodes.iter().map(|(_, node)| *node));
        let (_, leads) = nodes.get(leader)?;
        Some(Self {
            leader,
            leader_reason,
            endpoint: leads.endpoint.as_ref()?,
            key: leads.key?,
            persistent_keepalive: leads.persistent_keepalive,
        })
    }
}

impl Segment {
    /// The location of these nodes (sorted by name, complete).
    pub(super) fn new(
        location: String,
        group: Option<String>,
        wireguard_ip: Option<IpAddr>,
        nodes: &[(&Arc<str>, &Node)],
        outline: &Outline<'_>,
    ) -> Self {
        // Mostly a pod CIDR and a private address each.
        let mut allowed_ips = Vec::with_capacity(nodes.len() * 2 + 1);
        let mut allowed_location_ips: Vec<IpNet> = Vec::new();
        for (_, node) in nodes {
            allowed_ips.extend(node.pod_cidrs.iter().map(IpNet::trunc));
            allowed_ips.extend(node.internal_ip.map(|net| IpNet::from(net.addr())));
            allowed_location_ips.extend(&node.allowed_location_ips);
        }
        allowed_ips.extend(wireguard_ip.map(IpNet::from));
        // The order has no meaning; Kilo's is the order of the texts.
        allowed_location_ips.sort_by_cached_key(ToString::to_string);
        allowed_location_ips.dedup();
        Self {
            location,
            group,
            leader: outline.leader,
            leader_reason: outline.leader_reason,
            members: nodes
                .iter()
                .map(|(name, node)| Member {
                    name: Arc::clone(name),
                    pod_cidrs: node.pod_cidrs.clone(),
                    internal_ip: node.internal_ip,
                    wireguard_ip: None,
                })
                .collect(),
            endpoint: outline.endpoint.clone(),
            key: outline.key,
            persistent_keepalive: outline.persistent_keepalive,
            wireguard_ip,
            allowed_ips,
            allowed_location_ips,
        }
    }

    /// True when [`Self::new`] would make the same of these nodes. What is
    /// offered beside pods and nodes depends on the other locations, too: where
    /// there is such a thing, the answer is no.
    pub(super) fn is_of(&self, nodes: &[(&Arc<str>, &Node)], outline: &Outline<'_>) -> bool {
        self.leader == outline.leader
            && self.leader_reason == outline.leader_reason
            && self.endpoint == *outline.endpoint
            && self.key == outline.key
            && self.persistent_keepalive == outline.persistent_keepalive
            && self.allowed_location_ips.is_empty()
            && self.members.len() == nodes.len()
            && self.members.iter().zip(nodes).all(|(member, (name, node))| {
                member.internal_ip == node.internal_ip
                    && member.pod_cidrs == node.pod_cidrs
                    && (Arc::ptr_eq(&member.name, name) || member.name == **name)
                    && node.allowed_location_ips.is_empty()
            })
    }

    /// The node that leads.
    pub fn leading(&self) -> Option<&Member> {
        self.members.get(self.leader)
    }

    /// Everything WireGuard may carry to and from this location.
    pub fn all_allowed_ips(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.allowed_ips.iter().chain(&self.allowed_location_ips).copied()
    }

    /// True when this private address is also where WireGuard reaches the
    /// leader: it cannot be routed through the tunnel it carries.
    pub fn is_endpoint(&self, ip: IpAddr) -> bool {
        self.endpoint.ip() == Some(ip)
    }
}
