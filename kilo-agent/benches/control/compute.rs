//! Topology and plan alone: no kernel, no API server.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kilo_core::{
    observed::{HostLinks, Uplink},
    plan::{self, HopIds, Inputs},
    relay::RelayInputs,
    settings::Settings,
    topology::{Mesh, Node, Peer},
};

use kilo_test_support::settings::settings;

use crate::{Figures, objects};

/// VPN peers in every mesh, whatever its number of nodes.
const PEERS: usize = 10_000;
const ROUNDS: usize = 15;

pub fn measure(figures: &mut Figures, count: usize) {
    let mut nodes: Vec<Arc<Node>> = (0..count)
        .map(|number| {
            let mut node = kilo_core::objects::node::from_object(&objects::node(number, 1), "").0.node;
            // The agent under test adds these itself.
            if number == objects::OWN {
                node.endpoint = "192.0.2.11:51820".parse().ok();
                node.internal_ip = format!("{}/16", objects::private(number)).parse().ok();
                node.key = Some(objects::key(number));
            }
            node.into()
        })
        .collect();
    nodes.sort_by(|one, other| one.name.cmp(&other.name));
    let peers: BTreeMap<String, Peer> = (0..PEERS)
        .map(|number| {
            let object = serde_json::from_value(objects::peer(number)).unwrap();
            let peer = kilo_core::objects::peer::from_object(&object).unwrap();
            (peer.name.clone(), peer)
        })
        .collect();
    for (who, number) in [("leader", objects::OWN), ("other node", objects::LOCATIONS)] {
        let times: Vec<Duration> =
            (0..ROUNDS).map(|_| compute(&nodes, &peers, &objects::name(number))).collect();
        figures.add(count, &format!("topology and plan, {who}"), "ms", milliseconds(median(times)));
    }
}

fn compute(nodes: &[Arc<Node>], peers: &BTreeMap<String, Peer>, own: &str) -> Duration {
    let service_cidrs = vec!["10.96.0.0/16".parse().unwrap()];
    let settings = Settings { service_cidrs, ..settings() };
    let uplink = Uplink { v4: Some([192, 0, 2, 11].into()), v6: None };
    let links = HostLinks {
        kilo: 9,
        private: Some(2),
        uplinks: BTreeMap::from([(2, uplink)]),
        mtus: BTreeMap::from([(2, 1500)]),
        ..HostLinks::default()
    };
    let started = processor_time();
    let mesh = Mesh::default().next(nodes, peers, settings.granularity, settings.subnet);
    let mesh = mesh.as_seen_from(own);
    let hops = HopIds::default().update(&mesh);
    let plan = plan::host_plan(&Inputs {
        mesh: &mesh,
        settings: &settings,
        links: &links,
        hops: &hops,
        resolved: &BTreeMap::new(),
        seen: &BTreeMap::new(),
        relays: &RelayInputs::default(),
        signal_keys: &BTreeMap::new(),
        persistent_keepalive: 0,
        masquerade: true,
        mtu: 1420,
    });
    let spent = processor_time().checked_sub(started).unwrap();
    let plan = plan.unwrap();
    let leads = own == objects::name(objects::OWN);
    assert_eq!(plan.wireguard.peers.len(), if leads { objects::LOCATIONS - 1 + peers.len() } else { 0 });
    spent
}

/// CPU time of this thread: others on the machine do not count.
fn processor_time() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    time.into()
}

pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

pub fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
