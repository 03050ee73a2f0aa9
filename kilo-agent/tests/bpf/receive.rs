//! `lan_ingress`: which packets a node accepts from its network, and from which senders.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;

use std::cell::RefCell;

use bpf::{
    IFINDEX, MEMBER, MEMBER_HOP, MEMBER_POD, OUTSIDE, OWN_POD, REMOTE_POD, SELF,
    decisions::Decisions,
    leader_tables, member_tables,
    packet::{
        self, PASS, PASS_AT_ONCE, REDIRECT, Ran, SHOT, checksums_hold, ethernet, ipv4, run, run_with,
        steered, udp,
    },
};
use kilo_common::{
    encap::{self, VXLAN_OVERHEAD},
    maps::{
        CONFIG_ENCAPSULATED, CONFIG_NATIVE, CONFIG_OFFERED, CONFIG_ONE_V4, CONFIG_SEVERAL_V4, HOP_LOCAL,
        HOP_NONE, HOP_REMOTE, NODE_GATEWAY, NodeValue, PREFIX_NEVER_CLEAR, PREFIX_ROUTE, PREFIX_SOURCE,
        PREFIX_VIA_WIREGUARD, PrefixValue, VXLAN_PORT,
    },
    packet::ETHERNET_LEN,
};
use kilo_core::{
    plan::{Hop, Tables, model, sender},
    settings::Tunnel,
};
use kilo_host::dataplane::Dataplane;

/// Length of Ethernet and IPv4 header, the least that `BPF_PROG_TEST_RUN` accepts (since Linux 6.17).
const SHORTEST: usize = 34;

fn open(tables: &Tables) -> Option<(bpf::BpfFs, Dataplane)> {
    let fs = bpf::bpffs()?;
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(tables).unwrap();
    Some((fs, dataplane))
}

fn drops_as(ran: &Ran, reason: &str) {
    assert_eq!((ran.verdict, ran.counted.as_slice()), (SHOT, &[reason][..]), "{ran:?}");
}

#[test]
fn a_steered_packet_for_a_local_pod_is_decapsulated_and_delivered() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let inner = udp(MEMBER_POD, OWN_POD, (1, 2), b"payload");
    let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
    assert_eq!((ran.verdict, ran.counted.as_slice()), (REDIRECT, &["deliver"][..]));
    assert_eq!(&ran.bytes[14..], inner, "the inner packet is as it was sent");
}

#[test]
fn wireguard_sends_nothing_through_itself() {
    // The kernel reads the protocol from bytes 12 and 13, where the source begins.
    let (own, pod, wireguard) = ([8, 0, 0, 2], [8, 0, 0, 3], [8, 0, 0, 4]);
    let mut tables = leader_tables();
    (tables.config.private_v4, tables.config.wireguard_v4) = (own, wireguard);
    let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_VIA_WIREGUARD;
    tables.prefix.insert("10.2.0.11/32".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags });
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let mut to = |source, port| {
        let packet = udp(source, [10, 2, 0, 11], (port, 51_820), b"handshake");
        run(&mut dataplane, "kilo_egress", &packet)
    };
    drops_as(&to(own, 51_820), "inside_tunnel");
    drops_as(&to(wireguard, 51_820), "inside_tunnel");
    assert_eq!(to(own, 51_822).counted, ["encrypt"], "somebody else's");
    assert_eq!(to(pod, 51_820).counted, ["encrypt"], "a pod's");
}

#[test]
fn wireguard_gets_nothing_from_an_address_that_is_reached_through_it() {
    let via_wireguard = [10, 2, 0, 11];
    let mut tables = leader_tables();
    let flags = PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_VIA_WIREGUARD;
    tables.prefix.insert("10.2.0.11/32".parse().unwrap(), PrefixValue { hop: HOP_REMOTE, flags });
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let mut from = |source, port| {
        let packet = ethernet(&udp(source, SELF, (51_820, port), b"handshake"));
        run(&mut dataplane, "lan_ingress", &packet)
    };
    drops_as(&from(via_wireguard, 51_820), "inside_tunnel");
    assert_eq!(from(via_wireguard, 51_822).verdict, PASS);
    assert_eq!(from([192, 0, 2, 21], 51_820).verdict, PASS);
    tables.config.flags &= !kilo_common::maps::CONFIG_GATEWAY;
    dataplane.write(&tables).unwrap();
    let packet = ethernet(&udp(via_wireguard, SELF, (51_820, 51_820), b"handshake"));
    assert_eq!(
        run(&mut dataplane, "lan_ingress", &packet).verdict,
        PASS,
        "a member's WireGuard has no peers"
    );
}

