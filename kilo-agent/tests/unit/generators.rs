//! Nodes and peers for property tests: as in healthy clusters, and garbage.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;
use kilo_core::{
    objects::annotations::{ANNOTATIONS, PREFIX},
    settings::{Encapsulate, Granularity, Settings},
    topology::{Node, Peer},
    wireguard::key::PublicKey,
};
use proptest::prelude::*;

pub fn settings(granularity: Granularity, encapsulate: Encapsulate) -> Settings {
    Settings {
        granularity,
        encapsulate,
        tunnel: kilo_core::settings::Tunnel::Ipip,
        local: true,
        cni: true,
        subnet: "10.4.0.0/16".parse().unwrap(),
        service_cidrs: vec!["10.43.0.0/16".parse().unwrap()],
        port: 51_820,
    }
}

/// A node of a healthy cluster; `index` determines its name and addresses.
pub fn healthy(index: u8, location: u8, leader: bool, no_private: bool, net: u8) -> Node {
    Node {
        name: format!("node-{index:03}"),
        endpoint: format!("198.51.100.{index}:51820").parse().ok(),
        key: Some(PublicKey([index; 32])),
        internal_ip: if no_private { None } else { format!("10.1.{location}.{index}/{net}").parse().ok() },
        leader,
        location: format!("l{location}"),
        pod_cidrs: vec![format!("10.42.{index}.0/24").parse().unwrap()],
        ..Node::default()
    }
}

/// Where WireGuard really reaches a node.
#[derive(Clone, Copy, Debug)]
pub enum Reached {
    /// At its published endpoint, an address outside the mesh.
    Public,
    /// At its published endpoint, which is its private address.
    Private,
    /// It publishes its private address behind NAT; others see another one.
    NatOfPrivate,
    /// It publishes another address; others see it at its private one.
    SeenInside,
}

fn reached() -> impl Strategy<Value = Reached> {
    prop_oneof![
        4 => Just(Reached::Public),
        2 => Just(Reached::Private),
        1 => Just(Reached::NatOfPrivate),
        1 => Just(Reached::SeenInside),
    ]
}

pub fn healthy_nodes() -> impl Strategy<Value = BTreeMap<String, Node>> {
    let weighted = prop::bool::weighted;
    let node = (0u8..4, weighted(0.2), weighted(0.1), 24u8..=32, reached());
    prop::collection::btree_map(1u8..60, node, 1..12).prop_map(|nodes| {
        let mut discovered = BTreeMap::new();
        let nodes = nodes.into_iter().map(|(index, (location, leader, no_private, net, reached))| {
            let mut node = healthy(index, location, leader, no_private, net);
            let Some(private) = node.internal_ip.map(|net| SocketAddr::new(net.addr(), 51_820)) else {
                return node;
            };
            let translated = SocketAddr::from(([203, 0, 113, index], 4500));
            let (endpoint, seen) = match reached {
                Reached::Public => (node.endpoint.clone(), None),
                Reached::Private => (Some(private.into()), None),
                Reached::NatOfPrivate => (Some(private.into()), Some(translated)),
                Reached::SeenInside => (node.endpoint.clone(), Some(private)),
            };
            node.endpoint = endpoint;
            if let Some(seen) = seen {
                node.persistent_keepalive = 25;
                discovered.insert(PublicKey([index; 32]), seen);
            }
            node
        });
        let mut nodes: BTreeMap<String, Node> = nodes.map(|node| (node.name.clone(), node)).collect();
        // One of them has discovered all endpoints.
        if let Some(node) = nodes.values_mut().next() {
            node.discovered_endpoints = discovered;
        }
        nodes
    })
}

/// The same node in a cluster without IPv4.
pub fn with_ipv6(node: &Node) -> Node {
    let six = |prefix: IpNet, bits: u8| match prefix.addr() {
        IpAddr::V4(ip) => {
            let low = u128::from(u32::from(ip)) << bits;
            IpNet::new(
                IpAddr::from(((0xfd11_u128 << 112) | low).to_be_bytes()),
                96 + prefix.prefix_len() - bits,
            )
        }
        IpAddr::V6(_) => Ok(prefix),
    };
    Node {
        internal_ip: node.internal_ip.and_then(|net| six(net, 0).ok()),
        pod_cidrs: node.pod_cidrs.iter().filter_map(|cidr| six(*cidr, 8).ok()).collect(),
        ..node.clone()
    }
}

