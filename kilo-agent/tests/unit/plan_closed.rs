//! Prefixes that belonged to the mesh and have no owner any more: nothing is sent there in cleartext.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::{
    drop_reasons::DropReason,
    maps::{HOP_NONE, PREFIX_NEVER_CLEAR},
};
use kilo_core::{
    observed::HostLinks,
    plan::{self, HopIds, HostPlan, model::Packet},
    topology::Node,
    wireguard::key::PublicKey,
};

use crate::plans;

fn node(name: &str, n: u8, location: &str) -> Node {
    Node {
        name: name.into(),
        location: location.into(),
        key: Some(PublicKey([n; 32])),
        endpoint: format!("192.0.2.{n}:51820").parse().ok(),
        internal_ip: format!("10.1.0.{n}/24").parse().ok(),
        pod_cidrs: vec![format!("10.42.{n}.0/24").parse().unwrap()],
        ..Node::default()
    }
}

fn three() -> [Node; 3] {
    [node("a1", 1, "a"), node("a2", 2, "a"), node("b1", 3, "b")]
}

fn is_closed(plan: &HostPlan, prefix: IpNet) -> bool {
    let closed = plan.tables.prefix.get(&prefix);
    closed.is_some_and(|closed| closed.hop == HOP_NONE && closed.flags & PREFIX_NEVER_CLEAR != 0)
        && plan.net.unreachable.contains(&prefix)
}

#[test]
fn an_address_that_no_location_has_any_more_is_closed_on_every_node() {
    let nodes = three();
    let free: IpAddr = [10, 4, 0, 3].into();
    let mesh = plans::mesh(&nodes).with_freed(vec![free]);
    for node in &nodes {
        let (plan, _) = plans::plan(&mesh, &node.name, &HopIds::default());
        assert!(is_closed(&plan, free.into()), "{}", node.name);
        for src in [[10, 4, 0, 1].into(), node.pod_cidrs[0].hosts().next().unwrap()] {
            let packet = Packet { src, dst: free };
            assert_eq!(plan.tables.uplink_egress(packet), Err(DropReason::NotEncrypted), "{}", node.name);
        }
    }
}

/// A node was deleted and registered again: it has pods from before, and pods that started before the
/// agent.
#[test]
fn pods_with_a_former_pod_cidr_of_the_node_are_masqueraded_and_reached_by_nobody() {
    let nodes = three();
    let former: IpNet = "10.42.9.0/24".parse().unwrap();
    // The second former CIDR belongs to another node now.
    let former_pod_cidrs = vec![former, nodes[2].pod_cidrs[0]];
    let links = HostLinks { former_pod_cidrs, ..plans::links() };
    let (settings, mesh) = (plans::settings(), plans::mesh(&nodes));
    for node in &nodes[..2] {
        let mesh = mesh.as_seen_from(&node.name);
        let hops = HopIds::default().update(&mesh);
        let plan = plan::host_plan(&plans::inputs(&mesh, &settings, &links, &hops)).unwrap();
        let pod = former.hosts().next().unwrap();
        let outside: IpAddr = [203, 0, 113, 10].into();
        assert!(plan.tables.masquerades(Packet { src: pod, dst: outside }), "{}", node.name);
        assert!(is_closed(&plan, former), "{}", node.name);
        let answer = Packet { src: outside, dst: pod };
        assert_eq!(plan.tables.uplink_egress(answer), Err(DropReason::NotEncrypted), "{}", node.name);
        let others = plan.net.routes.iter().any(|route| route.destination == nodes[2].pod_cidrs[0]);
        assert!(others, "{}: the node that has it is reached", node.name);
    }
}
