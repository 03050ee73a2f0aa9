//! Properties of every mesh, whatever its nodes and peers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail as the test does")]

use crate::generators;
use crate::trace;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use generators::{
    OFFERED, encapsulate, granularity, healthy, healthy_nodes, rubbish_node, settings, vpn_peers, with_ipv6,
};
use ipnet::IpNet;
use kilo_common::maps::NodeValue;
use kilo_core::{
    objects::node,
    plan::{self, HopIds, MAIN_TABLE, model},
    settings::{Encapsulate, Granularity, Settings},
    topology::{self, Mesh, Node, Peer},
    wireguard::{conf, key::PublicKey},
};
use proptest::{prelude::*, test_runner::FileFailurePersistence};
use trace::{End, World, plan_of};

fn mesh(nodes: &BTreeMap<String, Node>, peers: &BTreeMap<String, Peer>, settings: &Settings) -> Mesh {
    Mesh::new(nodes.values(), peers, settings.granularity, settings.subnet)
}

fn pod(node: &Node) -> IpAddr {
    match node.pod_cidrs[0].network() {
        IpAddr::V4(ip) => IpAddr::from((u32::from(ip) + 9).to_be_bytes()),
        ip @ IpAddr::V6(_) => ip,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 192,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_object_makes_anything_panic(
        objects in prop::collection::vec(rubbish_node(), 1..6),
        peers in vpn_peers(),
        granularity in granularity(),
        encapsulate in encapsulate(),
    ) {
        let settings = settings(granularity, encapsulate);
        let nodes: BTreeMap<String, Node> = objects
            .iter()
            .map(|object| node::from_object(object, "region").0.node)
            .map(|node| (node.name.clone(), node))
            .collect();
        let ready: Vec<&Node> = nodes.values().filter(|node| topology::is_complete(node)).collect();
        let mesh = Mesh::new(ready.iter().copied(), &peers, granularity, settings.subnet);
        prop_assert_eq!(mesh.node_count(), ready.len());
        let _ = topology::dot(&mesh, &topology::TunnelPaths::default());
        for (own, segment) in mesh.segments.iter().enumerate() {
            let key = kilo_core::wireguard::key::SecretKey::from_bytes([1; 32]);
            let conf = kilo_core::showconf::of_node(&mesh, own, key, 1, 0);
            prop_assert_eq!(conf.to_ini().parse::<conf::Conf>(), Ok(conf));
            let _ = kilo_core::showconf::as_peer(segment);
        }
        let world = World::new(&mesh, &settings, ready.iter().copied());
        prop_assert_eq!(world.plans.len(), ready.len(), "every node that takes part has a plan");
        for (name, plan) in &world.plans {
            let mut claimed = BTreeSet::new();
            for peer in plan.wireguard.peers.values() {
                for prefix in &peer.allowed_ips {
                    prop_assert!(claimed.insert(*prefix), "{} has two claimants", prefix);
                }
            }
            for prefix in plan.tables.prefix.keys().chain(plan.tables.masq_src.keys()).chain(plan.tables.masq_dst.keys()) {
                prop_assert_eq!(*prefix, prefix.trunc(), "the trie knows no host bits");
            }
            // The subnet of WireGuard addresses is closed.
            let led = plan.tables.prefix.iter().filter(|(prefix, _)| *prefix != mesh.subnet);
            for value in led.map(|(_, value)| value.hop) {
                let remote_without_leader = value == kilo_common::maps::HOP_REMOTE;
                prop_assert!(plan.tables.hop.contains_key(&value) || remote_without_leader || shares_an_address(&mesh, name));
            }
        }
    }

    #[test]
    fn every_pod_reaches_every_pod(
        nodes in healthy_nodes(),
        granularity in granularity(),
        encapsulate in encapsulate(),
        six in any::<bool>(),
    ) {
        let nodes: BTreeMap<_, _> = if six {
            nodes.iter().map(|(name, node)| (name.clone(), with_ipv6(node))).collect()
        } else {
            nodes
        };
        let settings = settings(granularity, encapsulate);
        let mesh = mesh(&nodes, &BTreeMap::new(), &settings);
        let world = World::new(&mesh, &settings, nodes.values());
        for from in nodes.values() {
            for to in nodes.values() {
                let packet = model::Packet { src: pod(from), dst: pod(to) };
                prop_assert!(!world.plans[&from.name].tables.masquerades(packet));
                prop_assert_eq!(world.trace(&from.name, packet), End::Node(to.name.clone()), "{:?}", packet);
            }
        }
    }

    #[test]
    fn every_pod_reaches_every_private_address_of_other_locations_and_back(
        nodes in healthy_nodes(),
        encapsulate in encapsulate(),
    ) {
        let settings = settings(Granularity::Location, encapsulate);
        let mesh = mesh(&nodes, &BTreeMap::new(), &settings);
        let world = World::new(&mesh, &settings, nodes.values());
        for from in nodes.values() {
            for to in nodes.values().filter(|to| to.location != from.location) {
                let Some(private) = to.internal_ip.map(|net| net.addr()) else { continue };
                let there = model::Packet { src: pod(from), dst: private };
                let end = world.trace(&from.name, there);
                let led = encapsulate != Encapsulate::Always && is_left_beside(&mesh, &end, to);
                prop_assert!(led || end == End::Node(to.name.clone()), "{:?}: {:?}", there, end);
                let back = model::Packet { src: private, dst: pod(from) };
                prop_assert_eq!(world.trace(&to.name, back), End::Node(from.name.clone()), "{:?}", back);
            }
        }
    }

    #[test]
    fn every_host_reaches_every_pod_and_is_answered(
        nodes in healthy_nodes(),
        granularity in granularity(),
        encapsulate in encapsulate(),
    ) {
        let settings = settings(granularity, encapsulate);
        let mesh = mesh(&nodes, &BTreeMap::new(), &settings);
        let world = World::new(&mesh, &settings, nodes.values());
        for from in nodes.values() {
            for to in nodes.values().filter(|to| to.name != from.name) {
                let routes = &world.plans[&from.name].net.routes;
                let route = routes.iter().find(|route| route.table == MAIN_TABLE && route.destination.contains(&pod(to)));
                let source = route.and_then(|route| route.source);
                let Some(source) = source else {
                    prop_assert!(false, "{} has no source towards {}", from.name, to.name);
                    continue;
                };
                let there = model::Packet { src: source, dst: pod(to) };
                prop_assert_eq!(world.trace(&from.name, there), End::Node(to.name.clone()), "{:?}", there);
                let back = model::Packet { src: pod(to), dst: source };
                let end = world.trace(&to.name, back);
                let led = encapsulate != Encapsulate::Always && is_left_beside(&mesh, &end, from);
                prop_assert!(led || end == End::Node(from.name.clone()), "{:?}: {:?}", back, end);
            }
        }
    }

    #[test]
    fn masquerading_is_what_its_definition_says(
        nodes in healthy_nodes(),
        peers in vpn_peers(),
        offered in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(OFFERED.to_vec())), 0..5),
        cni in any::<bool>(),
    ) {
        let mut nodes = nodes;
        let names: Vec<String> = nodes.keys().cloned().collect();
        for (at, prefix) in offered {
            nodes.get_mut(at.get(&names)).unwrap().allowed_location_ips.push(prefix.parse().unwrap());
        }
        let settings = Settings { cni, ..settings(Granularity::Location, Encapsulate::Always) };
        let mesh = mesh(&nodes, &peers, &settings);
        let world = World::new(&mesh, &settings, nodes.values());
        let outside = ["8.8.8.8", "192.168.5.7", "192.168.9.9", "198.18.0.1", "10.43.7.1", "10.5.0.1", "172.31.5.1", "10.42.200.1"];
        let addresses: Vec<IpAddr> = outside.map(|addr| addr.parse().unwrap()).into_iter().chain(nodes.values().map(pod)).collect();
        for node in nodes.values().take(3) {
            let own = &mesh.segments[mesh.find(&node.name).unwrap().0];
            let of_peers: Vec<IpNet> = mesh.peers.iter().flat_map(|peer| peer.allowed_ips.clone()).collect();
            let known: Vec<IpNet> = mesh.segments.iter().flat_map(|segment| segment.allowed_ips.clone())
                .chain(of_peers.clone()).chain(settings.service_cidrs.clone()).collect();
            let always: Vec<IpNet> = node.pod_cidrs.iter().copied().filter(|_| cni).chain(of_peers).collect();
            // squat/kilo#496: within a location's offered prefix addresses are kept, where the prefix holds
            // nothing else.
            let exempt: Vec<IpNet> = own.allowed_location_ips.iter().copied()
                .filter(|prefix| !known.iter().any(|known| prefix.contains(known))).collect();
            let holds = |list: &[IpNet], addr: &IpAddr| list.iter().any(|prefix| prefix.contains(addr));
            for src in &addresses {
                for dst in &addresses {
                    let forced = holds(&own.allowed_location_ips, dst) && !holds(&exempt, src);
                    let wanted = (holds(&always, src) || forced) && !holds(&known, dst);
                    let packet = model::Packet { src: *src, dst: *dst };
                    prop_assert_eq!(world.plans[&node.name].tables.masquerades(packet), wanted, "{:?} at {}", packet, node.name);
                }
            }
        }
    }

    #[test]
    fn the_order_of_nodes_has_no_meaning(nodes in healthy_nodes(), peers in vpn_peers(), granularity in granularity()) {
        let settings = settings(granularity, Encapsulate::Always);
        let reversed = Mesh::new(nodes.values().rev(), &peers, granularity, settings.subnet);
        prop_assert_eq!(mesh(&nodes, &peers, &settings), reversed);
    }

    #[test]
    fn equal_inputs_give_equal_plans(nodes in healthy_nodes(), peers in vpn_peers(), granularity in granularity()) {
        let settings = settings(granularity, Encapsulate::CrossSubnet);
        let mesh = mesh(&nodes, &peers, &settings);
        for node in nodes.values() {
            let hops = HopIds::default().update(&mesh.as_seen_from(&node.name));
            let again = hops.update(&mesh.as_seen_from(&node.name));
            prop_assert_eq!(&hops, &again);
            prop_assert_eq!(plan_of(&mesh, &settings, node, &hops), plan_of(&mesh, &settings, node, &again));
        }
    }

    #[test]
    fn a_mesh_made_from_the_one_before_is_the_one_made_from_nothing(
        (before, after) in (healthy_nodes(), healthy_nodes()),
        kept in prop::collection::vec(any::<bool>(), 60),
        offering in prop::collection::vec((prop::bool::weighted(0.1), 0u8..3), 60),
        (peers, fewer) in (vpn_peers(), vpn_peers()),
        (granularity, next) in (granularity(), granularity()),
    ) {
        let named = |nodes: &BTreeMap<String, Node>| -> BTreeMap<String, Arc<Node>> {
            let offer = |(number, (name, node)): (usize, (&String, &Node))| {
                let (offers, net) = offering[number];
                let prefix = offers.then(|| format!("10.77.{net}.0/24").parse().unwrap());
                let node = Node { allowed_location_ips: prefix.into_iter().collect(), ..node.clone() };
                (name.clone(), node.into())
            };
            nodes.iter().enumerate().map(offer).collect()
        };
        let (before, mut after) = (named(&before), named(&after));
        // Most nodes stay the same.
        after.extend(before.iter().zip(kept).filter(|(_, kept)| *kept).map(|((name, node), _)| (name.clone(), node.clone())));
        let subnet: IpNet = "10.4.0.0/16".parse().unwrap();
        // The same nodes, elsewhere in memory.
        let copies: BTreeMap<_, Arc<Node>> =
            before.iter().map(|(name, node)| (name.clone(), Node::clone(node).into())).collect();
        let mut last = Mesh::default().next(before.values(), &peers, granularity, subnet);
        for (nodes, peers, granularity) in [
            (&before, &peers, granularity), (&copies, &peers, granularity), (&after, &fewer, granularity),
            (&before, &fewer, granularity), (&after, &peers, next), (&before, &peers, next),
        ] {
            let again = last.next(nodes.values(), peers, granularity, subnet);
            prop_assert_eq!(&again, &Mesh::new(nodes.values().map(|node| &**node), peers, granularity, subnet));
            for (name, node) in nodes {
                let (segment, member) = again.find(name).unwrap();
                prop_assert_eq!(&again.segments[segment].members[member].node, node);
            }
            let same = again.next(nodes.values(), peers, granularity, subnet);
            prop_assert!(same.segments.iter().zip(&again.segments).all(|(one, other)| Arc::ptr_eq(one, other)));
            last = again;
        }
    }

    #[test]
    fn a_node_that_joins_a_location_disturbs_no_other(
        nodes in healthy_nodes(),
        peers in vpn_peers(),
        index in 60u8..70,
        early in any::<bool>(),
    ) {
        let settings = settings(Granularity::Location, Encapsulate::Always);
        let before = mesh(&nodes, &peers, &settings);
        let joined = nodes.values().find(|node| node.internal_ip.is_some());
        let Some(location) = joined.map(|node| node.location.trim_start_matches('l').parse().unwrap()) else {
            return Ok(());
        };
        let mut new = healthy(index, location, false, false, 24);
        if early {
            // It sorts before all others, so ids by order would all move.
            new.name = format!("a-{}", new.name);
        }
        let mut more = nodes.clone();
        more.insert(new.name.clone(), new.clone());
        let after = mesh(&more, &peers, &settings);
        for (old, now) in before.segments.iter().zip(&after.segments) {
            prop_assert_eq!(&old.location, &now.location);
            prop_assert_eq!(old.wireguard_ip, now.wireguard_ip);
            if old.location != format!("location:l{location}") {
                prop_assert_eq!(old, now);
            }
        }
        for node in nodes.values() {
            let ids = HopIds::default().update(&before.as_seen_from(&node.name));
            let later = ids.update(&after.as_seen_from(&node.name));
            for other in nodes.keys() {
                prop_assert_eq!(ids.get(other), later.get(other), "{} as {} knows it", other, node.name);
            }
            prop_assert!(ids_are_sound(&later, &more), "{:?}", later);
            let gone = later.update(&before.as_seen_from(&node.name));
            prop_assert_eq!(gone, ids);
        }
    }

    #[test]
    fn a_restarted_agent_finds_the_hop_ids_of_the_one_before(
        nodes in healthy_nodes(),
        leaves in any::<prop::sample::Index>(),
        foreign in prop_oneof![0u32..8, any::<u32>()],
    ) {
        let settings = settings(Granularity::Location, Encapsulate::Always);
        let first = mesh(&nodes, &BTreeMap::new(), &settings);
        let mut fewer = nodes.clone();
        let names: Vec<&String> = nodes.keys().collect();
        fewer.remove(*leaves.get(&names));
        let second = mesh(&fewer, &BTreeMap::new(), &settings);
        for node in fewer.values() {
            let ids = HopIds::default().update(&first.as_seen_from(&node.name));
            let plan = plan_of(&first, &settings, node, &ids).unwrap();
            let adopted = HopIds::adopt(&plan.tables.node).update(&second.as_seen_from(&node.name));
            prop_assert_eq!(adopted, ids.update(&second.as_seen_from(&node.name)));
            // Any other content of the map does no harm.
            let mut senders = plan.tables.node.clone();
            senders.values_mut().for_each(|value| *value = NodeValue { hop: foreign, flags: 7, ..*value });
            let ids = HopIds::adopt(&senders).update(&second.as_seen_from(&node.name));
            prop_assert!(ids_are_sound(&ids, &fewer), "{:?}", ids);
        }
    }

    #[test]
    fn only_hop_entries_change_on_a_member_when_the_leader_does(
        nodes in healthy_nodes(),
        chosen in any::<prop::sample::Index>(),
    ) {
        let settings = settings(Granularity::Location, Encapsulate::Always);
        let before = mesh(&nodes, &BTreeMap::new(), &settings);
        let names: Vec<&String> = nodes.keys().collect();
        let mut led = nodes.clone();
        for node in led.values_mut() {
            node.leader = node.name == **chosen.get(&names);
        }
        let after = mesh(&led, &BTreeMap::new(), &settings);
        for node in nodes.values().filter(|node| !before.leads(&node.name) && !after.leads(&node.name)) {
            let hops = HopIds::default().update(&before.as_seen_from(&node.name));
            let old = plan_of(&before, &settings, node, &hops).unwrap();
            let new = plan_of(&after, &settings, node, &hops).unwrap();
            prop_assert_eq!(old.net, new.net);
            prop_assert_eq!(old.wireguard, new.wireguard);
            let own = before.segments[before.find(&node.name).unwrap().0].wireguard_ip.map(IpNet::from);
            let without_wireguard_ip = |plan: &plan::Tables| {
                plan.prefix.iter().filter(|(prefix, _)| Some(*prefix) != own).copied().collect::<Vec<_>>()
            };
            prop_assert_eq!(without_wireguard_ip(&old.tables), without_wireguard_ip(&new.tables));
        }
    }
}

