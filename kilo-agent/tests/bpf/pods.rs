//! `uplink_egress` for packets of pods to other nodes' own addresses; `lan_ingress` for packets from those
//! nodes to pods.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;

use bpf::{
    MEMBER, MEMBER_HOP, MEMBER_POD, OUTSIDE, OWN_POD, PUBLIC, SELF, leader_tables, member_tables,
    packet::{PASS, REDIRECT, checksums_hold, ethernet, run, steered, udp},
};
use kilo_common::{
    icmp_too_big::{LEN_V4, LEN_V6, QUOTED},
    maps::{HOP_LOCAL, PREFIX_PODS_STEERED, PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue},
};
use kilo_core::{
    plan::{Hop, Tables},
    settings::Tunnel,
};
use kilo_host::dataplane::Dataplane;

fn open(tables: &Tables) -> Option<(bpf::BpfFs, Dataplane)> {
    let fs = bpf::bpffs()?;
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(tables).unwrap();
    Some((fs, dataplane))
}

/// The packet in a frame with distinguishable link-layer addresses.
fn frame(packet: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(packet);
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0xb]);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 0xa]);
    frame
}

#[test]
fn a_pods_packet_to_another_node_itself_is_handed_to_the_program_that_steers() {
    for tables in [leader_tables(), member_tables()] {
        let Some((_fs, mut dataplane)) = open(&tables) else { return };
        let sent = frame(&udp(OWN_POD, MEMBER, (1000, 10250), b"hello"));
        let ran = run(&mut dataplane, "uplink_egress", &sent);
        assert_eq!((ran.verdict, ran.counted.len()), (REDIRECT, 0));
        assert_eq!(ran.bytes, sent, "its source stays the pod's, and kilo_egress sees what left the stack");
    }
}

#[test]
fn what_the_host_sends_there_and_what_pods_send_elsewhere_leaves_as_ever() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    for (src, dst) in [(SELF, MEMBER), (PUBLIC, MEMBER)] {
        let sent = frame(&udp(src, dst, (1000, 10250), b"hello"));
        let ran = run(&mut dataplane, "uplink_egress", &sent);
        assert_eq!((ran.verdict, ran.counted.len()), (PASS, 0), "{src:?} to {dst:?}");
        assert_eq!(ran.bytes, sent);
    }
    let ran = run(&mut dataplane, "uplink_egress", &frame(&udp(OWN_POD, OUTSIDE, (1000, 53), b"question")));
    assert_eq!((ran.verdict, &ran.counted[..]), (PASS, &["masquerade"][..]));
}

#[test]
fn without_encapsulation_such_packets_are_on_their_way_already() {
    let mut tables = leader_tables();
    for hop in tables.hop.values_mut() {
        if let Hop::Node { tunnel, .. } = hop {
            *tunnel = Tunnel::None;
        }
    }
    let value = PrefixValue { hop: MEMBER_HOP, flags: PREFIX_SOURCE };
    tables.prefix.insert("10.1.0.12/32".parse().unwrap(), value);
    tables.masq_dst.insert("10.1.0.12/32".parse().unwrap(), kilo_common::maps::MASQ_EXCLUDE);
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let ran = run(&mut dataplane, "uplink_egress", &frame(&udp(OWN_POD, MEMBER, (1000, 10250), b"hello")));
    assert_eq!((ran.verdict, ran.counted.len()), (PASS, 0));
}

