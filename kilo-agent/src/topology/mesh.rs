//! The mesh: every location with its leader, and the VPN peers.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::SocketAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{Granularity, Member, Node, Peer, Segment, allocate, prefixes::Prefixes, segment::Outline};
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
    /// Locations, sorted by name; shared with the mesh before, as far as they are the same.
    pub segments: Vec<Arc<Segment>>,
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
        let mut nodes: Vec<(Arc<str>, &Node)> =
            nodes.into_iter().map(|node| (node.name.as_str().into(), node)).collect();
        nodes.sort_by(|(one, _), (other, _)| one.cmp(other));
        Self::default().next(nodes.iter().map(|(name, node)| (name, *node)), peers, granularity, subnet)
    }

    /// The same mesh as of [`Self::new`], made from this one: it shares the
    /// locations in which nothing differs. The nodes come with their names and sorted by them;
    /// a name that is the same text in memory as before is not read.
    #[must_use]
    pub fn next<'a>(
        &self,
        nodes: impl IntoIterator<Item = (&'a Arc<str>, &'a Node)>,
        peers: &BTreeMap<String, Peer>,
        granularity: Granularity,
        subnet: IpNet,
    ) -> Self {
        let mut locations: HashMap<Place<'_>, Vec<(&Arc<str>, &Node)>> = HashMap::new();
        for (name, node) in nodes {
            locations.entry(Place::of(node, granularity)).or_default().push((name, node));
        }
        let mut locations: Vec<_> = locations.into_iter().collect();
        locations.sort_unstable_by_key(|(place, _)| *place);
        let before: HashMap<&str, &Arc<Segment>> =
            self.segments.iter().map(|segment| (segment.location.as_str(), segment)).collect();
        let mut addresses = allocate::addresses(subnet);
        let mut discovered = BTreeMap::new();
        let mut segments = Vec::new();
        for (place, nodes) in locations {
            let Some(outline) = Outline::new(&nodes) else { continue };
            let location = place.to_string();
            let group = nodes.first().and_then(|(_, node)| group_of(node, granularity));
            let wireguard_ip = addresses.next();
            let same = before.get(location.as_str()).filter(|segment| {
                segment.group == group
                    && segment.wireguard_ip == wireguard_ip
                    && segment.is_of(&nodes, &outline)
            });
            segments.push(match same {
                Some(same) => Arc::clone(same),
                None => Arc::new(Segment::new(location, group, wireguard_ip, &nodes, &outline)),
            });
            for (_, node) in nodes {
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
            let member = segment.members.iter().position(|member| *member.name == *node)?;
            Some((index, member))
        })
    }

    /// The mesh around a node. Where each node has its own WireGuard device in
    /// the mesh ([`Granularity::Cross`]), the nodes of its location are one
    /// segment with it, which it leads itself; else this is the mesh as it is.
    pub fn around(&self, node: &str) -> Cow<'_, Self> {
        let Some((own, _)) = self.find(node) else { return Cow::Borrowed(self) };
        let Some(group) = &self.segments[own].group else { return Cow::Borrowed(self) };
        let (mut near, far): (Vec<_>, Vec<_>) =
            self.segments.iter().cloned().partition(|segment| segment.group.as_ref() == Some(group));
        let mut around = Self { segments: far, ..self.clone() };
        let Some(at) =
            near.iter().position(|segment| segment.leading().is_some_and(|own| *own.name == *node))
        else {
            return Cow::Borrowed(self);
        };
        let mut segment = Arc::unwrap_or_clone(near.swap_remove(at));
        let own_ip = segment.wireguard_ip;
        for member in &mut segment.members {
            member.wireguard_ip = own_ip;
        }
        for other in near.into_iter().map(Arc::unwrap_or_clone) {
            segment.members.extend(
                other.members.into_iter().map(|member| Member { wireguard_ip: other.wireguard_ip, ..member }),
            );
            segment.allowed_ips.extend(other.allowed_ips);
            segment.allowed_location_ips.extend(other.allowed_location_ips);
        }
        segment.members.sort_by(|a, b| a.name.cmp(&b.name));
        segment.leader = segment.members.iter().position(|member| *member.name == *node).unwrap_or(0);
        around.segments.push(segment.into());
        Cow::Owned(around)
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

/// The location whose nodes reach this one without WireGuard although it is on
/// its own in the mesh.
fn group_of(node: &Node, granularity: Granularity) -> Option<String> {
    let grouped = granularity == Granularity::Cross && node.internal_ip.is_some();
    grouped.then(|| format!("location:{}", node.location))
}

/// The location a node belongs to: `location:<name>`; a node without private
/// address, or any node of a full or cross mesh, is on its own in `node:<name>`.
pub fn location_of(node: &Node, granularity: Granularity) -> String {
    Place::of(node, granularity).to_string()
}

/// A location before it has its text, and in the order of the texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Place<'a> {
    Location(&'a str),
    Node(&'a str),
}

impl<'a> Place<'a> {
    fn of(node: &'a Node, granularity: Granularity) -> Self {
        if granularity != Granularity::Location || node.internal_ip.is_none() {
            Self::Node(&node.name)
        } else {
            Self::Location(&node.location)
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Location(name) => write!(f, "location:{name}"),
            Self::Node(name) => write!(f, "node:{name}"),
        }
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
fn filter_location_ips(segments: &mut [Arc<Segment>], peers: &[Peer]) {
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
        let (kept, dropped): (Vec<IpNet>, Vec<IpNet>) = (kept, dropped);
        if dropped.is_empty() {
            continue;
        }
        Arc::make_mut(segment).allowed_location_ips = kept;
        for prefix in dropped {
            offered.entry(prefix).remove(&own);
        }
    }
}
