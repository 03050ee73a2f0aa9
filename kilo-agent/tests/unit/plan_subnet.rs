//! The subnet of WireGuard addresses belongs to the mesh alone, including addresses that this node has not
//! heard of yet.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use crate::{generators, plans};

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use generators::{encapsulate, granularity, healthy, healthy_nodes, settings, vpn_peers};
use ipnet::IpNet;
use kilo_common::{
    drop_reasons::DropReason,
    maps::{HOP_NONE, PREFIX_NEVER_CLEAR},
};
use kilo_core::{
    observed::{Elsewhere, HostLinks},
    plan::{self, HopIds, HostPlan, model::Packet},
    settings::{Encapsulate, Granularity, Settings},
    topology::{Mesh, Node, Peer},
};
use proptest::prelude::*;

const CLOSED: Result<Option<plan::Hop>, DropReason> = Err(DropReason::NotEncrypted);

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn plan_with(
    nodes: &[Node],
    peers: &BTreeMap<String, Peer>,
    own: &str,
    settings: &Settings,
    elsewhere: &[(&str, Elsewhere)],
) -> HostPlan {
    let mesh = Mesh::new(nodes, peers, settings.granularity, settings.subnet);
    let mesh = mesh.as_seen_from(own);
    let hops = HopIds::default().update(&mesh);
    let elsewhere = elsewhere.iter().map(|(prefix, way)| (net(prefix), *way)).collect();
    let links = HostLinks { elsewhere, ..plans::links() };
    plan::host_plan(&plans::inputs(&mesh, settings, &links, &hops)).unwrap()
}

fn plan_of(nodes: &[Node], own: &str, elsewhere: &[(&str, Elsewhere)]) -> HostPlan {
    let settings = settings(Granularity::Location, Encapsulate::Always);
    plan_with(nodes, &BTreeMap::new(), own, &settings, elsewhere)
}

fn sent(plan: &HostPlan, src: IpAddr, dst: &str) -> Result<Option<plan::Hop>, DropReason> {
    plan.tables.uplink_egress(Packet { src, dst: dst.parse().unwrap() })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn nothing_for_the_subnet_leaves_in_clear_with_any_nodes_known(
        nodes in healthy_nodes(),
        peers in vpn_peers(),
        granularity in granularity(),
        encapsulate in encapsulate(),
        local in any::<bool>(),
        own in any::<prop::sample::Index>(),
        host in any::<u16>(),
        known in 0usize..12,
    ) {
        let settings = Settings { local, ..settings(granularity, encapsulate) };
        let all: Vec<Node> = nodes.values().cloned().collect();
        let own = &all[own.index(all.len())];
        // Nodes are heard of one after the other; this one knows itself first.
        let others = all.iter().filter(|node| node.name != own.name).take(known);
        let heard: Vec<Node> = [own].into_iter().chain(others).cloned().collect();
        let peers = if known == 0 { BTreeMap::new() } else { peers };
        let mesh = Mesh::new(&all, &BTreeMap::new(), granularity, settings.subnet);
        let plan = plan_with(&heard, &peers, &own.name, &settings, &[]);
        let given = mesh.segments.iter().filter_map(|segment| segment.wireguard_ip);
        let [high, low] = host.to_be_bytes();
        // Within the location, the network carries these packets without an outer header.
        let heard_mesh = Mesh::new(&heard, &BTreeMap::new(), granularity, settings.subnet);
        let near: BTreeSet<IpAddr> = [&mesh, &heard_mesh]
            .into_iter()
            .flat_map(|mesh| &mesh.segments)
            .filter(|segment| segment.members.iter().any(|member| member.node.location == own.location))
            .filter_map(|segment| segment.wireguard_ip)
            .collect();
        let tunnelled = |dst: &IpAddr| encapsulate == Encapsulate::Always || !near.contains(dst);
        for dst in given.chain([IpAddr::from([10, 4, high, low])]).filter(tunnelled) {
            for src in [Some(own.pod_cidrs[0].addr()), own.internal_ip.map(|net| net.addr()), Some([192, 0, 2, 9].into())] {
                let Some(src) = src else { continue };
                prop_assert_eq!(plan.tables.uplink_egress(Packet { src, dst }), CLOSED, "{} to {}", src, dst);
            }
        }
        // The subnet has no `unreachable` route.
        prop_assert!(!plan.net.unreachable.contains(&settings.subnet));
        prop_assert_ne!(plan.tables.prefix[&settings.subnet].flags & PREFIX_NEVER_CLEAR, 0);
    }
}

#[test]
fn a_node_that_knows_only_itself_keeps_in_what_is_for_its_own_address_too() {
    // A lone node has the first address, which becomes another location's as soon as it hears of that one.
    let nodes = [healthy(1, 1, true, false, 24)];
    let plan = plan_of(&nodes, "node-001", &[]);
    for dst in ["10.4.0.1", "10.4.0.2", "10.4.255.254"] {
        for src in ["10.42.1.1", "10.1.1.1", "10.1.1.2", "10.42.2.1", "192.0.2.1"] {
            assert_eq!(sent(&plan, src.parse().unwrap(), dst), CLOSED, "{src} to {dst}");
        }
    }
    assert!(plan.net.unreachable.iter().eq([&net("10.42.1.0/24")]), "{:?}", plan.net.unreachable);
    assert_eq!(sent(&plan, [10, 1, 1, 1].into(), "10.5.0.1"), Ok(None), "the next subnet is not ours");
}