/// Every node has its own id, and none of the fixed ones.
fn ids_are_sound(ids: &HopIds, nodes: &BTreeMap<String, Node>) -> bool {
    let taken: Vec<u32> = nodes.keys().filter_map(|name| ids.get(name)).collect();
    let unique: BTreeSet<u32> = taken.iter().copied().collect();
    unique.len() == taken.len() && unique.first().is_none_or(|id| *id >= kilo_common::maps::HOP_FIRST_NODE)
}

/// Whether a packet was left to the routes of a node in the same location, which complete native routing.
fn is_left_beside(mesh: &Mesh, end: &End, node: &Node) -> bool {
    let mesh = mesh.as_seen_from(&node.name);
    let segment = |name: &str| mesh.find(name).map(|(segment, _)| segment);
    matches!(end, End::Left(at) if segment(at) == segment(&node.name))
}

#[test]
fn a_cross_mesh_joins_all_nodes_of_other_locations_and_none_of_the_own() {
    let settings = settings(Granularity::Cross, Encapsulate::Always);
    let nodes: BTreeMap<String, Node> = (1..=5)
        .map(|index| {
            let node = healthy(index, u8::from(index > 3), false, false, 24);
            (node.name.clone(), node)
        })
        .collect();
    let mesh = mesh(&nodes, &BTreeMap::new(), &settings);
    for own in nodes.values() {
        let plan =
            plan_of(&mesh, &settings, own, &HopIds::default().update(&mesh.as_seen_from(&own.name))).unwrap();
        let peers: BTreeSet<_> = plan.wireguard.peers.keys().copied().collect();
        let far = nodes.values().filter(|node| node.location != own.location);
        assert_eq!(peers, far.filter_map(|node| node.key).collect(), "{}", own.name);
        let near = nodes.values().filter(|node| node.location == own.location && node.name != own.name);
        let hops = plan.tables.hop.values().filter(|hop| matches!(hop, plan::Hop::Node { .. }));
        assert_eq!(hops.count(), near.count(), "{}: the others of the location are steered to", own.name);
    }
}

