//! What a host may send in cleartext, whatever its routes say; and where a route is omitted because
//! WireGuard itself sends there.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod given_up;

use crate::{generators, plans, trace};

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use generators::{encapsulate, granularity, healthy, healthy_nodes, settings, vpn_peers};
use ipnet::IpNet;
use kilo_common::{
    drop_reasons::DropReason,
    forwarding,
    maps::{
        HOP_LOCAL, HOP_NONE, HOP_REMOTE, MASQ_EXCLUDE, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR,
        PREFIX_PODS_STEERED, PREFIX_VIA_WIREGUARD,
    },
};
use kilo_core::{
    observed::{Elsewhere, HostLinks},
    plan::{
        self, HopIds, HostPlan, Inputs,
        model::{Packet, Route},
    },
    prefixes,
    settings::{Encapsulate, Granularity, Settings},
    topology::{Mesh, Node},
    wireguard::{EndpointHost, key::PublicKey},
};
use proptest::prelude::*;

/// Inputs that do not come from the mesh.
#[derive(Default)]
struct Facts {
    resolved: BTreeMap<String, IpAddr>,
    seen: BTreeMap<PublicKey, SocketAddr>,
    elsewhere: BTreeMap<IpNet, Elsewhere>,
}

fn plan_with(nodes: &[Node], own: &str, settings: &Settings, facts: Facts) -> HostPlan {
    plan_without(nodes, &[], own, settings, facts)
}

/// [`plan_with`], where some nodes are known but take no part.
fn plan_without(nodes: &[Node], lost: &[Node], own: &str, settings: &Settings, facts: Facts) -> HostPlan {
    let lost: Vec<Arc<Node>> = lost.iter().cloned().map(Arc::new).collect();
    let mesh = Mesh::new(nodes, &BTreeMap::new(), settings.granularity, settings.subnet).with_lost(&lost);
    plan_of_mesh(&mesh, own, settings, facts)
}

fn plan_of_mesh(mesh: &Mesh, own: &str, settings: &Settings, facts: Facts) -> HostPlan {
    let mesh = mesh.as_seen_from(own);
    let hops = HopIds::default().update(&mesh);
    let links = HostLinks { elsewhere: facts.elsewhere, ..plans::links() };
    let usual = plans::inputs(&mesh, settings, &links, &hops);
    plan::host_plan(&Inputs { resolved: &facts.resolved, seen: &facts.seen, ..usual }).unwrap()
}

