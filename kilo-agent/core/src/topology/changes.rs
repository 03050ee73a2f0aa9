//! Differences between two moments of the mesh that its operator should know about.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use itertools::{
    EitherOrBoth::{Both, Left, Right},
    Itertools as _,
};

use super::{
    LeaderReason, Mesh, ObservedMesh, PeerAcceptance, Segment, location_of, missing, peer_acceptance,
    with_remedy,
};

/// One difference between two [`ObservedMesh`]es: a line of the log, or an Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A location has its first node.
    LocationAppeared {
        /// Name of the location, as [`Segment::location`].
        location: String,
        /// Node that leads it.
        leader: String,
        /// The rule that chose the leader.
        rule: LeaderReason,
    },
    /// A location has lost its last node.
    LocationVanished {
        /// Name of the location.
        location: String,
        /// Node that led it.
        leader: String,
        /// Why the leader is no longer in it.
        why: Absence,
    },
    /// Another node leads a location.
    LeaderMoved {
        /// Name of the location.
        location: String,
        /// Node that led before.
        from: String,
        /// Node that leads now.
        to: String,
        /// Why the leader changed.
        why: Succession,
    },
    /// A node is in the mesh now.
    NodeJoined {
        /// Name of the node.
        node: String,
        /// Location it is in.
        location: String,
    },
    /// A node is in another location.
    NodeMoved {
        /// Name of the node.
        node: String,
        /// Location it was in.
        from: String,
        /// Location it is in now.
        to: String,
    },
    /// A node is no longer in the mesh.
    NodeLeft {
        /// Name of the node.
        node: String,
        /// Location it was in.
        location: String,
        /// Why it is no longer in the mesh.
        why: Absence,
    },
    /// This node has another role in the mesh.
    Role {
        /// Its role before.
        from: Role,
        /// Its role now.
        to: Role,
    },
    /// A VPN peer is in the mesh.
    PeerAccepted {
        /// Name of the Peer object.
        peer: String,
        /// Which of its prefixes belong to others, too.
        without: Option<String>,
    },
    /// A VPN peer is not in the mesh.
    PeerRefused {
        /// Name of the Peer object.
        peer: String,
        /// Why it cannot be used.
        why: String,
    },
    /// The object of a VPN peer is gone.
    PeerLeft {
        /// Name of the Peer object.
        peer: String,
    },
}

/// Why a node is not in the mesh, or no longer in its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absence {
    /// Its Node object does not exist.
    Deleted,
    /// Its heartbeat no longer changes.
    Silent,
    /// It lacks what a node needs to take part.
    Incomplete(Vec<&'static str>),
    /// It is in another location.
    Moved,
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deleted => f.write_str("its Node object was deleted"),
            Self::Silent => f.write_str("its agent no longer checks in"),
            Self::Incomplete(missing) => {
                let missing: Vec<_> = missing.iter().map(|missing| with_remedy(missing)).collect();
                write!(f, "it has {}", missing.join(", "))
            }
            Self::Moved => f.write_str("it is in another location now"),
        }
    }
}

/// Why another node leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Succession {
    /// The previous leader has left the location.
    Lost(Absence),
    /// By this rule the new leader takes precedence.
    Rule(LeaderReason),
}

impl fmt::Display for Succession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(why) => write!(f, "the previous leader left: {why}"),
            Self::Rule(rule) => write!(f, "the new leader takes precedence: {rule}"),
        }
    }
}

/// What a node does in the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It is not in the mesh.
    #[default]
    Out,
    /// It follows a leader.
    Member {
        /// Location it is in.
        location: String,
        /// Node that leads the location.
        leader: String,
    },
    /// It leads.
    Leader {
        /// Location it leads.
        location: String,
    },
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Out => f.write_str("not in the mesh"),
            Self::Member { location, leader } => write!(f, "member of {location}, which {leader} leads"),
            Self::Leader { location } => write!(f, "leader of {location}"),
        }
    }
}

impl Role {
    /// The role of a node in this mesh.
    pub fn of(mesh: &Mesh, node: &str) -> Self {
        let Some((segment, member)) = mesh.find(node) else { return Self::Out };
        let segment = &mesh.segments[segment];
        let location = segment.location.clone();
        match segment.leading() {
            Some(leader) if segment.leader != member => {
                Self::Member { location, leader: leader.name().to_owned() }
            }
            _ => Self::Leader { location },
        }
    }
}