/// The array's value for a sender goes with the sender's entry, and when the sender may no longer use the
/// interface.
#[test]
fn a_sender_that_is_revoked_sends_no_transit() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let frame = steered(MEMBER, SELF, &udp(MEMBER_POD, REMOTE_POD, (1, 2), b"payload"));
    let none = [].into();
    let elsewhere = NodeValue { interfaces: [IFINDEX + 1, 0, 0, 0], ..bpf::node(0) };
    let revoked = [("unknown_sender", none), ("wrong_interface", [(MEMBER.into(), elsewhere)].into())];
    for (reason, senders) in revoked {
        let mut tables = leader_tables();
        dataplane.write(&tables).unwrap();
        assert_eq!(run(&mut dataplane, "lan_ingress", &frame).counted, ["transit"]);
        tables.node = senders;
        dataplane.write(&tables).unwrap();
        let ran = run(&mut dataplane, "lan_ingress", &frame);
        assert_eq!((ran.verdict, &ran.counted[..]), (SHOT, &[reason][..]));
    }
}

#[test]
fn a_leader_sends_transit_on_with_a_lower_ttl_and_a_right_checksum() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let inner = udp(MEMBER_POD, REMOTE_POD, (1, 2), b"payload");
    let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
    assert_eq!((ran.verdict, ran.counted.as_slice()), (REDIRECT, &["transit"][..]));
    assert_eq!(ran.bytes[14 + 8], 63);
    assert!(checksums_hold(&ran.bytes[14..]));
}

/// Counters of `kilo_egress` with these tables, after a leader's `lan_ingress` had `inner`.
fn then_egress(tables: &Tables, inner: &[u8]) -> Option<Vec<&'static str>> {
    let mut control_block = [0; 20];
    let (_fs, mut leader) = open(&leader_with_a_second())?;
    let ran = run_with(&mut leader, "lan_ingress", &steered(MEMBER, SELF, inner), &mut control_block);
    assert_eq!(ran.counted, ["transit"]);
    // A packet that the tables would send elsewhere shows whether they are consulted.
    let (_fs, mut dataplane) = open(tables)?;
    let other = udp([8, 0, 1, 2], MEMBER_POD, (1, 2), b"payload");
    Some(run_with(&mut dataplane, "kilo_egress", &other, &mut control_block).counted)
}

/// The leader's tables, in which the member still counts as a gateway, too.
fn leader_with_a_second() -> Tables {
    let mut tables = leader_tables();
    let cidrs = ["10.42.2.0/24".parse().unwrap()];
    let interfaces = tables.node[&MEMBER.into()].interfaces;
    let value = NodeValue { interfaces, ..sender(&tables.prefix, MEMBER_HOP, NODE_GATEWAY, &cidrs) };
    tables.node.insert(MEMBER.into(), value);
    tables
}

#[test]
fn what_lan_ingress_has_checked_goes_to_wireguard_without_another_look_and_only_on_a_leader() {
    let own = udp(MEMBER_POD, REMOTE_POD, (1, 2), b"payload");
    let Some(counted) = then_egress(&leader_tables(), &own) else { return };
    assert_eq!(counted, ["encrypt"]);
    assert_eq!(then_egress(&member_tables(), &own).unwrap(), ["steer"], "nothing falls through to WireGuard");
    let mut tables = leader_tables();
    tables.hop.remove(&HOP_REMOTE);
    assert_eq!(then_egress(&tables, &own).unwrap(), ["steer"], "nor where WireGuard is not the way out");
}

