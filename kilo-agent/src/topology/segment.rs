//! One location of the mesh.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Endpoint, LeaderReason, Node};
use crate::wireguard::key::PublicKey;

/// A node as the other nodes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name of the node.
    pub name: String,
    /// Its pod CIDRs.
    pub pod_cidrs: Vec<IpNet>,
    /// Its private address with the prefix length of its network.
    pub internal_ip: Option<IpNet>,
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

impl Segment {
    /// The location of these nodes (sorted by name, complete), without address.
    pub(super) fn new(location: String, nodes: &[&Node]) -> Option<Self> {
        let (leader, leader_reason) = super::leader::choose(nodes);
        let leads = nodes.get(leader)?;
        let mut allowed_ips = Vec::new();
        let mut allowed_location_ips: Vec<IpNet> = Vec::new();
        for node in nodes {
            allowed_ips.extend(node.pod_cidrs.iter().map(IpNet::trunc));
            allowed_ips.extend(node.internal_ip.map(|net| IpNet::from(net.addr())));
            allowed_location_ips.extend(&node.allowed_location_ips);
        }
        // The order has no meaning; Kilo's is the order of the texts.
        allowed_location_ips.sort_by_cached_key(ToString::to_string);
        allowed_location_ips.dedup();
        Some(Self {
            location,
            leader,
            leader_reason,
            members: nodes
                .iter()
                .map(|node| Member {
                    name: node.name.clone(),
                    pod_cidrs: node.pod_cidrs.clone(),
                    internal_ip: node.internal_ip,
                })
                .collect(),
            endpoint: leads.endpoint.clone()?,
            key: leads.key?,
            persistent_keepalive: leads.persistent_keepalive,
            wireguard_ip: None,
            allowed_ips,
            allowed_location_ips,
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
