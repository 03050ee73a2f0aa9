//! Private addresses of other locations: packets to WireGuard from there are refused. And WireGuard's own addresses in
//! prefixes that somebody has chosen: those do not lead its packets into itself.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use kilo_common::maps::{
    HOP_ACTING, HOP_LOCAL, HOP_REMOTE, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED,
    PREFIX_VIA_WIREGUARD,
};
use kilo_core::{
    observed::{Elsewhere, HostLinks},
    plan::{self, HopIds, HostPlan},
    topology::{Acting, Mesh, Node, Peer},
    wireguard::key::PublicKey,
};

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

/// Hop of a prefix, and whether what comes from there is inside, as node `own` has it.
fn known(nodes: &[Node], own: &str, prefix: &str) -> (u32, bool) {
    let (plan, _) = plans::plan(&plans::mesh(nodes), own, &HopIds::default());
    let value = plan.tables.prefix[&prefix.parse::<IpNet>().unwrap()];
    (value.hop, value.flags & PREFIX_VIA_WIREGUARD != 0)
}

#[test]
fn a_leader_knows_what_lies_inside_of_wireguard_and_where_wireguard_sends() {
    let nodes = [
        node(1, "a", "192.0.2.1", "10.42.1.0/24"),
        node(2, "b", "192.0.2.2", "10.42.2.0/24"),
        node(3, "b", "192.0.2.3", "10.42.3.0/24"),
        // WireGuard sends to this one's private address.
        node(4, "c", "10.1.0.4", "10.42.4.0/24"),
    ];
    assert_eq!(known(&nodes, "n1", "10.1.0.2/32"), (HOP_REMOTE, true));
    assert_eq!(known(&nodes, "n1", "10.1.0.3/32"), (HOP_REMOTE, true));
    assert_eq!(known(&nodes, "n1", "10.1.0.4/32"), (HOP_REMOTE, false));
    assert_eq!(known(&nodes, "n1", "10.42.2.0/24"), (HOP_REMOTE, false));
    assert_eq!(known(&nodes, "n1", "10.1.0.1/32"), (HOP_LOCAL, false));
    assert!(!known(&nodes, "n3", "10.1.0.1/32").1, "only leaders hear WireGuard");
}