/// Counters of `kilo_ingress`, after `lan_ingress` of these tables had `inner`; the packet is one that the
/// tables would forward.
fn then_ingress(tables: &Tables, inner: &[u8]) -> Option<Vec<&'static str>> {
    let mut control_block = [0; 20];
    let (_fs, mut dataplane) = open(tables)?;
    let ran = run_with(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, inner), &mut control_block);
    assert_eq!(ran.counted, ["deliver"]);
    // The kernel reads the protocol from bytes 12 and 13, where the source begins.
    let other = udp([8, 0, 1, 2], MEMBER_POD, (1, 2), b"payload");
    Some(run_with(&mut dataplane, "kilo_ingress", &other, &mut control_block).counted)
}

#[test]
fn what_lan_ingress_delivers_is_the_stacks_without_another_look_unless_there_is_something_to_find_out() {
    let own = udp(MEMBER_POD, OWN_POD, (1, 2), b"payload");
    let Some(counted) = then_ingress(&leader_tables(), &own) else { return };
    assert_eq!(counted, ["decrypt"]);
    let another_look: [fn(&mut Tables); 6] = [
        |tables| tables.config.flags |= CONFIG_OFFERED,
        |tables| tables.config.flags |= CONFIG_SEVERAL_V4,
        |tables| tables.config.wireguard_v4 = OWN_POD,
        |tables| tables.config.overlay_v4 = OWN_POD,
        |tables| tables.config.direct_shift = 0,
        |tables| tables.device.values_mut().for_each(|device| device.masq_v4 = [10, 42, 1, 254]),
    ];
    for (number, change) in another_look.into_iter().enumerate() {
        let mut tables = leader_tables();
        change(&mut tables);
        assert_eq!(then_ingress(&tables, &own).unwrap(), ["forward"], "{number}");
    }
}

#[test]
fn what_another_leader_carries_is_looked_at_again_before_wireguard_has_it() {
    let carried = udp([10, 42, 9, 2], REMOTE_POD, (1, 2), b"payload");
    let Some(counted) = then_egress(&leader_tables(), &carried) else { return };
    assert_eq!(counted, ["steer"]);
}

#[test]
fn a_packet_at_the_end_of_its_life_goes_to_the_stack_which_notifies_the_sender() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    for ttl in [0, 1] {
        let inner = ipv4(MEMBER_POD, REMOTE_POD, 17, ttl, &[0; 8]);
        let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
        assert_eq!((ran.verdict, ran.counted.as_slice()), (REDIRECT, &["punt"][..]));
        assert_eq!(&ran.bytes[14..], inner, "the stack sees the TTL as it came");
    }
}

#[test]
fn a_node_that_does_not_lead_refuses_remote_destinations() {
    let Some((_fs, mut dataplane)) = open(&member_tables()) else { return };
    let inner = udp(MEMBER_POD, REMOTE_POD, (1, 2), b"");
    drops_as(&run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner)), "not_for_us");
}

#[test]
fn only_nodes_of_the_location_may_steer() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let inner = udp(MEMBER_POD, OWN_POD, (1, 2), b"");
    drops_as(&run(&mut dataplane, "lan_ingress", &steered([10, 1, 0, 99], SELF, &inner)), "unknown_sender");
}

#[test]
fn an_inner_source_must_belong_to_the_node_that_sends_it() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    for src in [OWN_POD, REMOTE_POD, [8, 8, 8, 8]] {
        let inner = udp(src, OWN_POD, (1, 2), b"");
        drops_as(&run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner)), "foreign_source");
    }
}

#[test]
fn the_leader_carries_sources_of_other_locations() {
    let Some((_fs, mut dataplane)) = open(&member_tables()) else { return };
    let inner = udp(REMOTE_POD, OWN_POD, (1, 2), b"");
    let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
    assert_eq!(ran.counted, ["deliver"]);
}

#[test]
fn ipip_that_is_not_for_this_node_is_left_alone() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let frame = steered(MEMBER, [10, 1, 0, 77], &udp(MEMBER_POD, OWN_POD, (1, 2), b""));
    let ran = run(&mut dataplane, "lan_ingress", &frame);
    assert_eq!((ran.verdict, ran.bytes, ran.counted.len()), (PASS, frame, 0));
}