/// The node that reports for those that cannot: the leader of the first location. All agents choose the same.
pub fn speaker(mesh: &Mesh) -> Option<&str> {
    Some(mesh.segments.first()?.leading()?.name())
}

/// The differences as the node `own` sees them. Locations that are the same in memory are not read.
pub fn changes(before: &ObservedMesh, now: &ObservedMesh, own: &str) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut left = BTreeMap::new();
    let mut joined = BTreeMap::new();
    for (old, new) in paired(&before.mesh.segments, &now.mesh.segments) {
        if old.zip(new).is_some_and(|(old, new)| Arc::ptr_eq(old, new)) {
            continue;
        }
        let names = |segment: Option<&'_ Arc<Segment>>| -> BTreeSet<String> {
            segment.iter().flat_map(|it| &it.members).map(|member| member.name().to_owned()).collect()
        };
        let (were, are) = (names(old), names(new));
        let location = old.or(new).map(|segment| segment.location.clone()).unwrap_or_default();
        left.extend(were.difference(&are).map(|node| (node.clone(), location.clone())));
        joined.extend(are.difference(&were).map(|node| (node.clone(), location.clone())));
    }
    for (old, new) in paired(&before.mesh.segments, &now.mesh.segments) {
        changes.extend(of_location(old, new, now));
    }
    for (node, to) in &joined {
        changes.push(match left.remove(node) {
            Some(from) => Change::NodeMoved { node: node.clone(), from, to: to.clone() },
            None => Change::NodeJoined { node: node.clone(), location: to.clone() },
        });
    }
    for (node, location) in left {
        let why = absence(&node, &location, now);
        changes.push(Change::NodeLeft { node, location, why });
    }
    let (from, to) = (Role::of(&before.mesh, own), Role::of(&now.mesh, own));
    // Why this node is out comes last, since people look at the last line of its log.
    let at = if to == Role::Out { 0 } else { changes.len() };
    if from != to {
        changes.insert(at, Change::Role { from, to });
    }
    changes.extend(of_peers(before, now));
    changes
}

/// The segments of both, paired by location.
fn paired<'a>(
    before: &'a [Arc<Segment>],
    now: &'a [Arc<Segment>],
) -> impl Iterator<Item = (Option<&'a Arc<Segment>>, Option<&'a Arc<Segment>>)> {
    let (mut before, mut now) = (before.iter().peekable(), now.iter().peekable());
    std::iter::from_fn(move || {
        let order = match (before.peek(), now.peek()) {
            (None, None) => return None,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some(old), Some(new)) => old.location.cmp(&new.location),
        };
        let old = if order.is_le() { before.next() } else { None };
        let new = if order.is_ge() { now.next() } else { None };
        Some((old, new))
    })
}

/// A node on its own is its location: that changes with the node, and is reported as the node's change.
fn of_location(old: Option<&Arc<Segment>>, new: Option<&Arc<Segment>>, now: &ObservedMesh) -> Option<Change> {
    let location = old.or(new)?.location.clone();
    if location.starts_with("node:") {
        return None;
    }
    let leader = |segment: &Arc<Segment>| segment.leading().map(|leader| leader.name().to_owned());
    match (old, new) {
        (None, Some(new)) => {
            Some(Change::LocationAppeared { location, leader: leader(new)?, rule: new.leader_reason })
        }
        (Some(old), None) => {
            let leader = leader(old)?;
            let why = absence(&leader, &location, now);
            Some(Change::LocationVanished { location, leader, why })
        }
        (Some(old), Some(new)) => {
            let (from, to) = (leader(old)?, leader(new)?);
            if from == to {
                return None;
            }
            let still_there = new.members.iter().any(|member| member.name() == from);
            let why = match still_there {
                true => Succession::Rule(new.leader_reason),
                false => Succession::Lost(absence(&from, &location, now)),
            };
            Some(Change::LeaderMoved { location, from, to, why })
        }
        (None, None) => None,
    }
}