fn plan_of(nodes: &[Node], own: &str, facts: Facts) -> HostPlan {
    plan_with(nodes, own, &settings(Granularity::Location, Encapsulate::Always), facts)
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// Flags of a prefix whose packets go into WireGuard, except WireGuard's own.
const STEERED: u32 = PREFIX_PODS_STEERED | PREFIX_HOST_STEERED;

/// Flags of a prefix about cleartext packets.
fn clear(plan: &HostPlan, prefix: &str) -> u32 {
    let bits = PREFIX_NEVER_CLEAR | STEERED | PREFIX_VIA_WIREGUARD;
    plan.tables.prefix[&net(prefix)].flags & bits
}

fn is_routed(plan: &HostPlan, prefix: &str) -> bool {
    plan.net.routes.iter().any(|route| route.destination == net(prefix))
}

fn pod(node: &Node) -> IpAddr {
    node.pod_cidrs[0].hosts().next().unwrap()
}

fn private(node: &Node) -> IpAddr {
    node.internal_ip.unwrap().addr()
}

/// Two locations with one leader each.
fn two() -> [Node; 2] {
    [healthy(1, 1, true, false, 24), healthy(2, 2, true, false, 24)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_encrypted_or_encapsulated_does_not_leave_in_clear_without_routes(
        nodes in healthy_nodes(),
        peers in vpn_peers(),
        granularity in granularity(),
        encapsulate in encapsulate(),
        offered in prop::collection::vec(prop::sample::select(&generators::OFFERED), 0..3),
    ) {
        let mut nodes = nodes;
        for (node, prefix) in nodes.values_mut().zip(&offered) {
            node.allowed_location_ips.push(net(prefix));
        }
        let settings = settings(granularity, encapsulate);
        let mesh = Mesh::new(nodes.values(), &peers, settings.granularity, settings.subnet);
        let world = trace::World::new(&mesh, &settings, nodes.values());
        for node in nodes.values() {
            let plan = &world.plans[&node.name];
            let mut without = plan.clone();
            (without.net.routes, without.net.addresses) = Default::default();
            let sources = [Some(pod(node)), node.internal_ip.map(|net| net.addr())];
            let first = |prefix: &IpNet| prefix.hosts().next().unwrap_or(prefix.addr());
            for dst in plan.tables.prefix.keys().map(first) {
                for src in sources.into_iter().flatten().filter(|src| src.is_ipv4() == dst.is_ipv4()) {
                    let packet = Packet { src, dst };
                    let (with, left) = (plan.route(packet), without.route(packet));
                    let carried =
                        matches!(with, Route::Wireguard | Route::Gateway { encapsulated: true, .. });
                    let flags = prefixes::longest(&plan.tables.prefix, dst).unwrap().flags;
                    // For the host itself, only what a default route would take.
                    let hosts = plan.tables.is_private(src) && flags & PREFIX_PODS_STEERED != 0;
                    prop_assert!(
                        !carried || hosts || left != Route::Other,
                        "{} {:?}: {:?}, without routes {:?}", node.name, packet, with, left
                    );
                    // A route exists exactly where cleartext is refused, except for default routes.
                    if let Some(route) = plan.net.routes.iter().find(|route| route.destination == dst.into()) {
                        prop_assert_eq!(route.closed, flags & PREFIX_NEVER_CLEAR != 0);
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_node_that_is_given_up_loses_its_way_and_no_other_does(
        nodes in healthy_nodes(),
        given_up in prop::collection::vec(prop::bool::weighted(0.3), 60),
        peers in vpn_peers(),
        granularity in granularity(),
        encapsulate in encapsulate(),
        local in any::<bool>(),
    ) {
        let settings = Settings { local, ..settings(granularity, encapsulate) };
        let (mut ready, mut lost) = (Vec::new(), Vec::new());
        for (node, gone) in nodes.values().zip(given_up) {
            if gone { lost.push(node.clone()) } else { ready.push(node.clone()) }
        }
        let gone: Vec<Arc<Node>> = lost.iter().cloned().map(Arc::new).collect();
        let mesh = Mesh::new(&ready, &peers, settings.granularity, settings.subnet);
        let (earlier, with) = (mesh.clone().with_gone(&gone), mesh.clone().with_lost(&gone));
        for own in &ready {
            let plan = |mesh: &Mesh| plan_of_mesh(mesh, &own.name, &settings, Facts::default());
            let (before, earlier, plan) = (plan(&mesh), plan(&earlier), plan(&with));
            prop_assert_eq!((&plan.wireguard, &plan.net.routes), (&before.wireguard, &before.net.routes));
            prop_assert_eq!((&plan.tables.hop, &plan.tables.node), (&before.tables.hop, &before.tables.node));
            for (prefix, value) in &before.tables.prefix {
                prop_assert_eq!(plan.tables.prefix.get(prefix), Some(value));
            }
            prop_assert!(before.net.unreachable.is_subset(&plan.net.unreachable));
            for node in &lost {
                // Of nodes that left earlier, only the pod CIDRs, with the same entries.
                for cidr in node.pod_cidrs.iter().map(IpNet::trunc) {
                    prop_assert_eq!(earlier.tables.prefix.get(&cidr), plan.tables.prefix.get(&cidr));
                }
                if let Some(private) = node.internal_ip.map(|net| IpNet::from(net.addr())) {
                    prop_assert_eq!(earlier.tables.prefix.get(&private), before.tables.prefix.get(&private));
                }
                let near = node.location == own.location && node.internal_ip.is_some() && own.internal_ip.is_some();
                for dst in [Some(pod(node)), node.internal_ip.map(|net| net.addr())].into_iter().flatten() {
                    let taken = prefixes::longest(&before.tables.prefix, dst).is_some();
                    let packet = Packet { src: pod(own), dst };
                    let same_family = packet.src.is_ipv4() == dst.is_ipv4();
                    if near || taken || !same_family {
                        continue;
                    }
                    prop_assert!(matches!(plan.route(packet), Route::Dropped(_)), "{} {:?}", own.name, packet);
                    prop_assert!(!plan.tables.masquerades(packet));
                }
            }
        }
    }
}

#[test]
fn a_missing_route_is_no_leak() {
    let nodes = [two(), [healthy(3, 1, false, false, 24), healthy(4, 2, false, false, 24)]].concat();
    for own in [0, 2] {
        let mut plan = plan_of(&nodes, &nodes[own].name, Facts::default());
        plan.net.routes = [].into_iter().collect();
        for src in [pod(&nodes[own]), private(&nodes[own])] {
            for dst in [pod(&nodes[1]), pod(&nodes[3]), private(&nodes[3]), pod(&nodes[2 - own])] {
                let dropped = Route::Dropped(DropReason::NotEncrypted);
                assert_eq!(plan.route(Packet { src, dst }), dropped, "{src} {dst}");
            }
        }
    }
}

#[test]
fn the_endpoint_is_the_one_wireguard_really_uses() {
    let via_wireguard = PREFIX_NEVER_CLEAR | PREFIX_VIA_WIREGUARD;
    let key = PublicKey([2; 32]);
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let (own, address) = ("node-001", "10.1.2.2/32");

    // It publishes its private address, and is seen at another one behind a NAT.
    let mut nodes = two();
    nodes[1].endpoint = "10.1.2.2:51820".parse().ok();
    let plan = plan_of(&nodes, own, Facts::default());
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (false, STEERED));
    nodes[1].persistent_keepalive = 25;
    let plan =
        plan_of(&nodes, own, Facts { seen: [(key, at("203.0.113.2:4500"))].into(), ..Facts::default() });
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (true, via_wireguard));
    nodes[0].discovered_endpoints = [(key, at("203.0.113.2:4500"))].into();
    let plan = plan_of(&nodes, own, Facts::default());
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (true, via_wireguard));
    // What this node's own device sees takes precedence.
    let plan = plan_of(&nodes, own, Facts { seen: [(key, at("10.1.2.2:51820"))].into(), ..Facts::default() });
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (false, STEERED));

    // It publishes another address, and is seen at its private one.
    let mut nodes = two();
    nodes[0].discovered_endpoints = [(key, at("10.1.2.2:51820"))].into();
    let plan = plan_of(&nodes, own, Facts::default());
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (true, via_wireguard), "it does not roam");
    nodes[1].persistent_keepalive = 25;
    let plan = plan_of(&nodes, own, Facts::default());
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (false, STEERED));

    // It publishes a name.
    let mut nodes = two();
    nodes[1].endpoint = "node.example.org:51820".parse().ok();
    let host = &nodes[1].endpoint.as_ref().unwrap().host;
    assert!(matches!(host, EndpointHost::Dns(_)));
    for (ip, routed) in [("10.1.2.2", false), ("203.0.113.2", true)] {
        let resolved = [("node.example.org".to_owned(), ip.parse().unwrap())].into();
        let plan = plan_of(&nodes, own, Facts { resolved, ..Facts::default() });
        assert_eq!(is_routed(&plan, address), routed, "{ip}");
    }

    // A node that does not lead sends everything to its leader.
    let mut nodes = [two().to_vec(), vec![healthy(3, 1, false, false, 24)]].concat();
    nodes[1].endpoint = "10.1.2.2:51820".parse().ok();
    let plan = plan_of(&nodes, "node-003", Facts::default());
    assert_eq!((is_routed(&plan, address), clear(&plan, address)), (true, PREFIX_NEVER_CLEAR));
}

#[test]
fn to_a_private_endpoint_wireguards_packets_alone_go_as_they_are() {
    let mut nodes = two();
    nodes[1].endpoint = "10.1.2.2:51820".parse().ok();
    let plan = plan_of(&nodes, "node-001", Facts::default());
    let dst = private(&nodes[1]);
    assert_eq!(clear(&plan, "10.1.2.2/32"), STEERED);
    // No pod here may send from it either.
    let owner = plan.tables.prefix.get(&net("10.1.2.2/32")).copied();
    assert!(forwarding::is_anothers(plan.tables.config.flags, owner));
    for src in [pod(&nodes[0]), private(&nodes[0]), "203.0.113.1".parse().unwrap()] {
        assert_eq!(plan.route(Packet { src, dst }), Route::Wireguard);
        assert!(!plan.tables.masquerades(Packet { src, dst }));
    }
    assert!(!is_routed(&plan, "10.1.2.2/32"), "WireGuard's own go by an uplink");
    assert!(plan.tables.steers_to_wireguard_by_source(), "what answers is taken from kilo0");
}

/// A node may have lost its key, or have another one than others know. Then only the API server can help,
/// and must be reachable without WireGuard.
#[test]
fn hosts_of_the_control_plane_and_others_speak_freely_also_while_one_is_given_up() {
    let mut nodes = two();
    nodes[1].endpoint = "10.1.2.2:51820".parse().ok();
    let settings = settings(Granularity::Location, Encapsulate::Always);
    for control_plane in [[true, false], [false, true], [true, true]] {
        for (node, control_plane) in nodes.iter_mut().zip(control_plane) {
            node.control_plane = control_plane;
        }
        let (src, dst) = (private(&nodes[0]), private(&nodes[1]));
        let leads = plan_of(&nodes, "node-001", Facts::default());
        let lost = plan_without(&nodes[..1], &nodes[1..], "node-001", &settings, Facts::default());
        for plan in [leads, lost] {
            assert_eq!(clear(&plan, "10.1.2.2/32"), PREFIX_PODS_STEERED);
            assert_eq!(plan.route(Packet { src, dst }), Route::Other);
            assert_ne!(plan.route(Packet { src: pod(&nodes[0]), dst }), Route::Other);
        }
    }
    // Another node of the location does not matter.
    nodes[1].control_plane = false;
    nodes[0].control_plane = false;
    let mut more = nodes.to_vec();
    more.push(Node { control_plane: true, ..healthy(4, 2, false, false, 24) });
    assert_eq!(clear(&plan_of(&more, "node-001", Facts::default()), "10.1.2.2/32"), STEERED);
}

#[test]
fn an_address_of_the_internet_is_the_hosts_to_speak_to() {
    let own = two();
    for (address, free) in [
        ("203.0.113.7", true),
        ("2001:db8::7", true),
        ("172.31.0.7", false),
        ("100.64.0.7", false),
        ("fd12::7", false),
        ("fc00::7", false),
    ] {
        let mut nodes = own.clone();
        let dst: IpAddr = address.parse().unwrap();
        nodes[1].internal_ip = Some(IpNet::from(dst));
        nodes[1].endpoint = Some(SocketAddr::new(dst, 51_820).into());
        let plan = plan_of(&nodes, "node-001", Facts::default());
        let wanted = if free { PREFIX_PODS_STEERED } else { STEERED };
        assert_eq!(clear(&plan, &IpNet::from(dst).to_string()), wanted, "{address}");
        let settings = settings(Granularity::Location, Encapsulate::Always);
        let plan = plan_without(&nodes[..1], &nodes[1..], "node-001", &settings, Facts::default());
        let wanted = if free { PREFIX_PODS_STEERED } else { PREFIX_NEVER_CLEAR };
        assert_eq!(clear(&plan, &IpNet::from(dst).to_string()), wanted, "{address}");
    }
}

#[test]
fn what_the_host_must_send_for_one_that_claims_an_address_is_not_refused_for_the_other() {
    let mut nodes = [two().to_vec(), vec![healthy(3, 3, true, false, 24)]].concat();
    nodes[1].endpoint = "10.1.2.2:51820".parse().ok();
    nodes[2].internal_ip = nodes[1].internal_ip;
    assert_eq!(clear(&plan_of(&nodes, "node-001", Facts::default()), "10.1.2.2/32") & PREFIX_NEVER_CLEAR, 0);
    nodes[2].allowed_location_ips = vec![net("10.1.2.2/32")];
    nodes[2].endpoint = "10.1.2.2:51820".parse().ok();
    assert_eq!(clear(&plan_of(&nodes, "node-001", Facts::default()), "10.1.2.2/32"), STEERED);
    nodes[2].control_plane = true;
    assert_eq!(clear(&plan_of(&nodes, "node-001", Facts::default()), "10.1.2.2/32"), PREFIX_PODS_STEERED);
}

#[test]
fn a_leader_speaks_from_an_address_whose_answers_come_by_the_tunnel() {
    let source = |nodes: &[Node]| {
        let plan = plan_of(nodes, "node-001", Facts::default());
        let route = *plan.net.routes.iter().find(|route| route.destination == net("10.42.2.0/24")).unwrap();
        route.source.unwrap().to_string()
    };
    let mut nodes = two();
    assert_eq!(source(&nodes), "10.1.1.1");
    nodes[1].discovered_endpoints = [(PublicKey([1; 32]), "10.1.1.1:51820".parse().unwrap())].into();
    assert_eq!(source(&nodes), "10.1.1.1", "others do not follow it there");
    nodes[0].persistent_keepalive = 25;
    assert_eq!(source(&nodes), "10.4.0.1", "others' WireGuard sends to its private address");
}

#[test]
fn networks_of_the_hosts_own_within_an_offered_prefix_stay_reachable() {
    let mut nodes = two();
    nodes[1].allowed_location_ips = vec![net("10.64.0.0/10"), net("192.168.7.0/24"), net("192.168.9.0/24")];
    let link = Elsewhere { on_link: true, wins: true };
    let with_metric = Elsewhere { on_link: true, wins: false };
    let gateway = Elsewhere { on_link: false, wins: true };
    let elsewhere = [
        ("10.64.9.0/24", link),
        ("10.65.0.0/16", gateway),
        ("192.168.0.0/16", link),
        ("192.168.7.0/24", link),
        ("192.168.9.0/24", with_metric),
        // Within a node's pods only on-link prefixes count.
        ("10.42.2.64/26", gateway),
        ("10.42.2.128/26", link),
        ("172.16.0.0/12", gateway),
    ];
    let elsewhere: BTreeMap<IpNet, Elsewhere> =
        elsewhere.into_iter().map(|(prefix, way)| (net(prefix), way)).collect();
    let plan = plan_of(&nodes, "node-001", Facts { elsewhere, ..Facts::default() });
    let goes = |dst: &str| {
        let packet = Packet { src: private(&nodes[0]), dst: dst.parse().unwrap() };
        plan.tables.uplink_egress(packet).map(|hop| hop.is_some())
    };
    let closed = Err(DropReason::NotEncrypted);
    for (dst, wanted) in [
        ("10.64.0.1", closed),
        ("10.64.9.1", Ok(false)),
        ("10.65.1.1", Ok(false)),
        ("10.66.1.1", closed),
        ("192.168.7.1", Ok(false)),
        ("192.168.8.1", Ok(false)),
        ("192.168.9.1", Ok(false)),
        ("10.42.2.65", closed),
        ("10.42.2.129", Ok(false)),
        ("10.42.2.1", closed),
        ("172.16.0.1", Ok(false)),
    ] {
        assert_eq!(goes(dst), wanted, "{dst}");
    }
    // The kernel would refuse a second route to the first, and prefer it to that of the LAN for the second.
    assert!(!is_routed(&plan, "192.168.7.0/24") && !is_routed(&plan, "192.168.9.0/24"));
    assert!(is_routed(&plan, "10.64.0.0/10"));
    // Packets from WireGuard are delivered as before.
    let value = plan.tables.prefix[&net("10.64.9.0/24")];
    assert_eq!(value.hop, HOP_REMOTE);
}

#[test]
fn a_default_route_of_others_is_for_pods_and_leaves_the_host_alone() {
    let mut nodes = two();
    nodes[1].allowed_location_ips = vec![net("0.0.0.0/0")];
    let mut plan = plan_of(&nodes, "node-001", Facts::default());
    let dst = "198.51.100.77".parse().unwrap();
    assert_eq!(plan.route(Packet { src: pod(&nodes[0]), dst }), Route::Wireguard);
    assert!(!plan.net.routes.iter().any(|route| route.closed && route.destination.prefix_len() == 0));
    plan.net.routes = [].into_iter().collect();
    assert_eq!(plan.route(Packet { src: pod(&nodes[0]), dst }), Route::Wireguard, "handed to kilo0");
    assert_eq!(plan.route(Packet { src: private(&nodes[0]), dst }), Route::Other);
    let public = "203.0.113.9".parse().unwrap();
    assert_eq!(plan.route(Packet { src: public, dst }), Route::Other, "an address of the host's");
}

#[test]
fn what_the_network_carries_by_itself_is_nobodys_to_refuse() {
    let nodes =
        [healthy(1, 1, true, false, 24), healthy(3, 1, false, false, 24), healthy(2, 2, true, false, 24)];
    let native = settings(Granularity::Location, Encapsulate::Never);
    let beside = Settings { local: false, ..settings(Granularity::Location, Encapsulate::Always) };
    for settings in [native, beside] {
        for own in ["node-001", "node-003"] {
            let plan = plan_with(&nodes, own, &settings, Facts::default());
            let (other, address) = if own == "node-001" {
                ("10.42.3.0/24", "10.1.1.3/32")
            } else {
                ("10.42.1.0/24", "10.1.1.1/32")
            };
            assert_eq!((clear(&plan, other), clear(&plan, address)), (0, 0), "{own}");
            assert_eq!(clear(&plan, "10.42.2.0/24"), PREFIX_NEVER_CLEAR, "{own}");
        }
    }
}

#[test]
fn what_comes_in_clear_is_forged_only_where_all_nodes_encapsulate() {
    let nodes =
        [healthy(1, 1, true, false, 24), healthy(3, 1, false, false, 32), healthy(2, 2, true, false, 24)];
    let address = |text: &str| text.parse().unwrap();
    let packet = Packet { src: address("10.42.1.7"), dst: address("10.42.3.7") };
    for (encapsulate, wanted) in [
        (Encapsulate::Always, Err(DropReason::ArrivedInClear)),
        // By its prefix length, the first node sends without outer header, the second does not.
        (Encapsulate::CrossSubnet, Ok(())),
        (Encapsulate::Never, Ok(())),
    ] {
        let plan =
            plan_with(&nodes, "node-003", &settings(Granularity::Location, encapsulate), Facts::default());
        assert_eq!(plan.tables.arrives_in_clear(packet), wanted, "{encapsulate:?}");
        let alone =
            plan_with(&nodes, "node-002", &settings(Granularity::Location, encapsulate), Facts::default());
        let to_alone = Packet { dst: address("10.42.2.7"), ..packet };
        assert_eq!(
            alone.tables.arrives_in_clear(to_alone),
            Err(DropReason::ArrivedInClear),
            "{encapsulate:?}"
        );
        let from_outside = Packet { src: address("10.1.1.77"), ..packet };
        assert_eq!(plan.tables.arrives_in_clear(from_outside), Ok(()), "{encapsulate:?}");
    }
}

#[test]
fn pods_the_cni_carries_do_not_go_by_a_default_route_of_others() {
    let mut nodes =
        [healthy(1, 1, true, false, 24), healthy(3, 1, false, false, 24), healthy(2, 2, true, false, 24)];
    nodes[2].allowed_location_ips = vec![net("0.0.0.0/0")];
    let beside = Settings { local: false, ..settings(Granularity::Location, Encapsulate::Always) };
    let plan = plan_with(&nodes, "node-003", &beside, Facts::default());
    let packet = Packet { src: pod(&nodes[1]), dst: pod(&nodes[0]) };
    assert_eq!(plan.route(packet), Route::Dropped(DropReason::NoPrefix));
    assert_eq!(plan.tables.uplink_egress(packet), Ok(None), "the CNI's own routes lead there");
}

#[test]
fn of_two_nodes_with_one_private_address_the_first_is_sent_to() {
    let mut nodes = vec![healthy(1, 1, true, false, 24), healthy(2, 1, false, false, 24)];
    nodes.extend([healthy(3, 1, false, false, 24), healthy(4, 2, true, false, 24)]);
    nodes[2].internal_ip = nodes[1].internal_ip;
    let plan = plan_of(&nodes, "node-001", Facts::default());
    let hops = HopIds::default().update(&plans::mesh(&nodes).as_seen_from("node-001"));
    assert_eq!(Some(plan.tables.prefix[&net("10.1.1.2/32")].hop), hops.get("node-002"));
    // Neither node sends the other's packets to itself.
    for own in ["node-002", "node-003"] {
        let plan = plan_of(&nodes, own, Facts::default());
        let there = Packet { src: pod(&nodes[0]), dst: private(&nodes[1]) };
        assert_eq!(plan.route(there), Route::Other, "{own}: its own address");
        let other = if own == "node-002" { &nodes[2] } else { &nodes[1] };
        let lost = plan.route(Packet { src: private(&nodes[1]), dst: pod(other) });
        assert_eq!(lost, Route::Dropped(DropReason::NoHop), "{own}");
    }
}

#[test]
fn what_is_for_own_pods_does_not_leave_before_there_are_any() {
    let nodes = [two(), [healthy(3, 1, false, false, 24), healthy(4, 2, false, false, 24)]].concat();
    let plan = plan_of(&nodes, "node-001", Facts::default());
    let own = net("10.42.1.0/24");
    assert_eq!(plan.tables.prefix[&own].hop, HOP_LOCAL);
    // The stack has no route to these pods, so the default route would take the packet.
    for src in [pod(&nodes[1]), pod(&nodes[2]), private(&nodes[1]), private(&nodes[0])] {
        let packet = Packet { src, dst: pod(&nodes[0]) };
        assert_eq!(plan.tables.uplink_egress(packet), Err(DropReason::NotEncrypted), "{src}");
    }
    assert!(plan.net.unreachable.iter().eq([&own]), "{:?}", plan.net.unreachable);
    assert_eq!(clear(&plan, "10.1.1.1/32"), 0, "the host's own address");
    // Another CNI may carry its pods in any way, and a link of the host's own wins.
    let beside = Settings { local: false, ..settings(Granularity::Location, Encapsulate::Always) };
    let plan = plan_with(&nodes, "node-001", &beside, Facts::default());
    assert_eq!((clear(&plan, "10.42.1.0/24"), plan.net.unreachable.len()), (0, 0));
    let elsewhere = [(own, Elsewhere { on_link: true, wins: true })].into();
    let plan = plan_of(&nodes, "node-001", Facts { elsewhere, ..Facts::default() });
    assert_eq!((clear(&plan, "10.42.1.0/24"), plan.net.unreachable.len()), (0, 0));
}
