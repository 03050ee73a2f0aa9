//! IPIP beside another CNI: the leader is reached through that CNI's overlay.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use kilo_common::maps::{HOP_REMOTE, PREFIX_ROUTE, PREFIX_VIA_WIREGUARD};
use kilo_core::{
    plan::{self, Hop, HopIds, HostPlan, Route},
    settings::{Compatibility, Settings, Tunnel},
    topology::Node,
    wireguard::key::PublicKey,
};
use kilo_host::net::{
    Link,
    links::{self, Address, HostQuery},
};

use crate::plans;

fn node(number: u8, location: &str) -> Node {
    Node {
        name: format!("n{number}"),
        endpoint: format!("192.0.2.{number}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: format!("10.1.0.{number}/24").parse().ok(),
        location: location.to_owned(),
        pod_cidrs: vec![format!("10.244.{number}.0/24").parse().unwrap()],
        cni_compatibility_ip: format!("10.244.{number}.77/32").parse().ok(),
        ..Node::default()
    }
}

fn link(index: u32, name: &str, mtu: u32, addresses: &[&str]) -> Link {
    let address = |text: &&str| Address {
        net: text.parse().unwrap(),
        global: true,
        secondary: false,
        deprecated: false,
        unusable: false,
    };
    Link {
        header: links::LinkHeader::Ethernet,
        index,
        name: name.to_owned(),
        kind: String::new(),
        mtu,
        queue: 0,
        up: true,
        loopback: false,
        controller: None,
        other_namespace: false,
        addresses: addresses.iter().map(address).collect(),
    }
}

/// The plan of node `own` in a mesh of three, where n1 leads the location of n1 and n2.
fn plan(own: &str, compatibility: Compatibility, tunnel: Tunnel) -> HostPlan {
    let nodes = [node(1, "a"), node(2, "a"), node(3, "b")];
    let settings = Settings { tunnel, local: false, cni: false, ..plans::settings() };
    let mesh = plans::mesh(&nodes);
    let mesh = mesh.as_seen_from(own);
    let own_node = nodes.iter().find(|node| node.name == own).unwrap();
    let number = &own[1..];
    let devices = [
        link(2, "eth0", 1500, &[&format!("10.1.0.{number}/24")]),
        link(5, "flannel.1", 1450, &[&format!("10.244.{number}.0/32")]),
        link(6, "cilium_host", 1430, &[&format!("10.244.{number}.77/32")]),
    ];
    let overlay = plan::overlay_addresses(&mesh, compatibility);
    let device = if compatibility == Compatibility::Flannel { 5 } else { 6 };
    let paths = overlay.values().map(|ip| (IpAddr::V4(*ip), device)).collect();
    let private = own_node.internal_ip.map(|net| net.addr());
    let query = HostQuery { kilo: 9, private, pod_cidrs: &own_node.pod_cidrs, ..HostQuery::default() };
    let mut found = links::host_links(&devices, &query, &paths);
    links::add_overlay(&mut found, &devices, own, overlay);
    let hops = HopIds::default().update(&mesh);
    plan::host_plan(&plans::inputs(&mesh, &settings, &found, &hops)).unwrap()
}

fn towards_leader(plan: &HostPlan) -> (Tunnel, u32, u32, IpAddr, IpAddr) {
    match *plan.tables.hop(HOP_REMOTE).unwrap() {
        Hop::Node { tunnel, ifindex, mtu, local, remote } => (tunnel, ifindex, mtu, local, remote),
        other => panic!("{other:?}"),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn ipip_to_the_leader_is_sent_to_its_address_in_the_overlay() {
    let flannel = plan("n2", Compatibility::Flannel, Tunnel::Ipip);
    assert_eq!(towards_leader(&flannel), (Tunnel::Ipip, 5, 1430, ip("10.1.0.2"), ip("10.244.1.0")));
    let cilium = plan("n2", Compatibility::Cilium, Tunnel::Ipip);
    assert_eq!(towards_leader(&cilium), (Tunnel::Ipip, 6, 1410, ip("10.1.0.2"), ip("10.244.1.77")));
}

#[test]
fn routes_through_the_leader_bear_the_mtu_of_the_way_to_it() {
    let cilium = plan("n2", Compatibility::Cilium, Tunnel::Ipip);
    let through = |route: &&Route| cilium.tables.prefix[&route.destination].hop == HOP_REMOTE;
    let mtus: Vec<_> = cilium.net.routes.iter().filter(through).map(|route| route.mtu).collect();
    assert!(!mtus.is_empty() && mtus.iter().all(|mtu| *mtu == Some(1410)), "{mtus:?}");
}

#[test]
fn what_a_leader_decrypts_for_a_member_goes_the_way_answers_come_and_no_route_changes() {
    let leader = plan("n1", Compatibility::Flannel, Tunnel::Vxlan);
    let pods: IpNet = "10.244.2.0/24".parse().unwrap();
    for prefix in [pods, ip("10.1.0.2").into()] {
        let value = leader.tables.prefix[&prefix];
        assert_eq!(value.flags & PREFIX_ROUTE, PREFIX_ROUTE, "{prefix}");
        assert!(matches!(leader.tables.hop[&value.hop], Hop::Node { .. }), "{prefix}");
        assert!(leader.net.routes.iter().all(|route| route.destination != prefix), "{prefix}");
    }
    let plain = plan("n1", Compatibility::None, Tunnel::Vxlan);
    assert_eq!(plain.tables.prefix[&pods].flags & PREFIX_ROUTE, 0, "without another CNI the stack routes");
    // Clouds that drop IPIP also drop it here.
    let ipip = plan("n1", Compatibility::Flannel, Tunnel::Ipip);
    let hop = ipip.tables.hop[&ipip.tables.prefix[&pods].hop];
    assert!(matches!(hop, Hop::Node { remote, ifindex: 5, .. } if remote == ip("10.244.2.0")), "{hop:?}");
}

#[test]
fn without_another_cni_or_with_vxlan_the_private_address_is_used() {
    for (compatibility, tunnel) in [
        (Compatibility::None, Tunnel::Ipip),
        (Compatibility::Flannel, Tunnel::Vxlan),
        (Compatibility::Cilium, Tunnel::Vxlan),
    ] {
        let plan = plan("n2", compatibility, tunnel);
        assert_eq!(towards_leader(&plan).4, ip("10.1.0.1"), "{compatibility:?}");
    }
    let alone = plan("n2", Compatibility::None, Tunnel::Ipip);
    assert_eq!(alone.tables.config.overlay_v4, [0; 4]);
    assert!(!alone.uplinks.contains(&5));
}

#[test]
fn the_leader_takes_what_comes_through_the_overlay_whatever_it_sends_itself() {
    for tunnel in [Tunnel::Ipip, Tunnel::Vxlan] {
        let leader = plan("n1", Compatibility::Flannel, tunnel);
        assert_eq!(Ipv4Addr::from(leader.tables.config.overlay_v4), Ipv4Addr::new(10, 244, 1, 0));
        assert!(
            leader.uplinks.contains(&5),
            "the program that unwraps sits on flannel.1: {:?}",
            leader.uplinks
        );
        let senders: Vec<_> = leader.tables.node.keys().copied().collect();
        assert_eq!(senders, [ip("10.1.0.2"), ip("10.244.2.0")], "its nodes, by both addresses");
        assert!(!leader.tables.device.contains_key(&5), "nothing is masqueraded on the overlay");
    }
}

#[test]
fn a_leader_knows_the_private_addresses_where_no_wireguard_can_be() {
    let via_wireguard = |own: &str| -> Vec<String> {
        let prefixes = plan(own, Compatibility::None, Tunnel::Ipip).tables.prefix;
        let flagged = prefixes.into_iter().filter(|(_, value)| value.flags & PREFIX_VIA_WIREGUARD != 0);
        flagged.map(|(prefix, _)| prefix.to_string()).collect()
    };
    // Without those of its own location, which are not reached through WireGuard, and without pod CIDRs.
    assert_eq!(via_wireguard("n1"), ["10.1.0.3/32", "10.4.0.2/32"]);
    assert_eq!(via_wireguard("n3"), ["10.1.0.1/32", "10.1.0.2/32", "10.4.0.1/32"]);
    assert!(via_wireguard("n2").is_empty(), "WireGuard has no peers there");
}
