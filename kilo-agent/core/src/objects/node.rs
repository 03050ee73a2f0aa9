//! Converts Node objects and their annotations to and from what the topology needs.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;

use super::{
    CheckedIn, Node,
    annotations::{self, excerpt},
    leaving,
};
use crate::signal_id;

/// Labels of nodes that run the API server or etcd: those of kubeadm (since 1.20, and before), of
/// k3s and RKE2 besides, of Typhoon, and of MicroK8s.
pub const CONTROL_PLANE: [&str; 5] = [
    "node-role.kubernetes.io/control-plane",
    "node-role.kubernetes.io/master",
    "node-role.kubernetes.io/etcd",
    "node.kubernetes.io/controller",
    "node.kubernetes.io/microk8s-controlplane",
];

/// Reads a Node object. Fields that cannot be read count as absent; the second value names them.
pub fn from_object(object: &core::Node, topology_label: &str) -> (CheckedIn, Vec<String>) {
    let empty = BTreeMap::new();
    let labels = object.metadata.labels.as_ref().unwrap_or(&empty);
    let mut problems = Vec::new();
    let mut node = Node { name: object.metadata.name.clone().unwrap_or_default(), ..Node::default() };
    // An annotation overrides it.
    node.location = labels.get(topology_label).cloned().unwrap_or_default();
    node.control_plane = CONTROL_PLANE.iter().any(|label| labels.contains_key(*label));
    node.pod_cidrs = pod_cidrs(object.spec.as_ref(), &mut problems);
    node.external_ips = external_ips(object.status.as_ref());
    node.leaving = leaving::read(object);
    let mut read = CheckedIn { node, last_seen: 0 };
    let present = object.metadata.annotations.as_ref().unwrap_or(&empty);
    annotations::read(present, &mut read, &mut problems);
    (read, problems)
}

/// Type of a Node address that is reached from outside the cluster's network.
pub const EXTERNAL_IP: &str = "ExternalIP";

/// Addresses of type `ExternalIP` that count: a slice, too, must have room for them.
pub(super) const MOST_EXTERNAL_IPS: usize = 100;

/// Addresses of type `ExternalIP`. Kubernetes checks that they are addresses;
/// anything else is skipped.
fn external_ips(status: Option<&core::NodeStatus>) -> Vec<IpAddr> {
    let addresses = status.and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let external = addresses.iter().filter(|address| address.type_ == EXTERNAL_IP);
    let external = external.filter_map(|address| address.address.parse().ok());
    let mut addresses: Vec<IpAddr> = external.take(MOST_EXTERNAL_IPS).collect();
    addresses.shrink_to_fit();
    addresses
}

/// The pod CIDRs without duplicates, `spec.podCIDR` first.
fn pod_cidrs(spec: Option<&core::NodeSpec>, problems: &mut Vec<String>) -> Vec<IpNet> {
    let mut cidrs: Vec<IpNet> = Vec::new();
    let Some(spec) = spec else { return cidrs };
    for text in spec.pod_cidr.iter().chain(spec.pod_cidrs.iter().flatten()).filter(|text| !text.is_empty()) {
        match text.parse::<IpNet>() {
            Ok(cidr) if signal_id::is_control(&cidr) => problems.push(format!(
                "pod CIDR {:?} is skipped: {}",
                excerpt(text),
                signal_id::CONTROL_REFUSED
            )),
            Ok(cidr) if !cidrs.contains(&cidr.trunc()) => cidrs.push(cidr.trunc()),
            Ok(_) => {}
            Err(_) => problems.push(format!(
                "pod CIDR {:?} is skipped: not a valid CIDR such as 10.42.1.0/24",
                excerpt(text)
            )),
        }
    }
    // The first push makes room for four, and most nodes have one.
    cidrs.shrink_to_fit();
    cidrs
}

