//! The mesh: every location with its leader, and the VPN peers.

use std::{
    borrow::Cow,
    cmp::Ordering,
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Acting, Gateways, Homes, Member, Node, Peer, Segment, allocate,
    location_ips::{self, UnusedPrefix},
    segment::LeaderInfo,
};
use crate::{settings::Granularity, wireguard::key::PublicKey};

/// Default of `--stand-bys`.
const STAND_BYS: usize = 2;

/// Locations, leaders, addresses and allowed IPs of all nodes that take part.
/// ```
/// use std::collections::BTreeMap;
/// use kilo_core::{settings::Granularity, topology::{Mesh, Node}, wireguard::PublicKey};
///
/// let node = |name: &str, n: u8, location: &str| Node {
///     name: name.into(),
///     location: location.into(),
///     key: Some(PublicKey([n; 32])),
///     endpoint: format!("192.0.2.{n}:51820").parse().ok(),
///     internal_ip: format!("10.0.{n}.1/16").parse().ok(),
///     pod_cidrs: vec![format!("10.42.{n}.0/24").parse().unwrap()],
///     ..Node::default()
/// };
/// let nodes = [node("a1", 1, "a"), node("a2", 2, "a"), node("b1", 3, "b")];
/// let mesh = Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse()?);
/// assert_eq!(mesh.segments[0].location, "location:a");
/// assert!(mesh.leads("a1") && !mesh.leads("a2") && mesh.leads("b1"));
/// assert_eq!(mesh.segments[1].wireguard_ip, Some([10, 4, 0, 2].into()));
/// # Ok::<(), ipnet::AddrParseError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mesh {
    /// CIDR from which WireGuard addresses are allocated.
    pub subnet: IpNet,
    /// Locations, sorted by name; unchanged ones are shared with the previous mesh.
    pub segments: Vec<Arc<Segment>>,
    /// VPN peers, sorted by name; an allowed IP belongs to the first that claims it.
    pub peers: Vec<Peer>,
    /// Offered prefixes that are not used.
    pub(super) unused: Vec<UnusedPrefix>,
    /// Endpoints at which nodes see each other; the first in topology order counts.
    pub discovered: BTreeMap<PublicKey, SocketAddr>,
    /// Nodes that are known but do not take part, by name, as given to [`Self::with_lost`].
    pub lost: Vec<Lost>,
    /// Nodes that are no longer known, as given to [`Self::with_gone`]: nothing is sent
    /// to their pods in cleartext.
    pub gone: Vec<Lost>,
    /// WireGuard addresses that no segment has any more, as given to [`Self::with_freed`].
    pub freed: Vec<IpAddr>,
    /// Gateways of each segment, as given to [`Self::with_acting`]; empty: there is no failover.
    pub gateways: Vec<Gateways>,
    /// Who carries what, as given to [`Self::with_acting`].
    pub acting: Arc<Acting>,
    /// Where each node is, by name.
    by_name: Vec<NodeIndex>,
    /// What the segments were made with; `None`: the next mesh is built from scratch.
    granularity: Option<Granularity>,
}

/// A node that takes no part although its object is there: its prefixes are nobody else's, and packets to
/// them must not leave in cleartext.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The node, without a WireGuard address.
    pub member: Member,
    /// The location it would be in, as [`Segment::location`].
    location: String,
    /// As [`Segment::lan`].
    lan: Option<String>,
}

impl Lost {
    /// Whether nodes of a location reach it without WireGuard.
    pub fn is_in(&self, segment: &Segment) -> bool {
        self.location == segment.location || (self.lan.is_some() && self.lan == segment.lan)
    }
}

/// A node's place in the mesh: a segment, and a member of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NodeIndex {
    segment: u32,
    member: u32,
}

impl Mesh {
    /// Every endpoint at which a node of the mesh sees another one; a key may be seen at several.
    pub fn sightings(&self) -> impl Iterator<Item = (PublicKey, SocketAddr)> {
        self.segments.iter().flat_map(|segment| segment.discovered.iter().copied())
    }

