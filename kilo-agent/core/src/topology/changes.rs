//! What differs between two moments of the mesh that its operator should know.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use super::{LeaderReason, Mesh, Node, PeerStanding, Segment, location_of, missing};
use crate::objects::Snapshot;

/// The mesh at one moment, and the objects it was made of.
#[derive(Clone, Copy, Debug)]
pub struct Moment<'a> {
    /// Locations and peers.
    pub mesh: &'a Mesh,
    /// Nodes and peers, in the mesh or not.
    pub snapshot: &'a Snapshot,
    /// This node as it is now, which its object may not say yet.
    pub own: Option<&'a Node>,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A location has its first node.
    LocationAppeared {
        /// Its name, as [`Segment::location`].
        location: String,
        /// Who leads it.
        leader: String,
        /// The rule that chose the leader.
        rule: LeaderReason,
    },
    /// A location has lost its last node.
    LocationVanished {
        /// Its name.
        location: String,
        /// Who led it.
        leader: String,
        /// What became of the leader.
        why: Absence,
    },
    /// Another node leads.
    LeaderMoved {
        /// Its name.
        location: String,
        /// Who led.
        from: String,
        /// Who leads now.
        to: String,
        /// Why.
        why: Succession,
    },
    /// A node takes part.
    NodeJoined {
        /// Its name.
        node: String,
        /// Where.
        location: String,
    },
    /// A node is in another location.
    NodeMoved {
        /// Its name.
        node: String,
        /// Where it was.
        from: String,
        /// Where it is.
        to: String,
    },
    /// A node takes no part any more.
    NodeLeft {
        /// Its name.
        node: String,
        /// Where it was.
        location: String,
        /// Why.
        why: Absence,
    },
    /// What this node does has changed.
    Role {
        /// What it did.
        from: Role,
        /// What it does.
        to: Role,
    },
    /// A VPN peer is in the mesh.
    PeerAccepted {
        /// Its name.
        peer: String,
        /// What of it is not used.
        without: Option<String>,
    },
    /// A VPN peer is not in the mesh.
    PeerRefused {
        /// Its name.
        peer: String,
        /// Why.
        why: String,
    },
    /// The object of a VPN peer is gone.
    PeerLeft {
        /// Its name.
        peer: String,
    },
}

/// Why a node takes no part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absence {
    /// There is no such object.
    Deleted,
    /// Its heartbeat no longer changes.
    Silent,
    /// It lacks something.
    Incomplete(Vec<&'static str>),
    /// It is in another location.
    Moved,
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deleted => f.write_str("its Node object was deleted"),
            Self::Silent => f.write_str("its agent no longer checks in"),
            Self::Incomplete(missing) => write!(f, "it has {}", missing.join(", ")),
            Self::Moved => f.write_str("it is in another location now"),
        }
    }
}

/// Why another node leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Succession {
    /// The one before cannot.
    Lost(Absence),
    /// By this rule the new one comes first.
    Rule(LeaderReason),
}

impl fmt::Display for Succession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(why) => write!(f, "of the one before: {why}"),
            Self::Rule(rule) => write!(f, "the new one: {rule}"),
        }
    }
}