/// The object that describes this node with that heartbeat: [`from_object`] reads it back.
pub fn to_object(node: &Node, last_seen: i64) -> core::Node {
    let mut object = core::Node::default();
    object.metadata.name = Some(node.name.clone());
    object.metadata.annotations = Some(annotations::of_node(node, last_seen));
    // An agent that starts without the API server must know to which hosts packets go in cleartext.
    let label = node.control_plane.then(|| BTreeMap::from([(CONTROL_PLANE[0].to_owned(), String::new())]));
    object.metadata.labels = label;
    let pod_cidrs = node.pod_cidrs.iter().map(ToString::to_string).collect();
    let mut spec = core::NodeSpec { pod_cidrs: Some(pod_cidrs), ..Default::default() };
    leaving::write(node.leaving, &mut spec);
    object.spec = Some(spec);
    if !node.external_ips.is_empty() {
        let address =
            |ip: &IpAddr| core::NodeAddress { type_: EXTERNAL_IP.to_owned(), address: ip.to_string() };
        let addresses = Some(node.external_ips.iter().map(address).collect());
        object.status = Some(core::NodeStatus { addresses, ..Default::default() });
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        objects::{
            InternalIpBy, Leaving, Published,
            annotations::{PREFIX, changes, wanted, without_failover},
        },
        settings::Granularity,
        wireguard::key::PublicKey,
    };

    #[test]
    fn what_is_published_is_read_back() {
        let published = Published {
            endpoint: "1.2.3.4:51820".parse().ok(),
            ipv6_endpoint: "[2001:db8::7]:51820".parse().ok(),
            relay_off: true,
            internal_ip: "10.0.0.1/24".parse().ok(),
            key: Some(PublicKey([3; 32])),
            last_seen: 17,
            wireguard_ip: "10.4.0.1/16".parse().ok(),
            discovered_endpoints: BTreeMap::from([(PublicKey([4; 32]), "5.6.7.8:9".parse().unwrap())]),
            granularity: Some(Granularity::Full),
            cni_compatibility_ip: None,
            signal: true,
            leading: Some(1 << 16),
            leaders: Some(2),
            state: Some("member of location:here".to_owned()),
            heartbeat: Some(300),
        };
        let mut object = core::Node::default();
        let written = wanted(&published);
        object.metadata.annotations =
            Some(written.clone().into_iter().filter_map(|(name, value)| Some((name, value?))).collect());
        let (node, problems) = from_object(&object, "region");
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(node.endpoint, published.endpoint);
        assert_eq!(node.internal_ip, published.internal_ip);
        assert_eq!(node.key, published.key);
        assert_eq!(node.last_seen, 17);
        assert_eq!(node.wireguard_ip, published.wireguard_ip);
        assert_eq!(node.discovered_endpoints, published.discovered_endpoints);
        assert_eq!(node.granularity, Some(Granularity::Full));
        assert_eq!((node.signal, node.leading), (true, published.leading));
        assert_eq!(node.heartbeat, Some(300));
        assert!(without_failover().keys().all(|name| written.contains_key(name)), "each of them is there");
        assert!(changes(object.metadata.annotations.as_ref().unwrap(), written).is_empty());
    }

    #[test]
    fn a_promise_of_heartbeats_is_void_once_another_agent_renews_them() {
        let promised = |last_seen: &str, heartbeat: &str| {
            let mut object = core::Node::default();
            object.metadata.annotations = Some(BTreeMap::from([
                (format!("{PREFIX}last-seen"), last_seen.to_owned()),
                (format!("{PREFIX}heartbeat"), heartbeat.to_owned()),
            ]));
            from_object(&object, "region").0.heartbeat
        };
        assert_eq!(promised("1000", "1000/300"), Some(300));
        assert_eq!(promised("1030", "1000/300"), None, "Kilo's own agent has taken over");
        assert_eq!(promised("0", "1000/300"), Some(300), "a stand-by has said that it is dead");
        assert_eq!(promised("1000", "1000/65535"), Some(600), "nobody waits for hours");
    }

    #[test]
    fn what_an_agent_that_has_gone_said_of_failover_is_void_once_another_renews_heartbeats() {
        let said = |last_seen: &str, heartbeat: Option<&str>| {
            let mut object = core::Node::default();
            let all = [
                ("last-seen", last_seen),
                ("signal", "1"),
                ("leading", "65536"),
                ("leaders", "2"),
                ("heartbeat", heartbeat.unwrap_or_default()),
            ];
            let all = all.into_iter().filter(|(_, value)| !value.is_empty());
            let all = all.map(|(name, value)| (format!("{PREFIX}{name}"), value.to_owned()));
            object.metadata.annotations = Some(all.collect());
            let node = from_object(&object, "region").0;
            (node.signal, node.leading, node.leaders)
        };
        let counts = (true, Some(65_536), Some(2));
        assert_eq!(said("1000", Some("1000/30")), counts);
        assert_eq!(said("1030", Some("1000/30")), (false, None, None), "Kilo's own agent has taken over");
        assert_eq!(said("0", Some("1000/30")), counts, "a stand-by has said that it is dead");
        assert_eq!(said("1030", None), counts, "an agent of ours from before promises");
        assert_eq!(said("1030", Some("rubbish")), counts, "which says nothing of who renews it");
    }

    #[test]
    fn every_platforms_control_plane_is_known_by_its_label() {
        let with = |label: &str| {
            let mut object = core::Node::default();
            object.metadata.labels = Some(BTreeMap::from([(label.to_owned(), String::new())]));
            from_object(&object, "region").0.control_plane
        };
        for (platform, label) in [
            ("kubeadm, k3s", "node-role.kubernetes.io/control-plane"),
            ("kubeadm before 1.20", "node-role.kubernetes.io/master"),
            ("k3s and RKE2 with etcd alone", "node-role.kubernetes.io/etcd"),
            ("Typhoon", "node.kubernetes.io/controller"),
            ("MicroK8s", "node.kubernetes.io/microk8s-controlplane"),
        ] {
            assert!(with(label), "{platform}: {label}");
        }
        assert!(!with("node-role.kubernetes.io/worker") && !with("node.kubernetes.io/node"));
    }

    #[test]
    fn each_annotation_that_is_rubbish_is_named_and_leaves_the_others() {
        let good = Node {
            name: "a".to_owned(),
            endpoint: "1.2.3.4:5".parse().ok(),
            key: Some(PublicKey([3; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            location: "here".to_owned(),
            granularity: Some(Granularity::Full),
            ..Node::default()
        };
        let long = "x".repeat(100_000);
        for (name, rubbish) in [
            ("force-endpoint", "1.2.3.4"),
            ("force-endpoint", &long),
            ("force-internal-ip", "10.0.0.1"),
            ("persistent-keepalive", "-1"),
            ("persistent-keepalive", "5s"),
            ("allowed-location-ips", "10.0.0.1,,x"),
            ("endpoint", ":1"),
            ("internal-ip", "::1/129"),
            ("key", "short"),
            ("last-seen", "yesterday"),
            ("wireguard-ip", "10.4.0.1"),
            ("discovered-endpoints", "[]"),
            ("discovered-endpoints", &long),
            ("granularity", "continent"),
            ("cni-compatibility-ip", "x"),
            ("leading", "-1"),
            ("leading", "1099511693312"),
            ("leading", "18446744073709551615"),
            ("leaders", "many"),
            ("heartbeat", "300"),
            ("heartbeat", "17/0"),
            ("gateway", "yes please"),
        ] {
            let mut object = to_object(&good, 17);
            let annotations = object.metadata.annotations.get_or_insert_default();
            annotations.insert(format!("{PREFIX}{name}"), rubbish.to_owned());
            let (node, problems) = from_object(&object, "region");
            assert!(problems.iter().all(|problem| problem.contains(name)), "{problems:?}");
            assert!(!problems.is_empty() && problems.concat().len() < 1000, "{name}: {problems:?}");
            assert_eq!((&node.location, node.name.as_str()), (&good.location, "a"));
            let untouched =
                [node.endpoint == good.endpoint, node.key == good.key, node.internal_ip == good.internal_ip];
            assert!(untouched.iter().filter(|same| **same).count() >= 2, "{name} spoils others: {node:?}");
        }
        // A value that looks as if it counted is named with what to do.
        let mut object = to_object(&good, 17);
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(format!("{PREFIX}leader"), "False".to_owned());
        let (node, problems) = from_object(&object, "region");
        assert!(node.leader && problems.len() == 1, "{problems:?}");
        assert!(problems[0].ends_with("kubectl annotate node a kilo.squat.ai/leader-"), "{problems:?}");
        // Annotations that take any value.
        for name in ["leader", "location"] {
            let mut object = to_object(&good, 17);
            object
                .metadata
                .annotations
                .get_or_insert_default()
                .insert(format!("{PREFIX}{name}"), "\u{1F980}".to_owned());
            assert_eq!(from_object(&object, "region").1, Vec::<String>::new());
        }
    }

    #[test]
    fn nobody_has_a_control_address_and_nothing_else_is_lost() {
        const CONTROL: &str = "fd6b:696c:6f00::7/128";
        let good = Node {
            name: "a".to_owned(),
            endpoint: "1.2.3.4:5".parse().ok(),
            key: Some(PublicKey([3; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.1.0/24".parse().unwrap()],
            allowed_location_ips: vec!["192.0.2.0/24".parse().unwrap(), "::/0".parse().unwrap()],
            ..Node::default()
        };
        let mut object = to_object(&good, 17);
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(
            format!("{PREFIX}allowed-location-ips"),
            format!("192.0.2.0/24,{CONTROL},fd6b:696c:6f00::/48,::/0"),
        );
        annotations.insert(format!("{PREFIX}force-internal-ip"), CONTROL.to_owned());
        let spec = object.spec.get_or_insert_default();
        spec.pod_cidrs.get_or_insert_default().push(CONTROL.to_owned());
        let (node, problems) = from_object(&object, "region");
        assert_eq!(node.node, good);
        for (name, count) in [("allowed-location-ips", 2), ("force-internal-ip", 1), ("pod CIDR", 1)] {
            let named = problems.iter().filter(|problem| {
                problem.contains(name) && problem.contains("fd6b:696c:6f00::") && problem.contains("failover")
            });
            assert_eq!(named.count(), count, "{name}: {problems:#?}");
        }
        // The agent's own annotation neither.
        object.metadata.annotations.get_or_insert_default().remove(&format!("{PREFIX}force-internal-ip"));
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(format!("{PREFIX}internal-ip"), CONTROL.to_owned());
        assert_eq!(from_object(&object, "region").0.internal_ip, None);
    }

    #[test]
    fn an_object_made_from_a_node_is_read_back() {
        let plain = Node {
            name: "a".to_owned(),
            endpoint: "1.2.3.4:5".parse().ok(),
            key: Some(PublicKey([3; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap(), "fd00:42::/64".parse().unwrap()],
            ..Node::default()
        };
        let full = Node {
            endpoint: "vpn.example.com:5".parse().ok(),
            endpoint_forced: true,
            internal_ip_by: InternalIpBy::Forced,
            leader: true,
            gateway: true,
            relay: true,
            control_plane: true,
            location: "here".to_owned(),
            persistent_keepalive: 10,
            wireguard_ip: "10.4.0.1/16".parse().ok(),
            discovered_endpoints: BTreeMap::from([(PublicKey([4; 32]), "5.6.7.8:9".parse().unwrap())]),
            allowed_location_ips: vec!["192.0.2.0/24".parse().unwrap(), "2001:db8::/64".parse().unwrap()],
            granularity: Some(Granularity::Full),
            cni_compatibility_ip: "10.42.0.7/32".parse().ok(),
            external_ips: vec!["192.0.2.7".parse().unwrap(), "2001:db8::7".parse().unwrap()],
            signal: true,
            leading: Some(1 << 16),
            leaders: Some(2),
            leaving: Some(Leaving::Removed),
            heartbeat: Some(300),
            ..plain.clone()
        };
        let without = Node { internal_ip: None, internal_ip_by: InternalIpBy::ForcedNone, ..plain.clone() };
        let new = Node { name: "new".to_owned(), ..Node::default() };
        for node in [plain, full, without, new] {
            let read = from_object(&to_object(&node, 17), "region");
            assert_eq!(read, (CheckedIn { node, last_seen: 17 }, Vec::new()));
        }
    }

    #[test]
    fn a_term_after_which_no_other_would_count_is_refused() {
        let read = |term: u64| {
            let mut object = core::Node::default();
            object.metadata.annotations =
                Some(BTreeMap::from([(format!("{PREFIX}leading"), term.to_string())]));
            let (read, problems) = from_object(&object, "region");
            (read.leading, problems)
        };
        let most = (1 << 40) + 0xffff;
        assert_eq!(read(most), (Some(most), Vec::new()));
        let (leading, problems) = read(most + 1);
        assert_eq!((leading, problems.len()), (None, 1));
        assert!(
            problems[0].contains("16777217 changes of leader")
                && problems[0].ends_with("kilo.squat.ai/leading-")
        );
    }

    #[test]
    fn one_seen_endpoint_that_is_rubbish_leaves_the_others() {
        let good = PublicKey([7; 32]);
        let text = format!(
            r#"{{"{good}":{{"IP":"1.2.3.4","Port":5,"Zone":""}},"x":{{"IP":"1.2.3.4","Port":5}},"{}":{{"IP":"","Port":0}}}}"#,
            PublicKey([8; 32])
        );
        let mut object = core::Node::default();
        object.metadata.annotations = Some(BTreeMap::from([(format!("{PREFIX}discovered-endpoints"), text)]));
        let (node, problems) = from_object(&object, "region");
        assert_eq!(node.discovered_endpoints, BTreeMap::from([(good, "1.2.3.4:5".parse().unwrap())]));
        assert_eq!(problems.len(), 2, "{problems:?}");
    }

    #[test]
    fn rubbish_in_one_annotation_is_named_and_leaves_the_others() {
        let mut object = core::Node::default();
        object.metadata.annotations = Some(BTreeMap::from([
            (format!("{PREFIX}endpoint"), "nonsense".to_owned()),
            (format!("{PREFIX}allowed-location-ips"), "10.0.0.0/8, x, 192.168.0.0/16".to_owned()),
            (format!("{PREFIX}key"), PublicKey([1; 32]).to_string()),
        ]));
        let (node, problems) = from_object(&object, "region");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert_eq!(node.allowed_location_ips.len(), 2);
        assert!(node.key.is_some());
    }
}
