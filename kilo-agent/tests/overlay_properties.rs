//! `--compatibility`: what the overlay of another CNI changes in the plan.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use kilo_agent::{
    net::links::{Address, HostQuery, Link, add_overlay, cilium_address, host_links},
    plan::{Cni, Hop, HopIds, HostLinks, HostPlan, Inputs, Overlay, host_plan, model::Packet},
    topology::{Encapsulate, Granularity, Mesh, Node, Settings, Tunnel},
    wireguard::key::PublicKey,
};
use kilo_common::{
    maps::{HOP_REMOTE, NODE_LEADER},
    verdict::Action,
};
use proptest::prelude::*;

const KILO: u32 = 9;
const PRIVATE: u32 = 2;
const OVERLAY: u32 = 7;

fn settings(tunnel: Tunnel) -> Settings {
    Settings {
        granularity: Granularity::Location,
        encapsulate: Encapsulate::Always,
        tunnel,
        local: false,
        cni: false,
        subnet: "10.4.0.0/16".parse().unwrap(),
        service_cidrs: Vec::new(),
        port: 51_820,
    }
}

fn node(number: u8, location: &str) -> Node {
    Node {
        name: format!("n{number}"),
        endpoint: format!("198.51.100.{number}:51820").parse().ok(),
        key: Some(PublicKey([number; 32])),
        internal_ip: format!("10.1.0.{number}/24").parse().ok(),
        location: location.to_owned(),
        pod_cidrs: vec![
            format!("fd00:42:{number}::/64").parse().unwrap(),
            format!("10.42.{number}.0/24").parse().unwrap(),
        ],
        cni_compatibility_ip: format!("10.50.{number}.7/32").parse().ok(),
        ..Node::default()
    }
}

