//! Nodes that come, go and fall silent, and what is reported about each.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::*;
use crate::{
    objects::{ObjectRef, Snapshot},
    settings::Granularity,
    topology::{CheckedIn, NO_POD_CIDR, Node, Peer},
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
        follows: false,
    }
}

/// These objects, and the mesh of the nodes that are alive, after the mesh `before`.
fn observed(before: &ObservedMesh, nodes: &[Node], dead: &[&str], peers: &[Peer]) -> ObservedMesh {
    let checked_in = |node: &Node| CheckedIn { node: node.clone(), last_seen: 1 };
    let snapshot = Snapshot {
        nodes: nodes.iter().map(checked_in).collect(),
        peers: Arc::new(peers.iter().map(|peer| (peer.name.clone(), peer.clone())).collect()),
        ..Snapshot::default()
    };
    let alive = |known: &super::super::CheckedInRef<'_>| {
        missing(known).next().is_none() && !dead.contains(&known.name.as_str())
    };
    let of = |alive: Vec<&Arc<Node>>| {
        before.mesh.next(alive, &snapshot.peers, Granularity::Location, "10.4.0.0/16".parse().unwrap())
    };
    let (all, out): (Vec<_>, Vec<_>) = snapshot.nodes.iter().partition(alive);
    let mesh = of(all.into_iter().map(|known| known.node).collect());
    let mesh = mesh.with_lost(out.into_iter().map(|known| known.node));
    ObservedMesh { mesh: mesh.into(), snapshot: snapshot.into(), ..ObservedMesh::default() }
}

/// Changes in a mesh with a location of three nodes and a location
/// of one; seen by `own`.
fn after(dead: &[&str], change: impl Fn(&mut Vec<Node>), own: &str) -> Vec<Change> {
    let mut nodes: Vec<_> = ["a1", "a2", "a3"].map(|name| node(name, "a")).into();
    nodes.push(node("b1", "b"));
    let before = observed(&ObservedMesh::default(), &nodes, &[], &[]);
    change(&mut nodes);
    let now = observed(&before, &nodes, dead, &[]);
    changes(&before, &now, own)
}

fn text(text: &str) -> String {
    text.to_owned()
}