#[test]
fn an_address_is_inside_whoever_else_claims_it() {
    // As a pod CIDR of a location before, and of one behind; the own location counts first.
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

/// Location b has a stand-by at 192.0.2.3, location c offers a network, and there may be a VPN peer with one.
fn beside_a_stand_by(offered: &[&str], peers: &[&str], links: &HostLinks, own: &str) -> HostPlan {
    let mut nodes = [
        node(1, "a", "203.0.113.1", "10.42.1.0/24"),
        node(2, "b", "198.51.100.2", "10.42.2.0/24"),
        node(3, "b", "192.0.2.3", "10.42.3.0/24"),
        node(4, "c", "203.0.113.4", "10.42.4.0/24"),
        node(5, "a", "10.1.0.5", "10.42.5.0/24"),
    ];
    nodes.iter_mut().for_each(|node| node.signal = true);
    nodes[3].allowed_location_ips = offered.iter().map(|prefix| prefix.parse().unwrap()).collect();
    let office = Peer {
        name: "office".to_owned(),
        allowed_ips: peers.iter().map(|prefix| prefix.parse().unwrap()).collect(),
        endpoint: None,
        persistent_keepalive: 0,
        preshared_key: None,
        public_key: PublicKey([99; 32]),
        follows: false,
    };
    let peers = BTreeMap::from([(office.name.clone(), office)]);
    let settings = plans::settings();
    let mesh = Mesh::new(&nodes, &peers, settings.granularity, settings.subnet);
    // a5 is no gateway.
    let mesh = mesh.with_acting(if own == "n5" { 0 } else { 1 }, Arc::new(Acting::default()));
    let mesh = mesh.as_seen_from(own);
    let hops = HopIds::default().update(&mesh);
    plan::host_plan(&plans::inputs(&mesh, &settings, links, &hops)).unwrap()
}

/// Whether a route of ours leads there.
fn is_routed(plan: &HostPlan, address: &str) -> bool {
    let address: IpAddr = address.parse().unwrap();
    plan.net.routes.iter().any(|route| route.destination.contains(&address))
}

#[test]
fn a_prefix_that_holds_a_stand_bys_endpoint_does_not_lead_wireguard_into_itself() {
    let stand_by: IpNet = "192.0.2.3/32".parse().unwrap();
    for (offered, peers, prefix, owner) in [
        (&["192.0.2.0/24"][..], &[][..], "192.0.2.0/24", "location:c"),
        (&["192.0.2.3/32"], &[], "192.0.2.3/32", "location:c"),
        (&[], &["192.0.2.0/29"], "192.0.2.0/29", "peer/office"),
        (&[], &["192.0.2.3/32"], "192.0.2.3/32", "peer/office"),
    ] {
        let plan = beside_a_stand_by(offered, peers, &plans::links(), "n1");
        assert!(!is_routed(&plan, "192.0.2.3"), "{prefix}: {:?}", plan.net.routes);
        let whole: IpNet = prefix.parse().unwrap();
        let value = plan.tables.prefix[&stand_by];
        let flags = PREFIX_PODS_STEERED | PREFIX_NEVER_CLEAR | PREFIX_HOST_STEERED;
        assert_eq!(value.flags & flags, PREFIX_PODS_STEERED, "WireGuard's own packets leave by the uplink");
        if whole != stand_by {
            // All else of the prefix is as it was.
            for address in ["192.0.2.2", "192.0.2.4"] {
                assert!(is_routed(&plan, address), "{prefix}: {address}");
            }
            assert_eq!(value.hop, plan.tables.prefix[&whole].hop);
            assert!(plan.tables.prefix[&whole].flags & PREFIX_NEVER_CLEAR != 0);
            let parts = plan.net.routes.iter().filter(|route| whole.contains(&route.destination));
            assert!(parts.clone().count() > 1 && parts.clone().all(|route| route.closed), "{prefix}");
        }
        let said: Vec<_> = plan.left_out.iter().map(ToString::to_string).collect();
        assert!(
            said.len() == 1 && said[0].starts_with(&format!("{prefix} of {owner} holds 192.0.2.3, ")),
            "{said:?}"
        );
    }
}

#[test]
fn endpoints_are_left_out_where_wireguard_would_go_into_itself_alone() {
    let of = |links: &HostLinks, own: &str| {
        let plan = beside_a_stand_by(&["192.0.2.0/24"], &[], links, own);
        (is_routed(&plan, "192.0.2.3"), plan.left_out.len())
    };
    assert_eq!(of(&plans::links(), "n1"), (false, 1));
    assert_eq!(of(&plans::links(), "n5"), (true, 0), "no gateway, so it has no WireGuard");
    // A nearer route of the host's own leads there.
    let way = Elsewhere { on_link: true, ..Elsewhere::default() };
    let nearer = HostLinks { elsewhere: [("192.0.2.0/28".parse().unwrap(), way)].into(), ..plans::links() };
    assert_eq!(of(&nearer, "n1"), (true, 0));
    let whole = beside_a_stand_by(&["0.0.0.0/0"], &[], &plans::links(), "n1");
    assert!(is_routed(&whole, "192.0.2.3") && whole.left_out.is_empty(), "one of several default routes");
    let others = beside_a_stand_by(&["192.0.2.128/25"], &["10.9.0.0/16"], &plans::links(), "n1");
    assert!(others.left_out.is_empty());
    assert_eq!(others.tables.prefix[&"10.9.0.0/16".parse::<IpNet>().unwrap()].hop, HOP_REMOTE);
    assert_eq!(others.tables.prefix[&"192.0.2.128/25".parse::<IpNet>().unwrap()].hop, HOP_ACTING);
}