#[test]
fn ordinary_traffic_is_left_alone() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    for ip in [udp([192, 0, 2, 9], SELF, (1, 51820), b"x"), ipv4([1, 1, 1, 1], SELF, 47, 64, &[0; 30])] {
        let frame = ethernet(&ip);
        let ran = run(&mut dataplane, "lan_ingress", &frame);
        assert_eq!((ran.verdict, ran.bytes, ran.counted.len()), (PASS, frame, 0));
    }
}

#[test]
fn a_fragmented_outer_packet_is_dropped() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let mut frame = steered(MEMBER, SELF, &udp(MEMBER_POD, OWN_POD, (1, 2), b""));
    frame[14 + 6] = 0x20;
    drops_as(&run(&mut dataplane, "lan_ingress", &frame), "outer_fragment");
}

#[test]
fn no_truncation_and_no_flipped_byte_gets_past_the_checks() {
    use proptest::prelude::*;
    let Some((_fs, dataplane)) = open(&leader_tables()) else { return };
    let dataplane = RefCell::new(dataplane);
    let whole = steered(MEMBER, SELF, &udp(MEMBER_POD, REMOTE_POD, (1, 2), b"some payload"));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(2000));
    runner
        .run(&(SHORTEST..=whole.len(), 14usize..whole.len(), any::<u8>()), |(length, at, value)| {
            let mut frame = whole.clone();
            frame[at] = value;
            frame.truncate(length);
            let ran = run(&mut dataplane.borrow_mut(), "lan_ingress", &frame);
            // Every packet passes untouched, is dropped for one reason, or is redirected and counted.
            match ran.verdict {
                PASS => prop_assert_eq!((ran.bytes, ran.counted.len()), (frame, 0)),
                SHOT => prop_assert_eq!(ran.counted.len(), 1),
                REDIRECT => {
                    prop_assert!(matches!(ran.counted[..], ["transit" | "deliver" | "punt"]));
                    prop_assert_eq!(ran.bytes.len() + 20, frame.len());
                }
                other => prop_assert!(false, "verdict {other}"),
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn program_and_model_agree_on_random_steered_packets() {
    use proptest::prelude::*;
    let leader = leader_tables();
    let member = member_tables();
    for tables in [leader, member] {
        let Some((_fs, dataplane)) = open(&tables) else { return };
        let dataplane = RefCell::new(dataplane);
        let addresses =
            vec![SELF, MEMBER, OWN_POD, MEMBER_POD, REMOTE_POD, [10, 5, 0, 1], [8, 8, 8, 8], [10, 42, 9, 1]];
        let pick = || prop::sample::select(addresses.clone());
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1500));
        runner
            .run(&(pick(), pick(), pick()), |(outer, src, dst)| {
                let wanted = Decisions(&tables)
                    .lan_ingress(outer.into(), model::Packet { src: src.into(), dst: dst.into() });
                let frame = steered(outer, SELF, &udp(src, dst, (1000, 2000), b"x"));
                let ran = run(&mut dataplane.borrow_mut(), "lan_ingress", &frame);
                let label = match wanted {
                    Ok((action, _)) => action.label(),
                    Err(reason) => reason.label(),
                };
                prop_assert_eq!(ran.counted, vec![label]);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn a_mark_of_congestion_outlives_the_outer_header() {
    let mut tables = leader_tables();
    // The fast path needs the prefix of the sender's pods.
    let cidrs = ["10.42.2.0/24".parse().unwrap()];
    let interfaces = tables.node[&MEMBER.into()].interfaces;
    let value = NodeValue { interfaces, ..sender(&tables.prefix, MEMBER_HOP, 0, &cidrs) };
    tables.node.insert(MEMBER.into(), value);
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    for (dst, action) in [(OWN_POD, "deliver"), (REMOTE_POD, "transit")] {
        for (outer, inner, wanted) in [
            (3, 2, Some(3)),
            (3, 1, Some(3)),
            (3, 3, Some(3)),
            (1, 2, Some(1)),
            (2, 1, Some(1)),
            (3, 0, None),
            (1, 0, Some(0)),
        ] {
            let with_tos = |packet: &mut [u8], bits: u8| {
                packet[1] = 0xb8 | bits;
                packet[10..12].fill(0);
                let sum = kilo_common::checksum::header(packet.first_chunk().unwrap());
                packet[10..12].copy_from_slice(&sum.to_be_bytes());
            };
            let mut packet = udp(MEMBER_POD, dst, (1, 2), b"payload");
            with_tos(&mut packet, inner);
            let mut frame = steered(MEMBER, SELF, &packet);
            with_tos(&mut frame[14..], outer);
            let ran = run(&mut dataplane, "lan_ingress", &frame);
            match wanted {
                None => drops_as(&ran, "congestion"),
                Some(bits) => {
                    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &[action][..]));
                    assert_eq!(ran.bytes[14 + 1], 0xb8 | bits, "{outer} {inner} {action}");
                    assert!(checksums_hold(&ran.bytes[14..]));
                }
            }
        }
    }
}

/// A VXLAN frame as a node's program writes it.
fn in_vxlan(from: [u8; 4], to: [u8; 4], inner: &[u8]) -> Vec<u8> {
    let mut frame = [0; ETHERNET_LEN + VXLAN_OVERHEAD];
    encap::vxlan_frame(&mut frame, &from, &to, &packet::carried(inner));
    [&frame[..], inner].concat()
}

/// Tables in which the member's packets arrive on another interface than the tests'.
fn elsewhere(mut tables: Tables) -> Tables {
    tables.config.vxlan_ifindex = 7;
    tables.node.get_mut(&MEMBER.into()).unwrap().interfaces = [7, 8, 0, 0];
    tables
}

#[test]
fn a_nodes_address_on_an_interface_that_does_not_lead_to_it_is_forged() {
    for tables in [leader_tables(), member_tables()] {
        let Some((_fs, mut dataplane)) = open(&elsewhere(tables.clone())) else { return };
        for dst in [OWN_POD, REMOTE_POD] {
            let inner = udp(MEMBER_POD, dst, (1, 2), b"payload");
            let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
            drops_as(&ran, "wrong_interface");
            let ran = run(&mut dataplane, "lan_ingress", &in_vxlan(MEMBER, SELF, &inner));
            drops_as(&ran, "wrong_interface");
        }
        let mut several = elsewhere(tables);
        several.node.get_mut(&MEMBER.into()).unwrap().interfaces = [7, 8, 9, IFINDEX];
        dataplane.write(&several).unwrap();
        let inner = udp(MEMBER_POD, OWN_POD, (1, 2), b"payload");
        let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
        assert_eq!(ran.counted, ["deliver"], "any of its interfaces will do");
    }
}

#[test]
fn a_pods_packet_without_outer_header_is_forged_on_another_interface() {
    let mut tables = elsewhere(leader_tables());
    tables.config.flags |= CONFIG_NATIVE;
    for hop in tables.hop.values_mut() {
        if let Hop::Node { tunnel, ifindex, .. } = hop {
            (*tunnel, *ifindex) = (Tunnel::None, 7);
        }
    }
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    for dst in [OWN_POD, REMOTE_POD] {
        let frame = ethernet(&udp(MEMBER_POD, dst, (1, 2), b"payload"));
        drops_as(&run(&mut dataplane, "lan_ingress", &frame), "wrong_interface");
    }
    tables.node.get_mut(&MEMBER.into()).unwrap().interfaces = [7, IFINDEX, 0, 0];
    dataplane.write(&tables).unwrap();
    let frame = ethernet(&udp(MEMBER_POD, OWN_POD, (1, 2), b"payload"));
    assert_eq!(run(&mut dataplane, "lan_ingress", &frame).counted, ["deliver"]);
}

#[test]
fn what_must_not_be_sent_in_clear_is_not_received_in_clear() {
    let one_address = |mut tables: Tables| {
        tables.config.flags |= CONFIG_ONE_V4;
        tables
    };
    for mut tables in [leader_tables(), member_tables(), one_address(leader_tables())] {
        tables.prefix.insert("10.42.1.0/24".parse().unwrap(), guarded(HOP_LOCAL));
        tables.prefix.insert("10.42.8.0/24".parse().unwrap(), guarded(HOP_NONE));
        tables.config.flags |= CONFIG_ENCAPSULATED;
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        for src in [MEMBER_POD, REMOTE_POD, [10, 42, 1, 9], [10, 42, 8, 7]] {
            for dst in [OWN_POD, REMOTE_POD, MEMBER_POD] {
                for packet in [udp(src, dst, (1, 2), b"payload"), ipv4(src, dst, 47, 64, b"no ports")] {
                    drops_as(&run(&mut dataplane, "lan_ingress", &ethernet(&packet)), "arrived_in_clear");
                }
            }
            let elsewhere = ethernet(&udp(src, [192, 0, 2, 77], (1, 2), b"payload"));
            assert_eq!(
                run(&mut dataplane, "lan_ingress", &elsewhere).verdict,
                PASS,
                "{src:?}: not for the mesh"
            );
        }
        // Packets of a host with a route to the pods, or of another node itself, need no encryption.
        for src in [[10, 1, 0, 77], MEMBER, OUTSIDE] {
            let frame = ethernet(&udp(src, OWN_POD, (1, 2), b"payload"));
            assert_eq!(run(&mut dataplane, "lan_ingress", &frame).verdict, PASS, "{src:?}");
        }
        // Beside another CNI, pods' packets arrive as that CNI sends them; so they may where nodes send
        // without outer header.
        let mut beside = tables.clone();
        beside.prefix.insert(
            "10.42.1.0/24".parse().unwrap(),
            PrefixValue { flags: PREFIX_ROUTE | PREFIX_SOURCE, ..guarded(HOP_LOCAL) },
        );
        tables.config.flags &= !CONFIG_ENCAPSULATED;
        for open in [beside, tables] {
            dataplane.write(&open).unwrap();
            let frame = ethernet(&udp(REMOTE_POD, OWN_POD, (1, 2), b"payload"));
            assert_eq!(run(&mut dataplane, "lan_ingress", &frame).verdict, PASS);
        }
    }
}

fn guarded(hop: u32) -> PrefixValue {
    PrefixValue { hop, flags: PREFIX_ROUTE | PREFIX_SOURCE | PREFIX_NEVER_CLEAR }
}

#[test]
fn the_vxlan_device_gets_what_a_node_sent_to_the_private_address_and_nothing_else() {
    let mut tables = leader_tables();
    tables.config.vxlan_ifindex = 7;
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let inner = udp(MEMBER_POD, OWN_POD, (1, 2), b"payload");
    let fragment = |mut frame: Vec<u8>| {
        frame[14 + 6] = 0x20;
        frame
    };
    let whole = fragment(in_vxlan(MEMBER, SELF, &inner));
    assert_eq!(run(&mut dataplane, "lan_ingress", &whole).verdict, PASS_AT_ONCE);
    let forged = fragment(in_vxlan([10, 1, 0, 99], SELF, &inner));
    drops_as(&run(&mut dataplane, "lan_ingress", &forged), "unknown_sender");
    dataplane.write(&elsewhere(leader_tables())).unwrap();
    drops_as(&run(&mut dataplane, "lan_ingress", &whole), "wrong_interface");
    // Sent to another address, it is the stack's; at the VXLAN device nothing marks it as checked.
    let public = in_vxlan(MEMBER, bpf::PUBLIC, &inner);
    assert_eq!(run(&mut dataplane, "lan_ingress", &public).verdict, PASS);
    drops_as(&run(&mut dataplane, "tunnel_ingress", &ethernet(&inner)), "unchecked");
}

/// What the device decapsulates waits in a queue, and a packet that does not would overtake it.
#[test]
fn packets_in_vxlan_do_not_overtake_those_that_the_device_decapsulates() {
    let mut tables = leader_tables();
    tables.config.vxlan_ifindex = 7;
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let inner = udp(MEMBER_POD, OWN_POD, (1, 2), b"payload");
    let single = in_vxlan(MEMBER, SELF, &inner);
    let fragment = |from| {
        let mut frame = in_vxlan(from, SELF, &inner);
        frame[14 + 6] = 0x20;
        frame
    };
    assert_eq!(run(&mut dataplane, "lan_ingress", &single).counted, ["deliver"]);
    drops_as(&run(&mut dataplane, "lan_ingress", &fragment([10, 1, 0, 99])), "unknown_sender");
    assert_eq!(
        run(&mut dataplane, "lan_ingress", &single).counted,
        ["deliver"],
        "a stranger changes nothing"
    );
    assert_eq!(run(&mut dataplane, "lan_ingress", &fragment(MEMBER)).verdict, PASS_AT_ONCE);
    let behind = run(&mut dataplane, "lan_ingress", &single);
    assert_eq!((behind.verdict, behind.bytes), (PASS_AT_ONCE, single.clone()), "by the device, too");
    let again = std::time::Instant::now();
    while run(&mut dataplane, "lan_ingress", &single).counted != ["deliver"] {
        assert!(again.elapsed() < std::time::Duration::from_secs(1), "the device is slower, and idle by now");
    }
}

#[test]
fn nobody_but_our_programs_and_devices_sends_to_a_nodes_vxlan_port() {
    for one_address in [0, CONFIG_ONE_V4] {
        let mut tables = leader_tables();
        tables.config.flags |= one_address;
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        let inner = udp(MEMBER_POD, REMOTE_POD, (1, 2), b"payload");
        let frame = in_vxlan(SELF, MEMBER, &inner);
        drops_as(&run(&mut dataplane, "uplink_egress", &frame), "forged_vxlan");
        // With options, and in fragments.
        let mut options = frame.clone();
        options[14] = 0x46;
        options.splice(34..34, [1; 4]);
        let length = u16::try_from(options.len() - 14).unwrap();
        options[16..18].copy_from_slice(&length.to_be_bytes());
        drops_as(&run(&mut dataplane, "uplink_egress", &options), "forged_vxlan");
        let mut fragment = frame.clone();
        fragment[14 + 6] = 0x20;
        drops_as(&run(&mut dataplane, "uplink_egress", &fragment), "forged_vxlan");
        let signal = [&[0, 1, 7, 8][..], b"kgs1", &[0; 56]].concat();
        let signal = ethernet(&udp(SELF, MEMBER, (VXLAN_PORT, VXLAN_PORT), &signal));
        drops_as(&run(&mut dataplane, "uplink_egress", &signal), "forged_vxlan");
        // Too short to tell how the whole datagram begins.
        let mut first = ethernet(&udp(SELF, MEMBER, (53, VXLAN_PORT), b"a"));
        first[14 + 6] = 0x20;
        drops_as(&run(&mut dataplane, "uplink_egress", &first), "forged_vxlan");
        // To a foreign host or another port: unrelated to the mesh.
        let outside = in_vxlan(SELF, [192, 0, 2, 99], &inner);
        assert_eq!(run(&mut dataplane, "uplink_egress", &outside).verdict, PASS);
        let dns = ethernet(&udp(SELF, MEMBER, (1, 53), b"x"));
        assert_eq!(run(&mut dataplane, "uplink_egress", &dns).verdict, PASS);
    }
}

#[test]
fn answers_to_a_flow_that_masquerading_gave_the_vxlan_port_pass() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    for answer in [&b"x"[..], b"\x08\x00\x85\x80 as DNS", b"\x00\x01\x85\x80 as DNS"] {
        let sent = ethernet(&udp(SELF, MEMBER, (53, VXLAN_PORT), answer));
        assert_eq!(run(&mut dataplane, "uplink_egress", &sent).verdict, PASS);
        // From another node and from outside: programs after this one must see it.
        for from in [MEMBER, [192, 0, 2, 99]] {
            let received = ethernet(&udp(from, SELF, (53, VXLAN_PORT), answer));
            assert_eq!(run(&mut dataplane, "lan_ingress", &received).verdict, PASS);
        }
    }
}

#[test]
fn every_node_that_claims_an_address_may_send_from_it() {
    // a0 is annotated with the member's address: one hop for both.
    let mut tables = leader_tables();
    let claimed = PrefixValue { hop: MEMBER_HOP, flags: PREFIX_ROUTE | PREFIX_SOURCE };
    tables.prefix.insert("10.42.7.0/24".parse().unwrap(), claimed);
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    for src in [MEMBER_POD, [10, 42, 7, 2]] {
        let inner = udp(src, OWN_POD, (1, 2), b"payload");
        let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
        assert_eq!(ran.counted, ["deliver"]);
    }
}