#[test]
fn what_a_host_reaches_by_routes_of_its_own_in_the_subnet_stays_open() {
    let nodes =
        [healthy(1, 1, true, false, 24), healthy(3, 1, false, false, 24), healthy(2, 2, true, false, 24)];
    let link = Elsewhere { on_link: true, wins: true };
    let gateway = Elsewhere { on_link: false, wins: false };
    let goes = |elsewhere: &[(&str, Elsewhere)], dst: &str| {
        let plan = plan_of(&nodes, "node-003", elsewhere);
        sent(&plan, [10, 1, 1, 3].into(), dst).map(|hop| hop.is_some())
    };
    let closed = Err(DropReason::NotEncrypted);
    for (elsewhere, dst, wanted) in [
        (&[("10.4.128.0/17", gateway)][..], "10.4.128.1", Ok(false)),
        (&[("10.4.128.0/17", gateway)], "10.4.127.1", closed),
        (&[("10.4.7.0/24", link)], "10.4.7.1", Ok(false)),
        // The whole subnet: this host's network uses it.
        (&[("10.4.0.0/16", link)], "10.4.7.1", Ok(false)),
        (&[("10.4.0.0/16", gateway)], "10.4.7.1", Ok(false)),
        // A wider route opens no more than a default route does.
        (&[("10.0.0.0/8", gateway)], "10.4.7.1", closed),
        (&[("10.0.0.0/8", link)], "10.4.7.1", closed),
        // Addresses of known locations go through WireGuard whatever the host's routes say.
        (&[("10.4.0.0/24", gateway), ("10.4.0.0/16", link)], "10.4.0.2", closed),
    ] {
        assert_eq!(goes(elsewhere, dst), wanted, "{elsewhere:?} {dst}");
    }
}

/// Like a private cloud network with addresses in `--subnet`: a node without a key yet is in no table.
#[test]
fn a_host_that_is_in_the_subnet_itself_reaches_what_is_not_known_yet() {
    let mut nodes = [healthy(1, 1, true, false, 24), healthy(3, 1, false, false, 24)];
    nodes[0].internal_ip = Some(net("10.4.77.1/24"));
    nodes[1].internal_ip = Some(net("10.4.78.3/24"));
    let plan = plan_of(&nodes, "node-003", &[]);
    for dst in ["10.4.77.1", "10.4.99.9"] {
        assert_eq!(sent(&plan, [10, 4, 78, 3].into(), dst), Ok(None), "{dst}");
    }
    // So does a host with its private address elsewhere but another of its networks in the subnet.
    let nodes = [healthy(1, 1, true, false, 24)];
    let mesh = plans::mesh(&nodes);
    let (mesh, settings) = (mesh.as_seen_from("node-001"), plans::settings());
    let links = HostLinks { networks: vec![(3, net("10.4.78.0/24"))], ..plans::links() };
    let hops = HopIds::default().update(&mesh);
    let plan = plan::host_plan(&plans::inputs(&mesh, &settings, &links, &hops)).unwrap();
    assert_eq!(sent(&plan, [10, 4, 78, 3].into(), "10.4.99.9"), Ok(None));
}

#[test]
fn what_is_offered_around_the_subnet_goes_through_wireguard_and_never_in_clear() {
    let mut nodes =
        [healthy(1, 1, true, false, 24), healthy(3, 1, false, false, 24), healthy(2, 2, true, false, 24)];
    let host = Elsewhere { on_link: true, wins: true };
    for offered in ["10.0.0.0/8", "10.4.0.0/16", "0.0.0.0/0"] {
        nodes[2].allowed_location_ips = vec![net(offered)];
        // The host's routes between the offered prefix and the subnet open their prefixes, except for the
        // subnet.
        for elsewhere in [&[][..], &[("10.0.0.0/12", host)], &[("10.0.0.0/8", host)]] {
            for own in ["node-001", "node-003"] {
                let plan = plan_of(&nodes, own, elsewhere);
                let clear = sent(&plan, [10, 1, 1, 1].into(), "10.4.7.1");
                assert_eq!(clear, CLOSED, "{own}: {offered} {elsewhere:?}");
                let value = plan.tables.prefix[&net("10.4.0.0/16")];
                assert_ne!(value.hop, HOP_NONE, "{own}: {offered} {elsewhere:?}");
            }
        }
    }
}

#[test]
fn a_subnet_of_all_addresses_cuts_no_host_off() {
    let settings =
        Settings { subnet: net("0.0.0.0/0"), ..settings(Granularity::Location, Encapsulate::Always) };
    let nodes = [healthy(1, 1, true, false, 24)];
    let plan = plan_with(&nodes, &BTreeMap::new(), "node-001", &settings, &[]);
    assert_eq!(sent(&plan, [10, 1, 1, 1].into(), "198.51.100.9"), Ok(None));
}