    /// Computes the mesh of `nodes`, all of which are ready.
    pub fn new<'a>(
        nodes: impl IntoIterator<Item = &'a Node>,
        peers: &BTreeMap<String, Peer>,
        granularity: Granularity,
        subnet: IpNet,
    ) -> Self {
        let mut nodes: Vec<Arc<Node>> = nodes.into_iter().cloned().map(Arc::new).collect();
        nodes.sort_by(|one, other| one.name.cmp(&other.name));
        Self::default().next(&nodes, peers, granularity, subnet)
    }

    /// The same mesh as [`Self::new`] makes, built from this one: it shares unchanged locations. Nodes must
    /// be sorted by name; those that are the same in memory as before are not read.
    #[must_use]
    pub fn next<'a>(
        &self,
        nodes: impl IntoIterator<Item = &'a Arc<Node>>,
        peers: &BTreeMap<String, Peer>,
        granularity: Granularity,
        subnet: IpNet,
    ) -> Self {
        let nodes: Vec<&Arc<Node>> = nodes.into_iter().collect();
        let (mut pending, location_index) = self.pending(&nodes, granularity);
        for (node, at) in nodes.iter().zip(&location_index) {
            if pending[*at].differs {
                pending[*at].nodes.push(node);
            }
        }
        let mut order: Vec<usize> = (0..pending.len()).collect();
        order.sort_by_key(|at| pending[*at].name);
        let mut addresses = allocate::addresses(subnet);
        let mut segments = Vec::with_capacity(pending.len());
        let mut segment_of: Vec<Option<usize>> = vec![None; pending.len()];
        for at in order {
            let Some(segment) = pending[at].segment(&mut addresses, granularity) else { continue };
            segment_of[at] = Some(segments.len());
            segments.push(segment);
        }
        let mut members = vec![0; segments.len()];
        let by_name = location_index.into_iter().filter_map(|at| {
            let segment = segment_of[at]?;
            let member = members[segment];
            members[segment] += 1;
            Some(NodeIndex { segment: u32::try_from(segment).ok()?, member })
        });
        let by_name = by_name.collect();
        let mut discovered = BTreeMap::new();
        for (key, addr) in segments.iter().flat_map(|segment| &segment.discovered) {
            discovered.entry(*key).or_insert(*addr);
        }
        let peers = without_duplicates(peers);
        let unused = location_ips::filter(&mut segments, &peers);
        let (lost, gone, freed) = (Vec::new(), Vec::new(), Vec::new());
        let (gateways, acting) = (Vec::new(), Arc::default());
        let granularity = Some(granularity);
        Self {
            subnet,
            segments,
            peers,
            unused,
            discovered,
            lost,
            gone,
            freed,
            gateways,
            acting,
            by_name,
            granularity,
        }
    }

    /// The same mesh with those of `nodes` (all that take no part, by name) that once took part:
    /// they have a key and pods.
    #[must_use]
    pub fn with_lost<'a>(mut self, nodes: impl IntoIterator<Item = &'a Arc<Node>>) -> Self {
        self.lost = self.as_lost(nodes);
        self
    }

    /// The same mesh with nodes of its past: others may still have connections to their pods.
    #[must_use]
    pub fn with_gone<'a>(mut self, nodes: impl IntoIterator<Item = &'a Arc<Node>>) -> Self {
        self.gone = self.as_lost(nodes);
        self
    }

    fn as_lost<'a>(&self, nodes: impl IntoIterator<Item = &'a Arc<Node>>) -> Vec<Lost> {
        let granularity = self.granularity.unwrap_or_default();
        let nodes = nodes.into_iter().filter(|node| node.key.is_some() && !node.pod_cidrs.is_empty());
        let lost = |node: &Arc<Node>| Lost {
            member: Member { node: Arc::clone(node), wireguard_ip: None },
            location: location_of(node, granularity),
            lan: lan_of(node, granularity),
        };
        nodes.map(lost).collect()
    }

    /// The same mesh with addresses of its past, to which nothing may be sent in cleartext.
    #[must_use]
    pub fn with_freed(mut self, freed: Vec<IpAddr>) -> Self {
        self.freed = freed;
        self
    }

    /// The same mesh with failover: each capable location has so many stand-bys beside its leader. Locations
    /// in which each node leads itself have none.
    #[must_use]
    pub fn with_acting(mut self, stand_bys: usize, acting: Arc<Acting>) -> Self {
        if self.granularity == Some(Granularity::Location) {
            let several = self.without_several().is_none();
            let gateways = |segment: &Arc<Segment>| {
                let homes = several.then(|| segment.homes(&self.lost_of(segment), stand_bys)).flatten();
                acting.gateways_with(segment, stand_bys, homes)
            };
            self.gateways = self.segments.iter().map(gateways).collect();
            self.acting = acting;
        }
        self
    }

    /// Nodes of a location that are known but take no part, each once: one that was deleted and registered
    /// again a moment ago is also known as it was before.
    pub(super) fn lost_of(&self, segment: &Segment) -> Vec<&Node> {
        let mut names = HashSet::new();
        let lost = self.lost.iter().filter(|lost| lost.is_in(segment)).map(|lost| &*lost.member.node);
        lost.filter(|node| self.find(&node.name).is_none() && names.insert(&node.name)).collect()
    }

    /// Several active leaders of a segment, by its index; `None`: it has one. Without [`Self::with_acting`],
    /// the default number of stand-bys counts.
    pub fn homes_of(&self, segment: usize) -> Option<Cow<'_, Homes>> {
        if let Some(gateways) = self.gateways.get(segment) {
            return gateways.homes.as_ref().map(Cow::Borrowed);
        }
        let segment = self.segments.get(segment).filter(|segment| segment.is_capable())?;
        let may = self.granularity == Some(Granularity::Location) && self.without_several().is_none();
        may.then(|| segment.homes(&self.lost_of(segment), STAND_BYS)).flatten().map(Cow::Owned)
    }

    /// For nodes in locations with several active leaders: the one that each is to use, by name.
    pub fn gateways_in_use(&self) -> BTreeMap<&str, &str> {
        let mut used = BTreeMap::new();
        for (at, segment) in self.segments.iter().enumerate() {
            let Some(homes) = self.homes_of(at) else { continue };
            for (node, home) in segment.members.iter().zip(&homes.of) {
                used.insert(node.name(), segment.members[*home].name());
            }
        }
        used
    }

    /// The gateways of a segment, by its index; without failover its leader alone.
    pub fn gateways_of(&self, segment: usize) -> Cow<'_, Gateways> {
        match self.gateways.get(segment) {
            Some(gateways) => Cow::Borrowed(gateways),
            None => {
                let leader = self.segments.get(segment).map_or(0, |segment| segment.leader);
                Cow::Owned(Gateways { order: vec![leader], ..Gateways::default() })
            }
        }
    }

    /// Whether a segment takes part in failover: its leader follows others' gateways.
    pub fn fails_over(&self, segment: usize) -> bool {
        !self.gateways.is_empty() && self.segments.get(segment).is_some_and(|segment| segment.is_capable())
    }

    /// Whether an owner's prefixes are reached through the acting gateway: `owner` is the index of a segment,
    /// or the number of segments plus the index of a VPN peer.
    pub fn follows(&self, owner: usize) -> bool {
        match owner.checked_sub(self.segments.len()).and_then(|peer| self.peers.get(peer)) {
            Some(peer) => peer.follows,
            None => self.fails_over(owner),
        }
    }

    /// The locations to be built, those of this mesh first and in its order; and for each node the
    /// index of its location.
    fn pending<'a>(
        &'a self,
        nodes: &[&'a Arc<Node>],
        granularity: Granularity,
    ) -> (Vec<Pending<'a>>, Vec<usize>) {
        let (segments, by_name) = match self.granularity {
            Some(before) if before == granularity => (&*self.segments, &*self.by_name),
            _ => (&[][..], &[][..]),
        };
        let of_segment = |segment: &'a Arc<Segment>| Pending {
            name: LocationName::named(&segment.location),
            before: Some(segment),
            differs: false,
            nodes: Vec::new(),
        };
        let mut pending: Vec<Pending<'_>> = segments.iter().map(of_segment).collect();
        let mut new: HashMap<LocationName<'_>, usize> = HashMap::new();
        // One walk over both; nodes that are passed over have gone.
        let mut by_name = by_name.iter().peekable();
        let mut before = |node: &Arc<Node>, pending: &mut Vec<Pending<'_>>| {
            while let Some(index) = by_name.peek() {
                let at = index.segment as usize;
                let known = &segments[at].members[index.member as usize].node;
                let order =
                    if Arc::ptr_eq(known, node) { Ordering::Equal } else { known.name.cmp(&node.name) };
                if order == Ordering::Greater {
                    break;
                }
                by_name.next();
                if order == Ordering::Equal && known == node {
                    return Some(at);
                }
                pending[at].differs = true;
            }
            None
        };
        let location_index = nodes.iter().map(|&node| {
            before(node, &mut pending).unwrap_or_else(|| {
                let name = LocationName::of(node, granularity);
                let known = pending[..segments.len()].binary_search_by_key(&name, |location| location.name);
                let at = known.unwrap_or_else(|_| {
                    *new.entry(name).or_insert_with(|| {
                        pending.push(Pending { name, before: None, differs: true, nodes: Vec::new() });
                        pending.len() - 1
                    })
                });
                pending[at].differs = true;
                at
            })
        });
        let location_index = location_index.collect();
        for index in by_name {
            pending[index.segment as usize].differs = true;
        }
        (pending, location_index)
    }

    /// The location a node is in: its index in `segments`, and the node's index among the members.
    pub fn find(&self, node: &str) -> Option<(usize, usize)> {
        let name =
            |index: &NodeIndex| self.segments[index.segment as usize].members[index.member as usize].name();
        let at = self.by_name.binary_search_by(|index| name(index).cmp(node)).ok()?;
        let index = self.by_name.get(at)?;
        Some((index.segment as usize, index.member as usize))
    }

    /// The same mesh with other segments than its nodes alone would make.
    pub(super) fn of_segments(&self, segments: Vec<Arc<Segment>>) -> Self {
        let by_name = by_name(&segments);
        Self { segments, by_name, granularity: None, ..self.clone() }
    }

    /// The mesh as a node sees it: endpoints that it has seen itself take precedence.
    #[must_use]
    pub fn seen_by(mut self, own: &BTreeMap<PublicKey, SocketAddr>) -> Self {
        self.discovered.extend(own);
        self
    }

    /// Whether a node leads its location.
    pub fn leads(&self, node: &str) -> bool {
        self.find(node).is_some_and(|(segment, member)| self.segments[segment].leader == member)
    }

    /// Which nodes are meshed directly; `None` before there is a mesh, and for one as seen from a node.
    pub const fn granularity(&self) -> Option<Granularity> {
        self.granularity
    }

    /// Number of nodes in the mesh.
    pub fn node_count(&self) -> usize {
        self.segments.iter().map(|segment| segment.members.len()).sum()
    }
}

