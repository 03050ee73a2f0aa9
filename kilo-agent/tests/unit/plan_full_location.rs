//! A location with more nodes than fit into the table of hops.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

use kilo_common::{map_table::HOP, maps::HOP_FIRST_NODE};
use kilo_core::{
    plan::{HopIds, MOST_OTHERS},
    settings::Granularity,
    topology::{Mesh, Node},
    wireguard::key::PublicKey,
};

/// A location with `count` nodes, of which number `leader` asks to lead.
fn mesh(count: u32, leader: u32) -> Mesh {
    let nodes: Vec<_> = (0..count)
        .map(|number| {
            let addr = std::net::Ipv4Addr::from(0x0a01_0000 + number);
            let mut key = [7; 32];
            key[..4].copy_from_slice(&number.to_be_bytes());
            Node {
                name: format!("n{number:05}"),
                endpoint: format!("{addr}:51820").parse().ok(),
                key: Some(PublicKey(key)),
                internal_ip: format!("{addr}/16").parse().ok(),
                leader: number == leader,
                pod_cidrs: vec![format!("100.{}.{}.0/24", number >> 8, number & 255).parse().unwrap()],
                ..Node::default()
            }
        })
        .collect();
    let subnet = "10.4.0.0/16".parse().unwrap();
    Mesh::new(nodes.iter(), &BTreeMap::new(), Granularity::Location, subnet)
}

#[test]
fn nodes_that_have_no_hop_are_counted_and_the_leader_is_none_of_them() {
    assert_eq!(MOST_OTHERS, 4_092, "docs/data-path.md and docs/monitoring.md say so");
    let exact = MOST_OTHERS + 1;
    let full = mesh(exact, 0);
    assert_eq!(full.node_count(), exact as usize);
    let hops = HopIds::default().update(&full.as_seen_from("n00001"));
    assert_eq!(hops.left_out(&full.as_seen_from("n00001")), 0);
    let ids: BTreeSet<_> = (0..exact).filter_map(|number| hops.get(&format!("n{number:05}"))).collect();
    assert_eq!(ids, (HOP_FIRST_NODE..HOP.size).collect(), "every id has one node");

    // Seven more: the last ones get no hop, unless one of them becomes the leader.
    let more = mesh(exact + 7, 0);
    let hops = hops.update(&more.as_seen_from("n00001"));
    assert_eq!(hops.left_out(&more.as_seen_from("n00001")), 7);
    let last = format!("n{:05}", exact + 6);
    assert_eq!(hops.get(&last), None);
    let led = mesh(exact + 7, exact + 6);
    let hops = hops.update(&led.as_seen_from("n00001"));
    assert!(hops.get(&last).is_some(), "the leader has a hop");
    assert_eq!(hops.left_out(&led.as_seen_from("n00001")), 7);
    let ids: Vec<_> = (0..exact + 7).filter_map(|number| hops.get(&format!("n{number:05}"))).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "no id twice");
    // Other nodes leave: everybody has a hop again.
    let fewer = mesh(exact - 1, 0);
    assert_eq!(hops.update(&fewer.as_seen_from("n00001")).left_out(&fewer.as_seen_from("n00001")), 0);
}