/// What a node does in the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It takes no part.
    #[default]
    Out,
    /// It follows a leader.
    Member {
        /// Of this location.
        location: String,
        /// Whom it follows.
        leader: String,
    },
    /// It leads.
    Leader {
        /// This location.
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
    /// Of a node.
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

/// The node that speaks for those that cannot: the leader of the first location. All agents name the same.
pub fn speaker(mesh: &Mesh) -> Option<&str> {
    Some(mesh.segments.first()?.leading()?.name())
}

/// What differs, as the node `own` sees it. Locations that are the same in memory are not read.
pub fn changes(before: Moment<'_>, now: Moment<'_>, own: &str) -> Vec<Change> {
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
    let (from, to) = (Role::of(before.mesh, own), Role::of(now.mesh, own));
    if from != to {
        changes.push(Change::Role { from, to });
    }
    changes.extend(of_peers(before, now));
    changes
}

/// Segments of both, by location.
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

/// A location that is a node on its own changes with that node, which is said of the node.
fn of_location(old: Option<&Arc<Segment>>, new: Option<&Arc<Segment>>, now: Moment<'_>) -> Option<Change> {
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
fn absence(node: &str, location: &str, now: Moment<'_>) -> Absence {
    let own = now.own.filter(|own| own.name == node);
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

/// Why a node that is known is not in the mesh; `None`: it is, or there is no such node.
pub fn why_out(node: &str, now: Moment<'_>) -> Option<Absence> {
    let known = now.own.is_some_and(|own| own.name == node) || now.snapshot.nodes.contains(node);
    (known && now.mesh.find(node).is_none()).then(|| absence(node, "", now))
}

fn of_peers(before: Moment<'_>, now: Moment<'_>) -> Vec<Change> {
    let same = Arc::ptr_eq(&before.snapshot.peers, &now.snapshot.peers)
        && before.snapshot.problems == now.snapshot.problems
        && (now.snapshot.peers.is_empty() || keys(before.mesh).eq(keys(now.mesh)));
    if same {
        return Vec::new();
    }
    let old = super::peer_standings(before.mesh, before.snapshot);
    let new = super::peer_standings(now.mesh, now.snapshot);
    let gone = old.keys().filter(|peer| !new.contains_key(*peer));
    let gone = gone.map(|peer| Change::PeerLeft { peer: peer.clone() }).collect::<Vec<_>>();
    let differing = new.into_iter().filter(|(peer, standing)| old.get(peer) != Some(standing));
    let told = differing.map(|(peer, standing)| match standing {
        PeerStanding::Accepted => Change::PeerAccepted { peer, without: None },
        PeerStanding::Partly(without) => Change::PeerAccepted { peer, without: Some(without) },
        PeerStanding::Refused { why, .. } => Change::PeerRefused { peer, why },
    });
    gone.into_iter().chain(told).collect()
}

fn keys(mesh: &Mesh) -> impl Iterator<Item = &crate::wireguard::key::PublicKey> {
    mesh.segments.iter().map(|segment| &segment.key)
}

/// Locations whose nodes all take no part: nothing reaches them.
pub fn locations_without_leader(now: Moment<'_>) -> BTreeSet<String> {
    let Some(granularity) = now.mesh.granularity() else { return BTreeSet::new() };
    let led: BTreeSet<&str> = now.mesh.segments.iter().map(|segment| segment.location.as_str()).collect();
    let out = now.mesh.lost.iter().filter(|lost| now.snapshot.nodes.contains(lost.member.name()));
    let locations = out.map(|lost| location_of(&lost.member.node, granularity));
    locations.filter(|location| !led.contains(location.as_str())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::{
        objects::ObjectRef,
        settings::Granularity,
        topology::{CheckedIn, Peer},
        wireguard::key::PublicKey,
    };

    fn node(name: &str, location: &str) -> Node {
        let number = name.bytes().map(u32::from).sum::<u32>() % 250;
        Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: format!("192.0.2.{number}:51820").parse().ok(),
            key: Some(PublicKey([u8::try_from(number).unwrap(); 32])),
            internal_ip: format!("10.1.0.{number}/24").parse().ok(),
            pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
            ..Node::default()
        }
    }

    fn peer(name: &str, key: u8, allowed_ip: &str) -> Peer {
        Peer {
            name: name.to_owned(),
            allowed_ips: vec![allowed_ip.parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([key; 32]),
        }
    }

    /// Objects, and the mesh of the nodes that are alive.
    #[derive(Default)]
    struct World {
        mesh: Mesh,
        snapshot: Snapshot,
    }

    impl World {
        fn new(before: &Self, nodes: &[Node], dead: &[&str], peers: &[Peer]) -> Self {
            let checked_in = |node: &Node| CheckedIn { node: node.clone(), last_seen: 1 };
            let snapshot = Snapshot {
                nodes: nodes.iter().map(checked_in).collect(),
                peers: Arc::new(peers.iter().map(|peer| (peer.name.clone(), peer.clone())).collect()),
                ..Snapshot::default()
            };
            let alive = |known: &super::super::Known<'_>| {
                missing(known).next().is_none() && !dead.contains(&known.name.as_str())
            };
            let of = |alive: Vec<&Arc<Node>>| {
                before.mesh.next(
                    alive,
                    &snapshot.peers,
                    Granularity::Location,
                    "10.4.0.0/16".parse().unwrap(),
                )
            };
            let (all, out): (Vec<_>, Vec<_>) = snapshot.nodes.iter().partition(alive);
            let mesh = of(all.into_iter().map(|known| known.node).collect());
            let mesh = mesh.with_lost(out.into_iter().map(|known| known.node));
            Self { mesh, snapshot }
        }

        fn at(&self) -> Moment<'_> {
            Moment { mesh: &self.mesh, snapshot: &self.snapshot, own: None }
        }
    }

    /// A location of three, and one of one; seen by `own`.
    fn after(dead: &[&str], change: impl Fn(&mut Vec<Node>), own: &str) -> Vec<Change> {
        let mut nodes: Vec<_> = ["a1", "a2", "a3"].map(|name| node(name, "a")).into();
        nodes.push(node("b1", "b"));
        let before = World::new(&World::default(), &nodes, &[], &[]);
        change(&mut nodes);
        let now = World::new(&before, &nodes, dead, &[]);
        changes(before.at(), now.at(), own)
    }

    fn text(text: &str) -> String {
        text.to_owned()
    }

    #[test]
    fn nothing_is_said_of_a_mesh_that_stays() {
        assert_eq!(after(&[], |_| {}, "a1"), []);
        // A heartbeat, or an address, is no news of this kind.
        let moved = |nodes: &mut Vec<Node>| nodes[1].internal_ip = "10.1.0.99/24".parse().ok();
        assert_eq!(after(&[], moved, "a1"), []);
    }

    #[test]
    fn a_leader_that_dies_has_a_successor_who_knows_why() {
        let left = Change::NodeLeft { node: text("a1"), location: text("location:a"), why: Absence::Silent };
        let moved = Change::LeaderMoved {
            location: text("location:a"),
            from: text("a1"),
            to: text("a2"),
            why: Succession::Lost(Absence::Silent),
        };
        assert_eq!(after(&["a1"], |_| {}, "b1"), [moved.clone(), left.clone()]);
        let member = |leader: &str| Role::Member { location: text("location:a"), leader: text(leader) };
        let leads = Change::Role { from: member("a1"), to: Role::Leader { location: text("location:a") } };
        assert_eq!(after(&["a1"], |_| {}, "a2"), [moved.clone(), left.clone(), leads]);
        let follows = Change::Role { from: member("a1"), to: member("a2") };
        assert_eq!(after(&["a1"], |_| {}, "a3"), [moved, left, follows]);
    }

    #[test]
    fn a_leader_gives_way_to_one_that_asks() {
        let found = after(&[], |nodes| nodes[2].leader = true, "a1");
        let why = Succession::Rule(LeaderReason::AsksWithPublicEndpoint);
        let moved =
            Change::LeaderMoved { location: text("location:a"), from: text("a1"), to: text("a3"), why };
        assert_eq!(found[0], moved);
        let to = Role::Member { location: text("location:a"), leader: text("a3") };
        let role = Change::Role { from: Role::Leader { location: text("location:a") }, to };
        assert_eq!(found[1..], [role]);
    }

    #[test]
    fn each_way_out_of_the_mesh_has_its_reason() {
        let why = |dead: &[&str], change: fn(&mut Vec<Node>)| match after(dead, change, "b1").pop().unwrap() {
            Change::NodeLeft { node, why, .. } => (node, why),
            other => panic!("{other:?}"),
        };
        assert_eq!(why(&["a2"], |_| {}), (text("a2"), Absence::Silent));
        assert_eq!(why(&[], |nodes| drop(nodes.remove(1))), (text("a2"), Absence::Deleted));
        let incomplete = Absence::Incomplete(vec!["no key"]);
        assert_eq!(why(&[], |nodes| nodes[1].key = None), (text("a2"), incomplete));
        let moved = after(&[], |nodes| nodes[1].location = text("b"), "b1");
        let (from, to) = (text("location:a"), text("location:b"));
        let moved_over = Change::NodeMoved { node: text("a2"), from, to };
        // It comes before b1 by name, and so it leads there.
        assert!(moved.contains(&moved_over), "{moved:?}");
        assert!(!moved.iter().any(|change| matches!(change, Change::NodeLeft { .. })), "{moved:?}");
    }

    #[test]
    fn a_location_vanishes_with_its_last_node_and_appears_with_its_first() {
        let vanished = Change::LocationVanished {
            location: text("location:b"),
            leader: text("b1"),
            why: Absence::Silent,
        };
        assert_eq!(after(&["b1"], |_| {}, "a1")[0], vanished);
        let appeared = Change::LocationAppeared {
            location: text("location:c"),
            leader: text("c1"),
            rule: LeaderReason::OnlyNode,
        };
        let joined = Change::NodeJoined { node: text("c1"), location: text("location:c") };
        assert_eq!(after(&[], |nodes| nodes.push(node("c1", "c")), "a1"), [appeared, joined]);
    }

    #[test]
    fn a_location_without_a_leader_is_one_whose_nodes_are_all_known_and_out() {
        let nodes = [node("a1", "a"), node("b1", "b")];
        let before = World::new(&World::default(), &nodes, &[], &[]);
        let of = |dead: &[&str], nodes: &[Node]| {
            locations_without_leader(World::new(&before, nodes, dead, &[]).at())
                .into_iter()
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&[], &nodes), [""; 0]);
        assert_eq!(of(&["b1"], &nodes), ["location:b"]);
        assert_eq!(of(&[], &nodes[..1]), [""; 0], "a node that was deleted makes no location");
    }

    #[test]
    fn peers_are_accepted_refused_and_leave() {
        let nodes = [node("a1", "a")];
        let alone = World::new(&World::default(), &nodes, &[], &[]);
        let with = World::new(&alone, &nodes, &[], &[peer("laptop", 9, "10.5.0.1/32")]);
        let accepted = Change::PeerAccepted { peer: text("laptop"), without: None };
        assert_eq!(changes(alone.at(), with.at(), "a1"), [accepted.clone()]);
        let left = Change::PeerLeft { peer: text("laptop") };
        assert_eq!(changes(with.at(), alone.at(), "a1"), [left]);
        let mut invalid = World::new(&alone, &nodes, &[], &[]);
        invalid.snapshot.problems.insert(ObjectRef::peer("laptop"), text("no key"));
        let refused = Change::PeerRefused { peer: text("laptop"), why: text("no key") };
        assert_eq!(changes(with.at(), invalid.at(), "a1"), [refused]);
        assert_eq!(changes(invalid.at(), with.at(), "a1"), [accepted]);
    }

    #[test]
    fn the_leader_of_the_first_location_speaks_for_the_others() {
        let nodes = [node("b1", "b"), node("a2", "a"), node("a1", "a")];
        let world = World::new(&World::default(), &nodes, &[], &[]);
        assert_eq!(speaker(&world.mesh), Some("a1"));
        assert_eq!(speaker(&Mesh::default()), None);
    }

    #[test]
    fn a_node_that_is_out_says_why() {
        let mut nodes = [node("a1", "a"), node("a2", "a")];
        nodes[1].pod_cidrs.clear();
        let world = World::new(&World::default(), &nodes, &[], &[]);
        assert_eq!(why_out("a2", world.at()).unwrap().to_string(), "it has no pod CIDR");
        assert_eq!(why_out("a1", world.at()), None);
        assert_eq!(why_out("a3", world.at()), None);
    }
}
