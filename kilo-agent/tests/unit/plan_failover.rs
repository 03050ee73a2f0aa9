//! Stand-bys hold a leader's tables, and far leaders know every gateway of a location.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;
use kilo_common::{
    lead::{Term, word},
    maps::{CONFIG_GATEWAY, CONFIG_LEADER, HOP_ACTING, HOP_REMOTE, NODE_GATEWAY, NODE_LED},
};
use kilo_core::{
    plan::{HopIds, HostPlan},
    signal_id::{self, NodeId},
    topology::{Acting, ActingLocation, Mesh, Node, Peer},
    wireguard::key::PublicKey,
};

use crate::plans;

const SITE_A: &str = "location:a";

fn key(name: &str) -> PublicKey {
    let [site, number] = *name.as_bytes().first_chunk().unwrap();
    PublicKey([site ^ number << 1; 32])
}

fn id(name: &str) -> NodeId {
    signal_id::node(&key(name))
}

fn node(name: &str, endpoint: &str) -> Node {
    let number = name.as_bytes()[1] - b'0' + if name.starts_with('a') { 10 } else { 20 };
    Node {
        name: name.to_owned(),
        endpoint: format!("{endpoint}:51820").parse().ok(),
        key: Some(key(name)),
        internal_ip: format!("10.1.0.{number}/24").parse().ok(),
        location: name[..1].to_owned(),
        pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
        signal: true,
        ..Node::default()
    }
}

/// a1, a2 and a3, which cannot be reached from outside; b1; and c1, which has no signals.
fn nodes() -> Vec<Node> {
    vec![
        node("a1", "192.0.2.1"),
        node("a2", "192.0.2.2"),
        node("a3", "10.1.0.13"),
        node("b1", "192.0.2.9"),
        Node { signal: false, ..node("c1", "192.0.2.10") },
    ]
}

fn peers() -> BTreeMap<String, Peer> {
    let laptop = Peer {
        name: "laptop".to_owned(),
        allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
        endpoint: None,
        persistent_keepalive: 0,
        preshared_key: None,
        public_key: PublicKey([99; 32]),
        follows: false,
    };
    BTreeMap::from([(laptop.name.clone(), laptop)])
}

fn plan_of(own: &str, acting: Option<Acting>) -> HostPlan {
    plan_with(own, acting, &nodes(), &peers())
}

fn plan_with(own: &str, acting: Option<Acting>, nodes: &[Node], peers: &BTreeMap<String, Peer>) -> HostPlan {
    let settings = plans::settings();
    let mesh = Mesh::new(nodes, peers, settings.granularity, settings.subnet);
    let mesh = match acting {
        Some(acting) => mesh.with_acting(2, Arc::new(acting)),
        None => mesh,
    };
    plans::plan(&mesh, own, &HopIds::default()).0
}

fn on(own: &str) -> HostPlan {
    plan_of(own, Some(Acting::default()))
}

/// Allowed IPs of a peer without its control address.
fn allowed(plan: &HostPlan, name: &str) -> BTreeSet<String> {
    let control = IpNet::from(std::net::IpAddr::V6(signal_id::control_address(&key(name))));
    let all: BTreeSet<IpNet> = plan.wireguard.peers[&key(name)].allowed_ips.iter().copied().collect();
    assert!(all.contains(&control), "{name}");
    all.iter().filter(|net| **net != control).map(ToString::to_string).collect()
}

