//! The mesh: every location with its leader, and the VPN peers.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ipnet::IpNet;

use super::{Granularity, Node, Peer, Segment, allocate, prefixes::Prefixes};
use crate::wireguard::key::PublicKey;

/// A node that has not checked in for this long is not ready (Kilo's figure).
pub const READY_SECONDS: i64 = 60;

/// True when a node has all it needs to take part: an endpoint, a key and a
/// pod CIDR. Whether it is alive is judged apart from this.
pub fn is_complete(node: &Node) -> bool {
    missing(node).next().is_none()
}

/// What a node lacks to take part, in words.
pub fn missing(node: &Node) -> impl Iterator<Item = &'static str> {
    [
        (node.endpoint.is_none(), "no endpoint"),
        (node.key.is_none(), "no key"),
        (node.pod_cidrs.is_empty(), "no pod CIDR"),
    ]
    .into_iter()
    .filter_map(|(lacks, what)| lacks.then_some(what))
}

/// Kilo's judgement of one snapshot: complete, and checked in within the last
/// [`READY_SECONDS`] of `now` (Unix seconds).
pub fn ready_at(node: &Node, now: i64) -> bool {
    is_complete(node) && is_recent(node, now)
}

/// Checked in within the last [`READY_SECONDS`] of `now` (Unix seconds).
pub fn is_recent(node: &Node, now: i64) -> bool {
    now.saturating_sub(node.last_seen) < READY_SECONDS
}

/// Locations, leaders, addresses and allowed IPs of all nodes that take part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mesh {
    /// WireGuard addresses come from here.
    pub subnet: IpNet,
    /// Locations, sorted by name.
    pub segments: Vec<Segment>,
    /// VPN peers, sorted by name; an allowed IP belongs to the first that claims it.
    pub peers: Vec<Peer>,
    /// Endpoints nodes see each other at, the first in topology order counts.
    pub discovered: BTreeMap<PublicKey, SocketAddr>,
}

impl Mesh {
    /// Computes the mesh of `nodes`, all of which are ready.
    pub fn new<'a>(
        nodes: impl IntoIterator<Item = &'a Node>,
        peers: &BTreeMap<String, Peer>,
        granularity: Granularity,
        subnet: IpNet,
    ) -> Self {
        let mut locations: BTreeMap<String, Vec<&Node>> = BTreeMap::new();
        for node in nodes {
            locations.entry(location_of(node, granularity)).or_default().push(node);
        }
        let mut addresses = allocate::addresses(subnet);
        let mut discovered = BTreeMap::new();
        let mut segments = Vec::new();
        for (location, mut nodes) in locations {
            nodes.sort_by(|a, b| a.name.cmp(&b.name));
            let Some(mut segment) = Segment::new(location, &nodes) else { continue };
            segment.wireguard_ip = addresses.next();
            segment.allowed_ips.extend(segment.wireguard_ip.map(IpNet::from));
            segments.push(segment);
            for node in nodes {
                for (key, addr) in &node.discovered_endpoints {
                    discovered.entry(*key).or_insert(*addr);
                }
            }
        }
        let peers = without_duplicates(peers);
        filter_location_ips(&mut segments, &peers);
        Self { subnet, segments, peers, discovered }
    }

    /// The location a node is in: its index in `segments` and the node's index
    /// among the members.
    pub fn find(&self, node: &str) -> Option<(usize, usize)> {
        self.segments.iter().enumerate().find_map(|(index, segment)| {
            let member = segment.members.iter().position(|member| member.name == node)?;
            Some((index, member))
        })
    }

    /// The mesh as a node sees it: endpoints it has seen itself count first.
    #[must_use]
    pub fn seen_by(mut self, own: &BTreeMap<PublicKey, SocketAddr>) -> Self {
        self.discovered.extend(own);
        self
    }

    /// Whether a node leads its location.
    pub fn leads(&self, node: &str) -> bool {
        self.find(node).is_some_and(|(segment, member)| self.segments[segment].leader == member)
    }

    /// Number of nodes in the mesh.
    pub fn node_count(&self) -> usize {
        self.segments.iter().map(|segment| segment.members.len()).sum()
    }
}

/// The location a node belongs to: `location:<name>`; a node without private
/// address, or any node of a full mesh, is on its own in `node:<name>`.
pub fn location_of(node: &Node, granularity: Granularity) -> String {
    if granularity == Granularity::Full || node.internal_ip.is_none() {
        format!("node:{}", node.name)
    } else {
        format!("location:{}", node.location)
    }
}

fn without_duplicates(peers: &BTreeMap<String, Peer>) -> Vec<Peer> {
    let mut claimed = BTreeSet::new();
    peers
        .values()
        .map(|peer| {
            let allowed_ips =
                peer.allowed_ips.iter().map(IpNet::trunc).filter(|prefix| claimed.insert(*prefix));
            Peer { allowed_ips: allowed_ips.collect(), ..peer.clone() }
        })
        .collect()
}

/// Drops allowed-location-ips that another location also offers, that start
/// inside what is reached otherwise, or that meet a peer's. Locations are taken
/// in order: one whose prefix was dropped no longer stands in the way of the next.
fn filter_location_ips(segments: &mut [Segment], peers: &[Peer]) {
    if segments.iter().all(|segment| segment.allowed_location_ips.is_empty()) {
        return;
    }
    let allowed: Prefixes<()> = segments.iter().flat_map(|segment| &segment.allowed_ips).copied().collect();
    let of_peers: Prefixes<()> = peers.iter().flat_map(|peer| &peer.allowed_ips).copied().collect();
    let mut offered: Prefixes<BTreeSet<usize>> = Prefixes::default();
    for (index, segment) in segments.iter().enumerate() {
        for prefix in &segment.allowed_location_ips {
            offered.entry(*prefix).insert(index);
        }
    }
    for (own, segment) in segments.iter_mut().enumerate() {
        let (kept, dropped) = segment.allowed_location_ips.iter().partition(|&&prefix| {
            let mut meeting = offered.holding(prefix).chain(offered.inside(prefix));
            let elsewhere = meeting.any(|(_, offering)| offering.iter().any(|index| *index != own));
            let reached = allowed.holding(prefix.network().into()).next().is_some();
            !elsewhere && !reached && !of_peers.intersect(prefix)
        });
        segment.allowed_location_ips = kept;
        let dropped: Vec<IpNet> = dropped;
        for prefix in dropped {
            offered.entry(prefix).remove(&own);
        }
    }
}