/// Why a node is not in a location.
fn absence(node: &str, location: &str, now: &ObservedMesh) -> Absence {
    let own = now.own.as_deref().filter(|own| own.name == node);
    let known = now.snapshot.nodes.get(node);
    let Some(known) = own.or_else(|| known.map(|known| &**known.node)) else {
        return Absence::Deleted;
    };
    let missing: Vec<_> = missing(known).collect();
    if !missing.is_empty() {
        return Absence::Incomplete(missing);
    }
    let moved = now.mesh.find(node).is_some_and(|(at, _)| now.mesh.segments[at].location != location);
    if moved { Absence::Moved } else { Absence::Silent }
}

/// Why a node that is known is not in the mesh; `None`: it is in the mesh, or unknown.
pub fn why_out(node: &str, now: &ObservedMesh) -> Option<Absence> {
    let known = now.own.as_ref().is_some_and(|own| own.name == node) || now.snapshot.nodes.contains(node);
    (known && now.mesh.find(node).is_none()).then(|| absence(node, "", now))
}

/// A node's role in the mesh, or why it has none. Names nobody else: a new leader is not
/// news about each member.
pub fn state(node: &str, now: &ObservedMesh) -> String {
    match (Role::of(&now.mesh, node), why_out(node, now)) {
        (Role::Leader { location }, _) => format!("leader of {location}"),
        (Role::Member { location, .. }, _) => format!("member of {location}"),
        (Role::Out, Some(why)) => format!("not in the mesh: {why}"),
        (Role::Out, None) => "not in the mesh".to_owned(),
    }
}

fn of_peers(before: &ObservedMesh, now: &ObservedMesh) -> Vec<Change> {
    let same = Arc::ptr_eq(&before.snapshot.peers, &now.snapshot.peers)
        && before.snapshot.problems == now.snapshot.problems
        && (now.snapshot.peers.is_empty() || claims_are_the_same(&before.mesh, &now.mesh));
    if same {
        return Vec::new();
    }
    let old = peer_acceptance::in_order(&before.mesh, &before.snapshot);
    let new = peer_acceptance::in_order(&now.mesh, &now.snapshot);
    let (mut gone, mut present) = (Vec::new(), Vec::new());
    for pair in old.into_iter().merge_join_by(new, |(old, _), (new, _)| old.cmp(new)) {
        let (peer, acceptance) = match pair {
            Left((peer, _)) => {
                gone.push(Change::PeerLeft { peer: peer.to_owned() });
                continue;
            }
            Both((_, old), (_, new)) if old == new => continue,
            Both(_, new) | Right(new) => new,
        };
        let peer = peer.to_owned();
        present.push(match acceptance {
            PeerAcceptance::Accepted => Change::PeerAccepted { peer, without: None },
            PeerAcceptance::Partly(without)
            | PeerAcceptance::Overlaps(without)
            | PeerAcceptance::InSubnet(without) => Change::PeerAccepted { peer, without: Some(without) },
            PeerAcceptance::Refused { why, .. } => Change::PeerRefused { peer, why },
        });
    }
    gone.append(&mut present);
    gone
}

/// Whether locations have the same keys and prefixes, by which peers are refused.
fn claims_are_the_same(before: &Mesh, now: &Mesh) -> bool {
    let same = |(old, new): (&Arc<Segment>, &Arc<Segment>)| {
        Arc::ptr_eq(old, new) || (old.key == new.key && old.reach == new.reach)
    };
    before.segments.len() == now.segments.len() && before.segments.iter().zip(&now.segments).all(same)
}

/// Locations with no node in the mesh: nothing can reach them.
pub fn locations_without_leader(now: &ObservedMesh) -> BTreeSet<String> {
    let Some(granularity) = now.mesh.granularity() else { return BTreeSet::new() };
    let led: BTreeSet<&str> = now.mesh.segments.iter().map(|segment| segment.location.as_str()).collect();
    let out = now.mesh.lost.iter().filter(|lost| now.snapshot.nodes.contains(lost.member.name()));
    let locations = out.map(|lost| location_of(&lost.member.node, granularity));
    locations.filter(|location| !led.contains(location.as_str())).collect()
}

#[cfg(test)]
mod tests;