/// n1 leads n2 and n3; n4 is elsewhere.
fn nodes() -> Vec<Node> {
    vec![node(1, "here"), node(2, "here"), node(3, "here"), node(4, "there")]
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn links(cni: Option<Cni>) -> HostLinks {
    let overlay = |cni| Overlay { cni, interfaces: BTreeSet::from([OVERLAY]) };
    HostLinks {
        kilo: KILO,
        private: Some(PRIVATE),
        uplinks: BTreeMap::from([(PRIVATE, Ipv4Addr::new(10, 1, 0, 99))]),
        mtus: BTreeMap::from([(PRIVATE, 1500), (OVERLAY, 1450)]),
        towards: BTreeMap::from([(ip("10.42.1.0"), OVERLAY), (ip("10.50.1.7"), OVERLAY)]),
        overlay: cni.map(overlay),
        ..HostLinks::default()
    }
}

fn plan_with(nodes: &[Node], name: &str, settings: &Settings, links: &HostLinks) -> HostPlan {
    let mesh = Mesh::new(nodes, &BTreeMap::new(), settings.granularity, settings.subnet);
    let hops = HopIds::default().update(&mesh, name);
    let (resolved, seen) = (BTreeMap::new(), BTreeMap::new());
    host_plan(&Inputs {
        mesh: &mesh,
        settings,
        node: name,
        links,
        hops: &hops,
        resolved: &resolved,
        seen: &seen,
        persistent_keepalive: 0,
        masquerade: true,
        mtu: 1420,
    })
    .unwrap()
}

fn plan(nodes: &[Node], name: &str, tunnel: Tunnel, cni: Option<Cni>) -> HostPlan {
    plan_with(nodes, name, &settings(tunnel), &links(cni))
}

fn private_hop(tunnel: Tunnel, own: &str, mtu: u32) -> Hop {
    Hop::Node { tunnel, ifindex: PRIVATE, mtu, local: ip(own), remote: ip("10.1.0.1") }
}

#[test]
fn ipip_to_the_leader_goes_between_overlay_addresses_by_the_overlay() {
    for (cni, own, leader) in
        [(Cni::Flannel, "10.42.2.0", "10.42.1.0"), (Cni::Cilium, "10.50.2.7", "10.50.1.7")]
    {
        let plan = plan(&nodes(), "n2", Tunnel::Ipip, Some(cni));
        let (local, remote) = (ip(own), ip(leader));
        let hop = Hop::Node { tunnel: Tunnel::Ipip, ifindex: OVERLAY, mtu: 1430, local, remote };
        assert_eq!(plan.tables.hop[&HOP_REMOTE], hop);
        assert_eq!(IpAddr::from(plan.tables.config.overlay_v4), local);
        assert_eq!(plan.uplinks, BTreeSet::from([PRIVATE, OVERLAY]));
        assert!(!plan.tables.device.contains_key(&OVERLAY), "nothing is masqueraded there");
        let to_others = plan.tables.hop.values().filter_map(|hop| match hop {
            Hop::Node { remote, .. } => Some(*remote),
            _ => None,
        });
        assert_eq!(to_others.collect::<BTreeSet<_>>(), BTreeSet::from([remote, ip("10.1.0.3")]));
    }
}

#[test]
fn the_leader_takes_packets_sent_by_the_overlay_and_by_the_network() {
    for (cni, own, member) in
        [(Cni::Flannel, "10.42.1.0", "10.42.2.0"), (Cni::Cilium, "10.50.1.7", "10.50.2.7")]
    {
        // Whatever it sends itself.
        for tunnel in [Tunnel::Ipip, Tunnel::Vxlan] {
            let tables = plan(&nodes(), "n1", tunnel, Some(cni)).tables;
            assert!(tables.is_private(ip(own)));
            let inner = Packet { src: ip("10.42.2.5"), dst: ip("10.42.4.5") };
            for sender in [member, "10.1.0.2"] {
                assert_eq!(tables.lan_ingress(ip(sender), inner), Ok((Action::Transit, None)), "{sender}");
            }
            let other = if cni == Cni::Flannel { "10.42.3.0" } else { "10.50.3.7" };
            assert!(tables.lan_ingress(ip(other), inner).is_err(), "another node's pod");
            assert!(tables.lan_ingress(ip("10.42.4.0"), inner).is_err(), "another location's overlay");
        }
        let tables = plan(&nodes(), "n3", Tunnel::Ipip, Some(cni)).tables;
        assert_eq!(tables.node[&ip(own)].flags, NODE_LEADER);
    }
}

#[test]
fn private_addresses_are_used_where_the_overlay_is_not_the_way() {
    let vxlan = plan(&nodes(), "n2", Tunnel::Vxlan, Some(Cni::Flannel));
    assert_eq!(vxlan.tables.hop[&HOP_REMOTE], private_hop(Tunnel::Vxlan, "10.1.0.2", 1450));
    let expected = private_hop(Tunnel::Ipip, "10.1.0.2", 1480);
    assert_eq!(plan(&nodes(), "n2", Tunnel::Ipip, None).tables.hop[&HOP_REMOTE], expected);
    // The leader or this node has not published its address yet.
    for unknown in [0, 1] {
        let mut nodes = nodes();
        nodes[unknown].cni_compatibility_ip = None;
        assert_eq!(plan(&nodes, "n2", Tunnel::Ipip, Some(Cni::Cilium)).tables.hop[&HOP_REMOTE], expected);
    }
    // The route to the leader's overlay address does not lead into the overlay.
    let links = HostLinks { towards: BTreeMap::new(), ..links(Some(Cni::Flannel)) };
    let plan = plan_with(&nodes(), "n2", &settings(Tunnel::Ipip), &links);
    assert_eq!(plan.tables.hop[&HOP_REMOTE], expected);
}

#[test]
fn what_a_node_publishes_takes_no_private_address_from_another() {
    let mut nodes = nodes();
    nodes[1].cni_compatibility_ip = "10.1.0.3/32".parse().ok();
    let without = plan(&nodes, "n1", Tunnel::Ipip, None).tables.node;
    let with = plan(&nodes, "n1", Tunnel::Ipip, Some(Cni::Cilium)).tables.node;
    assert_eq!(with[&ip("10.1.0.3")], without[&ip("10.1.0.3")]);
}

#[test]
fn the_overlays_interfaces_are_found_and_are_no_uplinks() {
    let link = |index, name: &str, address: &str| Link {
        index,
        name: name.to_owned(),
        kind: "veth".to_owned(),
        mtu: 1450,
        up: true,
        addresses: address
            .parse()
            .map(|net| vec![Address { net, global: true, secondary: false, unusable: false }])
            .unwrap_or_default(),
        ..Link::default()
    };
    let all = [
        link(2, "eth0", "10.1.0.2/24"),
        link(3, "cilium_host", "10.50.2.7/32"),
        link(4, "cilium_vxlan", ""),
        link(5, "flannel.1", "10.42.2.0/32"),
        link(6, "lxc1", ""),
        link(KILO, "kilo0", ""),
    ];
    assert_eq!(cilium_address(&all), Some(Ipv4Addr::new(10, 50, 2, 7)));
    assert_eq!(cilium_address(&all[..1]), None);
    let pods = ["10.42.2.0/24".parse().unwrap()];
    let query = HostQuery { kilo: KILO, private: Some(ip("10.1.0.2")), pod_cidrs: &pods };
    let found = |cni, own: &str, towards| {
        let mut host = host_links(&all, &query, &BTreeMap::new());
        add_overlay(&mut host, &all, cni, own.parse().ok(), towards);
        assert_eq!(host.uplinks.keys().collect::<Vec<_>>(), [&2]);
        let interfaces = host.overlay.unwrap().interfaces;
        assert!(interfaces.iter().all(|index| host.mtus[index] == 1450));
        interfaces.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(found(Cni::Cilium, "10.50.2.7", Some(3)), [3, 4]);
    assert_eq!(found(Cni::Flannel, "10.42.2.0", Some(5)), [5]);
    assert_eq!(found(Cni::Flannel, "", Some(6)), [6], "wherever the route leads");
    assert_eq!(found(Cni::Flannel, "", Some(KILO)), Vec::<u32>::new(), "never our own device");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever each node sends and knows: what a member steers to the leader,
    /// the leader takes; and beside the hop to the leader, senders and
    /// interfaces, a plan is the one without an overlay.
    #[test]
    fn what_members_steer_is_taken_and_nothing_else_changes(
        flannel: bool,
        tunnels in prop::array::uniform2(prop::sample::select(vec![Tunnel::Ipip, Tunnel::Vxlan, Tunnel::None])),
        published in prop::array::uniform4(any::<bool>()),
        reached: bool,
        asks in 0usize..3,
    ) {
        let cni = Some(if flannel { Cni::Flannel } else { Cni::Cilium });
        let mut nodes = nodes();
        nodes[asks].leader = true;
        for (node, published) in nodes.iter_mut().zip(published) {
            node.cni_compatibility_ip = node.cni_compatibility_ip.filter(|_| published);
        }
        let mut links = links(cni);
        links.towards = if reached {
            (1..4).flat_map(|n| [format!("10.42.{n}.0"), format!("10.50.{n}.7")])
                .map(|address| (ip(&address), OVERLAY)).collect()
        } else {
            BTreeMap::new()
        };
        let leader = plan_with(&nodes, &nodes[asks].name, &settings(tunnels[0]), &links);
        for (number, member) in nodes.iter().enumerate().take(3).filter(|(number, _)| *number != asks) {
            let settings = settings(tunnels[1]);
            let mut plan = plan_with(&nodes, &member.name, &settings, &links);
            let Hop::Node { local, remote, .. } = plan.tables.hop[&HOP_REMOTE] else { panic!() };
            prop_assert!(leader.tables.is_private(remote), "{}", remote);
            let inner = Packet { src: ip(&format!("10.42.{}.5", number + 1)), dst: ip("10.42.4.5") };
            prop_assert_eq!(leader.tables.lan_ingress(local, inner), Ok((Action::Transit, None)));

            let without = plan_with(&nodes, &member.name, &settings, &HostLinks { overlay: None, ..links.clone() });
            for (id, hop) in &without.tables.hop {
                if *hop == without.tables.hop[&HOP_REMOTE] {
                    plan.tables.hop.insert(*id, *hop);
                }
            }
            prop_assert!(plan.uplinks.is_superset(&without.uplinks));
            prop_assert!(without.tables.node.iter().all(|(ip, node)| plan.tables.node[ip] == *node));
            plan.tables.node.clone_from(&without.tables.node);
            plan.tables.config.overlay_v4 = [0; 4];
            plan.uplinks.clone_from(&without.uplinks);
            // A route's MTU follows its hop's.
            let unsized_routes = |plan: &HostPlan| -> Vec<_> {
                plan.net.routes.iter().map(|route| (route.destination, route.table, route.source)).collect()
            };
            prop_assert_eq!(unsized_routes(&plan), unsized_routes(&without));
            plan.net.clone_from(&without.net);
            prop_assert_eq!(plan, without);
        }
    }
}