/// Whether another node of its location has the same private address, or one of another family.
fn shares_an_address(mesh: &Mesh, node: &str) -> bool {
    let mesh = mesh.as_seen_from(node);
    let (segment, own) = mesh.find(node).unwrap();
    let members = &mesh.segments[segment].members;
    let others = members.iter().enumerate().filter(|(index, _)| *index != own);
    let own = members[own].private_ip();
    others.into_iter().any(|(_, member)| {
        member.private_ip() == own || member.private_ip().map(|ip| ip.is_ipv4()) != own.map(|ip| ip.is_ipv4())
    })
}

#[test]
fn two_nodes_with_one_key_leave_the_first_as_it_is() {
    let settings = settings(Granularity::Location, Encapsulate::Always);
    let mut nodes: BTreeMap<String, Node> =
        [healthy(1, 0, false, false, 24), healthy(2, 1, false, false, 24), healthy(3, 2, false, false, 24)]
            .map(|node| (node.name.clone(), node))
            .into();
    nodes.get_mut("node-003").unwrap().key = Some(PublicKey([2; 32]));
    let mesh = mesh(&nodes, &BTreeMap::new(), &settings);
    let world = World::new(&mesh, &settings, nodes.values());
    let plan = &world.plans["node-001"].wireguard;
    let peer = &plan.peers[&PublicKey([2; 32])];
    assert_eq!(peer.endpoint, "198.51.100.2:51820".parse().ok());
    assert!(!peer.allowed_ips.contains(&"10.42.3.0/24".parse().unwrap()));
    let twin = &world.plans["node-002"].wireguard;
    assert!(!twin.peers.contains_key(&PublicKey([2; 32])), "the device refuses its own key");
}

