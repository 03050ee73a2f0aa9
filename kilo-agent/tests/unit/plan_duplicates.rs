//! Nodes that claim one private address: the node that has it loses nothing.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::net::IpAddr;

use kilo_common::{counters::Action, drop_reasons::DropReason};
use kilo_core::{
    plan::{
        Claimed, Conflict, Hop, HopIds, HostPlan,
        model::{Packet, Route},
    },
    topology::Node,
    wireguard::key::PublicKey,
};

use crate::plans;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Node a`number`, or b`number` in another location, with this last byte of its private address.
fn node(location: &str, number: u8, address: u8) -> Node {
    let site = if location == "a" { 1 } else { 2 };
    Node {
        name: format!("{location}{number}"),
        endpoint: format!("192.0.2.{site}{number}:51820").parse().ok(),
        key: Some(PublicKey([10 * site + number; 32])),
        internal_ip: format!("10.1.0.{address}/24").parse().ok(),
        location: location.to_owned(),
        leader: number == 1,
        pod_cidrs: vec![format!("10.{site}.{number}.0/24").parse().unwrap()],
        ..Node::default()
    }
}

fn plan(nodes: &[Node], own: &str, hops: &HopIds) -> (HostPlan, HopIds) {
    plans::plan(&plans::mesh(nodes), own, hops)
}

/// Verdict of `plan` on a packet that arrived from the private address .12.
fn from_twelve(plan: &HostPlan, src: &str, dst: &str) -> Result<Action, DropReason> {
    let packet = Packet { src: ip(src), dst: ip(dst) };
    plan.tables.lan_ingress(ip("10.1.0.12"), packet).map(|(action, _)| action)
}

#[test]
fn a_node_that_is_annotated_with_anothers_address_takes_nothing_from_it() {
    let honest = [node("a", 1, 11), node("a", 2, 12), node("a", 3, 13), node("b", 1, 21)];
    let (_, ids) = plan(&honest, "a1", &HopIds::default());
    let all: Vec<Node> = [node("a", 0, 12)].into_iter().chain(honest).collect();
    // With the previous hop ids, and with those of a newly started agent.
    for known in [ids, HopIds::default()] {
        let (leader, _) = plan(&all, "a1", &known);
        for src in ["10.1.2.7", "10.1.0.12", "10.1.0.7"] {
            assert_eq!(from_twelve(&leader, src, "10.1.1.5"), Ok(Action::Deliver), "{src}");
            assert_eq!(from_twelve(&leader, src, "10.2.1.5"), Ok(Action::Transit), "{src}");
        }
        assert_eq!(from_twelve(&leader, "10.1.3.7", "10.1.1.5"), Err(DropReason::ForeignSource));
        let sender = leader.tables.node[&ip("10.1.0.12")];
        assert!(sender.may_send_from([10, 1, 2, 7]) || sender.may_send_from([10, 1, 0, 7]));
        assert_eq!(sender.interfaces, [2, 0, 0, 0]);
        // The reverse: to the host that has the address, whichever node it is.
        for dst in ["10.1.2.7", "10.1.0.12", "10.1.0.7"] {
            let route = leader.route_from_kilo(Packet { src: ip("10.2.1.5"), dst: ip(dst) });
            let Route::Gateway { gateway, .. } = route else { panic!("{dst}: {route:?}") };
            assert_eq!(gateway, ip("10.1.0.12"), "{dst}");
        }
    }
}

#[test]
fn all_claimants_are_named_and_only_while_they_claim() {
    let claimed = Claimed::Address(ip("10.1.0.12"));
    let twelve = Conflict { claimed, nodes: vec!["a0".to_owned(), "a2".to_owned()] };
    let nodes = [node("a", 0, 12), node("a", 1, 11), node("a", 2, 12), node("b", 1, 21)];
    for own in ["a0", "a1", "a2"] {
        assert_eq!(plan(&nodes, own, &HopIds::default()).0.conflicts, std::slice::from_ref(&twelve), "{own}");
    }
    assert!(plan(&nodes, "b1", &HopIds::default()).0.conflicts.is_empty(), "b1 has nothing to do with it");
    let elsewhere = [node("a", 1, 11), node("a", 2, 12), node("b", 1, 12)];
    let both = Conflict { nodes: vec!["a2".to_owned(), "b1".to_owned()], ..twelve };
    assert_eq!(plan(&elsewhere, "a2", &HopIds::default()).0.conflicts, std::slice::from_ref(&both));
    assert_eq!(plan(&elsewhere, "b1", &HopIds::default()).0.conflicts, [both]);
    assert!(plan(&elsewhere, "a1", &HopIds::default()).0.conflicts.is_empty());
    let none = [node("a", 1, 11), node("a", 2, 12)];
    assert!(plan(&none, "a1", &HopIds::default()).0.conflicts.is_empty());
}

