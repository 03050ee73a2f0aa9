//! Addresses and pods of nodes that are known but take no part.

use super::*;

#[test]
fn what_is_for_a_node_that_was_given_up_does_not_leave_in_clear() {
    let (ready, lost) = (
        [two().to_vec(), vec![healthy(5, 1, false, false, 24)]].concat(),
        [healthy(3, 1, false, false, 24), healthy(4, 2, false, false, 24), healthy(6, 3, true, false, 24)],
    );
    let settings = settings(Granularity::Location, Encapsulate::Always);
    for own in [0, 2] {
        let plan = plan_without(&ready, &lost, &ready[own].name, &settings, Facts::default());
        for src in [pod(&ready[own]), private(&ready[own]), pod(&ready[1]), pod(&ready[2 - own])] {
            for dst in lost.iter().map(pod) {
                let packet = Packet { src, dst };
                assert_eq!(plan.route(packet), Route::Dropped(DropReason::NotEncrypted), "{packet:?}");
                assert_eq!(plan.tables.kilo_egress(packet), Err(DropReason::NoHop), "{packet:?}");
                assert!(!plan.tables.masquerades(packet), "{packet:?}");
            }
        }
        for node in &lost {
            let cidr = node.pod_cidrs[0];
            assert_eq!(plan.tables.prefix[&cidr].hop, HOP_NONE);
            assert_eq!(plan.tables.masq_dst.get(&cidr), Some(&MASQ_EXCLUDE));
            assert!(plan.net.unreachable.contains(&cidr) && !is_routed(&plan, &cidr.to_string()));
        }
        // The address of a node elsewhere is closed, too, even for the host itself.
        for node in &lost[1..] {
            let dst = private(node);
            for src in [pod(&ready[own]), private(&ready[own])] {
                assert_eq!(plan.route(Packet { src, dst }), Route::Dropped(DropReason::NotEncrypted));
                assert!(!plan.tables.masquerades(Packet { src, dst }));
            }
        }
        // Within the location, the host reaches it like any host of the network.
        let dst = private(&lost[0]);
        assert_eq!(plan.route(Packet { src: private(&ready[own]), dst }), Route::Other);
        for src in [pod(&ready[own]), pod(&ready[1])] {
            assert_eq!(plan.route(Packet { src, dst }), Route::Dropped(DropReason::NoHop));
        }
        // Everything else matches a plan that does not know these nodes.
        let without = plan_with(&ready, &ready[own].name, &settings, Facts::default());
        assert_eq!((&plan.wireguard, &plan.net.routes), (&without.wireguard, &without.net.routes));
    }
    // Without a key, its whereabouts are unknown; without pods, nothing is sent to it.
    let strangers = [Node { key: None, ..lost[1].clone() }, Node { pod_cidrs: vec![], ..lost[2].clone() }];
    let plan = plan_without(&ready, &strangers, "node-001", &settings, Facts::default());
    assert_eq!(plan, plan_of(&ready, "node-001", Facts::default()));
}

#[test]
fn pods_of_a_lost_node_that_others_carry_in_the_location_stay_open() {
    let (ready, lost) = (two(), [healthy(3, 1, false, false, 24), healthy(4, 2, false, false, 24)]);
    let native = settings(Granularity::Location, Encapsulate::Never);
    let beside = Settings { local: false, ..settings(Granularity::Location, Encapsulate::Always) };
    for settings in [native, beside] {
        let plan = plan_without(&ready, &lost, "node-001", &settings, Facts::default());
        let near = Packet { src: pod(&ready[0]), dst: pod(&lost[0]) };
        assert_eq!(plan.tables.uplink_egress(near), Ok(None));
        assert!(!plan.tables.masquerades(near), "the way there is not through the host's address");
        assert_eq!(clear(&plan, "10.42.4.0/24"), PREFIX_NEVER_CLEAR);
        assert!(plan.net.unreachable.contains(&net("10.42.4.0/24")));
        assert!(!plan.net.unreachable.contains(&net("10.42.3.0/24")));
    }
    // With cross granularity the host still reaches the nearby node's address without WireGuard, with full
    // granularity it does not. Its pods are closed in both.
    for (granularity, closed) in [(Granularity::Full, true), (Granularity::Cross, true)] {
        let settings = settings(granularity, Encapsulate::Always);
        let plan = plan_without(&ready, &lost, "node-001", &settings, Facts::default());
        assert_eq!(clear(&plan, "10.42.3.0/24") == PREFIX_NEVER_CLEAR, closed);
        let address = clear(&plan, &IpNet::from(private(&lost[0])).to_string());
        let full = granularity == Granularity::Full;
        let wanted = if full { PREFIX_NEVER_CLEAR } else { PREFIX_PODS_STEERED };
        assert_eq!(address, wanted, "{granularity:?}");
    }
}

#[test]
fn a_node_that_takes_part_loses_nothing_to_a_stale_object() {
    let mut ready = two();
    ready[1].allowed_location_ips = vec![net("10.64.0.0/10")];
    let settings = settings(Granularity::Location, Encapsulate::Always);
    let without = plan_with(&ready, "node-001", &settings, Facts::default());
    let mut stale = healthy(4, 3, false, false, 24);
    stale.internal_ip = ready[1].internal_ip;
    stale.pod_cidrs =
        vec![net("10.42.2.0/24"), net("10.42.2.128/25"), net("10.42.1.0/26"), net("10.64.0.0/10")];
    let plan = plan_without(&ready, &[stale.clone()], "node-001", &settings, Facts::default());
    assert_eq!((&plan.tables.prefix, &plan.net), (&without.tables.prefix, &without.net));
    // A prefix that another node offers around it does not open it.
    stale.pod_cidrs = vec![net("10.64.7.0/24")];
    let plan = plan_without(&ready, &[stale], "node-001", &settings, Facts::default());
    assert_eq!(plan.tables.prefix[&net("10.64.7.0/24")].hop, HOP_NONE);
}