#[test]
fn ten_thousand_nodes_are_planned_in_reasonable_time() {
    let node = |index: u32, location: u32| {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&(index + 1).to_be_bytes());
        let [_, high, mid, low] = (index + 1).to_be_bytes();
        Node {
            name: format!("node-{index:05}"),
            endpoint: Some(std::net::SocketAddr::from(([198, high, mid, low], 51_820)).into()),
            key: Some(PublicKey(key)),
            internal_ip: IpNet::new([10, 200 + high, mid, low].into(), 16).ok(),
            location: format!("l{location}"),
            pod_cidrs: vec![IpNet::new([100, 64 + (index >> 8) as u8, index as u8, 0].into(), 24).unwrap()],
            allowed_location_ips: if index.is_multiple_of(10) {
                vec![IpNet::new([172, 16 + high, mid, low].into(), 32).unwrap()]
            } else {
                Vec::new()
            },
            ..Node::default()
        }
    };
    for (granularity, locations) in [(Granularity::Location, 20), (Granularity::Full, 1)] {
        let settings = settings(granularity, Encapsulate::Always);
        let nodes: BTreeMap<String, Node> =
            (0..10_000).map(|index| node(index, index % locations)).map(|n| (n.name.clone(), n)).collect();
        let started = std::time::Instant::now();
        let mesh = mesh(&nodes, &BTreeMap::new(), &settings);
        let meshed = started.elapsed();
        let hops = HopIds::default().update(&mesh.as_seen_from("node-00000"));
        let plan = plan_of(&mesh, &settings, &nodes["node-00000"], &hops).unwrap();
        println!(
            "{granularity:?}: mesh {meshed:?}, mesh and plan {:?}, {} prefixes, {} routes",
            started.elapsed(),
            plan.tables.prefix.len(),
            plan.net.routes.len()
        );
        assert_eq!(mesh.node_count(), 10_000);
        // The goal is 100 ms in an optimised build on an idle machine. Work on pairs of nodes would take
        // minutes even so.
        assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
    }
}