/// The index of each node, sorted by name.
fn by_name(segments: &[Arc<Segment>]) -> Vec<NodeIndex> {
    let mut named = Vec::new();
    for (segment, at) in segments.iter().zip(0..) {
        named.extend(
            segment
                .members
                .iter()
                .zip(0..)
                .map(|(of, member)| (of.name(), NodeIndex { segment: at, member })),
        );
    }
    named.sort_unstable_by_key(|(name, _)| *name);
    named.into_iter().map(|(_, index)| index).collect()
}

/// A location that is being built.
struct Pending<'a> {
    name: LocationName<'a>,
    /// What it was before; `None`: it is new.
    before: Option<&'a Arc<Segment>>,
    /// It has other nodes than before.
    differs: bool,
    /// Its nodes by name; empty if they do not differ.
    nodes: Vec<&'a Arc<Node>>,
}

impl Pending<'_> {
    /// The location, with the next address; `None` without nodes.
    fn segment(
        &self,
        addresses: &mut impl Iterator<Item = IpAddr>,
        granularity: Granularity,
    ) -> Option<Arc<Segment>> {
        let Some(before) = self.before.filter(|_| !self.differs) else {
            let leader = LeaderInfo::new(&self.nodes)?;
            return Some(self.made_of(&self.nodes, &leader, addresses.next(), granularity));
        };
        let wireguard_ip = addresses.next();
        if before.wireguard_ip == wireguard_ip {
            return Some(Arc::clone(before));
        }
        let nodes: Vec<_> = before.members.iter().map(|member| &member.node).collect();
        Some(self.made_of(&nodes, &LeaderInfo::new(&nodes)?, wireguard_ip, granularity))
    }

    fn made_of(
        &self,
        nodes: &[&Arc<Node>],
        leader: &LeaderInfo<'_>,
        wireguard_ip: Option<IpAddr>,
        granularity: Granularity,
    ) -> Arc<Segment> {
        let lan = nodes.first().and_then(|node| lan_of(node, granularity));
        Arc::new(Segment::new(self.name.to_string(), lan, wireguard_ip, nodes, leader))
    }
}