fn texts(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn without_failover_nothing_of_it_is_planned() {
    for name in ["a1", "a2", "b1", "c1"] {
        let plan = plan_of(name, None);
        assert_eq!(plan.wireguard.peers.is_empty(), name == "a2");
        let is_control = |net: &IpNet| net.to_string().starts_with("fd6b:");
        assert!(!plan.wireguard.peers.values().any(|peer| peer.allowed_ips.iter().any(is_control)));
        assert!(plan.wireguard.peers.values().all(|peer| peer.persistent_keepalive == 0));
        assert!(plan.tables.prefix.iter().all(|(_, value)| value.hop != HOP_ACTING));
        assert_eq!(plan.tables.config.control, [0; 16]);
        assert_eq!(plan.tables.config.flags & CONFIG_GATEWAY != 0, name != "a2");
    }
}

#[test]
fn a_far_leader_has_every_gateway_as_a_peer_and_prefixes_at_one() {
    let plan = on("b1");
    let site = ["10.1.0.11/32", "10.1.0.12/32", "10.1.0.13/32", "10.4.0.1/32"];
    let pods = ["10.42.11.0/24", "10.42.12.0/24", "10.42.13.0/24"];
    assert_eq!(allowed(&plan, "a1"), texts(&[&site[..], &pods[..]].concat()));
    for stand_by in ["a2", "a3"] {
        assert_eq!(allowed(&plan, stand_by), texts(&[]));
        let peer = &plan.wireguard.peers[&key(stand_by)];
        assert_eq!((peer.persistent_keepalive, peer.roams), (10, true));
    }
    assert_eq!(plan.wireguard.peers[&key("a1")].persistent_keepalive, 0);
    assert!(plan.wireguard.peers[&key("a2")].endpoint.is_some());
    assert_eq!(plan.wireguard.peers[&key("a3")].endpoint, None, "private: it speaks first");
    // An address that only the leader leads to is routed into the tunnel, although it is some node's
    // endpoint.
    let routed = |plan: &HostPlan, net: &str| {
        plan.net.routes.iter().any(|route| route.destination == net.parse::<IpNet>().unwrap())
    };
    assert!(routed(&plan, "10.1.0.13/32"));
    // The only node of b takes part: others need it to take over towards.
    assert_eq!(allowed(&on("a2"), "b1"), allowed(&on("a1"), "b1"));
}

/// The previous leader is in another location now, and the tunnels of this one work: nobody elsewhere
/// reaches the endpoint that it publishes.
#[test]
fn a_stand_by_that_becomes_the_leader_behind_nat_stays_where_it_is_heard() {
    let all = nodes();
    let of_a3_and_b = [all[2].clone(), node("a4", "10.1.0.14"), all[3].clone(), node("b2", "192.0.2.8")];
    let peer_of =
        |acting| plan_with("b1", acting, &of_a3_and_b, &peers()).wireguard.peers[&key("a3")].clone();
    let leader = peer_of(Some(Acting::default()));
    assert_eq!(leader.endpoint, "10.1.0.13:51820".parse().ok(), "where nobody has heard it");
    assert!(leader.roams);
    assert!(!peer_of(None).roams, "as Kilo does");
}

#[test]
fn a_stand_by_holds_a_leaders_tables_and_leaves_vpn_peers_and_others_to_it() {
    let (leader, stand_by) = (on("a1"), on("a2"));
    let flags = |plan: &HostPlan| plan.tables.config.flags & (CONFIG_GATEWAY | CONFIG_LEADER);
    assert_eq!((flags(&leader), flags(&stand_by)), (CONFIG_GATEWAY | CONFIG_LEADER, CONFIG_GATEWAY));
    let keys = |plan: &HostPlan| plan.wireguard.peers.keys().copied().collect::<BTreeSet<_>>();
    assert_eq!(keys(&stand_by), BTreeSet::from([key("b1")]));
    assert_eq!(keys(&leader), BTreeSet::from([key("b1"), key("c1"), PublicKey([99; 32])]));
    for plan in [&leader, &stand_by] {
        let hop = |net: &str| plan.tables.prefix[&net.parse::<IpNet>().unwrap()].hop;
        assert_eq!(hop("10.42.21.0/24"), HOP_ACTING, "b follows claims");
        assert_eq!(hop("10.42.21.0/24"), hop("10.4.0.2/32"));
        assert_eq!(hop("10.5.0.1/32"), HOP_REMOTE, "VPN peers know one key");
    }
    assert!(stand_by.net.addresses.is_empty() && !leader.net.addresses.is_empty());
    let gateways = stand_by.tables.node.values().filter(|node| node.flags & NODE_GATEWAY != 0);
    assert_eq!(gateways.count(), 2);
}

#[test]
fn a_vpn_peer_that_follows_is_held_by_all_gateways_and_reached_through_who_acts() {
    let mut peers = peers();
    peers.get_mut("laptop").unwrap().follows = true;
    let laptop = PublicKey([99; 32]);
    let control = IpNet::from(std::net::IpAddr::V6(signal_id::control_address(&laptop)));
    let own: IpNet = "10.5.0.1/32".parse().unwrap();
    for name in ["a1", "a2", "b1"] {
        let plan = plan_with(name, Some(Acting::default()), &nodes(), &peers);
        let peer = &plan.wireguard.peers[&laptop];
        assert_eq!(peer.allowed_ips.iter().copied().collect::<Vec<_>>(), [own, control], "{name}");
        // b has one node, so nobody follows there.
        let hop = if name == "b1" { HOP_REMOTE } else { HOP_ACTING };
        assert_eq!(plan.tables.prefix[&own].hop, hop, "{name}");
        assert!(!plan.tables.prefix.contains(&control), "{name}: nobody is routed to it");
    }
    // Nobody takes over from a leader without signals, and without failover there is only one leader.
    let alone = plan_with("c1", Some(Acting::default()), &nodes(), &peers);
    assert_eq!(alone.wireguard.peers[&laptop].allowed_ips.iter().copied().collect::<Vec<_>>(), [own]);
    for name in ["a1", "a2", "b1"] {
        assert_eq!(plan_with(name, None, &nodes(), &peers), plan_of(name, None), "{name} without failover");
    }
}

#[test]
fn a_reconcile_moves_nothing_back() {
    let first = Term::NONE.next(id("a2"));
    let location = ActingLocation {
        leader: Some((first, id("a2"))),
        members: BTreeMap::from([
            (id("a2"), (first, id("a2"))),
            (id("a3"), (first, id("a2"))),
            // a1 has not followed.
            (id("a1"), (Term::from_bits(2), id("a1"))),
        ]),
    };
    let locations = BTreeMap::from([(signal_id::location(SITE_A), location)]);
    let acting = Acting { locations, led: BTreeSet::from([id("a3")]) };
    let far = plan_of("b1", Some(acting.clone()));
    assert_eq!(allowed(&far, "a1"), texts(&["10.1.0.11/32", "10.42.11.0/24"]));
    let moved = ["10.1.0.12/32", "10.1.0.13/32", "10.4.0.1/32", "10.42.12.0/24", "10.42.13.0/24"];
    assert_eq!(allowed(&far, "a2"), texts(&moved));
    // The acting leader has the location's address; the previous one gives it up, and keeps its peers.
    let (taker, before) = (plan_of("a2", Some(acting.clone())), plan_of("a1", Some(acting)));
    assert_eq!(taker.net.addresses.iter().next().unwrap().to_string(), "10.4.0.1/16");
    assert!(before.net.addresses.is_empty());
    assert_eq!(before.wireguard.peers.len(), 3);
    assert_eq!(taker.tables.node.values().filter(|node| node.flags & NODE_LED != 0).count(), 1);
    // The kernel's own word has a later term than a plan's.
    assert!(taker.tables.lead[1] < word(first, 2));
    // When that is lost to another map layout, the node continues from the known term.
    assert_eq!(taker.tables.lead_of_term, Some(word(first, 2)));
    let hop_of = |address: [u8; 4]| before.tables.node[&std::net::IpAddr::from(address)].hop;
    assert_eq!(before.tables.lead_of_term, Some(word(first, hop_of([10, 1, 0, 12]).try_into().unwrap())));
}

/// Every way for objects to claim control addresses: those of two gateways, and whole prefixes of them.
#[test]
fn a_control_address_is_its_gateways_whatever_objects_claim() {
    let control = |name: &str| IpNet::from(std::net::IpAddr::V6(signal_id::control_address(&key(name))));
    let network: IpNet = "fd6b:696c:6f00::/48".parse().unwrap();
    let claims: Vec<fn(&mut Node, &mut Peer, IpNet)> = vec![
        |node, _, prefix| node.pod_cidrs.push(prefix),
        |node, _, prefix| node.pod_cidrs.insert(0, prefix),
        |node, _, prefix| node.allowed_location_ips.push(prefix),
        |node, _, prefix| node.internal_ip = Some(prefix),
        |_, peer, prefix| peer.allowed_ips.push(prefix),
        |_, peer, prefix| peer.allowed_ips.insert(0, prefix),
    ];
    let all = ["a1", "a2", "a3"];
    for (claimant, claim) in
        ["a3", "c1", "a1"].into_iter().flat_map(|at| claims.iter().map(move |it| (at, it)))
    {
        for prefix in [control("a1"), control("a2"), network, "fd6b:696c:6f00::/49".parse().unwrap()] {
            let (mut nodes, mut peers) = (nodes(), peers());
            let node = nodes.iter_mut().find(|node| node.name == claimant).unwrap();
            claim(node, peers.get_mut("laptop").unwrap(), prefix);
            let plan = plan_with("b1", Some(Acting::default()), &nodes, &peers);
            for (owner, peer) in &plan.wireguard.peers {
                for net in peer.allowed_ips.iter().filter(|net| network.contains(*net)) {
                    let own = all.iter().any(|name| key(name) == *owner && control(name) == *net);
                    assert!(own, "{claimant} claims {prefix}, and {owner} has {net}");
                }
            }
            for name in all {
                assert!(plan.wireguard.peers[&key(name)].allowed_ips.iter().any(|net| *net == control(name)));
            }
            // Other claims of the objects stay.
            let laptop = &plan.wireguard.peers[&PublicKey([99; 32])].allowed_ips;
            assert!(laptop.iter().any(|net| net.to_string() == "10.5.0.1/32"));
            assert!(allowed(&plan, "a1").contains("10.42.11.0/24"));
        }
    }
    // A prefix that contains the control network takes nothing from longer ones in it.
    let (mut nodes, mut peers) = (nodes(), peers());
    nodes[4].allowed_location_ips.push("fd6b::/16".parse().unwrap());
    peers.get_mut("laptop").unwrap().allowed_ips.push("::/0".parse().unwrap());
    let plan = plan_with("b1", Some(Acting::default()), &nodes, &peers);
    assert!(plan.wireguard.peers[&PublicKey([99; 32])].allowed_ips.iter().any(|net| net.prefix_len() == 0));
    assert_eq!(allowed(&plan, "a2"), texts(&[]));
}