pub fn vpn_peers() -> impl Strategy<Value = BTreeMap<String, Peer>> {
    let prefix = prop_oneof![
        (1u8..5).prop_map(|last| format!("10.5.0.{last}/32")),
        Just("172.31.0.0/16".to_owned()),
        Just("10.42.3.0/24".to_owned()),
    ];
    prop::collection::btree_map("[a-c]", (prop::collection::vec(prefix, 0..3), 200u8..204), 0..3).prop_map(
        |peers| {
            let peers = peers.into_iter().map(|(name, (allowed_ips, key))| Peer {
                name,
                allowed_ips: allowed_ips.iter().map(|prefix| prefix.parse().unwrap()).collect(),
                endpoint: None,
                persistent_keepalive: 0,
                preshared_key: None,
                public_key: PublicKey([key; 32]),
                follows: false,
            });
            peers.map(|peer| (peer.name.clone(), peer)).collect()
        },
    )
}

pub fn granularity() -> impl Strategy<Value = Granularity> {
    prop_oneof![Just(Granularity::Location), Just(Granularity::Full), Just(Granularity::Cross)]
}

pub fn encapsulate() -> impl Strategy<Value = Encapsulate> {
    prop_oneof![Just(Encapsulate::Always), Just(Encapsulate::CrossSubnet), Just(Encapsulate::Never)]
}

/// Prefixes that locations offer in tests; some lie within others, within pod or service ranges.
pub const OFFERED: [&str; 8] = [
    "0.0.0.0/0",
    "192.168.0.0/16",
    "192.168.5.0/24",
    "198.18.0.0/15",
    "10.42.0.0/16",
    "10.43.7.0/24",
    "10.43.0.0/16",
    "172.31.5.0/24",
];

/// Annotation values, valid and invalid.
pub fn rubbish() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("-".to_owned()),
        Just("10.1.0.1/24".to_owned()),
        Just("10.1.0.1/33".to_owned()),
        Just("0.0.0.0/0,::/0, ,x".to_owned()),
        Just("10.42.1.0/24,10.42.1.0/25,10.1.0.0/16".to_owned()),
        Just("fd00::1/64".to_owned()),
        Just("[fd00::1]:51820".to_owned()),
        Just("203.0.113.7:51820".to_owned()),
        Just("vpn.example.com:65536".to_owned()),
        Just("full".to_owned()),
        Just(PublicKey([1; 32]).to_string()),
        Just(format!(r#"{{"{}":{{"IP":"1.2.3.4","Port":5,"Zone":""}}}}"#, PublicKey([1; 32]))),
        any::<i64>().prop_map(|number| number.to_string()),
        "[ -~é]{0,30}",
    ]
}

pub fn rubbish_node() -> impl Strategy<Value = core::Node> {
    let names: Vec<_> = ANNOTATIONS.iter().map(|row| row.name).collect();
    let annotations = prop::collection::btree_map(prop::sample::select(names), rubbish(), 0..14);
    ("[a-e]", annotations, rubbish(), any::<bool>()).prop_map(|(name, annotations, cidr, complete)| {
        let mut annotations: BTreeMap<String, String> =
            annotations.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let mut object = core::Node::default();
        if complete {
            // Valid enough to take part, so that the garbage reaches the plan.
            let key = PublicKey([name.as_bytes()[0]; 32]).to_string();
            annotations.insert(format!("{PREFIX}endpoint"), "192.0.2.1:51820".to_owned());
            annotations.insert(format!("{PREFIX}key"), key);
            object.spec.get_or_insert_default().pod_cidrs = Some(vec!["10.42.1.0/24".to_owned()]);
        }
        object.metadata.name = Some(name);
        object.metadata.annotations = Some(annotations);
        object.spec.get_or_insert_default().pod_cidr = Some(cidr);
        object
    })
}