/// The location whose nodes reach this node directly; `None` unless the mesh is a cross mesh and the node
/// has a private address.
fn lan_of(node: &Node, granularity: Granularity) -> Option<String> {
    let is_direct = granularity == Granularity::Cross && node.internal_ip.is_some();
    is_direct.then(|| format!("location:{}", node.location))
}

/// The location a node belongs to: `location:<name>`; a node without private
/// address, or any node of a full or cross mesh, is on its own in `node:<name>`.
pub fn location_of(node: &Node, granularity: Granularity) -> String {
    LocationName::of(node, granularity).to_string()
}

/// A location whose text is not made yet; sorts as the texts do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum LocationName<'a> {
    Location(&'a str),
    Node(&'a str),
}

impl<'a> LocationName<'a> {
    fn of(node: &'a Node, granularity: Granularity) -> Self {
        if granularity != Granularity::Location || node.internal_ip.is_none() {
            Self::Node(&node.name)
        } else {
            Self::Location(&node.location)
        }
    }

    /// Parses the text of a location.
    fn named(text: &'a str) -> Self {
        match text.strip_prefix("node:") {
            Some(name) => Self::Node(name),
            None => Self::Location(text.strip_prefix("location:").unwrap_or(text)),
        }
    }
}

impl fmt::Display for LocationName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Location(name) => write!(f, "location:{name}"),
            Self::Node(name) => write!(f, "node:{name}"),
        }
    }
}

fn without_duplicates(peers: &BTreeMap<String, Peer>) -> Vec<Peer> {
    let mut claimed = HashSet::with_capacity(peers.len());
    peers
        .values()
        .map(|peer| {
            let allowed_ips =
                peer.allowed_ips.iter().map(IpNet::trunc).filter(|prefix| claimed.insert(*prefix));
            Peer { allowed_ips: allowed_ips.collect(), ..peer.clone() }
        })
        .collect()
}
