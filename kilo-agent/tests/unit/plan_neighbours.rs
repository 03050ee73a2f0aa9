//! Number of entries that a node's plan takes in the kernel's neighbour table.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;

use kilo_core::{
    observed::HostLinks,
    plan::{self, HopIds},
    settings::{Encapsulate, Granularity, Settings},
    topology::{Mesh, Node},
    wireguard::key::PublicKey,
};

use crate::plans;

fn node(name: &str, number: u8, private: &str, endpoint: &str) -> Node {
    Node {
        name: name.into(),
        endpoint: format!("{endpoint}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: private.parse().ok(),
        location: name[..1].into(),
        pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
        ..Node::default()
    }
}

/// Locations a and b on one LAN, except for a5 behind a router, and c far away.
fn nodes() -> Vec<Node> {
    let on_lan = |name: &str, number: u8| {
        node(name, number, &format!("10.1.0.{number}/16"), &format!("10.1.0.{number}"))
    };
    let mut nodes: Vec<_> = (1..=4).map(|number| on_lan(&format!("a{number}"), number)).collect();
    nodes.push(node("a5", 5, "10.3.0.5/24", "10.3.0.5"));
    nodes.extend((1..=3).map(|number| on_lan(&format!("b{number}"), 10 + number)));
    nodes.extend((1..=2).map(|number| {
        node(&format!("c{number}"), 20 + number, &format!("10.2.0.{number}/16"), &format!("192.0.2.{number}"))
    }));
    nodes
}

fn neighbours(own: &str, granularity: Granularity, encapsulate: Encapsulate, links: &HostLinks) -> usize {
    let settings = Settings { granularity, encapsulate, ..plans::settings() };
    let mesh = Mesh::new(&nodes(), &BTreeMap::new(), granularity, settings.subnet);
    let mesh = mesh.as_seen_from(own);
    let hops = HopIds::default().update(&mesh);
    let plan = plan::host_plan(&plans::inputs(&mesh, &settings, links, &hops)).unwrap();
    plan.neighbours(links).count()
}

#[test]
fn nodes_on_the_same_link_are_neighbours_with_every_granularity_and_encapsulation() {
    let links = HostLinks { networks: vec![(2, "10.1.0.1/16".parse().unwrap())], ..plans::links() };
    for encapsulate in [Encapsulate::Never, Encapsulate::CrossSubnet, Encapsulate::Always] {
        let count = |own, granularity| neighbours(own, granularity, encapsulate, &links);
        assert_eq!(count("a1", Granularity::Location), 4, "{encapsulate:?}: the leader, to b's leader too");
        assert_eq!(count("a2", Granularity::Location), 3, "{encapsulate:?}: the others of a");
        assert_eq!(count("a2", Granularity::Full), 6, "{encapsulate:?}: endpoints of all others");
        assert_eq!(
            count("a2", Granularity::Cross),
            6,
            "{encapsulate:?}: three of a, endpoints of three of b"
        );
    }
}

#[test]
fn a_link_without_headers_has_no_neighbours() {
    let networks = vec![(2, "10.1.0.1/16".parse().unwrap())];
    let links = HostLinks { networks, layer3: [2].into(), ..plans::links() };
    assert_eq!(neighbours("a2", Granularity::Cross, Encapsulate::Always, &links), 0);
}
