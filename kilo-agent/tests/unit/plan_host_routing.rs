//! What the plan says of pods' interfaces.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use kilo_common::maps::CONFIG_TCP_BYPASSES;
use kilo_core::{
    observed::HostLinks,
    plan::{self, HopIds},
    topology::Node,
    wireguard::key::PublicKey,
};

use crate::plans;

#[test]
fn tcp_bypasses_where_packets_of_pods_do_and_connections_survive_it() {
    let node = Node {
        name: "a1".into(),
        endpoint: "192.0.2.1:51820".parse().ok(),
        key: Some(PublicKey([1; 32])),
        internal_ip: "10.1.0.1/16".parse().ok(),
        pod_cidrs: vec!["10.42.1.0/24".parse().unwrap()],
        ..Node::default()
    };
    let (mesh, settings) = (plans::mesh(&[node]), plans::settings());
    let mesh = mesh.as_seen_from("a1");
    let hops = HopIds::default().update(&mesh);
    for (pods, tolerates_gaps_in_tcp, bypasses) in
        [(vec![], true, false), (vec![7], false, false), (vec![7, 8], true, true)]
    {
        let pods = BTreeSet::from_iter(pods);
        let links = HostLinks { pods: pods.clone(), tolerates_gaps_in_tcp, ..plans::links() };
        let plan = plan::host_plan(&plans::inputs(&mesh, &settings, &links, &hops)).unwrap();
        assert_eq!(plan.pods, pods);
        assert_eq!(plan.tables.config.flags & CONFIG_TCP_BYPASSES != 0, bypasses, "{pods:?}");
    }
}