#[test]
fn a_sender_hears_of_a_packet_larger_than_the_way_carries() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let fits = frame(&udp(OWN_POD, MEMBER, (1000, 10250), &[7; 1480 - 28]));
    assert!(run(&mut dataplane, "uplink_egress", &fits).counted.is_empty());
    let sent = frame(&udp(OWN_POD, MEMBER, (1000, 10250), &[7; 1481 - 28]));
    let ran = run(&mut dataplane, "uplink_egress", &sent);
    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &["too_big"][..]));
    let (link, packet) = ran.bytes.split_at(14);
    assert_eq!((&link[..6], &link[6..12], &link[12..]), (&sent[6..12], &sent[..6], &sent[12..14]));
    assert_eq!(packet.len(), LEN_V4);
    assert_eq!((&packet[12..16], &packet[16..20]), (&MEMBER[..], &OWN_POD[..]), "as if from there");
    assert_eq!((packet[9], &packet[20..22], &packet[26..28]), (1, &[3, 4][..], &1480_u16.to_be_bytes()[..]));
    assert_eq!(&packet[28..], &sent[14..14 + QUOTED], "its own packet, byte for byte");
    assert!(checksums_hold(packet));
}

#[test]
fn of_ipv6_too() {
    let (pod, own, node): (std::net::Ipv6Addr, std::net::Ipv6Addr, std::net::Ipv6Addr) =
        ("fd42:1::2".parse().unwrap(), "fd00:1::11".parse().unwrap(), "fd00:1::12".parse().unwrap());
    let mut tables = leader_tables();
    let flags = PREFIX_ROUTE | PREFIX_SOURCE;
    tables.prefix.insert("fd42:1::/64".parse().unwrap(), PrefixValue { hop: HOP_LOCAL, flags });
    let steered = flags | PREFIX_PODS_STEERED;
    tables.prefix.insert("fd00:1::12/128".parse().unwrap(), PrefixValue { hop: MEMBER_HOP, flags: steered });
    tables.node = [(node.into(), bpf::node(0))].into();
    tables.config.private_v6 = own.octets();
    let member = tables.hop.get_mut(&MEMBER_HOP).unwrap();
    if let Hop::Node { local, remote, mtu, .. } = member {
        (*local, *remote, *mtu) = (own.into(), node.into(), 1460);
    }
    let Some((_fs, mut dataplane)) = open(&tables) else { return };
    let packet = |length: usize| {
        let mut ip = vec![0x60, 0, 0, 0];
        ip.extend(u16::try_from(length - 40).unwrap().to_be_bytes());
        ip.extend([17, 64]);
        ip.extend(pod.octets());
        ip.extend(node.octets());
        ip.resize(length, 7);
        let mut frame = frame(&ip);
        frame[12..14].copy_from_slice(&0x86dd_u16.to_be_bytes());
        frame
    };
    let ran = run(&mut dataplane, "uplink_egress", &packet(1460));
    assert_eq!((ran.verdict, ran.counted.len()), (REDIRECT, 0));
    let sent = packet(1461);
    let ran = run(&mut dataplane, "uplink_egress", &sent);
    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &["too_big"][..]));
    let answer = &ran.bytes[14..];
    assert_eq!((answer.len(), answer[6], &answer[40..42]), (LEN_V6, 58, &[2, 0][..]));
    assert_eq!((&answer[8..24], &answer[24..40]), (&node.octets()[..], &pod.octets()[..]));
    assert_eq!(&answer[44..48], &1460_u32.to_be_bytes());
    assert_eq!(&answer[48..], &sent[14..14 + QUOTED]);
}

#[test]
fn what_another_node_itself_sends_to_a_pod_stays_on_the_interface_that_leads_there() {
    let Some((_fs, mut dataplane)) = open(&leader_tables()) else { return };
    let packet = udp(MEMBER, OWN_POD, (10250, 1000), b"hello");
    let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &packet));
    assert_eq!((ran.verdict, &ran.counted[..]), (PASS, &["deliver"][..]), "rp_filter wants it here");
    assert_eq!(&ran.bytes[14..], &packet);
    let packet = udp(MEMBER_POD, OWN_POD, (10250, 1000), b"hello");
    let ran = run(&mut dataplane, "lan_ingress", &steered(MEMBER, SELF, &packet));
    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &["deliver"][..]), "a pod's comes from kilo0");
}