#[test]
fn nothing_is_said_of_a_mesh_that_stays() {
    assert_eq!(after(&[], |_| {}, "a1"), []);
    // A heartbeat, or an address, is not a change of this kind.
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
fn the_last_that_a_node_says_of_its_leaving_is_why_and_what_to_do() {
    for own in ["a2", "b1"] {
        let change = |nodes: &mut Vec<Node>| {
            nodes.iter_mut().filter(|node| node.name == own).for_each(|node| node.pod_cidrs.clear());
        };
        let found = after(&[], change, own);
        assert!(matches!(found[0], Change::Role { to: Role::Out, .. }), "{found:?}");
        let Some(Change::NodeLeft { why, .. }) = found.last() else { panic!("{found:?}") };
        let said =
            "it has no pod CIDR: kube-controller-manager needs --allocate-node-cidrs and --cluster-cidr";
        assert_eq!(why.to_string(), said);
    }
}

#[test]
fn a_leader_gives_way_to_one_that_asks() {
    let found = after(&[], |nodes| nodes[2].leader = true, "a1");
    let why = Succession::Rule(LeaderReason::AsksWithPublicEndpoint);
    let moved = Change::LeaderMoved { location: text("location:a"), from: text("a1"), to: text("a3"), why };
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
    let vanished =
        Change::LocationVanished { location: text("location:b"), leader: text("b1"), why: Absence::Silent };
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
    let before = observed(&ObservedMesh::default(), &nodes, &[], &[]);
    let of = |dead: &[&str], nodes: &[Node]| {
        locations_without_leader(&observed(&before, nodes, dead, &[])).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(of(&[], &nodes), [""; 0]);
    assert_eq!(of(&["b1"], &nodes), ["location:b"]);
    // Remembered for a minute, so that nothing leaves in cleartext, and yet gone.
    let mut deleted = observed(&before, &nodes, &["b1"], &[]);
    Arc::make_mut(&mut deleted.snapshot).nodes.remove("b1");
    assert_eq!(deleted.mesh.lost.len(), 1);
    assert_eq!(locations_without_leader(&deleted).len(), 0, "a node that was deleted makes no location");
}

#[test]
fn peers_are_accepted_refused_and_leave() {
    let nodes = [node("a1", "a")];
    let alone = observed(&ObservedMesh::default(), &nodes, &[], &[]);
    let with = observed(&alone, &nodes, &[], &[peer("laptop", 9, "10.5.0.1/32")]);
    let accepted = Change::PeerAccepted { peer: text("laptop"), without: None };
    assert_eq!(changes(&alone, &with, "a1"), std::slice::from_ref(&accepted));
    let left = Change::PeerLeft { peer: text("laptop") };
    assert_eq!(changes(&with, &alone, "a1"), [left]);
    let mut invalid = observed(&alone, &nodes, &[], &[]);
    Arc::make_mut(&mut invalid.snapshot).problems.insert(ObjectRef::peer("laptop"), text("no key"));
    let refused = Change::PeerRefused { peer: text("laptop"), why: text("no key") };
    assert_eq!(changes(&with, &invalid, "a1"), [refused]);
    assert_eq!(changes(&invalid, &with, "a1"), [accepted]);
}

#[test]
fn a_peer_is_spoken_of_again_when_a_node_joins_whose_pods_have_its_addresses() {
    let (a1, a2) = (node("a1", "a"), node("a2", "a"));
    let within = a2.pod_cidrs[0].to_string().replace(".0/24", ".7/32");
    let laptop = [peer("laptop", 9, &within)];
    let before = observed(&ObservedMesh::default(), std::slice::from_ref(&a1), &[], &laptop);
    let mut now = observed(&before, &[a1, a2], &[], &laptop);
    // The Peer object itself has not changed.
    Arc::make_mut(&mut now.snapshot).peers = Arc::clone(&before.snapshot.peers);
    let said = changes(&before, &now, "a1");
    let Some(Change::PeerAccepted { without: Some(why), .. }) = said.last() else { panic!("{said:?}") };
    assert!(why.contains("the pod CIDR of node a2"), "{why}");
}

#[test]
fn the_leader_of_the_first_location_speaks_for_the_others() {
    let nodes = [node("b1", "b"), node("a2", "a"), node("a1", "a")];
    let world = observed(&ObservedMesh::default(), &nodes, &[], &[]);
    assert_eq!(speaker(&world.mesh), Some("a1"));
    assert_eq!(speaker(&Mesh::default()), None);
}

#[test]
fn a_node_that_is_out_says_why() {
    let mut nodes = [node("a1", "a"), node("a2", "a")];
    nodes[1].pod_cidrs.clear();
    let world = observed(&ObservedMesh::default(), &nodes, &[], &[]);
    let why = why_out("a2", &world).unwrap().to_string();
    assert_eq!(why, format!("it has {}", with_remedy(NO_POD_CIDR)));
    assert_eq!(why_out("a1", &world), None);
    assert_eq!(why_out("a3", &world), None);
}

#[test]
fn the_state_of_a_node_names_no_other() {
    let mut nodes: Vec<_> = ["a1", "a2", "a3"].map(|name| node(name, "a")).into();
    nodes[2].pod_cidrs.clear();
    let world = observed(&ObservedMesh::default(), &nodes, &[], &[]);
    assert_eq!(state("a1", &world), "leader of location:a");
    assert_eq!(state("a2", &world), "member of location:a");
    assert_eq!(state("a3", &world), format!("not in the mesh: it has {}", with_remedy(NO_POD_CIDR)));
    assert_eq!(state("a4", &world), "not in the mesh");
}
