//! Who may send through another CNI's overlay, whatever nodes publish.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use kilo_core::{
    observed::HostLinks,
    plan::{HopIds, Inputs, host_plan},
    settings::{Encapsulate, Granularity, Settings, Tunnel},
    topology::{Mesh, Node},
    wireguard::key::PublicKey,
};

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
    let settings = Settings {
        granularity: Granularity::Location,
        encapsulate: Encapsulate::Always,
        tunnel: Tunnel::Ipip,
        local: false,
        cni: false,
        subnet: "10.4.0.0/16".parse().unwrap(),
        service_cidrs: Vec::new(),
        port: 51_820,
    };
    let nodes = [1, 2, 3].map(node);
    let mesh = Mesh::new(&nodes, &BTreeMap::new(), settings.granularity, settings.subnet);
    let hops = HopIds::default().update(&mesh, "n1");
    // n2 says that it has the private address of n3.
    let overlay = [("n1", [10, 50, 0, 1]), ("n2", [10, 1, 0, 3]), ("n3", [10, 50, 0, 3])];
    let links = HostLinks {
        kilo: 9,
        private: Some(2),
        overlay: overlay.map(|(name, ip)| (name.to_owned(), Ipv4Addr::from(ip))).into(),
        ..HostLinks::default()
    };
    let plan = host_plan(&Inputs {
        mesh: &mesh,
        settings: &settings,
        node: "n1",
        links: &links,
        hops: &hops,
        resolved: &BTreeMap::new(),
        seen: &BTreeMap::new(),
        persistent_keepalive: 0,
        masquerade: true,
        mtu: 1420,
    })
    .unwrap();
    let sender = |ip: [u8; 4]| plan.tables.node.get(&IpAddr::from(ip)).map(|node| node.hop);
    assert_eq!(sender([10, 1, 0, 3]), hops.get("n3"));
    assert_eq!(sender([10, 50, 0, 3]), hops.get("n3"));
    assert_eq!(sender([10, 1, 0, 2]), hops.get("n2"));
}
