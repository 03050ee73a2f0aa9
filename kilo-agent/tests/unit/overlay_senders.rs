//! Who may send through another CNI's overlay, whatever nodes publish.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::net::{IpAddr, Ipv4Addr};

use kilo_core::{
    observed::HostLinks,
    plan::{HopIds, host_plan},
    settings::Settings,
    topology::Node,
    wireguard::key::PublicKey,
};

use crate::plans;

fn node(number: u8) -> Node {
    Node {
        name: format!("n{number}"),
        endpoint: format!("198.51.100.{number}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: format!("10.1.0.{number}/24").parse().ok(),
        pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
        ..Node::default()
    }
}

#[test]
fn what_a_node_publishes_takes_no_private_address_from_another() {
    let settings = Settings { local: false, cni: false, ..plans::settings() };
    let mesh = plans::mesh(&[1, 2, 3].map(node));
    let mesh = mesh.as_seen_from("n1");
    let hops = HopIds::default().update(&mesh);
    // n2 claims the private address of n3.
    let overlay = [("n1", [10, 50, 0, 1]), ("n2", [10, 1, 0, 3]), ("n3", [10, 50, 0, 3])];
    let links = HostLinks {
        overlay: overlay.map(|(name, ip)| (name.to_owned(), Ipv4Addr::from(ip))).into(),
        ..plans::links()
    };
    let plan = host_plan(&plans::inputs(&mesh, &settings, &links, &hops)).unwrap();
    let sender = |ip: [u8; 4]| plan.tables.node.get(&IpAddr::from(ip)).map(|node| node.hop);
    assert_eq!(sender([10, 1, 0, 3]), hops.get("n3"));
    assert_eq!(sender([10, 50, 0, 3]), hops.get("n3"));
    assert_eq!(sender([10, 1, 0, 2]), hops.get("n2"));
}