#[test]
fn nodes_with_one_key_are_named_in_one_location_and_in_two() {
    let keys = |nodes: &[Node], own: &str| plan(nodes, own, &HopIds::default()).0.conflicts;
    let [a1, a2, b1, b2] = [node("a", 1, 11), node("a", 2, 12), node("b", 1, 21), node("b", 2, 22)];
    let b1_with = |of: &Node| Node { key: of.key, ..b1.clone() };
    let conflict = |nodes: [&str; 2], of: &Node| Conflict {
        claimed: Claimed::Key(of.key.unwrap()),
        nodes: nodes.map(str::to_owned).to_vec(),
    };
    let elsewhere = [a1.clone(), a2.clone(), b1_with(&a2), b2.clone()];
    let both = [conflict(["a2", "b1"], &a2)];
    for (own, wanted) in [("a1", &[][..]), ("a2", &both), ("b1", &both), ("b2", &[])] {
        assert_eq!(keys(&elsewhere, own), wanted, "{own}");
    }
    assert_eq!(kilo_core::plan::conflicts(&plans::mesh(&elsewhere)), both);
    let beside = [a1.clone(), Node { key: a1.key, ..a2.clone() }, b1.clone(), b2.clone()];
    let both = [conflict(["a1", "a2"], &a1)];
    assert_eq!((keys(&beside, "a1"), keys(&beside, "a2")), (both.to_vec(), both.to_vec()));
    assert!(keys(&beside, "b1").is_empty() && keys(&[a1, a2, b1, b2], "a1").is_empty());
}

#[test]
fn nodes_whose_pods_overlap_are_named_to_their_locations_and_to_each_other() {
    let prefixes = |nodes: &[Node], own: &str| -> Vec<String> {
        let conflicts = plan(nodes, own, &HopIds::default()).0.conflicts;
        conflicts.iter().map(|it| format!("{} {}", it.claimed.object(), it.nodes.join(" "))).collect()
    };
    let [a1, a2, b1, b2] = [node("a", 1, 11), node("a", 2, 12), node("b", 1, 21), node("b", 2, 22)];
    let wide = Node { pod_cidrs: vec!["10.1.2.0/23".parse().unwrap()], ..b1.clone() };
    let elsewhere = [a1.clone(), a2.clone(), wide, b2.clone()];
    let both = ["prefix/10.1.2.0/23 a2 b1"];
    for (own, wanted) in [("a1", &[][..]), ("a2", &both), ("b1", &both), ("b2", &[])] {
        assert_eq!(prefixes(&elsewhere, own), wanted, "{own}");
    }
    let in_subnet =
        Node { pod_cidrs: ["10.4.0.0/24", "10.4.9.0/24"].map(|cidr| cidr.parse().unwrap()).to_vec(), ..a2 };
    let nodes = [a1, in_subnet, b1, b2];
    for (own, wanted) in [("a1", &["prefix/10.4.0.0/24 a2"][..]), ("b1", &[])] {
        assert_eq!(prefixes(&nodes, own), wanted, "{own}");
    }
}

#[test]
fn a_node_whose_own_address_is_claimed_keeps_it() {
    let nodes = [node("a", 0, 12), node("a", 1, 11), node("a", 2, 12), node("b", 1, 21)];
    let (own, _) = plan(&nodes, "a2", &HopIds::default());
    assert!(own.tables.is_local(ip("10.1.0.12")) && own.tables.is_local(ip("10.1.2.7")));
    let to_self = |hop: &Hop| matches!(hop, Hop::Node { remote, .. } if *remote == ip("10.1.0.12"));
    assert!(!own.tables.hop.values().any(to_self), "nothing is sent to itself");
}
