//! Private addresses of other locations: WireGuard packets from there are refused.

#![allow(clippy::unwrap_used, reason = "tests")]

use ipnet::IpNet;
use kilo_common::maps::{HOP_LOCAL, HOP_REMOTE, PREFIX_VIA_WIREGUARD};
use kilo_core::{plan::HopIds, topology::Node, wireguard::key::PublicKey};

use crate::plans;

fn node(number: u8, location: &str, endpoint: &str, pods: &str) -> Node {
    Node {
        name: format!("n{number}"),
        endpoint: format!("{endpoint}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: format!("10.1.0.{number}/24").parse().ok(),
        location: location.to_owned(),
        pod_cidrs: vec![pods.parse().unwrap()],
        ..Node::default()
    }
}

/// Hop of a prefix, and whether it is via WireGuard, as seen from node `own`.
fn known(nodes: &[Node], own: &str, prefix: &str) -> (u32, bool) {
    let (plan, _) = plans::plan(&plans::mesh(nodes), own, &HopIds::default());
    let value = plan.tables.prefix[&prefix.parse::<IpNet>().unwrap()];
    (value.hop, value.flags & PREFIX_VIA_WIREGUARD != 0)
}

#[test]
fn a_leader_knows_what_is_via_wireguard_and_where_wireguard_sends() {
    let nodes = [
        node(1, "a", "192.0.2.1", "10.42.1.0/24"),
        node(2, "b", "192.0.2.2", "10.42.2.0/24"),
        node(3, "b", "192.0.2.3", "10.42.3.0/24"),
        // WireGuard sends to the private address of this one.
        node(4, "c", "10.1.0.4", "10.42.4.0/24"),
    ];
    assert_eq!(known(&nodes, "n1", "10.1.0.2/32"), (HOP_REMOTE, true));
    assert_eq!(known(&nodes, "n1", "10.1.0.3/32"), (HOP_REMOTE, true));
    assert_eq!(known(&nodes, "n1", "10.1.0.4/32"), (HOP_REMOTE, false));
    assert_eq!(known(&nodes, "n1", "10.42.2.0/24"), (HOP_REMOTE, false));
    assert_eq!(known(&nodes, "n1", "10.4.0.2/32"), (HOP_REMOTE, true), "b's WireGuard address");
    assert_eq!(known(&nodes, "n1", "10.1.0.1/32"), (HOP_LOCAL, false));
    assert!(!known(&nodes, "n3", "10.1.0.1/32").1, "only leaders hear WireGuard");
}

#[test]
fn an_address_is_via_wireguard_also_when_others_claim_it() {
    // Claimed as a pod CIDR of a location before or after it; a node's own location takes precedence.
    for (first, last) in [("10.1.0.3/32", "10.42.4.0/24"), ("10.42.2.0/24", "10.1.0.3/32")] {
        let nodes = [
            node(1, "a", "192.0.2.1", "10.42.1.0/24"),
            node(2, "b", "192.0.2.2", first),
            node(3, "c", "192.0.2.3", "10.42.3.0/24"),
            node(4, "d", "192.0.2.4", last),
        ];
        assert_eq!(known(&nodes, "n1", "10.1.0.3/32"), (HOP_REMOTE, true), "{first} {last}");
    }
    let nodes = [node(1, "a", "192.0.2.1", "10.1.0.3/32"), node(3, "c", "192.0.2.3", "10.42.3.0/24")];
    assert_eq!(known(&nodes, "n1", "10.1.0.3/32"), (HOP_LOCAL, false));
}
